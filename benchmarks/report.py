"""Writes the tables of the pages from the JSON results.

    python benchmarks/report.py            # rewrites the tables
    python benchmarks/report.py --check    # fails where a page differs from the results

It also derives the lengths that `Auto` goes by, `sketchwalk_jax/inference/break_even.json`.

A table stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` on a page; `tables.py`
defines its file and rows. All tables have one form: some fields identify a line, and each further
column selects rows of the line, from which a function makes the text of a cell. A file of results
must be of one version of the code. `appendix/commands.md` has the commands that write the results.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common  # makes the package importable
import numpy as np

from sketchwalk_jax.evaluation.rows import wilson_interval
from sketchwalk_jax.evaluation.tables import (
    NOTHING,
    counted,
    markdown_table,
    mean_interval,
    name_of,
    signed,
)

HERE = Path(__file__).resolve().parent
APPENDIX = HERE / "appendix"
RESULTS = common.RESULTS
PAGES = (
    HERE.parent / "README.md",
    HERE / "KERNELS.md",
    HERE / "QUALITY.md",
    HERE.parent / "docs" / "several_gpus.md",
    *sorted(APPENDIX.glob("*.md")),
)
SECTION = re.compile(r"(<!-- benchmark:([\w-]+) -->\n)(.*?)(<!-- /benchmark -->)", re.DOTALL)
HEADING_OR_NAME = re.compile(r"^#+ (.+)$|<!-- benchmark:([\w-]+) -->", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
PHASES = {"prefill": "prefill", "decode": "decode", "both": "both"}
_ORDER = ("dense", "recommended", "paper", "damped", "one_hop", "released")
_ORDER += ("minference", "flexprefill", "quest", "adamas", "oracle", "streaming", "random")

Row = dict[str, Any]
Where = Mapping[str, Any]
Other = Callable[..., list[Row]]
Cell = Callable[[list[Row], Other], str]


class _Any:
    """Equals every value: the phase of dense attention, or a field that a cell leaves open."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class OneOf:
    """Equals each of the given values."""

    def __init__(self, *values: Any) -> None:
        """Keeps the values."""
        self._values = values

    def __eq__(self, other: object) -> bool:
        """Whether one of them equals the other value."""
        return any(one == other for one in self._values)

    __hash__ = None  # type: ignore[assignment]


