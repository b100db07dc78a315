"""Shapes for writing new tokens, quantized keys and the cache, which tests compile."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from cases import LAYER, NUM_LAYERS, Program

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.key_quantization import api
from sketchwalk_jax.policies.base import LayerShape, Span, TokenWrite
from sketchwalk_jax.policies.recommended import RecommendedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyCodesCase:
    """Quantizes keys of a prompt, or of one token of each sequence (`rows` of 0)."""

    kv_heads: int
    head_dim: int
    rows: int = 0
    batch: int = 1
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        what = f"{self.rows} rows" if self.rows else "a token"
        return f"codes {self.kv_heads} of {self.head_dim}, {what}, {self.batch}, {self.dtype}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns all layers' statistics, with the keys added to one layer."""
        policy, kernels = RecommendedConfig(), kernel_config or KernelConfig()
        shape = LayerShape(self.kv_heads, self.kv_heads, self.head_dim, jnp.dtype(self.dtype))

        def empty() -> Any:
            codes = policy.init_statistics(shape, batch=self.batch, num_blocks=self.rows + 5)
            return jax.tree.map(lambda x: jnp.stack([x] * NUM_LAYERS), codes)

        def observe(key: Any, codes: Any, valid: Any, end: Any) -> Any:
            layer = jnp.asarray(LAYER, jnp.int32)
            span = Span(jnp.maximum(0, end // 64 - self.rows), valid, end, end)
            found = policy.in_place.observe(
                key, codes, layer=layer, span=span, kernel_config=kernels
            )
            assert found is not None
            return found[0]

        tokens = 64 * self.rows or 1
        key = (self.batch, tokens, self.kv_heads, self.head_dim)
        return observe, (
            jax.ShapeDtypeStruct(key, self.dtype),
            jax.eval_shape(empty),
            jax.ShapeDtypeStruct(key[:2], jnp.bool_),
            jax.ShapeDtypeStruct(key[:1], jnp.int32),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainCodesCase:
    """Quantizes as `KeyCodesCase` does, in plain JAX."""

    def program(self) -> Program:
        """Returns quantized keys, zero points and scales of blocks."""
        from sketchwalk_jax.policies.block_codes import encode

        key = jax.ShapeDtypeStruct((3, 4, 64, 2, 32), jnp.bfloat16)
        return encode, (key, jax.ShapeDtypeStruct(key.shape[:3], jnp.bool_))


plain_codes = PlainCodesCase()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenWriteCase:
    """Writes one token of each sequence to the caches, with or without quantized keys."""

    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "bfloat16"
    has_codes: bool = False

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        what = "coded and written" if self.has_codes else "written"
        return f"token {what}, {self.kv_heads} of {self.head_dim}, {self.batch}, {self.dtype}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns all layers' caches and quantized keys, with the token in one layer."""
        policy, kernels = RecommendedConfig(), kernel_config or KernelConfig()
        shape = LayerShape(self.kv_heads, self.kv_heads, self.head_dim, jnp.dtype(self.dtype))

        def empty() -> Any:
            codes = policy.init_statistics(shape, batch=self.batch, num_blocks=5)
            return jax.tree.map(lambda x: jnp.stack([x] * NUM_LAYERS), codes)

        def write(key: Any, value: Any, keys: Any, values: Any, codes: Any, end: Any) -> Any:
            layer, span = jnp.asarray(LAYER, jnp.int32), Span.of_tokens(end - 1, 64)
            new = TokenWrite(value, keys, values, layer)
            if self.has_codes:
                found = policy.in_place.observe(
                    key, codes, layer=layer, span=span, kernel_config=kernels, write=new
                )
            else:
                found = api.write_token(key, new, span=span, kernel_config=kernels)
            assert found is not None
            return found

        token = jax.ShapeDtypeStruct((self.batch, 1, self.kv_heads, self.head_dim), self.dtype)
        size = (NUM_LAYERS, self.batch, 320, self.kv_heads, self.head_dim)
        cache, end = (jax.ShapeDtypeStruct(size, self.dtype), (self.batch,))
        codes = jax.eval_shape(empty)
        return write, (token, token, cache, cache, codes, jax.ShapeDtypeStruct(end, jnp.int32))


# Cases by GPU.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        KeyCodesCase(kv_heads=8, head_dim=128, rows=256),
        KeyCodesCase(kv_heads=3, head_dim=64, rows=1, batch=3),
        KeyCodesCase(kv_heads=4, head_dim=128, rows=7, dtype="float16"),
        KeyCodesCase(kv_heads=8, head_dim=128),
        KeyCodesCase(kv_heads=3, head_dim=64, batch=32, dtype="float16"),
        TokenWriteCase(kv_heads=3, head_dim=128, dtype="float32"),
        TokenWriteCase(kv_heads=8, head_dim=128, has_codes=True),
        TokenWriteCase(kv_heads=3, head_dim=64, batch=32, dtype="float16", has_codes=True),
    ),
    "8.0": (
        KeyCodesCase(kv_heads=4, head_dim=128, rows=7, dtype="float16"),
        TokenWriteCase(kv_heads=2, head_dim=64, batch=64),
        TokenWriteCase(kv_heads=8, head_dim=128, has_codes=True),
    ),
    "12.0": (KeyCodesCase(kv_heads=8, head_dim=128, rows=256),),
}
