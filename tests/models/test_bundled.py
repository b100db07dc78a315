"""The model that ships with the package: its files, its answers, and transformers' results."""

import json
from pathlib import Path

import numpy as np
import pytest
from parity.live_cases import run_reference
from tolerances import tolerance

from sketchwalk_jax import Dense, generate, init_cache, load, prefill
from sketchwalk_jax.cli import main
from sketchwalk_jax.cli.demo import hide_facts
from sketchwalk_jax.evaluation.tasks import draw_samples, score
from sketchwalk_jax.evaluation.wording import code_question
from sketchwalk_jax.models import ModelConfig, bundled_model
from sketchwalk_jax.text.haystack import read_text
from sketchwalk_jax.text.tokenizer import decode, encode, load_tokenizer

MAX_BYTES = 16e6

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def bundled():
    """Parameters in float32, configuration and tokenizer."""
    return *load(bundled_model(), dtype="float32"), load_tokenizer(bundled_model())


def test_its_files_are_small_and_complete():
    files = {path.name: path.stat().st_size for path in bundled_model().iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert sum(files.values()) <= MAX_BYTES
    config = ModelConfig.from_pretrained(bundled_model())
    assert config.context_length >= 8192 and config.dtype == "bfloat16"


def test_its_tokenizer_fits_it(bundled):
    _, config, tokenizer = bundled
    assert len(tokenizer) == config.vocab_size
    text = "Let island be 40712. né, 你\n"
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text


def assert_equals_transformers(bundled, expected) -> np.ndarray:
    """Compares logits and greedy tokens; returns the tokens."""
    params, config, _ = bundled
    tokens, num_new = expected["tokens"], expected["greedy"].shape[1]
    cache = init_cache(
        config, Dense(), batch=len(tokens), max_tokens=tokens.shape[1], dtype="float32"
    )
    logits, _ = prefill(params, tokens, cache, model_config=config, policy=Dense())
    np.testing.assert_allclose(logits, expected["logits"], **tolerance("trained_logits"))
    generation = generate(
        params,
        tokens,
        model_config=config,
        policy=Dense(),
        max_new_tokens=num_new,
        eos_token_ids=(),
    )
    np.testing.assert_array_equal(generation.tokens, expected["greedy"])
    return np.asarray(generation.tokens)


def test_its_answers_are_right_and_those_of_transformers(bundled, repository: Path):
    expected = np.load(repository / "tests" / "goldens" / "bundled.npz")
    tokens = assert_equals_transformers(bundled, expected)
    for row, number in zip(tokens, expected["numbers"], strict=True):
        assert decode(bundled[2], row).startswith(f" {number}.")


@pytest.mark.parity
@pytest.mark.slow
def test_its_answers_to_new_questions_are_those_of_transformers(
    bundled, reference_python, parity_seed, tmp_path
):
    def prompts(seed: int) -> list[list[int]]:
        text = hide_facts(bundled[2], num_tokens=1500, num_facts=2, seed=seed)
        # Both prompts have one length; cutting their beginning loses little.
        questions = (code_question(fact.word) for fact in text.facts)
        asked = (encode(bundled[2], one, add_special_tokens=False) for one in questions)
        return [np.concatenate([text.tokens, one])[-1400:].tolist() for one in asked]

    checkpoint = {
        "name": "bundled",
        "directory": str(bundled_model()),
        "prompts": [prompts(parity_seed + attempt) for attempt in range(20)],
        "new_tokens": 24,
    }
    print(f"SKETCHWALK_PARITY_SEED={parity_seed}")
    run_reference(reference_python, {"checkpoints": [checkpoint]}, tmp_path, seed=parity_seed)
    assert_equals_transformers(bundled, np.load(tmp_path / "bundled" / "expected.npz"))


@pytest.mark.slow
def test_it_finds_the_needle_in_4096_tokens(bundled):
    params, config, tokenizer = bundled
    samples = draw_samples(
        "single_needle", read_text(), tokenizer, num_tokens=4096, count=5, seed=0, depths=5
    )
    found = 0
    for sample in samples:
        generation = generate(
            params, sample.tokens[None], model_config=config, policy=Dense(), max_new_tokens=8
        )
        found += score(sample, decode(tokenizer, np.asarray(generation.tokens)[0]))
    assert found >= len(samples) - 1


@pytest.mark.weekly
def test_demo_without_options_shows_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Of 2,048 tokens the default policy keeps most keys.
    assert main(["demo", "--tokens", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == bundled_model().name
    assert found["dense"]["right"] >= 3
    assert found["sketchwalk"]["measured_density_prefill"] < 0.7
    assert (tmp_path / found["picture"]).read_bytes().startswith(b"\x89PNG")
