"""Public functions of exact attention: block-sparse, over listed blocks, and dense.

The order, meaning and shapes of the arguments follow `jax.nn.dot_product_attention` (queries
`[B, T, N, H]`, keys and values `[B, S, K, H]`). A stacked cache `[L, B, S, K, H]` can be passed
with a layer index; no layer is copied out of it.

Each function checks its arguments and chooses the implementation. The computation is jitted, so a
call outside of `jit` compiles once for each combination of shapes and options.

All functions have reverse-mode derivatives with respect to queries, keys and values. The backward
pass is plain JAX in tiles (`gradients`) for all implementations except cuDNN, which has its
own. Block indices, lengths and positions are constants.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention import cudnn, differentiable
from sketchwalk_jax.attention.xla import on_auto_axes, vary_alike
from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config
from sketchwalk_jax.pallas_kernels.dispatch import (
    FULL_BLOCK,
    choose_dense_implementation,
    choose_implementation,
)
from sketchwalk_jax.precision import default_scale
from sketchwalk_jax.selection import BlockSelection, full_selection
from sketchwalk_jax.validation import check_per_sequence, check_qkv, check_scale, explicit_axes

_STATIC = ("scale", "return_lse", "implementation", "kernel_config")


def per_sequence(x: Any, default: int, batch: int) -> Int[Array, "B"]:
    """Returns `x` as int32, or the default for every sequence."""
    return jnp.full((batch,), default, jnp.int32) if x is None else jnp.asarray(x, jnp.int32)


def take_columns(x: Float[Array, "B T *rest"], columns: Int[Array, "B U"]) -> Array:
    """Takes `x[b, columns[b]]` for every sequence."""
    index = columns.reshape(*columns.shape, *([1] * (x.ndim - 2)))
    return jnp.take_along_axis(x, index, axis=1)


def num_query_blocks(num_tokens: int, block_size: int, *, has_offset: bool) -> int:
    """Returns the number of rows that a selection must have for `num_tokens` query tokens.

    Rows start at absolute block boundaries. Queries that start at an arbitrary `query_offset` may
    touch one block more than the same number of queries from position 0.

    Args:
      num_tokens: Number of query tokens `T`.
      block_size: Tokens per block.
      has_offset: Whether a `query_offset` is given.

    Returns:
      The number of rows `I`.
    """
    return (num_tokens + (block_size - 1 if has_offset else 0) + block_size - 1) // block_size


def _check_selection(selection: BlockSelection, query: Any, key: Any, num_rows: int) -> None:
    """Checks block indices against queries of `num_rows` rows."""
    ids, counts, size = selection.ids, selection.counts, selection.block_size
    batch, num_heads = query.shape[0], query.shape[2]
    if ids.ndim != 4 or counts.shape != ids.shape[:3]:
        raise ValueError(
            "selection must have ids [B, M, I, P] and counts [B, M, I], "
            f"got {ids.shape} and {counts.shape}"
        )
    if ids.shape[0] != batch or ids.shape[2] != num_rows:
        raise ValueError(
            f"selection must hold lists for {batch} sequences and {num_rows} query blocks, "
            f"got ids of shape {ids.shape}"
        )
    if ids.shape[1] not in (1, key.shape[-2], num_heads):
        raise ValueError(
            f"selection must have 1, {key.shape[-2]} or {num_heads} lists per row, "
            f"got {ids.shape[1]}"
        )
    if ids.shape[3] == 0:
        raise ValueError("selection must have room for at least one block, got P = 0")
    if ids.dtype != jnp.int32 or counts.dtype != jnp.int32:
        raise ValueError(
            f"selection must hold int32 ids and counts, got {ids.dtype} and {counts.dtype}"
        )
    if size < 1 or size & (size - 1):
        raise ValueError(f"selection.block_size must be a power of two, got {size}")
    row = selection.queries_per_row
    if row < size or row % size:
        raise ValueError(
            f"selection.row_size must be a multiple of the block size {size}, got {row}"
        )


def block_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    selection: BlockSelection,
    *,
    layer: Int[Array, ""] | int | None = None,
    query_offset: Int[Array, "B"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B T N H"] | Any:
    """Exact causal attention over the selected key blocks (Algorithm 1 step 8).

    A query at position `p` of row `i` gives `softmax(scale · q kᵀ) v` over the keys at positions
    `<= p` in the blocks of list `i`. Grouped-query attention does not repeat keys and values. A row
    with an empty list gives 0 (and a log-sum-exp of -inf). A query, key or value that is not finite
    affects only the queries that see it. If these have no cotangents, it affects no gradient.

    Args:
      query: Queries. Row `i` of the selection covers the positions of block
        `query_offset // queries_per_row + i`, of `selection.queries_per_row` tokens.
      key: Keys from position 0 on, or a stacked cache `[L, B, S, K, H]` with `layer`.
      value: Values, with the shape of `key`.
      selection: Block indices of the keys, with `num_query_blocks(T, ...)` rows.
      layer: Layer of the stacked cache.
      query_offset: Position of each sequence's first query token, any integer. Default: 0.
      kv_lengths: Number of keys in each sequence. Later keys may have any values. Default: `S`.
      scale: Factor of the scores. Default: `1 / sqrt(H)`.
      return_lse: Whether to also return the log-sum-exp of the scaled scores.
      implementation: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA GPUs), or `None` to choose by
        device and shape.
      kernel_config: Tile sizes of the implementation. They change the result by rounding only.

    Returns:
      The output in the dtype of the queries, and with `return_lse` the float32 log-sum-exp
      `[B, T, N]`.

    Raises:
      ValueError: If shapes or dtypes do not fit together. Values (block indices, lengths) are not
        checked, because they are unknown under `jit`.
      NotImplementedError: If `implementation` cannot run here.
    """
    batch, num_tokens = check_qkv(query, key, value, layer)
    size, row = selection.block_size, selection.queries_per_row
    num_rows = num_query_blocks(num_tokens, row, has_offset=query_offset is not None)
    _check_selection(selection, query, key, num_rows)
    check_per_sequence("query_offset", query_offset, batch)
    check_per_sequence("kv_lengths", kv_lengths, batch)
    kernel_config = kernel_config or default_kernel_config()
    rows = jax.ShapeDtypeStruct((batch, num_rows * row, *query.shape[2:]), query.dtype)
    chosen = choose_implementation(
        implementation, rows, block_size=size, row_size=row, kernel_config=kernel_config
    )
    return _attend_blocks(
        query,
        key,
        value,
        selection,
        layer,
        query_offset,
        kv_lengths,
        scale=check_scale(scale),
        return_lse=return_lse,
        implementation=chosen,
        kernel_config=kernel_config,
    )


def _specs(query: PartitionSpec, *_: Any, return_lse: bool = True, **__: Any) -> Any:
    """Partition specs of the output and its log-sum-exp, from the queries' spec."""
    return (query, PartitionSpec(*tuple(query)[:3])) if return_lse else query


