"""Tiles of block scores on the tensor cores, as accurate as float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

KEY_TILE = 64  # key blocks of a tile
QUERY_TILE = 128  # query blocks of a tile
CHUNK = 32  # entries of the sketches multiplied at a time: one swizzled row of float32


def buffers() -> list[Any]:
    """The shared memory that a tile needs."""
    gpu: Any = plgpu
    transforms = (gpu.TilingTransform((8, CHUNK)), gpu.SwizzleTransform(128))
    rows = (KEY_TILE, KEY_TILE, QUERY_TILE, QUERY_TILE)
    return [plgpu.SMEM((x, CHUNK), jnp.float32, transforms=transforms) for x in rows]


def _add_products(keys: Array, queries: Array, memory: Any, accumulator: Any) -> None:
    """Adds `keys @ queriesᵀ` to an accumulator: three products of TF32 parts, float32 accuracy."""
    key_high, key_low, query_high, query_low = memory
    for x, high, low in ((keys, key_high, key_low), (queries, query_high, query_low)):
        # What TF32 keeps; the tensor cores drop the other bits, of the rest too.
        upper = jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, jnp.int32) & ~0x1FFF, jnp.float32
        )
        high[...] = upper
        low[...] = x - upper
    plgpu.commit_smem()
    plgpu.wgmma(accumulator, key_low, query_high.T)
    plgpu.wgmma(accumulator, key_high, query_low.T)
    plgpu.wgmma(accumulator, key_high, query_high.T)
    plgpu.wgmma_wait(0)


def score_tile(
    load: Callable[[int], tuple[Array, Array]], num_chunks: int, memory: Any, *, interpret: bool
) -> Float[Array, "64 128"]:
    """`keys @ queriesᵀ` of one tile; `load(chunk)` gives both operands' part of the sketches."""
    if interpret:
        tile = jnp.zeros((KEY_TILE, QUERY_TILE), jnp.float32)
        for chunk in range(num_chunks):
            keys, queries = load(chunk)
            tile = tile + jnp.dot(keys, queries.T, precision=jax.lax.Precision.HIGHEST)
        return tile

    def accumulate(accumulator: Any) -> Array:
        for chunk in range(num_chunks):
            keys, queries = load(chunk)
            _add_products(keys, queries, memory, accumulator)
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC((KEY_TILE, QUERY_TILE), jnp.float32))
