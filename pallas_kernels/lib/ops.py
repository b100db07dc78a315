"""What kernels do with tensor cores, shared memory and the launch, in one place.

Each product has a stand-in for Pallas' interpreter, which knows neither matrix products whose left
operand lies in registers, nor accumulators that outlive a product.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

# How a warpgroup holds the 64 rows of a product, and vectors of a number for each of its rows or
# columns.
ACCUMULATOR = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = ACCUMULATOR.reduce(1), ACCUMULATOR.reduce(0)
# Shared memory as TMA and the tensor cores want it: rows of at most 128 bytes, swizzled.
SWIZZLE_BYTES = 128
_REGISTERS, _MOST_REGISTERS, _WARPGROUP = 65536, 255, 128  # of a processor, a thread; threads
# For a type checker these two are abstract.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform


def interpreter(interpret: bool, *, detect_races: bool = True) -> Any:
    """What `plgpu.kernel` takes as `interpret`."""
    return plgpu.InterpretGPUParams(detect_races=detect_races) if interpret else None


def kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, traced with integers of 32 bits: numbers in `body` also where JAX has 64."""
    made: Callable[..., Any] = plgpu.kernel(body, **options)

    def call(*arrays: Any) -> Any:
        with jax.enable_x64(False):
            return made(*arrays)

    return call


def compiler_params(**changes: Any) -> plgpu.CompilerParams:
    """Parameters of every kernel; the default semantics differ between versions of JAX."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **changes)


def share_registers(loading: int, computing: int, *, num_computing: int, is_loader: bool) -> None:
    """Gives registers of the warpgroup that loads to those that compute.

    Call it first in both branches. All warpgroups start with equal shares of 65,536, in multiples
    of 8 for a thread. Who asks for more than the others have given waits for it forever, and no
    interpreter shows that.

    Args:
      loading: Registers of a thread that loads.
      computing: Registers of one that computes.
      num_computing: Warpgroups that compute, beside one that loads.
      is_loader: Whether this is that one.

    Raises:
      ValueError: If there are fewer than that.
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
    """Shared memory for matrices (the last two axes) that tensor cores multiply.

    Args:
      shape: Of all matrices.
      dtype: Of their entries.
      swizzle: Bytes of a row that stay together; a divisor of the row's.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, swizzle))


def transforms(dtype: Any, swizzle: int) -> tuple[Any, ...]:
    """How `tiled` memory lies."""
    width = swizzle // jnp.dtype(dtype).itemsize
    return _tiling((8, width)), _swizzle(swizzle)


def read(ref: Any, layout: Any = ACCUMULATOR) -> Array:
    """What a reference holds, in registers; any layout does, however slowly it loads."""
    return plgpu.load(ref, layout=layout, optimized=False)


def write(ref: Any, x: Array, *, optimized: bool = False) -> None:
    """Writes to memory; JAX since 0.12 refuses unasked what has bank conflicts or is narrow."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = x
    else:
        store(ref, x, optimized=optimized)


def full(shape: tuple[int, ...], value: float, layout: Any = ACCUMULATOR) -> Array:
    """A number in every place of a float32 array in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector along one axis of a matrix in an accumulator's layout."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (axis,)), ACCUMULATOR)


def matrix_index(shape: tuple[int, ...], axis: int) -> Array:
    """Row or column indices of a matrix in an accumulator's layout."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=ACCUMULATOR)


def over_rows(matrix: Array, operation: str, scratch: Any, *, interpret: bool) -> Array:
    """The sum or the largest of each column, in `BY_COLUMN`, where several warpgroups ask.

    Pallas has one piece of memory in which the warps of a warpgroup meet. Of several warpgroups
    each one needs its own, or they overwrite each other's numbers; no interpreter shows that.

    Args:
      matrix: Float32, in an accumulator's layout.
      operation: `"add"` or `"max"`.
      scratch: `scratch_of_rows` in shared memory, of this warpgroup.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return jnp.sum(matrix, axis=0) if operation == "add" else jnp.max(matrix, axis=0)

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype, layout=BY_COLUMN),
    )
    def reduce(_: Any, matrix: Any, scratch: Any) -> Any:
        return matrix.reduce(operation, 0, scratch)

    return reduce(matrix, scratch)


def scratch_of_rows(warpgroups: int) -> Any:
    """Shared memory that `over_rows` needs, one piece for each warpgroup."""
    return plgpu.SMEM((warpgroups, 4 * _WARPGROUP), jnp.float32)


def pinned(matrix: Array) -> Array:
    """A matrix in an accumulator's layout, computed here: no compiler moves that elsewhere."""

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=ACCUMULATOR),
    )
    def pin(_: Any, matrix: Any) -> Any:
        return mgpu.optimization_barrier(matrix)

    return pin(matrix)


class Accumulator:
    """Sums of products in registers: `+= left · right`, in flight until they are loaded."""

    def __init__(self, ref: Any) -> None:
        """Wraps an accumulator's reference."""
        self._ref = ref

    def add_product(self, left: Any, right: Any) -> None:
        """Starts `+= left · right`; `left` is a reference or, in registers, an array."""
        plgpu.wgmma(self._ref, left, right)

    def load(self, *, in_flight: int = 0) -> Array:
        """The sums, once at most `in_flight` products that started later remain in flight."""
        return plgpu.wgmma_accumulator_load(self._ref, wait_n=in_flight)

    def wait(self, *, in_flight: int) -> None:
        """Waits until at most `in_flight` products are under way."""
        plgpu.wgmma_wait(in_flight)

    def store(self, value: Array) -> None:
        """Replaces the sums."""
        self._ref[...] = value

    def loop(self, upper: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`jax.lax.fori_loop` from 0, whose body may use the accumulator."""
        return jax.lax.fori_loop(0, upper, body, carry)


class InterpretedAccumulator(Accumulator):
    """An `Accumulator` that is a plain array."""

    def add_product(self, left: Any, right: Any) -> None:
        """Adds `left · right`, where both may be references."""
        product = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
        self._ref = self._ref + product
        # Tensor cores read through the proxy of TMA; what is read here must be passed on to it.
        plgpu.commit_smem()

    def load(self, *, in_flight: int = 0) -> Array:
        """The sums."""
        return self._ref

    def wait(self, *, in_flight: int) -> None:
        """Nothing is ever under way."""

    def store(self, value: Array) -> None:
        """Replaces the sums."""
        self._ref = value

    def loop(self, upper: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """The loop, which carries the sums along."""

        def step(index: Any, state: tuple[Array, Any]) -> tuple[Array, Any]:
            self._ref, carry = state
            carry = body(index, carry)
            return self._ref, carry

        self._ref, carry = jax.lax.fori_loop(0, upper, step, (self._ref, carry))
        return carry


def with_accumulator(
    body: Callable[[Accumulator], Any], shape: tuple[int, int], *, interpret: bool
) -> Any:
    """Runs `body` with an accumulator of zeros and returns what it returns."""
    if interpret:
        return body(InterpretedAccumulator(jnp.zeros(shape, jnp.float32)))
    return pl.run_scoped(lambda ref: body(Accumulator(ref)), plgpu.ACC(shape, jnp.float32))
