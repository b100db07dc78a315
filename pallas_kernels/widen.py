"""Narrow weights in bfloat16, in registers, on their way to the tensor cores of Hopper.

bfloat16 has all bits of float8_e4m3fn, of int8 and of four bits, so that nothing is rounded. A
thread reads the weights that it holds of the product's left operand: nothing is exchanged between
threads. Weights of eight bits lie in swizzled shared memory and are read in pairs. A pair then
takes four instructions.

* float8_e4m3fn: one to float16, two to float32 and one to bfloat16. NaN stays NaN; there is no
  infinity.
* int8: the byte `b` becomes the lower half of a bfloat16 number whose upper half is 0x43. With the
  byte's top bit cleared that is `128 + b % 128`, and with the other bits cleared 128, or 256 if the
  byte is negative. The difference of both is `b`.

Codes of four bits lie as `sketchwalk_jax.models.four_bits` says, in lines of 128 inputs: a thread
reads those of a line that it holds of a row as one vector of 16 bytes, and a warp 512 bytes side by
side. A pair takes three instructions at most: a shift, which the first of four does not need; one
that makes four bits the last ones of 128; and a product with the scale `s` that takes `136 s` off.
Scales have four digits, so that `136 s` and the result are exact too.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm as typed_llvm
from jaxlib.mlir.dialects import vector
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels import ops, words
from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm

TYPES = ("float8_e4m3fn", "int8")
"""Types of weights of eight bits."""
LINE = 128
"""Inputs of four bits of which a thread reads one vector for a row."""

_PAIR = """
  {
  .reg .b32 both, low, top;
  prmt.b32 both, $1, $2, 0x4140;
  and.b32 low, both, 0xff7fff7f;
  and.b32 top, both, 0xff80ff80;
  sub.bf16x2 $0, low, top;
  }"""
_UPPER = 0x43
_ptx = mgpu.utils.inline_ptx
_CODES = """
  {
  .reg .b32 both;
  lop3.b32 both, $1, 0x000f000f, 0x43004300, 0xea;
  fma.rn.bf16x2 $0, both, $2, $3;
  }"""
# The scale of a row, twice, and -136 times that.
_SCALE = """
  {
  .reg .b16 one;
  .reg .b32 excess;
  ld.shared.b16 one, [$2];
  mov.b32 $0, {one, one};
  mov.b32 excess, 0xc308c308;
  mul.rn.bf16x2 $1, $0, excess;
  }"""
_VECTOR = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
_LINE_BYTES = LINE // 2


def to_bfloat16(weights: Any, *, interpret: bool) -> Array:
    """A tile of weights in bfloat16, in `ops.ACCUMULATOR`.

    Args:
      weights: `[64, columns]` of one of `TYPES` in shared memory, lines of 128 bytes swizzled.
      interpret: Whether the interpreter runs the kernel.
    """
    narrow = ops.read(weights)
    if narrow.dtype != jnp.int8:
        return narrow.astype(jnp.float32).astype(jnp.bfloat16)
    if interpret:
        return narrow.astype(jnp.bfloat16)

    @plgpu.inline_mgpu(
        arg_types=(ops.ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(
            narrow.shape, jnp.dtype(jnp.bfloat16), layout=ops.ACCUMULATOR
        ),
    )
    def widen(_: Any, narrow: Any) -> Any:
        upper = words.constant(_UPPER)
        registers = narrow.registers.copy()
        for index, pair in enumerate(narrow.registers.flat):
            registers.flat[index] = _pair(pair, upper)
        return mgpu.FragmentedArray(_registers=registers, _layout=narrow.layout, _is_signed=None)

    return widen(narrow)


def _pair(pair: ir.Value, upper: ir.Value) -> ir.Value:
    """Two whole numbers of eight bits in bfloat16."""
    short = ir.IntegerType.get_signless(16)
    one = vector.bitcast(ir.VectorType.get((1,), short), pair)
    both = arith.extui(words.i32(), vector.extract(one, [], [0]))
    return _as_pair(llvm.inline_asm(words.i32(), [both, upper], _PAIR, "=r,r,r"))


def lines_of_codes(shape: tuple[int, ...]) -> Any:
    """Shared memory for codes `[..., 64, bytes]`, in lines of 64 bytes of each row."""
    tiling: Any = plgpu.TilingTransform  # for a type checker it is abstract
    return plgpu.SMEM(shape, jnp.uint8, transforms=(tiling((shape[-2], _LINE_BYTES)),))


def codes_to_bfloat16(codes: Any, scales: Any, *, interpret: bool) -> Array:
    """The weights of a line of 64 rows in bfloat16, `[64, 128]` in `ops.ACCUMULATOR`.

    Args:
      codes: `[64, 64]` bytes, a line of `lines_of_codes`.
      scales: `[4, 64]` in shared memory, of each 32 inputs.
      interpret: Whether the interpreter runs the kernel.
    """
    count = LINE // WEIGHT_GROUP  # words that a thread reads, each of one scale
    if interpret:
        both = read_codes(codes[...])
        wide = both.transpose(0, 2, 4, 5, 1, 3).reshape(-1, count, WEIGHT_GROUP).astype(jnp.float32)
        wide = wide * scales[...].astype(jnp.float32).T[:, :, None]
        return wide.reshape(-1, LINE).astype(jnp.bfloat16)
    shape = (codes.shape[0], LINE)
    lines = plgpu.RefType(lines_of_codes(codes.shape).transforms)

    @plgpu.inline_mgpu(
        arg_types=(lines, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=ops.ACCUMULATOR),
    )
    def widen(_: Any, codes: Any, scales: Any) -> Any:
        constant = words.constant
        scale_place = arith.addi(
            words.shared_pointer(scales), arith.shli(row_of_codes(), constant(1))
        )

        def scale_of(half: int, index: int) -> list[ir.Value]:
            start = arith.addi(scale_place, constant(2 * (index * shape[0] + 8 * half)))
            kinds = [words.i32()] * 2
            return list(_ptx(_SCALE, start, result_types=kinds, has_side_effects=True))

        rows = load_codes(codes)
        layout = ops.ACCUMULATOR.to_mgpu()
        zero = arith.constant(ir.BF16Type.get(), 0.0)
        registers = mgpu.FragmentedArray.splat(zero, shape, layout).registers.copy()
        pairs = []
        for index in range(count):
            factors = [scale_of(half, index) for half in range(2)]
            for shift in range(0, 16, 4):
                for words_of_row, factor in zip(rows, factors, strict=True):
                    word = words_of_row[index]
                    word = arith.shrui(word, constant(shift)) if shift else word
                    operands = [word, *factor]
                    pairs.append(llvm.inline_asm(words.i32(), operands, _CODES, "=r,r,r,r"))
        for number, pair in enumerate(pairs):
            registers.flat[number] = _as_pair(pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return widen(codes, scales)


def read_codes(codes: Array) -> Array:
    """Codes less 8 of a line, `[rows, t, w, e, i, n]` by the digits of their inputs, int32."""
    halves = codes.astype(jnp.int32).reshape(-1, 4, LINE // WEIGHT_GROUP, 2, 2)
    return jnp.stack([halves & 15, halves >> 4], axis=-1) - 8


def row_of_codes() -> ir.Value:
    """The first of a thread's two rows of 64; the second is eight rows below."""
    first = arith.muli(words.warp(), words.constant(16))
    return arith.addi(first, arith.shrui(words.lane(), words.constant(2)))


def load_codes(codes: ir.Value) -> list[list[ir.Value]]:
    """What a thread has of a line of codes: of each of its two rows a word for each scale.

    Args:
      codes: `[64, 64]` bytes, a line of `lines_of_codes`.
    """
    constant, found = words.constant, []
    # A warp has 16 rows; its lanes read eight of them side by side.
    place = arith.muli(words.warp(), constant(16 * _LINE_BYTES))
    place = arith.addi(place, arith.muli(words.lane(), constant(16)))
    place = arith.addi(place, words.shared_pointer(codes))
    for half in range(2):
        start = arith.addi(place, constant(8 * half * _LINE_BYTES))
        kinds = [words.i32()] * (LINE // WEIGHT_GROUP)
        found.append(list(_ptx(_VECTOR, start, result_types=kinds, has_side_effects=True)))
    return found


def _as_pair(word: ir.Value) -> ir.Value:
    """A word as two numbers in bfloat16."""
    found = vector.broadcast(ir.VectorType.get((1,), words.i32()), word)
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), found)
