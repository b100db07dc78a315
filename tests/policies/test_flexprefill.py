"""FlexPrefill against its rule, set by set, and its budgets at their edges."""

import dataclasses
import functools
import math

import cases
import head_lists
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial.distance
from head_lists import HEADS, assert_same_rows, listed
from variants import slow_unless

from sketchwalk_jax.policies.flexprefill import FlexPrefillConfig, jensen_shannon_distance

SIZE = 16
LENGTHS = (311, 200, 65, 33, 7)
# Some heads of the drawn prompts are query-aware, others not.
SPARSE = FlexPrefillConfig(block_size=SIZE, gamma=0.6, tau=0.3, min_budget=32)
CONFIGS = {
    "mixed": SPARSE,
    "lines_only": dataclasses.replace(SPARSE, tau=0.0),
    "blocks_only": dataclasses.replace(SPARSE, tau=2.0),
    "least": dataclasses.replace(SPARSE, gamma=0.0, tau=0.0),
    "capped": dataclasses.replace(SPARSE, gamma=0.9, max_budget=60, tau=0.0),
}
GAP = 1e-6


def budget(config, weights, num_blocks):
    """Returns the blocks, and the smallest distance of a cumulative sum from gamma."""
    covered, count, gap = 0.0, 0, np.inf
    for weight in sorted(weights, reverse=True):
        covered += weight
        gap = min(gap, abs(covered - config.gamma))
        count += covered <= config.gamma
    blocks = (count + 1) // config.block_size + 1
    blocks = max(blocks, math.ceil(config.min_budget / config.block_size))
    largest = num_blocks
    if config.max_budget is not None:
        largest = min(largest, math.ceil(config.max_budget / config.block_size))
    return min(blocks, largest), gap


