"""Writes the tables of the pages from the JSON results, and the break-evens of the package.

    python benchmarks/report.py            # rewrites them
    python benchmarks/report.py --check    # fails where a page differs from the results

A table stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` in README.md, QUALITY.md,
KERNELS.md or a page of `appendix/`; no number in it is typed. Tables of speeds are specified in
`tables.toml`: `Speeds` fills their templates, such as `{ours:duration}`, from rows of a benchmark.
Tables of answers are made by `grid`, whose lines and columns say which rows of an evaluation a
cell is made of.
"""

import argparse
import collections
import difflib
import functools
import itertools
import json
import math
import re
import string
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import break_even
import claims
import common  # which finds the package in a checkout that is not installed
import numpy as np
import retrieval
import scale_out

from sketchwalk_jax.cli import bench
from sketchwalk_jax.evaluation import results as evaluations
from sketchwalk_jax.evaluation.report import (
    NOT_MEASURED,
    SUMMARY_NOTE,
    TITLES,
    describe_gaps,
    describe_results,
    describe_run,
    sections,
)
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    NOTHING,
    PHASE_TITLES,
    PHASES,
    TASK_TITLES,
    accuracy_table,
    counted,
    densities,
    density_title,
    difference,
    is_dense,
    longest,
    loss_difference,
    loss_table,
    markdown_table,
    mean_interval,
    mean_of,
    measured,
    measured_phases,
    name_of,
    paired_loss_difference,
    policy_label,
    policy_labels,
    pool,
    rows_with,
    share,
    summary_table,
    task_title,
    tasks_of,
    values_of,
    without_parts,
)
from sketchwalk_jax.evaluation.tasks import ANSWERED_TASKS
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

HERE = Path(__file__).resolve().parent
PAGES = (
    common.ROOT / "README.md",
    HERE / "QUALITY.md",
    HERE / "KERNELS.md",
    *sorted((HERE / "appendix").glob("*.md")),
)
SECTION = re.compile(r"(<!-- benchmark:([\w-]+) -->\n)(.*?)(<!-- /benchmark -->)", re.DOTALL)
Results = dict[str, Any]
_MOST_NAMES = 8  # of measurements that are missing
_MOST_COMMANDS = 1  # below a table
RECOMMENDED = ("recommended", "recommended_blocks")
USUAL_QUERIES = RecommendedConfig().representatives  # of a row, without a plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args(arguments)
    is_equal = [
        update(page, options.results, is_check=options.check) for page in options.page or PAGES
    ]
    if not options.page:
        is_equal.append(break_even.update_table(options.results, is_check=options.check))
    return 0 if all(is_equal) or not options.check else 1


def update(page: Path, results: Path, *, is_check: bool) -> bool:
    """Rewrites a page, or only shows how it differs; returns whether it was right before.

    Raises:
      ValueError: If a section is not closed, or has no table.
    """
    old = page.read_text(encoding="utf-8")
    if len(SECTION.findall(old)) != old.count("<!-- benchmark:"):
        raise ValueError("every <!-- benchmark:NAME --> must be closed by <!-- /benchmark -->")

    def replace(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"a benchmark section must be one of {sorted(TABLES)}, got {name!r}")
        return f"{opening}{TABLES[name](results)}\n{closing}"

    new = SECTION.sub(replace, old)
    if old != new and is_check:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), str(page), "from the results", lineterm=""
        )
        print("\n".join(lines))
    elif old != new:
        page.write_text(new, encoding="utf-8")
    return old == new


# What stands below a table.


def describe_runs(data: Results, **where: Any) -> str:
    """Hardware, versions, dates and commands in one line: of some rows, or of the whole file."""
    meta = data["meta"]
    runs = [
        row["run"] for row in data.get("rows", ()) if where.items() <= row.items() and "run" in row
    ]
    if not runs:
        return describe_run(meta) if "versions" in meta else ""
    dates = sorted({run["date"] for run in runs})
    commands = list(dict.fromkeys(run["command"] for run in runs))
    more = len(commands) - _MOST_COMMANDS
    own = {
        "date": dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        "command": "`, `".join(commands[:_MOST_COMMANDS]),
    }
    text = describe_run(meta | own)
    return f"{text}, and {more} more in the file" if more > 0 else text


def describe_missing(data: Results) -> str:
    """A line on what a benchmark's file lacks of what was asked for; nothing of a whole one."""
    names = common.missing(data) if "asked" in data["meta"] else []
    if not names:
        return ""
    shown = "; ".join(names[:_MOST_NAMES])
    more = f"; and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    count = f"{len(names):,} of {len(data['meta']['asked']['rows']):,}"
    return f"**Not finished.** {count} measurements are missing: {shown}{more}."


def describe_absent(data: Results, spec: Mapping[str, Any]) -> str:
    """A line on the values of some fields that no row has; nothing if all are there."""
    rows, parts = some(data, **spec["where"]), []
    for field, values in spec["wanted"].items():
        there = {row[field] for row in rows}
        names = [f"{one:,}" if isinstance(one, int) else one for one in values if one not in there]
        parts += [f"{field} {', '.join(names)}"] if names else []
    names = common.missing(data) if "asked" in data["meta"] else []
    if names:
        parts.append(f"{len(names):,} of {len(data['meta']['asked']['rows']):,} rows asked for")
    return f"Not measured: {'; '.join(parts)} (`{spec['command']}`)." if parts else ""


def some(data: Results, **where: Any) -> list[Row]:
    """The rows with these values."""
    rows = data["rows"] if "rows" in data else data["tables"]
    return [row for row in rows if where.items() <= row.items()]


def _to_measure(command: str) -> str:
    return f"To measure: {command}."


# Tables of speeds.


class _Absent(Exception):
    """A field of a template that a row lacks."""


