"""The kernels of decode matmuls and of the mlp's SwiGLU compile without spills."""

import linear_cases
import pytest
from compiling import assert_compiled, cases_of, compile_for
from linear_cases import CODE_SHAPES, GROUPS, LinearCase, SwigluCase

ONE, MANY = {"rows": 1, "inputs": 4096}, {"rows": 64, "inputs": 3584}
KEPT = (  # on every change, each way to multiply
    ("9.0", CODE_SHAPES[3]),
    ("9.0", GROUPS[0]),
    ("9.0", LinearCase(**MANY, columns=(18944, 18944), has_norm=True, dtype="float8_e4m3fn")),
    ("9.0", LinearCase(**ONE, columns=(4096, 1024, 1024), has_norm=True, dtype="int8")),
    ("9.0", SwigluCase(rows=8192, columns=28672)),
    ("12.0", CODE_SHAPES[3]),
)


@pytest.mark.hopper
@cases_of(linear_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    kernels = compile_for(gpu, f"{linear_cases.__file__}:{case}")
    assert_compiled(kernels, threads=getattr(case, "threads", 256))
