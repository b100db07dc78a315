"""Selection through the kernels, where they can make the same lists.

Each function here stands beside one in plain JAX, takes what that takes, and says with `None` that
no kernel can take the call. `dispatch.selection_kernels` says whether to ask. The kernels
themselves import Pallas, which takes long, and are imported when one is called.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.config import (
    LEAST_BLOCK,
    LEAST_CHUNK,
    MAX_BLOCKS,
    MAX_TOKEN_HEADS,
    MAX_TOKEN_SCORES,
    SCORED_BLOCK,
    SCORED_GROUP,
    SCORED_HEADS,
    SCORED_PAGES,
    WRITTEN_CHANNELS,
    KernelConfig,
    fills_rows,
)
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sketch import head_means, project
from sketchwalk_jax.walk import HIGHEST, Precision, WalkState


def walk_precision(kernel_config: KernelConfig | None) -> Precision:
    """Precision of the walk's products: as accurate as float32, on tensor cores where there are."""
    if kernel_config is None or kernel_config.interpret:
        return HIGHEST
    from jax.lax import DotAlgorithmPreset

    return DotAlgorithmPreset.TF32_TF32_F32_X3


def sketch_sums(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"],
    *,
    omega: Float[np.ndarray, "H R"] | None,
    block_size: int,
    kernel_config: KernelConfig,
) -> tuple[Float[Array, "B I 1 R"], Float[Array, "B I 1 R"]] | None:
    """Sums of sketches of queries and keys over blocks, in one pass (Algorithm 1 steps 1-4)."""
    if block_size < LEAST_BLOCK or not fills_rows(query, key):
        return None
    from sketchwalk_jax.pallas_kernels.block_sums import block_sums_kernel

    return block_sums_kernel(
        query,
        key,
        valid,
        omega=omega,
        block_size=block_size,
        interpret=kernel_config.interpret,
    )


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
    """`selection.select_blocks` with exactly the same lists (Algorithm 1 step 7)."""
    if scores.shape[-1] > MAX_BLOCKS:
        return None
    from sketchwalk_jax.pallas_kernels.select import select_blocks_kernel

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


def select_token(
    query: Float[Array, "B 1 N H"],
    query_sums: Float[Array, "B J 1 R"],
    key_sums: Float[Array, "B J 1 R"],
    walk: WalkState,
    *,
    positions: Int[Array, "B"],
    budget: Int[np.ndarray, "J"],
    omega: Float[np.ndarray, "H R"] | None,
    transition: str,
    exponent: int,
    walk_degree: int,
    beta: float | None,
    sink_blocks: int,
    local_blocks: int,
    block_size: int,
    kernel_config: KernelConfig,
) -> tuple[BlockSelection, WalkState] | None:
    """Scores, walk row and list of one token per sequence (Algorithm 2 steps 4-6)."""
    num_blocks, size = query_sums.shape[1], query_sums.shape[3]
    is_simple = transition != "softmax" and walk_degree == 1
    if not is_simple or num_blocks > MAX_BLOCKS or size % LEAST_CHUNK:
        return None
    from sketchwalk_jax.pallas_kernels.select_decode import select_token_kernel
    from sketchwalk_jax.pallas_kernels.walk_row import HeadQueries

    num_heads, head_dim = query.shape[2:]
    token: Array | HeadQueries
    if omega is not None and HeadQueries.fit(num_heads, omega):
        token = HeadQueries(query[:, 0], omega)
    else:
        token = project(head_means(query), omega)[:, 0]
    selection, state, layers = select_token_kernel(
        token,
        query_sums,
        key_sums,
        walk.scores,
        walk.layers,
        positions,
        budget,
        head_dim=head_dim,
        power=exponent,
        rectify=transition == "relu_power",
        use_walk=beta != 0.0,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        max_count=int(budget[-1]),
        block_size=block_size,
        interpret=kernel_config.interpret,
    )
    return selection, WalkState(state, layers)


def representatives(
    query: Float[Array, "B T N H"],
    valid: Bool[Array, "B T"],
    *,
    count: int,
    block_size: int,
    by_warp: bool = False,
    kernel_config: KernelConfig,
) -> Float[Array, "B I R N C"] | None:
    """Queries that stand for each row of the recommended policy, in the slow half of the channels.

    But for distances that differ by less than 2^-17 of themselves, the same ones. On GPUs other
    than Hopper warps copy what they need (`by_warp`).
    """
    is_right = query.dtype.itemsize == 2 and query.shape[-1] in SCORED_HEADS
    if not is_right or block_size != SCORED_BLOCK:
        return None
    from sketchwalk_jax.pallas_kernels.representatives import representatives_kernel

    return representatives_kernel(
        query,
        valid,
        count=count,
        by_warp=by_warp,
        interpret=kernel_config.interpret,
    )


