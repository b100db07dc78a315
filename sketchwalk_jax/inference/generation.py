"""Text generation: `generate` for one call, `make_generate` for many, `stream` for pieces.

A call to `generate` runs two compiled programs. The first reads the prompts (prefill) and returns a
`DecodeState`. The second decodes in a `while_loop`. `stream` runs the same two programs. Greedy
decoding has a program of its own; on GPUs with kernels `stream` does not use it.

Few programs serve all calls. A prompt's program is for a class of lengths (`length_class`), and
computes little more than a shorter prompt needs. Budgets, such as those that a density sets, and
the number of tokens to decode are arguments, and buffers for new tokens have one of a few sizes.
Both programs are compiled side by side and kept on disk whole (`compiled.Program`). Under the
caller's `jit`, on several devices, and to return a selection, programs are for the shapes and
budgets of one call.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sketchwalk_jax.attention.xla import vary_alike
from sketchwalk_jax.inference.auto import Auto, Choice, check_policy_or_auto, default_policy
from sketchwalk_jax.inference.cache import (
    Cache,
    Density,
    show_numbers,
    spread_cache,
)
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.calls import (
    cache_bytes,
    check_cache,
    check_model,
    check_prompt,
    check_unused,
    first_rows,
    prompt_rows,
    tokens_used,
)
from sketchwalk_jax.inference.compiled import Program, keep_by_default
from sketchwalk_jax.inference.padding import (
    bucket_length,
    class_sixteenths,
    left_to_right_padding,
    length_class,
    new_token_room,
    pad_to,
    pad_to_bucket,
)
from sketchwalk_jax.inference.sampling import (
    Sampling,
    best_tokens,
    check_key,
    mark_seen,
    sample,
    seen_tokens,
    sequence_keys,
)
from sketchwalk_jax.inference.steps import decode_token, new_cache, read_prompt
from sketchwalk_jax.memory import advice, check_memory, free_bytes, num_bytes
from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy, is_own
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.pytree import register
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import (
    constrain,
    constrain_logits,
    lies_on_one_device,
    placement_of,
)
from sketchwalk_jax.validation import check_integer, is_known

PyTree = Any

# With kernels, greedy decoding asks the host whether to go on only every 4 steps. With more steps,
# more are wasted after the last sequence has ended. Elsewhere a wasted step costs more than asking.
_STEPS_ON_GPUS = 4


@register
@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
      tokens: The new tokens, int32 `[B, max_new_tokens]`. The pad token fills the columns after the
        end of a sequence.
      lengths: Number of new tokens of each sequence, including its end-of-sequence token, int32
        `[B]`.
      measured_density: Counts of the (query, key) pairs that this call attended to, and of all
        causal pairs, by phase and layer.
      cache: Cache that holds the prompts and the new tokens. Pass it to the next call to continue.
      selection: The blocks or pages, of `selection.block_size` keys, that the prompts' query blocks
        (rows) attended to, or `None` unless `return_selection` was set. Its arrays have a leading
        axis of sparse layers. The rows are the blocks of the longest prompt; rows beyond the end of
        a shorter prompt are empty.
      is_finite: Whether all logits of a sequence were finite, bool `[B]`. If they were not, its
        tokens are meaningless.
      choice: The choice of an `Auto`, or `None` if another policy was given.
    """

    tokens: Int[Array, "B U"]
    lengths: Int[Array, "B"]
    measured_density: Density
    cache: Cache
    selection: BlockSelection | None
    is_finite: Bool[Array, "B"]
    choice: Choice | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        """Describes sizes and outcome in one line, without the tokens."""
        try:
            parts = {name: show_numbers(getattr(self, name)) for name in ("lengths", "is_finite")}
            parts["measured_density"] = show_numbers(self.measured_density.overall)
            tokens = f"{self.tokens.dtype}{list(self.tokens.shape)}"
        except (AttributeError, TypeError, ValueError):  # JAX may put other leaves in
            return "Generation(...)"
        more = ", ".join(f"{name}={value}" for name, value in parts.items())
        return f"Generation(tokens={tokens}, {more}, cache={self.cache!r})"


