"""Measures whole models on one device: time to the first token and per token, dense and sparse.

    python benchmarks/end_to_end.py [--out benchmarks/results/end_to_end.json] [--model NAME]

`--cpu` measures small models in float32 on a CPU, without transformers and the printed rule, and
adds rows to `end_to_end_cpu.json`.

Weights are random, in the shapes of real models: times do not depend on their values. Prompts are
read by programs for their length, dense ones on GPUs by cuDNN. Tokens are decoded greedily, as in
`generate`, from a cache full of normal keys and values with the policy's statistics. transformers,
with torch's SDPA and the same shapes, runs first in its own process, which frees all its memory.

Rows are added to the file, each with the command and date of its run. So a run can be split into
parts of some minutes, until nothing is missing:

    python benchmarks/end_to_end.py --missing --seconds 400 [--model NAME ...]

Programs are compiled in parallel, some at a time, and then timed one after another.

Every row has a floor, the least possible time. For a decoded token it is the bytes that must be
read (the weights, one row of the input embedding, the attended keys and values, the statistics)
over this GPU's copy rate. Of experts, only those count that the sequences choose. For a prompt it
is the arithmetic of the linear layers and of the attended pairs over the rate of a large matmul.
Rows of `--cpu` have none.
`parts_ms` is the time of the GPU's kernels by part, from a trace of one more run.

`--weights bfloat16 --weights float8` measures each type of weights in one process and adds rows
that name the type to another file, `end_to_end_weights.json`.

Measurements that do not fit are listed with the bytes that they need. Those that take half a minute
or more, or as long as `--enough` says, run once and are not traced.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.inference.cache import Cache, sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.calls import cache_bytes
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.inference.generation import (
    DecodeState,
    decode_tokens,
    greedy_steps,
    start_decoding,
)
from sketchwalk_jax.inference.sampling import Sampling, seen_tokens, sequence_keys
from sketchwalk_jax.memory import num_bytes
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import (
    flatten_params,
    num_stack_axes,
    param_shapes,
    unflatten_params,
)
from sketchwalk_jax.models.quantized import quantize_params
from sketchwalk_jax.models.rope import RopeConfig
from sketchwalk_jax.policies.base import LayerShape, Span

PyTree = Any
Row = dict[str, Any]
_LLAMA_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=2**20,
    dtype="bfloat16",
)
_QWEN_7B = dataclasses.replace(
    _LLAMA_8B,
    model_type="qwen2",
    vocab_size=152064,
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    qkv_bias=True,
)
MODELS = {
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.2-1b": dataclasses.replace(
        _LLAMA_8B,
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _QWEN_7B,
    "qwen2.5-1.5b": dataclasses.replace(
        _QWEN_7B,
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_heads=12,
        num_kv_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": dataclasses.replace(
        _QWEN_7B,
        vocab_size=151936,
        num_layers=24,
        hidden_size=896,
        intermediate_size=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": dataclasses.replace(
        _LLAMA_8B,
        model_type="qwen3_moe",
        vocab_size=151936,
        num_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_kv_heads=4,
        max_position_embeddings=2**18,
        rope=RopeConfig(theta=1e7),
        qk_norm=True,
        num_experts=128,
        experts_per_token=8,
        expert_intermediate_size=768,
        norm_topk_prob=True,
    ),
}
_CPU = ModelConfig(
    model_type="llama",
    vocab_size=256,
    num_layers=6,
    hidden_size=256,
    intermediate_size=768,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position_embeddings=2**14,
)
CPU_MODELS = {
    "6-layers-of-256": _CPU,
    "3-layers-of-1024": dataclasses.replace(
        _CPU, num_layers=3, hidden_size=1024, intermediate_size=3072, num_heads=16, head_dim=64
    ),
    "sketchwalk_8m": dataclasses.replace(
        ModelConfig.from_pretrained(bundled_model()), dtype="float32"
    ),
}
TINY = dataclasses.replace(
    _LLAMA_8B,
    vocab_size=256,
    num_layers=3,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
QUICK = {
    "tiny": TINY,
    "tiny-experts": dataclasses.replace(
        TINY,
        model_type="qwen3_moe",
        qk_norm=True,
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=32,
    ),
}
LENGTHS = tuple(2**n for n in range(12, 18))
CPU_LENGTHS = (2048, 3072, 4096, 6144, 8192, 16384)
# Longer prompts, read in pieces.
LONG = {
    "llama-3.1-8b": (2**18, 2**19),
    "llama-3.2-1b": (2**20,),
    "qwen3-30b-a3b": (2**18,),
}
PIECE = 2**15
BATCHES = (1, 8, 32)
DENSITIES = (0.1, 0.2)
PAPER_DENSE_LAYERS = 2  # as in the paper
NEW_TOKENS = 32  # tokens of a timed loop
ENOUGH_SECONDS = 30.0  # longer measurements run once
MATMUL = 8192
# Part that a kernel belongs to: the first one with a string that the kernel's name contains.
PARTS = {
    "attention": ("attention", "block_sparse", "combine_decode", "sdpa", "flash", "fmha"),
    "observing": ("quantized_keys", "block_sums"),
    "scores": (
        "representatives",
        "page_max_logits",
        "block_scores",
        "dequantized_offsets",
        "max_logits",
        "page_scores_kernel",
        "token_scores",
    ),
    "walk and lists": ("select", "token_page_scores", "token_lists", "walk"),
    "linear": (
        "linear",
        "expert",
        "decode_matmul",
        "grouped",
        "nvjet",
        "gemm",
        "gemv",
        "cutlass",
        "cublas",
    ),
}
REST = "rest"
# Fields that identify a row.
NAMES = ("implementation", "model", "phase", "tokens", "batch", "policy", "preset", "density")
NAMES = (*NAMES, "chunk_size", "weights")
WEIGHTS = ("bfloat16", "float8", "int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement.

    Attributes:
      model: Name of the model.
      phase: `"prefill"` or `"decode"`.
      tokens: Tokens of a prompt, or in the cache of each sequence.
      batch: Number of sequences.
      rule: The policy.
      chunk_size: Tokens per piece, or None for one piece.
      weights: Type of the linear layers' weights, or None if no types are compared.
    """

    model: str
    phase: str
    tokens: int
    batch: int
    rule: Rule
    chunk_size: int | None = None
    weights: str | None = None

    def row(self, **found: Any) -> Row:
        """Makes a row: the fields that name the cell, and the results."""
        rule = self.rule
        weights = {} if self.weights is None else {"weights": self.weights}
        return {
            "model": self.model,
            "tokens": self.tokens,
            "batch": self.batch,
            "phase": self.phase,
            "policy": rule.policy,
            "preset": rule.preset,
            "density": rule.density,
            "dense_layers": dict(rule.fields).get("dense_layers", 0),
            "implementation": "ours",
            "chunk_size": self.chunk_size,
            **weights,
            **found,
        }


