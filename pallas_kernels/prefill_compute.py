"""What a computing warpgroup of the prefill kernel does: one head's attention, tile after tile."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sketchwalk_jax.pallas_kernels import ops
from sketchwalk_jax.pallas_kernels.prefill_tiles import (
    KEYS,
    QUERIES,
    Barriers,
    Plan,
    Refs,
    Spread,
    Tile,
    num_steps,
)

# A finite stand-in for log(0), and a running maximum above it to begin with: the weight of a
# masked score is then exactly 2^(-5e29 c) = 0, in rows without a visible key too.
_MASKED = -1e30
_FIRST_MAXIMUM = -5e29


def compute_tiles(plan: Plan, refs: Refs, spread: Spread, warpgroup: Any) -> None:
    """The program's tiles, for the head of one warpgroup."""
    barriers = Barriers(plan, refs)
    for slot in range(plan.stages):  # all of shared memory is free
        plgpu.barrier_arrive(barriers.keys("freed", slot))
    for slot in range(plan.value_stages):
        plgpu.barrier_arrive(barriers.values("freed", slot))
    plgpu.barrier_arrive(barriers.queries("freed", warpgroup))
    if plan.computing == 2 and plan.takes_turns:

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.barrier_arrive(barriers.turn(0))

    def compute(turn: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        done, count = state
        following = spread.tile(plan, turn + 1).facts(plan, refs)[0]  # in time
        tile = spread.tile(plan, turn)
        steps = num_steps(count)
        head = _Head(plan, refs, tile, warpgroup)

        @pl.when(steps > 0)
        def _() -> None:
            head.attend(count, done)

        @pl.when(steps == 0)
        def _() -> None:
            head.write_zeros()

        return done + steps, following

    start = (jnp.int32(0), spread.tile(plan, 0).facts(plan, refs)[0])
    jax.lax.fori_loop(0, spread.turns(plan), compute, start)
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Head:
    """One query head of one tile."""

    plan: Plan
    refs: Refs
    tile: Tile
    warpgroup: Any

    @property
    def barriers(self) -> Barriers:
        """The program's barriers."""
        return Barriers(self.plan, self.refs)

    def attend(self, count: Any, done: Any) -> None:
        """Computes and writes attention over `count` pieces. `done` steps went before."""
        shape = (QUERIES, self.plan.head_dim)
        ops.with_accumulator(
            lambda sums: self._attend(sums, count, done), shape, interpret=self.plan.interpret
        )

    def _attend(self, sums: ops.Accumulator, count: Any, done: Any) -> None:
        plan, refs, barriers = self.plan, self.refs, self.barriers
        _, start, length = self.tile.facts(plan, refs)
        pieces = self.tile.pieces(plan, refs, count, 0)
        plgpu.barrier_wait(barriers.queries("filled", self.warpgroup))
        slot = jax.lax.rem(done, plan.stages)
        plgpu.barrier_wait(barriers.keys("filled", slot))

        def first_scores(products: ops.Accumulator) -> Any:
            products.add_product(refs.queries.at[self.warpgroup], _transposed(refs.keys, slot))
            return products.load()

        scores = self._with_products(first_scores)
        plgpu.barrier_arrive(barriers.keys("freed", slot))
        rest = num_steps(count) - 1
        if plan.frees_early:
            self._free_queries(rest == 0)
        scores = _mask(scores, pieces, count, start, length)
        state = (ops.row_vector(QUERIES, _FIRST_MAXIMUM), ops.row_vector(QUERIES, 0.0))
        weights, _, state = self._soften(scores, state)
        plgpu.barrier_wait(barriers.values("filled", jax.lax.rem(done, plan.value_stages)))

        def step(index: Any, carry: Any) -> Any:
            return self._step(sums, done + index, index == rest - 1, carry)

        carry = (self._rounded(weights), state)
        weights, (maximum, denominator) = sums.loop(rest, step, carry)
        if not plan.frees_early:
            self._free_queries(True)
        last = jax.lax.rem(done + rest, plan.value_stages)
        sums.add_product(weights, refs.values.at[last])
        out = sums.load()
        plgpu.barrier_arrive(barriers.values("freed", last))
        is_empty = denominator == 0.0
        safe = jnp.where(is_empty, 1.0, denominator)
        lse = (maximum * plan.exponent + jnp.log2(safe)) * math.log(2.0)
        out = out * ops.along_rows(1.0 / safe, plan.head_dim)
        self._write(out, jnp.where(is_empty, -jnp.inf, lse))

    def _free_queries(self, is_last: Any) -> None:
        """Lets the next tile's queries come while the rest of this one is computed."""

        @pl.when(is_last)
        def _() -> None:
            plgpu.barrier_arrive(self.barriers.queries("freed", self.warpgroup))

    def _step(self, sums: ops.Accumulator, done: Any, is_last: Any, carry: Any) -> Any:
        """Adds the previous step's values while this step's scores become weights.

        Until that product is done nothing may write to the registers of its weights: the new ones
        are rounded only then. The wait for this step's values stands before that because the
        assembler would move the product's own wait ahead of the computation otherwise.
        """
        plan, refs, barriers = self.plan, self.refs, self.barriers
        weights, state = carry
        previous = jax.lax.rem(done, plan.value_stages)
        slot = jax.lax.rem(done + 1, plan.stages)
        takes_turns = plan.computing == 2 and plan.takes_turns
        plgpu.barrier_wait(barriers.keys("filled", slot))
        if takes_turns:
            plgpu.barrier_wait(barriers.turn(self.warpgroup))

        def products(products: ops.Accumulator) -> Any:
            products.add_product(refs.queries.at[self.warpgroup], _transposed(refs.keys, slot))
            sums.add_product(weights, refs.values.at[previous])
            if takes_turns:
                plgpu.barrier_arrive(barriers.turn(1 - self.warpgroup))
            return products.load(in_flight=1 if plan.overlaps else 0)

        scores = self._with_products(products)
        plgpu.barrier_arrive(barriers.keys("freed", slot))
        if plan.frees_early:
            self._free_queries(is_last)
        weights, decay, state = self._soften(scores, state)
        plgpu.barrier_wait(barriers.values("filled", jax.lax.rem(done + 1, plan.value_stages)))
        total = sums.load()
        plgpu.barrier_arrive(barriers.values("freed", previous))
        sums.store(total * ops.along_rows(decay, plan.head_dim))
        return self._rounded(weights), state

    def _rounded(self, weights: Any) -> Any:
        return weights.astype(self.refs.values.dtype)

    def _with_products(self, body: Any) -> Any:
        return ops.with_accumulator(body, (QUERIES, KEYS), interpret=self.plan.interpret)

    def _soften(self, scores: Any, state: Any) -> tuple[Any, Any, Any]:
        """Weights `2^(c s - c m)` of a step, the old sums' decay, the running maximum and sum."""
        maximum, denominator = state
        factor = self.plan.exponent
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        decay = jnp.exp2((maximum - new_maximum) * factor)
        shift = ops.along_rows(new_maximum * factor, KEYS)
        weights = jnp.exp2(scores * factor - shift)
        denominator = denominator * decay + jnp.sum(weights, axis=1)
        if not self.plan.interpret:
            weights = ops.pinned(weights)
        return weights, decay, (new_maximum, denominator)

    def write_zeros(self) -> None:
        """Writes the output of a tile without keys."""
        zeros = jnp.zeros((QUERIES, self.plan.head_dim), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        self._write(zeros, ops.row_vector(QUERIES, -jnp.inf))

    def _write(self, out: Any, lse: Any) -> None:
        refs = self.refs
        rows = pl.ds(self.tile.row * QUERIES, QUERIES)
        head = self.tile.head(self.plan, self.warpgroup)

        @pl.when(~self._is_spare())
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's
            refs.outputs[self.warpgroup] = out.astype(refs.outputs.dtype)
            if refs.out_lse is not None:
                refs.lse[self.warpgroup] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                refs.outputs.at[self.warpgroup], refs.out.at[self.tile.batch, rows, head]
            )
            if refs.out_lse is not None:
                plgpu.copy_smem_to_gmem(
                    refs.lse.at[self.warpgroup], refs.out_lse.at[self.tile.batch, head, rows]
                )

    def _is_spare(self) -> Any:
        return jnp.asarray(self.tile.is_spare(self.plan, self.warpgroup))


def _transposed(keys: Any, slot: Any) -> Any:
    return keys.at[slot].transpose((1, 0))


def _mask(scores: Any, pieces: Any, count: Any, start: Any, length: Any) -> Any:
    """Hides keys after their query or beyond the sequence, and a piece that is there twice."""
    shape = (QUERIES, KEYS)
    half = KEYS // 2
    # A thread has columns 8 j + 2 (thread % 4) + (0, 1). What is left of them without the thread's
    # own part are constants, which are no use to keep in registers from tile to tile.
    column = ops.matrix_index(shape, 1)
    own = column & 6
    column = column & ~6
    last = jnp.minimum(start + ops.matrix_index(shape, 0), length - 1)
    first, second = (last - piece * half for piece in pieces)
    second = jnp.where(jax.lax.rem(count, 2) == 1, -1, second)
    reach = jnp.where(column < half, first, second + half)
    return jnp.where(column <= reach - own, scores, _MASKED)
