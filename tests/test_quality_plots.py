"""Figures of an evaluation show what its rows hold, and powers of a model's own attention."""

import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import matplotlib
import numpy as np
import pytest
import tiny
from tolerances import tolerance

matplotlib.use("Agg")
from matplotlib import pyplot
from quality_rows import LONGEST, POLICIES, RIVALS, TASKS, make_rows, right_answers
from reference_model import ReferenceModel

from sketchwalk_jax.evaluation.attention_powers import attention_matrix, plot_attention_powers
from sketchwalk_jax.evaluation.figures import drawings, save_drawings
from sketchwalk_jax.evaluation.model_figures import find_answer, model_drawings
from sketchwalk_jax.evaluation.plots import (
    plot_accuracy,
    plot_mass_recall,
    plot_needle_depth,
    plot_output_error,
)
from sketchwalk_jax.evaluation.summaries import policy_labels, select
from sketchwalk_jax.evaluation.tables import task_title
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.tokenizer import load_tokenizer

ROWS = make_rows()
MODEL, PARAMS = tiny.MODEL, tiny.params()
TOKENS = tiny.prompts(100)[0][0]


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def panels(figure) -> dict[str, object]:
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def shown(axis) -> np.ndarray:
    """The values behind a heat map, with NaN where nothing is drawn."""
    (image,) = axis.collections or axis.get_images()
    return np.ma.filled(image.get_array().astype(float), np.nan)


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_accuracy_stands_at_its_measured_density(phase):
    figure = plot_accuracy(ROWS, phase=phase)
    axes = panels(figure)
    assert list(axes) == [task_title(task) for task in TASKS]
    labels = [label for label in policy_labels(ROWS) if label != "dense"]
    bars = axes["One of many keys"].containers
    assert len(bars) == len(labels)
    for label, bar in zip(labels, bars, strict=True):
        densities = (0.2,) if label == "released" else (0.1, 0.2)
        x, y = bar.lines[0].get_data(orig=False)
        expected = [
            np.mean(right_answers(ROWS, label, phase, "multi_key", density))
            for density in densities
        ]
        np.testing.assert_allclose(y, expected, atol=1e-9)
        (row, *_) = select(ROWS, label=label, phase=phase, tokens=LONGEST, density=densities[-1])
        assert x[-1] == pytest.approx(row["measured_density_sparse_layers"])


def test_intervals_are_those_of_the_rows():
    axis = panels(plot_accuracy(ROWS, phase="prefill", tokens=4096))["Aggregation"]
    (row,) = select(
        ROWS, label="oracle", phase="prefill", task="aggregation", tokens=4096, density=0.1
    )
    (bars,) = axis.containers[0].lines[2]
    _, ends = bars.get_segments()[0].T
    np.testing.assert_allclose(ends, [row["exact_low"], row["exact_high"]], atol=1e-9)


def test_dense_is_a_line_and_loss_has_an_axis_of_its_own():
    axes = panels(plot_accuracy(ROWS, phase="decode", layers="all_layers"))
    dense = np.mean(right_answers(ROWS, "dense", "both", "mid_prompt"))
    (line,) = (one for one in axes["Question mid-prompt"].lines if one.get_linestyle() == "--")
    np.testing.assert_allclose(line.get_ydata(), dense)
    loss = axes["Text loss"]
    (row,) = select(ROWS, label="dense", task="text_loss", tokens=LONGEST)
    (line,) = (one for one in loss.lines if one.get_linestyle() == "--")
    np.testing.assert_allclose(line.get_ydata(), row["text_loss"])
    assert loss.get_ylim()[0] > 1 and "nats" in loss.get_ylabel()
    assert "all layers" in loss.get_xlabel()


def test_policies_keep_their_colours_and_new_ones_get_others():
    colours = []
    few = dict(list(POLICIES.items())[:3])
    for policies in (POLICIES | RIVALS, few | {("kascade", None): (1, 1, 0)}):
        rows = make_rows(policies=policies, lengths=(4096,), tasks=("multi_key",))
        (legend,) = plot_accuracy(rows, phase="decode").legends
        handles = zip(legend.get_texts(), legend.legend_handles, strict=True)
        colours.append({text.get_text(): handle.get_color() for text, handle in handles})
    assert colours[0]["random"] == colours[1]["random"]
    assert len(set(colours[0].values())) == len(POLICIES) + 2  # two rivals select in prefill
    assert len(set(colours[1].values())) == 4


