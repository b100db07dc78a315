"""Products of single warps (`mma.sync`) and copies of single threads (`cp.async`), from Ampere on.

Every NVIDIA GPU of compute capability 8.0 or higher has these instructions, Hopper and Blackwell
too. Pallas has a product (`plgpu.mma`) and a copy that becomes `cp.async`, but that copy is for
GPUs before Hopper alone and takes no sizes that depend on a row. So both are emitted here, and a
kernel is the same code on all of these GPUs.

Matrices lie in shared memory as `ops.tiled` places them: tiles of 8 rows of 128 bytes, in which
the 16 bytes (a chunk) `c` of row `r` lie at place `c ^ r`. A warp reads four tiles of 8 rows of one
chunk each at a time (`ldmatrix`) without bank conflicts. In registers, sums lie as
`ops.ACCUMULATOR` says: warp `w` of a warpgroup has rows `16 w` to `16 w + 15` of each 64.

Each function has a stand-in for Pallas' interpreter, where copies are done at once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm, memref, nvvm, vector
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import ops, words

arith: Any = typed_arith  # its annotations lack the operands that its functions take

PAGE = 16  # rows that are copied together
NOBODY = 64  # more than any query's place in a tile
_WARPS, _THREADS = 4, 128  # of a warpgroup
_CHUNK, _LINE, _TILE = 16, 128, 1024  # bytes of a chunk, of a tile's row, of a tile
_PER_LINE = _LINE // _CHUNK
_SCALAR = plgpu.Layout.WG_SPLAT(())


# Copies


def copy_pages(
    source: Any,
    target: Any,
    firsts: Sequence[Int[Array, ""] | int],
    rooms: Sequence[Int[Array, ""] | int],
    *,
    interpret: bool,
) -> None:
    """Starts to copy pages of 16 rows, of a warpgroup's threads each its chunks.

    Args:
      source: `[S, H]` in global memory, 16-bit numbers.
      target: `[16 · pages, H]` in shared memory, `ops.tiled`.
      firsts: The first row of each page in `source`.
      rooms: How many rows there are of each page, any integer; the others become zeros and are not
        read.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        index = jax.lax.broadcasted_iota(jnp.int32, (PAGE, source.shape[1]), 0)
        for place, (first, room) in enumerate(zip(firsts, rooms, strict=True)):
            rows = source[pl.ds(first, PAGE)]
            target[pl.ds(place * PAGE, PAGE)] = jnp.where(index < room, rows, jnp.zeros_like(rows))
        return
    width = source.shape[1]
    count = len(firsts)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _tiled(target), *[_SCALAR] * (2 * count)),
    )
    def copy(_: Any, source: Any, target: Any, *scalars: Any) -> None:
        firsts, rooms = (
            [words.scalars(x)[0] for x in part] for part in (scalars[:count], scalars[count:])
        )
        chunks = _Chunks(target, width)
        stride = ir.MemRefType(source.type).get_strides_and_offset()[0][0]
        start = _global_pointer(source)
        inside = arith.muli(chunks.row, _constant(stride * 2))
        inside = arith.addi(inside, arith.muli(chunks.column, _constant(_CHUNK)))
        inside = _long(inside)
        for page, (first, room) in enumerate(zip(firsts, rooms, strict=True)):
            offset = arith.addi(arith.muli(_long(first), _long_constant(stride * 2)), inside)
            place = arith.addi(start, offset)
            left = arith.subi(room, chunks.row)
            for turn in range(chunks.turns):
                row = turn * chunks.height
                size = f"{{ .reg .pred p; .reg .b32 n; setp.gt.s32 p, $2, {row}; "
                size += f"selp.b32 n, {_CHUNK}, 0, p; "
                at = f"[$0 + {chunks.offset(page, turn)}], [$1 + {row * stride * 2}]"
                mgpu.utils.inline_ptx(
                    f"{size} cp.async.cg.shared.global {at}, {_CHUNK}, n; }}",
                    chunks.place,
                    place,
                    left,
                    has_side_effects=True,
                )

    copy(source, target, *map(jnp.int32, (*firsts, *rooms)))


