"""Distribution of one layer over ranks of a mesh: its heads, and the blocks of a sequence.

A policy that combines results of ranks (`Policy.heads_on_mesh`, `Policy.blocks_on_mesh`) calls
these from `Span.heads` and `Span.blocks`, under `jax.shard_map`. Other policies need not know them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.selection import BlockSelection


@dataclasses.dataclass(frozen=True)
class Heads:
    """Distribution of the heads of a layer over the ranks of a mesh axis.

    Rank `r` has the query heads from `r · N / ranks` on, and their key/value heads. If there are
    fewer key/value heads than ranks, `ranks / K` consecutive ranks have the same one.

    Attributes:
      axis: Name of the mesh axis, for collectives.
      ranks: Number of ranks along the axis.
      num_heads: Number of query heads `N` of all ranks.
      num_kv_heads: Number of distinct key/value heads `K` of all ranks.
    """

    axis: str
    ranks: int
    num_heads: int
    num_kv_heads: int

    @property
    def copies(self) -> int:
        """Number of ranks that have the same key/value head."""
        return max(1, self.ranks // self.num_kv_heads)

    def gather(self, x: Array, *, axis: int) -> Array:
        """Gathers all ranks' heads along an axis, in the order of one device.

        Each rank receives `(ranks - 1)` times the bytes of `x`.

        Args:
          x: An array of this rank's query heads, or key/value heads (with copies, if any).
          axis: The axis of the heads.
        """
        return jax.lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def gather_keys(self, x: Array, *, axis: int) -> Array:
        """Gathers key/value heads like `gather`, without copies."""
        return jax.lax.slice_in_dim(self.gather(x, axis=axis), 0, None, self.copies, axis=axis)

    def own(self, x: Array, *, axis: int) -> Array:
        """Takes this rank's part of an array with all heads, either query or key/value heads."""
        size = x.shape[axis]
        count = max(1, size // self.ranks)
        first = jax.lax.axis_index(self.axis) * size // self.ranks
        return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Distribution of the blocks of a sequence over the ranks of a mesh axis.

    *Rows* of a call are dealt in a zig-zag, to balance causal work: of `2 · ranks` equal pieces,
    rank `r` has pieces `r` and `2 · ranks - 1 - r`. *Blocks of a cache* are dealt in turn, so that
    ranks have equally many at any length: rank `r` has blocks `r`, `r + ranks`, `r + 2 · ranks` and
    so on, in this order.

    Attributes:
      axis: Name of the mesh axis, for collectives.
      ranks: Number of ranks along the axis.
    """

    axis: str
    ranks: int

    @property
    def num_pieces(self) -> int:
        """Number of pieces of the rows, two for each rank."""
        return 2 * self.ranks

    @property
    def rank(self) -> Int[Array, ""]:
        """Index of this rank."""
        return jax.lax.axis_index(self.axis)

    # Methods for arrays with the rows of all ranks.

    def deal(self, x: Array, *, axis: int) -> Array:
        """Reorders the rows of a sequence rank by rank.

        Args:
          x: An array of tokens or rows.
          axis: Axis of the tokens or rows; `num_pieces` divides its size.
        """
        pieces = jnp.split(x, self.num_pieces, axis=axis)
        dealt = [p for r in range(self.ranks) for p in (pieces[r], pieces[-1 - r])]
        return jnp.concatenate(dealt, axis=axis)

    def join(self, x: Array, *, axis: int) -> Array:
        """Inverts `deal`."""
        pieces = jnp.split(x, self.num_pieces, axis=axis)
        return jnp.concatenate(pieces[0::2] + pieces[1::2][::-1], axis=axis)

    def place(self, columns: Int[Array, "*axes"], width: int) -> Int[Array, "*axes"]:
        """New indices that `deal` gives to columns of an array with `width` columns."""
        size = width // self.num_pieces
        piece = columns // size
        dealt = jnp.minimum(2 * piece, 2 * (self.num_pieces - 1 - piece) + 1)
        return dealt * size + columns % size

    def place_in_cache(
        self, positions: Int[Array, "*axes"], capacity: int, block_size: int
    ) -> Int[Array, "*axes"]:
        """Indices of tokens in the concatenation of all ranks' caches.

        Args:
          positions: Positions of the tokens in their sequences.
          capacity: Capacity of all ranks' caches together, in tokens.
          block_size: Tokens per block.
        """
        block, turn = positions // block_size, capacity // self.ranks
        own = block // self.ranks * block_size + positions % block_size
        return block % self.ranks * turn + own

    # Methods for one rank, under `shard_map`.

    def gather(self, x: Array, *, axis: int) -> Array:
        """Gathers all ranks' rows, in the order of the sequence.

        Each rank receives `(ranks - 1)` times the bytes of `x`.

        Args:
          x: An array of this rank's tokens or rows.
          axis: Axis of the tokens or rows.
        """
        return self.join(jax.lax.all_gather(x, self.axis, axis=axis, tiled=True), axis=axis)

    def own(self, x: Array, *, axis: int) -> Array:
        """Takes this rank's rows from an array in the order of the sequence."""
        return jnp.concatenate(self.pieces(x, axis=axis), axis=axis)

    def pieces(self, x: Array, *, axis: int) -> tuple[Array, Array]:
        """Takes this rank's rows as two pieces, each of consecutive rows."""
        size = x.shape[axis] // self.num_pieces
        early, late = (
            jax.lax.dynamic_slice_in_dim(x, piece * size, size, axis=axis)
            for piece in (self.rank, self.num_pieces - 1 - self.rank)
        )
        return early, late

    def own_blocks(self, x: Array, first_block: Int[Array, "B"]) -> Array:
        """Takes the blocks that this rank's cache stores, from consecutive blocks.

        Args:
          x: `[B, I, ...]`, blocks from `first_block` on; `ranks` divides `I`.
          first_block: Index of the first block in each sequence.
        """
        turns = x.reshape(x.shape[0], -1, self.ranks, *x.shape[2:])
        mine = (self.rank - first_block) % self.ranks
        mine = mine.reshape(-1, *[1] * (turns.ndim - 1))
        return jnp.take_along_axis(turns, mine, axis=2)[:, :, 0]

    def own_before(self, block: Int[Array, "*axes"]) -> Int[Array, "*axes"]:
        """Number of blocks before `block` in this rank's cache: the index to store it at."""
        return (block + self.ranks - 1 - self.rank) // self.ranks

    def own_tokens(self, lengths: Int[Array, "*axes"], block_size: int) -> Int[Array, "*axes"]:
        """Number of tokens of each sequence that this rank's cache stores."""
        last = lengths // block_size
        is_mine = last % self.ranks == self.rank
        inside = jnp.where(is_mine, lengths % block_size, 0)
        return self.own_before(last) * block_size + inside

    def own_lists(self, lists: BlockSelection, *, block_size: int, capacity: int) -> BlockSelection:
        """Converts lists to this rank's cache: keeps its blocks, with their indices in it.

        Args:
          lists: Indices of blocks, or of parts of blocks.
          block_size: Tokens per block.
          capacity: Capacity of this rank's cache in tokens.
        """
        ids, parts = lists.ids, block_size // lists.block_size
        place = jnp.arange(ids.shape[-1], dtype=jnp.int32)[None, None, None]
        block = ids // parts
        is_mine = (place < lists.counts[..., None]) & (block % self.ranks == self.rank)
        room = capacity // lists.block_size
        own = jnp.where(is_mine, block // self.ranks * parts + ids % parts, room)
        own = jnp.sort(own, axis=-1)[..., : min(room, ids.shape[-1])]
        counts = jnp.sum(is_mine, axis=-1, dtype=jnp.int32)
        return BlockSelection(own, counts, lists.block_size)

    def gather_cache(
        self, x: Float[Array, "L B S1 K H"], *, layer: Int[Array, ""], block_size: int
    ) -> Float[Array, "1 B S K H"]:
        """Gathers the keys or values of one layer from all ranks, in the order of the sequence."""
        own = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        batch, tokens, *rest = own.shape
        own = own.reshape(batch, tokens // block_size, block_size, *rest)
        return jax.lax.all_gather(own, self.axis, axis=2).reshape(1, batch, -1, *rest)

    def merge(
        self, out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]
    ) -> Float[Array, "B T N H"]:
        """Merges the ranks' attention outputs, each over the keys in one rank's cache.

            o = Σ_r e^(l_r - m) o_r / Σ_r e^(l_r - m),   m = max_r l_r

        Args:
          out: This rank's output `o_r`; 0 if its cache has none of the listed keys.
          lse: Log-sum-exp `l_r` of this rank's scores; -inf if its cache has none.
        """
        largest = jax.lax.pmax(lse, self.axis)
        weight = jnp.exp(lse - jnp.where(largest == -jnp.inf, 0.0, largest))
        total = jax.lax.psum(weight, self.axis)
        found = jax.lax.psum(out.astype(jnp.float32) * weight[..., None], self.axis)
        return (found / jnp.where(total == 0.0, 1.0, total)[..., None]).astype(out.dtype)
