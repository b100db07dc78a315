"""The runtime type checker of the tests: every annotation of the package, checked with beartype."""

import typing
from types import FunctionType

from beartype import BeartypeConf, FrozenDict, beartype

# `Self` means nothing to a checker that sees one method at a time.
_CONFIG = BeartypeConf(hint_overrides=FrozenDict({typing.Self: object}))


def check_types(function: FunctionType) -> FunctionType:
    """Checks calls of `function`, except dataclass constructors.

    JAX rebuilds a registered dataclass through its constructor with whatever the leaves are at
    that moment: shapes, shardings, `None`. Its fields are checked where functions receive them.
    """
    return function if function.__name__ == "__init__" else beartype(function, conf=_CONFIG)
