"""`sketchwalk bench`: its file, its tables, its errors."""

import json
import re
from pathlib import Path

import checkpoints
import pytest
from quality_rows import DENSE, make_rows

from sketchwalk_jax.cli import bench
from sketchwalk_jax.memory import OutOfDeviceMemory

META = {
    "model": {"name": "model"},
    "dtype": "float32",
    "device": "NVIDIA Test",
    "attention": {"prefill": "mosaic_gpu", "decode": "xla"},
    "cpu": "a CPU",
    "cores": 2,
    "memory_gib": 8,
    "versions": {"python": "3.12", "jax": "0.12", "sketchwalk-jax": "0.1"},
    "date": "2026-01-01",
    "command": "sketchwalk bench",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=3)
    return directory


@pytest.fixture
def run(model, tmp_path, sketchwalk):
    out = tmp_path / "bench.json"
    command = ("bench", "--model", model, "--out", out, "--prompts", 0)

    def call(*options: str, status: int = 0) -> tuple[dict, str, str]:
        printed = sketchwalk(*command, *options, status=status)
        return json.loads(out.read_text()) if out.exists() else {}, *printed

    return call


RULES = (
    {"policy": "dense", "preset": None, "density": 1.0},
    {"policy": "sketchwalk", "preset": "recommended", "density": 0.2},
)


def timed_rows(times: dict[int, tuple[float, float]]) -> list[dict]:
    """Makes rows of dense attention and of the recommended policy from their seconds by length."""
    return [
        rule
        | {"phase": phase, "task": part, "tokens": tokens}
        | {"seconds": {"median": seconds if part == "first_token" else 1.0}}
        for tokens, pair in times.items()
        for part, phase in bench.PARTS.items()
        for rule, seconds in zip(RULES, pair, strict=True)
    ]


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """Records the lengths whose times are requested; nothing is measured."""
    asked = []
    each = (True, False)

    def measure(params, model_config, policy, length):
        asked.append(length)
        parts = ("first_token", "token")
        return {(part, is_dense): [2.0] for part in parts for is_dense in each}

    seconds = {("attention", is_dense): [1.0, 3.0, 2.0] for is_dense in each}
    monkeypatch.setattr(bench, "_attention_seconds", lambda *_: dict(seconds))
    monkeypatch.setattr(bench, "_model_seconds", measure)
    return asked


@pytest.mark.unchecked
@pytest.mark.slow
def test_times_are_measured(run):
    found, table, _ = run("--tokens", "128")
    keys = [(row["policy"], row["task"]) for row in found["rows"]]
    assert keys == [(policy, part) for policy in ("dense", "sketchwalk") for part in bench.PARTS]
    for row in found["rows"]:
        times = row["seconds"]
        assert 0 < times["q25"] <= times["median"] <= times["q75"] and times["repeats"] >= 1
    assert found["meta"]["attention"] == {"prefill": "xla", "decode": "xla"}
    assert len(re.findall(r"^\| 128 \|", table, re.MULTILINE)) == 1


@pytest.mark.unchecked
def test_an_interrupted_run_keeps_what_it_has_and_another_goes_on(run, asked, monkeypatch):
    lengths = ("--tokens", "128", "--tokens", "256")
    with monkeypatch.context() as patch:
        measure = bench._model_seconds

        def stop(*arguments):
            if measure(*arguments) and arguments[-1] == 256:
                raise RuntimeError("interrupted")
            return measure(*arguments)

        patch.setattr(bench, "_model_seconds", stop)
        with pytest.raises(RuntimeError, match="interrupted"):
            run(*lengths)
    asked.clear()
    found, table, _ = run(*lengths)
    assert asked == [256]
    keys = [(row["policy"], row["task"], row["tokens"]) for row in found["rows"]]
    assert keys == [
        (policy, part, tokens)
        for tokens in (128, 256)
        for policy in ("dense", "sketchwalk")
        for part in bench.PARTS
    ]
    assert found["rows"][0]["seconds"] == {"median": 2.0, "q25": 1.5, "q75": 2.5, "repeats": 3}
    assert run(*lengths)[1] == table and asked == [256]  # the second call measures nothing


