"""Qwen2, Qwen3 and Qwen3-MoE: reads their `config.json`, and names their weights."""

from typing import Any

from sketchwalk_jax.models.family import KEYS as LLAMA_KEYS
from sketchwalk_jax.models.family import (
    LAYER,
    MAX_EXPERTS,
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

EXPERT_KEYS: dict[tuple[str, ...], str] = {
    ("layers", "router", "kernel"): LAYER + "mlp.gate.weight",
    ("layers", "expert_gate", "kernel"): LAYER + "mlp.experts.{expert}.gate_proj.weight",
    ("layers", "expert_up", "kernel"): LAYER + "mlp.experts.{expert}.up_proj.weight",
    ("layers", "expert_down", "kernel"): LAYER + "mlp.experts.{expert}.down_proj.weight",
}
"""The same for the parameters of a mixture of experts; `{expert}` is the expert's index."""


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


def read_qwen3_moe_fields(raw: RawConfig) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that Qwen3-MoE reads in its own way.

    A layer has experts if its number, counted from 1, is a multiple of `decoder_sparse_step` and it
    is not among `mlp_only_layers`. head_dim is width / heads by default.

    Example:
      >>> raw = dict(hidden_size=2048, num_attention_heads=32, num_hidden_layers=4,
      ...            mlp_only_layers=[3])
      >>> fields = read_qwen3_moe_fields(raw)
      >>> fields["num_experts"], fields["experts_per_token"], fields["dense_mlp_layers"]
      (128, 8, (3,))
    """
    usual = raw["hidden_size"] // raw["num_attention_heads"]
    fields = read_qwen3_fields(raw) | {"head_dim": read_integer(raw, "head_dim", usual)}
    fields["num_kv_heads"] = read_integer(
        {"num_key_value_heads": 4, **raw}, "num_key_value_heads", raw["num_attention_heads"]
    )
    # `num_local_experts` is the name that transformers 5 uses inside.
    given = {"num_experts": raw.get("num_local_experts"), **raw}
    num_experts = read_integer(given, "num_experts", 128, least=0)
    step = read_integer(raw, "decoder_sparse_step", 1)
    only = [] if raw.get("mlp_only_layers") is None else raw["mlp_only_layers"]
    if not isinstance(only, list | tuple) or not all(type(x) is int for x in only):
        raise ValueError(
            f"mlp_only_layers must be a list of layers, got {str(only)[:80]!r}; correct config.json"
        )
    layers = range(raw["num_hidden_layers"])
    dense = tuple(x for x in layers if x in only or (x + 1) % step)
    if not num_experts or len(dense) == len(layers):
        return fields
    if num_experts * len(layers) > MAX_EXPERTS:
        raise ValueError(
            f"num_experts must be at most {MAX_EXPERTS} / num_hidden_layers {len(layers)}, got "
            f"{num_experts}; correct config.json"
        )
    return fields | {
        "num_experts": num_experts,
        "experts_per_token": read_integer(raw, "num_experts_per_tok", 8),
        "expert_intermediate_size": read_integer(raw, "moe_intermediate_size", 768),
        "norm_topk_prob": read_flag(raw, "norm_topk_prob"),
        "dense_mlp_layers": dense,
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


def read_moe_window(raw: RawConfig) -> tuple[int | None, int]:
    """Returns the sliding window, which must be switched on, and then is every layer's."""
    return read_window(raw)[0], 0


# Files of Qwen3-Coder say that query and key have norms, as they do in every Qwen3.
_NORMS = frozenset({"use_qk_norm"})

QWEN2 = Family(
    model_type="qwen2", keys=KEYS, read_fields=read_qwen2_fields, read_window=read_window
)
QWEN3 = Family(
    model_type="qwen3",
    keys=KEYS,
    read_fields=read_qwen3_fields,
    read_window=read_window,
    own_attributes=_NORMS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    keys=KEYS | EXPERT_KEYS,
    read_fields=read_qwen3_moe_fields,
    read_window=read_moe_window,
    own_attributes=_NORMS
    | {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"},
)
