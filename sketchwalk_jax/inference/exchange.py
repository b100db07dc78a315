"""The one seam between a layer's attention and a mesh: what ranks give each other.

`cached_layer` writes, observes, selects and attends. Wherever a step needs what another rank has,
or concerns a rank's own part alone, it asks an `Exchange`: on one device that passes on what it
gets, and `MeshExchange` calls the collectives. `exchanging` hands over from the rest of the model,
which XLA partitions, to ranks: each calls the same attention with its own sequences, heads and
rows, under `jax.shard_map`.

What a policy sees of other ranks it says itself (`Policy.heads_on_mesh`, `Policy.blocks_on_mesh`);
`policies.ranks` has the collectives, and `sharding` what they send.
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
from sketchwalk_jax.models.transformer import Attend
from sketchwalk_jax.policies.base import Policy, Span
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import Placement, specs

PyTree = Any


class Tokens(NamedTuple):
    """The span's tokens in one layer, as a rank has them.

    Attributes:
      query: Its own queries.
      key: Keys of all tokens of the span, in its own heads.
      value: Their values.
      seen_query: Queries that the policy sees.
      seen_key: Keys that it sees.
      before: Keys and values of the layer in the caches of all ranks, `[1, B, S, K, H]`, where a
        rank's queries attend to more than its own cache has.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K H"]
    seen_query: Float[Array, "B T N H"]
    seen_key: Float[Array, "B T K H"]
    before: tuple[Array, Array] | None = None


class Piece(NamedTuple):
    """Rows of the span that follow one another, for which a policy is asked at once.

    Attributes:
      span: Their tokens.
      start: Position of the first one; `None` for 0.
      query: Their queries.
      seen_query: Queries that the policy sees.
      walk: Their walk.
    """

    span: Span
    start: Int[Array, "B"] | None
    query: Float[Array, "B T N H"]
    seen_query: Float[Array, "B T N H"]
    walk: PyTree


# What attention of a piece gives: output, walk, pairs, and the lists to return.
Found = tuple[Array, PyTree, Array, BlockSelection | None]
Shared = tuple[BlockSelection, BlockSelection | None, Array]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One device has everything: nothing is exchanged.

    Attributes:
      span: The tokens.
      policy: The policy.
      start: Position of column 0 of the call's arrays, as `write_layer` takes it: `None` for 0.
    """

    span: Span
    policy: Policy
    start: Int[Array, "B"] | None

    def gather(self, query: Array, key: Array, value: Array, cache: Cache, layer: Array) -> Tokens:
        """What this rank needs of all tokens, before they are written."""
        return Tokens(query, key, value, query, key)

    def held(self, tokens: Tokens, capacity: int) -> tuple[Span, Array | None, Array, Array]:
        """What this rank's cache holds of the span: its place there, its start, keys, values."""
        return self.span, self.start, tokens.key, tokens.value

    def attended(self, cache: Cache, tokens: Tokens, layer: Array) -> tuple[Array, Array, Array]:
        """Keys and values that queries attend to, and the layer among them; all are written."""
        return cache.key, cache.value, layer

    def pieces(self, tokens: Tokens, walk: PyTree) -> list[Piece]:
        """The rows of this rank, divided into those that follow one another."""
        return [Piece(self.span, self.start, tokens.query, tokens.seen_query, walk)]

    def seen_cache(self, keys: Array) -> Array:
        """The cache of keys that the policy sees."""
        return keys

    def share(self, lists: BlockSelection, kept: BlockSelection | None, pairs: Array) -> Shared:
        """Lists of this rank's heads; lists to return, and pairs as a mean, of all heads."""
        return lists, kept, pairs

    def narrow(
        self, piece: Piece, lists: BlockSelection | None, capacity: int
    ) -> tuple[Piece, BlockSelection | None, bool]:
        """What this rank attends to of a piece's keys, and whether that is merged with others'."""
        return piece, lists, False

    def merge(self, out: Any) -> Array:
        """Attention to all keys, from what attention to this rank's gave."""
        return out[0] if isinstance(out, tuple) else out

    def join(self, found: Sequence[Found]) -> Found:
        """What was found for the pieces, put together; pairs are those of all rows."""
        (only,) = found
        return only


