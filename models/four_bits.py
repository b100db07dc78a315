"""Weights of four bits: whole numbers from -8 to 7, two in a byte, with a scale for 32 inputs each.

    W[f, d] = scales[d / 32, f] · (code[f, d] - 8)        0 <= code <= 15

The weight of a group that is largest without its sign becomes -8, about: a scale may be negative.
Scales are bfloat16 numbers whose first four digits alone may be other than zero: the product of
such a scale and a code has no more than eight digits, so that bfloat16 has every `W` exactly. Of
seven neighbouring scales the one with the least squared error is taken, found in whole numbers, so
that the host and XLA choose the same. A weight takes four and a half bits.

*Which input is where.* Of each block of 128 inputs (of 64 or 32, if 128 does not divide them), with
the digits of an input's number and of its place

    input  = 32 w + 16 i + 8 n + 2 t + e        w < 4, t < 4, the others < 2
    byte   = 16 t + 4 w + 2 e + i               t is counted in words of as many bytes as w has

and `n` the half of the byte, the lower one first. A thread of a matrix unit of 16 inputs holds the
inputs of one `t`: it finds all of them side by side, and two in a row by the same shift of a word.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP

_OFFSET, _LARGEST = 8, 7
# The largest weight of a group has 512 to 1023 of the units in which errors are counted. In these,
# scales are of the following numbers: one above the largest weight over -8, and those below it.
_UNIT_BITS = 10
_STEPS = np.array(
    [32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144], "f4"
)
_TRIED = 7
_LEAST = np.float32(2.0**-100)  # smaller weights count as zeros
_WORDS = 4  # groups of a block at most


def quantize_groups(wide: Any, xp: Any) -> tuple[Any, Any]:
    """Codes and scales of rows.

    Args:
      wide: Weights `[..., inputs]` in float32, whose inputs are a multiple of 32.
      xp: numpy, or jax.numpy for arrays of JAX. Both find the same.

    Returns:
      Bytes `[..., inputs / 2]`, and scales `[..., inputs / 32]` in bfloat16: NaN where a weight is
      NaN or infinite.
    """
    groups = wide.reshape(*wide.shape[:-1], -1, WEIGHT_GROUP)
    high, low = groups.max(axis=-1, keepdims=True), groups.min(axis=-1, keepdims=True)
    largest = xp.where(high > -low, high, low)
    sign = xp.where(largest > _LEAST, np.float32(-1), np.float32(1))
    size = xp.maximum(xp.abs(largest), _LEAST)
    mantissa, exponent = xp.frexp(size)
    # Whole numbers below 2^24 are exact in float32, however sums are ordered.
    units = xp.rint(groups * xp.ldexp(sign, _UNIT_BITS - exponent))
    wanted = mantissa * np.float32(2**_UNIT_BITS / _OFFSET)
    first = xp.searchsorted(_STEPS, wanted, side="left")
    least = step = None
    for back in range(_TRIED):
        candidate = xp.take(_STEPS, xp.clip(first - back, 0, len(_STEPS) - 1))
        error = units - _rounded(units * (np.float32(1) / candidate), xp) * candidate
        error = (error * error).sum(axis=-1, keepdims=True)
        if least is None:
            least, step = error, candidate
        else:
            step = xp.where(error < least, candidate, step)
            least = xp.minimum(error, least)
    scales = sign * xp.ldexp(step, exponent - _UNIT_BITS)
    scales = xp.where(size < np.inf, scales, np.float32(np.nan))
    code = _rounded(groups * (np.float32(1) / scales), xp)
    # NaN has no code: its scale tells of it.
    code = xp.where(code == code, code, np.float32(0)) + np.float32(_OFFSET)
    return _pack(code.astype(np.uint8).reshape(wide.shape), xp), scales[..., 0].astype(jnp.bfloat16)


def _rounded(x: Any, xp: Any) -> Any:
    """The nearest codes, less 8."""
    return xp.minimum(xp.maximum(xp.rint(x), np.float32(-_OFFSET)), np.float32(_LARGEST))


def _pack(codes: Any, xp: Any) -> Any:
    """Bytes of codes `[..., inputs]`."""
    *rows, inputs = codes.shape
    digits = codes.reshape(*rows, -1, _words(inputs), 2, 2, 4, 2)  # w, i, n, t, e
    halves = digits[..., 0, :, :], digits[..., 1, :, :]
    found = xp.bitwise_or(halves[0], halves[1] << np.uint8(4))  # w, i, t, e
    axes = [*range(len(rows) + 1), *(len(rows) + 1 + axis for axis in (2, 0, 3, 1))]
    return found.transpose(axes).reshape(*rows, inputs // 2)


def _words(inputs: int) -> int:
    """Groups of a block."""
    return math.gcd(inputs // WEIGHT_GROUP, _WORDS)


def widen(
    quantized: UInt8[Array, "F half"], scales: Float[Array, "groups F"], dtype: Any
) -> Float[Array, "F 2 half"]:
    """Weights as they lie: the lower halves of all bytes, then the upper ones.

    Args:
      quantized: Bytes of one layer.
      scales: Likewise.
      dtype: Of the weights, to which `W` is rounded.
    """
    outputs, half = quantized.shape
    words = _words(2 * half)
    factors = scales.T.astype(jnp.float32).reshape(outputs, 1, -1, 1, words, 1)
    both = jnp.stack([quantized & 15, quantized >> 4], axis=1).astype(jnp.float32) - _OFFSET
    return (
        (both.reshape(outputs, 2, -1, 4, words, 4) * factors)
        .reshape(outputs, 2, half)
        .astype(dtype)
    )


def as_they_lie(x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows 2 half"]:
    """Inputs in the order of `widen`.

    Args:
      x: Rows.
    """
    *rows, inputs = x.shape
    digits = x.reshape(*rows, -1, _words(inputs), 2, 2, 4, 2)  # w, i, n, t, e
    first = len(rows)
    axes = [*range(first), *(first + axis for axis in (3, 0, 4, 1, 5, 2))]
    return digits.transpose(axes).reshape(*rows, 2, inputs // 2)


def in_order(wide: Float[Array, "F 2 half"]) -> Float[Array, "F inputs"]:
    """What `widen` returns, in the order of the inputs."""
    outputs, _, half = wide.shape
    digits = wide.reshape(outputs, 2, -1, 4, _words(2 * half), 2, 2)  # n, block, t, w, e, i
    return digits.transpose(0, 2, 4, 6, 1, 3, 5).reshape(outputs, 2 * half)
