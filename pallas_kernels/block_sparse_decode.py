"""Attention of one token per sequence over its key blocks, on Hopper: `softmax(scale q Kᵀ) V`.

Step 7 of Algorithm 2. A unit is the query heads that share a list and a key/value head. The grid
has a program for every sequence, unit and part (split) of a list: at batch 1 there are fewer units
than multiprocessors, so lists are split, and a second small kernel adds the parts in a fixed order;
one part alone needs none. Operands are swapped, so that keys and features, of which there are many,
fill the 64 rows of a matrix instruction, and heads, of which there are few, its 8 columns:

    Sᵀ = K Qᵀ                                   [keys, heads]
    m' = max(m, Sᵀ over keys),  P = 2^(Sᵀ - m')  scores in base 2
    Oᵀ = Oᵀ 2^(m - m') + Vᵀ P                   [features, heads]

Registers hold the scores of one step and the sums `Oᵀ`; shared memory the queries, the weights `P`
and several stages of keys and values, a step of `decode_keys` keys each, which arrive by
asynchronous copies. A token reads every listed key and value once for each unit: 4 H bytes a key.

One warpgroup does everything, so that a stage needs one barrier for its keys and one for its
values: they tell that copies have arrived. A step's stage is refilled in the next step, behind a
point that no thread passes before all have left the step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import ops
from sketchwalk_jax.pallas_kernels.config import (
    KernelConfig,
    num_multiprocessors,
    without_derivative,
)
from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE

_ROWS = 64  # of a matrix instruction
_COLUMNS = 8  # the fewest of a matrix instruction
_MAX_HEADS = 32  # of a program, so that registers suffice
_MAX_SPLITS = 64
_FEW_SPLITS = 4
_SHARED_BYTES = 220 * 1024  # of 227 KiB; barriers and reductions take some
_LOG2_E = math.log2(math.e)


# Planning


def heads_of_unit(num_heads: int, kv_heads: int, num_lists: int, *, most: int) -> int:
    """Query heads that share a list and a key/value head, as many as one program takes."""
    group = num_heads // max(num_lists, kv_heads)
    return max(x for x in range(1, most + 1) if group % x == 0)


def num_splits(units: int, list_blocks: int, block_size: int, kernel_config: KernelConfig) -> int:
    """Parts into which lists are split: those that keep all multiprocessors busy, and no more.

    Args:
      units: Lists times key/value heads to attend with, in all sequences.
      list_blocks: Capacity of a list.
      block_size: Tokens per block.
      kernel_config: Tile sizes.

    Returns:
      A number from 1 to 64.
    """
    steps = -(-list_blocks * block_size // max(kernel_config.decode_keys, block_size))
    if kernel_config.decode_splits is not None:
        return min(kernel_config.decode_splits, steps, _MAX_SPLITS)
    programs = kernel_config.decode_programs or num_multiprocessors()

    def time(splits: int) -> tuple[int, int]:  # in steps; starting and combining cost some
        waves = -(-units * splits // programs)
        return waves * (-(-steps // splits) + 3) + (2 if splits > 1 else 0), splits

    return min(range(1, min(steps, _MAX_SPLITS) + 1), key=time)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """Everything static about a call.

    Attributes:
      batch: Sequences.
      units: Groups of heads that share a list and a key/value head, in each sequence.
      group: Query heads of a unit.
      kv_heads: Key/value heads.
      num_lists: Lists per sequence: 1, or one for each key/value or query head.
      head_dim: Features, with the padding that matrix instructions need.
      key_tokens: Keys of a sequence that the cache holds.
      block_size: Tokens per block.
      step_keys: Keys of one step.
      stages: Steps that are in shared memory at a time.
      splits: Parts of a list.
      dtype: Type of queries, keys, values and output.
      scale: Factor of the scores.
      overlap: Whether the kernel that combines starts before the parts are done, and waits.
      return_lse: Whether the log-sum-exp is wanted.
      interpret: Whether the interpreter runs the kernels.
    """

    batch: int
    units: int
    group: int
    kv_heads: int
    num_lists: int
    head_dim: int
    key_tokens: int
    block_size: int
    step_keys: int
    stages: int
    splits: int
    dtype: Any
    scale: float
    overlap: bool
    return_lse: bool
    interpret: bool

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
        kernel_config: KernelConfig,
    ) -> "_Tiling":
        """That of a call with these arrays."""
        batch, _, num_heads, head_dim = query.shape
        key_tokens, kv_heads = key.shape[2:4]
        num_lists, list_blocks = ids.shape[1], ids.shape[-1]
        head_dim += max(_ROWS - head_dim, -head_dim % 16)
        group = heads_of_unit(num_heads, kv_heads, num_lists, most=_MAX_HEADS)
        units = num_heads // group
        step_keys = max(kernel_config.decode_keys, block_size)
        splits = num_splits(batch * units, list_blocks, block_size, kernel_config)
        # beside keys and values: queries, twice, and weights, whose heads are padded to 8
        other_bytes = (group + 7) * (2 * 2 * _ROWS + step_keys) * query.dtype.itemsize
        is_brief = splits > _FEW_SPLITS  # latency rules, not bandwidth
        buffer_kib = kernel_config.decode_buffer_kib or (96 if is_brief else 192)
        buffer_bytes = min(buffer_kib * 1024, _SHARED_BYTES - other_bytes)
        stage_bytes = step_keys * 2 * head_dim * query.dtype.itemsize
        steps = -(-list_blocks * block_size // (step_keys * splits))
        overlap = is_brief if kernel_config.decode_overlap is None else kernel_config.decode_overlap
        return cls(
            batch=batch,
            units=units,
            group=group,
            kv_heads=kv_heads,
            num_lists=num_lists,
            head_dim=head_dim,
            key_tokens=key_tokens,
            block_size=block_size,
            step_keys=step_keys,
            stages=max(2, min(buffer_bytes // stage_bytes, steps + 1)),
            splits=splits,
            dtype=query.dtype,
            scale=scale,
            overlap=overlap and splits > 1 and not kernel_config.interpret,
            return_lse=return_lse,
            interpret=kernel_config.interpret,
        )

    @property
    def places(self) -> int:
        """Units of all sequences."""
        return self.batch * self.units

    @property
    def columns(self) -> int:
        """Heads of a unit, padded to what a matrix instruction takes."""
        return -(-self.group // _COLUMNS) * _COLUMNS

    @property
    def chunks(self) -> tuple[int, ...]:
        """Where the tiles of 64 features begin that together cover all; the last reaches back."""
        return (0,) if self.head_dim == _ROWS else (0, self.head_dim - _ROWS)

    @property
    def features(self) -> int:
        """Features of all chunks, one after the other."""
        return len(self.chunks) * _ROWS

    @property
    def swizzle(self) -> int:
        """Bytes of the pattern of shared memory; a tile of it must divide the features."""
        return next(x for x in (128, 64, 32) if self.head_dim * 2 % x == 0)

    @property
    def step_blocks(self) -> int:
        """Blocks of one step."""
        return self.step_keys // self.block_size

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """The output, and the log-sum-exp where it is wanted."""
        heads = self.places * self.group
        out = [jax.ShapeDtypeStruct((heads, self.features), self.dtype)]
        lse = jax.ShapeDtypeStruct((self.places, self.columns), jnp.float32)
        return [*out, lse] if self.return_lse else out

    @property
    def parts(self) -> list[jax.ShapeDtypeStruct]:
        """The sums of each part, and their running maxima and denominators."""
        shape = (self.splits, self.places)
        return [
            jax.ShapeDtypeStruct((*shape, self.features, self.columns), jnp.float32),
            jax.ShapeDtypeStruct((*shape, 2, self.columns), jnp.float32),
        ]


# One part of a list


class _Scratch(NamedTuple):
    """Shared memory of a program, and barriers: their types, and in the kernel references to them.

    Attributes:
      rows: Queries as they come, `[heads, features]`, and at the end the output.
      queries: Queries for matrix instructions, `[heads, features]`.
      keys: Steps of keys, `[stages, step_keys, H]`.
      values: Steps of values.
      weights: Those of one step, `[heads, step_keys]`.
      rows_arrived: Tells that the queries have arrived.
      keys_arrived: The same of the keys of each stage.
      values_arrived: The same of its values.
    """

    rows: Any
    queries: Any
    keys: Any
    values: Any
    weights: Any
    rows_arrived: Any
    keys_arrived: Any
    values_arrived: Any

    @classmethod
    def of(cls, tiling: _Tiling) -> "_Scratch":
        """The types."""
        tiled = functools.partial(ops.tiled, dtype=tiling.dtype, swizzle=tiling.swizzle)
        stages = (tiling.stages, tiling.step_keys, tiling.head_dim)
        blocks_arrived = plgpu.Barrier(num_arrivals=tiling.step_blocks, num_barriers=tiling.stages)
        return cls(
            rows=plgpu.SMEM((tiling.columns, tiling.features), tiling.dtype),
            queries=tiled((tiling.columns, tiling.features)),
            keys=tiled(stages),
            values=tiled(stages),
            weights=tiled((tiling.columns, tiling.step_keys)),
            rows_arrived=plgpu.Barrier(num_arrivals=1, num_barriers=1),
            keys_arrived=blocks_arrived,
            values_arrived=blocks_arrived,
        )


class _Sums(NamedTuple):
    """What a part has come to so far.

    Attributes:
      maximum: Largest score of each head, in base 2.
      total: Weights of each key of a step and head; their sum over keys is the denominator.
      o: `Oᵀ`, in chunks of 64 features.
    """

    maximum: Float[Array, "n"]
    total: Float[Array, "step_keys n"]
    o: tuple[Float[Array, "64 n"], ...]

    @classmethod
    def zero(cls, tiling: _Tiling) -> "_Sums":
        """Of no keys."""
        first = ops.full((tiling.columns,), FIRST_MAXIMUM, ops.BY_COLUMN)
        total = ops.full((tiling.step_keys, tiling.columns), 0.0)
        return cls(
            first, total, tuple(ops.full((_ROWS, tiling.columns), 0.0) for _ in tiling.chunks)
        )


@dataclasses.dataclass(frozen=True)
class _List:
    """The list of one unit, as the program reads it.

    Attributes:
      tiling: The call's.
      ids: All lists `[B, M, P]`.
      batch: Sequence.
      row: Which of its lists.
      count: Blocks in it.
      length: Keys in the sequence.
    """

    tiling: _Tiling
    ids: Any
    batch: Any
    row: Any
    count: Any
    length: Any

    @property
    def num_steps(self) -> Any:
        """Steps that it takes."""
        return (self.count + self.tiling.step_blocks - 1) // self.tiling.step_blocks

    def block(self, step: Any, index: int) -> Any:
        """The key block in a place of a step."""
        last = jnp.maximum(self.count - 1, 0)  # what pads the last step is read, and masked
        place = jnp.minimum(step * self.tiling.step_blocks + index, last)
        found = self.ids[self.batch, self.row, place]
        return jnp.clip(found, 0, self.tiling.key_tokens // self.tiling.block_size - 1)

    def visible(self, step: Any) -> list[Any]:
        """For each block of a step, its keys that count."""
        size, blocks = self.tiling.block_size, self.tiling.step_blocks
        return [
            jnp.where(
                step * blocks + index < self.count, self.length - self.block(step, index) * size, 0
            )
            for index in range(blocks)
        ]


def _attend_to_part(
    query: Any,
    key: Any,
    value: Any,
    ids: Any,
    counts: Any,
    layer: Any,
    kv_lengths: Any,
    out: Any,
    *rest: Any,
    tiling: _Tiling,
) -> None:
    """One part of one unit's list: the loop over its steps; see the module's docstring.

    As many steps as there are stages are on their way before the first one; from then on, step `t`
    refills the stage of step `t - 1` with the step that comes `stages` later.
    """
    *statistics, scratch = rest  # log-sum-exp, or the part's; none where nobody wants it
    batch = jax.lax.axis_index("batch")
    split = jax.lax.axis_index("split")
    unit = jax.lax.axis_index("unit")
    place = batch * tiling.units + unit
    head = unit // (tiling.units // tiling.kv_heads)
    row = unit // (tiling.units // tiling.num_lists)
    heads, own_heads = pl.ds(place * tiling.group, tiling.group), pl.ds(0, tiling.group)
    if tiling.overlap:
        plgpu.griddepcontrol_launch_dependents()
    plgpu.copy_gmem_to_smem(query.at[heads], scratch.rows.at[own_heads], scratch.rows_arrived.at[0])
    blocks = _List(tiling, ids, batch, row, counts[batch, row], kv_lengths[batch])
    first_row = (layer[0] * tiling.batch + batch) * tiling.key_tokens
    start = split * blocks.num_steps // tiling.splits
    stop = (split + 1) * blocks.num_steps // tiling.splits

    def fetch(step: Any, slot: Any) -> None:
        """Starts the copies of a step's keys and values to a stage."""
        size = tiling.block_size
        for index in range(tiling.step_blocks):
            source = (pl.ds(first_row + blocks.block(step, index) * size, size), head)
            target = (slot, pl.ds(index * size, size))
            plgpu.copy_gmem_to_smem(
                key.at[source], scratch.keys.at[target], scratch.keys_arrived.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                value.at[source], scratch.values.at[target], scratch.values_arrived.at[slot]
            )

    for ahead in range(tiling.stages):
        pl.when(start + ahead < stop)(functools.partial(fetch, start + ahead, ahead))

    plgpu.barrier_wait(scratch.rows_arrived.at[0])
    _store_transposed(scratch.queries, ops.read(scratch.rows.transpose((1, 0))), is_swizzled=True)
    plgpu.commit_smem()

    offset = ops.matrix_index((tiling.step_keys, tiling.columns), 0)

    def step(index: Any, sums: _Sums) -> _Sums:
        slot = jax.lax.rem(index - start, tiling.stages)

        def fetch_next() -> None:
            """Copies into the stage of the step before, which everyone has left."""

            @pl.when((index > start) & (index - 1 + tiling.stages < stop))
            def _() -> None:
                fetch(index - 1 + tiling.stages, jax.lax.rem(index - 1 - start, tiling.stages))

        return _add_step(tiling, scratch, slot, offset, blocks.visible(index), sums, fetch_next)

    sums = jax.lax.fori_loop(start, stop, step, _Sums.zero(tiling))
    if tiling.splits > 1:
        _write_part(out.at[split, place], statistics[0].at[split, place], sums)
        return
    lse = _write_output(scratch.rows, sums)
    if statistics:
        ops.write(statistics[0].at[place], lse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.rows.at[own_heads], out.at[heads])
    plgpu.wait_smem_to_gmem(0)


