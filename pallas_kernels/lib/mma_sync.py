"""Warp-level products (`mma.sync`) and per-thread copies (`cp.async`), from Ampere on.

Every NVIDIA GPU of compute capability 8.0 or higher has these instructions, including Hopper and
Blackwell. Pallas has a product (`plgpu.mma`) and a copy that becomes `cp.async`, but that copy
supports only GPUs before Hopper and no sizes that depend on a row. So this module emits both, and
kernels have the same code on all of these GPUs.

Matrices in shared memory have the layout of `ops.tiled`: tiles of 8 rows of 128 bytes, in which the
chunk `c` (16 bytes) of row `r` is at place `c ^ r`. A warp reads four tiles of 8 rows of one chunk
each at a time (`ldmatrix`) without bank conflicts. In registers, sums have the layout
`ops.ACCUMULATOR`: warp `w` of a warpgroup has rows `16 w` to `16 w + 15` of each 64.

Each function has an implementation for Pallas' interpreter, where copies complete immediately.
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
from jaxlib.mlir.dialects import llvm, memref, nvvm, vector
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith

PAGE = 16  # rows per copied page
NOBODY = 64  # beyond any query's place in a tile: no query sees the value
_WARPS, _THREADS = 4, 128  # per warpgroup
_ROWS = _WARPS * PAGE
_CHUNK, _LINE, _TILE = 16, 128, 1024  # bytes of a chunk, of a tile's row, of a tile
_PER_LINE = _LINE // _CHUNK
_OF_WARPS = mlir.array_type((_ROWS,), jnp.int32, ops.BY_ROW)


# Copies


def copy_pages(
    source: Any,
    target: Any,
    firsts: Sequence[Int[Array, ""] | int],
    rooms: Sequence[Int[Array, ""] | int],
) -> None:
    """Starts to copy pages of 16 rows; each thread of the warpgroup copies its own chunks.

    Args:
      source: `[S, H]` in global memory, 16-bit numbers.
      target: `[16 · pages, H]` in shared memory, `ops.tiled`.
      firsts: The first row of each page in `source`.
      rooms: Number of existing rows per page, any integer; missing rows become zeros, unread.
    """
    if ops.is_interpreted():
        index = jax.lax.broadcasted_iota(jnp.int32, (PAGE, source.shape[1]), 0)
        for place, (first, room) in enumerate(zip(firsts, rooms, strict=True)):
            rows = source[pl.ds(first, PAGE)]
            target[pl.ds(place * PAGE, PAGE)] = jnp.where(index < room, rows, jnp.zeros_like(rows))
        return
    width = source.shape[1]
    count = len(firsts)

    @mlir.emit(source, (target, _tiled(target)), numbers=[*map(jnp.int32, (*firsts, *rooms))])
    def _(source: Any, target: Any, *numbers: Any) -> None:
        _start_copies(source, _Chunks(target, width), numbers[:count], numbers[count:])


def copy_own_pages(
    source: Any, target: Any, firsts: Int[Array, "64"], rooms: Int[Array, "64"]
) -> None:
    """Starts to copy one page of 16 rows per warp; each thread copies its own chunks.

    Args:
      source: `[S, H]` in global memory, 16-bit numbers.
      target: `[64, H]` in shared memory, `ops.tiled`; each warp fills its own 16 rows.
      firsts: The first row of each warp's page in `source`, a `warp_numbers` vector.
      rooms: Number of existing rows in each warp's page, likewise, any integer; missing rows become
        zeros and are not read.
    """
    if ops.is_interpreted():
        own = range(0, _ROWS, PAGE)
        for warp, place in enumerate(own):
            page = target.at[pl.ds(place, PAGE)]
            copy_pages(source, page, [firsts[own[warp]]], [rooms[own[warp]]])
        return
    width = source.shape[1]

    @mlir.emit(source, (target, _tiled(target)), (firsts, ops.BY_ROW), (rooms, ops.BY_ROW))
    def _(source: Any, target: Any, *numbers: Any) -> None:
        first, room = (mlir.scalars(x)[0] for x in numbers)
        _start_copies(source, _Chunks(target, width, of_warp=True), [first], [room])


def _start_copies(
    source: ir.Value, chunks: "_Chunks", firsts: Sequence[ir.Value], rooms: Sequence[ir.Value]
) -> None:
    """Starts to copy the thread's chunks of pages."""
    stride = ir.MemRefType(source.type).get_strides_and_offset()[0][0]
    start = _global_pointer(source)
    inside = arith.muli(chunks.row, _constant(stride * 2))
    inside = arith.addi(inside, arith.muli(chunks.column, _constant(_CHUNK)))
    inside = mlir.long(inside)
    for page, (first, room) in enumerate(zip(firsts, rooms, strict=True)):
        offset = arith.addi(arith.muli(mlir.long(first), mlir.long(stride * 2)), inside)
        place = arith.addi(start, offset)
        left = arith.subi(room, chunks.row)
        for turn in range(chunks.turns):
            row = turn * chunks.height
            code = f"{{ .reg .pred p; .reg .b32 n; setp.gt.s32 p, $2, {row}; "
            code += f"selp.b32 n, {_CHUNK}, 0, p; "
            at = "$0"
            if flip := chunks.flip(turn):
                code += f".reg .b32 a; xor.b32 a, $0, {flip}; "
                at = "a"
            at = f"[{at} + {chunks.offset(page, turn)}], [$1 + {row * stride * 2}]"
            mlir.effect(
                f"{code} cp.async.cg.shared.global {at}, {_CHUNK}, n; }}", chunks.place, place, left
            )


