"""Tokens that are NaN or infinite: which outputs they reach, and which blocks stay listed."""

import functools

import cases
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import policy_runs
import pytest
import tiny
from attention_cases import AttentionKernelCase
from variants import slow_unless, weekly

from sketchwalk_jax import (
    BlockSelection,
    Dense,
    SketchWalkConfig,
    forward,
    generate,
    sketchwalk_attention,
)
from sketchwalk_jax.attention.api import (
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
    prepare_lists,
)
from sketchwalk_jax.attention.differentiable import attend_lists
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.oracle import OracleConfig
from sketchwalk_jax.policies.recommended import RecommendedConfig

SIZE, LENGTH, NUM_LAYERS, HEADS, HEAD_DIM = 16, 160, 3, (4, 2), 16
BAD = 85  # the token; rows of earlier blocks must not change
BAD_ROW = BAD // SIZE
SPARSE = {"block_size": SIZE, "dense_layers": 0, "density": 0.4}
POLICIES = {
    "paper": SketchWalkConfig.paper(**SPARSE),
    "relu": SketchWalkConfig.paper(transition="relu_power", **SPARSE),
    "damped": SketchWalkConfig.damped(**SPARSE),
    "one_hop": SketchWalkConfig.one_hop(**SPARSE),
    "released": SketchWalkConfig.released(block_size=SIZE, dense_layers=0, dense_rows=0),
    "recommended": SketchWalkConfig.recommended(**(SPARSE | {"block_size": 32}), min_tokens=48),
    "whole blocks": SketchWalkConfig.recommended(**SPARSE, local_tokens=0, min_tokens=32),
    "oracle": OracleConfig(**SPARSE, sink_blocks=2, local_blocks=2),
    "oracle_max": OracleConfig(**SPARSE, aggregation="max"),
}
# The bad value at one token of every layer, in the first of two sequences.
BAD_TOKENS = {
    "key nan": ("key", np.nan),
    "key inf": ("key", np.inf),
    "key -inf": ("key", -np.inf),
    "key huge": ("key", 3e38),  # scores overflow
    "query nan": ("query", np.nan),
    "query inf": ("query", np.inf),
    "value nan": ("value", np.nan),
}
KEPT = ("paper", "damped", "recommended", "oracle")
FEW = ("damped", "recommended", "oracle")


@functools.cache
def draw():
    """Draws queries, keys and values `[L, 2, T, heads, H]`."""
    shape = {"num_layers": NUM_LAYERS, "num_tokens": LENGTH, "spread": 0.7}
    drawn = [cases.draw_layers(seed, heads=HEADS, head_dim=HEAD_DIM, **shape) for seed in (0, 1)]
    names = ("queries", "keys", "values")
    return [np.stack([np.stack(getattr(x, name)) for x in drawn], axis=1) for name in names]


def spoiled(where, what):
    """Copies the arrays and adds one bad token."""
    arrays = dict(zip(("query", "key", "value"), draw(), strict=True))
    arrays[where] = arrays[where].copy()
    arrays[where][:, 0, BAD] = what
    return list(arrays.values())


@functools.cache
def lists(name, bad=None):
    """Returns every layer's lists of both sequences, by row."""
    query, key, _ = draw() if bad is None else spoiled(*BAD_TOKENS[bad])
    return policy_runs.prefill_rows(POLICIES[name], query, key, [LENGTH] * 2)[0]


@pytest.mark.parametrize("bad", [name for name in BAD_TOKENS if "value" not in name])
@pytest.mark.parametrize("name", slow_unless(KEPT.__contains__, POLICIES))
def test_lists_before_a_bad_token_are_equal_and_all_have_their_forced_blocks(name, bad):
    config = POLICIES[name]
    blocks = getattr(config, "sink_blocks", 1), getattr(config, "local_blocks", 1)
    sink, local = getattr(config, "forced", blocks)
    # Rows of the published code depend on later blocks.
    before = 0 if name == "released" else BAD // config.block_size
    for found, wanted in zip(lists(name, bad), lists(name), strict=True):
        assert found[0][:before] == wanted[0][:before]
        assert found[1] == wanted[1]
        for row, kept in enumerate(found[0]):
            end = (row + 1) * getattr(config, "pages", 1)
            assert kept == sorted(set(kept)) and max(kept) == end - 1
            assert {*range(min(sink, end)), *range(max(0, end - local), end)} <= set(kept)


# Selection is block-causal: rows of the bad token's own block may list other blocks.
CALLS = {name: config for name, config in POLICIES.items() if name != "released"}


@functools.partial(jax.jit, static_argnames="config")
def call(query, key, value, *, config):
    return sketchwalk_attention(query, key, value, policy=config, implementation="xla")[0]


