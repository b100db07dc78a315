"""Fits the rules of an evaluation to a model before anything is scored.

To compare policies at one density, policies with a threshold are calibrated (`calibration.py`) on
held-out prompts, never on scored ones; the threshold is then the same for all scored prompts. If a
density counts all layers, the budgets of the other policies are set to reach it. Adamas gets
quantisation thresholds fitted to the model's keys.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from sketchwalk_jax.calibration import calibrate, fit_thresholds
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.tasks import draw_samples, text_for
from sketchwalk_jax.inference.cache import sparse_layers
from sketchwalk_jax.inference.padding import pad_right
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import Policy, takes_density
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.sharding import placement_of, whole_batch
from sketchwalk_jax.text.haystack import HELD_OUT, Text
from sketchwalk_jax.validation import check_number

PyTree = Any
HeldOut = tuple[Int[np.ndarray, "P T"], Int[np.ndarray, "P"]]

_DECODED = 64  # query positions counted as decoded tokens
_STEPS = 10_000  # densities are set to four decimals
_TOO_MUCH = 0.05  # relative excess over a density that a rule over all layers may have


def held_out_prompts(
    text: Text,
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    num_tokens: int,
    seed: int = 0,
    wording: str = "plain",
) -> HeldOut:
    """Draws one prompt of each task that no evaluation with a seed below 2^32 scores.

    Args:
      text: Text to hide facts in.
      tokenizer: A tokenizer of transformers.
      tasks: Names of tasks.
      num_tokens: Length of the prompts.
      seed: Seed of the evaluation.
      wording: As in `draw_samples`.

    Returns:
      Right-padded tokens and their lengths, the arguments of `calibrate`.

    Raises:
      ValueError: If `num_tokens` leaves no room for a task.
    """
    options = {"num_tokens": num_tokens, "count": 1, "seed": HELD_OUT + seed}
    drawn = [
        draw_samples(task, text_for(task, text), tokenizer, wording=wording, **options)[0].tokens
        for task in tasks
    ]
    return pad_right(drawn, num_tokens)


@dataclasses.dataclass(frozen=True)
class FittedRule:
    """A policy that is fitted to a model or a density.

    Attributes:
      policy: The policy with its fields set.
      settings: The fitted fields, as rows store them; None if the policy is not run, because it
        cannot reach its density.
      density: The density that it reaches, mean over the counted layers.
      least: Lowest density that it can reach.
    """

    policy: Policy
    settings: dict[str, Any] | None
    density: float = 0.0
    least: float = 0.0

    @classmethod
    def restored(cls, rule: Rule, settings: Mapping[str, Any]) -> Self:
        """Restores a rule from the settings in its rows, in which JSON made lists of tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
        return cls(dataclasses.replace(rule.make(), **fields), dict(settings))

    def within(self, density: float | None) -> Self:
        """Returns this rule without settings if it exceeds the density by more than 5 %."""
        is_reached = density is None or self.density <= density * (1 + _TOO_MUCH)
        return self if is_reached else dataclasses.replace(self, settings=None)


