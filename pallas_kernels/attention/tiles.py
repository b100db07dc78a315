"""Tiles of queries, softmax, mask and call of the prefill kernels.

This is step 8 of Algorithm 1. A tile is 64 queries of one sequence, in up to two query heads that
share keys and a list of block indices. Steps run from the end of a list to its beginning:

    S = Q Kᵀ                                    [queries, keys]
    m' = max(m, S over keys),  P = 2^(c S - c m'),  c = scale · log2(e)
    O = O 2^(c m - c m') + P V                  [queries, features]
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    KernelConfig,
    default_kernel_config,
    why_not_shape,
    without_derivative,
)
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.precision import FIRST_MAXIMUM, MASK_VALUE

QUERIES = 64  # per tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static parameters of a call.

    Attributes:
      batch: Sequences.
      tiles: Tiles of 64 queries in a sequence.
      heads: Query heads.
      kv_heads: Key/value heads.
      head_dim: Features per head, 64 or 128.
      lists: Lists per query block: 1, `kv_heads` or `heads`.
      subblocks: Tiles per query block.
      exponent: Factor of the scores times `log2(e)`, for powers of 2.
    """

    batch: int
    tiles: int
    heads: int
    kv_heads: int
    head_dim: int
    lists: int
    subblocks: int
    exponent: float

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def together(self) -> int:
        """Heads per tile, which share a list and a key/value head."""
        return 1 if self.group == 1 or self.lists == self.heads else 2

    @property
    def head_pairs(self) -> int:
        """Tiles per 64 queries to cover all heads of a group."""
        return -(-self.group // self.together)

    @property
    def units(self) -> int:
        """Tiles of all sequences and heads."""
        return self.batch * self.tiles * self.kv_heads * self.head_pairs

    def locate(self, place: Any) -> tuple[Any, Any, Any, Any]:
        """Returns row, sequence, key/value head and heads of the tile at a place in the order.

        Late query blocks, whose lists are long, come first. Tiles of one key/value head follow each
        other, since keys and values of one head may fit in the GPU's cache.
        """
        place, pair = divide(place, self.head_pairs)
        place, batch = divide(place, self.batch)
        kv_head, row = divide(place, self.tiles)
        return self.tiles - 1 - row, batch, kv_head, pair


def divide(x: Any, divisor: int) -> tuple[Any, Any]:
    """Returns quotient and remainder."""
    if divisor == 1:
        return x, 0
    return jax.lax.div(x, divisor), jax.lax.rem(x, divisor)


@dataclasses.dataclass(frozen=True)
class Tile:
    """64 queries of one sequence, in the heads that one thread block computes.

    Attributes:
      tiling: Tiling of the call.
      row: Tile index within the sequence.
      batch: Sequence.
      kv_head: Key/value head.
      pair: Index of the heads within the group.
    """

    tiling: Tiling
    row: Any
    batch: Any
    kv_head: Any
    pair: Any

    @property
    def rows(self) -> Any:
        """Slice of the sequence's queries that the tile covers."""
        return pl.ds(self.row * QUERIES, QUERIES)

    def head(self, index: Any) -> Any:
        """Returns the query head at an index of the tile, clamped to the group's last head."""
        member = jnp.minimum(self.pair * self.tiling.together + index, self.tiling.group - 1)
        return self.kv_head * self.tiling.group + member

    def has_head(self, index: Any) -> Any:
        """Whether the group has a head at this index of the tile."""
        return self.pair * self.tiling.together + index < self.tiling.group

    @property
    def list(self) -> Any:
        """Index of the tile's list within its query block."""
        if self.tiling.lists == 1:
            return 0
        return self.kv_head if self.tiling.lists == self.tiling.kv_heads else self.head(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """Arrays in global memory, as the kernels get them, then shared memory.

    Attributes:
      query, key, value, ids, counts, layer, first_block, kv_lengths: The kernel's arguments.
      out: Output `[B, T, N, H]`.
      out_lse: Log-sum-exp `[B, N, T]`, or `None` if not requested.
      queries: Queries of the tile's heads.
      keys: `[stages, keys, H]`.
      values: `[stages, keys, H]`.
    """

    query: Any
    key: Any
    value: Any
    ids: Any
    counts: Any
    layer: Any
    first_block: Any
    kv_lengths: Any
    out: Any
    out_lse: Any = None
    queries: Any
    keys: Any
    values: Any

    @classmethod
    def of(cls, arrays: tuple[Any, ...], scratch: dict[str, Any]) -> Self:
        """Returns the references of a kernel's arguments, results and shared memory."""
        names = [field.name for field in dataclasses.fields(Refs)]
        return cls(**dict(zip(names, arrays, strict=False)), **scratch)


class Softmax(NamedTuple):
    """Running maximum of each query's scores, and sum of its weights."""

    maximum: Any
    denominator: Any

    @classmethod
    def start(cls, rows: int) -> "Softmax":
        """Returns the state before the first step."""
        maximum = ops.full((rows,), FIRST_MAXIMUM, ops.BY_ROW)
        return cls(maximum, ops.full((rows,), 0.0, ops.BY_ROW))

    def add(self, scores: Any, exponent: float) -> tuple[Any, Any, "Softmax"]:
        """Returns weights `2^(c s - c m)` of a step, the old sums' factor, and the new state."""
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=1))
        decay = jnp.exp2((self.maximum - maximum) * exponent)
        weights = jnp.exp2(scores * exponent - ops.spread(maximum * exponent, scores.shape, 0))
        denominator = self.denominator * decay + jnp.sum(weights, axis=1)
        return weights, decay, Softmax(maximum, denominator)

    def finish(self, sums: Any, exponent: float) -> tuple[Any, Any]:
        """Returns output and log-sum-exp, given the sums of weighted values."""
        is_empty = self.denominator == 0.0
        safe = jnp.where(is_empty, 1.0, self.denominator)
        lse = (self.maximum * exponent + jnp.log2(safe)) * math.log(2.0)
        out = sums * ops.spread(1.0 / safe, sums.shape, 0)
        return out, jnp.where(is_empty, -jnp.inf, lse)


