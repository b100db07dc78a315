"""Hopper's kernel for the attention of prompts."""

import attention_cases
import attention_checks
import jax
import pytest
from attention_cases import OWN_PAGES, PAGES, HopperPrefill
from compiling import assert_compiled, cases_of, compile_for
from kernel_draws import ON_GPU

from sketchwalk_jax.pallas_kernels.attention import hopper

LARGE = attention_cases.LARGE_PREFILL_SHAPES if ON_GPU else ()
CASES = [HopperPrefill(**x) for x in attention_cases.PREFILL_SHAPES + LARGE]
KEPT = ("prefill-4x2-H64-T250",)  # the interpreter's default cases
BAD = [HopperPrefill(**x) for x in attention_cases.BAD_PREFILL_SHAPES]
BAD_OF_A_WEEK = [HopperPrefill(**x) for x in attention_cases.BAD_PREFILL_SHAPES_OF_A_WEEK]

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("seed", attention_checks.SEEDS)
@attention_checks.each(CASES, KEPT)
def test_attention_equals_the_reference(case, seed, capfd):
    attention_checks.check_reference(case, seed, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "programs"), [(64, 3), (128, 1)])
def test_few_programs_take_tile_after_tile(head_dim, programs, capfd, monkeypatch):
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda *_, **__: programs)
    case = HopperPrefill(heads=(4, 2), lengths=(200, 70), head_dim=head_dim)
    attention_checks.check_reference(case, 0, capfd)


@pytest.mark.slow
def test_lists_name_any_of_a_rows_own_pages(capfd):
    attention_checks.check_own_pages(HopperPrefill(**OWN_PAGES, **PAGES), capfd)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@attention_checks.each(BAD, of_a_week=BAD_OF_A_WEEK)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    attention_checks.check_not_finite(case, capfd)


@pytest.mark.parametrize("row_size", [16, 32, 128])
def test_rows_that_the_kernel_cannot_take_are_refused_in_words(row_size):
    case = HopperPrefill(heads=(2, 1), lengths=(128,), block_size=16, row_size=row_size)
    function, shapes = case.program()
    with pytest.raises(ValueError, match="row_size must fit the kernel: it takes a"):
        jax.eval_shape(function, *shapes)


@pytest.mark.hopper
@cases_of(
    attention_cases.COMPILED_HOPPER,
    [("9.0", "prefill-28x4-H128-T4096-kv_head-block16-bfloat16-rows64-hopper")],
)
def test_it_compiles(gpu, case):
    assert_compiled(compile_for(gpu, f"{attention_cases.FILE}:{case}"))
