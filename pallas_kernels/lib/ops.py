"""Wrappers of Pallas for tensor cores, shared memory and kernel launches.

Each product has an implementation for Pallas' interpreter, which supports neither matrix products
with the left operand in registers nor accumulators that outlive a product.
"""

import contextvars
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxtyping import Array

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir

# Register layouts of a warpgroup: a product of 64 rows, and a vector along its rows or columns.
ACCUMULATOR = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = ACCUMULATOR.reduce(1), ACCUMULATOR.reduce(0)
# TMA and the tensor cores require swizzled rows of at most 128 bytes in shared memory.
SWIZZLE_BYTES = 128
_REGISTERS, _MOST_REGISTERS, _WARPGROUP = 65536, 255, 128  # per SM, per thread; threads
# Type checkers see these two classes as abstract.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform


_interpreted = contextvars.ContextVar("interpreted", default=False)


def is_interpreted() -> bool:
    """Whether the interpreter runs the kernel whose body is being traced."""
    return _interpreted.get()


def kernel(
    body: Callable[..., None], *, interpret: bool, detect_races: bool = True, **options: Any
) -> Callable[..., Any]:
    """Wraps `plgpu.kernel`, tracing `body` with 32-bit integers even if JAX enables 64 bits.

    Args:
      body: The kernel's function; `is_interpreted` returns `interpret` in it.
      interpret: Whether the interpreter runs the kernel.
      detect_races: Whether the interpreter reports races.
      **options: Other options of `plgpu.kernel`.
    """

    def traced(*refs: Any, **scratch: Any) -> None:  # JAX may trace it again, after the call
        before = _interpreted.set(interpret)
        try:
            with jax.enable_x64(False):
                body(*refs, **scratch)
        finally:
            _interpreted.reset(before)

    how = plgpu.InterpretGPUParams(detect_races=detect_races) if interpret else None
    made: Callable[..., Any] = plgpu.kernel(traced, interpret=how, **options)

    def call(*arrays: Any) -> Any:
        with jax.enable_x64(False):
            return made(*arrays)

    return call


def compiler_params(**changes: Any) -> plgpu.CompilerParams:
    """Returns compiler parameters, with semantics whose default differs between JAX versions."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **changes)


def await_previous_kernels() -> None:
    """Waits for the kernels launched before, and lets the next one launch early; Hopper only.

    A kernel that calls this launches early itself if the kernel before it does. Nothing that others
    write may be read before, and nothing that they may read may be written before.
    """
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()


def share_registers(loading: int, computing: int, *, num_computing: int, is_loader: bool) -> None:
    """Moves registers from the loading warpgroup to the computing ones.

    Call it first in both branches. All warpgroups start with equal shares of 65,536, in multiples
    of 8 per thread. A warpgroup that requests more than the others released waits forever; the
    interpreter does not show that.

    Args:
      loading: Registers per loading thread.
      computing: Registers per computing thread.
      num_computing: Computing warpgroups, in addition to one loading warpgroup.
      is_loader: Whether the caller is the loading warpgroup.

    Raises:
      ValueError: If the sum exceeds the available registers.
    """
    every = num_computing + 1
    start = min(_REGISTERS // (every * _WARPGROUP) // 8 * 8, _MOST_REGISTERS)
    if loading + num_computing * computing > every * start:
        raise ValueError(
            f"loading + {num_computing} computing must be at most {every * start} registers, got "
            f"{loading} and {computing}"
        )
    if is_loader:
        plgpu.set_max_registers(loading, action="decrease")
    else:
        plgpu.set_max_registers(computing, action="increase")


def tiled(shape: tuple[int, ...], dtype: Any, *, swizzle: int = SWIZZLE_BYTES) -> Any:
    """Returns shared memory for matrices (the last two axes) that tensor cores multiply.

    Args:
      shape: Shape of all matrices.
      dtype: Type of the entries.
      swizzle: Bytes of a row that stay together; it divides the row's bytes.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, swizzle))


def transforms(dtype: Any, swizzle: int) -> tuple[Any, ...]:
    """Returns the layout transforms of `tiled` memory."""
    width = swizzle // jnp.dtype(dtype).itemsize
    return _tiling((8, width)), _swizzle(swizzle)


def read(ref: Any, layout: Any = ACCUMULATOR) -> Array:
    """Loads a reference to registers; allows any layout, even one that loads slowly."""
    return plgpu.load(ref, layout=layout, optimized=False)


