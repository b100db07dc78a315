"""The decode matmul kernels against float64.

Hopper's takes eight-bit weights. The other one, for GPUs from Ampere on, takes 16 bits.

With a GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -n 0
tests/decode_matmul/test_decode_matmul_kernel.py`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from arrays import normal
from kernel_draws import KERNELS
from variants import INTERPRET, slow_unless

from sketchwalk_jax.models import quantize_params, transformer
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.decode_matmul import hopper, operand_split
from sketchwalk_jax.pallas_kernels.decode_matmul.decode_matmul import (
    decode_matmul_kernel,
    why_not_decode_matmul,
)
from sketchwalk_jax.pallas_kernels.decode_matmul.groups import Groups
from sketchwalk_jax.pallas_kernels.decode_matmul.hopper import (
    hopper_decode_matmul_kernel,
    why_not_hopper_decode_matmul,
)

pytestmark = pytest.mark.interpreted

EPS = 1e-5
WIDE = ("bfloat16", "float16")


# Type of the weights, rows, inputs, columns of each array, and whether there is a norm.
CASES = {
    "one row": ("bfloat16", 1, 128, (64,), False),
    "several arrays, parts, the last one shorter": ("bfloat16", 3, 704, (320, 64, 128), True),
    "more than one product": ("float16", 9, 320, (64, 192), True),
    "as many rows as there may be": ("float16", 32, 128, (128,), False),
    "several narrow arrays, with a norm": ("float8_e4m3fn", 3, 512, (64, 128), True),
    "whole numbers": ("int8", 1, 256, (64,), False),
    "a tile of one line": ("float8_e4m3fn", 8, 384, (64,), False),
    "rows that are copied to where they are read": ("float8_e4m3fn", 8, 256, (64,), True),
    "narrow parts, the last one shorter": ("float8_e4m3fn", 1, 4352, (64,), False),
    "ragged rows": ("int8", 17, 384, (128, 64), False),
    "as many rows of narrow weights": ("float8_e4m3fn", 64, 256, (64,), True),
    "as many whole numbers": ("int8", 64, 256, (64,), True),
}
KEPT = {
    "several arrays, parts, the last one shorter",
    "ragged rows",
}


def draw(dtype, rows, inputs, widths, count=2):
    """Draws rows, `count` matrices of weights, the norm's scale, and the weights' scales or None.

    Weights of eight bits have all bit patterns that are numbers.
    """
    rng = np.random.default_rng(rows)
    of_rows = dtype if dtype in WIDE else "bfloat16"
    x = jnp.asarray(rng.normal(size=(rows, inputs)), of_rows)
    scale = jnp.asarray(rng.uniform(0.5, 2.0, size=(count, inputs)), of_rows)
    if dtype in WIDE:
        kernels = [jnp.asarray(rng.normal(size=(count, inputs, one)), dtype) for one in widths]
        return x, kernels, scale, None
    kernel_draws.skip_unless_hopper()
    bits = [rng.integers(0, 256, size=(count, one, inputs), dtype=np.uint8) for one in widths]
    if dtype != "int8":
        bits = [np.where(one & 127 == 127, 0, one) for one in bits]
    kernels = [jnp.asarray(one.view(jnp.dtype(dtype))) for one in bits]
    return (
        x,
        kernels,
        scale,
        [jnp.asarray(rng.uniform(0.5, 2, (count, w)), jnp.float32) for w in widths],
    )


@functools.partial(jax.jit, static_argnames="has_norm")
def multiply(x, kernels, scale, weight_scales, layer, *, has_norm=False):  # or groups
    """Calls the kernel; as compiled, the one for 16 bits takes GPUs in turn."""
    options = {"scale": scale, "eps": EPS} if has_norm else {}
    if weight_scales is None:
        with kernel_draws.on_gpu():
            return decode_matmul_kernel(x, kernels, layer, interpret=INTERPRET, **options)
    options |= {"is_transposed": True, "weight_scales": weight_scales, "interpret": INTERPRET}
    return hopper_decode_matmul_kernel(x, kernels, layer, **options)


def dequantized(kernels, weight_scales, layer):
    """Returns one layer's arrays in float64, `[D, F]`."""
    if weight_scales is None:
        return [np.asarray(one[layer], np.float64) for one in kernels]
    pairs = zip(kernels, weight_scales, strict=True)
    return [
        (np.asarray(one[layer], np.float64) * np.asarray(by[layer], np.float64)[:, None]).T
        for one, by in pairs
    ]


