"""Mass recall and output error against NumPy, from queries and keys of the model itself."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, params, prompts
from tolerances import tolerance

from sketchwalk_jax.attention import dense_attention
from sketchwalk_jax.evaluation.probe import probe_decode, probe_prefill
from sketchwalk_jax.evaluation.programs import Together
from sketchwalk_jax.evaluation.prompts import MAX_STEPS
from sketchwalk_jax.models.transformer import embed, run_layers
from sketchwalk_jax.policies import by_name

DENSITY, SIZE, LENGTH = 0.3, 64, 384
STREAMING = by_name("streaming", density=DENSITY)
FULL = by_name("sketchwalk", density=1.0)
POLICIES = Together.of([STREAMING, FULL, by_name("sketchwalk", preset="damped", density=DENSITY)])


@pytest.fixture(scope="module")
def weights():
    return params()


def _layers(weights, tokens):
    """Queries, keys and values of every layer on the way that dense attention goes."""

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
    """Mass recall and output error of streaming over the queries at `positions`."""
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


def _probe(weights, tokens, lengths):
    static = {"model_config": MODEL, "together": POLICIES}
    program = jax.jit(probe_prefill, static_argnames=("model_config", "together"))
    return program(weights, tokens, lengths, **static)


def test_prefill_equals_numpy(weights):
    tokens, lengths = prompts(LENGTH - 20)
    padded = np.pad(tokens, ((0, 0), (0, 20)), constant_values=63)
    sums, _ = _probe(weights, padded, lengths)
    recall, error = sums.by_layer(0)
    layers = [layer for layer in zip(*_layers(weights, tokens), strict=True)][2:]
    assert len(recall) == len(layers) == 2
    for index, (query, key, value) in enumerate(layers):
        expected = _expected(query[0], key[0], value[0], range(LENGTH - 20))
        np.testing.assert_allclose((recall[index], error[index]), expected, **tolerance("logits"))
        assert 0.1 < recall[index] < 0.95


def test_decode_equals_numpy(weights):
    tokens, _ = prompts(LENGTH)
    start, told = 300, 40  # across a block boundary
    padded = np.where(np.arange(LENGTH) < start, tokens, 63)
    _, cache = _probe(weights, padded, np.array([start], np.int32))
    continuation = np.zeros((1, MAX_STEPS), np.int32)
    continuation[0, :told] = tokens[0, start : start + told]
    program = jax.jit(probe_decode, static_argnames=("model_config", "together"))
    sums = program(
        weights,
        cache,
        continuation,
        np.array([told], np.int32),
        model_config=MODEL,
        together=POLICIES,
    )
    recall, error = sums.by_layer(0)
    for index, (query, key, value) in enumerate(zip(*_layers(weights, tokens), strict=True)):
        if index >= 2:
            expected = _expected(query[0], key[0], value[0], range(start, start + told))
            found = (recall[index - 2], error[index - 2])
            np.testing.assert_allclose(found, expected, **tolerance("logits"))
    np.testing.assert_allclose(sums.by_layer(1)[0], 1, rtol=1e-6)
    np.testing.assert_array_less(sums.by_layer(1)[1], 1e-5)
    positions = range(start, start + told)
    kept = [
        sum(
            min(SIZE, position + 1 - SIZE * block) for block in _kept_by_streaming(position // SIZE)
        )
        for position in positions
    ]
    by_token = 2 * MODEL.num_kv_heads * MODEL.head_dim * 4  # of two sparse layers
    for policy, tokens_read in ((0, kept), (1, [position + 1 for position in positions])):
        keys, values, metadata = sums.bytes_per_token(policy)
        assert keys == values == pytest.approx(np.mean(tokens_read) * by_token)
        assert (metadata > 0) == (policy == 1)  # sketches; streaming looks at nothing


def test_prompts_are_not_decoded(weights):
    tokens, lengths = prompts(LENGTH)
    sums, _ = _probe(weights, tokens, lengths)
    assert not np.any(sums.key_bytes) and not np.any(sums.metadata_bytes)


def test_full_selection_holds_everything_and_partial_selection_does_not(weights):
    tokens, lengths = prompts(LENGTH, 200)
    sums, _ = _probe(weights, tokens, lengths)
    recall, error = sums.by_layer(1)
    np.testing.assert_allclose(recall, 1, rtol=1e-6)
    np.testing.assert_array_less(error, 1e-5)
    for index in (0, 2):
        recall, error = sums.by_layer(index)
        assert max(recall) < 0.999 and min(error) > 1e-3


def test_sequences_of_a_batch_add_up(weights):
    tokens, lengths = prompts(LENGTH, 200)
    together, _ = _probe(weights, tokens, lengths)
    for row in range(2):
        alone, _ = _probe(weights, tokens[row : row + 1], lengths[row : row + 1])
        for field in dataclasses.fields(together):
            np.testing.assert_allclose(
                getattr(together, field.name)[:, :, row],
                getattr(alone, field.name)[:, :, 0],
                rtol=2e-4,
            )
    np.testing.assert_array_equal(together.queries[0, 0], lengths)


def test_policy_that_was_not_measured_has_no_layers(weights):
    tokens, lengths = prompts(LENGTH)
    sums, _ = _probe(weights, tokens, lengths)
    nothing = jax.tree.map(np.zeros_like, sums)
    assert nothing.by_layer(0) == ([], [])
    assert nothing.bytes_per_token(0) is None
