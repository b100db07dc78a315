"""SwiGLU between the float8 products of an mlp, quantized to float8 in one pass, on Hopper GPUs.

Inputs are the bfloat16 products `g` and `u` of float8 rows with the gate and up weights::

    gate[t, f] = g[t, f] · r[t] · s[f]          r: scales of the rows, s: of the output channels
    up[t, f]   = u[t, f] · r[t] · s'[f]
    y[t, f]    = gate · (1 / (1 + exp(-gate))) · up
    scale[t]   = max_f |y[t, f]| / 448          1 for a row of zeros
    q[t, f]    = round(y[t, f] · (1 / scale[t]))    float8_e4m3fn

Rounding a row requires its largest number first, so XLA reads the products twice, and rounds to
float8 in some 35 instructions per number. This kernel reads a row once: 4 bytes per column `f`. It
writes 1 byte.

*Numbers.* XLA rounds to bfloat16 after `gate`, `up`, `exp`, the sum, the quotient and each of the
two products of `y`. So does the kernel, with the same approximate instructions for `exp` and
`1 / scale` as XLA's code for Hopper in JAX 0.12. Its quotient is equally accurate once rounded to
bfloat16. On an H200 with JAX 0.11.2, rows agreed bit for bit, and scales differed by a rounding.
With another `exp`, as in other versions, a few numbers may differ by one step of float8. NaN in a
row makes its scale and all of its numbers NaN. Infinity makes the scale infinite and the numbers
zero, except NaN at the infinity.

*Threads.* A thread block has up to four warpgroups, and strides over the rows. A thread has vectors
of eight columns, the same in every row. It keeps their gate scales in registers, their up scales in
shared memory, and its results of a row in registers until the row's largest number is known.

*Copies.* Each thread copies its own columns of the next rows to shared memory (`cp.async`) and
reads them there, so that no thread waits for another's copies. After reading a vector it starts to
copy a later row's vector to the same place. Warps synchronize once per row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, nvvm
from jaxtyping import Array, BFloat16, Float, Float32

from sketchwalk_jax.pallas_kernels.config import num_multiprocessors, why_not_swiglu_quantize
from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, scf

# These change the speed of the kernel, not its results.
_WARPGROUPS = 4  # per SM; each thread then has at most 128 registers
_VECTORS = 4  # per thread, if there are enough warpgroups
_ROWS = 4  # most rows in flight per thread block
_IN_FLIGHT = 200 * 1024  # most bytes in flight per SM

_VECTOR = 8  # columns, 16 bytes of bfloat16
_CHUNK = 16  # bytes
_SHARED = 227 * 1024  # bytes of shared memory per SM
_OF_PROGRAM = 1024  # of these, bytes reserved per thread block
_MOST_WARPS = 32  # per thread block
_LARGEST = 448.0  # largest float8_e4m3fn number
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """Distribution of rows over thread blocks.

    Attributes:
      rows: Rows.
      width: Columns.
      warpgroups: Warpgroups per thread block.
      slots: Rows in flight per thread block.
      programs: Number of thread blocks.
    """

    rows: int
    width: int
    warpgroups: int
    slots: int
    programs: int

    @classmethod
    def of(cls, rows: int, width: int) -> "_Tiling":
        """Returns the tiling for `rows` rows of `width` columns."""
        of_warpgroup = _VECTOR * row_ops.THREADS
        warpgroups = min(-(-width // (of_warpgroup * _VECTORS)), _WARPGROUPS)
        together = _WARPGROUPS // warpgroups  # thread blocks per SM
        # Per column, both arrays of a row take 4 bytes, and so do the float32 scales of up.
        room = _SHARED // together - _OF_PROGRAM
        slots = min(room // (4 * width) - 1, _IN_FLIGHT // (4 * width * together), _ROWS)
        return cls(
            rows=rows,
            width=width,
            warpgroups=warpgroups,
            slots=max(slots, 1),
            programs=min(rows, num_multiprocessors() * together),
        )

    @property
    def threads(self) -> int:
        """Threads per thread block."""
        return self.warpgroups * row_ops.THREADS

    @property
    def of_row(self) -> int:
        """Vectors per row."""
        return self.width // _VECTOR

    @property
    def vectors(self) -> int:
        """Most vectors per thread."""
        return -(-self.of_row // self.threads)

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory: rows in flight, up scales, and each warp's largest number."""
        return {
            "ring": plgpu.SMEM((self.slots, 2, self.width), jnp.bfloat16),
            "factors": plgpu.SMEM((self.width,), jnp.float32),
            "largest": plgpu.SMEM((2, _MOST_WARPS), jnp.int32),
        }


