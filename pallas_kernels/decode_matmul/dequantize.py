"""Dequantizes weights to bfloat16 in registers, for the tensor cores of Hopper.

bfloat16 represents every float8_e4m3fn and int8 number, so nothing is rounded. A thread reads
exactly the weights of its share of the product's left operand, so threads exchange nothing. It
reads pairs from swizzled shared memory and converts a pair in four instructions.

* float8_e4m3fn: one instruction to float16, two to float32 and one to bfloat16. NaN stays NaN;
  there is no infinity.
* int8: the byte `b` becomes the lower half of a bfloat16 number whose upper half is 0x43. With the
  byte's top bit cleared that is `128 + b % 128`, and with the other bits cleared 128, or 256 if the
  byte is negative. The difference of both is `b`.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, llvm

TYPES = ("float8_e4m3fn", "int8")
"""Types of 8-bit weights."""

_PAIR = """
  {
  .reg .b32 both, low, top;
  prmt.b32 both, $1, $2, 0x4140;
  and.b32 low, both, 0xff7fff7f;
  and.b32 top, both, 0xff80ff80;
  sub.bf16x2 $0, low, top;
  }"""
_UPPER = 0x43


def to_bfloat16(weights: Any) -> Array:
    """Converts a tile of weights to bfloat16 in `ops.ACCUMULATOR`.

    Args:
      weights: `[64, columns]` of one of `TYPES` in shared memory, lines of 128 bytes swizzled.
    """
    narrow = ops.read(weights)
    if narrow.dtype != jnp.int8:
        return narrow.astype(jnp.float32).astype(jnp.bfloat16)
    if ops.is_interpreted():
        return narrow.astype(jnp.bfloat16)

    kind = mlir.array_type(narrow.shape, jnp.bfloat16, ops.ACCUMULATOR)

    @mlir.emit((narrow, ops.ACCUMULATOR), result=kind)
    def widen(narrow: Any) -> Any:
        upper = mlir.constant(_UPPER)
        registers = narrow.registers.copy()
        for index, pair in enumerate(narrow.registers.flat):
            registers.flat[index] = _pair(pair, upper)
        return mgpu.FragmentedArray(_registers=registers, _layout=narrow.layout, _is_signed=None)

    return widen


def _pair(pair: ir.Value, upper: ir.Value) -> ir.Value:
    """Converts two int8 numbers to bfloat16."""
    short = ir.IntegerType.get_signless(16)
    one = vector.bitcast(ir.VectorType.get((1,), short), pair)
    both = arith.extui(mlir.i32(), vector.extract(one, [], [0]))
    return _as_pair(llvm.inline_asm(mlir.i32(), [both, upper], _PAIR, "=r,r,r"))


def _as_pair(word: ir.Value) -> ir.Value:
    """Reinterprets a word as two bfloat16 numbers."""
    found = vector.broadcast(ir.VectorType.get((1,), mlir.i32()), word)
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), found)