def test_needles_stand_at_their_depth_and_length():
    rows = [row for row in ROWS if (row["preset"], row["tokens"]) != ("damped", 8192)]
    figure = plot_needle_depth(rows, phase="both", density=0.1)
    axes = {title.partition(":")[0]: axis for title, axis in panels(figure).items()}
    assert list(axes) == policy_labels(ROWS)
    values = shown(axes["streaming"]).reshape(10, 3)
    for row in select(ROWS, label="streaming", phase="both", task="single_needle", density=0.1):
        if row["depth"] is not None:
            place = round(row["depth"] * 10 - 0.5), [4096, 8192, 16384].index(row["tokens"])
            assert values[place] == row["exact"]
    assert np.all(np.isnan(shown(axes["damped"]).reshape(10, 3)[:, 1]))
    assert axes["dense"].get_ylim() == (1.0, 0.0)  # the beginning of the prompt is at the top
    assert [tick.get_text() for tick in axes["random"].get_xticklabels()] == ["4K", "8K", "16K"]


@pytest.mark.parametrize(
    ("plot", "field"),
    [(plot_mass_recall, "mass_recall_by_layer"), (plot_output_error, "output_error_by_layer")],
)
def test_layers_have_the_mean_over_tasks_and_dense_ones_nothing(plot, field):
    (axis,) = plot(ROWS, density=0.1).axes
    labels = [label for label in policy_labels(ROWS) if label != "dense"]
    for label, line in zip(labels, axis.lines, strict=True):
        chosen = select(ROWS, label=label, phase="prefill", tokens=LONGEST, density=0.1)
        lists = [row[field][2:] for row in chosen if row[field] is not None]
        np.testing.assert_allclose(line.get_ydata()[2:], np.mean(lists, axis=0))
        assert np.all(np.isnan(line.get_ydata()[:2]))
        np.testing.assert_array_equal(line.get_xdata(), np.arange(12))


@pytest.mark.parametrize(
    ("plot", "options", "message"),
    [
        (plot_accuracy, {"phase": "all"}, "phase must be one of .*, got 'all'"),
        (plot_accuracy, {"tokens": 5}, r"tokens must be one of \[4096, 8192, 16384\], got 5"),
        (plot_accuracy, {"layers": "some"}, "layers must be"),
        (plot_needle_depth, {"density": 0.3}, r"density must be one of \[0.1, 0.2\], got 0.3"),
        (plot_mass_recall, {"phase": "both"}, "rows must hold mass_recall_by_layer"),
    ],
)
def test_wrong_choices_are_refused(plot, options, message):
    with pytest.raises(ValueError, match=message):
        plot(ROWS, **options)


@pytest.mark.parametrize("plot", [plot_accuracy, plot_needle_depth, plot_mass_recall])
def test_no_rows_are_refused(plot):
    with pytest.raises(ValueError, match="rows must hold at least one row"):
        plot([])


def test_only_what_was_measured_is_drawn():
    rows = make_rows(tasks=("multi_key", "text_loss"), phases=("decode",), lengths=(1024,))
    assert list(drawings(rows)) == ["accuracy_decode"]
    names = list(drawings(ROWS))
    assert names[:3] == ["accuracy_prefill", "accuracy_decode", "accuracy_both"]
    assert names[3:6] == ["needle_depth_prefill", "needle_depth_decode", "needle_depth_both"]
    assert names[6:] == ["mass_recall_prefill", "output_error_prefill"]


