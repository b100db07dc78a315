"""Kernels of top-k lists, and of the printed rule's sketch and walk, compile without spills."""

import pytest
import selection_cases
from compiling import assert_compiled, cases_of, compile_for

KEPT = (  # on every change, the largest case of each kernel
    ("9.0", "select-J16384-rows0+1-d0.1-1+1-normal"),
    ("9.0", "block_sums-28x4-H128-T16384-R128-block64-float16"),
    ("9.0", "select_token-J16384-B1-R64-power8"),
)


@pytest.mark.hopper
@cases_of(selection_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    assert_compiled(compile_for(gpu, f"{selection_cases.__file__}:{case}"))
