"""The kernels that select for a token by the recommended policy, against plain JAX.

Runs in the interpreter, as compiled, or on a Hopper GPU. As compiled, some tests also run on other
GPUs, where only the rounding of queries to eight bits differs.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import kernel_draws
import ml_dtypes
import numpy as np
import pytest
from kernel_draws import KERNELS
from page_score_cases import PageScoresCase
from test_prompt_selection_kernels import SIZE, coded
from variants import RUNS_COMPILED, slow_unless

from sketchwalk_jax import algorithm
from sketchwalk_jax.pallas_kernels.page_scores import token_scores
from sketchwalk_jax.pallas_kernels.top_k import api, token_lists
from sketchwalk_jax.policies import quantized_keys
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.ranks import Heads
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.precision import LARGEST_LOGIT
from sketchwalk_jax.walk import WalkState

pytestmark = pytest.mark.interpreted

PAGES, PAGE = 4, 16  # pages of a block, keys of a page
# Heads, key/value heads, head_dim, blocks of the cache.
TOKEN_SHAPES = [(4, 1, 128, 32), (4, 1, 64, 33), (6, 2, 64, 45), (14, 2, 64, 63), (4, 1, 128, 64)]


@pytest.fixture
def patch(monkeypatch):
    """Returns a function that sets constants of the kernels by their names."""
    modules = {"_MOST_BYTES": token_lists, "_PROGRAMS": token_scores, "_PARTS": token_scores}

    def set_constants(**values):
        jax.clear_caches()  # programs keep the constants that they were traced with
        for name, value in values.items():
            monkeypatch.setattr(modules[name], name, value)

    yield set_constants
    jax.clear_caches()


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
    stored = coded(jnp.asarray(key, jnp.bfloat16), lengths)
    page_scores = jnp.asarray(rng.random((4, 1, blocks * PAGES)) ** 4, jnp.float32)
    return jnp.asarray(queries, jnp.bfloat16), stored, WalkState(page_scores, jnp.int32(1)), lengths


@functools.partial(jax.jit, static_argnames=("policy", "kernel_config"))
def select_token(policy, queries, stored, walk, lengths, *, kernel_config):
    span = Span.of_tokens(lengths - 1, SIZE)
    layer = jnp.zeros((), jnp.int32)
    batch, _, _, head_dim = queries.shape
    key = jnp.zeros((1, batch, 1, stored.zero_point.shape[2], head_dim), queries.dtype)  # not read
    return policy.select(
        queries, key, stored, walk, layer=layer, span=span, kernel_config=kernel_config
    )


SINKS = 3  # pages
POLICY = SketchWalkConfig.recommended(
    density=0.3,
    dense_layers=1,
    num_layers=4,
    sink_tokens=SINKS * PAGE,
    min_tokens=128,
    exponent=4,
    decay=0.7,
)


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
@pytest.mark.parametrize("most", [2**30, 0])
def test_ranks_that_share_the_heads_make_the_lists_of_one_device(most, patch):
    """Each rank runs alone with what both have sent."""
    patch(_MOST_BYTES=most)
    heads, kv_heads, ranks = 6, 2, 2
    queries, stored, walk, lengths = draw_token(
        heads, kv_heads, 64, 45, "nan", second=17 * SIZE + 21
    )
    wanted = select_token(POLICY, queries, stored, walk, lengths, kernel_config=KERNELS)
    sent: list[list] = [[], []]

    def select_on(rank, send):
        class Ranks(Heads):
            def gather(self, x, *, axis):
                return send(x, axis)

        span = Span.of_tokens(lengths - 1, SIZE)
        return POLICY.select(
            jnp.split(queries, ranks, axis=2)[rank],
            jnp.zeros((1, 4, 1, 1, 64), queries.dtype),  # not read
            jax.tree.map(lambda x: x[:, :, rank, None], stored),
            walk,
            layer=jnp.zeros((), jnp.int32),
            span=dataclasses.replace(span, heads=Ranks("tensor", ranks, heads, kv_heads)),
            kernel_config=KERNELS,
        )

    for rank, own in enumerate(sent):

        def keep(x, axis, own=own):
            own.append(x)
            return jnp.concatenate([x] * ranks, axis=axis)

        select_on(rank, keep)
    turns = zip(*sent, strict=True)
    found = select_on(1, lambda _, axis: jnp.concatenate(next(turns), axis=axis))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


# Shape, kind of inputs, length of the second sequence, exponent, and constants of the kernels. The
# first sequence's last page has 7 keys. The second's: 5, a full one, 1 key of a block.
PAGE_CASES = [
    (TOKEN_SHAPES[0], "nan", 17 * SIZE + 21, 4, {}),
    (TOKEN_SHAPES[1], "random", 17 * SIZE + 32, 4, {}),
    (TOKEN_SHAPES[2], "huge", 17 * SIZE + 1, 4, {}),
    (TOKEN_SHAPES[2], "nan", 17 * SIZE, 4, {}),
    (TOKEN_SHAPES[3], "random", 17 * SIZE + 21, 4, {}),
    (TOKEN_SHAPES[3], "nan", 17 * SIZE, 4, {}),
    (TOKEN_SHAPES[3], "huge", 17 * SIZE, 4, {}),
    (TOKEN_SHAPES[4], "equal", 17 * SIZE + 50, 4, {}),
    ((8, 1, 64, 19), "random", 17 * SIZE + 21, 4, {}),
    ((3, 3, 64, 150), "random", 130 * SIZE + 47, 4, {}),
    (TOKEN_SHAPES[1], "random", 17 * SIZE + 32, 4, {"_MOST_BYTES": 0}),  # many thread blocks
    *(
        ((4, 1, 64, 80), "random", 23 * SIZE + 5, exponent, {"_PROGRAMS": programs})
        for exponent, programs in ((1, 64), (3, 1), (8, 64))
    ),
]


def page_scores_of(queries, stored, previous, length, policy):
    """Computes all page scores of one sequence, in float64 on the host."""
    exponent, scale = policy.exponent, queries.shape[-1] ** -0.5
    query = np.asarray(queries, np.float64)[0][:, algorithm.slow_channels(queries.shape[-1])]
    quantized = np.asarray(stored.quantized).astype(int)
    quantized = np.concatenate([(quantized & 15 ^ 8) - 8, (quantized >> 4 ^ 8) - 8], axis=-1)
    scale_exponent, zero_point = (
        np.asarray(x, np.float64) for x in (stored.scale_exponent, stored.zero_point)
    )
    heads, kv_heads, last = len(query), scale_exponent.shape[1], -(-length // PAGE)
    powers = np.zeros(len(previous))
    for head in range(heads):
        q, own = query[head], head // (heads // kv_heads)
        largest = np.abs(q).max()
        unit = 2.0 ** np.ceil(np.log2(largest / 448.0)) if np.isfinite(largest) else 1.0
        rounded = (q / unit).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit
        logits = np.full(len(previous), -np.inf)
        for page in range(last):
            block, first = page // PAGES, page % PAGES * PAGE
            keys = quantized[block, own, first : first + min(PAGE, length - page * PAGE)]
            is_coded = scale_exponent[block, own, 0] != quantized_keys.NO_KEY
            beside = (keys * 2.0 ** scale_exponent[block, own]) @ rounded
            logit = scale * (q @ zero_point[block, own] + beside.max())
            if is_coded and np.abs(logit) < LARGEST_LOGIT:
                logits[page] = logit
        if np.isfinite(logits).any():
            shares = np.exp(logits - logits.max())
            powers += (shares / shares.sum()) ** exponent
    return np.maximum(powers ** (1.0 / exponent), policy.decay * np.asarray(previous, np.float64))


@pytest.mark.parametrize("case", slow_unless(PAGE_CASES[0].__eq__, PAGE_CASES), ids=str)
def test_pages_are_scored_and_listed(case, patch):
    """Compares with float64 on the host, and with plain JAX."""
    shape, kind, second, exponent, constants = case
    patch(**constants)
    policy = dataclasses.replace(POLICY, exponent=exponent)
    queries, stored, walk, lengths = drawn = draw_token(*shape, kind, second=second)
    found, again, plain = (
        select_token(policy, *drawn, kernel_config=one) for one in (KERNELS, KERNELS, None)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    lists, after = found
    assert (lists.block_size, lists.has_diagonal, after.layers) == (PAGE, True, walk.layers + 1)
    assert lists.ids.shape == plain[0].ids.shape and after.layers == plain[1].layers
    np.testing.assert_array_equal(lists.counts, plain[0].counts)
    columns = PAGES * stored.num_blocks
    bound = {"rtol": 2.0**-8 / exponent, "atol": 1e-6}  # powers are rounded to bfloat16
    np.testing.assert_allclose(after.scores, plain[1].scores, **bound)
    for index, length in enumerate(np.asarray(lengths)):
        own = jax.tree.map(operator.itemgetter(index), stored)
        with np.errstate(invalid="ignore", over="ignore"):
            wanted = page_scores_of(queries[index], own, walk.scores[index, 0], length, policy)
        np.testing.assert_allclose(after.scores[index, 0], wanted, **bound)
        if not length:
            continue
        last, count = (length - 1) // PAGE, int(lists.counts[index, 0, 0])
        ids = np.asarray(lists.ids)[index, 0, 0]
        assert (ids[count:] == columns).all()
        assert (np.diff(ids[:count]) > 0).all() and ids[count - 1] == last
        forced = {*range(min(SINKS, last + 1)), *range(max(0, last - PAGES + 1), last + 1)}
        ranked = sorted(range(last + 1), key=lambda x: (x not in forced, -wanted[x], x))
        kept, listed = set(ranked[:count]), set(ids[:count].tolist())
        assert forced <= listed
        # The same pages, except for ties within rounding.
        for missed, taken in zip(sorted(kept - listed), sorted(listed - kept), strict=True):
            np.testing.assert_allclose(wanted[missed], wanted[taken], rtol=2.0 * bound["rtol"])


PARTS = ((4, 1, 64, 80), "random", 23 * SIZE + 5)
SPREAD_CASES = [
    (TOKEN_SHAPES[0], "nan", 17 * SIZE + 21, {}),
    (TOKEN_SHAPES[2], "huge", 17 * SIZE + 21, {}),
    (TOKEN_SHAPES[3], "random", 17 * SIZE + 21, {}),
    (*PARTS, {"_PROGRAMS": 1}),
    (*PARTS, {"_PROGRAMS": 64}),
    # More parts than lie side by side.
    ((2, 1, 64, 270), "random", 260 * SIZE + 5, {"_PROGRAMS": 2**20, "_PARTS": 128}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SPREAD_CASES, ids=str)
def test_many_programs_add_up_heads_as_one_does(case, patch):
    """Compiled kernels give the same lists and page scores, bit for bit.

    The interpreter's exponentials and sums depend on an array's shape, by a bit or two.
    """
    shape, kind, second, constants = case
    drawn, found = draw_token(*shape, kind, second=second), []
    for most in (2**30, 0):
        patch(_MOST_BYTES=most, **constants)
        found.append(jax.device_get(select_token(POLICY, *drawn, kernel_config=KERNELS)))
    alone, spread = found
    assert np.asarray(alone[1].scores).max() > 0.0
    if KERNELS.interpret:
        np.testing.assert_allclose(spread[1].scores, alone[1].scores, rtol=1e-6)
        np.testing.assert_array_equal(spread[0].counts, alone[0].counts)
        return
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.skipif(not RUNS_COMPILED, reason="interpreted, kernels are the same on all GPUs")
@pytest.mark.parametrize(
    ("gpu", "shape", "kind"),
    [
        *(("8.0", TOKEN_SHAPES[2], kind) for kind in ("random", "equal", "nan", "huge")),
        ("8.6", TOKEN_SHAPES[0], "huge"),
        *(("8.9", TOKEN_SHAPES[1], kind) for kind in ("nan", "huge")),
    ],
)
def test_tokens_get_the_lists_that_they_get_on_hopper(gpu, shape, kind):
    drawn, found = draw_token(*shape, kind, second=17 * SIZE + 21), []
    # `ptxas` takes code only for the first GPU of a process and for older ones.
    for capability in ("9.0", gpu):
        jax.clear_caches()
        with kernel_draws.on_gpu(capability):
            found.append(
                jax.tree.leaves(jax.device_get(select_token(POLICY, *drawn, kernel_config=KERNELS)))
            )
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_best_pages_of_a_long_cache_are_listed(patch):
    """The lists have the best of the kernels' own page scores, which are those of plain JAX."""
    patch(_MOST_BYTES=0)
    drawn = draw_token(2, 1, 64, 4200, "random")  # 16,800 pages
    kernels = functools.partial(select_token, POLICY, kernel_config=KERNELS)
    assert "token_page_scores" in str(jax.make_jaxpr(kernels)(*drawn))
    (lists, after), (plain, wanted) = (
        select_token(POLICY, *drawn, kernel_config=one) for one in (KERNELS, None)
    )
    np.testing.assert_allclose(after.scores, wanted.scores, rtol=2.0**-10, atol=1e-6)
    np.testing.assert_array_equal(lists.counts, plain.counts)
    for index, length in enumerate(np.asarray(drawn[-1])[:3]):
        last, count = (length - 1) // PAGE, int(lists.counts[index, 0, 0])
        ranked = np.array(after.scores[index, 0, : last + 1])
        ranked[:SINKS] = ranked[max(0, last - PAGES + 1) :] = np.inf
        best = np.sort(np.argsort(-ranked, stable=True)[:count])
        np.testing.assert_array_equal(lists.ids[index, 0, 0, :count], best)


