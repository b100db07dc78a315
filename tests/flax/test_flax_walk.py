"""The walk over the layers of a Flax model: shared modules equal the explicit carry."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import nnx
from tolerances import tolerance
from variants import slow_unless, weekly

from sketchwalk_jax import SketchWalkConfig, init_walk, sketchwalk_attention
from sketchwalk_jax.flax import (
    LinenWalkAttention,
    LinenWalkSelfAttention,
    Walk,
    WalkAttention,
    WalkSelfAttention,
    make_attention_fn,
)

WIDTH, HEADS, HEAD_DIM, LAYERS, TOKENS = 32, 2, 16, 3, 150
OPTIONS = {"block_size": 16, "sketch_dim": 8, "density": 0.4}
CONFIGS = {
    "paper": SketchWalkConfig.paper(dense_layers=1, **OPTIONS),
    "no_dense_layers": SketchWalkConfig.paper(dense_layers=0, **OPTIONS),
    "damped": SketchWalkConfig.damped(dense_layers=1, **OPTIONS),
    "released": SketchWalkConfig.released(dense_layers=1, block_size=16),
    "all_dense": SketchWalkConfig.paper(dense_layers=9, **OPTIONS),
    "set": SketchWalkConfig.paper(dense_layers=(1, 7), **OPTIONS),
    "empty_set": SketchWalkConfig.damped(dense_layers=(), **OPTIONS),
}
PAPER = CONFIGS["paper"]


@functools.cache
def _inputs():
    """Draws inputs whose blocks differ, so that the selection matters."""
    blocks = normal((2, TOKENS // 15, WIDTH), seed=3)
    tokens = normal((2, TOKENS, WIDTH), seed=4)
    return 0.7 * jnp.repeat(blocks, 15, axis=1) + 0.3 * tokens


@functools.cache
def _weights():
    """Stacks the layers' weights in the layout of both kinds of Flax layer; biases are zero."""
    shapes = {name: (WIDTH, HEADS, HEAD_DIM) for name in ("query", "key", "value")}
    shapes["out"] = (HEADS, HEAD_DIM, WIDTH)
    with jax.ensure_compile_time_eval():  # the first call may be traced
        return {
            name: {
                "kernel": normal((LAYERS, *shape), seed=seed) / np.sqrt(WIDTH).item(),
                "bias": jnp.zeros((LAYERS, *(shape[-1:] if name == "out" else shape[1:]))),
            }
            for seed, (name, shape) in enumerate(shapes.items(), start=5)
        }


def _layer_weights(index):
    return jax.tree.map(lambda w: w[index], _weights())


@functools.partial(jax.jit, static_argnames="config")
def _scan(x, *, config):
    """Runs the layers as a scan per run of dense or sparse ones, with the walk in the carry."""

    def project(weights, x):
        names = ("query", "key", "value")
        return tuple(jnp.einsum("btd,dnh->btnh", x, weights[name]["kernel"]) for name in names)

    def merge(weights, out):
        return jnp.einsum("btnh,nhd->btd", out, weights["out"]["kernel"])

    def dense_step(carry, weights):
        x, walk = carry
        out = nnx.dot_product_attention(*project(weights, x), is_causal=True)
        return (x + merge(weights, out), walk), None

    def sparse_step(carry, weights):
        x, walk = carry
        out, walk = sketchwalk_attention(*project(weights, x), walk, policy=config)
        return (x + merge(weights, out), walk), None

    carry = (x, init_walk(*x.shape[:2], policy=config))
    for is_dense, layers in itertools.groupby(range(LAYERS), config.is_dense):
        own = np.array([*layers])
        weights = jax.tree.map(lambda w, own=own: w[own], _weights())
        carry, _ = jax.lax.scan(dense_step if is_dense else sparse_step, carry, weights)
    return carry


class _Nnx(nnx.Module):
    """A stack of nnx layers that share an attention function."""

    def __init__(self, attention_fn):
        self.attention_fn = attention_fn
        self.layers = nnx.List(
            nnx.MultiHeadAttention(
                HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
            )
            for _ in range(LAYERS)
        )
        for index, layer in enumerate(self.layers):
            nnx.update(layer, _layer_weights(index))

    def __call__(self, x, mask=None):
        if isinstance(self.attention_fn, WalkAttention):
            self.attention_fn.reset(int(np.prod(x.shape[:-2])), x.shape[-2])
        for layer in self.layers:
            x = x + layer(x, mask=mask, is_causal=mask is None)
        return x


