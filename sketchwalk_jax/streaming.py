"""Generation that hands out tokens as they come: the same steps as `generate`, a few at a time."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from sketchwalk_jax.cache import Cache
from sketchwalk_jax.density import Density
from sketchwalk_jax.generation import Call, DecodeState, decode_tokens, prepare, start_decoding
from sketchwalk_jax.selection import BlockSelection

PyTree = Any


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """A few new tokens of every sequence.

    Attributes:
      tokens: The new tokens, int32 `[B, n]` on the host; the first chunk of a stream holds none
        and marks the end of prefill.
      lengths: Tokens of this chunk that belong to each sequence, int32 `[B]` on the host.
      is_done: Sequences that have ended, bool `[B]` on the host.
      measured_density: Attended over causal pairs so far.
      selection: In the first chunk, if asked for: blocks that the prompt's rows attended to.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_done: np.ndarray
    measured_density: Density
    selection: BlockSelection | None = None


_start = jax.jit(start_decoding, static_argnames=("capacity", "settings"), donate_argnames="cache")
_decode = jax.jit(
    decode_tokens,
    static_argnames=("num_tokens", "eos_token_ids", "pad_token_id", "settings"),
    donate_argnames="state",
)


class Stream(Iterator[StreamChunk]):
    """Iterator over `StreamChunk`s; made by `stream`."""

    def __init__(self, call: Call, params: PyTree, *, every: int) -> None:
        """Keeps the checked call; nothing runs before the first `next`."""
        self._call, self._params, self._every = call, params, every
        self._state: DecodeState | None = None
        self._left, self._is_first = call.max_new_tokens, True

    @property
    def cache(self) -> Cache:
        """The cache after the last chunk, to continue from; the next chunk consumes it."""
        if self._state is None:
            raise ValueError("the stream must have been started before its cache is read")
        return self._state.cache

    def __next__(self) -> StreamChunk:
        """Computes the next chunk."""
        call = self._call
        if self._state is None:
            self._state, selection = _start(
                self._params,
                call.tokens,
                call.lengths,
                call.key,
                call.cache,
                capacity=call.capacity,
                settings=call.settings,
            )
            batch = self._state.lengths.shape[0]
            return self._chunk(np.zeros((batch, 0), np.int32), np.zeros(batch, np.int32), selection)
        if not self._left or bool(np.all(self._state.is_done)):
            raise StopIteration
        # The first token alone, as soon as there is one.
        count = min(1 if self._is_first else self._every, self._left)
        self._is_first = False
        before = np.array(self._state.lengths)
        tokens, self._state = _decode(
            self._params,
            self._state,
            call.sampling,
            jnp.asarray(count, jnp.int32),
            num_tokens=self._every,
            eos_token_ids=call.eos_token_ids,
            pad_token_id=call.pad_token_id,
            settings=call.settings,
        )
        self._left -= count
        lengths = np.asarray(self._state.lengths) - before
        return self._chunk(np.asarray(tokens)[:, :count], lengths, None)

    def _chunk(
        self, tokens: np.ndarray, lengths: np.ndarray, selection: BlockSelection | None
    ) -> StreamChunk:
        assert self._state is not None
        # Copies: the next step consumes the state, its counts included.
        density = jax.tree.map(np.array, self._state.cache.density)
        is_done = np.array(self._state.is_done)
        return StreamChunk(tokens, lengths, is_done, density, selection)


def stream(
    params: PyTree, tokens: Int[Array | np.ndarray, "B T"], *, every: int = 8, **options: Any
) -> Stream:
    """Continues every prompt, handing out tokens as they come.

    The same tokens as `generate`. The first chunk holds no tokens, it marks the end of prefill; the
    second holds one, and those after it `every`.

    Args:
      params: Parameter tree from `load`.
      tokens: Prompts, right-padded.
      every: Decode steps between two chunks.
      **options: As `generate`.

    Returns:
      An iterator over `StreamChunk`s; its `cache` continues the sequences afterwards.

    Raises:
      ValueError: As `generate`, at once and not at the first chunk.

    Example:
      >>> for chunk in stream(params, tokens, model_config=cfg, config=SketchWalkConfig.paper(),
      ...                     max_new_tokens=64):  # doctest: +SKIP
      ...     print(chunk.tokens)
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a positive integer, got {every!r}")
    return Stream(prepare(tokens, **options), params, every=every)