def main() -> None:
    """Runs all measurements and writes the results, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: end_to_end.json, or as --weights says")
    parser.add_argument("--model", action="append", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--phase", action="append", choices=("prefill", "decode"))
    parser.add_argument("--tokens", type=int, action="append", help="default: all lengths")
    parser.add_argument("--batch", type=int, action="append", help="in decode; default: all")
    parser.add_argument("--policy", action="append", help="policy or preset; default: all")
    parser.add_argument("--density", type=float, action="append", help="default: all")
    parser.add_argument("--weights", action="append", choices=WEIGHTS, help="compares types")
    parser.add_argument("--missing", action="store_true", help="only what the file lacks")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this")
    parser.add_argument(
        "--enough", type=float, default=ENOUGH_SECONDS, help="run once what is slower"
    )
    parser.add_argument("--without-pieces", action="store_true", help="prompts in one piece alone")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--only-transformers", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="small models on a CPU")
    parser.add_argument("--quick", action="store_true", help="one tiny model, two repeats")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # the process of transformers
    options = parser.parse_args()
    if options.peer:
        run_peer(json.loads(options.peer))
        return
    if options.cpu:
        if options.weights or options.only_transformers:
            parser.error("--cpu measures neither types of weights nor transformers")
        jax.config.update("jax_platforms", "cpu")
    if options.out is None:
        part = "_cpu" if options.cpu else "_weights" if options.weights else ""
        options.out = common.RESULTS / f"end_to_end{part}.json"
    keep_compiled_programs()
    started = time.monotonic()
    models = QUICK if options.quick else CPU_MODELS if options.cpu else MODELS
    names = options.model or list(models)[: 1 if options.quick else None]
    if unknown := [name for name in names if name not in models]:
        parser.error(f"--model must be one of {', '.join(models)}, got {', '.join(unknown)}")
    repeats = 2 if options.quick else options.repeats
    is_done = common.is_measured(options.out, NAMES)

    def is_left(row: Row) -> bool:
        return not (options.missing and is_done(row))

    def seconds_left() -> float:
        return options.seconds - (time.monotonic() - started)

    is_alone = options.without_transformers or options.quick or options.weights or options.cpu
    wanted = {
        (name, weights): [
            dataclasses.replace(cell, weights=weights)
            for cell in cells(name, options)
            if matches(cell, options)
        ]
        for name in (() if options.only_transformers else names)
        for weights in options.weights or [None]
    }
    peers = {name: list(peer_cells(name, options)) for name in (() if is_alone else names)}
    asked = [cell.row() for own in wanted.values() for cell in own]
    asked += [row for own in peers.values() for row in own]
    every = (filtered(cell) for name in names for cell in cells(name, options))
    common.check_filters(options, every, asked)
    found: list[Row] = []
    for name, own in peers.items():  # before JAX reserves the memory
        own = list(filter(is_left, own))
        for row in transformers_rows(name, models[name], own, repeats, seconds_left):
            found.append(row)
            tqdm.write(describe(row))
    meta = common.describe_machine(is_quick=options.quick, repeats=repeats)
    common.note_asked(meta, asked, *NAMES)
    common.add_rows(options.out, meta, found, NAMES)

    def add(row: Row) -> None:
        tqdm.write(describe(row))
        common.add_rows(options.out, meta, [row], NAMES)

    wanted = {key: [cell for cell in own if is_left(cell.row())] for key, own in wanted.items()}
    wanted = {key: own for key, own in wanted.items() if own}
    rates = {}
    if wanted:
        rates = measure_rates(is_quick=options.quick, weights=options.weights or ())
    meta |= rates
    for (name, weights), own in wanted.items():
        if seconds_left() <= 0:
            return
        sizes: dict[str, Any] = {"enough": options.enough, "weights": weights}
        make = functools.partial(Model, models[name], rates, repeats, **sizes)
        needed = functools.partial(needed_bytes, models[name])
        for cell, row in measured(own, needed, make, seconds_left):
            if options.cpu:
                row.pop("floor_seconds", None)
            add(cell.row(**row))


def measured[SomeCell: Cell](
    cells: Sequence[SomeCell],
    needed_bytes: Callable[[SomeCell], float],
    make_model: Callable[[], Any],
    seconds_left: Callable[[], float],
) -> Iterator[tuple[SomeCell, Row]]:
    """Measures each cell of a model, or reports the bytes that it needs if it does not fit.

    Args:
      cells: The measurements.
      needed_bytes: Least memory of each measurement.
      make_model: Draws the weights if a cell fits.
      seconds_left: Returns the time left in this run.
    """
    fitting = []
    for cell in cells:
        needed = needed_bytes(cell)
        if needed < device_room():
            fitting.append(cell)
        else:
            yield cell, {"error": common.DOES_NOT_FIT, "needed_gib": round(needed / 2**30, 1)}
    if not fitting:
        return
    model = make_model()
    for cell, program in common.compiled(fitting, model.compile, seconds_left):
        yield cell, common.found_or_error(model.measure, cell, program)
        gc.collect()  # free the memory of a failed cell
    del model
    gc.collect()  # free the weights before the next model's are made


def cells(name: str, options: argparse.Namespace) -> list[Cell]:
    """Lists all measurements of a model, the most important and shortest first."""
    own = rules(is_quick=options.quick)
    without_paper = [rule for rule in own if rule.preset != "paper"]
    lengths, batches, piece = LENGTHS, BATCHES, PIECE
    if options.cpu:
        lengths, batches, own = CPU_LENGTHS, BATCHES[:2], without_paper
    if options.quick:
        lengths, batches, piece = (512,), (1, 2), 256
    long = () if options.quick else LONG.get(name, ())
    found = []
    for tokens in lengths:
        loads = [("prefill", 1), *(("decode", batch) for batch in batches)]
        for (phase, batch), rule in itertools.product(loads, own):
            found.append(Cell(model=name, phase=phase, tokens=tokens, batch=batch, rule=rule))
    for tokens, rule in itertools.product((lengths[-1], *long), without_paper):
        cell = Cell(model=name, phase="prefill", tokens=tokens, batch=1, rule=rule)
        found += [dataclasses.replace(cell, chunk_size=piece)] if piece < tokens else []
        if tokens in long:
            found.append(dataclasses.replace(cell, phase="decode"))
    return sorted(found, key=lambda cell: (cell.rule.preset == "paper", cell.batch, cell.tokens))


def rules(*, is_quick: bool) -> list[Rule]:
    """Lists dense attention, the recommended preset and the paper's."""
    found = [DENSE]
    # Quick prompts are so short that the recommended policy would keep all their keys.
    few = (("min_tokens", 128),) if is_quick else ()
    for density in DENSITIES[:1] if is_quick else DENSITIES:
        found.append(Rule("sketchwalk", "recommended", density, few))
        fields = (("dense_layers", PAPER_DENSE_LAYERS),)
        found.append(Rule("sketchwalk", "paper", density, fields))
    return found


