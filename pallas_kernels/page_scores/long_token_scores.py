"""Combines one token's page scores over heads, in long caches, on GPUs from Ampere on.

It runs between `token_scores` and `token_lists` if a sequence has too many powers for one thread
block to read quickly:

    S[p] = ( Σ_n powers[n, p] · factor[n, part of p] ) ^ (1 / e)
    factor[n, i] = (exp(top[n, i] - max top[n]) / Σ_j total[n, j] exp(top[n, j] - max top[n])) ^ e
    R[p] = max(S[p], decay · R[p] of the layer before)

A thread block has one part of all heads of a sequence: the columns (pages) of one thread block of
`token_scores`. One warpgroup computes the factors, one per head, from the tops and totals of all
parts: 8 bytes per head and part. Meanwhile another warpgroup reads the powers, 4 bytes (two
columns) per head and thread, and starts all reads before it adds anything. In a single warpgroup
the assembler would start these reads after most of the work on the factors. The page scores `R`
replace those of the layer before, in float32, 4 bytes per column. They are also written as integers
of the same order (`top_k.select`), in which forced pages and missing ones are marked, so that the
one thread block of `token_lists` has less to do.

Heads are added up in order. The page scores equal those that `token_lists` computes for short
caches, bit for bit, since both use the functions of this module.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref
from jaxtyping import Array, Float, Int, Shaped

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, math
from sketchwalk_jax.pallas_kernels.page_scores.token_scores import PAGE, TokenParts
from sketchwalk_jax.pallas_kernels.top_k.select import row_keys
from sketchwalk_jax.precision import MASK_VALUE
from sketchwalk_jax.scaled import integer_power

_HEADS = 8  # divides the heads of a warpgroup
_PARTS = 64  # parts per array in registers
_WORD, _PACKED = 4, 2  # bytes and columns per word


@dataclasses.dataclass(frozen=True)
class HeadParts:
    """Softmax statistics of some heads' parts, in registers.

    Attributes:
      weights: `exp(top - largest)`, arrays of 64 parts per head.
      largest: The largest `top` of each head.
      total: Each head's sum of `exp(logit - largest)` over all columns.
    """

    weights: list[Array]
    largest: Array
    total: Array


def parts_layout(heads: int) -> Any:
    """Returns the layout of 64 parts per head; `heads` is a multiple of 8, each in one warp."""
    return row_ops.tiles_layout(heads, _PARTS)


def chunks_of_parts(parts: int) -> list[Any]:
    """Returns slices of a head's parts, 64 at a time."""
    return [pl.ds(start, _PARTS) for start in range(0, parts, _PARTS)]


def read_parts(
    top_ref: Any, total_ref: Any, rows: Any, there: Int[Array, ""], *, heads: int, count: int
) -> tuple[list[Array], list[Array]]:
    """Reads `top` and `total` of all parts of some heads, 64 parts at a time.

    Args:
      top_ref: `top` of `TokenParts` for one sequence, `[heads, parts]`.
      total_ref: `total`, likewise.
      rows: Indices of the heads.
      there: Number of existing columns; parts beyond them hold anything.
      heads: Number of heads.
      count: Columns per part.
    """
    layout, shape = parts_layout(heads), (heads, _PARTS)
    tops, totals = [], []
    for index, chunk in enumerate(chunks_of_parts(top_ref.shape[1])):
        first = ops.matrix_index(shape, 1, layout)
        is_part = (first + index * _PARTS) * count < there
        tops.append(
            jnp.where(is_part, ops.read_global(top_ref.at[rows, chunk], layout), MASK_VALUE)
        )
        totals.append(jnp.where(is_part, ops.read_global(total_ref.at[rows, chunk], layout), 0.0))
    return tops, totals


def weigh_parts(tops: list[Array], totals: list[Array]) -> HeadParts:
    """Computes softmax statistics from the results of `read_parts`."""
    largest = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x in tops])
    weights = [jnp.exp2(x - of_rows(largest)) for x in tops]
    sums = [jnp.sum(x * w, axis=1) for x, w in zip(totals, weights, strict=True)]
    return HeadParts(weights, largest, functools.reduce(jnp.add, sums))


