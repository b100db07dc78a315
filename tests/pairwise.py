"""Draws rows of parameters in which every two values meet, far fewer than all products."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns rows in which each value of a parameter meets each value of every other one.

    The rule takes the product with the most new pairs next, the first of several. With two
    parameters it gives every product.

    Args:
      parameters: The values of each parameter.

    Example:
      >>> pairwise("ab", "xy", (1, 2))
      [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    places = [range(len(values)) for values in parameters]
    pairs = {row: _pairs(row) for row in itertools.product(*places)}
    missing = set[Any]().union(*pairs.values())
    rows = []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs.pop(best)
        rows.append(best)
    return [
        tuple(values[place] for values, place in zip(parameters, row, strict=True))
        for row in sorted(rows)
    ]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns a row's pairs of values, each value with the index of its parameter."""
    return set(itertools.combinations(enumerate(row), 2))
