"""Progress on standard error: bars on a terminal, a line every half minute in a log."""

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

DELAY = 1.0
"""Seconds before a bar is shown on a terminal; shorter work shows nothing."""

LINE_EVERY = 30.0
"""Seconds between two lines if there is no terminal."""


def is_shown() -> bool:
    """Whether standard error is a terminal, on which a line can be overwritten."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def _calling(call: Callable[[], object], *, every: float) -> Iterator[None]:
    """Calls `call` every `every` seconds from another thread while the block runs."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(every):
            call()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _write_line(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(log_format: str, **options: Any) -> Iterator[Any]:
    """Makes a bar of tqdm on a terminal, or a line of `log_format` now and then."""
    from tqdm import tqdm

    if is_shown() or options.get("disable"):
        with tqdm(**options, leave=False, delay=DELAY, file=sys.stderr) as bar:
            yield bar
        return
    # tqdm only counts here, and writes nothing, because steps may be minutes apart.
    options |= {"delay": float("inf"), "mininterval": float("inf"), "bar_format": log_format}
    with tqdm(**options, leave=False, file=io.StringIO()) as bar:
        with _calling(lambda: _write_line(str(bar)), every=LINE_EVERY):
            yield bar


@contextlib.contextmanager
def elapsed(description: str) -> Iterator[None]:
    """Shows the seconds that the block has taken; on a terminal the line is cleared at its end.

    Use it for work without steps: one long call, such as a prefill with its compilation.
    """
    form = "{desc}: {elapsed}"
    with _bar(form, desc=description, bar_format=form, miniters=0) as bar:
        # A step of size 0 rewrites the line, once it is shown.
        refreshing = _calling(lambda: bar.update(0), every=0.25)
        with refreshing if is_shown() else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def progress_bar(
    total: int,
    description: str,
    *,
    unit: str,
    initial: int = 0,
    is_wanted: bool = True,
    unit_scale: bool = False,
) -> Iterator[Any]:
    """Shows a bar of tqdm for work in steps; `update` it.

    On a terminal it appears after `DELAY` and is cleared at the end. In a log it is a line every
    `LINE_EVERY` seconds, with or without a new step; so short work leaves no line.

    Args:
      total: Total number of steps.
      description: Name of the work.
      unit: Name of a step; a word needs a leading space.
      initial: Number of steps that are already done.
      is_wanted: Whether to show anything.
      unit_scale: Whether to show thousands and millions, as for bytes.
    """
    with _bar(
        "{desc}: {n_fmt} of {total_fmt}{unit} in {elapsed}, {remaining} left{postfix}",
        total=total,
        desc=description,
        unit=unit,
        initial=initial,
        unit_scale=unit_scale,
        disable=not is_wanted,
    ) as bar:
        yield bar
