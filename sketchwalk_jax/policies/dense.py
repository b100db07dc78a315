"""Dense attention as a policy: the reference for accuracy, behind the same interface."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import Span, StatelessPolicy
from sketchwalk_jax.selection import BlockSelection, full_selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(StatelessPolicy):
    """Attends to everything. Inference takes the dense path and keeps no statistics.

    Attributes:
      block_size: Granularity of the block lists, in tokens.
      dense_layers: Of no effect: every layer is dense.
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """It selects in neither phase."""
        return ()

    def select_prefill(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: None,
        walk: None,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> tuple[BlockSelection, None]:
        """Every causal block of every row."""
        rows = span.rows(self.block_size)
        num_blocks = key.shape[2] // self.block_size
        return full_selection(rows, num_blocks, block_size=self.block_size), None

    def select_decode(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: None,
        walk: None,
        *,
        layer: Int[Array, ""],
        positions: Int[Array, "B"],
    ) -> tuple[BlockSelection, None]:
        """Every block up to the token's own."""
        rows = (positions // self.block_size)[:, None]
        num_blocks = key.shape[2] // self.block_size
        return full_selection(rows.astype(jnp.int32), num_blocks, block_size=self.block_size), None
