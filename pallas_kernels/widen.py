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
side. A pair takes three instructions at most: a shift, which the first of four does not need, one
that makes four bits the mantissa's last ones of 128, and one that takes 136 off.
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
_CODES = """
  {
  .reg .b32 both;
  lop3.b32 both, $1, 0x000f000f, 0x43004300, 0xea;
  sub.bf16x2 $0, both, $2;
  }"""
_EXCESS = 0x43084308  # 136
_VECTOR = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
_LINE_BYTES = LINE // 2
_GROUP = 32  # inputs of a word that a thread reads, which have one scale


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


def codes_to_bfloat16(codes: Any, *, interpret: bool) -> list[Array]:
    """The codes of a line of 64 rows less 8 in bfloat16, in `ops.ACCUMULATOR`: each 32 inputs.

    Args:
      codes: `[64, 64]` bytes in shared memory, row by row.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      Four arrays `[64, 32]`.
    """
    count = LINE // _GROUP
    if interpret:
        digits = codes[...].astype(jnp.int32).reshape(-1, 4, count, 2, 2)  # t, w, e, i
        both = jnp.stack([digits & 15, digits >> 4], axis=-1) - 8  # t, w, e, i, n
        wide = both.transpose(0, 2, 4, 5, 1, 3).reshape(-1, count, _GROUP)
        return [wide[:, index].astype(jnp.bfloat16) for index in range(count)]
    shape = (codes.shape[0], _GROUP)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=ops.ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[kind] * count)
    def widen(_: Any, codes: Any) -> Any:
        excess = words.constant(_EXCESS)
        # A warp has 16 rows; its lanes read eight of them side by side.
        place = arith.muli(words.warp(), words.constant(16 * _LINE_BYTES))
        place = arith.addi(place, arith.muli(words.lane(), words.constant(16)))
        place = arith.addi(place, llvm.ptrtoint(words.i32(), mgpu.utils.memref_ptr(codes)))
        rows = [
            mgpu.utils.inline_ptx(
                _VECTOR,
                arith.addi(place, words.constant(8 * half * _LINE_BYTES)),
                result_types=[words.i32()] * count,
                has_side_effects=True,
            )
            for half in range(2)
        ]
        found = []
        for index in range(count):
            pairs = []
            for shift in range(0, 16, 4):
                for row in rows:
                    word = row[index]
                    word = arith.shrui(word, words.constant(shift)) if shift else word
                    pairs.append(
                        _as_pair(llvm.inline_asm(words.i32(), [word, excess], _CODES, "=r,r,r"))
                    )
            template = mgpu.FragmentedArray.splat(
                arith.constant(ir.BF16Type.get(), 0.0), shape, ops.ACCUMULATOR.to_mgpu()
            )
            registers = template.registers.copy()
            for number, pair in enumerate(pairs):
                registers.flat[number] = pair
            found.append(
                mgpu.FragmentedArray(
                    _registers=registers, _layout=template.layout, _is_signed=None
                )
            )
        return found

    return list(widen(codes))


def _as_pair(word: ir.Value) -> ir.Value:
    """A word as two numbers in bfloat16."""
    found = vector.broadcast(ir.VectorType.get((1,), words.i32()), word)
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), found)
