"""Page scores over heads and page indices of one token per sequence, from Ampere on.

It is the last selection kernel of the recommended policy's decoding step. It weighs the parts that
`token_scores` has written, and selects by the page scores `R`:

    share[n, p] ^ e = powers[n, p] · (exp(top[n, part of p] - max top[n]) / Σ ...) ^ e
    S[p] = ( Σ_n share[n, p] ^ e ) ^ (1 / e),    R[p] = max(S[p], decay · R[p] of the layer before)

A thread block has one sequence, whose row is in the registers of up to four warpgroups. Each
warpgroup computes the factors of some heads, one per head and part, and shares them through shared
memory. Reading the powers takes most of the time: 2 bytes per head and page, from the GPU's cache.
So reads of the first heads' powers start before the factors are computed. Sums are float32.

A single thread block took 16 µs at 128K tokens on an H200, and 5 µs at 16K, since it read all
powers. In long caches many thread blocks compute the page scores first (`long_token_scores`), and
this kernel reads them as ordered integers, 4 bytes per column.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.config import (
    MAX_LISTED,
    MAX_TOKEN_HEADS,
    SCORED_PAGES,
)
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.page_scores.long_token_scores import (
    chunks_of_parts,
    combine_page_scores,
    factor_of,
    of_rows,
    read_parts,
    token_budget,
    token_page_scores_kernel,
    weigh_parts,
)
from sketchwalk_jax.pallas_kernels.page_scores.token_scores import (
    PAGE,
    TokenParts,
    token_scores_kernel,
)
from sketchwalk_jax.pallas_kernels.top_k.select import keep_best, room_of, select_row
from sketchwalk_jax.pallas_kernels.walk.walk_row import TILE
from sketchwalk_jax.selection import BlockSelection

_HEADS = 8  # divides the heads of a warpgroup
# Most bytes of a sequence's powers for this kernel; `long_token_scores` reads more.
_MOST_BYTES = 2**17
# Exponent of the lowest page score of 32 octaves in which the least one to keep usually is.
_WINDOW = -31


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      num_columns: Pages per sequence.
      height: Tiles per row, with padding.
      count: Columns per part.
      warpgroups: Warpgroups per row.
      exponent: Order of the norm over heads.
      decay: Factor of the previous layer's page scores.
    """

    num_columns: int
    height: int
    count: int
    warpgroups: int
    exponent: int
    decay: float


def _list_keys(keys_ref: Any, count_ref: Any, ids_ref: Any, scratch: Any, *, sizes: _Sizes) -> None:
    """Writes one sequence's page indices, from the results of `long_token_scores`."""
    row_ops.clear_bins(scratch)
    sequence, warpgroup = jax.lax.axis_index("sequence"), jax.lax.axis_index("warpgroup")
    own = sizes.height // sizes.warpgroups  # tiles of this warpgroup
    layout = row_ops.tiles_layout(own, TILE)
    keep_best(
        ops.read_global(keys_ref.at[sequence, pl.ds(warpgroup * own, own)], layout),
        count_ref[sequence],
        ids_ref.at[sequence],
        scratch,
        window=_WINDOW,
        pad=sizes.num_columns,
        layout=layout,
    )


def _list_blocks(
    powers_ref: Any,
    top_ref: Any,
    total_ref: Any,
    page_scores_ref: Any,
    length_ref: Any,
    layers_ref: Any,
    budget_ref: Any,
    ids_ref: Any,
    count_ref: Any,
    *,
    sizes: _Sizes,
    scratch: Any,
    factors: Any,
    **lists: Any,
) -> None:
    """Writes one sequence's page indices, and its page scores over the previous layer's."""
    row_ops.clear_bins(scratch)
    sequence, warpgroup = jax.lax.axis_index("sequence"), jax.lax.axis_index("warpgroup")
    own = sizes.height // sizes.warpgroups  # tiles of this warpgroup
    layout = row_ops.tiles_layout(own, TILE)
    columns = warpgroup * own + ops.matrix_index((own, TILE), 0, layout)
    columns = columns * TILE + ops.matrix_index((own, TILE), 1, layout)
    there = jax.lax.div(length_ref[sequence] + PAGE - 1, PAGE)
    count = token_budget(there, layers_ref, budget_ref, sizes.num_columns)
    page_scores_row = page_scores_ref.at[sequence]
    powers, top, total = (ref.at[sequence] for ref in (powers_ref, top_ref, total_ref))
    tiles: dict[str, Any] = dict(height=own, columns=TILE)
    read = row_ops.read_powers(powers, there, **tiles)
    before = row_ops.read_row(columns, page_scores_row, layout=layout)
    _write_factors(top, total, factors, warpgroup, there, sizes=sizes)
    row_ops.program_barrier()
    sums = row_ops.add_powers(read, powers, factors, there, part=sizes.count, **tiles)
    sums = jnp.where(columns < there, sums, 0.0)
    page_scores = combine_page_scores(sums, before, exponent=sizes.exponent, decay=sizes.decay)
    row_ops.write_row(page_scores, columns, page_scores_row, layout=layout)

    @pl.when(warpgroup == 0)
    def _() -> None:
        count_ref[sequence] = count

    select_row(
        page_scores,
        columns,
        there - 1,
        count,
        ids_ref.at[sequence],
        scratch,
        is_padded=sizes.height * TILE != sizes.num_columns,
        num_blocks=sizes.num_columns,
        window=_WINDOW,
        layout=layout,
        **lists,
    )


