"""Which implementation of attention runs: chosen by device, dtype and shape, or as asked."""

from typing import Any

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "xla")


def device_kind() -> str:
    """The default device in words, e.g. `"cpu"` or `"NVIDIA H200"`."""
    return jax.devices()[0].device_kind


def why_not_mosaic_gpu(query: Any, *, block_size: int) -> str | None:
    """Why the Hopper kernels cannot take this call, or `None` if they can.

    Args:
      query: The queries, an array or its abstract shape.
      block_size: Tokens per block.

    Returns:
      A reason to show to the caller.
    """
    del query, block_size
    return "this version of sketchwalk-jax has no Mosaic GPU kernels"


def choose_implementation(implementation: str | None, query: Any, *, block_size: int) -> str:
    """The implementation that will run.

    Args:
      implementation: `None` to choose; it always finds one. A name to insist.
      query: The queries, an array or its abstract shape.
      block_size: Tokens per block.

    Returns:
      `"mosaic_gpu"` or `"xla"`.

    Raises:
      ValueError: If the name is unknown.
      NotImplementedError: If the named implementation cannot take this call.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}"
        )
    if implementation == "xla":
        return "xla"
    reason = why_not_mosaic_gpu(query, block_size=block_size)
    if implementation is None:
        return "xla" if reason else "mosaic_gpu"
    if reason:
        raise NotImplementedError(
            f"implementation 'mosaic_gpu' cannot run here: {reason}; 'xla' can, and so does None"
        )
    return "mosaic_gpu"
