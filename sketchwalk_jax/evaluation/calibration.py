"""Policies without a density of their own, set to one on held-out prompts.

MInference and FlexPrefill keep what the model and the prompt make them keep; a field of theirs, the
*knob*, makes it more or less. To compare them at a density, the knob is found by bisection on
prompts that no result counts, never on those that are scored, and stays as it is for all of them.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.cache import Density, init_cache, num_dense_layers
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.evaluation.tasks import draw_samples
from sketchwalk_jax.evaluation.text import Text
from sketchwalk_jax.inference import read_prompt
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import changed_fields
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.validation import check_number

PyTree = Any

HELD_OUT = 2**32
"""Added to the seed of an evaluation, gives that of its held-out prompts."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
      policy: The policy with its knob set.
      density: Measured with it on the calibration prompts, in the layers where it selects.
      tried: Values of the knob and the densities that they gave, in the order tried.
    """

    policy: PrefillPolicy
    density: float
    tried: tuple[tuple[float, float], ...]

    @property
    def least(self) -> float:
        """The least density of those tried."""
        return min(density for _, density in self.tried)

    @property
    def settings(self) -> dict[str, Any]:
        """The knob, and the other fields of the policy that are not at their defaults."""
        return {self.policy.knob: self.policy.knob_value} | changed_fields(self.policy)


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
    program: Callable[..., Density] | None = None,
) -> Calibration:
    """Finds the value of a policy's knob that gives a density.

    The density is the attended over all causal pairs of the prompts, mean over the layers in which
    the policy selects, as measured while it reads them. Where the least value of the knob keeps
    too much, the policy's floors are lowered (`relaxed`); where that does not help either, the
    least density is taken, with a warning. One compiled program serves all values.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded, of about the length that the policy is to be used at: the
        density of one setting depends on it. They should not be prompts that are scored.
      lengths: Tokens of each prompt; all `T` by default.
      policy: The policy, such as `MInferenceConfig()`.
      model_config: The model.
      density: The density to reach, in (0, 1].
      tolerance: How far from it is near enough, as a share of it.
      max_steps: Most values to try; the best is taken.
      batch: Prompts at a time; all by default.
      program: `prefill_density` compiled for `batch` prompts of `T` tokens and `unset(policy)`;
        compiled here by default.

    Returns:
      The policy with its knob set, and what it gave.

    Raises:
      ValueError: If the policy has no knob, or the density is out of range.

    Example:
      >>> found = calibrate(params, tokens, policy=MInferenceConfig(),
      ...                   model_config=model_config, density=0.2)  # doctest: +SKIP
      >>> found.policy.scale, found.density  # doctest: +SKIP
      (0.2265625, 0.2013)
    """
    if not isinstance(policy, PrefillPolicy):
        raise ValueError(f"policy must have a knob, as MInferenceConfig has, got {policy!r}")
    check_number("density", density, "(0, 1]")
    tokens = jnp.asarray(tokens, jnp.int32)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1])
    prompts = params, tokens, jnp.asarray(lengths, jnp.int32)
    published, size = unset(policy), batch or tokens.shape[0]

    def measure(value: float, *, policy: PrefillPolicy) -> float:
        same, run = unset(policy), program
        if run is None or same != published:
            run = functools.partial(prefill_density, policy=same, model_config=model_config)
        return _measure(
            run,
            *prompts,
            value,
            policy.floor_value,
            first=num_dense_layers(model_config, policy),
            batch=size,
        )

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
        begin = relaxed.with_knob(policy.knob_value)
        found = _bisect(measure, begin, density, tolerance, max_steps)
    return found


def held_out_prompts(
    text: Text, tokenizer: Any, *, tasks: Sequence[str], num_tokens: int, seed: int = 0
) -> tuple[Int[np.ndarray, "P T"], Int[np.ndarray, "P"]]:
    """One prompt of each task that no evaluation with a seed below 2^32 scores.

    Args:
      text: Text to hide facts in.
      tokenizer: A tokenizer of transformers.
      tasks: Names of tasks.
      num_tokens: Length of the prompts.
      seed: Seed of the evaluation.

    Returns:
      Tokens, right-padded, and lengths, as `calibrate` takes them.

    Raises:
      ValueError: If `num_tokens` leaves no room for a task.
    """
    options = {"num_tokens": num_tokens, "count": 1, "seed": HELD_OUT + seed}
    drawn = [draw_samples(task, text, tokenizer, **options)[0].tokens for task in tasks]
    padded = [np.pad(one, (0, num_tokens - len(one))) for one in drawn]
    return np.stack(padded).astype(np.int32), np.array([len(one) for one in drawn], np.int32)


def _bisect(
    measure: Any, policy: PrefillPolicy, density: float, tolerance: float, max_steps: int
) -> Calibration:
    """The value nearest to the density, from the policy's own one on."""
    low, high = policy.knob_range
    value, tried = policy.knob_value, list[tuple[float, float]]()
    while len(tried) < max_steps:
        measured = measure(value, policy=policy)
        tried.append((value, measured))
        if abs(measured - density) <= tolerance * density:
            break
        if measured > density:
            high = value
        else:
            low = value
        if value == policy.knob_range[0] and measured > density:
            break
        # What is above from the start may be so at the least value too.
        value = low if len(tried) == 1 and measured > density else 0.5 * (low + high)
    value, measured = min(tried, key=lambda one: abs(one[1] - density))
    return Calibration(policy.with_knob(value), measured, tuple(tried))


def _measure(
    program: Callable[..., Density],
    params: PyTree,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, "P"],
    value: float,
    floor: int,
    *,
    first: int,
    batch: int,
) -> float:
    """The measured density at one value of knob and floor, in the layers from `first` on."""
    attended, causal, count = 0.0, 0.0, tokens.shape[0]
    for start in range(0, count, batch):
        # The last batch reaches back; what it repeats is not counted.
        begin = min(start, max(0, count - batch))
        rows = slice(begin, begin + batch)
        found = program(
            params,
            tokens[rows],
            lengths[rows],
            jnp.asarray(value, jnp.float32),
            jnp.asarray(floor, jnp.int32),
        )
        new = slice(start - begin, None)
        pairs = np.asarray(found.prefill_pairs, np.float64)[first:, new]
        attended += pairs.sum()
        causal += np.asarray(found.prefill_causal, np.float64)[new].sum() * len(pairs)
    return float(attended / causal)


def unset(policy: PrefillPolicy) -> PrefillPolicy:
    """The policy whatever its knob and its floor say: one program serves all of their values."""
    least = {} if policy.floor is None else {policy.floor: 1}
    return dataclasses.replace(policy.with_knob(policy.knob_range[0]), **least)


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
    """Reads prompts with knob and floor at values that are not known when it is compiled.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded.
      lengths: Tokens of each.
      value: The knob.
      floor: The floor; of no effect where the policy has none.
      policy: The policy, `unset`.
      model_config: The model.

    Returns:
      The pairs that were attended to.
    """
    batch, num_tokens = tokens.shape
    dtype = params["embed"]["embedding"].dtype
    cache = init_cache(model_config, policy, batch=batch, max_tokens=num_tokens, dtype=dtype)
    settings = Settings(model_config=model_config, config=policy.with_traced(value, floor))
    columns = jnp.zeros((batch, 1), jnp.int32)
    _, cache, _ = read_prompt(
        params, tokens, lengths, columns, cache, is_fresh=True, settings=settings
    )
    return cache.density
