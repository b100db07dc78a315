"""Policies are fitted to a model and prompts: thresholds to a density, and thresholds of Adamas."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tolerances import tolerance
from variants import weekly

from sketchwalk_jax import Dense, calibration, generate, init_cache, prefill
from sketchwalk_jax.calibration import calibrate, fit_thresholds
from sketchwalk_jax.inference.cache import Density
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.adamas import AdamasConfig, hadamard_transform
from sketchwalk_jax.policies.flexprefill import FlexPrefillConfig
from sketchwalk_jax.policies.minference import MInferenceConfig

# Settings in which the threshold changes the density of prompts of 300 tokens.
POLICIES = {
    "minference": MInferenceConfig(block_size=16, vertical=64, slash=128),
    "flexprefill": FlexPrefillConfig(block_size=16, min_budget=16, tau=0.0),
}
ADAMAS = AdamasConfig(block_size=16, dense_layers=1, density=0.3)


@pytest.fixture(scope="module")
def weights():
    return tiny.params()


def measured(weights, policy, tokens, lengths):
    """Measures a policy's density over prompts, as `generate` counts it."""
    options = {"lengths": lengths, "model_config": tiny.MODEL, "max_new_tokens": 1}
    density = generate(weights, tokens, policy=policy, **options).measured_density
    pairs = np.asarray(density.prefill_pairs)[policy.dense_layers :]
    return pairs.sum() / (len(pairs) * np.asarray(density.prefill_causal).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minference", *weekly(["flexprefill", "floor"])])
def test_density_is_reached_on_the_prompts_given(weights, name):
    if name == "floor":  # the threshold alone does not reach the density
        prompts, density, tolerated = (300,), 0.5, 0.1
        policy = FlexPrefillConfig(block_size=16, min_budget=128, tau=0.0)
    else:
        prompts, density, tolerated = (200, 270), 0.75, 0.05
        policy = dataclasses.replace(POLICIES[name], dense_layers=1)
    tokens, lengths = tiny.prompts(320, *prompts)
    options = {"model_config": tiny.MODEL, "tolerance": 0.05, "batch": 2}
    found = calibrate(weights, tokens, lengths, policy=policy, density=density, **options)
    assert found.density == pytest.approx(density, rel=tolerated)
    # Calibration takes the threshold as an argument; the policy itself must give the same density.
    np.testing.assert_allclose(
        measured(weights, found.policy, tokens, lengths), found.density, **tolerance("scores")
    )
    if name == "floor":
        assert 16 <= found.policy.min_budget < 128
        own = {"gamma": found.policy.gamma, "min_budget": found.policy.min_budget}
        assert found.settings == {**own, "block_size": 16, "tau": 0.0}
        return
    assert found.tried[0][0] == getattr(
        policy, policy.threshold_field
    )  # starts at the published value
    assert (
        dataclasses.replace(found.policy, **{policy.threshold_field: found.tried[0][0]}) == policy
    )
    # Other prompts of that length come close to the density.
    others = tiny.prompts(320, *prompts, seed=1)
    assert measured(weights, found.policy, *others) == pytest.approx(density, rel=0.2)


def test_floors_are_lowered_until_the_threshold_reaches_a_density(monkeypatch):
    tokens, lengths = tiny.prompts(320, 300)
    policy = FlexPrefillConfig(block_size=16, min_budget=128, tau=0.0)
    seen = []

    def program(params, tokens, lengths, value, floor, **static):
        """Returns the threshold as density, but at least the floor's share of 200 tokens."""
        seen.append((float(value), int(floor)))
        causal = np.asarray(lengths, np.float64) ** 2
        pairs = np.tile(causal * max(float(value), int(floor) / 200), (4, 1))
        return Density(pairs, causal, 0 * pairs, 0 * causal)

    monkeypatch.setattr(calibration, "prefill_density", program)
    options = {"policy": policy, "model_config": tiny.MODEL, "batch": 2}
    found = calibrate(None, tokens, lengths, density=0.3, **options)
    assert found.density == pytest.approx(0.3, rel=0.02)
    assert found.policy.min_budget == 32 and found.policy.gamma == pytest.approx(0.3, rel=0.02)
    assert [floor for _, floor in seen] == sorted((floor for _, floor in seen), reverse=True)
    assert {128, 64, 32} == {floor for _, floor in seen}


def bisect(curve, density, policy=POLICIES["minference"], steps=16):
    return calibration._bisect(lambda value, policy: curve(value), policy, density, 0.02, steps)


def test_bisection_takes_the_nearest_value():
    for wanted in (0.02, 0.3, 0.9):
        found = bisect(lambda value: 1 - 2 ** -(value + 0.01), wanted)
        assert found.density == pytest.approx(wanted, rel=0.02)
        assert found.policy.scale == min(found.tried, key=lambda one: abs(one[1] - wanted))[0]
    # If the density changes in steps, the nearest one is taken.
    found = bisect(lambda value: 0.1 if value < 0.7 else 0.28, 0.2)
    assert found.density == 0.28 and len(found.tried) == 16
    # If the density is out of reach, the least value is taken without more trials.
    found = bisect(lambda value: 0.5 + value, 0.2)
    assert found.policy.scale == 0.0 and len(found.tried) == 2 and found.least == 0.5


@pytest.mark.filterwarnings("default")
def test_density_out_of_reach_is_warned_of(weights):
    tokens, lengths = tiny.prompts(100, 90)
    options = {"policy": POLICIES["minference"], "model_config": tiny.MODEL, "density": 0.1}
    with pytest.warns(UserWarning, match="keeps at least .* density 0.1 is out of its reach"):
        found = calibrate(weights, tokens, lengths, **options)
    assert found.density == found.least == min(density for _, density in found.tried)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("policy", "density", "message"),
    [
        (by_name("oracle"), 0.2, "policy must have a threshold"),
        (POLICIES["minference"], 0, r"density must be in \(0, 1\], got 0"),
    ],
)
def test_wrong_arguments_are_refused(weights, policy, density, message):
    tokens, _ = tiny.prompts(20)
    with pytest.raises(ValueError, match=message):
        calibrate(weights, tokens, policy=policy, model_config=tiny.MODEL, density=density)


def fit(tokens, lengths=None, config=ADAMAS):
    return fit_thresholds(tiny.params(), tokens, lengths, policy=config, model_config=tiny.MODEL)


@pytest.mark.slow
def test_thresholds_are_the_quartiles_of_the_keys_of_sparse_layers():
    tokens, lengths = tiny.prompts(100, 100, seed=5)
    cache = init_cache(tiny.MODEL, Dense(), batch=2, max_tokens=128)
    options = {"model_config": tiny.MODEL, "policy": Dense()}
    _, cache = prefill(tiny.params(), tokens, cache, **options)
    keys = np.asarray(hadamard_transform(cache.key[1:, :, :100]))
    found = fit(tokens)
    wanted = np.quantile(keys, [0.25, 0.5, 0.75])
    np.testing.assert_allclose(found.thresholds, wanted, atol=1e-4)
    assert found == dataclasses.replace(ADAMAS, thresholds=found.thresholds)
    padded = np.pad(tokens, ((0, 0), (0, 28)), constant_values=7)
    assert fit(padded, lengths) == found
    nothing = AdamasConfig(dense_layers=tiny.MODEL.num_layers)  # without sparse layers
    assert fit(jnp.zeros((1, 4), jnp.int32), config=nothing) is nothing
