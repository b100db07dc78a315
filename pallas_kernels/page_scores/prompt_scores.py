"""Page scores of a prompt's query blocks, from page max logits, on GPUs from Ampere on.

    l[p, m] = scale · (factor_m max_logits[p, m] + q_m · zero_point_j)
    S[i, p] = Σ_{m of row i} softmax(l[0 .. i, m])_p ^ exponent

over the pages `p` of the blocks `j` up to the row's own, with the zero points `zero_point`. This is
the second kernel of `hopper`, after `max_logits_kernel`.

A warp has 32 queries, of one row or of up to four short rows, and waits for no other warp. It
passes over the blocks twice, 16 at a time: forward for the denominators, then backward for the
shares, which are never written. The backward pass starts with data still in the GPU's cache.
Products with the zero points use tensor cores (`mma.sync`), with zero points as rows and queries as
columns, ordered so that a thread has eight adjacent queries and reads their maxima of a page in one
instruction. Every thread has a reference and a denominator for each of its queries; threads combine
them once, at the end of the first pass. A number takes about ten instructions in the first pass and
eight in the second. Sums over queries cross four threads, each of which writes one page.

A logit is the rounded sum of both products, the same in both passes, and shares are relative to the
largest logit, so that equal pages have equal shares at any magnitude.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import SCORED_BLOCK, SCORED_PAGES
from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, scf
from sketchwalk_jax.pallas_kernels.page_scores.hopper import PART, ScoresTiling
from sketchwalk_jax.precision import FIRST_MAXIMUM

_OF_THREAD = 8
_TILES = PART // 8  # products of eight columns
_BLOCKS = 16  # per step: rows of a product
_DEPTH = 16  # channels per product


def _score(
    max_logits: Any,
    factor: Any,
    query: Any,
    zero_point: Any,
    first_row: Any,
    lengths: Any,
    out: Any,
    *,
    sizes: ScoresTiling,
) -> None:
    """Runs one thread block: four warps of 32 queries."""
    program = sizes.programs - 1 - jax.lax.axis_index("program")  # late rows first
    kv_head, batch = jax.lax.axis_index("kv_head"), jax.lax.axis_index("batch")
    arrays = [x.at[batch, kv_head] for x in (max_logits, factor, query)]
    given: list[Any] = [*arrays, zero_point.at[batch], out.at[batch, kv_head]]
    place, start = program * row_ops.WARPS, first_row[batch]
    if ops.is_interpreted():
        for warp in range(row_ops.WARPS):
            _interpreted(given, place + warp, kv_head, start, sizes=sizes)
        return

    last_row = jax.lax.div(lengths[batch] - 1, SCORED_BLOCK)

    @mlir.emit(*given, numbers=(place, kv_head, start, last_row))
    def _(*values: Any) -> None:
        _Warp(sizes, *values).run()


def _interpreted(
    given: list[Any], place: Array, kv_head: Array, start: Array, *, sizes: ScoresTiling
) -> None:
    max_logits, factor, query, zero_point, out = given
    own = pl.ds(place * PART, PART)
    first = jax.lax.div(place * PART, sizes.per_row)
    part = jax.lax.rem(place, sizes.parts)
    shared = jnp.dot(
        zero_point[:, kv_head].astype(jnp.float32),
        query[own].astype(jnp.float32).T,
        precision=jax.lax.Precision.HIGHEST,
    )
    values = max_logits[:, own].astype(jnp.float32) * factor[own][None]
    values = values + jnp.repeat(shared, SCORED_PAGES, axis=0)
    row = jnp.arange(PART, dtype=jnp.int32) // sizes.per_row
    block = jnp.arange(len(values), dtype=jnp.int32) // SCORED_PAGES
    counts = (block[:, None] <= (start + first + row)[None]) & (jnp.abs(values) < sizes.limit)
    least = FIRST_MAXIMUM / sizes.factor
    largest = jnp.max(jnp.where(counts, values, least), axis=0, keepdims=True)
    away = (values - largest) * sizes.factor
    total = jnp.sum(jnp.where(counts, jnp.exp2(away), 0.0), axis=0, keepdims=True)
    common = jnp.where(total > 0.0, jnp.log2(total) * sizes.exponent, 0.0)
    parts = jnp.where(counts, jnp.exp2(away * sizes.exponent - common), 0.0)
    for index in range(sizes.rows):
        some = parts if sizes.rows == 1 else jnp.where(row[None] == index, parts, 0.0)
        out[part, first + index] = jnp.sum(some, axis=1)


class _Warp:
    """The work of one warp; values are per thread.

    A thread has rows `lane / 4` and `lane / 4 + 8` of products, two blocks, and queries
    `8 (lane % 4)` to `8 (lane % 4) + 7` of the warp's, two columns of each of four.
    """

    def __init__(
        self,
        sizes: ScoresTiling,
        max_logits: ir.Value,
        factor: ir.Value,
        query: ir.Value,
        zero_point: ir.Value,
        out: ir.Value,
        place: ir.Value,
        kv_head: ir.Value,
        start: ir.Value,
        last_row: ir.Value,
    ) -> None:
        """Computes the thread's addresses.

        Args:
          sizes: Static parameters.
          max_logits: Page max logits `[P, M]` of a key/value head.
          factor: `[M]`.
          query: `[M, C]`.
          zero_point: `[J, K, C]`.
          out: `[parts, I, P]`.
          place: Index of the first warp's group of 32 queries.
          kv_head: Index of the key/value head.
          start: Block index of the sequence's first row.
          last_row: Block index of the sequence's last key.
        """
        self._sizes, self._max_logits, self._factor = sizes, max_logits, factor
        self._query, self._zero_point, self._out = query, zero_point, out
        self._channels = ir.MemRefType(query.type).shape[1]
        self._kind = "bf16" if ir.MemRefType(query.type).element_type == _bf16() else "f16"
        lane = mlir.lane()
        self._row, self._place = arith.shrui(lane, _int(2)), arith.andi(lane, _int(3))
        self._channel = arith.muli(self._place, _int(self._channels // 4))
        self._kv_head = kv_head
        place = arith.addi(place, mlir.warp())
        self._first_query = arith.muli(place, _int(PART))
        self._own = arith.addi(self._first_query, arith.muli(self._place, _int(_OF_THREAD)))
        self._first = arith.divui(self._first_query, _int(sizes.per_row))  # row of the call
        self._part = arith.remui(place, _int(sizes.parts))
        self._row_of_thread = arith.divui(self._own, _int(sizes.per_row))
        self._reach = arith.minsi(arith.addi(start, self._row_of_thread), _int(sizes.blocks - 1))
        # As in `last_block`.
        first = arith.addi(start, self._first)
        last = arith.minsi(arith.addi(first, _int(sizes.rows - 1)), last_row)
        last = arith.select(mlir.compare("sle", first, last), last, _int(0))
        self._steps = arith.addi(arith.divui(last, _int(_BLOCKS)), _int(1))

    def run(self) -> None:
        """Runs both passes."""
        sizes = self._sizes
        columns = [self._load_query(tile) for tile in range(_TILES)]
        pointer = mlir.address(self._factor, self._own)
        factors = [_as_float(x) for half in (0, 16) for x in _load(pointer, 4, offset=half)]
        start = [_float(FIRST_MAXIMUM / sizes.factor)] * _OF_THREAD + [_float(0.0)] * _OF_THREAD
        bounds = [mlir.index(x) for x in (_int(0), self._steps, _int(1))]
        loop = scf.ForOp(*bounds, start)
        with ir.InsertionPoint(loop.body):
            step = arith.index_cast(mlir.i32(), loop.induction_variable)
            held = list(loop.inner_iter_args)
            found = []
            of_queries = zip(
                self._values(step, columns, factors),
                held[:_OF_THREAD],
                held[_OF_THREAD:],
                strict=True,
            )
            for values, reference, total in of_queries:
                found.append(self._gather(values, reference, total))
            references, totals = zip(*found, strict=True)
            scf.yield_([*references, *totals])
        held = list(loop.results)
        offsets, common = [], []
        for reference, total in zip(held[:_OF_THREAD], held[_OF_THREAD:], strict=True):
            offset, one = self._together(reference, total)
            offsets.append(offset)
            common.append(one)
        loop = scf.ForOp(*bounds, [])
        with ir.InsertionPoint(loop.body):
            index = arith.index_cast(mlir.i32(), loop.induction_variable)
            step = arith.subi(arith.subi(self._steps, _int(1)), index)
            sums = [_float(0.0)] * (2 * SCORED_PAGES)
            of_queries = zip(self._values(step, columns, factors), offsets, common, strict=True)
            power = _float(sizes.factor * sizes.exponent)
            for values, offset, one in of_queries:
                for place, value in enumerate(values):
                    # Subtract the large offset first, which makes the difference exact.
                    away = arith.mulf(arith.subf(value, offset), power)
                    share = _power(arith.subf(away, one))
                    sums[place] = arith.addf(sums[place], share)
            self._write(step, sums)
            scf.yield_([])

    # Memory

    def _load_query(self, tile: int) -> list[ir.Value]:
        """Loads a right operand: the thread's channels, two words per product."""
        page = arith.shrui(self._row, _int(1))
        row = arith.addi(self._first_query, arith.muli(page, _int(_OF_THREAD)))
        row = arith.addi(row, arith.andi(self._row, _int(1)))
        row = arith.addi(row, _int(2 * tile))
        place = arith.addi(arith.muli(row, _int(self._channels)), self._channel)
        return self._load_channels(mlir.address(self._query, place))

    def _load_channels(self, pointer: ir.Value) -> list[ir.Value]:
        """Loads an adjacent quarter of the channels; their order in the sum is free."""
        found: list[ir.Value] = []
        for start in range(0, self._channels // 8, 4):
            found += _load(pointer, 4, offset=4 * start)
        return found

    def _blocks(self, step: ir.Value) -> list[ir.Value]:
        """Returns the thread's two blocks of a step."""
        first = arith.addi(arith.muli(step, _int(_BLOCKS)), self._row)
        return [first, arith.addi(first, _int(_BLOCKS // 2))]

    # Numbers

    def _values(
        self, step: ir.Value, columns: list[list[ir.Value]], factors: list[ir.Value]
    ) -> list[list[ir.Value]]:
        """Returns each query's logits of the pages of the thread's two blocks.

        Logits are -inf if they are NaN or too large, or after the query's own row.
        """
        sizes, blocks = self._sizes, self._blocks(step)
        # Clamp missing blocks to the last one.
        there = [arith.minsi(x, _int(sizes.blocks - 1)) for x in blocks]
        held = [self._load_max_logits(block) for block in there]
        zero_points = []
        for block in there:
            kv_heads = ir.MemRefType(self._zero_point.type).shape[1]
            place = arith.addi(arith.muli(block, _int(kv_heads)), self._kv_head)
            place = arith.addi(arith.muli(place, _int(self._channels)), self._channel)
            zero_points.append(self._load_channels(mlir.address(self._zero_point, place)))
        is_seen = [mlir.compare("sle", block, self._reach) for block in blocks]
        found = []
        for tile in range(_TILES):
            sums = [_float(0.0)] * 4
            for depth in range(self._channels // _DEPTH):
                pair = slice(2 * depth, 2 * depth + 2)
                left = [
                    x
                    for both in zip(*(one[pair] for one in zero_points), strict=True)
                    for x in both
                ]
                sums = mlir.multiply(self._kind, left, columns[tile][pair], sums)
            for column in range(2):
                values = []
                for row in range(2):
                    shared = sums[2 * row + column]
                    shared = arith.select(is_seen[row], shared, _float(-math.inf))
                    for page in range(SCORED_PAGES):
                        max_logit = _half(held[row][page][tile], column)
                        value = _fused(max_logit, factors[2 * tile + column], shared)
                        values.append(self._counted(value))
                found.append(values)
        return found

    def _load_max_logits(self, block: ir.Value) -> list[list[ir.Value]]:
        """Loads the maxima of the thread's queries for each page of a block, four words."""
        count = ir.MemRefType(self._max_logits.type).shape[1]
        # 64 bits, since there may be more than 2^31 maxima.
        long = ir.IntegerType.get_signless(64)
        line = arith.extui(long, arith.muli(block, _int(SCORED_PAGES)))
        place = arith.muli(line, arith.constant(long, count))
        place = arith.addi(place, arith.extui(long, self._own))
        pointer = mlir.address(self._max_logits, place)
        return [_load(pointer, 4, offset=2 * count * page) for page in range(SCORED_PAGES)]

    def _counted(self, value: ir.Value) -> ir.Value:
        """Replaces a logit that is NaN or too large by -inf."""
        code = (
            "{ .reg .pred p; .reg .f32 x; abs.f32 x, $1; setp.lt.f32 p, x, $2; "
            "selp.f32 $0, $1, 0fFF800000, p; }"
        )
        return _run(code, value, _float(self._sizes.limit))

    def _gather(
        self, values: list[ir.Value], reference: ir.Value, total: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Updates a query's reference and denominator with the logits of a step."""
        factor = _float(self._sizes.factor)
        higher = functools.reduce(_larger, values, reference)
        total = arith.mulf(total, _power(arith.mulf(arith.subf(reference, higher), factor)))
        for value in values:
            away = arith.mulf(arith.subf(value, higher), factor)
            total = arith.addf(total, _power(away))
        return higher, total

    def _together(self, reference: ir.Value, total: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Combines lanes: a query's largest logit, and its denominator as an exponent."""
        sizes, highest = self._sizes, reference
        for distance in (4, 8, 16):
            highest = _larger(highest, mgpu.utils.shfl_bfly(highest, distance))
        below = arith.mulf(arith.subf(reference, highest), _float(sizes.factor))
        total = arith.mulf(total, _power(below))
        for distance in (4, 8, 16):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        # If the query sees no page, any finite offset will do.
        saw = arith.cmpf(arith.CmpFPredicate.OGT, total, _float(0.0))
        common = arith.mulf(
            _run("lg2.approx.ftz.f32 $0, $1;", total), _float(float(sizes.exponent))
        )
        return highest, arith.select(saw, common, _float(0.0))

    def _write(self, step: ir.Value, sums: list[ir.Value]) -> None:
        """Writes each row's scores of the pages of a step's blocks."""
        sizes = self._sizes
        _, rows, width = ir.MemRefType(self._out.type).shape
        bits = [mlir.compare("ne", arith.andi(self._place, _int(bit)), 0) for bit in (1, 2)]
        own = arith.subi(self._row_of_thread, self._first)
        for index in range(sizes.rows):
            line = arith.addi(self._first, _int(index))
            line = arith.addi(arith.muli(self._part, _int(rows)), line)
            line = arith.muli(line, _int(width))
            some = sums
            if sizes.rows > 1:
                is_own = mlir.compare("eq", own, index)
                some = [arith.select(is_own, x, _float(0.0)) for x in sums]
            for row, block in enumerate(self._blocks(step)):
                of_block = some[row * SCORED_PAGES : (row + 1) * SCORED_PAGES]
                is_there = mlir.compare("slt", block, sizes.blocks)
                place = arith.addi(line, arith.muli(block, _int(SCORED_PAGES)))
                halves = [_sum_of_lanes(of_block[x : x + 2], bits[0], 1) for x in (0, 2)]
                total = _sum_of_lanes(halves, bits[1], 2)
                place = arith.addi(place, self._place)
                pointer = mlir.address(self._out, place)
                code = "st.global.b32 [$0], $1;"
                mgpu.utils.inline_ptx(code, pointer, total, predicate=is_there)


def _sum_of_lanes(pair: list[ir.Value], bit: ir.Value, distance: int) -> ir.Value:
    """Sums over two lanes at a distance: second numbers for the lane whose bit is set."""
    first, second = pair
    own, other = arith.select(bit, second, first), arith.select(bit, first, second)
    return arith.addf(own, mgpu.utils.shfl_bfly(other, distance))


def _half(pair: ir.Value, which: int) -> ir.Value:
    """Converts one of two float16 numbers to float32."""
    name = ("low", "high")[which]
    code = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {name}; }}"
    return _run(code, pair)


def _fused(left: ir.Value, right: ir.Value, total: ir.Value) -> ir.Value:
    """Returns `left · right + total`, rounded once."""
    return _run("fma.rn.f32 $0, $1, $2, $3;", left, right, total)


def _larger(left: ir.Value, right: ir.Value) -> ir.Value:
    """Returns the larger of two numbers."""
    return _run("max.f32 $0, $1, $2;", left, right)


def _power(exponent: ir.Value) -> ir.Value:
    """Returns `2^exponent`."""
    return _run("ex2.approx.ftz.f32 $0, $1;", exponent)


def _as_float(word: ir.Value) -> ir.Value:
    """Reinterprets a word as a float."""
    return arith.bitcast(ir.F32Type.get(), word)


def _run(code: str, *operands: ir.Value) -> ir.Value:
    """Emits PTX code that returns one float."""
    return mgpu.utils.inline_ptx(code, *operands, result_types=ir.F32Type.get())


def _float(value: float) -> ir.Value:
    """Returns a constant float."""
    return arith.constant(ir.F32Type.get(), value)


def _bf16() -> ir.Type:
    return ir.BF16Type.get()


def page_scores_kernel(
    max_logits: Float[Array, "B K P M"],
    factor: Float[Array, "B K M"],
    query: Float[Array, "B K M C"],
    zero_point: Float[Array, "B J K C"],
    *,
    first_row: Int[Array, "B"],
    lengths: Int[Array, "B"],
    per_row: int,
    scale: float,
    exponent: int,
    interpret: bool = False,
) -> Float[Array, "B K parts I P"]:
    """Computes page scores, `S` of the module, per key/value head and 32 queries of a row.

    It takes and returns what `hopper.hopper_page_scores_kernel` does, after `max_logits_kernel`.
    The number of queries is a multiple of 128.
    """
    batch, kv_heads, num_queries, _ = query.shape
    sizes = ScoresTiling(
        programs=num_queries // (row_ops.WARPS * PART),
        per_row=per_row,
        blocks=zero_point.shape[1],
        factor=scale * math.log2(math.e),
        exponent=exponent,
    )
    shape = (batch, kv_heads, sizes.parts, num_queries // per_row, sizes.blocks * SCORED_PAGES)
    kernel = ops.kernel(
        functools.partial(_score, sizes=sizes),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(sizes.programs, kv_heads, batch),
        grid_names=("program", "kv_head", "batch"),
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="page_scores_kernel",
    )
    numbers = (x.astype(jnp.int32) for x in (first_row, lengths))
    return kernel(max_logits, factor, query, zero_point, *numbers)


_int = mlir.constant
_load = functools.partial(mlir.load, how=".nc")
