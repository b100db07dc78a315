"""Tile sizes of attention and selection, and limits of the kernels.

Sizes change results only by rounding. This file imports little; callers import the kernels late,
since importing Pallas is slow.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax

# Limits of the attention kernels.
PREFILL_BLOCK_SIZES = (64, 128)  # of key blocks and query blocks
PREFILL_PAGE, PREFILL_PAGE_ROW = 16, 64  # keys per page, and queries per query block with pages
DECODE_BLOCK_SIZES = (16, 64, 128)
MAX_HEAD_DIM = 128
# Head sizes of the decode kernel; padding others would copy a layer of the cache per token.
DECODE_HEADS = (64, 128)

# Limits of the selection kernels. They hold a row of scores in registers, 32 columns per thread;
# longer rows are listed with up to 128 columns, of which some spill to memory.
MAX_BLOCKS = 16384  # of a row that walks
MAX_LISTED = 2**16  # blocks or pages of a row that is listed
MAX_POWER = 32
WIDE = 128  # head entries read at a time, one per thread of a warpgroup
LEAST_BLOCK = 16  # fewest tokens per block for the sums of sketches
LEAST_CHUNK = 32  # sketch entries multiplied at a time, or twice as many
SCORED_BLOCK = 64  # tokens per block for page scores
SCORED_PAGES = 4  # pages per block, listed individually
SCORED_HEADS = (64, 128)  # head_dim for page scores
SCORED_GROUP = 8  # most query heads per key/value head, for one token
MAX_TOKEN_HEADS = 64  # most heads of a token, combined by one thread block
WRITTEN_CHANNELS = 128  # divides the channels of a token's keys in all heads

# Limits of the SwiGLU kernel, which holds a row and scales in shared memory.
GATED_COLUMNS = 8  # divides the number of columns
MOST_GATED_COLUMNS = 28672

# Limits of the grouped matmul kernel.
GROUP_ROWS = 128  # rows of a group
GROUP_COLUMNS = 64  # divides the numbers of inputs and of columns

_HOPPER_MULTIPROCESSORS = 132  # H100 or H200
# Shared memory per multiprocessor in KiB, by compute capability; 8.6, 8.9 and 12.0 have the least.
_SHARED_KIB = {"8.0": 164, "8.7": 164, "9.0": 228, "10.0": 228, "10.3": 228}
_LEAST_SHARED_KIB = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Tile sizes of the implementations. It is hashable; pass it to `jax.jit` as a static argument.

    The field defaults suit a CPU; `default_kernel_config` has values for other devices. The GPU
    kernels choose their sizes from each call's shape and the device.

    Attributes:
      row_tile: Number of query blocks that the XLA implementation processes together. With more
        rows the matrix products are larger, but the shorter lists of a tile wait for its longest
        list.
      block_step: Number of key blocks that one step of the XLA implementation gathers.
      decode_block_step: Number of key blocks that one step of decoding gathers.
      dense_rows: Number of query tokens in a tile of dense attention.
      dense_keys: Number of keys in a step of dense attention.
      dense_decode_keys: Number of keys in a step of dense decoding.
      interpret: Whether `implementation="mosaic_gpu"` runs in Pallas' interpreter, on any device.
        This is slow and only for tests.

    Raises:
      ValueError: If a size is not a positive integer.
    """

    row_tile: int = 4
    block_step: int = 1
    decode_block_step: int = 8
    dense_rows: int = 256
    dense_keys: int = 256
    dense_decode_keys: int = 1024
    interpret: bool = False

    def __post_init__(self) -> None:
        """Checks that every size is a positive integer."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be True or False, got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")


# A step on a CPU should stay in its caches; one on an accelerator should fill the chip.
_ON_ACCELERATORS = KernelConfig(
    row_tile=16,
    block_step=8,
    decode_block_step=64,
    dense_rows=1024,
    dense_keys=2048,
    dense_decode_keys=32768,
)


def default_kernel_config(platform: str | None = None) -> KernelConfig:
    """Returns the default tile sizes of a platform.

    Args:
      platform: `"cpu"`, `"gpu"` or `"tpu"`; by default the platform of JAX's default device.

    Returns:
      A `KernelConfig`.

    Example:
      >>> default_kernel_config("cpu") == KernelConfig()
      True
    """
    platform = jax.default_backend() if platform is None else platform
    return KernelConfig() if platform == "cpu" else _ON_ACCELERATORS


def num_multiprocessors() -> int:
    """Returns the number of multiprocessors (SMs) of the default device.

    Without a GPU it is 132, as for an H100 or H200: kernels are then interpreted or compiled for
    these.
    """
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else _HOPPER_MULTIPROCESSORS


def shared_memory() -> int:
    """Returns the bytes of shared memory per multiprocessor of the default device.

    The number follows from the compute capability (see CUDA's guide). Without a GPU it is an
    H100's.
    """
    device = jax.local_devices()[0]
    capability = device.compute_capability if device.platform == "gpu" else "9.0"
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) * 1024


def fills_rows(query: Any, key: Any) -> bool:
    """Whether a token's heads fill whole rows of `WIDE` or `head_dim` entries, the larger of both.

    Args:
      query: Queries `[B, T, N, H]`, arrays or their abstract shapes.
      key: Keys `[B, T, K, H]`.
    """
    head_dim = query.shape[3]
    wide = max(head_dim, WIDE)
    sizes = [x.shape[2] * head_dim for x in (query, key)]
    return wide % head_dim == 0 and wide % WIDE == 0 and not any(size % wide for size in sizes)


def why_not_shape(
    query: Any,
    *,
    block_size: int,
    row_size: int | None = None,
) -> str | None:
    """Returns why the kernels do not support queries of this shape and type, or `None` if they do.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per key block.
      row_size: Queries per query block in prefill, `block_size` by default.

    Returns:
      A reason to show to the caller.
    """
    num_tokens, head_dim = query.shape[1], query.shape[3]
    row_size = block_size if row_size is None else row_size
    if query.dtype.name not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {query.dtype.name}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"it takes a head_dim of at most 128 and a multiple of 8, not {head_dim}"
    if num_tokens == 1:
        if head_dim not in DECODE_HEADS:
            sizes = " or ".join(map(str, DECODE_HEADS))
            return f"it takes a head_dim of {sizes} in decode, not {head_dim}"
        if block_size not in DECODE_BLOCK_SIZES:
            return f"it takes a block_size of {' or '.join(map(str, DECODE_BLOCK_SIZES))} in decode"
    elif row_size != block_size:
        if (block_size, row_size) != (PREFILL_PAGE, PREFILL_PAGE_ROW):
            return (
                f"it takes a row_size like the block_size, or a block_size of {PREFILL_PAGE} with "
                f"a row_size of {PREFILL_PAGE_ROW}, in prefill, not {block_size} and {row_size}"
            )
    elif block_size not in PREFILL_BLOCK_SIZES:
        return f"it takes a block_size of {' or '.join(map(str, PREFILL_BLOCK_SIZES))} in prefill"
    return None


def why_not_swiglu_quantize(gate: Any) -> str | None:
    """Returns why the SwiGLU kernel does not support these rows, or `None` if it does.

    Args:
      gate: Products with the gate weights `[T, F]`, an array or its abstract shape.

    Returns:
      A reason to show to the caller.
    """
    rows, columns = gate.shape
    if gate.dtype.name != "bfloat16":
        return f"it takes products in bfloat16, not {gate.dtype.name}"
    if not rows:
        return "it takes at least one row"
    if columns % GATED_COLUMNS or not 0 < columns <= MOST_GATED_COLUMNS:
        return (
            f"it takes a multiple of {GATED_COLUMNS} columns, at most {MOST_GATED_COLUMNS}, not "
            f"{columns}"
        )
    return None


def why_not_grouped_shape(rows: Any, *weights: Any, is_transposed: bool = False) -> str | None:
    """Returns why the grouped matmul kernel does not support these arrays, or `None` if it does.

    Args:
      rows: Rows `[G, R, D]`, an array or its abstract shape.
      *weights: Stacked weights `[M, D, F]`, likewise: one array, or two for SwiGLU.
      is_transposed: Whether weights are `[M, F, D]`.

    Returns:
      A reason to show to the caller.
    """
    groups, num_rows, inputs = rows.shape
    types = sorted({x.dtype.name for x in (rows, *weights)})
    if types not in (["bfloat16"], ["float16"]):
        return f"it takes rows and weights all in bfloat16 or float16, not {' and '.join(types)}"
    if num_rows != GROUP_ROWS or not groups:
        return f"it takes groups of {GROUP_ROWS} rows, not {groups} groups of {num_rows}"
    shape = weights[0].shape
    own_inputs, columns = reversed(shape[1:]) if is_transposed else shape[1:]
    if own_inputs != inputs or any(x.shape != shape for x in weights):
        shapes = " and ".join(str(x.shape) for x in weights)
        return f"it takes weights of one shape with {inputs} inputs, not {shapes}"
    if not inputs or not columns or inputs % GROUP_COLUMNS or columns % GROUP_COLUMNS:
        return f"it takes multiples of {GROUP_COLUMNS} inputs and columns, not {inputs}, {columns}"
    return None


_NO_DERIVATIVE = (
    "the Mosaic GPU kernels have no derivative of their own; call sketchwalk_jax's "
    "block_sparse_attention, block_sparse_decode or dense_attention, which run them and are "
    "differentiable"
)


def without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that taking its derivative raises an error that says what to do."""
    wrapped = jax.custom_vjp(function)

    def refuse(*arguments: Any) -> NoReturn:
        raise NotImplementedError(_NO_DERIVATIVE)

    wrapped.defvjp(refuse, refuse)
    return wrapped
