"""Exact attention in plain JAX, for CPU, TPU and every GPU that our kernels do not support.

Two loops share one step. `attend_lists` visits the listed key blocks of each tile of rows (query
blocks), `attend_dense` all keys up to the diagonal. Neither makes an array of tokens × tokens or a
float32 copy of the cache: each step reads `block_step` blocks of keys and updates a running
softmax. The number of steps of a tile is the length of its longest list, so a tile's cost does not
depend on longer lists elsewhere in the prompt.

Axis letters: `B` batch, `I` rows (query tiles) and `R` rows of one tile, `Q` tokens of a row, `K`
key/value heads (`N` for lists per query head), `M` the queries that share keys (heads of a group ×
tokens), `C` keys of one step, `H` head dim. A step is two batched matrix products over `Z`, which
merges batch, rows and key/value heads: in these shapes XLA neither transposes scores nor splits
products.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.dispatch import is_gpu
from sketchwalk_jax.precision import (
    FIRST_MAXIMUM,
    MASK_VALUE,
    matmul_precision,
    start_indices,
)
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import explicit_axes, varying_axes

_SUMMED_HEADS = 4  # if more heads share values, they are multiplied as a matrix
NOWHERE = jnp.iinfo(jnp.int32).max  # position of keys that no query sees

# key and value of one step [Z C H], and mask of visible keys, broadcastable to [Z M C]
Tile = tuple[Array, Array, Array]
Running = tuple[Array, Array, Array]  # maximum, denominator [Z M], numerator [Z M H]


def vary_alike(*trees: Any, like: Any = None) -> tuple[Any, ...]:
    """Under `shard_map`, makes all arrays vary over all mesh axes that any of them varies over.

    Loops and derivatives need types that agree. Outside of `shard_map` nothing happens.

    Args:
      *trees: The arrays.
      like: Other arrays, whose mesh axes the arrays get too.
    """
    arrays, structure = jax.tree.flatten(trees)
    every = frozenset[Any]().union(*map(varying_axes, [*arrays, *jax.tree.leaves(like)]))
    missing = [tuple(every - varying_axes(x)) for x in arrays]
    found = [
        jax.lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(arrays, missing, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def on_auto_axes(specs: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that turns mesh axes of type Explicit into Auto ones inside the function.

    XLA then divides the function's operations among the devices. Without such axes it does nothing.

    Args:
      specs: Function from the arguments' partition specs and the options to the results' specs.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arrays: Any, **options: Any) -> Any:
            spread = [x for x in jax.tree.leaves(arrays) if explicit_axes(x)]
            if not spread:
                return function(*arrays, **options)
            mesh = jax.typeof(spread[0]).sharding.mesh
            given = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, arrays)
            shardings = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                specs(*given, **options),
                is_leaf=lambda x: isinstance(x, PartitionSpec),
            )
            on_mesh = jax.sharding.auto_axes(
                functools.partial(function, **options),
                axes=mesh.explicit_axes,
                out_sharding=shardings,
            )
            return on_mesh(*arrays)

        return call

    return decorate


def batched_dot(
    x: Float[Array, "Z X1 X2"], y: Float[Array, "Z Y1 Y2"], contract: int, own: int = 2
) -> Float[Array, "Z M Y"]:
    """Matrix products over axis `own` of `x` and axis `contract` of `y`, summed in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((own,), (contract,)), ((0,), (0,))),
        precision=matmul_precision(y),
        preferred_element_type=jnp.float32,
    )


def _fold(running: Running, query: Float[Array, "Z M H"], tile: Tile, scale: float) -> Running:
    """One step of the running softmax: `m' = max(m, s)`, `o' = o e^(m - m') + e^(s - m') V`."""
    maximum, denominator, numerator = running
    key, value, visible = tile
    scores = jnp.where(visible, batched_dot(query, key, 2) * scale, MASK_VALUE)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    update = batched_dot(weights.astype(value.dtype), value, 1)
    denominator = denominator * decay + jnp.sum(weights, axis=-1)
    return new_maximum, denominator, numerator * decay[..., None] + update


