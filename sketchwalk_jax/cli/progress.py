"""Signs of life on standard error for what takes longer than a second."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm

DELAY = 1.0


def is_shown() -> bool:
    """Whether progress is shown: on terminals only, so that logs stay clean."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def elapsed(description: str) -> Iterator[None]:
    """Shows the seconds that the block has taken, and clears the line when it ends.

    For work without steps: one long call, such as a prefill with its compilation.
    """
    if not is_shown():
        yield
        return
    is_over, start = threading.Event(), time.time()

    def show() -> None:
        if is_over.wait(DELAY):
            return
        form = "{desc}: {elapsed}"
        with tqdm(desc=description, bar_format=form, leave=False, file=sys.stderr) as bar:
            bar.start_t = start
            while not is_over.wait(0.25):
                bar.refresh()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def token_bar(total: int, *, initial: int, is_wanted: bool) -> tqdm:
    """A bar of generated tokens, of which `initial` are there."""
    return tqdm(
        total=total,
        initial=initial,
        desc="generating",
        unit=" tokens",
        delay=DELAY,
        leave=False,
        disable=not (is_wanted and is_shown()),
        file=sys.stderr,
    )
