"""Tiles of block scores on the tensor cores, nearly as accurate as float32.

Every row of both operands is brought to one magnitude by a power of two of its own and divided into
two float16 numbers, which hold 22 bits of it; three products of these give the scores, of which
only the products of both lesser parts are missing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import warp_ops
from sketchwalk_jax.pallas_kernels.scaled import exponent_of, power_of_two

KEY_TILE = 64  # key blocks of a tile
QUERY_TILE = 128  # query blocks of a tile
LEAST_CHUNK = 32  # entries of the sketches that are loaded and multiplied at a time, or twice this
_TOP = 7  # exponent of a row's largest entry as the tensor cores see it
_LARGEST = 127
Load = Callable[[], Array]


def chunk_of(size: int) -> int:
    """Entries of sketches of this size that are multiplied at a time."""
    return LEAST_CHUNK if size % (2 * LEAST_CHUNK) else 2 * LEAST_CHUNK


def _rows(rows: int, chunk: int, dtype: Any) -> Any:
    gpu: Any = plgpu  # whose annotations make the transforms abstract
    item = jnp.dtype(dtype).itemsize
    swizzle = min(128, chunk * item)
    transforms = (gpu.TilingTransform((8, swizzle // item)), gpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((rows, chunk), dtype, transforms=transforms)


def buffers(size: int) -> list[Any]:
    """Shared memory of a tile's keys and queries: as they come, or in two parts each."""
    chunk = chunk_of(size)
    return [
        plgpu.RefUnion(
            _rows(rows, chunk, jnp.float32), [_rows(rows, chunk, jnp.float16) for _ in range(2)]
        )
        for rows in (KEY_TILE, QUERY_TILE)
    ]


def spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector along one axis of a matrix in the layout of the tensor cores' results."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (axis,)), plgpu.Layout.WGMMA)


def _write_parts(x: Float[Array, "R C"], shift: Int[Array, "R"], parts: Any) -> None:
    warp_ops.barrier(interpret=False)  # all have read what was there
    x = x * spread(power_of_two(shift), x.shape, 0)
    high = x.astype(jnp.float16)
    parts[0][...] = high
    parts[1][...] = (x - high.astype(jnp.float32)).astype(jnp.float16)


def score_tile(
    fetch: Callable[[int], tuple[Load, Load]],
    size: int,
    parts: tuple[Any, Any],
    meanwhile: Callable[[Int[Array, "128"]], Any],
    *,
    interpret: bool,
) -> tuple[Float[Array, "64 128"], Int[Array, "64"], Any]:
    """`keys @ queriesᵀ` of one tile, with every row of both scaled.

    Args:
      fetch: Waits for a chunk of both operands' sketches, and says how to read the chunk of the
        keys and that of the queries into registers.
      size: Length of the sketches.
      parts: Shared memory for the parts of the keys and of the queries.
      meanwhile: What to do with the exponents of the queries' scales while the products are made.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      The product times `2^(keys' exponents)` and `2^(queries' exponents)`, the keys' exponents and
      what `meanwhile` returns.
    """
    chunk = chunk_of(size)
    num_chunks = size // chunk

    def shift_by(peak: Array) -> Array:
        return jnp.minimum(_TOP - exponent_of(peak), _LARGEST)

    if interpret:
        chunks = [[load() for load in fetch(index)] for index in range(num_chunks)]
        operands = [jnp.concatenate(x, axis=1) for x in zip(*chunks, strict=True)]
        by_row = [shift_by(jnp.max(jnp.abs(x), axis=1)) for x in operands]
        keys, queries = (
            x * power_of_two(shift)[:, None] for x, shift in zip(operands, by_row, strict=True)
        )
        tile = jnp.dot(keys, queries.T, precision=jax.lax.Precision.HIGHEST)
        return tile, by_row[0], meanwhile(by_row[1])

    def peaks_of(index: int) -> list[Array]:
        return [jnp.max(jnp.abs(load()), axis=1) for load in fetch(index)]

    shifts: list[Any] = [None, None]
    if num_chunks > 1:
        peaks = [peaks_of(index) for index in range(num_chunks)]
        both = zip(*peaks, strict=True)
        shifts = [shift_by(functools.reduce(jnp.maximum, x)) for x in both]

    def write_parts(index: int) -> None:
        for which, load in enumerate(fetch(index)):
            x = load()
            if num_chunks == 1:
                shifts[which] = shift_by(jnp.max(jnp.abs(x), axis=1))
            _write_parts(x, shifts[which], parts[which])
        plgpu.commit_smem()

    write_parts(0)  # before there is an accumulator, which takes registers

    def accumulate(accumulator: Any) -> Any:
        for index in range(num_chunks):
            if index:
                plgpu.wgmma_wait(0)
                write_parts(index)
            (key_high, key_low), (query_high, query_low) = parts
            plgpu.wgmma(accumulator, key_low, query_high.T)
            plgpu.wgmma(accumulator, key_high, query_low.T)
            plgpu.wgmma(accumulator, key_high, query_high.T)
        other = meanwhile(shifts[1])
        return accumulator[...], shifts[0], other

    return pl.run_scoped(accumulate, plgpu.ACC((KEY_TILE, QUERY_TILE), jnp.float32))
