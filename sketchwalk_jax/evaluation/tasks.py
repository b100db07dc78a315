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
code_loss | nothing | the same of a text with lines: program code
long_decode | nothing | the loss of the last 512 tokens of the text, fed one by one

What is hidden and asked is put into words by a *wording* (`wording.py`).
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sketchwalk_jax.evaluation.wording import Asked, Frame, Wording, wording_of
from sketchwalk_jax.text.haystack import (
    Haystack,
    Text,
    WordEncoder,
    draw_lines,
    draw_passages,
    prompt_rng,
    read_code,
)
from sketchwalk_jax.validation import check_choice, check_integer

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

LOSS_TASKS = ("text_loss", "code_loss", "long_decode")
"""Tasks that ask nothing: what they score is the loss of the text itself."""

ALL_TASKS = (*TASKS, "code_loss", "long_decode")
"""All tasks; an evaluation runs `TASKS` unless it is told otherwise."""

ANSWERED_TASKS = ("variable_tracking", "mid_prompt")
"""Tasks whose answers belong to the prompt, so that a prefill alone reads them.

Variable tracking, because every part of its answer is a look-up, and all are to happen in the phase
that is tested.
"""

HOPS = (2, 3, 4, 5, 6)
"""Statements of a chain of variable_tracking."""

NUM_SCORED = 64
"""Tokens whose loss text_loss takes; answers within a prompt have at most as many."""

NUM_DECODED = 512
"""Tokens that long_decode feeds."""

# Tokens that stand behind what mid_prompt asks and what text_loss scores, where there is room: more
# than any policy's dense end of the prompt.
_NUM_TOKENS_BEHIND = 512
_NUM_STATEMENTS = 16  # of multi_query and mid_prompt
_NUM_ASKED = 4  # words of multi_query, codes of multi_value
_NUM_OTHER_WORDS = 8  # of multi_value
_NUM_CHAINS = 3  # of variable_tracking; one is asked for
_MOST_VOTES = 12
_OTHER_VOTES = (2, 3, 4)
_NUM_OTHER_CANDIDATES = 5


# What each task hides and asks: random words and numbers in those sentences.


@dataclasses.dataclass(frozen=True)
class _Question:
    """Statements to hide, in the order in which they stand in the text, and what is asked.

    Attributes:
      statements: Sentences to scatter in the text; each begins with a space.
      asked: What is asked, and what answers it.
    """

    statements: list[str]
    asked: Asked


def _draw_question(
    task: str,
    words: Sequence[str],
    rng: np.random.Generator,
    *,
    wording: Wording,
    hops: int,
    num_keys: int,
) -> _Question:
    """Draws the statements and the question of one prompt.

    Args:
      task: Name of a task that asks something: any but text_loss.
      words: Words that may be used: those that the passage lacks.
      rng: Source of all randomness.
      wording: Its sentences.
      hops: Statements in a chain of variable_tracking.
      num_keys: Statements of multi_key.

    Returns:
      The question.

    Raises:
      ValueError: If there are too few words.
    """

    def draw_words(count: int) -> list[str]:
        if len(words) < count:
            raise ValueError(
                f"text must have at least {count} held-out words of 4 to 8 letters that a passage "
                f"lacks for {task}, got {len(words)}: use a longer text or shorter prompts"
            )
        return [words[i] for i in rng.choice(len(words), count, replace=False)]

    if task == "single_needle":
        return _one_code(draw_words(1), rng, wording)
    if task == "multi_key":
        return _one_code(draw_words(num_keys), rng, wording)
    if task == "mid_prompt":
        return _one_code(draw_words(_NUM_STATEMENTS), rng, wording)
    if task == "multi_query":
        return _several_words(draw_words(_NUM_STATEMENTS), rng, wording)
    if task == "multi_value":
        return _several_codes(draw_words(1 + _NUM_OTHER_WORDS), rng, wording)
    if task == "variable_tracking":
        return _chains(draw_words, hops, rng, wording)
    return _votes(draw_words(1 + _NUM_OTHER_CANDIDATES), rng, wording)


def _draw_numbers(count: int, rng: np.random.Generator) -> list[str]:
    """Distinct numbers of five digits."""
    return [str(10000 + number) for number in rng.choice(90000, count, replace=False)]


