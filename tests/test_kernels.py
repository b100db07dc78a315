"""The kernels against the equations: in Pallas' interpreter, or on a GPU with larger cases too.

On a machine with a Hopper GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_kernels.py`
"""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import kernel_cases
import kernel_draws
import numpy as np
import pytest
import tiny
from tolerances import TOLERANCES, tolerance
from variants import INTERPRET, RUNS_COMPILED, slow_unless

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    SketchWalkConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
    dispatch,
    generate,
    sketchwalk_attention,
)
from sketchwalk_jax.policies.quest import QuestConfig
from sketchwalk_jax.policies.streaming import StreamingConfig

ON_GPU = dispatch.is_hopper() and not RUNS_COMPILED
CONFIG = KernelConfig(interpret=True) if INTERPRET else None
SEEDS = (0, 1, 2) if ON_GPU else (0,)  # the interpreter is slow
CASES = kernel_cases.CASES + (kernel_cases.LARGE_CASES if ON_GPU else ())
ATTENTION_CASES = [case for case in CASES if case.op != "select"]
SELECTION_CASES = [case for case in CASES if case.op == "select"]

# Before JAX 0.12 every thread must wait for every barrier there is, its own or not.
CAN_INTERPRET_PREFILL = jax.__version_info__ >= (0, 12)

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(
        jax.default_backend() != "cpu" and not ON_GPU,
        reason="the kernels need a GPU of compute capability 9.0, or the interpreter a CPU",
    ),
]


# Together they have every form of lists, offsets, block sizes and both widths of heads.
KEPT = {
    "prefill": (
        "3x1-H64-T65,191-shared",
        "2x1-H128-T300,200-",
        "4x2-H64-T193-head",
        "4x2-H64-T250",
    ),
    "decode": ("8x1-H128-T500", "4x2-H128-T193-head", "14x2-H128-T129-kv_head", "4x1-H128-T130"),
}


def is_kept(case):
    """Whether the interpreter runs a case in the default run; a GPU runs all."""
    return ON_GPU or any(f"{case.op}-{name}" in str(case) for name in KEPT[case.op])


def skip_unless_it_runs(op):
    if op == "prefill" and not ON_GPU and not CAN_INTERPRET_PREFILL:
        pytest.skip("the interpreter of JAX before 0.12 cannot run the prefill kernel")


@functools.cache
def compiled(case):
    function, shapes = kernel_cases.program(case, kernel_config=CONFIG)
    return jax.jit(function), shapes


