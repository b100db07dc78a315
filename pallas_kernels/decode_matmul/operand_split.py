"""Splits a few bfloat16 rows into 8-bit digits, to multiply with 8-bit weights on Hopper.

Tensor cores multiply 8-bit numbers only with numbers of the same type. A bfloat16 row is a sum of
such numbers (digits). Each line of 128 inputs is

    x[d] = Σ_t 2^(e + w_t) · digit_t[d]
    Σ_d x[d] · q[f, d] = Σ_lines Σ_t 2^(e + w_t) · Σ_d digit_t[d] · q[f, d]

with a power of two `2^e` that scales the line's largest number to a fixed size. Tensor cores then
read the weights `q` from shared memory unconverted.

* float8_e4m3fn: two digits, `w = 0, -4`. Each has four significant bits; together they have the
  eight of bfloat16. Numbers below 2^-14 of the line's largest number lose some of them, but none
  loses more than 2^-22 of the largest.
* int8: three digits, whole numbers, `w = 0, 8, 16`. No number loses more than 2^-22 of the line's
  largest.

Tensor core products have at least eight columns, enough for the digits of a few rows. Each digit of
a row is a column with separate sums, which are added up at the end.

*Sums.* Integer sums are exact. For float8, Hopper truncates 32 products and the previous sum 13
bits below the largest of them before adding. So the sum of a line loses about 2^-11 of its largest
product, less than rounding results to bfloat16. The sums of lines are multiplied by the powers of
two and added up in float32.

A non-finite number makes `2^e`, and thus its whole row, NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm, vector
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, math

LINE = 128
"""Inputs that share a power of two."""
MOST_ROWS = 8
"""Most rows that are split in less time than reading the weights takes."""

_COLUMNS = 8  # divides the columns of a tensor core product
# `w_t`, by the type of the weights and of the digits.
_SHIFTS = {"float8_e4m3fn": (0, -4), "int8": (0, 8, 16)}
# The largest number of a line is scaled to between 2^top and 2^(top + 1).
_TOP = {"float8_e4m3fn": 7, "int8": 21}
_LEAST = 7  # beyond `_TOP`: limits the scaling of lines with a smaller exponent
_MANTISSA, _BIAS, _NOT_FINITE = 23, 127, 255  # of float32
_NAN = 0x7FFFFFFF
_LINE_BYTES = LINE * _COLUMNS  # per line of eight columns
_EACH = row_ops.LANES // _COLUMNS  # lanes that write 16 bytes together
_ptx = mgpu.utils.inline_ptx
# The remainder after the first digit is at most a 32nd of the number.
_FLOAT_DIGITS = """
  {
  .reg .b32 first, second, kept;
  .reg .b16 low, high;
  cvt.rn.f16x2.f32 first, $3, $2;
  cvt.rn.f16x2.f32 second, $5, $4;
  cvt.rn.satfinite.e4m3x2.f16x2 low, first;
  cvt.rn.satfinite.e4m3x2.f16x2 high, second;
  mov.b32 $0, {low, high};
  cvt.rn.f16x2.e4m3x2 kept, low;
  sub.rn.f16x2 first, first, kept;
  cvt.rn.f16x2.e4m3x2 kept, high;
  sub.rn.f16x2 second, second, kept;
  mov.b32 kept, 0x4c004c00;
  mul.rn.f16x2 first, first, kept;
  mul.rn.f16x2 second, second, kept;
  cvt.rn.satfinite.e4m3x2.f16x2 low, first;
  cvt.rn.satfinite.e4m3x2.f16x2 high, second;
  mov.b32 $1, {low, high};
  }"""
# With 128 added to each, the digits are the bytes of one integer.
_WHOLE_DIGITS = """
  {
  .reg .b32 a, b, c, d, low, high;
  cvt.rni.s32.f32 a, $3;
  cvt.rni.s32.f32 b, $4;
  cvt.rni.s32.f32 c, $5;
  cvt.rni.s32.f32 d, $6;
  add.s32 a, a, 0x808080;
  add.s32 b, b, 0x808080;
  add.s32 c, c, 0x808080;
  add.s32 d, d, 0x808080;
  prmt.b32 low, a, b, 0x5140;
  prmt.b32 high, c, d, 0x5140;
  prmt.b32 $0, low, high, 0x5410;
  prmt.b32 $1, low, high, 0x7632;
  prmt.b32 low, a, b, 0x0062;
  prmt.b32 high, c, d, 0x0062;
  prmt.b32 $2, low, high, 0x5410;
  xor.b32 $0, $0, 0x80808080;
  xor.b32 $1, $1, 0x80808080;
  xor.b32 $2, $2, 0x80808080;
  }"""


def num_columns(num_rows: int, dtype: Any) -> int:
    """Returns the columns of the product: the digits of all rows, rounded up to `_COLUMNS`."""
    count = num_rows * len(_SHIFTS[jnp.dtype(dtype).name])
    return -(-count // _COLUMNS) * _COLUMNS


def num_squares(num_rows: int, depth: int) -> int:
    """Returns the size of `write`'s squares: a warp adds up a line of a row at a time."""
    return -(-num_rows * (depth // LINE) // row_ops.WARPS) * row_ops.THREADS


def squares_layout(count: int) -> Any:
    """Returns the layout in which a warpgroup holds `count` squares."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=1)


def sum_squares(squares: Float[Array, "N"], target: Any) -> None:
    """Adds up the squares of each line of a row.

    Args:
      squares: The result of `write`, in `squares_layout`.
      target: `[N / 32]` in shared memory: lines of a row side by side, rows in order. Further
        entries repeat the last.
    """
    if ops.is_interpreted():
        target[...] = jnp.sum(squares.reshape(-1, row_ops.LANES), axis=-1)
        return

    @mlir.emit((squares, squares_layout(squares.shape[0])), target)
    def add(squares: Any, target: Any) -> None:
        place = arith.addi(mlir.shared_pointer(target), arith.muli(mlir.warp(), mlir.constant(4)))
        for turn, total in enumerate(mlir.scalars(squares)):
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            where = arith.addi(place, mlir.constant(4 * turn * row_ops.WARPS))
            _store(where, arith.bitcast(mlir.i32(), total))  # all lanes store the same number


def write(target: Any, factors: Any, rows: Any, scale: Any = None, squares: Any = None) -> Any:
    """Writes the digits of some inputs of rows to the shared memory that tensor cores read.

    Args:
      target: `[columns, D]` of `ops.tiled`, with a row's digits in consecutive columns.
      factors: `2^(e + w_t)`, float32 `[D / 128, columns]`.
      rows: `[B, D]` in bfloat16.
      scale: Multiplied with the rows first, `[D]` in bfloat16; the product is rounded to bfloat16.
      squares: With a scale, float32 `[num_squares()]` in `squares_layout`.

    Returns:
      `squares` plus the squares of these rows; None without a scale.
    """
    (num_rows, depth), (num_columns, _) = rows.shape, target.shape
    dtype, lines = target.dtype, depth // LINE
    if ops.is_interpreted():
        return _write_plainly(target, factors, rows, scale, squares)
    shifts, top = _SHIFTS[dtype.name], _TOP[dtype.name]
    items = num_rows * lines
    own = target, plgpu.RefType(ops.transforms(dtype, ops.SWIZZLE_BYTES))
    with_norm, kind = [], None
    if scale is not None:
        layout = squares_layout(squares.shape[0])
        with_norm = [scale, (squares, layout)]
        kind = mlir.array_type(squares.shape, squares.dtype, layout)

    @mlir.emit(own, factors, rows, *with_norm, result=kind)
    def found(target: Any, factors: Any, rows: Any, *norm: Any) -> Any:
        constant, lane = mlir.constant, mlir.lane()
        target, factors, rows = (mlir.shared_pointer(x) for x in (target, factors, rows))
        registers: Any = norm[1].registers.copy() if norm else None
        chunk = arith.shrui(lane, constant(_EACH.bit_length() - 1))
        inside = arith.muli(arith.andi(lane, constant(_EACH - 1)), constant(4))
        own_inputs = arith.muli(lane, constant(8))  # byte offset of a thread's two pairs in a line
        for turn in range(-(-items // row_ops.WARPS)):
            item = arith.addi(mlir.warp(), constant(turn * row_ops.WARPS))
            item = arith.minui(item, constant(items - 1))
            row, line = (f(item, constant(lines)) for f in (arith.divui, arith.remui))
            # An item's inputs are adjacent, and items are in order.
            pairs = _load(rows, item, own_inputs)
            if norm:
                wide = _numbers(pairs)
                for number in wide:
                    registers.flat[turn] = _add_square(number, registers.flat[turn])
                own = _numbers(_load(mlir.shared_pointer(norm[0]), line, own_inputs))
                pairs = _round([arith.mulf(x, y) for x, y in zip(wide, own, strict=True)])
            exponent = mlir.run(_LARGEST, *pairs)
            exponent = mlir.over_lanes(exponent, nvvm.ReductionKind.UMAX)
            exponent = arith.shrui(exponent, constant(_MANTISSA - 16))
            least = arith.maxui(exponent, constant(top + _LEAST))
            to_top = arith.subi(constant(2 * _BIAS + top), least)
            to_top = arith.bitcast(ir.F32Type.get(), arith.shli(to_top, constant(_MANTISSA)))
            numbers = [arith.mulf(x, to_top) for x in _numbers(pairs)]
            code = _FLOAT_DIGITS if dtype == jnp.float8_e4m3fn else _WHOLE_DIGITS
            found = _ptx(code, *numbers, result_types=[mlir.i32()] * len(shifts))
            first = arith.muli(row, constant(len(shifts)))
            is_finite = mlir.compare("ult", exponent, _NOT_FINITE)
            for index, (shift, word) in enumerate(zip(shifts, found, strict=True)):
                column = arith.addi(first, constant(index))
                back = arith.addi(least, constant(shift - top))
                back = arith.shli(back, constant(_MANTISSA))
                back = arith.select(is_finite, back, constant(_NAN))
                place = arith.addi(arith.muli(line, constant(num_columns)), column)
                # Several lanes write the same number to a place.
                _store(arith.addi(factors, arith.muli(place, constant(4))), back)
                own = arith.andi(column, constant(_COLUMNS - 1))
                tile = arith.muli(arith.shrui(column, constant(3)), constant(lines))
                place = arith.muli(arith.addi(tile, line), constant(_LINE_BYTES))
                place = arith.addi(place, arith.muli(own, constant(LINE)))
                place = arith.addi(place, arith.muli(arith.xori(chunk, own), constant(16)))
                _store(arith.addi(target, arith.addi(place, inside)), word)
        if not norm:
            return None
        return mgpu.FragmentedArray(_registers=registers, _layout=norm[1].layout, _is_signed=None)

    return found


def _write_plainly(target: Any, factors: Any, rows: Any, scale: Any, squares: Any) -> Any:
    """Implements `write` for the interpreter."""
    num_rows, depth = rows.shape
    dtype, lines = target.dtype, depth // LINE
    shifts, top, x = _SHIFTS[dtype.name], _TOP[dtype.name], rows[...]
    if scale is not None:
        wide = x.astype(jnp.float32)
        own = jnp.sum(jnp.square(wide).reshape(num_rows * lines, -1, 4), axis=-1)
        own = jnp.pad(own, ((0, squares.size // row_ops.LANES - len(own)), (0, 0)))
        squares = squares + own.reshape(-1)
        x = (wide * scale[...].astype(jnp.float32)[None]).astype(jnp.bfloat16)
    x = x.astype(jnp.float32).reshape(num_rows, lines, LINE)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _NAN
    exponent = jnp.max(bits, axis=-1) >> _MANTISSA
    least = jnp.maximum(exponent, top + _LEAST)

    def power(field: Array) -> Array:
        return jax.lax.bitcast_convert_type(field << _MANTISSA, jnp.float32)

    x = (x * power(2 * _BIAS + top - least)[..., None]).reshape(num_rows, depth)
    if dtype == jnp.float8_e4m3fn:
        first = x.astype(dtype)
        found = [first, ((x - first.astype(jnp.float32)) * 16).astype(dtype)]
    else:
        whole = jnp.rint(x).astype(jnp.int32) + 0x808080
        found = [((whole >> shift & 255) - 128).astype(dtype) for shift in shifts]
    back = [power(least + shift - top) for shift in shifts]
    back = [jnp.where(exponent < _NOT_FINITE, one, jnp.nan) for one in back]
    count = num_rows * len(shifts)
    target[:count, :] = jnp.stack(found, axis=1).reshape(count, depth)
    factors[:, :count] = jnp.stack(back, axis=1).reshape(count, lines).T
    return squares


def add_line(
    total: Float[Array, "64 N"], weights: Any, digits: Any, factors: Any
) -> Float[Array, "64 N"]:
    """Adds the products of a line with 8-bit weights, `2^(e + w_t) · weights · digit_t`.

    Args:
      total: Sums, in `ops.ACCUMULATOR`.
      weights: `[64, 128]` of `ops.tiled`.
      digits: `[N, 128]`, written by `write`.
      factors: `[N]`, likewise.
    """
    if ops.is_interpreted():
        product = jnp.dot(_wide(weights), _wide(digits).T, precision="highest")
        return total + product * factors[...][None]

    def multiply(sums: Any) -> Array:
        plgpu.wgmma(sums, weights, digits.transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(sums, wait_n=0)

    dtype = jnp.float32 if digits.dtype == jnp.float8_e4m3fn else jnp.int32
    rows, columns = total.shape
    products = pl.run_scoped(multiply, plgpu.ACC((rows, columns), dtype)).astype(jnp.float32)
    return _add(total, products, factors)


def add_digits(sums: Any, target: Any, dtype: Any) -> None:
    """Adds up each row's sums over its digits.

    Args:
      sums: Sums of columns, float32 `[N, 64]` in shared memory.
      target: Sums of rows, float32 `[B, 64]`, likewise.
      dtype: Type of the digits.
    """
    num_rows, width = target.shape
    count = len(_SHIFTS[dtype.name])
    if ops.is_interpreted():
        found = sums[...]
        for row in range(num_rows):
            target[row, :] = sum(found[row * count + index] for index in range(count))
        return

    @mlir.emit(sums, target)
    def add(sums: Any, target: Any) -> None:
        constant = mlir.constant
        sums, target = mlir.shared_pointer(sums), mlir.shared_pointer(target)
        # Two rows at a time; a thread without a row repeats the last.
        second = arith.shrui(mlir.thread(), constant(width.bit_length() - 1))
        place = arith.shli(arith.andi(mlir.thread(), constant(width - 1)), constant(2))
        stride = count * width * 4
        for row in range(0, num_rows, row_ops.THREADS // width):
            own = arith.minui(arith.addi(second, constant(row)), constant(num_rows - 1))
            first = arith.addi(sums, arith.addi(place, arith.muli(own, constant(stride))))
            found = [_load_float(first, 4 * width * column) for column in range(count)]
            total = functools.reduce(arith.addf, found)
            where = arith.addi(target, arith.addi(place, arith.muli(own, constant(4 * width))))
            _store(where, arith.bitcast(mlir.i32(), total))


def _load_float(place: ir.Value, offset: int) -> ir.Value:
    code = f"ld.shared.f32 $0, [$1 + {offset}];"
    return _ptx(code, place, result_types=ir.F32Type.get(), has_side_effects=True)


def _wide(ref: Any) -> Array:
    return ref[...].astype(jnp.float32)


def _add(total: Array, products: Array, factors: Any) -> Array:
    """Returns `total + products · factors`, rounded once (fused multiply-add)."""
    factor = ops.spread(ops.read(factors, ops.BY_COLUMN), total.shape, 1)

    given = [(x, ops.ACCUMULATOR) for x in (total, products, factor)]

    @mlir.emit(*given, result=mlir.array_type(total.shape, total.dtype, ops.ACCUMULATOR))
    def found(total: Any, products: Any, factor: Any) -> Any:
        registers = total.registers.copy()
        for index, x in enumerate(total.registers.flat):
            own = products.registers.flat[index], factor.registers.flat[index]
            registers.flat[index] = math.fma(*own, x)
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    return found


# The largest magnitude of four numbers, as bits.
_LARGEST = """
  {
  .reg .b32 one, two;
  and.b32 one, $1, 0x7fff7fff;
  and.b32 two, $2, 0x7fff7fff;
  max.u16x2 one, one, two;
  shr.u32 two, one, 16;
  and.b32 one, one, 0xffff;
  max.u32 $0, one, two;
  }"""


def _load(start: ir.Value, line: ir.Value, own: ir.Value) -> list[ir.Value]:
    """Loads two pairs of bfloat16 numbers, `own` bytes into a line of the array at `start`."""
    place = arith.addi(start, arith.addi(arith.muli(line, mlir.constant(2 * LINE)), own))
    kinds = [mlir.i32()] * 2
    code = "ld.shared.v2.b32 {$0, $1}, [$2];"
    return mlir.ptx(code, place, kinds=kinds)


def _store(place: ir.Value, word: ir.Value) -> None:
    mlir.effect("st.shared.b32 [$0], $1;", place, word)


def _numbers(pairs: list[ir.Value]) -> list[ir.Value]:
    """Converts pairs of bfloat16 numbers to float32."""
    return [number for pair in pairs for number in mlir.unpack_bfloat16(pair)]


def _round(numbers: list[ir.Value]) -> list[ir.Value]:
    """Rounds four numbers to bfloat16."""
    code = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return [mlir.run(code, *numbers[start : start + 2]) for start in (0, 2)]


def _add_square(number: ir.Value, total: ir.Value) -> ir.Value:
    """Returns `total + number²`, as vectors of one entry."""
    number = vector.broadcast(total.type, number)
    return math.fma(number, number, total)
