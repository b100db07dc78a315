"""Compiles kernels' cases for GPUs that the machine need not have, and checks the code.

Needs the interpreter of SKETCHWALK_HOPPER_PYTHON (see CONTRIBUTING.md), on any machine.
"""

import atexit
import os
from collections.abc import Collection, Mapping
from typing import Any

import hopper
import pytest

_running: dict[str, hopper.Compiler] = {}


def compile_for(gpu: str, name: str) -> dict[str, Any]:
    """Compiles a case by name with `hopper.Compiler`; ends the compiler of another GPU first."""
    python = os.environ.get("SKETCHWALK_HOPPER_PYTHON")
    if python is None:
        pytest.skip("SKETCHWALK_HOPPER_PYTHON names no interpreter with JAX's CUDA plugin")
    if gpu not in _running:
        close()
        _running[gpu] = hopper.Compiler(python, capability=gpu)
    return _running[gpu].compile(name)


@atexit.register
def close() -> None:
    """Ends the compiler."""
    while _running:
        _running.popitem()[1].close()


def cases_of(compiled: Mapping[str, Collection[Any]], kept: Collection[tuple[str, str]]) -> Any:
    """Parametrizes a test by GPU and case; cases that are not kept get the marker `slow`."""
    every = {(gpu, str(case)): case for gpu, cases in compiled.items() for case in cases}
    assert len(every) == sum(map(len, compiled.values())), "two cases have the same name"
    assert set(kept) <= set(every), f"no such cases: {set(kept) - set(every)}"
    rows = [
        pytest.param(gpu, case, marks=() if (gpu, name) in kept else pytest.mark.slow)
        for (gpu, name), case in every.items()
    ]
    return pytest.mark.parametrize(("gpu", "case"), rows, ids=str)


def assert_compiled(kernels: dict[str, Any], *, spills: int = 0, threads: int = 256) -> None:
    """Checks that kernels write no register too early, spill little, and fit enough threads.

    Args:
      kernels: The assembler's messages, as `hopper.read_kernels` returns them.
      spills: Most bytes that a kernel may spill; with 0 no kernel may.
      threads: Threads per multiprocessor that need room for their registers.
    """
    assert kernels, "no kernel was compiled"
    for kernel, facts in kernels.items():
        assert 0 < facts["registers"] <= min(255, 65536 // threads), kernel
        assert facts["hazards"] == [], kernel
        kept = [facts[x] for x in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")]
        assert max(kept) <= spills, kernel
        assert bool(facts["complaints"]) == any(kept), kernel
    assert any(facts["complaints"] for facts in kernels.values()) == (spills > 0)
