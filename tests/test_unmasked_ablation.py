"""The reading of the paper without a causal mask, which only a benchmark runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.policies.base import LayerShape, Span

BATCH, BLOCKS, SIZE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 2, 10, 16, 4, 2, 16, 3
LENGTHS = np.array([BLOCKS * SIZE, 7 * SIZE - 5])


@pytest.fixture(scope="module")
def unmasked(repository):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        import unmasked

        yield unmasked


def draw(seed, heads):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(BATCH, BLOCKS * SIZE, heads, HEAD_DIM)).astype(np.float32)


def select_in_layers(config, layers, lengths=LENGTHS):
    lengths = jnp.asarray(lengths, jnp.int32)
    valid = jnp.arange(BLOCKS * SIZE)[None, :] < lengths[:, None]
    span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
    walk = config.init_walk(batch=BATCH, num_rows=BLOCKS, num_blocks=BLOCKS)
    found = []
    for query, key in layers:
        query, key = jnp.asarray(query), jnp.asarray(key)
        shape = LayerShape(HEADS, KV_HEADS, HEAD_DIM)
        sums = config.init_statistics(shape, batch=BATCH, num_blocks=BLOCKS)
        sums = config.observe(query, key, sums, span=span)
        selection, walk = config.select(query, key[None], sums, walk, layer=jnp.int32(0), span=span)
        found.append(selection)
    return found


def lists_by_the_equations(config, layers, sequence):
    """The lists of one sequence in the last layer, in float64 and without a mask before them."""
    length = LENGTHS[sequence]
    count = -(-length // SIZE)
    state = None
    for query, key in layers:

        def means(x):
            x = x[sequence, :length].astype(np.float64).mean(axis=1)
            return np.array([x[j * SIZE : (j + 1) * SIZE].mean(axis=0) for j in range(count)])

        scores = means(query) @ means(key).T / np.sqrt(HEAD_DIM)
        if config.transition == "softmax":
            own = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            beta = 1.0 if config.beta is None else config.beta
            state = own if state is None else (1 - beta) * own + beta * state @ own
        else:
            own = scores**config.exponent
            state = own if state is None else state @ own
    lists = []
    for row in range(count):
        budget = min(row + 1, max(2, int(np.ceil(round(config.density * (row + 1), 9)))))
        ranked = state[row, : row + 1].copy()
        ranked[[0, row]] = np.inf
        lists.append(sorted(np.argsort(-ranked, kind="stable")[:budget].tolist()))
    return lists


@pytest.mark.parametrize("preset", ["paper", "damped"])
def test_lists_are_those_of_the_equations_without_a_mask(unmasked, preset):
    rule = unmasked.UnmaskedRule("sketchwalk", preset, 0.7)
    config = dataclasses.replace(rule.make(), block_size=SIZE, sketch_dim=None)
    layers = [(draw(2 * layer, HEADS), draw(2 * layer + 1, KV_HEADS)) for layer in range(LAYERS)]
    selection = jax.device_get(select_in_layers(config, layers)[-1])
    for sequence in range(BATCH):
        for row, wanted in enumerate(lists_by_the_equations(config, layers, sequence)):
            count = selection.counts[sequence, 0, row]
            assert selection.ids[sequence, 0, row, :count].tolist() == wanted


def test_what_follows_changes_a_rows_list(unmasked):
    config = unmasked.UnmaskedConfig(density=0.7, block_size=SIZE, sketch_dim=None)
    layers = [(draw(2 * layer, HEADS), draw(2 * layer + 1, KV_HEADS)) for layer in range(LAYERS)]
    half = BLOCKS // 2
    other = []
    for query, key in layers:
        query = query.copy()
        query[:, half * SIZE :] = draw(99, HEADS)[:, half * SIZE :] * 3
        other.append((query, key))
    full = [BLOCKS * SIZE] * BATCH
    one, two = (select_in_layers(config, x, full)[-1].ids[:, :, :half] for x in (layers, other))
    assert bool(jnp.any(one != two))
    assert config.phases == ("prefill",)  # and so decoding could not go on with its walk
