"""Former names of arguments and attributes: they keep working, and warn."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function takes the argument `new` by its former name `old` as well.

    The former name stands in the signature too, so that `functools.partial` and
    `jax.jit(..., static_argnames=old)` keep working.

    Args:
      old: The former name, by keyword only.
      new: The name that the function declares, or takes among its `**options`.

    Returns:
      A decorator. What it makes raises a TypeError where both names are given.

    Example:
      >>> @renamed_argument("size", "width")
      ... def area(width, height):
      ...     return width * height
      >>> area(2, 3)
      6
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs or new in signature.bind_partial(*args).arguments:
                    raise TypeError(
                        f"{name}() must get {new!r} or its former name {old!r}, got both"
                    )
                warn_renamed(f"{name}(): the argument {old!r} is now called {new!r}")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        keyword = inspect.Parameter(old, inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = list(signature.parameters.values())
        is_open = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - is_open, keyword)
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def renamed_field(old: str, new: str) -> Callable[[Class], Class]:
    """A class decorator: the field `new` is given and read by its former name `old` as well.

    Args:
      old: The former name.
      new: The name that the class declares.

    Returns:
      A decorator. A TypeError is raised where both names are given.
    """

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old} is now called {new!r}")
        return getattr(self, new)

    def decorate(kind: Class) -> Class:
        make: Any = kind.__init__  # type: ignore[misc]
        make.__qualname__ = f"{kind.__qualname__}.__init__"  # those of dataclasses have no own
        kind.__init__ = renamed_argument(old, new)(make)  # type: ignore[misc]
        setattr(kind, old, property(read, doc=f"Former name of `{new}`."))
        return kind

    return decorate


def takes_new_name(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """A method that a caller's class declares, which this package calls by the name `new`.

    Args:
      method: The method; where it has an argument `old`, it gets that one, and a warning is given.
      old: The former name of the argument.
      new: The name by which it is called.
    """
    if old not in inspect.signature(method).parameters:
        return method
    warn_renamed(f"{method.__qualname__}(): the argument {old!r} is now called {new!r}")

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if new in kwargs:
            kwargs[old] = kwargs.pop(new)
        return method(*args, **kwargs)

    return call


def warn_renamed(message: str) -> None:
    """A DeprecationWarning at the line of the caller's that calls this package or Flax."""
    found = (
        sys.modules[name].__file__ for name in ("sketchwalk_jax", "flax") if name in sys.modules
    )
    inside = tuple(str(Path(one).parent) for one in found if one is not None)
    warnings.warn(message, DeprecationWarning, stacklevel=2, skip_file_prefixes=inside)
