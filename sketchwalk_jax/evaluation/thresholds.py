"""Adamas's thresholds for a model, from the keys of held-out prompts.

The published thresholds are absolute numbers, and keys of another model may lie on another scale:
where none reaches the outer thresholds, half of every code goes unused.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.cache import init_cache, num_dense_layers
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.inference import read_prompt
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies.adamas import AdamasConfig, key_quartiles
from sketchwalk_jax.policies.dense import Dense

PyTree = Any

_KEYS_OF_A_PROMPT = 1024


@dataclasses.dataclass(frozen=True)
class FittedThresholds:
    """What `fit_thresholds` found.

    Attributes:
      policy: The policy with its thresholds set.
    """

    policy: AdamasConfig

    @property
    def settings(self) -> dict[str, Any]:
        """The field that was set."""
        return {"thresholds": list(self.policy.thresholds)}


def fit_thresholds(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "P T"],
    lengths: Int[Array | np.ndarray, "P"] | None = None,
    *,
    policy: AdamasConfig,
    model_config: ModelConfig,
    program: Callable[..., Array] | None = None,
) -> FittedThresholds:
    """Sets the thresholds to the quartiles of a model's own keys, to four decimals.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded, read densely and at once. They should not be prompts that are
        scored.
      lengths: Tokens of each prompt; all `T` by default.
      policy: The policy. Keys of its dense layers do not count.
      model_config: The model.
      program: `quartiles_of_keys` compiled for these prompts; compiled here by default.

    Returns:
      The policy with new thresholds; as it is where no layer is sparse.

    Raises:
      ValueError: If the model's head_dim has no Hadamard transform.

    Example:
      >>> found = fit_thresholds(params, tokens, policy=AdamasConfig(),
      ...                        model_config=model_config)  # doctest: +SKIP
      >>> found.policy.thresholds  # doctest: +SKIP
      (-1.1680, 0.0094, 1.1765)
    """
    first = num_dense_layers(model_config, policy)
    if first == model_config.num_layers:
        return FittedThresholds(policy)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1])
    if program is None:
        program = functools.partial(quartiles_of_keys, first=first, model_config=model_config)
    quartiles = program(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
    low, middle, high = (round(one, 4) for one in np.asarray(quartiles).tolist())
    return FittedThresholds(dataclasses.replace(policy, thresholds=(low, middle, high)))


@functools.partial(jax.jit, static_argnames=("first", "model_config"))
def quartiles_of_keys(
    params: PyTree,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, "P"],
    *,
    first: int,
    model_config: ModelConfig,
) -> Float[Array, "3"]:
    """Quartiles over layers from `first` on, heads, channels and tokens evenly spread."""
    batch, num_tokens = tokens.shape
    dtype = params["embed"]["embedding"].dtype
    config = Dense()
    cache = init_cache(model_config, config, batch=batch, max_tokens=num_tokens, dtype=dtype)
    settings = Settings(model_config=model_config, config=config)
    columns = jnp.zeros((batch, 1), jnp.int32)
    _, cache, _ = read_prompt(
        params, tokens, lengths, columns, cache, is_fresh=True, settings=settings
    )
    stride = (lengths[:, None] + _KEYS_OF_A_PROMPT - 1) // _KEYS_OF_A_PROMPT
    count = min(_KEYS_OF_A_PROMPT, num_tokens)
    places = jnp.arange(count, dtype=jnp.int32)[None, :] * stride
    is_real = (places < lengths[:, None])[None, :, :, None, None]
    places = jnp.minimum(places, num_tokens - 1)[None, :, :, None, None]
    keys = jnp.take_along_axis(cache.key[first:], places, axis=2)
    return key_quartiles(jnp.where(is_real, keys, jnp.nan))
