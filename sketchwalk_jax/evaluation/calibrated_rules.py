"""Rules of an evaluation that a model and held-out prompts set: knobs, and Adamas's thresholds."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sketchwalk_jax.cache import num_dense_layers
from sketchwalk_jax.evaluation.calibration import (
    Calibration,
    calibrate,
    held_out_prompts,
    prefill_density,
    unset,
)
from sketchwalk_jax.evaluation.programs import Programs
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.text import Text
from sketchwalk_jax.evaluation.thresholds import (
    FittedThresholds,
    fit_thresholds,
    quartiles_of_keys,
)
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.base import PrefillPolicy

PyTree = Any


def is_set_by_model(rule: Rule) -> bool:
    """Whether a rule is calibrated to a density, or has thresholds to be fitted."""
    return rule.is_calibrated or isinstance(rule.make(), AdamasConfig)


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
        self._rules = sorted(filter(is_set_by_model, rules), key=str)
        self._programs, self._model_config = programs, model_config
        self._num_tokens, self._batch = num_tokens, min(batch, num_tasks)
        for rule in self._rules:
            self._program(rule.make())

    def _program(self, policy: Policy) -> Future[Any]:
        def integers(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        prompts = integers(self._batch, self._num_tokens), integers(self._batch)
        static: dict[str, Any] = {"model_config": self._model_config}
        if isinstance(policy, AdamasConfig):
            static["first"] = num_dense_layers(self._model_config, policy)
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
        before: Callable[[str], object] = str,
    ) -> dict[Rule, Calibration | FittedThresholds]:
        """Calibrates.

        Args:
          params: Parameter tree.
          text: As in `held_out_prompts`.
          tokenizer: As in `held_out_prompts`.
          tasks: Names of the tasks.
          seed: Seed of the evaluation.
          before: Is told what is done next.

        Returns:
          What was found for each rule that needs it.
        """
        if not self._rules:
            return {}
        tokens, lengths = held_out_prompts(
            text, tokenizer, tasks=tasks, num_tokens=self._num_tokens, seed=seed
        )
        return {rule: self._set(rule, params, tokens, lengths, before) for rule in self._rules}

    def _set(
        self,
        rule: Rule,
        params: PyTree,
        tokens: Int[np.ndarray, "P T"],
        lengths: Int[np.ndarray, "P"],
        before: Callable[[str], object],
    ) -> Calibration | FittedThresholds:
        before(f"calibrating {rule}, {self._num_tokens} tokens")
        policy = rule.make()
        program = self._program(policy).result()
        if isinstance(policy, AdamasConfig):
            return fit_thresholds(
                params,
                tokens[: self._batch],
                lengths[: self._batch],
                policy=policy,
                model_config=self._model_config,
                program=program,
            )
        assert isinstance(policy, PrefillPolicy) and rule.density is not None
        return calibrate(
            params,
            tokens,
            lengths,
            policy=policy,
            model_config=self._model_config,
            density=rule.density,
            batch=self._batch,
            program=program,
        )