def _fold_steps(
    query: Float[Array, "Z M H"],
    num_steps: Int[Array, ""],
    load: Callable[[Int[Array, ""]], Tile],
    scale: float,
) -> tuple[Float[Array, "Z M H"], Float[Array, "Z M"]]:
    """Attention of one tile of rows over `num_steps` tiles of keys, and its log-sum-exp."""
    one = query[..., 0]  # a template, so that under `shard_map` these vary like the query
    start = (
        jnp.full_like(one, FIRST_MAXIMUM, jnp.float32),
        jnp.zeros_like(one, jnp.float32),
        jnp.zeros_like(query, jnp.float32),
    )
    running = jax.lax.fori_loop(
        0, num_steps, lambda step, running: _fold(running, query, load(step), scale), start
    )
    out, lse = _finish(running)
    return out.astype(query.dtype), lse


def _finish(running: Running) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """Returns the output and its log-sum-exp: 0 and -inf for a row that saw no key."""
    maximum, denominator, numerator = running
    is_empty = denominator == 0.0
    safe = jnp.where(is_empty, 1.0, denominator)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(safe))
    return numerator / safe[..., None], lse


def pad_axis(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    """Pads one axis of `x` at its end with `value`, up to a multiple."""
    padding = -x.shape[axis] % multiple
    if not padding:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padding)
    return jnp.pad(x, widths, constant_values=value)


def rows_first(x: Array, tile: int, axis: int = 1) -> Array:
    """Splits the row axis into tiles and moves the tile index to the front, for `lax.map`."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // tile, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def split_heads(query: Float[Array, "B I Q N H"], kv_heads: int) -> Float[Array, "B I K M H"]:
    """Groups queries by key/value head; merges a group's heads and a row's tokens, `M = G Q`."""
    batch, num_rows, tokens, num_heads, head_dim = query.shape
    group = num_heads // kv_heads
    query = query.reshape(batch, num_rows, tokens, kv_heads, group, head_dim)
    query = jnp.transpose(query, (0, 1, 3, 4, 2, 5))
    return query.reshape(batch, num_rows, kv_heads, group * tokens, head_dim)


def join_heads(x: Array, shape: tuple[int, ...]) -> Array:
    """Inverts `split_heads` over tiles of rows, `[X B R K M H]` or without the last axis.

    `shape` is the shape of the queries, `[B I Q N H]`.
    """
    batch, num_rows, tokens, num_heads, _ = shape
    tiles, _, rows, kv_heads = x.shape[:4]
    x = x.reshape(tiles, batch, rows, kv_heads, num_heads // kv_heads, tokens, *x.shape[5:])
    x = jnp.transpose(x, (1, 0, 2, 5, 3, 4, *range(6, x.ndim)))
    return x.reshape(batch, tiles * rows, tokens, num_heads, *x.shape[6:])[:, :num_rows]


def gather_blocks(
    cache: Float[Array, "L B J size K H"],
    ids: Int[Array, "B M R P"],
    *,
    layer: Int[Array, ""],
    kv_head: Int[Array, "M"],
) -> Float[Array, "B R heads P size H"]:
    """Gathers the listed blocks of one layer, for every head from its own list."""
    sequence = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None, None]
    ids = jnp.minimum(ids, cache.shape[2] - 1)  # padding of a list is read and masked
    if ids.shape[1] == 1:  # one list for all heads: whole blocks of tokens are taken
        taken = cache.at[layer, sequence, ids[:, 0]].get(mode="promise_in_bounds")
        return jnp.transpose(taken, (0, 1, 4, 2, 3, 5))
    place = cache.at[layer, sequence[..., None], ids, :, kv_head[None, :, None, None]]
    return jnp.swapaxes(place.get(mode="promise_in_bounds"), 1, 2)


def listed_positions(
    ids: Int[Array, "B M R P"],
    is_listed: Bool[Array, "B M R P"],
    kv_lengths: Int[Array, "B"],
    block_size: int,
) -> tuple[Int[Array, "B R M P size"], Bool[Array, "B R M P size"]]:
    """Positions of a step's keys, `NOWHERE` if not listed or absent; and a mask of the others."""
    offset = jnp.arange(block_size, dtype=jnp.int32)
    position = ids[..., None] * block_size + offset[None, None, None, None, :]
    is_real = is_listed[..., None] & (position < kv_lengths[:, None, None, None, None])
    position = jnp.where(is_real, position, NOWHERE)
    return jnp.swapaxes(position, 1, 2), jnp.swapaxes(is_real, 1, 2)


