"""A few rows times one layer of stacked weights, on Hopper GPUs: what decoding a token is made of.

    out_i[b, f] = Σ_d x[b, d] · W_i[layer, d, f]

for one or several arrays of weights that share their input, such as those of queries, keys and
values. The weights are read once, where they lie: XLA would copy a layer out of the stack before it
multiplies, which takes three passes over it instead of one.

With so few rows the time is that of reading the weights. A program has 64 columns of one array and
a part of the inputs; it reads them 64 x 64 at a time, several such tiles on their way, and
multiplies with the tensor cores, the weights for the left operand, so that as few as eight columns
of the right one are enough for the rows. The parts are added up by whoever reads the result, in
their order: the same sum every time.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import ops, warp_ops

_TILE = 64  # columns and inputs of a tile of weights
_LEAST_ROWS = 8  # that tensor cores take
_SHARED_BYTES = 74 * 1024  # of a program, so that a processor has three of them
_MOST_STAGES = 8
_STEPS = 16  # tiles of a program, at least, where there are as many
_PROGRAMS = 1024  # in all, about: several for each place on the chip, and few sums to add up

MOST_ROWS = 64
"""Rows that the kernel takes; with more, products are no longer bound by memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is static about a call.

    Attributes:
      rows: Rows, a multiple of eight.
      starts: The first tile of each array of weights, and of none behind the last.
      steps: Tiles of inputs that there are.
      own_steps: Tiles of inputs of a program; the last part may have fewer.
      stages: Tiles in shared memory.
      is_transposed: Whether weights are `[L, F, D]`.
      interpret: Whether the interpreter runs the kernel.
    """

    rows: int
    starts: tuple[int, ...]
    steps: int
    own_steps: int
    stages: int
    is_transposed: bool
    interpret: bool


def _multiply(
    x: Any,
    layer: Any,
    *arrays: Any,
    plan: _Plan,
    inputs: Any,
    weights: Any,
    sums: Any,
    filled: Any,
) -> None:
    """One program: some columns of one array, some of the inputs."""
    tile, part = jax.lax.axis_index("tile"), jax.lax.axis_index("part")
    sources, targets = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    first = part * plan.own_steps
    count = jnp.minimum(plan.own_steps, plan.steps - first)
    own_layer = layer[0]

    def of_array(body: Any) -> None:
        """Runs `body(index, columns)` for the array that the program's tile belongs to."""
        for index, (start, end) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):

            @pl.when((tile >= start) & (tile < end))
            def _(index: int = index, start: int = start) -> None:
                body(index, pl.ds((tile - start) * _TILE, _TILE))

    def load(step: Any) -> None:
        @pl.when(step < count)
        def _() -> None:
            slot = jax.lax.rem(step, plan.stages)
            own = pl.ds((first + step) * _TILE, _TILE)
            plgpu.copy_gmem_to_smem(x.at[:, own], inputs.at[slot], filled.at[slot])

            def copy(index: int, columns: Any) -> None:
                axes = (columns, own) if plan.is_transposed else (own, columns)
                source = sources[index].at[own_layer, *axes]
                plgpu.copy_gmem_to_smem(source, weights.at[slot], filled.at[slot])

            of_array(copy)

    for step in range(plan.stages - 1):
        load(jnp.int32(step))

    def add_up(total: ops.Accumulator) -> Any:
        def step(index: Any, nothing: Any) -> Any:
            slot = jax.lax.rem(index, plan.stages)
            plgpu.barrier_wait(filled.at[slot])
            left = weights.at[slot]
            left = left if plan.is_transposed else left.transpose((1, 0))
            total.add_product(left, inputs.at[slot].transpose((1, 0)))
            # All warps have multiplied what lies in the slot that is filled next.
            total.wait(in_flight=1)
            warp_ops.barrier(interpret=plan.interpret)
            load(index + plan.stages - 1)
            return nothing

        total.loop(count, step, ())
        return total.load()

    ops.write(sums, ops.with_accumulator(add_up, (_TILE, plan.rows), interpret=plan.interpret))
    plgpu.commit_smem()

    def put(index: int, columns: Any) -> None:
        plgpu.copy_smem_to_gmem(sums, targets[index].at[part, columns])

    of_array(put)
    plgpu.wait_smem_to_gmem(0)


def why_not_linear(x: Any, kernels: Sequence[Any], *, is_transposed: bool = False) -> str | None:
    """Why the kernel cannot take these rows and weights, or `None` if it can.

    Args:
      x: Rows `[B, D]`, an array or its abstract shape.
      kernels: Weights `[L, D, F]`, or `[L, F, D]`, likewise.
      is_transposed: Which of them.
    """
    if x.dtype != jnp.bfloat16 or any(one.dtype != x.dtype for one in kernels):
        return f"it takes bfloat16, not {x.dtype} times {kernels[0].dtype}"
    if x.shape[0] > MOST_ROWS:
        return f"it takes at most {MOST_ROWS} rows, not {x.shape[0]}"
    widths = [one.shape[1 if is_transposed else 2] for one in kernels]
    if any(width % _TILE for width in (x.shape[1], *widths)):
        return f"it takes multiples of {_TILE} inputs and columns, not {x.shape[1]} and {widths}"
    return None


def linear_kernel(
    x: Float[Array, "B D"],
    kernels: Sequence[Float[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    is_transposed: bool = False,
    interpret: bool = False,
) -> list[Float[Array, "B _"]]:
    """`out_i` of the module.

    Args:
      x: Rows in bfloat16, at most `MOST_ROWS`.
      kernels: Weights of all layers, in bfloat16, whose `D` and `F` are multiples of 64.
      layer: The layer.
      is_transposed: Whether the weights are `[L, F, D]`.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      Float32 for each array of weights.
    """
    num_rows, num_inputs = x.shape
    rows = -(-num_rows // _LEAST_ROWS) * _LEAST_ROWS
    widths = [one.shape[1 if is_transposed else 2] for one in kernels]
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width // _TILE)
    steps = num_inputs // _TILE
    parts = max(1, min(steps // _STEPS, _PROGRAMS // starts[-1]))
    stage_bytes = 2 * _TILE * (_TILE + rows)
    plan = _Plan(
        rows=rows,
        starts=tuple(starts),
        steps=steps,
        own_steps=-(-steps // parts),
        stages=min(_MOST_STAGES, _SHARED_BYTES // stage_bytes),
        is_transposed=is_transposed,
        interpret=interpret,
    )
    parts = -(-steps // plan.own_steps)
    shapes = [(parts, width, rows) for width in widths]
    kernel = plgpu.kernel(
        functools.partial(_multiply, plan=plan),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types={
            "inputs": ops.tiled((plan.stages, rows, _TILE), x.dtype),
            "weights": ops.tiled((plan.stages, _TILE, _TILE), x.dtype),
            "sums": plgpu.SMEM((_TILE, rows), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        },
        grid=(starts[-1], parts),
        grid_names=("tile", "part"),
        compiler_params=ops.compiler_params(),
        interpret=ops.interpreter(interpret),
        kernel_name="linear",
    )
    x = jnp.pad(x, ((0, rows - num_rows), (0, 0)))
    found = kernel(x, layer.astype(jnp.int32).reshape(1), *kernels)
    return [jnp.sum(one, axis=0)[:, :num_rows].T for one in found]
