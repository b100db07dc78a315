"""Measures whole models on several GPUs: time to the first token and per token, by mesh axis.

    python benchmarks/scale_out.py [--out benchmarks/results/scale_out.json] [--ranks 2]
    python benchmarks/scale_out.py --axis one --phase prefill --tokens 131072    # a part of it

Weights are random, in the shapes of real models, and drawn on their devices. The policy is the
default one at density 0.1. Each axis (`one` is a single GPU) runs in its own process, `one` with a
single visible GPU; all add rows to one file and replace rows of the same name, so that a run can be
split into parts, or repeated with more ranks. Prompts are read as in `generate`; tokens are decoded
greedily from a cache that has read a prompt.

`--phase lists` compares block indices: bit for bit between all ranks, and with one GPU's for the
same weights and prompt, counting differing blocks. Differences occur because hidden states that are
summed in another order differ in rounding, and blocks with nearly equal scores swap ranks.

Every row has a floor, the least possible time on all GPUs: for a prompt the arithmetic of the
linear layers and of the attended pairs over the rate of a large matmul, for a token the bytes that
each rank must read over the copy rate. `sent_bytes` counts the bytes that one rank receives in the
layers of a call (`sketchwalk_jax.sharding`).

Measurements that exceed a GPU's memory are not started, but listed with the bytes they need.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import end_to_end
import jax
import jax.numpy as jnp
import numpy as np
from end_to_end import (
    MODELS,
    NEW_TOKENS,
    TINY,
    describe,
    draw_prompt,
    measure_rates,
    measured,
    prompt_flops,
    prompt_program,
    time_prompt,
    time_tokens,
    token_bytes,
    token_program,
)
from jax.sharding import AxisType

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.inference.cache import sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.calls import cache_bytes
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.memory import num_bytes
from sketchwalk_jax.models import init_params
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import flatten_params, param_shapes
from sketchwalk_jax.sharding import Placement, place

Row = dict[str, Any]
AXES = ("one", "sequence", "tensor", "data")
LLAMA_70B = dataclasses.replace(
    MODELS["llama-3.1-8b"],
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
)
EXPERTS = dataclasses.replace(MODELS["qwen3-30b-a3b"], max_position_embeddings=2**20)
SHAPES = {
    "llama-3.1-8b": MODELS["llama-3.1-8b"],
    "llama-3.1-70b": LLAMA_70B,
    "qwen3-30b-a3b": EXPERTS,
}
PIECE = 2**15
QUERIES, PARTS = 32, 64  # queries whose scores a kernel sums, and parts of a token's scores
RULE = Rule("sketchwalk", "recommended", 0.1)
ENOUGH_SECONDS = 15.0  # longer prompts run once and are not traced
# Fields that identify a row.
KEY = ("model", "phase", "tokens", "batch", "axis", "ranks", "policy", "preset", "density")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell(end_to_end.Cell):
    """One measurement; its phase may also be `"lists"`.

    Attributes:
      axis: Mesh axis over which the model is sharded, or `"one"` for a single GPU.
      batch: Number of sequences on all ranks together.
      rule: The policy.
    """

    axis: str
    batch: int = 1
    rule: Rule = RULE

    def row(self, ranks: int = 1, **found: Any) -> Row:
        """Makes a row: the fields that name the cell, and the results."""
        own = {"axis": self.axis, "ranks": 1 if self.axis == "one" else ranks}
        return super().row(**own, implementation=f"by {self.axis}") | found


def cells(ranks: int, *, is_quick: bool) -> Iterator[Cell]:
    """Lists all measurements, short ones first."""
    if is_quick:
        for axis in AXES[:3]:
            yield Cell(model="tiny", phase="prefill", axis=axis, tokens=512, chunk_size=256)
        yield Cell(model="tiny", phase="decode", axis="one", tokens=512)
        yield Cell(model="tiny", phase="decode", axis="tensor", tokens=512)
        yield Cell(model="tiny", phase="decode", axis="data", tokens=512, batch=ranks)
        for axis in ("sequence", "tensor"):
            yield Cell(model="tiny", phase="lists", axis=axis, tokens=512)
        return
    small, large, experts = SHAPES
    for axis in ("sequence", "tensor"):
        yield Cell(model=small, phase="lists", axis=axis, tokens=2**14)
    for model, axis in itertools.product((small, experts), AXES[:3]):
        yield Cell(model=model, phase="prefill", axis=axis, tokens=2**17)
        if axis != "sequence":
            yield Cell(model=model, phase="decode", axis=axis, tokens=2**17, chunk_size=PIECE)
        if axis != "tensor":  # activations of the whole prompt do not fit one GPU
            piece = PIECE if axis == "one" else None
            yield Cell(model=model, phase="prefill", axis=axis, tokens=2**19, chunk_size=piece)
    yield Cell(model=small, phase="prefill", axis="sequence", tokens=2**20)
    for axis, batch in (("one", 8), ("data", 8 * ranks)):
        piece = PIECE // 8
        yield Cell(
            model=small, phase="decode", axis=axis, tokens=2**16, batch=batch, chunk_size=piece
        )
    for phase in ("prefill", "decode"):
        yield Cell(model=large, phase=phase, axis="tensor", tokens=2**17, chunk_size=PIECE)


def filtered(cell: Cell) -> Row:
    """Returns the values that filters are compared with."""
    return {name: getattr(cell, name) for name in ("model", "axis", "phase", "tokens")}


def main() -> None:
    """Runs the requested measurements, a process for each axis, and adds rows to the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "scale_out.json")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of one host")
    parser.add_argument("--model", action="append", help="default: all")
    parser.add_argument("--axis", action="append", choices=AXES, help="default: all")
    parser.add_argument("--phase", action="append", choices=("prefill", "decode", "lists"))
    parser.add_argument("--tokens", type=int, action="append", help="default: all lengths")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this")
    parser.add_argument("--quick", action="store_true", help="one tiny model, two repeats")
    parser.add_argument("--missing", action="store_true", help="only what the file lacks")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the command that started it
    options = parser.parse_args()
    every = list(cells(options.ranks, is_quick=options.quick))
    wanted = [cell for cell in every if common.is_asked(options, **filtered(cell))]
    common.check_filters(options, map(filtered, every), wanted)
    started = time.monotonic()
    if options.missing:
        is_done = common.is_measured(options.out, KEY)
        wanted = [cell for cell in wanted if not is_done(cell.row(options.ranks))]
        if not wanted:
            print(f"{options.out}: nothing is missing")
    if options.child:
        run(wanted, options, started)
        return
    command = shlex.join(["python", *sys.argv])
    for axis in AXES:
        if not any(cell.axis == axis for cell in wanted):
            continue
        environment = dict(os.environ)
        if axis == "one":
            seen = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = seen[0]
        left = options.seconds - (time.monotonic() - started)
        if left <= 0:
            break
        own = [one for one in sys.argv[1:] if one not in AXES and one != "--axis"]
        own += ["--axis", axis, "--child", command, "--seconds", str(left)]
        done = subprocess.run([sys.executable, __file__, *own], env=environment)
        if done.returncode:
            raise SystemExit(done.returncode)


