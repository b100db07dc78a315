"""Attention for Flax's own multi-head layers: an `attention_fn`, and modules that carry the walk.

`make_attention_fn` is stateless and serves nnx and Linen alike. The walk crosses layers: one
`WalkAttention` (nnx) or one `LinenWalkAttention` is shared by all layers of a model. Where layers
share nothing, as under `jax.lax.scan` or `nnx.scan`, carry the walk yourself; it is the same walk:

    def layer_step(carry, weights):
        x, walk = carry
        query, key, value = project(weights, x)
        out, walk = sketchwalk_attention(query, key, value, walk, config=config)
        return (x + merge(weights, out), walk), None

    walk = init_walk(batch, num_tokens, config=config)
    (x, _), _ = jax.lax.scan(layer_step, (x, walk), weights_of_sparse_layers)

Selection is for causal self-attention over whole sequences, which may be padded on the right. A
layer's mask is honoured if it says just that. Any other mask raises a ValueError, or, under `jit`
where its values are unknown, gives NaN; what else cannot be honoured (bias, attention dropout,
sown weights, cross-attention, `decode=True`) raises a NotImplementedError. Padded queries give
values without meaning. Sparse attention is not differentiable in reverse mode.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sketchwalk_jax.flax_arguments import SelfAttention, check_config, refuse_unknown
from sketchwalk_jax.flax_walk import LinenWalkAttention, Walk, WalkAttention
from sketchwalk_jax.functional import init_walk, sketchwalk_attention
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.policies.dense import Dense

__all__ = ["LinenWalkAttention", "Walk", "WalkAttention", "make_attention_fn"]


def _dense(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None,
    is_causal: bool,
    force_fp32_for_softmax: bool | None,
    qk_attn_weights_einsum: Callable[..., Array] | None,
    attn_weights_value_einsum: Callable[..., Array] | None,
    **options: Any,
) -> Array:
    """Flax's own attention; nnx and Linen round differently, so each has its own."""
    mask = None if mask is None else mask.astype(bool)
    if force_fp32_for_softmax is None:  # Linen's layers, and they alone, say True or False
        return nnx.dot_product_attention(
            query, key, value, mask=mask, is_causal=is_causal, **options
        )
    if is_causal:
        causal = jnp.tril(jnp.ones((query.shape[-3], key.shape[-3]), bool))
        causal = causal.reshape((1,) * (query.ndim - 2) + causal.shape)
        mask = causal if mask is None else mask & causal
    return nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        force_fp32_for_softmax=force_fp32_for_softmax,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        **options,
    )


def make_attention_fn(
    config: Policy | None = None,
    *,
    is_causal: bool = False,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Callable[..., Array]:
    """The `attention_fn` of one layer, for `nnx.MultiHeadAttention` and for Linen's.

    Without a config (or with `Dense()`) it is Flax's own attention, bit for bit, and takes all that
    Flax's takes. With a config every layer selects by its own block scores, since a function has
    no state: a walk of one layer (`R_0 = W_0`), to which `config.dense_layers` does not apply. Use
    `WalkAttention` or `LinenWalkAttention` for the walk over layers.

    Args:
      config: A `SketchWalkConfig`, or `None` for dense attention.
      is_causal: Whether attention is causal even where the layer does not say so; Linen's layers
        have no way to say it but a mask.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.

    Returns:
      A function `(query, key, value, bias=None, mask=None, ...)` on arrays `[*batch, T, N, H]`.

    Raises:
      NotImplementedError: If the config is another policy.

    Example:
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> layer = nnx.MultiHeadAttention(
      ...     4, 32, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=make_attention_fn(SketchWalkConfig.paper(block_size=16)))
      >>> layer(jnp.ones((2, 100, 32)), is_causal=True).shape
      (2, 100, 32)
    """
    policy = None if isinstance(config, Dense) else config
    if policy is not None:
        check_config(policy)
    is_always_causal = is_causal

    # Linen leaves out, without a word, every keyword that is not named here.
    def attention_fn(
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K H"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool | None = None,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        **other: Any,
    ) -> Float[Array, "*batch T N H"]:
        refuse_unknown(other)
        options = {
            "bias": bias,
            "mask": mask,
            "broadcast_dropout": broadcast_dropout,
            "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate,
            "deterministic": deterministic,
            "dtype": dtype,
            "precision": precision,
            "module": module,
            "is_causal": is_causal or is_always_causal,
            "force_fp32_for_softmax": force_fp32_for_softmax,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        if policy is None:
            return _dense(query, key, value, **options)
        call = SelfAttention.of_call(query, key, value, **options)
        out, _ = sketchwalk_attention(
            call.query,
            call.key,
            call.value,
            init_walk(*call.query.shape[:2], config=policy),
            config=policy,
            lengths=call.lengths,
            implementation=implementation,
            kernel_config=kernel_config,
        )
        return call.finish(out)

    return attention_fn
