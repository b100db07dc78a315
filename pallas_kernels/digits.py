"""A few rows as digits of eight bits, for products with narrow weights on Hopper's tensor cores.

Tensor cores multiply numbers of eight bits only with numbers of the same kind. A row in bfloat16 is
a sum of such numbers: of each line of 128 inputs it is

    x[d] = Σ_t 2^(e + w_t) · digit_t[d]
    Σ_d x[d] · q[f, d] = Σ_lines Σ_t 2^(e + w_t) · Σ_d digit_t[d] · q[f, d]

with a power of two `2^e` that brings the line's largest number to a fixed size. The weights `q` are
then read where they lie, and no thread touches those of eight bits. Codes of four bits become whole
numbers of eight bits in four instructions for eight of them.

* float8_e4m3fn: two digits, `w = 0, -4`. Each has four significant bits, so that both have the
  eight of bfloat16. What is smaller than 2^-14 of the line's largest number loses some of them:
  nothing loses more than 2^-22 of that number.
* int8 and four bits: three digits, whole numbers, `w = 0, 8, 16`. Nothing loses more than 2^-22 of
  the line's largest number.

Tensor cores take eight columns at least, which is room for the digits of a few rows: each digit of
a row is a column, with sums of its own, which are added up last.

*Sums.* Sums of whole numbers are exact. Of float8, Hopper adds up 32 products and what was there
before after it has cut all of them off 13 bits below the largest. Sums of a line so lose about
2^-11 of its largest product, less than what is lost where results are rounded to bfloat16. The sums
of lines are added up in float32, which is also where powers of two and the scales of groups come
in.

*Two groups at a time.* With four bits, the sums of each group of 32 inputs are multiplied by a
scale. A single row leaves half of the eight columns free. These have the digits of every other
group: one half of the columns is zero wherever the other is not. So the sums of two groups are made
in the same registers, and half of the work with sums is left.

A number that is not finite makes `2^e`, and so its whole row, NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import math as typed_math
from jaxlib.mlir.dialects import nvvm, vector
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops, widen, words
from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
math: Any = typed_math

LINE = widen.LINE
"""Inputs that share a power of two."""
MOST_ROWS = 8
"""Rows whose digits are made in less time than it takes to read the weights."""

_COLUMNS = 8  # a multiple of these is what tensor cores take
# By the type of the weights; codes of four bits lie in bytes.
_TYPES = {"float8_e4m3fn": "float8_e4m3fn", "int8": "int8", "uint8": "int8"}
_SHIFTS = {"float8_e4m3fn": (0, -4), "int8": (0, 8, 16)}  # `w_t`, by the type of the digits
# The largest number of a line is brought to between 2^top and twice that.
_TOP = {"float8_e4m3fn": 7, "int8": 21}
_LEAST = 7  # beyond `_TOP`: lines whose exponent is smaller are not brought so far
_MANTISSA, _BIAS, _NOT_FINITE = 23, 127, 255  # of float32
_NAN = 0x7FFFFFFF
_LINE_BYTES = LINE * _COLUMNS  # of a line of eight columns
_EACH = warp_ops.LANES // _COLUMNS  # lanes that write 16 bytes together
_CODE_SHIFT = 4  # codes lie in the upper half of a byte
_HALF = _COLUMNS // 2  # columns of every other group, where two groups are multiplied at a time
_ptx = mgpu.utils.inline_ptx
# What is left of a number beside its first digit is at most a 32nd of it.
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
# With 128 added to each digit they are the bytes of a number.
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


def digits_dtype(weights_dtype: Any) -> Any:
    """The type of digits for weights of a type."""
    return jnp.dtype(_TYPES[jnp.dtype(weights_dtype).name])


def num_columns(num_rows: int, weights_dtype: Any) -> int:
    """Columns that tensor cores multiply: each digit of a row, and what fills them up."""
    count = num_rows * len(_SHIFTS[digits_dtype(weights_dtype).name])
    return -(-count // _COLUMNS) * _COLUMNS


def _is_by_two(num_rows: int, *, are_codes: bool) -> bool:
    """Whether two groups are multiplied at a time."""
    return are_codes and num_rows == 1


def _columns(row: int, dtype: Any, num_rows: int, *, are_codes: bool) -> list[int]:
    """The columns of a row's digits, which have this type."""
    count = len(_SHIFTS[dtype.name])
    if _is_by_two(num_rows, are_codes=are_codes):
        return [first + index for first in (0, _HALF) for index in range(count)]
    return [row * count + index for index in range(count)]


