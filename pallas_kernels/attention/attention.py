"""Attention of query blocks over page indices on NVIDIA GPUs from Ampere on.

A thread block has one tile: 64 queries in up to two query heads that share keys and a list of block
indices. Its warpgroup copies the listed keys and values into shared memory (`cp.async`), 64 or 32
keys a step, and multiplies with warp-level tensor core instructions (`mma.sync`). Each of its four
warps has 16 queries of each head, so each key and value that it reads serves both heads. As many
thread blocks as fit on a multiprocessor (SM) hide each other's latency. Long lists start first.

Steps run from the end of a list to its beginning, in pages of 16 keys, four of which are a block:

    S = Q Kᵀ                                    [queries, keys]
    m' = max(m, S over keys),  P = 2^(c S - c m'),  c = scale · log2(e)
    O = O 2^(c m - c m') + P V                  [queries, features]

Copies of keys and copies of values form alternating groups. With `stages` slots for each, step `i`

    waits for the keys of step i             all warps are done with the values of step i - 1
    starts to copy the values of step i + stages - 1 into their slot, computes S
    waits for the values of step i           all warps are done with the keys of step i
    starts to copy the keys of step i + stages into their slot, computes P and adds P V

so that each wait leaves `2 (stages - 1)` groups in flight. Keys that no query of the tile sees are
not read; the copy fills them with zeros. These are keys beyond the sequence or the tile, and pages
that a list's last step lacks.

Only steps that contain keys of the tile's own block, or lack pages, need a mask. A weight of 0 does
not erase NaN, and a NaN in a later value must not reach earlier queries. So in the tile's own
block, values from the first non-finite one on become zeros, and queries that see it get a NaN
denominator.

Per query and head, a listed block of 64 keys costs 2 H bytes of reads, as on Hopper.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.attention.hopper import check_arguments, with_whole_heads
from sketchwalk_jax.pallas_kernels.config import (
    KernelConfig,
    default_kernel_config,
    shared_memory,
    without_derivative,
)
from sketchwalk_jax.pallas_kernels.lib import mma_sync, ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mma_sync import PAGE
from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE

_QUERIES = 64  # per tile
# Keys per step and slots, fastest first. Two thread blocks per SM, the most that the registers of
# the largest tiles allow, must fit in its shared memory. Scores of 64 keys for the largest tiles
# would not fit in the registers.
_SIZES = ((64, 2), (64, 1), (32, 2), (32, 1))
_MOST_SUMS = 64 * 128  # largest tile, rows times features, for steps of 64 keys
_PROGRAMS = 2
_PLACES = 6  # integers that locate a thread block's tile
_RESERVED = 1024  # bytes of shared memory that CUDA reserves per thread block
_SCRATCH = 1024  # most bytes of a thread block other than queries, keys and values


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """Static parameters of a call.

    Attributes:
      batch: Sequences.
      tiles: Tiles of 64 queries in a sequence.
      heads: Query heads.
      kv_heads: Key/value heads.
      head_dim: Features per head, 64 or 128.
      lists: Lists per query block: 1, `kv_heads` or `heads`.
      subblocks: Tiles per query block.
      entry: Pages per listed block.
      keys: Keys per step.
      stages: Slots of keys, and of values.
      exponent: Factor of the scores times `log2(e)`, for powers of 2.
    """

    batch: int
    tiles: int
    heads: int
    kv_heads: int
    head_dim: int
    lists: int
    subblocks: int
    entry: int
    keys: int
    stages: int
    exponent: float

    @property
    def pages(self) -> int:
        """Pages per step."""
        return self.keys // PAGE

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def together(self) -> int:
        """Heads per tile, which share a list and a key/value head."""
        return 1 if self.group == 1 or self.lists == self.heads else 2

    @property
    def rows(self) -> int:
        """Queries per tile, counted in each head."""
        return self.together * _QUERIES

    @property
    def head_pairs(self) -> int:
        """Tiles per 64 queries to cover all heads of a group."""
        return -(-self.group // self.together)

    @property
    def programs(self) -> int:
        """Number of thread blocks, one per tile."""
        return self.batch * self.tiles * self.kv_heads * self.head_pairs

    def tile(self, program: Any) -> "_Tile":
        """Returns a thread block's tile: late queries first, whose lists are long, head by head."""
        place, pair = _divide(program, self.head_pairs)
        place, batch = _divide(place, self.batch)
        kv_head, row = _divide(place, self.tiles)
        return _Tile(self, self.tiles - 1 - row, batch, kv_head, pair)


