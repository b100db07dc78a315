"""Attention of one layer inside inference: write the cache, observe, select, attend.

`layer_attention` builds the callback that `run_layers` calls, for the tokens of a prompt and for a
decoded one alike. Its state is `(cache, walk)`, and its per-layer output the pairs attended to and,
on request, the selection.

On a mesh, this is where the rest of the model, which XLA partitions, hands over to ranks: each
calls the same attention with its own sequences, heads and rows, under `jax.shard_map`. Of what lies
elsewhere the policy knows (`Policy.heads_on_mesh`, `Policy.blocks_on_mesh`), and what it takes to
attend to a sequence whose blocks are spread (`Blocks`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.api import attend_rows, block_sparse_decode, dense_attention
from sketchwalk_jax.cache import Cache, sparse_layers, write_layer
from sketchwalk_jax.dispatch import IMPLEMENTATIONS, row_kernels, selection_kernels
from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.models.transformer import Attend, Multiply, linear_of_rows
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.kernel_selection import write_token
from sketchwalk_jax.policies.base import (
    Blocks,
    Heads,
    Policy,
    Span,
    TokenWrite,
    check_policy,
    take_layer,
)
from sketchwalk_jax.selection import BlockSelection, causal_pairs
from sketchwalk_jax.sharding import Placement, linear_on_ranks, specs

PyTree = Any
PHASES = ("both", "prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Everything static about the attention of one layer with a cache; hashable.

    Attributes:
      policy: The policy.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`.
      scale: Factor of the attention scores, or `None` for `1 / sqrt(H)`.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes, or `None` for the defaults.
      return_selection: Whether the selected blocks are returned.
      placement: Where the model lies on a mesh, or `None` on one device.
      on_one_device: Whether the model is known to lie on one device: the only one, unless told.

    Raises:
      ValueError: If an option is unknown, or two contradict each other.
    """

    policy: Policy
    phase: str = "both"
    scale: float | None = None
    implementation: str | None = None
    kernel_config: KernelConfig | None = None
    return_selection: bool = False
    placement: Placement | None = None
    on_one_device: bool = dataclasses.field(default_factory=lambda: jax.device_count() == 1)

    def __post_init__(self) -> None:
        """Checks every option."""
        check_policy(self.policy)
        if self.placement is not None:
            self.placement.check_policy(self.policy)
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES}, got {self.phase!r}")
        own = self.policy.phases
        if self.phase != "both" and own and self.phase not in own:
            raise ValueError(
                f"phase must be 'both' or {own[0]!r} for {type(self.policy).__name__}, which "
                f"selects in {own[0]} only and is dense elsewhere, got {self.phase!r}"
            )
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"implementation must be None or one of {IMPLEMENTATIONS}, "
                f"got {self.implementation!r}"
            )

    def selects_in(self, phase: str) -> bool:
        """Whether sparse layers select blocks in this phase; the other phase is dense."""
        return self.phase in ("both", phase) and phase in self.policy.phases

    @property
    def dense_implementation(self) -> str | None:
        """What dense layers ask for: XLA where everything is to run on it, else the choice."""
        return "xla" if self.implementation == "xla" else None

    @property
    def row_kernels(self) -> KernelConfig | None:
        """What kernels for one token may run with, or `None` where XLA does without.

        They take weights and caches that are all here, or of which a placement says what is.
        """
        if self.placement is not None:
            return self.selection_kernels
        return row_kernels(
            self.implementation, self.kernel_config, on_one_device=self.on_one_device
        )

    @property
    def multiply_rows(self) -> Multiply | None:
        """How few rows are multiplied with weights, or `None` where XLA does it."""
        kernels = self.row_kernels
        if kernels is None:
            return None
        if self.placement is None:
            return functools.partial(linear_of_rows, kernels=kernels)
        return functools.partial(linear_on_ranks, placement=self.placement, kernels=kernels)

    @property
    def selection_kernels(self) -> KernelConfig | None:
        """What policies may run their kernels with, or `None` where they select on XLA."""
        return selection_kernels(self.implementation, self.kernel_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(LayerSettings):
    """Everything static about a call to the model; hashable, one compiled program each.

    Attributes:
      model_config: The model.
      chunk_size: Tokens that prefill processes at a time, or `None` for all.
      return_all_logits: Whether prefill returns the logits of every token.

    Raises:
      ValueError: If an option is unknown, or two contradict each other.
    """

    model_config: ModelConfig
    chunk_size: int | None = None
    return_all_logits: bool = False

    def __post_init__(self) -> None:
        """Checks every option."""
        check_model_config(self.model_config)
        super().__post_init__()
        size, chunk = self.policy.block_size, self.chunk_size
        if chunk is not None and (not isinstance(chunk, int) or chunk < size or chunk % size):
            raise ValueError(
                f"chunk_size must be a positive multiple of the block size {size}, got {chunk!r}"
            )


def attention_by_layer(
    make: Callable[..., Attend], settings: Settings
) -> list[tuple[range, Attend]]:
    """Runs of layers that attend alike, each with its attention, as `run_layers` takes.

    Args:
      make: `(is_sparse, first_sparse, policy) -> attend`. In a run of sparse layers, `layer -
        first_sparse` is the index of a layer among all sparse ones; `policy` is the policy as it
        selects in them.
      settings: Static settings.
    """
    model_config, policy = settings.model_config, settings.policy
    num_layers, sparse = model_config.num_layers, sparse_layers(model_config, policy)
    kinds = [
        policy.for_layer(layer, num_layers) if layer in sparse else None
        for layer in range(num_layers)
    ]
    found, first = [], 0
    for kind, same in itertools.groupby(kinds):
        part = range(first, first + len(list(same)))
        before = sum(layer < part.start for layer in sparse)
        attend = make(
            is_sparse=kind is not None, first_sparse=part.start - before, policy=kind or policy
        )
        found.append((part, attend))
        first = part.stop
    return found


def join_layers(
    found: Sequence[tuple[Float[Array, "_ B"], PyTree]],
) -> tuple[Float[Array, "L B"], PyTree]:
    """Pairs of all layers, and what the sparse ones selected (`None` if nothing was kept)."""
    kept = [selection for _, selection in found if selection is not None]
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept) if kept else None
    return jnp.concatenate([pairs for pairs, _ in found]), joined


