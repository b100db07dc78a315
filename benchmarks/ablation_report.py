"""The tables and the figure of `results/ablations.json`.

    python benchmarks/ablations.py --text FILE --text-tail 0.03    # on a GPU
    python benchmarks/ablation_report.py    # draws plots/ablations.png, writes the tables

`report.py` writes the tables alone, with all others.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pages import Tables, if_measured, read_whole, write_own_tables

from sketchwalk_jax.evaluation.report import describe_results, style_of
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    NOTHING,
    PHASE_TITLES,
    PHASES,
    densities,
    difference,
    loss_difference,
    markdown_table,
    measured,
    name_of,
    paired_loss_difference,
    pool,
    rows_with,
    share,
    task_title,
    tasks_of,
)
from sketchwalk_jax.plots import import_pyplot
from sketchwalk_jax.policies import by_name

Rows = Sequence[Row]
PRESETS = ("paper", "damped")
PANELS = {
    "sketch_dim": "sketch dimension",
    "exponent": "exponent",
    "walk_degree": "walk steps per layer",
    "beta": "damping β",
    "dense_layers": "dense layers",
    "density": "density",
}
FIGURE = "plots/ablations.png"
_DPI = 150


def main() -> None:
    """Draws the figure and writes the tables."""

    def draw(results: Path, plots: Path) -> None:
        rows = read_whole(results / "ablations.json").rows
        ablations_figure(rows).savefig(plots / Path(FIGURE).name, dpi=_DPI)

    write_own_tables(__doc__, TABLES, draw)


def ablation_tables(path: Path) -> str:
    """Each preset with one thing changed, then all densities, then what was run."""
    results = read_whole(path)
    rows = results.rows
    density = base_density(rows)
    anchors = [rows_with(rows, label="dense"), rows_with(rows, label="random", density=density)]
    blocks = [f"![Right answers and text loss against each field]({FIGURE})"]
    for preset in (one for one in PRESETS if rows_with(rows, label=one, density=density)):
        base = rows_with(rows, label=preset, density=density)
        named = [("dense", anchors[0]), ("`random`", anchors[1]), (name_of(preset), base)]
        for variant in variants_of(rows, preset):
            title = variant if "=" not in variant else f"`{variant}`"
            named.append((title, with_variant(rows, preset, density, variant)))
        blocks.append(f"**{name_of(preset)} with one thing changed, density {density:g}**")
        lines = [_line(name, some, base, anchors[0]) for name, some in named if some]
        blocks.append(_table("Changed", lines, name_of(preset)))
    lines = []
    for own in densities(rows):
        base = rows_with(rows, label="random", density=own)
        for label in ("random", *PRESETS):
            some = rows_with(rows, label=label, density=own)
            if some:
                lines.append(_line(f"{name_of(label)}, {own:g}", some, base, anchors[0]))
    blocks += ["**Density**", _table("Policy", lines, "`random` of that density")]
    tasks = ", ".join(task_title(task).lower() for task in tasks_of(rows))
    return "\n\n".join([*blocks, f"Tasks with an answer: {tasks}. {describe_results(results)}"])


def base_density(rows: Rows) -> float:
    """The density of what has one thing changed; without any, the highest."""
    found = {row["density"] for row in rows if row.get("variant")}
    return max(found or densities(rows))


def with_variant(rows: Rows, preset: str, density: float, variant: str) -> list[Row]:
    """The rows of a variant of a preset."""
    return rows_with(rows, label=f"{preset}, {variant}", density=density)


def variants_of(rows: Rows, preset: str) -> list[str]:
    """The variants of a preset, in the order in which they were measured."""
    found = (row.get("variant") for row in rows if row["preset"] == preset)
    return [variant for variant in dict.fromkeys(found) if variant is not None]


def scored(rows: Rows) -> list[Row]:
    """The rows of tasks with an answer."""
    return [row for row in rows if row["task"] != "text_loss"]


def _line(name: str, rows: Rows, base: Rows, dense: Rows) -> list[str]:
    is_dense, is_base = bool(rows) and rows[0]["policy"] == "dense", rows == base
    by_phase = {phase: scored(rows_with(rows, phase=phase)) for phase in PHASES}
    cells = [share(pool(some)) for some in by_phase.values()]
    if is_dense:
        cells = [cells[0], "", ""]
    for phase in ("prefill", "decode"):
        other = scored(rows_with(base, phase=phase))
        cells.append("" if is_dense or is_base else difference(by_phase[phase], other))
    first = rows_with(rows, phase="prefill")
    cells.append("" if is_dense else loss_difference(first, rows_with(dense, phase="prefill")))
    cells.append("" if is_dense else _recall(rows))
    cells.append("" if is_dense else measured(pool(first)))
    return [name, *cells]


def _table(title: str, lines: Sequence[Sequence[str]], base: str) -> str:
    header = [title, *(PHASE_TITLES[phase] for phase in PHASES)]
    header += [f"{PHASE_TITLES[phase]}, beyond {base}" for phase in ("prefill", "decode")]
    header += ["Text loss beyond dense, prefill", "Mass recall, prefill / decode"]
    return markdown_table([*header, "Density, prefill: sparse / all layers"], lines)


def _recall(rows: Rows) -> str:
    cells = []
    for phase in ("prefill", "decode"):
        values = [
            row["mass_recall"]
            for row in rows_with(rows, phase=phase)
            if row["mass_recall"] is not None
        ]
        cells.append(f"{sum(values) / len(values):.2f}" if values else NOTHING)
    return " / ".join(cells)


def series(rows: Rows, preset: str, field: str) -> list[tuple[float, list[Row]]]:
    """Values of a field and the rows of the preset with it, the preset's own value among them."""
    density = base_density(rows)
    if field == "density":
        some = [(own, rows_with(rows, label=preset, density=own)) for own in densities(rows)]
        return [(own, found) for own, found in some if found]
    found = [
        (float(value), with_variant(rows, preset, density, variant))
        for variant in variants_of(rows, preset)
        for name, _, value in (variant.partition("="),)
        if name == field
    ]
    own = getattr(by_name("sketchwalk", preset=preset), field)
    if not found or own is None:
        return []
    return sorted(
        [*found, (float(own), rows_with(rows, label=preset, density=density))],
        key=lambda one: one[0],
    )


