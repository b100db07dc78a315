"""Quantises weights to eight bits, and multiplies by them.

Each output channel has one scale. With weights `w` and inputs `x`::

    scale[f] = max_d |w[f, d]| / largest        largest: 448 for float8_e4m3fn, 127 for int8
    q[f, d]  = round(w[f, d] · (1 / scale[f]))
    y[t, f]  = scale[f] · Σ_d x[t, d] q[f, d]

A channel of zeros has the scale 1. For prompts with float8 weights, inputs are quantised in the
same way, with a scale for each token, so that both operands of the product have eight bits:
Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433). Otherwise inputs keep their
dtype, and XLA dequantises one matrix of one layer at a time to it; bfloat16 and float32 represent
`q` exactly.

The libraries qwix and AQT replace products inside a model's modules. They do not fit here: weights
are plain stacked arrays, quantised while a file is read, and a kernel of this project reads them in
place.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from sketchwalk_jax.models.params import (
    QUANTIZED,
    QUANTIZED_DTYPES,
    Params,
    check_weights,
    input_axes,
    num_stack_axes,
    weights_of,
)
from sketchwalk_jax.precision import matmul_precision

# Multiply by reciprocals instead of dividing: XLA replaces some divisions by products, and the host
# must compute the same numbers.
_PER_LARGEST = {"float8_e4m3fn": np.float32(1 / 448), "int8": np.float32(1 / 127)}
_LEAST_SCALE = float(np.finfo(np.float32).tiny)  # devices may flush smaller numbers to zero


def quantize_rows(
    rows: np.ndarray, dtype: np.dtype, *, num_inputs: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Quantises whole rows of weights on the host.

    Args:
      rows: Weights `[outputs..., inputs...]`.
      dtype: float8_e4m3fn or int8.
      num_inputs: Number of input axes.
      name: Name of the tensor, for the error message.

    Returns:
      `q` in the same shape, and the scales `[outputs...]` in float32.

    Raises:
      ValueError: If a weight is NaN or infinite.
    """
    wide = rows.astype(np.float32)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        scaled, scales = _scale(wide, _PER_LARGEST[dtype.name], num_inputs, np)
    if not np.isfinite(scales).all():
        raise ValueError(f"{name} must be finite to be quantised, got NaN or infinite weights")
    return (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype), scales


def quantize_params(params: Mapping[str, Any], weights: str) -> Params:
    """Quantises the linear layers of parameters in memory.

    Each `kernel` `[L, inputs..., outputs...]` in `layers` becomes `quantized` and `scales`, with
    the layout of `sketchwalk_jax.models.params` and the equations of this module. Embedding, output
    head, router, norms and biases stay. On a mesh, arrays keep their sharding.

    Args:
      params: A parameter tree from `load` or `init_params`, in float32, float16 or bfloat16.
      weights: `"float8"` or `"int8"`.

    Returns:
      A new tree, which shares unchanged arrays with `params`.

    Raises:
      ValueError: If `weights` is unknown, the parameters are quantised already, or a weight is NaN
        or infinite (which is not checked under `jit`).

    Example:
      >>> layer = {"gate": {"kernel": jnp.ones((2, 32, 64))}}
      >>> made = quantize_params({"layers": layer}, "int8")["layers"]["gate"]
      >>> made["quantized"].shape, made["scales"].shape
      ((2, 64, 32), (2, 64))
    """
    check_weights(weights)
    if weights_of(params) is not None:
        raise ValueError(
            f"params must not be quantised yet, got weights in {weights_of(params)}; load the "
            f"checkpoint again"
        )
    layers = {}
    for name, leaf in params["layers"].items():
        if "kernel" not in leaf or name == "router":
            layers[name] = leaf
            continue
        kernel, path = leaf["kernel"], ("layers", name, "kernel")
        inputs, stacked = len(input_axes(path, kernel.shape)), num_stack_axes(path)
        quantized, scales = _quantize(
            kernel,
            dtype=QUANTIZED_DTYPES[weights],
            num_inputs=inputs,
            num_stacked=stacked,
            shardings=_shardings(kernel, inputs, stacked),
        )
        if not isinstance(scales, jax.core.Tracer) and not bool(jnp.isfinite(scales).all()):
            raise ValueError(
                f"layers/{name}/kernel must be finite to be quantised, got NaN or infinite weights"
            )
        rest = {key: value for key, value in leaf.items() if key != "kernel"}
        layers[name] = {"quantized": quantized, "scales": scales, **rest}
    return {**params, "layers": layers}


