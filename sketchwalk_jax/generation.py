"""Text generation: `generate` in one program, `make_generate` for notebooks, `stream` in pieces.

One call is a prefill, which leaves a `DecodeState`, and a `while_loop` of decode steps on it.
`generate` runs both in one program, `stream` a few steps at a time, and `make_generate` pads
prompts to few lengths, so that a new one seldom compiles anew.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from sketchwalk_jax.cache import Cache, Density, init_cache, recommended_policy
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.inference import (
    check_cache,
    check_prompt,
    decode_token,
    read_prompt,
    tokens_used,
)
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.sampling import Sampling, mark_seen, sample, seen_tokens, sequence_keys
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import check_integer

PyTree = Any
_STATIC = ("capacity", "max_new_tokens", "eos_token_ids", "pad_token_id", "settings")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
      tokens: New tokens, int32 `[B, max_new_tokens]`; after a sequence's end, the pad token.
      lengths: New tokens of each sequence, its end-of-sequence token included, int32 `[B]`.
      measured_density: Attended over causal pairs of this call, by phase and layer.
      cache: Holds prompt and new tokens; pass it to the next call to continue.
      selection: Blocks that the prompt's rows attended to, arrays with a leading axis of sparse
        layers; `None` unless asked for.
    """

    tokens: Int[Array, "B U"]
    lengths: Int[Array, "B"]
    measured_density: Density
    cache: Cache
    selection: BlockSelection | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state between two decode steps.

    Attributes:
      logits: Logits of the next token, float32 `[B, V]`.
      cache: Everything before it.
      seen: Tokens that stand in the prompt or were generated, bool `[B, V]`.
      keys: One random key per sequence.
      lengths: New tokens so far, int32 `[B]`.
      is_done: Sequences that have ended, bool `[B]`.
    """

    logits: Float[Array, "B V"]
    cache: Cache
    seen: Bool[Array, "B V"]
    keys: Key[Array, "B"]
    lengths: Int[Array, "B"]
    is_done: Bool[Array, "B"]


def start_decoding(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    key: Key[Array, "..."],
    cache: Cache | None,
    *,
    capacity: int,
    settings: Settings,
) -> tuple[DecodeState, BlockSelection | None]:
    """Reads the prompts; a new cache of `capacity` tokens is made where none is given."""
    batch = tokens.shape[0]
    model_config, is_fresh = settings.model_config, cache is None
    if cache is None:
        dtype = params["embed"]["embedding"].dtype
        cache = init_cache(
            model_config, settings.config, batch=batch, max_tokens=capacity, dtype=dtype
        )
    cache = dataclasses.replace(cache, density=Density.zeros(model_config.num_layers, batch))
    last = (lengths - 1)[:, None]
    hidden, cache, selection = read_prompt(
        params, tokens, lengths, last, cache, is_fresh=is_fresh, settings=settings
    )
    logits = unembed(params, hidden[:, 0], model_config=model_config)
    state = DecodeState(
        logits=logits,
        cache=cache,
        seen=seen_tokens(tokens, lengths, vocab_size=logits.shape[-1]),
        keys=sequence_keys(key, batch=batch),
        lengths=jnp.zeros((batch,), jnp.int32),
        is_done=jnp.zeros((batch,), bool),
    )
    return state, selection


def decode_tokens(
    params: PyTree,
    state: DecodeState,
    sampling: Sampling,
    limit: Int[Array, ""],
    *,
    num_tokens: int,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    settings: Settings,
) -> tuple[Int[Array, "B U"], DecodeState]:
    """Up to `limit <= num_tokens` more tokens of every sequence that has not ended.

    Every token that is returned is also in the returned cache, the last one included.
    """
    batch = state.lengths.shape[0]
    settings = dataclasses.replace(settings, return_selection=False)

    def is_unfinished(carry: tuple[Array, Array, DecodeState]) -> Bool[Array, ""]:
        step, _, state = carry
        return (step < limit) & ~jnp.all(state.is_done)

    def one_token(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
        step, tokens, state = carry
        keys = jax.vmap(jax.random.fold_in)(state.keys, state.lengths)
        token = sample(state.logits, sampling, state.seen, keys)
        active = ~state.is_done
        token = jnp.where(active, token, pad_token_id)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, step))
        logits, cache, _ = decode_token(
            params, token, state.cache, active=active, settings=settings
        )
        eos = jnp.asarray(eos_token_ids, jnp.int32)
        is_end = jnp.any(token[:, None] == eos[None, :], axis=1)
        state = DecodeState(
            logits=logits,
            cache=cache,
            seen=mark_seen(state.seen, jnp.where(active, token, -1)),
            keys=state.keys,
            lengths=state.lengths + active.astype(jnp.int32),
            is_done=state.is_done | is_end,
        )
        return step + 1, tokens, state

    tokens = jnp.full((batch, num_tokens), pad_token_id, jnp.int32)
    carry = (jnp.zeros((), jnp.int32), tokens, state)
    _, tokens, state = jax.lax.while_loop(is_unfinished, one_token, carry)
    return tokens, state


@partial(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
def _generate(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    sampling: Sampling,
    key: Key[Array, "..."],
    cache: Cache | None,
    *,
    capacity: int,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    settings: Settings,
) -> Generation:
    state, selection = start_decoding(
        params, tokens, lengths, key, cache, capacity=capacity, settings=settings
    )
    tokens, state = decode_tokens(
        params,
        state,
        sampling,
        jnp.asarray(max_new_tokens, jnp.int32),
        num_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        settings=settings,
    )
    return Generation(tokens, state.lengths, state.cache.density, state.cache, selection)


def generate(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    model_config: ModelConfig,
    config: Policy | None = None,
    max_new_tokens: int,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    sampling: Sampling | None = None,
    key: Key[Array, "..."] | None = None,
    eos_token_ids: tuple[int, ...] | None = None,
    pad_token_id: int = 0,
    phase: str = "both",
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    cache: Cache | None = None,
    max_tokens: int | None = None,
    return_selection: bool = False,
) -> Generation:
    """Continues every prompt by up to `max_new_tokens` tokens, in one compiled program.

    Pure, and jitted itself; it may be called under a `jit` of the caller's. A batch gives what its
    sequences give one by one.

    Args:
      params: Parameter tree from `load`.
      tokens: Prompts, right-padded.
      model_config: The model.
      config: The policy, such as a `SketchWalkConfig`, or `Dense()`; by default
        `SketchWalkConfig.recommended(plan=model_config.plan)`.
      max_new_tokens: Most tokens to generate for a sequence.
      lengths: Prompt tokens of each sequence; all `T` by default.
      sampling: How tokens are drawn; greedy by default. New values do not recompile.
      key: Random key, one or one per sequence; `jax.random.key(0)` by default.
      eos_token_ids: Tokens that end a sequence; the model's own by default.
      pad_token_id: Fills `tokens` after a sequence's end.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`. A policy that selects
        in one phase only (`config.phases`) is dense in the other.
      chunk_size: Tokens that prefill processes at a time; `None` takes the whole prompt.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      cache: Continues the sequences of an earlier call; donated. The repetition penalty then
        counts the tokens of this call only.
      max_tokens: Tokens that a new cache can hold, to leave room for later calls; just enough for
        this one by default.
      return_selection: Whether to return the blocks that the prompt's rows attended to.

    Returns:
      A `Generation`; only the new tokens.

    Raises:
      ValueError: For arguments that do not fit, prompts longer than the model's context, or a
        cache without room. Token values are not checked.

    Example:
      >>> out = generate(params, tokens, model_config=model_config,
      ...                max_new_tokens=32)  # doctest: +SKIP
    """
    call = check_call(
        tokens,
        model_config=model_config,
        config=config,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        sampling=sampling,
        key=key,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        cache=cache,
        max_tokens=max_tokens,
        return_selection=return_selection,
    )
    return _generate(params, *call.arrays, **call.static)


@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of one generation, for `generate` and `stream`."""

    arrays: tuple[Any, ...]  # tokens, lengths, sampling, key, cache
    static: dict[str, Any]