def begin(target: Any, num_rows: int, *, are_codes: bool, interpret: bool) -> None:
    """Sets what `write` leaves zero.

    Args:
      target: Of `write`, several of them.
      num_rows: Rows that `write` takes.
      are_codes: As for `write`.
      interpret: Whether the interpreter runs the kernel.
    """
    if not _is_by_two(num_rows, are_codes=are_codes):
        return
    if interpret:
        target[...] = jnp.zeros(target.shape, target.dtype)
        return
    per_thread = target.size * target.dtype.itemsize // warp_ops.THREADS
    reference = plgpu.RefType(ops.transforms(target.dtype, ops.SWIZZLE_BYTES))

    @plgpu.inline_mgpu(arg_types=(reference,))
    def clear(_: Any, target: Any) -> None:
        zero = words.constant(0)
        place = arith.addi(
            words.shared_pointer(target), arith.muli(words.thread(), words.constant(16))
        )
        for first in range(0, per_thread, 16):
            code = f"st.shared.v4.b32 [$0 + {first * warp_ops.THREADS}], {{$1, $1, $1, $1}};"
            _ptx(code, place, zero, has_side_effects=True)
        mgpu.warpgroup_barrier()

    clear(target)


def num_squares(num_rows: int, depth: int) -> int:
    """Entries that `write` adds squares to: a warp has a line of a row at a time."""
    return -(-num_rows * (depth // LINE) // warp_ops.WARPS) * warp_ops.THREADS


def squares_layout(count: int) -> Any:
    """How a warpgroup holds so many entries."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=1)


def sum_squares(squares: Float[Array, "N"], target: Any, *, interpret: bool) -> None:
    """Adds up what `write` has added of each line of a row.

    Args:
      squares: What it returned, in `squares_layout`.
      target: `[N / 32]` in shared memory: lines of a row side by side, rows in order. What follows
        repeats the last.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        target[...] = jnp.sum(squares.reshape(-1, warp_ops.LANES), axis=-1)
        return

    @plgpu.inline_mgpu(arg_types=(squares_layout(squares.shape[0]), plgpu.RefType()))
    def add(_: Any, squares: Any, target: Any) -> None:
        place = arith.addi(
            words.shared_pointer(target), arith.muli(words.warp(), words.constant(4))
        )
        for turn, total in enumerate(words.scalars(squares)):
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            where = arith.addi(place, words.constant(4 * turn * warp_ops.WARPS))
            _store(where, arith.bitcast(words.i32(), total))  # all lanes the same

    add(squares, target)


def write(
    target: Any,
    factors: Any,
    rows: Any,
    scale: Any = None,
    squares: Any = None,
    *,
    are_codes: bool = False,
    interpret: bool,
) -> Any:
    """Writes the digits of some inputs of rows to where tensor cores read them.

    Args:
      target: `[columns, D]` of `ops.tiled`, the digits of each row below each other.
      factors: `2^(e + w_t)`, float32 `[D / 128, columns]`.
      rows: `[B, D]` in bfloat16.
      scale: What rows are multiplied by first, `[D]` in bfloat16; the product is rounded to it.
      squares: With a scale, float32 `[num_squares()]` in `squares_layout`.
      are_codes: Whether they are for codes of four bits, whose order inputs then have, and 16 times
        of which are multiplied.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      `squares` and the squares of these rows; None without a scale.
    """
    (num_rows, depth), (num_columns, _) = rows.shape, target.shape
    dtype, lines = target.dtype, depth // LINE
    if interpret:
        return _write_plainly(target, factors, rows, scale, squares, are_codes=are_codes)
    shifts, top = _SHIFTS[dtype.name], _TOP[dtype.name]
    code_shift = _CODE_SHIFT if are_codes else 0
    is_by_two = _is_by_two(num_rows, are_codes=are_codes)
    items = num_rows * lines
    layouts = [plgpu.RefType(ops.transforms(dtype, ops.SWIZZLE_BYTES))]
    layouts += [plgpu.RefType()] * 2
    operands: list[Any] = [target, factors, rows]
    returns: dict[str, Any] = {}
    if scale is not None:
        layout = squares_layout(squares.shape[0])
        layouts += [plgpu.RefType(), layout]
        operands += [scale, squares]
        kind = plgpu.ShapeDtypeStruct(squares.shape, squares.dtype, layout=layout)
        returns = {"return_type": kind}

    @plgpu.inline_mgpu(arg_types=tuple(layouts), **returns)
    def write_digits(_: Any, target: Any, factors: Any, rows: Any, *norm: Any) -> Any:
        constant, lane = words.constant, words.lane()
        target, factors, rows = (words.shared_pointer(x) for x in (target, factors, rows))
        registers: Any = norm[1].registers.copy() if norm else None
        chunk = arith.shrui(lane, constant(_EACH.bit_length() - 1))
        inside = arith.muli(arith.andi(lane, constant(_EACH - 1)), constant(4))
        own_inputs = _own_inputs(lane, are_codes=are_codes)
        # Where two groups are multiplied at a time; a thread's inputs are of one.
        half = arith.andi(arith.shrui(lane, constant(3)), constant(1))
        half = arith.muli(half, constant(_HALF))
        for turn in range(-(-items // warp_ops.WARPS)):
            item = arith.addi(words.warp(), constant(turn * warp_ops.WARPS))
            item = arith.minui(item, constant(items - 1))
            row, line = (f(item, constant(lines)) for f in (arith.divui, arith.remui))
            # An item's inputs lie side by side, and items in order.
            pairs = _load(rows, item, own_inputs)
            if norm:
                wide = _numbers(pairs)
                for number in wide:
                    registers.flat[turn] = _add_square(number, registers.flat[turn])
                own = _numbers(_load(words.shared_pointer(norm[0]), line, own_inputs))
                pairs = _round([arith.mulf(x, y) for x, y in zip(wide, own, strict=True)])
            exponent = words.run(_LARGEST, *pairs)
            exponent = words.over_lanes(exponent, nvvm.ReductionKind.UMAX)
            exponent = arith.shrui(exponent, constant(_MANTISSA - 16))
            least = arith.maxui(exponent, constant(top + _LEAST))
            to_top = arith.subi(constant(2 * _BIAS + top), least)
            to_top = arith.bitcast(ir.F32Type.get(), arith.shli(to_top, constant(_MANTISSA)))
            numbers = [arith.mulf(x, to_top) for x in _numbers(pairs)]
            if are_codes:
                numbers = [numbers[place] for place in _CODE_ORDER]
            code = _FLOAT_DIGITS if dtype == jnp.float8_e4m3fn else _WHOLE_DIGITS
            found = _ptx(code, *numbers, result_types=[words.i32()] * len(shifts))
            first = half if is_by_two else arith.muli(row, constant(len(shifts)))
            is_finite = arith.cmpi(arith.CmpIPredicate.ult, exponent, constant(_NOT_FINITE))
            for index, (shift, word) in enumerate(zip(shifts, found, strict=True)):
                column = arith.addi(first, constant(index))
                back = arith.addi(least, constant(shift - top - code_shift))
                back = arith.shli(back, constant(_MANTISSA))
                back = arith.select(is_finite, back, constant(_NAN))
                place = arith.addi(arith.muli(line, constant(num_columns)), column)
                # All lanes that write to a place write the same.
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

    return write_digits(*operands)


def _write_plainly(
    target: Any, factors: Any, rows: Any, scale: Any, squares: Any, *, are_codes: bool
) -> Any:
    """`write` for the interpreter."""
    num_rows, depth = rows.shape
    dtype, lines = target.dtype, depth // LINE
    shifts, top, x = _SHIFTS[dtype.name], _TOP[dtype.name], rows[...]
    if scale is not None:
        wide = x.astype(jnp.float32)
        own = jnp.sum(jnp.square(wide).reshape(num_rows * lines, -1, 4), axis=-1)
        own = jnp.pad(own, ((0, squares.size // warp_ops.LANES - len(own)), (0, 0)))
        squares = squares + own.reshape(-1)
        x = (wide * scale[...].astype(jnp.float32)[None]).astype(jnp.bfloat16)
    x = x.astype(jnp.float32).reshape(num_rows, lines, LINE)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _NAN
    exponent = jnp.max(bits, axis=-1) >> _MANTISSA
    least = jnp.maximum(exponent, top + _LEAST)

    def power(field: Array) -> Array:
        return jax.lax.bitcast_convert_type(field << _MANTISSA, jnp.float32)

    x = x * power(2 * _BIAS + top - least)[..., None]
    if are_codes:  # group, i, n, t, e to group, n, t, e, i
        x = x.reshape(num_rows, -1, 2, 2, 4, 2).transpose(0, 1, 3, 4, 5, 2)
    x = x.reshape(num_rows, depth)
    if dtype == jnp.float8_e4m3fn:
        first = x.astype(dtype)
        found = [first, ((x - first.astype(jnp.float32)) * 16).astype(dtype)]
    else:
        whole = jnp.rint(x).astype(jnp.int32) + 0x808080
        found = [((whole >> shift & 255) - 128).astype(dtype) for shift in shifts]
    back = [power(least + shift - top - (_CODE_SHIFT if are_codes else 0)) for shift in shifts]
    back = [jnp.where(exponent < _NOT_FINITE, one, jnp.nan) for one in back]
    if _is_by_two(num_rows, are_codes=are_codes):
        for half in range(2):
            of_half = [x.reshape(-1, 2, WEIGHT_GROUP).at[:, 1 - half].set(0) for x in found]
            start, end = half * _HALF, half * _HALF + len(shifts)
            target[start:end, :] = jnp.stack(of_half).reshape(len(shifts), depth)
            factors[:, start:end] = jnp.concatenate(back).T
        return squares
    count = num_rows * len(shifts)
    target[:count, :] = jnp.stack(found, axis=1).reshape(count, depth)
    factors[:, :count] = jnp.stack(back, axis=1).reshape(count, lines).T
    return squares


def add_line(
    total: Float[Array, "64 N"], weights: Any, digits: Any, factors: Any, *, interpret: bool
) -> Float[Array, "64 N"]:
    """Adds the products of a line with weights of eight bits, `2^(e + w_t) · weights · digit_t`.

    Args:
      total: In `ops.ACCUMULATOR`.
      weights: `[64, 128]` of `ops.tiled`.
      digits: `[N, 128]`, what `write` wrote.
      factors: `[N]`, likewise.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        product = jnp.dot(_wide(weights), _wide(digits).T, precision="highest")
        return total + product * factors[...][None]

    def multiply(sums: Any) -> Array:
        plgpu.wgmma(sums, weights, digits.transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(sums, wait_n=0)

    dtype = jnp.float32 if digits.dtype == jnp.float8_e4m3fn else jnp.int32
    rows, columns = total.shape
    products = pl.run_scoped(multiply, plgpu.ACC((rows, columns), dtype)).astype(jnp.float32)
    return _add(total, products, factors)


def add_line_of_codes(
    total: Float[Array, "64 N"],
    codes: Any,
    scales: Any,
    digits: Any,
    factors: Any,
    *,
    num_rows: int,
    depth: int,
    interpret: bool,
) -> Float[Array, "64 N"]:
    """`add_line` with weights of four bits.

    Args:
      total: In `ops.ACCUMULATOR`.
      codes: `[64, 64]` bytes, a line of `widen.lines_of_codes`.
      scales: `[4, 64]` in bfloat16, of each 32 inputs.
      digits: `[N, 128]`, what `write` wrote for codes.
      factors: `[N]`, likewise.
      num_rows: Rows whose digits these are.
      depth: Inputs of all lines that `digits` is one of.
      interpret: Whether the interpreter runs the kernel.
    """
    groups = scales.shape[0]
    if interpret:
        own = widen.read_codes(codes[...]).transpose(0, 2, 5, 1, 3, 4)  # f, w, n, t, e, i
        own = 16.0 * own.reshape(len(own), groups, -1).astype(jnp.float32)
        of_groups = _wide(digits).reshape(digits.shape[0], groups, -1)
        products = jnp.einsum("fgd,ngd->gfn", own, of_groups, precision="highest")
        product = jnp.sum(products * _wide(scales)[..., None], axis=0)
        return total + product * factors[...][None]
    lines = plgpu.RefType(widen.lines_of_codes(codes.shape).transforms)
    tiles = plgpu.RefType(ops.transforms(digits.dtype, ops.SWIZZLE_BYTES))

    @plgpu.inline_mgpu(
        arg_types=(lines, plgpu.RefType(), tiles, ops.ACCUMULATOR),
        return_type=plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=ops.ACCUMULATOR),
    )
    def multiply(_: Any, codes: Any, scales: Any, digits: Any, zeros: Any) -> Any:
        left: list[ir.Value] = []
        for of_group in zip(*widen.load_codes(codes), strict=True):
            whole = [_whole(word) for word in of_group]
            left += [halves[place] for place in range(2) for halves in whole]
        stride = depth // LINE * _LINE_BYTES
        firsts = range(0, LINE, LINE // groups)
        descriptors = words.descriptors(digits, firsts, stride=stride)
        found = _multiply_groups(left, descriptors, total.shape[1], together)
        place = arith.addi(
            words.shared_pointer(scales), arith.shli(widen.row_of_codes(), words.constant(1))
        )
        if together > 1:  # half of the threads have columns of the second group
            second = arith.andi(arith.shrui(words.lane(), words.constant(1)), words.constant(1))
            place = arith.addi(place, arith.muli(second, words.constant(2 * codes_rows)))
        registers = zeros.registers.copy()
        kind = zeros.registers.flat[0].type
        for group in range(0, groups, together):
            # Those of the thread's two rows.
            own = [
                _ptx(
                    _SCALE,
                    arith.addi(place, words.constant(2 * (group * codes_rows + 8 * half))),
                    result_types=ir.F32Type.get(),
                    has_side_effects=True,
                )
                for half in range(2)
            ]
            own = [vector.broadcast(kind, x) for x in own]
            products = found[group // together]
            for index in range(len(products) // 2):
                sums = vector.from_elements(
                    ir.VectorType.get((2,), words.i32()), products[2 * index : 2 * index + 2]
                )
                before = registers.flat[index]
                registers.flat[index] = math.fma(arith.sitofp(kind, sums), own[index % 2], before)
        return mgpu.FragmentedArray(_registers=registers, _layout=zeros.layout, _is_signed=None)

    codes_rows = codes.shape[0]
    together = 2 if _is_by_two(num_rows, are_codes=True) else 1
    return _add(total, multiply(codes, scales, digits, ops.full(total.shape, 0.0)), factors)


def _whole(word: ir.Value) -> list[ir.Value]:
    """16 times (codes less 8), of the lower halves of a word's bytes and of the upper ones."""
    lowest, upper = (words.constant(bits - (1 << 32)) for bits in (0x88888888, 0xF0F0F0F0))
    word = arith.xori(word, lowest)  # a code less 8 as four bits with a sign
    return [arith.andi(x, upper) for x in (arith.shli(word, words.constant(_CODE_SHIFT)), word)]


def _multiply_groups(
    left: list[ir.Value], descriptors: list[ir.Value], num_columns: int, together: int
) -> list[list[ir.Value]]:
    """Products of groups of 32 inputs, so many together, whole numbers, once all have come.

    Nothing but what stands here knows the sums while they are made.
    """
    count, groups = num_columns // 2, len(descriptors)
    num_sums, of_group, code = groups // together * count, len(left) // groups, []
    for group in range(groups):
        sums, own = (
            ", ".join(f"${start + index}" for index in range(size))
            for start, size in (
                (group // together * count, count),
                (num_sums + group * of_group, of_group),
            )
        )
        descriptor = f"${num_sums + groups * of_group + group}"
        code.append(
            f"wgmma.mma_async.sync.aligned.m64n{num_columns}k32.s32.s8.s8 "
            f"{{{sums}}}, {{{own}}}, {descriptor}, {'goes_on' if group % together else 'begins'};"
        )
    found = _ptx(
        "{ .reg .pred begins, goes_on; .reg .b32 zero; mov.b32 zero, 0; "
        "setp.ne.b32 begins, zero, 0; setp.eq.b32 goes_on, zero, 0; "
        f"wgmma.fence.sync.aligned; {' '.join(code)} wgmma.commit_group.sync.aligned; "
        "wgmma.wait_group.sync.aligned 0; }",
        *left,
        *descriptors,
        result_types=[words.i32()] * num_sums,
        has_side_effects=True,
        convergent=True,
    )
    return [list(found[start : start + count]) for start in range(0, num_sums, count)]


def add_digits(sums: Any, target: Any, dtype: Any, *, are_codes: bool, interpret: bool) -> None:
    """Adds up the sums of each row's digits.

    Args:
      sums: Of columns, float32 `[N, 64]` in shared memory.
      target: Of rows, float32 `[B, 64]`, likewise.
      dtype: Of the digits.
      are_codes: As for `write`.
      interpret: Whether the interpreter runs the kernel.
    """
    num_rows, width = target.shape
    columns = [_columns(row, dtype, num_rows, are_codes=are_codes) for row in range(num_rows)]
    if interpret:
        found = sums[...]
        for row, own in enumerate(columns):
            target[row, :] = sum(found[column] for column in own)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add(_: Any, sums: Any, target: Any) -> None:
        constant = words.constant
        sums, target = words.shared_pointer(sums), words.shared_pointer(target)
        # Two rows at a time; what is left over repeats the last.
        second = arith.shrui(words.thread(), constant(width.bit_length() - 1))
        place = arith.shli(arith.andi(words.thread(), constant(width - 1)), constant(2))
        stride = len(columns[0]) * width * 4
        for row in range(0, num_rows, warp_ops.THREADS // width):
            own = arith.minui(arith.addi(second, constant(row)), constant(num_rows - 1))
            first = arith.addi(sums, arith.addi(place, arith.muli(own, constant(stride))))
            found = [_load_float(first, 4 * width * column) for column in columns[0]]
            total = functools.reduce(arith.addf, found)
            where = arith.addi(target, arith.addi(place, arith.muli(own, constant(4 * width))))
            _store(where, arith.bitcast(words.i32(), total))

    add(sums, target)


def _load_float(place: ir.Value, offset: int) -> ir.Value:
    code = f"ld.shared.f32 $0, [$1 + {offset}];"
    return _ptx(code, place, result_types=ir.F32Type.get(), has_side_effects=True)


def _wide(ref: Any) -> Array:
    return ref[...].astype(jnp.float32)


def _add(total: Array, products: Array, factors: Any) -> Array:
    """`total + products · factors`, each rounded once."""
    factor = ops.spread(ops.read(factors, ops.BY_COLUMN), total.shape, 1)

    @plgpu.inline_mgpu(
        arg_types=(ops.ACCUMULATOR,) * 3,
        return_type=plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=ops.ACCUMULATOR),
    )
    def add(_: Any, total: Any, products: Any, factor: Any) -> Any:
        registers = total.registers.copy()
        for index, x in enumerate(total.registers.flat):
            own = products.registers.flat[index], factor.registers.flat[index]
            registers.flat[index] = math.fma(*own, x)
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    return add(total, products, factor)


# A scale of a group, bfloat16, in float32.
_SCALE = """
  {
  .reg .b16 zero, one;
  mov.b16 zero, 0;
  ld.shared.b16 one, [$1];
  mov.b32 $0, {zero, one};
  }"""
# The largest of four numbers without their signs, as bits.
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
# A word of codes has, of each 32 inputs, those of a thread: these places of the two pairs that
# `_load` finds 16 inputs apart (`models.four_bits` says which input is where).
_CODE_ORDER = (0, 2, 1, 3)


def _own_inputs(lane: ir.Value, *, are_codes: bool) -> tuple[ir.Value, int]:
    """Where a thread's two pairs of inputs are in a line: bytes to the first, and to the next."""
    constant = words.constant
    if not are_codes:
        return arith.muli(lane, constant(8)), 4
    # A thread's codes lie in the lower or upper halves of a word of one of four threads.
    thread, upper = (
        arith.andi(arith.shrui(lane, constant(start)), constant(most))
        for start, most in ((0, 3), (2, 1))
    )
    group = arith.shrui(lane, constant(3))
    place = arith.addi(arith.muli(group, constant(64)), arith.muli(upper, constant(16)))
    return arith.addi(place, arith.muli(thread, constant(4))), 32


def _load(start: ir.Value, line: ir.Value, own: tuple[ir.Value, int]) -> list[ir.Value]:
    """Two pairs of numbers in bfloat16, of one of the lines that lie behind `start`."""
    first, apart = own
    place = arith.addi(start, arith.addi(arith.muli(line, words.constant(2 * LINE)), first))
    kinds = [words.i32()] * 2
    code = "ld.shared.v2.b32 {$0, $1}, [$2];"
    if apart != 4:
        code = f"ld.shared.b32 $0, [$2]; ld.shared.b32 $1, [$2 + {apart}];"
    return list(_ptx(code, place, result_types=kinds, has_side_effects=True))


def _store(place: ir.Value, word: ir.Value) -> None:
    _ptx("st.shared.b32 [$0], $1;", place, word, has_side_effects=True)


def _numbers(pairs: list[ir.Value]) -> list[ir.Value]:
    """Numbers in bfloat16 as float32."""
    return [number for pair in pairs for number in words.unpack_bfloat16(pair)]


def _round(numbers: list[ir.Value]) -> list[ir.Value]:
    """Four numbers in bfloat16."""
    code = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return [words.run(code, *numbers[start : start + 2]) for start in (0, 2)]


def _add_square(number: ir.Value, total: ir.Value) -> ir.Value:
    """`total + number²`, in a vector of one."""
    number = vector.broadcast(total.type, number)
    return math.fma(number, number, total)
