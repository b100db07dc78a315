"""The rule of the authors' published code against its reference."""

import cases
import hypothesis.strategies as st
import numpy as np
import policy_runs
import pytest
import reference
from hypothesis import given, settings

from sketchwalk_jax import SketchWalkConfig

SIZE, CAPACITY, NUM_LAYERS = 16, 1024, 3
CONFIG = SketchWalkConfig.released(block_size=SIZE, dense_layers=0)


def draw(seed):
    return cases.draw_layers(
        seed, num_layers=NUM_LAYERS, num_tokens=CAPACITY, block_size=SIZE, heads=(6, 2), spread=1.0
    )


def is_settled(kept, walk_row, row, num_tokens):
    """Says whether rounding cannot change the kept blocks of a row."""
    noise = 2e-5 * np.random.default_rng(row).uniform(-1, 1, len(walk_row))
    shaken = reference.released_select(walk_row * (1.0 + noise), row, num_tokens, CONFIG)
    return shaken == kept or len(kept) == row + 1


@settings(max_examples=6)
@given(lengths=st.tuples(st.integers(1, CAPACITY), st.integers(1, CAPACITY)))
def test_prefill_selects_as_the_reference(lengths):
    drawn = [draw(seed).first(length) for seed, length in enumerate(lengths)]
    query, key = policy_runs.stack_sequences(drawn, CAPACITY)
    rows, _ = policy_runs.prefill_rows(CONFIG, query, key, lengths)
    for place, (layers, length) in enumerate(zip(drawn, lengths, strict=True)):
        state, unsettled = None, 0
        for layer in range(NUM_LAYERS):
            wanted, state = reference.released_select_prefill(
                layers.queries[layer], layers.keys[layer], state, CONFIG
            )
            for row, kept in enumerate(wanted):
                settled = is_settled(kept, state[row], row, length)
                unsettled += not settled
                assert rows[layer][place][row] == kept or not settled
        assert unsettled <= 0.1 * NUM_LAYERS * len(wanted)


@pytest.mark.parametrize("length", [5, 31, 640, 945])
def test_decode_selects_as_the_reference(length):
    layers = draw(7)
    query, key = policy_runs.stack_sequences([layers], CAPACITY)
    _, statistics = policy_runs.prefill_rows(
        CONFIG, *policy_runs.stack_sequences([layers.first(length)], CAPACITY), [length]
    )
    compared = 0
    for position in range(length, length + 20):
        new = (x[:, :, position : position + 1] for x in (query, key))
        rows, statistics = policy_runs.decode_rows(CONFIG, *new, statistics, [position], key)
        so_far = layers.first(position + 1)
        for layer in range(NUM_LAYERS):
            kept, row = reference.released_select_decode(
                so_far.queries[layer], so_far.keys[layer], CONFIG
            )
            if is_settled(kept, row, position // SIZE, position + 1):
                compared += 1
                assert rows[layer][0] == kept
    assert compared > 50


@pytest.mark.parametrize("num_tokens", [1, 319, 320, 321, 640, 1279, 1280, 6400])
def test_shares_of_the_prompt_are_rounded_as_documented(num_tokens):
    # No equal entry is above the threshold, so only first and recent blocks are kept.
    row = (num_tokens - 1) // SIZE
    kept = reference.released_select(np.ones(row + 1), row, num_tokens, CONFIG)
    share = -(-num_tokens // (20 * SIZE))  # 5 % of the tokens, in whole blocks
    expected = {*range(min(share, row + 1)), *range(max(0, row - share), row + 1)}
    assert kept == sorted(expected)
