"""Attention of a prompt's last queries by column and by diagonal, and block indices from it.

MInference (arXiv:2407.02490) and FlexPrefill (arXiv:2502.20766) both estimate the attention of a
whole prompt of `n` tokens from its last `m` queries: with `A = softmax(q kᵀ / sqrt(H))` of these
rows, a *vertical* line is a key that they attend to, a *slash* line a distance that they attend to.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.precision import MASK_VALUE, default_scale, matmul_precision
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sketch import block_sums


def last_queries(
    query: Float[Array, "B T N H"], span: Span, *, block_size: int, count: int
) -> tuple[Float[Array, "B M N H"], Bool[Array, "B M"]]:
    """Takes the last `count` queries of the span, in order, and a mask of those that exist.

    A sequence with fewer new tokens has fewer queries.
    """
    last = span.positions - span.first_block * block_size
    columns = last[:, None] + jnp.arange(1 - count, 1, dtype=jnp.int32)[None, :]
    inside = jnp.clip(columns, 0, query.shape[1] - 1)
    is_query = (columns == inside) & jnp.take_along_axis(span.valid, inside, axis=1)
    return jnp.take_along_axis(query, inside[:, :, None, None], axis=1), is_query


def line_sums(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S K H"],
    is_query: Bool[Array, "B M"],
    end: Int[Array, "B"],
) -> tuple[Float[Array, "B N S"], Float[Array, "B N S"]]:
    """Causal attention of the last `M` queries, summed along columns and along diagonals.

    The query in row `r` has position `end - M + r`. Let `A[r]` be its softmax over the keys up to
    its own position. Then

        vertical[s] = Σ_r A[r, s]        slash[s] = Σ_r A[r, s - (M - 1 - r)]

    so `slash[s]` belongs to the distance `end - 1 - s` between query and key, counted from the last
    query. Each sums to the number of queries.

    Args:
      query: The last queries, from `last_queries`.
      key: Keys of the layer; keys from `end` on may have any values.
      is_query: Whether each row exists; the others are ignored.
      end: Number of tokens of each sequence.

    Returns:
      The two sums for every query head, float32.
    """
    batch, count, num_heads, head_dim = query.shape
    num_keys, kv_heads = key.shape[1:3]
    positions = end[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
    columns = jnp.arange(num_keys, dtype=jnp.int32)
    visible = (columns[None, None, :] <= positions[:, :, None]) & is_query[:, :, None]
    visible = visible[:, None]  # [B 1 M S]

    def of_group(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        queries, keys = pair  # [B M G H], [B S H]
        scores = jnp.einsum(
            "bmgh,bsh->bgms",
            queries,
            keys,
            precision=matmul_precision(keys),
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(visible, scores * default_scale(head_dim), MASK_VALUE)
        weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
        return jnp.sum(weights, axis=2), _diagonal_sums(weights)

    groups = query.reshape(batch, count, kv_heads, num_heads // kv_heads, head_dim)
    pairs = jnp.moveaxis(groups, 2, 0), jnp.moveaxis(key, 2, 0)
    vertical, slash = jax.lax.map(of_group, pairs)  # [K B G S]
    shape = (batch, num_heads, num_keys)
    return jnp.moveaxis(vertical, 0, 1).reshape(shape), jnp.moveaxis(slash, 0, 1).reshape(shape)


def _diagonal_sums(weights: Float[Array, "B G M S"]) -> Float[Array, "B G S"]:
    """Sums diagonals, `Σ_r weights[r, s - (M - 1 - r)]`; `s` is the key in the last row."""
    count, num_keys = weights.shape[2:]
    width = num_keys + count - 1
    # Padding rows by one more than is read shifts each row by one more to the right.
    padded = jnp.pad(weights[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, count)))
    flat = padded.reshape(*weights.shape[:2], -1)[..., : count * width]
    return jnp.sum(flat.reshape(*weights.shape[:2], count, width)[..., :num_keys], axis=2)


def from_the_end(x: Array, end: Int[Array, "B"]) -> Array:
    """Computes `y[..., o] = x[..., end - 1 - o]`; 0 (or False) if there is no such entry.

    This converts keys into distances from the last query, and back.
    """
    index = end[:, None] - 1 - jnp.arange(x.shape[-1], dtype=jnp.int32)[None, :]
    taken = jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, :], axis=-1)
    return jnp.where(index[:, None, :] >= 0, taken, jnp.zeros((), x.dtype))


def places(scores: Float[Array, "*lead S"]) -> Int[Array, "*lead S"]:
    """Ranks each score in descending order, from 0; ties go to the lower index."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1).astype(jnp.int32)


def any_in_block(mask: Bool[Array, "B N S"], block_size: int) -> Bool[Array, "B N J"]:
    """Whether any token of each block is marked; `S` is a multiple of the block size."""
    return jnp.any(mask.reshape(*mask.shape[:2], -1, block_size), axis=-1)


def lines_to_blocks(
    vertical: Bool[Array, "B N J"], slash: Bool[Array, "B N J"], rows: Int[Array, "B I"]
) -> Bool[Array, "B N I J"]:
    """Marks the key blocks of every row: `vertical[j] or slash[i - j]`, causal or not."""
    columns = jnp.arange(vertical.shape[-1], dtype=jnp.int32)
    distance = jnp.maximum(rows[:, :, None] - columns[None, None, :], 0)
    by_row = jax.vmap(lambda one, index: one[:, index])(slash, distance)
    return vertical[:, :, None, :] | by_row


def mean_pool(
    x: Float[Array, "B T heads H"], valid: Bool[Array, "B T"], block_size: int
) -> Float[Array, "B I heads H"]:
    """Means over the valid tokens of each block, float32; 0 if there are none."""
    sums = block_sums(x.astype(jnp.float32), valid, block_size)
    counts = jnp.sum(valid.reshape(x.shape[0], -1, block_size), axis=-1, dtype=jnp.float32)
    return sums / jnp.maximum(counts, 1.0)[:, :, None, None]


def head_products(
    query: Float[Array, "B I N H"], key: Float[Array, "B J K H"]
) -> Float[Array, "B N I J"]:
    """Computes `q kᵀ / sqrt(H)` of every query head with its key/value head, float32."""
    batch, num_rows, num_heads, head_dim = query.shape
    kv_heads = key.shape[2]
    scores = jnp.einsum(
        "bikgh,bjkh->bkgij",
        query.reshape(batch, num_rows, kv_heads, num_heads // kv_heads, head_dim),
        key,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(batch, num_heads, num_rows, key.shape[1])
    return scores * default_scale(head_dim)


def row_mask(span: Span, num_blocks: int, block_size: int) -> Bool[Array, "B 1 I J"]:
    """Marks the causal key blocks of the rows with a query; none for padding rows."""
    rows = span.rows(block_size)
    holds_query = jnp.any(span.valid.reshape(*rows.shape, block_size), axis=-1)
    columns = jnp.arange(num_blocks, dtype=jnp.int32)[None, None, :]
    return ((columns <= rows[:, :, None]) & holds_query[:, :, None])[:, None]


def lists_of(mask: Bool[Array, "B M I J"], block_size: int) -> BlockSelection:
    """Converts the marked blocks of every row to ascending block indices."""
    num_blocks = mask.shape[-1]
    columns = jnp.arange(num_blocks, dtype=jnp.int32)[None, None, None, :]
    ids = jnp.sort(jnp.where(mask, columns, num_blocks), axis=-1)
    return BlockSelection(ids, jnp.sum(mask, axis=-1, dtype=jnp.int32), block_size)
