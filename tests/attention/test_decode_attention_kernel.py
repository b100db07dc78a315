"""The kernel for the attention of tokens, on GPUs that take turns as compiled."""

import dataclasses
import functools

import attention_cases
import attention_checks
import cases
import hopper
import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from attention_cases import Decode
from compiling import assert_compiled, cases_of, compile_for
from kernel_draws import ON_GPU

from sketchwalk_jax.pallas_kernels.config import DECODE_HEADS
from sketchwalk_jax.pallas_kernels.decode_attention import decode_attention

CASES = [
    Decode(heads=(2, 2), lengths=(1,), head_dim=64),
    Decode(heads=(4, 1), lengths=(130, 64, 7)),
    Decode(heads=(3, 1), lengths=(65, 191), head_dim=64, room=1, dtype="float16"),
    Decode(heads=(14, 2), lengths=(129,), lists="kv_head"),
    Decode(heads=(4, 2), lengths=(193,), lists="head", return_lse=False),
    Decode(heads=(8, 1), lengths=(500,), block_size=16),
]
KEPT = ("decode-8x1-H128-T500",)  # the interpreter's default cases
LARGE = [
    Decode(heads=(32, 8), lengths=(16384,)),
    Decode(heads=(28, 4), lengths=(4095, 1, 2048, 777), room=3),
    Decode(heads=(32, 8), lengths=tuple(range(1, 1025, 8)), head_dim=64),
    Decode(heads=(32, 8), lengths=(4000, 130), block_size=16, lists="kv_head"),
    Decode(heads=(32, 8), lengths=(4000, 130), block_size=16, lists="head"),
]
BAD = [  # spare heads, several heads for one
    Decode(heads=(4, 2), lengths=(193, 100), lists="kv_head", head_dim=64),
    Decode(heads=(8, 1), lengths=(300, 77), block_size=16),
    Decode(heads=(14, 2), lengths=(500,), head_dim=64),
]
ANY_ORDER = Decode(heads=(4, 2), lengths=(500, 290), lists="head", head_dim=64)
SHORT = Decode(heads=(2, 1), lengths=(64,))

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("seed", attention_checks.SEEDS)
@attention_checks.each(CASES + (LARGE if ON_GPU else []), KEPT)
def test_attention_equals_the_reference(case, seed, capfd):
    attention_checks.check_reference(case, seed, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "splits", "stages"),
    [((4, 2), 2, 4), ((4, 2), 20, 3), ((12, 1), 1, 2), ((12, 1), 3, 5)],
)
def test_sizes_change_nothing_beyond_rounding(heads, splits, stages, capfd, monkeypatch):
    """Few and many parts, combined in rounds; two and more stages in shared memory."""
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_, **__: splits)
    monkeypatch.setattr(decode_attention, "sizes", lambda *_, **__: (1, stages))
    case = Decode(heads=heads, lengths=(1300 if splits > 16 else 330, 70), head_dim=64)
    attention_checks.check_reference(case, 0, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (dataclasses.replace(ANY_ORDER, block_size=block_size), splits)
        for block_size, splits in ((16, 2), (16, 1), (128, 3))
    ],
    ids=str,
)
def test_lists_are_read_in_any_order_and_to_their_count(case, splits, capfd, monkeypatch):
    """The first head's list is empty; blocks that no list names hold NaN."""
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_, **__: splits)
    (*floats, ids, _, layer, lengths, first), mask = kernel_draws.draw_attention(case, 1)
    mask[:, 0], mask[..., 1] = False, False  # no head lists block 1
    packed, counts = cases.pack_lists(mask)
    unlisted = np.repeat(~mask.any((0, 1, 2)), case.block_size)[:, None, None]
    floats[1:] = [jnp.where(unlisted, jnp.nan, x) for x in floats[1:]]
    rng = np.random.default_rng(2)
    ids = rng.choice(kernel_draws.NONSENSE, ids.shape)
    for index in np.ndindex(counts.shape):
        ids[index][: counts[index]] = rng.permutation(packed[index][: counts[index]])
    integers = (jnp.asarray(x, jnp.int32) for x in (ids, counts))
    arguments = (*floats, *integers, layer, lengths, first)
    with attention_checks.running(case, capfd) as attend:
        out, lse = attend(arguments)
    attention_checks.assert_attention(case, arguments, mask, (out, lse))
    assert not np.asarray(out[:, :, 0], np.float32).any()
    assert (np.asarray(lse[:, :, 0]) == -np.inf).all()


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@attention_checks.each(BAD)
def test_what_is_not_finite_reaches_those_who_see_it_alone(case, capfd):
    attention_checks.check_not_finite(case, capfd)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 136}, "query and block_size must fit the kernel: it takes a"),
        ({"block_size": 32}, "must fit the kernel: it takes a block_size of 16 or"),
        (
            {"head_dim": 96},
            "must fit the kernel: it takes a head_dim of 64 or 128 in decode, not 96",
        ),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_in_words(changes, words):
    function, shapes = dataclasses.replace(SHORT, **changes).program()
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(function, *shapes)


@pytest.mark.parametrize(
    ("capability", "wanted"),  # for each head_dim
    [("8.0", [(3, 3), (1, 5)]), ("8.6", [(2, 3), (1, 3)]), ("9.0", [(4, 3), (2, 3)])],
)
def test_steps_fit_in_a_multiprocessor(capability, wanted):
    memory = hopper.SHARED_KIB[capability] * 1024
    assert [decode_attention.sizes(x, memory) for x in DECODE_HEADS] == wanted


@pytest.mark.parametrize(
    ("units", "list_blocks", "expected"), [(8, 205, 16), (64, 205, 2), (256, 52, 1), (1, 1, 1)]
)
def test_splits_fill_the_programs_of_a_gpu(units, list_blocks, expected):
    split = functools.partial(decode_attention.num_splits, units, programs=132)
    assert split(list_blocks, 64) == split(4 * list_blocks, 16) == expected


@pytest.mark.hopper
@cases_of(
    attention_cases.COMPILED_DECODE,
    [
        ("9.0", "decode-28x4-H128-T65536-kv_head-block16-bfloat16"),
        ("12.0", "decode-32x8-H64-T65536-shared-block16-bfloat16"),
    ],
)
def test_it_compiles(gpu, case):
    assert_compiled(compile_for(gpu, f"{attention_cases.FILE}:{case}"))
