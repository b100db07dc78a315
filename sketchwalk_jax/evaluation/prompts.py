"""Lays samples out as arrays: tokens to prefill, tokens to feed after it, tokens to score."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from sketchwalk_jax.evaluation.tasks import LOSS_TASKS, NUM_SCORED, Sample, score
from sketchwalk_jax.text.tokenizer import decode

ANSWER_ROOM = 64
"""Tokens reserved at the end of a length for generated answers."""
MAX_STEPS = 96
"""Most decode steps of a program: a question, its answer and a few more tokens."""
_EXTRA_STEPS = 2  # shows whether a code continues beyond its length


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Samples of one length as arrays, on the host. `B` samples, `S` scored tokens, `U` steps.

    Attributes:
      samples: The samples; rows of the arrays beyond them repeat the last one.
      tokens: All tokens of each sample, right-padded, int32 `[B, T]`.
      lengths: Number of tokens of each sample, int32 `[B]`.
      prompt_lengths: Tokens to prefill in phases with sparse decoding, which feed the others one by
        one, int32 `[B]`; all tokens if the question ends the prompt.
      answer_columns: Columns of `tokens` before each answer token, int32 `[B, S]`; zeros beyond.
      answers: The answer's tokens, int32 `[B, S]`.
      continuation: The right tokens after the prompt, int32 `[B, U]`.
      num_forced: Tokens of `continuation` to feed whatever the model predicts, int32 `[B]`; its own
        predictions follow.
      num_told: Length of `continuation`, int32 `[B]`.
      num_steps: Total number of tokens to feed, int32 `[B]`.
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
        """Whether `tokens` contain the answer, so that one prefill scores it."""
        return self.samples[0].answer_start < len(self.samples[0].tokens)

    def columns(self, lengths: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B C"]:
        """Columns whose next token a prefill predicts: before the answer, and the last one."""
        return np.concatenate([self.answer_columns, (lengths - 1)[:, None]], axis=1)

    def targets(self) -> Int[np.ndarray, "B C"]:
        """The right next token at each of these `columns`."""
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
        # Minus one: the last forced token already predicts the first generated one.
        num_steps = num_forced + num_answer + _EXTRA_STEPS - 1
    answer_column = sample.answer_start - 1
    has_room = max(length, start + num_steps) <= num_tokens
    if num_steps > MAX_STEPS or num_answer > NUM_SCORED or not has_room:
        raise ValueError(
            f"tokenizer must need at most {ANSWER_ROOM} tokens for an answer and {MAX_STEPS} with "
            f"its question, got {num_answer} and {num_steps} for {sample.expected!r}"
        )
    # The answer to a question at the end is not in `tokens` and has no columns.
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
    """Whether a prefill of all tokens predicted every answer token as the likeliest."""
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
    """Whether the generated text begins with the right answer.

    Args:
      prompts: The prompts.
      first: The likeliest token after each prompt.
      likeliest: The likeliest token after each fed token.
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
    """Computes each prompt's mean loss over scored tokens of one prefill, nats per token."""
    return np.array(
        [
            row[: len(sample.answer)].mean(dtype=np.float64)
            for sample, row in zip(prompts.samples, losses, strict=False)
        ]
    )


def loss_in_decode(
    prompts: Prompts, first: Float[np.ndarray, "B"], losses: Float[np.ndarray, "B U"]
) -> Float[np.ndarray, "n"]:
    """Computes each prompt's mean loss over scored tokens that were fed one by one."""
    return loss_in_prefill(prompts, np.concatenate([first[:, None], losses], axis=1))