def _write_part(out: Any, statistics: Any, sums: _Sums) -> None:
    """Writes what a part has come to, for the kernel that combines."""
    total = jnp.sum(sums.total, axis=0)
    for index, x in enumerate(sums.o):
        ops.write(out.at[pl.ds(index * _ROWS, _ROWS)], x)
    ops.write(statistics.at[0], sums.maximum)
    ops.write(statistics.at[1], total)


def _write_output(rows: Any, sums: _Sums) -> Array:
    """Writes the output of a list in one part to shared memory; returns its log-sum-exp."""
    total = jnp.sum(sums.total, axis=0)
    for index, x in enumerate(sums.o):
        x, lse = finish(x, total, sums.maximum)
        _store_transposed(rows.at[:, pl.ds(index * _ROWS, _ROWS)], x)
    return lse


def _add_step(
    tiling: _Tiling,
    scratch: _Scratch,
    slot: Any,
    offset: Array,
    visible: list[Any],
    sums: _Sums,
    fetch_next: Callable[[], None],
) -> _Sums:
    """One step of keys and values: scores, weights, and their product with the values.

    Args:
      tiling: The call's.
      scratch: Shared memory.
      slot: Stage of the step's keys and values.
      offset: Which key of the step each row of the scores is.
      visible: Keys that count, of each block.
      sums: Of the steps before.
      fetch_next: Refills the stage of the step before; called once everyone has left that step.

    Returns:
      The sums with this step's.
    """
    plgpu.barrier_wait(scratch.keys_arrived.at[slot])
    s = _multiply_keys(tiling, scratch, slot)
    s = _hide(s, offset, visible, tiling.block_size, MASK_VALUE)
    maximum = jnp.maximum(sums.maximum, jnp.max(s, axis=0))
    p = jnp.exp2(s - along_keys(maximum, s.shape))
    decay = jnp.exp2(sums.maximum - maximum)
    total = sums.total * along_keys(decay, s.shape) + p
    _store_transposed(scratch.weights, p, is_swizzled=True)
    plgpu.barrier_wait(scratch.values_arrived.at[slot])

    @pl.when(functools.reduce(jnp.minimum, visible) < tiling.block_size)
    def _() -> None:
        # Slots that hold no token may hold anything, NaN included; weight 0 would not erase it.
        for first in range(0, tiling.step_keys, _ROWS):
            values = scratch.values.at[slot, pl.ds(first, _ROWS)]
            places = ops.matrix_index((_ROWS, tiling.head_dim), 0) + first
            x = plgpu.load(values, layout=ops.ACCUMULATOR)
            values[...] = _hide(x, places, visible, tiling.block_size, 0.0)

    plgpu.commit_smem()  # also: everyone has left the previous step
    updates = _multiply_values(tiling, scratch, slot, fetch_next)
    decay = along_keys(decay, updates[0].shape)
    o = tuple(x * decay + update for x, update in zip(sums.o, updates, strict=True))
    return _Sums(maximum, total, o)


