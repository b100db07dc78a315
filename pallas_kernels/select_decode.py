"""One decoding step's block list in two kernels: scores and walk, then top-τ (Algorithm 2).

The first kernel is `walk_row`'s. The second adds up its parts, rescales the row and selects.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import walk_row, warp_ops
from sketchwalk_jax.pallas_kernels.scaled import (
    NO_EXPONENT,
    exponent_of,
    mantissa_of,
    power_of_two,
    replace,
)
from sketchwalk_jax.pallas_kernels.score_tile import KEY_TILE, LEAST_CHUNK, QUERY_TILE
from sketchwalk_jax.pallas_kernels.select import MAX_COLUMNS, select_row
from sketchwalk_jax.selection import BlockSelection

_STATE_EXPONENT = 100  # of the largest entry of a row, as in the walk
_LARGEST = 127  # exponent of a float
_WARPGROUPS = 4  # that add up parts
_TALL = 64  # tiles of key blocks of a row, above which fewer do
_ROWS = 8  # tiles of key blocks whose parts a warpgroup adds up at once


def _select_token(
    part_ref: Any,
    exponent_ref: Any,
    direct_ref: Any,
    position_ref: Any,
    layers_ref: Any,
    budget_ref: Any,
    ids_ref: Any,
    state_ref: Any,
    count_ref: Any,
    walked_ref: Any,
    value_memory: Any,
    exponent_memory: Any,
    scratch: Any,
    ready: Any,
    *,
    warpgroups: int,
    num_tiles: int,
    use_walk: bool,
    overlaps: bool,
    block_size: int,
    interpret: bool,
    **sizes: Any,
) -> None:
    """Adds up one sequence's row, rescales it as the walk does, and selects from it."""
    if overlaps:
        plgpu.griddepcontrol_wait()
    sequence, warpgroup = jax.lax.axis_index("sequence"), jax.lax.axis_index("warpgroup")
    num_splits, height = part_ref.shape[1:3]
    row = position_ref[sequence] // block_size
    last_tile = row // QUERY_TILE
    is_own = int(budget_ref.shape[0] > 1)  # else all sequences share a table
    is_first = layers_ref[0] * int(use_walk) == 0
    first = jnp.where(is_first, last_tile, 0)

    def load(ref: Any, layout: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    own = height // warpgroups
    rows = math.gcd(own, _ROWS)
    layout = warp_ops.tile_layout(rows)

    def add_parts(step: Array) -> None:
        start = warpgroup * own + step * rows
        span = pl.ds(start, rows)
        tile = start + plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1))
        splits = range(num_splits)
        parts = [load(part_ref.at[sequence, x, span], layout) for x in splits]
        exponents = [load(exponent_ref.at[sequence, x, span, 0], layout.reduce(1)) for x in splits]
        there = [walk_row.exists(tile, x, last_tile, first, num_tiles) for x in splits]
        exponents = [
            replace(x, jnp.logical_not(y), NO_EXPONENT)
            for x, y in zip(exponents, there, strict=True)
        ]
        largest = functools.reduce(jnp.maximum, exponents)
        total: Any = None
        for part, exponent, has in zip(parts, exponents, there, strict=True):

            def spread(x: Array) -> Array:
                x = jax.lax.broadcast_in_dim(x, (rows, KEY_TILE), (0,))
                return plgpu.layout_cast(x, layout)

            factor = jnp.where(has, power_of_two(exponent - largest), 0.0)
            part = jnp.where(spread(factor) > 0.0, part, 0.0) * spread(factor)
            total = part if total is None else total + part
        value_memory[span] = total
        exponent_memory[span] = largest

    if own == rows:
        add_parts(jnp.int32(0))
    else:

        @pl.loop(0, own // rows)
        def _(step: Array) -> None:
            add_parts(step)

    if warpgroups > 1:
        plgpu.barrier_arrive(ready.at[0])

    @pl.when(warpgroup == 0)
    def _() -> None:
        if warpgroups > 1:
            plgpu.barrier_wait(ready.at[0])
        layout = warp_ops.tile_layout(height)
        shape = (height, KEY_TILE)

        def spread(x: Array) -> Array:
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (0,)), layout)

        def exponents(value: Array) -> Array:
            own = spread(load(exponent_memory, layout.reduce(1)))
            return replace(own + exponent_of(value), value == 0.0, 2 * NO_EXPONENT)

        columns = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) * KEY_TILE
        columns = columns + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        # Read twice: all at once would not fit in registers.
        value = load(value_memory, layout)
        exponent = exponents(value)
        positive = replace(exponent, value <= 0.0, 2 * NO_EXPONENT)
        largest, largest_positive = warp_ops.maxima(
            (exponent, positive), scratch, layout=layout, interpret=interpret
        )
        value = load(value_memory, layout)
        exponent = exponents(value) - largest + _STATE_EXPONENT
        state = mantissa_of(value) * power_of_two(jnp.minimum(exponent, _STATE_EXPONENT))
        state = jnp.where(value == 0.0, 0.0, state)
        state_ref[sequence] = value_memory[...] = state
        is_walked = largest_positive - largest + _STATE_EXPONENT > -_LARGEST
        is_walked = is_walked & (largest_positive > NO_EXPONENT)

        @pl.when(jnp.logical_not(is_walked))
        def _() -> None:
            value_memory[...] = load(direct_ref.at[sequence], layout)

        count = budget_ref[sequence * is_own, jnp.minimum(row, budget_ref.shape[1] - 1)]
        count_ref[sequence] = count

        @pl.when(sequence == 0)
        def _() -> None:
            walked_ref[0] = layers_ref[0] + 1

        select_row(
            load(value_memory, layout),
            columns,
            row,
            count,
            ids_ref.at[sequence],
            scratch,
            layout=layout,
            interpret=interpret,
            **sizes,
        )


