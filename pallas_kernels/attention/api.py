"""Selects the prefill attention kernel of the default device."""

from collections.abc import Callable
from typing import Any

from sketchwalk_jax.pallas_kernels import dispatch


def prompt_kernel() -> Callable[..., Any]:
    """Returns the prefill kernel; without a GPU, the Hopper kernel, for the interpreter.

    `dispatch.why_not_mosaic_gpu` lists the arguments that it rejects.
    """
    # Import late: importing Pallas is slow, and few callers need it.
    if dispatch.kernels_here() == "ampere":
        from sketchwalk_jax.pallas_kernels.attention.attention import attention_kernel

        return attention_kernel
    from sketchwalk_jax.pallas_kernels.attention.hopper import hopper_attention_kernel

    return hopper_attention_kernel