def filtered(cell: Cell) -> Row:
    """Returns the values that filters are compared with."""
    values: Row = {"phase": cell.phase, "tokens": cell.tokens}
    values["policy"] = cell.rule.preset or cell.rule.policy
    if cell.phase == "decode":
        values["batch"] = cell.batch
    if cell.rule != DENSE:
        values["density"] = cell.rule.density
    return values


def matches(cell: Cell, options: argparse.Namespace) -> bool:
    """Whether a measurement was requested."""
    if options.without_pieces and cell.chunk_size is not None:
        return False
    return common.is_asked(options, **filtered(cell))


def describe(row: Row) -> str:
    """Formats a row as one line for the terminal."""
    name = row["preset"] or row["policy"]
    name += f" {row['density']:g}" if row["density"] not in (None, 1.0) else ""
    text = f"{row['implementation']} {row['model']} {row['phase']:<8}{row['tokens']:>8}"
    text += f" x{row['batch']:<3}{name:<16}{row.get('weights', '')} "
    if row["error"]:
        needed = row.get("needed_gib")
        return f"{text} {row['error']}" + ("" if needed is None else f", needs {needed} GiB")
    text += f"{1e3 * row['seconds']['median']:.3f} ms"
    floor = row.get("floor_seconds")
    return text + (f", {row['seconds']['median'] / floor:.2f} of its floor" if floor else "")