def _multiply_keys(tiling: _Tiling, scratch: _Scratch, slot: Any) -> Array:
    """`Sᵀ = K Qᵀ`, in base 2."""

    def multiply(acc: Any) -> Array:
        queries = scratch.queries.at[:, pl.ds(0, tiling.head_dim)].transpose((1, 0))
        plgpu.wgmma(acc, scratch.keys.at[slot], queries)
        return acc[...]

    s = pl.run_scoped(multiply, plgpu.ACC((tiling.step_keys, tiling.columns)))
    return s * (tiling.scale * _LOG2_E)


def _multiply_values(
    tiling: _Tiling, scratch: _Scratch, slot: Any, meanwhile: Callable[[], None]
) -> tuple[Array, ...]:
    """`Vᵀ P`, in chunks of 64 features; `meanwhile` is called while it is computed."""

    def multiply(*accumulators: Any) -> tuple[Array, ...]:
        for acc, first in zip(accumulators, tiling.chunks, strict=True):
            values = scratch.values.at[slot, :, pl.ds(first, _ROWS)].transpose((1, 0))
            plgpu.wgmma(acc, values, scratch.weights.transpose((1, 0)))
        meanwhile()
        return tuple(acc[...] for acc in accumulators)

    accumulators = [plgpu.ACC((_ROWS, tiling.columns)) for _ in tiling.chunks]
    return pl.run_scoped(multiply, *accumulators)


