"""Largest products of 64 queries with the keys of blocks, in eight bits on Hopper's tensor cores.

Pallas zeroes a product's sums one by one before it starts, as many instructions as the maxima take,
and these already take as long as the product. So this module emits one step, of two blocks of keys,
in PTX:

* The queries stay in registers, so that shared memory is read only for the keys.
* Sums are float16, two per register: this halves the registers that the tensor cores read and
  write, and one instruction takes the maxima of three pairs. Queries are small enough
  (`largest_of_query`) that no sum exceeds the largest float16 number. Rounding to its 11 bits loses
  less than rounding to eight bits did before.
* The first product of a block overwrites the sums.
* While a thread takes the maxima of two blocks, the tensor cores multiply the next two. The sums
  are PTX registers that the compiler does not know, so it does not copy them in flight.
* The keys of a block are permuted (`place_of_key`) so that each of the four threads that share two
  queries has all keys of one page of 16. So threads exchange nothing for a page's maximum.

Keys are stored for fast copies and products: in lines of 128 bytes, which hold the channels of two
or four keys. In a group of eight blocks, key `i` has line `i % lines`, from byte
`i // lines * channels` on. So the 128 keys of a step are in consecutive lines, and steps are side
by side.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref, vector
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, llvm

QUERIES = 64  # per warpgroup
BLOCK = 64  # keys per block
BLOCKS, STEPS = 2, 4  # blocks per step, steps per group
GROUP = BLOCKS * STEPS  # blocks per group
PAGES = 4  # pages per block, each with a maximum
LINE = 128  # bytes
_KEYS = BLOCKS * BLOCK  # per step
_TOGETHER = 2  # adjacent keys of a page, which share a register of a thread
_CHUNK = 8  # adjacent queries in swizzled shared memory, 16 bytes
LAYOUT = plgpu.Layout.WGMMA_8BIT
"""Layout of a warpgroup's queries."""
BY_ROW = LAYOUT.reduce(1)
"""Layout of one number per query."""

_CHANNELS = 32  # per instruction
_LEFT = 4  # registers per thread for the queries of one instruction
_SUMS = QUERIES * _KEYS // row_ops.THREADS // 2  # registers per thread for the sums of a step
_NAME = "products"  # prefix of these registers' names
_LINES = 8  # lines that are swizzled together

_MOST_SHIFT = 100
_MANTISSA, _BIAS = 23, 127  # of float32


def largest_of_query(channels: int) -> float:
    """Returns the largest number of a rounded query: 448, float8's largest, times a power of two.

    With keys of at most 448 a sum is at most `channels * 1.75 * 64 / channels * 448 = 50,176`; the
    largest number of float16 is 65,504. The power of two changes the rounding only of numbers below
    a hundredth of the largest.
    """
    return 448.0 / 256 * (64 / channels)


def round_queries(query: Float[Array, "64 C"]) -> tuple[Array, Float[Array, "64"]]:
    """Rounds queries to float8_e4m3fn, and returns them with the power of two that each lacks.

    This is `policies.quantized_keys.round_queries` with a different power of two
    (`largest_of_query`).

    Args:
      query: Queries in 16 bits, in `LAYOUT`.
    """
    x = query.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(
        jnp.max(jnp.abs(x), axis=1) / largest_of_query(x.shape[1]), jnp.int32
    )
    # Exponent of the least power of two that is at least the number.
    shift = ((largest + ((1 << _MANTISSA) - 1)) >> _MANTISSA) - _BIAS
    shift = jnp.clip(shift, -_MOST_SHIFT, _MOST_SHIFT)
    inverse, factor = (
        jax.lax.bitcast_convert_type((sign * shift + _BIAS) << _MANTISSA, jnp.float32)
        for sign in (-1, 1)
    )
    x = x * plgpu.layout_cast(jax.lax.broadcast_in_dim(inverse, x.shape, (0,)), LAYOUT)
    # Convert via float16, which represents every float8 number exactly.
    return x.astype(jnp.float16).astype(jnp.float8_e4m3fn), factor


def lines(channels: int) -> int:
    """Returns the lines per group of keys."""
    return GROUP * BLOCK * channels // LINE


def place_of_key(key: Any) -> Any:
    """Returns the place within its block at which a key (an integer or an array) is stored.

    Args:
      key: From 0 to 63.

    Example:
      >>> [place_of_key(key) for key in (0, 1, 2, 3, 15, 16, 17, 18, 63)]
      [0, 1, 8, 9, 57, 2, 3, 10, 63]
    """
    of_page = BLOCK // PAGES
    page, pair, one = key // of_page, key % of_page // _TOGETHER, key % _TOGETHER
    return (pair * PAGES + page) * _TOGETHER + one


def begin(queries: Float[Array, "64 C"], keys: Any, slot: Any) -> None:
    """Starts to multiply with the first two blocks, once per kernel and before any loop.

    Args:
      queries: Queries in float8_e4m3fn, in `LAYOUT`.
      keys: Keys of groups, `[slots, lines, 128]` in shared memory, swizzled over whole lines.
      slot: Index of the first group.
    """
    if ops.is_interpreted():
        return
    channels = queries.shape[1]
    keys, first = _part(keys, slot, 0, channels)

    @mlir.emit((queries, LAYOUT), (keys, plgpu.RefType(ops.transforms(keys.dtype, LINE))))
    def start(queries: Any, keys: Any) -> None:
        _run(f".reg .b32 {_NAME}<{2 * _SUMS}>;")
        _start(queries, keys, range(first, first + channels, _CHANNELS), 0)


