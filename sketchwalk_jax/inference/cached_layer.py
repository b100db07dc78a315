"""Attention of one layer in inference: write the cache, update statistics, select, attend.

`layer_attention` builds the callback that `run_layers` calls, both for prompts and for decoded
tokens. The callback's state is `(cache, walk)`. Its output per layer is the number of attended
pairs and, on request, the selection.

XLA partitions the rest of the model over a mesh. Attention runs under `jax.shard_map`: every rank
runs the callback with its own sequences, heads and query blocks, and an `Exchange` fetches what it
needs from other ranks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.api import dense_attention, prepare_lists
from sketchwalk_jax.attention.differentiable import attend_lists
from sketchwalk_jax.inference.cache import Cache, sparse_layers, write_layer
from sketchwalk_jax.inference.exchange import Exchange, MeshExchange, Tokens, specs_of_ranks
from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.models.quantized import SwigluQuantize
from sketchwalk_jax.models.transformer import (
    Attend,
    Mix,
    Multiply,
    linear_of_rows,
    sums_of_rows,
)
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.decode_matmul.api import swiglu_quantize
from sketchwalk_jax.pallas_kernels.dispatch import (
    IMPLEMENTATIONS,
    choose_dense_implementation,
    is_gpu_without,
    row_kernels,
    selection_kernels,
)
from sketchwalk_jax.pallas_kernels.key_quantization.api import write_token
from sketchwalk_jax.policies.base import Policy, Span, TokenWrite, check_policy, take_layer
from sketchwalk_jax.selection import causal_pairs
from sketchwalk_jax.sharding import Placement, choose_mixture, gate_on_ranks, linear_on_ranks

PyTree = Any
PHASES = ("both", "prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Everything static about the attention of one layer with a cache; hashable.

    Attributes:
      policy: The policy.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`.
      scale: Factor of the attention scores, or `None` for `1 / sqrt(H)`.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes, or `None` for the defaults.
      return_selection: Whether the selected blocks are returned.
      placement: Placement of the model on a mesh, or `None` on one device.
      on_one_device: Whether the model is known to be on one device. Default: if JAX has one only.

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

    @property
    def is_padded(self) -> bool:
        """Whether prompts are expected to be shorter than their columns."""
        return False

    def selects_in(self, phase: str) -> bool:
        """Whether sparse layers select blocks in this phase. If not, they are dense in it."""
        return self.phase in ("both", phase) and phase in self.policy.phases

    def _row_kernels(self, what: str) -> KernelConfig | None:
        """Settings of kernels for one token, or `None` to use XLA.

        These kernels need all weights and caches on this device, or a placement of their parts.
        """
        given = self.implementation, self.kernel_config
        if self.placement is not None:
            return selection_kernels(*given, what=what)
        return row_kernels(*given, on_one_device=self.on_one_device, what=what)

    @property
    def token_kernels(self) -> KernelConfig | None:
        """Settings of kernels that write a token and update statistics; `None` for XLA."""
        return self._row_kernels(self.policy.token_kernels)

    @property
    def multiply_rows(self) -> Multiply | None:
        """The decode matmul: multiplies few rows with weights. `None` to use XLA's matmul."""
        kernel_config = self._row_kernels("linear layers")
        if kernel_config is None:
            is_alone = self.placement is None and self.on_one_device
            return sums_of_rows if is_alone and is_gpu_without("linear layers") else None
        if self.placement is None:
            return functools.partial(linear_of_rows, kernel_config=kernel_config)
        return functools.partial(
            linear_on_ranks, placement=self.placement, kernel_config=kernel_config
        )

    @property
    def mix(self) -> Mix:
        """The mixture of experts on these devices."""
        return choose_mixture(self.placement, self._row_kernels("linear layers"))

    @property
    def swiglu_quantize(self) -> SwigluQuantize | None:
        """The mlp's step between two float8 matmuls of a prompt, or `None` to use XLA.

        If ranks share the columns of a row, no rank knows the row's maximum, so XLA is used.
        """
        kernel_config = self._row_kernels("float8 SwiGLU")
        if kernel_config is None:
            return None
        if self.placement is None:
            return functools.partial(swiglu_quantize, kernel_config=kernel_config)
        if self.placement.size("tensor") > 1:
            return None
        return functools.partial(
            gate_on_ranks, placement=self.placement, kernel_config=kernel_config
        )

    def selection_kernels(self, phase: str) -> KernelConfig | None:
        """Settings of the policy's kernels in a phase, or `None` to use XLA."""
        policy = self.policy
        what = policy.token_kernels if phase == "decode" else policy.prompt_kernels
        return selection_kernels(self.implementation, self.kernel_config, what=what)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(LayerSettings):
    """Everything static about a call to the model; hashable. Each value compiles one program.

    Attributes:
      model_config: The model.
      chunk_size: Tokens that prefill processes at a time, or `None` for all.
      sixteenths: If given, a program for prompts of any length up to the columns that it takes.
        What each token needs by itself is computed for the least of these sixteenths of the columns
        that holds all tokens. Such a program returns no selection.
      return_all_logits: Whether prefill returns the logits of every token.

    Raises:
      ValueError: If an option is unknown, or two contradict each other.
    """

    model_config: ModelConfig
    chunk_size: int | None = None
    sixteenths: tuple[int, ...] = ()
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

    @property
    def is_padded(self) -> bool:
        """Whether this is a program for prompts of many lengths."""
        return bool(self.sixteenths)

    def with_numbers(self, numbers: PyTree) -> "Settings":
        """Puts the numbers of `Policy.for_program` back into the policy."""
        if numbers is None:
            return self
        return dataclasses.replace(self, policy=self.policy.with_numbers(numbers))


