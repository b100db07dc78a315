"""Ragged batches: left padding to right padding, and lengths that few programs serve."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer


def left_to_right_padding(
    tokens: Integer[Array | np.ndarray, "B T"],
    attention_mask: Bool[Array | np.ndarray, "B T"] | Integer[Array | np.ndarray, "B T"],
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Rolls every sequence to the front of its row, so that all padding comes last.

    Tokenizers pad left for generation, but blocks are counted from the first token. With `s` the
    first real position of a row, `rolled[t] = tokens[(s + t) mod T]`. Rows that are padded right,
    or on both sides, are accepted too.

    Args:
      tokens: Token ids, padded on any side.
      attention_mask: 1 or true at real tokens, which stand together in each row.

    Returns:
      The rolled tokens, int32 `[B, T]`, and their number in each row, int32 `[B]`.

    Raises:
      ValueError: If a concrete mask has another shape, values besides 0 and 1, a row without
        tokens or one whose tokens do not stand together. Traced masks are not checked.

    Example:
      >>> tokens, mask = jnp.array([[0, 0, 7, 8]]), jnp.array([[0, 0, 1, 1]])
      >>> rolled, lengths = left_to_right_padding(tokens, mask)
      >>> rolled.tolist(), lengths.tolist()
      ([[7, 8, 0, 0]], [2])
    """
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask must have the shape of tokens, {list(tokens.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    if not isinstance(attention_mask, jax.core.Tracer):
        _check_mask(np.asarray(attention_mask))
    is_real = jnp.asarray(attention_mask).astype(bool)
    num_tokens = is_real.shape[1]
    lengths = jnp.sum(is_real, axis=1, dtype=jnp.int32)
    first = jnp.argmax(is_real, axis=1).astype(jnp.int32)
    positions = (first[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, :]) % num_tokens
    return jnp.take_along_axis(jnp.asarray(tokens, jnp.int32), positions, axis=1), lengths


def _check_mask(mask: np.ndarray) -> None:
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"attention_mask must hold 0 and 1 only, got {np.unique(mask)[:5]}")
    starts = np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1
    for row, runs in enumerate(starts.sum(axis=1)):
        if runs == 0:
            raise ValueError(f"attention_mask must mark a token in each row, got none in row {row}")
        if runs > 1:
            raise ValueError(
                f"attention_mask must mark tokens that stand together, got {runs} runs in row {row}"
            )


def bucket_length(num_tokens: int, *, multiple: int = 64) -> int:
    """The padded length for a prompt: a new length seldom needs a new program.

    With `n = ceil(num_tokens / multiple)` and `2^k < n ≤ 2^(k+1)`, the bucket is `n` rounded up to
    a multiple of `max(1, 2^k / 8)`, times `multiple`: eight buckets to an octave, and padding below
    an eighth of the prompt plus `multiple` tokens. A bucket is its own bucket.

    Args:
      num_tokens: Longest prompt of the batch, in tokens, at least 1.
      multiple: Tokens that every bucket is a multiple of, as the block size; at least 1.

    Returns:
      The padded length in tokens.

    Raises:
      ValueError: If an argument is below 1.

    Example:
      >>> [bucket_length(n) for n in (1, 64, 65, 1000, 1025, 10_000)]
      [64, 64, 128, 1024, 1152, 10240]
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    blocks = -(-num_tokens // multiple)
    octave = 1 << max((blocks - 1).bit_length() - 1, 0)
    step = max(1, octave // 8)
    return -(-blocks // step) * step * multiple
