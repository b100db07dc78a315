"""A tiny random model and ragged prompts, shared by the tests of inference and generation."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import (
    flatten_params,
    input_axes,
    param_shapes,
    unflatten_params,
)
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=64,
    num_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)

# Layer 1 has an ordinary mlp.
EXPERTS = dataclasses.replace(
    MODEL,
    model_type="qwen3_moe",
    qk_norm=True,
    num_experts=6,
    experts_per_token=2,
    expert_intermediate_size=16,
    norm_topk_prob=True,
    dense_mlp_layers=(1,),
)

# With blocks of 16 tokens short prompts have many; three layers after a dense one walk.
SPARSE = {"block_size": 16, "sketch_dim": 8, "dense_layers": 1, "density": 0.4}
POLICIES = {
    "dense": Dense(block_size=16),
    "paper": SketchWalkConfig.paper(**SPARSE),
    "damped": SketchWalkConfig.damped(**SPARSE),
    "one_hop": SketchWalkConfig.one_hop(**SPARSE),
    "released": SketchWalkConfig.released(block_size=16, dense_layers=1),
}


def params(dtype=jnp.float32, model=MODEL):
    """Draws weights without compiling, scaled so that attention is far from uniform."""
    rng = np.random.default_rng(7)

    def draw(path, shape):
        if path[-1] != "kernel" and path[-1] != "embedding":
            return np.full(shape.shape, path[-1] == "scale", np.float32)
        inputs = shape.shape[-1:] if path[-1] == "embedding" else input_axes(path, shape.shape)
        scale = (1.5 if len(shape.shape) > 2 else 1.0) / math.sqrt(math.prod(inputs))
        return scale * rng.standard_normal(shape.shape, np.float32)

    shapes = flatten_params(param_shapes(model))
    drawn = {path: jnp.asarray(draw(path, shape), dtype) for path, shape in shapes.items()}
    return unflatten_params(drawn)


def prompts(*lengths: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws prompts of the given lengths, right-padded with token 63."""
    rng = np.random.default_rng(seed)
    tokens = np.full((len(lengths), max(lengths)), 63, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = rng.integers(0, 63, length)
    return tokens, np.asarray(lengths, np.int32)


def plan(densities: tuple[float, ...], *errors: tuple[float, ...]) -> Plan:
    """Makes a plan whose layers were tried at the same densities and differ only in errors."""
    count = len(errors)
    return Plan((densities,) * count, errors, (1.0,) * count, (4, 8), ((0.2, 0.1),) * count)
