"""What policies without a memory share: a density, forced blocks, and nothing to keep."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import StatelessPolicy
from sketchwalk_jax.selection import BlockSelection, block_budget, select_blocks

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetPolicy(StatelessPolicy):
    """A policy that keeps `block_budget` blocks of every row and carries no state.

    Row `i` keeps `min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))` blocks, the
    forced ones among them; a subclass says which are the others.

    Attributes:
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.
    """

    density: float = 0.2
    sink_blocks: int = 1
    local_blocks: int = 1
    dense_layers: int = 2

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_density(self.density)
        for name, least in (("sink_blocks", 0), ("local_blocks", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    def budget(self, num_blocks: int) -> np.ndarray:
        """Blocks that each of `num_blocks` rows keeps, int32 on the host, non-decreasing."""
        return block_budget(
            num_blocks,
            density=self.density,
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
        )

    def row_counts(self, rows: Int[Array, "B I"], num_blocks: int) -> Int[Array, "B I"]:
        """Blocks that the given rows keep; padding rows beyond the cache count as its last."""
        return jnp.asarray(self.budget(num_blocks))[jnp.minimum(rows, num_blocks - 1)]

    def keep_best(self, scores: Float[Array, "B I J"], rows: Int[Array, "B I"]) -> BlockSelection:
        """The blocks with the highest scores, up to each row's budget, forced ones included."""
        num_blocks = scores.shape[-1]
        return select_blocks(
            scores,
            rows,
            self.row_counts(rows, num_blocks),
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
            max_count=int(self.budget(num_blocks)[-1]),
            block_size=self.block_size,
        )


def check_density(density: Any) -> None:
    """Raises unless a share is a number in (0, 1]."""
    if not (isinstance(density, int | float) and math.isfinite(density) and 0.0 < density <= 1.0):
        raise ValueError(f"density must be in (0, 1], got {density!r}")


def token_rows(positions: Int[Array, "B"], block_size: int) -> Int[Array, "B 1"]:
    """The block of one token per sequence, as the single row of a decode step."""
    return (positions // block_size)[:, None]
