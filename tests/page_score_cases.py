"""Shapes for the recommended policy's kernels of page scores and lists, which tests compile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from cases import Program

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.recommended import RecommendedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageScoresCase:
    """The kernels that select for the recommended policy.

    In prefill they turn queries into page scores, with `count` representatives per query block. In
    decode they turn a token's queries into its list.
    """

    heads: int
    kv_heads: int
    head_dim: int
    count: int | None = None
    blocks: int = 40
    batch: int = 1

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        what = "a token" if self.count is None else f"{self.count} queries"
        what += f", {self.batch} sequences" if self.batch > 1 else ""
        return f"scores {self.heads}/{self.kv_heads} of {self.head_dim}, {what}, {self.blocks}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns a prompt's page scores, or a token's list and scores."""
        policy, kernels, blocks = RecommendedConfig(), kernel_config or KernelConfig(), self.blocks
        shape = LayerShape(self.heads, self.kv_heads, self.head_dim, jnp.bfloat16)
        make = functools.partial(policy.init_statistics, shape, batch=self.batch, num_blocks=blocks)
        codes = jax.eval_shape(make)

        def select(query: Any, codes: Any, lengths: Any) -> Any:
            walk = policy.init_walk(batch=self.batch, num_rows=1, num_blocks=blocks)
            key_shape = (1, self.batch, 1, self.kv_heads, self.head_dim)
            key = jnp.zeros(key_shape, query.dtype)  # not read
            span, layer = Span.of_tokens(lengths - 1, 64), jnp.zeros((), jnp.int32)
            return policy.select(
                query, key, codes, walk, layer=layer, span=span, kernel_config=kernels
            )

        def score(query: Any, codes: Any, lengths: Any) -> Any:
            valid = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
            queries = policy.represent(query, valid, self.count, kernel_config=kernels)
            return policy.evidence(
                queries, codes, span.rows(64), kv_lengths=lengths, scale=0.1, kernel_config=kernels
            )

        tokens = 1 if self.count is None else 64 * blocks
        query = jax.ShapeDtypeStruct((self.batch, tokens, self.heads, self.head_dim), jnp.bfloat16)
        arguments = (query, codes, jax.ShapeDtypeStruct((self.batch,), jnp.int32))
        return select if self.count is None else score, arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLogitsCase:
    """Page max logits and page scores from quantized keys, on Hopper.

    Attributes:
      per_row: Queries per query block and key/value head, from `queries_per_row`.
      channels: Channels that enter the logits.
      blocks: Number of key blocks.
    """

    per_row: int
    channels: int
    blocks: int = 64

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        return f"logits of {self.channels} channels, {self.per_row} queries, {self.blocks}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns sums of powers of the pages' shares of attention."""
        from sketchwalk_jax.pallas_kernels.page_scores import hopper as kernel
        from sketchwalk_jax.pallas_kernels.page_scores.hopper_dequantize import (
            dequantize_kernel,
        )

        kv_heads, rows = 2, max(1, kernel.TILE // self.per_row)
        interpret = kernel_config is not None and kernel_config.interpret
        where: dict[str, Any] = {"interpret": interpret}

        def score(query: Any, code: Any, step: Any, centre: Any, layer: Any, lengths: Any) -> Any:
            key = dequantize_kernel(code, step, layer=layer, lengths=lengths, **where)
            own = where | {"first_row": lengths // 64, "per_row": self.per_row}
            peaks = kernel.hopper_max_logits_kernel(query, key, wanted=self.per_row, **own)
            return kernel.hopper_page_scores_kernel(
                *peaks, query, centre, scale=0.1, exponent=8, **own
            )

        size = (1, self.blocks)
        shapes = [((1, kv_heads, rows * self.per_row, self.channels), jnp.bfloat16)]
        shapes.append(((1, *size, kv_heads, 64, self.channels // 2), jnp.uint8))
        shapes.append(((1, *size, kv_heads, self.channels), jnp.int8))
        shapes.append(((*size, kv_heads, self.channels), jnp.bfloat16))
        shapes += [((), jnp.int32), ((1,), jnp.int32)]
        return score, tuple(jax.ShapeDtypeStruct(*one) for one in shapes)


@dataclasses.dataclass(frozen=True)
class WholePromptCase:
    """A prompt's whole selection by the default policy, in one layer of the 8B shape."""

    blocks: int = 256

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns lists and page scores from queries and keys."""
        policy, kernels = RecommendedConfig(), kernel_config or KernelConfig()
        shape = LayerShape(32, 8, 128, jnp.bfloat16)

        def select(query: Any, key: Any, lengths: Any) -> Any:
            valid = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
            how: dict[str, Any] = {"span": span, "kernel_config": kernels}
            codes = policy.init_statistics(shape, batch=1, num_blocks=self.blocks)
            codes = policy.observe(query, key, codes, **how)
            walk = policy.init_walk(batch=1, num_rows=self.blocks, num_blocks=self.blocks)
            layer = jnp.zeros((), jnp.int32)
            return policy.select(query, key[None], codes, walk, layer=layer, **how)

        heads = (shape.num_heads, shape.num_kv_heads)
        query, key = (
            jax.ShapeDtypeStruct((1, 64 * self.blocks, n, 128), jnp.bfloat16) for n in heads
        )
        return select, (query, key, jax.ShapeDtypeStruct((1,), jnp.int32))


whole_prompt = WholePromptCase()
Prompt = Token = functools.partial(PageScoresCase, heads=32, kv_heads=8, head_dim=128)
# Shapes of prompts in the table of machine code for GPUs from Ampere on.
CODE_SHAPES = (
    Prompt(count=8, blocks=256),
    Prompt(heads=14, kv_heads=2, head_dim=64, count=4, blocks=2048),
)
# Cases by GPU. Hopper and 8.0 get prompts with each number of queries per query block, and tokens
# whose heads' scores one thread block or many add up.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        *CODE_SHAPES,
        Prompt(heads=28, kv_heads=4, count=32, blocks=45),
        Prompt(heads=2, kv_heads=2, head_dim=64, count=8),
        Prompt(head_dim=64, count=32),
        Prompt(heads=9, kv_heads=3, head_dim=64, count=8, blocks=45),
        PageLogitsCase(per_row=16, channels=32),
        PageLogitsCase(per_row=64, channels=32, blocks=2048),
        Token(blocks=256),
        Token(heads=3, kv_heads=3, head_dim=64, blocks=1),
        Token(heads=28, kv_heads=4, blocks=512),
        Token(head_dim=64, blocks=2048),
        Token(heads=64, blocks=4096),
        Token(blocks=1024, batch=8),
        Token(heads=14, kv_heads=2, head_dim=64, blocks=45),
        Token(blocks=63),
    ),
    "8.0": (
        *CODE_SHAPES,
        Prompt(heads=28, kv_heads=4, count=32, blocks=45),
        Prompt(heads=9, kv_heads=3, head_dim=64, count=8, blocks=45),
        Token(blocks=256),
        Token(heads=3, kv_heads=3, head_dim=64, blocks=1),
        Token(heads=64, blocks=4096),
        Token(heads=14, kv_heads=2, head_dim=64, blocks=45),
    ),
    "8.6": (*CODE_SHAPES[:1], Token(heads=64, blocks=4096)),
    "8.9": (Token(blocks=256),),
    "10.0": (*CODE_SHAPES[:1], Token(blocks=256)),
    "12.0": (*CODE_SHAPES[:1], Token(blocks=256)),
}
