"""Which implementation of attention over lists runs where."""

import functools

import jax
import jax.numpy as jnp
import pytest
import tiny

from sketchwalk_jax import (
    KernelConfig,
    SketchWalkConfig,
    block_sparse_attention,
    dispatch,
    generate,
    sketchwalk_attention,
)
from sketchwalk_jax.dispatch import choose_implementation
from sketchwalk_jax.selection import full_selection

REASONS = {
    "no GPU": ({"is_hopper": False}, r"compute capability 8\.0 .* in prefill, not cpu"),
    "no GPU for a token": (
        {"is_hopper": False, "num_tokens": 1},
        r"compute capability 9\.0 .* in decode, not cpu",
    ),
    "float32": ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
    "wide heads": ({"head_dim": 256}, "head_dim of at most 128"),
    "crooked heads": ({"head_dim": 60}, "multiple of 8, not 60"),
    "small blocks": ({"block_size": 16}, "block_size of 64 or 128 in prefill"),
    "smaller blocks": ({"block_size": 8, "num_tokens": 1}, "of 16 or 64 or 128 in decode"),
}




@pytest.fixture(autouse=True)
def _on_a_recent_jax(monkeypatch):
    """The oldest versions that tests run on are too old for kernels."""
    monkeypatch.setattr(dispatch, "LEAST_JAX", (0,))


@pytest.fixture
def on(monkeypatch):
    """Pretends that the default device is an NVIDIA GPU, by its compute capability."""

    def fake(capability: str) -> None:
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
        monkeypatch.setattr(dispatch, "device_kind", lambda: f"GPU {capability}")

    return fake


@pytest.mark.parametrize("reason", [None, *REASONS])
def test_choice_of_attention_over_lists(reason, monkeypatch):
    change, words = REASONS[reason] if reason else ({}, None)
    call = {"dtype": "bfloat16", "head_dim": 128, "block_size": 64, "num_tokens": 128}
    call |= {"is_hopper": True} | change
    is_hopper = call.pop("is_hopper")
    monkeypatch.setattr(dispatch, "is_hopper", lambda: is_hopper)
    query = jax.ShapeDtypeStruct((2, call["num_tokens"], 4, call["head_dim"]), call["dtype"])
    size = call["block_size"]
    assert choose_implementation("xla", query, block_size=size) == "xla"
    expected = "xla" if reason else "mosaic_gpu"
    assert choose_implementation(None, query, block_size=size) == expected
    if reason is None:
        assert choose_implementation("mosaic_gpu", query, block_size=size) == "mosaic_gpu"
    else:
        with pytest.raises(NotImplementedError, match=words):
            choose_implementation("mosaic_gpu", query, block_size=size)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        choose_implementation("cudnn", query, block_size=size)


def test_decode_of_small_heads_takes_the_kernel_only_when_asked_to(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    for head_dim, expected in ((32, "xla"), (64, "mosaic_gpu"), (96, "mosaic_gpu")):
        query = jax.ShapeDtypeStruct((2, 1, 4, head_dim), jnp.bfloat16)
        assert choose_implementation(None, query, block_size=64) == expected
        assert choose_implementation("mosaic_gpu", query, block_size=64) == "mosaic_gpu"


def test_dense_attention_behind_a_cache_takes_full_lists(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    monkeypatch.setattr(dispatch, "_is_ampere_or_later", lambda: True)

    def choose(asked=None, *, tokens=1, heads=64, keys=128, offset=True):
        query = jax.ShapeDtypeStruct((2, tokens, 4, heads), jnp.bfloat16)
        return dispatch.choose_dense_implementation(asked, query, num_keys=keys, has_offset=offset)

    assert choose() == choose(tokens=64) == "mosaic_gpu"
    assert choose(tokens=64, offset=False) == "cudnn"
    assert choose("mosaic_gpu", tokens=64, offset=False) == "mosaic_gpu"
    assert choose(heads=32) == choose(keys=100) == choose("xla") == "xla"
    with pytest.raises(NotImplementedError, match="whole blocks of 64, not 100 of them"):
        choose("mosaic_gpu", keys=100)
    with pytest.raises(NotImplementedError, match="a key for every query, not 128 for 192"):
        choose("mosaic_gpu", tokens=192, offset=False)
    monkeypatch.setattr(dispatch, "is_hopper", lambda: False)
    assert choose() == "xla"


def test_the_interpreter_needs_no_gpu_and_comes_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: False)
    query = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float16)
    options = {"block_size": 64, "kernel_config": KernelConfig(interpret=True)}
    assert choose_implementation("mosaic_gpu", query, **options) == "mosaic_gpu"
    assert choose_implementation(None, query, **options) == "xla"