def _divide(x: Any, divisor: int) -> tuple[Any, Any]:
    if divisor == 1:
        return x, 0
    return jax.lax.div(x, divisor), jax.lax.rem(x, divisor)


@dataclasses.dataclass(frozen=True)
class _Refs:
    """Arrays in global memory, in the order of the kernel's arguments, then shared memory.

    Attributes:
      query, key, value, ids, counts, layer, first_block, kv_lengths: The kernel's arguments.
      out: Output `[B, T, N, H]`.
      out_lse: Log-sum-exp `[B, N, T]`, or `None` if not requested.
      queries: `[rows, H]`, reused for the output at the end.
      keys: `[stages, keys, H]`.
      values: `[stages, keys, H]`.
      words: All integers in one array, since each array takes 1024 bytes. First the tile's indices
        (row, sequence, key/value head, heads of the group), its start and its sequence's length,
        which would otherwise occupy registers throughout. Then one for each warp.
    """

    query: Any
    key: Any
    value: Any
    ids: Any
    counts: Any
    layer: Any
    first_block: Any
    kv_lengths: Any
    out: Any
    out_lse: Any
    queries: Any
    keys: Any
    values: Any
    words: Any


def _scratch(tiling: _Tiling, dtype: Any) -> dict[str, Any]:
    """Shared memory of a thread block, with the names of `_Refs`."""
    slots = (tiling.stages, tiling.keys, tiling.head_dim)
    return {
        "queries": ops.tiled((tiling.rows, tiling.head_dim), dtype),
        "keys": ops.tiled(slots, dtype),
        "values": ops.tiled(slots, dtype),
        "words": plgpu.SMEM((_PLACES + row_ops.WARPS,), jnp.int32),
    }


def sizes(rows: int, head_dim: int, memory: int) -> tuple[int, int]:
    """Chooses keys per step and number of slots, for an SM with `memory` bytes of shared memory."""

    def fits(keys: int, stages: int) -> bool:
        own = 2 * head_dim * (rows + 2 * stages * keys)
        if keys == 64 and rows * head_dim > _MOST_SUMS:
            return False
        return _PROGRAMS * (own + _SCRATCH + _RESERVED) <= memory

    return next((x for x in _SIZES if fits(*x)), _SIZES[-1])


class _Softmax(NamedTuple):
    """Running maximum of each query's scores, and sum of its weights."""

    maximum: Any
    denominator: Any


@dataclasses.dataclass(frozen=True)
class _Tile:
    """64 queries of one sequence, in the heads that one thread block computes.

    Attributes:
      tiling: Tiling of the call.
      row: Tile index within the sequence.
      batch: Sequence.
      kv_head: Key/value head.
      pair: Index of the heads within the group.
    """

    tiling: _Tiling
    row: Any
    batch: Any
    kv_head: Any
    pair: Any

    def head(self, index: int) -> Any:
        """Returns the query head at an index of the tile, clamped to the group's last head."""
        member = jnp.minimum(self.pair * self.tiling.together + index, self.tiling.group - 1)
        return self.kv_head * self.tiling.group + member

    def has_head(self, index: int) -> Any:
        """Whether the group has a head at this index of the tile."""
        return self.pair * self.tiling.together + index < self.tiling.group

    @property
    def list(self) -> Any:
        """Index of the tile's list within its query block."""
        if self.tiling.lists == 1:
            return 0
        return self.kv_head if self.tiling.lists == self.tiling.kv_heads else self.head(0)


