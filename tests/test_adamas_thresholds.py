"""Thresholds of Adamas for a model, in the evaluation and by themselves."""

import json

import checkpoints
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sketchwalk_jax import Dense, init_cache, prefill
from sketchwalk_jax.evaluation import EvaluationConfig, evaluate
from sketchwalk_jax.evaluation.thresholds import fit_thresholds
from sketchwalk_jax.policies.adamas import AdamasConfig, hadamard_transform

PARTS = ("keys", "values")
CONFIG = AdamasConfig(block_size=16, dense_layers=1, density=0.3)


def fit(tokens, lengths=None, config=CONFIG):
    return fit_thresholds(tiny.params(), tokens, lengths, policy=config, model_config=tiny.MODEL)


def test_thresholds_are_the_quartiles_of_the_keys_of_sparse_layers():
    tokens, lengths = tiny.prompts(100, 100, seed=5)
    cache = init_cache(tiny.MODEL, Dense(), batch=2, max_tokens=128)
    options = {"model_config": tiny.MODEL, "config": Dense()}
    _, cache = prefill(tiny.params(), tokens, cache, **options)
    keys = np.asarray(hadamard_transform(cache.key[1:, :, :100]))
    found = fit(tokens)
    wanted = np.quantile(keys, [0.25, 0.5, 0.75])
    np.testing.assert_allclose(found.policy.thresholds, wanted, atol=1e-4)
    assert found.settings == {"thresholds": list(found.policy.thresholds)}
    assert (found.policy.density, found.policy.dense_layers) == (0.3, 1)
    padded = np.pad(tokens, ((0, 0), (0, 28)), constant_values=7)
    assert fit(padded, lengths).settings == found.settings


def test_a_model_without_sparse_layers_keeps_what_it_has():
    config = AdamasConfig(dense_layers=tiny.MODEL.num_layers)
    assert fit(jnp.zeros((1, 4), jnp.int32), config=config).policy is config


@pytest.mark.slow
def test_an_evaluation_of_policies_for_decode(tmp_path):
    model, out = tmp_path / "model", tmp_path / "quality.json"
    model.mkdir()
    checkpoints.write_checkpoint(model, tokenizer=True, num_hidden_layers=3)
    config = EvaluationConfig(
        policies=("quest", "adamas"),
        densities=(0.3,),
        tokens=(512,),
        tasks=("text_loss",),
        prompts=2,
        probe_prompts=1,
    )
    evaluate(model, config=config, out=out)
    dense, quest, adamas = json.loads(out.read_text())["rows"]
    low, middle, high = adamas["settings"]["thresholds"]
    assert low < middle < high and quest["settings"] is None
    for row, unit in ((quest, 16), (adamas, 1)):
        assert row["phase"] == "decode" and len(row["mass_recall_by_layer"]) == 3
        measured = row["measured_density_sparse_layers"]
        assert measured == pytest.approx(0.3, abs=unit / 448)
        # Two of three layers are dense, and only decoded tokens count.
        all_layers = row["measured_density_all_layers"]
        assert all_layers == pytest.approx((2 + measured) / 3, abs=1e-4)
        # The heads of a group have lists of their own, of which keys are read once.
        shares = [row[f"decode_bytes_{name}"] / dense[f"decode_bytes_{name}"] for name in PARTS]
        assert shares[0] == shares[1] and all_layers - 1e-3 < shares[0] < (2 + 4 * measured) / 3
        assert row["decode_bytes_metadata"] > dense["decode_bytes_metadata"] == 0
