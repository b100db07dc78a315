"""`jax.export` of functions that take and return the package's states."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tolerances import tolerance

from sketchwalk_jax import Dense, Sampling, forward, init_cache, init_layer_cache
from sketchwalk_jax.inference import generation
from sketchwalk_jax.inference.auto import Choice
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.selection import full_selection
from sketchwalk_jax.walk import WalkState

POLICIES = {
    "dense": Dense(block_size=16),
    "quest": by_name("quest"),
    "adamas": by_name("adamas", block_size=16),
    **{
        preset: by_name("sketchwalk", preset=preset, block_size=16)
        for preset in ("recommended", "paper", "released")
    },
}


def states():
    """Makes one of each state class that public functions return or take."""
    caches = {
        name: init_cache(tiny.MODEL, policy, batch=2, max_tokens=32)
        for name, policy in POLICIES.items()
    }
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    layer = init_layer_cache(2, 32, policy=POLICIES["adamas"], **sizes)
    lists = full_selection(jnp.zeros((2, 1), jnp.int32), 4, block_size=16)
    lists = dataclasses.replace(lists, row_size=64)
    tokens, flags, cache = jnp.ones((2, 3), jnp.int32), jnp.ones((2,), bool), caches["recommended"]
    out = generation.Generation(tokens, tokens[:, 0], cache.density, cache, lists, flags)
    span = Span.of_tokens(tokens[:, 0], 16)
    return caches, layer, out, WalkState.zeros(2, 1, 4), span, Sampling(temperature=0.5)


def test_states_come_back_from_an_exported_function():
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    given = states()
    exported = jax.export.export(jax.jit(lambda *x: x))
    written = exported(*given).serialize()
    found = jax.export.deserialize(written).call(*given)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_with_experts_comes_back_from_an_export_for_two_platforms():
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    given = tiny.params(model=tiny.EXPERTS), jnp.asarray(tiny.prompts(20)[0])
    run = jax.jit(lambda params, tokens: forward(params, tokens, model_config=tiny.EXPERTS))
    exported = jax.export.export(run, platforms=("cpu", "cuda"))
    found = jax.export.deserialize(exported(*given).serialize()).call(*given)
    np.testing.assert_allclose(found, run(*given), **tolerance("paths"))


@pytest.mark.unchecked
def test_what_cannot_be_exported_is_said():
    (_, _, out, *_), (size,) = states(), jax.export.symbolic_shape("b")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.params())
    tokens = jax.ShapeDtypeStruct((size, 20), jnp.int32)
    run = jax.jit(lambda params, tokens: forward(params, tokens, model_config=tiny.MODEL))
    with pytest.raises(ValueError, match=r"tokens must have sizes that are known .* = \[b, 20\]"):
        jax.export.export(run)(shapes, tokens)
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    chosen = dataclasses.replace(out, choice=Choice(policy=Dense(), phase="both", reasons=()))
    with pytest.raises(ValueError, match="static fields of a Generation must be .* got a Choice"):
        jax.export.export(jax.jit(lambda: chosen))().serialize()
