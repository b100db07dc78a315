"""Blocks drawn at random: what the density alone is worth."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.budget import BudgetPolicy, token_rows
from sketchwalk_jax.selection import BlockSelection

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomConfig(BudgetPolicy):
    """Keeps first and diagonal blocks and fills the budget with others, drawn without replacement.

    Block `j` of row `i` in layer `l` has the score `u(seed, l, i, j)`, uniform in [0, 1), and the
    best scores are kept. The draw depends on nothing else: neither on prompt length, chunking or
    padding nor on the sequence, so all sequences of all batches share it, and so does every token
    that is decoded in block `i`. Draw again with another seed.

    Attributes:
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      dense_layers: Leading layers that stay dense.
      seed: Seed of the draw, from 0 to 2^32 - 1.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> RandomConfig(density=0.1, seed=1).seed
      1
    """

    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not is_integer or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {self.seed!r}")

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
        """Random blocks for every query block."""
        rows = span.rows(self.block_size)
        return self._select(rows, layer, key.shape[2] // self.block_size), walk

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
        """The random blocks of the token's own block."""
        rows = token_rows(positions, self.block_size)
        return self._select(rows, layer, key.shape[2] // self.block_size), walk

    def _select(
        self, rows: Int[Array, "B I"], layer: Int[Array, ""], num_blocks: int
    ) -> BlockSelection:
        # Named, so that JAX's default generator has no say in what is drawn; and one key for every
        # (row, block), so that the size of the cache has none either.
        in_layer = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), layer)

        def score(row: Int[Array, ""], block: Int[Array, ""]) -> Float[Array, ""]:
            key = jax.random.fold_in(jax.random.fold_in(in_layer, row), block)
            return jax.random.uniform(key, (), jnp.float32)

        blocks = jnp.arange(num_blocks, dtype=jnp.int32)
        by_row = jax.vmap(jax.vmap(score, (None, 0)), (0, None))
        return self.keep_best(jax.vmap(by_row, (0, None))(rows, blocks), rows)
