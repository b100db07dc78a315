"""Selection through the Hopper kernels, where they can make the same lists.

Each function here stands beside one in plain JAX and says with `None` that it cannot take the call.
`pallas_kernels.dispatch.selects_with_kernels` says whether to ask.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sketch import group_heads, project
from sketchwalk_jax.walk import (
    WEIGHT_EXPONENT,
    WalkState,
    causal_mask,
    power_transition,
    product_exponent,
    product_parts,
    row_maxima,
)

if TYPE_CHECKING:
    from sketchwalk_jax.config import SketchWalkConfig

MAX_BLOCKS = 16384  # of a row, which stands in registers
MAX_PROMPT_BLOCKS = 8192  # of a row that is rescaled there
_ROW = 128  # entries of heads that are read together


def block_sums(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"],
    *,
    num_groups: int,
    combine: str,
    omega: Float[np.ndarray, "H R"] | None,
    block_size: int,
) -> tuple[Float[Array, "B I C R"], Float[Array, "B I C R"]] | None:
    """Sums of sketches of queries and keys over blocks, in one pass (Algorithm 1 steps 1-4)."""
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
        omega=omega,
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


def select_prompt(
    config: "SketchWalkConfig",
    scores: Float[Array, "B J J"],
    walk: WalkState,
    *,
    first_block: Int[Array, "B"],
    tail_start: Int[Array, "B"] | None,
    budget: Int[np.ndarray, "J"],
) -> tuple[BlockSelection, WalkState] | None:
    """Walk and lists of consecutive rows, from all scores (Algorithm 1 steps 6-7)."""
    is_simple = config.transition != "softmax" and config.walk_degree == 1
    num_blocks = scores.shape[-1]
    if not is_simple or num_blocks > MAX_PROMPT_BLOCKS:
        return None
    from sketchwalk_jax.pallas_kernels.select_prompt import select_prompt_kernel
    from sketchwalk_jax.pallas_kernels.walk_operands import walk_operands_kernel

    power, rectify = config.exponent, config.transition == "relu_power"
    use_walk, interpret = config.beta != 0.0, not dispatch.is_hopper()
    if use_walk:
        weights, left = walk_operands_kernel(
            scores,
            row_maxima(scores, rectify=rectify),
            walk.scores,
            power=power,
            rectify=rectify,
            weight_exponent=WEIGHT_EXPONENT,
            product_exponent=product_exponent(power),
            interpret=interpret,
        )
        product = product_parts(left, weights)
    else:
        causal = causal_mask(num_blocks)
        weights, _ = power_transition(scores, causal, exponent=power, rectify=rectify)
        product = walk.scores[None]
    selection, state, layers = select_prompt_kernel(
        product,
        weights,
        scores,
        first_block,
        tail_start,
        walk.layers,
        budget,
        use_walk=use_walk,
        sink_blocks=config.sink_blocks,
        local_blocks=config.local_blocks,
        block_size=config.block_size,
        interpret=interpret,
    )
    return selection, WalkState(state, layers)


def select_token(
    config: "SketchWalkConfig",
    query: Float[Array, "B 1 N H"],
    query_sums: Float[Array, "B J C R"],
    key_sums: Float[Array, "B J C R"],
    walk: WalkState,
    *,
    positions: Int[Array, "B"],
    budget: Int[np.ndarray, "J"],
    omega: Float[np.ndarray, "H R"] | None,
) -> tuple[BlockSelection, WalkState] | None:
    """Scores, walk row and list of one token per sequence (Algorithm 2 steps 4-6)."""
    is_simple = config.transition != "softmax" and config.walk_degree == 1
    num_blocks, num_groups, size = query_sums.shape[1:]
    if not is_simple or num_blocks > MAX_BLOCKS or num_groups * size % 32:
        return None
    from sketchwalk_jax.pallas_kernels import walk_row
    from sketchwalk_jax.pallas_kernels.select_decode import select_token_kernel

    num_heads, head_dim = query.shape[2:]
    is_projected = walk_row.can_project(num_heads, omega, num_groups)
    if is_projected:
        token = query[:, 0]
    else:
        groups = group_heads(query, num_groups, combine=config.head_combination)
        token = project(groups, omega)[:, 0]
    selection, state, layers = select_token_kernel(
        token,
        query_sums,
        key_sums,
        walk.scores,
        walk.layers,
        positions,
        budget,
        head_dim=head_dim,
        power=config.exponent,
        rectify=config.transition == "relu_power",
        use_walk=config.beta != 0.0,
        sink_blocks=config.sink_blocks,
        local_blocks=config.local_blocks,
        max_count=int(budget[-1]),
        block_size=config.block_size,
        projection=omega if is_projected else None,
        interpret=not dispatch.is_hopper(),
    )
    return selection, WalkState(state, layers)
