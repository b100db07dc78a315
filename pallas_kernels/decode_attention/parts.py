"""Attention of one token per sequence, in parts of its list: what both decode kernels share.

This is step 7 of Algorithm 2. A unit is the query heads that share a list of block indices and a
key/value head. A batch of one has fewer units than the GPU has multiprocessors (SMs), so lists are
split, and a second kernel adds the parts in a fixed order; a list in one part needs none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    KernelConfig,
    default_kernel_config,
    why_not_shape,
    without_derivative,
)
from sketchwalk_jax.pallas_kernels.lib import ops

COLUMNS = 8  # heads per thread block of the combining kernel
FEATURES = 64  # features per thread block of the combining kernel
STEP = 64  # keys per step, at least
_MAX_SPLITS = 64  # parts per list


def heads_of_unit(num_heads: int, kv_heads: int, num_lists: int, *, most: int) -> int:
    """Returns the query heads per unit, which share a list and a key/value head; at most `most`."""
    group = num_heads // max(num_lists, kv_heads)
    return max(x for x in range(1, most + 1) if group % x == 0)


def num_splits(units: int, list_blocks: int, block_size: int, *, programs: int) -> int:
    """Chooses the number of parts per list: the fewest that keep all multiprocessors busy.

    Args:
      units: Units in all sequences.
      list_blocks: Capacity of a list.
      block_size: Tokens per block.
      programs: Thread blocks that the GPU runs at a time.

    Returns:
      A number from 1 to 64.
    """
    steps = -(-list_blocks * block_size // max(STEP, block_size))

    def time(splits: int) -> tuple[int, int]:  # in steps, with the costs of launching and combining
        waves = -(-units * splits // programs)
        return waves * (-(-steps // splits) + 3) + (2 if splits > 1 else 0), splits

    return min(range(1, min(steps, _MAX_SPLITS) + 1), key=time)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static parameters of a call.

    Attributes:
      batch: Sequences.
      units: Groups of heads that share a list and a key/value head, in each sequence.
      group: Query heads of a unit.
      kv_heads: Key/value heads.
      num_lists: Lists per sequence: 1, or one for each key/value or query head.
      dtype: Type of queries, keys, values and output.
      exponent: Factor of the scores in base 2.
      return_lse: Whether to return the log-sum-exp.
      head_dim: Features per head, with padding.
      stages: Steps in shared memory at a time.
      splits: Parts per list.
    """

    batch: int
    units: int
    group: int
    kv_heads: int
    num_lists: int
    dtype: Any
    exponent: float
    return_lse: bool
    head_dim: int
    stages: int
    splits: int

    head_dims: ClassVar[tuple[int, ...] | None] = None  # that the kernel takes, if not all
    most_heads: ClassVar[int]  # per unit

    @classmethod
    def of(
        cls, shape: dict[str, Any], query: Any, key: Any, ids: Any, block_size: int, interpret: bool
    ) -> Self:
        """Returns the tiling for a call with these arrays; `shape` has the first fields."""
        raise NotImplementedError

    @property
    def places(self) -> int:
        """Number of units in all sequences."""
        return self.batch * self.units

    @property
    def columns(self) -> int:
        """Heads per unit, padded to a multiple of the combining kernel's 8."""
        return -(-self.group // COLUMNS) * COLUMNS

    @property
    def features(self) -> int:
        """Features of the kernels' output."""
        return self.head_dim

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the output and, if requested, the log-sum-exp."""
        out = [jax.ShapeDtypeStruct((self.places * self.group, self.features), self.dtype)]
        lse = jax.ShapeDtypeStruct((self.places, self.columns), jnp.float32)
        return [*out, lse] if self.return_lse else out

    @property
    def parts(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of each part's sums, and of their running maxima and denominators."""
        shape = (self.splits, self.places)
        return [
            jax.ShapeDtypeStruct((*shape, self.features, self.columns), jnp.float32),
            jax.ShapeDtypeStruct((*shape, 2, self.columns), jnp.float32),
        ]

    @property
    def attend_options(self) -> dict[str, Any]:
        """Options of the kernel that attends to parts."""
        return {
            "out_type": self.parts if self.splits > 1 else self.outputs,
            "grid": (self.batch, self.splits, self.units),
            "grid_names": ("batch", "split", "unit"),  # the last varies fastest
        }

    @property
    def combine_options(self) -> dict[str, Any]:
        """Options of the kernel that adds the parts."""
        return {
            "out_type": self.outputs,
            "grid": (self.places, self.columns // COLUMNS, self.features // FEATURES),
            "grid_names": ("unit", "heads", "chunk"),
            "kernel_name": "combine_decode",
        }

    def run(
        self, attend: Callable[..., Any], combine: Callable[..., Any], arrays: Sequence[Array]
    ) -> tuple[Array, Array | None]:
        """Runs both kernels, or one for lists in one part; returns output and log-sum-exp."""
        outputs = without_derivative(attend)(*arrays)
        out, *lse = combine(*outputs) if self.splits > 1 else outputs
        out = out.reshape(self.batch, 1, self.units * self.group, self.features)
        if not lse:
            return out, None
        found = lse[0].reshape(self.batch, self.units, -1)[:, :, : self.group]
        return out, found.reshape(out.shape[:3])


def add_parts(
    parts: Any, statistics: Any, place: Any, rows: Any, columns: Any, splits: Sequence[Any]
) -> tuple[Float[Array, "64 8"], Float[Array, "8"], Float[Array, "8"]]:
    """Returns `Oᵀ`, denominator and running maximum of some parts, for 8 heads of one unit.

    Args:
      parts: Sums of each part, `[splits, places, features, heads]`.
      statistics: Running maxima and denominators of the sums, `[splits, places, 2, heads]`.
      place: Index of the unit among those of all sequences.
      rows: Slice of 64 features.
      columns: Slice of 8 heads.
      splits: Indices of the parts, in order.
    """

    def by_head(split: Any, index: int) -> Array:
        return ops.read(statistics.at[split, place, index, columns], ops.BY_COLUMN)

    maxima = [by_head(split, 0) for split in splits]
    maximum = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp2(x - maximum) for x in maxima]
    totals = [by_head(split, 1) * weight for split, weight in zip(splits, weights, strict=True)]
    total = functools.reduce(jnp.add, totals)

    def weighted(split: Any, weight: Array) -> Array:
        part = ops.read(parts.at[split, place, rows, columns])
        return part * along_keys(weight, part.shape)

    o = [weighted(split, weight) for split, weight in zip(splits, weights, strict=True)]
    return functools.reduce(jnp.add, o), total, maximum


def finish(
    o: Float[Array, "H n"], total: Float[Array, "n"], maximum: Float[Array, "n"]
) -> tuple[Float[Array, "H n"], Float[Array, "n"]]:
    """Returns output and log-sum-exp of a finished sum; 0 and -inf if no key was added."""
    is_empty = total == 0.0
    safe = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, (maximum + jnp.log2(safe)) / math.log2(math.e))
    return o * along_keys(1.0 / safe, o.shape), lse


