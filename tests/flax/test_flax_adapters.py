"""`make_attention_fn` in Flax's own layers: dense bit for bit, sparse exact, nothing ignored."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import nnx
from pairwise import pairwise
from tolerances import tolerance

from sketchwalk_jax import Dense, SketchWalkConfig, init_walk, sketchwalk_attention
from sketchwalk_jax.flax import LinenWalkAttention, WalkAttention, make_attention_fn
from sketchwalk_jax.policies.base import Policy

WIDTH, HEADS, TOKENS = 48, 2, 75  # heads of 24: Linen and nnx apply 1/sqrt(24) at different places
SPARSE = SketchWalkConfig.paper(block_size=16, sketch_dim=8, density=0.4)
FULL = SketchWalkConfig.paper(block_size=16, sketch_dim=8, density=1.0)


def _inputs(*shape, seed=0, dtype=jnp.float32):
    return normal(shape or (2, TOKENS, WIDTH), seed=seed, dtype=dtype)


def _causal_mask(batch=2, dtype=bool):
    return nn.make_causal_mask(jnp.zeros((batch, TOKENS)), dtype=dtype)


def _padding_mask(lengths):
    """Returns the mask of right-padded sequences, as Flax's functions make it."""
    is_token = jnp.arange(TOKENS)[None, :] < jnp.asarray(lengths)[:, None]
    padding = nn.make_attention_mask(is_token, is_token, dtype=bool)
    return nn.combine_masks(padding, _causal_mask(len(lengths)), dtype=bool)


def _nnx(x, *args, attention_fn=None, init=None, **call):
    options = {"decode": False, "rngs": nnx.Rngs(1, dropout=2)} | (init or {})
    if attention_fn is not None:
        options["attention_fn"] = attention_fn
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, **options)
    if options["decode"]:
        layer.init_cache(x.shape)
        x = x[:, :1]
    if call.get("sow_weights"):
        out, state = nnx.capture(layer, nnx.Intermediate)(x, *args, **call)
        return out, jax.tree.leaves(state)
    return layer(x, *args, **call)


def _linen(x, *args, attention_fn=None, init=None, **call):
    options = {"attention_fn": attention_fn} if attention_fn is not None else {}
    layer = nn.MultiHeadDotProductAttention(HEADS, **options, **(init or {}))
    params = nn.MultiHeadDotProductAttention(HEADS).init(jax.random.key(1), x)
    if layer.decode:
        dense = layer.clone(attention_fn=nn.dot_product_attention)
        params = dense.init(jax.random.key(1), x)
        x = x[:, :1]
    mutable = ["intermediates", "cache", "walk"]
    rngs = {"dropout": jax.random.key(2)}
    out, state = layer.apply(params, x, *args, **call, rngs=rngs, mutable=mutable)
    return (out, jax.tree.leaves(state)) if call.get("sow_weights") else out


both = pytest.mark.parametrize("layer", [_nnx, _linen], ids=["nnx", "linen"])
DROPOUT = {"dropout_rate": 0.3, "deterministic": False}

DENSE_CALLS = {
    "plain": {},
    "float_mask": {"mask": _causal_mask(dtype=jnp.float32)},
    "padding_mask": {"mask": _padding_mask([TOKENS, 30])},
    "bfloat16": {"init": {"dtype": jnp.bfloat16}},
    "precision": {"init": {"precision": "highest"}},
    "dropout": {"init": DROPOUT},
    "dropout_not_shared": {"init": DROPOUT | {"broadcast_dropout": False}},
    "sown_weights": {"sow_weights": True},
    "decode": {"init": {"decode": True}},
}


OF_ONE_LAYER = {
    "nnx_causal": {"is_causal": True},
    "nnx_causal_mask": {"is_causal": True, "mask": _padding_mask([TOKENS, 30])[:, :, -1:]},
    "linen_float32_softmax": {"init": {"dtype": jnp.bfloat16, "force_fp32_for_softmax": True}},
}
DENSE_CASES = pairwise(tuple(DENSE_CALLS), (_nnx, _linen), (None, Dense()))
DENSE_CASES += [(x, _nnx if x.startswith("nnx") else _linen, None) for x in OF_ONE_LAYER]


