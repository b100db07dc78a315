"""The kernels that select for a token by the recommended policy, against plain JAX.

Runs in the interpreter, as compiled, or on a Hopper GPU.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from page_score_cases import PageScoresCase
from test_prompt_selection_kernels import KERNELS, SIZE, coded
from variants import slow_unless

from sketchwalk_jax import algorithm
from sketchwalk_jax.pallas_kernels.top_k import api
from sketchwalk_jax.policies import block_codes
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.ranks import Heads
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.precision import LARGEST_LOGIT
from sketchwalk_jax.selection import block_budget
from sketchwalk_jax.walk import WalkState

token_scores = pytest.importorskip("sketchwalk_jax.pallas_kernels.page_scores.token_scores")

pytestmark = pytest.mark.interpreted

PAGES, PAGE = 4, 16  # pages of a block, keys of a page
# Heads, key/value heads, head_dim, blocks of the cache.
TOKEN_SHAPES = [(4, 1, 128, 32), (4, 1, 64, 33), (6, 2, 64, 45), (14, 2, 64, 63), (4, 1, 128, 64)]


def assert_ranks_find(select_on, ranks, wanted):
    """Checks that a rank finds one device's lists from both ranks' page scores."""
    sent = [[], []]
    for rank in range(ranks):

        def keep(x, axis, own=sent[rank]):
            own.append(x)
            return jnp.concatenate([x] * ranks, axis=axis)

        select_on(rank, keep)
    turns = zip(*sent, strict=True)
    found = select_on(1, lambda _, axis: jnp.concatenate(next(turns), axis=axis))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def draw_token(heads, kv_heads, head_dim, blocks, kind, *, second=17 * SIZE):
    """Draws queries, quantized keys, the last layer's page scores, and lengths down to 1 and 0."""
    rng = np.random.default_rng(heads)
    lengths = np.array([blocks * SIZE - 9, second, 1, 0])
    key = rng.normal(size=(4, blocks * SIZE, kv_heads, head_dim // 2))
    key += 3.0 * rng.normal(size=(1, 1, kv_heads, head_dim // 2))
    queries = rng.normal(size=(4, 1, heads, head_dim)) * 2.0
    slow = head_dim // 4
    if kind == "equal":
        queries[:], key[:] = queries[:1, :, :1], key[:, :1]
    if kind == "nan":
        key[0, 5 * SIZE : 6 * SIZE] = key[1, 7, 0, 1] = np.nan
        queries[0, 0, 0, slow], queries[0, 0, 1, slow + 1] = np.inf, np.nan
        queries[1] = np.nan  # no logit is finite
    if kind == "huge":
        key[0, 7] *= 1e20
        queries[0, :, ::2] *= 1e18  # as in `test_prompt_selection_kernels`
        queries[0, :, 1::2] *= 1e12
    lengths = jnp.asarray(lengths, jnp.int32)
    codes = coded(jnp.asarray(key, jnp.bfloat16), lengths)
    evidence = jnp.asarray(rng.random((4, 1, blocks * PAGES)) ** 4, jnp.float32)
    return jnp.asarray(queries, jnp.bfloat16), codes, WalkState(evidence, jnp.int32(1)), lengths


@functools.partial(jax.jit, static_argnames=("policy", "kernel_config"))
def select_token(policy, queries, codes, walk, lengths, *, kernel_config):
    span = Span.of_tokens(lengths - 1, SIZE)
    layer = jnp.zeros((), jnp.int32)
    batch, _, _, head_dim = queries.shape
    key = jnp.zeros((1, batch, 1, codes.centre.shape[2], head_dim), queries.dtype)  # not read
    return policy.select(
        queries, key, codes, walk, layer=layer, span=span, kernel_config=kernel_config
    )


def check_tokens_are_selected_alike(policy, drawn):
    found, wanted = (select_token(policy, *drawn, kernel_config=one) for one in (KERNELS, None))
    scores = np.asarray(wanted[1].scores)[:, 0]
    bound = {"rtol": 2.0**-8 / policy.exponent, "atol": 1e-6}  # powers are rounded to bfloat16
    np.testing.assert_allclose(found[1].scores[:, 0], scores, **bound)
    assert found[1].layers == wanted[1].layers == drawn[2].layers + 1
    np.testing.assert_array_equal(found[0].counts, wanted[0].counts)
    lists = [np.asarray(one[0].ids)[:, 0, 0] for one in (found, wanted)]
    assert lists[0].shape == lists[1].shape
    for own, other, row, length in zip(*lists, scores, np.asarray(drawn[3]), strict=True):
        # The same pages, except for ties within rounding.
        for missed, taken in zip(
            sorted(set(other) - set(own)), sorted(set(own) - set(other)), strict=True
        ):
            np.testing.assert_allclose(row[missed], row[taken], rtol=2.0 * bound["rtol"])
        assert not length or (length - 1) // PAGE in own
        assert (np.diff(own) >= 0).all()
    for one, other in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(select_token(policy, *drawn, kernel_config=KERNELS)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


POLICY = SketchWalkConfig.recommended(
    density=0.3, dense_layers=1, num_layers=4, sink_tokens=48, min_tokens=128, exponent=4, decay=0.7
)
TOKEN_CASES = [
    (TOKEN_SHAPES[0], "nan"),
    (TOKEN_SHAPES[1], "random"),
    (TOKEN_SHAPES[2], "equal"),
    (TOKEN_SHAPES[2], "nan"),
    (TOKEN_SHAPES[3], "huge"),
    (TOKEN_SHAPES[3], "nan"),
    (TOKEN_SHAPES[4], "random"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind"), TOKEN_CASES, ids=str)
def test_tokens_are_selected_alike(shape, kind):
    check_tokens_are_selected_alike(POLICY, draw_token(*shape, kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(9, 1, 64, jnp.bfloat16), (2, 2, 32, jnp.bfloat16), (2, 1, 64, jnp.float32)],
)
def test_tokens_that_the_kernels_do_not_take_go_to_plain_jax(heads, kv_heads, head_dim, dtype):
    queries, *rest = draw_token(heads, kv_heads, head_dim, 20, "random")
    drawn = (queries.astype(dtype), *rest)
    found, wanted = (select_token(POLICY, *drawn, kernel_config=one)[0] for one in (KERNELS, None))
    np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.mark.slow
def test_ranks_that_share_the_heads_make_the_lists_of_one_device():
    heads, kv_heads, ranks = 6, 2, 2
    queries, codes, walk, lengths = draw_token(heads, kv_heads, 64, 45, "nan")
    wanted = select_token(POLICY, queries, codes, walk, lengths, kernel_config=KERNELS)

    def select_on(rank, gather):
        class Ranks(Heads):
            def gather(self, x, *, axis):
                return gather(x, axis)

        span = Span.of_tokens(lengths - 1, SIZE)
        shared = Ranks("tensor", ranks, heads, kv_heads)
        own = jax.tree.map(lambda x: x[:, :, rank, None], codes)
        return POLICY.select(
            jnp.split(queries, ranks, axis=2)[rank],
            jnp.zeros((1, 4, 1, 1, 64), queries.dtype),  # not read
            own,
            walk,
            layer=jnp.zeros((), jnp.int32),
            span=dataclasses.replace(span, heads=shared),
            kernel_config=KERNELS,
        )

    assert_ranks_find(select_on, ranks, wanted)


SINKS, LOCAL = 3, 2  # pages
SCALE, DECAY = 0.1, 0.7
# The first sequence's last page has 7 keys. The second's: 5, a full one, 1 key of a block.
PAGE_CASES = [
    (TOKEN_SHAPES[0], "nan", 17 * SIZE + 21),
    (TOKEN_SHAPES[1], "random", 17 * SIZE + 32),
    (TOKEN_SHAPES[2], "huge", 17 * SIZE + 1),
    (TOKEN_SHAPES[2], "nan", 17 * SIZE),
    (TOKEN_SHAPES[3], "random", 17 * SIZE + 21),
    (TOKEN_SHAPES[4], "equal", 17 * SIZE + 50),
    ((8, 1, 64, 19), "random", 17 * SIZE + 21),
    ((3, 3, 64, 150), "random", 130 * SIZE + 47),
]


def page_budgets(columns):
    """Returns kept pages by layer and page: all in the first layer, some in the others."""
    forced = {"sink_blocks": SINKS, "local_blocks": LOCAL}
    return np.stack([block_budget(columns, density=x, **forced) for x in (1.0, 0.3)])


@functools.partial(jax.jit, static_argnames="exponent")
def select_pages(queries, codes, walk, lengths, *, exponent=4, ranks=None):
    stack = codes.as_layer().stack
    found = api.select_token_by_page_scores(
        queries,
        stack.code,
        stack.centre,
        stack.step,
        walk,
        layer=jnp.zeros((), jnp.int32),
        lengths=lengths,
        budgets=page_budgets(PAGES * codes.num_blocks),
        scale=SCALE,
        exponent=exponent,
        decay=DECAY,
        sink_blocks=SINKS,
        local_blocks=LOCAL,
        pages=PAGES,
        ranks=ranks,
        kernel_config=KERNELS,
    )
    assert found is not None
    return found


def page_evidence(queries, codes, previous, length, exponent):
    """Computes all page scores of one sequence, in float64 on the host."""
    query = np.asarray(queries, np.float64)[0][:, algorithm.slow_channels(queries.shape[-1])]
    code = np.asarray(codes.code).astype(int)
    code = np.concatenate([(code & 15 ^ 8) - 8, (code >> 4 ^ 8) - 8], axis=-1)
    step, centre = (np.asarray(x, np.float64) for x in (codes.step, codes.centre))
    heads, kv_heads, last = len(query), step.shape[1], -(-length // PAGE)
    powers = np.zeros(len(previous))
    for head in range(heads):
        q, own = query[head], head // (heads // kv_heads)
        largest = np.abs(q).max()
        unit = 2.0 ** np.ceil(np.log2(largest / 448.0)) if np.isfinite(largest) else 1.0
        rounded = (q / unit).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit
        logits = np.full(len(previous), -np.inf)
        for page in range(last):
            block, first = page // PAGES, page % PAGES * PAGE
            keys = code[block, own, first : first + min(PAGE, length - page * PAGE)]
            is_coded = step[block, own, 0] != block_codes.NO_KEY
            beside = (keys * 2.0 ** step[block, own]) @ rounded
            logit = SCALE * (q @ centre[block, own] + beside.max())
            if is_coded and np.abs(logit) < LARGEST_LOGIT:
                logits[page] = logit
        if np.isfinite(logits).any():
            shares = np.exp(logits - logits.max())
            powers += (shares / shares.sum()) ** exponent
    return np.maximum(powers ** (1.0 / exponent), DECAY * np.asarray(previous, np.float64))


def check_pages(drawn, exponent=4):
    queries, codes, walk, lengths = drawn
    found, again = (select_pages(*drawn, exponent=exponent) for _ in range(2))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    lists, after = found
    assert (lists.block_size, lists.has_diagonal, after.layers) == (PAGE, True, walk.layers + 1)
    columns = PAGES * codes.num_blocks
    budgets = page_budgets(columns)[1]
    assert lists.ids.shape == (4, 1, 1, page_budgets(columns).max())
    bound = {"rtol": 2.0**-8 / exponent, "atol": 1e-6}  # powers are rounded to bfloat16
    for index, length in enumerate(np.asarray(lengths)):
        own = jax.tree.map(operator.itemgetter(index), codes)
        with np.errstate(invalid="ignore", over="ignore"):
            wanted = page_evidence(queries[index], own, walk.scores[index, 0], length, exponent)
        np.testing.assert_allclose(after.scores[index, 0], wanted, **bound)
        last = (length - 1) // PAGE
        count = int(lists.counts[index, 0, 0])
        assert count == budgets[last]
        if not length:
            continue
        ids = np.asarray(lists.ids)[index, 0, 0]
        assert (ids[count:] == columns).all()
        assert (np.diff(ids[:count]) > 0).all() and ids[count - 1] == last
        forced = {*range(min(SINKS, last + 1)), *range(max(0, last - LOCAL + 1), last + 1)}
        ranked = sorted(range(last + 1), key=lambda x: (x not in forced, -wanted[x], x))
        kept, listed = set(ranked[:count]), set(ids[:count].tolist())
        assert forced <= listed
        # The same pages, except for ties within rounding.
        for missed, taken in zip(sorted(kept - listed), sorted(listed - kept), strict=True):
            np.testing.assert_allclose(wanted[missed], wanted[taken], rtol=2.0 * bound["rtol"])


@pytest.mark.parametrize("case", slow_unless(PAGE_CASES[0].__eq__, PAGE_CASES), ids=str)
def test_pages_are_scored_and_listed(case):
    shape, kind, second = case
    check_pages(draw_token(*shape, kind, second=second))


@pytest.mark.slow
def test_pages_are_scored_by_many_programs_and_listed(monkeypatch):
    from sketchwalk_jax.pallas_kernels.top_k import token_lists

    monkeypatch.setattr(token_lists, "_MOST_BYTES", 0)
    jax.clear_caches()
    shape, kind, second = PAGE_CASES[1]
    check_pages(draw_token(*shape, kind, second=second))
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(("exponent", "programs"), [(1, 64), (3, 1), (8, 64)])
def test_pages_are_scored_and_listed_from_parts_of_any_size(exponent, programs, monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", programs)
    jax.clear_caches()
    check_pages(draw_token(4, 1, 64, 80, "random", second=23 * SIZE + 5), exponent)


SPREAD_CASES = [
    (TOKEN_SHAPES[0], "nan"),
    (TOKEN_SHAPES[2], "huge"),
    (TOKEN_SHAPES[3], "random"),
]


def select_both_ways(select, monkeypatch):
    """Selects twice: one thread block adds up the heads, then many do."""
    from sketchwalk_jax.pallas_kernels.top_k import token_lists

    found = []
    for most in (2**30, 0):
        monkeypatch.setattr(token_lists, "_MOST_BYTES", most)
        jax.clear_caches()
        found.append(jax.device_get(select()))
    jax.clear_caches()
    return found


def assert_spread_alike(drawn, monkeypatch):
    """Checks that compiled kernels give the same lists and page scores, bit for bit.

    The interpreter's exponentials and sums depend on an array's shape, by a bit or two.
    """
    alone, spread = select_both_ways(functools.partial(select_pages, *drawn), monkeypatch)
    assert np.asarray(alone[1].scores).max() > 0.0
    if KERNELS.interpret:
        np.testing.assert_allclose(spread[1].scores, alone[1].scores, rtol=1e-6)
        np.testing.assert_array_equal(spread[0].counts, alone[0].counts)
        return
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", slow_unless(SPREAD_CASES[0].__eq__, SPREAD_CASES), ids=str)
def test_many_programs_add_up_heads_as_one_does(case, monkeypatch):
    shape, kind = case
    assert_spread_alike(draw_token(*shape, kind, second=17 * SIZE + 21), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 64])
def test_many_programs_add_up_parts_of_any_size(programs, monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", programs)
    assert_spread_alike(draw_token(4, 1, 64, 80, "random", second=23 * SIZE + 5), monkeypatch)


@pytest.mark.slow
def test_many_programs_add_up_more_parts_than_lie_side_by_side(monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", 2**20)
    monkeypatch.setattr(token_scores, "_PARTS", 128)
    assert_spread_alike(draw_token(2, 1, 64, 270, "random", second=260 * SIZE + 5), monkeypatch)


@pytest.mark.parametrize(
    ("tokens", "batch", "is_spread"),
    [(16384, 1, False), (32768, 8, False), (65536, 8, True), (131072, 1, True)],
)
def test_long_caches_are_spread(tokens, batch, is_spread):
    case = PageScoresCase(heads=32, kv_heads=8, head_dim=128, blocks=tokens // SIZE, batch=batch)
    function, arguments = case.program()
    assert ("token_evidence" in str(jax.make_jaxpr(function)(*arguments))) == is_spread


@pytest.mark.slow
@pytest.mark.parametrize("most", [2**30, 0])
def test_ranks_that_share_the_heads_list_the_pages_of_one_device(most, monkeypatch):
    from sketchwalk_jax.pallas_kernels.top_k import token_lists

    monkeypatch.setattr(token_lists, "_MOST_BYTES", most)
    jax.clear_caches()
    heads, kv_heads, ranks = 6, 2, 2
    queries, codes, walk, lengths = draw_token(
        heads, kv_heads, 64, 45, "nan", second=17 * SIZE + 21
    )
    wanted = select_pages(queries, codes, walk, lengths)

    def select_on(rank, gather):
        class Ranks(Heads):
            def gather(self, x, *, axis):
                return gather(x, axis)

        own = jax.tree.map(lambda x: x[:, :, rank, None], codes)
        shared = Ranks("tensor", ranks, heads, kv_heads)
        own_queries = jnp.split(queries, ranks, axis=2)[rank]
        return select_pages.__wrapped__(own_queries, own, walk, lengths, ranks=shared)

    assert_ranks_find(select_on, ranks, wanted)


@pytest.mark.parametrize(
    ("heads", "blocks", "pages"), [(8, 4097, 4), (33, 4096, 4), (1, 20, 2), (65, 20, 4)]
)
def test_what_has_too_many_pages_is_not_taken(heads, blocks, pages):
    def select(query, code, centre, walk):
        return api.select_token_by_page_scores(
            query,
            code,
            centre,
            centre.astype(jnp.int8),
            walk,
            layer=jnp.int32(0),
            lengths=jnp.array([1], jnp.int32),
            budgets=page_budgets(blocks * pages),
            scale=SCALE,
            exponent=4,
            decay=DECAY,
            sink_blocks=SINKS,
            local_blocks=LOCAL,
            pages=pages,
            kernel_config=KERNELS,
        )

    drawn = (
        jax.ShapeDtypeStruct((1, 1, heads, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 1, blocks, heads, SIZE, 16), jnp.uint8),
        jax.ShapeDtypeStruct((1, 1, blocks, heads, 32), jnp.bfloat16),
        WalkState(
            jax.ShapeDtypeStruct((1, 1, blocks * pages), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
        ),
    )
    assert jax.eval_shape(select, *drawn) is None
