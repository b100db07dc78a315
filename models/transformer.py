"""The decoder-only transformer that Llama, Qwen2 and Qwen3 share, as pure functions.

Layers are stacked on a leading axis and visited by `jax.lax.scan`; whatever attention needs (cache,
walk state) is threaded through the carry, opaque to this file.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.rope import rope_cos_sin, rotate
from sketchwalk_jax.pallas_kernels.config import KernelConfig
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


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The parameters of one layer, where they lie in the stacks of all.

    Attributes:
      stacks: Parameters of all layers.
      layer: The layer.
      kernels: What Hopper's kernel for few rows may run with, or `None` for XLA, which copies the
        layer's weights out of their stack first: little beside the products of many rows.
    """

    stacks: PyTree
    layer: Int[Array, ""]
    kernels: KernelConfig | None

    def scale(self, name: str) -> Float[Array, "D"]:
        """The scale of a norm."""
        return self._own(self.stacks[name]["scale"])

    def linear(self, x: Array, names: Sequence[str], equation: str) -> list[Array]:
        """Products of one input with several arrays of weights, and their biases if there are any.

        Args:
          x: The input.
          names: Of the weights.
          equation: Of one product, as for `einsum`.
        """
        stacks = [self.stacks[name] for name in names]
        inputs = len(equation.split(",")[0]) - 2  # axes of the input that are summed over
        outputs = [one["kernel"].shape[1 + inputs :] for one in stacks]
        found = linear_of_rows(
            x.reshape(*x.shape[:2], -1),
            [
                one["kernel"].reshape(one["kernel"].shape[0], -1, math.prod(out))
                for one, out in zip(stacks, outputs, strict=True)
            ],
            self.layer,
            kernels=self.kernels,
        )
        if found is None:
            kernels = [self._own(one["kernel"]) for one in stacks]
            precision = matmul_precision(x)
            found = [jnp.einsum(equation, x, one, precision=precision) for one in kernels]
        found = [one.reshape(*x.shape[:2], *out) for one, out in zip(found, outputs, strict=True)]
        biases = [self._own(one["bias"]) if "bias" in one else None for one in stacks]
        return [
            one if bias is None else one + bias.reshape((1,) * (one.ndim - bias.ndim) + bias.shape)
            for one, bias in zip(found, biases, strict=True)
        ]

    def _own(self, x: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)


def linear_of_rows(
    x: Float[Array, "B T D"],
    kernels_of_layers: Sequence[Float[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    kernels: KernelConfig | None,
    is_transposed: bool = False,
) -> list[Float[Array, "B T _"]] | None:
    """The products by Hopper's kernel for few rows, or `None` where it cannot make them."""
    if kernels is None:
        return None
    # Pallas takes long to import, and few callers need it.
    from sketchwalk_jax.pallas_kernels.linear import linear_kernel, why_not_linear

    rows = x.reshape(-1, x.shape[-1])
    if why_not_linear(rows, kernels_of_layers, is_transposed=is_transposed):
        return None
    found = linear_kernel(
        rows,
        kernels_of_layers,
        layer,
        is_transposed=is_transposed,
        interpret=kernels.interpret,
    )
    return [one.reshape(*x.shape[:2], -1).astype(x.dtype) for one in found]


def embed(params: PyTree, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Token embeddings. Ids outside the vocabulary are clamped."""
    return params["embed"]["embedding"].at[tokens].get(mode="clip")


def unembed(
    params: PyTree,
    hidden: Float[Array, "*lead D"],
    *,
    model_config: ModelConfig,
    kernels: KernelConfig | None = None,
) -> Float[Array, "*lead V"]:
    """Final norm and output head; logits in float32.

    Args:
      params: The whole parameter tree.
      hidden: Output of the last layer.
      model_config: The model.
      kernels: What Hopper's kernel for few rows may run with.
    """
    hidden = rms_norm(hidden, params["final_norm"]["scale"], eps=model_config.rms_norm_eps)
    is_tied = model_config.tie_word_embeddings
    if is_tied:
        head, equation = params["embed"]["embedding"], "...d,vd->...v"
    else:
        head, equation = params["lm_head"]["kernel"], "...d,dv->...v"
    found = linear_of_rows(
        hidden.reshape(1, -1, hidden.shape[-1]),
        [head[None]],
        jnp.zeros((), jnp.int32),
        kernels=kernels,
        is_transposed=is_tied,
    )
    if found is not None:
        return found[0].reshape(*hidden.shape[:-1], -1).astype(jnp.float32)
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
    kernels: KernelConfig | None = None,
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
     kernels: What Hopper's kernel for few rows may run with.

    Returns:
     The hidden state, the state, and for each range its `aux`, stacked over its layers.
    """
    eps, found = model_config.rms_norm_eps, []
    cos, sin = rope_cos_sin(positions, rope=model_config.rope, head_dim=model_config.head_dim)

    def layer_step(carry: tuple[Array, PyTree], layer: Int[Array, ""], attend: Attend) -> Any:
        hidden, state = carry
        weights = LayerWeights(params["layers"], layer, kernels)
        with jax.named_scope("attention"):
            x = rms_norm(hidden, weights.scale("attn_norm"), eps=eps)
            query, key, value = weights.linear(x, ("query", "key", "value"), "btd,dnh->btnh")
            if model_config.qk_norm:
                query = rms_norm(query, weights.scale("query_norm"), eps=eps)
                key = rms_norm(key, weights.scale("key_norm"), eps=eps)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            out, state, aux = attend(query, key, value, layer, state)
            (out,) = weights.linear(out, ("out",), "btnh,nhd->btd")
            hidden = hidden + out
        with jax.named_scope("mlp"):
            x = rms_norm(hidden, weights.scale("mlp_norm"), eps=eps)
            gate, up = weights.linear(x, ("gate", "up"), "btd,df->btf")
            (out,) = weights.linear(jax.nn.silu(gate) * up, ("down",), "btf,fd->btd")
            hidden = hidden + out
        return (hidden, state), aux

    for part, attend in layers:
        step = functools.partial(layer_step, attend=attend)
        index = jnp.arange(part.start, part.stop, dtype=jnp.int32)
        (hidden, state), aux = jax.lax.scan(step, (hidden, state), index)
        found.append(aux)
    return hidden, state, found