def _hide(x: Array, offset: Array, visible: list[Any], size: int, fill: float) -> Array:
    """Fills the rows of keys that do not count; `offset` says which keys of the step they are."""
    if len(visible) == 1:
        return jnp.where(offset < visible[0], x, jnp.asarray(fill, x.dtype))
    for index, limit in enumerate(visible):
        first = index * size
        hidden = (offset >= first + limit) & (offset >= first) & (offset < first + size)
        x = jnp.where(hidden, jnp.asarray(fill, x.dtype), x)
    return x


def along_keys(x: Float[Array, "n"], shape: tuple[int, ...]) -> Float[Array, "m n"]:
    """Repeats a row: one number for each head."""
    return ops.spread(x, shape, 1)


def _store_transposed(ref: Any, x: Float[Array, "m n"], *, is_swizzled: bool = False) -> None:
    """Writes `xᵀ` to shared memory, for matrix instructions and copies to read."""
    x = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    ops.write(ref.transpose((1, 0)), x, optimized=is_swizzled)


def finish(
    o: Float[Array, "H n"], total: Float[Array, "n"], maximum: Float[Array, "n"]
) -> tuple[Float[Array, "H n"], Float[Array, "n"]]:
    """The output and the log-sum-exp of a finished sum; 0 and -inf where nothing was summed."""
    is_empty = total == 0.0
    safe = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, (maximum + jnp.log2(safe)) / _LOG2_E)
    return o * along_keys(1.0 / safe, o.shape), lse


