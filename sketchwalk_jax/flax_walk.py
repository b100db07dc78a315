"""Modules that carry the walk from one attention layer of a Flax model to the next."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention import dense_attention
from sketchwalk_jax.flax_arguments import SelfAttention, check_config
from sketchwalk_jax.functional import init_walk, sketchwalk_attention
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.walk import WalkState


def _walk_layer(
    call: SelfAttention,
    scores: Float[Array, "B I J"],
    layer: Int[Array, ""],
    *,
    remedy: str,
    config: Policy,
    implementation: str | None,
    kernel_config: KernelConfig | None,
) -> tuple[Float[Array, "*batch T N H"], Float[Array, "B I J"]]:
    """One layer of the model, dense while `layer < config.dense_layers`."""
    batch, num_tokens = call.query.shape[:2]
    num_blocks = -(-num_tokens // config.block_size)
    if scores.shape != (batch, num_blocks, num_blocks):
        raise ValueError(
            f"the walk must be that of {batch} sequences of {num_tokens} tokens, got scores of "
            f"shape {scores.shape}; {remedy}"
        )

    def dense() -> tuple[Array, Array]:
        out = dense_attention(
            *(call.query, call.key, call.value),
            kv_lengths=call.lengths,
            kernel_config=kernel_config,
        )
        return out, scores

    def sparse() -> tuple[Array, Array]:
        out, walk = sketchwalk_attention(
            call.query,
            call.key,
            call.value,
            WalkState(scores, layer - config.dense_layers),
            config=config,
            lengths=call.lengths,
            implementation=implementation,
            kernel_config=kernel_config,
        )
        return out, walk.scores

    if config.dense_layers == 0:
        out, scores = sparse()
    else:
        out, scores = jax.lax.cond(layer < config.dense_layers, dense, sparse)
    return call.finish(out), scores


class Walk(nnx.Variable):
    """`WalkAttention`'s state, a filter for `nnx.split(model, nnx.Param, Walk, ...)`."""


class WalkAttention(nnx.Module, pytree=False):
    """Sketch-and-Walk for the layers of an nnx model, which share this one module.

    Call `reset` at the start of every forward pass, then let each layer call this as its
    `attention_fn`: the first `config.dense_layers` calls are dense, the others walk,
    `R_k = R_{k-1} W_k`.

    Transform the model by `nnx.jit`, or by `nnx.split` and `nnx.merge` around `jax.jit`. A plain
    `jax.jit` over the model raises a TypeError: it would give every layer a walk of its own.

    Attributes:
      config: The `SketchWalkConfig`.
      is_causal: Whether attention is causal even where a layer does not say so.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      scores: Rows of `R_k`, float32 `[B, I, I]`.
      layer: Calls since `reset`, int32 scalar.

    Example:
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.walk = WalkAttention(SketchWalkConfig.paper(block_size=16))
      ...         self.layers = nnx.List(
      ...             nnx.MultiHeadAttention(4, 32, attention_fn=self.walk, decode=False, rngs=rngs)
      ...             for _ in range(4))
      ...     def __call__(self, x):
      ...         self.walk.reset(*x.shape[:2])
      ...         for layer in self.layers:
      ...             x = x + layer(x, is_causal=True)
      ...         return x
      >>> Model(nnx.Rngs(0))(jnp.ones((2, 100, 32))).shape
      (2, 100, 32)
    """

    def __init__(
        self,
        config: Policy,
        *,
        is_causal: bool = False,
        implementation: str | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> None:
        """Holds no walk before the first `reset`; for the arguments see the attributes."""
        check_config(config)
        self.config, self.is_causal = config, is_causal
        self.implementation, self.kernel_config = implementation, kernel_config
        self.scores = Walk(jnp.zeros((0, 0, 0), jnp.float32))
        self.layer = Walk(jnp.zeros((), jnp.int32))

    def reset(self, batch: int, num_tokens: int) -> None:
        """Starts the walk afresh.

        Args:
          batch: Sequences `B`; the product of the batch axes if there are several.
          num_tokens: Tokens `T` of each.
        """
        self.scores.set_value(init_walk(batch, num_tokens, config=self.config).scores)
        self.layer.set_value(jnp.zeros((), jnp.int32))

    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K H"],
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        is_causal: bool = False,
        **options: Any,
    ) -> Float[Array, "*batch T N H"]:
        """Attention of the next layer; the signature of Flax's `attention_fn`."""
        options["is_causal"] = is_causal or self.is_causal
        layer = self.layer.get_value()
        out, scores = _walk_layer(
            SelfAttention.of_call(query, key, value, bias, mask, **options),
            self.scores.get_value(),
            layer,
            remedy="call reset(batch, num_tokens) before the first layer",
            config=self.config,
            implementation=self.implementation,
            kernel_config=self.kernel_config,
        )
        self.scores.set_value(scores)
        self.layer.set_value(layer + 1)
        return out


class LinenWalkAttention(nn.Module):
    """Sketch-and-Walk for the layers of a Linen model, which share this one module.

    Each layer calls it as its `attention_fn`: the first `config.dense_layers` calls are dense, the
    others walk, `R_k = R_{k-1} W_k`. The walk is the collection `"walk"`; `apply` needs
    `mutable=["walk"]`. Every `apply` that is given no such collection starts afresh; one that is
    given it goes on from there. `init` makes none, and computes every layer as the first.

    Attributes:
      config: The `SketchWalkConfig`.
      is_causal: Whether attention is causal even where a layer does not say so; Linen's layers
        have no way to say it but a mask.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.

    Example:
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         walk = LinenWalkAttention(SketchWalkConfig.paper(block_size=16), is_causal=True)
      ...         for _ in range(4):
      ...             x = x + nn.MultiHeadDotProductAttention(4, attention_fn=walk)(x)
      ...         return x
      >>> model, x = Model(), jnp.ones((2, 100, 32))
      >>> variables = model.init(jax.random.key(0), x)
      >>> y, state = model.apply(variables, x, mutable=["walk"])
      >>> y.shape, list(state)
      ((2, 100, 32), ['walk'])
    """

    config: Policy
    is_causal: bool = False
    implementation: str | None = None
    kernel_config: KernelConfig | None = None

    # Linen's layers leave out every keyword that is not named here.
    @nn.compact
    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K H"],
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        dtype: Any = None,
        module: Any = None,
        is_causal: bool = False,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        **other: Any,
    ) -> Float[Array, "*batch T N H"]:
        """Attention of the next layer; the signature of Flax's `attention_fn`."""
        check_config(self.config)
        call = SelfAttention.of_call(
            query,
            key,
            value,
            bias,
            mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            module=module,
            is_causal=is_causal or self.is_causal,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            **other,
        )
        options: dict[str, Any] = {
            "remedy": "leave the collection 'walk' of another batch out of the variables",
            "config": self.config,
            "implementation": self.implementation,
            "kernel_config": self.kernel_config,
        }
        fresh = init_walk(*call.query.shape[:2], config=self.config)
        if self.is_initializing():  # a walk that `init` returned would be taken for this one's
            return _walk_layer(call, fresh.scores, fresh.layers, **options)[0]
        if not self.is_mutable_collection("walk"):
            raise ValueError("apply must be given mutable=['walk']: the layers share that state")
        scores = self.variable("walk", "scores", lambda: fresh.scores)
        layer = self.variable("walk", "layer", lambda: fresh.layers)
        out, scores.value = _walk_layer(call, scores.value, layer.value, **options)
        layer.value = layer.value + 1
        return out