def test_dense_and_sparse_rounds_alternate_until_time_is_up(monkeypatch):
    """The first round compiles: neither its times nor its duration count."""
    calls, now, quarter = [], 0.0, bench.MOST_SECONDS / 4

    def run(is_dense):
        nonlocal now
        calls.append(is_dense)
        now += 100.0 if len(calls) <= 2 else quarter
        return {"token": now}

    monkeypatch.setattr(bench.time, "monotonic", lambda: now)
    found = bench._in_turns(run)
    assert calls == [True, False] * 4  # a third round begins before time is up
    own = [200.0 + one * quarter for one in range(1, 7)]
    assert found == {("token", True): own[::2], ("token", False): own[1::2]}
    monkeypatch.setattr(bench, "MOST_SECONDS", 1e6)
    calls.clear()
    assert len(bench._in_turns(run)["token", True]) == bench.ROUNDS


@pytest.mark.unchecked
def test_a_length_that_does_not_fit_ends_the_times(run, asked, monkeypatch):
    def run_model(*arguments):
        raise OutOfDeviceMemory("256 bytes are not there")

    monkeypatch.setattr(bench, "_model_seconds", run_model)
    found, _, err = run("--tokens", "128", "--tokens", "256")
    assert "128 tokens: 256 bytes are not there" in err and "256 tokens" not in err
    assert not found


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ({512: (1.0, 2.0), 1024: (2.0, 2.0), 2048: (4.0, 2.0)}, "no slower from 1,024 tokens on;"),
        ({512: (2.0, 1.0), 1024: (2.0, 1.0)}, "no slower from 512 tokens on."),
        ({512: (2.0, 1.0), 1024: (1.0, 2.0)}, "dense attention is faster at 1,024 tokens, the lo"),
    ],
)
def test_tables_say_from_which_length_on_it_pays(times, sentence):
    text = bench.tables(META, timed_rows(times))
    assert f"To read a prompt, {'sparse attention is ' * (sentence[0] == 'n')}{sentence}" in text
    assert "**NVIDIA Test**: model in float32" in text
    assert "runs on mosaic_gpu in prompts and on xla for tokens" in text
    first, *_ = times.items()
    dense, sparse = first[1]
    assert f"| {first[0]:,} |" in text and f"**{dense / sparse:.2f}×**" in text


def test_tables_say_which_answers_are_kept():
    rule = ("sketchwalk", "recommended")
    rows = make_rows(
        policies={DENSE: (1.0, 1.0, 0.0), rule: (0.21, 0.9, 0.1)},
        lengths=(4096,),
        densities=(0.2,),
        phases=("both",),
    )
    rows = [row | {"in_mean": True} for row in rows if row["task"] in bench.TASKS]
    own = [row for row in rows if row["policy"] == "sketchwalk" and row["depth"] is None]
    asked = sum(row["prompts"] for row in own)
    right = sum(row["prompts"] * row["exact"] for row in own) / asked
    text = bench.tables(META, rows)
    assert f"Of {asked} questions that dense attention answers in prompts of 4,096 tokens" in text
    assert f"`recommended` 0.2 answers {right:.0%} (measured density" in text


@pytest.mark.unchecked
def test_results_of_something_else_stay(run, asked):
    run("--tokens", "128")
    found, _, err = run("--tokens", "128", "--density", "0.3", status=1)
    assert "must hold results of the same evaluation, got density 0.2 there, 0.3 now" in err
    assert found["meta"]["density"] == 0.2
    found, _, err = run("--tokens", "128", "--weights", "int8", status=1)
    assert 'results of the same evaluation, got weights null there, "int8" now' in err
    assert "weights" not in found["meta"]
