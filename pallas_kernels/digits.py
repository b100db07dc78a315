"""A few rows as digits of eight bits, for products with weights of eight bits on Hopper.

Tensor cores multiply weights of eight bits only with numbers of the same kind. A row in bfloat16
is a sum of such numbers: of each line of 128 inputs it is

    x[d] = 2^e · Σ_t w_t · digit_t[d],        out[f] = Σ_lines 2^e · Σ_t w_t · Σ_d digit_t[d] · q[f, d]

with a power of two `2^e` that brings the line's largest number to a fixed size. The weights `q` are
then read where they lie, and no thread touches them.

* float8_e4m3fn: two digits, `w = 1, 1/16`. Each has four significant bits, so that both have the
  eight of bfloat16. What is smaller than 2^-14 of the line's largest number loses some of them:
  nothing loses more than 2^-22 of that number.
* int8: three digits of the number as a whole one below 2^22, `w = 1, 256, 65536`. Nothing loses more
  than 2^-22 of the line's largest number.

Tensor cores take eight columns at least, which is room for the digits of as many rows. Hopper keeps
about 14 bits of a sum in float8 (sums of whole numbers are exact), so that the sums of each line are
added up in float32, which is also where their powers of two come in.

A number that is not finite makes `2^e`, and so its whole row, NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm as typed_llvm
from jaxlib.mlir.dialects import math as typed_math
from jaxlib.mlir.dialects import nvvm, vector
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops, words

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm
math: Any = typed_math

LINE = 128
"""Inputs that share a power of two."""
ROWS = 8
"""Rows that there is room for, and columns of the tensor cores for each digit."""
TERMS = {"float8_e4m3fn": 2, "int8": 3}
"""Digits of a number, by the type of the weights."""

# The largest number of a line is brought to between 2^top and twice that.
_TOP = {"float8_e4m3fn": 7, "int8": 21}
_LEAST = 7  # beyond `_TOP`: lines whose exponent is smaller are not brought so far
_LINE_BYTES = LINE * ROWS  # of one digit of a line
_NAN = 0x7FFFFFFF
_EACH = warp_ops.LANES // ROWS  # lanes that write 16 bytes together
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


def num_squares(num_rows: int, depth: int) -> int:
    """Entries that `write` adds squares to: a warp has a line of a row at a time."""
    return -(-num_rows * (depth // LINE) // warp_ops.WARPS) * warp_ops.THREADS


def squares_layout(count: int) -> Any:
    """How a warpgroup holds so many entries."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=1)


def sums_of_squares(
    found: Float[Array, "*parts N"], num_rows: int, depth: int
) -> Float[Array, "*parts B"]:
    """Of each row, from what `write` added up in one or several programs."""
    lines = depth // LINE
    of_lines = jnp.sum(found.reshape(*found.shape[:-1], -1, warp_ops.LANES), axis=-1)
    of_lines = of_lines[..., : num_rows * lines]  # warps without a line of their own repeat the last
    return jnp.sum(of_lines.reshape(*of_lines.shape[:-1], num_rows, lines), axis=-1)


