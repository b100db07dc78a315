"""Block selection: budgets, top-τ selection and the block indices that attention takes.

Algorithm 1 step 7 and Algorithm 2 step 6 (arXiv:2602.07397).
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.precision import LARGEST
from sketchwalk_jax.pytree import register

_HIGHEST = float(np.nextafter(np.float32(LARGEST), np.float32(0)))
"""Scores are clipped below `LARGEST`, the rank of blocks that are always kept."""


@register
@dataclasses.dataclass(frozen=True)
class BlockSelection:
    """Block indices: the key blocks that each query block attends to.

    The head axis `M` has size 1 (one list for all heads), `K` (one per key/value head) or `N` (one
    per query head). In decode on XLA, blocks may have one token, so lists hold tokens. In prefill,
    the blocks may be shorter than the rows: pages of 16 keys for rows of 64 queries.

    Attributes:
      ids: Key block indices, int32 `[B, M, I, P]`, in ascending order within a list. Entries beyond
        the count are padding (by convention the number of key blocks) and are never read.
      counts: Number of blocks in each list, int32 `[B, M, I]`. If it is 0, the output row is zero.
      block_size: Tokens per key block.
      has_diagonal: Whether every list is known to contain the block of its own row.
      row_size: Queries per row in prefill, a multiple of `block_size`. `None` means `block_size`.
    """

    ids: Int[Array, "B M I P"]
    counts: Int[Array, "B M I"]
    block_size: int = dataclasses.field(default=64, metadata={"static": True})
    has_diagonal: bool = dataclasses.field(default=False, metadata={"static": True})
    row_size: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def queries_per_row(self) -> int:
        """Number of queries per row in prefill."""
        return self.block_size if self.row_size is None else self.row_size

    def attended_pairs(
        self, first_query: Int[Array, "B I"], num_queries: Int[Array, "B I"]
    ) -> Float[Array, "B"]:
        """Number of causal (query, key) pairs that the lists cover, averaged over heads.

        Args:
          first_query: Absolute position of the first query token of each row.
          num_queries: Number of query tokens of each row, 0 for padding rows. The queries of row
            `i` have positions `first_query[i] + 0 .. num_queries[i] - 1`, all in one block (of
            `queries_per_row` tokens).

        Returns:
          Number of pairs for each sequence, float32.
        """
        if self.queries_per_row != self.block_size:
            return self._pairs_of_pages(first_query, num_queries)
        if self.has_diagonal:  # no listed block is after it
            diagonal = jnp.minimum(self.counts, 1)
            below = self.counts - diagonal
        else:
            in_list = (
                jnp.arange(self.ids.shape[-1], dtype=jnp.int32)[None, None, None, :]
                < (self.counts[..., None])
            )
            row = (first_query // self.block_size)[:, None, :, None]
            below = jnp.sum(in_list & (self.ids < row), axis=-1, dtype=jnp.int32)
            diagonal = jnp.sum(in_list & (self.ids == row), axis=-1, dtype=jnp.int32)
        queries = num_queries.astype(jnp.float32)
        inside = causal_pairs(first_query % self.block_size, num_queries)
        pairs = (
            below.astype(jnp.float32) * queries[:, None, :] * float(self.block_size)
            + diagonal.astype(jnp.float32) * inside[:, None, :]
        )
        return jnp.sum(jnp.mean(pairs, axis=1), axis=-1)

    def _pairs_of_pages(
        self, first_query: Int[Array, "B I"], num_queries: Int[Array, "B I"]
    ) -> Float[Array, "B"]:
        """Computes `attended_pairs` for blocks that are shorter than rows.

        A query `t` tokens after the start of a block sees `min(t, block_size)` of its keys.
        """
        size = self.block_size
        place = jnp.arange(self.ids.shape[-1], dtype=jnp.int32)[None, None, None, :]
        start = self.ids * size

        def seen_before(position: Int[Array, "B I"]) -> Int[Array, "B M I P"]:
            """Pairs of each block's keys with all queries before a position."""
            behind = jnp.maximum(position[:, None, :, None] - start, 0)
            inside = jnp.minimum(behind, size)
            return inside * (inside + 1) // 2 + (behind - inside) * size

        found = seen_before(first_query + num_queries) - seen_before(first_query)
        found = jnp.where(place < self.counts[..., None], found, 0)
        by_row = jnp.sum(found, axis=-1, dtype=jnp.int32).astype(jnp.float32)
        return jnp.sum(jnp.mean(by_row, axis=1), axis=-1)


