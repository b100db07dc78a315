"""Budgets, ties, forced blocks, densities, and invariances of selection."""

import math
from fractions import Fraction

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import policy_runs
import pytest
import reference
from hypothesis import given
from scipy.linalg import hadamard
from tolerances import tolerance

from sketchwalk_jax import algorithm
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.selection import BlockSelection, block_budget, full_selection, select_blocks

NUM_BLOCKS = 12
PRESETS = {
    "paper": SketchWalkConfig.paper(block_size=16, dense_layers=0),
    "damped": SketchWalkConfig.damped(block_size=16, dense_layers=0),
    "one_hop": SketchWalkConfig.one_hop(block_size=16, dense_layers=0),
    "relu": SketchWalkConfig.paper(block_size=16, dense_layers=0, transition="relu_power"),
}


def budget_of(config, num_blocks):
    return block_budget(
        num_blocks,
        density=config.density,
        sink_blocks=config.sink_blocks,
        local_blocks=config.local_blocks,
    )


@pytest.mark.parametrize(
    ("density", "row", "count"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.28, 25, 7), (0.7, 10, 7), (0.07, 100, 7), (0.29, 100, 29)],
)
def test_budget_is_exact_in_the_decimal_that_was_written(density, row, count):
    assert block_budget(row, density=density, sink_blocks=1)[row - 1] == count


@given(st.floats(1e-6, 1.0), st.integers(0, 4), st.integers(1, 4))
def test_budget_equals_its_definition(density, sink_blocks, local_blocks):
    config = SketchWalkConfig.paper(
        density=density, sink_blocks=sink_blocks, local_blocks=local_blocks
    )
    counts = budget_of(config, 300)
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, reference.budget(config, 300))
    share = Fraction(repr(density))
    for row in (0, 1, 63, 299):
        wanted = max(sink_blocks + local_blocks, math.ceil(share * (row + 1)))
        assert counts[row] == min(row + 1, wanted)


@pytest.mark.parametrize("top_blocks", [1, 2, 5, 100])
def test_top_blocks_is_a_fixed_number(top_blocks):
    counts = block_budget(20, top_blocks=top_blocks, sink_blocks=1)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(1, 21), max(2, top_blocks)))


def test_budget_of_a_row_does_not_depend_on_the_prompt():
    config = SketchWalkConfig.paper(density=0.37)
    np.testing.assert_array_equal(budget_of(config, 50), budget_of(config, 2048)[:50])


SELECT = jax.jit(
    select_blocks,
    static_argnames=("sink_blocks", "local_blocks", "max_count", "block_size"),
)


@given(data=st.data(), forced=st.sampled_from([(0, 1), (1, 1), (2, 3)]))
def test_selection_with_ties_equals_the_specification(data, forced):
    values = st.sampled_from([-1.0, -0.0, 0.0, 2e-38, 1.0, 2.0, 3e38])
    row = st.lists(values, min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)
    scores = np.array(data.draw(st.lists(row, min_size=3, max_size=3)), np.float32)
    rows = np.array(data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=3, max_size=3)))
    counts = [data.draw(st.integers(min(row + 1, sum(forced)), row + 1)) for row in rows.tolist()]
    selection = SELECT(
        scores[None],
        rows[None].astype(np.int32),
        np.array([counts], np.int32),
        sink_blocks=forced[0],
        local_blocks=forced[1],
        max_count=NUM_BLOCKS,
        block_size=64,
    )
    assert selection.ids.dtype == selection.counts.dtype == jnp.int32
    np.testing.assert_array_equal(selection.counts[0, 0], counts)
    kept = algorithm.select_pages(jnp.asarray(scores), rows, np.array(counts), *forced)
    for place, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True)):
        ids = selection.ids[0, 0, place].tolist()
        expected = np.flatnonzero(kept[place]).tolist()
        assert ids[:count] == expected
        assert ids[count:] == [NUM_BLOCKS] * (NUM_BLOCKS - count)
        assert expected[-1] == row


