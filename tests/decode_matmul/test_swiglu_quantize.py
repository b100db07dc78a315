"""The kernel between the mlp's float8 matmuls, alone and in models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from arrays import normal
from kernel_draws import KERNELS, needs_hopper
from tolerances import tolerance
from variants import INTERPRET, RUNS_COMPILED, slow_unless

from sketchwalk_jax.models import quantize_params, transformer
from sketchwalk_jax.pallas_kernels.config import MOST_GATED_COLUMNS, why_not_swiglu_quantize
from sketchwalk_jax.pallas_kernels.decode_matmul import api, swiglu_quantize

pytestmark = [pytest.mark.interpreted, needs_hopper]

# Rows and columns. A row's vectors: all in one round, one cut within a warp, several rounds.
CASES = {
    "one row": (1, 128),
    "few columns": (3, 8),
    "a cut round": (5, 1048),
    "more rows than are on their way": (27, 264),
    "several warpgroups": (7, 5448),
    "all warpgroups": (3, 14336),
    "one row on its way at a time": (3, 18952),
}


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Gives each thread block several rows."""
    monkeypatch.setattr(swiglu_quantize, "num_multiprocessors", lambda: 1)


def draw(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    products = [jnp.asarray(rng.normal(size=(rows, columns)) * 99, jnp.bfloat16) for _ in range(2)]
    scales = [rng.uniform(0.01, 0.1, size).astype(np.float32) for size in (rows, columns, columns)]
    return (*products, *map(jnp.asarray, scales))


@jax.jit
def run(*arrays):
    return swiglu_quantize.swiglu_quantize_kernel(*arrays, interpret=INTERPRET)


def rounded(x):
    return x.astype(jnp.bfloat16).astype(np.float32)


@np.errstate(all="ignore")
def equations(gate, up, row_scales, gate_scales, up_scales):
    """Computes the equations in the kernel's file, in float32 and with its roundings."""
    row_scales = np.asarray(row_scales)[:, None]
    gate, up = (
        rounded(np.asarray(x, np.float32) * row_scales * np.asarray(factors))
        for x, factors in ((gate, gate_scales), (up, up_scales))
    )
    exponential = rounded(np.exp2(gate * np.float32(-1 / np.log(2))))
    sigmoid = rounded(np.float32(1) / rounded(np.float32(1) + exponential))
    found = rounded(rounded(gate * sigmoid) * up)
    most = np.abs(found).max(axis=1, keepdims=True)
    scales = np.maximum(most * np.float32(1 / 448), np.finfo(np.float32).tiny)
    scales = np.where(most == 0, np.float32(1), scales)
    rows = (found * (np.float32(1) / scales)).astype(jnp.float8_e4m3fn)
    return rows, scales[:, 0], found


def places(rows):
    """Maps float8 numbers to integers in the same order; NaN must be masked."""
    bits = np.asarray(rows).view(np.uint8).astype(int)
    return np.where(bits & 128, -(bits & 127), bits)


def assert_near(found, wanted):
    """Compares; a few numbers may be one float8 step off, as `exp` and `1/x` round differently."""
    rows, scales = found
    rows = np.asarray(rows)
    is_none = np.isnan(np.asarray(wanted[0], np.float32))
    np.testing.assert_array_equal(np.isnan(rows.astype(np.float32)), is_none)
    away = np.where(is_none, 0, np.abs(places(rows) - places(wanted[0])))
    assert away.max() <= 1 and np.mean(away > 0) <= (0.0 if RUNS_COMPILED else 0.1)
    close = 0.0 if RUNS_COMPILED else 2.0**-7  # the emulator computes with numpy
    np.testing.assert_allclose(np.asarray(scales), np.asarray(wanted[1]), rtol=close)


@pytest.mark.parametrize("name", slow_unless("more rows than are on their way".__eq__, CASES))
def test_rows_are_those_of_the_equations(name, capfd):
    drawn = draw(*CASES[name])
    found = run(*drawn)
    *wanted, _ = equations(*drawn)
    assert found[0].dtype == jnp.float8_e4m3fn and found[1].dtype == jnp.float32
    assert_near(found, wanted)
    # Unrounded in float64: half a float8 step, and six roundings to bfloat16.
    gate, up, *scales = (np.asarray(x, np.float64) for x in drawn)
    gate, up = (x * scales[0][:, None] * y for x, y in ((gate, scales[1]), (up, scales[2])))
    exact = gate / (1 + np.exp(-gate)) * up
    numbers = np.asarray(found[0], np.float64) * np.asarray(found[1], np.float64)[:, None]
    least = np.asarray(found[1], np.float64)[:, None] * 2.0**-10
    assert (np.abs(numbers - exact) <= (2**-4 + 8 * 2**-8) * np.abs(exact) + least).all()
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_numbers_that_are_not_finite_spoil_their_row_alone():
    gate, up, *scales = draw(5, 264)
    up = up.at[1].set(0).at[2, 5].set(jnp.nan).at[3, 7].set(jnp.inf)
    gate = gate.at[4, 0].set(-3e38).at[4, 1].set(3e38)
    found = run(gate, up, *scales)
    *wanted, _ = equations(gate, up, *scales)
    assert_near(found, wanted)
    rows, row_scales = (np.asarray(x, np.float32) for x in found)
    assert row_scales[1] == 1 and (rows[1] == 0).all()
    assert np.isnan(row_scales[2]) and np.isnan(rows[2]).all()
    assert np.isinf(row_scales[3]) and np.isnan(rows[3, 7])
    assert (np.delete(rows[3], 7) == 0).all()
    assert np.isfinite(rows[[0, 4]]).all()


@pytest.mark.slow
def test_a_row_of_tiny_numbers_has_the_least_scale():
    gate, one, columns = jnp.full((1, 128), 2.0**-10, jnp.bfloat16), jnp.ones(1), jnp.ones(128)
    rows, scales = run(gate, jnp.full_like(gate, 2.0**-110), one, columns, columns)
    assert scales[0] == np.finfo(np.float32).tiny and (rows.astype("f4") == 2.0**5).all()


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="CPUs take such numbers for zero here")
def test_very_small_gates_are_not_lost():
    """The reciprocal of such a large `exp` is below the smallest normal number."""
    gate = jnp.linspace(-89, -86, 128).astype(jnp.bfloat16)[None]
    one, columns = jnp.ones(1), jnp.ones(128)
    drawn = gate, jnp.ones_like(gate), one, columns, columns * 2.0**60
    *wanted, exact = equations(*drawn)
    assert ((exact != 0) & (np.abs(exact) < 2.0**60 * 2.0**-120)).any()
    assert_near(run(*drawn), wanted)


