"""Warp-level operations that Pallas lacks, each with a stand-in for the interpreter."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import gpu, math, memref, nvvm
from jaxlib.mlir.dialects import scf as typed_scf
from jaxtyping import Array, Int

from sketchwalk_jax.pallas_kernels import emit

# The annotations of these two lack the operands that their functions take.
arith: Any = typed_arith
scf: Any = typed_scf

WARPS = 4
_LANES = emit.LANES
_THREADS = WARPS * _LANES
_COUNTS_PER_WARP = 5  # two turns of two, and one


def barrier(*, interpret: bool) -> None:
    """Waits for the other warps of the warpgroup; the interpreter runs them together."""
    if not interpret:

        @plgpu.inline_mgpu()
        def wait(_: Any) -> None:
            mgpu.warpgroup_barrier()

        wait()


def row_layout(width: int) -> Any:
    """A vector over a warpgroup, a quarter per warp; each register holds 32 adjacent entries."""
    if width == _THREADS:
        tiles: tuple[tuple[int, ...], ...] = ((width,), (_LANES,), (1,))
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-3,), (-2,), -1)
    tiles = ((width,), (width // WARPS,), (_LANES,), (1,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4,), (-2,), -1)


def maxima(
    arrays: tuple[Int[Array, "..."], ...], scratch: Any, *, layout: Any, interpret: bool
) -> list[Int[Array, ""]]:
    """The largest integer of each of two arrays, at the price of one barrier.

    Args:
      arrays: Two arrays in registers.
      scratch: `scratch_of_counts()` in shared memory, from which nothing was read before.
      layout: Of both.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return [jnp.max(x) for x in arrays]
    number = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, plgpu.RefType()), return_type=[number] * len(arrays)
    )
    def largest(_, first, second, scratch):
        found = []
        for x in (first, second):
            own = functools.reduce(arith.maxsi, emit.scalars(x))
            found.append(emit.over_lanes(own, nvvm.ReductionKind.MAX))
        found = _exchange(found, scratch, emit.constant(1), nvvm.ReductionKind.MAX, -(1 << 31))
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found]

    return largest(*arrays, scratch)


def _warps(scratch: ir.Value) -> int:
    return ir.MemRefType(scratch.type).shape[0] // _COUNTS_PER_WARP


def _wait(scratch: ir.Value) -> None:
    """Waits for the warps that share the scratch memory."""
    if _warps(scratch) == WARPS:
        mgpu.warpgroup_barrier()
    else:
        gpu.barrier()


def _exchange(values, scratch, turn, kind, identity):
    """Brings the values of all warps together."""
    warps = _warps(scratch)
    start = arith.muli(turn, emit.constant(2 * warps))
    starts = [arith.addi(start, emit.constant(index * warps)) for index in range(len(values))]
    for start, value in zip(starts, values, strict=True):
        memref.store(value, scratch, [emit.index(arith.addi(start, emit.warp()))])
    _wait(scratch)
    return [_over_warps(scratch, start, emit.constant(warps), kind, identity) for start in starts]


def _over_warps(scratch, start, number, kind, identity):
    """Reduces what so many warps have left: each lane reads what one of them has."""
    lane = emit.lane()
    last = emit.constant(_warps(scratch) - 1)
    theirs = memref.load(scratch, [emit.index(arith.addi(start, arith.minsi(lane, last)))])
    is_one = arith.cmpi(arith.CmpIPredicate.slt, lane, number)
    theirs = arith.select(is_one, theirs, emit.constant(identity))
    return emit.over_lanes(theirs, kind)


