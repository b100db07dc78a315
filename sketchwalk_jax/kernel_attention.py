"""Attention over block lists through the Hopper kernels, and why they have no derivative.

`pallas_kernels.dispatch.why_not_mosaic_gpu` says which calls they take.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.selection import BlockSelection

_NO_DERIVATIVE = (
    "the Mosaic GPU kernels have no derivative; differentiate through "
    "sketchwalk_jax.reference.masked_attention, or through jax.nn.dot_product_attention with the "
    "lists as a mask"
)


def _without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays; taking its derivative raises an error that says what to do."""
    wrapped = jax.custom_vjp(function)

    def refuse(*arguments: Any) -> NoReturn:
        raise NotImplementedError(_NO_DERIVATIVE)

    wrapped.defvjp(refuse, refuse)
    return wrapped


def attend_rows(
    query: Float[Array, "B T N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    selection: BlockSelection,
    *,
    layer: Int[Array, ""],
    first_block: Int[Array, "B"],
    kv_lengths: Int[Array, "B"],
    scale: float,
    return_lse: bool,
    config: KernelConfig,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Queries on block boundaries over their lists; the output and, if wanted, log-sum-exp."""
    # Pallas takes long to import, and few callers need it.
    from sketchwalk_jax.pallas_kernels.block_sparse_prefill import block_sparse_prefill

    def attend(*arrays: Array) -> Any:
        *lists, layer, first_block, kv_lengths = arrays
        return block_sparse_prefill(
            *lists,
            layer=layer,
            first_block=first_block,
            kv_lengths=kv_lengths,
            scale=scale,
            block_size=selection.block_size,
            return_lse=return_lse,
            config=config,
        )

    out = _without_derivative(attend)(
        query, key, value, selection.ids, selection.counts, layer, first_block, kv_lengths
    )
    return out if return_lse else (out, None)


def attend_token(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    selection: BlockSelection,
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    return_lse: bool,
    config: KernelConfig,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"] | None]:
    """One query per sequence over its list; the output and, if wanted, its log-sum-exp."""
    from sketchwalk_jax.pallas_kernels.block_sparse_decode import block_sparse_decode_kernel

    def attend(*arrays: Array) -> Any:
        *lists, layer, kv_lengths = arrays
        return block_sparse_decode_kernel(
            *lists,
            layer=layer,
            kv_lengths=kv_lengths,
            scale=scale,
            block_size=selection.block_size,
            return_lse=return_lse,
            config=config,
        )

    out = _without_derivative(attend)(
        query, key, value, selection.ids, selection.counts, layer, kv_lengths
    )
    return out if return_lse else (out, None)
