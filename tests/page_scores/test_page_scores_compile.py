"""The kernels that select by the recommended policy compile without spills."""

import page_score_cases
import pytest
from compiling import assert_compiled, cases_of, compile_for
from page_score_cases import Prompt, Token

KEPT = (  # on every change, prompts and tokens on Hopper and elsewhere
    ("9.0", Prompt(heads=28, kv_heads=4, count=32, blocks=45)),
    ("9.0", Token(heads=64, blocks=4096)),
    ("12.0", Prompt(count=8, blocks=256)),
    ("12.0", Token(blocks=256)),
)


@pytest.mark.hopper
@cases_of(page_score_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    assert_compiled(compile_for(gpu, f"{page_score_cases.__file__}:{case}"))


@pytest.mark.hopper
def test_between_the_kernels_of_a_prompt_little_is_written():
    """No score per key: only twice the representatives, and small arrays."""
    found = compile_for("8.0", f"program {page_score_cases.__file__}:WholePrompt")
    written = [size for size, _ in found["writes"]]
    assert max(written) < 20e6 and sum(written) < 80e6
