"""Prefill over block lists on Hopper GPUs: exact attention of query blocks over listed key blocks.

The grid has one thread block per multiprocessor (SM), which processes one tile after another, those
with long lists first. Each head of a tile has a computing warpgroup. One more warpgroup, the
loader, copies the listed keys and values into shared memory, 128 keys a step (two pieces of 64), a
few steps ahead. Steps run from the end of a list to its beginning: the first one holds the diagonal
block and is the only one with a mask. While one head's weights are computed, the tensor cores
multiply for the other head, and multiply the values of the previous step (`tiles` has the
equations).

A weight of 0 does not erase NaN, and a NaN in a later value must not reach earlier queries. So the
loader checks the values of the tile's own 64 keys. From the first non-finite one on it sets them to
0 in shared memory, and queries that see this value get a denominator of NaN.

Registers hold the sums `O`, the scores of one step, and the running maxima `m` and denominators.
Shared memory holds the queries and outputs of each head and the steps of keys and values. Per query
and head, a listed block of 64 keys costs 2 H bytes of reads: 64 keys and values of 2 H bytes each
serve 64 queries of two heads.

Each buffer in shared memory has a pair of barriers: `filled` signals that its copies have arrived,
`freed` that all readers are done. In every step

    the loader                                       each computing warpgroup
    waits for freed keys, fills them with K          waits for filled keys, starts Q Kᵀ
    waits for freed values, fills them with V        starts P V of the step before, awaits Q Kᵀ
                                                     frees the keys, computes its weights P
                                                     waits for filled values, awaits P V
                                                     frees the values of the step before

Slots of keys and of values are used in turn and have separate barriers, since values are freed
later than keys. The queries of each warpgroup have a pair too: it frees them after the last scores
of its tile, so that the next tile's queries arrive while it finishes this one.

Lists may name pages of 16 keys instead, for the same tiles. A step is then eight pages; each warp
of the loader reads and copies two of them without waiting for other warps. The first step has the
last eight pages of a list. So the tile's own pages are all in its second half, and no other step
needs a causal mask. The last step lacks pages if their number is no multiple of eight. The missing
places repeat the list's first page, and are masked. If that page is the tile's own, its values are
zeroed there, since not every query sees it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from sketchwalk_jax.pallas_kernels.config import num_multiprocessors
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.precision import MASK_VALUE

_KEYS = 128  # per step
_PIECE = 64  # keys per copy
# Unused, but they shift the other barriers in shared memory. Without them 28/4 heads of 128 take
# 3 % longer at 128K tokens on an H200, 32/8 of 64 take 1 % longer.
_UNUSED_BARRIERS = 2


# Static parameters, memory and tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling(Tiling):
    """Static parameters of a call.

    Attributes:
      piece: Keys per copy: 64, or 16 for pages.
      stages: Steps of keys, and of values, in shared memory.
      most_programs: Most thread blocks.
    """

    piece: int
    stages: int
    most_programs: int

    @property
    def pieces(self) -> int:
        """Pieces per step."""
        return _KEYS // self.piece

    @property
    def has_pages(self) -> bool:
        """Whether lists name pages; a tile may contain several pages."""
        return self.piece < _PIECE

    @property
    def programs(self) -> int:
        """Number of thread blocks, each of which processes several tiles."""
        return min(self.most_programs, self.units)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per loading and per computing thread, out of one shared register file."""
        if self.together == 1:
            return 88, 248
        return 56, 224

    def num_steps(self, count: Any) -> Any:
        """Number of steps for `count` pieces."""
        return jax.lax.div(count + self.pieces - 1, self.pieces)

    def turns(self, program: Any) -> Any:
        """Number of tiles of a thread block."""
        return jax.lax.div(self.units - 1 - program, self.programs) + 1

    def tile(self, program: Any, turn: Any) -> "_Tile":
        """Returns a thread block's tile at a turn, clamped to the last tile."""
        return _Tile(
            self, *self.locate(jnp.minimum(program + turn * self.programs, self.units - 1))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refs(Refs):
    """Arrays of the kernel; `queries` are `[warpgroups, 64, H]`, and a step has 128 keys.

    Attributes:
      outputs: `[warpgroups, 64, H]`.
      lse: `[warpgroups, 64]`.
      lost: For each slot of values, the first query of the tile that sees a non-finite value; then
        the loader's scratch to find it.
      filled: Barriers of the slots of keys, then of values; one arrival per piece of a step.
      freed: The same; one arrival per computing warpgroup.
      single: Barriers with one arrival, listed in `_Barriers`.
    """

    outputs: Any
    lse: Any
    lost: Any
    filled: Any
    freed: Any
    single: Any


def _scratch(tiling: _Tiling, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a thread block, with the names of `_Refs`."""
    warpgroups = tiling.together
    num_barriers = 2 * tiling.stages
    num_single = _UNUSED_BARRIERS + _PIECE // tiling.piece + 2 * warpgroups
    return {
        "queries": ops.tiled((warpgroups, QUERIES, tiling.head_dim), dtype),
        "outputs": ops.tiled((warpgroups, QUERIES, tiling.head_dim), dtype),
        "keys": ops.tiled((tiling.stages, _KEYS, tiling.head_dim), dtype),
        "values": ops.tiled((tiling.stages, _KEYS, tiling.head_dim), dtype),
        "lse": plgpu.SMEM((warpgroups, QUERIES), jnp.float32),
        "lost": plgpu.SMEM((tiling.stages + row_ops.WARPS,), jnp.int32),
        # One array each, since Pallas uses one register per warpgroup to track each array's phases.
        "filled": plgpu.Barrier(num_arrivals=tiling.pieces, num_barriers=num_barriers),
        "freed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=num_barriers),
        "single": plgpu.Barrier(num_arrivals=1, num_barriers=num_single),
    }


@dataclasses.dataclass(frozen=True)
class _Barriers:
    """Barriers of a thread block, by guarded buffer; `which` is `"filled"` or `"freed"`."""

    tiling: _Tiling
    refs: _Refs

    def keys(self, which: str, slot: Any) -> Any:
        """Barrier of the keys in a slot."""
        return getattr(self.refs, which).at[slot]

    def values(self, which: str, slot: Any) -> Any:
        """Barrier of the values in a slot."""
        return getattr(self.refs, which).at[self.tiling.stages + slot]

    def queries(self, which: str, warpgroup: Any) -> Any:
        """Barrier of a warpgroup's own queries."""
        first = _UNUSED_BARRIERS + _PIECE // self.tiling.piece
        first += 0 if which == "filled" else self.tiling.together
        return self.refs.single.at[first + warpgroup]

    def unchecked(self, index: Any = 0) -> Any:
        """Barrier that signals the loader that a piece of values to check has arrived."""
        return self.refs.single.at[_UNUSED_BARRIERS + index]


class _Extent(NamedTuple):
    """The list and positions of a tile.

    Attributes:
      count: Pieces in the tile's list; 0 if the tile lies beyond the sequence.
      start: Position of the tile's first query.
      length: Keys in the sequence.
    """

    count: Any
    start: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """A tile, and the pieces of its list."""

    tiling: _Tiling

    def extent(self, refs: _Refs) -> _Extent:
        """Reads the tile's list length and positions."""
        subblocks = self.tiling.subblocks
        count = refs.counts[self.batch, self.list, jax.lax.div(self.row, subblocks)]
        start = (refs.first_block[self.batch] * subblocks + self.row) * QUERIES
        length = refs.kv_lengths[self.batch]
        return _Extent(jnp.where(start < length, count * subblocks, 0), start, length)

    def pieces(self, refs: _Refs, count: Any, step: Any) -> tuple[Any, Any]:
        """Returns the indices of a step's two pieces of 64 keys; the later one comes first.

        With an odd number of pieces, the first step has the last piece twice.
        """
        first = jnp.maximum(count - 2 + jax.lax.rem(count, 2) - 2 * step, 0)
        second = jnp.minimum(first + 1, count - 1)
        return self._piece(refs, first), self._piece(refs, second)

    def page(self, refs: _Refs, count: Any, step: Any, place: Any) -> Any:
        """Returns the page of 16 keys at a place of a step.

        The first step has the list's last pages and ends with the tile's own. The last step may
        lack pages; its first places then repeat the list's first page.
        """
        return self._piece(refs, jnp.maximum(count - self.tiling.pieces * (step + 1) + place, 0))

    def _piece(self, refs: _Refs, entry: Any) -> Any:
        subblocks = self.tiling.subblocks
        row = jax.lax.div(self.row, subblocks)
        place, rest = divide(entry, subblocks)
        return refs.ids[self.batch, self.list, row, place] * subblocks + rest


# The loader


def _load_tiles(tiling: _Tiling, refs: _Refs, program: Any) -> None:
    """Copies queries, keys and values of all tiles, as far ahead as shared memory allows."""
    layer = refs.layer[0]

    def load(turn: Any, state: tuple[Any, _Extent]) -> tuple[Any, _Extent]:
        done, extent = state  # steps of earlier tiles; list and positions of this one
        following = tiling.tile(program, turn + 1).extent(refs)
        tile = tiling.tile(program, turn)
        steps = tiling.num_steps(extent.count)

        @pl.when(steps > 0)
        def _() -> None:
            (_PageLoader if tiling.has_pages else _Loader)(tiling, refs, tile, layer).load(
                extent, done
            )

        return done + steps, following

    start = (jnp.int32(0), tiling.tile(program, 0).extent(refs))
    jax.lax.fori_loop(0, tiling.turns(program), load, start)


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Copies for one tile."""

    tiling: _Tiling
    refs: _Refs
    tile: _Tile
    layer: Any

    @property
    def barriers(self) -> _Barriers:
        """Barriers of the thread block."""
        return _Barriers(self.tiling, self.refs)

    def load(self, extent: _Extent, done: Any) -> None:
        """Copies the tile's steps, at least one. Slots continue after the `done` earlier steps."""
        tiling, refs, count = self.tiling, self.refs, extent.count
        pieces, later = (self.tile.pieces(refs, count, step) for step in (0, 1))
        value_slot, num_steps = jax.lax.rem(done, tiling.stages), tiling.num_steps(count)
        self._load(self._keys, pieces, jax.lax.rem(done, tiling.stages))
        self._load_queries()
        self._load_first_values(pieces, value_slot, extent.start)

        def load_keys(index: Any, pieces: tuple[Any, Any]) -> None:
            @pl.when(index < num_steps)
            def _() -> None:
                self._load(self._keys, pieces, jax.lax.rem(done + index, tiling.stages))

        load_keys(1, later)  # while the values are being copied
        self._check_first_values(pieces, value_slot, extent)

        def step(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            pieces, later = carry
            following = self.tile.pieces(refs, count, index + 2)  # in time for the next step
            self._load(self._values, pieces, jax.lax.rem(done + index, tiling.stages))
            load_keys(index + 1, later)
            return later, following

        jax.lax.fori_loop(1, num_steps, step, (later, self.tile.pieces(refs, count, 2)))

    def _load_queries(self) -> None:
        """Copies each warpgroup's queries as soon as it has freed those of the previous tile."""
        refs, barriers = self.refs, self.barriers

        def load(warpgroup: Any, nothing: Any) -> Any:
            plgpu.barrier_wait(barriers.queries("freed", warpgroup))
            plgpu.copy_gmem_to_smem(
                refs.query.at[self.tile.batch, self.tile.rows, self.tile.head(warpgroup)],
                refs.queries.at[warpgroup],
                barriers.queries("filled", warpgroup),
            )
            return nothing

        jax.lax.fori_loop(0, self.tiling.together, load, ())

    @property
    def _keys(self) -> tuple[Any, Any, Any]:
        return self.refs.key, self.refs.keys, self.barriers.keys

    @property
    def _values(self) -> tuple[Any, Any, Any]:
        return self.refs.value, self.refs.values, self.barriers.values

    def _places(self, warp: Any) -> Sequence[Any]:
        """Places of the pieces within a step, of a warp if warps copy separately."""
        return range(self.tiling.pieces)

    def _for_pieces(
        self, pieces: tuple[Any, ...], warp: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """Calls a function for each piece and its place."""
        for place, piece in zip(self._places(warp), pieces, strict=True):
            body(piece, place)

    def _load(
        self, arrays: tuple[Any, Any, Any], pieces: tuple[Any, ...], slot: Any, warp: Any = None
    ) -> None:
        """Copies keys or values of the cache to a slot, once it has been freed."""
        plgpu.barrier_wait(arrays[2]("freed", slot))
        self._for_pieces(pieces, warp, lambda piece, place: self._copy(arrays, piece, slot, place))

    def _copy(
        self, arrays: tuple[Any, Any, Any], piece: Any, slot: Any, place: Any, barrier: Any = None
    ) -> None:
        """Copies a piece of the cache to a place of a slot; arrives at the slot's barrier."""
        (source, target, barriers), tile, size = arrays, self.tile, self.tiling.piece
        plgpu.copy_gmem_to_smem(
            source.at[self.layer, tile.batch, pl.ds(piece * size, size), tile.kv_head],
            target.at[slot, pl.ds(place * size, size)],
            barriers("filled", slot) if barrier is None else barrier,
        )

    def _part(self, slot: Any, half: Any, index: Any) -> Any:
        """64 features of half of a slot's values."""
        return self.refs.values.at[slot, pl.ds(half * _PIECE, _PIECE), pl.ds(index * 64, 64)]

    def _parts(self, slot: Any, half: Any) -> list[Any]:
        """Half of a slot's values, 64 features at a time."""
        return [self._part(slot, half, index) for index in range(self.tiling.head_dim // 64)]

    def _change(self, slot: Any, half: Any, change: Callable[[Any], Any]) -> None:
        """Replaces half of a slot's values, 64 features at a time."""

        def step(index: Any, nothing: Any) -> Any:
            part = self._part(slot, half, index)
            ops.write(part, change(part), optimized=True)
            return nothing

        jax.lax.fori_loop(0, self.tiling.head_dim // 64, step, ())

    def _clear(self, slot: Any, half: int) -> None:
        """Zeroes half of a slot's values."""
        self._change(slot, half, lambda part: ops.full((_PIECE, 64), 0.0).astype(part.dtype))

    def _keep(self, slot: Any, half: Any, first: Any, end: Any) -> None:
        """Zeroes half of a slot's values, except some rows."""

        def kept(part: Any) -> Any:
            index = ops.matrix_index((_PIECE, 64), 0)
            is_kept = (index >= first) & (index < end)
            return jnp.where(is_kept, part[...], jnp.zeros(part.shape, part.dtype))

        self._change(slot, half, kept)

    def _load_first_values(self, pieces: tuple[Any, Any], slot: Any, start: Any) -> None:
        """Copies the first step's visible values; the tile's own are copied unchecked.

        The piece after the tile's own, if any, is invisible to all queries.
        """
        refs, barriers = self.refs, self.barriers
        plgpu.barrier_wait(barriers.values("freed", slot))
        refs.lost[slot] = QUERIES
        for half, piece in enumerate(pieces):

            @pl.when(piece * _PIECE < start)
            def _(half: int = half, piece: Any = piece) -> None:
                self._copy(self._values, piece, slot, half)

        @pl.when(pieces[1] * _PIECE >= start)
        def _() -> None:
            half = _own_half(pieces, start)
            piece = jax.lax.div(start, _PIECE)
            self._copy(self._values, piece, slot, half, barriers.unchecked())

    def _check_first_values(self, pieces: tuple[Any, Any], slot: Any, extent: _Extent) -> None:
        """Zeroes values from the first non-finite one on, and records the first query to see it.

        A weight of 0 would not erase a NaN beyond the sequence or in a value that only later
        queries see. A query that sees a zeroed value also sees the non-finite one.
        """
        refs, filled = self.refs, self.barriers.values("filled", slot)
        scratch = refs.lost.at[pl.ds(self.tiling.stages, row_ops.WARPS)]

        @pl.when(pieces[1] * _PIECE >= extent.start)
        def _() -> None:
            half = _own_half(pieces, extent.start)

            @pl.when(half == 0)
            def _() -> None:
                self._clear(slot, 1)
                plgpu.commit_smem()
                plgpu.barrier_arrive(filled)

            plgpu.barrier_wait(self.barriers.unchecked())
            loaded = [plgpu.load(part, layout=ops.ACCUMULATOR) for part in self._parts(slot, half)]
            bad = row_ops.first_not_finite(loaded, scratch)
            present = extent.length - extent.start

            @pl.when(jnp.minimum(bad, present) < _PIECE)
            def _() -> None:
                self._keep(slot, half, 0, jnp.minimum(bad, present))

                @pl.when(bad < present)
                def _() -> None:
                    refs.lost[slot] = bad

            plgpu.commit_smem()
            plgpu.barrier_arrive(filled)


def _own_half(pieces: tuple[Any, Any], start: Any) -> Any:
    """Returns which piece of a first step is the tile's own, if one is."""
    return jnp.where(pieces[0] * _PIECE >= start, 0, 1)


class _PageLoader(_Loader):
    """A `_Loader` for lists of pages; each warp copies its own pages of every step.

    `plgpu.warp_map` synchronizes all warps before and after its function.
    """

    def load(self, extent: _Extent, done: Any) -> None:
        """Copies the tile's steps, at least one. Slots continue after the `done` earlier steps."""
        tiling, refs, barriers = self.tiling, self.refs, self.barriers
        count, half = extent.count, tiling.pieces // 2
        num_steps = tiling.num_steps(count)
        # The last page of a step's first half, then all pages of its second half.
        before, *pages = (
            self.tile.page(refs, count, 0, place) for place in range(half - 1, tiling.pieces)
        )
        slot, value_slot = (jax.lax.rem(done, n) for n in (tiling.stages, tiling.stages))

        @plgpu.warp_map
        def _(warp: Any) -> None:
            self._load(self._keys, self._pages(extent, 0, warp), slot, warp)

        self._load_queries()
        plgpu.barrier_wait(barriers.values("freed", value_slot))
        refs.lost[value_slot] = QUERIES

        @plgpu.warp_map
        def _(warp: Any) -> None:
            self._copy_first_values(extent, before, pages[-1], value_slot, warp)

            @pl.when(num_steps > 1)
            def _() -> None:  # while the values are being copied
                later = self._pages(extent, 1, warp)
                self._load(self._keys, later, jax.lax.rem(done + 1, tiling.stages), warp)

        self._check_values(before, pages, value_slot, extent)

        @plgpu.warp_map
        def _(warp: Any) -> None:
            def step(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                pages, later = carry
                following = self._pages(extent, index + 2, warp)  # in time for the next step
                self._load(self._values, pages, jax.lax.rem(done + index, tiling.stages), warp)

                @pl.when(index + 1 < num_steps)
                def _() -> None:
                    self._load(
                        self._keys, later, jax.lax.rem(done + index + 1, tiling.stages), warp
                    )

                return later, following

            ahead = (self._pages(extent, 1, warp), self._pages(extent, 2, warp))
            jax.lax.fori_loop(1, num_steps, step, ahead)

    def _places(self, warp: Any) -> list[Any]:
        """Places within a step of a warp's pages."""
        share = self.tiling.pieces // row_ops.WARPS
        return [warp * share + index for index in range(share)]

    def _for_pieces(
        self, pieces: tuple[Any, ...], warp: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """Does it in a loop that the compiler unrolls: JAX takes long to lower a copy.

        In the loader of blocks, such a loop would make the compiler spill a register.
        """
        first, *_ = self._places(warp)

        def step(index: Any, nothing: Any) -> Any:
            piece = pieces[0]
            for own in range(1, len(pieces)):
                piece = jnp.where(index == own, pieces[own], piece)
            body(piece, first + index)
            return nothing

        jax.lax.fori_loop(0, len(pieces), step, ())

    def _pages(self, extent: _Extent, step: Any, warp: Any) -> tuple[Any, ...]:
        """Returns the pages of a warp in a step."""
        places = self._places(warp)
        return tuple(self.tile.page(self.refs, extent.count, step, place) for place in places)

    def _copy_first_values(
        self, extent: _Extent, before: Any, last: Any, slot: Any, warp: Any
    ) -> None:
        """Copies the first step's values; the half with the tile's own pages stays unchecked.

        A list of only own pages leaves the other half empty.
        """
        is_first_half = warp < row_ops.WARPS // 2
        is_own = jnp.where(is_first_half, before, last) * self.tiling.piece >= extent.start

        def copy_page(page: Any, place: Any) -> None:
            copy = functools.partial(self._copy, self._values, page, slot, place)
            pl.when(~is_own)(copy)

            @pl.when(is_own & ~is_first_half)
            def _() -> None:
                copy(self.barriers.unchecked(place - self.tiling.pieces // 2))

        self._for_pieces(self._pages(extent, 0, warp), warp, copy_page)

    def _check_values(self, before: Any, pages: list[Any], slot: Any, extent: _Extent) -> None:
        """Does `_check_first_values` for pages; the tile's own pages end the second half.

        Every query sees the half's earlier pages. If the list has fewer pages than the half, copies
        of the first page fill it; these are invisible, so they become zeros if that page is the
        tile's own.
        """
        tiling, refs = self.tiling, self.refs
        size, number = tiling.piece, len(pages)
        filled = self.barriers.values("filled", slot)
        scratch = refs.lost.at[pl.ds(tiling.stages, row_ops.WARPS)]

        def pass_on() -> None:
            plgpu.commit_smem()
            for _ in range(number):
                plgpu.barrier_arrive(filled)

        @pl.when(pages[-1] * size >= extent.start)
        def _() -> None:
            @pl.when(before * size >= extent.start)
            def _() -> None:
                self._clear(slot, 0)
                pass_on()

            for index in range(number):
                plgpu.barrier_wait(self.barriers.unchecked(index))

            first, there = jnp.int32(_PIECE), jnp.int32(0)  # rows: of own pages, in the sequence
            for index, page in enumerate(pages):
                is_own = (page * size >= extent.start) & (extent.count >= number - index)
                first -= jnp.where(is_own, size, 0)
                there += jnp.where(is_own, jnp.clip(extent.length - page * size, 0, size), 0)
            loaded = [plgpu.load(part, layout=ops.ACCUMULATOR) for part in self._parts(slot, 1)]
            bad = row_ops.first_not_finite(loaded, scratch, start=first)
            end = first + there
            are_copies = (pages[0] * size >= extent.start) & (extent.count < number)
            kept_from = jnp.where(are_copies, first, 0)

            @pl.when((kept_from > 0) | (jnp.minimum(bad, end) < _PIECE))
            def _() -> None:
                self._keep(slot, 1, kept_from, jnp.minimum(bad, end))

                @pl.when(bad < end)
                def _() -> None:
                    place = number + jax.lax.div(bad, size)
                    page = self.tile.page(refs, extent.count, 0, place)
                    refs.lost[slot] = page * size + jax.lax.rem(bad, size) - extent.start

            pass_on()


# The computing warpgroups


def _compute_tiles(tiling: _Tiling, refs: _Refs, program: Any, warpgroup: Any) -> None:
    """Computes the thread block's tiles, for the head of one warpgroup."""
    barriers = _Barriers(tiling, refs)
    for slot in range(tiling.stages):  # all of shared memory is free
        plgpu.barrier_arrive(barriers.keys("freed", slot))
    for slot in range(tiling.stages):
        plgpu.barrier_arrive(barriers.values("freed", slot))
    plgpu.barrier_arrive(barriers.queries("freed", warpgroup))

    def compute(turn: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        done, count = state
        following = tiling.tile(program, turn + 1).extent(refs).count  # in time
        tile = tiling.tile(program, turn)
        steps = tiling.num_steps(count)
        head = _Head(tiling, refs, tile, warpgroup)

        @pl.when(steps > 0)
        def _() -> None:
            head.attend(count, done)

        @pl.when(steps == 0)
        def _() -> None:
            head.write(*nothing(QUERIES, tiling.head_dim))

        return done + steps, following

    start = (jnp.int32(0), tiling.tile(program, 0).extent(refs).count)
    jax.lax.fori_loop(0, tiling.turns(program), compute, start)
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Head:
    """One query head of one tile."""

    tiling: _Tiling
    refs: _Refs
    tile: _Tile
    warpgroup: Any

    @property
    def barriers(self) -> _Barriers:
        """Barriers of the thread block."""
        return _Barriers(self.tiling, self.refs)

    def attend(self, count: Any, done: Any) -> None:
        """Computes and writes attention over `count` pieces, after `done` earlier steps."""
        shape = (QUERIES, self.tiling.head_dim)
        ops.with_accumulator(lambda sums: self._attend(sums, count, done), shape)

    def _attend(self, sums: ops.Accumulator, count: Any, done: Any) -> None:
        """Runs the masked first step and all others, adds the last values and divides."""
        tiling, refs, barriers = self.tiling, self.refs, self.barriers
        _, start, length = self.tile.extent(refs)
        pieces: Any
        if tiling.has_pages:
            pieces = [self.tile.page(refs, count, 0, place) for place in range(tiling.pieces)]
        else:
            pieces = self.tile.pieces(refs, count, 0)
        plgpu.barrier_wait(barriers.queries("filled", self.warpgroup))
        slot = jax.lax.rem(done, tiling.stages)
        plgpu.barrier_wait(barriers.keys("filled", slot))

        def first_scores(products: ops.Accumulator) -> Any:
            products.add_product(refs.queries.at[self.warpgroup], _transposed(refs.keys, slot))
            return products.load()

        scores = self._with_scores(first_scores)
        plgpu.barrier_arrive(barriers.keys("freed", slot))
        rest = tiling.num_steps(count) - 1
        self._free_queries(rest == 0)
        if tiling.has_pages:
            needed = range(tiling.pieces, 0, -1)  # pages in the list for one at this place
            places = ((page, count >= x) for page, x in zip(pieces, needed, strict=True))
            scores = mask_pages(scores, places, tiling.piece, start, length)
        else:
            scores = _mask(scores, pieces, count, start, length)
        weights, _, state = self._soften(scores, Softmax.start(QUERIES))
        value_slot = jax.lax.rem(done, tiling.stages)
        plgpu.barrier_wait(barriers.values("filled", value_slot))
        query = ops.matrix_index((QUERIES,), 0, ops.BY_ROW)
        denominator = jnp.where(query < refs.lost[value_slot], state.denominator, jnp.nan)
        state = state._replace(denominator=denominator)

        def step(index: Any, carry: tuple[Any, Softmax]) -> tuple[Any, Softmax]:
            lacks = (index + 2) * tiling.pieces - count  # pieces, if any
            is_last = lacks >= 0 if tiling.has_pages else index == rest - 1
            return self._step(sums, done + index, is_last, lacks, *carry)

        carry = (self._rounded(weights), state)
        weights, state = sums.loop(rest, step, carry)
        last = jax.lax.rem(done + rest, tiling.stages)
        sums.add_product(weights, refs.values.at[last])
        out = sums.load()
        plgpu.barrier_arrive(barriers.values("freed", last))
        self.write(*state.finish(out, tiling.exponent))

    def _step(
        self,
        sums: ops.Accumulator,
        done: Any,
        is_last: Any,
        lacks: Any,
        weights: Any,
        state: Softmax,
    ) -> tuple[Any, Softmax]:
        """Adds the previous step's values while this step's scores become weights.

        The new weights are rounded only after that product, which still reads the registers of the
        old ones. The wait for this step's values comes first; otherwise the assembler would move
        the product's wait ahead of the computation.
        """
        tiling, refs, barriers = self.tiling, self.refs, self.barriers
        previous = jax.lax.rem(done, tiling.stages)
        slot = jax.lax.rem(done + 1, tiling.stages)
        plgpu.barrier_wait(barriers.keys("filled", slot))

        def scores_beside_values(products: ops.Accumulator) -> Any:
            products.add_product(refs.queries.at[self.warpgroup], _transposed(refs.keys, slot))
            sums.add_product(weights, refs.values.at[previous])
            return products.load(in_flight=1)

        scores = self._with_scores(scores_beside_values)
        plgpu.barrier_arrive(barriers.keys("freed", slot))
        self._free_queries(is_last)
        if tiling.has_pages:
            hide = functools.partial(_hide, end=lacks * tiling.piece)
            scores = jax.lax.cond(lacks > 0, hide, lambda x: x, scores)
        new_weights, decay, state = self._soften(scores, state)
        plgpu.barrier_wait(barriers.values("filled", jax.lax.rem(done + 1, tiling.stages)))
        total = sums.load()
        plgpu.barrier_arrive(barriers.values("freed", previous))
        sums.store(total * ops.spread(decay, total.shape, 0))
        return self._rounded(new_weights), state

    def _soften(self, scores: Any, state: Softmax) -> tuple[Any, Any, Softmax]:
        """Returns weights `2^(c s - c m)` of a step, the old sums' factor, and the new state."""
        weights, decay, state = state.add(scores, self.tiling.exponent)
        if not ops.is_interpreted():
            weights = ops.pinned(weights)
        return weights, decay, state

    def _rounded(self, weights: Any) -> Any:
        return weights.astype(self.refs.values.dtype)

    def _with_scores(self, body: Any) -> Any:
        return ops.with_accumulator(body, (QUERIES, _KEYS))

    def _free_queries(self, is_last: Any) -> None:
        """Lets the loader copy the next tile's queries while this tile finishes."""

        @pl.when(is_last)
        def _() -> None:
            plgpu.barrier_arrive(self.barriers.queries("freed", self.warpgroup))

    def write(self, out: Any, lse: Any) -> None:
        """Writes the output and, if requested, the log-sum-exp."""
        refs, tile = self.refs, self.tile
        head = tile.head(self.warpgroup)

        @pl.when(tile.has_head(self.warpgroup))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's
            rounded = out.astype(refs.outputs.dtype)
            ops.write(refs.outputs.at[self.warpgroup], rounded, optimized=True)
            if refs.out_lse is not None:
                ops.write(refs.lse.at[self.warpgroup], lse, optimized=True)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                refs.outputs.at[self.warpgroup], refs.out.at[tile.batch, tile.rows, head]
            )
            if refs.out_lse is not None:
                plgpu.copy_smem_to_gmem(
                    refs.lse.at[self.warpgroup], refs.out_lse.at[tile.batch, head, tile.rows]
                )


def _transposed(keys: Any, slot: Any) -> Any:
    return keys.at[slot].transpose((1, 0))


def _mask(scores: Any, pieces: Any, count: Any, start: Any, length: Any) -> Any:
    """Masks keys after their query or beyond the sequence, and a duplicate piece."""
    # A thread has columns 8 j + 2 (thread % 4) + (0, 1). Without the thread's part they are
    # constants, so that no registers hold them from tile to tile.
    column = ops.matrix_index(scores.shape, 1)
    own = column & 6
    column = column & ~6
    last = jnp.minimum(start + ops.matrix_index(scores.shape, 0), length - 1)
    first, second = (last - piece * _PIECE for piece in pieces)
    second = jnp.where(jax.lax.rem(count, 2) == 1, -1, second)
    reach = jnp.where(column < _PIECE, first, second + _PIECE)
    return jnp.where(column <= reach - own, scores, MASK_VALUE)


def _hide(scores: Any, end: Any) -> Any:
    """Masks a step's keys before `end`, the first key of a page."""
    column = ops.matrix_index(scores.shape, 1) & ~7  # constants, as above
    return jnp.where(column < end, MASK_VALUE, scores)


# The kernel and its launch


def _attend(*arrays: Any, tiling: _Tiling, **scratch: Any) -> None:
    """Runs one thread block: a loader and one or two computing warpgroups."""
    refs = _Refs.of(arrays, scratch)
    warpgroup = jax.lax.axis_index("warpgroup")
    program = jax.lax.axis_index("program")
    share_registers = functools.partial(
        ops.share_registers, *tiling.registers, num_computing=tiling.together
    )

    @pl.when(warpgroup == tiling.together)
    def _() -> None:
        share_registers(is_loader=True)
        _load_tiles(tiling, refs, program)

    @pl.when(warpgroup < tiling.together)
    def _() -> None:
        share_registers(is_loader=False)
        _compute_tiles(tiling, refs, program, warpgroup)


def hopper_attention_kernel(*arrays: Any, **options: Any) -> tuple[Array, Array | None]:
    """Computes attention over lists on Hopper; the arguments are those of `tiles.prepare`."""
    call = prepare(*arrays, **options)
    tiling = _Tiling(
        **call.fields,
        piece=min(call.block_size, _PIECE),
        stages=4 if call.fields["head_dim"] == 64 else 2,
        most_programs=num_multiprocessors(),
    )
    kernel = ops.kernel(
        functools.partial(_attend, tiling=tiling),
        scratch_types=_scratch(tiling, call.dtype),
        grid=(tiling.programs,),
        grid_names=("program",),
        num_threads=tiling.together + 1,
        thread_name="warpgroup",
        # No reduction here crosses warps; the saved memory fits another step of values.
        compiler_params=ops.compiler_params(approx_math=True, reduction_scratch_bytes=128),
        kernel_name="hopper_attention_kernel",
        **call.options,
    )
    return call.run(kernel)
