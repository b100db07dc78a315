"""Checks of what a caller gives: one sentence each, saying what it must be and what it is.

All are made once, before any tracing. Shapes and dtypes are checked; values inside arrays only
where they are known.
"""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np


def check_integer(name: str, value: Any, *, least: int = 1, is_optional: bool = False) -> None:
    """Raises unless `value` is an integer of at least `least`, or `None` where that is allowed."""
    if is_optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        wanted = f"None or {wanted}" if is_optional else wanted
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_number(name: str, value: Any, interval: str) -> None:
    """Raises unless `value` is a number in an interval such as `"(0, 1]"` or `"[0, inf)"`."""
    low, high = map(float, interval[1:-1].split(","))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_above = is_number and (value >= low if interval[0] == "[" else value > low)
    is_below = is_number and (value <= high if interval[-1] == "]" else value < high)
    if not (is_above and is_below):
        raise ValueError(f"{name} must be in {interval}, got {value!r}")


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raises unless `value` is `True` or `False`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_integers(name: str, x: Any, shape: str, num_axes: int) -> None:
    """Raises unless `x` is an array of integers with so many axes; `shape` names them."""
    if not hasattr(x, "dtype") or not hasattr(x, "ndim"):
        raise ValueError(f"{name} must be an integer array {shape}, got {type(x).__name__}")
    if x.ndim != num_axes or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array {shape}, got {x.dtype}{list(x.shape)}")


def check_per_sequence(name: str, x: Any, batch: int) -> None:
    """Raises unless `x` is `None` or has one number for each sequence."""
    if x is not None and np.shape(x) != (batch,):
        raise ValueError(f"{name} must have shape [B] = ({batch},), got {np.shape(x)}")


def check_qkv(query: Any, key: Any, value: Any, layer: Any) -> tuple[int, int]:
    """Checks shapes and dtypes of one attention; returns the batch size and the query tokens."""
    if query.ndim != 4:
        raise ValueError(f"query must have shape [B, T, N, H], got {query.shape}")
    expected = 4 if layer is None else 5
    axes = "[B, S, K, H]" if layer is None else "[L, B, S, K, H] when layer is given"
    for name, x in (("key", key), ("value", value)):
        if x.ndim != expected:
            raise ValueError(f"{name} must have shape {axes}, got {x.shape}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query must be floating point, got {query.dtype}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {key.shape} and {value.shape}")
    batch, num_tokens, num_heads, head_dim = query.shape
    if key.shape[-4] != batch:
        raise ValueError(f"key must have query's batch size {batch}, got {key.shape[-4]}")
    if key.shape[-1] != head_dim:
        raise ValueError(f"key must have query's head_dim {head_dim}, got {key.shape[-1]}")
    if num_heads % key.shape[-2]:
        raise ValueError(
            f"the number of query heads must be a multiple of the key/value heads {key.shape[-2]}, "
            f"got {num_heads}"
        )
    return batch, num_tokens
