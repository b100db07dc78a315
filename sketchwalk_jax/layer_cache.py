"""One layer with a cache for other codebases: `(q, k, v, cache, walk) -> (out, cache, walk)`.

What `layer.sketchwalk_attention` is for whole sequences, this is for prompts and decoded tokens.
The same code runs as in `prefill` and `decode_step`, so that summaries and selections are theirs.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from sketchwalk_jax.attention.api import take_columns
from sketchwalk_jax.cache import Cache, Density
from sketchwalk_jax.cached_layer import LayerSettings, layer_attention
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, Policy, Span, check_policy
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.renamed import renamed_argument
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import (
    check_dtype,
    check_integer,
    check_lengths,
    check_per_sequence,
    check_qkv,
    check_scale,
    describe,
    is_known,
)

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of the tokens seen so far; stack those of all layers for a `scan`.

    Attributes:
      key: Keys, `[B, S, K, H]`; `S` is the capacity in tokens, whole blocks.
      value: Values, `[B, S, K, H]`.
      statistics: The policy's statistics of this layer.
      lengths: Tokens of each sequence, int32 `[B]`.
      made_for: The policy by name, and what changes the meaning of its statistics.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    statistics: Any
    lengths: Int[Array, "B"]
    made_for: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})


def _made_for(policy: Policy) -> tuple[Any, ...]:
    return (type(policy).__name__, *policy.statistics_key)


@renamed_argument("config", "policy")
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
    """An empty cache of one layer.

    Args:
      batch: Sequences `B`.
      max_tokens: Tokens that each must be able to hold; rounded up to whole blocks.
      num_heads: Query heads `N`.
      num_kv_heads: Key/value heads `K`.
      head_dim: Features of a head `H`.
      policy: What `sketchwalk_cached_attention` will be called with.
      dtype: Type of keys and values.

    Returns:
      A `LayerCache` with lengths of zero.

    Raises:
      ValueError: If a size is not positive.
    """
    policy = SketchWalkConfig.recommended() if policy is None else policy
    check_policy(policy)
    sizes = {"batch": batch, "max_tokens": max_tokens, "num_heads": num_heads}
    for name, size in (sizes | {"num_kv_heads": num_kv_heads, "head_dim": head_dim}).items():
        check_integer(name, size)
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


@renamed_argument("config", "policy")
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
    """Causal self-attention of new tokens behind a cache, over the blocks that the walk selects.

    One token of each sequence is decoded (Algorithm 2), several are a prompt, or its next piece
    (Algorithm 1): as in `decode_step` and `prefill`, to whose layer this is equal. Token `t` of a
    sequence stands at position `cache.lengths + t`, where queries and keys must have been rotated
    to. The walk crosses the layers of one call and starts afresh with the next tokens. Layers that
    are to stay dense take `policy=Dense()` and a cache made for it; `policy.dense_layers` does not
    apply. For training, which needs no cache, there is `sketchwalk_attention`.

    Args:
      query: Queries of the new tokens after rotary embedding.
      key: Their keys after rotary embedding.
      value: Their values.
      cache: From `init_layer_cache`, or what the last call on this layer returned; donated.
      walk: What this function returned in the previous sparse layer; `None` starts a walk.
      policy: The policy that the cache was made for, by default `SketchWalkConfig.recommended()`.
      lengths: New tokens of each right-padded sequence, all `T` by default; in decode 0 for a
        sequence that has ended, which stays as it is.
      scale: Factor of the attention scores. Default `1 / sqrt(H)`.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      return_selection: Whether to return the selected blocks.

    Returns:
      The output `[B, T, N, H]`, the cache, the walk for the next sparse layer, and with
      `return_selection` a `BlockSelection` (`None` where the policy is dense). Its rows are blocks,
      from that of each sequence's first new token on.

    Raises:
      ValueError: If shapes do not fit together, the cache was made for another policy, or, where
        its lengths are known, has no room.

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
        policy=SketchWalkConfig.recommended() if policy is None else policy,
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
    """Raises for arguments that do not fit; returns the lengths."""
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


@partial(jax.jit, static_argnames="settings", donate_argnames="cache")
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
    """What `sketchwalk_cached_attention` does after its checks; compiled once for each shape."""
    policy, used = settings.policy, cache.lengths
    batch, num_tokens = query.shape[:2]
    size, num_blocks = policy.block_size, cache.key.shape[1] // policy.block_size
    shift = used % size
    if num_tokens == 1:
        span, num_rows = Span.of_tokens(used, size, lengths > 0), 1
    else:  # columns on block boundaries, behind as many as the last block has tokens already
        num_rows = -(-(num_tokens + size - 1) // size)
        column = jnp.arange(num_rows * size, dtype=jnp.int32)[None, :]
        source = column - shift[:, None]
        valid = (source >= 0) & (source < lengths[:, None])
        source = jnp.clip(source, 0, num_tokens - 1)
        query, key, value = (take_columns(x, source) for x in (query, key, value))
        span = Span(used // size, valid, used + lengths, used + lengths)
    if walk is None:
        walk = policy.init_walk(batch=batch, num_rows=num_rows, num_blocks=num_blocks)
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
        back = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] + shift[:, None]
        out = take_columns(out, back)
    cache = LayerCache(keys, values, statistics, used + lengths, cache.made_for)
    return out, cache, walk, selection
