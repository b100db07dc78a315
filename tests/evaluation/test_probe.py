"""Mass recall, output error and bytes read, against NumPy, numbers by hand, and sets."""

import dataclasses
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, params, prompts
from tolerances import tolerance

from sketchwalk_jax import BlockSelection, Dense
from sketchwalk_jax.attention import dense_attention
from sketchwalk_jax.evaluation.probe import (
    decode_bytes,
    probe_decode,
    probe_prefill,
    tokens_read,
)
from sketchwalk_jax.evaluation.prompts import MAX_STEPS
from sketchwalk_jax.models.transformer import embed, run_layers
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.base import LayerShape

tokens_read = jax.jit(tokens_read, static_argnames="num_kv_heads")
decode_bytes = jax.jit(decode_bytes, static_argnames=("policy", "shape"))

DENSITY, SIZE, LENGTH = 0.3, 64, 384
STREAMING = by_name("streaming", density=DENSITY)
FULL = by_name("sketchwalk", preset="paper", density=1.0)
DAMPED = by_name("sketchwalk", preset="damped", density=DENSITY)


@pytest.fixture(scope="module")
def weights():
    return params()


def _layers(weights, tokens):
    """Returns every layer's queries, keys and values under dense attention."""

    def attend(query, key, value, layer, state):
        return dense_attention(query, key, value), state, (query, key, value)

    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    found = run_layers(
        weights,
        embed(weights, jnp.asarray(tokens)),
        positions,
        None,
        model_config=MODEL,
        layers=[(range(MODEL.num_layers), attend)],
    )[2][0]
    return [np.asarray(x, np.float64) for x in found]


def _kept_by_streaming(row: int) -> list[int]:
    count = min(row + 1, max(2, math.ceil(round(DENSITY * (row + 1), 9))))
    return [0, *range(row + 2 - count, row + 1)] if count > 1 else [0]


