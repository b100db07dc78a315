"""The policy through the selection kernels gives the lists that it gives without them.

In Pallas' interpreter, or on a machine with a Hopper GPU:
`JAX_PLATFORMS=cuda python -m pytest tests/test_kernel_selection.py`
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tolerances import tolerance
from variants import INTERPRET, slow_unless

from sketchwalk_jax import (
    KernelConfig,
    SketchWalkConfig,
    dispatch,
    generate,
    init_walk,
    sketchwalk_attention,
)
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.walk import WalkState

pytestmark = pytest.mark.interpreted

SIZE, BLOCKS = 16, 7
BAD = 3 * SIZE + 5  # a token
CONFIGS = {
    "paper": SketchWalkConfig.paper(block_size=SIZE, density=0.4),
    "damped": SketchWalkConfig.damped(block_size=SIZE, density=0.4),
    "one hop of powers": SketchWalkConfig.paper(block_size=SIZE, density=0.4, beta=0.0),
    "relu": SketchWalkConfig.paper(block_size=SIZE, density=0.3, transition="relu_power"),
}


KERNELS = KernelConfig(interpret=INTERPRET)


@functools.partial(jax.jit, static_argnames=("config", "kernel_config"))
def select_layer(query, key, span, walk, layer, *, config, kernel_config):
    """A layer's sums of a prompt, its lists and its walk."""
    shape = LayerShape(4, 2, 128)
    sums = config.init_statistics(shape, batch=len(query), num_blocks=BLOCKS)
    sums = config.observe(query, key, sums, span=span, kernel_config=kernel_config)
    options = {"layer": layer, "span": span, "kernel_config": kernel_config}
    lists, walk = config.select(query, key[None], sums, walk, **options)
    return lists, walk, sums


@functools.partial(jax.jit, static_argnames=("config", "kernel_config"))
def select_token(query, key, span, sums, walk, layer, *, config, kernel_config):
    """A layer's list and walk of one token."""
    options = {"layer": layer, "span": span, "kernel_config": kernel_config}
    return config.select(query, key[None], sums, walk, **options)


def run(config, lengths, kernel_config, bad=None):
    """Lists, sums and walk of two layers of a prompt, and of two layers for its last token.

    A token of the first sequence has a `bad` key.
    """
    rng = np.random.default_rng(3)
    lengths = jnp.asarray(lengths, jnp.int32)
    batch, tokens = len(lengths), BLOCKS * SIZE
    valid = jnp.arange(tokens, dtype=jnp.int32)[None, :] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    prompt = init_walk(batch, tokens, policy=config)
    token = WalkState.zeros(batch, 1, BLOCKS)
    found = []
    for layer in range(2):
        query, key = (
            2 * rng.standard_normal((batch, BLOCKS, 1, n, 128))
            + rng.standard_normal((batch, BLOCKS, SIZE, n, 128))
            for n in (4, 2)
        )
        query, key = (
            jnp.asarray(x.reshape(batch, tokens, -1, 128), jnp.bfloat16) for x in (query, key)
        )
        if bad is not None:
            key = key.at[0, BAD].set(bad)
        index, options = (
            jnp.asarray(layer, jnp.int32),
            {"config": config, "kernel_config": kernel_config},
        )
        lists, prompt, sums = select_layer(query, key, span, prompt, index, **options)
        last = query[jnp.arange(batch), lengths - 1][:, None]
        own = Span.of_tokens(lengths - 1, SIZE)
        one, token = select_token(last, key, own, sums, token, index, **options)
        found.append((lists, one, sums, prompt.scores, token.scores))
    return found


@pytest.mark.parametrize("name", slow_unless("paper".__eq__, CONFIGS))
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


@pytest.mark.parametrize("name", slow_unless("paper".__eq__, CONFIGS))
def test_a_bad_key_reaches_no_earlier_row_and_lists_keep_their_forced_blocks(name):
    """In prompts as on XLA; a decoded token keeps its forced blocks, and ranks others as it may."""
    config, lengths = CONFIGS[name], (BLOCKS * SIZE, 5 * SIZE + 3)
    plain = run(config, lengths, KERNELS)
    found, wanted = (run(config, lengths, x, bad=np.nan) for x in (KERNELS, None))
    for (lists, one, _, state, _), (xla_lists, *_), (clean_lists, clean_one, _, clean, _) in zip(
        found, wanted, plain, strict=True
    ):
        np.testing.assert_array_equal(lists.ids, xla_lists.ids)
        upto = BAD // SIZE
        np.testing.assert_array_equal(state[0, :upto], clean[0, :upto])
        np.testing.assert_array_equal(lists.ids[0, 0, :upto], clean_lists.ids[0, 0, :upto])
        np.testing.assert_array_equal(lists.ids[1], clean_lists.ids[1])
        np.testing.assert_array_equal(one.ids[1], clean_one.ids[1])
        np.testing.assert_array_equal(one.counts, clean_one.counts)
        assert np.isfinite(state).all()
        kept = one.ids[0, 0, 0, : int(one.counts[0, 0, 0])].tolist()
        assert kept == sorted(set(kept)) and {0, BLOCKS - 1} <= set(kept)
        assert kept[-1] == BLOCKS - 1


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
    kernel_config = KernelConfig(interpret=interpret)
    found = dispatch.selection_kernels(asked, kernel_config)
    assert found == (kernel_config if expected else None)


class Asked(SketchWalkConfig):
    """Remembers what it was told to run."""

    seen = []

    def observe(self, *arrays, kernel_config=None, **options):
        self.seen.append(kernel_config)
        return super().observe(*arrays, **options)

    def select(self, *arrays, kernel_config=None, **options):
        self.seen.append(kernel_config)
        return super().select(*arrays, **options)


@pytest.mark.unchecked  # of what stands in for a configuration
@pytest.mark.parametrize("implementation", ["xla", None])
def test_what_is_asked_reaches_the_policy(implementation, monkeypatch):
    jax.clear_caches()  # the policy is seen while the call is traced
    asked, answer = [], KernelConfig(row_tile=3)

    def selection_kernels(*arguments, what="selection"):
        asked.append((*arguments, what))
        return answer

    for module in ("layer", "cached_layer"):
        monkeypatch.setattr(f"sketchwalk_jax.{module}.selection_kernels", selection_kernels)
    config, sizes = Asked.paper(block_size=SIZE), KernelConfig(row_tile=2)
    options = {"implementation": implementation, "kernel_config": sizes}
    x = jnp.ones((1, 32, 2, 16), jnp.float32)
    Asked.seen = []
    attend = functools.partial(sketchwalk_attention, policy=config, **options)
    jax.eval_shape(attend, x, x, x, init_walk(1, 32, policy=config))
    options |= {"model_config": tiny.MODEL, "policy": config, "max_new_tokens": 1}
    run = functools.partial(generate, **options)
    jax.eval_shape(run, jax.eval_shape(tiny.params), jnp.asarray(tiny.prompts(20)[0]))
    assert set(asked) == {(implementation, sizes, "selection")}
    assert len(Asked.seen) == 6 and set(Asked.seen) == {answer}
