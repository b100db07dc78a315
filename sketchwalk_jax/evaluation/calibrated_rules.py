"""Rules of an evaluation that a model and held-out prompts set, before anything is scored.

To compare policies at a density, those with a knob are calibrated (`calibration.py`) on prompts
that no result counts, never on those that are scored, and the knob stays as it is for all of them.
Where a density counts all layers, that of other policies is set by their budgets. Adamas gets the
thresholds of the model's own keys.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sketchwalk_jax.cache import sparse_layers
from sketchwalk_jax.calibration import (
    calibrate,
    fit_thresholds,
    prefill_density,
    quartiles_of_keys,
    unset,
)
from sketchwalk_jax.evaluation.programs import Programs
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.tasks import draw_samples, text_for
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.padding import pad_right
from sketchwalk_jax.policies import Policy, takes_density
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.sharding import whole_batch
from sketchwalk_jax.text import HELD_OUT, Text
from sketchwalk_jax.validation import check_number

PyTree = Any

_DECODED = 64  # positions that stand for those of decoded tokens
_STEPS = 10_000  # densities are set to four decimals
_TOO_MUCH = 0.05  # share of a density by which a rule over all layers may be above it


def held_out_prompts(
    text: Text,
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    num_tokens: int,
    seed: int = 0,
    wording: str = "plain",
) -> tuple[Int[np.ndarray, "P T"], Int[np.ndarray, "P"]]:
    """One prompt of each task that no evaluation with a seed below 2^32 scores.

    Args:
      text: Text to hide facts in.
      tokenizer: A tokenizer of transformers.
      tasks: Names of tasks.
      num_tokens: Length of the prompts.
      seed: Seed of the evaluation.
      wording: As in `draw_samples`.

    Returns:
      Tokens, right-padded, and lengths, as `calibrate` takes them.

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
    """Whether a rule is calibrated to a density, or has thresholds to be fitted."""
    return rule.is_calibrated or rule.is_fitted or isinstance(rule.make(), AdamasConfig)


@dataclasses.dataclass(frozen=True)
class FittedDensity:
    """What `fit_density` found.

    Attributes:
      policy: The policy with its density set.
      density: What that gives, mean over all layers.
      least: The least that the policy can give.
    """

    policy: Policy
    density: float
    least: float


