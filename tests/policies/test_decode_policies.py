"""Quest and Adamas: their lists against sets, and properties of all policies for decode."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import policy_runs
import pytest
import reference
import slow_decode
import tiny
from tolerances import tolerance

from sketchwalk_jax import (
    BlockSelection,
    block_sparse_decode,
    init_cache,
)
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import LayerShape, Span

NAMES = ("quest", "adamas")
# Both use one block size, and so the same spans; Adamas needs it only for prompts.
SIZE, CAPACITY, HEADS, HEAD_DIM, NUM_LAYERS = 16, 96, (6, 2), 16, 2
OPTIONS = {"block_size": SIZE, "dense_layers": 0}
BUDGETS = {
    "share": {"density": 0.4, "force_current": False},
    "least": {"density": 0.01, "force_current": False},
    "tokens": {"token_budget": 70, "force_current": False},
    "current": {"density": 0.3, "force_current": True},
    "defaults": {},
}
LENGTHS = (1, 47, 64)
NEW = 18  # more than a page


def make(name, **options):
    return by_name(name, **OPTIONS, **options)


@functools.cache
def draw(seed: int):
    """Draws queries and keys `[L, B, S, heads, H]`: small integers, with exact transforms."""
    rng = np.random.default_rng(seed)
    shape = (NUM_LAYERS, len(LENGTHS), CAPACITY)
    return tuple(
        rng.integers(-9, 10, (*shape, heads, HEAD_DIM)).astype(np.float32) for heads in HEADS
    )


def read(config, key, lengths, **options):
    """Returns every layer's statistics after prompts of these lengths; padding is a sentinel."""
    is_key = np.arange(CAPACITY) < np.asarray(lengths)[:, None]
    key = np.where(is_key[..., None, None], key, policy_runs.SENTINEL)
    return policy_runs.prefill_rows(config, key, key, lengths, **options)[1]


def feed(config, query, key, statistics, positions, active=True):
    """Adds one token of every active sequence to the statistics, and selects for it.

    Returns:
      Lists as `[layer][sequence][head]`, and the statistics.
    """
    positions = np.asarray(positions, np.int32)
    new = policy_runs.tokens_at(positions, query, key)
    active = jnp.asarray(np.broadcast_to(active, positions.shape))
    span = Span.of_tokens(jnp.asarray(positions), SIZE, active)
    num_blocks = jax.tree.leaves(statistics)[0].shape[2]
    nothing = jnp.full((1, len(positions), num_blocks * SIZE, HEADS[1], HEAD_DIM), jnp.nan)
    statistics, ids, counts, _ = policy_runs.run(*new, statistics, span, nothing, config=config)
    assert ids.dtype == counts.dtype == np.int32 and ids.shape[2] == HEADS[0]
    ids, counts = np.asarray(ids)[..., 0, :], np.asarray(counts)[..., 0]
    return policy_runs.nested(ids, counts), statistics


def expected(config, query, key, positions):
    """Computes the same lists with the transcriptions."""
    transcribed = slow_decode.adamas_tokens if config.unit_size == 1 else slow_decode.quest_pages
    return [
        [
            transcribed(config, query[layer, row, place], key[layer, row, : place + 1])
            for row, place in enumerate(positions)
        ]
        for layer in range(NUM_LAYERS)
    ]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_lists_are_those_of_the_transcription(name, budget):
    config = make(name, **BUDGETS[budget])
    query, key = draw(0)
    statistics = read(config, key, LENGTHS)
    for step in range(NEW):
        positions = [length + step for length in LENGTHS]
        lists, statistics = feed(config, query, key, statistics, positions)
        if step in (0, 1, 2, NEW - 3, NEW - 1):
            # Small integers make both computations exact, so both see the same ties.
            assert lists == expected(config, query, key, positions)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_padding_and_batch_change_nothing(name):
    config = make(name, density=0.3)
    query, key = draw(1)
    whole = read(config, key, LENGTHS)
    positions = [length - 1 for length in LENGTHS]
    for chunk in (16, 48):
        jax.tree.map(np.testing.assert_array_equal, read(config, key, LENGTHS, chunk=chunk), whole)
    # Adding a prompt's last token again changes nothing.
    lists, _ = feed(config, query, key, whole, positions)
    longer = read(config, key, LENGTHS, num_blocks=11)
    assert feed(config, query, key, longer, positions)[0] == lists
    for row, length in enumerate(LENGTHS):
        own = query[:, [row]], key[:, [row]]
        alone, _ = feed(config, *own, read(config, own[1], [length]), [length - 1])
        assert alone == [[layer[row]] for layer in lists]


