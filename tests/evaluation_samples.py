"""Samples of random tokens for `tiny.MODEL`, in the layouts that tasks have."""

import numpy as np

from sketchwalk_jax.evaluation.tasks import TASKS, Sample

LENGTH = 512
WITHIN = ("variable_tracking", "mid_prompt", "text_loss")  # tasks whose answer is among the tokens


def sample(task: str, seed: int, *, length: int = 400) -> Sample:
    """Draws a sample of `length` tokens; the answer follows or ends them, or has text after it."""
    rng = np.random.default_rng([seed, TASKS.index(task)])
    tokens = rng.integers(2, 64, length).astype(np.int32)
    common = {"depth": None, "hops": None}
    if task not in WITHIN:
        answer = rng.integers(2, 64, 5 + seed).astype(np.int32)
        return Sample(task, tokens, length, answer, length - 9, "12345.", **common)
    num_answer = 64 if task == "text_loss" else 5
    start = length - (num_answer if task == "variable_tracking" else 100 + seed)
    question = start if task == "text_loss" else start - 7
    answer = tokens[start : start + num_answer]
    expected = "" if task == "text_loss" else "12345."
    return Sample(task, tokens, start, answer, question, expected, **common)


def samples(task: str, count: int = 3) -> list[Sample]:
    """Draws samples of different lengths."""
    return [sample(task, seed, length=330 + 53 * seed) for seed in range(count)]
