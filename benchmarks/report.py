"""Writes the tables of README.md, QUALITY.md and KERNELS.md from the JSON results, and break-evens.

    python benchmarks/report.py            # rewrites the tables
    python benchmarks/report.py --check    # fails if they differ from the results

No number is typed.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ablation_report
import break_even
import claims
import comparison
import end_to_end_report
import kernel_report
import listed_blocks
import real_report
import recommended_parts
import retrieval
import scale_out_report
import selection_report
from common import RESULTS  # which finds the package in a checkout that is not installed
from pages import (
    PAGES,
    Results,
    Tables,
    captioned,
    describe_missing,
    describe_whole,
    if_measured,
    read_whole,
    update,
)

from sketchwalk_jax.evaluation.report import SUMMARY_NOTE, TITLES, describe_run, sections
from sketchwalk_jax.evaluation.tables import densities, longest, markdown_table, summary_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    is_equal = [
        update(page, options.results, TABLES, is_check=options.check)
        for page in options.page or PAGES
    ]
    if not options.page:
        is_equal.append(break_even.update_table(options.results, is_check=options.check))
    return 0 if all(is_equal) or not options.check else 1


def cpu_rows(data: Results, part: str) -> dict[int, dict[str, Any]]:
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


def cpu_attention_table(data: Results) -> str:
    """One attention layer."""
    header = ("Tokens", "Dense", "Sparse: selection and attention", "Faster", "Attention alone")
    header += ("Temporary memory, dense / sparse",)
    rows = []
    for tokens, by_policy in cpu_rows(data, "attention").items():
        dense, sparse = by_policy["dense"], by_policy["sparse"]
        alone = by_policy["sparse, attention alone"]
        cells = [f"{tokens:,}", seconds(dense["wall_s"]), seconds(sparse["wall_s"])]
        cells += [times(sparse["speedup"]), seconds(alone["wall_s"])]
        held = [mebibytes(row["temporary_bytes"]) for row in (dense, sparse)]
        rows.append([*cells, " / ".join(held)])
    return markdown_table(header, rows)


def cpu_prefill_table(data: Results) -> str:
    """Whole prefill."""
    rows = [
        [f"{tokens:,}", *(seconds(row["wall_s"]) for row in by_policy.values())]
        + [times(by_policy["sparse"]["speedup"])]
        for tokens, by_policy in cpu_rows(data, "prefill").items()
    ]
    return markdown_table(("Prompt tokens", "Dense", "Sparse", "Faster"), rows)


def cpu_decode_table(data: Results) -> str:
    """One decode step at a full cache."""
    header = ("Cache tokens", "Dense", "Sparse", "Faster", "Cache", "Temporary memory, sparse")
    rows = []
    for tokens, by_policy in cpu_rows(data, "decode").items():
        dense, sparse = by_policy["dense"], by_policy["sparse"]
        cells = [f"{tokens:,}", seconds(dense["wall_s"]), seconds(sparse["wall_s"])]
        cells += [times(sparse["speedup"]), mebibytes(sparse["cache_bytes"])]
        rows.append([*cells, mebibytes(sparse["temporary_bytes"])])
    return markdown_table(header, rows)


def cpu_start_table(data: Results) -> str:
    """The first call of `generate` and those after it, for one token."""
    rows = [
        [policy, f"{tokens:,}", f"{row['cold_s']:.1f} s", seconds(row["warm_s"])]
        for tokens, by_policy in cpu_rows(data, "start").items()
        for policy, row in by_policy.items()
    ]
    return markdown_table(("", "Prompt tokens", "First call, compiling", "Later calls"), rows)


@functools.cache
def quality_sections(path: Path) -> dict[str, str]:
    """The sections of a quality report, by name."""
    return sections(read_whole(path), plots="plots")


def quality_summary(path: Path) -> str:
    """All tasks together at the highest density below 1, for README.md."""
    results = read_whole(path)
    density = max(one for one in densities(results.rows) if one < 1)
    tokens = longest(results.rows)
    table = summary_table(results.rows, density=density, tokens=tokens)
    what = f"Nominal density {density:g}, prompts of {tokens:,} tokens, 95 % intervals"
    return f"{table}\n\n{what}. {SUMMARY_NOTE} {describe_whole(results)}"


def quality_claims(path: Path) -> str:
    """What becomes of each claim on these results."""
    return claims.claims_text(claims.check_claims(read_whole(path).rows))


def ruler_table(path: Path) -> str:
    """Scores of the tasks in the lm-evaluation-harness, policy by policy."""
    data = json.loads(path.read_text(encoding="utf-8"))
    meta = data["meta"]
    tasks = list(dict.fromkeys(row["task"] for row in data["rows"]))
    by_policy: dict[str, dict[str, Results]] = {}
    for row in data["rows"]:
        by_policy.setdefault(row["policy"], {})[row["task"]] = row
    rows = []
    for policy, found in by_policy.items():
        some = found[tasks[0]]
        cells = ["dense" if policy == "dense" else f"`{policy}`", " and ".join(some["phases"])]
        cells += [f"{found[task]['score']:.2f}" for task in tasks]
        for phase in ("prefill", "decode"):
            values = [row["measured_density"][phase] for row in found.values()]
            shares = [one.get("sparse_layers", 1.0) for one in values]
            cells.append(f"{sum(shares) / len(shares):.2f}")
        rows.append(cells)
    header = ("Policy", "Sparse in", *(f"`{task}`" for task in tasks))
    header += ("Density, prefill", "Density, decode")
    what = (
        f"Mean score of {meta['samples']} prompts of each task, {meta['tokens']:,} tokens, nominal "
        f"density {meta['density']:g}, {meta['dtype']}; measured density of the sparse layers, "
        f"mean over tasks. lm-eval {meta['harness']}"
    )
    table = markdown_table(header, rows, num_names=2)
    return "\n\n".join([table, f"{what}. {describe_run(meta)}", *describe_missing(data)])


def _of_quality(make: Callable[[Path], str]) -> tuple[str, Callable[[Path], str]]:
    command = "`sketchwalk eval --out benchmarks/results/quality.json`, then "
    return "quality.json", if_measured(make, f"{command}`python benchmarks/quality.py`")


TABLES: Tables = (
    {
        "cpu-attention": ("cpu.json", captioned(cpu_attention_table)),
        "cpu-prefill": ("cpu.json", captioned(cpu_prefill_table)),
        "cpu-decode": ("cpu.json", captioned(cpu_decode_table)),
        "cpu-start": ("cpu.json", captioned(cpu_start_table)),
        "quality": _of_quality(quality_summary),
        "quality-comparison": _of_quality(comparison.quality_comparison),
        "quality-claims": _of_quality(quality_claims),
        "ruler": ("ruler.json", ruler_table),
    }
    | {
        f"quality-{name}": _of_quality(lambda path, name=name: quality_sections(path)[name])
        for name in TITLES
    }
    | break_even.TABLES
    | kernel_report.TABLES
    | selection_report.TABLES
    | end_to_end_report.TABLES
    | scale_out_report.TABLES
    | listed_blocks.TABLES
    | ablation_report.TABLES
    | comparison.TABLES
    | real_report.TABLES
    | recommended_parts.TABLES
    | retrieval.TABLES
)


if __name__ == "__main__":
    sys.exit(main())
