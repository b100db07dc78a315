"""Draws the figure of the pages from the results of `end_to_end.py` into `plots/end_to_end.png`.

    python benchmarks/figures.py

Figures of an evaluation are drawn by `sketchwalk report FILE`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import tables
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

# Okabe and Ito's colours, distinct in any kind of colour vision.
_OF_DENSITY = {0.1: "#D55E00", 0.2: "#0072B2", 1.0: "#CC79A7"}
Points = Sequence[tuple[float, float]]


def main() -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--plots", type=Path, default=report.HERE / "plots")
    options = parser.parse_args()
    options.plots.mkdir(parents=True, exist_ok=True)
    rows = report.read(options.results / "end_to_end.json")["rows"]
    end_to_end(rows).savefig(options.plots / "end_to_end.png", dpi=120)


def _draw(panel: Any, lines: Mapping[str, tuple[Points, Mapping[str, Any]]], title: str) -> None:
    """Draws lines over tokens."""
    for label, (points, style) in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), label=label, marker="o", **style)
    ticks = sorted({tokens for points, _ in lines.values() for tokens, _ in points})
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([f"{int(tokens) // 1024}K" for tokens in ticks])
    panel.set_xlabel("tokens")
    panel.set_title(title, fontsize=10)
    panel.grid(axis="y", color="0.9")
    panel.spines[["top", "right"]].set_visible(False)


def end_to_end(rows: Sequence[report.Row]) -> Figure:
    """Plots time to the first token, and tokens per second, over the context."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = ("seconds to the first token", "tokens per second, one sequence")
    for panel, phase, title in zip(panels, ("prefill", "decode"), titles, strict=True):
        lines = {}
        for name, (where, _) in tables.SPEEDS.items():
            found = report.select(rows, tables.LLAMA | where | {"phase": phase, "batch": 1})
            points = []
            for tokens in {row["tokens"] for row in found}:
                own = report.best(report.select(found, {"tokens": tokens}))
                if own is not None:
                    seconds = own["seconds"]["median"]
                    points.append((tokens, seconds if phase == "prefill" else 1 / seconds))
            if points:
                lines[name.lower()] = (
                    points,
                    {"color": _OF_DENSITY.get(where.get("density"), "black")},
                )
        _draw(panel, lines, f"Llama-3.1-8B: {title}")
    panels[0].set_yscale("log")
    panels[1].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
