"""Prefill and one decode step without checks or `jit`: what `prefill`, `generate`, `stream` share.

The cache and the walk state travel through `jax.lax.scan` over layers in its carry. Dense leading
layers are a scan of their own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.cache import Cache, num_dense_layers
from sketchwalk_jax.cached_attention import Settings, decode_attention, prefill_attention
from sketchwalk_jax.models.transformer import Attend, embed, run_layers, unembed
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.selection import BlockSelection, causal_pairs

PyTree = Any


def all_layers(
    params: PyTree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: Cache,
    walk: PyTree,
    *,
    settings: Settings,
    attention: Callable[..., Attend],
) -> tuple[Float[Array, "B T D"], Cache, Float[Array, "L B"], PyTree]:
    """Leading dense layers, then sparse ones; what `attention` returned of these comes last."""
    num_layers = settings.model_config.num_layers
    first_sparse = num_dense_layers(settings.model_config, settings.config)
    hidden, state, pairs, selection = embed(params, tokens), (cache, walk), [], None
    for start, stop, is_sparse in ((0, first_sparse, False), (first_sparse, num_layers, True)):
        if start == stop:
            continue
        hidden, state, (layer_pairs, chosen) = run_layers(
            params,
            hidden,
            positions,
            state,
            model_config=settings.model_config,
            start=start,
            stop=stop,
            attend=attention(is_sparse=is_sparse, first_sparse=first_sparse, settings=settings),
        )
        pairs.append(layer_pairs)
        selection = chosen if is_sparse else None
    return hidden, state[0], jnp.concatenate(pairs), selection


def _take_columns(x: Float[Array, "B T D"], columns: Int[Array, "B C"]) -> Float[Array, "B C D"]:
    columns = jnp.clip(columns, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, columns[:, :, None], axis=1)


def _prefill_chunk(
    params: PyTree,
    tokens: Int[Array, "B T"],
    span: Span,
    cache: Cache,
    *,
    is_fresh: bool,
    settings: Settings,
) -> tuple[Float[Array, "B T D"], Cache, BlockSelection | None]:
    size = settings.config.block_size
    batch, num_tokens = tokens.shape
    positions = (span.first_block * size)[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    walk = settings.config.init_walk(
        batch=batch, num_rows=num_tokens // size, num_blocks=cache.capacity // size
    )
    hidden, cache, pairs, selection = all_layers(
        params,
        tokens,
        positions,
        cache,
        walk,
        settings=settings,
        attention=partial(prefill_attention, span, is_fresh=is_fresh),
    )
    num_new = span.end - cache.lengths
    density = cache.density.add("prefill", pairs, causal_pairs(cache.lengths, num_new))
    return hidden, dataclasses.replace(cache, lengths=span.end, density=density), selection


def prefill_step(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: Cache,
    *,
    is_fresh: bool,
    settings: Settings,
) -> tuple[Array, Cache, BlockSelection | None]:
    """`prefill` without checks, for use inside `jit`. `is_fresh` says that the cache is empty."""
    if settings.return_all_logits:
        batch, num_tokens = tokens.shape
        columns = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (batch, num_tokens))
    else:
        columns = (lengths - 1)[:, None]
    hidden, cache, selection = prefill_hidden(
        params, tokens, lengths, columns, cache, is_fresh=is_fresh, settings=settings
    )
    if not settings.return_all_logits:
        hidden = hidden[:, 0]
    return unembed(params, hidden, model_config=settings.model_config), cache, selection


def prefill_hidden(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"],
    cache: Cache,
    *,
    is_fresh: bool,
    settings: Settings,
) -> tuple[Float[Array, "B C D"], Cache, BlockSelection | None]:
    """Reads the prompts; returns the last layer's output for some `columns` of `tokens` only."""
    size = settings.config.block_size
    batch, num_tokens = tokens.shape
    # Columns are moved so that column 0 stands on a block boundary.
    shift = jnp.zeros((batch,), jnp.int32) if is_fresh else cache.lengths % size
    reach = num_tokens if is_fresh else num_tokens + size - 1
    chunk = min(settings.chunk_size or reach, reach)
    chunk = -(-chunk // size) * size
    num_chunks = -(-reach // chunk)
    source = jnp.arange(num_chunks * chunk, dtype=jnp.int32)[None, :] - shift[:, None]
    valid = (source >= 0) & (source < lengths[:, None])
    tokens = jnp.take_along_axis(tokens, jnp.clip(source, 0, num_tokens - 1), axis=1)
    first_block = cache.lengths // size
    prompt_end = cache.lengths + lengths

    def run(index: Any, cache: Cache) -> tuple[Array, Cache, BlockSelection | None]:
        begin = index * chunk
        chunk_valid = jax.lax.dynamic_slice_in_dim(valid, begin, chunk, axis=1)
        span = Span(
            first_block + index * (chunk // size),
            chunk_valid,
            cache.lengths + jnp.sum(chunk_valid, axis=1, dtype=jnp.int32),
            prompt_end,
        )
        chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, begin, chunk, axis=1)
        return _prefill_chunk(
            params,
            chunk_tokens,
            span,
            cache,
            is_fresh=is_fresh and num_chunks == 1,
            settings=settings,
        )

    wanted = shift[:, None] + columns
    if num_chunks == 1:
        hidden, cache, selection = run(0, cache)
        taken = _take_columns(hidden, wanted)
    else:

        def step(carry: tuple[Cache, Array], index: Array) -> Any:
            cache, taken = carry
            hidden, cache, selection = run(index, cache)
            column = wanted - index * chunk
            is_here = (column >= 0) & (column < chunk)
            taken = jnp.where(is_here[:, :, None], _take_columns(hidden, column), taken)
            return (cache, taken), selection

        embedding = params["embed"]["embedding"]
        start = jnp.zeros((*wanted.shape, embedding.shape[1]), embedding.dtype)
        chunks = jnp.arange(num_chunks, dtype=jnp.int32)
        (cache, taken), selection = jax.lax.scan(step, (cache, start), chunks)
        selection = jax.tree.map(_join_chunks, selection)
    return taken, cache, selection


def _join_chunks(x: Int[Array, "C L B M I *rest"]) -> Int[Array, "L B M CI *rest"]:
    """Puts the rows of all chunks of a selection behind one another."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], x.shape[3] * x.shape[4], *x.shape[5:])


def decode_token(
    params: PyTree,
    tokens: Int[Array, "B"],
    cache: Cache,
    *,
    active: Bool[Array, "B"],
    settings: Settings,
) -> tuple[Float[Array, "B V"], Cache, BlockSelection | None]:
    """`decode_step` without checks, for use inside `jit`; inactive sequences stay as they are."""
    config = settings.config
    positions = cache.lengths
    walk = config.init_walk(
        batch=tokens.shape[0], num_rows=1, num_blocks=cache.capacity // config.block_size
    )
    hidden, cache, pairs, selection = all_layers(
        params,
        tokens[:, None],
        positions[:, None],
        cache,
        walk,
        settings=settings,
        attention=partial(decode_attention, positions, active),
    )
    is_counted = active.astype(jnp.int32)
    density = cache.density.add("decode", pairs, causal_pairs(positions, is_counted))
    cache = dataclasses.replace(cache, lengths=positions + is_counted, density=density)
    return unembed(params, hidden[:, 0], model_config=settings.model_config), cache, selection