ANY = _Any()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a page.

    Attributes:
      file: File of results in `results/`.
      command: Command that measures the results.
      where: Filter for rows of the table: a value for each field.
      lines: Fields that identify a line; they are the first columns.
      columns: For each further column a filter of rows, and a function that makes a cell of them.
      note: A sentence below the table.
      adapt: Function that makes rows of the table from a row of the file.
      has_gaps: Whether to show lines with missing cells.
    """

    file: str
    command: str
    lines: Sequence[str]
    columns: Mapping[str, tuple[Where, Cell]]
    where: Where = dataclasses.field(default_factory=dict)
    note: str = ""
    adapt: Callable[[Row], Iterable[Row]] = lambda row: (row,)
    has_gaps: bool = False

    def write(self, results: Path) -> str:
        """Writes the table as Markdown, from the folder of results.

        Raises:
          ValueError: If the results come from a run with `--quick` or from several versions of the
            code, or are incomplete.
        """
        path = results / self.file
        if not path.exists():
            return f"To measure: `{self.command}`."
        data = read(path)
        rows = [new for row in data["rows"] for new in self.adapt(row)]
        shown = select(rows, self.where)
        body, used = [], list[Row]()
        for line in self._lines(shown):
            cells = []
            for where, cell in self.columns.values():
                some = select(shown, line | where)
                other = functools.partial(_others, rows, {**self.where, **line, **where})
                cells.append(cell(some, other) if some else NOTHING)
                used += some
            if {*cells} != {NOTHING} and (self.has_gaps or NOTHING not in cells):
                body.append([*(FIELDS[one][1](line[one]) for one in self.lines), *cells])
        head = [*(FIELDS[one][0] for one in self.lines), *self.columns]
        if not body:
            return f"To measure: `{self.command}`."
        about = describe(data["meta"], used)
        note = f"{self.note} {about}" if self.note else about
        return f"{markdown_table(head, body, num_names=len(self.lines))}\n\n{note}"

    def _lines(self, rows: Iterable[Row]) -> list[Row]:
        found: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            values = tuple(row.get(one) for one in self.lines)
            if None not in values and not any(one is ANY for one in values):
                found[values] = dict(zip(self.lines, values, strict=True))
        places = {one: dict.fromkeys(line[one] for line in found.values()) for one in self.lines}

        def rank(line: Row) -> list[Any]:
            return [_rank(name, value, [*places[name]]) for name, value in line.items()]

        return sorted(found.values(), key=rank)


def _others(rows: Sequence[Row], where: Where, **changed: Any) -> list[Row]:
    return select(rows, {**where, **changed})


def _is_dense(row: Row) -> bool:
    return row.get("policy") == "dense"


def _rank(field: str, value: Any, places: Sequence[Any]) -> Any:
    """Returns the sort key of a line; names without an order keep the order of the results."""
    if field == "method":
        name = value.partition(",")[0]
        return _ORDER.index(name) if name in _ORDER else len(_ORDER), value
    if field == "phase":
        return [*PHASES].index(value)
    if field == "density":
        return -value
    if field == "model":  # by the number of parameters in its name
        found = re.search(r"(\d+(?:\.\d+)?)([mb])", value)
        return float(found[1]) * (1000 if found[2] == "b" else 1) if found else 0.0, value
    return places.index(value) if isinstance(value, str) else value


# Titles of fields that identify lines, and functions that format their values.
FIELDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens": ("Tokens", "{:,}".format),
    "density": ("Density", "{:g}".format),
    "lists": ("Tokens, density, block", "{0[0]:,}, {0[1]:g}, {0[2]}".format),
    "method": ("Method", name_of),
    "phase": ("Sparse in", PHASES.__getitem__),
    "variant": ("Changed", str),
    "attention": ("Attention", str),
    "heads": ("Heads", str),
    "capability": ("Compute capability", str),
    "rows": ("Tokens at a time", "{:,}".format),
    "load": ("Sequences × tokens", lambda load: f"{load[0]} × {load[1]:,}"),
    "gpus": ("GPUs", lambda gpus: "one" if gpus[0] == 1 else f"{gpus[0]}, by `{gpus[1]}`"),
    "claim": ("Claim: what is compared", str),
} | {
    name: (name.capitalize(), str)
    for name in ("model", "weights", "part", "product", "routing", "call")
}


# Results.


@functools.cache
def read(path: Path) -> Row:
    """Reads a file of results, and adds names of methods to its rows.

    Raises:
      ValueError: If it comes from a run with `--quick`, or from several versions of the code.
    """
    data: Row = json.loads(path.read_text(encoding="utf-8"))
    common.check_publishable(path.name, data)
    rows = data["rows"] if "rows" in data else data["tables"]
    for row in rows:
        if "policy" in row:
            parts = row.get("preset") or row["policy"], row.get("variant")
            row["method"] = ", ".join(filter(None, parts))
        if "is_right" in row:  # a row of an evaluation
            if _is_dense(row):
                row |= {"phase": ANY, "density": ANY}
            elif row["density"] is None:  # the method sets its own density
                row["density"] = ANY
    return data | {"rows": list(_without_parts(rows))}


def _without_parts(rows: Sequence[Row]) -> Iterator[Row]:
    """Drops the rows by depth if a row over all depths exists."""
    fields = ("model", "stage", "method", "task", "tokens", "hops")

    def name(row: Row) -> str:
        return str([*map(row.get, fields), *(str(row.get(one)) for one in ("phase", "density"))])

    whole = {name(row) for row in rows if row.get("depth") is None}
    for row in rows:
        if row.get("depth") is None or name(row) not in whole:
            yield row


def select(rows: Iterable[Row], where: Where) -> list[Row]:
    """Selects the rows with these values."""
    return [row for row in rows if all(one == row.get(key) for key, one in where.items())]


def describe(meta: Row, rows: Iterable[Row]) -> str:
    """Describes hardware and date of rows in one line, or the source of published figures."""
    if "device" not in meta:
        return f"{meta['source']}; {meta['unit']}; {meta['setting']}."
    device = meta["device"] if meta["device"] != "cpu" else f"{meta['cpu']}, {meta['cores']} cores"
    dates = sorted({row.get("run", meta)["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{device}; JAX {meta['versions']['jax']}; {when}"


# Cells of speeds.


def duration(ms: float) -> str:
    """Formats milliseconds in a suitable unit."""
    value, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms") if ms >= 1 else (ms * 1e3, "µs")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def milliseconds(field: str) -> Cell:
    """Makes a cell with a time in milliseconds."""
    return lambda rows, _: NOTHING if rows[0][field] is None else duration(rows[0][field])


def ratio(field: str, base: str) -> Cell:
    """Makes a cell with a time, and its speed-up over another time of the same row."""
    return lambda rows, _: f"{duration(rows[0][field])}, **{rows[0][base] / rows[0][field]:.1f}×**"


def number(field: str, text: str = "{:.2f}") -> Cell:
    """Makes a cell with a field's value."""
    return lambda rows, _: NOTHING if rows[0].get(field) is None else text.format(rows[0][field])


def best(rows: Iterable[Row]) -> Row | None:
    """Finds the fastest run, with prompts read in one piece or in several."""
    done = [row for row in rows if not row.get("error")]
    return min(done, key=lambda row: row["seconds"]["median"], default=None)


def timed(**base: Any) -> Cell:
    """Makes a cell with the time of a whole model, and its speed-up over the rows with `base`."""

    def cell(rows: list[Row], other: Other) -> str:
        own, dense = best(rows), best(other(**base)) if base else None
        if own is None:
            needed = rows[0].get("needed_gib")
            return f"needs {needed:.0f} GiB" if needed else NOTHING
        text = duration(1e3 * own["seconds"]["median"])
        if dense is None or dense is own:
            return text
        return f"{text}, **{dense['seconds']['median'] / own['seconds']['median']:.2f}×**"

    return cell


