"""Largest products of 64 queries with the keys of blocks, in eight bits on Hopper's tensor cores.

What Pallas has for products starts from sums that it sets to zero one by one, and leaves maxima to
the program: as many instructions again as the maxima themselves, which take as long as the product.
So one step, of two blocks of keys, is emitted in the assembler's own language (PTX):

* The queries stay in registers, so that shared memory is read for the keys alone.
* Sums are made in float16, two to a register: half the registers for the tensor cores to read and
  write, and one instruction takes the maxima of three times two of them. Queries are small enough
  (`_largest`) that no sum is above the largest number of float16; what its 11 bits lose is less
  than what eight bits have lost before.
* The first product of a block ignores what the sums were.
* While a thread takes the maxima of two blocks, the tensor cores multiply for the next two. Sums
  are held in registers that have names in the assembler alone: no compiler copies what is in flight.
* The four threads that share two queries exchange halves: each ends up with the maximum of one
  query and one block, after two exchanges.
"""

from collections.abc import Sequence
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
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops, words

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm

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
_SUMS = QUERIES * KEYS // warp_ops.THREADS // 2  # registers of a thread for those of a step
_NAME = "products"  # of the registers that hold them, with a number
# How the keys' addresses go on: by this many rows, whose bytes follow each other.
_ROWS = 8
_SWIZZLES = {128: 1, 64: 2, 32: 3}

_MOST_SHIFT = 100
_MANTISSA, _BIAS = 23, 127  # of float32


def _largest(channels: int) -> float:
    """The largest number of a query, a power of two below 448, the largest one of eight bits.

    With keys of at most 448 a sum is at most `channels * 1.75 * 64 / channels * 448 = 50,176`; the
    largest number of float16 is 65,504. It is 448 times a power of two, so that all numbers are
    rounded as if it were 448, but those below a hundredth of the largest one.
    """
    return 448.0 / 256 * (64 / channels)


