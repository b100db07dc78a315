"""Quantizes keys to four bits, and writes a token's key and value to the caches.

The functions return `None` if no kernel supports the call; the policy then uses plain JAX.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    SCORED_BLOCK,
    SCORED_HEADS,
    WRITTEN_CHANNELS,
    KernelConfig,
)


def quantized_keys(
    stored: tuple[Array, Array, Array, Array],
    key: Float[Array, "B T K H"],
    span: Any,
    *,
    layer: Int[Array, ""],
    write: Any = None,
    kernel_config: KernelConfig,
) -> tuple[Array, ...] | None:
    """Adds a span of keys to one layer of `QuantizedKeys`, bit for bit as plain JAX does.

    It quantizes the slow half of the keys' channels. With a `TokenWrite` it also writes the token
    to the caches, and returns these after the arrays.
    """
    quantized, _, _, unfinished = stored
    head_dim = key.shape[-1]
    is_right = key.dtype == unfinished.dtype and key.dtype.itemsize == 2
    if write is not None:
        is_right = is_right and key.dtype == write.value.dtype == write.keys.dtype
    if not is_right or head_dim not in SCORED_HEADS or quantized.shape[4] != SCORED_BLOCK:
        return None
    from sketchwalk_jax.pallas_kernels.key_quantization.quantize_keys import quantize_keys_kernel

    return quantize_keys_kernel(
        *stored,
        key,
        span.valid,
        first_block=span.first_block,
        end=span.end,
        layer=layer,
        write=write,
        interpret=kernel_config.interpret,
    )


def write_token(
    key: Float[Array, "B 1 K H"], write: Any, span: Any, *, kernel_config: KernelConfig
) -> tuple[Array, Array] | None:
    """Writes the token of a `TokenWrite` to the caches, in place under `jit`."""
    is_right = key.dtype == write.value.dtype == write.keys.dtype == write.values.dtype
    if not is_right or key.shape[2] * key.shape[3] % WRITTEN_CHANNELS:
        return None
    from sketchwalk_jax.pallas_kernels.key_quantization.token_writes import write_token_kernel

    value, keys, values, layer = write
    where: dict[str, Any] = {"end": span.end, "interpret": kernel_config.interpret}
    return write_token_kernel(key, value, keys, values, layer, span.valid, **where)
