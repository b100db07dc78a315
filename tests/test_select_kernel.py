"""The selection kernel, interpreted, gives the lists of `select_blocks` for the same scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels.config import MAX_BLOCKS
from sketchwalk_jax.pallas_kernels.select import ordered_keys, select_blocks_kernel
from sketchwalk_jax.selection import block_budget, select_blocks

pytestmark = pytest.mark.interpreted


def _scores(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(sum(map(ord, kind)))
    match kind:
        case "normal":
            return rng.normal(size=shape).astype(np.float32)
        case "wide":  # what the walk leaves: powers over most of the range of float32
            return np.exp2(rng.uniform(-120, 100, shape)).astype(np.float32)
        case "few":  # many ties, zeros of both signs among them
            return rng.choice(np.float32([-2.0, -0.0, 0.0, 1.0]), shape)
        case "equal":
            return np.full(shape, -3.5, np.float32)
        case "adjacent":  # neighbours in the last bit
            return (1.0 + rng.integers(0, 8, shape) * 2.0**-23).astype(np.float32)
        case "extreme":
            return rng.choice(np.float32([3.4028235e38, -3.4028235e38, 1.2e-38, -1.2e-38]), shape)
        case "not finite":  # and few that are; NaN of both signs
            return rng.choice(np.float32([np.nan, -np.nan, np.inf, -np.inf, -3.0, 2.0]), shape)
        case "nan":
            return np.full(shape, np.nan, np.float32)
    raise AssertionError(kind)


@functools.cache
def _compiled(sinks: int, local: int, max_count: int):
    """The kernel and the reference, for scores of any shape."""
    sizes = dict(sink_blocks=sinks, local_blocks=local, max_count=max_count, block_size=64)
    kernel = functools.partial(select_blocks_kernel, interpret=True, **sizes)
    return jax.jit(kernel), jax.jit(functools.partial(select_blocks, **sizes))


def _assert_equal(
    scores: np.ndarray, rows: np.ndarray, counts: np.ndarray, *, sinks: int = 1, local: int = 1
) -> None:
    arguments = (jnp.asarray(scores), jnp.asarray(rows), jnp.asarray(counts))
    kernel, reference = _compiled(sinks, local, max(int(counts.max()), 1))
    got, want = kernel(*arguments), reference(*arguments)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.counts, want.counts)


def _some_rows(num_blocks: int, *, density: float, sinks: int, local: int) -> tuple[Array, ...]:
    rows = np.unique([0, 1, num_blocks // 3, num_blocks // 2, num_blocks - 2, num_blocks - 1])
    rows = rows[(rows >= 0) & (rows < num_blocks)].astype(np.int32)
    budget = block_budget(num_blocks, density=density, sink_blocks=sinks, local_blocks=local)
    return np.stack([rows, rows[::-1]]), np.stack([budget[rows], budget[rows[::-1]]])


@pytest.mark.parametrize("num_blocks", [1, 5, 128, 157, 512])
@pytest.mark.parametrize(
    "kind", ["normal", "wide", "few", "equal", "adjacent", "extreme", "not finite", "nan"]
)
def test_lists_equal_the_reference(kind: str, num_blocks: int) -> None:
    rows, counts = _some_rows(num_blocks, density=0.2, sinks=1, local=1)
    _assert_equal(_scores(kind, (*rows.shape, num_blocks)), rows, counts)


@pytest.mark.parametrize(
    ("density", "sinks", "local"), [(0.1, 0, 1), (0.35, 2, 3), (1.0, 1, 1), (0.01, 4, 2)]
)
def test_budgets_and_forced_blocks(density: float, sinks: int, local: int) -> None:
    rows, counts = _some_rows(260, density=density, sinks=sinks, local=local)
    scores = _scores("few", (*rows.shape, 260))
    _assert_equal(scores, rows, counts, sinks=sinks, local=local)


def test_one_row_of_a_long_context() -> None:
    rows, counts = np.int32([[4095], [4000]]), np.int32([[410], [4001]])
    _assert_equal(_scores("wide", (2, 1, 4096)), rows, counts)


def test_empty_lists_and_rows_beyond_the_cache() -> None:
    rows, counts = np.int32([[3, 200, 255, 300]]), np.int32([[0, 0, 12, 25]])
    _assert_equal(_scores("normal", (1, 4, 256)), rows, counts)


def test_every_count_of_a_row_with_ties() -> None:
    counts = np.arange(2, 42, dtype=np.int32)[None]
    rows = np.full_like(counts, 40)
    _assert_equal(np.tile(_scores("few", (1, 1, 50)), (1, 40, 1)), rows, counts)


def test_keys_have_the_order_of_the_scores() -> None:
    scores = np.float32([-np.inf, -3.4e38, -1e-38, -0.0, 0.0, 1e-38, 3.4e38])
    keys = np.asarray(ordered_keys(jnp.asarray(scores)))
    np.testing.assert_array_equal(np.diff(keys) > 0, np.diff(scores) > 0)
    assert keys[3] == keys[4] == 0
    others = np.float32([np.inf, np.nan, -np.nan])
    assert set(np.asarray(ordered_keys(jnp.asarray(others))).tolist()) == {int(keys[0])}


def test_rows_that_do_not_fit_are_refused() -> None:
    scores = jnp.zeros((1, 1, MAX_BLOCKS + 1))
    row = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="at most 16384 columns"):
        select_blocks_kernel(scores, row, row, sink_blocks=1, local_blocks=1, max_count=1)