def layers_density(
    policy: Policy, model_config: ModelConfig, *, num_tokens: int, phase: str
) -> float:
    """Computes the mean density over all layers from a policy's budget, for any prompt.

    Query block `i` keeps `budget[i]` blocks, its own included. With `n` dense layers of `L` and
    mean density `s` of the others, the density is `(n + (L - n) s) / L`. A policy with a plan has a
    budget for each sparse layer.

    Args:
      policy: The policy.
      model_config: The model.
      num_tokens: Tokens of a prompt.
      phase: `"prefill"` counts all tokens as queries, `"decode"` the last 64.

    Returns:
      Attended pairs over causal pairs.

    Raises:
      ValueError: If the policy's density sets no budget.
    """
    budget: Any = getattr(policy, "budget", None)
    if budget is None or not takes_density(policy):
        raise ValueError(f"policy must have a budget by its density, got {policy!r}")
    unit_size = getattr(policy, "unit_size", policy.block_size)
    positions = np.arange(num_tokens)[0 if phase == "prefill" else -_DECODED :]
    row_size = policy.block_size if phase == "prefill" else unit_size
    rows = positions // row_size
    if isinstance(policy, RecommendedConfig):  # a budget for each sparse layer
        budget = functools.partial(policy.budgets, is_token=phase == "decode")
    kept = np.atleast_2d(budget(int(rows[-1]) + 1))[:, rows].astype(np.int64)
    pairs = (kept - row_size // unit_size) * unit_size + positions % row_size + 1
    sparse = float(pairs.mean(axis=0).sum() / (positions + 1).sum())
    num_layers = model_config.num_layers
    count = num_layers - len(sparse_layers(model_config, policy))
    return (count + (num_layers - count) * sparse) / num_layers


def fit_density(
    policy: Policy,
    model_config: ModelConfig,
    *,
    density: float,
    num_tokens: int,
    phase: str,
) -> FittedRule:
    """Finds by bisection the `density` of a policy whose mean over all layers is the given one.

    The budget depends on positions alone, so no prompt is read.

    Args:
      policy: The policy.
      model_config: The model.
      density: The mean to reach, in (0, 1].
      num_tokens: As in `layers_density`.
      phase: As there.

    Returns:
      The policy and its mean density; its lowest density if even this exceeds the request.

    Raises:
      ValueError: If the density is out of range, or sets no budget of the policy.

    Example:
      >>> found = fit_density(SketchWalkConfig.paper(), model_config, density=0.2,
      ...                     num_tokens=8192, phase="prefill")  # doctest: +SKIP
      >>> found.policy.density, found.density  # doctest: +SKIP
      (0.1358, 0.2)
    """
    check_number("density", density, "(0, 1]")
    if getattr(policy, "max_kl", None) is not None:
        raise ValueError(f"policy must have a density, not max_kl, got {policy!r}")

    def at(value: float) -> Policy:
        fields: dict[str, Any] = {"density": value}
        return dataclasses.replace(policy, **fields)

    def give(value: float) -> float:
        made = at(value)
        return layers_density(made, model_config, num_tokens=num_tokens, phase=phase)

    low, high = 1, _STEPS
    while low < high:  # the least step that reaches the density
        middle = (low + high) // 2
        low, high = (low, middle) if give(middle / _STEPS) >= density else (middle + 1, high)
    near = min((max(low - 1, 1), low), key=lambda step: abs(give(step / _STEPS) - density))
    found: Any = at(near / _STEPS)
    settings = {"density": found.density}
    return FittedRule(found, settings, give(near / _STEPS), give(1 / _STEPS))


def fit_rules(
    rules: Iterable[Rule],
    params: PyTree,
    model_config: ModelConfig,
    text: Text,
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    num_tokens: int,
    batch: int,
    seed: int,
    wording: str = "plain",
    before: Callable[[str], object] = str,
) -> dict[Rule, FittedRule]:
    """Fits rules to their density, and the thresholds of Adamas to the keys, at one length.

    Args:
      rules: Rules; those without anything to fit are skipped.
      params: Parameter tree.
      model_config: The model.
      text: As in `held_out_prompts`.
      tokenizer: As there.
      tasks: Names of the tasks, each of which gives one prompt.
      num_tokens: Length of the prompts.
      batch: Most prompts at a time.
      seed: Seed of the evaluation.
      wording: As in `held_out_prompts`.
      before: Callback that receives a description of the next step.

    Returns:
      The fitted rule for each rule that needs fitting.
    """
    found: dict[Rule, FittedRule] = {}
    prompts: HeldOut | None = None
    size = whole_batch(min(batch, len(tasks)), placement_of(params, model_config))
    for rule in sorted(rules, key=lambda rule: (str(rule), str(rule.phases))):
        policy = rule.make()
        fitted = FittedRule(policy, {})
        if rule.is_fitted:
            assert rule.density is not None and rule.phases is not None
            fitted = fit_density(
                policy,
                model_config,
                density=rule.density,
                num_tokens=num_tokens,
                phase="decode" if rule.phases == ("decode",) else "prefill",
            ).within(rule.density)
        is_read = rule.is_calibrated or isinstance(policy, AdamasConfig)
        if is_read and fitted.settings is not None:
            before(f"calibrating {rule}, {num_tokens} tokens")
            prompts = prompts or held_out_prompts(
                text, tokenizer, tasks=tasks, num_tokens=num_tokens, seed=seed, wording=wording
            )
            if isinstance(fitted.policy, AdamasConfig):
                # The density comes first: thresholds are fitted to the policy at this density.
                own: dict[str, Any] = {"policy": fitted.policy, "model_config": model_config}
                policy = fit_thresholds(params, *(x[:size] for x in prompts), **own)
                settings = fitted.settings | {"thresholds": list(policy.thresholds)}
                fitted = dataclasses.replace(fitted, policy=policy, settings=settings)
            else:
                fitted = _fit_threshold(rule, params, *prompts, model_config, batch=size)
        if fitted.settings != {}:
            found[rule] = fitted
    return found


def _fit_threshold(
    rule: Rule,
    params: PyTree,
    tokens: Int[np.ndarray, "P T"],
    lengths: Int[np.ndarray, "P"],
    model_config: ModelConfig,
    *,
    batch: int,
) -> FittedRule:
    """Calibrates the threshold of a rule to its density."""
    policy = rule.make()
    assert isinstance(policy, PrefillPolicy) and rule.density is not None
    is_whole = rule.over == "all_layers"
    dense_share = 1 - len(sparse_layers(model_config, policy)) / model_config.num_layers
    if is_whole and dense_share >= rule.density:
        # The dense layers alone exceed it: no threshold can help.
        return FittedRule(policy, None, least=dense_share)
    found = calibrate(
        params,
        tokens,
        lengths,
        policy=policy,
        model_config=model_config,
        density=rule.density,
        batch=batch,
        over=rule.over,
    )
    fitted = FittedRule(found.policy, found.settings, found.density, found.least)
    return fitted.within(rule.density if is_whole else None)
