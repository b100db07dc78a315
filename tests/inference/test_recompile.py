"""Nothing compiles twice: steps, prompts of one bucket, lengths, calls without `jit`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, POLICIES, params, prompts

import sketchwalk_jax as sw
from sketchwalk_jax import BlockSelection, Sampling, init_cache
from sketchwalk_jax.inference import compiled, generation, steps


@pytest.fixture
def weights():
    return params()


def _count_traces(monkeypatch, module, name, function, at_most, jit=jax.jit, **jit_options):
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(function, n=at_most)
    monkeypatch.setattr(module, name, jit(traced, **jit_options))


def test_decode_steps_share_one_program(monkeypatch, weights):
    _count_traces(monkeypatch, steps, "_decode", steps.decode_token, 1, static_argnames="settings")
    config = POLICIES["paper"]
    cache = init_cache(MODEL, config, batch=2, max_tokens=64)
    for token in range(40):  # crosses block boundaries
        tokens = np.full(2, token, np.int32)
        _, cache = steps.decode_step(weights, tokens, cache, model_config=MODEL, policy=config)


@pytest.fixture
def at_most(monkeypatch):
    """Limits how often `generate` and `stream` may trace their two programs."""

    def limit(reads: int, decodes: int) -> None:
        own, steps = ("capacity", "settings"), ("num_tokens", "eos_token_ids", "pad_token_id")
        steps += ("settings", "greedy_steps")
        jit = functools.partial(compiled.Program, does="what is counted")
        count = functools.partial(_count_traces, monkeypatch, generation, jit=jit)
        count("_start", generation.start_decoding, reads, static=own, donated="cache")
        count("_continue", generation.decode_tokens, decodes, static=steps, donated="state")

    return limit


def test_prompts_of_one_bucket_and_all_draws_share_their_programs(at_most, weights):
    at_most(1, 2)  # greedy sequences decode with a program of their own
    run = generation.make_generate(MODEL, POLICIES["paper"], max_new_tokens=2)
    settings = [
        Sampling.greedy(),
        Sampling(temperature=0.5),
        Sampling(temperature=1, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1),
        Sampling(temperature=np.float32(2)),
    ]
    for length, sampling in zip((97, 100, 205, 256), settings, strict=True):
        prompt, _ = prompts(length, seed=length)
        run(weights, prompt, sampling=sampling, key=jax.random.key(length))
        run(weights, prompt, lengths=np.array([length - 1]), sampling=sampling)


def test_numbers_of_tokens_of_one_room_and_streams_share_their_programs(at_most, weights):
    at_most(1, 1)
    prompt, _ = prompts(40)
    options = {"model_config": MODEL, "policy": POLICIES["paper"]}
    for max_new_tokens in (1, 7, 12):
        out = generation.generate(weights, prompt, max_new_tokens=max_new_tokens, **options)
        assert out.tokens.shape == (1, max_new_tokens)
    for every in (3, 4):
        chunks = generation.stream(weights, prompt, every=every, max_new_tokens=7, **options)
        found = np.concatenate([chunk.tokens for chunk in chunks], axis=1)
        np.testing.assert_array_equal(found, out.tokens[:, :7])


@pytest.mark.slow
def test_a_given_capacity_reads_prompts_with_one_program(at_most, weights):
    at_most(2, 2)
    prompt, _ = prompts(40)
    options = {"model_config": MODEL, "policy": POLICIES["dense"], "max_tokens": 400}
    for max_new_tokens in (2, 300):  # two capacities
        generation.generate(weights, prompt, max_new_tokens=max_new_tokens, **options)
    options |= {"return_selection": True, "chunk_size": 32}  # options of prefill only
    generation.generate(weights, prompt, max_new_tokens=2, **options)


@pytest.mark.slow
def test_a_longer_bucket_does_compile(at_most, weights):
    """Shows that the counter above can fail."""
    at_most(1, 1)
    run = generation.make_generate(MODEL, POLICIES["dense"], max_new_tokens=1)
    run(weights, prompts(20)[0])
    with pytest.raises(AssertionError, match="traced"):
        run(weights, prompts(300)[0])


# Calls outside of `jit`.


def _attend(name, num_tokens, seed):
    """Calls a public function on drawn arrays, which are made without compiling."""
    rng, size = np.random.default_rng(seed), 16
    shapes = [(2, num_tokens, heads, 8) for heads in (4, 2, 2)]
    query, key, value = (jnp.asarray(rng.standard_normal(x, np.float32)) for x in shapes)
    rows = num_tokens // size
    ids = np.broadcast_to(np.arange(rows, dtype=np.int32), (2, 1, rows, rows))
    counts = np.ones((2, 1, rows), np.int32)
    if name == "block_sparse_attention":
        lists = BlockSelection(jnp.asarray(ids), jnp.asarray(counts), size)
        return sw.block_sparse_attention(query, key, value, lists)
    if name == "block_sparse_decode":
        lists = BlockSelection(jnp.asarray(ids[:, :, :1]), jnp.asarray(counts[:, :, :1]), size)
        query = jnp.asarray(np.asarray(query)[:, :1])
        lengths = jnp.asarray(np.array([num_tokens, 5 + seed], np.int32))
        return sw.block_sparse_decode(query, key, value, lists, kv_lengths=lengths)
    if name == "dense_attention":
        return sw.dense_attention(query, key, value)
    config = sw.SketchWalkConfig.recommended(block_size=size, density=0.5, min_tokens=4 * size)
    scores = jnp.asarray(np.zeros((2, rows, rows), np.float32))
    walk = sw.WalkState(scores, jnp.asarray(np.int32(0)))
    return sw.sketchwalk_attention(query, key, value, walk, policy=config)


@pytest.mark.parametrize(
    "name",
    ["block_sparse_attention", "block_sparse_decode", "dense_attention", "sketchwalk_attention"],
)
def test_a_call_outside_of_jit_compiles_once_for_each_shape(compilations, name):
    first = _attend(name, 64, 0)
    compilations.clear()
    again, other = _attend(name, 64, 0), _attend(name, 64, 1)
    assert not compilations
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(jax.tree.leaves(first)[0], jax.tree.leaves(other)[0])
    _attend(name, 80, 0)
    assert compilations  # the counter can fail
