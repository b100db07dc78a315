"""Rows, the file of results, and evaluations that are interrupted and continued."""

import dataclasses
import json
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from evaluation_samples import samples

from sketchwalk_jax.cache import Density
from sketchwalk_jax.evaluation import EvaluationConfig, evaluate, read_text
from sketchwalk_jax.evaluation.measure import Measurement
from sketchwalk_jax.evaluation.results import ResultsFile, hash_weights, write_results
from sketchwalk_jax.evaluation.rows import ROW_FIELDS, Outcome, Probed, group_key_of, make_rows
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.summaries import check_rows

LAYERS = 4
CONFIG = EvaluationConfig(
    policies=("streaming",),
    densities=(0.3,),
    tokens=(512,),
    tasks=("single_needle", "text_loss"),
    prompts=3,
    batch=2,
    probe_prompts=1,
)


def _outcome(count: int, *, is_right=None, losses=None) -> Outcome:
    """Prompts differ in their pairs, and every layer attends to one less than the one before."""
    causal = np.arange(10.0, 10 + count)
    pairs = causal[None] - np.arange(LAYERS)[:, None]
    return Outcome(is_right, losses, Density(pairs, causal, pairs / 2, causal))


def test_row_has_every_field_and_densities_of_its_phase():
    outcome = _outcome(3, is_right=np.array([True, False, True]))
    (row,) = make_rows(
        outcome,
        samples("multi_key"),
        Rule("sketchwalk", "damped", 0.2),
        phase="both",
        tokens=512,
        num_dense_layers=2,
        probe=Probed([0.5, 0.7], [0.2, 0.4], (3000.0, 3000.0, 100.5)),
    )
    assert tuple(row) == ROW_FIELDS
    check_rows([row])
    assert row["is_right"] == [1, 0, 1] and row["prompts"] == 3
    assert row["exact"] == pytest.approx(2 / 3, abs=1e-5)
    assert row["exact_low"] < row["exact"] < row["exact_high"]
    assert row["mass_recall"] == 0.6
    assert row["mass_recall_by_layer"] == [None, None, 0.5, 0.7]
    assert row["output_error_by_layer"] == [None, None, 0.2, 0.4]
    assert row["dense_layers"] == 2 and row["decode_bytes_metadata"] == 100.5
    assert row["decode_bytes_keys"] == row["decode_bytes_values"] == 3000
    pairs = 33 - 3 * np.arange(LAYERS)  # of all prompts, by layer
    for name, first in (("sparse", 2), ("all", 0)):
        expected = 1.5 * pairs[first:].sum() / (2 * 33 * (LAYERS - first))
        assert row[f"measured_density_{name}_layers"] == pytest.approx(expected, abs=1e-5)


def test_densities_count_the_sparse_phase_alone():
    outcome = _outcome(3, losses=np.array([1.0, 2.0, 6.0]))
    densities = {}
    for phase in ("prefill", "decode", "both"):
        (row,) = make_rows(
            outcome,
            samples("text_loss"),
            Rule("streaming", None, 0.2),
            phase=phase,
            tokens=512,
            num_dense_layers=3,
        )
        densities[phase] = row["measured_density_sparse_layers"]
        assert (row["exact"], row["text_loss"]) == (None, 3.0)
        assert row["text_losses"] == [1.0, 2.0, 6.0]
    assert densities["decode"] == pytest.approx(densities["prefill"] / 2, abs=1e-5)
    assert densities["both"] == pytest.approx(0.75 * densities["prefill"], abs=1e-5)


def test_dense_rows_have_density_one():
    outcome = _outcome(3, is_right=np.ones(3, bool))
    causal = outcome.density.prefill_causal
    ones = np.broadcast_to(causal, (LAYERS, 3))
    outcome = Outcome(outcome.is_right, None, Density(ones, causal, 0 * ones, 0 * causal))
    (row,) = make_rows(
        outcome, samples("multi_key"), DENSE, phase="both", tokens=512, num_dense_layers=0
    )
    assert row["density"] == row["measured_density_sparse_layers"] == 1
    assert row["measured_density_all_layers"] == 1 and row["mass_recall_by_layer"] is None
    assert row["dense_layers"] is row["decode_bytes_keys"] is None


def test_needles_have_rows_by_depth_and_variables_by_hops():
    some = [
        dataclasses.replace(one, depth=depth)
        for one, depth in zip(samples("single_needle", 4), (0.1, 0.9, 0.1, 0.9), strict=True)
    ]
    outcome = _outcome(4, is_right=np.array([True, False, True, True]))
    options = {"phase": "both", "tokens": 512, "num_dense_layers": 2, "probe": Probed([1.0], [0.0])}
    rows = make_rows(outcome, some, Rule("streaming", None, 0.2), **options)
    assert [(row["depth"], row["exact"], row["prompts"]) for row in rows] == [
        (None, 0.75, 4),
        (0.1, 1.0, 2),
        (0.9, 0.5, 2),
    ]
    assert [row["is_right"] for row in rows] == [[1, 0, 1, 1], None, None]
    assert [row["mass_recall"] for row in rows] == [1.0, None, None]
    some = [
        dataclasses.replace(one, hops=hops)
        for one, hops in zip(samples("variable_tracking", 4), (2, 3, 2, 3), strict=True)
    ]
    rows = make_rows(outcome, some, Rule("streaming", None, 0.2), **options)
    assert [(row["hops"], row["is_right"]) for row in rows] == [(2, [1, 1]), (3, [0, 1])]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=LAYERS)
    return directory


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    """The file of one whole evaluation."""
    out = tmp_path_factory.mktemp("out") / "quality.json"
    evaluate(model, config=CONFIG, out=out)
    return out


