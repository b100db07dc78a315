"""Layers of the printed rule and its variants (damping, other transitions), on the host.

Block scores and budgets come from `sketchwalk_jax.algorithm`, the walk from the log-domain oracle
in float64. Attention takes any mask, also one per head.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jaxtyping import Array, Bool, Float

from sketchwalk_jax import algorithm
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

AnyArray = Array | np.ndarray
_CONSTANTS = ("block_size", "sketch_dim", "seed", "is_token")
_block_scores = jax.jit(algorithm.block_scores, static_argnames=_CONSTANTS)


def block_scores(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    config: SketchWalkConfig,
    *,
    is_token: bool = False,
) -> np.ndarray:
    """Calls `algorithm.block_scores` with a policy's constants."""
    constants = config.block_size, config.sketch_dim, config.seed
    return np.asarray(_block_scores(query, key, *constants, is_token=is_token))


def budget(config: SketchWalkConfig, num_blocks: int) -> np.ndarray:
    """Calls `algorithm.block_budget` with a policy's constants."""
    least = config.sink_blocks + config.local_blocks
    return algorithm.block_budget(num_blocks, config.density, least)


def token_mask(
    rows: Sequence[Sequence[int]] | None, num_tokens: int, block_size: int
) -> np.ndarray:
    """Returns the causal mask `[T, T]` of the blocks of each row; None is dense attention.

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


@partial(jax.jit, static_argnames="scale")
def masked_attention(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "S K H"],
    value: Float[AnyArray, "S K H"],
    mask: Bool[AnyArray, "T S"] | Bool[AnyArray, "N T S"],
    scale: float | None = None,
) -> tuple[Float[AnyArray, "T N H"], Float[AnyArray, "T N"]]:
    """Computes `softmax(scale · Q Kᵀ) V` per head over the allowed pairs.

    Query head `n` reads key head `n // (N / K)`. The mask is shared by the heads or one per query
    head; `scale` is `1 / sqrt(H)` where None.

    Returns:
      The output in float32, and the log-sum-exp of the scaled logits. A query that may attend
      to nothing gives 0 and `-inf`; one that may attend to a key or value that is not finite gives
      NaN, and no other does.
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


@dataclasses.dataclass(frozen=True)
class ReferenceLayer:
    """Results of one layer.

    Attributes:
      output: Attention output, `[T, N, H]` float32 (`T` is 1 in decode).
      rows: Selected block ids of each query block, ascending; one row in decode; None where
        the layer is dense.
      walk: `log2 R_k`, `[J, J]` float64, or None where the layer is dense.
      scores: `A_k`, `[J, J]` float32, or None where the layer is dense.
      mask: Attended pairs, `[T, S]` bool.
    """

    output: Float[AnyArray, "T N H"]
    rows: list[list[int]] | None
    walk: np.ndarray | None
    scores: np.ndarray | None
    mask: np.ndarray


def select(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: SketchWalkConfig,
    *,
    is_token: bool = False,
) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Selects for every block of a prompt, or in decode for the last token.

    Args:
      query: Queries of all tokens so far, after RoPE.
      key: Keys, likewise.
      previous: `log2 R_{k-1}`, None at the first sparse layer; in decode the same token's.
      config: Configuration of the policy.
      is_token: Whether the last token alone is a row.

    Returns:
      Block ids of each row, `log2 R_k` and `A_k`.
    """
    scores = block_scores(query, key, config, is_token=is_token)
    state = oracle.log2_step(previous, scores, config)
    rows = []
    for row, count in enumerate(budget(config, len(state)).tolist()):
        upto = slice(row + 1)
        rows.append(oracle.chosen(state[row, upto], scores[row, upto], count, config).tolist())
    return rows[-1:] if is_token else rows, state, scores


def run_layer(
    query: Float[AnyArray, "T N H"],
    key: Float[AnyArray, "T K H"],
    value: Float[AnyArray, "T K H"],
    previous: np.ndarray | None,
    config: SketchWalkConfig,
    *,
    is_token: bool = False,
    is_dense: bool = False,
) -> ReferenceLayer:
    """Computes one layer of a prompt, or in decode of the last of `T` tokens; see `select`.

    A dense layer attends to everything, and neither reads nor writes the walk.
    """
    rows = state = scores = None
    if not is_dense:
        rows, state, scores = select(query, key, previous, config, is_token=is_token)
    if is_token:
        query, blocks = query[-1:], np.arange(len(key)) // config.block_size
        mask = np.isin(blocks, blocks if rows is None else rows[0])[None]
    else:
        mask = token_mask(rows, len(key), config.block_size)
    # With masked padding, prompts and tokens of many lengths share a compiled program.
    keys = -len(key) % 64
    queries = 0 if is_token else keys
    query = np.pad(query, ((0, queries), (0, 0), (0, 0)))
    key, value = (np.pad(x, ((0, keys), (0, 0), (0, 0))) for x in (key, value))
    padded = np.pad(mask, ((0, queries), (0, keys)))
    output, _ = masked_attention(query, key, value, padded)
    return ReferenceLayer(output[: len(mask)], rows, state, scores, mask)


def run_layers(
    queries: Sequence[Float[AnyArray, "T N H"]],
    keys: Sequence[Float[AnyArray, "T K H"]],
    values: Sequence[Float[AnyArray, "T K H"]],
    config: SketchWalkConfig,
    *,
    is_token: bool = False,
) -> list[ReferenceLayer]:
    """Runs all layers of a stack; layers in `dense_layers` are dense.

    Each layer's queries are given rather than computed from the layer before, so a stack of
    attention layers can be tested without a model.

    Example:
      >>> x = np.ones((130, 1, 32), np.float32)
      >>> layers = run_layers([x] * 3, [x] * 3, [x] * 3, SketchWalkConfig.paper())
      >>> [layer.rows for layer in layers]
      [None, None, [[0], [0, 1], [0, 2]]]
    """
    layers: list[ReferenceLayer] = []
    state = None
    for index, arrays in enumerate(zip(queries, keys, values, strict=True)):
        is_dense = config.is_dense(index)
        layers.append(run_layer(*arrays, state, config, is_token=is_token, is_dense=is_dense))
        state = state if is_dense else layers[-1].walk
    return layers
