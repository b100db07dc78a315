"""Llama: reads its `config.json`. Its weights have the names that most families use."""

from typing import Any

from sketchwalk_jax.models.family import (
    KEYS,
    Family,
    RawConfig,
    read_flag,
    read_integer,
    read_token,
)


def read_fields(raw: RawConfig) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that Llama reads in its own way.

    `attention_bias` covers q, k, v and o; head_dim and num_key_value_heads may be absent.

    Example:
      >>> read_fields(dict(hidden_size=8, num_attention_heads=2))["num_kv_heads"]
      2
    """
    num_heads = raw["num_attention_heads"]
    attention_bias = read_flag(raw, "attention_bias")
    return {
        "num_kv_heads": read_integer(raw, "num_key_value_heads", num_heads),
        "head_dim": read_integer(raw, "head_dim", raw["hidden_size"] // num_heads),
        "max_position_embeddings": read_integer(raw, "max_position_embeddings", 2048),
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": read_flag(raw, "mlp_bias"),
        "bos_token_id": read_token(raw, "bos_token_id", 1),
    }


def read_window(raw: RawConfig) -> tuple[int | None, int]:
    """Returns the sliding window of all layers, which Llama has only if the file gives one."""
    window = read_integer(raw, "sliding_window", least=0)
    return window if read_flag(raw, "use_sliding_window", True) else None, 0


LLAMA = Family(model_type="llama", keys=KEYS, read_fields=read_fields, read_window=read_window)