def measure_rates(*, is_quick: bool, weights: Sequence[str] = ()) -> dict[str, float]:
    """Measures how fast this device copies (bytes read and written) and multiplies large matrices.

    The matrices are bfloat16 (float32 on a CPU), and also float8 if `weights` contains it.
    """
    on_cpu = jax.default_backend() == "cpu"
    large = (2**26, 2048) if on_cpu else (2**31, MATMUL)
    size, side = (2**22, 256) if is_quick else large
    source = jax.random.normal(jax.random.key(0), (size,), "float32" if on_cpu else "bfloat16")
    copy = jax.jit(jnp.copy)
    matrix = source[: side * side].reshape(side, side)
    multiply = jax.jit(jnp.dot)
    times = 8  # per call, so that the launch overhead does not count

    def repeated(program: Any, *arguments: Any) -> Any:
        for _ in range(times):
            out = program(*arguments)
        return out

    copied = common.seconds(lambda: repeated(copy, source), 7)["median"] / times
    found = {"copy_tb_per_s": 2 * source.nbytes / copied / 1e12}
    product = common.seconds(lambda: repeated(multiply, matrix, matrix), 7)["median"] / times
    found["matmul_tflops"] = 2 * side**3 / product / 1e12
    if "float8" in weights:
        # Transpose the right one, as weights are: only this layout is multiplied in float8.
        narrow = matrix.astype(jnp.float8_e4m3fn)
        dims = (((1,), (1,)), ((), ()))
        multiply = jax.jit(
            functools.partial(
                jax.lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.bfloat16
            )
        )
        product = common.seconds(lambda: repeated(multiply, narrow, narrow), 7)["median"] / times
        found["matmul_float8_tflops"] = 2 * side**3 / product / 1e12
    return found


def device_room() -> float:
    """Returns the bytes of a device that measurements may fill."""
    stats = jax.devices()[0].memory_stats() or {}
    return 0.97 * stats.get("bytes_limit", 2**34)


