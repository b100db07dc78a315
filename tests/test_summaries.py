"""Rows are chosen, pooled and compared prompt by prompt, with intervals that cover."""

import numpy as np
import pytest
from quality_rows import LONGEST, POLICIES, make_rows, right_answers
from scipy.stats import binomtest, t

from sketchwalk_jax.evaluation.results import wilson_interval
from sketchwalk_jax.evaluation.summaries import (
    mean_by_layer,
    mean_interval,
    paired_difference,
    paired_interval,
    paired_loss_difference,
    policy_labels,
    pool,
    rows_with,
)

ROWS = make_rows()


@pytest.mark.parametrize(("right", "count"), [(0, 1), (0, 50), (7, 10), (50, 50), (120, 361)])
def test_wilson_interval_is_scipys(right, count):
    expected = binomtest(right, count).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson_interval(right, count), expected, atol=1e-12)


def test_mean_interval_is_scipys():
    values = np.random.default_rng(0).normal(size=7)
    expected = t.interval(0.95, 6, values.mean(), values.std(ddof=1) / np.sqrt(7))
    np.testing.assert_allclose(mean_interval(values.tolist()), expected)


@pytest.mark.parametrize("counts", [(36, 12, 2, 0), (0, 50, 0, 0), (50, 0, 0, 0), (3, 9, 1, 7)])
def test_paired_interval_turns_round_with_its_pairs(counts):
    both, first, second, neither = counts
    low, high = paired_interval(*counts)
    assert -1 - 1e-9 <= low < (first - second) / sum(counts) + 1e-9 <= high + 1e-9 <= 1 + 1e-8
    np.testing.assert_allclose(paired_interval(both, second, first, neither), (-high, -low))


def test_paired_interval_covers_the_difference_as_often_as_it_says():
    rng = np.random.default_rng(0)
    chances = np.array([0.5, 0.25, 0.1, 0.15])
    ends = np.array(
        [paired_interval(*draw) for draw in rng.multinomial(50, chances, 4000).tolist()]
    )
    covered = np.mean((ends[:, 0] <= 0.15) & (ends[:, 1] >= 0.15))
    assert 0.93 < covered < 0.98


def test_pairs_count_and_not_only_shares():
    one, other = paired_interval(20, 10, 10, 10), paired_interval(30, 0, 0, 20)
    assert other[1] - other[0] < 0.5 * (one[1] - one[0])


@pytest.mark.parametrize("task", ["single_needle", "variable_tracking", "mid_prompt"])
def test_pooled_rows_count_every_prompt_once(task):
    pooled = pool(
        rows_with(ROWS, label="damped", phase="prefill", task=task, tokens=LONGEST, density=0.2)
    )
    expected = right_answers(ROWS, "damped", "prefill", task)
    assert pooled.prompts == len(expected)
    assert pooled.exact == pytest.approx(np.mean(expected))
    interval = binomtest(sum(expected), len(expected)).proportion_ci(method="wilson")
    assert (pooled.low, pooled.high) == pytest.approx(tuple(interval))


def test_needles_are_pooled_over_depths_where_no_row_has_all_of_them():
    rows = [row for row in ROWS if row["task"] == "single_needle" and row["depth"] is not None]
    pooled = pool(rows_with(rows, label="oracle", phase="decode", tokens=LONGEST, density=0.1))
    assert pooled.exact == pytest.approx(
        np.mean(right_answers(ROWS, "oracle", "decode", "single_needle", 0.1))
    )


def test_nothing_pools_to_nothing():
    assert pool([]) is None
    assert paired_difference([], []) is None
    assert paired_loss_difference([], []) is None


def test_dense_answers_to_every_density_and_own_densities_to_all():
    assert rows_with(ROWS, label="dense", phase="decode", density=0.1)
    own = rows_with(ROWS, label="released", phase="decode", density=0.1)
    assert {row["density"] for row in own} == {None}
    assert {row["phase"] for row in own} == {"decode"}


def test_unknown_policies_come_after_the_method_and_before_the_simple_ones():
    rows = make_rows(policies=POLICIES | {("quest", None): (0.9, 0.8, 0.0)})
    labels = policy_labels(rows)
    assert labels[0] == "dense"
    assert labels.index("released") < labels.index("quest") < labels.index("streaming")


def test_layers_that_are_dense_have_no_mean():
    chosen = rows_with(ROWS, label="paper", phase="prefill", tokens=LONGEST, density=0.2)
    means = mean_by_layer(chosen, "mass_recall_by_layer")
    lists = [row["mass_recall_by_layer"] for row in chosen if row["depth"] is None]
    assert means[:2] == [None, None]
    np.testing.assert_allclose(means[2:], np.mean([one[2:] for one in lists], axis=0))
