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

from sketchwalk_jax.pallas_kernels import ops, row_ops, walk_row, warp_ops
from sketchwalk_jax.pallas_kernels.score_tile import TILE
from sketchwalk_jax.pallas_kernels.select import select_row
from sketchwalk_jax.pallas_kernels.selection import LEAST_CHUNK, MAX_BLOCKS, MAX_POWER
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    STATE_EXPONENT,
    exponent_of,
    mantissa_of,
    power_of_two,
    replace,
)
from sketchwalk_jax.selection import BlockSelection

_LARGEST = 127  # exponent of a float
# Keys of the rows' entries that are so many octaves below what no entry exceeds.
_GUESSES = tuple((STATE_EXPONENT + 1 - octaves + 127) << 23 for octaves in (36, 12, 4))
_WARPGROUPS = 4  # at most, that share a row
_ROWS = 8  # tiles of key blocks, of which a warpgroup has a multiple


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
    scratch: Any,
    *,
    warpgroups: int,
    num_tiles: int,
    overlaps: bool,
    block_size: int,
    interpret: bool,
    **sizes: Any,
) -> None:
    """Adds up one sequence's row, rescales it as the walk does, and selects from it."""
    if overlaps:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    sequence, warpgroup = jax.lax.axis_index("sequence"), jax.lax.axis_index("warpgroup")
    own = part_ref.shape[2] // warpgroups
    layout = row_ops.rows_layout(own)
    direct = plgpu.load(
        direct_ref.at[sequence, pl.ds(warpgroup * own, own)], layout=layout, optimized=False
    )
    row = position_ref[sequence] // block_size
    layers = layers_ref[0]
    is_own = int(budget_ref.shape[0] > 1)  # else all sequences share a table
    count = budget_ref[sequence * is_own, jnp.minimum(row, budget_ref.shape[1] - 1)]
    value, exponents = row_ops.add_parts(
        part_ref.at[sequence],
        exponent_ref.at[sequence],
        rows=own,
        num_tiles=walk_row.QUERY_TILE // TILE * num_tiles,
        is_triangle=num_tiles <= walk_row.MAX_SPLITS,
        interpret=interpret,
    )
    exponent = replace(exponents + exponent_of(value), value == 0.0, 2 * NO_EXPONENT)
    positive = replace(exponent, value <= 0.0, 2 * NO_EXPONENT)
    largest, largest_positive = warp_ops.maxima(
        (exponent, positive), scratch, layout=layout, interpret=interpret
    )
    shift = jnp.minimum(exponent - largest, 0) + STATE_EXPONENT
    state = jnp.where(value == 0.0, 0.0, mantissa_of(value) * power_of_two(shift))
    columns = warpgroup * own + plgpu.broadcasted_iota(jnp.int32, (own, TILE), 0, layout=layout)
    columns = columns * TILE + plgpu.broadcasted_iota(jnp.int32, (own, TILE), 1, layout=layout)
    warp_ops.write_row(state, columns, state_ref.at[sequence], layout=layout, interpret=interpret)
    is_walked = largest_positive - largest + STATE_EXPONENT > -_LARGEST
    is_walked = is_walked & (largest_positive > NO_EXPONENT)

    @pl.when(warpgroup == 0)
    def _() -> None:
        count_ref[sequence] = count

    @pl.when((warpgroup == 0) & (sequence == 0))
    def _() -> None:
        walked_ref[0] = layers + 1

    select_row(
        jnp.where(is_walked, state, direct),
        columns,
        row,
        count,
        ids_ref.at[sequence],
        scratch,
        guesses=_GUESSES,
        layout=layout,
        interpret=interpret,
        **sizes,
    )


def _shape_of_rows(num_tiles: int, *, interpret: bool) -> tuple[int, int]:
    """Tiles of key blocks that a row has room for, and the warpgroups that share it."""
    height = -(-num_tiles * (walk_row.QUERY_TILE // TILE) // _ROWS) * _ROWS
    if interpret:  # whose warpgroups cannot count together
        return height, 1
    warpgroups = min(height // _ROWS, _WARPGROUPS)
    together = _ROWS * warpgroups
    return -(-height // together) * together, warpgroups


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
    if size % LEAST_CHUNK or power > MAX_POWER or num_blocks > MAX_BLOCKS:
        raise ValueError(
            f"sketches must be a multiple of {LEAST_CHUNK} long, power at most {MAX_POWER} and "
            f"blocks at most {MAX_BLOCKS}, got {size}, {power} and {num_blocks}"
        )
    max_count = min(max_count, num_blocks)
    padding = -num_blocks % walk_row.QUERY_TILE
    num_tiles = (num_blocks + padding) // walk_row.QUERY_TILE
    height, warpgroups = _shape_of_rows(num_tiles, interpret=interpret)

    def flat(sums: Array) -> Array:
        sums = sums.reshape(batch, num_blocks, size)
        return jnp.pad(sums, ((0, 0), (0, padding), (0, 0))) if padding else sums

    row = jnp.pad(state[:, 0], ((0, 0), (0, padding))) if padding else state[:, 0]
    settings: dict[str, Any] = dict(
        num_tiles=num_tiles,
        overlaps=overlaps and not interpret,
        interpret=interpret,
    )
    kernel: Any = functools.partial(
        plgpu.kernel,
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret, detect_races=False),
    )
    is_projected = projection is not None
    if projection is None:
        token, matrix = token.reshape(batch, size), jnp.zeros((1, 1), jnp.float32)
    else:
        matrix = walk_row.projection_of(token.shape[1], projection)
        token = token.reshape(batch, -1, walk_row.WIDE)
    floats = jax.ShapeDtypeStruct((batch, height, TILE), jnp.float32)
    parts = (batch, min(num_tiles, walk_row.MAX_SPLITS), height, TILE)
    layers = layers[None]
    value, exponents, direct = kernel(
        functools.partial(
            walk_row.walk_row,
            settings=dict(
                scale=1.0 / math.sqrt(head_dim),
                block_size=block_size,
                power=power,
                rectify=rectify,
            ),
            is_projected=is_projected,
            use_walk=use_walk,
            **settings,
        ),
        out_type=[
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((batch, height, walk_row.MAX_SPLITS), jnp.int32),
            floats,
        ],
        grid=(*walk_row.programs(num_tiles), batch),
        grid_names=("index", "line", "sequence"),
        **walk_row.warpgroups(interpret=interpret),
        scratch_types=walk_row.scratch(size, is_projected=is_projected),
        kernel_name="sketchwalk_walk_row",
    )(token, matrix, flat(query_sums), flat(key_sums), row, positions, layers)
    budget = jnp.asarray(counts, jnp.int32)
    ids, new_row, kept, walked = kernel(
        functools.partial(
            _select_token,
            warpgroups=warpgroups,
            block_size=block_size,
            is_padded=height * TILE != num_blocks,
            num_blocks=num_blocks,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
            **settings,
        ),
        out_type=[
            jax.ShapeDtypeStruct((batch, max_count), jnp.int32),
            jax.ShapeDtypeStruct((batch, num_blocks), jnp.float32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=(batch,),
        grid_names=("sequence",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            warp_ops.scratch_of_counts(warpgroups),
        ],
        kernel_name="sketchwalk_select_token",
    )(value, exponents, direct, positions, layers, budget if budget.ndim == 2 else budget[None])
    selection = BlockSelection(ids[:, None, None], kept[:, None, None], block_size)
    return selection, new_row[:, None], walked[0]
