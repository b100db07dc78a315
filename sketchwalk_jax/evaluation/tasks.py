"""Draws the prompts of an evaluation, facts hidden in a text, and scores answers.

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

A *wording* (`wording.py`) gives the sentences to hide and the questions.
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
"""Tasks without a question, which score the loss of the text."""

ALL_TASKS = (*TASKS, "code_loss", "long_decode")
"""All tasks; an evaluation runs `TASKS` by default."""

ANSWERED_TASKS = ("variable_tracking", "mid_prompt")
"""Tasks whose answers are part of the prompt, so that one prefill scores them.

In variable tracking every part of the answer is a look-up, and all look-ups must happen in the
tested phase.
"""

HOPS = (2, 3, 4, 5, 6)
"""Numbers of statements in a chain of variable_tracking."""

NUM_SCORED = 64
"""Tokens that text_loss scores, and the most of an answer within a prompt."""

NUM_DECODED = 512
"""Tokens that long_decode feeds one by one."""

# Tokens after the question of mid_prompt and the scored tokens of text_loss, if there is room: more
# than any policy keeps dense at the end of a prompt.
_NUM_TOKENS_BEHIND = 512
_NUM_STATEMENTS = 16  # hidden by multi_query and mid_prompt
_NUM_ASKED = 4  # words in multi_query, codes in multi_value
_NUM_OTHER_WORDS = 8  # in multi_value
_NUM_CHAINS = 3  # in variable_tracking; the question is about one
_MOST_VOTES = 12
_OTHER_VOTES = (2, 3, 4)
_NUM_OTHER_CANDIDATES = 5


# Statements and questions of each task: random words and numbers in a wording's sentences.


Question = tuple[list[str], Asked]
"""Statements to scatter in the text, in their order, and the question with its answer."""


def _draw_question(
    task: str,
    words: Sequence[str],
    rng: np.random.Generator,
    *,
    wording: Wording,
    hops: int,
    num_keys: int,
) -> Question:
    """Draws the statements and the question of one prompt, from words that the passage lacks.

    Raises:
      ValueError: If there are too few words.
    """
    kinds: dict[str, tuple[int, Callable[..., Question]]] = {
        "single_needle": (1, _one_code),
        "multi_key": (num_keys, _one_code),
        "mid_prompt": (_NUM_STATEMENTS, _one_code),
        "multi_query": (_NUM_STATEMENTS, _several_words),
        "multi_value": (1 + _NUM_OTHER_WORDS, _several_codes),
        "variable_tracking": (_NUM_CHAINS * hops, _chains),
        "aggregation": (1 + _NUM_OTHER_CANDIDATES, _votes),
    }
    count, make = kinds[task]
    if len(words) < count:
        raise ValueError(
            f"text must have at least {count} held-out words of 4 to 8 letters that a passage "
            f"lacks for {task}, got {len(words)}: use a longer text or shorter prompts"
        )
    return make([words[i] for i in rng.choice(len(words), count, replace=False)], rng, wording)


def _draw_numbers(count: int, rng: np.random.Generator) -> list[str]:
    """Draws distinct numbers of five digits."""
    return [str(10000 + number) for number in rng.choice(90000, count, replace=False)]


def _one_code(words: list[str], rng: np.random.Generator, wording: Wording) -> Question:
    """Gives each word a code and asks for one."""
    numbers = _draw_numbers(len(words), rng)
    asked = int(rng.integers(len(words)))
    statements = [wording.code(*pair) for pair in zip(words, numbers, strict=True)]
    return statements, wording.ask_code(words[asked], numbers[asked])


def _several_words(words: list[str], rng: np.random.Generator, wording: Wording) -> Question:
    """Gives each word a code and asks for several in one question, in any order."""
    numbers = _draw_numbers(len(words), rng)
    asked = rng.choice(len(words), _NUM_ASKED, replace=False)
    statements = [wording.code(*pair) for pair in zip(words, numbers, strict=True)]
    chosen = [words[i] for i in asked], [numbers[i] for i in asked]
    return statements, wording.ask_each_code(*chosen)


def _several_codes(words: list[str], rng: np.random.Generator, wording: Wording) -> Question:
    """Gives the first word several codes and each other one, and asks for all of the first."""
    owners = rng.permutation([words[0]] * _NUM_ASKED + words[1:]).tolist()
    numbers = _draw_numbers(len(owners), rng)
    pairs = zip(owners, numbers, strict=True)
    values = [number for owner, number in pairs if owner == words[0]]
    return wording.codes(owners, numbers), wording.ask_all_codes(words[0], values)


def _chains(words: list[str], rng: np.random.Generator, wording: Wording) -> Question:
    """Interleaves chains of variables, and asks to follow one name by name to its number.

    Following a chain of `hops` names means reading `hops` statements: `hops - 1` that copy a name,
    and the number (`num_hops` of RULER counts the copies; its answer lists the names as well).
    """
    names = np.array(words).reshape(_NUM_CHAINS, -1).tolist()
    numbers = _draw_numbers(_NUM_CHAINS, rng)
    links = [
        [wording.value(*link) for link in zip(chain, [number, *chain], strict=False)]
        for chain, number in zip(names, numbers, strict=True)
    ]
    order = rng.permutation(np.repeat(np.arange(_NUM_CHAINS), len(names[0])))
    statements = [links[chain].pop(0) for chain in order]
    *before, asked = names[0]
    return statements, wording.ask_value(asked, [*before[::-1], numbers[0]])


def _votes(words: list[str], rng: np.random.Generator, wording: Wording) -> Question:
    """Gives most votes to the first word, and asks for the word with the most."""
    counts = [_MOST_VOTES, *rng.choice(_OTHER_VOTES, len(words) - 1).tolist()]
    votes = rng.permutation(np.repeat(words, counts)).tolist()
    return [wording.vote(word) for word in votes], wording.ask_votes(words[0])


# Prompts: statements in a passage of the text, and the question.


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One prompt and its answer.

    Attributes:
      task: Name of the task.
      tokens: int32, the prompt, then the answer in variable_tracking, mid_prompt and losses, then
        the following text in mid_prompt and losses.
      answer_start: Index in `tokens` of the first answer token; `len(tokens)` if the question ends
        the prompt.
      answer: int32, the tokens of the answer with its full stop; for a loss the scored tokens.
      question_start: Index of the first token of the question; for a loss `answer_start`.
      expected: The answer as text without the space before it, such as "68084."; for a loss "".
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

    Sample i does not depend on `count`: a longer list begins with the same samples.

    Args:
      task: One of `ALL_TASKS`.
      text: The text to hide facts in; for code_loss the text of `read_code`.
      tokenizer: A tokenizer of transformers.
      num_tokens: Length of `Sample.tokens`, special tokens at its beginning included. Prompts end
        at words, so they can be a few tokens shorter if words are long, never longer.
      count: Number of samples.
      seed: Seed of all random choices.
      wording: One of `WORDINGS`; `"chat"` for instruction models, with a chat template. Losses have
        no wording.
      first: Index of the first of the `count` samples, in the list that starts at 0.
      hops: Statements of a chain, 2 to 6, in variable_tracking only; None takes them in turn.
      depths: Number of depths of single_needle, the centres of as many equal parts of the text.
        Samples take them in turn, so their counts differ by at most one.
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
        options: dict[str, Any] = {"wording": words_of, "hops": chain, "num_keys": num_keys}
        statements, asked = _draw_question(task, names, rng, **options)
        frame = words_of.frame(task, asked, tokenizer)
        sample = _question_sample(
            task, statements, asked, frame, haystack, words, rng, num_tokens, _depth(index, depths)
        )
        is_chain = task == "variable_tracking"
        samples.append(dataclasses.replace(sample, hops=chain if is_chain else None))
    return samples


def text_for(task: str, text: Text) -> Text:
    """Returns the text to draw a task from: program code for code_loss, else the given text."""
    return read_code() if task == "code_loss" else text


def _depth(index: int, depths: int) -> float:
    """Returns the depth of a sample; successive ones are far apart, so that few samples spread."""
    step = round(0.618 * depths) or 1
    while np.gcd(step, depths) > 1:
        step += 1
    return (index * step % depths + 0.5) / depths


def _loss_sample(task: str, text: Sequence[int]) -> Sample:
    """Cuts a window of a text, and scores tokens some way before its end, or the last ones."""
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
    statements: Sequence[str],
    question: Asked,
    frame: Frame,
    haystack: Haystack,
    words: Sequence[str],
    rng: np.random.Generator,
    num_tokens: int,
    depth: float,
) -> Sample:
    """Scatters the statements in a passage, adds the frame, and places the question.

    The statement of single_needle is placed at `depth`.
    """
    facts = [haystack.encoder.sentence(statement) for statement in statements]
    asked, after, closing, answer = map(
        haystack.encoder.passage, (frame.asking, frame.after, frame.closing, question.answer)
    )
    hidden = sum(map(len, facts))
    told = len(asked) + (len(answer) if task in ANSWERED_TASKS else 0) + len(after) + len(closing)
    hay = haystack.fit(words, num_tokens - hidden - told)
    ends = np.cumsum([len(piece) for piece in hay])
    stop = len(hay)  # passage words before the question
    if task == "mid_prompt" and hay:
        latest = max(0.5, min(0.75, 1 - (_NUM_TOKENS_BEHIND + told) / num_tokens))
        stop = int(np.searchsorted(ends, rng.uniform(0.5, latest) * num_tokens - hidden))
    if stop < len(facts):
        raise ValueError(
            f"num_tokens must leave room for {len(facts)} statements of {task} between words, "
            f"got {num_tokens}, of which statements and question take {hidden + told}"
        )
    if task == "single_needle":
        places = np.array([min(int(np.searchsorted(ends, depth * ends[-1])), stop - 1)])
    else:
        places = np.sort(rng.choice(stop, len(facts), replace=False))
    inserted = dict(zip(places.tolist(), facts, strict=True))
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
        expected=question.answer.strip(),
        depth=depth if task == "single_needle" else None,
    )


def score(sample: Sample, generated_text: str) -> bool:
    """Whether a generated text begins with the right answer.

    Args:
      sample: A sample of a task with a question.
      generated_text: The generated text; surrounding spaces are ignored.

    Returns:
      True if the text begins with all values of the answer, in order, and the last one ends there:
      123456 does not answer 12345.

    Raises:
      ValueError: If the sample has no question.

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
