"""What the figures of an evaluation share: colours, panels, legends, and the checks of choices."""

import math
from collections.abc import Sequence
from typing import Any

from sketchwalk_jax.evaluation.summaries import PHASES, Row, densities, values_of
from sketchwalk_jax.plots import import_pyplot

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
LIGHT_GREY, BLUE, WHITE = "#E4E4E4", "#0072B2", "#FFFFFF"
_MAX_COLUMNS = 4


def style_of(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a policy; `labels` are all policies of the figure."""
    if label in _STYLES:
        return _STYLES[label]
    index = [name for name in labels if name not in _STYLES].index(label)
    return _OTHER_COLOURS[index % len(_OTHER_COLOURS)], _OTHER_MARKERS[index % len(_OTHER_MARKERS)]


def check_choices(rows: Sequence[Row], **wanted: Any) -> None:
    """Raises a `ValueError` unless there are rows and each wanted value is one of theirs."""
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    for name, value in wanted.items():
        found = PHASES if name == "phase" else values_of(rows, name)
        if value is not None and value not in found:
            raise ValueError(f"{name} must be one of {list(found)}, got {value!r}")


def nominal_density(rows: Sequence[Row], density: float | None) -> float | None:
    """The density asked for, or the highest one below 1; `None` if every policy sets its own."""
    found = densities(rows)
    if density is None:
        return max((one for one in found if one < 1.0), default=found[-1] if found else None)
    if density not in found:
        raise ValueError(f"density must be one of {found}, got {density!r}")
    return density


def make_panels(count: int, *, size: tuple[float, float], **shared: bool) -> tuple[Any, list[Any]]:
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


def are_lowest(count: int) -> list[bool]:
    """Whether no panel of a grid stands below each."""
    columns = min(_MAX_COLUMNS, count)
    return [index + columns >= count for index in range(count)]


def tidy(axis: Any) -> None:
    """Light horizontal lines, small numbers, no frame above and to the right."""
    axis.grid(axis="y", color=LIGHT_GREY)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def add_legend(
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
