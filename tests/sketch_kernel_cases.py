"""Shapes at which the kernels of sketches and of decoding's selection must compile."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSumsCase:
    """Sums of queries and keys over blocks."""

    heads: tuple[int, int]
    head_dim: int
    tokens: int = 16384
    num_groups: int = 1
    sketch_dim: int = 64
    block_size: int = 64
    dtype: str = "bfloat16"
    op: str = "block_sums"

    def __str__(self) -> str:
        """Names the case in test ids."""
        heads = "x".join(map(str, self.heads))
        return (
            f"block_sums-{heads}-H{self.head_dim}-T{self.tokens}-groups{self.num_groups}"
            f"-R{self.sketch_dim}-block{self.block_size}-{self.dtype}"
        )

    def program(self) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.block_sums import block_sums_kernel
        from sketchwalk_jax.sketch import srht_matrix

        function = functools.partial(
            block_sums_kernel,
            num_groups=self.num_groups,
            is_mean=self.num_groups == 1,
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
    num_groups: int = 1
    sketch_dim: int = 64
    power: int = 8
    op: str = "select_token"

    def __str__(self) -> str:
        """Names the case in test ids."""
        return (
            f"select_token-J{self.num_blocks}-B{self.batch}-groups{self.num_groups}"
            f"-R{self.sketch_dim}-power{self.power}"
        )

    def program(self) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        """The kernels as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select_decode import select_token_kernel

        function = functools.partial(
            select_token_kernel,
            head_dim=128,
            power=self.power,
            sink_blocks=1,
            local_blocks=1,
            max_count=max(2, self.num_blocks // 10),
        )
        sketch = (self.num_groups, self.sketch_dim)
        sums = (self.batch, self.num_blocks, *sketch)
        floats = [(self.batch, *sketch), sums, sums, (self.batch, 1, self.num_blocks)]
        integers: list[tuple[int, ...]] = [(), (self.batch,), (self.batch, 1)]
        return function, (
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSelectionCase:
    """What follows the walk's product in a prompt."""

    num_blocks: int
    num_parts: int = 1
    has_tail: bool = False
    op: str = "select_prompt"

    def __str__(self) -> str:
        """Names the case in test ids."""
        tail = "-tail" if self.has_tail else ""
        return f"select_prompt-J{self.num_blocks}-parts{self.num_parts}{tail}"

    def program(self) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select_prompt import select_prompt_kernel
        from sketchwalk_jax.selection import block_budget

        budget = block_budget(self.num_blocks, density=0.1, sink_blocks=1, local_blocks=1)

        def select(product: Any, weights: Any, scores: Any, start: Any, layers: Any) -> Any:
            tail = start + 1 if self.has_tail else None
            arrays = (product, weights, scores, start, tail, layers, budget)
            return select_prompt_kernel(*arrays, sink_blocks=1, local_blocks=1)

        square = (1, self.num_blocks, self.num_blocks)
        floats, integers = [(self.num_parts, *square), square, square], [(1,), ()]
        return select, (
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkOperandsCase:
    """What precedes the walk's product in a prompt."""

    num_blocks: int
    num_rows: int
    power: int = 8
    op: str = "walk_operands"

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"walk_operands-J{self.num_blocks}-I{self.num_rows}-power{self.power}"

    def program(self) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select_prompt import walk_operands_kernel

        function = functools.partial(
            walk_operands_kernel,
            power=self.power,
            rectify=self.power % 2 == 1,
        )
        shapes = [(1, self.num_blocks, self.num_blocks), (1, self.num_blocks)]
        shapes.append((1, self.num_rows, self.num_blocks))
        return function, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


SketchCase = BlockSumsCase | TokenSelectionCase | PromptSelectionCase | WalkOperandsCase
SKETCH_CASES: tuple[SketchCase, ...] = (
    *(
        BlockSumsCase(heads=heads, head_dim=head_dim, dtype=dtype)
        for heads, head_dim, dtype in (
            ((32, 8), 128, "bfloat16"),
            ((28, 4), 128, "float16"),
            ((32, 8), 64, "bfloat16"),
            ((14, 2), 64, "float16"),
        )
    ),
    BlockSumsCase(heads=(32, 8), head_dim=128, num_groups=8),
    BlockSumsCase(heads=(32, 8), head_dim=128, block_size=16),
    BlockSumsCase(heads=(32, 8), head_dim=128, tokens=131072),
    BlockSumsCase(heads=(32, 8), head_dim=128, sketch_dim=128),
    *(TokenSelectionCase(num_blocks=blocks) for blocks in (5, 256, 1024, 2048, 8192, 16384)),
    *(PromptSelectionCase(num_blocks=blocks) for blocks in (5, 1500, 2048, 8192)),
    PromptSelectionCase(num_blocks=256, num_parts=4, has_tail=True),
    *(WalkOperandsCase(num_blocks=blocks, num_rows=blocks) for blocks in (5, 256, 2048, 8192)),
    WalkOperandsCase(num_blocks=1500, num_rows=64, power=7),
    TokenSelectionCase(num_blocks=512, batch=128, power=4),
    TokenSelectionCase(num_blocks=1024, num_groups=8, sketch_dim=32, power=1),
)
