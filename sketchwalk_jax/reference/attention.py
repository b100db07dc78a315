"""Exact attention under a mask, in float32 at the highest precision (Algorithm 1, step 8)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from sketchwalk_jax.reference.sketch import AnyArray


@partial(jax.jit, static_argnames="scale")
def masked_attention(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "S K H"],
    value: Float[AnyArray, "S K H"],
    mask: Bool[AnyArray, "T S"] | Bool[AnyArray, "N T S"],
    scale: float | None = None,
) -> tuple[Float[AnyArray, "T N H"], Float[AnyArray, "T N"]]:
    """Computes `softmax(scale · Q Kᵀ) V` per head over the allowed pairs.

    Args:
      query: Queries of one sequence.
      key: Keys; query head `n` reads key head `n // (N / K)`.
      value: Values.
      mask: True where a query may attend to a key, shared by the heads or one per query head.
      scale: Factor of the logits; `1 / sqrt(H)` where None.

    Returns:
      The output in float32, and the log-sum-exp of the scaled logits. A query that may attend
      to nothing gives 0 and `-inf`; one that may attend to a key or value that is not finite gives
      NaN, and no other does.

    Example:
      >>> x = jnp.ones((2, 1, 4))
      >>> out, lse = masked_attention(x, x, x, jnp.tril(jnp.ones((2, 2), bool)))
      >>> out.shape, lse.shape
      ((2, 1, 4), (2, 1))
    """
    num_heads, head_dim = query.shape[1:]
    group_size = num_heads // key.shape[1]
    factor = np.float32(1.0 / np.sqrt(head_dim) if scale is None else scale)
    key, value = (jnp.repeat(x.astype(jnp.float32), group_size, axis=1) for x in (key, value))
    mask = jnp.broadcast_to(mask, (num_heads, *mask.shape[-2:]))
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("tnh,snh->nts", query.astype(jnp.float32), key, precision=highest)
    logits = jnp.where(mask, logits * factor, -jnp.inf)
    largest = logits.max(axis=-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.where(mask, jnp.exp(logits - largest), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    is_lost = ~jnp.isfinite(value).all(axis=-1)
    output = jnp.einsum(
        "nts,snh->tnh", weights, jnp.where(is_lost[..., None], 0.0, value), precision=highest
    )
    sees_lost = (mask & is_lost.T[:, None, :]).any(axis=-1)
    output = jnp.where(sees_lost.T[..., None], jnp.nan, output)
    return output, (jnp.log(total) + largest)[..., 0].T
