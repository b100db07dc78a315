"""Dense attention through cuDNN's flash attention, for prefill on NVIDIA GPUs.

`dispatch.why_not_cudnn` says which calls it supports. cuDNN supports sequences of different lengths
and grouped-query attention. But it does not promise that keys beyond a sequence's length may hold
any values, so these keys are set to 0 before the call, and such queries' outputs after it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attend_dense(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    *,
    layer: Any,
    kv_lengths: Int[Array, "B"] | None,
    scale: float | None,
) -> Float[Array, "B T N H"]:
    """Causal attention of queries from position 0 on; 0 from position `kv_lengths` on."""
    num_tokens = query.shape[1]
    lengths = None
    if kv_lengths is not None:
        lengths = jnp.minimum(jnp.asarray(kv_lengths, jnp.int32), num_tokens)

    def without_padding(x: Float[Array, "B T Heads H"]) -> Float[Array, "B T Heads H"]:
        if lengths is None:
            return x
        is_token = jnp.arange(num_tokens, dtype=jnp.int32)[None, :] < lengths[:, None]
        return jnp.where(is_token[:, :, None, None], x, 0)

    def first_keys(x: Float[Array, "*L B S K H"]) -> Float[Array, "B T K H"]:
        if layer is not None:
            x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        return without_padding(x[:, :num_tokens])  # no causal query sees a later key

    out = jax.nn.dot_product_attention(
        query,
        first_keys(key),
        first_keys(value),
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return without_padding(out)