def attention_by_layer(
    make: Callable[..., Attend], settings: Settings
) -> list[tuple[range, Attend]]:
    """Groups consecutive layers that attend alike, each group with its attention, for `run_layers`.

    Args:
      make: `(is_sparse, first_sparse, policy) -> attend`. In a group of sparse layers, `layer -
        first_sparse` is a layer's index among all sparse layers, and `policy` is the policy with
        these layers' settings.
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
    """Concatenates all layers' pairs and sparse layers' selections (`None` if none was kept)."""
    kept = [selection for _, selection in found if selection is not None]
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept) if kept else None
    return jnp.concatenate([pairs for pairs, _ in found]), joined


def update_layer_statistics(
    statistics: PyTree,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    *,
    index: Int[Array, ""],
    span: Span,
    policy: Policy,
    kernel_config: KernelConfig | None = None,
) -> tuple[PyTree, PyTree]:
    """Adds the span's tokens to one layer's statistics; returns that layer's and all layers'."""
    in_place = policy.in_place
    if in_place is not None:
        found = in_place.update_statistics(
            key, statistics, layer=index, span=span, kernel_config=kernel_config
        )
        if found is not None:
            return in_place.of_layer(found[0], index), found[0]
    one = take_layer(statistics, index)
    one = policy.update_statistics(query, key, one, span=span, kernel_config=kernel_config)
    stacked = jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), statistics, one
    )
    return one, stacked


def write_and_update(
    cache: Cache,
    tokens: Tokens,
    *,
    layer: Int[Array, ""],
    index: Int[Array, ""] | None,
    exchange: Exchange,
    settings: LayerSettings,
) -> tuple[Cache, PyTree]:
    """Writes the span's keys and values into one layer, and adds them to its statistics.

    `layer` is the layer, and `index` its index among the sparse layers; `None` if it has no
    statistics. Returns the cache, and the layer's statistics.
    """
    policy, span = exchange.policy, exchange.span
    # For one token, launching a kernel takes longer than its work: write and update in one launch.
    kernel_config = settings.token_kernels if span.is_token else None
    place, start, key, value = exchange.held(tokens, cache.capacity)
    write = TokenWrite(value, cache.key, cache.value, layer)
    in_place = policy.in_place if place is span and tokens.seen_key is key else None
    if in_place is not None and kernel_config is not None and index is not None:
        found = in_place.update_statistics(
            key, cache.statistics, layer=index, span=span, kernel_config=kernel_config, write=write
        )
        if found is not None:
            statistics, keys, values = found
            cache = dataclasses.replace(cache, key=keys, value=values, statistics=statistics)
            return cache, in_place.of_layer(statistics, index)
    written = None
    if kernel_config is not None:
        written = write_token(key, write, place, kernel_config=kernel_config)
    keys, values = written or (
        write_layer(buffer, new, layer=layer, start=start, span=place)
        for buffer, new in ((cache.key, key), (cache.value, value))
    )
    cache = dataclasses.replace(cache, key=keys, value=values)
    if index is None:
        return cache, None
    one, statistics = update_layer_statistics(
        cache.statistics,
        tokens.seen_query,
        tokens.seen_key,
        index=index,
        span=span,
        policy=policy,
        kernel_config=settings.selection_kernels(span.phase),
    )
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
    """Builds the attention of the span's tokens: whole prompts, or one token of each sequence.

    Invalid tokens (padding, sequences that have ended) change neither cache nor statistics.

    Args:
      span: The tokens, of all ranks.
      is_fresh: Whether every sequence starts at position 0.
      is_sparse: Whether the policy selects in these layers (its dense layers attend to everything).
      first_sparse: Offset to subtract from a layer's index to get its index among sparse layers.
      policy: The policy with these layers' settings.
      settings: Static settings.
    """
    size, placement = policy.block_size, settings.placement
    selects = is_sparse and settings.selects_in(span.phase)
    options: dict[str, Any] = {"scale": settings.scale, "kernel_config": settings.kernel_config}

    def start(span: Span) -> Int[Array, "B"] | None:
        return None if is_fresh else span.start(size)

    def count_pairs(span: Span) -> Float[Array, "B"]:
        num_new = jnp.sum(span.queries_of_rows(size)[1], axis=-1, dtype=jnp.int32)
        return causal_pairs(span.end - num_new, num_new)

    def attend(
        exchange: Exchange,
        all_pairs: Float[Array, "B"],
        query: Array,
        key: Array,
        value: Array,
        layer: Array,
        state: PyTree,
    ) -> Any:
        """Computes one layer on one device, or one rank's part of it."""
        cache, walk = state
        index = layer - first_sparse if is_sparse else None
        tokens = exchange.gather(query, key, value, cache, layer)
        cache, statistics = write_and_update(
            cache, tokens, layer=layer, index=index, exchange=exchange, settings=settings
        )
        keys, values, place = exchange.attended(cache, tokens, layer)
        found = []
        for piece in exchange.pieces(tokens, walk):
            walk, pairs, lists, kept = piece.walk, all_pairs, None, None
            if selects:
                lists, walk = policy.select(
                    piece.seen_query,
                    exchange.seen_cache(cache.key),
                    statistics,
                    walk,
                    layer=layer,
                    span=piece.span,
                    kernel_config=settings.selection_kernels(span.phase),
                )
                first_query, num_queries = piece.span.queries_of_rows(size)
                if not span.is_token:  # rows of padding attend to nothing
                    counts = jnp.where(num_queries[:, None] > 0, lists.counts, 0)
                    lists = dataclasses.replace(lists, counts=counts)
                pairs = lists.attended_pairs(first_query, num_queries)
                kept = lists if settings.return_selection else None
                lists, kept, pairs = exchange.share(lists, kept, pairs)
            own, lists, is_part = exchange.narrow(piece, lists, keys.shape[2])
            where = {"layer": place, "kv_lengths": own.span.end, "return_lse": is_part, **options}
            if lists is None:
                chosen = choose_dense_implementation(
                    "xla" if settings.implementation == "xla" else None,
                    own.query,
                    num_keys=keys.shape[-3],
                    has_offset=own.start is not None,
                    return_lse=is_part,
                    is_padded=settings.is_padded,
                    kernel_config=settings.kernel_config,
                )
                where |= {"query_offset": own.start, "implementation": chosen}
                out = dense_attention(own.query, keys, values, **where)
            else:
                first_block = None if span.is_token else own.span.first_block
                where |= {"implementation": settings.implementation}
                given = prepare_lists(own.query, keys, values, lists, first_block, **where)
                out = attend_lists(*given)
            found.append((exchange.merge(out), walk, pairs, kept))
        out, walk, pairs, kept = exchange.join(found)
        return out, (cache, walk), (pairs if selects else all_pairs, kept)

    if placement is None:
        return functools.partial(attend, Exchange(span, policy, start(span)), count_pairs(span))
    span = dataclasses.replace(
        span, heads=placement.heads, blocks=None if span.is_token else placement.blocks
    )
    fields, in_specs, out_specs = specs_of_ranks(span, policy, placement)

    def attend_on_mesh(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        """Computes one layer on a mesh, each rank its own sequences, heads and query blocks."""
        cache, walk = state

        def on_rank(span: Span, arrays: dict[str, PyTree], walk: PyTree, *tokens: Any) -> Any:
            exchange = MeshExchange(span, policy, start(span), placement, is_sparse)
            query, key, value, layer = tokens
            state = dataclasses.replace(cache, **arrays), walk
            out, (written, walk), aux = attend(
                exchange, count_pairs(span), query, key, value, layer, state
            )
            return out, {name: getattr(written, name) for name in arrays}, walk, aux

        shared = jax.shard_map(
            on_rank,
            mesh=placement.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        arrays = {name: getattr(cache, name) for name in fields}
        out, arrays, walk, aux = shared(span, arrays, walk, query, key, value, layer)
        return out, (dataclasses.replace(cache, **arrays), walk), aux

    return attend_on_mesh
