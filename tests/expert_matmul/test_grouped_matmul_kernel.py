"""The grouped matmul kernel against float64.

With a GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -n 0
tests/expert_matmul/test_grouped_matmul_kernel.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from kernel_draws import KERNELS, NONSENSE, needs_hopper
from variants import INTERPRET, slow_unless

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.expert_matmul import api, grouped_matmul

pytestmark = [pytest.mark.interpreted, needs_hopper]

ROWS = api.GROUP_ROWS
# Arrays of weights, type, inputs, columns, matrices, and the matrix of each used group.
CASES = {
    "more steps than slots": (2, "bfloat16", 320, 128, 4, (0, 3, 3)),
    "a single step": (1, "float16", 64, 64, 2, (1,)),
    "tiles of three pieces": (1, "bfloat16", 192, 192, 3, (2, 0)),
    "several tiles of SwiGLU": (2, "float16", 128, 192, 2, (1, 1)),
    "several wide tiles": (1, "bfloat16", 384, 512, 2, (0, 1)),
    "no group": (1, "bfloat16", 64, 128, 1, ()),
}
KEPT = {"more steps than slots"}
TRANSPOSED = {"more steps than slots", "several wide tiles", "tiles of three pieces"}


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """Gives each thread block several tiles."""
    monkeypatch.setattr(grouped_matmul, "num_multiprocessors", lambda: 2)


def draw(arrays, dtype, inputs, columns, matrices, used):
    """Draws rows, weights and the matrix of each group, with an unused group.

    The unused group and matrices that no group uses are NaN.
    """
    rng = np.random.default_rng(inputs + columns)
    groups = len(used) + 1
    rows = rng.normal(size=(groups, ROWS, inputs))
    rows[-1] = np.nan
    weights = rng.normal(size=(arrays, matrices, inputs, columns)) / math.sqrt(inputs)
    weights[:, [x for x in range(matrices) if x not in used]] = np.nan
    matrix = jnp.asarray([*used, NONSENSE[-1]], jnp.int32)
    return jnp.asarray(rows, dtype), [jnp.asarray(x, dtype) for x in weights], matrix


@functools.partial(jax.jit, static_argnames=("num_used", "is_transposed"))
def multiply(rows, weights, matrix, used, *, num_used, is_transposed=False):
    """Calls the operation and returns the groups that it computes."""
    call = api.grouped_matmul if len(weights) == 1 else api.grouped_swiglu
    options = {"is_transposed": is_transposed, "kernel_config": KERNELS}
    return call(rows, *weights, matrix, used, **options)[:num_used]


def expected(rows, weights, matrix):
    """Computes the used groups' products or SwiGLU in float64."""
    found = [
        np.einsum("grd,gdf->grf", np.asarray(rows, np.float64), np.asarray(x, np.float64)[matrix])
        for x in weights
    ]
    return found[0] if len(found) == 1 else found[0] / (1 + np.exp(-found[0])) * found[1]


@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, CASES))
def test_products_are_those_of_float64_rounded_once(name, capfd):
    used = CASES[name][-1]
    rows, weights, matrix = draw(*CASES[name])
    function = functools.partial(multiply, num_used=len(used))
    arguments = rows, weights, matrix, jnp.asarray(len(used))
    found = kernel_draws.run(function, arguments, capfd, times=2)
    if name in TRANSPOSED:
        swapped = rows, [jnp.swapaxes(x, 1, 2) for x in weights], *arguments[2:]
        turned = functools.partial(function, is_transposed=True)
        other = kernel_draws.run(turned, swapped, capfd, times=1)
        assert np.asarray(other).tobytes() == np.asarray(found).tobytes()
    assert found.dtype == rows.dtype
    wanted = expected(rows[: len(used)], weights, np.array(used, int))
    half = 0.5 * float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=half, atol=2e-5)


@pytest.mark.parametrize("arrays", slow_unless((2).__eq__, [1, 2]))
def test_a_row_depends_on_itself_and_its_matrix_alone(arrays):
    """Rows move within and between groups of one matrix; some others are not finite."""
    used = (1, 1, 2)
    rows, weights, matrix = draw(arrays, "bfloat16", 128, 64, 3, used)
    run = functools.partial(multiply, num_used=len(used))
    clean = np.asarray(run(rows, weights, matrix, jnp.asarray(3)))
    order = np.random.default_rng(0).permutation(2 * ROWS)
    moved = rows.at[:2].set(rows[:2].reshape(2 * ROWS, -1)[order].reshape(rows[:2].shape))
    bad = (order == 7) | (order == 200)
    place = np.argwhere(bad.reshape(2, ROWS))
    moved = moved.at[*place[0], 5].set(jnp.nan).at[*place[1], 100].set(jnp.inf)
    found = np.array(run(moved, weights, matrix, jnp.asarray(3)))
    first = found[:2].reshape(2 * ROWS, -1)
    assert not np.isfinite(first[bad].astype(np.float32)).all(axis=-1).any()
    wanted = clean[:2].reshape(2 * ROWS, -1)[order]
    assert first[~bad].tobytes() == wanted[~bad].tobytes()
    assert found[2].tobytes() == clean[2].tobytes()


def why_not(*, rows=(2, ROWS, 64), weights=((3, 64, 64),), types=("bfloat16", "bfloat16")):
    array = jax.ShapeDtypeStruct
    arrays = [array(x, types[1]) for x in weights]
    return api.why_not_grouped_matmul(array(rows, types[0]), *arrays, interpret=True)


NOT_TAKEN = {
    "all in bfloat16 or float16, not float32": {"types": ("float32", "float32")},
    "not bfloat16 and float16": {"types": ("float16", "bfloat16")},
    "groups of 128 rows, not 2 groups of 64": {"rows": (2, 64, 64)},
    "not 0 groups of 128": {"rows": (0, ROWS, 64)},
    "of one shape with 64 inputs, not (3, 128, 64)": {"weights": [(3, 128, 64)]},
    "not (3, 64, 64) and (3, 64, 128)": {"weights": [(3, 64, 64), (3, 64, 128)]},
    "multiples of 64 inputs and columns, not 96, 64": {
        "rows": (2, ROWS, 96),
        "weights": [(3, 96, 64)],
    },
    "columns, not 64, 96": {"weights": [(3, 64, 96)] * 2},
}


def test_what_it_does_not_take_it_says():
    assert why_not() is None
    for words, given in NOT_TAKEN.items():
        assert words in why_not(**given)
    rows, weights = jnp.zeros((1, ROWS, 64), jnp.float16), jnp.zeros((1, 64, 96), jnp.float16)
    zero = jnp.zeros((1,), jnp.int32)
    assert api.grouped_matmul(rows, weights, zero, zero[0], kernel_config=KERNELS) is None
    assert api.grouped_swiglu(rows, weights, weights, zero, zero[0], kernel_config=None) is None
    with pytest.raises(ValueError, match="multiples of 64"):
        grouped_matmul.grouped_matmul_kernel(rows, [weights], zero, zero[0], interpret=INTERPRET)


def test_other_gpus_have_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "kernels_here", lambda: "ampere")
    rows, weights = jnp.zeros((1, ROWS, 64), jnp.float16), jnp.zeros((1, 64, 64), jnp.float16)
    assert "9.0 (H100, H200) in grouped matmul" in api.why_not_grouped_matmul(rows, weights)
