"""Largest products of 64 queries with the keys of blocks, in eight bits on Hopper's tensor cores.

What Pallas has for products starts from sums that it sets to zero one by one, and leaves maxima to
the program: as many instructions again as the maxima themselves, which take as long as the product.
So one step is emitted in the compiler's own language (MLIR) and the assembler's (PTX):

* The queries stay in registers, so that shared memory is read for the keys alone.
* The first product of a block ignores what the sums were.
* While a thread takes the maxima of one block, the tensor cores multiply for the next one. Sums are
  held in registers that have names in the assembler alone: no compiler copies what is in flight.
* Maxima are those of 32-bit integers, which take three numbers where those of floats take two.
  Floats and the integers of the same bits are in the same order where either is positive. Only
  where all products of a query with a block are negative, the least of the unsigned integers is
  the largest float; a warp that has such a query looks at its products once more.
* The four threads that share two queries exchange halves: each ends up with the maximum of one
  query, after two exchanges and not four. Two of them write that of the first of two blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm as typed_llvm
from jaxlib.mlir.dialects import memref, vector
from jaxlib.mlir.dialects import scf as typed_scf
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops, words

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm
scf: Any = typed_scf

QUERIES = 64  # of a warpgroup
BLOCKS = 2  # of a step
BLOCK = 64  # keys of a block
KEYS = BLOCKS * BLOCK
LAYOUT = plgpu.Layout.WGMMA_8BIT
"""How a warpgroup holds queries."""
BY_ROW = LAYOUT.reduce(1)
"""How it holds a number of each."""

_CHANNELS = 32  # of one instruction
_LEFT = 4  # registers of a thread that hold queries of one instruction
_SUMS = QUERIES * BLOCK // warp_ops.THREADS  # products of a block that a thread holds
_NAME = "products"  # of the registers that hold them, with a number
# How the keys' addresses go on: by this many rows, whose bytes follow each other.
_ROWS = 8
_SWIZZLES = {128: 1, 64: 2, 32: 3}

_LARGEST = 448.0  # number of eight bits
_MOST_SHIFT = 100
_MANTISSA, _BIAS = 23, 127  # of float32

_Choice = Callable[[ir.Value, ir.Value], ir.Value]


def round_queries(query: Float[Array, "64 C"]) -> tuple[Array, Float[Array, "64"]]:
    """Queries in float8_e4m3fn, and the power of two that each is to be multiplied by.

    What `policies.block_codes.round_queries` does: the least power of two that brings no channel
    above 448.

    Args:
      query: In 16 bits, in `LAYOUT`.
    """
    x = query.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1) / _LARGEST, jnp.int32)
    # The least exponent of two that is not below the number.
    shift = ((largest + ((1 << _MANTISSA) - 1)) >> _MANTISSA) - _BIAS
    shift = jnp.clip(shift, -_MOST_SHIFT, _MOST_SHIFT)
    inverse, factor = (
        jax.lax.bitcast_convert_type((sign * shift + _BIAS) << _MANTISSA, jnp.float32)
        for sign in (-1, 1)
    )
    x = x * plgpu.layout_cast(jax.lax.broadcast_in_dim(inverse, x.shape, (0,)), LAYOUT)
    # By way of float16, which has all bits of what eight bits can tell apart.
    return x.astype(jnp.float16).astype(jnp.float8_e4m3fn), factor


def begin(queries: Float[Array, "64 C"], keys: Any, *, interpret: bool) -> None:
    """Starts to multiply with the first block, once in a kernel and before any loop.

    Args:
      queries: In float8_e4m3fn, in `LAYOUT`.
      keys: The keys of the block, `[64, C]` in shared memory, swizzled over whole rows.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return
    width = keys.shape[-1]

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(ops.transforms(keys.dtype, width))))
    def start(_: Any, queries: Any, keys: Any) -> None:
        _run(f".reg .b32 {_NAME}<{BLOCKS * _SUMS}>;")
        _start(queries, keys, width, 0)

    start(queries, keys)


