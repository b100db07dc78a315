"""The first kernel of a decoding step's block list: scores and the walk's next row, in parts.

The row of the token is `r_k = r_{k-1} W_k` with `W_k = A^s`: a sum over all earlier rows of `A`,
which is formed tile by tile and never stored. Powers of two are kept apart from the numbers
wherever these may become large or small: of each row of queries and keys, of each column's sum, and
of each part of the result.

A program has two warpgroups, each with 64 query blocks of its own and, as a rule, the same 64 key
blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels import row_ops, warp_ops
from sketchwalk_jax.pallas_kernels import score_tile as tiles
from sketchwalk_jax.pallas_kernels.score_tile import TILE, spread
from sketchwalk_jax.pallas_kernels.walk_tile import BY_KEY, BY_QUERY, Tiles, Total, load
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    add_scaled,
    exponent_of,
    mantissa_of,
    power_of_two,
)

MAX_SPLITS = 16
PART_EXPONENT = 100  # of a part's largest entry
WIDE = 128  # entries of the queries that are added up side by side
_HALVES = 2  # of a program's query blocks: one for each warpgroup
QUERY_TILE = _HALVES * TILE  # query blocks of a part


def warpgroups(*, interpret: bool) -> dict[str, Any]:
    """Threads of a program: the interpreter goes through the halves in one."""
    return {} if interpret else {"num_threads": _HALVES, "thread_name": "half"}


def scratch(size: int, *, is_projected: bool) -> dict[str, Any]:
    """Shared memory of a program."""
    floats = {"token": (size,), "factors": (TILE,), "weights": (_HALVES, TILE)}
    if is_projected:
        floats["combined"] = (WIDE,)
    return {
        "operands": tiles.buffers(2 * _HALVES, size),  # keys, then queries
        "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=2 * _HALVES),
        "are_parts": plgpu.Barrier(num_arrivals=1, num_barriers=_HALVES),
        "is_done": plgpu.Barrier(num_arrivals=1, num_barriers=1),
        "maxima": row_ops.scratch_of_maximum(_HALVES),
        "total": plgpu.SMEM((TILE,), jnp.float32),
        "total_exponent": plgpu.SMEM((TILE,), jnp.int32),
        "key_shifts": plgpu.SMEM((_HALVES, TILE), jnp.int32),
        **{name: plgpu.SMEM(shape, jnp.float32) for name, shape in floats.items()},
    }


def programs(num_tiles: int) -> tuple[int, int]:
    """Programs for so many tiles of query blocks, and the lines that they stand in.

    Few tiles of query blocks: those below the diagonal, of the first and the last tile of query
    blocks in one line, of the second and the last but one in the next, and so on. What reaches the
    diagonal in the second half of a tile alone comes last, two of these in one program. Many: all
    tiles of key blocks in a line, and a line for every part.
    """
    if num_tiles <= MAX_SPLITS:
        return 2 * num_tiles + 1, (num_tiles + 1) // 2
    return 2 * num_tiles, MAX_SPLITS


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
    settings: dict[str, Any],
    num_tiles: int,
    is_projected: bool,
    overlaps: bool,
    use_walk: bool,
    interpret: bool,
    **memory: Any,
) -> None:
    """A tile of key blocks, and one tile of query blocks or several: a part of the row.

    `settings` are those of `Tiles` that are the same for all.
    """
    if overlaps:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    index, line, sequence = (jax.lax.axis_index(x) for x in ("index", "line", "sequence"))
    position = position_ref[sequence]
    row = position // settings["block_size"]
    last, last_split = row // TILE, row // QUERY_TILE
    # The walk's first layer needs the token's own row alone.
    is_first = layers_ref[0] * int(use_walk) == 0
    is_single = num_tiles <= MAX_SPLITS
    num_splits = num_tiles if is_single else MAX_SPLITS
    size = query_ref.shape[-1]
    chunk = tiles.chunk_of(size)
    num_chunks = size // chunk
    shares = num_chunks == 1 and not interpret  # the keys' parts, which then stay where they are

    def wait() -> None:
        warp_ops.barrier(interpret=interpret)

    def write_token() -> None:
        """Leaves the sketch of the token's query in shared memory."""
        if not is_projected:
            memory["token"][...] = load(token_ref.at[sequence], BY_QUERY)
            wait()
            return
        layout = plgpu.Layout.WG_STRIDED((WIDE,), 1)
        lines = [load(token_ref.at[sequence, x], layout) for x in range(token_ref.shape[1])]
        projection = load(projection_ref)
        memory["combined"][...] = _sum([x.astype(jnp.float32) for x in lines])
        wait()
        combined = spread(load(memory["combined"], BY_QUERY), projection.shape, 1)
        memory["token"][...] = jnp.sum(projection * combined, axis=1)
        wait()

    def work(half: Array) -> None:
        """What one of the warpgroups does."""
        tile, split, is_corner, is_new = index, line, index < 0, index >= 0
        if is_single:
            is_corner = index == 2 * num_tiles
            is_straight = jnp.logical_not(is_corner)
            of_first = (is_corner & (half == 0)) | (is_straight & (index <= 2 * line))
            split = jnp.where(of_first, line, num_tiles - 1 - line)
            tile = jnp.where(of_first, index, index - (2 * line + 1))
            tile = jnp.where(is_corner, 2 * split + 1, tile)
            is_new = of_first | (split != line)
        has_keys = is_corner | (half == 0) if shares else index >= 0
        key_slot = jnp.where(has_keys, half, 0)
        query_slot = _HALVES + half
        own = jnp.where(is_corner, tile, 2 * split + half)  # tile of query blocks

        both = Tiles(
            memory=memory,
            references={
                "query": query_ref.at[sequence],
                "key": key_ref.at[sequence],
                "state": state_ref.at[sequence],
                "direct": direct_ref.at[sequence, tile],
            },
            half=half,
            tile=tile,
            key_slot=key_slot,
            query_slot=query_slot,
            write_token=write_token,
            chunk=chunk,
            num_chunks=num_chunks,
            shares_keys=shares,
            is_single=is_single,
            interpret=interpret,
            **settings,
        )
        # Before it is known whether there is anything to do.
        if shares:
            pl.when(has_keys)(lambda: both.start_copy("key", tile, 0, key_slot))
        state = None
        if is_single:
            both.start_copies(own, 0)
            state = both.load_state(own)

        def is_live(query_tile: Array) -> Array:
            is_below = (query_tile <= last) & (query_tile >= tile)
            return is_below & (jnp.logical_not(is_first) | (query_tile == last))

        def write(total: Total) -> None:
            value, exponent = total
            exponent = jnp.maximum(exponent + exponent_of(value), NO_EXPONENT)
            largest = row_ops.maximum(
                exponent, memory["maxima"], layout=BY_KEY, interpret=interpret
            )
            part = mantissa_of(value) * power_of_two(exponent - largest + PART_EXPONENT)
            part_ref[sequence, split, tile] = jnp.where(value == 0.0, 0.0, part)
            exponent_ref[sequence, tile, split] = largest

        zero = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_KEY)
        no_exponent = plgpu.layout_cast(jnp.full((TILE,), NO_EXPONENT, jnp.int32), BY_KEY)
        none = zero, no_exponent

        def add_live(query_tile: Array, total: Total) -> Total:
            def add() -> Total:
                return both.add(query_tile, total, state, position, is_first)

            return jax.lax.cond(is_live(query_tile), add, lambda: total)

        def add_all() -> Total:
            if is_single:

                @pl.when(jnp.logical_not(is_live(own)))
                def _() -> None:
                    both.arrive(query_slot)
                    if not shares:
                        both.arrive(key_slot)

                return add_live(own, none)
            first = jnp.where(is_first, last_split, 0)
            first = jnp.maximum(first, tile // _HALVES)
            first = first + (split + num_splits - first % num_splits) % num_splits
            steps = jnp.maximum(last_split - first + num_splits, 0) // num_splits

            def add(step: Array, total: Total) -> Total:
                return add_live(_HALVES * (first + step * num_splits) + half, total)

            return jax.lax.fori_loop(0, steps, add, none)

        has_work = is_new
        if is_single:
            is_needed = (2 * split <= last) & (jnp.logical_not(is_first) | (split == last_split))
            has_work = is_new & is_needed & (jnp.logical_not(is_corner) | is_live(own))

            @pl.when(jnp.logical_not(has_work))
            def _() -> None:
                both.arrive(query_slot)
                pl.when(has_keys)(lambda: both.arrive(key_slot))

            # The second kernel reads all parts at or below the diagonal.
            is_empty = is_new & jnp.logical_not(has_work) & (is_corner | (half == 0))

            @pl.when(is_empty)
            def _() -> None:
                part_ref[sequence, split, tile] = none[0]
                exponent_ref[sequence, tile, split] = NO_EXPONENT

        @pl.when(has_work)
        def _() -> None:
            if shares:
                pl.when(has_keys)(lambda: both.write_keys(position))
            if shares and not is_single:
                both.await_keys()
            total = add_all()
            gives = jnp.logical_not(is_corner) & (half == 1)

            @pl.when(gives)
            def _() -> None:
                memory["total"][...], memory["total_exponent"][...] = total
                plgpu.barrier_arrive(memory["is_done"].at[0])

            def add_other() -> Total:
                plgpu.barrier_wait(memory["is_done"].at[0])
                names = "total", "total_exponent"
                value, exponent = (load(memory[name], BY_KEY) for name in names)
                return add_scaled(total, (value, exponent))

            @pl.when(jnp.logical_not(gives))
            def _() -> None:
                write(jax.lax.cond(is_corner, lambda: total, add_other))

    # The half that hands over its sum first.
    for half in (1, 0) if interpret else (None,):
        work(jax.lax.axis_index("half") if half is None else jnp.int32(half))


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
    return bool(fits and size % TILE == 0)


def projection_of(num_heads: int, matrix: Any) -> Any:
    """What projects rows of `WIDE` entries of the queries, so that the sum is the mean's sketch."""
    head_dim = matrix.shape[0]
    return jnp.tile(jnp.asarray(matrix).T * (1.0 / num_heads), (1, WIDE // head_dim))
