"""Runs an attention kernel and compares it with the equations, for the tests of each kernel.

CONTRIBUTING.md has the command that runs them on a GPU.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from attention_cases import AttentionKernelCase
from kernel_draws import KERNELS, ON_GPU
from tolerances import TOLERANCES, tolerance
from variants import RUNS_COMPILED

SEEDS = (0, 1, 2) if ON_GPU else (0,)  # the interpreter is slow

# Before JAX 0.12, the interpreter makes every thread wait for every barrier.
_CAN_INTERPRET_PREFILL = jax.__version_info__ >= (0, 12)


def each(
    given: Iterable[AttentionKernelCase],
    kept: tuple[str, ...] = (),
    of_a_week: Iterable[AttentionKernelCase] = (),
) -> Any:
    """Parametrizes a test by case.

    Args:
      given: The cases.
      kept: Beginnings of the names of those that are default tests; the others are `slow`.
      of_a_week: Cases that get the marker `weekly`.
    """
    rows = [
        pytest.param(case, marks=() if str(case).startswith(kept) else pytest.mark.slow)
        for case in given
    ]
    rows += [pytest.param(case, marks=pytest.mark.weekly) for case in of_a_week]
    return pytest.mark.parametrize("case", rows, ids=str)


def skip_unless_prefill_runs() -> None:
    """Skips a test of Hopper's kernel for prompts where it cannot run."""
    kernel_draws.skip_unless_hopper()
    if not ON_GPU and not _CAN_INTERPRET_PREFILL:
        pytest.skip("the interpreter of JAX before 0.12 cannot run the prefill kernel")


@contextlib.contextmanager
def running(
    case: AttentionKernelCase, capfd: Any, *, times: int = 2
) -> Iterator[Callable[[Any], Any]]:
    """Yields a function that runs the case's kernel on arguments.

    On a GPU and in the emulator, a kernel that does not need Hopper runs `times` times, and the
    results must be bit-equal: each run executes warps in another order.
    """
    if case.needs_hopper:
        skip_unless_prefill_runs()
    program, shapes = case.program(kernel_config=KERNELS)
    function = jax.jit(program)

    def run(arguments: Any) -> Any:
        assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, shapes)
        has_orders = ON_GPU or (RUNS_COMPILED and not case.needs_hopper)
        return kernel_draws.run(function, arguments, capfd, times=times if has_orders else 1)

    with contextlib.nullcontext() if case.needs_hopper else kernel_draws.on_gpu():
        yield run


def check_reference(case: AttentionKernelCase, seed: int, capfd: Any) -> None:
    """Compares a kernel's results with those of the equations."""
    arguments, mask = kernel_draws.draw_attention(case, seed)
    with running(case, capfd) as attend:
        assert_attention(case, arguments, mask, attend(arguments))


def assert_attention(
    case: AttentionKernelCase, arguments: Any, mask: np.ndarray, results: Any
) -> None:
    """Asserts that results are those of the equations."""
    out, *lse = results
    assert len(lse) == case.return_lse
    assert out.dtype == jnp.dtype(case.dtype) and out.shape == arguments[0].shape
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    for row in range(len(case.lengths)):
        wanted, wanted_lse = kernel_draws.expected_attention(case, arguments, mask, row)
        upto = kernel_draws.real_tokens(case, row, int(arguments[-1][row]))
        wanted, one = wanted[:upto], out[row, :upto]
        error = kernel_draws.relative_error(one, wanted)
        assert error < TOLERANCES["kernel"][case.dtype], f"sequence {row}"
        np.testing.assert_allclose(one, wanted, **tolerance("attention", case.dtype))
        is_empty = wanted_lse[:upto] == -np.inf
        assert not one[is_empty].any()
        if case.return_lse:
            assert lse[0].dtype == jnp.float32
            np.testing.assert_allclose(
                lse[0][row, :upto], wanted_lse[:upto], **tolerance("lse", case.dtype)
            )


def check_not_finite(case: AttentionKernelCase, capfd: Any) -> None:
    """Asserts that values that are not finite reach those alone who see them."""
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 0))
    with running(case, capfd, times=1) as attend:
        clean, num_reached = attend(arguments), 0
        for seed in range(9 if ON_GPU else 2):
            spoiled, sees, must = kernel_draws.spoil(case, arguments, mask, seed)
            kernel_draws.assert_reaches_those_who_see(attend(spoiled), clean, sees, must)
            num_reached += must.sum()
    assert num_reached > 0


def check_own_pages(case: AttentionKernelCase, capfd: Any) -> None:
    """Each head lists another subset of its four own pages, after any number of earlier pages."""
    (*floats, ids, counts, layer, lengths, first), mask = kernel_draws.draw_attention(case, 0)
    for head, row, place in np.ndindex(16, case.num_rows, 4):
        mask[0, head, row, 4 * row + place] = head >> place & 1
    packed, counts = cases.pack_lists(mask)
    # Pages that no list names hold NaN.
    is_listed = np.pad(mask.any((0, 1, 2)), (0, case.num_blocks - mask.shape[-1]))
    unlisted = np.repeat(~is_listed, 16)[:, None, None]
    floats[1:] = [jnp.where(unlisted, jnp.nan, x) for x in floats[1:]]
    padding = ((0, 0),) * 3 + ((0, ids.shape[-1] - packed.shape[-1]),)
    ids = jnp.asarray(np.pad(packed, padding, constant_values=2**30), jnp.int32)
    assert set(np.unique(counts % 8)) == set(range(8)) and counts.max() > 8
    arguments = (*floats, ids, jnp.asarray(counts, jnp.int32), layer, lengths, first)
    # Non-finite values reach only later queries of the heads that list their pages. One value is in
    # the first row, where some lists have less than four pages.
    sees = np.zeros((1, 3 * 64, 16), bool)
    for position, features in ((20, slice(None)), (70, 5), (150, slice(None))):
        place = (cases.LAYER, 0, position, 0, features)
        floats[2] = floats[2].at[place].set(jnp.nan)
        lists = mask[0, :, np.arange(192) // 64, position // 16]
        sees[0] |= lists & (np.arange(192) >= position)[:, None]
    with running(case, capfd) as attend:
        found, spoiled = attend(arguments), attend((*floats, *arguments[3:]))
    assert_attention(case, arguments, mask, found)
    must = sees & (np.arange(192) < 180)[:, None]
    kernel_draws.assert_reaches_those_who_see(spoiled, found, sees, must)
    # Before the last bad token, heads that list only the second one's page get NaN in feature 5.
    heads = mask[0, :, 2, 70 // 16] & ~mask[0, :, 2, 20 // 16]
    one, other = (np.asarray(x[0], np.float32)[0, 128:150, heads] for x in (spoiled, found))
    assert len(one) and np.isnan(one[..., 5]).all()
    np.testing.assert_array_equal(np.delete(one, 5, -1), np.delete(other, 5, -1))
