"""Settings of every test: one CPU device, strict promotion, runtime type checks, fixtures."""

import os

# Read when JAX is imported. The interpreter of kernels blocks a thread per warpgroup, so that the
# pool of a machine with two cores would hang.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "8")
# A callback of the interpreter that runs a program waits for its turn. Where programs are put in a
# queue, that turn can be behind the one that the callback belongs to, and both wait forever.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")
# Most of a test's time is XLA's, and much of that LLVM's optimisations, which leave a program's
# operations and its memory as they are. Modules that compute a lot carry the marker `optimized`.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Kernels as they are compiled for Hopper, in place of Pallas' interpreter (`compiled_kernels`).
RUNS_COMPILED = "SKETCHWALK_COMPILED_KERNELS" in os.environ
if RUNS_COMPILED:
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # which would run programs
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_HOST_LLVM"] = "1"
    # A program that was kept does not say what it is.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]
if find_spec("sketchwalk_jax") is None:  # a checkout that is not installed
    sys.path.append(str(ROOT))

# Of the files here, only tests and the reference have examples; some others need torch.
collect_ignore = [
    *(path.name for path in ROOT.glob("tests/*.py") if not path.name.startswith("test_")),
    "parity",
    "ptx",
]

# Before any test module imports the packages: annotations are checked in tests only.
install_import_hook(["sketchwalk_jax", "reference"], "runtime_checks.check_types")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples compile, so they are few, never timed, and the same ones in every run.
settings.register_profile("sketchwalk", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("sketchwalk")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs between runs; programs that tests start share them."""
    if RUNS_COMPILED:
        config.pluginmanager.import_plugin("compiled_kernels")
    assert config.cache is not None
    # A machine that writes no bytecode would compile 2,000 imported files anew in every process.
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(config.cache.mkdir("bytecode"))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    directory = config.cache.mkdir("jax_compilation_cache")
    directory = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or directory)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    # With a limit JAX locks the folder, which all workers and the programs that they start share.
    limit = os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**31))
    jax.config.update("jax_compilation_cache_max_size", int(limit))
    seconds = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles a module's programs as its marker `optimized` says, and forgets them after it.

    Each program that XLA compiles holds memory maps, of which Linux allows a process 65,530.
    """
    was = jax.config.read("jax_disable_most_optimizations")
    if request.node.get_closest_marker("optimized") is not None:
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _interpreter_of_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuses kernels on a CPU in tests without the marker `interpreted`.

    A change of a kernel does not make the long variants of other modules stale (.ci/checks.py).
    """
    if jax.default_backend() != "cpu" or request.node.get_closest_marker("interpreted"):
        return
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "kernel", _refuse_kernel)


def _refuse_kernel(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a test that runs a kernel must have the marker `interpreted`")


@pytest.fixture(autouse=True)
def _runtime_type_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns the type checks off under the marker `unchecked`, to call as a user calls."""
    is_off = request.node.get_closest_marker("unchecked") is not None
    jaxtyping.config.update("jaxtyping_disable", is_off)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _no_lines_of_progress() -> None:
    """Keeps what a slow machine would say every half minute from what tests find printed."""
    from sketchwalk_jax import progress

    progress.LINE_EVERY = 3600.0


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout that holds these tests."""
    return ROOT


@pytest.fixture(scope="session")
def reference_python() -> str:
    """The interpreter with torch and transformers, named by SKETCHWALK_REFERENCE_PYTHON."""
    interpreter = os.environ.get("SKETCHWALK_REFERENCE_PYTHON")
    if interpreter is None:
        pytest.skip("SKETCHWALK_REFERENCE_PYTHON names no interpreter with torch")
    return interpreter


@pytest.fixture(scope="session")
def parity_seed() -> int:
    """Seed of what is drawn for the live comparison; every failure shows it."""
    return int(os.environ.get("SKETCHWALK_PARITY_SEED") or random.SystemRandom().randrange(10**6))


@pytest.fixture(scope="session")
def program_environment() -> dict[str, str]:
    """Environment variables under which a started program imports the package tested here."""
    spec = find_spec("sketchwalk_jax")
    assert spec is not None and spec.origin is not None
    return os.environ | {"PYTHONPATH": str(Path(spec.origin).parents[1])}


@pytest.fixture
def sketchwalk(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs the command line in this process, and returns what it printed.

    Another exit status than `status` fails the test with standard error.
    """
    from sketchwalk_jax.cli import main

    def run(*arguments: object, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err

    return run


@pytest.fixture
def run_python(tmp_path: Path, program_environment: dict[str, str]) -> Callable[..., str]:
    """Runs a program in a fresh interpreter, in an empty folder, and returns what it printed.

    `run_python(code, devices=8)` pretends to have that many CPU devices; `python=` names another
    interpreter with packages of its own, `cwd=` another folder. A program that fails fails the
    test with its output.
    """

    def run(
        code: str, *, devices: int = 1, python: str | Path | None = None, cwd: Path = tmp_path
    ) -> str:
        environment = dict(program_environment if python is None else os.environ)
        from variants import cpu_devices  # which asks JAX for its backend

        environment["XLA_FLAGS"] = cpu_devices(devices)
        done = subprocess.run(
            [python or sys.executable, "-c", code],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def run_benchmark() -> Callable[..., None]:
    """Runs a script of the benchmarks, by name and with arguments, which must succeed."""

    def run(script: str, *arguments: object) -> None:
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run
