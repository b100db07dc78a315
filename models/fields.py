"""Attributes of a `config.json`, read with their types: what else stands there is refused by name.

A file may hold anything. Absent and null mean the default; a number in quotes is no number.
"""

import math
from collections.abc import Mapping
from typing import Any

MAX_LAYERS = 10_000
"""Layers that a file may declare: every name of a tensor is made before any is looked for."""


def read_integer(
    raw: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1
) -> Any:
    """An integer of at least `least`, such as a size.

    Args:
      raw: A parsed JSON object.
      name: Name of the attribute.
      default: What absent and null mean.
      least: The smallest value.

    Raises:
      ValueError: If the attribute is something else.

    Example:
      >>> read_integer({"num_hidden_layers": 12}, "num_hidden_layers")
      12
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {wanted}, got {_short(value)}; correct config.json")
    return value


def read_number(
    raw: Mapping[str, Any], name: str, default: float | None = None, *, above: float = -math.inf
) -> Any:
    """A finite number above a limit, as a float.

    Args:
      raw: A parsed JSON object.
      name: Name of the attribute.
      default: What absent and null mean.
      above: What the number must be larger than.

    Raises:
      ValueError: If the attribute is something else.

    Example:
      >>> read_number({"rope_theta": 500000}, "rope_theta", above=1.0)
      500000.0
    """
    value = raw.get(name)
    if value is None:
        return default
    limit = f" larger than {above:g}" if above > -math.inf else ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Integers of any size are JSON; as floats they may be infinite.
    if not is_number or not -1e300 < value < 1e300 or not value > above:
        raise ValueError(
            f"{name} must be a finite number{limit}, got {_short(value)}; correct config.json"
        )
    return float(value)


def read_flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false.

    Args:
      raw: A parsed JSON object.
      name: Name of the attribute.
      default: What absent and null mean.

    Raises:
      ValueError: If the attribute is something else.

    Example:
      >>> read_flag({"attention_bias": True}, "attention_bias")
      True
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {_short(value)}; correct config.json")
    return value


def read_object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A JSON object; absent, null and what is empty mean one without attributes.

    Args:
      raw: A parsed JSON object.
      name: Name of the attribute.

    Raises:
      ValueError: If the attribute is something else.

    Example:
      >>> read_object({"rope_scaling": None}, "rope_scaling")
      {}
    """
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {_short(value)}; correct config.json")
    return value


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 80 else f"{text[:77]}..."
