"""Figures of an evaluation show the values in its rows."""

import functools
import sys
from collections.abc import Iterator

import matplotlib
import numpy as np
import pytest
from variants import slow_unless

matplotlib.use("Agg")
from drawn import panels, shown
from matplotlib import pyplot
from quality_rows import LONGEST, POLICIES, RIVALS, TASKS, make_rows, right_answers

from sketchwalk_jax.evaluation.report import (
    plot_accuracy,
    plot_by_layer,
    plot_needle_depth,
)
from sketchwalk_jax.evaluation.tables import policy_labels, rows_with, task_title

every_row = functools.cache(make_rows)


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.mark.parametrize("phase", slow_unless("both".__eq__, ["prefill", "decode", "both"]))
def test_accuracy_stands_at_its_measured_density(phase):
    figure = plot_accuracy(every_row(), phase=phase)
    figure.canvas.draw()
    axes = panels(figure)
    assert list(axes) == [task_title(task) for task in TASKS]
    labels = [label for label in policy_labels(every_row()) if label != "dense"]
    axis = axes["One of many keys"]
    for label, bar in zip(labels, axis.containers, strict=True):
        densities = (0.2,) if label == "released" else (0.1, 0.2)
        place = {"label": label, "phase": phase, "tokens": LONGEST, "task": "multi_key"}
        measured, expected = [], []
        for density in densities:
            (row,) = rows_with(every_row(), density=density, **place)
            measured.append(row["measured_density_sparse_layers"])
            expected.append(np.mean(right_answers(every_row(), label, phase, "multi_key", density)))
        x, y = bar.lines[0].get_data(orig=False)
        np.testing.assert_allclose((x, y), (measured, expected), atol=1e-9)
        assert bar.lines[0].get_transform() == axis.transData


def test_intervals_are_those_of_the_rows():
    axis = panels(plot_accuracy(every_row(), phase="prefill", tokens=4096))["Aggregation"]
    (row,) = rows_with(
        every_row(), label="oracle", phase="prefill", task="aggregation", tokens=4096, density=0.1
    )
    (bars,) = axis.containers[0].lines[2]
    _, ends = bars.get_segments()[0].T
    np.testing.assert_allclose(ends, [row["exact_low"], row["exact_high"]], atol=1e-5)


def test_dense_is_a_line_and_loss_has_an_axis_of_its_own():
    axes = panels(plot_accuracy(every_row(), phase="decode"))
    (row,) = rows_with(every_row(), label="dense", task="text_loss", tokens=LONGEST)
    dense = np.mean(right_answers(every_row(), "dense", "both", "mid_prompt"))
    for title, value in {"Question mid-prompt": dense, "Text loss": row["text_loss"]}.items():
        (line,) = (one for one in axes[title].lines if one.get_linestyle() == "--")
        np.testing.assert_allclose(line.get_ydata(), value)
    loss = axes["Text loss"]
    assert loss.get_ylim()[0] > 1 and "nats" in loss.get_ylabel()
    assert "sparse layers" in loss.get_xlabel()


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
    rows = [row for row in every_row() if (row["preset"], row["tokens"]) != ("damped", 8192)]
    figure = plot_needle_depth(rows, phase="both", density=0.1)
    axes = {title.partition(":")[0]: axis for title, axis in panels(figure).items()}
    assert list(axes) == policy_labels(every_row())
    values = shown(axes["streaming"]).reshape(10, 3)
    shown_rows = {"phase": "both", "task": "single_needle", "density": 0.1}
    for row in rows_with(every_row(), label="streaming", **shown_rows):
        if row["depth"] is not None:
            place = round(row["depth"] * 10 - 0.5), [4096, 8192, 16384].index(row["tokens"])
            assert values[place] == row["exact"]
    assert np.all(np.isnan(shown(axes["damped"]).reshape(10, 3)[:, 1]))
    assert axes["dense"].get_ylim() == (1.0, 0.0)  # the start of the prompt is at the top
    assert [tick.get_text() for tick in axes["random"].get_xticklabels()] == ["4K", "8K", "16K"]


@pytest.mark.parametrize("field", ["mass_recall_by_layer", "output_error_by_layer"])
def test_layers_have_the_mean_over_tasks_and_dense_ones_nothing(field):
    (axis,) = plot_by_layer(every_row(), field=field, density=0.1).axes
    labels = [label for label in policy_labels(every_row()) if label != "dense"]
    for label, line in zip(labels, axis.lines, strict=True):
        chosen = rows_with(every_row(), label=label, phase="prefill", tokens=LONGEST, density=0.1)
        lists = [row[field][2:] for row in chosen if row[field] is not None]
        np.testing.assert_allclose(line.get_ydata()[2:], np.mean(lists, axis=0))
        assert np.all(np.isnan(line.get_ydata()[:2]))
        np.testing.assert_array_equal(line.get_xdata(), np.arange(12))


@pytest.mark.parametrize(
    ("plot", "options", "message"),
    [
        (plot_accuracy, {"phase": "all"}, "phase must be one of .*, got 'all'"),
        (plot_accuracy, {"tokens": 5}, r"tokens must be one of \[4096, 8192, 16384\], got 5"),
        (plot_needle_depth, {"density": 0.3}, r"density must be one of \[0.1, 0.2\], got 0.3"),
        (plot_by_layer, {"phase": "both"}, "rows must hold mass_recall_by_layer"),
    ],
)
def test_wrong_choices_are_refused(plot, options, message):
    with pytest.raises(ValueError, match=message):
        plot(every_row(), **options)
    with pytest.raises(ValueError, match="rows must hold at least one row"):
        plot([])


@pytest.mark.parametrize("plot", [plot_accuracy, plot_by_layer])
def test_missing_matplotlib_names_the_extra(monkeypatch, plot):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"sketchwalk-jax\[plots\]"):
        plot(every_row())
