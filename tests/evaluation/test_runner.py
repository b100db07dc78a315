"""Evaluations: run by the command line; continued, interrupted and finished by the library."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import MODEL

from sketchwalk_jax.cli import main
from sketchwalk_jax.evaluation import EvaluationConfig, calibrated_rules, evaluate, read_text
from sketchwalk_jax.evaluation.measure import Measurement
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.results import check_rows, read_results, write_results
from sketchwalk_jax.evaluation.runner import _Run, check_lengths, choose_batch
from sketchwalk_jax.text import haystack

DENSITY = 0.6
CONFIG = EvaluationConfig(
    policies=("streaming", "minference"),
    densities=(DENSITY,),
    fields={"dense_layers": 2},
    tokens=(512,),
    tasks=("single_needle", "text_loss"),
    prompts=3,
    batch=2,
    probe_prompts=1,
)
COMMAND = (
    "eval --policy streaming --policy minference --density 0.6 --set dense_layers=2 --tokens 512 "
    "--task single_needle --task text_loss --prompts 3 --batch 2 --probe-prompts 1"
).split()
PROBED = ("mass_recall", "mass_recall_by_layer", "output_error_by_layer")
BYTES = tuple(f"decode_bytes_{name}" for name in ("keys", "values", "metadata"))
# Each rule is sparse in these phases.
PHASES = [("dense", "both"), *(("streaming", one) for one in ("prefill", "decode", "both"))]


@dataclasses.dataclass
class Evaluation:
    """A whole evaluation: its file, its output, and its prompts."""

    file: Path
    out: str = ""
    err: str = ""
    held_out: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    scored: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    @property
    def rows(self) -> list[dict]:
        return rows_of(self.file)


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=3)
    return directory


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Evaluation:
    """Runs an evaluation from the command line, in this process."""
    file = tmp_path_factory.mktemp("out") / "quality.json"
    found = Evaluation(file)
    draw_held_out, draw = calibrated_rules.held_out_prompts, _Run._draw

    def noted_held_out(*arguments, **options):
        assert options["seed"] == CONFIG.seed
        tokens, lengths = draw_held_out(*arguments, **options)
        found.held_out += [tuple(row[:n]) for row, n in zip(tokens, lengths, strict=True)]
        return tokens, lengths

    def noted_draw(*arguments, **options):
        samples = draw(*arguments, **options)
        found.scored += [tuple(sample.tokens) for sample in samples]
        return samples

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated_rules, "held_out_prompts", noted_held_out)
        patch.setattr(_Run, "_draw", noted_draw)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main([*COMMAND, "--model", str(model), "--out", str(file)]) == 0
    found.out, found.err = out.getvalue(), err.getvalue()
    return found


@pytest.fixture
def asked(monkeypatch) -> list:
    """Records measurements: task, rule and phases of every batch."""
    seen = []
    run = Measurement.run

    def noting(self, prompts, rule, phases, tokenizer):
        seen.append((prompts.task, str(rule), phases))
        return run(self, prompts, rule, phases, tokenizer)

    monkeypatch.setattr(Measurement, "run", noting)
    return seen


def test_every_rule_phase_and_task_has_its_rows_and_a_line_of_the_table(finished, model):
    lines = finished.out.splitlines()
    assert lines[0] == "512 tokens"
    assert lines[1].split() == "policy density measured sparse in needle loss all".split()
    found = [line.split() for line in lines[2:]]
    assert [line[0] for line in found] == ["dense", "minference", *["streaming"] * 3]
    assert [line[3] for line in found[1:]] == ["prefill", "prefill", "decode", "both"]
    assert {line[1] for line in found[1:]} == {"0.6"}
    # The needle has a row for each of its three depths.
    assert finished.err == f"{finished.file}: {5 * (4 + 1)} rows\n"
    results = json.loads(finished.file.read_text())
    rows, meta = results["rows"], results["meta"]
    check_rows(rows)
    keys = {(row["policy"], row["phase"], row["task"]) for row in rows}
    rules = [*PHASES, ("minference", "prefill")]
    assert keys == {(*rule, task) for rule in rules for task in CONFIG.tasks}
    for row in rows:
        if row["policy"] == "streaming":
            assert row["measured_density_sparse_layers"] < 0.8
            assert (row["mass_recall"] is None) == (row["depth"] is not None)
        is_counted = row["phase"] != "prefill" and row["depth"] is None
        assert (row["decode_bytes_keys"] is not None) == is_counted
    for task in CONFIG.tasks:
        dense, sparse = (
            [row["decode_bytes_keys"] for row in rows if (row["policy"], row["task"]) == one]
            for one in (("dense", task), ("streaming", task))
        )
        kept = {one / dense[0] for one in sparse if one is not None}
        assert len(kept) == 1 and 0.75 < kept.pop() < 0.95  # two of three layers are dense
    assert meta["model"]["sha256"] == hash_weights(model) and len(meta["model"]["sha256"]) == 1
    assert meta["text"]["sha256"] == read_text().sha256 and meta["wall_s"] > 0
    assert {"seed", "prompts", "dtype", "device", "date", "command", "versions"} <= set(meta)
    assert str(model.parent) not in finished.file.read_text()


def test_thresholds_are_set_on_prompts_that_are_not_scored(finished):
    assert len(finished.held_out) == 2 and set(finished.held_out).isdisjoint(finished.scored)
    rows = [row for row in finished.rows if row["policy"] == "minference"]
    (settings,) = {json.dumps(row["settings"]) for row in rows}
    assert re.fullmatch(r'\{"scale": [0-9.]+, "dense_layers": 2\}', settings)
    for row in rows:
        assert row["measured_density_sparse_layers"] == pytest.approx(DENSITY, rel=0.15)
    assert {row["settings"] for row in finished.rows if row["policy"] != "minference"} == {None}
    assert haystack.HELD_OUT > 2**31


@pytest.mark.slow
def test_finished_rows_are_not_run_again(finished, model, asked, tmp_path, monkeypatch):
    out = tmp_path / "quality.json"
    out.write_bytes(finished.file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(calibrated_rules, "held_out_prompts", None)  # nothing is calibrated, either
        evaluate(model, config=CONFIG, out=out)
    assert asked == [] and rows_of(out) == finished.rows

    left_out = [("text_loss", "streaming", "decode"), ("text_loss", "minference", "prefill")]
    left_out.append(("single_needle", "dense", "both"))
    names = ("task", "policy", "phase")
    results = json.loads(finished.file.read_text())
    kept = [row for row in results["rows"] if tuple(row[one] for one in names) not in left_out]
    write_results(out, results["meta"], kept)
    evaluate(model, config=CONFIG, out=out)
    rules = {"streaming": "streaming 0.6", "minference": "minference 0.6", "dense": "dense"}
    batches = [(task, rules[policy], (phase,)) for task, policy, phase in left_out * 2]
    assert sorted(asked) == sorted(batches)
    assert sorted(rows_of(out), key=str) == sorted(finished.rows, key=str)


@pytest.mark.slow
def test_interrupted_evaluation_keeps_what_is_finished(finished, model, asked, tmp_path):
    config = dataclasses.replace(CONFIG, policies=("streaming",), probe_prompts=0)
    run, out = Measurement.run, tmp_path / "quality.json"

    def interrupted(self, prompts, *arguments):
        if prompts.task == "text_loss":
            raise KeyboardInterrupt
        return run(self, prompts, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurement, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, config=config, out=out)
    assert {row["task"] for row in rows_of(out)} == {"single_needle"}
    missing = {(one["policy"], one["phase"], one["task"]) for one in read_results(out).missing}
    assert missing == {(*one, "text_loss") for one in PHASES}
    assert [path.name for path in tmp_path.iterdir()] == ["quality.json"]
    asked.clear()
    evaluate(model, config=config, out=out)
    assert {task for task, *_ in asked} == {"text_loss"}
    nothing = dict.fromkeys((*PROBED, *BYTES))
    expected = [row | nothing for row in finished.rows if row["policy"] != "minference"]
    assert sorted(rows_of(out), key=str) == sorted(expected, key=str)
    assert read_results(out).missing == () and read_results(out).asked == 8
    # With one more policy, the file says from the start that rows are missing.
    config = dataclasses.replace(config, policies=("streaming", "random"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurement, "run", None)
        with pytest.raises(TypeError):
            evaluate(model, config=config, out=out)
    assert {one["policy"] for one in read_results(out).missing} == {"random"}


@pytest.mark.slow
def test_logits_that_are_not_finite_give_no_results(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    checkpoints.write_tensors(broken, tensors)
    config = dataclasses.replace(CONFIG, policies=("dense",), fields={}, tasks=("text_loss",))
    with pytest.raises(ValueError, match="logits must be finite, got a loss of nan in text_loss"):
        evaluate(broken, config=config, out=tmp_path / "quality.json")
    assert not (tmp_path / "quality.json").exists()


@pytest.mark.slow
def test_policies_for_decode_can_be_added_to_a_file(finished, model, tmp_path):
    out = tmp_path / "quality.json"
    out.write_bytes(finished.file.read_bytes())
    added = {"policies": ("quest", "adamas"), "tasks": ("text_loss",), "densities": (0.3,)}
    evaluate(model, config=dataclasses.replace(CONFIG, **added), out=out)
    rows = rows_of(out)
    assert rows[: len(finished.rows)] == finished.rows
    quest, adamas = rows[len(finished.rows) :]
    (dense,) = (row for row in rows if (row["policy"], row["task"]) == ("dense", "text_loss"))
    low, middle, high = adamas["settings"]["thresholds"]
    assert low < middle < high and quest["settings"] is None
    for row, unit in ((quest, 16), (adamas, 1)):
        assert row["phase"] == "decode" and len(row["mass_recall_by_layer"]) == 3
        measured = row["measured_density_sparse_layers"]
        assert measured == pytest.approx(0.3, abs=unit / 448)
        # Two of three layers are dense, and only decoded tokens count.
        all_layers = row["measured_density_all_layers"]
        assert all_layers == pytest.approx((2 + measured) / 3, abs=1e-4)
        # Heads of a group have different lists, but read a shared key only once.
        shares = [row[name] / dense[name] for name in BYTES[:2]]
        assert shares[0] == shares[1] and all_layers - 1e-3 < shares[0] < (2 + 4 * measured) / 3
        assert row["decode_bytes_metadata"] > dense["decode_bytes_metadata"] == 0


def test_lengths_beyond_the_context_are_left_out():
    config = EvaluationConfig(tokens=(1024, 512, 256))
    assert check_lengths(config, MODEL) == (256, 512)
    with pytest.raises(ValueError, match="within the model's context of 512, got"):
        check_lengths(EvaluationConfig(), MODEL)
    with pytest.raises(ValueError, match="tokens must be multiples of 64, got 100"):
        check_lengths(EvaluationConfig(tokens=(100,)), MODEL)


def test_batches_are_of_equal_size_and_fit_into_memory():
    def choose(model, **fields):
        config = EvaluationConfig(prompts=50, **fields)
        return choose_batch(model, config, num_tokens=512, dtype="float32")

    assert choose(MODEL) == 8  # 7 even batches would need 8, too
    assert choose(MODEL, batch=20) == 20 and choose(MODEL, batch=64) == 50
    huge = dataclasses.replace(MODEL, num_layers=10**6, hidden_size=4096)
    assert choose(huge) == 1
    for chosen, expected in ((1, 8), (4000, 1)):
        sizes = {"num_experts": 4000, "expert_intermediate_size": 4000, "experts_per_token": chosen}
        assert choose(dataclasses.replace(MODEL, **sizes)) == expected
