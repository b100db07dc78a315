"""Text generation as one pure, jitted function: prefill, then a `while_loop` of decode steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sketchwalk_jax.cache import Cache, init_cache
from sketchwalk_jax.cached_attention import Settings
from sketchwalk_jax.density import Density
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.sampling import Sampling, mark_seen, sample, seen_tokens, sequence_keys
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.steps import decode_token, prefill_step
from sketchwalk_jax.validation import check_generation, check_prompt, check_settings

PyTree = Any


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
    logits, cache, selection = prefill_step(
        params, tokens, lengths, cache, is_fresh=is_fresh, settings=settings
    )
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


_STATIC = ("capacity", "max_new_tokens", "eos_token_ids", "pad_token_id", "settings")
_generate_jit = jax.jit(_generate, static_argnames=_STATIC, donate_argnames="cache")


@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of one generation, for `generate` and `stream`."""

    tokens: Any
    lengths: Any
    sampling: Sampling
    key: Any
    cache: Cache | None
    capacity: int
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    settings: Settings

    def run(self, params: PyTree) -> Generation:
        """Generates everything in one compiled program."""
        return _generate_jit(
            params,
            self.tokens,
            self.lengths,
            self.sampling,
            self.key,
            self.cache,
            **{name: getattr(self, name) for name in _STATIC},
        )


def prepare(
    tokens: Any,
    *,
    model_config: ModelConfig,
    config: Policy,
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
    settings = Settings(
        model_config=model_config,
        config=config,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
    )
    check_settings(settings)
    lengths = check_prompt(tokens, lengths, None, config)
    capacity = check_generation(
        tokens, lengths, cache, max_new_tokens, max_tokens, pad_token_id, settings
    )
    return Call(
        tokens=tokens,
        lengths=lengths,
        sampling=Sampling.greedy() if sampling is None else sampling,
        key=jax.random.key(0) if key is None else key,
        cache=cache,
        capacity=capacity,
        max_new_tokens=max_new_tokens,
        eos_token_ids=tuple(model_config.eos_token_ids if eos_token_ids is None else eos_token_ids),
        pad_token_id=pad_token_id,
        settings=settings,
    )


def generate(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    model_config: ModelConfig,
    config: Policy,
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
      config: The policy, such as a `SketchWalkConfig`, or `Dense()`.
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
      >>> out = generate(params, tokens, model_config=cfg,
      ...                config=SketchWalkConfig.paper(), max_new_tokens=32)  # doctest: +SKIP
    """
    call = prepare(
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
    return call.run(params)