@pytest.fixture
def asked(monkeypatch) -> list:
    """What is measured: task and (rule, phases) of every batch."""
    seen = []
    run = Measurement.run

    def noting(self, prompts, wanted, tokenizer, **options):
        seen.append((prompts.task, {str(rule): phases for rule, phases in wanted.items()}))
        return run(self, prompts, wanted, tokenizer, **options)

    monkeypatch.setattr(Measurement, "run", noting)
    return seen


def _rows(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_every_rule_phase_and_task_has_its_rows(finished, model):
    results = json.loads(finished.read_text())
    rows = results["rows"]
    check_rows(rows)
    keys = {(row["policy"], row["phase"], row["task"]) for row in rows}
    wanted = [("dense", "both"), *(("streaming", one) for one in ("prefill", "decode", "both"))]
    assert keys == {(*rule, task) for rule in wanted for task in CONFIG.tasks}
    for row in rows:
        if row["policy"] == "streaming":
            assert row["measured_density_sparse_layers"] < 0.7
            assert (row["mass_recall"] is None) == (row["depth"] is not None)
        is_counted = row["phase"] != "prefill" and row["depth"] is None
        assert (row["decode_bytes_keys"] is not None) == is_counted
    for task in CONFIG.tasks:
        dense, sparse = (
            [row["decode_bytes_keys"] for row in rows if (row["policy"], row["task"]) == one]
            for one in (("dense", task), ("streaming", task))
        )
        kept = {one / dense[0] for one in sparse if one is not None}
        assert len(kept) == 1 and 0.5 < kept.pop() < 0.9  # two of four layers are dense
    meta = results["meta"]
    assert meta["model"]["sha256"] == hash_weights(model) and len(meta["model"]["sha256"]) == 1
    assert meta["text"]["sha256"] == read_text().sha256 and meta["wall_s"] > 0
    assert {"seed", "prompts", "dtype", "device", "date", "command", "versions"} <= set(meta)
    assert str(model.parent) not in finished.read_text()


@pytest.mark.slow
def test_finished_rows_are_not_run_again(finished, model, asked, tmp_path):
    out = tmp_path / "quality.json"
    out.write_bytes(finished.read_bytes())
    evaluate(model, config=CONFIG, out=out)
    assert asked == [] and _rows(out) == _rows(finished)

    def is_kept(row):
        return (row["task"], row["phase"]) != ("text_loss", "decode") and (
            (row["task"], row["policy"]) != ("single_needle", "dense")
        )

    results = json.loads(finished.read_text())
    write_results(out, results["meta"], [row for row in results["rows"] if is_kept(row)])
    evaluate(model, config=CONFIG, out=out)
    needle, loss = {"dense": ("both",)}, {"streaming 0.3": ("decode",)}
    assert asked == [("single_needle", needle)] * 2 + [("text_loss", loss)] * 2
    assert sorted(_rows(out), key=str) == sorted(_rows(finished), key=str)


@pytest.mark.slow
def test_interrupted_evaluation_keeps_what_is_finished(finished, model, asked, tmp_path):
    run, out = Measurement.run, tmp_path / "quality.json"

    def interrupted(self, prompts, *arguments, **options):
        if prompts.task == "text_loss":
            raise KeyboardInterrupt
        return run(self, prompts, *arguments, **options)

    Measurement.run = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, config=CONFIG, out=out)
    finally:
        Measurement.run = run
    assert {row["task"] for row in _rows(out)} == {"single_needle"}
    assert [path.name for path in tmp_path.iterdir()] == ["quality.json"]
    asked.clear()
    evaluate(model, config=CONFIG, out=out)
    assert {task for task, _ in asked} == {"text_loss"}
    assert _rows(out) == _rows(finished)


@pytest.mark.unchecked
def test_file_of_another_evaluation_is_refused(tmp_path):
    path = tmp_path / "quality.json"
    meta = {"seed": 0, "dtype": "float32", "wall_s": 1.0, "date": "2026-01-01"}
    row = dict.fromkeys(ROW_FIELDS)
    write_results(path, meta, [row])
    now = {"seed": 1, "dtype": "float32", "wall_s": 0.0, "date": "2026-01-02"}
    with pytest.raises(ValueError, match=r"got seed 0 there, 1 now; pass --overwrite"):
        ResultsFile(path, now)
    assert ResultsFile(path, now, overwrite=True).rows == []
    file = ResultsFile(path, meta | {"date": "2026-01-02"})
    assert file.rows == [row] and file.has(group_key_of(row))
    path.write_text("{}")
    with pytest.raises(ValueError, match="must hold results of an evaluation; pass --overwrite"):
        ResultsFile(path, meta)


def test_rows_add_up_over_runs_and_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "quality.json"
    first = dict.fromkeys(ROW_FIELDS) | {"task": "a"}
    file = ResultsFile(path, {"seed": 0})
    file.add([first])
    before = path.read_bytes()
    assert json.loads(before)["rows"] == [first]
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.add([first | {"text_loss": float("nan")}])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    again = ResultsFile(path, {"seed": 0})
    again.add([first | {"task": "b"}])
    assert [row["task"] for row in _rows(path)] == ["a", "b"]
    assert again.meta["wall_s"] >= json.loads(before)["meta"]["wall_s"]
    with pytest.raises(FileNotFoundError):
        ResultsFile(tmp_path / "nowhere" / "quality.json", {})