def nothing(rows: int, head_dim: int) -> tuple[Any, Any]:
    """Returns output and log-sum-exp of queries without keys."""
    return ops.full((rows, head_dim), 0.0), ops.full((rows,), -jnp.inf, ops.BY_ROW)


def mask_pages(
    scores: Any, pages: Iterable[tuple[Any, Any]], size: int, start: Any, length: Any
) -> Any:
    """Masks keys after their query or beyond the sequence, and pages missing from the list.

    Args:
      scores: Scores of a step, whose rows are the tile's queries in one or several heads.
      pages: Index of each page of the step, and whether the list has it.
      size: Keys per page.
      start: Position of the tile's first query.
      length: Keys in the sequence.
    """
    # A thread has columns 8 j + 2 (thread % 4) + (0, 1). Without the thread's part, columns and
    # their pages are compile-time constants, so that no registers hold them from tile to tile.
    column = ops.matrix_index(scores.shape, 1)
    own = column & 6
    column = column & ~6
    query = ops.matrix_index(scores.shape, 0) & (QUERIES - 1)
    last = jnp.minimum(start + query, length - 1)
    reach = jnp.full_like(column, -1)
    for place, (page, there) in enumerate(pages):
        visible = jnp.where(there, last - page * size, -1)
        reach = jnp.where(column < place * size, reach, visible + place * size)
    return jnp.where(column <= reach - own, scores, MASK_VALUE)


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of a kernel.

    Attributes:
      fields: The fields of `Tiling`.
      dtype: Type of the queries.
      block_size: Keys per listed block.
      options: Options of `ops.kernel`.
      arrays: Arguments of the kernel.
      head_dim: Features of a head, without padding.
    """

    fields: dict[str, Any]
    dtype: Any
    block_size: int
    options: dict[str, Any]
    arrays: tuple[Array, ...]
    head_dim: int

    def run(self, kernel: Callable[..., Any]) -> tuple[Array, Array | None]:
        """Runs a kernel; returns the output, and the log-sum-exp if requested."""
        out, *lse = without_derivative(kernel)(*self.arrays)
        return out[..., : self.head_dim], jnp.swapaxes(lse[0], 1, 2) if lse else None


def prepare(
    query: Float[Array, "B T N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M I P"],
    counts: Int[Array, "B M I"],
    *,
    layer: Int[Array, ""] | int,
    first_block: Int[Array, "B"],
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    row_size: int | None = None,
    return_lse: bool = False,
    kernel_config: KernelConfig | None = None,
) -> Call:
    """Checks a call of causal attention of each query block over its list of key blocks.

    List `i` belongs to query block `first_block + i`. It is ascending and names no block after that
    query block. Tiles of queries beyond `kv_lengths` give 0.

    With a `block_size` of 16 and a `row_size` of 64, lists name pages of 16 keys for query blocks
    of 64. A list may name any of its query block's own four pages; no query sees a later key there.

    Args:
      query: Queries from a query block's start on, bfloat16 or float16, head_dim at most 128.
      key: Stacked cache of keys; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Block indices for all heads (`M = 1`), for each key/value head or for each query head.
      counts: Number of indices in each list; later entries of `ids` are never read.
      layer: Layer of the cache.
      first_block: Query block of each sequence's first query, counted from position 0.
      kv_lengths: Number of keys in each sequence; the cache may hold anything after them.
      scale: Factor of the scores, greater than 0.
      block_size: Keys per listed block: 64 or 128, or 16 for pages.
      row_size: Queries per query block, `block_size` by default; required with pages.
      return_lse: Whether to return the log-sum-exp of the scaled scores as well.
      kernel_config: Tile sizes; they change the result only by rounding.

    Returns:
      A call that returns the output, and with `return_lse` the float32 log-sum-exp, else `None`. It
      has no derivative.

    Raises:
      ValueError: If the kernels do not support these arguments.
    """
    kernel_config = default_kernel_config() if kernel_config is None else kernel_config
    row_size = block_size if row_size is None else row_size
    _check_arguments(query, key, scale, block_size, row_size)
    head_dim = query.shape[-1]
    query, key, value, index = _with_whole_heads(query, key, value, layer)
    batch, tokens, heads, padded = query.shape
    out_type = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32))
    fields = {
        "batch": batch,
        "tiles": tokens // QUERIES,
        "heads": heads,
        "kv_heads": key.shape[3],
        "head_dim": padded,
        "lists": ids.shape[1],
        "subblocks": row_size // QUERIES,
        "exponent": scale * math.log2(math.e),
    }
    options = {"out_type": out_type, "interpret": kernel_config.interpret}
    integers = (x.astype(jnp.int32) for x in (first_block, kv_lengths))
    arrays = (query, key, value, ids, counts, index.reshape(1), *integers)
    return Call(fields, query.dtype, block_size, options, arrays, head_dim)


def _check_arguments(query: Any, key: Any, scale: float, block_size: int, row_size: int) -> None:
    """Raises an error for arguments that the kernels do not support."""
    if reason := why_not_shape(query, block_size=block_size, row_size=row_size):
        raise ValueError(f"query, block_size and row_size must fit the kernel: {reason}")
    if query.shape[1] % row_size:
        raise ValueError(f"query must hold whole rows of {row_size}, got {query.shape[1]} tokens")
    if key.shape[2] % block_size:
        raise ValueError(f"key must hold whole blocks of {block_size}, got {key.shape[2]} tokens")
    if not scale > 0.0:
        raise ValueError(f"scale must be greater than 0, got {scale}")


def _with_whole_heads(query: Array, key: Array, value: Array, layer: Array | int) -> Any:
    """Pads heads of sizes other than 64 and 128 with zeros.

    Returns queries, keys, values and layer. Padding copies only one layer of the cache.
    """
    head_dim, layer = query.shape[-1], jnp.asarray(layer, jnp.int32)
    padded = 64 if head_dim <= 64 else 128
    if padded == head_dim:
        return query, key, value, layer
    after = ((0, 0),) * 3 + ((0, padded - head_dim),)

    def one_layer(cache: Array) -> Array:
        return jnp.pad(jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False), after)[None]

    return jnp.pad(query, after), one_layer(key), one_layer(value), jnp.zeros_like(layer)
