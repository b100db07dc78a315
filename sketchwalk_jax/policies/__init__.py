"""Policies by name: each decides which key blocks a query attends to."""

from typing import Any

from sketchwalk_jax.policies.base import LayerShape, Policy, Span

POLICIES = ("dense", "sketchwalk")
PRESETS = ("paper", "released", "damped", "one_hop")


def by_name(policy: str, *, preset: str | None = None, **overrides: Any) -> Policy:
    """The policy called `policy`, as the command line and the evaluation name it.

    Args:
      policy: `"dense"` or `"sketchwalk"`.
      preset: For `"sketchwalk"`, one of `"paper"` (the default), `"released"`, `"damped"`,
        `"one_hop"`.
      **overrides: Fields of the policy's configuration, such as `density`; `None` means default.

    Returns:
      A frozen policy.

    Raises:
      ValueError: If a name is unknown, a preset is given to a policy that has none, or a field is
        not one of the policy's.

    Example:
      >>> by_name("sketchwalk", preset="one_hop", density=0.1).beta
      0.0
    """
    from sketchwalk_jax.config import SketchWalkConfig
    from sketchwalk_jax.policies.dense import Dense

    overrides = {name: value for name, value in overrides.items() if value is not None}
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
    if policy == "dense":
        if preset is not None:
            raise ValueError(f"preset must be None for the dense policy, got {preset!r}")
        make: Any = Dense
        overrides.pop("density", None)
    else:
        preset = preset or "paper"
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {PRESETS}, got {preset!r}")
        make = getattr(SketchWalkConfig, preset)
    try:
        return make(**overrides)
    except TypeError as error:
        raise ValueError(f"{policy} must be given fields that it has: {error}") from error


__all__ = ["POLICIES", "PRESETS", "LayerShape", "Policy", "Span", "by_name"]
