"""A report says what the rows say: pooled, paired, and with every failure in it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from quality_rows import DENSE, LONGEST, META, POLICIES, make_results, make_rows, right_answers
from scipy.stats import t

from sketchwalk_jax.cli import main
from sketchwalk_jax.evaluation.observations import check_observations
from sketchwalk_jax.evaluation.report import TITLES, sections, write_report
from sketchwalk_jax.evaluation.summaries import (
    Results,
    check_rows,
    policy_labels,
    read_results,
    select,
)
from sketchwalk_jax.evaluation.tables import (
    accuracy_table,
    difference_table,
    hops_table,
    lengths_table,
    loss_table,
    recall_table,
    signed,
    summary_table,
)

ROWS = make_rows()


def cells(table: str) -> dict[str, dict[str, str]]:
    """A markdown table as rows by their first cell, each by the header; double names are joined."""
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()]
    header, body = lines[0], lines[2:]
    assert all(len(line) == len(header) for line in body)
    names = [
        line[0] if [one[0] for one in body].count(line[0]) == 1 else f"{line[0]} {line[1]}"
        for line in body
    ]
    return {
        name: dict(zip(header, line, strict=True)) for name, line in zip(names, body, strict=True)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.clear(), "rows must hold at least one row"),
        (lambda rows: rows[3].pop("hops"), r"row 3 without \['hops'\]"),
        (lambda rows: rows.append(dict(rows[0])), "rows must differ"),
    ],
)
def test_broken_rows_are_refused(change, message):
    rows = make_rows(lengths=(4096,), prompts=10)
    change(rows)
    with pytest.raises(ValueError, match=message):
        check_rows(rows)


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"meta": {}, "rows": []}'])
def test_files_that_are_no_results_are_refused(tmp_path, text):
    file = tmp_path / "quality.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"quality\.json|rows"):
        read_results(file)


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
        for row in select(ROWS, label="damped", phase="decode", tokens=LONGEST, density=0.2)
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
    (dense,) = select(ROWS, label="dense", task="text_loss", tokens=LONGEST)
    (paper,) = select(
        ROWS, label="paper", phase="both", task="text_loss", tokens=LONGEST, density=0.2
    )
    more = np.subtract(paper["text_losses"], dense["text_losses"])
    low, high = t.interval(0.95, len(more) - 1, more.mean(), more.std(ddof=1) / len(more) ** 0.5)
    assert found["dense"]["Density 0.2"] == f"{dense['text_loss']:.3f}"
    expected = f"{signed(more.mean(), 3)} ({signed(low, 3)} to {signed(high, 3)})"
    assert found["`paper` Prefill and decode"]["Density 0.2"] == expected


def test_recall_is_the_mean_over_sparse_layers():
    found = cells(recall_table(ROWS, densities=(0.2,), tokens=LONGEST))
    (row, *_) = select(ROWS, label="paper", phase="prefill", tokens=LONGEST, density=0.2)
    assert found["`paper`"] == {
        "Policy": "`paper`",
        "Sparse in": "Prefill",
        "Density 0.2: mass recall": f"{np.mean(row['mass_recall_by_layer'][2:]):.2f}",
        "Density 0.2: output error": f"{np.mean(row['output_error_by_layer'][2:]):.2f}",
    }


def verdicts(skills: dict[str, tuple[float, float, float]], **options) -> dict[str, str]:
    """What becomes of the claims if policies answer with these chances."""
    policies = {
        (name, None)
        if name in ("dense", "random", "oracle", "quest")
        else ("sketchwalk", name): one
        for name, one in skills.items()
    }
    rows = make_rows(policies=policies, lengths=(4096,), densities=(0.2,), prompts=100, **options)
    return {one.number: one.verdict for one in check_observations(rows)}


def test_claims_are_checked_by_what_the_rows_say():
    found = verdicts(
        {name: one for (_, preset), one in POLICIES.items() for name in [preset] if name}
        | {"dense": (1.0, 1.0, 0.0), "random": (0.5, 0.69, 0.05), "oracle": (1.0, 0.86, 0.0)}
    )
    assert found["P"] == "did not hold"
    assert found["1a"] == "held"
    assert found["1b"] == found["5b"] == found["6"] == "not tested"
    assert found["1c"] == "held"
    assert found["2a"] == found["2b"] == "held"


def test_claims_fail_where_the_rows_speak_against_them():
    sure = (20.0, 0.8, 0.0)  # right in every phase
    found = verdicts(
        {
            "dense": sure,
            "paper": (20.0, 0.9, 0.0),
            "damped": sure,
            "one_hop": (0.1, 0.8, 0.0),
            "oracle": sure,
            "random": (0.1, 0.7, 0.3),
            "released": sure,
            "quest": (0.1, 0.5, 0.0),
        }
    )
    assert found == {
        "P": "held",
        "1a": "did not hold",
        "1b": "not tested",
        "1c": "held",
        "2a": "did not hold",
        "2b": "not tested",
        "3": "did not hold",
        "4a": "held",
        "4b": "did not hold",
        "5a": "did not hold",
        "5b": "did not hold",
        "6": "not tested",
    }


def test_claims_about_policies_that_were_not_run_are_not_tested():
    found = verdicts({"dense": (1.0, 1.0, 0.0), "streaming": (0.2, 0.8, 0.1)})
    assert set(found.values()) == {"not tested"}


def test_a_dense_end_is_judged_by_where_the_question_stands():
    sure, unsure = (20.0, 0.8, 0.0), (0.1, 0.8, 0.0)
    policies = {DENSE: sure, ("sketchwalk", "released"): sure, ("sketchwalk", "one_hop"): sure}
    rows = make_rows(policies=policies, lengths=(4096,), densities=(0.2,), prompts=100)
    for row in rows:
        if row["task"] == "mid_prompt" and row["policy"] != "dense":
            row |= {"exact": 0.0, "is_right": [0] * 100}
    found = {one.number: one.verdict for one in check_observations(rows)}
    assert (found["4a"], found["4b"]) == ("did not hold", "held")
    found = verdicts({"dense": sure, "released": sure, "one_hop": unsure})
    assert found["4a"] == "held"


@pytest.mark.parametrize(
    ("damped", "one_hop", "verdict"),
    [(0.1, 0.9, "held"), (0.9, 0.1, "did not hold"), (0.5, 0.5, "undecided")],
)
def test_the_walk_is_judged_by_variable_tracking(damped, one_hop, verdict):
    found = verdicts({"damped": (damped, 0.8, 0.0), "one_hop": (one_hop, 0.8, 0.0)})
    assert found["3"] == verdict


def test_claims_stay_open_where_chance_may_explain_the_difference():
    found = verdicts({"dense": (0.97, 1.0, 0.0), "oracle": (0.90, 0.86, 0.0)})
    assert found["1c"] == "undecided"


def whole(**options) -> Results:
    results = make_results(**options)
    return Results(meta=results["meta"], rows=tuple(results["rows"]))


def test_every_section_is_filled():
    found = sections(whole(lengths=(4096,), prompts=20))
    assert list(found) == list(TITLES)
    assert "Not measured" not in "".join(text for name, text in found.items() if name != "depths")
    assert "SHA-256" in found["setup"] and META["command"] in found["setup"]
    assert found["summary"].count("| dense |") == 2  # both densities


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": ("text_loss",)},
        {"tasks": ("multi_key",), "phases": ("decode",)},
        {"tasks": ("multi_key",), "phases": ("both",)},
        {"policies": {DENSE: (1.0, 1.0, 0.0)}},
        {"policies": {("sketchwalk", "released"): (0.6, 0.85, 0.02)}},
        {"policies": {("streaming", None): (0.6, 0.85, 0.02)}, "densities": (1.0,)},
    ],
)
def test_what_was_not_measured_is_said(options, tmp_path):
    results = whole(lengths=(1024,), prompts=10, **options)
    assert "*Not measured.*" in sections(results).values()
    path, *figures = write_report(results, tmp_path / "report")
    text = path.read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^]]+\]\(\./([^)]+)\)", text)
    assert sorted(linked) == sorted(one.name for one in figures)
    assert all((tmp_path / "report" / name).stat().st_size > 1000 for name in linked)


@pytest.fixture
def results_file(tmp_path) -> Path:
    file = tmp_path / "quality.json"
    results = make_results(lengths=(1024,), densities=(0.2,), phases=("prefill",), prompts=10)
    file.write_text(json.dumps(results), encoding="utf-8")
    return file


def test_command_writes_tables_and_figures(results_file, tmp_path, capsys):
    out = tmp_path / "new" / "report"
    assert main(["report", str(results_file), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"report.md", "accuracy_prefill.png", "needle_depth_prefill.png"} <= names
    assert {"mass_recall_prefill.png", "output_error_prefill.png"} <= names
    assert f"{out / 'report.md'}: tables and {len(names) - 1} figures" in capsys.readouterr().out


def test_command_writes_tables_without_matplotlib(results_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["report", str(results_file), "--out", str(tmp_path / "report")]
    assert main(arguments) == 2
    assert "--no-figures must be given without matplotlib" in capsys.readouterr().err
    assert main([*arguments, "--no-figures"]) == 0
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.md"]
    assert "![" not in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"FILE": "missing.json"}, 1, "missing.json: No such file"),
        ({"--out": "quality.json"}, 2, "--out must be a folder, got the file"),
        ({"--model": "model"}, 2, "--model must be the checkpoint that"),
        ({"--model": "model", "--no-figures": None}, 2, "--model must not be given together"),
    ],
)
def test_mistakes_on_the_command_line(
    results_file, tmp_path, monkeypatch, capsys, change, status, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    options = {"FILE": results_file.name, "--out": "report"} | change
    words = [options.pop("FILE")]
    for name, value in options.items():
        words += [name] if value is None else [name, value]
    assert main(["report", *words]) == status
    assert message in capsys.readouterr().err
