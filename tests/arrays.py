"""Random arrays for tests; `jax.random.normal` would compile a program for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(shape: tuple[int, ...], *, seed: int = 0, dtype: str | type = "float32") -> jax.Array:
    """Draws from the standard normal distribution."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
