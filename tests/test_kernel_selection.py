"""The policy through the selection kernels gives the lists that it gives without them.

In Pallas' interpreter, or on a machine with a Hopper GPU:
`JAX_PLATFORMS=cuda python -m pytest tests/test_kernel_selection.py`
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tolerances import tolerance

from sketchwalk_jax import (
    KernelConfig,
    SketchWalkConfig,
    dispatch,
    generate,
    init_walk,
    sketchwalk_attention,
)
from sketchwalk_jax.policies.base import LayerShape, Span

pytestmark = pytest.mark.interpreted

SIZE, BLOCKS = 16, 9
CONFIGS = {
    "paper": SketchWalkConfig.paper(block_size=SIZE, density=0.4),
    "damped": SketchWalkConfig.damped(block_size=SIZE, density=0.4),
    "one hop of powers": SketchWalkConfig.paper(block_size=SIZE, density=0.4, beta=0.0),
    "relu, sum": SketchWalkConfig.paper(
        block_size=SIZE, transition="relu_power", head_combination="sum", top_blocks=3
    ),
    "tail": SketchWalkConfig.paper(block_size=SIZE, density=0.3, dense_tail=20),
}


KERNELS = KernelConfig(interpret=not dispatch.is_hopper())


def run(config, lengths, kernels):
    """Lists, sums and walk of two layers of a prompt, and of two layers for its last token."""
    rng = np.random.default_rng(3)
    lengths = jnp.asarray(lengths, jnp.int32)
    batch, tokens = len(lengths), BLOCKS * SIZE
    valid = jnp.arange(tokens, dtype=jnp.int32)[None, :] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    shape = LayerShape(4, 2, 128)
    prompt, token = init_walk(batch, tokens, config=config), None
    found = []
    for layer in range(2):
        query, key = (
            jnp.asarray(2 * rng.standard_normal((batch, BLOCKS, 1, n, 128)), jnp.bfloat16)
            + jnp.asarray(rng.standard_normal((batch, BLOCKS, SIZE, n, 128)), jnp.bfloat16)
            for n in (4, 2)
        )
        query, key = (x.reshape(batch, tokens, -1, 128) for x in (query, key))
        sums = config.init_statistics(shape, batch=batch, num_blocks=BLOCKS)
        options = {"layer": jnp.asarray(layer, jnp.int32), "kernels": kernels}
        sums = config.observe(query, key, sums, span=span, kernels=kernels)
        lists, prompt = config.select(query, key[None], sums, prompt, span=span, **options)
        if token is None:
            empty = jnp.zeros((batch, 1, BLOCKS), jnp.float32)
            token = dataclasses.replace(prompt, scores=empty, layers=jnp.zeros((), jnp.int32))
        last = query[jnp.arange(batch), lengths - 1][:, None]
        own = Span.of_tokens(lengths - 1, SIZE)
        one, token = config.select(last, key[None], sums, token, span=own, **options)
        found.append((lists, one, sums, prompt.scores, token.scores))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_lists_sums_and_walk_are_the_same(name):
    config, lengths = CONFIGS[name], (BLOCKS * SIZE, 5 * SIZE + 3)
    pairs = zip(run(config, lengths, KERNELS), run(config, lengths, None), strict=True)
    for (lists, one, *states), (wanted_lists, wanted_one, *wanted_states) in pairs:
        for actual, wanted in ((lists, wanted_lists), (one, wanted_one)):
            np.testing.assert_array_equal(actual.counts, wanted.counts)
            np.testing.assert_array_equal(actual.ids, wanted.ids)
        sums, wanted_sums = states.pop(0), wanted_states.pop(0)
        for actual, wanted in zip(*map(jax.tree.leaves, (sums, wanted_sums)), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-4)
        for actual, wanted in zip(states, wanted_states, strict=True):
            scale = np.abs(wanted).max(-1, keepdims=True)
            scale = np.where(scale == 0, 1, scale)
            # Powers of scores: relative errors grow with the exponent.
            close = tolerance("scores")["atol"] * 2 * config.exponent
            np.testing.assert_allclose(actual / scale, wanted / scale, rtol=0, atol=close)


@pytest.mark.parametrize(
    ("is_hopper", "interpret", "asked", "expected"),
    [
        (True, False, None, True),
        (True, False, "xla", False),
        (True, False, "mosaic_gpu", True),
        (False, False, None, False),
        (False, False, "mosaic_gpu", False),
        (False, True, "mosaic_gpu", True),
        (False, True, None, False),
        (True, True, None, False),
    ],
)
def test_selection_follows_what_is_asked_of_attention(
    is_hopper, interpret, asked, expected, monkeypatch
):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: is_hopper)
    config = KernelConfig(interpret=interpret)
    assert dispatch.selection_kernels(asked, config) == (config if expected else None)


class Asked(SketchWalkConfig):
    """Remembers what it was told to run."""

    seen = []

    def observe(self, *arrays, kernels=None, **options):
        self.seen.append(kernels)
        return super().observe(*arrays, **options)

    def select(self, *arrays, kernels=None, **options):
        self.seen.append(kernels)
        return super().select(*arrays, **options)


@pytest.mark.unchecked  # of what stands in for a configuration
@pytest.mark.parametrize("implementation", ["xla", None])
def test_what_is_asked_reaches_the_policy(implementation, monkeypatch):
    monkeypatch.setattr("sketchwalk_jax.layer.selection_kernels", lambda *asked: asked)
    monkeypatch.setattr("sketchwalk_jax.cached_layer.selection_kernels", lambda *asked: asked)
    config, sizes = Asked.paper(block_size=SIZE), KernelConfig(row_tile=2)
    asked = {"implementation": implementation, "kernel_config": sizes}
    x = jnp.ones((1, 32, 2, 16), jnp.float32)
    Asked.seen = []
    sketchwalk_attention(x, x, x, init_walk(1, 32, config=config), config=config, **asked)
    options = {"model_config": tiny.MODEL, "config": config, "max_new_tokens": 1} | asked
    generate(tiny.params(), tiny.prompts(20)[0], **options)
    assert len(Asked.seen) == 6 and set(Asked.seen) == {(implementation, sizes)}
