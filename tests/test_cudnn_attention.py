"""Dense attention through cuDNN: when it is chosen, its arguments and, on a GPU, its results.

On a machine with an NVIDIA GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_cudnn_attention.py`
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import Dense, dense_attention, generate
from sketchwalk_jax.attention import cudnn
from sketchwalk_jax.pallas_kernels import dispatch

WHY_NOT_HERE = dispatch.why_not_cudnn(
    jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16), num_keys=64, has_offset=False
)
on_gpu = pytest.mark.skipif(WHY_NOT_HERE is not None, reason=f"cuDNN: {WHY_NOT_HERE}")
NUM_LAYERS, LAYER = 3, 1

# Lengths of the sequences, capacity of the cache, heads, head_dim, dtype
CASES = {
    "whole": ((256, 256), 256, cases.HEADS[4], 64, "bfloat16"),
    "ragged": ((200, 1, 129), 256, cases.HEADS[3], 64, "bfloat16"),
    "room": ((640, 77), 1024, cases.HEADS[7], 128, "bfloat16"),
    "odd": ((191, 65), 200, cases.HEADS[1], 32, "float16"),
    "small heads": ((127,), 128, cases.HEADS[8], 24, "float16"),
}


def draw(case):
    """Draws queries of the longest sequence; the cache is NaN beyond each length and elsewhere."""
    lengths, capacity, (num_heads, num_kv_heads), head_dim, dtype = CASES[case]
    rng = np.random.default_rng(0)
    query = rng.standard_normal((len(lengths), max(lengths), num_heads, head_dim))
    shape = (NUM_LAYERS, len(lengths), capacity, num_kv_heads, head_dim)
    key, value = np.full((2, *shape), np.nan)
    for row, length in enumerate(lengths):
        key[LAYER, row, :length], value[LAYER, row, :length] = rng.standard_normal(
            (2, length, num_kv_heads, head_dim)
        )
    arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
    return *arrays, jnp.asarray(lengths, jnp.int32)


@functools.partial(jax.jit, static_argnames=("implementation", "scale"))
def attend(query, key, value, lengths, **options):
    return dense_attention(query, key, value, layer=LAYER, kv_lengths=lengths, **options)


def assert_equal_where_there_are_tokens(actual, wanted, lengths, dtype):
    for row, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(
            np.asarray(actual[row, :length], np.float32),
            np.asarray(wanted[row, :length], np.float32),
            **tolerance("attention", dtype),
        )


@on_gpu
@pytest.mark.parametrize("case", CASES)
def test_cudnn_equals_the_tiled_implementation(case):
    query, key, value, lengths = draw(case)
    out = attend(query, key, value, lengths)
    assert out.dtype == query.dtype and np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_array_equal(out, attend(query, key, value, lengths, implementation="cudnn"))
    exact = attend(
        *(x.astype(jnp.float32) for x in (query, key, value)), lengths, implementation="xla"
    )
    assert_equal_where_there_are_tokens(out, exact, lengths, query.dtype)
    # The call must really use cuDNN.
    text = attend.lower(query, key, value, lengths).as_text()
    assert "cudnn$fmha" in text
    assert (
        "cudnn$fmha" not in attend.lower(query, key, value, lengths, implementation="xla").as_text()
    )


@on_gpu
def test_cudnn_takes_unstacked_keys_without_lengths_and_a_scale():
    query, key, value, _ = draw("whole")
    key, value = key[LAYER], value[LAYER]
    out, wanted = (
        jax.jit(functools.partial(dense_attention, scale=0.3, implementation=name))(
            query, key, value
        )
        for name in ("cudnn", "xla")
    )
    np.testing.assert_allclose(
        out.astype(jnp.float32), wanted.astype(jnp.float32), **tolerance("attention", "bfloat16")
    )


@on_gpu
@pytest.mark.parametrize("case", ["whole", "ragged"])
def test_gradients_by_cudnn_are_those_of_the_tiles(case):
    query, key, value, lengths = draw(case)
    weight = jnp.roll(query, 1, axis=1).astype(jnp.float32)
    is_token = jnp.arange(query.shape[1])[None, :] < lengths[:, None]
    weight = jnp.where(is_token[:, :, None, None], weight, 0.0)

    def loss(query, key, value, implementation):
        out = attend(query, key, value, lengths, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * weight)

    found = jax.grad(loss, (0, 1, 2))(query, key, value, "cudnn")
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    wanted = jax.grad(loss, (0, 1, 2))(*wide, "xla")
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, **tolerance("gradient", query.dtype))


@on_gpu
def test_generation_uses_cudnn_in_prefill_and_answers_alike():
    tokens, lengths = tiny.prompts(100, 70)
    params = tiny.params(jnp.bfloat16)
    options = {
        "model_config": tiny.MODEL,
        "policy": Dense(block_size=16),
        "max_new_tokens": 1,
        "lengths": jnp.asarray(lengths),
    }

    def run(params, tokens, implementation):
        out = generate(params, tokens, implementation=implementation, **options)
        return out.cache.key, out.tokens

    program = jax.jit(run, static_argnames="implementation")
    assert "cudnn$fmha" in program.lower(params, tokens, implementation=None).as_text()
    assert "cudnn$fmha" not in program.lower(params, tokens, implementation="xla").as_text()
    keys, _ = program(params, tokens, implementation=None)
    wanted, _ = program(params, tokens, implementation="xla")
    for row, length in enumerate(lengths):
        one, other = (np.asarray(x[:, row, :length], np.float32) for x in (keys, wanted))
        # Deeper layers accumulate rounding: compare norms over whole layers.
        distance = np.linalg.norm((one - other).reshape(len(one), -1), axis=1)
        assert (distance < 0.03 * np.linalg.norm(other.reshape(len(one), -1), axis=1)).all()


def stand_in(calls):
    """Stands in for cuDNN's attention, with NaN where cuDNN leaves results undefined."""
    xla = jax.nn.dot_product_attention

    def attention(query, key, value, *, implementation, **options):
        calls.append((implementation, query.shape, key.shape))
        wide = (x.astype(jnp.float32) for x in (query, key, value))
        out = xla(*wide, implementation="xla", **options).astype(query.dtype)
        lengths = options["query_seq_lengths"]
        if lengths is None:
            return out
        column = jnp.arange(query.shape[1], dtype=jnp.int32)[None, :, None, None]
        return jnp.where(column < lengths[:, None, None, None], out, jnp.nan)

    return attention