def write(ref: Any, x: Array, *, optimized: bool = False) -> None:
    """Writes to memory; `optimized=False` permits slow stores, which JAX refuses since 0.12."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = x
    else:
        store(ref, x, optimized=optimized)


def read_global(ref: Any, layout: Any = ACCUMULATOR) -> Array:
    """Does `read` for plain global memory, in far fewer operations to lower."""
    return read_several(ref, layout, ref.shape, [(0,) * ref.ndim])[0]


def write_global(ref: Any, x: Array, layout: Any = ACCUMULATOR) -> None:
    """Does `write` for plain global memory, in far fewer operations to lower."""
    write_several(ref, [x], layout, ref.shape, [(0,) * ref.ndim])


def read_several(
    ref: Any, layout: Any, shape: tuple[int, ...], starts: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Loads several arrays of one shape from plain global memory.

    Args:
      ref: A reference to global memory.
      layout: Layout of each array, whose registers hold entries that are adjacent in memory.
      shape: Shape of each array, along the last axes of `ref`.
      starts: Index of each array's first entry.
    """
    if is_interpreted():
        return [read(part, layout) for part in _several(ref, shape, starts)]
    is_signed = True if jnp.issubdtype(ref.dtype, jnp.signedinteger) else None

    @mlir.emit(ref, result=[mlir.array_type(shape, ref.dtype, layout)] * len(starts))
    def load(ref: Any) -> Any:
        kind, pointers = _pointers(ref, layout, shape, starts)
        arrays = [[mlir.llvm.load(kind, pointer) for pointer in own] for own in pointers]
        return [mlir.of_registers(x, shape, layout, is_signed=is_signed) for x in arrays]

    return load


def write_several(
    ref: Any,
    arrays: Sequence[Array],
    layout: Any,
    shape: tuple[int, ...],
    starts: Sequence[tuple[int, ...]],
) -> None:
    """Writes arrays to where `read_several` would load them from."""
    if is_interpreted():
        for part, x in zip(_several(ref, shape, starts), arrays, strict=True):
            write(part, x)
        return

    @mlir.emit(ref, *((x, layout) for x in arrays))
    def _(ref: Any, *arrays: Any) -> None:
        _, pointers = _pointers(ref, layout, shape, starts)
        for x, own in zip(arrays, pointers, strict=True):
            for register, pointer in zip(x.registers.flat, own, strict=True):
                mlir.llvm.store(register, pointer)


def _several(ref: Any, shape: tuple[int, ...], starts: Sequence[tuple[int, ...]]) -> list[Any]:
    """Returns the parts of a reference that `read_several` loads."""
    rank = len(starts[0]) - len(shape)
    own = [(*x[:rank], *map(pl.ds, x[rank:], shape)) for x in starts]
    return [ref.at[index] for index in own]


def _pointers(
    ref: ir.Value, layout: Any, shape: tuple[int, ...], starts: Sequence[tuple[int, ...]]
) -> tuple[ir.Type, list[list[ir.Value]]]:
    """Returns the type of a register, and the address of each register of each array."""
    held = ir.MemRefType(ref.type)
    strides = held.get_strides_and_offset()[0]
    own, offsets, step = mlir.places(layout, shape, strides[-len(shape) :])
    kind = mlir.register_type(layout, held.element_type)
    if step != 1 and kind.shape[0] > 1:
        raise ValueError(
            f"entries of a register must be adjacent in memory, got a stride of {step}"
        )
    place = mlir.address(ref, own)
    firsts = [sum(map(operator.mul, start, strides)) for start in starts]
    get = functools.partial(mgpu.utils.getelementptr, dtype=held.element_type)
    return kind, [[get(place, [first + offset]) for offset in offsets] for first in firsts]


