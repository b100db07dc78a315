"""Variants of tests: long ones for CI only, the way to run kernels, and devices."""

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
    """Returns the values; those that are not kept get the marker `slow`."""
    return [x if is_kept(x) else pytest.param(x, marks=pytest.mark.slow) for x in values]


def weekly(values: Iterable[Any]) -> list[Any]:
    """Returns the values with the marker `weekly`."""
    return [pytest.param(x, marks=pytest.mark.weekly) for x in values]


def cpu_devices(count: int) -> str:
    """Returns XLA's flags for a process that pretends to have so many devices."""
    flags = f"--xla_force_host_platform_device_count={count}"
    if count > 1:  # a busy machine may delay one beyond 40 s
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    return flags
