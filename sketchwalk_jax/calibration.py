"""Calibration of policies to a model: thresholds for a density, and Adamas's code thresholds.

The share that MInference and FlexPrefill keep depends on the model and the prompt; one of their
fields, the *threshold*, changes it. `calibrate` finds the threshold for a density by
bisection on prompts; `set_density` does so on plain English. Adamas's published thresholds are
absolute numbers, but another model's keys may have another scale: if no key reaches the outer
thresholds, half of the codes are unused. `fit_thresholds` takes the quartiles of the model's keys.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.inference.cache import Density, sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.padding import pad_right
from sketchwalk_jax.inference.steps import read_into_new_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import OVER, changed_fields
from sketchwalk_jax.policies.adamas import AdamasConfig, key_quartiles
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.sharding import constrain, placement_of, whole_batch
from sketchwalk_jax.text.haystack import HELD_OUT, draw_passages, prompt_rng, read_text
from sketchwalk_jax.validation import check_choice, check_number

PyTree = Any

_KEYS_OF_A_PROMPT = 1024
_LEAST_TOKENS = 128  # minimum tokens of a prompt for setting a density


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`.

    Attributes:
      policy: The policy with its threshold set.
      density: Density measured with it on the calibration prompts, over the requested layers.
      tried: Pairs of a threshold and its measured density, in the order tried.
    """

    policy: PrefillPolicy
    density: float
    tried: tuple[tuple[float, float], ...]

    @property
    def least(self) -> float:
        """The smallest density of those tried."""
        return min(density for _, density in self.tried)

    @property
    def settings(self) -> dict[str, Any]:
        """The threshold, and the policy's other fields that differ from the defaults."""
        return {self.policy.threshold_field: self.policy.threshold_value} | changed_fields(
            self.policy
        )


def calibrate(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "P T"],
    lengths: Int[Array | np.ndarray, "P"] | None = None,
    *,
    policy: PrefillPolicy,
    model_config: ModelConfig,
    density: float,
    tolerance: float = 0.02,
    max_steps: int = 12,
    batch: int | None = None,
    over: str = "sparse_layers",
) -> Calibration:
    """Finds the threshold (`threshold_field`) of a policy that gives a density.

    The density is attended pairs over causal pairs of the prompts, a mean over the layers in which
    the policy selects, measured while it reads the prompts. If the smallest threshold keeps too
    much, the policy's floor is lowered (`relaxed`). If that is not enough, the smallest density is
    taken, with a warning. One compiled program serves all values.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded, of about the length that the policy will be used at, because
        the density depends on it. Do not use prompts that are evaluated.
      lengths: Number of tokens of each prompt. Default: all `T`.
      policy: The policy, such as `MInferenceConfig()`.
      model_config: The model.
      density: The density to reach, in (0, 1].
      tolerance: Relative deviation of the density that is accepted.
      max_steps: Maximum number of values to try; the best is taken.
      batch: Prompts at a time. Default: all.
      over: Layers whose mean density is set: `"sparse_layers"` or `"all_layers"`.

    Returns:
      The policy with its threshold set, and the measured densities.

    Raises:
      ValueError: If the policy has no threshold, or the density is out of range.

    Example:
      >>> found = calibrate(params, tokens, policy=MInferenceConfig(),
      ...                   model_config=model_config, density=0.2)  # doctest: +SKIP
      >>> found.policy.scale, found.density  # doctest: +SKIP
      (0.2265625, 0.2013)
    """
    if not isinstance(policy, PrefillPolicy):
        raise ValueError(f"policy must have a threshold, as MInferenceConfig has, got {policy!r}")
    check_number("density", density, "(0, 1]")
    tokens = jnp.asarray(tokens, jnp.int32)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1])
    lengths, count = jnp.asarray(lengths, jnp.int32), len(tokens)
    size = whole_batch(batch or count, placement_of(params, model_config))
    is_sparse = over == "sparse_layers"
    layers = sparse_layers(model_config, policy) if is_sparse else range(model_config.num_layers)

    def measure(value: float, *, policy: PrefillPolicy) -> float:
        threshold, floor = (
            jnp.asarray(value, jnp.float32),
            jnp.asarray(policy.floor_value, jnp.int32),
        )
        static: dict[str, Any] = {"policy": unset(policy), "model_config": model_config}
        attended, causal = 0.0, 0.0
        for start in range(0, count, size):
            # The last batch is filled up with the last prompt, which is counted once.
            rows = np.minimum(np.arange(start, start + size), count - 1)
            found = prefill_density(params, tokens[rows], lengths[rows], threshold, floor, **static)
            new = slice(min(size, count - start))
            pairs = np.asarray(found.prefill_pairs, np.float64)[list(layers), new]
            attended += pairs.sum()
            causal += np.asarray(found.prefill_causal, np.float64)[new].sum() * len(pairs)
        return float(attended / causal)

    check_choice("over", over, OVER)
    found = _bisect(measure, policy, density, tolerance, max_steps)
    while found.least > density * (1 + tolerance):
        relaxed = found.policy.relaxed()
        if relaxed is None:
            warnings.warn(
                f"{type(policy).__name__} keeps at least {found.least:.3f} of prompts of "
                f"{int(np.max(lengths))} tokens: density {density:g} is out of its reach",
                stacklevel=2,
            )
            break
        begin = relaxed.with_threshold(policy.threshold_value)
        found = _bisect(measure, begin, density, tolerance, max_steps)
    return found


