"""Models and layers with kernels give the same results as without.

Interpreted, as compiled, or on a GPU. Each operation tests its kernel alone.
"""

import contextlib
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode_matmul_kernel
import tiny
from test_kernels import CONFIG, ON_GPU
from test_prompt_selection_kernels import KERNELS, SIZE
from test_token_selection_kernels import PAGE, SCALE, draw_token, select_pages
from tolerances import tolerance
from variants import INTERPRET, RUNS_COMPILED

from sketchwalk_jax import Dense, SketchWalkConfig, generate, init_cache, sketchwalk_attention
from sketchwalk_jax.inference.cached_layer import LayerSettings, Settings
from sketchwalk_jax.inference.steps import decode_step, prefill
from sketchwalk_jax.models import quantize_params, transformer
from sketchwalk_jax.models.params import init_params
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.decode_matmul import api
from sketchwalk_jax.policies.quest import QuestConfig

pytestmark = pytest.mark.interpreted
needs_kernels = pytest.mark.skipif(
    jax.default_backend() != "cpu" and not ON_GPU,
    reason="the kernels need a GPU of compute capability 9.0, or the interpreter a CPU",
)


# Rounding cannot change these lists.
GENERATION = {
    "everything": SketchWalkConfig.paper(density=1.0, dense_layers=1),
    "everything by the default": SketchWalkConfig.recommended(density=1.0),
    "all pages of each head": QuestConfig(density=1.0),
}


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(INTERPRET, reason="too much for the interpreter")
@pytest.mark.parametrize("name", GENERATION)
def test_generation_takes_the_kernels_and_answers_alike(name):
    """This covers stacked caches, layers in a scan, and tokens in a loop."""
    tokens, lengths = tiny.prompts(150, 70)
    model = dataclasses.replace(tiny.MODEL, head_dim=64, num_layers=3)  # the smallest head_dim
    params = tiny.params(jnp.bfloat16, model)
    options = {"policy": GENERATION[name], "max_new_tokens": 3, "lengths": jnp.asarray(lengths)}

    def run(params, tokens, implementation):
        out = generate(params, tokens, model_config=model, implementation=implementation, **options)
        return out.cache.key

    program = jax.jit(run, static_argnames="implementation")
    if ON_GPU:
        text = program.lower(params, tokens, implementation=None).as_text()
        assert "hopper_decode_attention_kernel" in text
        assert ("hopper_attention_kernel" in text) == ("prefill" in GENERATION[name].phases)
        assert "mosaic_gpu" not in program.lower(params, tokens, implementation="xla").as_text()
    keys = program(params, tokens, implementation=None)
    wanted = program(params, tokens, implementation="xla")
    for row, length in enumerate(lengths):
        one, other = (np.asarray(x[:, row, :length], np.float32) for x in (keys, wanted))
        # Deeper layers accumulate rounding: compare norms over whole layers.
        distance = np.linalg.norm((one - other).reshape(len(one), -1), axis=1)
        assert (distance < 0.03 * np.linalg.norm(other.reshape(len(one), -1), axis=1)).all()


@pytest.mark.slow
@needs_kernels
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["paper", "recommended"])
def test_a_layer_before_a_bad_token_is_equal_in_earlier_blocks_and_finite(name):
    """Selection is block-causal: rows of the bad token's block may list other blocks."""
    rng, config = np.random.default_rng(3), getattr(SketchWalkConfig, name)(density=0.6)
    arrays = [rng.standard_normal((2, 190, heads, 64), np.float32) for heads in (2, 1, 1)]
    options = {"policy": config, "implementation": "mosaic_gpu", "kernel_config": CONFIG}

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
    where = contextlib.nullcontext()
    if RUNS_COMPILED:
        import compiled_kernels

        where = compiled_kernels.compiled_for(gpu)
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
    with where:
        for implementation, kernel_config in (("mosaic_gpu", CONFIG), ("xla", None)):
            cache = init_cache(*options.values(), batch=2, max_tokens=192)
            _, cache = prefill(params, tokens, cache, implementation="xla", **options)
            how = {"implementation": implementation, "kernel_config": kernel_config}
            logits, _ = decode_step(params, tokens[:, 0], cache, **options, **how)
            found.append(logits)
    np.testing.assert_allclose(*found, **tolerance("logits", "bfloat16"))


@pytest.mark.slow
@needs_kernels
def test_attention_reads_the_pages_that_are_listed():
    from sketchwalk_jax.pallas_kernels.decode_attention.hopper import (
        hopper_decode_attention_kernel,
    )

    shape = heads, kv_heads, head_dim, blocks = 4, 2, 64, 20
    queries, codes, walk, lengths = draw_token(*shape, "random", second=17 * SIZE + 21)
    lists, _ = select_pages(queries, codes, walk, lengths)
    rng = np.random.default_rng(1)
    size = (1, 4, blocks * SIZE, kv_heads, head_dim)
    key, value = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for _ in range(2))
    found, _ = hopper_decode_attention_kernel(
        queries,
        key,
        value,
        lists.ids,
        lists.counts,
        layer=jnp.zeros((), jnp.int32),
        kv_lengths=lengths,
        scale=SCALE,
        block_size=lists.block_size,
        kernel_config=KERNELS,
    )
    for index, length in enumerate(np.asarray(lengths)[:3]):
        count = int(lists.counts[index, 0, 0])
        pages = np.asarray(lists.ids)[index, 0, 0, :count]
        tokens = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
        tokens = tokens[tokens < length]
        for head in range(heads):
            own = head // (heads // kv_heads)
            k, v = (np.asarray(x, np.float64)[0, index, tokens, own] for x in (key, value))
            weights = SCALE * k @ np.asarray(queries, np.float64)[index, 0, head]
            weights = np.exp(weights - weights.max())
            wanted = weights @ v / weights.sum()
            np.testing.assert_allclose(
                np.asarray(found, np.float64)[index, 0, head],
                wanted,
                **tolerance("attention", jnp.bfloat16),
            )


NARROW = dataclasses.replace(tiny.MODEL, intermediate_size=64)


def logits_of_prompt(implementation, kernel_config):
    tokens, lengths = tiny.prompts(40, 33)
    options = {"model_config": NARROW, "policy": Dense()}
    cache = init_cache(**options, batch=len(tokens), max_tokens=64, dtype=jnp.bfloat16)
    options |= {"implementation": implementation, "kernel_config": kernel_config}
    return prefill(
        quantize_params(tiny.params(jnp.bfloat16, NARROW), "float8"),
        tokens,
        cache,
        lengths=lengths,
        **options,
    )[0]


@pytest.mark.slow
@needs_kernels
def test_a_prompt_is_read_with_the_gating_kernel_as_without(monkeypatch):
    asked = []

    def gate(*arrays, kernel_config):
        asked.append(kernel_config)
        return api.swiglu_quantize(*arrays, kernel_config=KERNELS)

    monkeypatch.setattr("sketchwalk_jax.inference.cached_layer.swiglu_quantize", gate)
    with_kernel = dispatch.row_kernels
    monkeypatch.setattr(
        "sketchwalk_jax.inference.cached_layer.row_kernels",
        lambda *given, what, **options: (
            KERNELS if what == "float8 SwiGLU" else with_kernel(*given, what=what, **options)
        ),
    )
    found = logits_of_prompt("xla", None)
    assert asked
    monkeypatch.undo()
    wanted = logits_of_prompt("xla", None)
    np.testing.assert_allclose(found, wanted, atol=0.05 * float(np.std(wanted)))


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
    x, kernels, scale = test_decode_matmul_kernel.draw(3, 128, (64, 128), "bfloat16")
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