class _Pages(NamedTuple):
    """The pages of a step.

    Attributes:
      indices: The page at each place, or an arbitrary page if the list is too short.
      is_there: Whether the list has a page for the place.
    """

    indices: tuple[Any, ...]
    is_there: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Computes one tile.

    Attributes:
      tiling: Tiling of the call.
      refs: Arrays of the thread block.
      tile: The tile.
      count: Pages in the tile's list; 0 if the tile lies beyond the sequence.
      start: Position of the tile's first query.
      length: Keys in the sequence.
      layer: Layer of the cache.
    """

    tiling: _Tiling
    refs: _Refs
    tile: _Tile
    count: Any
    start: Any
    length: Any
    layer: Any

    @property
    def steps(self) -> Any:
        """Number of steps of the tile's list."""
        return jax.lax.div(self.count + self.tiling.pages - 1, self.tiling.pages)

    @property
    def query(self) -> Array:
        """Index within the tile of each row's query."""
        rows = plgpu.broadcasted_iota(jnp.int32, (self.tiling.rows,), 0, layout=ops.BY_ROW)
        return rows & (_QUERIES - 1)

    def attend(self) -> None:
        """Runs all steps, divides by the denominators and writes the output."""
        tiling, refs = self.tiling, self.refs
        tokens = range(0, _QUERIES, PAGE)
        for index in range(tiling.together):
            rows = _rows(self.tile.row * _QUERIES)
            source = refs.query.at[self.tile.batch, rows, self.tile.head(index)]
            target = refs.queries.at[_rows(index * _QUERIES)]
            self._copy(source, target, list(tokens), [PAGE] * len(tokens))
        for step in range(tiling.stages):
            self._copy_keys(self._pages(step), step)
            if step + 1 < tiling.stages:
                self._copy_values(self._pages(step), step)
        maximum = ops.full((tiling.rows,), FIRST_MAXIMUM, ops.BY_ROW)
        state = _Softmax(maximum, ops.full((tiling.rows,), 0.0, ops.BY_ROW))
        sums = ops.full((tiling.rows, tiling.head_dim), 0.0)
        (maximum, denominator), sums = jax.lax.fori_loop(0, self.steps, self._step, (state, sums))
        is_empty = denominator == 0.0
        safe = jnp.where(is_empty, 1.0, denominator)
        lse = (maximum * tiling.exponent + jnp.log2(safe)) * math.log(2.0)
        out = sums * ops.spread(1.0 / safe, sums.shape, 0)
        self._write(out, jnp.where(is_empty, -jnp.inf, lse))

    def write_zeros(self) -> None:
        """Writes zeros for a tile without keys."""
        zeros = ops.full((self.tiling.rows, self.tiling.head_dim), 0.0)
        self._write(zeros, ops.full((self.tiling.rows,), -jnp.inf, ops.BY_ROW))

    def _step(self, index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        tiling, refs = self.tiling, self.refs
        state, sums = carry
        slot = self._slot(index)
        coming = index + tiling.stages - 1
        # Read page indices before the wait. Those for values hit the cache: keys have used them.
        pages, later = self._pages(coming), self._pages(coming + 1)
        own = pages if tiling.stages == 1 else self._pages(index)
        self._wait()
        self._copy_values(pages, coming)
        scores = mma_sync.multiply_keys(refs.queries, refs.keys.at[slot])
        self._wait()
        self._copy_keys(later, coming + 1)
        # A step's last page has the highest index.
        is_masked = ~own.is_there[0] | (own.indices[-1] * PAGE >= self.start)

        def masked(scores: Any) -> tuple[Any, Any]:
            start, length = refs.words[4], refs.words[5]
            places = [
                jnp.where(there, page * PAGE - start, -1) for page, there in zip(*own, strict=True)
            ]
            bad = mma_sync.clear_from_bad(
                refs.values.at[slot], places, refs.words.at[pl.ds(_PLACES, row_ops.WARPS)]
            )
            return _mask(scores, own, start, length), bad

        def plain(scores: Any) -> tuple[Any, Any]:
            return scores, jnp.int32(mma_sync.NOBODY)

        scores, bad = jax.lax.cond(is_masked, masked, plain, scores)
        weights, decay, state = self._soften(scores, state)
        state = state._replace(denominator=jnp.where(self.query < bad, state.denominator, jnp.nan))
        sums = sums * ops.spread(decay, sums.shape, 0)
        sums = mma_sync.add_values(sums, weights.astype(refs.values.dtype), refs.values.at[slot])
        return state, sums

    def _soften(self, scores: Any, state: _Softmax) -> tuple[Any, Any, _Softmax]:
        """Returns weights `2^(c s - c m)` of a step, the old sums' factor, and the new state."""
        factor = self.tiling.exponent
        maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=1))
        decay = jnp.exp2((state.maximum - maximum) * factor)
        weights = jnp.exp2(scores * factor - ops.spread(maximum * factor, scores.shape, 0))
        denominator = state.denominator * decay + jnp.sum(weights, axis=1)
        return weights, decay, _Softmax(maximum, denominator)

    def _slot(self, step: Any) -> Any:
        return 0 if self.tiling.stages == 1 else jax.lax.rem(step, self.tiling.stages)

    def _pages(self, step: Any) -> _Pages:
        """Returns the pages of a step; the first step takes the list's last pages."""
        tiling = self.tiling
        first = self.count - tiling.pages * (step + 1)
        entries = [first + place for place in range(tiling.pages)]
        row = jax.lax.div(self.tile.row, tiling.subblocks)
        indices = []
        # Pages of a block are adjacent; a step holds whole blocks or is smaller than one.
        per_read = min(tiling.entry, tiling.pages)
        for place in range(0, tiling.pages, per_read):
            entry, rest = _divide(jnp.maximum(entries[place], 0), tiling.entry)
            page = self.refs.ids[self.tile.batch, self.tile.list, row, entry] * tiling.entry + rest
            indices += [page + index for index in range(per_read)]
        return _Pages(tuple(indices), tuple(entry >= 0 for entry in entries))

    def _wait(self) -> None:
        """Waits until the next group of copies has arrived, in all warps."""
        mma_sync.wait_copies(2 * (self.tiling.stages - 1))
        row_ops.barrier()

    def _copy_keys(self, pages: _Pages, step: Any) -> None:
        self._copy_step(self.refs.key, self.refs.keys, pages, step)

    def _copy_values(self, pages: _Pages, step: Any) -> None:
        self._copy_step(self.refs.value, self.refs.values, pages, step)

    def _copy_step(self, source: Any, target: Any, pages: _Pages, step: Any) -> None:
        """Starts a group of copies, an empty one after the last step."""
        tile, end = self.tile, jnp.minimum(self.length, self.start + _QUERIES)

        @pl.when(step < self.steps)
        def _() -> None:
            self._copy(
                source.at[self.layer, tile.batch, :, tile.kv_head],
                target.at[self._slot(step)],
                [page * PAGE for page in pages.indices],
                [jnp.where(x, end - page * PAGE, 0) for page, x in zip(*pages, strict=True)],
            )

        mma_sync.commit_copies()

    def _copy(self, *arguments: Any) -> None:
        mma_sync.copy_pages(*arguments)

    def _write(self, out: Any, lse: Any) -> None:
        refs = self.refs
        mma_sync.wait_copies(0)
        row_ops.barrier()  # the output overwrites the queries
        ops.write(refs.queries, out.astype(refs.queries.dtype))
        row_ops.barrier()
        tile = _Tile(self.tiling, *(refs.words[index] for index in range(4)))
        rows = _rows(tile.row * _QUERIES)
        for index in range(self.tiling.together):
            place = (index * _QUERIES, tile.has_head(index))
            head = tile.head(index)
            target = refs.out.at[tile.batch, rows, head]
            mma_sync.write_rows(refs.queries, target, *place)
            if refs.out_lse is not None:
                target = refs.out_lse.at[tile.batch, head, rows]
                mma_sync.write_vector(lse, target, *place)


