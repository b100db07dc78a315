"""The kernel of prompts for GPUs from Ampere on: interpreted, as compiled, and on such a GPU.

On a machine with such a GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_ampere_prefill.py`.
As compiled, cases take GPUs in turn; `test_ampere_compiles.py` has all shapes of each.
"""

import contextlib
import dataclasses
import functools
import itertools

import ampere_cases
import cases
import hopper
import jax
import jax.numpy as jnp
import kernel_cases
import kernel_draws
import numpy as np
import pytest
from test_kernels import NOT_FINITE, assert_attention
from variants import INTERPRET, RUNS_COMPILED, slow_unless

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.ampere_prefill import sizes

ON_GPU = jax.default_backend() == "gpu"
CONFIG = KernelConfig(interpret=True) if INTERPRET else KernelConfig()
# A process that has compiled for Hopper compiles for what came before it, but not for Blackwell.
CAPABILITIES = itertools.cycle(x for x in hopper.SHARED_KIB if float(x) < 10)
KEPT = ("3x1-H64-T65,191-shared", "4x2-H64-T250-head-block16")

pytestmark = pytest.mark.interpreted


def is_kept(case):
    """Whether the interpreter runs a case in the default run."""
    return ON_GPU or any(name in str(case) for name in KEPT)


@pytest.fixture
def on_some_gpu():
    """Compiles for another GPU than the last test, where kernels run as compiled."""
    found = contextlib.nullcontext()
    if RUNS_COMPILED:
        import compiled_kernels

        found = compiled_kernels.compiled_for(next(CAPABILITIES))
    with found:
        yield


@functools.cache
def compiled(case, config=CONFIG):
    function, _ = kernel_cases.program(case, kernel_config=config)
    return jax.jit(function)


def run_twice(case, arguments, capfd, config=CONFIG):
    """The results of two runs in memory full of NaN, which are the same bit for bit."""
    # As compiled, a program keeps the GPU that it was first traced for.
    function = (compiled.__wrapped__ if RUNS_COMPILED else compiled)(case, config)
    runs = []
    for _ in range(1 if INTERPRET else 2):
        kernel_draws.poison(jax.eval_shape(function, *arguments))
        runs.append(jax.block_until_ready(function(*arguments)))
    for one, other in zip(*map(jax.tree.leaves, (runs[0], runs[-1])), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    return runs[0]


@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize("case", slow_unless(is_kept, ampere_cases.PREFILL_CASES), ids=str)
def test_attention_equals_the_reference(case, capfd):
    arguments, mask = kernel_draws.draw_attention(case, 0)
    assert_attention(case, arguments, mask, run_twice(case, arguments, capfd))


# Small steps and large ones, fewer and more of them at a time than a list may have.
SIZES = ((32, 1), (32, 3), (64, 1), (64, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize("form", [kernel_cases.Prefill, kernel_cases.Pages])
@pytest.mark.parametrize("chosen", SIZES, ids=str)
def test_sizes_change_nothing_beyond_rounding(chosen, form, capfd):
    config = dataclasses.replace(CONFIG, prefill_keys=chosen[0], prefill_stages=chosen[1])
    case = ampere_cases.of(form(heads=(4, 2), lengths=(330, 70), head_dim=64))
    arguments, mask = kernel_draws.draw_attention(case, 0)
    assert_attention(case, arguments, mask, run_twice(case, arguments, capfd, config))


NOT_FINITE_CASES = [ampere_cases.of(x) for x in NOT_FINITE if x.op == "prefill"]


@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: ON_GPU or case == NOT_FINITE_CASES[0], NOT_FINITE_CASES),
    ids=str,
)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 0))
    run = functools.partial(run_twice, case, capfd=capfd)
    kernel_draws.assert_spoilt_reaches_those_who_see(
        run, case, arguments, mask, seeds=9 if ON_GPU else 2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize("chosen", [(64, 2), (32, 1)], ids=str)
def test_lists_name_any_of_a_rows_own_pages(chosen, capfd):
    """Each head lists another subset of the four; whoever attends to an unlisted page sees NaN."""
    config = dataclasses.replace(CONFIG, prefill_keys=chosen[0], prefill_stages=chosen[1])
    pages = kernel_cases.Pages(heads=(16, 1), lengths=(250,), lists="head", head_dim=64)
    case = ampere_cases.of(pages)
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
    found = run_twice(case, arguments, capfd, config)
    assert_attention(case, arguments, mask, found)
    # Values that are not finite reach later queries of the heads that list their pages.
    sees = np.zeros((1, 4 * 64, 16), bool)
    for position, features in ((20, slice(None)), (70, 5), (210, slice(None))):
        floats[2] = floats[2].at[kernel_cases.LAYER, 0, position, 0, features].set(jnp.nan)
        lists = mask[0, :, np.arange(256) // 64, position // 16]
        sees[0] |= lists & (np.arange(256) >= position)[:, None]
    spoiled = run_twice(case, (*floats, *arguments[3:]), capfd, config)
    must = sees & (np.arange(256) < 250)[:, None]
    kernel_draws.assert_reaches_those_who_see(spoiled, found, sees, must)


def test_two_programs_fit_in_a_multiprocessor():
    wanted = {  # by rows of a tile and head_dim
        "8.0": {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 2), (128, 128): (32, 2)},
        "8.6": {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 1), (128, 128): (32, 1)},
    }
    for capability, chosen in wanted.items():
        memory = hopper.SHARED_KIB[capability] * 1024
        found = {tile: sizes(*tile, memory) for tile in chosen}
        assert found == chosen, capability
