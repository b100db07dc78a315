"""The rule as the paper prints it (Algorithms 1 and 2), one sequence at a time.

In the paper's order: block means, the Hadamard sketch and the block scores (section 2.2), the walk
(2.3), budgets, top-τ and masks, exact attention, and both algorithms over a stack of layers.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

AnyArray = Array | np.ndarray


# Algorithm 1, steps 1 to 5, in float32.


def hadamard(size: int) -> np.ndarray:
    """Returns the Hadamard matrix of a power of two in natural (Sylvester) order.

    `H_1 = [1]`, `H_2n = [[H_n, H_n], [H_n, -H_n]]`: entries ±1, rows orthogonal.

    Example:
      >>> hadamard(2).tolist()
      [[1.0, 1.0], [1.0, -1.0]]
    """
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def subsampled_hadamard(head_dim: int, num_columns: int, seed: int) -> np.ndarray:
    """Returns the first `head_dim` rows of `Ω`, for any number of columns up to `H'`.

    `Ω = sqrt(H'/R) · diag(signs) · Hadamard(H')/sqrt(H') · select(R columns)`, where `H'` is
    `head_dim` rounded up to a power of two and the columns are drawn without replacement
    (section 2.2). `E[(u Ω)(v Ω)ᵀ] = u vᵀ` over seeds; with `R = H'` it holds for every seed.

    Args:
      head_dim: `H`, features of a query or key vector.
      num_columns: `R`, at most `H'`.
      seed: Seed of the draw: the signs first, then the sorted columns.

    Returns:
      `[H, R]` float64.

    Example:
      >>> omega = subsampled_hadamard(4, 4, seed=0)
      >>> bool(np.allclose(omega @ omega.T, np.eye(4)))
      True
    """
    padded = 1 << (head_dim - 1).bit_length()
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=padded)
    columns = np.sort(rng.choice(padded, size=num_columns, replace=False))
    orthonormal = hadamard(padded) / np.sqrt(padded)
    omega = np.sqrt(padded / num_columns) * (signs[:, None] * orthonormal)[:, columns]
    return omega[:head_dim]


def srht_matrix(head_dim: int, sketch_dim: int | None, seed: int) -> np.ndarray:
    """Returns the projection that the method applies to block means.

    The effective dimension is `R = min(sketch_dim, H')`. Where it equals `H'`, or `sketch_dim`
    is None, no projection is made and the identity is returned.

    Args:
      head_dim: `H`.
      sketch_dim: Wanted columns, or None.
      seed: Seed of the draw.

    Returns:
      `[H, R]` (or the `[H, H]` identity) float32.

    Example:
      >>> srht_matrix(128, 64, seed=0).shape
      (128, 64)
    """
    padded = 1 << (head_dim - 1).bit_length()
    if sketch_dim is None or sketch_dim >= padded:
        return np.eye(head_dim, dtype=np.float32)
    return subsampled_hadamard(head_dim, sketch_dim, seed).astype(np.float32)


def block_means(x: Float[AnyArray, "T X H"], block_size: int) -> np.ndarray:
    """Averages the tokens of each block; a partly filled last block divides by its real count.

    Args:
      x: Queries or keys of one sequence, after RoPE, in any float type.
      block_size: Tokens per block.

    Returns:
      `[J, X, H]` float32 with `J = ceil(T / block_size)`.

    Example:
      >>> block_means(np.arange(5.0).reshape(5, 1, 1), 4).ravel().tolist()
      [1.5, 4.0]
    """
    x = np.asarray(x, np.float32)
    starts = range(0, len(x), block_size)
    return np.stack([x[start : start + block_size].mean(axis=0) for start in starts])


def block_scores(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    config: SketchWalkConfig,
    *,
    is_decode: bool = False,
) -> np.ndarray:
    """Scores every causal pair of blocks: `A[i, j] = (q̄[i] Ω)(k̄[j] Ω)ᵀ / sqrt(H)`, `j <= i`.

    Heads are averaged before (Algorithm 1, step 1).

    Args:
      query: All queries of one sequence up to now, after RoPE.
      key: All keys of one sequence up to now, after RoPE.
      config: What is computed.
      is_decode: Replaces the last block's query mean by the last token's query
        (Algorithm 2, step 3).

    Returns:
      `[J, J]` float32, zero above the diagonal.

    Example:
      >>> ones = np.ones((64, 1, 4), np.float32)
      >>> block_scores(ones, ones, SketchWalkConfig.paper()).tolist()
      [[2.0]]
    """
    head_dim = query.shape[-1]
    query_means = block_means(query, config.block_size)
    key_means = block_means(key, config.block_size)
    if is_decode:
        query_means[-1] = np.asarray(query[-1], np.float32)
    omega = srht_matrix(head_dim, config.sketch_dim, config.seed)
    queries, keys = (means.mean(axis=1) @ omega for means in (query_means, key_means))
    scores = np.einsum("ir,jr->ij", queries, keys)
    return np.tril(scores / np.float32(np.sqrt(head_dim)))


# Step 6 (equation 1), on the host in float64, whose range holds the eighth power of any float32
# score, so that the equations need no scaling of `W`. Rows of a product of powers are divided by
# their largest entry after each layer, which changes no ranking.


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


# Step 7.


def budget(config: SketchWalkConfig, num_blocks: int) -> np.ndarray:
    """Returns how many blocks each row keeps, counted exactly.

    `count[i] = min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))`, where the
    density is the decimal that was written: 0.1 · 30 is 3, although `0.1 * 30` is not.

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
        counts.append(min(row + 1, max(forced, math.ceil(density * (row + 1)))))
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
    walk_state: np.ndarray, scores: np.ndarray, config: SketchWalkConfig
) -> list[list[int]]:
    """Selects for every row of a prompt.

    Args:
      walk_state: `R_k`, `[J, J]`.
      scores: `A_k`, `[J, J]`.
      config: What is computed.

    Returns:
      Block ids of each row, ascending.

    Example:
      >>> state = np.tril(np.ones((4, 4)))
      >>> select_rows(state, state, SketchWalkConfig.paper())
      [[0], [0, 1], [0, 2], [0, 3]]
    """
    num_blocks = len(walk_state)
    counts = budget(config, num_blocks)
    rows = []
    for row in range(num_blocks):
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


