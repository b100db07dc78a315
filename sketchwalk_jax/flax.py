"""Attention for Flax's multi-head layers: an `attention_fn`, and modules that carry the walk.

`make_attention_fn` returns a function without state, for nnx and Linen. The walk goes from layer to
layer, so all layers of a model share one `WalkAttention` (nnx) or one `LinenWalkAttention`. To add
it to an existing nnx model, give it to the model's layers:

    walk = WalkAttention(policy)
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.MultiHeadAttention):
            layer.attention_fn = nnx.data(walk)
    model.walk = walk  # and model.walk.reset(batch, num_tokens) before each forward pass

`WalkSelfAttention` and `LinenWalkSelfAttention` are whole layers for your own model. They take the
walk and return it. With a cache, they also decode. If layers share no state, as under
`jax.lax.scan` or `nnx.scan`, carry the walk yourself; it is the same walk:

    def layer_step(carry, weights):
        x, walk = carry
        query, key, value = project(weights, x)
        out, walk = sketchwalk_attention(query, key, value, walk, policy=policy)
        return (x + merge(weights, out), walk), None

    walk = init_walk(batch, num_tokens, policy=policy, like=(x, weights_of_sparse_layers))
    (x, _), _ = jax.lax.scan(layer_step, (x, walk), weights_of_sparse_layers)

An `attention_fn` selects blocks in causal self-attention over whole sequences, which may be padded
on the right. The mask of a layer may express that. Any other mask raises a ValueError, or gives
NaN under `jit`, where the mask's values are unknown. Other options that are not supported (bias,
attention dropout, sown weights, cross-attention, `decode=True`) raise a NotImplementedError. The
outputs of padding are meaningless. Everything is differentiable in reverse mode, with the selected
blocks as constants.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.api import dense_attention
from sketchwalk_jax.attention.xla import vary_alike
from sketchwalk_jax.inference.layer import init_walk, sketchwalk_attention
from sketchwalk_jax.inference.layer_cache import (
    LayerCache,
    init_layer_cache,
    sketchwalk_cached_attention,
)
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.policies.released import ReleasedConfig
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.validation import check_heads, check_integer, check_not_empty, explicit_axes
from sketchwalk_jax.walk import WalkState

__all__ = [
    "LinenWalkAttention",
    "LinenWalkSelfAttention",
    "Walk",
    "WalkAttention",
    "WalkSelfAttention",
    "make_attention_fn",
]


def _check_policy(policy: Policy) -> None:
    """Raises unless the policy is a Sketch-and-Walk policy."""
    if not isinstance(policy, SketchWalkConfig | RecommendedConfig | ReleasedConfig):
        raise NotImplementedError(
            f"policy must be a SketchWalkConfig to select blocks in Flax's layers, got {policy!r}; "
            f"other policies run in sketchwalk_jax.generate and in CausalLM"
        )


@dataclasses.dataclass(frozen=True)
class Asked:
    """A layer's call to its `attention_fn`: the arguments of nnx's and Linen's attention.

    Some settings have no effect on block-sparse attention: the dropout settings while dropout is
    off, `precision` and `force_fp32_for_softmax` (products and softmax are always float32).
    """

    query: Float[Array, "*batch T N H"]
    key: Float[Array, "*batch S K H"]
    value: Float[Array, "*batch S K H"]
    bias: Array | None = None
    mask: Array | None = None
    broadcast_dropout: bool = True
    dropout_rng: Array | None = None
    dropout_rate: float = 0.0
    deterministic: bool = True
    dtype: Any = None
    precision: Any = None
    module: Any = None
    is_causal: bool = False
    force_fp32_for_softmax: bool | None = None
    qk_attn_weights_einsum: Callable[..., Array] | None = None
    attn_weights_value_einsum: Callable[..., Array] | None = None

    @classmethod
    def of(
        cls, *arguments: Any, is_causal: bool = False, is_always_causal: bool, **options: Any
    ) -> "Asked":
        """Reads the arguments of a call. Unknown options must be `None`.

        Raises:
          NotImplementedError: If an unknown option is not `None`.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: x for name, x in options.items() if name in names}
        unknown = sorted(name for name, x in options.items() if name not in names and x is not None)
        if unknown:
            raise NotImplementedError(
                f"attention_fn must be called with the options of flax.nnx and flax.linen's "
                f"dot_product_attention, got {unknown}; apply rotary embedding before attention"
            )
        asked = cls(*arguments, **known)
        # A token after a cache sees all of it; a causal mask from key 0 on would leave one key.
        is_decoded = asked.query.shape[-3] == 1 < asked.key.shape[-3]
        is_causal = is_causal or (is_always_causal and not is_decoded)
        return dataclasses.replace(asked, is_causal=is_causal)

    def dense(self) -> Float[Array, "*batch T N H"]:
        """Runs Flax's own attention. nnx and Linen round differently, so each uses its own."""
        options = dict(vars(self))
        is_causal = options.pop("is_causal")
        einsums = "qk_attn_weights_einsum", "attn_weights_value_einsum"
        of_linen = {name: options.pop(name) for name in ("force_fp32_for_softmax", *einsums)}
        mask = None if self.mask is None else self.mask.astype(bool)
        if self.force_fp32_for_softmax is None:  # only Linen's layers give True or False
            return nnx.dot_product_attention(**options | {"mask": mask}, is_causal=is_causal)
        if is_causal:
            causal = jnp.tril(jnp.ones((self.query.shape[-3], self.key.shape[-3]), bool))
            causal = causal.reshape((1,) * (self.query.ndim - 2) + causal.shape)
            mask = causal if mask is None else mask & causal
        return nn.dot_product_attention(**options | {"mask": mask}, **of_linen)

    def refuse_unsupported(self) -> None:
        """Raises a NotImplementedError for options that block-sparse attention would ignore."""
        instead = "make_attention_fn() without a policy is dense and takes everything"
        if self.bias is not None:
            raise NotImplementedError(f"bias must be None for sparse attention; {instead}")
        if self.dropout_rate > 0.0 and not self.deterministic:
            raise NotImplementedError(
                f"attention dropout must be off (deterministic=True) for sparse attention, got a "
                f"rate of {self.dropout_rate}; {instead}"
            )
        if self.module is not None:
            raise NotImplementedError(
                f"sow_weights must be False: sparse attention forms no weights to store; {instead}"
            )
        if (self.qk_attn_weights_einsum, self.attn_weights_value_einsum) != (None, None):
            raise NotImplementedError(f"einsums must be None for sparse attention; {instead}")
        if self.key.shape[-3] != self.query.shape[-3]:
            raise NotImplementedError(
                f"query and key must come from the same tokens, got {self.query.shape[-3]} and "
                f"{self.key.shape[-3]}: cross-attention and decode=True are not sparse here; "
                f"{instead}, and sketchwalk_jax.generate decodes sparsely"
            )
        if self.mask is None and not self.is_causal:
            raise NotImplementedError(
                "sparse attention must be causal, got neither a causal mask nor is_causal=True "
                "from the layer (nnx) or the adapter"
            )


