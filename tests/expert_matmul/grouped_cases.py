"""Shapes of grouped matmuls, which tests compile."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from cases import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCase:
    """Groups of 128 rows times one matrix each of a stack.

    Attributes:
      arrays: Arrays of weights: one, or two for SwiGLU.
      inputs: Width of the rows.
      columns: Columns of a matrix.
      groups: Groups of rows.
      matrices: Matrices in the stack.
      dtype: Type of rows and weights.
      is_transposed: Whether matrices have their columns first.
    """

    arrays: int
    inputs: int
    columns: int
    groups: int = 1152
    matrices: int = 48 * 128
    dtype: str = "bfloat16"
    is_transposed: bool = False

    @property
    def threads(self) -> int:
        """Threads per multiprocessor that the kernel assumes."""
        return 3 * 128

    def program(self) -> Program:
        """Returns the products as a function of arrays, and their shapes."""
        from sketchwalk_jax.pallas_kernels.expert_matmul.grouped_matmul import (
            grouped_matmul_kernel,
        )

        def multiply(rows: Any, weights: Any, matrix: Any, used: Any) -> Any:
            options = {"is_transposed": self.is_transposed}
            return grouped_matmul_kernel(rows, weights, matrix, used, **options)

        sizes = self.inputs, self.columns
        sizes = sizes[::-1] if self.is_transposed else sizes
        weights = jax.ShapeDtypeStruct((self.matrices, *sizes), self.dtype)
        return multiply, (
            jax.ShapeDtypeStruct((self.groups, 128, self.inputs), self.dtype),
            [weights] * self.arrays,
            jax.ShapeDtypeStruct((self.groups,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceCase:
    """The experts of a few tokens."""

    tokens: int
    inputs: int
    experts: int
    chosen: int
    parts: int = 8

    threads = 128

    def program(self) -> Program:
        """Returns the choice as a function of arrays, and their shapes."""
        from sketchwalk_jax.pallas_kernels.expert_matmul.choose_experts import (
            choose_experts_kernel,
        )

        def choose(x: Any, parts: Any, layer: Any, is_token: Any) -> Any:
            sizes: dict[str, Any] = {"chosen": self.chosen, "eps": 1e-6, "sums_chosen": True}
            return choose_experts_kernel(x, parts, layer, is_token, **sizes)

        return choose, (
            jax.ShapeDtypeStruct((self.tokens, self.inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.parts, self.tokens, self.experts), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((self.tokens,), jnp.int8),
        )


# The experts of Qwen3-30B-A3B, whole and shared by two or four GPUs: all widths of tiles.
CHOICES = (
    ChoiceCase(tokens=1, inputs=2048, experts=128, chosen=8),
    ChoiceCase(tokens=32, inputs=7168, experts=512, chosen=10),
)
COMPILED: dict[str, tuple[Any, ...]] = {
    "8.0": CHOICES,
    "9.0": (
        GroupedCase(arrays=2, inputs=2048, columns=768),
        GroupedCase(arrays=1, inputs=768, columns=2048),
        GroupedCase(arrays=2, inputs=2048, columns=192, dtype="float16"),
        GroupedCase(arrays=1, inputs=2048, columns=384, dtype="float16"),
        GroupedCase(arrays=1, inputs=192, columns=128),
        GroupedCase(arrays=1, inputs=64, columns=64),
        GroupedCase(arrays=2, inputs=2048, columns=768, matrices=128, is_transposed=True),
        GroupedCase(arrays=1, inputs=768, columns=2048, matrices=128, is_transposed=True),
        *CHOICES,
    ),
}