# All parts of a list


def add_parts(
    parts: Any, statistics: Any, place: Any, rows: Any, columns: Any, splits: Sequence[Any]
) -> tuple[Float[Array, "64 8"], Float[Array, "8"], Float[Array, "8"]]:
    """`Oᵀ`, the denominator and the running maximum of some parts of 8 heads of one unit.

    Args:
      parts: Sums of each part, `[splits, places, features, heads]`.
      statistics: Their running maxima and denominators, `[splits, places, 2, heads]`.
      place: Which unit of which sequence.
      rows: Which 64 features.
      columns: Which heads.
      splits: Which parts, in order.
    """

    def by_head(split: Any, index: int) -> Array:
        return ops.read(statistics.at[split, place, index, columns], ops.BY_COLUMN)

    maxima = [by_head(split, 0) for split in splits]
    maximum = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp2(x - maximum) for x in maxima]
    totals = [by_head(split, 1) * weight for split, weight in zip(splits, weights, strict=True)]
    total = functools.reduce(jnp.add, totals)

    def weighted(split: Any, weight: Array) -> Array:
        part = ops.read(parts.at[split, place, rows, columns])
        return part * along_keys(weight, part.shape)

    o = [weighted(split, weight) for split, weight in zip(splits, weights, strict=True)]
    return functools.reduce(jnp.add, o), total, maximum


