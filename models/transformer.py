"""The decoder-only transformer that Llama, Qwen2 and Qwen3 share, as pure functions.

Layers are stacked on a leading axis and visited by `jax.lax.scan`; whatever attention needs (cache,
walk state) is threaded through the carry, opaque to this file.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.rope import rope_cos_sin, rotate
from sketchwalk_jax.precision import matmul_precision

PyTree = Any
# (query [B T N H], key [B T K H], value, layer, state) -> (output [B T N H], state, per-layer aux)
Attend = Callable[[Array, Array, Array, Array, PyTree], tuple[Array, PyTree, PyTree]]


def rms_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, "D"], *, eps: float
) -> Float[Array, "*lead D"]:
    """`x / sqrt(mean(x²) + eps)` in float32, cast back, then times `scale`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def _linear(x: Array, weights: dict[str, Array], equation: str) -> Array:
    out = jnp.einsum(equation, x, weights["kernel"], precision=matmul_precision(x))
    if "bias" in weights:
        bias = weights["bias"]
        out = out + bias.reshape((1,) * (out.ndim - bias.ndim) + bias.shape)
    return out


def embed(params: PyTree, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Token embeddings. Ids outside the vocabulary are clamped."""
    return params["embed"]["embedding"].at[tokens].get(mode="clip")


def unembed(
    params: PyTree, hidden: Float[Array, "*lead D"], *, model_config: ModelConfig
) -> Float[Array, "*lead V"]:
    """Final norm and output head; logits in float32."""
    hidden = rms_norm(hidden, params["final_norm"]["scale"], eps=model_config.rms_norm_eps)
    if model_config.tie_word_embeddings:
        head, equation = params["embed"]["embedding"], "...d,vd->...v"
    else:
        head, equation = params["lm_head"]["kernel"], "...d,dv->...v"
    logits = jnp.einsum(equation, hidden, head, precision=matmul_precision(hidden))
    return logits.astype(jnp.float32)


def run_layers(
    params: PyTree,
    hidden: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    state: PyTree,
    *,
    model_config: ModelConfig,
    layers: Sequence[tuple[range, Attend]],
) -> tuple[Float[Array, "B T D"], PyTree, list[PyTree]]:
    """Runs the layers, one `jax.lax.scan` over each range of them.

    Args:
     params: The whole parameter tree; layers are indexed inside the loop, never copied out.
     hidden: Input of the first of these layers.
     positions: Position of each token.
     state: Threaded through the layers.
     model_config: The model.
     layers: Ranges of layers in order, each with its attention
      `(query, key, value, layer, state) -> (output, state, aux)`.

    Returns:
     The hidden state, the state, and for each range its `aux`, stacked over its layers.
    """
    eps, found = model_config.rms_norm_eps, []
    cos, sin = rope_cos_sin(positions, rope=model_config.rope, head_dim=model_config.head_dim)

    def layer_step(carry: tuple[Array, PyTree], layer: Int[Array, ""], attend: Attend) -> Any:
        hidden, state = carry
        weights = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), params["layers"]
        )
        with jax.named_scope("attention"):
            x = rms_norm(hidden, weights["attn_norm"]["scale"], eps=eps)
            query = _linear(x, weights["query"], "btd,dnh->btnh")
            key = _linear(x, weights["key"], "btd,dkh->btkh")
            value = _linear(x, weights["value"], "btd,dkh->btkh")
            if model_config.qk_norm:
                query = rms_norm(query, weights["query_norm"]["scale"], eps=eps)
                key = rms_norm(key, weights["key_norm"]["scale"], eps=eps)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            out, state, aux = attend(query, key, value, layer, state)
            hidden = hidden + _linear(out, weights["out"], "btnh,nhd->btd")
        with jax.named_scope("mlp"):
            x = rms_norm(hidden, weights["mlp_norm"]["scale"], eps=eps)
            gate = _linear(x, weights["gate"], "btd,df->btf")
            up = _linear(x, weights["up"], "btd,df->btf")
            hidden = hidden + _linear(jax.nn.silu(gate) * up, weights["down"], "btf,fd->btd")
        return (hidden, state), aux

    for part, attend in layers:
        step = functools.partial(layer_step, attend=attend)
        index = jnp.arange(part.start, part.stop, dtype=jnp.int32)
        (hidden, state), aux = jax.lax.scan(step, (hidden, state), index)
        found.append(aux)
    return hidden, state, found
