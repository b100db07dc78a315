"""Scores and the walk's next row for one token per sequence (Algorithm 2 steps 4-5), in parts.

This is the first kernel of a decoding step's block selection. With block means `q̄_i` and `k̄_j` in
sketch space, and the token's own sketch in place of the queries' mean in its own block `t`,

    A_ij = q̄_i · k̄_j / √H  for j <= i,    W = A^s  entry by entry,    r'_j = Σ_i r_i W_ij

and `r` is row `t` of the walk so far, in the first layer row `t` of the identity. `A` is computed
in tiles of 64 query blocks by 64 key blocks, and never stored:

    S = K Qᵀ                      [keys, queries], of sums over blocks, on tensor cores
    P = S^s, or max(S, 0)^s
    r'_j += Σ_i P_ji r_i          over the tile's query blocks

A thread block has two warpgroups, each with different tiles of query blocks and usually the same
tile of key blocks. It writes one part of `r'` for its key blocks; the second kernel, in
`select_decode`, adds up the parts. Each tile of scores reads the sums of its blocks, 4 R bytes
each. The kernel also writes row `t` of `A`, for walks without a positive entry.

There are two kernels, which differ only in the order of the tiles. Up to 2048 blocks, i.e. 16 pairs
of tiles of query blocks, there is a thread block for each pair and each tile of key blocks at or
below the diagonal; its copies start before it knows whether there is work. Beyond, there is a
thread block for each tile of key blocks and each of 16 splits, which processes every 16th pair.

Numbers. Wherever numbers may become large or small, their powers of two are stored separately: per
row of queries and keys, per column sum, and per part of the result. Each row of an operand is
scaled by a power of two and split into two float16 numbers, which hold 22 bits. Three products of
these, without the product of both low parts, give scores nearly as accurate as float32. To keep the
common path of all tiles fast, constant factors of the scores are applied at the end, and masks are
in separate branches, which only tiles of the token's own row take.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import LEAST_CHUNK, WIDE
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    add_scaled,
    exponent_of,
    integer_power,
    mantissa_of,
    power_of_two,
    replace,
)

TILE = 64  # blocks of keys, and of queries, in a tile
MAX_SPLITS = 16  # parts of a row
LARGEST_EXPONENT = 127  # float32
_HALVES = 2  # halves of a thread block's query blocks, one per warpgroup
_QUERY_TILE = _HALVES * TILE  # query blocks per part
_SHAPE = (TILE, TILE)
_BY_KEY, _BY_QUERY = ops.BY_ROW, ops.BY_COLUMN  # layouts of vectors along `K Qᵀ`
# Exponents of the largest power, weight and part entry; they keep a tile's sums below 2^127.
_POWER_EXPONENT = 80
_WEIGHT_EXPONENT = 24
_PART_EXPONENT = 100
# Exponents of a row's largest entry in float16; the lower one is for powers without scaling. Still
# lower exponents would lose bits.
_TOP = 7
_LOW_TOP = 3

# For each key block: a float, and its separate power of two.
_Total = tuple[Float[Array, "64"], Int[Array, "64"]]


# Static parameters and memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkTiling:
    """Static parameters of a call.

    Attributes:
      num_blocks: Blocks of a sequence `J`.
      size: Entries of a sketch.
      scale: Factor of the scores of means.
      block_size: Tokens per block.
      power: Exponent `s` of the transition.
      rectify: Whether negative scores count as zero.
      use_walk: Whether the row is multiplied by `W`; otherwise it is `W`'s own row in every layer.
      is_sketched: Whether tokens come as sketches, not as queries to project.
      overlaps: Whether the kernel launches early and waits for the previous ones.
    """

    num_blocks: int
    size: int
    scale: float
    block_size: int
    power: int
    rectify: bool
    use_walk: bool
    is_sketched: bool
    overlaps: bool

    @property
    def num_tiles(self) -> int:
        """Pairs of tiles of query blocks, 128 blocks each; a warpgroup has one tile of a pair."""
        return -(-self.num_blocks // _QUERY_TILE)

    @property
    def has_few_tiles(self) -> bool:
        """Whether every pair of tiles of query blocks gets a separate part."""
        return self.num_tiles <= MAX_SPLITS

    @property
    def num_splits(self) -> int:
        """Number of parts of the row."""
        return min(self.num_tiles, MAX_SPLITS)

    @property
    def num_key_tiles(self) -> int:
        """Number of tiles of key blocks."""
        return _HALVES * self.num_tiles

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks of a sequence per line, and lines.

        With few pairs of tiles, a line has the tiles below the diagonal of the first and the last
        pair, the next line those of the second and the last but one, and so on, so that all lines
        are equally long. A pair's corner at the diagonal, key blocks that only its second tile
        reaches, comes last; one thread block has two corners. With many pairs, a line has all tiles
        of key blocks, and every part a line.
        """
        if self.has_few_tiles:
            return 2 * self.num_tiles + 1, (self.num_tiles + 1) // 2
        return self.num_key_tiles, MAX_SPLITS

    @property
    def chunk(self) -> int:
        """Entries of the sketches per product."""
        return LEAST_CHUNK if self.size % (2 * LEAST_CHUNK) else 2 * LEAST_CHUNK

    @property
    def num_chunks(self) -> int:
        """Chunks per sketch."""
        return self.size // self.chunk

    @property
    def shares_keys(self) -> bool:
        """Whether the split keys stay in shared memory, for both warpgroups."""
        return self.num_chunks == 1 and not ops.is_interpreted()

    @property
    def low_exponent(self) -> int:
        """Largest exponent of weights for which powers of scores need no scaling."""
        largest_score = (self.size - 1).bit_length() + 2 * (_LOW_TOP + 1)
        return LARGEST_EXPONENT - self.power * largest_score - TILE.bit_length()

    @property
    def is_low(self) -> bool:
        """Whether powers are not scaled, which avoids computing their maxima.

        Scores whose powers then underflow are smaller than the scores' rounding errors.
        """
        return self.low_exponent >= 0

    @property
    def top(self) -> int:
        """Exponent of each operand row's largest entry."""
        return _LOW_TOP if self.is_low else _TOP

    @property
    def weight_exponent(self) -> int:
        """Exponent of a tile's largest weight."""
        return min(self.low_exponent, _WEIGHT_EXPONENT) if self.is_low else _WEIGHT_EXPONENT

    def halves(self) -> list[Array]:
        """Returns this thread's half; for the interpreter both, first the one that hands over."""
        if ops.is_interpreted():
            return [jnp.int32(half) for half in (1, 0)]
        return [jax.lax.axis_index("half")]


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory and barriers of a thread block.

    Attributes:
      operands: Two slots of keys, then two of queries: float32, overwritten by two float16 parts.
      arrived: Barrier per slot: its copy has arrived.
      are_parts: Barrier per slot of keys: they are split into parts.
      is_done: Barrier: one warpgroup has handed over its total.
      token: The token's sketch.
      combined: Sum over the rows of the token's queries, if it is not given as a sketch.
      weights: Weights of the query blocks in each warpgroup's tile.
      factors: Factors that extract the token's own scores from its tile; only one is not 0.
      maxima: Scratch of `row_ops.maximum`.
      total: Floats of the total that is handed over.
      total_exponent: Exponents of that total.
      key_shifts: Exponents of the powers of two that scale each slot's keys.
    """

    operands: Any
    arrived: Any
    are_parts: Any
    is_done: Any
    token: Any
    weights: Any
    factors: Any
    maxima: Any
    total: Any
    total_exponent: Any
    key_shifts: Any
    combined: Any = None


def _scratch(tiling: WalkTiling) -> dict[str, Any]:
    """Returns shared memory and barriers, with the names of `_Memory`."""
    floats = {"token": (tiling.size,), "factors": (TILE,), "weights": (_HALVES, TILE)}
    if not tiling.is_sketched:
        floats["combined"] = (WIDE,)
    slots = 2 * _HALVES
    return {
        "operands": plgpu.RefUnion(
            _operand((slots, TILE, tiling.chunk), jnp.float32),
            _operand((slots, 2, TILE, tiling.chunk), jnp.float16),
        ),
        "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        "are_parts": plgpu.Barrier(num_arrivals=1, num_barriers=_HALVES),
        "is_done": plgpu.Barrier(num_arrivals=1, num_barriers=1),
        "maxima": row_ops.scratch_of_maximum(_HALVES),
        "total": plgpu.SMEM((TILE,), jnp.float32),
        "total_exponent": plgpu.SMEM((TILE,), jnp.int32),
        "key_shifts": plgpu.SMEM((_HALVES, TILE), jnp.int32),
        **{name: plgpu.SMEM(shape, jnp.float32) for name, shape in floats.items()},
    }


def _operand(shape: tuple[int, ...], dtype: Any) -> Any:
    width = shape[-1] * jnp.dtype(dtype).itemsize
    return ops.tiled(shape, dtype, swizzle=min(ops.SWIZZLE_BYTES, width))


@dataclasses.dataclass(frozen=True)
class _Refs:
    """Kernel arguments in global memory; `B` sequences, `J` blocks, padded to whole tiles.

    Attributes:
      token: Sketches of the tokens `[B, R]`, or their queries in rows, as in `HeadQueries.rows`.
      projection: `HeadQueries.projection`, from rows to sketches.
      query: Sums of queries `[B, J, R]`.
      key: Sums of keys `[B, J, R]`.
      state: Rows of the walk so far `[B, J]`.
      position: Positions of the tokens `[B]`.
      layers: Layers walked so far `[1]`.
      part: Result `value` of `RowParts`.
      exponent: Result `exponent` of `RowParts`.
      direct: Result `direct` of `RowParts`.
    """

    token: Any
    projection: Any
    query: Any
    key: Any
    state: Any
    position: Any
    layers: Any
    part: Any
    exponent: Any
    direct: Any


class _Token(NamedTuple):
    """The token of one sequence.

    Attributes:
      sequence: Index of the sequence.
      position: Position of the token.
      row: Block of the token.
      last: Tile of query blocks that contains this block.
      last_split: Pair of tiles that contains this block.
      is_first: Whether the walk starts, so that it has only the token's own row.
    """

    sequence: Any
    position: Any
    row: Any
    last: Any
    last_split: Any
    is_first: Any


class _Scores(NamedTuple):
    """Scores of one tile, from operands scaled by powers of two.

    Attributes:
      scores: `[keys, queries]`.
      key_shift: Exponents of the keys' powers of two.
      exponent: Exponent of the query block weights' separate power of two; the weights also
        compensate the queries' powers of two, raised to the transition's power.
    """

    scores: Float[Array, "64 64"]
    key_shift: Int[Array, "64"]
    exponent: Int[Array, ""]


# Split operands and their products


def _largest_of_rows(x: Float[Array, "R C"]) -> Float[Array, "R"]:
    """Returns every row's largest magnitude."""
    return jnp.max(jnp.abs(x), axis=1)


