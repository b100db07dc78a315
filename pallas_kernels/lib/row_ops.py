"""Operations on rows in registers that Pallas lacks, with implementations for the interpreter.

A row is in the registers of one or several warpgroups (4 warps of 32 threads each). The operations
emit per-thread code in MLIR: the 32 lanes of a warp reduce and vote in one instruction, warps
exchange results through a few words of shared memory, and each step costs one barrier.

Layouts and shared memory come first, then operations from the smallest to the largest: a barrier,
maxima, finding the least key to keep, writing a row, writing the kept columns of a row, adding up
the parts of a row.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, memref, nvvm, vector
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, llvm, math, scf
from sketchwalk_jax.scaled import NO_EXPONENT, power_of_two, replace

WARPS, LANES = 4, mlir.LANES  # warps of a warpgroup, threads of a warp
THREADS = WARPS * LANES
_AHEAD = 64  # registers per thread for prefetched numbers
_MOST_AHEAD = 8  # most of these per head
_HEADS_AT_ONCE = 16  # heads read before they are added up
ADJACENT = 4  # adjacent columns of a tile per thread, 16 bytes
PAIR = 2  # adjacent channels of a key per thread
_PACKED = 2  # bfloat16 numbers per word
BIN_BITS = 11
"""Logarithm of the number of bins of a histogram."""
LAST_BIN = (1 << BIN_BITS) - 1
"""Its highest bin."""
_BINS = 1 << BIN_BITS
_BELOW = 1 << 30  # number in the lowest bin, so that it always has the key to find
_CANDIDATES = 8  # keys per warp that are compared with each other
_NUMBERS = 4  # three results, and the number of candidates so far
_PER_WARP = 2 + _CANDIDATES  # words
_BYTE, _WORD_BYTES = 8, 4  # bits, and bytes of a word
_LEAST_INTEGER = -(1 << 31)


def tiles_layout(height: int, columns: int, adjacent: int = ADJACENT) -> Any:
    """Returns the layout of a row as a matrix of tiles, a quarter of the tiles per warp, in order.

    A thread holds groups of `adjacent` (four) columns; a warp's threads hold 128 adjacent columns.
    """
    tiles: tuple[tuple[int, ...], ...] = ((height, columns), (height // WARPS, columns))
    tiles = (*tiles, (LANES * adjacent // columns, columns), (1, adjacent))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-8,), (-4, -3), -1, _check_canonical=False)


def key_layout(channels: int) -> Any:
    """Returns the layout of the 64 keys of a block, 16 adjacent keys per warp.

    A thread holds pairs of adjacent channels of a key; a warp's threads hold whole keys, in order.
    """
    return tiles_layout(64, channels, PAIR)


def scratch_of_row(warpgroups: int = 1) -> Any:
    """Returns the shared memory of `maxima`, and of the operations from `clear_bins` on.

    These reduce over all warpgroups of a thread block, each of which holds a stretch of the row.
    The memory has a histogram, some numbers, two words per warp, and candidates.
    """
    return plgpu.SMEM((_BINS + _NUMBERS + _PER_WARP * WARPS * warpgroups,), jnp.int32)


def most_candidates(scratch: Any) -> int:
    """Returns how many keys of a bin `find_key` can compare, with this `scratch_of_row()`."""
    return int(_CANDIDATES * ((scratch.shape[0] - _BINS - _NUMBERS) // _PER_WARP))


def scratch_of_maximum(warpgroups: int) -> Any:
    """Returns the shared memory of `maximum`, for all warpgroups of a thread block."""
    return plgpu.SMEM((warpgroups * WARPS,), jnp.int32)


# Barriers and reductions


def barrier() -> None:
    """Waits for the other warps of the warpgroup; the interpreter runs them together."""
    if not ops.is_interpreted():
        mlir.emit()(mgpu.warpgroup_barrier)


def program_barrier() -> None:
    """Waits for all warps of the thread block; the interpreter runs them together."""
    if not ops.is_interpreted():

        @mlir.emit()
        def wait() -> None:
            gpu.barrier()


def maximum(x: Int[Array, "..."], scratch: Any, *, layout: Any) -> Int[Array, ""]:
    """Returns the largest integer over one warpgroup; costs one barrier.

    Args:
      x: Integers in registers.
      scratch: `scratch_of_maximum()` in shared memory, which no warp is still reading.
      layout: Layout of `x`.
    """
    if ops.is_interpreted():
        return jnp.max(x)

    @mlir.emit((x, layout), scratch, result=mlir.integer_type())
    def largest(x: Any, scratch: Any) -> Any:
        own = functools.reduce(arith.maxsi, mlir.scalars(x))
        own = mlir.over_lanes(own, nvvm.ReductionKind.MAX)
        thread, warp = mlir.thread(), mlir.warp()
        memref.store(own, scratch, [mlir.index(warp)])
        mgpu.warpgroup_barrier()
        # Every lane reads the maximum of one of the warpgroup's warps.
        first = arith.andi(warp, mlir.constant(-WARPS))
        other = arith.ori(first, arith.andi(thread, mlir.constant(WARPS - 1)))
        theirs = memref.load(scratch, [mlir.index(other)])
        return mlir.as_array(mlir.over_lanes(theirs, nvvm.ReductionKind.MAX))

    return largest


def first_not_finite(
    parts: list[Float[Array, "64 _"]], scratch: Any, *, start: Int[Array, ""] | None = None
) -> Int[Array, ""]:
    """Returns the first of 64 rows with a non-finite number, or 64; costs one barrier.

    Fused multiplications by 0 accumulate pairs of numbers; the result is NaN if any was non-finite.

    Args:
      parts: Columns of the rows, of 16-bit floating-point numbers in an accumulator's layout.
      scratch: One integer in shared memory per warp, which no warp is still reading.
      start: First row to check, if not all.
    """
    if ops.is_interpreted():
        is_bad = functools.reduce(jnp.logical_or, [~jnp.isfinite(x).all(axis=1) for x in parts])
        if start is not None:
            is_bad = is_bad & (jnp.arange(64, dtype=jnp.int32) >= start)
        return jnp.min(jnp.where(is_bad, jnp.arange(64, dtype=jnp.int32), 64))

    layout = ops.ACCUMULATOR
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[parts[0].dtype.name]

    own, starts = [(x, layout) for x in parts], [] if start is None else [start]

    @mlir.emit(scratch, *own, numbers=starts, result=mlir.integer_type())
    def found(scratch: Any, *arguments: Any) -> Any:
        count = len(arguments) - len(starts)
        parts, counted = arguments[:count], arguments[count:]
        zero, nobody = mlir.constant(0), mlir.constant(64)
        first = nobody
        own = arith.andi(mlir.warp(), mlir.constant(WARPS - 1))
        row = arith.addi(
            arith.muli(own, mlir.constant(16)),
            arith.shrui(mlir.lane(), mlir.constant(2)),
        )
        for half in (1, 0):  # a thread's registers alternate between its row and the row 8 below
            total = zero
            for register in (x for part in parts for x in list(part.registers.flat)[half::2]):
                pair = mgpu.utils.bitcast(register, mlir.i32())
                code = f"fma.rn.{kind} $0, $1, $2, $3;"
                total = mlir.run(code, pair, zero, total)
            is_bad = mlir.compare("ne", total, zero)
            own_row = arith.addi(row, mlir.constant(8 * half))
            for least in counted:
                counts = mlir.compare("sge", own_row, least)
                is_bad = arith.andi(is_bad, counts)
            first = arith.select(is_bad, own_row, first)
        first = mlir.over_lanes(first, nvvm.ReductionKind.MIN)
        memref.store(first, scratch, [mlir.index(own)])
        mgpu.warpgroup_barrier()
        other = arith.andi(mlir.lane(), mlir.constant(WARPS - 1))
        theirs = memref.load(scratch, [mlir.index(other)])
        return mlir.as_array(mlir.over_lanes(theirs, nvvm.ReductionKind.MIN))

    return found


def maxima(
    arrays: tuple[Int[Array, "..."], Int[Array, "..."]], scratch: Any, *, layout: Any
) -> list[Int[Array, ""]]:
    """Returns the largest integer of two arrays over all warpgroups; costs one barrier.

    Args:
      arrays: Two arrays in registers.
      scratch: `scratch_of_row()` in shared memory, of which two words per warp are not in use.
      layout: Layout of both arrays.
    """
    if ops.is_interpreted():
        return [jnp.max(x) for x in arrays]

    own = [(x, layout) for x in arrays]

    @mlir.emit(*own, scratch, result=[mlir.integer_type()] * 2)
    def largest(first: Any, second: Any, scratch: Any) -> Any:
        kind = nvvm.ReductionKind.MAX
        for turn, x in enumerate((first, second)):
            own = functools.reduce(arith.maxsi, mlir.scalars(x))
            memref.store(mlir.over_lanes(own, kind), scratch, [_place_of_warp(scratch, turn)])
        _wait(scratch)
        warps = mlir.constant(_warps(scratch))
        found = [_over_warps(scratch, turn, warps, kind, _LEAST_INTEGER) for turn in range(2)]
        return [mlir.as_array(x) for x in found]

    return largest


def any_of_warp(flags: Bool[Array, "..."], *, layout: Any) -> Int[Array, ""]:
    """Returns 1 if any flag of the warp is set, without waiting for other warps.

    The interpreter reduces over all warps.

    Args:
      flags: Flags in registers.
      layout: Layout of the flags.
    """
    if ops.is_interpreted():
        return jnp.any(flags).astype(jnp.int32)

    @mlir.emit((flags, layout), result=mlir.integer_type())
    def vote(flags: Any) -> Any:
        is_set = functools.reduce(arith.ori, mlir.scalars(flags))
        return mlir.as_array(mlir.flag(mlir.is_any(is_set)))

    return vote


def write_sums(
    matrix: Float[Array, "64 M"], outs: list[Any], first: Int[Array, ""], turn: Int[Array, ""]
) -> None:
    """Writes the sums of a matrix over its columns to a column of global memory.

    Args:
      matrix: Float32, in an accumulator's layout.
      outs: Targets `[J, 4]` in global memory; each gets the sums over an equal share of the
        columns, a multiple of eight.
      first: Target row of the first sum.
      turn: Target column, and the index of the writing thread among the four that share rows.
    """
    columns = matrix.shape[1] // len(outs)
    if ops.is_interpreted():
        for index, out in enumerate(outs):
            own = jnp.sum(matrix[:, index * columns :][:, :columns], axis=1)
            out[pl.ds(first, own.size), turn] = own
        return

    @mlir.emit((matrix, ops.ACCUMULATOR), *outs, numbers=(first, turn))
    def _(matrix: Any, *arguments: Any) -> None:
        *outs, first, turn = arguments
        lane, own = mlir.lane(), arith.andi(mlir.warp(), _int(WARPS - 1))
        row = arith.addi(arith.muli(own, _int(16)), arith.shrui(lane, _int(2)))
        start = arith.addi(first, row)
        is_turn = mlir.compare("eq", arith.andi(lane, _int(3)), turn)
        for half in (0, 1):  # a thread's registers alternate between its row and the row 8 below
            for index, out in enumerate(outs):
                registers = list(matrix.registers.flat)[half::2]
                registers = registers[index * columns // 8 :][: columns // 8]
                total = functools.reduce(arith.addf, (x for one in registers for x in _both(one)))
                for distance in (1, 2):
                    total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
                place = arith.addi(start, _int(8 * half))
                with mgpu.when(is_turn):
                    memref.store(total, out, [mlir.index(place), mlir.index(turn)])


def _both(register: ir.Value) -> list[ir.Value]:
    """Returns the two numbers of a register."""
    return [vector.extract(register, [], ir.DenseI64ArrayAttr.get([x])) for x in range(2)]


def count_unset(flags: Any, end: Int[Array, ""]) -> Int[Array, ""]:
    """Counts the flags before `end` that are not set, with one or two loads per thread.

    Args:
      flags: Boolean vector in global memory, of a multiple of 32 entries.
      end: Number of flags to count among, any integer.
    """
    if ops.is_interpreted():
        place = jnp.arange(flags.shape[0], dtype=jnp.int32)
        return jnp.sum((place < end) & jnp.logical_not(flags[...]), dtype=jnp.int32)
    number = flags.shape[0]

    @mlir.emit(flags, numbers=[end], result=mlir.integer_type())
    def count(flags: Any, end: Any) -> Any:
        total, lane = mlir.constant(0), mlir.lane()
        for first in range(0, number, LANES):
            place = arith.addi(lane, mlir.constant(first))
            is_set = mlir.flag(memref.load(flags, [mlir.index(place)]))
            counts = arith.andi(mlir.compare("slt", place, end), mlir.compare("eq", is_set, 0))
            total = arith.addi(total, math.ctpop(mlir.ballot(counts)))
        return mlir.as_array(total)

    return count


def scratch_of_extremes(channels: int) -> Any:
    """Returns the shared memory of `extremes` of two matrices."""
    return plgpu.SMEM((4, WARPS, channels), jnp.float32)


def extremes(
    matrices: Sequence[Float[Array, "64 channels"]],
    counts: Bool[Array, "64 channels"],
    scratch: Any,
) -> list[tuple[Float[Array, "channels"], Float[Array, "channels"]]]:
    """Returns each channel's least and largest number in two matrices; costs one barrier.

    Channels in which no number counts have infinities.

    Args:
      matrices: Float32 numbers by key and channel, in `key_layout`.
      counts: Which numbers count; these are not NaN.
      scratch: `scratch_of_extremes()` in shared memory, which no warp is still reading.
    """
    limits = [jnp.where(counts, x, limit) for x in matrices for limit in (jnp.inf, -jnp.inf)]
    if ops.is_interpreted():
        lows, highs = limits[::2], limits[1::2]
        pairs = zip(lows, highs, strict=True)
        return [(jnp.min(low, axis=0), jnp.max(high, axis=0)) for low, high in pairs]
    channels = limits[0].shape[1]
    layout = key_layout(channels)
    kind = mlir.array_type((channels,), jnp.float32, layout.reduce(0))

    @mlir.emit(*((x, layout) for x in limits), scratch, result=[kind] * len(limits))
    def found(*arguments: Any) -> Any:
        *limits, scratch = arguments
        lanes = channels // PAIR  # per key
        first = arith.muli(arith.andi(mlir.lane(), mlir.constant(lanes - 1)), mlir.constant(PAIR))
        places = [mlir.index(arith.addi(first, mlir.constant(x))) for x in range(PAIR)]
        warp = mlir.index(mlir.warp())
        combines = [arith.minimumf, arith.maximumf] * (len(limits) // 2)
        for which, (x, combine) in enumerate(zip(limits, combines, strict=True)):
            row = mlir.index(mlir.constant(which))
            for place, number in zip(
                places, _both(functools.reduce(combine, x.registers.flat)), strict=True
            ):
                distance = lanes
                while distance < LANES:
                    number = combine(number, mgpu.utils.shfl_bfly(number, distance))
                    distance *= 2
                memref.store(number, scratch, [row, warp, place])
        mgpu.warpgroup_barrier()
        warps = [mlir.index(mlir.constant(x)) for x in range(WARPS)]
        results = []
        for which, combine in enumerate(combines):
            row = mlir.index(mlir.constant(which))
            numbers = [
                functools.reduce(combine, [memref.load(scratch, [row, x, place]) for x in warps])
                for place in places
            ]
            pair = vector.from_elements(ir.VectorType.get((PAIR,), ir.F32Type.get()), numbers)
            results.append(mlir.of_registers([pair], (channels,), layout.reduce(0)))
        return results

    return list(zip(found[::2], found[1::2], strict=True))


def any_of_key(flags: Bool[Array, "64 channels"]) -> Bool[Array, "64 channels"]:
    """Returns, for every channel of a key, whether any of the key's flags is set.

    It takes one instruction per warp, which has whole keys; each lane has a bit for each of 16
    keys.

    Args:
      flags: Flags by key and channel, in `key_layout`.
    """
    shape = flags.shape
    if ops.is_interpreted():
        return jnp.broadcast_to(jnp.any(flags, axis=1, keepdims=True), shape)
    layout, together = key_layout(shape[1]), LANES * PAIR // shape[1]  # keys per warp register

    @mlir.emit((flags, layout), result=mlir.array_type(shape, jnp.bool_, layout))
    def spread(flags: Any) -> Any:
        registers = mlir.scalars(flags)
        bits = mlir.constant(0)
        for place in range(0, len(registers), PAIR):
            is_set = functools.reduce(arith.ori, registers[place : place + PAIR])
            bit = mlir.constant(1 << (place // PAIR * together))
            bits = arith.ori(bits, arith.select(is_set, bit, mlir.constant(0)))
        lanes = LANES // together  # lanes per key, a power of two
        first = arith.shrui(mlir.lane(), mlir.constant(lanes.bit_length() - 1))
        bits = mlir.over_lanes(arith.shli(bits, first), nvvm.ReductionKind.OR)
        bits = arith.shrui(bits, first)
        found = np.empty(flags.registers.size, dtype=object)
        for place in range(found.size):
            own = arith.andi(bits, mlir.constant(1 << (place * together)))
            is_set = mlir.compare("ne", own, 0)
            found[place] = vector.broadcast(flags.registers.flat[place].type, is_set)
        return mgpu.FragmentedArray(
            _registers=found.reshape(flags.registers.shape), _layout=flags.layout, _is_signed=False
        )

    return spread


# Finding the least key to keep


def clear_bins(scratch: Any) -> None:
    """Clears the histogram of `find_bin`, which waits for it, and the number of candidates.

    Args:
      scratch: `scratch_of_row()` in shared memory.
    """
    if ops.is_interpreted():
        return

    @mlir.emit(scratch)
    def clear(scratch: Any) -> None:
        _emit_clear_bins(scratch)
        with mgpu.when(mlir.compare("eq", mlir.thread(), 0)):
            place = mlir.constant(_BINS + _NUMBERS - 1)
            memref.store(mlir.constant(0), scratch, [mlir.index(place)])


def _emit_clear_bins(scratch: ir.Value) -> None:
    """Sets all bins to 0, but the lowest to a number that exceeds all counts."""
    zero = mlir.constant(0)
    start, is_own, share = _own_bins(scratch)
    is_first = mlir.compare("eq", mlir.thread(), 0)
    lowest = arith.select(is_first, mlir.constant(_BELOW), zero)
    for index in range(0, share, ADJACENT):
        values = [zero if index else lowest, *[zero] * (ADJACENT - 1)]
        code = f"st.shared.v4.b32 [$0 + {4 * index}], {{$1, $2, $3, $4}};"
        mlir.effect(code, start, *values, predicate=is_own)


def _own_bins(scratch: ir.Value) -> tuple[ir.Value, ir.Value, int]:
    """Returns the address of a thread's adjacent bins, whether it has any, and their number."""
    threads = LANES * _warps(scratch)
    share = -(-_BINS // (threads * ADJACENT)) * ADJACENT
    place = arith.muli(mlir.thread(), mlir.constant(share))
    start = arith.addi(mlir.shared_pointer(scratch), arith.muli(place, mlir.constant(_WORD_BYTES)))
    return start, mlir.compare("slt", place, _BINS), share


def _bins(keys: Array, low: Array, shift: Array) -> Array:
    """Returns each key's bin: `2^shift` keys from `low` on; the first and last have all others."""
    place = jax.lax.shift_right_logical(
        jnp.maximum(keys, low) - low, jnp.broadcast_to(shift, keys.shape)
    )
    return jnp.where((place < 0) | (place >= _BINS), _BINS - 1, place)


# PTX for the bin `x` of the key `$0`, with `$1` and `$2` for `low` and `shift`.
_BIN = (
    f".reg .pred p; .reg .b32 x; max.s32 x, $0, $1; sub.s32 x, x, $1; shr.u32 x, x, $2; "
    f"min.u32 x, x, {_BINS - 1};"
)


def find_bin(
    keys: Int[Array, "..."],
    low: Int[Array, ""],
    shift: Int[Array, ""],
    count: Int[Array, ""],
    scratch: Any,
    *,
    layout: Any,
) -> list[Int[Array, ""]]:
    """Finds the bin of the `count`-th largest key, from a histogram; costs three barriers.

    A bin has `2^shift` adjacent keys, from `low` on. All lower keys belong to the first of 2048
    bins, and all higher ones to the last.

    Args:
      keys: Keys in registers.
      low: Least key of the first bin.
      shift: Logarithm of the keys per bin, at most 21.
      count: Rank of the key, from 1 on.
      scratch: `scratch_of_row()` in shared memory, after `clear_bins`; it leaves the bins clear.
      layout: Layout of the keys.

    Returns:
      The bin, the number of keys in higher bins, and the number of keys in the bin. The last is
      very large for the first bin, whose keys are not counted.
    """
    if ops.is_interpreted():
        bins = _bins(keys.reshape(-1), low, shift)
        numbers = jnp.zeros((_BINS,), jnp.int32).at[bins].add(1).at[0].set(_BELOW)
        least = jnp.cumsum(numbers[::-1], dtype=jnp.int32)[::-1]  # keys in this bin or higher ones
        found = jnp.sum((least >= count).astype(jnp.int32)) - 1
        own = jnp.sum(jnp.where(jnp.arange(_BINS, dtype=jnp.int32) == found, numbers, 0))
        all_kept = jnp.sum(jnp.where(jnp.arange(_BINS, dtype=jnp.int32) == found, least, 0))
        return [found, all_kept - own, own]
    kinds = [mlir.integer_type()] * 3

    @mlir.emit((keys, layout), scratch, numbers=(low, shift, count), result=kinds)
    def find(keys: Any, scratch: Any, low: Any, shift: Any, count: Any) -> Any:
        base = mlir.shared_pointer(scratch)
        _wait(scratch)
        # The lowest bin is not counted: it may have most of the keys, and one would wait for them.
        code = (
            f"{{ {_BIN} setp.ne.s32 p, x, 0; shl.b32 x, x, 2; add.s32 x, x, $3; "
            "@p red.shared.add.u32 [x], 1; }"
        )
        for key in mlir.scalars(keys):
            mlir.effect(code, key, low, shift, base)
        _wait(scratch)
        _emit_find_bin(count, scratch)
        _wait(scratch)
        found = _load_numbers(scratch)
        _emit_clear_bins(scratch)
        return [mlir.as_array(x) for x in found]

    return find


def _emit_find_bin(count: ir.Value, scratch: ir.Value) -> None:
    """Writes the results of `find_bin` from a histogram, as one thread does that has the bin.

    A thread has some adjacent bins, the first thread the highest ones. Keys in higher bins are sums
    over the lanes before, and over the warps before.
    """
    start, is_own, share = _own_bins(scratch)
    last = mlir.constant(_WORD_BYTES * (_BINS - share))
    base = mlir.shared_pointer(scratch)
    start = arith.subi(arith.addi(arith.addi(base, base), last), start)  # from the other end
    flag = mlir.flag(is_own)
    numbers: list[ir.Value] = []
    for index in range(0, share, ADJACENT):
        offset = _WORD_BYTES * index
        numbers += mlir.load(start, ADJACENT, flag, offset=offset, space="shared")
    own = functools.reduce(arith.addi, numbers)
    upto = _add_earlier_lanes(own)
    _store_total(upto, scratch, 0)
    _wait(scratch)
    upto = arith.addi(upto, _over_warps(scratch, 0, mlir.warp(), nvvm.ReductionKind.ADD, 0))
    above = arith.subi(upto, own)
    has_key = arith.andi(mlir.compare("slt", above, count), mlir.compare("sge", upto, count))
    with mgpu.when(has_key):
        first = mlir.constant(_BINS - 1)
        bins = arith.subi(first, arith.muli(mlir.thread(), mlir.constant(share)))
        found = [bins, above, numbers[-1]]
        for index, number in enumerate(numbers[::-1]):
            is_above = mlir.compare("slt", above, count)
            current = [arith.subi(bins, mlir.constant(index)), above, number]
            found = [arith.select(is_above, *pair) for pair in zip(current, found, strict=True)]
            above = arith.addi(above, number)
        _store_numbers(found, scratch)


def _store_total(upto: ir.Value, scratch: ir.Value, turn: int) -> None:
    """Writes the last lane's sum over all lanes to the warp's word."""
    with mgpu.when(mlir.compare("eq", mlir.lane(), LANES - 1)):
        memref.store(upto, scratch, [_place_of_warp(scratch, turn)])


def _store_numbers(values: list[ir.Value], scratch: ir.Value) -> None:
    """Writes three results, for all threads."""
    for index, value in enumerate(values):
        memref.store(value, scratch, [mlir.index(mlir.constant(_BINS + index))])


def _load_numbers(scratch: ir.Value) -> list[ir.Value]:
    """Reads what `_store_numbers` has written."""
    return [memref.load(scratch, [mlir.index(mlir.constant(_BINS + x))]) for x in range(3)]


def find_key(
    keys: Int[Array, "..."],
    low: Int[Array, ""],
    shift: Int[Array, ""],
    own_bin: Int[Array, ""],
    number: Int[Array, ""],
    rank: Int[Array, ""],
    scratch: Any,
    *,
    layout: Any,
) -> list[Int[Array, ""]]:
    """Finds the `rank`-th largest key of a bin by comparing all of its keys; costs two barriers.

    Threads collect the keys in any order: the result depends only on how many are larger.

    Args:
      keys: Keys in registers.
      low: As in `find_bin`.
      shift: As in `find_bin`.
      own_bin: The bin.
      number: Number of keys in the bin, at most `most_candidates(scratch)`.
      rank: Rank of the key among these, from 1 on.
      scratch: `scratch_of_row()` in shared memory, after `find_bin`.
      layout: Layout of the keys.

    Returns:
      The key, and how many keys equal to it are among the first `rank`, and in the bin.
    """
    if ops.is_interpreted():
        flat = keys.reshape(-1)
        is_own = _bins(flat, low, shift) == own_bin
        ordered = jnp.sort(jnp.where(is_own, flat, _LEAST_INTEGER), descending=True)
        place = jnp.arange(flat.size, dtype=jnp.int32)
        key = jnp.sum(jnp.where(place == rank - 1, ordered, 0))
        larger, equal = jnp.sum(is_own & (flat > key)), jnp.sum(is_own & (flat == key))
        return [key, rank - larger, equal]
    numbers, kinds = (low, shift, own_bin, number, rank), [mlir.integer_type()] * 3

    @mlir.emit((keys, layout), scratch, numbers=numbers, result=kinds)
    def find(keys: Any, scratch: Any, *numbers: Any) -> Any:
        low, shift, own_bin, number, rank = numbers
        base = mlir.shared_pointer(scratch)
        counter = _WORD_BYTES * (_BINS + _NUMBERS - 1)
        first = _WORD_BYTES * (_BINS + _NUMBERS + 2 * _warps(scratch))
        code = (
            f"{{ {_BIN} setp.eq.s32 p, x, $3; @p atom.shared.add.u32 x, [$4 + {counter}], 1; "
            f"@p shl.b32 x, x, 2; @p add.s32 x, x, $4; @p st.shared.b32 [x + {first}], $0; }}"
        )
        for key in mlir.scalars(keys):
            mlir.effect(code, key, low, shift, own_bin, base)
        _wait(scratch)
        _emit_rank(number, rank, scratch)
        _wait(scratch)
        return [mlir.as_array(x) for x in _load_numbers(scratch)]

    return find


def _emit_rank(number: ir.Value, rank: ir.Value, scratch: ir.Value) -> None:
    """Writes the results of `find_key`: a warp compares every candidate of its own with all.

    Equal candidates are found by several warps, which write the same.
    """
    first = mlir.constant(_BINS + _NUMBERS + 2 * _warps(scratch))
    zero, last = mlir.constant(0), arith.subi(number, mlir.constant(1))

    def candidate(place: ir.Value) -> ir.Value:
        return memref.load(scratch, [mlir.index(arith.addi(first, place))])

    def loop(start: ir.Value, step: int, carry: list[ir.Value]) -> Any:
        return scf.ForOp(*map(mlir.index, (start, number, mlir.constant(step))), carry)

    each = loop(mlir.warp(), _warps(scratch), [])
    with ir.InsertionPoint(each.body):
        own = candidate(arith.index_cast(mlir.i32(), each.induction_variable))
        every = loop(zero, LANES, [zero, zero])
        with ir.InsertionPoint(every.body):
            place = arith.index_cast(mlir.i32(), every.induction_variable)
            place = arith.addi(place, mlir.lane())
            other = candidate(arith.minsi(place, last))
            is_there = mlir.compare("slt", place, number)
            tests = (mlir.compare(test, other, own) for test in ("sgt", "eq"))
            votes = [mlir.ballot(arith.andi(is_there, test)) for test in tests]
            sums = [
                arith.addi(total, mlir.run("popc.b32 $0, $1;", vote))
                for total, vote in zip(every.inner_iter_args, votes, strict=True)
            ]
            scf.yield_(sums)
        larger, equal = every.results
        left = arith.subi(rank, larger)
        with mgpu.when(arith.andi(mlir.compare("sge", left, 1), mlir.compare("sle", left, equal))):
            _store_numbers([own, left, equal], scratch)
        scf.yield_([])


def keep_first(
    keys: Int[Array, "..."],
    key: Int[Array, ""],
    number: Int[Array, ""],
    scratch: Any,
    *,
    layout: Any,
) -> Int[Array, "..."]:
    """Replaces keys equal to `key` by the least integer, except the first `number` of them.

    Args:
      keys: Keys of one row in registers, in order of warps, registers and lanes.
      key: The key.
      number: How many of the keys stay.
      scratch: `scratch_of_row()` in shared memory.
      layout: Layout of the keys.
    """
    if ops.is_interpreted():
        flat = keys.reshape(-1)
        is_late = jnp.cumsum(flat == key, dtype=jnp.int32) > number
        flat = replace(flat, (flat == key) & is_late, _LEAST_INTEGER)
        return flat.reshape(keys.shape)
    kind = mlir.array_type(keys.shape, jnp.int32, layout)

    @mlir.emit((keys, layout), scratch, numbers=(key, number), result=kind)
    def keep(keys: Any, scratch: Any, key: Any, number: Any) -> Any:
        code = (
            "{ .reg .pred p, q; setp.eq.s32 p, $2, $3; setp.ge.and.s32 q, $4, $5, p; "
            f"mov.b32 $0, $2; @q mov.b32 $0, {_LEAST_INTEGER}; "
            "mov.b32 $1, $4; @p add.s32 $1, $1, 1; }"
        )
        found = []
        for group, place, _ in _places(keys, "eq", key, scratch, 1):
            for own in group:
                kept, place = mlir.ptx(code, own, key, place, number, kinds=[mlir.i32()] * 2)
                found.append(kept)
        return as_row(found, kind.shape, layout)

    return keep


def _add_if(test: str, total: ir.Value, key: ir.Value, limit: ir.Value, step: int) -> ir.Value:
    """Adds `step` conditionally in two instructions; a select and an add would take three."""
    code = (
        f"{{ .reg .pred p; setp.{test}.s32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $0, {step}; }}"
    )
    return mgpu.utils.inline_ptx(code, total, key, limit, result_types=total.type)


def _over_warps(
    scratch: ir.Value, turn: int, number: ir.Value, kind: nvvm.ReductionKind, identity: int
) -> ir.Value:
    """Reduces the words of the first `number` warps: each lane reads the word of one warp.

    A warp has a word in each of two turns, so that one barrier suffices: a warp that is ahead
    writes where no other warp is reading.
    """
    lane, last = mlir.lane(), mlir.constant(_warps(scratch) - 1)
    theirs = memref.load(scratch, [_place_of_warp(scratch, turn, arith.minsi(lane, last))])
    is_one = mlir.compare("slt", lane, number)
    theirs = arith.select(is_one, theirs, mlir.constant(identity))
    return mlir.over_lanes(theirs, kind)


def _warps(scratch: ir.Value) -> int:
    """Returns the number of warps that share the scratch memory: all of the thread block."""
    return (ir.MemRefType(scratch.type).shape[0] - _BINS - _NUMBERS) // _PER_WARP


def _place_of_warp(scratch: ir.Value, turn: int, warp: ir.Value | None = None) -> ir.Value:
    """Returns the index of a warp's word, by default of this one's."""
    warp = mlir.warp() if warp is None else warp
    start = _BINS + _NUMBERS + turn * _warps(scratch)
    return mlir.index(arith.addi(warp, mlir.constant(start)))


def _wait(scratch: ir.Value) -> None:
    """Waits for the warps that share the scratch memory."""
    if _warps(scratch) == WARPS:
        mgpu.warpgroup_barrier()
    else:
        gpu.barrier()


# Writing a row, or its kept columns, to global memory


def write_row(values: Array, columns: Array, ref: Any, *, layout: Any) -> None:
    """Writes a row's values to global memory, except columns beyond its end."""
    if ops.is_interpreted():
        ref[...] = values.reshape(-1)[: ref.shape[0]]
        return

    @mlir.emit((values, layout), (columns, layout), ref)
    def write(values: Any, columns: Any, ref: Any) -> None:
        limit = mlir.constant(ir.MemRefType(ref.type).shape[0])
        for value, column in zip(mlir.scalars(values), mlir.scalars(columns), strict=True):
            with mgpu.when(mlir.compare("slt", column, limit)):
                memref.store(value, ref, [mlir.index(column)])


def read_row(columns: Array, ref: Any, *, layout: Any) -> Array:
    """Reads a row of floats from global memory, with zeros in columns beyond its end."""
    if ops.is_interpreted():
        row = ref[...]
        return jnp.pad(row, (0, columns.size - row.shape[0])).reshape(columns.shape)

    @mlir.emit((columns, layout), ref, result=mlir.array_type(columns.shape, jnp.float32, layout))
    def read(columns: Any, ref: Any) -> Any:
        limit = ir.MemRefType(ref.type).shape[0]
        # Compute addresses here: the compiler would keep all of them until the row is written.
        code = (
            f"{{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, $2, {limit}; mov.b32 $0, 0; "
            "mad.wide.s32 a, $2, 4, $1; @p ld.global.f32 $0, [a]; }"
        )
        number, start = ir.F32Type.get(), mlir.address(ref, mlir.constant(0))
        values = [
            mgpu.utils.inline_ptx(code, start, column, result_types=number, has_side_effects=True)
            for column in mlir.scalars(columns)
        ]
        return as_row(values, columns.shape, layout)

    return read


def write_places(values: Array, places: Array, ref: Any, *, layout: Any) -> None:
    """Writes values to flat indices of global memory; negative indices are skipped."""

    @mlir.emit((values, layout), (places, layout), ref)
    def write(values: Any, places: Any, ref: Any) -> None:
        for value, place in zip(mlir.scalars(values), mlir.scalars(places), strict=True):
            code = "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p st.global.f32 [$0], $2; }"
            mgpu.utils.inline_ptx(code, mlir.address(ref, place), place, value)


def write_fours(values: list[Array], places: Array, ref: Any, *, layout: Any) -> None:
    """Interleaves four arrays and writes them in bfloat16, 8 bytes per place.

    Args:
      values: The arrays, float32.
      places: Flat index of each four numbers, in units of four; negative ones are skipped.
      ref: Global memory in bfloat16.
      layout: Layout of the arrays and of the places.
    """

    @mlir.emit(*((x, layout) for x in (*values, places)), ref)
    def _(*arguments: Any) -> None:
        *values, places, ref = arguments
        code = (
            "{ .reg .pred p; .reg .b32 x, y; setp.ge.s32 p, $1, 0; cvt.rn.bf16x2.f32 x, $3, $2; "
            "cvt.rn.bf16x2.f32 y, $5, $4; @p st.global.v2.b32 [$0], {x, y}; }"
        )
        columns = zip(*map(mlir.scalars, values), strict=True)
        for four, place in zip(columns, mlir.scalars(places), strict=True):
            start = mlir.address(ref, arith.muli(place, mlir.constant(ADJACENT)))
            mgpu.utils.inline_ptx(code, start, place, *four)


def write_kept(
    keys: Int[Array, "..."],
    least: Int[Array, ""],
    count: Int[Array, ""],
    ids_ref: Any,
    scratch: Any,
    *,
    pad: int,
    layout: Any,
) -> None:
    """Writes the columns whose key is at least `least`, in ascending order; costs one barrier.

    Args:
      keys: Keys of one row in registers, in order of warps, registers and lanes.
      least: Least key that is kept.
      count: Number of columns that are kept.
      ids_ref: Target of the columns, `[P]` in global memory.
      scratch: `scratch_of_row()` in shared memory.
      pad: Value of the entries beyond `count`.
      layout: Layout of the keys.
    """
    if ops.is_interpreted():
        kept, length = keys.reshape(-1) >= least, ids_ref.shape[-1]
        place = jnp.where(kept, jnp.cumsum(kept, dtype=jnp.int32) - 1, length)
        columns = jnp.arange(kept.shape[0], dtype=jnp.int32)
        ids_ref[...] = jnp.full((length,), pad, jnp.int32).at[place].set(columns, mode="drop")
        return

    @mlir.emit((keys, layout), ids_ref, scratch, numbers=(least, count))
    def _(keys: Any, ids: Any, scratch: Any, least: Any, count: Any) -> None:
        long = ir.IntegerType.get_signless(64)
        code = (
            "{ .reg .pred p; setp.ge.s32 p, $2, $3; @p st.global.b32 [$1], $4; "
            "mov.b64 $0, $1; @p add.s64 $0, $0, 4; }"
        )
        for group, place, column in _places(keys, "ge", least, scratch, 0):
            target = llvm.ptrtoint(long, mlir.address(ids, place))
            for index, key in enumerate(group):
                own = arith.addi(column, mlir.constant(index))
                (target,) = mlir.ptx(code, target, key, least, own, kinds=[long])
        _emit_fill(ids, count, pad, step=LANES * _warps(scratch))


def _places(
    keys: mgpu.FragmentedArray, test: str, limit: ir.Value, scratch: ir.Value, turn: int
) -> list[tuple[list[ir.Value], ir.Value, ir.Value]]:
    """Counts the keys of a row that pass a test before each group of a thread's adjacent keys.

    A number adds up earlier warps, through shared memory; earlier groups of this warp; and earlier
    lanes of the same group. Four groups are summed over lanes at a time, each in a byte of a word.

    Returns:
      For each group: its keys, the number of earlier keys, and the first key's column.
    """
    lane, warp, registers = mlir.lane(), mlir.warp(), mlir.scalars(keys)
    adjacent = len(registers) // keys.registers.size
    assert LANES * adjacent < 1 << _BYTE  # keys of a warp per group
    groups = [registers[start : start + adjacent] for start in range(0, len(registers), adjacent)]
    earlier, totals = [], []
    for first in range(0, len(groups), _WORD_BYTES):
        own = mlir.constant(0)
        for place, group in enumerate(groups[first : first + _WORD_BYTES]):
            for key in group:
                own = _add_if(test, own, key, limit, 1 << (_BYTE * place))
        upto = _add_earlier_lanes(own)
        total = _shuffle_from(upto, LANES - 1)
        places = range(min(_WORD_BYTES, len(groups) - first))
        earlier += [_byte_of(arith.subi(upto, own), place) for place in places]
        totals += [_byte_of(total, place) for place in places]
    memref.store(functools.reduce(arith.addi, totals), scratch, [_place_of_warp(scratch, turn)])
    _wait(scratch)
    before = _over_warps(scratch, turn, warp, nvvm.ReductionKind.ADD, 0)
    column = arith.addi(
        arith.muli(warp, mlir.constant(LANES * len(registers))),
        arith.muli(lane, mlir.constant(adjacent)),
    )
    found = []
    for group, of_lanes, total in zip(groups, earlier, totals, strict=True):
        found.append((group, arith.addi(before, of_lanes), column))
        before = arith.addi(before, total)
        column = arith.addi(column, mlir.constant(LANES * adjacent))
    return found


def _byte_of(packed: ir.Value, place: int) -> ir.Value:
    """Extracts one of the four bytes of a word."""
    shifted = arith.shrui(packed, mlir.constant(_BYTE * place)) if place else packed
    return arith.andi(shifted, mlir.constant((1 << _BYTE) - 1))


def _add_earlier_lanes(value: ir.Value) -> ir.Value:
    """Returns the sum over this lane and all earlier ones."""
    for distance in (1, 2, 4, 8, 16):
        code = (
            "{ .reg .pred p; .reg .b32 x; "
            f"shfl.sync.up.b32 x|p, $1, {distance}, 0, 0xffffffff; "
            "mov.b32 $0, $1; @p add.s32 $0, $0, x; }"
        )
        value = mgpu.utils.inline_ptx(
            code, value, result_types=value.type, has_side_effects=True, convergent=True
        )
    return value


def _shuffle_from(value: ir.Value, lane: int) -> ir.Value:
    """Returns the value of one lane."""
    code = f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;"
    return mgpu.utils.inline_ptx(
        code, value, result_types=value.type, has_side_effects=True, convergent=True
    )


def _emit_fill(ids: ir.Value, count: ir.Value, pad: int, *, step: int) -> None:
    """Sets `ids[count:] = pad` with all `step` threads of a thread block."""
    index = ir.IndexType.get()
    length = ir.MemRefType(ids.type).shape[0]
    loop = scf.ForOp(
        mlir.index(arith.addi(count, mlir.thread())),
        arith.constant(index, length),
        arith.constant(index, step),
    )
    with ir.InsertionPoint(loop.body):
        memref.store(mlir.constant(pad), ids, [loop.induction_variable])
        scf.yield_([])


# Adding up the parts of a row


def add_parts(
    part_ref: Any, exponent_ref: Any, *, height: int, num_tiles: int, is_triangle: bool
) -> tuple[Float[Array, "height columns"], Int[Array, "height columns"]]:
    """Adds up the parts of a row's tiles, each of which has floats and one power of two.

    Only existing parts are read; the others may hold anything.

    Args:
      part_ref: Floats, `[splits, tiles, columns]` in global memory.
      exponent_ref: Exponents, `[tiles, 16]`; far below all others for parts of zeros.
      height: Tiles per warpgroup.
      num_tiles: Number of existing tiles.
      is_triangle: Whether tile `t` only has parts from split `t // 2` on.

    Returns:
      Sums and their exponents, in `tiles_layout(height, columns)`.
    """
    if ops.is_interpreted():
        return _add_parts_interpreted(part_ref, exponent_ref, height, num_tiles, is_triangle)
    shape = (height, part_ref.shape[-1])
    layout = tiles_layout(*shape)

    kinds = [mlir.array_type(shape, dtype, layout) for dtype in (jnp.float32, jnp.int32)]

    @mlir.emit(part_ref, exponent_ref, result=kinds)
    def sums(parts: Any, exponents: Any) -> Any:
        found = _emit_add_parts(parts, exponents, height, num_tiles, is_triangle)
        signs = (None, True)
        both = zip(zip(*found, strict=True), signs, strict=True)
        return [mlir.of_registers(x, shape, layout, is_signed=sign) for x, sign in both]

    total, exponents = sums
    return total, exponents


def _add_parts_interpreted(
    part_ref: Any, exponent_ref: Any, height: int, num_tiles: int, is_triangle: bool
) -> tuple[Array, Array]:
    tile = jnp.arange(height, dtype=jnp.int32)[:, None]
    split = jnp.arange(part_ref.shape[0], dtype=jnp.int32)[None]
    there = (tile < num_tiles) & ((tile <= 2 * split + 1) | (not is_triangle))
    exponent = exponent_ref[:, : part_ref.shape[0]]
    exponent = replace(exponent, jnp.logical_not(there), NO_EXPONENT)
    largest = jnp.maximum(jnp.max(exponent, axis=1, keepdims=True), NO_EXPONENT // 2)
    factor = power_of_two(exponent - largest).T[..., None]
    total = jnp.sum(jnp.where(there.T[..., None], part_ref[...], 0.0) * factor, axis=0)
    return total, jnp.broadcast_to(largest, total.shape)


def _emit_add_parts(
    parts: ir.Value, exponents: ir.Value, height: int, num_tiles: int, is_triangle: bool
) -> list[tuple[ir.Value, ir.Value]]:
    """Returns a thread's sums and exponents, four columns at a time, as `_add_parts_interpreted`.

        there = (tile < num_tiles) & ((tile <= 2 split + 1) | not is_triangle)
        exponent = where(there, exponents[tile, split], NO_EXPONENT)
        largest = max(max over splits of exponent, NO_EXPONENT / 2)
        total = Σ over splits of where(there, parts[split, tile], 0) · 2^(exponent - largest)

    Each half of a warp has one of two tiles, and a thread four columns of it. `least` is the first
    split whose part of the tile exists, or `num_splits` if none does.
    """
    num_splits, _, columns = ir.MemRefType(parts.type).shape
    width = ir.MemRefType(exponents.type).shape[-1]
    lanes = columns // ADJACENT  # lanes per tile, a power of two
    lane = mlir.lane()
    first = arith.muli(mlir.warp(), mlir.constant(height // WARPS))
    first = arith.addi(first, arith.shrui(lane, mlir.constant(lanes.bit_length() - 1)))
    column = arith.muli(arith.andi(lane, mlir.constant(lanes - 1)), mlir.constant(ADJACENT))
    found = []
    for pair in range(height // (WARPS * 2)):
        tile = arith.addi(first, mlir.constant(2 * pair))
        least = arith.shrui(tile, mlir.constant(1)) if is_triangle else mlir.constant(0)
        is_tile = mlir.compare("slt", tile, num_tiles)
        least = arith.select(is_tile, least, mlir.constant(num_splits))
        place = arith.addi(arith.muli(tile, mlir.constant(columns)), column)
        start = mlir.address(parts, place)
        exponent = mlir.address(exponents, arith.muli(tile, mlir.constant(width)))
        found.append(_sum_of_tile(parts, start, exponent, least))
    return found


def _sum_of_tile(
    parts: ir.Value, start: ir.Value, exponent: ir.Value, least: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns four adjacent sums of one tile over the parts from `least` on, and their exponent.

    Args:
      parts: All parts.
      start: Address of the four columns in the first split's part.
      exponent: Address of the tile's exponents.
      least: First split whose part exists.
    """
    num_splits, height, columns = ir.MemRefType(parts.type).shape
    number = ir.F32Type.get()
    exponents: list[ir.Value] = []
    for split in range(0, num_splits, ADJACENT):
        exponents += _load(exponent, 4 * split, mlir.constant(0), 0, mlir.i32(), "b32")
    stride = 4 * height * columns  # bytes per split
    loaded = [
        _load(start, split * stride, least, split, number, "f32") for split in range(num_splits)
    ]
    none = mlir.constant(NO_EXPONENT)
    shifts = []
    for split in range(num_splits):
        is_there = mlir.compare("sle", least, split)
        shifts.append(arith.select(is_there, exponents[split], none))
    # Above the exponent of a missing part, whose factor is then 0.
    largest = functools.reduce(arith.maxsi, shifts, mlir.constant(NO_EXPONENT // 2))
    totals = [arith.constant(number, 0.0)] * ADJACENT
    for values, shift in zip(loaded, shifts, strict=True):
        factor = mlir.power_of_two(arith.subi(shift, largest))
        totals = [math.fma(x, factor, total) for x, total in zip(values, totals, strict=True)]
    vectors = (ir.VectorType.get((ADJACENT,), x) for x in (number, mlir.i32()))
    sums, same = (
        vector.from_elements(kind, list(values))
        for kind, values in zip(vectors, (totals, [largest] * ADJACENT), strict=True)
    )
    return sums, same


def _load(
    pointer: ir.Value,
    offset: int,
    least: ir.Value,
    index: int,
    kind: ir.Type,
    name: str,
    number: int = ADJACENT,
) -> list[ir.Value]:
    """Loads four adjacent numbers of type `number`, or zeros unless `index` is at least `least`."""
    zeros = " ".join(f"mov.b32 ${x}, 0;" for x in range(number))
    targets = ", ".join(f"${x}" for x in range(number))
    code = (
        f"{{ .reg .pred p; setp.le.s32 p, ${number + 1}, {index}; {zeros} "
        f"@p ld.global.v{number}.{name} {{{targets}}}, [${number} + {offset}]; }}"
    )
    # Side effects keep the load behind the wait for the kernel that writes the numbers.
    return mlir.ptx(code, pointer, least, kinds=[kind] * number)


# Adding up a row over heads


def read_powers(power_ref: Any, there: Int[Array, ""], *, height: int, columns: int) -> list[Array]:
    """Starts to read the rows of the first heads, as many as fit in registers.

    Args:
      power_ref: Numbers in bfloat16, `[heads, tiles * columns]` in global memory.
      there: Number of existing columns in all warpgroups; later ones give arbitrary numbers.
      height: Tiles per warpgroup.
      columns: Columns per tile.

    Returns:
      The argument `read` of `add_powers`, in `tiles_layout(height, columns)`: words of two columns.
    """
    shape = (height, columns)
    of_head = height * columns // (THREADS * _PACKED)
    # Prefetch nothing of long rows: computing the factors needs the registers.
    number = min(power_ref.shape[0], _AHEAD // of_head) if of_head <= _MOST_AHEAD else 0
    if ops.is_interpreted():
        return [power_ref[head, :].reshape(shape) for head in range(number)]
    if not number:
        return []
    held = (height, columns // _PACKED)
    layout = tiles_layout(*held, ADJACENT // _PACKED)
    kinds = [mlir.array_type(held, jnp.int32, layout)] * number

    @mlir.emit(power_ref, numbers=[there], result=kinds)
    def read(powers: Any, there: Any) -> Any:
        place = _places_of_tiles(powers, there, shape)
        rows = [
            [x for start, unread, _ in place for x in _load_power(powers, start, unread, head)]
            for head in range(number)
        ]
        return [as_row(row, held, layout) for row in rows]

    return list(read)


def add_powers(
    read: list[Array],
    power_ref: Any,
    factors: Any,
    there: Int[Array, ""],
    *,
    height: int,
    columns: int,
    part: int,
) -> Float[Array, "height columns"]:
    """Adds up the rows of all heads, with a factor per part of each row.

    Args:
      read: Result of `read_powers`.
      power_ref: Numbers in bfloat16, `[heads, tiles * columns]` in global memory.
      factors: `[heads or more, parts]` in shared memory.
      there: Number of existing columns in all warpgroups; later ones give arbitrary sums.
      height: Tiles per warpgroup.
      columns: Columns per tile.
      part: Columns per part, a multiple of four.

    Returns:
      The sums, in `tiles_layout(height, columns)`.
    """
    shape = (height, columns)
    if ops.is_interpreted():
        powers = power_ref[...].astype(jnp.float32)
        places = jnp.arange(powers.shape[1], dtype=jnp.int32) // part
        weights = jnp.take(factors[: powers.shape[0], :], places, axis=1, mode="clip")
        return jnp.sum(powers * weights, axis=0).reshape(shape)
    layout, words_of_four = tiles_layout(*shape), ADJACENT // _PACKED
    held_layout = tiles_layout(height, columns // _PACKED, words_of_four)

    given, kind = [(x, held_layout) for x in read], mlir.array_type(shape, jnp.float32, layout)

    @mlir.emit(*given, power_ref, factors, numbers=[there], result=kind)
    def sums(*arguments: Any) -> Any:
        *rows, powers, factors, there = arguments
        places = _places_of_tiles(powers, there, shape)
        held = [mlir.scalars(row) for row in rows]
        found: list[ir.Value] = []
        for index, (start, unread, column) in enumerate(places):
            own = slice(words_of_four * index, words_of_four * (index + 1))
            first = [row[own] for row in held]
            found += _sum_of_heads(powers, factors, first, start, unread, column, part)
        return as_row(found, shape, layout)

    return sums


def _sum_of_heads(
    powers: ir.Value,
    factors: ir.Value,
    held: list[list[ir.Value]],
    start: ir.Value,
    unread: ir.Value,
    column: ir.Value,
    part: int,
) -> list[ir.Value]:
    """Returns four adjacent sums; reads several heads before adding any.

    Args:
      powers: Numbers of all heads.
      factors: Factors of all heads and parts.
      held: Prefetched words of the first heads.
      start: Address of the four columns in the first head's row.
      unread: 1 if none of the columns exists, else 0.
      column: First of the four columns.
      part: Columns per part.
    """
    num_heads = ir.MemRefType(powers.type).shape[0]
    # Clamp missing columns to an existing part.
    own = arith.shrui(column, mlir.constant(part.bit_length() - 1))
    own = mlir.index(arith.select(mlir.compare("eq", unread, 1), mlir.constant(0), own))
    totals = [arith.constant(ir.F32Type.get(), 0.0)] * ADJACENT
    for first in range(0, num_heads, _HEADS_AT_ONCE):
        heads = range(first, min(first + _HEADS_AT_ONCE, num_heads))
        loaded = [
            held[head] if head < len(held) else _load_power(powers, start, unread, head)
            for head in heads
        ]
        for head, values in zip(heads, loaded, strict=True):
            factor = memref.load(factors, [mlir.index(mlir.constant(head)), own])
            values = [number for word in values for number in mlir.unpack_bfloat16(word)]
            totals = [math.fma(x, factor, total) for x, total in zip(values, totals, strict=True)]
    return totals


def _load_power(powers: ir.Value, start: ir.Value, unread: ir.Value, head: int) -> list[ir.Value]:
    """Loads four adjacent numbers of a head as two words, or zeros."""
    kind, number = ir.MemRefType(powers.type), ADJACENT // _PACKED
    return _load(start, 2 * head * kind.shape[1], unread, 0, mlir.i32(), "b32", number)


def _places_of_tiles(
    powers: ir.Value, there: ir.Value, shape: tuple[int, int]
) -> list[tuple[ir.Value, ir.Value, ir.Value]]:
    """Returns for each four adjacent columns: their address, 1 if none exists, first column."""
    found = []
    for column in _tile_places(*shape):
        is_there = mlir.compare("slt", column, there)
        unread = arith.select(is_there, mlir.constant(0), mlir.constant(1))
        found.append((mlir.address(powers, column), unread, column))
    return found


def _tile_places(height: int, columns: int) -> list[ir.Value]:
    """Returns the offset in the row of each four adjacent columns of a thread in `tiles_layout`.

    Each half of a warp has one of two tiles, and a thread four columns of it.
    """
    lanes = columns // ADJACENT  # lanes per tile, a power of two
    lane = mlir.lane()
    first = arith.muli(mlir.warp(), mlir.constant(height // WARPS))
    first = arith.addi(first, arith.shrui(lane, mlir.constant(lanes.bit_length() - 1)))
    column = arith.muli(arith.andi(lane, mlir.constant(lanes - 1)), mlir.constant(ADJACENT))
    tiles = [arith.addi(first, mlir.constant(2 * pair)) for pair in range(height // (WARPS * 2))]
    return [arith.addi(arith.muli(tile, mlir.constant(columns)), column) for tile in tiles]


def as_row(values: list[ir.Value], shape: tuple[int, ...], layout: Any) -> mgpu.FragmentedArray:
    """Wraps a thread's numbers, with adjacent columns in order, as an array."""
    adjacent = layout.to_mgpu().vector_length
    kind = ir.VectorType.get((adjacent,), values[0].type)
    groups = [values[start : start + adjacent] for start in range(0, len(values), adjacent)]
    registers = [vector.from_elements(kind, group) for group in groups]
    is_signed = None if isinstance(values[0].type, ir.F32Type) else True
    return mlir.of_registers(registers, shape, layout, is_signed=is_signed)


_int = mlir.constant
