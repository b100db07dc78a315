"""MInference against its rule as sets, and consequences of the rule."""

import dataclasses
import functools

import cases
import head_lists
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from head_lists import CAPACITY, HEADS
from tolerances import tolerance

from sketchwalk_jax import (
    Dense,
    block_sparse_attention,
    dense_attention,
    generate,
    init_walk,
    sketchwalk_attention,
)
from sketchwalk_jax.policies import by_name, lines
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.minference import MInferenceConfig

SIZE = 16
NUM_BLOCKS = CAPACITY // SIZE
LENGTHS = (311, 130, 64, 17, 1)
SPARSE = MInferenceConfig(block_size=SIZE, vertical=36, slash=112)
# Counts at their minimum: 30 columns, all forced, and the nearest 50 offsets.
LEAST = dataclasses.replace(SPARSE, scale=0.0)
# Only forced columns and offsets; the farthest offset is on a block boundary.
FORCED = dataclasses.replace(SPARSE, vertical=30, slash=65)
CONFIGS = (SPARSE, LEAST, FORCED)
GAP = 1e-5


def kept_lines(config, query, key):
    """Returns kept columns and offsets of every head, and the smallest gap at their edge."""
    n, size = len(query), len(query) - min(64, len(query))
    group, gap, found = query.shape[1] // key.shape[1], np.inf, []
    v = min(n, max(round(config.scale * config.vertical), 30))
    s = min(n, max(round(config.scale * config.slash), 50))
    for head in range(query.shape[1]):
        weights = head_lists.causal_softmax(
            query[size:, head], key[:, head // group], range(size, n)
        )
        vertical, slash = [0.0] * n, [0.0] * n
        for row, position in enumerate(range(size, n)):
            for column in range(position + 1):
                vertical[column] += weights[row, column]
                slash[position - column] += weights[row, column]
        columns, one = head_lists.best(vertical, v, forced=range(min(30, n)))
        offsets, other = head_lists.best(slash, s, forced=range(min(100, n)))
        found.append((columns, offsets))
        gap = min(gap, one, other)
    return found, gap


def attended_keys(config, columns, offsets, position: int) -> set[int]:
    """Returns one query's keys: its block's ranges of offsets, and columns, up to itself."""
    start = position // config.block_size * config.block_size
    keys = set(columns)
    for offset in offsets:
        keys |= set(range(start - offset, start - offset + config.block_size))
    return {key for key in keys if 0 <= key <= position}


def by_rule(config, query, key):
    """Computes blocks of every head and row by the rule."""
    size, found = config.block_size, []
    for columns, offsets in kept_lines(config, query, key)[0]:
        rows = []
        for start in range(0, len(query), size):
            last = min(start + size, len(query)) - 1
            rows.append({k // size for k in attended_keys(config, columns, offsets, last)})
        found.append(rows)
    return found


@functools.cache
def prompts():
    def usable(drawn):
        return all(kept_lines(config, *prompt)[1] > GAP for prompt in drawn for config in CONFIGS)

    return cases.first_usable(
        lambda seed: [head_lists.draw(n, seed=97 * seed + n) for n in LENGTHS], usable
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_lists_are_those_of_the_rule(config):
    found = head_lists.as_sets(
        head_lists.select(config, *head_lists.stack(prompts()), lengths=LENGTHS)
    )
    for listed, prompt in zip(found, prompts(), strict=True):
        wanted = by_rule(config, *prompt)
        num_rows = len(wanted[0])
        assert [rows[:num_rows] for rows in listed] == wanted
        assert all(not row for rows in listed for row in rows[num_rows:])  # padding


def test_heads_differ_and_leave_most_of_a_long_prompt_out():
    listed = head_lists.as_sets(
        head_lists.select(SPARSE, *head_lists.stack(prompts()), lengths=LENGTHS), 20
    )[0]
    assert listed[0] != listed[1]
    assert sum(map(len, listed[0])) < 0.9 * 20 * 21 / 2


def token_mask(config, query, key, *, lengths):
    """Returns the rule's pairs before rounding out to blocks, `[B, N, T, T]`."""
    num_tokens, size = query.shape[1], config.block_size
    position = jnp.arange(num_tokens, dtype=jnp.int32)
    span = Span(jnp.zeros_like(lengths), position[None, :] < lengths[:, None], lengths, lengths)
    last = lines.last_queries(query, span, block_size=size, count=64)
    columns, offsets = config._kept_lines(*last, key, lengths)
    # Key `s` is `size · i + size - 1 - s` before the end of block `i`. It is in a range of the
    # block if an offset from this distance down to `size - 1` less is kept.
    count = jnp.cumsum(jnp.pad(offsets, ((0, 0), (0, 0), (size, 0))), -1, dtype=jnp.int32)
    in_reach = count[..., size:] > count[..., :-size]
    last_of_block = position // size * size + size - 1
    distance = jnp.clip(last_of_block[:, None] - position[None, :], 0, num_tokens - 1)
    causal = (position[None, :] <= position[:, None])[None, None] & span.valid[:, None, :, None]
    return (in_reach[..., distance] | columns[:, :, None, :]) & causal


@pytest.mark.parametrize("config", [SPARSE, LEAST])
def test_token_mask_holds_exactly_the_pairs_of_the_rule(config):
    query, key = head_lists.stack(prompts()[:3], 320)
    lengths = LENGTHS[:3]
    mask = np.asarray(
        jax.jit(token_mask, static_argnums=0)(
            config, query, key, lengths=jnp.array(lengths, jnp.int32)
        )
    )
    for row, (prompt, length) in enumerate(zip(prompts(), lengths, strict=False)):
        for head, (columns, offsets) in enumerate(kept_lines(config, *prompt)[0]):
            for position in {0, 15, 16, length // 2, length - 1}:
                wanted = attended_keys(config, columns, offsets, position)
                assert set(np.flatnonzero(mask[row, head, position])) == wanted
        assert not mask[row, :, length:].any()


def test_blocks_are_the_token_mask_rounded_out():
    query, key = head_lists.stack(prompts()[:1])
    lengths = [LENGTHS[0]]
    of_tokens = jax.jit(token_mask, static_argnums=0)
    mask = np.asarray(of_tokens(SPARSE, query, key, lengths=np.array(lengths, np.int32)))[0]
    blocks = mask.reshape(HEADS[0], NUM_BLOCKS, SIZE, NUM_BLOCKS, SIZE).any((2, 4))
    selection = head_lists.select(SPARSE, query, key, lengths)
    (listed,) = head_lists.as_sets(selection)
    assert [[set(np.flatnonzero(row)) for row in rows] for rows in blocks] == listed
    rows = np.arange(NUM_BLOCKS, dtype=np.int32)[None] * SIZE
    queries = np.clip(lengths[0] - rows, 0, SIZE)
    pairs = sum(
        min(k * SIZE + SIZE - 1, q) - k * SIZE + 1
        for rows in listed
        for q in range(lengths[0])
        for k in rows[q // SIZE]
    )
    attended = jax.jit(type(selection).attended_pairs)(selection, rows, queries)
    np.testing.assert_allclose(attended, [pairs / HEADS[0]], **tolerance("density"))
    assert mask.sum() / HEADS[0] < pairs / HEADS[0]  # density is measured after rounding


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_stream_keeps_first_and_last_keys(scale):
    config = MInferenceConfig(
        block_size=SIZE, pattern="stream", sink_tokens=32, local_tokens=97, scale=scale
    )
    listed = head_lists.as_sets(
        head_lists.select(config, *head_lists.stack(prompts()[:1]), [LENGTHS[0]]), 20
    )
    wanted = [
        {
            key // SIZE
            for query in range(SIZE * row, SIZE * row + SIZE)
            for key in range(query + 1)
            if key < round(32 * scale) or query - key < round(97 * scale)
        }
        for row in range(20)
    ]
    assert listed == [[wanted]]


def test_block_sparse_keeps_the_best_products_of_means():
    config = MInferenceConfig(block_size=SIZE, pattern="block_sparse", top_blocks=12, scale=0.5)
    query, key = prompts()[0]
    listed = head_lists.as_sets(
        head_lists.select(config, *head_lists.stack(prompts()[:1]), [len(query)])
    )[0]
    for head, rows in enumerate(listed):
        means = [
            [x[start : start + SIZE, index].astype(np.float64).mean(0) for start in starts]
            for x, index in ((query, head), (key, head // 2))
            for starts in [range(0, len(query), SIZE)]
        ]
        for row, blocks in enumerate(rows):
            scores = [means[0][row] @ means[1][j] for j in range(row + 1)]
            wanted, gap = head_lists.best(scores, min(6, row + 1))
            assert gap > GAP and blocks == wanted
    assert any(row not in blocks for rows in listed for row, blocks in enumerate(rows))


def test_last_chunk_selects_as_the_whole_prompt_does():
    query, key = head_lists.stack(prompts()[:2])
    lengths = LENGTHS[:2]
    whole = head_lists.as_sets(head_lists.select(SPARSE, query, key, lengths))
    for row, begin, stop in ((0, 160, 320), (1, 0, 160)):
        part = head_lists.as_sets(
            head_lists.select(SPARSE, query, key, lengths, begin=begin, stop=stop)
        )
        rows = slice(begin // SIZE, stop // SIZE)
        assert part[row] == [heads[rows] for heads in whole[row]]
    # The second prompt has no tokens in the second chunk.
    part = head_lists.as_sets(head_lists.select(SPARSE, query, key, lengths, begin=160))
    assert part[1] == [[set()] * 10] * HEADS[0]


def test_full_scale_equals_dense_attention():
    config = dataclasses.replace(SPARSE, scale=MInferenceConfig.knob_range[1])
    query, key = head_lists.stack([head_lists.draw(CAPACITY)])
    selection = head_lists.select(config, query, key, [CAPACITY])
    out = block_sparse_attention(query, key, key, selection)
    np.testing.assert_allclose(out, dense_attention(query, key, key), **tolerance("paths"))


@pytest.mark.slow
def test_one_layer_as_a_function():
    config = SPARSE
    query, key = head_lists.stack([head_lists.draw(n, seed=n) for n in (300, 200)], 300)
    lengths = jnp.array([300, 200], jnp.int32)
    walk = init_walk(2, 300, policy=config)
    out, after = sketchwalk_attention(query, key, key, walk, policy=config, lengths=lengths)
    mask = token_mask(config, query, key, lengths=lengths)
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, 4), (0, 4)))
    blocks = padded.reshape(2, HEADS[0], 19, SIZE, 19, SIZE).any((3, 5))
    mask = blocks.repeat(SIZE, 2).repeat(SIZE, 3)[:, :, :300, :300]
    mask &= jnp.tril(jnp.ones((1, 1, 300, 300), bool))
    expected = jax.nn.dot_product_attention(query, key, key, mask=mask)
    for row, length in enumerate([300, 200]):
        np.testing.assert_allclose(out[row, :length], expected[row, :length], **tolerance("paths"))
    np.testing.assert_array_equal(after.scores, walk.scores)  # it does not use the walk


@pytest.mark.slow
def test_generation_is_sparse_in_prefill_and_dense_in_decode():
    tokens, lengths = tiny.prompts(400, 300)
    options = {"model_config": tiny.MODEL, "lengths": lengths, "max_new_tokens": 4}
    config = by_name("minference", block_size=SIZE, scale=0.0)
    out = generate(tiny.params(), tokens, policy=config, **options)
    density = out.measured_density
    assert (np.asarray(density.prefill) < 0.75).all()
    np.testing.assert_allclose(density.decode, 1.0, **tolerance("density"))
    full = generate(
        tiny.params(), tokens, policy=dataclasses.replace(config, scale=64.0), **options
    )
    dense = generate(tiny.params(), tokens, policy=Dense(block_size=SIZE), **options)
    np.testing.assert_array_equal(full.tokens, dense.tokens)
    np.testing.assert_allclose(full.measured_density.prefill, 1.0, **tolerance("density"))
    assert full.cache.statistics is None


def test_defaults_are_the_published_ones():
    config = by_name("minference")
    assert (config.vertical, config.slash, config.scale) == (512, 2048, 1.0)
    assert (config.block_size, config.dense_layers, config.phases) == (64, 0, ("prefill",))
    assert (config.top_blocks, config.sink_tokens, config.local_tokens) == (100, 100, 800)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "slash"}, "pattern must be one of"),
        ({"vertical": 0}, "vertical must be a positive integer, got 0"),
        ({"slash": 2.5}, "slash must be a positive integer"),
        ({"scale": -1.0}, r"scale must be in \[0, inf\), got -1.0"),
        ({"scale": float("nan")}, r"scale must be in \[0, inf\), got nan"),
        ({"block_size": 24}, "block_size must be a power of two"),
    ],
)
def test_wrong_fields_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        by_name("minference", **options)
