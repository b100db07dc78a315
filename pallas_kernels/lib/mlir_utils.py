"""Helpers that emit MLIR for per-thread code in kernels."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import gpu, nvvm, vector
from jaxlib.mlir.dialects import llvm as typed_llvm
from jaxlib.mlir.dialects import math as typed_math
from jaxlib.mlir.dialects import scf as typed_scf

# The modules' type annotations lack the operands of their functions.
arith: Any = typed_arith
llvm: Any = typed_llvm
math: Any = typed_math
scf: Any = typed_scf

LANES = 32  # threads of a warp
_ALL_LANES = -1  # bit mask
_SWIZZLE = 1  # descriptor code for 128-byte swizzle


def emit(
    *operands: Any, numbers: Sequence[Any] = (), result: Any = None
) -> Callable[[Callable[..., Any]], Any]:
    """Emits the code of a function for single threads; the decorated name becomes its result.

    Args:
      *operands: References, or pairs of an array or reference and its layout or kind. The function
        gets references as MLIR values and arrays as their registers.
      numbers: Integers that are equal in all threads; the function gets them last, as MLIR values.
      result: Type of the result, if there is one.
    """
    pairs = [x if isinstance(x, tuple) else (x, plgpu.RefType()) for x in operands]
    kinds = [kind for _, kind in pairs] + [plgpu.Layout.WG_SPLAT(())] * len(numbers)

    def run(body: Callable[..., Any]) -> Any:
        @plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=result)
        def call(_: Any, *values: Any) -> Any:
            own, last = values[: len(pairs)], values[len(pairs) :]
            return body(*own, *(scalars(x)[0] for x in last))

        return call(*(x for x, _ in pairs), *numbers)

    return run


def array_type(shape: tuple[int, ...], dtype: Any, layout: Any) -> Any:
    """Returns the result type of a function that gives an array."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout)


def integer_type() -> Any:
    """Returns the result type of a function that gives one integer to all threads."""
    return array_type((), jnp.int32, plgpu.Layout.WG_SPLAT(()))


def as_array(value: ir.Value) -> mgpu.FragmentedArray:
    """Wraps an integer that is equal in all threads as an array."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def of_registers(
    registers: Sequence[ir.Value],
    shape: tuple[int, ...],
    layout: Any,
    *,
    is_signed: bool | None = None,
) -> mgpu.FragmentedArray:
    """Wraps a thread's registers as an array; only integers have a sign."""
    found = np.empty(len(registers), object)
    found[:] = registers
    target = _registers(layout)
    return mgpu.FragmentedArray(
        _registers=found.reshape(target.registers_shape(shape)),
        _layout=target,
        _is_signed=is_signed,
    )


@functools.cache
def _registers(layout: Any) -> Any:
    """Returns the emitted form of a layout, which Pallas computes slowly."""
    return layout.to_mgpu()


def register_type(layout: Any, kind: ir.Type) -> ir.VectorType:
    """Returns the type of a thread's registers for a layout and a type of entries."""
    return ir.VectorType(_registers(layout).registers_element_type(kind))


def i32() -> ir.Type:
    """Returns the type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> ir.Value:
    """Returns a constant 32-bit integer."""
    return arith.constant(i32(), value)


def compare(test: str, left: ir.Value, right: ir.Value | int) -> ir.Value:
    """Compares integers: `eq`, `ne`; `slt`, `sle`, `sgt`, `sge`, or `ult` for unsigned ones."""
    right = constant(right) if isinstance(right, int) else right
    return arith.cmpi(getattr(arith.CmpIPredicate, test), left, right)


def flag(condition: ir.Value) -> ir.Value:
    """Converts a condition to 1 or 0."""
    return arith.extui(i32(), condition)


def long(value: ir.Value | int) -> ir.Value:
    """Extends an integer to 64 bits."""
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, value) if isinstance(value, int) else arith.extsi(kind, value)


def zero_sums() -> list[ir.Value]:
    """Returns a thread's four sums of a product, all 0."""
    return [arith.constant(ir.F32Type.get(), 0.0)] * 4


