"""`sketchwalk calibrate`, and the use of a plan by the other commands."""

import dataclasses
import json
import tempfile
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import tiny

from sketchwalk_jax import cli
from sketchwalk_jax.models.weights import fingerprint, load
from sketchwalk_jax.plan import Loss, Plan, plan_path

pytestmark = pytest.mark.unchecked

NUM_LAYERS = 3
MEASURE = ("--tokens", "2048", "--prompts", "1")


def write_model(directory: Path) -> Path:
    checkpoints.write_checkpoint(
        directory, tokenizer=True, num_hidden_layers=NUM_LAYERS, max_position_embeddings=4096
    )
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model without a plan."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A model with a plan that was made without a measurement."""
    directory = write_model(tmp_path_factory.mktemp("planned"))
    found = tiny.plan((0.1, 0.2, 0.6), (0.5, 0.2, 0.1), (0.4, 0.1, 0.05), (0.3, 0.2, 0.01))
    losses = tuple(
        Loss(phase, 2048, density, 2 * density, 0.01 / density, 0.02 / density, 0.9)
        for phase in ("prefill", "decode")
        for density in (0.1, 0.2)
    )
    found = dataclasses.replace(found, fingerprint=fingerprint(directory), model_losses=losses)
    found.write(plan_path(directory), measured={})
    return directory


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A model with a plan measured by the command."""
    directory = write_model(tmp_path_factory.mktemp("measured"))
    assert cli.main(["calibrate", "--model", str(directory), *MEASURE]) == 0
    return directory


@pytest.mark.slow
def test_a_plan_is_measured_and_stands_where_load_finds_it(measured):
    plan = load(measured)[1].plan
    assert plan is not None and plan.num_layers == NUM_LAYERS
    assert plan.fingerprint == fingerprint(measured)
    content = json.loads(plan_path(measured).read_text())["measured"]
    assert (content["prompts"], content["tokens"], len(content["tasks"])) == (1, 2048, 1)
    assert set(content["text"]) == {"name", "sha256"}
    assert {"device", "versions", "date", "command"} <= set(content)
    assert str(measured.parent) not in plan_path(measured).read_text()
    assert not [path for path in measured.iterdir() if path.name.endswith(".partial")]


def test_the_table_has_a_line_for_each_layer(model, planned, tmp_path, sketchwalk, monkeypatch):
    out, known = tmp_path / "plan.json", load(planned)[1].plan

    def plan_of(params, prompts, *, fingerprint, **_):
        assert len(prompts) == 2 and all(1024 < len(one) <= 2048 for one in prompts)
        return dataclasses.replace(known, fingerprint=fingerprint, model_losses=())

    def losses_of(params, texts, *, plan, num_tokens, **_):
        assert plan.errors == known.errors and {len(one) for one in texts} == {num_tokens}
        return [dataclasses.replace(one, tokens=num_tokens) for one in known.model_losses]

    monkeypatch.setattr(cli.calibrate, "make_plan", plan_of)
    monkeypatch.setattr(cli.calibrate, "measure_losses", losses_of)
    printed, err = sketchwalk("calibrate", "--model", model, *MEASURE, "--prompts", 2, "--out", out)
    measured = json.loads(out.read_text())["measured"]
    assert (measured["prompts"], len(measured["tasks"])) == (2, 2)
    header, *lines = printed.splitlines()
    assert len(lines) == NUM_LAYERS and len({len(line) for line in lines}) == 1
    plan = Plan.read(out)
    assert plan.errors == known.errors
    assert [one.tokens for one in plan.model_losses] == [1024] * 4 + [2048] * 4
    tried = [f"loss at {one:.3f}" for one in plan.densities[0]]
    titles = ["layer", *tried]
    titles += [f"{what} at {one}" for one in (0.1, 0.2) for what in ("density", "queries")]
    assert header.split() == " ".join(titles).split()
    cells = [line.split() for line in lines]
    assert [line[0] for line in cells] == ["0", "1", "2"]
    for place, density in ((-4, 0.1), (-2, 0.2)):
        given = [float(line[place]) for line in cells]
        assert given == pytest.approx(plan.share_density(density), abs=1e-3)
        queries = plan.share_representatives(8)
        assert tuple(int(line[place + 1]) for line in cells) == queries
    assert f"{out}: plan {plan.short_hash} of 3 layers" in err
    assert f"put it where it is looked for: {plan_path(model)}" in err
    assert load(model)[1].plan is None


@pytest.mark.weekly
def test_a_plan_is_measured_with_weights_of_eight_bits(measured, model, tmp_path, sketchwalk):
    out = tmp_path / "plan.json"
    sketchwalk("calibrate", "--model", model, *MEASURE, "--weights", "int8", "--out", out)
    assert json.loads(out.read_text())["measured"]["weights"] == "int8"
    assert json.loads(plan_path(measured).read_text())["measured"]["weights"] is None
    found, wide = Plan.read(out), load(measured)[1].plan
    assert found.densities == wide.densities and found.losses != wide.losses
    np.testing.assert_allclose(found.losses, wide.losses, rtol=0.2)


def test_a_plan_that_is_there_is_kept_unless_told_otherwise(planned, sketchwalk):
    before = plan_path(planned).read_bytes()
    _, err = sketchwalk("calibrate", "--model", planned, *MEASURE, status=2)
    assert "--overwrite must be given to replace the plan" in err
    assert plan_path(planned).read_bytes() == before


@pytest.mark.weekly
def test_a_plan_of_another_model_is_replaced_and_changes_nothing(measured, tmp_path, sketchwalk):
    other = write_model(tmp_path / "other")
    tiny.plan((0.1, 0.2), (1.0, 0.5)).write(plan_path(other), measured={})
    sketchwalk("calibrate", "--model", other, *MEASURE, "--overwrite")
    assert load(other)[1].plan == load(measured)[1].plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "8192"], "--tokens must not exceed the model's context of 4096 tokens"),
        (["--tokens", "639"], "--tokens must be at least 640"),
        (["--tokens", "768"], "--tokens must leave room for 32 statements of multi_key"),
        (["--prompts", "0"], "Invalid value for '--prompts'"),
        (["--text", "none.txt"], "--text must be a readable UTF-8 file"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--weights", "int5"], "--weights must be one of"),
        (["--out", "nowhere/plan.json"], "--out must be a file in a folder that can be written"),
        (["--out", "."], "--out must be a file, got the folder"),
    ],
)
def test_usage_errors(model, sketchwalk, options, message):
    _, err = sketchwalk("calibrate", "--model", model, *options, status=2)
    assert err.startswith(f"error: {message}")
    assert not plan_path(model).exists()


def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(
    model, sketchwalk, monkeypatch
):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(cli.calibrate.prompt, "open_tokenizer", None)
    _, err = sketchwalk("calibrate", "--model", model, status=2)
    assert "Permission denied" in err and "give --out FILE" in err


def test_info_says_which_plan_a_model_has(planned, model, tmp_path, sketchwalk):
    found = json.loads(sketchwalk("info", "--model", planned, "--json")[0])
    plan = load(planned)[1].plan
    assert found["plan"]["short_hash"] == plan.short_hash
    densities = plan.share_density(0.2)
    assert found["plan"]["densities"]["0.2"] == list(densities)
    queries = plan.share_representatives(8)
    assert found["plan"]["representatives"]["0.2"] == list(queries)
    assert "plan" not in found["model"]
    text, _ = sketchwalk("info", "--model", planned)
    assert f"{plan.short_hash}, of this checkpoint" in text and "  density 0.1 " in text
    assert "  queries 0.1 " in text
    assert "  loss 0.1 " in text and "nats a token" in text
    assert f"sketchwalk calibrate --model {model}" in sketchwalk("info", "--model", model)[0]
    other = write_model(tmp_path / "other")
    dataclasses.replace(plan, fingerprint="0" * 64).write(plan_path(other), measured={})
    text, _ = sketchwalk("info", "--model", other)
    assert "refused:" in text and f"sketchwalk calibrate --model {other} --overwrite" in text


@pytest.mark.slow
def test_generate_takes_the_plan_with_the_recommended_preset(planned, tmp_path, sketchwalk):
    command = ["generate", "--model", planned, "--prompt", "walk " * 60, "--json"]
    command += ["--max-new-tokens", "2", "--policy", "sketchwalk"]
    plan = load(planned)[1].plan
    assert json.loads(sketchwalk(*command)[0])["settings"]["plan"] == plan.short_hash
    assert "plan" not in json.loads(sketchwalk(*command, "--set", "plan=None")[0])["settings"]
    _, err = sketchwalk(*command, "--set", "plan=x.json", status=2)
    assert "--set plan must be None" in err
    other = write_model(tmp_path / "other")
    dataclasses.replace(plan, fingerprint="0" * 64).write(plan_path(other), measured={})
    _, err = sketchwalk("generate", "--model", other, "--prompt", "walk", status=1)
    assert f"{plan_path(other)} must be the plan of this checkpoint" in err


@pytest.mark.weekly
def test_an_evaluation_takes_the_plan_and_its_rows_say_so(measured, tmp_path, sketchwalk):
    out = tmp_path / "quality.json"
    command = ["eval", "--model", measured, "--policy", "sketchwalk", "--tokens", "1024"]
    command += ["--preset", "recommended", "--preset", "paper", "--prompts", "2"]
    command += ["--task", "text_loss", "--density", "0.3"]
    command += ["--probe-prompts", "1", "--out", out]
    plan = load(measured)[1].plan
    for over in ("sparse_layers", "all_layers"):
        sketchwalk(*command, "--density-over", over, "--overwrite")
        rows = json.loads(out.read_text())["rows"]
        settings = {row["preset"]: row["settings"] for row in rows}
        assert settings["recommended"]["plan"] == plan.short_hash
        assert "plan" not in (settings.get("paper") or {})
        sketchwalk(*command, "--density-over", over)  # continues the existing file
        assert json.loads(out.read_text())["rows"] == rows
    content = plan_path(measured).read_bytes()
    try:
        plan_path(measured).unlink()
        _, err = sketchwalk(*command, "--density-over", over, status=1)
        assert f"None, got rows with {plan.short_hash}" in err
        assert json.loads(out.read_text())["rows"] == rows
    finally:
        plan_path(measured).write_bytes(content)
