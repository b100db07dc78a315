"""Figures of an evaluation: accuracy against density, needles by depth, recall and error by layer.

Each function makes one matplotlib figure from the rows of `quality.json` (`read_results`), and
draws whatever policies, tasks, lengths and densities are there. matplotlib is the extra `plots`:
`pip install "sketchwalk-jax[plots]"`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sketchwalk_jax.evaluation.results import Row
from sketchwalk_jax.evaluation.summaries import (
    PHASE_TITLES,
    Pooled,
    check_choices,
    mean_by_layer,
    nominal_density,
    policy_labels,
    pool,
    rows_with,
    tasks_of,
    values_of,
)
from sketchwalk_jax.evaluation.tables import density_title, longest, task_title
from sketchwalk_jax.evaluation.tasks import LOSS_TASKS
from sketchwalk_jax.plots import import_pyplot
from sketchwalk_jax.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are told apart with any kind of colour vision, and darker ones for
# the method's rivals; markers repeat what colours say. A policy has the same ones in every figure.
_STYLES = {
    "dense": ("#000000", "_"),
    "oracle": ("#009E73", "D"),
    "paper": ("#D55E00", "o"),
    "damped": ("#0072B2", "s"),
    "one_hop": ("#56B4E9", "^"),
    "released": ("#CC79A7", "P"),
    "minference": ("#5D3A9B", "<"),
    "flexprefill": ("#7A4419", ">"),
    "quest": ("#882255", "h"),
    "adamas": ("#B2A300", "p"),
    "streaming": ("#E69F00", "v"),
    "random": ("#8A8A8A", "X"),
}
_OTHER_COLOURS = ("#117733", "#AA4499", "#44AA99", "#661100")
_OTHER_MARKERS = "*dH8"
_LIGHT_GREY, _BLUE, _WHITE = "#E4E4E4", "#0072B2", "#FFFFFF"
_MAX_COLUMNS = 4
# Sizes of the markers of the first and the last policy, in points.
_LARGEST, _SMALLEST = 6.5, 3.0


def plot_accuracy(
    rows: Sequence[Row],
    *,
    phase: str = "both",
    tokens: int | None = None,
    layers: str = "sparse_layers",
    title: str | None = None,
) -> "Figure":
    """Draws right answers against measured density: a panel for each task, a line for each policy.

    Bars are Wilson's 95 % intervals. Dense attention is the dashed line, with its interval as a
    band. Every marker stands at its measured density; where several stand at one, they lie upon one
    another, the later ones of the legend smaller. Panels of losses have nats per token on their
    axis: lower is better.

    Args:
      rows: Rows of one evaluation.
      phase: Where selection is sparse: `"prefill"`, `"decode"` or `"both"`.
      tokens: Length; the longest by default.
      layers: Which layers the density counts: `"sparse_layers"` or `"all_layers"`.
      title: Title of the figure.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If there are no rows, or none of this phase or length.

    Example:
      >>> plot_accuracy(read_results("quality.json").rows, phase="prefill")  # doctest: +SKIP
    """
    check_choices(rows, phase=phase, tokens=tokens)
    check_choice("layers", layers, ("sparse_layers", "all_layers"))
    tokens = longest(rows) if tokens is None else tokens
    chosen = rows_with(rows, phase=phase, tokens=tokens)
    labels = [label for label in policy_labels(chosen) if label != "dense"]
    tasks = tasks_of(chosen, is_scored=False)
    figure, axes = _make_panels(len(tasks), size=(2.9, 2.5))
    counted = layers.replace("_", " ")
    measured = (row[f"measured_density_{layers}"] for row in chosen if row["policy"] != "dense")
    widest = max((x for x in measured if x is not None), default=1.0)
    for task, axis, is_lowest in zip(tasks, axes, _are_lowest(len(tasks)), strict=True):
        some = rows_with(chosen, task=task)
        _draw_dense(axis, pool(rows_with(some, label="dense")), is_loss=task in LOSS_TASKS)
        for index, label in enumerate(labels):
            size = _LARGEST + (_SMALLEST - _LARGEST) * index / max(1, len(labels) - 1)
            points = _density_points(rows_with(some, label=label), layers)
            colour, marker = style_of(label, labels)
            _draw_points(axis, points, colour, marker, size, is_loss=task in LOSS_TASKS)
        axis.set_title(task_title(task), fontsize=10)
        axis.set_xlim(0.0, 1.15 * widest)
        if is_lowest:
            axis.set_xlabel(f"measured density, {counted}", fontsize=9)
        if task in LOSS_TASKS:
            axis.set_ylabel("nats per token (lower is better)", fontsize=9)
        else:
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel("right answers", fontsize=9)
            axis.set_ylim(-0.03, 1.03)
        _tidy(axis)
    _add_legend(figure, [*(["dense"] if rows_with(chosen, label="dense") else []), *labels], labels)
    place = "prefill and decode" if phase == "both" else phase
    figure.suptitle(title or f"{tokens:,} tokens, sparse in {place}", fontsize=11)
    return figure


def _density_points(rows: Sequence[Row], layers: str) -> list[tuple[float, Pooled]]:
    """Measured density and values of one policy at each nominal density, by measured density."""
    nominal = values_of(rows, "density") or [None]
    pooled = [pool(rows_with(rows, density=density)) for density in nominal]
    points = [(getattr(one, f"density_{layers}"), one) for one in pooled if one is not None]
    return sorted((x, one) for x, one in points if x is not None)


def _draw_dense(axis: Any, dense: Pooled | None, *, is_loss: bool) -> None:
    value = None if dense is None else dense.text_loss if is_loss else dense.exact
    if dense is None or value is None:
        return
    axis.axhline(value, color="black", linestyle="--", linewidth=1.2, zorder=1)
    if dense.low is not None and not is_loss:
        axis.axhspan(dense.low, dense.high, color="black", alpha=0.08, linewidth=0)


def _draw_points(
    axis: Any,
    points: Sequence[tuple[float, Pooled]],
    colour: str,
    marker: str,
    size: float,
    *,
    is_loss: bool,
) -> None:
    values: list[tuple[Any, ...]] = [
        (x, one.text_loss, None, None) if is_loss else (x, one.exact, one.low, one.high)
        for x, one in points
    ]
    kept = [value for value in values if value[1] is not None]
    if not kept:
        return
    places, heights, lows, highs = zip(*kept, strict=True)
    bars = None if is_loss else np.abs([np.subtract(heights, lows), np.subtract(highs, heights)])
    axis.errorbar(
        places,
        heights,
        yerr=bars,
        color=colour,
        marker=marker,
        markersize=size,
        linewidth=1.0,
        elinewidth=0.9,
        zorder=2,
    )


def plot_needle_depth(
    rows: Sequence[Row],
    *,
    phase: str = "prefill",
    density: float | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws how often a needle is found, by its depth and the length: a panel for each policy.

    Args:
      rows: Rows of one evaluation, those of the task `single_needle` with a depth among them.
      phase: Where selection is sparse: `"prefill"`, `"decode"` or `"both"`.
      density: Nominal density; the highest below 1 by default.
      title: Title of the figure.

    Returns:
      The figure. Cells without a measurement are left white.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If there are no such rows.

    Example:
      >>> plot_needle_depth(read_results("quality.json").rows, density=0.1)  # doctest: +SKIP
    """
    check_choices(rows, phase=phase)
    needles = [row for row in rows_with(rows, task="single_needle") if row["depth"] is not None]
    if not needles:
        raise ValueError("rows must hold needles by depth, got none")
    density = nominal_density(needles, density)
    needles = rows_with(needles, phase=phase, density=density)
    labels, lengths = policy_labels(needles), values_of(needles, "tokens")
    depths = values_of(needles, "depth")
    figure, axes = _make_panels(
        len(labels), size=(max(1.4, 0.75 + 0.42 * len(lengths)), 2.6), sharex=True, sharey=True
    )
    edges = np.linspace(0, 1, len(depths) + 1)
    image = None
    for label, axis in zip(labels, axes, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for row in rows_with(needles, label=label):
            grid[depths.index(row["depth"]), lengths.index(row["tokens"])] = row["exact"]
        image = _draw_grid(axis, grid, edges)
        found = pool(
            row
            for row in rows_with(
                rows, label=label, task="single_needle", phase=phase, density=density
            )
        )
        share = "" if found is None or found.exact is None else f": {found.exact:.0%}"
        axis.set_title(f"{label}{share}", fontsize=9)
        axis.set_xticks(range(len(lengths)), [f"{tokens / 1024:g}K" for tokens in lengths])
        axis.tick_params(labelsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("needles found", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    figure.supxlabel("prompt, tokens", fontsize=10)
    figure.supylabel("depth of the needle", fontsize=10)
    place = PHASE_TITLES[phase].lower()
    figure.suptitle(title or f"{density_title(density)}, sparse in {place}", fontsize=11)
    return figure


def _draw_grid(axis: Any, grid: np.ndarray, edges: np.ndarray) -> Any:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import PercentFormatter

    scale = LinearSegmentedColormap.from_list("found", [_LIGHT_GREY, "#7FB4D6", _BLUE, "#00304D"])
    columns = np.arange(grid.shape[1] + 1) - 0.5
    image = axis.pcolormesh(
        columns,
        edges,
        np.ma.masked_invalid(grid),
        cmap=scale.with_extremes(bad=_WHITE),
        vmin=0.0,
        vmax=1.0,
        edgecolors=_WHITE,
        linewidth=0.6,
    )
    axis.set_ylim(1.0, 0.0)  # the beginning of the prompt is at the top
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axis.set_yticks([0.0, 0.5, 1.0])
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return image


def plot_mass_recall(
    rows: Sequence[Row],
    *,
    phase: str = "prefill",
    density: float | None = None,
    tokens: int | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws the share of dense attention's mass that the selected blocks hold, layer by layer.

    Args:
      rows: Rows of one evaluation; values are means over its tasks.
      phase: Where selection is sparse: `"prefill"`, `"decode"` or `"both"`.
      density: Nominal density; the highest below 1 by default.
      tokens: Length; the longest with such values by default.
      title: Title of the figure.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If no row has such values.

    Example:
      >>> plot_mass_recall(read_results("quality.json").rows)  # doctest: +SKIP
    """
    return _plot_by_layer(
        rows,
        "mass_recall_by_layer",
        axis_label="attention mass in selected blocks",
        phase=phase,
        density=density,
        tokens=tokens,
        title=title,
    )


def plot_output_error(
    rows: Sequence[Row],
    *,
    phase: str = "prefill",
    density: float | None = None,
    tokens: int | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws `‖sparse - dense‖ / ‖dense‖` of the output of attention, layer by layer.

    Arguments, result and errors are those of `plot_mass_recall`.

    Example:
      >>> plot_output_error(read_results("quality.json").rows)  # doctest: +SKIP
    """
    return _plot_by_layer(
        rows,
        "output_error_by_layer",
        axis_label="relative error of the output",
        phase=phase,
        density=density,
        tokens=tokens,
        title=title,
    )


def _plot_by_layer(
    rows: Sequence[Row],
    field: str,
    *,
    axis_label: str,
    phase: str,
    density: float | None,
    tokens: int | None,
    title: str | None,
) -> "Figure":
    from matplotlib.ticker import MaxNLocator

    check_choices(rows, phase=phase, tokens=tokens)
    density = nominal_density(rows, density)
    chosen = [row for row in rows_with(rows, phase=phase, density=density) if row.get(field)]
    chosen = [row for row in chosen if row["policy"] != "dense"]
    if not chosen:
        raise ValueError(f"rows must hold {field} of phase {phase!r}, got none")
    tokens = longest(chosen) if tokens is None else tokens
    chosen = rows_with(chosen, tokens=tokens)
    labels = policy_labels(chosen)
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for label in labels:
        values = mean_by_layer(rows_with(chosen, label=label), field)
        colour, marker = style_of(label, labels)
        heights = [math.nan if value is None else value for value in values]
        axis.plot(heights, color=colour, marker=marker, markersize=4.5, linewidth=1.2)
    axis.set_ylim(bottom=0.0)
    if field == "mass_recall_by_layer":
        axis.set_ylim(0.0, 1.02)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("layer")
    axis.set_ylabel(axis_label)
    _tidy(axis)
    _add_legend(figure, labels, labels, place="outside right center", columns=1)
    place = PHASE_TITLES[phase].lower()
    axis.set_title(
        title or f"{density_title(density)}, sparse in {place}, {tokens:,} tokens", fontsize=11
    )
    return figure


def style_of(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a policy; `labels` are all policies of the figure."""
    if label in _STYLES:
        return _STYLES[label]
    index = [name for name in labels if name not in _STYLES].index(label)
    return _OTHER_COLOURS[index % len(_OTHER_COLOURS)], _OTHER_MARKERS[index % len(_OTHER_MARKERS)]


def _make_panels(count: int, *, size: tuple[float, float], **shared: bool) -> tuple[Any, list[Any]]:
    """A figure with `count` panels of a size in inches, the rest of its grid left empty."""
    pyplot = import_pyplot()
    columns = min(_MAX_COLUMNS, count)
    lines = math.ceil(count / columns)
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(size[0] * columns + 0.6, size[1] * lines + 0.9),
        squeeze=False,
        layout="constrained",
        **shared,
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def _are_lowest(count: int) -> list[bool]:
    """Whether no panel of a grid stands below each."""
    columns = min(_MAX_COLUMNS, count)
    return [index + columns >= count for index in range(count)]


def _tidy(axis: Any) -> None:
    """Light horizontal lines, small numbers, no frame above and to the right."""
    axis.grid(axis="y", color=_LIGHT_GREY)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _add_legend(
    figure: Any,
    shown: Sequence[str],
    labels: Sequence[str],
    *,
    place: str = "outside lower center",
    columns: int = 8,
) -> None:
    """Names policies beside or below the panels, in at most `columns` columns.

    `labels` are all policies of the figure.
    """
    from matplotlib.lines import Line2D

    lines = []
    for label in shown:
        colour, marker = style_of(label, labels)
        style = {"linestyle": "--"} if label == "dense" else {"marker": marker, "markersize": 5}
        lines.append(Line2D([], [], color=colour, linewidth=1.2, label=label, **style))
    columns = math.ceil(len(lines) / math.ceil(len(lines) / columns))  # rows of equal length
    figure.legend(handles=lines, loc=place, ncols=columns, fontsize=9, frameon=False)
