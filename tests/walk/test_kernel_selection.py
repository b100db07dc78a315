"""The kernels of the printed rule's selection give plain JAX's lists, sums and walks.

The module tests the whole policy, then each kernel on edge cases.
Kernels run in Pallas' interpreter (by default one case of each), in the emulator (CONTRIBUTING.md),
or on a Hopper GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -n 0
tests/walk/test_kernel_selection.py`
"""

import functools

import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from kernel_draws import KERNELS, ON_GPU
from pairwise import pairwise
from tolerances import tolerance
from variants import INTERPRET, slow_unless

from sketchwalk_jax import SketchWalkConfig, init_walk, sketch
from sketchwalk_jax.pallas_kernels.config import MAX_BLOCKS, MAX_LISTED, MAX_POWER
from sketchwalk_jax.pallas_kernels.top_k.select import ordered_keys, select_blocks_kernel
from sketchwalk_jax.pallas_kernels.walk import walk_row
from sketchwalk_jax.pallas_kernels.walk.block_sums import block_sums_kernel
from sketchwalk_jax.pallas_kernels.walk.select_decode import select_token_kernel
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.selection import block_budget, select_blocks
from sketchwalk_jax.walk import WalkState, walk_step

# Whole policy

SIZE, BLOCKS = 16, 7
BAD = 3 * SIZE + 5  # a token's position
CONFIGS = {
    "paper": SketchWalkConfig.paper(block_size=SIZE, density=0.4),
    "damped": SketchWalkConfig.damped(block_size=SIZE, density=0.4),
    "one hop of powers": SketchWalkConfig.paper(block_size=SIZE, density=0.4, beta=0.0),
    "relu": SketchWalkConfig.paper(block_size=SIZE, density=0.3, transition="relu_power"),
}


@functools.partial(jax.jit, static_argnames=("config", "kernel_config"))
def select_layer(query, key, span, walk, layer, *, config, kernel_config):
    """Returns lists, walk and statistics of one layer of a prompt."""
    shape = LayerShape(4, 2, 128)
    sums = config.init_statistics(shape, batch=len(query), num_blocks=BLOCKS)
    sums = config.update_statistics(query, key, sums, span=span, kernel_config=kernel_config)
    options = {"layer": layer, "span": span, "kernel_config": kernel_config}
    lists, walk = config.select(query, key[None], sums, walk, **options)
    return lists, walk, sums


@functools.partial(jax.jit, static_argnames=("config", "kernel_config"))
def select_token(query, key, span, sums, walk, layer, *, config, kernel_config):
    """Returns list and walk of one token in one layer."""
    options = {"layer": layer, "span": span, "kernel_config": kernel_config}
    return config.select(query, key[None], sums, walk, **options)


def run(config, lengths, kernel_config, bad=None):
    """Runs two layers of a prompt, then of its last token; returns lists, sums and walks.

    If `bad` is given, one key of the first sequence has this value.
    """
    rng = np.random.default_rng(3)
    lengths = jnp.asarray(lengths, jnp.int32)
    batch, tokens = len(lengths), BLOCKS * SIZE
    valid = jnp.arange(tokens, dtype=jnp.int32)[None, :] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    prompt = init_walk(batch, tokens, policy=config)
    token = WalkState.zeros(batch, 1, BLOCKS)
    found = []
    for layer in range(2):
        query, key = (
            2 * rng.standard_normal((batch, BLOCKS, 1, n, 128))
            + rng.standard_normal((batch, BLOCKS, SIZE, n, 128))
            for n in (4, 2)
        )
        query, key = (
            jnp.asarray(x.reshape(batch, tokens, -1, 128), jnp.bfloat16) for x in (query, key)
        )
        if bad is not None:
            key = key.at[0, BAD].set(bad)
        index = jnp.asarray(layer, jnp.int32)
        options = {"config": config, "kernel_config": kernel_config}
        lists, prompt, sums = select_layer(query, key, span, prompt, index, **options)
        last = query[jnp.arange(batch), lengths - 1][:, None]
        own = Span.of_tokens(lengths - 1, SIZE)
        one, token = select_token(last, key, own, sums, token, index, **options)
        found.append((lists, one, sums, prompt.scores, token.scores))
    return found


def assert_same_lists(found, wanted):
    np.testing.assert_array_equal(found.counts, wanted.counts)
    np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", slow_unless("paper".__eq__, CONFIGS))