def _combine_parts(parts: Any, statistics: Any, out: Any, *rest: Any, tiling: _Tiling) -> None:
    """Adds the parts of 8 heads of one unit, in order, for one tile of their features."""
    *lse_out, tile = rest
    if tiling.overlap:
        plgpu.griddepcontrol_wait()
    place, chunk = jax.lax.axis_index("unit"), jax.lax.axis_index("chunk")
    first = jax.lax.axis_index("heads") * _COLUMNS
    columns, rows = pl.ds(first, _COLUMNS), pl.ds(chunk * _ROWS, _ROWS)
    o, lse = finish(*add_parts(parts, statistics, place, rows, columns, range(tiling.splits)))
    if lse_out:

        @pl.when(chunk == 0)
        def _() -> None:
            ops.write(lse_out[0].at[place, columns], lse)

    _store_transposed(tile, o)
    plgpu.commit_smem()

    def write(heads: int) -> None:
        target = out.at[pl.ds(place * tiling.group + first, heads), rows]
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, heads)], target)

    whole, remaining = divmod(tiling.group, _COLUMNS)
    if whole:
        pl.when(first < whole * _COLUMNS)(lambda: write(_COLUMNS))
    if remaining:
        pl.when(first == whole * _COLUMNS)(lambda: write(remaining))
    plgpu.wait_smem_to_gmem(0)


def block_sparse_decode_kernel(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M 1 P"],
    counts: Int[Array, "B M 1"],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    return_lse: bool = False,
    kernel_config: KernelConfig | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"] | None]:
    """Exact attention of one token per sequence over its listed blocks.

    Args:
      query: The current token's queries, bfloat16 or float16.
      key: Stacked cache of keys, the current token's included; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Key blocks of each list, in any order.
      counts: Blocks in each list.
      layer: Layer of the cache; it is not sliced.
      kv_lengths: Keys present in each sequence.
      scale: Factor of the scores.
      block_size: Tokens per block, a multiple of 8.
      return_lse: Whether to return the log-sum-exp of the scaled scores.
      kernel_config: Tile sizes.

    Returns:
      The output in query's dtype, and with `return_lse` the float32 log-sum-exp `[B, 1, N]`, else
      `None`.

    Raises:
      NotImplementedError: If a derivative is taken.
    """
    tiling = _Tiling.of(
        query,
        key,
        ids,
        scale=scale,
        block_size=block_size,
        return_lse=return_lse,
        kernel_config=kernel_config or KernelConfig(),
    )
    batch, _, num_heads, head_dim = query.shape
    if padding := tiling.head_dim - head_dim:  # for completeness: copies whole caches
        key, value = _pad_features(key, padding), _pad_features(value, padding)
    cache = (-1, tiling.kv_heads, tiling.head_dim)
    make_kernel = functools.partial(
        ops.kernel,
        compiler_params=ops.compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(tiling.interpret),
    )
    attend = make_kernel(
        functools.partial(_attend_to_part, tiling=tiling),
        out_type=tiling.parts if tiling.splits > 1 else tiling.outputs,
        grid=(batch, tiling.splits, tiling.units),
        grid_names=("batch", "split", "unit"),  # the last varies fastest
        scratch_types=[_Scratch.of(tiling)],
        kernel_name="block_sparse_decode",
    )
    outputs = without_derivative(attend)(
        _pad_features(query, tiling.features - head_dim).reshape(-1, tiling.features),
        key.reshape(cache),
        value.reshape(cache),
        ids[:, :, 0],
        counts[:, :, 0],
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        kv_lengths.astype(jnp.int32),
    )
    if tiling.splits > 1:
        combine = make_kernel(
            functools.partial(_combine_parts, tiling=tiling),
            out_type=tiling.outputs,
            grid=(tiling.places, tiling.columns // _COLUMNS, tiling.features // _ROWS),
            grid_names=("unit", "heads", "chunk"),
            scratch_types=[plgpu.SMEM((_COLUMNS, _ROWS), tiling.dtype)],
            kernel_name="combine_decode",
        )
        outputs = combine(*outputs)
    out = outputs[0].reshape(batch, 1, num_heads, tiling.features)
    if tiling.features > tiling.head_dim:  # the chunks overlap
        rest = out[..., tiling.features - (tiling.head_dim - _ROWS) :]
        out = jnp.concatenate([out[..., :_ROWS], rest], axis=-1)
    out = out[..., :head_dim]
    if not return_lse:
        return out, None
    lse = outputs[1].reshape(batch, tiling.units, -1)[:, :, : tiling.group]
    return out, lse.reshape(batch, 1, num_heads)


def _pad_features(x: Array, padding: int) -> Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),)) if padding else x
