"""Figures of attended blocks (block maps) and of measured density.

Each function makes a matplotlib figure with `pyplot`: notebooks show it, scripts save it.
matplotlib comes with the extra `plots`: `pip install "sketchwalk-jax[plots]"`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sketchwalk_jax.inference.cache import Density
from sketchwalk_jax.selection import BlockSelection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which all kinds of colour vision can tell apart.
BLUE, ORANGE = "#0072B2", "#D55E00"
LIGHT_GREY, DARK, _WHITE = "#E4E4E4", "#333333", "#FFFFFF"
HALF_BLUE = "#72ABCB"  # between blue and grey: some of the lists
_MAX_COLUMNS = 5


def import_pyplot() -> Any:
    """Imports `matplotlib.pyplot`, or raises an `ImportError` that says how to install it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            'plots must have matplotlib: pip install "sketchwalk-jax[plots]"'
        ) from error
    return pyplot


def block_map(selection: BlockSelection, *, sequence: int = 0, first_block: int = 0) -> np.ndarray:
    """Share of each key block that each query block attended to, as a dense array on the host.

    Args:
      selection: Block indices `[B, M, I, P]`, or `[L, B, M, I, P]` as from
        `generate(return_selection=True)`.
      sequence: Index of the sequence in the batch.
      first_block: Block of the selection's first row.

    Returns:
      float32 `[L, I, first_block + I]` (`L = 1` without a layer axis), in blocks of the rows' size:
      the share of a block in a row's lists, a mean over the lists. It is 0 or 1 if all heads share
      one list of such blocks, and may be in between if lists hold pages of them or differ by head.
      Blocks after the row's own are NaN.

    Raises:
      ValueError: If the selection has another number of axes or no such sequence.

    Example:
      >>> import jax.numpy as jnp
      >>> from sketchwalk_jax.selection import full_selection
      >>> block_map(full_selection(jnp.arange(3)[None], 3)).shape
      (1, 3, 3)
    """
    if selection is None:
        raise ValueError("selection must be a BlockSelection, got None: attention was dense")
    ids, counts = np.asarray(selection.ids), np.asarray(selection.counts)
    if ids.ndim not in (4, 5) or counts.shape != ids.shape[:-1]:
        raise ValueError(
            "selection must have ids [B, M, I, P] or [L, B, M, I, P] and counts without the last "
            f"axis, got {ids.shape} and {counts.shape}"
        )
    if ids.ndim == 4:
        ids, counts = ids[None], counts[None]
    if not 0 <= sequence < ids.shape[1]:
        raise ValueError(f"sequence must be in 0..{ids.shape[1] - 1}, got {sequence}")
    ids, counts = ids[:, sequence], counts[:, sequence]
    num_layers, num_lists, num_rows, width = ids.shape
    num_blocks = first_block + num_rows
    parts = selection.queries_per_row // selection.block_size
    listed = (np.arange(width) < counts[..., None]) & (ids >= 0) & (ids < num_blocks * parts)
    layer, _, row, _ = place = np.nonzero(listed)
    shares = np.zeros((num_layers, num_rows, num_blocks), np.float32)
    np.add.at(shares, (layer, row, ids[place] // parts), 1.0 / (num_lists * parts))
    is_causal = np.tri(num_rows, num_blocks, first_block, dtype=bool)
    return np.where(is_causal, shares, np.nan).astype(np.float32)


def plot_block_map(
    selection: BlockSelection,
    *,
    layer: int | None = None,
    sequence: int = 0,
    num_tokens: int | None = None,
    first_block: int = 0,
    dense_layers: int | tuple[int, ...] = 0,
    title: str | None = None,
) -> "Figure":
    """Draws the key blocks (columns) that each query block (row) attended to.

    Attended blocks are blue, other causal blocks grey. If heads have different lists, or lists hold
    pages of a block, the depth of the blue is the share of heads or of pages.

    Args:
      selection: Selection from `generate(..., return_selection=True)`, or of one layer.
      layer: Index in the model of the layer to draw. Default: a grid of all layers.
      sequence: Index of the sequence in the batch.
      num_tokens: Number of tokens of that sequence, to omit the padding. Default: draw all.
      first_block: Block of the selection's first row, if the prompt continued a cache.
      dense_layers: Layers that are not in the selection, as in the configuration: the number of
        leading ones, or their indices. Used only to number layers.
      title: Title of the figure.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If the selection has no such layer, sequence or tokens.

    Example:
      >>> out = generate(params, tokens)  # doctest: +SKIP
      >>> plot_block_map(out.selection, dense_layers=2, num_tokens=2700)  # doctest: +SKIP
    """
    shares = block_map(selection, sequence=sequence, first_block=first_block)
    dense = range(dense_layers) if isinstance(dense_layers, int) else dense_layers
    drawn = [i for i in range(len(shares) + len(dense)) if i not in dense][: len(shares)]
    if layer is not None and layer not in drawn:
        where = f"{drawn[0]}..{drawn[-1]}" if drawn[-1] - drawn[0] < len(drawn) else f"{drawn}"
        raise ValueError(f"layer must be in {where}, got {layer}")
    size = selection.queries_per_row
    num_rows = shares.shape[1]
    if num_tokens is not None:
        num_rows = -(-num_tokens // size) - first_block
        if not 0 < num_rows <= shares.shape[1]:
            low, high = first_block * size + 1, (first_block + shares.shape[1]) * size
            raise ValueError(f"num_tokens must be in {low}..{high}, got {num_tokens}")
    shares = shares[:, :num_rows, : first_block + num_rows]
    layers = [layer] if layer is not None else drawn

    pyplot = import_pyplot()
    columns = min(_MAX_COLUMNS, len(layers))
    rows = math.ceil(len(layers) / columns)
    panel = 4.6 if len(layers) == 1 else 2.3
    height = panel * rows * num_rows / shares.shape[2] + 0.7
    figure = pyplot.figure(figsize=(panel * columns + 0.5, height), layout="constrained")
    kept = shares[[drawn.index(one) for one in layers]]
    panels = draw_maps(figure, kept, layers, block_size=size, first_row=first_block)
    has_shares = bool(np.any((shares > 0) & (shares < 1)))
    _explain_colours(panels[0], parts_of(selection) if has_shares else None)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def draw_maps(
    figure: Any, maps: np.ndarray, layers: Sequence[int], *, block_size: int, first_row: int = 0
) -> list[Any]:
    """Draws a map for each layer into an empty figure or subfigure; returns the panels."""
    columns = min(_MAX_COLUMNS, len(maps))
    rows = math.ceil(len(maps) / columns)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in axes[len(maps) :]:
        axis.set_visible(False)
    for axis, shares, layer in zip(axes, maps, layers, strict=False):
        draw_map(axis, shares, first_row)
        axis.set_title(f"layer {layer}: {np.nanmean(shares):.0%} of blocks", fontsize=9)
    figure.supxlabel(f"key block ({block_size} tokens each)", fontsize=10)
    figure.supylabel(f"query block ({block_size} tokens each)", fontsize=10)
    return list(axes[: len(maps)])


def draw_map(axis: Any, shares: np.ndarray, first_row: int) -> None:
    """Draws shares `[rows, key blocks]` into a panel; NaN entries stay white."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    scale = LinearSegmentedColormap.from_list("attended", [LIGHT_GREY, BLUE])
    num_rows, num_blocks = shares.shape
    axis.imshow(
        np.ma.masked_invalid(shares),
        cmap=scale.with_extremes(bad=_WHITE),
        vmin=0.0,
        vmax=1.0,
        interpolation="none",
        extent=(-0.5, num_blocks - 0.5, first_row + num_rows - 0.5, first_row - 0.5),
    )
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def parts_of(selection: BlockSelection) -> str:
    """Names the parts of a partly attended block: heads, or pages."""
    return "pages" if selection.queries_per_row > selection.block_size else "heads"


def _explain_colours(axis: Any, parts: str | None) -> None:
    from matplotlib.patches import Patch

    meaning = {BLUE: f"all {parts}" if parts else "attended", LIGHT_GREY: "not attended"}
    patches = [Patch(color=colour, label=label) for colour, label in meaning.items()]
    axis.legend(handles=patches, loc="upper right", fontsize=7, frameon=False)


def plot_density(density: Density, *, title: str | None = None) -> "Figure":
    """Draws the measured density of each layer, for prompts and for decoded tokens.

    Args:
      density: `Generation.measured_density`.
      title: Title of the figure.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.

    Example:
      >>> plot_density(generate(params, tokens).measured_density)  # doctest: +SKIP
    """
    pyplot = import_pyplot()
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, axis = pyplot.subplots(figsize=(5.6, 3.2), layout="constrained")
    for name, colour, style in (
        ("prefill", BLUE, {"marker": "o", "markersize": 9, "markerfacecolor": "none"}),
        ("decode", ORANGE, {"marker": "s", "markersize": 4, "linestyle": "--"}),
    ):
        if float(np.sum(getattr(density, f"{name}_causal"))) > 0:
            values = np.asarray(getattr(density, name))
            axis.plot(values, color=colour, label=name, **style)
    overall = float(density.overall)
    axis.axhline(
        overall, color="black", linestyle=":", linewidth=1, label=f"all together: {overall:.1%}"
    )
    axis.set_ylim(0.0, 1.05)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axis.set_xlabel("layer")
    axis.set_ylabel("attended causal pairs")
    axis.grid(axis="y", color=LIGHT_GREY)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    if title is not None:
        axis.set_title(title, fontsize=11)
    return figure
