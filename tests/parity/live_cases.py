"""Draws new models for the live comparison with transformers, and runs it."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

from parity.rope_cases import old_spelling

CONTEXT = 512
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

EXTRAS: dict[str, dict[str, Any]] = {
    "tied-with-its-head": {"lm_head": "same"},
    "tied-with-another-head": {"lm_head": "other"},
    "bfloat16": {"dtype": "bfloat16", "run_dtype": "bfloat16", "length": 70},
}
NAMES = (*(f"{family}-{rope}" for family in FAMILIES for rope in ROPE_TYPES), *EXTRAS)


def run_reference(python: str, job: dict[str, Any], root: Path, *, seed: int) -> None:
    """Runs `reference_worker.py` on a job with another interpreter; results go into `root`."""
    (root / "job.json").write_text(json.dumps(job))
    worker = Path(__file__).parent / "reference_worker.py"
    command = [python, worker, root / "job.json", root]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"SKETCHWALK_PARITY_SEED={seed}\n{done.stderr[-4000:]}"


def draw_case(name: str, seed: int) -> dict[str, Any]:
    """Draws one case of the reference worker; the same name and seed give the same case."""
    draw = random.Random(f"{seed} {name}")
    if name in EXTRAS:
        family, rope_type = draw.choice(FAMILIES), draw.choice(ROPE_TYPES)
    else:
        family, rope_type = name.split("-")
    rope = _draw_rope(draw, rope_type)
    config = _draw_sizes(draw, family) | {
        "rope_parameters": rope,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "tie_word_embeddings": draw.choice([False, True]),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family != "qwen2":
        config["attention_bias"] = draw.choice([False, True])
    if family == "qwen3_moe":
        config |= _draw_experts(draw)
    if family == "llama":
        config["mlp_bias"] = draw.choice([False, True])
    case: dict[str, Any] = {
        "name": name,
        "model_type": family,
        "seed": draw.randrange(1 << 30),
        "config": config,
        "edits": draw.choice([{}, old_spelling(rope), old_spelling(rope, "type")]),
        "dtype": draw.choice(["float32", "bfloat16"]),
        "max_shard_size": draw.choice([None, "20KB", "60KB"]),
        "num_eos": draw.choice([0, 1, 3]),
        "length": draw.choice([1, 24, 70]),
    }
    if name in EXTRAS:
        case |= EXTRAS[name]
        config["tie_word_embeddings"] = config["tie_word_embeddings"] or "lm_head" in case
    if "lm_head" in case:
        case["max_shard_size"] = None
    return case


def _draw_sizes(draw: random.Random, family: str) -> dict[str, Any]:
    kv_heads = draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 2, 3, 4, 7])
    head_dim = draw.choice([4, 8, 16])
    sizes = {
        "vocab_size": draw.choice([50, 64, 97]),
        "intermediate_size": draw.choice([24, 40]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    if family == "qwen2":
        return sizes | {"hidden_size": heads * head_dim}
    return sizes | {"hidden_size": heads * draw.choice([4, 6]), "head_dim": head_dim}


def _draw_experts(draw: random.Random) -> dict[str, Any]:
    num_experts = draw.choice([1, 3, 8])
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": draw.choice([x for x in (1, 2, 3, 8) if x <= num_experts]),
        "moe_intermediate_size": draw.choice([12, 32]),
        "norm_topk_prob": draw.choice([False, True]),
        "decoder_sparse_step": draw.choice([1, 1, 2]),
        "mlp_only_layers": draw.choice([[], [], [0]]),
    }


def _draw_rope(draw: random.Random, rope_type: str) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": draw.choice([100.0, 10000.0, 1000000.0]),
    }
    if rope_type == "default":
        return rope
    rope["factor"] = draw.choice([2.0, 3.5, 8.0])
    if rope_type == "linear":
        return rope
    rope["original_max_position_embeddings"] = draw.choice([32, 64])
    if rope_type == "llama3":
        return rope | {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    options: list[dict[str, Any]] = [
        {},
        {"truncate": False},
        {"attention_factor": 1.25},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
    ]
    return rope | draw.choice(options)
