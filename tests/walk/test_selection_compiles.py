"""Kernels of top-k lists, and of the printed rule's sketch and walk, compile without spills.

Only rows of more than 16,384 blocks spill some of their keys.
"""

import pytest
import selection_cases
from compiling import assert_compiled, cases_of, compile_for
from selection_cases import LONGEST, BlockSumsCase, TokenSelectionCase, TopKCase

KEPT = (  # on every change, the largest case of each kernel without spills
    ("9.0", TopKCase(num_blocks=16384)),
    ("9.0", BlockSumsCase(heads=(28, 4), head_dim=128, sketch_dim=128, dtype="float16")),
    ("9.0", TokenSelectionCase(num_blocks=16384)),
)


@pytest.mark.hopper
@cases_of(selection_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    found = compile_for(gpu, f"{selection_cases.__file__}:{case}")
    assert_compiled(found, spills=2600 if case == LONGEST else 0)
