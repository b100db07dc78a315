"""Attention of one token per sequence over page indices, by one kernel on every GPU."""

from collections.abc import Callable
from typing import Any


def token_kernel() -> Callable[..., Any]:
    """Returns the kernel; `dispatch.why_not_mosaic_gpu` lists the arguments that it rejects."""
    # Import late: importing Pallas is slow, and few callers need it.
    from sketchwalk_jax.pallas_kernels.decode_attention.decode_attention import (
        decode_attention_kernel,
    )

    return decode_attention_kernel