def count_kept(
    keys: Int[Array, "..."],
    limits: tuple[Int[Array, ""], ...],
    scratch: Any,
    turn: Int[Array, ""],
    *,
    layout: Any,
    interpret: bool,
) -> list[Int[Array, ""]]:
    """How many keys are at least each of three limits, at the price of one barrier.

    Args:
      keys: At most 2^15 keys in registers.
      limits: Three limits.
      scratch: `scratch_of_counts()` in shared memory.
      turn: 0 and 1 in turn, so that no warp writes what another one has yet to read.
      layout: Of the keys.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return [jnp.sum((keys >= limit).astype(jnp.int32)) for limit in limits]
    scalar = plgpu.Layout.WG_SPLAT(())
    number = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), scalar)

    @plgpu.inline_mgpu(
        arg_types=(layout, *(scalar,) * 4, plgpu.RefType()), return_type=[number] * 3
    )
    def count(_, keys, first, second, third, turn, scratch):
        limits = [emit.scalars(x)[0] for x in (first, second, third)]
        counts = _emit_count(emit.scalars(keys), limits, emit.scalars(turn)[0], scratch)
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in counts]

    return count(keys, *limits, turn, scratch)


def scratch_of_counts(warpgroups: int = 1) -> Any:
    """Shared memory that `maxima`, `count_kept` and `write_kept` need.

    They take in all warpgroups of a program, each of which holds a stretch of the row.
    """
    return plgpu.SMEM((_COUNTS_PER_WARP * WARPS * warpgroups,), jnp.int32)


def _emit_count(registers, limits, turn, scratch):
    """Counts of three limits; the first two in the halves of one integer."""
    first, second = emit.constant(0), emit.constant(0)
    for key in registers:
        first = _add_if_kept(first, key, limits[0], 1)
        first = _add_if_kept(first, key, limits[1], 1 << 16)
        second = _add_if_kept(second, key, limits[2], 1)
    packed = [emit.over_lanes(x, nvvm.ReductionKind.ADD) for x in (first, second)]
    totals = _exchange(packed, scratch, turn, nvvm.ReductionKind.ADD, 0)
    low = arith.andi(totals[0], emit.constant(0xFFFF))
    return [low, arith.shrui(totals[0], emit.constant(16)), totals[1]]


def _add_if_kept(total, key, limit, step):
    """Two instructions, where the compiler makes three of a choice and a sum."""
    code = f"{{ .reg .pred p; setp.ge.s32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $0, {step}; }}"
    return mgpu.utils.inline_ptx(code, total, key, limit, result_types=total.type)


def write_row(values: Array, columns: Array, ref: Any, *, layout: Any, interpret: bool) -> None:
    """Writes those values whose columns exist in a row of global memory."""
    if interpret:
        ref[...] = values.reshape(-1)[: ref.shape[0]]
        return

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType()))
    def write(_: Any, values: Any, columns: Any, ref: Any) -> None:
        limit = emit.constant(ir.MemRefType(ref.type).shape[0])
        for value, column in zip(emit.scalars(values), emit.scalars(columns), strict=True):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, column, limit)):
                memref.store(value, ref, [emit.index(column)])

    write(values, columns, ref)


def write_kept(
    keys: Int[Array, "..."],
    lower: Int[Array, ""],
    upper: Int[Array, ""],
    missing: Int[Array, ""],
    count: Int[Array, ""],
    ids_ref: Any,
    scratch: Any,
    *,
    pad: int,
    layout: Any,
    interpret: bool,
) -> None:
    """Writes the columns whose key is at least `upper`, and the first `missing` equal to `lower`.

    Args:
      keys: Keys of one row, in order: a register of a warp holds the next 32 times as many as
        one of its threads does.
      lower: Key of the ties.
      upper: Least key that is kept.
      missing: Ties to keep.
      count: Columns kept in all.
      ids_ref: Where the columns go in ascending order, `[P]` in global memory.
      scratch: `scratch_of_counts()` in shared memory.
      pad: What the entries beyond the count become.
      layout: Of the keys.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        _write_kept_interpreted(keys.reshape(-1), lower, upper, missing, ids_ref, pad)
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    reference = plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(layout, scalar, scalar, scalar, scalar, reference, reference),
    )
    def write(_, keys, lower, upper, missing, count, ids, scratch):
        _emit_write_kept(keys, lower, upper, missing, count, ids, scratch, pad=pad)

    write(keys, lower, upper, missing, count, ids_ref, scratch)


