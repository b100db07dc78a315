"""One decoding step's block list in two kernels: scores and walk, then top-τ (Algorithm 2).

The row of the token is `r_k = r_{k-1} W_k` with `W_k = A^s`: a sum over all earlier rows of `A`,
which the first kernel forms tile by tile and never stores. Every entry of the sum carries its own
power of two, so nothing overflows and no row maximum is needed before the power. The second kernel
adds up the parts, rescales the row and selects.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import score_tile as tiles
from sketchwalk_jax.pallas_kernels import warp_ops
from sketchwalk_jax.pallas_kernels.scaled import (
    NO_EXPONENT,
    add_scaled,
    exponent_of,
    integer_power,
    mantissa_of,
    power_of_two,
    replace,
)
from sketchwalk_jax.pallas_kernels.score_tile import CHUNK, KEY_TILE, QUERY_TILE
from sketchwalk_jax.pallas_kernels.select import MAX_COLUMNS, select_row
from sketchwalk_jax.selection import BlockSelection

_MAX_SPLITS = 16
_WIDEST_FUSED = 4096  # columns of a row whose parts are added up by the kernel that selects
_STATE_EXPONENT = 100  # of the largest entry of a row, as in the walk


def _walk_rows(
    token_ref: Any,
    query_ref: Any,
    key_ref: Any,
    state_ref: Any,
    position_ref: Any,
    layers_ref: Any,
    part_ref: Any,
    exponent_ref: Any,
    direct_ref: Any,
    *memory: Any,
    scale: float,
    power: int,
    rectify: bool,
    block_size: int,
    num_splits: int,
    interpret: bool,
) -> None:
    """One tile of key blocks, and of every `num_splits`-th tile of query blocks: their part."""
    tile, split, sequence = (jax.lax.axis_index(x) for x in ("tile", "split", "sequence"))
    two_d = plgpu.Layout.WGMMA
    by_key, by_query = two_d.reduce(1), two_d.reduce(0)
    position = position_ref[sequence]
    row = position // block_size
    last_count = (position + 1 - row * block_size).astype(jnp.float32)
    last_tile = row // QUERY_TILE
    keys = pl.ds(tile * KEY_TILE, KEY_TILE)

    def means(sums: Array, start: Array) -> Array:
        block = start + plgpu.broadcasted_iota(jnp.int32, sums.shape, 0, layout=two_d)
        share = jnp.where(block == row, 1.0 / last_count, 1.0 / block_size)
        return jnp.where(block <= row, sums * share, 0.0)

    def add_tile(index: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        query_tile = first_tile + index * num_splits
        start = query_tile * QUERY_TILE
        queries = pl.ds(start, QUERY_TILE)
        shape = (KEY_TILE, QUERY_TILE)

        def load(chunk: int) -> tuple[Array, Array]:
            entries = pl.ds(chunk * CHUNK, CHUNK)
            token = plgpu.load(token_ref.at[sequence, entries], layout=by_query, optimized=False)
            token = jax.lax.broadcast_in_dim(token, (QUERY_TILE, CHUNK), (1,))
            token = plgpu.layout_cast(token, two_d)
            query = means(
                plgpu.load(query_ref.at[sequence, queries, entries], layout=two_d, optimized=False),
                start,
            )
            block = start + plgpu.broadcasted_iota(jnp.int32, query.shape, 0, layout=two_d)
            key = plgpu.load(key_ref.at[sequence, keys, entries], layout=two_d, optimized=False)
            return means(key, tile * KEY_TILE), jnp.where(block == row, token, query)

        scores = tiles.score_tile(load, num_chunks, memory, interpret=interpret) * scale
        column = tile * KEY_TILE + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=two_d)
        query_row = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=two_d)
        scores = jnp.where((column <= query_row) & (query_row <= row), scores, 0.0)

        @pl.when(query_tile == last_tile)
        def _() -> None:
            direct_ref[sequence, keys] = jnp.sum(jnp.where(query_row == row, scores, 0.0), axis=1)

        if rectify:
            scores = jnp.maximum(scores, 0.0)
        state = plgpu.load(state_ref.at[sequence, queries], layout=by_query, optimized=False)

        def spread(x: Array) -> Array:
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (1,)), two_d)

        own = exponent_of(scores)
        exponent = replace(power * own, own == NO_EXPONENT, NO_EXPONENT)
        exponent = exponent + spread(exponent_of(state))
        largest = jnp.maximum(jnp.max(exponent, axis=1), NO_EXPONENT // 2)
        below = exponent - plgpu.layout_cast(jax.lax.broadcast_in_dim(largest, shape, (0,)), two_d)
        terms = integer_power(mantissa_of(scores), power) * spread(mantissa_of(state))
        return add_scaled(total, (jnp.sum(terms * power_of_two(below), axis=1), largest))

    num_chunks = token_ref.shape[-1] // CHUNK
    # The walk's first layer needs the token's own row alone.
    start = jnp.where(layers_ref[0] == 0, last_tile, 0)
    start = jnp.maximum(start, tile * KEY_TILE // QUERY_TILE)
    first_tile = start + (split + num_splits - start % num_splits) % num_splits
    steps = jnp.maximum(last_tile - first_tile + num_splits, 0) // num_splits
    zero = plgpu.layout_cast(jnp.zeros((KEY_TILE,), jnp.float32), by_key)
    none = plgpu.layout_cast(jnp.full((KEY_TILE,), NO_EXPONENT, jnp.int32), by_key)
    part, exponent = jax.lax.fori_loop(0, steps, add_tile, (zero, none))
    part_ref[sequence, split, keys] = part
    exponent_ref[sequence, split, keys] = exponent


def _row_entries(
    part_ref: Any,
    exponent_ref: Any,
    direct_ref: Any,
    position_ref: Any,
    layers_ref: Any,
    *,
    sequence: Array,
    start: Any,
    width: int,
    power: int,
    rectify: bool,
    block_size: int,
    num_splits: int,
) -> tuple[Float[Array, "J"], Int[Array, "J"]]:
    """Entries of the row after this layer: mantissas, and exponents up to a common constant."""
    layout = warp_ops.row_layout(width)
    span = pl.ds(start, width)

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    columns = start + plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    exists = columns <= position_ref[sequence] // block_size
    value, exponent = (load(x.at[sequence, 0, span]) for x in (part_ref, exponent_ref))
    for split in range(1, num_splits):
        part = (
            load(part_ref.at[sequence, split, span]),
            load(exponent_ref.at[sequence, split, span]),
        )
        value, exponent = add_scaled((value, exponent), part)

    weights = jnp.where(exists, load(direct_ref.at[sequence, span]), 0.0)
    weights = jnp.maximum(weights, 0.0) if rectify else weights
    own = exponent_of(weights)
    is_first = layers_ref[0] == 0
    value = jnp.where(is_first, integer_power(mantissa_of(weights), power), value)
    own = replace(power * own, own == NO_EXPONENT, NO_EXPONENT)
    exponent = jnp.where(is_first, own, exponent) + exponent_of(value)
    exists = exists & (value != 0.0)
    return mantissa_of(value), jnp.where(exists, exponent, 2 * NO_EXPONENT)


def _add_parts(*refs: Any, width: int, **settings: Any) -> None:
    """Adds up the parts of a stretch of a row too long to be added up and selected from at once."""
    *inputs, value_ref, exponent_ref = refs
    sequence, start = jax.lax.axis_index("sequence"), jax.lax.axis_index("tile") * width
    value, exponent = _row_entries(*inputs, sequence=sequence, start=start, width=width, **settings)
    value_ref[sequence, pl.ds(start, width)] = value
    exponent_ref[sequence, pl.ds(start, width)] = exponent


def _select_token(
    value_ref: Any,
    exponent_ref: Any,
    direct_ref: Any,
    position_ref: Any,
    layers_ref: Any,
    count_ref: Any,
    ids_ref: Any,
    state_ref: Any,
    scratch: Any,
    *,
    is_added: bool,
    num_blocks: int,
    sink_blocks: int,
    local_blocks: int,
    interpret: bool,
    **settings: Any,
) -> None:
    """Rescales one sequence's row as the walk does, and selects from it."""
    sequence = jax.lax.axis_index("sequence")
    width = direct_ref.shape[-1]
    layout = warp_ops.row_layout(width)

    def load(ref: Any) -> Array:
        return plgpu.load(ref.at[sequence], layout=layout, optimized=False)

    row = position_ref[sequence] // settings["block_size"]
    if is_added:  # read again below: both at once would not fit in registers
        exponent = load(exponent_ref)
        largest = jnp.max(exponent)
        value, exponent = load(value_ref), load(exponent_ref)
    else:
        inputs = (value_ref, exponent_ref, direct_ref, position_ref, layers_ref)
        value, exponent = _row_entries(*inputs, sequence=sequence, start=0, width=width, **settings)
        largest = jnp.max(exponent)
    scale = power_of_two(exponent - largest + _STATE_EXPONENT)
    state = jnp.where(exponent > NO_EXPONENT // 4, value * scale, 0.0)
    state_ref[sequence] = state
    is_walked = jnp.max(jnp.where(state > 0.0, 1, 0)) > 0
    columns = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    direct = jnp.where(columns <= row, load(direct_ref), 0.0)
    select_row(
        jnp.where(is_walked, state, direct),
        row,
        count_ref[sequence],
        ids_ref.at[sequence],
        scratch,
        num_blocks=num_blocks,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        interpret=interpret,
    )


def select_decode_kernel(
    token: Float[Array, "B C R"],
    query_sums: Float[Array, "B J C R"],
    key_sums: Float[Array, "B J C R"],
    state: Float[Array, "B 1 J"],
    layers: Int[Array, ""],
    positions: Int[Array, "B"],
    counts: Int[Array, "B 1"],
    *,
    head_dim: int,
    power: int,
    rectify: bool = False,
    use_walk: bool = True,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int = 64,
    interpret: bool = False,
) -> tuple[BlockSelection, Float[Array, "B 1 J"]]:
    """Blocks for one token per sequence and the walk's next row, for the power transitions.

    Args:
      token: Sketches of the tokens' head-combined queries.
      query_sums: Sums of queries in sketch space, the token's own included or not.
      key_sums: Sums of keys in sketch space, the token's own included.
      state: The token's row of the walk so far.
      layers: Layers walked so far; 0 means that this one starts the walk.
      positions: Positions of the tokens.
      counts: Blocks to keep.
      head_dim: Size of a head before the sketch, which scales the scores.
      power: Exponent of the transition, at most 32.
      rectify: Whether negative scores count as zero.
      use_walk: Whether the row is multiplied by `W`; else it is `W`'s own row in every layer.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      max_count: Static upper bound of `counts`: the length `P` of the lists.
      block_size: Tokens per block.
      interpret: Whether to interpret the kernels, which needs no GPU.

    Returns:
      A `BlockSelection` shared by all heads, and the state after this layer.

    Raises:
      ValueError: If sketches are not a multiple of 32 long, the power exceeds 32, or rows 16,384.
    """
    batch, num_blocks = query_sums.shape[:2]
    size = math.prod(query_sums.shape[2:])
    if size % CHUNK or power > 32 or num_blocks > MAX_COLUMNS:
        raise ValueError(
            f"sketches must be a multiple of {CHUNK} long, power at most 32 and blocks at most "
            f"{MAX_COLUMNS}, got {size}, {power} and {num_blocks}"
        )
    max_count = min(max_count, num_blocks)
    padding = -num_blocks % QUERY_TILE
    width = num_blocks + padding

    def flat(sums: Array) -> Array:
        sums = sums.reshape(batch, num_blocks, size)
        return jnp.pad(sums, ((0, 0), (0, padding), (0, 0))) if padding else sums

    row = state[:, 0]
    if padding:
        row = jnp.pad(row, ((0, 0), (0, padding)))
    layers = layers[None] if use_walk else jnp.zeros((1,), jnp.int32)
    num_splits = min(_MAX_SPLITS, width // QUERY_TILE)
    settings: dict[str, Any] = dict(
        power=power, rectify=rectify, block_size=block_size, num_splits=num_splits
    )
    kernel: Any = functools.partial(
        plgpu.kernel,
        compiler_params=warp_ops.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    floats = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    integers = jax.ShapeDtypeStruct((batch, width), jnp.int32)
    value, exponents, direct = kernel(
        functools.partial(
            _walk_rows, scale=1.0 / math.sqrt(head_dim), interpret=interpret, **settings
        ),
        out_type=[
            jax.ShapeDtypeStruct((batch, num_splits, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_splits, width), jnp.int32),
            floats,
        ],
        grid=(width // KEY_TILE, num_splits, batch),
        grid_names=("tile", "split", "sequence"),
        scratch_types=tiles.buffers(),
        kernel_name="sketchwalk_walk_rows",
    )(token.reshape(batch, size), flat(query_sums), flat(key_sums), row, positions, layers)
    is_added = width > _WIDEST_FUSED
    if is_added:
        stretch = math.gcd(width, _WIDEST_FUSED)
        value, exponents = kernel(
            functools.partial(_add_parts, width=stretch, **settings),
            out_type=[floats, integers],
            grid=(width // stretch, batch),
            grid_names=("tile", "sequence"),
            kernel_name="sketchwalk_add_parts",
        )(value, exponents, direct, positions, layers)
    ids, new_row = kernel(
        functools.partial(
            _select_token,
            is_added=is_added,
            num_blocks=num_blocks,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
            interpret=interpret,
            **settings,
        ),
        out_type=[jax.ShapeDtypeStruct((batch, max_count), jnp.int32), floats],
        grid=(batch,),
        grid_names=("sequence",),
        scratch_types=[plgpu.SMEM((warp_ops.WARPS,), jnp.int32)],
        kernel_name="sketchwalk_select_token",
    )(value, exponents, direct, positions, layers, counts[:, 0])
    selection = BlockSelection(ids[:, None, None], counts[:, None], block_size)
    return selection, new_row[:, None, :num_blocks]
