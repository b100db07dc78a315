"""The kernels that select for prompts on GPUs from Ampere on, against plain JAX.

Runs in the interpreter, as compiled for an A100, or on a Hopper GPU, which runs them, too. Inputs
and expected results come from `test_prompt_selection_kernels.py`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_prompt_selection_kernels as hopper_tests
from test_prompt_selection_kernels import (
    CASES,
    CASES_OF_PAGES,
    KERNELS,
    PAGES,
    SHARES_CASES,
    SIZE,
    assert_selected_alike,
    prompt_selection,
)
from variants import RUNS_COMPILED

from sketchwalk_jax import SketchWalkConfig
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.page_scores import api
from sketchwalk_jax.policies.block_codes import BlockCodes

max_logits_kernel = pytest.importorskip("sketchwalk_jax.pallas_kernels.page_scores.max_logits")
page_scores_kernel = pytest.importorskip("sketchwalk_jax.pallas_kernels.page_scores.prompt_scores")

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    """Selects the kernels for other GPUs than Hopper; as compiled, for an A100."""
    if not RUNS_COMPILED:
        monkeypatch.setattr(dispatch, "kernels_here", lambda: "ampere")
        yield
        return
    import compiled_kernels

    with compiled_kernels.compiled_for("8.0"):
        yield


# Use separate programs: the other module's are traced for Hopper.
score = functools.partial(jax.jit, static_argnames="kernel_config")(hopper_tests.run.__wrapped__)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", hopper_tests.SCORED, ids=": ".join)
def test_the_kernels_find_what_plain_jax_finds(drawn, monkeypatch):
    monkeypatch.setattr(api, "_MOST_MAX_LOGITS", 2**15)  # splits some prompts
    monkeypatch.setattr(max_logits_kernel, "_PART", 3)  # splits keys over thread blocks
    drawn = hopper_tests.draw(*drawn)
    found, wanted = (np.asarray(score(*drawn, kernel_config=one)) for one in (KERNELS, None))
    _, _, rows, lengths = drawn
    is_row = np.asarray(rows * SIZE < lengths[:, None])[..., None]
    assert np.isfinite(found).all()
    found, wanted = (np.where(is_row, x, 0.0) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, **hopper_tests.BOUND)


@functools.partial(jax.jit, static_argnames=("scale", "exponent"))
def run_pages(queries, codes, first_row, lengths, *, scale, exponent):
    """Runs the kernels on queries `[B I R N C]`: max logits, factors, queries, sums of shares."""
    from sketchwalk_jax.pallas_kernels.page_scores.hopper import queries_per_row

    batch, num_rows, count, heads, channels = queries.shape
    kv_heads = codes.centre.shape[2]
    wanted = count * heads // kv_heads
    per_row = queries_per_row(wanted)
    more_rows = -num_rows % (max_logits_kernel.TILE // np.gcd(max_logits_kernel.TILE, per_row))
    own = jnp.moveaxis(queries.reshape(batch, num_rows, count, kv_heads, -1, channels), 3, 1)
    own = own.reshape(batch, kv_heads, num_rows, wanted, channels)
    own = jnp.pad(own, ((0, 0), (0, 0), (0, more_rows), (0, per_row - wanted), (0, 0)))
    own = own.reshape(batch, kv_heads, -1, channels)
    twice, factor = api.doubled_queries(own, per_row=per_row, wanted=wanted)
    where = {"first_row": first_row, "per_row": per_row, "interpret": KERNELS.interpret}
    stack = codes.as_layer().stack
    given, layer = (twice, stack.code, stack.step), jnp.int32(0)
    peaks = max_logits_kernel.max_logits_kernel(*given, layer=layer, lengths=lengths, **where)
    found = page_scores_kernel.page_scores_kernel(
        peaks, factor, own, codes.centre, scale=scale, exponent=exponent, **where
    )
    assert found.shape[2:] == (-(-per_row // 32), own.shape[2] // per_row, peaks.shape[2])
    return peaks, factor, own, found.sum(axis=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", SHARES_CASES)
def test_the_kernels_find_shares_of_pages(drawn, monkeypatch):
    case, kind, first_row = drawn
    monkeypatch.setitem(CASES, case, CASES_OF_PAGES[case])
    queries, codes, rows, lengths = hopper_tests.draw(case, kind)
    lengths = lengths - (rows[:, 0] - jnp.array(first_row)) * SIZE  # some keys are after the end
    first_row = jnp.array(first_row, jnp.int32)
    lengths, how = lengths.astype(jnp.int32), {"scale": 0.2, "exponent": 4}
    run_all = functools.partial(run_pages, queries, codes, first_row, lengths, **how)
    peaks, factor, query, found = run_all()
    of_peaks = functools.partial(hopper_tests.peaks_of_pages, query, factor, codes, lengths)
    wanted, largest = of_peaks(), of_peaks(of_magnitudes=True)
    found = np.asarray(found)
    per_row = query.shape[2] // found.shape[1]
    row = np.asarray(first_row)[:, None] + np.arange(query.shape[2]) // per_row
    is_written = np.arange(wanted.shape[2])[:, None] < PAGES * (row + 1)[:, None]
    is_written = is_written[:, None] & ~np.isnan(np.asarray(factor))[:, :, None]
    peaks = np.where(is_written, np.asarray(peaks), 0.0)
    # On a CPU the maximum of NaNs may be -inf, which leaves a page out as well.
    peaks = np.where(np.isneginf(peaks), np.float16(np.nan), peaks)
    wanted, largest = (np.where(is_written, x, 0.0) for x in (wanted, largest))
    np.testing.assert_array_equal(np.isnan(peaks), np.isnan(wanted))
    # Sums are rounded to 11 bits after each 16 channels; the reference rounds once.
    roundings = query.shape[-1] // 16 + 1
    away = np.abs(peaks.astype(np.float64) - wanted)
    assert not (away > roundings * 2.0**-11 * largest.astype(np.float64)).any()
    is_close = np.isclose(peaks, wanted, rtol=2**-10, atol=2**-9, equal_nan=True)
    assert is_close.mean() > 0.99  # most differ by at most one step
    wanted, is_seen = hopper_tests.shares_of_pages(
        peaks, factor, query, codes, first_row, per_row=per_row, **how
    )
    found, again = (np.where(is_seen, x, 0.0) for x in (found, np.asarray(run_all()[3])))
    np.testing.assert_array_equal(found, again)
    assert np.isfinite(found).all() and (kind != "random" or found.max() > 0.1)
    np.testing.assert_allclose(found, np.where(is_seen, wanted, 0.0), rtol=1e-3, atol=1e-6)


def test_what_the_kernels_do_not_take_goes_to_plain_jax():
    codes = BlockCodes.zeros(
        batch=1, num_blocks=4, block_size=SIZE, num_kv_heads=1, num_channels=64, dtype=jnp.float32
    )
    queries = jnp.ones((1, 4, 2, 2, 64), jnp.float32)
    rows, lengths = jnp.arange(4, dtype=jnp.int32)[None], jnp.array([4 * SIZE], jnp.int32)
    found, wanted = (
        score(queries, codes, rows, lengths, kernel_config=one) for one in (KERNELS, None)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 8), (128, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_representatives_are_those_of_plain_jax(size, dtype):
    head_dim, count = size
    query = np.random.default_rng(0).normal(size=(3, 3 * SIZE, 3, head_dim)).astype(np.float32)
    query[0, 5, 1, head_dim // 4] = np.nan
    query[0, 70, 2, head_dim // 2 - 1] = np.inf
    query[1, SIZE : 2 * SIZE] = query[1, SIZE]  # all equal
    begin, end = np.array([3, 0, 0]), np.array([150, 3 * SIZE, 2 * SIZE + 2])
    column = np.arange(3 * SIZE)[None]
    valid = jnp.asarray((column >= begin[:, None]) & (column < end[:, None]))
    query = jnp.asarray(query, dtype)
    represent = jax.jit(
        functools.partial(SketchWalkConfig.recommended().represent, count=count),
        static_argnames="kernel_config",
    )
    found, wanted = (
        np.asarray(represent(query, valid, kernel_config=one), np.float32)
        for one in (KERNELS, None)
    )
    np.testing.assert_allclose(found, wanted, atol=2**-8 * np.abs(wanted).max())


def test_a_prompt_is_selected_alike():
    select = prompt_selection()
    run = jax.jit(select, static_argnames="kernel_config")
    found, again, wanted = (run(kernel_config=one) for one in (KERNELS, KERNELS, None))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_selected_alike(found, wanted)
    if KERNELS.interpret:
        text = str(jax.make_jaxpr(functools.partial(select, kernel_config=KERNELS))())
        names = set(
            re.findall(r"=(max_logits_kernel|page_scores_kernel|block_\w+|representatives)\b", text)
        )
        assert names >= {
            "max_logits_kernel",
            "page_scores_kernel",
            "block_codes",
            "representatives",
        }
        assert not names & {"block_peaks", "block_scores", "block_residuals"}
