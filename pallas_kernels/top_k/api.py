"""Selects the best blocks by given scores, or one token's pages by their page scores.

The functions return `None` if no kernel supports the call; the policy then uses plain JAX.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.config import (
    MAX_LISTED,
    MAX_TOKEN_HEADS,
    SCORED_BLOCK,
    SCORED_GROUP,
    SCORED_HEADS,
    SCORED_PAGES,
    KernelConfig,
)
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.walk import WalkState


def select_blocks(
    scores: Float[Array, "B I J"],
    rows: Int[Array, "B I"],
    counts: Int[Array, "B I"],
    *,
    sink_blocks: int,
    local_blocks: int,
    max_count: int,
    block_size: int,
    row_size: int | None = None,
    kernel_config: KernelConfig,
) -> BlockSelection | None:
    """Runs `selection.select_blocks` as a kernel, with the same indices (Algorithm 1 step 7)."""
    if scores.shape[-1] > MAX_LISTED:
        return None
    from sketchwalk_jax.pallas_kernels.top_k.select import select_blocks_kernel

    found = select_blocks_kernel(
        scores,
        rows,
        counts,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        max_count=max_count,
        block_size=block_size,
        interpret=kernel_config.interpret,
    )
    return dataclasses.replace(found, row_size=row_size)


def select_token_by_page_scores(
    query: Float[Array, "B 1 N H"],
    quantized: UInt8[Array, "L B J K S C2"],
    zero_point: Float[Array, "L B J K C"],
    scale_exponent: Int8[Array, "L B J K C"],
    walk: WalkState,
    *,
    layer: Int[Array, ""],
    lengths: Int[Array, "B"],
    budgets: Int[Array | np.ndarray, "Ls P"],
    max_count: int,
    scale: float,
    exponent: int,
    decay: float,
    sink_blocks: int,
    local_blocks: int,
    pages: int,
    ranks: Any = None,
    kernel_config: KernelConfig,
) -> tuple[BlockSelection, WalkState] | None:
    """Computes page scores and page indices of one token per sequence, for the recommended policy.

    Quantized keys are the arrays of `QuantizedKeys` for all layers, and may be of one rank's heads
    (`ranks`, a `Heads`), like the queries. Budgets, `max_count`, and sink and local blocks count
    pages.
    """
    own_heads, head_dim = query.shape[2:]
    num_heads = own_heads if ranks is None else ranks.num_heads
    num_blocks, kv_heads, block_size = quantized.shape[2:5]
    num_columns = num_blocks * pages
    is_right = query.dtype == "bfloat16" and head_dim in SCORED_HEADS
    is_right = is_right and pages == SCORED_PAGES
    fits = num_columns <= MAX_LISTED and num_heads <= MAX_TOKEN_HEADS
    fits = fits and own_heads <= SCORED_GROUP * kv_heads
    if not is_right or block_size != SCORED_BLOCK or not fits:
        return None
    from sketchwalk_jax.pallas_kernels.top_k.token_lists import select_token_by_page_scores_kernel

    selection, page_scores = select_token_by_page_scores_kernel(
        query[:, 0],
        quantized,
        zero_point,
        scale_exponent,
        walk.scores[:, 0],
        walk.layers,
        lengths,
        budgets,
        max_count,
        layer=layer,
        scale=scale,
        exponent=exponent,
        decay=decay,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        ranks=ranks,
        interpret=kernel_config.interpret,
    )
    return selection, WalkState(page_scores[:, None], walk.layers + 1)
