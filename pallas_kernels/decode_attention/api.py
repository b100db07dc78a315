"""Attention of one token per sequence over page indices, with the kernel for every GPU."""

from typing import Any


def attend_to_lists(*arrays: Any, **options: Any) -> Any:
    """Calls `decode_attention_kernel`; `dispatch.why_not_mosaic_gpu` lists what it rejects."""
    # Import late: importing Pallas is slow, and few callers need it.
    from sketchwalk_jax.pallas_kernels.decode_attention.decode_attention import (
        decode_attention_kernel,
    )

    return decode_attention_kernel(*arrays, **options)
