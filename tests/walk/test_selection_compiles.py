"""Kernels of top-k lists, and of the printed rule's sketch and walk, compile without spills."""

import pytest
import selection_cases
from compiling import assert_compiled, cases_of, compile_for
from selection_cases import BlockSumsCase, TokenSelectionCase, TopKCase

KEPT = (  # on every change, the largest case of each kernel
    ("9.0", TopKCase(num_blocks=16384)),
    ("9.0", BlockSumsCase(heads=(28, 4), head_dim=128, sketch_dim=128, dtype="float16")),
    ("9.0", TokenSelectionCase(num_blocks=16384)),
)


@pytest.mark.hopper
@cases_of(selection_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    assert_compiled(compile_for(gpu, f"{selection_cases.__file__}:{case}"))
