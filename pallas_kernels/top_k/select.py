"""Top-k and compaction in one kernel: from scores to block indices (Algorithm 1 step 7).

A thread block has one row of scores, which it reads once (4 bytes per block) and keeps in
registers. Scores become 32-bit integers of the same order, the keys. A histogram in shared memory
tells which bin has the least key to keep, and how many keys are in higher bins. If the bin has many
keys, a histogram of narrower bins follows. The few keys of the last bin are compared with each
other. Ties go to the lower index. Every warp has a stretch of consecutive columns, so that sums
over its lanes give each kept column its place in the ascending list.

`select_row` does this in registers; the decoding kernels end with it too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import MAX_LISTED
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.scaled import replace
from sketchwalk_jax.selection import BlockSelection

# Keys of +inf (forced blocks), of -inf (blocks above the diagonal) and of columns beyond the end.
_FORCED = 0x7F800000
_BEYOND = ~0x7F800000
_ABSENT = -(1 << 31)
_NONE = (1 << 31) - 1  # above all keys
_WARPGROUPS = 4  # most warpgroups per row
_TILES = 8  # divides the tiles of key blocks of a warpgroup
_TILE = 64  # columns
# Logarithms of the keys per bin: a histogram of all keys has four bins per octave. One of a window
# of 32 octaves has 64 bins per octave.
_WHOLE_BITS, _WINDOW_BITS = 32 - row_ops.BIN_BITS, 17


class _Search(NamedTuple):
    """State of the search for the least key to keep.

    Attributes:
      is_open: 1 until the search has ended.
      low: Least key of the next histogram, or of the last one if the search has ended.
      shift: Logarithm of its keys per bin.
      bin: Bin of the least key to keep in the last histogram.
      above: Number of keys in higher bins.
      number: Number of keys in this bin, or a larger number.
    """

    is_open: Int[Array, ""]
    low: Int[Array, ""]
    shift: Int[Array, ""]
    bin: Int[Array, ""]
    above: Int[Array, ""]
    number: Int[Array, ""]


def ordered_keys(scores: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Maps scores to integers of the same order; both zeros are equal.

    Non-finite scores map to the key of blocks above the diagonal, below all finite scores.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = replace(keys, magnitude == 0, 0)
    return replace(keys, magnitude >= _FORCED, _BEYOND)


def keep_best(
    keys: Int[Array, "..."],
    count: Int[Array, ""],
    ids_ref: Any,
    scratch: Any,
    *,
    window: int | None = None,
    pad: int,
    layout: Any,
) -> None:
    """Writes the columns of the `count` largest keys, of equal ones the first.

    Args:
      keys: Keys of one row, in registers.
      count: Keys to keep.
      ids_ref: Target of the columns, `[P]` in global memory.
      scratch: `row_ops.scratch_of_row()`, after `row_ops.clear_bins`.
      window: Exponent of the lowest score of 32 octaves in which the least one to keep usually is.
        The result does not depend on it.
      pad: Value of the entries beyond `count`.
      layout: Layout of the keys.
    """
    most, rank = row_ops.most_candidates(scratch), jnp.maximum(count, 1)

    def find(state: _Search) -> _Search:
        _, low, shift, *_ = state
        own, above, number = row_ops.find_bin(keys, low, shift, rank, scratch, layout=layout)
        is_open = (shift > 0) & (number > most)
        # The outer bins of the window have keys beyond it: continue with all keys.
        is_outside = (shift == _WINDOW_BITS) & ((own == 0) | (own == row_ops.LAST_BIN))
        narrower = jnp.maximum(shift - row_ops.BIN_BITS, 0)
        own_low = replace(low + jax.lax.shift_left(own, shift), is_outside, _ABSENT)
        return _Search(
            is_open.astype(jnp.int32),
            jnp.where(is_open, own_low, low),
            jnp.where(is_open, replace(narrower, is_outside, _WHOLE_BITS), shift),
            own,
            above,
            number,
        )

    zero = count * 0  # not constant to the compiler
    low, shift = (_ABSENT, _WHOLE_BITS) if window is None else ((window + 127) << 23, _WINDOW_BITS)
    start = _Search(zero + 1, zero + low, zero + shift, zero, zero, zero)
    found = jax.lax.while_loop(lambda state: state.is_open > 0, find, start)
    rank = rank - found.above
    least, left, equal = jax.lax.cond(
        found.shift > 0,
        lambda: row_ops.find_key(
            keys, found.low, found.shift, found.bin, found.number, rank, scratch, layout=layout
        ),
        lambda: [found.low + found.bin, rank, found.number],  # the bin has one key
    )
    least = replace(least, count < 1, _NONE)
    kept = jax.lax.cond(
        left < equal,
        lambda: row_ops.keep_first(keys, least, left, scratch, layout=layout),
        lambda: keys,
    )
    row_ops.write_kept(kept, least, count, ids_ref, scratch, pad=pad, layout=layout)


def room_of(num_tiles: int, *, least: int = _TILES, interpret: bool) -> tuple[int, int]:
    """Returns a row's tiles of 64 columns, with padding, and the warpgroups that share it.

    Args:
      num_tiles: Tiles that exist.
      least: Most tiles of one warpgroup, unless there are more than four times as many.
      interpret: Whether the interpreter runs the kernel, which cannot reduce over warpgroups.
    """
    height = -(-num_tiles // _TILES) * _TILES
    if interpret:
        return height, 1
    warpgroups = min(-(-height // least), _WARPGROUPS)
    together = _TILES * warpgroups
    return -(-height // together) * together, warpgroups


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
    """Returns the keys of a row: forced blocks are highest, those above the diagonal lowest.

    Args:
      scores: Scores of the row's blocks; only their order matters.
      columns: Block indices of the scores, shaped like `scores`.
      row: Absolute block index of the row; blocks after it are not eligible.
      is_padded: Whether some columns do not exist; they are still lower.
      num_blocks: Number of existing columns.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
    """
    keys = ordered_keys(scores)
    forced = (columns < sink_blocks) | (columns > row - local_blocks)
    keys = replace(keys, forced, _FORCED)
    keys = replace(keys, columns > row, _BEYOND)
    return replace(keys, columns >= num_blocks, _ABSENT) if is_padded else keys


def select_row(
    scores: Float[Array, "..."],
    columns: Int[Array, "..."],
    row: Int[Array, ""],
    count: Int[Array, ""],
    ids_ref: Any,
    scratch: Any,
    *,
    num_blocks: int,
    window: int | None = None,
    layout: Any,
    **forced: Any,
) -> None:
    """Writes the block indices of one row, which is in registers, a stretch per warpgroup.

    Args:
      scores: As in `row_keys`, like `columns`, `row`, `num_blocks` and `forced`.
      columns: Block indices of the scores.
      row: Absolute block index of the row.
      count: Number of blocks to keep.
      ids_ref: Target of the indices, `[P]` in global memory.
      scratch: `row_ops.scratch_of_row()`, after `row_ops.clear_bins`.
      num_blocks: Number of existing columns; it also pads the list beyond its count.
      window: As in `keep_best`.
      layout: Layout of `scores` and `columns`.
      **forced: Other parameters of `row_keys`.
    """
    keys = row_keys(scores, columns, row, num_blocks=num_blocks, **forced)
    keep_best(keys, count, ids_ref, scratch, window=window, pad=num_blocks, layout=layout)


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
      ValueError: If a row has more than 65,536 blocks.
    """
    batch, num_rows, num_blocks = scores.shape
    if num_blocks > MAX_LISTED:
        raise ValueError(f"scores must have at most {MAX_LISTED} columns, got {num_blocks}")
    max_count = min(max_count, num_blocks)
    # Few warpgroups, since there may be many rows; but a thread has registers for 32 columns.
    height, warpgroups = room_of(-(-num_blocks // _TILE), least=8 * _TILES, interpret=interpret)
    width = height * _TILE
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, width - num_blocks)))

    def select_one_row(
        scores_ref: Any, rows_ref: Any, counts_ref: Any, ids_ref: Any, scratch: Any
    ) -> None:
        row_ops.clear_bins(scratch)
        index, warpgroup = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup")
        own = height // warpgroups  # tiles of this warpgroup
        layout = row_ops.tiles_layout(own, _TILE)
        columns = warpgroup * own + ops.matrix_index((own, _TILE), 0, layout)
        columns = columns * _TILE + ops.matrix_index((own, _TILE), 1, layout)
        select_row(
            ops.read_global(scores_ref.at[index, pl.ds(warpgroup * own, own)], layout),
            columns,
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
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[row_ops.scratch_of_row(warpgroups)],
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        detect_races=False,
    )(padded.reshape(total, height, _TILE), rows.reshape(total), counts.reshape(total))
    return BlockSelection(ids.reshape(batch, 1, num_rows, max_count), counts[:, None], block_size)