class _Template(string.Formatter):
    """Fills `{field/field:format}` from nested dictionaries, with the formats of `_FORMATS`."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Any) -> tuple[Any, str]:
        value = args[0]
        for part in field_name.split("/"):
            value = None if value is None else value.get(part)
        if value is None:
            raise _Absent
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return (
            _FORMATS[format_spec](value) if format_spec in _FORMATS else format(value, format_spec)
        )


def fill(template: str, row: Row | None) -> str:
    """A cell; a dash where the row lacks what it shows."""
    try:
        return NOTHING if row is None else _Template().vformat(template, (row,), {})
    except _Absent:
        return NOTHING


def _duration(value: tuple[float, float]) -> str:
    """A median in ms and the distance of its quartiles, in the unit that suits."""
    median, spread = value
    unit = "ms"
    if median < 1:
        median, spread, unit = median * 1e3, spread * 1e3, "µs"
    digits = 2 if median < 10 else 1 if median < 100 else 0
    return f"{median:.{digits}f} {unit} ({spread:.2g})"


def _seconds(values: dict[str, float]) -> str:
    """A median with its quartiles, in the unit that suits."""
    unit, factor = ("s", 1.0) if values["median"] >= 1 else ("ms", 1e3)
    low, middle, high = (values[name] * factor for name in ("q25", "median", "q75"))
    digits = 2 if middle < 10 else 1 if middle < 100 else 0
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f}–{high:.{digits}f})"


def _quartiles(digits: int, mark: str = "", unit: str = "") -> Callable[[dict[str, float]], str]:
    def text(values: dict[str, float]) -> str:
        low, middle, high = (f"{values[one]:,.{digits}f}" for one in ("q25", "median", "q75"))
        return f"{mark}{middle}{unit}{mark} ({low}–{high})"

    return text


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


_FORMATS: dict[str, Callable[[Any], str]] = {
    "duration": _duration,
    "median": lambda value: _duration(value).split(" (")[0],
    "seconds": _seconds,
    "speedup": _quartiles(1, "**", "×"),
    "quartiles": _quartiles(2),
    "rate": _quartiles(1),
    "bytes": _bytes,
    "mib": lambda count: f"{count / 2**20:,.0f}",
    "tera": lambda count: f"{count / 1e12:,.0f}",
    "phase": PHASE_TITLES.__getitem__,
    "policy": name_of,
    "sums": {"f32": "float32", "f16": "float16"}.__getitem__,
    "title": str.capitalize,
}


class Speeds:
    """A table of the rows of a benchmark, as `tables.toml` specifies it.

    A median `x_ms` with its spread `x_ms_iqr` is the field `x` of templates.

    Args:
      spec: Its entries.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Keeps the specification."""
        script = Path(spec["file"]).stem
        self.spec = {"where": {}, "command": f"python benchmarks/{script}.py"} | dict(spec)

    def __call__(self, results: Path) -> str:
        """The section, from the folder of results.

        Raises:
          ValueError: If they are of a run with `--quick`.
        """
        spec, path = self.spec, results / self.spec["file"]
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"meta": {}}
        if data["meta"].get("is_quick"):
            raise ValueError(f"{path.name} must be of a whole run, got one with --quick")
        table = self.table(data) if path.exists() else ""
        if not table:
            return _to_measure(f"`{spec['command']}`")
        facts = FACTS[spec["facts"]](data) if "facts" in spec else {}
        gaps = describe_absent(data, spec) if "wanted" in spec else describe_missing(data)
        note, runs = fill(spec.get("note", ""), data | facts), describe_runs(data, **spec["where"])
        return "\n\n".join(filter(None, [table, note, runs, gaps]))

    def table(self, data: Results) -> str:
        """The table alone, or one for each block."""
        spec, found = self.spec, dict[str, list[Row]]()
        rows = some(data, **spec["where"])
        for row in ROWS[spec["rows"]](data, rows) if "rows" in spec else rows:
            medians = [name for name in row if row.get(f"{name}_iqr") is not None]
            spreads = {name[:-3]: (row[name], row[f"{name}_iqr"]) for name in medians}
            found.setdefault(fill(spec.get("blocks", ""), row), []).append(row | spreads)
        blocks = []
        for title, own in found.items():
            blocks += [f"**{title}**"] if title else []
            blocks.append(self._block(own))
        return "\n\n".join(blocks)

    def _block(self, rows: Sequence[Row]) -> str:
        spec, lines, names = self.spec, list(rows), list[str]()
        if "by" in spec:
            grouped: dict[tuple[Any, ...], Row] = {}
            for row in rows:
                own = {name: row[name] for name in spec["by"]}
                names.append(fill(spec["across"], row))
                grouped.setdefault(tuple(own.values()), own)[names[-1]] = row
            lines = list(grouped.values())
        if "order" in spec:
            lines.sort(key=lambda line: [line[name] for name in spec["order"]])
        columns: dict[str, list[str]] = {}
        left = 0  # columns with names that are shown
        pairs = zip(spec["head"].split(" | "), spec["cells"].split(" | "), strict=True)
        for place, (title, template) in enumerate(pairs):
            own = {title: [fill(template, line) for line in lines]}
            if title == "*":
                own = {
                    name: [fill(template, line.get(name)) for line in lines]
                    for name in dict.fromkeys(names)
                }
            # A column of dashes alone says nothing.
            kept = {one: cells for one, cells in own.items() if {*cells} != {NOTHING}}
            left += place < spec.get("left", 1) and bool(kept)
            columns |= kept
        return markdown_table([*columns], [*zip(*columns.values(), strict=True)], num_names=left)


def attention_rows(_: Results, rows: Sequence[Row]) -> list[Row]:
    """Attention beside dense attention, and how many times fewer pairs it attends to."""
    rows = [row | {"fewer": 1 / row.get("attended_pairs", 1)} for row in rows if row["peer"]]
    if len({row["op"] for row in rows}) == 1:
        return rows
    return sorted(rows, key=lambda row: (row["op"] != "prefill", row["density"], row["tokens"]))


def kernel_selection_rows(_: Results, rows: Sequence[Row]) -> list[Row]:
    """Selection of a layer, in prompts first."""
    return [
        row | {"phase": phase}
        for phase in ("prefill", "decode")
        for row in rows
        if row["op"] == f"select_{phase}"
    ]


def warp_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """Attention by the kernel from Ampere on, over both forms of lists, beside two others."""
    for row in rows:
        forms = row["forms"]
        for lists, title in (("blocks", "blocks of 64"), ("pages", "pages of 16")):
            names = {"dense": "cudnn", "warps": f"warps_{lists}", "hopper": f"hopper_{lists}"}
            times = {
                name: (forms[form]["ms"], forms[form]["ms_iqr"])
                for name, form in names.items()
                if form in forms  # Hopper's runs on Hopper alone
            }
            found = row | times | {"lists": title, "tflops": forms[names["warps"]]["tflops"]}
            found["shape"] = "{}/{} × {}".format(*row["heads"], row["head_dim"])
            found["of_dense"] = times["dense"][0] / times["warps"][0]
            if "hopper" in times:
                found["of_hopper"] = times["hopper"][0] / times["warps"][0]
            yield found


def xla_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """Attention and selection by XLA beside the kernels and dense attention, a line each."""
    for row in rows:
        times = {name: (one["ms"], one["ms_iqr"]) for name, one in row["forms"].items()}
        found = row | times | {"phase": {"prefill": "a prompt", "decode": "a token"}[row["op"]]}
        found["share"] = times["selection"][0] / times["kernel"][0]
        yield found


def warp_facts(data: Results) -> Row:
    """The largest error, and whether second runs were equal."""
    checks = [one for row in data["rows"] for one in row["forms"].values() if "is_bit_equal" in one]
    unequal = sum(not one["is_bit_equal"] for one in checks)
    return {
        "worst": max(one["relative_error"] for one in checks),
        "unequal": f"{unequal} of {len(checks)} second runs were not equal"
        if unequal
        else "second runs were equal bit for bit",
    }


def code_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What the assembler makes of a kernel, a line for each GPU and shape."""
    for row in rows:
        if row["op"] == "linear":
            yield row | {"columns": " + ".join(f"{width:,}" for width in row["columns"])}
            continue
        shape = "{}/{} × {}".format(*row["heads"], row["head_dim"])
        lists = row["lists"] if "pages" in row["lists"] else f"blocks of {row['lists']}"
        yield row | {"shape": shape, "lists": lists}


def linear_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What the assembler makes of the kernel for few rows, a line for each product."""
    return (row for row in rows if "registers" in row)


def linear_facts(data: Results) -> Row:
    """Milliseconds of a token's linear layers, estimated for each type of weights."""
    tokens = [row for row in data["rows"] if "estimated_ms" in row]
    estimated = {row["dtype"]: row["estimated_ms"] for row in tokens}
    whole = {f"{row['dtype']}_token": row["tokens"][0]["estimated_ms"] for row in tokens}
    measured = {
        "measured": tokens[0]["measured_bfloat16_ms"],
        "measured_token": tokens[0]["tokens"][0]["bfloat16_ms"],
    }
    return estimated | whole | measured


