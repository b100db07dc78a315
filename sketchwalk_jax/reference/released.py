"""The rule of the authors' published code, which differs from Algorithms 1 and 2 as printed.

Implemented from a description of what that code computes. It looks ahead (its softmax runs over
all blocks of the prompt) and its lists depend on the prompt's length.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from sketchwalk_jax.reference.attention import masked_attention
from sketchwalk_jax.reference.layers import ReferenceLayer
from sketchwalk_jax.reference.selection import token_mask
from sketchwalk_jax.reference.sketch import AnyArray

if TYPE_CHECKING:
    from sketchwalk_jax.policies.released import ReleasedConfig


def released_transition(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    config: "ReleasedConfig",
    *,
    is_decode: bool = False,
) -> np.ndarray:
    """Averages over heads the softmax of `logit_scale · q̄ k̄ᵀ / sqrt(H)` over all blocks.

    Block means divide by the block size even where the last block is partly filled. In decode
    the last row's query is the mean of the last `decode_queries` tokens instead.

    Returns:
      `P`, `[J, J]` float64; rows sum to one.
    """
    num_heads, head_dim = query.shape[1:]
    size = config.block_size
    num_blocks = -(-len(query) // size)

    query_means, key_means = (
        np.stack([x[i * size : (i + 1) * size].sum(axis=0) for i in range(num_blocks)]) / size
        for x in (np.asarray(query, np.float32), np.asarray(key, np.float32))
    )
    if is_decode:
        query_means[-1] = np.asarray(query[-config.decode_queries :], np.float32).mean(axis=0)
    key_means = key_means.repeat(num_heads // key.shape[1], axis=1)
    logits = np.einsum("inh,jnh->nij", query_means, key_means)
    logits = np.asarray(logits, np.float64) * config.logit_scale / math.sqrt(head_dim)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=0)
    return total / total.sum(axis=1, keepdims=True)


def released_walk(
    previous: np.ndarray, matrix: np.ndarray, rows: np.ndarray, config: "ReleasedConfig"
) -> np.ndarray:
    """Repeats `S ← (1 - damping) P + damping S P`, for the given rows of `P`."""
    state = previous
    for _ in range(config.walk_steps):
        state = (1.0 - config.damping) * rows + config.damping * (state @ matrix)
    return state


def released_select(
    walk_row: np.ndarray, row: int, num_tokens: int, config: "ReleasedConfig"
) -> list[int]:
    """Keeps the first and the recent blocks, and those that stand out among the others.

    With `n` tokens: blocks below `ceil(sink_fraction · n / size)`, blocks at most
    `ceil(recent_fraction · n / size)` before the row, and blocks strictly above the
    `quantile` (linearly interpolated) of the row's entries from block
    `floor(skip_fraction · n) // size` to the diagonal.

    Args:
      walk_row: `S[i]`, all blocks.
      row: `i`.
      num_tokens: Tokens so far, `n`.
      config: What is computed.

    Returns:
      Block ids in ascending order.
    """
    size = config.block_size
    sinks = math.ceil(Fraction(repr(config.sink_fraction)) * num_tokens / size)
    recent = math.ceil(Fraction(repr(config.recent_fraction)) * num_tokens / size)
    skipped = math.floor(Fraction(repr(config.skip_fraction)) * num_tokens) // size
    kept = set(range(min(sinks, row + 1))) | set(range(max(0, row - recent), row + 1))
    if skipped <= row:
        threshold = np.quantile(walk_row[skipped : row + 1], config.quantile)
        kept |= {block for block in range(skipped, row + 1) if walk_row[block] > threshold}
    return sorted(kept)


def released_prefill(
    queries: Sequence[Float[AnyArray, "T N H"]],
    keys: Sequence[Float[AnyArray, "T K H"]],
    values: Sequence[Float[AnyArray, "T K H"]],
    config: "ReleasedConfig",
) -> list[ReferenceLayer]:
    """Runs every layer over a whole prompt; the last `dense_rows` rows keep every causal block."""
    layers: list[ReferenceLayer] = []
    state = None
    for index, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        num_tokens = len(query)
        rows = matrix = None
        if index >= config.dense_layers:
            matrix = released_transition(query, key, config)
            state = released_walk(matrix if state is None else state, matrix, matrix, config)
            num_blocks = len(matrix)
            rows = [
                list(range(row + 1))
                if row >= num_blocks - config.dense_rows
                else released_select(state[row], row, num_tokens, config)
                for row in range(num_blocks)
            ]
        mask = token_mask(rows, num_tokens, config.block_size)
        output, lse = masked_attention(query, key, value, mask)
        layers.append(ReferenceLayer(output, lse, rows, state, matrix, mask))
    return layers


def released_decode(
    queries: Sequence[Float[AnyArray, "T N H"]],
    keys: Sequence[Float[AnyArray, "T K H"]],
    values: Sequence[Float[AnyArray, "T K H"]],
    config: "ReleasedConfig",
    *,
    position: int,
) -> list[ReferenceLayer]:
    """Runs every layer for the token at `position`; no state crosses layers."""
    layers = []
    num_tokens = position + 1
    for index, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        query, key, value = query[:num_tokens], key[:num_tokens], value[:num_tokens]
        rows = matrix = state = None
        mask = np.ones((1, num_tokens), bool)
        if index >= config.dense_layers:
            matrix = released_transition(query, key, config, is_decode=True)
            state = released_walk(matrix[-1:], matrix, matrix[-1:], config)
            rows = [released_select(state[0], len(matrix) - 1, num_tokens, config)]
            mask = np.isin(np.arange(num_tokens) // config.block_size, rows[0])[None]
        output, lse = masked_attention(query[-1:], key, value, mask)
        layers.append(ReferenceLayer(output, lse, rows, state, matrix, mask))
    return layers