def run_twice(case, arguments, capfd):
    """The results of two runs in memory full of NaN, which are the same bit for bit."""
    function, shapes = compiled(case)
    assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, shapes)
    runs = []
    for _ in range(2 if ON_GPU else 1):
        kernel_draws.poison(jax.eval_shape(function, *arguments))
        runs.append(jax.block_until_ready(function(*arguments)))
    for one, other in zip(*map(jax.tree.leaves, (runs[0], runs[-1])), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    return runs[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", slow_unless(is_kept, ATTENTION_CASES), ids=str)
def test_attention_equals_the_reference(case, seed, capfd):
    skip_unless_it_runs(case.op)
    arguments, mask = kernel_draws.draw_attention(case, seed)
    assert_attention(case, arguments, mask, run_twice(case, arguments, capfd))


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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", SELECTION_CASES, ids=str)
def test_selection_equals_the_reference_exactly(case, seed, capfd):
    arguments = kernel_draws.draw_scores(case, seed)
    selection = run_twice(case, arguments, capfd)
    np.testing.assert_array_equal(selection.counts[:, 0], arguments[2])
    wanted = kernel_draws.expected_ids(case, arguments)
    np.testing.assert_array_equal(selection.ids[:, 0], wanted)


@pytest.mark.slow
def test_lists_name_any_of_a_rows_own_pages(capfd):
    """Each head lists another subset of the four, behind pages of which it has any number."""
    skip_unless_it_runs("prefill")
    case = kernel_cases.Pages(heads=(16, 1), lengths=(250,), lists="head", head_dim=64)
    (*floats, ids, counts, layer, lengths, first), mask = kernel_draws.draw_attention(case, 1)
    for head, row, place in np.ndindex(16, case.num_rows, 4):
        mask[0, head, row, 4 * row + place] = head >> place & 1
    packed, counts = cases.pack_lists(mask)
    # Whoever attends to what no list names sees NaN.
    is_listed = np.pad(mask.any((0, 1, 2)), (0, case.num_blocks - mask.shape[-1]))
    unlisted = np.repeat(~is_listed, 16)[:, None, None]
    floats[1:] = [jnp.where(unlisted, jnp.nan, x) for x in floats[1:]]
    padding = ((0, 0),) * 3 + ((0, ids.shape[-1] - packed.shape[-1]),)
    ids = jnp.asarray(np.pad(packed, padding, constant_values=2**30), jnp.int32)
    assert set(np.unique(counts % 8)) == set(range(8)) and counts.max() > 8
    arguments = (*floats, ids, jnp.asarray(counts, jnp.int32), layer, lengths, first)
    found = run_twice(case, arguments, capfd)
    assert_attention(case, arguments, mask, found)
    # Values that are not finite, one of them in the first row, some of whose lists have less than
    # four pages, reach later queries of the heads that list their pages; all others are the same.
    sees = np.zeros((1, 4 * 64, 16), bool)
    for position, features in ((20, slice(None)), (70, 5), (210, slice(None))):
        place = (kernel_cases.LAYER, 0, position, 0, features)
        floats[2] = floats[2].at[place].set(jnp.nan)
        lists = mask[0, :, np.arange(256) // 64, position // 16]
        sees[0] |= lists & (np.arange(256) >= position)[:, None]
    spoiled = run_twice(case, (*floats, *arguments[3:]), capfd)
    must = sees & (np.arange(256) < 250)[:, None]
    kernel_draws.assert_reaches_those_who_see(spoiled, found, sees, must)
    # A later row sees no more of a value than the feature that is not finite.
    heads = mask[0, :, 2, 70 // 16] & ~mask[0, :, 2, 20 // 16]
    one, other = (np.asarray(x[0], np.float32)[0, 128:192, heads] for x in (spoiled, found))
    assert len(one) and np.isnan(one[..., 5]).all()
    np.testing.assert_array_equal(np.delete(one, 5, -1), np.delete(other, 5, -1))


@pytest.mark.parametrize("row_size", [16, 32, 128])
def test_rows_that_do_not_fit_lists_of_pages_are_refused(row_size):
    case = kernel_cases.Pages(heads=(2, 1), lengths=(128,), row_size=row_size)
    function, shapes = kernel_cases.program(case)
    with pytest.raises(ValueError, match="row_size must fit the kernel: it takes a"):
        jax.eval_shape(function, *shapes)


# The public functions, which shift queries to block boundaries and bring lists of their own.
PUBLIC = {
    "prefill": ((70, 33), None),
    "chunk": ((40, 20), (50, 77)),
    "decode": ((70, 129), None),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_take_the_kernels(name):
    """Against the XLA implementation, whose own tests are elsewhere."""
    new, offset = PUBLIC[name]
    op = "decode" if name == "decode" else "prefill"
    skip_unless_it_runs(op)
    lengths = new if name == "decode" else (100, 100)
    case = kernel_cases.AttentionKernelCase(op=op, heads=(4, 2), lengths=lengths, head_dim=64)
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


# Lists that no rounding changes
GENERATION = {
    "everything": SketchWalkConfig.paper(density=1.0),
    "everything by the default": SketchWalkConfig.recommended(density=1.0),
    "a window": StreamingConfig(density=0.5),
    "all pages of each head": QuestConfig(density=1.0),
}


@pytest.mark.skipif(INTERPRET, reason="too much for the interpreter")
@pytest.mark.parametrize("name", GENERATION)
def test_generation_takes_the_kernels_and_answers_alike(name):
    """Prefill and decode of a model: stacked caches, layers in a scan, tokens in a loop."""
    tokens, lengths = tiny.prompts(300, 170)
    model = dataclasses.replace(tiny.MODEL, head_dim=64)  # smaller ones are decoded on XLA
    params = tiny.params(jnp.bfloat16, model)
    options = {"policy": GENERATION[name], "max_new_tokens": 3, "lengths": jnp.asarray(lengths)}

    def run(params, tokens, implementation):
        out = generate(params, tokens, model_config=model, implementation=implementation, **options)
        return out.cache.key

    program = jax.jit(run, static_argnames="implementation")
    if ON_GPU:
        text = program.lower(params, tokens, implementation=None).as_text()
        assert "block_sparse_decode" in text
        assert ("block_sparse_prefill" in text) == ("prefill" in GENERATION[name].phases)
        assert "mosaic_gpu" not in program.lower(params, tokens, implementation="xla").as_text()
    keys = program(params, tokens, implementation=None)
    wanted = program(params, tokens, implementation="xla")
    for row, length in enumerate(lengths):
        one, other = (np.asarray(x[:, row, :length], np.float32) for x in (keys, wanted))
        # Deeper layers see the rounding of all before them: distances of whole layers.
        distance = np.linalg.norm((one - other).reshape(len(one), -1), axis=1)
        assert (distance < 0.03 * np.linalg.norm(other.reshape(len(one), -1), axis=1)).all()


# Few programs, so that each has several tiles.
CHOICES = {
    "prefill": (
        {"prefill_programs": 3},
        {"prefill_programs": 2, "prefill_stages": 3, "prefill_value_stages": 2},
        {"prefill_programs": 1, "prefill_stages": 3, "prefill_value_stages": 3},
    ),
    "decode": ({"decode_splits": 2}, {"decode_keys": 128, "decode_buffer_kib": 96}),
}


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        pytest.param(op, changes, marks=[pytest.mark.slow] if index and not ON_GPU else [])
        for op in CHOICES
        for index, changes in enumerate(CHOICES[op])
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(f"{k}={v}" for k, v in x.items()),
)
def test_sizes_change_nothing_beyond_rounding(op, changes, capfd):
    skip_unless_it_runs(op)
    head_dim = 64 if "prefill_stages" in changes else 128
    case = kernel_cases.AttentionKernelCase(
        op=op, heads=(4, 2), lengths=(330, 70), head_dim=head_dim
    )
    kernel_config = dataclasses.replace(CONFIG or KernelConfig(), **changes)
    function, _ = kernel_cases.program(case, kernel_config=kernel_config)
    arguments, mask = kernel_draws.draw_attention(case, 0)
    kernel_draws.poison(jax.eval_shape(function, *arguments))
    assert_attention(case, arguments, mask, jax.jit(function)(*arguments))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


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
    # Queries behind the keys are padding, but for the one of a token.
    is_query = np.asarray(offset)[:, None] + np.arange(num_tokens) < np.asarray(lengths)[:, None]
    for row in range(3):
        own = is_query[row] | (num_tokens == 1)
        pair = (np.asarray(x[row], np.float32)[own] for x in (out, wanted))
        np.testing.assert_allclose(*pair, atol=0.02, rtol=0.02)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


# Spare heads, blocks of one piece and of two, one warpgroup that computes and two, both dtypes.
NOT_FINITE = [
    kernel_cases.Prefill(heads=(3, 1), lengths=(150, 65), head_dim=64),
    kernel_cases.Decode(heads=(4, 2), lengths=(193, 100), lists="kv_head", head_dim=64),
    kernel_cases.Prefill(heads=(3, 1), lengths=(150, 200, 65), head_dim=64),
    kernel_cases.Prefill(heads=(2, 1), lengths=(250, 300), block_size=128, return_lse=False),
    kernel_cases.Prefill(heads=(4, 2), lengths=(193, 70), lists="head", dtype="float16"),
    kernel_cases.Prefill(heads=(2, 2), lengths=(130, 192), head_dim=64, block_size=128),
    kernel_cases.Prefill(heads=(2, 1), lengths=(300, 230), first_blocks=(2, 1)),
    kernel_cases.Pages(heads=(3, 1), lengths=(300, 65), head_dim=64),
    kernel_cases.Pages(heads=(4, 2), lengths=(193, 270), lists="head", dtype="float16"),
    kernel_cases.Pages(heads=(2, 1), lengths=(330, 250), first_blocks=(2, 1), return_lse=False),
    kernel_cases.Decode(heads=(8, 1), lengths=(300, 77), block_size=16),
    kernel_cases.Decode(heads=(14, 2), lengths=(500,), head_dim=64),
]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "case", slow_unless(lambda case: ON_GPU or case in NOT_FINITE[:2], NOT_FINITE), ids=str
)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    skip_unless_it_runs(case.op)
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 0))
    run = functools.partial(run_twice, case, capfd=capfd)
    kernel_draws.assert_spoilt_reaches_those_who_see(
        run, case, arguments, mask, seeds=9 if ON_GPU else 2
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["paper", "recommended"])
def test_a_layer_before_a_bad_token_is_equal_in_earlier_blocks_and_finite(name):
    """Rows of the bad token's own block may list other blocks: selection is block-causal."""
    skip_unless_it_runs("prefill")
    rng, config = np.random.default_rng(3), getattr(SketchWalkConfig, name)(density=0.6)
    arrays = [rng.standard_normal((2, 250, heads, 64), np.float32) for heads in (2, 1, 1)]
    options = {"policy": config, "implementation": "mosaic_gpu", "kernel_config": CONFIG}

    @jax.jit
    def call(*arrays):
        out, _ = sketchwalk_attention(*(x.astype(jnp.bfloat16) for x in arrays), **options)
        return out.astype(jnp.float32)

    plain = call(*arrays)
    for which, position in ((2, 150), (1, 100), (0, 220)):
        spoiled = [x.copy() for x in arrays]
        spoiled[which][0, position] = np.nan
        out = call(*spoiled)
        np.testing.assert_array_equal(
            out[0, : position // 64 * 64], plain[0, : position // 64 * 64]
        )
        np.testing.assert_array_equal(out[1], plain[1])
        assert np.isfinite(out[0, :position]).all() and np.isnan(out[0, position]).all()


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_derivative_of_a_kernel_by_itself_is_refused_in_words(op):
    case = kernel_cases.AttentionKernelCase(op=op, heads=(2, 1), lengths=(64,), head_dim=64)
    function, _ = kernel_cases.program(case, kernel_config=KernelConfig(interpret=True))
    (query, *others), _ = kernel_draws.draw_attention(case, 0)

    def total(query):
        return jnp.sum(function(query, *others)[0].astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="no derivative.*block_sparse_attention"):
        jax.eval_shape(jax.grad(total), query)
