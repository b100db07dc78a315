"""A tile's part of the walk's next row: scores, their powers, and the sum over query blocks."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels import row_ops, warp_ops
from sketchwalk_jax.pallas_kernels import score_tile as tiles
from sketchwalk_jax.pallas_kernels.score_tile import TILE, spread
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    add_scaled,
    exponent_of,
    integer_power,
    mantissa_of,
    power_of_two,
    replace,
)

# Exponents, so that the sums of a tile stay below 2^127: of the largest power, and of the weights.
_POWER_EXPONENT = 80
_WEIGHT_EXPONENT = 24
_LARGEST = 127
_LOW_TOP = 3  # of operands, so that powers need no scale: lower ones would lose bits as float16
_LAYOUT = plgpu.Layout.WGMMA
BY_KEY, BY_QUERY = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_SHAPE = (TILE, TILE)
Total = tuple[Array, Array]  # of each key block: a float, and the power of two that it lacks


def load(ref: Any, layout: Any = _LAYOUT) -> Array:
    """What a reference holds, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _blocks(tile: Array, axis: int, width: int = TILE) -> Array:
    shape = (TILE, width)
    return tile * TILE + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one warpgroup: 64 key blocks, and 64 query blocks at a time.

    Constant factors of all scores are left to the end, and the row's own blocks, which alone need
    masks, have branches of their own: what all tiles go through is what takes the time.

    Attributes:
      memory: Shared memory, as `walk_row.scratch` names it.
      references: Of `query`, `key` and `state` of one sequence, and of the tile in `direct`.
      half: Which of the program's warpgroups this is.
      tile: Of key blocks.
      key_slot: Where the keys are in shared memory.
      query_slot: Where the queries are.
      write_token: Leaves the sketch of the token's query in shared memory.
      chunk: Entries of the sketches that are multiplied at a time.
      num_chunks: How many of these make a sketch.
      shares_keys: Whether the parts of the keys stay in shared memory, for both warpgroups.
      is_single: Whether there is a single tile of queries, whose copies have been started.
      scale: Of the scores of means.
      block_size: Tokens per block.
      power: Exponent of the transition.
      rectify: Whether negative scores count as zero.
      interpret: Whether the interpreter runs the kernel.
    """

    memory: dict[str, Any]
    references: dict[str, Any]
    half: Array
    tile: Array
    key_slot: Array
    query_slot: Array
    write_token: Any
    chunk: int
    num_chunks: int
    shares_keys: bool
    is_single: bool
    scale: float
    block_size: int
    power: int
    rectify: bool
    interpret: bool

    @property
    def _weight_exponent(self) -> int:
        """Of the weights, if the powers of scores of low operands are not scaled."""
        size = self.chunk * self.num_chunks
        largest_score = (size - 1).bit_length() + 2 * (_LOW_TOP + 1)
        most = _LARGEST - self.power * largest_score - TILE.bit_length()
        return min(most, _WEIGHT_EXPONENT)

    @property
    def _is_low(self) -> bool:
        """Whether powers are not scaled, which takes no look at their peaks.

        What they are too small for then, even so, is less than the scores' rounding.
        """
        return self._weight_exponent >= 0

    def _shifts_by(self, peaks: Array) -> Array:
        return tiles.shifts_by(peaks, _LOW_TOP if self._is_low else tiles.TOP)

    def start_copy(self, name: str, tile: Array, part: int, slot: Array) -> None:
        """Starts the copy of a chunk of 64 sketches to shared memory."""
        rows, entries = pl.ds(tile * TILE, TILE), pl.ds(part * self.chunk, self.chunk)
        source, arrived = self.references[name].at[rows, entries], self.memory["arrived"]
        target = self.memory["operands"][0].at[slot]
        plgpu.copy_gmem_to_smem(source, target, arrived.at[slot])

    def start_copies(self, query_tile: Array, part: int) -> None:
        """Starts the copies of the queries, and of the keys where these are needed anew."""
        self.start_copy("query", query_tile, part, self.query_slot)
        if not self.shares_keys:
            self.start_copy("key", self.tile, part, self.key_slot)

    def arrive(self, slot: Array) -> None:
        """Waits for a copy."""
        plgpu.barrier_wait(self.memory["arrived"].at[slot])

    def load_state(self, query_tile: Array) -> Array:
        """The entries of the walk's row that weigh a tile's query blocks."""
        return load(self.references["state"].at[pl.ds(query_tile * TILE, TILE)], BY_KEY)

    def wait(self) -> None:
        """Waits for the other warps of the warpgroup."""
        warp_ops.barrier(interpret=self.interpret)

    def await_keys(self) -> None:
        """Waits for the parts of the keys."""
        plgpu.barrier_wait(self.memory["are_parts"].at[self.key_slot])

    def write_keys(self, position: Array) -> None:
        """Divides the keys into parts, for the whole program."""
        self.arrive(self.key_slot)
        keys = self._load_keys(position)
        shift = self._shifts_by(tiles.peaks_of(keys))
        self.memory["key_shifts"][self.key_slot] = shift
        tiles.write_parts(keys, shift, self.memory["operands"][1].at[self.key_slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory["are_parts"].at[self.key_slot])

    def _load_keys(self, position: Array) -> Array:
        ref = self.memory["operands"][0].at[self.key_slot]
        row = position // self.block_size

        def masked() -> Array:
            block = _blocks(self.tile, 0, self.chunk)
            last_count = (position + 1 - row * self.block_size).astype(jnp.float32)
            share = jnp.where(block == row, self.block_size / last_count, 1.0)
            return jnp.where(block <= row, load(ref) * share, 0.0)

        return jax.lax.cond(self.tile == row // TILE, masked, lambda: load(ref))

    def _load_queries(self, query_tile: Array, row: Array, part: int) -> Array:
        ref = self.memory["operands"][0].at[self.query_slot]

        def masked() -> Array:
            token = self.memory["token"].at[pl.ds(part * self.chunk, self.chunk)]
            token = load(token, BY_QUERY) * float(self.block_size)
            block = _blocks(query_tile, 0, self.chunk)
            query = jnp.where(block < row, load(ref), 0.0)
            return jnp.where(block == row, spread(token, query.shape, 1), query)

        return jax.lax.cond(query_tile == row // TILE, masked, lambda: load(ref))

    def _weigh(
        self, query_tile: Array, row: Array, is_first: Array, state: Array, shift: Array
    ) -> Array:
        """Writes weights of the tile's rows; returns the power of two that they all lack."""
        blocks = query_tile * TILE
        blocks = blocks + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_KEY)
        own = jnp.where(blocks == row, plgpu.layout_cast(jnp.ones_like(state), BY_KEY), 0.0)
        weight = jnp.where(blocks <= row, jnp.where(is_first, own, state), 0.0)
        exponent = exponent_of(weight)
        exponent = replace(exponent - self.power * shift, exponent == NO_EXPONENT, NO_EXPONENT)
        largest = row_ops.maximum(
            exponent, self.memory["maxima"], layout=BY_KEY, interpret=self.interpret
        )
        top = self._weight_exponent if self._is_low else _WEIGHT_EXPONENT
        largest = jnp.maximum(largest, NO_EXPONENT // 2) - top
        weights = mantissa_of(weight) * power_of_two(exponent - largest)
        self.memory["weights"][self.half] = weights

        @pl.when(query_tile == row // TILE)
        def _() -> None:
            self.memory["factors"][...] = own * power_of_two(-shift)

        self.wait()
        return largest

    def _score(
        self, query_tile: Array, state: Array, position: Array, is_first: Array
    ) -> tuple[Array, Array, Array]:
        """Scores of scaled keys and queries, the keys' exponents, what `_weigh` returns."""
        row = position // self.block_size
        parts, chunks = self.memory["operands"][1], range(self.num_chunks)
        keys, queries = (parts.at[slot] for slot in (self.key_slot, self.query_slot))
        is_started = [self.is_single]

        def weigh(shift: Array) -> Array:
            return self._weigh(query_tile, row, is_first, state, shift)

        def fetch(part: int) -> None:
            is_next = len(is_started) > 1
            if not is_started[-1]:
                self.wait()  # all have read what was there
                self.start_copies(query_tile, part)
            if not is_next:
                pl.when(query_tile == row // TILE)(self.write_token)
            is_started.append(False)
            self.arrive(self.query_slot)
            if not self.shares_keys:
                self.arrive(self.key_slot)

        def load_both(part: int) -> list[Array]:
            fetch(part)
            return [self._load_keys(position), self._load_queries(query_tile, row, part)]

        if self.interpret:
            chunks_of_both = zip(*(load_both(part) for part in chunks), strict=True)
            both = [jnp.concatenate(x, axis=1) for x in chunks_of_both]
            shifts = [self._shifts_by(tiles.peaks_of(x)) for x in both]
            return tiles.interpreted_scores(both, shifts), shifts[0], weigh(shifts[1])
        key_shift: Any = None
        shift: Any = None
        if self.num_chunks > 1:
            peaks = [[tiles.peaks_of(x) for x in load_both(part)] for part in chunks]
            key_shift, shift = (
                self._shifts_by(functools.reduce(jnp.maximum, x)) for x in zip(*peaks, strict=True)
            )

        def write_chunk(part: int, shift: Any) -> Array:
            fetch(part)
            if not self.shares_keys:
                tiles.write_parts(self._load_keys(position), key_shift, keys)
            query = self._load_queries(query_tile, row, part)
            if shift is None:
                shift = self._shifts_by(tiles.peaks_of(query))
            tiles.write_parts(query, shift, queries)
            plgpu.commit_smem()
            return shift

        shift = write_chunk(0, shift)  # before there is an accumulator, which takes registers
        if self.shares_keys and self.is_single:
            self.await_keys()

        def accumulate(accumulator: Any) -> tuple[Array, Array]:
            for part in chunks:
                if part:
                    plgpu.wgmma_wait(0)
                    write_chunk(part, shift)
                tiles.multiply(accumulator, keys, queries)
            largest = weigh(shift)
            return accumulator[...], largest

        scores, largest = pl.run_scoped(accumulate, plgpu.ACC(_SHAPE, jnp.float32))
        if self.shares_keys:
            key_shift = load(self.memory["key_shifts"].at[self.key_slot], BY_KEY)
        return scores, key_shift, largest

    def add(
        self,
        query_tile: Array,
        total: Total,
        state: Array | None,
        position: Array,
        is_first: Array,
    ) -> Total:
        """Adds what a tile of query blocks brings.

        Args:
          query_tile: The tile.
          total: Of the tiles before.
          state: Entries of the walk's row for the tile, where they are there already.
          position: Of the token.
          is_first: Whether the walk starts in this layer.

        Returns:
          The total of both.
        """
        row, power = position // self.block_size, self.power
        if state is None:
            state = self.load_state(query_tile)
        scores, key_shift, exponent = self._score(query_tile, state, position, is_first)

        def above_diagonal() -> Array:
            exist = _blocks(self.tile, 0) <= _blocks(query_tile, 1)
            return jnp.where(exist, scores, 0.0)

        scores = jax.lax.cond(query_tile == self.tile, above_diagonal, lambda: scores)
        factor = self.scale / self.block_size**2

        @pl.when(query_tile == row // TILE)
        def _() -> None:
            factors = load(self.memory["factors"], BY_QUERY)
            direct = jnp.sum(scores * spread(factors, _SHAPE, 1), axis=1)
            self.references["direct"][...] = direct * power_of_two(-key_shift) * factor

        if self.rectify:
            scores = jnp.maximum(scores, 0.0)
        shift = key_shift
        if not self._is_low:
            top = _POWER_EXPONENT // power - 1
            own_shift = jnp.minimum(top - exponent_of(tiles.peaks_of(scores)), _LARGEST)
            scores = scores * spread(power_of_two(own_shift), _SHAPE, 0)
            shift = shift + own_shift
        powers = integer_power(scores, power)
        weights = load(self.memory["weights"].at[self.half], BY_QUERY)
        sums = jnp.sum(powers * spread(weights, _SHAPE, 1), axis=1)
        mantissa, lacks = math.frexp(factor)
        exponent = exponent - power * (shift - lacks)
        return add_scaled(total, (sums * mantissa**power, exponent))
