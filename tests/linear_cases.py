"""Shapes of matrix products of few rows, and of the mlp's quantised rows, that tests compile."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from cases import NUM_LAYERS, Program

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearKernelCase:
    """Rows times one layer of stacked weights.

    Attributes:
      rows: Rows.
      inputs: Their width.
      columns: Columns of each array of weights.
      is_transposed: Whether they are `[L, F, D]`.
      has_norm: Whether the rows go through a norm.
      dtype: Of the weights; uint8 for four bits.
      kernels: `"hopper"`, or `"ampere"` for the kernel that every GPU from Ampere on runs.
    """

    rows: int
    inputs: int
    columns: tuple[int, ...]
    is_transposed: bool = False
    has_norm: bool = False
    dtype: str = "bfloat16"
    kernels: str = "hopper"

    def __str__(self) -> str:
        """The name of the case."""
        columns = "+".join(map(str, self.columns))
        kind = " transposed" if self.is_transposed else ""
        kind += " with a norm" if self.has_norm else ""
        return f"linear in {self.dtype}, {self.rows}x{self.inputs} to {columns}{kind}"

    @property
    def is_wide(self) -> bool:
        """Whether weights have the type of the rows."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def num_products(self) -> int | None:
        """Products of the tensor cores in the code, if rows are multiplied in eight bits."""
        from sketchwalk_jax.pallas_kernels import linear

        if self.is_wide:
            return None
        _, (x, _, _, weights, _) = self.program()
        options = {"has_norm": self.has_norm, "is_transposed": self.is_transposed}
        tiling = linear.tile(x, weights, **options)
        return tiling.depth // 32 if tiling.has_digits else None

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The products."""
        from sketchwalk_jax.pallas_kernels.ampere_linear import ampere_linear
        from sketchwalk_jax.pallas_kernels.linear import linear_kernel

        kernel = ampere_linear if self.kernels == "ampere" else linear_kernel
        of_rows = self.dtype if self.is_wide else "bfloat16"

        def multiply(x: Any, layer: Any, scale: Any, kernels: Any, weight_scales: Any) -> Any:
            options: dict[str, Any] = {"scale": scale, "eps": 1e-5} if self.has_norm else {}
            options |= {"is_transposed": self.is_transposed, "weight_scales": weight_scales}
            return kernel(x, kernels, layer, **options)

        def array(*shape: int, dtype: str = of_rows) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def weights(width: int) -> jax.ShapeDtypeStruct:
            stored = self.inputs // 2 if self.dtype == "uint8" else self.inputs
            own = (width, stored) if self.is_transposed else (stored, width)
            return array(NUM_LAYERS, *own, dtype=self.dtype)

        scales = None
        if self.dtype == "uint8":
            scales = [
                array(NUM_LAYERS, self.inputs // WEIGHT_GROUP, width) for width in self.columns
            ]
        elif not self.is_wide:
            scales = [array(NUM_LAYERS, width, dtype="float32") for width in self.columns]
        return multiply, (
            array(self.rows, self.inputs),
            array(dtype="int32"),
            array(NUM_LAYERS, self.inputs),
            [weights(width) for width in self.columns],
            scales,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRowsCase:
    """Rows of a gated mlp in eight bits, of their products."""

    rows: int
    columns: int

    def __str__(self) -> str:
        """The name of the case."""
        return f"gated rows {self.rows}x{self.columns}"

    @property
    def threads(self) -> int:
        """Threads of a multiprocessor that the kernel counts on."""
        from sketchwalk_jax.pallas_kernels import gated_rows

        return gated_rows._WARPGROUPS * 128

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The rows and their scales."""
        from sketchwalk_jax.pallas_kernels.gated_rows import gated_rows_kernel

        products = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.bfloat16)
        of_rows, of_columns = (
            jax.ShapeDtypeStruct((size,), jnp.float32) for size in products.shape
        )
        return gated_rows_kernel, (products, products, of_rows, of_columns, of_columns)


# The shapes of the table of code for GPUs from Ampere on: few rows and as many as there may be;
# several arrays; widths of a 0.5B, an 8B and a 70B model.
CODE_SHAPES = (
    LinearKernelCase(rows=1, inputs=4096, columns=(4096, 1024, 1024), kernels="ampere"),
    LinearKernelCase(rows=1, inputs=14336, columns=(4096,), kernels="ampere"),
    LinearKernelCase(rows=8, inputs=896, columns=(4864, 4864), dtype="float16", kernels="ampere"),
    LinearKernelCase(rows=32, inputs=8192, columns=(28672, 28672), kernels="ampere"),
)
# By GPU. On Hopper every type of weights with each way to multiply them: up to eight rows of narrow
# weights are multiplied as digits, of which a single row has room for twice as many inputs.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        LinearKernelCase(rows=1, inputs=4096, columns=(4096, 1024, 1024), has_norm=True),
        LinearKernelCase(rows=3, inputs=576, columns=(576, 192, 192)),
        LinearKernelCase(rows=24, inputs=14336, columns=(4096,)),
        LinearKernelCase(rows=64, inputs=3584, columns=(18944, 18944), has_norm=True),
        LinearKernelCase(rows=1, inputs=2048, columns=(128256,), is_transposed=True, has_norm=True),
        LinearKernelCase(rows=64, inputs=896, columns=(151936,), is_transposed=True),
        *(
            LinearKernelCase(**shape, is_transposed=True, dtype=dtype)
            for dtype in ("float8_e4m3fn", "int8", "uint8")
            for shape in (
                {"rows": 1, "inputs": 4096, "columns": (4096, 1024, 1024), "has_norm": True},
                {"rows": 8, "inputs": 4096, "columns": (14336, 14336), "has_norm": True},
                {"rows": 24, "inputs": 14336, "columns": (4096,)},
                {"rows": 64, "inputs": 3584, "columns": (18944, 18944), "has_norm": True},
            )
        ),
        LinearKernelCase(rows=3, inputs=14336, columns=(4096,), is_transposed=True, dtype="uint8"),
        *(
            GatedRowsCase(rows=rows, columns=columns)
            for rows, columns in ((131072, 14336), (7, 64), (8192, 28672))
        ),
    ),
    "8.0": (
        *CODE_SHAPES,
        dataclasses.replace(CODE_SHAPES[2], has_norm=True, dtype="bfloat16"),
    ),
    "10.0": CODE_SHAPES[3:],
    "12.0": CODE_SHAPES[3:],
}