def write(
    target: Any,
    factors: Any,
    rows: Any,
    scale: Any = None,
    squares: Float[Array, "N"] | None = None,
    *,
    interpret: bool,
) -> Any:
    """Writes the digits of some inputs of rows to where tensor cores read them.

    Args:
      target: `[8 · terms, D]` of `ops.tiled`, the eight rows of each digit below each other.
      factors: `2^e`, float32 `[D / 128, 8]`.
      rows: `[B, D]` in bfloat16.
      scale: What rows are multiplied by first, `[D]` in bfloat16; the product is rounded to it.
      squares: With a scale, what the squares of the rows are added to, in `squares_layout`.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      `squares` with those of these rows.
    """
    num_rows, depth = rows.shape
    dtype, lines = target.dtype, depth // LINE
    if interpret:
        return _write_plainly(target, factors, rows, scale, squares)
    terms, top = TERMS[dtype.name], _TOP[dtype.name]
    items = num_rows * lines
    layouts = [plgpu.RefType(ops.transforms(dtype, ops.SWIZZLE_BYTES))]
    layouts += [plgpu.RefType()] * 2
    operands, returns = [target, factors, rows], {}
    if scale is not None:
        layout = squares_layout(squares.shape[0])
        layouts += [plgpu.RefType(), layout]
        operands += [scale, squares]
        kind = plgpu.ShapeDtypeStruct(squares.shape, squares.dtype, layout=layout)
        returns = {"return_type": kind}

    @plgpu.inline_mgpu(arg_types=tuple(layouts), **returns)
    def write_digits(_: Any, target: Any, factors: Any, rows: Any, *norm: Any) -> Any:
        constant, lane = words.constant, words.lane()
        target, factors, rows = (_pointer(x) for x in (target, factors, rows))
        registers = None
        if norm:
            registers = norm[1].registers.copy()
        inside = arith.muli(arith.andi(lane, constant(_EACH - 1)), constant(4))
        chunk = arith.shrui(lane, constant(_EACH.bit_length() - 1))
        own_inputs = arith.muli(lane, constant(8))
        for turn in range(-(-items // warp_ops.WARPS)):
            item = arith.addi(words.warp(), constant(turn * warp_ops.WARPS))
            item = arith.minui(item, constant(items - 1))
            row, line = (f(item, constant(lines)) for f in (arith.divui, arith.remui))
            # An item's inputs lie side by side, and items in order.
            place = arith.addi(arith.muli(item, constant(2 * LINE)), own_inputs)
            pairs = _load_pairs(arith.addi(rows, place))
            if norm:
                place = arith.addi(arith.muli(line, constant(2 * LINE)), own_inputs)
                factor = _numbers(_load_pairs(arith.addi(_pointer(norm[0]), place)))
                wide = _numbers(pairs)
                for number in wide:
                    registers.flat[turn] = _fma(number, number, registers.flat[turn])
                pairs = _round([arith.mulf(x, y) for x, y in zip(wide, factor, strict=True)])
            exponent = words.run(_EXPONENT, *pairs)
            exponent = words.over_lanes(exponent, nvvm.ReductionKind.UMAX)
            exponent = arith.shrui(exponent, constant(7))
            least = arith.maxui(exponent, constant(top + _LEAST))
            to_top = _power(arith.subi(constant(2 * 127 + top), least))
            back = arith.shli(arith.subi(least, constant(top)), constant(23))
            is_finite = arith.cmpi(arith.CmpIPredicate.ult, exponent, constant(255))
            back = arith.select(is_finite, back, constant(_NAN))
            place = arith.addi(arith.muli(line, constant(ROWS)), row)
            place = arith.addi(factors, arith.muli(place, constant(4)))
            _store(place, back)  # all lanes the same
            numbers = [arith.mulf(x, to_top) for x in _numbers(pairs)]
            code = _FLOAT_DIGITS if dtype == jnp.float8_e4m3fn else _WHOLE_DIGITS
            kinds = [words.i32()] * terms
            place = arith.addi(target, arith.muli(line, constant(_LINE_BYTES)))
            place = arith.addi(place, arith.muli(row, constant(LINE)))
            place = arith.addi(place, arith.muli(arith.xori(chunk, row), constant(16)))
            place = arith.addi(place, inside)
            for term, word in enumerate(_ptx(code, *numbers, result_types=kinds)):
                _store(place, word, offset=term * lines * _LINE_BYTES)
        if not norm:
            return None
        return mgpu.FragmentedArray(
            _registers=registers, _layout=norm[1].layout, _is_signed=None
        )

    return write_digits(*operands)


def _write_plainly(target: Any, factors: Any, rows: Any, scale: Any, squares: Any) -> Any:
    """`write` for the interpreter."""
    num_rows, depth = rows.shape
    dtype, lines = target.dtype, depth // LINE
    top, x = _TOP[dtype.name], rows[...]
    if scale is not None:
        wide = x.astype(jnp.float32)
        own = jnp.sum(jnp.square(wide).reshape(num_rows * lines, -1, 4), axis=-1)
        own = jnp.pad(own, ((0, squares.size // warp_ops.LANES - len(own)), (0, 0)))
        squares = squares + own.reshape(-1)
        x = (wide * scale[...].astype(jnp.float32)[None]).astype(jnp.bfloat16)
    x = x.astype(jnp.float32).reshape(num_rows, lines, LINE)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _NAN
    exponent = jnp.max(bits, axis=-1) >> 23
    least = jnp.maximum(exponent, top + _LEAST)
    to_top, back = (
        jax.lax.bitcast_convert_type(field << 23, jnp.float32)
        for field in (2 * 127 + top - least, least - top)
    )
    factors[:, :num_rows] = jnp.where(exponent < 255, back, jnp.nan).T
    x = x * to_top[..., None]
    if dtype == jnp.float8_e4m3fn:
        first = x.astype(dtype)
        digits = [first, ((x - first.astype(jnp.float32)) * 16).astype(dtype)]
    else:
        whole = jnp.rint(x).astype(jnp.int32) + 0x808080
        digits = [((whole >> shift & 255) - 128).astype(dtype) for shift in (0, 8, 16)]
    for term, own in enumerate(digits):
        target[term * ROWS : term * ROWS + num_rows, :] = own.reshape(num_rows, depth)
    return squares


def add_line(
    total: Float[Array, "64 8"], weights: Any, digits: Any, factors: Any, *, interpret: bool
) -> Float[Array, "64 8"]:
    """Adds the product of a line: `total + 2^e · Σ_t w_t · weights · digit_t`.

    Args:
      total: In `ops.ACCUMULATOR`.
      weights: `[64, 128]` of `ops.tiled`.
      digits: `[8 · terms, 128]`, what `write` wrote.
      factors: `[8]`, likewise.
      interpret: Whether the interpreter runs the kernel.
    """
    dtype = weights.dtype
    sums_dtype = jnp.float32 if dtype == jnp.float8_e4m3fn else jnp.int32
    shape = weights.shape[0], digits.shape[0]
    if interpret:
        product = jnp.dot(weights[...].astype("f4"), digits[...].astype("f4").T, precision="highest")
        terms = [product[:, start : start + ROWS] for start in range(0, shape[1], ROWS)]
        value = sum(one * weight for one, weight in zip(terms, _weights(dtype), strict=True))
        return total + value * factors[...][None]

    def multiply(sums: Any) -> Array:
        plgpu.wgmma(sums, weights, digits.transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(sums, wait_n=0)

    products = pl.run_scoped(multiply, plgpu.ACC(shape, sums_dtype))
    factor = ops.spread(ops.read(factors, ops.BY_COLUMN), total.shape, 1)

    @plgpu.inline_mgpu(
        arg_types=(ops.ACCUMULATOR,) * 3,
        return_type=plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=ops.ACCUMULATOR),
    )
    def add(_: Any, total: Any, products: Any, factor: Any) -> Any:
        terms = [
            products[:, start : start + ROWS].registers.flat for start in range(0, shape[1], ROWS)
        ]
        registers = total.registers.copy()
        for index, (sums, own) in enumerate(
            zip(total.registers.flat, factor.registers.flat, strict=True)
        ):
            value = _combine([term[index] for term in terms], sums.type)
            registers.flat[index] = math.fma(value, own, sums)
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    return add(total, products, factor)


def _weights(dtype: Any) -> tuple[float, ...]:
    return (1.0, 1 / 16) if dtype == jnp.float8_e4m3fn else (1.0, 256.0, 65536.0)


def _combine(terms: list[ir.Value], kind: ir.Type) -> ir.Value:
    """`Σ_t w_t · term_t`, in vectors of float32."""
    if len(terms) == TERMS["float8_e4m3fn"]:
        first, second = terms
        return math.fma(second, _splat(kind, 1 / 16), first)
    # A line's sums are below 2^21, so that two of them fit into an integer.
    first, second, third = terms
    eight = _splat(first.type, 8)
    low = arith.sitofp(kind, arith.addi(first, arith.shli(second, eight)))
    return math.fma(arith.sitofp(kind, third), _splat(kind, 65536.0), low)


def _splat(kind: ir.Type, value: float | int) -> ir.Value:
    """A vector of equal numbers."""
    element = ir.VectorType(kind).element_type
    attribute = ir.FloatAttr if isinstance(element, ir.F32Type) else ir.IntegerAttr
    equal = ir.DenseElementsAttr.get_splat(kind, attribute.get(element, value))
    return arith.constant(kind, equal)


# The larger of four numbers without their signs, as bits; as long as they are no less than infinity
# these are those of something that is not finite.
_EXPONENT = """
  {
  .reg .b32 one, two;
  and.b32 one, $1, 0x7fff7fff;
  and.b32 two, $2, 0x7fff7fff;
  max.u16x2 one, one, two;
  shr.u32 two, one, 16;
  and.b32 one, one, 0xffff;
  max.u32 $0, one, two;
  }"""


def _load_pairs(place: ir.Value) -> list[ir.Value]:
    """Four numbers in bfloat16."""
    kinds = [words.i32()] * 2
    code = "ld.shared.v2.b32 {$0, $1}, [$2];"
    return list(_ptx(code, place, result_types=kinds, has_side_effects=True))


def _store(place: ir.Value, word: ir.Value, *, offset: int = 0) -> None:
    _ptx(f"st.shared.b32 [$0 + {offset}], $1;", place, word, has_side_effects=True)


def _numbers(pairs: list[ir.Value]) -> list[ir.Value]:
    """Numbers in bfloat16 as float32."""
    found = []
    for pair in pairs:
        low = arith.shli(pair, words.constant(16))
        high = arith.andi(pair, words.constant(-65536))
        found += [arith.bitcast(ir.F32Type.get(), x) for x in (low, high)]
    return found


def _round(numbers: list[ir.Value]) -> list[ir.Value]:
    """Four numbers in bfloat16."""
    code = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return [words.run(code, *numbers[start : start + 2]) for start in (0, 2)]


def _power(field: ir.Value) -> ir.Value:
    """The power of two with this exponent as float32 has it."""
    return arith.bitcast(ir.F32Type.get(), arith.shli(field, words.constant(23)))


def _fma(x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return math.fma(_like(x, z), _like(y, z), z)


def _like(x: ir.Value, z: ir.Value) -> ir.Value:
    """A number as a vector of one, if `z` is one."""
    return x if x.type == z.type else vector.broadcast(z.type, x)


def _pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(words.i32(), mgpu.utils.memref_ptr(ref))
