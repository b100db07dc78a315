"""Choice of experts, and products of prompt rows in groups of one expert each."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.config import (
    GROUP_ROWS,
    KernelConfig,
    why_not_grouped_shape,
)

__all__ = [
    "choose_experts",
    "GROUP_ROWS",
    "grouped_matmul",
    "grouped_swiglu",
    "why_not_grouped_matmul",
]


def why_not_grouped_matmul(
    rows: Any, *weights: Any, is_transposed: bool = False, interpret: bool = False
) -> str | None:
    """Returns why no kernel computes these products here, or `None` if one does.

    Args:
      rows: Rows `[G, R, D]`, an array or its abstract shape.
      *weights: Stacked weights `[M, D, F]`, likewise: one array, or two of one shape for SwiGLU.
      is_transposed: Whether weights are `[M, F, D]`.
      interpret: Whether the kernel runs in the interpreter, which needs no GPU.

    Returns:
      A reason to show to the caller.
    """
    if not interpret and (reason := dispatch.why_not_device("grouped matmul")):
        return reason
    return why_not_grouped_shape(rows, *weights, is_transposed=is_transposed)


def grouped_matmul(
    rows: Float[Array, "G R D"],
    weights: Float[Array, "M _ _"],
    matrix: Int[Array, "G"],
    used: Int[Array, ""],
    *,
    is_transposed: bool = False,
    kernel_config: KernelConfig | None,
) -> Float[Array, "G R F"] | None:
    """Multiplies each group of rows by its matrix, or returns `None` if no kernel does it here.

        out[g, r, f] = Σ_d rows[g, r, d] · weights[matrix[g], d, f]    for g < used

    Args:
      rows: Rows in bfloat16 or float16; `R` is `GROUP_ROWS`.
      weights: Stacked matrices in the same type, which are read in place.
      matrix: Index of each group's matrix; best ascending, so that groups share what they read.
      used: Number of groups to compute; the others' output is undefined.
      is_transposed: Whether weights are `[M, F, D]`.
      kernel_config: Whether the kernel runs in the interpreter; `None` for no kernel.
    """
    return _multiply(rows, (weights,), matrix, used, is_transposed, kernel_config)


def grouped_swiglu(
    rows: Float[Array, "G R D"],
    gate: Float[Array, "M _ _"],
    up: Float[Array, "M _ _"],
    matrix: Int[Array, "G"],
    used: Int[Array, ""],
    *,
    is_transposed: bool = False,
    kernel_config: KernelConfig | None,
) -> Float[Array, "G R F"] | None:
    """Computes SwiGLU of each group of rows, or returns `None` if no kernel does it here.

        out[g, r, f] = silu(rows[g, r] · gate[matrix[g], :, f]) · (rows[g, r] · up[matrix[g], :, f])

    for `g < used`, with sums and silu in float32.

    Args:
      rows: Rows in bfloat16 or float16; `R` is `GROUP_ROWS`.
      gate: Stacked gate matrices in the same type, which are read in place.
      up: Stacked up matrices, likewise.
      matrix: Index of each group's matrix; best ascending, so that groups share what they read.
      used: Number of groups to compute; the others' output is undefined.
      is_transposed: Whether weights are `[M, F, D]`.
      kernel_config: Whether the kernel runs in the interpreter; `None` for no kernel.
    """
    return _multiply(rows, (gate, up), matrix, used, is_transposed, kernel_config)


def choose_experts(
    x: Float[Array, "T D"],
    rows: Float[Array, "T D"],
    router: Float[Array, "L D E"],
    layer: Int[Array, ""],
    is_token: Bool[Array, "T"] | None,
    *,
    chosen: int,
    eps: float | None,
    sums_chosen: bool,
    kernel_config: KernelConfig,
) -> tuple[Array, Array, Array] | None:
    """Chooses the experts of a few tokens, or returns `None` if no kernel does it here.

    Args:
      x: The input before the norm.
      rows: The input times the norm's scale, or `x` without a norm.
      router: Weights of the routers of all layers.
      layer: Index of the layer among those with experts.
      is_token: Whether a row is a token, or `None` for all.
      chosen: Experts that a token chooses.
      eps: Constant that the norm adds to the mean of squares, or `None` without a norm.
      sums_chosen: Whether the weights of the chosen experts, and not of all, add up to 1.
      kernel_config: Whether the kernels run in the interpreter.

    Returns:
      The attributes of `ChosenExperts`: weights, matrices, and the norm's factor of each row.
    """
    # Import late: importing Pallas is slow, and few callers need it.
    from sketchwalk_jax.pallas_kernels.decode_matmul.decode_matmul import (
        decode_matmul_parts,
        why_not_decode_matmul,
    )
    from sketchwalk_jax.pallas_kernels.expert_matmul.choose_experts import (
        choose_experts_kernel,
        why_not_choose_experts,
    )

    if why_not_decode_matmul(rows, [router]) or why_not_choose_experts(
        x, experts=router.shape[2], chosen=chosen
    ):
        return None
    (parts,) = decode_matmul_parts(rows, [router], layer, interpret=kernel_config.interpret)
    mask = jnp.ones(len(x), jnp.int8) if is_token is None else is_token.astype(jnp.int8)
    options: dict[str, Any] = {"chosen": chosen, "eps": eps, "sums_chosen": sums_chosen}
    options |= {"interpret": kernel_config.interpret}
    return choose_experts_kernel(x, parts, layer, mask, **options)


def _multiply(
    rows: Array,
    weights: tuple[Array, ...],
    matrix: Array,
    used: Array,
    is_transposed: bool,
    kernel_config: KernelConfig | None,
) -> Array | None:
    """Calls the kernel, if there is one."""
    if kernel_config is None:
        return None
    options = {"is_transposed": is_transposed, "interpret": kernel_config.interpret}
    if why_not_grouped_matmul(rows, *weights, **options):
        return None
    # Import late: importing Pallas is slow, and few callers need it.
    from sketchwalk_jax.pallas_kernels.expert_matmul.grouped_matmul import grouped_matmul_kernel

    return grouped_matmul_kernel(rows, weights, matrix, used, **options)
