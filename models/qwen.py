"""Qwen2 and Qwen3: reads their `config.json`, and names their weights."""

from typing import Any

from sketchwalk_jax.models.family import KEYS as LLAMA_KEYS
from sketchwalk_jax.models.family import (
    LAYER,
    Family,
    RawConfig,
    read_flag,
    read_integer,
    read_token,
)

KEYS: dict[tuple[str, ...], str] = LLAMA_KEYS | {
    ("layers", "query_norm", "scale"): LAYER + "self_attn.q_norm.weight",
    ("layers", "key_norm", "scale"): LAYER + "self_attn.k_norm.weight",
}
"""Hugging Face name of each parameter: Llama's, and Qwen3's norms of query and key."""


def read_qwen2_fields(raw: RawConfig) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that Qwen2 reads in its own way.

    Projections q, k and v always have a bias, and o never has one, whatever the file says.

    Example:
      >>> raw = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
      >>> fields = read_qwen2_fields(raw)
      >>> fields["qkv_bias"], "o_bias" in fields
      (True, False)
    """
    usual = raw["hidden_size"] // raw["num_attention_heads"]
    head_dim = read_integer(raw, "head_dim", usual)
    return _common_fields(raw) | {"head_dim": head_dim, "qkv_bias": True}


def read_qwen3_fields(raw: RawConfig) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that Qwen3 reads in its own way.

    `attention_bias` covers q, k, v and o, query and key are normalised over head_dim, and
    head_dim is 128 by default, whatever the width.

    Example:
      >>> raw = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8)
      >>> fields = read_qwen3_fields(raw)
      >>> fields["qk_norm"], fields["head_dim"]
      (True, 128)
    """
    attention_bias = read_flag(raw, "attention_bias")
    # Absent means 128; null means width / heads.
    usual = raw["hidden_size"] // raw["num_attention_heads"]
    head_dim = read_integer({"head_dim": 128, **raw}, "head_dim", usual)
    return _common_fields(raw) | {
        "head_dim": head_dim,
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "qk_norm": True,
    }


def _common_fields(raw: RawConfig) -> dict[str, Any]:
    return {
        # Absent means 32; null means as many as query heads.
        "num_kv_heads": read_integer(
            {"num_key_value_heads": 32, **raw}, "num_key_value_heads", raw["num_attention_heads"]
        ),
        "max_position_embeddings": read_integer(raw, "max_position_embeddings", 32768),
        "bos_token_id": read_token(raw, "bos_token_id"),
    }


def read_window(raw: RawConfig) -> tuple[int | None, int]:
    """Returns the sliding window, which must be switched on, and the first layer that has it."""
    # Absent means 4096; null means none.
    window = read_integer({"sliding_window": 4096, **raw}, "sliding_window", least=0)
    window = window if read_flag(raw, "use_sliding_window") else None
    return window, read_integer(raw, "max_window_layers", 28, least=0)


QWEN2 = Family(
    model_type="qwen2", keys=KEYS, read_fields=read_qwen2_fields, read_window=read_window
)
QWEN3 = Family(
    model_type="qwen3", keys=KEYS, read_fields=read_qwen3_fields, read_window=read_window
)
