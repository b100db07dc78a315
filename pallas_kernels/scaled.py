"""Numbers that are each a float and a power of two of their own, in kernels and outside."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

NO_EXPONENT = -(1 << 24)  # of zero: far below any other, far from overflow when added to others
_SIGN_AND_MANTISSA = -(0xFF << 23) - 1
_GROWN = 24  # makes every subnormal number a normal one


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def replace(x: Array, condition: Array, value: int) -> Array:
    """`x` with an integer wherever the condition holds.

    Where a constant comes before an array, Mosaic takes the result of `jnp.where` to be unsigned,
    and compares it so: the array goes first.
    """
    return jnp.where(jnp.logical_not(condition), x, value)


def exponent_of(x: Array) -> Array:
    """`floor(log2 |x|)` of normal numbers, `NO_EXPONENT` of zero and subnormal ones."""
    field = (_bits(x) >> 23) & 0xFF
    return replace(field - 127, field == 0, NO_EXPONENT)


def mantissa_of(x: Array) -> Array:
    """`x / 2^exponent(x)`, of magnitude `[1, 2)`."""
    return jax.lax.bitcast_convert_type((_bits(x) & _SIGN_AND_MANTISSA) | (127 << 23), jnp.float32)


def mantissa_and_exponent(x: Array) -> tuple[Array, Array, Array]:
    """`x` as a mantissa and an exponent, subnormal numbers too, and where it is zero."""
    is_small = exponent_of(x) == NO_EXPONENT
    x = jnp.where(is_small, x * 2.0**_GROWN, x)
    exponent = exponent_of(x)
    return mantissa_of(x), jnp.where(is_small, exponent - _GROWN, exponent), x == 0.0


def power_of_two(exponent: Array) -> Array:
    """`2^exponent` for exponents of at most 127; 0 below the normal range."""
    return jax.lax.bitcast_convert_type((jnp.maximum(exponent, -127) + 127) << 23, jnp.float32)


def integer_power(x: Array, exponent: int) -> Array:
    """`x ** exponent` by repeated squaring, for exponents of at least 1."""
    if exponent == 1:
        return x
    root = integer_power(x * x, exponent // 2)
    return root * x if exponent % 2 else root


def add_scaled(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Sum of two numbers that are each a float times a power of two."""
    exponent = jnp.maximum(one[1], other[1])
    total = one[0] * power_of_two(one[1] - exponent) + other[0] * power_of_two(other[1] - exponent)
    return total, exponent
