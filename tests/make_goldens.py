"""Makes the golden files of `tests/goldens` with transformers; run it to add or renew them.

    python tests/make_goldens.py

It needs torch and transformers (the interpreter of SKETCHWALK_REFERENCE_PYTHON), and makes the
same files every time. Each folder is a tiny random checkpoint with its `expected.npz`.
"""

import shutil
import sys
from pathlib import Path

GOLDENS = Path(__file__).resolve().parent / "goldens"
sys.path.insert(0, str(Path(__file__).resolve().parent / "parity"))

from reference_worker import run  # noqa: E402
from rope_cases import ROPE_CASES, old_spelling  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


CASES = [
    {
        "name": "llama-3.1",  # group of 4, untied, llama3
        "model_type": "llama",
        "config": SMALL
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": LLAMA3},
        "edits": old_spelling(LLAMA3, "rope_type"),
        "num_eos": 2,
    },
    {
        "name": "llama-3.2",  # tied, group of 3, head_dim is not hidden / heads
        "model_type": "llama",
        "config": SMALL
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 36,
            "head_dim": 16,
            "rope_parameters": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    },
    {
        "name": "llama-2-linear",  # no grouping, all biases, linear rope
        "model_type": "llama",
        "config": SMALL
        | {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
        "edits": old_spelling({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, "type")
        | {"head_dim": None, "num_key_value_heads": None},
    },
    {
        "name": "qwen2",  # group of 7, biases, rope_theta only
        "model_type": "qwen2",
        "config": SMALL
        | {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "hidden_size": 28,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "edits": {
            "rope_parameters": None,
            "rope_theta": 1000000.0,
            "layer_types": None,
            "sliding_window": 16,
        },
    },
    {
        "name": "qwen2.5-yarn",
        "model_type": "qwen2",
        "config": SMALL | {"rope_parameters": YARN},
        "edits": old_spelling(YARN, "type"),
    },
    {
        "name": "qwen3",  # norms of query and key, heads * head_dim is not hidden, tied
        "model_type": "qwen3",
        "config": SMALL
        | {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    },
    {
        "name": "qwen3-bias-yarn",
        "model_type": "qwen3",
        "config": SMALL
        | {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN | {"truncate": False}},
    },
]


def main():
    GOLDENS.mkdir(exist_ok=True)
    for case in CASES:  # keep files of other scripts in this folder
        shutil.rmtree(GOLDENS / case["name"], ignore_errors=True)
    cases = [{"seed": seed} | case for seed, case in enumerate(CASES, start=1)]
    rope = [{"name": name, "config": config} for name, config in ROPE_CASES.items()]
    run({"cases": cases, "rope": rope}, GOLDENS)
    for directory in GOLDENS.iterdir():
        if directory.is_dir() and not (directory / "config.json").exists():
            raise SystemExit(f"{directory} is incomplete")
    sizes = [path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()]
    print(f"{len(sizes)} files, {sum(sizes)} bytes")


if __name__ == "__main__":
    main()
