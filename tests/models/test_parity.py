"""Logits and greedy tokens of whole models against transformers.

One half reads golden files, made by `tests/make_goldens.py`. The other draws new models in every
run, with the interpreter of SKETCHWALK_REFERENCE_PYTHON; SKETCHWALK_PARITY_SEED repeats a run.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from parity.live_cases import NAMES, draw_case, run_reference
from parity.rope_cases import ROPE_CASES
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import Dense, forward, generate, load
from sketchwalk_jax.models import ModelConfig, rope_frequencies

TESTS = Path(__file__).parents[1]
# One checkpoint of each family, as families differ in their rope.
KEPT = ("llama-3.1", "qwen2", "qwen3-bias-yarn")
GOLDENS = sorted(path.name for path in (TESTS / "goldens").iterdir() if path.is_dir())


def assert_equals_transformers(directory: Path) -> None:
    """Loads a checkpoint and compares it with its `expected.npz`."""
    expected = np.load(directory / "expected.npz")
    params, config = load(directory, dtype="float32")
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(frequencies, expected["frequencies"], rtol=5e-7, atol=0)
    assert factor == pytest.approx(float(expected["attention_factor"]), rel=1e-12)

    tokens = jnp.asarray(expected["tokens"])
    logits = forward(params, tokens, model_config=config, policy=Dense())
    bound, exact = tolerance("logits"), expected["logits"]
    if "exact_logits" in expected:
        # A drawn model may amplify rounding: a norm divides a few tiny numbers by their size.
        exact = expected["exact_logits"]
        rounding = np.max(np.abs(expected["logits"] - exact) / (1 + np.abs(exact)))
        bound = {name: max(value, 4 * float(rounding)) for name, value in bound.items()}
    np.testing.assert_allclose(logits, exact, **bound)
    num_new = expected["greedy"].shape[1]
    generation = generate(
        params, tokens, model_config=config, policy=Dense(), max_new_tokens=num_new
    )
    np.testing.assert_array_equal(generation.tokens, expected["greedy"])


def assert_as_exact_as_transformers(directory: Path, dtype: str) -> None:
    """In low precision both differ from the float32 logits; ours must not differ more."""
    expected = np.load(directory / "expected.npz")
    params, config = load(directory, dtype=dtype)
    tokens = jnp.asarray(expected["tokens"])
    logits = forward(params, tokens, model_config=config, policy=Dense())
    assert logits.dtype == jnp.float32
    error, reference_error = (
        float(np.sqrt(np.mean(np.square(value - expected["exact_logits"]))))
        for value in (np.asarray(logits), expected["logits"])
    )
    assert 0 < error < 2 * reference_error


@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, GOLDENS))
def test_golden_models_give_the_logits_and_tokens_of_transformers(name: str):
    assert_equals_transformers(TESTS / "goldens" / name)


def test_goldens_cover_every_family_rope_type_and_switch():
    configs = [ModelConfig.from_pretrained(TESTS / "goldens" / name) for name in GOLDENS]
    assert {config.model_type for config in configs} == {"llama", "qwen2", "qwen3"}
    assert {config.rope.rope_type for config in configs} == {"default", "linear", "llama3", "yarn"}
    assert {config.group_size for config in configs} >= {1, 2, 3, 4, 7}
    for switch in ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        assert {getattr(config, switch) for config in configs} == {False, True}, switch
    assert any(c.num_heads * c.head_dim != c.hidden_size for c in configs)
    assert any(len(config.eos_token_ids) > 1 for config in configs)


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory, reference_python: str, parity_seed: int) -> Path:
    """Runs the reference worker once, on all cases."""
    directory = tmp_path_factory.mktemp("parity")
    job = {
        "cases": [draw_case(name, parity_seed) for name in NAMES],
        "rope": [{"name": name, "config": config} for name, config in ROPE_CASES.items()],
    }
    run_reference(reference_python, job, directory, seed=parity_seed)
    return directory


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_drawn_models_give_the_logits_and_tokens_of_transformers(
    reference_run: Path, parity_seed: int, name: str
):
    case = draw_case(name, parity_seed)
    print(f"SKETCHWALK_PARITY_SEED={parity_seed}", json.dumps(case))
    if "run_dtype" in case:
        assert_as_exact_as_transformers(reference_run / name, case["run_dtype"])
    elif case.get("lm_head") == "other":
        with pytest.warns(UserWarning, match="holds a different lm_head"):
            assert_equals_transformers(reference_run / name)
    else:
        assert_equals_transformers(reference_run / name)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("name", ROPE_CASES)
def test_the_reference_still_gives_the_golden_frequencies(reference_run: Path, name: str):
    fresh, golden = np.load(reference_run / "rope.npz"), np.load(TESTS / "goldens/rope.npz")
    np.testing.assert_allclose(golden[name], fresh[name], rtol=2.5e-7, atol=0)
    factor = name + ".attention_factor"
    assert float(golden[factor]) == pytest.approx(float(fresh[factor]), rel=1e-12)
