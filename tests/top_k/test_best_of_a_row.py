"""The columns of a row's largest keys, by `keep_best`, against a sort on the host.

Runs in the interpreter, as compiled, or on a GPU from Ampere on.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernel_draws import KERNELS
from variants import slow_unless

from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.top_k.select import keep_best, ordered_keys, room_of

pytestmark = pytest.mark.interpreted

TILE, PAD, ABSENT = 64, 1 << 20, -(1 << 31)


@functools.partial(jax.jit, static_argnames=("window", "length"))
def best_of_rows(scores, counts, *, window, length):
    """Returns lists of `length` columns; a row's scores end before its keys do."""
    rows, columns = scores.shape
    height, warpgroups = room_of(-(-columns // TILE), interpret=KERNELS.interpret)
    own = height // warpgroups
    padding = ((0, 0), (0, height * TILE - columns))
    keys = jnp.pad(ordered_keys(scores), padding, constant_values=ABSENT)

    def body(keys_ref, count_ref, ids_ref, scratch):
        row, warpgroup = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup")
        layout = row_ops.tiles_layout(own, TILE)
        row_ops.clear_bins(scratch)
        keep_best(
            ops.read_global(keys_ref.at[row, pl.ds(warpgroup * own, own)], layout),
            count_ref[row],
            ids_ref.at[row],
            scratch,
            window=window,
            pad=PAD,
            layout=layout,
        )

    return ops.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, length), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types={"scratch": row_ops.scratch_of_row(warpgroups)},
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=KERNELS.interpret,
        detect_races=False,
    )(keys.reshape(rows, height, TILE), counts)


def draw(kind, rng, columns):
    """Draws the scores of one row."""
    if kind == "equal":
        return np.full(columns, 0.125, np.float32)
    if kind == "none":
        return np.full(columns, -np.inf, np.float32)
    if kind == "zero":  # most are 0, of either sign
        return np.where(rng.random(columns) < 0.05, rng.random(columns), -0.0).astype(np.float32)
    if kind == "few":  # ties in all parts of the row
        return rng.integers(1, 4, columns).astype(np.float32) / 4
    if kind == "close":  # many different keys in one bin
        return (1.0 + rng.permutation(columns) * 2.0**-23).astype(np.float32)
    if kind == "large":  # above all octaves of the window
        return (2.0**100 * (1.0 + rng.random(columns))).astype(np.float32)
    if kind == "small":  # below them
        return (2.0**-100 * (1.0 + rng.random(columns))).astype(np.float32)
    if kind == "signs":
        return rng.normal(size=columns).astype(np.float32)
    found = np.exp2(-20 * rng.random(columns)).astype(np.float32)
    found[rng.random(columns) < 0.1] = np.nan
    return found


KINDS = ("nan", "equal", "none", "zero", "few", "close", "large", "small", "signs")
# Columns at the edges of tiles, warps and warpgroups.
CASES = [(kind, columns) for columns in (600, 1, 512, 513, 1536, 4097) for kind in KINDS]


@pytest.mark.parametrize("case", slow_unless(CASES[0].__eq__, CASES), ids=str)
@pytest.mark.parametrize("window", [-31, None])
def test_the_best_columns_are_listed_in_order(case, window):
    """Lists one column, a tenth, all but one, and all."""
    kind, columns = case
    rng = np.random.default_rng(columns)
    counts = np.array([1, -(-columns // 10), max(columns - 1, 1), columns], np.int32)
    scores = np.stack([draw(kind, rng, columns) for _ in counts])
    found = np.asarray(best_of_rows(scores, counts, window=window, length=columns))
    keys = np.asarray(ordered_keys(jnp.asarray(scores)), np.int64)
    for one, own, count in zip(found, keys, counts, strict=True):
        wanted = np.sort(np.argsort(-own, kind="stable")[:count])
        np.testing.assert_array_equal(one[:count], wanted)
        assert (one[count:] == PAD).all()
