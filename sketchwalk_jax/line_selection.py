"""Columns and diagonals of single keys: lists of blocks of which not every pair counts.

For rules that are exact to the key, on the implementation in XLA: attention visits the listed
blocks, and a query sees those of their keys that lie on a line.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.selection import BlockSelection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LineSelection(BlockSelection):
    """The keys on columns and in ranges along diagonals, of the listed blocks.

    A query in block `i` attends to key `s`, at most its own position, if

        columns[s]  or  ranges[block_size · i + block_size - 1 - s]

    Attributes:
      columns: Keys that every query attends to, bool `[B, M, S]`.
      ranges: Distances from the last position of the query's block at which its queries attend to
        a key, bool `[B, M, S]`.
    """

    columns: Bool[Array, "B M S"] = dataclasses.field(kw_only=True)
    ranges: Bool[Array, "B M S"] = dataclasses.field(kw_only=True)

    @property
    def blocks(self) -> BlockSelection:
        """The listed blocks alone."""
        return BlockSelection(self.ids, self.counts, self.block_size)

    def supported(self, implementation: str | None) -> str:
        """XLA: the kernels attend to whole blocks.

        Raises:
          NotImplementedError: If another implementation is asked for.
        """
        if implementation not in (None, "xla"):
            raise NotImplementedError(
                f"single keys are selected with implementation 'xla' only, got {implementation!r}; "
                "round the selection out to blocks for the kernels"
            )
        return "xla"

    def attends(
        self, keys: Int[Array, "B M I C"], rows: Int[Array, "B I"]
    ) -> Bool[Array, "B M I C"]:
        """Whether queries of the given rows attend to the given keys, causal or not.

        Args:
          keys: Positions of keys.
          rows: Absolute block indices of the queries.
        """
        size, shape = self.block_size, keys.shape
        distance = rows[:, None, :, None] * size + size - 1 - keys

        def look_up(marks: Bool[Array, "B M S"], index: Array) -> Array:
            inside = jnp.clip(index, 0, marks.shape[-1] - 1)
            flat = inside.reshape(*shape[:2], -1)
            return jnp.take_along_axis(marks, flat, axis=-1).reshape(shape) & (inside == index)

        return look_up(self.columns, keys) | look_up(self.ranges, distance)

    def attended_pairs(
        self, first_query: Int[Array, "B I"], num_queries: Int[Array, "B I"]
    ) -> Float[Array, "B"]:
        """As `BlockSelection.attended_pairs`, of the keys on lines alone."""
        keys = jnp.arange(self.columns.shape[-1], dtype=jnp.int32)[None, None, None, :]

        def of_row(row: tuple[Array, Array]) -> Float[Array, "B"]:
            first, count = (x[:, None] for x in row)
            marked = self.attends(
                jnp.broadcast_to(keys, (*self.columns.shape[:2], 1, keys.shape[-1])),
                first // self.block_size,
            )[:, :, 0]
            # Queries of the row from the key's own position on.
            behind = jnp.clip(first + count - jnp.maximum(keys[0, 0], first), 0, count)
            pairs = jnp.where(marked, behind[:, None, :], 0)
            return jnp.mean(jnp.sum(pairs, axis=-1, dtype=jnp.int32).astype(jnp.float32), axis=-1)

        by_row = jax.lax.map(of_row, (first_query.T, num_queries.T))
        return jnp.sum(by_row, axis=0)
