"""What XLA's code costs on a GPU, beside the kernels for GPUs from Ampere on and dense attention.

    python benchmarks/xla_path.py [--out FILE] [--dtype float16] [--quick]

One layer of the default policy from 4K to 32K tokens, in one process: dense attention, attention
over the lists that the policy makes, by XLA and by the kernels, and the policy's observation and
selection, by XLA and, in bfloat16, by the kernels. Prompts are queued one after another; tokens are
decoded in a loop whose steps depend on each other. Forms take turns. On Hopper the kernels are
those for other GPUs all the same. Without such a GPU everything runs on XLA.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import common
import jax
import jax.numpy as jnp
import kernel_inputs
import kernels
import selection
from jaxtyping import Array
from kernel_inputs import LAYERS, Shape, loop
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax import dispatch
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.selection import BlockSelection

HAS_KERNELS = dispatch.kernels_here() is not None
PROMPTS = 2  # of each form in turn
STEP = LAYERS * kernels.ROUNDS_OF_LAYERS
ROUND_SECONDS = 0.04
TOKENS, DENSITIES, BATCHES = (2**12, 2**13, 2**14, 2**15), (0.1, 0.2), (1, 8)
# A layer's time in terms of forms, and dense attention's beside it.
SUMS = {
    "all_xla": ("selection", "xla"),
    "kernel_and_selection": ("selection", "kernel"),
    "all_kernels": ("kernel_selection", "kernel"),
}
NAMES = ("op", "tokens", "density", "batch", "heads", "head_dim", "dtype")  # tell rows apart
Row = dict[str, Any]


def main() -> None:
    """Runs everything and writes the results, length by length, in the place of older ones."""
    if HAS_KERNELS:  # those for other GPUs on Hopper, too
        dispatch.kernels_here = lambda: "ampere"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "xla_path.json"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--tokens", type=int, action="append", help="default: 4K to 32K")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, in turns")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds")
    options = parser.parse_args()
    keep_compiled_programs()
    repeats = 2 if options.quick else options.repeats
    size: dict[str, Any] = {"dtype": options.dtype}
    if options.quick:
        size |= {"heads": (4, 2), "head_dim": 64}
    failed: list[str] = []
    for tokens in options.tokens or ((1024,) if options.quick else TOKENS):
        rows: list[Row] = []
        shapes = [
            Shape(op=op, tokens=tokens, density=density, batch=batch, **size)
            for op, batches in (("prefill", (1,)), ("decode", BATCHES))
            for batch in batches
            for density in (DENSITIES[1:] if options.quick else DENSITIES)
        ]
        with common.Compiling() as pool:
            measures = [MEASURE[shape.op](shape, pool) for shape in shapes]
        for shape, measure in zip(shapes, tqdm(measures, desc=f"{tokens:,} tokens"), strict=True):
            row, errors = measure(repeats)
            rows.append(row)
            failed += [f"{shape} {error}" for error in errors]
            tqdm.write(describe(row))
        meta = common.describe_machine(is_quick=options.quick, repeats=repeats, failed=failed)
        common.add_rows(options.out, meta, rows, NAMES)
    if failed:
        raise SystemExit("\n".join(failed))


def describe(row: Row) -> str:
    """A few lines for the terminal."""
    head = f"{row['op']} B={row['batch']} {row['tokens']} density {row['density']:g}"
    lines = [
        f"  {name:<22}{one['ms']:10.4f} ms (iqr {one['ms_iqr']:.4f}), "
        f"dense takes {one['times_faster']['median']:.2f} times as long"
        for name, one in row["forms"].items()
    ]
    return "\n".join([head, *lines])


def submit(pool: common.Compiling, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Starts to compile a function for arrays of these shapes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return pool.submit(lambda: jax.jit(function).lower(*shapes).compile())


def timed(
    shape: Shape, calls: Mapping[str, Callable[[int], Any]], repeats: int, *, step: int
) -> tuple[Row, list[str]]:
    """A row of the times of all forms that run, and why the others do not."""
    runs, errors = {}, []
    for name, call in calls.items():
        try:
            jax.block_until_ready(call(step))
            runs[name] = call
        except Exception as error:  # the other forms' figures are worth keeping
            errors.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    times = kernels.rounds(runs, repeats, step=step, round_seconds=ROUND_SECONDS)
    for name, parts in SUMS.items():
        if times.keys() >= set(parts):
            times[name] = [sum(some) for some in zip(*(times[part] for part in parts), strict=True)]
    dense = times["cudnn" if "cudnn" in times else "xla_dense"]
    row = dataclasses.asdict(shape) | {"forms": {}}
    for name, own in times.items():
        found = common.summarize(own)
        ratios = [slow / fast for slow, fast in zip(dense, own, strict=True)]
        row["forms"][name] = {
            "ms": found["median"] * 1e3,
            "ms_iqr": (found["q75"] - found["q25"]) * 1e3,
            "times_faster": common.summarize(ratios),
        }
    return row, errors


def policy_of(shape: Shape) -> sw.RecommendedConfig:
    """The default policy."""
    return sw.SketchWalkConfig.recommended(density=shape.density)


def select_prompt(
    shape: Shape, query: Array, key: Array, span: Span, *, kernel_config: KernelConfig | None = None
) -> BlockSelection:
    """The lists of a whole prompt in the first layer, by XLA, or by kernels with what they need."""
    policy, num_blocks = policy_of(shape), shape.num_blocks
    sizes = {"batch": shape.batch, "num_blocks": num_blocks}
    how: dict[str, Any] = {"span": span, "kernel_config": kernel_config}
    statistics = policy.init_statistics(selection.layer_shape(shape), **sizes)
    statistics = policy.observe(query, key, statistics, **how)
    walk = policy.init_walk(**sizes, num_rows=num_blocks)
    layer = jnp.zeros((), jnp.int32)
    return policy.select(query, key[None], statistics, walk, layer=layer, **how)[0]


def attend_by_kernel(query: Array, key: Array, value: Array, lists: BlockSelection) -> Array:
    """A whole prompt over its lists, by the kernel for GPUs from Ampere on."""
    from sketchwalk_jax.pallas_kernels.ampere_prefill import ampere_prefill

    batch, tokens, _, head_dim = query.shape
    return ampere_prefill(
        query,
        key[None],
        value[None],
        lists.ids,
        lists.counts,
        layer=0,
        first_block=jnp.zeros(batch, jnp.int32),
        kv_lengths=jnp.full(batch, tokens, jnp.int32),
        scale=head_dim**-0.5,
        block_size=lists.block_size,
        row_size=lists.queries_per_row,
    )[0]


def prefill(shape: Shape, pool: common.Compiling) -> Callable[[int], tuple[Row, list[str]]]:
    """What measures whole prompts; the programs start to compile."""
    widths = (shape.heads[0], shape.heads[1], shape.heads[1])
    drawn = jax.eval_shape(
        lambda: tuple(kernel_inputs.draw(jax.random.key(0), shape, n, shape.tokens) for n in widths)
    )
    span = kernel_inputs.whole_prompt(shape)
    select = functools.partial(select_prompt, shape)
    lists = jax.eval_shape(select, *drawn[:2], span)
    xla = {"implementation": "xla"}
    dense: dict[str, Callable[..., Any]] = {
        "xla_dense": functools.partial(sw.dense_attention, **xla)
    }
    if dispatch.why_not_cudnn(drawn[0], num_keys=shape.tokens, has_offset=False) is None:
        dense["cudnn"] = functools.partial(sw.dense_attention, implementation="cudnn")
    sparse: dict[str, Callable[..., Any]] = {
        "xla": functools.partial(sw.block_sparse_attention, **xla)
    }
    if HAS_KERNELS:
        sparse["kernel"] = attend_by_kernel
    programs = {name: submit(pool, one, *drawn) for name, one in dense.items()}
    programs |= {name: submit(pool, one, *drawn, lists) for name, one in sparse.items()}
    selects = {"selection": select}
    if HAS_KERNELS and shape.dtype == "bfloat16":
        with_kernels = default_kernel_config()
        selects["kernel_selection"] = functools.partial(select, kernel_config=with_kernels)
    programs |= {name: submit(pool, one, *drawn[:2], span) for name, one in selects.items()}

    def measure(repeats: int) -> tuple[Row, list[str]]:
        prompts = []
        for index in range(PROMPTS):
            keys = jax.random.split(jax.random.key(index), 3)
            arrays = [
                kernel_inputs.draw(key, shape, n, shape.tokens)
                for key, n in zip(keys, widths, strict=True)
            ]
            prompts.append((*arrays, programs["selection"].result()(*arrays[:2], span)))
        sets = {
            **dict.fromkeys(dense, [one[:3] for one in prompts]),
            **dict.fromkeys(sparse, prompts),
            **dict.fromkeys(selects, [(*one[:2], span) for one in prompts]),
        }
        calls = {name: selection.queued(programs[name], some) for name, some in sets.items()}
        return timed(shape, calls, repeats, step=1)

    return measure


def attend_token_by_kernel(query: Array, given: Any, layer: int) -> Array:
    """One token of each sequence over its list, by the kernel for GPUs from Ampere on."""
    from sketchwalk_jax.pallas_kernels.block_sparse_decode import block_sparse_decode_kernel

    key, value, lists, lengths = given
    return block_sparse_decode_kernel(
        query,
        key,
        value,
        lists[layer].ids,
        lists[layer].counts,
        layer=layer,
        kv_lengths=lengths,
        scale=query.shape[-1] ** -0.5,
        block_size=lists[layer].block_size,
    )[0]


def attend_token_by_xla(query: Array, given: Any, layer: int) -> Array:
    """One token of each sequence over its list, by XLA."""
    key, value, lists, lengths = given
    return sw.block_sparse_decode(
        query, key, value, lists[layer], layer=layer, kv_lengths=lengths, implementation="xla"
    )


def attend_token_densely(query: Array, given: Any, layer: int) -> Array:
    """One token of each sequence over all keys, by XLA."""
    key, value, _, lengths = given
    return sw.dense_attention(
        query,
        key,
        value,
        layer=layer,
        query_offset=lengths - 1,
        kv_lengths=lengths,
        implementation="xla",
    )


def attend_token_by_cudnn(query: Array, given: Any, layer: int) -> Array:
    """One token of each sequence over all keys, by cuDNN."""
    layers, lengths = given
    return jax.nn.dot_product_attention(
        query, *layers[layer], key_value_seq_lengths=lengths, implementation="cudnn"
    )


@functools.lru_cache(maxsize=len(BATCHES))
def draw_cache(shape: Shape) -> tuple[Array, list[Any], Array, Array]:
    """A token's queries, keys and values of each layer, and the same stacked."""
    keys = jax.random.split(jax.random.key(0), 1 + 2 * LAYERS)
    query = kernel_inputs.draw(keys[0], shape, shape.heads[0], 1)
    caches = [
        tuple(kernel_inputs.draw(one, shape, shape.heads[1], shape.tokens) for one in some)
        for some in keys[1:].reshape(LAYERS, 2)
    ]
    key, value = (jnp.stack(some) for some in zip(*caches, strict=True))
    return query, caches, key, value