def observe_layer(
    statistics: PyTree,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    *,
    index: Int[Array, ""],
    span: Span,
    policy: Policy,
    kernels: KernelConfig | None = None,
) -> tuple[PyTree, PyTree]:
    """Adds the span's tokens to one layer's statistics; returns that layer's and all layers'."""
    found = policy.observe_in_place(query, key, statistics, layer=index, span=span, kernels=kernels)
    if found is not None:
        return policy.of_layer(found, index), found
    one = take_layer(statistics, index)
    one = policy.observe(query, key, one, span=span, kernels=kernels)
    stacked = jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), statistics, one
    )
    return one, stacked


def write_and_observe(
    cache: Cache,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    layer: Int[Array, ""],
    index: Int[Array, ""] | None,
    start: Int[Array, "B"] | None,
    span: Span,
    policy: Policy,
    settings: LayerSettings,
    observed: tuple[Array, Array] | None = None,
    blocks: Blocks | None = None,
) -> tuple[Cache, PyTree]:
    """Writes the span's keys and values into one layer, and adds them to its statistics.

    Args:
      cache: The cache.
      query: Queries of the span's tokens.
      key: Their keys.
      value: Their values.
      layer: The layer.
      index: Its index among the sparse ones; `None` where it keeps no statistics.
      start: Position of column 0, as `write_layer` takes it.
      span: The tokens.
      policy: The policy.
      settings: Static settings.
      observed: Queries and keys that the statistics are of, where these are not the written ones.
      blocks: How the blocks of the cache are spread over ranks; `None` where they are all here.

    Returns:
      The cache, and the layer's statistics.
    """
    # Of a token, each launch takes longer than what it does.
    kernels = settings.row_kernels if span.is_token else None
    write = TokenWrite(value, cache.key, cache.value, layer)
    is_own = observed is None and blocks is None
    if kernels is not None and index is not None and is_own:
        where: dict[str, Any] = {"layer": index, "span": span, "kernels": kernels}
        found = policy.append_in_place(key, cache.statistics, write, **where)
        if found is not None:
            statistics, keys, values = found
            cache = dataclasses.replace(cache, key=keys, value=values, statistics=statistics)
            return cache, policy.of_layer(statistics, index)
    observed = (query, key) if observed is None else observed
    place = span
    if blocks is not None:
        size = policy.block_size
        place, key, value = _own_span(span, key, value, blocks, size, cache.capacity)
        start = None if start is None else place.start(size)
        write = write._replace(value=value)
    written = None if kernels is None else write_token(key, write, place, kernel_config=kernels)
    if written is None:
        keys, values = (
            write_layer(buffer, new, layer=layer, start=start, span=place)
            for buffer, new in ((cache.key, key), (cache.value, value))
        )
    else:
        keys, values = written
    cache = dataclasses.replace(cache, key=keys, value=values)
    if index is None:
        return cache, None
    where = {"index": index, "span": span, "kernels": settings.selection_kernels}
    one, statistics = observe_layer(cache.statistics, *observed, policy=policy, **where)
    return dataclasses.replace(cache, statistics=statistics), one


