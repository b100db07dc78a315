"""The decoder-only transformer that all families share, as pure functions.

Layers are stacked on a leading axis and visited by `jax.lax.scan`; the state of attention (cache,
walk) is threaded through the carry, opaque to this file.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.experts import mixture, num_parts
from sketchwalk_jax.models.norm import rms_norm
from sketchwalk_jax.models.params import EXPERTS, MLP
from sketchwalk_jax.models.quantized import SwigluQuantize, multiply_gated, multiply_quantized
from sketchwalk_jax.models.rope import rope_cos_sin, rotate
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.decode_matmul.api import choose_decode_matmul
from sketchwalk_jax.precision import matmul_precision

PyTree = Any
# (query [B T N H], key [B T K H], value, layer, state) -> (output [B T N H], state, per-layer aux)
Attend = Callable[[Array, Array, Array, Array, PyTree], tuple[Array, PyTree, PyTree]]
# `linear_of_rows` with the kernel's configuration bound.
Multiply = Callable[..., list[Array] | None]
# `mixture` with options bound.
Mix = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The parameters of one layer inside the stacks of all layers.

    Attributes:
      stacks: Stacked parameters of all layers.
      layer: The layer, or `None` if the parameters are of one layer only.
      eps: Epsilon of the norms.
      multiply: The decode matmul kernel for few rows (`linear_of_rows`), or `None` for XLA. XLA
        first copies the layer's weights out of their stack, one read and one write, cheap compared
        to the products of many rows. `xla_gpu_enable_dynamic_slice_fusion` should avoid such
        copies, but does not before float8 products of cuBLAS.
      swiglu_quantize: A kernel for the SwiGLU between the mlp's float8 products, or `None` for
        XLA.
      mix: The layer's mixture of experts, `(x, is_token, scale=...) -> y`; `None` in a model
        without.
      dense: In a model that has both, the layer's ordinary mlp, and whether the layer has it.
    """

    stacks: PyTree
    layer: Int[Array, ""] | None
    eps: float
    multiply: Multiply | None
    swiglu_quantize: SwigluQuantize | None = None
    mix: Mix | None = None
    dense: "tuple[LayerWeights, Bool[Array, '']] | None" = None

    def norm(self, x: Array, name: str) -> Array:
        """Applies a norm of the layer to the input."""
        return rms_norm(x, self._own(self.stacks[name]["scale"]), eps=self.eps)

    def linear(
        self, x: Array, names: Sequence[str], equation: str, *, norm: str | None = None
    ) -> list[Array]:
        """Multiplies one input by several arrays of weights, and adds their biases, if any.

        Args:
          x: The input.
          names: Names of the weights.
          equation: `einsum` equation of one product.
          norm: Name of the norm to apply to the input first.
        """
        stacks = [self.stacks[name] for name in names]
        inputs = len(equation.split(",")[0]) - 2  # contracted axes of the input
        is_quantized, is_stacked = "quantized" in stacks[0], int(self.layer is not None)
        if is_quantized:
            weights = [one["quantized"] for one in stacks]
            outputs = [one["scales"].shape[is_stacked:] for one in stacks]
        else:
            weights = [one["kernel"] for one in stacks]
            outputs = [one.shape[is_stacked + inputs :] for one in weights]
        found = None
        if self.multiply is not None:
            matrices: dict[str, Array] = {}
            options: dict[str, Any] = {}
            if is_quantized:
                scales = [one["scales"].reshape(len(one["scales"]), -1) for one in stacks]
                options = {"is_transposed": True, "weight_scales": scales}
            for name, one, out in zip(names, weights, outputs, strict=True):
                sizes = (math.prod(out), -1) if is_quantized else (-1, math.prod(out))
                matrices[name] = one.reshape(len(one), *sizes)
            found = self.multiply(
                x.reshape(*x.shape[:2], -1),
                matrices,
                self.layer,
                scale=None if norm is None else self.stacks[norm]["scale"],
                eps=self.eps,
                **options,
            )
        if found is None:
            x = x if norm is None else self.norm(x, norm)
            if is_quantized:
                rows = x.reshape(*x.shape[:2], -1)
                found = []
                for name, one, out in zip(names, stacks, outputs, strict=True):
                    quantized = self._own(one["quantized"]).reshape(math.prod(out), -1)
                    own_scales = self._own(one["scales"]).reshape(-1)
                    # A compiled program says by this name which product has which types.
                    with jax.named_scope(name):
                        found.append(multiply_quantized(rows, quantized, own_scales))
            else:
                kernels, precision = [*map(self._own, weights)], matmul_precision(x)
                found = [jnp.einsum(equation, x, one, precision=precision) for one in kernels]
        found = [one.reshape(*x.shape[:2], *out) for one, out in zip(found, outputs, strict=True)]
        biases = [self._own(one["bias"]) if "bias" in one else None for one in stacks]
        return [
            one if bias is None else one + bias.reshape((1,) * (one.ndim - bias.ndim) + bias.shape)
            for one, bias in zip(found, biases, strict=True)
        ]

    def mlp(
        self, x: Float[Array, "B T D"], is_token: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Computes `down(silu(gate(x)) · up(x))` of the normalised input, or the layer's mixture.

        Args:
          x: The input.
          is_token: Whether a row is a token, or `None` for all. Only tokens choose experts.
        """
        if (mix := self.mix) is not None:

            def run_experts(x: Array) -> Array:
                return mix(x, is_token, scale=self._own(self.stacks["mlp_norm"]["scale"]))

            if self.dense is None:
                return run_experts(x)
            dense, is_dense = self.dense
            return jax.lax.cond(is_dense, dense.mlp, run_experts, x)
        names = ("gate", "up", "down")
        stacks = [self.stacks[name] for name in names]
        is_float8 = all(
            "bias" not in one and "quantized" in one and one["quantized"].dtype == jnp.float8_e4m3fn
            for one in stacks
        )
        if (
            self.swiglu_quantize is None
            or not is_float8
            or x.dtype != jnp.bfloat16
            or x.shape[1] == 1
        ):
            gate, up = self.linear(x, names[:2], "btd,df->btf", norm="mlp_norm")
            (out,) = self.linear(jax.nn.silu(gate) * up, names[2:], "btf,fd->btd")
            return out
        weights = {
            name: (self._own(one["quantized"]), self._own(one["scales"]))
            for name, one in zip(names, stacks, strict=True)
        }
        return multiply_gated(self.swiglu_quantize, self.norm(x, "mlp_norm"), weights)

    def _own(self, x: Array) -> Array:
        if self.layer is None:
            return x
        return jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)


MOST_SUMMED_ROWS = 4
"""Most rows of `sums_of_rows`: with more, sums would read the weights as often as XLA's matmul."""


def linear_of_rows(
    x: Float[Array, "B T D"],
    weights: dict[str, Num[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    scale: Float[Array, "L D"] | None,
    eps: float,
    kernel_config: KernelConfig,
    is_transposed: bool = False,
    weight_scales: list[Float[Array, "L _"]] | None = None,
) -> list[Float[Array, "B T _"]] | None:
    """Runs the device's decode matmul kernel, or returns `None` if it does not support the input.

    Args:
      x: The input.
      weights: Stacked weights of all layers, by name.
      layer: The layer.
      scale: Scales of the norm to apply to the input first, of all layers, if there is one.
      eps: Epsilon of the norm.
      kernel_config: Settings of the kernel.
      is_transposed: Whether weights are `[L, F, D]`.
      weight_scales: Scales of the output channels if weights are quantised.
    """
    rows, stacks = x.reshape(-1, x.shape[-1]), list(weights.values())
    kernel = choose_decode_matmul(are_quantized=weight_scales is not None)
    options: dict[str, Any] = {"is_transposed": is_transposed, "weight_scales": weight_scales}
    if kernel.why_not(rows, stacks, scale, **options):
        if not kernel.else_sums:
            return None
        return sums_of_rows(x, weights, layer, scale=scale, eps=eps, **options)
    options |= {"scale": scale, "eps": eps, "interpret": kernel_config.interpret}
    found = kernel.multiply(rows, stacks, layer, **options)
    return [one.reshape(*x.shape[:2], -1).astype(x.dtype) for one in found]


def sums_of_rows(
    x: Float[Array, "B T D"],
    weights: dict[str, Num[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    scale: Float[Array, "L D"] | None,
    eps: float,
    is_transposed: bool = False,
    weight_scales: list[Float[Array, "L _"]] | None = None,
) -> list[Float[Array, "B T _"]] | None:
    """Computes products of very few rows as sums, or returns `None` if XLA's matmul is better.

    On a GPU, XLA copies a layer out of its stack before a matmul: three passes over the weights. A
    sum of products is fused with reading the weights in place: one pass for two rows. Arguments as
    in `linear_of_rows`.
    """
    stacks = list(weights.values())
    if x.shape[0] * x.shape[1] > MOST_SUMMED_ROWS or len(stacks[0]) == 1:
        return None
    if scale is not None:
        x = rms_norm(x, scale[layer], eps=eps)
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    rows = rows[:, None] if is_transposed else rows[..., None]  # add the axis of outputs
    found = []
    for index, stack in enumerate(stacks):
        own = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
        wide = own.astype(jnp.float32)
        axis = 1 if is_transposed else 0
        total = jnp.stack([jnp.sum(row * wide, axis=axis) for row in rows])
        if weight_scales is not None:
            total = total * weight_scales[index][layer][None]
        found.append(total.reshape(*x.shape[:2], -1).astype(x.dtype))
    return found


def embed(params: PyTree, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Looks up token embeddings. Ids outside the vocabulary are clamped."""
    return params["embed"]["embedding"].at[tokens].get(mode="clip")


def unembed(
    params: PyTree,
    hidden: Float[Array, "*lead D"],
    *,
    model_config: ModelConfig,
    multiply: Multiply | None = None,
) -> Float[Array, "*lead V"]:
    """Applies final norm and output head; returns logits in float32.

    Args:
      params: The whole parameter tree.
      hidden: Output of the last layer.
      model_config: The model.
      multiply: The decode matmul kernel for few rows, or `None` for XLA.
    """
    scale, eps = params["final_norm"]["scale"], model_config.rms_norm_eps
    is_tied = model_config.tie_word_embeddings
    if is_tied:
        name, head, equation = "embed", params["embed"]["embedding"], "...d,vd->...v"
    else:
        name, head, equation = "lm_head", params["lm_head"]["kernel"], "...d,dv->...v"
    if multiply is not None:
        found = multiply(
            hidden.reshape(-1, 1, hidden.shape[-1]),
            {name: head[None]},
            jnp.zeros((), jnp.int32),
            scale=scale[None],
            eps=eps,
            is_transposed=is_tied,
        )
        if found is not None:
            return found[0].reshape(*hidden.shape[:-1], -1).astype(jnp.float32)
    hidden = rms_norm(hidden, scale, eps=eps)
    logits = jnp.einsum(equation, hidden, head, precision=matmul_precision(hidden))
    return logits.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Widths:
    """Numbers of columns of which layers compute the least that holds all tokens.

    A program for prompts up to some length then computes little more than shorter ones need. The
    choice is a `switch`, and not a loop over tiles: on a GPU, each step of a loop whose length is
    unknown waits for the host, which took 6 ms of 116 in a prompt of 4,096 tokens on an H100.

    Attributes:
      columns: The numbers of columns, ascending.
      index: The one to compute.
      most: Most columns to compute at a time, which bounds the memory.
    """

    columns: tuple[int, ...]
    index: Int[Array, ""]
    most: int


def first_columns(
    function: Callable[..., tuple[Array, ...]],
    *arrays: Shaped[Array, "B T ..."],
    widths: Widths,
) -> tuple[Float[Array, "B T ..."], ...]:
    """Applies a function of each token to the first columns; later columns of its results are 0.

    Every branch makes new arrays. If it updated arrays that it is given instead, XLA would copy
    them before each branch and after it.
    """
    num_columns = arrays[0].shape[1]

    def compute(number: int, *given: Array) -> tuple[Array, ...]:
        parts = num_parts(number, widths.most)
        size = number // parts

        def one(start: Any) -> tuple[Array, ...]:
            return function(*(jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in given))

        if parts == 1:
            ahead, after = (0, 0), (0, num_columns - number)
            return tuple(jnp.pad(x, (ahead, after, *[ahead] * (x.ndim - 2))) for x in one(0))

        def write(index: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
            start = index * size
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)
                for x, part in zip(found, one(start), strict=True)
            )

        like = jax.eval_shape(one, jnp.int32(0))
        empty = (jnp.zeros((x.shape[0], num_columns, *x.shape[2:]), x.dtype) for x in like)
        return jax.lax.fori_loop(0, parts, write, tuple(empty))

    ways = [functools.partial(compute, number) for number in widths.columns]
    return jax.lax.switch(widths.index, ways, *arrays)


def _split(
    stacks: PyTree, model_config: ModelConfig
) -> tuple[PyTree, PyTree | None, PyTree | None]:
    """Splits the stacks of a model with experts: all layers', the ordinary mlps', the experts'."""
    if not model_config.expert_layers:
        return stacks, None, None
    mlps = {name: stacks[name] for name in MLP if name in stacks}
    experts = {name: stacks[name] for name in EXPERTS}
    others = {name: x for name, x in stacks.items() if name not in mlps | experts}
    if mlps:
        scale = stacks["mlp_norm"]["scale"][np.array(model_config.mlp_layers)]
        mlps["mlp_norm"] = {"scale": scale}
    return others, mlps or None, experts


def run_layers(
    params: PyTree,
    hidden: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    state: PyTree,
    *,
    model_config: ModelConfig,
    layers: Sequence[tuple[range, Attend]],
    multiply: Multiply | None = None,
    swiglu_quantize: SwigluQuantize | None = None,
    widths: Widths | None = None,
    is_token: Bool[Array, "B T"] | None = None,
    mix: Mix = mixture,
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
     multiply: The decode matmul kernel for few rows, or `None` for XLA.
     swiglu_quantize: A kernel for the SwiGLU between the mlp's float8 products, or `None` for XLA.
     widths: Columns to compute, or `None` for all at once.
     is_token: Whether a column is a token, or `None` for all. Only tokens choose experts.
     mix: `mixture`, with options bound.

    Returns:
     The hidden state, the state, and for each range its `aux`, stacked over its layers.
    """
    found = []
    cos, sin = rope_cos_sin(positions, rope=model_config.rope, head_dim=model_config.head_dim)
    last = model_config.num_layers - 1
    stacks, of_mlp, of_experts = _split(params["layers"], model_config)
    masks = () if is_token is None or of_experts is None else (is_token,)

    def weights_of(layer: Int[Array, ""]) -> LayerWeights:
        def take(stacks: PyTree, index: Int[Array, ""]) -> LayerWeights:
            own: tuple[PyTree, Int[Array, ""] | None] = stacks, index
            if widths is not None:  # take a layer's weights out once, not for every part
                get = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
                own = jax.tree.map(get, stacks), None
            return LayerWeights(*own, model_config.rms_norm_eps, multiply, swiglu_quantize)

        weights = take(stacks, layer)
        if of_experts is None:
            return weights
        index, dense = layer, None
        if of_mlp is not None:
            is_dense = [x in model_config.mlp_layers for x in range(last + 1)]
            before = np.cumsum(is_dense) - is_dense  # layers with an ordinary mlp before each layer
            at = jnp.asarray(np.stack([before, np.arange(last + 1) - before, is_dense]), jnp.int32)
            slot, index, has_mlp = at[:, layer]
            slot = jnp.minimum(slot, len(model_config.mlp_layers) - 1)
            dense = take(of_mlp, slot), has_mlp == 1
            index = jnp.minimum(index, len(model_config.expert_layers) - 1)
        own = {"stacks": of_experts, "layer": index, "model_config": model_config}
        return dataclasses.replace(weights, mix=functools.partial(mix, **own), dense=dense)

    def before(weights: LayerWeights, hidden: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
        """Queries, keys and values of tokens."""
        with jax.named_scope("attention"):
            names = "query", "key", "value"
            query, key, value = weights.linear(hidden, names, "btd,dnh->btnh", norm="attn_norm")
            if model_config.qk_norm:
                query, key = weights.norm(query, "query_norm"), weights.norm(key, "key_norm")
            return rotate(query, cos, sin), rotate(key, cos, sin), value

    def after(weights: LayerWeights, hidden: Array, out: Array, *masks: Array) -> Array:
        """Output of a layer for tokens, from their attention."""
        with jax.named_scope("attention"):
            (out,) = weights.linear(out, ("out",), "btnh,nhd->btd")
            hidden = hidden + out
        with jax.named_scope("mlp"):
            return hidden + weights.mlp(hidden, *masks)

    def layer_step(
        carry: tuple[Array, PyTree, Array, Any], layer: Int[Array, ""] | None, attend: Attend
    ) -> Any:
        hidden, state, count, qkv = carry
        layer = count if layer is None else layer
        weights = weights_of(layer)
        if widths is None:
            qkv = before(weights, hidden, cos, sin)
        with jax.named_scope("attention"):
            query, key, value = qkv
            out, state, aux = attend(query, key, value, layer, state)
        if widths is None:
            return (after(weights, hidden, out, *masks), state, count + 1, None), aux
        # One switch ends this layer and begins the next, since each waits for the host on a GPU.
        # The last layer begins itself once more, for nothing.
        following = weights_of(jnp.minimum(layer + 1, last))

        def between(
            hidden: Array, out: Array, cos: Array, sin: Array, *masks: Array
        ) -> tuple[Array, ...]:
            hidden = after(weights, hidden, out, *masks)
            return hidden, *before(following, hidden, cos, sin)

        hidden, *qkv = first_columns(between, hidden, out, cos, sin, *masks, widths=widths)
        return (hidden, state, count + 1, tuple(qkv)), aux

    qkv = None
    if widths is not None:
        begin = functools.partial(before, weights_of(jnp.zeros((), jnp.int32)))
        qkv = first_columns(begin, hidden, cos, sin, widths=widths)
    for part, attend in layers:
        step = functools.partial(layer_step, attend=attend)
        # Reading the layer index from an array costs a launch; a counter costs none. But if XLA can
        # foresee the index and copies weights, it does not copy them by kernels.
        numbers = None if multiply else jnp.arange(part.start, part.stop, dtype=jnp.int32)
        carry = hidden, state, jnp.asarray(part.start, jnp.int32), qkv
        (hidden, state, _, qkv), aux = jax.lax.scan(step, carry, numbers, length=len(part))
        found.append(aux)
    return hidden, state, found
