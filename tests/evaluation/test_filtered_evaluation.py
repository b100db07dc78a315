"""Evaluations of prompts that dense attention answers, at density over all layers."""

import dataclasses
import json
import zlib
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import tiny
from scipy import special

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation import EvaluationConfig, measure, read_text, runner
from sketchwalk_jax.evaluation.calibrated_rules import fit_density, layers_density
from sketchwalk_jax.evaluation.measure import Measurement
from sketchwalk_jax.evaluation.results import ResultsFile, check_rows
from sketchwalk_jax.evaluation.runner import check_lengths, continue_evaluation
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tables import accuracy_table, counted, pool, summary_table
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.policies import QuestConfig, SketchWalkConfig
from sketchwalk_jax.text.tokenizer import load_tokenizer

TOKENS = 1024
CONFIG = EvaluationConfig(
    policies=("streaming",),
    densities=(0.6,),
    fields={"dense_layers": 1},
    phases=("prefill",),
    tokens=(TOKENS,),
    tasks=("single_needle", "text_loss"),
    prompts=3,
    batch=2,
    probe_prompts=0,
    wording="chat",
    answerable=True,
    tries=4,
)


def is_answered(sample: Sample) -> bool:
    """Stands in for a model that answers about every other prompt."""
    return zlib.crc32(sample.expected.encode()) % 2 == 0


@pytest.fixture
def answering(monkeypatch) -> list[int]:
    """Counts the prompts that each call answers by `is_answered`."""
    calls = []

    def right(prompts, *_):
        calls.append(len(prompts.samples))
        return np.array([is_answered(sample) for sample in prompts.samples])

    monkeypatch.setattr(measure, "right_in_decode", right)
    monkeypatch.setattr(measure, "right_in_prefill", right)
    return calls


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(
        directory, tokenizer=True, num_hidden_layers=3, max_position_embeddings=2048
    )
    params, model_config = sw.load(directory, dtype="float32")
    return params, model_config, load_tokenizer(directory)


def evaluate(model, out: Path, config=CONFIG, **options):
    params, model_config, tokenizer = model
    file = ResultsFile(out, {"model": "tiny"}, common={"model": "tiny", "stage": "report"})
    is_finished = continue_evaluation(
        file,
        params,
        model_config,
        tokenizer,
        text=read_text(),
        config=config,
        lengths=check_lengths(config, model_config),
        **options,
    )
    if file.rows:
        check_rows(file.rows)
    return is_finished, file


@pytest.mark.slow
def test_prompts_without_an_answer_are_left_out_for_all(model, answering, tmp_path):
    out = tmp_path / "real.json"
    is_finished, file = evaluate(model, out)
    assert is_finished
    flags = file.drawn("single_needle", TOKENS)
    samples = runner.draw_samples(
        "single_needle", read_text(), model[2], num_tokens=TOKENS - 64, count=len(flags), seed=0,
        wording="chat",
    )  # fmt: skip
    assert flags == "".join("01"[is_answered(sample)] for sample in samples)
    assert flags.count("1") == 3 and flags[-1] == "1"
    rows = [row for row in file.rows if row["task"] == "single_needle" and row["depth"] is None]
    assert [row["policy"] for row in rows] == ["dense", "streaming"]
    for row in rows:
        assert (row["prompts"], row["drawn"], row["in_mean"]) == (3, len(flags), True)
        assert row["is_right"] == [1, 1, 1] and row["model"] == "tiny"
    losses = [row for row in file.rows if row["task"] == "text_loss"]
    assert len(losses) == 2 and "drawn" not in losses[0]

    # Existing rows do not run again, and dense attention is not asked twice.
    before, asked = json.loads(out.read_text())["rows"], len(answering)
    assert evaluate(model, out)[0] and len(answering) == asked
    more = dataclasses.replace(CONFIG, policies=("random",), batch=3)
    _, file = evaluate(model, out, more)
    assert json.loads(out.read_text())["rows"][: len(before)] == before
    assert answering[asked:] == [3]  # only kept prompts, only the new policy
    assert {row["policy"] for row in file.rows} == {"dense", "streaming", "random"}


