"""Prompts of the evaluation: facts hidden in a text, and whether an answer is right.

Task | hidden in the text | asked
--- | --- | ---
single_needle | one code, at a depth | the code
multi_key | `num_keys` codes | one of them
multi_query | 16 codes | four of them in one question
multi_value | 4 codes of one word, 8 of others | all four, in the order of the text
variable_tracking | 3 chains of `hops` variables | one chain, name by name to its number
mid_prompt | 16 codes | one of them, in the second half of the prompt, with text after the answer
aggregation | 12 votes for a word, 2 to 4 for each of five others | the word with the most votes
text_loss | nothing | nothing: the loss of 64 tokens of the text
"""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sketchwalk_jax.evaluation.haystack import Haystack, WordEncoder
from sketchwalk_jax.evaluation.questions import HOPS, Question, draw_question
from sketchwalk_jax.evaluation.templates import answer_text
from sketchwalk_jax.evaluation.text import Text

TASKS = (
    "single_needle",
    "multi_key",
    "multi_query",
    "multi_value",
    "variable_tracking",
    "mid_prompt",
    "aggregation",
    "text_loss",
)

# Tasks whose answers belong to the prompt, so that a prefill alone reads them: of variable tracking
# because every part of the answer is a look-up, and all are to happen in the phase tested.
ANSWERED_TASKS = ("variable_tracking", "mid_prompt")

