"""Runs a policy over given queries and keys, without a model: batches, chunks, decode steps."""

import functools
from collections.abc import Sequence

import cases
import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.policies.base import LayerShape, Span

SENTINEL = 1e4  # fills padding, which nothing may read


def stack_sequences(
    sequences: Sequence[cases.Layers], num_tokens: int, padding: float = SENTINEL
) -> tuple[np.ndarray, ...]:
    """Pads sequences to `num_tokens` and stacks them: queries and keys `[L, B, T, heads, H]`."""

    def stack(name: str) -> np.ndarray:
        arrays = [np.stack(getattr(sequence, name)) for sequence in sequences]
        widths = [((0, 0), (0, num_tokens - x.shape[1]), (0, 0), (0, 0)) for x in arrays]
        return np.stack(
            [np.pad(x, w, constant_values=padding) for x, w in zip(arrays, widths, strict=True)],
            axis=1,
        )

    return stack("queries"), stack("keys")


def empty_statistics(config, query, key, num_blocks: int):
    """Returns the statistics of every layer before the first token."""
    num_layers, batch, _, num_heads, head_dim = query.shape
    shape = LayerShape(num_heads, key.shape[3], head_dim)
    one = config.init_statistics(shape, batch=batch, num_blocks=num_blocks)
    return jax.tree.map(lambda x: jnp.stack([x] * num_layers), one)


@functools.partial(jax.jit, static_argnames="config")
def run(query, key, statistics, span, cache, *, config):
    """Adds a span's tokens to the statistics of every layer, and selects for them.

    Returns:
      Statistics, ids and counts of the lists, and walks; each with a leading axis of layers. Ids
      and counts are None in a phase in which the policy does not select.
    """
    size, num_blocks = config.block_size, cache.shape[2] // config.block_size
    num_rows = span.rows(size).shape[1]
    walk = config.init_walk(batch=query.shape[1], num_rows=num_rows, num_blocks=num_blocks)

    def step(walk, layer):
        query, key, statistics, index = layer
        statistics = config.update_statistics(query, key, statistics, span=span)
        if span.phase not in config.phases:
            return walk, (statistics, None, None, walk)
        selection, walk = config.select(query, cache, statistics, walk, layer=index, span=span)
        return walk, (statistics, selection.ids, selection.counts, walk)

    layers = (query, key, statistics, jnp.arange(len(query), dtype=jnp.int32))
    return jax.lax.scan(step, walk, layers)[1]


def span_of(lengths, block_size: int, begin: int, stop: int) -> Span:
    """Returns the span of prompts' columns `begin .. stop - 1`, on block boundaries."""
    lengths = np.asarray(lengths, np.int32)
    return Span(
        jnp.full(lengths.shape, begin // block_size, jnp.int32),
        jnp.arange(begin, stop)[None, :] < lengths[:, None],
        jnp.asarray(np.minimum(lengths, stop)),
        jnp.asarray(lengths),
    )


def nested(ids, counts) -> list:
    """Returns lists `[..., P]` as nested lists, without entries after each count."""
    if np.ndim(counts) == 0:
        return np.asarray(ids)[:counts].tolist()
    return [nested(*one) for one in zip(np.asarray(ids), np.asarray(counts), strict=True)]


def as_rows(ids, counts) -> list[list[list[list[int]]]]:
    """Returns shared lists `[L, B, 1, I, P]` as nested lists: layer, sequence, row, blocks."""
    return nested(np.asarray(ids)[:, :, 0], np.asarray(counts)[:, :, 0])


def prefill_rows(config, query, key, lengths, *, chunk: int | None = None, num_blocks=None):
    """Returns each layer's and sequence's rows and the statistics; chunks are block-aligned."""
    size, num_tokens = config.block_size, query.shape[2]
    num_blocks = num_blocks or num_tokens // size
    statistics = empty_statistics(config, query, key, num_blocks)
    room = ((0, 0), (0, 0), (0, num_blocks * size - num_tokens), (0, 0), (0, 0))
    cache = np.pad(key, room, constant_values=np.nan)
    lengths, chunk = np.asarray(lengths, np.int32), chunk or num_tokens
    collected = []
    for begin in range(0, num_tokens, chunk):
        columns = slice(begin, begin + chunk)
        span = span_of(lengths, size, begin, begin + chunk)
        statistics, ids, counts, _ = run(
            query[:, :, columns], key[:, :, columns], statistics, span, cache, config=config
        )
        collected += [] if ids is None else [as_rows(ids, counts)]
    rows = [
        [sum((part[layer][row] for part in collected), []) for row in range(len(lengths))]
        for layer in range(len(query))
    ]
    kept = [
        [seq[: -(-length // size)] for seq, length in zip(layer, lengths, strict=True)]
        for layer in rows
    ]
    return kept, statistics


def tokens_at(positions, *arrays) -> list[np.ndarray]:
    """Takes the token at a position of each sequence out of arrays `[L, B, T, heads, H]`."""
    return [
        np.stack([x[:, row, [place]] for row, place in enumerate(positions)], axis=1)
        for x in arrays
    ]


def decode_rows(config, query, key, statistics, positions, cache):
    """Returns each layer's and sequence's selected row for one token `[L, B, 1, heads, H]` each.

    `cache` holds the keys of all tokens `[L, B, S, K, H]`, the new ones included.
    """
    span = Span.of_tokens(jnp.asarray(positions, jnp.int32), config.block_size)
    statistics, ids, counts, _ = run(query, key, statistics, span, cache, config=config)
    return [[seq[0] for seq in layer] for layer in as_rows(ids, counts)], statistics