def activation_bytes(config: ModelConfig, cell: Cell) -> int:
    """Computes the bytes of one layer's activations for the tokens read at a time.

    Experts compute a few tokens at a time, so their activations do not count.
    """
    if cell.phase != "prefill":
        return 0
    heads = config.num_heads + 2 * config.num_kv_heads
    mlp = 2 * config.intermediate_size if config.mlp_layers else 0
    width = 3 * config.hidden_size + mlp + heads * config.head_dim
    return 2 * cell.batch * (cell.chunk_size or cell.tokens) * width


def needed_bytes(config: ModelConfig, cell: Cell) -> float:
    """Sums the bytes of weights, cache, statistics, and activations of tokens read at a time."""
    kind = None if cell.weights == config.dtype else cell.weights
    cache = cache_bytes(config, cell.rule.make(), cell.batch, cell.tokens, config.dtype)
    return num_bytes(param_shapes(config, weights=kind)) + cache + activation_bytes(config, cell)


class Model:
    """Random weights of one model, and the measurements with them."""

    def __init__(
        self,
        config: ModelConfig,
        rates: dict[str, float],
        repeats: int,
        *,
        enough: float = ENOUGH_SECONDS,
        weights: str | None = None,
    ) -> None:
        """Draws the weights."""
        self.config, self._repeats, self._enough = config, repeats, enough
        self._copy = rates["copy_tb_per_s"] * 1e12
        self._matmul = rates["matmul_tflops"] * 1e12
        name = "matmul_float8_tflops" if weights == "float8" else "matmul_tflops"
        self._linear = rates[name] * 1e12
        self._params = random_params(config, None if weights == config.dtype else weights)

    def _empty(self, cell: Cell) -> Cache:
        return sw.init_cache(
            self.config, cell.rule.make(), batch=cell.batch, max_tokens=cell.tokens
        )

    def _settings(self, cell: Cell) -> Settings:
        return Settings(
            model_config=self.config, policy=cell.rule.make(), chunk_size=cell.chunk_size
        )

    def compile(self, cell: Cell) -> tuple[Any, Any]:
        """Compiles a measurement's program; returns it with a function that makes its input."""
        params, settings = shapes(self._params), self._settings(cell)
        if cell.phase == "prefill":
            program = prompt_program(cell.tokens, settings)
            make = functools.partial(draw_prompt, self.config, cell.batch, cell.tokens)
            arguments = (params, *jax.eval_shape(make))
        else:
            program = token_program(settings)
            make = functools.partial(self._state, cell)
            arguments = (params, jax.eval_shape(make), jax.ShapeDtypeStruct((), jnp.int32))
        return program.lower(*arguments).compile(), jax.jit(make).lower().compile()

    def _state(self, cell: Cell) -> DecodeState:
        """Makes a cache that is full except for the tokens to decode."""
        empty, config, policy = self._empty(cell), self.config, cell.rule.make()
        size, length = empty.key.shape[1:], cell.tokens - NEW_TOKENS
        lengths = jnp.full((cell.batch,), length, jnp.int32)
        valid = jnp.broadcast_to(jnp.arange(empty.capacity) < length, (cell.batch, empty.capacity))
        span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
        shape = LayerShape(config.num_heads, size[2], size[3], empty.key.dtype)
        kernels = self._settings(cell).selection_kernels("prefill")

        def one_layer(layer: Any) -> tuple[Any, Any, Any]:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(3), layer), 3)
            key, value = (jax.random.normal(one, size, empty.key.dtype) for one in keys[:2])
            if not policy.phases:
                return key, value, None
            query = jax.random.normal(keys[2], (*size[:2], config.num_heads, size[3]), key.dtype)
            blank = policy.init_statistics(
                shape, batch=cell.batch, num_blocks=empty.capacity // policy.block_size
            )
            own = policy.update_statistics(query, key, blank, span=span, kernel_config=kernels)
            return key, value, own

        key, value, found = jax.lax.map(one_layer, jnp.arange(config.num_layers, dtype=jnp.int32))
        wanted = np.asarray(sparse_layers(config, policy), np.int32)
        statistics = jax.tree.map(lambda x: x[wanted], found) if len(wanted) else empty.statistics
        cache = dataclasses.replace(
            empty, key=key, value=value, statistics=statistics, lengths=lengths
        )
        return DecodeState(
            logits=jnp.zeros((cell.batch, config.vocab_size), jnp.float32),
            cache=cache,
            seen=seen_tokens(
                jnp.zeros((cell.batch, 1), jnp.int32),
                jnp.ones((cell.batch,), jnp.int32),
                vocab_size=config.vocab_size,
            ),
            keys=sequence_keys(jax.random.key(4), batch=cell.batch),
            lengths=jnp.zeros((cell.batch,), jnp.int32),
            is_done=jnp.zeros((cell.batch,), bool),
            is_finite=jnp.ones((cell.batch,), bool),
        )

    def measure(self, cell: Cell, compiled: Callable[[], tuple[Any, Any]]) -> Row:
        """Measures seconds, floor, parts and memory."""
        program, make = compiled()
        found = (self._prefill if cell.phase == "prefill" else self._decode)(cell, program, make())
        cache = jax.eval_shape(functools.partial(self._empty, cell))
        return found | {
            "peak_gib": common.peak_gib(program),
            "temporary_bytes": common.memory(program)["temporary_bytes"],
            "method_state_bytes": num_bytes(cache.statistics),
            "kv_cache_bytes": num_bytes((cache.key, cache.value)),
        }

    def _prefill(self, cell: Cell, program: Any, prompt: tuple[Any, Any, Any]) -> Row:
        repeats = self._repeats if cell.tokens <= 2**16 else min(self._repeats, 2)
        found = time_prompt(program, self._params, prompt, repeats, self._enough)
        linear = cell.batch * linear_flops(self.config, cell.tokens)
        pairs = cell.batch * pair_flops(self.config, cell.tokens, found["measured_density"])
        return found | {"floor_seconds": linear / self._linear + pairs / self._matmul}

    def _decode(self, cell: Cell, program: Any, state: DecodeState) -> Row:
        found, cache = time_tokens(program, self._params, state, self._repeats)
        held = num_bytes((cache.key, cache.value)) * cell.tokens / cache.capacity
        read = token_bytes(
            self.config, cell.batch, held, found["measured_density"], shapes(self._params)
        )
        return found | {"floor_seconds": (read + num_bytes(cache.statistics)) / self._copy}


