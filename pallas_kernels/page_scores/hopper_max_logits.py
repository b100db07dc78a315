"""Largest products of 64 queries with the keys of blocks, in eight bits on Hopper's tensor cores.

What Pallas has for products starts from sums that it sets to zero one by one, and leaves maxima to
the program: as many instructions again as the maxima themselves, which take as long as the product.
So one step, of two blocks of keys, is emitted in the assembler's own language (PTX):

* The queries stay in registers, so that shared memory is read for the keys alone.
* Sums are made in float16, two to a register: half the registers for the tensor cores to read and
  write, and one instruction takes the maxima of three times two of them. Queries are small enough
  (`largest_of_query`) that no sum is above the largest number of float16; what its 11 bits lose
  is less than what eight bits have lost before.
* The first product of a block ignores what the sums were.
* While a thread takes the maxima of two blocks, the tensor cores multiply for the next two. Sums
  are held in registers that only the assembler has names for: no compiler copies what is in flight.
* The keys of a block are in the order (`place_of_key`) in which each of the four threads that share
  two queries has all keys of one page of 16. So no thread asks another one for a page's maximum.

Keys lie as they are copied and multiplied best: in lines of 128 bytes, which hold the channels of
two or four keys. Of a group of eight blocks, key `i` has the bytes from `i // lines * channels` on
of line `i % lines`: so the 128 keys of a step lie below each other, and one step beside another.
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

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm

QUERIES = 64  # of a warpgroup
BLOCK = 64  # keys of a block
BLOCKS, STEPS = 2, 4  # blocks of a step, steps of a group
GROUP = BLOCKS * STEPS  # blocks of a group
PAGES = 4  # pages of a block, which have maxima of their own
LINE = 128  # bytes
_KEYS = BLOCKS * BLOCK  # of a step
_TOGETHER = 2  # keys of a page that lie side by side: a thread has them in one register
_CHUNK = 8  # queries that lie together in swizzled shared memory, 16 bytes
LAYOUT = plgpu.Layout.WGMMA_8BIT
"""How a warpgroup holds queries."""
BY_ROW = LAYOUT.reduce(1)
"""How it holds a number of each."""

_CHANNELS = 32  # of one instruction
_LEFT = 4  # registers of a thread that hold queries of one instruction
_SUMS = QUERIES * _KEYS // row_ops.THREADS // 2  # registers of a thread for those of a step
_NAME = "products"  # of the registers that hold them, with a number
_LINES = 8  # that are swizzled together, one eight below the other

_MOST_SHIFT = 100
_MANTISSA, _BIAS = 23, 127  # of float32


def largest_of_query(channels: int) -> float:
    """The largest number of a query, a power of two below 448, the largest one of eight bits.

    With keys of at most 448 a sum is at most `channels * 1.75 * 64 / channels * 448 = 50,176`; the
    largest number of float16 is 65,504. It is 448 times a power of two, so that all numbers are
    rounded as if it were 448, but those below a hundredth of the largest one.
    """
    return 448.0 / 256 * (64 / channels)


def round_queries(query: Float[Array, "64 C"]) -> tuple[Array, Float[Array, "64"]]:
    """Queries in float8_e4m3fn, and the power of two that each is to be multiplied by.

    What `policies.block_codes.round_queries` does, with another power of two (`largest_of_query`).

    Args:
      query: In 16 bits, in `LAYOUT`.
    """
    x = query.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(
        jnp.max(jnp.abs(x), axis=1) / largest_of_query(x.shape[1]), jnp.int32
    )
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


def lines(channels: int) -> int:
    """Lines of the keys of a group."""
    return GROUP * BLOCK * channels // LINE


def place_of_key(key: Any) -> Any:
    """The place, in its block, of a key of a block (an integer or an array).

    Args:
      key: From 0 to 63.

    Example:
      >>> [place_of_key(key) for key in (0, 1, 2, 3, 15, 16, 17, 18, 63)]
      [0, 1, 8, 9, 57, 2, 3, 10, 63]
    """
    of_page = BLOCK // PAGES
    page, pair, one = key // of_page, key % of_page // _TOGETHER, key % _TOGETHER
    return (pair * PAGES + page) * _TOGETHER + one


def begin(queries: Float[Array, "64 C"], keys: Any, *, interpret: bool) -> None:
    """Starts to multiply with the first two blocks, once in a kernel and before any loop.

    Args:
      queries: In float8_e4m3fn, in `LAYOUT`.
      keys: The keys of their group, `[lines, 128]` in shared memory, lines swizzled whole.
      interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        return
    channels = queries.shape[1]
    keys, first = _part(keys, 0, channels)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(ops.transforms(keys.dtype, LINE))))
    def start(_: Any, queries: Any, keys: Any) -> None:
        _run(f".reg .b32 {_NAME}<{2 * _SUMS}>;")
        _start(queries, keys, range(first, first + channels, _CHANNELS), 0)

    start(queries, keys)


