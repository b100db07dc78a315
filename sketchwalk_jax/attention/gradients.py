"""Derivatives of exact attention for all implementations: plain JAX in tiles, no tokens x tokens.

The log-sum-exp `L` of each query, its output `O` and the cotangents `dO` and `dL` give the softmax
weights back, one tile at a time (Dao, FlashAttention-2, Algorithm 2):

    P  = e^(scale Q Kᵀ - L)                 D  = rowsum(dO ∘ O) - dL
    dS = P ∘ (dO Vᵀ - D)                    dV = Pᵀ dO
    dQ = scale dS K                         dK = scale dSᵀ Q

Two loops sum in float32. The first goes over tiles of queries, like the forward pass, and computes
`dQ`. The second goes over tiles of keys and gathers the queries that see them. For listed blocks,
*inverse* lists give these queries: a sort of the block indices finds the rows that list each block.
So no query scatters to keys: no step waits for memory that others write, and results are the same
bit for bit in each run. The price is that `P` and `dO Vᵀ` are computed twice: seven matrix products
instead of five.

Inverse lists differ in length far more than the lists: every row may list the first block. So the
second loop takes *pieces* of inverse lists, of up to `row_step` rows. Each step takes the same
number of pieces, of any blocks, and adds up the pieces of one block before it writes them.

Block indices are constants: no derivative goes through the selection of blocks.

A query without cotangents adds nothing to any derivative. Here it is masked, so that it sees no
key: it and its keys may be NaN, and a factor of 0 would not remove NaN.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.xla import (
    NOWHERE,
    Tile,
    batched_dot,
    gather_blocks,
    join_heads,
    listed_positions,
    pad_axis,
    rows_first,
    sees,
    split_heads,
)
from sketchwalk_jax.precision import MASK_VALUE
from sketchwalk_jax.selection import BlockSelection


class Queries(NamedTuple):
    """Queries and their residuals for the backward pass, all with the same layout.

    Attributes:
      query: Queries, features last.
      grad: Cotangents of the queries' outputs.
      lse: Log-sum-exp; positive infinity if a query sees no key or has no cotangents.
      delta: `D`, which is subtracted from each derivative of a weight.
    """

    query: Float[Array, "*rest H"]
    grad: Float[Array, "*rest H"]
    lse: Float[Array, "*rest"]
    delta: Float[Array, "*rest"]


def _of_outputs(
    query: Float[Array, "B I Q N H"],
    out: Float[Array, "B I Q N H"],
    lse: Float[Array, "B I Q N"],
    grad: Float[Array, "B I Q N H"],
    grad_lse: Float[Array, "B I Q N"] | None,
    heads: int,
) -> Queries:
    """Groups queries by key/value head, `[B I K M H]`, and computes `lse` and `delta`."""
    is_idle = jnp.all(grad == 0.0, axis=-1)
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if grad_lse is not None:
        is_idle, delta = is_idle & (grad_lse == 0.0), delta - grad_lse
    is_idle = is_idle | (lse == -jnp.inf)
    lse, delta = jnp.where(is_idle, jnp.inf, lse), jnp.where(is_idle, 0.0, delta)
    query = jnp.where(is_idle[..., None], 0, query)
    lse, delta = (split_heads(x[..., None], heads)[..., 0] for x in (lse, delta))
    return Queries(split_heads(query, heads), split_heads(grad, heads), lse, delta)


def _products(queries: Queries, heads_and_rows: int) -> Queries:
    """Reshapes queries for matrix products, to `[Z M H]`."""
    query, grad = (
        x.reshape(heads_and_rows, -1, x.shape[-1]) for x in (queries.query, queries.grad)
    )
    return Queries(query, grad, *(x.reshape(heads_and_rows, -1) for x in queries[2:]))


def _weights_and_slopes(
    queries: Queries,
    key: Float[Array, "Z C H"],
    value: Float[Array, "Z C H"],
    visible: Bool[Array, "Z M C"],
    scale: float,
) -> tuple[Float[Array, "Z M C"], Float[Array, "Z M C"]]:
    """Computes `P` and `dS` of the module's equations, without the factor `scale`.

    Scores are computed as in the forward pass, with operands in the same order. If scores are large
    and round differently, they no longer fit the log-sum-exp. For the same reason weights are
    clipped to 1.
    """
    visible = visible & (queries.lse != jnp.inf)[..., None]
    scores = jnp.where(visible, batched_dot(queries.query, key, 2) * scale, MASK_VALUE)
    weights = jnp.exp(jnp.minimum(scores - queries.lse[..., None], 0.0))
    slope = batched_dot(queries.grad, value, 2) - queries.delta[..., None]
    return weights, jnp.where(visible, weights * slope, 0.0)


def _query_gradient(
    queries: Queries,
    num_steps: Int[Array, ""],
    load: Callable[[Int[Array, ""]], Tile],
    scale: float,
) -> Float[Array, "Z M H"]:
    """Computes `dQ` of one tile of queries `[Z M H]` over `num_steps` tiles of keys."""

    def add(step: Int[Array, ""], total: Array) -> Array:
        key, value, visible = load(step)
        _, slope = _weights_and_slopes(queries, key, value, visible, scale)
        key = jnp.where(jnp.isfinite(key), key, 0)  # queries that see it have a slope of NaN or 0
        return total + batched_dot(slope.astype(key.dtype), key, 1)

    start = jnp.zeros_like(queries.query, jnp.float32)
    return jax.lax.fori_loop(0, num_steps, add, start) * scale


def _key_gradients(
    key: Float[Array, "Z C H"],
    value: Float[Array, "Z C H"],
    queries: Queries,
    visible: Bool[Array, "Z M C"],
    scale: float,
) -> tuple[Float[Array, "Z C H"], Float[Array, "Z C H"]]:
    """Contribution of a tile of queries `[Z M H]` to `dK` and `dV` of a tile of keys."""
    weights, slope = _weights_and_slopes(queries, key, value, visible, scale)
    slope, weights = (slope * scale).astype(key.dtype), weights.astype(key.dtype)
    of_key = batched_dot(slope, queries.query, 1, own=1)
    return of_key, batched_dot(weights, queries.grad, 1, own=1)


# Attention over listed blocks.


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Keys and values of one layer by block; both loops gather from them.

    Attributes:
      key: Keys of all layers.
      value: Values, shaped like `key`.
      layer: The layer.
      kv_head: Key/value head of each list.
      kv_lengths: Number of keys in each sequence.
    """

    key: Float[Array, "L B J size K H"]
    value: Float[Array, "L B J size K H"]
    layer: Int[Array, ""]
    kv_head: Int[Array, "M"]
    kv_lengths: Int[Array, "B"]

    def load(
        self, ids: Int[Array, "B M R P"], is_listed: Bool[Array, "B M R P"]
    ) -> tuple[Array, Array, Int[Array, "B R M C"]]:
        """Keys and values `[B R heads P size H]` of blocks, 0 at absent tokens, and positions."""
        size = self.key.shape[3]
        position, is_real = listed_positions(ids, is_listed, self.kv_lengths, size)
        # Absent tokens may be NaN, and a factor of 0 would not remove NaN.
        key, value = (
            jnp.where(
                is_real[..., None],
                gather_blocks(x, ids, layer=self.layer, kv_head=self.kv_head),
                0,
            )
            for x in (self.key, self.value)
        )
        return key, value, position.reshape(*position.shape[:3], -1)