# Step 8, in float32 at the highest precision.


@partial(jax.jit, static_argnames="scale")
def masked_attention(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "S K H"],
    value: Float[AnyArray, "S K H"],
    mask: Bool[AnyArray, "T S"] | Bool[AnyArray, "N T S"],
    scale: float | None = None,
) -> tuple[Float[AnyArray, "T N H"], Float[AnyArray, "T N"]]:
    """Computes `softmax(scale · Q Kᵀ) V` per head over the allowed pairs.

    Args:
      query: Queries of one sequence.
      key: Keys; query head `n` reads key head `n // (N / K)`.
      value: Values.
      mask: True where a query may attend to a key, shared by the heads or one per query head.
      scale: Factor of the logits; `1 / sqrt(H)` where None.

    Returns:
      The output in float32, and the log-sum-exp of the scaled logits. A query that may attend
      to nothing gives 0 and `-inf`; one that may attend to a key or value that is not finite gives
      NaN, and no other does.

    Example:
      >>> x = jnp.ones((2, 1, 4))
      >>> out, lse = masked_attention(x, x, x, jnp.tril(jnp.ones((2, 2), bool)))
      >>> out.shape, lse.shape
      ((2, 1, 4), (2, 1))
    """
    num_heads, head_dim = query.shape[1:]
    group_size = num_heads // key.shape[1]
    factor = np.float32(1.0 / np.sqrt(head_dim) if scale is None else scale)
    key, value = (jnp.repeat(x.astype(jnp.float32), group_size, axis=1) for x in (key, value))
    mask = jnp.broadcast_to(mask, (num_heads, *mask.shape[-2:]))
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("tnh,snh->nts", query.astype(jnp.float32), key, precision=highest)
    logits = jnp.where(mask, logits * factor, -jnp.inf)
    largest = logits.max(axis=-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.where(mask, jnp.exp(logits - largest), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    is_lost = ~jnp.isfinite(value).all(axis=-1)
    output = jnp.einsum(
        "nts,snh->tnh", weights, jnp.where(is_lost[..., None], 0.0, value), precision=highest
    )
    sees_lost = (mask & is_lost.T[:, None, :]).any(axis=-1)
    output = jnp.where(sees_lost.T[..., None], jnp.nan, output)
    return output, (jnp.log(total) + largest)[..., 0].T


# Both algorithms.


@dataclasses.dataclass(frozen=True)
class ReferenceLayer:
    """What one layer computed.

    Attributes:
      output: Attention output, `[T, N, H]` float32 (`T` is 1 in decode).
      lse: Log-sum-exp, `[T, N]` float32.
      rows: Selected block ids of each query block, ascending; one row in decode; None where
        the layer is dense.
      walk: `R_k`, `[J, J]` float64, or None where the layer is dense.
      scores: `A_k`, `[J, J]` float32, or None where the layer is dense.
      mask: Attended pairs, `[T, S]` bool.
    """

    output: Float[AnyArray, "T N H"]
    lse: Float[AnyArray, "T N"]
    rows: list[list[int]] | None
    walk: np.ndarray | None
    scores: np.ndarray | None
    mask: np.ndarray


def select_prefill(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: SketchWalkConfig,
) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Selects for every query block of a prompt (Algorithm 1, steps 1 to 7).

    Args:
      query: Queries after RoPE.
      key: Keys after RoPE.
      previous: `R_{k-1}`, None at the first sparse layer.
      config: What is computed.

    Returns:
      Block ids of each row, `R_k` and `A_k`.

    Example:
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> select_prefill(x, x, None, SketchWalkConfig.paper())[0]
      [[0], [0, 1]]
    """
    scores = block_scores(query, key, config)
    state = walk_step(previous, scores, config)
    return select_rows(state, scores, config), state, scores


def select_decode(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: SketchWalkConfig,
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Selects for the last of `T` tokens (Algorithm 2, steps 2 to 6).

    The block matrices run over tokens `0 .. T - 1`, with the last row's query replaced by the
    last token's head mean; its row of the walk selects.

    Args:
      query: Queries of all tokens so far, after RoPE.
      key: Keys of all tokens so far, after RoPE.
      previous: `R_{k-1}` of this same token, None at the first sparse layer.
      config: What is computed.

    Returns:
      Block ids, `R_k` and `A_k`.

    Example:
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> select_decode(x, x, None, SketchWalkConfig.paper())[0]
      [0, 1]
    """
    scores = block_scores(query, key, config, is_decode=True)
    state = walk_step(previous, scores, config)
    count = int(budget(config, len(state))[-1])
    return select(state[-1], scores[-1], count, config), state, scores


def prefill_layer(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    value: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: SketchWalkConfig,
    *,
    is_dense: bool = False,
    scale: float | None = None,
) -> ReferenceLayer:
    """Computes one layer of Algorithm 1 over a whole prompt.

    Args:
      query: Queries after RoPE.
      key: Keys after RoPE.
      value: Values.
      previous: `R_{k-1}`, None at the first sparse layer.
      config: What is computed.
      is_dense: Attends to everything, and neither reads nor writes the walk.
      scale: Factor of the attention logits.

    Returns:
      The layer's output and selection.

    Example:
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> prefill_layer(x, x, x, None, SketchWalkConfig.paper()).rows
      [[0], [0, 1]]
    """
    num_tokens = len(query)
    rows = state = scores = None
    if not is_dense:
        rows, state, scores = select_prefill(query, key, previous, config)
    mask = token_mask(rows, num_tokens, config.block_size)
    output, lse = masked_attention(query, key, value, mask, scale)
    return ReferenceLayer(output, lse, rows, state, scores, mask)


def decode_layer(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    value: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: SketchWalkConfig,
    *,
    is_dense: bool = False,
    scale: float | None = None,
) -> ReferenceLayer:
    """Computes one layer of Algorithm 2 for the last of `T` tokens.

    Args:
      query: Queries of all tokens so far, after RoPE.
      key: Keys of all tokens so far, after RoPE.
      value: Values of all tokens so far.
      previous: `R_{k-1}` of this same token, None at the first sparse layer.
      config: What is computed.
      is_dense: Attends to everything, and neither reads nor writes the walk.
      scale: Factor of the attention logits.

    Returns:
      The last token's output and selection.

    Example:
      >>> x = np.ones((65, 1, 32), np.float32)
      >>> decode_layer(x, x, x, None, SketchWalkConfig.paper()).rows
      [[0, 1]]
    """
    num_tokens = len(query)
    mask = np.ones((1, num_tokens), bool)
    rows = state = scores = None
    if not is_dense:
        ids, state, scores = select_decode(query, key, previous, config)
        rows = [ids]
        mask = np.isin(np.arange(num_tokens) // config.block_size, ids)[None]
    output, lse = masked_attention(query[-1:], key, value, mask, scale)
    return ReferenceLayer(output, lse, rows, state, scores, mask)


def sketchwalk_prefill(
    queries: Sequence[Float[AnyArray, "T N H"]],
    keys: Sequence[Float[AnyArray, "T K H"]],
    values: Sequence[Float[AnyArray, "T K H"]],
    config: SketchWalkConfig,
) -> list[ReferenceLayer]:
    """Runs Algorithm 1 over the given queries, keys and values of every layer.

    The layers of `dense_layers` are dense. Each layer's queries are given rather than
    computed from the layer before, so a stack of attention layers can be tested without a model.

    Example:
      >>> x = np.ones((130, 1, 32), np.float32)
      >>> layers = sketchwalk_prefill([x] * 3, [x] * 3, [x] * 3, SketchWalkConfig.paper())
      >>> [layer.rows for layer in layers]
      [None, None, [[0], [0, 1], [0, 2]]]
    """
    return _stack(prefill_layer, queries, keys, values, config)


def sketchwalk_decode(
    queries: Sequence[Float[AnyArray, "T N H"]],
    keys: Sequence[Float[AnyArray, "T K H"]],
    values: Sequence[Float[AnyArray, "T K H"]],
    config: SketchWalkConfig,
    *,
    position: int,
) -> list[ReferenceLayer]:
    """Runs Algorithm 2 at one position over the given queries, keys and values of every layer.

    Tokens after `position` are ignored.

    Example:
      >>> x = np.ones((130, 1, 32), np.float32)
      >>> config = SketchWalkConfig.paper()
      >>> decoded = sketchwalk_decode([x] * 3, [x] * 3, [x] * 3, config, position=129)
      >>> [layer.rows for layer in decoded]
      [None, None, [[0, 2]]]
    """
    queries, keys, values = (
        [x[: position + 1] for x in layers] for layers in (queries, keys, values)
    )
    return _stack(decode_layer, queries, keys, values, config)


def _stack(layer_fn, queries, keys, values, config) -> list[ReferenceLayer]:
    layers: list[ReferenceLayer] = []
    state = None
    for index, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        is_dense = config.is_dense(index)
        layers.append(layer_fn(query, key, value, state, config, is_dense=is_dense))
        state = state if is_dense else layers[-1].walk
    return layers
