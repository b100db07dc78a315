"""A tiny random model and ragged prompts, shared by the tests of inference and generation."""

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import init_params
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

# Blocks of 16 tokens make short prompts long in blocks; one dense layer leaves three to the walk.
SPARSE = {"block_size": 16, "sketch_dim": 8, "dense_layers": 1, "density": 0.4}
POLICIES = {
    "dense": Dense(block_size=16),
    "paper": SketchWalkConfig.paper(**SPARSE),
    "damped": SketchWalkConfig.damped(**SPARSE),
    "sum_of_heads": SketchWalkConfig.one_hop(**SPARSE, head_combination="sum"),
    "released": SketchWalkConfig.released(block_size=16, dense_layers=1),
}


def params(dtype=jnp.float32, model=MODEL):
    """Random weights, scaled up so that attention is far from uniform."""
    tree = init_params(jax.random.key(7), model, dtype)
    return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, tree)


def prompts(*lengths: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random prompts of the given lengths, right-padded with token 63."""
    rng = np.random.default_rng(seed)
    tokens = np.full((len(lengths), max(lengths)), 63, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = rng.integers(0, 63, length)
    return tokens, np.asarray(lengths, np.int32)
