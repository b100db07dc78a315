"""First and most recent blocks, independent of content: attention sinks and a sliding window."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import BudgetPolicy, PyTree, Span
from sketchwalk_jax.selection import BlockSelection


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingConfig(BudgetPolicy):
    """Keeps the first `sink_blocks` blocks and the most recent ones up to the budget.

    Row `i` with budget `c` keeps `0 .. sink_blocks - 1` and `i - (c - sink_blocks) + 1 .. i`. This
    is the pattern of StreamingLLM (arXiv:2309.17453) in blocks, but the window grows with the row,
    so that its density is the requested one. The policy reads no query or key: it is the baseline
    that policies that read them must beat.

    Attributes:
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Minimum number of last blocks that every row keeps.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> StreamingConfig(density=0.1).sink_blocks
      1
    """

    heads_on_mesh = "combined"

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, PyTree]:
        """Lists the first and most recent blocks of every row."""
        rows, num_blocks = span.rows(self.block_size), key.shape[2] // self.block_size
        counts = self.counts(rows, num_blocks)[..., None]
        place = jnp.arange(self.budget_table(num_blocks)[1], dtype=jnp.int32)[None, None, :]
        skipped = rows[..., None] + 1 - counts  # blocks between the first and the recent ones
        ids = jnp.where(place < self.sink_blocks, place, place + skipped)
        ids = jnp.where(place < counts, ids, num_blocks)
        return BlockSelection(ids[:, None], counts[:, None, :, 0], self.block_size), walk