def write_maxima(
    queries: Float[Array, "64 C"],
    factors: Float[Array, "64"],
    keys: Any,
    following: Any,
    found: Any,
    *,
    interpret: bool,
) -> None:
    """The largest product of each query with the keys of each of two blocks, times its factor.

    `begin` or the last call has started to multiply with the first of them; this one starts with
    the second and with the block that follows. It ends once the tensor cores have read the keys of
    the two. What it writes is seen by other threads after a barrier.

    Args:
      queries: In float8_e4m3fn, in `LAYOUT`.
      factors: Powers of two, in `BY_ROW`; NaN makes NaN.
      keys: The keys of two blocks, `[128, C]` in shared memory, swizzled over whole rows.
      following: Those of the next block, `[64, C]`.
      found: Where the maxima go: float32, `[2, 64]` in shared memory.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        products = jnp.dot(keys[...], queries.T, preferred_element_type=jnp.float32)
        found[...] = jnp.max(products.reshape(BLOCKS, BLOCK, QUERIES), axis=1) * factors[None]
        # Tensor cores read through the proxy of TMA; what is read here must be passed on to it.
        plgpu.commit_smem()
        return
    width = keys.shape[-1]  # bytes of a row too
    rows = plgpu.RefType(ops.transforms(keys.dtype, width))

    @plgpu.inline_mgpu(arg_types=(LAYOUT, BY_ROW, rows, rows, plgpu.RefType()))
    def write(_: Any, queries: Any, factors: Any, second: Any, following: Any, found: Any) -> None:
        maxima = []
        for block, keys in enumerate((second, following)):
            _start(queries, keys, width, 1 - block)
            maxima.append(_maximum(block))
        # Of four threads that share queries: two have the first block, and every other the
        # second query.
        lane = words.lane()
        query, block = (arith.andi(lane, words.constant(bit)) for bit in (1, 2))
        value = arith.bitcast(ir.F32Type.get(), arith.select(_bit(lane, 2), *maxima[::-1]))
        warp = arith.andi(words.warp(), words.constant(warp_ops.WARPS - 1))
        place = arith.addi(
            arith.shrui(lane, words.constant(2)), arith.muli(query, words.constant(8))
        )
        place = arith.addi(place, arith.muli(warp, words.constant(QUERIES // warp_ops.WARPS)))
        first, second = words.scalars(factors)  # of the thread's two queries
        value = arith.mulf(value, arith.select(_bit(lane, 1), second, first))
        block = arith.shrui(block, words.constant(1))
        memref.store(value, found, [words.index(block), words.index(place)])

    write(queries, factors, keys.at[pl.ds(BLOCK, BLOCK)], following, found)


def settle(*, interpret: bool) -> None:
    """Waits for the block that the last call of `write_maxima` has started with.

    What is in flight where a turn of a loop ends makes the assembler wait for every single product.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        _run("wgmma.wait_group.sync.aligned 0;")

    wait()


def _start(queries: mgpu.FragmentedArray, keys: ir.Value, width: int, place: int) -> None:
    """Starts the products with a block, for one of the two places where they are held."""
    left = [_as_integer(x) for x in queries.registers.flat]
    descriptors = _descriptors(keys, width)
    sums = ", ".join(_sums(place))
    lines = []
    for step in range(len(descriptors)):
        registers = ", ".join(f"${_LEFT * step + index}" for index in range(_LEFT))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{BLOCK}k{_CHANNELS}.f32.e4m3.e4m3 "
            f"{{{sums}}}, {{{registers}}}, ${len(left) + step}, "
            f"{'goes_on' if step else 'begins'}, 1, 1;"
        )
    _run(
        "{ .reg .pred begins, goes_on; .reg .b32 zero; mov.b32 zero, 0; "
        "setp.ne.b32 begins, zero, 0; setp.eq.b32 goes_on, zero, 0; "
        # What was read from the registers of the sums has been read.
        f"wgmma.fence.sync.aligned; {' '.join(lines)} wgmma.commit_group.sync.aligned; }}",
        [*left, *descriptors],
        ["r"] * len(left) + ["l"] * len(descriptors),
    )


