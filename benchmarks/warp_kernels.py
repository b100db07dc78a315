"""Attention by products of single warps beside Hopper's kernels and cuDNN's dense attention.

    python benchmarks/warp_kernels.py --op prefill [--out FILE]
    python benchmarks/warp_kernels.py --op decode [--out FILE]

On any NVIDIA GPU of compute capability 8.0 or higher, in one process; Hopper's kernel of prompts
runs on Hopper alone. Prompts are queued one after another over the same inputs, tokens are decoded
in a loop whose steps depend on each other; forms take turns. Lists of pages name the four pages of
each listed block, so that all forms attend to the same keys. Every form is checked: the last
tokens, or the token, against float32 on XLA, and a second run bit for bit.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import kernel_inputs
from kernel_inputs import Shape
from kernels import (
    CHECKED_TOKENS,
    ROUNDS_OF_LAYERS,
    attend_tail,
    compare,
    copy_bandwidth,
    in_loop,
    in_turns,
    rounds,
)

import sketchwalk_jax as sw
from sketchwalk_jax import dispatch
from sketchwalk_jax.pallas_kernels.ampere_prefill import ampere_prefill
from sketchwalk_jax.pallas_kernels.block_sparse_decode import block_sparse_decode_kernel
from sketchwalk_jax.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from sketchwalk_jax.pallas_kernels.config import KernelConfig

PAGES = 4  # of a block
SHAPES = {
    "prefill": [
        Shape(op="prefill", tokens=tokens, density=density, head_dim=head_dim, heads=heads)
        for tokens, density in ((2**14, 0.1), (2**14, 1.0), (2**16, 0.1))
        for head_dim, heads in ((128, (32, 8)), (64, (32, 8)), (128, (8, 8)))
    ],
    "decode": [
        Shape(
            op="decode",
            tokens=tokens,
            density=density,
            batch=batch,
            head_dim=head_dim,
            heads=heads,
        )
        for tokens, density, batch in (
            (2**14, 0.1, 1),
            (2**16, 0.1, 1),
            (2**17, 0.1, 1),
            (2**16, 0.2, 8),
            (2**12, 0.2, 128),
        )
        for head_dim, heads in ((128, (32, 8)), (64, (32, 8)), (128, (8, 8)))
    ],
}


def lists_of(selection: sw.BlockSelection, of_pages: bool) -> tuple[jax.Array, jax.Array]:
    """The lists of a selection of blocks of 64, or of their pages."""
    ids, counts = selection.ids, selection.counts
    if of_pages:
        ids = ids[..., None] * PAGES + jnp.arange(PAGES, dtype=ids.dtype)
        ids, counts = ids.reshape(*ids.shape[:-2], -1), counts * PAGES
    return ids, counts


def attend(
    kernel: Callable[..., Any],
    of_pages: bool,
    config: KernelConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    selection: sw.BlockSelection,
) -> jax.Array:
    """A kernel's attention of whole prompts over lists of blocks of 64, or of their pages."""
    sizes = {"block_size": 64 // PAGES, "row_size": 64} if of_pages else {"block_size": 64}
    batch, tokens, _, head_dim = query.shape
    out, _ = kernel(
        query,
        key[None],
        value[None],
        *lists_of(selection, of_pages),
        layer=0,
        first_block=jnp.zeros(batch, jnp.int32),
        kv_lengths=jnp.full(batch, tokens, jnp.int32),
        scale=head_dim**-0.5,
        kernel_config=config,
        **sizes,
    )
    return out


def attend_token(
    kernel: Callable[..., Any],
    of_pages: bool,
    config: KernelConfig,
    query: jax.Array,
    inputs: Any,
    layer: int,
) -> jax.Array:
    """A kernel's attention of one token of each sequence to a layer of a cache that is full."""
    key, value, lists = inputs
    out, _ = kernel(
        query,
        key,
        value,
        *lists[of_pages][layer],
        layer=jnp.int32(layer),
        kv_lengths=jnp.full(key.shape[1], key.shape[2], jnp.int32),
        scale=query.shape[-1] ** -0.5,
        block_size=64 // PAGES if of_pages else 64,
        kernel_config=config,
    )
    return out


def forms(op: str) -> dict[str, Callable[..., Any]]:
    """What is timed, by name."""
    plain, found = KernelConfig(), {}
    for name, of_pages in (("blocks", False), ("pages", True)):
        if op == "decode":
            form = functools.partial(attend_token, block_sparse_decode_kernel, of_pages, plain)
            found[f"warps_{name}"] = form
            continue
        found[f"warps_{name}"] = functools.partial(attend, ampere_prefill, of_pages, plain)
        if dispatch.is_hopper():
            form = functools.partial(attend, block_sparse_prefill, of_pages, plain)
            found[f"hopper_{name}"] = form
    return found


def measure(shape: Shape, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Times, rates and errors of one shape, and what failed."""
    return (measure_prefill if shape.op == "prefill" else measure_decode)(shape, repeats)


def measure_decode(shape: Shape, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Those of one token per sequence, with the rate at which listed keys and values are read."""
    query, key, value, selections = kernel_inputs.decode_inputs(shape)
    layers, lengths = len(selections), jnp.full((shape.batch,), shape.tokens, jnp.int32)
    lists = [[lists_of(one, of_pages) for one in selections] for of_pages in (False, True)]
    inputs = (key, value, lists)
    caches = [(key[layer], value[layer]) for layer in range(layers)]
    wide = (x.astype(jnp.float32) for x in (query, *caches[0]))
    wanted = sw.block_sparse_decode(*wide, selections[0], kv_lengths=lengths, implementation="xla")

    def dense(query: Any, caches: Any, layer: int) -> Any:
        return jax.nn.dot_product_attention(
            query, *caches[layer], key_value_seq_lengths=lengths, implementation="cudnn"
        )

    runs = {"cudnn": in_loop(dense, query, caches, layers)}
    checks, failed = {}, []
    for name, form in forms("decode").items():
        try:
            program = jax.jit(form, static_argnums=2)
            checks[name] = compare(program(query, inputs, 0), program(query, inputs, 0), wanted)
            runs[name] = in_loop(form, query, inputs, layers)
        except Exception as error:  # the other forms' figures are worth keeping
            failed.append(f"{shape} {name}: {type(error).__name__}: {str(error)[:300]}")
    times = rounds(runs, repeats, step=layers * ROUNDS_OF_LAYERS)
    blocks = sum(int(jnp.sum(one.counts)) for one in selections) / layers
    row = dataclasses.asdict(shape) | {"forms": {}}
    for name in runs:
        found = common.summarize(times[name])
        keys = blocks * shape.block_size if name != "cudnn" else shape.tokens * shape.batch
        size = 2 * shape.heads[1] * shape.head_dim * query.dtype.itemsize * keys
        row["forms"][name] = {
            "ms": found["median"] * 1e3,
            "ms_iqr": (found["q75"] - found["q25"]) * 1e3,
            "tb_per_s": size / found["median"] / 1e12,
        } | checks.get(name, {})
    return row, failed


def measure_prefill(shape: Shape, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Those of whole prompts, with the rate of their products."""
    sets = kernel_inputs.prefill_sets(shape)
    query, key, value, selection = sets[0]
    tail = CHECKED_TOKENS
    rows = tail // shape.block_size
    lists = sw.BlockSelection(
        selection.ids[:, :, -rows:], selection.counts[:, :, -rows:], shape.block_size
    )
    wide = (x.astype(jnp.float32) for x in (query[:, -tail:], key, value))
    wanted = attend_tail(*wide, lists, first=shape.tokens - tail)[:, -tail:]
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    runs = {"cudnn": in_turns(dense, [one[:3] for one in sets])}
    checks, failed = {}, []
    for name, form in forms("prefill").items():
        try:
            program = jax.jit(form)
            checks[name] = compare(
                program(*sets[0])[:, -tail:], program(*sets[0])[:, -tail:], wanted
            )
            runs[name] = in_turns(form, sets)
        except Exception as error:  # the other forms' figures are worth keeping
            failed.append(f"{shape} {name}: {type(error).__name__}: {str(error)[:300]}")
    times = rounds(runs, repeats)
    positions = jnp.arange(selection.ids.shape[2], dtype=jnp.int32)[None, :] * shape.block_size
    full = jnp.full_like(positions, shape.block_size)
    pairs = float(jnp.sum(selection.attended_pairs(positions, full)))
    row = dataclasses.asdict(shape) | {"forms": {}}
    for name in runs:
        found = common.summarize(times[name])
        own = pairs if name != "cudnn" else shape.tokens * (shape.tokens + 1) / 2 * shape.batch
        flops = 4 * shape.head_dim * shape.heads[0] * own
        row["forms"][name] = {
            "ms": found["median"] * 1e3,
            "ms_iqr": (found["q75"] - found["q25"]) * 1e3,
            "tflops": flops / found["median"] / 1e12,
        } | checks.get(name, {})
    return row, failed


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", default="prefill", choices=list(SHAPES))
    parser.add_argument("--out", help="default: warp_OP.json among the results")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, in turns")
    options = parser.parse_args()
    rows, failed, about = [], [], {}
    if options.op == "decode":
        about["copy_tb_per_s"] = copy_bandwidth(2**30, options.repeats)
        print(f"copies: {about['copy_tb_per_s']:.2f} TB/s")
    for shape in SHAPES[options.op]:
        row, errors = measure(shape, options.repeats)
        rows.append(row)
        failed += errors
        heads = f"{shape.heads[0]}/{shape.heads[1]}x{shape.head_dim}"
        print(f"B={shape.batch} {shape.tokens} {heads} density {shape.density:g}")
        for name, found in row["forms"].items():
            text = f"  {name:<28} {found['ms']:9.4f} ms"
            text += f"  {found['tflops']:5.0f} TFLOP/s" if "tflops" in found else ""
            text += f"  {found['tb_per_s']:5.2f} TB/s" if "tb_per_s" in found else ""
            if "relative_error" in found:
                equal = "" if found["is_bit_equal"] else " UNEQUAL"
                text += f"  error {found['relative_error']:.1e}{equal}"
            print(text, flush=True)
    common.write_results(
        options.out or str(common.RESULTS / f"warp_{options.op}.json"),
        common.describe_machine(repeats=options.repeats, failed=failed, **about),
        rows,
    )
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
