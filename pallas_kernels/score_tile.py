"""Tiles of block scores on the tensor cores, nearly as accurate as float32.

Every row of both operands is brought to one magnitude by a power of two of its own and divided into
two float16 numbers, which hold 22 bits of it; three products of these give the scores, of which
only the products of both lesser parts are missing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import warp_ops
from sketchwalk_jax.pallas_kernels.selection import LEAST_CHUNK
from sketchwalk_jax.scaled import exponent_of, power_of_two

TILE = 64  # blocks of keys, and of queries, in a tile
TOP = 7  # exponent of a row's largest entry as the tensor cores see it
_LARGEST = 127


def chunk_of(size: int) -> int:
    """Entries of sketches of this size that are multiplied at a time."""
    return LEAST_CHUNK if size % (2 * LEAST_CHUNK) else 2 * LEAST_CHUNK


def _rows(shape: tuple[int, ...], dtype: Any) -> Any:
    gpu: Any = plgpu  # whose annotations make the transforms abstract
    item = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * item)
    transforms = (gpu.TilingTransform((8, swizzle // item)), gpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def buffers(slots: int, size: int) -> Any:
    """Shared memory for rows of operands: as they come, or in two parts in the same place."""
    chunk = chunk_of(size)
    return plgpu.RefUnion(
        _rows((slots, TILE, chunk), jnp.float32), _rows((slots, 2, TILE, chunk), jnp.float16)
    )


def spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector along one axis of a matrix in the layout of the tensor cores' results."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (axis,)), plgpu.Layout.WGMMA)


def peaks_of(x: Float[Array, "R C"]) -> Float[Array, "R"]:
    """Every row's largest magnitude."""
    return jnp.max(jnp.abs(x), axis=1)


def shifts_by(peaks: Float[Array, "R"], top: int = TOP) -> Int[Array, "R"]:
    """Exponents of the powers of two that bring rows with these peaks to one magnitude."""
    return jnp.minimum(top - exponent_of(peaks), _LARGEST)


def write_parts(x: Float[Array, "R C"], shift: Int[Array, "R"], parts: Any) -> None:
    """Writes `2^shift x` in two parts, over where the warpgroup has read `x`."""
    warp_ops.barrier(interpret=False)  # all have read what was there
    x = x * spread(power_of_two(shift), x.shape, 0)
    high = x.astype(jnp.float16)
    parts[0, ...] = high
    parts[1, ...] = (x - high.astype(jnp.float32)).astype(jnp.float16)


def multiply(total: Any, keys: Any, queries: Any) -> None:
    """Starts `total += keys @ queriesᵀ` of two operands in parts."""
    (key_high, key_low), (query_high, query_low) = (
        [x.at[part] for part in range(2)] for x in (keys, queries)
    )
    plgpu.wgmma(total, key_low, query_high.T)
    plgpu.wgmma(total, key_high, query_low.T)
    plgpu.wgmma(total, key_high, query_high.T)


def interpreted_scores(
    operands: list[Float[Array, "64 _"]], shifts: list[Int[Array, "64"]]
) -> Float[Array, "64 64"]:
    """What `multiply` gives, without tensor cores."""
    keys, queries = (
        x * power_of_two(shift)[:, None] for x, shift in zip(operands, shifts, strict=True)
    )
    return jnp.dot(keys, queries.T, precision=jax.lax.Precision.HIGHEST)
