"""Arithmetic with floats times powers of two, and the exponents that the walk uses.

The walk (section 2.3) multiplies by high powers of scores, layer after layer. Each of its rows is
scaled by a power of two, which changes no selection; the constants here define the scale. The upper
half of this file is for XLA; the lower half also for kernels, which have no `frexp`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Replaces log2(0): far below any reachable exponent, but adding it to others cannot overflow.
NO_EXPONENT = -(1 << 24)
# Exponents of row maxima. Rows of W are below 2^(WEIGHT_EXPONENT + s). Rows of R are scaled to
# 2^product_exponent(s) before the product, so that sums of up to 2^14 terms (a million tokens) stay
# below 2^127, and to 2^STATE_EXPONENT after it.
WEIGHT_EXPONENT = 48
STATE_EXPONENT = 100
_PRODUCT_EXPONENT = 112
_SIGN_AND_MANTISSA = -(0xFF << 23) - 1
LARGEST_FLOAT8 = 448.0  # largest float8_e4m3fn


def product_exponent(power: int) -> int:
    """Exponent to which rows of `R` are scaled before the product with `W = A ** power`."""
    return _PRODUCT_EXPONENT - WEIGHT_EXPONENT - power


def floor_log2(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Computes `floor(log2 |x|)`; `NO_EXPONENT` for zero."""
    _, exponent = jnp.frexp(x)
    return jnp.where(x == 0.0, NO_EXPONENT, exponent - 1)


def times_power_of_two(
    x: Float[Array, "B I J"], exponent: Int[Array, "B #I #J"]
) -> Float[Array, "B I J"]:
    """Computes `x · 2^exponent` for any `exponent`, exact if the result is a normal float.

    It is 0 below the normal range; the power of the result is capped at `2^127`.
    """
    mantissa, own = jnp.frexp(x)
    own_power = power_of_two(jnp.minimum(own - 1 + exponent, 127).astype(jnp.int32))
    return jnp.where(x == 0.0, 0.0, 2.0 * mantissa * own_power)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def replace(x: Array, condition: Array, value: int) -> Array:
    """Replaces `x` by an integer wherever the condition holds.

    The array must come first: if a constant comes before an array, Mosaic treats the result of
    `jnp.where` as unsigned in comparisons.
    """
    return jnp.where(jnp.logical_not(condition), x, value)


def exponent_of(x: Array) -> Array:
    """Computes `floor(log2 |x|)` of normal numbers; `NO_EXPONENT` of zero and subnormals."""
    field = (_bits(x) >> 23) & 0xFF
    return replace(field - 127, field == 0, NO_EXPONENT)


def mantissa_of(x: Array) -> Array:
    """Computes `x / 2^exponent(x)`, of magnitude `[1, 2)`."""
    return jax.lax.bitcast_convert_type((_bits(x) & _SIGN_AND_MANTISSA) | (127 << 23), jnp.float32)


def power_of_two(exponent: Array) -> Array:
    """Computes `2^exponent` exactly, for exponents of at most 127; 0 below the normal range."""
    return jax.lax.bitcast_convert_type((jnp.maximum(exponent, -127) + 127) << 23, jnp.float32)


def integer_power(x: Array, exponent: int) -> Array:
    """Computes `x ** exponent` by repeated squaring, for exponents of at least 1."""
    if exponent == 1:
        return x
    root = integer_power(x * x, exponent // 2)
    return root * x if exponent % 2 else root


def add_scaled(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Adds two numbers that are each a float times a power of two."""
    exponent = jnp.maximum(one[1], other[1])
    total = one[0] * power_of_two(one[1] - exponent) + other[0] * power_of_two(other[1] - exponent)
    return total, exponent


def ceil_log2(x: Float[Array, "*axes"]) -> Int[Array, "*axes"]:
    """Finds the smallest `n` with `x <= 2^n`, for `x >= 0`; -126 for 0."""
    mantissa, exponent = jnp.frexp(x)
    return jnp.where(x == 0.0, -126, jnp.where(mantissa == 0.5, exponent - 1, exponent))


def to_float8(
    query: Float[Array, "*axes C"], largest: float = LARGEST_FLOAT8
) -> tuple[Float[Array, "*axes C"], Float[Array, "*axes 1"]]:
    """Rounds queries to float8_e4m3fn `q · 2^-a`; also returns the least such `2^a`, float32.

    Args:
      query: Queries.
      largest: Largest magnitude of a rounded number: 448 times a power of two.
    """
    x = query.astype(jnp.float32)
    shift = ceil_log2(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / largest)
    shift = jnp.clip(shift, -100, 100)
    rounded = (x * power_of_two(-shift)).astype(jnp.float8_e4m3fn)
    # Without the barrier, XLA on GPUs drops a rounding that is undone right after.
    return jax.lax.optimization_barrier(rounded), power_of_two(shift)
