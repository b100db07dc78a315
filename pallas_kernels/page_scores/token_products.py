"""Page max logits of one token's queries with 4-bit keys, computed by single warps.

    max_logits[p, j, n] = max_{s in page p of block j} q'_n · scale_j quantized_s
    shared[j, n]   = q_n · zero_point_j

A page has 16 keys, a quarter of a block. `zero_point` is a block's zero point, `scale_j` its
scale, `2 ** scale_exponent`.

A warp has whole blocks of one key/value head and shares nothing with other warps. It copies a
block's quantized keys and scales to shared memory (`cp.async`), `_STAGES - 1` blocks ahead. A
thread then reads 8 bytes of each of 8 rows, dequantizes them in registers and multiplies with
`mma.sync`. With direct loads to registers, the compiler would wait for all blocks together, since a
warp has only six counters for pending loads.

*Order of channels.* The order of channels in a sum is free, so a thread multiplies the channels
that it reads: with `t` its place among the four threads of a row and `w` 32-bit words for each, the
bytes `4 w t` to `4 w (t + 1)`. Their low four bits are channels of the first half, the high ones of
the second. Queries and zero points are read in the same order. The words of a product are bytes 0
and 2, then 1 and 3, of a quantized word.

*Numbers.* Threads dequantize keys to float16 in place (`four_bits`), and `q'` is float8_e4m3 times
a power of two, which is applied at the end. All of this is exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels.config import SCORED_PAGES
from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, scf
from sketchwalk_jax.pallas_kernels.page_scores import four_bits
from sketchwalk_jax.pallas_kernels.page_scores.four_bits import HIGH, LOW, NO_SCALE
from sketchwalk_jax.scaled import power_of_two

KEYS = 64  # per block
QUERIES = 8  # per product
MOST_BLOCKS = 64  # per thread block: 16 rows of zero points for each of four warps
_WORD = 4  # bytes
_STAGES = 2  # blocks per warp in shared memory: one in use, one in flight
_CHUNK = 16  # bytes that a thread copies at a time
_GROUPS = KEYS // 8  # groups of eight rows, one row per four threads
_TILES = KEYS // 16  # tiles of a product's 16 rows
_LARGEST_SHIFT = 100  # largest exponent of a query's power of two
_COPY = "cp.async.cg.shared.global"  # bypasses L1
_TWICE = 0x40004000
# Hopper's PTX for the maxima of two pairs of magnitudes, `$1` and `x`; and for rounding float32 `a`
# and `b` to float8_e4m3, as a pair `x` of float16.
_HOPPER = (
    "max.u16x2 $0, $1, x;",
    "cvt.rn.satfinite.e4m3x2.f32 e, b, a; cvt.rn.f16x2.e4m3x2 x, e;",
)
# Older GPUs lack these instructions. They keep only the largest number of both pairs, and round by
# adding a number whose last bit has the value of the result's last bit, at least 2^-9.
_AMPERE = (
    "shr.u32 y, x, 16; max.u32 y, y, $1; and.b32 x, x, 0xffff; max.u32 $0, x, y;",
    " ".join(
        f"min.NaN.f32 {x}, {x}, 0f43E00000; max.NaN.f32 {x}, {x}, 0fC3E00000; "  # 448
        f"mov.b32 x, {x}; and.b32 x, x, 0x7f800000; max.u32 x, x, 0x3c800000; mov.b32 c, x; "
        f"mul.f32 c, c, 0f49C00000; add.rn.f32 {x}, {x}, c; sub.rn.f32 {x}, {x}, c;"
        for x in ("a", "b")
    )
    + " cvt.rn.f16x2.f32 x, b, a;",
)


def room_of_keys(row_bytes: int) -> Any:
    """Returns the shared memory of `block_products`, for quantized keys and scales of some blocks.

    Args:
      row_bytes: Quantized bytes per key, a multiple of 16.
    """
    return plgpu.SMEM((row_ops.WARPS, _STAGES * _block_bytes(row_bytes)), jnp.int8)


def _block_bytes(row_bytes: int) -> int:
    """Returns the bytes of a block's quantized keys and scales."""
    return (KEYS + 2) * row_bytes