def test_lists_sums_and_walk_are_the_same(name):
    config, lengths = CONFIGS[name], (BLOCKS * SIZE, 5 * SIZE + 3)
    pairs = zip(run(config, lengths, KERNELS), run(config, lengths, None), strict=True)
    for (lists, one, *states), (wanted_lists, wanted_one, *wanted_states) in pairs:
        assert_same_lists(lists, wanted_lists)
        assert_same_lists(one, wanted_one)
        sums, wanted_sums = states.pop(0), wanted_states.pop(0)
        for actual, wanted in zip(*map(jax.tree.leaves, (sums, wanted_sums)), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-4)
        for actual, wanted in zip(states, wanted_states, strict=True):
            scale = np.abs(wanted).max(-1, keepdims=True)
            scale = np.where(scale == 0, 1, scale)
            # Powers multiply the relative errors of scores by the exponent.
            close = tolerance("scores")["atol"] * 2 * config.exponent
            np.testing.assert_allclose(actual / scale, wanted / scale, rtol=0, atol=close)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_key_reaches_no_earlier_row_and_lists_keep_their_forced_blocks(name):
    """A prompt's lists equal XLA's; a token's list keeps its forced blocks."""
    config, lengths = CONFIGS[name], (BLOCKS * SIZE, 5 * SIZE + 3)
    plain = run(config, lengths, KERNELS)
    found, wanted = (run(config, lengths, x, bad=np.nan) for x in (KERNELS, None))
    for (lists, one, _, state, _), (xla_lists, *_), (clean_lists, clean_one, _, clean, _) in zip(
        found, wanted, plain, strict=True
    ):
        np.testing.assert_array_equal(lists.ids, xla_lists.ids)
        upto = BAD // SIZE
        np.testing.assert_array_equal(state[0, :upto], clean[0, :upto])
        np.testing.assert_array_equal(lists.ids[0, 0, :upto], clean_lists.ids[0, 0, :upto])
        np.testing.assert_array_equal(lists.ids[1], clean_lists.ids[1])
        np.testing.assert_array_equal(one.ids[1], clean_one.ids[1])
        np.testing.assert_array_equal(one.counts, clean_one.counts)
        assert np.isfinite(state).all()
        kept = one.ids[0, 0, 0, : int(one.counts[0, 0, 0])].tolist()
        assert kept == sorted(set(kept)) and {0, BLOCKS - 1} <= set(kept)
        assert kept[-1] == BLOCKS - 1


# Lists of given scores

EXTREMES = [3.4028235e38, -3.4028235e38, 1.2e-38, -1.2e-38]
NUMBERS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "wide": lambda rng, shape: rng.choice([-1, 0, 1, 1], shape) * 2 ** rng.uniform(-120, 99, shape),
    "ties": lambda rng, shape: rng.choice([-2.0, -0.0, 0.0, 1.0], shape),
    "equal": lambda rng, shape: np.full(shape, -3.5),
    "neighbours": lambda rng, shape: 1 + rng.integers(0, 8, shape) * 2.0**-23,
    "extremes": lambda rng, shape: rng.choice(EXTREMES, shape),
    "bits": lambda rng, shape: rng.integers(0, 2**32, shape, np.uint32).view(np.float32),
    "not finite": lambda rng, shape: rng.choice([np.nan, -np.nan, np.inf, -np.inf, -3, 2], shape),
    "NaN": lambda rng, shape: np.full(shape, np.nan),
}
ROW_SIZES = (1, 5, 128, 157, 512)  # 128 threads per row: padded or not, one or more columns each
BUDGETS = ((0.2, 1, 1), (0.1, 0, 1), (0.35, 2, 3), (1.0, 1, 1), (0.01, 4, 2))  # share, sink, local
SMOKE = ("ties", 157, BUDGETS[1])


def draw(kind, rng, *shape):
    return NUMBERS[kind](rng, shape).astype(np.float32)


@functools.cache
def list_programs(sinks, local, max_count):
    """Returns the kernel and plain JAX, for scores of any shape."""
    sizes = {"sink_blocks": sinks, "local_blocks": local, "max_count": max_count, "block_size": 64}
    kernel = functools.partial(select_blocks_kernel, interpret=INTERPRET, **sizes)
    return jax.jit(kernel), jax.jit(functools.partial(select_blocks, **sizes))