def _maximum(place: int) -> ir.Value:
    """The largest product with a block, as an integer of the same bits.

    Of four threads that share two queries, two have that of each, in turn. Later blocks may still
    be in flight, at the other place.
    """
    _run("wgmma.wait_group.sync.aligned 1;")
    found = _over_threads(_over_registers(place, "max.s32"), arith.maxsi)
    is_negative = arith.cmpi(arith.CmpIPredicate.slt, found, words.constant(0))
    again = scf.IfOp(words.is_any(is_negative), [words.i32()], has_else=True)
    with ir.InsertionPoint(again.then_block):
        least = _over_threads(_over_registers(place, "min.u32"), arith.minui)
        scf.yield_([arith.select(is_negative, least, found)])
    with ir.InsertionPoint(again.else_block):
        scf.yield_([found])
    return again.results[0]


def _sums(place: int) -> list[str]:
    """Names of the registers that hold the products of one of two blocks."""
    return [f"{_NAME}{place * _SUMS + index}" for index in range(_SUMS)]


def _over_registers(place: int, choose: str) -> list[ir.Value]:
    """The thread's own best of a block, for two queries.

    Of each eight keys, it has two products with its first query, then two with its second one.
    """
    found = []
    for query in range(2):
        first, *others = [x for i, x in enumerate(_sums(place)) if i // 2 % 2 == query]
        lines = [f"mov.b32 best, {first};", *(f"{choose} best, best, {x};" for x in others)]
        code = f"{{ .reg .b32 best; {' '.join(lines)} mov.b32 $0, best; }}"
        found.append(_run(code, result=words.i32(), outputs=["=r"]))
    return found


def _run(
    code: str,
    operands: Sequence[ir.Value] = (),
    kinds: Sequence[str] = (),
    *,
    result: ir.Type | None = None,
    outputs: Sequence[str] = (),
) -> ir.Value:
    """Emits instructions of the assembler, which stay in order."""
    return llvm.inline_asm(
        result or ir.Type.parse("!llvm.void"),
        list(operands),
        code,
        ",".join([*outputs, *kinds]),
        asm_dialect=0,
        has_side_effects=True,
    )


def _as_integer(register: ir.Value) -> ir.Value:
    """Four numbers of eight bits as one of 32."""
    found = vector.bitcast(ir.VectorType.get((1,), words.i32()), register)
    return vector.extract(found, [], ir.DenseI64ArrayAttr.get([0]))


def _descriptors(keys: ir.Value, width: int) -> list[ir.Value]:
    """Where the keys of each instruction are: address, stride between rows, and swizzle."""
    long = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(long, mgpu.utils.memref_ptr(keys))
    address = arith.andi(address, arith.constant(long, 0x3FFFF))
    address = arith.shrui(address, arith.constant(long, 4))
    rest = (_ROWS * width >> 4 << 32) | (_SWIZZLES[width] << 62)
    rest -= (rest >> 63) << 64  # as a signed number
    start = arith.ori(address, arith.constant(long, rest))
    return [
        arith.addi(start, arith.constant(long, channel >> 4))
        for channel in range(0, width, _CHANNELS)
    ]


def _over_threads(found: list[ir.Value], choose: _Choice) -> ir.Value:
    """The best of four threads: of query `lane % 2`."""
    is_second = _bit(words.lane(), 1)
    first, second = found
    best = choose(
        arith.select(is_second, second, first),
        mgpu.utils.shfl_bfly(arith.select(is_second, first, second), 1),
    )
    return choose(best, mgpu.utils.shfl_bfly(best, 2))


def _bit(lane: ir.Value, which: int) -> ir.Value:
    """Whether a bit of a lane's number is set."""
    own = arith.andi(lane, words.constant(which))
    return arith.cmpi(arith.CmpIPredicate.ne, own, words.constant(0))