def index(value: ir.Value) -> ir.Value:
    """Converts an integer to the index type."""
    return arith.index_cast(ir.IndexType.get(), value)


def address(ref: ir.Value, place: ir.Value) -> ir.Value:
    """Returns the address of an entry of global memory, by its flat index."""
    kind = ir.MemRefType(ref.type).element_type
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [place], kind)


def shared_pointer(ref: ir.Value) -> ir.Value:
    """Returns the address of shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def unpack_bfloat16(word: ir.Value) -> list[ir.Value]:
    """Converts two packed bfloat16 numbers to float32."""
    low = arith.shli(word, constant(16))
    high = arith.andi(word, constant(-(1 << 16)))
    return [arith.bitcast(ir.F32Type.get(), x) for x in (low, high)]


def scalars(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Returns the registers of one thread's part of an array, in order."""
    found: list[ir.Value] = []
    for x in array.registers.flat:
        places = range(x.type.shape[0]) if isinstance(x.type, ir.VectorType) else ()
        found += [vector.extract(x, [], ir.DenseI64ArrayAttr.get([place])) for place in places]
        found += [] if places else [x]
    return found


def places(
    layout: Any, shape: tuple[int, ...], strides: Sequence[int]
) -> tuple[ir.Value, list[int], int]:
    """Returns the places of a thread's entries of an array: sums of three numbers.

    Pallas computes them anew for every access, and its indices for every register, in so many
    operations that it lowers kernels several times more slowly.

    Args:
      layout: Layout of the array.
      shape: Shape of the array.
      strides: By how much the place grows along each axis.

    Returns:
      The thread's number, the number of each register, and the step within a register.
    """
    target = _registers(layout)
    steps, sizes = target.tiling.tile_strides(tuple(strides)), target.tiled_tiling_shape
    own = constant(0)
    for number, axes in ((lane, target.lane_dims), (warp, target.warp_dims)):
        shift = 0
        for axis in reversed(axes):
            is_spread = isinstance(axis, int)
            size = sizes[axis] if is_spread else axis.times
            if is_spread and steps[axis]:
                part = arith.andi(arith.shrui(number(), constant(shift)), constant(size - 1))
                own = arith.addi(own, arith.muli(part, constant(steps[axis])))
            shift += size.bit_length() - 1
    registers = np.ndindex(target.registers_shape(shape))
    offsets = [sum(i * step for i, step in zip(x, steps, strict=True)) for x in registers]
    return own, offsets, steps[target.vector_dim]


def thread() -> ir.Value:
    """Returns the index of the thread in its thread block."""
    return arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))


def lane() -> ir.Value:
    """Returns the index of the thread in its warp."""
    return arith.andi(thread(), constant(LANES - 1))


def warp() -> ir.Value:
    """Returns the index of the warp in its thread block."""
    return arith.shrui(thread(), constant(LANES.bit_length() - 1))


def ballot(predicate: ir.Value) -> ir.Value:
    """Returns a mask of the warp's lanes for which a predicate holds."""
    kind = nvvm.VoteSyncKind.ballot
    return nvvm.vote_sync(constant(_ALL_LANES), predicate, kind, results=[i32()])


def is_any(predicate: ir.Value) -> ir.Value:
    """Whether a predicate holds for any lane of the warp."""
    kind = nvvm.VoteSyncKind.any
    is_true = ir.IntegerType.get_signless(1)
    return nvvm.vote_sync(constant(_ALL_LANES), predicate, kind, results=[is_true])


def over_lanes(value: ir.Value, kind: nvvm.ReductionKind) -> ir.Value:
    """Reduces the integers of a warp's lanes."""
    return nvvm.redux_sync(value, kind, constant(_ALL_LANES))


def power_of_two(exponent: ir.Value) -> ir.Value:
    """`scaled.power_of_two`: `2^exponent` for exponents of at most 127, 0 below -126."""
    field = arith.maxsi(exponent, constant(-127))
    field = arith.shli(arith.addi(field, constant(127)), constant(23))
    return arith.bitcast(ir.F32Type.get(), field)