def test_what_the_kernel_does_not_take_it_says():
    def rows(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    assert why_not_swiglu_quantize(rows(2, MOST_GATED_COLUMNS)) is None
    assert "bfloat16, not float16" in why_not_swiglu_quantize(rows(2, 64, dtype=jnp.float16))
    assert "at least one row" in why_not_swiglu_quantize(rows(0, 64))
    for columns in (60, MOST_GATED_COLUMNS + 8):
        assert f"not {columns}" in why_not_swiglu_quantize(rows(2, columns))
    x, one = jnp.zeros((1, 60), jnp.bfloat16), jnp.ones(60)
    with pytest.raises(ValueError, match="a multiple of 8 columns"):
        swiglu_quantize.swiglu_quantize_kernel(x, x, jnp.ones(1), one, one, interpret=INTERPRET)
    gate = jnp.zeros((1, 1, 60), jnp.bfloat16)
    assert api.swiglu_quantize(gate, gate, jnp.ones((1, 1)), one, one, kernel_config=KERNELS) is (
        None
    )


@pytest.mark.parametrize("columns", range(8, MOST_GATED_COLUMNS + 1, 1000))
def test_rows_and_scales_fit_into_shared_memory(columns):
    tiling = swiglu_quantize._Tiling.of(9, columns)
    together = swiglu_quantize._WARPGROUPS // tiling.warpgroups
    arrays = (tiling.slots + 1) * 4 * columns + 2 * 16 * 4
    assert together * (arrays + 1024) <= 228 * 1024
    assert tiling.slots >= 1 and tiling.vectors <= 7


# In models.


MODEL = dataclasses.replace(tiny.MODEL, intermediate_size=64)


def parameters(weights="float8", dtype=jnp.bfloat16):
    return quantize_params(tiny.params(dtype, MODEL), weights)


def layer(params, gate):
    return transformer.LayerWeights(params["layers"], jnp.asarray(1), 1e-6, None, gate)


@pytest.mark.slow
def test_a_layer_has_its_mlp_from_the_kernel():
    asked, params = [], parameters()

    def gate(*arrays):
        found = api.swiglu_quantize(*arrays, kernel_config=KERNELS)
        asked.append(found is not None)
        return found

    x = normal((2, 3, MODEL.hidden_size), dtype=jnp.bfloat16)
    found, refused, plain = (layer(params, by).mlp(x) for by in (gate, lambda *_: None, None))
    assert asked == [True]
    np.testing.assert_array_equal(refused.astype("f4"), plain.astype("f4"))
    np.testing.assert_allclose(
        found.astype("f4"), plain.astype("f4"), **tolerance("logits", "bfloat16")
    )
    with pytest.raises(NotImplementedError, match="must not be differentiated"):
        jax.grad(lambda x: layer(params, gate).mlp(x).astype(jnp.float32).sum())(x)


@pytest.mark.parametrize(
    "case",
    [
        ("int8", jnp.bfloat16, 3, False),
        pytest.param(("float8", jnp.float32, 3, False), marks=pytest.mark.slow),
        pytest.param(("float8", jnp.bfloat16, 1, False), marks=pytest.mark.slow),
        ("float8", jnp.bfloat16, 3, True),
    ],
)
def test_other_layers_are_left_to_xla(case):
    weights, dtype, tokens, has_bias = case
    params = parameters(weights, dtype)
    if has_bias:
        shape = (MODEL.num_layers, MODEL.intermediate_size)
        up = params["layers"]["up"]
        params["layers"]["up"] = {**up, "bias": jnp.ones(shape, dtype)}

    def fail(*_):
        raise AssertionError("the kernel was asked")

    x = jnp.ones((2, tokens, MODEL.hidden_size), dtype)
    np.testing.assert_array_equal(*(layer(params, by).mlp(x).astype("f4") for by in (fail, None)))
