"""Attention with one derivative for all forward implementations.

Under differentiation, the forward pass keeps its output and log-sum-exp (4 bytes per query and
head), which it computes anyway. From them `gradients` computes the cotangents of queries, keys and
values. Block indices, positions and lengths are constants. Only first derivatives in reverse mode
exist; other derivatives raise an error that says so (`in_reverse_mode`, `_once`).
"""

import dataclasses
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention import xla
from sketchwalk_jax.pallas_kernels.attention.api import prompt_kernel
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.decode_attention.api import token_kernel
from sketchwalk_jax.selection import BlockSelection


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call after all choices are made.

    Attributes:
      scale: Factor of the scores.
      return_lse: Whether to return the log-sum-exp.
      implementation: `"xla"` or `"mosaic_gpu"`.
      kernel_config: Tile sizes.
    """

    scale: float
    return_lse: bool
    implementation: str
    kernel_config: KernelConfig


def stack(x: Array, layer: Any) -> Float[Array, "L B S K H"]:
    """Adds an axis of layers to the keys or values of one layer; `None` means one layer."""
    return x[None] if layer is None else x


def _in_blocks(x: Float[Array, "*L B S K H"], layer: Any, size: int) -> Float[Array, "L B S2 K H"]:
    """Stacks the keys or values, and pads their tokens to whole blocks."""
    return xla.pad_axis(stack(x, layer), 2, size)


_DERIVATIVES = (
    "attention has first derivatives in reverse mode only (jax.grad, jax.vjp, jax.jacrev), got "
    "{}; take finite differences of {}"
)
_FORWARD_MODE = _DERIVATIVES.format("forward mode (jax.jvp, jax.jacfwd, jax.hessian)", "the output")
_TWICE = _DERIVATIVES.format(
    "a second derivative", "the gradient, or stop_gradient of the inputs of the inner one"
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(_FORWARD_MODE)


# In forward mode, a custom backward pass raises an error of JAX that does not say what works. So
# arrays pass through an identity whose tangents pass through another one, `_tangents`. Reverse mode
# only transposes `_tangents`; forward mode would have to compute it, which raises our error.
_Primitive: Any = type(jax.lax.neg_p)  # importing it from jax.extend would import Pallas
_in_reverse_mode, _tangents = _Primitive("in_reverse_mode"), _Primitive("tangents_in_reverse_mode")
for _identity in (_in_reverse_mode, _tangents):
    _identity.multiple_results = True
    _identity.def_abstract_eval(lambda *arrays: arrays)
_in_reverse_mode.def_impl(lambda *arrays: arrays)
mlir.register_lowering(_in_reverse_mode, lambda _, *arrays: arrays)
batching.primitive_batchers[_in_reverse_mode] = lambda arrays, axes: (
    _in_reverse_mode.bind(*arrays),
    axes,
)
_tangents.def_impl(_refuse)
mlir.register_lowering(_tangents, _refuse)
batching.primitive_batchers[_tangents] = _refuse
ad.primitive_transposes[_tangents] = lambda cotangents, *_: cotangents


def _mark_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The derivative of `in_reverse_mode`: marks all tangents that are not zero."""
    marked = iter(_tangents.bind(*(x for x in tangents if type(x) is not ad.Zero)))
    found = [x if type(x) is ad.Zero else next(marked) for x in tangents]
    return _in_reverse_mode.bind(*primals), found


ad.primitive_jvps[_in_reverse_mode] = _mark_tangents
ad.primitive_jvps[_tangents] = _refuse


