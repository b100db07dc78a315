"""Chooses the implementation of attention and selection, by device, shape and request.

`implementation=None` always finds one; a name requires that one. The `why_not_...` functions return
the reason why a kernel does not support a call. No state is kept between calls.
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
"""Tokens per key block when kernels compute dense attention over lists of all blocks."""
_SHORT = 4096
"""Columns up to which cuDNN reads a padded prompt as fast as the kernels, and compiles sooner."""
_MOST_LISTED = 2**26
"""Most entries of lists of all blocks, 256 MiB; a prompt of 524,288 tokens has so many."""

# Operations with kernels, by GPU. "selection" serves any policy, "prompt selection" and "token
# selection" the recommended policy (including its cache writes); "linear layers" is decode matmul;
# "float8 SwiGLU" runs between the float8 products of the mlp in prefill; "grouped matmul" is the
# experts' products in prefill.
KERNELS = {
    "hopper": (
        "prefill",
        "decode",
        "selection",
        "prompt selection",
        "token selection",
        "linear layers",
        "float8 SwiGLU",
        "grouped matmul",
    ),
    "ampere": ("prefill", "decode", "prompt selection", "token selection", "linear layers"),
}
GPU_GROUPS = ("Hopper GPUs", "GPUs from Ampere on", "GPUs before Ampere")
"""GPUs that run the same code: kernels, or only XLA."""
_HOPPER, _AMPERE = "9.0 (H100, H200)", "8.0 or higher (A100, RTX 30, L4 and later)"


def device_kind() -> str:
    """Returns the default device's name, e.g. `"cpu"` or `"NVIDIA H200"`."""
    return jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0: H100, H200."""
    return _compute_capability() == "9.0"


def kernels_here() -> str | None:
    """Returns the key of `KERNELS` for the default device, or `None` if it runs no kernels.

    `"ampere"` stands for any NVIDIA GPU of compute capability 8.0 or higher except Hopper.
    """
    if is_hopper():
        return "hopper"
    return "ampere" if _is_ampere_or_later() else None


def group_of_gpus() -> str | None:
    """Returns the default device's group of GPUs, for which speeds are expected to be similar.

    Returns:
      One of `GPU_GROUPS`; `None` without a GPU.
    """
    if not is_gpu():
        return None
    hopper, others, without = GPU_GROUPS
    if is_hopper():
        return hopper
    return others if _is_ampere_or_later() else without


def why_not_device(what: str) -> str | None:
    """Returns why the default device has no kernels for an operation, or `None` if it has.

    Args:
      what: An operation named in `KERNELS`.

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
    """Whether the default device is a GPU without kernels for an operation.

    Args:
      what: An operation named in `KERNELS`.
    """
    return is_gpu() and why_not_device(what) is not None


def why_not_mosaic_gpu(
    query: Any, *, block_size: int, row_size: int | None = None, interpret: bool = False
) -> str | None:
    """Returns why no kernel supports this attention call, or `None` if one does.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per key block.
      row_size: Queries per query block in prefill, `block_size` by default.
      interpret: Whether the kernels run in the interpreter, which needs no GPU.

    Returns:
      A reason to show to the caller.
    """
    phase = "decode" if query.shape[1] == 1 else "prefill"
    if not interpret and (reason := why_not_device(phase)):
        return reason
    is_ampere = kernels_here() == "ampere"
    if not is_ampere and row_size not in (None, block_size) and _checks_varying_axes():
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
    """Chooses the implementation of block-sparse attention.

    Args:
      implementation: A name, or `None` to choose one.
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per key block.
      row_size: Queries per query block in prefill, `block_size` by default.
      kernel_config: Tile sizes, and whether kernels run in the interpreter.

    Returns:
      `"mosaic_gpu"` or `"xla"`.

    Raises:
      ValueError: If the name is unknown.
      NotImplementedError: If the named implementation does not support this call.
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
    """Returns the configuration of a policy's selection kernels, or `None` to select with XLA.

    A policy uses a kernel if one supports its selection; the indices are the same either way.
    Inside a `shard_map` of the caller, kernels require `check_vma=False`.

    Args:
      implementation: The implementation requested for attention.
      kernel_config: Tile sizes, and whether kernels run in the interpreter.
      what: Operation of the kernels, as named in `KERNELS`.

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
    """Returns the configuration of decode matmul or cache-writing kernels, or `None` to use XLA.

    XLA is used if weights or caches may be sharded: a kernel would gather all of them on each
    device.

    Args:
      implementation: The implementation requested for attention.
      kernel_config: Tile sizes, and whether kernels run in the interpreter.
      on_one_device: Whether weights and caches are known to be on one device.
      what: Operation of the kernels, as named in `KERNELS`.
    """
    found = selection_kernels(implementation, kernel_config, what=what)
    return found if found is None or found.interpret or on_one_device else None


