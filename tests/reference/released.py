"""The rule of the authors' published code, which differs from Algorithms 1 and 2 as printed.

Implemented from a description of what that code computes. It looks ahead (its softmax runs over
all blocks of the prompt) and its lists depend on the prompt's length. Queries and keys are those
after RoPE of all tokens so far, `[T, N, H]` and `[T, K, H]`.
"""

import math
from fractions import Fraction

import numpy as np


def released_transition(query, key, config, *, is_decode: bool = False) -> np.ndarray:
    """Averages over heads the softmax of `logit_scale · q̄ k̄ᵀ / sqrt(H)` over all blocks.

    Logits that are not finite do not count; a head without finite ones adds nothing.

    Block means divide by the block size even where the last block is partly filled. In decode
    the last row's query is the mean of the last `decode_queries` tokens instead.

    Returns:
      `P`, `[J, J]` float64; rows sum to one, or to 0 where no logit is finite.
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
    return _softmax_over(logits, np.isfinite(logits)).mean(axis=0)


def released_walk(previous: np.ndarray, matrix: np.ndarray, rows: np.ndarray, config) -> np.ndarray:
    """Repeats `S ← (1 - damping) P + damping S P` for `walk_steps` times.

    Args:
      previous: `S` before, `[I, J]` or one row `[J]`.
      matrix: `P`, `[J, J]`.
      rows: The rows of `P` that `S` stands for, shaped like `previous`.
      config: Configuration of the policy.
    """
    state = previous
    for _ in range(config.walk_steps):
        state = (1.0 - config.damping) * rows + config.damping * (state @ matrix)
    return state


def released_select(walk_row: np.ndarray, row: int, num_tokens: int, config) -> list[int]:
    """Keeps the first and the recent blocks, and those above a quantile of the others.

    With `n` tokens: blocks below `ceil(sink_fraction · n / size)`, blocks at most
    `ceil(recent_fraction · n / size)` before the row, and blocks strictly above the
    `quantile` (linearly interpolated) of the row's entries from block
    `floor(skip_fraction · n) // size` to the diagonal.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> row = np.array([0.1, 0.1, 0.5, 0.1, 0.1, 0.1])
      >>> released_select(row, 5, 384, SketchWalkConfig.released())
      [0, 2, 4, 5]
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


def released_select_prefill(
    query, key, previous: np.ndarray | None, config
) -> tuple[list[list[int]], np.ndarray]:
    """Selects for every row of a prompt; the last `dense_rows` keep every causal block.

    Args:
      query: Queries.
      key: Keys.
      previous: `R_{k-1}`, None at the first sparse layer, which starts from `P`.
      config: Configuration of the policy.

    Returns:
      Block ids of each row, and `R_k`.
    """
    matrix = released_transition(query, key, config)
    state = released_walk(matrix if previous is None else previous, matrix, matrix, config)
    num_blocks = len(matrix)
    rows = [
        list(range(row + 1))
        if row >= num_blocks - config.dense_rows
        else released_select(state[row], row, len(query), config)
        for row in range(num_blocks)
    ]
    return rows, state


def released_select_decode(query, key, config) -> tuple[list[int], np.ndarray]:
    """Returns block ids for the last token, and the row `[J]` that selected them.

    No state crosses layers.
    """
    matrix = released_transition(query, key, config, is_decode=True)
    row = released_walk(matrix[-1], matrix, matrix[-1], config)
    return released_select(row, len(matrix) - 1, len(query), config), row


def _softmax_over(logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Softmax of each row over the entries that count; a row without any is zero."""
    largest = np.max(logits, axis=-1, keepdims=True, initial=-np.inf, where=counts)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.where(counts, np.exp(np.where(counts, logits - largest, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)