@pytest.mark.parametrize("case", slow_unless(("odd", "ragged").__contains__, CASES))
def test_padding_never_reaches_cudnn_nor_comes_back(case, monkeypatch):
    query, key, value, lengths = draw(case)
    calls: list[tuple] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in(calls))
    options = {"layer": jnp.asarray(LAYER), "kv_lengths": lengths}
    call = jax.jit(functools.partial(cudnn.attend_dense, scale=None))
    out = call(query, key, value, **options)
    batch, num_tokens = query.shape[:2]
    assert calls == [("cudnn", query.shape, (batch, num_tokens, *key.shape[3:]))]
    wanted = attend(
        *(x.astype(jnp.float32) for x in (query, key, value)), lengths, implementation="xla"
    )
    assert_equal_where_there_are_tokens(out, wanted, lengths, query.dtype)
    for row, length in enumerate(lengths.tolist()):
        assert not np.asarray(out[row, length:], np.float32).any()


REASONS = {
    "float32": ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
    "wide heads": ({"head_dim": 256}, "head_dim of at most 128"),
    "crooked heads": ({"head_dim": 60}, "multiple of 8, not 60"),
    "offset": ({"has_offset": True}, "query_offset must be None"),
    "few keys": ({"num_keys": 63}, "a key for every query, not 63 for 64"),
    "log-sum-exp": ({"return_lse": True}, "no float32 log-sum-exp"),
    "no GPU": ({"is_gpu": False}, "an NVIDIA GPU of compute capability 8.0"),
}


@pytest.mark.parametrize("reason", [None, *REASONS])
def test_choice_of_dense_attention(reason, monkeypatch):
    change, words = REASONS[reason] if reason else ({}, None)
    call = {"dtype": "bfloat16", "head_dim": 64, "has_offset": False, "num_keys": 64}
    call |= {"return_lse": False, "is_gpu": True} | change
    is_gpu = call.pop("is_gpu")
    monkeypatch.setattr(dispatch, "_is_ampere_or_later", lambda: is_gpu)
    query = jax.ShapeDtypeStruct((2, 64, 4, call.pop("head_dim")), call.pop("dtype"))
    choose = functools.partial(dispatch.choose_dense_implementation, query=query, **call)
    assert choose("xla") == "xla"
    monkeypatch.setattr(dispatch, "kernels_here", lambda: None)  # our kernels could run instead
    assert choose(None) == ("xla" if reason else "cudnn")
    if reason is None:
        assert choose("cudnn") == "cudnn"
    else:
        with pytest.raises(NotImplementedError, match=words):
            choose("cudnn")
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        choose("flash")


@pytest.mark.parametrize(
    ("backend", "capability", "expected"),
    [
        ("cpu", None, False),
        ("gpu", "9.0", True),
        ("gpu", "12.0", True),
        ("gpu", "7.5", False),
        ("gpu", "gfx942", False),
        ("gpu", None, False),
    ],
)
def test_only_nvidia_gpus_since_ampere_have_it(backend, capability, expected, monkeypatch):
    device = type("Device", (), {"compute_capability": capability} if capability else {})()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert dispatch._is_ampere_or_later() == expected


@pytest.mark.unchecked
def test_asking_for_cudnn_where_it_cannot_run_says_why():
    query = jnp.zeros((1, 4, 2, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run here: it .* 'xla' can"):
        dense_attention(query, query, query, implementation="cudnn")
    with pytest.raises(ValueError, match="implementation must be None or one of "):
        dense_attention(query, query, query, implementation="flash")
