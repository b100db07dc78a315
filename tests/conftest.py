"""Settings of every test: one CPU device, strict promotion, runtime type checks, fixtures."""

import os

# JAX reads these when it is imported. The kernels' interpreter blocks a thread per warpgroup, so
# the thread pool of a two-core machine would deadlock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "8")
# A callback of the interpreter that runs a program waits for its turn. With asynchronous dispatch
# that turn can be behind the callback's own program in the queue: a deadlock.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")
# XLA takes most of a test's time, and much of that are LLVM's optimisations, which change neither
# operations nor memory of a program. Modules that compute a lot have the marker `optimized`.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Run kernels as compiled for Hopper, not in Pallas' interpreter (see `compiled_kernels`).
RUNS_COMPILED = "SKETCHWALK_COMPILED_KERNELS" in os.environ
if RUNS_COMPILED:
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # autotuning would run programs
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_HOST_LLVM"] = "1"
    # A program from the cache does not print its code.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import gc
import random
import shutil
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
if find_spec("sketchwalk_jax") is None:  # the checkout is not installed
    sys.path.append(str(ROOT))

# Only tests and the reference have doctests; some other files here need torch.
collect_ignore = [
    *(
        str(path.relative_to(ROOT / "tests"))
        for path in ROOT.glob("tests/**/*.py")
        if not path.name.startswith("test_") and path.parent.name != "reference"
    ),
    "parity",
    "ptx",
]

# Before any test module imports the packages, as only tests check annotations.
install_import_hook(["sketchwalk_jax", "reference"], "runtime_checks.check_types")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traces of programs are millions of objects: with Python's thresholds, collecting garbage takes a
# twelfth of the time.
gc.set_threshold(50_000, 20, 50)

# Hypothesis' examples compile: keep them few, untimed, and equal in every run.
settings.register_profile("sketchwalk", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("sketchwalk")


def pytest_configure(config: pytest.Config) -> None:
    """Caches compiled programs between runs; programs that tests start share the cache."""
    if RUNS_COMPILED:
        config.pluginmanager.import_plugin("compiled_kernels")
    assert config.cache is not None
    # Without bytecode files, every process would compile 2,000 imported files anew.
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(config.cache.mkdir("bytecode"))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    own = config.cache.mkdir("jax_compilation_cache")
    # A limit of JAX's own would make it lock the folder and read all of it at each write, so a
    # folder that is too large is emptied here. Without the lock, a process may read what another
    # is writing: JAX then warns, and compiles.
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker and sum(one.stat().st_size for one in own.iterdir()) > 2**31:
        shutil.rmtree(own)
    directory = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(own))
    seconds = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles a module's programs as its marker `optimized` says, and drops them afterwards.

    Each compiled program holds memory maps, of which Linux allows a process 65,530.
    """
    was = jax.config.read("jax_disable_most_optimizations")
    if request.node.get_closest_marker("optimized") is not None:
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)
    jax.clear_caches()
    if (compiled := sys.modules.get(_COMPILED)) is not None:
        compiled.forget_programs()


# Not imported here, as each test module depends on what this file imports.
_COMPILED = "sketchwalk_jax.inference.compiled"


@pytest.fixture(autouse=True)
def _programs_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps no whole programs on disk: their keys do not know what a test replaces."""
    if (compiled := sys.modules.get(_COMPILED)) is not None:
        monkeypatch.setattr(compiled, "programs_folder", lambda: None)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Returns the names of the programs that XLA has compiled since the list was cleared."""
    names: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def _interpreter_of_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuses kernels on a CPU in tests without the marker `interpreted`.

    This lets .ci/checks.py skip other modules' long variants after a change of a kernel.
    """
    if jax.default_backend() != "cpu" or request.node.get_closest_marker("interpreted"):
        return
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "kernel", _refuse_kernel)


def _refuse_kernel(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a test that runs a kernel must have the marker `interpreted`")


@pytest.fixture(autouse=True)
def _runtime_type_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns type checks off under the marker `unchecked`, so that a test calls as a user does."""
    is_off = request.node.get_closest_marker("unchecked") is not None
    jaxtyping.config.update("jaxtyping_disable", is_off)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _no_lines_of_progress() -> None:
    """Keeps progress lines, which a slow machine prints every 30 s, out of captured output."""
    from sketchwalk_jax import progress

    progress.LINE_EVERY = 3600.0


@pytest.fixture(scope="session")
def repository() -> Path:
    """Returns the root of the checkout that holds these tests."""
    return ROOT


@pytest.fixture(scope="session")
def reference_python() -> str:
    """Returns the interpreter with torch and transformers (SKETCHWALK_REFERENCE_PYTHON)."""
    interpreter = os.environ.get("SKETCHWALK_REFERENCE_PYTHON")
    if interpreter is None:
        pytest.skip("SKETCHWALK_REFERENCE_PYTHON names no interpreter with torch")
    return interpreter


@pytest.fixture(scope="session")
def parity_seed() -> int:
    """Returns the seed of the models for the live comparison; every failure shows it."""
    return int(os.environ.get("SKETCHWALK_PARITY_SEED") or random.SystemRandom().randrange(10**6))


@pytest.fixture(scope="session")
def program_environment() -> dict[str, str]:
    """Returns environment variables with which a program imports the package tested here."""
    spec = find_spec("sketchwalk_jax")
    assert spec is not None and spec.origin is not None
    return os.environ | {"PYTHONPATH": str(Path(spec.origin).parents[1])}


@pytest.fixture
def sketchwalk(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs the command line in this process, and returns its output.

    An exit status other than `status` fails the test with standard error.
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
    """Runs a program in a fresh interpreter, in an empty folder, and returns its output.

    `run_python(code, devices=8)` pretends to have 8 CPU devices, `python=` is another interpreter
    with its own packages, `cwd=` another folder. A program that fails fails the test with its
    output.
    """

    def run(
        code: str, *, devices: int = 1, python: str | Path | None = None, cwd: Path = tmp_path
    ) -> str:
        environment = dict(program_environment if python is None else os.environ)
        from variants import cpu_devices  # imported late, as it asks JAX for its backend

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
    """Runs a benchmark script by name, with arguments; it must succeed."""

    def run(script: str, *arguments: object) -> None:
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run