@dataclasses.dataclass(frozen=True)
class MeshExchange(Exchange):
    """A rank has some sequences, the heads of `span.heads`, and the rows of `span.blocks`.

    Where ranks share the blocks of a sequence, `span` is still that of all tokens, while queries,
    keys and values of a prompt are those of this rank's rows.

    Attributes:
      placement: Where all lies.
      is_sparse: Whether the layers belong to the policy.
    """

    placement: Placement
    is_sparse: bool

    @property
    def _sees_all(self) -> bool:
        """Whether the policy sees all heads, of which this rank has some."""
        is_shared = self.span.heads is not None and self.is_sparse
        return is_shared and self.policy.heads_on_mesh == "all"

    @property
    def _row_axes(self) -> PyTree:
        """The axis of rows in every array of the walk; -1 without one."""
        return self.placement.rows_of_walk(self.policy)

    def gather(self, query: Array, key: Array, value: Array, cache: Cache, layer: Array) -> Tokens:
        """Of heads and rows of other ranks what the policy sees, and the keys of other rows.

        Keys and values came whole if there are fewer heads of them than ranks.
        """
        heads, rows, before = self.span.heads, self.span.blocks, None
        if rows is not None and self.start is not None:
            # Not with what is written now: so they travel while this layer computes what that is.
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
        """What this rank's cache holds of the span, of which it has every `ranks`-th block."""
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
        """Keys and values of all rows of a prompt, behind those of all caches."""
        if self.span.blocks is None:
            return super().attended(cache, tokens, layer)
        only = jnp.zeros((), jnp.int32)
        if tokens.before is None:
            return tokens.key[None], tokens.value[None], only
        write = functools.partial(write_layer, layer=only, start=self.start, span=self.span)
        return write(tokens.before[0], tokens.key), write(tokens.before[1], tokens.value), only

    def pieces(self, tokens: Tokens, walk: PyTree) -> list[Piece]:
        """The two stretches of rows of a prompt that are this rank's, each with its walk."""
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
        """Keys of all heads, if the policy sees all; where blocks are shared it sees no others."""
        heads = self.span.heads
        if heads is None or not self._sees_all or self.placement.blocks is not None:
            return keys
        return heads.gather_keys(keys, axis=3)

    def share(self, lists: BlockSelection, kept: BlockSelection | None, pairs: Array) -> Shared:
        """Takes the lists of own heads out of those of all, or gathers those to return."""
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
        """Of a decoded token's keys, the blocks that this rank's cache holds."""
        blocks, size = self.placement.blocks, self.policy.block_size
        if blocks is None or not self.span.is_token:
            return piece, lists, False
        own = dataclasses.replace(piece.span, end=blocks.own_tokens(piece.span.end, size))
        if lists is not None:
            lists = blocks.own_lists(lists, block_size=size, capacity=capacity)
        return piece._replace(span=own, start=own.start(size)), lists, True

    def merge(self, out: Any) -> Array:
        """Puts together what ranks found for a token from the blocks that they hold."""
        blocks = self.placement.blocks
        if blocks is None or not self.span.is_token:
            return super().merge(out)
        return blocks.merge(*out)

    def join(self, found: Sequence[Found]) -> Found:
        """Both pieces as this rank's rows; pairs of all ranks."""
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


def exchanging(
    make: Callable[[Exchange], Attend],
    span: Span,
    policy: Policy,
    *,
    is_fresh: bool,
    is_sparse: bool,
    placement: Placement | None,
) -> Attend:
    """Attention here, or on a mesh where every rank attends with its own part, to its cache.

    Keys and values come whole where they have fewer heads than there are ranks.

    Args:
      make: Gives attention for a rank's tokens.
      span: The tokens of all.
      policy: The policy.
      is_fresh: Whether every sequence starts at position 0.
      is_sparse: Whether the layers belong to the policy.
      placement: Where all lies; `None` for one device.
    """

    def start(span: Span) -> Int[Array, "B"] | None:
        return None if is_fresh else span.start(policy.block_size)

    if placement is None:
        return make(Exchange(span, policy, start(span)))
    rows = None if span.is_token else placement.blocks
    span = dataclasses.replace(span, heads=placement.heads, blocks=rows)
    by_sequence = placement.sharding("data").spec
    by_row = None if rows is None else rows.axis
    of_queries = placement.sharding("data", by_row, "tensor").spec
    is_spread = placement.model_config.num_kv_heads == placement.num_kv_heads
    of_keys = placement.sharding("data", by_row, "tensor" if is_spread else None).spec
    of_lists = placement.sharding("data", None, by_row).spec
    fields = specs(placement.cache(policy))
    walks = specs(placement.walk(policy, is_token=span.is_token))

    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walk = state

        def on_rank(span: Span, arrays: dict[str, PyTree], walk: PyTree, *tokens: Array) -> Any:
            own: Any = make(MeshExchange(span, policy, start(span), placement, is_sparse))
            state = dataclasses.replace(cache, **arrays), walk
            out, (written, walk), aux = own(*tokens, state)
            return out, {name: getattr(written, name) for name in arrays}, walk, aux

        shared = jax.shard_map(
            on_rank,
            mesh=placement.mesh,
            in_specs=(by_sequence, fields, walks, of_queries, of_keys, of_keys, PartitionSpec()),
            out_specs=(of_queries, fields, walks, (by_sequence, of_lists)),
            check_vma=False,
        )
        arrays = {name: getattr(cache, name) for name in fields}
        out, arrays, walk, aux = shared(span, arrays, walk, query, key, value, layer)
        return out, (dataclasses.replace(cache, **arrays), walk), aux

    return attend
