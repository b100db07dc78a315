"""The one-layer function refuses arguments that do not fit, with clear messages."""

import jax.numpy as jnp
import pytest

from sketchwalk_jax import SketchWalkConfig, init_walk, sketchwalk_attention

CONFIG = SketchWalkConfig.paper(block_size=16)
GOOD = {"query": (2, 40, 4, 32), "key": (2, 40, 2, 32), "value": (2, 40, 2, 32)}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (2, 40, 128)}, r"query must have shape \[B, T, N, H\]"),
        ({"value": (2, 40, 1, 32)}, "key and value must have one shape"),
        ({"query": (2, 40, 3, 32)}, "must be a multiple of the key/value heads 2"),
        ({"query": (2, 40, 4, 16)}, "key must have query's head_dim 16"),
        ({"query": (2, 30, 4, 32)}, "key must have as many tokens as query, 30, got 40"),
    ],
)
def test_arrays_that_do_not_fit_raise(change, message):
    arrays = [jnp.ones(shape) for shape in (GOOD | change).values()]
    with pytest.raises(ValueError, match=message):
        sketchwalk_attention(*arrays, init_walk(2, 40, policy=CONFIG), policy=CONFIG)


@pytest.mark.unchecked
def test_lengths_and_walks_of_other_batches_raise():
    arrays = [jnp.ones(shape) for shape in GOOD.values()]
    walk = init_walk(2, 40, policy=CONFIG)
    with pytest.raises(ValueError, match="lengths must have shape"):
        sketchwalk_attention(*arrays, walk, policy=CONFIG, lengths=jnp.array([40]))
    with pytest.raises(ValueError, match="walk must have scores of shape"):
        sketchwalk_attention(*arrays, init_walk(2, 80, policy=CONFIG), policy=CONFIG)
