"""The walk never overflows, has its invariances, and ranks blocks as the log-domain oracle does."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.walk import WalkState, walk_step

WALKS = {
    "paper": SketchWalkConfig.paper(),
    "relu power": SketchWalkConfig.paper(transition="relu_power"),
    "odd relu power": SketchWalkConfig.paper(transition="relu_power", exponent=5),
    "two steps": SketchWalkConfig.paper(exponent=2, walk_degree=2),
    "damped": SketchWalkConfig.damped(),
    "damped, three steps": SketchWalkConfig.damped(walk_degree=3),
    "softmax product": SketchWalkConfig.damped(beta=None),
    "one hop": SketchWalkConfig.one_hop(),
    "one hop of powers": SketchWalkConfig.one_hop(transition="power"),
}
POWERS = {name: walk for name, walk in WALKS.items() if walk.transition != "softmax"}
# Damping mixes P in, which fixes the scale of its rows, so they are never rescaled.
PRODUCTS = {name: walk for name, walk in WALKS.items() if not walk.beta}
NUM_BLOCKS = 24
LONG = ("paper", "damped")  # run through 80 layers on every change


@functools.partial(jax.jit, static_argnames="config")
def _walk(scores, rows, matrix_scale, row_scale, *, config):
    def step(walk, layer_scores):
        walk = WalkState(walk.scores * row_scale[None, :, None], walk.layers)
        selecting, walk = walk_step(
            walk,
            (layer_scores * matrix_scale)[None],
            rows[None],
            transition=config.transition,
            exponent=config.exponent,
            walk_degree=config.walk_degree,
            beta=config.beta,
        )
        return walk, (selecting[0], walk.scores[0])

    return jax.lax.scan(step, WalkState.zeros(1, len(rows), scores.shape[-1]), scores)[1]


def run_walk(scores, config, *, rows=range(NUM_BLOCKS), matrix_scale=1.0, row_scale=1.0):
    """Returns selecting scores and states of each layer of `[L, J, J]` scores, for given rows."""
    factors = np.broadcast_to(np.float32(row_scale), len(rows))
    rows, matrix_scale = np.array(rows, np.int32), np.float32(matrix_scale)
    return _walk(np.asarray(scores, np.float32), rows, matrix_scale, factors, config=config)


def draw_scores(seed, num_layers, *, decades=3.0, num_blocks=NUM_BLOCKS):
    """Scores whose rows and layers differ in size by up to `10 ** (2 · decades)`."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-decades, decades, (num_layers, num_blocks, 1))
    signed = rng.standard_normal((num_layers, num_blocks, num_blocks))
    return (np.tril(signed) * size).astype(np.float32)


def softer(scores, config):
    """Limits softmax logits so that a row's exponentials stay in float32's range."""
    return np.clip(scores, -20.0, 20.0) if config.transition == "softmax" else scores


def assert_ranks_as_the_oracle(states, scores, config):
    """Compares every pair of entries that float32 can order, and counts them."""
    compared = 0
    for state, expected, lost in zip(
        states, oracle.log2_walk(scores, config), oracle.log2_lost(scores, config), strict=True
    ):
        for row in range(len(state)):
            upto = slice(row + 1)
            wrong, pairs = oracle.misordered_pairs(
                state[row, upto], expected[row, upto], lost[row, upto]
            )
            assert wrong == 0, f"{wrong} pairs of row {row} are out of order"
            compared += pairs
    return compared


def assert_equal_the_oracle(states, scores, config):
    for state, expected in zip(states, oracle.walk_layers(list(scores), config), strict=True):
        scale = 1.0
        if config.transition != "softmax":  # a row's scale is free
            scale = np.maximum(state, 0).max(1, keepdims=True) + 1e-30
        np.testing.assert_allclose(state / scale, expected, **tolerance("scores"))


@pytest.mark.parametrize("config", WALKS.values(), ids=WALKS.keys())
def test_state_equals_the_oracle(config):
    scores = softer(draw_scores(0, 10, decades=0.5), config)
    _, states = run_walk(scores, config)
    assert_equal_the_oracle(states, scores, config)


@pytest.mark.parametrize("config", WALKS.values(), ids=WALKS.keys())
def test_states_rank_as_the_log_domain_oracle(config):
    scores = draw_scores(1, 10, decades=0.3)
    _, states = run_walk(scores, config)
    compared = assert_ranks_as_the_oracle(states, scores, config)
    assert compared > 0.3 * len(states) * NUM_BLOCKS**3 / 6


@pytest.mark.parametrize("name", slow_unless(LONG.__contains__, WALKS))
def test_eighty_layers_of_wide_scores_neither_overflow_nor_misrank(name):
    config = WALKS[name]
    scores = softer(draw_scores(1, 80), config)
    selecting, states = run_walk(scores, config)
    assert np.isfinite(states).all() and np.isfinite(selecting).all()
    assert_ranks_as_the_oracle(states, scores, config)
    if config.transition == "softmax":
        np.testing.assert_allclose(states.sum(-1), 1.0, rtol=1e-4)


