"""How many parts the decode kernel splits lists into."""

import types

import jax
import pytest

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.block_sparse_decode import num_splits
from sketchwalk_jax.pallas_kernels.config import num_multiprocessors


@pytest.mark.parametrize(
    ("units", "list_blocks", "expected"), [(8, 205, 16), (64, 205, 2), (256, 52, 1), (1, 1, 1)]
)
def test_splits_fill_the_multiprocessors(units: int, list_blocks: int, expected: int) -> None:
    assert num_splits(units, list_blocks, 64, KernelConfig()) == expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (types.SimpleNamespace(platform="gpu", core_count=78), 78),
        (types.SimpleNamespace(platform="cpu"), 132),  # as where kernels are compiled ahead
    ],
)
def test_programs_are_one_for_each_multiprocessor(
    monkeypatch: pytest.MonkeyPatch, device: object, expected: int
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert num_multiprocessors() == expected
    asked = KernelConfig(decode_programs=expected)
    cases = [(8, 205), (64, 205), (100, 205), (130, 99)]
    default, explicit = (
        [num_splits(*case, 64, config) for case in cases] for config in (KernelConfig(), asked)
    )
    assert default == explicit


def test_splits_are_as_many_as_asked_for_but_no_more_than_steps() -> None:
    config = KernelConfig(decode_splits=8)
    assert num_splits(1, 100, 64, config) == 8
    assert num_splits(1, 3, 64, config) == 3
    assert num_splits(1, 9, 16, config) == 3