def _expected(query, key, value, positions):
    """Computes mass recall and output error of streaming for the queries at `positions`."""
    shares, errors, norms = [], [], []
    group = query.shape[1] // key.shape[1]
    for position in positions:
        kept = np.isin(np.arange(position + 1) // SIZE, _kept_by_streaming(position // SIZE))
        for head in range(query.shape[1]):
            scores = key[: position + 1, head // group] @ query[position, head]
            weights = np.exp(scores / math.sqrt(query.shape[-1]))
            values = value[: position + 1, head // group]
            dense = weights @ values / weights.sum()
            sparse = (weights * kept) @ values / (weights * kept).sum()
            shares.append((weights * kept).sum() / weights.sum())
            errors.append(np.sum((sparse - dense) ** 2))
            norms.append(np.sum(dense**2))
    return np.mean(shares), math.sqrt(np.sum(errors) / np.sum(norms))


def _probe(weights, tokens, lengths, policy=STREAMING):
    return probe_prefill(weights, tokens, lengths, model_config=MODEL, policy=policy)


def test_prefill_equals_numpy(weights):
    tokens, lengths = prompts(LENGTH - 20)
    padded = np.pad(tokens, ((0, 0), (0, 20)), constant_values=63)
    sums, _ = _probe(weights, padded, lengths)
    recall, error = sums.by_layer()
    layers = [layer for layer in zip(*_layers(weights, tokens), strict=True)][2:]
    assert len(recall) == len(layers) == 2
    for index, (query, key, value) in enumerate(layers):
        expected = _expected(query[0], key[0], value[0], range(LENGTH - 20))
        np.testing.assert_allclose((recall[index], error[index]), expected, **tolerance("logits"))
        assert 0.1 < recall[index] < 0.95


@pytest.mark.slow
def test_decode_equals_numpy(weights):
    tokens, _ = prompts(LENGTH)
    start, told = 300, 40  # crosses a block boundary
    padded = np.where(np.arange(LENGTH) < start, tokens, 63)
    lengths = np.array([start], np.int32)
    continuation = np.zeros((1, MAX_STEPS), np.int32)
    continuation[0, :told] = tokens[0, start : start + told]
    sums, full = (
        probe_decode(
            weights,
            _probe(weights, padded, lengths, policy)[1],
            continuation,
            np.array([told], np.int32),
            model_config=MODEL,
            policy=policy,
        )
        for policy in (STREAMING, FULL)
    )
    recall, error = sums.by_layer()
    for index, (query, key, value) in enumerate(zip(*_layers(weights, tokens), strict=True)):
        if index >= 2:
            expected = _expected(query[0], key[0], value[0], range(start, start + told))
            found = (recall[index - 2], error[index - 2])
            np.testing.assert_allclose(found, expected, **tolerance("logits"))
    np.testing.assert_allclose(full.by_layer()[0], 1, rtol=1e-6)
    np.testing.assert_array_less(full.by_layer()[1], 1e-5)
    positions = range(start, start + told)
    kept = [
        sum(min(SIZE, place + 1 - SIZE * block) for block in _kept_by_streaming(place // SIZE))
        for place in positions
    ]
    by_token = 2 * MODEL.num_kv_heads * MODEL.head_dim * 4  # in two sparse layers
    for one, read in ((sums, kept), (full, [position + 1 for position in positions])):
        keys, values, metadata = one.bytes_per_token()
        assert keys == values == pytest.approx(np.mean(read) * by_token)
        assert (metadata > 0) == (one is full)  # sketches; streaming reads none


@pytest.mark.slow
def test_full_selection_holds_everything_and_partial_selection_does_not(weights):
    tokens, lengths = prompts(LENGTH, 200)
    sums, _ = _probe(weights, tokens, lengths, FULL)
    recall, error = sums.by_layer()
    np.testing.assert_allclose(recall, 1, rtol=1e-6)
    np.testing.assert_array_less(error, 1e-5)
    assert not np.any(sums.read)  # prompts are not decoded
    nothing = jax.tree.map(np.zeros_like, sums)  # a policy that was not measured
    assert nothing.by_layer() == ([], []) and nothing.bytes_per_token() is None
    for policy in (STREAMING, DAMPED):
        recall, error = _probe(weights, tokens, lengths, policy)[0].by_layer()
        assert max(recall) < 0.999 and min(error) > 1e-3


@pytest.mark.slow
def test_sequences_of_a_batch_add_up(weights):
    tokens, lengths = prompts(LENGTH, 200)
    together, _ = _probe(weights, tokens, lengths, DAMPED)
    for row in range(2):
        alone, _ = _probe(weights, tokens[row : row + 1], lengths[row : row + 1], DAMPED)
        for field in dataclasses.fields(together):
            own = (getattr(x, field.name)[..., i] for x, i in ((together, row), (alone, 0)))
            np.testing.assert_allclose(*own, rtol=2e-4)
    np.testing.assert_array_equal(together.queries[0], lengths)


# Four query heads in two groups; a key has 8 channels of 2 bytes: 16 bytes.
LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype=jnp.bfloat16)


def selection_of(lists, size):
    """Makes one list per head, or one for all, of one sequence."""
    width = max(map(len, lists))
    ids = [[*one, *[99] * (width - len(one))] for one in lists]
    counts = jnp.array([[[len(one)] for one in lists]], jnp.int32)
    return BlockSelection(jnp.array(ids, jnp.int32)[None, :, None], counts, size)


def test_dense_reads_all_keys_and_the_oracle_looks_at_them():
    positions = jnp.array([36, 0], jnp.int32)
    dense = decode_bytes(Dense(), None, positions, shape=LAYER)
    assert dense.tolist() == [[37 * 2 * 16, 2 * 16], [37 * 2 * 16, 2 * 16], [0.0, 0.0]]
    assert by_name("oracle").metadata_bytes(LAYER, positions).tolist() == dense[0].tolist()
    assert by_name("streaming").metadata_bytes(LAYER, positions).tolist() == [0.0, 0.0]
    # Statistics: sums of queries and of keys per block, with 4 channels in float32.
    sums = by_name("sketchwalk", preset="paper", sketch_dim=4).metadata_bytes(
        LAYER, jnp.array([63, 64], jnp.int32)
    )
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