@pytest.mark.parametrize("name", NAMES)
def test_decoding_and_continuing_leave_the_statistics_of_reading(name):
    config = make(name)
    query, key = draw(2)
    whole = read(config, key, [70, 60, 40])
    # Token by token; one sequence ends before the others
    statistics = read(config, key, [59, 58, 40])
    for step in range(11):
        positions = np.array([59 + step, 58 + step, 40])
        active = np.array([True, step < 2, False])
        _, statistics = feed(config, query, key, statistics, positions, active)
    jax.tree.map(np.testing.assert_array_equal, statistics, whole)
    # A span that begins inside a block whose first columns were read before
    lengths = np.array([70, 60, 40], np.int32)
    statistics = read(config, key, [37, 33, 40])
    start = np.array([37, 33, 40])
    first = start // SIZE
    columns = (first * SIZE)[:, None] + np.arange(48)
    valid = (columns >= start[:, None]) & (columns < lengths[:, None])
    new = np.stack(
        [key[:, row, np.minimum(columns[row], CAPACITY - 1)] for row in range(3)], axis=1
    )
    new = np.where(valid[..., None, None], new, policy_runs.SENTINEL)
    ends = jnp.asarray(lengths)
    span = Span(jnp.asarray(first.astype(np.int32)), jnp.asarray(valid), ends, ends)
    statistics, *_ = policy_runs.run(new, new, statistics, span, key, config=config)
    jax.tree.map(np.testing.assert_array_equal, statistics, whole)


@pytest.mark.parametrize("name", NAMES)
def test_budgets(name):
    unit = {"quest": 16, "adamas": 1}[name]
    least = {"quest": 3, "adamas": 1}[name]
    for options in ({"density": 0.1}, {"density": 0.7}, {"density": 1.0}, {"token_budget": 200}):
        config = make(name, **options)
        found = config.budget(300).tolist()
        assert found == [slow_decode.num_kept(config, n, unit, least) for n in range(1, 301)]
        assert found == sorted(found)
    assert make(name, density=0.1).budget(30)[-1] == 3  # exact: a rounded 0.1 gives 4
    assert make(name, density=1.0).budget(100).tolist() == list(range(1, 101))
    assert make(name, token_budget=1).budget(10).max() == least


def test_lists_of_tokens_equal_the_masked_reference():
    case = cases.AttentionCase(4, 32, (100, 17))
    rng = np.random.default_rng(0)
    num_heads, num_kv_heads = case.heads
    query = rng.standard_normal((2, 1, num_heads, 32)).astype(np.float32)
    key, value = rng.standard_normal((2, 2, 128, num_kv_heads, 32)).astype(np.float32)
    lengths = np.array(case.lengths, np.int32)
    for num_lists in (1, num_kv_heads, num_heads):
        mask = rng.random((2, num_lists, 1, 128)) < 0.3
        mask &= np.arange(128) < lengths[:, None, None, None]
        for row, length in enumerate(lengths):
            key[row, length:] = value[row, length:] = np.nan
        ids, counts = cases.pack_lists(mask)
        selection = BlockSelection(jnp.asarray(ids), jnp.asarray(counts), 1)
        decode = jax.jit(block_sparse_decode, static_argnames="implementation")
        out = decode(query, key, value, selection, kv_lengths=lengths, implementation=None)
        for row in range(2):
            heads = np.repeat(mask[row], num_heads // num_lists, axis=0)
            clean = (np.nan_to_num(x[row]) for x in (key, value))
            wanted, _ = reference.masked_attention(query[row], *clean, heads)
            np.testing.assert_allclose(np.asarray(out)[row], wanted, **tolerance("attention"))
        one = np.ones((2, 1), np.int32)
        pairs = jax.jit(BlockSelection.attended_pairs)(selection, (lengths - 1)[:, None], one)
        np.testing.assert_allclose(pairs, mask.sum((1, 2, 3)) / num_lists)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_holds_statistics_of_an_eighth_of_the_keys(name, dtype):
    model = dataclasses.replace(tiny.MODEL, num_layers=3)
    cache = init_cache(model, by_name(name), batch=2, max_tokens=128, dtype=dtype)
    leaves = jax.tree.leaves(cache.statistics)
    assert {leaf.shape[0] for leaf in leaves} == {1}  # the two dense layers have none
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    wide = jnp.zeros((), dtype if name == "quest" else "bfloat16").dtype.itemsize
    assert held == cache.key[0].size * wide / 8


@pytest.mark.parametrize("name", NAMES)
def test_metadata_bytes_are_those_of_the_blocks_so_far(name):
    layer = LayerShape(num_heads=6, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
    config = by_name(name, block_size=SIZE)
    found = config.metadata_bytes(layer, jnp.array([0, 15, 16, 159], jnp.int32))
    page = SIZE * 2 * 64 * 2 / 8
    assert found.tolist() == [page, page, 2 * page, 10 * page]
