"""Runs a policy over given queries and keys, without a model: batches, chunks, decode steps."""

from collections.abc import Sequence

import cases
import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.policies.base import LayerShape, Span

SENTINEL = 1e4  # fills padding, which nothing may read


def stack_sequences(sequences: Sequence[cases.Layers], num_tokens: int) -> tuple[np.ndarray, ...]:
    """Pads sequences to `num_tokens` and stacks them: queries and keys `[L, B, T, heads, H]`."""

    def stack(name: str) -> np.ndarray:
        arrays = [np.stack(getattr(sequence, name)) for sequence in sequences]
        widths = [((0, 0), (0, num_tokens - x.shape[1]), (0, 0), (0, 0)) for x in arrays]
        return np.stack(
            [np.pad(x, w, constant_values=SENTINEL) for x, w in zip(arrays, widths, strict=True)],
            axis=1,
        )

    return stack("queries"), stack("keys")


def empty_statistics(config, query, key, num_blocks: int):
    """Returns the statistics of every layer before the first token."""
    num_layers, batch, _, num_heads, head_dim = query.shape
    shape = LayerShape(num_heads, key.shape[3], head_dim)
    one = config.init_statistics(shape, batch=batch, num_blocks=num_blocks)
    return jax.tree.map(lambda x: jnp.stack([x] * num_layers), one)


def _prefill(query, key, statistics, span, cache, *, config):
    batch, num_tokens = query.shape[1:3]
    num_blocks = cache.shape[2] // config.block_size
    num_rows = num_tokens // config.block_size
    walk = config.init_walk(batch=batch, num_rows=num_rows, num_blocks=num_blocks)

    def step(walk, layer):
        query, key, statistics, index = layer
        statistics = config.observe(query, key, statistics, span=span)
        selection, walk = config.select(query, cache, statistics, walk, layer=index, span=span)
        return walk, (statistics, selection.ids, selection.counts)

    layers = (query, key, statistics, jnp.arange(len(query), dtype=jnp.int32))
    return jax.lax.scan(step, walk, layers)[1]


def _decode(query, key, statistics, positions, cache, *, config):
    batch = query.shape[1]
    num_blocks = cache.shape[2] // config.block_size
    walk = config.init_walk(batch=batch, num_rows=1, num_blocks=num_blocks)
    span = Span.of_tokens(positions, config.block_size)

    def step(walk, layer):
        query, key, statistics, index = layer
        statistics = config.observe(query, key, statistics, span=span)
        selection, walk = config.select(query, cache, statistics, walk, layer=index, span=span)
        return walk, (statistics, selection.ids, selection.counts)

    layers = (query, key, statistics, jnp.arange(len(query), dtype=jnp.int32))
    return jax.lax.scan(step, walk, layers)[1]


_prefill_jit = jax.jit(_prefill, static_argnames="config")
_decode_jit = jax.jit(_decode, static_argnames="config")


def as_rows(ids, counts) -> list[list[list[list[int]]]]:
    """Returns shared lists `[L, B, 1, I, P]` as nested lists: layer, sequence, row, blocks."""
    ids, counts = np.asarray(ids)[:, :, 0], np.asarray(counts)[:, :, 0]
    return [
        [
            [row[:count].tolist() for row, count in zip(rows, numbers, strict=True)]
            for rows, numbers in zip(layer_ids, layer_counts, strict=True)
        ]
        for layer_ids, layer_counts in zip(ids, counts, strict=True)
    ]


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
        end = np.minimum(lengths, begin + chunk)
        span = Span(
            jnp.full(lengths.shape, begin // size, jnp.int32),
            jnp.arange(begin, begin + chunk)[None, :] < lengths[:, None],
            jnp.asarray(end),
            jnp.asarray(lengths),
        )
        statistics, ids, counts = _prefill_jit(
            query[:, :, columns], key[:, :, columns], statistics, span, cache, config=config
        )
        collected.append(as_rows(ids, counts))
    rows = [
        [sum((part[layer][row] for part in collected), []) for row in range(len(lengths))]
        for layer in range(len(query))
    ]
    kept = [
        [seq[: -(-length // size)] for seq, length in zip(layer, lengths, strict=True)]
        for layer in rows
    ]
    return kept, statistics


def decode_rows(config, query, key, statistics, positions, cache):
    """Returns each layer's and sequence's selected row for one token `[L, B, 1, heads, H]` each.

    `cache` holds the keys of all tokens `[L, B, S, K, H]`, the new ones included.
    """
    positions = jnp.asarray(positions, jnp.int32)
    statistics, ids, counts = _decode_jit(query, key, statistics, positions, cache, config=config)
    return [[seq[0] for seq in layer] for layer in as_rows(ids, counts)], statistics
