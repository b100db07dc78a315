"""The policy without a model: ragged batches, chunks and decode against the reference."""

import functools

import cases
import hypothesis.strategies as st
import jax
import numpy as np
import oracle
import policy_runs
import pytest
import reference
from hypothesis import assume, given, settings
from scipy.linalg import hadamard
from variants import slow_unless

from sketchwalk_jax import SketchWalkConfig

SIZE, CAPACITY, NUM_LAYERS = 16, 320, 4
OPTIONS = {"block_size": SIZE, "dense_layers": 0, "sketch_dim": 16, "density": 0.3}
PRESETS = {
    "paper": SketchWalkConfig.paper(**OPTIONS),
    "damped": SketchWalkConfig.damped(**OPTIONS),
    "one_hop": SketchWalkConfig.one_hop(**OPTIONS),
    "sinks": SketchWalkConfig.paper(sink_blocks=2, local_blocks=3, **OPTIONS),
    "relu": SketchWalkConfig.paper(transition="relu_power", **OPTIONS),
}
LENGTHS = st.tuples(*[st.integers(1, CAPACITY)] * 3)


KEPT = ("paper",)


@functools.cache
def sequences():
    # Scores stay in the range where float32's softmax distinguishes blocks.
    shape = {"num_tokens": CAPACITY, "block_size": SIZE, "heads": (6, 2), "spread": 0.7}
    return [cases.draw_layers(seed, num_layers=NUM_LAYERS, **shape) for seed in range(3)]


def reference_rows(layers, config, *, is_decode=False):
    """Returns the reference's rows of each layer, or None where rounding could change them."""
    rows, scores, state = [], [], None
    for arrays in zip(layers.queries, layers.keys, strict=True):
        ids, state, layer_scores = reference.select(*arrays, state, config, is_token=is_decode)
        rows.append(ids[0] if is_decode else ids)
        scores.append(layer_scores)
    counts = reference.budget(config, len(state))
    checked = [len(state) - 1] if is_decode else None
    if oracle.has_near_ties(scores, config, counts, rows=checked, noise=2e-5):
        return None
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=5)
@given(lengths=LENGTHS, chunk=st.sampled_from([16, 80, 160]))
def test_whole_prompts_and_chunks_select_as_the_reference(name, lengths, chunk):
    config = PRESETS[name]
    drawn = [x.first(n) for x, n in zip(sequences(), lengths, strict=True)]
    wanted = [reference_rows(layers, config) for layers in drawn]
    assume(None not in wanted)
    query, key = policy_runs.stack_sequences(drawn, CAPACITY)
    rows, statistics = policy_runs.prefill_rows(config, query, key, lengths)
    assert rows == [list(layer) for layer in zip(*wanted, strict=True)]
    in_chunks, sums = policy_runs.prefill_rows(config, query, key, lengths, chunk=chunk)
    assert in_chunks == rows
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4), statistics, sums
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=2)
@given(lengths=st.tuples(*[st.integers(1, CAPACITY - 18)] * 3))
def test_decode_selects_as_the_reference(name, lengths):
    config = PRESETS[name]
    drawn = sequences()
    prompts = [x.first(n) for x, n in zip(drawn, lengths, strict=True)]
    query, key = policy_runs.stack_sequences(prompts, CAPACITY)
    _, statistics = policy_runs.prefill_rows(config, query, key, lengths)
    query, key = policy_runs.stack_sequences(drawn, CAPACITY)
    compared = 0
    for step in range(18):  # crosses a block boundary
        positions = np.array(lengths) + step
        new = policy_runs.tokens_at(positions, query, key)
        rows, statistics = policy_runs.decode_rows(config, *new, statistics, positions, key)
        for row, position in enumerate(positions.tolist()):
            so_far = drawn[row].first(position + 1)
            wanted = reference_rows(so_far, config, is_decode=True)
            assert wanted in (None, [layer[row] for layer in rows])
            compared += wanted is not None
    assert compared > 40
    # Decode accumulates the same sums as prefill of the same tokens.
    longer = [x.first(n + 18) for x, n in zip(drawn, lengths, strict=True)]
    query, key = policy_runs.stack_sequences(longer, CAPACITY)
    _, sums = policy_runs.prefill_rows(config, query, key, np.array(lengths) + 18)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4), statistics, sums
    )


def selected(config, layers, query=lambda x: x, key=lambda x: x):
    """Returns the rows of one sequence, whose queries and keys may be changed."""
    queries, keys = policy_runs.stack_sequences([layers], CAPACITY)
    lengths = [len(layers.queries[0])]
    return policy_runs.prefill_rows(config, query(queries), key(keys), lengths)[0]


def by_reference(config, layers):
    return [[x.rows] for x in reference.run_layers(*vars(layers).values(), config)]


@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, PRESETS))
def test_selection_equals_the_reference_in_any_order_of_heads(name):
    config = PRESETS[name]
    layers = cases.separated_layers(config, num_tokens=311, num_layers=5, heads=(6, 2))
    wanted = by_reference(config, layers)
    assert selected(config, layers) == wanted
    order = np.array([4, 3, 5, 1, 0, 2])  # groups stay together
    permuted = {"query": lambda x: x[..., order, :], "key": lambda x: x[..., ::-1, :]}
    assert selected(config, layers, **permuted) == wanted
    assert selected(config, layers, key=lambda x: np.repeat(x, 3, axis=3)) == wanted


def test_selection_ignores_a_transform_of_full_size():
    full, plain = (SketchWalkConfig.paper(**OPTIONS | {"sketch_dim": size}) for size in (128, None))
    layers = cases.separated_layers(plain, num_tokens=311, num_layers=4, head_dim=128)
    omega = (hadamard(128) / np.sqrt(128)).astype(np.float32)
    rotated = selected(plain, layers, lambda x: x @ omega, lambda x: x @ omega)
    assert selected(plain, layers) == rotated == selected(full, layers)


@pytest.mark.parametrize("name", ["paper", "relu"])
def test_selection_is_bit_equal_under_powers_of_two(name):
    config = PRESETS[name]
    layers = cases.draw_layers(9, num_layers=5, num_tokens=CAPACITY)  # near-ties do not matter
    plain = selected(config, layers)
    for factor in (2.0**-30, 0.25, 2.0**24):
        assert selected(config, layers, lambda x, f=factor: x * np.float32(f)) == plain


def test_scores_without_a_positive_entry_select_the_largest():
    config = PRESETS["relu"]
    layers = cases.draw_layers(1, num_layers=3, num_tokens=160)
    for query, key in zip(layers.queries, layers.keys, strict=True):
        query[...] = np.abs(query)
        key[...] = -np.abs(key)
    expected = reference.run_layers(*vars(layers).values(), config)
    assert all(np.isneginf(layer.walk).all() for layer in expected)
    assert selected(config, layers) == by_reference(config, layers)
