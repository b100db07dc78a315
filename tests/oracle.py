"""Computes the walk in the log domain with float64 and NumPy, where nothing underflows."""

from collections.abc import Sequence

import numpy as np


def log2_transition(scores: np.ndarray, config) -> np.ndarray:
    """Returns `log2 W` (or `log2 P`), with `-inf` where an entry is zero or not causal.

    A score that is not finite counts as no entry.
    """
    scores = np.asarray(scores, np.float64)
    counts = np.tril(np.ones_like(scores, dtype=bool)) & np.isfinite(scores)
    scores = np.where(counts, scores, 0.0)
    if config.transition == "softmax":
        logits = np.where(counts, scores, -np.inf) * np.log2(np.e)
        total = _log2_sum(logits, axis=1)[:, None]
        return logits - np.where(np.isfinite(total), total, 0.0)
    if config.transition == "power" and config.exponent % 2:
        raise ValueError("an odd power has signs, which the log domain cannot carry")
    magnitude = np.abs(scores) if config.transition == "power" else np.maximum(scores, 0.0)
    with np.errstate(divide="ignore"):
        return np.where(counts, config.exponent * np.log2(magnitude), -np.inf)


def log2_step(previous: np.ndarray | None, scores: np.ndarray, config) -> np.ndarray:
    """Returns `log2 R_k` from `log2 R_{k-1}`, which is None at the first sparse layer.

    The first layer starts the walk: `R_0 = W_0`. Others repeat, `walk_degree` times from
    `X = R_{k-1}`: `X ← X W` without damping, `X ← (1 - β) P + β X P` with it. `β = 0` is the
    one-hop ablation, `R_k = W_k`. Nothing is rescaled.
    """
    matrix = log2_transition(scores, config)
    if previous is None or config.beta == 0:
        return matrix
    state = previous
    for _ in range(config.walk_degree):
        state = _log2_product(state, matrix)
        if config.beta is not None:
            direct = np.log2(1.0 - config.beta) + matrix
            state = np.logaddexp2(direct, np.log2(config.beta) + state)
    return state


def log2_walk(scores: Sequence[np.ndarray], config) -> list[np.ndarray]:
    """Returns `log2 R_k` for every layer."""
    states: list[np.ndarray] = []
    for layer_scores in scores:
        states.append(log2_step(states[-1] if states else None, layer_scores, config))
    return states


def walk_layers(scores: Sequence[np.ndarray], config) -> list[np.ndarray]:
    """Returns `R_k` for every layer; each row sums to one, or has a largest entry of one."""
    states = []
    for state in log2_walk(scores, config):
        largest = state.max(axis=1, keepdims=True)
        is_free = np.isfinite(largest) & (config.transition != "softmax")
        states.append(np.exp2(state - np.where(is_free, largest, 0.0)))
    return states


def log2_lost(scores: Sequence[np.ndarray], config) -> list[np.ndarray]:
    """Returns log2 bounds on the error of each entry of `R_k` when small terms underflow.

    In every layer float32 drops terms far below the row's largest. The loss travels with the walk,
    and later layers may amplify it. Rows of powers are scaled to the top of float32's range and
    keep 165 powers of two; rows that sum to one keep 110.
    """
    kept = 110.0 if config.transition == "softmax" else 165.0
    num_blocks = len(scores[0])
    causal = np.tri(num_blocks, dtype=bool)
    lost = np.full((num_blocks, num_blocks), -np.inf)
    bounds = []
    for layer, state in enumerate(log2_walk(scores, config)):
        if layer and config.beta != 0:
            matrix = log2_transition(scores[layer], config)
            for _ in range(config.walk_degree):
                lost = _log2_product(lost, matrix)
        dropped = np.log2(num_blocks) - kept + state.max(axis=1, keepdims=True)
        lost = np.where(causal, np.logaddexp2(lost, dropped), -np.inf)
        bounds.append(lost)
    return bounds


def misordered_pairs(
    state_row: np.ndarray,
    log2_row: np.ndarray,
    log2_lost_row: np.ndarray | None = None,
    *,
    window: float = 100.0,
    tie: float = 1e-3,
) -> tuple[int, int]:
    """Counts pairs that a float32 row orders otherwise than the oracle, and all compared pairs.

    Only entries within `2 ** -window` of the row's largest count; pairs closer than `tie` in log2
    are ties. Underflow must not have changed the upper entry by more than 1e-4: as all terms are
    positive, it can only lower entries.
    """
    largest = log2_row.max()
    if not np.isfinite(largest):
        return 0, 0
    kept = log2_row >= largest - window
    is_known = kept if log2_lost_row is None else kept & (log2_lost_row < log2_row - 14.0)
    state = np.asarray(state_row, np.float64)
    above = is_known[:, None] & kept & (log2_row[:, None] > log2_row + tie)
    return int((above & (state[:, None] <= state)).sum()), int(above.sum())


def chosen(log2_row: np.ndarray, score_row: np.ndarray, count: int, config) -> np.ndarray:
    """Returns the ids that the oracle's row selects, ascending; lower ids win ties.

    A row of the walk without a positive entry is ranked by its scores, finite ones first.
    """
    last = len(log2_row) - 1
    ranking = log2_row if np.isfinite(log2_row.max()) else np.asarray(score_row, np.float64)
    ranking = np.where(np.isfinite(ranking), ranking, -np.inf)
    index = np.arange(last + 1)
    ranking = np.where(
        (index < config.sink_blocks) | (index > last - config.local_blocks), np.inf, ranking
    )
    return np.sort(np.argsort(-ranking, kind="stable")[:count])


def has_near_ties(
    scores: Sequence[np.ndarray],
    config,
    counts: np.ndarray,
    *,
    rows: Sequence[int] | None = None,
    noise: float = 1e-4,
) -> bool:
    """Says whether rounding could change a selection, by redrawing it with noise on its inputs.

    The noise is relative to each row's largest score, hundreds of times float32's rounding.
    """
    rng = np.random.default_rng(0)
    rows = range(len(scores[0])) if rows is None else rows
    exact = log2_walk(scores, config)
    for _ in range(3):
        shaken_scores = [
            a + noise * np.abs(a).max(axis=1, keepdims=True) * rng.uniform(-1, 1, a.shape)
            for a in (np.asarray(layer, np.float64) for layer in scores)
        ]
        shaken = [
            state + np.log2(1.0 + noise * rng.uniform(-1, 1, state.shape))
            for state in log2_walk(shaken_scores, config)
        ]
        for layer, state in enumerate(exact):
            for row in rows:
                upto = slice(row + 1)
                first = chosen(state[row, upto], scores[layer][row, upto], counts[row], config)
                second = chosen(
                    shaken[layer][row, upto], shaken_scores[layer][row, upto], counts[row], config
                )
                if not np.array_equal(first, second):
                    return True
    return False


def _log2_sum(values: np.ndarray, axis: int) -> np.ndarray:
    largest = values.max(axis=axis, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        total = np.log2(np.exp2(values - largest).sum(axis=axis))
    return total + np.squeeze(largest, axis=axis)


def _log2_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.stack([_log2_sum(row[:, None] + right, axis=0) for row in left])
