"""Budgets, ties, forced blocks and densities of selection."""

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
from tolerances import tolerance

from sketchwalk_jax import algorithm
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.selection import BlockSelection, block_budget, full_selection, select_blocks

NUM_BLOCKS = 12


@pytest.mark.parametrize(
    ("density", "row", "count"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.28, 25, 7), (0.7, 10, 7), (0.07, 100, 7), (0.29, 100, 29)],
)
def test_budget_is_exact_in_the_decimal_that_was_written(density, row, count):
    assert block_budget(row, density=density, sink_blocks=1)[row - 1] == count


@given(st.floats(1e-6, 1.0), st.integers(0, 4), st.integers(1, 4), st.integers(1, 300))
def test_budget_equals_its_definition(density, sink_blocks, local_blocks, num_blocks):
    config = SketchWalkConfig.paper(
        density=density, sink_blocks=sink_blocks, local_blocks=local_blocks
    )
    counts, share = config.budget(num_blocks), Fraction(repr(density))
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, reference.budget(config, num_blocks))
    for row in (0, num_blocks // 2, num_blocks - 1):
        wanted = max(sink_blocks + local_blocks, math.ceil(share * (row + 1)))
        assert counts[row] == min(row + 1, wanted)


@pytest.mark.parametrize("top_blocks", [1, 2, 5, 100])
def test_top_blocks_is_a_fixed_number(top_blocks):
    counts = block_budget(20, top_blocks=top_blocks, sink_blocks=1)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(1, 21), max(2, top_blocks)))


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


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("scores", "row", "count", "local", "wanted"),
    [
        # Zeros of either sign are ties.
        ([-1.0, -1.0, -0.0, 0.0, -0.0, -1.0], 5, 2, 1, [2, 5]),
        # Blocks that are always kept win over the largest score.
        ([LARGEST, LARGEST, 1.0, -LARGEST, LARGEST, 0.0], 4, 3, 2, [0, 3, 4]),
    ],
)
def test_zeros_are_ties_and_forced_blocks_win(scores, row, count, local, wanted):
    selection = SELECT(
        np.array([[scores]], np.float32),
        np.array([[row]], np.int32),
        np.array([[count]], np.int32),
        sink_blocks=0,
        local_blocks=local,
        max_count=3,
        block_size=64,
    )
    assert selection.ids[0, 0, 0, :count].tolist() == wanted


def test_full_selection_lists_every_causal_block():
    selection = full_selection(jnp.arange(4, dtype=jnp.int32)[None], 5)
    assert policy_runs.as_rows(selection.ids[None], selection.counts[None])[0][0] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


attended_pairs = jax.jit(BlockSelection.attended_pairs)


@pytest.mark.parametrize(("size", "row_size"), [(16, None), (8, 16)])
@given(length=st.integers(1, 160), offset=st.integers(0, 159), seed=st.integers(0, 99))
def test_attended_pairs_equal_a_count_of_pairs(size, row_size, length, offset, seed):
    """Rows of 16 queries list blocks of 16 keys, or pages of 8, also inside the row itself."""
    offset, rng, pages = min(offset, length - 1), np.random.default_rng(seed), 16 // size
    mask = rng.random((1, 3, 10, 10 * pages)) < 0.5
    mask &= np.arange(10 * pages) < pages * np.arange(1, 11)[:, None]
    ids, counts = cases.pack_lists(mask, padding=10 * pages)
    # Pad lists to one width, so that all share a program.
    room = ((0, 0),) * 3 + ((0, 10 * pages - ids.shape[-1]),)
    ids = np.pad(ids, room, constant_values=10 * pages)
    first = np.maximum(np.arange(10) * 16, offset)
    num = np.clip(np.minimum(np.arange(1, 11) * 16, length) - first, 0, 16)
    pairs = attended_pairs(
        BlockSelection(jnp.asarray(ids), jnp.asarray(counts), size, row_size=row_size),
        np.asarray(first, np.int32)[None],
        np.asarray(num, np.int32)[None],
    )
    seen = np.tril(mask.repeat(16, 2).repeat(size, 3))[0, :, offset:length]
    np.testing.assert_allclose(pairs[0], seen.sum((1, 2)).mean(), **tolerance("density"))
