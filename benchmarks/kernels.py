"""The kernels beside cuDNN's dense attention, in one process, on one GPU.

    python benchmarks/kernels.py [--out benchmarks/results/kernels.json] [--only OP] [--quick]

Prefill is timed over calls queued one after another, decoding and selection inside a jitted loop
whose steps depend on each other, as layers do: their calls would take longer to start than to run.
Both sides rotate over the same several inputs, and take turns.
Without a Hopper GPU only `--quick` makes sense: everything runs on XLA then.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import kernel_inputs
from kernel_inputs import Shape, loop
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax import dispatch
from sketchwalk_jax.compiled import keep_compiled_programs

IMPLEMENTATION = "mosaic_gpu" if dispatch.is_hopper() else "xla"
PEER = "cudnn" if jax.default_backend() == "gpu" else "xla"
CHECKED_TOKENS = 256
ROUND_SECONDS = 0.1
# Rounds over the layers between two looks at a loop's condition, which a GPU asks the host for.
ROUNDS_OF_LAYERS = 8
Row = dict[str, Any]
Call = Callable[[int], Any]  # enqueues that many steps


def _shapes() -> tuple[Shape, ...]:
    lengths = [2**power for power in range(13, 18)]
    prefill = [Shape(op="prefill", tokens=n, density=d) for d in (0.1, 0.2, 1.0) for n in lengths]
    for length in (2**14, 2**17):
        prefill += [Shape(op="prefill", tokens=length, density=d, head_dim=64) for d in (0.1, 0.2)]
        prefill.append(Shape(op="prefill", tokens=length, density=0.1, heads=(28, 4)))
    decode = [Shape(op="decode", tokens=n, density=0.1) for n in lengths]
    for batch, length in ((8, 2**16), (32, 2**14), (128, 2**12)):
        for head_dim in (128, 64):
            sizes: dict[str, int] = {"tokens": length, "batch": batch, "head_dim": head_dim}
            decode.append(Shape(op="decode", density=0.2, **sizes))
    decode.append(Shape(op="decode", tokens=2**17, density=0.1, heads=(28, 4)))
    decode.append(Shape(op="decode", tokens=2**16, density=0.2, batch=8, block_size=16))
    select = [
        Shape(op=op, tokens=n, density=0.1)
        for op in ("select_prefill", "select_decode")
        for n in (2**14, 2**16, 2**17)
    ]
    return (*prefill, *decode, *select)


SHAPES = _shapes()
QUICK_SHAPES = tuple(
    Shape(op=op, tokens=1024, density=0.2, batch=batch, heads=(4, 2), head_dim=64)
    for op, batch in (("prefill", 1), ("decode", 2), ("select_prefill", 1), ("select_decode", 1))
)


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "kernels.json"))
    parser.add_argument("--only", action="append", choices=sorted(MEASURE), help="default: all")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in turns")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds")
    options = parser.parse_args()
    keep_compiled_programs()
    every = QUICK_SHAPES if options.quick else SHAPES
    shapes = [shape for shape in every if shape.op in (options.only or MEASURE)]
    common.check_filters(options, ({"only": shape.op} for shape in every), shapes)
    repeats = 2 if options.quick else options.repeats
    bandwidth = copy_bandwidth(2**24 if options.quick else 2**32, repeats)
    rows: list[Row] = []
    failed = []
    for shape in tqdm(shapes, desc="kernels"):
        try:
            rows.append(MEASURE[shape.op](shape, repeats) | {"implementation": IMPLEMENTATION})
        except Exception as error:  # the other shapes' figures are worth keeping
            failed.append(f"{shape}: {type(error).__name__}: {str(error)[:500]}")
            tqdm.write(f"failed: {failed[-1]}")
            continue
        row = rows[-1]
        if "tb_per_s" in row:
            row["fraction_of_copy_bandwidth"] = row["tb_per_s"] / bandwidth
        tqdm.write(describe(row))
    add_shares(rows)
    meta = common.describe_machine(
        copy_tb_per_s=bandwidth, is_quick=options.quick, repeats=repeats, failed=failed
    )
    common.write_results(options.out, meta, rows)
    if failed:
        raise SystemExit("\n".join(failed))


def rounds(
    calls: dict[str, Call],
    repeats: int,
    *,
    step: int = 1,
    round_seconds: float = ROUND_SECONDS,
) -> dict[str, list[float]]:
    """Seconds per step of each call, in turns; rounds last about `round_seconds`."""
    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call(step))
        start = common.clock()
        jax.block_until_ready(call(step))
        seconds = (common.clock() - start) / step
        counts[name] = max(1, min(500, math.ceil(round_seconds / seconds / step))) * step
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = common.clock()
            jax.block_until_ready(call(counts[name]))
            times[name].append((common.clock() - start) / counts[name])
    return times


def copy_bandwidth(size: int, repeats: int) -> float:
    """Bytes read and written by copies of `size` bytes, in TB/s."""
    source = jnp.ones((size // 4,), jnp.float32)
    copy = jax.jit(jnp.copy)

    def run(count: int) -> Any:
        for _ in range(count):
            out = copy(source)
        return out

    return 2 * size / common.summarize(rounds({"copy": run}, repeats)["copy"])["median"] / 1e12


def in_turns(function: Callable[..., Any], sets: list[Any]) -> Call:
    """Queues calls with one set of inputs after another."""
    compiled = jax.jit(function).lower(*sets[0]).compile()

    def run(count: int) -> Any:
        for index in range(count):
            out = compiled(*sets[index % len(sets)])
        return out

    return run


def in_loop(step: Callable[..., Any], first: Any, inputs: Any, num_sets: int) -> Call:
    """One program whose steps each start from what the last one made, over the sets in turn."""
    program = jax.jit(loop(step, num_layers=num_sets, rounds=ROUNDS_OF_LAYERS))
    compiled = program.lower(jnp.int32(1), first, inputs).compile()
    return lambda count: compiled(jnp.int32(count // (num_sets * ROUNDS_OF_LAYERS)), first, inputs)


def row_of(shape: Shape, times: dict[str, list[float]]) -> Row:
    """The shape and the times of both sides."""
    row: Row = {name: getattr(shape, name) for name in ("op", "batch", "tokens")}
    row |= {"num_heads": shape.heads[0], "num_kv_heads": shape.heads[1]}
    row |= {name: getattr(shape, name) for name in ("head_dim", "density", "dtype", "block_size")}
    row["peer"] = PEER if "peer" in times else None
    for name in ("ours", "peer"):
        found = common.summarize(times[name]) if name in times else None
        row[f"{name}_ms"] = found["median"] * 1e3 if found else None
        row[f"{name}_ms_iqr"] = (found["q75"] - found["q25"]) * 1e3 if found else None
    row["ratio"] = row["peer_ms"] / row["ours_ms"] if "peer" in times else None
    return row


def measure_prefill(shape: Shape, repeats: int) -> Row:
    """Attention of a whole prompt over lists, beside dense attention."""
    sets = kernel_inputs.prefill_sets(shape)
    ours = functools.partial(sw.block_sparse_attention, implementation=IMPLEMENTATION)
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=PEER)
    runs = {"ours": in_turns(ours, sets), "peer": in_turns(peer, [one[:3] for one in sets])}
    row = row_of(shape, rounds(runs, repeats))
    query, key, value, selection = sets[0]
    positions = jnp.arange(selection.ids.shape[2], dtype=jnp.int32)[None, :] * shape.block_size
    full = jnp.full_like(positions, shape.block_size)
    pairs = float(jnp.sum(selection.attended_pairs(positions, full)))
    row["attended_pairs"] = pairs / (shape.tokens * (shape.tokens + 1) / 2)
    row["tflops"] = 4 * shape.head_dim * shape.heads[0] * pairs / row["ours_ms"] / 1e9
    # The last tokens again, in float32 on XLA.
    tail = min(CHECKED_TOKENS, shape.tokens)
    last = -(tail // shape.block_size)
    lists = sw.BlockSelection(
        selection.ids[:, :, last:], selection.counts[:, :, last:], shape.block_size
    )
    wanted = attend_tail(
        *(x.astype(jnp.float32) for x in (query[:, -tail:], key, value)),
        lists,
        first=shape.tokens - tail,
    )
    program = jax.jit(ours)
    return row | compare(
        program(*sets[0])[:, -tail:], program(*sets[0])[:, -tail:], wanted[:, -tail:]
    )


@functools.partial(jax.jit, static_argnames=("first",))
def attend_tail(
    query: Any, key: Any, value: Any, lists: sw.BlockSelection, *, first: int
) -> jax.Array:
    """Queries from block `first` on, padded as a first row may start anywhere."""
    padding = ((0, 0), (0, 0), (0, 1), (0, 0))
    lists = dataclasses.replace(
        lists, ids=jnp.pad(lists.ids, padding), counts=jnp.pad(lists.counts, padding[:3])
    )
    offset = jnp.full((query.shape[0],), first, jnp.int32)
    with jax.default_matmul_precision("highest"):
        return sw.block_sparse_attention(
            query, key, value, lists, query_offset=offset, implementation="xla"
        )


def compare(one: jax.Array, other: jax.Array, wanted: jax.Array) -> Row:
    """The distance of a result from the one wanted, and whether two runs gave the same."""
    actual = one.astype(jnp.float32)
    error = jnp.linalg.norm((actual - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())
    return {
        "relative_error": float(error),
        "is_bit_equal": bool(jnp.all(one == other)),
    }


def measure_decode(shape: Shape, repeats: int) -> Row:
    """One token per sequence over its list, from a stacked cache; dense decoding beside it."""
    query, key, value, selections = kernel_inputs.decode_inputs(shape)
    layers = len(selections)
    lengths = jnp.full((shape.batch,), shape.tokens, jnp.int32)
    inputs = (key, value, selections)
    caches = [(key[layer], value[layer]) for layer in range(layers)]

    def ours(query: Any, inputs: Any, layer: int) -> Any:
        key, value, selections = inputs
        return sw.block_sparse_decode(
            query,
            key,
            value,
            selections[layer],
            layer=layer,
            kv_lengths=lengths,
            implementation=IMPLEMENTATION,
        )

    def peer(query: Any, caches: Any, layer: int) -> Any:
        return jax.nn.dot_product_attention(
            query, *caches[layer], key_value_seq_lengths=lengths, implementation=PEER
        )

    runs = {
        "ours": in_loop(ours, query, inputs, layers),
        "peer": in_loop(peer, query, caches, layers),
    }
    row = row_of(shape, rounds(runs, repeats, step=layers * ROUNDS_OF_LAYERS))
    blocks = sum(int(jnp.sum(one.counts)) for one in selections) / layers
    one_block = 2 * shape.block_size * shape.heads[1] * shape.head_dim * query.dtype.itemsize
    row["tb_per_s"] = blocks * one_block / row["ours_ms"] / 1e9
    row["attended_blocks"] = blocks / shape.batch
    program = jax.jit(ours, static_argnums=2)
    wide = query.astype(jnp.float32)
    wanted = sw.block_sparse_decode(
        wide,
        *(x.astype(jnp.float32) for x in caches[0]),
        selections[0],
        kv_lengths=lengths,
        implementation="xla",
    )
    return row | compare(program(query, inputs, 0), program(query, inputs, 0), wanted)


def measure_select_prefill(shape: Shape, repeats: int) -> Row:
    """Block sums, scores, walk and lists of a whole prompt, layer after layer."""
    sets = kernel_inputs.selection_sets(shape)
    step, first = kernel_inputs.prefill_selection(shape)
    run = in_loop(step, first, sets, len(sets))
    return row_of(shape, rounds({"ours": run}, repeats, step=len(sets) * ROUNDS_OF_LAYERS))


def measure_select_decode(shape: Shape, repeats: int) -> Row:
    """Scores, walk row and list of one token, layer after layer."""
    step, first, inputs = kernel_inputs.decode_selection(shape)
    layers = len(inputs)
    run = in_loop(step, first, inputs, layers)
    return row_of(shape, rounds({"ours": run}, repeats, step=layers * ROUNDS_OF_LAYERS))


def add_shares(rows: list[Row]) -> None:
    """What selection takes beside the attention of the same shape."""
    keys = ("tokens", "batch", "num_heads", "num_kv_heads", "head_dim", "density", "block_size")
    attention = {(x["op"], *(x[key] for key in keys)): x["ours_ms"] for x in rows}
    for row in rows:
        if row["op"].startswith("select_"):
            other = attention.get((row["op"][7:], *(row[key] for key in keys)))
            row["share_of_attention"] = row["ours_ms"] / other if other else None


def describe(row: Row) -> str:
    """One line for the terminal."""
    heads = f"{row['num_heads']}/{row['num_kv_heads']}x{row['head_dim']}"
    text = f"{row['op']:<14} B={row['batch']:<3} {row['tokens']:>6} {heads:<10}"
    text += f" d={row['density']:<4g} {row['ours_ms']:9.4f} ms (iqr {row['ours_ms_iqr']:.4f})"
    if row["peer"]:
        text += f", {row['peer']} {row['peer_ms']:9.4f} ms, {row['ratio']:.2f}x"
    if "tflops" in row:
        text += f", {row['tflops']:.0f} TFLOP/s"
    if "tb_per_s" in row:
        text += f", {row['tb_per_s']:.2f} TB/s ({row['fraction_of_copy_bandwidth']:.0%} of copy)"
    if "relative_error" in row:
        text += f", error {row['relative_error']:.1e}{'' if row['is_bit_equal'] else ' UNEQUAL'}"
    return text


MEASURE: dict[str, Callable[[Shape, int], Row]] = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "select_prefill": measure_select_prefill,
    "select_decode": measure_select_decode,
}


if __name__ == "__main__":
    main()
