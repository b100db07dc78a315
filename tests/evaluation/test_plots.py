"""Figures show the attended blocks and the measured density."""

import sys
from collections.abc import Iterator

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
from cases import draw_lists, pack_lists
from drawn import shown
from matplotlib import pyplot

from sketchwalk_jax import BlockSelection, Density
from sketchwalk_jax.plots import block_map, plot_block_map, plot_density

SIZE = 16


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def draw_selection(*, num_layers: int, batch: int, num_lists: int, num_rows: int):
    """Draws causal masks `[L, B, M, I, I]` and their lists, with invalid ids after each count."""
    rng = np.random.default_rng(0)
    mask = np.stack([draw_lists(rng, batch, num_lists, num_rows) for _ in range(num_layers)])
    ids, counts = pack_lists(mask)
    ids[np.arange(ids.shape[-1]) >= counts[..., None]] = 0
    return mask, BlockSelection(ids, counts, SIZE)


@pytest.mark.parametrize("num_lists", [1, 4])
def test_block_map_is_the_share_of_lists_that_hold_a_block(num_lists):
    mask, selection = draw_selection(num_layers=3, batch=2, num_lists=num_lists, num_rows=6)
    causal = np.tri(6, dtype=bool)
    for sequence in range(2):
        expected = np.where(causal, mask[:, sequence].mean(1), np.nan)
        np.testing.assert_allclose(block_map(selection, sequence=sequence), expected, rtol=1e-6)


@pytest.mark.unchecked
def test_dense_attention_has_no_block_map():
    with pytest.raises(ValueError, match="got None: attention was dense"):
        block_map(None)


def test_block_map_takes_one_layer_and_a_continued_prompt():
    _, selection = draw_selection(num_layers=2, batch=1, num_lists=1, num_rows=6)
    ids, counts = selection.ids[1], selection.counts[1]
    whole = block_map(selection)[1]
    np.testing.assert_array_equal(block_map(BlockSelection(ids, counts, SIZE))[0], whole)
    rows = BlockSelection(ids[..., 4:, :], counts[..., 4:], SIZE)
    np.testing.assert_array_equal(block_map(rows, first_block=4)[0], whole[4:])


def test_grid_has_a_numbered_panel_for_every_layer():
    _, selection = draw_selection(num_layers=7, batch=1, num_lists=1, num_rows=5)
    figure = plot_block_map(selection, dense_layers=2, title="Blocks")
    panels = [axis for axis in figure.axes if axis.get_visible()]
    expected = block_map(selection)
    for index, axis in enumerate(panels):
        np.testing.assert_array_equal(shown(axis), expected[index])
        share = np.nanmean(expected[index])
        assert axis.get_title() == f"layer {index + 2}: {share:.0%} of blocks"
    assert len(panels) == 7
    assert figure.get_suptitle() == "Blocks"
    assert figure.get_supxlabel() == f"key block ({SIZE} tokens each)"
    assert figure.get_supylabel() == f"query block ({SIZE} tokens each)"


def test_one_layer_of_one_sequence_without_its_padding():
    _, selection = draw_selection(num_layers=3, batch=2, num_lists=1, num_rows=6)
    figure = plot_block_map(selection, layer=3, sequence=1, num_tokens=3 * SIZE + 1, dense_layers=2)
    (axis,) = figure.axes
    np.testing.assert_array_equal(shown(axis), block_map(selection, sequence=1)[1, :4, :4])
    # The first query block is at the top, and ticks count blocks.
    assert axis.get_ylim() == (3.5, -0.5)
    assert axis.get_xlim() == (-0.5, 3.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 1, "dense_layers": 2}, "layer must be in 2..3, got 1"),
        ({"layer": 4, "dense_layers": 2}, "layer must be in 2..3, got 4"),
        ({"sequence": 1}, "sequence must be in 0..0, got 1"),
        ({"num_tokens": 81}, "num_tokens must be in 1..80, got 81"),
        ({"num_tokens": 0}, "num_tokens must be in 1..80, got 0"),
    ],
)
def test_wrong_choices_are_refused(options, message):
    _, selection = draw_selection(num_layers=2, batch=1, num_lists=1, num_rows=5)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        plot_block_map(selection, **options)
    wrong = BlockSelection(selection.ids[0, 0], selection.counts[0, 0], SIZE)
    with pytest.raises(ValueError, match=r"selection must have ids .* got \(1, 5, 3\) and"):
        block_map(wrong)


def density(decoded: float) -> Density:
    """Two layers, one dense; a batch of two."""
    return Density(
        np.array([[10.0, 30.0], [5.0, 5.0]], np.float32),
        np.array([10.0, 30.0], np.float32),
        np.array([[4.0, 4.0], [1.0, 3.0]], np.float32) * decoded,
        np.array([4.0, 4.0], np.float32) * decoded,
    )


def test_density_is_drawn_by_layer_for_each_phase_with_tokens():
    (axis,) = plot_density(density(1.0), title="Density").axes
    lines = {line.get_label(): line.get_ydata() for line in axis.get_lines()}
    np.testing.assert_allclose(lines["prefill"], [1.0, 0.25])
    np.testing.assert_allclose(lines["decode"], [1.0, 0.5])
    np.testing.assert_allclose(lines["all together: 64.6%"], 62 / 96)
    assert axis.get_title() == "Density"
    (axis,) = plot_density(density(0.0)).axes
    labels = [line.get_label() for line in axis.get_lines()]
    assert labels == ["prefill", "all together: 62.5%"]


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"sketchwalk-jax\[plots\]"):
        plot_density(density(1.0))
