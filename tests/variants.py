"""Variants of tests: those that are long, for CI alone, and what runs kernels."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest

INTERPRET = jax.default_backend() == "cpu" and "SKETCHWALK_COMPILED_KERNELS" not in os.environ
"""Whether Pallas' interpreter runs kernels, not a GPU, nor `ptx` as they are compiled for one."""


def slow_unless(is_kept: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """The values, those that are not kept under the marker `slow`."""
    return [x if is_kept(x) else pytest.param(x, marks=pytest.mark.slow) for x in values]
