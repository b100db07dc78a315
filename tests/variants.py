"""Which parameters of a test are long variants of the others, for CI alone."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(is_kept: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """The values, those that are not kept under the marker `slow`."""
    return [x if is_kept(x) else pytest.param(x, marks=pytest.mark.slow) for x in values]