def test_zeros_of_either_sign_are_ties():
    scores = np.array([[[-1.0, -1.0, -0.0, 0.0, -0.0, -1.0]]], np.float32)
    selection = SELECT(
        scores,
        np.array([[5]], np.int32),
        np.array([[2]], np.int32),
        sink_blocks=0,
        local_blocks=1,
        max_count=3,
        block_size=64,
    )
    assert selection.ids[0, 0, 0, :2].tolist() == [2, 5]


def test_blocks_that_are_always_kept_win_over_the_largest_score():
    largest = np.finfo(np.float32).max
    selection = SELECT(
        np.array([[[largest, largest, 1.0, -largest, largest, 0.0]]], np.float32),
        np.array([[4]], np.int32),
        np.array([[3]], np.int32),
        sink_blocks=0,
        local_blocks=2,
        max_count=3,
        block_size=64,
    )
    assert selection.ids[0, 0, 0].tolist() == [0, 3, 4]


def test_full_selection_lists_every_causal_block():
    selection = full_selection(jnp.arange(4, dtype=jnp.int32)[None], 5)
    assert policy_runs.as_rows(selection.ids[None], selection.counts[None])[0][0] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


attended_pairs = jax.jit(BlockSelection.attended_pairs)


@given(length=st.integers(1, 160), offset=st.integers(0, 159), seed=st.integers(0, 99))
def test_attended_pairs_equal_a_count_of_pairs(length, offset, seed):
    offset = min(offset, length - 1)
    mask = cases.draw_lists(np.random.default_rng(seed), 1, 3, 10)
    ids, counts = cases.pack_lists(mask, padding=10)
    first = np.maximum(np.arange(10) * 16, offset)
    num = np.clip(np.minimum(np.arange(1, 11) * 16, length) - first, 0, 16)
    # Pad lists to one width, so that all share a program.
    ids = np.pad(ids, ((0, 0),) * 3 + ((0, 10 - ids.shape[-1]),), constant_values=10)
    pairs = attended_pairs(
        BlockSelection(jnp.asarray(ids), jnp.asarray(counts), 16),
        np.asarray(first, np.int32)[None],
        np.asarray(num, np.int32)[None],
    )
    expected = [
        reference.token_mask([np.flatnonzero(row).tolist() for row in head], 160, 16)[
            offset:length
        ].sum()
        for head in mask[0]
    ]
    np.testing.assert_allclose(pairs[0], np.mean(expected), **tolerance("density"))


@given(length=st.integers(1, 160), offset=st.integers(0, 159), seed=st.integers(0, 99))
def test_attended_pairs_of_pages_equal_a_count_of_pairs(length, offset, seed):
    """Rows of 16 queries list pages of 8 keys, also pages inside the row itself."""
    offset, rng = min(offset, length - 1), np.random.default_rng(seed)
    row = np.arange(10)[:, None]
    mask = (rng.random((1, 3, 10, 20)) < 0.5) & (np.arange(20) < 2 * row + 2)
    ids, counts = cases.pack_lists(mask, padding=20)
    ids = np.pad(ids, ((0, 0),) * 3 + ((0, 20 - ids.shape[-1]),), constant_values=20)
    first = np.maximum(np.arange(10) * 16, offset)
    num = np.clip(np.minimum(np.arange(1, 11) * 16, length) - first, 0, 16)
    pairs = attended_pairs(
        BlockSelection(jnp.asarray(ids), jnp.asarray(counts), 8, row_size=16),
        np.asarray(first, np.int32)[None],
        np.asarray(num, np.int32)[None],
    )
    seen = np.tril(mask.repeat(16, 2).repeat(8, 3))[0, :, offset:length]
    np.testing.assert_allclose(pairs[0], seen.sum((1, 2)).mean(), **tolerance("density"))