def _gate_rows(
    gate: Any,
    up: Any,
    row_scales: Any,
    gate_scales: Any,
    up_scales: Any,
    out: Any,
    scales: Any,
    *,
    ring: Any,
    factors: Any,
    largest: Any,
    tiling: _Tiling,
) -> None:
    """Runs one thread block, which strides over the rows."""
    program = jax.lax.axis_index("program")
    read = gate, up, row_scales, gate_scales, up_scales
    if ops.is_interpreted():
        first = jnp.asarray(program, jnp.int32)
        turns = jax.lax.div(tiling.rows - 1 - first, tiling.programs) + 1

        def gate_row(turn: Array, _: None) -> None:
            _gate_interpreted(*read, out, scales, first + turn * tiling.programs)

        jax.lax.fori_loop(0, turns, gate_row, None)
        return

    @mlir.emit(*read, out, scales, ring, factors, largest, numbers=[program])
    def _(*arguments: Any) -> None:
        *references, program = arguments
        _Program(*references, tiling=tiling).run(program)


class _Program:
    """The work of one thread; values are per thread."""

    def __init__(
        self,
        gate: ir.Value,
        up: ir.Value,
        row_scales: ir.Value,
        gate_scales: ir.Value,
        up_scales: ir.Value,
        out: ir.Value,
        scales: ir.Value,
        ring: ir.Value,
        factors: ir.Value,
        largest: ir.Value,
        *,
        tiling: _Tiling,
    ) -> None:
        self._tiling = tiling
        self._inputs, self._out, self._scales = (gate, up), out, scales
        self._row_scales, self._gate_scales, self._up_scales = row_scales, gate_scales, up_scales
        self._thread = mlir.thread()
        own = arith.muli(self._thread, _int(_CHUNK))
        self._ring = arith.addi(mlir.shared_pointer(ring), own)
        # The halves of a vector's scales are apart, so that adjacent threads read adjacent words.
        self._factors = arith.addi(mlir.shared_pointer(factors), own)
        self._largest = mlir.shared_pointer(largest)

    def run(self, first: ir.Value) -> None:
        """Processes all rows of the thread block."""
        tiling, step = self._tiling, self._tiling.programs
        of_slot = 4 * tiling.width  # bytes per slot
        for slot in range(tiling.slots):
            row = arith.addi(first, _int(slot * step))
            pointers, is_row = self._pointers(row), mlir.compare("slt", row, tiling.rows)
            for vector in range(tiling.vectors):
                place = arith.addi(self._ring, _int(slot * of_slot))
                self._copy(pointers, place, vector, is_row)
        factors = self._load_scales()
        bounds = [mlir.index(x) for x in (first, _int(tiling.rows), _int(step))]
        loop = scf.ForOp(*bounds, [_int(0), _int(0), self._row_scale(first)])
        with ir.InsertionPoint(loop.body):
            row = arith.index_cast(mlir.i32(), loop.induction_variable)
            slot, turn, row_scale = loop.inner_iter_args
            # Load early to hide the latency.
            next_scale = self._row_scale(arith.addi(row, _int(step)))
            ahead = arith.addi(row, _int(tiling.slots * step))
            pointers, is_row = self._pointers(ahead), mlir.compare("slt", ahead, tiling.rows)
            place, most = arith.addi(self._ring, slot), _int(0)
            found = []
            for vector in range(tiling.vectors):
                mlir.effect(f"cp.async.wait_group {tiling.slots * tiling.vectors - 1};")
                is_own = self._is_own(vector)
                read = functools.partial(
                    self._products, place, vector, row_scale, factors[vector], most
                )
                own, most = _where_set(is_own, read, most)
                found.append(own)
                # The slot's vector is in registers, so its place is free.
                self._copy(pointers, place, vector, is_row)
            scale = _scale_of(self._over_program(most, turn))
            self._write(row, found, scale)
            slot = arith.addi(slot, _int(of_slot))
            is_last = mlir.compare("eq", slot, tiling.slots * of_slot)
            slot = arith.select(is_last, _int(0), slot)
            turn = arith.xori(turn, _int(4 * _MOST_WARPS))
            scf.yield_([slot, turn, next_scale])
        mlir.effect("cp.async.wait_group 0;")

    # Memory

    def _is_own(self, vector: int) -> ir.Value | None:
        """Whether the thread's vector is within the row; `None` if all threads' vectors are."""
        first = vector * self._tiling.threads
        if first + self._tiling.threads <= self._tiling.of_row:
            return None
        return mlir.compare("slt", self._thread, self._tiling.of_row - first)

    def _pointers(self, row: ir.Value) -> list[ir.Value]:
        """Returns the addresses of the thread's first vector of a row, in both arrays."""
        place = self._place(row)
        return [mlir.address(x, place) for x in self._inputs]

    def _place(self, row: ir.Value) -> ir.Value:
        """Returns the offset of the thread's first column of a row, in 64 bits."""
        long = ir.IntegerType.get_signless(64)
        first = arith.extui(long, arith.muli(self._thread, _int(_VECTOR)))
        start = arith.muli(arith.extui(long, row), arith.constant(long, self._tiling.width))
        return arith.addi(start, first)

    def _copy(
        self, pointers: list[ir.Value], place: ir.Value, vector: int, is_row: ir.Value
    ) -> None:
        """Starts to copy a vector of both arrays, if it exists, as a group of copies."""
        is_own = self._is_own(vector)
        wanted = is_row if is_own is None else arith.andi(is_row, is_own)
        offset = _CHUNK * vector * self._tiling.threads
        code = " ".join(
            f"@p cp.async.cg.shared.global [$0 + {offset + array * 2 * self._tiling.width}], "
            f"[${1 + array} + {offset}], {_CHUNK};"
            for array in range(2)
        )
        mlir.effect(
            f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; {code} }}", place, *pointers, mlir.flag(wanted)
        )
        mlir.effect("cp.async.commit_group;")

    def _row_scale(self, row: ir.Value) -> ir.Value:
        """Loads the scale of a row, clamped to the last row."""
        row = arith.minsi(row, _int(self._tiling.rows - 1))
        (found,) = mlir.load(mlir.address(self._row_scales, row), 1, how=".nc")
        return found

    def _load_scales(self) -> list[list[ir.Value]]:
        """Loads the gate scales of the thread's vectors; copies up scales to shared memory."""
        found, width = [], self._tiling.width
        column = arith.muli(self._thread, _int(_VECTOR))
        pointers = [mlir.address(x, column) for x in (self._gate_scales, self._up_scales)]
        for vector in range(self._tiling.vectors):
            is_own = self._is_own(vector)
            own = None if is_own is None else mlir.flag(is_own)
            first = vector * self._tiling.threads
            of_gate, of_up = (
                [
                    mlir.load(pointer, 4, own, offset=4 * (_VECTOR * first + 4 * half), how=".nc")
                    for half in range(2)
                ]
                for pointer in pointers
            )
            found.append([x for half in of_gate for x in half])

            def keep(first: int = first, of_up: list[list[ir.Value]] = of_up) -> None:
                for half, values in enumerate(of_up):
                    offset = _CHUNK * first + half * 2 * width
                    mlir.effect(
                        f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};",
                        self._factors,
                        *values,
                    )

            _when_set(is_own, keep)
        return found

    def _write(self, row: ir.Value, found: list[list[ir.Value]], scale: ir.Value) -> None:
        """Rounds and writes the thread's part of a row; one thread writes the scale."""
        inverse = _run("rcp.approx.f32 $0, $1;", scale)
        pointer = mlir.address(self._out, self._place(row))
        for vector, products in enumerate(found):

            def write(vector: int = vector, products: list[ir.Value] = products) -> None:
                pairs = zip(products[::2], products[1::2], strict=True)
                rounded = [_run(_ROUND, *pair, inverse) for pair in pairs]
                mlir.store(pointer, rounded, offset=_VECTOR * vector * self._tiling.threads)

            _when_set(self._is_own(vector), write)
        is_first = mlir.compare("eq", self._thread, 0)
        with mgpu.when(is_first):
            mlir.store(mlir.address(self._scales, row), [scale])

    # Numbers

    def _products(
        self,
        place: ir.Value,
        vector: int,
        row_scale: ir.Value,
        gate_factors: list[ir.Value],
        most: ir.Value,
    ) -> tuple[list[ir.Value], ir.Value]:
        """Returns a vector of `y` in bfloat16 pairs, and its magnitudes' maximum with `most`."""
        offset, width = _CHUNK * vector * self._tiling.threads, self._tiling.width
        read = functools.partial(mlir.load, count=4, space="shared")
        gate, up = (read(place, offset=offset + array * 2 * width) for array in range(2))
        up_factors = [
            x for half in range(2) for x in read(self._factors, offset=offset + half * 2 * width)
        ]
        found = []
        for pair in range(_VECTOR // 2):
            both = slice(2 * pair, 2 * pair + 2)
            own = (gate[pair], up[pair], row_scale, *gate_factors[both], *up_factors[both])
            found.append(_run(_PRODUCT, *own))
        for x in found:
            most = _run(_LARGER, most, x)
        return found, most

    def _over_program(self, most: ir.Value, turn: ir.Value) -> ir.Value:
        """Returns a row's largest number over all threads, in the upper half of a word.

        Two turns alternate: a warp reuses its place only after the barrier of the other turn, when
        all warps have read it.
        """
        warps = self._tiling.warpgroups * row_ops.WARPS
        own = _run(_LARGER_HALF, most)
        own = mlir.over_lanes(own, nvvm.ReductionKind.UMAX)
        scratch, lane = arith.addi(self._largest, turn), mlir.lane()
        with mgpu.when(mlir.compare("eq", lane, 0)):
            place = arith.addi(scratch, arith.shli(mlir.warp(), _int(2)))
            mlir.effect("st.shared.b32 [$0], $1;", place, own)
        gpu.barrier()
        other = arith.shli(arith.minui(lane, _int(warps - 1)), _int(2))
        (theirs,) = mlir.load(arith.addi(scratch, other), 1, space="shared")
        return mlir.over_lanes(theirs, nvvm.ReductionKind.UMAX)


def _scale_of(largest: ir.Value) -> ir.Value:
    """Returns `scale` of the module, as bits."""
    code = (
        f"{{ .reg .pred p; .reg .b32 x; mul.rn.f32 x, $1, {_hex(1 / _LARGEST)}; "
        f"max.NaN.f32 x, x, {_hex(_LEAST_SCALE)}; setp.eq.f32 p, $1, 0f00000000; "
        f"selp.b32 $0, {_hex(1.0)}, x, p; }}"
    )
    return _run(code, largest)


def _where_set(flag: ir.Value | None, read: Any, most: ir.Value) -> tuple[list[ir.Value], ir.Value]:
    """Returns `read()` if the flag is set or `None`, else zeros and `most`."""
    if flag is None:
        return read()
    pairs = _VECTOR // 2
    branch = scf.IfOp(flag, [mlir.i32()] * (pairs + 1), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        found, more = read()
        scf.yield_([*found, more])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([*[_int(0)] * pairs, most])
    *found, most = branch.results
    return found, most


def _when_set(flag: ir.Value | None, body: Any) -> None:
    """Runs `body` if the flag is set or `None`."""
    if flag is None:
        body()
        return
    with mgpu.when(flag):
        body()


def _hex(number: float) -> str:
    """Formats a float32 number exactly, in PTX's hexadecimal notation."""
    return f"0f{np.float32(number).view(np.uint32):08X}"


# Unpacks a bfloat16 pair to two float32 numbers, `a` from the lower half.
_UNPACK = "shl.b32 a, {0}, 16; and.b32 b, {0}, 0xffff0000;"
_PACK = "cvt.rn.bf16x2.f32 {0}, b, a;"
# The quotient is a quarter of the reciprocal of a quarter of the sum: the instruction returns zero
# for reciprocals below the smallest normal number. Where `ex2` returns zero, the sum loses the
# number anyway.
_QUARTER = "0x3E803E80"
_PRODUCT = " ".join(
    (
        "{ .reg .b32 a, b, gate, up, x, quarter;",
        _UNPACK.format("$1"),
        "mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $3;",
        "mul.rn.f32 a, a, $4; mul.rn.f32 b, b, $5;",
        _PACK.format("gate"),
        _UNPACK.format("$2"),
        "mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $3;",
        "mul.rn.f32 a, a, $6; mul.rn.f32 b, b, $7;",
        _PACK.format("up"),
        _UNPACK.format("gate"),
        *(f"mul.rn.f32 {x}, {x}, {_hex(-1 / np.log(2.0))};" for x in "ab"),
        "ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b;",
        _PACK.format("x"),
        f"mov.b32 quarter, {_QUARTER}; fma.rn.bf16x2 x, x, quarter, quarter;",
        _UNPACK.format("x"),
        "rcp.approx.ftz.f32 a, a; rcp.approx.ftz.f32 b, b;",
        *(f"mul.rn.f32 {x}, {x}, {_hex(0.25)};" for x in "ab"),
        _PACK.format("x"),
        "mul.rn.bf16x2 x, gate, x; mul.rn.bf16x2 $0, x, up; }",
    )
)
# Without their signs, numbers compare like their bits, with NaN the largest.
_LARGER = "{ .reg .b32 x; and.b32 x, $2, 0x7fff7fff; max.u16x2 $0, $1, x; }"
_LARGER_HALF = "{ .reg .b32 x; shl.b32 x, $1, 16; and.b32 $0, $1, 0xffff0000; max.u32 $0, $0, x; }"
# Multiplies four numbers, in two words, by a factor and rounds them.
_ROUND = " ".join(
    (
        "{ .reg .b32 a, b; .reg .b16 x, y;",
        *(
            f"{_UNPACK.format(source)} mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $3; "
            f"cvt.rn.satfinite.e4m3x2.f32 {target}, b, a;"
            for source, target in (("$1", "x"), ("$2", "y"))
        ),
        "mov.b32 $0, {x, y}; }",
    )
)


def _gate_interpreted(
    gate: Any,
    up: Any,
    row_scales: Any,
    gate_scales: Any,
    up_scales: Any,
    out: Any,
    scales: Any,
    row: Array,
) -> None:
    """Computes one row, with the roundings of the kernel."""
    row_scale = row_scales[row]

    def rounded(x: Array) -> Array:
        """Rounds to bfloat16 explicitly; compilers may drop a conversion there and back."""
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    gate, up = (
        rounded(x[row].astype(jnp.float32) * row_scale * factors[...])
        for x, factors in ((gate, gate_scales), (up, up_scales))
    )
    sigmoid = rounded(1.0 / rounded(1.0 + rounded(jnp.exp(-gate))))
    found = rounded(rounded(gate * sigmoid) * up)
    largest = jnp.max(jnp.abs(found))
    scale = jnp.maximum(largest * jnp.float32(1 / _LARGEST), _LEAST_SCALE)
    scale = jnp.where(largest == 0, 1.0, scale)
    rows = (found * (1 / scale)).astype(jnp.float8_e4m3fn)
    out[pl.ds(row, 1), :] = jax.lax.bitcast_convert_type(rows, jnp.int8)[None]
    scales[pl.ds(row, 1)] = scale[None]


def swiglu_quantize_kernel(
    gate: BFloat16[Array, "T F"],
    up: BFloat16[Array, "T F"],
    row_scales: Float32[Array, "T"],
    gate_scales: Float32[Array, "F"],
    up_scales: Float32[Array, "F"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T F"], Float32[Array, "T"]]:
    """Computes `q` and `scale` of the module: SwiGLU rows in float8.

    Args:
      gate: Products of rows with the gate weights, `g`.
      up: Products of rows with the up weights, `u`.
      row_scales: Scales of the rows, `r`.
      gate_scales: Scales of the gate columns, `s`.
      up_scales: Scales of the up columns, `s'`.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      `q` in float8_e4m3fn, and `scale`.

    Raises:
      ValueError: If there are no rows, or columns are no multiple of 8 or too many for an SM's
        shared memory (`config.why_not_swiglu_quantize`).

    Example:
      >>> x, one = jnp.ones((2, 128), jnp.bfloat16), jnp.ones(128)
      >>> rows, scales = swiglu_quantize_kernel(x, x, jnp.ones(2), one, one, interpret=True)
      >>> rows.dtype.name, scales.shape
      ('float8_e4m3fn', (2,))
    """
    if reason := why_not_swiglu_quantize(gate):
        raise ValueError(reason)
    tiling = _Tiling.of(*gate.shape)
    # The interpreter runs all threads together.
    threads: dict[str, Any] = {"num_threads": tiling.warpgroups, "thread_name": "warpgroup"}
    found, scales = ops.kernel(
        functools.partial(_gate_rows, tiling=tiling),
        out_type=(
            jax.ShapeDtypeStruct(gate.shape, jnp.int8),
            jax.ShapeDtypeStruct(gate.shape[:1], jnp.float32),
        ),
        scratch_types=tiling.scratch,
        grid=(tiling.programs,),
        grid_names=("program",),
        **({} if interpret else threads),
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="swiglu_quantize",
    )(gate, up, row_scales, gate_scales, up_scales)
    return jax.lax.bitcast_convert_type(found, jnp.float8_e4m3fn), scales


_int, _run = mlir.constant, mlir.run
