"""Makes the golden files of `tests/goldens` with transformers; run it to add or renew them.

    python tests/make_goldens.py models sampling bundled    # or some of them

It needs torch and transformers (the interpreter of SKETCHWALK_REFERENCE_PYTHON), and makes the same
files every time:

* `models`: tiny random checkpoints, each a folder with its `expected.npz`, and `rope.npz`.
* `sampling`: `sampling.npz`, logits as transformers' processors leave them.
* `bundled`: `bundled.npz`; renew it if the bundled model changes. Two prompts hide a fact in the
  licence and ask for it.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from parity.rope_cases import ROPE_CASES, old_spelling

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"

# Models.

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
DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def model(name: str, model_type: str, rope: dict, *, more: dict | None = None, **config) -> dict:
    """Returns a case of the reference worker; `more` has its entries besides the config."""
    config = SMALL | config | {"rope_parameters": rope}
    return {"name": name, "model_type": model_type, "config": config} | (more or {})


MODELS = [
    model(
        "llama-3.1",  # group of 4, untied, llama3
        "llama",
        LLAMA3,
        num_attention_heads=8,
        more={"edits": old_spelling(LLAMA3, "rope_type"), "num_eos": 2},
    ),
    model(
        "llama-3.2",  # tied, group of 3, head_dim is not hidden / heads
        "llama",
        LLAMA3 | {"factor": 32.0},
        num_attention_heads=3,
        num_key_value_heads=1,
        hidden_size=36,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    model(
        "llama-2-linear",  # no grouping, all biases, linear rope
        "llama",
        LINEAR,
        num_key_value_heads=4,
        attention_bias=True,
        mlp_bias=True,
        more={
            "edits": old_spelling(LINEAR, "type") | {"head_dim": None, "num_key_value_heads": None}
        },
    ),
    model(
        "qwen2",  # group of 7, biases, rope_theta only
        "qwen2",
        DEFAULT,
        num_attention_heads=7,
        num_key_value_heads=1,
        hidden_size=28,
        more={
            "edits": {
                "rope_parameters": None,
                "rope_theta": 1000000.0,
                "layer_types": None,
                "sliding_window": 16,
            }
        },
    ),
    model("qwen2.5-yarn", "qwen2", YARN, more={"edits": old_spelling(YARN, "type")}),
    # Norms of query and key, heads * head_dim is not hidden, tied.
    model("qwen3", "qwen3", DEFAULT, head_dim=16, tie_word_embeddings=True),
    model("qwen3-bias-yarn", "qwen3", YARN | {"truncate": False}, head_dim=8, attention_bias=True),
]


def make_models() -> None:
    """Makes the checkpoints and the rotary frequencies."""
    from parity.reference_worker import run

    for case in MODELS:  # keep other files in this folder
        shutil.rmtree(GOLDENS / case["name"], ignore_errors=True)
    cases = [{"seed": seed} | case for seed, case in enumerate(MODELS, start=1)]
    rope = [{"name": name, "config": config} for name, config in ROPE_CASES.items()]
    run({"cases": cases, "rope": rope}, GOLDENS)


# Sampling.

DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
QWEN2 = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
EVERYTHING = {"temperature": 1.7, "top_k": 30, "top_p": 0.95, "min_p": 0.02}
NORMAL: dict[str, dict[str, float]] = {
    "defaults": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 40.0},
    "top_k_one": {"top_k": 1},
    "top_k": {"top_k": 7},
    "top_k_is_vocabulary": {"top_k": 48},
    "top_k_above_vocabulary": {"top_k": 1000},
    "top_p_zero": {"top_p": 0.0},
    "top_p_low": {"top_p": 0.05},
    "top_p": {"top_p": 0.9},
    "top_p_near_one": {"top_p": 0.999},
    "top_p_one": {"top_p": 1.0},
    "min_p": {"min_p": 0.1},
    "min_p_one": {"min_p": 1.0},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.6},
    "qwen2": QWEN2,
    "llama3": {"temperature": 0.6, "top_p": 0.9},
    "everything": EVERYTHING | {"repetition_penalty": 1.2},
    "greedy": {"temperature": 0.0},
    "greedy_with_penalty": {"temperature": 0.0, "repetition_penalty": 5.0},
    "greedy_ignores_truncation": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
}
# Avoid equal values: torch sorts longer rows unstably, so top-p would keep any of them.
TIES: dict[str, dict[str, float]] = {
    "ties_top_k": {"top_k": 3},
    "ties_top_p": {"top_p": 0.5},
    "ties_top_p_zero": {"top_p": 0.0},
    "ties_top_k_top_p": {"top_k": 2, "top_p": 0.75},
    "ties_min_p": {"min_p": 1.0},
    "ties_greedy": {"temperature": 0.0},
    "ties_top_p_of_five": {"top_p": 0.8},
}
TIED_LOGITS = {
    "ties_top_p_of_five": [[1.0] * 5 + [-np.inf] * 3, [-3.0, 2.0] * 4],
}
EXTREME: dict[str, dict[str, float]] = {
    "extreme": {},
    "extreme_top_p": {"top_p": 0.5},
    "extreme_top_k_min_p": {"top_k": 4, "min_p": 0.5},
    "extreme_temperature": {"temperature": 0.5, "top_p": 0.99, "repetition_penalty": 2.0},
}


def draw_samplings() -> dict[str, dict[str, np.ndarray]]:
    """Draws every case of sampling, by name: arrays, and settings `[fields, B]`."""
    from parity.sampling_worker import process

    rng = np.random.default_rng(0)
    made = {}

    def add(name: str, settings: dict[str, float], logits: Any) -> None:
        logits = np.asarray(logits, np.float32)
        batch, vocab_size = logits.shape
        arrays = {"logits": logits}
        arrays["tokens"] = rng.integers(0, vocab_size, (batch, 9)).astype(np.int32)
        arrays["lengths"] = rng.integers(1, 10, batch).astype(np.int32)
        rows = {key: np.full(batch, settings.get(key, usual)) for key, usual in DEFAULTS.items()}
        arrays["processed"] = process(arrays | rows)
        made[name] = arrays | {"settings": np.stack(list(rows.values()))}

    for name, settings in NORMAL.items():
        add(name, settings, 3.0 * rng.standard_normal((3, 48)))
    for name, settings in TIES.items():
        ties = [[1.0] * 4, [2.0, 2.0, 0.0, 0.0], [0.0, 2.0, -1.0, 2.0]]
        add(name, settings, TIED_LOGITS.get(name, ties))
    for name, settings in EXTREME.items():
        logits = rng.standard_normal((4, 12))
        logits[0, ::2] = -np.inf
        logits[1] *= 1e30
        logits[2] *= 1e-30
        logits[3, :] = -np.inf
        logits[3, 5] = -1e38
        add(name, settings, logits)
    add("vocabulary_of_one", {"top_k": 1, "top_p": 0.3, "min_p": 0.3}, [[-2.0]])
    wide = 4.0 * rng.standard_normal((1, 2000))
    add("wide", {"temperature": 1.3, "top_k": 900, "top_p": 0.97}, wide)
    return made


def make_sampling() -> None:
    """Makes `sampling.npz`."""
    arrays = {
        f"{name}/{key}": array
        for name, made in draw_samplings().items()
        for key, array in made.items()
    }
    np.savez_compressed(GOLDENS / "sampling.npz", **arrays)


# The bundled model.

FACTS = (("river", "68084", 0.2), ("button", "31597", 0.7))
NUM_TOKENS, NEW_TOKENS = 1024, 12


def make_prompt(tokenizer, text: list[int], word: str, number: str, depth: float) -> list[int]:
    """Returns `NUM_TOKENS` tokens: the licence with a fact in it, and the question."""

    def encode(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"]

    statement = encode(f" The code of {word} is {number}.")
    question = encode(f" Q: code of {word}? A:")
    room = NUM_TOKENS - len(statement) - len(question)
    place = int(depth * room)
    return text[:place] + statement + text[place:room] + question


def make_bundled() -> None:
    """Makes `bundled.npz`, and prints the answers."""
    from parity.reference_worker import run
    from transformers import AutoTokenizer

    directory = ROOT / "models" / "sketchwalk_8m"
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    licence = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    text = tokenizer(licence)["input_ids"]
    prompts = [make_prompt(tokenizer, text, *fact) for fact in FACTS]
    checkpoint = {"name": "bundled", "directory": str(directory), "new_tokens": NEW_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        run({"checkpoints": [checkpoint | {"prompts": [prompts]}]}, Path(folder))
        expected = np.load(Path(folder) / "bundled" / "expected.npz")
        numbers = [number for _, number, _ in FACTS]
        np.savez(GOLDENS / "bundled.npz", numbers=numbers, **expected)
        print([tokenizer.decode(row) for row in expected["greedy"]])


if __name__ == "__main__":
    makers = {"models": make_models, "sampling": make_sampling, "bundled": make_bundled}
    if not sys.argv[1:] or not makers.keys() >= set(sys.argv[1:]):
        raise SystemExit(f"name some of {', '.join(makers)}")
    for name in sys.argv[1:]:
        makers[name]()
    sizes = [path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()]
    print(f"{len(sizes)} files, {sum(sizes)} bytes")
