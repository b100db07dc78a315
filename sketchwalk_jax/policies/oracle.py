"""Keeps the blocks with the most dense attention: an upper bound, as costly as dense."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.mass import block_mass, token_mass
from sketchwalk_jax.policies.base import BudgetPolicy, LayerShape, PyTree, Span
from sketchwalk_jax.validation import check_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleConfig(BudgetPolicy):
    """Keeps the blocks with the most dense attention.

    The score of block `j` for row `i` is the softmax weight that the row's queries, in all heads,
    put on the block's keys (`block_mass`); in decode, only the current token's weight. There are
    two ways to combine queries and heads:

    * `"mass"` is the sum. No other list of that length, shared by the heads and with the forced
      blocks, covers more mass of the same queries and keys.
    * `"max"` is the maximum. A retrieval gives a block at most 1 in one head of one query; in a
      sum, heads that spread their attention outvote it. So answers need the maximum, which is the
      upper bound for selections with shared lists.

    This policy costs as much as dense attention. It serves to judge the others.

    A row's mass counts only the queries of this call. If a call continues a sequence in the middle
    of a block, that row selects for its remaining queries. `chunk_size`, padding and batch have no
    effect.

    Attributes:
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      aggregation: `"mass"` or `"max"`.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> OracleConfig(density=0.1).phases
      ('prefill', 'decode')
    """

    heads_on_mesh = "combined"

    aggregation: str = "mass"

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_choice("aggregation", self.aggregation, ("mass", "max"))

    def metadata_bytes(self, shape: LayerShape, positions: Int[Array, "B"]) -> Float[Array, "B"]:
        """Counts all keys, which the policy reads."""
        by_token = shape.num_kv_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
        return (positions + 1).astype(jnp.float32) * float(by_token)

    def score(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> Float[Array, "B I J"]:
        """Attention to every block, of a row's queries or of the decoded token."""
        how = "sum" if self.aggregation == "mass" else "max"
        options: dict[str, Any] = {"block_size": self.block_size, "layer": layer, "aggregate": how}
        options["sum_heads"] = span.heads is None
        if span.is_token:
            mass = token_mass(query, key, kv_lengths=jnp.minimum(span.end, key.shape[2]), **options)
        else:
            options |= {"first_block": span.first_block, "valid": span.valid}
            mass = block_mass(query, key, kv_lengths=span.end, **options)
        if span.heads is None:
            return mass
        if how == "max":
            return jax.lax.pmax(jnp.max(mass, axis=1), span.heads.axis)
        return jnp.sum(span.heads.gather(mass, axis=1), axis=1)
