"""Decode matmul with 8-bit weights on Hopper: a few rows times one layer of a stack.

    out_i[b, f] = Σ_d x[b, d] · W_i[layer, d, f]
    W_i[layer, d, f] = q_i[layer, f, d] · s_i[layer, f]

for one or several arrays of weights that share their input, such as the query, key and value
weights. Or several groups of rows, each times its own matrix of the stack, such as the experts of
tokens:

    out_i[g, r, f] = Σ_d x[g, r, d] · W_i[matrix[g], d, f]     for g < used

The weights `q` (float8_e4m3fn or int8) lie with the inputs last, and have a scale `s` for
each output. The kernel reads them once and in place: XLA would copy a layer out of the stack before
it multiplies, which takes three passes over it instead of one. If the input goes through a norm,

    out_i[b, f] = Σ_d x[b, d] · g[layer, d] · W_i[layer, d, f] / sqrt(mean_d x[b, d]² + eps)

the thread blocks multiply by `g` after copying the rows, and some add up the squares.
`decode_matmul_kernel` multiplies 16-bit weights.

The kernel never rounds rows to eight bits. It splits up to eight rows into sums of 8-bit numbers
(`operand_split`), so that the tensor cores read the weights without a conversion. Splitting more
rows would take longer than reading the weights. The kernel then dequantizes the weights to bfloat16
in registers (`dequantize`), which rounds nothing. A scale multiplies the sum of a column in
float32. A weight or a scale that is not finite spoils its column, and an input its row; an int8
weight is always finite.

With so few rows, reading the weights takes all of the time. A thread block has 64 columns of one
array and a part of the inputs. It copies tiles of 64 x 128 or 64 x 256 weights, several of them
ahead, and multiplies with the tensor cores. The weights are the left operand, so that eight columns
of the right operand are enough for the rows. XLA adds up the parts, always in the same order, and
then multiplies by the scales and divides by the root.

With split rows, launching thread blocks in several waves would take a large part of the time, so
there are only as many thread blocks as the GPU runs at once. The tiles of all columns form one
sequence, of which each thread block has an equal share. Its copies continue across the boundary
from one group of columns to the next. So the number of thread blocks per group of columns varies.

With groups of rows, the sequence has the tiles of all groups in use. Thread blocks share units of
a few tiles along the inputs, and each unit is a part. So a result depends on its row and its matrix
alone, not on the place of its group in the sequence.
"""

import dataclasses
import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from sketchwalk_jax.pallas_kernels.config import num_multiprocessors, shared_memory
from sketchwalk_jax.pallas_kernels.decode_matmul import dequantize, operand_split
from sketchwalk_jax.pallas_kernels.decode_matmul.groups import (
    Groups,
    check_groups,
    num_groups,
    operands,
    why_not_groups,
)
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops

_TILE = 64  # columns per tile of weights
# Inputs per line. With one row a tile has two lines if two such tiles fit in shared memory:
# waiting, copying and splitting rows then cost less per weight.
_LINE = operand_split.LINE
_LEAST_ROWS = 8  # smallest number of rows of a tensor core product
_SHARED_BYTES = 74 * 1024  # per thread block, so that an SM runs three
# The same if the registers of many rows allow only two thread blocks per SM.
_SHARED_BYTES_OF_TWO, _FEW_ROWS = 110 * 1024, 32
_REDUCTION_BYTES = 2048  # part of these bytes, for adding up squares
_MOST_STAGES = 8
_MOST_COPIED = 256  # entries along an axis of one copy
_LEAST_INPUTS = 1024  # per part with dequantized weights
_PROGRAMS = 1024  # approximate number of thread blocks: several per SM, and few parts to add up
# For split rows, by whether there is one row: thread blocks per SM, and most lines per tile. These
# were the fastest measured.
_SHARES = {True: (3, 2), False: (5, 1)}
_LEAST_SHARE = 2  # tiles per thread block
_RESERVED_BYTES = 2 * 1024  # of shared memory per thread block
# The layout in which a warpgroup reads and writes 64 inputs or columns row by row.
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED

