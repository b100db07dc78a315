"""Hopper's kernels of attention against the equations: interpreted, as compiled, or on a GPU.

These tests also call the public functions.

On a machine with a Hopper GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_kernels.py`
"""

import functools

import attention_cases
import cases
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from attention_cases import AttentionKernelCase, Decode, Pages, Prefill
from tolerances import TOLERANCES, tolerance
from variants import INTERPRET, RUNS_COMPILED, slow_unless

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
)
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.attention import hopper as prefill_module
from sketchwalk_jax.pallas_kernels.attention.hopper import hopper_attention_kernel
from sketchwalk_jax.pallas_kernels.decode_attention import hopper as decode_module
from sketchwalk_jax.pallas_kernels.decode_attention.hopper import hopper_decode_attention_kernel

ON_GPU = dispatch.is_hopper() and not RUNS_COMPILED
CONFIG = KernelConfig(interpret=True) if INTERPRET else None
SEEDS, TIMES = ((0, 1, 2), 2) if ON_GPU else ((0,), 1)  # the interpreter is slow
KERNELS = {"prefill": hopper_attention_kernel, "decode": hopper_decode_attention_kernel}
CASES = attention_cases.CASES + (attention_cases.LARGE_CASES if ON_GPU else ())
KEPT = ("prefill-4x2-H64-T250", "decode-8x1-H128-T500")  # the interpreter's default cases

# Before JAX 0.12, the interpreter makes every thread wait for every barrier.
CAN_INTERPRET_PREFILL = jax.__version_info__ >= (0, 12)

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(
        jax.default_backend() != "cpu" and not ON_GPU,
        reason="the kernels need a GPU of compute capability 9.0, or the interpreter a CPU",
    ),
]


def skip_unless_it_runs(op):
    if op == "prefill" and not ON_GPU and not CAN_INTERPRET_PREFILL:
        pytest.skip("the interpreter of JAX before 0.12 cannot run the prefill kernel")


@functools.cache
def compiled(case):
    function, shapes = case.program(KERNELS[case.op], kernel_config=CONFIG)
    return jax.jit(function), shapes


def run(case, arguments, capfd):
    function, shapes = compiled(case)
    assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, shapes)
    return kernel_draws.run(function, arguments, capfd, times=TIMES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case", slow_unless(lambda case: str(case).startswith(KEPT), CASES), ids=str
)
def test_attention_equals_the_reference(case, seed, capfd):
    skip_unless_it_runs(case.op)
    arguments, mask = kernel_draws.draw_attention(case, seed)
    assert_attention(case, arguments, mask, run(case, arguments, capfd))


def assert_attention(case, arguments, mask, results):
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