@register
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state between two decode steps.

    Attributes:
      logits: Logits of the next token, float32 `[B, V]`.
      cache: Cache of all tokens before it.
      seen: Whether each token id occurs in the prompt or was generated, bool `[B, V]`.
      keys: One random key per sequence.
      lengths: Number of new tokens so far, int32 `[B]`.
      is_done: Whether each sequence has ended, bool `[B]`.
      is_finite: Whether all logits of each sequence were finite so far, bool `[B]`.
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
    numbers: PyTree = None,
    *,
    capacity: int,
    settings: Settings,
) -> tuple[DecodeState, BlockSelection | None]:
    """Reads the prompts. Makes a new cache of `capacity` tokens if none is given.

    `numbers` are those of the policy, if they are not in the settings (`Policy.for_program`).
    """
    batch, settings = tokens.shape[0], settings.with_numbers(numbers)
    model_config, is_fresh = settings.model_config, cache is None
    if cache is None:
        cache = new_cache(params, batch, capacity, settings)
    cache = dataclasses.replace(cache, density=Density.zeros(model_config.num_layers, batch))
    last = (lengths - 1)[:, None]
    hidden, cache, selection = read_prompt(
        params, tokens, lengths, last, cache, is_fresh=is_fresh, settings=settings
    )
    logits = unembed(params, hidden[:, 0], model_config=model_config)
    logits = constrain_logits(logits, settings.placement)
    state = _first_state(logits, cache, tokens, lengths, key)
    return _spread_state(state, settings), selection


def _first_state(
    logits: Float[Array, "B V"],
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    key: Key[Array, "..."],
) -> DecodeState:
    """Makes the state after the prompts."""
    batch = tokens.shape[0]
    return DecodeState(
        logits=logits,
        cache=cache,
        seen=seen_tokens(tokens, lengths, vocab_size=logits.shape[-1]),
        keys=sequence_keys(key, batch=batch),
        lengths=jnp.zeros((batch,), jnp.int32),
        is_done=jnp.zeros((batch,), bool),
        is_finite=jnp.all(jnp.isfinite(logits), axis=-1),
    )


def greedy_steps(sampling: Sampling) -> int:
    """Returns the `greedy_steps` of `decode_tokens` for `generate` on the device in use."""
    if not sampling.is_greedy:
        return 0
    return 1 if dispatch.kernels_here() is None else _STEPS_ON_GPUS


