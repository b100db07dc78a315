"""Figures by layer: the attention mass that selected blocks hold, and the error of the output.

`sketchwalk_jax.evaluation.plots` has these functions as well.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sketchwalk_jax.evaluation.drawing import (
    add_legend,
    check_choices,
    nominal_density,
    style_of,
    tidy,
)
from sketchwalk_jax.evaluation.summaries import Row, mean_by_layer, policy_labels, select
from sketchwalk_jax.evaluation.tables import PHASE_TITLES, density_title, longest
from sketchwalk_jax.plots import import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    chosen = [row for row in select(rows, phase=phase, density=density) if row.get(field)]
    chosen = [row for row in chosen if row["policy"] != "dense"]
    if not chosen:
        raise ValueError(f"rows must hold {field} of phase {phase!r}, got none")
    tokens = longest(chosen) if tokens is None else tokens
    chosen = select(chosen, tokens=tokens)
    labels = policy_labels(chosen)
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for label in labels:
        values = mean_by_layer(select(chosen, label=label), field)
        colour, marker = style_of(label, labels)
        heights = [math.nan if value is None else value for value in values]
        axis.plot(heights, color=colour, marker=marker, markersize=4.5, linewidth=1.2)
    axis.set_ylim(bottom=0.0)
    if field == "mass_recall_by_layer":
        axis.set_ylim(0.0, 1.02)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("layer")
    axis.set_ylabel(axis_label)
    tidy(axis)
    add_legend(figure, labels, labels, place="outside right center", columns=1)
    place = PHASE_TITLES[phase].lower()
    axis.set_title(
        title or f"{density_title(density)}, sparse in {place}, {tokens:,} tokens", fontsize=11
    )
    return figure
