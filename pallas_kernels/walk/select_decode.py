"""Selects one decoding step's blocks in two kernels: scores and walk, then top-k (Algorithm 2).

The first kernel is `walk_row`, steps 4 and 5. The second, step 6, adds up its parts, rescales the
row as the walk does, and selects from it. A thread block has one sequence, whose row is in the
registers of up to four warpgroups: tiles of 64 blocks, a stretch of them per warpgroup. It reads
each block's parts once, 4 bytes per part, and starts before the first kernel ends.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import LEAST_CHUNK, MAX_BLOCKS, MAX_POWER
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.top_k.select import room_of, select_row
from sketchwalk_jax.pallas_kernels.walk.walk_row import (
    LARGEST_EXPONENT,
    TILE,
    HeadQueries,
    WalkTiling,
    walk_row_kernel,
)
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    STATE_EXPONENT,
    exponent_of,
    mantissa_of,
    power_of_two,
    replace,
)
from sketchwalk_jax.selection import BlockSelection

# All entries are below `2^(STATE_EXPONENT + 1)`.
_WINDOW = STATE_EXPONENT + 1 - 32


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
    tiling: WalkTiling,
    warpgroups: int,
    **lists: Any,
) -> None:
    """Adds up one sequence's row, rescales it as the walk does, and selects from it.

    If the row has no positive entry, it selects by the token's scores, `direct_ref`.
    """
    if tiling.overlaps:
        ops.await_previous_kernels()
    sequence, warpgroup = jax.lax.axis_index("sequence"), jax.lax.axis_index("warpgroup")
    own = part_ref.shape[2] // warpgroups  # tiles of this warpgroup
    layout = row_ops.tiles_layout(own, TILE)
    direct = ops.read(direct_ref.at[sequence, pl.ds(warpgroup * own, own)], layout)
    row = position_ref[sequence] // tiling.block_size
    layers = layers_ref[0]
    is_own = int(budget_ref.shape[0] > 1)  # otherwise all sequences share a table
    count = budget_ref[sequence * is_own, jnp.minimum(row, budget_ref.shape[1] - 1)]
    value, exponents = row_ops.add_parts(
        part_ref.at[sequence],
        exponent_ref.at[sequence],
        height=own,
        num_tiles=tiling.num_key_tiles,
        is_triangle=tiling.has_few_tiles,
    )
    # Scale the largest magnitude to `[1, 2) · 2^STATE_EXPONENT`.
    exponent = replace(exponents + exponent_of(value), value == 0.0, 2 * NO_EXPONENT)
    positive = replace(exponent, value <= 0.0, 2 * NO_EXPONENT)
    largest, largest_positive = row_ops.maxima((exponent, positive), scratch, layout=layout)
    shift = jnp.minimum(exponent - largest, 0) + STATE_EXPONENT
    state = jnp.where(value == 0.0, 0.0, mantissa_of(value) * power_of_two(shift))
    columns = warpgroup * own + ops.matrix_index((own, TILE), 0, layout)
    columns = columns * TILE + ops.matrix_index((own, TILE), 1, layout)
    row_ops.write_row(state, columns, state_ref.at[sequence], layout=layout)
    is_walked = largest_positive - largest + STATE_EXPONENT > -LARGEST_EXPONENT
    is_walked = is_walked & (largest_positive > NO_EXPONENT)

    @pl.when(warpgroup == 0)
    def _() -> None:
        count_ref[sequence] = count

    @pl.when((warpgroup == 0) & (sequence == 0))
    def _() -> None:
        walked_ref[0] = layers + 1

    row_ops.clear_bins(scratch)
    select_row(
        jnp.where(is_walked, state, direct),
        columns,
        row,
        count,
        ids_ref.at[sequence],
        scratch,
        window=_WINDOW,
        layout=layout,
        **lists,
    )


def select_token_kernel(
    token: Float[Array, "B C R"] | HeadQueries,
    query_sums: Float[Array, "B J C R"],
    key_sums: Float[Array, "B J C R"],
    state: Float[Array, "B 1 J"],
    layers: Int[Array, ""],
    positions: Int[Array, "B"],
    counts: Int[Array, "B 1"] | Int[Array | np.ndarray, "J"],
    *,
    head_dim: int,
    power: int,
    rectify: bool = False,
    use_walk: bool = True,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int = 64,
    overlaps: bool = True,
    interpret: bool = False,
) -> tuple[BlockSelection, Float[Array, "B 1 J"], Int[Array, ""]]:
    """Selects blocks for one token per sequence, with the walk's next row, for power transitions.

    Args:
      token: Sketches of the tokens' queries, averaged over heads; or the queries, which the kernel
        averages and sketches if `HeadQueries.fit` allows it.
      query_sums: Sums of queries in sketch space, with or without the token's own.
      key_sums: Sums of keys in sketch space, including the token's own.
      state: The token's row of the walk so far.
      layers: Number of layers walked so far; 0 starts the walk.
      positions: Positions of the tokens.
      counts: Number of blocks to keep, per token or by query block.
      head_dim: Size of a head before the sketch, which scales the scores.
      power: Exponent of the transition, at most 32.
      rectify: Whether negative scores count as zero.
      use_walk: Whether the row is multiplied by `W`; otherwise it is `W`'s own row in every layer.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      max_count: Static upper bound of `counts`: the length `P` of the lists.
      block_size: Tokens per block.
      overlaps: Whether the second kernel launches early and waits for the first one.
      interpret: Whether to interpret the kernels, which needs no GPU.

    Returns:
      A `BlockSelection` shared by all heads, the state after this layer, and `layers + 1`.

    Raises:
      ValueError: If sketches' size is no multiple of 32, the power exceeds 32, or blocks 16,384.
    """
    batch, num_blocks = query_sums.shape[:2]
    size = math.prod(query_sums.shape[2:])
    if size % LEAST_CHUNK or power > MAX_POWER or num_blocks > MAX_BLOCKS:
        raise ValueError(
            f"sketches must be a multiple of {LEAST_CHUNK} long, power at most {MAX_POWER} and "
            f"blocks at most {MAX_BLOCKS}, got {size}, {power} and {num_blocks}"
        )
    tiling = WalkTiling(
        num_blocks=num_blocks,
        size=size,
        scale=1.0 / math.sqrt(head_dim),
        block_size=block_size,
        power=power,
        rectify=rectify,
        use_walk=use_walk,
        is_sketched=not isinstance(token, HeadQueries),
        overlaps=overlaps and not interpret,
    )
    height, warpgroups = room_of(tiling.num_key_tiles, interpret=interpret)
    of_parts: dict[str, Any] = dict(tiling=tiling, height=height, interpret=interpret)
    parts = walk_row_kernel(token, query_sums, key_sums, state, layers[None], positions, **of_parts)
    budget = jnp.asarray(counts, jnp.int32)
    ids, new_row, kept, walked = ops.kernel(
        functools.partial(
            _select_token,
            tiling=tiling,
            warpgroups=warpgroups,
            is_padded=height * TILE != num_blocks,
            num_blocks=num_blocks,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
        ),
        out_type=[
            jax.ShapeDtypeStruct((batch, min(max_count, num_blocks)), jnp.int32),
            jax.ShapeDtypeStruct((batch, num_blocks), jnp.float32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=(batch,),
        grid_names=("sequence",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[row_ops.scratch_of_row(warpgroups)],
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        detect_races=False,
        kernel_name="sketchwalk_select_token",
    )(*parts, positions, layers[None], budget if budget.ndim == 2 else budget[None])
    selection = BlockSelection(ids[:, None, None], kept[:, None, None], block_size)
    return selection, new_row[:, None], walked[0]
