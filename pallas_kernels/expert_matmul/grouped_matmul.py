"""Products of groups of 128 rows with one matrix each of a stack, on Hopper GPUs.

    out[g, r, f] = Σ_d rows[g, r, d] · W[matrix[g], d, f]                        for g < used

or, with two arrays of weights, SwiGLU of a group, which is rounded once:

    out[g, r, f] = silu(Σ_d rows[g, r, d] · W[matrix[g], d, f])
                   · Σ_d rows[g, r, d] · W'[matrix[g], d, f]

Matrices may also be transposed, `W[matrix[g], f, d]`.

A tile is a group's 128 rows times up to 256 columns of weights: of one array, or half of them of
each of both. The grid has one thread block per multiprocessor (SM), which computes one tile after
another. Tiles lie with a group's columns together, and the thread blocks take adjacent tiles at a
time: they share a group's rows, and adjacent groups their matrix, in the L2 cache. Each tile reads
its rows and weights once, `2 D (128 + 256)` bytes for `2 D · 128 · 256` operations.

A thread block has a loading and two computing warpgroups, with 64 rows each. The loader copies
64 inputs of rows and weights a step into shared memory, several steps ahead, also into the next
tile's. So it fills shared memory while the computing warpgroups write a tile. Each slot of shared
memory has two barriers: `filled`, when its copies have arrived, and `freed`, when both warpgroups
have multiplied it. The sums stay in registers: 64 x 256 in float32, 128 per thread. Outputs leave
through two pieces of shared memory of 64 columns, so that one is copied while the other is written.

A row's sums are added in the same order wherever it lies.
"""

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import (
    GROUP_COLUMNS,
    GROUP_ROWS,
    num_multiprocessors,
    why_not_grouped_shape,
)
from sketchwalk_jax.pallas_kernels.lib import ops

_DEPTH = 64  # inputs per step: 128 bytes, a swizzled line of shared memory
_WARPGROUPS = 2  # that compute
_ROWS = GROUP_ROWS // _WARPGROUPS
_PIECE = 64  # columns per copy of outputs
_COLUMNS = 256  # most columns of a tile, of all arrays together
_STAGE_BYTES = 192 * 1024  # of shared memory, for rows and weights
_REGISTERS = 40, 232  # per loading and per computing thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """The static sizes of a call.

    Attributes:
      groups: Groups of rows `G`, used or not.
      arrays: Arrays of weights: one, or two for SwiGLU.
      width: Columns of each array in a tile.
      tiles: Tiles per group.
      steps: Steps per tile.
      is_transposed: Whether matrices are `[F, D]`.
    """

    groups: int
    arrays: int
    width: int
    tiles: int
    steps: int
    is_transposed: bool

    @property
    def stages(self) -> int:
        """Steps in shared memory."""
        return min(8, _STAGE_BYTES // (2 * _DEPTH * (GROUP_ROWS + self.arrays * self.width)))

    @property
    def programs(self) -> int:
        """Number of thread blocks."""
        return min(num_multiprocessors(), self.groups * self.tiles)

    @property
    def pieces(self) -> int:
        """Pieces of outputs per warpgroup in shared memory."""
        return 2 if self.width % (2 * _PIECE) == 0 else 1

    def matrix_part(self, inputs: Any, columns: Any) -> tuple[Any, Any]:
        """Returns sizes or slices of inputs and columns in the order of a matrix's axes."""
        return (columns, inputs) if self.is_transposed else (inputs, columns)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers of a thread block."""
        stages, columns = self.stages, self.matrix_part(_DEPTH, self.width)
        return {
            "inputs": ops.tiled((stages, GROUP_ROWS, _DEPTH), dtype),
            "columns": ops.tiled((self.arrays, stages, *columns), dtype),
            "results": ops.tiled((_WARPGROUPS, self.pieces, _ROWS, _PIECE), dtype),
            "filled": plgpu.Barrier(num_arrivals=1 + self.arrays, num_barriers=stages),
            "freed": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        }


def _multiply(
    rows: Any, matrix: Any, used: Any, *arrays: Any, tiling: _Tiling, **scratch: Any
) -> None:
    """Runs one thread block: a loader and two computing warpgroups."""
    *weights, out = arrays
    own = types.SimpleNamespace(**scratch)
    program, warpgroup = (jax.lax.axis_index(x) for x in ("program", "warpgroup"))
    num_tiles = jnp.minimum(used[0], tiling.groups) * tiling.tiles
    turns = jax.lax.div(num_tiles - program + tiling.programs - 1, tiling.programs)

    def place(turn: Any) -> tuple[Any, Any]:
        """Returns a tile's group and its first column."""
        tile = program + turn * tiling.programs
        return jax.lax.div(tile, tiling.tiles), jax.lax.rem(tile, tiling.tiles) * tiling.width

    share_registers = functools.partial(ops.share_registers, *_REGISTERS, num_computing=_WARPGROUPS)

    @pl.when(warpgroup == _WARPGROUPS)
    def _() -> None:
        share_registers(is_loader=True)

        def load(turn: Any, nothing: Any) -> Any:
            _load_tile(rows, weights, matrix, place(turn), turn, tiling, own)
            return nothing

        jax.lax.fori_loop(0, turns, load, ())
        for slot in range(tiling.stages):  # JAX 0.11's interpreter wants all arrivals awaited
            plgpu.barrier_wait(own.freed.at[slot])

    @pl.when(warpgroup < _WARPGROUPS)
    def _() -> None:
        share_registers(is_loader=False)
        for slot in range(tiling.stages):  # all of shared memory is free
            plgpu.barrier_arrive(own.freed.at[slot])

        def compute(turn: Any, nothing: Any) -> Any:
            _compute_tile(out, place(turn), turn, warpgroup, tiling, own)
            return nothing

        jax.lax.fori_loop(0, turns, compute, ())
        plgpu.wait_smem_to_gmem(0)


