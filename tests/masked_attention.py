"""Calls of attention with drawn lists, and what masked attention gives for them."""

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference
from tolerances import tolerance

from sketchwalk_jax import (
    BlockSelection,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
)
from sketchwalk_jax.attention import num_query_blocks

OPERATIONS = {
    "lists": block_sparse_attention,
    "decode": block_sparse_decode,
    "dense": dense_attention,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of attention.

    Attributes:
      op: Attention function.
      lists: Whether a list serves all heads, one key/value head, or one query head.
      heads: Query heads and key/value heads.
      lengths: Keys of each sequence; later slots are NaN.
      offset: Position of each sequence's first query; `None` for 0.
      num_queries: Queries of each sequence; `None` for as many as the longest has keys.
      num_blocks: Blocks of the key and value arrays; `None` for as many as the keys need.
      scale: Factor of the scores.
      layer: Layer of a stacked cache of three, or `None` for keys and values alone.
      block_size: Tokens of a block.
      head_dim: Features of a head.
      dtype: Type of queries, keys and values.
    """

    op: str = "lists"
    lists: str = "shared"
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, ...] = (70, 37)
    offset: tuple[int, ...] | None = None
    num_queries: int | None = None
    num_blocks: int | None = None
    scale: float | None = None
    layer: int | None = None
    block_size: int = 16
    head_dim: int = 16
    dtype: str = "float32"

    @property
    def positions(self) -> np.ndarray:
        """Positions of the queries, `[B, T]`."""
        if self.op == "decode":
            return np.array(self.lengths)[:, None] - 1
        first = np.array(self.offset or [0] * len(self.lengths))
        return first[:, None] + np.arange(self.num_queries or max(self.lengths))

    def __str__(self) -> str:
        """Names the case by its fields that are not defaults."""
        values = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        changed = [x for x in dataclasses.fields(self) if values[x.name] != x.default]
        return "-".join(str(values[x.name]) for x in changed).replace(" ", "") or "shared"


def draw(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any], np.ndarray]:
    """Draws queries, keys and values; other arrays; and the mask of pairs, `[B, N, T, S]`."""
    rng = np.random.default_rng(0)
    batch, (num_heads, kv_heads), size = len(case.lengths), case.heads, case.block_size
    positions = case.positions
    num_blocks = case.num_blocks or -(-max(case.lengths) // size)
    keys = np.arange(num_blocks * size)
    query = rng.standard_normal((batch, positions.shape[1], num_heads, case.head_dim))
    key, value = rng.standard_normal((2, batch, len(keys), kv_heads, case.head_dim))
    is_key = keys < np.array(case.lengths)[:, None]
    key[~is_key] = value[~is_key] = np.nan
    options: dict[str, Any] = {"kv_lengths": jnp.array(case.lengths, jnp.int32)}
    rows = positions[:, ::size] // size
    if case.offset is not None:
        options["query_offset"] = jnp.array(case.offset, jnp.int32)
        count = num_query_blocks(positions.shape[1], size, has_offset=True)
        rows = rows[:, :1] + np.arange(count)
    sees = np.ones((batch, 1, positions.shape[1], len(keys)), bool)
    if case.op != "dense":
        lists = dict(zip(cases.LIST_KINDS, (1, *case.heads[::-1]), strict=True))[case.lists]
        mask = rng.random((batch, lists, rows.shape[1], num_blocks)) < 0.4
        mask[:, :, :, 0] |= rng.random(mask.shape[:3]) < 0.8
        mask &= (np.arange(num_blocks) <= rows[..., None])[:, None]
        if rows.shape[1] > 2:
            mask[0, 0, 2] = False  # sees no key
        ids, counts = cases.pack_lists(mask)
        is_nonsense = np.arange(ids.shape[-1]) >= counts[..., None]
        ids[is_nonsense] = rng.choice([0, -1, num_blocks, 2**30], is_nonsense.sum())
        options["selection"] = BlockSelection(jnp.asarray(ids), jnp.asarray(counts), size)
        place = np.minimum(positions // size - rows[:, :1], rows.shape[1] - 1)
        sees = np.stack([one[:, at] for one, at in zip(mask, place, strict=True)])
        sees = np.repeat(sees, size, axis=-1)
    sees = sees & (keys <= positions[..., None])[:, None] & is_key[:, None, None]
    sees = np.repeat(sees, num_heads // sees.shape[1], axis=1)
    arrays = tuple(jnp.asarray(x, case.dtype) for x in (query, key, value))
    return arrays, options, sees


def attend(
    query: Any, key: Any, value: Any, arrays: dict[str, Any], case: Case, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and log-sum-exps of a call like a user's."""
    if case.layer is not None:
        stacks = [[jnp.full_like(x, jnp.nan)] * 3 for x in (key, value)]
        for stack, own in zip(stacks, (key, value), strict=True):
            stack[case.layer] = own
        key, value = map(jnp.stack, stacks)
        options["layer"] = jnp.asarray(case.layer, jnp.int32)
    options |= {"scale": case.scale, "return_lse": True}
    return OPERATIONS[case.op](query, key, value, **arrays, **options)


_attend = jax.jit(attend, static_argnames=("case", "kernel_config"))


def run(case: Case, arrays: Any, others: dict[str, Any], **options: Any) -> Any:
    """Calls attention under `jit`; calls that differ in lengths and offsets share a program."""
    shape = dataclasses.replace(case, lengths=(), offset=None, lists="", num_queries=None)
    return jax.device_get(_attend(*arrays, others, shape, **options))


def wide(arrays: Any) -> tuple[np.ndarray, ...]:
    """Returns arrays in float32, with zeros for NaN."""
    return tuple(np.nan_to_num(np.asarray(x).astype(np.float32)) for x in arrays)


@functools.cache
def expected(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Computes outputs and log-sum-exps of each sequence by masked attention in float32."""
    arrays, _, sees = draw(case)
    rows = zip(*wide(arrays), sees, strict=True)
    return jax.device_get([reference.masked_attention(*row, case.scale) for row in rows])


def assert_equal_masked(case: Case, out: np.ndarray, lse: np.ndarray) -> None:
    """Compares outputs with masked attention; a query that sees no key gives 0 exactly."""
    assert out.dtype == case.dtype and lse.dtype == np.float32
    out = out.astype(np.float32)
    for row, wanted in enumerate(expected(case)):
        own = case.positions[row] < case.lengths[row]
        assert_close(case, out[row][own], lse[row][own], *(x[own] for x in wanted))
        assert not np.any(out[row][own][np.isneginf(wanted[1][own])])


def assert_close(case: Case, out: Any, lse: Any, wanted: Any, wanted_lse: Any) -> None:
    """Compares outputs and log-sum-exps to the tolerance of the case's type."""
    np.testing.assert_allclose(out.astype("f4"), wanted, **tolerance("attention", case.dtype))
    np.testing.assert_allclose(lse, wanted_lse, **tolerance("lse", case.dtype))
