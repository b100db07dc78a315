"""Writes goldens/sampling.npz with the interpreter that has torch and transformers.

$SKETCHWALK_REFERENCE_PYTHON tests/make_sampling_goldens.py
"""

from pathlib import Path

import numpy as np
from parity.sampling_worker import process

DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}

NORMAL = {
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
    "qwen2": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "llama3": {"temperature": 0.6, "top_p": 0.9},
    "everything": {
        "temperature": 1.7,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    },
    "greedy": {"temperature": 0.0},
    "greedy_with_penalty": {"temperature": 0.0, "repetition_penalty": 5.0},
    "greedy_ignores_truncation": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
}
# Avoid equal values: torch sorts longer rows unstably, so top-p would keep any of them.
TIES = {
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
EXTREME = {
    "extreme": {},
    "extreme_top_p": {"top_p": 0.5},
    "extreme_top_k_min_p": {"top_k": 4, "min_p": 0.5},
    "extreme_temperature": {"temperature": 0.5, "top_p": 0.99, "repetition_penalty": 2.0},
}


def case(settings: dict, logits: np.ndarray, rng: np.random.Generator) -> dict:
    """Makes the arrays of one case, its answer included."""
    logits = np.asarray(logits, np.float32)
    batch, vocab_size = logits.shape
    arrays = {"logits": logits}
    arrays["tokens"] = rng.integers(0, vocab_size, (batch, 9)).astype(np.int32)
    arrays["lengths"] = rng.integers(1, 10, batch).astype(np.int32)
    for name, default in DEFAULTS.items():
        arrays[name] = np.full(batch, settings.get(name, default))
    return arrays | {"processed": process(arrays)}


def cases() -> dict[str, dict]:
    """Draws every case, by name."""
    rng = np.random.default_rng(0)
    made = {}
    for name, settings in NORMAL.items():
        made[name] = case(settings, 3.0 * rng.standard_normal((3, 48)), rng)
    for name, settings in TIES.items():
        logits = TIED_LOGITS.get(name, [[1.0] * 4, [2.0, 2.0, 0.0, 0.0], [0.0, 2.0, -1.0, 2.0]])
        made[name] = case(settings, logits, rng)
    for name, settings in EXTREME.items():
        logits = rng.standard_normal((4, 12))
        logits[0, ::2] = -np.inf
        logits[1] *= 1e30
        logits[2] *= 1e-30
        logits[3, :] = -np.inf
        logits[3, 5] = -1e38
        made[name] = case(settings, logits, rng)
    made["vocabulary_of_one"] = case({"top_k": 1, "top_p": 0.3, "min_p": 0.3}, [[-2.0]], rng)
    wide = 4.0 * rng.standard_normal((1, 2000))
    made["wide"] = case({"temperature": 1.3, "top_k": 900, "top_p": 0.97}, wide, rng)
    return made


def packed(made: dict) -> dict:
    """Packs the settings of a case into one array [fields, B], as each array costs overhead."""
    kept = {key: array for key, array in made.items() if key not in DEFAULTS}
    return kept | {"settings": np.stack([made[name] for name in DEFAULTS])}


if __name__ == "__main__":
    path = Path(__file__).parent / "goldens" / "sampling.npz"
    path.parent.mkdir(exist_ok=True)
    arrays = {
        f"{name}/{key}": array
        for name, made in cases().items()
        for key, array in packed(made).items()
    }
    np.savez_compressed(path, **arrays)
    print(f"{len(arrays)} arrays in {path.name}")
