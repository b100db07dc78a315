"""Rows are chosen, pooled and compared by prompt; tables show that and every gap."""

import functools
import re

import numpy as np
import pytest
from quality_rows import LONGEST, POLICIES, RIVALS, cells, make_rows, right_answers
from scipy.stats import binomtest, t

from sketchwalk_jax.evaluation.tables import (
    accuracy_table,
    difference_table,
    hops_table,
    lengths_table,
    loss_table,
    mean_interval,
    paired_difference,
    paired_interval,
    policy_labels,
    pool,
    recall_table,
    rows_with,
    settings_table,
    signed,
    summary_table,
)

every_row = functools.cache(make_rows)


@functools.cache
def rival_rows():
    return make_rows(policies=POLICIES | RIVALS, lengths=(4096, LONGEST), has_bytes=True)


AT_02 = {"density": 0.2, "tokens": LONGEST}
DENSITY = "Density: sparse / all layers"


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


@pytest.mark.slow
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
    chosen = rows_with(every_row(), label="damped", phase="prefill", task=task, **AT_02)
    expected = right_answers(every_row(), "damped", "prefill", task)
    interval = binomtest(sum(expected), len(expected)).proportion_ci(method="wilson")
    by_depth = [row for row in chosen if row["depth"] is not None]
    # Without a row of all depths, those by depth count.
    for rows in (chosen, by_depth) if by_depth else (chosen,):
        pooled = pool(rows)
        assert pooled.prompts == len(expected)
        assert pooled.exact == pytest.approx(np.mean(expected))
        assert (pooled.low, pooled.high) == pytest.approx(tuple(interval))


def test_nothing_pools_to_nothing():
    assert pool([]) is paired_difference([], []) is None
    assert paired_difference([], [], "text_losses") is None


def test_dense_answers_to_every_density_and_own_densities_to_all():
    assert rows_with(every_row(), label="dense", phase="decode", density=0.1)
    own = rows_with(every_row(), label="released", phase="decode", density=0.1)
    assert {(row["density"], row["phase"]) for row in own} == {(None, "decode")}


def test_unknown_policies_come_after_the_method_and_before_the_simple_ones():
    labels = policy_labels(make_rows(policies=POLICIES | {("kascade", None): (0.9, 0.8, 0.0)}))
    assert labels[0] == "dense"
    assert labels.index("released") < labels.index("kascade") < labels.index("streaming")


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "+0.12"), (-0.1234, "−0.12"), (-0.001, "0.00"), (0.0, "0.00")]
)
def test_differences_have_signs(value, text):
    assert signed(value) == text


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_accuracy_table_holds_every_policy_and_task(phase):
    found = cells(accuracy_table(every_row(), phase=phase, **AT_02))
    assert list(found) == ["dense", *(f"`{name}`" for name in policy_labels(every_row())[1:])]
    titles = {"Single needle": "single_needle", "Variable tracking": "variable_tracking"}
    for label, line in found.items():
        for title, task in titles.items():
            expected = right_answers(every_row(), label.strip("`"), phase, task)
            assert line[title].startswith(f"{np.mean(expected):.2f} (")
    assert found["dense"][DENSITY] == "1.00 / 1.00"
    assert found["`released`"][DENSITY].startswith("0.44 / ")
    assert found["`paper`"][DENSITY].startswith("0.20 / 0.33")


def test_differences_are_those_of_the_same_prompts():
    found = cells(difference_table(every_row(), phase="both", density=0.1, tokens=LONGEST))
    assert "dense" not in found
    first, dense = (
        right_answers(every_row(), name, "both", "multi_key", 0.1) for name in ("random", "dense")
    )
    expected = np.mean(np.subtract(first, dense))
    assert found["`random`"]["One of many keys"].startswith(f"{signed(expected)} (")


