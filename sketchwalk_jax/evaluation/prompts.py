"""Samples as arrays: what is prefilled, what is fed afterwards, which tokens are scored."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from sketchwalk_jax.evaluation.tasks import LOSS_TASKS, NUM_SCORED, Sample, score
from sketchwalk_jax.text.tokenizer import decode

ANSWER_ROOM = 64
"""Tokens of the length that are left to generated answers, where these can be the last tokens."""
MAX_STEPS = 96
"""Decode steps that a program has room for: a question, its answer and a little more."""
_EXTRA_STEPS = 2  # a code that goes on must be seen to go on


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Samples of one length as arrays, on the host. `B` samples, `S` scored tokens, `U` steps.

    Attributes:
      samples: The samples; rows of the arrays beyond them repeat the last one.
      tokens: All tokens of each sample, right-padded, int32 `[B, T]`.
      lengths: How many they are, int32 `[B]`.
      prompt_lengths: Those before the first token that phases with sparse decoding feed one by one,
        int32 `[B]`; all of them where the question ends the prompt.
      answer_columns: Columns of `tokens` before each answer token, int32 `[B, S]`; zeros beyond.
      answers: The answer's tokens, int32 `[B, S]`.
      continuation: The right tokens after the prompt, int32 `[B, U]`.
      num_forced: How many of them are fed whatever the model says, int32 `[B]`; then it goes on by
        itself.
      num_told: How many there are, int32 `[B]`.
      num_steps: Tokens to feed in all, int32 `[B]`.
    """

    samples: tuple[Sample, ...]
    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    prompt_lengths: Int[np.ndarray, "B"]
    answer_columns: Int[np.ndarray, "B S"]
    answers: Int[np.ndarray, "B S"]
    continuation: Int[np.ndarray, "B U"]
    num_forced: Int[np.ndarray, "B"]
    num_told: Int[np.ndarray, "B"]
    num_steps: Int[np.ndarray, "B"]

    @property
    def task(self) -> str:
        """The task of all samples."""
        return self.samples[0].task

    @property
    def has_answer(self) -> bool:
        """Whether `tokens` hold the answer, so that prefilling all of them scores it."""
        return self.samples[0].answer_start < len(self.samples[0].tokens)

    def columns(self, lengths: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B C"]:
        """Columns whose next token is wanted of a prefill: before the answer, and the last one."""
        return np.concatenate([self.answer_columns, (lengths - 1)[:, None]], axis=1)

    def targets(self) -> Int[np.ndarray, "B C"]:
        """The right next token at each of those columns."""
        return np.concatenate([self.answers, self.continuation[:, :1]], axis=1)


def make_prompts(samples: Sequence[Sample], *, batch: int, num_tokens: int) -> Prompts:
    """Lays samples of one task out as arrays.

    Args:
      samples: At most `batch` samples.
      batch: Rows of the arrays.
      num_tokens: Columns of `tokens`.

    Returns:
      The arrays.

    Raises:
      ValueError: If an answer takes more tokens than programs have room for.
    """
    rows = [_row(sample, num_tokens) for sample in samples]
    rows += rows[-1:] * (batch - len(rows))
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return Prompts(samples=tuple(samples), **arrays)


def _row(sample: Sample, num_tokens: int) -> dict[str, Any]:
    num_answer = len(sample.answer)
    length = len(sample.tokens)
    is_last = sample.answer_start == length  # the question ends the prompt
    start = length if is_last else sample.question_start
    if is_last:
        told = sample.answer
    else:
        told = sample.tokens[start : sample.answer_start + num_answer]
    if sample.task in LOSS_TASKS:
        num_forced = num_steps = len(told) - 1
    else:
        num_forced = 0 if is_last else sample.answer_start - start
        # The first generated token follows from what was fed before it.
        num_steps = num_forced + num_answer + _EXTRA_STEPS - 1
    answer_column = sample.answer_start - 1
    has_room = max(length, start + num_steps) <= num_tokens
    if num_steps > MAX_STEPS or num_answer > NUM_SCORED or not has_room:
        raise ValueError(
            f"tokenizer must need at most {ANSWER_ROOM} tokens for an answer and {MAX_STEPS} with "
            f"its question, got {num_answer} and {num_steps} for {sample.expected!r}"
        )
    # A question at the end has no columns; its answer is not in `tokens`.
    columns = np.zeros(num_answer, int) if is_last else np.arange(num_answer) + answer_column
    return {
        "tokens": _pad(sample.tokens, num_tokens),
        "lengths": np.int32(length),
        "prompt_lengths": np.int32(start),
        "answer_columns": _pad(columns, NUM_SCORED),
        "answers": _pad(sample.answer, NUM_SCORED),
        "continuation": _pad(told, MAX_STEPS),
        "num_forced": np.int32(num_forced),
        "num_told": np.int32(len(told)),
        "num_steps": np.int32(num_steps),
    }


def _pad(values: Int[np.ndarray, "N"], size: int) -> Int[np.ndarray, "M"]:
    return np.pad(values.astype(np.int32), (0, size - len(values)))


def right_in_prefill(prompts: Prompts, likeliest: Int[np.ndarray, "B C"]) -> Bool[np.ndarray, "n"]:
    """Whether every answer token was the likeliest, when all tokens were prefilled."""
    return np.array(
        [
            np.array_equal(row[: len(sample.answer)], sample.answer)
            for sample, row in zip(prompts.samples, likeliest, strict=False)
        ]
    )


def right_in_decode(
    prompts: Prompts,
    first: Int[np.ndarray, "B"],
    likeliest: Int[np.ndarray, "B U"],
    tokenizer: Any,
    eos_token_ids: Sequence[int],
) -> Bool[np.ndarray, "n"]:
    """Whether what was generated begins with the right answer.

    Args:
      prompts: The prompts.
      first: The likeliest token after each prompt.
      likeliest: The likeliest token after each further one that was fed.
      tokenizer: A tokenizer of transformers.
      eos_token_ids: Tokens that end an answer.
    """
    following = np.concatenate([first[:, None], likeliest], axis=1)
    is_right = []
    for index, sample in enumerate(prompts.samples):
        start, stop = prompts.num_forced[index], prompts.num_steps[index] + 1
        generated = following[index, start:stop]
        ends = np.flatnonzero(np.isin(generated, np.asarray(eos_token_ids, np.int32)))
        generated = generated[: ends[0]] if ends.size else generated
        is_right.append(score(sample, decode(tokenizer, generated)))
    return np.array(is_right)


def loss_in_prefill(prompts: Prompts, losses: Float[np.ndarray, "B C"]) -> Float[np.ndarray, "n"]:
    """Mean loss of each prompt's scored tokens, nats per token, when all were prefilled."""
    return np.array(
        [
            row[: len(sample.answer)].mean(dtype=np.float64)
            for sample, row in zip(prompts.samples, losses, strict=False)
        ]
    )


def loss_in_decode(
    prompts: Prompts, first: Float[np.ndarray, "B"], losses: Float[np.ndarray, "B U"]
) -> Float[np.ndarray, "n"]:
    """The same where the scored tokens were fed one by one."""
    return loss_in_prefill(prompts, np.concatenate([first[:, None], losses], axis=1))
