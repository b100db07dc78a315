"""The kernels for GPUs from Ampere on compile for each of them, on Ampere without spills.

On any machine, with the interpreter of SKETCHWALK_HOPPER_PYTHON (CONTRIBUTING.md says how).
"""

import os

import ampere_cases
import hopper
import pytest
from variants import slow_unless

# On every change: on the least shared memory of GPUs, and on the newest of them.
KEPT = ("prefill-32x8-H128-T4096,4096-shared-block16", "decode-32x8-H128-T65536-shared-block16")
KEPT_GPUS = ("-8.6", "-12.0")
# Of two heads of 128, the assembler for Blackwell keeps a few numbers of threads in memory.
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
    slow_unless(
        lambda name: name.startswith(KEPT) and name.endswith(KEPT_GPUS), ampere_cases.COMPILED
    ),
)
def test_it_compiles(name, compiler_of):
    compiler = compiler_of(ampere_cases.COMPILED[name].capability)
    kernels = compiler.compile(f"{ampere_cases.__file__}:{name}")
    assert kernels, "no kernel was compiled"
    for kernel, facts in kernels.items():
        assert 0 < facts["registers"] <= 255, kernel
        found = {fact: facts[fact] for fact in facts if fact != "registers"}
        nothing = {"stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}
        if name in SPILLS:
            assert found.pop("complaints")
            assert all(found.pop(x) <= SPILLS[name] for x in nothing)
            nothing = {}
        else:
            nothing |= {"complaints": []}
        assert found == nothing | {"hazards": []}, kernel
