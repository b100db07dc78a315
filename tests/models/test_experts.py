"""Mixtures of experts: the router, the groups, and the sums against a plain reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from hypothesis import given
from hypothesis import strategies as st
from tiny import EXPERTS, params, prompts
from tolerances import tolerance
from variants import INTERPRET

import sketchwalk_jax as sw
from sketchwalk_jax.models import experts, quantize_params
from sketchwalk_jax.models.experts import group_pairs, group_size, mixture
from sketchwalk_jax.pallas_kernels.config import KernelConfig

CONFIG = dataclasses.replace(EXPERTS, dense_mlp_layers=())
LAYER = 2
run = jax.jit(mixture, static_argnames=("model_config", "kernel_config"))


@pytest.fixture(scope="module")
def weights():
    return params(model=CONFIG)


def expected(x, stacks, config):
    """Runs every expert on every token in float64, and adds up those that a token chooses."""
    own = {name: np.float64(stacks[name]["kernel"][LAYER]) for name in stacks if "expert" in name}
    logits = np.float64(x) @ np.float64(stacks["router"]["kernel"][LAYER])
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    chosen = np.argsort(-chances, axis=-1, kind="stable")[..., : config.experts_per_token]
    gate, up = (np.einsum("btd,edf->btef", x, own[f"expert_{name}"]) for name in ("gate", "up"))
    outputs = np.einsum("btef,efd->bted", gate / (1 + np.exp(-gate)) * up, own["expert_down"])
    share = np.take_along_axis(chances, chosen, -1)
    if config.norm_topk_prob:
        share /= share.sum(-1, keepdims=True)
    return np.sum(share[..., None] * np.take_along_axis(outputs, chosen[..., None], 2), axis=2)


def router_of(name, weights):
    router = np.array(weights["layers"]["router"]["kernel"])
    if name == "ties":
        router[:] = 0  # every token chooses the first experts
    elif name == "one for all":
        router[..., 4] = 0
        router[:, 0, 4] = 1e3
    return router


@pytest.mark.parametrize("name", ["random", "ties", "one for all", "unnormalised"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 50)])
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(weights, name, shape):
    config = dataclasses.replace(CONFIG, norm_topk_prob=name != "unnormalised")
    stacks = weights["layers"] | {"router": {"kernel": router_of(name, weights)}}
    x = np.random.default_rng(1).standard_normal((*shape, 32)).astype(np.float32)
    x[..., 0] = np.abs(x[..., 0]) + 0.1
    found = run(x, None, stacks, jnp.int32(LAYER), model_config=config)
    np.testing.assert_allclose(found, expected(x, stacks, config), **tolerance("paths"))


def test_rows_that_are_no_tokens_choose_no_expert_and_change_no_bit(weights):
    x = np.random.default_rng(1).standard_normal((2, 40, 32)).astype(np.float32)
    is_token = np.arange(40)[None] < np.array([[40], [13]])

    def mix(is_token):
        return run(x, is_token, weights["layers"], jnp.int32(LAYER), model_config=CONFIG)

    found = mix(is_token)
    assert not np.any(found[1, 13:])
    x[1, 13:] = np.nan
    np.testing.assert_array_equal(found, mix(is_token))
    x[1] = np.random.default_rng(2).standard_normal((40, 32))
    np.testing.assert_array_equal(found[0], mix(np.ones_like(is_token))[0])


@given(st.lists(st.integers(0, 5), min_size=40, max_size=40), st.sampled_from([1, 8, 64]))
def test_each_pair_has_a_place_in_a_group_of_its_expert(chosen, size):
    make = jax.jit(group_pairs, static_argnames=("num_experts", "size"))
    groups = make(jnp.array(chosen, jnp.int32), num_experts=5, size=size)
    used = int(groups.used)
    counts = np.bincount(chosen, minlength=6)[:5]
    wanted = len(chosen) if size == 1 else np.sum(-(-counts // size))
    assert used == wanted <= len(groups.expert)
    pair, place = np.asarray(groups.pair), np.asarray(groups.place)
    assert np.all(pair[used:] == len(chosen))
    for number, expert in enumerate(chosen):
        if expert == 5:
            assert place[number] == pair.size
        else:
            assert pair.ravel()[place[number]] == number
            assert groups.expert[place[number] // size] == expert
    assert np.sum(pair < len(chosen)) == np.sum(counts)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_products_with_eight_bits_are_those_with_the_dequantised_weights(weights, kind):
    stacks = quantize_params(weights, kind)["layers"]
    assert "kernel" in stacks["router"]
    wide = {"router": stacks["router"]}
    for name in ("expert_gate", "expert_up", "expert_down"):
        leaf = stacks[name]
        wide[name] = {
            "kernel": np.swapaxes(np.float32(leaf["quantized"]) * leaf["scales"][..., None], 2, 3)
        }
    x = np.random.default_rng(1).standard_normal((2, 9, 32)).astype(np.float32)
    found, plain = (
        run(x, None, one, jnp.int32(LAYER), model_config=CONFIG) for one in (stacks, wide)
    )
    np.testing.assert_allclose(found, plain, **tolerance("paths"))


def test_groups_are_as_large_as_an_expert_has_pairs():
    numbers = (1, 128, 129, 256, 257, 10**6)
    assert [group_size(n, 128) for n in numbers] == [1, 1, 2, 2, 4, 128]
    assert [group_size(n, 128, has_kernels=True) for n in numbers] == [1, 1, 2, 2, 128, 128]
    assert group_size(256, 8, has_kernels=True) == 8  # few rows for the decode matmul


@pytest.mark.slow
def test_a_model_with_experts_keeps_its_promises():
    config = dataclasses.replace(CONFIG, num_layers=3, dense_mlp_layers=(1,))
    weights = params(model=config)
    policy = sw.SketchWalkConfig.paper(block_size=16, sketch_dim=8, dense_layers=1, density=0.4)
    tokens, lengths = prompts(100, 37)
    options = {"model_config": config, "policy": policy}
    logits = sw.forward(weights, tokens, lengths=lengths, **options)
    pieces = sw.forward(weights, tokens, lengths=lengths, chunk_size=32, **options)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            pieces[row, :length], logits[row, :length], **tolerance("logits")
        )
    others = tokens.copy()
    others[0], others[1, 37:] = prompts(100, seed=5)[0], 9
    changed = sw.forward(weights, others, lengths=lengths, **options)
    np.testing.assert_array_equal(changed[1, :37], logits[1, :37])
    run = sw.make_generate(config, policy, max_new_tokens=6)
    out = run(weights, tokens, lengths=lengths).tokens
    alone = run(weights, tokens[1:, :37]).tokens
    np.testing.assert_array_equal(out[1:], alone)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("kind", "num_tokens", "most_tokens"),
    [
        (None, 3, None),
        pytest.param("float8", 150, None, marks=pytest.mark.slow),
        pytest.param(None, 400, 200, marks=pytest.mark.slow),
        pytest.param("float8", 3, None, marks=pytest.mark.slow),
        pytest.param(None, 150, None, marks=pytest.mark.weekly),
        pytest.param("float8", 400, 200, marks=pytest.mark.weekly),
    ],
)
def test_kernels_mix_as_xla_does(kind, num_tokens, most_tokens, monkeypatch):
    if most_tokens:  # in two parts
        monkeypatch.setattr(experts, "MOST_TOKENS", most_tokens)
    config = dataclasses.replace(CONFIG, hidden_size=128, expert_intermediate_size=128)
    weights = params(jnp.bfloat16, config)
    stacks = (weights if kind is None else quantize_params(weights, kind))["layers"]
    x = normal((1, num_tokens, 128), seed=1, dtype=jnp.bfloat16)
    is_token = jnp.arange(num_tokens)[None] != 1
    here = {"kernel_config": KernelConfig(interpret=True), "model_config": config}
    found = run(x, is_token, stacks, jnp.int32(LAYER), **here).astype(jnp.float32)
    assert not np.any(found[:, 1])
    wide = jax.tree.map(
        lambda one: one.astype(jnp.float32) if one.dtype == jnp.bfloat16 else one, (x, stacks)
    )
    exact = run(wide[0], is_token, wide[1], jnp.int32(LAYER), model_config=config)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < tolerance("kernel", jnp.bfloat16)["atol"]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    [
        (None, 1),
        pytest.param("float8", 2, marks=pytest.mark.slow),
        pytest.param(None, 2, marks=pytest.mark.weekly),
        pytest.param("float8", 1, marks=pytest.mark.weekly),
    ],
)
def test_kernels_mix_decoded_tokens_and_normalise_them(kind, num_tokens):
    config = dataclasses.replace(CONFIG, hidden_size=128, expert_intermediate_size=128)
    config = dataclasses.replace(config, num_experts=64)  # each pair is a group
    weights = params(jnp.bfloat16, config)
    stacks = (weights if kind is None else quantize_params(weights, kind))["layers"]
    x = 3 * normal((num_tokens, 1, 128), seed=1, dtype=jnp.bfloat16)
    scale = jax.random.uniform(jax.random.key(2), (128,), jnp.bfloat16, 0.5, 2.0)
    here = {"kernel_config": KernelConfig(interpret=INTERPRET), "model_config": config}
    mix = jax.jit(mixture, static_argnames=("model_config", "kernel_config"))
    is_token = jnp.arange(num_tokens)[:, None] != 1
    found = mix(x, is_token, stacks, jnp.int32(LAYER), scale=scale, **here)
    assert not np.any(found[1:])
    other = x.at[1:].set(jnp.nan)
    again = mix(other, is_token, stacks, jnp.int32(LAYER), scale=scale, **here)
    np.testing.assert_array_equal(found, again)
    wide = jax.tree.map(
        lambda one: one.astype(jnp.float32) if one.dtype == jnp.bfloat16 else one,
        (x, stacks, scale),
    )
    exact = mix(wide[0], is_token, wide[1], jnp.int32(LAYER), scale=wide[2], model_config=config)
    error = np.linalg.norm(np.float32(found) - exact) / np.linalg.norm(exact)
    assert 0 < error < tolerance("kernel", jnp.bfloat16)["atol"]


@pytest.mark.slow
@pytest.mark.interpreted
def test_decoded_tokens_in_float16_are_normalised_before_they_overflow():
    config = dataclasses.replace(CONFIG, hidden_size=128, expert_intermediate_size=128)
    config = dataclasses.replace(config, num_experts=64)  # each pair is a group
    stacks = params(jnp.float16, config)["layers"]
    x = 20_000 * jax.random.rademacher(jax.random.key(1), (1, 1, 128), jnp.float16)
    given = x, None, stacks, jnp.int32(LAYER)
    sizes = {"scale": jnp.full(128, 4, jnp.float16), "model_config": config}
    found = mixture(*given, **sizes, kernel_config=KernelConfig(interpret=INTERPRET))
    np.testing.assert_allclose(found, mixture(*given, **sizes), **tolerance("kernel", jnp.float16))
