"""Products of one token's queries with keys at four bits, by single warps, from memory to maxima.

    peaks[p, j, n] = max_{s in page p of block j} q'_n · step_j code_s
    shared[j, n]   = q_n · centre_j

A page has 16 keys, a quarter of a block's.

A warp takes whole blocks of one key/value head and shares nothing with the others. It copies the
codes and steps of a block to shared memory (`cp.async`), `_STAGES - 1` blocks ahead. A thread then
reads 8 bytes of each of 8 rows, makes numbers of them in registers and multiplies with `mma.sync`.
Were the codes read to registers at once, the compiler would await all blocks together: it has six
counters for what a warp waits for.

*Which channel is where.* The sum over channels knows no order, so a thread keeps those it reads:
with `t` its place among the four threads of a row and `w` 32-bit words of codes for each, the bytes
`4 w t` to `4 w (t + 1)`; of these the low four bits are channels of the first half, the high ones
of the second. Queries and centres are read in the same places. The words of a product are bytes 0
and 2, then 1 and 3, of a word of codes.

*Numbers.* Codes are made float16 where they are (`four_bits`), and `q'` is float8_e4m3 times a
power of two, which is left to the end: all of it is exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import memref
from jaxlib.mlir.dialects import scf as typed_scf
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels.config import SCORED_PAGES
from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import row_ops
from sketchwalk_jax.pallas_kernels.page_scores import four_bits
from sketchwalk_jax.pallas_kernels.page_scores.four_bits import HIGH, LOW, NO_STEP

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
scf: Any = typed_scf

KEYS = 64  # of a block
QUERIES = 8  # of a product
MOST_BLOCKS = 64  # of a program: 16 rows of centres for each of four warps
_WORD = 4  # bytes
_STAGES = 2  # blocks that a warp has in shared memory: it works on one, the other is under way
_CHUNK = 16  # bytes that a thread copies at a time
_GROUPS = KEYS // 8  # of eight rows, one for each four threads
_TILES = KEYS // 16  # of the rows of a product
_LARGEST_SHIFT = 100  # of a query's power of two
_COPY = "cp.async.cg.shared.global"  # past the first cache
_TWICE = 0x40004000
# The larger numbers of two pairs without signs, `$1` and `x`, and float32 numbers `a` and `b` in
# float8_e4m3, as a pair `x` of float16.
_HOPPER = (
    "max.u16x2 $0, $1, x;",
    "cvt.rn.satfinite.e4m3x2.f32 e, b, a; cvt.rn.f16x2.e4m3x2 x, e;",
)
# Older GPUs have no instructions for these. Of pairs they keep the largest number alone. They round
# by a number whose last bit is what the last one of the result is, which is 2^-9 or more.
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


def room_of_codes(row_bytes: int) -> Any:
    """Shared memory that `block_products` needs, for the codes and steps of some blocks.

    Args:
      row_bytes: Of the codes of a key, a multiple of 16.
    """
    return plgpu.SMEM((row_ops.WARPS, _STAGES * _block_bytes(row_bytes)), jnp.int8)


def _block_bytes(row_bytes: int) -> int:
    """Of a block's codes and steps."""
    return (KEYS + 2) * row_bytes


