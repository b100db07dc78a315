"""The decoding kernels, interpreted, give the lists and the walk of Algorithm 2."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import slow_unless

from sketchwalk_jax.pallas_kernels import walk_row
from sketchwalk_jax.pallas_kernels.select_decode import select_token_kernel
from sketchwalk_jax.selection import BlockSelection, block_budget, select_blocks
from sketchwalk_jax.sketch import block_means, block_scores
from sketchwalk_jax.walk import WalkState, walk_step

pytestmark = pytest.mark.interpreted

BATCH, HEAD_DIM, BLOCK = 2, 64, 64
Result = tuple[BlockSelection, jax.Array]  # lists, and the walk's next row


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static about a decoding step, and what runs it, compiled once."""

    num_blocks: int
    groups: int = 1
    sketch: int = 32
    transition: str = "power"
    power: int = 8
    beta: float | None = None

    @property
    def budget(self) -> np.ndarray:
        return block_budget(self.num_blocks, density=0.2, sink_blocks=1)

    @property
    def sizes(self) -> dict[str, int]:
        max_count = int(self.budget[-1])
        return dict(sink_blocks=1, local_blocks=1, max_count=max_count, block_size=BLOCK)

    def reference(self, token, query, key, walk, positions, counts) -> Result:
        rows = (positions // BLOCK)[:, None]
        is_row = jnp.arange(self.num_blocks, dtype=jnp.int32)[None] == rows
        query, key = (block_means(jnp.nan_to_num(x), positions + 1, BLOCK) for x in (query, key))
        query = jnp.where(is_row[:, :, None, None], token[:, None], query)
        scores, walk = walk_step(
            walk,
            block_scores(query, key, HEAD_DIM),
            rows,
            transition=self.transition,
            exponent=self.power,
            walk_degree=1,
            beta=self.beta,
        )
        return select_blocks(scores, rows, counts, **self.sizes), walk.scores

    def kernel(self, token, query, key, walk, positions, counts) -> Result:
        return select_token_kernel(
            token,
            query,
            key,
            walk.scores,
            walk.layers,
            positions,
            counts,
            head_dim=HEAD_DIM,
            power=self.power,
            rectify=self.transition == "relu_power",
            use_walk=self.beta is None,
            interpret=True,
            **self.sizes,
        )[:2]

    @functools.cached_property
    def both(self):
        """The kernel and the reference, for every layer and place."""
        return jax.jit(self.kernel), jax.jit(self.reference)


@functools.cache
def shape(*arguments: object) -> Shape:
    return Shape(*arguments)


class Step:
    """One decoding step's inputs that stay the same from layer to layer."""

    def __init__(self, shape: Shape, positions: list[int] | None = None):
        self.shape, self.rng = shape, np.random.default_rng(shape.num_blocks + shape.power)
        if positions is None:
            first = max(0, shape.num_blocks - 130) * BLOCK
            positions = self.rng.integers(first, shape.num_blocks * BLOCK, BATCH)
        self.rows = np.asarray(positions)[:, None] // BLOCK
        self.places = jnp.asarray(positions, jnp.int32), jnp.asarray(shape.budget[self.rows])

    def draw(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A token's sketch and the sums of queries and keys, NaN where no token has been."""
        sketch = (self.shape.groups, self.shape.sketch)
        size = (BATCH, self.shape.num_blocks, *sketch)
        query, key = (self.rng.normal(30.0, 64.0, size).astype(np.float32) for _ in range(2))
        for sequence, row in enumerate(self.rows[:, 0]):
            query[sequence, row + 1 :] = key[sequence, row + 1 :] = np.nan
        token = self.rng.normal(0.5, 1.0, (BATCH, *sketch))
        return tuple(jnp.asarray(x, jnp.float32) for x in (token, query, key))

    def empty(self) -> WalkState:
        return WalkState(jnp.zeros((BATCH, 1, self.shape.num_blocks)), jnp.int32(0))

    def assert_layers_equal(self, num_layers: int) -> None:
        walk = self.empty()
        for layer in range(num_layers):
            inputs = self.draw()
            (got, state), (want, after) = (
                run(*inputs, walk, *self.places) for run in self.shape.both
            )
            np.testing.assert_array_equal(got.ids, want.ids)
            np.testing.assert_array_equal(got.counts, want.counts)
            # A sum of signed terms is only as exact as its largest term.
            largest = np.abs(after).max()
            np.testing.assert_allclose(state, after, rtol=3e-5, atol=1e-6 * largest)
            walk = WalkState(after, jnp.int32(layer + 1))


WIDE = (300, 2, 32, "relu_power", 3)
TILED = (256, 1, 64, "power", 8)


@pytest.mark.parametrize(
    "arguments",
    slow_unless(lambda x: x in ((5,), TILED), [(5,), TILED, WIDE, (130, 1, 32, "power", 1)]),
    ids=str,
)
@pytest.mark.parametrize("beta", slow_unless(lambda x: x is None, [None, 0.0]))
def test_layers_of_a_step_equal_the_reference(arguments: tuple, beta: float | None) -> None:
    size = arguments if beta is None else (*dataclasses.astuple(Shape(*arguments))[:-1], beta)
    Step(shape(*size)).assert_layers_equal(3)


@pytest.mark.parametrize("rows", [(0, 63), (64, 127), (128, 191)])
def test_rows_that_end_in_either_half_of_a_tile(rows: tuple[int, int]) -> None:
    positions = [rows[0] * BLOCK, rows[1] * BLOCK + 40]
    Step(shape(*TILED), positions).assert_layers_equal(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    slow_unless(lambda x: x == (300,), [(300,), (500, 3, 32, "relu_power", 5)]),
    ids=str,
)
def test_more_tiles_than_parts(arguments: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 2048 blocks programs go through several tiles each; here above 256."""
    monkeypatch.setattr(walk_row, "MAX_SPLITS", 2)
    Step(Shape(*arguments)).assert_layers_equal(2)


@pytest.mark.slow
def test_a_row_without_positive_entries_selects_by_its_scores() -> None:
    step = Step(shape(*WIDE))
    token, query, key = step.draw()
    inputs = -jnp.abs(token), jnp.abs(query), jnp.abs(key)
    (got, state), (want, _) = (run(*inputs, step.empty(), *step.places) for run in step.shape.both)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(state, 0.0)


def test_sketches_that_do_not_fit_are_refused() -> None:
    step = Step(Shape(5, 1, 24))
    with pytest.raises(ValueError, match="multiple of 32 long"):
        step.shape.kernel(*step.draw(), step.empty(), *step.places)
