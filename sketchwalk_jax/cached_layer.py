"""Attention of one layer inside inference: write the cache, observe, select, attend.

`layer_attention` builds the callback that `run_layers` calls, for the tokens of a prompt and for a
decoded one alike. Its state is `(cache, walk)`, and its per-layer output the pairs attended to and,
on request, the selection.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention.api import attend_rows, block_sparse_decode, dense_attention
from sketchwalk_jax.cache import sparse_layers, write_layer
from sketchwalk_jax.dispatch import IMPLEMENTATIONS, row_kernels, selection_kernels
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import Attend
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy, Span, take_layer
from sketchwalk_jax.selection import causal_pairs

PyTree = Any
PHASES = ("both", "prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything static about a call to the model; hashable, one compiled program each.

    Attributes:
      model_config: The model.
      config: The policy.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`.
      chunk_size: Tokens that prefill processes at a time, or `None` for all.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes, or `None` for the defaults.
      return_selection: Whether the selected blocks are returned.
      return_all_logits: Whether prefill returns the logits of every token.

    Raises:
      ValueError: If an option is unknown, or two contradict each other.
    """

    model_config: ModelConfig
    config: Policy
    phase: str = "both"
    chunk_size: int | None = None
    implementation: str | None = None
    kernel_config: KernelConfig | None = None
    return_selection: bool = False
    return_all_logits: bool = False

    def __post_init__(self) -> None:
        """Checks every option."""
        if not isinstance(self.config, Policy):
            raise ValueError(
                f"config must be a policy such as SketchWalkConfig or Dense, got {self.config!r}"
            )
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES}, got {self.phase!r}")
        own = self.config.phases
        if self.phase != "both" and own and self.phase not in own:
            raise ValueError(
                f"phase must be 'both' or {own[0]!r} for {type(self.config).__name__}, which "
                f"selects in {own[0]} only and is dense elsewhere, got {self.phase!r}"
            )
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"implementation must be None or one of {IMPLEMENTATIONS}, "
                f"got {self.implementation!r}"
            )
        size, chunk = self.config.block_size, self.chunk_size
        if chunk is not None and (not isinstance(chunk, int) or chunk < size or chunk % size):
            raise ValueError(
                f"chunk_size must be a positive multiple of the block size {size}, got {chunk!r}"
            )

    def selects_in(self, phase: str) -> bool:
        """Whether sparse layers select blocks in this phase; the other phase is dense."""
        return self.phase in ("both", phase) and phase in self.config.phases

    @property
    def dense_implementation(self) -> str | None:
        """What dense layers ask for: XLA where everything is to run on it, else the choice."""
        return "xla" if self.implementation == "xla" else None

    @property
    def row_kernels(self) -> KernelConfig | None:
        """What products of few rows may run their kernel with, or `None` where XLA makes them."""
        return row_kernels(self.implementation, self.kernel_config)

    @property
    def selection_kernels(self) -> KernelConfig | None:
        """What policies may run their kernels with, or `None` where they select on XLA."""
        return selection_kernels(self.implementation, self.kernel_config)


def attention_by_layer(
    make: Callable[..., Attend], settings: Settings
) -> list[tuple[range, Attend]]:
    """Runs of layers that attend alike, each with its attention, as `run_layers` takes.

    Args:
      make: `(is_sparse, first_sparse, config) -> attend`. In a run of sparse layers, `layer -
        first_sparse` is the index of a layer among all sparse ones; `config` is the policy as it
        selects in them.
      settings: Static settings.
    """
    model_config, config = settings.model_config, settings.config
    num_layers, sparse = model_config.num_layers, sparse_layers(model_config, config)
    kinds = [
        config.for_layer(layer, num_layers) if layer in sparse else None
        for layer in range(num_layers)
    ]
    found, first = [], 0
    for kind, same in itertools.groupby(kinds):
        part = range(first, first + len(list(same)))
        before = sum(layer < part.start for layer in sparse)
        attend = make(
            is_sparse=kind is not None, first_sparse=part.start - before, config=kind or config
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
    config: Policy,
    kernels: KernelConfig | None = None,
) -> tuple[PyTree, PyTree]:
    """Adds the span's tokens to one layer's statistics; returns that layer's and all layers'."""
    found = config.observe_in_place(query, key, statistics, layer=index, span=span, kernels=kernels)
    if found is not None:
        return config.of_layer(found, index), found
    one = take_layer(statistics, index)
    one = config.observe(query, key, one, span=span, kernels=kernels)
    stacked = jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), statistics, one
    )
    return one, stacked


def layer_attention(
    span: Span,
    *,
    is_fresh: bool,
    is_sparse: bool,
    first_sparse: int,
    config: Policy,
    settings: Settings,
) -> Attend:
    """Attention of the span's tokens: those of a prompt, or one of each sequence.

    Tokens that are not valid (padding, sequences that have ended) leave no trace.

    Args:
      span: The tokens.
      is_fresh: Whether every sequence starts at position 0.
      is_sparse: Whether these layers belong to the policy (its dense ones do not).
      first_sparse: What a layer's index among the sparse ones counts from.
      config: The policy as it selects in these layers.
      settings: Static settings.
    """
    kernels = settings.selection_kernels
    start = None if is_fresh else span.start(config.block_size)
    first_query, num_queries = span.queries_of_rows(config.block_size)
    num_new = jnp.sum(num_queries, axis=-1, dtype=jnp.int32)
    all_pairs = causal_pairs(span.end - num_new, num_new)
    selects = is_sparse and settings.selects_in(span.phase)

    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walk = state
        keys = write_layer(cache.key, key, layer=layer, start=start, span=span)
        values = write_layer(cache.value, value, layer=layer, start=start, span=span)
        statistics, pairs, kept = cache.statistics, all_pairs, None
        if is_sparse:
            index = layer - first_sparse
            one, statistics = observe_layer(
                statistics, query, key, index=index, span=span, config=config, kernels=kernels
            )
        where: dict[str, Any] = {
            "layer": layer,
            "kv_lengths": span.end,
            "implementation": settings.implementation,
            "kernel_config": settings.kernel_config,
        }
        if not selects:
            where["implementation"] = settings.dense_implementation
            out = dense_attention(query, keys, values, query_offset=start, **where)
        else:
            selection, walk = config.select(
                query, keys, one, walk, layer=layer, span=span, kernels=kernels
            )
            pairs = selection.attended_pairs(first_query, num_queries)
            kept = selection if settings.return_selection else None
            if span.is_token:
                out = block_sparse_decode(query, keys, values, selection, **where)
            else:
                where |= {"first_block": span.first_block, "return_lse": False}
                out, _ = attend_rows(query, keys, values, selection, **where)
        cache = dataclasses.replace(cache, key=keys, value=values, statistics=statistics)
        return out, (cache, walk), (pairs, kept)

    return attend