@pytest.mark.parametrize(
    ("backend", "capability", "expected"),
    [
        ("cpu", None, None),
        ("tpu", None, None),
        ("gpu", "7.5", None),
        ("gpu", "8.0", "ampere"),
        ("gpu", "8.6", "ampere"),
        ("gpu", "8.9", "ampere"),
        ("gpu", "9.0", "hopper"),
        ("gpu", "10.0", "ampere"),
        ("gpu", "12.0", "ampere"),
        ("gpu", "gfx942", None),
        ("gpu", None, None),
    ],
)
def test_each_gpu_has_kernels_of_its_own(backend, capability, expected, monkeypatch):
    device = type("Device", (), {"compute_capability": capability} if capability else {})()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert dispatch.kernels_here() == expected
    assert dispatch.is_hopper() == (expected == "hopper")


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "9.0", "12.0"])
def test_what_runs_on_a_gpu_depends_on_the_phase(capability, on):
    on(capability)
    tokens = {"prefill": 128, "decode": 1}
    for phase, least in (("prefill", 8.0), ("decode", 9.0)):
        query = jax.ShapeDtypeStruct((2, tokens[phase], 4, 128), jnp.float16)
        has_kernel = capability == "9.0" or (phase == "prefill" and capability != "7.5")
        expected = "mosaic_gpu" if has_kernel else "xla"
        assert choose_implementation(None, query, block_size=64) == expected
        assert choose_implementation("xla", query, block_size=64) == "xla"
        if not has_kernel:
            words = rf"compute capability {least} .* in {phase}, not GPU {capability}"
            with pytest.raises(NotImplementedError, match=words):
                choose_implementation("mosaic_gpu", query, block_size=64)
    pages = jax.ShapeDtypeStruct((1, 64, 2, 96), jnp.bfloat16)
    expected = "xla" if capability == "7.5" else "mosaic_gpu"
    assert choose_implementation(None, pages, block_size=16, row_size=64) == expected
    assert (dispatch.selection_kernels(None) is None) == (capability != "9.0")
    assert (dispatch.row_kernels(None, on_one_device=True) is None) == (capability != "9.0")


def test_dense_pieces_of_a_prompt_go_through_the_kernel_of_prompts(on):
    on("8.0")
    options = {"num_keys": 128, "has_offset": True}
    query = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    assert dispatch.choose_dense_implementation(None, query, **options) == "mosaic_gpu"
    token = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16)
    assert dispatch.choose_dense_implementation(None, token, **options) == "xla"


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_an_older_jax_is_named_as_the_reason(capability, on, monkeypatch):
    on(capability)
    monkeypatch.setattr(dispatch, "LEAST_JAX", (99, 1))
    query = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    assert choose_implementation(None, query, block_size=64) == "xla"
    assert dispatch.selection_kernels(None) is None
    with pytest.raises(NotImplementedError, match=f"needs JAX .* not {jax.__version__}"):
        choose_implementation("mosaic_gpu", query, block_size=64)


@pytest.mark.interpreted
def test_each_gpu_gets_its_kernel_wherever_a_prompt_is_read(on):
    """In a layer, a gradient, a whole model and its pieces, and on a mesh: by the traced kernels."""
    kernels = KernelConfig(interpret=True)
    options = {"implementation": "mosaic_gpu", "kernel_config": kernels}
    policy = SketchWalkConfig.recommended(density=0.3, dense_layers=0)
    x = jax.ShapeDtypeStruct((1, 130, 4, 16), jnp.bfloat16)
    tokens = jnp.asarray(tiny.prompts(200)[0])
    params = jax.eval_shape(lambda: tiny.params(jnp.bfloat16))

    def layer(query, key, value):
        out, _ = sketchwalk_attention(query, key, value, policy=policy, **options)
        return out.astype(jnp.float32).sum()

    def model(chunk_size, params, tokens):
        return generate(
            params,
            tokens,
            model_config=tiny.MODEL,
            policy=policy,
            max_new_tokens=1,
            chunk_size=chunk_size,
            **options,
        ).tokens

    programs = {
        "layer": (layer, x, x, x),
        "gradient": (jax.grad(layer), x, x, x),
        "model": (functools.partial(model, None), params, tokens),
        "in pieces": (functools.partial(model, 64), params, tokens),
    }
    for capability, name in (("8.0", "ampere_prefill"), ("9.0", "block_sparse_prefill")):
        on(capability)
        for what, (function, *arguments) in programs.items():
            jax.clear_caches()  # a process has one kind of GPU, but here
            text = str(jax.make_jaxpr(function)(*arguments))
            found = {x for x in ("ampere_prefill", "block_sparse_prefill") if f"={x}" in text}
            assert found == {name}, what


@pytest.mark.unchecked
def test_asking_for_the_kernels_where_they_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: False)
    x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    selection = full_selection(jnp.zeros((1, 1), jnp.int32), 1)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' cannot run here: it .* 'xla' can"):
        block_sparse_attention(x, x, x, selection, implementation="mosaic_gpu")


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_interpret_is_true_or_false(value):
    with pytest.raises(ValueError, match="interpret must be True or False"):
        KernelConfig(interpret=value)


def test_weights_that_may_be_spread_are_multiplied_by_xla(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    assert dispatch.row_kernels(None, on_one_device=True) is not None
    assert dispatch.row_kernels(None, on_one_device=False) is None
    assert dispatch.row_kernels("xla", on_one_device=True) is None
