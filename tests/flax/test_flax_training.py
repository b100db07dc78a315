"""Training with sparse attention: a public Flax model, and layers that carry the walk."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import normal
from flax import nnx
from tolerances import tolerance

from sketchwalk_jax import SketchWalkConfig, init_layer_cache
from sketchwalk_jax.flax import LinenWalkSelfAttention, WalkAttention, WalkSelfAttention
from sketchwalk_jax.models.rope import RopeConfig, rope_cos_sin, rotate

WIDTH, HEADS, TOKENS, WORDS = 32, 2, 80, 29
OPTIONS = {"block_size": 16, "sketch_dim": 8, "dense_layers": 0}
SPARSE = SketchWalkConfig.paper(density=0.4, **OPTIONS)
FULL = SketchWalkConfig.paper(density=1.0, **OPTIONS)


class TransformerBlock(nnx.Module):
    """The block of the miniGPT in JAX's tutorials, without dropout."""

    def __init__(self, rngs):
        self.mha = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))
        x = self.layer_norm1(x + self.mha(inputs_q=x, mask=mask[None, None], decode=False))
        return self.layer_norm2(x + self.linear2(nnx.relu(self.linear1(x))))


class MiniGPT(nnx.Module):
    """Embeddings of tokens and positions, blocks, logits."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List(TransformerBlock(rngs) for _ in range(2))
        self.output = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def with_walk(model, config):
    """Returns the model with the walk in all of its attention layers."""
    walk = WalkAttention(config)
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.MultiHeadAttention):
            layer.attention_fn = nnx.data(walk)
    model.walk = walk
    return model


def loss_of(model, tokens):
    if hasattr(model, "walk"):
        model.walk.reset(*tokens.shape)
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, tokens):
    params = nnx.DiffState(0, nnx.Param)
    loss, grads = nnx.value_and_grad(loss_of, argnums=params)(model, tokens)
    optimizer.update(model, grads)
    return loss, grads


def start(config):
    model = MiniGPT(nnx.Rngs(0))
    model = model if config is None else with_walk(model, config)
    return model, nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param)


@pytest.mark.slow
def test_a_public_flax_model_trains_through_it():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, WORDS, (2, TOKENS)), jnp.int32)
    _, wanted = train_step(*start(None), tokens)
    _, found = train_step(*start(FULL), tokens)  # all blocks: gradients equal Flax's attention
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, **tolerance("gradient"))
    state = start(SPARSE)
    losses = [float(train_step(*state, tokens)[0]) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5 and np.isfinite(losses).all()


def turned(x, positions):
    cos, sin = rope_cos_sin(positions, rope=RopeConfig(), head_dim=x.shape[-1])
    return rotate(x, cos, sin)


LAYER = {"num_kv_heads": 1, "rotate": turned, "use_bias": True}


@pytest.mark.slow
def test_layers_with_the_walk_are_one_in_nnx_and_linen_and_decode_from_a_cache():
    x = normal((2, TOKENS, WIDTH), seed=1)
    lengths = jnp.array([TOKENS, 50], jnp.int32)
    layer = WalkSelfAttention(HEADS, WIDTH, policy=FULL, rngs=nnx.Rngs(3), **LAYER)
    linen = LinenWalkSelfAttention(HEADS, policy=FULL, **LAYER)
    params = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    apply = jax.jit(functools.partial(linen.apply, params))
    call = nnx.jit(WalkSelfAttention.__call__)
    of_nnx = functools.partial(call, layer)
    out, walk = of_nnx(x, lengths=lengths)
    other, same = apply(x, None, lengths=lengths)
    np.testing.assert_allclose(other, out, **tolerance("attention"))
    np.testing.assert_array_equal(same.scores, walk.scores)
    assert int(of_nnx(x, walk)[1].layers) == 2
    # The same tokens in chunks from caches, with density 1.
    caches = [layer.init_cache(2, TOKENS)]
    caches.append(
        init_layer_cache(
            2, TOKENS, num_heads=HEADS, num_kv_heads=1, head_dim=WIDTH // HEADS, policy=FULL
        )
    )
    for call, cache in zip((of_nnx, apply), caches, strict=True):
        first, cache, _ = call(x[:, :49], cache=cache)
        token, cache, _ = call(x[:, 49:50], cache=cache)
        pieces = jnp.concatenate([first, token], axis=1)
        np.testing.assert_allclose(pieces, out[:, :50], **tolerance("paths"))
        assert cache.lengths.tolist() == [50, 50]


def test_nn_layers_of_linen_differentiate_in_their_parameters():
    layer = LinenWalkSelfAttention(HEADS, policy=SPARSE)
    x = normal((1, TOKENS, WIDTH), seed=1)
    params = nn.meta.unbox(jax.jit(layer.init)(jax.random.key(0), x))
    grads = jax.jit(jax.grad(lambda params: jnp.sum(layer.apply(params, x)[0] ** 2)))(params)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(grads))
