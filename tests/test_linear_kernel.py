"""Rows times one layer of stacked weights: the kernel beside float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tolerances import tolerance
from variants import INTERPRET, slow_unless

from sketchwalk_jax import KernelConfig, SketchWalkConfig, dispatch, init_cache
from sketchwalk_jax.inference import decode_step, prefill
from sketchwalk_jax.models.params import init_params
from sketchwalk_jax.pallas_kernels.linear import MOST_ROWS, linear_kernel, why_not_linear

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(
        jax.default_backend() != "cpu" and not dispatch.is_hopper(),
        reason="the kernel needs a GPU of compute capability 9.0, or the interpreter a CPU",
    ),
]

EPS = 1e-5
# Rows, inputs, columns of each array, whether weights are [L, F, D], and whether there is a norm.
CASES = {
    "one row": (1, 128, (64,), False, False),
    "several arrays and parts": (3, 2112, (128, 64), False, True),
    "transposed": (9, 1088, (64, 192), True, False),
    "transposed, with a norm": (9, 1088, (64, 192), True, True),
    "as many rows as there may be": (64, 128, (64,), False, False),
    "as many rows, with a norm": (64, 192, (64,), False, True),
}


def draw(rows, inputs, widths, is_transposed=False):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.bfloat16)
    shapes = [(2, width, inputs) if is_transposed else (2, inputs, width) for width in widths]
    kernels = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    return x, kernels, jnp.asarray(rng.uniform(0.5, 2.0, size=(2, inputs)), jnp.bfloat16)


@pytest.mark.parametrize("name", slow_unless("several arrays and parts".__eq__, list(CASES)))
def test_products_are_those_of_float64(name, capfd):
    *sizes, is_transposed, has_norm = CASES[name]
    x, kernels, scale = draw(*sizes, is_transposed)

    @jax.jit
    def multiply(x, kernels, layer, scale):
        options = {"is_transposed": is_transposed, "interpret": INTERPRET}
        options |= {"scale": scale, "eps": EPS} if has_norm else {}
        return linear_kernel(x, kernels, layer, **options)

    found = multiply(x, kernels, jnp.asarray(1, jnp.int32), scale)
    again = multiply(x, kernels, jnp.asarray(1, jnp.int32), scale)
    inputs = np.asarray(x, np.float64)
    if has_norm:
        # What is multiplied has the type of the weights.
        scaled = np.asarray(x.astype(jnp.float32) * scale[1:].astype(jnp.float32), jnp.bfloat16)
        inputs = scaled.astype(np.float64) / np.sqrt(np.mean(inputs**2, axis=1) + EPS)[:, None]
    for one, same, weights in zip(found, again, kernels, strict=True):
        own = np.asarray(weights[1], np.float64)
        wanted = inputs @ (own.T if is_transposed else own)
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(one, same)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("has_norm", slow_unless(bool, [True, False]))
def test_a_row_that_is_not_finite_leaves_the_others_alone(has_norm):
    x, kernels, scale = draw(3, 128, (64,))
    spoiled = x.at[1, 5].set(jnp.nan)
    options = {"interpret": INTERPRET} | ({"scale": scale, "eps": EPS} if has_norm else {})
    layer = jnp.asarray(0, jnp.int32)
    found, clean = (
        np.asarray(linear_kernel(one, kernels, layer, **options)[0]) for one in (spoiled, x)
    )
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[::2], clean[::2])


def test_what_it_does_not_take_it_says():
    def why(rows=1, inputs=64, width=64, dtype="bfloat16", scale="bfloat16"):
        x = jax.ShapeDtypeStruct((rows, inputs), dtype)
        kernels = [jax.ShapeDtypeStruct((2, inputs, width), dtype)]
        return why_not_linear(x, kernels, jax.ShapeDtypeStruct((2, inputs), scale))

    assert why() is None
    assert "at most 64 rows, not 65" in why(rows=MOST_ROWS + 1)
    assert "multiples of 64 inputs and columns, not 96" in why(inputs=96)
    assert "multiples of 64 inputs and columns, not 64 and [100]" in why(width=100)
    assert "it takes bfloat16, not float32" in why(dtype="float32")
    assert "it takes a scale in bfloat16, not float32" in why(scale="float32")


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_decodes_with_it_as_without(is_tied):
    model = dataclasses.replace(
        tiny.MODEL,
        num_layers=2,
        hidden_size=128,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=256,
        tie_word_embeddings=is_tied,
        dtype="bfloat16",
        plan=None,
    )
    params = init_params(jax.random.key(0), model)
    tokens = jax.random.randint(jax.random.key(1), (2, 130), 0, 256)
    config = SketchWalkConfig.recommended(density=0.5)
    kernels = KernelConfig(interpret=True) if INTERPRET else None
    found = []
    for implementation, kernel_config in (("mosaic_gpu", kernels), ("xla", None)):
        cache = init_cache(model, config, batch=2, max_tokens=192)
        options = {"model_config": model, "policy": config}
        _, cache = prefill(params, tokens, cache, implementation="xla", **options)
        options |= {"implementation": implementation, "kernel_config": kernel_config}
        logits, _ = decode_step(params, tokens[:, 0], cache, **options)
        found.append(logits)
    np.testing.assert_allclose(*found, **tolerance("logits", "bfloat16"))
