"""Checks of the arguments of attention: shapes and dtypes, before any tracing."""

from typing import Any

import jax.numpy as jnp

from sketchwalk_jax.selection import BlockSelection


def check_qkv(query: Any, key: Any, value: Any, layer: Any) -> tuple[int, int]:
    """Checks shapes and dtypes; returns the batch size and the number of query tokens."""
    if query.ndim != 4:
        raise ValueError(f"query must have shape [B, T, N, H], got {query.shape}")
    expected = 4 if layer is None else 5
    axes = "[B, S, K, H]" if layer is None else "[L, B, S, K, H] when layer is given"
    for name, x in (("key", key), ("value", value)):
        if x.ndim != expected:
            raise ValueError(f"{name} must have shape {axes}, got {x.shape}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query must be floating point, got {query.dtype}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {key.shape} and {value.shape}")
    batch, _, num_heads, head_dim = query.shape
    if key.shape[-4] != batch:
        raise ValueError(f"key must have query's batch size {batch}, got {key.shape[-4]}")
    if key.shape[-1] != head_dim:
        raise ValueError(f"key must have query's head_dim {head_dim}, got {key.shape[-1]}")
    if num_heads % key.shape[-2]:
        raise ValueError(
            f"the number of query heads must be a multiple of the key/value heads {key.shape[-2]}, "
            f"got {num_heads}"
        )
    return batch, query.shape[1]


def check_per_sequence(name: str, x: Any, batch: int) -> None:
    """Checks an optional argument with one number for each sequence."""
    if x is not None and jnp.shape(x) != (batch,):
        raise ValueError(f"{name} must have shape [B] = ({batch},), got {jnp.shape(x)}")


def check_selection(selection: BlockSelection, query: Any, key: Any, num_rows: int) -> None:
    """Checks lists of blocks against queries of `num_rows` rows."""
    ids, counts, size = selection.ids, selection.counts, selection.block_size
    batch, num_heads = query.shape[0], query.shape[2]
    if ids.ndim != 4 or counts.shape != ids.shape[:3]:
        raise ValueError(
            "selection must have ids [B, M, I, P] and counts [B, M, I], "
            f"got {ids.shape} and {counts.shape}"
        )
    if ids.shape[0] != batch or ids.shape[2] != num_rows:
        raise ValueError(
            f"selection must hold lists for {batch} sequences and {num_rows} query blocks, "
            f"got ids of shape {ids.shape}"
        )
    if ids.shape[1] not in (1, key.shape[-2], num_heads):
        raise ValueError(
            f"selection must have 1, {key.shape[-2]} or {num_heads} lists per row, "
            f"got {ids.shape[1]}"
        )
    if ids.shape[3] == 0:
        raise ValueError("selection must have room for at least one block, got P = 0")
    if ids.dtype != jnp.int32 or counts.dtype != jnp.int32:
        raise ValueError(
            f"selection must hold int32 ids and counts, got {ids.dtype} and {counts.dtype}"
        )
    if size < 1 or size & (size - 1):
        raise ValueError(f"selection.block_size must be a power of two, got {size}")
