"""The recommended policy: representative queries against single keys, a memory of evidence.

On the host in float64, one sequence, one row and one head at a time.
"""

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from sketchwalk_jax.reference.sketch import AnyArray
from sketchwalk_jax.reference.walk import softmax_over

if TYPE_CHECKING:
    from sketchwalk_jax.policies.recommended import RecommendedConfig


def representatives(queries: Float[np.ndarray, "Q H"], count: int) -> Float[np.ndarray, "R H"]:
    """Takes the mean of one head's queries, then those farthest from all that were taken.

    Farthest: the query whose distance to the nearest one taken is largest, the first of several.
    Each is taken once, and the mean again where there are no more. Queries that are not finite do
    not count.

    Args:
      queries: Queries of one row and head.
      count: Representatives wanted.

    Returns:
      `[count, H]`.

    Example:
      >>> representatives(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 2)[1].tolist()
      [0.0, 1.0]
    """
    left = [query for query in np.asarray(queries, np.float64) if np.isfinite(query).all()]
    mean = np.mean(left, axis=0) if left else np.zeros(queries.shape[-1])
    taken = [mean]
    while left and len(taken) < count:
        distances = [min(math.dist(query, one) for one in taken) for query in left]
        taken.append(left.pop(int(np.argmax(distances))))
    return np.array(taken + [mean] * (count - len(taken)))