def decode(shape: Shape, pool: common.Compiling) -> Callable[[int], tuple[Row, list[str]]]:
    """What measures one token of each sequence; the programs start to compile."""
    policy = policy_of(shape)
    query, caches, key, value = draw_cache(dataclasses.replace(shape, density=0.0))
    lengths = jnp.full((shape.batch,), shape.tokens, jnp.int32)
    inputs = selection.Inputs(
        shape, [(query, *one) for one in caches], kernel_inputs.whole_prompt(shape)
    )
    make = functools.partial(
        selection.token_loop,
        policy,
        inputs,
        key,
        selects=True,
        rounds=kernels.ROUNDS_OF_LAYERS,
    )
    selects = {"selection": make(kernel_config=None)}
    if HAS_KERNELS:
        selects["kernel_selection"] = make(kernel_config=default_kernel_config())
    one = jnp.int32(1)
    programs = {name: submit(pool, some[0], one, *some[1:]) for name, some in selects.items()}
    _, shapes, tokens = selects["selection"]
    given = (key, value, shapes[3], lengths)
    full = (jnp.arange(shape.num_blocks, dtype=jnp.int32), jnp.int32(shape.num_blocks))
    ids, counts = (jnp.broadcast_to(x, (shape.batch, 1, 1, *x.shape)) for x in full)
    every = (BlockSelection(ids, counts, shape.block_size),) * LAYERS
    attending = {
        "xla_dense": (attend_token_densely, given),
        "xla": (attend_token_by_xla, given),
    }
    if HAS_KERNELS:
        attending |= {
            "cudnn": (attend_token_by_cudnn, (caches, lengths)),
            "kernel_dense": (attend_token_by_kernel, (key, value, every, lengths)),
            "kernel": (attend_token_by_kernel, given),
        }
    for name, (step, some) in attending.items():
        program = loop(step, num_layers=LAYERS, rounds=kernels.ROUNDS_OF_LAYERS)
        programs[name] = submit(pool, program, one, query, some)

    def measure(repeats: int) -> tuple[Row, list[str]]:
        fill = jax.jit(functools.partial(fill_codes, policy))
        codes = tuple(
            fill(own, statistics, inputs.span)
            for (own, _), statistics in zip(caches, selection.zeros(shapes[2]), strict=True)
        )
        calls = {}
        for name, (_, own, _) in selects.items():
            state = (*selection.zeros(own[:2]), codes, selection.zeros(own[3]))
            calls[name] = selection.looped(programs[name], state, tokens, STEP)
        found = calls["selection"](STEP)[3]
        for name, (_, some) in attending.items():
            if some is given:
                some = (key, value, found, lengths)
            calls[name] = selection.looped(programs[name], query, some, STEP)
        return timed(shape, calls, repeats, step=STEP)

    return measure


def fill_codes(policy: sw.RecommendedConfig, key: Array, statistics: Any, span: Span) -> Any:
    """The codes of a layer's keys."""
    return policy.observe(key, key, statistics, span=span)  # it reads no query


MEASURE = {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    main()
