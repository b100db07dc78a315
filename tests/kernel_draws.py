"""Runs kernels in memory full of NaN, and draws inputs and results of attention kernels.

Kernels run in Pallas' interpreter, as compiled (`compiled_kernels`), or on a GPU.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cases
import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from attention_cases import AttentionKernelCase
from cases import LAYER, NUM_LAYERS
from variants import INTERPRET, RUNS_COMPILED

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels import dispatch

KERNELS = KernelConfig(interpret=INTERPRET)
ON_GPU = jax.default_backend() == "gpu" and not RUNS_COMPILED
_HAS_HOPPER = jax.default_backend() == "cpu" or dispatch.is_hopper()
_WHY = "the kernels need a GPU of compute capability 9.0, or the interpreter a CPU"
needs_hopper = pytest.mark.skipif(not _HAS_HOPPER, reason=_WHY)

# A process that compiled for Hopper first can compile for older GPUs, but not for Blackwell.
_CAPABILITIES = itertools.cycle(x for x in hopper.SHARED_KIB if float(x) < 10)


def skip_unless_hopper() -> None:
    """Skips a test where Hopper's kernels cannot run."""
    if not _HAS_HOPPER:
        pytest.skip(_WHY)


@contextlib.contextmanager
def on_gpu(capability: str | None = None) -> Iterator[None]:
    """Compiles for a GPU, by default for the next one in turn, where kernels run as compiled."""
    if not RUNS_COMPILED:
        yield
        return
    import compiled_kernels

    with compiled_kernels.compiled_for(capability or next(_CAPABILITIES)):
        yield


# Values, besides the number of blocks, that kernels must ignore after a list's count.
NONSENSE = (0, -1, 2**30)


