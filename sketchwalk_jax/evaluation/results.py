"""Reads and writes the results of an evaluation, `quality.json`.

`ResultsFile` adds rows group by group, rewrites the whole file each time, and continues it later;
`read_results` reads it. The file records the requested rows, so that `Results.missing` knows what
an interrupted evaluation lacks, and the code that measured each row.
"""

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sketchwalk_jax.evaluation.rows import ROW_KEY, Row, group_key_of
from sketchwalk_jax.evaluation.settings import Rule

# Further fields that identify rows: of variants, and of evaluations that share a file.
_APART = ("variant", "model", "stage")
# Entries of `meta` in which runs that share a file may differ.
_MAY_DIFFER = ("date", "command", "wall_s", "cpu", "cores", "memory_gib")
_NOTES = ("asked", "drawn", "not_run")
_SOURCES = "sources"
_MOST_GROUPS = 10**6  # bounds the loop over entries of an untrusted file


class ResultsFile:
    """`quality.json`: `meta` and `rows`, always complete and valid on disk."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: Mapping[str, Any],
        *,
        overwrite: bool = False,
        common: Mapping[str, Any] | None = None,
        may_differ: Sequence[str] = (),
        other_code: bool = False,
    ) -> None:
        """Opens the file, to continue it if it exists.

        Args:
          path: The file; its folder must exist.
          meta: Everything that the results depend on, and further facts for readers.
          overwrite: Whether to replace an existing file.
          common: First fields of every row, such as `model`: in a file that several evaluations
            share, this one reads and writes only the rows with these values.
          may_differ: Entries of `meta` that may differ from the file's; the new ones are kept.
          other_code: Whether to continue a file that another version of this package began; each
            row then names its version.

        Raises:
          ValueError: If the file has other contents, or results with another model, text, seed or
            code.
          OSError: If it cannot be read, or nothing can be written there.
        """
        self.path = Path(path)
        self.meta, self.rows = dict(meta), list[Row]()
        self._common = dict(common or {})
        self._may_differ = (*_MAY_DIFFER, *_NOTES, *may_differ, _SOURCES)
        self._is_other_code_allowed = other_code
        self._sources: dict[str, Any] = {}
        self._started, self._before = time.perf_counter(), 0.0
        if self.path.exists() and not overwrite:
            self._continue()
        elif not self.path.parent.is_dir():
            raise FileNotFoundError(2, "No such folder", str(self.path.parent))
        self._finished = {group_key_of(row) for row in self._own_rows()}

    def _own_rows(self, **wanted: Any) -> list[Row]:
        """Selects the rows of this evaluation with these values."""
        return [row for row in self.rows if _says(row, self._common | wanted)]

    def _continue(self) -> None:
        advice = "pass --overwrite to start afresh, or another --out"
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            old, self.rows = dict(found["meta"]), list(found["rows"])
            self._before = float(old["wall_s"])
            for row in self.rows:
                hash(group_key_of(row))
            for kind in _NOTES:
                _ = [dict(entry) for entry in old.get(kind, ())]
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.path} must hold results of an evaluation; {advice}") from error
        now = json.loads(json.dumps(self.meta))  # as read back from JSON
        differing = [
            f"{name} {_short(old.get(name))} there, {_short(now.get(name))} now"
            for name in sorted((set(old) | set(now)) - set(self._may_differ))
            if old.get(name) != now.get(name)
        ]
        if differing:
            raise ValueError(
                f"{self.path} must hold results of the same evaluation, got "
                f"{'; '.join(differing)}; {advice}"
            )
        was, is_now = old.get(_SOURCES), now.get(_SOURCES)
        if was != is_now:
            if not self._is_other_code_allowed:
                raise ValueError(
                    f"{self.path} must hold results of the code of now, {_short(is_now)}, got "
                    f"those of {'unknown code' if was is None else _short(was)}; {advice}, or "
                    f"--other-code to go on all the same: new rows then say which code they are of"
                )
            self.meta[_SOURCES], self._sources = was, {_SOURCES: is_now}
        self.meta |= {name: old[name] for name in _NOTES if name in old}

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether the rows with this `group_key` are there."""
        return key in self._finished

    def note(self, kind: str, **entry: Any) -> None:
        """Adds an entry about future rows to `meta`, once; the next `add` writes it.

        Args:
          kind: `"asked"` for the requested rules, tasks and lengths; `"drawn"` for the prompts that
            dense attention answered; or `"not_run"` for the rules left out, and why.
          **entry: Contents of the entry, in types of JSON.
        """
        entry = self._common | entry
        entries = self.meta.setdefault(kind, [])
        if entry not in entries:
            entries.append(entry)

    def drawn(self, task: str, tokens: int) -> str | None:
        """Tells which drawn prompts dense attention answered, as `"0110..."`; None if unknown.

        They are known if the file also has dense attention's rows for these prompts.
        """
        wanted = self._common | {"task": task, "tokens": tokens}
        found = (one["answered"] for one in self.meta.get("drawn", ()) if _says(one, wanted))
        return next(found, None)

    def settings(self, rule: Rule, tokens: int) -> dict[str, Any] | None:
        """Returns the calibrated fields of a rule at a length, from finished rows; None without.

        The plan belongs to the rule and is left out.
        """
        for row in self._own_rows(**rule.name_fields, tokens=tokens):
            if row["phase"] in (rule.phases or (row["phase"],)):
                settings = dict(row.get("settings") or {})
                settings.pop("plan", None)
                if settings:
                    return settings
        return None

    def check_plan(self, rule: Rule) -> None:
        """Refuses to continue the rows of a rule that were measured with another plan.

        Raises:
          ValueError: If there are such rows.
        """
        now = None if rule.plan is None else rule.plan.short_hash
        wanted = {"policy": rule.policy, "preset": rule.preset, "variant": rule.variant}
        for row in self._own_rows(**wanted):
            there = (row.get("settings") or {}).get("plan")
            if there != now:
                raise ValueError(
                    f"{self.path} must hold rows of {rule} with the model's plan of now, {now}, "
                    f"got rows with {there}; pass --overwrite to start afresh, or another --out"
                )

    def add(self, rows: Sequence[Row]) -> None:
        """Adds finished rows and writes the file."""
        rows = [{**self._common, **row, **self._sources} for row in rows]
        self.rows += rows
        self._finished |= {group_key_of(row) for row in rows}
        self.write()

    def write(self) -> None:
        """Writes the file, with the noted entries."""
        self.meta["wall_s"] = round(self._before + time.perf_counter() - self._started, 1)
        write_results(self.path, self.meta, self.rows)