def causal_pairs(
    first_query: Int[Array, "*shape"], num_queries: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Counts pairs of queries `first .. first + n - 1` with all keys up to their own positions."""
    first = first_query.astype(jnp.float32)
    count = num_queries.astype(jnp.float32)
    return count * first + count * (count + 1.0) * 0.5


def block_budget(
    num_blocks: int,
    *,
    density: float = 1.0,
    top_blocks: int | None = None,
    sink_blocks: int = 0,
    local_blocks: int = 1,
) -> np.ndarray:
    """Number of blocks that each row keeps.

    Row `i` keeps `min(i + 1, max(sink + local, ceil(density · (i + 1))))`. The density is used as
    the decimal that it prints as, exactly, so that 0.1 of 30 blocks is 3 in every implementation.

    Args:
      num_blocks: Number of rows.
      density: Share of the causal blocks of a row, in (0, 1].
      top_blocks: If given, it replaces `density · (i + 1)`.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks that are always kept.

    Returns:
      int32 `[num_blocks]` on the host, non-decreasing.
    """
    share = Fraction(repr(float(density)))
    rows = np.arange(1, num_blocks + 1, dtype=np.int64)
    if top_blocks is None:
        # ceil(p/q · n) = -((-p · n) // q), in integers of any size
        wanted = -((-share.numerator * rows.astype(object)) // share.denominator)
    else:
        wanted = np.full(num_blocks, top_blocks)
    wanted = np.maximum(wanted, sink_blocks + local_blocks)
    return np.minimum(rows, wanted).astype(np.int32)


def select_blocks(
    scores: Float[Array, "B I J"],
    rows: Int[Array, "B I"],
    counts: Int[Array, "B I"],
    *,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int,
    row_size: int | None = None,
) -> BlockSelection:
    """Selects the `counts[i]` best causal blocks of every row, including forced blocks.

    Ties go to the lower block index. Lists are in ascending order, so the diagonal is last. A score
    that is not finite (NaN or an infinity of either sign) ranks below every finite one, so the
    forced blocks are always in the list.

    Args:
      scores: Block scores of each row, float32; only their order within a row matters.
      rows: Index of the last block of each row; blocks above it are not eligible.
      counts: Number of blocks to keep, at most `rows + 1` and at least the number of forced blocks.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      max_count: Static upper bound of `counts`: the length `P` of the lists.
      block_size: Tokens per block, recorded in the result.
      row_size: Queries per row, recorded in the result.

    Returns:
      A `BlockSelection` shared by all heads.
    """
    num_blocks = scores.shape[-1]
    max_count = min(max_count, num_blocks)
    columns = jnp.arange(num_blocks, dtype=jnp.int32)[None, None, :]
    row = rows[..., None]
    forced = (columns < sink_blocks) | (columns > row - local_blocks)
    scores = jnp.where(scores == 0.0, 0.0, scores)  # top_k would rank 0.0 above -0.0
    # Rank them like blocks above the diagonal, which lose ties by their higher index.
    scores = jnp.where(jnp.isfinite(scores), jnp.minimum(scores, _HIGHEST), -LARGEST)
    ranked = jnp.where(forced, LARGEST, scores)
    ranked = jnp.where(columns > row, -LARGEST, ranked)
    _, ids = jax.lax.top_k(ranked, max_count)
    kept = jnp.arange(max_count, dtype=jnp.int32)[None, None, :] < counts[..., None]
    ids = jnp.sort(jnp.where(kept, ids, num_blocks), axis=-1)
    return BlockSelection(ids[:, None], counts[:, None], block_size, row_size=row_size)


def select_blocks_per_head(
    scores: Float[Array, "B M I J"],
    rows: Int[Array, "B I"],
    counts: Int[Array, "B I"],
    *,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int,
) -> BlockSelection:
    """`select_blocks` for scores that differ by head: one list for each of `M` heads.

    Args:
      scores: Block scores of each head and row, float32; scores that are not finite rank last.
      rows: Absolute block index of each row.
      counts: Number of blocks that every head keeps.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      max_count: Static upper bound of `counts`.
      block_size: Tokens per block, recorded in the result.

    Returns:
      A `BlockSelection` with `M` lists per row.
    """
    batch, heads, num_rows, num_blocks = scores.shape
    merged = select_blocks(
        scores.reshape(batch * heads, num_rows, num_blocks),
        jnp.repeat(rows, heads, axis=0),
        jnp.repeat(counts, heads, axis=0),
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        max_count=max_count,
        block_size=block_size,
    )
    ids = merged.ids.reshape(batch, heads, num_rows, -1)
    return BlockSelection(ids, merged.counts.reshape(batch, heads, num_rows), block_size)


def full_selection(
    rows: Int[Array, "B I"], num_blocks: int, *, block_size: int = 64
) -> BlockSelection:
    """Lists every causal block of every row: dense attention as block indices.

    Args:
      rows: Absolute block index of each row.
      num_blocks: Number of key blocks `J`.
      block_size: Tokens per block.

    Returns:
      A `BlockSelection` shared by all heads with `counts = rows + 1`.
    """
    columns = jnp.arange(num_blocks, dtype=jnp.int32)
    ids = jnp.where(columns[None, None, :] <= rows[..., None], columns[None, None, :], num_blocks)
    counts = jnp.minimum(rows + 1, num_blocks)
    return BlockSelection(ids[:, None], counts[:, None], block_size)
