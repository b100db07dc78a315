"""Compiles kernels' cases for GPUs that the machine need not have, and checks the code.

Needs the interpreter of SKETCHWALK_HOPPER_PYTHON (see CONTRIBUTING.md), on any machine.
"""

import atexit
import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import hopper
import pytest

_running: dict[str, subprocess.Popen[str]] = {}  # one program, by the GPU it compiles for
_log = tempfile.TemporaryFile("w+")


def compile_for(gpu: str, name: str) -> dict[str, Any]:
    """Compiles a case by name with `hopper.serve`, in another environment.

    A case that crashes it does not affect the others; a case of another GPU ends it first.

    Returns:
      The kernels of the case, by name, or facts about the whole program.
    """
    python = os.environ.get("SKETCHWALK_HOPPER_PYTHON")
    if python is None:
        pytest.skip("SKETCHWALK_HOPPER_PYTHON names no interpreter with JAX's CUDA plugin")
    if gpu not in _running or _running[gpu].poll() is not None:
        close()
        _running[gpu] = _start(python, gpu)
    program = _running[gpu]
    assert program.stdin is not None and program.stdout is not None
    print(name, file=program.stdin, flush=True)
    answer = program.stdout.readline()
    if not answer:
        program.wait()
        _log.seek(0)
        raise RuntimeError(f"compiling {name} ended the compiler: {_log.read()[-4000:]}")
    result = json.loads(answer)
    if "error" in result:
        raise RuntimeError(f"{name} does not compile: {result['error']}")
    return result


def _start(python: str, gpu: str) -> subprocess.Popen[str]:
    folder = Path(__file__).resolve().parent
    # A cached program prints nothing; the emulator's tests ask for more than is read here.
    drop = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "MOSAIC_GPU_DUMP_PTX")
    drop += ("MOSAIC_GPU_DUMP_HOST_LLVM",)
    environment = {name: value for name, value in os.environ.items() if name not in drop} | {
        "JAX_PLATFORMS": "cpu",
        "PATH": hopper.path_of_assemblers(Path(python).parents[1]),
        "PYTHONPATH": os.pathsep.join(map(str, (folder.parent, folder))),
    }
    return subprocess.Popen(
        [python, "-c", "import hopper; hopper.serve()", gpu],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=_log,
        text=True,
        env=environment,
    )


@atexit.register
def close() -> None:
    """Ends the compiler."""
    while _running:
        _running.popitem()[1].communicate()


def cases_of(compiled: Mapping[str, Collection[Any]], kept: Collection[tuple[str, Any]]) -> Any:
    """Parametrizes a test by GPU and case; cases that are not kept get the marker `slow`."""
    every = {(gpu, str(case)): case for gpu, cases in compiled.items() for case in cases}
    assert len(every) == sum(map(len, compiled.values())), "two cases have the same name"
    names = {(gpu, str(case)) for gpu, case in kept}
    assert names <= set(every), f"no such cases: {names - set(every)}"
    rows = [
        pytest.param(gpu, case, marks=() if (gpu, name) in names else pytest.mark.slow)
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