@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, CALLS))
def test_a_layer_is_equal_in_earlier_blocks_and_finite_before_a_bad_token(name):
    rng, arrays = np.random.default_rng(0), [x[0] for x in draw()]
    plain = call(*arrays, config=CALLS[name])
    for which, what in ((2, np.nan), (2, np.inf), (1, np.nan), (1, np.inf), (0, np.nan)):
        position, head = int(rng.integers(LENGTH)), int(rng.integers(HEADS[1]))
        bad = [x.copy() for x in arrays]
        bad[which][0, position, head] = what
        out = call(*bad, config=CALLS[name])
        upto = position // SIZE * SIZE
        np.testing.assert_array_equal(out[0, :upto], plain[0, :upto])
        np.testing.assert_array_equal(out[1], plain[1])
        assert np.isfinite(out[0, :position]).all()
        assert not np.isfinite(out[0, position]).all() or what == np.inf and which == 1


@pytest.mark.parametrize("bad", ["key nan", "query inf"])
@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, POLICIES))
def test_decoded_tokens_keep_their_forced_blocks(name, bad):
    """Decodes after a bad token, and the bad token itself; the other sequence is unchanged."""
    config, results = POLICIES[name], []
    sink, local = getattr(config, "sink_blocks", 1), getattr(config, "local_blocks", 1)
    local = 1 if isinstance(config, RecommendedConfig) else local  # in decode the token's own block
    for arrays in (draw(), spoiled(*BAD_TOKENS[bad])):
        query, key, _ = arrays
        for position in (BAD, BAD + 20):
            _, statistics = policy_runs.prefill_rows(config, query, key, [position] * 2)
            new = (x[:, :, [position]] for x in (query, key))
            rows, _ = policy_runs.decode_rows(config, *new, statistics, [position] * 2, key)
            results.append(rows)
            own = position // SIZE
            for layer in rows:
                assert {*range(sink), *range(own + 1 - local, own + 1)} <= set(layer[0])
                assert len(set(layer[0])) == len(layer[0]) and max(layer[0]) == own
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        assert [layer[1] for layer in one] == [layer[1] for layer in other]
        if name != "released":
            assert [len(layer[0]) for layer in one] == [len(layer[0]) for layer in other]


@pytest.mark.parametrize("what", [np.nan, np.inf])
@pytest.mark.parametrize("where", [1, 2])
def test_dense_attention_before_a_bad_token_is_bit_equal(where, what):
    """This holds for each token, within one tile of queries and one step of keys."""
    arrays = [jnp.asarray(x[0]) for x in draw()]
    plain = dense_attention(*arrays, implementation="xla")
    arrays[where] = arrays[where].at[0, BAD].set(what)
    out = dense_attention(*arrays, implementation="xla")
    np.testing.assert_array_equal(out[0, :BAD], plain[0, :BAD])
    np.testing.assert_array_equal(out[1], plain[1])
    if what is np.nan or where == 2:
        assert np.isnan(out[0, BAD:]).all()


def test_one_token_knows_nothing_of_what_stands_behind_it():
    query, key, value = (jnp.asarray(x[0]) for x in draw())
    where = {"query_offset": jnp.full((2,), BAD, jnp.int32), "implementation": "xla"}
    plain = dense_attention(query[:, :1], key, value, **where)
    behind = jnp.arange(LENGTH)[:, None, None] > BAD
    key, value = (jnp.where(behind, jnp.nan, x) for x in (key, value))
    np.testing.assert_array_equal(dense_attention(query[:, :1], key, value, **where), plain)


# Given lists, on XLA; tests/attention tests the kernels. Chunks follow a cache.
LISTS = {
    "prefill": {"lengths": (90, 80, 49, 65)},
    "one list for each head": {"lengths": (90, 80), "lists": "head"},
    "piece": {"lengths": (90, 80), "first_blocks": (2, 1), "lists": "kv_head", "room": 2},
    "decode": {"lengths": (90, 80, 1, 65), "op": "decode"},
    "decode, tokens": {"lengths": (40, 33), "op": "decode", "block_size": 1, "lists": "head"},
}


@functools.cache
def attend_to_lists(case):
    def attend(query, key, value, ids, counts, layer, kv_lengths, first_block):
        selection = BlockSelection(ids, counts, case.block_size)
        where = {"layer": layer, "kv_lengths": kv_lengths, "implementation": "xla"}
        if case.op == "decode":
            return block_sparse_decode(query, key, value, selection, return_lse=True, **where)
        given = prepare_lists(query, key, value, selection, first_block, return_lse=True, **where)
        return attend_lists(*given)

    return jax.jit(attend)


@pytest.mark.parametrize("name", LISTS)
def test_with_lists_given_only_those_who_see_a_bad_token_feel_it(name):
    shape = {"op": "prefill", "block_size": SIZE, "head_dim": HEAD_DIM, "dtype": "float32"}
    case = AttentionKernelCase(heads=HEADS, **shape | LISTS[name])
    arguments, mask = kernel_draws.drop_own_block(case, *kernel_draws.draw_attention(case, 1))
    # XLA expects the number of blocks after a list's count.
    place = jnp.arange(arguments[3].shape[-1])[None, None, None, :]
    ids = jnp.where(place < arguments[4][..., None], arguments[3], case.num_blocks)
    arguments = (*arguments[:3], ids, *arguments[4:])
    attend = attend_to_lists(case)
    clean, num_reached = attend(*arguments), 0
    for seed in range(20):
        spoiled, sees, must = kernel_draws.spoil(case, arguments, mask, seed)
        kernel_draws.assert_reaches_those_who_see(attend(*spoiled), clean, sees, must)
        num_reached += must.sum()
    assert num_reached > 20


