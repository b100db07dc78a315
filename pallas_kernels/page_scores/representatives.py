"""Representative queries of each query block (a row): mean and farthest points, from Ampere on.

Per head, farthest-point traversal (`policies.recommended.representative_queries`) takes the mean,
then repeatedly the query farthest from its nearest taken point. Each warp has one row of one head
and waits for no other warp. It holds all 64 queries in registers as the left operand of tensor
cores, which multiply them with any other query; so a distance is

    |q_i - q_j|^2 = q_i q_i + q_j q_j - 2 q_i q_j

The distance to the mean is computed likewise, with the mean split into three parts, 24 bits in
bfloat16. A step of the traversal takes one reduction over lanes, one query from shared memory, and
16 products of 16 queries, 8 (equal) columns and 16 channels, about 70 instructions.

One integer holds a query's distance and place, so that one reduction finds both. Distances that
differ by less than a relative 2^-17 count as equal, and of equal ones the first is taken.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref, nvvm
from jaxtyping import Array, Bool, Float

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, math, scf

_QUERIES = 64  # per row
_PLACES = _QUERIES - 1  # mask of the low bits, which hold the place
_HEADS = 4  # per thread block, one per warp
_TILE = 16  # queries per product, and channels
_TILES = _QUERIES // _TILE
_PARTS = 3  # parts of 16 bits that add up to a mean
_CHUNK = 8  # adjacent channels, in 16 bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      rows: Rows per sequence.
      heads: Heads.
      head_dim: Features per head, of which only the slow half is used.
      count: Number of representatives.
      kind: Type of the queries.
      by_warp: Whether each warp copies its own queries; Hopper's copy engine (TMA) does otherwise.
    """

    rows: int
    heads: int
    head_dim: int
    count: int
    kind: Any
    by_warp: bool

    @property
    def width(self) -> int:
        """Bytes per query in each of its two pieces."""
        return self.head_dim // 4 * 2

    @property
    def chunks(self) -> int:
        """Chunks of the slow half of the channels."""
        return self.head_dim // 2 // _CHUNK


def _represent(
    query: Any,
    valid: Any,
    out: Any,
    *,
    sizes: _Sizes,
    queries: Any,
    norms: Any,
    means: Any,
    filled: Any = None,
) -> None:
    """Runs one thread block: four pairs of row and head, repeating the last one if necessary."""
    program, batch = jax.lax.axis_index("program"), jax.lax.axis_index("batch")
    quarter, last = sizes.head_dim // 4, sizes.rows * sizes.heads - 1

    def where(index: Any) -> tuple[Any, Any]:
        pair = jnp.minimum(program * _HEADS + index, last)
        return jax.lax.div(pair, sizes.heads), jax.lax.rem(pair, sizes.heads)

    def copy(place: Any, nothing: Any) -> Any:
        index, half = jax.lax.div(place, 2), jax.lax.rem(place, 2)
        row, head = where(index)
        # RoPE rotates channels `d`, `d + H/2` together, slower for large `d`.
        channels = pl.ds((2 * half + 1) * quarter, quarter)
        source = query.at[batch, pl.ds(row * _QUERIES, _QUERIES), head, channels]
        target = queries.at[index, half]
        if not sizes.by_warp:
            plgpu.copy_gmem_to_smem(source, target, filled)
        else:
            target[...] = source[...]
        return nothing

    if not sizes.by_warp or ops.is_interpreted():
        # The compiler unrolls this loop: JAX takes long to lower a copy to shared memory.
        jax.lax.fori_loop(0, 2 * _HEADS, copy, ())
    if not sizes.by_warp:
        plgpu.barrier_wait(filled)
    if ops.is_interpreted():
        for index in range(_HEADS):
            row, head = where(index)
            is_own = valid[batch, pl.ds(row * _QUERIES, _QUERIES)] != 0
            out[batch, row, :, head] = _interpreted(queries[index], is_own, sizes.count)
        return
    shared = plgpu.RefType(ops.transforms(queries.dtype, sizes.width))
    refs = (valid.at[batch], (queries, shared), norms, means, out.at[batch])
    given = [query.at[batch]] if sizes.by_warp else []

    @mlir.emit(*refs, *given, numbers=[program * _HEADS])
    def _(*values: Any) -> None:
        valid, queries, norms, means, out, *sources, first = values
        traversal = _Traversal(sizes, first, valid, queries, norms, means, out)
        for source in sources:
            traversal.copy(source)
        traversal.emit()


