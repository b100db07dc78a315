"""One rule for matrix products: what is given as float32 is multiplied as float32.

By default accelerators would round float32 inputs to TF32 or bfloat16, and a float32 run would
differ from transformers' by 1e-3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def matmul_precision(x: Array) -> jax.lax.Precision | None:
    """`HIGHEST` for float32 inputs, the default for the others."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
