"""Attention of query blocks over page indices on NVIDIA GPUs from Ampere on.

A thread block has one tile. Its warpgroup copies the listed keys and values into shared memory
(`cp.async`), 64 or 32 keys a step, and multiplies with warp-level tensor core instructions
(`mma.sync`). Each of its four warps has 16 queries of each head, so each key and value that it
reads serves both heads. As many thread blocks as fit on a multiprocessor (SM) hide each other's
latency. Long lists start first.

Steps (`tiles`) take pages of 16 keys, four of which are a block. Copies of keys and copies of
values form alternating groups. With `stages` slots for each, step `i`

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels.attention.tiles import (
    QUERIES,
    Refs,
    Softmax,
    Tile,
    Tiling,
    divide,
    mask_pages,
    nothing,
    prepare,
)
from sketchwalk_jax.pallas_kernels.config import shared_memory
from sketchwalk_jax.pallas_kernels.lib import mma_sync, ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mma_sync import PAGE

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
class _Tiling(Tiling):
    """Static parameters of a call.

    Attributes:
      entry: Pages per listed block.
      keys: Keys per step.
      stages: Slots of keys, and of values.
    """

    entry: int
    keys: int
    stages: int

    @property
    def pages(self) -> int:
        """Pages per step."""
        return self.keys // PAGE

    @property
    def rows(self) -> int:
        """Queries per tile, counted in each head."""
        return self.together * QUERIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refs(Refs):
    """Arrays of the kernel.

    `queries` are `[rows, H]`, reused for the output at the end.

    Attributes:
      words: All integers in one array, since each array takes 1024 bytes. First the tile's indices
        (row, sequence, key/value head, heads of the group), its start and its sequence's length,
        which would otherwise occupy registers throughout. Then one for each warp.
    """

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
    tile: Tile
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
        rows = ops.matrix_index((self.tiling.rows,), 0, ops.BY_ROW)
        return rows & (QUERIES - 1)

    def attend(self) -> None:
        """Runs all steps, divides by the denominators and writes the output."""
        tiling, refs = self.tiling, self.refs
        tokens = range(0, QUERIES, PAGE)
        for index in range(tiling.together):
            source = refs.query.at[self.tile.batch, self.tile.rows, self.tile.head(index)]
            target = refs.queries.at[pl.ds(index * QUERIES, QUERIES)]
            self._copy(source, target, list(tokens), [PAGE] * len(tokens))
        for step in range(tiling.stages):
            self._copy_keys(self._pages(step), step)
            if step + 1 < tiling.stages:
                self._copy_values(self._pages(step), step)
        start = Softmax.start(tiling.rows), ops.full((tiling.rows, tiling.head_dim), 0.0)
        state, sums = jax.lax.fori_loop(0, self.steps, self._step, start)
        self.write(*state.finish(sums, tiling.exponent))

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
            pages = zip(*own, strict=True)
            return mask_pages(scores, pages, PAGE, start, length), bad

        def plain(scores: Any) -> tuple[Any, Any]:
            return scores, jnp.int32(mma_sync.NOBODY)

        scores, bad = jax.lax.cond(is_masked, masked, plain, scores)
        weights, decay, state = state.add(scores, tiling.exponent)
        state = state._replace(denominator=jnp.where(self.query < bad, state.denominator, jnp.nan))
        sums = sums * ops.spread(decay, sums.shape, 0)
        sums = mma_sync.add_values(sums, weights.astype(refs.values.dtype), refs.values.at[slot])
        return state, sums

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
            entry, rest = divide(jnp.maximum(entries[place], 0), tiling.entry)
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
        tile, end = self.tile, jnp.minimum(self.length, self.start + QUERIES)

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

    def write(self, out: Any, lse: Any) -> None:
        """Writes the output and, if requested, the log-sum-exp."""
        refs = self.refs
        mma_sync.wait_copies(0)
        row_ops.barrier()  # the output overwrites the queries
        ops.write(refs.queries, out.astype(refs.queries.dtype))
        row_ops.barrier()
        tile = Tile(self.tiling, *(refs.words[index] for index in range(4)))
        rows = tile.rows
        for index in range(self.tiling.together):
            place = (index * QUERIES, tile.has_head(index))
            head = tile.head(index)
            target = refs.out.at[tile.batch, rows, head]
            mma_sync.write_rows(refs.queries, target, *place)
            if refs.out_lse is not None:
                target = refs.out_lse.at[tile.batch, head, rows]
                mma_sync.write_vector(lse, target, *place)


def _attend(*arrays: Any, tiling: _Tiling, **scratch: Any) -> None:
    """Computes the tile of one thread block."""
    refs = _Refs.of(arrays, scratch)
    tile = Tile(tiling, *tiling.locate(jax.lax.axis_index("program")))
    start = (refs.first_block[tile.batch] * tiling.subblocks + tile.row) * QUERIES
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
        attention.write(*nothing(tiling.rows, tiling.head_dim))


def attention_kernel(*arrays: Any, **options: Any) -> tuple[Array, Array | None]:
    """Computes attention over lists on any NVIDIA GPU of compute capability 8.0 or higher.

    The arguments are those of `tiles.prepare`.
    """
    call = prepare(*arrays, **options)
    tiling = _Tiling(**call.fields, entry=call.block_size // PAGE, keys=_SIZES[0][0], stages=1)
    keys, stages = sizes(tiling.rows, tiling.head_dim, shared_memory())
    tiling = dataclasses.replace(tiling, keys=keys, stages=stages)
    kernel = ops.kernel(
        functools.partial(_attend, tiling=tiling),
        scratch_types=_scratch(tiling, call.dtype),
        grid=(tiling.units,),
        grid_names=("program",),
        # No reduction here crosses warps.
        compiler_params=ops.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="attention_kernel",
        **call.options,
    )
    return call.run(kernel)