def of_floor(rows: list[Row], _: Other) -> str:
    """Formats the time as a multiple of its lower bound."""
    own = best(rows)
    return NOTHING if own is None else f"{own['seconds']['median'] / own['floor_seconds']:.2f}"


# Cells of evaluations.


def _answers(rows: Iterable[Row]) -> tuple[int, int]:
    """Counts right answers and prompts."""
    own = [row for row in counted(rows) if row["exact"] is not None]
    right = sum(row["exact"] * row["prompts"] for row in own)
    return round(right), sum(row["prompts"] for row in own)


def right(rows: list[Row], _: Other) -> str:
    """Formats the share of right answers."""
    count, prompts = _answers(rows)
    return f"{count / prompts:.2f}" if prompts else NOTHING


def right_interval(rows: list[Row], _: Other) -> str:
    """Formats the share of right answers with Wilson's 95 % interval."""
    count, prompts = _answers(rows)
    if not prompts:
        return NOTHING
    low, high = wilson_interval(count, prompts)
    return f"{count / prompts:.2f} ({low:.2f}–{high:.2f})"


def loss_beyond(digits: int = 3, *, percent: bool = False, **base: Any) -> Cell:
    """Makes a cell with the loss minus other rows' on the same texts, and Student's interval."""

    def cell(rows: list[Row], other: Other) -> str:
        own = next((row for row in rows if row.get("text_losses")), None)
        beside = [row for row in other(**base) if row.get("text_losses")]
        if own is None or not beside or own is beside[0]:
            return NOTHING
        change = np.subtract(own["text_losses"], beside[0]["text_losses"])
        change *= 100 / beside[0]["text_loss"] if percent else 1
        ends = mean_interval(change.tolist())
        mean, low, high = (signed(one, digits) for one in (change.mean(), *ends))
        return f"{mean}{' %' if percent else ''} ({low} to {high})"

    return cell


def mean(field: str, text: str) -> Cell:
    """Makes a cell with the mean of a field over prompts."""

    def cell(rows: list[Row], _: Other) -> str:
        own = [row for row in rows if row.get(field) is not None]
        if not own:
            return NOTHING
        counts = [row["prompts"] for row in own]
        return text.format(np.average([np.mean(row[field]) for row in own], weights=counts))

    return cell


def read_of_dense(rows: list[Row], other: Other) -> str:
    """Formats the share of dense attention's bytes that a decoded token reads."""
    own, dense = _bytes(rows), _bytes(other(method="dense"))
    return f"{own / dense:.2f}" if own and dense else NOTHING


def bytes_read(rows: list[Row], other: Other) -> str:
    """Formats the MiB that a decoded token reads in all layers, and their ratio to dense."""
    share = read_of_dense(rows, other)
    return NOTHING if share == NOTHING else f"{_bytes(rows) / 2**20:.1f} ({share})"


def joined(*cells: Cell) -> Cell:
    """Joins cells with commas; empty if one is."""

    def cell(rows: list[Row], other: Other) -> str:
        found = [one(rows, other) for one in cells]
        return NOTHING if NOTHING in found else ", ".join(found)

    return cell


def _bytes(rows: Iterable[Row]) -> float:
    """Averages the bytes that a decoded token reads in all layers; 0 if they were not counted."""
    fields = [f"decode_bytes_{name}" for name in ("keys", "values", "metadata")]
    own = [row for row in counted(rows) if row.get(fields[0]) is not None]
    counts = [row["prompts"] for row in own]
    read = [sum(row[one] for one in fields) for row in own]
    return float(np.average(read, weights=counts)) if own else 0.0


# Pages.


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Lists the tables of a page's text: the heading above, and the name."""
    heading = ""
    for title, name in HEADING_OR_NAME.findall(CODE.sub("", page)):
        heading = title or heading
        if name:
            yield heading, name


def anchor(heading: str) -> str:
    """Returns the anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    pages = options.page or PAGES
    are_equal = [update(page, options.results, is_check=options.check) for page in pages]
    if not options.page:
        import break_even  # imports the package

        are_equal.append(break_even.update_table(options.results, is_check=options.check))
    return 0 if all(are_equal) or not options.check else 1


def update(page: Path, results: Path, *, is_check: bool) -> bool:
    """Rewrites a page, or only shows differences; returns whether it was current.

    Raises:
      ValueError: If a section is not closed, or has no table.
    """
    from tables import TABLES

    old = page.read_text(encoding="utf-8")
    if len(SECTION.findall(old)) != old.count("<!-- benchmark:"):
        raise ValueError("every <!-- benchmark:NAME --> must be closed by <!-- /benchmark -->")

    def replace(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"a benchmark section must be one of {sorted(TABLES)}, got {name!r}")
        return f"{opening}{TABLES[name].write(results)}\n{closing}"

    new = SECTION.sub(replace, old)
    if old != new and is_check:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), str(page), "from the results", lineterm=""
        )
        print("\n".join(lines))
    elif old != new:
        page.write_text(new, encoding="utf-8")
    return old == new


if __name__ == "__main__":
    sys.exit(main())
