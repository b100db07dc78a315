"""Values of the compiler's own language, for what kernels emit below Pallas."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import gpu, nvvm, vector

arith: Any = typed_arith  # whose annotations lack the operands that its functions take
LANES = 32
ALL_LANES = -1  # as a mask
_LOG2_LANES = 5


def integer() -> ir.Type:
    """The type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> ir.Value:
    """An integer that is known."""
    return arith.constant(integer(), value)


def index(value: ir.Value) -> ir.Value:
    """An integer as an index of memory."""
    return arith.index_cast(ir.IndexType.get(), value)


def scalars(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """What one thread holds of an array, in order."""
    found: list[ir.Value] = []
    for x in array.registers.flat:
        places = range(x.type.shape[0]) if isinstance(x.type, ir.VectorType) else ()
        found += [vector.extract(x, [], ir.DenseI64ArrayAttr.get([place])) for place in places]
        found += [] if places else [x]
    return found


def thread() -> ir.Value:
    """Number of the thread in its program."""
    return arith.index_cast(integer(), gpu.thread_id(gpu.Dimension.x))


def lane() -> ir.Value:
    """Number of the thread in its warp."""
    return arith.andi(thread(), constant(LANES - 1))


def warp() -> ir.Value:
    """Number of the warp in its program."""
    return arith.shrui(thread(), constant(_LOG2_LANES))


def ballot(predicate: ir.Value) -> ir.Value:
    """For which lanes of the warp a predicate holds, one bit for each."""
    return nvvm.vote_sync(
        constant(ALL_LANES), predicate, nvvm.VoteSyncKind.ballot, results=[integer()]
    )


def over_lanes(value: ir.Value, kind: nvvm.ReductionKind) -> ir.Value:
    """Reduces the integers of a warp's lanes."""
    return nvvm.redux_sync(value, kind, constant(ALL_LANES))
