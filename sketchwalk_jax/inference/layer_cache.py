"""One attention layer with a cache: `(q, k, v, cache, walk) -> (out, cache, walk)`.

`layer.sketchwalk_attention` is for whole sequences; this layer is for prompts and decoded tokens.
It runs the code of `prefill` and `decode_step`, so it computes the same statistics and selections.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from sketchwalk_jax.attention.api import take_columns
from sketchwalk_jax.attention.xla import on_auto_axes, vary_alike
from sketchwalk_jax.inference.cache import Cache, Density, chunk_layout
from sketchwalk_jax.inference.cached_layer import LayerSettings, layer_attention
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, Policy, Span, check_policy
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.pytree import register
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import (
    check_dtype,
    check_heads,
    check_integer,
    check_lengths,
    check_per_sequence,
    check_qkv,
    check_scale,
    describe,
    is_known,
)

PyTree = Any


@register
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The state of one layer that decoding needs. Stack the states of all layers for a `scan`.

    Attributes:
      key: Keys, `[B, S, K, H]`. `S` is the capacity in tokens, a multiple of the block size.
      value: Values, `[B, S, K, H]`.
      statistics: The policy's statistics of this layer's tokens, from which it selects blocks.
      lengths: Number of tokens of each sequence, int32 `[B]`.
      made_for: Name of the policy, and the fields that change the meaning of its statistics.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    statistics: Any
    lengths: Int[Array, "B"]
    made_for: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})


def _made_for(policy: Policy) -> tuple[Any, ...]:
    return (type(policy).__name__, *policy.statistics_key)


def init_layer_cache(
    batch: int,
    max_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    policy: Policy | None = None,
    dtype: DTypeLike = jnp.float32,
) -> LayerCache:
    """Makes an empty cache of one layer.

    Args:
      batch: Number of sequences `B`.
      max_tokens: Number of tokens that the cache must hold for each sequence. Rounded up to whole
        blocks.
      num_heads: Number of query heads `N`.
      num_kv_heads: Number of key/value heads `K`.
      head_dim: Size of a head `H`.
      policy: The policy that `sketchwalk_cached_attention` will be called with, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`. Default:
        `SketchWalkConfig.recommended()`.
      dtype: Type of keys and values.

    Returns:
      A `LayerCache` with lengths of zero.

    Raises:
      ValueError: If a size is not positive, or `num_kv_heads` does not divide `num_heads`.
    """
    policy = RecommendedConfig() if policy is None else policy
    check_policy(policy)
    sizes = {"batch": batch, "max_tokens": max_tokens, "head_dim": head_dim}
    for name, size in sizes.items():
        check_integer(name, size)
    check_heads(num_heads, num_kv_heads)
    dtype = check_dtype("dtype", dtype)
    num_blocks = -(-max_tokens // policy.block_size)
    shape = (batch, num_blocks * policy.block_size, num_kv_heads, head_dim)
    statistics = policy.init_statistics(
        LayerShape(num_heads, num_kv_heads, head_dim, dtype), batch=batch, num_blocks=num_blocks
    )
    return LayerCache(
        jnp.zeros(shape, dtype),
        jnp.zeros(shape, dtype),
        statistics,
        jnp.zeros((batch,), jnp.int32),
        _made_for(policy),
    )


def sketchwalk_cached_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    cache: LayerCache,
    walk: PyTree = None,
    *,
    policy: Policy | None = None,
    lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
) -> tuple[Any, ...]:
    """Causal self-attention of new tokens after a cache, over the blocks that the walk selects.

    With one token per sequence, the call decodes (Algorithm 2). With several, it reads a prompt or
    the next piece of one (Algorithm 1). It computes the same as a layer of `decode_step` or
    `prefill`. Token `t` of a sequence has position `cache.lengths + t`: apply rotary embedding to
    queries and keys at that position.

    The walk goes through the layers of one call and starts again with the next tokens. For layers
    that should stay dense, pass `policy=Dense()` and a cache made for it; `policy.dense_layers` has
    no effect here. For training, which needs no cache, use `sketchwalk_attention`.

    `cache` comes from `init_layer_cache` with the same policy, or from the last call on this layer.
    It is donated. `walk` is the walk that this function returned in the previous sparse layer;
    `None` starts a walk. `lengths` is the number of new tokens of each right-padded sequence, by
    default all `T`; in decode, 0 marks a sequence that has ended, and it does not change.
    `return_selection` also returns the selected blocks. The other arguments are those of
    `sketchwalk_attention`.

    Returns:
      The output `[B, T, N, H]`, the cache, the walk for the next sparse layer, and with
      `return_selection` a `BlockSelection` (`None` if the policy is dense). Its rows are blocks,
      starting at the block of each sequence's first new token.

    Raises:
      ValueError: If shapes do not fit together, the cache was made for another policy, or a cache
        whose lengths are known has no room.

    Example:
      >>> import jax
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> policy = SketchWalkConfig.recommended(block_size=16, density=0.5)
      >>> x = jax.random.normal(jax.random.key(0), (1, 100, 4, 32))
      >>> cache = init_layer_cache(
      ...     1, 128, num_heads=4, num_kv_heads=4, head_dim=32, policy=policy)
      >>> out, cache, walk = sketchwalk_cached_attention(x, x, x, cache, policy=policy)
      >>> token = x[:, :1]
      >>> out, cache, walk = sketchwalk_cached_attention(token, token, token, cache, policy=policy)
      >>> out.shape, cache.lengths.tolist()
      ((1, 1, 4, 32), [101])
    """
    settings = LayerSettings(
        policy=RecommendedConfig() if policy is None else policy,
        scale=check_scale(scale),
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
    )
    lengths = _check(query, key, value, cache, lengths, settings.policy)
    out = _one_layer(query, key, value, cache, walk, lengths, settings=settings)
    return out if return_selection else out[:3]


def _check(
    query: Any, key: Any, value: Any, cache: Any, lengths: Any, policy: Policy
) -> Int[Array, "B"]:
    """Raises if arguments do not fit together; returns the lengths."""
    if not isinstance(cache, LayerCache):
        raise ValueError(f"cache must be a LayerCache from init_layer_cache, got {describe(cache)}")
    batch, num_tokens = check_qkv(query, key, value, None)
    if key.shape[1] != num_tokens:
        raise ValueError(f"key must have as many tokens as query, {num_tokens}, got {key.shape[1]}")
    capacity = cache.key.shape[1]
    if cache.key.shape != (batch, capacity, *key.shape[2:]) or cache.key.dtype != key.dtype:
        raise ValueError(
            f"cache must hold keys like key's {key.dtype}{list(key.shape)}, got "
            f"{cache.key.dtype}{list(cache.key.shape)}"
        )
    if cache.made_for != _made_for(policy) or capacity % policy.block_size:
        raise ValueError(
            f"cache must be from init_layer_cache with this policy, {_made_for(policy)}, got one "
            f"for {cache.made_for} of {capacity} tokens"
        )
    if num_tokens > 1 or lengths is None:
        lengths = check_lengths(lengths, batch, num_tokens, "query")
    else:
        check_per_sequence("lengths", lengths, batch)
        lengths = jnp.asarray(lengths, jnp.int32)
    if is_known(cache.lengths) and is_known(lengths):
        reach = int(jnp.max(cache.lengths + lengths))
        if reach > capacity:
            raise ValueError(f"cache must have room for {reach} tokens, got one of {capacity}")
    return lengths


def _specs(
    query: PartitionSpec, key: Any, value: Any, cache: Any, walk: Any, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """Partition specs of the results of `_one_layer`: its state keeps its sharding."""
    whole = PartitionSpec()
    return query, cache, whole if walk is None else walk, whole


@partial(jax.jit, static_argnames="settings", donate_argnames="cache")
@on_auto_axes(_specs)
def _one_layer(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    cache: LayerCache,
    walk: PyTree,
    lengths: Int[Array, "B"],
    *,
    settings: LayerSettings,
) -> tuple[Array, LayerCache, PyTree, BlockSelection | None]:
    """Runs `sketchwalk_cached_attention` after its checks; compiled once for each shape."""
    query, key, value, cache, walk, lengths = vary_alike(query, key, value, cache, walk, lengths)
    policy, used = settings.policy, cache.lengths
    batch, num_tokens = query.shape[:2]
    size, num_blocks = policy.block_size, cache.key.shape[1] // policy.block_size
    if num_tokens == 1:
        span, num_rows = Span.of_tokens(used, size, lengths > 0), 1
    else:  # align columns to blocks, after the tokens that the last block already has
        layout = chunk_layout(num_tokens, lengths, used, block_size=size)
        num_rows = layout.chunk_size // size
        query, key, value = (take_columns(x, layout.source) for x in (query, key, value))
        span = Span(used // size, layout.valid, used + lengths, used + lengths)
    if walk is None:
        fresh = policy.init_walk(batch=batch, num_rows=num_rows, num_blocks=num_blocks)
        (walk,) = vary_alike(fresh, like=query)
    attend = layer_attention(
        span, is_fresh=False, is_sparse=True, first_sparse=0, policy=policy, settings=settings
    )
    keys, values, statistics = jax.tree.map(
        lambda x: x[None], (cache.key, cache.value, cache.statistics)
    )
    stacked = Cache(keys, values, statistics, used, Density.zeros(1, batch))
    layer = jnp.zeros((), jnp.int32)
    out, (stacked, walk), (_, selection) = attend(query, key, value, layer, (stacked, walk))
    keys, values, statistics = jax.tree.map(
        lambda x: x[0], (stacked.key, stacked.value, stacked.statistics)
    )
    if num_tokens > 1:
        back = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] + layout.shift[:, None]
        out = take_columns(out, back)
    cache = LayerCache(keys, values, statistics, used + lengths, cache.made_for)
    return out, cache, walk, selection