def write_maxima(
    queries: Float[Array, "64 C"], keys: Any, slot: Any, after: Any, found: Any, *, step: int
) -> None:
    """Writes each query's largest product per page of two blocks; NaN if any product is.

    `begin` or the previous call started the products with these blocks; this call starts those with
    the next two. It returns once the tensor cores have read the keys of the first two. Other
    threads see the maxima after a barrier.

    Args:
      queries: Queries in float8_e4m3fn, in `LAYOUT`.
      keys: Keys of groups, `[slots, lines, 128]` in shared memory, swizzled over whole lines.
      slot: Index of the group.
      after: Index of the next group.
      found: Target of the maxima: float16, `[8, 64]` in shared memory, swizzled over whole lines.
      step: Index of the two blocks in the group; calls take all steps of all groups in order.
    """
    channels = queries.shape[1]
    if ops.is_interpreted():
        own, first = _part(keys, slot, step, channels)
        products = jnp.dot(
            own[...][:, first : first + channels], queries.T, preferred_element_type=jnp.float32
        )
        shape = (BLOCKS, BLOCK // (PAGES * _TOGETHER), PAGES, _TOGETHER, QUERIES)
        products = products.astype(jnp.float16).reshape(shape)
        found[...] = jnp.max(products, axis=(1, 3)).reshape(BLOCKS * PAGES, QUERIES)
        # Tensor cores read through the async proxy of TMA; order these plain reads before its
        # writes.
        plgpu.commit_smem()
        return
    is_last = step == STEPS - 1
    coming, first = _part(keys, after if is_last else slot, (step + 1) % STEPS, channels)
    own = coming, plgpu.RefType(ops.transforms(coming.dtype, LINE))
    target = found, plgpu.RefType(ops.transforms(jnp.float16, LINE))

    @mlir.emit((queries, LAYOUT), own, target)
    def write(queries: Any, coming: Any, found: Any) -> None:
        place = step % 2
        _start(queries, coming, range(first, first + channels, _CHANNELS), 1 - place)
        _write_maxima(place, found)


def _part(keys: Any, slot: Any, step: int, channels: int) -> tuple[Any, int]:
    """Returns the lines of a step's keys, and the keys' first byte in each line."""
    beside, first = divmod(step * _KEYS, lines(channels))
    return keys.at[slot, pl.ds(first, _KEYS)], beside * channels


def settle() -> None:
    """Waits for the products that the last call of `write_maxima` started.

    Products in flight at the end of a loop's body make the assembler wait for every single product.
    """
    if ops.is_interpreted():
        return

    @mlir.emit()
    def wait() -> None:
        _run("wgmma.wait_group.sync.aligned 0;")


def _start(queries: mgpu.FragmentedArray, keys: ir.Value, parts: range, place: int) -> None:
    """Starts the products with two blocks, in one of two sets of registers.

    Args:
      queries: Queries in registers.
      keys: Lines of 128 keys.
      parts: First byte, in each line, of the channels of each instruction.
      place: Index of the set of registers.
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
        # The fence orders earlier reads of the sums' registers before the products.
        f"wgmma.fence.sync.aligned; {' '.join(code)} wgmma.commit_group.sync.aligned; }}",
        [*left, *descriptors],
        ["r"] * len(left) + ["l"] * len(descriptors),
    )


def _best(place: int, block: int, name: str) -> list[str]:
    """Returns PTX for a thread's maxima over its keys of one block, for both queries."""
    of_block = _sums(place)[block * _SUMS // BLOCKS :][: _SUMS // BLOCKS]
    code = []
    for which, own in enumerate("ab"):
        first, second, *others = of_block[which::2]
        code.append(f"max.NaN.f16x2 {own}, {first}, {second};")
        code += [f"max.NaN.f16x2 {own}, {own}, {x};" for x in others]
    # Combine two keys' maxima per query into one maximum per query.
    code.append("prmt.b32 other, a, b, 0x7632;")
    code.append("prmt.b32 a, a, b, 0x5410;")
    code.append(f"max.NaN.f16x2 {name}, a, other;")
    return code


def _write_maxima(place: int, found: ir.Value) -> None:
    """Writes each thread's maxima: two queries, one page in each of two blocks.

    Per eight keys, a thread has two products with its first query in one register, and two with its
    second query in the next. Products with the next blocks may be in flight in the other set of
    registers.

    Args:
      place: Index of the set of registers.
      found: Lines of 128 bytes, swizzled over whole lines.
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
            # The swizzle permutes a line's chunks of 16 bytes by the line's index.
            swizzled = arith.xori(arith.addi(chunk, mlir.constant(query)), line)
            column = arith.addi(arith.muli(swizzled, mlir.constant(_CHUNK)), row)
            best = vector.extract(both, [], ir.DenseI64ArrayAttr.get([query]))
            memref.store(best, found, [zero, zero, mlir.index(line), mlir.index(column)])


def _sums(place: int) -> list[str]:
    """Returns the names of the registers for the products with two blocks."""
    return [f"{_NAME}{place * _SUMS + index}" for index in range(_SUMS)]


def _run(
    code: str,
    operands: Sequence[ir.Value] = (),
    kinds: Sequence[str] = (),
    *,
    result: ir.Type | None = None,
    outputs: Sequence[str] = (),
) -> ir.Value:
    """Emits PTX instructions with side effects, which stay in order."""
    return llvm.inline_asm(
        result or ir.Type.parse("!llvm.void"),
        list(operands),
        code,
        ",".join([*outputs, *kinds]),
        asm_dialect=0,
        has_side_effects=True,
    )


def _as_integer(register: ir.Value) -> ir.Value:
    """Reinterprets four 8-bit numbers as a 32-bit integer."""
    found = vector.bitcast(ir.VectorType.get((1,), mlir.i32()), register)
    return vector.extract(found, [], ir.DenseI64ArrayAttr.get([0]))
