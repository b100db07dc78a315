"""The blocks that dense attention would look at most: an upper bound, at the price of dense."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention_mass import block_mass, token_mass
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.budget import BudgetPolicy, token_rows
from sketchwalk_jax.selection import BlockSelection

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleConfig(BudgetPolicy):
    """Keeps the blocks with the largest true attention mass.

    The score of block `j` for row `i` is the softmax weight that the row's queries, in all heads,
    put on the block's keys (`block_mass`); in decode, that of the current token alone. No other
    list of that length, shared by the heads and holding the forced blocks, covers more mass of the
    same queries and keys. It costs as much as dense attention and serves to judge the others.

    A row's mass counts the queries of the call at hand. Where a call continues a sequence in the
    middle of a block, that row chooses for its remaining queries; `chunk_size`, padding and batch
    change nothing.

    Attributes:
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> OracleConfig(density=0.1).phases
      ('prefill', 'decode')
    """

    def metadata_bytes(self, shape: LayerShape, positions: Int[Array, "B"]) -> Float[Array, "B"]:
        """It reads all keys."""
        by_token = shape.num_kv_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
        return (positions + 1).astype(jnp.float32) * float(by_token)

    def select_prefill(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> tuple[BlockSelection, PyTree]:
        """The heaviest blocks of every query block."""
        mass = block_mass(
            query,
            key,
            block_size=self.block_size,
            layer=layer,
            first_block=span.first_block,
            valid=span.valid,
            kv_lengths=span.end,
        )
        return self.keep_best(mass, span.rows(self.block_size)), walk

    def select_decode(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        positions: Int[Array, "B"],
    ) -> tuple[BlockSelection, PyTree]:
        """The blocks that the token itself attends to most."""
        mass = token_mass(
            query,
            key,
            block_size=self.block_size,
            layer=layer,
            kv_lengths=jnp.minimum(positions + 1, key.shape[2]),
        )
        return self.keep_best(mass, token_rows(positions, self.block_size)), walk