def rate_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What a multiprocessor does in a cycle, with one kind of work alone."""
    wgmma = "64 × {columns} products in eight bits, left operand in {left}, sums in {sums:sums}"
    pieces = {"lines": "lines of 128 bytes", "rows": "rows of 64 bytes, one of each 512"}
    for row in rows:
        tma = f"keys to shared memory, in {pieces.get(row.get('keys_lie_in', ''))}"
        work = {"alu": "`{instruction}`", "wgmma": wgmma, "tma": tma}[row["op"]]
        yield row | {"work": fill(work, row)}


def selection_rows(data: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """Policies with what they are called, and how much faster than dense attention they are."""
    dense = {
        (row["phase"], row["tokens"]): row["attention_ms"] for row in some(data, policy="dense")
    }
    asked = {row["density"] for row in rows if row["policy"] != "dense"} - {None}
    nominal = " and ".join(f"{density:g}" for density in sorted(asked))
    for row in sorted(rows, key=lambda row: PHASES.index(row["phase"])):
        fields = "".join(f", `{name}={value:g}`" for name, value in row["fields"].items())
        what = "a whole prompt" if row["phase"] == "prefill" else "one token"
        own = {"name": name_of(row["preset"] or row["policy"]) + fields, "what": what}
        own |= {"nominal": nominal}
        if row["error"]:
            own |= {"lists": f"did not run: {row['error'].split(':')[0]}", "measured_density": None}
            own |= {f"{part}_ms_iqr": None for part in ("selection", "observe", "attention")}
        elif row["num_lists"] is not None:
            size, count = row["list_block_size"], row["num_lists"]
            unit = "tokens" if size == 1 else f"blocks of {size}"
            on = "" if row["attention_implementation"] == "mosaic_gpu" else ", XLA"
            own["lists"] = f"{'one' if count == 1 else count}, {unit}{on}"
        whole = dense.get((row["phase"], row["tokens"]))
        if whole is not None and row["selection_ms"] is not None and not row["error"]:
            own["ratio"] = whole / (row["selection_ms"] + row["attention_ms"])
        yield row | own


def share_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What selecting takes of a layer's time, by the rule as printed and by both recommended forms.

    Prompts of `recommended_blocks` with each number of queries that a plan may give a layer.
    """
    fields = ("phase", "density", "tokens", "preset")
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        by_queries = row["phase"] == "prefill" and row["preset"] == "recommended_blocks"
        queries = row["fields"].get("representatives", 0) if by_queries else 0
        if row["preset"] in ("paper", *RECOMMENDED) and not row["error"]:
            found.setdefault((*(row[field] for field in fields), queries), row)
    for key in sorted(found, key=lambda key: (PHASES.index(key[0]), -key[1], *key[2:])):
        row, queries = found[key], key[-1]
        selection, attention = row["selection_ms"], row["attention_ms"]
        name = name_of(key[3]) + (f", {queries} queries" if queries else "")
        own = {"name": name, "queries": queries or None, "ratio": selection / attention}
        yield row | own | {"share": selection / (selection + attention)}


# Policy or preset, and density, in the order of the columns.
_ORDER = (
    "transformers",
    "dense",
    *(f"`{one}` {d}" for one in (*RECOMMENDED, "paper") for d in (0.1, 0.2)),
)


def model_rows(data: Results, rows: Sequence[Row]) -> list[Row]:
    """Whole models in the order of the columns, with names, times and ratios.

    Beside a sparse policy stands the fastest dense attention to the same, in pieces or not.
    """
    same = ("model", "phase", "tokens", "batch")
    dense: dict[tuple[Any, ...], float] = {}
    found = []
    for row in rows:
        piece = row["chunk_size"] or 0
        shown = f" in {piece >> 10}K" if piece else ""
        name = "transformers" if row["implementation"] == "transformers" else row["policy"]
        if row["preset"]:
            name = f"{name_of(row['preset'])} {row['density']:g}"
        own: Row = {"name": name, "piece": piece, "length": f"{row['tokens']:,}{shown}"}
        own |= {"same": tuple(row[field] for field in same), "unit": "s"}
        if not row["error"]:
            value = row["seconds"]["median"]
            own |= {"of_floor": value / row["floor_seconds"], "value": value}
            if name == "dense":
                dense[own["same"]] = min(value, dense.get(own["same"], value))
            if row["phase"] == "decode":
                own |= {"value": 1e3 * value, "unit": "ms"}
        found.append(row | own)
    for row in found:
        if row["error"]:
            needed = row.get("needed_gib")
            row["shown"] = f"{needed:.0f} GiB" if needed else row["error"].split(":")[0]
            continue
        row["shown"] = f"{row['value']:.2f}"
        if row["name"].startswith("`") and row["same"] in dense:
            row["ratio"] = dense[row["same"]] / row["seconds"]["median"]
            row["shown"] += f" ({row['ratio']:.2f}×)"
    return sorted(found, key=lambda row: _ORDER.index(row["name"]))


TOKEN_TITLES = {"prefill": "First token", "decode": "Each further token"}


def weights_rows(data: Results, rows: Sequence[Row]) -> list[Row]:
    """Whole models by the type of their weights, each beside the fastest dense bfloat16."""
    same = ("phase", "tokens", "batch")
    dense: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["policy"] == "dense" and row["weights"] == "bfloat16" and not row["error"]:
            key = tuple(row[field] for field in same)
            dense[key] = min(row["seconds"]["median"], dense.get(key, math.inf))
    found = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own = some({"rows": rows}, weights=weights)
        for row in model_rows(data, own):
            beside = dense.get(tuple(row[field] for field in same))
            if beside is not None and not row["error"]:
                ratio = beside / row["seconds"]["median"]
                row["shown"] = f"{row['value']:.2f}" + (f" ({ratio:.2f}×)" if ratio != 1 else "")
                row["text"] = f"{row['value']:.2f} {row['unit']}"
                row["text"] += f", **{ratio:.2f}×**" if ratio != 1 else ""
                row["token"] = TOKEN_TITLES[row["phase"]]
            found.append(row | {"line": _ORDER.index(row["name"])})
    return found


def rate_facts(data: Results) -> Row:
    """The rates that floors go by, or from which to which they were in several runs."""
    facts = {}
    for name, digits in (("matmul_tflops", 0), ("matmul_float8_tflops", 0), ("copy_tb_per_s", 2)):
        found = [row["run"][name] for row in data["rows"] if name in row["run"]]
        ends = [f"{one:.{digits}f}" for one in (min(found), max(found))] if found else []
        facts[name] = "–".join(dict.fromkeys(ends))
    return facts


def _fastest(rows: Iterable[Row]) -> list[Row]:
    """The fastest of dense and recommended attention, where both were measured."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*row["same"], row["name"])
        is_shown = row["preset"] in (None, "recommended") and row["implementation"] == "ours"
        if is_shown and not row["error"]:
            if key not in best or row["value"] < best[key]["value"]:
                best[key] = row
    both = {row["same"] for row in best.values() if "ratio" in row}
    found = [row for row in best.values() if row["same"] in both]
    for row in found:
        row["token"] = TOKEN_TITLES[row["phase"]]
        ratio = f", **{row['ratio']:.2f}×**" if "ratio" in row else ""
        row["text"] = f"{row['value']:.2f} {row['unit']}{ratio}"
    return sorted(found, key=lambda row: row["phase"] == "decode")


def gain_rows(data: Results, rows: Sequence[Row], *, are_whole: bool = True) -> list[Row]:
    """What the main model gains at lengths that were measured in all columns, or at the others."""
    found = _fastest(model_rows(data, rows))
    counts = collections.Counter(row["tokens"] for row in found)
    most = max(counts.values(), default=0)
    return [row for row in found if (counts[row["tokens"]] == most) == are_whole]


def gain_facts(data: Results) -> Row:
    """Lengths without a line, and a decoded token of several sequences."""
    where = {"model": "llama-3.1-8b", "implementation": "ours"}
    others = ""
    for row in gain_rows(data, some(data, batch=1, **where), are_whole=False):
        start = f" {row['token']} of {row['tokens']:,} tokens:" if row["name"] == "dense" else ","
        others += f"{start} {row['text']} {'' if row['name'] == 'dense' else 'with '}{row['name']}"
    batches = []
    found = _fastest(model_rows(data, some(data, phase="decode", **where)))
    for batch in sorted({row["batch"] for row in found} - {1}):
        own = {(row["tokens"], row["name"]): row for row in found if row["batch"] == batch}
        tokens = max(tokens for tokens, name in own if name == _ORDER[2])
        sparse, dense = own[tokens, _ORDER[2]], own[tokens, "dense"]
        batches.append(
            f"{batch} sequences of {tokens:,} tokens decode a token each in {sparse['shown'][:-8]} "
            f"ms instead of {dense['shown']} ms (**{sparse['ratio']:.2f}×**)"
        )
    text = f" With {_ORDER[2]}, {', and '.join(batches)}." if batches else ""
    return {"others": f"{others}." if others else "", "batches": text}


def part_rows(data: Results, rows: Sequence[Row]) -> list[Row]:
    """What the GPU's kernels are busy with, at two lengths."""
    found = []
    for row in model_rows(data, rows):
        if row.get("parts_ms") and not row["piece"] and row["tokens"] in (2**14, 2**17):
            busy = sum(row["parts_ms"].values())
            found.append(row | {"idle": max(0.0, 1e3 * row["seconds"]["median"] - busy)})
    return sorted(found, key=lambda row: (row["phase"] == "decode", row["tokens"]))


