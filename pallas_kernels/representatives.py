"""Queries that stand for those of a row, on Hopper GPUs: its mean, and the farthest ones.

Farthest-point traversal, head by head (`policies.recommended.representative_queries`): after the
mean, the query whose distance to the nearest one taken is largest. A program takes one row of two
heads. Of each, all its threads find the mean, the distances to it, and all products of two queries,
by which

    |q_i - q_j|^2 = q_i q_i + q_j q_j - 2 q_i q_j

is one number read for each step and query. So the steps, which wait for each other, are those of a
single warp for each head, and no warp waits for another one.

Distance and place of a query are one integer, so that one reduction finds both: distances that
differ by less than 2^-17 of themselves count as equal, and of equal ones the first is taken.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm as typed_llvm
from jaxlib.mlir.dialects import memref, nvvm
from jaxlib.mlir.dialects import scf as typed_scf
from jaxtyping import Array, Bool, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops, words

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm
scf: Any = typed_scf

_QUERIES = 64  # of a row
_PLACES = _QUERIES - 1  # the low bits, which tell the place
_HEADS = 2  # of a program, as many warps as take steps; with four, two programs fit and not four
_HALVES = _QUERIES // words.LANES  # queries of a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is static about a call.

    Attributes:
      heads: Heads.
      head_dim: Features of a head, of which the slow half counts.
      count: Representatives.
      interpret: Whether the interpreter runs the kernel.
    """

    heads: int
    head_dim: int
    count: int
    interpret: bool


