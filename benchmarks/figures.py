"""Draws the figures of the pages from the JSON results into `plots/`.

    python benchmarks/figures.py                       # all whose results are there
    python benchmarks/figures.py kernels_speedup end_to_end
    python benchmarks/figures.py block_map [--model DIR]

That of one prompt, `block_map`, needs the checkpoint that was measured.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import report
from common import RESULTS, check_filters
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.report import drawings, model_drawings, style_of
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    counted,
    densities,
    paired_loss_difference,
    pool,
    rows_with,
)
from sketchwalk_jax.models.hub import bundled_model
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.tokenizer import load_tokenizer

PLOTS = report.HERE / "plots"
_DPI = 120
# Okabe and Ito's colours.
_COLOURS = {
    "recommended": "#0072B2",
    "recommended_blocks": "#56B4E9",
    "paper": "#D55E00",
    "dense": "black",
    "transformers": "0.6",
}
_OF_DENSITY = {0.1: "#D55E00", 0.2: "#0072B2", 0.5: "#009E73", 1.0: "#CC79A7"}
Points = Sequence[tuple[float, float]]


def main() -> None:
    """Draws what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plots", type=Path, default=PLOTS)
    parser.add_argument("--model", type=Path, help="checkpoint; the bundled one by default")
    options = parser.parse_args()
    matplotlib.use("Agg")
    options.plots.mkdir(parents=True, exist_ok=True)
    found: dict[str, Callable[[], Figure]] = {}
    for name, (file, draw) in FIGURES.items():
        path = options.results / file
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            found[name] = functools.partial(draw, data)
    if (options.results / "quality.json").exists():
        found |= of_quality(options.results / "quality.json", options.model or bundled_model())
    wanted = options.name or found
    check_filters(options, ({"name": one} for one in found), wanted)
    for name in wanted:
        found[name]().savefig(options.plots / f"{name}.png", dpi=_DPI)
        print(f"drawn: {name}")


def of_quality(path: Path, model: Path) -> dict[str, Callable[[], Figure]]:
    """Figures of an evaluation, and of its model as it reads one prompt."""
    results = report.read_whole(path)
    found = {name: one.draw for name, one in drawings(results.rows).items()}

    def block_map() -> Figure:
        if hash_weights(model) != results.meta["model"]["sha256"]:
            measured = results.meta["model"]["name"]
            raise SystemExit(f"--model must be the checkpoint that was measured, {measured}")
        params, model_config = sw.load(model, dtype="float32")
        return model_drawings(params, model_config, load_tokenizer(model))["block_map"].draw()

    return found | {"block_map": block_map}


def _draw(panel: Any, lines: Mapping[str, tuple[Points, Mapping[str, Any]]], title: str) -> None:
    """Lines against tokens."""
    for label, (points, style) in lines.items():
        if points:
            panel.plot(*zip(*sorted(points), strict=True), label=label, **({"marker": "o"} | style))
    ticks = sorted({tokens for points, _ in lines.values() for tokens, _ in points})
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([f"{int(tokens) // 1024}K" for tokens in ticks])
    panel.set_xlabel("tokens")
    panel.set_title(title, fontsize=10)
    panel.grid(axis="y", color="0.9")
    panel.spines[["top", "right"]].set_visible(False)