def _named_as_asked[Function: Callable[..., Any]](function: Function) -> Function:
    """Decorator that names every option in the signature of an `attention_fn` or a module's call.

    Linen's layers silently drop options that the signature does not name.
    """
    own = inspect.signature(function)
    first = [one for one in own.parameters.values() if one.name == "self"]
    named = [*first, *inspect.signature(Asked).parameters.values()]
    function.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def lengths_of_mask(
    mask: Array, *, is_causal: bool, batch_shape: tuple[int, ...], num_tokens: int
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Finds the lengths of a causal mask with right padding, and whether it is such a mask.

    Sequence `b` has length `n` if query `i < n` sees exactly the keys `j <= i`. The mask of padding
    queries is ignored.

    Args:
      mask: Non-zero where a query may attend, broadcastable to `[*batch, N, T, T]`.
      is_causal: Whether the causal mask applies in addition.
      batch_shape: The batch axes.
      num_tokens: Number of tokens `T`.

    Returns:
      The lengths, and for each sequence whether the mask has that form.
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
    """One call of an `attention_fn` that block-sparse attention can compute.

    Attributes:
      query: Queries `[B, T, N, H]`, with merged batch axes.
      key: Keys `[B, T, K, H]`.
      value: Values `[B, T, K, H]`.
      lengths: Number of tokens of each sequence, int32 `[B]`.
      fits: Whether the mask is causal with these lengths, bool `[B]`; `None` without a mask.
      batch_shape: The batch axes of the call.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K H"]
    lengths: Int[Array, "B"]
    fits: Bool[Array, "B"] | None
    batch_shape: tuple[int, ...]

    @classmethod
    def of_call(cls, asked: Asked) -> "SelfAttention":
        """Reads a layer's call.

        Raises:
          NotImplementedError: If an argument would have to be ignored.
          ValueError: If the values of the mask are known and are not causal with right padding.
        """
        asked.refuse_unsupported()
        arrays = promote_dtype((asked.query, asked.key, asked.value), dtype=asked.dtype)
        batch_shape = arrays[0].shape[:-3]
        for name, x in zip(("query", "key", "value"), arrays, strict=True):
            check_not_empty(name, x)
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in arrays)
        batch, num_tokens = query.shape[:2]
        lengths, fits = jnp.full((batch,), num_tokens, jnp.int32), None
        if asked.mask is not None:
            lengths, fits = lengths_of_mask(
                asked.mask,
                is_causal=asked.is_causal,
                batch_shape=batch_shape,
                num_tokens=num_tokens,
            )
            if not isinstance(fits, jax.core.Tracer) and not bool(jnp.all(fits)):
                raise ValueError(
                    "mask must be causal, with nothing masked but padding on the right, got "
                    "another one: sparse attention cannot honour it; "
                    "make_attention_fn() without a policy is dense and can"
                )
        return cls(query, key, value, lengths, fits, batch_shape)

    def finish(self, out: Float[Array, "B T N H"]) -> Float[Array, "*batch T N H"]:
        """Restores the batch axes. Gives NaN if a mask unknown at tracing did not fit."""
        if self.fits is not None:
            out = jnp.where(self.fits[:, None, None, None], out, jnp.nan)
        return out.reshape(*self.batch_shape, *out.shape[1:])


# Attention of one layer, without state.


def make_attention_fn(
    policy: Policy | None = None,
    *,
    is_causal: bool = False,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Callable[..., Array]:
    """Returns the `attention_fn` of one layer, for `nnx.MultiHeadAttention` and for Linen's.

    Without a policy (or with `Dense()`) it is Flax's own attention, bit for bit, with all of its
    options. With a policy, every layer selects by its own block scores, because a function has no
    state: the walk has only one layer (`R_0 = W_0`), and `policy.dense_layers` has no effect. For a
    walk over layers, use `WalkAttention` or `LinenWalkAttention`.

    Args:
      policy: The policy that chooses each query's key blocks: a preset of `SketchWalkConfig`, as
        `SketchWalkConfig.recommended(density=0.2)`, or `None` for dense attention.
      is_causal: Whether attention is causal even if the layer does not request it. Linen's layers
        can request it only by a mask. In a layer's own decode (`decode=True`, dense only), the
        token sees the whole cache, as the layer's mask allows.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.

    Returns:
      A function `(query, key, value, bias=None, mask=None, ...)` of arrays `[*batch, T, N, H]`.

    Raises:
      NotImplementedError: If the policy is not a preset of Sketch-and-Walk.

    Example:
      >>> from sketchwalk_jax import SketchWalkConfig
      >>> layer = nnx.MultiHeadAttention(
      ...     4, 32, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=make_attention_fn(SketchWalkConfig.recommended()))
      >>> layer(jnp.ones((2, 100, 32)), is_causal=True).shape
      (2, 100, 32)
    """
    policy = None if isinstance(policy, Dense) else policy
    if policy is not None:
        _check_policy(policy)

    @_named_as_asked
    def attention_fn(*arguments: Any, **options: Any) -> Float[Array, "*batch T N H"]:
        asked = Asked.of(*arguments, is_always_causal=is_causal, **options)
        if policy is None:
            return asked.dense()
        call = SelfAttention.of_call(asked)
        out, _ = sketchwalk_attention(
            call.query,
            call.key,
            call.value,
            policy=policy,
            lengths=call.lengths,
            implementation=implementation,
            kernel_config=kernel_config,
        )
        return call.finish(out)

    return attention_fn


# Modules whose layers share a walk.


def _walk_layer(
    module: "WalkAttention | LinenWalkAttention",
    call: SelfAttention,
    scores: Float[Array, "B I J"],
    layer: Int[Array, ""],
    *,
    remedy: str,
) -> tuple[Float[Array, "*batch T N H"], Float[Array, "B I J"]]:
    """Runs one layer of the model, dense if `policy.dense_layers` includes it."""
    policy, kernel_config = module.policy, module.kernel_config
    batch, num_tokens = call.query.shape[:2]
    fresh = jax.eval_shape(lambda: init_walk(batch, num_tokens, policy=policy, like=()))
    if scores.shape != fresh.scores.shape:
        raise ValueError(
            f"the walk must be that of {batch} sequences of {num_tokens} tokens, got scores of "
            f"shape {scores.shape}; {remedy}"
        )

    query, key, value, lengths, scores = vary_alike(
        call.query, call.key, call.value, call.lengths, scores
    )
    dense_layers = _dense_layers(policy)
    indices = jnp.array(dense_layers, jnp.int32)
    walked = layer - jnp.sum(indices < layer, dtype=jnp.int32)  # sparse layers before this one

    def dense() -> tuple[Array, Array]:
        out = dense_attention(query, key, value, kv_lengths=lengths, kernel_config=kernel_config)
        return out, scores

    def sparse() -> tuple[Array, Array]:
        out, walk = sketchwalk_attention(
            query,
            key,
            value,
            WalkState(scores, walked),
            policy=policy,
            lengths=lengths,
            implementation=module.implementation,
            kernel_config=kernel_config,
        )
        return out, walk.scores

    if not dense_layers:
        out, scores = sparse()
    else:
        out, scores = jax.lax.cond(jnp.any(indices == layer), dense, sparse)
    return call.finish(out), scores


def _dense_layers(policy: Policy) -> tuple[int, ...]:
    """Indices of the dense layers; a plan may make layers dense too."""
    if isinstance(policy, RecommendedConfig) and policy.num_layers is not None:
        return tuple(i for i in range(policy.num_layers) if policy.is_dense(i))
    dense = policy.dense_layers
    return dense if isinstance(dense, tuple) else tuple(range(dense))


class Walk(nnx.Variable):
    """The state of `WalkAttention`, a filter for `nnx.split(model, nnx.Param, Walk, ...)`."""


class WalkAttention(nnx.Module, pytree=False):
    """Sketch-and-Walk for the layers of an nnx model, which share this module.

    Call `reset` at the start of every forward pass. Then let each layer call this module as its
    `attention_fn`. The calls in `policy.dense_layers` (the first ones, or the given indices) are
    dense. The others walk, `R_k = R_{k-1} W_k`.

    Transform the model with `nnx.jit`, or with `nnx.split` and `nnx.merge` around `jax.jit`. A
    plain `jax.jit` of the model raises a TypeError, because it would give every layer its own walk.

    Attributes:
      policy: The policy that chooses each query's key blocks: a preset of `SketchWalkConfig`, as
        `SketchWalkConfig.recommended(density=0.2)`. Default: `SketchWalkConfig.recommended()`. With
        a plan, or with `num_layers`, the recommended policy treats each layer differently;
        otherwise all layers have the same density.
      is_causal: Whether attention is causal even if a layer does not request it.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.
      scores: Rows of `R_k`, float32 `[B, I, J]`: a score for each block of queries and each block
        or page of keys.
      layer: Number of calls since `reset`, int32 scalar.

    Example:
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.walk = WalkAttention()
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
        policy: Policy | None = None,
        *,
        is_causal: bool = False,
        implementation: str | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> None:
        """Makes a module without a walk; call `reset`. Arguments are described as attributes."""
        policy = SketchWalkConfig.recommended() if policy is None else policy
        _check_policy(policy)
        self.policy, self.is_causal = policy, is_causal
        self.implementation, self.kernel_config = implementation, kernel_config
        self.scores = Walk(jnp.zeros((0, 0, 0), jnp.float32))
        self.layer = Walk(jnp.zeros((), jnp.int32))

    def reset(self, batch: int, num_tokens: int) -> None:
        """Starts a new walk.

        Args:
          batch: Number of sequences `B`; the product of the batch axes if there are several.
          num_tokens: Number of tokens `T` of each sequence.
        """
        self.scores.set_value(init_walk(batch, num_tokens, policy=self.policy, like=()).scores)
        self.layer.set_value(jnp.zeros((), jnp.int32))

    @_named_as_asked
    def __call__(self, *arguments: Any, **options: Any) -> Float[Array, "*batch T N H"]:
        """Runs attention of the next layer, with the signature of Flax's `attention_fn`."""
        asked = Asked.of(*arguments, is_always_causal=self.is_causal, **options)
        layer = self.layer.get_value()
        out, scores = _walk_layer(
            self,
            SelfAttention.of_call(asked),
            self.scores.get_value(),
            layer,
            remedy="call reset(batch, num_tokens) before the first layer",
        )
        self.scores.set_value(scores)
        self.layer.set_value(layer + 1)
        return out


class LinenWalkAttention(nn.Module):
    """Sketch-and-Walk for the layers of a Linen model, which share this module.

    Each layer calls it as its `attention_fn`. The calls in `policy.dense_layers` (the first ones,
    or the given indices) are dense. The others walk, `R_k = R_{k-1} W_k`.

    The walk is the collection `"walk"`, so `apply` needs `mutable=["walk"]`. An `apply` without
    that collection in its variables starts a new walk; with it, the walk continues. `init` returns
    no walk, and computes every layer as if it were the first.

    Attributes:
      policy: The policy, as in `WalkAttention`.
      is_causal: Whether attention is causal even if a layer does not request it. Linen's layers can
        request it only by a mask.
      implementation: Implementation of attention, as in `WalkAttention`.
      kernel_config: Tile sizes of the implementation.

    Example:
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         walk = LinenWalkAttention(is_causal=True)
      ...         for _ in range(4):
      ...             x = x + nn.MultiHeadDotProductAttention(4, attention_fn=walk)(x)
      ...         return x
      >>> model, x = Model(), jnp.ones((2, 100, 32))
      >>> variables = model.init(jax.random.key(0), x)
      >>> y, state = model.apply(variables, x, mutable=["walk"])
      >>> y.shape, list(state)
      ((2, 100, 32), ['walk'])
    """

    policy: Policy = SketchWalkConfig.recommended()
    is_causal: bool = False
    implementation: str | None = None
    kernel_config: KernelConfig | None = None

    @nn.compact
    @_named_as_asked
    def __call__(self, *arguments: Any, **options: Any) -> Float[Array, "*batch T N H"]:
        """Runs attention of the next layer, with the signature of Flax's `attention_fn`."""
        _check_policy(self.policy)
        asked = Asked.of(*arguments, is_always_causal=self.is_causal, **options)
        call = SelfAttention.of_call(asked)
        remedy = "leave the collection 'walk' of another batch out of the variables"
        fresh = init_walk(*call.query.shape[:2], policy=self.policy, like=())
        if self.is_initializing():  # `apply` would continue a walk from `init`
            return _walk_layer(self, call, fresh.scores, fresh.layers, remedy=remedy)[0]
        if not self.is_mutable_collection("walk"):
            raise ValueError("apply must be given mutable=['walk']: the layers share that state")
        scores = self.variable("walk", "scores", lambda: fresh.scores)
        layer = self.variable("walk", "layer", lambda: fresh.layers)
        out, scores.value = _walk_layer(self, call, scores.value, layer.value, remedy=remedy)
        layer.value = layer.value + 1
        return out


# Layers that take and return the walk.

Rotate = Callable[[Float[Array, "B T Heads H"], Int[Array, "B T"]], Float[Array, "B T Heads H"]]


def _attend(
    module: "WalkSelfAttention | LinenWalkSelfAttention",
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    walk: Any,
    cache: LayerCache | None,
    lengths: Int[Array, "B"] | None,
) -> tuple[Array, tuple[Any, ...]]:
    """Returns the output of one layer and its new state: `(walk,)` or `(cache, walk)`."""
    if module.rotate is not None:
        positions = jnp.arange(query.shape[1], dtype=jnp.int32)[None, :]
        first = jnp.zeros((query.shape[0],), jnp.int32) if cache is None else cache.lengths
        query, key = (module.rotate(x, first[:, None] + positions) for x in (query, key))
    options: dict[str, Any] = {
        "policy": module.policy,
        "lengths": lengths,
        "implementation": module.implementation,
        "kernel_config": module.kernel_config,
    }
    if cache is None:
        out, walk = sketchwalk_attention(query, key, value, walk, **options)
        return out, (walk,)
    out, cache, walk = sketchwalk_cached_attention(query, key, value, cache, walk, **options)
    return out, (cache, walk)


class WalkSelfAttention(nnx.Module):
    """Causal self-attention over the blocks that the walk selects, as an nnx layer.

    The layer takes and returns the walk, so layers can be scanned. It takes and returns a cache as
    well, if you pass one. Every such layer is sparse; for a dense layer use
    `nnx.MultiHeadAttention`.

    Attributes:
      query: Projection to `[N, H]`; `key` and `value` are projections to `[K, H]`.
      out: Projection from the heads back to the features.

    Example:
      >>> layer = WalkSelfAttention(4, 32, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 100, 32))
      >>> y, walk = layer(x)  # training: a walk starts here, the next layer takes it
      >>> y, cache, walk = layer(x, cache=layer.init_cache(2, 128))  # a prompt, then tokens
      >>> y, cache, walk = layer(x[:, :1], cache=cache)
      >>> y.shape, cache.lengths.tolist()
      ((2, 1, 32), [101, 101])
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        policy: Policy | None = None,
        rotate: Rotate | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: str | None = None,
        kernel_config: KernelConfig | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialises the projections.

        Args:
          num_heads: Number of query heads `N`.
          in_features: Number of features of the input and of the output.
          num_kv_heads: Number of key/value heads `K`. Default: as many as query heads.
          head_dim: Size of a head. Default: `in_features / num_heads`.
          policy: The policy that chooses the key blocks of each query, such as
            `SketchWalkConfig.recommended(density=0.2)`. Default: `SketchWalkConfig.recommended()`.
          rotate: A function `(x, positions) -> x` that is applied to queries and keys, such as
            rotary embedding.
          use_bias: Whether projections have a bias.
          dtype: Type of the computation. Default: promoted from input and parameters.
          param_dtype: Type of the parameters.
          implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for
            NVIDIA GPUs), or `None` to choose by device and shape.
          kernel_config: Tile sizes of the implementation.
          rngs: Random streams.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(num_heads, num_kv_heads)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = in_features // num_heads if head_dim is None else head_dim
        check_integer("head_dim", self.head_dim)
        self.policy = SketchWalkConfig.recommended() if policy is None else policy
        self.rotate, self.dtype, self.param_dtype = rotate, dtype, param_dtype
        self.implementation, self.kernel_config = implementation, kernel_config
        options: dict[str, Any] = {"use_bias": use_bias, "dtype": dtype, "rngs": rngs}
        options["param_dtype"] = param_dtype
        queries, keys = (num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = nnx.LinearGeneral(in_features, queries, **options)
        self.key = nnx.LinearGeneral(in_features, keys, **options)
        self.value = nnx.LinearGeneral(in_features, keys, **options)
        self.out = nnx.LinearGeneral(queries, in_features, axis=(-2, -1), **options)

    def init_cache(self, batch: int, max_tokens: int) -> LayerCache:
        """Makes an empty cache for this layer.

        Args:
          batch: Number of sequences.
          max_tokens: Number of tokens that the cache must hold for each sequence.
        """
        return init_layer_cache(
            batch,
            max_tokens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            policy=self.policy,
            dtype=self.dtype or self.param_dtype,
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        walk: Any = None,
        *,
        cache: LayerCache | None = None,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Any, ...]:
        """Applies the layer. With a cache, `x` has the tokens after those in the cache.

        Args:
          x: The input.
          walk: Walk that the previous layer returned. `None` starts a walk.
          cache: Cache from `init_cache` or from the last call, for decoding.
          lengths: Number of tokens of each right-padded sequence. Default: all `T`.

        Returns:
          The output and the walk; with a cache, the output, the cache and the walk.
        """
        projected = self.query(x), self.key(x), self.value(x)
        out, rest = _attend(self, *projected, walk, cache, lengths)
        options: dict[str, Any] = {}
        if explicit_axes(out):  # a sum over spread heads needs a sharding
            mesh, spec = jax.typeof(out).sharding.mesh, jax.typeof(out).sharding.spec
            options["out_sharding"] = NamedSharding(mesh, PartitionSpec(*tuple(spec)[:2]))
        return self.out(out, **options), *rest


class LinenWalkSelfAttention(nn.Module):
    """`WalkSelfAttention` as a Linen layer, with the parameters `query`, `key`, `value` and `out`.

    Its attributes are the arguments of `WalkSelfAttention`, except `in_features`, which is that of
    the input, and `rngs`.

    Example:
      >>> layer = LinenWalkSelfAttention(4)
      >>> x = jnp.ones((2, 100, 32))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y, walk = layer.apply(variables, x)
      >>> y.shape
      (2, 100, 32)
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    policy: Policy = SketchWalkConfig.recommended()
    rotate: Rotate | None = None
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: str | None = None
    kernel_config: KernelConfig | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        walk: Any = None,
        *,
        cache: LayerCache | None = None,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Any, ...]:
        """Applies the layer, like `WalkSelfAttention`. `init_layer_cache` makes its cache."""
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        check_heads(self.num_heads, num_kv_heads)
        head_dim = x.shape[-1] // self.num_heads if self.head_dim is None else self.head_dim
        check_integer("head_dim", head_dim)
        sizes = {"query": self.num_heads, "key": num_kv_heads, "value": num_kv_heads}
        options: dict[str, Any] = {"use_bias": self.use_bias, "dtype": self.dtype}
        options["param_dtype"] = self.param_dtype
        query, key, value = (
            nn.DenseGeneral((heads, head_dim), name=name, **options)(x)
            for name, heads in sizes.items()
        )
        out, rest = _attend(self, query, key, value, walk, cache, lengths)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out", **options)(out), *rest