def listed_attention(query, key, value):
    """Attends to every other block and the own one."""
    rows = np.arange(LENGTH // SIZE)
    mask = (rows <= rows[:, None]) & ((rows - rows[:, None]) % 2 == 0)
    lists = map(jnp.asarray, cases.pack_lists(np.tile(mask, (2, 1, 1, 1))))
    selection = BlockSelection(*lists, SIZE)
    return block_sparse_attention(query, key, value, selection, implementation="xla")


@functools.partial(jax.jit, static_argnames="attention")
def gradients_before(position, arrays, *, attention):
    """Returns gradients of a sum without the first sequence's outputs from a position on."""

    def total(arrays):
        out = attention(*arrays)
        is_before = jnp.arange(out.shape[1])[None, :] < jnp.array([position, LENGTH])[:, None]
        weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * jnp.where(is_before[..., None, None], weights, 0.0))

    return jax.grad(total)(arrays)


@pytest.mark.parametrize("bad", BAD_TOKENS)
@pytest.mark.parametrize("attention", [dense_attention, listed_attention])
def test_gradients_of_what_stands_before_a_bad_token_are_those_without_it(bad, attention):
    pair = ([x[0] for x in arrays] for arrays in (draw(), spoiled(*BAD_TOKENS[bad])))
    expected, found = (gradients_before(BAD, x, attention=attention) for x in pair)
    for one, without in zip(found, expected, strict=True):
        assert np.isfinite(without).all()
        np.testing.assert_array_equal(one, without)


MODELS = {
    "dense": Dense(block_size=SIZE),
    "paper": SketchWalkConfig.paper(**SPARSE | {"dense_layers": 1}),
    "damped": SketchWalkConfig.damped(**SPARSE | {"dense_layers": (0, 2)}),
    "one_hop": SketchWalkConfig.one_hop(**SPARSE),
    "recommended": SketchWalkConfig.recommended(
        **SPARSE | {"dense_layers": 1, "density": 0.5}, min_tokens=64
    ),
    "oracle": OracleConfig(**SPARSE),
}


SOME = ("dense", "damped", "recommended")  # the others each week


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *weekly(x for x in MODELS if x not in SOME)])
def test_a_bad_embedding_reaches_no_earlier_row_of_a_model_and_no_neighbour(name):
    weights = tiny.params()
    weights["embed"]["embedding"] = weights["embed"]["embedding"].at[62].set(jnp.nan)
    tokens, lengths = tiny.prompts(LENGTH - 20, LENGTH - 20)
    tokens = np.where(tokens == 62, 61, tokens)
    spoiled_tokens = tokens.copy()
    spoiled_tokens[0, BAD] = 62
    options = {"model_config": tiny.MODEL, "policy": MODELS[name], "lengths": lengths}
    plain, other = (
        forward(weights, x, implementation="xla", **options) for x in (tokens, spoiled_tokens)
    )
    upto = BAD if name == "dense" else BAD_ROW * SIZE
    np.testing.assert_array_equal(other[0, :upto], plain[0, :upto])
    np.testing.assert_array_equal(other[1], plain[1])
    assert np.isfinite(plain).all() and np.isnan(other[0, BAD]).all()
    assert np.isfinite(other[0, :BAD]).all()
    runs = [
        generate(weights, x, max_new_tokens=3, return_selection=True, **options)
        for x in (tokens, spoiled_tokens)
    ]
    np.testing.assert_array_equal(runs[1].tokens[1], runs[0].tokens[1])
    if name != "dense":
        ids, plain_ids = (np.asarray(x.selection.ids)[:, 0, :, :BAD_ROW] for x in runs)
        np.testing.assert_array_equal(ids, plain_ids)


@pytest.mark.parametrize(
    "name", slow_unless("quest".__eq__, ["quest", "minference", "flexprefill"])
)
def test_policies_need_no_infinities(name):
    """Lists blocks for 50 tokens and one more, operation by operation."""
    policy, query = by_name(name, block_size=SIZE), jnp.ones((1, 64, HEADS[0], HEAD_DIM))
    key, end = query[:, :, : HEADS[1]], jnp.full((1,), 50, jnp.int32)
    columns, layer = jnp.arange(64, dtype=jnp.int32)[None], jnp.zeros((), jnp.int32)
    with jax.debug_infs(True):
        statistics = policy.init_statistics(LayerShape(*HEADS, HEAD_DIM), batch=1, num_blocks=4)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(statistics))
        spans = Span(jnp.zeros_like(end), columns < 50, end, end), Span.of_tokens(end, SIZE)
        for span, count in zip(spans, (64, 1), strict=True):
            own = query[:, :count], key[:, :count]
            statistics = policy.update_statistics(*own, statistics, span=span)
            if span.phase in policy.phases:
                policy.select(own[0], key[None], statistics, None, layer=layer, span=span)
