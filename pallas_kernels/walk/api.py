"""Kernels of the walk policy: sums of sketches, and one token's scores, walk row and block indices.

The functions return `None` if no kernel supports the call; the policy then uses plain JAX.
"""

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    LEAST_BLOCK,
    LEAST_CHUNK,
    MAX_BLOCKS,
    KernelConfig,
    fills_rows,
)
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sketch import head_means, project
from sketchwalk_jax.walk import HIGHEST, Precision, WalkState


def walk_precision(kernel_config: KernelConfig | None) -> Precision:
    """Returns the precision of the walk's products: as accurate as float32, with tensor cores."""
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
    """Sums sketches of queries and keys over blocks, in one pass (Algorithm 1 steps 1-4)."""
    if block_size < LEAST_BLOCK or not fills_rows(query, key):
        return None
    from sketchwalk_jax.pallas_kernels.walk.block_sums import block_sums_kernel

    return block_sums_kernel(
        query,
        key,
        valid,
        omega=omega,
        block_size=block_size,
        interpret=kernel_config.interpret,
    )


def select_token(
    query: Float[Array, "B 1 N H"],
    query_sums: Float[Array, "B J 1 R"],
    key_sums: Float[Array, "B J 1 R"],
    walk: WalkState,
    *,
    positions: Int[Array, "B"],
    budget: Int[Array | np.ndarray, "J"],
    max_count: int,
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
    """Computes one token's scores, walk row and block indices (Algorithm 2 steps 4-6).

    `budget` is by the token's block, at most `max_count`.
    """
    num_blocks, size = query_sums.shape[1], query_sums.shape[3]
    is_simple = transition != "softmax" and walk_degree == 1
    if not is_simple or num_blocks > MAX_BLOCKS or size % LEAST_CHUNK:
        return None
    from sketchwalk_jax.pallas_kernels.walk.select_decode import select_token_kernel
    from sketchwalk_jax.pallas_kernels.walk.walk_row import HeadQueries

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
        max_count=max_count,
        block_size=block_size,
        interpret=kernel_config.interpret,
    )
    return selection, WalkState(state, layers)