@pytest.mark.slow
def test_kept_prompts_do_not_depend_on_the_batch(model, answering, tmp_path):
    own = {"tasks": ("single_needle",), "policies": ("dense",), "fields": {}}
    found = []
    for batch in (1, 4):
        config = dataclasses.replace(CONFIG, batch=batch, **own)
        _, file = evaluate(model, tmp_path / f"{batch}.json", config)
        found.append(file.rows)
        assert file.drawn("single_needle", TOKENS)
    assert found[0] == found[1]


@pytest.mark.slow
def test_too_few_answers_count_in_no_mean(model, monkeypatch, tmp_path):
    tokens = 1280  # the smallest multiple of 64 with room for aggregation
    config = dataclasses.replace(
        CONFIG, tasks=("single_needle", "aggregation"), tokens=(tokens,), tries=2, batch=1
    )
    seen = []

    def right(prompts, *_):
        seen.extend(prompts.samples)
        is_needle = prompts.task == "single_needle"
        return np.array([is_needle and len(seen) == 1 for _ in prompts.samples])

    monkeypatch.setattr(measure, "right_in_decode", right)
    _, file = evaluate(model, tmp_path / "real.json", config)
    nothing = [row for row in file.rows if row["task"] == "aggregation"]
    assert len(nothing) == 1 and nothing[0]["policy"] == "dense"
    assert (nothing[0]["prompts"], nothing[0]["drawn"]) == (0, 6)
    needles = [row for row in file.rows if row["task"] == "single_needle"]
    assert {(row["prompts"], row["drawn"], row["in_mean"]) for row in needles} == {(1, 6, False)}
    assert counted(file.rows) == [] and pool(counted(file.rows)) is None
    for table in (accuracy_table, summary_table):
        more = {"phase": "prefill"} if table is accuracy_table else {}
        assert "`streaming`" in table(file.rows, density=0.6, tokens=tokens, **more)
    seen_before = len(seen)
    assert evaluate(model, tmp_path / "real.json", config)[0] and len(seen) == seen_before


