"""Products of a few token rows with one layer of stacked weights, and SwiGLU in float8."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.config import KernelConfig, why_not_swiglu_quantize


class DecodeMatmul(NamedTuple):
    """A kernel for a few rows.

    Attributes:
      multiply: The kernel.
      why_not: Says in words why the kernel cannot take some rows and weights, or `None`.
      else_sums: Whether sums of products by XLA serve what the kernel refuses.
    """

    multiply: Callable[..., list[Array]]
    why_not: Callable[..., str | None]
    else_sums: bool


def choose_decode_matmul(*, are_quantized: bool) -> DecodeMatmul:
    """The kernel of the default device; without a GPU, the one for the interpreter.

    Args:
      are_quantized: Whether weights have eight bits, which only Hopper's kernel takes.
    """
    is_ampere = dispatch.kernels_here() == "ampere"
    # Pallas takes long to import, and few callers need it.
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
    """`models.quantized.gate_plainly` by Hopper's kernel, or `None` where it cannot make it.

    Args:
      gate: Products with the weights of gate.
      up: Products with those of up.
      row_scales: Of the rows.
      gate_scales: Of the columns of gate.
      up_scales: Of those of up.
      kernel_config: What the kernel may run with.
    """
    of_gate, of_up = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
    if why_not_swiglu_quantize(of_gate):
        return None
    # Pallas takes long to import, and few callers need it.
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
