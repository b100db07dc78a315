"""Page scores of a prompt's query blocks on Hopper GPUs, in two kernels.

A few representative queries of every head stand for a query block (a row). `m` counts the queries
of all heads that share a key/value head, row after row. The first kernel computes page max logits.
It multiplies in eight bits, with a power of two per query, and with keys `k'` relative to their
block's zero point `zero_point`,

    max_logits[p, m] = 2^{a_m} max_{s in page p} (2^{-a_m} q_m) · k'_s

and the second adds the zero points' logits and takes the softmax over pages,

    l[p, m] = scale · (max_logits[p, m] + q_m · zero_point_j)
    S[i, p] = Σ_{m of row i} softmax(l[0 .. i, m])_p ^ exponent

for the four pages `p` of 16 keys of each block `j` up to the row's own (`policies.quantized_keys`).

*Page max logits.* Each computing warpgroup of a thread block rounds 64 queries to eight bits and
keeps them in registers. One more warpgroup, the loader, copies the keys eight blocks at a time, so
each block is read once for all of them. While a warpgroup takes the maxima of two blocks, the
tensor cores multiply the next two (`hopper_max_logits`): a block of 64 channels takes them 64
cycles per warpgroup, and the maxima take 16 half-rate instructions per warp. Maxima go to shared
memory and are copied out eight blocks at a time, in the tensor cores' float16, without the queries'
powers of two. Groups of blocks after the row of the thread block's last query, or after the last
key, are never written.

*Scores.* A warpgroup has 32 queries, of one row or of up to four short rows; the two warpgroups of
a thread block share the zero points. It passes over the blocks twice, 64 at a time: forward for the
denominators, then backward for the shares, which are never written. The backward pass first reuses
shared memory, then the GPU's cache. A warpgroup multiplies with the zero points of 64 blocks and
adds the products to the blocks' four pages, one after another, so that four numbers share
references, masks and products. It reads page max logits in place, page by page. Each thread sums
exponentials relative to its own reference, which moves only when a logit exceeds it by far. A logit
is the rounded sum of both products, the same in both passes, and shares are relative to the largest
logit, so that equal pages always have equal shares.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import SCORED_BLOCK
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.page_scores import hopper_max_logits as max_logits
from sketchwalk_jax.precision import FIRST_MAXIMUM, LARGEST_LOGIT

_QUERIES = max_logits.QUERIES  # per warpgroup of the first kernel
_GROUP = max_logits.GROUP  # blocks per copy of keys, and per copy of maxima
_COMPUTING = 4  # computing warpgroups of the first kernel
_REGISTERS = (32, 112)  # per loading thread, and per computing thread
_KEY_STAGES = 4  # groups of keys in shared memory
_WARPGROUPS = 2  # warpgroups of the second kernel, which share the blocks' zero points
PART = 32  # queries per warpgroup of the second kernel; on other GPUs per warp
_STEP = 64  # blocks per step
_STAGES = 2  # steps in shared memory, a power of two
_PAGES = max_logits.PAGES
_SLACK = 64.0  # how far above its reference a logit may be, in powers of two

TILE = _QUERIES * _COMPUTING
"""The number of queries is a multiple of this."""
STEP = _STEP
"""The number of blocks of zero points is a multiple of this."""


def queries_per_row(wanted: int) -> int:
    """Rounds the queries per row up to a supported number: 8, 16 or a multiple of 32.

    Example:
      >>> [queries_per_row(count) for count in (3, 12, 28, 56)]
      [8, 16, 32, 64]
    """
    return next((one for one in (8, 16) if wanted <= one), -(-wanted // PART) * PART)


def last_block(first_row: Any, query: Any, count: int, *, per_row: int, length: Any) -> Any:
    """Returns the last block of keys that any of a thread block's queries sees.

    Rows that begin after the last key are padding, for which the first block is enough.

    Args:
      first_row: Block index of the call's first row.
      query: Index of the first query in the call.
      count: Number of queries.
      per_row: Queries per row.
      length: Number of keys.

    Example:
      >>> [int(last_block(0, query, 32, per_row=8, length=300)) for query in (0, 32, 64)]
      [3, 4, 0]
    """
    first, last = (first_row + jax.lax.div(x, per_row) for x in (query, query + count - 1))
    last = jnp.minimum(last, jax.lax.div(length - 1, SCORED_BLOCK))
    return jnp.where(first <= last, last, 0)


# Page max logits


def _max_logits(
    query: Any,
    key: Any,
    first_row: Any,
    lengths: Any,
    out: Any,
    factor: Any,
    *,
    per_row: int,
    wanted: int,
    queries: Any,
    keys: Any,
    found: Any,
    filled: Any,
    freed: Any,
    arrived: Any,
) -> None:
    """Runs one thread block: a loader and the computing warpgroups."""
    warpgroup = jax.lax.axis_index("warpgroup")
    kv_head, batch = jax.lax.axis_index("kv_head"), jax.lax.axis_index("batch")
    # Tiles with many blocks come first.
    tile = query.shape[2] // TILE - 1 - jax.lax.axis_index("tile")
    last = last_block(first_row[batch], tile * TILE, TILE, per_row=per_row, length=lengths[batch])
    num_groups = key.shape[2]
    # Write whole groups; numbers beyond the last row are never used.
    groups = jnp.minimum(jax.lax.div(last, _GROUP) + 1, num_groups)
    share_registers = functools.partial(ops.share_registers, *_REGISTERS, num_computing=_COMPUTING)

    @pl.when(warpgroup == _COMPUTING)
    def _() -> None:
        share_registers(is_loader=True)

        def load(group: Any, nothing: Any) -> Any:
            slot = jax.lax.rem(group, _KEY_STAGES)

            @pl.when(group >= _KEY_STAGES)
            def _() -> None:
                plgpu.barrier_wait(freed.at[slot])

            own = key.at[batch, kv_head, jnp.minimum(group, num_groups - 1)]
            plgpu.copy_gmem_to_smem(own, keys.at[slot], filled.at[slot])
            return nothing

        # One more group, since the computing warpgroups always start the next products.
        jax.lax.fori_loop(0, groups + 1, load, ())

    @pl.when(warpgroup < _COMPUTING)
    def _() -> None:
        share_registers(is_loader=False)
        own = pl.ds(tile * TILE + warpgroup * _QUERIES, _QUERIES)
        source = query.at[batch, kv_head, own]
        plgpu.copy_gmem_to_smem(source, queries.at[warpgroup], arrived.at[warpgroup])
        plgpu.barrier_wait(arrived.at[warpgroup])
        mine = ops.read(queries.at[warpgroup], max_logits.LAYOUT)
        mine, factors = max_logits.round_queries(mine)
        place = tile * TILE + warpgroup * _QUERIES
        place = place + ops.matrix_index((_QUERIES,), 0, max_logits.BY_ROW)
        # NaN excludes the padding of rows.
        factors = jnp.where(jax.lax.rem(place, per_row) < wanted, factors, jnp.nan)
        ops.write(factor.at[batch, kv_head, own], factors)

        plgpu.barrier_wait(filled.at[0])
        max_logits.begin(mine, keys, 0)

        def group(index: Any, _: Any) -> Any:
            buffer = jax.lax.rem(index, 2)
            slot, after = (jax.lax.rem(one, _KEY_STAGES) for one in (index, index + 1))
            for step in range(max_logits.STEPS):
                if step == max_logits.STEPS - 1:
                    plgpu.barrier_wait(filled.at[after])
                of_step = _PAGES * max_logits.BLOCKS
                pages = pl.ds(step * of_step, of_step)
                max_logits.write_maxima(
                    mine,
                    keys,
                    slot,
                    after,
                    found.at[warpgroup, buffer, pages],
                    step=step,
                )
            plgpu.barrier_arrive(freed.at[slot])
            plgpu.commit_smem()
            of_group = _PAGES * _GROUP
            target = out.at[batch, kv_head, pl.ds(index * of_group, of_group), own]
            plgpu.copy_smem_to_gmem(found.at[warpgroup, buffer], target)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous group's copy
            max_logits.settle()
            return ()

        jax.lax.fori_loop(0, groups, group, ())
        plgpu.wait_smem_to_gmem(0)


def hopper_max_logits_kernel(
    query: Float[Array, "B K M C"],
    key: Float[Array, "B K G lines 128"],
    *,
    first_row: Int[Array, "B"],
    lengths: Int[Array, "B"],
    per_row: int,
    wanted: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B K P M"], Float[Array, "B K M"]]:
    """Computes page max logits, `max_logits` of the module, in two factors.

    Pages after a query's own row, and those of rows after the last key, have arbitrary numbers.

    Args:
      query: Queries in 16 bits, row after row; their number is a multiple of `TILE`.
      key: Keys relative to their block's zero point, float8_e4m3fn, laid out as in
        `hopper_max_logits`.
      first_row: Block index of each sequence's first row.
      lengths: Number of keys in each sequence, at most those of `key`.
      per_row: Queries per row, with padding.
      wanted: Queries per row, without padding; the padding's factors are NaN.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      The largest float16 products, for the pages of all blocks, padded to a multiple of `STEP`, and
      the float32 power of two of each query.
    """
    batch, kv_heads, num_queries, channels = query.shape
    groups, lines = key.shape[2:4]
    shape = (batch, kv_heads, -(-groups * _GROUP // _STEP) * _STEP * _PAGES, num_queries)
    found = (_COMPUTING, 2, _GROUP * _PAGES, _QUERIES)
    row = channels * query.dtype.itemsize
    kernel = ops.kernel(
        functools.partial(_max_logits, per_row=per_row, wanted=wanted),
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float16),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        ),
        scratch_types={
            "queries": ops.tiled((_COMPUTING, _QUERIES, channels), query.dtype, swizzle=row),
            "keys": ops.tiled((_KEY_STAGES, lines, max_logits.LINE), key.dtype),
            "found": ops.tiled(found, jnp.float16),
            "filled": plgpu.Barrier(num_arrivals=1, num_barriers=_KEY_STAGES),
            "freed": plgpu.Barrier(num_arrivals=_COMPUTING, num_barriers=_KEY_STAGES),
            "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=_COMPUTING),
        },
        grid=(num_queries // TILE, kv_heads, batch),
        grid_names=("tile", "kv_head", "batch"),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="page_max_logits",
    )
    return kernel(query, key, first_row.astype(jnp.int32), lengths.astype(jnp.int32))


# Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresTiling:
    """Static parameters of a call of the second kernel, on any GPU.

    Attributes:
      programs: Thread blocks per key/value head.
      per_row: Queries per row: 8, 16 or a multiple of 32.
      blocks: Blocks, a multiple of 64.
      factor: Factor of the products times `log2(e)`.
      exponent: Order of the norm.
    """

    programs: int
    per_row: int
    blocks: int
    factor: float
    exponent: int

    @property
    def rows(self) -> int:
        """Rows per 32 queries."""
        return max(1, PART // self.per_row)

    @property
    def parts(self) -> int:
        """Parts of a row, of 32 queries each."""
        return max(1, self.per_row // PART)

    @property
    def limit(self) -> float:
        """Bound on the magnitude of products; larger ones are masked."""
        return LARGEST_LOGIT * math.log2(math.e) / self.factor


def _scores(
    max_logits: Any,
    factor: Any,
    query: Any,
    zero_point: Any,
    first_row: Any,
    lengths: Any,
    out: Any,
    *,
    tiling: ScoresTiling,
    queries: Any,
    zero_points: Any,
    tiles: Any,
    meeting: Any,
    filled: Any,
    freed: Any,
    arrived: Any,
) -> None:
    """Runs one thread block: two warpgroups of 32 queries; the first loads zero points for both."""
    warpgroup = jax.lax.axis_index("warpgroup")
    program = tiling.programs - 1 - jax.lax.axis_index("program")
    kv_head, batch = jax.lax.axis_index("kv_head"), jax.lax.axis_index("batch")
    place = program * _WARPGROUPS + warpgroup
    first = jax.lax.div(place * PART, tiling.per_row)  # index of its first row in the call
    part = jax.lax.rem(place, tiling.parts)
    both = _WARPGROUPS * PART  # queries of both warpgroups
    last = last_block(
        first_row[batch], program * both, both, per_row=tiling.per_row, length=lengths[batch]
    )
    steps = jax.lax.div(last, _STEP) + 1
    shape, own = (_STEP, PART), pl.ds(place * PART, PART)
    ready = arrived.at[warpgroup]

    def load(step: Any, *, waits: Any) -> None:
        """Starts to copy a step; `waits` until its slot has been read."""
        slot = jnp.bitwise_and(step, _STAGES - 1)
        some = pl.ds(step * _STEP, _STEP)

        def load_page(page: Any, nothing: Any) -> Any:
            source = max_logits.at[batch, kv_head, some, page, own]
            target = tiles.at[warpgroup, slot, page]
            plgpu.copy_gmem_to_smem(source, target, filled.at[slot])
            return nothing

        # The compiler unrolls this loop: JAX takes long to lower a copy to shared memory.
        jax.lax.fori_loop(0, _PAGES, load_page, ())

        @pl.when(warpgroup == 0)
        def _() -> None:
            @pl.when(waits)
            def _() -> None:
                plgpu.barrier_wait(freed.at[slot])

            source = zero_point.at[batch, some, kv_head]
            plgpu.copy_gmem_to_smem(source, zero_points.at[slot], filled.at[slot])

    plgpu.copy_gmem_to_smem(query.at[batch, kv_head, own], queries.at[warpgroup], ready)
    for step in range(_STAGES - 1):
        pl.when(step < steps)(functools.partial(load, jnp.int32(step), waits=False))
    plgpu.barrier_wait(ready)
    factors = ops.read_global(factor.at[batch, kv_head, own], ops.BY_COLUMN)
    factors = ops.spread(factors, shape, 1)
    # The row of each query, and its last block.
    row = jax.lax.div(ops.matrix_index(shape, 1), tiling.per_row) if tiling.rows > 1 else 0
    reach = jnp.minimum(first_row[batch] + first + row, last)  # after it, nothing is written

    def products(step: Any, *, is_new: Any, following: Any) -> Any:
        """Returns products of one step with zero points; its page max logits stay readable.

        Args:
          step: The step.
          is_new: Whether its copies have not been awaited yet.
          following: The step that will use its slot next, if it exists.
        """
        slot = jnp.bitwise_and(step, _STAGES - 1)

        @pl.when(is_new)
        def _() -> None:
            plgpu.barrier_wait(filled.at[slot])

        def product(accumulator: ops.Accumulator) -> Any:
            right = queries.at[warpgroup].transpose((1, 0))
            accumulator.add_product(zero_points.at[slot], right)
            return accumulator.load()

        found = ops.with_accumulator(product, shape)

        @pl.when((following >= 0) & (following < steps))
        def _() -> None:
            plgpu.barrier_arrive(freed.at[slot])

        # After this, the previous step's slot may be filled again: all warps have read it.
        row_ops.barrier()
        return found

    def of_page(step: Any, page: Any, shared: Any) -> Any:
        """Returns logits of one page per block of a step, identical in both passes."""
        slot = jnp.bitwise_and(step, _STAGES - 1)
        return ops.read(tiles.at[warpgroup, slot, page]).astype(jnp.float32) * factors + shared

    def gather(step: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        reference, total = state
        shared = products(step, is_new=True, following=step + _STAGES)
        after = step + _STAGES - 1
        pl.when(after < steps)(functools.partial(load, after, waits=step > 0))
        is_seen = step * _STEP + ops.matrix_index(shape, 0) <= reach
        seen = jnp.where(is_seen, shared, -jnp.inf)

        def add(page: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            more, is_far = state
            away = (of_page(step, page, seen) - reference) * tiling.factor
            is_farther = row_ops.any_of_warp(away > _SLACK, layout=ops.ACCUMULATOR)
            more = more + jnp.where(away <= _SLACK, jnp.exp2(away), 0.0)
            return more, is_far | is_farther

        # A loop, since unrolled code would hold all pages in registers.
        start = (ops.full(shape, 0.0), jnp.int32(0))
        more, is_far = jax.lax.fori_loop(0, _PAGES, add, start)

        def keep() -> tuple[Any, Any]:
            return reference, total + more

        def move() -> tuple[Any, Any]:
            def values(page: Any) -> tuple[Any, Any]:
                found = of_page(step, page, seen)
                return found, jnp.abs(found) < tiling.limit

            def raise_(page: Any, higher: Any) -> Any:
                found, counts = values(page)
                return jnp.where(counts, jnp.maximum(higher, found), higher)

            higher = jax.lax.fori_loop(0, _PAGES, raise_, reference)

            def add(page: Any, total: Any) -> Any:
                found, counts = values(page)
                away = (found - higher) * tiling.factor
                return total + jnp.where(counts, jnp.exp2(away), 0.0)

            less = total * jnp.exp2((reference - higher) * tiling.factor)
            less = jax.lax.fori_loop(0, _PAGES, add, less)
            return higher, less

        return jax.lax.cond(is_far != 0, move, keep)

    start = (ops.full(shape, FIRST_MAXIMUM / tiling.factor), ops.full(shape, 0.0))
    reference, total = jax.lax.fori_loop(0, steps, gather, start)
    over_rows = functools.partial(ops.over_rows, scratch=meeting.at[warpgroup])
    highest = over_rows(reference, "max")
    below = (reference - ops.spread(highest, shape, 1)) * tiling.factor
    total = over_rows(total * jnp.exp2(below), "add")
    # If the query sees no page, any finite offset will do.
    offset = jnp.where(total > 0.0, highest, 0.0)
    common = ops.spread(jnp.log2(total) * tiling.exponent, shape, 1)
    offset = ops.spread(offset, shape, 1)

    def share(index: Any, _: Any) -> Any:
        step = steps - 1 - index
        shared = products(step, is_new=index >= _STAGES, following=step - _STAGES)
        before = step + 1 - _STAGES
        is_needed = (before >= 0) & (index > 0)
        pl.when(is_needed)(functools.partial(load, before, waits=True))
        outs = [out.at[batch, kv_head, part, first + index] for index in range(tiling.rows)]

        def write(page: Any, _: Any) -> Any:
            # Subtract the large offset first, which makes the difference exact.
            away = of_page(step, page, shared) - offset
            away = away * (tiling.factor * tiling.exponent) - common
            parts = jnp.where(away <= 1.0, jnp.exp2(away), 0.0)
            row_ops.write_sums(parts, outs, step * _STEP, page)
            return ()

        jax.lax.fori_loop(0, _PAGES, write, ())
        return ()

    jax.lax.fori_loop(0, steps, share, ())


def hopper_page_scores_kernel(
    max_logits: Float[Array, "B K P M"],
    factor: Float[Array, "B K M"],
    query: Float[Array, "B K M C"],
    zero_point: Float[Array, "B blocks K C"],
    *,
    first_row: Int[Array, "B"],
    lengths: Int[Array, "B"],
    per_row: int,
    scale: float,
    exponent: int,
    interpret: bool = False,
) -> Float[Array, "B K parts I P"]:
    """Computes page scores, `S` of the module, per key/value head and 32 queries of a row.

    Args:
      max_logits: Page max logits of `hopper_max_logits_kernel`; NaN excludes a page.
      factor: Factors of `hopper_max_logits_kernel`; NaN excludes a query.
      query: The queries in 16 bits.
      zero_point: Zero points of the blocks in 16 bits.
      first_row: Block index of each sequence's first row.
      lengths: Number of keys in each sequence, at most those of the blocks.
      per_row: Queries per row, from `queries_per_row`.
      scale: Factor of the products.
      exponent: Order of the norm.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      Float32 scores, to be summed over `K` and `parts`; arbitrary after a row's own block, and in
      rows after the last key.
    """
    batch, kv_heads, num_queries, channels = query.shape
    tiling = ScoresTiling(
        programs=num_queries // (_WARPGROUPS * PART),
        per_row=per_row,
        blocks=zero_point.shape[1],
        factor=scale * math.log2(math.e),
        exponent=exponent,
    )
    shape = (batch, kv_heads, tiling.parts, num_queries // per_row, tiling.blocks, _PAGES)
    max_logits = max_logits.reshape(batch, kv_heads, tiling.blocks, _PAGES, num_queries)
    tile = (_WARPGROUPS, _STAGES, _PAGES, _STEP, PART)
    swizzle = channels * query.dtype.itemsize
    kernel = ops.kernel(
        functools.partial(_scores, tiling=tiling),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types={
            "queries": ops.tiled((_WARPGROUPS, PART, channels), query.dtype, swizzle=swizzle),
            "zero_points": ops.tiled((_STAGES, _STEP, channels), zero_point.dtype, swizzle=swizzle),
            "tiles": ops.tiled(tile, max_logits.dtype, swizzle=2 * PART),
            "meeting": ops.scratch_of_rows(_WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=_WARPGROUPS * _PAGES + 1, num_barriers=_STAGES),
            "freed": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
            "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=_WARPGROUPS),
        },
        grid=(tiling.programs, kv_heads, batch),
        grid_names=("program", "kv_head", "batch"),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=ops.compiler_params(approx_math=True),
        interpret=interpret,
        kernel_name="block_scores",
    )
    numbers = (x.astype(jnp.int32) for x in (first_row, lengths))
    found = kernel(max_logits, factor, query, zero_point, *numbers)
    return found.reshape(*shape[:4], -1)