def recommended_scores(
    queries: Float[np.ndarray, "R N H"],
    key: Float[AnyArray, "S K H"],
    config: "RecommendedConfig",
) -> Float[np.ndarray, "J"]:
    """Scores every block of keys for one row: `(Σ_{r, h} P_{r, h}[j]^exponent)^(1 / exponent)`.

    `P_{r, h}` is the softmax over blocks of the largest `q_{r, h} · k_s / sqrt(H)` in the block,
    over the channels that count. A product that is not finite counts as none.

    Args:
      queries: Representatives of the row, of every head.
      key: Keys that the row may see, after RoPE.
      config: What is computed.

    Returns:
      `[J]` float64, `J = ceil(S / block_size)`.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> ones = np.ones((128, 1, 4))
      >>> recommended_scores(ones[:1], ones, SketchWalkConfig.recommended()).tolist()
      [0.5, 0.5]
    """
    num_heads, head_dim = queries.shape[1:]
    channel = np.arange(head_dim)
    if config.channels == "slow":  # d and d + H/2 turn together, slower the larger d is
        half = head_dim // 2
        channel = channel[channel % half >= half // 2]
    size, group = config.block_size, num_heads // key.shape[1]
    starts = range(0, len(key), size)
    shares = []
    for head in range(num_heads):
        keys = np.asarray(key, np.float64)[:, head // group, channel]
        for query in np.asarray(queries, np.float64)[:, head, channel]:
            products = keys @ query / math.sqrt(head_dim)
            products = np.where(np.isfinite(products), products, -np.inf)
            peaks = np.array([products[start : start + size].max() for start in starts])
            shares.append(softmax_over(peaks, np.isfinite(peaks)))
    return (np.array(shares) ** config.exponent).sum(axis=0) ** (1.0 / config.exponent)


def recommended_budget(num_blocks: int, density: float, least: int) -> np.ndarray:
    """Returns how many blocks each row keeps, counted exactly.

    Row `i` wants `density · (i + 1/2) + 1/2` blocks. What all rows before it kept beyond what they
    wanted, it gives back, up to a fifth of what it wants; the rest is rounded, to the even one of
    two, to `least` at least and to all of its blocks at most.

    Args:
      num_blocks: Rows wanted.
      density: Share of all causal pairs.
      least: Fewest blocks of a row.

    Returns:
      `[num_blocks]` int32.

    Example:
      >>> recommended_budget(6, 0.5, 3).tolist()
      [1, 2, 3, 3, 3, 3]
    """
    share, beyond, counts = Fraction(repr(density)), Fraction(0), []
    for row in range(num_blocks):
        wanted = share * Fraction(2 * row + 1, 2) + Fraction(1, 2)
        given_back = min(wanted / 5, max(beyond, Fraction(0)))
        counts.append(min(row + 1, max(least, round(wanted - given_back))))
        beyond += counts[-1] - wanted
    return np.array(counts, np.int32)


def recommended_select(
    evidence: Float[np.ndarray, "J"], count: int, *, sink_blocks: int, local_blocks: int
) -> list[int]:
    """Selects the best blocks of one row, the forced ones first, the lower index winning ties.

    Example:
      >>> recommended_select(np.array([0.1, 0.2, 0.4, 0.3]), 3, sink_blocks=1, local_blocks=1)
      [0, 2, 3]
    """
    last = len(evidence) - 1
    order = sorted(
        range(last + 1),
        key=lambda j: (not (j < sink_blocks or j > last - local_blocks), -evidence[j], j),
    )
    return sorted(order[:count])


def recommended_select_prefill(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: "RecommendedConfig",
    *,
    density: float | None = None,
    count: int | None = None,
) -> tuple[list[list[int]], np.ndarray]:
    """Selects for every row of a prompt by `R_k = max(S_k, decay · R_{k-1})`.

    Args:
      query: Queries after RoPE.
      key: Keys after RoPE.
      previous: `R_{k-1}`, None at the first sparse layer.
      config: What is computed.
      density: This layer's, where the layers differ; the configuration's by default.
      count: This layer's representatives, likewise.

    Returns:
      Block ids of each row, and `R_k`, `[J, J]` float64.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> recommended_select_prefill(x, x, None, SketchWalkConfig.recommended())[0]
      [[0], [0, 1]]
    """
    size, num_heads = config.block_size, query.shape[1]
    num_blocks = -(-len(query) // size)
    scores = np.zeros((num_blocks, num_blocks))
    for row in range(num_blocks):
        own = np.asarray(query[row * size : (row + 1) * size])
        number = count or config.representatives
        chosen = [representatives(own[:, h], number) for h in range(num_heads)]
        seen = key[: (row + 1) * size]
        scores[row, : row + 1] = recommended_scores(np.stack(chosen, axis=1), seen, config)
    state = scores if previous is None else np.maximum(scores, config.decay * previous)
    counts = _counts(config, num_blocks, density)
    forced = {"sink_blocks": config.sink_blocks, "local_blocks": config.local_blocks}
    rows = [
        recommended_select(state[row, : row + 1], int(counts[row]), **forced)
        for row in range(num_blocks)
    ]
    return rows, state


def recommended_select_decode(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: "RecommendedConfig",
    *,
    density: float | None = None,
) -> tuple[list[int], np.ndarray]:
    """Selects for the last of `T` tokens, whose own query stands for its row.

    Of the last blocks it keeps its own alone, whatever `local_blocks` says.

    Args:
      query: Queries of all tokens so far, after RoPE; the last one counts.
      key: Keys of all tokens so far, after RoPE.
      previous: `R_{k-1}` of this same token, None at the first sparse layer.
      config: What is computed.
      density: This layer's, where the layers differ; the configuration's by default.

    Returns:
      Block ids, and `R_k`, `[J]` float64.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> recommended_select_decode(x, x, None, SketchWalkConfig.recommended())[0]
      [0, 1]
    """
    state = recommended_scores(np.asarray(query[-1:]), key, config)
    if previous is not None:
        state = np.maximum(state, config.decay * previous)
    count = int(_counts(config, len(state), density)[-1])
    return recommended_select(state, count, sink_blocks=config.sink_blocks, local_blocks=1), state


def _counts(config: "RecommendedConfig", num_blocks: int, density: float | None) -> np.ndarray:
    least = max(config.min_blocks, config.sink_blocks + config.local_blocks)
    return recommended_budget(num_blocks, config.density if density is None else density, least)