def along_keys(x: Float[Array, "n"], shape: tuple[int, ...]) -> Float[Array, "m n"]:
    """Repeats a row of one number per head."""
    return ops.spread(x, shape, 1)


def prepare[T: Tiling](
    tiling: type[T],
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M 1 P"],
    counts: Int[Array, "B M 1"],
    *,
    layer: Int[Array, ""] | int,
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    return_lse: bool = False,
    kernel_config: KernelConfig | None = None,
) -> tuple[T, tuple[Array, ...], bool]:
    """Checks a call of exact attention of one token per sequence over its listed blocks.

    Args:
      tiling: Class of the kernel.
      query: The current token's queries, bfloat16 or float16.
      key: Stacked cache of keys, the current token's included; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Block indices in any order, for all heads (`M = 1`), each key/value head or each query
        head.
      counts: Number of indices in each list; later entries of `ids` are never read.
      layer: Layer of the cache, which is read in place.
      kv_lengths: Number of keys in each sequence; the cache may hold anything after them.
      scale: Factor of the scores.
      block_size: Tokens per block: 64, 128, or the 16 of a page.
      return_lse: Whether to return the log-sum-exp of the scaled scores.
      kernel_config: Tile sizes; they change the result only by rounding.

    Returns:
      Tiling, the lists' arrays, and whether the kernels are interpreted. `Tiling.run` returns the
      output in query's dtype, and with `return_lse` the float32 log-sum-exp `[B, 1, N]`, else
      `None`. It has no derivative.

    Raises:
      ValueError: If the kernel does not support these arguments.
    """
    kernel_config = default_kernel_config() if kernel_config is None else kernel_config
    reason = why_not_shape(query, block_size=block_size, decode_heads=tiling.head_dims)
    if reason is not None:
        raise ValueError(f"query and block_size must fit the kernel: {reason}")
    batch, _, num_heads, _ = query.shape
    kv_heads, num_lists = key.shape[3], ids.shape[1]
    group = heads_of_unit(num_heads, kv_heads, num_lists, most=tiling.most_heads)
    shape = {
        "batch": batch,
        "units": num_heads // group,
        "group": group,
        "kv_heads": kv_heads,
        "num_lists": num_lists,
        "dtype": query.dtype,
        "exponent": scale * math.log2(math.e),
        "return_lse": return_lse,
    }
    interpret = kernel_config.interpret
    own = tiling.of(shape, query, key, ids, block_size, interpret)
    lists = (ids[:, :, 0], counts[:, :, 0], jnp.asarray(layer, jnp.int32).reshape(1))
    return own, (*lists, kv_lengths.astype(jnp.int32)), interpret