def check_call(
    tokens: Any,
    *,
    model_config: ModelConfig,
    config: Policy | None = None,
    max_new_tokens: int,
    lengths: Any = None,
    sampling: Sampling | None = None,
    key: Any = None,
    eos_token_ids: tuple[int, ...] | None = None,
    pad_token_id: int = 0,
    phase: str = "both",
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    cache: Cache | None = None,
    max_tokens: int | None = None,
    return_selection: bool = False,
) -> Call:
    """Checks the arguments of `generate` and fills in what was left out."""
    config = recommended_policy(model_config) if config is None else config
    settings = Settings(
        model_config=model_config,
        config=config,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
    )
    lengths = check_prompt(tokens, lengths, None, config)
    check_integer("max_new_tokens", max_new_tokens)
    if not isinstance(pad_token_id, int):
        raise ValueError(f"pad_token_id must be an integer, got {pad_token_id!r}")
    capacity = _check_room(tokens, lengths, cache, max_new_tokens, max_tokens, settings)
    sampling = Sampling.greedy() if sampling is None else sampling
    key = jax.random.key(0) if key is None else key
    eos = model_config.eos_token_ids if eos_token_ids is None else eos_token_ids
    return Call(
        arrays=(tokens, lengths, sampling, key, cache),
        static={
            "capacity": capacity,
            "max_new_tokens": max_new_tokens,
            "eos_token_ids": tuple(eos),
            "pad_token_id": pad_token_id,
            "settings": settings,
        },
    )


