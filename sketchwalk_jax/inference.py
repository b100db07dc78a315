"""Prefill and decode: pure, jitted functions from `(params, tokens, cache)` to `(logits, cache)`.

The cache is donated: it is updated in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.cache import Cache, init_cache
from sketchwalk_jax.cached_attention import Settings
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.steps import decode_token, prefill_step
from sketchwalk_jax.validation import check_prompt, check_settings, check_token

PyTree = Any

_prefill = jax.jit(prefill_step, static_argnames=("is_fresh", "settings"), donate_argnames="cache")
_decode = jax.jit(decode_token, static_argnames=("settings",), donate_argnames="cache")


def prefill(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    cache: Cache,
    *,
    model_config: ModelConfig,
    config: Policy,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    phase: str = "both",
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
    return_all_logits: bool = False,
) -> tuple[Any, ...]:
    """Reads prompt tokens into the cache (Algorithm 1 in every layer of the policy).

    The tokens continue whatever the cache holds: prompts may be given in pieces, or a conversation
    continued. The selection of a query block sees the later tokens of its own block, as the
    paper's does (block-causal); the attention itself is causal.

    Args:
      params: Parameter tree from `load`.
      tokens: Token ids, right-padded. Ids outside the vocabulary are clamped.
      cache: From `init_cache` with the same `config`; donated, use the returned one.
      model_config: The model.
      config: The policy, such as a `SketchWalkConfig`.
      lengths: Tokens of each sequence; all `T` by default.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`. A policy that selects
        in one phase only (`config.phases`) is dense in the other.
      chunk_size: Tokens processed at a time; bounds the memory of long prompts. `None` takes all.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      return_selection: Whether to return the selected blocks.
      return_all_logits: Whether to return the logits of every token instead of the last one's.

    Returns:
      Float32 logits after the last token of each sequence `[B, V]` (or `[B, T, V]`), the cache,
      and with `return_selection` a `BlockSelection` whose arrays have a leading axis of sparse
      layers (`None` if nothing was selected).

    Raises:
      ValueError: For shapes, dtypes or options that do not fit, an empty prompt, or prompts longer
        than the cache. The fill level of the cache and token values are unknown under `jit` and
        are not checked.
    """
    settings = Settings(
        model_config=model_config,
        config=config,
        phase=phase,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
        return_all_logits=return_all_logits,
    )
    check_settings(settings)
    lengths = check_prompt(tokens, lengths, cache, config)
    out = _prefill(params, tokens, lengths, cache, is_fresh=False, settings=settings)
    return out if return_selection else out[:2]


def decode_step(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B"],
    cache: Cache,
    *,
    model_config: ModelConfig,
    config: Policy,
    phase: str = "both",
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
    return_selection: bool = False,
) -> tuple[Any, ...]:
    """Appends one token to every sequence and returns the logits after it (Algorithm 2).

    Args:
      params: Parameter tree from `load`.
      tokens: One token id per sequence.
      cache: The cache so far; donated, use the returned one. Tokens beyond its capacity are lost.
      model_config: The model.
      config: The policy the cache was made for.
      phase: Where selection is sparse: `"both"`, `"prefill"` or `"decode"`. A policy that selects
        in one phase only (`config.phases`) is dense in the other.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.
      return_selection: Whether to return the selected blocks.

    Returns:
      Float32 logits `[B, V]`, the cache, and with `return_selection` a `BlockSelection` with a
      leading axis of sparse layers.

    Raises:
      ValueError: For shapes, dtypes or options that do not fit.
    """
    settings = Settings(
        model_config=model_config,
        config=config,
        phase=phase,
        implementation=implementation,
        kernel_config=kernel_config,
        return_selection=return_selection,
    )
    check_settings(settings)
    check_token(tokens, cache, config)
    active = jnp.ones(tokens.shape, bool)
    out = _decode(params, tokens, cache, active=active, settings=settings)
    return out if return_selection else out[:2]


def forward(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    model_config: ModelConfig,
    config: Policy | None = None,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    kernel_config: KernelConfig | None = None,
) -> Float[Array, "B T V"]:
    """Logits of every token of the prompts, teacher-forced, with no cache kept.

    Args:
      params: Parameter tree from `load`.
      tokens: Token ids, right-padded.
      model_config: The model.
      config: The policy; dense by default.
      lengths: Tokens of each sequence; all `T` by default.
      chunk_size: Tokens processed at a time.
      implementation: Attention implementation, or `None` to choose.
      kernel_config: Tile sizes.

    Returns:
      Float32 logits; those of padding mean nothing.

    Raises:
      ValueError: As `prefill`.
    """
    config = Dense() if config is None else config
    settings = Settings(
        model_config=model_config,
        config=config,
        chunk_size=chunk_size,
        implementation=implementation,
        kernel_config=kernel_config,
        return_all_logits=True,
    )
    check_settings(settings)
    lengths = check_prompt(tokens, lengths, None, config)
    batch, num_tokens = tokens.shape
    cache = init_cache(
        model_config,
        config,
        batch=batch,
        max_tokens=num_tokens,
        dtype=params["embed"]["embedding"].dtype,
    )
    return _prefill(params, tokens, lengths, cache, is_fresh=True, settings=settings)[0]
