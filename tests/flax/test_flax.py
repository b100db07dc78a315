"""Models as Flax modules: parameters for `generate`, and the pure functions' results."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from checkpoints import write_checkpoint
from flax import nnx
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import (
    Sampling,
    decode_step,
    forward,
    generate,
    init_cache,
    load,
    prefill,
)
from sketchwalk_jax.models.flax import CausalLM, LinenCausalLM
from sketchwalk_jax.models.params import param_shapes

PAPER = tiny.POLICIES["paper"]
FAMILIES = {
    "llama": tiny.MODEL,
    "qwen2": dataclasses.replace(
        tiny.MODEL, model_type="qwen2", qkv_bias=True, tie_word_embeddings=True
    ),
    "qwen3": dataclasses.replace(tiny.MODEL, model_type="qwen3", qk_norm=True),
    "qwen3_moe": tiny.EXPERTS,
}


def _nnx(params, model_config, *args, method="__call__", **options):
    """Calls a method of a `CausalLM` with these parameters."""
    return getattr(CausalLM.from_params(params, model_config), method)(*args, **options)


def _linen(params, model_config, *args, method="__call__", **options):
    """Calls a method of a `LinenCausalLM` with these parameters."""
    model = LinenCausalLM(model_config)
    return model.apply({"params": params}, *args, method=method, **options)


both = pytest.mark.parametrize("call", [_nnx, _linen], ids=["nnx", "linen"])
families = pytest.mark.parametrize(
    "family", slow_unless("qwen3_moe".__eq__, ["llama", "qwen2", "qwen3", "qwen3_moe"])
)


def _params(model_config, dtype=jnp.float32):
    """Random parameters with nontrivial biases and norms, drawn without compiling."""
    rng = np.random.default_rng(2)

    def with_noise(x):
        noise = 0.1 * rng.standard_normal(x.shape)
        return jnp.asarray(np.asarray(x, np.float32) + noise, dtype)

    return jax.tree.map(with_noise, tiny.params(dtype, model_config))


@families
@both
def test_logits_are_those_of_forward(call, family):
    model_config = FAMILIES[family]
    params = _params(model_config)
    tokens, lengths = tiny.prompts(50, 37)
    for config in (None, PAPER):
        expected = forward(
            params, tokens, model_config=model_config, policy=config, lengths=lengths
        )
        actual = call(params, model_config, tokens, policy=config, lengths=lengths)
        np.testing.assert_array_equal(actual, expected)


@both
def test_generate_through_the_module_equals_generate(call):
    params = tiny.params()
    tokens, lengths = tiny.prompts(60, 41)
    options = {"policy": PAPER, "max_new_tokens": 5, "lengths": lengths}
    options["sampling"] = Sampling(temperature=0.9)
    expected = generate(params, tokens, model_config=tiny.MODEL, **options)
    actual = call(params, tiny.MODEL, tokens, method="generate", **options)
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.slow
@both
def test_prefill_and_decode_step_through_the_module(call):
    params = tiny.params()
    tokens, _ = tiny.prompts(40)
    token = jnp.asarray([3], jnp.int32)

    def cache():
        return init_cache(tiny.MODEL, PAPER, batch=1, max_tokens=64, dtype=jnp.float32)

    options = {"model_config": tiny.MODEL, "policy": PAPER}
    expected, filled = prefill(params, tokens, cache(), **options)
    expected_next, _ = decode_step(params, token, filled, **options)
    actual, filled = call(params, tiny.MODEL, tokens, cache(), method="prefill", policy=PAPER)
    actual_next, _ = call(params, tiny.MODEL, token, filled, method="decode_step", policy=PAPER)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual_next, expected_next)


@families
def test_nnx_module_owns_the_tree_of_generate(family):
    model_config = FAMILIES[family]
    params = _params(model_config)
    model = CausalLM.from_params(params, model_config)
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)
    chex.assert_trees_all_equal(model.params, params)
    assert not jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))


@families
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_new_modules_have_the_shapes_of_the_tree(family, dtype):
    model_config = FAMILIES[family]
    shapes = param_shapes(model_config, dtype)
    abstract = nnx.eval_shape(lambda: CausalLM(model_config, rngs=nnx.Rngs(0), dtype=dtype))
    assert nnx.to_pure_dict(nnx.state(abstract, nnx.Param)) == shapes
    linen = LinenCausalLM(model_config, dtype)
    tokens = jnp.zeros((1, 4), jnp.int32)
    variables = jax.eval_shape(linen.init, jax.random.key(0), tokens)
    assert dict(variables) == {"params": shapes}


def test_new_parameters_follow_the_key():
    tokens = jnp.zeros((1, 4), jnp.int32)
    linen = LinenCausalLM(tiny.MODEL)
    draws = [CausalLM(tiny.MODEL, rngs=nnx.Rngs(seed)).params for seed in (0, 0, 1)]
    draws += [linen.init(jax.random.key(seed), tokens)["params"] for seed in (0, 0, 1)]
    for first, again, other in (draws[:3], draws[3:]):
        chex.assert_trees_all_equal(first, again)
        assert not np.array_equal(first["embed"]["embedding"], other["embed"]["embedding"])


def _split_and_merge(model, tokens):
    structure, state = nnx.split(model)
    return jax.jit(lambda state, tokens: nnx.merge(structure, state)(tokens))(state, tokens)


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, tokens: nnx.jit(lambda model, tokens: model(tokens))(model, tokens),
        lambda model, tokens: jax.jit(lambda model, tokens: model(tokens))(model, tokens),
        _split_and_merge,
    ],
    ids=["nnx.jit", "jax.jit", "split_merge"],
)
def test_nnx_module_works_under_transforms(transform):
    model = CausalLM.from_params(tiny.params(), tiny.MODEL)
    tokens, _ = tiny.prompts(33)
    expected = forward(tiny.params(), tokens, model_config=tiny.MODEL)
    actual = transform(model, jnp.asarray(tokens))
    np.testing.assert_allclose(actual, expected, **tolerance("paths"))


def test_assigning_a_parameter_changes_the_logits():
    model = CausalLM.from_params(tiny.params(), tiny.MODEL)
    tokens, _ = tiny.prompts(20)
    model.lm_head["kernel"].set_value(2.0 * model.lm_head["kernel"].get_value())
    expected = 2.0 * forward(tiny.params(), tokens, model_config=tiny.MODEL)
    np.testing.assert_allclose(model(tokens), expected, **tolerance("logits"))


@pytest.mark.slow
def test_a_gradient_step_of_a_module_with_experts_lowers_the_loss():
    model = CausalLM.from_params(tiny.params(model=tiny.EXPERTS), tiny.EXPERTS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.03), wrt=nnx.Param)
    tokens = jnp.asarray(tiny.prompts(24)[0])

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(tokens)[:, :-1], tokens[:, 1:]
            )
            return losses.mean()

        found, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return found

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_cost_of_the_module_does_not_grow_with_layers():
    deep = dataclasses.replace(tiny.MODEL, num_layers=40)
    shallow, deep = (
        nnx.eval_shape(lambda c=c: CausalLM(c, rngs=nnx.Rngs(0))) for c in (tiny.MODEL, deep)
    )
    sizes = {len(jax.tree.leaves(nnx.state(model))) for model in (shallow, deep)}
    assert sizes == {len(jax.tree.leaves(param_shapes(tiny.MODEL)))}


@both
def test_a_loaded_checkpoint_runs_in_the_module(call, tmp_path):
    write_checkpoint(tmp_path / "hub", "qwen2")
    params, model_config = load(tmp_path / "hub", progress=False)
    tokens, _ = tiny.prompts(21)
    expected = forward(params, tokens, model_config=model_config)
    np.testing.assert_array_equal(call(params, model_config, tokens), expected)


@both
def test_parameters_that_do_not_fit_are_refused(call):
    params, tokens = tiny.params(), tiny.prompts(8)[0]
    layers = {name: x for name, x in params["layers"].items() if name != "gate"}
    for change, message in (
        ({"layers": layers}, "layers/gate/kernel is missing"),
        ({"extra": {"kernel": jnp.zeros(3)}}, "extra/kernel is unknown"),
        ({"final_norm": {"scale": jnp.zeros(3)}}, r"/scale must be \(32,\), got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call(params | change, tiny.MODEL, tokens)
