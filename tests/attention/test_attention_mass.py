"""Attention mass of blocks against a slow float64 softmax, and recall against sets."""

import cases
import float64_mass
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from pairwise import pairwise
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import BlockSelection, KernelConfig
from sketchwalk_jax.attention.mass import block_mass, mass_recall, token_mass

SIZE, CAPACITY, HEADS, HEAD_DIM = 16, 112, (6, 2), 32
TILES = {
    "one row, one block": KernelConfig(dense_rows=1, dense_keys=1),
    "steps that overlap": KernelConfig(dense_rows=48, dense_keys=48, dense_decode_keys=48),
    "all at once": KernelConfig(dense_rows=4096, dense_keys=4096, dense_decode_keys=4096),
}
STATIC = ("block_size", "sum_heads", "aggregate", "kernel_config")
_block_mass = jax.jit(block_mass, static_argnames=STATIC)
_token_mass = jax.jit(token_mass, static_argnames=STATIC)


def mass_of(*arrays, **options):
    return np.asarray(_block_mass(*arrays, **options))


def mass_of_token(*arrays, **options):
    return np.asarray(_token_mass(*arrays, **options))


def draw(lengths, num_tokens=CAPACITY, dtype=jnp.float32, num_layers=None):
    """Draws queries and keys, NaN beyond each length and in all layers but one."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((len(lengths), num_tokens, HEADS[0], HEAD_DIM))
    key = 2.0 * rng.standard_normal((len(lengths), CAPACITY, HEADS[1], HEAD_DIM))
    for row, length in enumerate(lengths):
        query[row, length:] = key[row, length:] = np.nan
    query, key = (x.astype(np.float32).astype(jnp.dtype(dtype)) for x in (query, key))
    if num_layers is None:
        return query, key
    stacked = np.full((num_layers, *key.shape), np.nan, key.dtype)
    stacked[1] = key
    return query, stacked


def shares(query, key):
    """Returns each token's share of each block `[N, T, J]`."""
    found = np.zeros((HEADS[0], len(query), CAPACITY // SIZE))
    for token, vectors in enumerate(query):
        one = float64_mass.block_mass(vectors[None], key[: token + 1], SIZE, first=token)
        found[:, token, : one.shape[-1]] = one[:, 0]
    return found


@pytest.mark.parametrize(
    "case",
    slow_unless(
        lambda case: case[0] != "all at once",
        pairwise(tuple(TILES), (jnp.float32, jnp.bfloat16), ("sum", "max")),
    ),
)
def test_mass_equals_a_softmax_in_float64(case):
    """For rows of blocks and for the last token, of each head and of all heads."""
    tiles, dtype, aggregate = case
    lengths = np.array([107, 64, 1], np.int32)
    query, key = draw(lengths, 107, dtype, num_layers=3)
    combine = {"sum": np.sum, "max": np.max}[aggregate]
    wanted = np.zeros((3, HEADS[0], 7, CAPACITY // SIZE))
    of_last = np.zeros((3, HEADS[0], 1, CAPACITY // SIZE))
    for row, length in enumerate(lengths.tolist()):
        by_token = shares(query[row, :length], key[1, row])
        of_last[row, :, 0] = by_token[:, -1]
        for first in range(0, length, SIZE):
            wanted[row, :, first // SIZE] = combine(by_token[:, first : first + SIZE], axis=1)
    last = np.stack([query[row, [length - 1]] for row, length in enumerate(lengths)])
    options = {"block_size": SIZE, "kernel_config": TILES[tiles], "aggregate": aggregate}
    options |= {"layer": 1, "kv_lengths": lengths}
    for run, queries, expected in ((mass_of, query, wanted), (mass_of_token, last, of_last)):
        # Products of bfloat16 are exact in float32: in either dtype only sums differ.
        by_head = run(queries, key, sum_heads=False, **options)
        np.testing.assert_allclose(by_head, expected, **tolerance("scores"))
        assert not np.any(by_head[expected == 0])
        summed = run(queries, key, **options)
        assert summed.dtype == jnp.float32
        np.testing.assert_allclose(summed, combine(expected, axis=1), **tolerance("scores"))


@settings(max_examples=6)
@given(first=st.integers(0, 6), start=st.integers(0, SIZE - 1), length=st.integers(1, CAPACITY))
def test_rows_of_a_chunk_are_those_of_the_whole(first, start, length):
    """A chunk begins at any block boundary, and its first tokens may be missing."""
    query, key = draw((CAPACITY,))
    columns = np.arange(first * SIZE, CAPACITY)
    begin, end = first * SIZE + start, min(CAPACITY, first * SIZE + start + length)
    valid = (columns >= begin) & (columns < end)
    chunk = np.where(valid[None, :, None, None], query[:, columns], np.float32(np.nan))
    mass = mass_of(
        np.pad(chunk, ((0, 0), (0, CAPACITY - len(columns)), (0, 0), (0, 0))),
        key,
        block_size=SIZE,
        first_block=np.array([first], np.int32),
        valid=np.pad(valid, (0, CAPACITY - len(columns)))[None],
        kv_lengths=np.array([end], np.int32),
    )[0]
    wanted = float64_mass.block_mass(query[0, begin:end], key[0], SIZE, first=begin).sum(0)
    np.testing.assert_allclose(mass[: len(wanted)], wanted, **tolerance("scores"))
    assert not np.any(mass[len(wanted) :])


def test_keys_need_not_fill_their_last_block():
    query, key = draw((CAPACITY,))
    whole = mass_of(query[:, :70], key, block_size=SIZE, kv_lengths=np.array([70], np.int32))
    cut = mass_of(query[:, :70], key[:, :70], block_size=SIZE)
    np.testing.assert_allclose(cut, whole[..., :5], **tolerance("paths"))


@pytest.mark.parametrize("kind", cases.LIST_KINDS)
def test_recall_is_the_listed_share(kind):
    query, key = draw((CAPACITY, 50))
    lengths = np.array([CAPACITY, 50], np.int32)
    is_shared = kind == "shared"
    mass = mass_of(query, key, block_size=SIZE, kv_lengths=lengths, sum_heads=is_shared)
    num_lists = {"shared": 1, "kv_head": HEADS[1], "head": HEADS[0]}[kind]
    mask = cases.draw_lists(np.random.default_rng(1), 2, num_lists, CAPACITY // SIZE)
    selection = BlockSelection(*map(jnp.asarray, cases.pack_lists(mask)), SIZE)
    heads = 1 if is_shared else HEADS[0]
    numbers = np.asarray(mass).reshape(2, heads, 7, 7).astype(np.float64)
    held = (numbers * np.repeat(mask, heads // num_lists, axis=1)).sum(-1)
    wanted = held / np.maximum(numbers.sum(-1), 1e-9)
    recall = mass_recall(jnp.asarray(mass), selection)
    np.testing.assert_allclose(np.reshape(recall, wanted.shape), wanted, **tolerance("density"))
    assert 0 < np.mean(wanted[0]) < 1 and not wanted[1, :, 4:].any()


@pytest.mark.unchecked
def test_wrong_arguments_are_named():
    query, key = (jnp.zeros(shape) for shape in ((2, 32, 6, 8), (2, 32, 2, 8)))
    for options, message in (
        ({"layer": 0}, "key must have shape"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"valid": jnp.ones((2, 30), bool)}, "valid must have shape"),
        ({"first_block": jnp.zeros(3, jnp.int32)}, "first_block must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            block_mass(query, key, **{"block_size": 16} | options)
    with pytest.raises(ValueError, match="query must hold one token"):
        token_mass(query, key, block_size=16, kv_lengths=jnp.ones(2, jnp.int32))
    mass = block_mass(query, key, block_size=16)
    lists = BlockSelection(jnp.zeros((2, 2, 2, 1), jnp.int32), jnp.ones((2, 2, 2), jnp.int32), 16)
    with pytest.raises(ValueError, match="mass must keep 2 heads"):
        mass_recall(mass, lists)
    with pytest.raises(ValueError, match="selection must have lists for the rows"):
        mass_recall(mass[:, :1], lists)
