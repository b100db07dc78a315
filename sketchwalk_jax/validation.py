"""Checks of arguments; errors say in one sentence what is required and what was given.

All checks run once, before tracing. They check shapes and dtypes; they check values inside arrays
only if these are known.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

DTYPES = ("float32", "float16", "bfloat16")
"""Types that parameters, keys and values may have."""


def describe(value: Any) -> str:
    """Describes a wrong argument in less than a line; arrays are not printed."""
    if isinstance(value, type):
        return f"the class {value.__name__}; call it to make one"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {list(value)[:6]}"
    text = repr(value) if isinstance(value, str | int | float | None) else ""
    return text if text and len(text) <= 80 else f"a {type(value).__name__}"


def check_texts(name: str, value: Any, what: str) -> None:
    """Raises unless `value` is a string or another sequence, but not bytes."""
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a string or a list of {what}, got {describe(value)}")


def check_several(name: str, value: Any, what: str) -> None:
    """Raises unless `value` is a list, a tuple or another collection, but not a string."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise ValueError(f"{name} must be a list of {what}, got {describe(value)}")


def check_integer(name: str, value: Any, *, least: int = 1, is_optional: bool = False) -> None:
    """Raises unless `value` is an integer of at least `least`, or an allowed `None`."""
    if is_optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        wanted = f"None or {wanted}" if is_optional else wanted
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_number(name: str, value: Any, interval: str) -> None:
    """Raises unless `value` is a number in an interval such as `"(0, 1]"` or `"[0, inf)"`.

    Arrays are refused, because the number is needed at compile time and an array may be traced.
    """
    if isinstance(value, jax.Array | np.ndarray | np.generic) and not isinstance(value, float):
        kind = "a traced array" if isinstance(value, jax.core.Tracer) else repr(value)
        raise ValueError(
            f"{name} must be a Python number in {interval}, which is known when the program is "
            f"compiled, got {kind}; pass float({name}) from outside jit"
        )
    low, high = map(float, interval[1:-1].split(","))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_above = is_number and (value >= low if interval[0] == "[" else value > low)
    is_below = is_number and (value <= high if interval[-1] == "]" else value < high)
    if not (is_above and is_below):
        raise ValueError(f"{name} must be in {interval}, got {value!r}")


