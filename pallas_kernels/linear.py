"""A few rows times one layer of stacked weights, on Hopper GPUs: what decoding a token is made of.

    out_i[b, f] = Σ_d x[b, d] · W_i[layer, d, f]

for one or several arrays of weights that share their input, such as those of queries, keys and
values. The weights are read once, where they lie: XLA would copy a layer out of the stack before it
multiplies, which takes three passes over it instead of one. Where the input goes through a norm,

    out_i[b, f] = Σ_d x[b, d] · g[layer, d] · W_i[layer, d, f] / sqrt(mean_d x[b, d]² + eps)

the programs multiply by `g` on the way, and some add up the squares.

Weights of eight bits (float8_e4m3fn or int8) have a scale for each output besides,

    W_i[layer, d, f] = q_i[layer, f, d] · s_i[layer, f]

and lie with the inputs last. They are half the bytes. Rows are never rounded to eight bits: up to
eight of them are multiplied as sums of digits of eight bits (`digits`), so that the tensor cores
read the weights as they lie. With more, digits would take longer than the weights, which are then
widened to bfloat16 in registers (`widen`); that rounds nothing. A scale multiplies the sum of a
column in float32. A weight or a scale that is not finite spoils its column, and an input its row;
an int8 weight is always finite.

Weights of four bits (uint8, two in a byte) have a scale for each group of 32 inputs,

    W_i[layer, d, f] = (code_i[layer, f, d] - 8) · s_i[layer, d / 32, f]

and lie as `sketchwalk_jax.models.four_bits` says. Up to eight rows are multiplied with the codes as
whole numbers of eight bits, group by group, and the sums by the scales. bfloat16 has these weights
exactly, and so more rows are multiplied with weights that are widened with their scales.

With so few rows the time is that of reading the weights. A program has 64 columns of one array and
a part of the inputs; it reads them 64 x 64 at a time (narrow ones 64 x 128 to 64 x 512), several
such tiles on their way, and multiplies with the tensor cores, the weights for the left operand, so
that as few as eight columns of the right one are enough for the rows. The parts are added up,
divided by the root and multiplied by the scales by whoever reads the result, in their order: the
same sum every time.

Where rows are digits, weights take so little time that starting programs one after another would
be a large part of it. There are then as many programs as the chip holds at once. All tiles of all
columns stand in one row, each program has an equal share of that row, and its copies run on where
its columns end and others begin. How many programs share some columns depends on where they stand.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from sketchwalk_jax.pallas_kernels import digits, ops, warp_ops, widen
from sketchwalk_jax.pallas_kernels.config import (
    WEIGHT_GROUP,
    num_multiprocessors,
    shared_memory,
)

_TILE = 64  # columns of a tile of weights, and its inputs in bfloat16
# Inputs of a tile of narrow weights. With few rows it has several such lines, as long as shared
# memory has room for two tiles: what stands around a product then serves several times the weights.
_LINE = digits.LINE
_LEAST_ROWS = 8  # that tensor cores take
_SHARED_BYTES = 74 * 1024  # of a program, so that a processor has three of them
# The same where weights are narrow and many rows leave registers for two programs.
_SHARED_BYTES_OF_TWO, _FEW_ROWS = 110 * 1024, 32
_REDUCTION_BYTES = 2048  # of these, where squares are added up
_MOST_STAGES = 8
_MOST_COPIED = 256  # entries along an axis of one copy
_STEPS = 16  # tiles of a program, at least, where there are as many
_PROGRAMS = 1024  # in all, about: several for each place on the chip, and few sums to add up
# Where rows are digits, by the bits of the weights and whether there is one row: programs that a
# processor has at once, and lines of a tile at most. These are the fastest of those measured.
_SHARES = {(8, True): (3, 2), (8, False): (5, 1), (4, True): (4, 4), (4, False): (4, 4)}
_LEAST_SHARE = 2  # tiles of a program
_RESERVED_BYTES = 2 * 1024  # of shared memory, for each program
# How a warpgroup holds 64 inputs or columns of all rows, to read and write them row by row.
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED

MOST_ROWS = 64
"""Rows that the kernel takes; with more, products are no longer bound by memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """What is static about a call.

    Attributes:
      dtype: Of the weights.
      depth: Inputs of a tile.
      rows: Rows, a multiple of eight.
      num_rows: Rows that there are: as many, or fewer than eight.
      starts: The first tile of each array of weights, and of none behind the last.
      steps: Tiles of inputs that there are.
      own_steps: Tiles of inputs of a program; the last part may have fewer. Not of digits.
      programs: Programs that share all tiles. Of digits alone.
      stages: Tiles in shared memory.
      has_norm: Whether the input goes through a norm.
      is_transposed: Whether weights are `[L, F, D]`.
      interpret: Whether the interpreter runs the kernel.
    """

    dtype: Any
    depth: int
    rows: int
    num_rows: int
    starts: tuple[int, ...]
    steps: int
    own_steps: int
    programs: int
    stages: int
    has_norm: bool
    is_transposed: bool
    interpret: bool

    @property
    def is_narrow(self) -> bool:
        """Whether weights have eight or four bits."""
        return self.dtype != jnp.bfloat16

    @property
    def is_packed(self) -> bool:
        """Whether weights have four bits."""
        return self.dtype == jnp.uint8

    @property
    def has_digits(self) -> bool:
        """Whether rows are multiplied as sums of digits of eight bits."""
        return self.is_narrow and self.num_rows <= digits.MOST_ROWS

    @property
    def weight_bytes(self) -> int:
        """Bytes of a tile of weights, and of its scales where groups have them."""
        if self.is_packed:
            return _TILE * (self.depth // 2 + 2 * (self.depth // WEIGHT_GROUP))
        return _TILE * self.depth * self.dtype.itemsize

    @property
    def columns(self) -> int:
        """Columns that the tensor cores multiply."""
        return digits.num_columns(self.num_rows, self.dtype) if self.has_digits else self.rows

    @property
    def piece(self) -> int:
        """Inputs of rows that are copied at a time."""
        return min(self.depth, _MOST_COPIED)

    @property
    def parts(self) -> int:
        """Programs that share the inputs of some columns, at most."""
        if self.has_digits:
            return max(self.counts)
        return -(-self.steps // self.own_steps)

    def begin_of(self, program: Any) -> Any:
        """The first tile of a program's share, in the row of all."""
        return _divide(program * (self.starts[-1] * self.steps), self.programs)

    def program_of(self, place: Any) -> Any:
        """The program whose share has a tile of that row."""
        return _divide((place + 1) * self.programs - 1, self.starts[-1] * self.steps)

    @property
    def counts(self) -> list[int]:
        """Programs that share the inputs of each 64 columns, where rows are digits."""
        ends = [(tile * self.steps, (tile + 1) * self.steps - 1) for tile in range(self.starts[-1])]
        return [self.program_of(last) - self.program_of(first) + 1 for first, last in ends]

    @property
    def slots(self) -> int:
        """Pieces of shared memory for what tensor cores read: digits are written beside others."""
        return 2 if self.has_digits else self.stages

    @property
    def is_padded(self) -> bool:
        """Whether there are fewer rows than tensor cores take."""
        return self.num_rows < self.rows

    @property
    def is_rewritten(self) -> bool:
        """Whether rows cannot be copied to where tensor cores read them."""
        return self.is_padded or self.has_digits

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory, of which each stage has a piece, and a barrier for each stage."""
        stages = self.stages
        dtype = digits.digits_dtype(self.dtype) if self.has_digits else jnp.bfloat16
        own: dict[str, Any] = {
            "inputs": ops.tiled((self.slots, self.columns, self.depth), dtype),
            "weights": ops.tiled((stages, _TILE, self.depth), self.dtype),
            "sums": plgpu.SMEM((self.columns, _TILE), jnp.float32),
        }
        copies = 1 + (1 + self.has_norm) * (self.depth // self.piece)
        if self.is_packed:
            copies += 1
            own["weights"] = widen.lines_of_codes((stages, _TILE, self.depth // 2))
            own["factors"] = plgpu.SMEM((stages, self.depth // WEIGHT_GROUP, _TILE), jnp.bfloat16)
        own["filled"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        if self.has_digits:
            shape = (self.slots, self.depth // _LINE, self.columns)
            own["powers"] = plgpu.SMEM(shape, jnp.float32)
            own["sums_of_rows"] = plgpu.SMEM((self.num_rows, _TILE), jnp.float32)
        if self.is_rewritten:
            rows = self.num_rows if self.has_digits else self.rows
            own["arrived"] = plgpu.SMEM((stages, rows, self.depth), jnp.bfloat16)
        if self.has_digits and self.has_norm:
            count = digits.num_squares(self.num_rows, self.depth)
            own["squares_of_lines"] = plgpu.SMEM((count // warp_ops.LANES,), jnp.float32)
        if self.has_norm:
            own["scales"] = plgpu.SMEM((stages, self.depth), jnp.bfloat16)
        return own


def _divide(number: Any, by: int) -> Any:
    """The whole part of a quotient; `number` is not negative."""
    return number // by if isinstance(number, int) else jax.lax.div(number, by)


def _multiply(
    x: Any,
    layer: Any,
    *arrays: Any,
    tiling: Tiling,
    inputs: Any,
    weights: Any,
    sums: Any,
    filled: Any,
    arrived: Any = None,
    scales: Any = None,
    factors: Any = None,
    powers: Any = None,
    sums_of_rows: Any = None,
    squares_of_lines: Any = None,
) -> None:
    """One program: some columns of one array, some of the inputs."""
    arrived = arrived if tiling.is_rewritten else inputs
    every: tuple[Any, ...] = arrays if tiling.has_norm else (None, *arrays, None)
    scale, *others, squares = every
    count_of_arrays = len(tiling.starts) - 1
    sources, targets = others[:count_of_arrays], others[-count_of_arrays:]
    group_scales = others[count_of_arrays:-count_of_arrays]
    if tiling.has_digits:
        program = jax.lax.axis_index("program")
        begin = tiling.begin_of(program)
        count = tiling.begin_of(program + 1) - begin
    else:
        own_tile, part = jax.lax.axis_index("tile"), jax.lax.axis_index("part")
        begin = part * tiling.own_steps
        count = jnp.minimum(tiling.own_steps, tiling.steps - begin)
    own_layer = layer[0]
    kind: dict[str, Any] = {"are_codes": tiling.is_packed, "interpret": tiling.interpret}

    def place_of(step: Any) -> tuple[Any, Any]:
        """Which 64 columns and which of their tiles a step of the program has."""
        if not tiling.has_digits:
            return own_tile, begin + step
        place = begin + step
        return jax.lax.div(place, tiling.steps), jax.lax.rem(place, tiling.steps)

    def of_array(tile: Any, body: Any) -> None:
        """Runs `body(index, columns)` for the array that a tile's columns belong to."""
        for index, (start, end) in enumerate(zip(tiling.starts, tiling.starts[1:], strict=False)):

            @pl.when((tile >= start) & (tile < end))
            def _(index: int = index, start: int = start) -> None:
                body(index, pl.ds((tile - start) * _TILE, _TILE))

    def load(step: Any) -> None:
        @pl.when(step < count)
        def _() -> None:
            slot = jax.lax.rem(step, tiling.stages)
            tile, place = place_of(step)
            start = place * tiling.depth
            own = pl.ds(start, tiling.depth)
            target = arrived.at[slot]
            target = target.at[pl.ds(0, tiling.num_rows)] if tiling.is_padded else target
            for piece in range(0, tiling.depth, tiling.piece):
                source, where = pl.ds(start + piece, tiling.piece), pl.ds(piece, tiling.piece)
                whole = tiling.piece == tiling.depth
                part = target if whole else target.at[:, where]
                plgpu.copy_gmem_to_smem(x.at[:, source], part, filled.at[slot])
                if tiling.has_norm:
                    part = scales.at[slot] if whole else scales.at[slot, where]
                    plgpu.copy_gmem_to_smem(scale.at[own_layer, source], part, filled.at[slot])

            def copy(index: int, columns: Any) -> None:
                if tiling.is_packed:
                    copy_codes(index, columns, slot, place)
                    return
                axes = (columns, own) if tiling.is_transposed else (own, columns)
                source = sources[index].at[own_layer, *axes]
                plgpu.copy_gmem_to_smem(source, weights.at[slot], filled.at[slot])

            of_array(tile, copy)

    def copy_codes(index: int, columns: Any, slot: Any, place: Any) -> None:
        half, groups = tiling.depth // 2, tiling.depth // WEIGHT_GROUP
        source = sources[index].at[own_layer, columns, pl.ds(place * half, half)]
        plgpu.copy_gmem_to_smem(source, weights.at[slot], filled.at[slot])
        source = group_scales[index].at[own_layer, pl.ds(place * groups, groups), columns]
        plgpu.copy_gmem_to_smem(source, factors.at[slot], filled.at[slot])

    for step in range(tiling.stages - 1):
        load(jnp.int32(step))

    def prepare(slot: Any, found: Any) -> Any:
        """Puts the inputs of a slot where tensor cores read them; adds their squares to others."""
        source = arrived.at[slot].transpose((1, 0))
        own = plgpu.load(source, layout=_TURNED, optimized=not tiling.is_padded)
        if tiling.has_norm:
            wide = own.astype(jnp.float32)
            found = found + wide * wide
            factor = ops.read(scales.at[slot], _TURNED.reduce(1)).astype(jnp.float32)
            factor = jax.lax.broadcast_in_dim(factor, wide.shape, (0,))
            own = (wide * plgpu.layout_cast(factor, _TURNED)).astype(jnp.bfloat16)
        ops.write(inputs.at[slot].transpose((1, 0)), own, optimized=True)
        return found

    def add_up(total: ops.Accumulator) -> Any:
        def step(index: Any, found: Any) -> Any:
            slot = jax.lax.rem(index, tiling.stages)
            plgpu.barrier_wait(filled.at[slot])
            if tiling.has_norm or tiling.is_padded:
                found = prepare(slot, found)
            # All warps have multiplied what lies in the slot that is filled next.
            total.wait(in_flight=0)
            if tiling.has_norm or tiling.is_padded:
                plgpu.commit_smem()
            else:
                warp_ops.barrier(interpret=tiling.interpret)
            load(index + tiling.stages - 1)
            own, right = weights.at[slot], inputs.at[slot]
            if tiling.is_packed:
                left = widen.codes_to_bfloat16(own, factors.at[slot], interpret=tiling.interpret)
                total.add_product(left, right.transpose((1, 0)))
            elif tiling.is_narrow:
                left = widen.to_bfloat16(own, interpret=tiling.interpret)
                total.add_product(left, right.transpose((1, 0)))
            else:
                left = own if tiling.is_transposed else own.transpose((1, 0))
                total.add_product(left, right.transpose((1, 0)))
            return found

        none: Any = ()
        if tiling.has_norm:
            none = ops.full((tiling.depth, tiling.rows), 0.0, _TURNED)
        found = total.loop(count, step, none)
        return total.load(), found

    def add_line(total: Any, slot: Any, own: Any, line: int) -> Any:
        """The sums with those of a line of a stage's weights and a slot's digits."""
        part = pl.ds(line * _LINE, _LINE)
        rows = inputs.at[own, :, part], powers.at[own, line]
        if not tiling.is_packed:
            left = weights.at[slot, :, part]
            return digits.add_line(total, left, *rows, interpret=tiling.interpret)
        groups = _LINE // WEIGHT_GROUP
        half = pl.ds(line * _LINE // 2, _LINE // 2)
        left = weights.at[slot, :, half], factors.at[slot, pl.ds(line * groups, groups)]
        options: dict[str, Any] = {"num_rows": tiling.num_rows, "depth": tiling.depth}
        return digits.add_line_of_codes(total, *left, *rows, **options, interpret=tiling.interpret)

    def put(sums_to_put: Any, tile: Any, part: Any) -> None:
        """Starts to write the sums of some columns to their part of the result."""

        def copy(index: int, columns: Any) -> None:
            target = targets[index].at[part, pl.ds(0, tiling.num_rows), columns]
            plgpu.copy_smem_to_gmem(sums_to_put, target)

        of_array(tile, copy)

    def finish(products: Any, found: Any, tile: Any) -> None:
        """Writes the sums of some columns, where rows are digits."""
        part = program - tiling.program_of(tile * tiling.steps)
        plgpu.wait_smem_to_gmem(0)  # of the columns before
        ops.write(sums.transpose((1, 0)), plgpu.layout_cast(products, _TURNED))
        plgpu.commit_smem()
        digits.add_digits(sums, sums_of_rows, inputs.dtype, **kind)
        plgpu.commit_smem()
        put(sums_of_rows, tile, part)
        if tiling.has_norm:

            @pl.when(tile == 0)
            def _() -> None:
                digits.sum_squares(found, squares_of_lines, interpret=tiling.interpret)
                plgpu.commit_smem()
                lines = tiling.depth // _LINE
                for row in range(tiling.num_rows):
                    own = [squares_of_lines[row * lines + line] for line in range(lines)]
                    ops.write(squares.at[part, row], functools.reduce(operator.add, own))

    def multiply_digits() -> None:
        """All of a program for weights that the tensor cores read as they lie."""

        def step(index: Any, carry: Any) -> Any:
            total, found = carry
            slot, own = jax.lax.rem(index, tiling.stages), jax.lax.rem(index, tiling.slots)
            plgpu.barrier_wait(filled.at[slot])
            norm = (scales.at[slot], found) if tiling.has_norm else ()
            operands = inputs.at[own], powers.at[own], arrived.at[slot], *norm
            found = digits.write(*operands, **kind)
            plgpu.commit_smem()  # all warps have multiplied what lies in the slot filled next
            load(index + tiling.stages - 1)
            for line in range(tiling.depth // _LINE):
                total = add_line(total, slot, own, line)
            tile, place = place_of(index)
            is_last = (place == tiling.steps - 1) | (index == count - 1)
            # Squares are those of the first columns, with which a program that has some begins.
            pl.when(is_last)(functools.partial(finish, total, found, tile))
            return jnp.where(is_last, ops.full(shape, 0.0), total), found

        digits.begin(inputs, tiling.num_rows, **kind)
        none = None
        if tiling.has_norm:
            count_of_squares = digits.num_squares(tiling.num_rows, tiling.depth)
            layout = digits.squares_layout(count_of_squares)
            none = ops.full((count_of_squares,), 0.0, layout)
        jax.lax.fori_loop(0, count, step, (ops.full(shape, 0.0), none))

    shape = (_TILE, tiling.columns)
    if tiling.has_digits:
        multiply_digits()
    else:
        products, found = ops.with_accumulator(add_up, shape, interpret=tiling.interpret)
        # By rows, so that whoever adds up the parts reads those that there are, one after another.
        ops.write(sums.transpose((1, 0)), plgpu.layout_cast(products, _TURNED))
        plgpu.commit_smem()
        if tiling.has_norm:

            @pl.when(own_tile == 0)
            def _() -> None:
                ops.write(squares.at[part], jnp.sum(found, axis=0))

        put(sums.at[pl.ds(0, tiling.num_rows)], own_tile, part)
    plgpu.wait_smem_to_gmem(0)


def tile(
    x: Any,
    kernels: Sequence[Any],
    *,
    has_norm: bool,
    is_transposed: bool = False,
    interpret: bool = False,
) -> Tiling:
    """What programs have of these rows and weights, arrays or their abstract shapes."""
    num_rows, num_inputs = x.shape
    rows = -(-num_rows // _LEAST_ROWS) * _LEAST_ROWS
    widths = [one.shape[1 if is_transposed else 2] for one in kernels]
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width // _TILE)
    dtype = kernels[0].dtype
    parts = max(1, min(num_inputs // (_TILE * _STEPS), _PROGRAMS // starts[-1]))
    has_digits = dtype != jnp.bfloat16 and num_rows <= digits.MOST_ROWS
    resident, most = _SHARES[4 if dtype == jnp.uint8 else 8, num_rows == 1]
    lines = [one for one in (4, 2, 1) if one <= most and num_inputs % (one * _LINE) == 0]
    for count in lines if has_digits else [1]:
        depth = _TILE if dtype == jnp.bfloat16 else count * _LINE
        steps = num_inputs // depth
        tiling = Tiling(
            dtype=dtype,
            depth=depth,
            rows=rows,
            num_rows=num_rows if num_rows < _LEAST_ROWS else rows,
            starts=tuple(starts),
            steps=steps,
            own_steps=-(-steps // parts),
            programs=max(
                1, min(num_multiprocessors() * resident, starts[-1] * steps // _LEAST_SHARE)
            ),
            stages=1,
            has_norm=has_norm,
            is_transposed=is_transposed,
            interpret=interpret,
        )
        shared_bytes = _SHARED_BYTES
        if tiling.has_digits:
            shared_bytes = shared_memory() // resident - _RESERVED_BYTES
        elif tiling.is_narrow and rows > _FEW_ROWS:
            shared_bytes = _SHARED_BYTES_OF_TWO
        tiling = dataclasses.replace(tiling, stages=_stages(tiling, shared_bytes))
        if tiling.stages > 1:
            break
    return tiling


def _stages(tiling: Tiling, shared_bytes: int) -> int:
    """Tiles that so much shared memory has room for."""
    depth = tiling.depth
    # The weights, what the norm multiplies by, and the rows.
    stage_bytes = tiling.weight_bytes + 2 * depth
    other_bytes = 4 * _TILE * tiling.columns + (_REDUCTION_BYTES if tiling.has_norm else 0)
    if tiling.has_digits:
        stage_bytes += 2 * depth * tiling.num_rows
        other_bytes += tiling.slots * tiling.columns * (depth + 4 * depth // _LINE)
        other_bytes += 4 * _TILE * tiling.num_rows
    else:
        # Rows as they arrived are others than those that are read.
        stage_bytes += 2 * depth * tiling.rows * (1 + tiling.is_padded)
    return min(_MOST_STAGES, (shared_bytes - other_bytes) // stage_bytes)


def why_not_linear(
    x: Any,
    kernels: Sequence[Any],
    scale: Any = None,
    *,
    is_transposed: bool = False,
    weight_scales: Sequence[Any] | None = None,
) -> str | None:
    """Why the kernel cannot take these rows and weights, or `None` if it can.

    Args:
      x: Rows `[B, D]`, an array or its abstract shape.
      kernels: Weights `[L, D, F]`, or `[L, F, D]`, likewise.
      scale: Of a norm `[L, D]`, likewise.
      is_transposed: Which of them.
      weight_scales: Scales of weights of eight bits, `[L, F]` for each array, or of four bits,
        `[L, D / 32, F]`, likewise.
    """
    own = {str(one.dtype) for one in kernels}
    is_packed = own == {"uint8"}
    is_narrow = is_packed or (own <= set(widen.TYPES) and len(own) == 1)
    bits = "four" if is_packed else "eight"
    if x.dtype != jnp.bfloat16 or not (own == {"bfloat16"} or is_narrow):
        return f"it takes bfloat16, not {x.dtype} times {', '.join(sorted(own))}"
    if is_narrow != (weight_scales is not None):
        needed = f"weights of {bits} bits need weight_scales" if is_narrow else "bfloat16 has none"
        return f"{needed}, got {kernels[0].dtype}"
    if weight_scales is not None:
        if not is_transposed:
            return f"weights of {bits} bits must be [L, F, D], is_transposed=True"
        shapes = [tuple(one.shape) for one in weight_scales]
        wanted = [tuple(one.shape[:2]) for one in kernels]
        if is_packed:
            wanted = [(layers, x.shape[1] // WEIGHT_GROUP, width) for layers, width in wanted]
        if shapes != wanted:
            return f"weight_scales must be {wanted}, not {shapes}"
    if scale is not None and scale.dtype != x.dtype:
        return f"it takes a scale in bfloat16, not {scale.dtype}"
    if x.shape[0] > MOST_ROWS:
        return f"it takes at most {MOST_ROWS} rows, not {x.shape[0]}"
    widths = [one.shape[1 if is_transposed else 2] for one in kernels]
    depth = _LINE if is_narrow else _TILE
    if x.shape[1] % depth or any(width % _TILE for width in widths):
        both = f"{depth} inputs and {_TILE} columns" if is_narrow else f"{_TILE} inputs and columns"
        return f"it takes multiples of {both}, not {x.shape[1]} and {widths}"
    return None


def linear_kernel(
    x: Float[Array, "B D"],
    kernels: Sequence[Num[Array, "L _ _"]],
    layer: Int[Array, ""],
    *,
    scale: Float[Array, "L D"] | None = None,
    eps: float = 0.0,
    is_transposed: bool = False,
    weight_scales: Sequence[Float[Array, "L *groups _"]] | None = None,
    interpret: bool = False,
) -> list[Float[Array, "B _"]]:
    """`out_i` of the module.

    Args:
      x: Rows in bfloat16, at most `MOST_ROWS`.
      kernels: Weights of all layers, in bfloat16, whose `D` and `F` are multiples of 64; or in
        float8_e4m3fn or int8, all in one of them, `[L, F, D]`, whose `D` is a multiple of 128; or
        bytes of codes of four bits, `[L, F, D / 2]`, likewise.
      layer: The layer.
      scale: `g` of all layers, in bfloat16; without it there is no norm.
      eps: What the norm adds to the mean of squares.
      is_transposed: Whether the weights are `[L, F, D]`.
      weight_scales: `s_i` of all layers, float32 `[L, F]`, one for each array of weights of eight
        bits, or bfloat16 `[L, D / 32, F]` of four bits, and for these alone.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      Float32 for each array of weights.
    """
    num_rows, num_inputs = x.shape
    tiling = tile(
        x, kernels, has_norm=scale is not None, is_transposed=is_transposed, interpret=interpret
    )
    rows = tiling.rows
    widths = [one.shape[1 if is_transposed else 2] for one in kernels]
    shapes: list[tuple[int, ...]] = [(tiling.parts, tiling.num_rows, width) for width in widths]
    if scale is not None:
        shapes.append((tiling.parts, rows))
    kernel = ops.kernel(
        functools.partial(_multiply, tiling=tiling),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=tiling.scratch,
        grid=(tiling.programs,) if tiling.has_digits else (tiling.starts[-1], tiling.parts),
        grid_names=("program",) if tiling.has_digits else ("tile", "part"),
        # Where warps meet is said above; they would also meet at every copy.
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret),
        kernel_name="linear",
    )
    if not tiling.is_rewritten:
        x = jnp.pad(x, ((0, rows - num_rows), (0, 0)))
    norm = [] if scale is None else [scale]
    group_scales = []
    if weight_scales is not None and tiling.is_packed:
        group_scales, weight_scales = list(weight_scales), None  # the kernel multiplies by these
    *found, last = kernel(x, layer.astype(jnp.int32).reshape(1), *norm, *kernels, *group_scales)
    arrays, inverse = [*found, last], None
    counts = tiling.counts if tiling.has_digits else None
    if scale is not None:
        arrays = found
        squares = _add_parts(last, counts and counts[:1] * rows)[:num_rows]
        inverse = jax.lax.rsqrt(squares / num_inputs + eps)
    results = []
    for index, one in enumerate(arrays):
        own = slice(*tiling.starts[index : index + 2])
        total = _add_parts(one, counts and np.repeat(counts[own], _TILE))[:num_rows]
        if weight_scales is not None:
            total = total * weight_scales[index][layer][None]
        results.append(total if inverse is None else total * inverse[:, None])
    return results


def _add_parts(parts: Array, counts: Any) -> Array:
    """The sums over the first axis, of which each entry of the last has `counts` or all."""
    if counts is not None:
        index = jax.lax.broadcasted_iota(jnp.int32, parts.shape, 0)
        own = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), parts.shape)
        parts = jnp.where(index < own, parts, 0.0)
    return jnp.sum(parts, axis=0)