@partial(jax.jit, static_argnames=_STATIC)
@on_auto_axes(_specs)
def _attend_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    selection: BlockSelection,
    layer: Int[Array, ""] | int | None,
    query_offset: Int[Array, "B"] | None,
    kv_lengths: Int[Array, "B"] | None,
    *,
    return_lse: bool,
    **options: Any,
) -> Float[Array, "B T N H"] | Any:
    """Runs `block_sparse_attention` after its checks."""
    batch, num_tokens = query.shape[:2]
    size = selection.queries_per_row
    num_rows = num_query_blocks(num_tokens, size, has_offset=query_offset is not None)
    query = jnp.pad(query, ((0, 0), (0, num_rows * size - num_tokens), (0, 0), (0, 0)))
    offset = per_sequence(query_offset, 0, batch)
    shift = offset % size
    column = jnp.arange(num_rows * size, dtype=jnp.int32)[None, :]
    if query_offset is not None:  # rows start at block boundaries: the first may be partly empty
        query = take_columns(query, (column - shift[:, None]) % (num_rows * size))
    options |= {"layer": layer, "kv_lengths": kv_lengths, "return_lse": return_lse}
    given = prepare_lists(query, key, value, selection, offset // size, **options)
    found: Any = differentiable.attend_lists(*given)
    out, lse = found
    if query_offset is not None:
        back = column[:, :num_tokens] + shift[:, None]
        out, lse = take_columns(out, back), lse if lse is None else take_columns(lse, back)
    return (out[:, :num_tokens], lse[:, :num_tokens]) if return_lse else out[:, :num_tokens]


def prepare_lists(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    selection: BlockSelection,
    first_block: Int[Array, "B"] | None,
    *,
    layer: Int[Array, ""] | int | None = None,
    kv_lengths: Int[Array, "B"] | None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> tuple[Any, ...]:
    """Chooses the implementation; returns the arguments of `differentiable.attend_lists`.

    Queries are aligned to block boundaries: their number is a multiple of the row size, and the
    first one starts row `first_block`. If it is `None`, they are the sequences' last tokens. In a
    `shard_map`, see `vary_alike`.
    """
    kernel_config = kernel_config or default_kernel_config()
    chosen = choose_implementation(
        implementation,
        query,
        block_size=selection.block_size,
        row_size=None if first_block is None else selection.queries_per_row,
        kernel_config=kernel_config,
    )
    scale = default_scale(query.shape[-1]) if scale is None else scale
    options = differentiable.Options(scale, return_lse, chosen, kernel_config)
    lengths = per_sequence(kv_lengths, key.shape[-3], query.shape[0])
    layer = None if layer is None else jnp.asarray(layer, jnp.int32)
    given = differentiable.in_reverse_mode(query, key, value)
    arrays = (*given, selection, first_block, layer, lengths)
    return options, *vary_alike(*jax.tree.map(jnp.asarray, arrays))


def block_sparse_decode(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    selection: BlockSelection,
    *,
    kv_lengths: Int[Array, "B"],
    layer: Int[Array, ""] | int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B 1 N H"] | Any:
    """Exact attention of one token per sequence over its selected blocks (Algorithm 2 step 7).

    Args:
      query: Queries of the current token.
      key: Keys, including the current token's key, or a stacked cache with `layer`.
      value: Values, with the shape of `key`.
      selection: One list per sequence (`I = 1`).
      kv_lengths: Number of keys in each sequence, including the current token's key. The query
        has position `kv_lengths - 1`.
      layer: Layer of the stacked cache.
      scale: Factor of the scores. Default: `1 / sqrt(H)`.
      return_lse: Whether to also return the log-sum-exp of the scaled scores.
      implementation: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA GPUs), or `None` to choose by
        device and shape.
      kernel_config: Tile sizes of the implementation.

    Returns:
      The output in the dtype of the queries, and with `return_lse` the float32 log-sum-exp
      `[B, 1, N]`.

    Raises:
      ValueError: If shapes or dtypes do not fit together.
      NotImplementedError: If `implementation` cannot run here.
    """
    batch, num_tokens = check_qkv(query, key, value, layer)
    if num_tokens != 1:
        raise ValueError(f"query must hold one token per sequence, got {num_tokens}")
    _check_selection(selection, query, key, 1)
    check_per_sequence("kv_lengths", kv_lengths, batch)
    options, *arrays = prepare_lists(
        query,
        key,
        value,
        selection,
        None,
        layer=layer,
        kv_lengths=kv_lengths,
        scale=check_scale(scale),
        return_lse=return_lse,
        implementation=implementation,
        kernel_config=kernel_config,
    )
    attend: Any = partial(_attend_token, options)
    # `on_auto_axes` checks this too, but wrapping always would add one more call for each token.
    if any(map(explicit_axes, jax.tree.leaves(arrays))):
        attend = on_auto_axes(_specs)(attend)
    out, lse = attend(*arrays)
    return (out, lse) if return_lse else out


_attend_token = jax.jit(differentiable.attend_lists, static_argnums=0)


def dense_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    *,
    layer: Int[Array, ""] | int | None = None,
    query_offset: Int[Array, "B"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B T N H"] | Any:
    """Exact causal attention over all keys, in tiles, without an array of tokens × tokens.

    This is the reference for accuracy and the baseline of every speedup. The implementation depends
    on the call:

    * On an NVIDIA GPU, queries in bfloat16 or float16 that start at position 0 use cuDNN's flash
      attention, if it supports their head_dim (at most 128, a multiple of 8) and `return_lse` is
      false.
    * Queries that start elsewhere, as in decode, use the block-sparse kernels for NVIDIA GPUs with
      all blocks listed, if these support the call. They read a cache in place.
    * Everything else runs on XLA.

    On XLA and with these kernels, a key or value that is not finite gives NaN for the queries
    that see it, and for no others. cuDNN may also give NaN for earlier queries nearby.

    Args:
      query: Queries at positions `query_offset + 0 .. T - 1`.
      key: Keys from position 0 on, or a stacked cache `[L, B, S, K, H]` with `layer`.
      value: Values, with the shape of `key`.
      layer: Layer of the stacked cache.
      query_offset: Position of each sequence's first query token. Default: 0, which cuDNN requires.
      kv_lengths: Number of keys in each sequence. Later keys may have any values. Default: `S`.
        Queries at later positions are padding, and their outputs are meaningless.
      scale: Factor of the scores. Default: `1 / sqrt(H)`.
      return_lse: Whether to also return the log-sum-exp of the scaled scores.
      implementation: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA GPUs), `"cudnn"`, or `None` to
        choose by device and shape.
      kernel_config: Tile sizes of the implementation.

    Returns:
      The output in the dtype of the queries, and with `return_lse` the float32 log-sum-exp
      `[B, T, N]`.

    Raises:
      ValueError: If shapes or dtypes do not fit together.
      NotImplementedError: If `implementation` cannot run here.
    """
    batch, _ = check_qkv(query, key, value, layer)
    check_per_sequence("query_offset", query_offset, batch)
    check_per_sequence("kv_lengths", kv_lengths, batch)
    chosen = choose_dense_implementation(
        implementation,
        query,
        num_keys=key.shape[-3],
        has_offset=query_offset is not None,
        return_lse=return_lse,
        kernel_config=kernel_config,
    )
    return _attend_all(
        query,
        key,
        value,
        layer,
        query_offset,
        kv_lengths,
        scale=check_scale(scale),
        return_lse=return_lse,
        implementation=chosen,
        kernel_config=kernel_config or default_kernel_config(),
    )


@partial(jax.jit, static_argnames=_STATIC)
@on_auto_axes(_specs)
def _attend_all(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    layer: Int[Array, ""] | int | None,
    query_offset: Int[Array, "B"] | None,
    kv_lengths: Int[Array, "B"] | None,
    *,
    scale: float | None,
    return_lse: bool,
    implementation: str,
    kernel_config: KernelConfig,
) -> Float[Array, "B T N H"] | Any:
    """Runs `dense_attention` after its checks."""
    batch, num_tokens, num_heads, head_dim = query.shape
    offset = per_sequence(query_offset, 0, batch)
    lengths = per_sequence(kv_lengths, key.shape[-3], batch)
    if implementation == "mosaic_gpu":  # the block-sparse kernels, with all blocks listed
        options: dict[str, Any] = {
            "layer": layer,
            "scale": scale,
            "return_lse": return_lse,
            "implementation": implementation,
            "kernel_config": kernel_config,
        }
        num_blocks = key.shape[-3] // FULL_BLOCK
        if num_tokens == 1:
            # The decode kernel puts its query at the last key.
            lengths = jnp.minimum(lengths, offset + 1)
            rows = jnp.maximum(lengths - 1, 0)[:, None] // FULL_BLOCK
            lists = full_selection(rows, num_blocks, block_size=FULL_BLOCK)
            return block_sparse_decode(query, key, value, lists, kv_lengths=lengths, **options)
        num_rows = num_query_blocks(num_tokens, FULL_BLOCK, has_offset=query_offset is not None)
        rows = (offset // FULL_BLOCK)[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None, :]
        lists = full_selection(rows, num_blocks, block_size=FULL_BLOCK)
        is_row = rows * FULL_BLOCK < lengths[:, None]  # later rows are padding
        lists = dataclasses.replace(lists, counts=jnp.where(is_row[:, None], lists.counts, 0))
        options |= {"query_offset": query_offset, "kv_lengths": lengths}
        return block_sparse_attention(query, key, value, lists, **options)
    if implementation == "cudnn":
        arrays = differentiable.in_reverse_mode(query, key, value)
        return cudnn.attend_dense(*arrays, layer=layer, kv_lengths=kv_lengths, scale=scale)
    key, value = (differentiable.stack(x, layer) for x in (key, value))
    tile = min(kernel_config.dense_rows, num_tokens)
    is_decode = num_tokens == 1
    keys_per_step = kernel_config.dense_decode_keys if is_decode else kernel_config.dense_keys
    num_tiles = (num_tokens + tile - 1) // tile
    padded = num_tiles * tile
    query = jnp.pad(query, ((0, 0), (0, padded - num_tokens), (0, 0), (0, 0)))
    column = jnp.arange(padded, dtype=jnp.int32)[None, :]
    positions = offset[:, None] + column
    by_tile = query.reshape(batch, num_tiles, tile, num_heads, head_dim)
    arrays = vary_alike(
        *differentiable.in_reverse_mode(by_tile, key, value),
        positions.reshape(batch, num_tiles, tile),
        jnp.asarray(0 if layer is None else layer, jnp.int32),
        lengths,
    )
    scale = default_scale(head_dim) if scale is None else scale
    out, lse = differentiable.attend_dense((scale, keys_per_step), *arrays)
    out = out.reshape(batch, padded, num_heads, head_dim)[:, :num_tokens]
    lse = lse.reshape(batch, padded, num_heads)[:, :num_tokens]
    return (out, lse) if return_lse else out
