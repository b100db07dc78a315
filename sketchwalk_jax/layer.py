"""One layer for other codebases: `(q, k, v, walk) -> (out, walk)`, inside their own scan.

Nothing is cached: queries and keys of the whole sequence go in, as in training or scoring. Thread
the walk through the layers' `scan`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.api import attend_rows, dense_attention
from sketchwalk_jax.dispatch import selection_kernels
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, Policy, Span
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.validation import check_per_sequence, check_qkv
from sketchwalk_jax.walk import WalkState


def init_walk(batch: int, num_tokens: int, *, config: Policy | None = None) -> WalkState:
    """The walk before the first sparse layer, for sequences of `num_tokens` tokens.

    Args:
      batch: Sequences `B`.
      num_tokens: Tokens `T`.
      config: What `sketchwalk_attention` will be called with.

    Returns:
      A `WalkState` of zero layers.
    """
    config = SketchWalkConfig.recommended() if config is None else config
    num_blocks = -(-num_tokens // config.block_size)
    return WalkState.zeros(batch, num_blocks, num_blocks)


def sketchwalk_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    walk: WalkState,
    *,
    config: Policy | None = None,
    lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> tuple[Float[Array, "B T N H"], WalkState]:
    """Causal self-attention over the blocks that the walk selects (Algorithm 1).

    What this layer's queries and keys say makes, together with the walk so far, the next walk; then
    every head attends exactly over the top blocks of each row. Pure; call it in every sparse layer,
    the walk in the carry. `config.dense_layers` does not apply here: call `dense_attention` in the
    layers that are to stay dense. The recommended policy scores by the half of a head's channels
    that rotary embedding turns slowest, where channels `d` and `d + H/2` turn together, as in Llama
    and Qwen. Not differentiable in reverse mode: selection is discrete, and the loops over lists
    have dynamic lengths.

    Args:
      query: Queries after rotary embedding.
      key: Keys after rotary embedding.
      value: Values.
      walk: From `init_walk` or the previous sparse layer.
      config: A policy, by default `SketchWalkConfig.recommended()`. One that selects in decode only
        attends to everything here, and the walk stays as it is.
      lengths: Tokens of each right-padded sequence; all `T` by default.
      scale: Factor of the attention scores. Default `1 / sqrt(H)`.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.

    Returns:
      The output, and the walk for the next sparse layer.

    Raises:
      ValueError: If shapes do not fit together, or the walk was made for another length.

    Example:
      >>> import jax
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> config = SketchWalkConfig.recommended(density=0.5)
      >>> x = jax.random.normal(jax.random.key(0), (1, 256, 4, 32))
      >>> out, walk = sketchwalk_attention(x, x, x, init_walk(1, 256, config=config), config=config)
      >>> out.shape, walk.scores.shape
      ((1, 256, 4, 32), (1, 4, 4))
    """
    config = SketchWalkConfig.recommended() if config is None else config
    check_qkv(query, key, value, None)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key must have as many tokens as query, {query.shape[1]}, got {key.shape[1]}"
        )
    check_per_sequence("lengths", lengths, query.shape[0])
    batch, num_tokens, num_heads, head_dim = query.shape
    size = config.block_size
    num_blocks = -(-num_tokens // size)
    if walk.scores.shape != (batch, num_blocks, num_blocks):
        raise ValueError(
            f"walk must have scores of shape {(batch, num_blocks, num_blocks)} (init_walk makes "
            f"them), got {walk.scores.shape}"
        )
    if lengths is None:
        lengths = jnp.full((batch,), num_tokens, jnp.int32)
    if "prefill" not in config.phases:
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
    padding = ((0, 0), (0, num_blocks * size - num_tokens), (0, 0), (0, 0))
    query, key, value = (jnp.pad(x, padding) for x in (query, key, value))
    columns = jnp.arange(num_blocks * size, dtype=jnp.int32)[None, :]
    first_block = jnp.zeros((batch,), jnp.int32)
    span = Span(first_block, columns < lengths[:, None], lengths, lengths)
    shape = LayerShape(num_heads, key.shape[2], head_dim, key.dtype)
    statistics = config.init_statistics(shape, batch=batch, num_blocks=num_blocks)
    kernels = selection_kernels(implementation, kernel_config)
    statistics = config.observe(query, key, statistics, span=span, kernels=kernels)
    first = jnp.zeros((), jnp.int32)
    selection, walk = config.select(
        query, key[None], statistics, walk, layer=first, span=span, kernels=kernels
    )
    out, _ = attend_rows(
        query,
        key,
        value,
        selection,
        first_block=first_block,
        layer=None,
        kv_lengths=lengths,
        scale=scale,
        return_lse=False,
        implementation=implementation,
        kernel_config=kernel_config,
    )
    return out[:, :num_tokens], walk
