"""Numerical conventions of attention and selection, each defined once."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

# A finite substitute for log(0), and the first running maximum, which is above it: so the weight of
# a masked score is exactly exp(-5e29) = 0, also in rows without a visible key, and in any base.
MASK_VALUE = -1e30
FIRST_MAXIMUM = -5e29
# Replaces infinity in float32 where ranks and extremes are compared: `jax_debug_infs` would raise
# an error for infinity.
LARGEST = float(jnp.finfo(jnp.float32).max)
# Logits from quantized keys count only below this magnitude, on every device; it is well within the
# two values above. If products overflow float32, the sum depends on the hardware: on tensor cores
# it can come back into range.
LARGEST_LOGIT = 1e29


def matmul_precision(x: Array) -> jax.lax.Precision | None:
    """Returns `HIGHEST` for float32 inputs, and the default for others.

    By default, accelerators would round float32 inputs to TF32 or bfloat16, and a float32 run would
    differ from transformers' by 1e-3.
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def default_scale(head_dim: int) -> float:
    """Returns `1 / sqrt(H)`, the default factor of attention scores."""
    return 1.0 / math.sqrt(head_dim)


def start_indices(*indices: Any) -> tuple[Int32[Array, ""], ...]:
    """Returns int32 indices for `dynamic_slice`; with `jax_enable_x64` Python's ints are int64."""
    return tuple(jnp.asarray(index, jnp.int32) for index in indices)
