"""The attention kernels against the equations: interpreted, as compiled, or on a GPU.

Tests run Hopper's kernels and those for GPUs from Ampere on, which take GPUs in turn as compiled.
Some tests call the public functions.

On a machine with a GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -n 0 tests/gpu/test_kernels.py`
"""

import contextlib
import dataclasses
import functools

import attention_cases
import cases
import hopper
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from attention_cases import AttentionKernelCase, Decode, Pages, Prefill
from kernel_draws import KERNELS, ON_GPU
from tolerances import TOLERANCES, tolerance
from variants import INTERPRET, RUNS_COMPILED

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
)
from sketchwalk_jax.pallas_kernels.attention import attention
from sketchwalk_jax.pallas_kernels.attention import hopper as hopper_attention
from sketchwalk_jax.pallas_kernels.config import DECODE_HEADS, num_multiprocessors
from sketchwalk_jax.pallas_kernels.decode_attention import decode_attention

CASES = attention_cases.CASES + (attention_cases.LARGE_CASES if ON_GPU else ())
KEPT = ("prefill-4x2-H64-T250", "decode-8x1-H128-T500")  # the interpreter's default cases
SEEDS = (0, 1, 2) if ON_GPU else (0,)  # the interpreter is slow

# Before JAX 0.12, the interpreter makes every thread wait for every barrier.
CAN_INTERPRET_PREFILL = jax.__version_info__ >= (0, 12)

pytestmark = pytest.mark.interpreted


def on_each_kernel(cases, kept=(), of_a_week=()):
    """Parametrizes a test by case and kind of kernel; cases not kept get the marker `slow`.

    Cases `of_a_week` get the marker `weekly` instead.
    """
    rows = []
    for case in (*cases, *of_a_week):
        kinds = (True, False) if case.op == "prefill" else (False,)  # one kernel decodes
        marks = () if kept and str(case).startswith(kept) else pytest.mark.slow
        marks = pytest.mark.weekly if case in of_a_week else marks
        rows += [pytest.param(dataclasses.replace(case, is_hopper=x), marks=marks) for x in kinds]
    return pytest.mark.parametrize("case", rows, ids=str)


def skip_unless_it_runs(op):
    """Skips a test of Hopper's kernels where they cannot run."""
    kernel_draws.skip_unless_hopper()
    if op == "prefill" and not ON_GPU and not CAN_INTERPRET_PREFILL:
        pytest.skip("the interpreter of JAX before 0.12 cannot run the prefill kernel")


@pytest.fixture
def attend(case, capfd):
    """Returns a function that runs the case's kernel on arguments."""
    if case.is_hopper:
        skip_unless_it_runs(case.op)
    function, shapes = case.program(kernel_config=KERNELS)
    function = jax.jit(function)

    def run(arguments):
        assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, shapes)
        # As compiled, each run executes warps in another order.
        times = 2 if ON_GPU or (RUNS_COMPILED and not case.is_hopper) else 1
        return kernel_draws.run(function, arguments, capfd, times=times)

    with contextlib.nullcontext() if case.is_hopper else kernel_draws.on_gpu():
        yield run


@pytest.mark.parametrize("seed", SEEDS)
@on_each_kernel(CASES, KEPT)
def test_attention_equals_the_reference(case, seed, attend):
    arguments, mask = kernel_draws.draw_attention(case, seed)
    assert_attention(case, arguments, mask, attend(arguments))


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


