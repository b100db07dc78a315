"""Numerical conventions of attention and selection: one home for each."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

# A finite stand-in for log(0), and a running maximum above it to begin with: the weight of a
# masked score is then exactly exp(-5e29) = 0, in rows without a visible key too, and in any base.
MASK_VALUE = -1e30
FIRST_MAXIMUM = -5e29
# Stands for infinity in float32 where ranks and extremes are compared: jax_debug_infs would raise
# an error for the real one.
LARGEST = float(jnp.finfo(jnp.float32).max)
# A logit of a block, from codes of its keys, counts below this magnitude alone, on every device and
# well within the two above. Where products leave float32, the hardware decides what their sum is:
# that of tensor cores comes back into range if it ends there.
LARGEST_LOGIT = 1e29


def matmul_precision(x: Array) -> jax.lax.Precision | None:
    """`HIGHEST` for float32 inputs, the default for the others.

    What is given as float32 is multiplied as float32: by default accelerators would round such
    inputs to TF32 or bfloat16, and a float32 run would differ from transformers' by 1e-3.
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def default_scale(head_dim: int) -> float:
    """`1 / sqrt(H)`, the factor of attention scores."""
    return 1.0 / math.sqrt(head_dim)


def start_indices(*indices: Any) -> tuple[Int32[Array, ""], ...]:
    """Indices for `dynamic_slice`, all int32: with `jax_enable_x64` Python's ints are int64."""
    return tuple(jnp.asarray(index, jnp.int32) for index in indices)
