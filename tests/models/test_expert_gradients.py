"""Gradients through a mixture of experts, against all experts computed for every token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from arrays import normal
from variants import slow_unless

from sketchwalk_jax import dense_attention, forward
from sketchwalk_jax.models import experts, quantize_params
from sketchwalk_jax.models.norm import rms_norm
from sketchwalk_jax.models.params import EXPERTS
from sketchwalk_jax.models.transformer import embed, run_layers, unembed

MODEL = tiny.EXPERTS
IS_TOKEN = np.arange(20) < np.array([[20], [11]])


def all_experts(x, is_token, stacks, layer, *, model_config, scale=None):
    """Computes the mixture with a weight for every expert, which is 0 unless it is chosen."""
    if scale is not None:
        x = rms_norm(x, scale, eps=model_config.rms_norm_eps)
    kernels = {name: stacks[name]["kernel"][layer] for name in EXPERTS}
    product = functools.partial(jnp.einsum, precision="highest")
    shares = jax.nn.softmax(product("btd,de->bte", x, kernels["router"]))
    _, chosen = jax.lax.top_k(shares, model_config.experts_per_token)
    is_chosen = jnp.any(jax.nn.one_hot(chosen, model_config.num_experts, dtype=bool), axis=-2)
    weights = jnp.where(is_chosen, shares, 0)
    if model_config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if is_token is not None:
        weights = jnp.where(is_token[..., None], weights, 0)
    gate, up = (product("btd,edm->btem", x, kernels[name]) for name in EXPERTS[1:3])
    return product("btem,emd,bte->btd", jax.nn.silu(gate) * up, kernels[EXPERTS[3]], weights)


def drawn(params):
    """Returns an input, the parameters of the mixtures, and a layer."""
    x = normal((*IS_TOKEN.shape, MODEL.hidden_size), seed=1)
    return x, {name: params["layers"][name] for name in EXPERTS}, jnp.ones((), jnp.int32)


def loss(x, stacks, layer, mix=experts.mixture, model_config=MODEL):
    out = mix(x, jnp.asarray(IS_TOKEN), stacks, layer, model_config=model_config)
    return jnp.sum(jnp.sin(out))


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.max(np.abs(other)))


@pytest.mark.parametrize("has_empty_groups", slow_unless(bool, [False, True]))
def test_gradients_equal_those_of_all_experts(has_empty_groups, monkeypatch):
    if has_empty_groups:  # as on a GPU
        monkeypatch.setattr(experts, "_count", lambda groups: len(groups.expert))
    options = {"model_config": dataclasses.replace(MODEL, norm_topk_prob=not has_empty_groups)}
    given = drawn(tiny.params(model=MODEL))
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, mix=mix, **options), (0, 1)))(*given)
        for mix in (experts.mixture, all_experts)
    )
    assert_close(found, expected)
    assert not np.any(found[1][0][~IS_TOKEN])


@pytest.mark.slow
def test_bfloat16_sums_over_a_long_prompt_are_rounded_once():
    """Each of two experts has some 64 groups."""
    config = dataclasses.replace(MODEL, num_experts=2, experts_per_token=1, hidden_size=16)
    stacks = {
        name: leaf
        for name, leaf in tiny.params(jnp.bfloat16, config)["layers"].items()
        if name in EXPERTS
    }
    x = (normal((1, 2**14, 16), seed=1) + 0.5).astype(jnp.bfloat16)

    def loss(stacks, x):
        out = experts.mixture(x, None, stacks, jnp.zeros((), jnp.int32), model_config=config)
        return jnp.sum(out.astype(jnp.float32) * x.astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))
    wide = jax.tree.map(lambda one: one.astype(jnp.float32), (stacks, x))
    found, expected = gradient(stacks, x), gradient(*wide)
    for name in EXPERTS[1:]:
        one, other = (np.asarray(y[name]["kernel"], np.float32) for y in (found, expected))
        assert np.linalg.norm(one - other) < 0.004 * np.linalg.norm(other)


@pytest.mark.slow
def test_gradients_of_a_model_equal_those_of_all_experts():
    tokens, lengths = tiny.prompts(24, 17)

    def attend(query, key, value, layer, state):
        return dense_attention(query, key, value), state, None

    def plain(params):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mix = functools.partial(all_experts, model_config=MODEL)
        layers = [(range(MODEL.num_layers), attend)]
        hidden, _, _ = run_layers(
            params,
            embed(params, jnp.asarray(tokens)),
            positions,
            None,
            model_config=MODEL,
            layers=layers,
            mix=mix,
        )
        return unembed(params, hidden, model_config=MODEL)

    def loss(function, params):
        is_token = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        return jnp.sum(jnp.where(is_token[..., None], jnp.sin(function(params)), 0))

    run = functools.partial(forward, tokens=tokens, lengths=lengths, model_config=MODEL)
    params = tiny.params(model=MODEL)
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, function)))(params) for function in (run, plain)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * np.max(np.abs(other)))


@pytest.mark.slow
def test_transformations_of_a_gradient():
    x, *others = drawn(tiny.params(model=MODEL))
    gradient, pair = jax.jit(jax.grad(loss)), jnp.stack([x, -x])
    expected = [gradient(one, *others) for one in pair]
    found = jax.jit(jax.vmap(jax.grad(loss), (0, None, None)))(pair, *others)
    assert_close(found, jnp.stack(expected))
    assert_close(jax.jit(jax.grad(jax.checkpoint(loss)))(x, *others), expected[0])


def test_gradients_through_quantized_experts_are_refused():
    given = drawn(quantize_params(tiny.params(model=MODEL), "int8"))
    with pytest.raises(NotImplementedError, match="must not be differentiated"):
        jax.grad(loss)(*given)
