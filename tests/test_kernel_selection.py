"""The policy through the selection kernels gives the lists that it gives without them.

In Pallas' interpreter, or on a machine with a Hopper GPU:
`JAX_PLATFORMS=cuda python -m pytest tests/test_kernel_selection.py`
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance

from sketchwalk_jax import SketchWalkConfig, init_walk, sketchwalk_attention
from sketchwalk_jax.pallas_kernels import dispatch
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


def run(config, lengths, *, use_kernels, monkeypatch):
    """Lists, sums and walk of two layers of a prompt, and of two layers for its last token."""
    monkeypatch.setattr(dispatch, "selects_with_kernels", lambda: use_kernels)
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
        sums = config.observe(query, key, sums, span=span)
        index = jnp.asarray(layer, jnp.int32)
        lists, prompt = config.select_prefill(
            query, key[None], sums, prompt, layer=index, span=span
        )
        if token is None:
            empty = jnp.zeros((batch, 1, BLOCKS), jnp.float32)
            token = dataclasses.replace(prompt, scores=empty, layers=jnp.zeros((), jnp.int32))
        last = query[jnp.arange(batch), lengths - 1][:, None]
        one, token = config.select_decode(
            last, key[None], sums, token, layer=index, positions=lengths - 1
        )
        found.append((lists, one, sums, prompt.scores, token.scores))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_lists_sums_and_walk_are_the_same(name, monkeypatch):
    config, lengths = CONFIGS[name], (BLOCKS * SIZE, 5 * SIZE + 3)
    options = {"monkeypatch": monkeypatch}
    pairs = zip(
        run(config, lengths, use_kernels=True, **options),
        run(config, lengths, use_kernels=False, **options),
        strict=True,
    )
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
    ("is_hopper", "asked", "expected"),
    [
        (True, None, True),
        (True, "xla", False),
        (True, "mosaic_gpu", True),
        (False, None, False),
        (False, "mosaic_gpu", False),
    ],
)
def test_selection_follows_what_is_asked_of_attention(is_hopper, asked, expected, monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: is_hopper)
    with dispatch.selecting_with("xla"):
        with dispatch.selecting_with(asked):
            assert dispatch.selects_with_kernels() == expected
        assert not dispatch.selects_with_kernels()


def test_what_is_asked_reaches_the_policy(monkeypatch):
    asked = []
    monkeypatch.setattr(
        dispatch, "selects_with_kernels", lambda: asked.append(dispatch._asked_for.get())
    )
    x = jnp.ones((1, 32, 2, 16), jnp.float32)
    config = CONFIGS["paper"]
    walk = init_walk(1, 32, config=config)
    sketchwalk_attention(x, x, x, walk, config=config, implementation="xla")
    assert len(asked) >= 2 and set(asked) == {"xla"}