def _one_code(words: list[str], rng: np.random.Generator, wording: Wording) -> _Question:
    """A code for each word; one is asked for."""
    numbers = _draw_numbers(len(words), rng)
    asked = int(rng.integers(len(words)))
    statements = [wording.code(*pair) for pair in zip(words, numbers, strict=True)]
    return _Question(statements, wording.ask_code(words[asked], numbers[asked]))


def _several_words(words: list[str], rng: np.random.Generator, wording: Wording) -> _Question:
    """A code for each word; several are asked for in one question, in any order."""
    numbers = _draw_numbers(len(words), rng)
    asked = rng.choice(len(words), _NUM_ASKED, replace=False)
    statements = [wording.code(*pair) for pair in zip(words, numbers, strict=True)]
    chosen = [words[i] for i in asked], [numbers[i] for i in asked]
    return _Question(statements, wording.ask_each_code(*chosen))


def _several_codes(words: list[str], rng: np.random.Generator, wording: Wording) -> _Question:
    """Several codes for the first word, one for each other; all of the first are asked for."""
    owners = rng.permutation([words[0]] * _NUM_ASKED + words[1:]).tolist()
    numbers = _draw_numbers(len(owners), rng)
    statements = wording.codes(owners, numbers)
    pairs = zip(owners, numbers, strict=True)
    values = [number for owner, number in pairs if owner == words[0]]
    return _Question(statements, wording.ask_all_codes(words[0], values))


def _chains(
    draw_words: Callable[[int], list[str]], hops: int, rng: np.random.Generator, wording: Wording
) -> _Question:
    """Chains of variables, one among another; one is to be followed name by name to its number.

    Following a chain means reading `hops` statements: `hops - 1` that copy a name, and the number
    (`num_hops` of RULER counts the copies; its answer lists the names as well).
    """
    names = np.array(draw_words(_NUM_CHAINS * hops)).reshape(_NUM_CHAINS, hops).tolist()
    numbers = _draw_numbers(_NUM_CHAINS, rng)
    links = [
        [wording.value(*link) for link in zip(chain, [number, *chain], strict=False)]
        for chain, number in zip(names, numbers, strict=True)
    ]
    order = rng.permutation(np.repeat(np.arange(_NUM_CHAINS), hops))
    statements = [links[chain].pop(0) for chain in order]
    *before, asked = names[0]
    return _Question(statements, wording.ask_value(asked, [*before[::-1], numbers[0]]))


def _votes(words: list[str], rng: np.random.Generator, wording: Wording) -> _Question:
    """Votes, most of them for the first word, which is asked for."""
    counts = [_MOST_VOTES, *rng.choice(_OTHER_VOTES, len(words) - 1).tolist()]
    votes = rng.permutation(np.repeat(words, counts)).tolist()
    statements = [wording.vote(word) for word in votes]
    return _Question(statements, wording.ask_votes(words[0]))