def in_reverse_mode(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays; their derivatives in forward mode raise a NotImplementedError."""
    return tuple(_in_reverse_mode.bind(*arrays))


@jax.custom_jvp
def _once(arrays: Any) -> Any:
    """Returns the arrays; their derivatives raise a NotImplementedError."""
    return arrays


@_once.defjvp
def _refuse_twice(*_: Any) -> NoReturn:
    raise NotImplementedError(_TWICE)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_lists(
    options: Options,
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    selection: BlockSelection,
    first_block: Int[Array, "B"] | None,
    layer: Int[Array, ""] | None,
    kv_lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Attention over listed blocks, whose derivative does not depend on the implementation.

    Queries are aligned to blocks and start at block `first_block`. If it is `None`, they are the
    last tokens of the sequences. Call this function with the result of `api.prepare_lists`.
    """
    key, value = (_in_blocks(x, layer, selection.queries_per_row) for x in (key, value))
    layer = jnp.zeros((), jnp.int32) if layer is None else layer
    if options.implementation == "mosaic_gpu":
        arrays = (query, key, value, selection.ids, selection.counts)
        where: dict[str, Any] = {
            "layer": layer,
            "kv_lengths": kv_lengths,
            "scale": options.scale,
            "block_size": selection.block_size,
            "return_lse": options.return_lse,
            "kernel_config": options.kernel_config,
        }
        if first_block is None:
            found: Any = token_kernel()(*arrays, **where)
        else:
            where |= {"row_size": selection.queries_per_row, "first_block": first_block}
            found = prompt_kernel()(*arrays, **where)
        out, lse = xla.vary_alike(*found, like=query)  # kernels' results vary over no mesh axis
        return out, lse
    by_row, positions = _rows_of_lists(query, selection, first_block, kv_lengths)
    out, lse = xla.attend_lists(
        by_row,
        key,
        value,
        selection,
        positions,
        layer=layer,
        kv_lengths=kv_lengths,
        scale=options.scale,
        **_steps(options, selection, first_block),
    )
    shown = lse.reshape(query.shape[:3]) if options.return_lse else None
    return out.reshape(query.shape), shown


def _rows_of_lists(
    query: Float[Array, "B T N H"],
    selection: BlockSelection,
    first_block: Int[Array, "B"] | None,
    kv_lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B I Q N H"], Int[Array, "B I Q"]]:
    """Groups queries by the row of the selection that they belong to; also their positions."""
    batch, num_tokens = query.shape[:2]
    if first_block is None:
        return query[:, None], (kv_lengths - 1)[:, None, None]
    size = selection.queries_per_row
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    positions = (first_block * size)[:, None] + column
    rows = (batch, num_tokens // size, size)
    return query.reshape(*rows, *query.shape[2:]), positions.reshape(rows)


def _steps(
    options: Options, selection: BlockSelection, first_block: Int[Array, "B"] | None
) -> dict[str, int]:
    """Returns the step sizes of the loops over block indices."""
    kernel_config = options.kernel_config
    if first_block is not None:
        # A step takes the same number of keys for pages as for blocks.
        pages = selection.queries_per_row // selection.block_size
        return {"row_tile": kernel_config.row_tile, "block_step": kernel_config.block_step * pages}
    # For lists of tokens, a step takes the same number of keys as for pages of 16 tokens.
    pages = max(1, 16 // selection.block_size)
    return {"row_tile": 1, "block_step": kernel_config.decode_block_step * pages}


def _lists_forward(
    options: Options,
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    selection: BlockSelection,
    *where: Any,
) -> tuple[Any, Any]:
    """Attention over listed blocks, and the residuals for its derivative."""
    keeping = dataclasses.replace(options, return_lse=True)
    arguments = (query, key, value, selection, *where)
    out, lse = attend_lists(keeping, *arguments)
    return (out, lse if options.return_lse else None), (*arguments, out, lse)


def _lists_backward(options: Options, kept: tuple[Any, ...], grads: tuple[Any, Any]) -> Any:
    """Computes the cotangents of queries, keys and values."""
    from sketchwalk_jax.attention import gradients  # few callers differentiate

    # The residuals of constants may come back as NumPy arrays.
    query, key, value, selection, first_block, layer, kv_lengths, *found = jax.tree.map(
        jnp.asarray, kept
    )
    query, key, value, found = _once((query, key, value, found))
    by_row, positions = _rows_of_lists(query, selection, first_block, kv_lengths)
    shape, blocks = by_row.shape[:4], selection.queries_per_row
    outputs, cotangents = jax.tree.map(
        lambda x: x.reshape(*shape, *x.shape[3:]), (tuple(found), grads)
    )
    grad_query, grad_key, grad_value = gradients.attend_lists(
        by_row,
        _in_blocks(key, layer, blocks),
        _in_blocks(value, layer, blocks),
        selection,
        positions,
        outputs,
        cotangents,
        layer=jnp.zeros((), jnp.int32) if layer is None else layer,
        kv_lengths=kv_lengths,
        scale=options.scale,
        **_steps(options, selection, first_block),
    )
    num_keys = key.shape[-3]
    grad_key, grad_value = (
        x[0, :, :num_keys] if layer is None else x[:, :, :num_keys] for x in (grad_key, grad_value)
    )
    return grad_query.reshape(query.shape), grad_key, grad_value, None, None, None, None


attend_lists.defvjp(_lists_forward, _lists_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_dense(
    options: tuple[float, int],
    query: Float[Array, "B I Q N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    positions: Int[Array, "B I Q"],
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B I Q N H"], Float[Array, "B I Q N"]]:
    """`xla.attend_dense`; `options` are the scale of the scores and the keys per step."""
    scale, keys_per_step = options
    where: dict[str, Any] = {"layer": layer, "kv_lengths": kv_lengths}
    return xla.attend_dense(
        query, key, value, positions, scale=scale, keys_per_step=keys_per_step, **where
    )


def _dense_forward(options: tuple[float, int], *arguments: Any) -> tuple[Any, Any]:
    """Dense attention, and the residuals for its derivative."""
    outputs = attend_dense(options, *arguments)
    return outputs, (*arguments, outputs)


def _dense_backward(options: tuple[float, int], kept: tuple[Any, ...], grads: Any) -> Any:
    """Computes the cotangents of queries, keys and values."""
    from sketchwalk_jax.attention import gradients  # few callers differentiate

    scale, keys_per_step = options
    query, key, value, positions, layer, kv_lengths, outputs = jax.tree.map(jnp.asarray, kept)
    query, key, value, outputs = _once((query, key, value, outputs))
    found = gradients.attend_dense(
        query,
        key,
        value,
        positions,
        outputs,
        grads,
        layer=layer,
        kv_lengths=kv_lengths,
        scale=scale,
        keys_per_step=keys_per_step,
    )
    return (*found, None, None, None)


attend_dense.defvjp(_dense_forward, _dense_backward)