def _check_room(
    tokens: Any,
    lengths: Any,
    cache: Cache | None,
    max_new_tokens: int,
    max_tokens: Any,
    settings: Settings,
) -> int:
    """Checks that prompts and new tokens fit; returns the capacity that a new cache needs."""
    context = settings.model_config.context_length
    width = tokens.shape[1]
    longest = width if isinstance(lengths, jax.core.Tracer) else int(np.asarray(lengths).max())
    used = tokens_used(cache)
    needed = used + longest + max_new_tokens
    if needed > context:
        raise ValueError(
            f"prompt and new tokens must fit into the model's context of {context} tokens, got "
            f"{used + longest} and {max_new_tokens}; shorten the prompt or lower max_new_tokens"
        )
    if width > context:
        raise ValueError(
            f"tokens must have at most as many columns as the model's context, {context}, "
            f"got {width}"
        )
    if cache is not None:
        check_cache(cache, tokens.shape[0], settings.config)
        if max_tokens is not None:
            raise ValueError("max_tokens must be None when a cache is given: its size is fixed")
        if needed > cache.capacity:
            raise ValueError(
                f"the cache must have room for prompt and new tokens, got {needed} tokens for a "
                f"capacity of {cache.capacity}; make the first call with a larger max_tokens"
            )
        return cache.capacity
    if max_tokens is not None and max_tokens < needed:
        raise ValueError(f"max_tokens must be at least {needed} for this call, got {max_tokens!r}")
    return min(width + max_new_tokens, context) if max_tokens is None else max(max_tokens, width)


# Prompts padded to few lengths.


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


_STATIC_OPTIONS = (
    "eos_token_ids",
    "pad_token_id",
    "phase",
    "chunk_size",
    "implementation",
    "kernel_config",
    "max_tokens",
    "return_selection",
)


class Generate:
    """The callable that `make_generate` returns."""

    def __init__(self, model_config: ModelConfig, config: Policy | None, **static: Any) -> None:
        """Keeps the static options; see `make_generate`."""
        config = recommended_policy(model_config) if config is None else config
        self.model_config, self.config, self.static = model_config, config, static

    def __call__(
        self,
        params: PyTree,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        lengths: Int[Array | np.ndarray, "B"] | None = None,
        attention_mask: Int[Array | np.ndarray, "B T"] | None = None,
        sampling: Sampling | None = None,
        key: Key[Array, "..."] | None = None,
        cache: Cache | None = None,
    ) -> Generation:
        """Continues the prompts; see `generate`.

        Args:
          params: Parameter tree from `load`.
          tokens: Prompts, right-padded; padded on either side if `attention_mask` is given.
          lengths: Prompt tokens of each sequence.
          attention_mask: Instead of `lengths`: 1 at real tokens, as tokenizers return it.
          sampling: How tokens are drawn; greedy by default.
          key: Random key, one or one per sequence.
          cache: Continues the sequences of an earlier call; donated.

        Returns:
          A `Generation`.

        Raises:
          ValueError: As `generate`.
        """
        if attention_mask is not None:
            if lengths is not None:
                raise ValueError("lengths must be None when attention_mask is given, got both")
            tokens, lengths = left_to_right_padding(tokens, attention_mask)
        tokens, lengths = pad_to_bucket(tokens, lengths, self.model_config, self.config)
        return generate(
            params,
            tokens,
            model_config=self.model_config,
            config=self.config,
            lengths=lengths,
            sampling=sampling,
            key=key,
            cache=cache,
            **self.static,
        )