def round_queries(query: Float[Array, "64 C"]) -> tuple[Array, Float[Array, "64"]]:
    """Queries in float8_e4m3fn, and the power of two that each is to be multiplied by.

    What `policies.block_codes.round_queries` does, with another power of two (`_largest`).

    Args:
      query: In 16 bits, in `LAYOUT`.
    """
    x = query.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1) / _largest(x.shape[1]), jnp.int32)
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
    """Starts to multiply with the first two blocks, once in a kernel and before any loop.

    Args:
      queries: In float8_e4m3fn, in `LAYOUT`.
      keys: The keys of the two, `[128, C]` in shared memory, swizzled over whole rows.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return
    width = keys.shape[-1]

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(ops.transforms(keys.dtype, width))))
    def start(_: Any, queries: Any, keys: Any) -> None:
        _run(f".reg .b32 {_NAME}<{2 * _SUMS}>;")
        _start(queries, keys, width, 0)

    start(queries, keys)


def write_maxima(
    queries: Float[Array, "64 C"],
    factors: Float[Array, "64"],
    keys: Any,
    following: Any,
    found: Any,
    *,
    place: int,
    interpret: bool,
) -> None:
    """The largest product of each query with the keys of each of two blocks, times its factor.

    `begin` or the last call has started to multiply with the two; this one starts with the two that
    follow. It ends once the tensor cores have read the keys of the first two. What it writes is
    seen by other threads after a barrier.

    Args:
      queries: In float8_e4m3fn, in `LAYOUT`.
      factors: Powers of two, in `BY_ROW`; NaN makes NaN.
      keys: The keys of two blocks, `[128, C]` in shared memory, swizzled over whole rows.
      following: Those of the next two.
      found: Where the maxima go: float32, `[2, 64]` in shared memory.
      place: 0 of the first call after `begin`, then 1 and 0 in turn.
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

    @plgpu.inline_mgpu(arg_types=(LAYOUT, BY_ROW, rows, plgpu.RefType()))
    def write(_: Any, queries: Any, factors: Any, following: Any, found: Any) -> None:
        _start(queries, following, width, 1 - place)
        lane = words.lane()
        is_second_block, is_second_query = (_bit(lane, which) for which in (1, 2))
        value = _maximum(place, is_second_block, is_second_query)
        first, second = words.scalars(factors)  # of the thread's two queries
        value = arith.mulf(value, arith.select(is_second_query, second, first))
        block, query = (arith.andi(lane, words.constant(which)) for which in (1, 2))
        warp = arith.andi(words.warp(), words.constant(warp_ops.WARPS - 1))
        row = arith.addi(
            arith.shrui(lane, words.constant(2)), arith.muli(query, words.constant(4))
        )
        row = arith.addi(row, arith.muli(warp, words.constant(QUERIES // warp_ops.WARPS)))
        memref.store(value, found, [words.index(block), words.index(row)])

    write(queries, factors, following, found)


def settle(*, interpret: bool) -> None:
    """Waits for the blocks that the last call of `write_maxima` has started with.

    What is in flight where a turn of a loop ends makes the assembler wait for every single product.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        _run("wgmma.wait_group.sync.aligned 0;")

    wait()


def _start(queries: mgpu.FragmentedArray, keys: ir.Value, width: int, place: int) -> None:
    """Starts the products with two blocks, for one of the two places where they are held."""
    left = [_as_integer(x) for x in queries.registers.flat]
    descriptors = _descriptors(keys, width)
    sums = ", ".join(_sums(place))
    lines = []
    for step in range(len(descriptors)):
        registers = ", ".join(f"${_LEFT * step + index}" for index in range(_LEFT))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{KEYS}k{_CHANNELS}.f16.e4m3.e4m3 "
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


def _maximum(place: int, is_second_block: ir.Value, is_second_query: ir.Value) -> ir.Value:
    """The largest product of one of two queries with the keys of one of two blocks, as float32.

    Of each eight keys, a thread has two products with its first query in one register, and two with
    its second one in the next. The next blocks may still be in flight, at the other place.

    Args:
      place: Where the products are held.
      is_second_block: Which block it is of; of the four threads that share two queries, every
        other one has each.
      is_second_query: Which query; two of the four have each.
    """
    code = ["wgmma.wait_group.sync.aligned 1;", ".reg .b32 a, b, other, best<2>;"]
    for block in range(BLOCKS):
        of_block = _sums(place)[block * _SUMS // BLOCKS :][: _SUMS // BLOCKS]
        for query, name in enumerate("ab"):
            first, second, *others = of_block[query::2]
            code.append(f"max.NaN.f16x2 {name}, {first}, {second};")
            code += [f"max.NaN.f16x2 {name}, {name}, {x};" for x in others]
        # What two keys have with each query becomes the best of both queries, side by side.
        code.append("prmt.b32 other, a, b, 0x7632;")
        code.append("prmt.b32 a, a, b, 0x5410;")
        code.append(f"max.NaN.f16x2 best{block}, a, other;")
    code += [
        ".reg .pred is_second, is_high; .reg .b16 low, high;",
        "setp.ne.b32 is_second, $1, 0; setp.ne.b32 is_high, $2, 0;",
        "selp.b32 a, best1, best0, is_second; selp.b32 b, best0, best1, is_second;",
        f"shfl.sync.bfly.b32 other, b, 1, {words.LANES - 1}, -1; max.NaN.f16x2 a, a, other;",
        f"shfl.sync.bfly.b32 other, a, 2, {words.LANES - 1}, -1; max.NaN.f16x2 a, a, other;",
        "mov.b32 {low, high}, a; selp.b16 low, high, low, is_high; cvt.f32.f16 $0, low;",
    ]
    choices = [arith.extui(words.i32(), x) for x in (is_second_block, is_second_query)]
    return _run(
        f"{{ {' '.join(code)} }}", choices, ["r", "r"], result=ir.F32Type.get(), outputs=["=f"]
    )


def _sums(place: int) -> list[str]:
    """Names of the registers that hold the products with two blocks."""
    return [f"{_NAME}{place * _SUMS + index}" for index in range(_SUMS)]


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


def _bit(lane: ir.Value, which: int) -> ir.Value:
    """Whether a bit of a lane's number is set."""
    own = arith.andi(lane, words.constant(which))
    return arith.cmpi(arith.CmpIPredicate.ne, own, words.constant(0))