# Prompts: those sentences in a passage of the text, and the question where the task wants it.


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One prompt and its answer.

    Attributes:
      task: Name of the task.
      tokens: int32, everything in order: the prompt; the answer, in variable_tracking, mid_prompt
        and the losses; and the text behind it, in the last two.
      answer_start: Index in `tokens` of the first answer token; `len(tokens)` where the question
        ends the prompt.
      answer: int32, the tokens of the answer with its full stop; of a loss the scored tokens.
      question_start: Index of the first token of the question; of a loss `answer_start`.
      expected: The answer as text without the space before it, such as "68084."; of a loss "".
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
    wording: str = "plain",
    first: int = 0,
    hops: int | None = None,
    depths: int = 10,
    num_keys: int = 32,
) -> list[Sample]:
    """Draws prompts of a task.

    Sample i depends on the arguments other than `count`: more samples begin with the same ones.

    Args:
      task: One of `ALL_TASKS`.
      text: The text to hide facts in; for code_loss `read_code`'s.
      tokenizer: A tokenizer of transformers.
      num_tokens: Length of `Sample.tokens`, special tokens at its beginning included. Prompts end
        at words, so a tokenizer with long words can miss it by a few tokens, never above.
      count: Number of samples.
      seed: Seed of all random choices.
      wording: One of `WORDINGS`; `"chat"` for instruction models, with a chat template. Losses have
        none: their text stands for itself.
      first: Index of the first sample to draw: `count` from there on, the same ones as in a longer
        list from the beginning.
      hops: Statements of a chain of variable_tracking, 2 to 6; None takes them in turn. Of no other
        task.
      depths: Number of depths of single_needle; they are the centres of as many equal parts of the
        text. Samples take them in turn, so that their numbers differ by one at most.
      num_keys: Statements of multi_key.

    Returns:
      The samples.

    Raises:
      ValueError: If an argument is out of its range, if the text is too short or has too few words
        to ask for, if `num_tokens` leaves no room for the statements of the task, or if the wording
        needs a chat template that the tokenizer lacks.

    Example:
      text = read_text()
      samples = draw_samples("multi_key", text, tokenizer, num_tokens=4096, count=100, seed=0)
    """
    check_choice("task", task, ALL_TASKS)
    sizes = {"num_tokens": num_tokens, "count": count, "depths": depths, "num_keys": num_keys}
    for name, size in sizes.items():
        check_integer(name, size)
    check_integer("seed", seed, least=0)
    check_integer("first", first, least=0)
    if hops is not None and task != "variable_tracking":
        raise ValueError(f"hops must be None for {task}, got {hops}")
    if hops is not None:
        check_choice("hops", hops, HOPS)
    sources = {
        index: prompt_rng(task, num_tokens, seed, index) for index in range(first, first + count)
    }
    words_of = wording_of(wording)
    if task in LOSS_TASKS:
        draw = draw_lines if task == "code_loss" else draw_passages
        passages = draw(text, tokenizer, num_tokens=num_tokens, sources=[*sources.values()])
        return [_loss_sample(task, passage) for passage in passages]
    encoder = WordEncoder(tokenizer, opening=words_of.opening(task, tokenizer))
    haystack = Haystack(text, encoder, num_tokens)
    samples = []
    for index, rng in sources.items():
        words = haystack.draw(rng)
        present = set(re.findall("[a-z]+", " ".join(words).lower()))
        names = [word for word in text.held_out_words if word not in present]
        chain = hops or HOPS[index % len(HOPS)]
        question = _draw_question(task, names, rng, wording=words_of, hops=chain, num_keys=num_keys)
        samples.append(
            _question_sample(
                task,
                question,
                words_of.frame(task, question.asked, tokenizer),
                haystack,
                words,
                rng,
                num_tokens=num_tokens,
                depth=_depth(index, depths) if task == "single_needle" else None,
                hops=chain if task == "variable_tracking" else None,
            )
        )
    return samples


def text_for(task: str, text: Text) -> Text:
    """The text that a task is drawn from: its own for program code, else the one given."""
    return read_code() if task == "code_loss" else text


def _depth(index: int, depths: int) -> float:
    """Depth of a sample: all in turn, far ones after one another, so that few are spread too."""
    step = round(0.618 * depths) or 1
    while np.gcd(step, depths) > 1:
        step += 1
    return (index * step % depths + 0.5) / depths


def _loss_sample(task: str, text: Sequence[int]) -> Sample:
    """A window of a text, of which tokens some way before its end, or the last, are scored."""
    tokens = np.array(text, np.int32)
    is_long = task == "long_decode"
    least = 2 * (NUM_DECODED if is_long else NUM_SCORED)
    if len(tokens) < least:
        raise ValueError(f"num_tokens must be at least {least} for {task}, got {len(tokens)}")
    if is_long:
        start, end = len(tokens) - NUM_DECODED, len(tokens)
    else:
        end = len(tokens) - min(_NUM_TOKENS_BEHIND, len(tokens) // 4)
        start = end - NUM_SCORED
    return Sample(task, tokens, start, tokens[start:end], start, "")


def _question_sample(
    task: str,
    question: _Question,
    frame: Frame,
    haystack: Haystack,
    words: Sequence[str],
    rng: np.random.Generator,
    *,
    num_tokens: int,
    depth: float | None,
    hops: int | None,
) -> Sample:
    """Scatters the statements in a passage, in its frame, and asks where the task wants it."""
    statements = [haystack.encoder.sentence(statement) for statement in question.statements]
    asked, after, closing = (
        haystack.encoder.passage(part) for part in (frame.asking, frame.after, frame.closing)
    )
    answer = haystack.encoder.passage(question.asked.answer)
    hidden = sum(len(statement) for statement in statements)
    told = len(asked) + (len(answer) if task in ANSWERED_TASKS else 0) + len(after) + len(closing)
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
            tokens += after
    tokens += closing
    return Sample(
        task=task,
        tokens=np.array(tokens, np.int32),
        answer_start=answer_start,
        answer=np.array(answer, np.int32),
        question_start=question_start,
        expected=question.asked.answer.strip(),
        depth=depth,
        hops=hops,
    )


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
