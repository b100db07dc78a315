"""The only table of tolerances: how far a result may be from its float32 reference.

A test names the kind of its result and the dtype of its computation::

    np.testing.assert_allclose(actual, expected, **tolerance("attention", jnp.bfloat16))
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

TOLERANCES: dict[str, dict[str, float]] = {
    # Attention outputs, averages of values of order one, against float32 HIGHEST.
    "attention": {"float32": 1e-6, "bfloat16": 1e-2, "float16": 5e-4},
    # Kernel outputs: the norm of a sequence's error over the norm of its outputs.
    "kernel": {"bfloat16": 5e-3, "float16": 1e-3},
    # The same float32 sums in two orders, neither of them exact.
    "paths": {"float32": 5e-6},
    # Gradients through attention: sums over queries as well as keys.
    "gradient": {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3},
    # Log-sum-exp of rows, always in float32.
    "lse": {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3},
    # Sketches, block scores and walk states: float32 by definition.
    "scores": {"float32": 1e-5},
    # Rotary frequencies and angles.
    "rope": {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3},
    # Logits of a whole model against transformers, or of one path against another.
    "logits": {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3},
    # Logits of the bundled model, which reach 30, against transformers after a long prompt.
    "trained_logits": {"float32": 1e-4},
    # Probabilities and processed logits of the sampler against transformers.
    "sampling": {"float32": 1e-6},
    # Quotients of integer counts: density, recall, accuracy.
    "density": {"float32": 1e-6},
}


def tolerance(name: str, dtype: DTypeLike = "float32") -> dict[str, float]:
    """Returns `{"rtol": x, "atol": x}` for `np.testing.assert_allclose`.

    Args:
      name: A key of `TOLERANCES`, which names the compared result.
      dtype: The dtype of the computation under test, not of its reference.
    """
    value = TOLERANCES[name][jnp.dtype(dtype).name]
    return {"rtol": value, "atol": value}
