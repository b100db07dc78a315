"""Writes the report of one evaluation for `sketchwalk report`: its tables and figures.

`write_report` writes everything into a folder. `sections` makes the tables by name, for a page with
its own prose. `drawings` makes the figures of the rows, `model_drawings` a map of the blocks that
the model attends to while it reads one prompt. Each figure of the rows has a `plot_...` function,
which draws all policies, tasks, lengths and densities in the rows. matplotlib is the extra `plots`:
`pip install "sketchwalk-jax[plots]"`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sketchwalk_jax.evaluation.results import Results
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    PHASE_TITLES,
    accuracy_table,
    check_choices,
    densities,
    density_title,
    difference_table,
    hops_table,
    lengths_table,
    longest,
    loss_table,
    mean_by_layer,
    mean_of,
    measured_phases,
    nominal_density,
    policy_label,
    policy_labels,
    pool,
    probed_phases,
    recall_table,
    rows_with,
    settings_table,
    summary_table,
    task_title,
    tasks_of,
    values_of,
    without_parts,
)
from sketchwalk_jax.evaluation.tasks import LOSS_TASKS, Sample, draw_samples
from sketchwalk_jax.inference.cache import sparse_layers
from sketchwalk_jax.inference.generation import make_generate
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.plots import BLUE, LIGHT_GREY, ORANGE, import_pyplot, plot_block_map
from sketchwalk_jax.policies import by_name, with_plan
from sketchwalk_jax.text.haystack import read_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PyTree = Any

NOT_MEASURED = "*Not measured.*"
NOT_CALIBRATED = "*No policy here takes calibration.*"
SUMMARY_NOTE = (
    "A policy that selects in one phase only has a dash in the others. Text loss and density are "
    "those of the first phase in which it has a figure."
)

TITLES = {
    "setup": "What was measured",
    "summary": "Summary",
    "accuracy": "Right answers by task",
    "differences": "Differences to dense attention",
    "lengths": "By length",
    "depths": "Needles by depth",
    "hops": "Variable tracking by statements to follow",
    "loss": "Text loss",
    "layers": "Layer by layer",
    "settings": "What calibration set",
}
"""Sections of a report and their titles."""

_DPI = 110
_LISTED = 12  # most names in one sentence
_MAP_TOKENS = 4096
_MAP_DENSITY = 0.2


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure that is not drawn yet.

    Attributes:
      description: One sentence that says what the figure shows.
      draw: Draws the figure.
    """

    description: str
    draw: Callable[[], "Figure"]


