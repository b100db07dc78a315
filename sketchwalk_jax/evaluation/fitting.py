"""What a policy needs to know of a model before it runs: a knob's value, or thresholds."""

import logging
from typing import Any

from sketchwalk_jax.evaluation.calibration import calibrate, held_out_prompts
from sketchwalk_jax.evaluation.text import read_text
from sketchwalk_jax.evaluation.thresholds import fit_thresholds
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.base import Policy, PrefillPolicy

PyTree = Any
_log = logging.getLogger(__name__)

_TASKS: tuple[str, ...] = ("text_loss", "multi_key")
_MAX_TOKENS_OF_KEYS = 8192  # quartiles of keys depend little on the length


def fit_policy(
    policy: Policy,
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    num_tokens: int,
    density: float | None = None,
    is_fitted: bool = False,
) -> Policy:
    """The policy as it suits a model, on prompts that no harness has.

    A knob is set on two of one length, English text and a question about codes hidden in such text:
    what is kept of one that ends in a question is more. Thresholds take the text alone.

    Args:
      policy: The policy.
      params: Parameter tree.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      num_tokens: Tokens of a prompt: for a density, about those of the prompts to come. Thresholds
        take at most 8,192.
      density: What a policy with a knob is calibrated to; as it is without.
      is_fitted: Whether the thresholds of Adamas are the model's already.

    Returns:
      The policy with its knob or thresholds set; others as they are.

    Raises:
      ValueError: If the prompts do not fit `num_tokens`, or the text is shorter.
    """
    has_target = isinstance(policy, PrefillPolicy) and density is not None
    if not has_target and (is_fitted or not isinstance(policy, AdamasConfig)):
        return policy
    tasks = _TASKS
    if isinstance(policy, AdamasConfig):
        num_tokens, tasks = min(num_tokens, _MAX_TOKENS_OF_KEYS), _TASKS[:1]
    tokens, lengths = held_out_prompts(read_text(), tokenizer, tasks=tasks, num_tokens=num_tokens)
    if isinstance(policy, AdamasConfig):
        fitted = fit_thresholds(params, tokens, lengths, policy=policy, model_config=model_config)
        return fitted.policy
    assert isinstance(policy, PrefillPolicy) and density is not None
    found = calibrate(
        params,
        tokens,
        lengths,
        policy=policy,
        model_config=model_config,
        density=density,
        batch=1,
    )
    _log.info("%s: density %.3f on held-out prompts", found.settings, found.density)
    return found.policy
