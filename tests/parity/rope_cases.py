"""Rotary embeddings to compare with transformers: published models, and every option."""

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def _case(head_dim: int, context: int, theta: float, **scaling: Any) -> dict[str, Any]:
    return {
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling,
        # Keep the rest tiny: only the rotary embedding is made.
        "hidden_size": 8,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 8,
        "num_hidden_layers": 1,
    }


def old_spelling(rope: dict[str, Any], type_key: str = "rope_type") -> dict[str, Any]:
    """Returns the edits that give config.json the rope spelling from before transformers 5."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    return {
        "rope_parameters": None,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {type_key: rope["rope_type"]} | scaling,
    }


ROPE_CASES: dict[str, dict[str, Any]] = {
    "llama-2": _case(128, 4096, 10000.0),
    "llama-3.1-8b": _case(128, 131072, 500000.0, **LLAMA3),
    "llama-3.2-1b": _case(64, 131072, 500000.0, **LLAMA3 | {"factor": 32.0}),
    "qwen2-7b": _case(128, 32768, 1000000.0),
    "qwen2.5-7b-yarn": _case(128, 32768, 1000000.0, **YARN),
    "qwen3-yarn-2": _case(128, 40960, 1000000.0, **YARN | {"factor": 2.0}),
    "yarn-one": _case(64, 4096, 10000.0, **YARN | {"factor": 1.0}),
    "yarn-mscale": _case(64, 163840, 10000.0, **YARN, mscale=0.707, mscale_all_dim=1.0),
    "yarn-attention-factor": _case(64, 163840, 10000.0, **YARN, attention_factor=1.25),
    "yarn-beta": _case(64, 163840, 10000.0, **YARN, beta_fast=8.0, beta_slow=2.0),
    "yarn-exact-ramp": _case(64, 131072, 150000.0, **YARN, truncate=False),
    "yarn-ramp-of-one-point": _case(8, 256, 1e9, **YARN | {"original_max_position_embeddings": 4}),
    "linear": _case(128, 16384, 10000.0, rope_type="linear", factor=4.0),
    "linear-fraction": _case(96, 16384, 10000.0, rope_type="linear", factor=2.5),
}
