"""What the attention kernels take, and where their derivative is.

The kernels themselves are in `block_sparse_prefill` and `block_sparse_decode`. These import Pallas,
which takes long, so that whoever calls them imports them late; this file imports little.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax

PREFILL_BLOCK_SIZES = (64, 128)
DECODE_BLOCK_SIZES = (16, 64, 128)
MAX_HEAD_DIM = 128
# The decode kernel would pad smaller heads, and copy the whole cache for each token.
LEAST_DECODE_HEAD = 64

_NO_DERIVATIVE = (
    "the Mosaic GPU kernels have no derivative of their own; call sketchwalk_jax's "
    "block_sparse_attention, block_sparse_decode or dense_attention, which run them and are "
    "differentiable"
)


def why_not_shape(query: Any, *, block_size: int) -> str | None:
    """Why the kernels cannot take queries of this shape and type, or `None` if they can.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per block.

    Returns:
      A reason to show to the caller.
    """
    num_tokens, head_dim = query.shape[1], query.shape[3]
    sizes = DECODE_BLOCK_SIZES if num_tokens == 1 else PREFILL_BLOCK_SIZES
    if query.dtype.name not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {query.dtype.name}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"it takes a head_dim of at most 128 and a multiple of 8, not {head_dim}"
    if block_size not in sizes:
        phase = "decode" if num_tokens == 1 else "prefill"
        return f"it takes a block_size of {' or '.join(map(str, sizes))} in {phase}"
    return None


def without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays; taking its derivative raises an error that says what to do."""
    wrapped = jax.custom_vjp(function)

    def refuse(*arguments: Any) -> NoReturn:
        raise NotImplementedError(_NO_DERIVATIVE)

    wrapped.defvjp(refuse, refuse)
    return wrapped
