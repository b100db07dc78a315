"""Long decoding: prefills a text, feeds its last 512 tokens one by one, compares with dense.

One program steps dense attention and a policy through the same tokens, each with its own cache, and
compares their distributions after every token: storing 512 rows of logits would take hundreds of
megabytes per prompt for a large vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.evaluation.rows import Outcome
from sketchwalk_jax.inference.cache import Cache, Density
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.steps import decode_token, read_into_new_cache
from sketchwalk_jax.sharding import constrain

PyTree = Any


@partial(jax.jit, static_argnames="settings")
def read_program(
    params: PyTree, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], *, settings: Settings
) -> Cache:
    """Prefills texts into a new cache of `T` tokens."""
    return read_into_new_cache(params, tokens, lengths, settings=settings)[1]


def compare_logits(
    exact: Float[Array, "N V"], logits: Float[Array, "N V"], target: Int[Array, "N"]
) -> tuple[Float[Array, "N"], Float[Array, "N"], Bool[Array, "N"]]:
    """Compares a distribution `q` over the next token with a reference distribution `p`.

        loss = -log q[target],   KL(p ‖ q) = Σ_v p[v] (log p[v] - log q[v])

    Args:
      exact: Logits of `p`.
      logits: Logits of `q`.
      target: The next tokens.

    Returns:
      Losses and divergences in nats, and whether both have the same likeliest token.
    """
    wanted, found = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(found, target[:, None], axis=-1)[:, 0]
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    return loss, divergence, jnp.argmax(exact, axis=-1) == jnp.argmax(logits, axis=-1)


@partial(jax.jit, static_argnames=("plain", "settings"))
def compare_program(
    params: PyTree,
    dense: Cache,
    cache: Cache,
    tokens: Int[Array, "B U"],
    *,
    plain: Settings,
    settings: Settings,
) -> tuple[Float[Array, "B V"], Float[Array, "B V"], Bool[Array, "B V"], Density]:
    """Feeds the same tokens to dense attention and to a policy, and compares their predictions.

    The comparison follows every token but the last.

    Args:
      params: Parameter tree.
      dense: Cache of dense attention.
      cache: Cache of the policy.
      tokens: The tokens, in order.
      plain: Model and dense attention.
      settings: Model and policy.

    Returns:
      Three values for each token after the first, `[B, U - 1]`: its loss `-log p` under the policy,
      `KL(p_dense ‖ p_policy)` of the prediction, both in nats, and whether policy and dense
      attention have the same likeliest token. Then the pairs that the policy attended to.
    """
    active = jnp.ones(tokens.shape[:1], bool)

    def step(carry: tuple[Cache, Cache], column: tuple[Array, Array]) -> Any:
        token, target = column
        exact, dense, _ = decode_token(params, token, carry[0], active=active, settings=plain)
        logits, cache, _ = decode_token(params, token, carry[1], active=active, settings=settings)
        return (dense, cache), compare_logits(exact, logits, target)

    columns = jnp.swapaxes(tokens, 0, 1)
    carry, found = jax.lax.scan(step, (dense, cache), (columns[:-1], columns[1:]))
    losses, divergences, agrees = (
        jnp.swapaxes(one, 0, 1) for one in constrain(found, settings.placement)
    )
    return losses, divergences, agrees, carry[1].density


def mean_over_tokens(*found: Any, count: int) -> Outcome:
    """Averages the results of `compare_program` over tokens, without the batch's padding rows."""
    *values, density = jax.device_get(found)
    losses, divergences, agreements = (x.mean(axis=1, dtype=np.float64)[:count] for x in values)
    density = jax.tree.map(lambda x: x[..., :count], density)
    return Outcome(None, losses, density, divergences, agreements)