def _bisect(
    measure: Any, policy: PrefillPolicy, density: float, tolerance: float, max_steps: int
) -> Calibration:
    """Finds the value nearest to the density, starting from the policy's own."""
    low, high = policy.threshold_range
    value, tried = policy.threshold_value, list[tuple[float, float]]()
    while len(tried) < max_steps:
        measured = measure(value, policy=policy)
        tried.append((value, measured))
        if abs(measured - density) <= tolerance * density:
            break
        if measured > density:
            high = value
        else:
            low = value
        if value == policy.threshold_range[0] and measured > density:
            break
        # If the first value keeps too much, try the smallest next: it may keep too much too.
        value = low if len(tried) == 1 and measured > density else 0.5 * (low + high)
    value, measured = min(tried, key=lambda one: abs(one[1] - density))
    return Calibration(policy.with_threshold(value), measured, tuple(tried))


def unset(policy: PrefillPolicy) -> PrefillPolicy:
    """Resets threshold and floor, so that one program serves all of their values."""
    least = {} if policy.floor is None else {policy.floor: 1}
    return dataclasses.replace(policy.with_threshold(policy.threshold_range[0]), **least)


@functools.partial(jax.jit, static_argnames=("policy", "model_config"))
def prefill_density(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    value: Float[Array, ""],
    floor: Int[Array, ""],
    *,
    policy: PrefillPolicy,
    model_config: ModelConfig,
) -> Density:
    """Reads prompts with a threshold and a floor that are unknown at compile time.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded.
      lengths: Number of tokens of each prompt.
      value: The threshold.
      floor: The floor; ignored if the policy has none.
      policy: The policy, from `unset`.
      model_config: The model.

    Returns:
      The counts of attended pairs.
    """
    settings = Settings(
        model_config=model_config,
        policy=policy.with_traced(value, floor),
        placement=placement_of(params, model_config),
    )
    return read_into_new_cache(params, tokens, lengths, settings=settings)[1].density


def set_density(
    policy: PrefillPolicy,
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    density: float,
    num_tokens: int,
) -> Calibration:
    """Sets a policy's threshold for a density, on plain English of about the prompts' length.

    Args:
      policy: The policy.
      params: Parameter tree.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      density: The density to reach, as in `calibrate`.
      num_tokens: Number of tokens of a prompt, clamped to at least 128 and at most the model's
        context.

    Returns:
      The result of `calibrate`.
    """
    num_tokens = min(max(num_tokens, _LEAST_TOKENS), model_config.context_length)
    rng = prompt_rng("text_loss", num_tokens, HELD_OUT)
    (passage,) = draw_passages(read_text(), tokenizer, num_tokens=num_tokens, sources=[rng])
    return calibrate(
        params,
        *pad_right([passage], num_tokens),
        policy=policy,
        model_config=model_config,
        density=density,
    )


def fit_thresholds(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "P T"],
    lengths: Int[Array | np.ndarray, "P"] | None = None,
    *,
    policy: AdamasConfig,
    model_config: ModelConfig,
) -> AdamasConfig:
    """Sets the thresholds to the quartiles of a model's keys, to four decimals.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded, read densely and at once. Do not use prompts that are
        evaluated.
      lengths: Number of tokens of each prompt. Default: all `T`.
      policy: The policy. Keys of its dense layers are ignored.
      model_config: The model.

    Returns:
      The policy with new thresholds; unchanged if no layer is sparse.

    Raises:
      ValueError: If the model's head_dim has no Hadamard transform.

    Example:
      >>> policy = fit_thresholds(params, tokens, policy=AdamasConfig(),
      ...                         model_config=model_config)  # doctest: +SKIP
      >>> policy.thresholds  # doctest: +SKIP
      (-1.1680, 0.0094, 1.1765)
    """
    layers = sparse_layers(model_config, policy)
    if not layers:
        return policy
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1])
    # Pad with empty prompts, which have no keys, so that all ranks get equally many.
    more = whole_batch(len(tokens), placement_of(params, model_config)) - len(tokens)
    tokens, lengths = jnp.pad(tokens, ((0, more), (0, 0))), jnp.pad(lengths, (0, more))
    quartiles = quartiles_of_keys(
        params,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        layers=layers,
        model_config=model_config,
    )
    low, middle, high = (round(one, 4) for one in np.asarray(quartiles).tolist())
    return dataclasses.replace(policy, thresholds=(low, middle, high))


@functools.partial(jax.jit, static_argnames=("layers", "model_config"))
def quartiles_of_keys(
    params: PyTree,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, "P"],
    *,
    layers: tuple[int, ...],
    model_config: ModelConfig,
) -> Float[Array, "3"]:
    """Quartiles over keys of some layers, all heads and channels, and evenly spread tokens."""
    where, policy = placement_of(params, model_config), Dense()
    settings = Settings(model_config=model_config, policy=policy, placement=where)
    _, cache = read_into_new_cache(params, tokens, lengths, settings=settings)
    num_tokens = tokens.shape[1]
    stride = (lengths[:, None] + _KEYS_OF_A_PROMPT - 1) // _KEYS_OF_A_PROMPT
    count = min(_KEYS_OF_A_PROMPT, num_tokens)
    places = jnp.arange(count, dtype=jnp.int32)[None, :] * stride
    is_real = (places < lengths[:, None])[None, :, :, None, None]
    places = jnp.minimum(places, num_tokens - 1)
    if where is not None and where.blocks is not None:
        places = where.blocks.place_in_cache(places, cache.capacity, policy.block_size)
    places = places[None, :, :, None, None]
    keys = jnp.take_along_axis(cache.key[np.array(layers, int)], places, axis=2)
    if where is not None and where.heads is not None:
        keys = keys[:, :, :, :: where.heads.copies]
    return constrain(key_quartiles(jnp.where(is_real, keys, jnp.nan)), where)
