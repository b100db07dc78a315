"""The demonstration's picture: what was attended to, and where the facts were."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sketchwalk_jax.cli.demo_prompt import Prompt
from sketchwalk_jax.cli.demo_reader import Answer, Reader
from sketchwalk_jax.plots import ORANGE, block_map, draw_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 5


def save_picture(
    path: Path, prompt: Prompt, dense: Reader, sparse: Reader, *, first_layer: int, title: str
) -> None:
    """Writes the picture of `draw_picture`.

    Raises:
      ImportError: If matplotlib is missing.
      OSError: If the file cannot be written.
    """
    draw_picture(prompt, dense, sparse, first_layer=first_layer, title=title).savefig(path, dpi=110)


def draw_picture(
    prompt: Prompt, dense: Reader, sparse: Reader, *, first_layer: int, title: str
) -> "Figure":
    """Draws a block map for every sparse layer, and below them what each question attended to.

    Orange marks stand below the blocks in which the facts are. Where every question attended to
    everything, as with a preset that reads the end of a prompt densely, that part is left out.

    Args:
      prompt: The text.
      dense: Its answers stand beside those of `sparse`.
      sparse: What selected the blocks that are drawn.
      first_layer: The first sparse layer, as the model counts.
      title: Title of the figure.

    Raises:
      ImportError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'the picture needs matplotlib: pip install "sketchwalk-jax[plots]"'
        ) from error
    assert sparse.selection is not None
    size = sparse.selection.block_size
    maps = block_map(sparse.selection)
    num_blocks = -(-len(prompt.tokens) // size)
    maps = maps[:, :num_blocks, :num_blocks]
    places = [(fact.position - 1) // size for fact in prompt.facts]

    has_strips = not all(_is_full(answer) for answer in sparse.answers)
    rows = math.ceil(len(maps) / _COLUMNS)
    heights = [2.4 * rows + 0.5, 0.5 + 0.7 * len(places)][: 1 + has_strips]
    figure = Figure(figsize=(12, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=12)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    above = parts[0]
    panels = above.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for index, panel in enumerate(panels):
        if index >= len(maps):
            panel.set_visible(False)
            continue
        draw_map(panel, maps[index], 0)
        _mark(panel, places)
        share = np.nanmean(maps[index])
        panel.set_title(f"layer {first_layer + index}: {share:.0%} of blocks", fontsize=9)
    above.supxlabel(f"key block ({size} tokens each), marks: the facts", fontsize=10)
    above.supylabel("query block", fontsize=10)

    if has_strips:
        _draw_strips(parts[1], prompt, places, dense, sparse, first_layer)
    return figure


def _is_full(answer: Answer) -> bool:
    return answer.blocks is not None and bool(np.nanmin(answer.blocks) == 1.0)


def _draw_strips(
    below: Any,
    prompt: Prompt,
    places: Sequence[int],
    dense: Reader,
    sparse: Reader,
    first_layer: int,
) -> None:
    """What the end of each question attended to, layer by layer."""
    strips = below.subplots(len(places), 1, sharex=True, squeeze=False)[:, 0]
    asked = zip(strips, prompt.facts, places, dense.answers, sparse.answers, strict=True)
    for strip, fact, place, was, now in asked:
        assert now.blocks is not None
        draw_map(strip, now.blocks, first_layer)
        strip.set_aspect("auto")
        _mark(strip, [place])
        strip.set_title(
            f"{fact.word}, {fact.number}: dense {_verdict(was)}; sparse {_verdict(now)}",
            fontsize=9,
            loc="left",
        )
    below.supxlabel(
        "key blocks that the end of each question attended to, before the answer", fontsize=10
    )
    below.supylabel("layer", fontsize=10)


def _verdict(answer: Answer) -> str:
    if answer.is_right:
        return "right"
    text = answer.text.encode("ascii", errors="replace").decode()  # which every font can write
    return f"wrong, {text}" if text else "silent"


def _mark(axis: Any, places: Sequence[int]) -> None:
    """Points at blocks from below the panel."""
    bottom = axis.get_ylim()[0]
    axis.plot(places, [bottom] * len(places), "^", color=ORANGE, markersize=5, clip_on=False)