def _load_tile(
    rows: Any,
    weights: Sequence[Any],
    matrix: Any,
    place: tuple[Any, Any],
    turn: Any,
    tiling: _Tiling,
    own: types.SimpleNamespace,
) -> None:
    """Copies a tile's rows and weights, as far ahead as shared memory allows."""
    group, first = place
    index = matrix[group]

    def load(step: Any, nothing: Any) -> Any:
        slot = jax.lax.rem(turn * tiling.steps + step, tiling.stages)
        depth = pl.ds(step * _DEPTH, _DEPTH)
        plgpu.barrier_wait(own.freed.at[slot])
        plgpu.copy_gmem_to_smem(rows.at[group, :, depth], own.inputs.at[slot], own.filled.at[slot])
        for array, source in enumerate(weights):
            part = source.at[index, *tiling.matrix_part(depth, pl.ds(first, tiling.width))]
            plgpu.copy_gmem_to_smem(part, own.columns.at[array, slot], own.filled.at[slot])
        return nothing

    jax.lax.fori_loop(0, tiling.steps, load, ())


def _compute_tile(
    out: Any,
    place: tuple[Any, Any],
    turn: Any,
    warpgroup: Any,
    tiling: _Tiling,
    own: types.SimpleNamespace,
) -> None:
    """Multiplies a warpgroup's half of a tile's rows and writes the result."""
    half = pl.ds(warpgroup * _ROWS, _ROWS)

    def slot_of(step: Any) -> Any:
        return jax.lax.rem(turn * tiling.steps + step, tiling.stages)

    def multiply(*sums: ops.Accumulator) -> list[Array]:
        def start(step: Any) -> None:
            slot = slot_of(step)
            plgpu.barrier_wait(own.filled.at[slot])
            for array, total in enumerate(sums):
                right = own.columns.at[array, slot]
                if tiling.is_transposed:
                    right = right.transpose((1, 0))
                total.add_product(own.inputs.at[slot, half], right)

        def advance(step: Any, nothing: Any) -> Any:
            start(step + 1)
            sums[0].wait(in_flight=len(sums))  # the products of the step before are done
            plgpu.barrier_arrive(own.freed.at[slot_of(step)])
            return nothing

        start(0)
        sums[0].loop(tiling.steps - 1, advance, (), others=sums[1:])
        found = [total.load() for total in sums]
        plgpu.barrier_arrive(own.freed.at[slot_of(tiling.steps - 1)])
        return found

    found = ops.with_accumulator(multiply, *[(_ROWS, tiling.width)] * tiling.arrays)
    group, first = place
    for index in range(tiling.width // _PIECE):
        begin = index * _PIECE
        sums = [jax.lax.slice(x, (0, begin), (_ROWS, begin + _PIECE)) for x in found]
        target = own.results.at[warpgroup, index % tiling.pieces]
        plgpu.wait_smem_to_gmem(tiling.pieces - 1, wait_read_only=True)  # the piece's last copy
        ops.write(target, _finish(*sums).astype(own.results.dtype), optimized=True)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, out.at[group, half, pl.ds(first + begin, _PIECE)])


