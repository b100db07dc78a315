"""Operations on rows in registers that Pallas lacks, each with a stand-in for the interpreter."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import gpu, memref, nvvm, vector
from jaxtyping import Array, Int

# Its annotations lack the operands that its functions take.
arith: Any = typed_arith

_WARPS = 4
_LANES = 32


def scratch_of_maximum(warpgroups: int) -> Any:
    """Shared memory that `maximum` needs in a program of so many warpgroups."""
    return plgpu.SMEM((warpgroups * _WARPS,), jnp.int32)


def maximum(x: Int[Array, "..."], scratch: Any, *, layout: Any, interpret: bool) -> Int[Array, ""]:
    """The largest of a warpgroup's integers, at the price of one barrier.

    Args:
      x: Integers in registers.
      scratch: `scratch_of_maximum()` in shared memory, which no warp is still reading.
      layout: Of `x`.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return jnp.max(x)
    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=scalar)
    def largest(_: Any, x: Any, scratch: Any) -> Any:
        own = _over_lanes(functools.reduce(arith.maxsi, _elements(x)))
        thread = arith.index_cast(_integer(), gpu.thread_id(gpu.Dimension.x))
        warp = arith.shrui(thread, _constant(5))
        memref.store(own, scratch, [_index(warp)])
        mgpu.warpgroup_barrier()
        # Every lane reads what one of the warpgroup's warps has left.
        first = arith.andi(warp, _constant(-_WARPS))
        other = arith.ori(first, arith.andi(thread, _constant(_WARPS - 1)))
        found = _over_lanes(memref.load(scratch, [_index(other)]))
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return largest(x, scratch)


def _over_lanes(x: ir.Value) -> ir.Value:
    return nvvm.redux_sync(x, nvvm.ReductionKind.MAX, _constant(-1))


def _elements(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """What one thread holds of an array, in order."""
    found = []
    for register in array.registers.flat:
        if isinstance(register.type, ir.VectorType):
            for index in range(register.type.shape[0]):
                place = ir.DenseI64ArrayAttr.get([index])
                found.append(vector.extract(register, [], place))
        else:
            found.append(register)
    return found


def _integer() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> ir.Value:
    return arith.constant(_integer(), value)


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)