def commit_copies(*, interpret: bool) -> None:
    """What this thread has started to copy since the last call is a group, which may be empty."""
    _emit("cp.async.commit_group;", interpret)


def wait_copies(in_flight: int, *, interpret: bool) -> None:
    """Waits until at most so many of this thread's groups are under way, the last ones.

    Other threads know of that after a barrier.
    """
    _emit(f"cp.async.wait_group {in_flight};", interpret)


def _emit(code: str, interpret: bool) -> None:
    if not interpret:

        @plgpu.inline_mgpu()
        def emit(_: Any) -> None:
            mgpu.utils.inline_ptx(code, has_side_effects=True)

        emit()


def write_rows(source: Any, target: Any, first: int, is_wanted: Any, *, interpret: bool) -> None:
    """Writes rows of shared memory to global memory, 16 bytes of a thread at a time.

    Args:
      source: `[M, H]` in shared memory, `ops.tiled`.
      target: `[R, H]` in global memory, which takes the rows from `first` on.
      first: A multiple of 16.
      is_wanted: Nothing is written unless it is true.
      interpret: Whether the interpreter runs the kernel.
    """
    height, width = target.shape
    if interpret:

        @pl.when(is_wanted)
        def _() -> None:
            target[...] = source[pl.ds(first, height)]

        return

    @plgpu.inline_mgpu(arg_types=(_tiled(source), plgpu.RefType(), _SCALAR))
    def write(_: Any, source: Any, target: Any, is_wanted: Any) -> None:
        chunks = _Chunks(source, width, anew=True)
        stride = ir.MemRefType(target.type).get_strides_and_offset()[0][0]
        inside = arith.muli(_long(chunks.row), _long_constant(stride * 2))
        inside = arith.addi(inside, _long(arith.muli(chunks.column, _constant(_CHUNK))))
        place = arith.addi(_global_pointer(target), inside)
        wanted = arith.cmpi(arith.CmpIPredicate.ne, words.scalars(is_wanted)[0], _constant(0))
        for page in range(height // PAGE):
            for turn in range(chunks.turns):
                held = _load_chunk(chunks.place, chunks.offset(first // PAGE + page, turn))
                row = PAGE * page + turn * chunks.height
                mgpu.utils.inline_ptx(
                    f"st.global.v4.b32 [$0 + {row * stride * 2}], {{$1, $2, $3, $4}};",
                    place,
                    *held,
                    predicate=wanted,
                    has_side_effects=True,
                )

    write(source, target, jnp.asarray(is_wanted).astype(jnp.int32))


def write_vector(
    vector: Float[Array, "M"], target: Any, first: int, is_wanted: Any, *, interpret: bool
) -> None:
    """Writes 64 numbers, one for each row of sums, from registers to global memory.

    Args:
      vector: Float32, in `ops.BY_ROW`.
      target: `[64]` in global memory.
      first: The first of the numbers, a multiple of 64.
      is_wanted: Nothing is written unless it is true.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:

        @pl.when(is_wanted)
        def _() -> None:
            target[...] = vector[first : first + 64]

        return

    @plgpu.inline_mgpu(arg_types=(ops.BY_ROW, plgpu.RefType(), _SCALAR))
    def write(_: Any, vector: Any, target: Any, is_wanted: Any) -> None:
        thread = _own_thread(anew=True)
        wanted = arith.cmpi(arith.CmpIPredicate.ne, words.scalars(is_wanted)[0], _constant(0))
        # Four threads have the same numbers, of a row and of the one 8 below.
        is_first = arith.cmpi(
            arith.CmpIPredicate.eq, arith.andi(thread, _constant(3)), _constant(0)
        )
        row = arith.andi(arith.shrui(thread, _constant(2)), _constant(7))
        warp = arith.shrui(thread, _constant(5))
        row = arith.addi(row, arith.muli(warp, _constant(16)))
        held = words.scalars(vector)[first // 32 :][:2]
        with mgpu.when(arith.andi(wanted, is_first)):
            for half, number in enumerate(held):
                place = arith.addi(row, _constant(8 * half))
                memref.store(number, target, [words.index(place)])

    write(vector, target, jnp.asarray(is_wanted).astype(jnp.int32))


def clear_from_bad(
    values: Any, places: Sequence[Int[Array, ""]], scratch: Any, *, interpret: bool
) -> Int[Array, ""]:
    """Makes a tile's own values zero from the first one on that is not finite.

    All warps must have passed a barrier since the values came; they pass two here.

    Args:
      values: `[16 · pages, H]` in shared memory, `ops.tiled`.
      places: The place of each page's first row in the tile; below 0 if it is not the tile's own.
      scratch: Integers in shared memory, one for each warp.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      That value's place in the tile, or `NOBODY`.
    """
    width = values.shape[1]
    if interpret:
        held = values[...]
        index = jax.lax.broadcasted_iota(jnp.int32, (PAGE,), 0)
        place = jnp.concatenate([jnp.where(x < 0, x, x + index) for x in places])
        is_bad = ~jnp.isfinite(held).all(axis=1) & (place >= 0)
        bad = jnp.min(jnp.where(is_bad, place, NOBODY))
        values[...] = jnp.where((place < bad)[:, None], held, jnp.zeros_like(held))
        return bad
    kind = _packed_kind(values.dtype)

    @plgpu.inline_mgpu(
        arg_types=(_tiled(values), plgpu.RefType(), *[_SCALAR] * len(places)),
        return_type=words.integer_type(),
    )
    def clear(_: Any, values: Any, scratch: Any, *places: Any) -> Any:
        chunks, zero = _Chunks(values, width, anew=True), _constant(0)
        first, own = _constant(NOBODY), []
        for page, start in enumerate(words.scalars(x)[0] for x in places):
            is_own = arith.cmpi(arith.CmpIPredicate.sge, start, zero)
            for turn in range(chunks.turns):
                row = arith.addi(chunks.row, _constant(turn * chunks.height))
                place = arith.select(is_own, arith.addi(start, row), _constant(-1))
                total = zero
                for pair in _load_chunk(chunks.place, chunks.offset(page, turn)):
                    # NaN is what a multiplication with 0 leaves of what is not finite.
                    code = f"fma.rn.{kind} $0, $1, $2, $3;"
                    total = mgpu.utils.inline_ptx(code, pair, zero, total, result_types=words.i32())
                is_bad = arith.cmpi(arith.CmpIPredicate.ne, total, zero)
                is_bad = arith.andi(is_bad, is_own)
                first = arith.minsi(first, arith.select(is_bad, place, _constant(NOBODY)))
                own.append((place, chunks.offset(page, turn)))
        first = words.over_lanes(first, nvvm.ReductionKind.MIN)
        warp = arith.andi(words.warp(), _constant(_WARPS - 1))
        memref.store(first, scratch, [words.index(warp)])
        mgpu.warpgroup_barrier()
        other = arith.andi(words.lane(), _constant(_WARPS - 1))
        first = memref.load(scratch, [words.index(other)])
        first = words.over_lanes(first, nvvm.ReductionKind.MIN)
        for place, offset in own:
            mgpu.utils.inline_ptx(
                f"st.shared.v4.b32 [$0 + {offset}], {{$1, $1, $1, $1}};",
                chunks.place,
                zero,
                predicate=arith.cmpi(arith.CmpIPredicate.sge, place, first),
                has_side_effects=True,
            )
        mgpu.warpgroup_barrier()
        return words.as_array(first)

    return clear(values, scratch, *places)


class _Chunks:
    """Which chunks of pages in shared memory are a thread's: `turns` of each page.

    Attributes:
      row: The row of the first one.
      column: Which chunk of the row.
      height: Rows from one of a page to the next.
      turns: How many of a page.
      place: Address of the first one.
    """

    def __init__(self, ref: ir.Value, width: int, *, anew: bool = False) -> None:
        per_row, thread = width * 2 // _CHUNK, _own_thread(anew=anew)
        self.height = _THREADS // per_row
        self.turns = PAGE // self.height
        self._tile_row = width * 2 // _LINE * _TILE  # bytes of eight rows
        self.row = arith.shrui(thread, _constant(per_row.bit_length() - 1))
        self.column = arith.andi(thread, _constant(per_row - 1))
        low = arith.andi(self.row, _constant(7))
        place = arith.muli(arith.shrui(self.row, _constant(3)), _constant(self._tile_row))
        tile = arith.shrui(self.column, _constant(_PER_LINE.bit_length() - 1))
        place = arith.addi(place, arith.muli(tile, _constant(_TILE)))
        place = arith.addi(place, arith.muli(low, _constant(_LINE)))
        turned = arith.xori(arith.andi(self.column, _constant(_PER_LINE - 1)), low)
        place = arith.addi(place, arith.muli(turned, _constant(_CHUNK)))
        self.place = arith.addi(_shared_pointer(ref), place)

    def offset(self, page: int, turn: int) -> int:
        """Bytes from the first chunk to one of a page."""
        return (page * PAGE + turn * self.height) // 8 * self._tile_row


# Products


def multiply_keys(queries: Any, keys: Any, *, interpret: bool) -> Float[Array, "M S"]:
    """Scores `Q Kᵀ` of queries `[M, H]` and keys `[S, H]`, both in shared memory, in float32."""
    if interpret:
        return jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
    (rows, width), columns = queries.shape, keys.shape[0]
    kind = _kind(queries.dtype)

    @plgpu.inline_mgpu(
        arg_types=(_tiled(queries), _tiled(keys)),
        return_type=plgpu.ShapeDtypeStruct(
            (rows, columns), jnp.dtype(jnp.float32), ops.ACCUMULATOR
        ),
    )
    def multiply(_: Any, queries: Any, keys: Any) -> Any:
        left = _Matrices(queries, width, is_row_first=True, of_warp=True)
        right = _Matrices(keys, width, is_row_first=False)
        sums = [_zeros() for _ in range(rows // 64 * columns // 8)]
        for step in range(width // 16):
            own = [left.load(8 * tile, step) for tile in range(rows // 64)]
            for pair in range(columns // 16):
                both = right.load(2 * pair, step)
                for half in range(2):
                    _add(kind, own, both[2 * half :][:2], sums, columns // 8, 2 * pair + half)
        return _as_array(sums, (rows, columns))

    return multiply(queries, keys)


def add_values(
    sums: Float[Array, "M H"], weights: Float[Array, "M S"], values: Any, *, interpret: bool
) -> Float[Array, "M H"]:
    """`sums + P V` of weights in registers and values `[S, H]` in shared memory.

    Args:
      sums: Float32, in an accumulator's layout.
      weights: 16-bit numbers, in an accumulator's layout.
      values: 16-bit numbers, `ops.tiled`.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return sums + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
    (rows, keys), width, kind = weights.shape, values.shape[1], _kind(values.dtype)

    @plgpu.inline_mgpu(
        arg_types=(ops.ACCUMULATOR, ops.ACCUMULATOR, _tiled(values)),
        return_type=plgpu.ShapeDtypeStruct((rows, width), jnp.dtype(jnp.float32), ops.ACCUMULATOR),
    )
    def multiply(_: Any, sums: Any, weights: Any, values: Any) -> Any:
        right = _Matrices(values, width, is_row_first=True)
        found = [list(x) for x in np.array(words.scalars(sums), object).reshape(-1, 4)]
        held = [mgpu.utils.bitcast(x, words.i32()) for x in weights.registers.flat]
        for step in range(keys // 16):
            # Two pairs of registers of each 64 rows: of eight keys, and of the next eight.
            own = [held[tile * keys // 4 + 4 * step :][:4] for tile in range(rows // 64)]
            for pair in range(width // 16):
                both = right.load(2 * step, pair, transposed=True)
                for half in range(2):
                    _add(kind, own, both[2 * half :][:2], found, width // 8, 2 * pair + half)
        return _as_array(found, (rows, width))

    return multiply(sums, weights, values)


class _Matrices:
    """Tiles of 8 rows of one chunk, of which a warp loads four at a time.

    Args:
      ref: `[rows, width]` in shared memory.
      width: 16-bit numbers of a row.
      is_row_first: Whether the second of the four has the next rows, or else the next chunk.
      of_warp: Whether each warp has 16 rows of its own.
    """

    def __init__(
        self, ref: ir.Value, width: int, *, is_row_first: bool, of_warp: bool = False
    ) -> None:
        self._tile_row = width * 2 // _LINE * _TILE
        lane = words.lane()
        row = arith.andi(lane, _constant(7))
        first = arith.andi(arith.shrui(lane, _constant(3)), _constant(1))
        second = arith.shrui(lane, _constant(4))
        below, beside = (first, second) if is_row_first else (second, first)
        if of_warp:
            warp = arith.andi(words.warp(), _constant(_WARPS - 1))
            below = arith.addi(below, arith.muli(warp, _constant(2)))
        place = arith.addi(
            arith.muli(below, _constant(self._tile_row)), arith.muli(row, _constant(_LINE))
        )
        place = arith.addi(_shared_pointer(ref), place)
        self._place = arith.addi(place, arith.muli(arith.xori(beside, row), _constant(_CHUNK)))
        self._pairs = min(width * 2, _LINE) // (2 * _CHUNK)  # of a tile's row

    def load(self, tile: int, pair: int, *, transposed: bool = False) -> list[ir.Value]:
        """The four from a tile of eight rows on, and from a pair of chunks on.

        Memory begins at a multiple of `_TILE`, so that the bits of a chunk stand by themselves.
        They are flipped here: an address for each pair would take registers that are scarce.
        """
        line, pair = divmod(pair, self._pairs)
        offset, turned = tile * self._tile_row + line * _TILE, ".trans" if transposed else ""
        code = f"{{ .reg .b32 a; xor.b32 a, $4, {2 * _CHUNK * pair}; "
        code += f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, "
        return list(
            mgpu.utils.inline_ptx(
                f"{code}[a + {offset}]; }}",
                self._place,
                result_types=[words.i32()] * 4,
                has_side_effects=True,
                convergent=True,
            )
        )


def _add(
    kind: str, left: list[Any], right: list[Any], sums: list[Any], columns: int, column: int
) -> None:
    """Adds a product of each 64 rows to a tile of eight columns."""
    for tile, own in enumerate(left):
        place = tile * columns + column
        sums[place] = words.multiply(kind, own, right, sums[place])


def _as_array(sums: list[list[ir.Value]], shape: tuple[int, int]) -> mgpu.FragmentedArray:
    """Sums of tiles of eight columns, row by row of tiles, as an array."""
    layout = ops.ACCUMULATOR.to_mgpu()
    registers = []
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for four in sums:
        registers += [vector.from_elements(pair, four[half : half + 2]) for half in (0, 2)]
    found = np.empty(len(registers), object)
    found[:] = registers
    return mgpu.FragmentedArray(
        _registers=found.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def _zeros() -> list[ir.Value]:
    """No sums yet of a product."""
    return [arith.constant(ir.F32Type.get(), 0.0)] * 4


def _kind(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]


def _packed_kind(dtype: Any) -> str:
    return f"{_kind(dtype)}x2"


def _tiled(ref: Any) -> Any:
    """What a reference to `ops.tiled` memory is, for code of the compiler's own language."""
    return plgpu.RefType(ops.transforms(ref.dtype, ops.SWIZZLE_BYTES))


_constant = words.constant


def _long_constant(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(64), value)


def _long(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def _own_thread(*, anew: bool) -> ir.Value:
    """Number of the thread in its warpgroup.

    Read anew where it is seldom needed, or what follows from it would be kept in registers.
    """
    if not anew:
        return arith.andi(words.thread(), _constant(_THREADS - 1))
    thread = mgpu.utils.inline_ptx(
        "mov.u32 $0, %tid.x;", result_types=words.i32(), has_side_effects=True
    )
    return arith.andi(thread, _constant(_THREADS - 1))


def _shared_pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(words.i32(), mgpu.utils.memref_ptr(ref))


def _global_pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))


def _load_chunk(place: ir.Value, offset: int) -> list[ir.Value]:
    """Four words of shared memory."""
    return list(
        mgpu.utils.inline_ptx(
            f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];",
            place,
            result_types=[words.i32()] * 4,
            has_side_effects=True,
        )
    )
