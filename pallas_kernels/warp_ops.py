"""Warp-level operations that Pallas lacks, each with a stand-in for the interpreter."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import gpu, math, memref, nvvm, vector
from jaxlib.mlir.dialects import scf as typed_scf
from jaxtyping import Array, Int

# The annotations of these two lack the operands that their functions take.
arith: Any = typed_arith
scf: Any = typed_scf

WARPS = 4
_LANES = 32
_THREADS = WARPS * _LANES
_ALL_LANES = -1  # as a mask
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
            own = functools.reduce(arith.maxsi, _scalars(x))
            found.append(nvvm.redux_sync(own, nvvm.ReductionKind.MAX, _constant(_ALL_LANES)))
        found = _exchange(found, scratch, _constant(1), nvvm.ReductionKind.MAX, -(1 << 31))
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
    start = arith.muli(turn, _constant(2 * warps))
    starts = [arith.addi(start, _constant(index * warps)) for index in range(len(values))]
    for start, value in zip(starts, values, strict=True):
        memref.store(value, scratch, [_index(arith.addi(start, _warp()))])
    _wait(scratch)
    return [_over_warps(scratch, start, _constant(warps), kind, identity) for start in starts]


def _over_warps(scratch, start, number, kind, identity):
    """Reduces what so many warps have left: each lane reads what one of them has."""
    lane = _lane()
    last = _constant(_warps(scratch) - 1)
    theirs = memref.load(scratch, [_index(arith.addi(start, arith.minsi(lane, last)))])
    is_one = arith.cmpi(arith.CmpIPredicate.slt, lane, number)
    theirs = arith.select(is_one, theirs, _constant(identity))
    return nvvm.redux_sync(theirs, kind, _constant(_ALL_LANES))


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
        limits = [_scalars(x)[0] for x in (first, second, third)]
        counts = _emit_count(_scalars(keys), limits, _scalars(turn)[0], scratch)
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in counts]

    return count(keys, *limits, turn, scratch)


def scratch_of_counts(warpgroups: int = 1) -> Any:
    """Shared memory that `maxima`, `count_kept` and `write_kept` need.

    They take in all warpgroups of a program, each of which holds a stretch of the row.
    """
    return plgpu.SMEM((_COUNTS_PER_WARP * WARPS * warpgroups,), jnp.int32)


def _emit_count(registers, limits, turn, scratch):
    """Counts of three limits; the first two in the halves of one integer."""
    first, second = _constant(0), _constant(0)
    for key in registers:
        first = _add_if_kept(first, key, limits[0], 1)
        first = _add_if_kept(first, key, limits[1], 1 << 16)
        second = _add_if_kept(second, key, limits[2], 1)
    packed = [
        nvvm.redux_sync(x, nvvm.ReductionKind.ADD, _constant(_ALL_LANES)) for x in (first, second)
    ]
    totals = _exchange(packed, scratch, turn, nvvm.ReductionKind.ADD, 0)
    low = arith.andi(totals[0], _constant(0xFFFF))
    return [low, arith.shrui(totals[0], _constant(16)), totals[1]]


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
        limit = _constant(ir.MemRefType(ref.type).shape[0])
        for value, column in zip(_scalars(values), _scalars(columns), strict=True):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, column, limit)):
                memref.store(value, ref, [_index(column)])

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


def _constant(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _scalars(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """What one thread holds of an array, in order."""
    found: list[ir.Value] = []
    for x in array.registers.flat:
        places = range(x.type.shape[0]) if isinstance(x.type, ir.VectorType) else ()
        found += [vector.extract(x, [], ir.DenseI64ArrayAttr.get([place])) for place in places]
        found += [] if places else [x]
    return found


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def _ballot(predicate: ir.Value) -> ir.Value:
    return nvvm.vote_sync(
        _constant(_ALL_LANES),
        predicate,
        nvvm.VoteSyncKind.ballot,
        results=[ir.IntegerType.get_signless(32)],
    )


def _thread() -> ir.Value:
    return arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))


def _lane() -> ir.Value:
    return arith.andi(_thread(), _constant(_LANES - 1))


def _warp() -> ir.Value:
    return arith.shrui(_thread(), _constant(5))


def _emit_write_kept(keys, lower, upper, missing, count, ids, scratch, *, pad: int) -> None:
    lower, upper, missing, count = (_scalars(x)[0] for x in (lower, upper, missing, count))
    thread = _thread()
    lane, warp = _lane(), _warp()
    earlier_lanes = arith.subi(arith.shli(_constant(1), lane), _constant(1))
    registers = _scalars(keys)

    def tests(key: ir.Value) -> tuple[ir.Value, ir.Value]:
        above = arith.cmpi(arith.CmpIPredicate.sge, key, upper)
        return above, arith.cmpi(arith.CmpIPredicate.eq, key, lower)

    # Numbers above and tied in the halves of one integer: neither exceeds 2^14.
    packed = _constant(0)
    for key in registers:
        above, tied = tests(key)
        packed = arith.addi(packed, arith.select(above, _constant(1), _constant(0)))
        packed = arith.addi(packed, arith.select(tied, _constant(1 << 16), _constant(0)))
    packed = nvvm.redux_sync(packed, nvvm.ReductionKind.ADD, _constant(_ALL_LANES))
    start = _constant((_COUNTS_PER_WARP - 1) * _warps(scratch))
    memref.store(packed, scratch, [_index(arith.addi(start, warp))])
    _wait(scratch)
    before = _over_warps(scratch, start, warp, nvvm.ReductionKind.ADD, 0)
    num_above = arith.andi(before, _constant(0xFFFF))
    num_tied = arith.shrui(before, _constant(16))

    adjacent = len(registers) // keys.registers.size
    column = arith.addi(
        arith.muli(warp, _constant(_LANES * len(registers))), arith.muli(lane, _constant(adjacent))
    )
    # Opaque, so that the compiler compares again rather than keep the tests in registers.
    registers = _scalars(mgpu.optimization_barrier(keys))
    for group in range(0, len(registers), adjacent):
        found = [tests(key) for key in registers[group : group + adjacent]]
        votes = [[_ballot(test) for test in both] for both in found]
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
                memref.store(arith.addi(column, _constant(index)), ids, [_index(target)])
            if index + 1 < adjacent:
                place = arith.addi(place, arith.extui(missing.type, above))
                rank = arith.addi(rank, arith.extui(missing.type, tied))
        column = arith.addi(column, _constant(_LANES * adjacent))

    length = ir.MemRefType(ids.type).shape[0]
    step = arith.constant(ir.IndexType.get(), _LANES * _warps(scratch))
    loop = scf.ForOp(
        _index(arith.addi(count, thread)), arith.constant(ir.IndexType.get(), length), step
    )
    with ir.InsertionPoint(loop.body):
        memref.store(_constant(pad), ids, [loop.induction_variable])
        scf.yield_([])
