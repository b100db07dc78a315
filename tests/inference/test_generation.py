"""Generation: one program, batches, end of sequence, conversations, padding, density."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, POLICIES, params, prompts
from tolerances import tolerance

from sketchwalk_jax import Sampling, generate, init_cache, make_generate, prefill, stream
from sketchwalk_jax.inference import generation, steps
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.steps import decode_step, forward
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.policies.base import Span

# Most tests use one shape, and so share compiled programs.
LENGTHS = (100, 37, 64)
NEW, CAPACITY = 6, 144
OPTIONS = {"model_config": MODEL, "max_new_tokens": NEW, "max_tokens": CAPACITY}
SAMPLED = Sampling(temperature=0.8, top_k=20, repetition_penalty=1.3)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def weights():
    return params()


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        pytest.param("dense", "both", marks=slow),
        ("paper", "both"),
        pytest.param("released", "both", marks=slow),
        pytest.param("damped", "prefill", marks=slow),
    ],
)
def test_generate_equals_prefill_and_decode_steps(weights, name, phase):
    """Decodes greedily with `prefill` and `decode_step`, one token of each sequence at a time."""
    tokens, lengths = prompts(*LENGTHS)
    config = POLICIES[name]
    out = generate(weights, tokens, lengths=lengths, policy=config, phase=phase, **OPTIONS)
    options = {"model_config": MODEL, "policy": config, "phase": phase}
    cache = init_cache(MODEL, config, batch=len(tokens), max_tokens=CAPACITY)
    logits, cache = prefill(weights, tokens, cache, lengths=lengths, **options)
    for token in np.asarray(out.tokens).T:
        np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))
        logits, cache = decode_step(weights, token, cache, **options)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling.greedy(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["paper", "released"])
def test_batched_equals_single(weights, name, sampling):
    tokens, lengths = prompts(*LENGTHS)
    keys = jax.random.split(jax.random.key(3), len(LENGTHS))
    options = {"policy": POLICIES[name], "sampling": sampling, **OPTIONS}
    batched = generate(weights, tokens, lengths=lengths, key=keys, **options)
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        single = generate(weights, tokens[one], lengths=lengths[one], key=keys[one], **options)
        assert batched.tokens[row].tolist() == single.tokens[0].tolist()
        np.testing.assert_allclose(
            batched.measured_density.prefill_pairs[:, row],
            single.measured_density.prefill_pairs[:, 0],
            **tolerance("density"),
        )


def test_end_of_sequence_stops_a_sequence_and_pads_it(weights):
    tokens, lengths = prompts(*LENGTHS)
    options = {"policy": POLICIES["paper"], "lengths": lengths, **OPTIONS}
    free = np.asarray(generate(weights, tokens, **options).tokens)
    eos = int(free[0, 2])
    out = generate(weights, tokens, eos_token_ids=(63, eos), pad_token_id=5, **options)
    for row in range(len(LENGTHS)):
        expected = free[row].tolist()
        end = expected.index(eos) + 1 if eos in expected else NEW
        assert int(out.lengths[row]) == end
        assert out.tokens[row].tolist() == expected[:end] + [5] * (NEW - end)
        assert int(out.cache.lengths[row]) == LENGTHS[row] + end


# The end comes from the limit, inside or after a group of steps, or from a token.
@pytest.mark.slow
@pytest.mark.parametrize(("limit", "has_end"), [(5, False), (7, True)])
def test_the_program_of_greedy_sequences_leaves_what_that_of_all_leaves(weights, limit, has_end):
    settings = Settings(model_config=MODEL, policy=POLICIES["paper"])
    prompt = (*map(jnp.asarray, prompts(*LENGTHS)), jax.random.key(0), None)
    state, _ = generation._start(weights, *prompt, capacity=CAPACITY, settings=settings)

    @functools.partial(jax.jit, static_argnames=("ends", "greedy_steps"))
    def decode(limit, ends=(), greedy_steps=0):
        options = {"num_tokens": 9, "pad_token_id": 5, "settings": settings}
        sampling = Sampling.greedy(repetition_penalty=1.2)
        options |= {"eos_token_ids": ends, "greedy_steps": greedy_steps}
        tokens, after = generation.decode_tokens(weights, state, sampling, limit, **options)
        # Logits and keys after an end are unspecified.
        logits = jnp.where(after.is_done[:, None], 0.0, after.logits)
        return tokens, dataclasses.replace(after, logits=logits, keys=None)

    # Each sequence ends at its fifth token or earlier; an end token follows an end.
    ends = (*decode(limit)[0][:, 4].tolist(), 5) if has_end else ()
    wanted = decode(limit, ends)
    assert bool(wanted[1].is_done.all()) == has_end
    assert wanted[1].lengths.max() == (5 if has_end else limit)
    for steps_at_once in (1, 4):
        chex.assert_trees_all_equal(decode(limit, ends, steps_at_once), wanted)


@slow
def test_a_step_behind_the_end_of_a_full_cache_stays_in_it(weights, monkeypatch):
    config = POLICIES["paper"]
    cache = init_cache(MODEL, config, batch=2, max_tokens=32)
    tokens, lengths = prompts(32, 20)
    options = {"model_config": MODEL, "policy": config}
    _, cache = prefill(weights, tokens, cache, lengths=lengths, **options)
    places = []

    class Noted(Span):
        @classmethod
        def of_tokens(cls, positions, *rest):
            places.append(np.asarray(positions))
            return Span.of_tokens(positions, *rest)

    monkeypatch.setattr(steps, "Span", Noted)
    settings = Settings(model_config=MODEL, policy=config)
    active = jnp.array([False, True])
    logits, after, _ = steps.decode_token(
        weights, jnp.array([5, 5]), cache, active=active, settings=settings
    )
    assert places[0].tolist() == [31, 20] and bool(jnp.isfinite(logits).all())
    assert after.lengths.tolist() == [32, 21]
    np.testing.assert_array_equal(after.key[:, 0], cache.key[:, 0])


def test_greedy_sequences_have_a_program_of_their_own(weights, monkeypatch):
    def found(sampling, params=weights):
        call = make_generate(MODEL, POLICIES["dense"], max_new_tokens=2).check(
            params, *prompts(40)[:1], sampling=sampling
        )
        return tuple(x.decoding["greedy_steps"] for x in (call, generation.for_stream(call)))

    assert found(None) == (1, 1)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: "ampere")
    assert found(None) == found(Sampling.greedy()) == (4, 0)
    assert found(Sampling()) == found(None, generation.NOT_LOADED) == (0, 0)


@slow
def test_ended_sequences_leave_no_trace_in_cache_or_density(weights):
    prompt, _ = prompts(50)
    options = {"policy": POLICIES["paper"], "model_config": MODEL, "max_tokens": 64}
    short = generate(weights, prompt, max_new_tokens=2, **options)
    eos = int(short.tokens[0, 1])
    stopped = generate(weights, prompt, max_new_tokens=8, eos_token_ids=(eos,), **options)
    if int(stopped.lengths[0]) != 2:
        pytest.fail("the model repeats a token: choose another prompt")
    chex.assert_trees_all_equal(stopped.cache.statistics, short.cache.statistics)
    chex.assert_trees_all_equal(stopped.measured_density, short.measured_density)


def test_a_conversation_continues_from_the_returned_cache(weights):
    options = {"model_config": MODEL, "policy": POLICIES["paper"]}
    first, lengths = prompts(*LENGTHS)
    second, more = np.pad(prompts(9, 20, 1, seed=1)[0], ((0, 0), (0, 80))), np.array([9, 20, 1])
    run = functools.partial(generate, weights, max_new_tokens=NEW, **options)
    start = run(first, lengths=lengths, max_tokens=CAPACITY)
    turn = run(second, lengths=more, cache=start.cache)
    # Repeat the history step by step: a prompt, decoded tokens, a prompt.
    cache = init_cache(MODEL, POLICIES["paper"], batch=3, max_tokens=CAPACITY)
    _, cache = prefill(weights, first, cache, lengths=lengths, **options)
    for token in np.asarray(start.tokens).T:
        _, cache = decode_step(weights, token, cache, **options)
    logits, cache = prefill(weights, second, cache, lengths=more, **options)
    chex.assert_trees_all_equal(turn.tokens[:, 0], jnp.argmax(logits, axis=-1).astype(jnp.int32))
    chex.assert_trees_all_equal(turn.cache.lengths, cache.lengths + NEW)


def test_padding_on_the_left_and_buckets_do_not_change_the_result(weights):
    tokens, lengths = prompts(*LENGTHS)
    rows = zip(tokens, lengths, strict=True)
    left = np.stack([np.roll(row, max(LENGTHS) - length) for row, length in rows])
    mask = np.arange(max(LENGTHS))[None] >= max(LENGTHS) - lengths[:, None]
    run = make_generate(MODEL, POLICIES["paper"], max_new_tokens=NEW, max_tokens=CAPACITY)
    exact = generate(weights, tokens, lengths=lengths, policy=POLICIES["paper"], **OPTIONS).tokens
    for found in (
        run(weights, left, attention_mask=mask.astype(np.int32)),
        run(weights, tokens, lengths=lengths),
    ):
        chex.assert_trees_all_equal(found.tokens, exact)


@pytest.mark.parametrize("name", ["dense", pytest.param("paper", marks=slow)])
def test_a_prompt_may_fill_the_context_to_the_last_token(weights, name):
    prompt, _ = prompts(MODEL.max_position_embeddings - 2)
    run = make_generate(MODEL, POLICIES[name], max_new_tokens=2)
    assert run(weights, prompt).tokens.shape == (1, 2)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_gives_what_generate_gives(weights, sampling):
    tokens, lengths = prompts(*LENGTHS)
    options = {"policy": POLICIES["paper"], "lengths": lengths, "sampling": sampling, **OPTIONS}
    whole = generate(weights, tokens, **options)
    run = stream(weights, tokens, every=2, **options)
    chunks = list(run)
    assert [chunk.tokens.shape[1] for chunk in chunks] == [0, 1, 2, 2, 1]
    streamed = np.concatenate([chunk.tokens for chunk in chunks], axis=1)
    np.testing.assert_array_equal(streamed, whole.tokens)
    chex.assert_trees_all_equal(run.cache.lengths, whole.cache.lengths)
    chex.assert_trees_all_close(chunks[-1].measured_density, whole.measured_density)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "paper"])
def test_generate_runs_under_the_callers_jit(weights, name):
    tokens, lengths = prompts(*LENGTHS)
    options = OPTIONS | {"policy": POLICIES[name], "lengths": jnp.asarray(lengths)}
    inside = jax.jit(lambda params, tokens: generate(params, tokens, **options).tokens)
    outside = generate(weights, tokens, **options).tokens
    chex.assert_trees_all_equal(inside(weights, tokens), outside)


def test_forward_gives_the_logits_that_prefill_gives(weights):
    tokens, lengths = prompts(*LENGTHS)
    config = POLICIES["paper"]
    cache = init_cache(MODEL, config, batch=3, max_tokens=CAPACITY)
    logits, _ = prefill(weights, tokens, cache, model_config=MODEL, policy=config, lengths=lengths)
    everywhere = forward(weights, tokens, model_config=MODEL, policy=config, lengths=lengths)
    last = everywhere[np.arange(3), lengths - 1]
    np.testing.assert_allclose(last, logits, **tolerance("logits"))


@pytest.mark.slow
def test_density_counts_dense_layers_and_both_phases(weights):
    prompt, lengths = prompts(LENGTHS[0])
    run = functools.partial(generate, weights, prompt, policy=POLICIES["paper"], lengths=lengths)
    both, prefill = (run(phase=phase, **OPTIONS).measured_density for phase in ("both", "prefill"))
    for density in (both.prefill, both.decode):
        assert float(density[0]) == 1.0 and (np.asarray(density[1:]) < 0.6).all()
    assert (np.asarray(prefill.decode) == 1.0).all()
    chex.assert_trees_all_equal(prefill.prefill, both.prefill)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_stays_near_float32_and_finite(weights, dtype):
    prompt, _ = prompts(100)
    half = jax.tree.map(lambda x: x.astype(dtype), weights)
    expected, found = (forward(x, prompt, model_config=MODEL) for x in (weights, half))
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 0.05
    sparse = forward(half, prompt, model_config=MODEL, policy=POLICIES["damped"])
    assert sparse.dtype == jnp.float32 and np.isfinite(sparse).all()


@pytest.mark.parametrize(
    "setting", [("jax_random_seed_offset", 5), ("jax_default_prng_impl", "rbg")]
)
def test_the_default_key_is_that_of_seed_0(setting):
    name, value = setting
    usual = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        expected, found = jax.random.key(0), generation._default_key()
    finally:
        jax.config.update(name, usual)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (found, expected)))
