"""Attention of one token per sequence over its key blocks, on NVIDIA GPUs from Ampere on.

A thread block attends to one part of one unit's list (`parts`), of up to 16 heads. The warps of a
thread block share no keys: in each step a warp copies its own page of 16 keys (`cp.async`) and
multiplies it with the unit's queries, whose heads are the 16 rows of a product (`mma.sync`):

    S = Q Kᵀ                                    [heads, keys]
    m' = max(m, S over keys),  P = 2^(S - m')    scores in base 2
    O = O 2^(m - m') + P V                      [heads, features]

An array of 64 rows has 16 rows per warp. So no warp waits for another in the loop: each waits for
its own copies, with `stages - 1` of its pages of keys and values in flight. Per-warp numbers, such
as a warp's page, are arrays of 64 rows too, with 16 equal rows per warp. At the end the warps add
their sums through the shared memory that held the keys. They write a part's sums and statistics for
the combining kernel, or the output if there is only one part.

A token reads every listed key and value once per unit: 4 H bytes per key. Keys beyond a sequence's
length are not read: the copy fills in zeros, and their scores are masked.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels.config import DECODE_HEADS, num_multiprocessors, shared_memory
from sketchwalk_jax.pallas_kernels.decode_attention.parts import (
    COLUMNS,
    FEATURES,
    STEP,
    Tiling,
    add_parts,
    along_keys,
    finish,
    num_splits,
    prepare,
)
from sketchwalk_jax.pallas_kernels.lib import mma_sync, ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mma_sync import PAGE
from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE

_MAX_HEADS = 16  # per thread block: rows of a product
_WARPS = row_ops.WARPS  # each has a page of a step
_ROWS = _WARPS * _MAX_HEADS
_PARTS = 16  # parts in registers at a time
_WANTED_STAGES, _MAX_STAGES = 3, 5
_MAX_PROGRAMS = 4  # per SM
# Bytes of shared memory per thread block: other than keys and values, and reserved by CUDA.
_SCRATCH, _RESERVED = 1024, 1024


def sizes(head_dim: int, memory: int) -> tuple[int, int]:
    """Chooses thread blocks per multiprocessor, and steps in each one's shared memory.

    Args:
      head_dim: Features of a head, 64 or 128.
      memory: Bytes of shared memory per multiprocessor.
    """
    other, step = _SCRATCH + _RESERVED, _step_bytes(head_dim)
    programs = max(1, min(_MAX_PROGRAMS, memory // (_WANTED_STAGES * step + other)))
    return programs, min(_MAX_STAGES, (memory // programs - other) // step)


def _step_bytes(head_dim: int) -> int:
    """Bytes of keys and values per step."""
    return STEP * 2 * head_dim * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling(Tiling):
    """Static parameters of a call; the head_dim is 64 or 128.

    Attributes:
      num_blocks: Blocks per sequence in the cache.
      entry: Pages per block.
    """

    num_blocks: int
    entry: int

    head_dims = DECODE_HEADS
    most_heads = _MAX_HEADS

    @classmethod
    def of(
        cls, shape: dict[str, Any], query: Any, key: Any, ids: Any, block_size: int, interpret: bool
    ) -> Self:
        """Returns the tiling for a call with these arrays; `shape` has the first fields."""
        head_dim, list_blocks = query.shape[-1], ids.shape[-1]
        programs, stages = sizes(head_dim, shared_memory())
        programs *= num_multiprocessors()
        units = shape["batch"] * shape["units"]
        splits = num_splits(units, list_blocks, block_size, programs=programs)
        steps = -(-list_blocks * block_size // (STEP * splits))
        return cls(
            **shape,
            head_dim=head_dim,
            num_blocks=key.shape[2] // block_size,
            entry=block_size // PAGE,
            stages=max(2, min(stages, steps + 1)),
            splits=splits,
        )

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory of a thread block: keys, values, and one number per row."""
        slots = (self.stages, STEP, self.head_dim)
        return {
            "keys": ops.tiled(slots, self.dtype),
            "values": ops.tiled(slots, self.dtype),
            "numbers": plgpu.SMEM((_ROWS,), jnp.float32),
        }


class _Pages(NamedTuple):
    """Each warp's page in one step.

    Attributes:
      first: First key of the page.
      room: Number of valid keys in the page; 0 or less if none are.
    """

    first: Array
    room: Array