def block_codes(
    codes: tuple[Array, Array, Array, Array],
    key: Float[Array, "B T K H"],
    span: Any,
    *,
    layer: Int[Array, ""],
    write: Any = None,
    kernel_config: KernelConfig,
) -> tuple[Array, ...] | None:
    """The arrays of `BlockCodes` of all layers with those of a span's keys in one, bit for bit.

    Of the keys the slow half of the channels. With a `TokenWrite` the token is written to the
    caches as well, and these follow.
    """
    code, _, _, unfinished = codes
    head_dim = key.shape[-1]
    is_right = key.dtype == unfinished.dtype and key.dtype.itemsize == 2
    if write is not None:
        is_right = is_right and key.dtype == write.value.dtype == write.keys.dtype
    if not is_right or head_dim not in SCORED_HEADS or code.shape[4] != SCORED_BLOCK:
        return None
    from sketchwalk_jax.pallas_kernels.block_codes import block_codes_kernel

    return block_codes_kernel(
        *codes,
        key,
        span.valid,
        first_block=span.first_block,
        end=span.end,
        layer=layer,
        write=write,
        interpret=kernel_config.interpret,
    )


def write_token(
    key: Float[Array, "B 1 K H"], write: Any, span: Any, *, kernel_config: KernelConfig
) -> tuple[Array, Array] | None:
    """The caches of a `TokenWrite` with the token in them, in place under `jit`."""
    is_right = key.dtype == write.value.dtype == write.keys.dtype == write.values.dtype
    if not is_right or key.shape[2] * key.shape[3] % WRITTEN_CHANNELS:
        return None
    from sketchwalk_jax.pallas_kernels.token_writes import write_token_kernel

    value, keys, values, layer = write
    where: dict[str, Any] = {"end": span.end, "interpret": kernel_config.interpret}
    return write_token_kernel(key, value, keys, values, layer, span.valid, **where)


def takes_block_scores(queries: Float[Array, "B I R N C"], *, block_size: int, pages: int) -> bool:
    """Whether kernels score the pages of blocks for these queries of a prompt's rows."""
    is_right = queries.dtype == "bfloat16" and 2 * queries.shape[-1] in SCORED_HEADS
    is_token = queries.shape[1] * queries.shape[2] == 1
    return is_right and block_size == SCORED_BLOCK and pages == SCORED_PAGES and not is_token


def select_token_by_evidence(
    query: Float[Array, "B 1 N H"],
    code: UInt8[Array, "L B J K S C2"],
    centre: Float[Array, "L B J K C"],
    step: Int8[Array, "L B J K C"],
    walk: WalkState,
    *,
    layer: Int[Array, ""],
    lengths: Int[Array, "B"],
    budgets: Int[np.ndarray, "Ls P"],
    scale: float,
    exponent: int,
    decay: float,
    sink_blocks: int,
    local_blocks: int,
    pages: int,
    ranks: Any = None,
    kernel_config: KernelConfig,
) -> tuple[BlockSelection, WalkState] | None:
    """Scores, evidence and list of one token per sequence, of the recommended policy.

    The keys are those of the slow half of the channels of one layer among all, as `BlockCodes` has
    them. They may be of one rank's heads (`ranks`, a `Heads`), as queries then are. Budgets,
    evidence, and first and last blocks are those of pages, which are listed.
    """
    own_heads, head_dim = query.shape[2:]
    num_heads = own_heads if ranks is None else ranks.num_heads
    num_blocks, kv_heads, block_size = code.shape[2:5]
    num_columns = num_blocks * pages
    is_right = query.dtype == "bfloat16" and head_dim in SCORED_HEADS
    is_right = is_right and pages == SCORED_PAGES
    fits = num_columns <= MAX_BLOCKS and num_heads * num_columns <= MAX_TOKEN_SCORES
    fits = fits and num_heads <= MAX_TOKEN_HEADS and own_heads <= SCORED_GROUP * kv_heads
    if not is_right or block_size != SCORED_BLOCK or not fits:
        return None
    from sketchwalk_jax.pallas_kernels.token_lists import select_token_by_evidence_kernel

    selection, evidence = select_token_by_evidence_kernel(
        query[:, 0],
        code,
        centre,
        step,
        walk.scores[:, 0],
        walk.layers,
        lengths,
        budgets,
        layer=layer,
        scale=scale,
        exponent=exponent,
        decay=decay,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        ranks=ranks,
        interpret=kernel_config.interpret,
    )
    return selection, WalkState(evidence[:, None], walk.layers + 1)
