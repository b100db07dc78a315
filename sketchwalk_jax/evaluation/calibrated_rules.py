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
) -> tuple[Int[np.ndarray, "P T"], Int[np.ndarray, "P"]]:
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


def is_set_by_model(rule: Rule) -> bool:
    """Whether a rule must be calibrated to a density, or its thresholds fitted to the model."""
    return rule.is_calibrated or rule.is_fitted or isinstance(rule.make(), AdamasConfig)


@dataclasses.dataclass(frozen=True)
class FittedDensity:
    """The result of `fit_density`.

    Attributes:
      policy: The policy with its density set.
      density: The resulting density, mean over all layers.
      least: Lowest density that the policy can reach.
    """

    policy: Policy
    density: float
    least: float


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
) -> FittedDensity:
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
    return FittedDensity(at(near / _STEPS), give(near / _STEPS), give(1 / _STEPS))


@dataclasses.dataclass(frozen=True)
class SetRule:
    """A rule with its fitted fields.

    Attributes:
      policy: The policy with its fields set.
      settings: The fitted fields, as rows store them.
    """

    policy: Policy
    settings: dict[str, Any]

    @classmethod
    def before(cls, rule: Rule, settings: Mapping[str, Any]) -> Self:
        """Restores a rule from the settings in its rows, in which JSON made lists of tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
        return cls(dataclasses.replace(rule.make(), **fields), dict(settings))


@dataclasses.dataclass(frozen=True)
class OutOfReach:
    """A rule that is not run because it cannot reach its density.

    Attributes:
      least: Lowest density it can reach, mean over the counted layers.
    """

    least: float


def set_rules(
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
) -> dict[Rule, SetRule | OutOfReach]:
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
      The fitted rule, or why it is left out, for each rule that needs fitting.
    """
    rules = sorted(filter(is_set_by_model, rules), key=lambda rule: (str(rule), str(rule.phases)))
    read = [rule for rule in rules if isinstance(rule.make(), PrefillPolicy | AdamasConfig)]
    fit = functools.partial(_fit, model_config=model_config, num_tokens=num_tokens)
    found = {rule: fit(rule) for rule in rules if rule not in read}
    if not read:
        return found
    options: dict[str, Any] = {"tasks": tasks, "num_tokens": num_tokens}
    prompts = held_out_prompts(text, tokenizer, **options, seed=seed, wording=wording)
    size = whole_batch(min(batch, len(tasks)), placement_of(params, model_config))
    for rule in read:
        before(f"calibrating {rule}, {num_tokens} tokens")
        if rule.policy == "adamas":
            # Fit the density first: the thresholds are fitted to the policy at this density.
            one = fit(rule) if rule.is_fitted else SetRule(rule.make(), {})
            if isinstance(one, SetRule):
                tokens, lengths = (x[:size] for x in prompts)
                one = _set_thresholds(one, params, tokens, lengths, model_config)
            found[rule] = one
        else:
            found[rule] = _set_knob(rule, params, *prompts, model_config, batch=size)
    return found


def _fit(rule: Rule, *, model_config: ModelConfig, num_tokens: int) -> SetRule | OutOfReach:
    """Fits the field `density` of a rule through its budget."""
    assert rule.density is not None and rule.phases is not None
    found = fit_density(
        rule.make(),
        model_config,
        density=rule.density,
        num_tokens=num_tokens,
        phase="decode" if rule.phases == ("decode",) else "prefill",
    )
    policy: Any = found.policy
    is_reached = found.density <= rule.density * (1 + _TOO_MUCH)
    return SetRule(policy, {"density": policy.density}) if is_reached else OutOfReach(found.least)


def _set_thresholds(
    rule: SetRule,
    params: PyTree,
    tokens: Int[np.ndarray, "P T"],
    lengths: Int[np.ndarray, "P"],
    model_config: ModelConfig,
) -> SetRule:
    """Fits the quantisation thresholds of Adamas to the model's keys."""
    assert isinstance(rule.policy, AdamasConfig)
    policy = fit_thresholds(params, tokens, lengths, policy=rule.policy, model_config=model_config)
    return SetRule(policy, rule.settings | {"thresholds": list(policy.thresholds)})


def _set_knob(
    rule: Rule,
    params: PyTree,
    tokens: Int[np.ndarray, "P T"],
    lengths: Int[np.ndarray, "P"],
    model_config: ModelConfig,
    *,
    batch: int,
) -> SetRule | OutOfReach:
    """Calibrates the threshold of a rule to its density."""
    policy = rule.make()
    assert isinstance(policy, PrefillPolicy) and rule.density is not None
    is_whole = rule.over == "all_layers"
    dense_share = 1 - len(sparse_layers(model_config, policy)) / model_config.num_layers
    if is_whole and dense_share >= rule.density:
        return OutOfReach(dense_share)  # the dense layers alone exceed it: no threshold can help
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
    if is_whole and found.density > rule.density * (1 + _TOO_MUCH):
        return OutOfReach(found.least)
    return SetRule(found.policy, found.settings)