def kernels_speedup(data: report.Results) -> Figure:
    """How many times faster than cuDNN's dense attention prefill is; dashed: 1 / density."""
    shape = {"op": "prefill", "batch": 1, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    rows = report.some(data, **shape)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    panel = figure.subplots()
    lines = {}
    for density in sorted({row["density"] for row in rows}):
        points = [(row["tokens"], row["ratio"]) for row in rows if row["density"] == density]
        colour = _OF_DENSITY.get(density, "black")
        lines[f"density {density:g}"] = points, {"color": colour}
        panel.axhline(1 / density, color=colour, linestyle="--", linewidth=1)
    _draw(panel, lines, "Prefill attention, 32/8 heads of 128, bfloat16; dashed: 1 / density")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("times faster than cuDNN's dense attention")
    figure.legend(frameon=False, loc="outside lower center", ncols=len(lines))
    return figure


def selection_share(data: report.Results) -> Figure:
    """Selection's share of selection and attention, against the context."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    found = [
        row
        for row in report.share_rows(data, data["rows"])
        if row["queries"] in (None, report.USUAL_QUERIES)
    ]
    for panel, phase in zip(panels, ("prefill", "decode"), strict=True):
        lines = {}
        for preset in ("paper", "recommended_blocks"):
            for density, style in ((0.2, "-"), (0.1, "--")):
                points = [
                    (row["tokens"], row["share"])
                    for row in found
                    if (row["phase"], row["preset"], row["density"]) == (phase, preset, density)
                ]
                how = {"color": _COLOURS[preset], "linestyle": style}
                lines[f"{preset}, density {density:g}"] = points, how
        _draw(panel, lines, "a whole prompt" if phase == "prefill" else "one token")
        panel.set_ylim(0, 1)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panels[0].set_ylabel("selection's share of a layer's\nselection and attention")
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def end_to_end(data: report.Results) -> Figure:
    """Time to the first token, and tokens per second, against the context."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    model = "llama-3.1-8b"
    titles = ("seconds to the first token", "tokens per second, one sequence")
    for panel, phase, title in zip(panels, ("prefill", "decode"), titles, strict=True):
        rows = report.some(data, phase=phase, model=model, batch=1, error=None)
        best: dict[str, dict[int, float]] = {}  # in one piece or in several
        for row in report.model_rows(data, rows):
            seconds = row["seconds"]["median"]
            own = best.setdefault(row["name"], {})
            own[row["tokens"]] = min(seconds, own.get(row["tokens"], seconds))
        lines = {}
        for name, times in best.items():
            preset, _, density = name.replace("`", "").partition(" ")
            points = [(n, one if phase == "prefill" else 1 / one) for n, one in times.items()]
            if density in ("", "0.1"):
                label = f"{preset}, density {density}" if density else preset
                lines[label] = points, {"color": _COLOURS[preset]}
        _draw(panel, lines, f"{model}: {title}")
    panels[0].set_yscale("log")
    panels[1].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    return figure


# Ablations.

PANELS = {
    "sketch_dim": "sketch dimension",
    "exponent": "exponent",
    "walk_degree": "walk steps per layer",
    "beta": "damping β",
    "dense_layers": "dense layers",
    "density": "density",
}
Interval = tuple[float, float, float]


def series(rows: Sequence[Row], preset: str, field: str) -> list[tuple[float, list[Row]]]:
    """Values of a field and the rows of the preset with it, the preset's own value among them."""
    density = report.base_density(rows)
    if field == "density":
        found = [(own, rows_with(rows, label=preset, density=own)) for own in densities(rows)]
        return [(own, some) for own, some in found if some]
    found = []
    for variant in report.variants_of(rows, preset):
        name, _, value = variant.partition("=")
        if name == field:
            own = rows_with(rows, label=f"{preset}, {variant}", density=density)
            found.append((float(value), own))
    own_value = getattr(by_name("sketchwalk", preset=preset), field)
    if not found or own_value is None:
        return []
    found.append((float(own_value), rows_with(rows, label=preset, density=density)))
    return sorted(found, key=lambda one: one[0])


def ablations(data: report.Results) -> Figure:
    """Right answers and text loss against each field, of both presets, in prefill and decode."""
    rows, presets = data["rows"], report.PRESETS
    shown = {
        field: title
        for field, title in PANELS.items()
        if any(len(series(rows, one, field)) > 1 for one in presets)
    }
    figure = Figure(figsize=(2.5 * len(shown) + 0.6, 5.6), layout="constrained")
    axes = figure.subplots(2, len(shown), sharex="col", sharey="row", squeeze=False)
    dense = rows_with(rows, label="dense")
    for column, (field, title) in enumerate(shown.items()):
        lines = {preset: series(rows, preset, field) for preset in presets}
        values = sorted({value for line in lines.values() for value, _ in line})
        if field == "density":
            lines["random"] = [
                (own, rows_with(rows, label="random", density=own)) for own in values
            ]
        for axis, make in zip(axes[:, column], (_share_of, _loss_beyond(dense)), strict=True):
            for label, line in lines.items():
                placed = [(values.index(value), some) for value, some in line]
                _draw_intervals(axis, placed, label, make)
            axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="y", color="#E4E4E4")
        axes[1, column].set_xlabel(title)
    whole = pool(counted(dense))
    for axis in axes[0]:
        if whole is not None and whole.exact is not None:
            axis.axhline(whole.exact, color="black", linewidth=1, linestyle=":", label="dense")
    axes[0, 0].set_ylabel("right answers")
    axes[1, 0].set_ylabel("text loss beyond dense, nats")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=7)
    return figure


def _draw_intervals(
    axis: Any,
    points: Iterable[tuple[float, Sequence[Row]]],
    label: str,
    make: Callable[[Sequence[Row]], Interval | None],
) -> None:
    """A line for prefill and one, dashed, for decode."""
    colour, marker = style_of(label, [label])
    points = list(points)
    for phase, line in (("prefill", "-"), ("decode", "--")):
        made = [(place, make(rows_with(some, phase=phase))) for place, some in points]
        kept = [(place, *values) for place, values in made if values is not None]
        if kept:
            place, middle, low, high = zip(*kept, strict=True)
            spread = [
                [a - b for a, b in zip(middle, low, strict=True)],
                [b - a for a, b in zip(middle, high, strict=True)],
            ]
            style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": line}
            name = f"{label}, sparse in {phase}"
            axis.errorbar(place, middle, spread, elinewidth=0.8, label=name, **style)


def _share_of(rows: Sequence[Row]) -> Interval | None:
    found = pool(counted(rows))
    if found is None or found.exact is None or found.low is None or found.high is None:
        return None
    return found.exact, found.low, found.high


def _loss_beyond(dense: Sequence[Row]) -> Callable[[Sequence[Row]], Interval | None]:
    def make(rows: Sequence[Row]) -> Interval | None:
        found = paired_loss_difference(rows, dense)
        return None if found is None else (found.mean, found.low, found.high)

    return make


FIGURES: dict[str, tuple[str, Callable[[report.Results], Figure]]] = {
    "kernels_speedup": ("kernels.json", kernels_speedup),
    "selection_share": ("selection_share.json", selection_share),
    "end_to_end": ("end_to_end.json", end_to_end),
    "ablations": ("ablations.json", ablations),
}


if __name__ == "__main__":
    main()