class _Sums(NamedTuple):
    """Online softmax state of the warps.

    Attributes:
      maximum: Largest score of each row, in base 2.
      total: Sum of each row's weights.
      o: Sum of the weighted values.
    """

    maximum: Float[Array, "64"]
    total: Float[Array, "64"]
    o: Float[Array, "64 H"]


@dataclasses.dataclass(frozen=True)
class _List:
    """One part of a unit's list.

    Attributes:
      tiling: Tiling of the call.
      ids: The list `[P]`.
      count: Blocks in the list.
      stop: End of the part, in steps (exclusive).
      length: Keys in the sequence.
    """

    tiling: _Tiling
    ids: Any
    count: Any
    stop: Any
    length: Any

    def pages(self, step: Any) -> _Pages:
        """Returns the pages of a step."""
        tiling = self.tiling
        place = step * _WARPS + mma_sync.warp_numbers()
        entry, rest = place, 0
        if tiling.entry > 1:
            entry, rest = place >> _log2(tiling.entry), place & (tiling.entry - 1)
        # Clamp, since lists hold arbitrary entries beyond their count; `room` is then 0 or less.
        last = jnp.maximum(self.count - 1, 0)
        found = mma_sync.read_for_warps(self.ids, jnp.minimum(entry, last))
        found = jnp.clip(found, 0, tiling.num_blocks - 1)
        first = (found * tiling.entry + rest) * PAGE
        end = jnp.minimum(self.stop * _WARPS, self.count * tiling.entry)
        return _Pages(first, jnp.where(place < end, self.length - first, 0))


def _attend_to_part(
    query: Any,
    key: Any,
    value: Any,
    ids: Any,
    counts: Any,
    layer: Any,
    kv_lengths: Any,
    out: Any,
    *statistics: Any,
    tiling: _Tiling,
    keys: Any,
    values: Any,
    numbers: Any,
) -> None:
    """Attends to one part of one unit's list; see the module's docstring.

    Step `t` waits for its pages and starts to copy the pages of step `t + stages - 1` over the
    pages of step `t - 1`. The list is read one step earlier, so that no copy waits for it.
    """
    batch, split = jax.lax.axis_index("batch"), jax.lax.axis_index("split")
    unit = jax.lax.axis_index("unit")
    place = batch * tiling.units + unit
    head = unit // (tiling.units // tiling.kv_heads)
    row = unit // (tiling.units // tiling.num_lists)
    count = counts[batch, row]
    num_steps = (count * tiling.entry + _WARPS - 1) // _WARPS
    start = split * num_steps // tiling.splits
    stop = (split + 1) * num_steps // tiling.splits
    blocks = _List(tiling, ids.at[batch, row], count, stop, kv_lengths[batch])
    sources = [x.at[layer[0], batch, :, head] for x in (key, value)]
    heads = pl.ds(place * tiling.group, tiling.group)

    def copy(pages: _Pages, slot: Any) -> None:
        """Starts a group of copies, an empty one beyond the part."""
        for source, target in zip(sources, (keys, values), strict=True):
            mma_sync.copy_own_pages(source, target.at[slot], pages.first, pages.room)
        mma_sync.commit_copies()

    rooms = []
    for ahead in range(tiling.stages - 1):
        pages = blocks.pages(start + ahead)
        copy(pages, ahead)
        rooms.append(pages.room)
    queries = mma_sync.read_heads(query.at[heads])
    zero = ops.full((_ROWS,), 0.0, ops.BY_ROW)
    first = ops.full((_ROWS,), FIRST_MAXIMUM, ops.BY_ROW)
    sums = _Sums(first, zero, ops.full((_ROWS, tiling.head_dim), 0.0))

    def step(index: Any, carry: Any) -> Any:
        sums, (room, *rooms), pages = carry
        slot = jax.lax.rem(index - start, tiling.stages)
        later = jnp.where(slot == 0, tiling.stages - 1, slot - 1)
        mma_sync.wait_copies(tiling.stages - 2)
        mma_sync.warp_barrier()
        copy(pages, later)
        coming = blocks.pages(index + tiling.stages)
        sums = _add_step(tiling, queries, keys.at[slot], values.at[slot], room, sums)
        return sums, (*rooms, pages.room), coming

    carry = sums, tuple(rooms), blocks.pages(start + tiling.stages - 1)
    sums = jax.lax.fori_loop(start, stop, step, carry)[0]
    mma_sync.wait_copies(0)
    row_ops.barrier()  # the sums overwrite the keys
    maximum = mma_sync.over_warps(sums.maximum, "max", numbers)
    share = jnp.exp2(sums.maximum - maximum)
    total = mma_sync.over_warps(sums.total * share, "add", numbers)
    if tiling.splits > 1:
        mma_sync.write_heads(maximum, statistics[0].at[split, place, 0])
        mma_sync.write_heads(total, statistics[0].at[split, place, 1])
        target = out.at[split, place]
    else:
        is_empty = total == 0.0
        safe = jnp.where(is_empty, 1.0, total)
        share = share / safe
        target = out.at[heads]
        if statistics:
            lse = (maximum + jnp.log2(safe)) * math.log(2.0)
            lse = jnp.where(is_empty, -jnp.inf, lse)
            mma_sync.write_heads(lse, statistics[0].at[place])
    o = sums.o * ops.spread(share, sums.o.shape, 0)
    mma_sync.write_sum_of_warps(o, target, keys.at[0], transposed=tiling.splits > 1)


