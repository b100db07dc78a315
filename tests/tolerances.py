"""The one table of tolerances: how far a result may stand from its float32 reference.

A test asks by the name of what it compares and the dtype that it was computed in::

    np.testing.assert_allclose(actual, expected, **tolerance("attention", jnp.bfloat16))
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

TOLERANCES: dict[str, dict[str, float]] = {
    # Attention outputs, averages of values of order one, against float32 HIGHEST.
    "attention": {"float32": 1e-6, "bfloat16": 1e-2, "float16": 5e-4},
    # Outputs of kernels, as the distance of all of a sequence's outputs over their length.
    "kernel": {"bfloat16": 5e-3, "float16": 1e-3},
    # The same float32 sums in two orders, where neither side is exact.
    "paths": {"float32": 5e-6},
    # Gradients through attention: sums over queries as well as keys.
    "gradient": {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3},
    # Row log-sum-exp, always kept in float32 whatever the inputs are.
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
    # Fractions that follow from integer counts: density, recall, accuracy.
    "density": {"float32": 1e-6},
}


def tolerance(name: str, dtype: DTypeLike = "float32") -> dict[str, float]:
    """Returns `{"rtol": x, "atol": x}` for `np.testing.assert_allclose`.

    Args:
      name: What is compared, a key of `TOLERANCES`.
      dtype: The dtype of the computation under test, not of its reference.
    """
    value = TOLERANCES[name][jnp.dtype(dtype).name]
    return {"rtol": value, "atol": value}
