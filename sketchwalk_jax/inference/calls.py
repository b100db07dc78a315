"""Checks of a call's arguments: parameters, cache and tokens, against model and policy.

They run once per call, before tracing. They compare shapes and dtypes, which are known even under
the caller's `jit`. They read only few values, if known: token ids, lengths, and the fill of a
cache.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from sketchwalk_jax.inference.cache import Cache, init_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import check_runs
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import Placement
from sketchwalk_jax.validation import (
    check_auto_axes,
    check_integers,
    check_lengths,
    check_vocabulary,
    is_known,
)

PyTree = Any


def check_model(params: PyTree, cache: Cache | None, model_config: ModelConfig) -> None:
    """Checks parameters against the model, and the cache's dtype against the parameters' dtype."""
    check_runs(params, model_config)
    check_auto_axes("params", params)
    check_auto_axes("cache", cache)
    dtype = params["embed"]["embedding"].dtype
    if cache is not None and cache.key.dtype != dtype:
        raise ValueError(
            f"cache must have the dtype of params, {dtype}, got {cache.key.dtype}; make it with "
            f"init_cache(..., dtype={dtype.name!r})"
        )


def cache_bytes(
    model_config: ModelConfig,
    policy: Policy,
    batch: int,
    max_tokens: int,
    dtype: str,
    placement: Placement | None = None,
) -> int:
    """Counts the bytes of a cache on all devices, without allocating it."""
    _, _, arrays = _layout(model_config, policy, batch, max_tokens, dtype, placement)
    return sum(math.prod(shape) * own.itemsize for _, shape, own in arrays)


@functools.lru_cache(maxsize=64)
def _layout(
    model_config: ModelConfig,
    policy: Policy,
    batch: int,
    max_tokens: int,
    dtype: str,
    placement: Placement | None,
) -> tuple[Any, tuple[Any, ...], tuple[tuple[str, tuple[int, ...], Any], ...]]:
    """Returns a cache's structure, its `made_for`, and each array's name, shape and dtype."""
    sizes: dict[str, Any] = {"batch": batch, "max_tokens": max_tokens, "dtype": dtype}
    make = functools.partial(init_cache, model_config, policy, **sizes, sharding=placement)
    shapes = jax.eval_shape(make)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    names = ((jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves)
    arrays = tuple((name, leaf.shape, leaf.dtype) for name, leaf in names)
    return structure, shapes.made_for, arrays


def check_unused(cache: Any) -> None:
    """Raises unless `cache` is a cache whose arrays no earlier call has consumed."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"cache must be a Cache (init_cache makes one), got {type(cache).__name__}"
        )
    for leaf in jax.tree.leaves(cache):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            if leaf.is_deleted():
                raise ValueError(
                    "cache must not have been used before: a call consumes the cache that it is "
                    "given (it is donated), got one whose arrays are gone; continue with the cache "
                    "that the call returned"
                )


def check_cache(
    cache: Any,
    batch: int,
    model_config: ModelConfig,
    policy: Policy,
    placement: Placement | None = None,
) -> None:
    """Raises unless `cache` comes from `init_cache` for this model, policy and batch.

    Raises:
      ValueError: If it was used before, or belongs to another model, policy, batch or mesh.
    """
    check_unused(cache)
    leaves, structure = jax.tree.flatten(cache)
    if cache.lengths.shape != (batch,):
        raise ValueError(
            f"tokens must have the cache's batch size {cache.lengths.shape[0]}, got {batch}"
        )
    size, shape = policy.block_size, cache.key.shape
    if len(shape) != 5 or shape[0] != model_config.num_layers:
        raise ValueError(
            f"cache must be of this model with num_layers = {model_config.num_layers}, got "
            f"keys {list(shape)}, [L, B, S, K, H]; make it with init_cache(model_config, ...)"
        )
    if cache.capacity % size:
        raise ValueError(
            f"cache must be made by init_cache with the same policy (block size "
            f"{size}), got a capacity of {cache.capacity} tokens"
        )
    capacity = min(cache.capacity, model_config.context_length)
    wanted, made_for, arrays = _layout(
        model_config, policy, batch, capacity, cache.key.dtype.name, placement
    )
    if structure != wanted:
        raise ValueError(
            f"cache must be made by init_cache for the same policy, {type(policy).__name__} with "
            f"{_says(made_for)}, got one with {_says(cache.made_for)}; go on "
            f"with the policy that it was made for (`phase` makes it dense in prefill or decode), "
            f"or read the text anew"
        )
    for (name, expected, dtype), leaf in zip(arrays, leaves, strict=True):
        if tuple(leaf.shape) != expected or leaf.dtype != dtype:
            raise ValueError(
                f"cache must be made by init_cache with the same model_config and policy, whose "
                f"{name} is {dtype}{list(expected)}, got {leaf.dtype}{list(leaf.shape)}"
            )


