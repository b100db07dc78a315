"""Quantized keys: their accuracy in any order of arrival, and the scores from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import slow_unless

from sketchwalk_jax import algorithm
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.quantized_keys import NO_KEY, QuantizedKeys, encode, round_queries

SIZE, BLOCKS, KV_HEADS, CHANNELS = 16, 6, 2, 8
LENGTHS = np.array([5 * SIZE + 7, 3 * SIZE])


@jax.jit
def add_keys(stored, key, span):
    return stored.add(key, span)


def draw(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(len(LENGTHS), BLOCKS * SIZE, KV_HEADS, CHANNELS)) * scale
    return (key + 3.0 * rng.normal(size=(1, 1, KV_HEADS, CHANNELS))).astype(np.float32)


def empty(dtype=jnp.float32):
    return QuantizedKeys.zeros(
        batch=len(LENGTHS),
        num_blocks=BLOCKS,
        block_size=SIZE,
        num_kv_heads=KV_HEADS,
        num_channels=CHANNELS,
        dtype=dtype,
    )


def span(starts, ends):
    """Returns the span from `starts` to `ends` of each sequence, on block boundaries."""
    first = starts // SIZE
    width = int((-(-ends // SIZE) - first).max()) * SIZE
    place = first[:, None] * SIZE + np.arange(width)[None]
    valid = (place >= starts[:, None]) & (place < ends[:, None])
    first, ends = (jnp.asarray(x, jnp.int32) for x in (first, ends))
    return Span(first, jnp.asarray(valid), ends, ends), place


def add(stored, key, starts, ends):
    one, place = span(starts, ends)
    own = np.take_along_axis(key, np.minimum(place, key.shape[1] - 1)[..., None, None], axis=1)
    own = np.where(np.asarray(one.valid)[..., None, None], own, np.nan)  # padding must not be read
    return add_keys(stored, own, one)


def assert_same(found, wanted):
    for name in ("quantized", "zero_point", "scale_exponent"):
        a, b = (np.asarray(getattr(x, name)).astype(np.float32) for x in (found, wanted))
        np.testing.assert_array_equal(a, b, err_msg=name)


CUTS = [(5, 9, 3 * SIZE - 1), (), (2 * SIZE,), (SIZE - 1, SIZE)]


@pytest.mark.parametrize("cuts", slow_unless(CUTS[0].__eq__, CUTS))
def test_pieces_give_the_quantized_keys_of_the_whole(cuts):
    key, none = draw(), np.zeros_like(LENGTHS)
    whole = add(empty(), key, none, LENGTHS)
    pieces, begin = empty(), none
    for cut in (*cuts, BLOCKS * SIZE):
        end = np.minimum(cut, LENGTHS)
        pieces = add(pieces, key, begin, end)
        begin = end
    assert_same(pieces, whole)


def test_tokens_give_the_quantized_keys_of_the_whole():
    key = draw()
    whole = add(empty(), key, np.zeros_like(LENGTHS), LENGTHS)
    start = np.array([4 * SIZE + 3, 2 * SIZE])
    stored = add(empty(), key, np.zeros_like(start), start)
    for step in range(int((LENGTHS - start).max())):
        position = start + step
        active = jnp.asarray(position < LENGTHS)
        place = np.minimum(position, LENGTHS - 1)
        own = key[np.arange(len(LENGTHS)), place][:, None]
        own = np.where((position < LENGTHS)[:, None, None, None], own, np.float32(np.nan))
        of_token = Span.of_tokens(jnp.asarray(place, jnp.int32), SIZE, active)
        stored = add_keys(stored, own, of_token)
    assert_same(stored, whole)


def test_quantized_keys_are_those_of_the_specification_and_near_the_keys():
    key = draw()
    stored = add(empty(), key, np.zeros_like(LENGTHS), LENGTHS)
    beside = np.asarray(stored.dequantized_offsets(jnp.asarray(0), BLOCKS, jnp.float32))
    zero_point = np.asarray(stored.zero_point.astype(jnp.float32))
    is_key = np.arange(key.shape[1])[None] < LENGTHS[:, None]
    blocks = np.where(is_key[..., None, None], key, np.nan).reshape(-1, SIZE, *key.shape[2:])
    wanted_points, wanted_offsets = algorithm.quantize_keys(jnp.asarray(blocks))
    wanted_points = wanted_points.reshape(zero_point.shape)
    wanted_offsets = wanted_offsets.reshape(key.shape)
    for place, length in enumerate(LENGTHS):
        for begin in range(0, length, SIZE):
            rows, block = slice(begin, min(begin + SIZE, length)), begin // SIZE
            np.testing.assert_array_equal(zero_point[place, block], wanted_points[place, block])
            np.testing.assert_array_equal(beside[place, rows], wanted_offsets[place, rows])
            away = np.abs(beside[place, rows] + zero_point[place, block] - key[place, rows])
            width = np.ptp(key[place, rows], axis=0)
            assert (away <= width / 12 + 0.05).all()  # half a step, plus rounding


@pytest.mark.parametrize("scale", [1e-6, 1e30])
def test_keys_of_any_size_have_quantized_keys(scale):
    key = (np.random.default_rng(0).normal(size=(1, 1, SIZE, 1, 2)) * scale).astype(np.float32)
    quantized, zero_point, scale_exponent = encode(jnp.asarray(key), jnp.ones((1, 1, SIZE), bool))
    assert int(scale_exponent.min()) >= -9 and int(scale_exponent.max()) <= 6
    assert np.isfinite(np.asarray(zero_point.astype(jnp.float32))).all()


def test_a_key_that_is_not_finite_is_replaced_by_the_zero_point():
    key = draw()[:1, :SIZE].copy()
    others = np.delete(key, 3, axis=1)
    key[0, 3, 0, 5] = np.nan
    present = jnp.ones((1, 1, SIZE), bool)
    quantized, zero_point, scale_exponent = encode(jnp.asarray(key[:, None]), present)
    wanted = encode(jnp.asarray(others[:, None]), present[..., 1:])
    np.testing.assert_array_equal(np.asarray(quantized)[0, 0, 0, 3], 0)
    rest = quantized[:, :, :, [*range(3), *range(4, SIZE)]], zero_point, scale_exponent
    for found, alone in zip(rest, wanted, strict=True):
        found, alone = (np.asarray(x.astype(jnp.float32))[0, 0, 0] for x in (found, alone))
        np.testing.assert_array_equal(found, alone)
    key[:] = np.inf
    assert (np.asarray(encode(jnp.asarray(key[:, None]), present)[2]) == NO_KEY).all()


def test_queries_are_rounded_as_in_the_specification():
    query = np.random.default_rng(0).normal(size=(50, CHANNELS)).astype(np.float32)
    query[0], query[1] = 0.0, 448.0
    query[2:20] *= np.logspace(-20, 20, 18)[:, None].astype(np.float32)
    found = np.asarray(round_queries(jnp.asarray(query)))
    np.testing.assert_array_equal(found, algorithm.round_query(jnp.asarray(query)))
    largest = np.abs(query).max(axis=1, keepdims=True)
    assert (np.abs(found - query) <= 2**-4 * np.abs(query) + 2**-17 * largest).all()
