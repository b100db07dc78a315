"""What each choice of a kernel's configuration is worth, beside the default, in one process.

    python benchmarks/kernel_tuning.py [--out benchmarks/results/kernel_tuning.json] [--quick]

The variants of a shape take turns on the same inputs, as the two sides of `kernels.py` do.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import common
import jax
import jax.numpy as jnp
import kernel_inputs
import kernels
from kernel_inputs import Shape
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.pallas_kernels.config import default_kernel_config

# What differs from the default, by the fields of `KernelConfig`
Changes = dict[str, Any]
WIDE: tuple[Changes, ...] = (
    {},
    {"prefill_value_stages": 3},
    {"prefill_programs": 1 << 30},
)
NARROW: tuple[Changes, ...] = (
    {},
    {"prefill_stages": 2, "prefill_value_stages": 2},
    {"prefill_stages": 3, "prefill_value_stages": 3},
)
DECODE: tuple[Changes, ...] = (
    {},
    {"decode_overlap": False},
    {"decode_overlap": True},
    {"decode_buffer_kib": 192},
    {"decode_buffer_kib": 96},
    {"decode_keys": 128},
)
CASES = (
    *((Shape(op="prefill", tokens=2**n, density=0.1), WIDE) for n in (14, 16, 17)),
    *((Shape(op="prefill", tokens=2**n, density=0.1, head_dim=64), NARROW) for n in (17, 14)),
    (Shape(op="decode", tokens=2**17, density=0.1), DECODE),
    (Shape(op="decode", tokens=2**16, density=0.2, batch=8), DECODE),
)
QUICK_CASES = tuple(
    (shape, ({}, {"row_tile": 2}))
    for shape in kernels.QUICK_SHAPES
    if shape.op in ("prefill", "decode")
)


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "kernel_tuning.json"))
    parser.add_argument("--repeats", type=int, default=7, help="rounds, in turns")
    parser.add_argument("--seconds", type=float, default=600, help="no case starts later")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds")
    options = parser.parse_args()
    keep_compiled_programs()
    repeats = 2 if options.quick else options.repeats
    rows: list[dict[str, Any]] = []
    start, left_out = time.monotonic(), 0
    for shape, variants in tqdm(QUICK_CASES if options.quick else CASES, desc="tuning"):
        if time.monotonic() - start > options.seconds:
            left_out += 1
            continue
        rows += measure(shape, variants, repeats)
        meta = common.describe_machine(
            is_quick=options.quick, repeats=repeats, shapes_left_out=left_out
        )
        common.write_results(options.out, meta, rows)


def measure(shape: Shape, variants: tuple[Changes, ...], repeats: int) -> list[dict[str, Any]]:
    """Times of one shape in every variant."""
    calls, step = (prefill_calls if shape.op == "prefill" else decode_calls)(shape, variants)
    times = kernels.rounds(calls, repeats, step=step)
    rows = []
    for name, changes in zip(calls, variants, strict=True):
        row = kernels.row_of(shape, {"ours": times[name]})
        rows.append(row | {"changes": changes, "gain": gain(times["0"], times[name])})
        tqdm.write(f"{kernels.describe(row)}  {rows[-1]['gain']['median']:+.1%}  {changes}")
    return rows


def gain(default: list[float], times: list[float]) -> dict[str, float]:
    """By which share of its time the variant is faster than the default, round by round."""
    return common.summarize([a / b - 1.0 for a, b in zip(default, times, strict=True)])


def configured(changes: Changes) -> dict[str, Any]:
    """Options of the public functions."""
    config = dataclasses.replace(default_kernel_config(), **changes)
    return {"implementation": kernels.IMPLEMENTATION, "kernel_config": config}


def prefill_calls(shape: Shape, variants: tuple[Changes, ...]) -> tuple[dict[str, Any], int]:
    """Attention of a whole prompt."""
    sets = kernel_inputs.prefill_sets(shape)
    calls = {
        str(index): kernels.in_turns(
            functools.partial(sw.block_sparse_attention, **configured(changes)), sets
        )
        for index, changes in enumerate(variants)
    }
    return calls, 1


def decode_calls(shape: Shape, variants: tuple[Changes, ...]) -> tuple[dict[str, Any], int]:
    """Attention of one token per sequence, layer after layer."""
    query, *inputs = kernel_inputs.decode_inputs(shape)
    layers = len(inputs[-1])
    lengths = jnp.full((shape.batch,), shape.tokens, jnp.int32)

    def attend(query: jax.Array, inputs: Any, layer: int, *, changes: Changes) -> jax.Array:
        key, value, selections = inputs
        options = {"layer": layer, "kv_lengths": lengths} | configured(changes)
        return sw.block_sparse_decode(query, key, value, selections[layer], **options)

    calls = {
        str(index): kernels.in_loop(
            functools.partial(attend, changes=changes), query, inputs, layers
        )
        for index, changes in enumerate(variants)
    }
    return calls, layers * kernels.ROUNDS_OF_LAYERS


if __name__ == "__main__":
    main()
