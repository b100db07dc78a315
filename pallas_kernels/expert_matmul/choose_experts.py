"""The experts of a few tokens from their router's products, on GPUs from Ampere on.

With the parts of a router's products that `decode_matmul_parts` has written, E experts of which a
token chooses k, and the token's input x before the norm:

    root[t] = 1 / sqrt(mean_d x[t, d]² + eps)          1 without a norm
    l[t]    = root[t] · Σ_part parts[part, t]          float32
    C[t]    = the k experts with the largest l[t], the first ones of equals
    w[t, j] = exp(l[t, C[t, j]] - max l[t]) / Σ_e ...  over e in C[t], or over all experts

The order is that of `jax.lax.top_k`: a NaN comes first, or last with a sign, and 0 before -0.

XLA takes four launches for this, each of which takes longer than its work. Here a thread block has
one token. A thread has every 128th expert. It adds up the parts, and makes integers of the sums,
ordered as the numbers are. Through shared memory it counts the experts that come before its own:
that is the expert's place among the chosen ones. A token without its own experts (`is_token`) gets
the last expert in each place, so that all such tokens read the same weights.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref, vector
from jaxtyping import Array, Float, Int, Int8

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, scf
from sketchwalk_jax.pallas_kernels.lib.row_ops import THREADS

_FOUR = 4  # keys per load from shared memory
_ALL_BITS, _LEAST = 0x7FFFFFFF, -(2**31)
_LOG2_E = 1.4426950408889634


class ChosenExperts(NamedTuple):
    """The experts of some tokens.

    Attributes:
      weights: `w`, the largest first.
      matrix: `C`, plus the number of the layer's first expert.
      root: `root`.
    """

    weights: Float[Array, "T k"]
    matrix: Int[Array, "T k"]
    root: Float[Array, "T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      experts: Number of experts.
      chosen: Experts that a token chooses.
      eps: What the norm adds to the mean of squares, or `None` without a norm.
      sums_chosen: Whether weights of the chosen experts, and not of all, add up to 1.
    """

    experts: int
    chosen: int
    eps: float | None
    sums_chosen: bool

    @property
    def room(self) -> int:
        """Experts with padding: as many for each thread."""
        return -(-self.experts // THREADS) * THREADS

    @property
    def layout(self) -> Any:
        """Layout of a number for each expert."""
        return plgpu.Layout.WG_STRIDED((self.room,), vec_size=1)


def _choose(
    x: Any,
    parts: Any,
    layer: Any,
    is_token: Any,
    weights: Any,
    matrix: Any,
    root_ref: Any,
    *,
    sizes: _Sizes,
    keys: Any,
    best: Any,
) -> None:
    """Runs one thread block: one token."""
    token, first = jax.lax.axis_index("token"), layer[0] * sizes.experts
    root: Any = jnp.float32(1.0)
    if sizes.eps is None:
        sums = _add_parts(parts, token, sizes)
    else:
        adjacent = max(one for one in (8, 4, 2, 1) if x.shape[1] % (one * THREADS) == 0)
        layout = plgpu.Layout.WG_STRIDED(x.shape[1:], vec_size=adjacent)
        wide = ops.read(x.at[token], layout).astype(jnp.float32)
        sums = _add_parts(parts, token, sizes)  # while the row arrives
        root = jax.lax.rsqrt(jnp.sum(wide * wide) / x.shape[1] + sizes.eps)
        sums = sums * root
    root_ref[token] = root
    numbers = token, first, is_token[token].astype(jnp.int32)
    if ops.is_interpreted():
        _choose_interpreted(sums, weights, matrix, *numbers, sizes=sizes)
        return

    @mlir.emit((sums, sizes.layout), weights, matrix, keys, best, numbers=numbers)
    def _(sums: Any, *refs: Any) -> None:
        _write_chosen(sizes, mlir.scalars(sums), *refs)


def _add_parts(parts: Any, token: Array, sizes: _Sizes) -> Array:
    """Returns the sum of each expert's parts, and 0 for padding."""
    if ops.is_interpreted():
        found = jnp.sum(parts[:, token], axis=0)
        return jnp.pad(found, (0, sizes.room - sizes.experts))
    result = mlir.array_type((sizes.room,), jnp.float32, sizes.layout)

    @mlir.emit(parts, numbers=(token,), result=result)
    def sums(parts: Any, token: Any) -> Any:
        count, tokens, experts = ir.MemRefType(parts.type).shape
        kind, number = mlir.register_type(sizes.layout, ir.F32Type.get()), ir.F32Type.get()
        found = []
        for start in range(0, sizes.room, THREADS):
            expert = arith.addi(mlir.thread(), _int(start))
            place = arith.addi(arith.muli(token, _int(experts)), expert)
            pointer = mlir.address(parts, place)
            flag = mlir.flag(mlir.compare("slt", expert, experts))
            step = tokens * experts * 4
            own = [mlir.load(pointer, 1, flag, offset=step * part)[0] for part in range(count)]
            values = [arith.bitcast(number, one) for one in own]
            total = functools.reduce(arith.addf, values)
            found.append(vector.from_elements(kind, [total]))
        return mlir.of_registers(found, (sizes.room,), sizes.layout)

    return sums


def _choose_interpreted(
    sums: Array,
    weights: Any,
    matrix: Any,
    token: Array,
    first: Array,
    is_token: Array,
    *,
    sizes: _Sizes,
) -> None:
    logits = sums[: sizes.experts]
    chosen, experts = jax.lax.top_k(logits, sizes.chosen)
    found = jnp.exp(chosen - chosen[0])
    total = jnp.sum(found if sizes.sums_chosen else jnp.exp(logits - chosen[0]))
    weights[token] = found / total
    matrix[token] = first + jnp.where(is_token == 1, experts, sizes.experts - 1)


def _write_chosen(
    sizes: _Sizes,
    sums: list[ir.Value],
    weights: ir.Value,
    matrix: ir.Value,
    keys: ir.Value,
    best: ir.Value,
    token: ir.Value,
    first: ir.Value,
    is_token: ir.Value,
) -> None:
    """Finds the place of each of the thread's experts, then writes the chosen ones."""
    experts = [arith.addi(mlir.thread(), _int(i * THREADS)) for i in range(len(sums))]
    exists = [mlir.compare("slt", expert, sizes.experts) for expert in experts]
    own = [
        arith.select(there, _key(x), _int(_LEAST)) for there, x in zip(exists, sums, strict=True)
    ]
    for key, expert in zip(own, experts, strict=True):
        memref.store(key, keys, [mlir.index(expert)])
    mgpu.warpgroup_barrier()

    def count(start: ir.Value, places: list[ir.Value]) -> list[ir.Value]:
        pointer = arith.addi(mlir.shared_pointer(keys), arith.muli(start, _int(4)))
        for index, other in enumerate(mlir.load(pointer, _FOUR, space="shared")):
            number = arith.addi(start, _int(index))
            for i, (key, expert) in enumerate(zip(own, experts, strict=True)):
                is_tie = arith.andi(
                    mlir.compare("eq", other, key), mlir.compare("slt", number, expert)
                )
                is_before = arith.ori(mlir.compare("sgt", other, key), is_tie)
                places[i] = arith.addi(places[i], mlir.flag(is_before))
        return places

    places = _loop(sizes.room, _FOUR, count, [_int(0)] * len(own))
    row = arith.muli(token, _int(sizes.chosen))
    for key, expert, there, place in zip(own, experts, exists, places, strict=True):
        with mgpu.when(arith.andi(there, mlir.compare("slt", place, sizes.chosen))):
            memref.store(key, best, [mlir.index(place)])
            is_own = mlir.compare("ne", is_token, 0)
            expert = arith.select(is_own, expert, _int(sizes.experts - 1))
            expert = arith.addi(first, expert)
            mlir.store(mlir.address(matrix, arith.addi(row, place)), [expert])
    mgpu.warpgroup_barrier()
    most = _logit_of(memref.load(best, [mlir.index(_int(0))]))

    def share(key: ir.Value) -> ir.Value:
        power = arith.mulf(arith.subf(_logit_of(key), most), _float(_LOG2_E))
        code = "ex2.approx.ftz.f32 $0, $1;"
        return mgpu.utils.inline_ptx(code, power, result_types=ir.F32Type.get())

    summed, number = (best, sizes.chosen) if sizes.sums_chosen else (keys, sizes.experts)

    def add(index: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
        return [arith.addf(total[0], share(memref.load(summed, [mlir.index(index)])))]

    with mgpu.when(mlir.compare("slt", mlir.thread(), sizes.chosen)):
        (total,) = _loop(number, 1, add, [_float(0.0)])
        own_share = share(memref.load(best, [mlir.index(mlir.thread())]))
        place = mlir.address(weights, arith.addi(row, mlir.thread()))
        mlir.store(place, [arith.divf(own_share, total)])


def _loop(end: int, step: int, body: Any, carry: list[ir.Value]) -> list[ir.Value]:
    """Runs `body(index, carry)` for every `step`-th index below `end`."""
    bounds = [arith.constant(ir.IndexType.get(), x) for x in (0, end, step)]
    loop = scf.ForOp(*bounds, carry)
    with ir.InsertionPoint(loop.body):
        index = arith.index_cast(mlir.i32(), loop.induction_variable)
        scf.yield_(body(index, list(loop.inner_iter_args)))
    return list(loop.results)


def _key(x: ir.Value) -> ir.Value:
    """Returns an integer for a float32, in the order of `jax.lax.top_k`; its own inverse."""
    bits = arith.bitcast(mlir.i32(), x) if isinstance(x.type, ir.F32Type) else x
    return arith.xori(bits, arith.andi(arith.shrsi(bits, _int(31)), _int(_ALL_BITS)))


def _logit_of(key: ir.Value) -> ir.Value:
    return arith.bitcast(ir.F32Type.get(), _key(key))


def _float(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), value)


_int = mlir.constant


def why_not_choose_experts(x: Any, *, experts: int, chosen: int) -> str | None:
    """Returns why the kernel does not support these tokens, or `None` if it does.

    Args:
      x: Rows `[T, D]`, an array or its abstract shape.
      experts: Number of experts.
      chosen: Experts that a token chooses.
    """
    if x.shape[1] % THREADS:
        return f"it takes multiples of {THREADS} inputs, not {x.shape[1]}"
    if chosen > min(THREADS, experts):
        return f"it chooses at most {THREADS} experts of at least as many, not {chosen}"
    return None


def choose_experts_kernel(
    x: Float[Array, "T D"],
    parts: Float[Array, "P T E"],
    layer: Int[Array, ""],
    is_token: Int8[Array, "T"],
    *,
    chosen: int,
    eps: float | None,
    sums_chosen: bool,
    interpret: bool = False,
) -> ChosenExperts:
    """Computes `w`, `C` and `root` of the module.

    Args:
      x: Rows before the norm; without a norm they are not read.
      parts: Parts of the router's products.
      layer: Index of the layer among those with experts.
      is_token: 1 for each row that is a token, and 0 for others, int8: XLA converts bools to these
        once for all layers.
      chosen: Experts that a token chooses, `k`.
      eps: Constant that the norm adds to the mean of squares, or `None` without a norm.
      sums_chosen: Whether the weights of the chosen experts, and not of all, add up to 1.
      interpret: Whether the interpreter runs the kernel.

    Raises:
      ValueError: If the kernel does not support these arguments.
    """
    _, tokens, experts = parts.shape
    reason = why_not_choose_experts(x, experts=experts, chosen=chosen)
    if reason is not None:
        raise ValueError(f"x, parts and chosen must fit the kernel: {reason}")
    sizes = _Sizes(experts=experts, chosen=chosen, eps=eps, sums_chosen=sums_chosen)
    shapes = (
        ((tokens, chosen), jnp.float32),
        ((tokens, chosen), jnp.int32),
        ((tokens,), jnp.float32),
    )
    found = ops.kernel(
        functools.partial(_choose, sizes=sizes),
        out_type=[jax.ShapeDtypeStruct(*one) for one in shapes],
        grid=(tokens,),
        grid_names=("token",),
        scratch_types={
            "keys": plgpu.SMEM((sizes.room,), jnp.int32),
            "best": plgpu.SMEM((THREADS,), jnp.int32),
        },
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="choose_experts",
    )(x, parts, layer.reshape(1).astype(jnp.int32), is_token)
    return ChosenExperts(*found)