def block_products(
    query: Any,
    quantized: Any,
    zero_point: Any,
    scale_exponent: Any,
    max_logits: Any,
    shared: Any,
    room: Any,
    *,
    kv_head: Array,
    group: int,
    first: Array,
    count: int,
    there: Array,
    length: Array,
) -> None:
    """Writes the products of a thread block's existing key blocks to shared memory.

    Pages without a key get non-finite maxima.

    Args:
      query: Queries of one sequence `[N, H]`, bfloat16.
      quantized: Quantized keys as in `QuantizedKeys`, of one sequence `[J, K, S, C/2]`.
      zero_point: Zero points, likewise, `[J, K, C]`.
      scale_exponent: Exponents of the scales, likewise, `[J, K, C]`.
      max_logits: Target of the module's `max_logits`, `[4, 64, 8]` in shared memory, by page.
      shared: Target of the module's `shared`, `[64, 8]`.
      room: Shared memory, `room_of_keys`.
      kv_head: Index of the key/value head.
      group: Query heads per key/value head.
      first: First key block of the thread block.
      count: Key blocks per thread block, a multiple of 4.
      there: Number of these that exist in the sequence.
      length: Number of keys in the sequence.
    """
    if ops.is_interpreted():
        _products_interpreted(
            query,
            quantized,
            zero_point,
            scale_exponent,
            max_logits,
            shared,
            kv_head,
            group,
            first,
            count,
            length,
        )
        return
    refs = (query, quantized, zero_point, scale_exponent, max_logits, shared, room)

    @mlir.emit(*refs, numbers=(kv_head, first, there, length))
    def _(*values: Any) -> None:
        _Warp(group, count, *values).run()


def _products_interpreted(
    query: Any,
    quantized: Any,
    zero_point: Any,
    scale_exponent: Any,
    max_logits: Any,
    shared: Any,
    kv_head: Array,
    group: int,
    first: Array,
    count: int,
    length: Array,
) -> None:
    num_blocks = quantized.shape[0]
    block = jnp.minimum(first + jnp.arange(count, dtype=jnp.int32), num_blocks - 1)
    quantized, zero_point, scale_exponent = (
        jnp.take(x[:, kv_head], block, axis=0) for x in (quantized, zero_point, scale_exponent)
    )
    quarter = query.shape[1] // 4
    heads = jax.lax.dynamic_slice_in_dim(query[...], kv_head * group, group)
    heads = jnp.concatenate([heads[:, quarter : 2 * quarter], heads[:, 3 * quarter :]], axis=-1)
    heads = jnp.pad(heads, ((0, QUERIES - group), (0, 0))).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(heads), axis=1, keepdims=True), jnp.int32)
    is_above = (bits & 0x7FFFFF) > 0x600000
    shift = (bits >> 23) - 135 + is_above.astype(jnp.int32)
    shift = jnp.clip(shift, -_LARGEST_SHIFT, _LARGEST_SHIFT)
    up, down = power_of_two(shift), power_of_two(-shift)
    rounded = (heads * down).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    signed = jax.lax.bitcast_convert_type(quantized, jnp.int8).astype(jnp.int32)
    stored = jnp.concatenate([(signed << 28) >> 28, signed >> 4], axis=-1).astype(jnp.float32)
    beside = stored * power_of_two(scale_exponent.astype(jnp.int32))[:, None]
    products = jnp.einsum("jsc,nc->jsn", beside, rounded, precision=jax.lax.Precision.HIGHEST)
    place = block[:, None] * KEYS + jnp.arange(KEYS, dtype=jnp.int32)[None]
    is_key = (place < length) & (scale_exponent[:, :1] != NO_SCALE)
    products = jnp.where(is_key[..., None], products, -jnp.inf)
    found = jnp.max(products.reshape(count, SCORED_PAGES, -1, QUERIES), axis=2) * up.T[None]
    max_logits[:, :count, :] = found.transpose(1, 0, 2)
    shared[:count, :] = jnp.dot(
        zero_point.astype(jnp.float32), heads.T, precision=jax.lax.Precision.HIGHEST
    )