def draw_prompt(config: ModelConfig, batch: int, tokens: int) -> tuple[Any, Any, Any]:
    """Draws prompts, their lengths and a key, the arguments of `start_decoding`."""
    drawn = jax.random.randint(jax.random.key(1), (batch, tokens), 0, config.vocab_size)
    return drawn, jnp.full((batch,), tokens, jnp.int32), jax.random.key(2)


def prompt_program(capacity: int, settings: Settings) -> Any:
    """Makes a program that reads a prompt into a new cache and returns a `DecodeState`."""
    read = functools.partial(start_decoding, capacity=capacity, settings=settings)
    return jax.jit(lambda params, *prompt: read(params, *prompt, None)[0])


def token_program(settings: Settings, **options: Any) -> Any:
    """Makes a program that decodes `NEW_TOKENS` tokens per sequence; takes options of `jit`."""
    sampling = Sampling.greedy()
    decode = functools.partial(
        decode_tokens,
        num_tokens=NEW_TOKENS,
        eos_token_ids=(),
        pad_token_id=0,
        settings=settings,
        greedy_steps=greedy_steps(sampling),
    )
    return jax.jit(
        lambda params, state, limit: decode(params, state, sampling, limit),
        donate_argnums=1,
        **options,
    )


def time_prompt(
    program: Any,
    params: PyTree,
    prompt: tuple[Any, ...],
    repeats: int,
    enough: float = ENOUGH_SECONDS,
) -> Row:
    """Measures seconds, density and parts of reading a prompt with a `start_decoding` program."""
    densities = []

    def call() -> Any:
        state = program(params, *prompt)
        densities.append(state.cache.density.prefill)
        return state.logits

    timed = common.seconds(call, repeats, enough=enough)
    return {
        "seconds": timed,
        "measured_density": float(jnp.mean(densities[-1])),
        "parts_ms": parts(call) if timed["median"] < enough else {},
    }


