"""Gradients of attention over lists beside those of dense attention: time and memory.

    python benchmarks/gradients.py [--quick]    # on a Hopper GPU: results/gradients.json
    python benchmarks/gradients.py              # on a CPU: results/gradients_cpu.json

A step is a forward and a backward pass: the cotangents of queries, keys and values for a given one
of the output. Forward passes alone are timed too; what is left of a step is the backward pass. Both
sides take turns over the same inputs, calls queued one after another. On a Hopper GPU lists go
forward by the kernel, and dense attention goes through cuDNN both ways. On a CPU everything runs on
XLA, dense attention in the library's tiles, with fewer heads.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
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

DENSITY = 0.1
SHAPES = tuple(
    Shape(op="prefill", tokens=tokens, density=DENSITY, heads=(32, 8), head_dim=128)
    for tokens in (4096, 16384, 65536)
)
CPU_SHAPES = tuple(
    Shape(op="prefill", tokens=tokens, density=DENSITY, heads=(8, 2), head_dim=64, dtype="float32")
    for tokens in (2048, 4096, 8192, 16384)
)
QUICK_SHAPES = (Shape(op="prefill", tokens=1024, density=0.2, heads=(4, 2), head_dim=64),)
CHECKED_TOKENS = 16384  # the most whose gradients are computed in float32 as well
Row = dict[str, Any]


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: by the device")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in turns")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, two rounds")
    options = parser.parse_args()
    keep_compiled_programs()
    is_cpu = jax.default_backend() == "cpu"
    repeats = 2 if options.quick else options.repeats
    out = options.out or common.RESULTS / ("gradients_cpu.json" if is_cpu else "gradients.json")
    shapes = CPU_SHAPES if is_cpu else SHAPES
    rows = []
    for shape in tqdm(QUICK_SHAPES if options.quick else shapes, desc="gradients"):
        rows.append(measure(shape, repeats))
        tqdm.write(describe(rows[-1]))
    meta = common.describe_machine(is_quick=options.quick, repeats=repeats)
    common.write_results(out, meta, rows)


def step_of(attend: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """`(q, k, v, *lists, grad) -> cotangents of q, k and v`."""

    def step(query: Any, key: Any, value: Any, *rest: Any) -> tuple[jax.Array, ...]:
        *lists, grad = rest
        _, back = jax.vjp(lambda *arrays: attend(*arrays, *lists), query, key, value)
        return back(grad)

    return step


def measure(shape: Shape, repeats: int) -> Row:
    """One shape: both sides, forward alone and with their gradients."""
    sets = kernel_inputs.prefill_sets(shape)
    grads = [jnp.roll(one[0], 1, axis=1) for one in sets]
    sparse = functools.partial(sw.block_sparse_attention, implementation=kernels.IMPLEMENTATION)
    dense: Callable[..., jax.Array] = sw.dense_attention
    if kernels.PEER == "cudnn":
        options: dict[str, Any] = {"is_causal": True, "implementation": kernels.PEER}
        dense = functools.partial(jax.nn.dot_product_attention, **options)
    with_grads = [(*one, grad) for one, grad in zip(sets, grads, strict=True)]
    without_lists = [(*one[:3], grad) for one, grad in zip(sets, grads, strict=True)]
    runs = {
        "ours_forward": kernels.in_turns(sparse, sets),
        "peer_forward": kernels.in_turns(dense, [one[:3] for one in sets]),
        "ours": kernels.in_turns(step_of(sparse), with_grads),
        "peer": kernels.in_turns(step_of(dense), without_lists),
    }
    times = kernels.rounds(runs, repeats)
    row = kernels.row_of(shape, times) | {"op": "gradient"}
    for name in ("ours", "peer"):
        forward = common.summarize(times[f"{name}_forward"])["median"] * 1e3
        row |= {f"{name}_forward_ms": forward, f"{name}_backward_ms": row[f"{name}_ms"] - forward}
    row["backward_ratio"] = row["peer_backward_ms"] / row["ours_backward_ms"]
    programs = {"ours": (step_of(sparse), with_grads), "peer": (step_of(dense), without_lists)}
    for name, (step, inputs) in programs.items():
        memory = common.memory(jax.jit(step).lower(*inputs[0]).compile())
        row[f"{name}_temporary_bytes"] = memory["temporary_bytes"]
    if shape.tokens <= CHECKED_TOKENS:
        row |= errors(step_of(sparse), with_grads[0])
    return row


def errors(step: Callable[..., Any], inputs: tuple[Any, ...]) -> Row:
    """How far the gradients are from those in float32 on XLA, and whether two runs are the same."""
    program = jax.jit(step)
    found, again = program(*inputs), program(*inputs)
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs
    )
    exact = functools.partial(sw.block_sparse_attention, implementation="xla")
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(step_of(exact))(*wide)
    rows = [kernels.compare(*x) for x in zip(found, again, wanted, strict=True)]
    return {
        "relative_errors": [row["relative_error"] for row in rows],
        "is_bit_equal": all(row["is_bit_equal"] for row in rows),
    }


def describe(row: Row) -> str:
    """One line for the terminal."""
    text = f"{row['tokens']:>6} tokens, density {row['density']:g}: "
    for name, words in (("ours", "lists"), ("peer", f"dense by {row['peer']}")):
        text += f"{words} {row[f'{name}_forward_ms']:.2f} ms forward, "
        text += f"{row[f'{name}_backward_ms']:.2f} ms backward, "
        text += f"{row[f'{name}_temporary_bytes'] / 2**20:.0f} MiB; "
    return text + f"backward {row['backward_ratio']:.2f}x"


if __name__ == "__main__":
    main()
