"""Registers dataclasses of arrays as JAX pytrees, which `jax.export` can write and read."""

import contextlib
import json
from typing import Any, NoReturn

import jax
import jax.export


def register[T](cls: type[T]) -> type[T]:
    """Decorator that registers a dataclass as a pytree of JAX and of `jax.export`."""
    jax.tree_util.register_dataclass(cls)
    make_exportable(cls)
    return cls


def make_exportable(cls: type[Any]) -> None:
    """Lets `jax.export` write and read a class that is already registered as a pytree.

    Static fields, a part of the tree's structure, are written as JSON; tuples are restored. A
    program that reads an export must have imported the class.
    """

    def write(static: Any) -> bytes:
        def refuse(value: Any) -> NoReturn:
            raise ValueError(
                f"static fields of a {cls.__name__} must be numbers, strings, None or tuples of "
                f"them to be exported, got a {type(value).__name__}; of what an Auto chooses, pass "
                f"the policy instead"
            )

        return json.dumps(static, default=refuse).encode()

    with contextlib.suppress(ValueError):  # a notebook has loaded the module again
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"sketchwalk_jax.{cls.__name__}",
            serialize_auxdata=write,
            deserialize_auxdata=lambda static: _as_tuples(json.loads(static)),
        )


def _as_tuples(value: Any) -> Any:
    """Converts lists back to tuples, which JSON writes as lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