_run = nnx.jit(_Nnx.__call__)


class _Linen(nn.Module):
    """A stack of Linen layers that share an attention module, which the stack makes."""

    config: SketchWalkConfig
    wrap: object = None

    @nn.compact
    def __call__(self, x, mask=None):
        attention_fn = LinenWalkAttention(self.config, is_causal=mask is None)
        make = (self.wrap or (lambda layer: layer))(nn.MultiHeadDotProductAttention)
        for index in range(LAYERS):
            x = x + make(HEADS, attention_fn=attention_fn, name=f"layer_{index}")(x, mask=mask)
        return x


class _LinenSetup(nn.Module):
    """The same stack with layers from `setup` and an attention module from outside."""

    attention_fn: nn.Module

    def setup(self):
        make = nn.MultiHeadDotProductAttention
        self.layer = [make(HEADS, attention_fn=self.attention_fn) for _ in range(LAYERS)]

    def __call__(self, x, mask=None):
        for layer in self.layer:
            x = x + layer(x, mask=mask)
        return x


def _variables():
    return {"params": {f"layer_{index}": _layer_weights(index) for index in range(LAYERS)}}


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, variables, x, mask=None):
    return model.apply(variables, x, mask, mutable=["walk"])


SOME = ("paper", "released", "set")  # the others each week


@pytest.mark.parametrize(
    "name",
    [*slow_unless("paper".__eq__, SOME), *weekly(x for x in CONFIGS if x not in SOME)],
)
def test_layers_share_the_walk_of_a_scan(name):
    config = CONFIGS[name]
    model, (expected, _) = _Nnx(WalkAttention(config)), _scan(_inputs(), config=config)
    np.testing.assert_allclose(_run(model, _inputs()), expected, **tolerance("paths"))
    assert int(model.attention_fn.layer.get_value()) == LAYERS
    actual, state = _apply(_Linen(config), _variables(), _inputs())
    np.testing.assert_allclose(actual, expected, **tolerance("paths"))
    assert int(state["walk"]["LinenWalkAttention_0"]["layer"]) == LAYERS


def test_the_walk_differs_from_layers_that_select_alone():
    config = CONFIGS["no_dense_layers"]
    walked, _ = _scan(_inputs(), config=config)
    for attention_fn in (make_attention_fn(config), make_attention_fn()):
        other = _run(_Nnx(attention_fn), _inputs())
        assert np.abs(walked - other).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(TOKENS, 90), (17, TOKENS)], ids=str)
def test_masks_of_right_padding_become_lengths(lengths):
    x = _inputs()
    is_token = jnp.arange(TOKENS)[None, :] < jnp.asarray(lengths)[:, None]
    mask = nn.make_attention_mask(is_token, is_token) * nn.make_causal_mask(is_token)
    with_nnx = _run(_Nnx(WalkAttention(PAPER)), x, mask)
    with_linen, _ = _apply(_Linen(PAPER), _variables(), x, mask)
    for row, length in enumerate(lengths):
        alone, _ = _scan(x[row : row + 1, :length], config=PAPER)
        for actual in (with_nnx, with_linen):
            np.testing.assert_allclose(actual[row, :length], alone[0], **tolerance("paths"))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, *weekly((10, 100))])
def test_defaults_attend_to_all_of_short_sequences(tokens):
    """The default policy keeps at least 256 tokens, so all of this equals dense attention."""
    x = _inputs()[:, :tokens]
    walk = WalkAttention()
    walk.reset(2, tokens)
    make = functools.partial(nnx.MultiHeadAttention, HEADS, WIDTH, decode=False)
    recommended = SketchWalkConfig.recommended()
    for attention_fn in (make_attention_fn(), make_attention_fn(recommended), walk):
        found = make(attention_fn=attention_fn, rngs=nnx.Rngs(0))(x, is_causal=True)
        expected = make(rngs=nnx.Rngs(0))(x, is_causal=True)
        np.testing.assert_allclose(found, expected, **tolerance("paths"))

    variables = {"params": _layer_weights(0)}
    mask = nn.make_causal_mask(x[..., 0], dtype=bool)
    expected = nn.MultiHeadDotProductAttention(HEADS).apply(variables, x, mask=mask)
    for attention_fn in (make_attention_fn(recommended, is_causal=True), LinenWalkAttention()):
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
        found, _ = layer.apply(variables, x, mask=mask, mutable=["walk"])
        np.testing.assert_allclose(found, expected, **tolerance("paths"))

    layer = WalkSelfAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    expected, params = _dense_layer(layer, x), nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    of_linen, _ = LinenWalkSelfAttention(HEADS).apply({"params": params}, x)
    for found in (layer(x)[0], of_linen):
        np.testing.assert_allclose(found, expected, **tolerance("paths"))


