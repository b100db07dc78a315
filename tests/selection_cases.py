"""Shapes for kernels of top-k lists, and of the printed rule's sketch and walk.

Tests compute `CASES` in the interpreter, in the emulator and on a GPU, `LARGE_CASES` only on a GPU.
`COMPILED` are compiled for GPUs that the machine need not have. Sketch and walk have computing
tests of their own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Program

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.selection import block_budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionKernelCase:
    """Top-τ selection and compaction of given scores.

    Attributes:
      num_blocks: Key blocks `J`.
      rows: Absolute block of the first row of each sequence.
      num_rows: Number of rows `I`.
      density: Share of causal blocks to keep.
      forced: Numbers of forced sink and local blocks.
      kind: Kind of scores: `"normal"`, `"tied"` (few values), `"equal"` (one), or `"wide"`
        (float32's whole range, both zeros included).
    """

    num_blocks: int
    num_rows: int
    rows: tuple[int, ...] = (0,)
    density: float = 0.2
    forced: tuple[int, int] = (1, 1)
    kind: str = "normal"

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        rows = ",".join(map(str, self.rows[:3]))
        sinks, local = self.forced
        return (
            f"select-J{self.num_blocks}-rows{rows}+{self.num_rows}-d{self.density:g}"
            f"-{sinks}+{local}-{self.kind}"
        )

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns the kernel as a function of arrays only, and their shapes."""
        from sketchwalk_jax.pallas_kernels.top_k.select import select_blocks_kernel

        sinks, local = self.forced
        select = functools.partial(
            select_blocks_kernel,
            sink_blocks=sinks,
            local_blocks=local,
            max_count=int(self.budget[-1]),
            block_size=64,
            interpret=kernel_config is not None and kernel_config.interpret,
        )
        shape = (len(self.rows), self.num_rows)
        scores = jax.ShapeDtypeStruct((*shape, self.num_blocks), jnp.float32)
        return select, (scores, *(jax.ShapeDtypeStruct(shape, jnp.int32) for _ in range(2)))

    @property
    def budget(self) -> np.ndarray:
        """Returns the number of blocks that each row keeps."""
        sinks, local = self.forced
        options = {"density": self.density, "sink_blocks": sinks, "local_blocks": local}
        return block_budget(self.num_blocks, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSumsCase:
    """Sums of queries and keys over blocks."""

    heads: tuple[int, int]
    head_dim: int
    tokens: int = 16384
    sketch_dim: int = 64
    block_size: int = 64
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        heads = "x".join(map(str, self.heads))
        return (
            f"block_sums-{heads}-H{self.head_dim}-T{self.tokens}"
            f"-R{self.sketch_dim}-block{self.block_size}-{self.dtype}"
        )

    def program(self) -> Program:
        """Returns the kernel as a function of arrays only, and their shapes."""
        from sketchwalk_jax.pallas_kernels.walk.block_sums import block_sums_kernel
        from sketchwalk_jax.sketch import srht_matrix

        function = functools.partial(
            block_sums_kernel,
            omega=srht_matrix(self.head_dim, self.sketch_dim),
            block_size=self.block_size,
        )
        shapes = [(1, self.tokens, heads, self.head_dim) for heads in self.heads]
        arguments = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]
        return function, (*arguments, jax.ShapeDtypeStruct((1, self.tokens), jnp.bool_))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSelectionCase:
    """Scores, walk row and list of one token per sequence."""

    num_blocks: int
    batch: int = 1
    sketch_dim: int = 64
    power: int = 8

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        return f"select_token-J{self.num_blocks}-B{self.batch}-R{self.sketch_dim}-power{self.power}"

    def program(self) -> Program:
        """Returns the kernels as a function of arrays only, and their shapes."""
        from sketchwalk_jax.pallas_kernels.walk.select_decode import select_token_kernel

        function = functools.partial(
            select_token_kernel,
            head_dim=128,
            power=self.power,
            sink_blocks=1,
            local_blocks=1,
            max_count=max(2, self.num_blocks // 10),
        )
        sketch = (1, self.sketch_dim)
        sums = (self.batch, self.num_blocks, *sketch)
        floats = [(self.batch, *sketch), sums, sums, (self.batch, 1, self.num_blocks)]
        integers: list[tuple[int, ...]] = [(), (self.batch,), (self.batch, 1)]
        return function, (
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
        )


Select = SelectionKernelCase
CASES = (
    Select(num_blocks=5, num_rows=5),
    Select(num_blocks=130, num_rows=3, rows=(0, 120), density=0.3, kind="tied"),
    Select(num_blocks=128, num_rows=1, rows=(0, 1, 63, 127), forced=(2, 3)),
    Select(num_blocks=200, num_rows=2, rows=(198,), density=1.0, kind="wide"),
    Select(num_blocks=64, num_rows=4, rows=(60,), forced=(0, 1), kind="equal"),
)
LARGE_CASES = (
    Select(num_blocks=2048, num_rows=100, rows=(0, 1948), density=0.1),
    Select(num_blocks=2048, num_rows=1, rows=(2047,) * 3, density=0.1, kind="wide"),
    Select(num_blocks=1000, num_rows=300, rows=(700, 3), kind="tied"),
    Select(num_blocks=16384, num_rows=4, rows=(16380,), density=0.1),
)
# Cases by GPU. Only Hopper has kernels for the printed rule's sketch and walk.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        Select(num_blocks=5, num_rows=5),
        Select(num_blocks=1000, num_rows=300, rows=(700, 3)),
        Select(num_blocks=8192, num_rows=8192, density=0.1),
        Select(num_blocks=16384, num_rows=1, density=0.1),
        BlockSumsCase(heads=(32, 8), head_dim=128, tokens=131072),
        BlockSumsCase(heads=(28, 4), head_dim=128, sketch_dim=128, dtype="float16"),
        BlockSumsCase(heads=(32, 8), head_dim=64, block_size=16),
        BlockSumsCase(heads=(14, 2), head_dim=64, dtype="float16"),
        TokenSelectionCase(num_blocks=5),
        TokenSelectionCase(num_blocks=512, batch=128, power=4),
        TokenSelectionCase(num_blocks=1024, sketch_dim=256, power=1),
        TokenSelectionCase(num_blocks=16384),
    ),
    "8.0": (
        Select(num_blocks=200, num_rows=2, rows=(198,), density=1.0),
        Select(num_blocks=8192, num_rows=8192, density=0.1),
    ),
    "12.0": (Select(num_blocks=16384, num_rows=1, density=0.1),),
}