@dataclasses.dataclass(frozen=True)
class _Inverse:
    """The rows that list each block, in pieces of up to `step` rows of one block.

    A sort orders the (row, block) pairs of the lists by block, so they need as much memory as the
    lists.

    Attributes:
      rows: Rows in the order of the blocks that they list; the rows of one block are ascending.
      starts: Index in `rows` of each block's first row.
      counts: Number of rows that list each block.
      ends: Number of pieces of all blocks up to and including each block.
      step: Maximum number of rows of a piece.
    """

    rows: Int[Array, "B M E"]
    starts: Int[Array, "B M J"]
    counts: Int[Array, "B M J"]
    ends: Int[Array, "B M J"]
    step: int

    @classmethod
    def of(cls, selection: BlockSelection, num_blocks: int, step: int) -> "_Inverse":
        """Inverts a selection."""
        batch, lists, num_rows, length = selection.ids.shape
        place = jnp.arange(length, dtype=jnp.int32)
        is_listed = place[None, None, None, :] < selection.counts[..., None]
        blocks = jnp.where(is_listed, selection.ids, num_blocks).reshape(batch, lists, -1)
        row = jnp.arange(num_rows, dtype=jnp.int32)[None, None, :, None]
        rows = jnp.broadcast_to(row, selection.ids.shape).reshape(blocks.shape)
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        head = jnp.arange(lists, dtype=jnp.int32)[None, :, None]
        zeros = jnp.zeros_like(blocks, shape=(batch, lists, num_blocks))
        counts = zeros.at[sequence, head, blocks].add(1, mode="drop")
        _, rows = jax.lax.sort((blocks, rows), num_keys=1, is_stable=True)
        starts = jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts
        ends = jnp.cumsum((counts + step - 1) // step, axis=-1, dtype=jnp.int32)
        return cls(rows, starts, counts, ends, step)

    def pieces(
        self, first: Int[Array, ""], number: int
    ) -> tuple[Int[Array, "B M R"], Int[Array, "B M R P"], Bool[Array, "B M R P"]]:
        """Returns the blocks of some pieces, the rows of each piece, and a mask of valid rows.

        Pieces beyond the last one have no valid rows, and `num_blocks` as their block.
        """
        batch, lists, num_entries = self.rows.shape
        piece = first + jnp.arange(number, dtype=jnp.int32)
        is_behind = self.ends[:, :, None, :] <= piece[None, None, :, None]
        blocks = jnp.sum(is_behind, axis=-1, dtype=jnp.int32)

        def of_block(x: Int[Array, "B M J"]) -> Int[Array, "B M R"]:
            return jnp.take_along_axis(x, blocks, axis=-1, mode="fill", fill_value=0)

        # Pieces count back from the end of their block, so the first pieces are full.
        left = of_block(self.ends) - piece[None, None, :]
        counts = of_block(self.counts)
        used = ((counts + self.step - 1) // self.step - left) * self.step
        step = jnp.arange(self.step, dtype=jnp.int32)
        place = used[..., None] + step[None, None, None, :]
        is_row = place < counts[..., None]
        found = jnp.clip(of_block(self.starts)[..., None] + place, 0, num_entries - 1)
        rows = jnp.take_along_axis(self.rows, found.reshape(batch, lists, -1), axis=-1)
        return blocks, rows.reshape(found.shape), is_row


def _take_rows(x: Float[Array, "B I heads *rest"], rows: Int[Array, "B M R P"]) -> Array:
    """Takes the given rows `[B R heads P *rest]`; each head takes the rows of its own list."""
    sequence = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None, None]
    if rows.shape[1] == 1:
        taken = x.at[sequence, rows[:, 0]].get(mode="promise_in_bounds")
        return jnp.moveaxis(taken, 3, 2)
    head = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :, None, None]
    taken = x.at[sequence[..., None], rows, head].get(mode="promise_in_bounds")
    return jnp.swapaxes(taken, 1, 2)


