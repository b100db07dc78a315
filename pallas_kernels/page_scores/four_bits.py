"""Dequantizes 4-bit keys to float16, in the registers of single threads.

Two quantized numbers of a word become float16 in two instructions: their four bits go into the
mantissa of 1024, and a fused multiply-add subtracts the excess and multiplies by the scale. This is
exact: `scale · quantized` is exact in eight bits. The scales are halved and the queries doubled,
since constants would exceed 65504 otherwise.

A pair is in bytes 0 and 2 of a word, or in bytes 1 and 3; a byte's low four bits are a channel of
the first half, its high four bits one of the second half (`QuantizedKeys`).
"""

from jaxlib.mlir import ir

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith

LOW, HIGH = 0, 1  # halves of the channels, and of a byte
NO_SCALE = -128  # scale exponent of a block without keys
BITS = (0x000F000F, 0x00F000F0)  # bits of two quantized numbers in a word
MAGIC = (0x64086408, 0x64806480)  # 1024, xor the quantized number's sign bit
_STEP_BIAS = (14, 10)  # float16 exponent bias of half the scale, and of a 32nd of it
EXCESS = (0xE408E408, 0xE480E480)  # -1032 and -1152, in units of these scales


def factors(scale_exponents: list[ir.Value], half: int) -> list[tuple[ir.Value, ir.Value]]:
    """Returns factor and addend for bytes 0 and 2, then for bytes 1 and 3, of each word.

    Args:
      scale_exponents: Exponents of the channels' scales, in words of four.
      half: `LOW` or `HIGH`.
    """
    found = []
    for word in scale_exponents:
        for shift in (0, 8):
            x = arith.andi(arith.shrui(word, _int(shift)), _int(0x00FF00FF))
            bias = _STEP_BIAS[half]
            x = arith.addi(x, _int(bias << 16 | bias))
            x = arith.shli(arith.andi(x, _int(0x001F001F)), _int(10))
            code = f"{{ .reg .b32 x; mov.b32 x, {EXCESS[half]}; mul.rn.f16x2 $0, $1, x; }}"
            found.append((x, mlir.run(code, x)))
    return found


def numbers(word: ir.Value, half: int, factor: ir.Value, excess: ir.Value) -> ir.Value:
    """Dequantizes bytes 0 and 2 of a word to float16, with half the scales."""
    code = (
        f"{{ .reg .b32 x; lop3.b32 x, $1, {BITS[half]}, {MAGIC[half]}, 0x6a; "
        "fma.rn.f16x2 $0, x, $2, $3; }"
    )
    return mlir.run(code, word, factor, excess)


def in_pairs(numbers: list[ir.Value]) -> list[ir.Value]:
    """Permutes each group of four 16-bit numbers to [0, 2, 1, 3].

    The other operand of products with `numbers` needs this order.
    """
    found = []
    for start in range(0, len(numbers), 2):
        for selector in ("0x5410", "0x7632"):
            code = f"prmt.b32 $0, $1, $2, {selector};"
            found.append(mlir.run(code, numbers[start], numbers[start + 1]))
    return found


def is_empty(scale_exponents: list[ir.Value]) -> ir.Value:
    """Whether a block has no key, from words of its scale exponents."""
    byte = arith.andi(scale_exponents[0], _int(0xFF))
    return mlir.compare("eq", byte, NO_SCALE & 0xFF)


_int = mlir.constant
