"""Policies with a knob are set to a density on held-out prompts, and only there."""

import dataclasses
import json
import re

import checkpoints
import numpy as np
import pytest
import tiny
from tolerances import tolerance

from sketchwalk_jax import generate
from sketchwalk_jax.evaluation import EvaluationConfig, calibrated_rules, calibration, evaluate
from sketchwalk_jax.evaluation.calibration import HELD_OUT, calibrate, held_out_prompts
from sketchwalk_jax.evaluation.runner import _Run
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.flexprefill import FlexPrefillConfig
from sketchwalk_jax.policies.minference import MInferenceConfig

# Sizes at which the knob moves the density of prompts of 300 tokens.
POLICIES = {
    "minference": MInferenceConfig(block_size=16, vertical=64, slash=128),
    "flexprefill": FlexPrefillConfig(block_size=16, min_budget=16, tau=0.0),
}


@pytest.fixture(scope="module")
def weights():
    return tiny.params()


def measured(weights, policy, tokens, lengths):
    """Density of a policy over prompts, as `generate` counts it."""
    options = {"lengths": lengths, "model_config": tiny.MODEL, "max_new_tokens": 1}
    density = generate(weights, tokens, config=policy, **options).measured_density
    pairs = np.asarray(density.prefill_pairs)[policy.dense_layers :]
    return pairs.sum() / (len(pairs) * np.asarray(density.prefill_causal).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_density_is_reached_on_the_prompts_given(weights, name):
    tokens, lengths = tiny.prompts(320, 200, 270)
    policy = dataclasses.replace(POLICIES[name], dense_layers=1)
    options = {"model_config": tiny.MODEL, "tolerance": 0.05, "batch": 2}
    found = calibrate(weights, tokens, lengths, policy=policy, density=0.75, **options)
    assert found.density == pytest.approx(0.75, rel=0.05)
    assert found.tried[0][0] == getattr(policy, policy.knob)  # begins as published
    # What one program measures for a number that it is given is what the policy itself does.
    np.testing.assert_allclose(
        measured(weights, found.policy, tokens, lengths), found.density, **tolerance("scores")
    )
    assert dataclasses.replace(found.policy, **{policy.knob: found.tried[0][0]}) == policy
    # Other prompts of that length come near it.
    others = tiny.prompts(320, 200, 270, seed=1)
    assert measured(weights, found.policy, *others) == pytest.approx(0.75, rel=0.2)


@pytest.mark.slow
def test_floors_are_lowered_where_the_knob_does_not_reach(weights):
    tokens, lengths = tiny.prompts(320, 300)
    policy = FlexPrefillConfig(block_size=16, min_budget=128, tau=0.0)
    found = calibrate(weights, tokens, lengths, policy=policy, model_config=tiny.MODEL, density=0.5)
    assert found.density == pytest.approx(0.5, rel=0.1)
    assert 16 <= found.policy.min_budget < 128
    np.testing.assert_allclose(
        measured(weights, found.policy, tokens, lengths), found.density, **tolerance("scores")
    )
    assert found.settings == {
        "gamma": found.policy.gamma,
        "min_budget": found.policy.min_budget,
        "block_size": 16,
        "tau": 0.0,
    }


def bisect(curve, density, policy=POLICIES["minference"], steps=16):
    return calibration._bisect(lambda value, policy: curve(value), policy, density, 0.02, steps)


def test_bisection_takes_the_nearest_value():
    for wanted in (0.02, 0.3, 0.9):
        found = bisect(lambda value: 1 - 2 ** -(value + 0.01), wanted)
        assert found.density == pytest.approx(wanted, rel=0.02)
        assert found.policy.scale == min(found.tried, key=lambda one: abs(one[1] - wanted))[0]
    # A density in steps: the nearest of them.
    found = bisect(lambda value: 0.1 if value < 0.7 else 0.28, 0.2)
    assert found.density == 0.28 and len(found.tried) == 16
    # Out of reach: the least value, and no more is tried.
    found = bisect(lambda value: 0.5 + value, 0.2)
    assert found.policy.scale == 0.0 and len(found.tried) == 2 and found.least == 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_density_out_of_reach_is_warned_of(weights):
    tokens, lengths = tiny.prompts(100, 90)
    options = {"policy": POLICIES["minference"], "model_config": tiny.MODEL, "density": 0.1}
    with pytest.warns(UserWarning, match="keeps at least .* density 0.1 is out of its reach"):
        found = calibrate(weights, tokens, lengths, **options)
    assert found.density == found.least == min(density for _, density in found.tried)


@pytest.mark.unchecked
def test_wrong_arguments_are_refused(weights):
    tokens, _ = tiny.prompts(20)
    with pytest.raises(ValueError, match="policy must have a knob"):
        calibrate(weights, tokens, policy=by_name("oracle"), model_config=tiny.MODEL, density=0.2)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 0"):
        calibrate(
            weights, tokens, policy=POLICIES["minference"], model_config=tiny.MODEL, density=0
        )


def test_rules_with_a_knob_are_published_until_they_are_calibrated():
    config = EvaluationConfig(policies=("minference", "streaming"), densities=(0.1, 0.2))
    rules = config.rules()
    assert rules[:3] == (DENSE, Rule("minference", None, 0.1), Rule("minference", None, 0.2))
    assert rules[1].make() == MInferenceConfig()
    assert [rule.is_calibrated for rule in rules] == [False, True, True, False, False]
    assert config.phases_of(rules[1].make()) == ("prefill",)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2.0"):
        EvaluationConfig(policies=("flexprefill",), densities=(2.0,))


@pytest.mark.slow
def test_evaluation_calibrates_on_prompts_that_it_does_not_score(tmp_path, monkeypatch):
    model, out = tmp_path / "model", tmp_path / "quality.json"
    model.mkdir()
    checkpoints.write_checkpoint(model, tokenizer=True, num_hidden_layers=3)
    config = EvaluationConfig(
        policies=("minference",),
        densities=(0.6,),
        tokens=(512,),
        tasks=("single_needle", "text_loss"),
        prompts=2,
        probe_prompts=0,
    )
    held_out, scored = [], []

    def noted(*arguments, **options):
        assert options["seed"] == config.seed
        tokens, lengths = held_out_prompts(*arguments, **options)
        held_out.extend(tuple(row[:length]) for row, length in zip(tokens, lengths, strict=True))
        return tokens, lengths

    draw = _Run._draw

    def noted_draw(*arguments, **options):
        samples = draw(*arguments, **options)
        scored.extend(tuple(sample.tokens) for sample in samples)
        return samples

    monkeypatch.setattr(calibrated_rules, "held_out_prompts", noted)
    monkeypatch.setattr(_Run, "_draw", noted_draw)
    evaluate(model, config=config, out=out)
    assert len(held_out) == 2 and set(held_out).isdisjoint(scored)
    rows = [row for row in json.loads(out.read_text())["rows"] if row["policy"] != "dense"]
    assert {row["phase"] for row in rows} == {"prefill"}
    assert {row["task"] for row in rows} == set(config.tasks)
    (settings,) = {json.dumps(row["settings"]) for row in rows}
    assert re.fullmatch(r'\{"scale": [0-9.]+\}', settings)
    for row in rows:
        assert row["measured_density_sparse_layers"] == pytest.approx(0.6, rel=0.15)
    held_out.clear()
    evaluate(model, config=config, out=out)  # nothing is left to do, nor to calibrate
    assert not held_out
    assert HELD_OUT > 2**31