def run(wanted: list[Cell], options: argparse.Namespace, started: float) -> None:
    """Measures cells of one axis, and writes each one as soon as it is done."""
    keep_compiled_programs()
    repeats = 2 if options.quick else options.repeats
    meta = common.describe_machine(
        shlex.split(options.child),
        is_quick=options.quick,
        repeats=repeats,
    )
    axis = wanted[0].axis
    ranks = 1 if axis == "one" else options.ranks
    rates = measure_rates(is_quick=options.quick)

    def seconds_left() -> float:
        return options.seconds - (time.monotonic() - started)

    meta |= rates
    by_model: dict[str, list[Cell]] = {}
    for cell in wanted:
        by_model.setdefault(cell.model, []).append(cell)
    for name, own in by_model.items():
        config = TINY if options.quick else SHAPES[name]
        needed = functools.partial(needed_bytes, config, ranks)
        make = functools.partial(Model, config, axis, ranks, rates, repeats)
        for cell, found in measured(own, needed, make, seconds_left):
            row = cell.row(ranks, **found)
            common.add_rows(options.out, meta, [row], KEY)
            print(describe_row(row), flush=True)


def needed_bytes(config: ModelConfig, ranks: int, cell: Cell) -> float:
    """Computes the first rank's least memory: its shards of weights, cache and activations."""
    where, shapes = make_placement(config, cell.axis, ranks), param_shapes(config)
    weights = sum(
        math.prod(where(path, shape).shard_shape(shape.shape)) * shape.dtype.itemsize
        for path, shape in flatten_params(shapes).items()
    )
    cache = cache_bytes(config, cell.rule.make(), cell.batch, cell.tokens, config.dtype)
    if cell.phase == "lists":  # plus the weights and cache of the single-device run
        return weights + num_bytes(shapes) + cache
    return weights + (cache + end_to_end.activation_bytes(config, cell)) / ranks


