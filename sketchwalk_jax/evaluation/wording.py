"""Words the tasks: the sentences to hide, the questions, and the frame around them.

The bundled model was trained on `plain`: statements in a text, and `Q: ... ? A:` after or within
it. `chat` is for instruction models: one user message with an instruction, the text with its
statements, and the question; the assistant's turn begins with the words that lead up to the answer
(as in RULER, arXiv:2404.06654), so that a small model answers in the expected form.

Sentences begin with a space and do not end with one: they can follow one another, and have the same
tokens anywhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from sketchwalk_jax.text.tokenizer import render_chat
from sketchwalk_jax.validation import check_choice

# Marks insertions in a conversation: no text contains it, and no template escapes it.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


def code_statement(word: str, number: str) -> str:
    """States the code of a word, as a needle does."""
    return f" The code of {word} is {number}."


def code_question(word: str) -> str:
    """Asks for the one code of a word."""
    return f" Q: code of {word}? A:"


def answer_text(values: Sequence[str]) -> str:
    """Writes the answer to a question, up to its final full stop."""
    return f" {', '.join(values)}."


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question and its answer.

    Attributes:
      question: The sentence that asks.
      answer: The right answer, up to its final full stop; begins with a space.
      prefix: Beginning of the assistant's turn, just before the answer; empty without turns.
    """

    question: str
    answer: str
    prefix: str = ""


class Wording:
    """The sentences of the bundled model, without a frame: the wording `plain`."""

    name = "plain"

    def code(self, word: str, number: str) -> str:
        """States the code of a word."""
        return code_statement(word, number)

    def codes(self, words: Sequence[str], numbers: Sequence[str]) -> list[str]:
        """States codes in the order of the text; a word may have several."""
        return [self.code(*pair) for pair in zip(words, numbers, strict=True)]

    def ask_code(self, word: str, number: str) -> Asked:
        """Asks for the code of a word."""
        return Asked(code_question(word), answer_text([number]))

    def ask_each_code(self, words: Sequence[str], numbers: Sequence[str]) -> Asked:
        """Asks for the codes of several words, in this order."""
        return Asked(f" Q: code of each of {', '.join(words)}? A:", answer_text(numbers))

    def ask_all_codes(self, word: str, numbers: Sequence[str]) -> Asked:
        """Asks for all codes of a word, in the order of the text."""
        return Asked(f" Q: all codes of {word}? A:", answer_text(numbers))

    def value(self, name: str, value: str) -> str:
        """Assigns a variable its value: a number, or the name of another variable."""
        return f" Let {name} be {value}."

    def ask_value(self, name: str, values: Sequence[str]) -> Asked:
        """Asks for the variables on the way to a variable's number, and the number."""
        return Asked(f" Q: value of {name}? A:", answer_text(values))

    def vote(self, word: str) -> str:
        """States one vote for a word."""
        return f" One vote for {word}."

    def ask_votes(self, word: str) -> Asked:
        """Asks for the word with the most votes."""
        return Asked(" Q: most votes? A:", answer_text([word]))

    def opening(self, task: str, tokenizer: Any) -> str | None:
        """Writes the text before the passage; None for the tokenizer's own beginning tokens."""
        return None

    def frame(self, task: str, asked: Asked, tokenizer: Any) -> "Frame":
        """Writes the text between the passage and the answer, and after the answer."""
        return Frame(asked.question)


