"""Rows that cover pairs: every pair occurs, in the same few rows each time."""

import itertools

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2), (5, 3, 2, 2), (1, 4, 2), (3, 3, 3, 3)])
def test_every_pair_is_in_some_row_of_few(sizes):
    values = [[f"{name}{index}" for index in range(size)] for name, size in enumerate(sizes)]
    rows = pairwise(*values)
    assert rows == pairwise(*values)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(itertools.product(values[first], values[second]))
    largest, next_largest = sorted(sizes)[-1:-3:-1]
    assert len(rows) <= 1.5 * largest * next_largest
