"""Times each kernel operation and its peer in turns, in one process on one device.

    python benchmarks/kernels.py [--op decode ...] [--missing] [--seconds 500]

* `prefill`, `decode`: attention over random blocks, of a prompt and of a token in a stacked cache;
  the peer is dense attention, cuDNN's on a GPU. Written to `kernels.json`.
* `quantize`, `scores`, `lists`: the parts of the recommended policy's selection for a prompt:
  quantised keys, page scores and top-k page indices; the peer is XLA. Written to
  `kernels_selection.json`.
* `linear`: decode matmuls with stacked weights, by the type of the weights; the peers are sums of
  products and XLA's matmuls. Written to `linear.json`.
* `experts`: on a Hopper GPU, a mixture of experts of Qwen3-30B-A3B's sizes, of prompts with random
  routing or routing to few experts, and of tokens by the type of the weights; the peers are the
  same module on XLA and `jax.lax.ragged_dot`. Written to `experts.json`.
* `gradient`: a forward and a backward pass of sparse and of dense attention. Written to
  `gradients.json`; on a CPU, with fewer heads, to `gradients_cpu.json`.
* `other_gpus`: on a Hopper GPU, attention of a prompt by other GPUs' kernel, over blocks and over
  pages, and by Hopper's. Written to `warp_prefill.json`.
* `torch`: on a Hopper GPU, attention of a prompt over random blocks, and what torch offers for it:
  dense attention by cuDNN and by flash attention, and FlexAttention over the same blocks. If
  `nvidia-cudnn-frontend` is installed, also its block-sparse attention, which has no causal mask:
  it computes a row's own block whole. Written to `torch_attention.json`.
* `selection`: update of statistics, selection and attention for each policy, in a prompt and for a
  token; the peer is dense attention. Thresholds are set to reach the requested density. Written to
  `selection.json`.

Calls for a prompt are queued one after another, and rotate over several inputs. Decoding and
selection run in jitted loops whose steps depend on each other, as layers do, because single calls
would take longer to launch than to run. Every output of a step is a result of its loop, so that XLA
removes nothing. Results are compared with float32 on XLA, and bit for bit with a second run.
Without a GPU only `--quick` and gradients make sense.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from end_to_end import MODELS, QUICK, device_room, measure_rates
from jaxtyping import Array
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.experts import FEW_PAIRS, Groups, group_pairs, mixture, route
from sketchwalk_jax.models.params import EXPERTS, init_params
from sketchwalk_jax.models.quantized import quantize_params
from sketchwalk_jax.models.transformer import (
    MOST_SUMMED_ROWS,
    linear_of_rows,
    rms_norm,
    sums_of_rows,
)
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.expert_matmul.api import (
    GROUP_ROWS,
    grouped_matmul,
    grouped_swiglu,
)
from sketchwalk_jax.policies import POLICIES, PRESETS, Policy, has_threshold
from sketchwalk_jax.policies.base import LayerShape, PrefillPolicy, Span
from sketchwalk_jax.selection import block_budget, select_blocks

IMPLEMENTATION = "xla" if dispatch.kernels_here() is None else "mosaic_gpu"
PEER = "cudnn" if jax.default_backend() == "gpu" else "xla"
FILES = {
    "prefill": "kernels.json",
    "decode": "kernels.json",
    "quantize": "kernels_selection.json",
    "scores": "kernels_selection.json",
    "lists": "kernels_selection.json",
    "linear": "linear.json",
    "experts": "experts.json",
    "gradient": "gradients_cpu.json" if jax.default_backend() == "cpu" else "gradients.json",
    "other_gpus": "warp_prefill.json",
    "torch": "torch_attention.json",
    "selection": "selection.json",
}
# Fields that identify a row of a file.
SHAPE = ("op", "batch", "tokens", "num_heads", "num_kv_heads", "head_dim", "density", "block_size")
NAMES = {
    "linear.json": ("product", "rows", "form"),
    "experts.json": ("rows", "routing", "dtype", "form"),
    "warp_prefill.json": ("op", "batch", "tokens", "heads", "head_dim", "density"),
    "torch_attention.json": ("tokens", "heads", "head_dim", "density", "block_size"),
    "selection.json": ("phase", "tokens", "policy", "preset", "fields", "density"),
}
CACHE_BYTES = 2**29  # inputs rotate over at least ten times the GPU's L2 cache of 50 MB
CHECKED_TOKENS = 256
CHECKED_GRADIENTS = 16384  # most tokens whose gradients are also computed in float32
LAYERS = 4
PROMPTS = 2  # layers over which selection for prompts rotates: larger than any cache together
# Rounds over the layers per check of a loop's condition, for which a GPU asks the host.
ROUNDS_OF_LAYERS = 8
SLOW = ("oracle", "flexprefill")  # slow to select for prompts; one timed round is enough
THRESHOLD_STEPS = 17  # bisection steps, enough for a single offset of MInference
QUERIES = 32  # representatives of a query block
# Milliseconds of one layer: `update_statistics` alone, all of `selection`, sparse `attention`
# alone.
PARTS = ("observe", "selection", "attention")
# Columns of the weights that share an input, the input's width, whether a norm comes first.
Product = tuple[tuple[int, ...], int, bool]
PRODUCTS: dict[str, Product] = {
    "query, key, value": ((4096, 1024, 1024), 4096, True),
    "output": ((4096,), 4096, False),
    "gate, up": ((14336, 14336), 4096, True),
    "down": ((4096,), 14336, False),
}
QUICK_PRODUCTS: dict[str, Product] = {"gate, up": ((64, 64), 256, True)}
WEIGHTS = ("bfloat16", "float8_e4m3fn", "int8")
STACK = 8  # layers of stacked weights: more than any cache holds
EXPERT_WEIGHTS = ("bfloat16", "float8", "int8")
SLOW_SECONDS = 1.0  # a peer whose call takes longer is left out
EPS = 1e-5
TORCH_DENSE = ("torch_cudnn", "torch_flash")
CUDNN_SPARSE = "cudnn_block_sparse"
PAGES = 4  # per block of 64
PyTree = Any
Row = dict[str, Any]
Call = Callable[[int], Any]  # enqueues a number of steps
Step = Callable[[PyTree, PyTree, int], PyTree]  # state, inputs of all layers, layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: an operation and its sizes.

    Attributes:
      op: A key of `OPERATIONS`.
      tokens: Tokens of a prompt, or in the cache of each sequence.
      density: Nominal density of the selection.
      batch: Number of sequences.
      heads: Numbers of query heads and key/value heads.
      head_dim: Size of one head.
      block_size: Tokens per block.
      dtype: Dtype of queries, keys and values.
      rule: The policy, for `selection` and `share`.
      phase: `"prefill"` or `"decode"`, for the same operations.
      product: Name of the weights, for `linear`.
      rows: Rows of the input, for `linear` and `experts`.
      routing: `"random"`, or `"skewed"` to twice the experts that a token chooses.
      is_quick: Whether sizes are tiny.
    """

    op: str
    tokens: int = 0
    density: float = 0.1
    batch: int = 1
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    rule: Rule = DENSE
    phase: str = ""
    product: str = ""
    rows: int = 0
    routing: str = "random"
    is_quick: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence."""
        return self.tokens // self.block_size

    def row(self) -> Row:
        """Returns the fields that name the case in the results."""
        if self.op == "linear":
            return {"product": self.product, "rows": self.rows}
        if self.op == "experts":
            return {"rows": self.rows, "routing": self.routing}
        names = ("tokens", "density", "batch", "head_dim", "dtype")
        own = {name: getattr(self, name) for name in names}
        if self.op in ("other_gpus", "torch"):
            return own | {"op": "prefill", "heads": self.heads, "block_size": self.block_size}
        own |= {"num_heads": self.heads[0], "num_kv_heads": self.heads[1]}
        if self.phase:
            rule = {name: getattr(self.rule, name) for name in ("policy", "preset", "density")}
            return own | rule | {"phase": self.phase, "fields": dict(self.rule.fields)}
        return own | {"op": self.op, "block_size": self.block_size, "peer": None}

    def filtered(self) -> Row:
        """Returns the values to filter by; a filter drops cases without its field."""
        if self.op in ("linear", "experts"):
            own: Row = {"rows": self.rows}
        else:
            own = {"tokens": self.tokens, "density": self.density}
            own |= {"policy": self.rule.policy} if self.phase else {}
        names = ("tokens", "density", "policy", "rows")
        return dict.fromkeys(names) | own | {"op": self.op}


def cases() -> Iterator[Case]:
    """Lists all measurements on a GPU, or without one, the gradients on a CPU."""
    gradient = functools.partial(Case, op="gradient", density=0.1)
    if jax.default_backend() == "cpu":
        for tokens in (2048, 4096, 8192, 16384):
            yield gradient(tokens=tokens, heads=(8, 2), head_dim=64, dtype="float32")
        return
    lengths = [2**power for power in range(13, 18)]
    for density in (0.1, 0.2, 1.0):
        for tokens in lengths:
            yield Case(op="prefill", tokens=tokens, density=density)
    for tokens in (2**14, 2**17):
        for density in (0.1, 0.2):
            yield Case(op="prefill", tokens=tokens, density=density, head_dim=64)
        yield Case(op="prefill", tokens=tokens, heads=(28, 4))
    for tokens in lengths:
        yield Case(op="decode", tokens=tokens)
    for batch, tokens in ((8, 2**16), (32, 2**14), (128, 2**12)):
        for head_dim in (128, 64):
            yield Case(op="decode", tokens=tokens, density=0.2, batch=batch, head_dim=head_dim)
    yield Case(op="decode", tokens=2**17, heads=(28, 4))
    yield Case(op="decode", tokens=2**16, density=0.2, batch=8, block_size=16)
    for op in ("quantize", "scores", "lists"):
        for tokens in (2**14, 2**16, 2**17):
            yield Case(op=op, tokens=tokens)
    for product in PRODUCTS:
        for rows in (1, 8, 64):
            yield Case(op="linear", product=product, rows=rows)
    for tokens in (4096, 16384, 65536):
        yield gradient(tokens=tokens)
    if dispatch.is_hopper():
        for rows in (1, 8, 32, 2**10, 2**12, 2**14, 2**15):
            yield Case(op="experts", rows=rows)
            if rows > 32:
                yield Case(op="experts", rows=rows, routing="skewed")
        for tokens, density in ((2**14, 0.1), (2**14, 1.0), (2**16, 0.1)):
            for head_dim, heads in ((128, (32, 8)), (64, (32, 8)), (128, (8, 8))):
                sizes: dict[str, Any] = {"tokens": tokens, "density": density}
                yield Case(op="other_gpus", head_dim=head_dim, heads=heads, **sizes)
        for tokens in (2**14, 2**15, 2**17):
            for density, block_size in itertools.product((0.1, 0.2), (64, 128)):
                yield Case(op="torch", tokens=tokens, density=density, block_size=block_size)
    for tokens in (2**14, 2**16):
        yield from selecting(tokens, 0.1, [DENSE, *every_rule(0.1)])


def quick_cases() -> Iterator[Case]:
    """Lists tiny cases that run anywhere."""
    size: dict[str, Any] = {"density": 0.2, "heads": (4, 2), "head_dim": 64, "is_quick": True}
    for op in ("prefill", "decode", "quantize", "scores", "lists", "gradient"):
        yield Case(op=op, tokens=1024, batch=2 if op == "decode" else 1, **size)
    yield Case(op="linear", product="gate, up", rows=1, is_quick=True)
    yield Case(op="experts", rows=2, is_quick=True)
    yield Case(op="experts", rows=160, routing="skewed", is_quick=True)
    rules = [DENSE, *every_rule(0.2, is_quick=True)]
    yield from selecting(1024, rules=rules, **size)


def selecting(tokens: int, density: float, rules: Sequence[Rule], **size: Any) -> Iterator[Case]:
    """Lists rules in the phases in which they update statistics or select; dense in both."""
    for rule in rules:
        case = Case(op="selection", tokens=tokens, density=density, rule=rule, **size)
        policy = rule.make()
        if rule == DENSE or "prefill" in policy.phases or updates_statistics(policy, case):
            yield dataclasses.replace(case, phase="prefill")
        if rule == DENSE or "decode" in policy.phases:
            yield dataclasses.replace(case, phase="decode")


def every_rule(density: float, *, is_quick: bool = False) -> list[Rule]:
    """Lists policies and presets; FlexPrefill with no head and with every head query-aware."""
    found = []
    for policy in POLICIES:
        if policy == "flexprefill":
            for tau in (0.0, 1.0):  # the distance is at most sqrt(log 2)
                found.append(Rule(policy, None, density, (("tau", tau),)))
        elif policy == "sketchwalk":
            # Quick rows are so short that the recommended policy would keep all their keys.
            few = (("min_tokens", 128),) if is_quick else ()
            for preset in PRESETS[:1] if is_quick else PRESETS:
                own = None if preset == "released" else density
                found.append(Rule(policy, preset, own, few))
        elif policy != "dense":
            found.append(Rule(policy, None, density))
    return found


def main() -> None:
    """Runs all measurements and writes the results, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the results")
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="default: all")
    parser.add_argument("--tokens", type=int, action="append", help="default: all lengths")
    parser.add_argument("--density", type=float, action="append", help="default: all")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument(
        "--rows", type=int, action="append", help="of linear, experts; default: all"
    )
    parser.add_argument("--missing", action="store_true", help="only what the files lack")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in turns")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this")
    parser.add_argument("--quick", action="store_true", help="tiny cases, two rounds")
    options = parser.parse_args()
    keep_compiled_programs()
    started = time.monotonic()
    every = list(quick_cases() if options.quick else cases())
    wanted = [case for case in every if common.is_asked(options, **case.filtered())]
    common.check_filters(options, (case.filtered() for case in every), wanted)
    repeats = 2 if options.quick else options.repeats
    rates = measure_rates(is_quick=options.quick)
    meta = common.describe_machine(is_quick=options.quick, repeats=repeats, **rates)
    if options.missing:
        done = {op: common.is_measured(options.out / FILES[op], names_of(op)) for op in FILES}
        wanted = [case for case in wanted if case.op == "linear" or not done[case.op](case.row())]

    def seconds_left() -> float:
        return options.seconds - (time.monotonic() - started)

    programs = common.compiled(wanted, lambda case: OPERATIONS[case.op](case), seconds_left)
    for case, program in tqdm(programs, desc="kernels", total=len(wanted)):
        found = common.found_or_error(lambda program=program: {"found": program()(repeats)})
        rows = found.pop("found", [{}])
        for row in [case.row() | unmeasured(case) | found | row for row in rows]:
            if row.get("tb_per_s"):
                row["fraction_of_copy_bandwidth"] = row["tb_per_s"] / rates["copy_tb_per_s"]
            if case.op == "experts" and row.get("tflops"):
                row["fraction_of_matmul"] = row["tflops"] / rates["matmul_tflops"]
            tqdm.write(describe(case, row))
            common.add_rows(options.out / FILES[case.op], meta, [row], names_of(case.op))