def check_scale(scale: Any) -> float | None:
    """Returns the factor of attention scores as a Python number; `None` means the default.

    Raises:
      ValueError: If the factor is traced or not finite.
    """
    if scale is None:
        return None
    known: Any = scale if isinstance(scale, jax.core.Tracer) else float(scale)
    check_number("scale", known, "(-inf, inf)")
    return known


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises unless `value` is one of `allowed`."""
    # `in` would compare arrays element by element.
    if isinstance(value, np.ndarray | jax.Array) or value not in tuple(allowed):
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raises unless `value` is `True` or `False`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of parameters or a cache; raises unless it is one of `DTYPES`."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        shown = repr(dtype) if found is None else repr(found.name)
        raise ValueError(f"{name} must be one of {DTYPES}, got {shown}")
    return found


def is_known(x: Any) -> bool:
    """Whether this host can read the values of an array: it is neither traced nor abstract."""
    if isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, jax.Array):
        return (x.is_fully_addressable or x.is_fully_replicated) and not x.is_deleted()
    return isinstance(x, np.ndarray | np.generic | list | tuple | int)


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes over which an array varies inside a `shard_map` with checks."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def explicit_axes(x: Any) -> tuple[str, ...]:
    """Returns the mesh axes of type Explicit over which an array is spread.

    If `jax.set_mesh` set another mesh, returns all such axes: constants then have other types.
    """
    is_traced = isinstance(x, jax.core.Tracer)
    if not is_traced and not isinstance(getattr(x, "sharding", None), NamedSharding):
        return ()
    sharding = jax.typeof(x).sharding
    if sharding.mesh != jax.sharding.get_abstract_mesh():
        return tuple(sharding.mesh.explicit_axes)
    names = [one if isinstance(one, tuple) else (one,) for one in sharding.spec if one]
    return tuple(axis for one in names for axis in one)


def check_auto_axes(name: str, arrays: Any) -> None:
    """Raises if an array in a tree has mesh axes of type Explicit."""
    for x in jax.tree.leaves(arrays):
        if axes := explicit_axes(x):
            raise ValueError(
                f"{name} must lie on a mesh with axes of type Auto, got Explicit axes {axes}: "
                f"make the mesh with jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) "
                f"* n), and place a model on it with sharding.place(mesh, model_config)"
            )


def check_integers(name: str, x: Any, shape: str, num_axes: int) -> None:
    """Raises unless `x` is an array of integers with `num_axes` axes; `shape` names them."""
    if not hasattr(x, "dtype") or not hasattr(x, "ndim"):
        raise ValueError(f"{name} must be an integer array {shape}, got {describe(x)}")
    if x.ndim != num_axes or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array {shape}, got {x.dtype}{list(x.shape)}")
    if not all(isinstance(size, int) for size in x.shape):
        raise ValueError(
            f"{name} must have sizes that are known when the program is compiled, got "
            f"{shape} = {list(x.shape)}; export a program for each size"
        )


def check_per_sequence(name: str, x: Any, batch: int) -> None:
    """Raises unless `x` is `None` or has one number for each sequence."""
    try:
        shape = np.shape(x)
    except ValueError:  # lists of different lengths
        raise ValueError(f"{name} must have shape [B] = ({batch},), got a ragged list") from None
    if x is not None and shape != (batch,):
        raise ValueError(f"{name} must have shape [B] = ({batch},), got {shape}")


def check_lengths(lengths: Any, batch: int, num_tokens: int, of: str) -> Any:
    """Returns the lengths of `batch` sequences as an int32 array; by default all `num_tokens`.

    Args:
      lengths: The argument, or `None`.
      batch: Number of sequences.
      num_tokens: Maximum length of a sequence.
      of: Name of the argument with the tokens.

    Raises:
      ValueError: If `lengths` is not an array of integers `[B]`, or known and out of range.
    """
    if lengths is None:
        found = np.full((batch,), num_tokens, np.int32)  # converting int64 would compile a program
        return jnp.asarray(found, jnp.int32)
    if not hasattr(lengths, "dtype"):
        try:
            lengths = np.asarray(lengths)
        except ValueError:  # lists of different lengths
            raise ValueError("lengths must be an integer array [B], got a ragged list") from None
    check_integers("lengths", lengths, "[B]", 1)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape [B] = ({batch},), got {lengths.shape}")
    if is_known(lengths):
        values = np.asarray(lengths)
        if values.min() < 1 or values.max() > num_tokens:
            raise ValueError(
                f"lengths must be between 1 and the {num_tokens} columns of {of}, "
                f"got {values.tolist()}"
            )
    return jnp.asarray(lengths, jnp.int32)


def check_vocabulary(tokens: Any, lengths: Any, vocab_size: int) -> None:
    """Raises if ids and lengths are known and an id is outside the vocabulary.

    Args:
      tokens: Ids `[B, T]`, or `[B]` with `lengths=None`; padding may have any values.
      lengths: Number of tokens of each sequence.
      vocab_size: Number of ids.
    """
    if not is_known(tokens) or not (lengths is None or is_known(lengths)):
        return
    ids = np.asarray(tokens)
    is_wrong = (ids < 0) | (ids >= vocab_size)
    if not is_wrong.any():
        return
    if lengths is not None:
        is_wrong &= np.arange(ids.shape[1])[None, :] < np.asarray(lengths)[:, None]
    if is_wrong.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(is_wrong))
        raise ValueError(
            f"tokens must be ids of the model's vocabulary, from 0 to {vocab_size - 1}, got "
            f"{ids[place]} at {list(place)}; take the tokenizer of the same checkpoint"
        )


def check_qkv(query: Any, key: Any, value: Any, layer: Any) -> tuple[int, int]:
    """Checks shapes and dtypes of attention; returns the numbers of sequences and queries."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not hasattr(x, "dtype") or not hasattr(x, "ndim"):
            raise ValueError(f"{name} must be an array of floating point, got {describe(x)}")
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
    for name, x in (("query", query), ("key", key)):  # values have the shape of keys
        check_not_empty(name, x)
    if num_heads % key.shape[-2]:
        raise ValueError(
            f"the number of query heads must be a multiple of the key/value heads {key.shape[-2]}, "
            f"got {num_heads}"
        )
    return batch, num_tokens


def check_not_empty(name: str, x: Any) -> None:
    """Raises if an array is empty."""
    if 0 in x.shape:
        raise ValueError(f"{name} must have no axis of size 0, got shape {x.shape}")


def check_heads(num_heads: Any, num_kv_heads: Any) -> None:
    """Raises unless both numbers are positive and `num_kv_heads` divides `num_heads`."""
    check_integer("num_heads", num_heads)
    check_integer("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )
