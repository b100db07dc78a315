"""Tiles of the prefill kernel: which ones a program takes, what they need, and their loader."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUERIES = 64
KEYS = 128
_HALF = KEYS // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is static about a call.

    Attributes:
      batch: Sequences.
      tiles: Tiles of 64 queries in a sequence.
      heads: Query heads.
      kv_heads: Key/value heads.
      head_dim: Features per head, 64 or 128.
      lists: Lists per row: 1, `kv_heads` or `heads`.
      subblocks: Pieces of 64 keys in a block.
      stages: Steps of keys in shared memory.
      value_stages: Steps of values in shared memory.
      takes_turns: Whether the warpgroups that compute issue their products in turns.
      frees_early: Whether a tile's queries are given up within its last step, or after it.
      overlaps: Whether weights are computed while the values of the step before are multiplied.
      heads_first: Whether tiles of one key/value head follow each other.
      exponent: Factor of the scores in powers of 2.
      interpret: Whether the interpreter runs the kernel.
    """

    batch: int
    tiles: int
    heads: int
    kv_heads: int
    head_dim: int
    lists: int
    subblocks: int
    stages: int
    value_stages: int
    takes_turns: bool
    frees_early: bool
    overlaps: bool
    heads_first: bool
    exponent: float
    interpret: bool

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def computing(self) -> int:
        """Warpgroups that compute, each for one head; they need one list and the same keys."""
        return 1 if self.group == 1 or self.lists == self.heads else 2

    @property
    def units(self) -> int:
        """Tiles of all sequences and heads."""
        return self.batch * self.tiles * self.kv_heads * self.head_pairs

    @property
    def head_pairs(self) -> int:
        """Programs that the heads of a group need."""
        return -(-self.group // self.computing)


@dataclasses.dataclass(frozen=True)
class Refs:
    """Arrays in global memory, then shared memory and barriers."""

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
    outputs: Any
    keys: Any
    values: Any
    lse: Any
    filled: Any
    freed: Any
    single: Any


class Barriers:
    """The barriers of a program, found by what they guard.

    `filled` tells that copies have arrived, `freed` that all have read them. Each has a barrier for
    the keys and one for the values of each slot, and one for the queries of each warpgroup, which
    reads no others.
    """

    def __init__(self, plan: Plan, refs: Refs) -> None:
        """Takes them from a program's references."""
        self._stages = plan.stages
        self._computing = plan.computing
        self._refs = refs

    def keys(self, which: str, slot: Any) -> Any:
        """`"filled"` or `"freed"` for the keys of a slot."""
        return getattr(self._refs, which).at[slot]

    def values(self, which: str, slot: Any) -> Any:
        """`"filled"` or `"freed"` for the values of a slot."""
        return getattr(self._refs, which).at[self._stages + slot]

    def queries(self, which: str, warpgroup: Any) -> Any:
        """`"filled"` or `"freed"` for the queries of a warpgroup."""
        first = 3 if which == "filled" else 3 + self._computing
        return self._refs.single.at[first + warpgroup]

    def turn(self, warpgroup: Any) -> Any:
        """Tells a warpgroup that its turn has come."""
        return self._refs.single.at[warpgroup]

    @property
    def tail(self) -> Any:
        """Tells the loader that values have arrived to which it must attend."""
        return self._refs.single.at[2]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Which tiles a program takes: every `programs`-th from its own number on."""

    program: Any
    programs: int

    def turns(self, plan: Plan) -> Any:
        """Tiles of this program."""
        return jax.lax.div(plan.units - 1 - self.program, self.programs) + 1

    def tile(self, plan: Plan, turn: Any) -> "Tile":
        """This program's tile of a turn; the last tile of all for turns beyond the last."""
        place = jnp.minimum(self.program + turn * self.programs, plan.units - 1)
        return Tile.at(plan, place)


@dataclasses.dataclass(frozen=True)
class Tile:
    """64 queries of one sequence, in the heads that one program takes.

    Attributes:
      row: Tile index within the sequence.
      batch: Sequence.
      kv_head: Key/value head.
      pair: Which heads of the group.
    """

    row: Any
    batch: Any
    kv_head: Any
    pair: Any

    @classmethod
    def at(cls, plan: Plan, place: Any) -> "Tile":
        """The tile at a place of the order: long lists, which are those of late rows, first."""
        place, pair = _divide(place, plan.head_pairs)
        if plan.heads_first:
            place, batch = _divide(place, plan.batch)
            kv_head, row = _divide(place, plan.tiles)
        else:
            place, kv_head = _divide(place, plan.kv_heads)
            row, batch = _divide(place, plan.batch)
        return cls(plan.tiles - 1 - row, batch, kv_head, pair)

    def head(self, plan: Plan, warpgroup: Any) -> Any:
        """Query head of a warpgroup; beyond the group's end once more its last one."""
        member = jnp.minimum(self.pair * plan.computing + warpgroup, plan.group - 1)
        return self.kv_head * plan.group + member

    def is_spare(self, plan: Plan, warpgroup: Any) -> Any:
        """Whether the warpgroup has no head of its own."""
        return self.pair * plan.computing + warpgroup >= plan.group

    def facts(self, plan: Plan, refs: Refs) -> tuple[Any, Any, Any]:
        """Pieces of 64 keys in the list, position of the first query, keys in the sequence."""
        count = refs.counts[self.batch, self._list(plan), jax.lax.div(self.row, plan.subblocks)]
        start = (refs.first_block[self.batch] * plan.subblocks + self.row) * QUERIES
        length = refs.kv_lengths[self.batch]
        return jnp.where(start < length, count * plan.subblocks, 0), start, length

    def pieces(self, plan: Plan, refs: Refs, count: Any, step: Any) -> tuple[Any, Any]:
        """Indices of the two pieces of 64 keys of a step; the later one comes first.

        Of an odd number of pieces, the first step has the last one twice.
        """
        first = jnp.maximum(count - 2 + jax.lax.rem(count, 2) - 2 * step, 0)
        second = jnp.minimum(first + 1, count - 1)
        return self._piece(plan, refs, first), self._piece(plan, refs, second)

    def _list(self, plan: Plan) -> Any:
        if plan.lists == 1:
            return 0
        return self.kv_head if plan.lists == plan.kv_heads else self.head(plan, 0)

    def _piece(self, plan: Plan, refs: Refs, entry: Any) -> Any:
        row = jax.lax.div(self.row, plan.subblocks)
        place, rest = _divide(entry, plan.subblocks)
        return refs.ids[self.batch, self._list(plan), row, place] * plan.subblocks + rest


def num_steps(count: Any) -> Any:
    """Steps of two pieces."""
    return jax.lax.div(count + 1, 2)


def _divide(x: Any, divisor: int) -> tuple[Any, Any]:
    if divisor == 1:
        return x, 0
    return jax.lax.div(x, divisor), jax.lax.rem(x, divisor)


def load_tiles(plan: Plan, refs: Refs, spread: Spread) -> None:
    """Copies what the program's tiles need into shared memory, as far ahead as there is room."""
    layer = refs.layer[0]

    def load(turn: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        done, *facts = state
        following = spread.tile(plan, turn + 1).facts(plan, refs)
        tile = spread.tile(plan, turn)
        steps = num_steps(facts[0])

        @pl.when(steps > 0)
        def _() -> None:
            _load_tile(plan, refs, tile, facts, layer, done)

        return done + steps, *following

    start = (jnp.int32(0), *spread.tile(plan, 0).facts(plan, refs))
    jax.lax.fori_loop(0, spread.turns(plan), load, start)


def _load_tile(plan: Plan, refs: Refs, tile: Tile, facts: Any, layer: Any, done: Any) -> None:
    count, _, length = facts
    barriers = Barriers(plan, refs)
    pieces = tile.pieces(plan, refs, count, 0)
    later = tile.pieces(plan, refs, count, 1)

    def load_keys(pieces: tuple[Any, Any], slot: Any) -> None:
        plgpu.barrier_wait(barriers.keys("freed", slot))
        for half, piece in enumerate(pieces):
            source, target = _piece(refs.key, refs.keys, tile, layer, piece, slot, half)
            plgpu.copy_gmem_to_smem(source, target, barriers.keys("filled", slot))

    def load_values(pieces: tuple[Any, Any], slot: Any) -> None:
        plgpu.barrier_wait(barriers.values("freed", slot))
        for half, piece in enumerate(pieces):
            source, target = _piece(refs.value, refs.values, tile, layer, piece, slot, half)
            plgpu.copy_gmem_to_smem(source, target, barriers.values("filled", slot))

    def load_last_values(pieces: tuple[Any, Any], slot: Any) -> None:
        plgpu.barrier_wait(barriers.values("freed", slot))
        for half, piece in enumerate(pieces):
            source, target = _piece(refs.value, refs.values, tile, layer, piece, slot, half)
            present = length - piece * _HALF
            _load_present(plan, source, target, present, barriers, slot)

    load_keys(pieces, jax.lax.rem(done, plan.stages))
    _load_queries(plan, refs, tile, barriers)
    load_last_values(pieces, jax.lax.rem(done, plan.value_stages))

    def step(index: Any, pieces: tuple[Any, Any]) -> tuple[Any, Any]:
        later = tile.pieces(plan, refs, count, index + 2)  # in time for the next step
        following = done + index + 1
        load_keys(pieces, jax.lax.rem(following, plan.stages))
        load_values(pieces, jax.lax.rem(following, plan.value_stages))
        return later

    jax.lax.fori_loop(0, num_steps(count) - 1, step, later)


def _piece(
    source: Any, target: Any, tile: Tile, layer: Any, piece: Any, slot: Any, half: int
) -> tuple[Any, Any]:
    """64 keys or values of the cache, and the half of a slot that takes them."""
    source = source.at[layer, tile.batch, pl.ds(piece * _HALF, _HALF), tile.kv_head]
    return source, target.at[slot, pl.ds(half * _HALF, _HALF)]


def _load_queries(plan: Plan, refs: Refs, tile: Tile, barriers: Barriers) -> None:
    """Copies the queries of each warpgroup as soon as it needs the last tile's no more."""
    rows = pl.ds(tile.row * QUERIES, QUERIES)
    for warpgroup in range(plan.computing):
        plgpu.barrier_wait(barriers.queries("freed", warpgroup))
        plgpu.copy_gmem_to_smem(
            refs.query.at[tile.batch, rows, tile.head(plan, warpgroup)],
            refs.queries.at[warpgroup],
            barriers.queries("filled", warpgroup),
        )


def _load_present(
    plan: Plan, source: Any, target: Any, present: Any, barriers: Barriers, slot: Any
) -> None:
    """Copies values of which only the first may be present in the sequence.

    What lies beyond its end may be NaN, and a weight of 0 would not erase it.
    """

    @pl.when(present >= _HALF)
    def _() -> None:
        plgpu.copy_gmem_to_smem(source, target, barriers.values("filled", slot))

    @pl.when(present < _HALF)
    def _() -> None:
        plgpu.copy_gmem_to_smem(source, target, barriers.tail)
        plgpu.barrier_wait(barriers.tail)
        for column in range(0, plan.head_dim, 64):
            part = target.at[:, pl.ds(column, 64)]
            index = plgpu.broadcasted_iota(jnp.int32, (_HALF, 64), 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(index < present, part[...], jnp.zeros_like(part))
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.values("filled", slot))