# Cases, and sizes that they run with: a module's functions that return them, or its constants.
SIZES = [
    # Each of few thread blocks takes tile after tile.
    *(
        (
            Prefill(heads=(4, 2), lengths=(200, 70), head_dim=head_dim, is_hopper=True),
            hopper_attention,
            {"num_multiprocessors": programs},
        )
        for head_dim, programs in ((64, 3), (128, 1))
    ),
    # Small and large steps; fewer and more steps in flight than a list may have.
    *(
        (form(heads=(4, 2), lengths=(200, 70), head_dim=64), attention, {"sizes": sizes})
        for form, sizes in (
            (Prefill, (32, 1)),
            (Prefill, (64, 3)),
            (Pages, (32, 3)),
            (Pages, (64, 1)),
        )
    ),
    # Few and many parts, combined in rounds; two and more stages in shared memory.
    *(
        (
            Decode(heads=heads, lengths=(1300 if splits > 16 else 330, 70), head_dim=64),
            decode_attention,
            {"num_splits": splits, "sizes": (1, stages)},
        )
        for heads, splits, stages in (
            ((4, 2), 2, 4),
            ((4, 2), 20, 3),
            ((12, 1), 1, 2),
            ((12, 1), 3, 5),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "module", "sizes"), SIZES, ids=str)
def test_sizes_change_nothing_beyond_rounding(case, module, sizes, attend, monkeypatch):
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)
    arguments, mask = kernel_draws.draw_attention(case, 0)
    assert_attention(case, arguments, mask, attend(arguments))


OWN_PAGES = Pages(heads=(16, 1), lengths=(180,), lists="head", head_dim=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (dataclasses.replace(OWN_PAGES, is_hopper=True), None),
        pytest.param(OWN_PAGES, (64, 2), marks=pytest.mark.weekly),
        (OWN_PAGES, (32, 1)),
    ],
    ids=str,
)
def test_lists_name_any_of_a_rows_own_pages(case, sizes, attend, monkeypatch):
    """Each head lists another subset of its four own pages, after any number of earlier pages."""
    if sizes is not None:
        monkeypatch.setattr(attention, "sizes", lambda *_: sizes)
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
    found = attend(arguments)
    assert_attention(case, arguments, mask, found)
    # Non-finite values reach only later queries of the heads that list their pages. One value is in
    # the first row, where some lists have less than four pages.
    sees = np.zeros((1, 3 * 64, 16), bool)
    for position, features in ((20, slice(None)), (70, 5), (150, slice(None))):
        place = (cases.LAYER, 0, position, 0, features)
        floats[2] = floats[2].at[place].set(jnp.nan)
        lists = mask[0, :, np.arange(192) // 64, position // 16]
        sees[0] |= lists & (np.arange(192) >= position)[:, None]
    spoiled = attend((*floats, *arguments[3:]))
    must = sees & (np.arange(192) < 180)[:, None]
    kernel_draws.assert_reaches_those_who_see(spoiled, found, sees, must)
    # Before the last bad token, heads that list only the second one's page get NaN in feature 5.
    heads = mask[0, :, 2, 70 // 16] & ~mask[0, :, 2, 20 // 16]
    one, other = (np.asarray(x[0], np.float32)[0, 128:150, heads] for x in (spoiled, found))
    assert len(one) and np.isnan(one[..., 5]).all()
    np.testing.assert_array_equal(np.delete(one, 5, -1), np.delete(other, 5, -1))


ANY_ORDER = Decode(heads=(4, 2), lengths=(500, 290), lists="head", head_dim=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (dataclasses.replace(ANY_ORDER, block_size=block_size), splits)
        for block_size, splits in ((16, 2), (16, 1), (128, 3))
    ],
    ids=str,
)
def test_lists_are_read_in_any_order_and_to_their_count(case, splits, attend, monkeypatch):
    """The first head's list is empty; blocks that no list names hold NaN."""
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_, **__: splits)
    (*floats, ids, _, layer, lengths, first), mask = kernel_draws.draw_attention(case, 1)
    mask[:, 0], mask[..., 1] = False, False  # no head lists block 1
    packed, counts = cases.pack_lists(mask)
    unlisted = np.repeat(~mask.any((0, 1, 2)), case.block_size)[:, None, None]
    floats[1:] = [jnp.where(unlisted, jnp.nan, x) for x in floats[1:]]
    rng = np.random.default_rng(2)
    ids = rng.choice(kernel_draws.NONSENSE, ids.shape)
    for index in np.ndindex(counts.shape):
        ids[index][: counts[index]] = rng.permutation(packed[index][: counts[index]])
    integers = (jnp.asarray(x, jnp.int32) for x in (ids, counts))
    arguments = (*floats, *integers, layer, lengths, first)
    out, lse = attend(arguments)
    assert_attention(case, arguments, mask, (out, lse))
    assert not np.asarray(out[:, :, 0], np.float32).any()
    assert (np.asarray(lse[:, :, 0]) == -np.inf).all()


