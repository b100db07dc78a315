"""Variants of tests: those that are long, for CI alone, what runs kernels, and on what."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest

RUNS_COMPILED = "SKETCHWALK_COMPILED_KERNELS" in os.environ
"""Whether kernels are compiled for Hopper and run on a CPU (`compiled_kernels`)."""
INTERPRET = jax.default_backend() == "cpu" and not RUNS_COMPILED
"""Whether Pallas' interpreter runs kernels."""


def slow_unless(is_kept: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """The values, those that are not kept under the marker `slow`."""
    return [x if is_kept(x) else pytest.param(x, marks=pytest.mark.slow) for x in values]


def cpu_devices(count: int) -> str:
    """XLA's flags for a process that pretends to have so many devices."""
    flags = f"--xla_force_host_platform_device_count={count}"
    if count > 1:  # on a busy machine one may keep the others waiting longer than 40 s
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    return flags
