"""Codes of four bits as numbers of 16 bits, in the registers of single threads.

Two codes of a word become float16 in two instructions: their four bits go into the mantissa of
1024, and a product and a sum take off what is too much and multiply by the step. All of it is
exact: `step · code` is exact in eight bits. The steps are halved and the queries doubled, or
constants would exceed 65504.

The two codes of a pair are those of bytes 0 and 2 of a word, or of bytes 1 and 3; the low four bits
of a byte are a channel of the first half, the high ones one of the second (`BlockCodes`).
"""

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir

# Its annotations lack the operands that its functions take.
arith: Any = typed_arith

LOW, HIGH = 0, 1  # halves of the channels, and of a byte
NO_STEP = -128  # in the place of a step: there is no key
_BITS = (0x000F000F, 0x00F000F0)  # of two codes in a word
_MAGIC = (0x64086408, 0x64806480)  # 1024, and the sign bit of the code, which is turned over
_STEP_BIAS = (14, 10)  # what makes the field of an exponent: step / 2, and step / 32
_EXCESS = (0xE408E408, 0xE480E480)  # -1032 and -1152: what is taken off, in units of the above


def factors(steps: list[ir.Value], half: int) -> list[tuple[ir.Value, ir.Value]]:
    """Product and sum for bytes 0 and 2, then for bytes 1 and 3, of each word of codes.

    Args:
      steps: Exponents of the steps of the channels of the codes, in words of four.
      half: `LOW` or `HIGH`.
    """
    found = []
    for word in steps:
        for shift in (0, 8):
            x = arith.andi(arith.shrui(word, _int(shift)), _int(0x00FF00FF))
            bias = _STEP_BIAS[half]
            x = arith.addi(x, _int(bias << 16 | bias))
            x = arith.shli(arith.andi(x, _int(0x001F001F)), _int(10))
            code = f"{{ .reg .b32 x; mov.b32 x, {_EXCESS[half]}; mul.rn.f16x2 $0, $1, x; }}"
            found.append((x, mlir.run(code, x)))
    return found


def numbers(word: ir.Value, half: int, factor: ir.Value, excess: ir.Value) -> ir.Value:
    """Two of the codes of a word, of bytes 0 and 2, times half their steps, in float16."""
    code = (
        f"{{ .reg .b32 x; lop3.b32 x, $1, {_BITS[half]}, {_MAGIC[half]}, 0x6a; "
        "fma.rn.f16x2 $0, x, $2, $3; }"
    )
    return mlir.run(code, word, factor, excess)


def in_pairs(numbers: list[ir.Value]) -> list[ir.Value]:
    """Of each four numbers of 16 bits, the first and the third, then the second and the fourth.

    So lie what codes are multiplied with.
    """
    found = []
    for start in range(0, len(numbers), 2):
        for selector in ("0x5410", "0x7632"):
            code = f"prmt.b32 $0, $1, $2, {selector};"
            found.append(mlir.run(code, numbers[start], numbers[start + 1]))
    return found


def is_empty(steps: list[ir.Value]) -> ir.Value:
    """Whether a block has no key, from words of its steps."""
    byte = arith.andi(steps[0], _int(0xFF))
    return arith.cmpi(arith.CmpIPredicate.eq, byte, _int(NO_STEP & 0xFF))


_int = mlir.constant