@pytest.mark.parametrize("density", [0.03, 0.2, 0.55, 1.0])
def test_measured_density_is_within_one_block_per_row_of_nominal(density):
    config = SketchWalkConfig.one_hop(block_size=16, dense_layers=0, density=density)
    layers = cases.draw_layers(0, num_layers=2, num_tokens=1600)
    query, key = policy_runs.stack_sequences([layers, layers], 1600)
    lengths = (1600, 1333)
    rows, _ = policy_runs.prefill_rows(config, query, key, lengths)
    for length, sequence in zip(lengths, rows[-1], strict=True):
        mask = reference.token_mask(sequence, length, 16)
        firsts = np.arange(0, length, 16)
        pairs = np.add.reduceat(mask.sum(1), firsts)
        nominal = density * np.add.reduceat(np.arange(1, length + 1), firsts)
        assert abs(pairs.sum() - nominal.sum()) <= len(sequence) * 16 * 16
        # Row by row, wherever the density exceeds the forced blocks.
        beyond_forced = density * np.arange(1, len(sequence) + 1) > 2
        assert beyond_forced.any() and (np.abs(pairs - nominal) <= 16 * 16)[beyond_forced].all()


def selected(config, layers, **changes):
    query, key = policy_runs.stack_sequences([layers], 320)
    for name, change in changes.items():
        query, key = (change(query), key) if name == "query" else (query, change(key))
    return policy_runs.prefill_rows(config, query, key, [len(layers.queries[0])])[0]


@pytest.mark.parametrize("name", PRESETS)
def test_selection_equals_the_reference(name):
    config = PRESETS[name]
    layers = cases.separated_layers(config, num_tokens=311, num_layers=5, heads=(6, 2))
    expected = reference.run_layers(layers.queries, layers.keys, layers.values, config)
    assert selected(config, layers) == [[layer.rows] for layer in expected]


@pytest.mark.parametrize("name", PRESETS)
def test_selection_ignores_the_order_of_the_heads(name):
    config = PRESETS[name]
    layers = cases.separated_layers(config, num_tokens=311, num_layers=5, heads=(6, 2))
    order = np.array([4, 3, 5, 1, 0, 2])  # groups stay together
    permuted = selected(
        config, layers, query=lambda x: x[..., order, :], key=lambda x: x[..., ::-1, :]
    )
    assert permuted == selected(config, layers)


@pytest.mark.parametrize("name", PRESETS)
def test_selection_ignores_repeated_key_heads(name):
    config = PRESETS[name]
    layers = cases.separated_layers(config, num_tokens=311, num_layers=5, heads=(6, 2))
    repeated = selected(config, layers, key=lambda x: np.repeat(x, 3, axis=3))
    assert repeated == selected(config, layers)


def test_selection_ignores_a_transform_of_full_size():
    plain = SketchWalkConfig.paper(block_size=16, dense_layers=0, sketch_dim=None)
    layers = cases.separated_layers(plain, num_tokens=311, num_layers=4, head_dim=128)
    omega = (hadamard(128) / math.sqrt(128)).astype(np.float32)
    rotated = selected(plain, layers, query=lambda x: x @ omega, key=lambda x: x @ omega)
    full = SketchWalkConfig.paper(block_size=16, dense_layers=0, sketch_dim=128)
    assert selected(plain, layers) == rotated == selected(full, layers)


@pytest.mark.parametrize("name", ["paper", "relu"])
def test_selection_is_bit_equal_under_powers_of_two(name):
    config = PRESETS[name]
    layers = cases.draw_layers(9, num_layers=5, num_tokens=320)  # near-ties do not matter
    plain = selected(config, layers)
    for factor in (2.0**-30, 0.25, 2.0**24):
        assert selected(config, layers, query=lambda x, f=factor: x * np.float32(f)) == plain


def test_scores_without_a_positive_entry_select_the_largest():
    config = PRESETS["relu"]
    layers = cases.draw_layers(1, num_layers=3, num_tokens=160)
    for query, key in zip(layers.queries, layers.keys, strict=True):
        query[...] = np.abs(query)
        key[...] = -np.abs(key)
    expected = reference.run_layers(layers.queries, layers.keys, layers.values, config)
    assert all(np.isneginf(layer.walk).all() for layer in expected)
    assert selected(config, layers) == [[layer.rows] for layer in expected]
