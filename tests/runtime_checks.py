"""The runtime type checker of the tests: every annotation of the package, checked with beartype."""

from collections.abc import Callable

from beartype import beartype


def check_types(function: Callable) -> Callable:
    """Checks calls of `function`, except dataclass constructors.

    JAX rebuilds a registered dataclass through its constructor with whatever the leaves are at
    that moment: shapes, shardings, `None`. Its fields are checked where functions receive them.
    """
    return function if function.__name__ == "__init__" else beartype(function)
