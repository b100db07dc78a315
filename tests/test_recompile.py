"""Nothing compiles twice: decode steps, prompts of one bucket, sampling settings."""

import chex
import jax
import numpy as np
import pytest
from tiny import MODEL, POLICIES, params, prompts

from sketchwalk_jax import Sampling, generation, inference, init_cache


@pytest.fixture
def weights():
    return params()


def _count_traces(monkeypatch, module, name, function, at_most, **jit_options):
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(function, n=at_most)
    monkeypatch.setattr(module, name, jax.jit(traced, **jit_options))


def test_decode_steps_share_one_program(monkeypatch, weights):
    _count_traces(
        monkeypatch, inference, "_decode", inference.decode_token, 1, static_argnames="settings"
    )
    config = POLICIES["paper"]
    cache = init_cache(MODEL, config, batch=2, max_tokens=64)
    for token in range(40):  # across block boundaries
        tokens = np.full(2, token, np.int32)
        _, cache = inference.decode_step(weights, tokens, cache, model_config=MODEL, config=config)


def test_prompts_of_one_bucket_and_all_sampling_settings_share_one_program(monkeypatch, weights):
    _count_traces(
        monkeypatch,
        generation,
        "_generate",
        generation._generate.__wrapped__,
        1,
        static_argnames=generation._STATIC,
    )
    run = generation.make_generate(MODEL, POLICIES["paper"], max_new_tokens=2)
    settings = [
        None,
        Sampling(temperature=0.5),
        Sampling(temperature=1, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1),
        Sampling(temperature=np.float32(2)),
    ]
    for length, sampling in zip((97, 100, 105, 112), settings, strict=True):
        prompt, _ = prompts(length, seed=length)
        run(weights, prompt, sampling=sampling, key=jax.random.key(length))
        run(weights, prompt, lengths=np.array([length - 1]), sampling=sampling)


def test_chunks_of_a_stream_share_one_program(monkeypatch, weights):
    _count_traces(
        monkeypatch,
        generation,
        "_continue",
        generation.decode_tokens,
        1,
        static_argnames=("num_tokens", "eos_token_ids", "pad_token_id", "settings"),
    )
    prompt, _ = prompts(40)
    options = {"model_config": MODEL, "config": POLICIES["paper"], "max_new_tokens": 7}
    assert len(list(generation.stream(weights, prompt, every=3, **options))) == 4


def test_a_longer_bucket_does_compile(monkeypatch, weights):
    """The counter above can fail."""
    _count_traces(
        monkeypatch,
        generation,
        "_generate",
        generation._generate.__wrapped__,
        1,
        static_argnames=generation._STATIC,
    )
    run = generation.make_generate(MODEL, POLICIES["dense"], max_new_tokens=1)
    run(weights, prompts(20)[0])
    with pytest.raises(AssertionError, match="traced"):
        run(weights, prompts(200)[0])
