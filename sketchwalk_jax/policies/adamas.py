"""Adamas (arXiv:2510.18413): tokens ranked by the distance of two-bit Hadamard codes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import DecodePolicy, LayerShape, Span


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamasConfig(DecodePolicy):
    """Keeps the tokens whose codes have the smallest distance from the query's code.

    `x' = x Hadamard(H) / sqrt(H)` is the orthonormal Hadamard transform. A channel's two-bit code
    is the number of `thresholds` below it. The distance of a key from a query is
    `Σ_d |code(q'_d) - code(k'_d)|`. Every query head keeps the `budget` tokens of smallest
    distance; the earlier token wins a tie. A key's code takes an eighth of the bytes of a bfloat16
    key.

    Prompts are read densely. Lists hold tokens, not blocks, so attention over them runs on XLA;
    `block_size` only determines the layout of prompts.

    The thresholds are absolute, so thresholds for one model may put every channel of another into
    two of the four codes. `calibrate_thresholds` finds a model's own; the evaluation uses it.

    Attributes:
      block_size: Tokens per block; the cache holds a multiple of it.
      density: Share of the causal tokens that every query head keeps, in (0, 1]; rounded up.
      token_budget: If given, number of tokens to keep at every step, instead of the density.
      force_current: Whether the current token is always kept, inside the budget.
      dense_layers: Leading layers that stay dense.
      thresholds: Three ascending limits between the codes 0, 1, 2, 3, in units of keys.

    Raises:
      ValueError: If a field is outside its range, or a model's head_dim is not a power of two of at
        least 8.

    Example:
      >>> AdamasConfig(density=0.1).budget(1000)[-1]
      np.int32(100)
    """

    heads_on_mesh = "own"
    blocks_on_mesh = "keys"

    thresholds: tuple[float, float, float] = (-10.0, 0.0, 10.0)

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        try:
            low, middle, high = map(float, self.thresholds)
        except (TypeError, ValueError):
            low = middle = high = math.nan
        if not -math.inf < low < middle < high < math.inf:
            raise ValueError(
                f"thresholds must be three ascending finite numbers, got {self.thresholds!r}"
            )
        object.__setattr__(self, "thresholds", (low, middle, high))  # hashable

    @property
    def unit_size(self) -> int:
        """Lists hold single tokens."""
        return 1

    @property
    def statistics_key(self) -> tuple[tuple[str, Any], ...]:
        """The thresholds, which change the meaning of codes."""
        return (("thresholds", self.thresholds),)

    def init_statistics(
        self, shape: LayerShape, *, batch: int, num_blocks: int
    ) -> UInt8[Array, "B J Q K 2 W"]:
        """Returns codes of zero."""
        _check_head_dim(shape.head_dim)
        size = (batch, num_blocks, self.block_size, shape.num_kv_heads, 2, shape.head_dim // 8)
        return jnp.zeros(size, jnp.uint8)

    def update_statistics(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: UInt8[Array, "B J Q K 2 W"],
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> UInt8[Array, "B J Q K 2 W"]:
        """Writes the codes of the span's keys."""
        batch, tokens = span.valid.shape
        positions = (
            span.start(self.block_size)[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
        )
        by_token = statistics.reshape(batch, -1, *statistics.shape[3:])
        places = jnp.where(span.valid, positions, by_token.shape[1])  # beyond the end: dropped
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
        codes = encode_channels(key, self.thresholds)
        return by_token.at[sequence, places].set(codes, mode="drop").reshape(statistics.shape)

    def score(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: UInt8[Array, "B J Q K 2 W"],
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> Float[Array, "B N 1 S"]:
        """Negative distance of every token's code from the query's code, in every head."""
        batch, _, num_heads, _ = query.shape
        kv_heads, planes = statistics.shape[3], statistics.shape[4:]
        codes = encode_channels(query, self.thresholds).reshape(batch, kv_heads, -1, 1, *planes)
        keys = jnp.swapaxes(statistics.reshape(batch, -1, kv_heads, *planes), 1, 2)
        distances = code_distance(codes, keys[:, :, None])
        return -distances.astype(jnp.float32).reshape(batch, num_heads, 1, -1)


def _check_head_dim(head_dim: int) -> None:
    if head_dim < 8 or head_dim & (head_dim - 1):
        raise ValueError(
            "head_dim must be a power of two of at least 8 for the Hadamard transform of adamas, "
            f"got {head_dim}"
        )


def hadamard_transform(x: Float[Array, "*axes H"]) -> Float[Array, "*axes H"]:
    """Computes `x Hadamard(H) / sqrt(H)` in float32, in `log2(H)` rounds of sums and differences.

    Args:
      x: Vectors; `H` is a power of two.

    Returns:
      Vectors of the same length.
    """
    shape, half = x.shape, 1
    x = x.astype(jnp.float32)
    while half < shape[-1]:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([one + other, one - other], axis=-2)
        half *= 2
    return x.reshape(shape) / math.sqrt(shape[-1])


def encode_channels(
    x: Float[Array, "*axes H"], thresholds: tuple[float, float, float]
) -> UInt8[Array, "*axes 2 W"]:
    """Codes 0 to 3 of the transformed channels, as a plane of high bits and one of low bits.

    Args:
      x: Queries or keys after rotary embedding.
      thresholds: Ascending limits; a channel's code is the number of limits below it.

    Returns:
      Codes, eight channels per byte, `W = H / 8`.
    """
    x = hadamard_transform(x)
    above: list[Bool[Array, "*axes H"]] = [x > limit for limit in thresholds]
    low = (above[0] & ~above[1]) | above[2]
    return jnp.packbits(jnp.stack([above[1], low], axis=-2), axis=-1)


def code_distance(
    one: UInt8[Array, "*#axes 2 W"], other: UInt8[Array, "*#axes 2 W"]
) -> Int[Array, "*#axes"]:
    """Computes `Σ_d |a_d - b_d|` of two-bit codes, as `Σ_{t=1..3} [a >= t] xor [b >= t]`.

    Args:
      one: Codes from `encode_channels`.
      other: Codes that broadcast against them.

    Returns:
      Distances from 0 to `3 H`, int32.
    """

    def at_least(codes: UInt8[Array, "*axes 2 W"]) -> tuple[Array, Array, Array]:
        high, low = codes[..., 0, :], codes[..., 1, :]
        return high | low, high, high & low

    differing = [
        jax.lax.population_count(a ^ b).astype(jnp.int32)
        for a, b in zip(at_least(one), at_least(other), strict=True)
    ]
    return jnp.sum(sum(differing[1:], differing[0]), axis=-1)


def calibrate_thresholds(key: Float[Array, "*axes H"]) -> tuple[float, float, float]:
    """Thresholds that put a quarter of the keys' transformed channels into each code.

    Args:
      key: Keys after rotary embedding, such as a few thousand tokens of `cache.key`, without
        padding.

    Returns:
      The quartiles, for `AdamasConfig(thresholds=...)`.

    Raises:
      ValueError: If the head_dim is not a power of two.

    Example:
      >>> import jax
      >>> low, middle, high = calibrate_thresholds(jax.random.normal(jax.random.key(0), (999, 32)))
      >>> round(low, 1), abs(round(middle, 1)), round(high, 1)
      (-0.7, 0.0, 0.7)
    """
    low, middle, high = key_quartiles(key).tolist()
    return low, middle, high


def key_quartiles(key: Float[Array, "*axes H"]) -> Float[Array, "3"]:
    """`calibrate_thresholds` for use under `jit`; ignores keys of NaN."""
    _check_head_dim(key.shape[-1])
    return jnp.nanquantile(hadamard_transform(key), jnp.array([0.25, 0.5, 0.75], jnp.float32))
