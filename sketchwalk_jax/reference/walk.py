"""The sketch-determined walk (section 2.3, equation 1; Algorithm 1, step 6).

On the host in float64, whose range holds the eighth power of any float32 score, so that the
equations need no scaling of `W`. Rows of a product of powers are divided by their largest
entry after each layer, which changes no ranking.
"""

from collections.abc import Sequence

import numpy as np

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig


def transition(scores: np.ndarray, config: SketchWalkConfig) -> np.ndarray:
    """Turns block scores into the lower-triangular transition of one layer.

    `"power"` is `W = A ** s`, `"relu_power"` is `W = max(A, 0) ** s`, and `"softmax"` is `P`,
    the softmax of row `i` over `j <= i`. A score that is not finite is no entry: it counts as 0,
    and in a softmax not at all.

    Args:
      scores: `A`, `[J, J]`.
      config: Chooses the transition and its exponent.

    Returns:
      `[J, J]` float64, zero above the diagonal.

    Example:
      >>> transition(np.array([[1.0, 9.0], [2.0, 2.0]]), SketchWalkConfig.damped()).tolist()
      [[1.0, 0.0], [0.5, 0.5]]
    """
    scores = np.asarray(scores, np.float64)
    counts = np.tril(np.ones_like(scores, dtype=bool)) & np.isfinite(scores)
    known = np.where(counts, scores, 0.0)
    if config.transition == "power":
        return known**config.exponent
    if config.transition == "relu_power":
        return np.maximum(known, 0.0) ** config.exponent
    return softmax_over(scores, counts)


def softmax_over(logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Softmax of each row over the entries that count; a row without any is zero.

    Args:
      logits: `[..., J]`, finite where they count.
      counts: Which entries count, shaped alike.

    Returns:
      Shaped alike; rows sum to one or are zero.

    Example:
      >>> softmax_over(np.array([1.0, 1.0, np.nan]), np.array([True, True, False])).tolist()
      [0.5, 0.5, 0.0]
    """
    if not counts.any():
        return np.zeros(logits.shape)
    largest = np.max(logits, axis=-1, keepdims=True, initial=-np.inf, where=counts)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.where(counts, np.exp(np.where(counts, logits - largest, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def walk_step(
    previous: np.ndarray | None, scores: np.ndarray, config: SketchWalkConfig
) -> np.ndarray:
    """Advances the walk by one sparse layer.

    The first sparse layer starts it: `R_0 = W_0`. Later ones repeat, `walk_degree` times from
    `X = R_{k-1}`: `X ← X W` without damping, `X ← (1 - β) P + β X P` with it. `β = 0` is the
    one-hop ablation, `R_k = W_k`.

    Args:
      previous: `R_{k-1}`, `[J, J]`, or None at the first sparse layer.
      scores: `A_k`, `[J, J]`.
      config: What is computed.

    Returns:
      `R_k`, `[J, J]` float64; its rows are known up to a positive factor unless they sum to one.

    Example:
      >>> first = walk_step(None, np.array([[1.0, 0.0], [1.0, 2.0]]), SketchWalkConfig.paper())
      >>> first[1].tolist()
      [0.00390625, 1.0]
    """
    matrix = transition(scores, config)
    if previous is None or config.beta == 0:
        state = matrix
    else:
        state = previous
        for _ in range(config.walk_degree):
            if config.beta is None:
                state = _rows_to_one(state @ matrix, config)
            else:
                state = (1.0 - config.beta) * matrix + config.beta * (state @ matrix)
    return _rows_to_one(state, config)


def walk_layers(scores: Sequence[np.ndarray], config: SketchWalkConfig) -> list[np.ndarray]:
    """Runs the walk over the scores of all sparse layers, first to last.

    Args:
      scores: `A_k` of each sparse layer, `[J, J]`.
      config: What is computed.

    Returns:
      `R_k` of each sparse layer, as `walk_step` returns it.

    Example:
      >>> len(walk_layers([np.eye(3), np.eye(3)], SketchWalkConfig.paper()))
      2
    """
    states: list[np.ndarray] = []
    for layer_scores in scores:
        states.append(walk_step(states[-1] if states else None, layer_scores, config))
    return states


def _rows_to_one(state: np.ndarray, config: SketchWalkConfig) -> np.ndarray:
    if config.transition == "softmax":
        return state
    largest = np.abs(state).max(axis=1, keepdims=True)
    return state / np.where(largest > 0, largest, 1.0)