def lost_in_sums(inputs, weights):
    """Bounds the loss of tensor cores that sum a line of float8 products, `[B, F]`.

    They drop the bits of each product that are 13 or more below the largest product. Leaving out
    one part of the operand split would lose some 2^-3 of this measure.
    """
    if INTERPRET:
        return 0.0
    products = np.abs(inputs[:, None] * weights.T).reshape(len(inputs), weights.shape[1], -1, 128)
    return 2.0**-7 * np.sqrt(np.sum(products.max(axis=-1) ** 2, axis=-1))


def assert_near(found, inputs, weights, dtype):
    """Compares with the product of rows and one matrix in float64."""
    wanted = inputs @ weights
    if dtype in WIDE:
        least = 1e-3 + 1e-4 * np.abs(wanted)
    else:
        least = 1e-5 * np.abs(wanted) + 1e-6 * np.abs(wanted).max()
    if dtype == "float8_e4m3fn" and len(inputs) <= operand_split.MOST_ROWS:
        least += lost_in_sums(inputs, weights)
    assert (np.abs(found - wanted) <= least).all()


@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, CASES))
def test_products_are_those_of_float64(name, capfd):
    *sizes, has_norm = CASES[name]
    dtype = sizes[0]
    drawn = x, kernels, scale, weight_scales = draw(*sizes)
    found, again = (multiply(*drawn, jnp.asarray(1), has_norm=has_norm) for _ in range(2))
    inputs = np.asarray(x, np.float64)
    if has_norm:
        # The kernel multiplies in the type of the rows.
        scaled = np.asarray(x.astype(jnp.float32) * scale[1:].astype(jnp.float32), x.dtype)
        inputs = scaled.astype(np.float64) / np.sqrt(np.mean(inputs**2, axis=1) + EPS)[:, None]
    for one, same, weights in zip(
        found, again, dequantized(kernels, weight_scales, 1), strict=True
    ):
        assert one.dtype == jnp.float32
        assert_near(one, inputs, weights, dtype)
        np.testing.assert_array_equal(one, same)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


# Type of the weights, rows of a group, inputs, and columns of each array.
GROUPS = {
    "one row a group": ("bfloat16", 1, 704, (64, 320)),
    "several rows a group": ("float16", 9, 128, (64,)),
    "one row a group, narrow weights": ("float8_e4m3fn", 1, 512, (64,)),
    "several rows a group, narrow weights": ("int8", 3, 256, (64, 128)),
}
NOWHERE = 2**30  # a group that is not in use reads no matrix


@pytest.mark.parametrize("name", slow_unless("one row a group, narrow weights".__eq__, GROUPS))
def test_each_group_of_rows_has_its_own_matrix(name, monkeypatch, capfd):
    """The first and the third of three groups are the same; the second matrix belongs to none."""
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda: 1)  # several groups a thread block
    dtype, rows, inputs, widths = GROUPS[name]
    matrices = (2, 0, 2, NOWHERE)
    x, kernels, _, weight_scales = draw(dtype, len(matrices) * rows, inputs, widths, count=3)
    x = x.reshape(len(matrices), rows, inputs)
    x = x.at[2].set(x[0])
    if weight_scales is None:
        kernels = [one.at[1].set(jnp.nan) for one in kernels]
    else:
        weight_scales = [one.at[1].set(jnp.nan) for one in weight_scales]
    groups = Groups(jnp.asarray(matrices), jnp.asarray(3))
    clean = multiply(x, kernels, None, weight_scales, groups)
    spoiled = multiply(x.at[1, -1, 5].set(jnp.nan), kernels, None, weight_scales, groups)
    for index, (one, other) in enumerate(zip(clean, spoiled, strict=True)):
        assert one.dtype == jnp.float32 and one.shape == (len(matrices), rows, widths[index])
        for group, matrix in enumerate(matrices[:3]):
            weights = dequantized(kernels, weight_scales, matrix)[index]
            assert_near(one[group], np.asarray(x[group], np.float64), weights, dtype)
        np.testing.assert_array_equal(one[0], one[2])
        if not kernel_draws.ON_GPU:  # there, unwritten memory holds anything
            assert np.isnan(one[3]).all()
        assert np.isnan(other[1, -1]).all()
        np.testing.assert_array_equal(other[1, :-1], one[1, :-1])
        for group in (0, 2):
            np.testing.assert_array_equal(other[group], one[group])
    if dtype in WIDE:
        (alone, *_) = multiply(x[1], kernels, None, None, jnp.asarray(0))
        np.testing.assert_array_equal(clean[0][1], alone)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_rows_whose_numbers_lie_far_apart_lose_nothing_beside_the_largest(dtype):
    """A line of 128 inputs shares one power of two; one line is all zeros."""
    _, kernels, scale, weight_scales = draw(dtype, 3, 512, (64,))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 512)) * 2.0 ** rng.uniform(-40, 20, size=(3, 512))
    x[1, 128:256] = 0.0
    x = jnp.asarray(x, jnp.bfloat16)
    (found,) = multiply(x, kernels, scale, weight_scales, jnp.asarray(1))
    wide, (weights,) = np.asarray(x, np.float64), dequantized(kernels, weight_scales, 1)
    largest = np.abs(wide).reshape(3, -1, 128).max(axis=-1)
    lost = 2.0**-20 * largest @ np.abs(weights).reshape(-1, 128, 64).sum(axis=1)
    if dtype == "float8_e4m3fn":
        lost += lost_in_sums(wide, weights)
    assert (np.abs(found - wide @ weights) < lost).all()