def _finish(sums: Array, up: Array | None = None) -> Array:
    """Returns the sums, or SwiGLU of the gate's and the up sums.

    The square of `rsqrt` takes one approximate instruction, a division many. Its error is some
    2^-21, far below that of the rounding.
    """
    if up is None:
        return sums
    root = jax.lax.rsqrt(1.0 + jnp.exp(-sums))
    return sums * root * root * up


def grouped_matmul_kernel(
    rows: Float[Array, "G R D"],
    weights: Sequence[Float[Array, "M _ _"]],
    matrix: Int[Array, "G"],
    used: Int[Array, ""],
    *,
    is_transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "G R F"]:
    """Computes `out` of the module.

    Args:
      rows: Rows in bfloat16 or float16; `R` is 128.
      weights: `W`, or `W` and `W'`, in the type of the rows; `D` and `F` are multiples of 64.
      matrix: Index of each group's matrix.
      used: Number of groups to compute; the others' output is undefined.
      is_transposed: Whether matrices are `[F, D]`.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      An array in the type of the rows.

    Raises:
      ValueError: If the kernel does not support these arguments.

    Example:
      >>> rows, weights = jnp.ones((2, 128, 64), jnp.bfloat16), jnp.ones((3, 64, 64), jnp.bfloat16)
      >>> matrix, used = jnp.array([0, 2], jnp.int32), jnp.array(2, jnp.int32)
      >>> out = grouped_matmul_kernel(rows, [weights], matrix, used, interpret=True)
      >>> out.shape, float(out[1, 127, 63])
      ((2, 128, 64), 64.0)
    """
    if reason := why_not_grouped_shape(rows, *weights, is_transposed=is_transposed):
        raise ValueError(reason)
    groups, _, num_inputs = rows.shape
    num_columns = weights[0].shape[1 if is_transposed else 2]
    most = _COLUMNS // len(weights)
    width = next(x for x in range(most, 0, -GROUP_COLUMNS) if num_columns % x == 0)
    tiling = _Tiling(
        groups=groups,
        arrays=len(weights),
        width=width,
        tiles=num_columns // width,
        steps=num_inputs // _DEPTH,
        is_transposed=is_transposed,
    )
    kernel = ops.kernel(
        functools.partial(_multiply, tiling=tiling),
        out_type=jax.ShapeDtypeStruct((groups, GROUP_ROWS, num_columns), rows.dtype),
        scratch_types=tiling.scratch(rows.dtype),
        grid=(tiling.programs,),
        grid_names=("program",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        # Barriers are explicit; automatic ones would add a barrier to every copy.
        compiler_params=ops.compiler_params(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=128
        ),
        interpret=interpret,
        kernel_name="grouped_matmul" if len(weights) == 1 else "grouped_swiglu",
    )
    out: Array = kernel(rows, matrix.astype(jnp.int32), used.astype(jnp.int32).reshape(1), *weights)
    return out
