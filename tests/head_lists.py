"""Runs a policy for prefill with per-query-head lists on one layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from policy_runs import SENTINEL, span_of

CAPACITY = 320
HEADS, HEAD_DIM = (4, 2), 16


def draw(length: int, *, seed: int = 0, spread: float = 1.5, heads=HEADS) -> tuple[np.ndarray, ...]:
    """Draws one prompt's queries and keys; columns and diagonals of its attention stand out."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((length, heads[0], HEAD_DIM))
    key = rng.standard_normal((length, heads[1], HEAD_DIM))
    for head in range(heads[1]):
        key[rng.choice(length, max(1, length // 25), replace=False), head] += spread
    query += 0.5 * spread
    return query.astype(np.float32), key.astype(np.float32)


def stack(prompts, capacity: int = CAPACITY) -> tuple[jax.Array, jax.Array]:
    """Stacks prompts as a batch; nothing may read the padding."""

    def pad(x: np.ndarray) -> np.ndarray:
        widths = ((0, capacity - len(x)), (0, 0), (0, 0))
        return np.pad(x, widths, constant_values=SENTINEL)

    return tuple(jnp.stack([pad(prompt[part]) for prompt in prompts]) for part in (0, 1))


@functools.partial(jax.jit, static_argnames=("config",))
def _select(query, cache, span, *, config):
    layer = jnp.zeros((), jnp.int32)
    selection, _ = config.select(query, cache, None, None, layer=layer, span=span)
    return selection


def select(config, query, key, lengths, *, begin: int = 0, stop: int | None = None):
    """Selects for columns `begin .. stop - 1` of a batch, on block boundaries."""
    lengths, stop = np.asarray(lengths, np.int32), stop or query.shape[1]
    end = np.minimum(lengths, stop)
    is_real = np.arange(key.shape[1])[None, :, None, None] < end[:, None, None, None]
    cache = np.where(is_real, key, np.nan).astype(np.float32)
    span = span_of(lengths, config.block_size, begin, stop)
    return _select(query[:, begin:stop], cache[None], span, config=config)


def as_sets(selection, num_rows: int | None = None) -> list[list[list[set[int]]]]:
    """Returns the listed blocks as `[sequence][head][row]`; lists must ascend."""
    ids, counts = np.asarray(selection.ids), np.asarray(selection.counts)
    found = []
    for batch in range(ids.shape[0]):
        heads = []
        for head in range(ids.shape[1]):
            rows = []
            for row in range(num_rows or ids.shape[2]):
                listed = ids[batch, head, row, : counts[batch, head, row]].tolist()
                assert listed == sorted(set(listed)) and (not listed or listed[0] >= 0)
                rows.append(set(listed))
            heads.append(rows)
        found.append(heads)
    return found


def listed(config, prompts, lengths=None, num_rows=None, **columns) -> list[list[list[set[int]]]]:
    """Selects for a batch of prompts, and returns the listed blocks like `as_sets`."""
    lengths = [len(query) for query, _ in prompts] if lengths is None else lengths
    return as_sets(select(config, *stack(prompts), lengths, **columns), num_rows)


def assert_same_rows(found, wanted) -> None:
    """Checks the blocks of each head's rows; later rows are padding and list nothing."""
    assert [rows[: len(wanted[0])] for rows in found] == list(wanted)
    assert all(not row for rows in found for row in rows[len(wanted[0]) :])


def causal_softmax(queries: np.ndarray, keys: np.ndarray, positions) -> np.ndarray:
    """Computes attention weights of queries at given positions over causal keys, in float64."""
    rows = np.zeros((len(queries), len(keys)))
    for row, (query, position) in enumerate(zip(queries, positions, strict=True)):
        scores = keys[: position + 1].astype(np.float64) @ query.astype(np.float64)
        scores = np.exp((scores - scores.max()) / np.sqrt(len(query)))
        rows[row, : position + 1] = scores / scores.sum()
    return rows


def best(scores, count: int, forced=()) -> tuple[set[int], float]:
    """Returns the `count` best indices, forced ones first, and the gap to the next one."""
    forced = list(forced)[:count]
    others = [index for index in range(len(scores)) if index not in set(forced)]
    others.sort(key=lambda index: (-scores[index], index))
    taken = others[: count - len(forced)]
    left = others[len(taken) :]
    gap = scores[taken[-1]] - scores[left[0]] if taken and left else np.inf
    return {*forced, *taken}, gap
