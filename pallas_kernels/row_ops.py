"""Operations on rows in registers that Pallas lacks, each with a stand-in for the interpreter."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import math as typed_math
from jaxlib.mlir.dialects import memref, nvvm, vector
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import emit
from sketchwalk_jax.scaled import NO_EXPONENT, power_of_two, replace

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
math: Any = typed_math

_WARPS = 4
_COLUMNS = 64  # of a tile
ADJACENT = 4  # columns of a row that a thread holds side by side


def scratch_of_maximum(warpgroups: int) -> Any:
    """Shared memory that `maximum` needs in a program of so many warpgroups."""
    return plgpu.SMEM((warpgroups * _WARPS,), jnp.int32)


def maximum(x: Int[Array, "..."], scratch: Any, *, layout: Any, interpret: bool) -> Int[Array, ""]:
    """The largest of a warpgroup's integers, at the price of one barrier.

    Args:
      x: Integers in registers.
      scratch: `scratch_of_maximum()` in shared memory, which no warp is still reading.
      layout: Of `x`.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return jnp.max(x)
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=scalar)
    def largest(_: Any, x: Any, scratch: Any) -> Any:
        own = functools.reduce(arith.maxsi, emit.scalars(x))
        own = emit.over_lanes(own, nvvm.ReductionKind.MAX)
        thread, warp = emit.thread(), emit.warp()
        memref.store(own, scratch, [emit.index(warp)])
        mgpu.warpgroup_barrier()
        # Every lane reads what one of the warpgroup's warps has left.
        first = arith.andi(warp, emit.constant(-_WARPS))
        other = arith.ori(first, arith.andi(thread, emit.constant(_WARPS - 1)))
        theirs = memref.load(scratch, [emit.index(other)])
        found = emit.over_lanes(theirs, nvvm.ReductionKind.MAX)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return largest(x, scratch)