def _shardings(kernel: Array, num_inputs: int, num_stacked: int) -> Any:
    """Returns the shardings of the results for a kernel on a mesh, or `None`."""
    sharding = None if isinstance(kernel, jax.core.Tracer) else getattr(kernel, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    spec = (*sharding.spec, *[None] * (kernel.ndim - len(sharding.spec)))
    stack, end = spec[:num_stacked], num_stacked + num_inputs
    inputs, outputs = spec[num_stacked:end], spec[end:]
    axes = (*stack, *outputs, *inputs), (*stack, *outputs)
    return tuple(NamedSharding(sharding.mesh, PartitionSpec(*one)) for one in axes)


def _quantize(
    kernel: Array, *, dtype: str, num_inputs: int, num_stacked: int, shardings: Any
) -> tuple[Array, Array]:
    """Computes `q` and the scales of one stack, a matrix at a time."""

    def quantize(one: Array) -> tuple[Array, Array]:
        wide = jnp.moveaxis(one, range(num_inputs), range(-num_inputs, 0)).astype(jnp.float32)
        scaled, scales = _scale(wide, _PER_LARGEST[dtype], num_inputs)
        if dtype == "int8":
            return jnp.rint(scaled).astype(dtype), scales
        # XLA on CPUs rounds via float16, which can give another neighbour than on the host. So
        # round first, to 3 bits or to multiples of 2^-9: the conversion is then exact.
        small = jnp.rint(scaled * 512) / 512
        rounded = jnp.where(jnp.abs(scaled) < 2**-6, small, jax.lax.reduce_precision(scaled, 8, 3))
        return rounded.astype(dtype), scales

    for _ in range(num_stacked):
        quantize = functools.partial(jax.lax.map, quantize)
    return jax.jit(quantize, out_shardings=shardings)(kernel)


def _scale(wide: Any, per_largest: np.float32, num_inputs: int, xp: Any = jnp) -> tuple[Any, Any]:
    """Divides float32 weights by the scale of their output channel; returns both."""
    axes = tuple(range(wide.ndim - num_inputs, wide.ndim))
    most = xp.max(xp.abs(wide), axis=axes, keepdims=True)
    scales = xp.maximum(most * per_largest, _LEAST_SCALE)
    scales = xp.where(most == 0, xp.ones_like(scales), scales)  # NaN propagates
    return wide * (1 / scales), scales.reshape(scales.shape[: axes[0]])


def out_kernel(params: Params, layer: Array, dtype: DTypeLike) -> Float[Array, "N H D"]:
    """Returns the attention output projection of one layer, dequantised if necessary.

    Args:
      params: The parameter tree.
      layer: The layer.
      dtype: Dtype of dequantised weights.
    """
    leaf = params["layers"]["out"]
    if "kernel" in leaf:
        return jax.lax.dynamic_index_in_dim(leaf["kernel"], layer, keepdims=False)
    quantized, scales = (
        jax.lax.dynamic_index_in_dim(leaf[name], layer, keepdims=False) for name in QUANTIZED
    )
    wide = quantized.astype(jnp.float32) * scales[:, None, None]
    return jnp.moveaxis(wide, 0, -1).astype(dtype)


@jax.custom_vjp
def multiply_quantized(
    x: Float[Array, "B T D"], quantized: Num[Array, "F D"], scales: Float[Array, "F"]
) -> Float[Array, "B T F"]:
    """Computes `y` of the module docstring for one layer with XLA.

    Args:
      x: The input. With float8 weights and several tokens in each sequence, it is quantised.
      quantized: `q`.
      scales: Scales of the output channels, in float32.

    Returns:
      The product in the dtype of `x`.

    Raises:
      NotImplementedError: If a gradient is taken: the weights have none.
    """
    if quantized.dtype == jnp.float8_e4m3fn and x.shape[1] > 1:
        rows, row_scales = _round_rows(x)
        return _scaled(_multiply_rows(rows, quantized), row_scales, scales, x.dtype)
    found = jnp.einsum(
        "btd,fd->btf", x, quantized.astype(x.dtype), precision=matmul_precision(x)
    ).astype(jnp.float32)
    return (found * scales[None, None]).astype(x.dtype)


def _round_rows(x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """Quantises rows to float8_e4m3fn; returns them and their scales."""
    scaled, scales = _scale(x.astype(jnp.float32), _PER_LARGEST["float8_e4m3fn"], 1)
    return scaled.astype(jnp.float8_e4m3fn), scales


def _multiply_rows(
    rows: Float[Array, "B T D"], weights: Float[Array, "F D"]
) -> Float[Array, "B T F"]:
    """Multiplies float8 rows by float8 weights; the products are bfloat16.

    XLA on GPUs multiplies in eight bits only if both operands are float8. CPUs cannot, and are
    fastest in float32. Sums of D products of up to 448² fit into bfloat16.
    """

    def wide(rows: Array, weights: Array) -> Array:
        found = jnp.einsum("btd,fd->btf", rows.astype(jnp.float32), weights.astype(jnp.float32))
        return found.astype(jnp.bfloat16)

    def narrow(rows: Array, weights: Array) -> Array:
        axes = (((2,), (1,)), ((), ()))
        return jax.lax.dot_general(rows, weights, axes, preferred_element_type=jnp.bfloat16)

    return jax.lax.platform_dependent(rows, weights, cpu=wide, default=narrow)


def _scaled(
    products: Float[Array, "B T F"],
    row_scales: Float[Array, "B T"],
    scales: Float[Array, "F"],
    dtype: DTypeLike,
) -> Float[Array, "B T F"]:
    """Multiplies products by the scales of their rows and columns."""
    found = products.astype(jnp.float32) * row_scales[..., None]
    return (found * scales[None, None]).astype(dtype)


def refuse_gradients(*arguments: Any) -> Any:
    """Raises the error for gradients through quantised weights, as a rule of `custom_vjp`."""
    raise NotImplementedError(
        "weights of eight bits must not be differentiated: load the checkpoint without weights= "
        "to take gradients"
    )


multiply_quantized.defvjp(refuse_gradients, refuse_gradients)


# (products with gate and with up `[B, T, F]`, row scales, scales of gate and of up) -> the result
# of `gate_plainly`, or `None`.
SwigluQuantize = Callable[[Array, Array, Array, Array, Array], tuple[Array, Array] | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_gated(
    swiglu_quantize: SwigluQuantize,
    x: Float[Array, "B T D"],
    weights: Mapping[str, tuple[Float[Array, "_ _"], Float[Array, "_"]]],
) -> Float[Array, "B T D"]:
    """Computes `down(silu(gate(x)) · up(x))` of one layer for many rows with 8-bit products.

    Each product is computed as in `multiply_quantized`.

    Args:
      swiglu_quantize: A kernel for the SwiGLU between the products; if it returns `None`, XLA
        computes the SwiGLU.
      x: The input, in bfloat16.
      weights: `q` in float8_e4m3fn and the scales of `gate`, `up` and `down`.

    Raises:
      NotImplementedError: If a gradient is taken: the weights have none.
    """
    rows, row_scales = _round_rows(x)
    products = []
    for name in ("gate", "up"):
        # This name in the compiled program tells the types of each product.
        with jax.named_scope(name):
            products.append(_multiply_rows(rows, weights[name][0]))
    gate, up = products
    own_scales = weights["gate"][1], weights["up"][1]
    found = swiglu_quantize(gate, up, row_scales, *own_scales)
    if found is None:
        found = gate_plainly(gate, up, row_scales, *own_scales)
    quantized, scales = weights["down"]
    with jax.named_scope("down"):
        return _scaled(_multiply_rows(found[0], quantized), found[1], scales, x.dtype)


def gate_plainly(
    gate: Float[Array, "B T F"],
    up: Float[Array, "B T F"],
    row_scales: Float[Array, "B T"],
    gate_scales: Float[Array, "F"],
    up_scales: Float[Array, "F"],
) -> tuple[Float[Array, "B T F"], Float[Array, "B T"]]:
    """Computes `silu(gate) · up` from bfloat16 products, quantised to float8_e4m3fn by rows.

    Args:
      gate: Unscaled products with the weights of gate.
      up: Unscaled products with the weights of up.
      row_scales: Scales of the rows.
      gate_scales: Scales of the columns of gate.
      up_scales: Scales of the columns of up.
    """
    gate = _scaled(gate, row_scales, gate_scales, gate.dtype)
    return _round_rows(jax.nn.silu(gate) * _scaled(up, row_scales, up_scales, up.dtype))


multiply_gated.defvjp(refuse_gradients, refuse_gradients)