NOT_FINITE = [
    *((what, "bfloat16") for what in ("a weight", "a row")),
    *((what, "float8_e4m3fn") for what in ("a weight", "a scale", "a row")),
    ("a row", "int8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "dtype"), NOT_FINITE)
def test_what_is_not_finite_stays_in_its_row_or_column(what, dtype):
    """The last array has one weight, or one scale, that is not finite; or all have a row's."""
    x, kernels, scale, weight_scales = draw(dtype, 3, 256, (64, 64))
    clean = multiply(x, kernels, scale, weight_scales, jnp.asarray(0))
    kernels, weight_scales = list(kernels), weight_scales and list(weight_scales)
    place = (slice(None), 7)
    if what == "a row":
        x, place = x.at[1, 5].set(jnp.inf), (1, slice(None))
    elif what == "a scale":
        weight_scales[-1] = weight_scales[-1].at[0, 7].set(jnp.inf)
    else:
        own = (5, 7) if dtype in WIDE else (7, 5)
        kernels[-1] = kernels[-1].at[0, *own].set(jnp.nan).at[1].set(jnp.nan)
    found = multiply(x, kernels, scale, weight_scales, jnp.asarray(0))
    for index, (one, other) in enumerate(zip(found, clean, strict=True)):
        one, is_hit = np.array(one), what == "a row" or index == 1
        assert not np.isfinite(one[place]).any() if is_hit else np.isfinite(one).all()
        if is_hit:
            one[place] = other[place]
        np.testing.assert_array_equal(one, other)


def why_not(
    dtypes, *, x="bfloat16", norm="bfloat16", rows=1, inputs=128, width=64, groups=(), **options
):
    """Returns why the kernel for 16 bits, or with `scales` the one for eight, takes no arrays."""
    shape, scales = jax.ShapeDtypeStruct, options.pop("scales", None)
    check = why_not_decode_matmul if scales is None else why_not_hopper_decode_matmul
    sizes = (2, inputs, width) if scales is None else (2, width, inputs)
    options["weight_scales"] = [shape(one, "float32") for one in scales] if scales else None
    kernels = [shape(sizes, dtype) for dtype in dtypes]
    scale = None if norm is None else shape((2, inputs), norm)
    return check(shape((*groups, rows, inputs), x), kernels, scale, **options)


NARROW = {"dtypes": ["int8"], "scales": [(2, 64)]}
TAKEN = [
    {"dtypes": ["bfloat16"]},
    {"dtypes": ["float16"], "x": "float16", "norm": "float16"},
    NARROW,
    NARROW | {"dtypes": ["float8_e4m3fn"]},
    {"dtypes": ["bfloat16"], "groups": (3,), "norm": None, "rows": 32},
    NARROW | {"groups": (3,), "norm": None, "rows": 8},
]
NOT_TAKEN = {
    "at most 32 rows, not 33": {"rows": 33},
    "multiples of 64 inputs and columns, not 96": {"inputs": 96},
    "multiples of 64 inputs and columns, not 64 and [100]": {"inputs": 64, "width": 100},
    "bfloat16 or float16 for all arrays, not float32": {
        "dtypes": ["float32"],
        "x": "float32",
        "norm": "float32",
    },
    "for all arrays, not bfloat16, float16": {"norm": "float16"},
    "weights [L, D, F] without scales": {"is_transposed": True},
    "int8, not bfloat16 times float8_e4m3fn, int8": NARROW | {"dtypes": ["int8", "float8_e4m3fn"]},
    "bfloat16 times float8_e4m3fn or int8, not bfloat16 times bfloat16": (
        NARROW | {"dtypes": ["bfloat16"]}
    ),
    "weights of eight bits need weight_scales, got int8": NARROW | {"scales": []},
    "at most 64 rows, not 65": NARROW | {"rows": 65},
    "it takes a scale in bfloat16, not float32": NARROW | {"norm": "float32"},
    "must be [L, F, D], is_transposed=True": NARROW | {"is_transposed": False},
    "weight_scales must be [(2, 64)], not [(2, 1)]": NARROW | {"scales": [(2, 1)]},
    "multiples of 128 inputs and 64 columns, not 192 and [64]": NARROW | {"inputs": 192},
    "groups of rows [G, R, D] without a norm": {"groups": (3,)},
    "at most 32 rows a group, not 33": {"groups": (3,), "norm": None, "rows": 33},
    "at most 8 rows a group, not 9": NARROW | {"groups": (3,), "norm": None, "rows": 9},
}


def test_what_it_does_not_take_it_says():
    assert [why_not(**given) for given in TAKEN] == [None] * len(TAKEN)
    for words, given in NOT_TAKEN.items():
        assert words in why_not(**{"dtypes": ["bfloat16"]} | given)


def test_a_call_that_does_not_fit_is_refused():
    x, layer = jnp.zeros((1, 96), jnp.bfloat16), jnp.asarray(0)
    with pytest.raises(ValueError, match="must fit the kernel: it takes multiples of 64"):
        decode_matmul_kernel(x, [jnp.zeros((1, 96, 64), jnp.bfloat16)], layer)
    weights = [jnp.zeros((1, 64, 96), jnp.int8)]
    with pytest.raises(ValueError, match="must fit the kernel: it takes multiples of 128"):
        hopper_decode_matmul_kernel(x, weights, layer, weight_scales=[jnp.ones((1, 64))])
    x, weights = jnp.zeros((1, 64), jnp.bfloat16), [jnp.zeros((1, 64, 64), jnp.bfloat16)]
    groups = Groups(jnp.zeros(2, jnp.int32), jnp.asarray(1))
    three = jnp.zeros((3, 1, 64), jnp.bfloat16)
    for rows, which in ((x[None], layer), (three, groups), (x, groups)):
        with pytest.raises(ValueError, match=r"or \[G / n, R, D\] with Groups of \[G\] matrices"):
            decode_matmul_kernel(rows, weights, which)


@pytest.mark.parametrize(
    "case",
    slow_unless(
        (None, "hopper").__eq__,
        [(None, "ampere"), (None, "hopper"), ("float8", "hopper"), ("int8", "hopper")],
    ),
    ids=str,
)
def test_a_layer_multiplies_few_rows_with_the_kernel(case, monkeypatch):
    weights, here = case
    if weights:
        kernel_draws.skip_unless_hopper()
    monkeypatch.setattr(dispatch, "kernels_here", lambda: here)
    dtype = "bfloat16" if weights else "float16"

    def draw(seed, *shape):
        return normal(shape, seed=seed, dtype=dtype) / 8

    kernels = {"query": draw(0, 2, 128, 2, 64), "key": draw(1, 2, 128, 1, 64)}
    params = {"layers": {name: {"kernel": one} for name, one in kernels.items()}}
    layers = (quantize_params(params, weights) if weights else params)["layers"]
    layers["attn_norm"] = {"scale": 1 + draw(2, 2, 128)}
    x, asked = 8 * draw(3, 2, 1, 128), []

    def by_kernel(*arguments, **options):
        found = transformer.linear_of_rows(*arguments, kernel_config=KERNELS, **options)
        asked.append(found is not None)
        return found

    def linear(by):
        weights = transformer.LayerWeights(layers, jnp.asarray(1), 1e-6, by)
        return weights.linear(x, ("query", "key"), "btd,dnh->btnh", norm="attn_norm")

    with kernel_draws.on_gpu("8.0" if here == "ampere" else "9.0"):
        found, wanted = linear(by_kernel), linear(None)
    assert asked == [True]
    for one, other in zip(found, wanted, strict=True):
        chex.assert_equal_shape((one, other))
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), rtol=0.03, atol=0.03)
