"""Attention of one token per sequence over its key blocks, on Hopper: `softmax(scale q Kᵀ) V`.

The grid has a program for every sequence, unit and part of a list (`parts`). The operands are
swapped: keys and features, of which there are many, fill the 64 rows of a matrix instruction, and
heads, of which there are few, its columns, 8 at least:

    Sᵀ = K Qᵀ                                   [keys, heads]
    m' = max(m, Sᵀ over keys),  P = 2^(Sᵀ - m')  scores in base 2
    Oᵀ = Oᵀ 2^(m - m') + Vᵀ P                   [features, heads]

Registers hold the scores of one step and the sums `Oᵀ`. Shared memory holds the queries, the
weights `P` and several stages of keys and values, one step each, which asynchronous copies bring. A
token reads every listed key and value once for each unit: 4 H bytes a key.

One warpgroup does everything, so a stage needs one barrier for its keys and one for its values,
which tell that the copies have arrived. The next step refills a step's stage, after a point that no
thread passes before all threads have left the step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels.config import num_multiprocessors
from sketchwalk_jax.pallas_kernels.decode_attention.parts import (
    COLUMNS,
    STEP,
    Tiling,
    add_parts,
    along_keys,
    finish,
    num_splits,
    prepare,
)
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE

_ROWS = 64  # of a matrix instruction
_MAX_HEADS = 32  # of a program, so that registers suffice
_STEP = STEP  # a block of 128 is a step of its own
_FEW_SPLITS = 4
_SHARED_BYTES = 220 * 1024  # of 227 KiB; barriers and reductions take some
# Shared memory for keys and values. With many parts each is short, and latency rules.
_BUFFER_BYTES, _BRIEF_BUFFER_BYTES = 192 * 1024, 96 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling(Tiling):
    """Static sizes of a call; the head_dim has the padding that matrix instructions need.

    Attributes:
      key_tokens: Keys of a sequence that the cache holds.
      block_size: Tokens per block.
      step_keys: Keys of one step.
      overlap: Whether the kernel that combines starts before the parts are done, and waits.
    """

    key_tokens: int
    block_size: int
    step_keys: int
    overlap: bool

    most_heads = _MAX_HEADS

    @classmethod
    def of(
        cls, shape: dict[str, Any], query: Any, key: Any, ids: Any, block_size: int, interpret: bool
    ) -> Self:
        """Returns the tiling for a call with these arrays; `shape` has the first fields."""
        head_dim, list_blocks = query.shape[-1], ids.shape[-1]
        head_dim += max(_ROWS - head_dim, -head_dim % 16)
        step_keys = max(_STEP, block_size)
        units, programs = shape["batch"] * shape["units"], num_multiprocessors()
        splits = num_splits(units, list_blocks, block_size, programs=programs)
        # Queries take memory twice, and weights once; their heads are padded to 8.
        other_bytes = (shape["group"] + 7) * (2 * 2 * _ROWS + step_keys) * query.dtype.itemsize
        is_brief = splits > _FEW_SPLITS
        buffer_bytes = _BRIEF_BUFFER_BYTES if is_brief else _BUFFER_BYTES
        buffer_bytes = min(buffer_bytes, _SHARED_BYTES - other_bytes)
        stage_bytes = step_keys * 2 * head_dim * query.dtype.itemsize
        steps = -(-list_blocks * block_size // (step_keys * splits))
        return cls(
            **shape,
            head_dim=head_dim,
            key_tokens=key.shape[2],
            block_size=block_size,
            step_keys=step_keys,
            stages=max(2, min(buffer_bytes // stage_bytes, steps + 1)),
            splits=splits,
            overlap=is_brief and not interpret,
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Returns where the tiles of 64 features begin; the last one may overlap the first."""
        return (0,) if self.head_dim == _ROWS else (0, self.head_dim - _ROWS)

    @property
    def features(self) -> int:
        """Counts the features of all chunks."""
        return len(self.chunks) * _ROWS

    @property
    def swizzle(self) -> int:
        """Returns the bytes of a swizzled row of shared memory, which divide those of a head."""
        return next(x for x in (128, 64, 32) if self.head_dim * 2 % x == 0)

    @property
    def step_blocks(self) -> int:
        """Counts the blocks of one step."""
        return self.step_keys // self.block_size


