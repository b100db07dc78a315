"""Text generation: `generate` for one call, `make_generate` for many, `stream` for pieces.

A call to `generate` runs two compiled programs. The first reads the prompts (prefill) and returns a
`DecodeState`. The second decodes in a `while_loop`. `stream` runs the same two programs.

Recompilation is rare. The number of tokens to decode is a run-time argument of the second program,
and the room for them is rounded up to a few sizes. `make_generate` also pads prompts to a few
lengths.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from sketchwalk_jax.auto import Auto, Choice
from sketchwalk_jax.cache import (
    Cache,
    Density,
    init_cache,
    recommended_policy,
    show_numbers,
    spread_cache,
)
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.calls import (
    cache_bytes,
    check_cache,
    check_model,
    check_prompt,
    check_unused,
    first_rows,
    prompt_rows,
    tokens_used,
)
from sketchwalk_jax.compiled import keep_by_default
from sketchwalk_jax.inference import decode_token, read_prompt
from sketchwalk_jax.memory import advice, check_memory
from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy, check_policy
from sketchwalk_jax.renamed import renamed_argument, renamed_field
from sketchwalk_jax.sampling import Sampling, mark_seen, sample, seen_tokens, sequence_keys
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import (
    constrain,
    constrain_logits,
    lies_on_one_device,
    placement_of,
)
from sketchwalk_jax.validation import check_integer, check_integers, describe

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
      tokens: The new tokens, int32 `[B, max_new_tokens]`. The pad token fills the columns after the
        end of a sequence.
      lengths: Number of new tokens of each sequence, including its end-of-sequence token, int32
        `[B]`.
      measured_density: (query, key) pairs that this call attended to, and all causal pairs, by
        phase and layer.
      cache: Cache that holds the prompts and the new tokens. Pass it to the next call to continue.
      selection: The blocks that the prompts' query blocks (rows) attended to, or `None` unless
        `return_selection` was set. Its arrays have a leading axis of sparse layers. There are as
        many rows as the longest prompt has blocks. Rows beyond the end of a shorter prompt are
        empty.
      is_finite: Whether all logits of a sequence were finite, bool `[B]`. If they were not, its
        tokens are meaningless.
      choice: What an `Auto` chose, or `None` if the call got a policy.
    """

    tokens: Int[Array, "B U"]
    lengths: Int[Array, "B"]
    measured_density: Density
    cache: Cache
    selection: BlockSelection | None
    is_finite: Bool[Array, "B"]
    choice: Choice | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        """Sizes and outcome in one line, without the tokens."""
        try:
            parts = {name: show_numbers(getattr(self, name)) for name in ("lengths", "is_finite")}
            parts["measured_density"] = show_numbers(self.measured_density.overall)
            tokens = f"{self.tokens.dtype}{list(self.tokens.shape)}"
        except (AttributeError, TypeError, ValueError):  # leaves that are no arrays, as JAX makes
            return "Generation(...)"
        more = ", ".join(f"{name}={value}" for name, value in parts.items())
        return f"Generation(tokens={tokens}, {more}, cache={self.cache!r})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state between two decode steps.

    Attributes:
      logits: Logits of the next token, float32 `[B, V]`.
      cache: Cache of all tokens before it.
      seen: Which tokens occur in the prompt or were generated, bool `[B, V]`.
      keys: One random key per sequence.
      lengths: Number of new tokens so far, int32 `[B]`.
      is_done: Which sequences have ended, bool `[B]`.
      is_finite: Which sequences had only finite logits so far, bool `[B]`.
    """

    logits: Float[Array, "B V"]
    cache: Cache
    seen: Bool[Array, "B V"]
    keys: Key[Array, "B"]
    lengths: Int[Array, "B"]
    is_done: Bool[Array, "B"]
    is_finite: Bool[Array, "B"]


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
    """Reads the prompts. Makes a new cache of `capacity` tokens if none is given."""
    batch = tokens.shape[0]
    model_config, is_fresh = settings.model_config, cache is None
    if cache is None:
        dtype = params["embed"]["embedding"].dtype
        cache = init_cache(
            model_config,
            settings.policy,
            batch=batch,
            max_tokens=capacity,
            dtype=dtype,
            sharding=settings.placement,
        )
    cache = dataclasses.replace(cache, density=Density.zeros(model_config.num_layers, batch))
    last = (lengths - 1)[:, None]
    hidden, cache, selection = read_prompt(
        params, tokens, lengths, last, cache, is_fresh=is_fresh, settings=settings
    )
    logits = unembed(params, hidden[:, 0], model_config=model_config)
    logits = constrain_logits(logits, settings.placement)
    state = DecodeState(
        logits=logits,
        cache=cache,
        seen=seen_tokens(tokens, lengths, vocab_size=logits.shape[-1]),
        keys=sequence_keys(key, batch=batch),
        lengths=jnp.zeros((batch,), jnp.int32),
        is_done=jnp.zeros((batch,), bool),
        is_finite=jnp.all(jnp.isfinite(logits), axis=-1),
    )
    return _spread_state(state, settings), selection


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
    """Decodes up to `limit <= num_tokens` more tokens of every sequence that has not ended.

    The returned cache holds every returned token, including the last one.
    """
    batch = state.lengths.shape[0]

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
            is_finite=state.is_finite & (~active | jnp.all(jnp.isfinite(logits), axis=-1)),
        )
        return step + 1, tokens, state

    tokens = jnp.full((batch, num_tokens), pad_token_id, jnp.int32)
    carry = (jnp.zeros((), jnp.int32), tokens, state)
    _, tokens, state = jax.lax.while_loop(is_unfinished, one_token, carry)
    return constrain(tokens, settings.placement), _spread_state(state, settings)


def _spread_state(state: DecodeState, settings: Settings) -> DecodeState:
    """Spreads the state over a mesh; returns it unchanged on one device.

    The logits, the cache and the seen tokens are spread over the ranks. The rest is a few numbers
    per sequence. It is replicated, so that every host can read it.
    """
    placement = settings.placement
    if placement is None:
        return state
    return DecodeState(
        logits=constrain(state.logits, placement, "data"),
        cache=spread_cache(state.cache, placement, settings.policy),
        seen=constrain(state.seen, placement, "data"),
        keys=constrain(state.keys, placement),
        lengths=constrain(state.lengths, placement),
        is_done=constrain(state.is_done, placement),
        is_finite=constrain(state.is_finite, placement),
    )


_start = jax.jit(start_decoding, static_argnames=("capacity", "settings"), donate_argnames="cache")
_continue = jax.jit(
    decode_tokens,
    static_argnames=("num_tokens", "eos_token_ids", "pad_token_id", "settings"),
    donate_argnames="state",
)


@renamed_argument("config", "policy")
def generate(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    model_config: ModelConfig,
    policy: Policy | Auto | None = None,
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
    """Continues every prompt by up to `max_new_tokens` tokens.

    The call runs two compiled programs, one for the prompts and one for decoding. Another
    `max_new_tokens` recompiles neither of them if `new_token_room(max_new_tokens)` stays the same.
    With `max_tokens` or `cache` it never recompiles the first. `stream` shares both programs. The
    function is pure; inside your own `jit` it becomes part of that one program.

    The results for a sequence do not depend on the other sequences in the batch. Compiled programs
    are kept on disk (see `keep_compiled_programs`), so the first call of the next session does not
    compile again.

    Args:
      params: Parameter tree from `load`.
      tokens: Prompts, right-padded.
      model_config: Configuration of the model, from `load`.
      policy: Which key blocks each query attends to, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`. Default:
        `SketchWalkConfig.recommended(plan=model_config.plan)`. An `Auto` chooses between a sparse
        policy and dense attention, by the padded length of the prompts, the number of sequences and
        the contents of the cache.
      max_new_tokens: Maximum number of tokens to generate for a sequence.
      lengths: Number of prompt tokens of each sequence. Default: all `T`.
      sampling: How tokens are drawn. Default: greedy. New values do not recompile.
      key: Random key, either one or one per sequence. Default: `jax.random.key(0)`.
      eos_token_ids: Tokens that end a sequence. Default: those of the model.
      pad_token_id: Token that fills `tokens` after the end of a sequence.
      phase: Where attention is sparse: `"both"`, `"prefill"` or `"decode"`. With `"both"`, a policy
        that selects in one phase only (`policy.phases`) is dense in the other.
      chunk_size: Number of tokens that prefill processes at a time. `None` processes the whole
        prompt at once.
      implementation: What computes attention: `"xla"`, `"mosaic_gpu"` (the kernels for Hopper
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.
      cache: Cache of an earlier call, whose sequences this call continues. It is donated: use the
        returned cache afterwards. The repetition penalty then counts the tokens of this call only.
      max_tokens: Capacity of a new cache in tokens, to leave room for later calls. Default: what
        this call needs, with the new tokens rounded up by `new_token_room`.
      return_selection: Whether to return the blocks that the prompts' query blocks attended to.

    Returns:
      A `Generation`. It has the new tokens only, without the prompts.

    Raises:
      ValueError: If arguments do not fit together, a prompt is longer than the model's context, or
        the cache has no room; if the parameters or the cache are of another model, policy or dtype;
        if a token id is outside the vocabulary. Under `jit`, token ids are unknown and are clamped
        instead.

    Example:
      >>> out = generate(params, tokens, model_config=model_config,
      ...                max_new_tokens=32)  # doctest: +SKIP
    """
    keep_by_default()
    call = check_call(
        tokens,
        params=params,
        model_config=model_config,
        policy=policy,
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
    limit = jnp.asarray(call.max_new_tokens, jnp.int32)
    with memory_of(params, call):
        state, selection = _start(params, *call.prompt, **call.reading)
        new, state = _continue(params, state, call.sampling, limit, **call.decoding)
    return Generation(
        new[:, : call.max_new_tokens],
        state.lengths,
        state.cache.density,
        state.cache,
        first_rows(selection, call.num_rows),
        state.is_finite,
        call.choice,
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of one generation, for the programs of `generate` and `stream`."""

    prompt: tuple[Any, ...]  # tokens, lengths, key, cache
    sampling: Sampling
    max_new_tokens: int
    reading: dict[str, Any]  # what is static about `_start`
    decoding: dict[str, Any]  # what is static about `_continue`
    num_rows: int | None  # blocks of the longest prompt, where that is known
    choice: Choice | None  # what an `Auto` chose


NOT_LOADED = object()
"""In the place of parameters: a call is checked before they are loaded."""


def check_call(
    tokens: Any,
    *,
    params: PyTree,
    model_config: ModelConfig,
    policy: Policy | Auto | None = None,
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
    """Checks the arguments of `generate` and fills in the defaults.

    If `params` is `NOT_LOADED`, everything except the parameters is checked, as for one device.
    """
    check_model_config(model_config)
    is_loaded = params is not NOT_LOADED
    placement = placement_of(params, model_config) if is_loaded else None
    policy = recommended_policy(model_config) if policy is None else policy
    settings = Settings(
        model_config=model_config,
        policy=policy.policy(model_config) if isinstance(policy, Auto) else policy,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
        placement=placement,
        on_one_device=is_loaded and lies_on_one_device(params),
    )
    lengths = check_prompt(tokens, lengths, model_config)
    check_integer("max_new_tokens", max_new_tokens)
    choice = None
    if isinstance(policy, Auto):
        if cache is not None:
            check_unused(cache)
        choice = policy.choose(
            model_config,
            batch=tokens.shape[0],
            tokens=tokens_used(cache) + tokens.shape[1],
            max_new_tokens=max_new_tokens,
            phase=phase,
            is_spread=placement is not None,
            cache=cache,
        )
        settings = dataclasses.replace(settings, policy=choice.policy, phase=choice.phase)
    if placement is not None:
        placement.check_batch(tokens.shape[0])
    if not isinstance(pad_token_id, int):
        raise ValueError(f"pad_token_id must be an integer, got {pad_token_id!r}")
    capacity = _check_room(tokens, lengths, cache, max_new_tokens, max_tokens, settings)
    num_rows = prompt_rows(tokens, lengths, cache, settings.policy.block_size)
    if key is not None and sampling is None:
        raise ValueError(
            "key must be None without sampling, which is greedy and draws nothing, got a key; pass "
            "sampling=Sampling(...) as well"
        )
    sampling = Sampling.greedy() if sampling is None else sampling
    key = jax.random.key(0) if key is None else key
    eos = _end_tokens(eos_token_ids, model_config)
    if is_loaded:
        check_model(params, cache, model_config)
    return Call(
        prompt=(tokens, lengths, key, cache),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        reading={"capacity": capacity, "settings": settings},
        decoding={
            "num_tokens": new_token_room(max_new_tokens),
            "eos_token_ids": eos,
            "pad_token_id": pad_token_id,
            # What only concerns prompts makes no other program.
            "settings": dataclasses.replace(settings, chunk_size=None, return_selection=False),
        },
        num_rows=num_rows,
        choice=choice,
    )


def memory_of(params: PyTree, call: Call) -> contextlib.AbstractContextManager[None]:
    """Checks that a new cache fits into the device's memory, and explains a failure to allocate.

    Raises:
      OutOfDeviceMemory: If the cache is known not to fit.
    """
    tokens, _, _, cache = call.prompt
    settings, capacity = call.reading["settings"], call.reading["capacity"]
    embedding = params["embed"]["embedding"]
    size = cache_bytes(
        settings.model_config,
        settings.policy,
        tokens.shape[0],
        capacity,
        embedding.dtype.name,
        settings.placement,
    )
    if cache is None:
        what = f"the cache of {tokens.shape[0]} sequences of {capacity} tokens"
        check_memory(what, size, embedding)
    return advice(params=params, cache=size)


def _end_tokens(given: Any, model_config: ModelConfig) -> tuple[int, ...]:
    """The end tokens of a call. Those of the model are not checked."""
    if given is None:
        return model_config.eos_token_ids
    if not isinstance(given, tuple | list):
        raise ValueError(f"eos_token_ids must be a tuple of token ids, got {given!r}")
    for one in given:
        if not isinstance(one, int | np.integer) or not 0 <= one < model_config.vocab_size:
            raise ValueError(
                f"eos_token_ids must be ids of the model's vocabulary, from 0 to "
                f"{model_config.vocab_size - 1}, got {one!r}"
            )
    return tuple(map(int, given))


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
    if cache is not None:
        check_cache(
            cache, tokens.shape[0], settings.model_config, settings.policy, settings.placement
        )
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
        if max_tokens is not None:
            raise ValueError("max_tokens must be None when a cache is given: its size is fixed")
        if needed > cache.capacity:
            raise ValueError(
                f"the cache must have room for prompt and new tokens, got {needed} tokens for a "
                f"capacity of {cache.capacity}; make the first call with a larger max_tokens"
            )
        return cache.capacity
    check_integer("max_tokens", max_tokens, is_optional=True)
    if max_tokens is not None and max_tokens < needed:
        raise ValueError(f"max_tokens must be at least {needed} for this call, got {max_tokens!r}")
    if max_tokens is not None:
        return max(max_tokens, width)
    return min(width + new_token_room(max_new_tokens), context)


# Few sizes: of the room for new tokens, and of prompts.


def new_token_room(max_new_tokens: int) -> int:
    """The room for new tokens: `max_new_tokens` rounded up to 256, 512, 1024, and so on.

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
    """The length to which a prompt is padded, so that few lengths are compiled.

    With `n = ceil(num_tokens / multiple)` and `2^k < n ≤ 2^(k+1)`, the bucket is `n` rounded up to
    a multiple of `max(1, 2^k / 8)`, times `multiple`. There are eight buckets between a length and
    its double, and the padding is less than an eighth of the prompt plus `multiple` tokens. A
    length that is a bucket already stays as it is.

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


@renamed_field("config", "policy")
class Generate:
    """The callable that `make_generate` returns."""

    def __init__(
        self, model_config: ModelConfig, policy: Policy | Auto | None, **static: Any
    ) -> None:
        """Keeps the static options; see `make_generate`."""
        policy = recommended_policy(model_config) if policy is None else policy
        check_model_config(model_config)
        if not isinstance(policy, Auto):
            check_policy(policy)
        self.model_config, self.policy, self.static = model_config, policy, static

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
        """Continues the prompts, as `generate` does.

        Args:
          params: Parameter tree from `load`.
          tokens: Prompts, right-padded, or padded on either side if `attention_mask` is given.
          lengths: Number of prompt tokens of each sequence. Default: all `T`.
          attention_mask: 1 at real tokens, as tokenizers return it; replaces `lengths`.
          sampling: How tokens are drawn. Default: greedy.
          key: Random key, either one or one per sequence.
          cache: Cache of an earlier call, whose sequences this call continues; donated.

        Returns:
          A `Generation`.

        Raises:
          ValueError: As `generate`.
        """
        if attention_mask is not None:
            if lengths is not None:
                raise ValueError("lengths must be None when attention_mask is given, got both")
            tokens, lengths = left_to_right_padding(tokens, attention_mask)
        # Here too, since what is wrong is said of what was given and not of its padding.
        lengths = check_prompt(tokens, lengths, self.model_config)
        tokens, lengths = pad_to_bucket(tokens, lengths, self.model_config, self.policy)
        return generate(
            params,
            tokens,
            model_config=self.model_config,
            policy=self.policy,
            lengths=lengths,
            sampling=sampling,
            key=key,
            cache=cache,
            **self.static,
        )


def pad_to_bucket(
    tokens: Any, lengths: Any, model_config: ModelConfig, policy: Policy | Auto
) -> tuple[Array | np.ndarray, Any]:
    """Pads prompts on the right to the next bucket, but not beyond the model's context."""
    batch, width = np.shape(tokens)
    if lengths is None:
        lengths = np.full((batch,), width, np.int32)
    bucket = bucket_length(width, multiple=policy.block_size)
    bucket = max(width, min(bucket, model_config.context_length))
    padding = ((0, 0), (0, bucket - width))
    if isinstance(tokens, np.ndarray):  # ids are looked at on the host
        return np.pad(tokens, padding), lengths
    return jnp.pad(jnp.asarray(tokens), padding), lengths


@renamed_argument("config", "policy")
def make_generate(
    model_config: ModelConfig,
    policy: Policy | Auto | None = None,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...] | None = None,
    pad_token_id: int = 0,
    phase: str = "both",
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    max_tokens: int | None = None,
    return_selection: bool = False,
) -> Generate:
    """Returns the jitted `generate(params, tokens)` for one model and policy.

    Prompts are padded to a few lengths (`bucket_length`), so a prompt of another length seldom
    recompiles. Another `max_new_tokens` shares programs as `generate` describes. Changing the
    policy recompiles. Changing the density recompiles too, because it changes array shapes: the
    lists of blocks have as many columns as a row may keep. Compiled programs are kept on disk, so a
    sweep over densities compiles each program only once.

    Args:
      model_config: Configuration of the model, from `load`.
      policy: Which key blocks each query attends to, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`; or an `Auto`. Default:
        `SketchWalkConfig.recommended(plan=model_config.plan)`.
      max_new_tokens: Maximum number of tokens to generate for a sequence.
      eos_token_ids: Tokens that end a sequence. Default: those of the model.
      pad_token_id: Token that fills `tokens` after the end of a sequence.
      phase: Where attention is sparse: `"both"`, `"prefill"` or `"decode"`.
      chunk_size: Number of tokens that prefill processes at a time. `None` processes the whole
        prompt at once.
      implementation: What computes attention: `"xla"`, `"mosaic_gpu"` (the kernels for Hopper
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.
      max_tokens: Capacity of a new cache in tokens, to leave room for later calls.
      return_selection: Whether to return the blocks that the prompts' query blocks attended to.

    Returns:
      A callable `generate(params, tokens, *, lengths=None, attention_mask=None, sampling=None,
      key=None, cache=None)`.

    Example:
      >>> generate = make_generate(cfg, max_new_tokens=32)  # doctest: +SKIP
      >>> generate(params, tokens).tokens  # doctest: +SKIP
    """
    return Generate(
        model_config,
        policy,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        max_tokens=max_tokens,
        return_selection=return_selection,
    )


# Tokens as they come.


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """A few new tokens of every sequence.

    Attributes:
      tokens: The new tokens, int32 `[B, n]` on the host. The first chunk of a stream has no tokens;
        it marks the end of prefill.
      lengths: How many of these tokens belong to each sequence, int32 `[B]` on the host.
      is_done: Which sequences have ended, bool `[B]` on the host.
      measured_density: (query, key) pairs attended to so far, and all causal pairs.
      selection: The blocks that the prompts' query blocks attended to; in the first chunk only, and
        only if `return_selection` was set.
      is_finite: Whether all logits of a sequence were finite so far, bool `[B]` on the host.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_done: np.ndarray
    measured_density: Density
    selection: BlockSelection | None
    is_finite: np.ndarray


class Stream(Iterator[StreamChunk]):
    """Iterator over `StreamChunk`s, made by `stream`."""

    def __init__(self, call: Call, params: PyTree, *, every: int) -> None:
        """Keeps the checked call. Nothing runs before the first `next`."""
        self._call, self._params, self._every = call, params, every
        self._state: DecodeState | None = None
        self._lengths = np.zeros(len(call.prompt[0]), np.int32)
        self._left, self._is_done = call.max_new_tokens, False

    @property
    def choice(self) -> Choice | None:
        """What an `Auto` chose, or `None` if the call got a policy."""
        return self._call.choice

    @property
    def cache(self) -> Cache:
        """The cache after the last chunk, to continue from. The next chunk consumes it."""
        if self._state is None:
            raise ValueError("the stream must have been started before its cache is read")
        return self._state.cache

    def __next__(self) -> StreamChunk:
        """Computes the next chunk."""
        call, params = self._call, self._params
        if self._state is None:
            with memory_of(params, call):
                self._state, selection = _start(params, *call.prompt, **call.reading)
            no_tokens = np.zeros((len(self._lengths), 0), np.int32)
            return self._chunk(no_tokens, 0, first_rows(selection, call.num_rows))
        if not self._left or self._is_done:
            raise StopIteration
        # The first token alone, as soon as there is one.
        is_first = self._left == call.max_new_tokens
        count = min(1 if is_first else self._every, self._left)
        limit = jnp.asarray(count, jnp.int32)
        with advice(params=params, cache=self._state.cache):
            tokens, self._state = _continue(
                params, self._state, call.sampling, limit, **call.decoding
            )
        self._left -= count
        return self._chunk(tokens, count, None)

    def _chunk(self, tokens: Any, count: int, selection: BlockSelection | None) -> StreamChunk:
        assert self._state is not None
        state, before = self._state, self._lengths
        # Copies, all at once: the next step consumes the state, its counts included.
        tokens, density, self._lengths, is_done, is_finite = jax.tree.map(
            np.array,
            jax.device_get(
                (tokens, state.cache.density, state.lengths, state.is_done, state.is_finite)
            ),
        )
        self._is_done = bool(is_done.all())
        new = self._lengths - before
        return StreamChunk(tokens[:, :count], new, is_done, density, selection, is_finite)


@renamed_argument("config", "policy")
def stream(
    params: PyTree, tokens: Int[Array | np.ndarray, "B T"], *, every: int = 8, **options: Any
) -> Stream:
    """Continues every prompt and returns the tokens while they are generated.

    The tokens are those of `generate`. The first chunk has no tokens and marks the end of prefill.
    The second has one token, and each chunk after it has `every`.

    Args:
      params: Parameter tree from `load`.
      tokens: Prompts, right-padded.
      every: Number of decode steps between two chunks.
      **options: The other arguments of `generate`.

    Returns:
      An iterator over `StreamChunk`s. Its `cache` continues the sequences afterwards.

    Raises:
      ValueError: As `generate`. It is raised by this call, before the first chunk.

    Example:
      >>> for chunk in stream(params, tokens, model_config=model_config,
      ...                     max_new_tokens=64):  # doctest: +SKIP
      ...     print(chunk.tokens)
    """
    keep_by_default()
    check_integer("every", every)
    call = check_call(tokens, params=params, **options)
    return Stream(call, params, every=every)
