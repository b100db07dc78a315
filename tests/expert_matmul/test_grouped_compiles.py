"""The grouped matmul kernel and the choice of experts compile without spills."""

import grouped_cases
import pytest
from compiling import assert_compiled, cases_of, compile_for

KEPT = [
    ("9.0", case) for case in (*grouped_cases.COMPILED["9.0"][:2], grouped_cases.CHOICES[0])
]  # on every change


@pytest.mark.hopper
@cases_of(grouped_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    kernels = compile_for(gpu, f"{grouped_cases.__file__}:{case}")
    assert_compiled(kernels, threads=case.threads)