def time_tokens(
    program: Any, params: PyTree, state: DecodeState, repeats: int
) -> tuple[Row, Cache]:
    """Measures seconds, density and parts of a decoded token; returns them and the cache.

    Raises:
      ValueError: If logits are not finite.
    """
    lengths, held = np.asarray(state.cache.lengths), state.cache.lengths.sharding
    limit = jnp.asarray(NEW_TOKENS, jnp.int32)

    def call() -> Any:
        nonlocal state
        # Reset the lengths to decode the same tokens again.
        cache = dataclasses.replace(state.cache, lengths=jax.device_put(lengths, held))
        tokens, state = program(params, dataclasses.replace(state, cache=cache), limit)
        return tokens

    timed = common.seconds(call, repeats)
    timed = timed | {name: timed[name] / NEW_TOKENS for name in ("median", "q25", "q75")}
    density = float(jnp.mean(state.cache.density.decode))
    if not bool(jnp.all(jnp.isfinite(state.logits))):
        raise ValueError("logits must be finite")
    found = {name: one / NEW_TOKENS for name, one in parts(call).items()}
    return {"seconds": timed, "measured_density": density, "parts_ms": found}, state.cache


def prompt_flops(config: ModelConfig, tokens: int, density: float) -> float:
    """Counts the FLOPs of a prompt: linear layers and attention."""
    return linear_flops(config, tokens) + pair_flops(config, tokens, density)


def linear_flops(config: ModelConfig, tokens: int) -> float:
    """Counts the FLOPs of a prompt in the linear layers."""
    weights = 0.0
    for path, leaf in flatten_params(param_shapes(config)).items():
        if path[0] == "layers" and leaf.ndim > 2:
            is_of_experts = num_stack_axes(path) == 2
            weights += leaf.size * (chosen_share(config, 1) if is_of_experts else 1)
    return 2 * tokens * weights


def chosen_share(config: ModelConfig, tokens: int) -> float:
    """Expected share of the experts that some of the tokens choose, if all are equally likely."""
    return 1 - (1 - config.experts_per_token / config.num_experts) ** tokens


def pair_flops(config: ModelConfig, tokens: int, density: float) -> float:
    """Counts the FLOPs of a prompt's queries with the attended keys and values."""
    pairs = tokens * (tokens + 1) / 2 * density * config.num_layers
    return 4 * pairs * config.num_heads * config.head_dim


def token_bytes(
    config: ModelConfig,
    batch: int,
    cache_bytes: float,
    density: float,
    params: PyTree | None = None,
) -> float:
    """Counts the bytes of weights, and of attended keys and values, for a token of every sequence.

    `params` are the shapes of the weights; by default the weights have the model's own type.
    """
    params = param_shapes(config) if params is None else params
    weights = float(num_bytes(params))
    if config.num_experts:
        own = {path: x for path, x in flatten_params(params).items() if num_stack_axes(path) == 2}
        weights -= (1 - chosen_share(config, batch)) * num_bytes(own)
    if not config.tie_word_embeddings:
        number = np.dtype(config.dtype).itemsize
        weights -= number * (config.vocab_size - batch) * config.hidden_size
    return weights + density * cache_bytes


def parts(call: Callable[[], Any]) -> dict[str, float]:
    """Traces one call; returns the milliseconds of the GPU's kernels by part."""
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if "GPU" in plane.name else ():
                    for event in line.events if "Stream" in line.name else ():
                        found[part_of(event.name)] += event.duration_ns / 1e6
    return {name: round(found[name], 4) for name in (*PARTS, REST) if found[name]}


def part_of(name: str) -> str:
    """Returns the part that a kernel belongs to."""
    for part, words in PARTS.items():
        if any(word in name for word in words):
            return part
    return REST


def random_params(config: ModelConfig, weights: str | None = None) -> PyTree:
    """Draws normal weights, a layer at a time; norms are 1.

    With `weights`, each array is quantised before the next one is drawn, to save memory.
    """

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: Any, shape: tuple[int, ...]) -> Any:
        return (0.02 * jax.random.normal(key, shape, config.dtype)).astype(config.dtype)

    @functools.partial(jax.jit, static_argnums=1)
    def stacked(key: Any, shape: tuple[int, ...]) -> Any:
        return jax.lax.map(lambda one: normal(one, shape[1:]), jax.random.split(key, shape[0]))

    found = {}
    for index, (path, leaf) in enumerate(flatten_params(param_shapes(config)).items()):
        if path[-1] == "scale":
            found[path] = jnp.ones(leaf.shape, leaf.dtype)
            continue
        draw = stacked if leaf.ndim >= 3 else normal
        one = unflatten_params({path: draw(jax.random.key(100 + index), leaf.shape)})
        if weights is not None and path[0] == "layers":
            one = quantize_params(one, weights)
        found |= flatten_params(jax.block_until_ready(one))
    return unflatten_params(found)