def layer_attention(
    span: Span,
    *,
    is_fresh: bool,
    is_sparse: bool,
    first_sparse: int,
    policy: Policy,
    settings: LayerSettings,
) -> Attend:
    """Attention of the span's tokens: those of a prompt, or one of each sequence.

    Tokens that are not valid (padding, sequences that have ended) leave no trace.

    Args:
      span: The tokens.
      is_fresh: Whether every sequence starts at position 0.
      is_sparse: Whether these layers belong to the policy (its dense ones do not).
      first_sparse: What a layer's index among the sparse ones counts from.
      policy: The policy as it selects in these layers.
      settings: Static settings.
    """
    make = functools.partial(
        _attention,
        is_fresh=is_fresh,
        is_sparse=is_sparse,
        first_sparse=first_sparse,
        policy=policy,
        settings=settings,
    )
    placement = settings.placement
    return make(span) if placement is None else _on_ranks(make, span, policy, placement)


def _attention(
    span: Span,
    *,
    is_fresh: bool,
    is_sparse: bool,
    first_sparse: int,
    policy: Policy,
    settings: LayerSettings,
) -> Attend:
    """`layer_attention` where all is here, or of one rank, whose heads `span.heads` counts.

    Where ranks share the blocks of a sequence, `span` is still that of all tokens: in a prompt
    queries, keys and values are those of this rank's rows (`span.blocks`).
    """
    kernels, size = settings.selection_kernels, policy.block_size
    start = None if is_fresh else span.start(size)
    first_query, num_queries = span.queries_of_rows(size)
    num_new = jnp.sum(num_queries, axis=-1, dtype=jnp.int32)
    all_pairs = causal_pairs(span.end - num_new, num_new)
    selects = is_sparse and settings.selects_in(span.phase)
    heads, rows = span.heads, span.blocks
    placement = settings.placement
    blocks = None if placement is None else placement.blocks
    walk_axes = None if placement is None else placement.rows_of_walk(policy)
    sees_all = heads is not None and is_sparse and policy.heads_on_mesh == "all"

    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walk = state
        observed = None
        before: tuple[Array, ...] = ()
        if rows is not None and not is_fresh:
            # Not with what is written now: so they travel while this layer computes what that is.
            gather = functools.partial(rows.gather_cache, layer=layer, block_size=size)
            before = gather(cache.key), gather(cache.value)
        if heads is not None:
            if sees_all:
                observed = heads.gather(query, axis=2), _all_keys(key, heads)
            key, value = (_own_keys(x, heads) for x in (key, value))
        if rows is not None:
            observed = (query, key) if observed is None else observed
            key, value = (rows.gather(x, axis=1) for x in (key, value))
            if policy.blocks_on_mesh == "keys":
                observed = observed[0], rows.gather(observed[1], axis=1) if sees_all else key
        cache, one = write_and_observe(
            cache,
            query,
            key,
            value,
            layer=layer,
            index=layer - first_sparse if is_sparse else None,
            start=start,
            span=span,
            policy=policy,
            settings=settings,
            observed=observed,
            blocks=blocks,
        )
        seen = query if observed is None else observed[0]
        keys, place = (cache.key, cache.value), layer
        if rows is not None:  # of all ranks; if these are not all there is, behind the cache's
            keys, place = (key[None], value[None]), jnp.zeros((), jnp.int32)
        if before:
            write = functools.partial(write_layer, layer=place, start=start, span=span)
            keys = write(before[0], key), write(before[1], value)
        found = []
        spans, starts = ([span], [start]) if rows is None else _spans_of_pieces(span, rows, size)
        queries, seens = (jnp.split(x, len(spans), axis=1) for x in (query, seen))
        walks = [walk] if rows is None else _split_walk(walk, walk_axes)
        for own, first, query, seen, walk in zip(spans, starts, queries, seens, walks, strict=True):
            selection, pairs, kept = None, all_pairs, None
            if selects:
                cached = cache.key
                if heads is not None and sees_all and blocks is None:
                    cached = heads.gather_keys(cached, axis=3)
                selection, walk = policy.select(
                    seen, cached, one, walk, layer=layer, span=own, kernels=kernels
                )
                pairs = selection.attended_pairs(*own.queries_of_rows(size))
                kept = selection if settings.return_selection else None
                if heads is not None:
                    selection, kept, pairs = _share_lists(selection, kept, pairs, heads, policy)
            held = blocks if own.is_token else None
            how = _how_to_attend(selection, own, first, keys, place, held, size, settings)
            out = how(query, *keys)
            if held is not None:
                out = held.merge(*out)
            elif isinstance(out, tuple):
                out = out[0]
            found.append((out, walk, pairs, kept))
        if rows is None:
            ((out, walk, pairs, kept),) = found
        else:
            out, walk, pairs, kept = _join_pieces(found, walk_axes, rows)
            pairs = pairs if selects else all_pairs
        return out, (cache, walk), (pairs, kept)

    return attend


