"""The kernels around the walk's product, interpreted, do what the equations say, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.pallas_kernels.config import MAX_PROMPT_BLOCKS
from sketchwalk_jax.pallas_kernels.select_prompt import select_prompt_kernel, walk_operands_kernel
from sketchwalk_jax.scaled import product_exponent
from sketchwalk_jax.selection import block_budget, select_blocks
from sketchwalk_jax.walk import causal_mask, power_transition, row_maxima

pytestmark = pytest.mark.interpreted


def moved(state: np.ndarray, log2_scale: np.ndarray, top: int) -> np.ndarray:
    """Rows times powers of two, the largest entry in `[1, 2) · 2^top`, tiny ones zero."""
    exponent = np.where(state == 0, -(1 << 24), np.frexp(state)[1] - 1 + log2_scale[:, None])
    shift = log2_scale[:, None] - exponent.max(-1, keepdims=True) + top
    rows = np.ldexp(state.astype(np.float64), np.where(state == 0, 0, shift))
    return np.where(np.abs(rows) < 2.0**-126, 0.0, rows).astype(np.float32)


# Fewer rows than blocks, as many and more; rows that fill registers and rows that are padded.
@pytest.mark.parametrize(
    ("batch", "num_blocks", "num_rows"),
    [(2, 5, 5), (1, 140, 20), pytest.param(1, 128, 130, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("power", "rectify"), [(8, False), (3, True)])
def test_operands_equal_the_reference(
    batch: int, num_blocks: int, num_rows: int, power: int, rectify: bool
) -> None:
    rng = np.random.default_rng(num_blocks)
    shape = (batch, num_blocks, num_blocks)
    scores = rng.normal(size=shape) * np.exp2(rng.uniform(-30, 30, (batch, num_blocks, 1)))
    scores[0, 2, :] = 0.0
    scores[-1, 3, :] = -1.0
    scores[0, 4, [0, 2, 3]] = np.nan, np.inf, -np.inf
    causal = np.tril(np.ones(shape[1:], bool))
    scores[:, ~causal] = np.nan  # what lies above the diagonal never matters
    scores = jnp.asarray(scores, jnp.float32)
    state = rng.choice([-1.0, 0.0, 1.0, 1.0], (batch, num_rows, num_blocks))
    state *= np.exp2(rng.uniform(-120, 100, state.shape))
    state[:, 1] = 0.0
    state = state.astype(np.float32)
    maxima = jax.jit(row_maxima, static_argnames="rectify")
    options = {"rectify": rectify, "interpret": True}
    weights, left = walk_operands_kernel(
        scores, maxima(scores, rectify=rectify), jnp.asarray(state), power=power, **options
    )
    transition = jax.jit(power_transition, static_argnames=("exponent", "rectify"))
    causal = causal_mask(num_blocks)
    wanted, log2_scale = transition(scores, causal, exponent=power, rectify=rectify)
    np.testing.assert_array_equal(weights, wanted)
    wanted = moved(state, np.asarray(log2_scale), product_exponent(power))
    np.testing.assert_array_equal(left, wanted)


def rescaled(rows: np.ndarray) -> np.ndarray:
    """Rows whose largest entries are in `[1, 2) · 2^100`; what is below 2^-126 is zero."""
    _, exponent = np.frexp(np.abs(rows).max(-1, keepdims=True).astype(np.float64))
    moved = np.ldexp(rows.astype(np.float64), 101 - exponent)
    return np.where(np.abs(moved) < 2.0**-126, 0.0, moved).astype(np.float32)


def wide(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers over most of the range of float32, of both signs, among them zeros."""
    values = rng.choice([-1.0, 0.0, 1.0, 1.0], shape) * np.exp2(rng.uniform(-120, 110, shape))
    return values.astype(np.float32)


SIZE = 16
SIZES = {"sink_blocks": 1, "local_blocks": 2, "block_size": SIZE}


@functools.cache
def budget_of(num_blocks: int) -> np.ndarray:
    return block_budget(num_blocks, density=0.3, sink_blocks=1, local_blocks=2)


@functools.cache
def compiled(num_blocks: int):
    """The kernel for one number of blocks, for every layer and place."""

    def select(product, weights, scores, first_block, layers):
        arrays = (product, weights, scores, first_block, layers, budget_of(num_blocks))
        return select_prompt_kernel(*arrays, **SIZES, interpret=True)

    return jax.jit(select)


@functools.cache
def compiled_reference(max_count: int):
    return jax.jit(functools.partial(select_blocks, **SIZES, max_count=max_count))


# All rows, last rows, and rows beyond the cache beside first ones.
@pytest.mark.parametrize(
    "shape", [(5, 5, (0, 0), 1), (157, 10, (147, 30), 1), (256, 10, (250, 0), 4)]
)
@pytest.mark.parametrize("layers", [0, 1])
def test_rows_and_lists_equal_the_reference(
    shape: tuple[int, int, tuple[int, int], int], layers: int
) -> None:
    num_blocks, num_rows, first, parts = shape
    rng = np.random.default_rng(num_blocks + layers)
    batch, budget = len(first), budget_of(num_blocks)
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
    arrays = (split.astype(np.float32), weights, scores, first_block)
    selection, state, walked = compiled(num_blocks)(*map(jnp.asarray, arrays), jnp.int32(layers))
    sequence = np.arange(batch)[:, None]
    wanted = rescaled(product if layers else weights[sequence, known])
    np.testing.assert_array_equal(state, wanted)
    assert walked == layers + 1
    is_empty = wanted.max(-1, keepdims=True) <= 0
    lists = compiled_reference(int(budget[-1]))(
        jnp.asarray(np.where(is_empty, scores[sequence, known], wanted)),
        jnp.asarray(rows),
        jnp.asarray(budget[known]),
    )
    np.testing.assert_array_equal(selection.counts, lists.counts)
    np.testing.assert_array_equal(selection.ids, lists.ids)


def test_operands_that_do_not_fit_are_refused() -> None:
    num_blocks = MAX_PROMPT_BLOCKS + 1

    def operands(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return walk_operands_kernel(*arrays, power=8, rectify=False)

    square = jax.ShapeDtypeStruct((1, num_blocks, num_blocks), jnp.float32)
    largest = jax.ShapeDtypeStruct((1, num_blocks), jnp.float32)
    with pytest.raises(ValueError, match="at most 8192 columns"):
        jax.eval_shape(operands, square, largest, square)


def test_rows_that_do_not_fit_are_refused() -> None:
    num_blocks = MAX_PROMPT_BLOCKS + 1
    square = jax.ShapeDtypeStruct((1, num_blocks, num_blocks), jnp.float32)
    arrays = jax.ShapeDtypeStruct((1, *square.shape), jnp.float32), square, square
    select = functools.partial(
        select_prompt_kernel,
        first_block=jnp.zeros((1,), jnp.int32),
        layers=jnp.int32(0),
        budget=np.ones(num_blocks, np.int32),
        sink_blocks=0,
        local_blocks=1,
    )
    with pytest.raises(ValueError, match="at most 8192 columns"):
        jax.eval_shape(select, *arrays)
