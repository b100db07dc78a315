"""The norm before every linear layer of the families."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, "D"], *, eps: float
) -> Float[Array, "*lead D"]:
    """Computes `x / sqrt(mean(x²) + eps)` in float32, casts it back, and multiplies by `scale`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