def _dense_layer(layer, x):
    """Returns the output of a `WalkSelfAttention` with dense attention instead."""
    out = nnx.dot_product_attention(layer.query(x), layer.key(x), layer.value(x), is_causal=True)
    return layer.out(out)


def test_several_batch_axes_are_one():
    expected, _ = _scan(_inputs(), config=PAPER)
    actual = _run(_Nnx(WalkAttention(PAPER)), _inputs()[:, None])
    np.testing.assert_allclose(actual[:, 0], expected, **tolerance("paths"))


def test_reset_starts_the_walk_afresh():
    model, x = _Nnx(WalkAttention(PAPER)), _inputs()
    first, second = _run(model, x), _run(model, x)
    np.testing.assert_array_equal(first, second)
    for layer in model.layers:  # without a reset, layers continue the last pass's walk
        x = x + layer(x, is_causal=True)
    assert np.abs(x - first).max() > 1e-2


@pytest.mark.parametrize("reset", [None, (2, 64), (1, TOKENS)], ids=str)
def test_nnx_layers_without_a_fitting_reset_are_refused(reset):
    attention = WalkAttention(PAPER)
    if reset is not None:
        attention.reset(*reset)
    heads = _inputs().reshape(2, TOKENS, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=r"walk must be that of 2 sequences of 150 .*call reset"):
        attention(heads, heads, heads, is_causal=True)


def test_nnx_walk_in_split_and_merged_models():
    structure, params, walk = nnx.split(_Nnx(WalkAttention(PAPER)), nnx.Param, Walk)
    run = jax.jit(lambda params, walk, x: nnx.merge(structure, params, walk)(x))
    expected, _ = _scan(_inputs(), config=PAPER)
    np.testing.assert_allclose(run(params, walk, _inputs()), expected, **tolerance("paths"))


def test_transforms_that_would_give_each_layer_a_walk_of_its_own_are_refused():
    with pytest.raises(TypeError, match="WalkAttention"):
        jax.jit(lambda model, x: model(x))(_Nnx(WalkAttention(PAPER)), _inputs())


LINEN_MODELS = {
    "remat": _Linen(PAPER, nn.remat),
    "jit": _Linen(PAPER, nn.jit),
    "from_outside": _LinenSetup(LinenWalkAttention(PAPER, is_causal=True)),
}


@pytest.mark.parametrize("model", LINEN_MODELS.values(), ids=LINEN_MODELS)
def test_linen_walk_is_shared_through_transforms_and_attributes(model):
    expected, _ = _scan(_inputs(), config=PAPER)
    actual, _ = _apply(model, _variables(), _inputs())
    np.testing.assert_allclose(actual, expected, **tolerance("paths"))


def test_linen_walk_starts_afresh_unless_it_is_given():
    model, x = _Linen(PAPER), _inputs()
    assert set(jax.eval_shape(model.init, jax.random.key(0), x)) == {"params"}
    first, state = _apply(model, _variables(), x)
    second, _ = _apply(model, _variables(), x)
    np.testing.assert_array_equal(first, second)
    longer, state = _apply(model, _variables() | state, x)
    assert int(state["walk"]["LinenWalkAttention_0"]["layer"]) == 2 * LAYERS
    assert np.abs(longer - first).max() > 1e-2
    with pytest.raises(ValueError, match="walk must be that of 2 sequences of 70"):
        model.apply(_variables() | state, x[:, :70], mutable=["walk"])


def test_linen_walk_needs_a_mutable_collection():
    with pytest.raises(ValueError, match=r"apply must be given mutable=\['walk'\]"):
        _Linen(PAPER).apply(_variables(), _inputs())
