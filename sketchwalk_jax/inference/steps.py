"""Prefill and decode: pure functions from `(params, tokens, cache)` to `(logits, cache)`.

`prefill`, `decode_step` and `forward` check their arguments and are jitted. `prefill` and
`decode_step` donate the cache, so it is updated in place. `read_prompt` and `decode_token` do the
work without checks; `generate` and `stream` call them inside `jit`. The scan over layers has the
cache and the walk in its carry. The leading dense layers have a scan of their own.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.api import take_columns
from sketchwalk_jax.attention.xla import vary_alike
from sketchwalk_jax.inference.auto import recommended_policy
from sketchwalk_jax.inference.cache import Cache, chunk_layout, init_cache, spread_cache
from sketchwalk_jax.inference.cached_layer import (
    Settings,
    attention_by_layer,
    join_layers,
    layer_attention,
)
from sketchwalk_jax.inference.calls import (
    check_cache,
    check_model,
    check_prompt,
    check_room,
    check_token,
    first_rows,
    prompt_rows,
)
from sketchwalk_jax.inference.compiled import keep_by_default
from sketchwalk_jax.memory import advice
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.experts import MOST_TOKENS
from sketchwalk_jax.models.transformer import Widths, run_layers, unembed
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy, Span
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.selection import BlockSelection, causal_pairs
from sketchwalk_jax.sharding import (
    constrain,
    constrain_logits,
    embed_tokens,
    lies_on_one_device,
    placement_of,
    take_dealt_columns,
)

PyTree = Any

# Most columns of prompts, over all sequences, in which a shared program computes linear layers at
# once. Beyond it, activations would take tens of gigabytes, and computing in parts costs 2 %.
_MOST_COLUMNS = 2**17


# Steps of `prefill`, `generate` and `stream`, inside `jit`.


def read_prompt(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"],
    cache: Cache,
    *,
    is_fresh: bool,
    settings: Settings,
) -> tuple[Float[Array, "B C D"], Cache, BlockSelection | None]:
    """Reads prompts into the cache, chunk by chunk, without checks (Algorithm 1).

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded.
      lengths: Number of tokens of each prompt.
      columns: Columns of `tokens` whose output is returned.
      cache: The cache, whose sequences the prompts continue.
      is_fresh: Whether the cache is empty.
      settings: Static settings.

    Returns:
      The last layer's output at `columns`, the cache, and the selected blocks if the
      settings ask for them.
    """
    tokens, lengths, columns, cache = vary_alike(tokens, lengths, columns, cache, like=params)
    size, placement = settings.policy.block_size, settings.placement
    blocks = None if placement is None else placement.blocks
    layout = chunk_layout(
        tokens.shape[1],
        lengths,
        cache.lengths,
        block_size=size,
        chunk_size=settings.chunk_size,
        is_fresh=is_fresh,
        num_pieces=1 if blocks is None else blocks.num_pieces,
    )
    chunk, num_chunks = layout.chunk_size, layout.num_chunks
    moved = jnp.take_along_axis(tokens, layout.source, axis=1)
    first_block = cache.lengths // size
    prompt_end = cache.lengths + lengths
    wanted = layout.shift[:, None] + columns

    def read(index: Any, cache: Cache) -> tuple[Array, Cache, BlockSelection | None]:
        """Runs all layers over the tokens of one chunk."""
        begin = index * chunk
        tokens, valid = (
            jax.lax.dynamic_slice_in_dim(x, begin, chunk, axis=1) for x in (moved, layout.valid)
        )
        num_new = jnp.sum(valid, axis=1, dtype=jnp.int32)
        span = Span(
            first_block + index * (chunk // size),
            valid,
            cache.lengths + num_new,
            prompt_end,
            is_fresh=is_fresh and num_chunks == 1,
        )
        make = partial(layer_attention, span, is_fresh=span.is_fresh, settings=settings)
        walk = settings.policy.init_walk(
            batch=tokens.shape[0], num_rows=chunk // size, num_blocks=cache.capacity // size
        )
        (walk,) = vary_alike(walk, like=tokens)
        column, is_token = jnp.arange(chunk, dtype=jnp.int32)[None], valid
        if blocks is not None:  # between embedding and output, columns are ordered by rank
            tokens = constrain(blocks.deal(tokens, axis=1), placement, "data")
            column = constrain(blocks.deal(column, axis=1), placement)
            is_token = constrain(blocks.deal(valid, axis=1), placement, "data")
        hidden, (written, _), found = run_layers(
            params,
            embed_tokens(params, tokens, placement),
            span.start(size)[:, None] + column,
            (cache, walk),
            model_config=settings.model_config,
            layers=attention_by_layer(make, settings),
            swiglu_quantize=settings.swiglu_quantize,
            widths=_widths(valid, settings),
            is_token=is_token,
            mix=settings.mix,
        )
        pairs, selection = join_layers(found)
        if blocks is not None:
            selection = jax.tree.map(lambda x: blocks.join(x, axis=3), selection)
        density = cache.density.add("prefill", pairs, causal_pairs(cache.lengths, num_new))
        return hidden, dataclasses.replace(written, lengths=span.end, density=density), selection

    def take(hidden: Array, columns: Array) -> Array:
        columns = jnp.clip(columns, 0, chunk - 1)
        if blocks is None or placement is None:
            return take_columns(hidden, columns)
        return take_dealt_columns(hidden, blocks.place(columns, chunk), placement)

    is_row = jnp.any(layout.valid.reshape(layout.valid.shape[0], -1, size), axis=-1)
    if num_chunks == 1:
        hidden, cache, selection = read(0, cache)
        selection = _empty_others(selection, is_row, cache.capacity)
        return take(hidden, wanted), cache, selection

    def step(carry: tuple[Cache, Array], index: Array) -> Any:
        cache, taken = carry
        hidden, cache, selection = read(index, cache)
        column = wanted - index * chunk
        is_here = (column >= 0) & (column < chunk)
        taken = jnp.where(is_here[:, :, None], take(hidden, column), taken)
        return (cache, taken), selection

    embedding = params["embed"]["embedding"]
    start = jnp.zeros_like(wanted, embedding.dtype, shape=(*wanted.shape, embedding.shape[1]))
    if settings.sixteenths:  # skip the chunks after the longest prompt
        count = (jnp.max(layout.shift + lengths) + chunk - 1) // chunk
        cache, taken = jax.lax.fori_loop(
            0, count, lambda index, carry: step(carry, index)[0], (cache, start)
        )
        return taken, cache, None
    chunks = jnp.arange(num_chunks, dtype=jnp.int32)
    (cache, taken), selection = jax.lax.scan(step, (cache, start), chunks)
    selection = jax.tree.map(_join_chunks, selection)
    return taken, cache, _empty_others(selection, is_row, cache.capacity)


def _widths(valid: Bool[Array, "B T"], settings: Settings) -> Widths | None:
    """Numbers of columns, of which the least one that holds all tokens is computed."""
    if not settings.sixteenths:
        return None
    (batch, num_columns), size = valid.shape, settings.policy.block_size
    blocks = {-(-num_columns * part // (16 * size)) for part in (*settings.sixteenths, 16)}
    columns = tuple(size * number for number in sorted(blocks))
    column = jnp.arange(1, num_columns + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(valid, column[None], 0))
    index = jnp.sum(used > jnp.asarray(columns[:-1], jnp.int32), dtype=jnp.int32)
    # Take large parts: each one reads all experts again, for few tokens an expert.
    most = MOST_TOKENS if settings.model_config.num_experts else _MOST_COLUMNS
    return Widths(columns, index, max(size, most // batch))


def new_cache(params: PyTree, batch: int, max_tokens: int, settings: Settings) -> Cache:
    """Makes an empty cache with the type and the placement of the parameters."""
    return init_cache(
        settings.model_config,
        settings.policy,
        batch=batch,
        max_tokens=max_tokens,
        dtype=params["embed"]["embedding"].dtype,
        sharding=settings.placement,
    )


def read_into_new_cache(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"] | None = None,
    *,
    settings: Settings,
) -> tuple[Float[Array, "B C D"], Cache]:
    """Reads prompts into a new cache of `T` tokens, without checks.

    Returns the last layer's output at `columns`, by default at the first one, and the cache.
    """
    batch, num_tokens = tokens.shape
    cache = new_cache(params, batch, num_tokens, settings)
    if columns is None:
        columns = jnp.zeros((batch, 1), jnp.int32)
    hidden, cache, _ = read_prompt(
        params, tokens, lengths, columns, cache, is_fresh=True, settings=settings
    )
    return hidden, spread_cache(cache, settings.placement, settings.policy)


def _empty_others(
    selection: BlockSelection | None, is_row: Bool[Array, "B I"], capacity: int
) -> BlockSelection | None:
    """Empties the lists of rows without prompt tokens, in a selection of stacked layers."""
    if selection is None:
        return None
    is_row = is_row[None, :, None]
    return dataclasses.replace(
        selection,
        ids=jnp.where(is_row[..., None], selection.ids, capacity // selection.block_size),
        counts=jnp.where(is_row, selection.counts, 0),
    )


def _join_chunks(x: Int[Array, "C L B M I *rest"]) -> Int[Array, "L B M CI *rest"]:
    """Concatenates the rows of all chunks of a selection."""
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
    """Appends one token to every active sequence, without checks (Algorithm 2).

    Inactive sequences do not change. Returns the logits after the token, the cache, and the
    selected blocks if the settings ask for them.
    """
    tokens, cache, active = vary_alike(tokens, cache, active, like=params)
    policy = settings.policy
    # Full sequences are inactive, but kernels still read for them: keep them inside the cache.
    positions = jnp.minimum(cache.lengths, cache.capacity - 1)
    span = Span.of_tokens(positions, policy.block_size, active)
    walk = policy.init_walk(
        batch=tokens.shape[0], num_rows=1, num_blocks=cache.capacity // policy.block_size
    )
    (walk,) = vary_alike(walk, like=tokens)
    make = partial(layer_attention, span, is_fresh=False, settings=settings)
    hidden, (written, _), found = run_layers(
        params,
        embed_tokens(params, tokens[:, None], settings.placement),
        positions[:, None],
        (cache, walk),
        model_config=settings.model_config,
        layers=attention_by_layer(make, settings),
        multiply=settings.multiply_rows,
        is_token=active[:, None],
        mix=settings.mix,
    )
    pairs, selection = join_layers(found)
    is_counted = active.astype(jnp.int32)
    density = cache.density.add("decode", pairs, causal_pairs(positions, is_counted))
    cache = dataclasses.replace(written, lengths=cache.lengths + is_counted, density=density)
    logits = unembed(
        params, hidden[:, 0], model_config=settings.model_config, multiply=settings.multiply_rows
    )
    cache = spread_cache(cache, settings.placement, policy)
    return constrain_logits(logits, settings.placement), cache, selection


# Public functions.


def _settings(
    params: PyTree, model_config: ModelConfig, policy: Policy, **options: Any
) -> Settings:
    """Makes the settings of a call; the parameters determine the devices."""
    return Settings(
        model_config=model_config,
        policy=policy,
        placement=placement_of(params, model_config),
        on_one_device=lies_on_one_device(params),
        **options,
    )


def _read(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: Cache,
    *,
    is_fresh: bool,
    settings: Settings,
) -> tuple[Array, Cache, BlockSelection | None]:
    """Computes the logits after the last token of each prompt, or of all tokens."""
    columns = (lengths - 1)[:, None]
    if settings.return_all_logits:
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, cache, selection = read_prompt(
        params, tokens, lengths, columns, cache, is_fresh=is_fresh, settings=settings
    )
    hidden = hidden if settings.return_all_logits else hidden[:, 0]
    logits = unembed(params, hidden, model_config=settings.model_config)
    cache = spread_cache(cache, settings.placement, settings.policy)
    return constrain_logits(logits, settings.placement), cache, selection


_prefill = jax.jit(_read, static_argnames=("is_fresh", "settings"), donate_argnames="cache")
_decode = jax.jit(decode_token, static_argnames=("settings",), donate_argnames="cache")


def prefill(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    cache: Cache,
    *,
    model_config: ModelConfig,
    policy: Policy | None = None,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    phase: str = "both",
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
    return_all_logits: bool = False,
) -> tuple[Any, ...]:
    """Reads prompt tokens into the cache (Algorithm 1 in every layer where the policy selects).

    The tokens continue the sequences in the cache, so a prompt can be read in pieces, and a
    conversation can be continued. The selection of a query block sees the later tokens of its own
    block, as in the paper (block-causal). The attention itself is causal.

    Args:
      params: Parameter tree from `load`.
      tokens: Token ids, right-padded.
      cache: Cache from `init_cache` with the same `policy`. It is donated: use the returned cache
        afterwards.
      model_config: Configuration of the model, from `load`.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`; the policy that the cache was made
        for. Default: `SketchWalkConfig.recommended(plan=model_config.plan)`.
      lengths: Number of tokens of each sequence. Default: all `T`.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`. With `"both"`, a
        policy that selects in one phase only (`policy.phases`) is dense in the other phase.
      chunk_size: Number of tokens processed at a time, which limits the memory that long prompts
        need. `None` processes all at once. On a mesh with a `sequence` axis, it is rounded up to a
        multiple of `2 · sequence` blocks.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.
      return_selection: Whether to return the selected blocks.
      return_all_logits: Whether to return the logits of every token, not only of the last one.

    Returns:
      Float32 logits after the last token of each sequence `[B, V]` (or of all tokens `[B, T, V]`),
      the cache, and with `return_selection` a `BlockSelection` whose arrays have a leading axis of
      sparse layers (`None` if nothing was selected). Its rows are the blocks that the longest
      prompt touches; if the fill of the cache is unknown, more rows may follow. Rows beyond the end
      of a shorter prompt are empty: their counts are 0.

    Raises:
      ValueError: If the parameters, the cache or options do not fit together, a prompt is empty or
        longer than the room in the cache, or a token id is outside the vocabulary. Under `jit`, the
        fill of the cache and the token ids are unknown and not checked (such ids are clamped).
    """
    keep_by_default()
    policy = recommended_policy(model_config) if policy is None else policy
    settings = _settings(
        params,
        model_config,
        policy,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
        return_all_logits=return_all_logits,
    )
    given, lengths = lengths, check_prompt(tokens, lengths, model_config)
    check_cache(cache, tokens.shape[0], model_config, policy, settings.placement)
    check_room(cache, tokens, given)
    check_model(params, cache, model_config)
    num_rows = prompt_rows(tokens, lengths, cache, policy.block_size)
    with advice(params=params, cache=cache):
        out = _prefill(params, tokens, lengths, cache, is_fresh=False, settings=settings)
    return (*out[:2], first_rows(out[2], num_rows)) if return_selection else out[:2]


def decode_step(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B"],
    cache: Cache,
    *,
    model_config: ModelConfig,
    policy: Policy | None = None,
    phase: str = "both",
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
) -> tuple[Any, ...]:
    """Appends one token to every sequence and returns the logits after it (Algorithm 2).

    Args:
      params: Parameter tree from `load`.
      tokens: One token id per sequence.
      cache: The cache so far. It is donated: use the returned cache afterwards. Tokens beyond its
        capacity are lost.
      model_config: Configuration of the model, from `load`.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`; the policy that the cache was made
        for. Default: `SketchWalkConfig.recommended(plan=model_config.plan)`.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`. With `"both"`, a
        policy that selects in one phase only (`policy.phases`) is dense in the other phase.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.
      return_selection: Whether to return the selected blocks.

    Returns:
      Float32 logits `[B, V]`, the cache, and with `return_selection` a `BlockSelection` with a
      leading axis of sparse layers.

    Raises:
      ValueError: If the parameters, the cache, the tokens or options do not fit together.
    """
    keep_by_default()
    policy = recommended_policy(model_config) if policy is None else policy
    settings = _settings(
        params,
        model_config,
        policy,
        phase=phase,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
    )
    check_token(tokens, cache, model_config, policy, settings.placement)
    check_model(params, cache, model_config)
    active = jnp.ones(tokens.shape, bool)
    with advice(params=params, cache=cache):
        out = _decode(params, tokens, cache, active=active, settings=settings)
    return out if return_selection else out[:2]


def forward(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    model_config: ModelConfig,
    policy: Policy | None = None,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B T V"]:
    """Computes the logits of every prompt token, without keeping a cache (teacher forcing).

    Args:
      params: Parameter tree from `load`.
      tokens: Token ids, right-padded.
      model_config: Configuration of the model, from `load`.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)`. Default: `Dense()`.
      lengths: Number of tokens of each sequence. Default: all `T`.
      chunk_size: Number of tokens processed at a time. `None` processes all at once.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.

    Returns:
      Float32 logits. The logits of padding are meaningless.

    Raises:
      ValueError: In the same cases as `prefill`.
    """
    keep_by_default()
    policy = Dense() if policy is None else policy
    settings = _settings(
        params,
        model_config,
        policy,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_all_logits=True,
    )
    lengths = check_prompt(tokens, lengths, model_config)
    check_model(params, None, model_config)
    batch, num_tokens = tokens.shape
    cache = new_cache(params, batch, num_tokens, settings)
    with advice(params=params, cache=cache):
        return _prefill(params, tokens, lengths, cache, is_fresh=True, settings=settings)[0]
