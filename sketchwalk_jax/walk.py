"""The sketch-determined walk (arXiv:2602.07397, section 2.3, equation 1; Algorithm 1 step 6).

`R_0 = W_0`, `R_k = R_{k-1} W_k`. Row `i` of `R_k` depends only on row `i` of `R_{k-1}` and on
`W_k`, so rows may be computed in any grouping: a whole prompt, a chunk, or the single row of a
decoded token. A row without a positive entry selects by its scores.

Scores are masked *before* the product (`W` is block-lower-triangular). Each row of `W` is scaled by
a power of two, whose exponent is applied when the row is multiplied; rows of `R` are rescaled by
powers of two, which change no selection. So nothing overflows with any number of layers. Both use
the upper end of float32's range, so that small entries survive as long as possible: an entry that
underflows might have been large again a few layers later.

Scores that are not finite count as zero in transitions. So a token whose key or query is NaN or
infinite, or whose score overflows, never affects the rows before its block, where the product would
otherwise contain zero times NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.precision import LARGEST
from sketchwalk_jax.pytree import register
from sketchwalk_jax.scaled import (
    NO_EXPONENT,
    STATE_EXPONENT,
    WEIGHT_EXPONENT,
    floor_log2,
    product_exponent,
    times_power_of_two,
)

Precision = jax.lax.PrecisionLike
HIGHEST = jax.lax.Precision.HIGHEST
# Number of column panels in a product with a triangular matrix, and the smallest size to divide.
_PANELS = 4
_LEAST_PANELLED = 1024


@register
@dataclasses.dataclass(frozen=True)
class WalkState:
    """State that the walk carries from layer to layer: the block scores combined so far.

    Attributes:
      scores: Rows of `R_k`, float32 `[B, I, J]`: a score of every key block for every query block.
        `I = 1` in decode.
      layers: Number of sparse layers so far, int32 scalar. 0 means that the next layer starts the
        walk.
    """

    scores: Float[Array, "B I J"]
    layers: Int[Array, ""]

    is_new = False  # not a field, so transformations drop it

    @classmethod
    def zeros(cls, batch: int, num_rows: int, num_blocks: int) -> "WalkState":
        """Makes the walk before the first sparse layer.

        Args:
          batch: Number of sequences `B`.
          num_rows: Number of query blocks `I`; 1 in decode.
          num_blocks: Number of key blocks `J`.

        Returns:
          A `WalkState` with a layer count of zero.
        """
        scores = jnp.zeros((batch, num_rows, num_blocks), jnp.float32)
        return cls(scores, jnp.zeros((), jnp.int32))


def causal_mask(num_blocks: int) -> Bool[Array, "J J"]:
    """Marks the blocks that each block may see."""
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    return index[None, :] <= index[:, None]


def _counting(
    scores: Float[Array, "B J J"], causal: Bool[Array, "J J"], *, rectify: bool
) -> Float[Array, "B J J"]:
    """Prepares scores for a power transition: zero above the diagonal or if not finite."""
    counts = causal[None] & jnp.isfinite(scores)
    scores = jnp.maximum(scores, 0.0) if rectify else scores
    return jnp.where(counts, scores, 0.0)


def power_transition(
    scores: Float[Array, "B J J"], causal: Bool[Array, "J J"], *, exponent: int, rectify: bool
) -> tuple[Float[Array, "B J J"], Int[Array, "B J"]]:
    """Computes `W = A ** s` element-wise (or `max(A, 0) ** s`), each row at its own power of two.

    Args:
      scores: Block scores `A`; scores that are not finite count as zero.
      causal: Mask of the causal entries.
      exponent: The power `s`.
      rectify: Whether negative scores count as zero (`relu_power`).

    Returns:
      `W` with each row divided by a power of two, and the exponents of those powers up to a common
      constant (large negative numbers for rows that are all zero).
    """
    scores = _counting(scores, causal, rectify=rectify)
    row_exponent = floor_log2(jnp.max(jnp.abs(scores), axis=-1))
    shift = WEIGHT_EXPONENT // exponent - row_exponent
    shift = jnp.where(row_exponent == NO_EXPONENT, 0, shift)
    weights = jax.lax.integer_pow(times_power_of_two(scores, shift[..., None]), exponent)
    return weights, jnp.maximum(row_exponent * exponent, NO_EXPONENT)


def softmax_transition(
    scores: Float[Array, "B J J"], causal: Bool[Array, "J J"]
) -> Float[Array, "B J J"]:
    """Computes `P`, the causal row softmax of `A` over its finite scores.

    Rows sum to one, or are zero if no score is finite.
    """
    counts = causal[None] & jnp.isfinite(scores)
    shares = jax.nn.softmax(jnp.where(counts, scores, -LARGEST), axis=-1)
    return jnp.where(counts, shares, 0.0)


def _normalize_rows(x: Float[Array, "B I J"]) -> Float[Array, "B I J"]:
    """Scales each row by a power of two, its largest entry to `[1, 2) · 2^STATE_EXPONENT`."""
    exponent = floor_log2(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    shift = jnp.where(exponent == NO_EXPONENT, 0, STATE_EXPONENT - exponent)
    return times_power_of_two(x, shift)


def _times_triangular(
    left: Float[Array, "B I J"], lower: Float[Array, "B J J"], precision: Precision
) -> Float[Array, "B I J"]:
    """Computes `left @ lower` in float32 accuracy, skipping zeros above the diagonal of `lower`.

    It uses panels of columns: `sum_m left[:, m] lower[m, j]` starts at the panel's first `j`.
    """
    num_blocks = lower.shape[-1]
    width = num_blocks // _PANELS if num_blocks >= _LEAST_PANELLED else num_blocks
    starts = range(0, num_blocks, width)
    panels = [
        jnp.einsum(
            "bim,bmj->bij",
            left[:, :, start:],
            lower[:, start:, start : start + width],
            precision=precision,
        )
        for start in starts
    ]
    return jnp.concatenate(panels, axis=-1)


def _scale_columns(
    state: Float[Array, "B I J"], log2_scale: Int[Array, "B J"], *, exponent: int
) -> Float[Array, "B I J"]:
    """Multiplies rows of `R` by the scales of `W`'s rows, each at its own power of two.

    The rows are for the product with the unscaled `W`, for which the power of the transition,
    `exponent`, determines the headroom.
    """
    term = jnp.where(state == 0.0, NO_EXPONENT, floor_log2(state) + log2_scale[:, None, :])
    largest = jnp.max(term, axis=-1, keepdims=True)
    headroom = product_exponent(exponent)
    return times_power_of_two(state, log2_scale[:, None, :] - largest + headroom)


def walk_product(
    state: Float[Array, "B I J"],
    weights: Float[Array, "B J J"],
    log2_scale: Int[Array, "B J"],
    *,
    exponent: int,
    precision: Precision = HIGHEST,
) -> Float[Array, "B I J"]:
    """Computes rows of `R W` up to powers of two, where `W[m] = 2^log2_scale[m] · weights[m]`.

    The scales of `W`'s rows are moved into `R`, relative to the largest product of the row. Only
    entries `m` with nonzero `R[i, m]` contribute, so only rows `m <= i`.

    Args:
      state: Rows of `R`; zero above the diagonal.
      weights: Rows of `W` without their scales.
      log2_scale: Exponents of these scales.
      exponent: The power `s` of the transition.
      precision: Precision of the matrix product; it must be as accurate as float32.

    Returns:
      The product, each row rescaled to the top of float32's range (or all zero).
    """
    scaled = _scale_columns(state, log2_scale, exponent=exponent)
    return _normalize_rows(_times_triangular(scaled, weights, precision))


def _take_rows(matrix: Float[Array, "B J J2"], rows: Int[Array, "B I"]) -> Float[Array, "B I J2"]:
    rows = jnp.minimum(rows, matrix.shape[1] - 1)  # padding rows beyond the cache
    return jnp.take_along_axis(matrix, rows[:, :, None], axis=1)


def walk_step(
    walk: WalkState,
    scores: Float[Array, "B J J"],
    rows: Int[Array, "B I"],
    *,
    transition: str,
    exponent: int,
    walk_degree: int,
    beta: float | None,
    precision: Precision = HIGHEST,
) -> tuple[Float[Array, "B I J"], WalkState]:
    """Computes one layer of the walk (equation 1) for some rows.

    Args:
      walk: State after the previous sparse layer.
      scores: This layer's block scores `A`, for all blocks that these rows can reach; scores that
        are not finite are ignored.
      rows: Absolute block index of each of these rows.
      transition: `"power"`, `"relu_power"` or `"softmax"`.
      exponent: The power of the power transitions.
      walk_degree: Number of walk steps in this layer.
      beta: `None` for `R ← R W`; otherwise `X ← (1 - β) P + β X P`.
      precision: Precision of the walk's matrix products; it must be as accurate as float32.

    Returns:
      The scores that select (rows of `R_k`; for rows without a positive entry, the row of `A`), and
      the state for the next layer, which is finite.
    """
    causal = causal_mask(scores.shape[-1])
    first = walk.layers == 0
    if transition == "softmax":
        weights = softmax_transition(scores, causal)
        step = weights_rows = _take_rows(weights, rows)
        if beta != 0.0:
            step = walk.scores
            for _ in range(walk_degree):
                moved = _times_triangular(step, weights, precision)
                step = moved if beta is None else (1.0 - beta) * weights_rows + beta * moved
    else:
        weights, log2_scale = power_transition(
            scores, causal, exponent=exponent, rectify=transition == "relu_power"
        )
        step = weights_rows = _normalize_rows(_take_rows(weights, rows))
        if beta != 0.0:
            step = walk.scores
            for _ in range(walk_degree):
                step = walk_product(
                    step, weights, log2_scale, exponent=exponent, precision=precision
                )
    state = jnp.where(first, weights_rows, step)
    is_empty = jnp.max(state, axis=-1, keepdims=True) <= 0.0
    selecting = jnp.where(is_empty, _take_rows(scores, rows), state)
    return selecting, WalkState(state, walk.layers + 1)
