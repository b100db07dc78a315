"""The readers of the assembler's output see spills, warnings and registers written too early."""

import ampere_table
import hopper
import pytest
import sass
from compiling import compile_for

SAID = """\
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size
"""


# A loop that waits for its product in the next iteration; %s follows the product.
LOOP = """\
.L_x_1:
   -:-:-:Y:01   /*0010*/   WARPGROUP.DEPBAR.LE gsb0, 0x0
   -:-:-:Y:01   /*0020*/   HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR16].tnspB, R88, gsb0
%s
   -:-:-:Y:01   /*0040*/   @P0 BRA `(.L_x_1)
   -:-:-:Y:01   /*0050*/   EXIT
"""


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
    assert bool(sass.hazards(text)) == is_hazard
    wait = "   -:-:-:Y:01   /*0025*/   WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
    place = text.index("   -:-:-:Y:01   /*0030*/")
    assert sass.hazards(text[:place] + wait + text[place:]) == []


@pytest.mark.parametrize(("later", "is_hazard"), [(0, True), (1, False), (2, False)])
def test_a_wait_that_leaves_a_group_under_way_is_one_for_those_before(later, is_hazard):
    """The loop's first product is safe from the overwrite once another group has ended."""
    other = "   -:-:-:Y:01   /*0030*/   HGMMA.64x8x16.F32.BF16 R88, R{}, gdesc[UR16], R88, gsb0\n"
    wait = "   -:-:-:Y:01   /*0034*/   WARPGROUP.DEPBAR.LE gsb0, 0x1\n"
    rest = "".join(other.format(200 + 4 * index) for index in range(later))
    text = LOOP % f"{rest}{wait}   -:-:-:Y:01   /*0038*/   LDS.64 R182, [R5]"
    assert bool(sass.hazards(text)) == is_hazard


@pytest.mark.hopper
def test_a_case_that_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="nothing of this name does not compile: KeyError"):
        compile_for("9.0", f"{hopper.__file__}:nothing of this name")


def test_the_table_counts_the_innermost_loops_that_multiply():
    names = [
        "MOV R1, R2 ;",
        ".L_x_1:",  # contains a loop that multiplies
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