def ablations_figure(rows: Rows) -> Any:
    """Right answers and text loss against each field, of both presets, sparse in prefill, decode.

    Args:
      rows: Rows of `ablations.json`.

    Returns:
      A figure of two rows of panels, one panel for each field.
    """
    pyplot = import_pyplot()
    shown = [field for field in PANELS if any(len(series(rows, one, field)) > 1 for one in PRESETS)]
    if not shown:
        raise ValueError("rows must hold a field with several values, got none")
    figure, axes = pyplot.subplots(
        2,
        len(shown),
        figsize=(2.5 * len(shown) + 0.6, 5.6),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    dense = rows_with(rows, label="dense")
    makes = (_share_of, lambda some: _loss_of(some, dense))
    for column, field in enumerate(shown):
        values = sorted({x for preset in PRESETS for x, _ in series(rows, preset, field)})
        places = {value: place for place, value in enumerate(values)}
        for line, make in enumerate(makes):
            axis = axes[line, column]
            for preset in PRESETS:
                _draw_lines(axis, series(rows, preset, field), preset, places, make)
            if field == "density":
                random = [(own, rows_with(rows, label="random", density=own)) for own in values]
                _draw_lines(axis, random, "random", places, make)
            axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="y", color="#E4E4E4")
        axes[1, column].set_xlabel(PANELS[field])
    whole = pool(scored(dense))
    for axis in axes[0]:
        if whole is not None and whole.exact is not None:
            axis.axhline(whole.exact, color="#000000", linewidth=1, linestyle=":", label="dense")
    axes[0, 0].set_ylabel("right answers")
    axes[1, 0].set_ylabel("text loss beyond dense, nats")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=7)
    return figure


def _draw_lines(
    axis: Any,
    points: Sequence[tuple[float, Rows]],
    label: str,
    places: dict[float, int],
    make: Callable[[Rows], tuple[float, float, float] | None],
) -> None:
    """A line for prefill and one, dashed, for decode, with intervals."""
    colour, marker = style_of(label, [label])
    for phase, style in (("prefill", "-"), ("decode", "--")):
        found = [(places[value], make(rows_with(some, phase=phase))) for value, some in points]
        kept = [(x, *values) for x, values in found if values is not None]
        if not kept:
            continue
        x, middle, low, high = map(list, zip(*kept, strict=True))
        below = [a - b for a, b in zip(middle, low, strict=True)]
        above = [a - b for a, b in zip(high, middle, strict=True)]
        axis.errorbar(
            x,
            middle,
            [below, above],
            color=colour,
            marker=marker,
            markersize=4,
            linestyle=style,
            elinewidth=0.8,
            label=f"{label}, sparse in {phase}",
        )


def _share_of(rows: Rows) -> tuple[float, float, float] | None:
    found = pool(scored(rows))
    if found is None or found.exact is None or found.low is None or found.high is None:
        return None
    return found.exact, found.low, found.high


def _loss_of(rows: Rows, dense: Rows) -> tuple[float, float, float] | None:
    found = paired_loss_difference(rows, dense)
    return None if found is None else (found.mean, found.low, found.high)


TABLES: Tables = {
    "ablations": (
        "ablations.json",
        if_measured(ablation_tables, "`python benchmarks/ablations.py`"),
    ),
}


if __name__ == "__main__":
    main()
