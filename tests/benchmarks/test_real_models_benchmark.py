"""The benchmark of instruction models: its stages, and their choices."""

import json
import re
import shlex
import sys
from pathlib import Path

import checkpoints
import numpy as np
import pytest

from sketchwalk_jax.evaluation.results import ResultsFile, check_rows, read_results
from sketchwalk_jax.evaluation.rows import ROW_FIELDS, exact_match
from sketchwalk_jax.evaluation.settings import Rule

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import real_models  # noqa: E402
import tables  # noqa: E402


def made_up_row(label, task, right, *, count=40, stage="report", in_mean=True, **fields):
    row = dict.fromkeys(ROW_FIELDS) | {"policy": label, "phase": "decode", "task": task}
    row |= {"model": "tiny", "stage": stage, "tokens": 8192, "density": 0.2, "prompts": count}
    row |= {"drawn": 2 * count, "in_mean": in_mean}
    return row | exact_match(np.arange(count) < right) | fields


def test_the_most_right_answers_choose_the_dense_layers():
    def rows(right_of):
        return [
            made_up_row(
                "quest", task, right, stage="development", variant=f"dense_layers={count}", **more
            )
            for count, right in right_of.items()
            for task, more in (("multi_key", {}), ("multi_value", {"in_mean": False}))
        ]

    rule = Rule("quest", None, 0.2)
    assert real_models.best_layers(rows({0: 20, 1: 30, 2: 25}), "tiny", rule, "decode") == 1
    assert real_models.best_layers(rows({0: 30, 1: 30}), "tiny", rule, "decode") == 0
    assert (
        real_models.best_layers(rows({1: 3}), "tiny", Rule("adamas", None, 0.2), "decode") is None
    )
    reported = [made_up_row("quest", "multi_key", 20)]
    with pytest.raises(SystemExit, match="must be one number where there was no --stage develop"):
        real_models.best_layers(reported, "tiny", rule, "decode")


def test_the_commands_of_the_tables_have_rules_and_write_the_files_of_the_tables(
    monkeypatch, tmp_path
):
    """Policies whose dense layers must be chosen first would stop a command."""
    found = {}

    def run_model(path, text, options, seconds):
        file = ResultsFile(tmp_path / "none.json", {})
        methods = {rule.preset or rule.policy for rule in real_models.make_rules(file, "", options)}
        found[name] = options.out.name, methods, options.density

    monkeypatch.setattr(real_models, "run_model", run_model)
    monkeypatch.setattr(real_models, "read_text", lambda *_, **__: None)
    for name, table in tables.TABLES.items():
        command = getattr(table, "command", "")
        if "real_models.py" in command:
            real_models.main(shlex.split(re.sub(r"\[.*?\]", "", command))[2:])
            assert found[name][0] == table.file
    assert len(found) >= 10
    assert found["losses"][1:] == ({"recommended"}, [0.1, 0.2])
    assert found["methods-prefill"][1] == {"recommended", "minference", "flexprefill"}
    assert found["methods-decode"][1:] == ({"recommended", "quest", "adamas"}, [0.05, 0.1, 0.2])
    assert found["printed-rule"][1] == {"paper", "damped", "one_hop", "released", "oracle"}


@pytest.mark.slow
def test_a_model_is_run_in_stages_and_calls(tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "real_models.json"
    model.mkdir()
    checkpoints.write_checkpoint(
        model, tokenizer=True, num_hidden_layers=4, max_position_embeddings=1024
    )
    common = ["--model", str(model), "--out", str(out), "--policy", "streaming", "quest"]
    common += ["--tokens", "1024", "--task", "single_needle", "text_loss", "long_decode"]
    common += ["--prompts", "2", "--tries", "1", "--density", "0.5", "--batch", "2"]
    common += ["--phase", "prefill", "decode"]
    real_models.main([*common, "--stage", "development", "--dense-layers", "0", "1", "3"])
    rows = json.loads(out.read_text())["rows"]
    variants = {row["variant"] for row in rows if row["policy"] == "quest"}
    assert variants == {"dense_layers=0", "dense_layers=1"}  # three of four layers are too many
    real_models.main(common)
    assert capsys.readouterr().out.count("finished") == 2
    found = json.loads(out.read_text())
    check_rows(found["rows"])
    reported = [row for row in found["rows"] if row["stage"] == "report"]
    assert found["rows"][: len(rows)] == rows
    assert {row["variant"] for row in reported} == {None}
    tasks = {(row["policy"], row["task"], row["phase"]) for row in reported}
    assert ("streaming", "text_loss", "prefill") in tasks
    assert ("streaming", "long_decode", "prefill") not in tasks
    assert ("quest", "long_decode", "decode") in tasks and (
        "dense",
        "single_needle",
        "both",
    ) in tasks
    for row in reported:
        if row["policy"] != "dense":
            assert row["measured_density_all_layers"] == pytest.approx(0.5, rel=0.1)
        if row["task"] == "long_decode":
            assert len(row["kls"]) == 1 and row["kl"] >= -1e-5  # a fifth of the prompts
            assert 0 <= row["agreement"] <= 1 and row["agreements"] == [row["agreement"]]
    meta = found["meta"]
    assert set(meta["models"]) == {"model"} and len(meta["models"]["model"]["sha256"]) == 1
    assert meta["runs"]["model, development"]["seed"] != meta["runs"]["model, report"]["seed"]
    assert {one["variant"] for one in meta["not_run"]} == {"dense_layers=3"}
    # Everything requested and measurable is there, from both stages.
    assert read_results(out).missing == () and read_results(out).asked > 20
    real_models.main([*common, "--seconds", "1000"])
    assert json.loads(out.read_text())["rows"] == found["rows"]
    with pytest.raises(ValueError, match="must hold the same runs"):
        real_models.main([*common, "--prompts", "3"])