def write_report(
    results: Results,
    folder: str | Path,
    *,
    has_figures: bool = True,
    more: Mapping[str, Drawing] | None = None,
) -> list[Path]:
    """Writes `report.md` and its figures.

    Args:
      results: One evaluation.
      folder: Folder to write to; created if missing.
      has_figures: Whether to draw figures, which needs matplotlib.
      more: Further figures by name, such as `model_drawings`.

    Returns:
      The files, `report.md` first.

    Raises:
      ImportError: If figures are wanted and matplotlib is missing.
      OSError: If a file cannot be written.

    Example:
      >>> write_report(read_results("quality.json"), "report")  # doctest: +SKIP
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    images = drawings(results.rows) | dict(more or {}) if has_figures else {}
    written = save_drawings(images, folder)
    parts = sections(results, plots="." if has_figures else None)
    text = ["# Quality of sparse attention", *describe_gaps(results)]
    for name, title in TITLES.items():
        text += [f"## {title}", parts[name]]
    if more:
        text.append("## The model on one prompt")
        text += [f"![{one.description}](./{name}.png)" for name, one in more.items()]
    path = folder / "report.md"
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return [path, *written]


def sections(results: Results, *, plots: str | None = None) -> dict[str, str]:
    """Makes the parts of a report as markdown, by the names of `TITLES`.

    Args:
      results: One evaluation.
      plots: Folder of the figures, as the page links to it; None leaves figures out.

    Returns:
      Tables and figures, without titles. A part without rows says so. The first two parts say
      whether an evaluation is unfinished or has rows of several versions of the code.

    Example:
      >>> print(sections(read_results("quality.json"))["summary"])  # doctest: +SKIP
    """
    rows, tokens = results.rows, longest(results.rows)
    # If every policy sets its own density, `None` leaves the density open.
    nominal: list[float | None] = [*densities(rows)[::-1]] or [None]
    phases = measured_phases(rows)
    images = drawings(rows) if plots is not None else {}

    def show(prefix: str) -> list[str]:
        return [
            f"![{one.description}]({plots}/{name}.png)"
            for name, one in images.items()
            if name.startswith(prefix)
        ]

    def table_if(field: str, make: Callable[..., str]) -> list[str]:
        is_there = any(row.get(field) is not None for row in rows)
        return [make(rows, densities=nominal, tokens=tokens)] if is_there else []

    def tables(make: Callable[..., str], phases: Sequence[str | None] = (None,)) -> list[str]:
        """Makes a titled table for each density, and for each phase if `make` takes one."""
        found = []
        for density in nominal:
            for phase in phases:
                place = f", sparse in {PHASE_TITLES[phase].lower()}" if phase else ""
                found.append(f"**{density_title(density)}{place}, {tokens:,} tokens**")
                options = {"phase": phase} if phase else {}
                found.append(make(rows, density=density, tokens=tokens, **options))
        return found

    has_hops = any(row["hops"] is not None for row in rows)
    parts = {
        "setup": [*describe_gaps(results), describe_results(results)],
        "summary": [
            *describe_gaps(results),
            *tables(summary_table),
            SUMMARY_NOTE,
        ],
        "accuracy": [
            *show("accuracy"),
            *tables(accuracy_table, phases),
        ],
        "differences": tables(difference_table, phases),
        "lengths": [
            block
            for density in nominal
            for block in (f"**{density_title(density)}**", lengths_table(rows, density=density))
        ],
        "depths": show("needle_depth"),
        "hops": tables(hops_table) if has_hops else [],
        "loss": table_if("text_loss", loss_table),
        "layers": [
            *table_if("mass_recall_by_layer", recall_table),
            *show("mass_recall"),
            *show("output_error"),
        ],
        "settings": [settings_table(rows) or NOT_CALIBRATED],
    }
    return {name: "\n\n".join(blocks) or NOT_MEASURED for name, blocks in parts.items()}


def describe_gaps(results: Results) -> list[str]:
    """Warns the reader that rows are missing, or come from several versions of the code.

    Args:
      results: One evaluation.

    Returns:
      Paragraphs of markdown; none for a finished evaluation with one version of the code.
    """
    found = []
    missing, asked = results.missing, results.asked
    if missing:
        names = [
            f"{policy_label(one)}{'' if one['density'] in (None, 1) else f' {one["density"]:g}'}"
            for one in missing
        ]
        titles = {"phase": "sparse in", "task": "in", "tokens": "at tokens"}
        parts = [
            f"{title} {_listed([one[name] for one in missing])}" for name, title in titles.items()
        ]
        what = "; ".join([f"of {_listed(names)}", *parts])
        found.append(
            f"**Not finished.** {len(missing):,} of {asked:,} groups of rows (a policy, phase, "
            f"task and length) are missing, {what}. Means are over what is there, which differs "
            f"from policy to policy; the command that wrote the file goes on where it stopped."
        )
    if len(results.sources) > 1:
        parts = [f"{count:,} of code `{one}`" for one, count in results.sources.items()]
        found.append(
            f"**Of more than one code.** The package was changed while this was measured: rows are "
            f"{', '.join(parts)}."
        )
    return found


def _listed(values: Sequence[Any]) -> str:
    """Lists distinct values in their order, only the first ones of many."""
    found = [f"{one:,}" if isinstance(one, int) else str(one) for one in dict.fromkeys(values)]
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def describe_results(results: Results) -> str:
    """Describes model, text, prompts, machine and command in two paragraphs."""
    meta, rows = results.meta, results.rows
    model, text, fields = meta["model"], meta["text"], meta.get("fields") or {}
    hashes = ", ".join(f"`{value[:16]}`" for value in model["sha256"].values())
    part = "" if text["tail"] == 1 else f", the last {text['tail']:.0%} of it"
    counts = []
    for what, has_hops in (
        ("prompts of each task and length", False),
        ("for each number of statements to follow", True),
    ):
        own = [row for row in rows if (row["hops"] is not None) == has_hops]
        found = sorted({row["prompts"] for row in own if has_hops or row["depth"] is None})
        if found:
            ends = f"{found[0]} to {found[-1]}" if len(found) > 1 else f"{found[0]}"
            counts.append(f"{ends} {what}")
    probed = meta.get("probe_prompts")
    bytes_of = f" (attention mass, errors and bytes on {probed} of each)" if probed else ""
    shared = ", ".join(f"`{name}={value}`" for name, value in fields.items())
    lengths = ", ".join(f"{tokens:,}" for tokens in values_of(rows, "tokens"))
    return (
        f"Model `{model['name']}` ({meta['dtype']}; SHA-256 of its weights begins {hashes}). "
        f"Facts are hidden in {text['name']}{part} (SHA-256 `{text['sha256'][:16]}`), in prompts "
        f"of {lengths} tokens: {', '.join(counts)}{bytes_of}, seed {meta['seed']}, the same ones "
        f"for every policy. {f'In every policy that has them: {shared}. ' if shared else ''}"
        f"The run took {meta['wall_s'] / 60:.1f} minutes.\n\n{describe_run(meta)}"
    )


def describe_run(meta: Mapping[str, Any]) -> str:
    """Describes hardware, versions, date and command in one line."""
    versions = meta["versions"]
    machine = f"{meta['cpu']}, {meta['cores']} cores, {meta['memory_gib']} GiB"
    if meta["device"] != "cpu":
        machine = f"{meta['device']} in a machine with {machine}"
    return (
        f"{machine}; "
        f"Python {versions['python']}, JAX {versions['jax']}; {meta['date']}; "
        f"`{meta['command']}`"
    )


# Figures of the rows.

# Okabe and Ito's colours, distinct in any kind of colour vision, and darker ones for rival methods;
# markers repeat the distinction. A policy has the same style in every figure.
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
_MAX_COLUMNS = 4
# Marker sizes of the first and the last policy, in points.
_LARGEST, _SMALLEST = 6.5, 3.0


def drawings(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Lists the figures that the rows allow, by name, without drawing them.

    Args:
      rows: Rows of one evaluation.

    Returns:
      Accuracy, needles by depth, mass recall and output error, in each measured phase. Figures by
      depth and by layer are at the highest density below 1.

    Example:
      >>> list(drawings(rows))  # doctest: +SKIP
      ['accuracy_prefill', 'accuracy_decode', 'accuracy_both', 'needle_depth_prefill', ...]
    """
    found: dict[str, Drawing] = {}

    def add(name: str, what: str, plot: Callable[..., "Figure"], phases: Sequence[str]) -> None:
        for phase in phases:
            description = f"{what}, {PHASE_TITLES[phase].lower()} sparse"
            found[f"{name}_{phase}"] = Drawing(
                description, functools.partial(plot, rows, phase=phase)
            )

    phases = measured_phases(rows)
    add("accuracy", "Right answers against measured density", plot_accuracy, phases)
    by_depth = [row for row in rows if row["depth"] is not None]
    with_depth = [phase for phase in phases if rows_with(by_depth, phase=phase)]
    add("needle_depth", "Needles found by depth and length", plot_needle_depth, with_depth)
    for name, what in {
        "mass_recall": "Attention mass kept",
        "output_error": "Error of the output",
    }.items():
        field = f"{name}_by_layer"
        plot = functools.partial(plot_by_layer, field=field)
        add(name, f"{what} by layer", plot, probed_phases(rows, field))
    return found


