"""MInference against its rule as sets, and consequences of the rule."""

import dataclasses
import functools

import cases
import head_lists
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_lists import CAPACITY, HEADS, assert_same_rows, listed

from sketchwalk_jax.policies import lines
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.minference import MInferenceConfig

SIZE = 16
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
    for found, prompt in zip(listed(config, prompts()), prompts(), strict=True):
        assert_same_rows(found, by_rule(config, *prompt))


def test_heads_differ_and_leave_most_of_a_long_prompt_out():
    first, second, *_ = listed(SPARSE, prompts(), num_rows=20)[0]
    assert first != second and sum(map(len, first)) < 0.9 * 20 * 21 / 2


@pytest.mark.parametrize("config", [SPARSE, LEAST])
def test_kept_columns_and_offsets_are_those_of_the_rule(config):
    (query, key), lengths = head_lists.stack(prompts()), jnp.array(LENGTHS, jnp.int32)

    @jax.jit
    def kept(query, key):
        valid = jnp.arange(CAPACITY, dtype=jnp.int32)[None, :] < lengths[:, None]
        span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
        last = lines.last_queries(query, span, block_size=SIZE, count=64)
        return config._kept_lines(*last, key, lengths)

    for sequence, prompt in enumerate(prompts()):
        for head, wanted in enumerate(kept_lines(config, *prompt)[0]):
            found = (set(np.flatnonzero(x[sequence, head])) for x in kept(query, key))
            assert tuple(found) == wanted


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_stream_keeps_first_and_last_keys(scale):
    config = MInferenceConfig(
        block_size=SIZE, pattern="stream", sink_tokens=32, local_tokens=97, scale=scale
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
    assert listed(config, prompts()[:1], num_rows=20) == [[wanted]]


def test_block_sparse_keeps_the_best_products_of_means():
    config = MInferenceConfig(block_size=SIZE, pattern="block_sparse", top_blocks=12, scale=0.5)
    query, key = prompts()[0]
    found = listed(config, prompts()[:1])[0]
    for head, rows in enumerate(found):
        means = [
            [x[start : start + SIZE, index].astype(np.float64).mean(0) for start in starts]
            for x, index in ((query, head), (key, head // 2))
            for starts in [range(0, len(query), SIZE)]
        ]
        for row, blocks in enumerate(rows):
            scores = [means[0][row] @ means[1][j] for j in range(row + 1)]
            wanted, gap = head_lists.best(scores, min(6, row + 1))
            assert gap > GAP and blocks == wanted
    assert any(row not in blocks for rows in found for row, blocks in enumerate(rows))


def test_last_chunk_selects_as_the_whole_prompt_does():
    whole = listed(SPARSE, prompts()[:2])
    for row, begin, stop in ((0, 160, 320), (1, 0, 160)):
        part = listed(SPARSE, prompts()[:2], begin=begin, stop=stop)
        rows = slice(begin // SIZE, stop // SIZE)
        assert part[row] == [heads[rows] for heads in whole[row]]
    # The second prompt has no tokens in the second chunk.
    part = listed(SPARSE, prompts()[:2], begin=160)
    assert part[1] == [[set()] * 10] * HEADS[0]