def _says(entry: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a row or a note has these values; a missing field counts as null."""
    return all(entry.get(name) == value for name, value in wanted.items())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def write_results(
    path: str | os.PathLike[str], meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Writes `{"meta": ..., "rows": ...}` as JSON with one line for each row.

    An interrupt leaves the old file or the new one, never a part.

    Args:
      path: The file.
      meta: Facts common to all rows.
      rows: The rows.

    Raises:
      OSError: If it cannot be written.
      ValueError: If a number is not finite.
    """
    path = Path(path)
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    text = f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n'
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """One evaluation.

    Attributes:
      meta: Model, text, seed, versions, hardware, date and command.
      rows: The measured rows.
    """

    meta: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def missing(self) -> tuple[dict[str, Any], ...]:
        """Groups of rows that were requested and are missing, as fields of rows.

        A group has one rule, phase, task and length. Groups that cannot be measured, because a
        policy cannot be as sparse as requested or dense attention answers no prompt, are not
        missing. Files that do not record requests have nothing missing.
        """
        there = {_place(row) for row in self.rows}
        return tuple(group for key, group in self._asked().items() if key not in there)

    @property
    def asked(self) -> int:
        """Number of groups of rows that were requested and can be measured."""
        return len(self._asked())

    def _asked(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {
            _place(group): group
            for entry in self.meta.get("asked", ())
            for group in _groups(entry)
            if not self._is_impossible(group)
        }

    def _is_impossible(self, group: Row) -> bool:
        def notes(kind: str, *fields: str) -> list[Mapping[str, Any]]:
            wanted = {name: group.get(name) for name in (*fields, "model", "stage")}
            return [one for one in self.meta.get(kind, ()) if _says(one, wanted)]

        if group["policy"] != "dense":
            if group["task"] == "long_decode" and group["phase"] == "prefill":
                return True
            if any("1" not in one["answered"] for one in notes("drawn", "task", "tokens")):
                return True
        left_out = notes("not_run", "policy", "preset", "variant", "density", "tokens")
        return any(group["phase"] in one["phases"] for one in left_out)

    @property
    def sources(self) -> dict[str, int]:
        """Number of rows by the hash of the code that measured them; `"unknown"` in old files."""
        first, found = self.meta.get(_SOURCES) or "unknown", dict[str, int]()
        for row in self.rows:
            own = row.get(_SOURCES, first)
            found[own] = found.get(own, 0) + 1
        return found


def _place(row: Row) -> tuple[Any, ...]:
    """Extends `group_key_of` for files that several evaluations share."""
    return (*group_key_of(row), row.get("model"), row.get("stage"))


def _groups(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lists the groups of rows that an entry of `"asked"` requests."""
    count = len(entry["tokens"]) * len(entry["tasks"]) * len(entry["rules"])
    if count > _MOST_GROUPS:
        raise TypeError(f"too much to be asked for, {count}")
    shared = {name: entry[name] for name in ("model", "stage") if name in entry}
    for tokens, task, rule in itertools.product(entry["tokens"], entry["tasks"], entry["rules"]):
        for phase in rule["phases"]:
            own = {name: rule[name] for name in ("policy", "preset", "variant", "density")}
            yield {**shared, **own, "phase": phase, "task": task, "tokens": tokens}


def read_results(path: str | Path) -> Results:
    """Reads `quality.json`, as `sketchwalk eval` writes it.

    Args:
      path: The file.

    Returns:
      Its contents, checked.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If it is not JSON, lacks `meta` or `rows`, or a row lacks a field or occurs twice.

    Example:
      >>> results = read_results("quality.json")  # doctest: +SKIP
      >>> results.meta["seed"], len(results.rows)  # doctest: +SKIP
      (0, 1584)
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON of `sketchwalk eval`, got {error}") from error
    is_whole = isinstance(found, dict) and {"meta", "rows"} <= set(found)
    if not is_whole or not isinstance(found["meta"], dict) or not isinstance(found["rows"], list):
        raise ValueError(f"{path} must hold `meta` and `rows`, as `sketchwalk eval` writes them")
    check_rows(found["rows"])
    results = Results(meta=found["meta"], rows=tuple(found["rows"]))
    try:
        _ = results.missing, results.sources
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must say what was asked for as `sketchwalk eval` does") from error
    return results


def check_rows(rows: Sequence[Row]) -> None:
    """Raises a `ValueError` for no rows, a row without its fields, or two rows of the same name."""
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    seen = set()
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"rows must be JSON objects, got {type(row).__name__} as row {index}")
        missing = sorted({*ROW_KEY, "prompts", "exact", "text_loss"} - set(row))
        if missing:
            raise ValueError(f"rows must have all fields, got row {index} without {missing}")
        key = (*(row[field] for field in ROW_KEY), *(row.get(field) for field in _APART))
        wrong = [one for one in key if isinstance(one, list | dict)]
        if wrong:
            raise ValueError(f"rows must be told apart by text and numbers, got {wrong[0]!r}")
        if key in seen:
            raise ValueError(f"rows must differ, got twice {dict(zip(ROW_KEY, key, strict=False))}")
        seen.add(key)
