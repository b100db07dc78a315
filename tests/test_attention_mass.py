"""Attention mass of blocks against a slow float64 softmax, and recall against sets."""

import cases
import float64_mass
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from tolerances import tolerance

from sketchwalk_jax import BlockSelection, KernelConfig
from sketchwalk_jax.attention.mass import block_mass, mass_recall, token_mass
from sketchwalk_jax.selection import full_selection

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


def expected(query, key, lengths, num_rows):
    wanted = np.zeros((len(lengths), HEADS[0], num_rows, CAPACITY // SIZE))
    for row, length in enumerate(lengths):
        mass = float64_mass.block_mass(query[row, :length], key[row, :length], SIZE)
        wanted[row, :, : mass.shape[1], : mass.shape[2]] = mass
    return wanted


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mass_equals_a_softmax_in_float64(tiles, dtype):
    lengths = (107, 64, 1)
    query, key = draw(lengths, 107, dtype, num_layers=3)
    wanted = expected(query, key[1], lengths, 7)
    options = {"block_size": SIZE, "kernel_config": TILES[tiles]}
    by_head = mass_of(query, key, layer=1, kv_lengths=np.array(lengths), sum_heads=False, **options)
    # Products of bfloat16 are exact in float32: in either dtype only sums differ.
    np.testing.assert_allclose(by_head, wanted, **tolerance("scores"))
    summed = mass_of(query, key, layer=1, kv_lengths=np.array(lengths), **options)
    assert summed.dtype == jnp.float32
    np.testing.assert_allclose(summed, wanted.sum(1), **tolerance("scores"))
    in_row = np.clip(np.array(lengths)[:, None] - SIZE * np.arange(7), 0, SIZE)
    np.testing.assert_allclose(np.sum(summed, -1), in_row * HEADS[0], **tolerance("scores"))


def largest_shares(query, key, positions):
    """Returns the largest share of each block over the tokens, for every head `[N, J]`."""
    shares = np.zeros((HEADS[0], CAPACITY // SIZE))
    for token, position in zip(query, positions, strict=True):
        one = float64_mass.block_mass(token[None], key[: position + 1], SIZE, first=position)
        shares[:, : one.shape[-1]] = np.maximum(shares[:, : one.shape[-1]], one[:, 0])
    return shares


@pytest.mark.parametrize("tiles", TILES)
def test_the_largest_share_of_queries_and_heads(tiles):
    lengths = (107, 64, 1)
    query, key = draw(lengths, 107, num_layers=2)
    options = {"block_size": SIZE, "kernel_config": TILES[tiles], "aggregate": "max", "layer": 1}
    found, by_head = (
        mass_of(query, key, kv_lengths=np.array(lengths), sum_heads=x, **options)
        for x in (True, False)
    )
    wanted = np.zeros(by_head.shape)
    for row, length in enumerate(lengths):
        for first in range(0, length, SIZE):
            own = range(first, min(first + SIZE, length))
            wanted[row, :, first // SIZE] = largest_shares(query[row, own], key[1, row], own)
    np.testing.assert_allclose(by_head, wanted, **tolerance("scores"))
    np.testing.assert_allclose(found, wanted.max(1), **tolerance("scores"))
    last = np.stack([query[row, [length - 1]] for row, length in enumerate(lengths)])
    of_token = mass_of_token(last, key, kv_lengths=np.array(lengths), **options)
    for row, length in enumerate(lengths):
        one = largest_shares(last[row], key[1, row], [length - 1])
        np.testing.assert_allclose(of_token[row, 0], one.max(0), **tolerance("scores"))


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


@pytest.mark.parametrize("tiles", TILES)
def test_mass_of_one_token(tiles):
    lengths = np.array([107, 64, 1], np.int32)
    query, key = draw(lengths, num_layers=2)
    last = np.stack([query[row, [length - 1]] for row, length in enumerate(lengths)])
    options = {"block_size": SIZE, "layer": 1, "kernel_config": TILES[tiles]}
    by_head = mass_of_token(last, key, kv_lengths=lengths, sum_heads=False, **options)
    for row, length in enumerate(lengths.tolist()):
        wanted = float64_mass.block_mass(last[row], key[1, row, :length], SIZE, first=length - 1)
        num_blocks = wanted.shape[-1]
        np.testing.assert_allclose(by_head[row, :, :, :num_blocks], wanted, **tolerance("scores"))
        assert not np.any(by_head[row, :, :, num_blocks:])
    summed = mass_of_token(last, key, kv_lengths=lengths, **options)
    np.testing.assert_allclose(summed, np.sum(by_head, 1), **tolerance("scores"))


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


def test_everything_is_recalled_by_everything():
    query, key = draw((CAPACITY,))
    mass = mass_of(query, key, block_size=SIZE)
    full = full_selection(jnp.arange(7, dtype=jnp.int32)[None], 7, block_size=SIZE)
    np.testing.assert_allclose(mass_recall(jnp.asarray(mass), full), 1.0, **tolerance("density"))


@pytest.mark.unchecked
def test_wrong_arguments_are_named():
    query, key = (jnp.zeros(shape) for shape in ((2, 32, 6, 8), (2, 32, 2, 8)))
    with pytest.raises(ValueError, match="key must have shape"):
        block_mass(query, key, block_size=16, layer=0)
    with pytest.raises(ValueError, match="block_size must be a positive integer, got 0"):
        block_mass(query, key, block_size=0)
    with pytest.raises(ValueError, match="valid must have shape"):
        block_mass(query, key, block_size=16, valid=jnp.ones((2, 30), bool))
    with pytest.raises(ValueError, match="first_block must have shape"):
        block_mass(query, key, block_size=16, first_block=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="query must hold one token"):
        token_mass(query, key, block_size=16, kv_lengths=jnp.ones(2, jnp.int32))
    mass = block_mass(query, key, block_size=16)
    lists = jnp.zeros((2, 2, 2, 1), jnp.int32), jnp.ones((2, 2, 2), jnp.int32)
    with pytest.raises(ValueError, match="mass must keep 2 heads"):
        mass_recall(mass, BlockSelection(*lists, 16))
    with pytest.raises(ValueError, match="selection must have lists for the rows"):
        mass_recall(mass[:, :1], BlockSelection(*lists, 16))
