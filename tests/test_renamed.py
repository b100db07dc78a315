"""Former names: `config=` of all that takes a policy, and `sharding.plan`."""

import functools
import inspect
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from variants import slow_unless

import sketchwalk_jax as sw
from sketchwalk_jax import flax as adapters
from sketchwalk_jax.evaluation.planning import make_plan
from sketchwalk_jax.models.flax import CausalLM, LinenCausalLM

POLICY = tiny.POLICIES["paper"]
MODEL = {"model_config": tiny.MODEL}
TOKENS = np.arange(40, dtype=np.int32)[None] % 60
X = jnp.ones((1, 32, 4, 16))
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@functools.cache
def params():
    return tiny.params()


def cache():
    return sw.init_cache(tiny.MODEL, POLICY, batch=1, max_tokens=64)


def layer_cache():
    return sw.init_layer_cache(1, 64, **HEADS | {"num_kv_heads": 4}, policy=POLICY)


def linen(method, *arguments):
    """Calls a Linen model's method; options as its own."""
    model = LinenCausalLM(tiny.MODEL)
    return lambda **options: model.apply({"params": params()}, *arguments, method=method, **options)


def nnx_model():
    return CausalLM.from_params(params(), tiny.MODEL)


# Of every public name that takes a policy: a call that lacks the policy alone.
CALLS = {
    "init_walk": lambda **given: sw.init_walk(1, 40, **given),
    "sketchwalk_attention": lambda **given: sw.sketchwalk_attention(X, X, X, **given),
    "init_layer_cache": lambda **given: sw.init_layer_cache(1, 64, **HEADS, **given),
    "sketchwalk_cached_attention": lambda **given: sw.sketchwalk_cached_attention(
        X, X, X, layer_cache(), **given
    ),
    "init_cache": lambda **given: sw.init_cache(tiny.MODEL, batch=1, max_tokens=64, **given),
    "prefill": lambda **given: sw.prefill(params(), TOKENS, cache(), **MODEL, **given),
    "decode_step": lambda **given: sw.decode_step(
        params(), TOKENS[:, 0], cache(), **MODEL, **given
    ),
    "forward": lambda **given: sw.forward(params(), TOKENS, **MODEL, **given),
    "generate": lambda **given: sw.generate(params(), TOKENS, max_new_tokens=2, **MODEL, **given),
    "make_generate": lambda **given: sw.make_generate(tiny.MODEL, max_new_tokens=2, **given).policy,
    "stream": lambda **given: (
        next(sw.stream(params(), TOKENS, max_new_tokens=2, **MODEL, **given)).measured_density
    ),
    "make_attention_fn": lambda **given: adapters.make_attention_fn(is_causal=True, **given)(
        X, X, X
    ),
    "WalkAttention": lambda **given: adapters.WalkAttention(**given).policy,
    "LinenWalkAttention": lambda **given: adapters.LinenWalkAttention(**given).policy,
    "WalkSelfAttention": lambda **given: (
        adapters.WalkSelfAttention(4, 32, rngs=nnx.Rngs(0), **given).policy
    ),
    "LinenWalkSelfAttention": lambda **given: adapters.LinenWalkSelfAttention(4, **given).policy,
    "CausalLM": lambda **given: nnx_model()(TOKENS, **given),
    "CausalLM.prefill": lambda **given: nnx_model().prefill(TOKENS, cache(), **given),
    "CausalLM.decode_step": lambda **given: nnx_model().decode_step(TOKENS[:, 0], cache(), **given),
    "CausalLM.generate": lambda **given: nnx_model().generate(TOKENS, max_new_tokens=2, **given),
    "LinenCausalLM": lambda **given: linen("__call__", TOKENS)(**given),
    "LinenCausalLM.prefill": lambda **given: linen("prefill", TOKENS, cache())(**given),
    "LinenCausalLM.decode_step": lambda **given: linen("decode_step", TOKENS[:, 0], cache())(
        **given
    ),
    "LinenCausalLM.generate": lambda **given: linen("generate", TOKENS)(max_new_tokens=2, **given),
}


@pytest.mark.parametrize("name", slow_unless("decode_step".__eq__, CALLS))
def test_a_policy_may_be_called_config_with_a_warning(name):
    call = CALLS[name]
    with pytest.warns(DeprecationWarning, match="argument 'config' is now called 'policy'") as said:
        found = call(config=POLICY)
    # The line that calls; the type checks of the tests stand between.
    assert {Path(one.filename).name for one in said} <= {Path(__file__).name, "_decorator.py"}
    for one, other in zip(*map(jax.tree.leaves, (found, call(policy=POLICY))), strict=True):
        if isinstance(one, sw.SketchWalkConfig):
            assert one == other
        else:
            np.testing.assert_array_equal(one, other)
    with pytest.raises(TypeError, match="'policy' or its former name 'config', got both"):
        call(policy=POLICY, config=POLICY)


def test_every_public_name_that_takes_a_policy_is_called_above():
    def takes_both(name):
        found = getattr(sw, name, None) or getattr(adapters, name)
        call = found.__init__ if isinstance(found, type) else found
        return callable(call) and {"policy", "config"} <= {*inspect.signature(call).parameters}

    names = {*sw.__all__, *adapters.__all__} - {"__version__", "algorithm", "sharding"}
    named = {name for name in names if takes_both(name)} | {"stream"}  # among its options
    assert named == {name for name in CALLS if "CausalLM" not in name}
    assert "config" in inspect.signature(make_plan).parameters


def test_the_former_name_may_be_static_or_given_beforehand():
    attend = jax.jit(sw.sketchwalk_attention, static_argnames="config")
    with pytest.warns(DeprecationWarning):
        out, _ = attend(X, X, X, config=POLICY)
    expected, _ = jax.jit(sw.sketchwalk_attention, static_argnames="policy")(X, X, X, policy=POLICY)
    np.testing.assert_array_equal(out, expected)
    before = functools.partial(sw.sketchwalk_attention, config=POLICY)
    with pytest.warns(DeprecationWarning):
        out, _ = jax.jit(before)(X, X, X)
    np.testing.assert_array_equal(out, expected)


def test_a_policy_by_position_and_by_its_former_name_is_refused():
    with pytest.raises(TypeError, match="got both"):
        sw.make_generate(tiny.MODEL, POLICY, max_new_tokens=2, config=POLICY)


def test_attributes_keep_their_former_names():
    module = adapters.LinenWalkAttention(POLICY)
    choice = sw.Auto(measured=()).choose(tiny.MODEL, batch=1, tokens=64)
    for one in (sw.make_generate(tiny.MODEL, POLICY, max_new_tokens=2), module, choice):
        with pytest.warns(DeprecationWarning, match="config is now called 'policy'"):
            assert one.config is one.policy
    # What Linen copies keeps its fields, without a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.clone().policy == POLICY


def test_placements_are_made_by_plan_with_a_warning():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.warns(DeprecationWarning, match="now called sharding.place"):
        found = sw.sharding.plan(mesh, tiny.MODEL)
    assert found == sw.sharding.place(mesh, tiny.MODEL)


@pytest.mark.slow
def test_a_policy_may_declare_kernels_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"Own.observe\(\): the argument 'kernels' is now"):

        class Own(sw.SketchWalkConfig):
            def observe(self, *arrays, span, kernels=None):
                return super().observe(*arrays, span=span, kernel_config=kernels)

    found, wanted = (
        sw.forward(params(), TOKENS, policy=policy(block_size=16), **MODEL)
        for policy in (Own, sw.SketchWalkConfig)
    )
    np.testing.assert_array_equal(found, wanted)
