"""Evidence of one token's columns from its heads' scores, in long caches, from Ampere on.

Between `token_scores` and `token_lists`, where a sequence has more powers than one program reads in
good time:

    S[p] = ( Σ_n powers[n, p] · factor[n, part of p] ) ^ (1 / e)
    factor[n, i] = (exp(top[n, i] - max top[n]) / Σ_j total[n, j] exp(top[n, j] - max top[n])) ^ e
    R[p] = max(S[p], decay · R[p] of the layer before)

A program has one part of all heads of a sequence: the columns, which are pages, of one program of
`token_scores`. One warpgroup makes the factors, one for each head, from what all
parts say: 8 bytes for each head and part. Meanwhile another one reads the powers, 4 bytes of each
head in each thread, which are two columns, and starts all reads before it adds anything. In
one warpgroup the assembler would start these reads after most of the work on the factors. The
evidence is written in float32, 4 bytes for each column, in the place of that of the layer before.

Heads are added up in order. The evidence is that of `token_lists` where it adds up heads itself,
bit for bit, and both make it with the functions here.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import math as typed_math
from jaxlib.mlir.dialects import memref
from jaxtyping import Array, Float, Int, Shaped

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.page_scores.token_scores import PAGE, TokenParts
from sketchwalk_jax.precision import MASK_VALUE
from sketchwalk_jax.scaled import integer_power

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
math: Any = typed_math

_HEADS = 8  # of which a warpgroup has a multiple
_PARTS = 64  # side by side in registers
_WORD, _PACKED = 4, 2  # bytes of a word, and columns


@dataclasses.dataclass(frozen=True)
class HeadParts:
    """What makes factors of some heads' parts, in registers.

    Attributes:
      weights: `exp(top - largest)`, arrays of 64 parts of each head.
      largest: The largest `top` of each head.
      total: Each head's sum of `exp` over all columns, beside `exp(largest)`.
    """

    weights: list[Array]
    largest: Array
    total: Array


def parts_layout(heads: int) -> Any:
    """How a warpgroup holds 64 parts of so many heads, a multiple of eight: heads in one warp."""
    return row_ops.tiles_layout(heads, _PARTS)


def chunks_of_parts(parts: int) -> list[Any]:
    """The parts of a head, 64 at a time."""
    return [pl.ds(start, _PARTS) for start in range(0, parts, _PARTS)]


def read_parts(
    top_ref: Any, total_ref: Any, rows: Any, there: Int[Array, ""], *, heads: int, count: int
) -> tuple[list[Array], list[Array]]:
    """Reads what all parts of some heads say: `top` and `total`, 64 parts at a time.

    Args:
      top_ref: `[heads, parts]` of one sequence, as `TokenParts` has it.
      total_ref: Likewise.
      rows: Which heads.
      there: Columns that there are; parts beyond hold anything.
      heads: How many heads.
      count: Columns of a part.
    """
    layout, shape = parts_layout(heads), (heads, _PARTS)
    tops, totals = [], []
    for index, chunk in enumerate(chunks_of_parts(top_ref.shape[1])):
        first = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        is_part = (first + index * _PARTS) * count < there
        tops.append(jnp.where(is_part, ops.read(top_ref.at[rows, chunk], layout), MASK_VALUE))
        totals.append(jnp.where(is_part, ops.read(total_ref.at[rows, chunk], layout), 0.0))
    return tops, totals


def weigh_parts(tops: list[Array], totals: list[Array]) -> HeadParts:
    """Puts together what `read_parts` has read."""
    largest = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x in tops])
    weights = [jnp.exp2(x - of_rows(largest)) for x in tops]
    sums = [jnp.sum(x * w, axis=1) for x, w in zip(totals, weights, strict=True)]
    return HeadParts(weights, largest, functools.reduce(jnp.add, sums))


def of_rows(x: Float[Array, "heads"]) -> Float[Array, "heads 64"]:
    """A number of each head beside its parts."""
    shape = (x.shape[0], _PARTS)
    spread = jax.lax.broadcast_in_dim(x, shape, (0,))
    return plgpu.layout_cast(spread, parts_layout(shape[0]))


def factor_of(
    weight: Float[Array, "*shape"], total: Float[Array, "*shape"], exponent: int
) -> Float[Array, "*shape"]:
    """What makes powers of shares of a part's powers; 0 where nothing finite was seen."""
    share = jnp.where(total > 0.0, weight / total, 0.0)
    return integer_power(share, exponent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is static about a call.

    Attributes:
      count: Columns of a part.
      exponent: Of the shares.
      decay: What remains of the evidence of the layer before.
      interpret: Whether the interpreter runs the kernel.
    """

    count: int
    exponent: int
    decay: float
    interpret: bool


def _find_evidence(
    powers_ref: Any,
    top_ref: Any,
    total_ref: Any,
    length_ref: Any,
    evidence_ref: Any,
    *,
    sizes: _Sizes,
    factors: Any,
) -> None:
    """One program: one part of all heads of a sequence."""
    sequence, part = jax.lax.axis_index("sequence"), jax.lax.axis_index("part")
    there = jax.lax.div(length_ref[sequence] + PAGE - 1, PAGE)
    first = part * sizes.count

    def make_factors() -> None:
        _write_factors(
            top_ref.at[sequence], total_ref.at[sequence], factors, part, there, sizes=sizes
        )

    def read_words() -> Array:
        return _read_words(powers_ref.at[sequence], first, there, sizes=sizes)

    def write_evidence(read: Array) -> None:
        sums, evidence = _add_heads(read, factors, sizes=sizes), evidence_ref.at[sequence]
        layout = _columns_layout(_PACKED)
        where: dict[str, Any] = dict(layout=layout, interpret=False)
        place = plgpu.broadcasted_iota(jnp.int32, sums.shape, 1, layout=layout)
        columns = jnp.where(place < sizes.count, first + place, evidence.shape[0])
        previous = row_ops.read_row(columns, evidence, **where)
        found = evidence_of(
            jnp.where(columns < there, sums, 0.0),
            previous,
            exponent=sizes.exponent,
            decay=sizes.decay,
        )
        row_ops.write_row(found, columns, evidence, **where)

    if sizes.interpret:
        make_factors()
        sums = _add_heads(read_words(), factors, sizes=sizes)
        _write_interpreted(sums, part, there, evidence_ref.at[sequence], sizes=sizes)
        return
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        make_factors()
        row_ops.program_barrier(interpret=False)

    @pl.when(warpgroup == 1)
    def _() -> None:
        read = read_words()
        row_ops.program_barrier(interpret=False)
        write_evidence(read)


def _write_interpreted(
    sums: Array, part: Array, there: Array, evidence: Any, *, sizes: _Sizes
) -> None:
    """Writes the evidence of a part, of whose columns the last part may have fewer."""
    whole, rest = divmod(evidence.shape[0], sizes.count)

    def write(width: int) -> None:
        own = pl.ds(part * sizes.count, width)
        columns = part * sizes.count + jnp.arange(width, dtype=jnp.int32)
        found = jnp.where(columns < there, sums[:width], 0.0)
        evidence[own] = evidence_of(
            found, evidence[own], exponent=sizes.exponent, decay=sizes.decay
        )

    pl.when(part < whole)(functools.partial(write, sizes.count))
    if rest:
        pl.when(part == whole)(functools.partial(write, rest))


def _write_factors(
    top_ref: Any, total_ref: Any, factors: Any, part: Array, there: Array, *, sizes: _Sizes
) -> None:
    """Writes what makes powers of shares of one part of each head, to shared memory."""
    heads = factors.shape[0]
    tops, totals = read_parts(
        top_ref, total_ref, pl.ds(0, heads), there, heads=heads, count=sizes.count
    )
    own = []
    for index, top in enumerate(tops):
        column = plgpu.broadcasted_iota(jnp.int32, top.shape, 1, layout=parts_layout(heads))
        is_own = column + index * _PARTS == part
        own.append(jnp.max(jnp.where(is_own, top, MASK_VALUE), axis=1))
    found = weigh_parts(tops, totals)
    weight = jnp.exp2(functools.reduce(jnp.maximum, own) - found.largest)
    ops.write(factors, factor_of(weight, found.total, sizes.exponent))


def _words_layout() -> Any:
    """A row of words of each head over a warpgroup, one for each thread."""
    return _columns_layout(1)


def _columns_layout(packed: int) -> Any:
    """A row over a warpgroup, so many adjacent columns in each thread."""
    tiles = ((1, row_ops.THREADS * packed), (1, mlir.LANES * packed), (1, packed))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-3,), -1, _check_canonical=False)


def _read_words(
    powers_ref: Any, first: Int[Array, ""], there: Int[Array, ""], *, sizes: _Sizes
) -> Shaped[Array, "N W"]:
    """Starts to read a part of all heads, of each the word of every thread.

    Args:
      powers_ref: `[heads, columns]` in global memory, bfloat16.
      first: The part's first column.
      there: Columns that there are; words beyond are zeros.
      sizes: Those of the call. The interpreter reads columns instead of words.
    """
    if sizes.interpret:
        return powers_ref[:, pl.ds(first, sizes.count)]
    heads = powers_ref.shape[0]
    scalar, shape = plgpu.Layout.WG_SPLAT(()), (heads, row_ops.THREADS)
    dtype = jnp.dtype(jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, _words_layout()),
    )
    def read(_: Any, powers: Any, first: Any, there: Any) -> Any:
        first, there = (mlir.scalars(x)[0] for x in (first, there))
        place = _place_of_thread()
        column = arith.addi(first, place)
        is_own = _is_less(place, mlir.constant(sizes.count))
        is_read = arith.andi(is_own, _is_less(column, there))
        start, flag = mlir.address(powers, column), arith.extui(mlir.i32(), is_read)
        stride = ir.MemRefType(powers.type).shape[1] * _WORD // _PACKED
        found = [mlir.load(start, 1, flag, offset=head * stride)[0] for head in range(heads)]
        return row_ops.as_row(found, shape, _words_layout())

    return read(powers_ref, first, there)


def _add_heads(
    read: Shaped[Array, "N W"], factors: Any, *, sizes: _Sizes
) -> Float[Array, "*one columns"]:
    """The sums over the heads of a part's columns.

    Args:
      read: What `_read_words` has read.
      factors: One of each head, in shared memory.
      sizes: Those of the call.
    """
    if sizes.interpret:
        weights = jnp.broadcast_to(factors[...][: read.shape[0], None], read.shape)
        return jnp.sum(read.astype(jnp.float32) * weights, axis=0)
    layout, shape = _columns_layout(_PACKED), (1, row_ops.THREADS * _PACKED)

    @plgpu.inline_mgpu(
        arg_types=(_words_layout(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout),
    )
    def add(_: Any, read: Any, factors: Any) -> Any:
        totals = [arith.constant(ir.F32Type.get(), 0.0)] * _PACKED
        for head, word in enumerate(mlir.scalars(read)):
            factor = memref.load(factors, [mlir.index(mlir.constant(head))])
            own = mlir.unpack_bfloat16(word)
            totals = [math.fma(x, factor, total) for x, total in zip(own, totals, strict=True)]
        return row_ops.as_row(totals, shape, layout)

    return add(read, factors)


def evidence_of(
    sums: Float[Array, "*shape"], previous: Float[Array, "*shape"], *, exponent: int, decay: float
) -> Float[Array, "*shape"]:
    """`R` of the module."""
    return jnp.maximum(_root(sums, exponent), decay * previous)


def _root(x: Array, exponent: int) -> Array:
    """`x ^ (1 / exponent)` of what is not negative."""
    if exponent == 1:
        return x
    if exponent % 2 == 0:
        return _root(jnp.sqrt(x), exponent // 2)
    return jnp.exp2(jnp.log2(x) / exponent)


def _place_of_thread() -> ir.Value:
    """Which of its part's columns a thread of the second warpgroup has first."""
    thread = arith.andi(mlir.thread(), mlir.constant(row_ops.THREADS - 1))
    return arith.muli(thread, mlir.constant(_PACKED))


def _is_less(one: ir.Value, other: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, one, other)


def token_evidence_kernel(
    parts: TokenParts,
    evidence: Any,
    lengths: Int[Array, "B"],
    *,
    exponent: int,
    decay: float,
    interpret: bool = False,
) -> None:
    """Replaces the evidence of the layer before by that of the module's text.

    Args:
      parts: What `token_scores_kernel` has found, of all heads.
      evidence: Reference to the evidence of the layer before, float32 `[B, P]`.
      lengths: Keys present in each sequence.
      exponent: Of the shares.
      decay: What remains of the evidence of the layer before.
      interpret: Whether the interpreter runs the kernel.

    Raises:
      ValueError: If a part has more than two columns for each of 128 threads.
    """
    powers, top, total, count = parts
    most = row_ops.THREADS * _PACKED
    if count > most:
        raise ValueError(f"a part must have at most {most} columns, got {count}")
    batch, num_heads, _ = powers.shape
    sizes = _Sizes(
        count=count,
        exponent=exponent,
        decay=decay,
        interpret=interpret,
    )
    ops.kernel(
        functools.partial(_find_evidence, sizes=sizes),
        scratch_types={"factors": plgpu.SMEM((-(-num_heads // _HEADS) * _HEADS,), jnp.float32)},
        grid=(batch, -(-evidence.shape[1] // count)),
        grid_names=("sequence", "part"),
        num_threads=1 if interpret else 2,
        thread_name="warpgroup",
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret),
        kernel_name="token_evidence",
    )(powers, top, total, lengths, evidence)
