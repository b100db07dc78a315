"""What runs on GPUs from Ampere on compiles for each of them, on Ampere almost without spills.

On any machine, with the interpreter of SKETCHWALK_HOPPER_PYTHON (CONTRIBUTING.md says how).
"""

import os

import ampere_cases
import ampere_table
import hopper
import pytest
import test_models_compile
from variants import slow_unless

CASES = ampere_cases.COMPILED | ampere_cases.SELECTION | ampere_cases.LINEAR
# On every change: on the least shared memory of GPUs, and on the newest of them.
KEPT = (
    "prefill-32x8-H128-T4096,4096-shared-block16",
    "decode-32x8-H128-T65536-shared-block16",
    "evidence 32/8 of 128, a token, 4 pages, 256",
    "linear 1x4096",
    "evidence 32/8 of 128, 8 queries, 4 pages, 256",
)
KEPT_GPUS = ("-8.6", "-12.0")
LAUNCHES = 20  # of a layer of a decoded token, at most
# In prompts, of two heads of 128, the assembler for Blackwell keeps a few numbers in memory.
SPILLS = {
    "prefill-32x8-H128-T4096,4096-shared-block16-float16-rows64-12.0": 64,
    **{
        name: 128
        for name in ampere_cases.COMPILED
        if name.startswith("prefill-32x8-H128-") and name.endswith("-10.0")
    },
}


@pytest.fixture(scope="module")
def compiler_of():
    """A compiler for one GPU after another: a process of JAX compiles for the first alone."""
    python = os.environ.get("SKETCHWALK_HOPPER_PYTHON")
    if python is None:
        pytest.skip("SKETCHWALK_HOPPER_PYTHON names no interpreter with JAX's CUDA plugin")
    found = {}

    def get(capability):
        if capability not in found:
            for one in found.values():
                one.close()
            found.clear()
            found[capability] = hopper.Compiler(python)
        return found[capability]

    yield get
    for one in found.values():
        one.close()


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name",
    slow_unless(lambda name: name.startswith(KEPT) and name.endswith(KEPT_GPUS), CASES),
)
def test_it_compiles(name, compiler_of):
    compiler = compiler_of(CASES[name].capability)
    kernels = compiler.compile(f"{ampere_cases.__file__}:{name}")
    assert kernels, "no kernel was compiled"
    most = SPILLS.get(name, 0)
    for kernel, facts in kernels.items():
        assert 0 < facts["registers"] <= 255, kernel
        assert facts["hazards"] == [], kernel
        spilled = [facts[x] for x in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")]
        assert max(spilled) <= most, kernel
        assert bool(facts["complaints"]) == any(spilled), kernel
    assert any(facts["complaints"] for facts in kernels.values()) == (most > 0)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name",
    slow_unless(
        "decode_llama_1b_on_ampere".__eq__,
        ["decode_llama_1b_on_ampere", "decode_llama_1b_on_ampere_dense"],
    ),
)
def test_a_decoded_token_copies_nothing(name, compiler_of):
    """No layer of weights is copied out of its stack, and no cache."""
    found = compiler_of("8.6").compile(f"program {test_models_compile.FILE}:{name}")
    limit = test_models_compile.A_FEW_ROWS
    assert test_models_compile.written(found, limit=limit) == []
    assert found["temporary_bytes"] < 16 * 2**20
    assert found["launches"][0] <= LAUNCHES


@pytest.mark.hopper
@pytest.mark.slow
def test_a_token_on_a_gpu_without_kernels_copies_nothing(compiler_of):
    """On a T4 XLA reads weights and caches where they lie."""
    name = "decode_llama_1b_on_turing_dense"
    found = compiler_of("7.5").compile(f"program {test_models_compile.FILE}:{name}")
    scores = 2 * 2**20  # of 32 heads and 16,384 tokens, the largest array that is written
    assert test_models_compile.written(found, limit=scores) == []
    assert found["temporary_bytes"] < 16 * 2**20


@pytest.mark.hopper
def test_between_the_kernels_of_a_prompt_little_is_written(compiler_of):
    """No score for each key: twice the queries that stand for rows, and what is small beside."""
    compiler = compiler_of(ampere_cases.WHOLE_PROMPT.capability)
    found = compiler.compile(f"program {ampere_cases.__file__}:WHOLE_PROMPT")
    written = [size for size, _ in found["writes"]]
    assert max(written) < 20e6 and sum(written) < 80e6


def test_the_table_counts_the_innermost_loops_that_multiply():
    names = [
        "MOV R1, R2 ;",
        ".L_x_1:",  # around one that multiplies
        "IADD3 R1, R1, 1, RZ ;",
        ".L_x_2:",
        "HMMA.16816.F16 R1, R2, R3, RZ ;",
        "HMMA.16816.F16 R1, R2, R3, R1 ;",
        "@P0 BRA `(.L_x_2) ;",
        "@P1 BRA `(.L_x_1) ;",
        ".L_x_3:",  # multiplies nothing
        "IADD3 R1, R1, 1, RZ ;",
        "@P0 BRA `(.L_x_3) ;",
        ".L_x_4:",
        "HMMA.16816.F32.BF16 R1, R2, R3, R1 ;",
        "@P0 BRA `(.L_x_4) ;",
        "EXIT ;",
    ]
    lines = [x if x.startswith(".L") else f"/*{n:04x}*/ {x}" for n, x in enumerate(names)]
    assert ampere_table.loops("\n".join(lines)) == (3 + 2, 3)
    assert ampere_table.loops("\n".join(lines[:1] + lines[-1:])) == (0, 0)