def names_of(op: str) -> tuple[str, ...]:
    """Returns the fields that identify a row of an operation's file."""
    return NAMES.get(FILES[op], SHAPE)


def unmeasured(case: Case) -> Row:
    """Returns null fields of a policy's row, for parts that its phase lacks."""
    if not case.phase:
        return {}
    names = ("settings", "measured_density", "num_lists", "list_block_size")
    times = [f"{part}_{name}" for part in PARTS for name in ("ms", "ms_iqr")]
    return dict.fromkeys((*names, *times, "attention_implementation"))


def describe(case: Case, row: Row) -> str:
    """Formats a row as one line for the terminal."""
    text = f"{case.op:<10} {row.get('form', '')}"
    names = {**case.row(), "op": None, "peer": None, "dtype": None}
    text += "".join(f" {name}={one}" for name, one in names.items() if one)
    if row["error"]:
        return f"{text} failed: {row['error']}"
    times = {
        name: one for name, one in row.items() if name.endswith("ms") and isinstance(one, float)
    }
    times |= {name: one["ms"] for name, one in row.get("forms", {}).items()}
    text += "".join(f", {name.removesuffix('_ms')} {one:.4f} ms" for name, one in times.items())
    for name in ("ratio", "tflops", "tb_per_s", "measured_density", "relative_error"):
        text += f", {name} {row[name]:.3g}" if row.get(name) is not None else ""
    return text + ("" if row.get("is_bit_equal", True) else " UNEQUAL")