def _of_listed_queries(
    blocks: _Blocks,
    queries: Queries,
    selection: BlockSelection,
    positions: Int[Array, "B I Q"],
    *,
    scale: float,
    row_tile: int,
    block_step: int,
) -> Float[Array, "X B R K M H"]:
    """Computes `dQ` in tiles of `row_tile` rows, over the blocks that the rows list."""
    batch, num_rows, heads = queries.query.shape[:3]
    num_blocks, group = blocks.key.shape[2], queries.query.shape[3] // positions.shape[2]
    tile, step = min(row_tile, num_rows), min(block_step, selection.ids.shape[-1])
    products = batch * tile * heads

    def of_tile(part: tuple[Queries, Array, Array, Array]) -> Array:
        queries, ids, counts, positions = part

        def load(index: Int[Array, ""]) -> Tile:
            listed = jax.lax.dynamic_slice_in_dim(ids, index * step, step, axis=3)
            place = index * step + jnp.arange(step, dtype=jnp.int32)
            is_listed = place[None, None, None, :] < counts[..., None]
            key, value, position = blocks.load(listed, is_listed)
            key, value = (x.reshape(products, -1, x.shape[-1]) for x in (key, value))
            return key, value, sees(positions, position, heads, group)

        num_steps = (jnp.max(counts) + step - 1) // step
        grad = _query_gradient(_products(queries, products), num_steps, load, scale)
        return grad.reshape(queries.query.shape).astype(queries.query.dtype)

    ids = pad_axis(pad_axis(selection.ids, 3, step, num_blocks), 2, tile, num_blocks)
    tiles = (
        jax.tree.map(lambda x: rows_first(pad_axis(x, 1, tile), tile), queries),
        rows_first(ids, tile, axis=2),
        rows_first(pad_axis(selection.counts, 2, tile), tile, axis=2),
        rows_first(pad_axis(positions, 1, tile), tile),
    )
    return jax.lax.map(of_tile, tiles)


