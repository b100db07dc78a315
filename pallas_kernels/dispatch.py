"""Which implementation runs, in attention and in selection: by device and shape, or as asked.

`implementation=None` always finds one; a name insists. What a kernel cannot take it says itself,
in words (`why_not_...`); nothing here is remembered between calls.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sketchwalk_jax.pallas_kernels.config import (
    KernelConfig,
    default_kernel_config,
    why_not_shape,
)
from sketchwalk_jax.validation import varying_axes

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
DENSE_IMPLEMENTATIONS = ("cudnn", "mosaic_gpu", "xla")
FULL_BLOCK = 64
"""Tokens of the blocks that the lists of dense attention are made of, on the kernels."""

# What there are kernels for, by GPU: attention of prompts and of tokens, selection by any policy,
# by the recommended policy of prompts and of a token (and what writes that), products of few rows,
# and what stands between the float8 products of the mlp's many rows.
KERNELS = {
    "hopper": (
        "prefill",
        "decode",
        "selection",
        "prompt selection",
        "token selection",
        "linear layers",
        "float8 SwiGLU",
    ),
    "ampere": ("prefill", "decode", "prompt selection", "token selection", "linear layers"),
}
GPU_GROUPS = ("GPUs from Ampere on", "GPUs before Ampere")
"""GPUs on which the same code runs: kernels, or XLA alone."""
_HOPPER, _AMPERE = "9.0 (H100, H200)", "8.0 or higher (A100, RTX 30, L4 and later)"


def device_kind() -> str:
    """The default device in words, e.g. `"cpu"` or `"NVIDIA H200"`."""
    return jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0: H100, H200."""
    return _compute_capability() == "9.0"


def kernels_here() -> str | None:
    """Whose kernels the default device runs, a key of `KERNELS`; `None` where there are none.

    `"ampere"` are those for any NVIDIA GPU of compute capability 8.0 or higher that is not Hopper.
    """
    if is_hopper():
        return "hopper"
    return "ampere" if _is_ampere_or_later() else None


def group_of_gpus() -> str | None:
    """Which group of GPUs the default device is in, by what runs there; for expectations of speed.

    Returns:
      One of `GPU_GROUPS`; `None` on Hopper, and where there is no GPU.
    """
    if not is_gpu() or is_hopper():
        return None
    with_kernels, without = GPU_GROUPS
    return with_kernels if _is_ampere_or_later() else without


def why_not_device(what: str) -> str | None:
    """Why the default device has no kernels for something, or `None` if it has.

    Args:
      what: One of those that `KERNELS` names.

    Returns:
      A reason to show to the caller.
    """
    here = kernels_here()
    if here is not None and what in KERNELS[here]:
        return None
    needed = _AMPERE if what in KERNELS["ampere"] else _HOPPER
    return f"it needs an NVIDIA GPU of compute capability {needed} in {what}, not {device_kind()}"


def is_gpu() -> bool:
    """Whether the default device is a GPU."""
    return bool(_compute_capability())


def is_gpu_without(what: str) -> bool:
    """Whether the default device is a GPU without kernels for something.

    Args:
      what: One of those that `KERNELS` names.
    """
    return is_gpu() and why_not_device(what) is not None


def why_not_mosaic_gpu(
    query: Any, *, block_size: int, row_size: int | None = None, interpret: bool = False
) -> str | None:
    """Why no kernel can take this call of attention, or `None` if one can.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per key block.
      row_size: Queries per row of lists in prefill, `block_size` unless given.
      interpret: Whether the kernels run in the interpreter, which needs no GPU.

    Returns:
      A reason to show to the caller.
    """
    phase = "decode" if query.shape[1] == 1 else "prefill"
    if not interpret and (reason := why_not_device(phase)):
        return reason
    if kernels_here() != "ampere" and row_size not in (None, block_size) and _checks_varying_axes():
        return "it takes lists of pages in a jax.shard_map with check_vma=False alone"
    return why_not_shape(query, block_size=block_size, row_size=row_size)


def choose_implementation(
    implementation: str | None,
    query: Any,
    *,
    block_size: int,
    row_size: int | None = None,
    kernel_config: KernelConfig | None = None,
) -> str:
    """The implementation of attention over lists that will run.

    Args:
      implementation: `None` to choose; it always finds one. A name to insist.
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per key block.
      row_size: Queries per row of lists in prefill, `block_size` unless given.
      kernel_config: Tile sizes, and whether kernels run in the interpreter, which nobody gets
        unasked.

    Returns:
      `"mosaic_gpu"` or `"xla"`.

    Raises:
      ValueError: If the name is unknown.
      NotImplementedError: If the named implementation cannot take this call.
    """
    interpret = kernel_config is not None and kernel_config.interpret
    if implementation is None and interpret:
        return "xla"
    reason = why_not_mosaic_gpu(
        query, block_size=block_size, row_size=row_size, interpret=interpret
    )
    return _choose(implementation, IMPLEMENTATIONS, (reason, None))


def selection_kernels(
    implementation: str | None,
    kernel_config: KernelConfig | None = None,
    *,
    what: str = "selection",
) -> KernelConfig | None:
    """How policies may run their selection kernels, or `None` where they select on XLA.

    A policy that finds a kernel for what it selects takes it; the lists are the same either way.
    In a `shard_map` of the caller's they run with `check_vma=False` alone.

    Args:
      implementation: As asked for attention.
      kernel_config: Tile sizes, and whether kernels run in the interpreter, which nobody gets
        unasked.
      what: What they are for, as `KERNELS` has it.

    Returns:
      The configuration for the kernels, or `None`.
    """
    kernel_config = default_kernel_config() if kernel_config is None else kernel_config
    if _checks_varying_axes():
        return None
    if kernel_config.interpret:
        return kernel_config if implementation == "mosaic_gpu" else None
    is_wanted = implementation in (None, "mosaic_gpu")
    return kernel_config if is_wanted and why_not_device(what) is None else None