class ChatWording(Wording):
    """The wording `chat`: sentences for instruction models, in the turns of their chat template."""

    name = "chat"

    def code(self, word: str, number: str) -> str:
        """States the code of a word."""
        return f" The secret code of {word} is {number}."

    def ask_code(self, word: str, number: str) -> Asked:
        """Asks for the code of a word."""
        prefix = f"The secret code of {word} is"
        return Asked(f"What is the secret code of {word}?", answer_text([number]), prefix)

    def codes(self, words: Sequence[str], numbers: Sequence[str]) -> list[str]:
        """States codes in the order of the text, and numbers several codes of one word."""
        found = []
        for index, pair in enumerate(zip(words, numbers, strict=True)):
            is_one_of_several = words.count(words[index]) > 1
            nth = words[:index].count(words[index])
            found.append(_nth_code(nth, *pair) if is_one_of_several else self.code(*pair))
        return found

    def ask_each_code(self, words: Sequence[str], numbers: Sequence[str]) -> Asked:
        """Asks for the codes of several words, line by line."""
        lines = [self.code(*pair)[1:] for pair in zip(words, numbers, strict=True)]
        return _lines_asked(lines, numbers)

    def ask_all_codes(self, word: str, numbers: Sequence[str]) -> Asked:
        """Asks for all codes of a word, line by line."""
        lines = [_nth_code(nth, word, number)[1:] for nth, number in enumerate(numbers)]
        return _lines_asked(lines, numbers)

    def ask_value(self, name: str, values: Sequence[str]) -> Asked:
        """Asks for the variables on the way to a number, and the number, step by step."""
        steps = "".join(self.value(*link) for link in zip([name, *values], values, strict=False))
        prefix = f"Let {name} be"
        question = f"What is {name}? Answer step by step, down to the number."
        return Asked(question, steps.removeprefix(f" {prefix}"), prefix)

    def ask_votes(self, word: str) -> Asked:
        """Asks for the word with the most votes."""
        prefix = "The word with the most votes is"
        return Asked("Which word has the most votes?", answer_text([word]), prefix)

    def opening(self, task: str, tokenizer: Any) -> str | None:
        """Writes the chat template's beginning and the instruction."""
        return self._parts(task, Asked("", ""), tokenizer)[0]

    def frame(self, task: str, asked: Asked, tokenizer: Any) -> "Frame":
        """Writes the text between the passage and the answer, and after the answer.

        Raises:
          ValueError: If the tokenizer has no chat template, or one that alters the messages.
        """
        return Frame(*self._parts(task, asked, tokenizer)[1:])

    def _parts(self, task: str, asked: Asked, tokenizer: Any) -> list[str]:
        """Splits the chat template's text into pieces before, between and after the insertions."""
        kind = {"variable_tracking": "variables", "aggregation": "votes"}.get(task, "secret codes")
        # All pieces meet at a space, across which no tokenizer merges.
        text = (
            f"Some {kind} are hidden in the following text. Memorize them. I will ask about them "
            f"afterwards.\n\nText:{_MARK} (End of the text.)\n\n{asked.question}"
        )
        messages = [{"role": "user", "content": text}]
        if task == "mid_prompt":
            messages += [
                {"role": "assistant", "content": f"{asked.prefix}{_MARK}"},
                {"role": "user", "content": f"Here is more text:{_MARK} (End of the text.)"},
            ]
            parts = render_chat(tokenizer, messages).split(_MARK)
        else:
            parts = (render_chat(tokenizer, messages) + asked.prefix).split(_MARK)
        if len(parts) != 1 + sum(one["content"].count(_MARK) for one in messages):
            raise ValueError(
                "tokenizer must have a chat template that writes every message once and as it is, "
                f"got {''.join(parts)[:200]!r}"
            )
        return parts


_ORDINALS = ("first", "second", "third", "fourth")


def _nth_code(nth: int, word: str, number: str) -> str:
    return f" The {_ORDINALS[nth]} secret code of {word} is {number}."


def _lines_asked(lines: Sequence[str], numbers: Sequence[str]) -> Asked:
    """Asks to complete lines with numbers; the beginning of the first one is given."""
    blank = "\n".join(
        line.replace(number, "___") for line, number in zip(lines, numbers, strict=True)
    )
    prefix = lines[0].removesuffix(f" {numbers[0]}.")
    answer = "\n".join(lines).removeprefix(prefix)
    return Asked(f"Complete these lines:\n{blank}", answer, prefix)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Text around the answer. Words of the passage go on with a space.

    Attributes:
      asking: Text from the end of the passage to the answer.
      after: Text from the answer to the rest of the passage, if there is a rest.
      closing: Text after the rest.
    """

    asking: str
    after: str = ""
    closing: str = ""


_WORDINGS: dict[str, Wording] = {one.name: one for one in (Wording(), ChatWording())}

WORDINGS = tuple(_WORDINGS)
"""Names of wordings."""


def wording_of(name: str) -> Wording:
    """Returns the wording called `name`.

    Raises:
      ValueError: If it is not one of `WORDINGS`.

    Example:
      >>> wording_of("chat").code("river", "12345")
      ' The secret code of river is 12345.'
    """
    check_choice("wording", name, WORDINGS)
    return _WORDINGS[name]