def _how_to_attend(
    selection: BlockSelection | None,
    span: Span,
    start: Int[Array, "B"] | None,
    keys: tuple[Array, Array],
    layer: Int[Array, ""],
    blocks: Blocks | None,
    size: int,
    settings: LayerSettings,
) -> Callable[..., Any]:
    """Attention to listed blocks, or to everything, as a function of queries, keys and values.

    Args:
      selection: The lists; `None` for everything.
      span: The tokens.
      start: Position of the first query, `None` for 0.
      keys: Keys and values, of all layers or of one.
      layer: The layer among them.
      blocks: How blocks are spread over ranks, of which each has some of these keys and so gives
        an output and its log-sum-exp; `None` where they are all here.
      size: Tokens of a block.
      settings: Static settings.
    """
    where: dict[str, Any] = {"layer": layer, "kv_lengths": span.end, "scale": settings.scale}
    where |= {"kernel_config": settings.kernel_config, "return_lse": blocks is not None}
    if blocks is not None:
        own = blocks.own_tokens(span.end, size)
        where["kv_lengths"], start = own, own - 1
        if selection is not None:
            capacity = keys[0].shape[2]
            selection = blocks.own_lists(selection, block_size=size, capacity=capacity)
    if selection is None:
        where["implementation"] = settings.dense_implementation
        return functools.partial(dense_attention, query_offset=start, **where)
    where |= {"implementation": settings.implementation, "selection": selection}
    if span.is_token:
        return functools.partial(block_sparse_decode, **where)
    return functools.partial(attend_rows, first_block=span.first_block, **where)


# On a mesh.


def _on_ranks(
    make: Callable[[Span], Attend], span: Span, policy: Policy, placement: Placement
) -> Attend:
    """Attention on a mesh: every rank attends with its sequences, heads and rows, to its cache.

    Keys and values come whole where they have fewer heads than there are ranks. Beside what the
    policy sends (`Policy.heads_on_mesh`, `Policy.blocks_on_mesh`), keys and values of a prompt
    travel between ranks of `sequence`, and outputs of a token (`sharding`).

    Args:
      make: Gives attention for a rank's tokens.
      span: The tokens of all.
      policy: The policy.
      placement: Where all lies.
    """
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

        def on_rank(
            span: Span,
            arrays: dict[str, PyTree],
            walk: PyTree,
            query: Array,
            key: Array,
            value: Array,
            layer: Array,
        ) -> Any:
            state = dataclasses.replace(cache, **arrays), walk
            out, (own, walk), aux = make(span)(query, key, value, layer, state)
            return out, {name: getattr(own, name) for name in arrays}, walk, aux

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


# Ranks that share the heads.


def _own_keys(x: Float[Array, "B T K H"], heads: Heads) -> Float[Array, "B T K1 H"]:
    """Keys or values of this rank's heads, which came whole if there are fewer than ranks."""
    return heads.own(x, axis=2) if heads.copies > 1 else x