def write_maxima(
    queries: Float[Array, "64 C"],
    keys: Any,
    following: Any,
    found: Any,
    *,
    step: int,
    interpret: bool,
) -> None:
    """The largest product of each query with the keys of each page of two blocks; NaN if one is.

    `begin` or the last call has started to multiply with the two; this one starts with the two that
    follow. It ends once the tensor cores have read the keys of the first two. What it writes is
    seen by other threads after a barrier.

    Args:
      queries: In float8_e4m3fn, in `LAYOUT`.
      keys: The keys of their group, `[lines, 128]` in shared memory, lines swizzled whole.
      following: Those of the next group.
      found: Where the maxima go: float16, `[8, 64]` in shared memory, swizzled whole.
      step: Which two of the group; the steps of all groups are taken in order.
      interpret: Whether the interpreter runs the kernel.
    """
    channels = queries.shape[1]
    if interpret:
        own, first = _part(keys, step, channels)
        products = jnp.dot(
            own[...][:, first : first + channels], queries.T, preferred_element_type=jnp.float32
        )
        shape = (BLOCKS, BLOCK // (PAGES * _TOGETHER), PAGES, _TOGETHER, QUERIES)
        products = products.astype(jnp.float16).reshape(shape)
        found[...] = jnp.max(products, axis=(1, 3)).reshape(BLOCKS * PAGES, QUERIES)
        # Tensor cores read through the proxy of TMA; what is read here must be passed on to it.
        plgpu.commit_smem()
        return
    is_last = step == STEPS - 1
    coming, first = _part(following if is_last else keys, (step + 1) % STEPS, channels)
    reference = plgpu.RefType(ops.transforms(coming.dtype, LINE))
    kind = plgpu.RefType(ops.transforms(jnp.float16, LINE))

    @plgpu.inline_mgpu(arg_types=(LAYOUT, reference, kind))
    def write(_: Any, queries: Any, coming: Any, found: Any) -> None:
        place = step % 2
        _start(queries, coming, range(first, first + channels, _CHANNELS), 1 - place)
        _write_maxima(place, found)

    write(queries, coming, found)


def _part(keys: Any, step: int, channels: int) -> tuple[Any, int]:
    """The lines that hold the keys of a step of a group, and the first byte of theirs in each."""
    beside, first = divmod(step * _KEYS, lines(channels))
    return keys.at[pl.ds(first, _KEYS)], beside * channels


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


def _start(queries: mgpu.FragmentedArray, keys: ir.Value, parts: range, place: int) -> None:
    """Starts the products with two blocks, for one of the two places where they are held.

    Args:
      queries: In registers.
      keys: Lines of 128 keys.
      parts: First bytes, in each line, of the channels of each instruction.
      place: Where the sums go.
    """
    left = [_as_integer(x) for x in queries.registers.flat]
    descriptors = mlir.descriptors(keys, parts, stride=_LINES * LINE)
    sums = ", ".join(_sums(place))
    code = []
    for step in range(len(descriptors)):
        registers = ", ".join(f"${_LEFT * step + index}" for index in range(_LEFT))
        code.append(
            f"wgmma.mma_async.sync.aligned.m64n{_KEYS}k{_CHANNELS}.f16.e4m3.e4m3 "
            f"{{{sums}}}, {{{registers}}}, ${len(left) + step}, "
            f"{'goes_on' if step else 'begins'}, 1, 1;"
        )
    _run(
        "{ .reg .pred begins, goes_on; .reg .b32 zero; mov.b32 zero, 0; "
        "setp.ne.b32 begins, zero, 0; setp.eq.b32 goes_on, zero, 0; "
        # What was read from the registers of the sums has been read.
        f"wgmma.fence.sync.aligned; {' '.join(code)} wgmma.commit_group.sync.aligned; }}",
        [*left, *descriptors],
        ["r"] * len(left) + ["l"] * len(descriptors),
    )


def _best(place: int, block: int, name: str) -> list[str]:
    """What gives the best of a thread's keys of one of two blocks, of both queries side by side."""
    of_block = _sums(place)[block * _SUMS // BLOCKS :][: _SUMS // BLOCKS]
    code = []
    for which, own in enumerate("ab"):
        first, second, *others = of_block[which::2]
        code.append(f"max.NaN.f16x2 {own}, {first}, {second};")
        code += [f"max.NaN.f16x2 {own}, {own}, {x};" for x in others]
    # What two keys have with each query becomes the best of both queries.
    code.append("prmt.b32 other, a, b, 0x7632;")
    code.append("prmt.b32 a, a, b, 0x5410;")
    code.append(f"max.NaN.f16x2 {name}, a, other;")
    return code


def _write_maxima(place: int, found: ir.Value) -> None:
    """Writes the maxima that each thread has, of a page of each of two blocks, for two queries.

    Of each eight keys, a thread has two products with its first query in one register, and two with
    its second one in the next. The next blocks may still be in flight, at the other place.

    Args:
      place: Where the products are held.
      found: Lines of 128 bytes, swizzled whole.
    """
    lane, own = (
        mlir.lane(),
        arith.andi(mlir.warp(), mlir.constant(row_ops.WARPS - 1)),
    )
    page, row = (
        arith.andi(lane, mlir.constant(PAGES - 1)),
        arith.shrui(lane, mlir.constant(2)),
    )
    chunk = arith.muli(own, mlir.constant(QUERIES // row_ops.WARPS // _CHUNK))
    zero = mlir.index(mlir.constant(0))
    for block in range(BLOCKS):
        code = ["wgmma.wait_group.sync.aligned 1;"] if block == 0 else []
        code += [".reg .b32 a, b, other;", *_best(place, block, "$0")]
        value = _run(f"{{ {' '.join(code)} }}", result=mlir.i32(), outputs=["=r"])
        both = vector.bitcast(
            ir.VectorType.get((2,), ir.F16Type.get()),
            vector.broadcast(ir.VectorType.get((1,), mlir.i32()), value),
        )
        line = arith.addi(page, mlir.constant(block * PAGES))
        for query in range(2):
            # A line's pieces of 16 bytes change places by its number.
            swizzled = arith.xori(arith.addi(chunk, mlir.constant(query)), line)
            column = arith.addi(arith.muli(swizzled, mlir.constant(_CHUNK)), row)
            best = vector.extract(both, [], ir.DenseI64ArrayAttr.get([query]))
            memref.store(best, found, [zero, zero, mlir.index(line), mlir.index(column)])


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
    found = vector.bitcast(ir.VectorType.get((1,), mlir.i32()), register)
    return vector.extract(found, [], ir.DenseI64ArrayAttr.get([0]))