# Tokens that stand behind what mid_prompt asks and what text_loss scores, where there is room: more
# than any policy's dense end of the prompt.
_NUM_TOKENS_BEHIND = 512
_NUM_SCORED_TOKENS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One prompt and its answer.

    Attributes:
      task: Name of the task.
      tokens: int32, everything in order: the prompt; the answer, in variable_tracking, mid_prompt
        and text_loss; and the text behind it, in the last two.
      answer_start: Index in `tokens` of the first answer token; `len(tokens)` where the question
        ends the prompt.
      answer: int32, the tokens of the answer with its full stop; in text_loss the scored tokens.
      question_start: Index of the first token of the question; in text_loss `answer_start`.
      expected: The answer as text without the space before it, such as "68084."; in text_loss "".
      depth: Share of the text before the statement, in single_needle.
      hops: Statements of a chain, in variable_tracking.
    """

    task: str
    tokens: Int[np.ndarray, "T"]
    answer_start: int
    answer: Int[np.ndarray, "A"]
    question_start: int
    expected: str
    depth: float | None = None
    hops: int | None = None


def draw_samples(
    task: str,
    text: Text,
    tokenizer: Any,
    *,
    num_tokens: int,
    count: int,
    seed: int,
    hops: int | None = None,
    depths: int = 10,
    num_keys: int = 32,
) -> list[Sample]:
    """Draws prompts of a task.

    Sample i depends on the arguments other than `count`: more samples begin with the same ones.

    Args:
      task: One of `TASKS`.
      text: The text to hide facts in.
      tokenizer: A tokenizer of transformers.
      num_tokens: Length of `Sample.tokens`, special tokens at its beginning included. Prompts end
        at words, so a tokenizer with long words can miss it by a few tokens, never above.
      count: Number of samples.
      seed: Seed of all random choices.
      hops: Statements of a chain of variable_tracking, 2 to 6; None takes them in turn. Of no other
        task.
      depths: Number of depths of single_needle; they are the centres of as many equal parts of the
        text. Samples take them in turn, so that their numbers differ by one at most.
      num_keys: Statements of multi_key.

    Returns:
      The samples.

    Raises:
      ValueError: If an argument is out of its range, if the text is too short or has too few words
        to ask for, or if `num_tokens` leaves no room for the statements of the task.

    Example:
      text = read_text()
      samples = draw_samples("multi_key", text, tokenizer, num_tokens=4096, count=100, seed=0)
    """
    _check(task, num_tokens, count, seed, hops, depths, num_keys)
    haystack = Haystack(text, WordEncoder(tokenizer), num_tokens)
    samples = []
    for index in range(count):
        rng = np.random.default_rng([zlib.crc32(task.encode()), num_tokens, seed, index])
        words = haystack.draw(rng)
        if task == "text_loss":
            samples.append(_text_sample(haystack.fit(words, num_tokens)))
            continue
        present = set(re.findall("[a-z]+", " ".join(words).lower()))
        names = [word for word in text.held_out_words if word not in present]
        chain = hops or HOPS[index % len(HOPS)]
        question = draw_question(task, names, rng, hops=chain, num_keys=num_keys)
        samples.append(
            _question_sample(
                task,
                question,
                haystack,
                words,
                rng,
                num_tokens=num_tokens,
                depth=_depth(index, depths) if task == "single_needle" else None,
                hops=chain if task == "variable_tracking" else None,
            )
        )
    return samples


def score(sample: Sample, generated_text: str) -> bool:
    """Whether a generated text begins with the right answer.

    Args:
      sample: A sample with an answer: of any task but text_loss.
      generated_text: What the model wrote; spaces around it do not matter.

    Returns:
      True if it begins with all values of the answer, in order, and the last one ends there: 12345
      is not answered by 123456.

    Raises:
      ValueError: If the sample asks nothing.

    Example:
      >>> sample = Sample("multi_key", np.zeros(8, np.int32), 8, np.zeros(2, np.int32), 6, "12345.")
      >>> score(sample, " 12345. The"), score(sample, " 123456.")
      (True, False)
    """
    if not sample.expected:
        raise ValueError(f"sample must have an answer, got one of {sample.task}")
    values = sample.expected.removesuffix(".")
    text = generated_text.strip()
    return text.startswith(values) and not text[len(values) : len(values) + 1].isalnum()


def _check(
    task: str,
    num_tokens: int,
    count: int,
    seed: int,
    hops: int | None,
    depths: int,
    num_keys: int,
) -> None:
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    sizes = {"num_tokens": num_tokens, "count": count, "depths": depths, "num_keys": num_keys}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if hops is not None and task != "variable_tracking":
        raise ValueError(f"hops must be None for {task}, got {hops}")
    if hops is not None and hops not in HOPS:
        raise ValueError(f"hops must be one of {HOPS}, got {hops}")


def _depth(index: int, depths: int) -> float:
    """Depth of a sample: all in turn, far ones after one another, so that few are spread too."""
    step = round(0.618 * depths) or 1
    while np.gcd(step, depths) > 1:
        step += 1
    return (index * step % depths + 0.5) / depths


def _text_sample(hay: Sequence[list[int]]) -> Sample:
    """A window of the text, of which tokens some way before its end are scored."""
    tokens = np.array([token for piece in hay for token in piece], np.int32)
    least = 2 * _NUM_SCORED_TOKENS
    if len(tokens) < least:
        raise ValueError(f"num_tokens must be at least {least} for text_loss, got {len(tokens)}")
    end = len(tokens) - min(_NUM_TOKENS_BEHIND, len(tokens) // 4)
    start = end - _NUM_SCORED_TOKENS
    return Sample("text_loss", tokens, start, tokens[start:end], start, "")


def _question_sample(
    task: str,
    question: Question,
    haystack: Haystack,
    words: Sequence[str],
    rng: np.random.Generator,
    *,
    num_tokens: int,
    depth: float | None,
    hops: int | None,
) -> Sample:
    """Scatters the statements in a passage and puts the question where the task wants it."""
    statements = [haystack.encoder.sentence(statement) for statement in question.statements]
    asked = haystack.encoder.sentence(question.question)
    answer = haystack.encoder.sentence(answer_text(question.values))
    hidden = sum(len(statement) for statement in statements)
    told = len(asked) + (len(answer) if task in ANSWERED_TASKS else 0)
    hay = haystack.fit(words, num_tokens - hidden - told)
    ends = np.cumsum([len(piece) for piece in hay])
    stop = len(hay)  # words before the question
    if task == "mid_prompt" and hay:
        latest = max(0.5, min(0.75, 1 - (_NUM_TOKENS_BEHIND + told) / num_tokens))
        stop = int(np.searchsorted(ends, rng.uniform(0.5, latest) * num_tokens - hidden))
    if stop < len(statements):
        raise ValueError(
            f"num_tokens must leave room for {len(statements)} statements of {task} between words, "
            f"got {num_tokens}, of which statements and question take {hidden + told}"
        )
    if depth is None:
        places = np.sort(rng.choice(stop, len(statements), replace=False))
    else:
        places = np.array([min(int(np.searchsorted(ends, depth * ends[-1])), stop - 1)])
    inserted = dict(zip(places.tolist(), statements, strict=True))
    tokens: list[int] = []
    question_start = answer_start = 0
    for index, piece in enumerate(hay):
        tokens += piece + inserted.get(index, [])
        if index == stop - 1:
            question_start = len(tokens)
            tokens += asked
            answer_start = len(tokens)
            tokens += answer if task in ANSWERED_TASKS else []
    return Sample(
        task=task,
        tokens=np.array(tokens, np.int32),
        answer_start=answer_start,
        answer=np.array(answer, np.int32),
        question_start=question_start,
        expected=answer_text(question.values).strip(),
        depth=depth,
        hops=hops,
    )
