"""One attention layer for use in other codebases: `(q, k, v, walk) -> (out, walk)`.

The layer has no cache. It takes the queries and keys of the whole sequence, as in training or
scoring. Carry the walk through your scan over layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.api import dense_attention, prepare_lists
from sketchwalk_jax.attention.differentiable import attend_lists
from sketchwalk_jax.attention.xla import on_auto_axes, vary_alike
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.dispatch import choose_implementation, selection_kernels
from sketchwalk_jax.policies.base import LayerShape, Policy, Span, check_policy
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import check_integer, check_lengths, check_qkv, check_scale, describe
from sketchwalk_jax.walk import WalkState

PyTree = Any


def init_walk(
    batch: int, num_tokens: int, *, policy: Policy | None = None, like: PyTree = None
) -> WalkState:
    """Makes the walk before the first sparse layer, for sequences of `num_tokens` tokens.

    Args:
      batch: Number of sequences `B`.
      num_tokens: Number of tokens `T`.
      policy: The policy that `sketchwalk_attention` will be called with, such as
        `SketchWalkConfig.recommended(density=0.2)`. Default: `SketchWalkConfig.recommended()`.
      like: Arrays that the layers compute from, such as their input and weights. They matter only
        inside your own `jax.shard_map`: the walk then varies over the same mesh axes as they do, as
        a scan's carry must. Default: all axes of that `shard_map`.

    Returns:
      A `WalkState` with a layer count of zero.

    Raises:
      ValueError: If a size is not positive, or `policy` is not a policy.
    """
    policy = RecommendedConfig() if policy is None else policy
    check_policy(policy)
    check_integer("batch", batch)
    check_integer("num_tokens", num_tokens)
    num_blocks = -(-num_tokens // policy.block_size)
    walk = policy.init_walk(batch=batch, num_rows=num_blocks, num_blocks=num_blocks)
    if not isinstance(walk, WalkState):
        walk = WalkState.zeros(batch, num_blocks, num_blocks)
    if like is not None:
        (walk,) = vary_alike(walk, like=like)
    elif axes := jax.sharding.get_abstract_mesh().manual_axes:
        walk = jax.lax.pcast(walk, axes, to="varying")
        # Marks the walk, so that a layer replaces it by one that varies as the layer's queries do.
        object.__setattr__(walk, "is_new", True)
    return walk


def sketchwalk_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    walk: WalkState | None = None,
    *,
    policy: Policy | None = None,
    lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> tuple[Float[Array, "B T N H"], WalkState]:
    """Causal self-attention over the blocks that the walk selects (Algorithm 1).

    The layer scores key blocks from its queries and keys, and combines these scores with the walk
    so far into the next walk. Then every head attends exactly to the best blocks of each row (query
    block). The function is pure. Call it in every sparse layer, with the walk in the carry of your
    scan.

    `policy.dense_layers` has no effect here: call `dense_attention` in layers that should stay
    dense. The recommended policy scores with the half of a head's channels that rotary embedding
    rotates most slowly. It expects that channels `d` and `d + H/2` are rotated together, as in
    Llama and Qwen.

    The output has reverse-mode derivatives with respect to queries, keys and values. The selected
    blocks are constants: no derivative flows through the selection or the walk.

    Args:
      query: Queries after rotary embedding.
      key: Keys after rotary embedding.
      value: Values.
      walk: Walk from `init_walk` or from the previous sparse layer. `None` starts a walk.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)`. Default: `SketchWalkConfig.recommended()`. With
        a policy that selects in decode only, attention is dense here and the walk does not change.
      lengths: Number of tokens of each right-padded sequence. Default: all `T`.
      scale: Factor of the attention scores. Default: `1 / sqrt(H)`.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.

    Returns:
      The output, and the walk for the next sparse layer.

    Raises:
      ValueError: If shapes do not fit together, known lengths are not between 1 and `T`, or the
        walk was made for another length.

    Example:
      >>> import jax
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> policy = SketchWalkConfig.recommended(density=0.5)
      >>> x = jax.random.normal(jax.random.key(0), (1, 256, 4, 32))
      >>> out, walk = sketchwalk_attention(x, x, x, policy=policy)
      >>> out.shape, walk.scores.shape
      ((1, 256, 4, 32), (1, 4, 16))
    """
    policy = RecommendedConfig() if policy is None else policy
    check_policy(policy)
    check_qkv(query, key, value, None)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key must have as many tokens as query, {query.shape[1]}, got {key.shape[1]}"
        )
    batch, num_tokens, num_heads, head_dim = query.shape
    size = policy.block_size
    num_blocks = -(-num_tokens // size)
    fresh = init_walk(batch, num_tokens, policy=policy, like=())
    walk = fresh if walk is None else walk
    if not isinstance(walk, WalkState):
        raise ValueError(f"walk must be a WalkState from init_walk, got {describe(walk)}")
    if walk.scores.shape != fresh.scores.shape:
        raise ValueError(
            f"walk must have scores of shape {fresh.scores.shape} (init_walk makes them), got "
            f"{walk.scores.shape}"
        )
    walk = fresh if walk.is_new else walk
    lengths = check_lengths(lengths, batch, num_tokens, "query")
    if "prefill" not in policy.phases:
        out = dense_attention(
            query,
            key,
            value,
            kv_lengths=lengths,
            scale=scale,
            implementation="xla" if implementation == "xla" else None,
            kernel_config=kernel_config,
        )
        return out, walk
    rows = jax.ShapeDtypeStruct((batch, num_blocks * size, num_heads, head_dim), query.dtype)
    chosen = choose_implementation(
        implementation,
        rows,
        block_size=getattr(policy, "unit_size", size),
        row_size=size,
        kernel_config=kernel_config,
    )
    return _one_layer(
        query,
        key,
        value,
        walk,
        lengths,
        policy=policy,
        scale=check_scale(scale),
        implementation=chosen,
        kernel_config=kernel_config,
        selects_with=selection_kernels(implementation, kernel_config, what=policy.prompt_kernels),
    )


@partial(
    jax.jit, static_argnames=("policy", "scale", "implementation", "kernel_config", "selects_with")
)
@on_auto_axes(lambda query, key, value, walk, *_, **__: (query, walk))
def _one_layer(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    walk: WalkState,
    lengths: Int[Array, "B"],
    *,
    policy: Policy,
    scale: float | None,
    implementation: str,
    kernel_config: KernelConfig | None,
    selects_with: KernelConfig | None,
) -> tuple[Float[Array, "B T N H"], WalkState]:
    """Runs `sketchwalk_attention` after its checks; compiled once for each shape."""
    batch, num_tokens, num_heads, head_dim = query.shape
    size = policy.block_size
    num_blocks = -(-num_tokens // size)
    padding = ((0, 0), (0, num_blocks * size - num_tokens), (0, 0), (0, 0))
    query, key, value = (jnp.pad(x, padding) for x in (query, key, value))
    columns = jnp.arange(num_blocks * size, dtype=jnp.int32)[None, :]
    first_block = jnp.zeros_like(lengths)
    span = Span(first_block, columns < lengths[:, None], lengths, lengths)
    # Selection and walk are constants, because selection kernels have no derivative.
    own_query, own_key, walk, span = vary_alike(*jax.lax.stop_gradient((query, key, walk, span)))
    ((selection, walk),) = select_whole(
        [policy], own_query, own_key, [walk], span=span, kernel_config=selects_with
    )
    given = prepare_lists(
        query,
        key,
        value,
        selection,
        first_block,
        kv_lengths=lengths,
        scale=scale,
        implementation=implementation,
        kernel_config=kernel_config,
    )
    return attend_lists(*given)[0][:, :num_tokens], walk


def select_whole(
    policies: Sequence[Policy],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    walks: Sequence[PyTree],
    *,
    span: Span,
    kernel_config: KernelConfig | None = None,
) -> list[tuple[BlockSelection, PyTree]]:
    """Selects for whole sequences; returns the lists and the next walk of each policy.

    The policies have the same statistics, which the first one computes for all. `query` and `key`
    are of all tokens, in whole blocks, and each policy has a walk.
    """
    first = policies[0]
    shape = LayerShape(query.shape[2], key.shape[2], key.shape[3], key.dtype)
    statistics = first.init_statistics(
        shape, batch=query.shape[0], num_blocks=query.shape[1] // first.block_size
    )
    (statistics,) = vary_alike(statistics, like=query)
    statistics = first.update_statistics(
        query, key, statistics, span=span, kernel_config=kernel_config
    )
    where: dict[str, Any] = {
        "layer": jnp.zeros((), jnp.int32),
        "span": span,
        "kernel_config": kernel_config,
    }
    return [
        policy.select(query, key[None], statistics, walk, **where)
        for policy, walk in zip(policies, walks, strict=True)
    ]