def _mask(scores: Any, pages: _Pages, start: Any, length: Any) -> Any:
    """Masks keys after their query or beyond the sequence, and pages missing from the list."""
    # A thread has columns 8 j + 2 (thread % 4) + (0, 1). Without the thread's part, columns and
    # their pages are compile-time constants.
    column = ops.matrix_index(scores.shape, 1)
    own = column & 6
    column = column & ~6
    query = ops.matrix_index(scores.shape, 0) & (_QUERIES - 1)
    last = jnp.minimum(start + query, length - 1)
    reach = jnp.full_like(column, -1)
    for place, (page, there) in enumerate(zip(*pages, strict=True)):
        visible = jnp.where(there, last - page * PAGE, -1)
        reach = jnp.where(column < place * PAGE, reach, visible + place * PAGE)
    return jnp.where(column <= reach - own, scores, MASK_VALUE)


def _rows(first: Any) -> Any:
    return pl.ds(first, _QUERIES)


def _attend(*arrays: Any, tiling: _Tiling, **scratch: Any) -> None:
    """Computes the tile of one thread block."""
    num_arrays = len(dataclasses.fields(_Refs)) - len(scratch)
    no_lse = [None] * (num_arrays - len(arrays))
    refs = _Refs(*arrays, *no_lse, **scratch)
    tile = tiling.tile(jax.lax.axis_index("program"))
    start = (refs.first_block[tile.batch] * tiling.subblocks + tile.row) * _QUERIES
    length = refs.kv_lengths[tile.batch]
    entries = refs.counts[tile.batch, tile.list, jax.lax.div(tile.row, tiling.subblocks)]
    count = jnp.where(start < length, entries * tiling.entry, 0)
    for index, x in enumerate((tile.row, tile.batch, tile.kv_head, tile.pair, start, length)):
        refs.words[index] = jnp.int32(x)
    attention = _Attention(tiling, refs, tile, count, start, length, refs.layer[0])

    @pl.when(count > 0)
    def _() -> None:
        attention.attend()

    @pl.when(count == 0)
    def _() -> None:
        attention.write_zeros()