# Timing.


def milliseconds(times: Sequence[float], prefix: str = "") -> Row:
    """Computes the median and the interquartile range."""
    found = common.summarize(list(times))
    spread = found["q75"] - found["q25"]
    return {f"{prefix}ms": 1e3 * found["median"], f"{prefix}ms_iqr": 1e3 * spread}


def built(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a program for such arguments or shapes."""
    return jax.jit(function).lower(*arguments).compile()


def queued(program: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Call:
    """Makes calls of a program with one set of inputs after another."""

    def run(count: int) -> Any:
        for index in range(count):
            out = program(*sets[index % len(sets)])
        return out

    return run


class Loop:
    """A compiled loop of steps, each of which starts from the last one's result.

    The number of rounds over the layers is fixed when compiling, so that a GPU asks the host
    whether to go on only after all of them.

    Args:
      step: Work of one layer.
      state: State before the first step, or its shapes.
      inputs: Inputs of all layers, or their shapes.
      layers: Number of layers.
      rounds: Rounds over the layers per check of the loop's condition.
    """

    def __init__(
        self, step: Step, state: PyTree, inputs: PyTree, layers: int, rounds: int = ROUNDS_OF_LAYERS
    ) -> None:
        """Compiles the loop."""

        def run(count: Array, state: PyTree, inputs: PyTree) -> PyTree:
            def one_round(_: Array, state: PyTree) -> PyTree:
                for index in range(layers):
                    state = step(state, inputs, index)
                return state

            some = lambda _, state: jax.lax.fori_loop(0, rounds, one_round, state)  # noqa: E731
            return jax.lax.fori_loop(0, count, some, state)

        self.steps = layers * rounds
        self._program = built(run, jax.ShapeDtypeStruct((), jnp.int32), state, inputs)

    def over(self, state: PyTree, inputs: PyTree) -> Call:
        """Makes calls of a multiple of `steps` steps."""
        return lambda count: self._program(jnp.int32(count // self.steps), state, inputs)


def compare(one: Array, other: Array, wanted: Array) -> Row:
    """Computes a result's distance from the reference, and whether two runs are equal."""
    actual = one.astype(jnp.float32)
    error = jnp.linalg.norm((actual - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())
    return {"relative_error": float(error), "is_bit_equal": bool(jnp.all(one == other))}


def sides(times: Mapping[str, Sequence[float]], peer: str) -> Row:
    """Returns the times of `ours` and of `peer`."""
    row = {"peer": peer, "implementation": IMPLEMENTATION}
    row |= milliseconds(times["ours"], "ours_") | milliseconds(times["peer"], "peer_")
    return row | {"ratio": row["peer_ms"] / row["ours_ms"]}


def widen(tree: PyTree) -> PyTree:
    """Converts arrays to float32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


# Inputs.


def draw(key: Array, case: Case, heads: int, tokens: int, *lead: int) -> Array:
    """Draws normal entries `[*lead, B, tokens, heads, H]`."""
    size = (*lead, case.batch, tokens, heads, case.head_dim)
    return jax.random.normal(key, size, jnp.dtype(case.dtype))


def draw_layer(case: Case, index: int) -> tuple[Array, Array, Array]:
    """Draws queries, keys and values of whole prompts."""
    heads = (case.heads[0], case.heads[1], case.heads[1])
    keys = jax.random.split(jax.random.key(index), 4)[:3]
    found = [draw(key, case, n, case.tokens) for key, n in zip(keys, heads, strict=True)]
    return found[0], found[1], found[2]


def random_lists(key: Array, case: Case, rows: Array) -> sw.BlockSelection:
    """Draws random block indices, as many as the density requires."""
    budget = block_budget(case.num_blocks, density=case.density, sink_blocks=1, local_blocks=1)
    rows = jnp.broadcast_to(rows, (case.batch, rows.shape[-1]))
    select = jax.jit(
        functools.partial(
            select_blocks,
            sink_blocks=1,
            local_blocks=1,
            max_count=int(budget[-1]),
            block_size=case.block_size,
        )
    )
    scores = jax.random.uniform(key, (*rows.shape, case.num_blocks))
    return select(scores, rows, jnp.asarray(budget)[rows])


def draw_prompts(case: Case) -> list[tuple[Any, ...]]:
    """Draws sets of queries, keys, values and blocks of prompts, larger than any cache together."""
    rows = jnp.arange(case.num_blocks, dtype=jnp.int32)
    size = 2 * case.batch * case.tokens * (case.heads[0] + 2 * case.heads[1]) * case.head_dim
    return [
        (*draw_layer(case, index), random_lists(jax.random.key(100 + index), case, rows))
        for index in range(max(2, min(8, math.ceil(CACHE_BYTES / size))))
    ]


def whole_prompt(case: Case) -> Span:
    """Makes the span of whole prompts, which inference makes once for all layers."""
    lengths = jnp.full((case.batch,), case.tokens, jnp.int32)
    valid = jnp.ones((case.batch, case.tokens), bool)
    return Span(jnp.zeros_like(lengths), valid, lengths, lengths)


def zeros(shapes: PyTree) -> PyTree:
    """Makes arrays of zeros for shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


# Attention. Each operation compiles its programs, and returns a function that measures rows.

Measure = Callable[[int], list[Row]]


def dense_prompt(query: Array, key: Array, value: Array) -> Array:
    """Attends densely to whole prompts: the peer."""
    if PEER == "xla":
        return sw.dense_attention(query, key, value, implementation="xla")
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=PEER)


def attend_prompt(*inputs: Any) -> Array:
    """Attends to the selected blocks of whole prompts."""
    return sw.block_sparse_attention(*inputs, implementation=IMPLEMENTATION)


def attended(case: Case, lists: sw.BlockSelection) -> float:
    """Counts the attended pairs of query and key."""
    positions = jnp.arange(lists.ids.shape[2], dtype=jnp.int32)[None, :] * case.block_size
    return float(
        jnp.sum(lists.attended_pairs(positions, jnp.full_like(positions, case.block_size)))
    )


def tail_in_float32(case: Case, inputs: tuple[Any, ...]) -> Array:
    """Computes the last tokens' attention on XLA; padded lists allow any query offset."""
    query, key, value, lists = inputs
    tail = min(CHECKED_TOKENS, case.tokens)
    last, padding = -(tail // case.block_size), ((0, 0), (0, 0), (0, 1), (0, 0))
    lists = dataclasses.replace(
        lists,
        ids=jnp.pad(lists.ids[:, :, last:], padding),
        counts=jnp.pad(lists.counts[:, :, last:], padding[:3]),
    )
    offset = jnp.full((case.batch,), case.tokens - tail, jnp.int32)
    attend = functools.partial(sw.block_sparse_attention, implementation="xla")
    with jax.default_matmul_precision("highest"):
        wide = widen((query[:, -tail:], key, value))
        return jax.jit(attend)(*wide, lists, query_offset=offset)[:, -tail:]


def prefill(case: Case) -> Measure:
    """Measures attention to a prompt's selected blocks and dense attention, or several kernels.

    For `other_gpus`, kernels take block indices and the page indices of the same keys. For `torch`,
    its functions take the same inputs, and FlexAttention the same blocks.
    """
    calls: dict[str, tuple[Callable[..., Array], str]] = {"peer": (dense_prompt, "dense")}
    if case.op != "other_gpus":
        calls["ours"] = attend_prompt, "blocks"
    for lists in ("blocks", "pages") if case.op == "other_gpus" else ():
        calls[f"warps_{lists}"] = attend_as_others, lists
        calls[f"hopper_{lists}"] = attend_prompt, lists

    def draw_forms() -> dict[str, list[tuple[Any, ...]]]:
        sets = draw_prompts(case)
        pages = [(*one[:3], in_pages(one[3])) for one in sets]
        return {"dense": [one[:3] for one in sets], "blocks": sets, "pages": pages}

    shapes = jax.eval_shape(draw_forms)
    programs = {name: built(call, *shapes[kind][0]) for name, (call, kind) in calls.items()}

    def measure(repeats: int) -> list[Row]:
        sets = draw_forms()
        runs = {name: queued(programs[name], sets[kind]) for name, (_, kind) in calls.items()}
        if case.op == "torch":
            runs |= torch_calls(case, sets["blocks"])
        times, forms = common.rounds(runs, repeats), {}
        wanted = tail_in_float32(case, sets["blocks"][0])
        every = case.batch * case.tokens * (case.tokens + 1) / 2
        pairs = attended(case, sets["blocks"][0][3])
        for name, run in runs.items():
            forms[name] = milliseconds(times[name])
            is_dense = name in ("peer", *TORCH_DENSE)
            work = 4 * case.head_dim * case.heads[0] * (every if is_dense else pairs)
            forms[name]["tflops"] = work / forms[name]["ms"] / 1e9
            if not is_dense and name != CUDNN_SPARSE:
                one, other = (in_jax(run(1))[:, -wanted.shape[1] :] for _ in range(2))
                forms[name] |= compare(one, other, wanted)
        if case.op != "prefill":
            return [{"forms": {"cudnn": forms.pop("peer"), **forms}}]
        checks = {name: one for name, one in forms["ours"].items() if "ms" not in name}
        return [sides(times, PEER) | {"attended_pairs": pairs / every} | checks]

    return measure


def in_pages(lists: sw.BlockSelection) -> sw.BlockSelection:
    """Replaces blocks by their pages."""
    ids = lists.ids[..., None] * PAGES + jnp.arange(PAGES, dtype=lists.ids.dtype)
    ids, size = ids.reshape(*ids.shape[:-2], -1), lists.block_size
    return sw.BlockSelection(ids, lists.counts * PAGES, size // PAGES, row_size=size)


def attend_as_others(query: Array, key: Array, value: Array, lists: sw.BlockSelection) -> Array:
    """Runs `attend_prompt` by the kernel of GPUs from Ampere on, other than Hopper."""
    from sketchwalk_jax.pallas_kernels.attention.attention import attention_kernel

    lengths = jnp.full(query.shape[0], query.shape[1], jnp.int32)
    return attention_kernel(
        query,
        key[None],
        value[None],
        lists.ids,
        lists.counts,
        layer=0,
        first_block=jnp.zeros_like(lengths),
        kv_lengths=lengths,
        scale=query.shape[-1] ** -0.5,
        block_size=lists.block_size,
        row_size=lists.queries_per_row,
    )[0]


def in_jax(out: Any) -> Array:
    """Returns an array of JAX or torch as one of JAX."""
    return out if isinstance(out, jax.Array) else jnp.from_dlpack(out.contiguous())


def in_torch(x: Any) -> Any:
    """Returns integers as an array of torch, on its GPU if it has one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.from_numpy(np.array(x, np.int32)).to(device)


def torch_calls(case: Case, sets: Sequence[tuple[Any, ...]]) -> dict[str, Call]:
    """Makes calls of attention to prompts in torch: dense, and over the same blocks."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    heads_first = [
        tuple(torch.from_dlpack(x).transpose(1, 2).contiguous() for x in arrays)  # type: ignore[attr-defined]
        for *arrays, _ in sets
    ]

    def waited(call: Callable[..., Any], *arguments: Sequence[Any]) -> Call:
        run = queued(call, list(zip(*arguments, strict=True)))

        def enqueue(count: int) -> Any:
            out = run(count)
            torch.cuda.synchronize()
            return out.transpose(1, 2)

        return enqueue

    def dense(backend: Any, inputs: Any) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    flex = torch.compile(flex_attention, dynamic=False)
    # Its default tiles of 128 do not divide smaller blocks.
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64} if case.block_size < 128 else None

    def flexible(inputs: Any, blocks: Any) -> Any:
        return flex(*inputs, block_mask=blocks, enable_gqa=True, kernel_options=tiles)

    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    calls = {
        name: waited(functools.partial(dense, backend), heads_first)
        for name, backend in zip(TORCH_DENSE, backends, strict=True)
    }
    masks = [flex_blocks(lists) for *_, lists in sets]
    calls["flex_attention"] = waited(flexible, heads_first, masks)
    if importlib.util.find_spec("cudnn") is not None:
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        def blocks_of_heads(lists: sw.BlockSelection) -> tuple[Any, Any]:
            shape = (case.batch, case.heads[0], case.num_blocks)
            ids = np.minimum(lists.ids, case.num_blocks - 1)
            ids = np.broadcast_to(ids, (*shape, ids.shape[3]))
            return in_torch(ids), in_torch(np.broadcast_to(lists.counts, shape))

        def sparse(inputs: Any, blocks: Any) -> Any:
            how: dict[str, Any] = {"sparse_block_size": case.block_size, "layout": "bhsd"}
            ids, counts = blocks
            out = block_sparse_attention_forward(*inputs, ids, q2k_block_nums=counts, **how)
            return out["o_tensor"]

        own = [blocks_of_heads(lists) for *_, lists in sets]
        calls[CUDNN_SPARSE] = waited(sparse, heads_first, own)
    return calls


def flex_blocks(lists: sw.BlockSelection) -> Any:
    """Makes FlexAttention's `BlockMask` of the same blocks; only a row's own block has a mask."""
    from torch.nn.attention.flex_attention import BlockMask

    rows = lists.ids.shape[2]
    padding = ((0, 0), (0, 0), (0, 0), (0, rows - lists.ids.shape[3]))
    own = np.broadcast_to(np.arange(rows)[:, None], (*lists.ids.shape[:3], rows))
    return BlockMask.from_kv_blocks(
        in_torch(np.ones(lists.counts.shape)),
        in_torch(own),
        in_torch(lists.counts - 1),  # the last one of a list is the row's own
        in_torch(np.pad(np.minimum(lists.ids, rows - 1), padding)),
        BLOCK_SIZE=lists.block_size,
        mask_mod=lambda batch, head, query, key: query >= key,
    )


def attend_token(
    query: Array, given: PyTree, layer: int, *, implementation: str | None = None
) -> Array:
    """Attends to one token's blocks: a step whose result is the next layer's query."""
    keys, values, lists, lengths = given
    how: dict[str, Any] = {"kv_lengths": lengths, "implementation": implementation}
    return sw.block_sparse_decode(query, keys, values, lists[layer], layer=layer, **how)


def dense_token(query: Array, given: PyTree, layer: int) -> Array:
    """Attends densely for one token: the peer."""
    layers, lengths = given
    return jax.nn.dot_product_attention(
        query, *layers[layer], key_value_seq_lengths=lengths, implementation=PEER
    )


def decode(case: Case) -> Measure:
    """Measures one token per sequence over its blocks in a stacked cache, and dense decoding."""

    def draw_inputs() -> tuple[Any, Any, Any]:
        """Draws a query, full caches of several layers, and the layers for the peer."""
        keys = jax.random.split(jax.random.key(0), 3 + LAYERS)
        query = draw(keys[0], case, case.heads[0], 1)
        cache = [draw(one, case, case.heads[1], case.tokens, LAYERS) for one in keys[1:3]]
        row = jnp.array([case.num_blocks - 1], jnp.int32)
        lists = [random_lists(one, case, row) for one in keys[3:]]
        lengths = jnp.full((case.batch,), case.tokens, jnp.int32)
        layers = [tuple(one[layer] for one in cache) for layer in range(LAYERS)]
        return query, (*cache, lists, lengths), (layers, lengths)

    query, given, layers = jax.eval_shape(draw_inputs)
    attend = functools.partial(attend_token, implementation=IMPLEMENTATION)
    ours, peer = Loop(attend, query, given, LAYERS), Loop(dense_token, query, layers, LAYERS)
    once = built(functools.partial(attend, layer=0), query, given)

    def measure(repeats: int) -> list[Row]:
        query, given, layers = draw_inputs()
        calls = {"ours": ours.over(query, given), "peer": peer.over(query, layers)}
        row = sides(common.rounds(calls, repeats, step=ours.steps), PEER)
        lists, lengths = given[2:]
        blocks = sum(int(jnp.sum(one.counts)) for one in lists) / LAYERS
        size = 2 * case.block_size * case.heads[1] * case.head_dim * query.dtype.itemsize
        row["tb_per_s"] = blocks * size / row["ours_ms"] / 1e9
        row["attended_blocks"] = blocks / case.batch
        wide, how = widen((query, *layers[0][0])), {"kv_lengths": lengths, "implementation": "xla"}
        wanted = sw.block_sparse_decode(*wide, lists[0], **how)
        return [row | compare(once(query, given), once(query, given), wanted)]

    return measure


def gradient(case: Case) -> Measure:
    """Measures the forward pass, and forward with the gradients of queries, keys and values."""

    def step_of(attend: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
        def step(query: Array, key: Array, value: Array, *rest: Any) -> tuple[Array, ...]:
            *lists, cotangent = rest
            _, back = jax.vjp(lambda *arrays: attend(*arrays, *lists), query, key, value)
            return back(cotangent)

        return step

    def draw_sets() -> dict[str, list[tuple[Any, ...]]]:
        sets = [(*one, jnp.roll(one[0], 1, axis=1)) for one in draw_prompts(case)]
        return {
            "ours_forward": [one[:4] for one in sets],
            "peer_forward": [one[:3] for one in sets],
            "ours": sets,
            "peer": [(*one[:3], one[4]) for one in sets],
        }

    steps = {"ours": step_of(attend_prompt), "peer": step_of(dense_prompt)}
    steps |= {"ours_forward": attend_prompt, "peer_forward": dense_prompt}
    shapes = jax.eval_shape(draw_sets)
    programs = {name: built(step, *shapes[name][0]) for name, step in steps.items()}

    def measure(repeats: int) -> list[Row]:
        sets = draw_sets()
        runs = {name: queued(program, sets[name]) for name, program in programs.items()}
        times = common.rounds(runs, repeats)
        row = sides(times, PEER)
        for name in ("ours", "peer"):
            row[f"{name}_forward_ms"] = milliseconds(times[f"{name}_forward"])["ms"]
            row[f"{name}_backward_ms"] = row[f"{name}_ms"] - row[f"{name}_forward_ms"]
            temporary = common.memory(programs[name])["temporary_bytes"]
            row[f"{name}_temporary_bytes"] = temporary
        row["backward_ratio"] = row["peer_backward_ms"] / row["ours_backward_ms"]
        if case.tokens > CHECKED_GRADIENTS:
            return [row]
        exact = functools.partial(sw.block_sparse_attention, implementation="xla")
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(step_of(exact))(*widen(sets["ours"][0]))
        found = [programs["ours"](*sets["ours"][0]) for _ in range(2)]
        checks = [compare(*some) for some in zip(*found, wanted, strict=True)]
        row["relative_errors"] = [one["relative_error"] for one in checks]
        return [row | {"is_bit_equal": all(one["is_bit_equal"] for one in checks)}]

    return measure


# Parts of selection.


def kernels_for(policy: Policy, phase: str) -> KernelConfig | None:
    """Returns the settings of the policy's kernels, or `None` to use XLA."""
    what = policy.token_kernels if phase == "decode" else policy.prompt_kernels
    return dispatch.selection_kernels(None, what=what)


def selection_part(case: Case) -> Measure:
    """Measures one part of the recommended policy's selection for a prompt, kernels and XLA."""
    policy = sw.SketchWalkConfig.recommended(density=case.density)
    shape = LayerShape(*case.heads, case.head_dim, jnp.dtype(case.dtype))
    rows = jnp.broadcast_to(
        jnp.arange(case.num_blocks, dtype=jnp.int32), (case.batch, case.num_blocks)
    )
    span, layer = whole_prompt(case), jnp.zeros((), jnp.int32)

    def quantize(config: KernelConfig | None, query: Array, key: Array) -> PyTree:
        empty = policy.init_statistics(shape, batch=case.batch, num_blocks=case.num_blocks)
        return policy.update_statistics(query, key, empty, span=span, kernel_config=config)

    def score(config: KernelConfig | None, query: Array, stored: PyTree) -> Array:
        queries = policy.represent(query, span.valid, QUERIES, config)
        scale = case.head_dim**-0.5
        sizes: dict[str, Any] = {"kv_lengths": span.end, "scale": scale}
        return policy.page_scores(queries, stored, rows, **sizes, kernel_config=config)

    def choose(config: KernelConfig | None, scores: Array) -> sw.BlockSelection:
        last = (rows + 1) * policy.pages - 1
        return policy.keep(scores, last, layer, is_token=False, kernel_config=config)

    def draw_sets() -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for index in range(LAYERS):
            query, key, _ = draw_layer(case, index)
            if case.op == "quantize":
                found.append((query, key))
            elif case.op == "scores":
                found.append((query, jax.jit(functools.partial(quantize, None))(query, key)))
            else:
                sizes = (case.batch, case.num_blocks, case.num_blocks * policy.pages)
                found.append((jax.random.uniform(jax.random.key(index), sizes),))
        return found

    part = {"quantize": quantize, "scores": score, "lists": choose}[case.op]
    shapes = jax.eval_shape(draw_sets)[0]
    ours, peer = (
        built(functools.partial(part, config), *shapes)
        for config in (kernels_for(policy, "prefill"), None)
    )

    def measure(repeats: int) -> list[Row]:
        sets = draw_sets()
        times = common.rounds({"ours": queued(ours, sets), "peer": queued(peer, sets)}, repeats)
        row = sides(times, "xla")
        channels, pairs = case.head_dim // 2, case.tokens * (case.tokens + 1) / 2
        if case.op == "scores":
            work = 2 * case.batch * case.heads[0] * channels * pairs * QUERIES / case.block_size
            row["tflops"] = work / row["ours_ms"] / 1e9
        elif case.op == "quantize":
            size = case.batch * case.tokens * case.heads[1] * (2 * case.head_dim + channels / 2)
            row["tb_per_s"] = size / row["ours_ms"] / 1e9
        else:  # query blocks need the scores of earlier pages only
            row["tb_per_s"] = sets[0][0].nbytes / 2 / row["ours_ms"] / 1e9
        (one, *_), (other, *_), (wanted, *_) = (
            jax.tree.leaves(program(*sets[0])) for program in (ours, ours, peer)
        )
        return [row | compare(one, other, wanted.astype(jnp.float32))]

    return measure


# Decode matmuls.


def draw_weights(product: Product, rows: int, dtype: str, layers: int) -> tuple[Array, Row]:
    """Draws rows, and weights `[L, D, F]` or `[L, F, D]` with scales of weights and norm."""
    columns, inputs, has_norm = product
    keys = jax.random.split(jax.random.key(0), len(columns) + 1)
    x = jax.random.normal(keys[-1], (rows, 1, inputs), jnp.bfloat16)
    is_wide, arrays = dtype == "bfloat16", {}
    for key, width in zip(keys[:-1], columns, strict=True):
        shape = (layers, inputs, width) if is_wide else (layers, width, inputs)
        weights = jax.random.normal(key, shape, jnp.bfloat16)
        if dtype == "int8":
            weights = jnp.round(weights * 30).clip(-127, 127)
        arrays[f"{len(arrays)}"] = weights.astype(dtype)
    scales = [jnp.full((layers, width), 0.5, jnp.float32) for width in columns]
    norm = jnp.ones((layers, inputs), jnp.bfloat16) if has_norm else None
    return x, {"weights": arrays, "weight_scales": None if is_wide else scales, "scale": norm}


def products(x: Array, given: Row, layer: Any, how: Callable[..., Any]) -> list[Array]:
    """Computes the products of one layer by the decode matmul kernel, or as sums of products."""
    scales = given["weight_scales"]
    found = how(
        x,
        given["weights"],
        jnp.asarray(layer, jnp.int32),
        scale=given["scale"],
        eps=EPS,
        is_transposed=scales is not None,
        weight_scales=scales,
    )
    if found is None:
        raise NotImplementedError("no kernel takes these rows and weights")
    return found


def products_on_xla(x: Array, given: Row, layer: Any, dtype: Any = None) -> list[Array]:
    """Computes the products of one layer by XLA, in the input's dtype or another one."""
    x = x if dtype is None else x.astype(dtype)
    if given["scale"] is not None:
        x = rms_norm(x, given["scale"][layer].astype(x.dtype), eps=EPS)
    found = []
    for index, weights in enumerate(given["weights"].values()):
        own = weights[layer].astype(x.dtype)
        if given["weight_scales"] is not None:
            own = (own * given["weight_scales"][index][layer][:, None].astype(x.dtype)).T
        found.append(jnp.dot(x, own, precision=None if dtype is None else "highest"))
    return found


def linear(case: Case) -> Measure:
    """Measures a row for each form: the kernel with each weight type, sums, and XLA's matmul."""
    product = (QUICK_PRODUCTS if case.is_quick else PRODUCTS)[case.product]
    layers = 2 if case.is_quick else STACK
    config = KernelConfig(interpret=dispatch.kernels_here() is None)
    kernel = functools.partial(
        products, how=functools.partial(linear_of_rows, kernel_config=config)
    )
    # 8-bit kernels need Hopper.
    is_narrow = case.is_quick or dispatch.is_hopper()
    forms = {name: (name, kernel) for name in (WEIGHTS if is_narrow else WEIGHTS[:1])}
    if case.rows <= MOST_SUMMED_ROWS:
        forms["sums"] = "bfloat16", functools.partial(products, how=sums_of_rows)
    forms["XLA"] = "bfloat16", products_on_xla

    def step_of(call: Callable[..., list[Array]]) -> Step:
        # Add tiny sums of the products to the rows, so that the next product waits for this one.
        def step(x: Array, given: Row, layer: int) -> Array:
            total = sum(jnp.sum(one.astype(jnp.float32)) for one in call(x, given, layer))
            return x + (total * 1e-30).astype(x.dtype)

        return step

    loops, once = {}, {}
    for form, (dtype, call) in forms.items():
        shapes = jax.eval_shape(lambda dtype=dtype: draw_weights(product, case.rows, dtype, layers))
        loops[form] = Loop(step_of(call), *shapes, layers)
        once[form] = built(functools.partial(call, layer=0), *shapes)

    def measure(repeats: int) -> list[Row]:
        inputs = {name: draw_weights(product, case.rows, name, layers) for name in WEIGHTS}
        calls = {form: loops[form].over(*inputs[dtype]) for form, (dtype, _) in forms.items()}
        times, rows = common.rounds(calls, repeats, step=loops["XLA"].steps), []
        for form, (dtype, _) in forms.items():
            x, given = inputs[dtype]
            exact = products_on_xla(x, given, 0, jnp.float32)
            one, other, wanted = (
                jnp.concatenate(some, axis=-1)
                for some in (once[form](x, given), once[form](x, given), exact)
            )
            size = sum(weights.nbytes for weights in given["weights"].values()) / layers
            row = {"form": form, "dtype": dtype, "weight_bytes": size} | milliseconds(times[form])
            row["tb_per_s"] = size / row["ms"] / 1e9
            rows.append(row | compare(one, other, wanted))
        return rows

    return measure


# Mixtures of experts.


def draw_experts(case: Case, model: ModelConfig, weights: str, layers: int) -> tuple[Array, PyTree]:
    """Draws rows `[T, 1, D]`, and the parameters of layers of experts."""
    sizes = dataclasses.replace(model, num_layers=layers, vocab_size=8)
    drawn = init_params(jax.random.key(0), sizes)["layers"]
    stacks = {name: drawn[name] for name in EXPERTS}
    x = jax.random.normal(jax.random.key(1), (case.rows, 1, model.hidden_size), jnp.bfloat16)
    if case.routing == "skewed":  # the first input of every row favours the same experts
        x, few = x.at[..., 0].set(1), 2 * model.experts_per_token
        stacks["router"] = {"kernel": stacks["router"]["kernel"].at[:, 0, :few].add(30)}
    if weights != "bfloat16":
        stacks = quantize_params({"layers": stacks}, weights)["layers"]
    return x, stacks


def mixed_in_float32(x: Array, stacks: PyTree, form: Callable[..., Array]) -> Array:
    """Computes the first layer's mixture of the first tokens."""
    wide, own = widen((x[:CHECKED_TOKENS], jax.tree.map(lambda one: one[:1], stacks)))
    return jax.jit(form)(wide, None, own, jnp.int32(0))[:, 0]


def arrange_pairs(x: Array, stacks: PyTree, layer: Array, *, model: ModelConfig) -> PyTree:
    """Makes the inputs of the products alone, the weights `w`, and where each pair's result is."""
    router, k = stacks["router"]["kernel"], model.experts_per_token
    weights, experts = route(x[:, 0], router, layer, model_config=model, kernel_config=None)
    experts = experts.reshape(-1)
    groups = group_pairs(experts, num_experts=model.num_experts, size=GROUP_ROWS)
    rows = x[:, 0].at[groups.pair // k].get(mode="fill", fill_value=0)
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=model.num_experts).astype(jnp.int32)
    own = [stacks[name]["kernel"][layer] for name in EXPERTS[1:]]
    inputs = {
        "products": (rows, groups, stacks, layer),
        "ragged_dot": (x[order // k, 0], sizes, *own),
    }
    return inputs, weights, {"products": groups.place, "ragged_dot": jnp.argsort(order)}


def grouped_products(
    rows: Array, groups: Groups, stacks: PyTree, layer: Array, *, config: KernelConfig
) -> Array:
    """Multiplies groups of rows by their experts with the kernels."""
    whole = [stacks[name]["kernel"] for name in EXPERTS[1:]]
    gate, up, down = (one.reshape(-1, *one.shape[2:]) for one in whole)
    where = groups.expert + layer * whole[0].shape[1], groups.used
    hidden = grouped_swiglu(rows, gate, up, *where, kernel_config=config)
    return grouped_matmul(hidden, down, *where, kernel_config=config)


def ragged_products(rows: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """Multiplies sorted rows by their experts with XLA's ragged product."""
    wide = [jax.lax.ragged_dot(rows, one, sizes).astype(jnp.float32) for one in (gate, up)]
    hidden = (jax.nn.silu(wide[0]) * wide[1]).astype(rows.dtype)
    return jax.lax.ragged_dot(hidden, down, sizes)


def ragged_call(sets: Sequence[tuple[Any, ...]]) -> Row:
    """Makes calls of `ragged_products`, unless it takes too much memory or time."""
    program = built(ragged_products, *sets[0])
    if common.peak_gib(program) * 2**30 > device_room():
        raise MemoryError(common.DOES_NOT_FIT)
    taken = common.seconds(lambda: program(*sets[0]), 1, enough=10 * SLOW_SECONDS)["median"]
    if taken > SLOW_SECONDS:
        raise TimeoutError(f"a call takes {taken:.1f} s")
    return {"call": queued(program, sets)}


def experts(case: Case) -> Measure:
    """Measures mixtures of experts by kernels and XLA; of a prompt, also the products alone."""
    model = MODELS["qwen3-30b-a3b"]
    if case.is_quick:
        sizes = {"hidden_size": 128, "expert_intermediate_size": 128}
        model = dataclasses.replace(QUICK["tiny-experts"], **sizes)
    config = KernelConfig(interpret=dispatch.kernels_here() is None)
    forms = {
        form: functools.partial(mixture, model_config=model, kernel_config=own)
        for form, own in (("mixture", config), ("XLA", None))
    }
    is_prompt = case.rows * model.experts_per_token > FEW_PAIRS
    return (experts_of_prompt if is_prompt else experts_of_tokens)(case, model, config, forms)


def experts_of_prompt(case: Case, model: ModelConfig, config: Any, forms: Row) -> Measure:
    """Measures a row for each form: the mixture and XLA's, the products and `ragged_dot`'s."""
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    x, stacks = jax.eval_shape(lambda: draw_experts(case, model, "bfloat16", PROMPTS))
    arrange = jax.jit(functools.partial(arrange_pairs, model=model))
    inputs = jax.eval_shape(arrange, x, stacks, layer)[0]
    programs = {form: built(call, x, None, stacks, layer) for form, call in forms.items()}
    products = built(functools.partial(grouped_products, config=config), *inputs["products"])

    def measure(repeats: int) -> list[Row]:
        x, stacks = draw_experts(case, model, "bfloat16", PROMPTS)
        sets = [(x, None, stacks, jnp.int32(index)) for index in range(PROMPTS)]
        own = [arrange(x, stacks, one[3]) for one in sets]
        calls = {form: queued(program, sets) for form, program in programs.items()}
        calls["products"] = queued(products, [one[0]["products"] for one in own])
        found = common.found_or_error(ragged_call, [one[0]["ragged_dot"] for one in own])
        rows = [{"form": "ragged_dot", "dtype": "bfloat16", "error": found["error"]}]
        if not found["error"]:
            rows, calls["ragged_dot"] = [], found["call"]
        times = common.rounds(calls, repeats)
        wanted = mixed_in_float32(x, stacks, forms["XLA"])
        _, weights, places = own[0]
        work = 6 * model.hidden_size * model.expert_intermediate_size * weights.size

        def outputs(form: str) -> Array:
            found = calls[form](1)
            if form in places:  # undefined outside of the pairs' places
                found = found.reshape(-1, found.shape[-1])[places[form]]
                found = weights[..., None] * found.reshape(*weights.shape, -1).astype(jnp.float32)
            return jnp.sum(found, axis=1)[: len(wanted)]

        for form in calls:
            row = {"form": form, "dtype": "bfloat16"} | milliseconds(times[form])
            row["tflops"] = work / row["ms"] / 1e9  # of real pairs, not of padded groups
            rows.append(row | compare(outputs(form), outputs(form), wanted))
        return rows

    return measure


def experts_of_tokens(case: Case, model: ModelConfig, _: Any, forms: Row) -> Measure:
    """Measures a row for the mixture and for XLA's, with each type of weights."""
    layers, rounds = (2, 1) if case.is_quick else (LAYERS, ROUNDS_OF_LAYERS)
    loops, once = {}, {}
    for weights in EXPERT_WEIGHTS:
        shapes = jax.eval_shape(lambda weights=weights: draw_experts(case, model, weights, layers))
        for form, call in forms.items():

            def step(x: Array, stacks: PyTree, layer: int, call: Any = call) -> Array:
                found = call(x, None, stacks, jnp.int32(layer))
                return x + found * jnp.asarray(1e-30, x.dtype)  # the next layer waits for this one

            loops[weights, form] = Loop(step, *shapes, layers, rounds)
            once[weights, form] = built(call, shapes[0], None, shapes[1], jnp.int32(0))

    def measure(repeats: int) -> list[Row]:
        drawn = {name: draw_experts(case, model, name, layers) for name in EXPERT_WEIGHTS}
        calls = {one: loop.over(*drawn[one[0]]) for one, loop in loops.items()}
        times, rows = common.rounds(calls, repeats, step=layers * rounds), []
        for (weights, form), program in once.items():
            x, stacks = drawn[weights]
            router, how = stacks["router"]["kernel"], {"model_config": model, "kernel_config": None}
            chosen = [route(x[:, 0], router, jnp.int32(one), **how)[1] for one in range(layers)]
            count = sum(jnp.unique(one).size for one in chosen) / layers
            leaves = jax.tree.leaves([stacks[name] for name in EXPERTS[1:]])
            size = sum(leaf.nbytes for leaf in leaves) / layers * count / model.num_experts
            row = {"form": form, "dtype": weights, "experts": count, "weight_bytes": size}
            row |= milliseconds(times[weights, form])
            row["tb_per_s"] = size / row["ms"] / 1e9
            one, other = (program(x, None, stacks, jnp.int32(0))[:, 0] for _ in range(2))
            rows.append(row | compare(one, other, mixed_in_float32(x, stacks, forms["XLA"])))
        return rows

    return measure


# Selection by policies.


def selection(case: Case) -> Measure:
    """Measures a policy in one phase: update of statistics, selection, and attention.

    In prefill, the statistics are computed anew in each layer; in decode, a token follows a prompt
    that fills the cache. Dense attention has only the attention part.
    """
    policy, is_prompt, is_dense = case.rule.make(), case.phase == "prefill", case.rule == DENSE
    num_layers, num_blocks = PROMPTS if is_prompt else LAYERS, case.tokens // policy.block_size
    sizes, prompt = {"batch": case.batch, "num_blocks": num_blocks}, whole_prompt(case)
    span = prompt if is_prompt else Span.of_tokens(prompt.end - 1, policy.block_size)
    how: dict[str, Any] = {"span": span, "kernel_config": kernels_for(policy, case.phase)}

    def blank(_: Array, key: Array) -> PyTree:
        return policy.init_statistics(layer_shape(case), **sizes)

    def updated(query: Array, key: Array) -> PyTree:
        config = kernels_for(policy, "prefill")
        return policy.update_statistics(
            query, key, blank(query, key), span=prompt, kernel_config=config
        )

    def draw_inputs() -> tuple[Any, ...]:
        """Draws whole layers, the inputs of a step, stacked keys and values, and statistics."""
        layers = [draw_layer(case, index) for index in range(num_layers)]
        fill = jax.jit(blank if is_prompt else updated)
        statistics = tuple(fill(*layer[:2]) for layer in layers)
        if is_prompt:
            return layers, [layer[:2] for layer in layers], (None, None), statistics
        cache = tuple(jnp.stack([layer[place] for layer in layers]) for place in (1, 2))
        return layers, [(query[:, -1:], key[:, -1:]) for query, key, _ in layers], cache, statistics

    def first(statistics: PyTree) -> PyTree:
        walk = policy.init_walk(**sizes, num_rows=num_blocks if is_prompt else 1)
        return walk, jnp.zeros((), jnp.int32), statistics, (None,) * num_layers

    def step_of(part: str) -> Step:
        def step(state: PyTree, given: PyTree, index: int) -> PyTree:
            walk, entry, statistics, found = state
            inputs, keys, threshold = given
            own = policy.with_traced(threshold) if isinstance(policy, PrefillPolicy) else policy
            # Keep XLA from hoisting work out of the loop.
            walk, entry, (query, key), kept = jax.lax.optimization_barrier(
                (walk, entry, inputs[index], statistics[index])
            )
            made = kept = own.update_statistics(
                query, key, blank(query, key) if is_prompt else kept, **how
            )
            if part == "selection":
                stack, layer = (key[None], 0) if is_prompt else (keys, index)
                made, walk = own.select(query, stack, kept, walk, layer=jnp.int32(layer), **how)
                found = (*found[:index], made, *found[index + 1 :])
            leaf = jax.tree.leaves(made)[0]  # one entry of the result orders the steps
            statistics = (*statistics[:index], kept, *statistics[index + 1 :])
            return walk, leaf[(0,) * leaf.ndim].astype(jnp.int32), statistics, found

        return step

    def attention_inputs(layers: Any, cache: Any, lists: Any) -> Any:
        """Makes input sets for a prompt; for a token the query and the layers' inputs."""
        if is_prompt:
            pairs = zip(layers, lists, strict=True)
            return [layer if is_dense else (*layer, own) for layer, own in pairs]
        own = ([layer[1:] for layer in layers],) if is_dense else (*cache, lists)
        return layers[0][0][:, -1:], (*own, prompt.end)

    layers, inputs, cache, statistics = jax.eval_shape(draw_inputs)
    given = inputs, cache[0], jax.ShapeDtypeStruct((), jnp.float32)
    rounds_of = 1 if is_prompt and case.rule.policy in SLOW else ROUNDS_OF_LAYERS
    lists, states, loops = (None,) * num_layers, {}, {}
    parts = {"observe": updates_statistics(policy, case), "selection": case.phase in policy.phases}
    for part in (name for name, is_there in parts.items() if is_there):
        start = jax.eval_shape(first, statistics)
        # Take the shapes of the block indices from the step's outputs.
        made = jax.eval_shape(lambda *x, part=part: step_of(part)(*x, 0), start, given)
        states[part] = (*start[:3], made[3][:1] * num_layers)
        loops[part] = Loop(step_of(part), states[part], given, num_layers, rounds_of)
        lists = states[part][3]
    attends, attention = is_dense or parts["selection"], None
    shapes = jax.eval_shape(attention_inputs, layers, cache, lists)
    if attends and is_prompt:
        attention = built(dense_prompt if is_dense else sw.block_sparse_attention, *shapes[0])
    elif attends:
        attention = Loop(dense_token if is_dense else attend_token, *shapes, num_layers)

    def density_of(lists: Sequence[sw.BlockSelection]) -> float:
        size = lists[0].queries_per_row if is_prompt else 1
        start = jnp.arange(0 if is_prompt else case.tokens - 1, case.tokens, size)[None]
        pairs = [float(one.attended_pairs(start, jnp.full_like(start, size))[0]) for one in lists]
        whole = case.tokens * (case.tokens + 1) / 2 if is_prompt else case.tokens
        return sum(pairs) / len(pairs) / whole

    def measure(repeats: int) -> list[Row]:
        layers, inputs, cache, statistics = draw_inputs()

        def run(part: str, threshold: float) -> Call:
            walk, entry, _, found = states[part]
            state = (*zeros((walk, entry)), statistics, zeros(found))
            return loops[part].over(state, (inputs, cache[0], jnp.float32(threshold)))

        def lists_with(threshold: float) -> Any:
            return run("selection", threshold)(loops["selection"].steps)[3]

        row, threshold, lists = Row(), 0.0, (None,) * num_layers
        if parts["selection"]:
            if has_threshold(policy):
                threshold = find_threshold(
                    policy, lambda one: density_of(lists_with(one)), case.density
                )
                row["settings"] = {policy.threshold_field: threshold}
            lists = lists_with(threshold)
            query = layers[0][0] if is_prompt else layers[0][0][:, -1:]
            row |= described(query, lists[0]) | {"measured_density": density_of(lists)}
        elif is_dense:
            row = {"attention_implementation": PEER, "measured_density": 1.0}
        calls = {part: (run(part, threshold), one.steps) for part, one in loops.items()}
        if attends:
            sets = attention_inputs(layers, cache, lists)
            call = queued(attention, sets) if is_prompt else attention.over(*sets)
            calls["attention"] = call, 1 if is_prompt else attention.steps
        for part, (call, steps) in calls.items():
            row |= milliseconds(common.rounds({part: call}, repeats, step=steps)[part], f"{part}_")
        return [row]

    return measure


def updates_statistics(policy: Policy, case: Case) -> bool:
    """Whether the policy keeps statistics."""
    make = functools.partial(policy.init_statistics, batch=1, num_blocks=1)
    return bool(jax.tree.leaves(jax.eval_shape(lambda: make(layer_shape(case)))))


def layer_shape(case: Case) -> LayerShape:
    """Returns the sizes of a layer."""
    return LayerShape(*case.heads, case.head_dim, jnp.dtype(case.dtype))


def described(query: Array, lists: sw.BlockSelection) -> Row:
    """Describes a selection, and the implementation that attends to it."""
    sizes = {"block_size": lists.block_size, "row_size": lists.row_size}
    row = {"num_lists": lists.ids.shape[1], "list_block_size": lists.block_size}
    return row | {"attention_implementation": dispatch.choose_implementation(None, query, **sizes)}


def find_threshold(policy: Any, density_at: Callable[[float], float], density: float) -> float:
    """Finds a threshold by bisection; larger values keep more."""
    low, high = policy.threshold_range
    for _ in range(THRESHOLD_STEPS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if density_at(middle) > density else (middle, high)
    return 0.5 * (low + high)


OPERATIONS: dict[str, Callable[[Case], Measure]] = {
    "prefill": prefill,
    "decode": decode,
    "quantize": selection_part,
    "scores": selection_part,
    "lists": selection_part,
    "linear": linear,
    "experts": experts,
    "gradient": gradient,
    "other_gpus": prefill,
    "torch": prefill,
    "selection": selection,
}


if __name__ == "__main__":
    main()