@pytest.mark.slow
def test_a_call_stops_in_time_and_the_next_goes_on(model, answering, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    run = Measurement.run

    def slow(self, prompts, *arguments):
        clock[0] += 10
        return run(self, prompts, *arguments)

    monkeypatch.setattr(Measurement, "run", slow)
    out, calls = tmp_path / "real.json", 0
    while not evaluate(model, out, seconds=45.0)[0]:
        calls += 1
        assert calls < 5
    assert calls >= 1
    whole = evaluate(model, tmp_path / "whole.json")[1]
    rows = json.loads(out.read_text())["rows"]
    assert sorted(map(str, rows)) == sorted(map(str, json.loads(json.dumps(whole.rows))))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("policy", [SketchWalkConfig.paper(), QuestConfig(dense_layers=1)])
def test_density_is_set_for_the_mean_over_all_layers(policy, phase):
    model_config = dataclasses.replace(tiny.MODEL, num_layers=24)
    found = fit_density(policy, model_config, density=0.2, num_tokens=8192, phase=phase)
    # A decoded token keeps whole blocks: of 128 blocks, one is 0.008.
    assert found.density == pytest.approx(0.2, abs=0.005) and found.least < 0.15
    count = policy.dense_layers
    assert found.policy.density == pytest.approx((0.2 * 24 - count) / (24 - count), abs=0.015)
    tight = fit_density(policy, model_config, density=0.01, num_tokens=8192, phase=phase)
    assert tight.density == tight.least > 0.01


@pytest.mark.weekly
def test_all_of_a_prompt_is_counted_as_it_is_measured(model, answering, tmp_path):
    config = dataclasses.replace(
        CONFIG,
        policies=("streaming", "minference", "quest"),
        densities=(0.7, 0.3),
        phases=("prefill", "decode", "both"),
        tasks=("text_loss",),
        density_over="all_layers",
        fields={},
        variants=(Rule("random", None, 0.7, (("dense_layers", 1),), "one layer"),),
    )
    phases = {str(rule): [] for rule in config.rules()}
    for rule in config.rules():
        phases[str(rule)].append(rule.phases)
    assert phases["streaming 0.7"] == [("prefill", "both"), ("decode",)]
    assert phases["quest 0.7"] == [("decode",)] and phases["dense"] == [None]
    _, file = evaluate(model, tmp_path / "real.json", config)
    rows = [row for row in file.rows if row["policy"] != "dense"]
    for row in rows:
        assert row["measured_density_all_layers"] == pytest.approx(row["density"], rel=0.15)
    run = {(row["policy"], row["density"], row["phase"]) for row in rows}
    assert ("streaming", 0.7, "both") in run and ("streaming", 0.3, "both") not in run
    assert ("minference", 0.7, "prefill") in run
    left_out = {(one["policy"], one["density"]): one for one in file.meta["not_run"]}
    assert left_out["streaming", 0.3]["least_density_all_layers"] > 0.66  # two of three are dense
    assert ("quest", 0.3) in left_out
    settings = {row["policy"]: row["settings"] for row in rows if row["phase"] != "decode"}
    assert settings["random"]["density"] < 0.7
    assert layers_density(
        SketchWalkConfig.paper(density=1.0), model[1], num_tokens=TOKENS, phase="prefill"
    ) == pytest.approx(1)


@pytest.mark.slow
def test_long_decoding_is_that_of_decode_steps():
    model_config = dataclasses.replace(tiny.MODEL, max_position_embeddings=640)
    params = tiny.params(model=model_config)
    tokens = np.random.default_rng(3).integers(2, 64, 628).astype(np.int32)
    # The decoded tokens are in three blocks.
    sample = Sample("long_decode", tokens, 488, tokens[488:], 488, "")
    full, rule = Rule("sketchwalk", "paper", 1.0), Rule("sketchwalk", "damped", 0.3)
    wanted = {DENSE: ("both",), full: ("decode", "both"), rule: ("decode", "both")}
    measurement = Measurement(params, model_config, batch=2)
    found = {
        (one, phase): outcome
        for one, phases in wanted.items()
        for phase, outcome in measurement.run_long([sample], one, phases, num_tokens=640).items()
    }
    dense = found[DENSE, "both"]
    assert dense.losses.shape == (1,) and dense.divergences[0] == pytest.approx(0, abs=1e-6)
    assert dense.agreements == 1
    layers = range(2, model_config.num_layers)
    for phase in ("decode", "both"):
        np.testing.assert_allclose(found[full, phase].losses, dense.losses, rtol=1e-4)
        np.testing.assert_allclose(found[full, phase].divergences, 0, atol=1e-4)
        assert found[rule, phase].divergences[0] > 1e-3
        assert found[full, phase].agreements == 1 and found[rule, phase].agreements < 1
        density = found[rule, phase].measured_density("decode", np.ones(1, bool), layers=layers)
        assert density == pytest.approx(0.35, abs=0.08)
    for key in ((rule, "both"), (rule, "decode")):
        losses = _stepped(params, model_config, tokens, *key)
        assert found[key].losses[0] == pytest.approx(losses.mean(), rel=1e-4)


def _stepped(params, model_config, tokens, rule, phase):
    """Computes losses of the decoded tokens after the first, with `prefill` and `decode_step`."""
    config = rule.make()
    options = {"model_config": model_config, "policy": config, "phase": phase}
    cache = sw.init_cache(model_config, config, batch=1, max_tokens=640)
    _, cache = sw.prefill(params, tokens[None, :488], cache, **options)
    losses = []
    for place in range(488, len(tokens) - 1):
        logits, cache = sw.decode_step(params, tokens[place : place + 1], cache, **options)
        log_p = special.log_softmax(np.asarray(logits[0], np.float64))
        losses.append(-log_p[tokens[place + 1]])
    return np.array(losses)