def attention_kernel(
    query: Float[Array, "B T N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M I P"],
    counts: Int[Array, "B M I"],
    *,
    layer: Int[Array, ""] | int,
    first_block: Int[Array, "B"],
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    row_size: int | None = None,
    return_lse: bool = False,
    kernel_config: KernelConfig | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Computes causal attention of each query block over its list of key blocks.

    It runs on any NVIDIA GPU of compute capability 8.0 or higher, with the arguments and results of
    `hopper.hopper_attention_kernel`.

    Args:
      query: Queries from a query block's start on, bfloat16 or float16, head_dim at most 128.
      key: Stacked cache of keys; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Block indices for all heads (`M = 1`), for each key/value head or for each query head.
      counts: Number of indices in each list; later entries of `ids` are never read.
      layer: Layer of the cache.
      first_block: Query block of each sequence's first query, counted from position 0.
      kv_lengths: Number of keys in each sequence; the cache may hold anything after them.
      scale: Factor of the scores, greater than 0.
      block_size: Keys per listed block: 64 or 128, or 16 for pages.
      row_size: Queries per query block, `block_size` by default; required with pages.
      return_lse: Whether to return the log-sum-exp of the scaled scores as well.
      kernel_config: Tile sizes; they change the result only by rounding.

    Returns:
      The output, and with `return_lse` the float32 log-sum-exp, else `None`.

    Raises:
      ValueError: If the kernel does not support these arguments.
      NotImplementedError: If a derivative is taken.
    """
    kernel_config = default_kernel_config() if kernel_config is None else kernel_config
    row_size = block_size if row_size is None else row_size
    check_arguments(query, key, scale, block_size, row_size)
    head_dim = query.shape[-1]
    query, key, value, index = with_whole_heads(query, key, value, layer)
    padded = query.shape[-1]
    tiling = _Tiling(
        batch=query.shape[0],
        tiles=query.shape[1] // _QUERIES,
        heads=query.shape[2],
        kv_heads=key.shape[3],
        head_dim=padded,
        lists=ids.shape[1],
        subblocks=row_size // _QUERIES,
        entry=block_size // PAGE,
        keys=_SIZES[0][0],
        stages=1,
        exponent=scale * math.log2(math.e),
    )
    keys, stages = sizes(tiling.rows, padded, shared_memory())
    tiling = dataclasses.replace(tiling, keys=keys, stages=stages)
    out_type = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    if return_lse:
        shape = (query.shape[0], query.shape[2], query.shape[1])
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    kernel = ops.kernel(
        functools.partial(_attend, tiling=tiling),
        out_type=out_type,
        scratch_types=_scratch(tiling, query.dtype),
        grid=(tiling.programs,),
        grid_names=("program",),
        # No reduction here crosses warps.
        compiler_params=ops.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        interpret=kernel_config.interpret,
        kernel_name="attention_kernel",
    )
    outputs = without_derivative(kernel)(
        query,
        key,
        value,
        ids,
        counts,
        index.reshape(1),
        first_block.astype(jnp.int32),
        kv_lengths.astype(jnp.int32),
    )
    out = outputs[0][..., :head_dim]
    return out, jnp.swapaxes(outputs[1], 1, 2) if return_lse else None