def _add_pieces(
    total: Float[Array, "B J heads size H"],
    pieces: Float[Array, "B R heads size H"],
    blocks: Int[Array, "B M R"],
) -> Float[Array, "B J heads size H"]:
    """Adds pieces to their blocks, after summing the pieces of the same block.

    So no two pieces write to one place, and sums have a fixed order.
    """
    batch, lists, number = blocks.shape
    num_blocks, heads = total.shape[1:3]
    is_same = blocks[:, :, :, None] == blocks[:, :, None, :]
    place = jnp.arange(number, dtype=jnp.int32)
    is_first = ~jnp.any(is_same & (place[None, :] < place[:, None])[None, None], axis=-1)
    where = jnp.where(is_first, blocks, num_blocks + place[None, None, :])  # beyond: dropped
    shares = jnp.broadcast_to(is_same, (batch, heads, number, number)).astype(jnp.float32)
    sums = jnp.einsum(
        "bhrp,bphck->bhrck", shares, pieces, precision=jax.lax.Precision.HIGHEST
    )  # [B heads R size H]
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    where = jnp.broadcast_to(where, (batch, heads, number))
    return total.at[sequence, where, head].add(sums, mode="drop", unique_indices=True)


def _of_listed_keys(
    blocks: _Blocks,
    queries: Queries,
    selection: BlockSelection,
    positions: Int[Array, "B I Q"],
    *,
    scale: float,
    block_tile: int,
    row_step: int,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Computes `dK` and `dV` of the layer over the rows that list each block.

    A step takes `block_tile` pieces of up to `row_step` rows.
    """
    batch, num_rows, heads = queries.query.shape[:3]
    num_blocks, size, kv_heads, head_dim = blocks.key.shape[2:]
    tokens = positions.shape[2]
    group = queries.query.shape[3] // tokens
    tile, step = block_tile, min(row_step, num_rows)
    products = batch * tile * heads
    inverse = _Inverse.of(selection, num_blocks, step)

    def add(index: Int[Array, ""], totals: tuple[Array, Array]) -> tuple[Array, Array]:
        ids, rows, is_row = inverse.pieces(index * tile, tile)
        key, value, key_positions = blocks.load(ids[..., None], jnp.ones_like(ids, bool)[..., None])
        taken = Queries(*(_take_rows(x, rows) for x in queries))
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
        where = positions.at[sequence, rows].get(mode="promise_in_bounds")
        where = jnp.where(is_row[..., None], where, -1)  # a position before all keys: sees none
        where = jnp.swapaxes(where, 1, 2)[:, :, :, :, None, :, None]  # [B R M P 1 Q 1]
        visible = key_positions[:, :, :, None, None, None] <= where
        shape = (batch, tile, heads, step, group, tokens, size)
        visible = jnp.broadcast_to(visible, shape).reshape(products, -1, size)
        key, value = (x.reshape(products, size, head_dim) for x in (key, value))
        found = _key_gradients(key, value, _products(taken, products), visible, scale)
        pieces = (x.reshape(batch, tile, heads, size, head_dim) for x in found)
        first, second = (_add_pieces(*one, ids) for one in zip(totals, pieces, strict=True))
        return first, second

    shape = (batch, num_blocks, heads, size, head_dim)
    start = jnp.zeros_like(queries.query, jnp.float32, shape=shape)
    num_steps = (jnp.max(inverse.ends) + tile - 1) // tile
    totals = jax.lax.fori_loop(0, num_steps, add, (start, start))

    def by_token(x: Float[Array, "B J heads size H"]) -> Float[Array, "B S K H"]:
        """Sums over the lists of each key/value head."""
        x = x.reshape(batch, num_blocks, kv_heads, heads // kv_heads, size, head_dim)
        x = jnp.sum(x, axis=3).astype(blocks.key.dtype)
        return jnp.swapaxes(x, 2, 3).reshape(batch, -1, kv_heads, head_dim)

    grad_key, grad_value = map(by_token, totals)
    return grad_key, grad_value


def _in_layer(
    grad: Float[Array, "B S K H"], layer: Int[Array, ""], num_layers: int
) -> Float[Array, "L B S K H"]:
    """Places a layer's cotangent in a cotangent of the stacked cache."""
    if num_layers == 1:
        return grad[None]
    zeros = jnp.zeros_like(grad, shape=(num_layers, *grad.shape))
    return jax.lax.dynamic_update_index_in_dim(zeros, grad, layer, 0)


def attend_lists(
    query: Float[Array, "B I Q N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    selection: BlockSelection,
    positions: Int[Array, "B I Q"],
    outputs: tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]],
    grads: tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"] | None],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    row_tile: int,
    block_step: int,
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "L B S K H"], Float[Array, "L B S K H"]]:
    """Computes the cotangents of queries, keys and values of `xla.attend_lists`, in their dtypes.

    `outputs` are the output and its log-sum-exp, and `grads` their cotangents, `None` for a
    log-sum-exp that was not returned. The other arguments are those of `xla.attend_lists`. Layers
    other than `layer` get cotangents of 0.

    A tile of the first loop has `row_tile` rows; a step of the second takes `row_tile` pieces. One
    step gathers `block_step` blocks of a list, or rows of a piece.
    """
    num_layers, batch, num_keys, kv_heads, head_dim = key.shape
    size, num_lists = selection.block_size, selection.ids.shape[1]
    heads = max(num_lists, kv_heads)
    blocked = (num_layers, batch, num_keys // size, size, kv_heads, head_dim)
    kv_head = jnp.arange(num_lists, dtype=jnp.int32) // (heads // kv_heads)
    blocks = _Blocks(key.reshape(blocked), value.reshape(blocked), layer, kv_head, kv_lengths)
    queries = _of_outputs(query, *outputs, *grads, heads)
    grad_query = _of_listed_queries(
        blocks,
        queries,
        selection,
        positions,
        scale=scale,
        row_tile=row_tile,
        block_step=block_step,
    )
    grad_keys = _of_listed_keys(
        blocks,
        queries,
        selection,
        positions,
        scale=scale,
        block_tile=row_tile,
        row_step=block_step,
    )
    grad_key, grad_value = (_in_layer(x, layer, num_layers) for x in grad_keys)
    return join_heads(grad_query, query.shape), grad_key, grad_value


# Dense attention.


def attend_dense(
    query: Float[Array, "B I Q N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    positions: Int[Array, "B I Q"],
    outputs: tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]],
    grads: tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"] | None],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    keys_per_step: int,
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "L B S K H"], Float[Array, "L B S K H"]]:
    """Computes the cotangents of queries, keys and values of `xla.attend_dense`, in their dtypes.

    `outputs` are the output and its log-sum-exp, and `grads` their cotangents, `None` for a
    log-sum-exp that was not returned. The other arguments are those of `xla.attend_dense`. Layers
    other than `layer` get cotangents of 0. Both loops take `keys_per_step` keys at a time.
    """
    num_layers, batch, num_keys, kv_heads, head_dim = key.shape
    num_rows, num_heads = query.shape[1], query.shape[3]
    width, group = min(keys_per_step, num_keys), num_heads // kv_heads
    products = batch * kv_heads
    queries = _of_outputs(query, *outputs, *grads, kv_heads)

    def tiles_of(cache: Float[Array, "L B S K H"]) -> Float[Array, "X Z C H"]:
        """Splits the layer's keys or values into tiles, with 0 at absent tokens."""
        one = jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False)
        is_real = jnp.arange(num_keys, dtype=jnp.int32)[None, :] < kv_lengths[:, None]
        one = pad_axis(jnp.where(is_real[..., None, None], one, 0), 1, width)
        one = one.reshape(batch, -1, width, kv_heads, head_dim)
        return jnp.transpose(one, (1, 0, 3, 2, 4)).reshape(-1, products, width, head_dim)

    keys, values = tiles_of(key), tiles_of(value)

    def visible(index: Int[Array, ""], positions: Int[Array, "B Q"]) -> Bool[Array, "Z M C"]:
        """Whether each query of a row sees each key of a tile."""
        position = (index * width + jnp.arange(width, dtype=jnp.int32))[None, :]
        position = jnp.where(position < kv_lengths[:, None], position, NOWHERE)
        return sees(positions[:, None], position[:, None, None], kv_heads, group)

    def of_queries(part: tuple[Queries, Array]) -> Array:
        queries, positions = part

        def load(index: Int[Array, ""]) -> Tile:
            return keys[index], values[index], visible(index, positions)

        reach = jnp.minimum(jnp.max(positions) + 1, jnp.max(kv_lengths))
        num_steps = (reach + width - 1) // width
        grad = _query_gradient(_products(queries, products), num_steps, load, scale)
        return grad.reshape(queries.query.shape).astype(query.dtype)

    def of_keys(index: Int[Array, ""]) -> tuple[Array, Array]:
        def add(row: Int[Array, ""], totals: tuple[Array, Array]) -> tuple[Array, Array]:
            taken = _products(jax.tree.map(lambda x: x[:, row], queries), products)
            seen = visible(index, positions[:, row])
            found = _key_gradients(keys[index], values[index], taken, seen, scale)
            return totals[0] + found[0], totals[1] + found[1]

        # Rows are in order, so the rows before the tile, which see none of it, come first.
        is_before = jnp.max(positions, axis=(0, 2)) < index * width
        start = jnp.zeros_like(queries.query, jnp.float32, shape=keys.shape[1:])
        grads = jax.lax.fori_loop(
            jnp.sum(is_before, dtype=jnp.int32), num_rows, add, (start, start)
        )
        return grads[0].astype(key.dtype), grads[1].astype(key.dtype)

    def joined(x: Float[Array, "X Z C H"]) -> Float[Array, "L B S K H"]:
        x = x.reshape(-1, batch, kv_heads, width, head_dim)
        x = jnp.transpose(x, (1, 0, 3, 2, 4)).reshape(batch, -1, kv_heads, head_dim)
        return _in_layer(x[:, :num_keys], layer, num_layers)

    rows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (queries, positions))
    grad_query = jax.lax.map(of_queries, rows)[:, :, None]
    grad_key, grad_value = jax.lax.map(of_keys, jnp.arange(len(keys), dtype=jnp.int32))
    return join_heads(grad_query, query.shape), joined(grad_key), joined(grad_value)