def head_by_rule(config, query, key):
    """Returns one head's blocks by row, whether it is query-aware, and the smallest gap."""
    n, size = len(query), config.block_size
    num_blocks = math.ceil(n / size)
    everything = [set(range(row + 1)) for row in range(num_blocks)]
    if n <= max(2 * size, math.ceil(config.min_budget / size) * size):
        return everything, None, np.inf
    start = n - size
    weights = head_lists.causal_softmax(query[start:], key, range(start, n)) / size
    vertical, slash = weights.sum(0), np.zeros(n)
    for row in range(size):
        for column in range(start + row + 1):
            slash[start + row - column] += weights[row, column]
    query_means, key_means = (
        [x[begin : begin + size].astype(np.float64).mean(0) for begin in range(0, n, size)]
        for x in (query, key)
    )
    by_block = [vertical[b * size : (b + 1) * size].sum() for b in range(num_blocks)]
    # Sums of diagonals by block distance from the last query.
    by_distance = [0.0] * num_blocks
    for offset in range(n):
        by_distance[(num_blocks - 1) - (n - 1 - offset) // size] += slash[offset]
    last = query[start:].astype(np.float64).mean(0)
    (estimate,) = head_lists.causal_softmax(last[None], np.array(key_means), [num_blocks - 1])
    distance = scipy.spatial.distance.jensenshannon(estimate, by_block)
    is_aware, gap = distance < config.tau, abs(distance - config.tau)
    least = math.ceil(config.min_budget / size)
    counts = []
    for values in (vertical, slash):
        count, one = budget(config, values, num_blocks)
        counts.append(least if is_aware else count)
        gap = min(gap, one)
    columns, one = head_lists.best(by_block, counts[0], forced=[0])
    distances, other = head_lists.best(by_distance, counts[1], forced=[0])
    gap = min(gap, one, other)
    rows = [
        {j for j in range(row + 1) if j in columns or row - j in distances}
        for row in range(num_blocks)
    ]
    if is_aware:
        block_map = head_lists.causal_softmax(
            np.array(query_means), np.array(key_means), range(num_blocks)
        )
        pairs = [(block_map[i, j], i, j) for i in range(num_blocks) for j in range(i + 1)]
        pairs.sort(reverse=True)
        covered = 0.0
        for index, (weight, row, column) in enumerate(pairs):
            covered += weight
            gap = min(gap, abs(covered - config.gamma * num_blocks))
            if covered > config.gamma * num_blocks:
                gap = min(gap, pairs[max(index - 1, 0)][0] - weight if index else np.inf)
                break
            rows[row].add(column)
    return rows, is_aware, gap


def by_rule(config, query, key):
    group = query.shape[1] // key.shape[1]
    heads = [head_by_rule(config, query[:, h], key[:, h // group]) for h in range(query.shape[1])]
    return tuple(zip(*heads, strict=True))


@functools.cache
def prompts():
    def usable(drawn):
        return all(
            min(by_rule(config, *prompt)[2]) > GAP
            for prompt in drawn
            for config in CONFIGS.values()
        )

    return cases.first_usable(
        lambda seed: [
            head_lists.draw(n, seed=97 * seed + n, spread=1.0 + 0.5 * (n % 2)) for n in LENGTHS
        ],
        usable,
    )


@pytest.mark.parametrize("name", slow_unless(["mixed", "capped"].__contains__, CONFIGS))
def test_lists_are_those_of_the_rule(name):
    config, aware = CONFIGS[name], set()
    for found, prompt in zip(listed(config, prompts()), prompts(), strict=True):
        wanted, is_aware, _ = by_rule(config, *prompt)
        assert_same_rows(found, wanted)
        aware |= {one for one in is_aware if one is not None}
    kinds = {"mixed": {True, False}, "blocks_only": {True}}
    assert aware == kinds.get(name, {False})


@pytest.mark.parametrize("tau", slow_unless((2.0).__eq__, [0.0, 2.0]))
def test_full_coverage_lists_everything(tau):
    config = dataclasses.replace(SPARSE, gamma=1.0, tau=tau)
    wanted = [[set(range(i + 1)) for i in range(20)]] * HEADS[0]
    assert listed(config, [head_lists.draw(320)]) == [wanted]


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-30.0, 0.0])
def test_scores_need_not_be_positive(offset):
    """Equal scores, negative or zero, give even attention, and every head is query-aware."""
    query = np.ones((200, 4, 16), np.float32)
    key = np.full((200, 2, 16), offset, np.float32)
    everything = dataclasses.replace(SPARSE, gamma=1.0)
    (some,), (full,) = (listed(x, [(query, key)], num_rows=13) for x in (SPARSE, everything))
    for head in range(4):
        assert full[head] == [set(range(row + 1)) for row in range(13)]
        assert all({0, row} <= blocks <= full[head][row] for row, blocks in enumerate(some[head]))
        assert 0.4 < sum(map(len, some[head])) / (13 * 14 / 2) < 1


@pytest.mark.parametrize(
    "limits", slow_unless((33, 48).__eq__, [(1, 32), (32, 32), (33, 48), (200, 208)])
)
def test_short_prompts_are_dense_up_to_the_least_budget(limits):
    min_budget, limit = limits
    config = FlexPrefillConfig(
        block_size=SIZE, gamma=0.0, tau=0.0, min_budget=min_budget, max_budget=SIZE
    )
    lengths = [limit, min(320, limit + 1), 1]
    drawn = [head_lists.draw(length, seed=length) for length in lengths]
    found = listed(config, drawn)
    wanted = [{*range(row + 1)} for row in range(limit // SIZE)]
    assert all(rows[: len(wanted)] == wanted for rows in found[0])
    assert all(rows[0] == {0} for rows in found[2])
    longer = [by_rule(config, *drawn[1])[0]]
    assert [[rows[: limit // SIZE + 1] for rows in found[1]]] == [list(heads) for heads in longer]


def test_last_chunk_selects_as_the_whole_prompt_does():
    config = CONFIGS["lines_only"]
    whole, part = (listed(config, prompts()[:2], begin=begin) for begin in (0, 160))
    assert part == [[rows[10:] for rows in heads] for heads in whole]
    # A prompt that ends before the chunk has no rows in it.
    part = listed(config, prompts()[:2], (311, 140), begin=160)
    assert part[1] == [[set()] * 10] * HEADS[0]


def test_distance_is_scipys():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(9), size=(2, 5))
    p[0], q[0] = np.eye(9)[0], np.eye(9)[1]  # orthogonal
    p[1] = q[1]
    found = jensen_shannon_distance(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32))
    expected = scipy.spatial.distance.jensenshannon(p, q, axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    np.testing.assert_allclose(found[0], math.sqrt(math.log(2)), rtol=1e-6)
    np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-5)
