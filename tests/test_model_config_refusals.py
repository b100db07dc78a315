"""Attributes of config.json that are refused or ignored, and the messages."""

from typing import Any

import pytest
from checkpoints import tiny_config

from sketchwalk_jax.models import ModelConfig

UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "partial rotary inside": (
        "llama",
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25",
    ),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "longrope": ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    "rope by layer": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "full_attention",
    ),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "fp8": ("llama", {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "logit scale": ("llama", {"logit_scale": 0.25}, "logit_scale=0.25"),
    "logits scaling": ("llama", {"logits_scaling": 8.0}, "logits_scaling=8.0"),
    "multiplier": ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
    "soft cap": ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    "experts": ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
    "bidirectional": ("qwen2", {"is_causal": False}, "is_causal=False"),
    "mrope is a switch": ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    "interleaved": ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
    "chunked": ("llama", {"attention_chunk_size": 8192}, "attention_chunk_size=8192"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_attributes_that_would_change_results_are_refused(case: str):
    model_type, overrides, message = UNSUPPORTED[case]
    with pytest.raises(NotImplementedError, match=message) as raised:
        ModelConfig.from_dict(tiny_config(model_type, **overrides))
    assert "support" in str(raised.value)


def test_all_refused_attributes_are_named_at_once():
    raw = tiny_config("llama", hidden_act="relu", logit_scale=2, sliding_window=8)
    with pytest.raises(NotImplementedError) as raised:
        ModelConfig.from_dict(raw)
    for part in ("hidden_act='relu'", "logit_scale=2", "sliding_attention (window 8)"):
        assert part in str(raised.value)


HARMLESS: dict[str, Any] = {
    "attention_dropout": 0.1,
    "auto_map": {"AutoConfig": "x.Y"},
    "initializer_range": 0.1,
    "is_causal": True,
    "is_llama_config": True,
    "logit_scale": 1.0,
    "max_sequence_length": 9,
    "num_local_experts": 0,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 2,
    "quantization_config": None,
    "rope_interleaved": False,
    "unsloth_fixed": True,
    "use_cache": False,
    "use_mrope": False,
    "x_invented_later": {"a": [1, 2]},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_attributes_that_change_nothing_are_ignored(name: str):
    raw = tiny_config("llama")
    assert ModelConfig.from_dict(raw | {name: HARMLESS[name]}) == ModelConfig.from_dict(raw)


SLIDING: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "declared but unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, None),
    "starts above the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        None,
    ),
    "upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        r"window 16\) in layers \[1\]",
    ),
    "default window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": ...,
            "max_window_layers": 0,
            "max_position_embeddings": 8192,
        },
        r"window 4096\) in layers \[0, 1\]",
    ),
    "null window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        None,
    ),
    "as wide as the context": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
        None,
    ),
    "narrower than a stretched context": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 512,
            "max_window_layers": 0,
            "rope_scaling": {"type": "yarn", "factor": 4.0},
        },
        "2048 tokens",
    ),
    "all layers full": ("qwen3", {"layer_types": ["full_attention"] * 2}, None),
    "older name of full": ("qwen3", {"layer_types": ["attention"] * 2}, None),
    "by layer_types": (
        "qwen3",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 16,
        },
        r"sliding_attention \(window 16\) in layers \[1\]",
    ),
    "other kinds": (
        "qwen3",
        {"layer_types": ["linear_attention", "full_attention"]},
        r"linear_attention .* in layers \[0\]",
    ),
    "llama": ("llama", {"sliding_window": 16}, r"window 16\) in layers \[0, 1\]"),
    "llama, switched off": ("llama", {"sliding_window": 16, "use_sliding_window": False}, None),
}


@pytest.mark.parametrize("case", SLIDING)
def test_a_sliding_window_is_refused_only_where_it_applies(case: str):
    model_type, overrides, message = SLIDING[case]
    raw = tiny_config(model_type, **overrides)
    if message is None:
        assert ModelConfig.from_dict(raw).num_layers == 2
    else:
        with pytest.raises(NotImplementedError, match=message):
            ModelConfig.from_dict(raw)


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "model type": ({"model_type": "mixtral"}, r"'llama', 'qwen2', 'qwen3'.*got 'mixtral'"),
    "no model type": ({"model_type": ...}, "got None"),
    "missing sizes": (
        {"vocab_size": ..., "hidden_size": ...},
        r"missing \['vocab_size', 'hidden_size'\]",
    ),
    "group": ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    "head_dim": ({"head_dim": 7}, "head_dim must be even"),
    "layer_types": ({"layer_types": ["full_attention"]}, "must name num_hidden_layers = 2"),
    "rope parameter": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor.*missing",
    ),
    "rope factor": (
        {"rope_scaling": {"type": "linear", "factor": 0.0}},
        "factor must be a finite number larger than 0",
    ),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_configs_raise(case: str):
    overrides, message = INVALID[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(tiny_config("llama", **overrides))
