"""Computes the attention mass of blocks, token by token in float64 with NumPy."""

import numpy as np


def block_mass(query: np.ndarray, key: np.ndarray, size: int, *, first: int = 0) -> np.ndarray:
    """Returns mass `[N, I, J]` of queries `[T, N, H]` at `first ..` over keys `[S, K, H]`.

    Row `i` is block `first // size + i`.
    """
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // key.shape[1]
    num_rows = (first + num_tokens - 1) // size - first // size + 1
    mass = np.zeros((num_heads, num_rows, -(-len(key) // size)))
    for head in range(num_heads):
        keys = key[:, head // group].astype(np.float64)
        for token in range(num_tokens):
            position = first + token
            scores = keys[: position + 1] @ query[token, head].astype(np.float64)
            weights = np.exp((scores - scores.max()) / np.sqrt(head_dim))
            weights /= weights.sum()
            by_block = np.add.reduceat(weights, np.arange(0, len(weights), size))
            mass[head, position // size - first // size, : len(by_block)] += by_block
    return mass


def best_rows(mass: np.ndarray, counts: np.ndarray, *, sink: int, local: int, first_row: int = 0):
    """Lists the `counts[i]` heaviest causal blocks of rows `[I, J]`, forced ones included.

    Also returns the smallest gap in mass at the edge of a list, relative to the row's mass.
    """
    lists, gap = [], np.inf
    for place, count in enumerate(counts):
        row = first_row + place
        forced = set(range(min(sink, row + 1))) | set(range(max(0, row + 1 - local), row + 1))
        others = sorted(set(range(row + 1)) - forced, key=lambda j: -mass[place, j])
        room = int(count) - len(forced)
        lists.append(sorted(forced | set(others[:room])))
        if 0 < room < len(others):
            deciding = mass[place, others[room - 1]] - mass[place, others[room]]
            gap = min(gap, deciding / mass[place].sum())
    return lists, gap
