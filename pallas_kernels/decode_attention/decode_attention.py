"""Attention of one token per sequence over its key blocks, on NVIDIA GPUs from Ampere on.

This is step 7 of Algorithm 2. A unit is up to 16 query heads that share a list of block indices and
a key/value head. A thread block attends to one part of one unit's list: a batch of one has fewer
units than the GPU has multiprocessors (SMs), so lists are split, and a second kernel adds the parts
in a fixed order. The warps of a thread block share no keys: in each step a warp copies its own page
of 16 keys (`cp.async`) and multiplies it with the unit's queries, whose heads are the 16 rows of a
product (`mma.sync`):

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
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    KernelConfig,
    default_kernel_config,
    num_multiprocessors,
    shared_memory,
    why_not_shape,
    without_derivative,
)
from sketchwalk_jax.pallas_kernels.lib import mma_sync, ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mma_sync import PAGE
from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE

_MAX_HEADS = 16  # per thread block: rows of a product
_WARPS = row_ops.WARPS
_ROWS = _WARPS * _MAX_HEADS
_STEP = _WARPS * PAGE  # keys per step
_COLUMNS, _FEATURES = 8, 64  # per thread block of the combining kernel
_MAX_SPLITS = 64  # parts per list
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


def heads_of_unit(num_heads: int, kv_heads: int, num_lists: int) -> int:
    """Returns the query heads per unit, which share a list and a key/value head; at most 16."""
    group = num_heads // max(num_lists, kv_heads)
    return max(x for x in range(1, _MAX_HEADS + 1) if group % x == 0)


def num_splits(units: int, list_blocks: int, block_size: int, *, programs: int) -> int:
    """Chooses the number of parts per list: the fewest that keep all multiprocessors busy.

    Args:
      units: Units in all sequences.
      list_blocks: Capacity of a list.
      block_size: Tokens per block.
      programs: Thread blocks that the GPU runs at a time.

    Returns:
      A number from 1 to 64.
    """
    steps = -(-list_blocks * block_size // max(_STEP, block_size))

    def time(splits: int) -> tuple[int, int]:  # in steps, with the costs of launching and combining
        waves = -(-units * splits // programs)
        return waves * (-(-steps // splits) + 3) + (2 if splits > 1 else 0), splits

    return min(range(1, min(steps, _MAX_SPLITS) + 1), key=time)


def _step_bytes(head_dim: int) -> int:
    """Bytes of keys and values per step."""
    return _STEP * 2 * head_dim * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """Static parameters of a call.

    Attributes:
      batch: Sequences.
      units: Groups of heads that share a list and a key/value head, in each sequence.
      group: Query heads of a unit.
      kv_heads: Key/value heads.
      num_lists: Lists per sequence: 1, or one for each key/value or query head.
      head_dim: Features per head, 64 or 128.
      num_blocks: Blocks per sequence in the cache.
      entry: Pages per block.
      stages: Steps in shared memory at a time.
      splits: Parts per list.
      dtype: Type of queries, keys, values and output.
      exponent: Factor of the scores in base 2.
      return_lse: Whether to return the log-sum-exp.
    """

    batch: int
    units: int
    group: int
    kv_heads: int
    num_lists: int
    head_dim: int
    num_blocks: int
    entry: int
    stages: int
    splits: int
    dtype: Any
    exponent: float
    return_lse: bool

    @classmethod
    def of(
        cls,
        query: Any,
        key: Any,
        ids: Any,
        *,
        scale: float,
        block_size: int,
        return_lse: bool,
    ) -> "_Tiling":
        """Returns the tiling for a call with these arrays."""
        batch, _, num_heads, head_dim = query.shape
        key_tokens, kv_heads = key.shape[2:4]
        num_lists, list_blocks = ids.shape[1], ids.shape[-1]
        group = heads_of_unit(num_heads, kv_heads, num_lists)
        units = num_heads // group
        programs, stages = sizes(head_dim, shared_memory())
        programs *= num_multiprocessors()
        splits = num_splits(batch * units, list_blocks, block_size, programs=programs)
        steps = -(-list_blocks * block_size // (_STEP * splits))
        return cls(
            batch=batch,
            units=units,
            group=group,
            kv_heads=kv_heads,
            num_lists=num_lists,
            head_dim=head_dim,
            num_blocks=key_tokens // block_size,
            entry=block_size // PAGE,
            stages=max(2, min(stages, steps + 1)),
            splits=splits,
            dtype=query.dtype,
            exponent=scale * math.log2(math.e),
            return_lse=return_lse,
        )

    @property
    def places(self) -> int:
        """Number of units in all sequences."""
        return self.batch * self.units

    @property
    def columns(self) -> int:
        """Heads per unit, padded to a multiple of the combining kernel's 8."""
        return -(-self.group // _COLUMNS) * _COLUMNS

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the output and, if requested, the log-sum-exp."""
        out = [jax.ShapeDtypeStruct((self.places * self.group, self.head_dim), self.dtype)]
        lse = jax.ShapeDtypeStruct((self.places, self.columns), jnp.float32)
        return [*out, lse] if self.return_lse else out

    @property
    def parts(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of each part's sums, and of their running maxima and denominators."""
        shape = (self.splits, self.places)
        return [
            jax.ShapeDtypeStruct((*shape, self.head_dim, self.columns), jnp.float32),
            jax.ShapeDtypeStruct((*shape, 2, self.columns), jnp.float32),
        ]

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory of a thread block: keys, values, and one number per row."""
        slots = (self.stages, _STEP, self.head_dim)
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


def add_parts(
    parts: Any, statistics: Any, place: Any, rows: Any, columns: Any, start: Any, count: int
) -> tuple[Float[Array, "64 8"], Float[Array, "8"], Float[Array, "8"]]:
    """Returns `Oᵀ`, denominator and running maximum of some parts, for 8 heads of one unit.

    Args:
      parts: Sums of each part, `[splits, places, features, heads]`.
      statistics: Running maxima and denominators of the sums, `[splits, places, 2, heads]`.
      place: Index of the unit among those of all sequences.
      rows: Slice of 64 features.
      columns: Slice of 8 heads.
      start: Index of the first part.
      count: Number of parts.
    """
    splits = pl.ds(start, count)

    def by_head(index: int) -> list[Array]:
        found = statistics.at[splits, place, index, columns]
        shape, firsts = found.shape[1:], [(split, 0) for split in range(count)]
        return ops.read_several(found, ops.BY_COLUMN, shape, firsts)

    maxima, totals = by_head(0), by_head(1)
    maximum = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp2(x - maximum) for x in maxima]
    total = functools.reduce(jnp.add, map(operator.mul, totals, weights))
    found = parts.at[splits, place, rows, columns]
    shape, firsts = found.shape[1:], [(split, 0, 0) for split in range(count)]
    o = ops.read_several(found, ops.ACCUMULATOR, shape, firsts)
    o = [part * along_keys(weight, shape) for part, weight in zip(o, weights, strict=True)]
    return functools.reduce(jnp.add, o), total, maximum


def finish(
    o: Float[Array, "H n"], total: Float[Array, "n"], maximum: Float[Array, "n"]
) -> tuple[Float[Array, "H n"], Float[Array, "n"]]:
    """Returns output and log-sum-exp of a finished sum; 0 and -inf if no key was added."""
    is_empty = total == 0.0
    safe = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, (maximum + jnp.log2(safe)) / math.log2(math.e))
    return o * along_keys(1.0 / safe, o.shape), lse


def along_keys(x: Float[Array, "n"], shape: tuple[int, ...]) -> Float[Array, "m n"]:
    """Repeats a row of one number per head."""
    return ops.spread(x, shape, 1)


def _combine_parts(parts: Any, statistics: Any, out: Any, *lse_out: Any, tiling: _Tiling) -> None:
    """Adds the parts of 8 heads of one unit in order, for one tile of features."""
    place, chunk = jax.lax.axis_index("unit"), jax.lax.axis_index("chunk")
    first = jax.lax.axis_index("heads") * _COLUMNS
    columns, rows = pl.ds(first, _COLUMNS), pl.ds(chunk * _FEATURES, _FEATURES)
    add = functools.partial(add_parts, parts, statistics, place, rows, columns)
    first_parts = (tiling.splits - 1) % _PARTS + 1

    def add_more(index: Any, sums: Any) -> Any:
        start = first_parts + index * _PARTS
        (o, total, maximum), more = sums, add(start, _PARTS)
        largest = jnp.maximum(maximum, more[2])
        own, its = (jnp.exp2(x - largest) for x in (maximum, more[2]))
        o = o * along_keys(own, o.shape) + more[0] * along_keys(its, o.shape)
        return o, total * own + more[1] * its, largest

    sums = add(0, first_parts)
    if tiling.splits > _PARTS:
        # Hide the count from the compiler: an unrolled loop would load more parts than registers
        # hold.
        rounds = mma_sync.unknown((tiling.splits - 1) // _PARTS)
        sums = jax.lax.fori_loop(0, rounds, add_more, sums)
    o, lse = finish(*sums)
    if lse_out:

        @pl.when(chunk == 0)
        def _() -> None:
            ops.write_global(lse_out[0].at[place, columns], lse, ops.BY_COLUMN)

    target = out.at[pl.ds(place * tiling.group, tiling.group), rows]
    mma_sync.write_columns(o, target, first)


def _log2(x: int) -> int:
    return x.bit_length() - 1


def decode_attention_kernel(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M 1 P"],
    counts: Int[Array, "B M 1"],
    *,
    layer: Int[Array, ""] | int,
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    return_lse: bool = False,
    kernel_config: KernelConfig | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"] | None]:
    """Computes exact attention of one token per sequence over its listed blocks.

    It runs on any NVIDIA GPU of compute capability 8.0 or higher.

    Args:
      query: The current token's queries, bfloat16 or float16, with a head_dim of 64 or 128.
      key: Stacked cache of keys, the current token's included; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Block indices in any order, for all heads (`M = 1`), each key/value head or each query
        head.
      counts: Number of indices in each list; later entries of `ids` are never read.
      layer: Layer of the cache, which is read in place.
      kv_lengths: Number of keys in each sequence; the cache may hold anything after them.
      scale: Factor of the scores.
      block_size: Tokens per block: 64, 128, or the 16 of a page.
      return_lse: Whether to return the log-sum-exp of the scaled scores.
      kernel_config: Tile sizes; they change the result only by rounding. A step has 64 keys.

    Returns:
      The output in query's dtype, and with `return_lse` the float32 log-sum-exp `[B, 1, N]`, else
      `None`.

    Raises:
      ValueError: If the kernel does not support these arguments.
      NotImplementedError: If a derivative is taken.
    """
    kernel_config = default_kernel_config() if kernel_config is None else kernel_config
    if reason := why_not_shape(query, block_size=block_size):
        raise ValueError(f"query and block_size must fit the kernel: {reason}")
    batch, _, num_heads, head_dim = query.shape
    tiling = _Tiling.of(
        query,
        key,
        ids,
        scale=scale,
        block_size=block_size,
        return_lse=return_lse,
    )
    make_kernel = functools.partial(
        ops.kernel,
        # Reductions across warps and their barriers are explicit in this module.
        compiler_params=ops.compiler_params(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=kernel_config.interpret,
    )
    attend = make_kernel(
        functools.partial(_attend_to_part, tiling=tiling),
        out_type=tiling.parts if tiling.splits > 1 else tiling.outputs,
        grid=(batch, tiling.splits, tiling.units),
        grid_names=("batch", "split", "unit"),  # the last varies fastest
        scratch_types=tiling.scratch,
        kernel_name="block_sparse_decode",
    )
    outputs = without_derivative(attend)(
        query.reshape(-1, head_dim),
        key,
        value,
        ids[:, :, 0],
        counts[:, :, 0],
        jnp.asarray(layer, jnp.int32).reshape(1),
        kv_lengths.astype(jnp.int32),
    )
    if tiling.splits > 1:
        combine = make_kernel(
            functools.partial(_combine_parts, tiling=tiling),
            out_type=tiling.outputs,
            grid=(tiling.places, tiling.columns // _COLUMNS, head_dim // _FEATURES),
            grid_names=("unit", "heads", "chunk"),
            kernel_name="combine_decode",
        )
        outputs = combine(*outputs)
    out = outputs[0].reshape(batch, 1, num_heads, head_dim)
    if not return_lse:
        return out, None
    lse = outputs[1].reshape(batch, tiling.units, -1)[:, :, : tiling.group]
    return out, lse.reshape(batch, 1, num_heads)