def _interpreted(halves: Array, is_own: Array, count: int) -> Array:
    """Finds representatives `[R, 2, H/4]` of queries `[2, 64, H/4]` in the interpreter."""
    usable = is_own & jnp.all(jnp.isfinite(halves), axis=(0, 2))
    own = jnp.where(usable[None, :, None], halves.astype(jnp.float32), 0.0)
    number = jnp.maximum(jnp.sum(usable.astype(jnp.float32)), 1.0)
    mean = jnp.sum(own, axis=1) / number
    away = own - mean[:, None]
    distance = jnp.where(usable, jnp.sum(away * away, axis=(0, 2)), -1.0)
    own_of_all = jnp.concatenate(list(own), axis=1)
    products = jnp.dot(own_of_all, own_of_all.T, precision=jax.lax.Precision.HIGHEST)
    norm, place = jnp.diagonal(products), jnp.arange(_QUERIES, dtype=jnp.int32)
    found = [mean.astype(halves.dtype)]
    for _ in range(1, count):
        key = jax.lax.bitcast_convert_type(distance, jnp.int32)
        key = jnp.where(distance < 0.0, -1, (key & ~_PLACES) | (_PLACES - place))
        largest = jnp.max(key)
        best = _PLACES - (largest & _PLACES)
        away = jnp.maximum(norm + norm[best] - 2.0 * products[best], 0.0)
        # Ignore NaN distances.
        distance = jnp.where(distance < 0.0, distance, jnp.fmin(distance, away))
        distance = jnp.where(place == best, -1.0, distance)
        found.append(jnp.where(largest >= 0, halves[:, best], found[0]))
    return jnp.stack(found)


