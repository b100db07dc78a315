"""Keys quantised to four bits, and a token's key and value written to their caches.

A function returns `None` where no kernel takes the call; the policy then runs plain JAX.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    SCORED_BLOCK,
    SCORED_HEADS,
    WRITTEN_CHANNELS,
    KernelConfig,
)


def block_codes(
    codes: tuple[Array, Array, Array, Array],
    key: Float[Array, "B T K H"],
    span: Any,
    *,
    layer: Int[Array, ""],
    write: Any = None,
    kernel_config: KernelConfig,
) -> tuple[Array, ...] | None:
    """The arrays of `BlockCodes` of all layers with those of a span's keys in one, bit for bit.

    Of the keys the slow half of the channels. With a `TokenWrite` the token is written to the
    caches as well, and these follow.
    """
    code, _, _, unfinished = codes
    head_dim = key.shape[-1]
    is_right = key.dtype == unfinished.dtype and key.dtype.itemsize == 2
    if write is not None:
        is_right = is_right and key.dtype == write.value.dtype == write.keys.dtype
    if not is_right or head_dim not in SCORED_HEADS or code.shape[4] != SCORED_BLOCK:
        return None
    from sketchwalk_jax.pallas_kernels.key_quantization.quantize_keys import quantize_keys_kernel

    return quantize_keys_kernel(
        *codes,
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
    """The caches of a `TokenWrite` with the token in them, in place under `jit`."""
    is_right = key.dtype == write.value.dtype == write.keys.dtype == write.values.dtype
    if not is_right or key.shape[2] * key.shape[3] % WRITTEN_CHANNELS:
        return None
    from sketchwalk_jax.pallas_kernels.key_quantization.token_writes import write_token_kernel

    value, keys, values, layer = write
    where: dict[str, Any] = {"end": span.end, "interpret": kernel_config.interpret}
    return write_token_kernel(key, value, keys, values, layer, span.valid, **where)
