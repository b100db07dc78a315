"""Warp-level operations that Pallas lacks, each with a stand-in for the interpreter."""

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


def compiler_params() -> plgpu.CompilerParams:
    """Parameters of every kernel here; the default semantics differ between versions of JAX."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def row_layout(width: int) -> Any:
    """A vector over a warpgroup, a quarter per warp; each register holds 32 adjacent entries."""
    if width == _THREADS:
        tiles: tuple[tuple[int, ...], ...] = ((width,), (_LANES,), (1,))
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-3,), (-2,), -1)
    tiles = ((width,), (width // WARPS,), (_LANES,), (1,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4,), (-2,), -1)


def write_kept(
    keys: Int[Array, "J"],
    lower: Int[Array, ""],
    upper: Int[Array, ""],
    missing: Int[Array, ""],
    count: Int[Array, ""],
    ids_ref: Any,
    scratch: Any,
    *,
    pad: int,
    interpret: bool,
) -> None:
    """Writes the columns whose key is at least `upper`, and the first `missing` equal to `lower`.

    Args:
      keys: Keys of one row, in `row_layout`.
      lower: Key of the ties.
      upper: Least key that is kept.
      missing: Ties to keep.
      count: Columns kept in all.
      ids_ref: Where the columns go in ascending order, `[P]` in global memory.
      scratch: `[WARPS]` integers in shared memory.
      pad: What the entries beyond the count become.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        _write_kept_interpreted(keys, lower, upper, missing, ids_ref, pad)
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    layout = row_layout(keys.shape[0])
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
    """What one thread holds of an array whose registers have one element."""
    first = ir.DenseI64ArrayAttr.get([0])
    return [
        vector.extract(x, [], first) if isinstance(x.type, ir.VectorType) else x
        for x in array.registers.flat
    ]


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def _ballot(predicate: ir.Value) -> ir.Value:
    return nvvm.vote_sync(
        _constant(_ALL_LANES),
        predicate,
        nvvm.VoteSyncKind.ballot,
        results=[ir.IntegerType.get_signless(32)],
    )


def _emit_write_kept(keys, lower, upper, missing, count, ids, scratch, *, pad: int) -> None:
    lower, upper, missing, count = (_scalars(x)[0] for x in (lower, upper, missing, count))
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    thread = arith.andi(thread, _constant(_THREADS - 1))
    lane = arith.andi(thread, _constant(_LANES - 1))
    warp = arith.shrui(thread, _constant(5))
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
    memref.store(packed, scratch, [_index(warp)])
    mgpu.warpgroup_barrier()
    before = _constant(0)
    for other in range(WARPS - 1):
        theirs = memref.load(scratch, [_index(_constant(other))])
        is_before = arith.cmpi(arith.CmpIPredicate.ult, _constant(other), warp)
        before = arith.addi(before, arith.select(is_before, theirs, _constant(0)))
    num_above = arith.andi(before, _constant(0xFFFF))
    num_tied = arith.shrui(before, _constant(16))

    per_warp = _LANES * len(registers)
    column = arith.addi(arith.muli(warp, _constant(per_warp)), lane)
    # Opaque, so that the compiler compares again rather than keep the tests in registers.
    for key in _scalars(mgpu.optimization_barrier(keys)):
        above, tied = tests(key)
        above_votes, tied_votes = _ballot(above), _ballot(tied)
        rank = arith.addi(num_tied, math.ctpop(arith.andi(tied_votes, earlier_lanes)))
        place = arith.addi(num_above, math.ctpop(arith.andi(above_votes, earlier_lanes)))
        place = arith.addi(place, arith.minsi(rank, missing))
        has_room = arith.cmpi(arith.CmpIPredicate.slt, rank, missing)
        with mgpu.when(arith.ori(above, arith.andi(tied, has_room))):
            memref.store(column, ids, [_index(place)])
        num_above = arith.addi(num_above, math.ctpop(above_votes))
        num_tied = arith.addi(num_tied, math.ctpop(tied_votes))
        column = arith.addi(column, _constant(_LANES))

    length = ir.MemRefType(ids.type).shape[0]
    step = arith.constant(ir.IndexType.get(), _THREADS)
    loop = scf.ForOp(
        _index(arith.addi(count, thread)), arith.constant(ir.IndexType.get(), length), step
    )
    with ir.InsertionPoint(loop.body):
        memref.store(_constant(pad), ids, [loop.induction_variable])
        scf.yield_([])
