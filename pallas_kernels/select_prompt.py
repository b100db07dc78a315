"""The two kernels around the walk's product in a prompt (Algorithm 1 steps 6-7), row by row.

`walk_operands_kernel` makes both operands of `R_k = R_{k-1} W_k`, each row at a power of two of its
own; XLA multiplies them on tensor cores; `select_prompt_kernel` makes the state and the lists of
the product. What they compute is what `walk.walk_step` and `selection.select_blocks` do. In both
kernels a program is one warpgroup with one row of one sequence, which it reads once (4 bytes per
block and array) and keeps in registers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels import ops, warp_ops
from sketchwalk_jax.pallas_kernels.config import MAX_PROMPT_BLOCKS
from sketchwalk_jax.pallas_kernels.select import pad_columns, select_row
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    STATE_EXPONENT,
    WEIGHT_EXPONENT,
    integer_power,
    mantissa_and_exponent,
    power_of_two,
    product_exponent,
    replace,
)
from sketchwalk_jax.selection import BlockSelection

_LEAST_EXPONENT = -126  # of a normal float
_LARGEST_EXPONENT = 127  # of a finite one
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign


# Before the product


def _make_operands(
    scores_ref: Any,
    largest_ref: Any,
    state_ref: Any,
    weights_ref: Any,
    left_ref: Any,
    scratch: Any,
    *,
    power: int,
    rectify: bool,
    interpret: bool,
) -> None:
    """Row `index` of `W = A^s` and of `R_{k-1}`, where they have such a row.

    Rows of `W` come to lie below `2^(WEIGHT_EXPONENT + s)`, the largest entry of a row of `R` in
    `[1, 2) · 2^product_exponent(s)`.
    """
    index, sequence = jax.lax.axis_index("row"), jax.lax.axis_index("sequence")
    num_rows, width = state_ref.shape[1:]
    layout = warp_ops.row_layout(width)
    where: dict[str, Any] = dict(layout=layout, interpret=interpret)
    columns = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)

    @pl.when(index < scores_ref.shape[1])
    def _() -> None:
        _, own, _ = mantissa_and_exponent(largest_ref[sequence, index])
        score = ops.read(scores_ref.at[sequence, index], layout)
        mantissa, exponent, is_zero = mantissa_and_exponent(score)
        # The largest entry comes to the height whose power is about 2^WEIGHT_EXPONENT.
        root = mantissa * power_of_two(exponent - own + WEIGHT_EXPONENT // power)
        is_none = is_zero | (columns > index) | ((score < 0.0) if rectify else is_zero)
        is_none = is_none | (exponent > _LARGEST_EXPONENT)  # NaN or an infinity
        weights = integer_power(jnp.where(is_none, 0.0, root), power)
        warp_ops.write_row(weights, columns, weights_ref.at[sequence, index], **where)

    @pl.when(index < num_rows)
    def _() -> None:
        # Entry `j` takes the power of two that row `j` of `W` lacks.
        _, scale, is_nothing = mantissa_and_exponent(ops.read(largest_ref.at[sequence], layout))
        scale = jnp.maximum(replace(scale * power, is_nothing, NO_EXPONENT), NO_EXPONENT)
        state = ops.read(state_ref.at[sequence, index], layout)
        mantissa, exponent, is_zero = mantissa_and_exponent(state)
        exponent = exponent + scale
        term = replace(exponent, is_zero, NO_EXPONENT)
        largest, _ = warp_ops.maxima((term, term), scratch, **where)
        left = mantissa * power_of_two(exponent - largest + product_exponent(power))
        left = jnp.where(is_zero, 0.0, left)
        warp_ops.write_row(left, columns, left_ref.at[sequence, index], **where)


def walk_operands_kernel(
    scores: Float[Array, "B J J"],
    largest: Float[Array, "B J"],
    state: Float[Array, "B I J"],
    *,
    power: int,
    rectify: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B J J"], Float[Array, "B I J"]]:
    """The transition, and the state scaled for the product with it, rows at any power of two.

    Args:
      scores: Block scores; those that are not finite count as zero.
      largest: The largest magnitude of each of their rows, of entries that exist and count.
      state: Rows of the walk so far.
      power: Exponent of the transition.
      rectify: Whether negative scores count as zero.
      interpret: Whether to interpret the kernel, which needs no GPU.

    Returns:
      The transition and the scaled rows.

    Raises:
      ValueError: If a row has more than 8,192 blocks, which no longer fit in registers.
    """
    batch, num_rows, num_blocks = state.shape
    if num_blocks > MAX_PROMPT_BLOCKS:
        raise ValueError(f"rows must have at most {MAX_PROMPT_BLOCKS} columns, got {num_blocks}")
    weights, left = ops.kernel(
        functools.partial(_make_operands, power=power, rectify=rectify, interpret=interpret),
        out_type=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (scores, state)],
        grid=(max(num_rows, num_blocks), batch),
        grid_names=("row", "sequence"),
        kernel_name="sketchwalk_walk_operands",
        scratch_types=[warp_ops.scratch_of_counts()],
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret),
    )(*map(pad_columns, (scores, largest, state)))
    return weights, left


# After the product


def _select(
    product_ref: Any,
    weights_ref: Any,
    scores_ref: Any,
    first_ref: Any,
    layers_ref: Any,
    budget_ref: Any,
    ids_ref: Any,
    counts_ref: Any,
    state_ref: Any,
    walked_ref: Any,
    scratch: Any,
    *,
    num_blocks: int,
    use_walk: bool,
    interpret: bool,
    **sizes: Any,
) -> None:
    """One row: what the walk has come to, its state, and the list of its largest entries.

    The first layer's row is `W`'s own, every later one's the product's. A row without a positive
    entry is selected by its scores.
    """
    index, sequence = jax.lax.axis_index("row"), jax.lax.axis_index("sequence")
    width = product_ref.shape[-1]
    layout = warp_ops.row_layout(width)
    where: dict[str, Any] = dict(layout=layout, interpret=interpret)
    row, layers = first_ref[sequence] + index, layers_ref[0]
    known = jnp.minimum(row, num_blocks - 1)  # there may be padding rows beyond the cache
    count = budget_ref[known]

    def own_row() -> Array:
        return ops.read(weights_ref.at[sequence, known], layout)

    def product_row() -> Array:
        parts = [product_ref.at[x, sequence, index] for x in range(product_ref.shape[0])]
        return functools.reduce(jnp.add, [ops.read(x, layout) for x in parts])

    value = jax.lax.cond(layers == 0, own_row, product_row) if use_walk else own_row()
    peaks = _Peaks.of(value, scratch, **where)
    state = peaks.rescale(value)
    columns = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    warp_ops.write_row(state, columns, state_ref.at[sequence, index], **where)
    is_walked = peaks.is_walked()
    counts_ref[sequence, index] = count

    @pl.when((index == 0) & (sequence == 0))
    def _() -> None:
        walked_ref[0] = layers + 1

    def scores_row() -> Array:
        return ops.read(scores_ref.at[sequence, known], layout)

    select_row(
        jax.lax.cond(is_walked, lambda: state, scores_row),
        columns,
        row,
        count,
        ids_ref.at[sequence, index],
        scratch,
        num_blocks=num_blocks,
        is_padded=width != num_blocks,
        **where,
        **sizes,
    )


class _Peaks(NamedTuple):
    """The largest entries of a row.

    Attributes:
      exponent: Of the largest magnitude.
      positive_exponent: Of the largest positive entry.
      positive_bits: That entry as an integer, 0 or less if there is none.
    """

    exponent: Int[Array, ""]
    positive_exponent: Int[Array, ""]
    positive_bits: Int[Array, ""]

    @classmethod
    def of(
        cls, value: Float[Array, "W"], scratch: Any, *, layout: Any, interpret: bool
    ) -> "_Peaks":
        """Those of a row in registers."""
        # As integers, floats of either sign alone have the order of their magnitudes.
        bits = jax.lax.bitcast_convert_type(value, jnp.int32)
        magnitudes = warp_ops.maxima(
            (bits & _MAGNITUDE, bits), scratch, layout=layout, interpret=interpret
        )
        largest, positive = (
            mantissa_and_exponent(jax.lax.bitcast_convert_type(jnp.maximum(x, 0), jnp.float32))[1]
            for x in magnitudes
        )
        return cls(largest, positive, magnitudes[1])

    def rescale(self, value: Float[Array, "W"]) -> Float[Array, "W"]:
        """The row times a power of two, its largest magnitude in `[1, 2) · 2^STATE_EXPONENT`."""
        mantissa, exponent, is_zero = mantissa_and_exponent(value)
        state = mantissa * power_of_two(exponent - self.exponent + STATE_EXPONENT)
        return jnp.where(is_zero, 0.0, state)

    def is_walked(self) -> Bool[Array, ""]:
        """Whether the rescaled row has a positive entry that is a normal number."""
        rescaled = self.positive_exponent - self.exponent + STATE_EXPONENT
        return (rescaled >= _LEAST_EXPONENT) & (self.positive_bits > 0)


def select_prompt_kernel(
    product: Float[Array, "P B I J"],
    weights: Float[Array, "B J J"],
    scores: Float[Array, "B J J"],
    first_block: Int[Array, "B"],
    layers: Int[Array, ""],
    budget: Int[np.ndarray, "J"],
    *,
    use_walk: bool = True,
    sink_blocks: int,
    local_blocks: int,
    block_size: int = 64,
    interpret: bool = False,
) -> tuple[BlockSelection, Float[Array, "B I J"], Int[Array, ""]]:
    """Lists, and the walk's next rows, from its product with this layer's transition.

    Args:
      product: What adds up to the rows of the product, each at any power of two.
      weights: Rows of this layer's transition, each at any power of two.
      scores: This layer's scores, for rows without a positive entry.
      first_block: Absolute block index of the first row of each sequence.
      layers: Layers walked so far; 0 means that this one starts the walk.
      budget: Blocks to keep in each row.
      use_walk: Whether the product counts; else the state is the transition's rows in every layer.
      sink_blocks: Number of first blocks that are always kept.
      local_blocks: Number of last blocks up to the diagonal that are always kept.
      block_size: Tokens per block.
      interpret: Whether to interpret the kernel, which needs no GPU.

    Returns:
      A `BlockSelection` shared by all heads, the state after this layer, and `layers + 1`.

    Raises:
      ValueError: If a row has more than 8,192 blocks, which no longer fit in registers.
    """
    batch, num_rows, num_blocks = product.shape[1:]
    if num_blocks > MAX_PROMPT_BLOCKS:
        raise ValueError(f"rows must have at most {MAX_PROMPT_BLOCKS} columns, got {num_blocks}")
    ids, counts, state, walked = ops.kernel(
        functools.partial(
            _select,
            num_blocks=num_blocks,
            use_walk=use_walk,
            sink_blocks=sink_blocks,
            local_blocks=local_blocks,
            interpret=interpret,
        ),
        out_type=[
            jax.ShapeDtypeStruct((batch, num_rows, int(budget[-1])), jnp.int32),
            jax.ShapeDtypeStruct((batch, num_rows), jnp.int32),
            jax.ShapeDtypeStruct((batch, num_rows, num_blocks), jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=(num_rows, batch),
        grid_names=("row", "sequence"),
        kernel_name="sketchwalk_select_prompt",
        scratch_types=[warp_ops.scratch_of_counts()],
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret),
    )(
        *map(pad_columns, (product, weights, scores)),
        first_block,
        layers[None],
        jnp.asarray(budget, jnp.int32),
    )
    return BlockSelection(ids[:, None], counts[:, None], block_size), state, walked[0]
