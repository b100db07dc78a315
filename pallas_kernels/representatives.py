"""Queries that stand for those of a row, on Hopper GPUs: its mean, and the farthest ones.

Farthest-point traversal, head by head (`policies.recommended.representative_queries`): after the
mean, the query whose distance to the nearest one taken is largest. A program takes one row of one
head; it has the queries in registers, and each step takes the distances to the newest one and the
largest of what they leave. Distance and place of a query are one integer, so that one reduction
finds both: distances that differ by less than 2^-17 of themselves count as equal, and of equal ones
the first is taken.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops

_QUERIES = 64  # of a row
_PLACES = _QUERIES - 1  # the low bits, which tell the place


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is static about a call.

    Attributes:
      head_dim: Features of a head, of which the slow half counts.
      count: Representatives.
      interpret: Whether the interpreter runs the kernel.
    """

    head_dim: int
    count: int
    interpret: bool


def _represent(
    query: Any,
    begin: Any,
    end: Any,
    out: Any,
    *,
    plan: _Plan,
    queries: Any,
    found: Any,
    scratch: Any,
    filled: Any,
) -> None:
    """One program: one row of one head."""
    row, head, batch = (jax.lax.axis_index(name) for name in ("row", "head", "batch"))
    quarter, rows = plan.head_dim // 4, pl.ds(row * _QUERIES, _QUERIES)
    for half in range(2):  # channels `d` and `d + H/2` turn together, slower the larger `d` is
        channels = pl.ds((2 * half + 1) * quarter, quarter)
        target = queries.at[half]
        plgpu.copy_gmem_to_smem(query.at[batch, rows, head, channels], target, filled)
    plgpu.barrier_wait(filled)
    shape = (_QUERIES, quarter)
    halves = [ops.read(queries.at[half]).astype(jnp.float32) for half in range(2)]
    column = row * _QUERIES + ops.matrix_index(shape, 0)
    is_own = (column >= begin[batch]) & (column < end[batch])
    bad = [jnp.where(is_own & (jnp.abs(x) < jnp.inf), 0.0, 1.0) for x in halves]
    lost = jnp.maximum(*(jnp.max(x, axis=1) for x in bad))  # by query: whether it does not count
    spread = ops.spread(lost, shape, 0)
    halves = [jnp.where(spread == 0.0, x, 0.0) for x in halves]
    number = jnp.maximum(jnp.sum(1.0 - spread, axis=0), 1.0)
    mean = [jnp.sum(x, axis=0) / number for x in halves]
    far = jnp.where(lost == 0.0, jnp.inf, -1.0)
    place = jnp.max(ops.matrix_index(shape, 0), axis=1)

    def take(index: Any, newest: list[Any]) -> None:
        for half in range(2):
            ops.write(found.at[index, half], newest[half].astype(found.dtype))

    take(0, mean)

    def step(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        first, second, distance = state
        away = [
            x - ops.spread(one, shape, 1) for x, one in zip(halves, (first, second), strict=True)
        ]
        square = jnp.sum(away[0] * away[0], axis=1) + jnp.sum(away[1] * away[1], axis=1)
        distance = jnp.minimum(distance, square)
        # Of numbers that are not negative the bits are in order; those taken or lost are negative.
        key = jax.lax.bitcast_convert_type(distance, jnp.int32)
        key = jnp.where(distance < 0.0, -1, (key & ~_PLACES) | (_PLACES - place))
        largest = warp_ops.maximum(
            key, scratch.at[jax.lax.rem(index, 2)], layout=ops.BY_ROW, interpret=plan.interpret
        )
        is_left = largest >= 0
        best = jnp.where(is_left, _PLACES - (largest & _PLACES), 0)
        newest = []
        for half in range(2):
            taken = ops.read(queries.at[half, best], ops.BY_COLUMN).astype(jnp.float32)
            newest.append(jnp.where(is_left, taken, mean[half]))
        take(index, newest)
        return newest[0], newest[1], jnp.where(place == best, -1.0, distance)

    jax.lax.fori_loop(1, plan.count, step, (*mean, far))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(found, out.at[batch, row, :, head])
    plgpu.wait_smem_to_gmem(0)


def representatives_kernel(
    query: Float[Array, "B T N H"],
    valid: Bool[Array, "B T"],
    *,
    count: int,
    interpret: bool = False,
) -> Float[Array, "B I R N C"]:
    """`count` representatives of each 64 queries of every head, in the slow half of the channels.

    Args:
      query: Queries in 16 bits, of whole rows, with a head_dim of 64 or 128.
      valid: Which columns hold a query of the sequence: adjacent ones.
      count: Representatives.
      interpret: Whether the interpreter runs the kernel.
    """
    batch, tokens, heads, head_dim = query.shape
    rows, quarter = tokens // _QUERIES, head_dim // 4
    plan = _Plan(head_dim=head_dim, count=count, interpret=interpret)
    shape = (batch, rows, count, heads, 2, quarter)
    kernel = plgpu.kernel(
        functools.partial(_represent, plan=plan),
        out_type=jax.ShapeDtypeStruct(shape, query.dtype),
        scratch_types={
            "queries": plgpu.SMEM((2, _QUERIES, quarter), query.dtype),
            "found": plgpu.SMEM((count, 2, quarter), query.dtype),
            "scratch": plgpu.SMEM((2, warp_ops.WARPS), jnp.int32),
            "filled": plgpu.Barrier(num_arrivals=2),
        },
        grid=(rows, heads, batch),
        grid_names=("row", "head", "batch"),
        compiler_params=ops.compiler_params(),
        interpret=ops.interpreter(interpret),
        kernel_name="representatives",
    )
    begin = jnp.argmax(valid, axis=1).astype(jnp.int32)
    found = kernel(query, begin, begin + jnp.sum(valid, axis=1, dtype=jnp.int32))
    return found.reshape(batch, rows, count, heads, 2 * quarter)
