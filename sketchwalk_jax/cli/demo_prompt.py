"""The demonstration's prompt: English prose with facts hidden in it, and questions about them."""

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
from jaxtyping import Int

from sketchwalk_jax.evaluation.templates import code_question, code_statement
from sketchwalk_jax.tokenizer import decode, encode

SOURCE = "Python's help topics"
MAX_FACTS = 16
TOKENS_PER_FACT = 128  # least text around a fact, in tokens
_PROSE = 0.95  # least share of letters and the like in a paragraph
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer packs into a token of English

# Words that are held out from the training of the bundled model.
WORDS = tuple(
    "attic badger bakery basket bicycle bottle button cabbage canoe carpet carrot castle cherry "
    "cotton curtain donkey duck fountain galaxy garden garlic honey island jacket meteor mirror "
    "moth onion otter parcel pepper poplar pumpkin ribbon river robin rudder scarf silver spider "
    "squirrel station thistle village violin walnut wardrobe whistle".split()
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something hidden in the text.

    Attributes:
      word: What has a code.
      number: The code, five digits.
      position: Tokens of the text up to the code's end.
      question: Tokens of the question, int32.
    """

    word: str
    number: str
    position: int
    question: Int[np.ndarray, "Q"]

    def is_answer(self, text: str) -> bool:
        """Whether a generated text begins with the code, and not with a longer word or number."""
        return re.match(rf"\s*{self.number}(?!\w)", text) is not None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text and what is hidden in it.

    Attributes:
      tokens: The text, int32.
      facts: In the order of the text.
    """

    tokens: Int[np.ndarray, "T"]
    facts: tuple[Fact, ...]


def prose() -> list[str]:
    """The paragraphs of Python's help topics that read as prose, each in one line.

    Every installation of Python carries them. Grammar rules, tables and examples are left out.
    """
    from pydoc_data.topics import topics

    paragraphs = (part for topic in topics.values() for part in re.split(r"\n\s*\n", topic))
    lines = dict.fromkeys(" ".join(paragraph.split()) for paragraph in paragraphs)
    return [line for line in lines if len(line) > 150 and line[-1] == "." and _is_prose(line)]


def _is_prose(line: str) -> bool:
    return len(re.findall(r"[A-Za-z ,.’]", line)) >= _PROSE * len(line)


def hide_facts(tokenizer: Any, *, num_tokens: int, num_facts: int, seed: int) -> Prompt:
    """A text of at most `num_tokens` tokens with facts spread over it.

    The passage, words, codes and places are drawn from `seed`; a word occurs nowhere else in the
    text.

    Args:
      tokenizer: The model's.
      num_tokens: Most tokens of the text, its facts included.
      num_facts: Facts, at most `MAX_FACTS`.
      seed: Seed of the draws.

    Raises:
      ValueError: If the text has no room for so many facts.
    """
    if not 1 <= num_facts <= MAX_FACTS:
        raise ValueError(f"num_facts must be in 1..{MAX_FACTS}, got {num_facts}")
    least = num_facts * TOKENS_PER_FACT
    if num_tokens < least:
        raise ValueError(
            f"num_tokens must be at least {least} for {num_facts} facts, got {num_tokens}"
        )
    rng = np.random.default_rng(seed)
    paragraphs = prose()
    first = int(rng.integers(len(paragraphs)))
    words = [WORDS[i] for i in rng.permutation(len(WORDS))]
    numbers = [str(number) for number in 10_000 + rng.choice(90_000, num_facts, replace=False)]
    shares = (np.arange(num_facts) + rng.uniform(0.2, 0.8, num_facts)) / num_facts

    statements = [code_statement(*pair) for pair in zip(words, numbers, strict=False)]
    room = num_tokens - len(encode(tokenizer, "".join(statements))) - num_facts
    # From the beginning again where a long context outlasts the topics.
    text = _passage(itertools.islice(itertools.cycle(paragraphs), first, None), tokenizer, room)
    words = [word for word in words if word not in text.lower()][:num_facts]

    whole, ends, last = "", [], 0
    for word, number, share in zip(words, numbers, shares, strict=True):
        place = text.find(" ", int(share * len(text)))
        whole += text[last:place] + code_statement(word, number)
        ends.append(whole.rindex(number) + len(number))
        last = place
    whole += text[last:]
    return Prompt(
        encode(tokenizer, whole),
        tuple(
            Fact(
                word,
                number,
                len(encode(tokenizer, whole[:end])),
                encode(tokenizer, code_question(word), add_special_tokens=False),
            )
            for word, number, end in zip(words, numbers, ends, strict=True)
        ),
    )


def _passage(paragraphs: Any, tokenizer: Any, num_tokens: int) -> str:
    """Whole words of up to `num_tokens` tokens."""
    lines: list[str] = []
    while sum(map(len, lines)) < _CHARACTERS_PER_TOKEN * num_tokens:
        lines.append(next(paragraphs))
    tokens = encode(tokenizer, " ".join(lines), add_special_tokens=False)[:num_tokens]
    text, _, _ = decode(tokenizer, tokens).rpartition(" ")
    return text
