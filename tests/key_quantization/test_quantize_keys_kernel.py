"""The kernel that quantizes keys, against plain JAX.

Runs in the interpreter, as compiled, or on a Hopper GPU.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_draws import KERNELS
from test_prompt_selection_kernels import SIZE
from variants import slow_unless

from sketchwalk_jax import algorithm
from sketchwalk_jax.inference.cached_layer import update_layer_statistics
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.quantized_keys import LayerKeys
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

pytestmark = pytest.mark.interpreted

# Key/value heads, head_dim, type; end of each call (tokens of each sequence).
UPDATED = {
    "one piece": (2, 64, "bfloat16", [(3 * SIZE + 5, 4 * SIZE, 0)]),
    "pieces": (1, 128, "bfloat16", [(70, SIZE, 3), (2 * SIZE, SIZE, 130), (200, 4 * SIZE, 131)]),
    "half precision": (3, 64, "float16", [(5, 4 * SIZE - 1, 60), (9, 4 * SIZE, SIZE)]),
}


def drawn_keys(kv_heads, head_dim, dtype, kind):
    rng = np.random.default_rng(head_dim + kv_heads)
    key = rng.normal(size=(3, 4 * SIZE, kv_heads, head_dim))
    key += 3.0 * rng.normal(size=(1, 1, kv_heads, head_dim))
    if kind == "hostile":
        slow = head_dim // 4
        key[0, 2, 0, slow], key[0, 67, 0, -1], key[1, 5, 0, slow] = np.nan, np.inf, -np.inf
        key[1, 7, 0, 0] = np.nan  # a fast channel, which is not stored
        key[1, SIZE : 2 * SIZE] = np.nan
        key[1, 2 * SIZE : 3 * SIZE, :, slow] = 0.25
        key[1, 3 * SIZE :] *= np.logspace(-12, 4, SIZE)[:, None, None]
        key[2, :SIZE] = np.round(key[2, :SIZE] * 2.0) / 2.0  # ties between quantized values
        key[2, SIZE, :, slow], key[2, SIZE + 1 : 2 * SIZE, :, slow] = 14.0, 0.0
    with np.errstate(over="ignore"):  # overflows to infinity
        return np.asarray(key, np.float32).astype(jnp.dtype(dtype))


def piece(key, starts, ends):
    """Returns a block-aligned span from `starts` to `ends`, and its keys; padding is NaN."""
    first = starts // SIZE
    width = max(1, int((-(-ends // SIZE) - first).max())) * SIZE
    place = first[:, None] * SIZE + np.arange(width)[None]
    valid = (place >= starts[:, None]) & (place < ends[:, None])
    own = np.take_along_axis(key, np.minimum(place, key.shape[1] - 1)[..., None, None], axis=1)
    own = np.where(valid[..., None, None], own, np.asarray(np.nan, key.dtype))
    first, ends = (jnp.asarray(x, jnp.int32) for x in (first, ends))
    return jnp.asarray(own), Span(first, jnp.asarray(valid), ends, ends)


def assert_same_keys(found, wanted, lengths):
    for name in ("quantized", "zero_point", "scale_exponent"):
        a, b = (np.asarray(getattr(x, name)).astype(np.float32) for x in (found, wanted))
        np.testing.assert_array_equal(a, b, err_msg=name)
    a, b = (np.asarray(x.unfinished, np.float32) for x in (found, wanted))
    size = a.shape[1]
    is_there = (np.arange(size)[None] < (lengths % size)[:, None])[..., None, None]
    np.testing.assert_array_equal(np.where(is_there, a, 0.0), np.where(is_there, b, 0.0))


@jax.jit
def dequantized_offsets(stored):
    return stored.dequantized_offsets(jnp.int32(0), stored.num_blocks, jnp.float32)


def assert_keys_of_specification(stored, key, lengths, maker):
    """Compares op by op, so that no compiler fuses two roundings."""
    is_key = np.arange(key.shape[1])[None] < np.asarray(lengths)[:, None]
    keys = jnp.where(is_key[..., None, None], jnp.asarray(key), jnp.asarray(jnp.nan, key.dtype))
    keys = keys[..., algorithm.slow_channels(key.shape[-1])]
    wanted, offsets = algorithm.quantize_keys(keys.reshape(-1, SIZE, *keys.shape[2:]))
    wanted = np.asarray(wanted).reshape(stored.zero_point.shape)
    # A block without a finite key has zero point 0 and NaN offsets.
    offsets = np.asarray(offsets).reshape(keys.shape)
    has_key = np.isfinite(wanted).repeat(SIZE, axis=1)
    found = np.where(is_key[..., None, None], np.asarray(dequantized_offsets(stored)), 0.0)
    offsets = np.where(has_key, offsets, np.where(is_key[..., None, None], np.nan, 0.0))
    is_used = is_key[:, ::SIZE, None, None]
    zero_point = np.where(is_used, np.asarray(stored.zero_point).astype(np.float32), 0.0)
    wanted = np.where(is_used, np.nan_to_num(wanted), 0.0)
    np.testing.assert_array_equal(zero_point, wanted, err_msg=f"zero points, {maker}")
    np.testing.assert_array_equal(found, offsets, err_msg=f"offsets, {maker}")


@functools.partial(jax.jit, static_argnames=("policy", "kernel_config"))
def update_statistics(policy, key, stored, span, *, kernel_config):
    return policy.update_statistics(key, key, stored, span=span, kernel_config=kernel_config)


def update_with_and_without(policy, own, pair, span, *, key, ends):
    """Adds keys to the codes of the kernel and of plain JAX, which must be the same."""
    pair = [
        update_statistics(policy, jnp.asarray(own), stored, span, kernel_config=kernel_config)
        for stored, kernel_config in zip(pair, (KERNELS, None), strict=True)
    ]
    for stored, maker in zip(pair, ("kernel", "plain JAX"), strict=True):
        assert_keys_of_specification(stored, key, ends, maker)
    assert_same_keys(*pair, ends)
    return pair


@pytest.mark.parametrize("kind", slow_unless("hostile".__eq__, ["random", "hostile"]))
@pytest.mark.parametrize("case", slow_unless("one piece".__eq__, UPDATED))
def test_quantized_keys_are_those_of_plain_jax(case, kind):
    kv_heads, head_dim, dtype, calls = UPDATED[case]
    key = drawn_keys(kv_heads, head_dim, dtype, kind)
    policy = SketchWalkConfig.recommended()
    shape = LayerShape(kv_heads, kv_heads, head_dim, jnp.dtype(dtype))
    pair = [policy.init_statistics(shape, batch=3, num_blocks=4)] * 2
    starts = np.zeros(3, int)
    for ends in map(np.array, calls):
        ends = np.maximum(ends, starts)
        own, span = piece(key, starts, ends)
        pair = update_with_and_without(policy, own, pair, span, key=key, ends=ends)
        starts = ends


@pytest.mark.parametrize("kind", slow_unless("hostile".__eq__, ["random", "hostile"]))
@pytest.mark.parametrize("head_dim", slow_unless((64).__eq__, [64, 128]))
def test_quantized_keys_of_tokens_are_those_of_plain_jax(head_dim, kind):
    key = drawn_keys(2, head_dim, "bfloat16", kind)
    policy, shape = SketchWalkConfig.recommended(), LayerShape(2, 2, head_dim, jnp.bfloat16)
    stored = policy.init_statistics(shape, batch=3, num_blocks=4)
    starts = np.array([60, 2 * SIZE, 0])
    own, span = piece(key, np.zeros(3, int), starts)
    pair = [update_statistics(policy, own, stored, span, kernel_config=None)] * 2
    for turn in range(6):
        active = np.array([True, True, turn % 2 == 0])
        own = key[np.arange(3), starts][:, None]
        own = np.where(active[:, None, None, None], own, np.asarray(np.nan, own.dtype))
        span = Span.of_tokens(jnp.asarray(starts, jnp.int32), SIZE, jnp.asarray(active))
        starts = starts + active
        pair = update_with_and_without(policy, own, pair, span, key=key, ends=starts)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2 * SIZE, 1])
def test_quantized_keys_of_one_layer_leave_the_others_alone(tokens):
    key, policy = drawn_keys(2, 64, "bfloat16", "random"), SketchWalkConfig.recommended()
    shape = LayerShape(2, 2, 64, jnp.bfloat16)
    one = policy.init_statistics(shape, batch=3, num_blocks=4)
    rng = np.random.default_rng(0)
    before = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(0, 99, (3, *x.shape))).astype(x.dtype), one
    )
    ends = np.array([tokens, tokens, 1])
    own, span = piece(key, np.zeros(3, int), ends)
    if tokens == 1:
        own, span = own[:, :1], Span.of_tokens(jnp.asarray(ends - 1, jnp.int32), SIZE)

    @functools.partial(jax.jit, static_argnames="kernel_config")
    def update_second(statistics, *, kernel_config):
        where = {"index": jnp.asarray(1, jnp.int32), "span": span, "policy": policy}
        one, stacked = update_layer_statistics(
            statistics, own, own, **where, kernel_config=kernel_config
        )
        return one.take() if isinstance(one, LayerKeys) else one, stacked

    found, wanted = (update_second(before, kernel_config=one) for one in (KERNELS, None))
    found, wanted, before = jax.device_get((found, wanted, before))
    assert_same_keys(found[0], wanted[0], ends)
    for layer in range(3):
        take = functools.partial(jax.tree.map, operator.itemgetter(layer))
        assert_same_keys(take(found[1]), take(wanted[1]), ends)
    np.testing.assert_array_equal(
        np.asarray(found[1].unfinished[::2], np.float32),
        np.asarray(before.unfinished[::2], np.float32),
    )


@pytest.mark.parametrize(
    ("dtype", "head_dim", "size"),
    [
        (jnp.bfloat16, 64, 32),
        pytest.param(jnp.float32, 64, 64, marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, 32, 64, marks=pytest.mark.slow),
    ],
)
def test_quantized_keys_that_the_kernel_does_not_take_are_made_in_plain_jax(dtype, head_dim, size):
    policy = SketchWalkConfig.recommended(block_size=size, representatives=4)
    shape = LayerShape(1, 1, head_dim, dtype)
    stored = policy.init_statistics(shape, batch=1, num_blocks=2)
    key = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2 * size, 1, head_dim)), dtype)
    end = jnp.array([2 * size], jnp.int32)
    span = Span(jnp.zeros_like(end), jnp.ones((1, 2 * size), bool), end, end)
    stacked = jax.tree.map(lambda x: x[None], stored)
    layer = jnp.zeros((), jnp.int32)
    for kernel_config in (KERNELS, None):
        where = {"layer": layer, "span": span, "kernel_config": kernel_config}
        assert policy.in_place.update_statistics(key, stacked, **where) is None
    found, wanted = (
        update_statistics(policy, key, stored, span, kernel_config=one) for one in (KERNELS, None)
    )
    assert_same_keys(found, wanted, np.array([2 * SIZE]))