def block_products(
    query: Any,
    code: Any,
    centre: Any,
    step: Any,
    peaks: Any,
    shared: Any,
    room: Any,
    *,
    kv_head: Array,
    group: int,
    first: Array,
    count: int,
    there: Array,
    length: Array,
    interpret: bool,
) -> None:
    """Writes what the blocks of a program give to shared memory, those that are there.

    Where a page has no key, its peaks are not finite.

    Args:
      query: Queries of one sequence `[N, H]`, bfloat16.
      code: As `BlockCodes` has it, of one sequence `[J, K, S, C/2]`.
      centre: Likewise, `[J, K, C]`.
      step: Likewise, `[J, K, C]`.
      peaks: The peaks of the module, `[4, 64, 8]` in shared memory, by page.
      shared: The other products, `[64, 8]`.
      room: Shared memory, `room_of_codes`.
      kv_head: Which key/value head.
      group: Query heads of each.
      first: The program's first block.
      count: Blocks of a program, a multiple of 4.
      there: Those of them that the sequence has.
      length: Keys of the sequence.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        _products_interpreted(
            query, code, centre, step, peaks, shared, kv_head, group, first, count, length
        )
        return
    reference, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(*(reference,) * 7, *(scalar,) * 4))
    def products(_: Any, query: Any, code: Any, centre: Any, step: Any, *rest: Any) -> None:
        peaks, shared, room, *numbers = rest
        numbers = [mlir.scalars(x)[0] for x in numbers]
        warp = _Warp(query, code, centre, step, peaks, shared, room, group, count, *numbers)
        warp.run()

    products(query, code, centre, step, peaks, shared, room, kv_head, first, there, length)


def _products_interpreted(
    query: Any,
    code: Any,
    centre: Any,
    step: Any,
    peaks: Any,
    shared: Any,
    kv_head: Array,
    group: int,
    first: Array,
    count: int,
    length: Array,
) -> None:
    num_blocks = code.shape[0]
    block = jnp.minimum(first + jnp.arange(count, dtype=jnp.int32), num_blocks - 1)
    code, centre, step = (jnp.take(x[:, kv_head], block, axis=0) for x in (code, centre, step))
    quarter = query.shape[1] // 4
    heads = jax.lax.dynamic_slice_in_dim(query[...], kv_head * group, group)
    heads = jnp.concatenate([heads[:, quarter : 2 * quarter], heads[:, 3 * quarter :]], axis=-1)
    heads = jnp.pad(heads, ((0, QUERIES - group), (0, 0))).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(heads), axis=1, keepdims=True), jnp.int32)
    is_above = (bits & 0x7FFFFF) > 0x600000
    shift = (bits >> 23) - 135 + is_above.astype(jnp.int32)
    shift = jnp.clip(shift, -_LARGEST_SHIFT, _LARGEST_SHIFT)
    up, down = _power_of_two(shift), _power_of_two(-shift)
    rounded = (heads * down).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    signed = jax.lax.bitcast_convert_type(code, jnp.int8).astype(jnp.int32)
    codes = jnp.concatenate([(signed << 28) >> 28, signed >> 4], axis=-1).astype(jnp.float32)
    beside = codes * _power_of_two(step.astype(jnp.int32))[:, None]
    products = jnp.einsum("jsc,nc->jsn", beside, rounded, precision=jax.lax.Precision.HIGHEST)
    place = block[:, None] * KEYS + jnp.arange(KEYS, dtype=jnp.int32)[None]
    is_key = (place < length) & (step[:, :1] != NO_STEP)
    products = jnp.where(is_key[..., None], products, -jnp.inf)
    found = jnp.max(products.reshape(count, SCORED_PAGES, -1, QUERIES), axis=2) * up.T[None]
    peaks[:, :count, :] = found.transpose(1, 0, 2)
    shared[:count, :] = jnp.dot(
        centre.astype(jnp.float32), heads.T, precision=jax.lax.Precision.HIGHEST
    )


def _power_of_two(exponent: Array) -> Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


class _Warp:
    """What one warp does; every value here is one thread's.

    A thread has row `lane / 4` of eight, and place `lane % 4` in it.
    """

    def __init__(
        self,
        query: ir.Value,
        code: ir.Value,
        centre: ir.Value,
        step: ir.Value,
        peaks: ir.Value,
        shared: ir.Value,
        room: ir.Value,
        group: int,
        count: int,
        kv_head: ir.Value,
        first: ir.Value,
        there: ir.Value,
        length: ir.Value,
    ) -> None:
        """Finds the thread's place."""
        self._query, self._code, self._centre, self._step = query, code, centre, step
        self._peaks, self._shared = peaks, shared
        self._group, self._count = group, count
        self._kv_head, self._first, self._length = kv_head, first, length
        _, self._kv_heads, _, self._row_bytes = ir.MemRefType(code.type).shape
        self._words = self._row_bytes // (4 * _WORD)  # of codes, in a row, of a thread
        self._lane, self._warp = mlir.lane(), mlir.warp()
        self._row = arith.shrui(self._lane, _int(2))
        self._place = arith.andi(self._lane, _int(3))
        self._channel = arith.muli(self._place, _int(_WORD * self._words))
        size = _int(_STAGES * _block_bytes(self._row_bytes))
        self._room = arith.addi(mlir.shared_pointer(room), arith.muli(self._warp, size))
        # Blocks of the warp that are there, of every four one.
        left = arith.subi(there, self._warp)
        self._own = arith.divui(arith.addi(left, _int(row_ops.WARPS - 1)), _int(row_ops.WARPS))

    def run(self) -> None:
        """All blocks of the warp: every fourth of the program."""
        blocks = self._count // row_ops.WARPS
        for index in range(_STAGES - 1):
            self._start_copy(_int(index))
        own = arith.muli(self._kv_head, _int(self._group))
        head = arith.addi(own, self._row)
        is_head = _flag(arith.cmpi(arith.CmpIPredicate.slt, self._row, _int(self._group)))
        width = ir.MemRefType(self._query.type).shape[1]
        place = arith.addi(arith.muli(head, _int(width)), self._channel)
        queries = [
            _load(_address(self._query, arith.addi(place, _int(start))), 2 * self._words, is_head)
            for start in (width // 4, 3 * width // 4)
        ]
        centres = [self._load_centres(8 * part) for part in range(-(-blocks // 8))]
        pairs = [four_bits.in_pairs(x) for x in queries]
        self._write_shared(pairs, centres)
        rounded, scale = self._round(pairs)
        # The two columns of a product that a thread has are queries of other threads' rows.
        first_column = arith.shli(self._place, _int(3))
        scales = [
            _shuffle(scale, arith.addi(first_column, _int(4 * column))) for column in range(2)
        ]
        scales = [arith.bitcast(ir.F32Type.get(), x) for x in scales]

        bounds = [mlir.index(x) for x in (_int(0), self._own, _int(1))]
        loop = scf.ForOp(*bounds, [])
        with ir.InsertionPoint(loop.body):
            index = arith.index_cast(_i32(), loop.induction_variable)
            self._await_copy()
            # Into the place of the block before, which all lanes have read.
            self._start_copy(arith.addi(index, _int(_STAGES - 1)))
            self._write_peaks(self._read(index), self._local(index), rounded, scales)
            scf.yield_([])

    # Memory

    def _local(self, index: ir.Value) -> ir.Value:
        """Place in the program of a warp's block."""
        return arith.addi(arith.muli(index, _int(row_ops.WARPS)), self._warp)

    def _stage(self, index: ir.Value) -> ir.Value:
        """Where a warp's block lies in shared memory: codes, then steps."""
        stage = arith.remui(index, _int(_STAGES))
        return arith.addi(self._room, arith.muli(stage, _int(_block_bytes(self._row_bytes))))

    def _start_copy(self, index: ir.Value) -> None:
        """Starts to copy one block, if it is there: a warp 512 adjacent bytes at a time."""
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index, self._own)):
            block = arith.addi(self._first, self._local(index))
            offset = arith.muli(self._lane, _int(_CHUNK))
            target = arith.addi(self._stage(index), offset)
            size, at_once = KEYS * self._row_bytes, mlir.LANES * _CHUNK
            place = arith.muli(self._row_of_block(block), _int(size))
            source = _address(self._code, arith.addi(place, offset))
            for start in range(0, size, at_once):
                _copy(target, source, start, start)
            has_steps = arith.cmpi(arith.CmpIPredicate.ult, offset, _int(2 * self._row_bytes))
            with mgpu.when(has_steps):
                source = _address(self._step, arith.addi(self._place_of_block(block), offset))
                _copy(target, source, size, 0)
        mgpu.utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    def _await_copy(self) -> None:
        """Waits until all lanes have copied the next block."""
        code = f"cp.async.wait_group {_STAGES - 2}; bar.warp.sync 0xffffffff;"
        mgpu.utils.inline_ptx(code, has_side_effects=True, convergent=True)

    def _read(self, index: ir.Value) -> list[ir.Value]:
        """The codes of one block, a row of each group, and its steps."""
        start = arith.addi(self._stage(index), self._channel)
        own = arith.addi(start, arith.muli(self._row, _int(self._row_bytes)))
        found: list[ir.Value] = []
        for group in range(_GROUPS):
            offset = 8 * group * self._row_bytes
            found += _load(own, self._words, offset=offset, space="shared")
        for half in (LOW, HIGH):
            offset = (KEYS + half) * self._row_bytes
            found += _load(start, self._words, offset=offset, space="shared")
        return found

    def _row_of_block(self, block: ir.Value) -> ir.Value:
        """Its number among the blocks of all heads."""
        return arith.addi(arith.muli(block, _int(self._kv_heads)), self._kv_head)

    def _place_of_block(self, block: ir.Value) -> ir.Value:
        """Of its first channel in centres and steps."""
        return arith.muli(self._row_of_block(block), _int(2 * self._row_bytes))

    def _load_centres(self, start: int) -> tuple[ir.Value, list[list[ir.Value]]]:
        """The centre of the warp's block of this thread's row, from one on, and its place."""
        index = arith.addi(self._row, _int(start))
        local = self._local(index)
        is_there = _flag(arith.cmpi(arith.CmpIPredicate.ult, index, self._own))
        place = self._place_of_block(arith.addi(self._first, local))
        pointer = _address(self._centre, arith.addi(place, self._channel))
        halves = [
            _load(pointer, 2 * self._words, is_there, offset=2 * half * self._row_bytes)
            for half in (LOW, HIGH)
        ]
        return local, [four_bits.in_pairs(x) for x in halves]

    # Numbers

    def _round(self, pairs: list[list[ir.Value]]) -> tuple[list[list[ir.Value]], ir.Value]:
        """Twice the queries in eight bits, as float16, and the power of two that they lack."""
        larger, in_eight_bits = _HOPPER if mgpu.utils.get_arch().major >= 9 else _AMPERE
        peak = _int(0)
        for pair in (x for half in pairs for x in half):
            code = f"{{ .reg .b32 x, y; and.b32 x, $2, 0x7fff7fff; {larger} }}"
            peak = mlir.run(code, peak, pair)
        for distance in (1, 2):
            code = f"{{ .reg .b32 x, y; mov.b32 x, $2; {larger} }}"
            peak = mlir.run(code, peak, mgpu.utils.shfl_bfly(peak, distance))
        peak = arith.maxui(arith.shrui(peak, _int(16)), arith.andi(peak, _int(0xFFFF)))
        # 448 is 1.75 · 2^8.
        is_above = arith.cmpi(arith.CmpIPredicate.sgt, arith.andi(peak, _int(0x7F)), _int(0x60))
        shift = arith.addi(arith.shrui(peak, _int(7)), _int(-135))
        shift = arith.addi(shift, _flag(is_above))
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
        centres: list[tuple[ir.Value, list[list[ir.Value]]]],
    ) -> None:
        """The products with the centres: the rows of one product are up to 16 blocks."""
        zero = arith.constant(ir.F32Type.get(), 0.0)
        none = [[_int(0)] * len(half) for half in pairs]
        both = [found for _, found in centres] + [none] * (2 - len(centres))
        total = [zero] * 4
        for half in (LOW, HIGH):
            for word in range(self._words):
                left = [rows[half][2 * word + k] for k in range(2) for rows in both]
                right = pairs[half][2 * word : 2 * word + 2]
                total = _multiply("bf16", left, right, total)
        for part, (local, _) in enumerate(centres):
            self._store_shared(local, total[2 * part : 2 * part + 2])

    def _write_peaks(
        self,
        held: list[ir.Value],
        local: ir.Value,
        rounded: list[list[ir.Value]],
        scales: list[ir.Value],
    ) -> None:
        """The largest products with the keys of each page of one block."""
        words = self._words
        codes, steps = held[: _GROUPS * words], held[_GROUPS * words :]
        factors = [
            four_bits.factors(steps[half * words : (half + 1) * words], half)
            for half in (LOW, HIGH)
        ]
        block = arith.addi(self._first, local)
        left = arith.subi(self._length, arith.muli(block, _int(KEYS)))
        left = arith.select(four_bits.is_empty(steps), _int(0), left)
        f32 = ir.F32Type.get()
        least, zero = arith.constant(f32, -float("inf")), arith.constant(f32, 0.0)
        found: list[list[ir.Value]] = []  # of each tile the larger of a thread's two rows
        for tile in range(_TILES):
            total = []
            for group in (2 * tile, 2 * tile + 1):
                row = arith.addi(self._row, _int(8 * group))
                is_key = arith.cmpi(arith.CmpIPredicate.slt, row, left)
                total += [arith.select(is_key, zero, least)] * 2  # whatever is added, none
            for word in range(words):
                rows = [codes[group * words + word] for group in (2 * tile, 2 * tile + 1)]
                rows += [arith.shrui(x, _int(8)) for x in rows]
                for half in (LOW, HIGH):
                    numbers = [
                        four_bits.numbers(x, half, *factors[half][2 * word + index // 2])
                        for index, x in enumerate(rows)
                    ]
                    right = rounded[half][2 * word : 2 * word + 2]
                    total = _multiply("f16", numbers, right, total)
            found.append([_larger(*total[column::2]) for column in range(2)])
        self._store_peaks(found, local, scales)

    def _store_peaks(
        self, peaks: list[list[ir.Value]], local: ir.Value, scales: list[ir.Value]
    ) -> None:
        """Writes the largest of all rows, of two columns of four pages: a thread of each row one.

        Of the numbers that two rows have, each goes on with half: with the column of the row's
        lowest bit, then with the pages of its other bits.
        """
        bits = [
            arith.cmpi(arith.CmpIPredicate.ne, arith.andi(self._row, _int(1 << bit)), _int(0))
            for bit in range(3)
        ]
        values = [_larger_of_rows(columns, bits[0], 4) for columns in peaks]
        values = [_larger_of_rows(values[two : two + 2], bits[1], 8) for two in (0, 2)]
        value = _larger_of_rows(values, bits[2], 16)
        value = arith.mulf(value, arith.select(bits[0], scales[1], scales[0]))
        page = arith.shrui(self._row, _int(1))
        column = arith.addi(arith.shli(self._place, _int(1)), arith.andi(self._row, _int(1)))
        memref.store(value, self._peaks, [mlir.index(x) for x in (page, local, column)])

    def _store_shared(self, local: ir.Value, values: list[ir.Value]) -> None:
        """Writes the two columns of this thread."""
        column = arith.shli(self._place, _int(1))
        for index, value in enumerate(values):
            place = arith.addi(column, _int(index))
            memref.store(value, self._shared, [mlir.index(local), mlir.index(place)])


def _larger(left: ir.Value, right: ir.Value) -> ir.Value:
    """The larger number; of a number and NaN the number."""
    return mgpu.utils.inline_ptx("max.f32 $0, $1, $2;", left, right, result_types=left.type)


def _larger_of_rows(pair: list[ir.Value], bit: ir.Value, distance: int) -> ir.Value:
    """The larger second number of two lanes at a distance, for the one whose bit is set.

    For the other one it is the larger first number.
    """
    low, high = pair
    own, other = arith.select(bit, high, low), arith.select(bit, low, high)
    return _larger(own, mgpu.utils.shfl_bfly(other, distance))


def _shuffle(value: ir.Value, lane: ir.Value) -> ir.Value:
    """What another lane of the warp has."""
    code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return mgpu.utils.inline_ptx(code, value, lane, result_types=value.type, has_side_effects=True)


def _copy(target: ir.Value, source: ir.Value, offset: int, from_start: int) -> None:
    """Starts to copy 16 bytes to shared memory."""
    code = f"{_COPY} [$0 + {offset}], [$1 + {from_start}], {_CHUNK};"
    mgpu.utils.inline_ptx(code, target, source, has_side_effects=True)


def _flag(condition: ir.Value) -> ir.Value:
    """1 or 0."""
    return arith.extui(_i32(), condition)


_i32, _int, _address, _multiply = (
    mlir.i32,
    mlir.constant,
    mlir.address,
    mlir.multiply,
)
_load = mlir.load