def compare_lists(scores, rows, counts, capfd, *, sinks=1, local=1):
    kernel, plain = list_programs(sinks, local, int(np.max(counts)))
    arrays = scores, np.int32(rows), np.int32(counts)
    found = kernel_draws.run(kernel, arrays, capfd, times=2 if ON_GPU else 1)
    assert_same_lists(found, plain(*arrays))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case", slow_unless(SMOKE.__eq__, pairwise([*NUMBERS], ROW_SIZES, BUDGETS)), ids=str
)
def test_lists_of_first_and_last_rows(case, capfd):
    """One list is empty, and one row is beyond the cache."""
    kind, num_blocks, (density, sinks, local) = case
    last = num_blocks - 1
    rows = np.array([[0, min(1, last), last // 3, last // 2], [max(last - 1, 0), last, last, 600]])
    budget = block_budget(num_blocks, density=density, sink_blocks=sinks, local_blocks=local)
    counts = budget[np.minimum(rows, last)]
    counts[1, 1] = 0
    scores = draw(kind, np.random.default_rng(num_blocks), *rows.shape, num_blocks)
    compare_lists(scores, rows, counts, capfd, sinks=sinks, local=local)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "counts"),
    [
        ("ties", [40] * 39, range(2, 41)),
        ("wide", [MAX_LISTED - 1, MAX_LISTED - 100], [410, MAX_LISTED - 99]),
        ("ties", [MAX_LISTED - 1], [410]),
    ],
    ids=["every count", "all of the longest rows", "ties in the longest rows"],
)
def test_every_count_and_the_longest_rows(kind, rows, counts, capfd):
    scores = draw(kind, np.random.default_rng(0), 1, len(rows), max(rows) + 1)
    compare_lists(scores, [rows], [counts], capfd)


def test_keys_have_the_order_of_the_scores():
    scores = np.float32([-np.inf, -3.4e38, -1e-38, -0.0, 0.0, 1e-38, 3.4e38])
    keys = np.asarray(ordered_keys(jnp.asarray(scores)))
    np.testing.assert_array_equal(np.diff(keys) > 0, np.diff(scores) > 0)
    assert keys[3] == keys[4] == 0
    others = jnp.asarray([np.inf, np.nan, -np.nan], jnp.float32)
    assert set(ordered_keys(others).tolist()) == {int(keys[0])}


# Walk and list of a token

BLOCK = 64
# Blocks, groups, entries of sketches, and the largest number of parts of a row.
TOKENS = [(5, 1, 32, 16), (130, 1, 32, 16), (256, 1, 64, 16), (300, 2, 32, 16)]
RULES = [(8, False), (3, True), (1, False), (MAX_POWER, False)]  # power, rectify
# More tiles of 128 query blocks than parts; sketches of one chunk and of three.
MANY_TILES = [((600, 1, 32, 4), (8, False), None), ((600, 3, 32, 4), (5, True), None)]
# Blocks of both tokens: the last block, and the ends of both halves of a tile.
PLACES = [(599, 0), (63, 64), (127, 128)]


def token_programs(num_blocks, budget, *, power, rectify, beta):
    """Returns the kernel and plain JAX, each giving list and walk."""
    sizes = {"sink_blocks": 1, "local_blocks": 1, "block_size": BLOCK, "max_count": int(budget[-1])}

    def kernel(token, query, key, walk, *places):
        options = {"power": power, "rectify": rectify, "use_walk": beta is None}
        options |= {"head_dim": 64, "interpret": INTERPRET}
        arrays = (token, query, key, walk.scores, walk.layers, *places)
        lists, *walk = select_token_kernel(*arrays, **options, **sizes)
        return lists, WalkState(*walk)

    def plain(token, query, key, walk, positions, counts):
        rows = (positions // BLOCK)[:, None]
        is_row = jnp.arange(num_blocks, dtype=jnp.int32)[None] == rows
        means = functools.partial(sketch.block_means, lengths=positions + 1, block_size=BLOCK)
        query, key = (means(jnp.nan_to_num(x)) for x in (query, key))
        query = jnp.where(is_row[:, :, None, None], token[:, None], query)
        scores = sketch.block_scores(query, key, 64)
        options = {"transition": "relu_power" if rectify else "power", "exponent": power}
        scores, walk = walk_step(walk, scores, rows, walk_degree=1, beta=beta, **options)
        return select_blocks(scores, rows, counts, **sizes), walk

    return jax.jit(kernel), jax.jit(plain)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rule", "beta"), [*pairwise(TOKENS, RULES, (None, 0.0)), *MANY_TILES], ids=str
)
def test_layers_of_a_token(sizes, rule, beta, monkeypatch):
    """Sums of later blocks are NaN; at the last place all products of sketches are negative."""
    (num_blocks, *features, splits), (power, rectify) = sizes, rule
    monkeypatch.setattr(walk_row, "MAX_SPLITS", splits)
    budget = block_budget(num_blocks, density=0.2, sink_blocks=1)
    programs = token_programs(num_blocks, budget, power=power, rectify=rectify, beta=beta)
    rng = np.random.default_rng(num_blocks + power)
    for place in PLACES:
        rows = np.minimum(place, num_blocks - 1)
        offsets = np.array([0, 40])
        walk = WalkState.zeros(2, 1, num_blocks)
        for _ in range(2):
            token = rng.normal(0.5, 1.0, (2, *features))
            query, key = rng.normal(30.0, 64.0, (2, 2, num_blocks, *features))
            if place == PLACES[-1]:
                token, query, key = -np.abs(token), np.abs(query), np.abs(key)
            for sequence, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
                key[sequence, row] *= (offset + 1) / BLOCK
                query[sequence, row + 1 :] = key[sequence, row + 1 :] = np.nan
            arrays = (*map(np.float32, (token, query, key)), walk, np.int32(rows * BLOCK + offsets))
            (lists, state), (wanted, walk) = (run(*arrays, budget[rows, None]) for run in programs)
            assert_same_lists(lists, wanted)
            assert state.layers == walk.layers
            # Rounding of a signed sum is relative to its largest term.
            largest = np.abs(walk.scores).max()
            np.testing.assert_allclose(state.scores, walk.scores, rtol=3e-5, atol=1e-6 * largest)


# Sums of sketches

DTYPES = ("bfloat16", "float16", "float32")
# Query heads, key heads, head_dim and sketch_dim.
HEADS = [(4, 2, 128, 64), (4, 2, 64, 64), (7, 1, 128, None), (4, 2, 128, 32), (4, 2, 256, 128)]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"), pairwise(HEADS, (16, 64), DTYPES), ids=str
)
def test_sums_of_sketches(heads, block_size, dtype):
    """Tokens that do not count are NaN; one block has only such tokens."""
    *numbers, head_dim, sketch_dim = heads
    omega = sketch.srht_matrix(head_dim, sketch_dim)
    rng = np.random.default_rng(numbers[0])
    valid = rng.random((2, 2 * block_size)) > 0.3
    valid[1, block_size:] = False
    query, key = (rng.normal(size=(*valid.shape, number, head_dim)) for number in numbers)
    query[~valid] = key[~valid] = np.nan

    @jax.jit
    def run(valid, *tokens):
        sizes = {"omega": omega, "block_size": block_size, "interpret": INTERPRET}
        means = (sketch.block_sums(sketch.head_means(x), valid, block_size) for x in tokens)
        return block_sums_kernel(*tokens, valid, **sizes), [sketch.project(x, omega) for x in means]

    found, wanted = run(valid, *(x.astype(jnp.dtype(dtype)) for x in (query, key)))
    for sums, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-5)


