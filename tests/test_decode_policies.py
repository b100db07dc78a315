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
    Dense,
    block_sparse_decode,
    dense_attention,
    generate,
    init_cache,
    init_walk,
    sketchwalk_attention,
)
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import LayerShape, Span

NAMES = ("quest", "adamas")
# In whole models, test one policy by default: policies differ only in their lists.
IN_A_MODEL = ("quest", pytest.param("adamas", marks=pytest.mark.slow))
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


def _observe(key, statistics, span, *, config):
    def one_layer(key, statistics):
        return config.observe(key, key, statistics, span=span)

    return jax.vmap(one_layer)(key, statistics)


observe = jax.jit(_observe, static_argnames="config")


def _select(query, cache, statistics, positions, *, config):
    layer, span = jnp.zeros((), jnp.int32), Span.of_tokens(positions, config.block_size)

    def one_layer(query, statistics):
        return config.select(query, cache, statistics, None, layer=layer, span=span)[0]

    return jax.vmap(one_layer)(query, statistics)


select = jax.jit(_select, static_argnames="config")


def read(config, key, lengths, *, chunk=CAPACITY, num_blocks=CAPACITY // SIZE):
    """Returns every layer's statistics after prompts of these lengths; padding is a sentinel."""
    lengths = np.asarray(lengths, np.int32)
    statistics = policy_runs.empty_statistics(config, key, key, num_blocks)
    for begin in range(0, CAPACITY, chunk):
        columns = np.arange(begin, begin + chunk)
        valid = columns[None, :] < lengths[:, None]
        span = Span(
            jnp.full(lengths.shape, begin // SIZE, jnp.int32),
            jnp.asarray(valid),
            jnp.asarray(np.minimum(lengths, begin + chunk)),
            jnp.asarray(lengths),
        )
        part = np.where(valid[..., None, None], key[:, :, columns], policy_runs.SENTINEL)
        statistics = observe(part, statistics, span, config=config)
    return statistics


def feed(config, key, statistics, positions, active=True):
    """Adds one token of every active sequence to the statistics."""
    positions = np.asarray(positions, np.int32)
    new = np.stack([key[:, row, [place]] for row, place in enumerate(positions)], axis=1)
    active = np.broadcast_to(active, positions.shape)
    end = jnp.asarray(positions + 1)
    span = Span(jnp.asarray(positions // SIZE), jnp.asarray(active)[:, None], end, end)
    return observe(new, statistics, span, config=config)


def lists_of(config, query, statistics, positions, num_blocks=CAPACITY // SIZE):
    """Returns ascending lists as `[layer][sequence][head]`, without entries after each count."""
    positions = np.asarray(positions, np.int32)
    now = np.stack([query[:, row, [place]] for row, place in enumerate(positions)], axis=1)
    nothing = jnp.full((1, len(positions), num_blocks * SIZE, HEADS[1], HEAD_DIM), jnp.nan)
    chosen = select(now, nothing, statistics, jnp.asarray(positions), config=config)
    ids, counts = np.asarray(chosen.ids)[..., 0, :], np.asarray(chosen.counts)[..., 0]
    assert ids.dtype == counts.dtype == np.int32 and ids.shape[2] == HEADS[0]
    return [
        [
            [row[:count].tolist() for row, count in zip(*heads, strict=True)]
            for heads in zip(*layer, strict=True)
        ]
        for layer in zip(ids, counts, strict=True)
    ]


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
        statistics = feed(config, key, statistics, positions)
        if step in (0, 1, 2, NEW - 3, NEW - 1):
            # Small integers make both computations exact, so both see the same ties.
            wanted = expected(config, query, key, positions)
            assert lists_of(config, query, statistics, positions) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_chunks_padding_and_batch_change_nothing(name):
    config = make(name, density=0.3)
    query, key = draw(1)
    whole = read(config, key, LENGTHS)
    positions = [length - 1 for length in LENGTHS]
    for chunk in (16, 48):
        jax.tree.map(np.testing.assert_array_equal, read(config, key, LENGTHS, chunk=chunk), whole)
    lists = lists_of(config, query, whole, positions)
    longer = read(config, key, LENGTHS, num_blocks=11)
    assert lists_of(config, query, longer, positions, num_blocks=11) == lists
    for row, length in enumerate(LENGTHS):
        alone = read(config, key[:, [row]], [length])
        one = lists_of(config, query[:, [row]], alone, [length - 1])
        assert one == [[layer[row]] for layer in lists]


@pytest.mark.parametrize("name", NAMES)
def test_decoding_and_continuing_leave_the_statistics_of_reading(name):
    config = make(name)
    _, key = draw(2)
    whole = read(config, key, [70, 60, 40])
    # Token by token; one sequence ends before the others
    statistics = read(config, key, [59, 58, 40])
    for step in range(11):
        positions = np.array([59 + step, 58 + step, 40])
        statistics = feed(config, key, statistics, positions, np.array([True, step < 2, False]))
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
    statistics = observe(new, statistics, span, config=config)
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


@functools.cache
def generated(config, phase="both", chunk_size=None):
    tokens, lengths = tiny.prompts(300, 271)
    return generate(
        tiny.params(),
        tokens,
        lengths=lengths,
        policy=config,
        model_config=tiny.MODEL,
        max_new_tokens=6,
        phase=phase,
        chunk_size=chunk_size,
    )


@pytest.mark.parametrize("name", IN_A_MODEL)
def test_generation_is_dense_in_prompts_and_at_the_asked_density_in_decode(name):
    config = by_name(name, block_size=SIZE, density=0.3)
    out, dense = generated(config), generated(Dense(block_size=SIZE))
    np.testing.assert_allclose(out.measured_density.prefill, 1.0, **tolerance("density"))
    np.testing.assert_array_equal(out.tokens[:, 0], dense.tokens[:, 0])
    measured = np.asarray(out.measured_density.decode)
    np.testing.assert_allclose(measured[:2], 1.0, **tolerance("density"))  # dense layers
    unit = config.unit_size
    assert (np.abs(measured[2:] - 0.3) < unit / 271 + 1e-6).all()
    assert (measured[2:] >= 0.3 - 1e-6).all() or unit > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generation_at_full_density_equals_dense_and_chunks_change_nothing(name):
    full = by_name(name, block_size=SIZE, density=1.0)
    out, dense = generated(full), generated(Dense(block_size=SIZE))
    np.testing.assert_array_equal(out.tokens, dense.tokens)
    np.testing.assert_allclose(out.measured_density.overall, 1.0, **tolerance("density"))
    config = by_name(name, block_size=SIZE, density=0.3)
    np.testing.assert_array_equal(generated(config, chunk_size=64).tokens, generated(config).tokens)
    decode_only = generated(config, phase="decode")
    np.testing.assert_array_equal(decode_only.tokens, generated(config).tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_one_layer_function_is_dense(name):
    config = make(name, density=0.2)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((2, 40, n, 16)), jnp.float32) for n in (4, 2))
    lengths = jnp.array([40, 23], jnp.int32)
    walk = init_walk(2, 40, policy=config)
    out, after = sketchwalk_attention(x, y, y, walk, policy=config, lengths=lengths)
    wanted = dense_attention(x, y, y, kv_lengths=lengths)
    np.testing.assert_array_equal(out, wanted)
    assert after is walk


@pytest.mark.unchecked
@pytest.mark.parametrize("name", NAMES)
def test_prompts_cannot_be_sparse(name):
    config = make(name)
    with pytest.raises(ValueError, match="phase must be 'both' or 'decode' for .*, which selects"):
        generated(config, phase="prefill")
    with pytest.raises(NotImplementedError, match="selects in decode only"):
        lengths = jnp.array([32], jnp.int32)
        span = Span(jnp.zeros_like(lengths), jnp.ones((1, 32), bool), lengths, lengths)
        x = jnp.zeros((1, 32, 1, 16))
        config.select(x, x[None], None, None, layer=jnp.int32(0), span=span)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in"),
        ({"density": "much"}, "density must be in"),
        ({"token_budget": 0}, "token_budget must be None or a positive integer, got 0"),
        ({"token_budget": True}, "token_budget must be None or a positive integer, got True"),
        ({"force_current": 1}, "force_current must be True or False, got 1"),
        ({"dense_layers": -1}, "dense_layers must be an integer of at least 0"),
        ({"sink_blocks": 1}, "must be given fields that it has"),
    ],
)
def test_wrong_fields_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        by_name(name, **options)


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