def save_drawings(images: Mapping[str, Drawing], folder: Path) -> list[Path]:
    """Draws figures into PNG files named after them, and returns the files.

    Raises:
      ImportError: If matplotlib is missing.
      OSError: If a file cannot be written.
    """
    if not images:
        return []
    pyplot = import_pyplot()
    paths = []
    for name, image in images.items():
        figure = image.draw()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=_DPI)
        pyplot.close(figure)
    return paths


def plot_accuracy(
    rows: Sequence[Row],
    *,
    phase: str = "both",
    tokens: int | None = None,
) -> "Figure":
    """Plots the share of right answers over measured density: a panel per task, a line per policy.

    The density is that of the sparse layers. Bars are Wilson's 95 % intervals. Dense attention is
    the dashed line, with its interval as a band. Markers at the same density overlap; later
    policies in the legend have smaller ones. Panels of losses show nats per token: lower is better.

    Args:
      rows: Rows of one evaluation.
      phase: Phase in which selection is sparse: `"prefill"`, `"decode"` or `"both"`.
      tokens: Prompt length; the longest by default.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If there are no rows, or none of this phase or length.

    Example:
      >>> plot_accuracy(read_results("quality.json").rows, phase="prefill")  # doctest: +SKIP
    """
    check_choices(rows, phase=phase, tokens=tokens)
    tokens = longest(rows) if tokens is None else tokens
    chosen = rows_with(rows, phase=phase, tokens=tokens)
    labels = [label for label in policy_labels(chosen) if label != "dense"]
    tasks = tasks_of(chosen, is_scored=False)
    figure, axes = _make_panels(len(tasks), size=(2.9, 2.5))
    field = "measured_density_sparse_layers"
    measured = (row[field] for row in chosen if row["policy"] != "dense")
    widest = max((x for x in measured if x is not None), default=1.0)
    for index, (task, axis) in enumerate(zip(tasks, axes, strict=True)):
        is_loss, some = task in LOSS_TASKS, rows_with(chosen, task=task)
        value, low, high = _height(rows_with(some, label="dense"), is_loss=is_loss)
        if value is not None:
            axis.axhline(value, color="black", linestyle="--", linewidth=1.2, zorder=1)
        if low is not None:
            axis.axhspan(low, high, color="black", alpha=0.08, linewidth=0)
        for rank, label in enumerate(labels):
            size = _LARGEST + (_SMALLEST - _LARGEST) * rank / max(1, len(labels) - 1)
            style = dict(zip(("color", "marker"), style_of(label, labels), strict=True))
            points = _density_points(rows_with(some, label=label), is_loss=is_loss)
            if points:
                places, heights, lows, highs = zip(*points, strict=True)
                ends = np.subtract(heights, lows), np.subtract(highs, heights)
                axis.errorbar(
                    places,
                    heights,
                    yerr=None if is_loss else np.abs(ends),
                    markersize=size,
                    linewidth=1.0,
                    elinewidth=0.9,
                    zorder=2,
                    **style,
                )
        axis.set_title(task_title(task), fontsize=10)
        axis.set_xlim(0.0, 1.15 * widest)
        if index + _MAX_COLUMNS >= len(tasks):  # no panel below
            axis.set_xlabel("measured density, sparse layers", fontsize=9)
        if is_loss:
            axis.set_ylabel("nats per token (lower is better)", fontsize=9)
        else:
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel("right answers", fontsize=9)
            axis.set_ylim(-0.03, 1.03)
        _tidy(axis)
    _add_legend(figure, [*(["dense"] if rows_with(chosen, label="dense") else []), *labels], labels)
    place = "prefill and decode" if phase == "both" else phase
    figure.suptitle(f"{tokens:,} tokens, sparse in {place}", fontsize=11)
    return figure


