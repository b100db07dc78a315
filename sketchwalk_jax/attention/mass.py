"""Attention mass: the share of dense attention that falls on each block of keys.

The mass of key block `j` for query block `i` is the sum of the softmax weights of the row's
queries on the block's keys:

    M[i, j] = Σ_{t in row i} Σ_{s in block j, s <= t} softmax(q_t Kᵀ / sqrt(H))_s

One pass over the keys finds the log-sum-exp of every (query, block). A softmax of these over blocks
gives the mass of each query, without an array of tokens × tokens. Instead of the sum, the maximum
share over queries and heads can be computed.

Scores of queries or keys that are not finite count as no attention. So do scores below -5e29.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.api import per_sequence
from sketchwalk_jax.attention.xla import vary_alike
from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config
from sketchwalk_jax.precision import (
    MASK_VALUE,
    default_scale,
    matmul_precision,
    start_indices,
)
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import (
    check_auto_axes,
    check_choice,
    check_integer,
    check_per_sequence,
    check_qkv,
)

AGGREGATES = ("sum", "max")


def block_mass(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    *,
    block_size: int,
    layer: Int[Array, ""] | int | None = None,
    first_block: Int[Array, "B"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    sum_heads: bool = True,
    aggregate: str = "sum",
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B *N I J"]:
    """Computes the attention mass of every (query block, key block), `M[i, j]` above.

    Args:
      query: Queries after rotary embedding; column 0 is the start of block `first_block`.
      key: Keys from position 0 on, or a stacked cache `[L, B, S, K, H]` with `layer`.
      block_size: Tokens per block.
      layer: Layer of the stacked cache.
      first_block: Block of each sequence's first column. Default: 0.
      valid: Whether each column is a query of the sequence. Default: the columns at positions below
        `kv_lengths`.
      kv_lengths: Number of keys in each sequence. Later keys may have any values. Default: `S`.
      sum_heads: Whether to combine the query heads; otherwise the result has an axis of heads.
      aggregate: How to combine queries (and heads): `"sum"`, or `"max"` for the largest share that
        any of them gives the block.
      kernel_config: Tile sizes of the implementation.

    Returns:
      Float32 `[B, I, J]` with `I = ceil(T / block_size)` and `J = ceil(S / block_size)`, or
      `[B, N, I, J]`. With `"sum"`, a row sums to its number of queries (times `N` if heads are
      combined); rows without queries are 0.

    Raises:
      ValueError: If shapes or dtypes do not fit together, `block_size` is not positive, or
        `aggregate` is unknown.
    """
    batch, num_tokens = _check(query, key, layer, block_size, aggregate, kv_lengths)
    check_per_sequence("first_block", first_block, batch)
    if valid is not None and valid.shape != (batch, num_tokens):
        raise ValueError(f"valid must have shape {(batch, num_tokens)}, got {valid.shape}")
    key = key[None] if layer is None else key
    lengths = per_sequence(kv_lengths, key.shape[2], batch)
    padding = -num_tokens % block_size
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    column = jnp.arange(num_tokens + padding, dtype=jnp.int32)[None, :]
    positions = (per_sequence(first_block, 0, batch) * block_size)[:, None] + column
    if valid is None:
        valid = (positions < lengths[:, None]) & (column < num_tokens)
    else:
        valid = jnp.pad(valid, ((0, 0), (0, padding)))
    kernel_config = kernel_config or default_kernel_config()
    rows = (batch, (num_tokens + padding) // block_size, block_size)
    return _mass(
        query.reshape(*rows, *query.shape[2:]),
        key,
        positions.reshape(rows),
        valid.reshape(rows),
        lengths,
        block_size=block_size,
        layer=layer,
        sum_heads=sum_heads,
        aggregate=aggregate,
        row_tile=max(1, kernel_config.dense_rows // block_size),
        keys_per_step=kernel_config.dense_keys,
    )


def token_mass(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "*L B S K H"],
    *,
    block_size: int,
    kv_lengths: Int[Array, "B"],
    layer: Int[Array, ""] | int | None = None,
    sum_heads: bool = True,
    aggregate: str = "sum",
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B *N 1 J"]:
    """Computes the attention mass of every key block for one token per sequence, the last one.

    The arguments are those of `block_mass`, but `kv_lengths` must be given. Keys include the
    current token's key.

    Returns:
      Float32 `[B, 1, J]`, which with `"sum"` sums to the number of query heads, or `[B, N, 1, J]`.

    Raises:
      ValueError: In the same cases as `block_mass`.
    """
    _, num_tokens = _check(query, key, layer, block_size, aggregate, kv_lengths)
    if num_tokens != 1:
        raise ValueError(f"query must hold one token per sequence, got {num_tokens}")
    lengths = jnp.asarray(kv_lengths, jnp.int32)
    return _mass(
        query[:, None],
        key[None] if layer is None else key,
        (lengths - 1)[:, None, None],
        (lengths > 0)[:, None, None],
        lengths,
        block_size=block_size,
        layer=layer,
        sum_heads=sum_heads,
        aggregate=aggregate,
        row_tile=1,
        keys_per_step=(kernel_config or default_kernel_config()).dense_decode_keys,
    )


def _check(
    query: Any, key: Any, layer: Any, block_size: Any, aggregate: Any, kv_lengths: Any
) -> tuple[int, int]:
    """Checks arguments that both functions have; returns the numbers of sequences and queries."""
    batch, num_tokens = check_qkv(query, key, key, layer)
    check_integer("block_size", block_size)
    check_choice("aggregate", aggregate, AGGREGATES)
    check_auto_axes("query and key", (query, key))
    check_per_sequence("kv_lengths", kv_lengths, batch)
    return batch, num_tokens


def mass_recall(
    mass: Float[Array, "B *N I J"], selection: BlockSelection
) -> Float[Array, "B *N I"]:
    """Share of each row's mass that falls on its selected blocks.

    `Σ_{j in list i} M[i, j] / Σ_j M[i, j]`

    Args:
      mass: Result of `block_mass` or `token_mass`, with an axis of heads if the selection has lists
        per head.
      selection: Block indices for the same rows.

    Returns:
      Float32 in [0, 1]; 0 for rows without queries, which should be left out of a mean.

    Raises:
      ValueError: If the shapes do not fit together.
    """
    ids, counts = selection.ids, selection.counts
    num_lists, heads = ids.shape[1], mass.shape[1:-2]
    if ids.shape[0] != mass.shape[0] or ids.shape[2] != mass.shape[-2]:
        raise ValueError(
            f"selection must have lists for the rows of mass {mass.shape}, got ids {ids.shape}"
        )
    if (heads[0] if heads else 1) % num_lists:
        raise ValueError(
            f"mass must keep {num_lists} heads or a multiple apart for lists of their own "
            f"(sum_heads=False), got shape {mass.shape}"
        )
    by_list = mass.reshape(mass.shape[0], num_lists, -1, *mass.shape[-2:])  # [B M G I J]
    place = jnp.arange(ids.shape[-1], dtype=jnp.int32)[None, None, None, :]
    listed = place < counts[..., None]
    ids = jnp.minimum(ids, mass.shape[-1] - 1)[:, :, None]
    taken = jnp.take_along_axis(by_list, ids, axis=-1)
    held = jnp.sum(jnp.where(listed[:, :, None], taken, 0.0), axis=-1)
    total = jnp.sum(by_list, axis=-1)
    recall = held / jnp.where(total > 0, total, 1.0)
    return recall.reshape(mass.shape[:-1])


def _mass(
    query: Float[Array, "B I Q N H"],
    key: Float[Array, "L B S K H"],
    positions: Int[Array, "B I Q"],
    valid: Bool[Array, "B I Q"],
    kv_lengths: Int[Array, "B"],
    *,
    block_size: int,
    layer: Any,
    sum_heads: bool,
    aggregate: str,
    row_tile: int,
    keys_per_step: int,
) -> Float[Array, "B *N I J"]:
    """Computes `M[i, j] = Σ_{t in row i} softmax(lse[t])_j`, `row_tile` rows at a time.

    `lse[t, j]` is the log-sum-exp of the scores of query `t` over the keys of block `j`. With
    another `aggregate`, its operation replaces the sum.
    """
    query, key, positions, valid, kv_lengths = vary_alike(query, key, positions, valid, kv_lengths)
    batch, num_rows, tokens, num_heads, head_dim = query.shape
    kv_heads = key.shape[3]
    key = jnp.pad(key, ((0, 0), (0, 0), (0, -key.shape[2] % block_size), (0, 0), (0, 0)))
    key = jax.lax.optimization_barrier(key)  # a fused cast would copy the whole cache
    num_blocks = key.shape[2] // block_size
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    put_together = jnp.sum if aggregate == "sum" else jnp.max
    row_tile = min(row_tile, num_rows)

    def tiles(x: Array) -> Array:
        """Reshapes to `[tiles, B, R · Q, ...]` for `lax.map`, with padding rows at the end."""
        padding = ((0, 0), (0, -num_rows % row_tile)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, padding).reshape(batch, -1, row_tile * tokens, *x.shape[3:])
        return jnp.moveaxis(x, 1, 0)

    def mass_of(tile: tuple[Array, Array, Array]) -> Float[Array, "B M R J"]:
        query, positions, valid = tile
        lse = _block_lse(
            query.reshape(batch, row_tile * tokens, kv_heads, num_heads // kv_heads, head_dim),
            key,
            positions,
            jnp.max(jnp.where(valid, positions + 1, 0)),
            kv_lengths,
            block_size=block_size,
            layer=layer,
            keys_per_step=keys_per_step,
        )
        weights = jax.nn.softmax(lse, axis=-1)
        is_real = valid[:, None, None, :, None] & (lse > 0.5 * MASK_VALUE)
        weights = jnp.where(is_real, weights, 0.0)
        weights = weights.reshape(batch, num_heads, row_tile, tokens, num_blocks)
        by_head = put_together(weights, axis=3)
        return put_together(by_head, axis=1, keepdims=True) if sum_heads else by_head

    mass = jax.lax.map(mass_of, (tiles(query), tiles(positions), tiles(valid)))
    mass = jnp.moveaxis(mass, 0, 2).reshape(batch, mass.shape[2], -1, num_blocks)[:, :, :num_rows]
    return mass[:, 0] if sum_heads else mass


def _block_lse(
    query: Float[Array, "B T K G C"],
    key: Float[Array, "L B S K H"],
    positions: Int[Array, "B T"],
    reach: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    *,
    block_size: int,
    layer: Int[Array, ""],
    keys_per_step: int,
) -> Float[Array, "B K G T J"]:
    """Log-sum-exp of each query's scores over each block's visible keys before `reach`.

    Blocks without a visible key have about `MASK_VALUE`. Each step takes `keys_per_step` keys.
    """
    batch, tokens, kv_heads, group, head_dim = query.shape
    num_blocks = key.shape[2] // block_size
    step = min(max(1, keys_per_step // block_size), num_blocks)  # blocks
    width = step * block_size
    merged = jnp.transpose(query, (0, 2, 3, 1, 4)).reshape(batch * kv_heads, -1, head_dim)

    def visit(index: Int[Array, ""], block_lse: Array) -> Array:
        # The last step starts earlier to fit, and recomputes some blocks.
        block = jnp.minimum(index * step, num_blocks - step)
        place = start_indices(layer, 0, block * block_size, 0, 0)
        keys = jax.lax.dynamic_slice(key, place, (1, batch, width, kv_heads, key.shape[-1]))[0]
        keys = jnp.swapaxes(keys, 1, 2).reshape(batch * kv_heads, width, head_dim)
        scores = jax.lax.dot_general(
            merged,
            keys,
            (((2,), (2,)), ((0,), (0,))),
            precision=matmul_precision(keys),
            preferred_element_type=jnp.float32,
        )
        position = block * block_size + jnp.arange(width, dtype=jnp.int32)[None, None, :]
        visible = (position <= positions[:, :, None]) & (position < kv_lengths[:, None, None])
        scores = scores.reshape(batch, kv_heads, group, tokens, width) * default_scale(head_dim)
        scores = jnp.where(visible[:, None, None] & jnp.isfinite(scores), scores, MASK_VALUE)
        scores = scores.reshape(*scores.shape[:-1], step, block_size)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(block_lse, lse, block, axis=4)

    shape = (batch, kv_heads, group, tokens, num_blocks)
    nothing = jnp.full_like(query, MASK_VALUE, jnp.float32, shape=shape)
    num_steps = jnp.minimum((reach + width - 1) // width, -(-num_blocks // step))
    return jax.lax.fori_loop(0, num_steps, visit, nothing)