def _write_kept_interpreted(
    keys: Array, lower: Array, upper: Array, missing: Array, ids_ref: Any, pad: int
) -> None:
    above, tied = keys >= upper, keys == lower
    kept = above | (tied & (jnp.cumsum(tied, dtype=jnp.int32) <= missing))
    length = ids_ref.shape[-1]
    place = jnp.where(kept, jnp.cumsum(kept, dtype=jnp.int32) - 1, length)
    columns = jnp.arange(keys.shape[0], dtype=jnp.int32)
    ids_ref[...] = jnp.full((length,), pad, jnp.int32).at[place].set(columns, mode="drop")


def _emit_write_kept(keys, lower, upper, missing, count, ids, scratch, *, pad: int) -> None:
    lower, upper, missing, count = (emit.scalars(x)[0] for x in (lower, upper, missing, count))
    thread = emit.thread()
    lane, warp = emit.lane(), emit.warp()
    earlier_lanes = arith.subi(arith.shli(emit.constant(1), lane), emit.constant(1))
    registers = emit.scalars(keys)

    def tests(key: ir.Value) -> tuple[ir.Value, ir.Value]:
        above = arith.cmpi(arith.CmpIPredicate.sge, key, upper)
        return above, arith.cmpi(arith.CmpIPredicate.eq, key, lower)

    # Numbers above and tied in the halves of one integer: neither exceeds 2^14.
    packed = emit.constant(0)
    for key in registers:
        above, tied = tests(key)
        packed = arith.addi(packed, arith.select(above, emit.constant(1), emit.constant(0)))
        packed = arith.addi(packed, arith.select(tied, emit.constant(1 << 16), emit.constant(0)))
    packed = emit.over_lanes(packed, nvvm.ReductionKind.ADD)
    start = emit.constant((_COUNTS_PER_WARP - 1) * _warps(scratch))
    memref.store(packed, scratch, [emit.index(arith.addi(start, warp))])
    _wait(scratch)
    before = _over_warps(scratch, start, warp, nvvm.ReductionKind.ADD, 0)
    num_above = arith.andi(before, emit.constant(0xFFFF))
    num_tied = arith.shrui(before, emit.constant(16))

    adjacent = len(registers) // keys.registers.size
    column = arith.addi(
        arith.muli(warp, emit.constant(_LANES * len(registers))),
        arith.muli(lane, emit.constant(adjacent)),
    )
    # Opaque, so that the compiler compares again rather than keep the tests in registers.
    registers = emit.scalars(mgpu.optimization_barrier(keys))
    for group in range(0, len(registers), adjacent):
        found = [tests(key) for key in registers[group : group + adjacent]]
        votes = [[emit.ballot(test) for test in both] for both in found]
        # Of earlier lanes, then of earlier columns of this lane's.
        place, rank = num_above, num_tied
        for above_votes, tied_votes in votes:
            place = arith.addi(place, math.ctpop(arith.andi(above_votes, earlier_lanes)))
            rank = arith.addi(rank, math.ctpop(arith.andi(tied_votes, earlier_lanes)))
            num_above = arith.addi(num_above, math.ctpop(above_votes))
            num_tied = arith.addi(num_tied, math.ctpop(tied_votes))
        for index, (above, tied) in enumerate(found):
            has_room = arith.cmpi(arith.CmpIPredicate.slt, rank, missing)
            with mgpu.when(arith.ori(above, arith.andi(tied, has_room))):
                target = arith.addi(place, arith.minsi(rank, missing))
                memref.store(arith.addi(column, emit.constant(index)), ids, [emit.index(target)])
            if index + 1 < adjacent:
                place = arith.addi(place, arith.extui(missing.type, above))
                rank = arith.addi(rank, arith.extui(missing.type, tied))
        column = arith.addi(column, emit.constant(_LANES * adjacent))

    length = ir.MemRefType(ids.type).shape[0]
    step = arith.constant(ir.IndexType.get(), _LANES * _warps(scratch))
    loop = scf.ForOp(
        emit.index(arith.addi(count, thread)), arith.constant(ir.IndexType.get(), length), step
    )
    with ir.InsertionPoint(loop.body):
        memref.store(emit.constant(pad), ids, [loop.induction_variable])
        scf.yield_([])
