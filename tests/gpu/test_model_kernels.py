"""Models and layers with kernels give the same results as without.

Interpreted, as compiled, or on a GPU. Each operation tests its kernel alone.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
import test_decode_matmul_kernel
import tiny
from kernel_draws import KERNELS, ON_GPU, needs_hopper
from tolerances import tolerance
from variants import INTERPRET

from sketchwalk_jax import Dense, SketchWalkConfig, generate, init_cache, sketchwalk_attention
from sketchwalk_jax.inference.cached_layer import LayerSettings, Settings
from sketchwalk_jax.inference.steps import decode_step, prefill
from sketchwalk_jax.models import quantize_params, transformer
from sketchwalk_jax.models.params import init_params
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.policies.quest import QuestConfig

pytestmark = pytest.mark.interpreted


# Policies whose lists rounding cannot change, and the kernel that reads the prompt, if sure.
GENERATION = {
    "everything": (SketchWalkConfig.paper(density=1.0, dense_layers=1), "hopper_attention_kernel"),
    "everything by the default": (
        SketchWalkConfig.recommended(density=1.0),
        "hopper_attention_kernel",
    ),
    "all pages of each head": (QuestConfig(density=1.0), ""),
    "dense": (Dense(), "cudnn$fmha"),
}


@pytest.mark.slow
@needs_hopper
@pytest.mark.skipif(INTERPRET, reason="too much for the interpreter")
@pytest.mark.parametrize("name", GENERATION)
def test_generation_takes_the_kernels_and_answers_alike(name):
    """This covers stacked caches, layers in a scan, and tokens in a loop."""
    (policy, kernel), (tokens, lengths) = GENERATION[name], tiny.prompts(150, 70)
    model = dataclasses.replace(tiny.MODEL, head_dim=64, num_layers=3)  # the smallest head_dim
    params = tiny.params(jnp.bfloat16, model)
    options = {"policy": policy, "max_new_tokens": 3, "lengths": jnp.asarray(lengths)}

    def run(params, tokens, implementation):
        out = generate(params, tokens, model_config=model, implementation=implementation, **options)
        return out.cache.key

    program = jax.jit(run, static_argnames="implementation")
    if ON_GPU:
        text, plain = (
            program.lower(params, tokens, implementation=one).as_text() for one in (None, "xla")
        )
        assert "block_sparse_decode" in text and kernel in text
        assert ("hopper_attention_kernel" in text) == (kernel == "hopper_attention_kernel")
        assert "mosaic_gpu" not in plain and "cudnn$fmha" not in plain
    keys = program(params, tokens, implementation=None)
    wanted = program(params, tokens, implementation="xla")
    for row, length in enumerate(lengths):
        one, other = (np.asarray(x[:, row, :length], np.float32) for x in (keys, wanted))
        # Deeper layers accumulate rounding: compare norms over whole layers.
        distance = np.linalg.norm((one - other).reshape(len(one), -1), axis=1)
        assert (distance < 0.03 * np.linalg.norm(other.reshape(len(one), -1), axis=1)).all()


@pytest.mark.slow
@needs_hopper
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["paper", "recommended"])
def test_a_layer_before_a_bad_token_is_equal_in_earlier_blocks_and_finite(name):
    """Selection is block-causal: rows of the bad token's block may list other blocks."""
    rng, config = np.random.default_rng(3), getattr(SketchWalkConfig, name)(density=0.6)
    arrays = [rng.standard_normal((2, 190, heads, 64), np.float32) for heads in (2, 1, 1)]
    options = {"policy": config, "implementation": "mosaic_gpu", "kernel_config": KERNELS}

    @jax.jit
    def call(*arrays):
        out, _ = sketchwalk_attention(*(x.astype(jnp.bfloat16) for x in arrays), **options)
        return out.astype(jnp.float32)

    plain = call(*arrays)
    for which, position in ((2, 150), (1, 70), (0, 180)):
        spoiled = [x.copy() for x in arrays]
        spoiled[which][0, position] = np.nan
        out = call(*spoiled)
        np.testing.assert_array_equal(
            out[0, : position // 64 * 64], plain[0, : position // 64 * 64]
        )
        np.testing.assert_array_equal(out[1], plain[1])
        assert np.isfinite(out[0, :position]).all() and np.isnan(out[0, position]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "is_tied"), [("9.0", True), ("8.0", False)])
def test_a_model_decodes_with_all_kernels_as_without(gpu, is_tied):
    if gpu != "9.0" and INTERPRET:
        pytest.skip("interpreted, Hopper's kernels run")
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
    options = {"model_config": model, "policy": SketchWalkConfig.recommended(density=0.5)}
    found = []
    with kernel_draws.on_gpu(gpu):
        for implementation, kernel_config in (("mosaic_gpu", KERNELS), ("xla", None)):
            cache = init_cache(*options.values(), batch=2, max_tokens=192)
            _, cache = prefill(params, tokens, cache, implementation="xla", **options)
            how = {"implementation": implementation, "kernel_config": kernel_config}
            logits, _ = decode_step(params, tokens[:, 0], cache, **options, **how)
            found.append(logits)
    np.testing.assert_allclose(*found, **tolerance("logits", "bfloat16"))


NARROW = dataclasses.replace(tiny.MODEL, intermediate_size=64)


def test_the_gating_kernel_runs_where_rows_are_whole(monkeypatch):
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "9.0")
    monkeypatch.setattr(dispatch, "why_not_device", lambda what: None)
    options = {"model_config": NARROW, "policy": Dense()}
    assert Settings(**options, on_one_device=True).swiglu_quantize is not None
    assert Settings(**options, on_one_device=False).swiglu_quantize is None
    assert Settings(**options, on_one_device=True, implementation="xla").swiglu_quantize is None


@pytest.mark.parametrize("weights", [None, "int8"])
def test_very_few_rows_are_summed_on_gpus_without_a_kernel_for_them(weights, monkeypatch):
    """A T4 has no kernel; the one for an A100 does not take quantized weights."""
    monkeypatch.setattr(dispatch, "kernels_here", lambda: "ampere" if weights else None)
    monkeypatch.setattr(dispatch, "is_gpu", lambda: True)
    settings = LayerSettings(policy=Dense(), on_one_device=True)
    x, kernels, scale, _ = test_decode_matmul_kernel.draw("bfloat16", 3, 128, (64, 128))
    params = {"layers": {"gate": {"kernel": kernels[0]}, "up": {"kernel": kernels[1]}}}
    layers = quantize_params(params, weights)["layers"] if weights else params["layers"]
    layers["norm"] = {"scale": scale}
    asked = []

    def multiply(*arguments, **options):
        found = settings.multiply_rows(*arguments, **options)
        asked.append(found is not None)
        return found

    def linear(rows, multiply):
        own = transformer.LayerWeights(layers, jnp.asarray(1), 1e-5, multiply)
        return own.linear(rows, ("gate", "up"), "btd,df->btf", norm="norm")

    for one, other in zip(linear(x[None], multiply), linear(x[None], None), strict=True):
        chex.assert_equal_shape((one, other))
        assert one.dtype == other.dtype
        # Sums of 128 products of order one, rounded at other places.
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), rtol=0.02, atol=0.15)
    linear(jnp.tile(x, (2, 1))[None], multiply)
    assert asked == [True, False]  # more rows run as a matmul
