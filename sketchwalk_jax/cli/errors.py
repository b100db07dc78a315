"""Defines error messages and exit statuses of the command line."""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import typer

from sketchwalk_jax.memory import OutOfDeviceMemory


class UsageError(Exception):
    """A mistake on the command line itself: exit status 2."""


NOT_FINITE = (
    "logits were NaN or infinite, so the new tokens mean nothing; the weights may be damaged, or "
    "overflow in float16: pass --dtype bfloat16 or float32, or download the checkpoint again"
)
"""Warning if `is_finite` of a generation is false."""

EXPECTED = (
    UsageError,
    typer.TyperException,
    ValueError,
    NotImplementedError,
    OSError,
    jax.errors.JaxRuntimeError,
)
"""Exceptions whose message is for the user. All others are defects and keep their traceback."""


def explain(error: BaseException) -> tuple[str, int]:
    """Returns the message for an exception of `EXPECTED`, and the exit status."""
    if isinstance(error, UsageError):
        return str(error), 2
    if isinstance(error, typer.TyperException):
        return error.format_message(), error.exit_code
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}", 1
    if isinstance(error, jax.errors.JaxRuntimeError):
        is_explained = isinstance(error, OutOfDeviceMemory)
        message = error.found if is_explained else str(error).strip().partition("\n")[0]
        if is_explained or "RESOURCE_EXHAUSTED" in message:
            message += (
                "; pass --chunk-size or a smaller --batch, a shorter prompt, or a smaller --dtype"
            )
        return message, 1
    return _FLAGGED.sub(lambda found: _flag(found[0]), str(error)), 1


# Library arguments that error messages advise to change, and that are options here.
_FLAGGED = re.compile(r"\b(max_new_tokens|chunk_size)\b")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def usage_errors(**names: str) -> Iterator[None]:
    """Turns the library's errors about an option's value into usage errors.

    A message starts with the argument's name, `chunk_size must be ...`; the option's name replaces
    it, `--chunk-size must be ...`.

    Args:
      **names: Names of options, without `--`, that differ from their argument's name.
    """
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name in names:
            name = f"--{names[name]}"
        elif name.isidentifier():
            name = _flag(name)
        raise UsageError(f"{name} {rest}") from error


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning in one line, without the place in the code; `warnings.showwarning`."""
    print(f"warning: {message}", file=sys.stderr)
