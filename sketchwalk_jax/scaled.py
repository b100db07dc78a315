"""Numbers as a float and a power of two: the exponents of the walk, and arithmetic with them.

The walk (section 2.3) multiplies by high powers of scores, layer after layer. Its rows are kept at
powers of two of their own, which no selection can see; the constants here say at which. The upper
half of this file is for XLA, the lower half for kernels too, which know no `frexp`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Stands for log2(0): far below any reachable exponent, far from overflow when added to others.
NO_EXPONENT = -(1 << 24)
# Row maxima, as powers of two. Rows of W lie below 2^(WEIGHT_EXPONENT + s); those of R are moved
# to 2^product_exponent(s) before the product, whose sums of up to 2^14 terms (a million tokens)
# then stay below 2^127; and to 2^STATE_EXPONENT after it.
WEIGHT_EXPONENT = 48
STATE_EXPONENT = 100
_PRODUCT_EXPONENT = 112
_SIGN_AND_MANTISSA = -(0xFF << 23) - 1
LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn


def product_exponent(power: int) -> int:
    """Exponent to which rows of `R` are moved before the product with `W = A ** power`."""
    return _PRODUCT_EXPONENT - WEIGHT_EXPONENT - power


def floor_log2(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """`floor(log2 |x|)`; `NO_EXPONENT` for zero."""
    _, exponent = jnp.frexp(x)
    return jnp.where(x == 0.0, NO_EXPONENT, exponent - 1)


def times_power_of_two(
    x: Float[Array, "B I J"], exponent: Int[Array, "B #I #J"]
) -> Float[Array, "B I J"]:
    """`x · 2^exponent`, exact where the result is a normal float, for any size of `exponent`.

    0 below the normal range; the power of `x`'s own magnitude is capped at `2^127`.
    """
    mantissa, own = jnp.frexp(x)
    own_power = power_of_two(jnp.minimum(own - 1 + exponent, 127).astype(jnp.int32))
    return jnp.where(x == 0.0, 0.0, 2.0 * mantissa * own_power)


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


def exact_power_of_two(n: Int[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`2^n`, exact, of `n` from -126 to 127; `exp2` is not on every backend."""
    return jax.lax.bitcast_convert_type(jnp.left_shift(n + 127, 23), jnp.float32)


def ceil_log2(x: Float[Array, "*axes"]) -> Int[Array, "*axes"]:
    """The least `n` with `x <= 2^n`, of numbers that are not negative; of 0 a small one."""
    mantissa, exponent = jnp.frexp(x)
    return jnp.where(x == 0.0, -126, jnp.where(mantissa == 0.5, exponent - 1, exponent))


def to_float8(
    query: Float[Array, "*axes C"], largest: float = LARGEST_FLOAT8
) -> tuple[Float[Array, "*axes C"], Float[Array, "*axes 1"]]:
    """Queries as float8_e4m3fn `q · 2^-a`, and `2^a` in float32, the least that keeps to `largest`.

    Args:
      query: Queries.
      largest: The largest number of one in eight bits: 448 times a power of two.
    """
    x = query.astype(jnp.float32)
    shift = ceil_log2(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / largest)
    shift = jnp.clip(shift, -100, 100)
    rounded = (x * exact_power_of_two(-shift)).astype(jnp.float8_e4m3fn)
    # On GPUs XLA takes a number that is rounded and widened again for the number itself.
    return jax.lax.optimization_barrier(rounded), exact_power_of_two(shift)
