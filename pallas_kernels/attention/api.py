"""Attention of query blocks over page indices: which kernel the default device runs."""

from collections.abc import Callable
from typing import Any

from sketchwalk_jax.pallas_kernels import dispatch


def prompt_kernel() -> Callable[..., Any]:
    """The kernel for prompts; without a GPU, Hopper's, which the interpreter runs.

    `dispatch.why_not_mosaic_gpu` says what it cannot take.
    """
    # Pallas takes long to import, and few callers need it.
    if dispatch.kernels_here() == "ampere":
        from sketchwalk_jax.pallas_kernels.attention.attention import attention_kernel

        return attention_kernel
    from sketchwalk_jax.pallas_kernels.attention.hopper import hopper_attention_kernel

    return hopper_attention_kernel
