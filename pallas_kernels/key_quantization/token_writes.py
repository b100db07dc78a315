"""Writes a decoded token's key and value to their caches on NVIDIA GPUs, in one launch.

A thread block has one sequence and one of the two arrays; each thread copies adjacent channels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.pallas_kernels.lib.row_ops import THREADS

_WIDEST = 16  # most bytes that a thread copies at a time


def _write(
    new: Any, valid: Any, end: Any, layer: Any, keys: Any, values: Any, *, layout: Any
) -> None:
    """Runs one thread block: the key or value of one token, in all heads."""
    batch, which = jax.lax.axis_index("batch"), jax.lax.axis_index("array")
    position = end[batch] - 1
    for index, cache in enumerate((keys, values)):

        @pl.when((which == index) & valid[batch, 0] & (position < cache.shape[2]))
        def _(index: int = index, cache: Any = cache) -> None:
            own = ops.read(new.at[batch, index], layout)
            ops.write(cache.at[layer[0], batch, position], own)


def write_token_kernel(
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K H"],
    keys: Float[Array, "L B S K H"],
    values: Float[Array, "L B S K H"],
    layer: Int[Array, ""],
    valid: Bool[Array, "B 1"],
    *,
    end: Int[Array, "B"],
    interpret: bool = False,
) -> tuple[Float[Array, "L B S K H"], Float[Array, "L B S K H"]]:
    """Writes one token per sequence to one layer of the caches; in place under `jit`.

    Args:
      key: The tokens' keys; all heads together have a multiple of 128 channels.
      value: The tokens' values.
      keys: Keys of all layers, of the same type.
      values: Values of all layers.
      layer: The layer.
      valid: Whether each sequence has a token.
      end: Keys per sequence including the token, which goes to `end - 1`, or is dropped if full.
      interpret: Whether the interpreter runs the kernel.
    """
    shape, width = keys.shape, keys.shape[3] * keys.shape[4]
    vector = next(
        size
        for size in (8, 4, 2, 1)
        if width % (size * THREADS) == 0 and size * keys.dtype.itemsize <= _WIDEST
    )
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    kernel = ops.kernel(
        functools.partial(_write, layout=layout),
        grid=(shape[1], 2),
        grid_names=("batch", "array"),
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="write_token",
    )
    refs = [jax.new_ref(x.reshape(*shape[:3], width)) for x in (keys, values)]
    # One array for both, so that XLA computes both in one launch.
    new = jnp.concatenate([key, value], axis=1).reshape(shape[1], 2, width)
    kernel(new, valid, end.astype(jnp.int32), layer.astype(jnp.int32)[None], *refs)
    keys, values = (jax.freeze(ref).reshape(shape) for ref in refs)
    return keys, values
