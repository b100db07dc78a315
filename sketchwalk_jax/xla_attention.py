"""Exact attention in plain JAX, for CPU, TPU and every GPU without kernels of our own.

Two loops share one step. `attend_lists` visits the listed key blocks of each tile of query rows,
`attend_dense` all keys up to the diagonal. Neither forms an array of size tokens × tokens, nor a
float32 copy of the cache: each step touches `block_step` blocks of keys and folds them into a
running softmax. The number of steps of a tile is its longest list, so a row costs what its own
budget asks, whatever the longest list of the prompt may be.

Axis letters: `B` batch, `I` rows (query tiles), `Q` tokens of a row, `K` key/value heads (`N` for
lists per query head), `G` query heads per key/value head, `C` keys of one step, `H` head dim.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.selection import BlockSelection

# A finite stand-in for log(0): differences of it stay finite, so that empty rows give 0, not NaN.
MASK_VALUE = -1e30

Tile = tuple[Array, Array, Array]  # key, value [B R C K H] or [B C K H], visible [B R Q #K C]
Running = tuple[Array, Array, Array]  # maximum, denominator [B R K G Q], numerator [B R K G Q H]


def _fold(
    running: Running, query: Float[Array, "B R K G Q H"], tile: Tile, scale: float
) -> Running:
    """One step of the running softmax: `m' = max(m, s)`, `o' = o e^(m - m') + e^(s - m') V`."""
    maximum, denominator, numerator = running
    key, value, visible = tile
    rows = "r" if key.ndim == 5 else ""
    scores = jnp.einsum(
        f"brkgqh,b{rows}ckh->brkgqc", query, key, preferred_element_type=jnp.float32
    )
    # [B R Q K C] -> [B R K 1 Q C]
    visible = jnp.moveaxis(visible, 3, 2)[:, :, :, None]
    scores = jnp.where(visible, scores * scale, MASK_VALUE)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - new_maximum[..., None]), 0.0)
    decay = jnp.exp(maximum - new_maximum)
    update = jnp.einsum(
        f"brkgqc,b{rows}ckh->brkgqh",
        weights.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    denominator = denominator * decay + jnp.sum(weights, axis=-1)
    return new_maximum, denominator, numerator * decay[..., None] + update


def _attend_tile(
    query: Float[Array, "B R K G Q H"],
    num_steps: Int[Array, ""],
    load: Callable[[Int[Array, ""]], Tile],
    scale: float,
) -> tuple[Float[Array, "B R K G Q H"], Float[Array, "B R K G Q"]]:
    """Attention of one tile of rows over `num_steps` tiles of keys, and its log-sum-exp."""
    shape = query.shape[:-1]
    start = (
        jnp.full(shape, MASK_VALUE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, query.shape[-1]), jnp.float32),
    )
    maximum, denominator, numerator = jax.lax.fori_loop(
        0, num_steps, lambda step, running: _fold(running, query, load(step), scale), start
    )
    is_empty = denominator == 0.0
    safe = jnp.where(is_empty, 1.0, denominator)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(safe))
    return (numerator / safe[..., None]).astype(query.dtype), lse


def _pad_axis(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    padding = -x.shape[axis] % multiple
    if not padding:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padding)
    return jnp.pad(x, widths, constant_values=value)


def _rows_first(x: Array, tile: int, axis: int = 1) -> Array:
    """Splits the row axis into tiles and moves the tile index to the front, for `lax.map`."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // tile, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join_rows(
    out: Float[Array, "Z B R K G Q H"], lse: Float[Array, "Z B R K G Q"], num_rows: int
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]]:
    tiles, batch, rows, kv_heads, group, tokens, head_dim = out.shape
    out = jnp.transpose(out, (1, 0, 2, 5, 3, 4, 6))
    lse = jnp.transpose(lse, (1, 0, 2, 5, 3, 4))
    heads = kv_heads * group
    out = out.reshape(batch, tiles * rows, tokens, heads, head_dim)
    lse = lse.reshape(batch, tiles * rows, tokens, heads)
    return out[:, :num_rows], lse[:, :num_rows]


