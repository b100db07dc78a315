"""Algorithms 1 and 2 over a stack of layers, one sequence at a time."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.reference.attention import masked_attention
from sketchwalk_jax.reference.selection import budget, select, select_rows, token_mask
from sketchwalk_jax.reference.sketch import AnyArray, block_scores
from sketchwalk_jax.reference.walk import walk_step


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

    The rows of the last `dense_tail` tokens keep every causal block.

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
    num_dense = 0
    if config.dense_tail:
        first_tail_token = max(0, len(query) - config.dense_tail)
        num_dense = len(scores) - first_tail_token // config.block_size
    return select_rows(state, scores, config, num_dense_rows=num_dense), state, scores


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
