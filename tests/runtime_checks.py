"""The tests' runtime type checker: beartype on every annotation of the package."""

import threading
import typing
from types import FunctionType

from beartype import BeartypeConf, FrozenDict, beartype

# `Self` means nothing to a checker that sees one method at a time.
_CONFIG = BeartypeConf(hint_overrides=FrozenDict({typing.Self: object}))


def check_types(function: FunctionType) -> FunctionType:
    """Checks calls of `function`, except dataclass constructors and what other threads define.

    JAX rebuilds a registered dataclass through its constructor with any leaves: shapes, shardings,
    `None`. Functions that receive it check its fields instead. beartype catches warnings meanwhile,
    which two threads cannot do at once: a warning that a test waits for would be lost.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_checked = is_main and function.__name__ != "__init__"
    return beartype(function, conf=_CONFIG) if is_checked else function
