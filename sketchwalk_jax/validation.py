"""Checks of a caller's arguments, made once, before any tracing."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from sketchwalk_jax.pallas_kernels.dispatch import IMPLEMENTATIONS
from sketchwalk_jax.policies.base import Policy

if TYPE_CHECKING:
    from sketchwalk_jax.cache import Cache
    from sketchwalk_jax.cached_attention import Settings

PHASES = ("both", "prefill", "decode")


def check_settings(settings: "Settings") -> None:
    """Raises for options that are unknown or contradict each other."""
    if not isinstance(settings.config, Policy):
        raise ValueError(
            f"config must be a policy such as SketchWalkConfig or Dense, got {settings.config!r}"
        )
    if settings.phase not in PHASES:
        raise ValueError(f"phase must be one of {PHASES}, got {settings.phase!r}")
    own = settings.config.phases
    if settings.phase != "both" and own and settings.phase not in own:
        raise ValueError(
            f"phase must be 'both' or {own[0]!r} for {type(settings.config).__name__}, which "
            f"selects in {own[0]} only and is dense elsewhere, got {settings.phase!r}"
        )
    if settings.implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, "
            f"got {settings.implementation!r}"
        )
    size, chunk = settings.config.block_size, settings.chunk_size
    if chunk is not None and (not isinstance(chunk, int) or chunk < size or chunk % size):
        raise ValueError(
            f"chunk_size must be a positive multiple of the block size {size}, got {chunk!r}"
        )


def _check_integers(name: str, x: Any, shape: str, ndim: int) -> None:
    if not hasattr(x, "dtype") or not hasattr(x, "ndim"):
        raise ValueError(f"{name} must be an integer array {shape}, got {type(x).__name__}")
    if x.ndim != ndim or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array {shape}, got {x.dtype}{list(x.shape)}")


def _check_cache(cache: "Cache", batch: int, config: Policy) -> None:
    if cache.lengths.shape != (batch,):
        raise ValueError(
            f"tokens must have the cache's batch size {cache.lengths.shape[0]}, got {batch}"
        )
    if cache.capacity % config.block_size:
        raise ValueError(
            f"cache must be made by init_cache with the same config (block size "
            f"{config.block_size}), got a capacity of {cache.capacity} tokens"
        )


def check_prompt(
    tokens: Any, lengths: Any, cache: "Cache | None", config: Policy
) -> Int[Array, "B"]:
    """Checks prompt tokens against lengths and cache; returns the lengths as an int32 array."""
    _check_integers("tokens", tokens, "[B, T]", 2)
    batch, num_tokens = tokens.shape
    if batch == 0 or num_tokens == 0:
        raise ValueError(f"tokens must hold at least one token, got shape {list(tokens.shape)}")
    if cache is not None:
        _check_cache(cache, batch, config)
        used = 0
        if not isinstance(cache.lengths, jax.core.Tracer):
            used = int(np.asarray(cache.lengths).max())  # NumPy's: under jit, JAX's would be traced
        longest = num_tokens
        if lengths is not None and not isinstance(lengths, jax.core.Tracer):
            longest = int(np.asarray(lengths).max())
        if used + longest > cache.capacity:
            raise ValueError(
                f"prompts must fit into the cache's {cache.capacity} tokens, got {longest} tokens "
                f"after {used}; make the cache with a larger max_tokens"
            )
    if lengths is None:
        return jnp.full((batch,), num_tokens, jnp.int32)
    lengths = lengths if hasattr(lengths, "dtype") else np.asarray(lengths)
    _check_integers("lengths", lengths, "[B]", 1)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape [B] = ({batch},), got {lengths.shape}")
    if not isinstance(lengths, jax.core.Tracer):
        values = np.asarray(lengths)
        if values.min() < 1 or values.max() > num_tokens:
            raise ValueError(
                f"lengths must be between 1 and the {num_tokens} columns of tokens, "
                f"got {values.tolist()}"
            )
    return jnp.asarray(lengths, jnp.int32)


def check_token(tokens: Any, cache: "Cache", config: Policy) -> None:
    """Checks the tokens of a decode step against the cache."""
    _check_integers("tokens", tokens, "[B]", 1)
    _check_cache(cache, tokens.shape[0], config)
    if not isinstance(cache.lengths, jax.core.Tracer):
        longest = int(np.asarray(cache.lengths).max())
        if longest >= cache.capacity:
            raise ValueError(
                f"the cache must have room for one more token, got {longest} tokens in a "
                f"capacity of {cache.capacity}; make it with a larger max_tokens"
            )


def check_generation(
    tokens: Any,
    lengths: Any,
    cache: "Cache | None",
    max_new_tokens: Any,
    max_tokens: Any,
    pad_token_id: Any,
    settings: "Settings",
) -> int:
    """Checks that prompts and new tokens fit; returns the capacity that a new cache needs."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
    if not isinstance(pad_token_id, int):
        raise ValueError(f"pad_token_id must be an integer, got {pad_token_id!r}")
    context = settings.model_config.context_length
    width = tokens.shape[1]
    longest = width if isinstance(lengths, jax.core.Tracer) else int(np.asarray(lengths).max())
    used = 0
    if cache is not None and not isinstance(cache.lengths, jax.core.Tracer):
        used = int(np.asarray(cache.lengths).max())
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
        _check_cache(cache, tokens.shape[0], settings.config)
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
