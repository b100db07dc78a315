"""The recommended policy: representative queries against coded keys, pages, a memory of evidence.

On the host in float64, one sequence, one row and one head at a time.
"""

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from jaxtyping import Float

from reference.printed import AnyArray, softmax_over

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


def slow_channels(head_dim: int) -> list[int]:
    """Lists the half of the channels that rotary embedding turns slowest.

    Example:
      >>> slow_channels(8)
      [2, 3, 6, 7]
    """
    half = head_dim // 2  # d and d + H/2 turn together, slower the larger d is
    return [channel for channel in range(head_dim) if channel % half >= half // 2]


def coded_block(
    key: Float[np.ndarray, "S C"],
) -> tuple[Float[np.ndarray, "C"], Float[np.ndarray, "S C"] | None]:
    """Rounds a block's keys of one head to a centre and four bits beside it.

    The centre is the middle of each channel's extremes, in bfloat16. What is left of a key is
    rounded to a whole number of steps, 7 at most; a step is the least power of two with which no
    key needs more, 2^-9 at least and 2^6 at most. A key that is not finite is taken for the centre.

    Returns:
      The centre, and what is beside it; None for that where no key is finite.

    Example:
      >>> coded_block(np.array([[0.0], [3.5], [14.0]], np.float32))[1].ravel().tolist()
      [-7.0, -4.0, 7.0]
    """
    key = np.asarray(key, np.float32)
    is_finite = np.isfinite(key).all(axis=1, keepdims=True)
    if not is_finite.any():
        return np.zeros(key.shape[1]), None
    low = np.where(is_finite, key, np.inf).min(axis=0)
    high = np.where(is_finite, key, -np.inf).max(axis=0)
    half = np.float32(0.5)
    centre = (half * low + half * high).astype(ml_dtypes.bfloat16).astype(np.float32)
    away = np.where(is_finite, key - centre, np.float32(0))
    largest = (np.abs(away).max(axis=0) / np.float32(7)).astype(np.float64)
    exponent = [math.ceil(math.log2(one)) if one > 0 else -9 for one in largest]
    step = 2.0 ** np.clip(exponent, -9, 6)
    codes = np.clip(np.round(away / step), -7, 7)
    return centre.astype(np.float64), codes * step


def rounded_query(query: Float[np.ndarray, "C"]) -> Float[np.ndarray, "C"]:
    """Rounds a query to eight bits, after the least power of two that brings it to 448 at most.

    Example:
      >>> rounded_query(np.array([1.0, 0.3])).tolist()
      [1.0, 0.3125]
    """
    query = np.asarray(query, np.float32)
    largest = float(np.abs(query).max() / np.float32(448))
    if not (math.isfinite(largest) and largest > 0):
        return query.astype(np.float64)
    scale = 2.0 ** math.ceil(math.log2(largest))
    rounded = (query / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn)
    return rounded.astype(np.float64) * scale


def recommended_scores(
    queries: Float[np.ndarray, "R N C"],
    key: Float[AnyArray, "S K H"],
    config: "RecommendedConfig",
) -> Float[np.ndarray, "P"]:
    """Scores every page of keys for one row: `(Σ_{r, h} P_{r, h}[p]^exponent)^(1 / exponent)`.

    `P_{r, h}` is the softmax over pages of `(q · centre_j + max_s q' · k'_s) / sqrt(H)`, with the
    centre of the page's block, the rounded query and what each key of the page is beside the
    centre. A product that is not finite counts as none, and so does a sum of products of 1e29 or
    more.

    Args:
      queries: Representatives of the row, of every head, in the slow channels.
      key: Keys that the row may see, after RoPE.
      config: What is computed.

    Returns:
      `[P]` float64, `P = ceil(S / page_size)`.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> ones, policy = np.ones((32, 1, 4)), SketchWalkConfig.recommended(exponent=1)
      >>> recommended_scores(ones[:1, :, :2], ones, policy).tolist()
      [0.5, 0.5]
    """
    num_heads, head_dim = queries.shape[1], key.shape[2]
    size, group = config.block_size, num_heads // key.shape[1]
    page = min(config.page_size, size)
    keys = np.asarray(key)[:, :, slow_channels(head_dim)]
    blocks = [
        [coded_block(keys[start : start + size, head]) for start in range(0, len(keys), size)]
        for head in range(key.shape[1])
    ]
    shares = []
    for head in range(num_heads):
        for query in np.asarray(queries, np.float64)[:, head]:
            rounded, peaks = rounded_query(query), []
            for centre, beside in blocks[head // group]:
                num_keys = min(size, len(keys) - size * (len(peaks) * page // size))
                products = np.full(num_keys, -np.inf) if beside is None else beside @ rounded
                products = np.where(np.isfinite(products), products, -np.inf)
                shared = centre @ query
                for start in range(0, num_keys, page):
                    # Beside a very large centre, what single keys add is lost to float32.
                    peak = np.float64(np.float32(products[start : start + page].max() + shared))
                    peaks.append(peak if math.isfinite(shared) else -np.inf)
            scores = np.array(peaks) / math.sqrt(head_dim)
            shares.append(softmax_over(scores, np.abs(scores) < 1e29))
    return (np.array(shares) ** config.exponent).sum(axis=0) ** (1.0 / config.exponent)


def recommended_budget(num_rows: int, density: float, least: int, *, pages: int) -> np.ndarray:
    """Returns how many pages each row keeps, counted exactly.

    Row `i` wants `pages · (density · (i + 1/2) + 1/2)` pages, rounded, to the even one of two, to
    `least` at least and to all of its pages at most.

    Args:
      num_rows: Rows wanted.
      density: Share of all causal pairs.
      least: Fewest pages of a row.
      pages: Pages of a block of queries, which is a row.

    Returns:
      `[num_rows]` int32.

    Example:
      >>> recommended_budget(6, 0.5, 3, pages=1).tolist()
      [1, 2, 3, 3, 3, 3]
    """
    share, counts = Fraction(repr(density)), []
    for row in range(num_rows):
        wanted = pages * (share * Fraction(2 * row + 1, 2) + Fraction(1, 2))
        counts.append(min(pages * (row + 1), max(least, round(wanted))))
    return np.array(counts, np.int32)


def recommended_select(
    evidence: Float[np.ndarray, "P"], count: int, *, sink: int, local: int
) -> list[int]:
    """Selects the best pages of one row, the forced ones first, the lower index winning ties.

    Example:
      >>> recommended_select(np.array([0.1, 0.2, 0.4, 0.3]), 3, sink=1, local=1)
      [0, 2, 3]
    """
    last = len(evidence) - 1
    order = sorted(
        range(last + 1),
        key=lambda j: (not (j < sink or j > last - local), -evidence[j], j),
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
      Pages of each row, and `R_k`, `[J, P]` float64 with all pages of every block.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> recommended_select_prefill(x, x, None, SketchWalkConfig.recommended())[0]
      [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    size, num_heads = config.block_size, query.shape[1]
    page = min(config.page_size, size)
    num_blocks, pages = -(-len(query) // size), size // page
    scores = np.zeros((num_blocks, num_blocks * pages))
    for row in range(num_blocks):
        own = np.asarray(query[row * size : (row + 1) * size])[..., slow_channels(query.shape[2])]
        number = count or config.representatives
        for tokens, least in config.early_representatives:
            if row * size < tokens:
                number = max(number, min(least, size))
        chosen = [representatives(own[:, h], number) for h in range(num_heads)]
        seen = key[: (row + 1) * size]
        found = recommended_scores(np.stack(chosen, axis=1), seen, config)
        scores[row, : len(found)] = found
    state = scores if previous is None else np.maximum(scores, config.decay * previous)
    sink, before, fewest = _kept_always(config)
    least = max(fewest, sink + pages + before)
    density = config.density if density is None else density
    counts = recommended_budget(num_blocks, density, least, pages=pages)
    rows = [
        recommended_select(
            state[row, : (row + 1) * pages], int(counts[row]), sink=sink, local=pages + before
        )
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

    Of the last pages it keeps as many as a block has, whatever `local_tokens` says.

    Args:
      query: Queries of all tokens so far, after RoPE; the last one counts.
      key: Keys of all tokens so far, after RoPE.
      previous: `R_{k-1}` of this same token, None at the first sparse layer.
      config: What is computed.
      density: This layer's, where the layers differ; the configuration's by default.

    Returns:
      Pages, and `R_k`, `[P]` float64.

    Example:
      >>> from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> recommended_select_decode(x, x, None, SketchWalkConfig.recommended())[0]
      [0, 1, 2, 3, 4]
    """
    own = np.asarray(query[-1:])[..., slow_channels(query.shape[2])]
    state = recommended_scores(own, key, config)
    if previous is not None:
        state = np.maximum(state, config.decay * previous)
    page = min(config.page_size, config.block_size)
    pages = config.block_size // page
    sink, _, fewest = _kept_always(config)
    least = max(fewest, sink + pages)
    density = config.density if density is None else density
    count = int(recommended_budget(len(state), density, least, pages=1)[-1])
    return recommended_select(state, count, sink=sink, local=pages), state


def _kept_always(config: "RecommendedConfig") -> list[int]:
    """First pages, pages before a row's own block, fewest pages."""
    page = min(config.page_size, config.block_size)
    return [-(-x // page) for x in (config.sink_tokens, config.local_tokens, config.min_tokens)]
