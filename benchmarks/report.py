"""Writes the tables of README.md and QUALITY.md from the JSON results; no number is typed.

    python benchmarks/report.py            # rewrites the tables
    python benchmarks/report.py --check    # fails if they differ from the results

What is written stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->`.
"""

import argparse
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ablation_report
import kernel_report
import selection_report
from common import RESULTS, ROOT  # which finds the package in a checkout that is not installed

from sketchwalk_jax.evaluation.comparison import comparison
from sketchwalk_jax.evaluation.report import SUMMARY_NOTE, TITLES, describe_run, sections
from sketchwalk_jax.evaluation.summaries import densities, read_results
from sketchwalk_jax.evaluation.tables import PHASE_TITLES, longest, markdown_table, summary_table

PAGES = (ROOT / "README.md", *(ROOT / "benchmarks" / name for name in ("QUALITY.md", "KERNELS.md")))
SECTION = re.compile(r"(<!-- benchmark:([\w-]+) -->\n)(.*?)(<!-- /benchmark -->)", re.DOTALL)
Results = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    is_equal = [
        update(page, options.results, is_check=options.check) for page in options.page or PAGES
    ]
    return 0 if all(is_equal) or not options.check else 1


def draw_and_write(description: str | None, draw: Callable[[Path, Path], None]) -> None:
    """Draws figures, then rewrites the pages: what scripts with figures do.

    Args:
      description: Of the script, for its help.
      draw: Takes the folder of the results and that of the figures.
    """
    import matplotlib

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plots", type=Path, default=ROOT / "benchmarks" / "plots")
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    options = parser.parse_args()
    matplotlib.use("Agg")
    options.plots.mkdir(parents=True, exist_ok=True)
    draw(options.results, options.plots)
    for page in options.page or PAGES:
        update(page, options.results)


def update(page: Path, results: Path, *, is_check: bool = False) -> bool:
    """Rewrites a page, or only shows how it differs; returns whether it was right before."""
    old = page.read_text(encoding="utf-8")
    new = render(old, results)
    if old != new and is_check:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), str(page), "from the results", lineterm=""
        )
        print("\n".join(lines))
    elif old != new:
        page.write_text(new, encoding="utf-8")
    return old == new


def render(text: str, results: Path) -> str:
    """The text with every section replaced by its table."""
    if len(SECTION.findall(text)) != text.count("<!-- benchmark:"):
        raise ValueError("every <!-- benchmark:NAME --> must be closed by <!-- /benchmark -->")

    def replace(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"a benchmark section must be one of {sorted(TABLES)}, got {name!r}")
        file, make = TABLES[name]
        return f"{opening}{make(results / file)}\n{closing}"

    return SECTION.sub(replace, text)


def captioned(make: Callable[[Results], str]) -> Callable[[Path], str]:
    """A section of a file of speeds: its table, then hardware, versions, date and command."""

    def section(path: Path) -> str:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["meta"].get("is_quick"):
            raise ValueError(f"{path.name} must be of a whole run, got one with --quick")
        return f"{make(data)}\n\n{describe_run(data['meta'])}"

    return section


def measured(make: Callable[[Path], str], script: str) -> Callable[[Path], str]:
    """A section that says so where its results are missing, and what makes them."""

    def section(path: Path) -> str:
        return make(path) if path.exists() else f"*Not measured yet.* `python benchmarks/{script}`."

    return section


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
    return markdown_table(header, rows)


def prefill_table(data: Results) -> str:
    """Whole prefill."""
    rows = [
        [f"{tokens:,}", *(seconds(row["wall_s"]) for row in by_policy.values())]
        + [times(by_policy["sparse"]["speedup"])]
        for tokens, by_policy in select(data, "prefill").items()
    ]
    return markdown_table(("Prompt tokens", "Dense", "Sparse", "Faster"), rows)


def decode_table(data: Results) -> str:
    """One decode step at a full cache."""
    header = ("Cache tokens", "Dense", "Sparse", "Faster", "Cache", "Temporary memory, sparse")
    rows = []
    for tokens, by_policy in select(data, "decode").items():
        dense, sparse = by_policy["dense"], by_policy["sparse"]
        cells = [f"{tokens:,}", seconds(dense["wall_s"]), seconds(sparse["wall_s"])]
        cells += [times(sparse["speedup"]), mebibytes(sparse["cache_bytes"])]
        rows.append([*cells, mebibytes(sparse["temporary_bytes"])])
    return markdown_table(header, rows)


def start_table(data: Results) -> str:
    """The first call of `generate` and those after it, for one token."""
    rows = [
        [policy, f"{tokens:,}", f"{row['cold_s']:.1f} s", seconds(row["warm_s"])]
        for tokens, by_policy in select(data, "start").items()
        for policy, row in by_policy.items()
    ]
    return markdown_table(("", "Prompt tokens", "First call, compiling", "Later calls"), rows)


