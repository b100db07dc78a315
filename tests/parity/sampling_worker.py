"""Processes logits with transformers' own processors; runs where torch is installed.

    python sampling_worker.py REQUEST.npz ANSWER.npz

The request holds `logits` [B, V], `tokens` [B, T], `lengths` [B] and one array [B] for each field
of `Sampling`; the answer holds `processed` [B, V]. Rows are processed one by one, with the
processors that `generate` would choose for their settings.
"""

import sys

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def processors(*, temperature, top_k, top_p, min_p, repetition_penalty) -> LogitsProcessorList:
    """Returns the processors that `GenerationMixin._get_logits_processor` would."""
    chosen = LogitsProcessorList()
    if repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature == 0.0:  # do_sample=False
        return chosen
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k != 0:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    chosen.append(MinPLogitsWarper(min_p))
    return chosen


def process_row(logits: np.ndarray, tokens: np.ndarray, settings: dict) -> np.ndarray:
    """Processes the logits [V] of one sequence."""
    scores = torch.from_numpy(logits.astype(np.float32))[None]
    scores = processors(**settings)(torch.from_numpy(tokens.astype(np.int64))[None], scores)[0]
    if settings["temperature"] == 0.0:  # greedy search takes the argmax
        best = int(torch.argmax(scores))
        scores = torch.full_like(scores, -torch.inf).index_fill(
            0, torch.tensor([best]), float(scores[best])
        )
    return scores.numpy()


def process(request: dict) -> np.ndarray:
    """Processes a whole request (see the module's docstring)."""
    rows = []
    for row, length in enumerate(request["lengths"]):
        settings = {name: request[name][row].item() for name in FIELDS}
        rows.append(process_row(request["logits"][row], request["tokens"][row, :length], settings))
    return np.stack(rows)


if __name__ == "__main__":
    with np.load(sys.argv[1], allow_pickle=False) as request:
        answer = process(dict(request))
    np.savez(sys.argv[2], processed=answer)
