"""The kernel after the walk's product, interpreted, does what the equations say, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.pallas_kernels.select_prompt import select_prompt_kernel
from sketchwalk_jax.pallas_kernels.selection import MAX_PROMPT_BLOCKS
from sketchwalk_jax.selection import block_budget, select_blocks

pytestmark = pytest.mark.interpreted


def rescaled(rows: np.ndarray) -> np.ndarray:
    """Rows whose largest entries are in `[1, 2) · 2^100`; what is below 2^-126 is zero."""
    _, exponent = np.frexp(np.abs(rows).max(-1, keepdims=True).astype(np.float64))
    moved = np.ldexp(rows.astype(np.float64), 101 - exponent)
    return np.where(np.abs(moved) < 2.0**-126, 0.0, moved).astype(np.float32)


def wide(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers over most of the range of float32, of both signs, among them zeros."""
    values = rng.choice([-1.0, 0.0, 1.0, 1.0], shape) * np.exp2(rng.uniform(-120, 110, shape))
    return values.astype(np.float32)


@pytest.mark.parametrize(
    ("num_blocks", "num_rows", "first", "parts"),
    [(5, 5, (0, 0), 1), (157, 20, (137, 30), 1), (256, 12, (250, 0), 4)],
)
@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("tail", [None, 70])
def test_rows_and_lists_equal_the_reference(
    num_blocks: int,
    num_rows: int,
    first: tuple[int, int],
    parts: int,
    layers: int,
    tail: int | None,
) -> None:
    rng = np.random.default_rng(num_blocks + layers)
    size, batch = 16, len(first)
    first_block = np.int32(first)
    rows = first_block[:, None] + np.arange(num_rows, dtype=np.int32)
    known = np.minimum(rows, num_blocks - 1)
    causal = np.arange(num_blocks) <= np.arange(num_blocks)[:, None]
    weights, scores = (
        np.where(causal, wide(rng, (batch, num_blocks, num_blocks)), np.float32(0))
        for _ in range(2)
    )
    product = wide(rng, (batch, num_rows, num_blocks))
    product[:, 0] = 0.0
    product[:, 1] = -np.abs(product[:, 1])  # neither row has a positive entry
    product[:, 2, 1:] = 2.0**-120  # far below the first one
    product[:, 2, 0] = -(2.0**110)
    weights[:, 1] = 0.0
    # Parts whose sum is exact in any order.
    shares = rng.integers(0, parts, (1, *product.shape))
    split = np.where(np.arange(parts)[:, None, None, None] == shares, product, 0.0)
    budget = block_budget(num_blocks, density=0.3, sink_blocks=1, local_blocks=2)
    tail_start = None if tail is None else (first_block + 3) * size + tail
    selection, state, walked = select_prompt_kernel(
        *map(jnp.asarray, (split.astype(np.float32), weights, scores, first_block)),
        None if tail_start is None else jnp.asarray(tail_start),
        jnp.int32(layers),
        budget,
        sink_blocks=1,
        local_blocks=2,
        block_size=size,
        interpret=True,
    )
    sequence = np.arange(batch)[:, None]
    wanted = rescaled(product if layers else weights[sequence, known])
    np.testing.assert_array_equal(state, wanted)
    assert walked == layers + 1
    counts = budget[known]
    if tail_start is not None:
        in_tail = (rows + 1) * size > tail_start[:, None]
        counts = np.where(in_tail, np.minimum(rows + 1, num_blocks), counts)
    is_empty = wanted.max(-1, keepdims=True) <= 0
    lists = select_blocks(
        jnp.asarray(np.where(is_empty, scores[sequence, known], wanted)),
        jnp.asarray(rows),
        jnp.asarray(counts),
        sink_blocks=1,
        local_blocks=2,
        max_count=num_blocks if tail is not None else int(budget[-1]),
        block_size=size,
    )
    np.testing.assert_array_equal(selection.counts, lists.counts)
    np.testing.assert_array_equal(selection.ids, lists.ids)


def test_rows_that_do_not_fit_are_refused() -> None:
    num_blocks = MAX_PROMPT_BLOCKS + 1
    square = jax.ShapeDtypeStruct((1, num_blocks, num_blocks), jnp.float32)
    arrays = jax.ShapeDtypeStruct((1, *square.shape), jnp.float32), square, square
    select = functools.partial(
        select_prompt_kernel,
        first_block=jnp.zeros((1,), jnp.int32),
        tail_start=None,
        layers=jnp.int32(0),
        budget=np.ones(num_blocks, np.int32),
        sink_blocks=0,
        local_blocks=1,
    )
    with pytest.raises(ValueError, match="at most 8192 columns"):
        jax.eval_shape(select, *arrays)
