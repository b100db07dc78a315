"""Both operands of the walk's product in one pass: `walk.power_transition`, `walk.scale_columns`.

One warpgroup per row, which it makes of the transition and of the state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from sketchwalk_jax.pallas_kernels import ops, warp_ops
from sketchwalk_jax.pallas_kernels.scaled import (
    NO_EXPONENT,
    integer_power,
    mantissa_and_exponent,
    power_of_two,
    replace,
)
from sketchwalk_jax.pallas_kernels.select import pad_columns
from sketchwalk_jax.pallas_kernels.select_prompt import MAX_COLUMNS


def _make_row(
    scores_ref: Any,
    largest_ref: Any,
    state_ref: Any,
    weights_ref: Any,
    left_ref: Any,
    scratch: Any,
    *,
    power: int,
    rectify: bool,
    weight_exponent: int,
    product_exponent: int,
    interpret: bool,
) -> None:
    index, sequence = jax.lax.axis_index("row"), jax.lax.axis_index("sequence")
    num_rows, width = state_ref.shape[1:]
    layout = warp_ops.row_layout(width)
    where: dict[str, Any] = dict(layout=layout, interpret=interpret)
    columns = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    @pl.when(index < scores_ref.shape[1])
    def _() -> None:
        _, own, _ = mantissa_and_exponent(largest_ref[sequence, index])
        score = load(scores_ref.at[sequence, index])
        mantissa, exponent, is_zero = mantissa_and_exponent(score)
        root = mantissa * power_of_two(exponent - own + weight_exponent // power)
        is_none = is_zero | (columns > index) | ((score < 0.0) if rectify else is_zero)
        weights = integer_power(jnp.where(is_none, 0.0, root), power)
        warp_ops.write_row(weights, columns, weights_ref.at[sequence, index], **where)

    @pl.when(index < num_rows)
    def _() -> None:
        _, scale, is_nothing = mantissa_and_exponent(load(largest_ref.at[sequence]))
        scale = jnp.maximum(replace(scale * power, is_nothing, NO_EXPONENT), NO_EXPONENT)
        mantissa, exponent, is_zero = mantissa_and_exponent(load(state_ref.at[sequence, index]))
        exponent = exponent + scale
        term = replace(exponent, is_zero, NO_EXPONENT)
        largest, _ = warp_ops.maxima((term, term), scratch, **where)
        left = mantissa * power_of_two(exponent - largest + product_exponent)
        left = jnp.where(is_zero, 0.0, left)
        warp_ops.write_row(left, columns, left_ref.at[sequence, index], **where)


def walk_operands_kernel(
    scores: Float[Array, "B J J"],
    largest: Float[Array, "B J"],
    state: Float[Array, "B I J"],
    *,
    power: int,
    rectify: bool,
    weight_exponent: int,
    product_exponent: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B J J"], Float[Array, "B I J"]]:
    """The transition, and the state scaled for the product with it, rows at any power of two.

    Args:
      scores: Block scores.
      largest: The largest magnitude of each of their rows, of entries that exist and count.
      state: Rows of the walk so far.
      power: Exponent of the transition.
      rectify: Whether negative scores count as zero.
      weight_exponent: Rows of the transition are below the power of two with this exponent, and
        that of 2 to the `power`.
      product_exponent: Of the largest entry of a scaled row.
      interpret: Whether to interpret the kernel, which needs no GPU.

    Returns:
      The transition and the scaled rows.

    Raises:
      ValueError: If a row has more than 8,192 blocks, which no longer fit in registers.
    """
    batch, num_rows, num_blocks = state.shape
    if num_blocks > MAX_COLUMNS:
        raise ValueError(f"rows must have at most {MAX_COLUMNS} columns, got {num_blocks}")
    weights, left = plgpu.kernel(
        functools.partial(
            _make_row,
            power=power,
            rectify=rectify,
            weight_exponent=weight_exponent,
            product_exponent=product_exponent,
            interpret=interpret,
        ),
        out_type=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (scores, state)],
        grid=(max(num_rows, num_blocks), batch),
        grid_names=("row", "sequence"),
        kernel_name="sketchwalk_walk_operands",
        scratch_types=[warp_ops.scratch_of_counts()],
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret),
    )(*map(pad_columns, (scores, largest, state)))
    return weights, left
