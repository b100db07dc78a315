"""`sketchwalk eval`: its table, its file, its mistakes."""

import json
from pathlib import Path

import checkpoints
import pytest

from sketchwalk_jax import cli
from sketchwalk_jax.evaluation.summaries import check_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=3)
    return directory


@pytest.mark.slow
def test_table_and_file(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["eval", "--model", str(model), "--policy", "streaming", "--density", "0.3"]
    command += ["--density", "0.5", "--phase", "prefill", "--tokens", "512", "--prompts", "2"]
    command += ["--task", "single_needle", "--task", "text_loss", "--probe-prompts", "0"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "512 tokens"
    assert lines[1].split() == "policy density measured sparse in needle loss all".split()
    assert [line.split()[0] for line in lines[2:]] == ["dense", "streaming", "streaming"]
    assert [line.split()[1] for line in lines[3:]] == ["0.3", "0.5"]
    assert err == "quality.json: 12 rows\n"
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    check_rows(rows)
    assert len(rows) == 3 * (3 + 1)  # the needle has a row for each of its two depths
    assert cli.main(command) == 0  # nothing is left to do
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "kascade"], "--policy must be among dense,"),
        (["--preset", "a"], "--preset must be among paper,"),
        (["--phase", "middle"], "--phase must be among"),
        (["--task", "needle"], "--task must be among single_needle,"),
        (["--density", "0"], "--density must be in (0, 1], got 0.0"),
        (["--set", "gamma"], "--set must be FIELD=VALUE, got 'gamma'"),
        (["--set", "beta2=1"], "--set must be of a policy that is run, got 'beta2'"),
        (["--set", "gamma=2"], "--set gamma must be in [0, 1], got 2"),
        (["--tokens", "500"], "--tokens must be multiples of 64, got 500"),
        (["--tokens", "512", "--tokens", "1024"], "--tokens must not exceed the model's context"),
        (["--prompts", "0"], "--prompts must be an integer of at least 1, got 0"),
        (["--tokens", "512", "--text-tail", "2"], "--text-tail must be in (0, 1], got 2"),
        (["--tokens", "512", "--text", "none.txt"], "--text must be a readable UTF-8 file"),
    ],
)
@pytest.mark.unchecked
def test_usage_errors(model, capsys, options, message):
    assert cli.main(["eval", "--model", str(model), *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.endswith("Try 'sketchwalk eval --help'.\n")


@pytest.mark.unchecked
def test_results_of_something_else_are_not_overwritten(model, tmp_path, capsys):
    out = tmp_path / "quality.json"
    out.write_text('{"meta": {"wall_s": 1.0, "seed": 5}, "rows": []}')
    command = ["eval", "--model", str(model), "--tokens", "512", "--out", str(out)]
    assert cli.main(command) == 1
    assert "seed 5 there, 0 now; " in capsys.readouterr().err
    assert json.loads(out.read_text())["meta"]["seed"] == 5


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("phase", "left_out"), [("prefill", True), ("both", True), ("decode", False)]
)
@pytest.mark.unchecked
def test_policies_without_the_phase_asked_for_are_named(model, capsys, phase, left_out):
    command = ["eval", "--model", str(model), "--policy", "quest", "--phase", phase]
    assert cli.main([*command, "--tokens", "512", "--text", "none.txt"]) == 2  # before it runs
    warning = "warning: --policy quest selects in decode only and is left out; add --phase decode\n"
    assert capsys.readouterr().err.startswith(warning) == left_out
