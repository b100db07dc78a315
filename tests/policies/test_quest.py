"""Quest: its scores bound the scores of their keys."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.quest import QuestConfig, page_scores

HEADS, HEAD_DIM, CAPACITY = (6, 2), 32, 64


@jax.jit
def scores_of(query, key, length):
    """Returns bounds and scores of every page after `length` keys."""
    config = QuestConfig()
    shape = LayerShape(*HEADS, HEAD_DIM, key.dtype)
    bounds = config.init_statistics(shape, batch=1, num_blocks=CAPACITY // 16)
    valid = jnp.arange(CAPACITY, dtype=jnp.int32)[None, :] < length[:, None]
    span = Span(jnp.zeros((1,), jnp.int32), valid, length, length)
    bounds = config.update_statistics(key, key, bounds, span=span)
    return bounds, page_scores(query, bounds)


def draw(seed, dtype):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((1, 1, HEADS[0], HEAD_DIM))
    key = rng.standard_normal((1, CAPACITY, HEADS[1], HEAD_DIM)) * rng.exponential(2.0, HEAD_DIM)
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), length=st.integers(1, CAPACITY))
def test_scores_bound_every_inner_product_of_their_page(dtype, seed, length):
    query, key = draw(seed, dtype)
    bounds, scores = scores_of(query, key, jnp.array([length], jnp.int32))
    assert bounds.lowest.dtype == bounds.highest.dtype == key.dtype
    query, key = (np.asarray(x[0], np.float64) for x in (query, key))
    for head in range(HEADS[0]):
        keys = key[:length, head // 3]
        products = keys @ query[0, head]
        for page in range(-(-length // 16)):
            rows = slice(16 * page, 16 * page + 16)
            rounding = 1e-5 * np.abs(keys[rows] * query[0, head]).sum(1).max()
            assert scores[0, head, page] >= products[rows].max() - rounding
            if len(products[rows]) == 1:  # one key is its own bound
                assert abs(scores[0, head, page] - products[rows][0]) <= rounding


def test_bounds_are_the_extremes_of_the_keys():
    query, key = draw(0, "bfloat16")
    bounds, _ = scores_of(query, key, jnp.array([40], jnp.int32))
    for page, rows in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
        np.testing.assert_array_equal(bounds.lowest[0, page], key[0, rows].min(0))
        np.testing.assert_array_equal(bounds.highest[0, page], key[0, rows].max(0))
    largest = float(jnp.finfo(jnp.bfloat16).max)  # no key is larger, or below its negative
    assert (np.asarray(bounds.lowest[0, 3], np.float32) == largest).all()
    assert (np.asarray(bounds.highest[0, 3], np.float32) == -largest).all()
