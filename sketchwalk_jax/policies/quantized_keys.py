"""Keys quantized to four bits relative to a zero point per block, and page scores from them.

A block is stored as a zero point (`zero_point`), a scale `2 ** scale_exponent` and one integer per
key (`quantized`):

    k_s ≈ zero_point + scale · quantized_s,   quantized_s in -7 .. 7

for each channel that the scores use. Half of the channels at four bits take a sixteenth of the
bytes of keys and values in bfloat16. The zero point holds what all keys of a block share (in real
models most of some channels), so four bits suffice. Scales are powers of two, so that `scale ·
quantized` is exact in eight-bit floating point, for tensor cores. Quantized values depend only on
their block's keys, so a complete block never changes, for any division of tokens into chunks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config
from sketchwalk_jax.policies.base import PyTree, Span, take_layer
from sketchwalk_jax.policies.ranks import Heads
from sketchwalk_jax.precision import LARGEST, LARGEST_LOGIT, MASK_VALUE, matmul_precision
from sketchwalk_jax.pytree import register
from sketchwalk_jax.scaled import ceil_log2, power_of_two, to_float8

LARGEST_QUANTIZED = 7
# Range of scales for which `scale · quantized` is exact in float8_e4m3fn: up to 7 · 2^6 = 448, from
# 2^-9.
MIN_EXPONENT, MAX_EXPONENT = -9, 6
# Stands in place of a scale: no key of the block is finite.
NO_KEY = -128


@register
@dataclasses.dataclass(frozen=True)
class QuantizedKeys:
    """Quantized keys of one layer.

    Attributes:
      quantized: Quantized offsets, two in a byte, `[B, J, K, S, C/2]`: channel `c` in the low four
        bits, channel `c + C/2` in the high ones, as two's complements. The bytes of a block and
        head are adjacent, because kernels read them together.
      zero_point: Zero points, midway between the extremes of each channel, bfloat16 `[B, J, K, C]`.
      scale_exponent: Exponents of the scales, int8 `[B, J, K, C]`; `NO_KEY` if a block has no
        finite key.
      unfinished: Exact keys of the last token's block, `[B, S, K, C]`; entries after the last token
        may have any values.
    """

    quantized: UInt8[Array, "B J K S C2"]
    zero_point: Float[Array, "B J K C"]
    scale_exponent: Int8[Array, "B J K C"]
    unfinished: Float[Array, "B S K C"]

    @classmethod
    def zeros(
        cls,
        *,
        batch: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        num_channels: int,
        dtype: DTypeLike,
    ) -> Self:
        """Returns the state without keys."""
        size = (batch, num_blocks, num_kv_heads, num_channels)
        quantized = (batch, num_blocks, num_kv_heads, block_size, num_channels // 2)
        unfinished = (batch, block_size, num_kv_heads, num_channels)
        return cls(
            jnp.zeros(quantized, jnp.uint8),
            jnp.zeros(size, jnp.bfloat16),
            jnp.full(size, NO_KEY, jnp.int8),
            jnp.zeros(unfinished, dtype),
        )

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks, `J`."""
        return self.quantized.shape[1]

    @property
    def block_size(self) -> int:
        """Number of keys in a block."""
        return self.quantized.shape[3]

    def add(self, key: Float[Array, "B T K C"], span: Span) -> Self:
        """Quantizes and adds the keys of a span.

        Args:
          key: Keys of the span's tokens, in the channels that the scores use.
          span: The tokens; padding changes nothing.
        """
        batch, size = self.unfinished.shape[:2]
        sequence = jnp.arange(batch, dtype=jnp.int32)
        key = key.astype(self.unfinished.dtype)
        place = jnp.arange(size, dtype=jnp.int32)[None, :]
        if span.is_token:
            is_new = span.valid & (place == (span.positions % size)[:, None])
            unfinished = jnp.where(is_new[..., None, None], key, self.unfinished)
            rows = jnp.where(
                span.valid, span.rows(size), self.quantized.shape[1]
            )  # invalid: dropped
            present = place <= (span.positions % size)[:, None]
            found = encode(unfinished[:, None], present[:, None])
        else:
            rows = span.rows(size)
            valid = span.valid.reshape(*rows.shape, size)
            blocks = key.reshape(*rows.shape, size, *key.shape[2:])
            # The last call's tokens may have ended inside the first row's block.
            first = jnp.where(valid[:, 0, :, None, None], blocks[:, 0], self.unfinished)
            blocks = blocks.at[:, 0].set(first)
            position = rows[:, :, None] * size + place[:, None]
            found = encode(blocks, position < span.end[:, None, None])
            last = jnp.clip(span.end // size - span.first_block, 0, rows.shape[1] - 1)
            unfinished = jnp.where(
                jnp.any(span.valid, axis=1)[:, None, None, None],
                blocks[sequence, last],
                self.unfinished,
            )
            rows = jnp.where(jnp.any(valid, axis=-1), rows, self.quantized.shape[1])
        where = (sequence[:, None], rows)
        quantized, zero_point, scale_exponent = (
            old.at[where].set(new, mode="drop")
            for old, new in zip(
                (self.quantized, self.zero_point, self.scale_exponent), found, strict=True
            )
        )
        return type(self)(quantized, zero_point, scale_exponent, unfinished)

    def as_layer(self) -> "LayerKeys":
        """Returns these as the only layer of a stack."""
        return LayerKeys(jax.tree.map(lambda x: x[None], self), jnp.zeros((), jnp.int32))

    def dequantized_offsets(
        self, block: Int[Array, ""], count: int, dtype: DTypeLike
    ) -> Float[Array, "B W K C"]:
        """Dequantizes the offsets of `count` blocks, exact in bfloat16; NaN without finite keys.

        Args:
          block: Index of the first block.
          count: Number of blocks `W / S`.
          dtype: Type of the result.
        """
        quantized, scale_exponent = (
            jax.lax.dynamic_slice_in_dim(x, block, count, axis=1)
            for x in (self.quantized, self.scale_exponent)
        )
        signed = jnp.swapaxes(jax.lax.bitcast_convert_type(quantized, jnp.int8), 2, 3)
        low = jnp.right_shift(jnp.left_shift(signed, 4), 4)
        stored = jnp.concatenate([low, jnp.right_shift(signed, 4)], axis=-1)
        scale = jnp.where(
            scale_exponent == NO_KEY, jnp.nan, power_of_two(scale_exponent.astype(jnp.int32))
        )
        found = stored.astype(dtype) * scale.astype(dtype)[:, :, None]
        return found.reshape(found.shape[0], -1, *found.shape[3:])


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    """The quantized keys of one layer, left in place in the arrays of all layers.

    Attributes:
      stack: Quantized keys of all layers, on a leading axis.
      layer: Index of the layer.
    """

    stack: QuantizedKeys
    layer: Int[Array, ""]

    @property
    def block_size(self) -> int:
        """Number of keys in a block."""
        return self.stack.quantized.shape[4]

    def take(self) -> QuantizedKeys:
        """Copies the layer's arrays out."""
        return take_layer(self.stack, self.layer)


def encode(
    key: Float[Array, "B I S K C"], present: Bool[Array, "B I S"]
) -> tuple[UInt8[Array, "B I K S C2"], Float[Array, "B I K C"], Int8[Array, "B I K C"]]:
    """Quantizes blocks of keys; returns quantized offsets, zero points and scales.

        zero_point = (max k + min k) / 2
        scale = least power of two that is >= max |k - zero_point| / 7

    over the keys of the block, with the zero point rounded to bfloat16 first. A key that has a
    channel that is not finite is replaced by the zero point.

    Args:
      key: Keys by block.
      present: Whether each of them exists.
    """
    x = key.astype(jnp.float32)
    counts = (present[..., None] & jnp.all(jnp.isfinite(x), axis=-1))[..., None]
    low = jnp.min(jnp.where(counts, x, LARGEST), axis=2)
    high = jnp.max(jnp.where(counts, x, -LARGEST), axis=2)
    has_key = jnp.any(counts, axis=2)
    # `astype` alone fails: on GPUs, XLA drops a rounding that is undone right after. The quantized
    # keys would then be relative to an unrounded zero point that is not stored.
    bits = jnp.finfo(jnp.bfloat16)
    zero_point = jnp.where(has_key, 0.5 * low + 0.5 * high, 0.0)
    zero_point = jax.lax.reduce_precision(zero_point, bits.nexp, bits.nmant)
    away = jnp.where(counts, x - zero_point[:, :, None], 0.0)
    scale_exponent = ceil_log2(jnp.max(jnp.abs(away), axis=2) / LARGEST_QUANTIZED)
    scale_exponent = jnp.clip(scale_exponent, MIN_EXPONENT, MAX_EXPONENT)
    stored = jnp.round(away * power_of_two(-scale_exponent)[:, :, None])
    stored = jnp.clip(stored, -LARGEST_QUANTIZED, LARGEST_QUANTIZED).astype(jnp.int8)
    low_part, high_part = jnp.split(stored, 2, axis=-1)
    packed = jnp.bitwise_or(jnp.left_shift(high_part, 4), jnp.bitwise_and(low_part, jnp.int8(15)))
    scale_exponent = jnp.where(has_key, scale_exponent, NO_KEY).astype(jnp.int8)
    quantized = jnp.swapaxes(jax.lax.bitcast_convert_type(packed, jnp.uint8), 2, 3)
    return quantized, zero_point.astype(jnp.bfloat16), scale_exponent


def round_queries(query: Float[Array, "*axes C"]) -> Float[Array, "*axes C"]:
    """Rounds queries to the tensor cores' operands: eight bits, times a power of two per query.

    `float8_e4m3fn(q · 2^-a) · 2^a` with the smallest `2^a` that brings no channel above 448.
    """
    rounded, scale = to_float8(query)
    return (rounded.astype(jnp.float32) * scale).astype(query.dtype)


def block_scores(
    queries: Float[Array, "B I R N C"],
    stored: QuantizedKeys | LayerKeys,
    rows: Int[Array, "B I"],
    *,
    kv_lengths: Int[Array, "B"],
    scale: float,
    exponent: int,
    pages: int = 1,
    heads: Heads | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B I P"]:
    """Page scores: a norm over heads and representative queries of their softmax over pages.

        k'_s = scale_j quantized_s                    for the keys `s` of block `j`
        m_{r, h}[i, p] = scale · (q_{r, h} · zero_point_j + max_{s in p} q'_{r, h} · k'_s)
        P_{r, h}[i, ·] = softmax(m_{r, h}[i, ·]) over the pages up to the end of the row's own block
        S[i, p] = ( Σ_{r, h} P_{r, h}[i, p]^exponent )^(1 / exponent)

    for the pages `p` of each block `j`, where `q'` is the query in eight bits (`round_queries`).
    The maximum in a page approximates its log-sum-exp, which takes one exponential for each page
    instead of each key. Logits that are NaN, or of magnitude `LARGEST_LOGIT` or more, count as no
    attention.

    Args:
      queries: Representative queries of each row, in the channels that the scores use.
      stored: The keys. Kernels read one layer's quantized keys in place.
      rows: Block of each row.
      kv_lengths: Number of keys in each sequence.
      scale: Factor of the products.
      exponent: Order of the norm over heads and queries.
      pages: Number of equal pages in a block; 1 scores whole blocks.
      heads: Distribution of the heads over ranks, if any. Every rank adds up the softmax of all
        heads in the order of one device, so that all ranks get its scores.
      kernel_config: Settings of the kernels, or `None` for plain JAX. Kernels support prompts in
        bfloat16 and blocks of 64 tokens.

    Returns:
      Float32 `[B, I, J · pages]`; 0 for rows that see no page, and any numbers for rows without
      tokens.
    """
    if kernel_config is not None:
        from sketchwalk_jax.pallas_kernels.page_scores.api import (
            page_scores_of_kernels,
            takes_page_scores,
        )

        of_layer = stored if isinstance(stored, LayerKeys) else stored.as_layer()
        if takes_page_scores(queries, block_size=of_layer.block_size, pages=pages):
            return page_scores_of_kernels(
                queries,
                of_layer,
                rows,
                kv_lengths,
                scale=scale,
                exponent=exponent,
                heads=heads,
                kernel_config=kernel_config,
            )
    if isinstance(stored, LayerKeys):
        stored = stored.take()
    batch, num_rows, count, num_heads, channels = queries.shape
    num_blocks, size, kv_heads = stored.num_blocks, stored.block_size, stored.zero_point.shape[2]
    config = kernel_config or default_kernel_config()
    is_token = num_rows * count == 1
    tile = min(max(1, config.dense_rows // count), num_rows)
    step = (config.dense_decode_keys if is_token else config.dense_keys) // size
    step = min(max(1, step), num_blocks)

    def tiles(x: Array) -> Array:
        """Reshapes to `[tiles, B, rows of a tile, ...]` for `lax.map`, padding rows at the end."""
        x = jnp.pad(x, ((0, 0), (0, -num_rows % tile)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, tile, *x.shape[2:]), 1, 0)

    def score(part: tuple[Array, Array]) -> Float[Array, "B Q P"]:
        queries, rows = part
        grouped = queries.reshape(batch, tile * count, kv_heads, -1, channels)
        grouped = jnp.moveaxis(grouped, 1, 3).reshape(batch, kv_heads, -1, channels)
        where: dict[str, Any] = {
            "step": step,
            "pages": pages,
            "kv_lengths": kv_lengths,
        }
        max_logits = _page_max_logits(round_queries(grouped), stored, jnp.max(rows) + 1, **where)
        shared = jnp.einsum(
            "bkmc,bjkc->bkmj",
            grouped,
            stored.zero_point.astype(grouped.dtype),
            precision=matmul_precision(grouped),
            preferred_element_type=jnp.float32,
        )
        shared = jnp.repeat(shared, pages, axis=-1)
        logits = jnp.where(max_logits > 0.5 * MASK_VALUE, (max_logits + shared) * scale, jnp.nan)
        logits = logits.reshape(batch, num_heads, tile, count, num_blocks * pages)
        return _put_together(logits, (rows + 1) * pages, exponent, heads)

    parts = tiles(queries), tiles(rows)
    if heads is None:
        where: dict[str, Any] = {"tile": tile, "block_size": size}
        where["num_columns"] = num_blocks * pages
        found = _map_tiles(score, parts, rows, kv_lengths, **where)
    else:  # collectives must not depend on a condition
        found = jax.lax.map(score, parts)
    return jnp.moveaxis(found, 0, 1).reshape(batch, -1, num_blocks * pages)[:, :num_rows]


def _map_tiles(
    function: Callable[[PyTree], Float[Array, "B Q P"]],
    parts: PyTree,
    rows: Int[Array, "B I"],
    kv_lengths: Int[Array, "B"],
    *,
    tile: int,
    block_size: int,
    num_columns: int,
) -> Float[Array, "tiles B Q P"]:
    """`jax.lax.map(function, parts)` that skips the last tiles, whose rows have no token.

    Args:
      function: Function of a tile of rows, with a float32 result.
      parts: Its arguments for all tiles, stacked.
      rows: Block of each row, consecutive in a sequence.
      kv_lengths: Number of tokens of each sequence.
      tile: Rows of a tile.
      block_size: Tokens of a row.
      num_columns: Columns `P` of a result.

    Returns:
      The stacked results; 0 for tiles that are skipped.
    """
    num_tiles = len(jax.tree.leaves(parts)[0])
    if num_tiles == 1:
        return function(jax.tree.map(lambda x: x[0], parts))[None]
    num_rows = jnp.max((kv_lengths + block_size - 1) // block_size - rows[:, 0])
    count = jnp.clip((num_rows + tile - 1) // tile, 0, num_tiles)

    def one(index: Int[Array, ""], found: Array) -> Array:
        return found.at[index].set(function(jax.tree.map(lambda x: x[index], parts)))

    like = jax.tree.leaves(parts)[-1]  # varies over the axes of a `shard_map` as the results do
    shape = (num_tiles, rows.shape[0], tile, num_columns)
    nothing = jnp.zeros_like(like, jnp.float32, shape=shape)
    return jax.lax.fori_loop(0, count, one, nothing)


def _put_together(
    logits: Float[Array, "B N Q R P"], ends: Int[Array, "B Q"], exponent: int, heads: Heads | None
) -> Float[Array, "B Q P"]:
    """The norm, over heads and queries, of their softmax over the pages before each row's end."""
    page = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    is_before = (page < ends[..., None])[:, None, :, None]  # [B 1 Q 1 P]
    is_seen = is_before & (jnp.abs(logits) < LARGEST_LOGIT)
    logits = jnp.where(is_seen, logits, MASK_VALUE)
    shares = jnp.where(is_seen, jax.nn.softmax(logits, axis=-1), 0.0) ** exponent
    if heads is not None:
        shares = heads.gather(shares, axis=1)
    return jnp.sum(shares, axis=(1, 3)) ** (1.0 / exponent)


def _page_max_logits(
    queries: Float[Array, "B K M C"],
    stored: QuantizedKeys,
    reach: Int[Array, ""],
    *,
    step: int,
    pages: int,
    kv_lengths: Int[Array, "B"],
) -> Float[Array, "B K M P"]:
    """Page max logits `max_{s in page} q · scale_j quantized_s` before block `reach`."""
    batch, kv_heads, num_queries = queries.shape[:3]
    num_blocks, size = stored.num_blocks, stored.block_size

    def visit(index: Int[Array, ""], max_logits: Array) -> Array:
        # The last step starts earlier to fit, and recomputes some blocks.
        block = jnp.minimum(index * step, num_blocks - step)
        keys = stored.dequantized_offsets(block, step, queries.dtype)
        products = jnp.einsum(
            "bkmc,bskc->bkms",
            queries,
            keys,
            precision=matmul_precision(keys),
            preferred_element_type=jnp.float32,
        )
        position = block * size + jnp.arange(step * size, dtype=jnp.int32)[None, :]
        is_key = (position < kv_lengths[:, None])[:, None, None] & jnp.isfinite(products)
        products = jnp.where(is_key, products, MASK_VALUE)
        by_page = products.reshape(*products.shape[:-1], step * pages, size // pages)
        found = jnp.max(by_page, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(max_logits, found, block * pages, axis=3)

    shape = (batch, kv_heads, num_queries, num_blocks * pages)
    nothing = jnp.full_like(queries, MASK_VALUE, jnp.float32, shape=shape)
    return jax.lax.fori_loop(0, -(-reach // step), visit, nothing)