def _first_lost(
    value: Float[Array, "L B J size K H"],
    tile: tuple[Int[Array, "B M R P"], Int[Array, "B M R"], Int[Array, "B R O"]],
    *,
    layer: Int[Array, ""],
    kv_head: Int[Array, "M"],
    kv_lengths: Int[Array, "B"],
) -> Int[Array, "B R heads"]:
    """Position of the first value that is not finite in each row's own block.

    Some queries of a row do not see all of the row's own block, and a weight of 0 does not remove
    NaN. Queries that see any value from this position on also see this value. So values from here
    on can be set to 0, and outputs of queries from here on to NaN. Other listed blocks are whole.

    A tile has block indices of rows, their counts, and the blocks of the rows' own tokens. If all
    listed values are finite, the result is the end of the row.
    """
    ids, counts, own = tile
    size = value.shape[3]
    place = jnp.arange(ids.shape[-1], dtype=jnp.int32)[None, None, None, :]
    blocks = jnp.broadcast_to(own[:, None], (*ids.shape[:3], own.shape[2]))
    is_own = ids[..., None, :] == blocks[..., :, None]
    is_listed = jnp.any(is_own & (place < counts[..., None])[..., None, :], axis=-1)
    position, is_real = listed_positions(blocks, is_listed, kv_lengths, size)
    taken = gather_blocks(value, blocks, layer=layer, kv_head=kv_head)
    is_lost = is_real & ~jnp.all(jnp.isfinite(taken), axis=-1)
    end = (own[:, :, -1:] + 1) * size
    return jnp.minimum(end, jnp.min(jnp.where(is_lost, position, NOWHERE), axis=(3, 4)))


