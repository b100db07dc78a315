"""The kernels that write a decoded token to the caches, against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_draws import KERNELS, needs_hopper
from variants import slow_unless

from sketchwalk_jax.inference.cache import write_layer
from sketchwalk_jax.pallas_kernels.key_quantization import api
from sketchwalk_jax.policies.base import LayerShape, Span, TokenWrite
from sketchwalk_jax.policies.recommended import RecommendedConfig

pytestmark = [pytest.mark.interpreted, needs_hopper]

SIZE, BLOCKS, LAYERS = 64, 2, 3
# A block's first token, the last that fits, one that does not fit, an ended sequence.
POSITIONS, ACTIVE = (SIZE, BLOCKS * SIZE - 1, BLOCKS * SIZE, 5), (True, True, True, False)
SMALL = (4, 32, "float32")  # heads, head_dim, type


def draw(kv_heads, head_dim, dtype="bfloat16"):
    rng = np.random.default_rng(head_dim)
    cache = (LAYERS, len(POSITIONS), BLOCKS * SIZE, kv_heads, head_dim)
    token = (len(POSITIONS), 1, kv_heads, head_dim)
    return [jnp.asarray(rng.normal(size=size), dtype) for size in (token, token, cache, cache)]


def token_span():
    return Span.of_tokens(jnp.asarray(POSITIONS, jnp.int32), SIZE, jnp.asarray(ACTIVE))


@jax.jit
def write_plainly(key, value, keys, values, layer):
    span = token_span()
    where = {"layer": layer, "start": span.start(SIZE), "span": span}
    return write_layer(keys, key, **where), write_layer(values, value, **where)


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, other)))


@pytest.mark.parametrize("case", slow_unless(SMALL.__eq__, [SMALL, (2, 128, "bfloat16")]))
def test_a_token_is_written_as_in_plain_jax(case, capfd):
    key, value, *caches = draw(*case)

    @jax.jit
    def write(key, value, keys, values, layer):
        write = TokenWrite(value, keys, values, layer)
        return api.write_token(key, write, token_span(), kernel_config=KERNELS)

    layer = jnp.asarray(1, jnp.int32)
    assert_equal(write(key, value, *caches, layer), write_plainly(key, value, *caches, layer))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("head_dim", slow_unless((64).__eq__, [64, 128]))
def test_a_token_is_written_in_the_launch_that_codes_it(head_dim, capfd):
    key, value, *caches = draw(2, head_dim)
    policy, span, rng = RecommendedConfig(), token_span(), np.random.default_rng(0)
    shape = LayerShape(2, 2, head_dim, jnp.bfloat16)
    one = policy.init_statistics(shape, batch=len(POSITIONS), num_blocks=BLOCKS)
    codes = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(0, 99, (2, *x.shape))).astype(x.dtype), one
    )
    options = {"layer": jnp.asarray(0, jnp.int32), "span": span, "kernel_config": KERNELS}
    layer = jnp.asarray(2, jnp.int32)  # dense layers come first in the caches

    @jax.jit
    def append(key, value, keys, values, codes):
        write = TokenWrite(value, keys, values, layer)
        return policy.in_place.update_statistics(key, codes, **options, write=write)

    update_statistics = jax.jit(functools.partial(policy.in_place.update_statistics, **options))
    found, *written = append(key, value, *caches, codes)
    assert_equal(written, write_plainly(key, value, *caches, layer))
    assert_equal(jax.tree.leaves(found), jax.tree.leaves(update_statistics(key, codes)))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(("kv_heads", "dtype"), [(3, "bfloat16"), (2, "float32")])
def test_what_the_kernel_does_not_take_it_leaves(kv_heads, dtype):
    key, value, *caches = draw(kv_heads, 64)
    write = TokenWrite(value, *(x.astype(dtype) for x in caches), jnp.asarray(0, jnp.int32))
    assert api.write_token(key, write, token_span(), kernel_config=KERNELS) is None
