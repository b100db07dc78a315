"""Attention over block lists: against the float32 reference and `jax.nn.dot_product_attention`."""

import functools

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import AttentionCase
from hypothesis import given, settings
from tolerances import tolerance

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
)
from sketchwalk_jax.attention import num_query_blocks, xla
from sketchwalk_jax.selection import full_selection

SIZE = 64
attend = jax.jit(block_sparse_attention, static_argnames=("return_lse", "scale", "kernel_config"))
decode = jax.jit(block_sparse_decode, static_argnames=("return_lse",))
dense = jax.jit(dense_attention, static_argnames=("return_lse", "kernel_config"))


@jax.jit
def jax_attention(query, key, value, key_value_seq_lengths):
    """Computes causal attention with JAX itself, in full float32 on accelerators too."""
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            key_value_seq_lengths=key_value_seq_lengths,
            return_residual=True,
        )


def draw(case: AttentionCase, num_queries: int | None = None, seed: int = 0):
    """Draws queries `[B, T, N, H]`; keys and values `[B, S, K, H]`, NaN beyond each length."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = case.heads
    batch, num_queries = len(case.lengths), num_queries or max(case.lengths)
    query = rng.standard_normal((batch, num_queries, num_heads, case.head_dim))
    key, value = rng.standard_normal((2, batch, case.capacity, num_kv_heads, case.head_dim))
    for row, length in enumerate(case.lengths):
        key[row, length:] = value[row, length:] = np.nan
    return tuple(jnp.asarray(x, case.dtype) for x in (query, key, value))


def draw_selection(case: AttentionCase, num_rows: int, num_blocks: int, seed: int = 0):
    """Draws a mask `[B, M, rows, blocks]` and its lists, with invalid ids after each count."""
    num_lists = dict(zip(cases.LIST_KINDS, (1, *case.heads[::-1]), strict=True))[case.lists]
    rng = np.random.default_rng(seed)
    size = max(num_rows, num_blocks)
    mask = cases.draw_lists(rng, len(case.lengths), num_lists, size)[:, :, :num_rows, :num_blocks]
    ids, counts = cases.pack_lists(mask)
    missing = num_blocks + 1 - ids.shape[-1]
    ids = np.pad(ids, ((0, 0), (0, 0), (0, 0), (0, missing)), constant_values=-1)
    is_padding = np.arange(ids.shape[-1]) >= counts[..., None]
    ids[is_padding] = rng.choice([0, -1, num_blocks, 2**30], is_padding.sum())
    return mask, BlockSelection(jnp.asarray(ids), jnp.asarray(counts), SIZE)


def expected(case, query, key, value, mask, row, first=0):
    """Computes the reference for one sequence with queries from position `first` on."""
    positions, keys = first + np.arange(query.shape[1]), np.arange(key.shape[1])
    blocks = np.minimum(positions // SIZE, mask.shape[2] - 1)
    allowed = np.repeat(mask[row], SIZE, axis=-1)[:, blocks, : len(keys)]
    allowed = allowed & (keys <= positions[:, None]) & (keys < case.lengths[row])
    allowed = np.repeat(allowed, case.heads[0] // len(allowed), axis=0)
    query, key, value = (np.asarray(x)[row].astype(np.float32) for x in (query, key, value))
    return reference.masked_attention(query, np.nan_to_num(key), np.nan_to_num(value), allowed)


def assert_close(case, actual, lse, wanted, length=None):
    actual, *wanted = (np.asarray(x, np.float32)[:length] for x in (actual, *wanted))
    np.testing.assert_allclose(actual, wanted[0], **tolerance("attention", case.dtype))
    np.testing.assert_allclose(lse[:length], wanted[1], **tolerance("lse", case.dtype))


@pytest.mark.parametrize("case", cases.ATTENTION_CASES, ids=str)
def test_lists_equal_the_masked_reference(case):
    query, key, value = draw(case)
    num_rows = num_query_blocks(query.shape[1], SIZE, has_offset=False)
    mask, selection = draw_selection(case, num_rows, case.capacity // SIZE)
    lengths = jnp.array(case.lengths, jnp.int32)
    out, lse = attend(query, key, value, selection, kv_lengths=lengths, return_lse=True)
    assert out.dtype == query.dtype and lse.dtype == jnp.float32
    out, lse = jax.device_get((out, lse))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for row, length in enumerate(case.lengths):
        assert_close(case, out[row], lse[row], expected(case, query, key, value, mask, row), length)


@pytest.mark.parametrize("case", cases.ATTENTION_CASES, ids=str)
def test_full_lists_equal_dense_attention_and_jax(case):
    query, key, value = draw(case)
    lengths = jnp.array(case.lengths, jnp.int32)
    num_blocks = case.capacity // SIZE
    num_rows = num_query_blocks(query.shape[1], SIZE, has_offset=False)
    full = np.tri(num_blocks, dtype=bool)[:num_rows]
    mask, selection = draw_selection(case, num_rows, num_blocks)
    mask[...] = full
    ids, counts = cases.pack_lists(mask)
    ids = np.pad(ids, ((0, 0), (0, 0), (0, 0), (0, selection.ids.shape[-1] - ids.shape[-1])))
    selection = BlockSelection(jnp.asarray(ids), jnp.asarray(counts), SIZE)
    lists, lse = attend(query, key, value, selection, kv_lengths=lengths, return_lse=True)
    whole, whole_lse = dense(query, key, value, kv_lengths=lengths, return_lse=True)
    # An independent reference. It computes in the dtype of its inputs: give it float32.
    wide = (np.nan_to_num(np.asarray(x).astype(np.float32)) for x in (query, key, value))
    wanted, residual = jax_attention(*wide, key_value_seq_lengths=lengths)
    lists, lse, whole, whole_lse, wanted, residual = jax.device_get(
        (lists, lse, whole, whole_lse, wanted, residual)
    )
    for row, length in enumerate(case.lengths):
        expected = wanted[row], residual[row]
        assert_close(case, lists[row], lse[row], expected, length)
        assert_close(case, whole[row], whole_lse[row], expected, length)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_token_on_a_gpu_without_kernels_attends_as_elsewhere(group, dtype, monkeypatch):
    """XLA on GPUs sums products for small groups of heads, and uses a matmul for larger ones."""
    case = AttentionCase(group=group, lengths=(190, 1, 0), head_dim=16, dtype=dtype)
    query, key, value = draw(case, num_queries=1)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    where = {"kv_lengths": lengths, "query_offset": jnp.maximum(lengths - 1, 0)}
    where |= {"layer": jnp.asarray(1), "return_lse": True, "implementation": "xla"}
    stacks = [jnp.stack([jnp.full_like(x, jnp.nan), x]) for x in (key, value)]
    wanted, wanted_lse = dense_attention(query, *stacks, **where)
    monkeypatch.setattr(xla, "is_gpu", lambda: True)
    found, lse = dense_attention(query, *stacks, **where)
    assert found.dtype == wanted.dtype and lse.dtype == jnp.float32
    allowed = tolerance("attention", dtype)
    np.testing.assert_allclose(found.astype("f4"), wanted.astype("f4"), **allowed)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", cases.ATTENTION_CASES, ids=str)
def test_decode_equals_the_masked_reference(case):
    query, key, value = draw(case, num_queries=1, seed=1)
    num_blocks = case.capacity // SIZE
    mask, selection = draw_selection(case, num_blocks, num_blocks, seed=1)
    lengths = np.array(case.lengths, np.int32)
    selection = rows_at(selection, ((lengths - 1) // SIZE)[:, None])
    out, lse = decode(query, key, value, selection, kv_lengths=lengths, return_lse=True)
    arguments = {"query_offset": lengths - 1, "kv_lengths": lengths, "return_lse": True}
    whole, whole_lse = dense(query, key, value, **arguments)
    out, lse, whole, whole_lse = jax.device_get((out, lse, whole, whole_lse))
    for row, length in enumerate(case.lengths):
        wanted = expected(case, query, key, value, mask, row, length - 1)
        assert_close(case, out[row], lse[row], wanted)
        wanted = expected(case, query, key, value, np.ones_like(mask), row, length - 1)
        assert_close(case, whole[row], whole_lse[row], wanted)


def rows_at(selection: BlockSelection, rows: np.ndarray) -> BlockSelection:
    """Returns the lists of the given rows `[B, I]` of each sequence."""
    ids, counts = (
        np.stack([x[row][:, place] for row, place in enumerate(rows)])
        for x in (np.asarray(selection.ids), np.asarray(selection.counts))
    )
    return BlockSelection(jnp.asarray(ids), jnp.asarray(counts), selection.block_size)


@settings(max_examples=12)
@given(offsets=st.tuples(st.integers(0, 186), st.integers(0, 186)))
def test_queries_may_start_at_any_position(offsets):
    num_queries = 70
    case = AttentionCase(3, 32, tuple(offset + num_queries for offset in offsets), num_tokens=256)
    query, key, value = draw(case, num_queries)
    num_rows = num_query_blocks(num_queries, SIZE, has_offset=True)
    mask, selection = draw_selection(case, 4, 4)
    # Row i of the lists belongs to the first query's block plus i.
    rows = np.minimum((np.array(offsets) // SIZE)[:, None] + np.arange(num_rows), 3)
    arguments = {
        "query_offset": np.array(offsets, np.int32),
        "kv_lengths": np.array(case.lengths, np.int32),
        "return_lse": True,
    }
    out, lse = attend(query, key, value, rows_at(selection, rows), **arguments)
    whole, whole_lse = dense(query, key, value, **arguments)
    out, lse, whole, whole_lse = jax.device_get((out, lse, whole, whole_lse))
    for row, offset in enumerate(offsets):
        assert_close(case, out[row], lse[row], expected(case, query, key, value, mask, row, offset))
        wanted = expected(case, query, key, value, np.ones_like(mask), row, offset)
        assert_close(case, whole[row], whole_lse[row], wanted)


def test_queries_beyond_the_keys_see_only_keys():
    case = AttentionCase(1, 32, (65,), num_tokens=65)
    query, key, value = draw(case, 10)
    selection = full_selection(jnp.array([[2, 3]], jnp.int32), 4, block_size=SIZE)
    out = attend(query, key, value, selection, query_offset=jnp.array([150], jnp.int32))
    mask = np.ones((10, 65), bool)
    wanted, _ = reference.masked_attention(query[0], key[0], value[0], mask)
    np.testing.assert_allclose(out[0], wanted, **tolerance("attention"))


@pytest.mark.parametrize("lists", ["shared", "head"])
def test_a_layer_of_a_stacked_cache_equals_the_layer_alone(lists):
    case = AttentionCase(4, 32, (130, 77), lists)
    layers = [draw(case, seed=seed) for seed in range(3)]
    key, value = (np.stack([layer[part] for layer in layers]) for part in (1, 2))
    query = layers[0][0]
    _, selection = draw_selection(case, 3, 3)
    lengths = jnp.array(case.lengths, jnp.int32)
    for layer in range(3):
        index = jnp.asarray(layer, jnp.int32)
        stacked = attend(query, key, value, selection, layer=index, kv_lengths=lengths)
        alone = attend(query, key[layer], value[layer], selection, kv_lengths=lengths)
        np.testing.assert_array_equal(stacked, alone)
        stacked = dense(query, key, value, layer=index, kv_lengths=lengths)
        alone = dense(query, key[layer], value[layer], kv_lengths=lengths)
        np.testing.assert_array_equal(stacked, alone)


def test_empty_lists_give_zero_and_minus_infinity():
    case = AttentionCase(4, 32, (128,), "head")
    query, key, value = draw(case)
    ids = jnp.zeros((1, 8, 2, 1), jnp.int32)
    counts = jnp.zeros((1, 8, 2), jnp.int32).at[0, 5, 1].set(1)
    out, lse = attend(query, key, value, BlockSelection(ids, counts, SIZE), return_lse=True)
    is_empty = np.ones((128, 8), bool)
    is_empty[64:, 5] = False
    np.testing.assert_array_equal(np.isneginf(lse[0]), is_empty)
    np.testing.assert_array_equal(np.asarray(out[0] == 0.0).all(-1), is_empty)


@pytest.mark.parametrize(("row_tile", "block_step"), [(1, 2), (3, 16)])
def test_tile_sizes_change_only_rounding(row_tile, block_step):
    case = AttentionCase(3, 32, (257, 100), "kv_head")
    query, key, value = draw(case)
    _, selection = draw_selection(case, 5, 5)
    lengths = jnp.array(case.lengths, jnp.int32)
    config = KernelConfig(
        row_tile=row_tile,
        block_step=block_step,
        dense_rows=row_tile * 50,
        dense_keys=block_step * 9,
    )
    run = functools.partial(attend, query, key, value, selection, kv_lengths=lengths)
    np.testing.assert_allclose(run(kernel_config=config), run(), **tolerance("attention"))
    run = functools.partial(dense, query, key, value, kv_lengths=lengths)
    np.testing.assert_allclose(
        run(kernel_config=config)[1, :100], run()[1, :100], **tolerance("attention")
    )


def test_results_repeat_bit_for_bit_and_do_not_depend_on_the_batch():
    case = AttentionCase(4, 64, (200, 77, 129))
    query, key, value = draw(case)
    _, selection = draw_selection(case, 4, 4)
    lengths = jnp.array(case.lengths, jnp.int32)
    first = np.asarray(attend(query, key, value, selection, kv_lengths=lengths))
    query, key, value, lengths = jax.device_get((query, key, value, lengths))
    selection = jax.device_get(selection)
    np.testing.assert_array_equal(first, attend(query, key, value, selection, kv_lengths=lengths))
    for row, length in enumerate(case.lengths):
        one = slice(row, row + 1)
        alone = attend(
            query[one],
            key[one],
            value[one],
            BlockSelection(selection.ids[one], selection.counts[one], SIZE),
            kv_lengths=lengths[one],
        )
        alone = np.asarray(alone)[0, :length]
        np.testing.assert_allclose(alone, first[row, :length], **tolerance("attention"))


def test_calls_by_themselves_give_what_they_give_inside_transformations():
    case = AttentionCase(4, 32, (70,))
    query, key, value = (jnp.nan_to_num(x) for x in draw(case))
    _, selection = draw_selection(case, 2, 2)
    queries = jnp.stack([query, 2 * query])
    wanted = [block_sparse_attention(x, key, value, selection, scale=0.1) for x in queries]

    def run(x):
        return block_sparse_attention(x, key, value, selection, scale=0.1)

    _, scanned = jax.lax.scan(lambda carry, x: (carry, run(x)), 0, queries)
    for found in (jax.vmap(run)(queries), scanned, jax.jit(jax.vmap(run))(queries)):
        np.testing.assert_allclose(found, jnp.stack(wanted), **tolerance("attention"))


@pytest.mark.unchecked
def test_a_scale_is_a_number_that_is_known():
    query, key, value = draw(AttentionCase(1, 32, (70,)))
    with pytest.raises(ValueError, match=r"scale must be a Python number .* got a traced array"):
        jax.jit(lambda scale: dense_attention(query, key, value, scale=scale))(0.1)
    with pytest.raises(ValueError, match="scale must be in .*, got nan"):
        dense_attention(query, key, value, scale=np.float32(np.nan))


def test_scale_multiplies_the_scores():
    case = AttentionCase(1, 32, (70,))
    query, key, value = draw(case)
    mask, selection = draw_selection(case, 2, 2)
    lengths = jnp.array([70], jnp.int32)
    out = attend(query, key, value, selection, scale=0.1, kv_lengths=lengths)
    factor = 0.1 * np.sqrt(np.float32(32.0))
    wanted, _ = expected(case, query * factor, key, value, mask, 0)
    np.testing.assert_allclose(out[0], wanted, **tolerance("attention"))
