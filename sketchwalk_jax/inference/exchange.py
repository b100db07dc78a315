"""Data exchange between the ranks of a mesh for one layer's attention.

`cached_layer` writes, updates statistics, selects and attends. If a step needs data of another
rank, or only a rank's own part, it asks an `Exchange`. On one device `Exchange` returns its inputs;
on a mesh `MeshExchange` calls the collectives.

A policy states which data of other ranks it sees (`Policy.heads_on_mesh`, `Policy.blocks_on_mesh`).
`policies.ranks` has the collectives; `sharding` has the shardings of their operands.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sketchwalk_jax.inference.cache import Cache, write_layer
from sketchwalk_jax.policies.base import Policy, Span
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import Placement, specs

PyTree = Any


class Tokens(NamedTuple):
    """The span's tokens in one layer, as one rank has them.

    Attributes:
      query: The rank's own queries.
      key: Keys of all tokens of the span, in the rank's own heads.
      value: Values of these tokens and heads.
      seen_query: Queries that the policy sees.
      seen_key: Keys that the policy sees.
      before: Keys and values of the layer in the caches of all ranks, `[1, B, S, K, H]`, if a
        rank's queries attend to more than its own cache has.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K H"]
    seen_query: Float[Array, "B T N H"]
    seen_key: Float[Array, "B T K H"]
    before: tuple[Array, Array] | None = None


class Piece(NamedTuple):
    """Consecutive query blocks of the span, for which the policy selects in one call.

    Attributes:
      span: Tokens of the query blocks.
      start: Position of the first token; `None` for 0.
      query: Queries of the tokens.
      seen_query: Queries that the policy sees.
      walk: The query blocks' part of the walk.
    """

    span: Span
    start: Int[Array, "B"] | None
    query: Float[Array, "B T N H"]
    seen_query: Float[Array, "B T N H"]
    walk: PyTree


# Result of a piece's attention: output, walk, attended pairs, and the selection to return.
Found = tuple[Array, PyTree, Array, BlockSelection | None]
Shared = tuple[BlockSelection, BlockSelection | None, Array]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange on one device, which has everything: each method returns its inputs.

    Attributes:
      span: The tokens.
      policy: The policy.
      start: Position of column 0 of the call's arrays, as in `write_layer`; `None` for 0.
    """

    span: Span
    policy: Policy
    start: Int[Array, "B"] | None

    def gather(self, query: Array, key: Array, value: Array, cache: Cache, layer: Array) -> Tokens:
        """Gets the data of other ranks that this layer needs, before the tokens are written."""
        return Tokens(query, key, value, query, key)

    def held(self, tokens: Tokens, capacity: int) -> tuple[Span, Array | None, Array, Array]:
        """Takes the span's tokens that this rank's cache stores: span, start, keys and values."""
        return self.span, self.start, tokens.key, tokens.value

    def attended(self, cache: Cache, tokens: Tokens, layer: Array) -> tuple[Array, Array, Array]:
        """Returns written keys and values to attend to, and the layer's index in them."""
        return cache.key, cache.value, layer

    def pieces(self, tokens: Tokens, walk: PyTree) -> list[Piece]:
        """Divides this rank's query blocks into pieces of consecutive blocks."""
        return [Piece(self.span, self.start, tokens.query, tokens.seen_query, walk)]

    def seen_cache(self, keys: Array) -> Array:
        """Returns the cached keys that the policy sees."""
        return keys

    def share(self, lists: BlockSelection, kept: BlockSelection | None, pairs: Array) -> Shared:
        """Selects this rank's heads in `lists`; gathers all heads' `kept`; averages `pairs`."""
        return lists, kept, pairs

    def narrow(
        self, piece: Piece, lists: BlockSelection | None, capacity: int
    ) -> tuple[Piece, BlockSelection | None, bool]:
        """Restricts a piece to this rank's keys; says whether ranks must merge outputs."""
        return piece, lists, False

    def merge(self, out: Any) -> Array:
        """Combines the ranks' outputs, each over the keys of one rank."""
        return out[0] if isinstance(out, tuple) else out

    def join(self, found: Sequence[Found]) -> Found:
        """Joins the results of the pieces; the pairs are sums over all query blocks."""
        (only,) = found
        return only


