"""The tables of `results/selection.json`: what selecting costs, beside the attention it saves.

    python benchmarks/selection.py           # on a Hopper GPU
    python benchmarks/selection_report.py    # writes the tables

So does `report.py`, with all others.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import Results, Tables, captioned, duration, if_measured, write_own_tables

from sketchwalk_jax.evaluation.tables import NOTHING, PHASE_TITLES, markdown_table, name_of
from sketchwalk_jax.policies.recommended import RecommendedConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
_SHARE, _DPI = "selection_share.json", 120
USUAL_QUERIES = RecommendedConfig().representatives  # of a row, without a plan
_HEADER = (
    "Tokens",
    "Policy",
    "Lists",
    "Density",
    "Selection",
    "Of it, observing",
    "Attention over the lists",
    "Both, faster than dense",
)


def selection_tables(data: Results) -> str:
    """A table for each phase, the policies in the order in which they were measured."""
    some = data["rows"][0]
    asked = {row["density"] for row in data["rows"] if row["policy"] != "dense"} - {None}
    nominal = " and ".join(f"{density:g}" for density in sorted(asked))
    heads = f"{some['num_heads']}/{some['num_kv_heads']} heads of {some['head_dim']}"
    blocks = []
    for phase in ("prefill", "decode"):
        what = "a whole prompt" if phase == "prefill" else "one token"
        blocks.append(
            f"**{PHASE_TITLES[phase]}: one layer, {what}, batch {some['batch']}, {heads}, "
            f"{some['dtype']}, nominal density {nominal}**"
        )
        blocks.append(_table([row for row in data["rows"] if row["phase"] == phase]))
    return "\n\n".join(blocks)


def _table(rows: list[Row]) -> str:
    dense = {row["tokens"]: row["attention_ms"] for row in rows if row["policy"] == "dense"}
    body = [
        [f"{row['tokens']:,}", _name(row), *_cells(row, dense.get(row["tokens"]))] for row in rows
    ]
    return markdown_table(_HEADER, body, num_names=3)


def _name(row: Row) -> str:
    name = name_of(row["preset"] or row["policy"])
    fields = ", ".join(f"`{field}={value:g}`" for field, value in row["fields"].items())
    return f"{name}, {fields}" if fields else name


def _cells(row: Row, dense_ms: float | None) -> list[str]:
    if row["error"]:
        return [f"did not run: {row['error'].split(':')[0]}", *[NOTHING] * (len(_HEADER) - 3)]
    times = [
        duration(row, part) if row[f"{part}_ms"] is not None else NOTHING
        for part in ("selection", "observe", "attention")
    ]
    density = row["measured_density"]
    faster = NOTHING
    if dense_ms is not None and row["selection_ms"] is not None:
        ratio = dense_ms / (row["selection_ms"] + row["attention_ms"])
        faster = f"**{ratio:.{1 if ratio >= 1 else 2}f}×**"
    return [_lists(row), NOTHING if density is None else f"{density:.2f}", *times, faster]


def _lists(row: Row) -> str:
    """How many lists a row of queries has, of what."""
    if row["num_lists"] is None:
        return NOTHING
    size = row["list_block_size"]
    unit = "tokens" if size == 1 else f"blocks of {size}"
    shared = "one" if row["num_lists"] == 1 else str(row["num_lists"])
    on = "" if row["attention_implementation"] == "mosaic_gpu" else ", XLA"
    return f"{shared}, {unit}{on}"


# What selecting takes of a layer's time


def mean_over_plan(data: Results, *, tokens: int, density: float, part: str) -> float | None:
    """Milliseconds of the recommended policy in prompts, over the layers of the costlier plan."""
    by_count = {
        str(row["fields"]["representatives"]): row[f"{part}_ms"]
        for row in _share_rows(data, "recommended", "prefill", tokens, density)
    }
    found = []
    for plan in data["meta"]["plans"]:
        queries = plan["queries"][f"{density:g}"]
        if all(by_count.get(count) is not None for count in queries):
            total = sum(number * by_count[count] for count, number in queries.items())
            found.append(total / sum(queries.values()))
    return max(found, default=None)


def _share_rows(data: Results, preset: str, phase: str, tokens: int, density: float) -> list[Row]:
    where = {"preset": preset, "phase": phase, "tokens": tokens, "density": density}
    return [row for row in data["rows"] if where.items() <= row.items() and not row["error"]]


def shares(data: Results) -> list[Row]:
    """Times and shares of the rule as printed and of the recommended policy.

    Prompts of the recommended policy by the costlier plan, or, where no plan was named, with each
    number of queries of a row.
    """
    found = []
    has_plans = bool(data["meta"]["plans"])
    for phase in ("prefill", "decode"):
        for density in sorted({row["density"] for row in data["rows"]} - {1.0}, reverse=True):
            for tokens in sorted({row["tokens"] for row in data["rows"]}):
                for preset in ("paper", "recommended"):
                    rows = _share_rows(data, preset, phase, tokens, density)
                    if not rows:
                        continue
                    by_queries = preset == "recommended" and phase == "prefill"
                    for row in rows if by_queries and not has_plans else rows[:1]:
                        times = {part: row[f"{part}_ms"] for part in ("selection", "attention")}
                        queries = row["fields"].get("representatives") if by_queries else None
                        if by_queries and has_plans:
                            queries = None
                            times["selection"] = mean_over_plan(
                                data, tokens=tokens, density=density, part="selection"
                            )
                        if None in times.values():
                            continue
                        share = times["selection"] / sum(times.values())
                        names = {"phase": phase, "density": density, "tokens": tokens}
                        names |= {"preset": preset, "queries": queries}
                        found.append(names | {"share": share} | times)
    return found


def share_table(data: Results) -> str:
    """Milliseconds of one layer, and what selecting is of attention and of both."""
    body = [
        [
            PHASE_TITLES[one["phase"]],
            f"{one['density']:g}",
            f"{one['tokens']:,}",
            name_of(one["preset"]) + (f", {one['queries']} queries" if one["queries"] else ""),
            f"{one['selection']:.3g} ms",
            f"{one['attention']:.3g} ms",
            f"{one['selection'] / one['attention']:.0%}",
            f"{one['share']:.0%}",
        ]
        for one in shares(data)
    ]
    header = ("Sparse in", "Density", "Tokens", "Policy", "Selection, observing included")
    header = (*header, "Attention over the lists", "Of attention", "Of both")
    plans = [
        f"{plan['model']} ({plan['layers']} layers): "
        + ", ".join(
            f"{number} layers of {count} queries"
            for count, number in plan["queries"][f"{max(map(float, plan['queries'])):g}"].items()
        )
        for plan in data["meta"]["plans"]
    ]
    what = (
        "Prompts by the costlier of the plans, as a mean over its layers. At the larger density: "
        f"{'; '.join(plans)}"
    )
    if not plans:
        what = (
            f"`recommended` with each number of queries of a row that a plan may give a layer; "
            f"{USUAL_QUERIES} without a plan, and in the figure"
        )
    picture = "![Selection's share of a layer's time, by context](plots/selection_share.png)"
    return f"{picture}\n\n{markdown_table(header, body, num_names=4)}\n\n{what}."


def draw_share(results: Path, plots: Path) -> None:
    """Draws the figure, if it was measured."""
    path = results / _SHARE
    if path.exists():
        share_figure(read_rows(path)).savefig(plots / "selection_share.png", dpi=_DPI)


def read_rows(path: Path) -> Results:
    """The results in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def share_figure(data: Results) -> "Figure":
    """Selection's share of selection and attention, against the context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    found = shares(data)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, phase in zip(panels, ("prefill", "decode"), strict=True):
        own = [one for one in found if one["phase"] == phase]
        for preset, color in (("paper", "#D55E00"), ("recommended", "#0072B2")):
            for density, style in ((0.2, "-"), (0.1, "--")):
                line = [
                    (one["tokens"], one["share"])
                    for one in own
                    if (one["preset"], one["density"]) == (preset, density)
                    and one["queries"] in (None, USUAL_QUERIES)
                ]
                if line:
                    label = f"{preset}, density {density:g}"
                    panel.plot(
                        *zip(*line, strict=True), style, color=color, marker="o", label=label
                    )
        panel.set_xscale("log", base=2)
        ticks = sorted({one["tokens"] for one in own})
        panel.set_xticks(ticks, [f"{tokens // 1024}K" for tokens in ticks])
        panel.set_ylim(0, 1)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panel.set_title("a whole prompt" if phase == "prefill" else "one token", fontsize=10)
        panel.set_xlabel("tokens")
        panel.grid(axis="y", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("selection's share of a layer's\nselection and attention")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


TABLES: Tables = {
    "selection-share": (
        _SHARE,
        if_measured(captioned(share_table), "`python benchmarks/selection.py --share`"),
    ),
    "selection": (
        "selection.json",
        if_measured(captioned(selection_tables), "`python benchmarks/selection.py`"),
    ),
}


if __name__ == "__main__":
    write_own_tables(__doc__, TABLES, draw_share)
