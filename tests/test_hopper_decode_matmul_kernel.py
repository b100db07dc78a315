"""The decode matmul kernel for eight-bit weights on Hopper, against float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import INTERPRET, slow_unless

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.models import quantize_params, transformer
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.decode_matmul import operand_split
from sketchwalk_jax.pallas_kernels.decode_matmul.hopper import (
    MOST_ROWS,
    hopper_decode_matmul_kernel,
    why_not_hopper_decode_matmul,
)

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(
        jax.default_backend() != "cpu" and not dispatch.is_hopper(),
        reason="the kernel needs a GPU of compute capability 9.0, or the interpreter a CPU",
    ),
]

EPS = 1e-5


def draw(rows, inputs, widths):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.bfloat16)
    kernels = [jnp.asarray(rng.normal(size=(2, inputs, one)), jnp.bfloat16) for one in widths]
    return x, kernels, jnp.asarray(rng.uniform(0.5, 2.0, size=(2, inputs)), jnp.bfloat16)


# Type of the weights, rows, inputs, columns of each array, and whether there is a norm.
NARROW_CASES = {
    "several arrays, with a norm": ("float8_e4m3fn", 3, 512, (64, 128), True),
    "whole numbers": ("int8", 1, 256, (64,), False),
    "a tile of one line": ("float8_e4m3fn", 8, 384, (64,), False),
    "rows that are copied to where they are read": ("float8_e4m3fn", 8, 256, (64,), True),
    "parts, the last one shorter": ("float8_e4m3fn", 1, 4352, (64,), False),
    "ragged rows": ("int8", 17, 384, (128, 64), False),
    "as many rows as there may be": ("float8_e4m3fn", 64, 256, (64,), True),
    "as many whole numbers": ("int8", 64, 256, (64,), True),
}


def draw_narrow(dtype, rows, inputs, widths):
    """Draws weights from all bit patterns that are numbers, and their scales."""
    x, _, scale = draw(rows, inputs, widths)
    rng = np.random.default_rng(inputs)
    kernels = []
    for width in widths:
        bits = rng.integers(0, 256, size=(2, width, inputs), dtype=np.uint8)
        bits = np.where(bits & 127 == 127, 0, bits) if dtype != "int8" else bits
        kernels.append(jnp.asarray(bits.view(jnp.dtype(dtype))))
    scales = [jnp.asarray(rng.uniform(0.5, 2, size=(2, width)), jnp.float32) for width in widths]
    return x, kernels, scales, scale


def widened(weights, factor):
    """Dequantizes one layer to float64, `[F, D]`."""
    return np.asarray(weights, np.float64) * np.asarray(factor, np.float64)[:, None]


def lost_in_sums(inputs, weights):
    """Bounds the loss of tensor cores that sum a line of float8 products, `[B, F]`.

    They drop the bits of each product that are 13 or more below the largest product. Leaving out
    one part of the operand split would lose some 2^-3 of this measure.
    """
    if INTERPRET:
        return 0.0
    products = np.abs(inputs[:, None] * weights[None]).reshape(len(inputs), len(weights), -1, 128)
    return 2.0**-7 * np.sqrt(np.sum(products.max(axis=-1) ** 2, axis=-1))


DEFAULT_CASES = ("several arrays, with a norm", "whole numbers", "ragged rows")


@pytest.mark.parametrize("name", slow_unless(DEFAULT_CASES.__contains__, list(NARROW_CASES)))
def test_products_with_narrow_weights_are_those_of_float64(name, capfd):
    *sizes, has_norm = NARROW_CASES[name]
    x, kernels, weight_scales, scale = draw_narrow(*sizes)

    @jax.jit
    def multiply(x, kernels, weight_scales, layer, scale):
        options = {"is_transposed": True, "weight_scales": weight_scales, "interpret": INTERPRET}
        options |= {"scale": scale, "eps": EPS} if has_norm else {}
        return hopper_decode_matmul_kernel(x, kernels, layer, **options)

    arguments = x, kernels, weight_scales, jnp.asarray(1, jnp.int32), scale
    assert (
        why_not_hopper_decode_matmul(x, kernels, is_transposed=True, weight_scales=weight_scales)
        is None
    )
    found, again = multiply(*arguments), multiply(*arguments)
    inputs = np.asarray(x, np.float64)
    if has_norm:
        # The kernel multiplies in the type of the rows.
        scaled = np.asarray(x.astype(jnp.float32) * scale[1:].astype(jnp.float32), jnp.bfloat16)
        inputs = scaled.astype(np.float64) / np.sqrt(np.mean(inputs**2, axis=1) + EPS)[:, None]
    for one, same, weights, factor in zip(found, again, kernels, weight_scales, strict=True):
        assert one.dtype == jnp.float32
        wide = widened(weights[1], factor[1])
        wanted = inputs @ wide.T
        least = 1e-5 * np.abs(wanted) + 1e-6 * np.abs(wanted).max()
        if weights.dtype == jnp.float8_e4m3fn and len(x) <= operand_split.MOST_ROWS:
            least += lost_in_sums(inputs, wide)
        assert (np.abs(one - wanted) <= least).all()
        np.testing.assert_array_equal(one, same)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_rows_whose_numbers_lie_far_apart_lose_nothing_beside_the_largest(dtype):
    """A line of 128 inputs shares one power of two; one line is all zeros."""
    _, kernels, scales, _ = draw_narrow(dtype, 3, 512, (64,))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 512)) * 2.0 ** rng.uniform(-40, 20, size=(3, 512))
    x[1, 128:256] = 0.0
    x = jnp.asarray(x, jnp.bfloat16)
    options = {"is_transposed": True, "interpret": INTERPRET}
    layer = jnp.asarray(1, jnp.int32)
    (found,) = hopper_decode_matmul_kernel(x, kernels, layer, weight_scales=scales, **options)
    wide, weights = np.asarray(x, np.float64), widened(kernels[0][1], scales[0][1])
    largest = np.abs(wide).reshape(3, -1, 128).max(axis=-1)
    sizes = largest @ np.abs(weights).reshape(64, -1, 128).sum(axis=-1).T
    lost = 2.0**-20 * sizes
    if dtype == "float8_e4m3fn":
        lost += lost_in_sums(wide, weights)
    assert (np.abs(found - wide @ weights.T) < lost).all()


NOT_FINITE = {
    "a weight": "float8_e4m3fn",
    "a scale": "float8_e4m3fn",
    "a row": "float8_e4m3fn",
    "a row beside whole numbers": "int8",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NOT_FINITE)
def test_what_is_not_finite_stays_in_its_row_or_column(what):
    x, kernels, scales, _ = draw_narrow(NOT_FINITE[what], 3, 256, (64,))
    row, column = (1, slice(None)) if what.startswith("a row") else (slice(None), 7)
    arguments = {"x": x, "kernels": kernels, "weight_scales": scales}
    spoiled = dict(arguments)
    if what == "a weight":
        spoiled["kernels"] = [kernels[0].at[0, 7, 5].set(jnp.nan)]
    elif what == "a scale":
        spoiled["weight_scales"] = [scales[0].at[0, 7].set(jnp.inf)]
    else:
        spoiled["x"] = x.at[1, 5].set(jnp.inf)
    options = {"layer": jnp.asarray(0, jnp.int32), "is_transposed": True, "interpret": INTERPRET}
    found, clean = (
        np.array(hopper_decode_matmul_kernel(**one, **options)[0]) for one in (spoiled, arguments)
    )
    assert not np.isfinite(found[row, column]).any()
    found[row, column] = clean[row, column]
    np.testing.assert_array_equal(found, clean)


def test_what_it_does_not_take_it_says():
    def why(
        dtypes=("int8",),
        rows=1,
        inputs=128,
        width=64,
        is_transposed=True,
        scales=((2, 64),),
        norm="bfloat16",
    ):
        x = jax.ShapeDtypeStruct((rows, inputs), "bfloat16")
        kernels = [jax.ShapeDtypeStruct((2, width, inputs), dtype) for dtype in dtypes]
        given = scales and [jax.ShapeDtypeStruct(shape, "float32") for shape in scales]
        options = {"is_transposed": is_transposed, "weight_scales": given}
        return why_not_hopper_decode_matmul(
            x, kernels, jax.ShapeDtypeStruct((2, inputs), norm), **options
        )

    assert why() is None
    assert why(("float8_e4m3fn",)) is None
    assert "int8, not bfloat16 times float8_e4m3fn, int8" in why(("int8", "float8_e4m3fn"))
    assert "bfloat16 times float8_e4m3fn or int8, not bfloat16 times bfloat16" in why(("bfloat16",))
    assert "weights of eight bits need weight_scales, got int8" in why(scales=None)
    assert "at most 64 rows, not 65" in why(rows=MOST_ROWS + 1)
    assert "it takes a scale in bfloat16, not float32" in why(norm="float32")
    assert "must be [L, F, D], is_transposed=True" in why(is_transposed=False)
    assert "weight_scales must be [(2, 64)], not [(2, 1)]" in why(scales=((2, 1),))
    assert "multiples of 128 inputs and 64 columns, not 192 and [64]" in why(inputs=192)
    x, weights = jnp.zeros((1, 192), jnp.bfloat16), jnp.zeros((1, 64, 192), jnp.int8)
    with pytest.raises(ValueError, match="must fit the kernel: it takes multiples of 128"):
        hopper_decode_matmul_kernel(x, [weights], jnp.asarray(0), weight_scales=[jnp.ones((1, 64))])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float8", "int8"])
def test_a_layer_multiplies_few_rows_with_the_kernel(weights):
    def draw(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16) / 8

    kernels = {"query": draw(0, 2, 128, 2, 64), "key": draw(1, 2, 128, 1, 64)}
    params = {"layers": {name: {"kernel": one} for name, one in kernels.items()}}
    layers = quantize_params(params, weights)["layers"]
    layers["attn_norm"] = {"scale": 1 + draw(2, 2, 128)}
    x, asked = 8 * draw(3, 2, 1, 128), []

    def by_kernel(*arguments, **options):
        found = transformer.linear_of_rows(
            *arguments, kernel_config=KernelConfig(interpret=INTERPRET), **options
        )
        asked.append(found is not None)
        return found

    found, wanted = (
        transformer.LayerWeights(layers, jnp.asarray(1), 1e-6, by).linear(
            x, ("query", "key"), "btd,dnh->btnh", norm="attn_norm"
        )
        for by in (by_kernel, None)
    )
    assert asked == [True]
    for one, other in zip(found, wanted, strict=True):
        chex.assert_equal_shape((one, other))
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), rtol=0.03, atol=0.03)