def _represent(
    query: Any,
    valid: Any,
    out: Any,
    *,
    plan: _Plan,
    queries: Any,
    products: Any,
    means: Any,
    distances: Any,
    filled: Any,
) -> None:
    """One program: one row of two heads; of a single one, that one twice."""
    row, group, batch = (jax.lax.axis_index(name) for name in ("row", "group", "batch"))
    quarter, rows = plan.head_dim // 4, pl.ds(row * _QUERIES, _QUERIES)
    heads = [jnp.minimum(group * _HEADS + index, plan.heads - 1) for index in range(_HEADS)]
    for index, head in enumerate(heads):
        for half in range(2):  # channels `d` and `d + H/2` turn together, slower the larger `d` is
            channels = pl.ds((2 * half + 1) * quarter, quarter)
            source, target = query.at[batch, rows, head, channels], queries.at[index, half]
            plgpu.copy_gmem_to_smem(source, target, filled.at[index])
    is_own = ops.read(valid.at[batch, rows], ops.BY_ROW) != 0
    shape = (_QUERIES, quarter)

    def prepare(index: Any, nothing: Any) -> Any:
        """The mean of a head, the distances to it, and the products of its queries."""
        plgpu.barrier_wait(filled.at[index])

        def product(sums: ops.Accumulator) -> Any:
            for half in range(2):
                own = queries.at[index, half]
                sums.add_product(own, own.transpose((1, 0)))
            return sums.load()

        found = ops.with_accumulator(product, (_QUERIES, _QUERIES), interpret=plan.interpret)
        ops.write(products.at[index], found, optimized=True)
        halves = [ops.read(queries.at[index, half]).astype(jnp.float32) for half in range(2)]
        largest = jnp.maximum(*(jnp.abs(x) for x in halves))
        is_bad = jnp.where(largest < jnp.inf, 0.0, 1.0)  # where one of them is NaN too
        lost = jnp.where(is_own, jnp.max(is_bad, axis=1), 1.0)  # whether a query does not count
        spread = ops.spread(lost, shape, 0)
        halves = [jnp.where(spread == 0.0, x, 0.0) for x in halves]
        share = 1.0 / jnp.maximum(jnp.sum(1.0 - spread, axis=0), 1.0)
        mean = [jnp.sum(x, axis=0) * share for x in halves]
        for half in range(2):
            ops.write(means.at[index, half], mean[half].astype(means.dtype))
        away = [x - ops.spread(one, shape, 1) for x, one in zip(halves, mean, strict=True)]
        distance = jnp.sum(away[0] * away[0] + away[1] * away[1], axis=1)
        ops.write(distances.at[index], jnp.where(lost == 0.0, distance, -1.0))
        return nothing

    jax.lax.fori_loop(0, _HEADS, prepare, ())
    warp_ops.barrier(interpret=plan.interpret)
    target = out.at[batch, row]
    if plan.interpret:
        for index, head in enumerate(heads):
            places = _places(products[index], distances[index], plan.count)
            _write_interpreted(places, queries.at[index], means.at[index], target.at[:, head])
        return
    transforms = [
        ops.transforms(ref.dtype, width)
        for ref, width in ((queries, plan.head_dim // 2), (products, ops.SWIZZLE_BYTES))
    ]
    shared = [plgpu.RefType(one) for one in transforms]
    scalar, plain = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(scalar, *shared, plain, plain, plain))
    def traverse(
        _: Any, first: Any, queries: Any, products: Any, means: Any, distances: Any, out: Any
    ) -> None:
        (first,) = words.scalars(first)
        has_head = arith.cmpi(arith.CmpIPredicate.slt, words.warp(), words.constant(_HEADS))
        with mgpu.when(has_head):
            _emit_traversal(plan, first, queries, products, means, distances, out)

    traverse(group * _HEADS, queries, products, means, distances, target)


# The steps of a head


def _places(products: Array, distance: Array, count: int) -> list[Any]:
    """Which queries are taken after the mean, by the interpreter; -1 where none is left."""
    norm, place = jnp.diagonal(products), jnp.arange(_QUERIES, dtype=jnp.int32)
    taken = []
    for _ in range(1, count):
        key = jax.lax.bitcast_convert_type(distance, jnp.int32)
        key = jnp.where(distance < 0.0, -1, (key & ~_PLACES) | (_PLACES - place))
        largest = jnp.max(key)
        best = _PLACES - (largest & _PLACES)
        away = jnp.maximum(norm + norm[best] - 2.0 * products[best], 0.0)
        # What is not a number is no distance.
        distance = jnp.where(distance < 0.0, distance, jnp.fmin(distance, away))
        distance = jnp.where(place == best, -1.0, distance)
        taken.append(jnp.where(largest >= 0, best, -1))
    return taken


def _write_interpreted(places: list[Any], queries: Any, means: Any, out: Any) -> None:
    own, mean = queries[...], means[...]
    found = [mean, *(jnp.where(place >= 0, own[:, place], mean) for place in places)]
    out[...] = jnp.stack(found)


def _emit_traversal(
    plan: _Plan,
    first: ir.Value,
    queries: ir.Value,
    products: ir.Value,
    means: ir.Value,
    distances: ir.Value,
    out: ir.Value,
) -> None:
    """Takes queries of one head for each warp, as `_places` does, and writes them.

    A thread has queries `lane` and `lane + 32`, and two adjacent channels of all.

    Args:
      plan: What is static.
      first: The first warp's head.
      queries: `[2, 2, 64, H/4]` in shared memory, tiled.
      products: `[2, 64, 64]` in shared memory, tiled.
      means: `[2, 2, H/4]` in shared memory.
      distances: To the mean, `[2, 64]` in shared memory, negative of those that do not count.
      out: `[R, N, 2, H/4]` in global memory.
    """
    constant, number = words.constant, ir.F32Type.get()
    lane, warp = words.lane(), words.warp()
    head = arith.minsi(arith.addi(first, warp), constant(plan.heads - 1))
    channels, quarter = plan.head_dim // 2, plan.head_dim // 4
    zero = arith.constant(number, 0.0)
    lost = arith.constant(number, -1.0)
    places = [arith.addi(lane, constant(words.LANES * half)) for half in range(_HALVES)]

    def product(one: ir.Value, half: ir.Value, column: ir.Value) -> ir.Value:
        """Of a query and of query `32 half + column`, by the swizzle of rows of 128 bytes."""
        rest = arith.andi(one, constant(7))
        column = arith.xori(column, arith.shli(rest, constant(2)))
        tile = arith.shrui(one, constant(3))
        return memref.load(products, [words.index(x) for x in (warp, tile, half, rest, column)])

    norms = [product(place, constant(half), lane) for half, place in enumerate(places)]
    distance = [memref.load(distances, [words.index(warp), words.index(place)]) for place in places]

    # Two adjacent channels of 16 bits are a word.
    shared = mgpu.utils.memref_ptr
    is_channel = arith.cmpi(arith.CmpIPredicate.slt, lane, constant(channels // 2))
    pair = arith.select(is_channel, lane, constant(0))
    half = arith.divui(pair, constant(quarter // 2))
    pair = arith.remui(pair, constant(quarter // 2))
    place_of_mean = arith.addi(arith.muli(warp, constant(2)), half)
    place_of_mean = arith.addi(arith.muli(place_of_mean, constant(quarter // 2)), pair)
    mean = _word(shared(means), place_of_mean)
    start = arith.addi(arith.muli(warp, constant(2)), half)
    start = arith.muli(start, constant(_QUERIES * quarter // 2))

    def write(index: ir.Value, word: ir.Value) -> None:
        place = arith.addi(arith.muli(index, constant(plan.heads)), head)
        place = arith.addi(arith.muli(place, constant(channels // 2)), lane)
        with mgpu.when(is_channel):
            pointer = mgpu.utils.getelementptr(shared(out), [place], words.i32())
            llvm.store(word, pointer)

    write(constant(0), mean)
    loop = scf.ForOp(
        words.index(constant(1)),
        words.index(constant(plan.count)),
        words.index(constant(1)),
        distance,
    )
    with ir.InsertionPoint(loop.body):
        distance = list(loop.inner_iter_args)
        keys = []
        for place, one in zip(places, distance, strict=True):
            key = arith.andi(arith.bitcast(words.i32(), one), constant(~_PLACES))
            key = arith.ori(key, arith.subi(constant(_PLACES), place))
            is_lost = arith.cmpf(arith.CmpFPredicate.OLT, one, zero)
            keys.append(arith.select(is_lost, constant(-1), key))
        largest = words.over_lanes(functools.reduce(arith.maxsi, keys), nvvm.ReductionKind.MAX)
        is_left = arith.cmpi(arith.CmpIPredicate.sge, largest, constant(0))
        # The bits of -1 tell query 0, which is there.
        best = arith.subi(constant(_PLACES), arith.andi(largest, constant(_PLACES)))
        offset = arith.addi(arith.muli(best, constant(quarter // 2)), pair)
        # A row of `quarter` channels is as wide as the swizzle, of 64 or 32 bytes.
        line = arith.andi(arith.shrui(offset, constant(5)), constant(quarter // 8 - 1))
        offset = arith.xori(offset, arith.shli(line, constant(2)))
        word = _word(shared(queries), arith.addi(start, offset))
        index = arith.index_cast(words.i32(), loop.induction_variable)
        write(index, arith.select(is_left, word, mean))
        last, column = arith.shrui(best, constant(5)), arith.andi(best, constant(words.LANES - 1))
        norm = product(best, last, column)
        nearer = []
        for half, (place, one) in enumerate(zip(places, distance, strict=True)):
            both = arith.addf(norms[half], norm)
            twice = arith.mulf(product(best, constant(half), lane), arith.constant(number, 2.0))
            away = arith.maximumf(arith.subf(both, twice), zero)
            is_lost = arith.cmpf(arith.CmpFPredicate.OLT, one, zero)
            is_taken = arith.cmpi(arith.CmpIPredicate.eq, place, best)
            away = arith.minnumf(one, away)
            nearer.append(arith.select(arith.ori(is_lost, is_taken), lost, away))
        scf.yield_(nearer)


def _word(pointer: ir.Value, place: ir.Value) -> ir.Value:
    """A word of memory, counted in words."""
    return llvm.load(words.i32(), mgpu.utils.getelementptr(pointer, [place], words.i32()))


def representatives_kernel(
    query: Float[Array, "B T N H"],
    valid: Bool[Array, "B T"],
    *,
    count: int,
    interpret: bool = False,
) -> Float[Array, "B I R N C"]:
    """`count` representatives of each 64 queries of every head, in the slow half of the channels.

    Args:
      query: Queries in 16 bits, of whole rows, with a head_dim of 64 or 128.
      valid: Which columns hold a query of the sequence.
      count: Representatives.
      interpret: Whether the interpreter runs the kernel.
    """
    batch, tokens, heads, head_dim = query.shape
    rows, quarter = tokens // _QUERIES, head_dim // 4
    plan = _Plan(heads=heads, head_dim=head_dim, count=count, interpret=interpret)
    shape = (batch, rows, count, heads, 2, quarter)
    size = (_HEADS, 2, _QUERIES, quarter)
    kernel = plgpu.kernel(
        functools.partial(_represent, plan=plan),
        out_type=jax.ShapeDtypeStruct(shape, query.dtype),
        scratch_types={
            "queries": ops.tiled(size, query.dtype, swizzle=2 * quarter),
            "products": ops.tiled((_HEADS, _QUERIES, _QUERIES), jnp.float32),
            "means": plgpu.SMEM((_HEADS, 2, quarter), query.dtype),
            "distances": plgpu.SMEM((_HEADS, _QUERIES), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=_HEADS),
        },
        grid=(rows, -(-heads // _HEADS), batch),
        grid_names=("row", "group", "batch"),
        compiler_params=ops.compiler_params(),
        interpret=ops.interpreter(interpret),
        kernel_name="representatives",
    )
    found = kernel(query, valid.astype(jnp.int32))
    return found.reshape(batch, rows, count, heads, 2 * quarter)
