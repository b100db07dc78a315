"""One layer with its own cache: the library's model, assembled by hand layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from arrays import normal
from tolerances import tolerance

from sketchwalk_jax import (
    Dense,
    SketchWalkConfig,
    decode_step,
    init_cache,
    init_layer_cache,
    prefill,
    sketchwalk_attention,
    sketchwalk_cached_attention,
)
from sketchwalk_jax.models.transformer import embed, run_layers, unembed

MODEL, CAPACITY = tiny.MODEL, 128
CONFIGS = {
    "recommended": SketchWalkConfig.recommended(
        block_size=16, density=0.4, dense_layers=1, min_tokens=64
    ),
    "paper": tiny.POLICIES["paper"],
}
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}  # as the model's


@functools.partial(jax.jit, static_argnums=(0, 1))
def own_caches(config, batch):
    """Makes a cache for the dense first layer, and stacked ones for the others."""
    make = functools.partial(init_layer_cache, batch, CAPACITY, **SHAPE)
    one = make(policy=config)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * (MODEL.num_layers - 1)), one)
    return make(policy=Dense(block_size=16)), stacked


@functools.partial(jax.jit, static_argnames="config")
def own_model(params, tokens, lengths, caches, *, config):
    """Runs a model with the one-layer function, in a scan over layers and their caches."""
    positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def dense(query, key, value, layer, state):
        cache, *others = state
        out, cache, _ = sketchwalk_cached_attention(
            query, key, value, cache, policy=Dense(block_size=16), lengths=lengths
        )
        return out, (cache, *others), None

    def sparse(query, key, value, layer, state):
        first, stacked, walk = state
        cache = jax.tree.map(lambda x: x[layer - 1], stacked)
        out, cache, walk, selection = sketchwalk_cached_attention(
            query, key, value, cache, walk, policy=config, lengths=lengths, return_selection=True
        )
        stacked = jax.tree.map(lambda x, new: x.at[layer - 1].set(new), stacked, cache)
        return out, (first, stacked, walk), selection

    num_rows = 1 if tokens.shape[1] == 1 else -(-(tokens.shape[1] + 15) // 16)
    walk = config.init_walk(batch=len(lengths), num_rows=num_rows, num_blocks=CAPACITY // 16)
    hidden, (*caches, _), lists = run_layers(
        params,
        embed(params, tokens),
        positions,
        (*caches, walk),
        model_config=MODEL,
        layers=[(range(1), dense), (range(1, MODEL.num_layers), sparse)],
    )
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return unembed(params, last, model_config=MODEL), tuple(caches), lists[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recommended", "paper"])
def test_layers_with_their_own_caches_are_the_model(name):
    config, params = CONFIGS[name], tiny.params()
    tokens, lengths = tiny.prompts(90, 55)
    cache = init_cache(MODEL, config, batch=2, max_tokens=CAPACITY)
    where = {"model_config": MODEL, "policy": config, "return_selection": True}
    caches = own_caches(config, 2)
    wanted, cache, lists = prefill(params, tokens, cache, lengths=lengths, **where)
    lengths = jnp.asarray(lengths)
    found, caches, own = own_model(params, jnp.asarray(tokens), lengths, caches, config=config)
    for step in range(3):
        if step:
            token, one = jnp.array([step, 7], jnp.int32), jnp.ones_like(lengths)
            wanted, cache, lists = decode_step(params, token, cache, **where)
            found, caches, own = own_model(params, token[:, None], one, caches, config=config)
        np.testing.assert_allclose(found, wanted, **tolerance("logits"))
        rows = lists.counts.shape[-1]
        counts, ids = np.asarray(lists.counts), np.asarray(lists.ids)
        is_row = counts > 0  # rows of padding have no list here
        is_listed = np.arange(ids.shape[-1]) < counts[..., None]
        own = jax.tree.map(lambda x, rows=rows: np.asarray(x)[:, :, :, :rows], own)
        np.testing.assert_array_equal(own.counts[is_row], counts[is_row])
        np.testing.assert_array_equal(own.ids[is_listed], ids[is_listed])
        keys = np.concatenate([caches[0].key[None], caches[1].key])
        for own_lengths in (caches[0].lengths, *caches[1].lengths):
            np.testing.assert_array_equal(own_lengths, cache.lengths)
        for row, length in enumerate(np.asarray(cache.lengths)):
            pair = (x[:, row, :length] for x in (keys, cache.key))
            np.testing.assert_allclose(*pair, **tolerance("logits"))


def test_a_sequence_that_has_ended_stays_as_it_is():
    config = CONFIGS["paper"]
    query = normal((2, 1, 4, 16))
    key = query[:, :, :2]
    cache = init_layer_cache(2, 32, policy=config, **SHAPE)
    attend = functools.partial(sketchwalk_cached_attention, query, key, key, policy=config)
    _, cache, _ = attend(cache)
    before = jax.tree.map(np.asarray, cache)
    out, cache, _ = attend(cache, lengths=jnp.array([1, 0], jnp.int32))
    assert cache.lengths.tolist() == [2, 1] and np.isfinite(out[0]).all()
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.unchecked
def test_what_does_not_fit_is_said():
    config = CONFIGS["paper"]
    query = jnp.ones((2, 40, 4, 16))
    make = functools.partial(init_layer_cache, policy=config, **SHAPE)
    cache = make(2, 32)
    for options, message in (
        ({}, "cache must have room for 40 tokens, got one of 32"),
        (
            {"policy": CONFIGS["recommended"]},
            "cache must be from init_layer_cache with this policy",
        ),
        ({"cache": make(1, 48)}, "cache must hold keys like key's"),
        ({"cache": None}, "cache must be a LayerCache"),
        ({"policy": "paper"}, "policy must be a policy"),
    ):
        call = {"key": query[:, :, :2], "value": query[:, :, :2], "cache": cache, "policy": config}
        with pytest.raises(ValueError, match=message):
            sketchwalk_cached_attention(query, **call | options)
    for size, message in (
        ({"head_dim": 0}, "head_dim must be a positive integer"),
        ({"num_heads": 33}, "num_heads must be a multiple of num_kv_heads, got 33"),
    ):
        with pytest.raises(ValueError, match=message):
            make(2, 32, **size)


@pytest.mark.slow
def test_a_walk_is_started_where_none_is_given():
    config, x = CONFIGS["recommended"], normal((1, 80, 4, 16))
    cache = init_layer_cache(1, 80, policy=config, **SHAPE | {"num_kv_heads": 4})
    out, _, _ = sketchwalk_cached_attention(x, x, x, cache, policy=config)
    wanted, _ = sketchwalk_attention(x, x, x, policy=config)
    np.testing.assert_allclose(out, wanted, **tolerance("attention"))
