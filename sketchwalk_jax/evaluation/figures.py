"""Which figures the rows of an evaluation give, under which names, and saving them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sketchwalk_jax.evaluation.plots import (
    plot_accuracy,
    plot_mass_recall,
    plot_needle_depth,
    plot_output_error,
)
from sketchwalk_jax.evaluation.summaries import Row, measured_phases, probed_phases, select
from sketchwalk_jax.evaluation.tables import PHASE_TITLES
from sketchwalk_jax.plots import import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure to be.

    Attributes:
      description: What it shows, in a sentence.
      draw: Makes it.
    """

    description: str
    draw: Callable[[], "Figure"]


def drawings(rows: Sequence[Row]) -> dict[str, Drawing]:
    """The figures that some rows give, by name; nothing is drawn yet.

    Args:
      rows: Rows of one evaluation.

    Returns:
      Accuracy, needles by depth, mass recall and output error, in each phase that was measured.
      By depth and by layer at the highest density below 1.

    Example:
      >>> list(drawings(rows))  # doctest: +SKIP
      ['accuracy_prefill', 'accuracy_decode', 'accuracy_both', 'needle_depth_prefill', ...]
    """
    found = {}
    phases = measured_phases(rows)
    for phase in phases:
        what = f"Right answers against measured density, {PHASE_TITLES[phase].lower()} sparse"
        found[f"accuracy_{phase}"] = Drawing(what, partial(plot_accuracy, rows, phase=phase))
    for phase in phases:
        if any(row["depth"] is not None for row in select(rows, phase=phase)):
            what = f"Needles found by depth and length, {PHASE_TITLES[phase].lower()} sparse"
            draw = partial(plot_needle_depth, rows, phase=phase)
            found[f"needle_depth_{phase}"] = Drawing(what, draw)
    for field, name, plot, what in (
        ("mass_recall_by_layer", "mass_recall", plot_mass_recall, "Attention mass kept"),
        ("output_error_by_layer", "output_error", plot_output_error, "Error of the output"),
    ):
        for phase in probed_phases(rows, field):
            title = f"{what} by layer, {PHASE_TITLES[phase].lower()} sparse"
            found[f"{name}_{phase}"] = Drawing(title, partial(plot, rows, phase=phase))
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
