"""What writes the pages: tables of the JSON results, between marks, and the figures beside them.

What is written stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->`. `report.py` has
all tables; the scripts beside it write their own ones, with their figures.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common  # which finds the package in a checkout that is not installed
from common import RESULTS, ROOT

from sketchwalk_jax.evaluation import results as evaluations
from sketchwalk_jax.evaluation.report import describe_gaps, describe_run

PAGES = (ROOT / "README.md", *(ROOT / "benchmarks" / name for name in ("QUALITY.md", "KERNELS.md")))
PLOTS = ROOT / "benchmarks" / "plots"
SECTION = re.compile(r"(<!-- benchmark:([\w-]+) -->\n)(.*?)(<!-- /benchmark -->)", re.DOTALL)
Results = dict[str, Any]
_MOST_NAMES = 8  # of measurements that are missing
_MOST_COMMANDS = 1  # below a table
# The file of a table's results, and what makes the table of it, by name.
Tables = dict[str, tuple[str, Callable[[Path], str]]]


def write_own_tables(
    description: str | None, tables: Tables, draw: Callable[[Path, Path], None] | None = None
) -> None:
    """Draws figures, then rewrites some tables on the pages: what scripts beside `report.py` do.

    Args:
      description: Of the script, for its help.
      tables: The tables; what else stands on the pages is left as it is.
      draw: Takes the folder of the results and that of the figures.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plots", type=Path, default=PLOTS)
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    options = parser.parse_args()
    if draw is not None:
        import matplotlib

        matplotlib.use("Agg")
        options.plots.mkdir(parents=True, exist_ok=True)
        draw(options.results, options.plots)
    for page in options.page or PAGES:
        update(page, options.results, tables, is_part=True)


def update(
    page: Path, results: Path, tables: Tables, *, is_part: bool = False, is_check: bool = False
) -> bool:
    """Rewrites a page, or only shows how it differs; returns whether it was right before."""
    old = page.read_text(encoding="utf-8")
    new = render(old, results, tables, is_part=is_part)
    if old != new and is_check:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), str(page), "from the results", lineterm=""
        )
        print("\n".join(lines))
    elif old != new:
        page.write_text(new, encoding="utf-8")
    return old == new


def render(text: str, results: Path, tables: Tables, *, is_part: bool = False) -> str:
    """The text with its sections replaced by their tables.

    Args:
      text: A page.
      results: Folder of the results.
      tables: The tables.
      is_part: Whether the page may have other sections, which stay.

    Raises:
      ValueError: If a section is not closed, or has no table.
    """
    if len(SECTION.findall(text)) != text.count("<!-- benchmark:"):
        raise ValueError("every <!-- benchmark:NAME --> must be closed by <!-- /benchmark -->")

    def replace(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        if name not in tables and is_part:
            return match.group()
        if name not in tables:
            raise ValueError(f"a benchmark section must be one of {sorted(tables)}, got {name!r}")
        file, make = tables[name]
        return f"{opening}{make(results / file)}\n{closing}"

    return SECTION.sub(replace, text)


def captioned(
    make: Callable[[Results], str],
    command: str = "",
    gaps: Callable[[Results], Sequence[str]] | None = None,
    **where: Any,
) -> Callable[[Path], str]:
    """A section of a file of speeds: its table, then hardware, versions, date and command.

    Args:
      make: The table, or nothing where the file has no rows for it.
      command: What measures them.
      gaps: A line on what is missing, if anything is; by default `describe_missing`.
      **where: Fields of the rows that the table is of, whose commands are named.
    """

    def section(path: Path) -> str:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["meta"].get("is_quick"):
            raise ValueError(f"{path.name} must be of a whole run, got one with --quick")
        table = make(data)
        if not table:
            return _measures(command)
        runs = describe_runs(data, **where)
        return "\n\n".join([table, runs, *(gaps or describe_missing)(data)])

    return section


def describe_runs(data: Results, **where: Any) -> str:
    """Hardware, versions, dates and commands in one line: of rows, or of the whole file."""
    rows = [row for row in data["rows"] if where.items() <= row.items()]
    runs = [row["run"] for row in rows if "run" in row]
    if not runs:
        return describe_run(data["meta"])
    dates = sorted({run["date"] for run in runs})
    commands = list(dict.fromkeys(run["command"] for run in runs))
    more = len(commands) - _MOST_COMMANDS
    text = describe_run(
        data["meta"]
        | {
            "date": dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
            "command": "`, `".join(commands[:_MOST_COMMANDS]),
        }
    )
    return f"{text}, and {more} more in the file" if more > 0 else text


def describe_absent(
    data: Results,
    command: str,
    wanted: Mapping[str, tuple[str, Mapping[Any, str]]],
    **where: Any,
) -> list[str]:
    """A line on what a benchmark measures and its file has no row of; none if all is there.

    Args:
      data: The results.
      command: What measures it.
      wanted: For some fields what to say of the values that are missing, with `{}` in the place of
        their names, and the values with their names.
      **where: Fields of the rows that count.
    """
    rows = [row for row in data["rows"] if where.items() <= row.items()]
    parts = []
    for field, (text, values) in wanted.items():
        there = {row[field] for row in rows}
        absent = [name for value, name in values.items() if value not in there]
        parts += [text.format(", ".join(absent))] if absent else []
    names = common.missing(data)
    if names:
        parts.append(f"{len(names):,} of {len(data['meta']['asked']['rows']):,} rows asked for")
    return [f"Not measured: {'; '.join(parts)} ({command})."] if parts else []


def describe_missing(data: Results) -> list[str]:
    """A line on what a benchmark's file lacks of what was asked for; none of a whole one."""
    names = common.missing(data)
    if not names:
        return []
    shown = "; ".join(names[:_MOST_NAMES])
    more = f"; and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    count = f"{len(names):,} of {len(data['meta']['asked']['rows']):,}"
    return [f"**Not finished.** {count} measurements are missing: {shown}{more}."]


def read_whole(path: Path) -> evaluations.Results:
    """The results of an evaluation for a page, which shows whole ones alone.

    Raises:
      ValueError: If it is not finished.
    """
    results = evaluations.read_results(path)
    if results.missing:
        gap = describe_gaps(results)[0]
        raise ValueError(f"{path.name} must be of a finished evaluation, got: {gap}")
    return results


def describe_whole(results: evaluations.Results) -> str:
    """Hardware, versions, date and command; where rows are of several codes, that too."""
    return " ".join([describe_run(results.meta), *describe_gaps(results)])


def if_measured(make: Callable[[Path], str], command: str) -> Callable[[Path], str]:
    """A section that says what makes its results where they are missing."""

    def section(path: Path) -> str:
        return make(path) if path.exists() else _measures(command)

    return section


def _measures(command: str) -> str:
    return f"To measure: {command}."


def duration(row: Mapping[str, Any], side: str) -> str:
    """A median and the distance of its quartiles, in the unit that suits."""
    value, spread = row[f"{side}_ms"], row[f"{side}_ms_iqr"]
    unit = "ms"
    if value < 1:
        value, spread, unit = value * 1e3, spread * 1e3, "µs"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit} ({spread:.2g})"
