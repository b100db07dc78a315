"""The rule of the authors' published code against its reference."""

import cases
import hypothesis.strategies as st
import numpy as np
import policy_runs
import pytest
from hypothesis import given, settings

from sketchwalk_jax import SketchWalkConfig, reference

SIZE, CAPACITY, NUM_LAYERS = 16, 1024, 3
CONFIG = SketchWalkConfig.released(block_size=SIZE, dense_layers=0)


def draw(seed):
    return cases.draw_layers(
        seed, num_layers=NUM_LAYERS, num_tokens=CAPACITY, block_size=SIZE, heads=(6, 2), spread=1.0
    )


def is_settled(layers, num_tokens, num_blocks):
    """Whether rounding could not change what the rows of these layers keep."""
    rng = np.random.default_rng(0)
    for layer in layers:
        first = num_blocks - len(layer.rows)
        for place, ids in enumerate(layer.rows):
            row = layer.walk[place] * (1.0 + 2e-5 * rng.uniform(-1, 1, num_blocks))
            if len(ids) == first + place + 1:
                continue
            if reference.released_select(row, first + place, num_tokens, CONFIG) != ids:
                return False
    return True


@settings(max_examples=6)
@given(lengths=st.tuples(st.integers(1, CAPACITY), st.integers(1, CAPACITY)))
def test_prefill_selects_as_the_reference(lengths):
    def run(seed):
        drawn = [draw(seed + row) for row in range(2)]
        cut = [
            cases.Layers(*([x[:length] for x in part] for part in vars(layers).values()))
            for layers, length in zip(drawn, lengths, strict=True)
        ]
        return cut, [reference.released_prefill(*vars(x).values(), CONFIG) for x in cut]

    def is_usable(drawn):
        return all(
            is_settled(layers, length, -(-length // SIZE))
            for layers, length in zip(drawn[1], lengths, strict=True)
        )

    drawn, wanted = cases.first_usable(run, is_usable)
    query, key = policy_runs.stack_sequences(drawn, CAPACITY)
    rows, _ = policy_runs.prefill_rows(CONFIG, query, key, lengths)
    assert rows == [[sequence[layer].rows for sequence in wanted] for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("length", [5, 31, 640, 945])
def test_decode_selects_as_the_reference(length):
    layers = draw(7)
    query, key = policy_runs.stack_sequences([layers], CAPACITY)
    _, statistics = policy_runs.prefill_rows(CONFIG, query, key, [length])
    compared = 0
    for position in range(length, length + 20):
        new = (x[:, :, position : position + 1] for x in (query, key))
        rows, statistics = policy_runs.decode_rows(CONFIG, *new, statistics, [position])
        wanted = reference.released_decode(*vars(layers).values(), CONFIG, position=position)
        if is_settled(wanted, position + 1, position // SIZE + 1):
            compared += 1
            assert rows == [[layer.rows[0]] for layer in wanted]
    assert compared > 10


@pytest.mark.parametrize("num_tokens", [1, 319, 320, 321, 640, 1279, 1280, 6400])
def test_shares_of_the_prompt_are_rounded_as_documented(num_tokens):
    # Equal entries: nothing stands out, so only the first and the recent blocks are kept.
    row = (num_tokens - 1) // SIZE
    kept = reference.released_select(np.ones(row + 1), row, num_tokens, CONFIG)
    share = -(-num_tokens // (20 * SIZE))  # 5 % of the tokens, in whole blocks
    expected = {*range(min(share, row + 1)), *range(max(0, row - share), row + 1)}
    assert kept == sorted(expected)


def test_the_last_rows_of_a_prompt_keep_everything():
    layers = reference.released_prefill(*vars(draw(1)).values(), CONFIG)
    num_blocks = CAPACITY // SIZE
    for layer in layers:
        np.testing.assert_allclose(layer.scores.sum(1), 1.0)
        np.testing.assert_allclose(layer.walk.sum(1), 1.0)
        full = [len(ids) == row + 1 for row, ids in enumerate(layer.rows)]
        assert full[-4:] == [True] * 4 and not any(full[num_blocks // 2 : -4])
