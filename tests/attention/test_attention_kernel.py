"""The kernel for the attention of prompts on GPUs from Ampere on, which take turns as compiled."""

import attention_cases
import attention_checks
import hopper
import pytest
from attention_cases import OWN_PAGES, PAGES, Prefill
from compiling import assert_compiled, cases_of, compile_for
from kernel_draws import ON_GPU

from sketchwalk_jax.pallas_kernels.attention import attention

LARGE = attention_cases.LARGE_PREFILL_SHAPES if ON_GPU else ()
CASES = [Prefill(**x) for x in attention_cases.PREFILL_SHAPES + LARGE]
KEPT = ("prefill-4x2-H64-T250",)  # the interpreter's default cases
BAD = [Prefill(**x) for x in attention_cases.BAD_PREFILL_SHAPES]
BAD_OF_A_WEEK = [Prefill(**x) for x in attention_cases.BAD_PREFILL_SHAPES_OF_A_WEEK]
# Blackwell's assembler spills a few registers with two heads of 128.
SPILLS = {
    ("12.0", "prefill-32x8-H128-T4096,4096-shared-block16-float16-rows64"): 64,
    **{("10.0", str(x)): 128 for x in attention_cases.COMPILED_PREFILL["10.0"]},
}

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("seed", attention_checks.SEEDS)
@attention_checks.each(CASES, KEPT)
def test_attention_equals_the_reference(case, seed, capfd):
    attention_checks.check_reference(case, seed, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "sizes"), [({}, (32, 1)), ({}, (64, 3)), (PAGES, (32, 3)), (PAGES, (64, 1))]
)
def test_sizes_change_nothing_beyond_rounding(pages, sizes, capfd, monkeypatch):
    """Small and large steps; fewer and more steps in flight than a list may have."""
    monkeypatch.setattr(attention, "sizes", lambda *_: sizes)
    case = Prefill(heads=(4, 2), lengths=(200, 70), head_dim=64, **pages)
    attention_checks.check_reference(case, 0, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param((64, 2), marks=pytest.mark.weekly), (32, 1)])
def test_lists_name_any_of_a_rows_own_pages(sizes, capfd, monkeypatch):
    monkeypatch.setattr(attention, "sizes", lambda *_: sizes)
    attention_checks.check_own_pages(Prefill(**OWN_PAGES, **PAGES), capfd)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@attention_checks.each(BAD, of_a_week=BAD_OF_A_WEEK)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    attention_checks.check_not_finite(case, capfd)


@pytest.mark.parametrize(
    ("capability", "wanted"),  # by rows per tile and head_dim
    [
        ("8.0", {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 2), (128, 128): (32, 2)}),
        ("8.6", {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 1), (128, 128): (32, 1)}),
    ],
)
def test_two_tiles_fit_in_a_multiprocessor(capability, wanted):
    memory = hopper.SHARED_KIB[capability] * 1024
    assert {tile: attention.sizes(*tile, memory) for tile in wanted} == wanted


@pytest.mark.hopper
@cases_of(
    attention_cases.COMPILED_PREFILL,
    [("12.0", "prefill-32x8-H128-T4096,4096-shared-block16-float16-rows64")],
)
def test_it_compiles(gpu, case):
    kernels = compile_for(gpu, f"{attention_cases.FILE}:{case}")
    assert_compiled(kernels, spills=SPILLS.get((gpu, str(case)), 0))
