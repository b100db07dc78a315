"""Pads prompts and room for new tokens to a few sizes, so that few programs are compiled.

Also pads sequences on the right, or moves tokenizers' padding from any side to the right.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from sketchwalk_jax.validation import check_integers, describe

_LONG = 2**16  # the class from which classes double


def new_token_room(max_new_tokens: int) -> int:
    """Returns the room for new tokens: `max_new_tokens` rounded up to 256, 512, 1024, and so on.

    A program is compiled for a room, so all values of `max_new_tokens` with the same room share it.

    Args:
      max_new_tokens: Maximum number of tokens to generate for a sequence, at least 1.

    Returns:
      The room in tokens.

    Example:
      >>> [new_token_room(n) for n in (1, 256, 257, 1000)]
      [256, 256, 512, 1024]
    """
    return max(256, 1 << (max_new_tokens - 1).bit_length())


def pad_right(
    sequences: Sequence[Any], width: int | None = None
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Stacks sequences of different lengths, zeros on the right; returns array and lengths.

    Args:
      sequences: Token ids of each sequence, in lists or arrays.
      width: Columns of the array. Default: the length of the longest sequence.

    Example:
      >>> tokens, lengths = pad_right([[5, 6], [7]])
      >>> tokens.tolist(), lengths.tolist()
      ([[5, 6], [7, 0]], [2, 1])
    """
    lengths = np.array([len(one) for one in sequences], np.int32)
    tokens = np.zeros((len(sequences), lengths.max() if width is None else width), np.int32)
    for row, one in zip(tokens, sequences, strict=True):
        row[: len(one)] = one
    return tokens, lengths


def left_to_right_padding(
    tokens: Integer[Array | np.ndarray, "B T"],
    attention_mask: Bool[Array | np.ndarray, "B T"] | Integer[Array | np.ndarray, "B T"],
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Moves the tokens of every sequence to the start of its row, so that all padding comes last.

    Tokenizers pad on the left for generation, but blocks are counted from the first token. If `s`
    is the first real position of a row, then `rolled[t] = tokens[(s + t) mod T]`. Rows may also be
    padded on the right or on both sides.

    Args:
      tokens: Token ids, padded on any side.
      attention_mask: 1 or true at real tokens, which must be contiguous in each row.

    Returns:
      The rolled tokens, int32 `[B, T]`, and the number of tokens in each row, int32 `[B]`.

    Raises:
      ValueError: If a concrete mask has another shape, values other than 0 and 1, a row without
        tokens or a row whose tokens are not contiguous. Traced masks are not checked.

    Example:
      >>> tokens, mask = jnp.array([[0, 0, 7, 8]]), jnp.array([[0, 0, 1, 1]])
      >>> rolled, lengths = left_to_right_padding(tokens, mask)
      >>> rolled.tolist(), lengths.tolist()
      ([[7, 8, 0, 0]], [2])
    """
    check_integers("tokens", tokens, "[B, T]", 2)
    if not hasattr(attention_mask, "shape"):
        raise ValueError(f"attention_mask must be an array [B, T], got {describe(attention_mask)}")
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask must have the shape of tokens, {list(tokens.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    is_traced = any(isinstance(x, jax.core.Tracer) for x in (tokens, attention_mask))
    if not isinstance(attention_mask, jax.core.Tracer):
        _check_mask(np.asarray(attention_mask))
    xp: Any = jnp if is_traced else np  # arrays on the host compile nothing
    is_real = xp.asarray(attention_mask).astype(bool)
    num_tokens = is_real.shape[1]
    lengths = xp.sum(is_real, axis=1, dtype=xp.int32)
    first = xp.argmax(is_real, axis=1).astype(xp.int32)
    positions = (first[:, None] + xp.arange(num_tokens, dtype=xp.int32)[None, :]) % num_tokens
    found = xp.take_along_axis(xp.asarray(tokens, xp.int32), positions, axis=1)
    return jnp.asarray(found, jnp.int32), jnp.asarray(lengths, jnp.int32)


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
    """Returns the length to which a prompt is padded, so that few lengths are compiled.

    With `n = ceil(num_tokens / multiple)` and `2^k < n ≤ 2^(k+1)`, the bucket is `n` rounded up to
    a multiple of `max(1, 2^k / 8)`, times `multiple`. There are eight buckets between a length and
    its double, and the padding is less than an eighth of the prompt plus `multiple` tokens. If the
    length is already a bucket, it stays the same.

    Args:
      num_tokens: Tokens of the longest prompt of the batch, at least 1.
      multiple: Number of tokens, such as the block size, that every bucket is a multiple of; at
        least 1.

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


def length_class(num_tokens: int, *, growth: int) -> int:
    """Returns the longest prompt of the program that reads a prompt of `num_tokens` tokens.

    Classes are `256 · growth^k` with `growth` 2, or `4096 · growth^k` with a larger one, and twice
    the last class from 65,536 tokens on, where a larger cache would take gigabytes.

    Example:
      >>> [length_class(n, growth=2) for n in (1, 257, 1000)]
      [256, 512, 1024]
      >>> [length_class(n, growth=4) for n in (1, 2049, 30_000, 100_000)]
      [4096, 4096, 65536, 131072]
    """
    found = 256 if growth == 2 else 4096
    while found < num_tokens:
        found *= growth if found < _LONG else 2
    return found


def class_sixteenths(width: int, *, growth: int) -> tuple[int, ...]:
    """Returns the sixteenths of a class's columns that its program can compute, ascending.

    They exceed the prompts of the class by at most a half. In the first class, prompts may be much
    shorter, and a multiple of a sixteenth is computed.

    Example:
      >>> class_sixteenths(512, growth=2), class_sixteenths(16384, growth=4)
      ((10, 12, 14, 16), (6, 8, 10, 12, 16))
    """
    is_first = width <= length_class(1, growth=growth)
    if growth == 2 or width > _LONG:
        return (*((4, 8) if is_first else ()), 10, 12, 14, 16)
    return (*((1, 2, 4) if is_first else ()), 6, 8, 10, 12, 16)


def pad_to(tokens: Any, width: int) -> Any:
    """Pads prompts `[B, T]` on the right to a number of columns."""
    padding = ((0, 0), (0, width - tokens.shape[1]))
    is_traced = isinstance(tokens, jax.core.Tracer)
    if not is_traced and getattr(tokens, "is_fully_addressable", True):
        return np.pad(np.asarray(tokens), padding)  # on the host, where it compiles nothing
    return jnp.pad(jnp.asarray(tokens), padding)


def pad_to_bucket(tokens: Any, *, multiple: int, context_length: int) -> Any:
    """Pads prompts `[B, T]` on the right to the next bucket, but not beyond the model's context."""
    width = tokens.shape[1]
    bucket = max(width, min(bucket_length(width, multiple=multiple), context_length))
    return pad_to(tokens, bucket)