MOST_ROWS = 64
"""Most rows of the kernel; with more, products are no longer bound by memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The static sizes of a call.

    Attributes:
      dtype: Type of the weights.
      depth: Inputs per tile.
      has_groups: Whether rows come in groups, each with its own matrix.
      groups: Number of groups; 1 if all rows have one layer.
      sharing: Groups in a row that have the same rows.
      rows: Rows of a group, rounded up to a multiple of eight.
      num_rows: `rows`, or the number of rows if that is less than eight.
      starts: Index of each weight array's first 64 columns, in units of 64, then their number.
      steps: Tiles along the inputs.
      own_steps: Tiles along the inputs per thread block with dequantized weights, at most.
      unit: Tiles along the inputs that one thread block adds up with groups of rows; otherwise 1.
      programs: Thread blocks that share all tiles with split rows.
      stages: Tiles in shared memory.
      has_norm: Whether the input goes through a norm.
    """

    dtype: Any
    depth: int
    has_groups: bool
    groups: int
    sharing: int
    rows: int
    num_rows: int
    starts: tuple[int, ...]
    steps: int
    own_steps: int
    unit: int
    programs: int
    stages: int
    has_norm: bool

    @property
    def has_digits(self) -> bool:
        """Whether rows are split into sums of 8-bit numbers."""
        return self.num_rows <= operand_split.MOST_ROWS

    @property
    def columns(self) -> int:
        """Columns of the tensor cores' right operand."""
        return (
            operand_split.num_columns(self.num_rows, self.dtype) if self.has_digits else self.rows
        )

    @property
    def piece(self) -> int:
        """Inputs per copy of rows."""
        return min(self.depth, _MOST_COPIED)

    @property
    def parts(self) -> int:
        """Most parts of the sums of 64 columns."""
        if self.has_groups:
            return self.steps // self.unit
        if self.has_digits:
            return max(self.counts)
        return -(-self.steps // self.own_steps)

    def begin_of(self, program: Any, used: Any) -> Any:
        """Returns the first tile of a thread block's share of the sequence of all tiles.

        Args:
          program: The thread block.
          used: Number of groups in use.
        """
        units = used * (self.starts[-1] * (self.steps // self.unit))
        return _divide(program * units, self.programs) * self.unit

    def program_of(self, place: Any) -> Any:
        """Returns the thread block whose share contains a tile of that sequence."""
        return _divide((place + 1) * self.programs - 1, self.starts[-1] * self.steps)

    @property
    def counts(self) -> list[int]:
        """Returns how many thread blocks share each group of 64 columns, with split rows."""
        ends = [(tile * self.steps, (tile + 1) * self.steps - 1) for tile in range(self.starts[-1])]
        return [self.program_of(last) - self.program_of(first) + 1 for first, last in ends]

    @property
    def slots(self) -> int:
        """Buffers of rows for the tensor cores. Split rows need two: one is written meanwhile."""
        return 2 if self.has_digits else self.stages

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory of all stages, and one barrier per stage."""
        stages = self.stages
        copies = 1 + (1 + self.has_norm) * (self.depth // self.piece)
        own: dict[str, Any] = {
            "inputs": ops.tiled(
                (self.slots, self.columns, self.depth),
                self.dtype if self.has_digits else jnp.bfloat16,
            ),
            "weights": ops.tiled((stages, _TILE, self.depth), self.dtype),
            "sums": plgpu.SMEM((self.columns, _TILE), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        }
        if self.has_digits:
            shape = (self.slots, self.depth // _LINE, self.columns)
            own["powers"] = plgpu.SMEM(shape, jnp.float32)
            own["sums_of_rows"] = plgpu.SMEM((self.num_rows, _TILE), jnp.float32)
            own["arrived"] = plgpu.SMEM((stages, self.num_rows, self.depth), jnp.bfloat16)
        if self.has_digits and self.has_norm:
            count = operand_split.num_squares(self.num_rows, self.depth)
            own["squares_of_lines"] = plgpu.SMEM((count // row_ops.LANES,), jnp.float32)
        if self.has_norm:
            own["scales"] = plgpu.SMEM((stages, self.depth), jnp.bfloat16)
        return own


def _divide(number: Any, by: int) -> Any:
    """Divides integers and rounds down; `number` is not negative."""
    return number // by if isinstance(number, int) else jax.lax.div(number, by)


def _multiply(x: Any, matrix: Any, *arrays: Any, tiling: Tiling, **scratch: Any) -> None:
    """Runs one thread block: some columns, some of the inputs."""
    program: type[_DigitsProgram | _WidenedProgram]
    program = _DigitsProgram if tiling.has_digits else _WidenedProgram
    program(tiling, x, matrix, arrays, scratch).run()


class _Program:
    """Copies and writes of one thread block; subclasses multiply."""

    def __init__(
        self, tiling: Tiling, x: Any, matrix: Any, arrays: Sequence[Any], scratch: dict[str, Any]
    ) -> None:
        """Computes the thread block's share of the tiles.

        Args:
          tiling: The static sizes.
          x: Rows.
          matrix: Matrices of the groups.
          arrays: The number of groups in use if there are groups, the norm's scale if there is one,
            weights, results, and with a norm the squares.
          scratch: Shared memory, described by `Tiling.scratch`.
        """
        self._tiling, self._x, self._matrix = tiling, x, matrix
        self._own = types.SimpleNamespace(**scratch)
        every: tuple[Any, ...] = tuple(arrays) if tiling.has_norm else (None, *arrays, None)
        self._scale, *others, self._squares = every
        self._used = others.pop(0)[0] if tiling.has_groups else 1
        count = len(tiling.starts) - 1
        self._sources, self._targets = others[:count], others[count:]
        # The target of copies of rows.
        self._rows = self._own.arrived if tiling.has_digits else self._own.inputs
        self._begin, self._count = self._share()
        self._layer = matrix[0]
        for step in range(tiling.stages - 1):
            self._load(jnp.int32(step))

    def _share(self) -> tuple[Any, Any]:
        """Returns the thread block's first tile and its number of tiles."""
        raise NotImplementedError

    def _place_of(self, step: Any) -> tuple[Any, Any]:
        """Returns the columns of a step, counted by 64 over all groups, and the tile in them."""
        raise NotImplementedError

    def _group_of(self, tile: Any) -> tuple[Any, Any]:
        """Returns the group of rows that columns belong to, and the columns within the group."""
        if not self._tiling.has_groups:
            return 0, tile
        count = self._tiling.starts[-1]
        return jax.lax.div(tile, count), jax.lax.rem(tile, count)

    def _rows_of(self, group: Any) -> Any:
        """Returns the rows of a group."""
        return pl.ds(group * self._tiling.num_rows, self._tiling.num_rows)

    def _of_array(self, tile: Any, body: Any) -> None:
        """Runs `body(index, columns)` for the array that a tile's columns belong to."""
        starts = self._tiling.starts
        for index, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):

            @pl.when((tile >= start) & (tile < end))
            def _(index: int = index, start: int = start) -> None:
                body(index, pl.ds((tile - start) * _TILE, _TILE))

    def _load(self, step: Any) -> None:
        """Starts the copies for a step of the thread block, if the step exists."""
        tiling, own = self._tiling, self._own

        @pl.when(step < self._count)
        def _() -> None:
            slot = jax.lax.rem(step, tiling.stages)
            tile, place = self._place_of(step)
            start = place * tiling.depth
            inputs = pl.ds(start, tiling.depth)
            target = self._rows.at[slot]
            group, tile = self._group_of(tile)
            matrix = self._matrix[group] if tiling.has_groups else self._layer
            shared = jax.lax.div(group, tiling.sharing) if tiling.has_groups else 0
            rows = self._x.at[self._rows_of(shared)]
            for piece in range(0, tiling.depth, tiling.piece):
                source, where = pl.ds(start + piece, tiling.piece), pl.ds(piece, tiling.piece)
                whole = tiling.piece == tiling.depth
                part = target if whole else target.at[:, where]
                plgpu.copy_gmem_to_smem(rows.at[:, source], part, own.filled.at[slot])
                if tiling.has_norm:
                    part = own.scales.at[slot] if whole else own.scales.at[slot, where]
                    scale = self._scale.at[self._layer, source]
                    plgpu.copy_gmem_to_smem(scale, part, own.filled.at[slot])

            def copy(index: int, columns: Any) -> None:
                source = self._sources[index].at[matrix, columns, inputs]
                plgpu.copy_gmem_to_smem(source, own.weights.at[slot], own.filled.at[slot])

            self._of_array(tile, copy)

    def _put(self, sums: Any, tile: Any, part: Any) -> None:
        """Starts to write the sums of some columns to their part of the result."""
        group, tile = self._group_of(tile)

        def copy(index: int, columns: Any) -> None:
            target = self._targets[index].at[part, self._rows_of(group), columns]
            plgpu.copy_smem_to_gmem(sums, target)

        self._of_array(tile, copy)


class _DigitsProgram(_Program):
    """Multiplies rows split into 8-bit numbers; tensor cores read the weights unconverted."""

    def _share(self) -> tuple[Any, Any]:
        self._program = jax.lax.axis_index("program")
        begin, end = (self._tiling.begin_of(self._program + one, self._used) for one in (0, 1))
        return begin, end - begin

    def _place_of(self, step: Any) -> tuple[Any, Any]:
        place = self._begin + step
        return jax.lax.div(place, self._tiling.steps), jax.lax.rem(place, self._tiling.steps)

    def run(self) -> None:
        """Multiplies all tiles of the thread block."""
        tiling, shape = self._tiling, (_TILE, self._tiling.columns)
        none = None
        if tiling.has_norm:
            count = operand_split.num_squares(tiling.num_rows, tiling.depth)
            none = ops.full((count,), 0.0, operand_split.squares_layout(count))
        jax.lax.fori_loop(0, self._count, self._step, (ops.full(shape, 0.0), none))
        plgpu.wait_smem_to_gmem(0)

    def _step(self, index: Any, carry: Any) -> Any:
        """Adds one tile to the sums of its columns and the squares of rows."""
        (total, found), tiling, own = carry, self._tiling, self._own
        slot, written = jax.lax.rem(index, tiling.stages), jax.lax.rem(index, tiling.slots)
        plgpu.barrier_wait(own.filled.at[slot])
        norm = (own.scales.at[slot], found) if tiling.has_norm else ()
        operands = own.inputs.at[written], own.powers.at[written], own.arrived.at[slot], *norm
        found = operand_split.write(*operands)
        plgpu.commit_smem()  # all warps have multiplied the slot that is filled next
        self._load(index + tiling.stages - 1)
        for line in range(tiling.depth // _LINE):
            part = pl.ds(line * _LINE, _LINE)
            rows = own.inputs.at[written, :, part], own.powers.at[written, line]
            left = own.weights.at[slot, :, part]
            total = operand_split.add_line(total, left, *rows)
        tile, place = self._place_of(index)
        if tiling.has_groups:
            is_last = jax.lax.rem(place, tiling.unit) == tiling.unit - 1
        else:
            is_last = (place == tiling.steps - 1) | (index == self._count - 1)
        # A thread block that shares the first columns starts with them: `found` is complete.
        pl.when(is_last)(functools.partial(self._finish, total, found, tile, place))
        return jnp.where(is_last, ops.full(total.shape, 0.0), total), found

    def _finish(self, products: Any, found: Any, tile: Any, place: Any) -> None:
        """Writes a part of the sums of some columns."""
        tiling, own = self._tiling, self._own
        if tiling.has_groups:
            part = jax.lax.div(place, tiling.unit)
        else:
            part = self._program - tiling.program_of(tile * tiling.steps)
        plgpu.wait_smem_to_gmem(0)  # the previous columns' sums
        ops.write(own.sums.transpose((1, 0)), plgpu.layout_cast(products, _TURNED))
        plgpu.commit_smem()
        operand_split.add_digits(own.sums, own.sums_of_rows, own.inputs.dtype)
        plgpu.commit_smem()
        self._put(own.sums_of_rows, tile, part)
        if tiling.has_norm:

            @pl.when(tile == 0)
            def _() -> None:
                operand_split.sum_squares(found, own.squares_of_lines)
                plgpu.commit_smem()
                lines = tiling.depth // _LINE
                for row in range(tiling.num_rows):
                    of_row = [own.squares_of_lines[row * lines + line] for line in range(lines)]
                    ops.write(self._squares.at[part, row], functools.reduce(operator.add, of_row))


class _WidenedProgram(_Program):
    """Dequantizes weights to the type of the rows."""

    def _share(self) -> tuple[Any, Any]:
        self._tile, self._part = jax.lax.axis_index("tile"), jax.lax.axis_index("part")
        begin = self._part * self._tiling.own_steps
        return begin, jnp.minimum(self._tiling.own_steps, self._tiling.steps - begin)

    def _place_of(self, step: Any) -> tuple[Any, Any]:
        return self._tile, self._begin + step

    def run(self) -> None:
        """Multiplies all tiles of the thread block."""
        tiling, own = self._tiling, self._own
        shape = (_TILE, tiling.columns)
        products, found = ops.with_accumulator(self._add_up, shape)
        # Transposed, so that a row's sums are adjacent and only existing rows are written.
        ops.write(own.sums.transpose((1, 0)), plgpu.layout_cast(products, _TURNED))
        plgpu.commit_smem()
        if tiling.has_norm:

            @pl.when(self._tile == 0)
            def _() -> None:
                ops.write(self._squares.at[self._part], jnp.sum(found, axis=0))

        self._put(own.sums.at[pl.ds(0, tiling.num_rows)], self._tile, self._part)
        plgpu.wait_smem_to_gmem(0)

    def _add_up(self, total: ops.Accumulator) -> Any:
        """Returns the sums of the columns, and with a norm the rows' squares."""
        tiling, own = self._tiling, self._own

        def step(index: Any, found: Any) -> Any:
            slot = jax.lax.rem(index, tiling.stages)
            plgpu.barrier_wait(own.filled.at[slot])
            if tiling.has_norm:
                found = self._multiply_by_scale(slot, found)
            # All warps have multiplied the slot that is filled next.
            total.wait(in_flight=0)
            if tiling.has_norm:
                plgpu.commit_smem()
            else:
                row_ops.barrier()
            self._load(index + tiling.stages - 1)
            left = dequantize.to_bfloat16(own.weights.at[slot])
            total.add_product(left, own.inputs.at[slot].transpose((1, 0)))
            return found

        none: Any = ()
        if tiling.has_norm:
            none = ops.full((tiling.depth, tiling.rows), 0.0, _TURNED)
        found = total.loop(self._count, step, none)
        return total.load(), found

    def _multiply_by_scale(self, slot: Any, found: Any) -> Any:
        """Multiplies the inputs of a slot by the norm's scale; adds their squares to `found`."""
        inputs = self._own.inputs.at[slot].transpose((1, 0))
        rows = plgpu.load(inputs, layout=_TURNED, optimized=True)
        wide = rows.astype(jnp.float32)
        found = found + wide * wide
        factor = ops.read(self._own.scales.at[slot], _TURNED.reduce(1)).astype(jnp.float32)
        factor = jax.lax.broadcast_in_dim(factor, wide.shape, (0,))
        rows = (wide * plgpu.layout_cast(factor, _TURNED)).astype(jnp.bfloat16)
        ops.write(inputs, rows, optimized=True)
        return found


def tile(x: Any, kernels: Sequence[Any], groups: int, *, has_norm: bool) -> Tiling:
    """Returns the tiling for rows, weights (arrays or abstract shapes), and a number of groups."""
    *_, num_rows, num_inputs = x.shape
    rows = -(-num_rows // _LEAST_ROWS) * _LEAST_ROWS
    starts = [0]
    for one in kernels:
        starts.append(starts[-1] + one.shape[1] // _TILE)
    parts = max(1, min(num_inputs // _LEAST_INPUTS, _PROGRAMS // starts[-1]))
    resident, most = _SHARES[num_rows == 1]
    lines = [one for one in (2, 1) if one <= most and num_inputs % (one * _LINE) == 0]
    for count in lines if num_rows <= operand_split.MOST_ROWS else [1]:
        depth = count * _LINE
        steps = num_inputs // depth
        tiles = groups * starts[-1] * steps
        tiling = Tiling(
            dtype=kernels[0].dtype,
            depth=depth,
            has_groups=x.ndim == 3,
            groups=groups,
            sharing=groups // x.shape[0] if x.ndim == 3 else 1,
            rows=rows,
            num_rows=num_rows if num_rows < _LEAST_ROWS else rows,
            starts=tuple(starts),
            steps=steps,
            own_steps=-(-steps // parts),
            unit=1,
            programs=max(1, min(num_multiprocessors() * resident, tiles // _LEAST_SHARE)),
            stages=1,
            has_norm=has_norm,
        )
        shared_bytes = _SHARED_BYTES
        if tiling.has_digits:
            shared_bytes = shared_memory() // resident - _RESERVED_BYTES
        elif rows > _FEW_ROWS:
            shared_bytes = _SHARED_BYTES_OF_TWO
        tiling = dataclasses.replace(
            tiling, stages=_stages(tiling, shared_bytes), unit=_unit(tiling)
        )
        if tiling.stages > 1:
            break
    return tiling


def _unit(tiling: Tiling) -> int:
    """Returns the tiles per unit with which groups of rows take the least time."""
    if not tiling.has_groups:
        return 1
    columns = tiling.groups * tiling.starts[-1]
    # Writing and reading 64 float32 sums of each row, relative to reading a tile of weights.
    sums = 8 * tiling.num_rows / tiling.depth

    def cost(unit: int) -> float:
        """Returns the tiles of the busiest thread block, plus its sums."""
        units = columns * (tiling.steps // unit)
        return -(-units // tiling.programs) * unit + sums * units / tiling.programs

    return min((one for one in range(1, tiling.steps + 1) if tiling.steps % one == 0), key=cost)


def _stages(tiling: Tiling, shared_bytes: int) -> int:
    """Returns the number of tiles that fit into `shared_bytes` of shared memory."""
    depth = tiling.depth
    # The weights, the scale of the norm, and the rows.
    stage_bytes = (_TILE + 2 + 2 * tiling.num_rows) * depth
    other_bytes = 4 * _TILE * tiling.columns + (_REDUCTION_BYTES if tiling.has_norm else 0)
    if tiling.has_digits:
        other_bytes += tiling.slots * tiling.columns * (depth + 4 * depth // _LINE)
        other_bytes += 4 * _TILE * tiling.num_rows
    return min(_MOST_STAGES, (shared_bytes - other_bytes) // stage_bytes)


def why_not_hopper_decode_matmul(
    x: Any,
    kernels: Sequence[Any],
    scale: Any = None,
    *,
    is_transposed: bool = True,
    weight_scales: Sequence[Any] | None = None,
) -> str | None:
    """Returns why the kernel does not support these rows and weights, or `None` if it does.

    Args:
      x: Rows `[B, D]` or groups of rows `[G, R, D]`, an array or its abstract shape.
      kernels: Weights `[L, F, D]`, likewise.
      scale: Scale of a norm `[L, D]`, likewise.
      is_transposed: Whether weights are `[L, F, D]`; the kernel needs `True`.
      weight_scales: Scales of the weights, `[L, F]` for each array, likewise.
    """
    own = {str(one.dtype) for one in kernels}
    if x.dtype != jnp.bfloat16 or len(own) != 1 or not own <= set(dequantize.TYPES):
        names = " or ".join(dequantize.TYPES)
        return f"it takes bfloat16 times {names}, not {x.dtype} times {', '.join(sorted(own))}"
    if weight_scales is None:
        return f"weights of eight bits need weight_scales, got {kernels[0].dtype}"
    if not is_transposed:
        return "weights of eight bits must be [L, F, D], is_transposed=True"
    shapes = [tuple(one.shape) for one in weight_scales]
    wanted = [tuple(one.shape[:2]) for one in kernels]
    if shapes != wanted:
        return f"weight_scales must be {wanted}, not {shapes}"
    if scale is not None and scale.dtype != x.dtype:
        return f"it takes a scale in bfloat16, not {scale.dtype}"
    widths, inputs = [one.shape[1] for one in kernels], x.shape[-1]
    if inputs % _LINE or any(width % _TILE for width in widths):
        both = f"{_LINE} inputs and {_TILE} columns"
        return f"it takes multiples of {both}, not {inputs} and {widths}"
    # Rows of groups are always split.
    return why_not_groups(x, scale, most_rows=operand_split.MOST_ROWS if x.ndim == 3 else MOST_ROWS)


def hopper_decode_matmul_kernel(
    x: Float[Array, "*N R D"],
    kernels: Sequence[Num[Array, "L _ D"]],
    layer: Int[Array, ""] | Groups,
    *,
    scale: Float[Array, "L D"] | None = None,
    eps: float = 0.0,
    is_transposed: bool = True,
    weight_scales: Sequence[Float[Array, "L _"]] | None = None,
    interpret: bool = False,
) -> list[Float[Array, "*G R _"]]:
    """Computes `out_i` of the module.

    Args:
      x: Rows `[B, D]` in bfloat16, at most `MOST_ROWS`, or groups of rows `[G, R, D]`, at most
        eight in each.
      kernels: Weights of all layers, all in float8_e4m3fn or all in int8; `D` is a multiple of 128
        and each `F` a multiple of 64.
      layer: The layer; for groups of rows, the matrix of each. Several groups may share rows.
      scale: `g` of all layers, in bfloat16; `None` for no norm. Groups must have none.
      eps: Constant that the norm adds to the mean of squares.
      is_transposed: Must be `True`: the weights are `[L, F, D]`.
      weight_scales: `s_i` of all layers, float32 `[L, F]`, one for each array of weights.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      A float32 array for each array of weights.

    Raises:
      ValueError: If the kernel does not support these arguments.
    """
    reason = why_not_hopper_decode_matmul(
        x, kernels, scale, is_transposed=is_transposed, weight_scales=weight_scales
    )
    if reason is not None or weight_scales is None:
        raise ValueError(f"x and kernels must fit the kernel: {reason}")
    check_groups(x, layer)
    tiling = tile(x, kernels, num_groups(layer), has_norm=scale is not None)
    flat = x.reshape(-1, x.shape[-1])
    num_rows, num_inputs = flat.shape
    rows = tiling.rows
    shapes: list[tuple[int, ...]] = [
        (tiling.parts, tiling.groups * tiling.num_rows, one.shape[1]) for one in kernels
    ]
    if scale is not None:
        shapes.append((tiling.parts, rows))
    kernel = ops.kernel(
        functools.partial(_multiply, tiling=tiling),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=tiling.scratch,
        grid=(tiling.programs,) if tiling.has_digits else (tiling.starts[-1], tiling.parts),
        grid_names=("program",) if tiling.has_digits else ("tile", "part"),
        # Barriers are explicit; automatic ones would add a barrier to every copy.
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="linear",
    )
    if not tiling.has_digits:
        flat = jnp.pad(flat, ((0, rows - num_rows), (0, 0)))
    norm = [] if scale is None else [scale]
    *found, last = kernel(flat, *operands(layer), *norm, *kernels)
    arrays, inverse = [*found, last], None
    counts = tiling.counts if tiling.has_digits and not tiling.has_groups else None
    if scale is not None:
        arrays = found
        squares = _add_parts(last, counts and counts[:1] * rows)[:num_rows]
        inverse = jax.lax.rsqrt(squares / num_inputs + eps)
    own_scales = layer.matrix if isinstance(layer, Groups) else layer
    shape = *([tiling.groups] if x.ndim == 3 else []), x.shape[-2]
    results = []
    for index, one in enumerate(arrays):
        own = slice(*tiling.starts[index : index + 2])
        total = _add_parts(one, counts and np.repeat(counts[own], _TILE))
        total = total if x.ndim == 3 else total[:num_rows]
        total = total.reshape(*shape, -1) * weight_scales[index][own_scales][..., None, :]
        results.append(total if inverse is None else total * inverse[:, None])
    return results


def _add_parts(parts: Array, counts: Any) -> Array:
    """Sums the parts along the first axis, only the first `counts` of each entry of the last."""
    if counts is not None:
        index = jax.lax.broadcasted_iota(jnp.int32, parts.shape, 0)
        own = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), parts.shape)
        parts = jnp.where(index < own, parts, 0.0)
    return jnp.sum(parts, axis=0)
