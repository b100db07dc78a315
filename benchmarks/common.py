"""What the benchmarks share: alternating timers, hardware and versions, JSON files."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# Of one call: {"wall": seconds, "cpu": CPU seconds of all threads} per round
Rounds = list[dict[str, float]]

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parents[1]

if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.append(str(ROOT))


def describe_machine(**details: Any) -> dict[str, Any]:
    """Hardware, versions, date and command of this run, with `details` of the benchmark's own."""
    from sketchwalk_jax.evaluation import results

    return results.describe_machine(["python", *sys.argv], root=ROOT, **details)


def alternate(calls: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, Rounds]:
    """Times each call `repeats` times, in turns, so that a busy moment slows all of them.

    Every call runs once beforehand, to compile.

    Args:
      calls: Functions whose result can be given to `jax.block_until_ready`.
      repeats: Timed rounds.

    Returns:
      The rounds of each call.
    """
    import jax

    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, Rounds] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            times[name].append(
                {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            )
    return times


def summarize(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    import numpy as np

    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "repeats": len(values)}


def timing(rounds: Rounds) -> dict[str, Any]:
    """Wall and CPU seconds of the rounds of one call."""
    return {f"{clock}_s": summarize([one[clock] for one in rounds]) for clock in ("wall", "cpu")}


def speedup(slow: Rounds, fast: Rounds, clock: str) -> dict[str, float]:
    """How many times faster, round by round."""
    return summarize([a[clock] / b[clock] for a, b in zip(slow, fast, strict=True)])


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of a compiled program: temporary, arguments, results, and results in arguments."""
    analysis = compiled.memory_analysis()
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "aliased_bytes": analysis.alias_size_in_bytes,
    }


def check_same(
    path: str | Path, old: Mapping[str, Any], new: Mapping[str, Any], *names: str
) -> None:
    """Refuses to add rows to a file of something else, or to replace it.

    Args:
      path: The file.
      old: Its `meta`.
      new: What `meta` would be now.
      *names: Entries that must not differ.

    Raises:
      SystemExit: If one differs.
    """
    found = [
        f"{name} {old.get(name)!r} there, {new.get(name)!r} now"
        for name in names
        if old.get(name) != new.get(name)
    ]
    if found:
        raise SystemExit(
            f"{path} must hold results of the same kind, got {'; '.join(found)}; pass another "
            f"--out or remove the file"
        )


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


def write_results(path: str | Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the JSON file that `report.py` reads."""
    from sketchwalk_jax.evaluation import results

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write_results(path, meta, rows)
    print(f"written: {path}")
