"""Prefill by products of single warps beside Hopper's kernel and cuDNN's dense attention.

    python benchmarks/warp_prefill.py [--out benchmarks/results/warp_prefill.json] [--sizes]

On any NVIDIA GPU of compute capability 8.0 or higher, in one process; Hopper's kernel runs on
Hopper alone. Calls are queued one after another over the same inputs, in turns. Lists of pages name
the four pages of each listed block, so that all forms attend to the same keys. `--sizes` also times
other steps and slots than those that the kernel chooses. Every form is checked: the last tokens
against float32 on XLA, and a second run bit for bit.
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
from kernels import CHECKED_TOKENS, attend_tail, compare, in_turns, rounds

import sketchwalk_jax as sw
from sketchwalk_jax import dispatch
from sketchwalk_jax.pallas_kernels.ampere_prefill import ampere_prefill
from sketchwalk_jax.pallas_kernels.block_sparse_prefill import block_sparse_prefill
from sketchwalk_jax.pallas_kernels.config import KernelConfig

PAGES = 4  # of a block
SIZES = [(keys, stages) for keys in (32, 64) for stages in (1, 2, 3)]
SHAPES = [
    Shape(op="prefill", tokens=tokens, density=density, head_dim=head_dim, heads=heads)
    for tokens, density in ((2**14, 0.1), (2**14, 1.0), (2**16, 0.1))
    for head_dim, heads in ((128, (32, 8)), (64, (32, 8)), (128, (8, 8)))
]


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
    ids, counts, sizes = selection.ids, selection.counts, {"block_size": 64}
    if of_pages:
        ids = ids[..., None] * PAGES + jnp.arange(PAGES, dtype=ids.dtype)
        ids, counts = ids.reshape(*ids.shape[:-2], -1), counts * PAGES
        sizes = {"block_size": 64 // PAGES, "row_size": 64}
    batch, tokens, _, head_dim = query.shape
    out, _ = kernel(
        query,
        key[None],
        value[None],
        ids,
        counts,
        layer=0,
        first_block=jnp.zeros(batch, jnp.int32),
        kv_lengths=jnp.full(batch, tokens, jnp.int32),
        scale=head_dim**-0.5,
        kernel_config=config,
        **sizes,
    )
    return out


def forms(with_sizes: bool) -> dict[str, Callable[..., Any]]:
    """What is timed, by name."""
    plain = KernelConfig()
    found = {}
    for name, of_pages in (("blocks", False), ("pages", True)):
        found[f"warps_{name}"] = functools.partial(attend, ampere_prefill, of_pages, plain)
        if dispatch.is_hopper():
            found[f"hopper_{name}"] = functools.partial(
                attend, block_sparse_prefill, of_pages, plain
            )
    for keys, stages in SIZES if with_sizes else ():
        config = dataclasses.replace(plain, prefill_keys=keys, prefill_stages=stages)
        name = f"warps_blocks_{keys}x{stages}"
        found[name] = functools.partial(attend, ampere_prefill, False, config)
    return found


def measure(shape: Shape, repeats: int, with_sizes: bool) -> tuple[dict[str, Any], list[str]]:
    """Times, rates and errors of one shape, and what failed."""
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
    for name, form in forms(with_sizes).items():
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
    parser.add_argument("--out", default=str(common.RESULTS / "warp_prefill.json"))
    parser.add_argument("--repeats", type=int, default=7, help="rounds, in turns")
    parser.add_argument("--sizes", action="store_true", help="other steps and slots too")
    options = parser.parse_args()
    rows, failed = [], []
    for shape in SHAPES:
        row, errors = measure(shape, options.repeats, options.sizes)
        rows.append(row)
        failed += errors
        heads = f"{shape.heads[0]}/{shape.heads[1]}x{shape.head_dim}"
        print(f"{shape.tokens} {heads} density {shape.density:g}")
        for name, found in row["forms"].items():
            text = f"  {name:<20} {found['ms']:9.4f} ms  {found['tflops']:5.0f} TFLOP/s"
            if "relative_error" in found:
                equal = "" if found["is_bit_equal"] else " UNEQUAL"
                text += f"  error {found['relative_error']:.1e}{equal}"
            print(text, flush=True)
    common.write_results(
        options.out, common.describe_machine(repeats=options.repeats, failed=failed), rows
    )
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
