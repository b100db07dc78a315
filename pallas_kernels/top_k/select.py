"""Top-τ and compaction in one kernel: from scores to block lists (Algorithm 1 step 7).

A program is one warpgroup with one row, which it reads once (4 bytes per block) and keeps in
registers. Scores become 32-bit integers of the same order; halving an interval, twice at a time,
finds the threshold that keeps the row's count, and stops as soon as the count is met. Ties at the
threshold go to the lower index. Every warp owns a stretch of consecutive columns, so that votes
give each kept column its place in the ascending list.

`select_row` does this in registers; the kernels of prompts and of decoding end with it too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.config import MAX_BLOCKS
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.scaled import replace
from sketchwalk_jax.selection import BlockSelection

# Keys of +inf (forced blocks), -inf (blocks above the diagonal), and of columns that do not exist.
_FORCED = 0x7F800000
_BEYOND = ~0x7F800000
_ABSENT = -(1 << 31)
_WARPGROUPS = 4  # at most, that share a row
_TILES = 8  # of key blocks, of which a warpgroup has a multiple


class _Bracket(NamedTuple):
    """Where the search for a threshold stands.

    Attributes:
      lower: A key that more keys than wanted reach, or the least of all.
      upper: A key that no more keys than wanted reach.
      above: How many reach `upper`.
      turn: Which half of the scratch memory the next count takes.
    """

    lower: Int[Array, ""]
    upper: Int[Array, ""]
    above: Int[Array, ""]
    turn: Int[Array, ""]


def ordered_keys(scores: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers in the order of the scores; both zeros are one number.

    Scores that are not finite have the key of what lies above the diagonal, below every finite one.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = replace(keys, magnitude == 0, 0)
    return replace(keys, magnitude >= _FORCED, _BEYOND)


def row_keys(
    scores: Float[Array, "..."],
    columns: Int[Array, "..."],
    row: Int[Array, ""],
    *,
    is_padded: bool,
    num_blocks: int,
    sink_blocks: int,
    local_blocks: int,
) -> Int[Array, "..."]:
    """Keys of one row with the forced blocks on top and the blocks above the diagonal below."""
    keys = ordered_keys(scores)
    forced = (columns < sink_blocks) | (columns > row - local_blocks)
    keys = replace(keys, forced, _FORCED)
    keys = replace(keys, columns > row, _BEYOND)
    return replace(keys, columns >= num_blocks, _ABSENT) if is_padded else keys


def row_threshold(
    keys: Int[Array, "..."],
    count: Int[Array, ""],
    scratch: Any,
    *,
    guesses: tuple[int, ...] = (),
    layout: Any,
    interpret: bool,
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """The keys to keep: those of at least `upper`, and `missing` of those equal to `lower`.

    Bisection, two steps at a time: three limits divide what lies between the two keys into
    quarters, and one count for all three says in which of them the threshold is. It ends when
    `upper` keeps just what is wanted, or when no key lies between the two.

    Args:
      keys: Keys of one row, in registers.
      count: Keys to keep.
      scratch: `warp_ops.scratch_of_counts()`.
      guesses: Three keys in ascending order to try first; the result does not depend on them.
      layout: Of the keys.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      `lower`, `upper` and `missing`.
    """

    def is_open(state: _Bracket) -> Bool[Array, ""]:
        return (state.above != count) & (state.lower + 1 < state.upper)

    def narrow(state: _Bracket, limits: tuple[Array, Array, Array]) -> _Bracket:
        lower, upper, above, turn = state
        kept = row_ops.count_kept(keys, limits, scratch, turn, layout=layout, interpret=interpret)
        # The least limit that keeps too few is the new upper key, the one below it the lower.
        for limit, number in reversed(list(zip(limits, kept, strict=True))):
            upper = jnp.where(number <= count, limit, upper)
            above = jnp.where(number <= count, number, above)
        for limit, number in zip(limits, kept, strict=True):
            lower = jnp.where(number > count, limit, lower)
        return _Bracket(lower, upper, above, 1 - turn)

    def quarter(state: _Bracket) -> _Bracket:
        lower, upper, _, _ = state
        # Rounded up: no limit is the lower key itself, and what exceeds the upper one does no harm.
        step = jax.lax.shift_right_logical(upper - lower + 3, jnp.int32(2))
        return narrow(state, (lower + step, lower + 2 * step, lower + 3 * step))

    start = _Bracket(jnp.int32(_BEYOND), jnp.int32(_FORCED + 1), jnp.int32(0), jnp.int32(0))
    if guesses:
        one, two, three = (count * 0 + guess for guess in guesses)  # no constants to the compiler
        start = narrow(start, (one, two, three))
    lower, upper, above, _ = jax.lax.while_loop(is_open, quarter, start)
    return lower, upper, count - above


def room_of(num_key_tiles: int, *, interpret: bool) -> tuple[int, int]:
    """Tiles of key blocks that a row has room for, and the warpgroups that share it."""
    height = -(-num_key_tiles // _TILES) * _TILES
    if interpret:  # whose warpgroups cannot count together
        return height, 1
    warpgroups = min(height // _TILES, _WARPGROUPS)
    together = _TILES * warpgroups
    return -(-height // together) * together, warpgroups


def select_row(
    scores: Float[Array, "..."],
    columns: Int[Array, "..."],
    row: Int[Array, ""],
    count: Int[Array, ""],
    ids_ref: Any,
    scratch: Any,
    *,
    is_padded: bool,
    num_blocks: int,
    sink_blocks: int,
    local_blocks: int,
    guesses: tuple[int, ...] = (),
    layout: Any,
    interpret: bool,
) -> None:
    """Writes the list of one row, which is in registers in order, a stretch in each warpgroup.

    Args:
      scores: Scores of the row's blocks; only their order matters.
      columns: Which blocks these are, shaped like `scores`.
      row: Absolute block index of the row; blocks above it are not eligible.
      count: Blocks to keep.
      ids_ref: Where the list goes, `[P]` in global memory.
      scratch: `warp_ops.scratch_of_counts()`.
      is_padded: Whether some columns do not exist.
      num_blocks: Columns that exist, which also fill the list beyond its count.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      guesses: Three keys near which the least one to keep may be, ascending.
      layout: Of `scores` and `columns`.
      interpret: Whether the interpreter runs the kernel.
    """
    keys = row_keys(
        scores,
        columns,
        row,
        is_padded=is_padded,
        num_blocks=num_blocks,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
    )
    where: dict[str, Any] = dict(layout=layout, interpret=interpret)
    lower, upper, missing = row_threshold(keys, count, scratch, guesses=guesses, **where)
    row_ops.write_kept(
        keys, lower, upper, missing, count, ids_ref, scratch, pad=num_blocks, **where
    )


def padded_columns(num_blocks: int) -> int:
    """Columns of a row in registers: a multiple of the threads of a warpgroup."""
    return -(-num_blocks // row_ops.THREADS) * row_ops.THREADS


def pad_columns(x: Float[Array, "*lead J"]) -> Float[Array, "*lead W"]:
    """With zeros up to `padded_columns`."""
    padding = padded_columns(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),)) if padding else x


def select_blocks_kernel(
    scores: Float[Array, "B I J"],
    rows: Int[Array, "B I"],
    counts: Int[Array, "B I"],
    *,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int = 64,
    interpret: bool = False,
) -> BlockSelection:
    """`selection.select_blocks` as one kernel: the same lists for the same scores.

    Args:
      scores: Block scores of each row, float32; only their order within a row matters, and those
        that are not finite rank last.
      rows: Absolute block index of each row; blocks above it are not eligible.
      counts: Blocks to keep, at most `rows + 1` and at least the number of forced blocks.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      max_count: Static upper bound of `counts`: the length `P` of the lists.
      block_size: Tokens per block, recorded in the result.
      interpret: Whether to interpret the kernel, which needs no GPU.

    Returns:
      A `BlockSelection` shared by all heads, padded with the number of blocks.

    Raises:
      ValueError: If a row has more than 16,384 blocks, which no longer fit in registers.
    """
    batch, num_rows, num_blocks = scores.shape
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"scores must have at most {MAX_BLOCKS} columns, got {num_blocks}")
    max_count = min(max_count, num_blocks)
    width = padded_columns(num_blocks)

    def select_one_row(
        scores_ref: Any, rows_ref: Any, counts_ref: Any, ids_ref: Any, scratch: Any
    ) -> None:
        index = jax.lax.axis_index("row")
        layout = row_ops.row_layout(width)
        select_row(
            ops.read(scores_ref.at[index], layout),
            plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout),
            rows_ref[index],
            counts_ref[index],
            ids_ref.at[index],
            scratch,
            is_padded=width != num_blocks,
            num_blocks=num_blocks,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
            layout=layout,
            interpret=interpret,
        )

    total = batch * num_rows
    ids = ops.kernel(
        select_one_row,
        out_type=jax.ShapeDtypeStruct((total, max_count), jnp.int32),
        grid=(total,),
        grid_names=("row",),
        kernel_name="sketchwalk_select_rows",
        scratch_types=[row_ops.scratch_of_counts()],
        compiler_params=ops.compiler_params(),
        interpret=ops.interpreter(interpret),
    )(pad_columns(scores).reshape(total, width), rows.reshape(total), counts.reshape(total))
    return BlockSelection(ids.reshape(batch, 1, num_rows, max_count), counts[:, None], block_size)
