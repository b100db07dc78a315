"""Dataclasses of arrays as JAX's trees, which `jax.export` can write and read."""

import contextlib
import json
from typing import Any, NoReturn

import jax
import jax.export


def register[T](cls: type[T]) -> type[T]:
    """A decorator of dataclasses: a tree for JAX, and for the serialisation of `jax.export`."""
    jax.tree_util.register_dataclass(cls)
    make_exportable(cls)
    return cls


def make_exportable(cls: type[Any]) -> None:
    """Lets `jax.export` write and read trees with a class that is registered as one already.

    Static fields, which are part of a tree's structure, are written as JSON. Tuples come back as
    such. A program that reads what was exported must have imported the class.
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
    """Lists, which JSON has for tuples, as tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
