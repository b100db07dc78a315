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

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.api import dense_attention
from sketchwalk_jax.layer import init_walk, sketchwalk_attention
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.policies.released import ReleasedConfig
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.walk import WalkState

__all__ = ["LinenWalkAttention", "Walk", "WalkAttention", "make_attention_fn"]

# What a layer asks of its `attention_fn`: causal self-attention, or refused.

# Of no effect on block-sparse attention: without dropout its settings mean nothing, float32
# products are exact whatever the precision, and the softmax is always float32.
_HARMLESS = ("broadcast_dropout", "dropout_rng", "precision", "force_fp32_for_softmax")


def _check_config(config: Policy) -> None:
    """Raises for policies other than Sketch-and-Walk."""
    if not isinstance(config, SketchWalkConfig | RecommendedConfig | ReleasedConfig):
        raise NotImplementedError(
            f"config must be a SketchWalkConfig to select blocks in Flax's layers, got {config!r}; "
            f"other policies run in sketchwalk_jax.generate and in CausalLM"
        )


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Raises for options that a layer sets and that nothing here understands."""
    unknown = sorted(name for name, value in options.items() if value is not None)
    if unknown:
        raise NotImplementedError(
            f"attention_fn must be called with the options of flax.nnx and flax.linen's "
            f"dot_product_attention, got {unknown}; apply rotary embedding before attention"
        )


def _refuse_unsupported(
    query: Array,
    key: Array,
    *,
    bias: Array | None,
    mask: Array | None,
    dropout_rate: float,
    deterministic: bool,
    module: Any,
    is_causal: bool,
    qk_attn_weights_einsum: Any,
    attn_weights_value_einsum: Any,
) -> None:
    instead = "make_attention_fn() without a config is dense and takes everything"
    if bias is not None:
        raise NotImplementedError(f"bias must be None for sparse attention; {instead}")
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(
            f"attention dropout must be off (deterministic=True) for sparse attention, got a rate "
            f"of {dropout_rate}; {instead}"
        )
    if module is not None:
        raise NotImplementedError(
            f"sow_weights must be False: sparse attention forms no weights to store; {instead}"
        )
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise NotImplementedError(f"einsums must be None for sparse attention; {instead}")
    if key.shape[-3] != query.shape[-3]:
        raise NotImplementedError(
            f"query and key must come from the same tokens, got {query.shape[-3]} and "
            f"{key.shape[-3]}: cross-attention and decode=True are not sparse here; {instead}, and "
            f"sketchwalk_jax.generate decodes sparsely"
        )
    if mask is None and not is_causal:
        raise NotImplementedError(
            "sparse attention must be causal, got neither a causal mask nor is_causal=True from "
            "the layer (nnx) or the adapter"
        )


def lengths_of_mask(
    mask: Array, *, is_causal: bool, batch_shape: tuple[int, ...], num_tokens: int
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """The lengths of right-padded sequences whose causal mask this is, and whether it is one.

    Sequence `b` has length `n` if query `i < n` sees exactly the keys `j <= i`; what the queries of
    padding see is of no interest.

    Args:
      mask: Non-zero where a query may attend, broadcastable to `[*batch, N, T, T]`.
      is_causal: Whether the causal mask applies on top.
      batch_shape: The batch axes.
      num_tokens: Tokens `T`.

    Returns:
      Lengths, and per sequence whether the mask has that form.
    """
    heads = mask.shape[-3] if mask.ndim > 2 else 1
    mask = jnp.broadcast_to(mask.astype(bool), (*batch_shape, heads, num_tokens, num_tokens))
    mask = mask.reshape(-1, heads, num_tokens, num_tokens)
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    causal = index[None, :] <= index[:, None]
    if is_causal:
        mask = mask & causal[None, None]
    own = jnp.diagonal(mask[:, 0], axis1=-2, axis2=-1)
    lengths = jnp.sum(own, axis=-1, dtype=jnp.int32)
    is_padding = (index[None, :] >= lengths[:, None])[:, None, :, None]
    fits = jnp.all((mask == causal[None, None]) | is_padding, axis=(1, 2, 3))
    return lengths, fits


@dataclasses.dataclass(frozen=True)
class SelfAttention:
    """One call of an `attention_fn` that block-sparse attention can serve.

    Attributes:
      query: Queries `[B, T, N, H]`, batch axes merged.
      key: Keys `[B, T, K, H]`.
      value: Values `[B, T, K, H]`.
      lengths: Tokens of each sequence, int32 `[B]`.
      fits: Whether the mask says no more than causality and these lengths, bool `[B]`; `None`
        without a mask.
      batch_shape: The batch axes of the call.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K H"]
    lengths: Int[Array, "B"]
    fits: Bool[Array, "B"] | None
    batch_shape: tuple[int, ...]

    @classmethod
    def of_call(
        cls,
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
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        **other: Any,
    ) -> "SelfAttention":
        """Understands the arguments that Flax's layers give.

        Raises:
          NotImplementedError: For anything that would have to be ignored.
          ValueError: If the mask's values are known and are not causal with right padding.
        """
        _refuse_unknown({name: x for name, x in other.items() if name not in _HARMLESS})
        _refuse_unsupported(
            query,
            key,
            bias=bias,
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            module=module,
            is_causal=is_causal,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        batch_shape = query.shape[:-3]
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        batch, num_tokens = query.shape[:2]
        lengths, fits = jnp.full((batch,), num_tokens, jnp.int32), None
        if mask is not None:
            lengths, fits = lengths_of_mask(
                mask, is_causal=is_causal, batch_shape=batch_shape, num_tokens=num_tokens
            )
            if not isinstance(fits, jax.core.Tracer) and not bool(jnp.all(fits)):
                raise ValueError(
                    "mask must be causal, with nothing masked but padding on the right, got "
                    "another one: sparse attention cannot honour it; "
                    "make_attention_fn() without a config is dense and can"
                )
        return cls(query, key, value, lengths, fits, batch_shape)

    def finish(self, out: Float[Array, "B T N H"]) -> Float[Array, "*batch T N H"]:
        """Restores the batch axes; NaN where a mask, unknown before the run, did not fit."""
        if self.fits is not None:
            out = jnp.where(self.fits[:, None, None, None], out, jnp.nan)
        return out.reshape(*self.batch_shape, *out.shape[1:])


# One layer, without a state.


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
      config: A preset of `SketchWalkConfig`, or `None` for dense attention.
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
      ...     attention_fn=make_attention_fn(SketchWalkConfig.recommended(block_size=16)))
      >>> layer(jnp.ones((2, 100, 32)), is_causal=True).shape
      (2, 100, 32)
    """
    policy = None if isinstance(config, Dense) else config
    if policy is not None:
        _check_config(policy)
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
        _refuse_unknown(other)
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


# Layers that share a walk.


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
    """One layer of the model, dense where `config.dense_layers` says so."""
    batch, num_tokens = call.query.shape[:2]
    num_blocks = -(-num_tokens // config.block_size)
    if scores.shape != (batch, num_blocks, num_blocks):
        raise ValueError(
            f"the walk must be that of {batch} sequences of {num_tokens} tokens, got scores of "
            f"shape {scores.shape}; {remedy}"
        )

    dense_layers = _dense_layers(config)
    is_dense, walked = _place(layer, dense_layers)

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
            WalkState(scores, walked),
            config=config,
            lengths=call.lengths,
            implementation=implementation,
            kernel_config=kernel_config,
        )
        return out, walk.scores

    if not dense_layers:
        out, scores = sparse()
    else:
        out, scores = jax.lax.cond(is_dense, dense, sparse)
    return call.finish(out), scores


def _dense_layers(config: Policy) -> int | tuple[int, ...]:
    """How many leading layers are dense, or which: some plans say so too."""
    if not isinstance(config, RecommendedConfig) or config.num_layers is None:
        return config.dense_layers
    return tuple(i for i in range(config.num_layers) if config.is_dense(i))


def _place(
    layer: Int[Array, ""], dense_layers: int | tuple[int, ...]
) -> tuple[Bool[Array, ""], Int[Array, ""]]:
    """Whether a layer is dense, and how many sparse ones come before it if it is not."""
    if not isinstance(dense_layers, tuple):
        return layer < dense_layers, layer - dense_layers
    indices = jnp.array(dense_layers, jnp.int32)
    return jnp.any(indices == layer), layer - jnp.sum(indices < layer, dtype=jnp.int32)


class Walk(nnx.Variable):
    """`WalkAttention`'s state, a filter for `nnx.split(model, nnx.Param, Walk, ...)`."""