def layers_density(
    policy: Policy, model_config: ModelConfig, *, num_tokens: int, phase: str
) -> float:
    """The density that a budget gives, mean over all layers, whatever the prompt says.

    Row `i` keeps `budget[i]` units, all of its own among them. With `n` dense layers of `L`, and
    mean density `s` of the others, it is `(n + (L - n) s) / L`. A policy with a plan has a budget
    for each of these.

    Args:
      policy: The policy.
      model_config: The model.
      num_tokens: Tokens of a prompt.
      phase: `"prefill"` for all of its tokens as queries, `"decode"` for the last 64 of them.

    Returns:
      Attended over causal pairs.

    Raises:
      ValueError: If the policy has no budget that its density sets.
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
    """Finds the `density` of a policy whose mean over all layers is a given one, by bisection.

    The budget of such a policy depends on positions alone, so that no prompt has to be read.

    Args:
      policy: The policy.
      model_config: The model.
      density: The mean to reach, in (0, 1].
      num_tokens: As in `layers_density`.
      phase: As there.

    Returns:
      The policy, and what it gives: the least density above what is asked for if even that is more.

    Raises:
      ValueError: If the density is out of range, or the policy has no budget that it sets.

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
    """A rule as it is run.

    Attributes:
      policy: The policy with its fields set.
      settings: These fields, as rows have them.
    """

    policy: Policy
    settings: dict[str, Any]

    @classmethod
    def before(cls, rule: Rule, settings: Mapping[str, Any]) -> Self:
        """A rule that an earlier call set, as its rows say: with lists for tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
        return cls(dataclasses.replace(rule.make(), **fields), dict(settings))


@dataclasses.dataclass(frozen=True)
class OutOfReach:
    """A rule that is not run, because it cannot be as sparse as it should be.

    Attributes:
      least: Its least density, mean over the layers that count.
    """

    least: float


class RuleCalibration:
    """Sets the rules of one length that need it; their programs are compiled from the beginning."""

    def __init__(
        self,
        programs: Programs,
        rules: Iterable[Rule],
        model_config: ModelConfig,
        *,
        num_tasks: int,
        num_tokens: int,
        batch: int,
    ) -> None:
        """Starts to compile.

        Args:
          programs: Where programs are compiled.
          rules: Rules, of which those with neither a knob nor thresholds are passed over.
          model_config: The model.
          num_tasks: Tasks of the evaluation, each of which gives one prompt.
          num_tokens: Length of the prompts.
          batch: Most prompts at a time.
        """
        self._rules = sorted(
            filter(is_set_by_model, rules), key=lambda rule: (str(rule), str(rule.phases))
        )
        self._programs, self._model_config = programs, model_config
        self._num_tokens = num_tokens
        self._batch = whole_batch(min(batch, num_tasks), programs.placement)
        self._measured = [
            rule for rule in self._rules if isinstance(rule.make(), PrefillPolicy | AdamasConfig)
        ]
        for rule in self._measured:
            self._program(rule.make())

    def _program(self, policy: Policy) -> Future[Any]:
        def integers(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        prompts = integers(self._batch, self._num_tokens), integers(self._batch)
        static: dict[str, Any] = {"model_config": self._model_config}
        if isinstance(policy, AdamasConfig):
            static["layers"] = sparse_layers(self._model_config, policy)
            return self._programs.start(quartiles_of_keys, *prompts, **static)
        assert isinstance(policy, PrefillPolicy)
        value, floor = jax.ShapeDtypeStruct((), jnp.float32), integers()
        static["policy"] = unset(policy)
        return self._programs.start(prefill_density, *prompts, value, floor, **static)

    def run(
        self,
        params: PyTree,
        text: Text,
        tokenizer: Any,
        *,
        tasks: Sequence[str],
        seed: int,
        wording: str = "plain",
        before: Callable[[str], object] = str,
    ) -> dict[Rule, SetRule | OutOfReach]:
        """Calibrates.

        Args:
          params: Parameter tree.
          text: As in `held_out_prompts`.
          tokenizer: As in `held_out_prompts`.
          tasks: Names of the tasks.
          seed: Seed of the evaluation.
          wording: As in `held_out_prompts`.
          before: Is told what is done next.

        Returns:
          What was found for each rule that needs it.
        """
        found = {rule: self._fit(rule) for rule in self._rules if rule not in self._measured}
        if self._measured:
            prompts = held_out_prompts(
                text,
                tokenizer,
                tasks=tasks,
                num_tokens=self._num_tokens,
                seed=seed,
                wording=wording,
            )
        for rule in self._measured:
            before(f"calibrating {rule}, {self._num_tokens} tokens")
            set_rule = self._set_thresholds if rule.policy == "adamas" else self._set_knob
            found[rule] = set_rule(rule, params, *prompts)
        return found

    def _fit(self, rule: Rule) -> SetRule | OutOfReach:
        """Sets the field `density` of a rule by its budget."""
        assert rule.density is not None and rule.phases is not None
        found = fit_density(
            rule.make(),
            self._model_config,
            density=rule.density,
            num_tokens=self._num_tokens,
            phase="decode" if rule.phases == ("decode",) else "prefill",
        )
        policy: Any = found.policy
        is_reached = found.density <= rule.density * (1 + _TOO_MUCH)
        settings = {"density": policy.density}
        return SetRule(policy, settings) if is_reached else OutOfReach(found.least)

    def _set_thresholds(
        self,
        rule: Rule,
        params: PyTree,
        tokens: Int[np.ndarray, "P T"],
        lengths: Int[np.ndarray, "P"],
    ) -> SetRule | OutOfReach:
        """Sets the thresholds of Adamas, and its density first where that is to be set."""
        found = self._fit(rule) if rule.is_fitted else SetRule(rule.make(), {})
        if isinstance(found, OutOfReach):
            return found
        assert isinstance(found.policy, AdamasConfig)
        policy = fit_thresholds(
            params,
            tokens[: self._batch],
            lengths[: self._batch],
            policy=found.policy,
            model_config=self._model_config,
            program=self._program(rule.make()).result(),
        )
        return SetRule(policy, found.settings | {"thresholds": list(policy.thresholds)})

    def _set_knob(
        self,
        rule: Rule,
        params: PyTree,
        tokens: Int[np.ndarray, "P T"],
        lengths: Int[np.ndarray, "P"],
    ) -> SetRule | OutOfReach:
        """Sets the knob of a rule to its density."""
        policy = rule.make()
        assert isinstance(policy, PrefillPolicy) and rule.density is not None
        is_whole = rule.over == "all_layers"
        num_sparse = len(sparse_layers(self._model_config, policy))
        dense_share = 1 - num_sparse / self._model_config.num_layers
        if is_whole and dense_share >= rule.density:
            return OutOfReach(dense_share)  # no knob can mend that: nothing is tried
        found = calibrate(
            params,
            tokens,
            lengths,
            policy=policy,
            model_config=self._model_config,
            density=rule.density,
            batch=self._batch,
            over=rule.over,
            program=self._program(policy).result(),
        )
        if is_whole and found.density > rule.density * (1 + _TOO_MUCH):
            return OutOfReach(found.least)
        return SetRule(found.policy, found.settings)
