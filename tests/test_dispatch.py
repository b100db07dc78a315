"""Which implementation of attention over lists runs where."""

import jax
import jax.numpy as jnp
import pytest

from sketchwalk_jax import KernelConfig, block_sparse_attention, dispatch
from sketchwalk_jax.dispatch import choose_implementation
from sketchwalk_jax.selection import full_selection

REASONS = {
    "no GPU": ({"is_hopper": False}, r"compute capability 9\.0"),
    "float32": ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
    "wide heads": ({"head_dim": 256}, "head_dim of at most 128"),
    "crooked heads": ({"head_dim": 60}, "multiple of 8, not 60"),
    "small blocks": ({"block_size": 16}, "block_size of 64 or 128 in prefill"),
    "smaller blocks": ({"block_size": 8, "num_tokens": 1}, "of 16 or 64 or 128 in decode"),
}


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
        ("cpu", None, False),
        ("gpu", "9.0", True),
        ("gpu", "8.0", False),
        ("gpu", "10.0", False),
        ("gpu", "gfx942", False),
        ("gpu", None, False),
    ],
)
def test_only_hopper_has_these_kernels(backend, capability, expected, monkeypatch):
    device = type("Device", (), {"compute_capability": capability} if capability else {})()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert dispatch.is_hopper() == expected


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
