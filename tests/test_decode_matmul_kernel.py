"""The decode matmul kernel for GPUs from Ampere on, against float64.

With such a GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_decode_matmul_kernel.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_hopper_decode_matmul_kernel
from test_attention_kernel import on_some_gpu
from test_hopper_decode_matmul_kernel import EPS
from variants import INTERPRET, slow_unless

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.models import transformer
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.decode_matmul.decode_matmul import (
    MOST_ROWS,
    decode_matmul_kernel,
    why_not_decode_matmul,
)

on_some_gpu = on_some_gpu
pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("on_some_gpu")]

# Rows, inputs, columns of each array, whether there is a norm, and the type.
CASES = {
    "one row": (1, 128, (64,), False, "bfloat16"),
    "several arrays, parts, the last one shorter": (3, 704, (320, 64, 128), True, "bfloat16"),
    "more than one product": (9, 320, (64, 192), True, "float16"),
    "as many rows as there may be": (32, 128, (128,), False, "float16"),
}


def draw(rows, inputs, widths, dtype):
    x, kernels, scale = test_hopper_decode_matmul_kernel.draw(rows, inputs, widths)
    return jax.tree.map(lambda one: one.astype(dtype), (x, kernels, scale))


@pytest.mark.parametrize("name", slow_unless(lambda name: "parts" in name, CASES))
def test_products_are_those_of_float64(name, capfd):
    *sizes, has_norm, dtype = CASES[name]
    x, kernels, scale = draw(*sizes, dtype)
    options = {"scale": scale, "eps": EPS} if has_norm else {}

    @jax.jit
    def multiply(x, kernels, layer):
        return decode_matmul_kernel(x, kernels, layer, interpret=INTERPRET, **options)

    found, again = (multiply(x, kernels, jnp.asarray(1, jnp.int32)) for _ in range(2))
    inputs = np.asarray(x, np.float64)
    if has_norm:
        # The kernel multiplies in the type of the weights.
        scaled = np.asarray(x.astype("f4") * scale[1:].astype("f4"), jnp.dtype(dtype))
        inputs = scaled.astype(np.float64) / np.sqrt(np.mean(inputs**2, axis=1) + EPS)[:, None]
    for one, same, weights in zip(found, again, kernels, strict=True):
        wanted = inputs @ np.asarray(weights[1], np.float64)
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(one, same)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a weight", "a row"])
def test_what_is_not_finite_stays_in_its_row_or_column(what):
    x, kernels, _ = draw(3, 128, (64, 64), "bfloat16")
    spoiled_x, spoiled = x, list(kernels)
    if what == "a weight":
        spoiled[1] = kernels[1].at[0, 5, 7].set(jnp.inf).at[1].set(jnp.nan)
    else:
        spoiled_x = x.at[1, 5].set(jnp.nan)
    layer = jnp.asarray(0, jnp.int32)
    found, clean = (
        [np.array(one) for one in decode_matmul_kernel(*both, layer, interpret=INTERPRET)]
        for both in ((spoiled_x, spoiled), (x, kernels))
    )
    for index, (one, other) in enumerate(zip(found, clean, strict=True)):
        is_hit = what == "a row" or index == 1
        place = (1, slice(None)) if what == "a row" else (slice(None), 7)
        assert np.isfinite(one[place]).all() != is_hit
        if is_hit:
            one[place] = other[place]
        np.testing.assert_array_equal(one, other)


def test_what_it_does_not_take_it_says():
    def why(rows=1, inputs=64, width=64, dtype="bfloat16", scale="bfloat16", **options):
        x = jax.ShapeDtypeStruct((rows, inputs), dtype)
        kernels = [jax.ShapeDtypeStruct((2, inputs, width), dtype)]
        return why_not_decode_matmul(
            x, kernels, jax.ShapeDtypeStruct((2, inputs), scale), **options
        )

    assert why() is None
    assert why(dtype="float16", scale="float16") is None
    assert "at most 32 rows, not 33" in why(rows=MOST_ROWS + 1)
    assert "multiples of 64 inputs and columns, not 96" in why(inputs=96)
    assert "multiples of 64 inputs and columns, not 64 and [100]" in why(width=100)
    assert "bfloat16 or float16 for all arrays, not float32" in why(
        dtype="float32", scale="float32"
    )
    assert "for all arrays, not bfloat16, float16" in why(scale="float16")
    assert "weights [L, D, F] without scales" in why(is_transposed=True)
    x = jnp.zeros((1, 96), jnp.bfloat16)
    with pytest.raises(ValueError, match="must fit the kernel: it takes multiples of 64"):
        decode_matmul_kernel(x, [jnp.zeros((1, 96, 64), jnp.bfloat16)], jnp.asarray(0))


@pytest.mark.parametrize("here", slow_unless("hopper".__eq__, ["ampere", "hopper"]))
def test_a_layer_multiplies_few_rows_with_the_kernel(here, monkeypatch):
    monkeypatch.setattr(dispatch, "kernels_here", lambda: here)
    x, kernels, scale = draw(2, 128, (64, 128), "float16")
    found = transformer.linear_of_rows(
        x[:, None],
        {"gate": kernels[0], "up": kernels[1]},
        jnp.asarray(1, jnp.int32),
        scale=scale,
        eps=EPS,
        kernel_config=KernelConfig(interpret=INTERPRET),
    )
    chex.assert_shape(found, [(2, 1, 64), (2, 1, 128)])
    wide = np.asarray(x, np.float64)
    wide = wide * np.asarray(scale[1], np.float64) / np.sqrt((wide**2).mean(1) + EPS)[:, None]
    for one, weights in zip(found, kernels, strict=True):
        assert one.dtype == jnp.float16
        wanted = wide @ np.asarray(weights[1], np.float64)
        np.testing.assert_allclose(one[:, 0].astype("f4"), wanted, rtol=0.01, atol=0.02)
