"""Rows of parameters in which every two values meet: fewer than all products, drawn by one rule."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which each value of a parameter stands beside each value of every other one.

    The rule: of all products the one with the most new pairs is next, the first of equals. With two
    parameters that is every product.

    Args:
      parameters: The values of each.

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
    """A row's pairs, each value with the number of its parameter."""
    return set(itertools.combinations(enumerate(row), 2))