# One part of a list


class _Scratch(NamedTuple):
    """Shared memory and barriers of a program: their types, or references to them in the kernel.

    Attributes:
      rows: Queries as they come, `[heads, features]`, and at the end the output.
      queries: Queries for matrix instructions, `[heads, features]`.
      keys: Steps of keys, `[stages, step_keys, H]`.
      values: Steps of values.
      weights: Softmax weights of one step, `[heads, step_keys]`.
      rows_arrived: Tells that the queries have arrived.
      keys_arrived: Tells that the keys of each stage have arrived.
      values_arrived: Tells that the values of each stage have arrived.
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
        """Returns the types."""
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
    """Sums over the steps of a part so far.

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
        """Returns the sums over no keys."""
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
      row: Index of the list among the sequence's.
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
        """Counts the steps of the list."""
        return (self.count + self.tiling.step_blocks - 1) // self.tiling.step_blocks

    def block(self, step: Any, index: int) -> Any:
        """Returns the key block at one index of a step."""
        last = jnp.maximum(self.count - 1, 0)  # the last step reads padding, and masks it
        place = jnp.minimum(step * self.tiling.step_blocks + index, last)
        found = self.ids[self.batch, self.row, place]
        return jnp.clip(found, 0, self.tiling.key_tokens // self.tiling.block_size - 1)

    def visible(self, step: Any) -> list[Any]:
        """Counts the visible keys of each block of a step."""
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
    """Attends to one part of one unit's list; see the module's docstring.

    Before the first step, copies for all stages are under way. Then step `t` refills the stage of
    step `t - 1` with the step that comes `stages` later.
    """
    *statistics, scratch = (
        rest  # the log-sum-exp if it is wanted, or the part's maxima and denominators
    )
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
            """Copies into the stage of the step before, which all threads have left."""

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
    """Writes the sums of a part, for the kernel that combines."""
    total = jnp.sum(sums.total, axis=0)
    for index, x in enumerate(sums.o):
        ops.write(out.at[pl.ds(index * _ROWS, _ROWS)], x)
    ops.write(statistics.at[0], sums.maximum)
    ops.write(statistics.at[1], total)


def _write_output(rows: Any, sums: _Sums) -> Array:
    """Writes the output of an unsplit list to shared memory; returns its log-sum-exp."""
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
    """Adds one step of keys and values: scores, weights, and their product with the values.

    Args:
      tiling: The call's.
      scratch: Shared memory.
      slot: Stage of the step's keys and values.
      offset: The key of the step that each row of the scores belongs to.
      visible: Number of visible keys of each block.
      sums: Sums over the steps before.
      fetch_next: Refills the stage of the step before; called once all threads have left it.

    Returns:
      The sums, this step's included.
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
        # Slots without a token may hold anything, NaN included; weight 0 would not erase it.
        for first in range(0, tiling.step_keys, _ROWS):
            values = scratch.values.at[slot, pl.ds(first, _ROWS)]
            places = ops.matrix_index((_ROWS, tiling.head_dim), 0) + first
            x = plgpu.load(values, layout=ops.ACCUMULATOR)
            values[...] = _hide(x, places, visible, tiling.block_size, 0.0)

    plgpu.commit_smem()  # also: all threads have left the previous step
    updates = _multiply_values(tiling, scratch, slot, fetch_next)
    decay = along_keys(decay, updates[0].shape)
    o = tuple(x * decay + update for x, update in zip(sums.o, updates, strict=True))
    return _Sums(maximum, total, o)


def _multiply_keys(tiling: _Tiling, scratch: _Scratch, slot: Any) -> Array:
    """Computes `Sᵀ = K Qᵀ`, in base 2."""

    def multiply(acc: Any) -> Array:
        queries = scratch.queries.at[:, pl.ds(0, tiling.head_dim)].transpose((1, 0))
        plgpu.wgmma(acc, scratch.keys.at[slot], queries)
        return acc[...]

    s = pl.run_scoped(multiply, plgpu.ACC((tiling.step_keys, tiling.columns)))
    return s * tiling.exponent


def _multiply_values(
    tiling: _Tiling, scratch: _Scratch, slot: Any, meanwhile: Callable[[], None]
) -> tuple[Array, ...]:
    """Computes `Vᵀ P`, in chunks of 64 features; calls `meanwhile` during the product."""

    def multiply(*accumulators: Any) -> tuple[Array, ...]:
        for acc, first in zip(accumulators, tiling.chunks, strict=True):
            values = scratch.values.at[slot, :, pl.ds(first, _ROWS)].transpose((1, 0))
            plgpu.wgmma(acc, values, scratch.weights.transpose((1, 0)))
        meanwhile()
        return tuple(acc[...] for acc in accumulators)

    accumulators = [plgpu.ACC((_ROWS, tiling.columns)) for _ in tiling.chunks]
    return pl.run_scoped(multiply, *accumulators)


def _hide(x: Array, offset: Array, visible: list[Any], size: int, fill: float) -> Array:
    """Fills the rows of hidden keys; `offset` is the key of the step that a row belongs to."""
    if len(visible) == 1:
        return jnp.where(offset < visible[0], x, jnp.asarray(fill, x.dtype))
    for index, limit in enumerate(visible):
        first = index * size
        hidden = (offset >= first + limit) & (offset >= first) & (offset < first + size)
        x = jnp.where(hidden, jnp.asarray(fill, x.dtype), x)
    return x


def _store_transposed(ref: Any, x: Float[Array, "m n"], *, is_swizzled: bool = False) -> None:
    """Writes `xᵀ` to shared memory, from which matrix instructions and copies read it."""
    x = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    ops.write(ref.transpose((1, 0)), x, optimized=is_swizzled)


# All parts of a list


def _combine_parts(parts: Any, statistics: Any, out: Any, *rest: Any, tiling: _Tiling) -> None:
    """Adds the parts of 8 heads of one unit, in order, for one tile of their features."""
    *lse_out, tile = rest
    if tiling.overlap:
        plgpu.griddepcontrol_wait()
    place, chunk = jax.lax.axis_index("unit"), jax.lax.axis_index("chunk")
    first = jax.lax.axis_index("heads") * COLUMNS
    columns, rows = pl.ds(first, COLUMNS), pl.ds(chunk * _ROWS, _ROWS)
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

    whole, remaining = divmod(tiling.group, COLUMNS)
    if whole:
        pl.when(first < whole * COLUMNS)(lambda: write(COLUMNS))
    if remaining:
        pl.when(first == whole * COLUMNS)(lambda: write(remaining))
    plgpu.wait_smem_to_gmem(0)


def _pad_features(x: Array, padding: int) -> Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),)) if padding else x


def hopper_decode_attention_kernel(
    query: Array, key: Array, value: Array, *lists: Any, **options: Any
) -> tuple[Array, Array | None]:
    """Computes a token's attention on Hopper; the arguments are those of `parts.prepare`.

    It takes heads of any multiple of 8 features up to 128. With fewer than 64 features, or no
    multiple of 16, it copies the whole cache.
    """
    tiling, rest, interpret = prepare(_Tiling, query, key, value, *lists, **options)
    head_dim, cache = query.shape[-1], (-1, tiling.kv_heads, tiling.head_dim)
    keys, values = (_pad_features(x, tiling.head_dim - head_dim) for x in (key, value))
    rows = _pad_features(query, tiling.features - head_dim).reshape(-1, tiling.features)
    make_kernel = functools.partial(
        ops.kernel,
        compiler_params=ops.compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    attend = make_kernel(
        functools.partial(_attend_to_part, tiling=tiling),
        scratch_types=[_Scratch.of(tiling)],
        kernel_name="hopper_decode_attention_kernel",
        **tiling.attend_options,
    )
    combine = make_kernel(
        functools.partial(_combine_parts, tiling=tiling),
        scratch_types=[plgpu.SMEM((COLUMNS, _ROWS), tiling.dtype)],
        **tiling.combine_options,
    )
    arrays = (rows, keys.reshape(cache), values.reshape(cache), *rest)
    out, lse = tiling.run(attend, combine, arrays)
    if tiling.features > tiling.head_dim:  # the chunks overlap
        last = out[..., tiling.features - (tiling.head_dim - _ROWS) :]
        out = jnp.concatenate([out[..., :_ROWS], last], axis=-1)
    return out[..., :head_dim], lse
