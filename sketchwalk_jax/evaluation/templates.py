"""The sentences that tasks hide in a text, their questions and their answers, as strings.

Training data and evaluation are made of the same sentences; their words are disjoint
(`is_held_out`). Every piece begins with a space and none ends with one, so that pieces can follow
one another and a tokenizer sees the same tokens wherever they stand.
"""

import hashlib
from collections.abc import Sequence


def is_held_out(word: str) -> bool:
    """Whether a word is reserved for evaluation: every fifth one, by its SHA-256.

    Example:
      >>> [word for word in ("lantern", "river", "window", "button") if is_held_out(word)]
      ['river', 'button']
    """
    return hashlib.sha256(word.encode()).digest()[0] % 5 == 0


def code_statement(word: str, number: str) -> str:
    """What a needle says."""
    return f" The code of {word} is {number}."


def code_question(word: str) -> str:
    """Asks for the one code of a word."""
    return f" Q: code of {word}? A:"


def each_code_question(words: Sequence[str]) -> str:
    """Asks for the codes of several words, in this order."""
    return f" Q: code of each of {', '.join(words)}? A:"


def all_codes_question(word: str) -> str:
    """Asks for all the codes that a word has, in the order in which the text gives them."""
    return f" Q: all codes of {word}? A:"


def value_statement(name: str, value: str) -> str:
    """Gives a variable its value: a number, or the name of another variable."""
    return f" Let {name} be {value}."


def value_question(name: str) -> str:
    """Asks for the number at the end of a chain of variables."""
    return f" Q: value of {name}? A:"


def vote_statement(word: str) -> str:
    """One of the votes to count."""
    return f" One vote for {word}."


def vote_question() -> str:
    """Asks for the word with the most votes."""
    return " Q: most votes? A:"


def answer_text(values: Sequence[str]) -> str:
    """The answer to a question, up to the full stop that ends it."""
    return f" {', '.join(values)}."
