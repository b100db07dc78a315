"""Dense attention through cuDNN: its arguments and, on a GPU, its results.

On a machine with an NVIDIA GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -n 0
tests/attention/test_cudnn_attention.py`
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import dense_attention
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
