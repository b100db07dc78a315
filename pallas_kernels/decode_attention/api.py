"""Attention of one token per sequence over page indices: which kernel the default device runs."""

from collections.abc import Callable
from typing import Any

from sketchwalk_jax.pallas_kernels import dispatch


def token_kernel() -> Callable[..., Any]:
    """The kernel for tokens; without a GPU, Hopper's, which the interpreter runs.

    `dispatch.why_not_mosaic_gpu` says what it cannot take.
    """
    # Pallas takes long to import, and few callers need it.
    if dispatch.kernels_here() == "ampere":
        from sketchwalk_jax.pallas_kernels.decode_attention.decode_attention import (
            decode_attention_kernel,
        )

        return decode_attention_kernel
    from sketchwalk_jax.pallas_kernels.decode_attention.hopper import (
        hopper_decode_attention_kernel,
    )

    return hopper_decode_attention_kernel
