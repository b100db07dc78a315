"""Prefill, chunks and decode of a small model against the reference, layer by layer."""

import dataclasses
import functools

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from reference_model import ReferenceModel, has_near_ties
from tolerances import tolerance

from sketchwalk_jax import Dense, SketchWalkConfig, decode_step, forward, init_cache, prefill
from sketchwalk_jax.attention.api import prepare_lists
from sketchwalk_jax.inference import cached_layer
from sketchwalk_jax.models import ModelConfig
from sketchwalk_jax.models.params import init_params

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=61,
    num_layers=4,
    hidden_size=48,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
SIZE, CAPACITY, LENGTHS = 16, 144, (110, 46, 62)
NUM_NEW = 4  # crosses a block boundary from every length
SPARSE = {"block_size": SIZE, "dense_layers": 1, "sketch_dim": 16, "density": 0.3}
PRESETS = {
    "paper": SketchWalkConfig.paper(**SPARSE),
    "damped": SketchWalkConfig.damped(**SPARSE),
    "set": SketchWalkConfig.paper(**SPARSE | {"dense_layers": (0, 2)}),
}
# No reference runs a whole model with it.
RECOMMENDED = SketchWalkConfig.recommended(
    block_size=SIZE, dense_layers=(1,), density=0.5, min_tokens=32, local_tokens=0
)
draw_parameters = jax.jit(init_params, static_argnums=1)


@functools.cache
def parameters():
    return draw_parameters(jax.random.key(0), MODEL)


def draw_tokens(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, num_tokens, dtype=np.int32)


@functools.cache
def reference_run(name: str, length: int, num_new: int = 0, phase: str = "both"):
    """Returns tokens without near-ties, and the reference's results for them."""

    def draw(seed):
        tokens = draw_tokens(1000 * length + seed, length + num_new)
        model = ReferenceModel(parameters(), MODEL, PRESETS[name], phase)
        calls = [model.prefill(tokens[:length])]
        calls += [model.decode(token) for token in tokens[length:]]
        return tokens, model, calls

    def is_usable(drawn):
        return not any(has_near_ties(layers, PRESETS[name]) for _, layers in drawn[2])

    return cases.first_usable(draw, is_usable)