def commit_copies() -> None:
    """Closes a group of all copies that this thread started since the last call; may be empty."""
    _emit("cp.async.commit_group;")


def wait_copies(in_flight: int) -> None:
    """Waits until at most the last `in_flight` of this thread's groups are still copying.

    Other threads see the copies only after a barrier.
    """
    _emit(f"cp.async.wait_group {in_flight};")


def warp_barrier() -> None:
    """Waits for the warp's other threads and makes their writes and copies visible."""
    _emit("bar.warp.sync 0xffffffff;")


def _emit(code: str) -> None:
    if not ops.is_interpreted():

        @mlir.emit()
        def emit() -> None:
            mlir.effect(code)


def write_rows(source: Any, target: Any, first: int, is_wanted: Any) -> None:
    """Writes rows of shared memory to global memory, 16 bytes per thread at a time.

    Args:
      source: `[M, H]` in shared memory, `ops.tiled`.
      target: `[R, H]` in global memory.
      first: First of the `R` rows of `source` to write, a multiple of 16.
      is_wanted: Whether to write.
    """
    height, width = target.shape
    if ops.is_interpreted():

        @pl.when(is_wanted)
        def _() -> None:
            target[...] = source[pl.ds(first, height)]

        return

    is_wanted = jnp.asarray(is_wanted).astype(jnp.int32)

    @mlir.emit((source, _tiled(source)), target, numbers=[is_wanted])
    def write(source: Any, target: Any, is_wanted: Any) -> None:
        chunks = _Chunks(source, width, anew=True)
        stride = ir.MemRefType(target.type).get_strides_and_offset()[0][0]
        inside = arith.muli(mlir.long(chunks.row), mlir.long(stride * 2))
        inside = arith.addi(inside, mlir.long(arith.muli(chunks.column, _constant(_CHUNK))))
        place = arith.addi(_global_pointer(target), inside)
        wanted = mlir.compare("ne", is_wanted, 0)
        for page in range(height // PAGE):
            for turn in range(chunks.turns):
                offset = chunks.offset(first // PAGE + page, turn)
                held = mlir.load(chunks.place, 4, offset=offset, space="shared")
                row = PAGE * page + turn * chunks.height
                mlir.effect(
                    f"st.global.v4.b32 [$0 + {row * stride * 2}], {{$1, $2, $3, $4}};",
                    place,
                    *held,
                    predicate=wanted,
                )


def write_vector(vector: Float[Array, "M"], target: Any, first: int, is_wanted: Any) -> None:
    """Writes 64 numbers, one for each row of sums, from registers to global memory.

    Args:
      vector: Float32, in `ops.BY_ROW`.
      target: `[64]` in global memory.
      first: The first of the numbers, a multiple of 64.
      is_wanted: Whether to write.
    """
    if ops.is_interpreted():

        @pl.when(is_wanted)
        def _() -> None:
            target[...] = vector[first : first + 64]

        return

    is_wanted = jnp.asarray(is_wanted).astype(jnp.int32)

    @mlir.emit((vector, ops.BY_ROW), target, numbers=[is_wanted])
    def write(vector: Any, target: Any, is_wanted: Any) -> None:
        thread = _own_thread(anew=True)
        wanted = mlir.compare("ne", is_wanted, 0)
        # Four threads have the same two numbers, of a row and of the row 8 below.
        is_first = mlir.compare("eq", arith.andi(thread, _constant(3)), 0)
        row = arith.andi(arith.shrui(thread, _constant(2)), _constant(7))
        warp = arith.shrui(thread, _constant(5))
        row = arith.addi(row, arith.muli(warp, _constant(16)))
        held = mlir.scalars(vector)[first // 32 :][:2]
        with mgpu.when(arith.andi(wanted, is_first)):
            for half, number in enumerate(held):
                place = arith.addi(row, _constant(8 * half))
                memref.store(number, target, [mlir.index(place)])


def unknown(value: int) -> Int[Array, ""]:
    """Hides an integer from the compiler, so that it does not unroll a loop of that length."""
    if ops.is_interpreted():
        return jnp.int32(value)

    @mlir.emit(result=mlir.integer_type())
    def make() -> Any:
        code = f"mov.u32 $0, {value};"
        found = mgpu.utils.inline_ptx(code, result_types=mlir.i32(), has_side_effects=True)
        return mlir.as_array(found)

    return make


# One token: each warp has the 16 rows of heads, and its own keys


def warp_numbers() -> Int[Array, "64"]:
    """Returns each warp's index in the warpgroup, repeated over its 16 rows, in `ops.BY_ROW`.

    All per-warp numbers have this layout, in which each thread holds one number.
    """
    if ops.is_interpreted():
        return jnp.arange(_ROWS, dtype=jnp.int32) // PAGE

    @mlir.emit(result=_OF_WARPS)
    def get() -> Any:
        return _of_warp(_own_warp())

    return get


def read_for_warps(source: Any, places: Int[Array, "64"]) -> Int[Array, "64"]:
    """Reads integers `[P]` of global memory, at one place per warp."""
    if ops.is_interpreted():
        return source[...][places]

    @mlir.emit(source, (places, ops.BY_ROW), result=_OF_WARPS)
    def read(source: Any, places: Any) -> Any:
        return _of_warp(memref.load(source, [mlir.index(mlir.scalars(places)[0])]))

    return read


def _of_warp(value: ir.Value) -> mgpu.FragmentedArray:
    """Wraps a per-warp number: each thread has it for its row and the row 8 below."""
    return _by_row([value] * 2, is_signed=True)


def _by_row(numbers: list[ir.Value], *, is_signed: bool | None = None) -> mgpu.FragmentedArray:
    """Wraps a vector of 64 rows, two per thread."""
    one = ir.VectorType.get((1,), numbers[0].type)
    registers = [vector.from_elements(one, [x]) for x in numbers]
    return mlir.of_registers(registers, (_ROWS,), ops.BY_ROW, is_signed=is_signed)


def read_heads(source: Any) -> Float[Array, "64 H"]:
    """Reads queries `[n, H]` of at most 16 heads from global memory, the same in each warp.

    Rows beyond `n` repeat the last one.
    """
    count, width = source.shape
    if ops.is_interpreted():
        rows = jnp.minimum(jnp.arange(_ROWS) % PAGE, count - 1)
        return source[...][rows]

    @mlir.emit(source, result=_matrix_type((_ROWS, width), source.dtype))
    def read(source: Any) -> Any:
        kind = ir.VectorType.get((2,), ir.MemRefType(source.type).element_type)
        stride = ir.MemRefType(source.type).get_strides_and_offset()[0][0]
        row, column = _own_entry()
        # With at most eight heads, a thread's second row has no head, so skip its load.
        rows = [row, arith.addi(row, _constant(8))] if count > 8 else [row]
        places = []
        for one in rows:
            inside = arith.muli(arith.minsi(one, _constant(count - 1)), _constant(stride))
            inside = arith.muli(arith.addi(inside, column), _constant(2))
            places.append(arith.addi(_global_pointer(source), mlir.long(inside)))
        registers = []
        for tile in range(width // 8):
            found = [
                mlir.run(f"ld.global.b32 $0, [$1 + {tile * _CHUNK}];", place) for place in places
            ]
            registers += [mgpu.utils.bitcast(x, kind) for x in (found * 2)[:2]]
        return mlir.of_registers(registers, (_ROWS, width), ops.ACCUMULATOR)

    return read


def over_warps(vector: Float[Array, "64"], operation: str, scratch: Any) -> Float[Array, "64"]:
    """Returns the sum or maximum of each row's numbers over the four warps, the same in each.

    All warps pass two barriers.

    Args:
      vector: Float32, in `ops.BY_ROW`.
      operation: `"add"` or `"max"`.
      scratch: `[64]` float32 in shared memory.
    """
    if ops.is_interpreted():
        rows = vector.reshape(_WARPS, PAGE)
        found = jnp.sum(rows, axis=0) if operation == "add" else jnp.max(rows, axis=0)
        return jnp.tile(found, _WARPS)
    combine = {"add": arith.addf, "max": arith.maximumf}[operation]

    @mlir.emit(
        (vector, ops.BY_ROW), scratch, result=mlir.array_type((_ROWS,), jnp.float32, ops.BY_ROW)
    )
    def reduce(vector: Any, scratch: Any) -> Any:
        row, _ = _own_entry()
        own = arith.addi(row, arith.muli(_own_warp(), _constant(PAGE)))
        for half, number in enumerate(mlir.scalars(vector)):
            memref.store(number, scratch, [mlir.index(arith.addi(own, _constant(8 * half)))])
        mgpu.warpgroup_barrier()
        found = []
        for half in (0, 8):
            places = [arith.addi(row, _constant(first + half)) for first in range(0, _ROWS, PAGE)]
            numbers = [memref.load(scratch, [mlir.index(place)]) for place in places]
            found.append(functools.reduce(combine, numbers))
        mgpu.warpgroup_barrier()
        return _by_row(found)

    return reduce


def write_heads(vector: Float[Array, "64"], target: Any) -> None:
    """Writes the numbers `[n]` of the first rows to global memory, the same in each warp."""
    (count,) = target.shape
    if ops.is_interpreted():
        target[...] = vector[:count]
        return

    @mlir.emit((vector, ops.BY_ROW), target)
    def write(vector: Any, target: Any) -> None:
        row, column = _own_entry()
        is_first = mlir.compare("slt", arith.ori(column, _own_warp()), 1)
        for half, number in enumerate(mlir.scalars(vector)):
            place = arith.addi(row, _constant(8 * half))
            with mgpu.when(arith.andi(is_first, mlir.compare("slt", place, count))):
                memref.store(number, target, [mlir.index(place)])


def write_sum_of_warps(
    sums: Float[Array, "64 H"], target: Any, scratch: Any, *, transposed: bool = False
) -> None:
    """Writes the sums of rows over the four warps to global memory.

    All warps must have passed a barrier since they used the scratch; they pass one here.

    Args:
      sums: Float32, in an accumulator's layout.
      target: `[n, H]` of 16-bit numbers, for the first rows, or float32 `[H, n]`.
      scratch: Shared memory, `ops.tiled`, whose first 256 H bytes are overwritten.
      transposed: Whether the target is `[H, n]`.
    """
    count, width = target.shape[::-1] if transposed else target.shape
    if ops.is_interpreted():
        found = jnp.sum(_by_warp(sums), axis=0)[:count]
        target[...] = found.T if transposed else found.astype(target.dtype)
        return

    @mlir.emit((sums, ops.ACCUMULATOR), target, (scratch, _tiled(scratch)))
    def write(sums: Any, target: Any, scratch: Any) -> None:
        numbers = mlir.scalars(sums)  # four per eight columns
        size = _THREADS * _CHUNK  # bytes of all threads' numbers of eight columns
        place = arith.muli(_own_thread(anew=False), _constant(_CHUNK))
        place = arith.addi(mlir.shared_pointer(scratch), place)
        for tile in range(width // 8):
            mlir.effect(
                f"st.shared.v4.f32 [$0 + {tile * size}], {{$1, $2, $3, $4}};",
                place,
                *numbers[4 * tile :][:4],
            )
        mgpu.warpgroup_barrier()
        own = width // 8 // _WARPS  # groups of eight columns that each warp adds
        first = arith.muli(_own_warp(), _constant(own))
        place = arith.addi(mlir.shared_pointer(scratch), arith.muli(mlir.lane(), _constant(_CHUNK)))
        place = arith.addi(place, arith.muli(first, _constant(size)))
        row, column = _own_entry()
        column = arith.addi(column, arith.muli(first, _constant(8)))
        for tile in range(own):
            parts = [
                mlir.load(place, 4, offset=tile * size + warp * mlir.LANES * _CHUNK, space="shared")
                for warp in range(_WARPS)
            ]
            kind = ir.F32Type.get()
            entries = [
                functools.reduce(arith.addf, [arith.bitcast(kind, x) for x in four])
                for four in zip(*parts, strict=True)
            ]
            at = arith.addi(column, _constant(8 * tile))
            for half in range(2):
                head = arith.addi(row, _constant(8 * half))
                with mgpu.when(mlir.compare("slt", head, count)):
                    for index, entry in enumerate(entries[2 * half :][:2]):
                        where = [head, arith.addi(at, _constant(index))]
                        _store(entry, target, where[::-1] if transposed else where)


def write_columns(matrix: Float[Array, "64 8"], target: Any, first: Any) -> None:
    """Writes columns to rows of global memory.

    Args:
      matrix: Float32, in an accumulator's layout.
      target: `[n, 64]` in global memory, 16-bit numbers.
      first: Target row of the first column; columns beyond the last row are not written.
    """
    count = target.shape[0]
    if ops.is_interpreted():
        for index in range(matrix.shape[1]):

            @pl.when(first + index < count)
            def _(index: int = index) -> None:
                target[first + index] = matrix[:, index].astype(target.dtype)

        return

    @mlir.emit((matrix, ops.ACCUMULATOR), target, numbers=(jnp.asarray(first, jnp.int32),))
    def write(matrix: Any, target: Any, first: Any) -> None:
        row, column = _own_entry()
        row = arith.addi(row, arith.muli(_own_warp(), _constant(PAGE)))
        column = arith.addi(column, first)
        for place, entry in enumerate(mlir.scalars(matrix)):
            half, index = divmod(place, 2)
            head = arith.addi(column, _constant(index))
            with mgpu.when(mlir.compare("slt", head, count)):
                _store(entry, target, [head, arith.addi(row, _constant(8 * half))])


def _store(entry: ir.Value, target: ir.Value, where: list[ir.Value]) -> None:
    """Writes a float32 number, rounded to the target's type."""
    kind = ir.MemRefType(target.type).element_type
    entry = entry if kind == ir.F32Type.get() else arith.truncf(kind, entry)
    memref.store(entry, target, [mlir.index(x) for x in where])


def _own_entry() -> tuple[ir.Value, ir.Value]:
    """Returns row and column of the thread's first number in its warp's 16 rows of sums."""
    lane = mlir.lane()
    row = arith.shrui(lane, _constant(2))
    return row, arith.muli(arith.andi(lane, _constant(3)), _constant(2))


def _by_warp(x: Array) -> Array:
    """Splits an array into the 16 rows of each warp."""
    return x.reshape(_WARPS, PAGE, x.shape[-1])


# Values that are not finite


def clear_from_bad(values: Any, places: Sequence[Int[Array, ""]], scratch: Any) -> Int[Array, ""]:
    """Sets a tile's own values to zero from the first non-finite one on.

    All warps must have passed a barrier since the values arrived; they pass two here.

    Args:
      values: `[16 · pages, H]` in shared memory, `ops.tiled`.
      places: Place of each page's first row in the tile; negative if not the tile's own.
      scratch: Integers in shared memory, one per warp.

    Returns:
      The place of that value in the tile, or `NOBODY`.
    """
    width = values.shape[1]
    if ops.is_interpreted():
        held = values[...]
        index = jax.lax.broadcasted_iota(jnp.int32, (PAGE,), 0)
        place = jnp.concatenate([jnp.where(x < 0, x, x + index) for x in places])
        is_bad = ~jnp.isfinite(held).all(axis=1) & (place >= 0)
        bad = jnp.min(jnp.where(is_bad, place, NOBODY))
        values[...] = jnp.where((place < bad)[:, None], held, jnp.zeros_like(held))
        return bad
    kind = _packed_kind(values.dtype)

    own_tile = values, _tiled(values)

    @mlir.emit(own_tile, scratch, numbers=places, result=mlir.integer_type())
    def found(values: Any, scratch: Any, *places: Any) -> Any:
        chunks, zero = _Chunks(values, width, anew=True), _constant(0)
        first, own = _constant(NOBODY), []
        for page, start in enumerate(places):
            is_own = mlir.compare("sge", start, zero)
            for turn in range(chunks.turns):
                row = arith.addi(chunks.row, _constant(turn * chunks.height))
                place = arith.select(is_own, arith.addi(start, row), _constant(-1))
                total = zero
                offset = chunks.offset(page, turn)
                for pair in mlir.load(chunks.place, 4, offset=offset, space="shared"):
                    # Multiplying a non-finite number by 0 gives NaN.
                    code = f"fma.rn.{kind} $0, $1, $2, $3;"
                    total = mlir.run(code, pair, zero, total)
                is_bad = mlir.compare("ne", total, zero)
                is_bad = arith.andi(is_bad, is_own)
                first = arith.minsi(first, arith.select(is_bad, place, _constant(NOBODY)))
                own.append((place, offset))
        first = mlir.over_lanes(first, nvvm.ReductionKind.MIN)
        memref.store(first, scratch, [mlir.index(_own_warp())])
        mgpu.warpgroup_barrier()
        other = arith.andi(mlir.lane(), _constant(_WARPS - 1))
        first = memref.load(scratch, [mlir.index(other)])
        first = mlir.over_lanes(first, nvvm.ReductionKind.MIN)
        for place, offset in own:
            mlir.effect(
                f"st.shared.v4.b32 [$0 + {offset}], {{$1, $1, $1, $1}};",
                chunks.place,
                zero,
                predicate=mlir.compare("sge", place, first),
            )
        mgpu.warpgroup_barrier()
        return mlir.as_array(first)

    return found


class _Chunks:
    """The chunks of a thread in pages in shared memory: `turns` chunks of each page.

    The threads of a warpgroup share each page, or the threads of a warp share the warp's own page.

    Attributes:
      row: Row of the thread's first chunk.
      column: Index of the chunk within the row.
      height: Rows from one chunk of a page to the next.
      turns: Chunks per page.
      place: Address of the first chunk.
    """

    def __init__(
        self, ref: ir.Value, width: int, *, anew: bool = False, of_warp: bool = False
    ) -> None:
        per_row = width * 2 // _CHUNK
        thread = mlir.lane() if of_warp else _own_thread(anew=anew)
        self.height = (mlir.LANES if of_warp else _THREADS) // per_row
        self.turns = PAGE // self.height
        self._tile_row = width * 2 // _LINE * _TILE  # bytes per eight rows
        self.row = arith.shrui(thread, _constant(per_row.bit_length() - 1))
        self.column = arith.andi(thread, _constant(per_row - 1))
        low = arith.andi(self.row, _constant(7))
        place = arith.muli(arith.shrui(self.row, _constant(3)), _constant(self._tile_row))
        tile = arith.shrui(self.column, _constant(_PER_LINE.bit_length() - 1))
        place = arith.addi(place, arith.muli(tile, _constant(_TILE)))
        place = arith.addi(place, arith.muli(low, _constant(_LINE)))
        turned = arith.xori(arith.andi(self.column, _constant(_PER_LINE - 1)), low)
        place = arith.addi(place, arith.muli(turned, _constant(_CHUNK)))
        if of_warp:
            page = arith.muli(_own_warp(), _constant(PAGE // 8 * self._tile_row))
            place = arith.addi(place, page)
        self.place = arith.addi(mlir.shared_pointer(ref), place)

    def offset(self, page: int, turn: int) -> int:
        """Returns the bytes from the first chunk, with bits flipped, to a chunk of a page."""
        tile, row = divmod(page * PAGE + turn * self.height, 8)
        return tile * self._tile_row + row * _LINE

    def flip(self, turn: int) -> int:
        """Returns the address bits that the swizzle flips between the first and a later chunk."""
        return turn * self.height % 8 * _CHUNK


# Products


def multiply_keys(queries: Any, keys: Any) -> Float[Array, "M S"]:
    """Returns float32 scores `Q Kᵀ` of queries `[M, H]` and keys `[S, H]` in shared memory."""
    if ops.is_interpreted():
        return jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
    (rows, width), columns = queries.shape, keys.shape[0]
    kind = _kind(queries.dtype)

    @mlir.emit(
        (queries, _tiled(queries)),
        (keys, _tiled(keys)),
        result=_matrix_type((rows, columns), jnp.float32),
    )
    def multiply(queries: Any, keys: Any) -> Any:
        left = _Matrices(queries, width, is_row_first=True, of_warp=True)
        right = _Matrices(keys, width, is_row_first=False)
        sums = [mlir.zero_sums() for _ in range(rows // 64 * columns // 8)]
        for step in range(width // 16):
            own = [left.load(8 * tile, step) for tile in range(rows // 64)]
            for pair in range(columns // 16):
                both = right.load(2 * pair, step)
                for half in range(2):
                    _add(kind, own, both[2 * half :][:2], sums, columns // 8, 2 * pair + half)
        return _as_array(sums, (rows, columns))

    return multiply


def multiply_own_keys(queries: Float[Array, "64 H"], keys: Any) -> Float[Array, "64 16"]:
    """Returns float32 scores of each warp's 16 queries with its own 16 keys.

    Args:
      queries: 16-bit numbers in registers, in an accumulator's layout.
      keys: `[64, H]` in shared memory, `ops.tiled`, 16 rows per warp.
    """
    if ops.is_interpreted():
        pairs = (_by_warp(x) for x in (queries, keys[...]))
        return jnp.einsum("wqh,wkh->wqk", *pairs, preferred_element_type=jnp.float32).reshape(
            _ROWS, PAGE
        )
    width, kind = queries.shape[1], _kind(keys.dtype)

    @mlir.emit(
        (queries, ops.ACCUMULATOR),
        (keys, _tiled(keys)),
        result=_matrix_type((_ROWS, PAGE), jnp.float32),
    )
    def multiply(queries: Any, keys: Any) -> Any:
        right = _Matrices(keys, width, is_row_first=False, of_warp=True)
        held = [mgpu.utils.bitcast(x, mlir.i32()) for x in queries.registers.flat]
        sums = [mlir.zero_sums() for _ in range(PAGE // 8)]
        for step in range(width // 16):
            both = right.load(0, step)
            for half in range(2):
                _add(kind, [held[4 * step :][:4]], both[2 * half :][:2], sums, 2, half)
        return _as_array(sums, (_ROWS, PAGE))

    return multiply


def add_values(
    sums: Float[Array, "M H"], weights: Float[Array, "M S"], values: Any, *, of_warp: bool = False
) -> Float[Array, "M H"]:
    """Returns `sums + P V` for weights in registers and values `[S, H]` in shared memory.

    Args:
      sums: Float32, in an accumulator's layout.
      weights: 16-bit numbers, in an accumulator's layout.
      values: 16-bit numbers, `ops.tiled`.
      of_warp: Whether each warp has its own 16 rows of the values, `[64, H]` in all; `S` is 16.
    """
    if ops.is_interpreted() and of_warp:
        pairs = (_by_warp(x) for x in (weights, values[...]))
        added = jnp.einsum("wqk,wkh->wqh", *pairs, preferred_element_type=jnp.float32)
        return sums + added.reshape(sums.shape)
    if ops.is_interpreted():
        return sums + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
    (rows, keys), width, kind = weights.shape, values.shape[1], _kind(values.dtype)

    @mlir.emit(
        (sums, ops.ACCUMULATOR),
        (weights, ops.ACCUMULATOR),
        (values, _tiled(values)),
        result=_matrix_type((rows, width), jnp.float32),
    )
    def multiply(sums: Any, weights: Any, values: Any) -> Any:
        right = _Matrices(values, width, is_row_first=True, of_warp=of_warp)
        found = [list(x) for x in np.array(mlir.scalars(sums), object).reshape(-1, 4)]
        held = [mgpu.utils.bitcast(x, mlir.i32()) for x in weights.registers.flat]
        for step in range(keys // 16):
            # Two pairs of registers per 64 rows: for eight keys, and for the next eight.
            own = [held[tile * keys // 4 + 4 * step :][:4] for tile in range(rows // 64)]
            for pair in range(width // 16):
                both = right.load(2 * step, pair, transposed=True)
                for half in range(2):
                    _add(kind, own, both[2 * half :][:2], found, width // 8, 2 * pair + half)
        return _as_array(found, (rows, width))

    return multiply


class _Matrices:
    """Loads tiles of 8 rows of one chunk, four at a time per warp.

    Args:
      ref: `[rows, width]` in shared memory.
      width: 16-bit numbers per row.
      is_row_first: Whether the second tile has the next rows instead of the next chunk.
      of_warp: Whether each warp has its own 16 rows.
    """

    def __init__(
        self, ref: ir.Value, width: int, *, is_row_first: bool, of_warp: bool = False
    ) -> None:
        self._tile_row = width * 2 // _LINE * _TILE
        lane = mlir.lane()
        row = arith.andi(lane, _constant(7))
        first = arith.andi(arith.shrui(lane, _constant(3)), _constant(1))
        second = arith.shrui(lane, _constant(4))
        below, beside = (first, second) if is_row_first else (second, first)
        if of_warp:
            below = arith.addi(below, arith.muli(_own_warp(), _constant(2)))
        place = arith.addi(
            arith.muli(below, _constant(self._tile_row)), arith.muli(row, _constant(_LINE))
        )
        place = arith.addi(mlir.shared_pointer(ref), place)
        self._place = arith.addi(place, arith.muli(arith.xori(beside, row), _constant(_CHUNK)))
        self._pairs = min(width * 2, _LINE) // (2 * _CHUNK)  # per tile row

    def load(self, tile: int, pair: int, *, transposed: bool = False) -> list[ir.Value]:
        """Loads four tiles, starting at a tile of eight rows and a pair of chunks.

        Memory begins at a multiple of `_TILE`, so that an address has separate bits for the chunk.
        This flips them on each load, since an address per pair would take too many registers.
        """
        line, pair = divmod(pair, self._pairs)
        offset, turned = tile * self._tile_row + line * _TILE, ".trans" if transposed else ""
        code = f"{{ .reg .b32 a; xor.b32 a, $4, {2 * _CHUNK * pair}; "
        code += f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, "
        return mlir.ptx(
            f"{code}[a + {offset}]; }}", self._place, kinds=[mlir.i32()] * 4, convergent=True
        )


def _add(
    kind: str, left: list[Any], right: list[Any], sums: list[Any], columns: int, column: int
) -> None:
    """Adds a product to a tile of eight columns, for each 64 rows."""
    for tile, own in enumerate(left):
        place = tile * columns + column
        sums[place] = mlir.multiply(kind, own, right, sums[place])


def _as_array(sums: list[list[ir.Value]], shape: tuple[int, int]) -> mgpu.FragmentedArray:
    """Wraps the sums of tiles of eight columns, in row-major order of tiles, as an array."""
    registers = []
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for four in sums:
        registers += [vector.from_elements(pair, four[half : half + 2]) for half in (0, 2)]
    return mlir.of_registers(registers, shape, ops.ACCUMULATOR)


def _matrix_type(shape: tuple[int, int], dtype: Any) -> Any:
    """Returns the result type of a function that gives a matrix in an accumulator's layout."""
    return mlir.array_type(shape, dtype, ops.ACCUMULATOR)


def _kind(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]


def _packed_kind(dtype: Any) -> str:
    return f"{_kind(dtype)}x2"


def _tiled(ref: Any) -> Any:
    """Returns the MLIR argument type of a reference to `ops.tiled` memory."""
    return plgpu.RefType(ops.transforms(ref.dtype, ops.SWIZZLE_BYTES))


_constant = mlir.constant


def _own_thread(*, anew: bool) -> ir.Value:
    """Returns the index of the thread in its warpgroup.

    `anew` reads it again, for rare uses: otherwise the compiler keeps derived numbers in registers.
    """
    if not anew:
        return arith.andi(mlir.thread(), _constant(_THREADS - 1))
    thread = mgpu.utils.inline_ptx(
        "mov.u32 $0, %tid.x;", result_types=mlir.i32(), has_side_effects=True
    )
    return arith.andi(thread, _constant(_THREADS - 1))


def _own_warp() -> ir.Value:
    """Returns the index of the warp in its warpgroup."""
    return arith.andi(mlir.warp(), _constant(_WARPS - 1))


def _global_pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))
