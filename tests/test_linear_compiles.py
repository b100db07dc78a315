"""The kernels of decode matmuls and of the mlp's SwiGLU compile without spills."""

import linear_cases
import pytest
from compiling import assert_compiled, cases_of, compile_for

KEPT = (  # on every change, each way to multiply
    ("9.0", "linear in bfloat16, 32x8192 to 28672+28672"),
    ("9.0", "linear in float8_e4m3fn, 64x3584 to 18944+18944 with a norm"),
    ("9.0", "linear in int8, 1x4096 to 4096+1024+1024 with a norm"),
    ("9.0", "float8 SwiGLU 8192x28672"),
    ("12.0", "linear in bfloat16, 32x8192 to 28672+28672"),
)


@pytest.mark.hopper
@cases_of(linear_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    kernels = compile_for(gpu, f"{linear_cases.__file__}:{case}")
    assert_compiled(kernels, threads=getattr(case, "threads", 256))