def _says(what: tuple[Any, ...]) -> str:
    """Describes the policy and the layers that statistics were made for."""
    if not what:
        return "no statistics"
    layers, name, *fields = what
    more = f", {dict(fields)}" if fields else ""
    return f"statistics of {name} in layers {list(layers)}{more}"


def tokens_used(cache: Cache | None) -> int:
    """Number of tokens of the longest sequence in a cache; 0 if unknown, as under `jit`."""
    if cache is None or not is_known(cache.lengths):
        return 0
    return int(np.asarray(cache.lengths).max())  # `jnp.max` would be traced under `jit`


def check_prompt(tokens: Any, lengths: Any, model_config: ModelConfig) -> Int[Array, "B"]:
    """Checks prompts against lengths and vocabulary; returns the lengths as an int32 array.

    If `lengths` is `None`, all columns are tokens.
    """
    check_integers("tokens", tokens, "[B, T]", 2)
    check_auto_axes("tokens and lengths", (tokens, lengths))
    batch, num_tokens = tokens.shape
    if batch == 0 or num_tokens == 0:
        raise ValueError(f"tokens must hold at least one token, got shape {list(tokens.shape)}")
    found = check_lengths(lengths, batch, num_tokens, "tokens")
    every = np.full((batch,), num_tokens, np.int32) if lengths is None else lengths
    check_vocabulary(tokens, every, model_config.vocab_size)
    return found


def check_room(cache: Cache, tokens: Any, lengths: Any) -> None:
    """Raises if a checked cache is known to have no room for checked prompts."""
    used, longest = tokens_used(cache), tokens.shape[1]
    if lengths is not None and is_known(lengths):
        longest = int(np.asarray(lengths).max())
    if used + longest > cache.capacity:
        raise ValueError(
            f"prompts must fit into the cache's {cache.capacity} tokens, got {longest} tokens "
            f"after {used}; make the cache with a larger max_tokens"
        )


def prompt_rows(tokens: Any, lengths: Any, cache: Cache | None, block_size: int) -> int | None:
    """Number of blocks that the longest prompt touches after the cache; `None` if unknown."""
    if cache is not None and not is_known(cache.lengths):
        return None
    inside = np.asarray(0 if cache is None else cache.lengths) % block_size
    longest = np.asarray(lengths if is_known(lengths) else tokens.shape[1])
    return -(-int(np.max(inside + longest)) // block_size)


def first_rows(selection: BlockSelection | None, num_rows: int | None) -> BlockSelection | None:
    """Keeps the first `num_rows` query blocks of a stacked selection; `None` keeps all."""
    if selection is None or num_rows is None or num_rows >= selection.counts.shape[3]:
        return selection
    return dataclasses.replace(
        selection,
        ids=selection.ids[:, :, :, :num_rows],
        counts=selection.counts[:, :, :, :num_rows],
    )


def check_token(
    tokens: Any,
    cache: Cache,
    model_config: ModelConfig,
    policy: Policy,
    placement: Placement | None = None,
) -> None:
    """Checks the tokens of a decode step against cache and vocabulary."""
    check_integers("tokens", tokens, "[B]", 1)
    check_auto_axes("tokens", tokens)
    check_cache(cache, tokens.shape[0], model_config, policy, placement)
    check_vocabulary(tokens, None, model_config.vocab_size)
    if tokens_used(cache) >= cache.capacity:
        raise ValueError(
            f"the cache must have room for one more token, got {tokens_used(cache)} tokens in a "
            f"capacity of {cache.capacity}; make it with a larger max_tokens"
        )