def test_hops_and_lengths_are_columns():
    found = cells(hops_table(every_row(), **AT_02))
    (row,) = rows_with(every_row(), label="damped", phase="decode", hops=3, **AT_02)
    assert found["`damped` Decode"]["3 statements"].startswith(f"{row['exact']:.2f} (")
    assert {"2 statements", "4 statements"} < set(found["dense"])
    found = cells(lengths_table(every_row(), density=0.2))
    tasks = {row["task"] for row in every_row()} - {"text_loss"}
    expected = np.mean(
        sum((right_answers(every_row(), "one_hop", "both", task) for task in tasks), [])
    )
    shown = found["`one_hop` Prefill and decode"]["16,384 tokens"]
    assert shown.startswith(f"{expected:.2f} (")


def test_text_loss_is_compared_prompt_by_prompt():
    found = cells(loss_table(every_row(), densities=(0.2,), tokens=LONGEST))
    (dense,) = rows_with(every_row(), label="dense", task="text_loss", tokens=LONGEST)
    (paper,) = rows_with(every_row(), label="paper", phase="both", task="text_loss", **AT_02)
    more = np.subtract(paper["text_losses"], dense["text_losses"])
    low, high = t.interval(0.95, len(more) - 1, more.mean(), more.std(ddof=1) / len(more) ** 0.5)
    assert found["dense"]["Density 0.2"] == f"{dense['text_loss']:.3f}"
    expected = f"{signed(more.mean(), 3)} ({signed(low, 3)} to {signed(high, 3)})"
    assert found["`paper` Prefill and decode"]["Density 0.2"] == expected


def test_recall_is_the_mean_over_sparse_layers():
    found = cells(recall_table(every_row(), densities=(0.2,), tokens=LONGEST))
    (row, *_) = rows_with(every_row(), label="paper", phase="prefill", **AT_02)
    assert found["`paper`"] == {
        "Policy": "`paper`",
        "Sparse in": "Prefill",
        "Density 0.2: mass recall": f"{np.mean(row['mass_recall_by_layer'][2:]):.2f}",
        "Density 0.2: output error": f"{np.mean(row['output_error_by_layer'][2:]):.2f}",
    }


def test_policies_of_one_phase_have_rows_there_alone():
    summary = cells(summary_table(rival_rows(), **AT_02))
    quest, paper = summary["`quest`"], summary["`paper`"]
    assert quest["Prefill"] == quest["Prefill and decode"] == "–" != quest["Decode"]
    loss = pool(rows_with(rival_rows(), label="quest", task="text_loss", **AT_02))
    assert quest["Text loss"] == f"{loss.text_loss:.3f}"
    assert quest[DENSITY] == paper[DENSITY]
    for table in (
        lengths_table(rival_rows(), density=0.2),
        loss_table(rival_rows(), densities=(0.2, 0.1), tokens=LONGEST),
        recall_table(rival_rows(), densities=(0.2, 0.1), tokens=LONGEST),
    ):
        assert not re.search(r"(?<!\d)–", table)  # no gap; dashes of intervals follow digits
        phases = {line.split(" | ")[1] for line in table.splitlines() if "`minference`" in line}
        assert phases == {"Prefill"}
    assert "`quest`" not in accuracy_table(rival_rows(), phase="prefill", **AT_02)


def test_settings_by_calibration_are_listed():
    lines = [line.split(" | ") for line in settings_table(rival_rows()).splitlines()[2:]]
    assert len(lines) == 3 * 2 * 2  # policies, densities, lengths
    assert lines[0][:5] == ["| `minference`", "prefill", "0.2", "4,096", "`scale` 0.2266"]
    assert lines[4][4] == "`gamma` 0.5, `min_budget` 128"
    assert lines[-1][4] == "`thresholds` (-1.25, 0.03125, 1.25)"
    (row, *_) = rows_with(rival_rows(), label="minference", tokens=4096, density=0.2)
    value = f"{row['measured_density_sparse_layers']:.3f}"
    assert lines[0][5] == f"{value} ({value}–{value}) |"
