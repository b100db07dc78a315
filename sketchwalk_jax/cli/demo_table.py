"""The demonstration's output: dense attention and Sketch-and-Walk in two columns."""

import sys

from sketchwalk_jax.cli.demo_reader import Answer, Reader

_LABEL, _COLUMN = 24, 27


class Table:
    """Lines of a label and two columns on standard output.

    On a terminal the last line can be written again while answers grow; elsewhere a line is
    written once, when it is complete.
    """

    def __init__(self, *, is_shown: bool) -> None:
        """Prints nothing at all unless `is_shown`."""
        self._is_shown = is_shown
        self._is_live = is_shown and sys.stdout is not None and sys.stdout.isatty()

    def line(self, label: str = "", left: str = "", right: str = "") -> None:
        """Writes a complete line."""
        if self._is_shown:
            print(self._start + self._format(label, left, right).rstrip(), flush=True)

    def update(self, label: str, left: str, right: str) -> None:
        """Writes a line that `update` or `line` will replace."""
        if self._is_live:
            print(self._start + self._format(label, left, right), end="", flush=True)

    @property
    def _start(self) -> str:
        return "\r\x1b[K" if self._is_live else ""  # back to the margin, and clear the line

    def _format(self, label: str, left: str, right: str) -> str:
        return f"{label:<{_LABEL}}{left:<{_COLUMN}}{right}"


def verdict(answer: Answer) -> str:
    """An answer and whether it is right, for one column."""
    return f"{shorten(answer) or '(nothing)'}  {'right' if answer.is_right else 'WRONG'}"


def shorten(answer: Answer) -> str:
    """As much of an answer as a column has room for."""
    return answer.text if len(answer.text) <= 16 else answer.text[:15] + "…"


def speed(dense: Reader, sparse: Reader) -> str:
    """How the sparse reader's time compares."""
    ratio = dense.read_s / sparse.read_s
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def summary(dense: Reader, sparse: Reader) -> str:
    """What came out, in a sentence."""
    pairs = list(zip(dense.answers, sparse.answers, strict=True))
    lost = sum(was.is_right and not now.is_right for was, now in pairs)
    if not dense.num_right and not sparse.num_right:
        return "This model answers none of the questions, with dense attention neither."
    if lost:
        found = f"{dense.num_right} facts that dense attention found"
        return f"Sketch-and-Walk lost {lost} of the {found}."
    found = "Sketch-and-Walk found every fact that dense attention found"
    more = sparse.num_right - dense.num_right
    return f"{found}, and {more} more." if more else f"{found}."