def pad_to_bucket(
    tokens: Any, lengths: Any, model_config: ModelConfig, config: Policy
) -> tuple[Array, Any]:
    """Pads prompts on the right to the next bucket, which never exceeds the model's context."""
    if np.ndim(tokens) != 2 or 0 in np.shape(tokens):
        return tokens, lengths  # `generate` says what is wrong
    batch, width = np.shape(tokens)
    if lengths is None:
        lengths = np.full((batch,), width, np.int32)
    bucket = bucket_length(width, multiple=config.block_size)
    bucket = max(width, min(bucket, model_config.context_length))
    return jnp.pad(jnp.asarray(tokens), ((0, 0), (0, bucket - width))), lengths


def make_generate(
    model_config: ModelConfig,
    config: Policy | None = None,
    *,
    max_new_tokens: int,
    **static: Any,
) -> Generate:
    """The jitted `generate(params, tokens)` for one model and policy.

    Prompts are padded to buckets of lengths, so that a new length seldom compiles anew.

    Args:
      model_config: The model.
      config: The policy; by default the recommended one with the model's plan, as in `generate`.
      max_new_tokens: Most tokens to generate for a sequence.
      **static: Any other option of `generate` that is not an array: `eos_token_ids`,
        `pad_token_id`, `phase`, `chunk_size`, `implementation`, `kernel_config`, `max_tokens`,
        `return_selection`.

    Returns:
      A callable `generate(params, tokens, *, lengths=None, attention_mask=None, sampling=None,
      key=None, cache=None)`.

    Raises:
      ValueError: If an option is unknown.

    Example:
      >>> generate = make_generate(cfg, max_new_tokens=32)  # doctest: +SKIP
      >>> generate(params, tokens).tokens  # doctest: +SKIP
    """
    unknown = sorted(set(static) - set(_STATIC_OPTIONS))
    if unknown:
        raise ValueError(f"make_generate's options must be among {_STATIC_OPTIONS}, got {unknown}")
    return Generate(model_config, config, max_new_tokens=max_new_tokens, **static)


# Tokens as they come.


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
_continue = jax.jit(
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
        self._left, self._is_first = call.static["max_new_tokens"], True

    @property
    def cache(self) -> Cache:
        """The cache after the last chunk, to continue from; the next chunk consumes it."""
        if self._state is None:
            raise ValueError("the stream must have been started before its cache is read")
        return self._state.cache

    def __next__(self) -> StreamChunk:
        """Computes the next chunk."""
        tokens, lengths, sampling, key, cache = self._call.arrays
        static = self._call.static
        if self._state is None:
            prompt = {name: static[name] for name in ("capacity", "settings")}
            self._state, selection = _start(self._params, tokens, lengths, key, cache, **prompt)
            batch = self._state.lengths.shape[0]
            return self._chunk(np.zeros((batch, 0), np.int32), np.zeros(batch, np.int32), selection)
        if not self._left or bool(np.all(self._state.is_done)):
            raise StopIteration
        # The first token alone, as soon as there is one.
        count = min(1 if self._is_first else self._every, self._left)
        self._is_first = False
        before = np.array(self._state.lengths)
        steps = {name: static[name] for name in ("eos_token_ids", "pad_token_id", "settings")}
        limit = jnp.asarray(count, jnp.int32)
        tokens, self._state = _continue(
            self._params, self._state, sampling, limit, num_tokens=self._every, **steps
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
      >>> for chunk in stream(params, tokens, model_config=model_config,
      ...                     max_new_tokens=64):  # doctest: +SKIP
      ...     print(chunk.tokens)
    """
    check_integer("every", every)
    return Stream(check_call(tokens, **options), params, every=every)