def shapes(tree: PyTree) -> PyTree:
    """Replaces arrays by their shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# transformers


def peer_row(name: str, phase: str, tokens: int, batch: int, **found: Any) -> Row:
    """Makes a row of transformers."""
    cell = Cell(model=name, phase=phase, tokens=tokens, batch=batch, rule=DENSE)
    return cell.row(**found) | {"implementation": "transformers"}


def peer_cells(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Lists all rows of transformers, without results."""
    lengths = [one for one in LENGTHS if not options.tokens or one in options.tokens]
    batches = [one for one in BATCHES if not options.batch or one in options.batch]
    for batch, tokens in itertools.product(batches, lengths):
        for phase in options.phase or ("prefill", "decode"):
            if phase == "decode" or batch == 1:
                yield peer_row(name, phase, tokens, batch)


def transformers_rows(
    name: str,
    config: ModelConfig,
    own: Sequence[Row],
    repeats: int,
    seconds_left: Callable[[], float],
) -> Iterator[Row]:
    """Yields rows of transformers from a process whose end frees the memory."""
    left = seconds_left()
    if left <= 0 or not own:
        return
    wanted = {
        "fields": dataclasses.asdict(config),
        "repeats": repeats,
        "seconds": None if math.isinf(left) else left,
        "rows": [[row["phase"], row["tokens"], row["batch"]] for row in own],
    }
    command = [sys.executable, __file__, "--peer", json.dumps(wanted, default=str)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("{"):
                yield peer_row(name, **json.loads(line))
    if process.returncode:
        print(f"transformers ended with {process.returncode}", file=sys.stderr)


def run_peer(wanted: dict[str, Any]) -> None:
    """Times transformers with torch's SDPA, one line of JSON for each row."""
    import torch
    import transformers

    fields = wanted["fields"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "tie_word_embeddings")
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }
    experts = {
        "num_experts": fields["num_experts"],
        "num_experts_per_tok": fields["experts_per_token"],
        "moe_intermediate_size": fields["expert_intermediate_size"],
        "norm_topk_prob": fields["norm_topk_prob"],
    }
    config = kinds[fields["model_type"]](
        **{name: fields[name] for name in names},
        **(experts if fields["num_experts"] else {}),
        num_hidden_layers=fields["num_layers"],
        num_attention_heads=fields["num_heads"],
        num_key_value_heads=fields["num_kv_heads"],
        head_dim=fields["head_dim"],
        max_position_embeddings=fields["max_position_embeddings"],
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    @torch.inference_mode()
    def read(tokens: Any) -> Any:
        cache = transformers.DynamicCache(config=config)
        return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode(cache: Any, token: Any, count: int) -> None:
        for _ in range(count):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
            token = token[:, None]

    def timed(call: Callable[[], Any], repeats: int) -> dict[str, float]:
        def wait(_: Any) -> None:
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        return common.seconds(call, repeats, wait=wait, enough=ENOUGH_SECONDS)

    def say(phase: str, tokens: int, batch: int, **found: Any) -> None:
        where = {"phase": phase, "tokens": tokens, "batch": batch, "versions": versions}
        print(json.dumps(where | {"error": None} | found), flush=True)

    started = time.monotonic()
    for phase, tokens, batch in wanted["rows"]:
        if wanted["seconds"] and time.monotonic() - started > wanted["seconds"]:
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        prompt = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
        try:
            if phase == "prefill":
                call, repeats, steps = functools.partial(read, prompt), min(wanted["repeats"], 3), 1
            else:
                cache = read(prompt).past_key_values
                cache.batch_repeat_interleave(batch)
                token = prompt[:, :1].expand(batch, 1)
                call, repeats, steps = functools.partial(decode, cache, token, 8), 3, 8
                del cache
            found = timed(call, repeats)
            found |= {name: found[name] / steps for name in ("median", "q25", "q75")}
            peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            say(phase, tokens, batch, seconds=found, peak_gib=peak)
        except torch.OutOfMemoryError:
            say(phase, tokens, batch, error=common.DOES_NOT_FIT)
        call = None  # frees its cache


if __name__ == "__main__":
    main()