def _shifts_by(largest: Float[Array, "R"], top: int) -> Int[Array, "R"]:
    """Returns exponents of the powers of two that scale rows with these maxima to `2^top`."""
    return jnp.minimum(top - exponent_of(largest), LARGEST_EXPONENT)


def _write_parts(x: Float[Array, "R C"], shift: Int[Array, "R"], parts: Any) -> None:
    """Splits `2^shift x` into two parts and writes them over `x` in shared memory."""
    row_ops.barrier()  # all have read what was there
    x = x * ops.spread(power_of_two(shift), x.shape, 0)
    high = x.astype(jnp.float16)
    parts[0, ...] = high
    parts[1, ...] = (x - high.astype(jnp.float32)).astype(jnp.float16)


def _multiply(total: Any, keys: Any, queries: Any) -> None:
    """Starts `total += keys @ queriesᵀ` for two split operands."""
    (key_high, key_low), (query_high, query_low) = (
        [x.at[part] for part in range(2)] for x in (keys, queries)
    )
    plgpu.wgmma(total, key_low, query_high.T)
    plgpu.wgmma(total, key_high, query_low.T)
    plgpu.wgmma(total, key_high, query_high.T)


def _multiply_interpreted(
    keys: Float[Array, "64 C"],
    queries: Float[Array, "64 C"],
    key_shift: Int[Array, "64"],
    query_shift: Int[Array, "64"],
) -> Float[Array, "64 64"]:
    """Computes the result of `_multiply` without tensor cores."""
    keys = keys * power_of_two(key_shift)[:, None]
    queries = queries * power_of_two(query_shift)[:, None]
    return jnp.dot(keys, queries.T, precision=jax.lax.Precision.HIGHEST)