# Refusals and choices, without a kernel.


def test_arrays_that_do_not_fit_are_refused():
    def refuse(words, kernel, *shapes, **options):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(functools.partial(kernel, **options), *arrays)

    forced = {"sink_blocks": 0, "local_blocks": 1}
    zero, one = jnp.int32(0), jnp.zeros((1, 1), jnp.int32)
    scores = (1, 1, MAX_LISTED + 1)
    options = {"rows": one, "counts": one, "max_count": 1, **forced}
    refuse("at most 65536 columns", select_blocks_kernel, scores, **options)
    for size, power, num_blocks in ((24, 8, 5), (32, MAX_POWER + 1, 5), (32, 8, MAX_BLOCKS + 1)):
        words, sums = f"got {size}, {power} and {num_blocks}", (1, num_blocks, 1, size)
        options = {"layers": zero, "positions": one[0], "counts": one, "head_dim": 64, **forced}
        shapes = (1, 1, size), sums, sums, (1, 1, num_blocks)
        refuse(words, select_token_kernel, *shapes, power=power, max_count=1, **options)
    heads, valid = ((1, 64, 3, 64), (1, 64, 1, 64)), jnp.ones((1, 64), bool)
    refuse("must fill rows of 128", block_sums_kernel, *heads, valid=valid)
