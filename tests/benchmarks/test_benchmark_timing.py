"""No benchmark times anything while programs compile, however long that takes."""

import ast
import importlib
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time"}
POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor", "Thread"}
# Benchmarks that compile in a pool.
POOLED = {"end_to_end", "scale_out", "kernels"}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def names_in(path: Path) -> set[str]:
    """Returns everything that a file names: variables, attributes and imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "name"):
            if isinstance(value := getattr(node, field, None), str):
                found.add(value)
    return found


def test_one_file_has_the_clock_and_the_pool():
    """Another file that reads a clock or starts threads could time during a compilation."""
    users = {path.stem: names_in(path) for path in BENCHMARKS.glob("*.py")}
    shared = users.pop("common")
    assert "perf_counter" in shared and "ThreadPoolExecutor" in shared
    assert {name for name, found in users.items() if found & CLOCKS} == set()
    assert {name for name, found in users.items() if found & POOLS} == set()
    assert {name for name, found in users.items() if found & {"compiling", "compiled"}} >= POOLED


@pytest.fixture
def compiling(load) -> Iterator[threading.Event]:
    """A compilation that ends when its event is set."""
    may_end = threading.Event()
    with load("common").compiling() as submit:
        submit(may_end.wait)
        yield may_end
        may_end.set()


@pytest.mark.parametrize(
    "timer",
    [
        "common.seconds(call, 1)",
        "common.rounds({'it': lambda count: call()}, 1)",
    ],
)
def test_timers_refuse_to_run_beside_a_compilation(timer, load, compiling):
    modules = {name: load(name) for name in ("common", timer.split(".")[0])}
    modules["call"] = lambda: jnp.ones(2)
    with pytest.raises(RuntimeError, match="while programs compile, got 1 that are not done"):
        eval(timer, modules)
    compiling.set()
    futures.wait(modules["common"]._submitted)
    assert eval(timer, modules)


def test_a_first_call_that_takes_long_counts_itself(load, monkeypatch):
    common, calls = load("common"), []
    now = iter(float(value) for value in range(0, 1000, 10))
    monkeypatch.setattr(common, "clock", lambda: next(now))
    found = common.seconds(lambda: calls.append(1), 3, wait=lambda _: None, enough=10.0)
    assert (found["median"], found["repeats"], len(calls)) == (10.0, 1, 1)
    found = common.seconds(lambda: calls.append(1), 3, wait=lambda _: None, enough=10.1)
    assert (found["median"], found["repeats"], len(calls)) == (10.0, 3, 5)


def test_what_has_begun_to_compile_ends_before_anything_is_timed(load):
    """This holds even when its time limit has passed."""
    common = load("common")
    begun, ended = threading.Event(), []

    def make():
        begun.set()
        time.sleep(0.2)
        ended.append(True)

    with common.compiling(seconds=0.0) as submit:
        submit(make)
        begun.wait()
    assert ended == [True]


def test_what_is_not_compiled_in_time_is_left_out(load):
    """Compilations that have begun are waited for, as nothing can be timed meanwhile."""
    common, may_end, begun = load("common"), threading.Event(), threading.Event()
    left = iter([1.0, 0.0, 1.0, 1.0, 1.0])

    def compile_cell(cell):
        begun.set()
        may_end.wait()
        return cell

    class Pool(futures.ThreadPoolExecutor):
        def __init__(self, _):
            super().__init__(1)

        def shutdown(self, **options):
            may_end.set()
            super().shutdown(**options)

    def waiting(some, **options):
        begun.wait()
        return futures.wait(some, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "ThreadPoolExecutor", Pool)
        patch.setattr(common, "wait", waiting)
        found = [
            (cell, program())
            for cell, program in common.compiled("ab", compile_cell, lambda: next(left))
        ]
    assert found == [("a", "a")]
    assert list(common.compiled("ab", str, lambda: 0.0)) == []
    compiled = common.compiled("abc", str.upper, lambda: 60.0, group=2)
    assert [(cell, program()) for cell, program in compiled] == [*zip("abc", "ABC", strict=True)]
