"""The decode kernel for GPUs from Ampere on: interpreted, as compiled, and on such a GPU.

On a machine with such a GPU: `JAX_PLATFORMS=cuda python -m pytest tests/test_decode_kernel.py`.
As compiled, cases take GPUs in turn.
"""

import functools
import types

import attention_cases
import cases
import hopper
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
import test_attention_kernel
from attention_cases import Decode
from test_attention_kernel import ON_GPU
from test_kernels import NOT_FINITE, assert_attention
from variants import INTERPRET, slow_unless

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.config import DECODE_HEADS, num_multiprocessors
from sketchwalk_jax.pallas_kernels.decode_attention import decode_attention as module
from sketchwalk_jax.pallas_kernels.decode_attention.decode_attention import (
    decode_attention_kernel,
    num_splits,
    sizes,
)

CASES = [
    case
    for case in attention_cases.CASES + (attention_cases.LARGE_CASES if ON_GPU else ())
    if case.op == "decode" and case.head_dim in DECODE_HEADS
]
on_some_gpu = test_attention_kernel.on_some_gpu
run = functools.partial(test_attention_kernel.run, kernel=decode_attention_kernel)

pytestmark = pytest.mark.interpreted


@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize(
    "case", slow_unless(lambda case: "8x1-H128-T500" in str(case), CASES), ids=str
)
def test_attention_equals_the_reference(case, capfd):
    arguments, mask = kernel_draws.draw_attention(case, 0)
    found = run(case, arguments, capfd, times=1 if INTERPRET else 2)
    assert_attention(case, arguments, mask, found)


# Few and many parts, combined in rounds; two and more stages in shared memory.
SPLITS_AND_STAGES = ((2, 4), (1, 2), (3, 5), (20, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize("heads", [(4, 2), (12, 1)], ids=str)
@pytest.mark.parametrize(("splits", "stages"), SPLITS_AND_STAGES)
def test_sizes_change_nothing_beyond_rounding(splits, stages, heads, capfd, monkeypatch):
    monkeypatch.setattr(module, "num_splits", lambda *_, **__: splits)
    monkeypatch.setattr(module, "sizes", lambda *_: (1, stages))
    case = Decode(heads=heads, lengths=(1300 if splits > 16 else 330, 70), head_dim=64)
    arguments, mask = kernel_draws.draw_attention(case, 0)
    assert_attention(case, arguments, mask, run(case, arguments, capfd))


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("case", [x for x in NOT_FINITE if x.op == "decode"], ids=str)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    arguments, mask = kernel_draws.draw_attention(case, 0)
    kernel_draws.assert_spoilt_reaches_those_who_see(
        functools.partial(run, case, capfd=capfd), case, arguments, mask, seeds=9 if ON_GPU else 2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_some_gpu")
@pytest.mark.parametrize(("block_size", "splits"), [(16, 2), (16, 1), (128, 3)])
def test_lists_are_read_in_any_order_and_to_their_count(block_size, splits, capfd, monkeypatch):
    """The first head's list is empty; blocks that no list names hold NaN."""
    monkeypatch.setattr(module, "num_splits", lambda *_, **__: splits)
    shape = {"block_size": block_size, "lists": "head", "head_dim": 64}
    case = Decode(heads=(4, 2), lengths=(500, 290), **shape)
    (*floats, ids, _, layer, lengths, first), mask = kernel_draws.draw_attention(case, 1)
    mask[:, 0], mask[..., 1] = False, False  # no head lists block 1
    packed, counts = cases.pack_lists(mask)
    unlisted = np.repeat(~mask.any((0, 1, 2)), block_size)[:, None, None]
    floats[1:] = [jnp.where(unlisted, jnp.nan, x) for x in floats[1:]]
    rng = np.random.default_rng(2)
    ids = rng.choice(kernel_draws.NONSENSE, ids.shape)
    for index in np.ndindex(counts.shape):
        ids[index][: counts[index]] = rng.permutation(packed[index][: counts[index]])
    integers = (jnp.asarray(x, jnp.int32) for x in (ids, counts))
    arguments = (*floats, *integers, layer, lengths, first)
    out, lse = run(case, arguments, capfd)
    assert_attention(case, arguments, mask, (out, lse))
    assert not np.asarray(out[:, :, 0], np.float32).any()
    assert (np.asarray(lse[:, :, 0]) == -np.inf).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 32}, "it takes a block_size of 16 or"),
        ({"head_dim": 96}, "it takes a head_dim of 64 or 128 in decode on this GPU, not 96"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_take_is_refused_in_words(changes, reason):
    case = Decode(heads=(2, 1), lengths=(64,), **changes)
    function, shapes = case.program(decode_attention_kernel)
    with pytest.raises(ValueError, match=f"must fit the kernel: {reason}"):
        jax.eval_shape(function, *shapes)


def test_a_derivative_is_refused_in_words():
    case = Decode(heads=(2, 1), lengths=(64,), head_dim=64)
    function, _ = case.program(decode_attention_kernel, kernel_config=KernelConfig(interpret=True))
    (query, *others), _ = kernel_draws.draw_attention(case, 0)

    def total(query):
        return jnp.sum(function(query, *others)[0].astype(jnp.float32))

    with pytest.raises(NotImplementedError, match=r"no derivative.*block_sparse_attention"):
        jax.eval_shape(jax.grad(total), query)


def test_programs_and_their_steps_fit_in_a_multiprocessor():
    wanted = {"8.0": ((3, 3), (1, 5)), "8.6": ((2, 3), (1, 3)), "9.0": ((4, 3), (2, 3))}
    for capability, chosen in wanted.items():
        memory = hopper.SHARED_KIB[capability] * 1024
        assert (sizes(64, memory), sizes(128, memory)) == chosen, capability


@pytest.mark.parametrize(
    ("units", "list_blocks", "expected"), [(8, 205, 16), (64, 205, 2), (256, 52, 1), (1, 1, 1)]
)
def test_splits_fill_the_programs_of_a_gpu(units, list_blocks, expected):
    assert num_splits(units, list_blocks, 64, programs=132) == expected
    assert num_splits(units, 4 * list_blocks, 16, programs=132) == expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (types.SimpleNamespace(platform="gpu", core_count=78), 78),
        (types.SimpleNamespace(platform="cpu"), 132),  # as in ahead-of-time compilation
    ],
)
def test_programs_are_counted_for_the_default_device(device, expected, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert num_multiprocessors() == expected
