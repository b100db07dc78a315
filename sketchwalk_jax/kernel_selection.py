"""Selection through the Hopper kernels, where they can make the same lists.

Each function here stands beside one in plain JAX and says with `None` that it cannot take the call.
`pallas_kernels.dispatch.selects_with_kernels` says whether to ask.
"""

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.walk import WalkState

if TYPE_CHECKING:
    from sketchwalk_jax.config import SketchWalkConfig

MAX_BLOCKS = 16384  # of a row, which stands in registers
_ROW = 128  # entries of heads that are read together


def block_sums(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"],
    *,
    num_groups: int,
    combine: str,
    block_size: int,
) -> tuple[Float[Array, "B I C H"], Float[Array, "B I C H"]] | None:
    """Sums of head-combined queries and keys over blocks, in one pass (Algorithm 1 steps 1-2)."""
    head_dim = query.shape[3]
    wide = max(head_dim, _ROW)
    sizes = [x.shape[2] * head_dim // num_groups for x in (query, key)]
    if block_size < 16 or wide % head_dim or wide % _ROW or any(size % wide for size in sizes):
        return None
    from sketchwalk_jax.pallas_kernels.block_sums import block_sums_kernel

    return block_sums_kernel(
        query,
        key,
        valid,
        num_groups=num_groups,
        is_mean=combine == "mean",
        block_size=block_size,
        interpret=not dispatch.is_hopper(),
    )


def select_blocks(
    scores: Float[Array, "B I J"], rows: Int[Array, "B I"], counts: Int[Array, "B I"], **sizes: Any
) -> BlockSelection | None:
    """`selection.select_blocks` with exactly the same lists (Algorithm 1 step 7)."""
    if scores.shape[-1] > MAX_BLOCKS:
        return None
    from sketchwalk_jax.pallas_kernels.select import select_blocks_kernel

    return select_blocks_kernel(scores, rows, counts, **sizes, interpret=not dispatch.is_hopper())


def select_token(
    config: "SketchWalkConfig",
    token: Float[Array, "B 1 C R"],
    query_sums: Float[Array, "B J C R"],
    key_sums: Float[Array, "B J C R"],
    walk: WalkState,
    *,
    positions: Int[Array, "B"],
    counts: Int[Array, "B 1"],
    max_count: int,
    head_dim: int,
) -> tuple[BlockSelection, WalkState] | None:
    """Scores, walk row and list of one token per sequence (Algorithm 2 steps 4-6)."""
    is_simple = config.transition != "softmax" and config.walk_degree == 1
    num_blocks, size = query_sums.shape[1], math.prod(query_sums.shape[2:])
    if not is_simple or num_blocks > MAX_BLOCKS or size % 32:
        return None
    from sketchwalk_jax.pallas_kernels.select_decode import select_decode_kernel

    selection, state = select_decode_kernel(
        token[:, 0],
        query_sums,
        key_sums,
        walk.scores,
        walk.layers,
        positions,
        jnp.asarray(counts, jnp.int32),
        head_dim=head_dim,
        power=config.exponent,
        rectify=config.transition == "relu_power",
        use_walk=config.beta != 0.0,
        sink_blocks=config.sink_blocks,
        local_blocks=config.local_blocks,
        max_count=max_count,
        block_size=config.block_size,
        interpret=not dispatch.is_hopper(),
    )
    return selection, WalkState(state, walk.layers + 1)