def _add_step(
    tiling: _Tiling, queries: Array, keys: Any, values: Any, room: Array, sums: _Sums
) -> _Sums:
    """Adds one page per warp: scores, weights, and their product with the values."""
    s = mma_sync.multiply_own_keys(queries, keys) * tiling.exponent
    s = jnp.where(ops.matrix_index(s.shape, 1) < ops.spread(room, s.shape, 0), s, MASK_VALUE)
    maximum = jnp.maximum(sums.maximum, jnp.max(s, axis=1))
    p = jnp.exp2(s - ops.spread(maximum, s.shape, 0))
    decay = jnp.exp2(sums.maximum - maximum)
    o = sums.o * ops.spread(decay, sums.o.shape, 0)
    o = mma_sync.add_values(o, p.astype(values.dtype), values, of_warp=True)
    return _Sums(maximum, sums.total * decay + jnp.sum(p, axis=1), o)


def _combine_parts(parts: Any, statistics: Any, out: Any, *lse_out: Any, tiling: _Tiling) -> None:
    """Adds the parts of 8 heads of one unit in order, for one tile of features."""
    place, chunk = jax.lax.axis_index("unit"), jax.lax.axis_index("chunk")
    first = jax.lax.axis_index("heads") * COLUMNS
    columns, rows = pl.ds(first, COLUMNS), pl.ds(chunk * FEATURES, FEATURES)
    add = functools.partial(add_parts, parts, statistics, place, rows, columns)
    first_parts = (tiling.splits - 1) % _PARTS + 1

    def add_more(index: Any, sums: Any) -> Any:
        start = first_parts + index * _PARTS
        (o, total, maximum), more = sums, add([start + part for part in range(_PARTS)])
        largest = jnp.maximum(maximum, more[2])
        own, its = (jnp.exp2(x - largest) for x in (maximum, more[2]))
        o = o * along_keys(own, o.shape) + more[0] * along_keys(its, o.shape)
        return o, total * own + more[1] * its, largest

    sums = add(range(first_parts))
    if tiling.splits > _PARTS:
        # Hide the count from the compiler: an unrolled loop would load more parts than registers
        # hold.
        rounds = mma_sync.unknown((tiling.splits - 1) // _PARTS)
        sums = jax.lax.fori_loop(0, rounds, add_more, sums)
    o, lse = finish(*sums)
    if lse_out:

        @pl.when(chunk == 0)
        def _() -> None:
            ops.write(lse_out[0].at[place, columns], lse)

    target = out.at[pl.ds(place * tiling.group, tiling.group), rows]
    mma_sync.write_columns(o, target, first)


def _log2(x: int) -> int:
    return x.bit_length() - 1


def decode_attention_kernel(
    query: Array, key: Array, value: Array, *lists: Any, **options: Any
) -> tuple[Array, Array | None]:
    """Computes a token's attention on any NVIDIA GPU of compute capability 8.0 or higher.

    The arguments are those of `parts.prepare`; the head_dim is 64 or 128.
    """
    tiling, rest, interpret = prepare(_Tiling, query, key, value, *lists, **options)
    make_kernel = functools.partial(
        ops.kernel,
        # Reductions across warps and their barriers are explicit in this module.
        compiler_params=ops.compiler_params(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )
    attend = make_kernel(
        functools.partial(_attend_to_part, tiling=tiling),
        scratch_types=tiling.scratch,
        kernel_name="block_sparse_decode",
        **tiling.attend_options,
    )
    combine = make_kernel(
        functools.partial(_combine_parts, tiling=tiling), **tiling.combine_options
    )
    return tiling.run(attend, combine, (query.reshape(-1, tiling.head_dim), key, value, *rest))
