"""Tables of an evaluation say what its rows say: pooled, paired, and with every gap in them."""

import re

import numpy as np
import pytest
from quality_rows import LONGEST, POLICIES, RIVALS, cells, make_rows, right_answers
from scipy.stats import t

from sketchwalk_jax.evaluation.summaries import policy_labels, pool, rows_with
from sketchwalk_jax.evaluation.tables import (
    accuracy_table,
    difference_table,
    hops_table,
    lengths_table,
    loss_table,
    recall_table,
    settings_table,
    signed,
    summary_table,
)

ROWS = make_rows()
ALL_ROWS = make_rows(policies=POLICIES | RIVALS, lengths=(4096, LONGEST), has_bytes=True)


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "+0.12"), (-0.1234, "−0.12"), (-0.001, "0.00"), (0.0, "0.00")]
)
def test_differences_have_signs(value, text):
    assert signed(value) == text


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_accuracy_table_holds_every_policy_and_task(phase):
    found = cells(accuracy_table(ROWS, phase=phase, density=0.2, tokens=LONGEST))
    assert list(found) == ["dense", *(f"`{name}`" for name in policy_labels(ROWS)[1:])]
    for label, line in found.items():
        for title, task in (
            ("Single needle", "single_needle"),
            ("Aggregation", "aggregation"),
            ("Variable tracking", "variable_tracking"),
        ):
            expected = right_answers(ROWS, label.strip("`"), phase, task)
            assert line[title].startswith(f"{np.mean(expected):.2f} (")
    assert found["dense"]["Density: sparse / all layers"] == "1.00 / 1.00"
    assert found["`released`"]["Density: sparse / all layers"].startswith("0.44 / ")
    assert found["`paper`"]["Density: sparse / all layers"].startswith("0.20 / 0.33")


def test_a_policy_that_was_not_run_in_a_phase_has_no_row_there():
    rows = [row for row in ROWS if (row["policy"], row["phase"]) != ("oracle", "decode")]
    found = cells(accuracy_table(rows, phase="decode", density=0.2, tokens=LONGEST))
    assert "`oracle`" not in found and "`random`" in found
    summary = cells(summary_table(rows, density=0.2, tokens=LONGEST))
    assert summary["`oracle`"]["Decode"] == "–" != summary["`oracle`"]["Prefill"]


def test_differences_are_those_of_the_same_prompts():
    found = cells(difference_table(ROWS, phase="both", density=0.1, tokens=LONGEST))
    assert "dense" not in found
    first, dense = (
        right_answers(ROWS, name, "both", "multi_key", 0.1) for name in ("random", "dense")
    )
    expected = np.mean(np.subtract(first, dense))
    assert found["`random`"]["One of many keys"].startswith(f"{signed(expected)} (")


def test_variable_tracking_is_listed_by_hops():
    found = cells(hops_table(ROWS, density=0.2, tokens=LONGEST))
    (row,) = (
        row
        for row in rows_with(ROWS, label="damped", phase="decode", tokens=LONGEST, density=0.2)
        if row["hops"] == 3
    )
    assert found["`damped` Decode"]["3 statements"].startswith(f"{row['exact']:.2f} (")
    assert {"2 statements", "4 statements"} < set(found["dense"])


def test_lengths_are_columns():
    found = cells(lengths_table(ROWS, density=0.2))
    tasks = {row["task"] for row in ROWS} - {"text_loss"}
    expected = np.mean(sum((right_answers(ROWS, "one_hop", "both", task) for task in tasks), []))
    shown = found["`one_hop` Prefill and decode"]["16,384 tokens"]
    assert shown.startswith(f"{expected:.2f} (")


def test_text_loss_is_compared_prompt_by_prompt():
    found = cells(loss_table(ROWS, densities=(0.2,), tokens=LONGEST))
    (dense,) = rows_with(ROWS, label="dense", task="text_loss", tokens=LONGEST)
    (paper,) = rows_with(
        ROWS, label="paper", phase="both", task="text_loss", tokens=LONGEST, density=0.2
    )
    more = np.subtract(paper["text_losses"], dense["text_losses"])
    low, high = t.interval(0.95, len(more) - 1, more.mean(), more.std(ddof=1) / len(more) ** 0.5)
    assert found["dense"]["Density 0.2"] == f"{dense['text_loss']:.3f}"
    expected = f"{signed(more.mean(), 3)} ({signed(low, 3)} to {signed(high, 3)})"
    assert found["`paper` Prefill and decode"]["Density 0.2"] == expected


def test_recall_is_the_mean_over_sparse_layers():
    found = cells(recall_table(ROWS, densities=(0.2,), tokens=LONGEST))
    (row, *_) = rows_with(ROWS, label="paper", phase="prefill", tokens=LONGEST, density=0.2)
    assert found["`paper`"] == {
        "Policy": "`paper`",
        "Sparse in": "Prefill",
        "Density 0.2: mass recall": f"{np.mean(row['mass_recall_by_layer'][2:]):.2f}",
        "Density 0.2: output error": f"{np.mean(row['output_error_by_layer'][2:]):.2f}",
    }


def is_gap(text):
    """Whether a dash stands for a value; those of intervals stand between digits."""
    return re.search(r"(?<!\d)–", text) is not None


def test_policies_of_one_phase_have_rows_there_alone():
    summary = cells(summary_table(ALL_ROWS, density=0.2, tokens=LONGEST))
    quest, paper = summary["`quest`"], summary["`paper`"]
    assert quest["Prefill"] == quest["Prefill and decode"] == "–" != quest["Decode"]
    loss = pool(rows_with(ALL_ROWS, label="quest", task="text_loss", tokens=LONGEST, density=0.2))
    assert quest["Text loss"] == f"{loss.text_loss:.3f}"
    assert quest["Density: sparse / all layers"] == paper["Density: sparse / all layers"]
    for table in (
        lengths_table(ALL_ROWS, density=0.2),
        loss_table(ALL_ROWS, densities=(0.2, 0.1), tokens=LONGEST),
        recall_table(ALL_ROWS, densities=(0.2, 0.1), tokens=LONGEST),
    ):
        assert not is_gap(table)
        phases = {line.split(" | ")[1] for line in table.splitlines() if "`minference`" in line}
        assert phases == {"Prefill"}
    assert "`quest`" not in accuracy_table(ALL_ROWS, phase="prefill", density=0.2, tokens=LONGEST)


def test_what_calibration_set_is_listed():
    lines = [line.split(" | ") for line in settings_table(ALL_ROWS).splitlines()[2:]]
    assert len(lines) == 3 * 2 * 2  # policies, densities, lengths
    assert lines[0][:5] == ["| `minference`", "prefill", "0.2", "4,096", "`scale` 0.2266"]
    assert lines[4][4] == "`gamma` 0.5, `min_budget` 128"
    assert lines[-1][4] == "`thresholds` (-1.25, 0.03125, 1.25)"
    (row, *_) = rows_with(ALL_ROWS, label="minference", tokens=4096, density=0.2)
    value = f"{row['measured_density_sparse_layers']:.3f}"
    assert lines[0][5] == f"{value} ({value}–{value}) |"
