"""The kernels that select for a token, as they are compiled for GPUs before Hopper.

`test_token_selection_kernels.py` tests all of them on Hopper. This module tests the only difference
elsewhere: the rounding of queries to eight bits.
"""

import jax
import numpy as np
import pytest
import test_token_selection_kernels
from test_prompt_selection_kernels import SIZE
from test_token_selection_kernels import TOKEN_SHAPES, draw_token
from variants import RUNS_COMPILED

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.slow,
    pytest.mark.skipif(not RUNS_COMPILED, reason="interpreted, kernels are the same on all GPUs"),
]


def select(capability, drawn):
    """Returns lists and page scores of the kernels as compiled for a GPU."""
    import compiled_kernels

    jax.clear_caches()
    with compiled_kernels.compiled_for(capability):
        return jax.device_get(test_token_selection_kernels.select_pages(*drawn))


@pytest.mark.parametrize(
    ("capability", "shape", "kind"),
    [
        *(("8.0", TOKEN_SHAPES[2], kind) for kind in ("random", "equal", "nan", "huge")),
        ("8.6", TOKEN_SHAPES[0], "huge"),
        *(("8.9", TOKEN_SHAPES[1], kind) for kind in ("nan", "huge")),
    ],
)
def test_tokens_get_the_lists_that_they_get_on_hopper(capability, shape, kind):
    drawn = draw_token(*shape, kind, second=17 * SIZE + 21)
    # `ptxas` takes code only for the first GPU of a process and for older ones.
    wanted, found = (jax.tree.leaves(select(x, drawn)) for x in ("9.0", capability))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