def why_not_cudnn(
    query: Any, *, num_keys: int, has_offset: bool, return_lse: bool = False
) -> str | None:
    """Returns why cuDNN's flash attention does not support this call, or `None` if it does.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape.
      num_keys: Keys `S` of the key array.
      has_offset: Whether queries may start after position 0.
      return_lse: Whether to return the log-sum-exp.

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
    """Returns why the block-sparse kernels cannot compute dense attention, or `None` if they can.

    They attend over lists of all blocks, with queries at any position.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape.
      num_keys: Keys `S` of the key array.
      has_offset: Whether queries may start after position 0.
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
    is_padded: bool = False,
    kernel_config: KernelConfig | None = None,
) -> str:
    """Chooses the implementation of dense attention: cuDNN if it supports the call.

    Otherwise, if queries start after position 0, kernels with lists of all blocks, which read
    caches in place. On Hopper GPUs these also read long padded prompts: cuDNN computes the rows of
    padding too, which takes up to 7 times as long.

    Args:
      implementation: A name, or `None` to choose one.
      query: The queries `[B, T, N, H]`, an array or its abstract shape.
      num_keys: Keys `S` of the key array.
      has_offset: Whether queries may start after position 0.
      return_lse: Whether to return the log-sum-exp.
      is_padded: Whether many of the last queries may be padding.
      kernel_config: Tile sizes, and whether kernels run in the interpreter.

    Returns:
      `"cudnn"`, `"mosaic_gpu"` or `"xla"`.

    Raises:
      ValueError: If the name is unknown.
      NotImplementedError: If the named implementation does not support this call.
    """
    interpret = kernel_config is not None and kernel_config.interpret
    where: dict[str, Any] = {"num_keys": num_keys, "has_offset": has_offset}
    cudnn = why_not_cudnn(query, **where, return_lse=return_lse)
    lists = why_not_full_lists(query, **where, interpret=interpret)
    if implementation is None:
        batch, columns = query.shape[:2]
        is_long = columns > _SHORT and batch * (columns // FULL_BLOCK) ** 2 <= _MOST_LISTED
        skips_padding = is_padded and is_long and is_hopper()
        if interpret or not (has_offset or skips_padding):
            lists = lists or "nobody asked for it"
        if skips_padding and lists is None:
            cudnn = cudnn or "it computes the rows of padding"
    return _choose(implementation, DENSE_IMPLEMENTATIONS, (cudnn, lists, None))


def _choose(asked: str | None, names: Sequence[str], reasons: Sequence[str | None]) -> str:
    """Returns the first name without a reason against it, or the requested one."""
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
    """Whether a surrounding `shard_map` checks over which mesh axes arrays vary.

    There, Pallas cannot trace kernels that change an array in place or branch on its values.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes and varying_axes(jax.lax.pcast(jnp.zeros(()), axes, to="varying")))


def _is_ampere_or_later() -> bool:
    """Whether the default device has compute capability 8.0 or higher."""
    major = _compute_capability().split(".")[0]  # "9.0" on NVIDIA, "gfx942" and the like on AMD
    return major.isdigit() and int(major) >= 8


def _compute_capability() -> str:
    """Returns the default GPU's compute capability, or an empty string without a GPU."""
    if jax.default_backend() != "gpu":
        return ""
    return str(getattr(jax.devices()[0], "compute_capability", ""))