def scaled_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """Rows beside one GPU, in tokens per second with as many sequences for each."""
    same = ("model", "tokens", "policy", "preset", "density")

    def key(row: Row, batch: int) -> tuple[Any, ...]:
        return (*(row[name] for name in same), batch)

    alone = {
        key(row, row["batch"]): row["batch"] / row["seconds"]["median"]
        for row in rows
        if row["axis"] == "one" and not row["error"]
    }
    axes = ("one", "sequence", "tensor", "data")
    places = {id(row): (row["model"], row["policy"] == "dense", row["tokens"]) for row in rows}
    for row in sorted(rows, key=lambda row: (*places[id(row)], axes.index(row["axis"]))):
        is_one = row["axis"] == "one"
        density = "" if row["policy"] == "dense" else f" {row['density']:g}"
        own: Row = {"name": name_of(row["preset"] or row["policy"]) + density}
        own["gpus"] = "one GPU" if is_one else f"`{row['axis']}` of {row['ranks']}"
        if row["error"]:
            own |= {"shown": row["error"].split(":")[0], "sent_bytes": None}
        else:
            value = row["seconds"]["median"]
            own["shown"] = f"{value * (1 if row['phase'] == 'prefill' else 1e3):.2f}"
            own["of_floor"] = value / row["floor_seconds"]
            rate = alone.get(
                key(row, row["batch"] // (row["ranks"] if row["axis"] == "data" else 1))
            )
            own["speedup"] = None if is_one or rate is None else row["batch"] / value / rate
        yield row | own


def rank_list_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What ranks select, beside each other and one GPU."""
    for row in rows:
        if row["error"]:
            yield row | {"equal": row["error"].split(":")[0]}
            continue
        differing, listed = row["differing_blocks"], row["listed_blocks"]
        equal = "bit-equal" if row["lists_equal_on_ranks"] else "**different**"
        others = f"{differing:,} of {listed:,} ({differing / listed:.2g})"
        yield row | {"equal": equal, "others": others}


def estimated_rows(data: Results, _: Any) -> Iterator[Row]:
    """What larger meshes should give; nothing unless parts and rates were measured."""
    for tensor, others in ((1, 1), (2, 1), (1, 2), (8, 1), (1, 8), (8, 8)):
        read, token = (
            scale_out.estimate(data, phase, tensor, others) for phase in ("prefill", "decode")
        )
        if read is None or token is None:
            return
        axis = {(1, 1): "one"}.get((tensor, others), "tensor" if others == 1 else "sequence")
        where = {"phase": "prefill", "axis": axis, "ranks": tensor * others, "error": None}
        where |= {"model": "llama-3.1-8b", "tokens": 2**17, "preset": scale_out.RULE.preset}
        measured = [row["seconds"]["median"] for row in some(data, **where)]
        own = {"gpus": tensor * others, "tensor": tensor, "others": others, "read": read}
        yield own | {"token": token, "measured": next(iter(measured), None)}


def listed_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What share of what a rank receives is on its lists; of a large model what that all is."""
    large = scale_out.SHAPES["llama-3.1-8b"]
    where = {"axis": "sequence", "batch": 1, "tokens": 2**17, "is_token": False}
    for row in rows:
        policy = SketchWalkConfig.recommended_blocks(density=row["density"])
        received = scale_out.sent_bytes(large, policy=policy, ranks=row["ranks"], **where)
        work = scale_out.prompt_flops(large, 2**17, row["density"]) / row["ranks"]
        layers = row["share_by_layer"]
        own = {"mean": np.mean(layers), "range": f"{min(layers):.2f}–{max(layers):.2f}"}
        own |= {"most": np.mean(row["most_by_layer"]), "work": work / large.num_layers}
        yield row | own | {"received": received / large.num_layers}


def retrieval_rows(data: Results, _: Any) -> Iterator[Row]:
    """How often the block of an answer is among the best of its row, by ranking."""
    least = SketchWalkConfig.recommended_blocks().budget(8)[-1]
    for model, about in data["meta"]["models"].items():
        rows = some(data, model=model)
        by_layer = [some({"rows": rows}, layer=layer) for layer in values_of(rows, "layer")]
        title = f"{model}, {about['tokens']:,} tokens ({len(rows)} pairs in {len(by_layer)} layers,"
        for name in rows[0]["ranks"] if rows else ():

            def recall(chosen: Sequence[Row], share: float, name: str = name) -> float:
                kept = [
                    row["ranks"][name] <= max(least, round(share * row["blocks"])) for row in chosen
                ]
                return float(np.mean(kept))

            own: Row = {"name": name, "title": f"{title} of {about['prompts']} prompts)"}
            own |= {f"best {one:g}": recall(rows, one) for one in retrieval.SHARES}
            many = [one for one in by_layer if len(one) >= retrieval.LEAST_PAIRS]
            own["worst"] = min((recall(one, 0.1) for one in many), default=None)
            for one in retrieval.LISTED if name == "recommended_blocks" else ():
                own["name"] = name_of(name)
                own[f"listed {one:g}"] = np.mean([row["listed"][f"{one:g}"] for row in rows])
            yield own


def narrow_rows(data: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """What narrow weights change, beside dense attention with the weights as they are.

    Intervals are Student's, of the texts' means, and of their differences for the loss.
    """
    for row in rows:
        where = {name: row[name] for name in ("model", "tokens")} | {"policy": "dense"}
        (base,) = some(data, **where, weights=data["meta"]["models"][row["model"]]["dtype"])
        own = {"attention": _attention(row["policy"], row["density"])}
        own |= {"loss_mean": np.mean(row["loss"]), "agreed": np.mean(row["agreement"])}
        own |= {"divergence": None, "beyond": None}
        if row is not base:
            low, high = mean_interval(row["kl"])
            own["divergence"] = f"{np.mean(row['kl']):.4f} ({low:.4f} to {high:.4f})"
            percent = 100 * np.subtract(row["loss"], base["loss"]) / np.mean(base["loss"])
            low, high = mean_interval(percent.tolist())
            own["beyond"] = _beyond_percent(percent.mean(), low, high)
        yield row | own


def _attention(label: str, density: float) -> str:
    """What a line with quantised weights is of."""
    return "dense" if label == "dense" else f"density {density:g}"


def _beyond_percent(mean: float, low: float, high: float) -> str:
    """A loss beyond another one, and its interval."""
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def ceiling_rows(_: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """Answers that a form of lists keeps, beside `shared` on the prompts that both have read.

    The interval is a paired bootstrap over prompts, of the difference in percentage points.
    """
    from scipy import stats

    for row in rows:
        own = {"share": sum(row["kept"]) / sum(row["asked"]), "prompts": len(row["kept"])}
        for name in ("measured_density", "asking_blocks", "text_loss"):
            own[name] = float(np.mean(row[name]))
        own["difference"] = own["interval"] = None
        where = {name: row[name] for name in ("model", "tokens", "density")}
        base = [one for one in rows if one["form"] == "shared" and where.items() <= one.items()]
        is_prompt = not row["form"].startswith("a token")
        if base and is_prompt and row["form"] != "shared":
            count = min(own["prompts"], len(base[0]["kept"]))
            arrays = [np.array(x[:count]) for x in (row["kept"], base[0]["kept"], row["asked"])]

            def points(kept: Any, others: Any, asked: Any, axis: int = -1) -> Any:
                return 100 * (kept - others).sum(axis=axis) / asked.sum(axis=axis)

            found = stats.bootstrap(
                arrays, points, paired=True, n_resamples=2000, method="percentile", rng=0
            )
            low, high = found.confidence_interval
            own["difference"] = f"{points(*arrays):+.0f}"
            own["interval"] = f"{low:+.0f} to {high:+.0f}"
        yield row | own


def ruler_rows(data: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """Scores with the mean density of the sparse layers over tasks."""
    for row in rows:
        found = [one["measured_density"] for one in some(data, policy=row["policy"])]
        own: Row = {"sparse_in": " and ".join(row["phases"])}
        for phase in ("prefill", "decode"):
            own[phase] = np.mean([one[phase].get("sparse_layers", 1.0) for one in found])
        yield row | own


def paper_rows(data: Results, rows: Sequence[Row]) -> Iterator[Row]:
    """The figures that the paper prints: dense attention once for each model, then by phase."""
    lines: dict[tuple[str, ...], Row] = {}
    for table in sorted(rows, key=lambda table: PHASES.index(table["phase"])):
        for row in table["rows"]:
            is_dense = row["method"] == "dense"
            phase, number = PHASE_TITLES[table["phase"]], str(table["table"])
            own = {"model": row["model"], "method": row["method"]}
            own |= {"sparse_in": "" if is_dense else phase, "table": "" if is_dense else number}
            values = dict(zip(table["columns"], row["values"], strict=True))
            lines.setdefault(
                (own["model"], own["sparse_in"], own["method"]), own | {"values": values}
            )
    models = list(dict.fromkeys(line["model"] for line in lines.values()))
    for line in sorted(lines.values(), key=lambda line: models.index(line["model"])):
        averages = [name for name in line["values"] if name.startswith("average_")]
        for name, value in line["values"].items():
            if not averages or name.startswith("average"):  # LongBench has too many columns
                yield line | {"column": name.replace("_", " "), "value": value}


def paper_statements(results: Path) -> str:
    """What the paper says of figures whose numbers it does not print."""
    data = json.loads((results / "paper.json").read_text(encoding="utf-8"))
    lines = []
    for one in data["statements"]:
        place = f"Figure {one['figure']}{one['panel'] or ''}" if one["figure"] else "abstract"
        lines.append(f"- {one['about'].capitalize()}: {one['text']} ({place}).")
    return "\n".join(lines)


ROWS: dict[str, Callable[[Results, list[Row]], Iterable[Row]]] = {
    make.__name__: make
    for make in (
        attention_rows,
        kernel_selection_rows,
        warp_rows,
        xla_rows,
        code_rows,
        linear_rows,
        rate_rows,
        selection_rows,
        share_rows,
        model_rows,
        weights_rows,
        gain_rows,
        part_rows,
        scaled_rows,
        rank_list_rows,
        estimated_rows,
        listed_rows,
        retrieval_rows,
        narrow_rows,
        ceiling_rows,
        ruler_rows,
        paper_rows,
    )
}
FACTS = {make.__name__: make for make in (rate_facts, gain_facts, warp_facts, linear_facts)}


# Tables of evaluations. A cell is made of the rows of its line and column, and of the rows that
# another policy has in their place.

Where = Mapping[str, Any]
Cell = Callable[[Sequence[Row], Callable[[str], list[Row]]], str]
_FEWER = "†"
_FEWER_NOTE = f"{_FEWER}: measured on some of the tasks alone"


def grid(
    rows: Sequence[Row],
    corner: Sequence[str],
    lines: Iterable[tuple[Sequence[str], Where]],
    columns: Mapping[str, tuple[Where, Cell]],
) -> str:
    """A table of an evaluation.

    Args:
      rows: Rows of one evaluation.
      corner: Titles of the columns with names.
      lines: The names of each line, and which rows it is of, as `rows_with` takes it.
      columns: By its title, which rows a column is of, and what makes a cell of them.

    Returns:
        A markdown table, without lines and columns of dashes alone.
    """
    body = []
    for names, of_line in lines:
        cells = []
        for of_column, cell in columns.values():
            where = {**of_line, **of_column}

            def other(label: str, where: Where = where) -> list[Row]:
                return rows_with(rows, **{**where, "label": label})

            cells.append(cell(rows_with(rows, **where), other))
        if {*cells} - {NOTHING, ""}:
            body.append([*names, *cells])
    kept = [one for one in zip([*corner, *columns], *body, strict=True) if {*one[1:]} - {NOTHING}]
    header, *body = zip(*kept, strict=True)
    return markdown_table(header, body, num_names=len(corner))


def _mark(rows: Sequence[Row], dense: Sequence[Row]) -> str:
    """A mark where a policy was measured on fewer tasks than dense attention."""
    own = tasks_of(rows)
    return _FEWER if own and len(own) < len(tasks_of(counted(dense))) else ""


def _right(rows: Sequence[Row], other: Callable[[str], list[Row]]) -> str:
    """The share of right answers."""
    found = pool(counted(rows))
    if found is None or found.exact is None:
        return NOTHING
    return f"{found.exact:.2f}{_mark(counted(rows), other('dense'))}"


def _interval(rows: Sequence[Row], other: Callable[[str], list[Row]]) -> str:
    """The same with its interval."""
    return share(pool(counted(rows))) + _mark(counted(rows), other("dense"))


def _beyond(base: str | Callable[[str], str], task: str | None = None) -> Cell:
    """Right answers beyond those of another policy, or the loss of a task beyond its loss."""

    def cell(rows: Sequence[Row], other: Callable[[str], list[Row]]) -> str:
        if not rows or is_dense(rows[0]):
            return "" if rows else NOTHING
        label = policy_label(rows[0])
        beside = other(base if isinstance(base, str) else base(label))
        if list(rows) == beside:
            return ""
        if task is None:
            return difference(counted(rows), counted(beside))
        return loss_difference(*(rows_with(own, task=task) for own in (rows, beside)))

    return cell


def _density(rows: Sequence[Row], _: Any) -> str:
    """Measured density of the sparse layers and of all layers."""
    return "" if rows and is_dense(rows[0]) else measured(pool(counted(rows)))


def _places(rows: Sequence[Row]) -> dict[str, Where]:
    """Densities below 1 and phases that were measured, by their titles."""
    return {
        f"Density {density}, {phase}": where
        for (density, phase), where in _each(rows, "density", "phase")
    }


def _each(rows: Sequence[Row], *fields: str, **where: Any) -> list[tuple[list[str], Where]]:
    """A line for each combination of the values of some fields, of lengths those of the model."""
    below = sorted((one for one in densities(rows) if one < 1), reverse=True)
    values: dict[str, tuple[Iterable[Any], Callable[[Any], str]]] = {
        "model": (dict.fromkeys(row.get("model") for row in rows), str),
        "tokens": (values_of(rows, "tokens"), "{:,}".format),
        "density": (below or [None], lambda one: "its own" if one is None else f"{one:g}"),
        "phase": (measured_phases(rows), lambda one: PHASE_TITLES[one].lower()),
    }
    found = []
    lengths = {(row.get("model"), row["tokens"]) for row in rows}
    for own in itertools.product(*(values[field][0] for field in fields)):
        if fields[:2] == ("model", "tokens") and own[:2] not in lengths:
            continue
        names = [values[field][1](one) for field, one in zip(fields, own, strict=True)]
        found.append((names, dict(zip(fields, own, strict=True)) | where))
    return found


def _policies(rows: Sequence[Row]) -> list[tuple[list[str], Where]]:
    """A line for each policy but dense attention: recommended first, exact ones last."""
    rank = {"recommended": -2, "recommended_blocks": -1, "oracle": 1, "oracle, max": 2}
    labels = sorted(policy_labels(rows), key=lambda label: rank.get(label, 0))
    return [([name_of(label)], {"label": label}) for label in labels if label != "dense"]


def _evaluated(
    file: str, make: Callable[[evaluations.Results], str], command: str
) -> Callable[[Path], str]:
    """A section of the results of an evaluation, which must be finished."""

    def section(results: Path) -> str:
        path = results / file
        return make(read_whole(path)) if path.exists() else _to_measure(command)

    return section


@functools.cache
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


def devices(results: Path) -> str:
    """What `sketchwalk bench` measured, file by file; the project's own machines come first."""
    paths = sorted((results / "devices").glob("*.json"), key=lambda path: path.name)
    paths.sort(key=lambda path: not path.name.startswith("own_"))
    found = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    return "\n\n".join(bench.tables(one["meta"], one["rows"]) for one in found)


# Models that follow instructions.

_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", re.IGNORECASE)
QUANTIZED_NAMES = ("-float8", "-int8", "-int4")  # ends of the names of models with such weights
_UNITS = {"m": ("million", 1e6), "b": ("billion", 1e9)}


def size_of(model: str) -> str:
    """What the name of a model says of its size, in words; nothing if it says nothing."""
    found = _SIZE.search(model)
    return f"{found[1]} {_UNITS[found[2].lower()][0]} parameters" if found else ""


def _reported(results: evaluations.Results, *, has_quantized: bool = False) -> list[Row]:
    """The rows that are reported, small models first; quantised weights have their own tables."""

    def parameters(model: str) -> float:
        found = _SIZE.search(model)
        return float(found[1]) * _UNITS[found[2].lower()][1] if found else 0.0

    found = []
    for model in sorted(values_of(results.rows, "model"), key=parameters):
        if model.endswith(QUANTIZED_NAMES) and not has_quantized:
            continue
        own = rows_with(results.rows, model=model)
        found += [row for row in own if row["stage"] == "report"]
    return found


def losses(results: evaluations.Results) -> str:
    """What the recommended policy keeps of dense attention's answers, for the front page."""
    rows, lines = _reported(results), []
    for (model, tokens), where in _each(rows, "model", "tokens", label="recommended"):
        named = ", ".join(filter(None, (size_of(model), f"{tokens} tokens")))
        lines.append(([f"{model}: {named}"], where))
    places = _places([row for row in rows if row["density"] in (None, 0.1, 0.2)])
    columns = {title: (where, _right) for title, where in places.items()}
    what = (
        "Of the answers that dense attention gets right, the share that `recommended` gets right "
        "too, when attention is sparse in prefill, in decode, or in both"
    )
    table = grid(rows, ["Model (all are small)"], lines, columns)
    return f"{table}\n\n{what}. {describe_whole(results)}"


def rounding(results: evaluations.Results) -> str:
    """What is kept where nothing is left out: kernels for lists that hold every page."""
    rows = results.rows
    lines = _each(rows, "model", "tokens", label="recommended, rounding")
    columns: dict[str, tuple[Where, Cell]] = {
        task_title(task): ({"task": task}, _interval) for task in tasks_of(counted(rows))
    }
    table = grid(rows, ["Model", "Tokens"], lines, columns)
    return f"{table}\n\n{describe_whole(results)}"


def eight_bits(results: evaluations.Results) -> str:
    """What weights of eight bits lose: on text, alone and with sparse attention; and of answers."""
    rows, lines = _reported(results, has_quantized=True), []
    narrow = [row for row in rows if row["model"].endswith(QUANTIZED_NAMES)]
    answered = tasks_of(counted(narrow))
    whole = [model for model in values_of(rows, "model") if not model.endswith(QUANTIZED_NAMES)]
    for model, weights in itertools.product(whole, ("", *QUANTIZED_NAMES)):
        others = [row for row in narrow if row["model"].startswith(model)]
        attentions = dict.fromkeys((policy_label(row), row["density"]) for row in others)
        for tokens, (label, density) in itertools.product(values_of(others, "tokens"), attentions):
            where = {"tokens": tokens, "label": label, "density": density, "phase": "both"}
            own = rows_with(rows, model=f"{model}{weights}", **where)
            if not own:
                continue
            row, *_ = rows_with(own, task="text_loss")
            (base,) = rows_with(rows, model=model, tokens=tokens, task="text_loss", label="dense")
            found = None if row is base else paired_loss_difference([row], [base])
            percent = 100 / base["text_loss"]
            ends = found and (percent * one for one in (found.mean, found.low, found.high))
            beyond = ends and _beyond_percent(*ends)
            dtype = weights.removeprefix("-") or results.meta["models"][model]["dtype"]
            attention = _attention(label, density)
            cells = f"{tokens:,}", dtype, attention, str(row["prompts"]), f"{row['text_loss']:.3f}"
            pools = (pool(counted(rows_with(own, task=task))) for task in answered)
            kept = [
                NOTHING if label == "dense" or one is None else f"{one.exact:.2f}" for one in pools
            ]
            lines.append((model, *cells, beyond or NOTHING, *kept))
    head = ["Model", "Tokens", "Weights", "Attention", "Texts", "Loss, nats"]
    head += ["Beyond the first line", *map(task_title, answered)]
    text = "Sparse in both phases; 95 % intervals of paired differences"
    if answered:
        text += "; right answers are those of the prompts that dense attention with the same "
        text += "weights answers"
    return f"{markdown_table(head, lines, num_names=4)}\n\n{text}. {describe_whole(results)}"


def continuations(results: evaluations.Results) -> str:
    """How far texts that go on under sparse attention differ from those under dense attention."""
    rows = _reported(results)
    lines = _each(rows, "model", "density", "phase", label="recommended")

    def number(name: str) -> Cell:
        return lambda found, _: f"{found[0][name]:.3f}" if found else NOTHING

    columns: dict[str, tuple[Where, Cell]] = {
        "Same likeliest token": ({}, number("agreement")),
        "KL divergence, nats": ({}, number("kl")),
        "Loss beyond dense, nats": ({}, _beyond("dense", "long_decode")),
    }
    table = grid(rows, ["Model", "Density", "Sparse in"], lines, columns)
    prompts, tokens = rows[0]["prompts"], rows[0]["tokens"]
    return (
        f"{table}\n\n{prompts} texts of {tokens:,} tokens, whose last 512 are decoded one by one. "
        f"{describe_whole(results)}"
    )


def by_task(results: evaluations.Results) -> str:
    """Where the recommended policy loses answers."""
    rows = without_parts(_reported(results))
    lines = _each(rows, "model", "tokens", "density", "phase", label="recommended")
    columns: dict[str, tuple[Where, Cell]] = {
        task_title(task): ({"task": task}, _right) for task in tasks_of(counted(rows))
    }
    columns |= {"All": ({}, _right)}
    return grid(rows, ["Model", "Tokens", "Density", "Sparse in"], lines, columns)


def losses_beyond(results: evaluations.Results) -> str:
    """Loss of text and of code that the recommended policy adds, nats per token."""
    rows = _reported(results)
    lines = _each(rows, "model", "tokens", "phase", label="recommended")
    columns: dict[str, tuple[Where, Cell]] = {
        f"{name}, density {density}": ({"task": task} | where, _beyond("dense", task))
        for name, task in (("Text", "text_loss"), ("Code", "code_loss"))
        for (density,), where in _each(rows, "density")
    }
    return grid(rows, ["Model", "Tokens", "Sparse in"], lines, columns)


def methods(results: evaluations.Results) -> str:
    """What every method keeps of each task at density 0.2, where rivals were measured."""
    rows, blocks = without_parts(_reported(results)), []
    for (model, tokens), where in _each(rows, "model", "tokens"):
        own = rows_with(rows, **where)
        if all(label.startswith(("dense", "recommended")) for label in policy_labels(own)):
            continue
        columns: dict[str, tuple[Where, Cell]] = {
            f"{task_title(task)}, {PHASE_TITLES[phase].lower()}": (
                {"task": task, "phase": phase, "density": 0.2},
                _right,
            )
            for phase in ("prefill", "decode")
            for task in tasks_of(counted(own))
        }
        blocks.append(f"**{model}, {tokens} tokens, density 0.2**")
        blocks.append(grid(own, ["Method"], _policies(own), columns))
    return "\n\n".join([*blocks, describe_whole(results)])


def summary(results: evaluations.Results, cell: Cell) -> str:
    """All tasks that count, by model and length, with a cell for each density and phase."""
    rows, blocks = _reported(results), []
    for (model, tokens), where in _each(rows, "model", "tokens"):
        own = rows_with(rows, **where)
        columns = {title: (where, cell) for title, where in _places(own).items()}
        blocks.append(f"**{model}, {tokens} tokens**")
        blocks.append(grid(own, ["Method"], _policies(own), columns))
    return "\n\n".join([*blocks, f"{_FEWER_NOTE}. {describe_whole(results)}"])


def instruction_data(results: evaluations.Results) -> str:
    """Every model and length: prompts, right answers by task, losses, long decoding."""
    rows = [row for row in results.rows if row["stage"] == "report"]
    blocks = [describe_models(results), drawn_table(rows)]
    for (model, tokens), where in _each(rows, "model", "tokens"):
        own = rows_with(rows, **where)
        blocks += _of_length(own, f"{model}, {tokens} tokens", longest(own)) if own else []
    left_out = [one for one in results.meta.get("not_run", ()) if one["stage"] == "report"]
    if left_out:
        parts = [
            f"`{one['preset'] or one['policy']}` at {one['density']:g} ({one['model']}, "
            f"{one['tokens']:,} tokens: at least {one['least_density_all_layers']:.3f})"
            for one in left_out
        ]
        text = "Not run, because dense layers and floors alone take more"
        blocks.append(f"{text}: {'; '.join(parts)}.")
    return "\n\n".join(blocks)


def describe_models(results: evaluations.Results) -> str:
    """Models, texts and settings, a line each."""
    meta = results.meta
    lines = []
    for name, one in meta["models"].items():
        hashes = ", ".join(f"`{value[:16]}`" for value in one["sha256"].values())
        lines.append(f"- `{name}`: {one['dtype']}; SHA-256 of its weights begins {hashes}")
    for name, one in meta["runs"].items():
        texts = " and ".join(
            f"{one[kind]['name']} (SHA-256 `{one[kind]['sha256'][:16]}`, the last "
            f"{one[kind]['tail']:.0%} of it)"
            for kind in ("text", "code")
        )
        lines.append(
            f"- Prompts for {name}: seed {one['seed']}, {one['prompts']} of each task, {texts}"
        )
    lines.append(f"- At most {meta['tries']} times as many prompts are drawn as are wanted")
    return "\n".join(lines)


def drawn_table(rows: Sequence[Row]) -> str:
    """Prompts kept of those drawn, as `50 of 61`; in brackets where a task counts in no mean."""
    rows = without_parts(row for row in rows_with(rows, label="dense") if row.get("drawn"))

    def drawn(found: Sequence[Row], _: Any) -> str:
        if not found:
            return NOTHING
        text = f"{sum(row['prompts'] for row in found)} of {found[0]['drawn']}"
        return text if found[0]["in_mean"] else f"({text})"

    columns = {task_title(task): ({"task": task}, drawn) for task in tasks_of(rows)}
    corner = ("Prompts that dense attention answers", "Tokens")
    return grid(rows, corner, _each(rows, "model", "tokens"), columns)


def _of_length(rows: Sequence[Row], title: str, tokens: int) -> list[str]:
    blocks = []
    nominal: list[float | None] = [*densities(rows)[::-1]] or [None]
    for density in nominal:
        for phase in measured_phases(rows):
            own = f"{title}, {density_title(density).lower()}"
            blocks.append(f"**{own}, sparse in {PHASE_TITLES[phase].lower()}**")
            blocks.append(accuracy_table(rows, phase=phase, density=density, tokens=tokens))
    for task in ("text_loss", "code_loss", "long_decode"):
        of_task = [{**row, "task": "text_loss"} for row in rows_with(rows, task=task)]
        if of_task:
            blocks.append(f"**{title}, {TASK_TITLES[task].lower()}**")
            blocks.append(loss_table(of_task, densities=nominal, tokens=tokens))
    return blocks


def parts(results: evaluations.Results) -> str:
    """Right answers and text loss beyond those of `recommended_blocks`, model by model."""

    def base(label: str) -> str:
        return "dense" if label == "recommended_blocks" else "recommended_blocks"

    blocks = []
    for (model, tokens), where in _each(results.rows, "model", "tokens"):
        own = rows_with(results.rows, **where)
        tasks = ", ".join(
            f"{task_title(row['task']).lower()} {row['prompts']}"
            for row in without_parts(counted(rows_with(own, label="dense")))
        )
        kinds = {"": None, "Text loss, ": "text_loss"}
        columns: dict[str, tuple[Where, Cell]] = {
            start + title: (place, _beyond(base, task))
            for start, task in kinds.items()
            for title, place in _places(own).items()
        }
        lines = [
            ([name.replace("recommended_blocks, ", "")], line) for (name,), line in _policies(own)
        ]
        blocks.append(f"**{model}, {tokens} tokens** (prompts: {tasks})")
        blocks.append(grid(own, ["Changed"], lines, columns))
    text = (
        "Right answers and text loss beyond those of the policy itself, whose own are beyond "
        "dense attention's; 95 % intervals of paired differences"
    )
    return "\n\n".join([*blocks, f"{text}. {describe_whole(results)}"])


# The model that ships with the package.


@functools.cache
def quality_sections(path: Path) -> dict[str, str]:
    """The sections of a quality report, by name."""
    return sections(read_whole(path), plots="../plots")


def quality_summary(results: evaluations.Results) -> str:
    """All tasks together at the highest density below 1."""
    density = max(one for one in densities(results.rows) if one < 1)
    tokens = longest(results.rows)
    table = summary_table(results.rows, density=density, tokens=tokens)
    what = f"Nominal density {density:g}, prompts of {tokens:,} tokens, 95 % intervals"
    return f"{table}\n\n{what}. {SUMMARY_NOTE} {describe_whole(results)}"


_METHOD = ("paper", "damped", "one_hop", "released")
_OTHERS = {"prefill": ("minference", "flexprefill"), "decode": ("quest", "adamas"), "both": ()}
_BYTES = tuple(f"decode_bytes_{name}" for name in ("keys", "values", "metadata"))


def comparison(results: evaluations.Results) -> str:
    """The paper's tables on the rows of an evaluation, at every density and phase.

    As there, policies that select in one phase are compared in that phase, beside every preset of
    Sketch-and-Walk.
    """
    rows = results.rows
    blocks = [dense_layers_text(rows)] if values_of(rows, "dense_layers") else []
    for density in [*densities(rows)[::-1]] or [None]:
        for phase in measured_phases(rows):
            table = comparison_table(rows, phase=phase, density=density)
            if table:
                title = f"{density_title(density)}, sparse in {PHASE_TITLES[phase].lower()}"
                blocks += [f"**{title}**", table]
    return "\n\n".join(blocks) or NOT_MEASURED


def comparison_table(rows: Sequence[Row], *, phase: str, density: float | None) -> str:
    """Right answers in one phase by length, all tasks with an answer together.

    Dense attention, the paper's rivals in this phase, and the presets; where decoding is sparse
    also the two protocols, and bytes at the longest length. Nothing if none of these was measured.
    """
    rows = [row for row in without_parts(rows) if row["exact"] is not None]
    known = ("dense", *_OTHERS[phase], *_METHOD)
    there = policy_labels(rows_with(rows, phase=phase, density=density))
    labels = [label for label in known if label in there]
    if {*labels} <= {"dense"}:
        return ""

    def right(found: Sequence[Row], _: Any) -> str:
        return share(pool(found))

    def asked(is_later: bool) -> Cell:
        def cell(found: Sequence[Row], _: Any) -> str:
            own = [row for row in found if (row["task"] in ANSWERED_TASKS) == is_later]
            return share(pool(own))

        return cell

    def layers(found: Sequence[Row], _: Any) -> str:
        if found and is_dense(found[0]):
            return "all"
        return ", ".join(map(str, values_of(found, "dense_layers"))) or NOTHING

    last = longest(rows)
    columns: dict[str, tuple[Where, Cell]] = {
        f"{tokens:,} tokens": ({"tokens": tokens}, right) for tokens in values_of(rows, "tokens")
    }
    columns["Average"] = ({}, right)
    if phase != "prefill":
        columns["A: question read"] = ({}, asked(is_later=False))
        columns["B: question decoded"] = ({}, asked(is_later=True))
    columns["Dense layers"] = ({}, layers)
    columns["Density: sparse / all layers"] = ({}, lambda found, _: measured(pool(found)))
    if phase != "prefill":
        columns[f"MiB read per token, {last:,} tokens: keys and values + metadata"] = (
            {"tokens": last},
            lambda found, other: bytes_read(found, other("dense")),
        )
    where = {"phase": phase, "density": density}
    lines = [([name_of(label)], {"label": label, **where}) for label in labels]
    return grid(rows, ["Policy"], lines, columns)


def bytes_read(rows: Sequence[Row], dense: Sequence[Row]) -> str:
    """MiB that one decoded token reads in all layers, `21.00 + 1.30 (0.33)`.

    Args:
      rows: Rows of one policy and length.
      dense: Rows of dense attention to the same prompts.

    Returns:
      Keys and values, then what selecting takes; and all of it as a share of dense attention's.
      A dash where the rows do not say.
    """
    own, whole = ([mean_of(found, name) for name in _BYTES] for found in (rows, dense))
    if None in own or None in whole:
        return NOTHING
    keys, values, metadata = (part / 2**20 for part in own if part is not None)
    everything = sum(part / 2**20 for part in whole if part is not None)
    text = f"{keys + values:.2f} + {metadata:.2f}"
    return f"{text} ({(keys + values + metadata) / everything:.2f})"


def dense_layers_text(rows: Sequence[Row]) -> str:
    """Which policies leave how many leading layers dense, in a sentence."""
    labels: dict[int, list[str]] = {}
    for label in policy_labels(rows):
        for count in values_of(rows_with(rows, label=label), "dense_layers"):
            labels.setdefault(count, []).append(f"`{label}`")
    if len(labels) == 1:
        return f"Leading layers that stay dense: {min(labels)}, whatever the policy."
    most = max(labels, key=lambda count: len(labels[count]))
    named = [
        f"{count} in {', '.join(names)}" for count, names in sorted(labels.items()) if count != most
    ]
    return f"Leading layers that stay dense: {'; '.join(named)}; {most} in the others."


# Ablations.

PRESETS = ("paper", "damped")


def ablations(results: evaluations.Results) -> str:
    """Each preset with one thing changed, then all densities, then what was run."""
    rows = results.rows
    density = base_density(rows)
    blocks = []
    anchors = [([name_of(label)], {"label": label}) for label in ("dense", "random")]
    for preset in PRESETS:
        if not rows_with(rows, label=preset, density=density):
            continue
        lines = [*anchors, ([name_of(preset)], {"label": preset})]
        for variant in variants_of(rows, preset):
            name = f"`{variant}`" if "=" in variant else variant
            lines.append(([name], {"label": f"{preset}, {variant}"}))
        at_density = [(names, {**where, "density": density}) for names, where in lines]
        blocks.append(f"**{name_of(preset)} with one thing changed, density {density:g}**")
        blocks.append(grid(rows, ["Changed"], at_density, _ablation_columns(preset)))
    every = [
        ([f"{name_of(label)}, {own:g}"], {"label": label, "density": own})
        for own in densities(rows)
        for label in ("random", *PRESETS)
    ]
    blocks += ["**Density**", grid(rows, ["Policy"], every, _ablation_columns("random"))]
    tasks = ", ".join(task_title(task).lower() for task in tasks_of(rows))
    return "\n\n".join([*blocks, f"Tasks with an answer: {tasks}. {describe_results(results)}"])


def _ablation_columns(base: str) -> dict[str, tuple[Where, Cell]]:
    def recall(found: Sequence[Row], _: Any) -> str:
        cells = []
        for phase in ("prefill", "decode"):
            own = [row["mass_recall"] for row in rows_with(found, phase=phase)]
            values = [value for value in own if value is not None]
            cells.append(f"{sum(values) / len(values):.2f}" if values else NOTHING)
        return "" if found and is_dense(found[0]) else " / ".join(cells)

    right: Cell = lambda found, _: share(pool(counted(found)))  # noqa: E731
    columns = {PHASE_TITLES[phase]: ({"phase": phase}, right) for phase in PHASES}
    for phase in ("prefill", "decode"):
        columns[f"{PHASE_TITLES[phase]}, beyond {name_of(base)}"] = (
            {"phase": phase},
            _beyond(base),
        )
    columns["Text loss beyond dense, prefill"] = (
        {"phase": "prefill"},
        _beyond("dense", "text_loss"),
    )
    columns["Mass recall, prefill / decode"] = ({}, recall)
    columns["Density, prefill: sparse / all layers"] = ({"phase": "prefill"}, _density)
    return columns


def base_density(rows: Sequence[Row]) -> float:
    """The density of what has one thing changed; without any, the highest."""
    found = {row["density"] for row in rows if row.get("variant")}
    return max(found or densities(rows))


def variants_of(rows: Sequence[Row], preset: str) -> list[str]:
    """The variants of a preset, in the order in which they were measured."""
    found = (row.get("variant") for row in rows if row["preset"] == preset)
    return [variant for variant in dict.fromkeys(found) if variant is not None]


_REAL = functools.partial(
    _evaluated, "real_models.json", command="`python benchmarks/real_models.py --model FILE.gguf`"
)
_ANSWERS = functools.partial(
    _evaluated,
    "answers.json",
    command="`python benchmarks/real_models.py --model FILE.gguf --policy sketchwalk --preset "
    "recommended recommended_blocks`",
)
_SHIPPED = functools.partial(
    _evaluated,
    "quality.json",
    command="`sketchwalk eval --out benchmarks/results/quality.json`",
)
EVALUATIONS = {
    "losses": _ANSWERS(losses),
    "methods": _ANSWERS(methods),
    "by-task": _ANSWERS(by_task),
    "text-loss": _ANSWERS(losses_beyond),
    "eight-bits-models": _ANSWERS(eight_bits),
    "continuations": _evaluated(
        "continuations.json",
        continuations,
        "`python benchmarks/real_models.py --model FILE.gguf --task long_decode`",
    ),
    "forms": _ANSWERS(functools.partial(summary, cell=_interval)),
    "methods-intervals": _REAL(functools.partial(summary, cell=_interval)),
    "real-data": _REAL(instruction_data),
    "rounding": _evaluated(
        "rounding.json",
        rounding,
        "`python benchmarks/real_models.py --model FILE.gguf --stage development`",
    ),
    "eight-bits": _evaluated(
        "eight_bits.json",
        eight_bits,
        "`python benchmarks/real_models.py --model FILE.gguf --task text_loss --weights float8`",
    ),
    "recommended-pages": _evaluated(
        "recommended_pages.json",
        functools.partial(summary, cell=_interval),
        "`python benchmarks/real_models.py --model FILE.gguf --policy sketchwalk --preset "
        "recommended recommended_blocks`",
    ),
    "recommended-parts": _evaluated(
        "recommended_parts.json",
        parts,
        "`python benchmarks/recommended_parts.py --model FILE.gguf`",
    ),
    "quality": _SHIPPED(quality_summary),
    "quality-comparison": _SHIPPED(comparison),
    "quality-claims": _SHIPPED(
        lambda results: claims.claims_text(claims.check_claims(results.rows))
    ),
    "quality-common": _evaluated(
        "quality_common.json",
        lambda results: f"{comparison(results)}\n\n{describe_whole(results)}",
        "`sketchwalk eval --policy minference --policy flexprefill --set dense_layers=2 "
        "--phase prefill --out benchmarks/results/quality_common.json`",
    ),
    "ablations": _evaluated("ablations.json", ablations, "`python benchmarks/ablations.py`"),
} | {
    f"quality-{name}": lambda results, name=name: (
        quality_sections(results / "quality.json")[name]
        if (results / "quality.json").exists()
        else _to_measure("`sketchwalk eval --out benchmarks/results/quality.json`")
    )
    for name in TITLES
}


def _speeds() -> dict[str, Speeds]:
    """The tables of `tables.toml`, where one may be like another but for some entries."""
    specs = tomllib.loads((HERE / "tables.toml").read_text(encoding="utf-8"))
    return {name: Speeds(specs.get(one.get("like"), {}) | one) for name, one in specs.items()}


TABLES: dict[str, Callable[[Path], str]] = {
    **_speeds(),
    **EVALUATIONS,
    "paper-statements": paper_statements,
    "devices": devices,
    "break-even": lambda results: break_even.sentence(results),
}


if __name__ == "__main__":
    sys.exit(main())
