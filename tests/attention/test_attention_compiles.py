"""The attention kernels compile for every GPU that has them, almost without spills."""

import attention_cases
import pytest
from compiling import assert_compiled, cases_of, compile_for

# On every change, compile each kernel where its code is most at risk.
KEPT = (
    ("9.0", "prefill-28x4-H128-T4096-kv_head-block16-bfloat16-rows64-hopper"),
    ("9.0", "decode-28x4-H128-T65536-kv_head-block16-bfloat16-hopper"),
    ("12.0", "prefill-32x8-H128-T4096,4096-shared-block16-float16-rows64"),
    ("12.0", "decode-32x8-H64-T65536-shared-block16-bfloat16"),
)
# Blackwell's assembler spills a few registers for prefill with two heads of 128.
SPILLS = {
    ("12.0", "prefill-32x8-H128-T4096,4096-shared-block16-float16-rows64"): 64,
    **{("10.0", str(x)): 128 for x in attention_cases.COMPILED["10.0"] if x.op == "prefill"},
}


@pytest.mark.hopper
@cases_of(attention_cases.COMPILED, KEPT)
def test_it_compiles(gpu, case):
    kernels = compile_for(gpu, f"{attention_cases.__file__}:{case}")
    assert_compiled(kernels, spills=SPILLS.get((gpu, str(case)), 0))
