"""Attention over block lists: against the float32 reference and `jax.nn.dot_product_attention`."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import masked_attention
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from masked_attention import Case, assert_close, assert_equal_masked, draw, run
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import KernelConfig, block_sparse_attention, dense_attention
from sketchwalk_jax.attention import xla
from sketchwalk_jax.selection import BlockSelection, full_selection

# Every GQA ratio of released models, and no grouping.
SHAPES = [
    Case(heads=(2, 2), head_dim=64, lengths=(1,), block_size=64),
    Case(heads=(6, 2), head_dim=128, lengths=(63,), lists="kv_head", block_size=64),
    Case(heads=(6, 2), head_dim=64, lengths=(200, 1, 129), block_size=64),
    Case(heads=(8, 2), head_dim=64, lengths=(64,), lists="head", layer=1, block_size=64),
    Case(heads=(14, 2), head_dim=128, lengths=(65, 191), block_size=64),
    Case(heads=(8, 1), head_dim=256, lengths=(65,), layer=0, block_size=64),
    Case(heads=(8, 1), head_dim=128, lengths=(193, 63), lists="head", num_blocks=5, block_size=64),
    Case(heads=(8, 2), head_dim=128, lengths=(200, 77), dtype="bfloat16", block_size=64),
    Case(heads=(14, 2), head_dim=32, lengths=(129,), lists="kv_head", layer=2, dtype="float16"),
]


def last_token(case: Case) -> Case:
    """Returns the case of dense attention for the last token of each sequence."""
    offset = tuple(max(length - 1, 0) for length in case.lengths)
    return dataclasses.replace(case, op="dense", offset=offset, num_queries=1)


CALLS = [dataclasses.replace(case, op=op) for case in SHAPES for op in masked_attention.OPERATIONS]
CALLS += map(last_token, SHAPES)


def is_kept(case: Case) -> bool:
    return case.lengths[0] in (200, 193, 129)


@pytest.mark.parametrize("case", slow_unless(is_kept, CALLS), ids=str)
def test_attention_equals_the_masked_reference(case):
    arrays, others, _ = draw(case)
    out, lse = run(case, arrays, others)
    assert_equal_masked(case, out, lse)
    assert np.isfinite(out).all() or case.op == "dense"


@jax.jit
def jax_attention(query, key, value, lengths):
    """Computes causal attention with JAX itself, in full float32 on accelerators too."""
    options = {"is_causal": True, "key_value_seq_lengths": lengths, "return_residual": True}
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(query, key, value, **options)


@pytest.mark.parametrize("case", slow_unless(is_kept, SHAPES), ids=str)
def test_full_lists_and_dense_attention_equal_jax(case):
    arrays, others, _ = draw(case)
    rows, blocks = others["selection"].counts.shape[2], arrays[1].shape[1] // case.block_size
    place = np.tile(np.arange(rows, dtype=np.int32), (len(case.lengths), 1))
    full = full_selection(jnp.asarray(place), blocks, block_size=case.block_size)
    lists = run(case, arrays, others | {"selection": full})
    del others["selection"]
    whole = run(dataclasses.replace(case, op="dense"), arrays, others)
    # JAX computes in the dtype of its inputs: give it float32.
    wanted = jax.device_get(jax_attention(*masked_attention.wide(arrays), others["kv_lengths"]))
    for row, length in enumerate(case.lengths):
        for found in (lists, whole):
            assert_close(case, *(x[row, :length] for x in (*found, *wanted)))


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_token_on_a_gpu_without_kernels_attends_as_elsewhere(group, dtype, monkeypatch):
    """XLA on GPUs sums products for small groups of heads, and uses a matmul for larger ones."""
    case = Case(heads=(2 * group, 2), lengths=(190, 1, 0), layer=1, dtype=dtype)
    case = last_token(case)
    arrays, others, _ = draw(case)
    attend = functools.partial(masked_attention.attend, *arrays, others, case)
    wanted = attend(implementation="xla")
    monkeypatch.setattr(xla, "is_gpu", lambda: True)
    found, lse = attend(implementation="xla")
    assert found.dtype == dtype and lse.dtype == jnp.float32
    allowed = tolerance("attention", dtype)
    np.testing.assert_allclose(found.astype("f4"), wanted[0].astype("f4"), **allowed)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-4, atol=1e-4)


@settings(max_examples=12)
@given(offsets=st.tuples(st.integers(0, 186), st.integers(0, 186)), is_dense=st.booleans())
def test_queries_may_start_at_any_position(offsets, is_dense):
    lengths = tuple(offset + 70 for offset in offsets)
    case = Case(op="dense" if is_dense else "lists", offset=offsets, lengths=lengths)
    case = dataclasses.replace(case, num_queries=70, num_blocks=4, block_size=64, heads=(6, 2))
    arrays, others, _ = draw(case)
    assert_equal_masked(case, *run(case, arrays, others))


@pytest.mark.slow
def test_queries_beyond_the_keys_see_only_keys_and_scores_are_scaled():
    (query, key, value), _, _ = draw(Case(lengths=(65,), num_queries=10))
    key, value = key[:, :65], value[:, :65]  # not whole blocks
    selection = full_selection(jnp.array([[2, 3]], jnp.int32), 4, block_size=64)
    offset = jnp.array([150], jnp.int32)
    for scale in (None, 0.1):
        attend = functools.partial(block_sparse_attention, selection=selection, scale=scale)
        out = jax.jit(attend)(query, key, value, query_offset=offset)
        mask = np.ones((10, 65), bool)
        wanted, _ = reference.masked_attention(query[0], key[0], value[0], mask, scale)
        np.testing.assert_allclose(out[0], wanted, **tolerance("attention"))


@pytest.mark.parametrize(
    ("row_tile", "block_step"), [(3, 16), pytest.param(1, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("op", ["lists", "dense"])
def test_tile_sizes_change_only_rounding(row_tile, block_step, op):
    case = Case(op=op, lengths=(257, 100), lists="kv_head", block_size=64, head_dim=32)
    sizes = {"dense_rows": row_tile * 50, "dense_keys": block_step * 9}
    config = KernelConfig(row_tile=row_tile, block_step=block_step, **sizes)
    arrays, others, _ = draw(case)
    assert_equal_masked(case, *run(case, arrays, others, kernel_config=config))


def test_dense_attention_computes_no_tile_of_padding_alone():
    case = Case(op="dense", lengths=(90, 20), block_size=64)
    arrays, others, _ = draw(case)
    others["kv_lengths"] = jnp.array([33, 20])
    out, lse = run(case, arrays, others, kernel_config=KernelConfig(dense_rows=16))
    assert np.isfinite(lse[:, :48]).all()
    assert out.shape[1] == 90 and not np.any(out[:, 48:]) and np.isneginf(lse[:, 48:]).all()


def test_results_repeat_bit_for_bit_and_do_not_depend_on_the_batch():
    case = Case(lengths=(200, 77, 129), heads=(8, 2), block_size=64)
    arrays, others, _ = jax.device_get(draw(case))

    def attend(which):
        return run(case, *jax.tree.map(lambda x: x[which], (arrays, others)))[0]

    first = attend(slice(None))
    np.testing.assert_array_equal(first, attend(slice(None)))
    for row, length in enumerate(case.lengths):
        alone = attend(slice(row, row + 1))[0, :length]
        np.testing.assert_allclose(alone, first[row, :length], **tolerance("attention"))


def test_calls_by_themselves_give_what_they_give_inside_transformations():
    (query, key, value), others, _ = draw(Case(lengths=(64,)))
    attend = functools.partial(
        block_sparse_attention, key=key, value=value, scale=0.1, selection=others["selection"]
    )
    queries = jnp.stack([query, 2 * query])
    wanted = jnp.stack([attend(x) for x in queries])
    _, scanned = jax.lax.scan(lambda carry, x: (carry, attend(x)), 0, queries)
    for found in (jax.vmap(attend)(queries), scanned, jax.jit(jax.vmap(attend))(queries)):
        np.testing.assert_allclose(found, wanted, **tolerance("attention"))


@pytest.mark.unchecked
def test_a_scale_is_a_number_that_is_known():
    arrays, _, _ = draw(Case())
    with pytest.raises(ValueError, match=r"scale must be a Python number .* got a traced array"):
        jax.jit(lambda scale: dense_attention(*arrays, scale=scale))(0.1)
    with pytest.raises(ValueError, match="scale must be in .*, got nan"):
        dense_attention(*arrays, scale=np.float32(np.nan))


IDS = np.zeros((2, 1, 3, 2), np.int32)
LISTS = BlockSelection(IDS, IDS[..., 0], 16)


def other_lists(ids=IDS, **changes):
    return {"selection": dataclasses.replace(LISTS, ids=ids, counts=ids[..., 0], **changes)}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            other_lists(IDS[0]),
            r"must have ids \[B, M, I, P\] and counts \[B, M, I\], got \(1, 3, 2\)",
        ),
        (other_lists(IDS[:1]), "lists for 2 sequences and 3 query blocks, got ids of shape .1, 1"),
        (other_lists(IDS[:, :, :2]), "2 sequences and 3 query blocks, got ids of shape .2, 1, 2"),
        (other_lists(np.repeat(IDS, 3, axis=1)), "must have 1, 2 or 4 lists per row, got 3"),
        (
            {"selection": dataclasses.replace(LISTS, ids=IDS[..., :0])},
            "room for at least one block, got P = 0",
        ),
        (other_lists(IDS.astype("uint8")), "must hold int32 ids and counts, got uint8 and uint8"),
        (other_lists(IDS[:, :, :2], block_size=24), "block_size must be a power of two, got 24"),
        (other_lists(IDS[:, :, :2], row_size=24), "multiple of the block size 16, got 24"),
        ({"key": np.ones((2, 48, 2, 16), jnp.bfloat16)}, "query's dtype float32, got bfloat16"),
        ({"key": np.ones((1, 48, 2, 16), np.float32)}, "key and value must have one shape"),
        (
            {name: np.ones((1, 48, 2, 16), np.float32) for name in ("key", "value")},
            "key must have query's batch size 2, got 1",
        ),
        (
            {name: np.ones((2, 40, 2, 16), np.int32) for name in ("query", "key", "value")},
            "query must be floating point, got int32",
        ),
    ],
)
def test_lists_and_arrays_that_do_not_fit_are_refused(changes, message):
    key = np.ones((2, 48, 2, 16), np.float32)
    arrays = {
        "query": np.ones((2, 40, 4, 16), np.float32),
        "key": key,
        "value": key,
        "selection": LISTS,
    }
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(**arrays | changes)
