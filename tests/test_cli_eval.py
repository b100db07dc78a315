"""`sketchwalk eval`: its table, its file, its errors."""

import json
from pathlib import Path

import checkpoints
import pytest
from quality_rows import DENSE, make_rows

from sketchwalk_jax import cli
from sketchwalk_jax.cli import evaluate
from sketchwalk_jax.evaluation.tables import pool, rows_with


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=3)
    return directory


def test_table_has_a_line_for_every_policy_density_and_phase():
    policies = {DENSE: (1.0, 1.0, 0.0), ("streaming", None): (0.5, 0.8, 0.1)}
    options = {"densities": (0.3, 0.5), "phases": ("prefill",)}
    rows = make_rows(policies=policies, lengths=(512, 1024), **options)
    short, long = evaluate._quality_table(rows).split("\n\n")
    lines = short.splitlines()
    assert (lines[0], long.splitlines()[0]) == ("512 tokens", "1024 tokens")
    tasks = "needle keys queries values variables mid votes loss"
    assert lines[1].split() == f"policy density measured sparse in {tasks} all".split()
    found = [line.split() for line in lines[2:]]
    assert [line[0] for line in found] == ["dense", "streaming", "streaming"]
    assert [line[1] for line in found[1:]] == ["0.3", "0.5"]
    dense = rows_with(rows, label="dense", tokens=512)
    loss, every = pool(rows_with(dense, task="text_loss")), pool(dense)
    assert found[0][-2:] == [f"{loss.text_loss:.2f}", f"{every.exact:.2f}"]


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
    assert cli.main([*command, "--tokens", "512", "--text", "none.txt"]) == 2  # refused at once
    warning = "warning: --policy quest selects in decode only and is left out; add --phase decode\n"
    assert capsys.readouterr().err.startswith(warning) == left_out
