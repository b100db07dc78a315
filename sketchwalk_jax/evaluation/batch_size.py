"""How many prompts an evaluation has in memory at a time."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from sketchwalk_jax.evaluation.settings import EvaluationConfig
from sketchwalk_jax.models.config import ModelConfig

_MAX_BATCH = {"cpu": 8}
_MAX_BATCH_ELSEWHERE = 64


def choose_batch(
    model_config: ModelConfig, config: EvaluationConfig, *, num_tokens: int, dtype: Any
) -> int:
    """Prompts at a time: as many as memory is sure to hold, in batches of equal size."""
    if config.batch is not None:
        return min(config.batch, config.prompts)
    size = jnp.dtype(dtype).itemsize
    cache = 2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim * size
    widths = (
        6 * model_config.hidden_size
        + 3 * model_config.intermediate_size
        + 4 * model_config.num_heads * model_config.head_dim
    )
    # Four caches (dense, sparse, and a copy of one that decoding writes to, and their statistics)
    # and one layer's activations in float32.
    needed = num_tokens * (4 * cache + 4 * widths)
    batch = max(1, int(0.6 * _free_memory() / needed))
    batch = min(batch, config.prompts, _MAX_BATCH.get(jax.default_backend(), _MAX_BATCH_ELSEWHERE))
    return -(-config.prompts // -(-config.prompts // batch))


def _free_memory() -> int:
    """Bytes that the device has for this process; of a CPU, a quarter of the machine's memory."""
    found = jax.devices()[0].memory_stats()
    if found and "bytes_limit" in found:
        return found["bytes_limit"] - found.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