def decode_tokens(
    params: PyTree,
    state: DecodeState,
    sampling: Sampling,
    limit: Int[Array, ""],
    numbers: PyTree = None,
    *,
    num_tokens: int,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    settings: Settings,
    greedy_steps: int = 0,
) -> tuple[Int[Array, "B U"], DecodeState]:
    """Decodes up to `limit <= num_tokens` more tokens of every sequence that has not ended.

    The returned cache holds every returned token, including the last one.

    `greedy_steps` is 0, or makes the program for greedy sequences only. That has less to compile,
    and asks whether to go on after so many tokens: whenever a program branches, a GPU is idle until
    the host has read the condition and launched new work. The steps after the last token change
    nothing.

    `state` is the state after the prompt, or after another call. The result has `num_tokens`
    columns. `numbers` are as in `start_decoding`.
    """
    settings = settings.with_numbers(numbers)
    batch = state.lengths.shape[0]

    def is_unfinished(carry: tuple[Array, Array, DecodeState]) -> Bool[Array, ""]:
        step, _, state = carry
        return (step < limit) & ~jnp.all(state.is_done)

    def one_token(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
        step, tokens, state = carry
        active = ~state.is_done
        if greedy_steps:
            token = best_tokens(state.logits, sampling, state.seen)
            active &= step < limit
        else:
            keys = jax.vmap(jax.random.fold_in)(state.keys, state.lengths)
            token = sample(state.logits, sampling, state.seen, keys)
        token = jnp.where(active, token, pad_token_id)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
        logits, cache, _ = decode_token(
            params, token, state.cache, active=active, settings=settings
        )
        if greedy_steps:  # another call may continue with these logits
            logits = jnp.where(active[:, None], logits, state.logits)
        eos = jnp.asarray(eos_token_ids, jnp.int32)
        is_end = active & jnp.any(token[:, None] == eos[None, :], axis=1)
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

    def some_tokens(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
        return jax.lax.fori_loop(0, greedy_steps, lambda _, carry: one_token(carry), carry)

    room = num_tokens + max(0, greedy_steps - 1)
    tokens = jnp.full((batch, room), pad_token_id, jnp.int32)
    tokens, state = vary_alike(tokens, state, like=(params, sampling))
    carry = (jnp.zeros((), jnp.int32), tokens, state)
    body = some_tokens if greedy_steps > 1 else one_token
    _, tokens, state = jax.lax.while_loop(is_unfinished, body, carry)
    tokens = constrain(tokens[:, :num_tokens], settings.placement)
    return tokens, _spread_state(state, settings)


def _spread_state(state: DecodeState, settings: Settings) -> DecodeState:
    """Spreads the state over a mesh; returns it unchanged on one device.

    The logits, the cache and the seen tokens are spread over the ranks. The other fields, a few
    numbers per sequence, are replicated, so that every host can read them.
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


_start = Program(
    start_decoding,
    does="reads prompts",
    static=("capacity", "settings"),
    donated="cache",
)
_continue = Program(
    decode_tokens,
    does="decodes tokens",
    static=("num_tokens", "eos_token_ids", "pad_token_id", "settings", "greedy_steps"),
    donated="state",
)


@functools.lru_cache(maxsize=64)
def _for_program(policy: Policy, num_layers: int, num_blocks: int) -> tuple[Policy, PyTree]:
    """Calls `Policy.for_program` once for equal arguments.

    The code of a policy of one's own may read the fields that it would replace.
    """
    return policy.for_program(num_layers, num_blocks) if is_own(policy) else (policy, None)


# The checked arguments of a call: static options, and a prompt.

NOT_LOADED = object()
"""Stands in place of parameters to check a call before they are loaded."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of a generation; `generate` explains them.

    Attributes:
      settings: Settings to compile for, without the ones that depend on parameters. If the policy
        is an `Auto`, they have its sparse policy.

    Raises:
      ValueError: If an option is unknown, or two contradict each other.
    """

    model_config: ModelConfig
    policy: Policy | Auto | None = None
    _: dataclasses.KW_ONLY
    max_new_tokens: int
    eos_token_ids: tuple[int, ...] | None = None
    pad_token_id: int = 0
    phase: str = "both"
    chunk_size: int | None = None
    implementation: str | None = None
    kernel_config: KernelConfig | None = None
    max_tokens: int | None = None
    return_selection: bool = False
    settings: Settings = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks every option and fills in the defaults."""
        check_model_config(self.model_config)
        policy = default_policy(self.model_config) if self.policy is None else self.policy
        check_policy_or_auto(policy)
        settings = Settings(
            model_config=self.model_config,
            policy=policy.policy(self.model_config) if isinstance(policy, Auto) else policy,
            phase=self.phase,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
            kernel_config=self.kernel_config,
            return_selection=self.return_selection,
            on_one_device=False,
        )
        check_integer("max_new_tokens", self.max_new_tokens)
        if not isinstance(self.pad_token_id, int):
            raise ValueError(f"pad_token_id must be an integer, got {self.pad_token_id!r}")
        check_integer("max_tokens", self.max_tokens, is_optional=True)
        ends = _end_tokens(self.eos_token_ids, self.model_config)
        found = {"policy": policy, "eos_token_ids": ends, "settings": settings}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def check(
        self,
        params: PyTree,
        tokens: Any,
        *,
        lengths: Any = None,
        sampling: Sampling | None = None,
        key: Any = None,
        cache: Cache | None = None,
        to_bucket: bool = False,
    ) -> "Call":
        """Checks the other arguments of `generate`, which explains them, and fills in the defaults.

        If `params` is `NOT_LOADED`, all but the parameters is checked, as on one device. Shapes of
        parameters also stand for one device. If `to_bucket` is true, prompts are padded to one of a
        few lengths.
        """
        model_config, is_loaded = self.model_config, params is not NOT_LOADED
        placement = placement_of(params, model_config) if is_loaded else None
        settings = dataclasses.replace(
            self.settings,
            placement=placement,
            on_one_device=is_loaded and (_are_shapes(params) or lies_on_one_device(params)),
        )
        lengths = check_prompt(tokens, lengths, model_config)
        if to_bucket:
            size, context = settings.policy.block_size, model_config.context_length
            tokens = pad_to_bucket(tokens, multiple=size, context_length=context)
        choice = None
        if isinstance(self.policy, Auto):
            if cache is not None:
                check_unused(cache)
            choice = self.policy.choose(
                model_config,
                batch=tokens.shape[0],
                tokens=max(tokens_used(cache) + tokens.shape[1], self._room_for_turns),
                max_new_tokens=self.max_new_tokens,
                phase=self.phase,
                is_spread=placement is not None,
                cache=cache,
            )
            settings = dataclasses.replace(settings, policy=choice.policy, phase=choice.phase)
        if placement is not None:
            placement.check_batch(tokens.shape[0])
        capacity = self._capacity(tokens, lengths, cache, settings)
        check_key(key, sampling)
        if is_loaded:
            check_model(params, cache, model_config)
        sampling = Sampling.greedy() if sampling is None else sampling
        call = Call(
            prompt=(tokens, lengths, _default_key() if key is None else key, cache),
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
            reading={"capacity": capacity, "settings": settings},
            decoding={
                "num_tokens": new_token_room(self.max_new_tokens),
                "eos_token_ids": self.eos_token_ids,
                "pad_token_id": self.pad_token_id,
                # Drop prefill-only options, or decode would be recompiled.
                "settings": dataclasses.replace(settings, chunk_size=None, return_selection=False),
                "greedy_steps": greedy_steps(sampling) if is_loaded else 0,
            },
            num_rows=prompt_rows(tokens, lengths, cache, settings.policy.block_size),
            choice=choice,
        )
        return dataclasses.replace(call, shared=self._share(call, params)) if is_loaded else call

    @property
    def _room_for_turns(self) -> int:
        """Room of the cache for this and later prompts, or 0 if later turns get no room."""
        return 0 if self.max_tokens is None else self.max_tokens - self.max_new_tokens

    def _share(self, call: "Call", params: PyTree) -> "Call | None":
        """Returns the call for programs that do not know the prompts' lengths and the budgets.

        Prompts are padded to their class, whose empty rows cost little. A new cache has room for
        the class, unless that takes more than half of the memory that is free. Calls under the
        caller's `jit`, on several devices, or with a selection to return have programs of their own
        (`None`).
        """
        (tokens, lengths, key, cache), settings = call.prompt, call.reading["settings"]
        is_alone = settings.placement is None and settings.on_one_device
        arrays = jax.tree.leaves((params, call.prompt, call.sampling))
        is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
        if not is_alone or is_traced or settings.return_selection:
            return None
        policy, model_config = settings.policy, self.model_config
        size, context = policy.block_size, model_config.context_length
        kinds = RecommendedConfig | SketchWalkConfig | Dense
        has_kernels = dispatch.kernels_here() is not None and isinstance(policy, kinds)
        growth, capacity = 4 if has_kernels else 2, call.reading["capacity"]
        tokens = np.asarray(tokens, np.int32)[:, : int(np.asarray(lengths).max())]
        width = tokens.shape[1]
        # In a cache that ends inside a block, the tokens are moved by up to a block.
        moved = 0 if cache is None else size - 1
        wanted = min(length_class(width + moved, growth=growth), max(context, width + moved))
        if cache is None and self.max_tokens is None:
            embedding, room = params["embed"]["embedding"], new_token_room(self.max_new_tokens)
            free = free_bytes(embedding)
            if _are_shapes(params):  # they will take memory, too
                free = free_bytes(jax.local_devices()[0])
                free = None if free is None else free - num_bytes(params)
            most = min(wanted + room, max(context, wanted))
            needed = cache_bytes(model_config, policy, len(tokens), most, embedding.dtype.name)
            if free is not None and 2 * needed > free:
                wanted = max(width, min(bucket_length(width, multiple=size), context))
            capacity = min(wanted + room, max(context, wanted))
        elif cache is None:
            wanted = max(min(wanted, capacity), width)
        sixteenths = class_sixteenths(wanted, growth=growth)
        if model_config.num_experts:  # each width compiles the experts anew
            sixteenths = sixteenths[::-2][::-1]
        policy, numbers = _for_program(policy, model_config.num_layers, -(-capacity // size))
        settings = dataclasses.replace(
            settings,
            model_config=dataclasses.replace(model_config, plan=None),
            policy=policy,
            sixteenths=sixteenths,
        )
        after = dataclasses.replace(settings, chunk_size=None, sixteenths=())
        return dataclasses.replace(
            call,
            prompt=(pad_to(tokens, wanted - moved), np.asarray(lengths, np.int32), key, cache),
            reading={"capacity": capacity, "settings": settings},
            decoding=call.decoding | {"settings": after},
            numbers=numbers,
        )

    def _capacity(self, tokens: Any, lengths: Any, cache: Cache | None, settings: Settings) -> int:
        """Checks that prompts and new tokens fit; returns the capacity of the cache, old or new."""
        batch, width = tokens.shape
        longest = int(np.asarray(lengths).max()) if is_known(lengths) else width
        context = self.model_config.context_length
        if cache is not None:
            check_cache(cache, batch, self.model_config, settings.policy, settings.placement)
        used = tokens_used(cache)
        needed = used + longest + self.max_new_tokens
        if needed > context:
            raise ValueError(
                f"prompt and new tokens must fit into the model's context of {context} tokens, got "
                f"{used + longest} and {self.max_new_tokens}; shorten the prompt or lower "
                f"max_new_tokens"
            )
        if width > context:
            raise ValueError(
                f"tokens must have at most as many columns as the model's context, {context}, "
                f"got {width}"
            )
        if cache is not None:
            if self.max_tokens is not None:
                raise ValueError("max_tokens must be None when a cache is given: its size is fixed")
            if needed > cache.capacity:
                raise ValueError(
                    f"the cache must have room for prompt and new tokens, got {needed} tokens for "
                    f"a capacity of {cache.capacity}; make the first call with a larger max_tokens"
                )
            return cache.capacity
        if self.max_tokens is None:
            return min(width + new_token_room(self.max_new_tokens), context)
        if self.max_tokens < needed:
            raise ValueError(
                f"max_tokens must be at least {needed} for this call, got {self.max_tokens}"
            )
        return max(self.max_tokens, width)


def _default_key() -> Any:
    """Returns `jax.random.key(0)`; for the usual generator without compiling a program."""
    if jax.config.jax_default_prng_impl != "threefry2x32" or jax.config.jax_random_seed_offset:
        return jax.random.key(0)
    return jax.random.wrap_key_data(jax.device_put(np.zeros(2, np.uint32)))


def _are_shapes(params: PyTree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def _end_tokens(given: Any, model_config: ModelConfig) -> tuple[int, ...]:
    """Checks a call's end tokens and returns them, or the model's if none are given."""
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


@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of one generation, for the programs of `generate` and `stream`."""

    prompt: tuple[Any, ...]  # tokens, lengths, key, cache
    sampling: Sampling
    max_new_tokens: int
    reading: dict[str, Any]  # static arguments of `_start`
    decoding: dict[str, Any]  # static arguments of `_continue`
    num_rows: int | None  # number of blocks of the longest prompt, if known
    choice: Choice | None  # the choice of an `Auto`
    numbers: PyTree = None  # of the policy, if they are not in the settings
    shared: "Call | None" = None  # the same for programs that know neither lengths nor budgets

    @property
    def own(self) -> "Call":
        """The call whose programs run."""
        return self.shared or self

    def begin(self, params: PyTree, *, is_ahead: bool = False) -> list[Any]:
        """Begins to compile the programs for the prompt and for the tokens, side by side.

        Args:
          params: The parameters, or their shapes.
          is_ahead: Whether the call comes later. Otherwise, if the prompt's program exists, reading
            the prompt comes first.

        Returns:
          The programs that are being compiled, as `Future`s.
        """
        own = self.shared
        if own is None:
            return []
        tokens, lengths, key, cache = own.prompt
        settings, capacity = own.reading["settings"], own.reading["capacity"]
        reading = _start.compile(params, *own.prompt, own.numbers, **own.reading)
        if reading is None or (reading.done() and not is_ahead):
            return []

        def after_prompt(params: PyTree, cache: Cache | None) -> DecodeState:
            batch, vocab_size = tokens.shape[0], settings.model_config.vocab_size
            if cache is None:
                cache = new_cache(params, batch, capacity, settings)
            logits = jnp.zeros((batch, vocab_size), jnp.float32)
            return _first_state(logits, cache, jnp.asarray(tokens), jnp.asarray(lengths), key)

        state = jax.eval_shape(after_prompt, params, cache)
        limit = np.asarray(self.max_new_tokens, np.int32)
        rest = self.sampling, limit, own.numbers
        return [reading, _continue.compile(params, state, *rest, **own.decoding)]

    def read(self, params: PyTree) -> tuple[DecodeState, BlockSelection | None]:
        """Reads the prompts."""
        with self.memory(params):
            programs = self.begin(params)
            for one in programs if self.prompt[-1] is not None else ():
                one.result()  # the call consumes the cache: both programs must compile
            return _start(params, *self.own.prompt, self.own.numbers, **self.own.reading)

    def decode(
        self, params: PyTree, state: DecodeState, limit: int
    ) -> tuple[Int[Array, "B U"], DecodeState]:
        """Decodes up to `limit` tokens."""
        most, own = np.asarray(limit, np.int32), self.own
        with advice(params=params, cache=state.cache):
            return _continue(params, state, self.sampling, most, own.numbers, **own.decoding)

    def memory(self, params: PyTree) -> contextlib.AbstractContextManager[None]:
        """Checks that a new cache fits into the device's memory; explains a failure to allocate.

        Raises:
          OutOfDeviceMemory: If the cache is known not to fit.
        """
        tokens, _, _, cache = self.own.prompt
        settings, capacity = self.own.reading["settings"], self.own.reading["capacity"]
        embedding = params["embed"]["embedding"]
        size = cache_bytes(
            settings.model_config,
            settings.policy,
            tokens.shape[0],
            min(capacity, settings.model_config.context_length),
            embedding.dtype.name,
            settings.placement,
        )
        if cache is None:
            what = f"the cache of {tokens.shape[0]} sequences of {capacity} tokens"
            check_memory(what, size, embedding)
        return advice(params=params, cache=size)

    def run(self, params: PyTree) -> Generation:
        """Runs both programs."""
        state, selection = self.read(params)
        new, state = self.decode(params, state, self.max_new_tokens)
        if self.shared is None:
            new = new[:, : self.max_new_tokens]
        else:  # on the host, as slicing an array compiles a program for each size
            new = jax.device_put(np.asarray(new)[:, : self.max_new_tokens], new.sharding)
        return Generation(
            new,
            state.lengths,
            state.cache.density,
            state.cache,
            first_rows(selection, self.num_rows),
            state.is_finite,
            self.choice,
        )


# Generation of all tokens in one call.


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

    The call runs two compiled programs, one for the prompts and one for decoding. On one device,
    other prompts of the same class of lengths run the same programs, and so do other densities,
    budgets and plans. With GPU kernels, classes end at 4,096, 16,384, 65,536, … tokens, otherwise
    at 256, 512, 1,024, … tokens. Another `max_new_tokens` does so if
    `new_token_room(max_new_tokens)` stays the same. Greedy decoding has a program of its own.
    `stream` shares all programs, except that on GPUs with kernels it does not use that for greedy
    decoding. The function is pure; inside your own `jit` it becomes part of that program.

    The results for a sequence do not depend on the other sequences in the batch. Programs are kept
    on disk (see `keep_compiled_programs`), so the first call of the next session neither traces nor
    compiles.

    Args:
      params: Parameter tree from `load`.
      tokens: Prompts, right-padded.
      model_config: Configuration of the model, from `load`.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`. Default: an `Auto` of
        `SketchWalkConfig.recommended(plan=model_config.plan)`. An `Auto` chooses between a sparse
        policy and dense attention, by the padded length of the prompts, `max_tokens`, the number of
        sequences and the contents of the cache.
      max_new_tokens: Maximum number of tokens to generate for a sequence.
      lengths: Number of prompt tokens of each sequence. Default: all `T`.
      sampling: Sampling settings. Default: greedy. New values do not recompile, except that greedy
        decoding has its own program.
      key: Random key, either one or one per sequence. Default: `jax.random.key(0)`.
      eos_token_ids: Tokens that end a sequence. Default: the model's end tokens.
      pad_token_id: Token that fills `tokens` after the end of a sequence.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`. With `"both"`, a
        policy that selects in one phase only (`policy.phases`) is dense in the other phase.
      chunk_size: Number of tokens that prefill processes at a time. `None` processes the whole
        prompt at once.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
        GPUs), or `None` to choose by device and shape.
      kernel_config: Tile sizes of the implementation.
      cache: Cache of an earlier call, whose sequences this call continues. It is donated: use the
        returned cache afterwards. The repetition penalty then counts the tokens of this call only.
      max_tokens: Capacity of a new cache in tokens, to leave room for later calls. Default: room
        for the class of the prompts, at most four times their length or 4,096 tokens, and for the
        new tokens, rounded up by `new_token_room`. If such a cache would take more than half of the
        device's free memory, room for the prompts as `bucket_length` rounds them up.
      return_selection: Whether to return the blocks that the prompts' query blocks attended to.

    Returns:
      A `Generation`. It has only the new tokens, without the prompts.

    Raises:
      ValueError: If arguments do not fit together, a prompt is longer than the model's context, or
        the cache has no room; if parameters or cache belong to another model, policy or dtype;
        if a token id is outside the vocabulary. Under `jit`, token ids are unknown and are clamped
        instead.

    Example:
      >>> out = generate(params, tokens, model_config=model_config,
      ...                max_new_tokens=32)  # doctest: +SKIP
    """
    keep_by_default()
    options = Options(
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
    call = options.check(params, tokens, lengths=lengths, sampling=sampling, key=key, cache=cache)
    return call.run(params)


class Generate(Options):
    """The callable that `make_generate` returns."""

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
        """Continues the prompts, as `generate` does with the same arguments.

        `attention_mask` is 1 at real tokens, as tokenizers return it, and replaces `lengths`. Then
        prompts may be padded on either side.

        Returns:
          A `Generation`.

        Raises:
          ValueError: In the same cases as `generate`.
        """
        keep_by_default()
        if attention_mask is not None:
            if lengths is not None:
                raise ValueError("lengths must be None when attention_mask is given, got both")
            tokens, lengths = left_to_right_padding(tokens, attention_mask)
        prompt: dict[str, Any] = dict(lengths=lengths, sampling=sampling, key=key, cache=cache)
        call = self.check(params, tokens, **prompt, to_bucket=True)
        return call.run(params)


def _takes_what[**P, R](other: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorator that gives a function another one's parameters, as `help` shows them."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        own = inspect.signature(function)
        taken = inspect.signature(other).replace(return_annotation=own.return_annotation)
        function.__signature__ = taken  # type: ignore[attr-defined]
        return function

    return decorate


@_takes_what(Generate)
def make_generate(*arguments: Any, **options: Any) -> Generate:  # noqa: D417 (those of `Generate`)
    """Returns the jitted `generate(params, tokens)` for one model and policy.

    Calls share programs as `generate` describes, whatever their lengths and densities. Another
    policy recompiles. Where programs know the shapes of the call, prompts are padded to a few
    lengths (`bucket_length`).

    Args:
      model_config: Configuration of the model, from `load`.
      policy: The policy that chooses the key blocks of each query, such as
        `SketchWalkConfig.recommended(density=0.2)` or `Dense()`; or an `Auto`. Default: as
        in `generate`.
      max_new_tokens: Maximum number of tokens to generate for a sequence.
      eos_token_ids: Tokens that end a sequence. Default: the model's end tokens.
      pad_token_id: Token that fills `tokens` after the end of a sequence.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`.
      chunk_size: Number of tokens that prefill processes at a time. `None` processes the whole
        prompt at once.
      implementation: Implementation of attention: `"xla"`, `"mosaic_gpu"` (the kernels for NVIDIA
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
    return Generate(*arguments, **options)


# Generation in chunks.


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """A few new tokens of every sequence.

    Attributes:
      tokens: The new tokens, int32 `[B, n]` on the host. The first chunk of a stream has no tokens;
        it marks the end of prefill.
      lengths: Number of these tokens that belong to each sequence, int32 `[B]` on the host.
      is_done: Whether each sequence has ended, bool `[B]` on the host.
      measured_density: Counts of (query, key) pairs attended to so far, and of all causal pairs.
      selection: The blocks that the prompts' query blocks attended to; only in the first chunk, and
        only if `return_selection` was set.
      is_finite: Whether all logits of a sequence were finite so far, bool `[B]` on the host.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_done: np.ndarray
    measured_density: Density
    selection: BlockSelection | None
    is_finite: np.ndarray


def for_stream(call: Call) -> Call:
    """Returns the call without a program of several steps, as a stream stops after few tokens."""
    shared = None if call.shared is None else for_stream(call.shared)
    decoding = call.decoding | {"greedy_steps": int(call.decoding["greedy_steps"] == 1)}
    return dataclasses.replace(call, decoding=decoding, shared=shared)


class Stream(Iterator[StreamChunk]):
    """Iterator over `StreamChunk`s, made by `stream`."""

    def __init__(self, call: Call, params: PyTree, *, every: int) -> None:
        """Keeps the checked call. Nothing runs before the first `next`."""
        check_integer("every", every)
        keep_by_default()
        self._call, self._params, self._every = for_stream(call), params, every
        self._state: DecodeState | None = None
        self._lengths = np.zeros(len(call.prompt[0]), np.int32)
        self._left, self._is_done = call.max_new_tokens, False

    @property
    def choice(self) -> Choice | None:
        """The choice of an `Auto`, or `None` if another policy was given."""
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
            self._state, selection = call.read(params)
            no_tokens = np.zeros((len(self._lengths), 0), np.int32)
            return self._chunk(no_tokens, 0, first_rows(selection, call.num_rows))
        if not self._left or self._is_done:
            raise StopIteration
        # Return the first token as early as possible, in its own chunk.
        is_first = self._left == call.max_new_tokens
        count = min(1 if is_first else self._every, self._left)
        tokens, self._state = call.decode(params, self._state, count)
        self._left -= count
        return self._chunk(tokens, count, None)

    def _chunk(self, tokens: Any, count: int, selection: BlockSelection | None) -> StreamChunk:
        assert self._state is not None
        state, before = self._state, self._lengths
        # Copy everything now: the next step consumes the state with its counts.
        tokens, density, self._lengths, is_done, is_finite = jax.tree.map(
            np.array,
            jax.device_get(
                (tokens, state.cache.density, state.lengths, state.is_done, state.is_finite)
            ),
        )
        self._is_done = bool(is_done.all())
        new = self._lengths - before
        return StreamChunk(tokens[:, :count], new, is_done, density, selection, is_finite)


def stream(
    params: PyTree, tokens: Int[Array | np.ndarray, "B T"], *, every: int = 8, **options: Any
) -> Stream:
    """Continues every prompt and returns the tokens while they are generated.

    It returns the same tokens as `generate`. The first chunk has no tokens and marks the end of
    prefill. The second has one token, and each chunk after it has `every`.

    Args:
      params: Parameter tree from `load`.
      tokens: Prompts, right-padded.
      every: Number of decode steps between two chunks.
      **options: The other arguments of `generate`.

    Returns:
      An iterator over `StreamChunk`s. Its `cache` continues the sequences afterwards.

    Raises:
      ValueError: In the same cases as `generate`, by this call, before the first chunk.

    Example:
      >>> for chunk in stream(params, tokens, model_config=model_config,
      ...                     max_new_tokens=64):  # doctest: +SKIP
      ...     print(chunk.tokens)
    """
    keep_by_default()
    own = ("lengths", "sampling", "key", "cache")
    prompt = {name: options.pop(name) for name in own if name in options}
    return Stream(Options(**options).check(params, tokens, **prompt), params, every=every)
