"""Runs chat templates, which are untrusted programs, within bounds of time and memory.

transformers runs them in Jinja's sandbox, which blocks files, modules and Python's internals. The
sandbox does not stop a template that loops for ever or grows a text without end.
"""

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SECONDS = 10.0
"""Longest run time of a template."""

GROWTH = 2**30
"""Bytes by which the process may grow while a template runs."""

MAX_CHARACTERS = 1_000_000
"""Length of the longest template, a hundred times the length of real ones."""

_PAUSE = 0.02  # seconds of a single step after which memory is checked: filling it takes time
# A format in a string with a width or precision of more than six digits ("%9999999d",
# "{:>9999999}"), or such a number alone. Repetitions are bounded or cannot overlap, so that
# matching takes linear time even on a million such characters.
_HUGE_IN_TEXT = re.compile(
    r"%(?:\([^()%]*\))?[-+ #0]{0,5}(?:\d*\.)?\d{7,}(?:\.\d+)?[a-zA-Z]"
    r"|\{[\w.\[\]]*(?:![rsa])?:(?:[^{}]?[<>=^])?[-+ ]?[z#0]{0,3}(?:\d*[.,_])?\d{7}"
    r"|^.\s*[+-]?[\d_]{7,}\w*\s*.$"
)
_CONVERSIONS = frozenset({"%", "format", "int", "float"})
_LARGEST = 999_999
_VALUES = frozenset({"name", "string", "integer", "float"})


class _Stopped(BaseException):
    """Ends a template; handlers for `Exception` do not catch it."""


@contextlib.contextmanager
def bounded_template(template: Any) -> Iterator[None]:
    """Runs a chat template inside its bounds.

    Powers and numbers of more than six digits are refused before running: no template needs them,
    and one operation with them can fill the memory. Such numbers in strings are refused if the
    template formats or converts strings.

    Args:
      template: The source to run, or several sources by name.

    Raises:
      ValueError: If the template is invalid, is stopped, or refuses the messages.
    """
    for source in template.values() if isinstance(template, dict) else [template]:
        _check_source(source)
    from jinja2 import TemplateError

    try:
        with _watched():
            yield
    except _Stopped as error:
        raise ValueError(f"the chat template must {error}; correct chat_template") from None
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    except (
        TypeError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
        MemoryError,
        SyntaxError,
    ) as error:
        raise ValueError(
            f"the chat template must run on these messages, got {type(error).__name__}: "
            f"{str(error)[:200]}; correct chat_template or the messages"
        ) from error


def _check_source(source: Any) -> None:
    if not isinstance(source, str) or len(source) > MAX_CHARACTERS:
        raise ValueError(
            f"chat_template must be text of at most {MAX_CHARACTERS} characters, got "
            f"{type(source).__name__}"
        )
    from jinja2 import Environment, TemplateSyntaxError

    kind = value = in_text = ""
    converts = False
    try:
        for _, next_kind, next_value in Environment().lex(source):
            if next_kind == "whitespace":
                continue
            # After a value, ** is a power; elsewhere it unpacks arguments.
            if next_value == "**" and (kind in _VALUES or value in (")", "]", "}")):
                raise _huge(next_value)
            if next_kind == "float" and float(next_value) > _LARGEST:
                raise _huge(next_value)
            if next_kind == "integer" and (len(next_value) > 99 or int(next_value, 0) > _LARGEST):
                raise _huge(next_value)
            if next_kind == "string" and not in_text:
                found = _HUGE_IN_TEXT.search(next_value)
                in_text = found[0] if found else ""
            converts = converts or next_value in _CONVERSIONS
            kind, value = next_kind, next_value
    except TemplateSyntaxError:
        return  # it cannot run: transformers reports the error
    if in_text and converts:
        raise _huge(in_text)


def _huge(found: str) -> ValueError:
    return ValueError(
        f"chat_template must have no powers and no numbers of more than six digits, got "
        f"{found[:20]!r}; correct it"
    )


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Stops this thread's code once it has taken too long or too much memory."""
    start = last = time.monotonic()
    before = _resident_bytes()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last
        now = time.monotonic()
        pause, last = now - last, now
        if now - start > SECONDS:
            raise _Stopped(f"end within {SECONDS:g} seconds, got one that goes on")
        if pause > _PAUSE and _resident_bytes() - before > GROWTH:
            raise _Stopped(f"take less than {GROWTH} bytes of memory, got one that takes more")
        # Trace templates line by line, since they contain the loops; other functions by call.
        return look if frame.f_code.co_filename == "<template>" else None

    previous = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(previous)


def _resident_bytes() -> int:
    """Returns the memory of this process; 0 if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * 4096