def attend_lists(
    query: Float[Array, "B I Q N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    selection: BlockSelection,
    positions: Int[Array, "B I Q"],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    row_tile: int,
    block_step: int,
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]]:
    """Attention of each row over its listed blocks, causal by `positions`.

    `S` is a multiple of the block size. Returns the output and its log-sum-exp.
    """
    batch, num_rows, tokens, num_heads, head_dim = query.shape
    size = selection.block_size
    num_layers, _, key_tokens, kv_heads, _ = key.shape
    num_blocks = key_tokens // size
    blocked = (num_layers, batch, num_blocks, size, kv_heads, head_dim)
    key, value = key.reshape(blocked), value.reshape(blocked)
    num_lists = selection.ids.shape[1]
    lists_per_kv = num_lists // kv_heads if num_lists > 1 else 1
    # Lists per query head make every query head a group of its own.
    loop_heads = num_heads if num_lists == num_heads and num_lists > kv_heads else kv_heads
    group = num_heads // loop_heads
    row_tile = min(row_tile, num_rows)
    step = min(block_step, selection.ids.shape[-1])

    query = query.reshape(batch, num_rows, tokens, loop_heads, group, head_dim)
    query = jnp.transpose(query, (0, 1, 3, 4, 2, 5))
    ids = _pad_axis(_pad_axis(selection.ids, 3, step, num_blocks), 2, row_tile, num_blocks)
    counts = _pad_axis(selection.counts, 2, row_tile)
    rows = (
        _rows_first(_pad_axis(query, 1, row_tile), row_tile),
        _rows_first(ids, row_tile, axis=2),
        _rows_first(counts, row_tile, axis=2),
        _rows_first(_pad_axis(positions, 1, row_tile), row_tile),
    )
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    kv_head = (jnp.arange(num_lists, dtype=jnp.int32) // lists_per_kv)[None, :, None, None]
    offsets = jnp.arange(size, dtype=jnp.int32)

    def gather(cache: Array, ids: Int[Array, "B M R P"]) -> Float[Array, "B R C K H"]:
        ids = jnp.minimum(ids, num_blocks - 1)
        if num_lists == 1:
            taken = cache.at[layer, sequence, ids[:, 0]].get(mode="promise_in_bounds")
        else:
            places = cache.at[layer, sequence[..., None], ids, :, kv_head]
            taken = places.get(mode="promise_in_bounds")  # [B M R P size H]
            taken = jnp.transpose(taken, (0, 2, 3, 4, 1, 5))
        return taken.reshape(batch, row_tile, step * size, -1, head_dim)

    def attend_rows(
        tile: tuple[Array, Array, Array, Array],
    ) -> tuple[Float[Array, "B R K G Q H"], Float[Array, "B R K G Q"]]:
        tile_query, tile_ids, tile_counts, tile_positions = tile

        def load(index: Int[Array, ""]) -> Tile:
            ids = jax.lax.dynamic_slice_in_dim(tile_ids, index * step, step, axis=3)
            place = index * step + jnp.arange(step, dtype=jnp.int32)
            listed = place[None, None, None, :] < tile_counts[..., None]  # [B M R P]
            key_position = ids[..., None] * size + offsets[None, None, None, None, :]
            key_position = jnp.where(listed[..., None], key_position, jnp.iinfo(jnp.int32).max)
            key_position = key_position.reshape(batch, num_lists, row_tile, 1, step * size)
            key_position = jnp.transpose(key_position, (0, 2, 3, 1, 4))  # [B R 1 M C]
            present = key_position < kv_lengths[:, None, None, None, None]
            visible = present & (key_position <= tile_positions[:, :, :, None, None])
            # Slots that hold no token may hold anything, NaN included; weight 0 would not erase it.
            is_real = jnp.swapaxes(present[:, :, 0], 2, 3)[..., None]  # [B R C M 1]
            return gather(key, ids), jnp.where(is_real, gather(value, ids), 0), visible

        num_steps = (jnp.max(tile_counts) + step - 1) // step
        return _attend_tile(tile_query, num_steps, load, scale)

    out, lse = jax.lax.map(attend_rows, rows)
    return _join_rows(out, lse, num_rows)


def attend_dense(
    query: Float[Array, "B I Q N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    positions: Int[Array, "B I Q"],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    keys_per_step: int,
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]]:
    """Attention of each row over all keys up to its positions, tile by tile."""
    batch, num_rows, tokens, num_heads, head_dim = query.shape
    _, _, key_tokens, kv_heads, _ = key.shape
    width = min(keys_per_step, key_tokens)
    query = query.reshape(batch, num_rows, tokens, kv_heads, num_heads // kv_heads, head_dim)
    query = jnp.transpose(query, (0, 1, 3, 4, 2, 5))
    rows = (_rows_first(query, 1), _rows_first(positions, 1))

    def attend_rows(
        tile: tuple[Array, Array],
    ) -> tuple[Float[Array, "B R K G Q H"], Float[Array, "B R K G Q"]]:
        tile_query, tile_positions = tile

        def load(index: Int[Array, ""]) -> Tile:
            first = index * width
            start = jnp.minimum(first, key_tokens - width)  # the last tile reaches back
            begin = (layer, 0, start, 0, 0)
            extent = (1, batch, width, kv_heads, head_dim)
            key_position = start + jnp.arange(width, dtype=jnp.int32)
            key_position = jnp.where(key_position < first, jnp.iinfo(jnp.int32).max, key_position)
            key_position = key_position[None, None, None, None, :]
            present = key_position < kv_lengths[:, None, None, None, None]
            visible = present & (key_position <= tile_positions[:, :, :, None, None])
            tile_value = jax.lax.dynamic_slice(value, begin, extent)[0]
            return (
                jax.lax.dynamic_slice(key, begin, extent)[0],
                jnp.where(present[:, 0, 0, 0, :, None, None], tile_value, 0),
                visible,
            )

        reach = jnp.minimum(jnp.max(tile_positions) + 1, jnp.max(kv_lengths))
        return _attend_tile(tile_query, (reach + width - 1) // width, load, scale)

    out, lse = jax.lax.map(attend_rows, rows)
    return _join_rows(out, lse, num_rows)


def default_scale(head_dim: int) -> float:
    """`1 / sqrt(H)`."""
    return 1.0 / math.sqrt(head_dim)
