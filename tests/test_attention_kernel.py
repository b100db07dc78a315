"""The prefill kernel for GPUs from Ampere on: interpreted, as compiled, and on such a GPU.

On such a GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_attention_kernel.py`. As compiled,
cases take GPUs in turn.
"""

import contextlib
import functools
import itertools

import attention_cases
import cases
import hopper
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from attention_cases import Pages, Prefill
from test_kernels import NOT_FINITE, assert_attention
from variants import INTERPRET, RUNS_COMPILED, slow_unless

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.attention import attention as module
from sketchwalk_jax.pallas_kernels.attention.attention import attention_kernel, sizes

ON_GPU = jax.default_backend() == "gpu"
TIMES = 2 if ON_GPU else 1
CONFIG = KernelConfig(interpret=True) if INTERPRET else KernelConfig()
# A process that compiled for Hopper first can compile for older GPUs, but not for Blackwell.
CAPABILITIES = itertools.cycle(x for x in hopper.SHARED_KIB if float(x) < 10)
CASES = [x for x in attention_cases.CASES if x.op == "prefill"]

pytestmark = pytest.mark.interpreted


@pytest.fixture
def on_some_gpu():
    """Compiles for the next GPU in turn, where kernels run as compiled."""
    found = contextlib.nullcontext()
    compiled.cache_clear()  # a traced program keeps its GPU
    if RUNS_COMPILED:
        import compiled_kernels

        found = compiled_kernels.compiled_for(next(CAPABILITIES))
    with found:
        yield


@functools.cache
def compiled(kernel, case):
    function, _ = case.program(kernel, kernel_config=CONFIG)
    return jax.jit(function)


def run(case, arguments, capfd, *, kernel=attention_kernel, times=TIMES):
    return kernel_draws.run(compiled(kernel, case), arguments, capfd, times=times)


@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize(
    "case", slow_unless(lambda case: "4x2-H64-T250-head-block16" in str(case), CASES), ids=str
)
def test_attention_equals_the_reference(case, capfd):
    arguments, mask = kernel_draws.draw_attention(case, 0)
    # As compiled, each run executes warps in another order.
    found = run(case, arguments, capfd, times=1 if INTERPRET else 2)
    assert_attention(case, arguments, mask, found)


# Small and large steps; fewer and more steps in flight than a list may have.
SIZES = ((32, 1), (32, 3), (64, 1), (64, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize("form", [Prefill, Pages])
@pytest.mark.parametrize("chosen", SIZES, ids=str)
def test_sizes_change_nothing_beyond_rounding(chosen, form, capfd, monkeypatch):
    monkeypatch.setattr(module, "sizes", lambda *_: chosen)
    case = form(heads=(4, 2), lengths=(200, 70), head_dim=64)
    arguments, mask = kernel_draws.draw_attention(case, 0)
    assert_attention(case, arguments, mask, run(case, arguments, capfd))


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("case", [x for x in NOT_FINITE if x.op == "prefill"], ids=str)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 0))
    kernel_draws.assert_spoilt_reaches_those_who_see(
        functools.partial(run, case, capfd=capfd),
        case,
        arguments,
        mask,
        seeds=9 if ON_GPU else 2,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize("chosen", [(64, 2), (32, 1)], ids=str)
def test_lists_name_any_of_a_rows_own_pages(chosen, capfd, monkeypatch):
    """Each head lists another subset of the four pages; unlisted pages hold NaN."""
    monkeypatch.setattr(module, "sizes", lambda *_: chosen)
    case = Pages(heads=(16, 1), lengths=(180,), lists="head", head_dim=64)
    (*floats, ids, counts, layer, lengths, first), mask = kernel_draws.draw_attention(case, 1)
    for head, row, place in np.ndindex(16, case.num_rows, 4):
        mask[0, head, row, 4 * row + place] = head >> place & 1
    packed, counts = cases.pack_lists(mask)
    is_listed = np.pad(mask.any((0, 1, 2)), (0, case.num_blocks - mask.shape[-1]))
    unlisted = np.repeat(~is_listed, 16)[:, None, None]
    floats[1:] = [jnp.where(unlisted, jnp.nan, x) for x in floats[1:]]
    padding = ((0, 0),) * 3 + ((0, ids.shape[-1] - packed.shape[-1]),)
    ids = jnp.asarray(np.pad(packed, padding, constant_values=2**30), jnp.int32)
    arguments = (*floats, ids, jnp.asarray(counts, jnp.int32), layer, lengths, first)
    found = run(case, arguments, capfd)
    assert_attention(case, arguments, mask, found)
    # Non-finite values reach only later queries of the heads that list their pages.
    sees = np.zeros((1, 3 * 64, 16), bool)
    for position, features in ((20, slice(None)), (70, 5), (150, slice(None))):
        floats[2] = floats[2].at[cases.LAYER, 0, position, 0, features].set(jnp.nan)
        lists = mask[0, :, np.arange(192) // 64, position // 16]
        sees[0] |= lists & (np.arange(192) >= position)[:, None]
    spoiled = run(case, (*floats, *arguments[3:]), capfd)
    must = sees & (np.arange(192) < 180)[:, None]
    kernel_draws.assert_reaches_those_who_see(spoiled, found, sees, must)


def test_two_programs_fit_in_a_multiprocessor():
    wanted = {  # by rows per tile and head_dim
        "8.0": {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 2), (128, 128): (32, 2)},
        "8.6": {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 1), (128, 128): (32, 1)},
    }
    for capability, chosen in wanted.items():
        memory = hopper.SHARED_KIB[capability] * 1024
        found = {tile: sizes(*tile, memory) for tile in chosen}
        assert found == chosen, capability
