"""Shapes for writing new tokens, quantized keys and the cache, which tests compile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from cases import LAYER, NUM_LAYERS, Program

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.key_quantization import api
from sketchwalk_jax.policies.base import LayerShape, Span, TokenWrite
from sketchwalk_jax.policies.recommended import RecommendedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteCase:
    """Quantizes keys of a prompt or of a token of each sequence, and writes a token to the caches.

    Attributes:
      kv_heads: Key/value heads.
      head_dim: Features per head.
      rows: Blocks of the prompt, or 0 for a token.
      batch: Number of sequences.
      dtype: Type of keys and values.
      has_codes: Whether keys are quantized.
      has_cache: Whether the token is written to the caches.
    """

    kv_heads: int
    head_dim: int
    rows: int = 0
    batch: int = 1
    dtype: str = "bfloat16"
    has_codes: bool = True
    has_cache: bool = False

    def program(self) -> Program:
        """Returns all layers' caches and quantized keys, with the new ones in one layer."""
        policy = RecommendedConfig()
        shape = LayerShape(self.kv_heads, self.kv_heads, self.head_dim, jnp.dtype(self.dtype))

        def empty() -> Any:
            codes = policy.init_statistics(shape, batch=self.batch, num_blocks=self.rows + 5)
            return jax.tree.map(lambda x: jnp.stack([x] * NUM_LAYERS), codes)

        def write(key: Any, keys: Any, values: Any, codes: Any, valid: Any, end: Any) -> Any:
            layer, kernels = jnp.asarray(LAYER, jnp.int32), KernelConfig()
            span = Span(jnp.maximum(0, end // 64 - self.rows), valid, end, end)
            span = span if self.rows else Span.of_tokens(end - 1, 64)
            new = TokenWrite(key, keys, values, layer) if self.has_cache else None
            update_statistics = functools.partial(
                policy.in_place.update_statistics, layer=layer, write=new
            )
            if not self.has_codes:
                update_statistics = functools.partial(api.write_token, write=new)
            given = (key, codes) if self.has_codes else (key,)
            found = update_statistics(*given, span=span, kernel_config=kernels)
            assert found is not None
            return found if self.has_cache else found[0]

        key = (self.batch, 64 * self.rows or 1, self.kv_heads, self.head_dim)
        cache = jax.ShapeDtypeStruct((NUM_LAYERS, self.batch, 320, *key[2:]), self.dtype)
        return write, (
            jax.ShapeDtypeStruct(key, self.dtype),
            cache,
            cache,
            jax.eval_shape(empty),
            jax.ShapeDtypeStruct(key[:2], jnp.bool_),
            jax.ShapeDtypeStruct(key[:1], jnp.int32),
        )


class PlainCodes:
    """Quantizes in plain JAX."""

    @staticmethod
    def program() -> Program:
        """Returns quantized keys, zero points and scales of blocks."""
        from sketchwalk_jax.policies.quantized_keys import encode

        key = jax.ShapeDtypeStruct((3, 4, 64, 2, 32), jnp.bfloat16)
        return encode, (key, jax.ShapeDtypeStruct(key.shape[:3], jnp.bool_))


Coded = functools.partial(WriteCase, has_cache=True)
Written = functools.partial(Coded, has_codes=False)
# Cases by GPU.
COMPILED: dict[str, tuple[Any, ...]] = {
    "9.0": (
        WriteCase(kv_heads=8, head_dim=128, rows=256),
        WriteCase(kv_heads=3, head_dim=64, rows=1, batch=3),
        WriteCase(kv_heads=4, head_dim=128, rows=7, dtype="float16"),
        WriteCase(kv_heads=8, head_dim=128),
        WriteCase(kv_heads=3, head_dim=64, batch=32, dtype="float16"),
        Written(kv_heads=3, head_dim=128, dtype="float32"),
        Coded(kv_heads=8, head_dim=128),
        Coded(kv_heads=3, head_dim=64, batch=32, dtype="float16"),
    ),
    "8.0": (
        WriteCase(kv_heads=4, head_dim=128, rows=7, dtype="float16"),
        Written(kv_heads=2, head_dim=64, batch=64),
        Coded(kv_heads=8, head_dim=128),
    ),
    "12.0": (WriteCase(kv_heads=8, head_dim=128, rows=256),),
}