def of_rows(x: Float[Array, "heads"]) -> Float[Array, "heads 64"]:
    """Broadcasts one number per head to its parts."""
    shape = (x.shape[0], _PARTS)
    spread = jax.lax.broadcast_in_dim(x, shape, (0,))
    return plgpu.layout_cast(spread, parts_layout(shape[0]))


def factor_of(
    weight: Float[Array, "*shape"], total: Float[Array, "*shape"], exponent: int
) -> Float[Array, "*shape"]:
    """Returns the factor from a part's powers to powers of shares; 0 if no logit was finite."""
    share = jnp.where(total > 0.0, weight / total, 0.0)
    return integer_power(share, exponent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      count: Columns per part.
      exponent: Exponent of the shares.
      decay: Factor of the previous layer's page scores.
      sink_blocks: Number of first pages that are always kept.
      local_blocks: Number of last pages that are always kept.
    """

    count: int
    exponent: int
    decay: float
    sink_blocks: int
    local_blocks: int

    def keys(
        self, page_scores: Array, columns: Array, there: Int[Array, ""], num_columns: int
    ) -> Int[Array, "..."]:
        """Returns integers in the order of selection."""
        return row_keys(
            page_scores,
            columns,
            there - 1,
            is_padded=True,
            num_blocks=num_columns,
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
        )


def token_budget(
    there: Int[Array, ""], layers_ref: Any, budget_ref: Any, num_columns: int
) -> Int[Array, ""]:
    """Returns the number of pages to keep, given the number of pages that a sequence has."""
    layer = jnp.minimum(layers_ref[0], budget_ref.shape[0] - 1)
    # Without a token, do as plain JAX, where negative indices count from the end.
    page = jnp.where(there > 0, jnp.minimum(there, num_columns) - 1, num_columns - 1)
    count: Array = budget_ref[layer, page]
    return count


def _find_page_scores(
    powers_ref: Any,
    top_ref: Any,
    total_ref: Any,
    length_ref: Any,
    layers_ref: Any,
    budget_ref: Any,
    page_scores_ref: Any,
    keys_ref: Any,
    count_ref: Any,
    *,
    sizes: _Sizes,
    factors: Any,
) -> None:
    """Runs one thread block: one part of all heads of a sequence."""
    sequence, part = jax.lax.axis_index("sequence"), jax.lax.axis_index("part")
    there = jax.lax.div(length_ref[sequence] + PAGE - 1, PAGE)
    first, num_columns = part * sizes.count, page_scores_ref.shape[1]

    def make_factors() -> None:
        _write_factors(
            top_ref.at[sequence], total_ref.at[sequence], factors, part, there, sizes=sizes
        )

    def read_words() -> Array:
        return _read_words(powers_ref.at[sequence], first, sizes=sizes)

    def write_count() -> None:
        @pl.when(part == 0)
        def _() -> None:
            count_ref[sequence] = token_budget(there, layers_ref, budget_ref, num_columns)

    def write_page_scores(read: Array) -> None:
        page_scores, keys, layout = (
            page_scores_ref.at[sequence],
            keys_ref.at[sequence],
            _columns_layout(_PACKED),
        )
        place = ops.matrix_index((1, row_ops.THREADS * _PACKED), 1, layout)
        # A part may have fewer columns than there are places.
        columns = jnp.where(place < sizes.count, first + place, keys.shape[0])
        previous = row_ops.read_row(columns, page_scores, layout=layout)
        row_ops.program_barrier()
        sums = jnp.where(columns < there, _add_heads(read, factors), 0.0)
        found = combine_page_scores(sums, previous, exponent=sizes.exponent, decay=sizes.decay)
        row_ops.write_row(found, columns, page_scores, layout=layout)
        found_keys = sizes.keys(found, columns, there, num_columns)
        row_ops.write_row(found_keys, columns, keys, layout=layout)

    if ops.is_interpreted():
        make_factors()
        sums = _add_heads(read_words(), factors)
        write_count()
        own_refs = (page_scores_ref.at[sequence], keys_ref.at[sequence])
        _write_interpreted(sums, part, there, *own_refs, sizes=sizes)
        return
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        make_factors()
        row_ops.program_barrier()
        write_count()

    @pl.when(warpgroup == 1)
    def _() -> None:
        write_page_scores(read_words())


def _write_interpreted(
    sums: Array, part: Array, there: Array, page_scores: Any, keys: Any, *, sizes: _Sizes
) -> None:
    """Writes the page scores of a part, which may have fewer or no columns, and its keys."""
    num_columns, first = page_scores.shape[0], part * sizes.count
    columns = first + jnp.arange(sizes.count, dtype=jnp.int32)
    padded = jnp.pad(page_scores[...], (0, keys.shape[0] - num_columns))
    found = combine_page_scores(
        jnp.where(columns < there, sums, 0.0),
        jax.lax.dynamic_slice(padded, (first,), (sizes.count,)),
        exponent=sizes.exponent,
        decay=sizes.decay,
    )
    keys[pl.ds(first, sizes.count)] = sizes.keys(found, columns, there, num_columns)

    def write(width: int) -> None:
        page_scores[pl.ds(first, width)] = found[:width]

    whole, rest = divmod(num_columns, sizes.count)
    pl.when(part < whole)(functools.partial(write, sizes.count))
    if rest:
        pl.when(part == whole)(functools.partial(write, rest))


def _write_factors(
    top_ref: Any, total_ref: Any, factors: Any, part: Array, there: Array, *, sizes: _Sizes
) -> None:
    """Writes the factors of one part of each head to shared memory."""
    heads = factors.shape[0]
    tops, totals = read_parts(
        top_ref, total_ref, pl.ds(0, heads), there, heads=heads, count=sizes.count
    )
    own = []
    for index, top in enumerate(tops):
        column = ops.matrix_index(top.shape, 1, parts_layout(heads))
        is_own = column + index * _PARTS == part
        own.append(jnp.max(jnp.where(is_own, top, MASK_VALUE), axis=1))
    found = weigh_parts(tops, totals)
    weight = jnp.exp2(functools.reduce(jnp.maximum, own) - found.largest)
    ops.write(factors, factor_of(weight, found.total, sizes.exponent))


def _words_layout() -> Any:
    """Returns the layout of a row of words per head, one word per thread."""
    return _columns_layout(1)


def _columns_layout(packed: int) -> Any:
    """Returns the layout of a row with `packed` adjacent columns per thread."""
    tiles = ((1, row_ops.THREADS * packed), (1, mlir.LANES * packed), (1, packed))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-3,), -1, _check_canonical=False)


def _read_words(powers_ref: Any, first: Int[Array, ""], *, sizes: _Sizes) -> Shaped[Array, "N W"]:
    """Starts to read a part of all heads, one word per head and thread.

    It also reads columns beyond the sequence, which hold anything, rather than wait for its length.

    Args:
      powers_ref: `[heads, columns]` in global memory, bfloat16.
      first: The part's first column.
      sizes: Static parameters. The interpreter reads columns instead of words.
    """
    if ops.is_interpreted():
        return powers_ref[:, pl.ds(first, sizes.count)]
    heads = powers_ref.shape[0]
    shape = (heads, row_ops.THREADS)
    kind = mlir.array_type(shape, jnp.int32, _words_layout())

    @mlir.emit(powers_ref, numbers=(first,), result=kind)
    def read(powers: Any, first: Any) -> Any:
        place = _place_of_thread()
        start = mlir.address(powers, arith.addi(first, place))
        flag = mlir.flag(mlir.compare("slt", place, mlir.constant(sizes.count)))
        stride = ir.MemRefType(powers.type).shape[1] * _WORD // _PACKED
        found = [mlir.load(start, 1, flag, offset=head * stride)[0] for head in range(heads)]
        return row_ops.as_row(found, shape, _words_layout())

    return read


def _add_heads(read: Shaped[Array, "N W"], factors: Any) -> Float[Array, "*one columns"]:
    """Sums a part's columns over heads.

    Args:
      read: Result of `_read_words`.
      factors: One factor per head, in shared memory.
    """
    if ops.is_interpreted():
        weights = jnp.broadcast_to(factors[...][: read.shape[0], None], read.shape)
        return jnp.sum(read.astype(jnp.float32) * weights, axis=0)
    layout, shape = _columns_layout(_PACKED), (1, row_ops.THREADS * _PACKED)

    @mlir.emit((read, _words_layout()), factors, result=mlir.array_type(shape, jnp.float32, layout))
    def add(read: Any, factors: Any) -> Any:
        totals = [arith.constant(ir.F32Type.get(), 0.0)] * _PACKED
        for head, word in enumerate(mlir.scalars(read)):
            factor = memref.load(factors, [mlir.index(mlir.constant(head))])
            own = mlir.unpack_bfloat16(word)
            totals = [math.fma(x, factor, total) for x, total in zip(own, totals, strict=True)]
        return row_ops.as_row(totals, shape, layout)

    return add


def combine_page_scores(
    sums: Float[Array, "*shape"], previous: Float[Array, "*shape"], *, exponent: int, decay: float
) -> Float[Array, "*shape"]:
    """Returns the page scores `R` of the module."""
    return jnp.maximum(_root(sums, exponent), decay * previous)


def _root(x: Array, exponent: int) -> Array:
    """Returns `x ^ (1 / exponent)` for nonnegative `x`."""
    if exponent == 1:
        return x
    if exponent % 2 == 0:
        return _root(jnp.sqrt(x), exponent // 2)
    return jnp.exp2(jnp.log2(x) / exponent)


def _place_of_thread() -> ir.Value:
    """Returns the first column, within the part, of a thread of the second warpgroup."""
    thread = arith.andi(mlir.thread(), mlir.constant(row_ops.THREADS - 1))
    return arith.muli(thread, mlir.constant(_PACKED))


def token_page_scores_kernel(
    parts: TokenParts,
    page_scores: Any,
    lengths: Int[Array, "B"],
    layers: Int[Array, "1"],
    budgets: Int[Array, "Ls P"],
    *,
    exponent: int,
    decay: float,
    sink_blocks: int,
    local_blocks: int,
    interpret: bool = False,
) -> tuple[Int[Array, "B W"], Int[Array, "B"]]:
    """Replaces the previous layer's page scores by `R` of the module.

    Args:
      parts: Results of `token_scores_kernel`, of all heads.
      page_scores: Reference to the previous layer's page scores, float32 `[B, P]`.
      lengths: Number of keys in each sequence.
      layers: Number of layers walked so far.
      budgets: Pages to keep, by layer and by the token's page.
      exponent: Exponent of the shares.
      decay: Factor of the previous layer's page scores.
      sink_blocks: Number of first pages that are always kept.
      local_blocks: Number of last pages up to the token's own that are always kept.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      The page scores as integers in the order of selection, and the number of pages to keep.

    Raises:
      ValueError: If a part has more than two columns for each of 128 threads.
    """
    powers, top, total, count = parts
    most = row_ops.THREADS * _PACKED
    if count > most:
        raise ValueError(f"a part must have at most {most} columns, got {count}")
    batch, num_heads, width = powers.shape
    sizes = _Sizes(
        count=count,
        exponent=exponent,
        decay=decay,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
    )
    keys, counts = ops.kernel(
        functools.partial(_find_page_scores, sizes=sizes),
        out_type=[
            jax.ShapeDtypeStruct((batch, width), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        ],
        scratch_types={"factors": plgpu.SMEM((-(-num_heads // _HEADS) * _HEADS,), jnp.float32)},
        grid=(batch, width // count),
        grid_names=("sequence", "part"),
        num_threads=1 if interpret else 2,
        thread_name="warpgroup",
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="token_page_scores",
    )(powers, top, total, lengths, layers, budgets, page_scores)
    return keys, counts
