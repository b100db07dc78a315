"""Sketch-and-Walk as a policy: Algorithms 1 and 2 (arXiv:2602.07397) up to the attention itself.

The functions here take the configuration; `SketchWalkConfig` exposes them as its methods.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax import kernel_selection
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.selection import BlockSelection, block_budget, select_blocks
from sketchwalk_jax.sketch import (
    block_means,
    block_scores,
    block_sums,
    group_heads,
    project,
    sketch_size,
    srht_matrix,
)
from sketchwalk_jax.walk import WalkState, walk_step

if TYPE_CHECKING:
    from sketchwalk_jax.config import SketchWalkConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SketchSums:
    """Running sums of head-combined queries and keys in sketch space.

    Attributes:
      query: Sums over the tokens of each block, float32 `[B, J, C, R]`.
      key: Likewise for keys. `C` is 1 for `head_combination="mean"` and `K` for `"sum"`.
    """

    query: Float[Array, "B J C R"]
    key: Float[Array, "B J C R"]


def init_sums(
    config: "SketchWalkConfig", shape: LayerShape, *, batch: int, num_blocks: int
) -> SketchSums:
    """Zero sums for one layer."""
    groups = 1 if config.head_combination == "mean" else shape.num_kv_heads
    size = (batch, num_blocks, groups, sketch_size(shape.head_dim, config.sketch_dim))
    return SketchSums(jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.float32))


def _combined(
    config: "SketchWalkConfig", x: Float[Array, "B T Heads H"], num_kv_heads: int
) -> Float[Array, "B T C H"]:
    groups = 1 if config.head_combination == "mean" else num_kv_heads
    return group_heads(x, groups, combine=config.head_combination)


def observe(
    config: "SketchWalkConfig",
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    sums: SketchSums,
    *,
    span: Span,
) -> SketchSums:
    """Adds the span's tokens to the sums (Algorithm 1 steps 1-4; Algorithm 2 steps 2, 3).

    A span of one token (decode) may start anywhere in its block; longer ones start at a block
    boundary.
    """
    omega = srht_matrix(query.shape[-1], config.sketch_dim, config.seed)
    batch, tokens = span.valid.shape
    size = min(config.block_size, tokens)
    new = None
    if dispatch.selects_with_kernels():
        groups = sums.query.shape[2]
        new = kernel_selection.block_sums(
            query,
            key,
            span.valid,
            num_groups=groups,
            combine=config.head_combination,
            omega=omega,
            block_size=size,
        )
    if new is None:
        both = (_combined(config, x, key.shape[2]) for x in (query, key))
        one, other = (project(block_sums(x, span.valid, size), omega) for x in both)
        new = one, other
    return SketchSums(
        _add_blocks(sums.query, new[0], span.first_block),
        _add_blocks(sums.key, new[1], span.first_block),
    )


def _add_blocks(
    total: Float[Array, "B J C R"], new: Float[Array, "B I C R"], first_block: Int[Array, "B"]
) -> Float[Array, "B J C R"]:
    """Adds blocks to those from `first_block` on; what lies beyond the last one is dropped."""
    num_rows = new.shape[1]
    sequence = jnp.arange(total.shape[0], dtype=jnp.int32)[:, None]
    if num_rows == 1:
        return total.at[sequence, first_block[:, None]].add(new, mode="drop")
    # Unlike a scatter, this is one pass together with what comes before and after.
    row = jnp.arange(total.shape[1], dtype=jnp.int32)[None, :] - first_block[:, None]
    is_new = (row >= 0) & (row < num_rows)
    added = new[sequence, jnp.clip(row, 0, num_rows - 1)]
    return total + jnp.where(is_new[:, :, None, None], added, 0.0)


def _budget(config: "SketchWalkConfig", num_blocks: int) -> np.ndarray:
    return block_budget(
        num_blocks,
        density=config.density,
        top_blocks=config.top_blocks,
        sink_blocks=config.sink_blocks,
        local_blocks=config.local_blocks,
    )


def _scores(
    config: "SketchWalkConfig",
    query_rows: Float[Array, "B J C R"],
    sums: SketchSums,
    *,
    lengths: Int[Array, "B"],
    head_dim: int,
) -> Float[Array, "B J J"]:
    """Scores of all pairs of blocks (Algorithm 1 step 5)."""
    keys = block_means(sums.key, lengths, config.block_size)
    return block_scores(query_rows, keys, head_dim)


def _select(
    config: "SketchWalkConfig",
    scores: Float[Array, "B J J"],
    walk: WalkState,
    *,
    rows: Int[Array, "B I"],
    tail_start: Int[Array, "B"] | None,
) -> tuple[BlockSelection, WalkState]:
    """Walk and top-τ (Algorithm 1 steps 6-7)."""
    num_blocks = scores.shape[-1]
    selecting, walk = walk_step(
        walk,
        scores,
        rows,
        transition=config.transition,
        exponent=config.exponent,
        walk_degree=config.walk_degree,
        beta=config.beta,
    )
    budget = _budget(config, num_blocks)
    max_count = int(budget[-1])
    counts = jnp.asarray(budget)[jnp.minimum(rows, num_blocks - 1)]
    if tail_start is not None:
        in_tail = (rows + 1) * config.block_size > tail_start[:, None]
        counts = jnp.where(in_tail, jnp.minimum(rows + 1, num_blocks), counts)
        max_count = num_blocks
    sizes = {"sink_blocks": config.sink_blocks, "local_blocks": config.local_blocks}
    sizes |= {"max_count": max_count, "block_size": config.block_size}
    selection = None
    if dispatch.selects_with_kernels():
        selection = kernel_selection.select_blocks(selecting, rows, counts, **sizes)
    return selection or select_blocks(selecting, rows, counts, **sizes), walk


def select_prefill(
    config: "SketchWalkConfig",
    query: Float[Array, "B T N H"],
    sums: SketchSums,
    walk: WalkState,
    *,
    span: Span,
) -> tuple[BlockSelection, WalkState]:
    """Blocks for every query block of the span."""
    means = block_means(sums.query, span.end, config.block_size)
    scores = _scores(config, means, sums, lengths=span.end, head_dim=query.shape[-1])
    tail_start = span.prompt_end - config.dense_tail if config.dense_tail else None
    if dispatch.selects_with_kernels():
        selected = kernel_selection.select_prompt(
            config,
            scores,
            walk,
            first_block=span.first_block,
            tail_start=tail_start,
            budget=_budget(config, scores.shape[-1]),
        )
        if selected is not None:
            return selected
    rows = span.rows(config.block_size)
    return _select(config, scores, walk, rows=rows, tail_start=tail_start)


def select_decode(
    config: "SketchWalkConfig",
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "Ls B S K H"],
    sums: SketchSums,
    walk: WalkState,
    *,
    positions: Int[Array, "B"],
) -> tuple[BlockSelection, WalkState]:
    """Blocks for one token: its own head-combined query stands for the row of its block."""
    omega = srht_matrix(query.shape[-1], config.sketch_dim, config.seed)
    rows = (positions // config.block_size)[:, None]
    if dispatch.selects_with_kernels():
        selected = kernel_selection.select_token(
            config,
            query,
            sums.query,
            sums.key,
            walk,
            positions=positions,
            budget=_budget(config, sums.key.shape[1]),
            omega=omega,
        )
        if selected is not None:
            return selected
    token = project(_combined(config, query, key.shape[3]), omega)
    is_row = jnp.arange(sums.query.shape[1], dtype=jnp.int32)[None, :] == rows
    means = block_means(sums.query, positions + 1, config.block_size)
    query_rows = jnp.where(is_row[:, :, None, None], token, means)
    scores = _scores(config, query_rows, sums, lengths=positions + 1, head_dim=query.shape[-1])
    return _select(config, scores, walk, rows=rows, tail_start=None)