def rows_layout(rows: int) -> Any:
    """A matrix of 64 columns over a warpgroup, a quarter of its rows per warp, in order.

    Each register of a thread holds four adjacent columns, those of a warp two adjacent rows.
    """
    tiles: tuple[tuple[int, ...], ...] = ((rows, _COLUMNS), (rows // _WARPS, _COLUMNS))
    tiles = (*tiles, (emit.LANES * ADJACENT // _COLUMNS, _COLUMNS), (1, ADJACENT))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-8,), (-4, -3), -1, _check_canonical=False)


def add_parts(
    part_ref: Any,
    exponent_ref: Any,
    *,
    rows: int,
    num_tiles: int,
    is_triangle: bool,
    interpret: bool,
) -> tuple[Float[Array, "rows 64"], Int[Array, "rows 64"]]:
    """Adds up the parts of a row's tiles, each a float times a power of two for the whole tile.

    Only parts that exist are read, whatever the others hold.

    Args:
      part_ref: Floats, `[splits, tiles, 64]` in global memory.
      exponent_ref: Exponents, `[tiles, 16]`; far below any other for parts of zeros.
      rows: Tiles of each warpgroup.
      num_tiles: Tiles that exist.
      is_triangle: Whether tile `t` has parts from split `t // 2` on; else it has all.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      Sums and their exponents, in `rows_layout(rows)`.
    """
    num_splits = part_ref.shape[0]
    if interpret:
        tile = jnp.arange(rows, dtype=jnp.int32)[:, None]
        split = jnp.arange(num_splits, dtype=jnp.int32)[None]
        there = (tile < num_tiles) & ((tile <= 2 * split + 1) | (not is_triangle))
        exponent = replace(exponent_ref[:, :num_splits], jnp.logical_not(there), NO_EXPONENT)
        largest = jnp.maximum(jnp.max(exponent, axis=1, keepdims=True), NO_EXPONENT // 2)
        factor = power_of_two(exponent - largest).T[..., None]
        total = jnp.sum(jnp.where(there.T[..., None], part_ref[...], 0.0) * factor, axis=0)
        return total, jnp.broadcast_to(largest, total.shape)
    layout = rows_layout(rows)
    shape = (rows, _COLUMNS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=[
            plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout)
            for dtype in (jnp.float32, jnp.int32)
        ],
    )
    def add(_: Any, parts: Any, exponents: Any) -> Any:
        lane = emit.lane()
        first = arith.muli(emit.warp(), emit.constant(rows // _WARPS))
        first = arith.addi(first, arith.shrui(lane, emit.constant(4)))
        column = arith.muli(arith.andi(lane, emit.constant(15)), emit.constant(ADJACENT))
        width = ir.MemRefType(exponents.type).shape[-1]
        found = []
        for pair in range(rows // (_WARPS * 2)):
            tile = arith.addi(first, emit.constant(2 * pair))
            least = arith.shrui(tile, emit.constant(1)) if is_triangle else emit.constant(0)
            is_tile = arith.cmpi(arith.CmpIPredicate.slt, tile, emit.constant(num_tiles))
            least = arith.select(is_tile, least, emit.constant(num_splits))
            place = arith.addi(arith.muli(tile, emit.constant(_COLUMNS)), column)
            start = _address(parts, place)
            exponent = _address(exponents, arith.muli(tile, emit.constant(width)))
            found.append(_sum_of_tile(parts, start, exponent, least))
        arrays = []
        for values, is_signed in zip(zip(*found, strict=True), (None, True), strict=True):
            registers = np.empty(len(values), dtype=object)
            registers[:] = values
            target = layout.to_mgpu()
            arrays.append(
                mgpu.FragmentedArray(
                    _registers=registers.reshape(target.registers_shape(shape)),
                    _layout=target,
                    _is_signed=is_signed,
                )
            )
        return arrays

    total, exponents = add(part_ref, exponent_ref)
    return total, exponents


def _sum_of_tile(
    parts: ir.Value, start: ir.Value, exponent: ir.Value, least: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Four adjacent sums of one tile, of the parts from `least` on, and their exponent."""
    num_splits, height = ir.MemRefType(parts.type).shape[:2]
    number = ir.F32Type.get()
    exponents: list[ir.Value] = []
    for split in range(0, num_splits, ADJACENT):
        exponents += _load(exponent, 4 * split, emit.constant(0), 0, emit.integer(), "b32")
    stride = 4 * height * _COLUMNS  # bytes
    loaded = [
        _load(start, split * stride, least, split, number, "f32") for split in range(num_splits)
    ]
    none = emit.constant(NO_EXPONENT)
    shifts = []
    for split in range(num_splits):
        is_there = arith.cmpi(arith.CmpIPredicate.sle, least, emit.constant(split))
        shifts.append(arith.select(is_there, exponents[split], none))
    # More than that of none, so that the factor of none is 0.
    largest = functools.reduce(arith.maxsi, shifts, emit.constant(NO_EXPONENT // 2))
    totals = [arith.constant(number, 0.0)] * ADJACENT
    for values, shift in zip(loaded, shifts, strict=True):
        field = arith.maxsi(arith.subi(shift, largest), emit.constant(-127))
        field = arith.shli(arith.addi(field, emit.constant(127)), emit.constant(23))
        factor = arith.bitcast(number, field)
        totals = [math.fma(x, factor, total) for x, total in zip(values, totals, strict=True)]
    vectors = (ir.VectorType.get((ADJACENT,), x) for x in (number, emit.integer()))
    sums, same = (
        vector.from_elements(kind, list(values))
        for kind, values in zip(vectors, (totals, [largest] * ADJACENT), strict=True)
    )
    return sums, same


def _address(ref: ir.Value, place: ir.Value) -> ir.Value:
    kind = ir.MemRefType(ref.type).element_type
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [place], kind)


def _load(
    pointer: ir.Value, offset: int, least: ir.Value, index: int, kind: ir.Type, name: str
) -> list[ir.Value]:
    """Four adjacent numbers, or zeros unless `index` is at least `least`."""
    zeros = " ".join(f"mov.b32 ${x}, 0;" for x in range(ADJACENT))
    targets = ", ".join(f"${x}" for x in range(ADJACENT))
    code = (
        f"{{ .reg .pred p; setp.le.s32 p, ${ADJACENT + 1}, {index}; {zeros} "
        f"@p ld.global.v4.{name} {{{targets}}}, [${ADJACENT} + {offset}]; }}"
    )
    # In order with what waits for the kernel that writes the numbers.
    return list(
        mgpu.utils.inline_ptx(
            code, pointer, least, result_types=[kind] * ADJACENT, has_side_effects=True
        )
    )