SHORT = {"heads": (2, 1), "lengths": (64,)}
TOO_LONG = "query and block_size must fit the kernel: it takes a"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        *(
            (
                Pages(heads=(2, 1), lengths=(128,), row_size=x, is_hopper=True),
                "row_size must fit the kernel: it takes a",
            )
            for x in (16, 32, 128)
        ),
        (Decode(**SHORT, head_dim=136), TOO_LONG),
        (Decode(**SHORT, block_size=32), "must fit the kernel: it takes a block_size of 16 or"),
        (
            Decode(**SHORT, head_dim=96),
            "must fit the kernel: it takes a head_dim of 64 or 128 in decode, not 96",
        ),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_take_is_refused_in_words(case, words):
    function, shapes = case.program()
    with pytest.raises(ValueError, match=words):
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
    ours = jax.jit(functools.partial(call, implementation="mosaic_gpu", kernel_config=KERNELS))
    out, lse = ours(query, key, value)
    wanted, wanted_lse = jax.jit(functools.partial(call, implementation="xla"))(query, key, value)
    for row, length in enumerate(new):
        upto = slice(1 if name == "decode" else length)
        one, other = (np.asarray(x[row, upto], np.float32) for x in (out, wanted))
        np.testing.assert_allclose(one, other, **tolerance("attention", case.dtype))
        np.testing.assert_allclose(
            lse[row, upto], wanted_lse[row, upto], **tolerance("lse", case.dtype)
        )


@pytest.mark.skipif(not INTERPRET, reason="the interpreter has other code")
def test_a_kernel_under_vmap_is_interpreted_too():
    """`vmap` traces the kernel of a jitted function again, after the call."""
    case = Decode(**SHORT, head_dim=64)
    (query, key, value, ids, counts, layer, lengths, _), _ = kernel_draws.draw_attention(case, 0)
    key, value = (jnp.nan_to_num(x) for x in (key, value))
    lists = BlockSelection(ids, counts, 64)

    def attend(query, implementation):
        options = {"layer": layer, "kv_lengths": lengths, "kernel_config": KERNELS}
        return block_sparse_decode(
            query, key, value, lists, implementation=implementation, **options
        )

    found, wanted = (
        jax.vmap(functools.partial(attend, implementation=x))(jnp.stack([query, -query]))
        for x in ("mosaic_gpu", "xla")
    )
    pair = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(*pair, **tolerance("attention", case.dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "has_offset"), [(70, True), (1, True), (192, False)])
def test_dense_attention_over_full_lists_is_that_of_xla(num_tokens, has_offset, capfd):
    skip_unless_it_runs("prefill" if num_tokens > 1 else "decode")
    rng = np.random.default_rng(num_tokens)
    offset = jnp.array([100, 0, 33]) if has_offset else None
    lengths = jnp.array([170, 1, 20])
    query = jnp.asarray(rng.normal(size=(3, num_tokens, 4, 64)), jnp.bfloat16)
    key, value = jnp.asarray(rng.normal(size=(2, 2, 3, 192, 2, 64)), jnp.bfloat16)
    where = {"layer": 1, "query_offset": offset, "kv_lengths": lengths}
    attend = functools.partial(dense_attention, query, key, value, **where)
    wanted = attend(implementation="xla")
    out = attend(implementation="mosaic_gpu", kernel_config=KERNELS)
    # Queries after the last key are padding, except in decode.
    first = np.asarray(offset)[:, None] if has_offset else 0
    is_query = first + np.arange(num_tokens) < np.asarray(lengths)[:, None]
    for row in range(3):
        own = is_query[row] | (num_tokens == 1)
        pair = (np.asarray(x[row], np.float32)[own] for x in (out, wanted))
        np.testing.assert_allclose(*pair, atol=0.02, rtol=0.02)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


