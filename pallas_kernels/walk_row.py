"""The first kernel of a decoding step's block list: scores and the walk's next row, in parts.

The row of the token is `r_k = r_{k-1} W_k` with `W_k = A^s`: a sum over all earlier rows of `A`,
which is formed tile by tile and never stored. Powers of two are kept apart from the numbers
wherever these may become large or small: of each row of queries and keys, of each column's sum, and
of each part of the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

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
from sketchwalk_jax.pallas_kernels.score_tile import KEY_TILE, QUERY_TILE, spread

MAX_SPLITS = 16
PART_EXPONENT = 100  # of a part's largest entry
WIDE = 128  # entries of the queries that are added up side by side
# Exponents, so that the sums of a tile stay below 2^127: of the largest power, and of the weights.
_POWER_EXPONENT = 80
_WEIGHT_EXPONENT = 24
_LARGEST = 127
_LAYOUT = plgpu.Layout.WGMMA
_SHAPE = (KEY_TILE, QUERY_TILE)


def scratch(size: int, *, is_projected: bool) -> dict[str, Any]:
    """Shared memory of a program."""
    keys, queries = tiles.buffers(size)
    floats = {"token": size, "weights": QUERY_TILE, "factors": QUERY_TILE}
    integers = {"exponents": QUERY_TILE, "sums": KEY_TILE}
    if is_projected:
        floats["combined"] = WIDE
    return {
        "keys": keys,
        "queries": queries,
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=1),
        **{name: plgpu.SMEM((length,), jnp.float32) for name, length in floats.items()},
        **{name: plgpu.SMEM((length,), jnp.int32) for name, length in integers.items()},
    }


def programs(num_tiles: int) -> tuple[int, int]:
    """Programs for so many tiles of query blocks, and whether each makes a single tile.

    Few tiles of query blocks: those at or below the diagonal, of the first and the last tile of
    query blocks in one line, of the second and the last but one in the next, and so on. Many: all
    tiles of key blocks in a line, and a line for every part.
    """
    if num_tiles <= MAX_SPLITS:
        return 2 * num_tiles + 2, (num_tiles + 1) // 2
    return 2 * num_tiles, MAX_SPLITS


def exists(tile: Array, split: Array, last_tile: Array, first: Array, num_tiles: int) -> Any:
    """Whether the first kernel has written that part of that tile of key blocks."""
    if num_tiles > MAX_SPLITS:
        return tile < 2 * num_tiles
    return (tile <= 2 * split + 1) & (split <= last_tile) & (split >= first)


def walk_row(
    token_ref: Any,
    projection_ref: Any,
    query_ref: Any,
    key_ref: Any,
    state_ref: Any,
    position_ref: Any,
    layers_ref: Any,
    part_ref: Any,
    exponent_ref: Any,
    direct_ref: Any,
    *,
    scale: float,
    num_tiles: int,
    is_projected: bool,
    overlaps: bool,
    power: int,
    rectify: bool,
    use_walk: bool,
    block_size: int,
    interpret: bool,
    **memory: Any,
) -> None:
    """A tile of key blocks, and one tile of query blocks or several: a part of the row."""
    if overlaps:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    index, line, sequence = (jax.lax.axis_index(x) for x in ("index", "line", "sequence"))
    by_key, by_query = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
    flat = plgpu.Layout.WG_STRIDED((QUERY_TILE,), 1)
    is_single = num_tiles <= MAX_SPLITS
    num_splits = num_tiles if is_single else MAX_SPLITS
    if is_single:
        of_first = index < 2 * line + 2
        tile = jnp.where(of_first, index, index - (2 * line + 2))
        split = jnp.where(of_first, line, num_tiles - 1 - line)
        is_new = of_first | (split != line)
    else:
        tile, split = index, line
    keys = pl.ds(tile * KEY_TILE, KEY_TILE)
    size = query_ref.shape[-1]
    chunk = tiles.chunk_of(size)

    def blocks(start: Array, shape: tuple[int, ...], axis: int) -> Array:
        return start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)

    def wait() -> None:
        warp_ops.barrier(interpret=interpret)

    def start_copies(query_tile: Array, part: int) -> None:
        entries, queries = pl.ds(part * chunk, chunk), pl.ds(query_tile * QUERY_TILE, QUERY_TILE)
        for name, source in (
            ("keys", key_ref.at[sequence, keys, entries]),
            ("queries", query_ref.at[sequence, queries, entries]),
        ):
            plgpu.copy_gmem_to_smem(source, memory[name][0], memory["arrived"].at[0])

    def load_state(query_tile: Array) -> Array:
        span = state_ref.at[sequence, pl.ds(query_tile * QUERY_TILE, QUERY_TILE)]
        return plgpu.load(span, layout=flat, optimized=False)

    def write_token() -> None:
        if not is_projected:
            token = token_ref.at[sequence]
            memory["token"][...] = plgpu.load(token, layout=by_query, optimized=False)
            wait()
            return
        layout = plgpu.Layout.WG_STRIDED((WIDE,), 1)
        lines = [
            plgpu.load(token_ref.at[sequence, x], layout=layout, optimized=False)
            for x in range(token_ref.shape[1])
        ]
        projection = plgpu.load(projection_ref, layout=_LAYOUT, optimized=False)
        memory["combined"][...] = _sum([x.astype(jnp.float32) for x in lines])
        wait()
        combined = plgpu.load(memory["combined"], layout=by_query, optimized=False)
        memory["token"][...] = jnp.sum(projection * spread(combined, projection.shape, 1), axis=1)
        wait()

    def add_tile(query_tile: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        start = query_tile * QUERY_TILE
        state = first_state if is_single else load_state(query_tile)
        is_started = [is_single]

        def fetch(part: int) -> tuple[tiles.Load, tiles.Load]:
            entries = pl.ds(part * chunk, chunk)
            key_sums, query_sums = memory["keys"][0], memory["queries"][0]
            if not is_started.pop():
                wait()  # all have read what was there
                start_copies(query_tile, part)
            is_started.append(False)

            if part == 0:

                @pl.when(query_tile == last_tile)
                def _() -> None:
                    write_token()

            plgpu.barrier_wait(memory["arrived"].at[0])

            def load_keys() -> Array:
                key = plgpu.load(key_sums, layout=_LAYOUT, optimized=False)
                block = blocks(tile * KEY_TILE, key.shape, 0)
                share = jnp.where(block == row, scale / last_count, scale / block_size)
                return jnp.where(block <= row, key * share, 0.0)

            def load_queries() -> Array:
                own = memory["token"].at[entries]
                own = plgpu.load(own, layout=by_query, optimized=False)
                query = plgpu.load(query_sums, layout=_LAYOUT, optimized=False)
                block = blocks(start, query.shape, 0)
                query = jnp.where(block < row, query * (1.0 / block_size), 0.0)
                return jnp.where(block == row, spread(own, query.shape, 1), query)

            return load_keys, load_queries

        def weigh(shift: Array) -> Array:
            """Writes weights of the tile's rows; returns the power of two that they all lack."""
            memory["exponents"][...] = shift
            wait()
            shift = plgpu.load(memory["exponents"], layout=flat, optimized=False)
            rows = start + plgpu.broadcasted_iota(jnp.int32, (QUERY_TILE,), 0, layout=flat)
            own = jnp.where(rows == row, plgpu.layout_cast(jnp.ones_like(state), flat), 0.0)
            weight = jnp.where(rows <= row, jnp.where(is_first, own, state), 0.0)
            exponent = exponent_of(weight)
            exponent = replace(exponent - power * shift, exponent == NO_EXPONENT, NO_EXPONENT)
            largest = jnp.maximum(jnp.max(exponent), NO_EXPONENT // 2) - _WEIGHT_EXPONENT
            memory["weights"][...] = mantissa_of(weight) * power_of_two(exponent - largest)
            memory["factors"][...] = own * power_of_two(-shift)
            wait()
            return largest

        parts = memory["keys"][1], memory["queries"][1]
        scores, key_shift, exponent = tiles.score_tile(
            fetch, size, parts, weigh, interpret=interpret
        )
        query_row = blocks(start, _SHAPE, 1)
        exist = (blocks(tile * KEY_TILE, _SHAPE, 0) <= query_row) & (query_row <= row)
        scores = jnp.where(exist, scores, 0.0)

        @pl.when(query_tile == last_tile)
        def _() -> None:
            factors = plgpu.load(memory["factors"], layout=by_query, optimized=False)
            direct = jnp.sum(scores * spread(factors, _SHAPE, 1), axis=1)
            direct_ref[sequence, tile] = direct * power_of_two(-key_shift)

        if rectify:
            scores = jnp.maximum(scores, 0.0)
        top = _POWER_EXPONENT // power - 1
        shift = jnp.minimum(top - exponent_of(jnp.max(jnp.abs(scores), axis=1)), _LARGEST)
        powers = integer_power(scores * spread(power_of_two(shift), _SHAPE, 0), power)
        weights = plgpu.load(memory["weights"], layout=by_query, optimized=False)
        sums = jnp.sum(powers * spread(weights, _SHAPE, 1), axis=1)
        return add_scaled(total, (sums, exponent - power * (shift + key_shift)))

    if is_single:  # before it is known whether there is anything to do
        start_copies(split, 0)
        first_state = load_state(split)
    position = position_ref[sequence]
    row = position // block_size
    last_count = (position + 1 - row * block_size).astype(jnp.float32)
    last_tile = row // QUERY_TILE
    # The walk's first layer needs the token's own row alone.
    is_first = layers_ref[0] * int(use_walk) == 0
    has_work: Any = index >= 0
    if is_single:
        has_work = is_new & (split <= last_tile)
        has_work = has_work & (jnp.logical_not(is_first) | (split == last_tile))

        @pl.when(jnp.logical_not(has_work))
        def _() -> None:
            plgpu.barrier_wait(memory["arrived"].at[0])

    @pl.when(has_work)
    def _() -> None:
        zero = plgpu.layout_cast(jnp.zeros((KEY_TILE,), jnp.float32), by_key)
        none = plgpu.layout_cast(jnp.full((KEY_TILE,), NO_EXPONENT, jnp.int32), by_key)
        total = zero, none
        if is_single:
            total = add_tile(split, total)
        else:
            first = jnp.where(is_first, last_tile, 0)
            first = jnp.maximum(first, tile * KEY_TILE // QUERY_TILE)
            first = first + (split + num_splits - first % num_splits) % num_splits
            steps = jnp.maximum(last_tile - first + num_splits, 0) // num_splits
            total = jax.lax.fori_loop(
                0, steps, lambda step, x: add_tile(first + step * num_splits, x), total
            )
        value, exponent = total
        exponent = jnp.maximum(exponent + exponent_of(value), NO_EXPONENT)
        memory["sums"][...] = exponent
        wait()
        every = plgpu.load(memory["sums"], layout=by_query, optimized=False)
        largest = jnp.max(spread(every, (KEY_TILE, KEY_TILE), 1), axis=1)
        part = mantissa_of(value) * power_of_two(exponent - largest + PART_EXPONENT)
        part_ref[sequence, split, tile] = jnp.where(value == 0.0, 0.0, part)
        exponent_ref[sequence, tile, split] = largest


def _sum(values: list[Array]) -> Array:
    """Pairs first, for the rounding and for the latency."""
    while len(values) > 1:
        pairs = list(zip(values[::2], values[1::2], strict=False))
        values = [one + other for one, other in pairs] + values[len(pairs) * 2 :]
    return values[0]


def can_project(num_heads: int, matrix: Any, num_groups: int) -> bool:
    """Whether the kernel can make the sketch of the mean over heads by itself."""
    if matrix is None or num_groups > 1:
        return False
    head_dim, size = matrix.shape
    fits = WIDE % head_dim == 0 and num_heads * head_dim % WIDE == 0
    return bool(fits and size % KEY_TILE == 0)


def projection_of(num_heads: int, matrix: Any) -> Any:
    """What projects rows of `WIDE` entries of the queries, so that the sum is the mean's sketch."""
    head_dim = matrix.shape[0]
    return jnp.tile(jnp.asarray(matrix).T * (1.0 / num_heads), (1, WIDE // head_dim))
