"""Random blocks: a baseline that shows what the density alone achieves."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import BudgetPolicy, PyTree, Span


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomConfig(BudgetPolicy):
    """Keeps first and diagonal blocks, and fills the budget with random others.

    Block `j` of row `i` in layer `l` has the score `u(seed, l, i, j)`, uniform in [0, 1), and the
    best scores are kept. The scores depend on nothing else: not on prompt length, chunks, padding
    or sequence. So all sequences of all batches share them, and so do all tokens that are decoded
    in block `i`. Another seed draws again.

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

    heads_on_mesh = "combined"

    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not is_integer or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {self.seed!r}")

    def score(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> Float[Array, "B I J"]:
        """Draws `u(seed, l, i, j)`."""
        # Name the generator, so that JAX's default generator does not change the draw. Use one key
        # per (row, block), so that the cache's size does not change it either.
        in_layer = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), layer)

        def draw(row: Int[Array, ""], block: Int[Array, ""]) -> Float[Array, ""]:
            key = jax.random.fold_in(jax.random.fold_in(in_layer, row), block)
            return jax.random.uniform(key, (), jnp.float32)

        blocks = jnp.arange(key.shape[2] // self.block_size, dtype=jnp.int32)
        by_row = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))
        return jax.vmap(by_row, (0, None))(span.rows(self.block_size), blocks)
