"""Prefill and decode: pure functions from `(params, tokens, cache)` to `(logits, cache)`.

The cache and the walk state travel through `jax.lax.scan` over layers in its carry, and the cache
is donated: it is updated in place. Dense leading layers are a scan of their own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.cache import Cache, init_cache, num_dense_layers
from sketchwalk_jax.cached_attention import Settings, decode_attention, prefill_attention
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import Attend, embed, run_layers, unembed
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy, Span
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.selection import BlockSelection, causal_pairs
from sketchwalk_jax.validation import check_prompt, check_settings, check_token

PyTree = Any


def _all_layers(
    params: PyTree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: Cache,
    walk: PyTree,
    *,
    settings: Settings,
    attention: Callable[..., Attend],
) -> tuple[Float[Array, "B T D"], Cache, Float[Array, "L B"], BlockSelection | None]:
    """Leading dense layers, then sparse ones."""
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


def _take_token(x: Float[Array, "B T D"], column: Int[Array, "B"]) -> Float[Array, "B D"]:
    column = jnp.clip(column, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, column[:, None, None], axis=1)[:, 0]


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
    hidden, cache, pairs, selection = _all_layers(
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
    size = settings.config.block_size
    batch, num_tokens = tokens.shape
    # Columns are moved so that column 0 stands on a block boundary.
    shift = jnp.zeros((batch,), jnp.int32) if is_fresh else cache.lengths % size
    reach = num_tokens if is_fresh else num_tokens + size - 1
    chunk = min(settings.chunk_size or reach, reach)
    chunk = -(-chunk // size) * size
    num_chunks = -(-reach // chunk)
    columns = jnp.arange(num_chunks * chunk, dtype=jnp.int32)[None, :] - shift[:, None]
    valid = (columns >= 0) & (columns < lengths[:, None])
    tokens = jnp.take_along_axis(tokens, jnp.clip(columns, 0, num_tokens - 1), axis=1)
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

    last_column = shift + lengths - 1
    if num_chunks == 1:
        hidden, cache, selection = run(0, cache)
        last = _take_token(hidden, last_column)
    else:

        def step(carry: tuple[Cache, Array], index: Array) -> Any:
            cache, last = carry
            hidden, cache, selection = run(index, cache)
            column = last_column - index * chunk
            is_here = (column >= 0) & (column < chunk)
            last = jnp.where(is_here[:, None], _take_token(hidden, column), last)
            return (cache, last), (hidden if settings.return_all_logits else None, selection)

        start = jnp.zeros((batch, params["embed"]["embedding"].shape[1]), _dtype(params))
        chunks = jnp.arange(num_chunks, dtype=jnp.int32)
        (cache, last), (hidden, selection) = jax.lax.scan(step, (cache, start), chunks)
        selection = jax.tree.map(_join_chunks, selection)
        if hidden is not None:
            hidden = jnp.moveaxis(hidden, 0, 1).reshape(batch, num_chunks * chunk, -1)
    if settings.return_all_logits:
        back = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] + shift[:, None]
        last = jnp.take_along_axis(hidden, back[:, :, None], axis=1)
    return unembed(params, last, model_config=settings.model_config), cache, selection


def _dtype(params: PyTree) -> Any:
    return params["embed"]["embedding"].dtype


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
    hidden, cache, pairs, selection = _all_layers(
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


_prefill = jax.jit(prefill_step, static_argnames=("is_fresh", "settings"), donate_argnames="cache")
_decode = jax.jit(decode_token, static_argnames=("settings",), donate_argnames="cache")


def prefill(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    cache: Cache,
    *,
    model_config: ModelConfig,
    config: Policy,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    phase: str = "both",
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
    return_all_logits: bool = False,
) -> tuple[Any, ...]:
    """Reads prompt tokens into the cache (Algorithm 1 in every layer of the policy).

    The tokens continue whatever the cache holds: prompts may be given in pieces, or a conversation
    continued. The selection of a query block sees the later tokens of its own block, as the
    paper's does (block-causal); the attention itself is causal.

    Args:
      params: Parameter tree from `load`.
      tokens: Token ids, right-padded. Ids outside the vocabulary are clamped.
      cache: From `init_cache` with the same `config`; donated, use the returned one.
      model_config: The model.
      config: The policy, such as a `SketchWalkConfig`.
      lengths: Tokens of each sequence; all `T` by default.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`.
      chunk_size: Tokens processed at a time; bounds the memory of long prompts. `None` takes all.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      return_selection: Whether to return the selected blocks.
      return_all_logits: Whether to return the logits of every token instead of the last one's.

    Returns:
      Float32 logits after the last token of each sequence `[B, V]` (or `[B, T, V]`), the cache,
      and with `return_selection` a `BlockSelection` whose arrays have a leading axis of sparse
      layers (`None` if nothing was selected).

    Raises:
      ValueError: For shapes, dtypes or options that do not fit, an empty prompt, or prompts longer
        than the cache. The fill level of the cache and token values are unknown under `jit` and
        are not checked.
    """
    settings = Settings(
        model_config=model_config,
        config=config,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
        return_all_logits=return_all_logits,
    )
    check_settings(settings)
    lengths = check_prompt(tokens, lengths, cache, config)
    out = _prefill(params, tokens, lengths, cache, is_fresh=False, settings=settings)
    return out if return_selection else out[:2]


def decode_step(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B"],
    cache: Cache,
    *,
    model_config: ModelConfig,
    config: Policy,
    phase: str = "both",
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
) -> tuple[Any, ...]:
    """Appends one token to every sequence and returns the logits after it (Algorithm 2).

    Args:
      params: Parameter tree from `load`.
      tokens: One token id per sequence.
      cache: The cache so far; donated, use the returned one. Tokens beyond its capacity are lost.
      model_config: The model.
      config: The policy the cache was made for.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      return_selection: Whether to return the selected blocks.

    Returns:
      Float32 logits `[B, V]`, the cache, and with `return_selection` a `BlockSelection` with a
      leading axis of sparse layers.

    Raises:
      ValueError: For shapes, dtypes or options that do not fit.
    """
    settings = Settings(
        model_config=model_config,
        config=config,
        phase=phase,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
    )
    check_settings(settings)
    check_token(tokens, cache, config)
    active = jnp.ones(tokens.shape, bool)
    out = _decode(params, tokens, cache, active=active, settings=settings)
    return out if return_selection else out[:2]


def forward(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    model_config: ModelConfig,
    config: Policy | None = None,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B T V"]:
    """Logits of every token of the prompts, teacher-forced, with no cache kept.

    Args:
      params: Parameter tree from `load`.
      tokens: Token ids, right-padded.
      model_config: The model.
      config: The policy; dense by default.
      lengths: Tokens of each sequence; all `T` by default.
      chunk_size: Tokens processed at a time.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.

    Returns:
      Float32 logits; those of padding mean nothing.

    Raises:
      ValueError: As `prefill`.
    """
    config = Dense() if config is None else config
    settings = Settings(
        model_config=model_config,
        config=config,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_all_logits=True,
    )
    check_settings(settings)
    lengths = check_prompt(tokens, lengths, None, config)
    batch, num_tokens = tokens.shape
    cache = init_cache(
        model_config, config, batch=batch, max_tokens=num_tokens, dtype=_dtype(params)
    )
    return _prefill(params, tokens, lengths, cache, is_fresh=True, settings=settings)[0]
