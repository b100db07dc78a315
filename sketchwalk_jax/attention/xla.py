"""Exact attention in plain JAX, for CPU, TPU and every GPU without kernels of our own.

Two loops share one step. `attend_lists` visits the listed key blocks of each tile of query rows,
`attend_dense` all keys up to the diagonal. Neither forms an array of size tokens × tokens, nor a
float32 copy of the cache: each step touches `block_step` blocks of keys and folds them into a
running softmax. The number of steps of a tile is its longest list, so a row costs what its own
budget asks, whatever the longest list of the prompt may be.

Axis letters: `B` batch, `I` rows (query tiles) and `R` those of one tile, `Q` tokens of a row, `K`
key/value heads (`N` for lists per query head), `M` the queries that share keys (heads of a group ×
tokens), `C` keys of one step, `H` head dim. A step is one batched matrix product each way over `Z`,
all of batch, rows and key/value heads merged: the shapes in which XLA neither transposes scores nor
splits products.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE, matmul_precision
from sketchwalk_jax.selection import BlockSelection

# key and value of one step [Z C H], and which scores count, broadcastable to [Z M C]
Tile = tuple[Array, Array, Array]
Running = tuple[Array, Array, Array]  # maximum, denominator [Z M], numerator [Z M H]


def _batched_dot(
    x: Float[Array, "Z M X"], y: Float[Array, "Z Y1 Y2"], contract: int
) -> Float[Array, "Z M Y"]:
    return jax.lax.dot_general(
        x,
        y,
        (((2,), (contract,)), ((0,), (0,))),
        precision=matmul_precision(y),
        preferred_element_type=jnp.float32,
    )


def _fold(running: Running, query: Float[Array, "Z M H"], tile: Tile, scale: float) -> Running:
    """One step of the running softmax: `m' = max(m, s)`, `o' = o e^(m - m') + e^(s - m') V`."""
    maximum, denominator, numerator = running
    key, value, visible = tile
    scores = jnp.where(visible, _batched_dot(query, key, 2) * scale, MASK_VALUE)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    update = _batched_dot(weights.astype(value.dtype), value, 1)
    denominator = denominator * decay + jnp.sum(weights, axis=-1)
    return new_maximum, denominator, numerator * decay[..., None] + update


def _attend_tile(
    query: Float[Array, "Z M H"],
    num_steps: Int[Array, ""],
    load: Callable[[Int[Array, ""]], Tile],
    scale: float,
) -> tuple[Float[Array, "Z M H"], Float[Array, "Z M"]]:
    """Attention of one tile of rows over `num_steps` tiles of keys, and its log-sum-exp."""
    shape = query.shape[:-1]
    start = (
        jnp.full(shape, FIRST_MAXIMUM, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
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


def _split_heads(query: Float[Array, "B I Q N H"], kv_heads: int) -> Float[Array, "B I K M H"]:
    """Queries by key/value head, the group's heads and the row's tokens as one axis `M = G Q`."""
    batch, num_rows, tokens, num_heads, head_dim = query.shape
    group = num_heads // kv_heads
    query = query.reshape(batch, num_rows, tokens, kv_heads, group, head_dim)
    query = jnp.transpose(query, (0, 1, 3, 4, 2, 5))
    return query.reshape(batch, num_rows, kv_heads, group * tokens, head_dim)


def _join_heads(
    out: Float[Array, "X B R K M H"], lse: Float[Array, "X B R K M"], shape: tuple[int, ...]
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]]:
    """The inverse of `_split_heads` over tiles of rows; `shape` is that of the queries."""
    batch, num_rows, tokens, num_heads, head_dim = shape
    tiles, _, rows, kv_heads = out.shape[:4]
    group = num_heads // kv_heads
    out = out.reshape(tiles, batch, rows, kv_heads, group, tokens, head_dim)
    lse = lse.reshape(tiles, batch, rows, kv_heads, group, tokens)
    out = jnp.transpose(out, (1, 0, 2, 5, 3, 4, 6))
    lse = jnp.transpose(lse, (1, 0, 2, 5, 3, 4))
    out = out.reshape(batch, tiles * rows, tokens, num_heads, head_dim)
    lse = lse.reshape(batch, tiles * rows, tokens, num_heads)
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
    shape = query.shape
    batch, num_rows, tokens, num_heads, head_dim = shape
    size = selection.block_size
    num_layers, _, key_tokens, kv_heads, _ = key.shape
    num_blocks = key_tokens // size
    blocked = (num_layers, batch, num_blocks, size, kv_heads, head_dim)
    # Without it XLA fuses the reshape with the write that made the cache, and so copies the cache.
    key, value = jax.lax.optimization_barrier((key, value))
    key, value = key.reshape(blocked), value.reshape(blocked)
    num_lists = selection.ids.shape[1]
    # Lists per query head make every query head a group of its own.
    loop_heads = max(num_lists, kv_heads)
    repeats = loop_heads // kv_heads
    group = num_heads // loop_heads
    row_tile = min(row_tile, num_rows)
    step = min(block_step, selection.ids.shape[-1])

    query = _split_heads(query, loop_heads)
    ids = _pad_axis(_pad_axis(selection.ids, 3, step, num_blocks), 2, row_tile, num_blocks)
    counts = _pad_axis(selection.counts, 2, row_tile)
    rows = (
        _rows_first(_pad_axis(query, 1, row_tile), row_tile),
        _rows_first(ids, row_tile, axis=2),
        _rows_first(counts, row_tile, axis=2),
        _rows_first(_pad_axis(positions, 1, row_tile), row_tile),
    )
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    kv_head = (jnp.arange(num_lists, dtype=jnp.int32) // repeats)[None, :, None, None]
    offsets = jnp.arange(size, dtype=jnp.int32)
    merged = (batch * row_tile * loop_heads, step * size, head_dim)

    def gather(cache: Array, ids: Int[Array, "B M R P"]) -> Float[Array, "B R K P size H"]:
        ids = jnp.minimum(ids, num_blocks - 1)
        if num_lists == 1:
            taken = cache.at[layer, sequence, ids[:, 0]].get(mode="promise_in_bounds")
            return jnp.transpose(taken, (0, 1, 4, 2, 3, 5))
        places = cache.at[layer, sequence[..., None], ids, :, kv_head]
        return jnp.swapaxes(places.get(mode="promise_in_bounds"), 1, 2)

    def attend_rows(
        tile: tuple[Array, Array, Array, Array],
    ) -> tuple[Float[Array, "B R K M H"], Float[Array, "B R K M"]]:
        tile_query, tile_ids, tile_counts, tile_positions = tile

        def load(index: Int[Array, ""]) -> Tile:
            ids = jax.lax.dynamic_slice_in_dim(tile_ids, index * step, step, axis=3)
            place = index * step + jnp.arange(step, dtype=jnp.int32)
            listed = place[None, None, None, :] < tile_counts[..., None]  # [B M R P]
            position = ids[..., None] * size + offsets[None, None, None, None, :]
            is_real = listed[..., None] & (position < kv_lengths[:, None, None, None, None])
            position = jnp.where(is_real, position, jnp.iinfo(jnp.int32).max)
            position, is_real = jnp.swapaxes(position, 1, 2), jnp.swapaxes(is_real, 1, 2)
            # Slots that hold no token may hold anything, NaN included; weight 0 would not erase it.
            values = jnp.where(is_real[..., None], gather(value, ids), 0)
            visible = (  # [B R M 1 Q C]
                position.reshape(batch, row_tile, num_lists, 1, 1, step * size)
                <= tile_positions[:, :, None, None, :, None]
            )
            heads = (batch, row_tile, loop_heads, group, tokens, step * size)
            visible = jnp.broadcast_to(visible, heads).reshape(merged[0], -1, step * size)
            return gather(key, ids).reshape(merged), values.reshape(merged), visible

        num_steps = (jnp.max(tile_counts) + step - 1) // step
        flat = tile_query.reshape(merged[0], group * tokens, head_dim)
        out, lse = _attend_tile(flat, num_steps, load, scale)
        return out.reshape(tile_query.shape), lse.reshape(tile_query.shape[:-1])

    out, lse = jax.lax.map(attend_rows, rows)
    return _join_heads(out, lse, shape)


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
    shape = query.shape
    batch, _, tokens, num_heads, head_dim = shape
    _, _, key_tokens, kv_heads, _ = key.shape
    key, value = jax.lax.optimization_barrier((key, value))  # as above: where one step takes all
    group = num_heads // kv_heads
    width = min(keys_per_step, key_tokens)
    query = _split_heads(query, kv_heads)
    rows = (_rows_first(query, 1), _rows_first(positions, 1))
    merged = (batch * kv_heads, width, head_dim)

    def attend_rows(
        tile: tuple[Array, Array],
    ) -> tuple[Float[Array, "B 1 K M H"], Float[Array, "B 1 K M"]]:
        tile_query, tile_positions = tile

        def load(index: Int[Array, ""]) -> Tile:
            first = index * width
            start = jnp.minimum(first, key_tokens - width)  # the last tile reaches back

            def slice_heads(cache: Array) -> Float[Array, "B K C H"]:
                extent = (1, batch, width, kv_heads, head_dim)
                taken = jax.lax.dynamic_slice(cache, (layer, 0, start, 0, 0), extent)[0]
                return jnp.swapaxes(taken, 1, 2)

            position = (start + jnp.arange(width, dtype=jnp.int32))[None, :]
            is_real = (position >= first) & (position < kv_lengths[:, None])  # [B C]
            position = jnp.where(is_real, position, jnp.iinfo(jnp.int32).max)
            values = jnp.where(is_real[:, None, :, None], slice_heads(value), 0)
            visible = position[:, None, None, None, :] <= tile_positions[:, :, None, :, None]
            heads = (batch, kv_heads, group, tokens, width)
            visible = jnp.broadcast_to(visible, heads).reshape(merged[0], -1, width)
            return slice_heads(key).reshape(merged), values.reshape(merged), visible

        reach = jnp.minimum(jnp.max(tile_positions) + 1, jnp.max(kv_lengths))
        flat = tile_query.reshape(merged[0], group * tokens, head_dim)
        out, lse = _attend_tile(flat, (reach + width - 1) // width, load, scale)
        return out.reshape(tile_query.shape), lse.reshape(tile_query.shape[:-1])

    out, lse = jax.lax.map(attend_rows, rows)
    return _join_heads(out, lse, shape)
