"""The kernel before the walk's product, interpreted, makes what the equations say, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.pallas_kernels.select_prompt import walk_operands_kernel
from sketchwalk_jax.pallas_kernels.selection import MAX_PROMPT_BLOCKS
from sketchwalk_jax.scaled import product_exponent
from sketchwalk_jax.walk import causal_mask, power_transition, row_maxima

pytestmark = pytest.mark.interpreted


def moved(state: np.ndarray, log2_scale: np.ndarray, top: int) -> np.ndarray:
    """Rows times powers of two, the largest entry in `[1, 2) · 2^top`, tiny ones zero."""
    exponent = np.where(state == 0, -(1 << 24), np.frexp(state)[1] - 1 + log2_scale[:, None])
    shift = log2_scale[:, None] - exponent.max(-1, keepdims=True) + top
    rows = np.ldexp(state.astype(np.float64), np.where(state == 0, 0, shift))
    return np.where(np.abs(rows) < 2.0**-126, 0.0, rows).astype(np.float32)


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(5, 5), (157, 20), (128, 140)])
@pytest.mark.parametrize(("power", "rectify"), [(8, False), (3, True)])
def test_operands_equal_the_reference(
    num_blocks: int, num_rows: int, power: int, rectify: bool
) -> None:
    rng = np.random.default_rng(num_blocks)
    shape = (2, num_blocks, num_blocks)
    scores = rng.normal(size=shape) * np.exp2(rng.uniform(-30, 30, (2, num_blocks, 1)))
    scores[0, 2, :] = 0.0
    scores[1, 3, :] = -1.0
    causal = np.tril(np.ones(shape[1:], bool))
    scores[:, ~causal] = np.nan  # what lies above the diagonal never matters
    scores = jnp.asarray(scores, jnp.float32)
    state = rng.choice([-1.0, 0.0, 1.0, 1.0], (2, num_rows, num_blocks))
    state *= np.exp2(rng.uniform(-120, 100, state.shape))
    state[:, 1] = 0.0
    state = state.astype(np.float32)
    weights, left = walk_operands_kernel(
        scores,
        row_maxima(scores, rectify=rectify),
        jnp.asarray(state),
        power=power,
        rectify=rectify,
        interpret=True,
    )
    wanted, log2_scale = power_transition(
        scores, causal_mask(num_blocks), exponent=power, rectify=rectify
    )
    np.testing.assert_array_equal(weights, wanted)
    wanted = moved(state, np.asarray(log2_scale), product_exponent(power))
    np.testing.assert_array_equal(left, wanted)


def test_rows_that_do_not_fit_are_refused() -> None:
    num_blocks = MAX_PROMPT_BLOCKS + 1

    def operands(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return walk_operands_kernel(*arrays, power=8, rectify=False)

    square = jax.ShapeDtypeStruct((1, num_blocks, num_blocks), jnp.float32)
    largest = jax.ShapeDtypeStruct((1, num_blocks), jnp.float32)
    with pytest.raises(ValueError, match="at most 8192 columns"):
        jax.eval_shape(operands, square, largest, square)