def row_kernels(
    implementation: str | None,
    kernel_config: KernelConfig | None = None,
    *,
    on_one_device: bool,
    what: str = "linear layers",
) -> KernelConfig | None:
    """How kernels of few rows may read stacked weights or caches, or `None` where XLA does.

    Where these may be spread over devices it does: a kernel would get all of them on each.

    Args:
      implementation: As asked for attention.
      kernel_config: Tile sizes, and whether kernels run in the interpreter, which nobody gets
        unasked.
      on_one_device: Whether weights and caches are known to lie on one device.
      what: What the kernels are for, as `KERNELS` has it.
    """
    found = selection_kernels(implementation, kernel_config, what=what)
    return found if found is None or found.interpret or on_one_device else None


def why_not_cudnn(
    query: Any, *, num_keys: int, has_offset: bool, return_lse: bool = False
) -> str | None:
    """Why cuDNN's flash attention cannot take this call of dense attention, or `None` if it can.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape.
      num_keys: Keys `S` that the key array holds.
      has_offset: Whether queries may start elsewhere than at position 0.
      return_lse: Whether the log-sum-exp is wanted.

    Returns:
      A reason to show to the caller.
    """
    num_tokens, head_dim = query.shape[1], query.shape[3]
    if not _is_ampere_or_later():
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher"
    if query.dtype.name not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {query.dtype.name}"
    if head_dim > 128 or head_dim % 8:
        return f"it takes a head_dim of at most 128 and a multiple of 8, not {head_dim}"
    if has_offset:
        return "its causal mask starts at position 0, so query_offset must be None"
    if num_tokens > num_keys:
        return f"it needs a key for every query, not {num_keys} for {num_tokens}"
    return "it keeps no float32 log-sum-exp" if return_lse else None


def why_not_full_lists(
    query: Any, *, num_keys: int, has_offset: bool, interpret: bool = False
) -> str | None:
    """Why dense attention cannot go through the kernels for lists, or `None` if it can.

    They then attend over lists of all blocks, wherever the queries stand.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape.
      num_keys: Keys `S` that the key array holds.
      has_offset: Whether queries may start elsewhere than at position 0.
      interpret: Whether the kernels run in the interpreter, which needs no GPU.

    Returns:
      A reason to show to the caller.
    """
    if num_keys % FULL_BLOCK:
        return f"it takes keys of whole blocks of {FULL_BLOCK}, not {num_keys} of them"
    if not has_offset and query.shape[1] > num_keys:
        return f"it needs a key for every query, not {num_keys} for {query.shape[1]}"
    return why_not_mosaic_gpu(query, block_size=FULL_BLOCK, interpret=interpret)


def choose_dense_implementation(
    implementation: str | None,
    query: Any,
    *,
    num_keys: int,
    has_offset: bool,
    return_lse: bool = False,
    kernel_config: KernelConfig | None = None,
) -> str:
    """The implementation of dense attention that will run: cuDNN's wherever it can.

    Else, where queries start elsewhere than at position 0, the kernels with full lists, which read
    a cache as it lies.

    Args:
      implementation: `None` to choose; it always finds one. A name to insist.
      query: The queries `[B, T, N, H]`, an array or its abstract shape.
      num_keys: Keys `S` that the key array holds.
      has_offset: Whether queries may start elsewhere than at position 0.
      return_lse: Whether the log-sum-exp is wanted.
      kernel_config: Tile sizes, and whether kernels run in the interpreter, which nobody gets
        unasked.

    Returns:
      `"cudnn"`, `"mosaic_gpu"` or `"xla"`.

    Raises:
      ValueError: If the name is unknown.
      NotImplementedError: If the named implementation cannot take this call.
    """
    interpret = kernel_config is not None and kernel_config.interpret
    where: dict[str, Any] = {"num_keys": num_keys, "has_offset": has_offset}
    lists = why_not_full_lists(query, **where, interpret=interpret)
    if implementation is None and (interpret or not has_offset):
        lists = lists or "nobody asked for it"
    reasons = (why_not_cudnn(query, **where, return_lse=return_lse), lists, None)
    return _choose(implementation, DENSE_IMPLEMENTATIONS, reasons)


def _choose(asked: str | None, names: Sequence[str], reasons: Sequence[str | None]) -> str:
    """The first name with no reason against it, or the one asked for."""
    if asked is None:
        return next(name for name, reason in zip(names, reasons, strict=True) if not reason)
    if asked not in names:
        raise ValueError(f"implementation must be None or one of {names}, got {asked!r}")
    reason = reasons[names.index(asked)]
    if reason:
        raise NotImplementedError(
            f"implementation {asked!r} cannot run here: {reason}; {names[-1]!r} can, and so does "
            f"None"
        )
    return asked


def _checks_varying_axes() -> bool:
    """Whether this is traced in a `shard_map` that checks over which mesh axes arrays vary.

    There Pallas traces no kernel that changes an array in place, or that branches on its values.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes and varying_axes(jax.lax.pcast(jnp.zeros(()), axes, to="varying")))


def _is_ampere_or_later() -> bool:
    """Whether the default device is one that cuDNN's flash attention runs on."""
    major = _compute_capability().split(".")[0]  # "9.0" on NVIDIA, "gfx942" and the like on AMD
    return major.isdigit() and int(major) >= 8


def _compute_capability() -> str:
    """That of the default device, if it is a GPU; an empty string otherwise."""
    if jax.default_backend() != "gpu":
        return ""
    return str(getattr(jax.devices()[0], "compute_capability", ""))