def _height(rows: Sequence[Row], *, is_loss: bool) -> tuple[Any, Any, Any]:
    """Returns the height of a point, and both ends of its interval if it has one."""
    pooled = pool(rows)
    if pooled is None or is_loss:
        return pooled and pooled.text_loss, None, None
    return pooled.exact, pooled.low, pooled.high


def _density_points(rows: Sequence[Row], *, is_loss: bool) -> list[tuple[float, Any, Any, Any]]:
    """Points of one policy by ascending measured density: density, height, ends of the interval."""
    found = []
    for density in values_of(rows, "density") or [None]:
        some = rows_with(rows, density=density)
        place = mean_of(without_parts(some), "measured_density_sparse_layers")
        height, *ends = _height(some, is_loss=is_loss)
        if place is not None and height is not None:
            found.append((place, height, *(height if one is None else one for one in ends)))
    return sorted(found)


def plot_needle_depth(
    rows: Sequence[Row],
    *,
    phase: str = "prefill",
    density: float | None = None,
) -> "Figure":
    """Plots how often a needle is found by its depth and the length: a panel for each policy.

    Args:
      rows: Rows of one evaluation, with rows of `single_needle` by depth among them.
      phase: Phase in which selection is sparse: `"prefill"`, `"decode"` or `"both"`.
      density: Nominal density; the highest below 1 by default.

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
        options: dict[str, Any] = {"phase": phase, "density": density}
        found = pool(rows_with(rows, label=label, task="single_needle", **options))
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
    figure.suptitle(f"{density_title(density)}, sparse in {place}", fontsize=11)
    return figure


def _draw_grid(axis: Any, grid: np.ndarray, edges: np.ndarray) -> Any:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import PercentFormatter

    scale = LinearSegmentedColormap.from_list("found", [LIGHT_GREY, "#7FB4D6", BLUE, "#00304D"])
    columns = np.arange(grid.shape[1] + 1) - 0.5
    image = axis.pcolormesh(
        columns,
        edges,
        np.ma.masked_invalid(grid),
        cmap=scale.with_extremes(bad="white"),
        vmin=0.0,
        vmax=1.0,
        edgecolors="white",
        linewidth=0.6,
    )
    axis.set_ylim(1.0, 0.0)  # the beginning of the prompt is at the top
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axis.set_yticks([0.0, 0.5, 1.0])
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return image


def plot_by_layer(
    rows: Sequence[Row],
    *,
    field: str = "mass_recall_by_layer",
    phase: str = "prefill",
    density: float | None = None,
    tokens: int | None = None,
) -> "Figure":
    """Plots the probe's measurements layer by layer, a line for each policy.

    Args:
      rows: Rows of one evaluation; values are means over its tasks.
      field: `"mass_recall_by_layer"`, the share of dense attention's mass that the selected blocks
        hold, or `"output_error_by_layer"`, `‖sparse - dense‖ / ‖dense‖` of attention's output.
      phase: Phase in which selection is sparse: `"prefill"`, `"decode"` or `"both"`.
      density: Nominal density; the highest below 1 by default.
      tokens: Prompt length; the longest with such values by default.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If no row has such values.

    Example:
      >>> plot_by_layer(read_results("quality.json").rows)  # doctest: +SKIP
    """
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
    is_recall = field == "mass_recall_by_layer"
    axis.set_ylim(0.0, 1.02 if is_recall else None)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("layer")
    what = "attention mass in selected blocks" if is_recall else "relative error of the output"
    axis.set_ylabel(what)
    _tidy(axis)
    _add_legend(figure, labels, labels, place="outside right center", columns=1)
    place = PHASE_TITLES[phase].lower()
    axis.set_title(f"{density_title(density)}, sparse in {place}, {tokens:,} tokens", fontsize=11)
    return figure


def style_of(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """Chooses colour and marker of a policy; `labels` are all policies of the figure."""
    if label in _STYLES:
        return _STYLES[label]
    index = [name for name in labels if name not in _STYLES].index(label)
    return _OTHER_COLOURS[index % len(_OTHER_COLOURS)], _OTHER_MARKERS[index % len(_OTHER_MARKERS)]


def _make_panels(count: int, *, size: tuple[float, float], **shared: bool) -> tuple[Any, list[Any]]:
    """Makes a figure with `count` panels of a size in inches; the rest of its grid stays empty."""
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


def _tidy(axis: Any) -> None:
    """Styles an axis: light horizontal lines, small numbers, no frame above and to the right."""
    axis.grid(axis="y", color=LIGHT_GREY)
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
    """Names policies next to or below the panels, in at most `columns` columns.

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


