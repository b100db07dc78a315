"""How attention and selection run: sizes of tiles, and what the kernels can take.

None of the sizes changes a result beyond rounding. The kernels themselves import Pallas, which
takes long, so that whoever calls them imports them late; this file imports little.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax

# Limits of the attention kernels.
PREFILL_BLOCK_SIZES = (64, 128)  # of lists and of their rows
PREFILL_PAGE, PREFILL_PAGE_ROW = 16, 64  # keys of a page, and queries of a row of lists of pages
DECODE_BLOCK_SIZES = (16, 64, 128)
MAX_HEAD_DIM = 128
# To pad other heads would copy the layer of the cache for each token.
DECODE_HEADS = (64, 128)

# Limits of the selection kernels, each of which has a row of blocks in its registers.
MAX_BLOCKS = 16384
MAX_POWER = 32
WIDE = 128  # entries of heads that are read together, a number for each thread of a warpgroup
LEAST_BLOCK = 16  # tokens of a block whose sketches are summed up
LEAST_CHUNK = 32  # entries of sketches that are multiplied at a time, or twice this
SCORED_BLOCK = 64  # tokens of a block whose keys are scored one by one
SCORED_PAGES = 4  # pages of such a block, which are listed by themselves
SCORED_HEADS = (64, 128)  # features of their heads
SCORED_GROUP = 8  # heads that share keys, for one token
MAX_TOKEN_HEADS = 64  # of one token, put together by one program
MAX_TOKEN_SCORES = 2**19  # of all of its heads, one for each block or page
WRITTEN_CHANNELS = 128  # of a token's keys in all heads, or a multiple

# Limits of the kernel for rows of a gated mlp, which has a row and scales in shared memory.
GATED_COLUMNS = 8  # or a multiple
MOST_GATED_COLUMNS = 28672

_HOPPER_MULTIPROCESSORS = 132  # of an H100 or H200
# Shared memory of a multiprocessor, in KiB, by compute capability; 8.6, 8.9 and 12.0 have least.
_SHARED_KIB = {"8.0": 164, "8.7": 164, "9.0": 228, "10.0": 228, "10.3": 228}
_LEAST_SHARED_KIB = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Tile sizes of the implementations. It is hashable; pass it to `jax.jit` as a static argument.

    The defaults of the fields are those of a CPU; `default_kernel_config` knows other devices.
    The kernels choose their own sizes by the shape of each call and by the device.

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
        It is slow, and shows what a kernel does.

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
    """The tile sizes used where none are given.

    Args:
      platform: `"cpu"`, `"gpu"` or `"tpu"`; that of JAX's default device if left out.

    Returns:
      A `KernelConfig`.

    Example:
      >>> default_kernel_config("cpu") == KernelConfig()
      True
    """
    platform = jax.default_backend() if platform is None else platform
    return KernelConfig() if platform == "cpu" else _ON_ACCELERATORS


def num_multiprocessors() -> int:
    """Multiprocessors of the default device, or of an H100 or H200 (132) where that is no GPU.

    Without a GPU, kernels are interpreted, or compiled for these.
    """
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else _HOPPER_MULTIPROCESSORS


def shared_memory() -> int:
    """Bytes of shared memory of a multiprocessor of the default device.

    They are those of its compute capability (CUDA's guide has a table); without a GPU, those of an
    H100 or H200.
    """
    device = jax.local_devices()[0]
    capability = device.compute_capability if device.platform == "gpu" else "9.0"
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) * 1024


def fills_rows(query: Any, key: Any) -> bool:
    """Whether the heads of a token fill whole rows of `WIDE` entries, or of a wider head's.

    Args:
      query: Queries `[B, T, N, H]`, arrays or their abstract shapes.
      key: Keys `[B, T, K, H]`.
    """
    head_dim = query.shape[3]
    wide = max(head_dim, WIDE)
    sizes = [x.shape[2] * head_dim for x in (query, key)]
    return wide % head_dim == 0 and wide % WIDE == 0 and not any(size % wide for size in sizes)


def why_not_shape(query: Any, *, block_size: int, row_size: int | None = None) -> str | None:
    """Why the kernels cannot take queries of this shape and type, or `None` if they can.

    Args:
      query: The queries `[B, T, N, H]`, an array or its abstract shape; `T = 1` is decoding.
      block_size: Tokens per key block.
      row_size: Queries per row of lists in prefill, `block_size` unless given.

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
    """Why the kernel for rows of a gated mlp cannot take such rows, or `None` if it can.

    Args:
      gate: Products with the weights of gate `[T, F]`, an array or its abstract shape.

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


_NO_DERIVATIVE = (
    "the Mosaic GPU kernels have no derivative of their own; call sketchwalk_jax's "
    "block_sparse_attention, block_sparse_decode or dense_attention, which run them and are "
    "differentiable"
)


def without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays; taking its derivative raises an error that says what to do."""
    wrapped = jax.custom_vjp(function)

    def refuse(*arguments: Any) -> NoReturn:
        raise NotImplementedError(_NO_DERIVATIVE)

    wrapped.defvjp(refuse, refuse)
    return wrapped
