"""Whole models at real sizes, as programs that `compiling` compiles for GPUs without one.

Programs depend on the device; here a case says which GPU to assume.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sketchwalk_jax import Dense, SketchWalkConfig, init_cache
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.generation import decode_tokens, start_decoding
from sketchwalk_jax.inference.sampling import Sampling
from sketchwalk_jax.inference.steps import _read, decode_token
from sketchwalk_jax.models import transformer
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import param_shapes
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.sharding import place

_LLAMA_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    dtype="bfloat16",
)
_LLAMA_1B = dataclasses.replace(
    _LLAMA_8B,
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    head_dim=64,
    tie_word_embeddings=True,
)
_QWEN_7B = dataclasses.replace(
    _LLAMA_8B,
    model_type="qwen2",
    vocab_size=152064,
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    qkv_bias=True,
)
_QWEN_30B = dataclasses.replace(
    _LLAMA_8B,
    model_type="qwen3_moe",
    vocab_size=151936,
    num_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_kv_heads=4,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    expert_intermediate_size=768,
    norm_topk_prob=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One step of a model.

    Attributes:
      model_config: The model.
      policy: The policy that selects.
      batch: Number of sequences.
      tokens: Capacity of the cache in tokens.
      new: Prompt tokens per sequence to read, or 1 for decode.
      is_fresh: Whether the prompt is read into an empty cache.
      ranks: Number of GPUs.
      axis: Mesh axis that they form.
      weights: Type of quantized weights of linear layers, or None.
      capability: Compute capability of the GPU.
    """

    model_config: ModelConfig
    policy: Policy
    batch: int = 1
    tokens: int = 131072
    new: int = 1
    is_fresh: bool = False
    ranks: int = 1
    axis: str = "tensor"
    weights: str | None = None
    capability: str = "9.0"

    donated = (2,)  # the cache

    def program(
        self, *, config: Any = None, mesh: Any = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the step as a function of arrays, and the arrays' shapes and shardings."""
        # Tracing asks for this; each case is traced before the next one's program is made.
        dispatch._compute_capability = lambda: self.capability
        where = None if mesh is None else place(mesh, self.model_config)
        settings = Settings(model_config=self.model_config, policy=self.policy, placement=where)
        make = functools.partial(init_cache, batch=self.batch, max_tokens=self.tokens)
        cache = jax.eval_shape(lambda: make(self.model_config, self.policy, sharding=where))
        params = param_shapes(self.model_config, weights=self.weights)
        if where is not None:
            params = _place(params, where.params)
            shardings = where.cache(self.policy)
            arrays = {name: getattr(cache, name) for name in shardings}
            cache = dataclasses.replace(cache, **_place(arrays, shardings))
        if self.new > 1:
            shape = (self.batch, self.new)

            def read(params: Any, tokens: Any, cache: Any) -> Any:
                lengths = jnp.full((self.batch,), self.new, jnp.int32)
                where = {"is_fresh": self.is_fresh, "settings": settings}
                return _read(params, tokens, lengths, cache, **where)

            return read, (params, jax.ShapeDtypeStruct(shape, jnp.int32), cache)

        def decode(params: Any, tokens: Any, cache: Any) -> Any:
            active = jnp.ones(tokens.shape, bool)
            return decode_token(params, tokens, cache, active=active, settings=settings)

        return decode, (params, jax.ShapeDtypeStruct((self.batch,), jnp.int32), cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCase(ModelCase):
    """The program in `generate` that decodes tokens.

    Attributes:
      greedy_steps: As `decode_tokens` takes it.
    """

    greedy_steps: int

    donated = (1,)  # the state

    def program(
        self, *, config: Any = None, mesh: Any = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the program as a function of arrays, and the arrays' shapes."""
        _, (params, _, _) = super().program(config=config, mesh=mesh)
        settings = Settings(model_config=self.model_config, policy=self.policy)

        start = functools.partial(
            start_decoding, cache=None, capacity=self.tokens, settings=settings
        )
        tokens, lengths = jnp.zeros((self.batch, 64), jnp.int32), jnp.full(self.batch, 64)
        state, _ = jax.eval_shape(start, params, tokens, lengths, jax.random.key(0))
        options = {"num_tokens": 256, "eos_token_ids": (5,), "pad_token_id": 5}
        options |= {"settings": settings, "greedy_steps": self.greedy_steps}
        sampling, limit = jax.eval_shape(lambda: (Sampling.greedy(), jnp.int32(256)))
        return functools.partial(decode_tokens, **options), (params, state, sampling, limit)


class WidenedCase(ModelCase):
    """A step that dequantizes whole weights to bfloat16 first, which no real step may do."""

    def program(
        self, *, config: Any = None, mesh: Any = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the step of `ModelCase` with matmuls that dequantize while it is traced."""
        step, arguments = super().program(config=config, mesh=mesh)

        def widened(*arguments: Any) -> Any:
            was = transformer.multiply_quantized, transformer.multiply_gated
            transformer.multiply_quantized = _multiply_widened
            transformer.multiply_gated = _multiply_gated_widened
            try:
                return step(*arguments)
            finally:
                transformer.multiply_quantized, transformer.multiply_gated = was

        return widened, arguments


def _multiply_widened(x: Any, quantized: Any, scales: Any) -> Any:
    wide = (quantized.astype(jnp.float32) * scales[:, None]).astype(x.dtype)
    return jnp.einsum("btd,fd->btf", x, jax.lax.optimization_barrier(wide))


def _multiply_gated_widened(_: Any, x: Any, weights: Any) -> Any:
    def multiply(name: str, x: Any) -> Any:
        with jax.named_scope(name):
            return _multiply_widened(x, *weights[name])

    return multiply("down", jax.nn.silu(multiply("gate", x)) * multiply("up", x))


def _place(shapes: Any, shardings: Any) -> Any:
    """Adds shardings to shapes; one sharding may serve a whole subtree."""

    def place(sharding: Any, part: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(place, shardings, shapes)


_RECOMMENDED, _DENSE = SketchWalkConfig.recommended(density=0.1), Dense()
decode_llama_8b = ModelCase(model_config=_LLAMA_8B, policy=_RECOMMENDED)
decode_llama_8b_long = dataclasses.replace(
    decode_llama_8b,
    model_config=dataclasses.replace(_LLAMA_8B, max_position_embeddings=2**20),
    tokens=2**20,
)
decode_llama_8b_dense = ModelCase(model_config=_LLAMA_8B, policy=_DENSE)
decode_llama_8b_of_8 = ModelCase(model_config=_LLAMA_8B, policy=_RECOMMENDED, batch=8, tokens=65536)
decode_llama_8b_paper = ModelCase(
    model_config=_LLAMA_8B, policy=SketchWalkConfig.paper(density=0.1, dense_layers=2)
)
decode_llama_1b = ModelCase(model_config=_LLAMA_1B, policy=_RECOMMENDED)
generate_llama_1b = GenerateCase(**vars(decode_llama_1b), greedy_steps=4)
generate_llama_1b_drawn = GenerateCase(**vars(decode_llama_1b), greedy_steps=0)
# 8.6 has the least shared memory of the GPUs from Ampere on.
decode_llama_1b_on_ampere = dataclasses.replace(decode_llama_1b, capability="8.6")
decode_llama_1b_on_ampere_dense = dataclasses.replace(
    decode_llama_1b_on_ampere, policy=_DENSE, batch=8, tokens=16384
)
# A T4 has no kernels: everything runs on XLA.
decode_llama_1b_on_turing_dense = ModelCase(
    model_config=dataclasses.replace(_LLAMA_1B, dtype="float16"),
    policy=_DENSE,
    tokens=16384,
    capability="7.5",
)
decode_qwen_7b = ModelCase(model_config=_QWEN_7B, policy=_RECOMMENDED)
decode_qwen_7b_dense = ModelCase(model_config=_QWEN_7B, policy=_DENSE)
decode_qwen_30b = ModelCase(model_config=_QWEN_30B, policy=_RECOMMENDED)
decode_qwen_30b_float8 = dataclasses.replace(decode_qwen_30b, weights="float8")
decode_qwen_30b_of_8 = dataclasses.replace(decode_qwen_30b, batch=8, tokens=32768)
read_qwen_30b = dataclasses.replace(decode_qwen_30b, new=32768)
read_qwen_30b_float8 = dataclasses.replace(read_qwen_30b, weights="float8")
read_llama_8b = ModelCase(model_config=_LLAMA_8B, policy=_RECOMMENDED, new=32768)
read_llama_8b_float8 = dataclasses.replace(read_llama_8b, weights="float8")
# With int8, rows keep their dtype, so weights are converted; with float8 they must not be.
read_llama_8b_int8 = dataclasses.replace(read_llama_8b, weights="int8")
decode_llama_8b_float8 = dataclasses.replace(decode_llama_8b, weights="float8")
read_llama_8b_widened = WidenedCase(**vars(read_llama_8b_float8))
decode_llama_8b_on_2 = dataclasses.replace(decode_llama_8b, ranks=2)
read_llama_8b_on_2 = dataclasses.replace(read_llama_8b, ranks=2)
read_llama_8b_by_rows = dataclasses.replace(read_llama_8b_on_2, axis="sequence")
read_llama_8b_by_rows_at_once = dataclasses.replace(
    read_llama_8b_by_rows, new=131072, is_fresh=True
)
decode_llama_8b_by_blocks = dataclasses.replace(decode_llama_8b_on_2, axis="sequence")
read_llama_8b_dense = ModelCase(model_config=_LLAMA_8B, policy=_DENSE, new=32768)