def reference_attention(layer: int) -> np.ndarray:
    """Softmax of one layer's scores, mean over heads, from the NumPy model's queries and keys."""
    model = ReferenceModel(PARAMS, MODEL, tiny.POLICIES["paper"], phase="decode")
    model.prefill(TOKENS)
    query, key, _ = model.history[layer]
    key = np.repeat(key, MODEL.num_heads // MODEL.num_kv_heads, axis=1)
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(MODEL.head_dim)
    scores = np.where(np.tri(len(TOKENS), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean(0)


@pytest.mark.parametrize("layer", [0, 3])
def test_attention_is_the_models_own_after_softmax(layer):
    found = attention_matrix(PARAMS, TOKENS, model_config=MODEL, layer=layer)
    np.testing.assert_allclose(found, reference_attention(layer), **tolerance("scores"))
    assert not np.any(np.triu(found, 1))


def test_attention_of_blocks_is_what_a_query_of_one_gives_to_another():
    found = attention_matrix(PARAMS, TOKENS, model_config=MODEL, layer=2, block_size=16)
    exact = reference_attention(2)
    starts = np.arange(0, 100, 16)
    sums = np.add.reduceat(np.add.reduceat(exact, starts, axis=0), starts, axis=1)
    counts = np.diff([*starts, 100])[:, None]  # the last block has four queries
    np.testing.assert_allclose(found, sums / counts, **tolerance("scores"))
    np.testing.assert_allclose(found.sum(-1), 1.0, **tolerance("scores"))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (TOKENS, {"layer": 4}, "layer must be in 0..3, got 4"),
        (TOKENS, {"layer": 0, "block_size": 0}, "block_size must be positive, got 0"),
        (TOKENS[:0], {"layer": 0}, "tokens must be one prompt"),
    ],
)
def test_wrong_layers_blocks_and_prompts_are_refused(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        attention_matrix(PARAMS, tokens, model_config=MODEL, **options)


def test_powers_are_drawn_with_a_panel_each():
    attention = reference_attention(1)
    figure = plot_attention_powers(attention, powers=(1, 4), title="Powers")
    axes = panels(figure)
    assert list(axes) == ["$A^{1}$", "$A^{4}$"]
    expected = attention @ attention @ attention @ attention
    causal = np.tri(100, dtype=bool)
    found = shown(axes["$A^{4}$"])
    floor = axes["$A^{4}$"].get_images()[0].norm.vmin
    np.testing.assert_allclose(found[causal], np.maximum(expected, floor)[causal], rtol=1e-9)
    assert np.all(np.isnan(found[~causal]))
    share = expected[64:, :64].sum(-1).mean()
    assert axes["$A^{4}$"].texts[0].get_text().startswith(f"{share:.0%} on the")
    assert figure.get_suptitle() == "Powers"


def test_large_matrices_are_drawn_in_cells_that_keep_their_rows_sums():
    size = 1001
    attention = np.tri(size) / np.arange(1, size + 1)[:, None]
    (axis,) = panels(plot_attention_powers(attention, powers=(2,))).values()
    cells = shown(axis)
    assert cells.shape == (251, 251)  # of four tokens
    np.testing.assert_allclose(np.nansum(cells[5:], axis=1), 1.0, atol=1e-3)
    assert axis.get_xlim() == (0, size)


@pytest.mark.parametrize(
    ("attention", "powers", "message"),
    [
        (np.ones((2, 3)), (1,), r"attention must have shape \[S, S\], got \(2, 3\)"),
        (np.full((2, 2), 0.5), (1,), "attention must be lower triangular"),
        (np.tri(2), (1,), "with rows that sum to 1"),
        (np.eye(2), (), "powers must be positive integers"),
        (np.eye(2), (1.5,), "powers must be positive integers"),
    ],
)
@pytest.mark.unchecked
def test_what_is_no_attention_is_refused(attention, powers, message):
    with pytest.raises(ValueError, match=message):
        plot_attention_powers(attention, powers=powers)


def test_one_token_has_powers_too():
    assert len(panels(plot_attention_powers(np.ones((1, 1))))) == 3


def sample(tokens: list[int], answer: list[int], question: int) -> Sample:
    arrays = (np.array(one, np.int32) for one in (tokens, answer))
    tokens_, answer_ = arrays
    return Sample("single_needle", tokens_, len(tokens), answer_, question, "5.")


def test_the_answer_is_found_before_the_question_only():
    assert find_answer(sample([9, 5, 6, 7, 1, 5, 6], [5, 6, 0], 5)) == 1
    assert find_answer(sample([9, 9, 9, 9, 1, 5, 6], [5, 6, 0], 5)) is None
    assert find_answer(sample([9], [5, 6, 0], 1)) is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    checkpoints.write_checkpoint(
        directory, tokenizer=True, num_hidden_layers=4, max_position_embeddings=2048
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_a_checkpoint_is_drawn_reading_one_prompt(checkpoint, preset, tmp_path):
    params, model_config = load(checkpoint, dtype="float32")
    found = model_drawings(params, model_config, load_tokenizer(checkpoint), preset=preset, layer=3)
    assert list(found) == ["block_map", "attention_powers"]
    figure = found["block_map"].draw()
    assert f"preset {preset}, measured density 0." in figure.get_suptitle()
    for axis in figure.axes:
        (mark,) = axis.lines
        assert 0 < mark.get_xdata()[0] < 2048 // 64
    assert set(list(panels(figure))[0].split()[:2]) == {"layer", "2:"}
    paths = save_drawings({"attention_powers": found["attention_powers"]}, tmp_path)
    assert [path.name for path in paths] == ["attention_powers.png"]


@pytest.mark.parametrize("draw", [lambda: plot_accuracy(ROWS), lambda: plot_mass_recall(ROWS)])
def test_missing_matplotlib_names_the_extra(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"sketchwalk-jax\[plots\]"):
        draw()
