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

    def program(self) -> Program:
        """Returns a prompt's page scores, or a token's list and scores."""
        policy, kernels, blocks = RecommendedConfig(), KernelConfig(), self.blocks
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
            return policy.page_scores(
                queries, codes, span.rows(64), kv_lengths=lengths, scale=0.1, kernel_config=kernels
            )

        tokens = 1 if self.count is None else 64 * blocks
        query = jax.ShapeDtypeStruct((self.batch, tokens, self.heads, self.head_dim), jnp.bfloat16)
        arguments = (query, codes, jax.ShapeDtypeStruct((self.batch,), jnp.int32))
        return select if self.count is None else score, arguments


class WholePrompt:
    """A prompt's whole selection by the default policy, in one layer of the 8B shape."""

    @staticmethod
    def program() -> Program:
        """Returns lists and page scores from queries and keys."""
        policy, blocks = RecommendedConfig(), 256
        shape = LayerShape(32, 8, 128, jnp.bfloat16)

        def select(query: Any, key: Any, lengths: Any) -> Any:
            valid = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
            how: dict[str, Any] = {"span": span, "kernel_config": KernelConfig()}
            codes = policy.init_statistics(shape, batch=1, num_blocks=blocks)
            codes = policy.update_statistics(query, key, codes, **how)
            walk = policy.init_walk(batch=1, num_rows=blocks, num_blocks=blocks)
            layer = jnp.zeros((), jnp.int32)
            return policy.select(query, key[None], codes, walk, layer=layer, **how)

        heads = (shape.num_heads, shape.num_kv_heads)
        query, key = (jax.ShapeDtypeStruct((1, 64 * blocks, n, 128), jnp.bfloat16) for n in heads)
        return select, (query, key, jax.ShapeDtypeStruct((1,), jnp.int32))


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
        Prompt(heads=2, kv_heads=1, head_dim=64, count=8),
        Prompt(heads=8, kv_heads=1, head_dim=64, count=8, blocks=2048),
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