class _Warp:
    """The work of one warp; values are per thread.

    A thread has row `lane / 4` of eight, and place `lane % 4` within it.
    """

    def __init__(
        self,
        group: int,
        count: int,
        query: ir.Value,
        quantized: ir.Value,
        zero_point: ir.Value,
        scale_exponent: ir.Value,
        max_logits: ir.Value,
        shared: ir.Value,
        room: ir.Value,
        kv_head: ir.Value,
        first: ir.Value,
        there: ir.Value,
        length: ir.Value,
    ) -> None:
        """Computes the thread's addresses."""
        self._query, self._quantized, self._zero_point, self._scale_exponent = (
            query,
            quantized,
            zero_point,
            scale_exponent,
        )
        self._max_logits, self._shared = max_logits, shared
        self._group, self._count = group, count
        self._kv_head, self._first, self._length = kv_head, first, length
        _, self._kv_heads, _, self._row_bytes = ir.MemRefType(quantized.type).shape
        self._words = self._row_bytes // (4 * _WORD)  # quantized words per key and thread
        self._lane, self._warp = mlir.lane(), mlir.warp()
        self._row = arith.shrui(self._lane, _int(2))
        self._place = arith.andi(self._lane, _int(3))
        self._channel = arith.muli(self._place, _int(_WORD * self._words))
        size = _int(_STAGES * _block_bytes(self._row_bytes))
        self._room = arith.addi(mlir.shared_pointer(room), arith.muli(self._warp, size))
        # Number of the warp's existing blocks: every fourth one.
        left = arith.subi(there, self._warp)
        self._own = arith.divui(arith.addi(left, _int(row_ops.WARPS - 1)), _int(row_ops.WARPS))

    def run(self) -> None:
        """Processes all blocks of the warp: every fourth of the thread block's."""
        blocks = self._count // row_ops.WARPS
        for index in range(_STAGES - 1):
            self._start_copy(_int(index))
        own = arith.muli(self._kv_head, _int(self._group))
        head = arith.addi(own, self._row)
        is_head = mlir.flag(mlir.compare("slt", self._row, self._group))
        width = ir.MemRefType(self._query.type).shape[1]
        place = arith.addi(arith.muli(head, _int(width)), self._channel)
        queries = []
        for start in (width // 4, 3 * width // 4):
            pointer = mlir.address(self._query, arith.addi(place, _int(start)))
            queries.append(mlir.load(pointer, 2 * self._words, is_head))
        zero_points = [self._load_zero_points(8 * part) for part in range(-(-blocks // 8))]
        pairs = [four_bits.in_pairs(x) for x in queries]
        self._write_shared(pairs, zero_points)
        rounded, scale = self._round(pairs)
        # A thread's two columns of a product are queries whose scales other threads have.
        first_column = arith.shli(self._place, _int(3))
        scales = [
            _shuffle(scale, arith.addi(first_column, _int(4 * column))) for column in range(2)
        ]
        scales = [arith.bitcast(ir.F32Type.get(), x) for x in scales]

        bounds = [mlir.index(x) for x in (_int(0), self._own, _int(1))]
        loop = scf.ForOp(*bounds, [])
        with ir.InsertionPoint(loop.body):
            index = arith.index_cast(mlir.i32(), loop.induction_variable)
            self._await_copy()
            # This overwrites the previous block, which all lanes have read.
            self._start_copy(arith.addi(index, _int(_STAGES - 1)))
            self._write_max_logits(self._read(index), self._local(index), rounded, scales)
            scf.yield_([])

    # Memory

    def _local(self, index: ir.Value) -> ir.Value:
        """Returns the index of a warp's block in the thread block."""
        return arith.addi(arith.muli(index, _int(row_ops.WARPS)), self._warp)

    def _stage(self, index: ir.Value) -> ir.Value:
        """Returns the shared-memory address of a warp's block: quantized keys, then scales."""
        stage = arith.remui(index, _int(_STAGES))
        return arith.addi(self._room, arith.muli(stage, _int(_block_bytes(self._row_bytes))))

    def _start_copy(self, index: ir.Value) -> None:
        """Starts to copy one block, if it exists, in 512 adjacent bytes per warp at a time."""
        with mgpu.when(mlir.compare("ult", index, self._own)):
            block = arith.addi(self._first, self._local(index))
            offset = arith.muli(self._lane, _int(_CHUNK))
            target = arith.addi(self._stage(index), offset)
            size, at_once = KEYS * self._row_bytes, mlir.LANES * _CHUNK
            place = arith.muli(self._row_of_block(block), _int(size))
            source = mlir.address(self._quantized, arith.addi(place, offset))
            for start in range(0, size, at_once):
                _copy(target, source, start, start)
            has_steps = mlir.compare("ult", offset, 2 * self._row_bytes)
            with mgpu.when(has_steps):
                source = mlir.address(
                    self._scale_exponent, arith.addi(self._place_of_block(block), offset)
                )
                _copy(target, source, size, 0)
        mlir.effect("cp.async.commit_group;")

    def _await_copy(self) -> None:
        """Waits until all lanes have copied the next block."""
        code = f"cp.async.wait_group {_STAGES - 2}; bar.warp.sync 0xffffffff;"
        mlir.effect(code, convergent=True)

    def _read(self, index: ir.Value) -> list[ir.Value]:
        """Reads a block's quantized keys, one row per group, and its scale exponents."""
        start = arith.addi(self._stage(index), self._channel)
        own = arith.addi(start, arith.muli(self._row, _int(self._row_bytes)))
        found: list[ir.Value] = []
        for group in range(_GROUPS):
            offset = 8 * group * self._row_bytes
            found += mlir.load(own, self._words, offset=offset, space="shared")
        for half in (LOW, HIGH):
            offset = (KEYS + half) * self._row_bytes
            found += mlir.load(start, self._words, offset=offset, space="shared")
        return found

    def _row_of_block(self, block: ir.Value) -> ir.Value:
        """Returns a block's index among the blocks of all heads."""
        return arith.addi(arith.muli(block, _int(self._kv_heads)), self._kv_head)

    def _place_of_block(self, block: ir.Value) -> ir.Value:
        """Returns the offset of a block's first channel in zero points and scales."""
        return arith.muli(self._row_of_block(block), _int(2 * self._row_bytes))

    def _load_zero_points(self, start: int) -> tuple[ir.Value, list[list[ir.Value]]]:
        """Loads the zero point of the warp's block `start` plus the thread's row; and its index."""
        index = arith.addi(self._row, _int(start))
        local = self._local(index)
        is_there = mlir.flag(mlir.compare("ult", index, self._own))
        place = self._place_of_block(arith.addi(self._first, local))
        pointer = mlir.address(self._zero_point, arith.addi(place, self._channel))
        halves = [
            mlir.load(pointer, 2 * self._words, is_there, offset=2 * half * self._row_bytes)
            for half in (LOW, HIGH)
        ]
        return local, [four_bits.in_pairs(x) for x in halves]

    # Numbers

    def _round(self, pairs: list[list[ir.Value]]) -> tuple[list[list[ir.Value]], ir.Value]:
        """Rounds queries to eight bits in float16, doubled; also returns their power of two."""
        larger, in_eight_bits = _HOPPER if mgpu.utils.get_arch().major >= 9 else _AMPERE
        largest = _int(0)
        for pair in (x for half in pairs for x in half):
            code = f"{{ .reg .b32 x, y; and.b32 x, $2, 0x7fff7fff; {larger} }}"
            largest = mlir.run(code, largest, pair)
        for distance in (1, 2):
            code = f"{{ .reg .b32 x, y; mov.b32 x, $2; {larger} }}"
            largest = mlir.run(code, largest, mgpu.utils.shfl_bfly(largest, distance))
        largest = arith.maxui(arith.shrui(largest, _int(16)), arith.andi(largest, _int(0xFFFF)))
        # 448 is 1.75 · 2^8.
        is_above = mlir.compare("sgt", arith.andi(largest, _int(0x7F)), 0x60)
        shift = arith.addi(arith.shrui(largest, _int(7)), _int(-135))
        shift = arith.addi(shift, mlir.flag(is_above))
        shift = arith.minsi(arith.maxsi(shift, _int(-_LARGEST_SHIFT)), _int(_LARGEST_SHIFT))
        up, down = (
            arith.shli(arith.addi(x, _int(127)), _int(23))
            for x in (shift, arith.subi(_int(0), shift))
        )
        code = (
            "{ .reg .f32 a, b, c; .reg .b32 x, y; .reg .b16 e; shl.b32 x, $1, 16; "
            "and.b32 y, $1, 0xffff0000; mov.b32 a, x; mov.b32 b, y; mul.f32 a, a, $2; "
            f"mul.f32 b, b, $2; {in_eight_bits} mov.b32 y, {_TWICE}; mul.rn.f16x2 $0, x, y; }}"
        )
        factor = arith.bitcast(ir.F32Type.get(), down)
        return [[mlir.run(code, x, factor) for x in half] for half in pairs], up

    def _write_shared(
        self,
        pairs: list[list[ir.Value]],
        zero_points: list[tuple[ir.Value, list[list[ir.Value]]]],
    ) -> None:
        """Writes the products with the zero points, up to 16 blocks per product."""
        zero = arith.constant(ir.F32Type.get(), 0.0)
        none = [[_int(0)] * len(half) for half in pairs]
        both = [found for _, found in zero_points] + [none] * (2 - len(zero_points))
        total = [zero] * 4
        for half in (LOW, HIGH):
            for word in range(self._words):
                left = [rows[half][2 * word + k] for k in range(2) for rows in both]
                right = pairs[half][2 * word : 2 * word + 2]
                total = mlir.multiply("bf16", left, right, total)
        for part, (local, _) in enumerate(zero_points):
            self._store_shared(local, total[2 * part : 2 * part + 2])

    def _write_max_logits(
        self,
        held: list[ir.Value],
        local: ir.Value,
        rounded: list[list[ir.Value]],
        scales: list[ir.Value],
    ) -> None:
        """Writes the largest products with the keys of each page of one block."""
        words = self._words
        stored, scale_exponents = held[: _GROUPS * words], held[_GROUPS * words :]
        factors = [
            four_bits.factors(scale_exponents[half * words : (half + 1) * words], half)
            for half in (LOW, HIGH)
        ]
        block = arith.addi(self._first, local)
        left = arith.subi(self._length, arith.muli(block, _int(KEYS)))
        left = arith.select(four_bits.is_empty(scale_exponents), _int(0), left)
        f32 = ir.F32Type.get()
        least, zero = arith.constant(f32, -float("inf")), arith.constant(f32, 0.0)
        found: list[list[ir.Value]] = []  # per tile, the maxima of a thread's two rows
        for tile in range(_TILES):
            total = []
            for group in (2 * tile, 2 * tile + 1):
                row = arith.addi(self._row, _int(8 * group))
                is_key = mlir.compare("slt", row, left)
                total += [arith.select(is_key, zero, least)] * 2  # masks missing keys
            for word in range(words):
                rows = [stored[group * words + word] for group in (2 * tile, 2 * tile + 1)]
                rows += [arith.shrui(x, _int(8)) for x in rows]
                for half in (LOW, HIGH):
                    numbers = [
                        four_bits.numbers(x, half, *factors[half][2 * word + index // 2])
                        for index, x in enumerate(rows)
                    ]
                    right = rounded[half][2 * word : 2 * word + 2]
                    total = mlir.multiply("f16", numbers, right, total)
            found.append([_larger(*total[column::2]) for column in range(2)])
        self._store_max_logits(found, local, scales)

    def _store_max_logits(
        self, max_logits: list[list[ir.Value]], local: ir.Value, scales: list[ir.Value]
    ) -> None:
        """Reduces over rows and writes two columns of four pages, one number per thread of a row.

        In each exchange two rows split their numbers: by column for the row's lowest bit, then by
        page for its other bits.
        """
        bits = [mlir.compare("ne", arith.andi(self._row, _int(1 << bit)), 0) for bit in range(3)]
        values = [_larger_of_rows(columns, bits[0], 4) for columns in max_logits]
        values = [_larger_of_rows(values[two : two + 2], bits[1], 8) for two in (0, 2)]
        value = _larger_of_rows(values, bits[2], 16)
        value = arith.mulf(value, arith.select(bits[0], scales[1], scales[0]))
        page = arith.shrui(self._row, _int(1))
        column = arith.addi(arith.shli(self._place, _int(1)), arith.andi(self._row, _int(1)))
        memref.store(value, self._max_logits, [mlir.index(x) for x in (page, local, column)])

    def _store_shared(self, local: ir.Value, values: list[ir.Value]) -> None:
        """Writes the thread's two columns."""
        column = arith.shli(self._place, _int(1))
        for index, value in enumerate(values):
            place = arith.addi(column, _int(index))
            memref.store(value, self._shared, [mlir.index(local), mlir.index(place)])


def _larger(left: ir.Value, right: ir.Value) -> ir.Value:
    """Returns the larger number, ignoring NaN."""
    return mgpu.utils.inline_ptx("max.f32 $0, $1, $2;", left, right, result_types=left.type)


def _larger_of_rows(pair: list[ir.Value], bit: ir.Value, distance: int) -> ir.Value:
    """Returns the maximum over two lanes at a distance.

    The lane whose bit is set gets the maximum of the second numbers, the other lane of the first.
    """
    low, high = pair
    own, other = arith.select(bit, high, low), arith.select(bit, low, high)
    return _larger(own, mgpu.utils.shfl_bfly(other, distance))


def _shuffle(value: ir.Value, lane: ir.Value) -> ir.Value:
    """Returns the value of another lane of the warp."""
    code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return mgpu.utils.inline_ptx(code, value, lane, result_types=value.type, has_side_effects=True)


def _copy(target: ir.Value, source: ir.Value, offset: int, from_start: int) -> None:
    """Starts to copy 16 bytes to shared memory."""
    code = f"{_COPY} [$0 + {offset}], [$1 + {from_start}], {_CHUNK};"
    mlir.effect(code, target, source)


_int = mlir.constant
