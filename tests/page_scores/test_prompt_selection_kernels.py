"""The kernels that select for a prompt by the recommended policy, against plain JAX.

Tests run Hopper's kernels and those for GPUs from Ampere on, which a Hopper GPU runs, too: in the
interpreter, as compiled for Hopper and for an A100, or on a Hopper GPU.
"""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from kernel_draws import KERNELS
from variants import RUNS_COMPILED

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.page_scores import api, hopper
from sketchwalk_jax.pallas_kernels.page_scores import max_logits as ampere
from sketchwalk_jax.pallas_kernels.page_scores.hopper_dequantize import dequantize_kernel
from sketchwalk_jax.pallas_kernels.page_scores.hopper_max_logits import place_of_key
from sketchwalk_jax.pallas_kernels.page_scores.prompt_scores import page_scores_kernel
from sketchwalk_jax.policies import quantized_keys
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.quantized_keys import LayerKeys, QuantizedKeys, block_scores
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.precision import LARGEST_LOGIT

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module", params=["hopper", pytest.param("ampere", marks=pytest.mark.slow)])
def gpu(request):
    """Selects Hopper's kernels, or those for other GPUs; as compiled, for an A100."""
    jax.clear_caches()  # programs keep the kernels that they were traced with
    if request.param == "hopper":
        yield request.param
        return
    with kernel_draws.on_gpu("8.0"):
        here = dispatch.kernels_here if RUNS_COMPILED else lambda: "ampere"
        with mock.patch.object(dispatch, "kernels_here", here):
            yield request.param
    jax.clear_caches()


SIZE = 64
# Heads, key/value heads, channels, representatives of a row, rows before the first, new tokens.
CASES = {
    "eight of a row": (2, 1, 64, 4, 0, (9 * SIZE + 5, 3)),
    "three heads for one": (6, 2, 32, 8, 2, (4 * SIZE, 5 * SIZE - 1)),
    "several parts and tiles": (4, 1, 32, 16, 1, (4 * SIZE + 1, SIZE)),
    "many blocks": (1, 1, 32, 8, 63, (2 * SIZE, 3 * SIZE + 9)),
}
HOSTILE = ("equal", "nan", "huge", "below")
PAGES = 4
OF_PAGE = SIZE // PAGES
# Page max logits have the 11 bits of float16; tensor cores keep few more bits in sums.
BOUND = {"rtol": 5e-2, "atol": 1e-3}


@jax.jit
def coded(key, lengths):
    """Quantizes the first keys of each sequence."""
    batch, tokens, kv_heads, channels = key.shape
    sizes = {"batch": batch, "num_blocks": tokens // SIZE, "block_size": SIZE}
    sizes |= {"num_kv_heads": kv_heads, "num_channels": channels}
    valid = jnp.arange(tokens)[None] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    return QuantizedKeys.zeros(**sizes, dtype=key.dtype).add(key, span)


def draw(case, kind):
    """Draws queries, quantized keys, rows and lengths."""
    heads, kv_heads, channels, count, before, tokens = case
    rng = np.random.default_rng(heads + count)
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
        queries[0, 1] *= 1e18  # products overflow float32, and
        queries[0, 2] *= 1e12  # products that do not; both exceed the range
    if kind == "below":  # one key per channel is large: offsets' products are negative
        queries = np.abs(queries)
        for channel in range(channels):
            key[:, channel % SIZE :: SIZE, :, channel] += 30.0
    lengths = jnp.asarray(lengths, jnp.int32)
    stored = coded(jnp.asarray(key, jnp.bfloat16), lengths)
    rows = np.arange(before, before + num_rows, dtype=np.int32)[None]
    rows = jnp.asarray(np.broadcast_to(rows, (len(tokens), num_rows)))
    return jnp.asarray(queries, jnp.bfloat16), stored, rows, lengths


@functools.partial(jax.jit, static_argnames="kernel_config")
def run(queries, stored, rows, lengths, *, kernel_config):
    return block_scores(
        queries,
        stored,
        rows,
        kv_lengths=lengths,
        scale=0.2,
        exponent=4,
        pages=PAGES,
        kernel_config=kernel_config,
    )


KINDS = [*((case, "random") for case in CASES), *(("three heads for one", x) for x in HOSTILE)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("gpu", "case", "kind"),
    [
        pytest.param("ampere", *KINDS[0]),
        *(pytest.param("ampere", *one, marks=pytest.mark.slow) for one in KINDS[1:]),
        *(pytest.param("hopper", *one, marks=pytest.mark.slow) for one in KINDS),
    ],
    indirect=["gpu"],
)
def test_the_kernels_find_what_plain_jax_finds(case, kind, monkeypatch):
    monkeypatch.setattr(api, "_MOST_MAX_LOGITS", 2**15)  # splits some prompts
    monkeypatch.setattr(ampere, "_PART", 3)  # splits keys over thread blocks
    drawn = draw(CASES[case], kind)
    found, wanted = (np.asarray(run(*drawn, kernel_config=one)) for one in (KERNELS, None))
    _, _, rows, lengths = drawn
    is_row = np.asarray(rows * SIZE < lengths[:, None])[..., None]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.where(is_row, found, 0.0), np.where(is_row, wanted, 0.0), **BOUND)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_prompts_end_with_their_keys_and_with_the_cache():
    queries, stored, rows, _ = draw(CASES["eight of a row"], "random")
    room = stored.num_blocks * SIZE
    lengths = np.array([[0, 1], [SIZE, SIZE + 1], [room, room], [room + 1, 100 * room]])
    found = [np.asarray(run(queries, stored, rows, one, kernel_config=KERNELS)) for one in lengths]
    is_row = np.asarray(rows)[None] * SIZE < lengths[..., None]
    np.testing.assert_array_equal(np.any(found, axis=-1), is_row)
    np.testing.assert_array_equal(found[2], found[3])