def _shape_of_rows(num_tiles: int) -> tuple[int, int]:
    """Tiles of key blocks that a row has room for, and the warpgroups that add it up."""
    height = num_tiles * (QUERY_TILE // KEY_TILE)
    if height <= 2 * warp_ops.WARPS:
        return -(-height // warp_ops.WARPS) * warp_ops.WARPS, 1
    together = warp_ops.WARPS * _WARPGROUPS
    # The longer rows need the registers of threads that are not there.
    return -(-height // together) * together, _WARPGROUPS if height <= _TALL else 2


def select_decode_kernel(*arrays: Any, **options: Any) -> tuple[BlockSelection, Array]:
    """The lists and the rows of `select_token_kernel`, which takes the same arguments."""
    return select_token_kernel(*arrays, **options)[:2]


def select_token_kernel(
    token: Float[Array, "B _ _"],
    query_sums: Float[Array, "B J C R"],
    key_sums: Float[Array, "B J C R"],
    state: Float[Array, "B 1 J"],
    layers: Int[Array, ""],
    positions: Int[Array, "B"],
    counts: Int[Array, "B 1"] | Int[np.ndarray, "J"],
    *,
    head_dim: int,
    power: int,
    rectify: bool = False,
    use_walk: bool = True,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int = 64,
    projection: Float[np.ndarray, "H R"] | None = None,
    overlaps: bool = True,
    interpret: bool = False,
) -> tuple[BlockSelection, Float[Array, "B 1 J"], Int[Array, ""]]:
    """Blocks for one token per sequence and the walk's next row, for the power transitions.

    Args:
      token: Sketches `[B, C, R]` of the tokens' head-combined queries, or queries `[B, N, H]`.
      query_sums: Sums of queries in sketch space, the token's own included or not.
      key_sums: Sums of keys in sketch space, the token's own included.
      state: The token's row of the walk so far.
      layers: Layers walked so far; 0 means that this one starts the walk.
      positions: Positions of the tokens.
      counts: Blocks to keep, of each token or of each row.
      head_dim: Size of a head before the sketch, which scales the scores.
      power: Exponent of the transition, at most 32.
      rectify: Whether negative scores count as zero.
      use_walk: Whether the row is multiplied by `W`; else it is `W`'s own row in every layer.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      max_count: Static upper bound of `counts`: the length `P` of the lists.
      block_size: Tokens per block.
      projection: What makes sketches of the mean over heads, where `token` holds queries; see
        `walk_row.can_project`.
      overlaps: Whether the second kernel starts before the first one is done, and waits for it.
      interpret: Whether to interpret the kernels, which needs no GPU.

    Returns:
      A `BlockSelection` shared by all heads, the state after this layer, and `layers + 1`.

    Raises:
      ValueError: If sketches are not a multiple of 32 long, the power exceeds 32, or rows 16,384.
    """
    batch, num_blocks = query_sums.shape[:2]
    size = math.prod(query_sums.shape[2:])
    if size % LEAST_CHUNK or power > 32 or num_blocks > MAX_COLUMNS:
        raise ValueError(
            f"sketches must be a multiple of {LEAST_CHUNK} long, power at most 32 and blocks at "
            f"most {MAX_COLUMNS}, got {size}, {power} and {num_blocks}"
        )
    max_count = min(max_count, num_blocks)
    padding = -num_blocks % QUERY_TILE
    num_tiles = (num_blocks + padding) // QUERY_TILE
    height, warpgroups = _shape_of_rows(num_tiles)

    def flat(sums: Array) -> Array:
        sums = sums.reshape(batch, num_blocks, size)
        return jnp.pad(sums, ((0, 0), (0, padding), (0, 0))) if padding else sums

    row = jnp.pad(state[:, 0], ((0, 0), (0, padding))) if padding else state[:, 0]
    settings: dict[str, Any] = dict(
        num_tiles=num_tiles,
        use_walk=use_walk,
        overlaps=overlaps and not interpret,
        block_size=block_size,
        interpret=interpret,
    )
    kernel: Any = functools.partial(
        plgpu.kernel,
        compiler_params=warp_ops.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    is_projected = projection is not None
    if projection is None:
        token, matrix = token.reshape(batch, size), jnp.zeros((1, 1), jnp.float32)
    else:
        matrix = walk_row.projection_of(token.shape[1], projection)
        token = token.reshape(batch, -1, walk_row.WIDE)
    floats = jax.ShapeDtypeStruct((batch, height, KEY_TILE), jnp.float32)
    parts = (batch, min(num_tiles, walk_row.MAX_SPLITS), height, KEY_TILE)
    layers = layers[None]
    value, exponents, direct = kernel(
        functools.partial(
            walk_row.walk_row,
            scale=1.0 / math.sqrt(head_dim),
            power=power,
            rectify=rectify,
            is_projected=is_projected,
            **settings,
        ),
        out_type=[
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.int32),
            floats,
        ],
        grid=(*walk_row.programs(num_tiles), batch),
        grid_names=("index", "line", "sequence"),
        scratch_types=walk_row.scratch(size, is_projected=is_projected),
        kernel_name="sketchwalk_walk_row",
    )(token, matrix, flat(query_sums), flat(key_sums), row, positions, layers)
    budget = jnp.asarray(counts, jnp.int32)
    ids, new_row, kept, walked = kernel(
        functools.partial(
            _select_token,
            warpgroups=warpgroups,
            num_blocks=num_blocks,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
            **settings,
        ),
        out_type=[
            jax.ShapeDtypeStruct((batch, max_count), jnp.int32),
            floats,
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=(batch,),
        grid_names=("sequence",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((height, KEY_TILE), jnp.float32),
            plgpu.SMEM((height,), jnp.int32),
            warp_ops.scratch_of_counts(),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=1),
        ],
        kernel_name="sketchwalk_select_token",
    )(value, exponents, direct, positions, layers, budget if budget.ndim == 2 else budget[None])
    selection = BlockSelection(ids[:, None, None], kept[:, None, None], block_size)
    new_row = new_row.reshape(batch, 1, height * KEY_TILE)[:, :, :num_blocks]
    return selection, new_row, walked[0]
