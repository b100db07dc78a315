"""Shapes of decode matmuls and of the mlp's quantized rows, which tests compile."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from cases import NUM_LAYERS, Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCase:
    """A decode matmul: rows times one layer of stacked weights, or groups of rows times several.

    Attributes:
      rows: Number of rows, of each group if there are groups.
      inputs: Width of the rows.
      columns: Columns of each array of weights.
      has_norm: Whether the kernel normalizes the rows first.
      dtype: Type of the weights: 16 bits, `[L, D, F]`, for the kernel for GPUs from Ampere on; or
        eight bits, `[L, F, D]`, for Hopper's.
      groups: Number of groups of rows, or 0 for rows that all have one layer.
    """

    rows: int
    inputs: int
    columns: tuple[int, ...]
    has_norm: bool = False
    dtype: str = "bfloat16"
    groups: int = 0

    @property
    def is_wide(self) -> bool:
        """Whether weights have the type of the rows."""
        return self.dtype in ("bfloat16", "float16")

    def program(self) -> Program:
        """Returns the products as a function of arrays, and their shapes."""
        from sketchwalk_jax.pallas_kernels.decode_matmul.decode_matmul import decode_matmul_kernel
        from sketchwalk_jax.pallas_kernels.decode_matmul.groups import Groups
        from sketchwalk_jax.pallas_kernels.decode_matmul.hopper import hopper_decode_matmul_kernel

        kernel = decode_matmul_kernel if self.is_wide else hopper_decode_matmul_kernel
        of_rows = self.dtype if self.is_wide else "bfloat16"

        def multiply(x: Any, layer: Any, scale: Any, kernels: Any, weight_scales: Any) -> Any:
            options: dict[str, Any] = {"scale": scale, "eps": 1e-5} if self.has_norm else {}
            options |= {} if self.is_wide else {"weight_scales": weight_scales}
            return kernel(x, kernels, layer, **options)

        def array(*shape: int, dtype: str = of_rows) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def weights(width: int) -> jax.ShapeDtypeStruct:
            own = (self.inputs, width) if self.is_wide else (width, self.inputs)
            return array(NUM_LAYERS, *own, dtype=self.dtype)

        scales = None
        if not self.is_wide:
            scales = [array(NUM_LAYERS, width, dtype="float32") for width in self.columns]
        layer: Any = array(dtype="int32")
        if self.groups:
            layer = Groups(array(self.groups, dtype="int32"), layer)
        return multiply, (
            array(*[self.groups] * bool(self.groups), self.rows, self.inputs),
            layer,
            array(NUM_LAYERS, self.inputs),
            [weights(width) for width in self.columns],
            scales,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwigluCase:
    """The mlp's SwiGLU of products, quantized to eight bits by row."""

    rows: int
    columns: int

    @property
    def threads(self) -> int:
        """Threads per multiprocessor that the kernel assumes."""
        from sketchwalk_jax.pallas_kernels.decode_matmul import swiglu_quantize

        return swiglu_quantize._WARPGROUPS * 128

    def program(self) -> Program:
        """Returns the quantized rows and their scales as a function of arrays, and their shapes."""
        from sketchwalk_jax.pallas_kernels.decode_matmul.swiglu_quantize import (
            swiglu_quantize_kernel,
        )

        products = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.bfloat16)
        of_rows, of_columns = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in products.shape)
        return swiglu_quantize_kernel, (products, products, of_rows, of_columns, of_columns)


# Shapes of the table of machine code for GPUs from Ampere on: few rows and the most; one and
# several arrays; widths of a 0.5B, an 8B and a 70B model.
CODE_SHAPES = (
    LinearCase(rows=1, inputs=4096, columns=(4096, 1024, 1024)),
    LinearCase(rows=1, inputs=14336, columns=(4096,)),
    LinearCase(rows=8, inputs=896, columns=(4864, 4864), dtype="float16"),
    LinearCase(rows=32, inputs=8192, columns=(28672, 28672)),
)
# The experts of one token, and of several.
GROUPS = (
    LinearCase(groups=8, rows=1, inputs=2048, columns=(768, 768)),
    LinearCase(groups=160, rows=8, inputs=768, columns=(2048,)),
)
# Cases by GPU. Hopper gets each eight-bit type with each way to multiply: up to eight rows are
# multiplied as an operand split, and for a single row twice as many inputs fit.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        *CODE_SHAPES,
        *GROUPS,
        *(
            dataclasses.replace(case, dtype=dtype)
            for case in GROUPS
            for dtype in ("float8_e4m3fn", "int8")
        ),
        *(
            LinearCase(**shape, dtype=dtype)
            for dtype in ("float8_e4m3fn", "int8")
            for shape in (
                {"rows": 1, "inputs": 4096, "columns": (4096, 1024, 1024), "has_norm": True},
                {"rows": 8, "inputs": 4096, "columns": (14336, 14336), "has_norm": True},
                {"rows": 24, "inputs": 14336, "columns": (4096,)},
                {"rows": 64, "inputs": 3584, "columns": (18944, 18944), "has_norm": True},
            )
        ),
        *(
            SwigluCase(rows=rows, columns=columns)
            for rows, columns in ((131072, 14336), (7, 64), (8192, 28672))
        ),
    ),
    "8.0": (
        *CODE_SHAPES,
        *GROUPS,
        dataclasses.replace(CODE_SHAPES[2], has_norm=True, dtype="bfloat16"),
    ),
    "10.0": CODE_SHAPES[3:],
    "12.0": CODE_SHAPES[3:],
}