def full(shape: tuple[int, ...], value: float, layout: Any = ACCUMULATOR) -> Array:
    """Returns a constant float32 array in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcasts a vector along `axis` to a matrix in an accumulator's layout."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (axis,)), ACCUMULATOR)


def matrix_index(shape: tuple[int, ...], axis: int, layout: Any = ACCUMULATOR) -> Array:
    """Returns row or column indices of a matrix, or of a vector."""
    if is_interpreted():
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    @mlir.emit(result=mlir.array_type(shape, jnp.int32, layout))
    def index() -> Any:
        strides = [int(one == axis) for one in range(len(shape))]
        own, offsets, step = mlir.places(layout, shape, strides)
        kind = mlir.register_type(layout, mlir.i32())

        @functools.cache
        def register(first: int) -> ir.Value:
            entries = [first + step * place for place in range(kind.shape[0])]
            return vector.from_elements(
                kind, [mlir.arith.addi(own, mlir.constant(x)) for x in entries]
            )

        return mlir.of_registers([register(x) for x in offsets], shape, layout, is_signed=True)

    return index


def over_rows(matrix: Array, operation: str, scratch: Any) -> Array:
    """Returns each column's sum or maximum, in `BY_COLUMN`, safely for several warpgroups.

    Pallas' own reductions share one piece of scratch memory per thread block, so several warpgroups
    would overwrite each other's numbers. The interpreter does not show that.

    Args:
      matrix: Float32, in an accumulator's layout.
      operation: `"add"` or `"max"`.
      scratch: `scratch_of_rows` in shared memory, of this warpgroup.
    """
    if is_interpreted():
        return jnp.sum(matrix, axis=0) if operation == "add" else jnp.max(matrix, axis=0)

    @mlir.emit(
        (matrix, ACCUMULATOR),
        scratch,
        result=mlir.array_type(matrix.shape[1:], matrix.dtype, BY_COLUMN),
    )
    def reduce(matrix: Any, scratch: Any) -> Any:
        return matrix.reduce(operation, 0, scratch)

    return reduce


def scratch_of_rows(warpgroups: int) -> Any:
    """Returns the shared memory of `over_rows`, one piece per warpgroup."""
    return plgpu.SMEM((warpgroups, 4 * _WARPGROUP), jnp.float32)


def pinned(matrix: Array) -> Array:
    """Keeps the compiler from moving the computation of an accumulator-layout matrix."""

    @mlir.emit(
        (matrix, ACCUMULATOR), result=mlir.array_type(matrix.shape, matrix.dtype, ACCUMULATOR)
    )
    def pin(matrix: Any) -> Any:
        return mgpu.optimization_barrier(matrix)

    return pin


class Accumulator:
    """Sums of products in registers: `+= left · right`, asynchronous until loaded."""

    def __init__(self, ref: Any) -> None:
        """Wraps an accumulator's reference."""
        self._ref = ref

    def add_product(self, left: Any, right: Any) -> None:
        """Starts `+= left · right`; `left` is a reference or, in registers, an array."""
        plgpu.wgmma(self._ref, left, right)

    def load(self, *, in_flight: int = 0) -> Array:
        """Returns the sums, once only the last `in_flight` products remain in flight."""
        return plgpu.wgmma_accumulator_load(self._ref, wait_n=in_flight)

    def wait(self, *, in_flight: int) -> None:
        """Waits until at most `in_flight` products are in flight."""
        plgpu.wgmma_wait(in_flight)

    def store(self, value: Array) -> None:
        """Replaces the sums."""
        self._ref[...] = value

    def loop(
        self,
        upper: Any,
        body: Callable[[Any, Any], Any],
        carry: Any,
        *,
        others: "Sequence[Accumulator]" = (),
    ) -> Any:
        """Runs `jax.lax.fori_loop` from 0; the body may use the accumulator and the others."""
        return jax.lax.fori_loop(0, upper, body, carry)


class InterpretedAccumulator(Accumulator):
    """An `Accumulator` that is a plain array."""

    def add_product(self, left: Any, right: Any) -> None:
        """Adds `left · right`, which may be references."""
        product = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
        self._ref = self._ref + product
        # Tensor cores read through the async proxy; order these plain reads before its writes.
        plgpu.commit_smem()

    def load(self, *, in_flight: int = 0) -> Array:
        """Returns the sums."""
        return self._ref

    def wait(self, *, in_flight: int) -> None:
        """Does nothing: no product is ever in flight."""

    def store(self, value: Array) -> None:
        """Replaces the sums."""
        self._ref = value

    def loop(
        self,
        upper: Any,
        body: Callable[[Any, Any], Any],
        carry: Any,
        *,
        others: Sequence[Accumulator] = (),
    ) -> Any:
        """Runs the loop with all sums in its carry."""
        every = (self, *others)

        def step(index: Any, state: tuple[list[Array], Any]) -> tuple[list[Array], Any]:
            set_all(state[0])
            carry = body(index, state[1])
            return [x.load() for x in every], carry

        def set_all(sums: list[Array]) -> None:
            for one, value in zip(every, sums, strict=True):
                one.store(value)

        sums, carry = jax.lax.fori_loop(0, upper, step, ([x.load() for x in every], carry))
        set_all(sums)
        return carry


def with_accumulator(body: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """Runs `body` with an accumulator of zeros for each shape and returns what it returns."""
    if is_interpreted():
        return body(*(InterpretedAccumulator(jnp.zeros(x, jnp.float32)) for x in shapes))
    return pl.run_scoped(
        lambda *refs: body(*map(Accumulator, refs)), *(plgpu.ACC(x, jnp.float32) for x in shapes)
    )
