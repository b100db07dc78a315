"""How many parts the decode kernel splits lists into."""

import pytest

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.block_sparse_decode import num_splits


@pytest.mark.parametrize(
    ("units", "list_blocks", "expected"), [(8, 205, 16), (64, 205, 2), (256, 52, 1), (1, 1, 1)]
)
def test_splits_fill_the_multiprocessors(units: int, list_blocks: int, expected: int) -> None:
    assert num_splits(units, list_blocks, 64, KernelConfig()) == expected


def test_splits_are_as_many_as_asked_for_but_no_more_than_steps() -> None:
    config = KernelConfig(decode_splits=8)
    assert num_splits(1, 100, 64, config) == 8
    assert num_splits(1, 3, 64, config) == 3
    assert num_splits(1, 9, 16, config) == 3
