"""The tests' runtime type checker: beartype on every annotation of the package."""

import typing
from types import FunctionType

from beartype import BeartypeConf, FrozenDict, beartype

# `Self` means nothing to a checker that sees one method at a time.
_CONFIG = BeartypeConf(hint_overrides=FrozenDict({typing.Self: object}))


def check_types(function: FunctionType) -> FunctionType:
    """Checks calls of `function`, except dataclass constructors.

    JAX rebuilds a registered dataclass through its constructor with any leaves: shapes, shardings,
    `None`. Functions that receive it check its fields instead.
    """
    return function if function.__name__ == "__init__" else beartype(function, conf=_CONFIG)
