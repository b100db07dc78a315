"""Quest and Adamas on sets: loops in float64 and NumPy, one token at a time."""

import math
from fractions import Fraction

import numpy as np
from scipy.linalg import hadamard


def num_kept(config, num_units: int, unit: int, least: int) -> int:
    """Returns the pages or tokens that a head keeps of `num_units`, by the budget's definition."""
    if config.token_budget is not None:
        wanted = config.token_budget // unit
    else:
        wanted = math.ceil(Fraction(str(config.density)) * num_units)
    return min(num_units, max(least, wanted))


def best(ranked: list[tuple[float, int]], count: int, forced: list[int]) -> list[int]:
    """Returns forced ids and, up to `count`, those of the lowest cost; earlier ones win ties."""
    others = [unit for _, unit in sorted(ranked) if unit not in forced]
    return sorted(forced + others[: count - len(forced)])


def quest_pages(config, query: np.ndarray, key: np.ndarray) -> list[list[int]]:
    """Returns each query head's pages `[N, H]` for the last token of keys `[t, K, H]`."""
    size, group = config.block_size, len(query) // key.shape[1]
    starts = range(0, len(key), size)
    count = num_kept(config, len(starts), size, config.min_pages)
    forced = [len(starts) - 1] if config.force_current else []
    lists = []
    for head, vector in enumerate(query.astype(np.float64)):
        costs = []
        for page, start in enumerate(starts):
            rows = key[start : start + size, head // group].astype(np.float64)
            score = 0.0
            for channel, q in enumerate(vector):
                score += max(q * rows[:, channel].min(), q * rows[:, channel].max())
            costs.append((-score, page))
        lists.append(best(costs, count, forced))
    return lists


def adamas_codes(x: np.ndarray, thresholds) -> np.ndarray:
    """Returns codes 0 to 3 of vectors `[..., H]`."""
    size = x.shape[-1]
    turned = x.astype(np.float64) @ (hadamard(size) / np.sqrt(size))
    return np.digitize(turned, thresholds, right=True)


def adamas_tokens(config, query: np.ndarray, key: np.ndarray) -> list[list[int]]:
    """Returns each query head's tokens for the last token of `key`."""
    group = len(query) // key.shape[1]
    count = num_kept(config, len(key), 1, 1)
    forced = [len(key) - 1] if config.force_current else []
    lists = []
    for head, code in enumerate(adamas_codes(query, config.thresholds)):
        codes = adamas_codes(key[:, head // group], config.thresholds)
        costs = [(int(np.abs(code - other).sum()), token) for token, other in enumerate(codes)]
        lists.append(best(costs, count, forced))
    return lists