@functools.cache
def quality_sections(path: Path) -> dict[str, str]:
    """The sections of a quality report, by name."""
    if not path.exists():
        return dict.fromkeys(TITLES, UNMEASURED)
    return sections(read_results(path), plots="plots")


def quality_summary(path: Path) -> str:
    """All tasks together at the highest density below 1, for README.md."""
    if not path.exists():
        return UNMEASURED
    results = read_results(path)
    density = max(one for one in densities(results.rows) if one < 1)
    tokens = longest(results.rows)
    table = summary_table(results.rows, density=density, tokens=tokens)
    what = f"Nominal density {density:g}, prompts of {tokens:,} tokens, 95 % intervals"
    return f"{table}\n\n{what}. {SUMMARY_NOTE} {describe_run(results.meta)}"


def quality_common(path: Path) -> str:
    """The paper's tables where policies leave the same layers dense."""
    if not path.exists():
        return (
            "*Not measured yet.* `sketchwalk eval --policy minference --policy flexprefill --set "
            f"dense_layers=2 --phase prefill --out benchmarks/results/{path.name}`."
        )
    results = read_results(path)
    nominal = densities(results.rows)[::-1]
    return "\n\n".join([*comparison(results.rows, nominal), describe_run(results.meta)])


def paper_ruler(path: Path) -> str:
    """The paper's tables of RULER, as one."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return paper_table(data, "RULER")


def paper_longbench(path: Path) -> str:
    """The averages of the paper's tables of LongBench."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return paper_table(data, "LongBench", ("average", "average_without_passage_count"))


def paper_table(data: Results, benchmark: str, columns: Sequence[str] = ()) -> str:
    """Dense attention once for each model, then every method in every phase."""
    rows: dict[tuple[str, ...], list[str]] = {}
    sources = [one for one in data["tables"] if one["benchmark"] == benchmark]
    columns = columns or sources[0]["columns"]
    for source in sorted(sources, key=lambda one: list(PHASE_TITLES).index(one["phase"])):
        for row in source["rows"]:
            is_dense = row["method"] == "dense"
            phase = "" if is_dense else PHASE_TITLES[source["phase"]]
            values = dict(zip(source["columns"], row["values"], strict=True))
            numbers = [f"{values[column]:.2f}" for column in columns]
            table = "" if is_dense else str(source["table"])
            cells = [row["model"], phase, row["method"], *numbers, table]
            rows.setdefault((row["model"], phase, row["method"]), cells)
    titles = [column.replace("_", " ") for column in columns]
    order = sorted(rows, key=lambda key: list(dict.fromkeys(one[0] for one in rows)).index(key[0]))
    header = ("Model", "Sparse in", "Method", *titles, "Table")
    table = markdown_table(header, [rows[key] for key in order], num_names=3)
    return (
        f"{table}\n\n{data['meta']['source']}; {data['meta']['unit']}; {data['meta']['setting']}."
    )


def paper_statements(path: Path) -> str:
    """What the paper says of figures whose numbers it does not print."""
    data = json.loads(path.read_text(encoding="utf-8"))
    places = {
        one["about"]: f"Figure {one['figure']}{one['panel'] or ''}" if one["figure"] else "abstract"
        for one in data["statements"]
    }
    return "\n".join(
        f"- {one['about'].capitalize()}: {one['text']} ({places[one['about']]})."
        for one in data["statements"]
    )


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
    return f"{markdown_table(header, rows, num_names=2)}\n\n{what}. {describe_run(meta)}"


UNMEASURED = (
    "*Not measured yet.* `sketchwalk eval --out benchmarks/results/quality.json`, then "
    "`python benchmarks/quality.py`."
)

TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "cpu-attention": ("cpu.json", captioned(attention_table)),
    "cpu-prefill": ("cpu.json", captioned(prefill_table)),
    "cpu-decode": ("cpu.json", captioned(decode_table)),
    "cpu-start": ("cpu.json", captioned(start_table)),
    "kernels-prefill": ("kernels.json", captioned(kernel_report.prefill_table)),
    "kernels-decode": ("kernels.json", captioned(kernel_report.decode_table)),
    "kernels": ("kernels.json", captioned(kernel_report.summary_table)),
    "kernels-tuning": ("kernel_tuning.json", captioned(kernel_report.tuning_table)),
    "kernels-selection": ("kernels.json", captioned(kernel_report.selection_table)),
    "selection": (
        "selection.json",
        measured(captioned(selection_report.selection_tables), "selection.py"),
    ),
    "ablations": ("ablations.json", measured(ablation_report.ablation_tables, "ablations.py")),
    "quality": ("quality.json", quality_summary),
    "quality-common": ("quality_common.json", quality_common),
    "ruler": ("ruler.json", ruler_table),
    "paper-ruler": ("paper.json", paper_ruler),
    "paper-longbench": ("paper.json", paper_longbench),
    "paper-statements": ("paper.json", paper_statements),
} | {
    f"quality-{name}": ("quality.json", lambda path, name=name: quality_sections(path)[name])
    for name in TITLES
}


if __name__ == "__main__":
    sys.exit(main())