def descriptors(ref: ir.Value, firsts: Iterable[int], *, stride: int) -> list[ir.Value]:
    """Returns each instruction's descriptor of its operand: address, stride, and swizzle.

    Args:
      ref: Shared memory in lines of 128 bytes, swizzled over the whole line.
      firsts: First byte of each instruction in its lines.
      stride: Bytes from eight lines to the next eight.
    """
    long = ir.IntegerType.get_signless(64)
    place = llvm.ptrtoint(long, mgpu.utils.memref_ptr(ref))
    place = arith.andi(place, arith.constant(long, 0x3FFFF))
    place = arith.shrui(place, arith.constant(long, 4))
    start = arith.ori(place, arith.constant(long, (stride >> 4 << 32) | (_SWIZZLE << 62)))
    return [arith.addi(start, arith.constant(long, first >> 4)) for first in firsts]


def run(code: str, *operands: ir.Value) -> ir.Value:
    """Emits PTX code that returns one integer."""
    return mgpu.utils.inline_ptx(code, *operands, result_types=i32())


def ptx(
    code: str, *operands: ir.Value, kinds: Sequence[ir.Type], convergent: bool = False
) -> list[ir.Value]:
    """Emits PTX code with side effects, which stays in order; returns its results."""
    found = mgpu.utils.inline_ptx(
        code, *operands, result_types=kinds, has_side_effects=True, convergent=convergent
    )
    return list(found)


def effect(
    code: str, *operands: ir.Value, predicate: ir.Value | None = None, convergent: bool = False
) -> None:
    """Emits PTX code that has side effects and no result, if a predicate holds."""
    mgpu.utils.inline_ptx(
        code, *operands, predicate=predicate, has_side_effects=True, convergent=convergent
    )


def multiply(
    kind: str, left: list[ir.Value], right: list[ir.Value], total: list[ir.Value]
) -> list[ir.Value]:
    """Returns `total + left · right`, of 16 rows, 16 channels and 8 columns."""
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    kinds = [ir.F32Type.get()] * 4
    return ptx(code, *left, *right, *total, kinds=kinds, convergent=True)


def load(
    pointer: ir.Value,
    count: int,
    flag: ir.Value | None = None,
    *,
    offset: int = 0,
    how: str = "",
    space: str = "global",
) -> list[ir.Value]:
    """Starts to load adjacent words of memory; without a set flag they are zeros."""
    targets = [f"${index}" for index in range(count)]
    names = targets[0] if count == 1 else f"{{{', '.join(targets)}}}"
    vector = "" if count == 1 else f".v{count}"
    code = f"ld.{space}{how}{vector}.b32 {names}, [${count} + {offset}];"
    operands = [pointer]
    if flag is not None:
        zeros = " ".join(f"mov.b32 {x}, 0;" for x in targets)
        code = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} @p {code} }}"
        operands.append(flag)
    return ptx(code, *operands, kinds=[i32()] * count)


def store(pointer: ir.Value, values: list[ir.Value], *, offset: int = 0) -> None:
    """Writes one, two or four adjacent 32-bit numbers to global memory."""
    targets = [f"${1 + index}" for index in range(len(values))]
    names = targets[0] if len(values) == 1 else f"{{{', '.join(targets)}}}"
    vector = "" if len(values) == 1 else f".v{len(values)}"
    code = f"st.global{vector}.b32 [$0 + {offset}], {names};"
    effect(code, pointer, *values)


def multiply_halves(
    left: list[ir.Value], right: list[ir.Value], total: list[ir.Value]
) -> list[ir.Value]:
    """Like `multiply`, for float16 numbers with float16 sums, two columns per word."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
        "{$0, $1}, {$2, $3, $4, $5}, {$6, $7}, {$8, $9};"
    )
    return ptx(code, *left, *right, *total, kinds=[i32()] * 2, convergent=True)
