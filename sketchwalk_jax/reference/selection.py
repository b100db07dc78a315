"""Budgets, top-τ selection, masks and the measured density (Algorithm 1, step 7)."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig


def budget(config: SketchWalkConfig, num_blocks: int) -> np.ndarray:
    """Returns how many blocks each row keeps, counted exactly.

    `count[i] = min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))`, where the
    density is the decimal that was written: 0.1 · 30 is 3, although `0.1 * 30` is not.
    `top_blocks` takes the place of `ceil(density · (i + 1))`.

    Args:
      config: What is computed.
      num_blocks: Rows wanted.

    Returns:
      `[num_blocks]` int32.

    Example:
      >>> budget(SketchWalkConfig.paper(density=0.1), 31)[[0, 9, 29, 30]].tolist()
      [1, 2, 3, 4]
    """
    density = Fraction(repr(config.density))
    forced = config.sink_blocks + config.local_blocks
    counts = []
    for row in range(num_blocks):
        wanted = config.top_blocks
        if wanted is None:
            wanted = math.ceil(density * (row + 1))
        counts.append(min(row + 1, max(forced, wanted)))
    return np.array(counts, np.int32)


def select(
    walk_row: np.ndarray, score_row: np.ndarray, count: int, config: SketchWalkConfig
) -> list[int]:
    """Selects the best `count` blocks of one row, the forced ones among them.

    The first `sink_blocks` and the last `local_blocks` up to the diagonal come first, then the
    others by their walk entry, the lower index winning ties. A row of the walk without a
    positive entry is ranked by its direct scores, those that are not finite last.

    Args:
      walk_row: `R_k[i, :i + 1]`.
      score_row: `A_k[i, :i + 1]`.
      count: Blocks to keep, at least the number of forced ones.
      config: What is computed.

    Returns:
      Block ids in ascending order.

    Example:
      >>> select(np.array([0.1, 0.2, 0.9, 0.2, 0.0]), np.zeros(5), 4, SketchWalkConfig.paper())
      [0, 1, 2, 4]
    """
    last = len(walk_row) - 1
    ranking = walk_row if (walk_row > 0).any() else score_row

    def order(block: int) -> tuple[bool, float, int]:
        is_forced = block < config.sink_blocks or block > last - config.local_blocks
        value = float(ranking[block])
        return (not is_forced, -value if math.isfinite(value) else math.inf, block)

    return sorted(sorted(range(last + 1), key=order)[:count])


def select_rows(
    walk_state: np.ndarray,
    scores: np.ndarray,
    config: SketchWalkConfig,
    *,
    num_dense_rows: int = 0,
) -> list[list[int]]:
    """Selects for every row of a prompt.

    Args:
      walk_state: `R_k`, `[J, J]`.
      scores: `A_k`, `[J, J]`.
      config: What is computed.
      num_dense_rows: Last rows that keep every causal block.

    Returns:
      Block ids of each row, ascending.

    Example:
      >>> state = np.tril(np.ones((4, 4)))
      >>> select_rows(state, state, SketchWalkConfig.paper(), num_dense_rows=1)
      [[0], [0, 1], [0, 2], [0, 1, 2, 3]]
    """
    num_blocks = len(walk_state)
    counts = budget(config, num_blocks)
    rows = []
    for row in range(num_blocks):
        if row >= num_blocks - num_dense_rows:
            rows.append(list(range(row + 1)))
            continue
        upto = slice(row + 1)
        rows.append(select(walk_state[row, upto], scores[row, upto], int(counts[row]), config))
    return rows


def token_mask(
    rows: Sequence[Sequence[int]] | None, num_tokens: int, block_size: int
) -> np.ndarray:
    """Spells out which tokens each token attends to.

    Args:
      rows: Block ids of each query block, or None for dense causal attention.
      num_tokens: `T`.
      block_size: Tokens per block.

    Returns:
      `[T, T]` bool: causal, and inside the blocks of the query's row.

    Example:
      >>> token_mask([[0], [1]], 3, 2).astype(int).tolist()
      [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    causal = np.tril(np.ones((num_tokens, num_tokens), bool))
    if rows is None:
        return causal
    blocks = np.zeros((len(rows), len(rows)), bool)
    for row, ids in enumerate(rows):
        blocks[row, list(ids)] = True
    per_token = blocks.repeat(block_size, axis=0).repeat(block_size, axis=1)
    return causal & per_token[:num_tokens, :num_tokens]


def measured_density(masks: Sequence[np.ndarray]) -> float:
    """Counts attended causal pairs over all causal pairs, over the masks of all layers.

    Args:
      masks: `[T, S]` bool of each layer, dense layers included, as `token_mask` returns them.

    Returns:
      The density, in (0, 1].

    Example:
      >>> measured_density([token_mask([[0], [1]], 4, 2)])
      0.6
    """
    attended = sum(int(mask.sum()) for mask in masks)
    causal = sum(mask.shape[0] * (mask.shape[0] + 1) // 2 for mask in masks)
    return attended / causal
