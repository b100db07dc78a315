"""Bytes read for a decoded token, by hand and against sets."""

import cases
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax import BlockSelection, Dense
from sketchwalk_jax.decode_bytes import decode_bytes, tokens_read
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import LayerShape

# Four query heads in two groups; 8 channels of 2 bytes: 16 bytes for a key.
LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype=jnp.bfloat16)


def selection_of(lists, size):
    """One list for each head, or one for all, of one sequence."""
    width = max(map(len, lists))
    ids = [[*one, *[99] * (width - len(one))] for one in lists]
    counts = jnp.array([[[len(one)] for one in lists]], jnp.int32)
    return BlockSelection(jnp.array(ids, jnp.int32)[None, :, None], counts, size)


def test_a_group_reads_the_union_of_its_lists():
    # Position 36: pages of 16 tokens, 5 of them in page 2.
    selection = selection_of([[0], [0, 2], [1, 2], [0, 1]], 16)
    positions = jnp.array([36], jnp.int32)
    # Heads 0 and 1 read pages 0 and 2: 21 tokens. Heads 2 and 3 read pages 0, 1, 2: 37.
    assert tokens_read(selection, positions, num_kv_heads=2).tolist() == [58]
    found = decode_bytes(by_name("quest"), selection, positions, shape=LAYER)
    assert found.keys.tolist() == found.values.tolist() == [58 * 16]
    # Two vectors for each of three pages and two heads: an eighth of 48 keys.
    assert found.metadata.tolist() == [2 * 3 * 2 * 16]
    assert found.total.tolist() == [2 * 58 * 16 + 192]


def test_shared_lists_are_read_by_every_key_head():
    positions = jnp.array([36], jnp.int32)
    assert tokens_read(selection_of([[1, 2]], 16), positions, num_kv_heads=2).tolist() == [42]
    by_group = selection_of([[1, 2], [0]], 16)
    assert tokens_read(by_group, positions, num_kv_heads=2).tolist() == [21 + 16]
    assert tokens_read(selection_of([[], []], 16), positions, num_kv_heads=2).tolist() == [0]


def test_dense_reads_all_keys_and_the_oracle_looks_at_them():
    positions = jnp.array([36, 0], jnp.int32)
    dense = decode_bytes(Dense(), None, positions, shape=LAYER)
    assert dense.keys.tolist() == dense.values.tolist() == [37 * 2 * 16, 2 * 16]
    assert dense.metadata.tolist() == [0.0, 0.0]
    assert by_name("oracle").metadata_bytes(LAYER, positions).tolist() == dense.keys.tolist()
    assert by_name("streaming").metadata_bytes(LAYER, positions).tolist() == [0.0, 0.0]
    # Sums of queries and keys of one block: 4 channels, float32.
    sums = by_name("sketchwalk", sketch_dim=4).metadata_bytes(LAYER, jnp.array([63, 64], jnp.int32))
    assert sums.tolist() == [2 * 4 * 4, 2 * 2 * 4 * 4]


@pytest.mark.parametrize(("size", "num_lists"), [(1, 6), (16, 6), (16, 3), (16, 1)])
def test_tokens_read_are_those_of_sets(size, num_lists):
    rng = np.random.default_rng(size + num_lists)
    positions, num_kv_heads = np.array([95, 70, 0]), 3
    causal = np.arange(96 // size) <= positions[:, None] // size
    mask = (rng.random((3, num_lists, 1, 96 // size)) < 0.4) & causal[:, None, None]
    ids, counts = cases.pack_lists(mask)
    found = tokens_read(
        BlockSelection(jnp.asarray(ids), jnp.asarray(counts), size),
        jnp.asarray(positions, jnp.int32),
        num_kv_heads=num_kv_heads,
    )
    wanted = []
    for row, place in enumerate(positions):
        total = 0
        for head in range(num_kv_heads):
            group = range(head * 2, head * 2 + 2) if num_lists == 6 else [head % num_lists]
            blocks = set().union(*[np.flatnonzero(mask[row, one, 0]) for one in group])
            tokens = {block * size + offset for block in blocks for offset in range(size)}
            total += sum(token <= place for token in tokens)
        wanted.append(total)
    assert found.tolist() == wanted


@pytest.mark.unchecked
def test_other_selections_raise():
    rows = BlockSelection(jnp.zeros((1, 2, 3, 1), jnp.int32), jnp.ones((1, 2, 3), jnp.int32), 16)
    with pytest.raises(ValueError, match="must have the one row of a decoded token, got 3"):
        tokens_read(rows, jnp.array([5]), num_kv_heads=2)
    with pytest.raises(ValueError, match="a multiple of the 3 key/value heads, got 4"):
        tokens_read(selection_of([[0]] * 4, 16), jnp.array([5]), num_kv_heads=3)
