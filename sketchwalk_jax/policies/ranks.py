"""How ranks of a mesh share one layer: its heads, and the blocks of a sequence.

A policy that puts together what ranks find (`Policy.heads_on_mesh`, `Policy.blocks_on_mesh`) calls
these from `Span.heads` and `Span.blocks`, under `jax.shard_map`; others need not know of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.selection import BlockSelection


@dataclasses.dataclass(frozen=True)
class Heads:
    """How the heads of a layer are spread over the ranks of a mesh axis.

    Rank `r` has the query heads from `r · N / ranks` on, and their key/value heads. Where there are
    fewer of these than ranks, `ranks / K` neighbours have the same one.

    Attributes:
      axis: The axis, a name for collectives.
      ranks: Ranks along it.
      num_heads: Query heads `N` of all ranks.
      num_kv_heads: Key/value heads `K` of all ranks, none counted twice.
    """

    axis: str
    ranks: int
    num_heads: int
    num_kv_heads: int

    @property
    def copies(self) -> int:
        """Ranks that have the same key/value head."""
        return max(1, self.ranks // self.num_kv_heads)

    def gather(self, x: Array, *, axis: int) -> Array:
        """What all ranks have, rank by rank along an axis: heads in the order of one device.

        Each rank receives `(ranks - 1)` times the bytes of `x`.

        Args:
          x: An array of own query heads, or of own key/value heads, whose copies come too.
          axis: The axis of the heads.
        """
        return jax.lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def gather_keys(self, x: Array, *, axis: int) -> Array:
        """`gather` of key/value heads, of copies only the first."""
        return jax.lax.slice_in_dim(self.gather(x, axis=axis), 0, None, self.copies, axis=axis)

    def own(self, x: Array, *, axis: int) -> Array:
        """The part of this rank, of what all ranks have of all heads, query or key/value ones."""
        size = x.shape[axis]
        count = max(1, size // self.ranks)
        first = jax.lax.axis_index(self.axis) * size // self.ranks
        return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the blocks of a sequence are spread over the ranks of a mesh axis.

    *Rows* of a call are dealt zig-zag, so that causal work is even: of `2 · ranks` pieces of one
    size, rank `r` has piece `r` and piece `2 · ranks - 1 - r`. *Blocks of a cache* are dealt in
    turn, so that ranks hold as many of them at any length: rank `r` has blocks `r`, `r + ranks`,
    `r + 2 · ranks` and so on, in this order.

    Attributes:
      axis: The axis, a name for collectives.
      ranks: Ranks along it.
    """

    axis: str
    ranks: int

    @property
    def num_pieces(self) -> int:
        """Pieces that rows are divided into, two for each rank."""
        return 2 * self.ranks

    @property
    def rank(self) -> Int[Array, ""]:
        """This rank."""
        return jax.lax.axis_index(self.axis)

    # Arrays of the rows of all ranks.

    def deal(self, x: Array, *, axis: int) -> Array:
        """What is in the order of the sequence, rank by rank.

        Args:
          x: An array of tokens or rows.
          axis: Their axis, which `num_pieces` divides.
        """
        pieces = jnp.split(x, self.num_pieces, axis=axis)
        dealt = [p for r in range(self.ranks) for p in (pieces[r], pieces[-1 - r])]
        return jnp.concatenate(dealt, axis=axis)

    def join(self, x: Array, *, axis: int) -> Array:
        """The inverse of `deal`."""
        pieces = jnp.split(x, self.num_pieces, axis=axis)
        return jnp.concatenate(pieces[0::2] + pieces[1::2][::-1], axis=axis)

    def place(self, columns: Int[Array, "*axes"], width: int) -> Int[Array, "*axes"]:
        """Where `deal` puts columns of an array that has `width` of them."""
        size = width // self.num_pieces
        piece = columns // size
        dealt = jnp.minimum(2 * piece, 2 * (self.num_pieces - 1 - piece) + 1)
        return dealt * size + columns % size

    def place_in_cache(
        self, positions: Int[Array, "*axes"], capacity: int, block_size: int
    ) -> Int[Array, "*axes"]:
        """Where tokens lie in a cache, as the caches of all ranks stand one behind the other.

        Args:
          positions: Of tokens in their sequences.
          capacity: Tokens that all ranks have room for.
          block_size: Tokens of a block.
        """
        block, turn = positions // block_size, capacity // self.ranks
        own = block // self.ranks * block_size + positions % block_size
        return block % self.ranks * turn + own

    # On a rank, under `shard_map`.

    def gather(self, x: Array, *, axis: int) -> Array:
        """What all ranks have of their rows, in the order of the sequence.

        Each rank receives `(ranks - 1)` times the bytes of `x`.

        Args:
          x: An array of this rank's tokens or rows.
          axis: Their axis.
        """
        return self.join(jax.lax.all_gather(x, self.axis, axis=axis, tiled=True), axis=axis)

    def own(self, x: Array, *, axis: int) -> Array:
        """The part of this rank's rows, of what is in the order of the sequence."""
        return jnp.concatenate(self.pieces(x, axis=axis), axis=axis)

    def pieces(self, x: Array, *, axis: int) -> tuple[Array, Array]:
        """`own` as the two pieces of which each is of one stretch of the sequence."""
        size = x.shape[axis] // self.num_pieces
        early, late = (
            jax.lax.dynamic_slice_in_dim(x, piece * size, size, axis=axis)
            for piece in (self.rank, self.num_pieces - 1 - self.rank)
        )
        return early, late

    def own_blocks(self, x: Array, first_block: Int[Array, "B"]) -> Array:
        """The blocks that this rank's cache holds, of some that follow one another.

        Args:
          x: `[B, I, ...]`, blocks from `first_block` on; `ranks` divides `I`.
          first_block: Block of the first one in each sequence.
        """
        turns = x.reshape(x.shape[0], -1, self.ranks, *x.shape[2:])
        mine = (self.rank - first_block) % self.ranks
        mine = mine.reshape(-1, *[1] * (turns.ndim - 1))
        return jnp.take_along_axis(turns, mine, axis=2)[:, :, 0]

    def own_before(self, block: Int[Array, "*axes"]) -> Int[Array, "*axes"]:
        """How many blocks before some block this rank's cache holds: where that one would be."""
        return (block + self.ranks - 1 - self.rank) // self.ranks

    def own_tokens(self, lengths: Int[Array, "*axes"], block_size: int) -> Int[Array, "*axes"]:
        """How many of the first tokens of sequences this rank's cache holds."""
        last = lengths // block_size
        is_mine = last % self.ranks == self.rank
        inside = jnp.where(is_mine, lengths % block_size, 0)
        return self.own_before(last) * block_size + inside

    def own_lists(self, lists: BlockSelection, *, block_size: int, capacity: int) -> BlockSelection:
        """What this rank's cache holds of some lists, where it lies there.

        Args:
          lists: Lists of blocks, or of parts of blocks.
          block_size: Tokens of a block.
          capacity: Tokens that this rank's cache has room for.
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
        """Keys or values of one layer that all ranks hold, in the order of the sequence."""
        own = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        batch, tokens, *rest = own.shape
        own = own.reshape(batch, tokens // block_size, block_size, *rest)
        return jax.lax.all_gather(own, self.axis, axis=2).reshape(1, batch, -1, *rest)

    def merge(
        self, out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]
    ) -> Float[Array, "B T N H"]:
        """Attention to what all ranks hold, from that to what each does.

            o = Σ_r e^(l_r - m) o_r / Σ_r e^(l_r - m),   m = max_r l_r

        Args:
          out: This rank's output `o_r`; 0 where it holds nothing of a list.
          lse: Its log-sum-exp `l_r` of the scores; -inf there.
        """
        largest = jax.lax.pmax(lse, self.axis)
        weight = jnp.exp(lse - jnp.where(largest == -jnp.inf, 0.0, largest))
        total = jax.lax.psum(weight, self.axis)
        found = jax.lax.psum(out.astype(jnp.float32) * weight[..., None], self.axis)
        return (found / jnp.where(total == 0.0, 1.0, total)[..., None]).astype(out.dtype)
