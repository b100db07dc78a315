"""Signs of life on standard error: bars on a terminal, a line every half minute in a log."""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

DELAY = 1.0
"""Seconds before anything is shown on a terminal; what takes less shows nothing."""

LINE_EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


def is_shown() -> bool:
    """Whether standard error is a terminal, where a line can be written again."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def _calling(call: Callable[[], object], *, delay: float, every: float) -> Iterator[None]:
    """Calls `call` from another thread while the block runs: after `delay`, then every `every`."""
    is_over = threading.Event()

    def work() -> None:
        pause = delay
        while not is_over.wait(pause):
            call()
            pause = every

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
def elapsed(description: str) -> Iterator[None]:
    """Shows the seconds that the block has taken; on a terminal the line is cleared at its end.

    For work without steps: one long call, such as a prefill with its compilation.
    """
    from tqdm import tqdm

    start = time.time()
    if not is_shown():

        def say() -> None:
            _write_line(f"{description}: {tqdm.format_interval(time.time() - start)}")

        with _calling(say, delay=LINE_EVERY, every=LINE_EVERY):
            yield
        return
    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def show() -> None:
            if not bars:
                form = "{desc}: {elapsed}"
                made = tqdm(desc=description, bar_format=form, leave=False, file=sys.stderr)
                made.start_t = start
                bars.append(stack.enter_context(made))
            bars[0].refresh()

        with _calling(show, delay=DELAY, every=0.25):
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
    """A bar of tqdm for work in steps, to `update`.

    On a terminal it appears after `DELAY` and is cleared at the end. In a log it is a line every
    `LINE_EVERY` seconds, whether or not there was a step since the last, so that short work leaves
    no line.

    Args:
      total: Steps in all.
      description: What is done.
      unit: What a step is, with a space in front where it is a word.
      initial: Steps that are done already.
      is_wanted: Whether to show anything.
      unit_scale: Whether to count in thousands and millions, as bytes.
    """
    from tqdm import tqdm

    common: dict[str, Any] = {
        "total": total,
        "desc": description,
        "unit": unit,
        "initial": initial,
        "unit_scale": unit_scale,
        "leave": False,
    }
    if not is_wanted or is_shown():
        with tqdm(**common, delay=DELAY, disable=not is_wanted, file=sys.stderr) as bar:
            yield bar
        return
    # It counts, and writes nothing itself: steps may be minutes apart.
    never = float("inf")
    form = "{desc}: {n_fmt} of {total_fmt}{unit} in {elapsed}, {remaining} left{postfix}"
    with tqdm(**common, delay=never, mininterval=never, bar_format=form, file=io.StringIO()) as bar:
        with _calling(lambda: _write_line(str(bar)), delay=LINE_EVERY, every=LINE_EVERY):
            yield bar
