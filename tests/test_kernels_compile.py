"""Every kernel compiles for Hopper as it should, at every pair of what it promises to take.

Without spills, and without writing to registers that a matrix product still reads.

On any machine, with the interpreter of SKETCHWALK_HOPPER_PYTHON (CONTRIBUTING.md says how).
"""

import hopper
import kernel_cases
import pytest
import sass
from variants import slow_unless

SAID = """\
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size
"""


# A loop whose product is awaited in its next turn: %s stands after the product.
LOOP = """\
.L_x_1:
   -:-:-:Y:01   /*0010*/   WARPGROUP.DEPBAR.LE gsb0, 0x0
   -:-:-:Y:01   /*0020*/   HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR16].tnspB, R88, gsb0
%s
   -:-:-:Y:01   /*0040*/   @P0 BRA `(.L_x_1)
   -:-:-:Y:01   /*0050*/   EXIT
"""


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name", slow_unless(kernel_cases.FAMILIES.__contains__, kernel_cases.COMPILED)
)
def test_it_compiles(name, compiler):
    kernels = compiler.compile(name)
    assert kernels, "no kernel was compiled"
    num_products = getattr(kernel_cases.COMPILED[name], "num_products", None)
    # So many of a multiprocessor's threads are to find room for their registers.
    threads = getattr(kernel_cases.COMPILED[name], "threads", 256)
    for kernel, facts in kernels.items():
        assert 0 < facts["registers"] <= min(255, 65536 // threads), kernel
        found = {fact: facts[fact] for fact in facts if fact not in ("registers", "products")}
        nothing = {"stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}
        assert found == nothing | {"complaints": [], "hazards": []}, kernel
        # ptxas has left out products of whole numbers whose left operand lies in registers.
        assert num_products in (None, facts["products"])


@pytest.mark.hopper
@pytest.mark.slow
def test_plain_jax_codes_keys_beside_the_centre_that_is_kept(compiler):
    """That in bfloat16: with a mere conversion to it XLA's programs for GPUs go on unrounded."""
    found = compiler.compile(f"program {kernel_cases.__file__}:plain_codes")
    assert (8, 7) in map(tuple, found["roundings"])


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


def test_what_is_printed_about_several_kernels_is_told_apart():
    complaint = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized"
    code = f"\n\t.target\tsm_90a\n{LOOP % '   -:-:-:Y:01   /*0030*/   LDS.64 R182, [R5]'}"
    printed = f"{SAID}{code}\n{complaint}\n{SAID.replace('one', 'other')}\n\t.target\tsm_90a\n"
    one, other = (hopper.read_kernels(printed)[name] for name in ("one_0", "other_1"))
    assert one["complaints"] == [] and len(one["hazards"]) == 1
    assert other["complaints"] == [complaint] and other["hazards"] == []
    with pytest.raises(ValueError, match="no code of some kernel"):
        hopper.read_kernels(printed + SAID)


@pytest.mark.parametrize(
    ("instruction", "is_hazard"),
    [
        ("FFMA R180, R24, 0.1275, -R152.reuse", True),
        ("@!P1 MUFU.EX2 R183, R3", True),
        ("LDS.64 R182, [R5]", True),
        ("FFMA R184, R180, 0.1275, -R152", False),
        ("STS [R180], R181", False),
        ("STG.E R180, R181", False),
        ("IMAD.WIDE R179, R1, R2, R4", True),
        ("LDS.64 R178, [R5]", False),
    ],
)
def test_a_register_that_is_overwritten_too_early_would_be_seen(instruction, is_hazard):
    text = LOOP % f"   -:-:-:Y:01   /*0030*/   {instruction}"
    assert sass.num_register_products(text) == 1
    assert bool(sass.hazards(text)) == is_hazard
    wait = "   -:-:-:Y:01   /*0025*/   WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
    place = text.index("   -:-:-:Y:01   /*0030*/")
    assert sass.hazards(text[:place] + wait + text[place:]) == []


@pytest.mark.parametrize(("later", "is_hazard"), [(0, True), (1, False), (2, False)])
def test_a_wait_that_leaves_a_group_under_way_is_one_for_those_before(later, is_hazard):
    """The first product of a loop is safe from its overwriting if another group has ended since."""
    other = "   -:-:-:Y:01   /*0030*/   HGMMA.64x8x16.F32.BF16 R88, R{}, gdesc[UR16], R88, gsb0\n"
    wait = "   -:-:-:Y:01   /*0034*/   WARPGROUP.DEPBAR.LE gsb0, 0x1\n"
    rest = "".join(other.format(200 + 4 * index) for index in range(later))
    text = LOOP % f"{rest}{wait}   -:-:-:Y:01   /*0038*/   LDS.64 R182, [R5]"
    assert bool(sass.hazards(text)) == is_hazard


def test_a_case_that_does_not_compile_is_an_error(compiler):
    with pytest.raises(RuntimeError, match="nothing of this name does not compile: KeyError"):
        compiler.compile("nothing of this name")
