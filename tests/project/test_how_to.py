"""The how-tos run from top to bottom, and find their hidden fact."""

import contextlib
import io
import re

import pytest

pytestmark = [pytest.mark.weekly, pytest.mark.unchecked]


def test_the_blocks_run_in_their_order(repository, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    page = (repository / "docs" / "how_to.md").read_text(encoding="utf-8")
    printed = []
    scope: dict = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, f"how_to.md, block {number}", "exec"), scope)
        printed.append(out.getvalue())
    # Text to text, at two densities, in a batch, in a second turn, and streamed.
    assert sum("68084" in text for text in printed) >= 7
