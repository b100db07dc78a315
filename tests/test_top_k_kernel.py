"""The kernel of top-k lists against the reference: interpreted, as compiled, or on a GPU.

On a machine with a Hopper GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_top_k_kernel.py`
"""

import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
import selection_cases
from test_kernels import CONFIG, ON_GPU, SEEDS, TIMES
from variants import slow_unless

CASES = selection_cases.CASES + (selection_cases.LARGE_CASES if ON_GPU else ())

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(
        jax.default_backend() != "cpu" and not ON_GPU,
        reason="the kernel needs a GPU of compute capability 9.0, or the interpreter a CPU",
    ),
]


def draw_scores(case, seed):
    """Draws scores, absolute rows and counts."""
    rng = np.random.default_rng(seed)
    shape = (len(case.rows), case.num_rows, case.num_blocks)
    if case.kind == "wide":
        bits = rng.integers(0, 2**32, shape, np.uint32)
        scores = np.nan_to_num(bits.view(np.float32), nan=0.0, posinf=1e38, neginf=-1e38)
        scores[rng.random(shape) < 0.1] = -0.0
    elif case.kind == "equal":
        scores = np.full(shape, 0.25, np.float32)
    else:
        scores = rng.standard_normal(shape, np.float32)
        scores = np.round(scores) if case.kind == "tied" else scores
    rows = np.array(case.rows)[:, None] + np.arange(case.num_rows)
    counts = case.budget[np.minimum(rows, case.num_blocks - 1)]
    return jnp.asarray(scores), jnp.asarray(rows, jnp.int32), jnp.asarray(counts, jnp.int32)


def expected_ids(case, arguments):
    """Computes lists `[B, I, P]` by sorting, padded with the number of blocks."""
    scores, rows, counts = map(np.asarray, arguments)
    sinks, local = case.forced
    wanted = np.full((*rows.shape, int(case.budget[-1])), case.num_blocks)
    for index in np.ndindex(*rows.shape):
        last, own = min(int(rows[index]), case.num_blocks - 1), scores[index]
        forced = {*range(sinks), *range(last - local + 1, last + 1)}
        ranked = sorted(
            range(last + 1), key=lambda x, own=own, forced=forced: (x not in forced, -own[x], x)
        )
        kept = sorted(ranked[: counts[index]])
        wanted[index][: len(kept)] = kept
    return wanted


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", slow_unless(lambda case: case.kind == "tied", CASES), ids=str)
def test_lists_equal_the_reference_exactly(case, seed, capfd):
    arguments = draw_scores(case, seed)
    function, shapes = case.program(kernel_config=CONFIG)
    assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, shapes)
    selection = kernel_draws.run(jax.jit(function), arguments, capfd, times=TIMES)
    np.testing.assert_array_equal(selection.counts[:, 0], arguments[2])
    wanted = expected_ids(case, arguments)
    np.testing.assert_array_equal(selection.ids[:, 0], wanted)
