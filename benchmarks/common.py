"""What the benchmarks share: compiling, timing, hardware and versions, JSON files."""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

DOES_NOT_FIT = "does not fit"  # the error of a row
ROUND_SECONDS = 0.1
_MOST_THREADS = 16
_submitted: set[Future[Any]] = set()  # of every pool in this process

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.append(str(ROOT))


def describe_machine(command: Sequence[str] | None = None, **details: Any) -> dict[str, Any]:
    """Hardware, versions, date and command of this run.

    Args:
      command: The command's words; by default those of this process, and XLA's flags before them.
      **details: What the benchmark says besides.
    """
    from sketchwalk_jax.evaluation import provenance

    flags = os.environ.get("XLA_FLAGS")
    command = command or [*([f"XLA_FLAGS={flags}"] if flags else []), "python", *sys.argv]
    return provenance.describe_machine(command, root=ROOT, **details)


@contextlib.contextmanager
def compiling(*, seconds: float = math.inf) -> Iterator[Callable[..., Future[Any]]]:
    """Compiles programs side by side; when its block ends, all that can be there are there.

    Compiling takes all cores of the machine, and what is timed meanwhile is too slow: `clock`
    refuses to be read until then.

    Args:
      seconds: Time for all of them. What has not begun by then is cancelled; what has is waited
        for, since nothing can be timed before it ends.

    Yields:
      `submit(make, *arguments)`, which starts to compile; those submitted first begin first.
    """
    end, left, futures = time.monotonic() + seconds, 0.0, list[Future[Any]]()
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))

    def submit(make: Callable[..., Any], *arguments: Any) -> Future[Any]:
        futures.append(pool.submit(make, *arguments))
        _submitted.add(futures[-1])
        return futures[-1]

    try:
        yield submit
        left = end - time.monotonic()
    finally:  # after an error, programs that have not begun are cancelled at once
        wait(futures, timeout=None if math.isinf(left) else max(0.0, left))
        pool.shutdown(wait=True, cancel_futures=True)
        _submitted.difference_update(futures)


def compiled[Cell](
    cells: Iterable[Cell],
    compile_cell: Callable[[Cell], Any],
    seconds_left: Callable[[], float],
    *,
    group: int = 16,
) -> Iterator[tuple[Cell, Callable[[], Any]]]:
    """Compiles some cells side by side, then hands them out to be timed; then the next ones.

    Args:
      cells: What is to be measured, what is wanted most first.
      compile_cell: Makes the program of a cell, in a thread.
      seconds_left: The time that this run still has; without any, nothing more is handed out.
      group: Cells that are compiled before the first of them is timed.

    Yields:
      Each cell that was compiled in time, and what returns its program or raises why it has none.
    """
    for some in itertools.batched(cells, group):
        if seconds_left() <= 0:
            return
        with compiling(seconds=seconds_left()) as submit:
            futures = [submit(compile_cell, cell) for cell in some]
        for cell, future in zip(some, futures, strict=True):
            if seconds_left() <= 0:
                return
            if not future.cancelled():
                yield cell, future.result


def clock() -> float:
    """Seconds of a clock: with what everything is timed that ends up in results.

    Raises:
      RuntimeError: If programs are being compiled in a pool.
    """
    running = sum(not future.done() for future in tuple(_submitted))
    if running:
        raise RuntimeError(
            f"nothing must be timed while programs compile, got {running} that are not done; leave "
            "the block of `compiling` first"
        )
    return time.perf_counter()


def rounds(
    calls: Mapping[str, Callable[[int], Any]],
    repeats: int,
    *,
    step: int = 1,
    round_seconds: float = ROUND_SECONDS,
) -> dict[str, list[float]]:
    """Seconds per step of each call, in turns, so that a busy moment slows all of them.

    Every call runs twice beforehand, to compile and to tell how many steps a round has.

    Args:
      calls: Functions of a number of steps, whose result `jax.block_until_ready` takes.
      repeats: Timed rounds.
      step: Steps of the shortest call.
      round_seconds: How long a round lasts, about.
    """
    import jax

    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call(step))
        start = clock()
        jax.block_until_ready(call(step))
        taken = clock() - start
        counts[name] = max(1, min(500, math.ceil(round_seconds / taken))) * step
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            jax.block_until_ready(call(counts[name]))
            times[name].append((clock() - start) / counts[name])
    return times


def seconds(
    call: Callable[[], Any],
    repeats: int,
    *,
    wait: Callable[[Any], Any] | None = None,
    enough: float = math.inf,
) -> dict[str, float]:
    """Median and quartiles of calls that are waited for, after one that is not counted.

    Args:
      call: What is timed; compiled.
      repeats: Calls that count.
      wait: Waits for its result; by default `jax.block_until_ready`.
      enough: Seconds from which on one call says enough: a first one that takes as long counts
        itself, alone. What a first call does besides is over in far less.
    """
    if wait is None:
        import jax

        wait = jax.block_until_ready
    found: list[float] = []
    for _ in range(repeats + 1):
        start = clock()
        wait(call())
        found.append(clock() - start)
        if found[0] >= enough:
            return summarize(found)
    return summarize(found[1:])