def _all_keys(x: Float[Array, "B T K1 H"], heads: Heads) -> Float[Array, "B T K H"]:
    """Keys of all heads, which came whole if there are fewer than ranks."""
    return x if heads.copies > 1 else heads.gather(x, axis=2)


def _share_lists(
    selection: BlockSelection,
    kept: BlockSelection | None,
    pairs: Float[Array, "B"],
    heads: Heads,
    policy: Policy,
) -> tuple[BlockSelection, BlockSelection | None, Float[Array, "B"]]:
    """Lists of this rank's heads; lists to return, and pairs as a mean, of all ranks' heads."""

    def each(take: Callable[..., Array], lists: BlockSelection) -> BlockSelection:
        ids, counts = (take(x, axis=1) for x in (lists.ids, lists.counts))
        return dataclasses.replace(lists, ids=ids, counts=counts)

    num_lists = selection.ids.shape[1]
    if policy.heads_on_mesh == "all" and num_lists > 1:
        return each(heads.own, selection), kept, pairs
    if policy.heads_on_mesh == "own":
        pairs = jax.lax.pmean(pairs, heads.axis)
        if kept is not None and num_lists == heads.num_heads // heads.ranks:
            kept = each(heads.gather, kept)
    return selection, kept, pairs


# Ranks that share the blocks of a sequence.


def _own_span(
    span: Span,
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    blocks: Blocks,
    size: int,
    capacity: int,
) -> tuple[Span, Float[Array, "B T1 K H"], Float[Array, "B T1 K H"]]:
    """What this rank's cache holds of a span, where it lies there, and its keys and values.

    Args:
      span: The tokens.
      key: Keys of all of them.
      value: Their values.
      blocks: How the blocks of the cache are spread.
      size: Tokens of a block.
      capacity: Tokens that this rank's cache has room for.
    """
    if span.is_token:
        block = span.positions // size
        place = blocks.own_before(block) * size + span.positions % size
        is_mine = block % blocks.ranks == blocks.rank
        return Span.of_tokens(place, size, span.valid[:, 0] & is_mine), key, value

    def own(x: Array) -> Array:
        by_block = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        mine = blocks.own_blocks(by_block, span.first_block)
        return mine.reshape(x.shape[0], -1, *x.shape[2:])[:, :capacity]

    first, end = blocks.own_before(span.first_block), blocks.own_tokens(span.end, size)
    return Span(first, own(span.valid), end, end), own(key), own(value)


def _spans_of_pieces(
    span: Span, rows: Blocks, size: int
) -> tuple[list[Span], list[Int[Array, "B"]]]:
    """The two stretches of rows that are this rank's, and the position of the first token."""
    width = span.valid.shape[1] // size // rows.num_pieces
    places = rows.rank, rows.num_pieces - 1 - rows.rank
    spans = [
        dataclasses.replace(
            span, first_block=span.first_block + piece * width, valid=valid, blocks=None
        )
        for piece, valid in zip(places, rows.pieces(span.valid, axis=1), strict=True)
    ]
    return spans, [one.start(size) for one in spans]


def _split_walk(walk: PyTree, axes: PyTree) -> list[PyTree]:
    """The walk of this rank's rows, each array's along its axis, as that of its two pieces."""

    def piece(index: int) -> PyTree:
        return jax.tree.map(
            lambda axis, x: jnp.split(x, 2, axis=axis)[index] if axis >= 0 else x, axes, walk
        )

    return [piece(0), piece(1)]


def _join_pieces(
    found: Sequence[tuple[Array, PyTree, Float[Array, "B"], BlockSelection | None]],
    axes: PyTree,
    rows: Blocks,
) -> tuple[Array, PyTree, Float[Array, "B"], BlockSelection | None]:
    """Outputs, walks and lists of two pieces as those of this rank's rows; pairs of all ranks."""
    outs, walks, pairs, kept = zip(*found, strict=True)
    walk = jax.tree.map(
        lambda axis, *x: jnp.concatenate(x, axis=axis) if axis >= 0 else x[0],
        axes,
        *walks,
    )
    lists = None
    if kept[0] is not None:
        ids, counts = (
            jnp.concatenate([getattr(one, name) for one in kept], axis=2)
            for name in ("ids", "counts")
        )
        lists = dataclasses.replace(kept[0], ids=ids, counts=counts)
    return jnp.concatenate(outs, axis=1), walk, jax.lax.psum(sum(pairs), rows.axis), lists