# Case, kind of inputs, blocks before each sequence's first row.
SHARES_CASES = [
    ("eight of a row", "random", (0, 0)),
    ("three heads for one", "nan", (2, 0)),
    ("three heads for one", "huge", (0, 2)),
    ("three heads for one", "below", (2, 2)),
    ("several parts and tiles", "random", (1, 1)),
    ("a row of two warpgroups", "nan", (0, 1)),
    ("sixteen of a row", "equal", (1, 0)),
    ("many blocks", "random", (63, 50)),
]
CASES_OF_PAGES = CASES | {
    "a row of two warpgroups": (4, 1, 64, 16, 1, (2 * SIZE + 17, SIZE + 16)),
    "sixteen of a row": (4, 2, 64, 7, 1, (3 * SIZE, 2 * SIZE + 50)),
}


def max_logits_of_pages(query, factor, stored, lengths, *, of_magnitudes=False):
    """Computes page max logits in float16 from eight-bit queries `[B K M C]`.

    With `of_magnitudes`, returns the largest intermediate sum of a product instead.
    """
    key = stored.dequantized_offsets(jnp.int32(0), stored.num_blocks, jnp.float32)
    is_key = jnp.arange(key.shape[1])[None] < lengths[:, None]
    small = (query.astype(jnp.float32) / factor[..., None]).astype(jnp.float16)
    given = [np.asarray(x, np.float64) for x in (small.astype(jnp.float8_e4m3fn), key)]
    given = [np.abs(x) for x in given] if of_magnitudes else given
    products = np.einsum("bkmc,bskc->bkms", *given)
    products = np.where(np.asarray(is_key)[:, None, None], products, -np.inf)
    max_logits = products.reshape(*products.shape[:3], -1, OF_PAGE).max(axis=-1)
    max_logits = np.where(np.isinf(max_logits), np.nan, max_logits)  # a page without keys
    return np.swapaxes(max_logits.astype(np.float16), 2, 3)


