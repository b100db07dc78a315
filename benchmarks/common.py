"""Shared by the benchmarks: compiling, timing, hardware and versions, JSON files."""

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

if str(ROOT) not in sys.path:  # the package may not be installed
    sys.path.append(str(ROOT))


def describe_machine(command: Sequence[str] | None = None, **details: Any) -> dict[str, Any]:
    """Describes hardware, versions, date and command of this run.

    Args:
      command: The command's words; by default this process's, after XLA's flags.
      **details: Further entries of the benchmark.
    """
    from sketchwalk_jax.evaluation import provenance

    flags = os.environ.get("XLA_FLAGS")
    command = command or [*([f"XLA_FLAGS={flags}"] if flags else []), "python", *sys.argv]
    return provenance.describe_machine(command, root=ROOT, **details)


@contextlib.contextmanager
def compiling(*, seconds: float = math.inf) -> Iterator[Callable[..., Future[Any]]]:
    """Compiles programs in parallel; at the end of its block all have finished.

    Compiling takes all cores and would slow timed code, so `clock` raises an error until then.

    Args:
      seconds: Time for all of them. Compilations that have not begun by then are cancelled; running
        ones are waited for, since nothing can be timed before they end.

    Yields:
      `submit(make, *arguments)`, which queues a compilation, first in, first out.
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
    finally:  # after an error, waiting compilations are cancelled at once
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
    """Compiles a group of cells in parallel, yields them to be timed, then goes on.

    Args:
      cells: Measurements, the most important first.
      compile_cell: Compiles the program of a cell, in a thread.
      seconds_left: Returns the time left in this run; at 0 no further cell is yielded.
      group: Number of cells to compile before the first of them is timed.

    Yields:
      Each cell that was compiled in time, and a function that returns its program or raises its
      error.
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
    """Reads the clock in seconds; all timings in results use it.

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
    calls: Mapping[str, Callable[[int], Any]], repeats: int, *, step: int = 1
) -> dict[str, list[float]]:
    """Times each call per step, in turns, so that a busy moment slows all of them.

    Every call first runs twice, to compile and to choose the steps of a round, which takes about
    `ROUND_SECONDS`.

    Args:
      calls: Functions of a number of steps; `jax.block_until_ready` waits for their result.
      repeats: Timed rounds.
      step: Number of steps of the shortest call.
    """
    import jax

    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call(step))
        start = clock()
        jax.block_until_ready(call(step))
        taken = clock() - start
        counts[name] = max(1, min(500, math.ceil(ROUND_SECONDS / taken))) * step
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
    """Times calls and waits for each; returns median and quartiles, without the first call.

    Args:
      call: The compiled call to time.
      repeats: Number of calls that count.
      wait: Function that waits for its result; by default `jax.block_until_ready`.
      enough: Seconds from which on one call is enough: if the first call takes this long, it is the
        only one and counts. Its one-time work takes far less.
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
    """Computes median and quartiles."""
    import numpy as np

    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "repeats": len(values)}


def memory(compiled: Any) -> dict[str, int]:
    """Returns bytes of a compiled program: temporary, arguments, results, aliased results."""
    analysis = compiled.memory_analysis()
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "aliased_bytes": analysis.alias_size_in_bytes,
    }


def peak_gib(compiled: Any) -> float:
    """Computes a program's peak memory in GiB: arguments, temporary arrays and new results."""
    found = memory(compiled)
    held = sum(found[f"{name}_bytes"] for name in ("temporary", "argument", "output"))
    return (held - found["aliased_bytes"]) / 2**30


def is_asked(options: argparse.Namespace, **values: Any) -> bool:
    """Whether each value is among the values of the option of its name, if that was given."""
    given = {name: getattr(options, name) for name in values}
    return all(not given[name] or value in given[name] for name, value in values.items())


def check_filters(
    options: argparse.Namespace, every: Iterable[Mapping[str, Any]], found: Collection[Any]
) -> None:
    """Refuses filters that match no measurement, each alone or all together.

    Args:
      options: The options; those with a name of `every` are filters.
      every: The filterable values of each measurement.
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
    """Runs `measure(*arguments)`; a failure becomes the field `"error"`, and the run goes on."""
    try:
        return {"error": None, **measure(*arguments)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def note_asked(meta: dict[str, Any], rows: Iterable[Mapping[str, Any]], *fields: str) -> None:
    """Notes the requested rows, so that `missing` knows which rows a file lacks.

    Args:
      meta: `meta` of the file; gets the entry `"asked"`.
      rows: Every row, with the fields known before measuring.
      *fields: Fields that identify a row.
    """
    meta["asked"] = {"fields": fields, "rows": [_name(row, fields) for row in rows]}


def missing(data: Mapping[str, Any]) -> list[str]:
    """Lists the requested rows that a file lacks, by name; failed rows are not missing.

    Files that do not record requests have nothing missing.
    """
    asked = data["meta"].get("asked", {"fields": (), "rows": ()})
    there = {_name(row, asked["fields"]) for row in data["rows"]}
    return [name for name in asked["rows"] if name not in there]


def _name(row: Mapping[str, Any], fields: Iterable[str]) -> str:
    values = [row[field] for field in fields if row.get(field) not in (None, {})]
    return " ".join(one if isinstance(one, str) else json.dumps(one) for one in values)


# Fields stored with each row, because a file's rows may come from several runs.
RATES = ("copy_tb_per_s", "matmul_tflops", "matmul_float8_tflops")
RUN = ("date", "command", "repeats", "sources", *RATES)
# Fields that all rows of a file share.
_SAME = ("device", "cpu", "cores", "versions", "is_quick")


def add_rows(
    path: str | Path,
    meta: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    names: Iterable[str],
    *same: str,
) -> None:
    """Adds rows of a run to a file, and replaces rows of the same name.

    Other rows stay. Each row stores the date, command and repeats of its run in `"run"`. A failed
    measurement does not replace a successful one.

    Args:
      path: The file, which need not exist.
      meta: Description of this run; entries named in `RUN` move to its rows.
      rows: The rows.
      names: Fields that identify a row.
      *same: Entries of `meta` that must equal the file's, in addition to device and versions.

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
    """Splits `meta` into entries of each row and entries of the file."""
    run = {name: meta[name] for name in RUN if name in meta}
    return run, {name: value for name, value in meta.items() if name not in run}


def read_results(path: str | Path) -> dict[str, Any]:
    """Reads `{"meta": ..., "rows": ...}` from a file; both are empty without a file."""
    path = Path(path)
    if not path.exists():
        return {"meta": {}, "rows": []}
    return json.loads(path.read_text(encoding="utf-8"))


def check_publishable(name: str, data: Mapping[str, Any]) -> None:
    """Raises a ValueError for results of a quick run, or of several versions of the code.

    Args:
      name: Name of the file, for the error.
      data: Its contents; published figures, which no device of ours measured, are not checked.
    """
    meta = data["meta"]
    if meta.get("is_quick"):
        raise ValueError(f"{name} must be of a whole run, got one with --quick")
    rows = data["rows"] if "device" in meta else ()
    codes = {str(row.get("sources") or row.get("run", meta).get("sources")) for row in rows}
    if len(codes) > 1 or "None" in codes:
        raise ValueError(f"{name} must be of one version of the code, got {sorted(codes)}")


def is_measured(path: str | Path, names: Iterable[str]) -> Callable[[Mapping[str, Any]], bool]:
    """Tells whether a file has a row of the same name that was measured or does not fit.

    Args:
      path: The file, which need not exist.
      names: Fields that identify a row.
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