# The figure of the model.


def model_drawings(
    params: PyTree, model_config: ModelConfig, tokenizer: Any, *, preset: str = "recommended"
) -> dict[str, Drawing]:
    """Prepares the figure of a model that reads a prompt with one fact and a final question.

    Args:
      params: Parameters of the model.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      preset: Preset of Sketch-and-Walk, at density 0.2 where it has one.

    Returns:
      `block_map`, the attended blocks layer by layer; an orange mark below each panel shows the
      block with the fact. The prompt fills the model's context, up to 4,096 tokens.

    Raises:
      ValueError: When drawn, if the preset does not fit the model.

    Example:
      >>> figures = model_drawings(params, model_config, tokenizer)  # doctest: +SKIP
      >>> figures["block_map"].draw().savefig("block_map.png")  # doctest: +SKIP
    """

    def draw_map() -> "Figure":
        size = min(_MAP_TOKENS, model_config.context_length - 1)
        # Take the second sample: every selection keeps the beginning, where the first has its fact.
        options: dict[str, Any] = {"num_tokens": size, "count": 2, "seed": 0}
        sample = draw_samples("single_needle", read_text(), tokenizer, **options)[1]
        own = None if preset == "released" else _MAP_DENSITY
        policy = with_plan(by_name("sketchwalk", preset=preset, density=own), model_config.plan)
        generate = make_generate(model_config, policy, max_new_tokens=1, return_selection=True)
        generation = jax.device_get(generate(params, sample.tokens[None]))
        sparse = list(sparse_layers(model_config, policy))
        measured = float(np.mean(np.asarray(generation.measured_density.prefill)[sparse]))
        figure = plot_block_map(
            generation.selection,
            num_tokens=len(sample.tokens),
            dense_layers=policy.dense_layers,
            title=f"Blocks attended to in a prompt of {len(sample.tokens):,} tokens "
            f"(preset {preset}, measured density {measured:.2f})",
        )
        place = find_answer(sample)
        if place is not None:
            for axis in figure.axes:
                at = [place // policy.block_size], [axis.get_ylim()[0]]
                axis.plot(*at, "^", color=ORANGE, markersize=6, clip_on=False)
        return figure

    what = "Key blocks that each query block attended to, layer by layer"
    return {"block_map": Drawing(what, draw_map)}


def find_answer(sample: Sample) -> int | None:
    """Finds the answer in the text before the question: the index of its first token.

    `None` if the text does not contain its tokens in one piece.
    """
    answer = sample.answer[:-1].tolist()  # the full stop may merge with the next token
    before = sample.tokens[: sample.question_start].tolist()
    starts = range(len(before) - len(answer) + 1) if answer else ()
    return next((i for i in starts if before[i : i + len(answer)] == answer), None)
