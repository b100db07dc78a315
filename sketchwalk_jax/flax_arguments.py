"""What a Flax layer asks of its `attention_fn`: understood as causal self-attention, or refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.config import SketchWalkConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.policies.released import ReleasedConfig

# Of no effect on block-sparse attention: without dropout its settings mean nothing, float32
# products are exact whatever the precision, and the softmax is always float32.
_HARMLESS = ("broadcast_dropout", "dropout_rng", "precision", "force_fp32_for_softmax")


def check_config(config: Policy) -> None:
    """Raises for policies other than Sketch-and-Walk."""
    if not isinstance(config, SketchWalkConfig | ReleasedConfig):
        raise NotImplementedError(
            f"config must be a SketchWalkConfig to select blocks in Flax's layers, got {config!r}; "
            f"other policies run in sketchwalk_jax.generate and in CausalLM"
        )


def refuse_unknown(options: dict[str, Any]) -> None:
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
        refuse_unknown({name: x for name, x in other.items() if name not in _HARMLESS})
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
