"""Adamas: transform, codes and distances against NumPy, and thresholds fitted to a model."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_decode
import tiny
from arrays import normal
from hypothesis import given, settings
from scipy.linalg import hadamard
from tolerances import tolerance

from sketchwalk_jax import init_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import adamas
from sketchwalk_jax.policies.adamas import AdamasConfig, calibrate_thresholds

# Jit whole functions: otherwise each operation would be a program.
code_distance = jax.jit(adamas.code_distance)
encode_channels = jax.jit(adamas.encode_channels, static_argnames="thresholds")
hadamard_transform = jax.jit(adamas.hadamard_transform)

SIZES = (8, 16, 64, 128)
THRESHOLDS = ((-10.0, 0.0, 10.0), (-1.5, 0.25, 3.0))


def integers(seed, *shape):
    """Draws small integers: transforms are exact in float32 where the size is a power of four."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def unpack(codes):
    """Unpacks codes from the two bit planes into numbers `[..., H]`."""
    high, low = np.moveaxis(np.unpackbits(np.asarray(codes), axis=-1), -2, 0)
    return 2 * high.astype(np.int64) + low


@pytest.mark.parametrize("size", SIZES)
def test_the_transform_is_the_orthonormal_hadamard_matrix(size):
    x = integers(0, 3, 2, size)
    wanted = x.astype(np.float64) @ hadamard(size) / np.sqrt(size)
    found = hadamard_transform(jnp.asarray(x))
    np.testing.assert_allclose(found, wanted, **tolerance("scores"))
    np.testing.assert_allclose(found @ found[0, 0], x @ x[0, 0], rtol=1e-5, atol=1e-3)
    assert hadamard_transform(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("thresholds", THRESHOLDS)
@pytest.mark.parametrize("size", [16, 64])
def test_codes_are_those_of_numpy(size, thresholds):
    x = integers(1, 50, 2, size)
    wanted = slow_decode.adamas_codes(x, thresholds)
    assert set(np.unique(wanted)) == {0, 1, 2, 3}
    codes = encode_channels(jnp.asarray(x), thresholds)
    assert codes.shape == (50, 2, 2, size // 8) and codes.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack(codes), wanted)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([8, 64]))
def test_distances_are_sums_of_absolute_differences(seed, size):
    codes = np.random.default_rng(seed).integers(0, 4, (2, 5, size))
    planes = np.stack([codes >> 1, codes & 1], axis=-2).astype(bool)
    one, other = jnp.asarray(np.packbits(planes, axis=-1))
    wanted = np.abs(codes[0][:, None] - codes[1][None]).sum(-1)
    np.testing.assert_array_equal(code_distance(one[:, None], other[None]), wanted)


def test_calibrated_thresholds_use_all_codes_alike():
    key = normal((2000, 2, 64)) * 0.1 + 0.05
    codes = unpack(encode_channels(key, AdamasConfig().thresholds))
    assert set(np.unique(codes)) == {1, 2}  # with the published ones, half of the codes are unused
    thresholds = calibrate_thresholds(key)
    shares = np.bincount(unpack(encode_channels(key, thresholds)).ravel(), minlength=4) / codes.size
    np.testing.assert_allclose(shares, 0.25, atol=1e-3)
    config = AdamasConfig(thresholds=thresholds)
    assert hash(config) == hash(AdamasConfig(thresholds=list(thresholds)))


def test_head_dims_without_a_transform_raise():
    fields = {name: getattr(tiny.MODEL, name) for name in tiny.MODEL.__dataclass_fields__}
    for head_dim in (80, 96, 4):
        model = ModelConfig(**fields | {"head_dim": head_dim})
        with pytest.raises(ValueError, match=f"head_dim must be a power of two .*, got {head_dim}"):
            init_cache(model, AdamasConfig(), batch=1, max_tokens=64)
        with pytest.raises(ValueError, match="head_dim must be a power of two"):
            calibrate_thresholds(jnp.ones((3, head_dim)))
