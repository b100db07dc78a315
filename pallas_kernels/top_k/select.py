"""Top-k and compaction in one kernel: from scores to block indices (Algorithm 1 step 7).

A thread block is one warpgroup with one row of scores, which it reads once (4 bytes per block) and
keeps in registers. Scores become 32-bit integers of the same order. Bisection, two steps at a time,
finds the threshold that keeps the row's count, and stops once the count is met. Ties at the
threshold go to the lower index. Every warp has a stretch of consecutive columns, so that votes give
each kept column its place in the ascending list.

`select_row` does this in registers; the decoding kernels end with it too.
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

# Keys of +inf (forced blocks), of -inf (blocks above the diagonal) and of columns beyond the end.
_FORCED = 0x7F800000
_BEYOND = ~0x7F800000
_ABSENT = -(1 << 31)
_WARPGROUPS = 4  # most warpgroups per row
_TILES = 8  # divides the tiles of key blocks of a warpgroup


class _Bracket(NamedTuple):
    """State of the search for a threshold.

    Attributes:
      lower: A key that would keep too many keys, or the least of all keys.
      upper: A key that does not keep too many keys.
      above: Number of keys that are at least `upper`.
      turn: Half of the scratch memory for the next count.
    """

    lower: Int[Array, ""]
    upper: Int[Array, ""]
    above: Int[Array, ""]
    turn: Int[Array, ""]


def ordered_keys(scores: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Maps scores to integers of the same order; both zeros are equal.

    Non-finite scores map to the key of blocks above the diagonal, below all finite scores.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = replace(keys, magnitude == 0, 0)
    return replace(keys, magnitude >= _FORCED, _BEYOND)


def row_threshold(
    keys: Int[Array, "..."],
    count: Int[Array, ""],
    scratch: Any,
    *,
    guesses: tuple[int, ...] = (),
    layout: Any,
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Finds the keys to keep: all from `upper` on, and the first `missing` equal to `lower`.

    Bisection, two steps at a time: three limits divide the interval between the two keys into
    quarters, and one count for all three tells which quarter has the threshold. It ends when
    `upper` keeps exactly `count` keys, or when no key is between the two.

    Args:
      keys: Keys of one row, in registers.
      count: Keys to keep.
      scratch: `row_ops.scratch_of_counts()`.
      guesses: Three keys in ascending order to try first; the result does not depend on them.
      layout: Layout of the keys.

    Returns:
      `lower`, `upper` and `missing`.
    """

    def is_open(state: _Bracket) -> Bool[Array, ""]:
        return (state.above != count) & (state.lower + 1 < state.upper)

    def narrow(state: _Bracket, limits: tuple[Array, Array, Array]) -> _Bracket:
        lower, upper, above, turn = state
        kept = row_ops.count_kept(keys, limits, scratch, turn, layout=layout)
        # The least limit that does not keep too many becomes `upper`, the one below it `lower`.
        for limit, number in reversed(list(zip(limits, kept, strict=True))):
            upper = jnp.where(number <= count, limit, upper)
            above = jnp.where(number <= count, number, above)
        for limit, number in zip(limits, kept, strict=True):
            lower = jnp.where(number > count, limit, lower)
        return _Bracket(lower, upper, above, 1 - turn)

    def quarter(state: _Bracket) -> _Bracket:
        lower, upper, _, _ = state
        # Round up, so that no limit equals the lower key; limits above the upper key do no harm.
        step = jax.lax.shift_right_logical(upper - lower + 3, jnp.int32(2))
        return narrow(state, (lower + step, lower + 2 * step, lower + 3 * step))

    start = _Bracket(jnp.int32(_BEYOND), jnp.int32(_FORCED + 1), jnp.int32(0), jnp.int32(0))
    if guesses:
        one, two, three = (count * 0 + guess for guess in guesses)  # not constant to the compiler
        start = narrow(start, (one, two, three))
    lower, upper, above, _ = jax.lax.while_loop(is_open, quarter, start)
    return lower, upper, count - above


def room_of(num_key_tiles: int, *, interpret: bool) -> tuple[int, int]:
    """Returns a row's tiles of key blocks, with padding, and the warpgroups that share it."""
    height = -(-num_key_tiles // _TILES) * _TILES
    if interpret:  # it cannot count over warpgroups
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
) -> None:
    """Writes the block indices of one row, which is in registers, a stretch per warpgroup.

    Args:
      scores: Scores of the row's blocks; only their order matters.
      columns: Block indices of the scores, shaped like `scores`.
      row: Absolute block index of the row; blocks after it are not eligible.
      count: Number of blocks to keep.
      ids_ref: Target of the indices, `[P]` in global memory.
      scratch: `row_ops.scratch_of_counts()`.
      is_padded: Whether some columns do not exist.
      num_blocks: Number of existing columns; it also pads the list beyond its count.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      guesses: Three guesses of the least key to keep, ascending.
      layout: Layout of `scores` and `columns`.
    """
    keys = ordered_keys(scores)
    # Forced blocks are highest, those above the diagonal lowest but for columns beyond the end.
    forced = (columns < sink_blocks) | (columns > row - local_blocks)
    keys = replace(keys, forced, _FORCED)
    keys = replace(keys, columns > row, _BEYOND)
    if is_padded:
        keys = replace(keys, columns >= num_blocks, _ABSENT)
    lower, upper, missing = row_threshold(keys, count, scratch, guesses=guesses, layout=layout)
    row_ops.write_kept(
        keys, lower, upper, missing, count, ids_ref, scratch, pad=num_blocks, layout=layout
    )


def padded_columns(num_blocks: int) -> int:
    """Returns the columns of a row in registers: a multiple of a warpgroup's threads."""
    return -(-num_blocks // row_ops.THREADS) * row_ops.THREADS


def pad_columns(x: Float[Array, "*lead J"]) -> Float[Array, "*lead W"]:
    """Pads with zeros up to `padded_columns`."""
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
    """Runs `selection.select_blocks` as one kernel, with the same indices for the same scores.

    Args:
      scores: Float32 block scores; only their order within a row matters, with non-finite ones
        last.
      rows: Absolute block index of each row; blocks after it are not eligible.
      counts: Number of blocks to keep, at most `rows + 1` and at least the number of forced blocks.
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
            ops.read_global(scores_ref.at[index], layout),
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
        interpret=interpret,
    )(pad_columns(scores).reshape(total, width), rows.reshape(total), counts.reshape(total))
    return BlockSelection(ids.reshape(batch, 1, num_rows, max_count), counts[:, None], block_size)
