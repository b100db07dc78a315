"""Attention of one layer inside inference: write the cache, observe, select, attend.

`prefill_attention` and `decode_attention` build the callback that `run_layers` calls; its state is
`(cache, walk)` and its per-layer output is the pairs attended to and, on request, the selection.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sketchwalk_jax.attention import attend_rows, block_sparse_decode, dense_attention
from sketchwalk_jax.cache import write_prompt, write_token
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import Attend
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.dispatch import selecting_with
from sketchwalk_jax.policies.base import Policy, Span
from sketchwalk_jax.selection import causal_pairs

PyTree = Any


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
    """

    model_config: ModelConfig
    config: Policy
    phase: str = "both"
    chunk_size: int | None = None
    implementation: str | None = None
    kernel_config: KernelConfig | None = None
    return_selection: bool = False
    return_all_logits: bool = False

    def selects_in(self, phase: str) -> bool:
        """Whether sparse layers select blocks in this phase; the other phase is dense."""
        return self.phase in ("both", phase) and phase in self.config.phases

    @property
    def dense_implementation(self) -> str | None:
        """What dense layers ask for: XLA where everything is to run on it, else the choice."""
        return "xla" if self.implementation == "xla" else None


def observe_layer(
    statistics: PyTree, query: Array, key: Array, *, config: Policy, index: Array, span: Span
) -> tuple[PyTree, PyTree]:
    """Adds the span's tokens to one layer's statistics; returns that layer's and all layers'."""
    one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), statistics)
    one = config.observe(query, key, one, span=span)
    stacked = jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), statistics, one
    )
    return one, stacked


def prefill_attention(
    span: Span, *, is_fresh: bool, is_sparse: bool, first_sparse: int, settings: Settings
) -> Attend:
    """Attention for prompt tokens.

    Args:
      span: The tokens.
      is_fresh: Whether every sequence starts at position 0.
      is_sparse: Whether these layers belong to the policy (the leading dense ones do not).
      first_sparse: Index of the first sparse layer.
      settings: Static settings.
    """
    config, size = settings.config, settings.config.block_size
    rows = span.rows(size)
    offset = span.first_block * size
    # A row may begin and end with padding: its first real query, and how many there are.
    by_row = span.valid.reshape(*rows.shape, size)
    first_query = rows * size + jnp.argmax(by_row, axis=-1).astype(jnp.int32)
    row_queries = jnp.sum(by_row, axis=-1, dtype=jnp.int32)
    num_new = jnp.sum(row_queries, axis=-1, dtype=jnp.int32)
    all_pairs = causal_pairs(span.end - num_new, num_new)

    @selecting_with(settings.implementation)
    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walk = state
        start = None if is_fresh else offset
        keys = write_prompt(cache.key, key, layer=layer, start=start, valid=span.valid)
        values = write_prompt(cache.value, value, layer=layer, start=start, valid=span.valid)
        statistics, pairs, kept = cache.statistics, all_pairs, None
        if is_sparse:
            index = layer - first_sparse
            one, statistics = observe_layer(
                statistics, query, key, config=config, index=index, span=span
            )
        if is_sparse and settings.selects_in("prefill"):
            selection, walk = config.select_prefill(query, keys, one, walk, layer=layer, span=span)
            pairs = selection.attended_pairs(first_query, row_queries)
            kept = selection.blocks if settings.return_selection else None
            out, _ = attend_rows(
                query,
                keys,
                values,
                selection,
                first_block=span.first_block,
                layer=layer,
                kv_lengths=span.end,
                return_lse=False,
                implementation=settings.implementation,
                kernel_config=settings.kernel_config,
            )
        else:
            out = dense_attention(
                query,
                keys,
                values,
                layer=layer,
                query_offset=None if is_fresh else offset,
                kv_lengths=span.end,
                implementation=settings.dense_implementation,
                kernel_config=settings.kernel_config,
            )
        cache = dataclasses.replace(cache, key=keys, value=values, statistics=statistics)
        return out, (cache, walk), (pairs, kept)

    return attend


def decode_attention(
    positions: Int[Array, "B"],
    active: Bool[Array, "B"],
    *,
    is_sparse: bool,
    first_sparse: int,
    settings: Settings,
) -> Attend:
    """Attention for one token per sequence, at `positions`; inactive sequences leave no trace."""
    config, size = settings.config, settings.config.block_size
    end = positions + 1
    span = Span(positions // size, active[:, None], end, end)
    is_counted = active.astype(jnp.int32)
    all_pairs = causal_pairs(positions, is_counted)

    @selecting_with(settings.implementation)
    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walk = state
        keys = write_token(cache.key, key, layer=layer, positions=positions, active=active)
        values = write_token(cache.value, value, layer=layer, positions=positions, active=active)
        statistics, pairs, kept = cache.statistics, all_pairs, None
        if is_sparse:
            index = layer - first_sparse
            one, statistics = observe_layer(
                statistics, query, key, config=config, index=index, span=span
            )
        if is_sparse and settings.selects_in("decode"):
            selection, walk = config.select_decode(
                query, keys, one, walk, layer=layer, positions=positions
            )
            pairs = selection.attended_pairs(positions[:, None], is_counted[:, None])
            kept = selection.blocks if settings.return_selection else None
            out = block_sparse_decode(
                query,
                keys,
                values,
                selection,
                kv_lengths=end,
                layer=layer,
                implementation=settings.implementation,
                kernel_config=settings.kernel_config,
            )
        else:
            out = dense_attention(
                query,
                keys,
                values,
                layer=layer,
                query_offset=positions,
                kv_lengths=end,
                implementation=settings.dense_implementation,
                kernel_config=settings.kernel_config,
            )
        cache = dataclasses.replace(cache, key=keys, value=values, statistics=statistics)
        return out, (cache, walk), (pairs, kept)

    return attend