def sees(
    query_positions: Int[Array, "B R Q"],
    key_positions: Int[Array, "B R M C"],
    heads: int,
    group: int,
) -> Bool[Array, "Z GQ C"]:
    """Whether each query causally sees each key, in the layout of the matrix products."""
    visible = key_positions[:, :, :, None, None, :] <= query_positions[:, :, None, None, :, None]
    batch, rows, _, _, tokens, keys = visible.shape  # [B R M 1 Q C]
    visible = jnp.broadcast_to(visible, (batch, rows, heads, group, tokens, keys))
    return visible.reshape(batch * rows * heads, group * tokens, keys)


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
    """Attention of each row over its listed blocks, causal by `positions` (Algorithm 1 step 8).

    Tiles of `row_tile` rows run one after another. Each updates a running softmax with `block_step`
    listed blocks at a time, until its longest list ends. `S` is a multiple of the row size, and the
    queries of a row are in one block of that size. Returns the output and its log-sum-exp. A key or
    value that is not finite affects only the queries that see it.
    """
    shape, size = query.shape, selection.block_size
    batch, num_rows, tokens, num_heads, head_dim = shape
    num_layers, _, num_keys, kv_heads, _ = key.shape
    num_blocks, num_lists = num_keys // size, selection.ids.shape[1]
    # If each query head has its own list, each is a group of its own.
    heads = max(num_lists, kv_heads)
    group = num_heads // heads
    kv_head = jnp.arange(num_lists, dtype=jnp.int32) // (heads // kv_heads)
    row_tile, step = min(row_tile, num_rows), min(block_step, selection.ids.shape[-1])
    # Without the barrier, XLA fuses the reshape with the cache's write, and so copies the cache.
    key, value = jax.lax.optimization_barrier((key, value))
    blocked = (num_layers, batch, num_blocks, size, kv_heads, head_dim)
    key, value = key.reshape(blocked), value.reshape(blocked)

    def attend_tile(
        tile: tuple[Array, Array, Array, Array],
    ) -> tuple[Float[Array, "B R K M H"], Float[Array, "B R K M"]]:
        query, ids, counts, positions = tile
        products = (batch * row_tile * heads, -1, head_dim)  # [Z, queries or keys, H]
        last = jnp.max(positions, axis=-1)
        if tokens == 1:
            end = (last + 1)[:, :, None]  # of the keys that the query sees
        else:
            where: dict[str, Any] = {"layer": layer, "kv_head": kv_head, "kv_lengths": kv_lengths}
            row = selection.queries_per_row
            part = jnp.arange(row // size, dtype=jnp.int32)[None, None]
            own = last[..., None] // row * (row // size) + part
            end = _first_lost(value, (ids, counts, own), **where)

        def load(index: Int[Array, ""]) -> Tile:
            listed = jax.lax.dynamic_slice_in_dim(ids, index * step, step, axis=3)
            place = index * step + jnp.arange(step, dtype=jnp.int32)
            is_listed = place[None, None, None, :] < counts[..., None]
            position, is_real = listed_positions(listed, is_listed, kv_lengths, size)
            visible = sees(
                positions, position.reshape(*position.shape[:3], step * size), heads, group
            )
            keys, values = (
                gather_blocks(x, listed, layer=layer, kv_head=kv_head) for x in (key, value)
            )
            # Absent tokens may be NaN, which a weight of 0 would not remove.
            is_taken = is_real & (position < end[..., None, None])
            values = jnp.where(is_taken[..., None], values, 0)
            return keys.reshape(products), values.reshape(products), visible

        num_steps = (jnp.max(counts) + step - 1) // step
        out, lse = _fold_steps(query.reshape(products), num_steps, load, scale)
        out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
        if tokens == 1:
            return out, lse
        is_lost = positions[:, :, None, None, :] >= end[..., None, None]  # [B R heads 1 Q]
        is_lost = jnp.broadcast_to(is_lost, (*lse.shape[:3], group, tokens)).reshape(lse.shape)
        return jnp.where(is_lost[..., None], jnp.nan, out), jnp.where(is_lost, jnp.nan, lse)

    query = split_heads(query, heads)
    ids = pad_axis(pad_axis(selection.ids, 3, step, num_blocks), 2, row_tile, num_blocks)
    counts = pad_axis(selection.counts, 2, row_tile)
    tiles = (
        rows_first(pad_axis(query, 1, row_tile), row_tile),
        rows_first(ids, row_tile, axis=2),
        rows_first(counts, row_tile, axis=2),
        rows_first(pad_axis(positions, 1, row_tile), row_tile),
    )
    out, lse = jax.lax.map(attend_tile, tiles)
    return join_heads(out, shape), join_heads(lse, shape)


def attend_dense_token(
    query: Float[Array, "B 1 1 N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    positions: Int[Array, "B 1 1"],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
) -> tuple[Float[Array, "B 1 1 N H"], Float[Array, "B 1 1 N"]]:
    """`attend_dense` for one token per sequence, in the form that XLA fuses best on a GPU.

    With so few rows, memory traffic decides. Matrix products would first copy keys and values by
    head, which takes three passes over them, and would transpose the whole cache before the first
    layer and after the last. Sums of products are fused with the reads of the cache in place. XLA
    then makes one or two passes over the keys, and half as many over the values as heads share
    them. If five or more heads share values, a product with copied values is cheaper.
    """
    batch, _, _, num_heads, head_dim = query.shape
    key_tokens, kv_heads = key.shape[2:4]
    heads = query.reshape(batch, 1, kv_heads, -1, head_dim)
    group = heads.shape[3]
    keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (key, value))
    place = jnp.arange(key_tokens, dtype=jnp.int32)[None]
    is_seen = (place <= positions[:, 0]) & (place < kv_lengths[:, None])
    is_seen = is_seen[..., None, None]  # [B S 1 1]
    wide = keys.astype(jnp.float32)
    products = [
        jnp.sum(wide * heads[:, :, :, index].astype(jnp.float32), axis=-1) for index in range(group)
    ]
    scores = jnp.where(is_seen, jnp.stack(products, axis=-1) * scale, MASK_VALUE)  # [B S K G]
    maximum = jnp.max(scores, axis=1, initial=FIRST_MAXIMUM)
    # Without the barrier, each exponential would be computed again for every feature of a value.
    weights = jax.lax.optimization_barrier(jnp.exp(scores - maximum[:, None]))
    denominator = jnp.sum(weights, axis=1)
    values = jnp.where(is_seen, values, 0)  # a weight of 0 would not remove NaN
    if group <= _SUMMED_HEADS:
        wide = values.astype(jnp.float32)
        sums = [jnp.sum(wide * weights[..., index, None], axis=1) for index in range(group)]
        numerator = jnp.stack(sums, axis=2)
    else:
        numerator = jnp.einsum(
            "bskg,bskh->bkgh",
            weights.astype(values.dtype),
            values,
            precision=matmul_precision(values),
            preferred_element_type=jnp.float32,
        )
    out, lse = _finish((maximum, denominator, numerator))
    return out.astype(query.dtype).reshape(query.shape), lse.reshape(query.shape[:-1])


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
    """Attention of each row over all keys up to its positions, `keys_per_step` at a time.

    Returns the output and its log-sum-exp. A key or value that is not finite affects only the
    queries that see it.
    """
    shape = query.shape
    batch, _, _, num_heads, head_dim = shape
    if shape[1] * shape[2] == 1 and is_gpu():
        where: dict[str, Any] = {"layer": layer, "kv_lengths": kv_lengths, "scale": scale}
        return attend_dense_token(query, key, value, positions, **where)
    key_tokens, kv_heads = key.shape[2:4]
    key, value = jax.lax.optimization_barrier((key, value))  # as in `attend_lists`
    group = num_heads // kv_heads
    width = min(keys_per_step, key_tokens)
    products = (batch * kv_heads, -1, head_dim)  # [Z, queries or keys, H]

    def attend_tile(
        tile: tuple[Array, Array],
    ) -> tuple[Float[Array, "B 1 K M H"], Float[Array, "B 1 K M"]]:
        query, positions = tile

        def load(index: Int[Array, ""]) -> Tile:
            first = index * width
            start = jnp.minimum(first, key_tokens - width)  # the last tile starts earlier to fit

            def slice_heads(cache: Array) -> Float[Array, "B K C H"]:
                extent = (1, batch, width, kv_heads, head_dim)
                place = start_indices(layer, 0, start, 0, 0)
                taken = jax.lax.dynamic_slice(cache, place, extent)[0]
                return jnp.swapaxes(taken, 1, 2)

            position = (start + jnp.arange(width, dtype=jnp.int32))[None, :]
            is_real = (position >= first) & (position < kv_lengths[:, None])  # [B C]
            position = jnp.where(is_real, position, NOWHERE)
            keys, values = slice_heads(key), slice_heads(value)
            # No query sees keys after the last query, and a weight of 0 would not remove NaN.
            is_seen = position <= jnp.max(positions, axis=(1, 2))[:, None]
            values = jnp.where(is_seen[:, None, :, None], values, 0)
            if positions.shape[-1] > 1:
                # Queries before such a value have weight 0 for it, which would not remove NaN. So
                # make its score NaN and its value 0: this affects only the queries that see it.
                is_lost = ~jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
                keys = jnp.where(is_lost, jnp.nan, keys)
                values = jnp.where(is_lost, 0, values)
            visible = sees(positions, position[:, None, None, :], kv_heads, group)
            return keys.reshape(products), values.reshape(products), visible

        reach = jnp.minimum(jnp.max(positions) + 1, jnp.max(kv_lengths))
        if positions.shape[-1] > 1:  # in prompts, tiles of padding alone need no keys
            is_padding = jnp.min(positions, axis=(1, 2)) >= kv_lengths
            reach = jnp.where(jnp.all(is_padding), 0, reach)
        num_steps = (reach + width - 1) // width
        out, lse = _fold_steps(query.reshape(products), num_steps, load, scale)
        return out.reshape(query.shape), lse.reshape(query.shape[:-1])

    query = split_heads(query, kv_heads)
    out, lse = jax.lax.map(attend_tile, (rows_first(query, 1), rows_first(positions, 1)))
    return join_heads(out, shape), join_heads(lse, shape)