class _Traversal:
    """The work of one warp, which has one row of one head.

    In tensor core products, four adjacent lanes share queries `lane / 4` and `lane / 4 + 8` of each
    tile of 16 queries. After products, each of these lanes handles one of the four tiles: its two
    own queries. In every chunk of eight channels a lane has the pair `lane % 4`.
    """

    def __init__(
        self,
        sizes: _Sizes,
        first: ir.Value,
        valid: ir.Value,
        queries: ir.Value,
        norms: ir.Value,
        means: ir.Value,
        out: ir.Value,
    ) -> None:
        """Computes the warp's addresses.

        Args:
          sizes: Static parameters.
          first: Index of the first warp's pair of row and head.
          valid: Mask of valid queries, `[T]` in global memory.
          queries: `[4, 2, 64, H/4]` in shared memory, tiled.
          norms: `[4, 64]` in shared memory.
          means: Pairs of channels of the means' parts, `[4, 4, H/4]` in shared memory.
          out: Pairs `[I, R, N, H/4]` in global memory.
        """
        constant = mlir.constant
        self._sizes, self._valid, self._out = sizes, valid, out
        lane, self._warp = mlir.lane(), mlir.warp()
        pair = arith.minsi(arith.addi(first, self._warp), constant(sizes.rows * sizes.heads - 1))
        self._row = arith.divui(pair, constant(sizes.heads))
        self._head = arith.remui(pair, constant(sizes.heads))
        self._lane, self._place = lane, arith.shrui(lane, constant(2))
        self._pair = arith.andi(lane, constant(3))
        own = arith.addi(arith.muli(self._pair, constant(_TILE)), self._place)
        self._own = [own, arith.addi(own, constant(_TILE // 2))]
        self._queries = self._of_warp(queries, 2 * _QUERIES * sizes.width)
        self._norms = self._of_warp(norms, 4 * _QUERIES)
        self._means = self._of_warp(means, (_PARTS + 1) * sizes.head_dim)
        self._kind = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(sizes.kind).name]

    def _of_warp(self, ref: ir.Value, size: int) -> ir.Value:
        """Returns the address of the warp's own piece of shared memory, of `size` bytes."""
        return arith.addi(mlir.shared_pointer(ref), arith.muli(self._warp, mlir.constant(size)))

    def copy(self, source: ir.Value) -> None:
        """Starts to copy the warp's queries from a sequence's, `[T, N, H]` in global memory."""
        sizes, constant = self._sizes, mlir.constant
        chunks = sizes.chunks // 2  # per piece
        lane_row = arith.divui(self._lane, constant(chunks))
        chunk = arith.remui(self._lane, constant(chunks))
        first = arith.addi(arith.muli(self._row, constant(_QUERIES)), lane_row)
        start = arith.addi(arith.muli(first, constant(sizes.heads)), self._head)
        start = arith.addi(
            arith.muli(start, constant(sizes.head_dim)), arith.muli(chunk, constant(_CHUNK))
        )
        pointer = mlir.address(source, start)
        # A lane's rows are 8 or 16 apart, so the swizzle flips the same bits in all of them.
        place, turn = self._address(lane_row, chunk)
        target = arith.addi(self._queries, arith.xori(place, turn))
        together = mlir.LANES // chunks
        for half in range(2):
            for row in range(0, _QUERIES, together):
                from_start = 2 * row * sizes.heads * sizes.head_dim
                from_start += (2 * half + 1) * sizes.width
                offset = (half * _QUERIES + row) * sizes.width
                code = f"cp.async.cg.shared.global [$0 + {offset}], [$1 + {from_start}], 16;"
                mlir.effect(code, target, pointer)
        mlir.effect("cp.async.wait_all;")
        _wait_for_lanes()

    def emit(self) -> None:
        """Emits code that finds the representatives and writes them."""
        constant, number = mlir.constant, ir.F32Type.get()
        norms = self._find_norms()
        counts = self._which_count(norms)
        square = self._write_mean(counts)
        # Read queries again after the norms: four thread blocks per SM need the registers.
        tiles = [self._tile(index) for index in range(_TILES)]
        products = self._with_mean(tiles)
        distances = []
        for counted, norm, product in zip(counts, norms, products, strict=True):
            away = _away(norm, square, product)
            # Infinite distances count as equal.
            away = arith.minnumf(away, arith.constant(number, float("inf")))
            distances.append(arith.select(counted, away, arith.constant(number, -1.0)))
        mean = _load(arith.addi(self._means, arith.shli(self._word_of_lane(), constant(2))))
        self._write(constant(0), mean)
        self._walk(tiles, norms, distances, mean)

    def _address(self, lane_row: ir.Value, chunk: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns a chunk's offset in its piece, and the bits that the swizzle flips."""
        sizes = self._sizes
        offset = arith.muli(lane_row, mlir.constant(sizes.width))
        mask = mlir.constant(sizes.width - 16)
        turn = arith.andi(arith.shrui(offset, mlir.constant(3)), mask)
        place = arith.addi(offset, arith.shli(chunk, mlir.constant(4)))
        return place, turn

    def _matrices(self, tile: int, step: int, *, transposed: bool) -> list[ir.Value]:
        """Loads a tile's two chunks of one step: both halves of the rows, chunk by chunk."""
        sizes, constant = self._sizes, mlir.constant
        lane_row = arith.andi(self._lane, constant(_TILE - 1))
        place, turn = self._address(lane_row, arith.shrui(self._lane, constant(4)))
        half, chunk = divmod(2 * step, sizes.chunks // 2)
        turn = arith.xori(turn, constant(16 * chunk))
        place = arith.addi(self._queries, arith.xori(place, turn))
        offset = (half * _QUERIES + tile * _TILE) * sizes.width
        return _load_matrices(place, offset, transposed=transposed)

    def _tile(self, index: int) -> list[list[ir.Value]]:
        """Loads 16 queries as left operands: four words per step."""
        steps = range(self._sizes.chunks // 2)
        return [self._matrices(index, step, transposed=False) for step in steps]

    def _find_norms(self) -> list[ir.Value]:
        """Returns `q_i q_i` of the own queries from products' diagonals; shares all norms."""
        constant = mlir.constant
        is_odd = _is_set(self._place, 1)
        diagonal = []
        for tile in map(self._tile, range(_TILES)):
            for half in range(2):
                sums = mlir.zero_sums()
                for left in tile:
                    sums = mlir.multiply(self._kind, left, left[half::2], sums)
                even, odd = sums[2 * half : 2 * half + 2]
                diagonal.append(arith.select(is_odd, odd, even))
        # The lanes of pair p have columns 2p and 2p + 1.
        half_place = arith.shrui(self._place, constant(1))
        has_diagonal = mlir.compare("eq", half_place, self._pair)
        for index, norm in enumerate(diagonal):
            place = arith.addi(self._place, constant(index * _TILE // 2))
            _store(self._place_of_norm(place), norm, has_diagonal)
        _wait_for_lanes()
        return [self._norm(place) for place in self._own]

    def _place_of_norm(self, query: ir.Value) -> ir.Value:
        return arith.addi(self._norms, arith.shli(query, mlir.constant(2)))

    def _norm(self, query: ir.Value) -> ir.Value:
        return arith.bitcast(ir.F32Type.get(), _load(self._place_of_norm(query)))

    def _which_count(self, norms: list[ir.Value]) -> list[ir.Value]:
        """Returns which own queries are valid and finite; zeroes the others in shared memory."""
        constant, number = mlir.constant, ir.F32Type.get()
        first = arith.muli(self._row, constant(_QUERIES))
        counts = []
        for place in self._own:
            flag = memref.load(self._valid, [mlir.index(arith.addi(first, place))])
            counts.append(mlir.compare("ne", flag, 0))
        infinity = arith.constant(number, float("inf"))
        # Large finite numbers can have a non-finite norm, so check the numbers.
        doubtful = [arith.cmpf(arith.CmpFPredicate.UGE, norm, infinity) for norm in norms]
        is_bit = ir.IntegerType.get_signless(1)
        check = scf.IfOp(mlir.is_any(arith.ori(*doubtful)), [is_bit] * 2, has_else=True)
        with ir.InsertionPoint(check.then_block):
            found = []
            for place, counted in zip(self._own, counts, strict=True):
                is_finite = self._is_finite(place)
                is_lost = arith.xori(is_finite, arith.constant(is_bit, 1))
                self._make_zero(place, is_lost)
                found.append(arith.andi(counted, is_finite))
            _wait_for_lanes()
            scf.yield_(found)
        with ir.InsertionPoint(check.else_block):
            scf.yield_(counts)
        return list(check.results)

    def _is_finite(self, place: ir.Value) -> ir.Value:
        """Whether all channels of a query are finite."""
        constant = mlir.constant
        infinity = {"bf16": 0x7F80, "f16": 0x7C00}[self._kind]

        def larger(where: ir.Value, largest: list[ir.Value]) -> list[ir.Value]:
            word = _load(where)
            low = arith.andi(word, constant(0x7FFF))
            high = arith.andi(arith.shrui(word, constant(16)), constant(0x7FFF))
            return [arith.maxsi(largest[0], arith.maxsi(low, high))]

        (largest,) = self._over_words(place, [constant(0)], larger)
        return mlir.compare("slt", largest, infinity)

    def _make_zero(self, place: ir.Value, is_lost: ir.Value) -> None:
        """Zeroes a query in shared memory."""

        def make(where: ir.Value, nothing: list[ir.Value]) -> list[ir.Value]:
            _store(where, mlir.constant(0), is_lost)
            return nothing

        self._over_words(place, [], make)

    def _over_words(self, place: ir.Value, start: list[ir.Value], body: Any) -> list[ir.Value]:
        """Loops over the words of a query, in memory order."""
        sizes, constant = self._sizes, mlir.constant
        row = arith.addi(self._queries, arith.muli(place, constant(sizes.width)))
        bounds = [mlir.index(constant(x)) for x in (0, sizes.width, 4)]
        loop = scf.ForOp(*bounds, start)
        with ir.InsertionPoint(loop.body):
            where = arith.addi(row, arith.index_cast(mlir.i32(), loop.induction_variable))
            found = body(where, list(loop.inner_iter_args))
            found = body(arith.addi(where, constant(_QUERIES * sizes.width)), found)
            scf.yield_(found)
        return list(loop.results)

    def _write_mean(self, counts: list[ir.Value]) -> ir.Value:
        """Writes the mean of the valid queries to shared memory, and returns its square.

        The first of three rows is the mean in 16 bits; all three add up to it, and a fourth is 0.
        """
        constant, number = mlir.constant, ir.F32Type.get()
        ballots = [mlir.ballot(counted) for counted in counts]
        total = functools.reduce(arith.addi, [math.ctpop(ballot) for ballot in ballots])
        total = arith.sitofp(number, arith.maxsi(total, constant(1)))
        share = arith.divf(arith.constant(number, 1.0), total)
        # Queries `2p` and `2p + 1` of tile `i` have bits `8p + i` and `8p + 4 + i`.
        one = {"bf16": 0x3F80, "f16": 0x3C00}[self._kind]
        own = []
        for ballot in ballots:
            bits = arith.shrui(ballot, arith.shli(self._pair, constant(3)))
            high = arith.shli(arith.andi(bits, constant(0xF0)), constant(12))
            own.append(arith.ori(arith.andi(bits, constant(0xF)), high))
        lefts = []
        for tile in range(_TILES):
            ones = []
            for bits in own:
                bits = arith.andi(arith.shrui(bits, constant(tile)), constant(0x10001))
                ones.append(arith.muli(bits, constant(one)))
            lefts.append([ones[0], ones[0], ones[1], ones[1]])
        square = arith.constant(number, 0.0)
        pair_start = arith.addi(self._means, arith.shli(self._pair, constant(2)))
        for step in range(self._sizes.chunks // 2):
            sums = [mlir.zero_sums(), mlir.zero_sums()]
            for tile, left in enumerate(lefts):
                right = self._matrices(tile, step, transposed=True)
                for place in range(2):
                    pair = right[2 * place : 2 * place + 2]
                    sums[place] = mlir.multiply(self._kind, left, pair, sums[place])
            for place, chunk in enumerate(sums):
                rest = [arith.mulf(x, share) for x in chunk[:2]]
                for x in rest:
                    square = arith.addf(square, arith.mulf(x, x))
                parts = []
                for _ in range(_PARTS):
                    parts.append(self._pack(rest))
                    taken = self._unpack(parts[-1])
                    rest = [arith.subf(x, y) for x, y in zip(rest, taken, strict=True)]
                column = (2 * step + place) * 2 * _CHUNK
                for index, word in enumerate([*parts, constant(0)]):
                    where = arith.addi(pair_start, constant(index * self._sizes.head_dim + column))
                    _store(where, word)  # eight lanes store the same word
        for distance in (1, 2):
            square = arith.addf(square, mgpu.utils.shfl_bfly(square, distance))
        _wait_for_lanes()
        return square

    def _with_mean(self, tiles: list[list[list[ir.Value]]]) -> list[ir.Value]:
        """Returns products of the own queries with the mean, whose parts are separate columns."""
        constant, row = mlir.constant, self._sizes.head_dim
        matrix = arith.shrui(self._lane, constant(3))
        start = arith.addi(self._means, arith.muli(_bit(self._lane, 1), constant(row)))
        start = arith.addi(start, arith.muli(matrix, constant(2 * _CHUNK)))
        columns = []
        for first in (0, 2):
            some = range(0, self._sizes.chunks, 4)  # one matrix per eight lanes
            loads = [first * row + 2 * _CHUNK * chunk for chunk in some]
            found = [_load_matrices(start, offset, transposed=False) for offset in loads]
            columns.append([word for four in found for word in four])
        found = []
        for sums in self._multiply(tiles, columns):
            found.append([arith.addf(sums[0], sums[1]), arith.addf(sums[2], sums[3])])
        return self._of_own(found)

    def _multiply(
        self, tiles: list[list[list[ir.Value]]], columns: list[list[ir.Value]]
    ) -> list[list[ir.Value]]:
        """Multiplies all tiles with right operands, one word per chunk."""
        sums = [mlir.zero_sums() for _ in tiles]
        for right in columns:
            for step in range(self._sizes.chunks // 2):
                for index, tile in enumerate(tiles):
                    pair = right[2 * step : 2 * step + 2]
                    sums[index] = mlir.multiply(self._kind, tile[step], pair, sums[index])
        return sums

    def _of_own(self, found: list[list[ir.Value]]) -> list[ir.Value]:
        """Selects the own tile's numbers from those of all tiles."""
        low, high = (_is_set(self._pair, bit) for bit in (1, 2))
        own = []
        for first, second, third, fourth in zip(*found, strict=True):
            left, right = arith.select(low, second, first), arith.select(low, fourth, third)
            own.append(arith.select(high, right, left))
        return own

    def _walk(
        self,
        tiles: list[list[list[ir.Value]]],
        norms: list[ir.Value],
        distances: list[ir.Value],
        mean: ir.Value,
    ) -> None:
        """Takes queries one by one, as `_interpreted` does, and writes them."""
        sizes, constant, number = self._sizes, mlir.constant, ir.F32Type.get()
        bounds = [mlir.index(constant(x)) for x in (1, sizes.count, 1)]
        loop = scf.ForOp(*bounds, distances)
        with ir.InsertionPoint(loop.body):
            index = arith.index_cast(mlir.i32(), loop.induction_variable)
            distances = list(loop.inner_iter_args)
            keys = []
            for place, distance in zip(self._own, distances, strict=True):
                # Excluded queries have negative keys, whatever their low bits are.
                key = arith.andi(arith.bitcast(mlir.i32(), distance), constant(~_PLACES))
                keys.append(arith.ori(key, arith.subi(constant(_PLACES), place)))
            largest = mlir.over_lanes(arith.maxsi(*keys), nvvm.ReductionKind.MAX)
            is_left = mlir.compare("sge", largest, 0)
            step = scf.IfOp(is_left, [number] * 2, has_else=True)
            with ir.InsertionPoint(step.then_block):
                best = arith.subi(constant(_PLACES), arith.andi(largest, constant(_PLACES)))
                columns = self._columns(best)
                norm = self._norm(best)
                self._write(index, self._word(best))
                sums = self._multiply(tiles, [columns])
                products = self._of_own([[one[0], one[2]] for one in sums])
                nearer = []
                for place, distance, own, product in zip(
                    self._own, distances, norms, products, strict=True
                ):
                    # Ignore NaN distances; excluded queries stay excluded.
                    away = arith.minnumf(distance, _away(own, norm, product))
                    is_taken = mlir.compare("eq", place, best)
                    lost = arith.constant(number, -1.0)
                    nearer.append(arith.select(is_taken, lost, away))
                scf.yield_(nearer)
            with ir.InsertionPoint(step.else_block):
                self._write(index, mean)
                scf.yield_(distances)
            scf.yield_(list(step.results))

    def _columns(self, query: ir.Value) -> list[ir.Value]:
        """Loads a query as a right operand of equal columns, one word per chunk."""
        chunks, constant = self._sizes.chunks, mlir.constant
        found = []
        for start in range(0, chunks, 4):  # one matrix per eight lanes
            chunk = arith.addi(arith.shrui(self._lane, constant(3)), constant(start))
            found += _load_matrices(self._chunk(query, chunk), 0, transposed=False)
        return found

    def _chunk(self, query: ir.Value, chunk: ir.Value) -> ir.Value:
        """Returns the address of a chunk of a query."""
        per_piece = mlir.constant(self._sizes.chunks // 2)
        half, chunk = arith.divui(chunk, per_piece), arith.remui(chunk, per_piece)
        start = arith.muli(half, mlir.constant(_QUERIES * self._sizes.width))
        place, turn = self._address(query, chunk)
        return arith.addi(arith.addi(self._queries, start), arith.xori(place, turn))

    def _word_of_lane(self) -> ir.Value:
        """Returns the index of the lane's pair to write; with small heads, lanes share pairs."""
        return arith.andi(self._lane, mlir.constant(self._sizes.head_dim // 4 - 1))

    def _word(self, query: ir.Value) -> ir.Value:
        """Loads the lane's pair of a query."""
        word = self._word_of_lane()
        place = self._chunk(query, arith.shrui(word, mlir.constant(2)))
        return _load(arith.addi(place, arith.shli(self._pair, mlir.constant(2))))

    def _write(self, index: ir.Value, word: ir.Value) -> None:
        """Writes a word of a representative for each lane."""
        sizes, constant = self._sizes, mlir.constant
        pairs = sizes.head_dim // 4
        row = arith.addi(arith.muli(self._row, constant(sizes.count)), index)
        place = arith.addi(arith.muli(row, constant(sizes.heads)), self._head)
        place = arith.addi(arith.muli(place, constant(pairs)), self._lane)
        pointer = mgpu.utils.memref_ptr(self._out)
        pointer = mgpu.utils.getelementptr(pointer, [place], mlir.i32())
        has_word = mlir.compare("slt", self._lane, pairs)
        mgpu.utils.inline_ptx("st.global.b32 [$0], $1;", pointer, word, predicate=has_word)

    def _pack(self, pair: list[ir.Value]) -> ir.Value:
        """Packs two numbers in 16 bits each."""
        code = f"cvt.rn.{self._kind}x2.f32 $0, $2, $1;"
        return mlir.run(code, *pair)

    def _unpack(self, word: ir.Value) -> list[ir.Value]:
        """Unpacks two 16-bit numbers."""
        if self._kind == "bf16" and self._sizes.by_warp:  # Ampere lacks the instruction
            return mlir.unpack_bfloat16(word)
        code = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            f"cvt.f32.{self._kind} $0, low; cvt.f32.{self._kind} $1, high; }}"
        )
        return list(mgpu.utils.inline_ptx(code, word, result_types=[ir.F32Type.get()] * 2))


def _away(norm: ir.Value, other: ir.Value, product: ir.Value) -> ir.Value:
    """Returns the square of a distance."""
    number = ir.F32Type.get()
    twice = arith.mulf(product, arith.constant(number, 2.0))
    away = arith.subf(arith.addf(norm, other), twice)
    return arith.maximumf(away, arith.constant(number, 0.0))


def _bit(value: ir.Value, bit: int) -> ir.Value:
    """Masks one bit, in place."""
    return arith.andi(value, mlir.constant(bit))


def _is_set(value: ir.Value, bit: int) -> ir.Value:
    """Whether a bit is set."""
    return mlir.compare("ne", _bit(value, bit), 0)


def _wait_for_lanes() -> None:
    """Synchronizes the lanes of the warp, so that each sees the others' writes."""
    mlir.effect("bar.warp.sync 0xffffffff;", convergent=True)


def _load_matrices(place: ir.Value, offset: int, *, transposed: bool) -> list[ir.Value]:
    """Loads four matrices of 8 rows of 16 bytes; eight lanes hold each one's row addresses."""
    turned = ".trans" if transposed else ""
    code = f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    kinds = [mlir.i32()] * 4
    return mlir.ptx(code, place, kinds=kinds, convergent=True)


def _load(place: ir.Value) -> ir.Value:
    """Loads a word of shared memory."""
    code = "ld.shared.b32 $0, [$1];"
    return mgpu.utils.inline_ptx(code, place, result_types=mlir.i32(), has_side_effects=True)


def _store(place: ir.Value, word: ir.Value, predicate: ir.Value | None = None) -> None:
    """Writes a word of shared memory; all lanes stay together, whatever the predicate."""
    mlir.effect("st.shared.b32 [$0], $1;", place, word, predicate=predicate)


def representatives_kernel(
    query: Float[Array, "B T N H"],
    valid: Bool[Array, "B T"],
    *,
    count: int,
    by_warp: bool = False,
    interpret: bool = False,
) -> Float[Array, "B I R N C"]:
    """Selects `count` representatives per 64 queries and head, in the slow half of the channels.

    Args:
      query: Queries in 16 bits, of whole rows, with a head_dim of 64 or 128.
      valid: Mask of valid queries.
      count: Number of representatives.
      by_warp: Whether warps copy their queries, as on GPUs other than Hopper; otherwise TMA does.
      interpret: Whether the interpreter runs the kernel.
    """
    batch, tokens, heads, head_dim = query.shape
    rows, quarter = tokens // _QUERIES, head_dim // 4
    sizes = _Sizes(
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        count=count,
        kind=query.dtype,
        by_warp=by_warp,
    )
    shape = (batch, rows, count, heads, 2, quarter)
    size = (_HEADS, 2, _QUERIES, quarter)
    scratch: dict[str, Any] = {
        "queries": ops.tiled(size, query.dtype, swizzle=sizes.width),
        "norms": plgpu.SMEM((_HEADS, _QUERIES), jnp.float32),
        "means": plgpu.SMEM((_HEADS, _PARTS + 1, quarter), jnp.int32),
    }
    if not by_warp:
        scratch["filled"] = plgpu.Barrier(num_arrivals=2 * _HEADS)
    kernel = ops.kernel(
        functools.partial(_represent, sizes=sizes),
        out_type=jax.ShapeDtypeStruct(shape, query.dtype),
        scratch_types=scratch,
        grid=(batch, -(-rows * heads // _HEADS)),
        grid_names=("batch", "program"),
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="representatives",
    )
    found = kernel(query, valid.astype(jnp.int32))
    return found.reshape(batch, rows, count, heads, 2 * quarter)
