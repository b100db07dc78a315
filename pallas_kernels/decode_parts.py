"""What the decode kernel computes with, and the kernel that adds the parts of split lists."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels.config import KernelConfig

MAX_SPLITS = 64
ROWS = 64  # of a matrix instruction
COLUMNS = 8  # the fewest of a matrix instruction
LOG2_E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
BY_HEAD = LAYOUT.reduce(0)


def num_splits(units: int, list_blocks: int, block_size: int, config: KernelConfig) -> int:
    """Parts into which lists are split: those that keep all multiprocessors busy, and no more.

    Args:
      units: Lists times key/value heads to attend with, in all sequences.
      list_blocks: Capacity of a list.
      block_size: Tokens per block.
      config: Tile sizes.

    Returns:
      A number from 1 to 64.
    """
    steps = -(-list_blocks * block_size // max(config.decode_keys, block_size))
    if config.decode_splits is not None:
        return min(config.decode_splits, steps, MAX_SPLITS)

    def time(splits: int) -> tuple[int, int]:  # in steps; starting and combining cost some
        waves = -(-units * splits // config.decode_programs)
        return waves * (-(-steps // splits) + 3) + (2 if splits > 1 else 0), splits

    return min(range(1, min(steps, MAX_SPLITS) + 1), key=time)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Everything static about a call.

    Attributes:
      batch: Sequences.
      units: Groups of heads that share a list and a key/value head, in each sequence.
      group: Query heads of a unit.
      kv_heads: Key/value heads.
      num_lists: Lists per sequence: 1, or one for each key/value or query head.
      head_dim: Features.
      key_tokens: Keys of a sequence that the cache holds.
      block_size: Tokens per block.
      step_keys: Keys of one step.
      stages: Steps that are in shared memory at a time.
      splits: Parts of a list.
      dtype: Type of queries, keys, values and output.
      scale: Factor of the scores.
      overlap: Whether the kernel that combines starts before the parts are done, and waits.
    """

    batch: int
    units: int
    group: int
    kv_heads: int
    num_lists: int
    head_dim: int
    key_tokens: int
    block_size: int
    step_keys: int
    stages: int
    splits: int
    dtype: Any
    scale: float
    overlap: bool = False

    @property
    def columns(self) -> int:
        """Heads, padded to what a matrix instruction takes."""
        return -(-self.group // COLUMNS) * COLUMNS

    @property
    def chunks(self) -> tuple[int, ...]:
        """Where the tiles of 64 features begin that together cover all; the last reaches back."""
        return (0,) if self.head_dim == ROWS else (0, self.head_dim - ROWS)

    @property
    def features(self) -> int:
        """Features of all chunks, one after the other."""
        return len(self.chunks) * ROWS

    @property
    def swizzle(self) -> int:
        """Bytes of the pattern of shared memory; a tile of it must divide the features."""
        return next(x for x in (128, 64, 32) if self.head_dim * 2 % x == 0)

    @property
    def step_blocks(self) -> int:
        """Blocks of one step."""
        return self.step_keys // self.block_size


def by_rows(x: Float[Array, "n"], shape: tuple[int, ...]) -> Float[Array, "m n"]:
    """Repeats a row: one number for each head."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (1,)), LAYOUT)


def store(ref: Any, x: Array, *, optimized: bool = False) -> None:
    """Writes to memory; JAX since 0.12 refuses unasked what has bank conflicts or is narrow."""
    write = getattr(plgpu, "store", None)
    if write is None:
        ref[...] = x
    else:
        write(ref, x, optimized=optimized)


def store_transposed(ref: Any, x: Float[Array, "m n"], *, is_swizzled: bool = False) -> None:
    """Writes `xᵀ` to shared memory, for matrix instructions and copies to read."""
    x = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    store(ref.transpose((1, 0)), x, optimized=is_swizzled)


def finish(
    o: Float[Array, "H n"], total: Float[Array, "n"], maximum: Float[Array, "n"]
) -> tuple[Float[Array, "H n"], Float[Array, "n"]]:
    """The output and the log-sum-exp of a finished sum; 0 and -inf where nothing was summed."""
    is_empty = total == 0.0
    safe = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, (maximum + jnp.log2(safe)) / LOG2_E)
    return o * by_rows(1.0 / safe, o.shape), lse


def combine_body(parts: Any, statistics: Any, out: Any, *rest: Any, shape: DecodeShape) -> None:
    """Adds the parts of 8 heads of one unit, in order, for one tile of their features."""
    *lse_out, tile = rest
    if shape.overlap:
        plgpu.griddepcontrol_wait()
    place, chunk = jax.lax.axis_index("unit"), jax.lax.axis_index("chunk")
    first = jax.lax.axis_index("heads") * COLUMNS
    columns, rows = pl.ds(first, COLUMNS), pl.ds(chunk * ROWS, ROWS)

    def by_head(split: int, index: int) -> Array:
        return plgpu.load(
            statistics.at[split, place, index, columns], layout=BY_HEAD, optimized=False
        )

    splits = range(shape.splits)
    maxima = [by_head(split, 0) for split in splits]
    maximum = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp2(x - maximum) for x in maxima]
    total = functools.reduce(jnp.add, [by_head(split, 1) * weights[split] for split in splits])

    def weighted(split: int) -> Array:
        part = parts.at[split, place, rows, columns]
        part = plgpu.load(part, layout=LAYOUT, optimized=False)
        return part * by_rows(weights[split], part.shape)

    o = functools.reduce(jnp.add, [weighted(split) for split in splits])
    o, lse = finish(o, total, maximum)
    if lse_out:

        @pl.when(chunk == 0)
        def _() -> None:
            store(lse_out[0].at[place, columns], lse)

    store_transposed(tile, o)
    plgpu.commit_smem()

    def write(heads: int) -> None:
        target = out.at[pl.ds(place * shape.group + first, heads), rows]
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, heads)], target)

    whole, remaining = divmod(shape.group, COLUMNS)
    if whole:
        pl.when(first < whole * COLUMNS)(lambda: write(COLUMNS))
    if remaining:
        pl.when(first == whole * COLUMNS)(lambda: write(remaining))
    plgpu.wait_smem_to_gmem(0)