def describe_row(row: Row) -> str:
    """Formats a row as one line for the terminal."""
    if row["error"] or row["phase"] != "lists":
        return describe(row)
    return f"by {row['axis']} {row['model']} lists: {row['differing_blocks']}"


def make_placement(config: ModelConfig, axis: str, ranks: int) -> Placement:
    """Places a model on a mesh with one axis; on one device, weights are drawn the same way."""
    name = "tensor" if axis == "one" else axis
    mesh = jax.make_mesh(
        (ranks,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks]
    )
    return place(mesh, config)


def sent_bytes(
    config: ModelConfig,
    *,
    policy: Any,
    axis: str,
    ranks: int,
    batch: int,
    tokens: int,
    chunk_size: int | None = None,
    is_token: bool,
) -> float:
    """Counts the bytes that one rank receives in all layers for a prompt or a token (`sharding`).

    The count is for the kernels, whose scores of a prompt are per key/value head.

    Args:
      config: The model.
      policy: The policy.
      axis: Mesh axis.
      ranks: Number of ranks along the axis.
      batch: Number of sequences of a rank.
      tokens: Tokens of a prompt, or in the cache.
      chunk_size: Tokens per piece, or None for one piece.
      is_token: Whether a token is decoded.
    """
    others = (ranks - 1) / ranks
    number = np.dtype(config.dtype).itemsize
    of_keys = 2 * config.num_kv_heads * config.head_dim * number
    sparse = len(sparse_layers(config, policy))
    new = 1 if is_token else tokens
    rows, units = (
        -(-new // policy.block_size),
        tokens // getattr(policy, "unit_size", policy.block_size),
    )
    if axis == "tensor":
        of_experts = 4 if config.num_experts else number  # summed in float32
        hidden = 2 * others * new * config.hidden_size * (number + of_experts)
        queries = config.num_heads // config.num_kv_heads * policy.representatives
        scores = 4 * config.num_kv_heads * rows * units * -(-queries // QUERIES)
        if is_token:  # powers in bfloat16, with two float32 numbers for each part
            scores = config.num_heads * (2 * units + 2 * 4 * PARTS)
        return batch * (config.num_layers * hidden + sparse * others * scores)
    if axis == "sequence" and is_token:
        found = 2 * others * 4 * config.num_heads * (config.head_dim + 1)
        return batch * config.num_layers * found
    if axis == "sequence":
        pieces = -(-tokens // chunk_size) if chunk_size else 0
        return batch * config.num_layers * others * of_keys * (tokens + pieces * tokens)
    return 0.0


class Model:
    """Random weights of one model on a mesh, and the measurements with them."""

    def __init__(
        self, config: ModelConfig, axis: str, ranks: int, rates: dict[str, float], repeats: int
    ) -> None:
        """Draws the weights on their devices."""
        self.config, self._axis, self._ranks, self._repeats = config, axis, ranks, repeats
        self._copy = rates["copy_tb_per_s"] * 1e12
        self._matmul = rates["matmul_tflops"] * 1e12
        where = make_placement(config, axis, ranks)
        self._where = where if ranks > 1 else None
        self._params = init_params(jax.random.key(0), config, sharding=where)

    def compile(self, cell: Cell) -> tuple[Any, ...]:
        """Compiles programs for prompt and decoding, and draws the prompt; nothing for lists."""
        if cell.phase == "lists":
            return ()
        new = NEW_TOKENS if cell.phase == "decode" else 0
        settings = self._settings(cell)
        reading = prompt_program(cell.tokens, settings)
        prompt = self._prompt(cell, cell.tokens - new)
        compiled = reading.lower(self._params, *prompt).compile()
        if not new:
            return compiled, prompt, None
        where = compiled.output_shardings
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(reading, self._params, *prompt),
            where,
        )
        decoding = token_program(
            dataclasses.replace(settings, chunk_size=None),
            out_shardings=(None, where),  # its outputs are its next inputs
        )
        limit = jax.ShapeDtypeStruct((), jnp.int32)
        return compiled, prompt, decoding.lower(self._params, state, limit).compile()

    def measure(self, cell: Cell, compiled: Callable[[], tuple[Any, ...]]) -> Row:
        """Measures seconds, floor, parts, bytes sent and memory; or compares block indices."""
        programs = compiled()
        if cell.phase == "lists":
            return self._lists(cell)
        reading, prompt, decoding = programs
        found: Row = (
            self._decode(cell, decoding, reading(self._params, *prompt))
            if decoding
            else self._prefill(cell, reading, prompt)
        )
        sent = sent_bytes(
            self.config,
            policy=cell.rule.make(),
            axis=self._axis,
            ranks=self._ranks,
            batch=cell.batch,
            tokens=cell.tokens,
            chunk_size=cell.chunk_size,
            is_token=cell.phase == "decode",
        )
        # A trace has the kernels of all ranks.
        own = {name: one / self._ranks for name, one in found["parts_ms"].items()}
        return {**found, "parts_ms": own, "peak_gib": common.peak_gib(reading), "sent_bytes": sent}

    def _settings(self, cell: Cell) -> Settings:
        return Settings(
            model_config=self.config,
            policy=cell.rule.make(),
            chunk_size=cell.chunk_size,
            placement=self._where,
        )

    def _prompt(self, cell: Cell, tokens: int) -> tuple[Any, Any, Any]:
        found = draw_prompt(self.config, cell.batch, tokens)
        if self._where is None:
            return found
        return jax.device_put(found, (self._where.tokens, *[self._where.sharding()] * 2))

    def _prefill(self, cell: Cell, program: Any, prompt: tuple[Any, Any, Any]) -> Row:
        repeats = self._repeats if cell.tokens <= 2**17 else 1
        found = time_prompt(program, self._params, prompt, repeats, ENOUGH_SECONDS)
        work = prompt_flops(self.config, cell.tokens, found["measured_density"]) * cell.batch
        return found | {
            "flops": work,
            "floor_seconds": work / self._matmul / self._ranks,
        }

    def _decode(self, cell: Cell, program: Any, state: Any) -> Row:
        found, cache = time_tokens(program, self._params, state, self._repeats)
        held, density = num_bytes((cache.key, cache.value)), found["measured_density"]
        read = token_bytes(self.config, cell.batch, held, density)
        # Each rank of `data` reads all weights; ranks of the other axes share them.
        weights = token_bytes(self.config, cell.batch, 0, 0.0)
        more = (self._ranks - 1) * weights if self._axis == "data" else 0
        read += num_bytes(cache.statistics) + more
        return found | {
            "read_bytes": read,
            "floor_seconds": read / self._copy / self._ranks,
        }

    def _lists(self, cell: Cell) -> Row:
        """Compares a prompt's block indices between ranks, and with one device's."""
        config, policy = self.config, cell.rule.make()
        tokens = np.asarray(self._prompt(cell, cell.tokens)[0])
        one = make_placement(config, "one", 1)
        found = []
        for params, where in (
            (self._params, self._where),
            (jax.device_put(self._params, one.params), None),
        ):
            sizes: dict[str, Any] = {"batch": cell.batch, "max_tokens": cell.tokens}
            cache = sw.init_cache(config, policy, **sizes, sharding=where)
            _, _, lists = sw.prefill(
                params, tokens, cache, model_config=config, policy=policy, return_selection=True
            )
            found.append(lists)
        shared, alone = found
        is_equal = all(
            np.array_equal(np.asarray(shard.data), np.asarray(x)[shard.index])
            for x in (shared.ids, shared.counts)
            for shard in x.addressable_shards
        )
        num_units = cell.tokens // alone.block_size  # blocks, or pages
        ids = [np.asarray(x.ids).reshape(-1, x.ids.shape[-1]) for x in found]
        listed = differing = 0
        for own, other in zip(*ids, strict=True):
            own, other = set(own[own < num_units]), set(other[other < num_units])
            listed, differing = listed + len(other), differing + len(other - own)
        return {
            "lists_equal_on_ranks": is_equal,
            "counts_equal": bool(jnp.array_equal(np.asarray(shared.counts), alone.counts)),
            "listed_blocks": listed,
            "differing_blocks": differing,
        }


if __name__ == "__main__":
    main()
