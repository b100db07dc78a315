"""Shapes for kernels of top-k lists, and of the printed rule's sketch and walk, to compile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from cases import Program

from sketchwalk_jax.selection import block_budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKCase:
    """Top-τ selection and compaction of given scores."""

    num_blocks: int
    num_rows: int = 1
    batch: int = 1
    density: float = 0.1

    def program(self) -> Program:
        """Returns the kernel as a function of arrays only, and their shapes."""
        from sketchwalk_jax.pallas_kernels.top_k.select import select_blocks_kernel

        budget = block_budget(self.num_blocks, density=self.density, sink_blocks=1)
        forced = {"sink_blocks": 1, "local_blocks": 1}
        select = functools.partial(
            select_blocks_kernel, **forced, max_count=int(budget[-1]), block_size=64
        )
        shape = (self.batch, self.num_rows)
        scores = jax.ShapeDtypeStruct((*shape, self.num_blocks), jnp.float32)
        return select, (scores, *(jax.ShapeDtypeStruct(shape, jnp.int32) for _ in range(2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSumsCase:
    """Sums of queries and keys over blocks."""

    heads: tuple[int, int]
    head_dim: int
    tokens: int = 16384
    sketch_dim: int = 64
    block_size: int = 64
    dtype: str = "bfloat16"

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


# A row that does not fit in registers.
LONGEST = TopKCase(num_blocks=65536)
# Cases by GPU. Only Hopper has kernels for the printed rule's sketch and walk.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        TopKCase(num_blocks=5, num_rows=5, density=0.2),
        TopKCase(num_blocks=1000, num_rows=300, batch=2, density=0.2),
        TopKCase(num_blocks=8192, num_rows=8192),
        TopKCase(num_blocks=16384),
        LONGEST,
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
        TopKCase(num_blocks=200, num_rows=2, density=1.0),
        TopKCase(num_blocks=8192, num_rows=8192),
    ),
    "12.0": (TopKCase(num_blocks=16384),),
}
