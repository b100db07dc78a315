"""Decode matmul with one layer of stacked weights, and SwiGLU that quantizes to float8."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.config import KernelConfig, why_not_swiglu_quantize


class DecodeMatmul(NamedTuple):
    """A decode matmul kernel.

    Attributes:
      multiply: The kernel, of rows `[B, D]`, weights and a layer; or of groups of rows `[G, R, D]`,
        weights and `Groups`, which names a matrix for each.
      why_not: Returns why the kernel does not support some rows and weights, or `None`.
      else_sums: Whether XLA computes elementwise products and their sums if `why_not` has a reason.
    """

    multiply: Callable[..., list[Array]]
    why_not: Callable[..., str | None]
    else_sums: bool


def choose_decode_matmul(*, are_quantized: bool) -> DecodeMatmul:
    """Returns the kernel of the default device; without a GPU, the one for the interpreter.

    Args:
      are_quantized: Whether weights have eight bits, which only the Hopper kernel supports.
    """
    is_ampere = dispatch.kernels_here() == "ampere"
    # Import late: importing Pallas is slow, and few callers need it.
    if are_quantized and not is_ampere:
        from sketchwalk_jax.pallas_kernels.decode_matmul.hopper import (
            hopper_decode_matmul_kernel,
            why_not_hopper_decode_matmul,
        )

        return DecodeMatmul(hopper_decode_matmul_kernel, why_not_hopper_decode_matmul, is_ampere)
    from sketchwalk_jax.pallas_kernels.decode_matmul.decode_matmul import (
        decode_matmul_kernel,
        why_not_decode_matmul,
    )

    return DecodeMatmul(decode_matmul_kernel, why_not_decode_matmul, is_ampere)


def swiglu_quantize(
    gate: Float[Array, "B T F"],
    up: Float[Array, "B T F"],
    row_scales: Float[Array, "B T"],
    gate_scales: Float[Array, "F"],
    up_scales: Float[Array, "F"],
    *,
    kernel_config: KernelConfig,
) -> tuple[Float[Array, "B T F"], Float[Array, "B T"]] | None:
    """Runs `models.quantized.gate_plainly` as Hopper's kernel, or returns `None` if unsupported.

    Args:
      gate: Products with the gate weights.
      up: Products with the up weights.
      row_scales: Scales of the rows.
      gate_scales: Scales of the gate columns.
      up_scales: Scales of the up columns.
      kernel_config: Whether the kernel runs in the interpreter.
    """
    of_gate, of_up = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
    if why_not_swiglu_quantize(of_gate):
        return None
    # Import late: importing Pallas is slow, and few callers need it.
    from sketchwalk_jax.pallas_kernels.decode_matmul.swiglu_quantize import swiglu_quantize_kernel

    found, scales = swiglu_quantize_kernel(
        of_gate,
        of_up,
        row_scales.reshape(-1),
        gate_scales,
        up_scales,
        interpret=kernel_config.interpret,
    )
    return found.reshape(gate.shape), scales.reshape(row_scales.shape)
