"""Rotary embedding: frequencies against transformers, the rotation against its equation."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from parity.rope_cases import ROPE_CASES
from tolerances import tolerance

from sketchwalk_jax.models import ModelConfig, RopeConfig, apply_rope, rope_frequencies
from sketchwalk_jax.models.rope import rope_cos_sin, rotate

TYPES: dict[str, RopeConfig] = {
    "default": RopeConfig(),
    "linear": RopeConfig(rope_type="linear", factor=4.0),
    "llama3": RopeConfig(
        rope_type="llama3", theta=5e5, factor=8.0, original_max_position_embeddings=8192
    ),
    "yarn": RopeConfig(
        rope_type="yarn", theta=1e6, factor=4.0, original_max_position_embeddings=32768
    ),
}


def complex_rotation(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Computes RoPE as multiplication by `exp(i position f)` in float64."""
    frequencies, factor = rope_frequencies(rope, x.shape[-1])
    half = x.shape[-1] // 2
    angles = positions[..., None].astype(np.float64) * frequencies.astype(np.float64)
    pairs = (x[..., :half] + 1j * x[..., half:]) * factor * np.exp(1j * angles)[:, :, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("name", ROPE_CASES)
def test_frequencies_equal_those_of_transformers(repository: Path, name: str):
    golden = np.load(repository / "tests/goldens/rope.npz")
    config = ModelConfig.from_dict(ROPE_CASES[name] | {"model_type": "llama"})
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, golden[name], rtol=2.5e-7, atol=0)
    assert factor == pytest.approx(float(golden[name + ".attention_factor"]), rel=1e-12)
    assert {name.removesuffix(".attention_factor") for name in golden} == set(ROPE_CASES)


@pytest.mark.parametrize("rope_type", TYPES)
def test_rotation_is_multiplication_by_a_complex_phase(rope_type: str):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 5, 3, 16), dtype=np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 63, 100, 31]], np.int32)
    rotated = apply_rope(jnp.asarray(x), jnp.asarray(positions), rope=TYPES[rope_type])
    expected = complex_rotation(x, positions, TYPES[rope_type])
    # At 100 radians, float32 rounds angles by up to 4e-6.
    np.testing.assert_allclose(rotated, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cos_and_sin_are_rounded_before_the_product(dtype: str):
    x = normal((1, 4, 2, 8), dtype=dtype)
    positions = jnp.arange(4)[None]
    rotated = apply_rope(x, positions, rope=RopeConfig())
    assert rotated.dtype == x.dtype
    cos, sin = rope_cos_sin(positions, rope=RopeConfig(), head_dim=8)
    rounded = [table.astype(dtype).astype(jnp.float32) for table in (cos, sin)]
    exact = rotate(x.astype(jnp.float32), *rounded)
    np.testing.assert_allclose(
        rotated.astype(jnp.float32), exact, **tolerance("rope", jnp.dtype(dtype))
    )


@pytest.mark.parametrize("rope_type", TYPES)
def test_scores_depend_on_distance_only(rope_type: str):
    rope = TYPES[rope_type]
    query, key = normal((2, 1, 1, 1, 32), seed=1)

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            apply_rope(x, jnp.array([[position]]), rope=rope)
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
    assert abs(score(9, 4) - score(9, 8)) > 1e-2


def test_angles_are_computed_in_float32_whatever_the_positions_are():
    positions = jnp.array([[131071]], jnp.int32)
    cos, sin = rope_cos_sin(positions, rope=TYPES["llama3"], head_dim=64)
    assert cos.dtype == sin.dtype == jnp.float32
    frequencies, _ = rope_frequencies(TYPES["llama3"], 64)
    angles = np.float32(131071) * frequencies
    np.testing.assert_allclose(cos[0, 0], np.cos(angles.astype(np.float64)), rtol=0, atol=1e-5)


def test_odd_or_empty_heads_raise():
    for head_dim in (0, 7, -2):
        with pytest.raises(ValueError, match="head_dim must be a positive even number"):
            rope_frequencies(RopeConfig(), head_dim)