def _blocks(tile: Array, axis: int, width: int = TILE) -> Array:
    """Returns the block index of each row or column of a tile."""
    return tile * TILE + ops.matrix_index((TILE, width), axis)


# One warpgroup and its tiles


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of one warpgroup: 64 key blocks, and 64 query blocks at a time.

    Attributes:
      tiling: Tiling of the call.
      refs: Arrays of all sequences.
      memory: Shared memory.
      token: The token of the thread block's sequence.
      half: Index of the warpgroup in the thread block.
      split: Part of the row that the thread block computes.
      tile: Tile of key blocks.
      has_keys: Whether this warpgroup loads keys, possibly for both.
      key_slot: Slot of the keys in shared memory.
      query_slot: Slot of the queries in shared memory.
    """

    tiling: WalkTiling
    refs: _Refs
    memory: _Memory
    token: _Token
    half: Array
    split: Array
    tile: Array
    has_keys: Array
    key_slot: Array
    query_slot: Array

    @classmethod
    def of(cls, *fields: Any) -> "_Tiles":
        """Returns the tiles from all fields but the slots."""
        *_, half, _, _, has_keys = fields
        return cls(*(*fields, jnp.where(has_keys, half, 0), _HALVES + half))

    # Copies

    def start_keys(self, part: int) -> None:
        """Starts the copy of a chunk of the keys' sketches to shared memory."""
        self._start_copy(self.refs.key, self.tile, part, self.key_slot)

    def start_queries(self, query_tile: Array, part: int) -> None:
        """Starts to copy a chunk of the queries, and of the keys unless these are shared."""
        self._start_copy(self.refs.query, query_tile, part, self.query_slot)
        if not self.tiling.shares_keys:
            self.start_keys(part)

    def _start_copy(self, source: Any, tile: Array, part: int, slot: Array) -> None:
        rows, entries = pl.ds(tile * TILE, TILE), pl.ds(part * self.tiling.chunk, self.tiling.chunk)
        source = source.at[self.token.sequence].at[rows, entries]
        target = self.memory.operands[0].at[slot]
        plgpu.copy_gmem_to_smem(source, target, self.memory.arrived.at[slot])

    def await_copy(self, slot: Array) -> None:
        """Waits for a copy."""
        plgpu.barrier_wait(self.memory.arrived.at[slot])

    def await_keys(self) -> None:
        """Waits until the keys are split."""
        plgpu.barrier_wait(self.memory.are_parts.at[self.key_slot])

    def await_warps(self) -> None:
        """Waits for the other warps of the warpgroup."""
        row_ops.barrier()

    # Operands

    def load_state(self, query_tile: Array) -> Array:
        """Loads the entries of the walk's row that weight a tile's query blocks."""
        state = self.refs.state.at[self.token.sequence]
        return ops.read(state.at[pl.ds(query_tile * TILE, TILE)], _BY_KEY)

    def write_keys(self) -> None:
        """Splits the keys into parts, for the whole thread block."""
        self.await_copy(self.key_slot)
        keys = self._load_keys()
        shift = _shifts_by(_largest_of_rows(keys), self.tiling.top)
        self.memory.key_shifts[self.key_slot] = shift
        _write_parts(keys, shift, self.memory.operands[1].at[self.key_slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.are_parts.at[self.key_slot])

    def _load_keys(self) -> Array:
        """Loads sums of keys, scaled to a full block in the token's block; 0 beyond it."""
        ref = self.memory.operands[0].at[self.key_slot]
        size, row = self.tiling.block_size, self.token.row

        def masked() -> Array:
            block = _blocks(self.tile, 0, self.tiling.chunk)
            last_count = (self.token.position + 1 - row * size).astype(jnp.float32)
            share = jnp.where(block == row, size / last_count, 1.0)
            return jnp.where(block <= row, ops.read(ref) * share, 0.0)

        return jax.lax.cond(self.tile == self.token.last, masked, lambda: ops.read(ref))

    def _load_queries(self, query_tile: Array, part: int) -> Array:
        """Loads sums of queries, in the token's block its own sketch per token; 0 beyond it."""
        ref, row = self.memory.operands[0].at[self.query_slot], self.token.row

        def masked() -> Array:
            token = self.memory.token.at[pl.ds(part * self.tiling.chunk, self.tiling.chunk)]
            token = ops.read(token, _BY_QUERY) * float(self.tiling.block_size)
            block = _blocks(query_tile, 0, self.tiling.chunk)
            query = jnp.where(block < row, ops.read(ref), 0.0)
            return jnp.where(block == row, ops.spread(token, query.shape, 1), query)

        return jax.lax.cond(query_tile == self.token.last, masked, lambda: ops.read(ref))

    def _write_token(self) -> None:
        """Writes the sketch of the token's query to shared memory."""
        source, memory = self.refs.token.at[self.token.sequence], self.memory
        if self.tiling.is_sketched:
            memory.token[...] = ops.read(source, _BY_QUERY)
            self.await_warps()
            return
        layout = plgpu.Layout.WG_STRIDED((WIDE,), 1)
        lines = [ops.read(source.at[x], layout) for x in range(source.shape[0])]
        projection = ops.read(self.refs.projection)
        memory.combined[...] = _sum([x.astype(jnp.float32) for x in lines])
        self.await_warps()
        combined = ops.spread(ops.read(memory.combined, _BY_QUERY), projection.shape, 1)
        memory.token[...] = jnp.sum(projection * combined, axis=1)
        self.await_warps()

    def _write_weights(self, query_tile: Array, state: Array, shift: Array) -> Array:
        """Writes the weights of the tile's query blocks, whose scores have a factor `2^shift`.

        Returns:
          The exponent of the weights' separate power of two.
        """
        row, power = self.token.row, self.tiling.power
        blocks = query_tile * TILE
        blocks = blocks + ops.matrix_index((TILE,), 0, _BY_KEY)
        own = jnp.where(blocks == row, plgpu.layout_cast(jnp.ones_like(state), _BY_KEY), 0.0)
        weight = jnp.where(blocks <= row, jnp.where(self.token.is_first, own, state), 0.0)
        exponent = exponent_of(weight)
        exponent = replace(exponent - power * shift, exponent == NO_EXPONENT, NO_EXPONENT)
        largest = self._maximum(exponent)
        largest = jnp.maximum(largest, NO_EXPONENT // 2) - self.tiling.weight_exponent
        self.memory.weights[self.half] = mantissa_of(weight) * power_of_two(exponent - largest)

        @pl.when(query_tile == self.token.last)
        def _() -> None:
            self.memory.factors[...] = own * power_of_two(-shift)

        self.await_warps()
        return largest

    def _maximum(self, x: Array) -> Array:
        return row_ops.maximum(x, self.memory.maxima, layout=_BY_KEY)

    # Scores

    def _fetch(self, query_tile: Array, part: int, *, is_first: bool, is_started: bool) -> None:
        """Copies a chunk of the queries, and of the keys unless these are shared.

        Args:
          query_tile: The tile.
          part: The chunk.
          is_first: Whether it is the tile's first chunk, for which the token's sketch is written.
          is_started: Whether its copies have been started.
        """
        if not is_started:
            self.await_warps()  # all warps have read the slots
            self.start_queries(query_tile, part)
        if is_first:
            pl.when(query_tile == self.token.last)(self._write_token)
        self.await_copy(self.query_slot)
        if not self.tiling.shares_keys:
            self.await_copy(self.key_slot)

    def _score(self, query_tile: Array, state: Array, *, is_only: bool) -> _Scores:
        """Computes a tile's scores, and during the product the weights."""
        if ops.is_interpreted():
            return self._score_interpreted(query_tile, state, is_only=is_only)
        if self.tiling.num_chunks == 1:
            return self._score_chunk(query_tile, state, is_only=is_only)
        return self._score_chunks(query_tile, state, is_only=is_only)

    def _score_chunk(self, query_tile: Array, state: Array, *, is_only: bool) -> _Scores:
        """Does `_score` for sketches of one chunk; one warpgroup splits the keys for both."""
        keys, queries = (self.memory.operands[1].at[x] for x in (self.key_slot, self.query_slot))
        # Load before the accumulator takes registers.
        self._fetch(query_tile, 0, is_first=True, is_started=is_only)
        query = self._load_queries(query_tile, 0)
        shift = _shifts_by(_largest_of_rows(query), self.tiling.top)
        _write_parts(query, shift, queries)
        plgpu.commit_smem()
        if is_only:
            self.await_keys()

        def multiply(accumulator: Any) -> tuple[Array, Array]:
            _multiply(accumulator, keys, queries)
            exponent = self._write_weights(query_tile, state, shift)
            return accumulator[...], exponent

        scores, exponent = pl.run_scoped(multiply, plgpu.ACC(_SHAPE, jnp.float32))
        key_shift = ops.read(self.memory.key_shifts.at[self.key_slot], _BY_KEY)
        return _Scores(scores, key_shift, exponent)

    def _score_chunks(self, query_tile: Array, state: Array, *, is_only: bool) -> _Scores:
        """Does `_score` for several chunks, which are read twice: for maxima, and for products."""
        keys, queries = (self.memory.operands[1].at[x] for x in (self.key_slot, self.query_slot))
        largest = []
        for part in range(self.tiling.num_chunks):
            is_first = part == 0
            self._fetch(query_tile, part, is_first=is_first, is_started=is_first and is_only)
            both = self._load_keys(), self._load_queries(query_tile, part)
            largest.append([_largest_of_rows(x) for x in both])
        key_shift, shift = (
            _shifts_by(functools.reduce(jnp.maximum, x), self.tiling.top)
            for x in zip(*largest, strict=True)
        )

        def write(part: int) -> None:
            self._fetch(query_tile, part, is_first=False, is_started=False)
            _write_parts(self._load_keys(), key_shift, keys)
            _write_parts(self._load_queries(query_tile, part), shift, queries)
            plgpu.commit_smem()

        write(0)  # before the accumulator takes registers

        def multiply(accumulator: Any) -> tuple[Array, Array]:
            _multiply(accumulator, keys, queries)
            for part in range(1, self.tiling.num_chunks):
                plgpu.wgmma_wait(0)
                write(part)
                _multiply(accumulator, keys, queries)
            exponent = self._write_weights(query_tile, state, shift)
            return accumulator[...], exponent

        scores, exponent = pl.run_scoped(multiply, plgpu.ACC(_SHAPE, jnp.float32))
        return _Scores(scores, key_shift, exponent)

    def _score_interpreted(self, query_tile: Array, state: Array, *, is_only: bool) -> _Scores:
        """Does `_score` for sketches of any size, as one product."""
        chunks = []
        for part in range(self.tiling.num_chunks):
            is_first = part == 0
            self._fetch(query_tile, part, is_first=is_first, is_started=is_first and is_only)
            chunks.append((self._load_keys(), self._load_queries(query_tile, part)))
        keys, queries = (jnp.concatenate(x, axis=1) for x in zip(*chunks, strict=True))
        key_shift, shift = (
            _shifts_by(_largest_of_rows(x), self.tiling.top) for x in (keys, queries)
        )
        scores = _multiply_interpreted(keys, queries, key_shift, shift)
        return _Scores(scores, key_shift, self._write_weights(query_tile, state, shift))

    # Sums of weighted powers

    def add(self, query_tile: Array, total: _Total, state: Array, *, is_only: bool) -> _Total:
        """Adds `Σ_i P_ji r_i` over the query blocks `i` of a tile.

        If the tile has the token's own block `t`, this also writes its scores `A_tj` to memory.

        Args:
          query_tile: The tile.
          total: Total of the earlier tiles.
          state: Entries of the walk's row for the tile.
          is_only: Whether it is the only tile; its copies are started, its keys not awaited.

        Returns:
          The new total.
        """
        tiling = self.tiling
        scores, key_shift, exponent = self._score(query_tile, state, is_only=is_only)

        def without_later_keys() -> Array:
            exist = _blocks(self.tile, 0) <= _blocks(query_tile, 1)
            return jnp.where(exist, scores, 0.0)

        scores = jax.lax.cond(query_tile == self.tile, without_later_keys, lambda: scores)
        factor = tiling.scale / tiling.block_size**2

        @pl.when(query_tile == self.token.last)
        def _() -> None:
            factors = ops.read(self.memory.factors, _BY_QUERY)
            direct = jnp.sum(scores * ops.spread(factors, _SHAPE, 1), axis=1)
            direct = direct * power_of_two(-key_shift) * factor
            self.refs.direct[self.token.sequence, self.tile] = direct

        if tiling.rectify:
            scores = jnp.maximum(scores, 0.0)
        shift = key_shift
        if not tiling.is_low:
            top = _POWER_EXPONENT // tiling.power - 1
            own_shift = _shifts_by(_largest_of_rows(scores), top)
            scores = scores * ops.spread(power_of_two(own_shift), _SHAPE, 0)
            shift = shift + own_shift
        powers = integer_power(scores, tiling.power)
        weights = ops.read(self.memory.weights.at[self.half], _BY_QUERY)
        sums = jnp.sum(powers * ops.spread(weights, _SHAPE, 1), axis=1)
        mantissa, lacks = math.frexp(factor)
        exponent = exponent - tiling.power * (shift - lacks)
        return add_scaled(total, (sums * mantissa**tiling.power, exponent))

    def is_live(self, query_tile: Array) -> Array:
        """Whether a tile of query blocks contributes to the key blocks."""
        is_below = (query_tile <= self.token.last) & (query_tile >= self.tile)
        return is_below & (jnp.logical_not(self.token.is_first) | (query_tile == self.token.last))

    def hand_over(self, total: _Total) -> None:
        """Passes the total to the other warpgroup."""
        self.memory.total[...], self.memory.total_exponent[...] = total
        plgpu.barrier_arrive(self.memory.is_done.at[0])

    def add_other(self, total: _Total) -> _Total:
        """Adds the other warpgroup's total."""
        plgpu.barrier_wait(self.memory.is_done.at[0])
        other = (ops.read(x, _BY_KEY) for x in (self.memory.total, self.memory.total_exponent))
        value, exponent = other
        return add_scaled(total, (value, exponent))

    def write(self, total: _Total) -> None:
        """Writes the part: floats, and one separate power of two for all of them."""
        value, exponent = total
        exponent = jnp.maximum(exponent + exponent_of(value), NO_EXPONENT)
        largest = self._maximum(exponent)
        part = mantissa_of(value) * power_of_two(exponent - largest + _PART_EXPONENT)
        self._store(jnp.where(value == 0.0, 0.0, part), largest)

    def write_nothing(self) -> None:
        """Writes a part of zeros."""
        self._store(_nothing()[0], NO_EXPONENT)

    def _store(self, part: Array, exponent: Any) -> None:
        self.refs.part[self.token.sequence, self.split, self.tile] = part
        self.refs.exponent[self.token.sequence, self.tile, self.split] = exponent


def _nothing() -> _Total:
    """Returns the total of no tiles."""
    none = jnp.full((TILE,), NO_EXPONENT, jnp.int32)
    return ops.full((TILE,), 0.0, _BY_KEY), plgpu.layout_cast(none, _BY_KEY)


def _sum(values: list[Array]) -> Array:
    """Sums pairwise, for smaller rounding errors and latency."""
    while len(values) > 1:
        pairs = list(zip(values[::2], values[1::2], strict=False))
        values = [one + other for one, other in pairs] + values[len(pairs) * 2 :]
    return values[0]


# The two kernels


def _begin(refs: _Refs, tiling: WalkTiling) -> tuple[Array, Array, _Token]:
    """Returns the thread block's place in its line, the line, and its sequence's token."""
    if tiling.overlaps:
        ops.await_previous_kernels()
    index, line, sequence = (jax.lax.axis_index(x) for x in ("index", "line", "sequence"))
    position = refs.position[sequence]
    row = position // tiling.block_size
    last, last_split = row // TILE, row // _QUERY_TILE
    is_first = refs.layers[0] * int(tiling.use_walk) == 0
    return index, line, _Token(sequence, position, row, last, last_split, is_first)


def _walk_few_tiles(*arrays: Any, tiling: WalkTiling, **scratch: Any) -> None:
    """Runs one thread block: a tile of key blocks, and one tile of query blocks per warpgroup."""
    refs, memory = _Refs(*arrays), _Memory(**scratch)
    index, line, token = _begin(refs, tiling)
    for half in tiling.halves():
        # A line has the tiles below the diagonal of pair `line`, then of the pair `line` before
        # last.
        is_corner = index == tiling.num_key_tiles
        is_straight = jnp.logical_not(is_corner)
        of_first = (is_corner & (half == 0)) | (is_straight & (index <= 2 * line))
        split = jnp.where(of_first, line, tiling.num_tiles - 1 - line)
        tile = jnp.where(of_first, index, index - (2 * line + 1))
        tile = jnp.where(is_corner, 2 * split + 1, tile)
        is_new = of_first | (split != line)  # the middle line has no partner
        # Without sharing, each warpgroup loads its own keys.
        has_keys = is_corner | (half == 0) if tiling.shares_keys else index >= 0
        tiles = _Tiles.of(tiling, refs, memory, token, half, split, tile, has_keys)
        query_tile = jnp.where(is_corner, tile, 2 * split + half)
        _walk_one_tile(tiles, query_tile, is_corner=is_corner, is_new=is_new)


def _walk_one_tile(tiles: _Tiles, query_tile: Array, *, is_corner: Array, is_new: Array) -> None:
    """Processes one warpgroup's only tile of query blocks.

    In a corner each warpgroup has a separate part; otherwise both share a part.
    """
    tiling, token = tiles.tiling, tiles.token
    # Start copies before it is known whether there is work.
    if tiling.shares_keys:
        pl.when(tiles.has_keys)(lambda: tiles.start_keys(0))
    tiles.start_queries(query_tile, 0)
    state = tiles.load_state(query_tile)
    is_live = tiles.is_live(query_tile)
    is_needed = 2 * tiles.split <= token.last
    is_needed &= jnp.logical_not(token.is_first) | (tiles.split == token.last_split)
    has_work = is_new & is_needed & (jnp.logical_not(is_corner) | is_live)

    @pl.when(jnp.logical_not(has_work))
    def _() -> None:  # a thread block may not end while copies to it are in flight
        tiles.await_copy(tiles.query_slot)
        pl.when(tiles.has_keys)(lambda: tiles.await_copy(tiles.key_slot))

    # The second kernel reads all parts at or below the diagonal, so write empty ones too.
    is_empty = is_new & jnp.logical_not(has_work) & (is_corner | (tiles.half == 0))
    pl.when(is_empty)(tiles.write_nothing)

    def add() -> _Total:
        return tiles.add(query_tile, _nothing(), state, is_only=True)

    @pl.when(has_work)
    def _() -> None:
        if tiling.shares_keys:
            pl.when(tiles.has_keys)(tiles.write_keys)

        @pl.when(jnp.logical_not(is_live))
        def _() -> None:
            tiles.await_copy(tiles.query_slot)
            if not tiling.shares_keys:
                tiles.await_copy(tiles.key_slot)

        total = jax.lax.cond(is_live, add, _nothing)
        gives = jnp.logical_not(is_corner) & (tiles.half == 1)
        pl.when(gives)(lambda: tiles.hand_over(total))

        @pl.when(jnp.logical_not(gives))
        def _() -> None:
            alone = jax.lax.cond(is_corner, lambda: total, lambda: tiles.add_other(total))
            tiles.write(alone)


def _walk_many_tiles(*arrays: Any, tiling: WalkTiling, **scratch: Any) -> None:
    """Runs one thread block: a tile of key blocks, and every 16th pair of query tiles."""
    refs, memory = _Refs(*arrays), _Memory(**scratch)
    index, line, token = _begin(refs, tiling)
    for half in tiling.halves():
        has_keys = half == 0 if tiling.shares_keys else index >= 0  # or each loads its own
        _walk_line(_Tiles.of(tiling, refs, memory, token, half, line, index, has_keys))


def _walk_line(tiles: _Tiles) -> None:
    """Processes one warpgroup's tile of every pair of tiles of query blocks."""
    tiling, token = tiles.tiling, tiles.token
    if tiling.shares_keys:

        @pl.when(tiles.has_keys)
        def _() -> None:
            tiles.start_keys(0)
            tiles.write_keys()

        tiles.await_keys()
    # This split's first pair at or below the diagonal, or in the first layer the token's pair.
    first = jnp.where(token.is_first, token.last_split, 0)
    first = jnp.maximum(first, tiles.tile // _HALVES)
    splits = tiling.num_splits
    first = first + (tiles.split + splits - first % splits) % splits
    steps = jnp.maximum(token.last_split - first + splits, 0) // splits

    def step(index: Array, total: _Total) -> _Total:
        query_tile = _HALVES * (first + index * splits) + tiles.half

        def add() -> _Total:
            state = tiles.load_state(query_tile)
            return tiles.add(query_tile, total, state, is_only=False)

        return jax.lax.cond(tiles.is_live(query_tile), add, lambda: total)

    total = jax.lax.fori_loop(0, steps, step, _nothing())
    pl.when(tiles.half == 1)(lambda: tiles.hand_over(total))
    pl.when(tiles.half == 0)(lambda: tiles.write(tiles.add_other(total)))


# Launch


@dataclasses.dataclass(frozen=True)
class HeadQueries:
    """Queries of one token per sequence, whose mean over heads the kernel sketches.

    Attributes:
      query: Queries `[B, N, H]`.
      omega: The sketch `[H, R]`.
    """

    query: Float[Array, "B N H"]
    omega: Float[np.ndarray, "H R"]

    @staticmethod
    def fit(num_heads: int, omega: Float[np.ndarray, "H R"]) -> bool:
        """Whether the kernel can sketch this number and size of heads."""
        head_dim, size = omega.shape
        fills_lines = WIDE % head_dim == 0 and num_heads * head_dim % WIDE == 0
        return fills_lines and size % TILE == 0

    @property
    def rows(self) -> Float[Array, "B _ 128"]:
        """The queries, heads side by side in rows of `WIDE` entries."""
        return self.query.reshape(self.query.shape[0], -1, WIDE)

    @property
    def projection(self) -> Float[Array, "R 128"]:
        """The projection of rows of `WIDE` entries, whose sum gives the mean's sketch."""
        num_heads, head_dim = self.query.shape[1:]
        share = jnp.asarray(self.omega).T * (1.0 / num_heads)
        return jnp.tile(share, (1, WIDE // head_dim))


class RowParts(NamedTuple):
    """The walk's next row, in parts, and the token's own scores.

    Attributes:
      value: Floats, float32 `[B, splits, tiles, 64]`. With few tiles, parts above the diagonal are
        not written.
      exponent: Exponents of each tile's and part's power of two, int32 `[B, tiles, 16]`.
      direct: `A_tj`, the scores of the token's row, float32 `[B, tiles, 64]`.
    """

    value: Float[Array, "B S T 64"]
    exponent: Int[Array, "B T 16"]
    direct: Float[Array, "B T 64"]


def walk_row_kernel(
    token: Float[Array, "B C R"] | HeadQueries,
    query_sums: Float[Array, "B J C R"],
    key_sums: Float[Array, "B J C R"],
    state: Float[Array, "B 1 J"],
    layers: Int[Array, "1"],
    positions: Int[Array, "B"],
    *,
    tiling: WalkTiling,
    height: int,
    interpret: bool,
) -> RowParts:
    """Computes scores of one token per sequence, and its next row of the walk in parts.

    Args:
      token: Sketches of the tokens' queries, averaged over heads, or queries to sketch.
      query_sums: Sums of queries in sketch space, with or without the token's own.
      key_sums: Sums of keys in sketch space, including the token's own.
      state: The token's row of the walk so far.
      layers: Number of layers walked so far; 0 starts the walk.
      positions: Positions of the tokens.
      tiling: Static parameters.
      height: Tiles of key blocks in the results, with padding.
      interpret: Whether the interpreter runs the kernel, in which one thread has both halves.

    Returns:
      The parts.
    """
    batch = query_sums.shape[0]
    padding = tiling.num_tiles * _QUERY_TILE - tiling.num_blocks

    def flat(sums: Array) -> Array:
        sums = sums.reshape(batch, tiling.num_blocks, tiling.size)
        return jnp.pad(sums, ((0, 0), (0, padding), (0, 0))) if padding else sums

    if isinstance(token, HeadQueries):
        rows, projection = token.rows, token.projection
    else:
        rows, projection = token.reshape(batch, tiling.size), jnp.zeros((1, 1), jnp.float32)
    walk: Callable[..., None] = _walk_few_tiles if tiling.has_few_tiles else _walk_many_tiles
    parts = ops.kernel(
        functools.partial(walk, tiling=tiling),
        out_type=[
            jax.ShapeDtypeStruct((batch, tiling.num_splits, height, TILE), jnp.float32),
            jax.ShapeDtypeStruct((batch, height, MAX_SPLITS), jnp.int32),
            jax.ShapeDtypeStruct((batch, height, TILE), jnp.float32),
        ],
        grid=(*tiling.grid, batch),
        grid_names=("index", "line", "sequence"),
        **({} if interpret else {"num_threads": _HALVES, "thread_name": "half"}),
        scratch_types=_scratch(tiling),
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        detect_races=False,
        kernel_name="sketchwalk_walk_row",
    )(
        rows,
        projection,
        flat(query_sums),
        flat(key_sums),
        jnp.pad(state[:, 0], ((0, 0), (0, padding))) if padding else state[:, 0],
        positions,
        layers,
    )
    return RowParts(*parts)