def summarize(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    import numpy as np

    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "repeats": len(values)}


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of a compiled program: temporary, arguments, results, and results in arguments."""
    analysis = compiled.memory_analysis()
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "aliased_bytes": analysis.alias_size_in_bytes,
    }


def peak_gib(compiled: Any) -> float:
    """What a program holds at a time, in GiB: arguments, temporary numbers and new results."""
    found = memory(compiled)
    held = sum(found[f"{name}_bytes"] for name in ("temporary", "argument", "output"))
    return (held - found["aliased_bytes"]) / 2**30


def is_asked(options: argparse.Namespace, **values: Any) -> bool:
    """Whether each value is one of those that the option of its name was given, if it was given."""
    given = {name: getattr(options, name) for name in values}
    return all(not given[name] or value in given[name] for name, value in values.items())


def check_filters(
    options: argparse.Namespace, every: Iterable[Mapping[str, Any]], found: Collection[Any]
) -> None:
    """Refuses filters that no measurement matches, each alone or all together.

    Args:
      options: The options; filters are those whose names are among the names of `every`.
      every: What filters are compared with, of each measurement.
      found: The measurements that match.

    Raises:
      SystemExit: If there are none, or if a filter has a value that no measurement has.
    """
    there: dict[str, set[Any]] = {}
    for one in every:
        for name, value in one.items():
            there.setdefault(name, set()).update({value} - {None})
    filters = {name: getattr(options, name, None) or () for name in there}
    unknown = [f"{x}" for name, given in filters.items() for x in given if x not in there[name]]
    if found and not unknown:
        return
    known = "; ".join(
        f"{name} is one of {', '.join(sorted(map(str, there[name])))}"
        for name, given in filters.items()
        if given
    )
    raise SystemExit(
        f"options must match a measurement, got none for {' '.join(unknown or sys.argv[1:])}"
        + (f": {known}" if known else "")
    )


def found_or_error(measure: Callable[..., Mapping[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `measure(*arguments)` finds, or why it failed, as `"error"`, so that others are kept."""
    try:
        return {"error": None, **measure(*arguments)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def note_asked(meta: dict[str, Any], rows: Iterable[Mapping[str, Any]], *fields: str) -> None:
    """Notes which rows are to be there in the end, so that `missing` knows what a file lacks.

    Args:
      meta: Of the file; gets the entry `"asked"`.
      rows: Every row, as far as it is known before anything is measured.
      *fields: What tells rows apart.
    """
    meta["asked"] = {"fields": fields, "rows": [_name(row, fields) for row in rows]}


def missing(data: Mapping[str, Any]) -> list[str]:
    """The rows that a file was to have and lacks, by name; a row that failed is there.

    Files that do not say what was asked for have nothing missing.
    """
    asked = data["meta"].get("asked", {"fields": (), "rows": ()})
    there = {_name(row, asked["fields"]) for row in data["rows"]}
    return [name for name in asked["rows"] if name not in there]


def _name(row: Mapping[str, Any], fields: Iterable[str]) -> str:
    values = [row[field] for field in fields if row.get(field) not in (None, {})]
    return " ".join(one if isinstance(one, str) else json.dumps(one) for one in values)


# What is told of each row, since a file's rows may come of several runs.
RATES = ("copy_tb_per_s", "matmul_tflops", "matmul_float8_tflops")
RUN = ("date", "command", "repeats", "sources", *RATES)
# What all rows of a file have in common.
_SAME = ("device", "cpu", "cores", "versions", "is_quick")


def add_rows(
    path: str | Path,
    meta: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    names: Iterable[str],
    *same: str,
) -> None:
    """Adds rows of a run to a file, in the place of rows of the same name.

    Rows that were not run again stay. Each has the date, the command and the repeats of its own
    run, in `"run"`. What failed now and did not then leaves the row as it was.

    Args:
      path: The file, which need not exist.
      meta: What this run says of itself; entries named in `RUN` become its rows'.
      rows: The rows.
      names: Fields that tell rows apart.
      *same: Entries of `meta` that must not differ from the file's, besides device and versions.

    Raises:
      SystemExit: If the file holds rows of other hardware or versions.
    """
    names, old = tuple(names), read_results(path)
    differing = [
        f"{name} {old['meta'].get(name)!r} there, {meta.get(name)!r} now"
        for name in (*_SAME, *same)
        if old["meta"] and old["meta"].get(name) != meta.get(name)
    ]
    if differing:
        raise SystemExit(
            f"{path} must hold results of the same kind, got {'; '.join(differing)}; pass another "
            f"--out or remove the file"
        )
    then, told = _split(old["meta"])
    now, new = _split(meta)
    there = {_name(row, names): {**row, "run": row.get("run", then)} for row in old["rows"]}
    for row in rows:
        name = _name(row, names)
        if not row.get("error") or there.get(name, row).get("error"):
            there[name] = {**row, "run": now}
    joined = told | new
    asked = [one["asked"] for one in (told, new) if one.get("asked")]
    if asked:
        every = dict.fromkeys(name for one in asked for name in one["rows"])
        joined["asked"] = asked[-1] | {"rows": list(every)}
    write_results(path, joined, list(there.values()))


def _split(meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is told of each row, and what of the file."""
    run = {name: meta[name] for name in RUN if name in meta}
    return run, {name: value for name, value in meta.items() if name not in run}


def read_results(path: str | Path) -> dict[str, Any]:
    """`{"meta": ..., "rows": ...}` of a file; both empty where there is none."""
    path = Path(path)
    if not path.exists():
        return {"meta": {}, "rows": []}
    return json.loads(path.read_text(encoding="utf-8"))


def is_measured(path: str | Path, names: Iterable[str]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a file has a row of the same name that was measured, or that cannot fit.

    Args:
      path: The file, which need not exist.
      names: Fields that tell rows apart.
    """
    names, rows = tuple(names), read_results(path)["rows"]
    done = {_name(row, names) for row in rows if row.get("error") in (None, DOES_NOT_FIT)}
    return lambda row: _name(row, names) in done


def write_results(path: str | Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the JSON file that `report.py` reads."""
    from sketchwalk_jax.evaluation import results

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write_results(path, meta, rows)
    print(f"written: {path}")
