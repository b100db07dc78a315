"""Groups of rows, each multiplied by its own matrix of a stack, such as the experts of tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Groups(NamedTuple):
    """The matrix of each group of rows.

    Attributes:
      matrix: Index of each group's matrix in the stack, int32 `[G]`. If there are `G / n` groups of
        rows, `n` groups in a row share the rows of one, such as a token's for its experts.
      used: Number of groups in use, int32 `[]`. Later groups read no weights, and their results are
        undefined.
    """

    matrix: Int[Array, "G"]
    used: Int[Array, ""]


def operands(layer: Int[Array, ""] | Groups) -> list[Array]:
    """Returns a kernel's operands: the matrices and, with groups, the number of groups in use."""
    if isinstance(layer, Groups):
        return [layer.matrix.astype(jnp.int32), layer.used.astype(jnp.int32).reshape(1)]
    return [layer.astype(jnp.int32).reshape(1)]


def why_not_groups(x: Any, scale: Any, *, most_rows: int) -> str | None:
    """Returns why kernels do not support these rows, or `None` if they do.

    Args:
      x: Rows `[B, D]`, or groups of rows `[G, R, D]`.
      scale: Scale of a norm, or `None`.
      most_rows: Most rows, of each group if there are groups.
    """
    if x.ndim == 3 and scale is not None:
        return "it takes groups of rows [G, R, D] without a norm"
    if x.shape[-2] > most_rows:
        each = " a group" if x.ndim == 3 else ""
        return f"it takes at most {most_rows} rows{each}, not {x.shape[-2]}"
    return None


def check_groups(x: Any, layer: Int[Array, ""] | Groups) -> None:
    """Raises `ValueError` unless `x` is `[B, D]` with a layer, or `[G / n, R, D]` with `Groups`."""
    shape, own = layer.matrix.shape if isinstance(layer, Groups) else (), x.shape[:-2]
    if len(own) != len(shape) or any(many % one for many, one in zip(shape, own, strict=True)):
        raise ValueError(
            "x must be [B, D] with a layer, or [G / n, R, D] with Groups of [G] matrices, got "
            f"{x.shape} with matrices {shape}"
        )


def num_groups(layer: Int[Array, ""] | Groups) -> int:
    """Returns the number of groups of rows; 1 if all rows have one layer."""
    return layer.matrix.shape[0] if isinstance(layer, Groups) else 1