@pytest.mark.slow
def test_lists_name_any_of_a_rows_own_pages(capfd):
    """Each head lists another subset of its four own pages, after any number of earlier pages."""
    skip_unless_it_runs("prefill")
    case = Pages(heads=(16, 1), lengths=(180,), lists="head", head_dim=64)
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
    found = run(case, arguments, capfd)
    assert_attention(case, arguments, mask, found)
    # Non-finite values reach only later queries of the heads that list their pages. One value is in
    # the first row, where some lists have less than four pages.
    sees = np.zeros((1, 3 * 64, 16), bool)
    for position, features in ((20, slice(None)), (70, 5), (150, slice(None))):
        place = (cases.LAYER, 0, position, 0, features)
        floats[2] = floats[2].at[place].set(jnp.nan)
        lists = mask[0, :, np.arange(192) // 64, position // 16]
        sees[0] |= lists & (np.arange(192) >= position)[:, None]
    spoiled = run(case, (*floats, *arguments[3:]), capfd)
    must = sees & (np.arange(192) < 180)[:, None]
    kernel_draws.assert_reaches_those_who_see(spoiled, found, sees, must)
    # Before the last bad token, heads that list only the second one's page get NaN in feature 5.
    heads = mask[0, :, 2, 70 // 16] & ~mask[0, :, 2, 20 // 16]
    one, other = (np.asarray(x[0], np.float32)[0, 128:150, heads] for x in (spoiled, found))
    assert len(one) and np.isnan(one[..., 5]).all()
    np.testing.assert_array_equal(np.delete(one, 5, -1), np.delete(other, 5, -1))


@pytest.mark.parametrize("row_size", [16, 32, 128])
def test_rows_that_do_not_fit_lists_of_pages_are_refused(row_size):
    case = Pages(heads=(2, 1), lengths=(128,), row_size=row_size)
    function, shapes = case.program(hopper_attention_kernel)
    with pytest.raises(ValueError, match="row_size must fit the kernel: it takes a"):
        jax.eval_shape(function, *shapes)


@pytest.mark.parametrize("changes", [{"block_size": 32}, {"head_dim": 136}], ids=str)
def test_tokens_that_the_decode_kernel_cannot_take_are_refused(changes):
    case = Decode(heads=(2, 1), lengths=(64,), **changes)
    function, shapes = case.program(hopper_decode_attention_kernel)
    with pytest.raises(ValueError, match="query and block_size must fit the kernel: it takes a"):
        jax.eval_shape(function, *shapes)


# The public functions shift queries to block boundaries and make lists themselves.
PUBLIC = {
    "prefill": ((70, 33), None),
    "chunk": ((40, 20), (50, 77)),
    "decode": ((70, 129), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_take_the_kernels(name):
    """Compares with the XLA implementation, which has tests of its own."""
    new, offset = PUBLIC[name]
    op = "decode" if name == "decode" else "prefill"
    skip_unless_it_runs(op)
    lengths = new if name == "decode" else (100, 100)
    case = AttentionKernelCase(op=op, heads=(4, 2), lengths=lengths, head_dim=64)
    (query, key, value, ids, counts, layer, *_), _ = kernel_draws.draw_attention(case, 5)
    lengths = jnp.asarray(np.add(new, offset or 0), jnp.int32)
    options = {"layer": layer, "kv_lengths": lengths, "return_lse": True}
    key, value = (jnp.nan_to_num(x) for x in (key, value))
    if name == "decode":
        function = block_sparse_decode
    else:
        function = block_sparse_attention
        query = query[:, : max(new)]
        options["query_offset"] = None if offset is None else jnp.asarray(offset, jnp.int32)
        rows = -(-(max(new) + (63 if offset else 0)) // 64)
        ids, counts = ids[:, :, :rows], counts[:, :, :rows]
    selection = BlockSelection(ids, counts, 64)
    call = functools.partial(function, selection=selection, **options)
    ours = jax.jit(functools.partial(call, implementation="mosaic_gpu", kernel_config=CONFIG))
    out, lse = ours(query, key, value)
    wanted, wanted_lse = jax.jit(functools.partial(call, implementation="xla"))(query, key, value)
    for row, length in enumerate(new):
        upto = slice(1 if name == "decode" else length)
        one, other = (np.asarray(x[row, upto], np.float32) for x in (out, wanted))
        np.testing.assert_allclose(one, other, **tolerance("attention", case.dtype))
        np.testing.assert_allclose(
            lse[row, upto], wanted_lse[row, upto], **tolerance("lse", case.dtype)
        )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("programs", [1, 3])
def test_each_of_few_programs_takes_tile_after_tile(programs, head_dim, capfd, monkeypatch):
    skip_unless_it_runs("prefill")
    monkeypatch.setattr(prefill_module, "num_multiprocessors", lambda: programs)
    case = Prefill(heads=(4, 2), lengths=(200, 70), head_dim=head_dim)
    assert_attention_of_a_new_program(case, capfd)


# Splits from 5 on halve the buffers; steps of 128 keys have two blocks.
@pytest.mark.slow
@pytest.mark.parametrize(("splits", "step"), [(1, 64), (2, 64), (5, 64), (2, 128)])
def test_sizes_of_decode_change_nothing_beyond_rounding(splits, step, capfd, monkeypatch):
    monkeypatch.setattr(decode_module, "num_splits", lambda *_, **__: splits)
    monkeypatch.setattr(decode_module, "_STEP", step)
    case = Decode(heads=(4, 2), lengths=(500, 70))
    assert_attention_of_a_new_program(case, capfd)


def assert_attention_of_a_new_program(case, capfd):
    function, _ = case.program(KERNELS[case.op], kernel_config=CONFIG)
    arguments, mask = kernel_draws.draw_attention(case, 0)
    kernel_draws.poison(jax.eval_shape(function, *arguments))
    assert_attention(case, arguments, mask, jax.jit(function)(*arguments))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [70, 1])
def test_dense_attention_behind_a_cache_is_that_of_xla(num_tokens, capfd):
    skip_unless_it_runs("prefill" if num_tokens > 1 else "decode")
    rng = np.random.default_rng(num_tokens)
    offset, lengths = jnp.array([100, 0, 33]), jnp.array([170, 1, 20])
    query = jnp.asarray(rng.normal(size=(3, num_tokens, 4, 64)), jnp.bfloat16)
    key, value = jnp.asarray(rng.normal(size=(2, 2, 3, 192, 2, 64)), jnp.bfloat16)
    where = {"layer": 1, "query_offset": offset, "kv_lengths": lengths}
    attend = functools.partial(dense_attention, query, key, value, **where)
    wanted = attend(implementation="xla")
    out = attend(implementation="mosaic_gpu", kernel_config=CONFIG)
    # Queries after the last key are padding, except in decode.
    is_query = np.asarray(offset)[:, None] + np.arange(num_tokens) < np.asarray(lengths)[:, None]
    for row in range(3):
        own = is_query[row] | (num_tokens == 1)
        pair = (np.asarray(x[row], np.float32)[own] for x in (out, wanted))
        np.testing.assert_allclose(*pair, atol=0.02, rtol=0.02)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


# Spare heads, blocks of one and two chunks, one and two computing warpgroups, both dtypes.
NOT_FINITE = [
    Prefill(heads=(3, 1), lengths=(150, 200, 65), head_dim=64),
    Prefill(heads=(2, 1), lengths=(250, 300), block_size=128, return_lse=False),
    Prefill(heads=(4, 2), lengths=(193, 70), lists="head", dtype="float16"),
    Prefill(heads=(2, 2), lengths=(130, 192), head_dim=64, block_size=128),
    Prefill(heads=(2, 1), lengths=(300, 230), first_blocks=(2, 1)),
    Pages(heads=(3, 1), lengths=(300, 65), head_dim=64),
    Pages(heads=(4, 2), lengths=(130, 193), lists="head", dtype="float16"),
    Pages(heads=(2, 1), lengths=(330, 250), first_blocks=(2, 1), return_lse=False),
    Decode(heads=(4, 2), lengths=(193, 100), lists="kv_head", head_dim=64),
    Decode(heads=(8, 1), lengths=(300, 77), block_size=16),
    Decode(heads=(14, 2), lengths=(500,), head_dim=64),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    skip_unless_it_runs(case.op)
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 0))
    kernel_draws.assert_spoilt_reaches_those_who_see(
        functools.partial(run, case, capfd=capfd), case, arguments, mask, seeds=9 if ON_GPU else 2
    )


@pytest.mark.parametrize("op", KERNELS)
def test_a_derivative_of_a_kernel_by_itself_is_refused_in_words(op):
    case = AttentionKernelCase(op=op, heads=(2, 1), lengths=(64,), head_dim=64)
    function, _ = case.program(KERNELS[op], kernel_config=KernelConfig(interpret=True))
    (query, *others), _ = kernel_draws.draw_attention(case, 0)

    def total(query):
        return jnp.sum(function(query, *others)[0].astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="no derivative.*block_sparse_attention"):
        jax.eval_shape(jax.grad(total), query)
