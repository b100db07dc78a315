"""The decoding kernels, interpreted, give the lists and the walk of Algorithm 2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.pallas_kernels.select_decode import select_token_kernel
from sketchwalk_jax.selection import BlockSelection, block_budget, select_blocks
from sketchwalk_jax.sketch import block_means, block_scores
from sketchwalk_jax.walk import WalkState, walk_step

pytestmark = pytest.mark.interpreted

BATCH, HEAD_DIM, BLOCK = 2, 64, 64


class Case:
    """One decoding step's inputs that stay the same from layer to layer."""

    def __init__(self, num_blocks: int, *, groups: int, sketch: int, transition: str, power: int):
        self.rng = np.random.default_rng(num_blocks + power)
        self.size = (BATCH, num_blocks, groups, sketch)
        self.rectify, self.power = transition == "relu_power", power
        first = max(0, num_blocks - 130) * BLOCK
        positions = self.rng.integers(first, num_blocks * BLOCK, BATCH)
        self.positions = jnp.asarray(positions, jnp.int32)
        self.rows = (self.positions // BLOCK)[:, None]
        budget = block_budget(num_blocks, density=0.2, sink_blocks=1)
        self.counts = jnp.asarray(budget)[self.rows]
        self.sizes = dict(
            sink_blocks=1, local_blocks=1, max_count=int(budget[-1]), block_size=BLOCK
        )

    def draw(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A token's query and the sums of queries and keys, NaN where no token has been."""
        query, key = (self.rng.normal(30.0, 64.0, self.size).astype(np.float32) for _ in range(2))
        for sequence, row in enumerate(np.asarray(self.rows)[:, 0]):
            query[sequence, row + 1 :] = key[sequence, row + 1 :] = np.nan
        token = self.rng.normal(0.5, 1.0, (BATCH, *self.size[2:]))
        return tuple(jnp.asarray(x, jnp.float32) for x in (token, query, key))

    def reference(
        self,
        token: jax.Array,
        query: jax.Array,
        key: jax.Array,
        walk: WalkState,
        beta: float | None,
    ) -> tuple[BlockSelection, WalkState]:
        is_row = jnp.arange(self.size[1], dtype=jnp.int32)[None] == self.rows
        lengths = self.positions + 1
        query, key = (block_means(jnp.nan_to_num(x), lengths, BLOCK) for x in (query, key))
        query = jnp.where(is_row[:, :, None, None], token[:, None], query)
        scores, walk = walk_step(
            walk,
            block_scores(query, key, HEAD_DIM),
            self.rows,
            transition="relu_power" if self.rectify else "power",
            exponent=self.power,
            walk_degree=1,
            beta=beta,
        )
        return select_blocks(scores, self.rows, self.counts, **self.sizes), walk

    def kernel(
        self,
        token: jax.Array,
        query: jax.Array,
        key: jax.Array,
        walk: WalkState,
        beta: float | None,
    ) -> tuple[BlockSelection, jax.Array]:
        return select_token_kernel(
            token,
            query,
            key,
            walk.scores,
            walk.layers,
            self.positions,
            self.counts,
            head_dim=HEAD_DIM,
            power=self.power,
            rectify=self.rectify,
            use_walk=beta is None,
            interpret=True,
            **self.sizes,
        )


@pytest.mark.parametrize(
    ("num_blocks", "groups", "sketch", "transition", "power"),
    [
        (5, 1, 32, "power", 8),
        (256, 1, 64, "power", 8),
        (300, 2, 32, "relu_power", 3),
        (130, 1, 32, "power", 1),
    ],
)
@pytest.mark.parametrize("beta", [None, 0.0])
def test_layers_of_a_step_equal_the_reference(
    num_blocks: int, groups: int, sketch: int, transition: str, power: int, beta: float | None
) -> None:
    case = Case(num_blocks, groups=groups, sketch=sketch, transition=transition, power=power)
    walk = WalkState(jnp.zeros((BATCH, 1, num_blocks)), jnp.int32(0))
    for _ in range(3):
        inputs = case.draw()
        want, after = jax.jit(case.reference, static_argnums=4)(*inputs, walk, beta)
        got, state, _ = case.kernel(*inputs, walk, beta)
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_array_equal(got.counts, want.counts)
        # A sum of signed terms is only as exact as its largest term.
        largest = np.abs(after.scores).max()
        np.testing.assert_allclose(state, after.scores, rtol=3e-5, atol=1e-6 * largest)
        walk = after


@pytest.mark.parametrize("blocks", [(0, 63), (64, 127), (128, 191)])
def test_rows_that_end_in_either_half_of_a_tile(blocks: tuple[int, int]) -> None:
    case = Case(256, groups=1, sketch=32, transition="power", power=8)
    case.rows = jnp.asarray(blocks, jnp.int32)[:, None]
    case.positions = case.rows[:, 0] * BLOCK + jnp.asarray([0, 40], jnp.int32)
    case.counts = jnp.asarray(block_budget(256, density=0.2, sink_blocks=1))[case.rows]
    walk = WalkState(jnp.zeros((BATCH, 1, 256)), jnp.int32(0))
    for _ in range(2):
        inputs = case.draw()
        want, after = case.reference(*inputs, walk, None)
        got, state, _ = case.kernel(*inputs, walk, None)
        np.testing.assert_array_equal(got.ids, want.ids)
        largest = np.abs(after.scores).max()
        np.testing.assert_allclose(state, after.scores, rtol=3e-5, atol=1e-6 * largest)
        walk = after


def test_a_row_without_positive_entries_selects_by_its_scores() -> None:
    case = Case(130, groups=1, sketch=32, transition="relu_power", power=8)
    token, query, key = case.draw()
    inputs = -jnp.abs(token), jnp.abs(query), jnp.abs(key)
    walk = WalkState(jnp.zeros((BATCH, 1, 130)), jnp.int32(0))
    want, _ = case.reference(*inputs, walk, None)
    got, state, _ = case.kernel(*inputs, walk, None)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(state, 0.0)


def test_sketches_that_do_not_fit_are_refused() -> None:
    case = Case(5, groups=1, sketch=24, transition="power", power=8)
    walk = WalkState(jnp.zeros((BATCH, 1, 5)), jnp.int32(0))
    with pytest.raises(ValueError, match="multiple of 32 long"):
        case.kernel(*case.draw(), walk, None)