@dataclasses.dataclass(frozen=True)
class MeshExchange(Exchange):
    """A rank has some sequences, the heads of `span.heads`, and the query blocks of `span.blocks`.

    If ranks share the blocks of a sequence, `span` still covers all tokens, but a prompt's queries,
    keys and values are only those of this rank's query blocks.

    Attributes:
      placement: Placement of the model on the mesh.
      is_sparse: Whether the policy selects in these layers.
    """

    placement: Placement
    is_sparse: bool

    @property
    def _sees_all(self) -> bool:
        """Whether the policy sees all heads, although this rank has only some."""
        is_shared = self.span.heads is not None and self.is_sparse
        return is_shared and self.policy.heads_on_mesh == "all"

    @property
    def _row_axes(self) -> PyTree:
        """The axis of query blocks in every array of the walk; -1 if it has none."""
        return self.placement.rows_of_walk(self.policy)

    def gather(self, query: Array, key: Array, value: Array, cache: Cache, layer: Array) -> Tokens:
        """Gathers the heads and rows that the policy sees, and the keys of other ranks' rows.

        If there are fewer key/value heads than ranks, every rank already has all of them.
        """
        heads, rows, before = self.span.heads, self.span.blocks, None
        if rows is not None and self.start is not None:
            # Gather the cache before this layer writes it, so that copies overlap with computation.
            own = functools.partial(
                rows.gather_cache, layer=layer, block_size=self.policy.block_size
            )
            before = own(cache.key), own(cache.value)
        seen_query, seen_key = query, key
        if heads is not None:
            if self._sees_all:
                seen_query = heads.gather(query, axis=2)
                seen_key = key if heads.copies > 1 else heads.gather(key, axis=2)
            if heads.copies > 1:
                key, value = heads.own(key, axis=2), heads.own(value, axis=2)
            seen_key = seen_key if self._sees_all else key
        if rows is not None:
            key, value = rows.gather(key, axis=1), rows.gather(value, axis=1)
            if self.policy.blocks_on_mesh == "keys":
                seen_key = rows.gather(seen_key, axis=1) if self._sees_all else key
        return Tokens(query, key, value, seen_query, seen_key, before)

    def held(self, tokens: Tokens, capacity: int) -> tuple[Span, Array | None, Array, Array]:
        """Takes the tokens that this rank's cache stores: every `ranks`-th block."""
        span, blocks, size = self.span, self.placement.blocks, self.policy.block_size
        if blocks is None:
            return super().held(tokens, capacity)
        if span.is_token:
            block = span.positions // size
            position = blocks.own_before(block) * size + span.positions % size
            is_mine = block % blocks.ranks == blocks.rank
            place = Span.of_tokens(position, size, span.valid[:, 0] & is_mine)
            return place, place.start(size), tokens.key, tokens.value

        def own(x: Array) -> Array:
            by_block = x.reshape(x.shape[0], -1, size, *x.shape[2:])
            mine = blocks.own_blocks(by_block, span.first_block)
            return mine.reshape(x.shape[0], -1, *x.shape[2:])[:, :capacity]

        first, end = blocks.own_before(span.first_block), blocks.own_tokens(span.end, size)
        place = Span(first, own(span.valid), end, end)
        start = None if self.start is None else place.start(size)
        return place, start, own(tokens.key), own(tokens.value)

    def attended(self, cache: Cache, tokens: Tokens, layer: Array) -> tuple[Array, Array, Array]:
        """Returns keys and values of the whole prompt, written after the gathered caches."""
        if self.span.blocks is None:
            return super().attended(cache, tokens, layer)
        only = jnp.zeros((), jnp.int32)
        if tokens.before is None:
            return tokens.key[None], tokens.value[None], only
        write = functools.partial(write_layer, layer=only, start=self.start, span=self.span)
        return write(tokens.before[0], tokens.key), write(tokens.before[1], tokens.value), only

    def pieces(self, tokens: Tokens, walk: PyTree) -> list[Piece]:
        """Splits this rank's query blocks into two consecutive pieces, each with its walk."""
        span, rows = self.span, self.span.blocks
        if rows is None:
            return super().pieces(tokens, walk)
        width = span.valid.shape[1] // self.policy.block_size // rows.num_pieces
        places = rows.rank, rows.num_pieces - 1 - rows.rank
        spans = [
            dataclasses.replace(
                span, first_block=span.first_block + piece * width, valid=valid, blocks=None
            )
            for piece, valid in zip(places, rows.pieces(span.valid, axis=1), strict=True)
        ]
        starts = [one.start(self.policy.block_size) for one in spans]
        queries, seen = (jnp.split(x, 2, axis=1) for x in (tokens.query, tokens.seen_query))
        walks = [
            jax.tree.map(
                lambda axis, x: jnp.split(x, 2, axis=axis)[index] if axis >= 0 else x,  # noqa: B023
                self._row_axes,
                walk,
            )
            for index in range(2)
        ]
        return list(map(Piece, spans, starts, queries, seen, walks))

    def seen_cache(self, keys: Array) -> Array:
        """Gathers the keys of all heads if the policy sees them; not if ranks share blocks."""
        heads = self.span.heads
        if heads is None or not self._sees_all or self.placement.blocks is not None:
            return keys
        return heads.gather_keys(keys, axis=3)

    def share(self, lists: BlockSelection, kept: BlockSelection | None, pairs: Array) -> Shared:
        """Takes this rank's heads from lists of all heads, or gathers the lists to return."""
        heads, num_lists = self.span.heads, lists.ids.shape[1]
        if heads is None:
            return lists, kept, pairs

        def each(take: Callable[..., Array], lists: BlockSelection) -> BlockSelection:
            ids, counts = (take(x, axis=1) for x in (lists.ids, lists.counts))
            return dataclasses.replace(lists, ids=ids, counts=counts)

        if self.policy.heads_on_mesh == "all" and num_lists > 1:
            return each(heads.own, lists), kept, pairs
        if self.policy.heads_on_mesh == "own":
            pairs = jax.lax.pmean(pairs, heads.axis)
            if kept is not None and num_lists == heads.num_heads // heads.ranks:
                kept = each(heads.gather, kept)
        return lists, kept, pairs

    def narrow(
        self, piece: Piece, lists: BlockSelection | None, capacity: int
    ) -> tuple[Piece, BlockSelection | None, bool]:
        """Restricts a decoded token's keys to the blocks that this rank's cache holds."""
        blocks, size = self.placement.blocks, self.policy.block_size
        if blocks is None or not self.span.is_token:
            return piece, lists, False
        own = dataclasses.replace(piece.span, end=blocks.own_tokens(piece.span.end, size))
        if lists is not None:
            lists = blocks.own_lists(lists, block_size=size, capacity=capacity)
        return piece._replace(span=own, start=own.start(size)), lists, True

    def merge(self, out: Any) -> Array:
        """Merges the ranks' outputs for a token, each over the blocks of one rank's cache."""
        blocks = self.placement.blocks
        if blocks is None or not self.span.is_token:
            return super().merge(out)
        return blocks.merge(*out)

    def join(self, found: Sequence[Found]) -> Found:
        """Joins both pieces to this rank's rows, and sums the pairs over all ranks."""
        rows = self.span.blocks
        if rows is None:
            return super().join(found)
        outs, walks, pairs, kept = zip(*found, strict=True)
        walk = jax.tree.map(
            lambda axis, *x: jnp.concatenate(x, axis=axis) if axis >= 0 else x[0],
            self._row_axes,
            *walks,
        )
        lists = None
        if kept[0] is not None:
            ids, counts = (
                jnp.concatenate([getattr(one, name) for one in kept], axis=2)
                for name in ("ids", "counts")
            )
            lists = dataclasses.replace(kept[0], ids=ids, counts=counts)
        all_pairs = jax.lax.psum(sum(pairs), rows.axis)
        return jnp.concatenate(outs, axis=1), walk, all_pairs, lists


def specs_of_ranks(
    span: Span, policy: Policy, placement: Placement
) -> tuple[PyTree, tuple[Any, ...], tuple[Any, ...]]:
    """Returns partition specs of one layer's attention, for `jax.shard_map`.

    If there are fewer key/value heads than ranks, every rank gets all keys and values.

    Returns:
      The specs of the cache's fields; those of the span, the cache's fields, the walk, queries,
      keys, values and the layer's index; and those of the output, the cache's fields, the walk, and
      pairs with lists.
    """
    by_sequence = placement.sharding("data").spec
    by_row = None if span.blocks is None else span.blocks.axis
    of_queries = placement.sharding("data", by_row, "tensor").spec
    is_spread = placement.model_config.num_kv_heads == placement.num_kv_heads
    of_keys = placement.sharding("data", by_row, "tensor" if is_spread else None).spec
    of_lists = placement.sharding("data", None, by_row).spec
    fields = specs(placement.cache(policy))
    walks = specs(placement.walk(policy, is_token=span.is_token))
    given = by_sequence, fields, walks, of_queries, of_keys, of_keys, PartitionSpec()
    return fields, given, (of_queries, fields, walks, (by_sequence, of_lists))