def shares_of_pages(max_logits, factor, query, stored, first_row, *, per_row, scale, exponent):
    """Computes sums of powers of pages' shares, `[B I P]`, and the pages that each row sees."""
    batch, kv_heads, num_pages, num_queries = max_logits.shape
    row = np.asarray(first_row)[:, None] + np.arange(num_queries // per_row)
    is_seen = np.arange(num_pages) < PAGES * (row + 1)[..., None]
    with np.errstate(all="ignore"):
        shared = np.einsum(
            "bkmc,bjkc->bkjm", *(np.asarray(x, np.float64) for x in (query, stored.zero_point))
        )
        shared = shared.repeat(PAGES, axis=2).astype(np.float32)
        logits = max_logits.astype(np.float32) * np.asarray(factor)[:, :, None] + shared
        logits = logits.reshape(batch, kv_heads, num_pages, -1, per_row).astype(np.float64) * scale
        counts = is_seen.swapaxes(1, 2)[:, None, ..., None] & (np.abs(logits) < LARGEST_LOGIT)
        logits = np.where(counts, logits, -1e300)
        shares = np.exp(logits - logits.max(axis=2, keepdims=True))
        shares = np.where(counts, shares / shares.sum(axis=2, keepdims=True), 0.0)
    return (shares**exponent).sum(axis=(1, 4)).swapaxes(1, 2), is_seen


@functools.partial(jax.jit, static_argnames=("gpu", "scale", "exponent"))
def run_pages(queries, stored, first_row, lengths, *, gpu, scale, exponent):
    """Runs the kernels on queries `[B I R N C]`: max logits, factors, queries, sums of shares."""
    batch, num_rows, count, heads, channels = queries.shape
    num_blocks, kv_heads = stored.zero_point.shape[1:3]
    wanted = count * heads // kv_heads
    per_row, tile = hopper.queries_per_row(wanted), (hopper if gpu == "hopper" else ampere).TILE
    more_rows = -num_rows % (tile // np.gcd(tile, per_row))
    own = jnp.moveaxis(queries.reshape(batch, num_rows, count, kv_heads, -1, channels), 3, 1)
    own = own.reshape(batch, kv_heads, num_rows, wanted, channels)
    own = jnp.pad(own, ((0, 0), (0, 0), (0, more_rows), (0, per_row - wanted), (0, 0)))
    own = own.reshape(batch, kv_heads, -1, channels)
    where = {"lengths": lengths, "interpret": KERNELS.interpret}
    score = where | {"first_row": first_row, "per_row": per_row}
    shares = score | {"scale": scale, "exponent": exponent}
    stack, layer = stored.as_layer().stack, {"layer": jnp.int32(0)}
    if gpu == "hopper":
        key = dequantize_kernel(stack.quantized, stack.scale_exponent, **layer, **where)
        max_logits, factor = hopper.hopper_max_logits_kernel(own, key, wanted=wanted, **score)
        more = ((0, 0), (0, -num_blocks % hopper.STEP), (0, 0), (0, 0))
        zero_point = jnp.pad(stored.zero_point, more)
        found = hopper.hopper_page_scores_kernel(max_logits, factor, own, zero_point, **shares)
    else:
        twice, factor = api.doubled_queries(own, per_row=per_row, wanted=wanted)
        max_logits = ampere.max_logits_kernel(
            twice, stack.quantized, stack.scale_exponent, **layer, **score
        )
        found = page_scores_kernel(max_logits, factor, own, stored.zero_point, **shares)
    assert found.shape[2:] == (-(-per_row // 32), own.shape[2] // per_row, max_logits.shape[2])
    found = found[..., : PAGES * num_blocks].sum(axis=(1, 2))
    return max_logits[:, :, : PAGES * num_blocks], factor, own, found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind", "first_row"), SHARES_CASES)
def test_the_kernels_find_shares_of_pages(case, kind, first_row, gpu):
    queries, stored, rows, lengths = draw(CASES_OF_PAGES[case], kind)
    lengths = lengths - (rows[:, 0] - jnp.array(first_row)) * SIZE  # some keys are after the end
    first_row = jnp.array(first_row, jnp.int32)
    lengths, how = lengths.astype(jnp.int32), {"scale": 0.2, "exponent": 4}
    run_all = functools.partial(run_pages, queries, stored, first_row, lengths, gpu=gpu, **how)
    max_logits, factor, query, found = run_all()
    of_max_logits = functools.partial(max_logits_of_pages, query, factor, stored, lengths)
    wanted, largest, found = of_max_logits(), of_max_logits(of_magnitudes=True), np.asarray(found)
    per_row = query.shape[2] // found.shape[1]
    row = np.asarray(first_row)[:, None] + np.arange(query.shape[2]) // per_row
    is_written = np.arange(wanted.shape[2])[:, None] < PAGES * (row + 1)[:, None]
    # Rows after the last key are padding, whose numbers are arbitrary.
    is_row = row * SIZE < np.asarray(lengths)[:, None]
    is_written = (is_written & is_row[:, None])[:, None] & ~np.isnan(np.asarray(factor))[:, :, None]
    max_logits, wanted, largest = (
        np.where(is_written, x, 0.0) for x in (max_logits, wanted, largest)
    )
    # On a CPU the maximum of NaNs may be -inf, which leaves a page out as well.
    max_logits = np.where(np.isneginf(max_logits), np.float16(np.nan), max_logits)
    np.testing.assert_array_equal(np.isnan(max_logits), np.isnan(wanted))
    is_close = np.isclose(max_logits, wanted, rtol=2**-10, atol=2**-9, equal_nan=True)
    if gpu == "hopper":
        assert is_close.all()
    else:
        # Sums are rounded to 11 bits after each 16 channels; the reference rounds once.
        roundings = query.shape[-1] // 16 + 1
        away = np.abs(max_logits.astype(np.float64) - wanted)
        assert not (away > roundings * 2.0**-11 * largest.astype(np.float64)).any()
        assert is_close.mean() > 0.99  # most differ by at most one step
    wanted, is_seen = shares_of_pages(
        max_logits, factor, query, stored, first_row, per_row=per_row, **how
    )
    is_seen &= is_row[:, ::per_row, None]
    found, again = (np.where(is_seen, x, 0.0) for x in (found, np.asarray(run_all()[3])))
    np.testing.assert_array_equal(found, again)
    assert np.isfinite(found).all() and (kind != "random" or found.max() > 0.1)
    # On a GPU, Hopper's kernels flush powers below float32's smallest normal number to zero.
    is_exact = gpu == "ampere" or jax.default_backend() == "cpu"
    bound = {"rtol": 1e-3, "atol": 1e-6} if is_exact else {"rtol": 1e-2, "atol": 1e-37}
    np.testing.assert_allclose(found, np.where(is_seen, wanted, 0.0), **bound)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("dtype", "channels", "size"),
    [(jnp.float32, 64, 64), (jnp.bfloat16, 16, 64), (jnp.bfloat16, 64, 32)],
)
def test_what_the_kernels_do_not_take_goes_to_plain_jax(dtype, channels, size):
    stored = QuantizedKeys.zeros(
        batch=1, num_blocks=4, block_size=size, num_kv_heads=1, num_channels=channels, dtype=dtype
    )
    queries = jnp.ones((1, 4, 2, 2, channels), dtype)
    rows, lengths = jnp.arange(4, dtype=jnp.int32)[None], jnp.array([4 * size], jnp.int32)
    found = run(queries, stored, rows, lengths, kernel_config=KERNELS)
    np.testing.assert_array_equal(found, run(queries, stored, rows, lengths, kernel_config=None))


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("gpu", ["hopper"], indirect=True)
@pytest.mark.parametrize("size", [(3, 32), (2, 64)])
def test_keys_are_dequantized_to_eight_bits(size):
    kv_heads, channels = size
    layers, layer, batch, blocks = 3, 1, 2, 5
    rng = np.random.default_rng(kv_heads)
    shape = (layers, batch, blocks, kv_heads, SIZE, channels // 2)
    high, low = rng.integers(-7, 8, size=(2, *shape))
    quantized = jnp.asarray((high << 4 | low & 15) & 255, jnp.uint8)
    scale_exponent = rng.integers(
        quantized_keys.MIN_EXPONENT, quantized_keys.MAX_EXPONENT + 1, size=(*shape[:3], *size)
    )
    scale_exponent[:, 1, 3:] = quantized_keys.NO_KEY
    scale_exponent = jnp.asarray(scale_exponent, jnp.int8)
    lengths = jnp.array([blocks * SIZE - 3, 2 * SIZE + 1], jnp.int32)
    found = dequantize_kernel(
        quantized,
        scale_exponent,
        layer=jnp.int32(layer),
        lengths=lengths,
        interpret=KERNELS.interpret,
    )
    assert found.dtype == jnp.float8_e4m3fn
    # In place of an absent token, the kernel repeats the first of its page.
    place = np.arange(blocks * SIZE).reshape(1, blocks, SIZE)
    is_key = (place < np.asarray(lengths)[:, None, None])[:, :, None, :, None]
    first = np.arange(SIZE) // OF_PAGE * OF_PAGE
    own = jnp.where(is_key, quantized[layer], quantized[layer][:, :, :, first])
    nothing = jnp.zeros((batch, blocks, *size))
    stored = QuantizedKeys(own, nothing, scale_exponent[layer], nothing[:, :, None])
    wanted = np.asarray(stored.dequantized_offsets(jnp.int32(0), blocks, jnp.float32))
    assert not np.isfinite(wanted).all()
    is_page = is_key[:, :, 0, first].reshape(batch, blocks * SIZE)
    order = np.argsort([place_of_key(key) for key in range(SIZE)])
    order = (np.arange(blocks)[:, None] * SIZE + order).ravel()
    # Lines hold several keys: keys of eight blocks are stacked first, then set side by side.
    assert found.shape[1:] == (kv_heads, 1, 4 * channels, 128)
    found = found.astype(jnp.float32).reshape(batch, kv_heads, 4 * channels, -1, channels)
    found = np.asarray(found.transpose(0, 3, 2, 1, 4).reshape(batch, -1, kv_heads, channels))
    found, wanted, is_page = found[:, : blocks * SIZE], wanted[:, order], is_page[:, order]
    np.testing.assert_array_equal(found[is_page], wanted[is_page])
    # One NaN channel makes every product NaN.
    assert np.isnan(found[~is_page]).any(axis=-1).all() and not is_page.all()


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("head_dim", "count"), [(64, 8), (128, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_representatives_are_those_of_plain_jax(head_dim, count, dtype):
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


def test_a_prompt_is_selected_alike(gpu):
    """Early rows have more representatives than later ones, all in one call."""
    policy = SketchWalkConfig.recommended(
        density=0.5, min_tokens=96, early_representatives=((128, 16),)
    )
    rng = np.random.default_rng(0)
    heads, kv_heads, head_dim, blocks = 4, 2, 64, 5 if KERNELS.interpret else 9
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

    @functools.partial(jax.jit, static_argnames="kernel_config")
    def select(*, kernel_config):
        stored = policy.update_statistics(query, key, empty, span=span, kernel_config=kernel_config)
        # The layer is the second of a stack of two.
        stack = jax.tree.map(lambda none, one: jnp.stack([none, one]), empty, stored)
        stored, layer = LayerKeys(stack, jnp.ones((), jnp.int32)), jnp.zeros((), jnp.int32)
        return policy.select(
            query, key[None], stored, walk, layer=layer, span=span, kernel_config=kernel_config
        )[0]

    traced = select.trace(kernel_config=KERNELS)
    run_kernels = traced.lower().compile()
    found, wanted = run_kernels(), select(kernel_config=None)
    if not KERNELS.interpret:  # which takes long
        jax.tree.map(np.testing.assert_array_equal, found, run_kernels())
    np.testing.assert_array_equal(found.counts, wanted.counts)
    assert (found.block_size, found.row_size) == (wanted.block_size, wanted.row_size)
    counts = np.asarray(wanted.counts)[0, 0]
    pairs = [np.asarray(one.ids)[0, 0] for one in (found, wanted)]
    # Near-ties may differ.
    common = [len({*x[:n]} & {*y[:n]}) for x, y, n in zip(*pairs, counts, strict=True)]
    assert sum(common) > 0.95 * counts.sum()
    if KERNELS.interpret:
        text = str(traced.jaxpr)
        names = r"=(\w*max_logits\w*|\w*_scores\w*|\w+_offsets|quantized_keys|representatives)\b"
        own = {"max_logits_kernel", "page_scores_kernel"}
        own = {"page_max_logits", "block_scores", "dequantized_offsets"} if gpu == "hopper" else own
        assert set(re.findall(names, text)) == {*own, "quantized_keys", "representatives"}


def test_warpgroups_ask_for_no_more_registers_than_there_are():
    """With too many registers a warpgroup waits forever, but only on a GPU."""
    from sketchwalk_jax.pallas_kernels.lib import ops

    with pytest.raises(ValueError, match="at most 480 registers, got 40 and 112"):
        ops.share_registers(40, 112, num_computing=4, is_loader=True)