class WalkAttention(nnx.Module, pytree=False):
    """Sketch-and-Walk for the layers of an nnx model, which share this one module.

    Call `reset` at the start of every forward pass, then let each layer call this as its
    `attention_fn`: the calls of `config.dense_layers` (the first ones, or those of a set) are
    dense, the others walk, `R_k = R_{k-1} W_k`.

    Transform the model by `nnx.jit`, or by `nnx.split` and `nnx.merge` around `jax.jit`. A plain
    `jax.jit` over the model raises a TypeError: it would give every layer a walk of its own.

    Attributes:
      config: A preset of `SketchWalkConfig`; by default the recommended one. With a plan, or with
        `num_layers`, that one tells the layers apart; else all have the same density.
      is_causal: Whether attention is causal even where a layer does not say so.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      scores: Rows of `R_k`, float32 `[B, I, I]`.
      layer: Calls since `reset`, int32 scalar.

    Example:
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.walk = WalkAttention(SketchWalkConfig.recommended(block_size=16))
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
        config: Policy | None = None,
        *,
        is_causal: bool = False,
        implementation: str | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> None:
        """Holds no walk before the first `reset`; for the arguments see the attributes."""
        config = SketchWalkConfig.recommended() if config is None else config
        _check_config(config)
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

    Each layer calls it as its `attention_fn`: the calls of `config.dense_layers` (the first ones,
    or those of a set) are dense, the others walk, `R_k = R_{k-1} W_k`. The walk is the collection
    `"walk"`; `apply` needs `mutable=["walk"]`. Every `apply` that is given no such collection
    starts afresh; one that is given it goes on from there. `init` makes none, and computes every
    layer as the first.

    Attributes:
      config: A preset of `SketchWalkConfig`; by default the recommended one. With a plan, or with
        `num_layers`, that one tells the layers apart; else all have the same density.
      is_causal: Whether attention is causal even where a layer does not say so; Linen's layers
        have no way to say it but a mask.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.

    Example:
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         config = SketchWalkConfig.recommended(block_size=16)
      ...         walk = LinenWalkAttention(config, is_causal=True)
      ...         for _ in range(4):
      ...             x = x + nn.MultiHeadDotProductAttention(4, attention_fn=walk)(x)
      ...         return x
      >>> model, x = Model(), jnp.ones((2, 100, 32))
      >>> variables = model.init(jax.random.key(0), x)
      >>> y, state = model.apply(variables, x, mutable=["walk"])
      >>> y.shape, list(state)
      ((2, 100, 32), ['walk'])
    """

    config: Policy = SketchWalkConfig.recommended()
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
        _check_config(self.config)
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
