"""Block means and the subsampled randomised Hadamard transform."""

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from tolerances import tolerance

from sketchwalk_jax import algorithm, sketch
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
@pytest.mark.parametrize("sketch_dim", [1, 16, 64])
def test_srht_is_the_documented_draw(head_dim, sketch_dim):
    for seed in (0, 1, 12345):
        actual = sketch.srht_matrix(head_dim, sketch_dim, seed)
        assert actual.shape == (head_dim, sketch_dim) and actual.dtype == np.float32
        np.testing.assert_allclose(
            actual, algorithm.srht_matrix(head_dim, sketch_dim, seed), rtol=1e-6
        )


def test_srht_draw_does_not_change_between_versions():
    # A saved cache is readable only with the draw that wrote it.
    omega = sketch.srht_matrix(128, 64, seed=0)
    assert np.sign(omega[:8, 0]).tolist() == [1, -1, 1, 1, -1, 1, -1, 1]
    assert np.sign(omega[3, :8]).tolist() == [1, -1, -1, -1, 1, 1, 1, -1]
    np.testing.assert_allclose(np.abs(omega), 1 / 8, rtol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "sketch_dim"), [(32, 64), (64, 64), (128, 128), (96, 128), (256, None)]
)
def test_no_projection_where_the_sketch_is_not_smaller(head_dim, sketch_dim):
    omega = sketch.srht_matrix(head_dim, sketch_dim, 0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, head_dim)), jnp.float32)
    np.testing.assert_array_equal(sketch.project(x, omega), x)
    assert sketch.sketch_size(head_dim, sketch_dim) == head_dim
    np.testing.assert_array_equal(
        algorithm.srht_matrix(head_dim, sketch_dim, 0), np.eye(head_dim, dtype=np.float32)
    )


def test_sketched_inner_products_are_unbiased():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 8, 128)).astype(np.float32)
    key[:4] = query[:4] + 0.5 * key[:4]  # nearly parallel to nearly orthogonal
    draws = np.array(
        [
            np.sum((query @ omega) * (key @ omega), axis=1)
            for omega in (sketch.srht_matrix(128, 64, seed) for seed in range(2000))
        ]
    )
    standard_error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    bias = np.abs(draws.mean(axis=0) - np.sum(query * key, axis=1))
    assert (bias < 4.0 * standard_error).all()


def fast_scores(query, key, lengths, config):
    """Computes block scores in the library's steps, from padded batches `[B, T, heads, H]`."""
    size, head_dim = config.block_size, query.shape[-1]
    omega = sketch.srht_matrix(head_dim, config.sketch_dim, config.seed)
    valid = jnp.arange(query.shape[1])[None, :] < lengths[:, None]

    def means(x):
        sums = sketch.project(sketch.block_sums(sketch.head_means(x), valid, size), omega)
        return sketch.block_means(sums, lengths, size)

    return sketch.block_scores(means(query), means(key), head_dim)


def assert_scores_equal(actual, expected):
    """Errors are relative to the largest score: small ones are differences of large terms."""
    num_blocks, largest = len(expected), np.abs(expected).max()
    causal = np.tril(actual[:num_blocks, :num_blocks])
    np.testing.assert_allclose(causal / largest, expected / largest, **tolerance("scores"))


SCORES = jax.jit(fast_scores, static_argnames="config")


@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (3, 64), (4, 128), (7, 96), (8, 256)])
def test_scores_equal_the_reference(group, head_dim):
    config = SketchWalkConfig.paper(block_size=16)
    layers = cases.draw_layers(
        0, num_layers=1, num_tokens=80, heads=cases.HEADS[group], head_dim=head_dim
    )
    query, key = layers.queries[0], layers.keys[0]
    actual = SCORES(query[None], key[None], jnp.array([71], jnp.int32), config=config)
    expected = reference.block_scores(query[:71], key[:71], config)
    assert_scores_equal(actual[0], expected)


@given(lengths=st.lists(st.integers(1, 80), min_size=3, max_size=3))
@pytest.mark.slow
def test_ragged_batches_score_as_single_sequences(lengths):
    config = SketchWalkConfig.paper(block_size=16, sketch_dim=8)
    layers = cases.draw_layers(1, num_layers=3, num_tokens=80)
    query, key = (np.stack(x).copy() for x in (layers.queries, layers.keys))
    for row, length in enumerate(lengths):
        query[row, length:] = key[row, length:] = np.nan
    actual = SCORES(query, key, jnp.array(lengths, jnp.int32), config=config)
    for row, length in enumerate(lengths):
        expected = reference.block_scores(query[row, :length], key[row, :length], config)
        assert_scores_equal(actual[row], expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sketches_are_float32_whatever_the_model_computes_in(dtype):
    config = SketchWalkConfig.paper(block_size=16, sketch_dim=16)
    layers = cases.draw_layers(3, num_layers=1, num_tokens=64)
    query, key = (jnp.asarray(x[0], dtype) for x in (layers.queries, layers.keys))
    actual = SCORES(query[None], key[None], jnp.array([64], jnp.int32), config=config)
    assert actual.dtype == jnp.float32
    expected = reference.block_scores(query, key, config)  # the same rounded inputs
    assert_scores_equal(actual[0], expected)
