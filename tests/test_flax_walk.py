"""The walk over the layers of a Flax model: shared modules equal the explicit carry."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import tolerance

from sketchwalk_jax import SketchWalkConfig, init_walk, sketchwalk_attention
from sketchwalk_jax.flax import LinenWalkAttention, Walk, WalkAttention, make_attention_fn

WIDTH, HEADS, LAYERS, TOKENS = 32, 2, 3, 150
OPTIONS = {"block_size": 16, "sketch_dim": 8, "density": 0.4}
CONFIGS = {
    "paper": SketchWalkConfig.paper(dense_layers=1, **OPTIONS),
    "no_dense_layers": SketchWalkConfig.paper(dense_layers=0, **OPTIONS),
    "damped": SketchWalkConfig.damped(dense_layers=1, **OPTIONS),
    "all_dense": SketchWalkConfig.paper(dense_layers=9, **OPTIONS),
}
PAPER = CONFIGS["paper"]
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def _inputs(*shape):
    """Blocks that differ, so that what is selected matters."""
    shape = shape or (2, TOKENS)
    blocks = jax.random.normal(jax.random.key(3), (*shape[:-1], -(-shape[-1] // 16), WIDTH))
    tokens = jax.random.normal(jax.random.key(4), (*shape, WIDTH))
    return 0.7 * jnp.repeat(blocks, 16, axis=-2)[..., : shape[-1], :] + 0.3 * tokens


class _Nnx(nnx.Module):
    """A stack of nnx layers that share an attention function."""

    def __init__(self, attention_fn, rngs):
        self.attention_fn = attention_fn
        self.layers = nnx.List(
            nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=rngs)
            for _ in range(LAYERS)
        )

    def __call__(self, x, mask=None):
        if isinstance(self.attention_fn, WalkAttention):
            self.attention_fn.reset(int(np.prod(x.shape[:-2])), x.shape[-2])
        for layer in self.layers:
            x = x + layer(x, mask=mask, is_causal=mask is None)
        return x

    def weights(self):
        """One tree per layer."""
        return [nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in self.layers]


class _Linen(nn.Module):
    """A stack of Linen layers that share an attention module made beside them."""

    config: SketchWalkConfig
    wrap: object = staticmethod(lambda layer: layer)

    @nn.compact
    def __call__(self, x, mask=None):
        attention_fn = LinenWalkAttention(self.config, is_causal=mask is None)
        layer = self.wrap(nn.MultiHeadDotProductAttention)
        for index in range(LAYERS):
            x = x + layer(HEADS, attention_fn=attention_fn, name=f"layer_{index}")(x, mask=mask)
        return x


class _LinenSetup(nn.Module):
    """Likewise, made in `setup`; the attention module may also come from outside."""

    attention_fn: nn.Module

    def setup(self):
        self.layer = [
            nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)
            for _ in range(LAYERS)
        ]

    def __call__(self, x):
        for layer in self.layer:
            x = x + layer(x)
        return x


def _project(weights, x):
    return tuple(
        jnp.einsum("btd,dnh->btnh", x, weights[name]["kernel"])
        for name in ("query", "key", "value")
    )


def _merge(weights, out):
    return jnp.einsum("btnh,nhd->btd", out, weights["out"]["kernel"])


def _scan(weights, x, config, lengths=None):
    """The same layers (biases are zero) as two scans: dense ones, then the walk in the carry."""
    first = min(config.dense_layers, LAYERS)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)

    def dense_step(x, weights):
        out = nnx.dot_product_attention(*_project(weights, x), is_causal=True)
        return x + _merge(weights, out), None

    def sparse_step(carry, weights):
        x, walk = carry
        out, walk = sketchwalk_attention(
            *_project(weights, x), walk, config=config, lengths=lengths
        )
        return (x + _merge(weights, out), walk), None

    x, _ = jax.lax.scan(dense_step, x, jax.tree.map(lambda w: w[:first], stacked))
    carry = (x, init_walk(*x.shape[:2], config=config))
    return jax.lax.scan(sparse_step, carry, jax.tree.map(lambda w: w[first:], stacked))[0]


def _linen_weights(variables, name="layer_{}"):
    return [variables["params"][name.format(index)] for index in range(LAYERS)]


@configs
def test_nnx_layers_share_the_walk_of_a_scan(config):
    model, x = _Nnx(WalkAttention(config), nnx.Rngs(0)), _inputs()
    expected, walk = _scan(model.weights(), x, config)
    np.testing.assert_allclose(model(x), expected, **tolerance("paths"))
    attention = model.attention_fn
    assert int(attention.layer.get_value()) == LAYERS
    assert max(LAYERS - config.dense_layers, 0) == int(walk.layers)
    np.testing.assert_allclose(
        attention.scores.get_value() / (walk.scores.max() + 1e-30),
        walk.scores / (walk.scores.max() + 1e-30),
        **tolerance("paths"),
    )


@configs
def test_linen_layers_share_the_walk_of_a_scan(config):
    model, x = _Linen(config), _inputs()
    variables = model.init(jax.random.key(0), x)
    expected, _ = _scan(_linen_weights(variables), x, config)
    actual, state = model.apply(variables, x, mutable=["walk"])
    np.testing.assert_allclose(actual, expected, **tolerance("paths"))
    (walk,) = state["walk"].values()
    assert int(walk["layer"]) == LAYERS


def test_the_walk_differs_from_layers_that_select_alone():
    x = _inputs()
    config = CONFIGS["no_dense_layers"]
    walked = _Nnx(WalkAttention(config), nnx.Rngs(0))(x)
    alone = _Nnx(make_attention_fn(config), nnx.Rngs(0))(x)
    dense = _Nnx(make_attention_fn(), nnx.Rngs(0))(x)
    assert np.abs(walked - alone).max() > 1e-2
    assert np.abs(walked - dense).max() > 1e-2


@pytest.mark.parametrize("lengths", [(TOKENS, 90), (17, TOKENS)], ids=str)
def test_masks_of_right_padding_become_lengths(lengths):
    x = _inputs()
    is_token = jnp.arange(TOKENS)[None, :] < jnp.asarray(lengths)[:, None]
    mask = nn.combine_masks(
        nn.make_attention_mask(is_token, is_token), nn.make_causal_mask(is_token)
    )
    nnx_model, linen_model = _Nnx(WalkAttention(PAPER), nnx.Rngs(0)), _Linen(PAPER)
    variables = linen_model.init(jax.random.key(0), x)
    results = [
        (nnx_model(x, mask), nnx_model.weights()),
        (linen_model.apply(variables, x, mask, mutable=["walk"])[0], _linen_weights(variables)),
    ]
    for actual, weights in results:
        for row, length in enumerate(lengths):
            alone, _ = _scan(weights, x[row : row + 1, :length], PAPER)
            np.testing.assert_allclose(actual[row, :length], alone[0], **tolerance("paths"))


def test_several_batch_axes_are_one():
    model, x = _Nnx(WalkAttention(PAPER), nnx.Rngs(0)), _inputs(2, 2, 70)
    expected = model(x.reshape(4, 70, WIDTH)).reshape(x.shape)
    np.testing.assert_allclose(model(x), expected, **tolerance("paths"))


def test_reset_starts_the_walk_afresh():
    model, x = _Nnx(WalkAttention(PAPER), nnx.Rngs(0)), _inputs()
    first, second = model(x), model(x)
    np.testing.assert_array_equal(first, second)
    again = x
    for layer in model.layers:  # no reset: these go on where the pass before ended
        again = again + layer(again, is_causal=True)
    assert np.abs(again - first).max() > 1e-2


@pytest.mark.parametrize("reset", [None, (2, 64), (1, TOKENS)], ids=str)
def test_nnx_layers_without_a_fitting_reset_are_refused(reset):
    attention = WalkAttention(PAPER)
    if reset is not None:
        attention.reset(*reset)
    with pytest.raises(ValueError, match=r"walk must be that of 2 sequences of 150 .*call reset"):
        attention(*[_inputs().reshape(2, TOKENS, HEADS, 16)] * 3, is_causal=True)


def _nnx_jit(model, x):
    return nnx.jit(lambda model, x: model(x))(model, x)


def _split_and_merge(model, x):
    structure, params, walk = nnx.split(model, nnx.Param, Walk)

    @jax.jit
    def run(params, walk, x):
        return nnx.merge(structure, params, walk)(x)

    return run(params, walk, x)


@pytest.mark.parametrize("transform", [_nnx_jit, _split_and_merge])
def test_nnx_walk_under_transforms(transform):
    model, x = _Nnx(WalkAttention(PAPER), nnx.Rngs(0)), _inputs()
    expected, _ = _scan(model.weights(), x, PAPER)
    for _ in range(2):
        np.testing.assert_allclose(transform(model, x), expected, **tolerance("paths"))


def test_transforms_that_would_give_each_layer_a_walk_of_its_own_are_refused():
    model = _Nnx(WalkAttention(PAPER), nnx.Rngs(0))
    with pytest.raises(TypeError, match="WalkAttention"):
        jax.jit(lambda model, x: model(x))(model, _inputs())


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_linen_walk_under_transforms(wrap):
    x, plain = _inputs(), _Linen(PAPER)
    variables = plain.init(jax.random.key(0), x)
    expected, _ = _scan(_linen_weights(variables), x, PAPER)
    apply = jax.jit(lambda model, v, x: model.apply(v, x, mutable=["walk"])[0], static_argnums=0)
    for model in (plain, _Linen(PAPER, wrap)):
        np.testing.assert_allclose(apply(model, variables, x), expected, **tolerance("paths"))


def test_linen_walk_module_from_outside_is_shared():
    x = _inputs()
    model = _LinenSetup(LinenWalkAttention(PAPER, is_causal=True))
    variables = model.init(jax.random.key(0), x)
    expected, _ = _scan(_linen_weights(variables), x, PAPER)
    actual, _ = model.apply(variables, x, mutable=["walk"])
    np.testing.assert_allclose(actual, expected, **tolerance("paths"))


def test_linen_walk_starts_afresh_unless_it_is_given():
    model, x = _Linen(PAPER), _inputs()
    variables = model.init(jax.random.key(0), x)
    assert set(variables) == {"params"}
    first, state = model.apply(variables, x, mutable=["walk"])
    second, _ = model.apply(variables, x, mutable=["walk"])
    np.testing.assert_array_equal(first, second)
    longer, state = model.apply(variables | state, x, mutable=["walk"])
    assert int(*jax.tree.leaves(state["walk"]["LinenWalkAttention_0"]["layer"])) == 2 * LAYERS
    assert np.abs(longer - first).max() > 1e-2
    with pytest.raises(ValueError, match="walk must be that of 2 sequences of 70"):
        model.apply(variables | state, x[:, :70], mutable=["walk"])


def test_linen_walk_needs_a_mutable_collection():
    model, x = _Linen(PAPER), _inputs()
    variables = model.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"apply must be given mutable=\['walk'\]"):
        model.apply(variables, x)
