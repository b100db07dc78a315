"""The kernels that quantize keys and write tokens compile without spills."""

import pytest
import write_cases
from compiling import assert_compiled, cases_of, compile_for
from write_cases import Coded, WriteCase

KEPT = (  # on every change, prompts and tokens
    ("9.0", WriteCase(kv_heads=8, head_dim=128, rows=256)),
    ("9.0", Coded(kv_heads=8, head_dim=128)),
)


@pytest.mark.hopper
@cases_of(write_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    assert_compiled(compile_for(gpu, f"{write_cases.__file__}:{case}"))


@pytest.mark.hopper
@pytest.mark.slow
def test_plain_jax_quantizes_keys_relative_to_the_stored_zero_point():
    """XLA rounds the zero point to bfloat16 explicitly; it would drop a pair of conversions."""
    found = compile_for("9.0", f"program {write_cases.__file__}:PlainCodes")
    assert (8, 7) in map(tuple, found["roundings"])
