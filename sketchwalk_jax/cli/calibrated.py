"""`--density` for policies with a knob: it is found on a text that is not the prompt."""

import sys
from typing import Any

from sketchwalk_jax.cli.progress import elapsed
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.base import PrefillPolicy

_TASK = "text_loss"  # plain text, nothing hidden in it
_LEAST_TOKENS = 128


def set_density(
    config: Policy,
    density: float,
    params: Params,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    num_tokens: int,
) -> Policy:
    """The policy at a density on plain English of the prompt's length, if it has a knob.

    What was found goes to standard error. Policies without a knob are returned as they are.
    """
    if not isinstance(config, PrefillPolicy):
        return config
    from sketchwalk_jax.evaluation.calibration import calibrate, held_out_prompts
    from sketchwalk_jax.evaluation.text import read_text

    with elapsed(f"calibrating to density {density:g}"):
        tokens, lengths = held_out_prompts(
            read_text(), tokenizer, tasks=(_TASK,), num_tokens=max(num_tokens, _LEAST_TOKENS)
        )
        found = calibrate(
            params, tokens, lengths, policy=config, model_config=model_config, density=density
        )
    chosen = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    print(f"{chosen}: measured density {found.density:.3f} on other text", file=sys.stderr)
    return found.policy
