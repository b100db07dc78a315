"""Rotary position embedding (RoPE): configuration, frequencies, and rotation."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from sketchwalk_jax.validation import check_choice, check_flag, check_integer, check_number

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of a model.

    The frequencies are `theta ** (-2 i / H)` for `i` in `0..H/2-1`, rescaled according to
    `rope_type` so that a model trained on a short context serves a longer one.

    Attributes:
      rope_type: "default", "linear", "llama3" or "yarn".
      theta: Base wavelength, larger than 1.
      factor: How many times the context is stretched (linear, llama3, yarn).
      low_freq_factor: llama3: wavelengths above `original / low_freq_factor` are stretched.
      high_freq_factor: llama3: wavelengths below `original / high_freq_factor` are kept.
      original_max_position_embeddings: Context before stretching, in tokens (llama3, yarn).
      attention_factor: yarn: multiplier of cos and sin; None derives it from `factor`.
      beta_fast: yarn: turns over the original context above which a frequency is kept.
      beta_slow: yarn: turns below which a frequency is stretched by the whole factor.
      mscale: yarn: numerator scale of the derived attention factor, used with `mscale_all_dim`.
      mscale_all_dim: yarn: denominator scale of the derived attention factor.
      truncate: yarn: whether the bounds of the ramp are rounded to whole dimensions.

    Raises:
      ValueError: For a value outside its range or a missing original context.

    Example:
      >>> RopeConfig(theta=500000.0).rope_type
      'default'
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Checks every field once."""
        check_choice("rope_type", self.rope_type, ROPE_TYPES)
        check_number("theta", self.theta, "(1, 1e30)")  # the angles are float32
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_number(name, getattr(self, name), "[1e-30, 1e30)")  # 1e-320 in JSON overflows
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "(-1e30, 1e30)")
        check_flag("truncate", self.truncate)
        original = self.original_max_position_embeddings
        check_integer("original_max_position_embeddings", original, is_optional=True)
        if self.rope_type in ("llama3", "yarn") and original is None:
            raise ValueError(
                f"original_max_position_embeddings must be a positive number of tokens for "
                f"rope_type {self.rope_type!r}, got {original}"
            )
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "high_freq_factor must be larger than a positive low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )

    def stretched_context(self, max_position_embeddings: int) -> int:
        """Returns the context after scaling, in tokens.

        Args:
          max_position_embeddings: Context that the checkpoint declares, in tokens.

        Returns:
          The declared context, or its linear or yarn stretch if longer.

        Example:
          >>> rope = RopeConfig(rope_type="yarn", factor=4.0,
          ...                   original_max_position_embeddings=32768)
          >>> rope.stretched_context(32768)
          131072
        """
        stretched = {
            "linear": max_position_embeddings * self.factor,
            "yarn": (self.original_max_position_embeddings or 0) * self.factor,
        }.get(self.rope_type, 0)
        return max(max_position_embeddings, int(stretched))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float32[np.ndarray, " half"], float]:
    """Computes the angle by which each pair of channels turns per token.

    `f_i = theta ** (-2 i / H)` for `i` in `0..H/2-1`, then by type:

    * linear: `f_i / factor`;
    * llama3: wavelengths `2 pi / f_i` above `original / low_freq_factor` are stretched by
      `factor`, those below `original / high_freq_factor` kept, those between blended;
    * yarn (arXiv:2309.00071): a linear ramp over `i` blends kept and stretched frequencies, and
      cos and sin are multiplied by `0.1 ln(factor) + 1`.

    Everything is float32, in transformers' order of operations, on the host. Nothing is cached.

    Args:
      rope: Type and parameters.
      head_dim: Width of a head, H; even.

    Returns:
      The frequencies in radians per token, `[H / 2]`, and the factor of cos and sin.

    Raises:
      ValueError: If head_dim is not a positive even number.

    Example:
      >>> frequencies, factor = rope_frequencies(RopeConfig(theta=10000.0), 4)
      >>> frequencies.tolist(), factor
      ([1.0, 0.009999999776482582], 1.0)
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be a positive even number, got {head_dim}")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # float32 powers differ in the last bit between libraries; the rounded float64 power does not.
    wavelengths = (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / wavelengths
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(wavelengths, rope, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def apply_rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], *, rope: RopeConfig
) -> Float[Array, "B T N H"]:
    """Rotates queries or keys by their positions.

    Channel `i` and channel `i + H/2` form a pair (half-split, as in Hugging Face weights):
    `(a, b) -> (a cos - b sin, b cos + a sin)` with angle `position * f_i`.

    Args:
      x: Queries or keys.
      positions: Position of each token, counted from 0.
      rope: Type and parameters.

    Returns:
      The rotated array, in the dtype of `x`. Angles, cos and sin are float32; cos and sin are
      then rounded to the dtype of `x`, as transformers does.

    Example:
      >>> x = jnp.ones((1, 2, 1, 2))
      >>> apply_rope(x, jnp.array([[0, 1]]), rope=RopeConfig())[0, 0, 0].tolist()
      [1.0, 1.0]
    """
    cos, sin = rope_cos_sin(positions, rope=rope, head_dim=x.shape[-1])
    return rotate(x, cos, sin)


def rope_cos_sin(
    positions: Int[Array, "B T"], *, rope: RopeConfig, head_dim: int
) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
    """Computes cos and sin of every angle once, for use in every layer with `rotate`.

    Args:
      positions: Position of each token, counted from 0.
      rope: Type and parameters.
      head_dim: Width of a head, H; even.

    Returns:
      cos and sin, float32, times the attention factor of yarn.

    Example:
      >>> cos, sin = rope_cos_sin(jnp.array([[0, 3]]), rope=RopeConfig(), head_dim=8)
      >>> cos.shape, sin[0, 0].tolist()
      ((1, 2, 4), [0.0, 0.0, 0.0, 0.0])
    """
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, :]
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rotate(
    x: Float[Array, "B T N H"],
    cos: Float32[Array, "B T half"],
    sin: Float32[Array, "B T half"],
) -> Float[Array, "B T N H"]:
    """Rotates each pair of channels `(i, i + H/2)` of `x` by precomputed angles.

    Args:
      x: Queries or keys.
      cos: Cosines from `rope_cos_sin`.
      sin: Sines from `rope_cos_sin`.

    Returns:
      The rotated array, in the dtype of `x`.

    Example:
      >>> x = jnp.array([[[[1.0, 2.0]]]])
      >>> rotate(x, jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))).tolist()
      [[[[-2.0, 1.0]]]]
    """
    cos = cos[:, :, None, :].astype(x.dtype)
    sin = sin[:, :, None, :].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    original = rope.original_max_position_embeddings
    assert original is not None  # RopeConfig checks it
    wavelengths = np.float32(2 * math.pi) / frequencies
    is_low = wavelengths > np.float32(original / rope.low_freq_factor)
    is_high = wavelengths < np.float32(original / rope.high_freq_factor)
    factor = np.float32(rope.factor)
    kept = np.float32(original) / wavelengths - np.float32(rope.low_freq_factor)
    kept = kept / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blended = (np.float32(1.0) - kept) * frequencies / factor + kept * frequencies
    return np.where(is_low, frequencies / factor, np.where(is_high, frequencies, blended))


def _yarn(wavelengths: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    original = rope.original_max_position_embeddings
    assert original is not None  # RopeConfig checks it

    def dimension(turns: float) -> float:
        # The dimension whose frequency makes `turns` turns over the original context.
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)
    kept = np.float32(1.0) - np.clip(ramp / np.float32(high - low), 0, 1)
    stretched = np.float32(1.0) / (np.float32(rope.factor) * wavelengths)
    unchanged = np.float32(1.0) / wavelengths
    return stretched * (np.float32(1.0) - kept) + unchanged * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