@pytest.mark.parametrize(
    ("tokens", "batch", "is_spread"),
    [(16384, 1, False), (32768, 8, False), (65536, 8, True), (131072, 1, True), (2**20, 1, True)],
)
def test_long_caches_are_spread(tokens, batch, is_spread):
    case = PageScoresCase(heads=32, kv_heads=8, head_dim=128, blocks=tokens // SIZE, batch=batch)
    function, arguments = case.program()
    text = str(jax.make_jaxpr(function)(*arguments))
    assert "token_lists" in text and ("token_page_scores" in text) == is_spread


@pytest.mark.parametrize(("heads", "blocks", "pages"), [(8, 2**14 + 1, 4), (1, 20, 2), (65, 20, 4)])
def test_what_has_too_many_pages_is_not_taken(heads, blocks, pages):
    def select(query, quantized, zero_point, walk):
        return api.select_token_by_page_scores(
            query,
            quantized,
            zero_point,
            zero_point.astype(jnp.int8),
            walk,
            layer=jnp.int32(0),
            lengths=jnp.array([1], jnp.int32),
            budgets=np.ones((2, blocks * pages), np.int32),
            max_count=1,
            scale=0.1,
            exponent=4,
            decay=0.7,
            sink_blocks=SINKS,
            local_blocks=PAGES,
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
