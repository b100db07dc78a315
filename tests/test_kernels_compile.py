"""Every kernel at every shape that it promises to take compiles for Hopper without spills.

On any machine, with the interpreter of SKETCHWALK_HOPPER_PYTHON (CONTRIBUTING.md says how).
"""

import os
from collections.abc import Iterator

import hopper
import kernel_cases
import pytest

pytestmark = pytest.mark.slow

SAID = """\
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size
"""


@pytest.fixture(scope="module")
def compiler() -> Iterator[hopper.Compiler]:
    python = os.environ.get("SKETCHWALK_HOPPER_PYTHON")
    if python is None:
        pytest.skip("SKETCHWALK_HOPPER_PYTHON names no interpreter with JAX's CUDA plugin")
    compiler = hopper.Compiler(python)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("name", kernel_cases.COMPILED)
def test_it_compiles_without_spills(name, compiler):
    kernels = compiler.compile(name)
    assert kernels, "no kernel was compiled"
    for kernel, facts in kernels.items():
        assert 0 < facts["registers"] <= 255, kernel
        found = {fact: facts[fact] for fact in facts if fact != "registers"}
        nothing = {"stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}
        assert found == nothing | {"complaints": []}, kernel


def test_a_spill_and_a_complaint_would_be_seen():
    facts = hopper.read_assembler(SAID)
    assert facts == {
        "registers": 168,
        "stack_bytes": 16,
        "spill_store_bytes": 8,
        "spill_load_bytes": 12,
        "complaints": [],
    }
    complaint = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized"
    assert hopper.read_assembler(f"{SAID}{complaint}\n")["complaints"] == [complaint]
    with pytest.raises(ValueError, match="no registers"):
        hopper.read_assembler("")


def test_a_case_that_does_not_compile_is_an_error(compiler):
    with pytest.raises(RuntimeError, match="nothing of this name does not compile: KeyError"):
        compiler.compile("nothing of this name")