@pytest.mark.parametrize(("name", "layer", "config"), DENSE_CASES)
def test_dense_is_bit_equal_to_flax(name, layer, config):
    call = (DENSE_CALLS | OF_ONE_LAYER)[name]
    with jax.numpy_dtype_promotion("standard"):  # Flax and JAX themselves promote types
        expected = layer(_inputs(), **call)
        actual = layer(_inputs(), attention_fn=make_attention_fn(config), **call)
    chex.assert_trees_all_equal(actual, expected)


@both
@pytest.mark.parametrize("mask", [None, _padding_mask([TOKENS, 30])], ids=["none", "mask"])
def test_adapter_can_say_causal_for_the_layer(layer, mask):
    both_masks = _causal_mask() if mask is None else mask & _causal_mask()
    expected = layer(_inputs(), mask=both_masks)
    actual = layer(_inputs(), mask=mask, attention_fn=make_attention_fn(is_causal=True))
    np.testing.assert_array_equal(actual, expected)


def _nnx_steps(x, attention_fn):
    """Runs the whole input, and its tokens one by one with a cache."""
    options = {"attention_fn": attention_fn, "decode": False, "rngs": nnx.Rngs(1)}
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, **options)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, token: layer(token, decode=True))
    found = [step(layer, x[:, i : i + 1]) for i in range(x.shape[1])]
    return layer(x), jnp.concatenate(found, axis=1)


def _linen_steps(x, attention_fn):
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, decode=True)
    variables = layer.init(jax.random.key(1), x)
    step = jax.jit(lambda variables, token: layer.apply(variables, token, mutable=["cache"]))
    found, whole = [], layer.clone(decode=False).apply(variables, x)
    for i in range(x.shape[1]):
        out, cache = step(variables, x[:, i : i + 1])
        variables = variables | cache
        found.append(out)
    return whole, jnp.concatenate(found, axis=1)


@pytest.mark.parametrize("config", [None, Dense()], ids=["none", "dense"])
@pytest.mark.parametrize("steps", [_nnx_steps, _linen_steps])
def test_a_token_of_flax_own_decode_sees_the_cache(steps, config):
    with jax.numpy_dtype_promotion("standard"):
        whole, found = steps(_inputs()[:, :5], make_attention_fn(config, is_causal=True))
    np.testing.assert_allclose(found, whole, **tolerance("paths"))


@pytest.mark.parametrize(
    ("lengths", "layer", "dtype"),
    pairwise(
        [(TOKENS, TOKENS), (TOKENS, 30), (1, 64)], (_nnx, _linen), (jnp.float32, jnp.bfloat16)
    ),
)
def test_full_density_equals_dense(lengths, layer, dtype):
    call = {"mask": _padding_mask(lengths), "init": {"dtype": dtype}}
    with jax.numpy_dtype_promotion("standard"):
        expected = layer(_inputs(), **call)
    actual = layer(_inputs(), attention_fn=make_attention_fn(FULL), **call)
    actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            actual[row, :length],
            expected[row, :length],
            **tolerance("paths" if dtype == jnp.float32 else "logits", dtype),
        )


@pytest.mark.parametrize("call", [{"is_causal": True}, {"mask": _causal_mask()[0, 0]}], ids=str)
def test_full_density_equals_dense_with_grouped_heads_and_batch_axes(call):
    x, init = _inputs(2, 3, TOKENS, WIDTH), {"num_kv_heads": 1}
    flat = x.reshape(6, TOKENS, WIDTH)
    expected = _nnx(flat, init=init, is_causal=True).reshape(x.shape)
    actual = _nnx(x, init=init, attention_fn=make_attention_fn(FULL), **call)
    np.testing.assert_allclose(actual, expected, **tolerance("paths"))


@both
def test_sparse_is_one_step_of_the_walk(layer):
    seen = []

    def record(query, key, value, mask=None, **_):
        seen.append((query, key, value))
        return value

    layer(_inputs(), attention_fn=record)
    query, key, value = seen[-1]
    for is_causal, mask, lengths in (
        (True, None, [TOKENS, TOKENS]),
        (False, _padding_mask([40, TOKENS]), [40, TOKENS]),
    ):
        actual = make_attention_fn(SPARSE)(query, key, value, is_causal=is_causal, mask=mask)
        expected, _ = sketchwalk_attention(
            *(query, key, value),
            init_walk(2, TOKENS, policy=SPARSE),
            policy=SPARSE,
            lengths=jnp.asarray(lengths, jnp.int32),
        )
        np.testing.assert_array_equal(actual, expected)
        dense = make_attention_fn()(query, key, value, is_causal=True)
        assert not np.allclose(actual[1], dense[1], atol=1e-3)