def poison(shapes: Any) -> None:
    """Fills memory with NaN where results of these shapes are likely to be allocated."""
    arrays = []
    for leaf in jax.tree.leaves(shapes):
        words = -(-leaf.size * leaf.dtype.itemsize // 4)
        arrays += [jnp.full((words,), jnp.nan, jnp.float32) for _ in range(4)]
    jax.block_until_ready(arrays)
    for array in arrays:
        array.delete()


def run(function: Callable[..., Any], arguments: Any, capfd: Any, *, times: int) -> Any:
    """Runs a function in memory full of NaN; all runs must agree bit for bit."""
    runs = []
    for _ in range(times):
        poison(jax.eval_shape(function, *arguments))
        runs.append(jax.block_until_ready(function(*arguments)))
    for one, other in zip(*map(jax.tree.leaves, (runs[0], runs[-1])), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    return runs[0]


def draw_attention(case: AttentionKernelCase, seed: int) -> tuple[tuple[Any, ...], np.ndarray]:
    """Draws the kernel's arguments, and returns the block mask `[B, M, I, J]` of its lists.

    The cache is NaN beyond each sequence's length and in other layers. In prefill the second query
    block, if not the last, has an empty list. Lists of pages name some of their row's own.
    """
    rng = np.random.default_rng(seed)
    batch, (num_heads, num_kv_heads) = len(case.lengths), case.heads
    tokens = case.num_rows * case.row_tokens if case.op == "prefill" else 1
    query = rng.standard_normal((batch, tokens, num_heads, case.head_dim), np.float32)
    blocks = case.num_blocks
    one = (batch, blocks * case.block_size, num_kv_heads, case.head_dim)
    key, value = np.full((2, NUM_LAYERS, *one), np.nan, np.float32)
    for row, length in enumerate(case.lengths):
        shape = (2, length, num_kv_heads, case.head_dim)
        key[LAYER, row, :length], value[LAYER, row, :length] = rng.standard_normal(
            shape, np.float32
        )
    first = np.array(case.first_blocks or [0] * batch, np.int32)
    if case.op == "decode":
        first = (np.array(case.lengths, np.int32) - 1) // case.block_size
    absolute = first[:, None] + np.arange(case.num_rows)
    columns = np.arange(blocks)
    mask = rng.random((batch, case.num_lists, case.num_rows, blocks)) < 0.5
    row = columns * case.block_size // case.row_tokens
    if case.row_size is None:
        mask |= (columns == absolute[..., None])[:, None]
    # As in selections, lists name blocks up to the diagonal, and only blocks that hold a token.
    there = columns * case.block_size < np.array(case.lengths)[:, None]
    if case.row_size is not None:  # pages of the row's own block may be without a token
        there |= row == (np.array(case.lengths)[:, None] - 1) // case.row_tokens
    mask &= ((row <= absolute[..., None]) & there[:, None])[:, None]
    if case.num_rows > 2:
        mask[:, :, 1] = False
    ids, counts = cases.pack_lists(mask, padding=blocks)
    ids = np.pad(ids, ((0, 0),) * 3 + ((0, blocks - ids.shape[-1]),), constant_values=blocks)
    beyond = np.arange(blocks) >= counts[..., None]
    ids[beyond] = rng.choice([blocks, *NONSENSE], int(beyond.sum()))
    floats = [jnp.asarray(x, case.dtype) for x in (query, key, value)]
    integers = (ids, counts, np.int32(LAYER), np.array(case.lengths, np.int32), first)
    return (*floats, *(jnp.asarray(x, jnp.int32) for x in integers)), mask


def expected_attention(
    case: AttentionKernelCase, arguments: tuple[Any, ...], mask: np.ndarray, row: int
) -> tuple[np.ndarray, np.ndarray]:
    """Computes output and log-sum-exp of one sequence, in float32."""
    query, key, value = (x.astype(jnp.float32) for x in arguments[:3])
    first, length = int(arguments[-1][row]) * case.row_tokens, case.lengths[row]
    tokens = query.shape[1]
    positions = first + np.arange(tokens) if case.op == "prefill" else np.array([length - 1])
    rows = np.arange(tokens) // case.row_tokens
    keys = np.arange(key.shape[2])
    allowed = mask[row][:, rows][:, :, keys // case.block_size]
    allowed = allowed & (keys <= positions[:, None]) & (keys < length)
    allowed = np.repeat(allowed, case.heads[0] // len(allowed), axis=0)
    key, value = (jnp.nan_to_num(x[LAYER, row]) for x in (key, value))
    out, lse = reference.masked_attention(query[row], key, value, allowed)
    return np.asarray(out), np.asarray(lse)


def drop_own_block(
    case: AttentionKernelCase, arguments: tuple[Any, ...], mask: np.ndarray
) -> tuple[tuple[Any, ...], np.ndarray]:
    """Removes the row's own block, the last one, from one list of a prompt."""
    *others, counts, layer, lengths, first = arguments
    if case.op == "decode" or case.num_rows < 3:
        return arguments, mask
    mask, size = mask.copy(), case.row_tokens // case.block_size
    mask[0, 0, 2, (int(first[0]) + 2) * size :] = False
    counts = jnp.asarray(mask.sum(-1), jnp.int32)
    return (*others, counts, layer, lengths, first), mask


def spoil(
    case: AttentionKernelCase, arguments: tuple[Any, ...], mask: np.ndarray, seed: int
) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray]:
    """Makes one token of each sequence non-finite; returns who may and who must see it.

    The token's query, key or value is changed, in one feature or all of one head. The first mask,
    `[B, T, N]`, marks outputs that see it. The second marks outputs that cannot be finite: an
    infinite score may also give a weight of 0.
    """
    rng = np.random.default_rng(seed)
    arrays = [np.array(x, np.float32) for x in arguments[:3]]
    batch, tokens, num_heads, features = arrays[0].shape
    kv_heads, size = case.heads[1], case.block_size
    row_tokens = case.row_tokens
    sees = np.zeros((batch, tokens, num_heads), bool)
    must = np.zeros_like(sees)
    for row, length in enumerate(case.lengths):
        which = (2, 1, 2, 0)[(row + seed) % 4]
        what = rng.choice([np.nan, np.inf, -np.inf])
        first = int(arguments[-1][row]) * row_tokens if case.op == "prefill" else length - 1
        start = 0 if rng.random() < 0.3 else first
        position = int(rng.integers(first if which == 0 else start, length))
        head = int(rng.integers(num_heads if which == 0 else kv_heads))
        feature = slice(None) if rng.random() < 0.7 else int(rng.integers(features))
        place = (row, position - first, head, feature)
        arrays[which][place if which == 0 else (LAYER, row, position, head, feature)] = what
        where = first + np.arange(tokens)
        lists = np.repeat(mask[row], num_heads // mask.shape[1], axis=0)[
            :, np.arange(tokens) // row_tokens
        ]
        if which == 0:
            sees[row, :, head] = (where == position) & lists[head].any(-1)
        else:
            own = np.arange(num_heads) // (num_heads // kv_heads) == head
            sees[row] = (lists[:, :, position // size] & (where >= position)).T & own
        is_real = (where < length)[:, None]  # a kernel may skip padding
        must[row] = sees[row] & is_real & (np.isnan(what) or which == 2)
    floats = [jnp.asarray(x, case.dtype) for x in arrays]
    return (*floats, *arguments[3:]), sees, must


def assert_reaches_those_who_see(
    found: tuple[Any, ...], clean: tuple[Any, ...], sees: np.ndarray, must: np.ndarray
) -> None:
    """Checks that outputs that do not see the token of `spoil` are unchanged, bit for bit."""
    for one, other in zip(found, clean, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_array_equal(one[~sees], other[~sees])
    found_out, clean_out = (np.asarray(x[0], np.float32) for x in (found, clean))
    assert np.isfinite(clean_out).all()
    assert not np.isfinite(found_out).all(-1)[must].any()


def real_tokens(case: AttentionKernelCase, row: int, first: int) -> int:
    """Counts a sequence's queries at real positions; later ones are padding."""
    if case.op == "decode":
        return 1
    there = case.lengths[row] - first * case.row_tokens
    return int(np.clip(there, 0, case.num_rows * case.row_tokens))


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Returns `‖actual - wanted‖ / ‖wanted‖` over all numbers."""
    scale = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(actual.astype(np.float32) - wanted)) / max(scale, 1e-30)