# Spare heads, blocks of one and two chunks, one and two computing warpgroups, both dtypes.
NOT_FINITE = [
    Prefill(heads=(3, 1), lengths=(150, 200, 65), head_dim=64),
    Prefill(heads=(2, 1), lengths=(250, 300), block_size=128, return_lse=False),
    Prefill(heads=(2, 1), lengths=(300, 230), first_blocks=(2, 1)),
    Pages(heads=(4, 2), lengths=(130, 193), lists="head", dtype="float16"),
    Pages(heads=(2, 1), lengths=(330, 250), first_blocks=(2, 1), return_lse=False),
    Decode(heads=(4, 2), lengths=(193, 100), lists="kv_head", head_dim=64),
    Decode(heads=(8, 1), lengths=(300, 77), block_size=16),
    Decode(heads=(14, 2), lengths=(500,), head_dim=64),
]
NOT_FINITE_OF_A_WEEK = [
    Prefill(heads=(4, 2), lengths=(193, 70), lists="head", dtype="float16"),
    Prefill(heads=(2, 2), lengths=(130, 192), head_dim=64, block_size=128),
    Pages(heads=(3, 1), lengths=(300, 65), head_dim=64),
]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@on_each_kernel(NOT_FINITE, of_a_week=NOT_FINITE_OF_A_WEEK)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, attend):
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 0))
    clean, num_reached = attend(arguments), 0
    for seed in range(9 if ON_GPU else 2):
        spoiled, sees, must = kernel_draws.spoil(case, arguments, mask, seed)
        kernel_draws.assert_reaches_those_who_see(attend(spoiled), clean, sees, must)
        num_reached += must.sum()
    assert num_reached > 0


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_derivative_of_a_kernel_by_itself_is_refused_in_words(op):
    case = AttentionKernelCase(op=op, **SHORT, head_dim=64, is_hopper=True)
    function, _ = case.program(kernel_config=KernelConfig(interpret=True))
    (query, *others), _ = kernel_draws.draw_attention(case, 0)

    def total(query):
        return jnp.sum(function(query, *others)[0].astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="no derivative.*block_sparse_attention"):
        jax.eval_shape(jax.grad(total), query)


# Sizes that fit several thread blocks in a multiprocessor.


@pytest.mark.parametrize(
    ("capability", "wanted"),  # by rows per tile and head_dim
    [
        ("8.0", {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 2), (128, 128): (32, 2)}),
        ("8.6", {(64, 64): (64, 2), (128, 64): (64, 2), (64, 128): (64, 1), (128, 128): (32, 1)}),
    ],
)
def test_two_tiles_of_prefill_fit_in_a_multiprocessor(capability, wanted):
    memory = hopper.SHARED_KIB[capability] * 1024
    assert {tile: attention.sizes(*tile, memory) for tile in wanted} == wanted


@pytest.mark.parametrize(
    ("capability", "wanted"),  # for each head_dim
    [("8.0", [(3, 3), (1, 5)]), ("8.6", [(2, 3), (1, 3)]), ("9.0", [(4, 3), (2, 3)])],
)
def test_steps_of_decode_fit_in_a_multiprocessor(capability, wanted):
    memory = hopper.SHARED_KIB[capability] * 1024
    assert [decode_attention.sizes(x, memory) for x in DECODE_HEADS] == wanted


@pytest.mark.parametrize(
    ("units", "list_blocks", "expected"), [(8, 205, 16), (64, 205, 2), (256, 52, 1), (1, 1, 1)]
)
def test_splits_fill_the_programs_of_a_gpu(units, list_blocks, expected):
    split = functools.partial(decode_attention.num_splits, units, programs=132)
    assert split(list_blocks, 64) == split(4 * list_blocks, 16) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),  # a CPU compiles ahead of time
    [({"platform": "gpu", "core_count": 78}, 78), ({"platform": "cpu"}, 132)],
)
def test_programs_are_counted_for_the_default_device(facts, expected, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), facts)])
    assert num_multiprocessors() == expected