def _window_mask():
    index = jnp.arange(TOKENS)
    return _causal_mask() & (index[:, None] - index[None, :] < 40)[None, None]


UNFIT_MASKS = {
    "not_causal": jnp.ones((2, 1, TOKENS, TOKENS), bool),
    "not_causal_padding": jnp.ones((2, 1, 1, TOKENS), bool),
    "window": _window_mask(),
    "left_padding": _padding_mask([TOKENS, 30])[:, :, ::-1, ::-1].swapaxes(2, 3),
    "one_hole": _causal_mask().at[:, :, 50, 7].set(False),
    "one_head": jnp.tile(_causal_mask(), (1, HEADS, 1, 1)).at[:, 1, 50, 7].set(False),
}
ADAPTERS = {
    "nnx-function": (_nnx, lambda: make_attention_fn(SPARSE)),
    "linen-function": (_linen, lambda: make_attention_fn(SPARSE)),
    "nnx-walk": (_nnx, lambda: _reset(WalkAttention(SPARSE))),
    "linen-walk": (_linen, lambda: LinenWalkAttention(SPARSE)),
}
adapters = pytest.mark.parametrize("layer, make", ADAPTERS.values(), ids=ADAPTERS)


def _reset(attention):
    attention.reset(2, TOKENS)
    return attention


@adapters
@pytest.mark.parametrize("mask", UNFIT_MASKS.values(), ids=UNFIT_MASKS)
def test_masks_that_would_be_dropped_are_refused(layer, make, mask):
    with pytest.raises(ValueError, match="mask must be causal, with nothing masked but padding"):
        layer(_inputs(), attention_fn=make(), mask=mask)


@pytest.mark.parametrize("mask", UNFIT_MASKS.values(), ids=UNFIT_MASKS)
def test_masks_that_would_be_dropped_give_nan_under_jit(mask):
    x = _inputs(2, TOKENS, HEADS, 24)
    attend = jax.jit(lambda mask: make_attention_fn(SPARSE)(x, x, x, mask=mask))
    mixed = jnp.broadcast_to(_causal_mask(), (2, *mask.shape[1:2], TOKENS, TOKENS))
    out = attend(mixed.at[1].set(jnp.broadcast_to(mask[1], mixed.shape[1:])))
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()


UNSUPPORTED = {
    "no_causality": ({"mask": None}, "sparse attention must be causal"),
    "dropout": ({"init": DROPOUT}, r"dropout must be off \(deterministic=True\).* 0.3"),
    "sown_weights": ({"sow_weights": True}, "sow_weights must be False"),
    "decode": ({"init": {"decode": True}}, "same tokens, got 1 and 75.*decode=True"),
    "other_tokens": ({"inputs_k": _inputs(2, 60, WIDTH)}, "same tokens, got 75 and 60"),
}


@adapters
@pytest.mark.parametrize("call, message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_sparse_attention_cannot_honour_is_refused(layer, make, call, message):
    is_square = "inputs_k" not in call and not call.get("init", {}).get("decode")
    call = {"mask": _causal_mask() if is_square else None} | call
    with pytest.raises(NotImplementedError, match=message):
        layer(_inputs(), attention_fn=make(), **call)


@pytest.mark.parametrize("config", [None, SPARSE], ids=["dense", "sparse"])
def test_unknown_options_are_refused(config):
    x, positions = _inputs(2, TOKENS, HEADS, 24), jnp.arange(TOKENS)
    with pytest.raises(NotImplementedError, match="input_positions.*rotary embedding"):
        make_attention_fn(config)(x, x, x, is_causal=True, input_positions=positions)


def test_a_bias_is_honoured_or_refused():
    x, bias = _inputs(2, TOKENS, HEADS, 24), _inputs(1, HEADS, TOKENS, TOKENS)
    expected = nnx.dot_product_attention(x, x, x, bias, deterministic=True)
    np.testing.assert_array_equal(make_attention_fn()(x, x, x, bias), expected)
    for attend in (make_attention_fn(SPARSE), WalkAttention(SPARSE)):
        with pytest.raises(NotImplementedError, match="bias must be None"):
            attend(x, x, x, bias, is_causal=True)


def test_policies_that_are_not_walks_are_refused():
    class Other(Policy):
        select = None

    for make in (make_attention_fn, WalkAttention):
        with pytest.raises(NotImplementedError, match="policy must be a SketchWalkConfig"):
            make(Other())
