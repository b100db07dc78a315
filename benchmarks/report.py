"""Writes the tables of README.md from the JSON results; no number in them is typed.

    python benchmarks/report.py            # rewrites the tables
    python benchmarks/report.py --check    # fails if they differ from the results

A table stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->`.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(<!-- benchmark:([\w-]+) -->\n)(.*?)(<!-- /benchmark -->)", re.DOTALL)
Results = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    new = render(old, options.results)
    if old == new:
        return 0
    if options.check:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), str(options.readme), "from the results", lineterm=""
        )
        print("\n".join(lines))
        return 1
    options.readme.write_text(new, encoding="utf-8")
    return 0


def render(text: str, results: Path) -> str:
    """The text with every section replaced by its table."""
    if len(SECTION.findall(text)) != text.count("<!-- benchmark:"):
        raise ValueError("every <!-- benchmark:NAME --> must be closed by <!-- /benchmark -->")

    def replace(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"a benchmark section must be one of {sorted(TABLES)}, got {name!r}")
        file, make = TABLES[name]
        data = json.loads((results / file).read_text(encoding="utf-8"))
        if data["meta"].get("is_quick"):
            raise ValueError(f"{file} must be of a whole run, got one with --quick")
        return f"{opening}{make(data)}\n\n{caption(data['meta'])}\n{closing}"

    return SECTION.sub(replace, text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def caption(meta: dict[str, Any]) -> str:
    """Hardware, versions, date and command."""
    versions = meta["versions"]
    machine = f"{meta['cpu']}, {meta['cores']} cores, {meta['memory_gib']} GiB"
    if meta["device"] != "cpu":
        machine = f"{meta['device']} in a machine with {machine}"
    return (
        f"{machine}; "
        f"Python {versions['python']}, JAX {versions['jax']}; {meta['date']}; "
        f"`{meta['command']}`"
    )


def select(data: Results, part: str) -> dict[int, dict[str, Any]]:
    """Rows of one part of the CPU benchmark, by tokens and policy."""
    chosen: dict[int, dict[str, Any]] = {}
    for row in data["rows"]:
        if row["part"] == part:
            chosen.setdefault(row["tokens"], {})[row["policy"]] = row
    return chosen


def seconds(values: dict[str, float]) -> str:
    """A median with its quartiles, in the unit that suits."""
    unit, factor = ("s", 1.0) if values["median"] >= 1 else ("ms", 1e3)
    low, middle, high = (values[name] * factor for name in ("q25", "median", "q75"))
    digits = 2 if middle < 10 else 1 if middle < 100 else 0
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f}–{high:.{digits}f})"


def times(values: dict[str, float]) -> str:
    """A speed-up with its quartiles."""
    return f"**{values['median']:.1f}×** ({values['q25']:.1f}–{values['q75']:.1f})"


def mebibytes(count: int) -> str:
    """Bytes for reading."""
    return f"{count / 2**20:.0f} MiB"


def attention_table(data: Results) -> str:
    """One attention layer."""
    header = ("Tokens", "Dense", "Sparse: selection and attention", "Faster", "Attention alone")
    header += ("Temporary memory, dense / sparse",)
    rows = []
    for tokens, by_policy in select(data, "attention").items():
        dense, sparse = by_policy["dense"], by_policy["sparse"]
        alone = by_policy["sparse, attention alone"]
        cells = [f"{tokens:,}", seconds(dense["wall_s"]), seconds(sparse["wall_s"])]
        cells += [times(sparse["speedup"]), seconds(alone["wall_s"])]
        held = [mebibytes(row["temporary_bytes"]) for row in (dense, sparse)]
        rows.append([*cells, " / ".join(held)])
    return table(header, rows)


def prefill_table(data: Results) -> str:
    """Whole prefill."""
    rows = [
        [f"{tokens:,}", *(seconds(row["wall_s"]) for row in by_policy.values())]
        + [times(by_policy["sparse"]["speedup"])]
        for tokens, by_policy in select(data, "prefill").items()
    ]
    return table(("Prompt tokens", "Dense", "Sparse", "Faster"), rows)


def decode_table(data: Results) -> str:
    """One decode step at a full cache."""
    header = ("Cache tokens", "Dense", "Sparse", "Faster", "Cache", "Temporary memory, sparse")
    rows = []
    for tokens, by_policy in select(data, "decode").items():
        dense, sparse = by_policy["dense"], by_policy["sparse"]
        cells = [f"{tokens:,}", seconds(dense["wall_s"]), seconds(sparse["wall_s"])]
        cells += [times(sparse["speedup"]), mebibytes(sparse["cache_bytes"])]
        rows.append([*cells, mebibytes(sparse["temporary_bytes"])])
    return table(header, rows)


def start_table(data: Results) -> str:
    """The first call of `generate` and those after it, for one token."""
    rows = [
        [policy, f"{tokens:,}", f"{row['cold_s']:.1f} s", seconds(row["warm_s"])]
        for tokens, by_policy in select(data, "start").items()
        for policy, row in by_policy.items()
    ]
    return table(("", "Prompt tokens", "First call, compiling", "Later calls"), rows)


def needles_table(data: Results) -> str:
    """Right answers by preset and phase."""
    phases = {"both": "Prefill and decode", "prefill": "Prefill only", "decode": "Decode only"}
    names = {"dense": "dense", "full": "`paper`, density 1.0"}
    by_name: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        by_name.setdefault(row["name"], {})[row["phase"]] = row
    rows = []
    for name, by_phase in by_name.items():
        measured = by_phase["both"]["measured_density"]
        pair = (measured["overall"], measured["prefill_sparse_layers"])
        cells = [right(by_phase[phase]) if phase in by_phase else "" for phase in phases]
        rows.append([names.get(name, f"`{name}`"), *cells, f"{pair[0]:.2f} / {pair[1]:.2f}"])
    header = ("Right answers, sparse in", *phases.values())
    header += ("Measured density, all layers / sparse layers",)
    return table(header, rows)


def right(row: dict[str, Any]) -> str:
    """Right answers with the interval of their share."""
    low, high = row["interval"]
    return f"{row['exact']} of {row['count']} ({low:.2f}–{high:.2f})"


TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "cpu-attention": ("cpu.json", attention_table),
    "cpu-prefill": ("cpu.json", prefill_table),
    "cpu-decode": ("cpu.json", decode_table),
    "cpu-start": ("cpu.json", start_table),
    "needles": ("needles.json", needles_table),
}


if __name__ == "__main__":
    sys.exit(main())
