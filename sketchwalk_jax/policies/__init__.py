"""Policies by name. A policy decides which key blocks each query attends to.

To add a policy, add one file, and one line here.
"""

import dataclasses
from typing import Any

from sketchwalk_jax.plan import Plan
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.base import LayerShape, Policy, Span
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.flexprefill import FlexPrefillConfig
from sketchwalk_jax.policies.minference import MInferenceConfig
from sketchwalk_jax.policies.oracle import OracleConfig
from sketchwalk_jax.policies.quest import QuestConfig
from sketchwalk_jax.policies.random_blocks import RandomConfig
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.policies.streaming import StreamingConfig

_CLASSES: dict[str, type[Policy]] = {
    "dense": Dense,
    "streaming": StreamingConfig,
    "random": RandomConfig,
    "oracle": OracleConfig,
    "quest": QuestConfig,
    "adamas": AdamasConfig,
    "minference": MInferenceConfig,
    "flexprefill": FlexPrefillConfig,
    "sketchwalk": SketchWalkConfig,
}
POLICIES = tuple(_CLASSES)
PRESETS = ("recommended", "paper", "released", "damped", "one_hop")
OVER = ("sparse_layers", "all_layers")
"""Layers over which a policy's mean density can be calibrated with its threshold."""


def by_name(policy: str, *, preset: str | None = None, **overrides: Any) -> Policy:
    """Makes a policy by its name on the command line and in the evaluation.

    Args:
      policy: One of `POLICIES`.
      preset: For `"sketchwalk"`, one of `PRESETS`: `"recommended"` (the default),
        `"paper"`, `"released"`, `"damped"`, `"one_hop"`.
      **overrides: Fields of the policy's configuration, such as `density`; `None` means default.
        The dense policy ignores a density. MInference and FlexPrefill have a threshold instead
        (`threshold_field`); `sketchwalk_jax.evaluation.calibrate` finds its value for a density.

    Returns:
      A frozen policy.

    Raises:
      ValueError: If a name is unknown, a preset is given to a policy that has none, or a field is
        not one of the policy's.

    Example:
      >>> by_name("sketchwalk", preset="one_hop", density=0.1).beta
      0.0
      >>> by_name("streaming", density=0.1).density
      0.1
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if policy not in POLICIES:
        more = "; sketchwalk_jax.Auto takes a policy, and chooses by length" * (policy == "auto")
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}{more}")
    make: Any = _CLASSES[policy]
    if policy == "sketchwalk":
        preset = preset or PRESETS[0]
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {PRESETS}, got {preset!r}")
        make = getattr(make, preset)
    elif preset is not None:
        raise ValueError(f"preset must be None for the {policy} policy, got {preset!r}")
    if policy == "dense":
        overrides.pop("density", None)
    threshold_field = getattr(make, "threshold_field", None)
    if threshold_field is not None and "density" in overrides:
        raise ValueError(
            f"density must be None for {policy}, whose density depends on model and prompt: set "
            f"{threshold_field}, or let sketchwalk_jax.evaluation.calibrate find it"
        )
    try:
        return make(**overrides)
    except TypeError as error:
        raise ValueError(f"{policy} must be given fields that it has: {error}") from error


def with_plan(policy: Policy, plan: Plan | None) -> Policy:
    """Adds a model's plan to the recommended policy if it has none; returns others unchanged.

    Args:
      policy: Any policy.
      plan: The model's plan, `model_config.plan`, or `None`.

    Example:
      >>> plan = Plan(densities=((0.1,), (0.1,)), errors=((0.5,), (0.02,)), weights=(1.0, 1.0),
      ...             representatives=(8,), misses=((0.0,), (0.0,)))
      >>> with_plan(by_name("sketchwalk", preset="recommended"), plan).layer_densities
      (0.3, 0.1)
    """
    if plan is None or not isinstance(policy, RecommendedConfig) or policy.plan is not None:
        return policy
    return dataclasses.replace(policy, plan=plan)


def takes_density(policy: Policy) -> bool:
    """Whether the policy's density can be set, which is a field of its configuration.

    `Dense` and the preset `released` have no density. Policies with a threshold are calibrated.
    """
    return any(field.name == "density" for field in dataclasses.fields(policy))


def has_threshold(policy: Policy) -> bool:
    """Whether the policy is calibrated to a density by a threshold (`threshold_field`)."""
    return getattr(policy, "threshold_field", None) is not None


def changed_fields(policy: Policy) -> dict[str, Any]:
    """Returns a policy's fields that differ from the defaults, for JSON; a plan's short hash.

    Example:
      >>> changed_fields(by_name("streaming", density=0.1))
      {'density': 0.1}
    """
    fields = dataclasses.fields(policy)
    found = {field.name: getattr(policy, field.name) for field in fields}
    changed = {one.name: found[one.name] for one in fields if found[one.name] != one.default}
    return {
        name: value.short_hash if isinstance(value, Plan) else value
        for name, value in changed.items()
    }


__all__ = [
    "OVER",
    "POLICIES",
    "PRESETS",
    "LayerShape",
    "Policy",
    "Span",
    "by_name",
    "changed_fields",
    "has_threshold",
    "takes_density",
    "with_plan",
]