@pytest.mark.parametrize("name", slow_unless(LONG.__contains__, WALKS))
def test_zero_rows_and_bfloat16_scores_stay_finite(name):
    config = WALKS[name]
    scores = np.asarray(jnp.asarray(draw_scores(2, 80), jnp.bfloat16), np.float32)
    scores[:, [0, 3, 7]] = 0.0
    scores[5] = 0.0
    scores[:, 11] *= 1e-30
    scores = softer(scores, config)
    selecting, states = run_walk(scores, config)
    assert np.isfinite(states).all() and np.isfinite(selecting).all()
    assert (np.triu(states[0], 1) == 0.0).all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_uniformly_tiny_or_huge_scores_rank_the_same(size):
    config = WALKS["paper"]
    scores = draw_scores(3, 10, decades=0.5)
    _, states = run_walk(scores * np.float32(size), config)
    assert_ranks_as_the_oracle(states, scores, config)


def test_a_row_that_reaches_only_a_small_one_does_not_vanish():
    # All weight of row 2 is on block 0, whose own scores are 2^-20 of the others'.
    config = WALKS["relu power"]
    scores = np.zeros((2, 3, 3), np.float32)
    scores[0] = np.diag([1.0, 1.0, 0.0])
    scores[0, 2, 0] = 1.0
    scores[1] = np.diag([2.0**-20, 1.0, 1.0])
    selecting, states = run_walk(scores, config)
    np.testing.assert_array_equal(np.asarray(states[1, 2] > 0.0), [True, False, False])
    assert np.argmax(selecting[1, 2]) == 0


@pytest.mark.parametrize("config", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_powers_of_two_on_rows_of_the_state_change_no_bit_of_the_ranking(config):
    scores = draw_scores(4, 10, decades=0.3)
    powers = 2.0 ** np.random.default_rng(0).integers(-4, 5, NUM_BLOCKS)
    plain, _ = run_walk(scores, config)
    scaled, _ = run_walk(scores, config, row_scale=powers)
    for first, second in zip(plain, scaled, strict=True):
        ranks = [np.argsort(-np.asarray(x), axis=1, kind="stable") for x in (first, second)]
        np.testing.assert_array_equal(*ranks)


@pytest.mark.parametrize("config", POWERS.values(), ids=POWERS.keys())
@pytest.mark.parametrize("factor", [2.0**-40, 0.5, 2.0**60])
def test_a_power_of_two_on_the_whole_matrix_changes_no_bit(config, factor):
    scores = draw_scores(5, 10)
    _, plain = run_walk(scores, config)
    _, scaled = run_walk(scores, config, matrix_scale=factor)
    np.testing.assert_array_equal(plain, scaled)


@given(
    first=st.integers(0, NUM_BLOCKS - 6),
    name=st.sampled_from(["paper", "odd relu power", "damped"]),
)
def test_rows_may_be_walked_in_any_grouping(first, name):
    config = WALKS[name]
    scores = softer(draw_scores(6, 10, decades=0.5), config)
    _, whole = run_walk(scores, config)
    _, chunk = run_walk(scores, config, rows=range(first, first + 6))
    np.testing.assert_allclose(chunk, whole[:, first : first + 6], **tolerance("scores"))


@pytest.mark.parametrize("config", WALKS.values(), ids=WALKS.keys())
def test_later_rows_and_future_blocks_never_enter(config):
    scores = softer(draw_scores(7, 10, decades=1.0), config)
    _, plain = run_walk(scores, config)
    changed = scores.copy()
    changed[:, 15:] = 1e6 * (1.0 + changed[:, 15:])
    future = np.triu(np.ones((NUM_BLOCKS, NUM_BLOCKS), bool), 1)
    changed[:, future] = 1e9
    _, states = run_walk(changed, config)
    np.testing.assert_array_equal(states[:, :15], plain[:, :15])


def test_rows_without_positive_entries_select_by_their_scores():
    config = WALKS["relu power"]
    scores = -np.abs(draw_scores(10, 10)) - np.tril(np.ones((NUM_BLOCKS, NUM_BLOCKS), np.float32))
    scores[:, 12] = np.abs(scores[:, 12])
    selecting, states = run_walk(scores, config)
    for layer in range(10):
        for row in (0, 5, 23):
            upto = slice(row + 1)
            assert (states[layer, row] == 0.0).all()
            np.testing.assert_array_equal(selecting[layer, row, upto], scores[layer, row, upto])
    assert (states[:, 12].max(-1) > 0.0).all()


@pytest.mark.parametrize("config", WALKS.values(), ids=WALKS.keys())
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_no_entries(config, what):
    scores = softer(draw_scores(11, 10, decades=0.5), config)
    plain = run_walk(scores, config)[1]
    scores[2:, 15:, 15] = what  # a key from the third layer on
    scores[4, 20, :] = what  # a query of one layer
    selecting, states = run_walk(scores, config)
    assert np.isfinite(states).all()
    np.testing.assert_array_equal(states[:, :15], plain[:, :15])
    assert_equal_the_oracle(states, scores, config)
