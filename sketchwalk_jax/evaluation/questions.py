"""What each task hides in a text, asks and expects: random words and numbers in fixed sentences."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sketchwalk_jax.evaluation import templates

HOPS = (2, 3, 4, 5, 6)

_NUM_STATEMENTS = 16  # of multi_query and mid_prompt
_NUM_ASKED = 4  # words of multi_query, codes of multi_value
_NUM_OTHER_WORDS = 8  # of multi_value
_NUM_CHAINS = 3  # of variable_tracking; one is asked for
_MOST_VOTES = 12
_OTHER_VOTES = (2, 3, 4)
_NUM_OTHER_CANDIDATES = 5


@dataclasses.dataclass(frozen=True)
class Question:
    """Statements to hide, in the order in which they stand in the text, and what is asked.

    Attributes:
      statements: Sentences to scatter in the text; each begins with a space.
      question: The sentence that asks; begins with a space.
      values: What answers it: numbers or a word.
    """

    statements: list[str]
    question: str
    values: list[str]


def draw_question(
    task: str,
    words: Sequence[str],
    rng: np.random.Generator,
    *,
    hops: int | None = None,
    num_keys: int = 32,
) -> Question:
    """Draws the statements and the question of one prompt.

    Args:
      task: Name of a task that asks something: any but text_loss.
      words: Words that may be used: those that the passage lacks.
      rng: Source of all randomness.
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
        return _one_code(draw_words(1), rng)
    if task == "multi_key":
        return _one_code(draw_words(num_keys), rng)
    if task == "mid_prompt":
        return _one_code(draw_words(_NUM_STATEMENTS), rng)
    if task == "multi_query":
        return _several_words(draw_words(_NUM_STATEMENTS), rng)
    if task == "multi_value":
        return _several_codes(draw_words(1 + _NUM_OTHER_WORDS), rng)
    if task == "variable_tracking":
        assert hops is not None
        return _chains(draw_words, hops, rng)
    return _votes(draw_words(1 + _NUM_OTHER_CANDIDATES), rng)


def _draw_numbers(count: int, rng: np.random.Generator) -> list[str]:
    """Distinct numbers of five digits."""
    return [str(10000 + number) for number in rng.choice(90000, count, replace=False)]


def _one_code(words: list[str], rng: np.random.Generator) -> Question:
    """A code for each word; one is asked for."""
    numbers = _draw_numbers(len(words), rng)
    asked = int(rng.integers(len(words)))
    statements = [templates.code_statement(*pair) for pair in zip(words, numbers, strict=True)]
    return Question(statements, templates.code_question(words[asked]), [numbers[asked]])


def _several_words(words: list[str], rng: np.random.Generator) -> Question:
    """A code for each word; several are asked for in one question, in any order."""
    numbers = _draw_numbers(len(words), rng)
    asked = rng.choice(len(words), _NUM_ASKED, replace=False)
    statements = [templates.code_statement(*pair) for pair in zip(words, numbers, strict=True)]
    question = templates.each_code_question([words[i] for i in asked])
    return Question(statements, question, [numbers[i] for i in asked])


def _several_codes(words: list[str], rng: np.random.Generator) -> Question:
    """Several codes for the first word, one for each other; all of the first are asked for."""
    owners = rng.permutation([words[0]] * _NUM_ASKED + words[1:]).tolist()
    numbers = _draw_numbers(len(owners), rng)
    pairs = list(zip(owners, numbers, strict=True))
    statements = [templates.code_statement(*pair) for pair in pairs]
    values = [number for owner, number in pairs if owner == words[0]]
    return Question(statements, templates.all_codes_question(words[0]), values)


def _chains(
    draw_words: Callable[[int], list[str]], hops: int, rng: np.random.Generator
) -> Question:
    """Chains of variables, one among another; one is to be followed name by name to its number.

    Following a chain means reading `hops` statements: `hops - 1` that copy a name, and the number
    (`num_hops` of RULER counts the copies; its answer lists the names as well).
    """
    names = np.array(draw_words(_NUM_CHAINS * hops)).reshape(_NUM_CHAINS, hops).tolist()
    numbers = _draw_numbers(_NUM_CHAINS, rng)
    links = [
        [templates.value_statement(*link) for link in zip(chain, [number, *chain], strict=False)]
        for chain, number in zip(names, numbers, strict=True)
    ]
    order = rng.permutation(np.repeat(np.arange(_NUM_CHAINS), hops))
    statements = [links[chain].pop(0) for chain in order]
    *before, asked = names[0]
    return Question(statements, templates.value_question(asked), [*before[::-1], numbers[0]])


def _votes(words: list[str], rng: np.random.Generator) -> Question:
    """Votes, most of them for the first word, which is asked for."""
    counts = [_MOST_VOTES, *rng.choice(_OTHER_VOTES, len(words) - 1).tolist()]
    votes = rng.permutation(np.repeat(words, counts)).tolist()
    statements = [templates.vote_statement(word) for word in votes]
    return Question(statements, templates.vote_question(), [words[0]])