def batch(sequences, width: int, filler: int = 0):
    tokens = np.full((len(sequences), width), filler, np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return tokens


def run_prefill(config, tokens, lengths, cache=None, **options):
    if cache is None:
        cache = init_cache(MODEL, config, batch=len(tokens), max_tokens=CAPACITY, dtype="float32")
    tokens, lengths = (jnp.asarray(x, jnp.int32) for x in (tokens, lengths))
    options |= {"model_config": MODEL, "policy": config, "return_selection": True}
    return prefill(parameters(), tokens, cache, lengths=lengths, return_all_logits=True, **options)


def run_decode(config, tokens, cache, **options):
    options |= {"model_config": MODEL, "policy": config, "return_selection": True}
    return decode_step(parameters(), jnp.asarray(tokens, jnp.int32), cache, **options)


def rows_of(selection, sequence: int, first: int, last: int):
    """Returns block ids by sparse layer for rows `first .. last - 1` of one sequence."""
    ids, counts = (np.asarray(x)[:, sequence, 0] for x in (selection.ids, selection.counts))
    return [
        [layer[row][: number[row]].tolist() for row in range(first, last)]
        for layer, number in zip(ids, counts, strict=True)
    ]


def expected_rows(layers, first: int = 0):
    return [layer.rows[first:] for layer in layers if layer.rows is not None]


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        ("paper", 16),
        pytest.param("damped", 48, marks=pytest.mark.slow),
        pytest.param("set", 48, marks=pytest.mark.slow),
    ],
)
def test_prefill_whole_and_in_chunks_and_decode_equal_the_reference(name, chunk_size):
    config, num_new = PRESETS[name], NUM_NEW
    runs = [reference_run(name, length, num_new) for length in LENGTHS]
    tokens = batch([run[0][:length] for run, length in zip(runs, LENGTHS, strict=True)], 120)
    for size in (chunk_size, None):
        logits, cache, selection = run_prefill(config, tokens, LENGTHS, chunk_size=size)
        for row, ((_, _, calls), length) in enumerate(zip(runs, LENGTHS, strict=True)):
            wanted, layers = calls[0]
            assert rows_of(selection, row, 0, -(-length // SIZE)) == expected_rows(layers)
            np.testing.assert_allclose(logits[row, :length], wanted, **tolerance("logits"))
    for step in range(num_new):
        new = [run[0][length + step] for run, length in zip(runs, LENGTHS, strict=True)]
        logits, cache, selection = run_decode(config, new, cache)
        for row, (_, _, calls) in enumerate(runs):
            wanted, layers = calls[1 + step]
            assert rows_of(selection, row, 0, 1) == expected_rows(layers)
            np.testing.assert_allclose(logits[row], wanted, **tolerance("logits"))
    # The measured density counts pairs.
    causal = np.array([(n + num_new) * (n + num_new + 1) / 2 for n in LENGTHS])
    pairs = np.array([run[1].densities() for run in runs]).T * causal
    counted = cache.density.prefill_pairs + cache.density.decode_pairs
    np.testing.assert_allclose(counted, pairs, **tolerance("density"))
    np.testing.assert_allclose(
        cache.density.overall, pairs.sum() / causal.sum() / 4, **tolerance("density")
    )


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_other_phase_is_dense(phase):
    config, length, num_new = PRESETS["paper"], 65, 3
    tokens, model, calls = reference_run("paper", length, num_new, phase)
    logits, cache, selection = run_prefill(config, tokens[None, :length], [length], phase=phase)
    assert (selection is None) == (phase == "decode")
    np.testing.assert_allclose(logits[0], calls[0][0], **tolerance("logits"))
    for step in range(num_new):
        token = tokens[length + step : length + step + 1]
        logits, cache, selection = run_decode(config, token, cache, phase=phase)
        assert (selection is None) == (phase == "prefill")
        np.testing.assert_allclose(logits[0], calls[1 + step][0], **tolerance("logits"))
    pairs = cache.density.prefill_pairs + cache.density.decode_pairs
    total = (length + num_new) * (length + num_new + 1) / 2
    np.testing.assert_allclose(pairs[:, 0] / total, model.densities(), **tolerance("density"))


@settings(max_examples=6)
@given(cut=st.integers(1, 109))
def test_a_prompt_may_be_continued_anywhere(cut):
    """The query mean of the block at the cut includes its tokens in both pieces."""
    config = PRESETS["paper"]

    def draw(seed):
        tokens = draw_tokens(seed, 110)
        model = ReferenceModel(parameters(), MODEL, config)
        return tokens, [model.prefill(tokens[:cut]), model.prefill(tokens[cut:])]

    tokens, calls = cases.first_usable(
        draw, lambda drawn: not any(has_near_ties(layers, config) for _, layers in drawn[1])
    )
    _, cache, _ = run_prefill(config, batch([tokens[:cut]], 112), [cut])
    logits, _, selection = run_prefill(config, batch([tokens[cut:]], 112), [110 - cut], cache)
    wanted, layers = calls[1]
    first = cut // SIZE
    assert rows_of(selection, 0, 0, 7 - first) == expected_rows(layers, first)
    np.testing.assert_allclose(logits[0, : 110 - cut], wanted, **tolerance("logits"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "damped", "set", "recommended"])
@pytest.mark.parametrize("start", [16, 64])
def test_nothing_before_a_block_boundary_sees_what_follows(name, start):
    config = PRESETS.get(name, RECOMMENDED)
    tokens = batch([draw_tokens(seed, n) for seed, n in enumerate(LENGTHS)], 120)
    plain, _, selection = run_prefill(config, tokens, LENGTHS)
    changed = np.array(tokens)
    changed[0, start:] = (changed[0, start:] + 7) % MODEL.vocab_size
    changed[1] = draw_tokens(99, 120)  # another sequence, and all padding
    changed[2, LENGTHS[2] :] = 5
    lengths = (LENGTHS[0] - 11, 120, LENGTHS[2])
    other, _, reselection = run_prefill(config, changed, lengths)
    for row, end in ((0, start), (2, LENGTHS[2])):
        rows = -(-end // SIZE)
        assert rows_of(reselection, row, 0, rows) == rows_of(selection, row, 0, rows)
        np.testing.assert_array_equal(other[row, :end], plain[row, :end])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "recommended"])
@pytest.mark.parametrize("dense_layers", [1, (0, 2)])
def test_full_density_equals_dense_in_both_phases(name, dense_layers):
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "num_layers": 3}
    model = dataclasses.replace(MODEL, **sizes)
    config = getattr(SketchWalkConfig, name)(density=1.0, dense_layers=dense_layers)
    lengths = jnp.array([1, 63, 64, 65, 129], jnp.int32)
    tokens = jnp.stack([draw_tokens(seed, 140) for seed in range(5)])
    params = draw_parameters(jax.random.key(1), model)
    wanted = forward(params, tokens, model_config=model, policy=Dense())
    cache = init_cache(model, config, batch=5, max_tokens=140)
    options = {"model_config": model, "policy": config}
    logits, cache = prefill(params, tokens, cache, lengths=lengths, **options)
    np.testing.assert_allclose(logits, wanted[jnp.arange(5), lengths - 1], **tolerance("logits"))
    for step in range(3):
        place = jnp.arange(5), lengths + step
        logits, cache = decode_step(params, tokens[place], cache, **options)
        np.testing.assert_allclose(logits, wanted[place], **tolerance("logits"))
    np.testing.assert_allclose(cache.density.overall, 1.0, **tolerance("density"))


def test_rows_of_padding_attend_to_nothing(monkeypatch):
    """Their lists would change no result, only take time."""
    seen = []

    def prepare(query, keys, values, lists, *rest, **options):
        jax.debug.callback(lambda counts: seen.append(np.asarray(counts)), lists.counts)
        return prepare_lists(query, keys, values, lists, *rest, **options)

    monkeypatch.setattr(cached_layer, "prepare_lists", prepare)
    policy = SketchWalkConfig.paper(**SPARSE | {"density": 0.31})  # compiled here only
    cache = init_cache(MODEL, policy, batch=2, max_tokens=64)
    tokens = np.stack([draw_tokens(seed, 64) for seed in (1, 2)])
    lengths = np.array([62, 17])
    options = {"model_config": MODEL, "policy": policy}
    jax.block_until_ready(prefill(parameters(), tokens, cache, lengths=lengths, **options))
    jax.effects_barrier()
    assert len(seen) == MODEL.num_layers - 1
    for counts in seen:
        for row, number in ((0, 4), (1, 2)):
            assert np.all(counts[row, :, :number] > 0) and not np.any(counts[row, :, number:])