def _write_factors(
    top_ref: Any, total_ref: Any, factors: Any, warpgroup: Array, there: Array, *, sizes: _Sizes
) -> None:
    """Writes the factors of each head's parts to shared memory."""
    heads, parts = factors.shape[0] // sizes.warpgroups, factors.shape[1]
    rows = pl.ds(warpgroup * heads, heads)
    read = read_parts(top_ref, total_ref, rows, there, heads=heads, count=sizes.count)
    found = weigh_parts(*read)
    total = of_rows(found.total)
    for chunk, weight in zip(chunks_of_parts(parts), found.weights, strict=True):
        ops.write(factors.at[rows, chunk], factor_of(weight, total, sizes.exponent))


def select_token_by_page_scores_kernel(
    query: Float[Array, "B N H"],
    quantized: UInt8[Array, "L B J K S C2"],
    zero_point: Float[Array, "L B J K C"],
    scale_exponent: Int8[Array, "L B J K C"],
    state: Float[Array, "B P"],
    layers: Int[Array, ""],
    lengths: Int[Array, "B"],
    budgets: Int[Array | np.ndarray, "Ls P"],
    max_count: int,
    *,
    layer: Int[Array, ""],
    scale: float,
    exponent: int,
    decay: float,
    sink_blocks: int,
    local_blocks: int,
    ranks: Any = None,
    interpret: bool = False,
) -> tuple[BlockSelection, Float[Array, "B P"]]:
    """Computes page scores and page indices of one token per sequence.

    It runs two kernels, or three for long caches, and selects among the `P` pages of 16 keys.

    Args:
      query: Queries in bfloat16, at most eight heads per key/value head.
      quantized: Quantized keys (`QuantizedKeys`) of all layers: blocks of 64 keys, slow half of the
        channels.
      zero_point: Zero points, likewise.
      scale_exponent: Exponents of the scales, likewise.
      state: Page scores of the previous layer, updated in place under `jit`.
      layers: Number of layers walked so far.
      lengths: Number of keys in each sequence, including the token's own.
      budgets: Pages to keep, by layer and by the token's page.
      max_count: Static upper bound of `budgets`: the length of the lists.
      layer: Layer of the quantized keys.
      scale: Factor of the products.
      exponent: Order of the norm over heads.
      decay: Factor of the previous layer's page scores.
      sink_blocks: Number of first pages that are always kept.
      local_blocks: Number of last pages up to the token's own that are always kept.
      ranks: Distribution of heads over ranks (`policies.base.Heads`); the kernels' parts are
        gathered from all ranks in between.
      interpret: Whether to interpret the kernels, which needs no GPU.

    Returns:
      A `BlockSelection` of pages, shared by all heads, and the new page scores.

    Raises:
      ValueError: If there are more than 65,536 pages or 64 heads.
    """
    batch, num_columns = scale_exponent.shape[1], scale_exponent.shape[2] * SCORED_PAGES
    num_heads = query.shape[1] if ranks is None else ranks.num_heads
    if num_columns > MAX_LISTED or num_heads > MAX_TOKEN_HEADS:
        raise ValueError(
            f"there must be at most {MAX_LISTED} pages and {MAX_TOKEN_HEADS} heads, got "
            f"{num_columns} and {num_heads}"
        )
    height, warpgroups = room_of(-(-num_columns // TILE), interpret=interpret)
    together = _HEADS * warpgroups
    heads = -(-num_heads // together) * together
    lengths = lengths.astype(jnp.int32)
    room = (heads if ranks is None else query.shape[1], height * TILE)
    parts = token_scores_kernel(
        query,
        quantized,
        zero_point,
        scale_exponent,
        layer=layer,
        lengths=lengths,
        scale=scale,
        exponent=exponent,
        room=room,
        all_kv_heads=None if ranks is None else ranks.num_kv_heads,
        interpret=interpret,
    )
    if ranks is not None:
        powers, *of_parts = (ranks.gather(x, axis=1) for x in parts[:-1])
        top, total = (jnp.pad(x, ((0, 0), (0, heads - num_heads), (0, 0))) for x in of_parts)
        parts = TokenParts(powers, top, total, parts.size)
    sizes = _Sizes(
        num_columns=num_columns,
        height=height,
        count=parts.size,
        warpgroups=warpgroups,
        exponent=exponent,
        decay=decay,
    )
    forced: dict[str, Any] = dict(sink_blocks=sink_blocks, local_blocks=local_blocks)
    scratch: dict[str, Any] = {"scratch": row_ops.scratch_of_row(warpgroups)}
    how: dict[str, Any] = dict(
        grid=(batch,),
        grid_names=("sequence",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        detect_races=False,
        kernel_name="token_lists",
    )
    ids_type = jax.ShapeDtypeStruct((batch, min(max_count, num_columns)), jnp.int32)
    page_scores = jax.new_ref(state)
    of_token = (lengths, layers[None], jnp.asarray(budgets, jnp.int32))
    if num_heads * parts.powers.dtype.itemsize * num_columns > _MOST_BYTES:
        keys, kept = token_page_scores_kernel(
            parts,
            page_scores,
            *of_token,
            exponent=exponent,
            decay=decay,
            interpret=interpret,
            **forced,
        )
        ids = ops.kernel(
            functools.partial(_list_keys, sizes=sizes),
            out_type=ids_type,
            scratch_types=scratch,
            **how,
        )(keys.reshape(batch, height, TILE), kept)
    else:
        factors = plgpu.SMEM(parts.top.shape[1:], jnp.float32)
        ids, kept = ops.kernel(
            functools.partial(_list_blocks, sizes=sizes, **forced),
            out_type=[ids_type, jax.ShapeDtypeStruct((batch,), jnp.int32)],
            scratch_types={"factors": factors} | scratch,
            **how,
        )(*parts[:-1], page_scores, *of_token)
    selection = BlockSelection(
        ids[:, None, None], kept[:, None, None], PAGE, has_diagonal=local_blocks > 0
    )
    return selection, jax.freeze(page_scores)
