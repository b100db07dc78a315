"""The kernels of the recommended policy beside plain JAX, in the interpreter or on a Hopper GPU."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from reference.recommended import coded_block, slow_channels
from tolerances import tolerance
from variants import INTERPRET, slow_unless

from sketchwalk_jax.cached_layer import observe_layer
from sketchwalk_jax.pallas_kernels import kernel_selection
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies import block_codes
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.block_codes import BlockCodes, LayerCodes, block_scores
from sketchwalk_jax.policies.ranks import Heads
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.precision import LARGEST_LOGIT
from sketchwalk_jax.selection import block_budget
from sketchwalk_jax.walk import WalkState

token_scores = pytest.importorskip("sketchwalk_jax.pallas_kernels.token_scores")

pytestmark = pytest.mark.interpreted

KERNELS = KernelConfig(interpret=INTERPRET)

SIZE = 64
# Heads, key/value heads, channels, queries of a row, rows before the first, tokens after it.
CASES = {
    "eight of a row": (2, 1, 64, 4, 0, (9 * SIZE + 5, 3)),
    "three heads for one": (6, 2, 32, 8, 2, (4 * SIZE, 5 * SIZE - 1)),
    "several parts": (4, 1, 32, 16, 1, (3 * SIZE + 1, SIZE)),
    "a hundred blocks": (1, 1, 32, 4, 70, (33 * SIZE, 40 * SIZE + 9)),
}
HOSTILE = ("equal", "nan", "huge", "below")
KEPT = [("eight of a row", "random"), ("three heads for one", "nan")]


@jax.jit
def coded(key, lengths):
    """Codes of the first tokens of each sequence."""
    batch, tokens, kv_heads, channels = key.shape
    sizes = {"batch": batch, "num_blocks": tokens // SIZE, "block_size": SIZE}
    sizes |= {"num_kv_heads": kv_heads, "num_channels": channels}
    valid = jnp.arange(tokens)[None] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    return BlockCodes.zeros(**sizes, dtype=key.dtype).add(key, span)


def draw(case, kind):
    """Queries, codes, rows and lengths."""
    heads, kv_heads, channels, count, before, tokens = CASES[case]
    rng = np.random.default_rng(len(case))
    num_rows = -(-max(tokens) // SIZE)
    lengths = np.array(tokens) + before * SIZE
    num_blocks = before + num_rows
    shape = (len(tokens), num_rows, count, heads, channels)
    queries = rng.normal(size=shape) * 2.0
    key = rng.normal(size=(len(tokens), num_blocks * SIZE, kv_heads, channels))
    key += 3.0 * rng.normal(size=(1, 1, kv_heads, channels))
    if kind == "equal":
        queries[:], key[:] = queries[:1, :1, :1], key[:, :1]
    if kind == "nan":
        queries[0, 1, 0, 0, 3] = queries[0, 0] = np.nan
        key[0, SIZE : 2 * SIZE] = np.nan
        key[-1, 5, 0, 2] = np.inf
    if kind == "huge":
        key[0, 7] *= 1e20
        queries[0, 1] *= 1e18  # products that float32 does not hold, and
        queries[0, 2] *= 1e12  # those that it holds, both beyond what counts
    if kind == "below":  # each channel is large in one key: all products beside a centre are < 0
        queries = np.abs(queries)
        for channel in range(channels):
            key[:, channel % SIZE :: SIZE, :, channel] += 30.0
    lengths = jnp.asarray(lengths, jnp.int32)
    codes = coded(jnp.asarray(key, jnp.bfloat16), lengths)
    rows = np.arange(before, before + num_rows, dtype=np.int32)[None]
    rows = jnp.asarray(np.broadcast_to(rows, (len(tokens), num_rows)))
    return jnp.asarray(queries, jnp.bfloat16), codes, rows, lengths


@functools.partial(jax.jit, static_argnames="kernel_config")
def run(queries, codes, rows, lengths, *, kernel_config):
    return block_scores(
        queries, codes, rows, kv_lengths=lengths, scale=0.2, exponent=4, kernel_config=kernel_config
    )


@pytest.mark.parametrize(
    "drawn",
    slow_unless(
        KEPT.__contains__,
        [*((case, "random") for case in CASES), *(("three heads for one", one) for one in HOSTILE)],
    ),
    ids=": ".join,
)
def test_the_kernels_find_what_plain_jax_finds(drawn, monkeypatch):
    monkeypatch.setattr(block_codes, "_MOST_PEAKS", 2**15)  # some prompts in several parts
    drawn = draw(*drawn)
    found, wanted = (np.asarray(run(*drawn, kernel_config=one)) for one in (KERNELS, None))
    _, _, rows, lengths = drawn
    is_row = np.asarray(rows * SIZE < lengths[:, None])[..., None]
    assert np.isfinite(found).all()
    # The largest products have the 11 bits of float16, and tensor cores add eight bits in few more.
    bound = {"rtol": 5e-3, "atol": 1e-6} if KERNELS.interpret else {"rtol": 5e-2, "atol": 1e-3}
    np.testing.assert_allclose(np.where(is_row, found, 0.0), np.where(is_row, wanted, 0.0), **bound)


PAGES = 4
OF_PAGE = SIZE // PAGES
# Case, what is drawn, blocks before each sequence's first row.
SHARES_CASES = [
    ("eight of a row", "random", (0, 0)),
    ("three heads for one", "nan", (2, 0)),
    ("three heads for one", "huge", (0, 2)),
    ("three heads for one", "below", (2, 2)),
    ("several parts", "random", (1, 1)),
    ("a row of two warpgroups", "nan", (0, 1)),
    ("sixteen of a row", "equal", (1, 0)),
    ("a hundred blocks", "random", (70, 41)),
]
CASES_OF_PAGES = CASES | {
    "a row of two warpgroups": (4, 1, 64, 16, 1, (2 * SIZE + 17, SIZE + 16)),
    "sixteen of a row": (4, 2, 64, 7, 1, (3 * SIZE, 2 * SIZE + 50)),
}


def peaks_of_pages(query, factor, codes, lengths, *, of_magnitudes=False):
    """What the first kernel finds: products of queries `[B K M C]` in eight bits, in float16.

    With `of_magnitudes`, how large the sums of a product can be on the way.
    """
    key = codes.residual(jnp.int32(0), codes.num_blocks, jnp.float32)
    is_key = jnp.arange(key.shape[1])[None] < lengths[:, None]
    small = (query.astype(jnp.float32) / factor[..., None]).astype(jnp.float16)
    given = [np.asarray(x, np.float64) for x in (small.astype(jnp.float8_e4m3fn), key)]
    given = [np.abs(x) for x in given] if of_magnitudes else given
    products = np.einsum("bkmc,bskc->bkms", *given)
    products = np.where(np.asarray(is_key)[:, None, None], products, -np.inf)
    peaks = products.reshape(*products.shape[:3], -1, OF_PAGE).max(axis=-1)
    peaks = np.where(np.isinf(peaks), np.nan, peaks)  # of a page without a key
    return np.swapaxes(peaks.astype(np.float16), 2, 3)


def shares_of_pages(peaks, factor, query, codes, first_row, *, per_row, scale, exponent):
    """Sums of powers of the shares of pages, `[B I P]`, and which of them rows see."""
    batch, kv_heads, num_pages, num_queries = peaks.shape
    row = np.asarray(first_row)[:, None] + np.arange(num_queries // per_row)
    is_seen = np.arange(num_pages) < PAGES * (row + 1)[..., None]
    with np.errstate(all="ignore"):
        shared = np.einsum(
            "bkmc,bjkc->bkjm", *(np.asarray(x, np.float64) for x in (query, codes.centre))
        )
        shared = shared.repeat(PAGES, axis=2).astype(np.float32)
        logits = peaks.astype(np.float32) * np.asarray(factor)[:, :, None] + shared
        logits = logits.reshape(batch, kv_heads, num_pages, -1, per_row).astype(np.float64) * scale
        counts = is_seen.swapaxes(1, 2)[:, None, ..., None] & (np.abs(logits) < LARGEST_LOGIT)
        logits = np.where(counts, logits, -1e300)
        shares = np.exp(logits - logits.max(axis=2, keepdims=True))
        shares = np.where(counts, shares / shares.sum(axis=2, keepdims=True), 0.0)
    return (shares**exponent).sum(axis=(1, 4)).swapaxes(1, 2), is_seen


@functools.partial(jax.jit, static_argnames=("scale", "exponent"))
def run_pages(queries, codes, first_row, lengths, *, scale, exponent):
    """What kernels find, from queries `[B I R N C]`: peaks, factors, queries and sums of shares."""
    from sketchwalk_jax.pallas_kernels import block_scores as kernel
    from sketchwalk_jax.pallas_kernels.block_residuals import block_residuals_kernel

    batch, num_rows, count, heads, channels = queries.shape
    num_blocks, kv_heads = codes.centre.shape[1:3]
    wanted = count * heads // kv_heads
    per_row = kernel.queries_per_row(wanted)
    more_rows = -num_rows % (kernel.TILE // np.gcd(kernel.TILE, per_row))
    own = jnp.moveaxis(queries.reshape(batch, num_rows, count, kv_heads, -1, channels), 3, 1)
    own = own.reshape(batch, kv_heads, num_rows, wanted, channels)
    own = jnp.pad(own, ((0, 0), (0, 0), (0, more_rows), (0, per_row - wanted), (0, 0)))
    own = own.reshape(batch, kv_heads, -1, channels)
    where = {"pages": PAGES, "interpret": KERNELS.interpret}
    stack = codes.as_layer().stack
    key = block_residuals_kernel(
        stack.code, stack.step, layer=jnp.int32(0), lengths=lengths, **where
    )
    where |= {"first_row": first_row, "per_row": per_row}
    peaks, factor = kernel.block_peaks_kernel(own, key, wanted=wanted, **where)
    more = ((0, 0), (0, -num_blocks % kernel.STEP), (0, 0), (0, 0))
    found = kernel.block_scores_kernel(
        peaks, factor, own, jnp.pad(codes.centre, more), scale=scale, exponent=exponent, **where
    )
    assert found.shape[2:] == (-(-per_row // 32), own.shape[2] // per_row, peaks.shape[2])
    found = found[..., : PAGES * num_blocks].sum(axis=(1, 2))
    return peaks[:, :, : PAGES * num_blocks], factor, own, found


@pytest.mark.parametrize(
    "drawn", slow_unless((lambda one: one[:2] == ("three heads for one", "nan")), SHARES_CASES)
)
def test_the_kernels_find_shares_of_pages(drawn, monkeypatch):
    case, kind, first_row = drawn
    monkeypatch.setitem(CASES, case, CASES_OF_PAGES[case])
    queries, codes, rows, lengths = draw(case, kind)
    lengths = lengths - (rows[:, 0] - jnp.array(first_row)) * SIZE  # some keys are behind the end
    first_row = jnp.array(first_row, jnp.int32)
    lengths, how = lengths.astype(jnp.int32), {"scale": 0.2, "exponent": 4}
    run_all = functools.partial(run_pages, queries, codes, first_row, lengths, **how)
    peaks, factor, query, found = run_all()
    wanted, found = peaks_of_pages(query, factor, codes, lengths), np.asarray(found)
    per_row = query.shape[2] // found.shape[1]
    row = np.asarray(first_row)[:, None] + np.arange(query.shape[2]) // per_row
    is_written = np.arange(wanted.shape[2])[:, None] < PAGES * (row + 1)[:, None]
    is_written = is_written[:, None] & ~np.isnan(np.asarray(factor))[:, :, None]
    peaks = np.where(is_written, np.asarray(peaks), 0.0)
    # On a CPU the largest of nothing but NaN may be -inf, which leaves a page out as well.
    peaks = np.where(np.isneginf(peaks), np.float16(np.nan), peaks)
    np.testing.assert_allclose(peaks, np.where(is_written, wanted, 0.0), rtol=2**-10, atol=2**-9)
    wanted, is_seen = shares_of_pages(
        peaks, factor, query, codes, first_row, per_row=per_row, **how
    )
    # Nothing reads rows behind the last block, whose logits of pages are those of no key.
    is_seen &= (row[:, ::per_row] < codes.centre.shape[1])[..., None]
    found, again = (np.where(is_seen, x, 0.0) for x in (found, np.asarray(run_all()[3])))
    np.testing.assert_array_equal(found, again)
    assert np.isfinite(found).all() and (kind != "random" or found.max() > 0.1)
    # The kernels take powers below float32's smallest normal number, 1e-38, for zero.
    is_cpu = jax.default_backend() == "cpu"
    bound = {"rtol": 1e-3, "atol": 1e-6} if is_cpu else {"rtol": 1e-2, "atol": 1e-37}
    np.testing.assert_allclose(found, np.where(is_seen, wanted, 0.0), **bound)


@pytest.mark.parametrize(
    ("dtype", "channels", "size"),
    [(jnp.float32, 64, 64), (jnp.bfloat16, 16, 64), (jnp.bfloat16, 64, 32)],
)
def test_what_the_kernels_do_not_take_goes_to_plain_jax(dtype, channels, size):
    codes = BlockCodes.zeros(
        batch=1, num_blocks=4, block_size=size, num_kv_heads=1, num_channels=channels, dtype=dtype
    )
    queries = jnp.ones((1, 4, 2, 2, channels), dtype)
    rows, lengths = jnp.arange(4, dtype=jnp.int32)[None], jnp.array([4 * size], jnp.int32)
    found = run(queries, codes, rows, lengths, kernel_config=KERNELS)
    np.testing.assert_array_equal(found, run(queries, codes, rows, lengths, kernel_config=None))


@pytest.mark.parametrize("size", [(3, 32), (2, 64)])
def test_keys_in_eight_bits_are_those_of_codes_where_they_lie(size):
    from sketchwalk_jax.pallas_kernels.block_residuals import block_residuals_kernel

    kv_heads, channels = size
    layers, layer, batch, blocks = 3, 1, 2, 5
    rng = np.random.default_rng(kv_heads)
    shape = (layers, batch, blocks, kv_heads, SIZE, channels // 2)
    high, low = rng.integers(-7, 8, size=(2, *shape))
    code = jnp.asarray((high << 4 | low & 15) & 255, jnp.uint8)
    step = rng.integers(block_codes.MIN_STEP, block_codes.MAX_STEP + 1, size=(*shape[:3], *size))
    step[:, 1, 3:] = block_codes.NO_KEY
    step = jnp.asarray(step, jnp.int8)
    lengths = jnp.array([blocks * SIZE - 3, 2 * SIZE + 1], jnp.int32)
    found = block_residuals_kernel(
        code, step, layer=jnp.int32(layer), lengths=lengths, interpret=KERNELS.interpret
    )
    assert found.dtype == jnp.float8_e4m3fn
    # In the place of a token that is not there, the first of its block.
    place = jnp.arange(blocks * SIZE, dtype=jnp.int32).reshape(1, blocks, SIZE)
    is_key = (place < lengths[:, None, None])[:, :, None, :, None]
    own = jnp.where(is_key, code[layer], code[layer][:, :, :, :1])
    nothing = jnp.zeros((batch, blocks, *size))
    codes = BlockCodes(own, nothing, step[layer], nothing[:, :, None])
    wanted = codes.residual(jnp.int32(0), blocks, jnp.bfloat16)
    assert not np.isfinite(wanted).all()
    # In lines of several keys: those of a group of eight blocks below each other, then beside.
    assert found.shape[1:] == (kv_heads, 1, 4 * channels, 128)
    found = found.astype(jnp.float32).reshape(batch, kv_heads, 4 * channels, -1, channels)
    found = found.transpose(0, 3, 2, 1, 4).reshape(batch, -1, kv_heads, channels)
    np.testing.assert_array_equal(found[:, : blocks * SIZE], wanted.astype(jnp.float32))


@pytest.mark.parametrize("size", slow_unless((64, 8).__eq__, [(64, 8), (128, 5)]))
def test_representatives_are_those_of_plain_jax(size):
    head_dim, count = size
    query = np.random.default_rng(0).normal(size=(3, 3 * SIZE, 3, head_dim)).astype(np.float32)
    query[0, 5, 1, head_dim // 4] = np.nan
    query[0, 70, 2, head_dim // 2 - 1] = np.inf
    query[1, SIZE : 2 * SIZE] = query[1, SIZE]  # all equal
    begin, end = np.array([3, 0, 0]), np.array([150, 3 * SIZE, 2 * SIZE + 2])
    column = np.arange(3 * SIZE)[None]
    valid = jnp.asarray((column >= begin[:, None]) & (column < end[:, None]))
    query = jnp.asarray(query, jnp.bfloat16)
    represent = jax.jit(
        SketchWalkConfig.recommended_blocks().represent,
        static_argnums=2,
        static_argnames="kernel_config",
    )
    found, wanted = (
        np.asarray(represent(query, valid, count, kernel_config=one), np.float32)
        for one in (KERNELS, None)
    )
    np.testing.assert_allclose(found, wanted, atol=2**-8 * np.abs(wanted).max())


PROMPT_POLICIES = {
    "blocks": SketchWalkConfig.recommended_blocks(density=0.6, min_tokens=192),
    # The first rows have more representatives than the others, all in one call.
    "pages": SketchWalkConfig.recommended(
        density=0.5, min_tokens=96, early_representatives=((128, 16),)
    ),
}


def prompt_selection(policy):
    """A function of `kernel_config` that selects for a prompt, one that is drawn."""
    rng = np.random.default_rng(0)
    heads, kv_heads, head_dim, blocks = 4, 2, 64, 9
    tokens = blocks * SIZE
    query, key = (
        jnp.asarray(rng.normal(size=(1, tokens, count, head_dim)) * 2.0, jnp.bfloat16)
        for count in (heads, kv_heads)
    )
    lengths = jnp.array([tokens - 9], jnp.int32)
    valid = jnp.arange(tokens)[None] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    shape = LayerShape(heads, kv_heads, head_dim, jnp.bfloat16)
    empty = policy.init_statistics(shape, batch=1, num_blocks=blocks)
    walk = policy.init_walk(batch=1, num_rows=blocks, num_blocks=blocks)

    def select(*, kernel_config):
        codes = policy.observe(query, key, empty, span=span, kernel_config=kernel_config)
        # The second of two layers, where it lies.
        stack = jax.tree.map(lambda none, one: jnp.stack([none, one]), empty, codes)
        codes, layer = LayerCodes(stack, jnp.ones((), jnp.int32)), jnp.zeros((), jnp.int32)
        return policy.select(
            query, key[None], codes, walk, layer=layer, span=span, kernel_config=kernel_config
        )[0]

    return select


def assert_selected_alike(found, wanted):
    """The same lists but for near ties."""
    np.testing.assert_array_equal(found.counts, wanted.counts)
    assert (found.block_size, found.row_size) == (wanted.block_size, wanted.row_size)
    counts = np.asarray(wanted.counts)[0, 0]
    pairs = [np.asarray(one.ids)[0, 0] for one in (found, wanted)]
    common = [len({*x[:n]} & {*y[:n]}) for x, y, n in zip(*pairs, counts, strict=True)]
    assert sum(common) > 0.95 * counts.sum()


@pytest.mark.parametrize("name", slow_unless("blocks".__eq__, PROMPT_POLICIES))
def test_a_prompt_is_selected_alike(name):
    select = jax.jit(prompt_selection(PROMPT_POLICIES[name]), static_argnames="kernel_config")
    found, wanted = (select(kernel_config=one) for one in (KERNELS, None))
    assert_selected_alike(found, wanted)


TOKEN_KINDS = ("random", "equal", "nan", "huge")
# Heads, key/value heads, features of a head, room in blocks.
TOKEN_SHAPES = [(4, 1, 128, 32), (4, 1, 64, 33), (6, 2, 64, 45), (14, 2, 64, 63), (4, 1, 128, 64)]


def assert_ranks_find(select_on, ranks, wanted):
    """What one of two ranks selects from what both have sent is what one device selects."""
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


def draw_token(heads, kv_heads, head_dim, blocks, kind, *, pages=1, second=17 * SIZE):
    """Queries, codes, evidence of the layer before and lengths, down to one token and none."""
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
        queries[1] = np.nan  # nothing finite is seen
    if kind == "huge":
        key[0, 7] *= 1e20
        queries[0, :, ::2] *= 1e18  # as above
        queries[0, :, 1::2] *= 1e12
    lengths = jnp.asarray(lengths, jnp.int32)
    codes = coded(jnp.asarray(key, jnp.bfloat16), lengths)
    evidence = jnp.asarray(rng.random((4, 1, blocks * pages)) ** 4, jnp.float32)
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
    np.testing.assert_allclose(found[1].scores[:, 0], scores, rtol=1e-4, atol=1e-6)
    assert found[1].layers == wanted[1].layers == drawn[2].layers + 1
    np.testing.assert_array_equal(found[0].counts, wanted[0].counts)
    lists = [np.asarray(one[0].ids)[:, 0, 0] for one in (found, wanted)]
    assert lists[0].shape == lists[1].shape
    for own, other, row, length in zip(*lists, scores, np.asarray(drawn[3]), strict=True):
        # The same blocks, but for ties within rounding.
        for missed, taken in zip(
            sorted(set(other) - set(own)), sorted(set(own) - set(other)), strict=True
        ):
            np.testing.assert_allclose(row[missed], row[taken], rtol=1e-4, atol=1e-6)
        assert not length or (length - 1) // SIZE in own
        assert (np.diff(own) >= 0).all()
    for one, other in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(select_token(policy, *drawn, kernel_config=KERNELS)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", slow_unless("nan".__eq__, TOKEN_KINDS))
@pytest.mark.parametrize("shape", slow_unless(TOKEN_SHAPES[0].__eq__, TOKEN_SHAPES))
def test_tokens_are_selected_alike(shape, kind):
    policy = SketchWalkConfig.recommended_blocks(density=0.3, dense_layers=1, num_layers=4)
    check_tokens_are_selected_alike(policy, draw_token(*shape, kind))


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("exponent", slow_unless((1).__eq__, [1, 2, 3, 8]))
def test_tokens_are_selected_alike_from_parts_of_any_size(exponent, programs, monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", programs)
    jax.clear_caches()
    policy = SketchWalkConfig.recommended_blocks(density=0.2, exponent=exponent, decay=0.0)
    check_tokens_are_selected_alike(policy, draw_token(4, 1, 64, 80, "random"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(9, 1, 64, jnp.bfloat16), (2, 2, 32, jnp.bfloat16), (2, 1, 64, jnp.float32)],
)
def test_tokens_that_the_kernels_do_not_take_go_to_plain_jax(heads, kv_heads, head_dim, dtype):
    queries, *rest = draw_token(heads, kv_heads, head_dim, 20, "random")
    drawn, policy = (queries.astype(dtype), *rest), SketchWalkConfig.recommended_blocks(density=0.3)
    found, wanted = (select_token(policy, *drawn, kernel_config=one)[0] for one in (KERNELS, None))
    np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.mark.slow
def test_ranks_that_share_the_heads_make_the_lists_of_one_device():
    heads, kv_heads, ranks = 6, 2, 2
    queries, codes, walk, lengths = draw_token(heads, kv_heads, 64, 45, "nan")
    policy = SketchWalkConfig.recommended_blocks(density=0.3, dense_layers=1, num_layers=4)
    wanted = select_token(policy, queries, codes, walk, lengths, kernel_config=KERNELS)

    def select_on(rank, gather):
        class Ranks(Heads):
            def gather(self, x, *, axis):
                return gather(x, axis)

        span = Span.of_tokens(lengths - 1, SIZE)
        shared = Ranks("tensor", ranks, heads, kv_heads)
        own = jax.tree.map(lambda x: x[:, :, rank, None], codes)
        return policy.select(
            jnp.split(queries, ranks, axis=2)[rank],
            jnp.zeros((1, 4, 1, 1, 64), queries.dtype),  # not read
            own,
            walk,
            layer=jnp.zeros((), jnp.int32),
            span=dataclasses.replace(span, heads=shared),
            kernel_config=KERNELS,
        )

    assert_ranks_find(select_on, ranks, wanted)


PAGES, PAGE = 4, 16  # of a block, keys of each
SINKS, LOCAL = 3, 2  # pages
SCALE, DECAY = 0.1, 0.7
# Beside the first sequence, whose last page has 7 keys: one of 5, a full one, one key in a block.
PAGE_CASES = [
    (TOKEN_SHAPES[0], "nan", 17 * SIZE + 21),
    (TOKEN_SHAPES[1], "random", 17 * SIZE + 32),
    (TOKEN_SHAPES[2], "huge", 17 * SIZE + 1),
    (TOKEN_SHAPES[2], "nan", 17 * SIZE),
    (TOKEN_SHAPES[3], "random", 17 * SIZE + 21),
    (TOKEN_SHAPES[4], "equal", 17 * SIZE + 50),
    ((8, 1, 64, 19), "random", 17 * SIZE + 21),
    ((3, 3, 128, 150), "random", 130 * SIZE + 47),
]


def page_budgets(columns):
    """Pages that are kept by layer and page: all in the first layer, some in the others."""
    forced = {"sink_blocks": SINKS, "local_blocks": LOCAL}
    return np.stack([block_budget(columns, density=x, **forced) for x in (1.0, 0.3)])


@functools.partial(jax.jit, static_argnames="exponent")
def select_pages(queries, codes, walk, lengths, *, exponent=4, ranks=None):
    stack = codes.as_layer().stack
    found = kernel_selection.select_token_by_evidence(
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
    """Evidence of all pages of one sequence, in float64 on the host."""
    query = np.asarray(queries, np.float64)[0][:, slow_channels(queries.shape[-1])]
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
        # The same pages, but for ties within rounding.
        for missed, taken in zip(sorted(kept - listed), sorted(listed - kept), strict=True):
            np.testing.assert_allclose(wanted[missed], wanted[taken], rtol=2.0 * bound["rtol"])


@pytest.mark.parametrize("case", slow_unless(PAGE_CASES[0].__eq__, PAGE_CASES), ids=str)
def test_pages_are_scored_and_listed(case):
    shape, kind, second = case
    check_pages(draw_token(*shape, kind, pages=PAGES, second=second))


@pytest.mark.parametrize("case", slow_unless(PAGE_CASES[0].__eq__, PAGE_CASES[:4]), ids=str)
def test_pages_are_scored_by_many_programs_and_listed(case, monkeypatch):
    from sketchwalk_jax.pallas_kernels import token_lists

    monkeypatch.setattr(token_lists, "_MOST_BYTES", 0)
    jax.clear_caches()
    shape, kind, second = case
    check_pages(draw_token(*shape, kind, pages=PAGES, second=second))
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(("exponent", "programs"), [(1, 64), (3, 1), (8, 64)])
def test_pages_are_scored_and_listed_from_parts_of_any_size(exponent, programs, monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", programs)
    jax.clear_caches()
    check_pages(draw_token(4, 1, 64, 80, "random", pages=PAGES, second=23 * SIZE + 5), exponent)


# Pages of a block, heads, key/value heads, features of a head, blocks, kind.
SPREAD_CASES = [
    (PAGES, TOKEN_SHAPES[0], "nan"),
    (PAGES, TOKEN_SHAPES[2], "huge"),
    (PAGES, TOKEN_SHAPES[3], "random"),
    (1, TOKEN_SHAPES[2], "nan"),
    (1, TOKEN_SHAPES[4], "equal"),
]


def select_both_ways(select, monkeypatch):
    """What is selected where one program adds up the heads, and where many do."""
    from sketchwalk_jax.pallas_kernels import token_lists

    found = []
    for most in (2**30, 0):
        monkeypatch.setattr(token_lists, "_MOST_BYTES", most)
        jax.clear_caches()
        found.append(jax.device_get(select()))
    jax.clear_caches()
    return found


def assert_spread_alike(pages, drawn, monkeypatch):
    """The same lists and evidence, bit for bit, of kernels that are compiled.

    The interpreter's exponentials and sums depend on the shape of an array, by a bit or two.
    """
    policy = SketchWalkConfig.recommended_blocks(density=0.3, dense_layers=1, num_layers=4)
    select = functools.partial(select_token, policy, kernel_config=KERNELS)
    select = select_pages if pages > 1 else select
    alone, spread = select_both_ways(functools.partial(select, *drawn), monkeypatch)
    assert np.asarray(alone[1].scores).max() > 0.0
    if KERNELS.interpret:
        np.testing.assert_allclose(spread[1].scores, alone[1].scores, rtol=1e-6)
        np.testing.assert_array_equal(spread[0].counts, alone[0].counts)
        return
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", slow_unless(SPREAD_CASES[0].__eq__, SPREAD_CASES), ids=str)
def test_many_programs_add_up_heads_as_one_does(case, monkeypatch):
    pages, shape, kind = case
    drawn = draw_token(*shape, kind, pages=pages, second=17 * SIZE + 21)
    assert_spread_alike(pages, drawn, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "programs"), [(PAGES, 64), (PAGES, 1), (1, 64), (1, 1)])
def test_many_programs_add_up_parts_of_any_size(pages, programs, monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", programs)
    drawn = draw_token(4, 1, 64, 80, "random", pages=pages, second=23 * SIZE + 5)
    assert_spread_alike(pages, drawn, monkeypatch)


@pytest.mark.slow
def test_many_programs_add_up_more_parts_than_lie_side_by_side(monkeypatch):
    monkeypatch.setattr(token_scores, "_PROGRAMS", 2**20)
    monkeypatch.setattr(token_scores, "_PARTS", 128)
    drawn = draw_token(2, 1, 64, 270, "random", second=260 * SIZE + 5)
    assert_spread_alike(1, drawn, monkeypatch)


@pytest.mark.parametrize(
    ("tokens", "batch", "is_spread"),
    [(16384, 1, False), (32768, 8, False), (65536, 8, True), (131072, 1, True)],
)
def test_long_caches_are_spread(tokens, batch, is_spread):
    from kernel_cases import EvidenceKernelCase

    case = EvidenceKernelCase(
        heads=32, kv_heads=8, head_dim=128, blocks=tokens // SIZE, pages=PAGES, batch=batch
    )
    function, arguments = case.program()
    assert ("token_evidence" in str(jax.make_jaxpr(function)(*arguments))) == is_spread


@pytest.mark.slow
@pytest.mark.parametrize("most", [2**30, 0])
def test_ranks_that_share_the_heads_list_the_pages_of_one_device(most, monkeypatch):
    from sketchwalk_jax.pallas_kernels import token_lists

    monkeypatch.setattr(token_lists, "_MOST_BYTES", most)
    jax.clear_caches()
    heads, kv_heads, ranks = 6, 2, 2
    queries, codes, walk, lengths = draw_token(
        heads, kv_heads, 64, 45, "nan", pages=PAGES, second=17 * SIZE + 21
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


@pytest.mark.slow
def test_attention_reads_the_pages_that_are_listed():
    from sketchwalk_jax.pallas_kernels.block_sparse_decode import block_sparse_decode_kernel

    shape = heads, kv_heads, head_dim, blocks = 4, 2, 64, 20
    queries, codes, walk, lengths = draw_token(*shape, "random", pages=PAGES, second=17 * SIZE + 21)
    lists, _ = select_pages(queries, codes, walk, lengths)
    rng = np.random.default_rng(1)
    size = (1, 4, blocks * SIZE, kv_heads, head_dim)
    key, value = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for _ in range(2))
    found, _ = block_sparse_decode_kernel(
        queries,
        key,
        value,
        lists.ids,
        lists.counts,
        layer=jnp.zeros((), jnp.int32),
        kv_lengths=lengths,
        scale=SCALE,
        block_size=lists.block_size,
        kernel_config=KERNELS,
    )
    for index, length in enumerate(np.asarray(lengths)[:3]):
        count = int(lists.counts[index, 0, 0])
        pages = np.asarray(lists.ids)[index, 0, 0, :count]
        tokens = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
        tokens = tokens[tokens < length]
        for head in range(heads):
            own = head // (heads // kv_heads)
            k, v = (np.asarray(x, np.float64)[0, index, tokens, own] for x in (key, value))
            weights = SCALE * k @ np.asarray(queries, np.float64)[index, 0, head]
            weights = np.exp(weights - weights.max())
            wanted = weights @ v / weights.sum()
            np.testing.assert_allclose(
                np.asarray(found, np.float64)[index, 0, head],
                wanted,
                **tolerance("attention", jnp.bfloat16),
            )


@pytest.mark.parametrize(
    ("heads", "blocks", "pages"), [(8, 4097, 4), (33, 4096, 4), (1, 20, 2), (65, 20, 4)]
)
def test_what_has_too_many_pages_is_not_taken(heads, blocks, pages):
    def select(query, code, centre, walk):
        return kernel_selection.select_token_by_evidence(
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


# Key/value heads, head_dim, type; blocks, where calls end (tokens of each sequence).
OBSERVED = {
    "one piece": (2, 64, "bfloat16", [(3 * SIZE + 5, 4 * SIZE, 0)]),
    "pieces": (1, 128, "bfloat16", [(70, SIZE, 3), (2 * SIZE, SIZE, 130), (200, 4 * SIZE, 131)]),
    "half precision": (3, 64, "float16", [(5, 4 * SIZE - 1, 60), (9, 4 * SIZE, SIZE)]),
}


def observed_keys(kv_heads, head_dim, dtype, kind):
    rng = np.random.default_rng(head_dim + kv_heads)
    key = rng.normal(size=(3, 4 * SIZE, kv_heads, head_dim))
    key += 3.0 * rng.normal(size=(1, 1, kv_heads, head_dim))
    if kind == "hostile":
        slow = head_dim // 4
        key[0, 2, 0, slow], key[0, 67, 0, -1], key[1, 5, 0, slow] = np.nan, np.inf, -np.inf
        key[1, 7, 0, 0] = np.nan  # a fast channel, which does not count
        key[1, SIZE : 2 * SIZE] = np.nan
        key[1, 2 * SIZE : 3 * SIZE, :, slow] = 0.25
        key[1, 3 * SIZE :] *= np.logspace(-12, 4, SIZE)[:, None, None]
        key[2, :SIZE] = np.round(key[2, :SIZE] * 2.0) / 2.0  # halves between codes
        key[2, SIZE, :, slow], key[2, SIZE + 1 : 2 * SIZE, :, slow] = 14.0, 0.0
    with np.errstate(over="ignore"):  # to infinity
        return np.asarray(key, np.float32).astype(jnp.dtype(dtype))


def piece(key, starts, ends):
    """A span on block boundaries from `starts` to `ends`, and its keys; padding is NaN."""
    first = starts // SIZE
    width = max(1, int((-(-ends // SIZE) - first).max())) * SIZE
    place = first[:, None] * SIZE + np.arange(width)[None]
    valid = (place >= starts[:, None]) & (place < ends[:, None])
    own = np.take_along_axis(key, np.minimum(place, key.shape[1] - 1)[..., None, None], axis=1)
    own = np.where(valid[..., None, None], own, np.asarray(np.nan, key.dtype))
    first, ends = (jnp.asarray(x, jnp.int32) for x in (first, ends))
    return jnp.asarray(own), Span(first, jnp.asarray(valid), ends, ends)


def assert_same_codes(found, wanted, lengths):
    for name in ("code", "centre", "step"):
        a, b = (np.asarray(getattr(x, name)).astype(np.float32) for x in (found, wanted))
        np.testing.assert_array_equal(a, b, err_msg=name)
    a, b = (np.asarray(x.unfinished, np.float32) for x in (found, wanted))
    size = a.shape[1]
    is_there = (np.arange(size)[None] < (lengths % size)[:, None])[..., None, None]
    np.testing.assert_array_equal(np.where(is_there, a, 0.0), np.where(is_there, b, 0.0))


@jax.jit
def beside_centres(codes):
    return codes.residual(jnp.int32(0), codes.num_blocks, jnp.float32)


def assert_codes_of_host(codes, key, lengths, maker):
    """On the host no compiler has a hand in what is rounded."""
    slow = slow_channels(key.shape[-1])
    found = np.asarray(beside_centres(codes))
    found, centre = found.reshape(len(key), -1, SIZE, *found.shape[2:]), np.asarray(codes.centre)
    for batch, length in enumerate(lengths):
        for block, begin in enumerate(range(0, length, SIZE)):
            for head in range(key.shape[2]):
                keys = key[batch, begin : min(begin + SIZE, length), head][:, slow]
                middle, wanted = coded_block(keys)
                where = f"{maker}, sequence {batch}, block {block}, head {head}"
                own = centre[batch, block, head].astype(np.float32)
                np.testing.assert_array_equal(own, middle, err_msg=f"centre, {where}")
                wanted = np.full(keys.shape, np.nan) if wanted is None else wanted
                own = found[batch, block, : len(keys), head]
                np.testing.assert_array_equal(own, wanted, err_msg=f"beside it, {where}")


@functools.partial(jax.jit, static_argnames=("policy", "kernel_config"))
def observe(policy, key, codes, span, *, kernel_config):
    return policy.observe(key, key, codes, span=span, kernel_config=kernel_config)


@pytest.mark.parametrize("kind", ["random", "hostile"])
@pytest.mark.parametrize("case", OBSERVED)
def test_codes_are_those_of_plain_jax(case, kind):
    kv_heads, head_dim, dtype, calls = OBSERVED[case]
    key = observed_keys(kv_heads, head_dim, dtype, kind)
    policy = SketchWalkConfig.recommended_blocks()
    shape = LayerShape(kv_heads, kv_heads, head_dim, jnp.dtype(dtype))
    found = wanted = policy.init_statistics(shape, batch=3, num_blocks=4)
    starts = np.zeros(3, int)
    for ends in map(np.array, calls):
        ends = np.maximum(ends, starts)
        own, span = piece(key, starts, ends)
        found, wanted = (
            observe(policy, own, one, span, kernel_config=kernel_config)
            for one, kernel_config in ((found, KERNELS), (wanted, None))
        )
        assert_codes_of_host(wanted, key, ends, "plain JAX")
        assert_codes_of_host(found, key, ends, "kernel")
        assert_same_codes(found, wanted, ends)
        starts = ends


@pytest.mark.parametrize("kind", ["random", "hostile"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_of_tokens_are_those_of_plain_jax(head_dim, kind):
    key, policy = (
        observed_keys(2, head_dim, "bfloat16", kind),
        SketchWalkConfig.recommended_blocks(),
    )
    shape = LayerShape(2, 2, head_dim, jnp.bfloat16)
    found = policy.init_statistics(shape, batch=3, num_blocks=4)
    starts = np.array([60, 2 * SIZE, 0])
    own, span = piece(key, np.zeros(3, int), starts)
    found = wanted = observe(policy, own, found, span, kernel_config=None)
    for turn in range(6):
        active = np.array([True, True, turn % 2 == 0])
        own = key[np.arange(3), starts][:, None]
        own = np.where(active[:, None, None, None], own, np.asarray(np.nan, own.dtype))
        span = Span.of_tokens(jnp.asarray(starts, jnp.int32), SIZE, jnp.asarray(active))
        found, wanted = (
            observe(policy, jnp.asarray(own), one, span, kernel_config=kernel_config)
            for one, kernel_config in ((found, KERNELS), (wanted, None))
        )
        starts = starts + active
        assert_codes_of_host(wanted, key, starts, "plain JAX")
        assert_codes_of_host(found, key, starts, "kernel")
        assert_same_codes(found, wanted, starts)


@pytest.mark.parametrize("tokens", [2 * SIZE, 1])
def test_codes_of_one_layer_leave_the_others_alone(tokens):
    key, policy = observed_keys(2, 64, "bfloat16", "random"), SketchWalkConfig.recommended_blocks()
    shape = LayerShape(2, 2, 64, jnp.bfloat16)
    one = policy.init_statistics(shape, batch=3, num_blocks=4)
    rng = np.random.default_rng(0)
    before = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(0, 99, (3, *x.shape))).astype(x.dtype), one
    )
    ends = np.array([tokens, tokens, 1])
    own, span = piece(key, np.zeros(3, int), ends)
    if tokens == 1:
        own, span = own[:, :1], Span.of_tokens(jnp.asarray(ends - 1, jnp.int32), SIZE)

    @functools.partial(jax.jit, static_argnames="kernel_config")
    def observe_second(statistics, *, kernel_config):
        where = {"index": jnp.asarray(1, jnp.int32), "span": span, "policy": policy}
        one, stacked = observe_layer(statistics, own, own, **where, kernel_config=kernel_config)
        return one.take() if isinstance(one, LayerCodes) else one, stacked

    found, wanted = (observe_second(before, kernel_config=one) for one in (KERNELS, None))
    found, wanted, before = jax.device_get((found, wanted, before))
    assert_same_codes(found[0], wanted[0], ends)
    for layer in range(3):
        take = functools.partial(jax.tree.map, operator.itemgetter(layer))
        assert_same_codes(take(found[1]), take(wanted[1]), ends)
    np.testing.assert_array_equal(
        np.asarray(found[1].unfinished[::2], np.float32),
        np.asarray(before.unfinished[::2], np.float32),
    )


@pytest.mark.parametrize(
    ("dtype", "head_dim", "size"),
    [(jnp.float32, 64, 64), (jnp.bfloat16, 32, 64), (jnp.bfloat16, 64, 32)],
)
def test_codes_that_the_kernel_does_not_take_are_made_in_plain_jax(dtype, head_dim, size):
    policy = SketchWalkConfig.recommended_blocks(block_size=size, representatives=4)
    shape = LayerShape(1, 1, head_dim, dtype)
    codes = policy.init_statistics(shape, batch=1, num_blocks=2)
    key = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2 * size, 1, head_dim)), dtype)
    end = jnp.array([2 * size], jnp.int32)
    span = Span(jnp.zeros_like(end), jnp.ones((1, 2 * size), bool), end, end)
    stacked = jax.tree.map(lambda x: x[None], codes)
    layer = jnp.zeros((), jnp.int32)
    for kernel_config in (KERNELS, None):
        where = {"layer": layer, "span": span, "kernel_config": kernel_config}
        assert policy.in_place.observe(key, stacked, **where) is None
    found, wanted = (
        observe(policy, key, codes, span, kernel_config=one) for one in (KERNELS, None)
    )
    assert_same_codes(found, wanted, np.array([2 * SIZE]))


def test_warpgroups_ask_for_no_more_registers_than_there_are():
    """Who asked for more would wait for it forever, on a GPU alone."""
    from sketchwalk_jax.pallas_kernels import ops

    with pytest.raises(ValueError, match="at most 480 registers, got 40 and 112"):
        ops.share_registers(40, 112, num_computing=4, is_loader=True)
