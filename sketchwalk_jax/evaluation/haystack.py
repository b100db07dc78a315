"""Passages of a text as tokens, word by word, so that a prompt has exactly the length asked for."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sketchwalk_jax.evaluation.text import Text
from sketchwalk_jax.tokenizer import encode

# Beginnings that `Haystack.fit` tries: with bytes, about one in six gives the exact length.
_NUM_STARTS = 128


class WordEncoder:
    """Tokens of words, each distinct word encoded once.

    A text is the tokens of its first word, then those of every further word with the space before
    it. That is the encoding of the whole text wherever a tokenizer has no token with a space
    inside, which holds for the tokenizers of Llama and Qwen and for bytes. Elsewhere the tokens
    spell the same text, only not as the tokenizer itself would cut it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Starts with no word.

        Args:
          tokenizer: A tokenizer of transformers.
        """
        self._tokenizer = tokenizer
        self._opening = _opening_tokens(tokenizer)
        self._anchor = encode(tokenizer, ".", add_special_tokens=False).tolist()
        self._first: dict[str, list[int]] = {}
        self._further: dict[str, list[int]] = {}

    def first(self, words: Sequence[str]) -> list[list[int]]:
        """Tokens of each word as the beginning of a text, special tokens included."""
        new = [word for word in dict.fromkeys(words) if word not in self._first]
        for word, tokens in zip(new, self._encode(new), strict=True):
            self._first[word] = self._opening + tokens
        return [self._first[word] for word in words]

    def further(self, words: Sequence[str]) -> list[list[int]]:
        """Tokens of each word with the space before it."""
        new = [word for word in dict.fromkeys(words) if word not in self._further]
        # Some tokenizers add a space of their own to the beginning of a text: it must not be here.
        size = len(self._anchor)
        for word, tokens in zip(new, self._encode([f". {word}" for word in new]), strict=True):
            is_apart = tokens[:size] == self._anchor
            self._further[word] = tokens[size:] if is_apart else self._encode([f" {word}"])[0]
        return [self._further[word] for word in words]

    def sentence(self, sentence: str) -> list[int]:
        """Tokens of a sentence that begins with a space."""
        return list(itertools.chain.from_iterable(self.further(sentence.split())))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _opening_tokens(tokenizer: Any) -> list[int]:
    """What a tokenizer adds before a text, such as its beginning-of-sequence token."""
    bare = encode(tokenizer, "a", add_special_tokens=False).tolist()
    full = encode(tokenizer, "a").tolist()
    places = range(len(full) - len(bare) + 1)
    return next((full[:i] for i in places if full[i : i + len(bare)] == bare), [])


class Haystack:
    """Random passages of a text that hold a number of tokens, each from the start of a word on.

    Attributes:
      encoder: Encoder of its words.
    """

    def __init__(self, text: Text, encoder: WordEncoder, num_tokens: int) -> None:
        """Finds where the last passage begins.

        Args:
          text: The text.
          encoder: Encoder of its words.
          num_tokens: Tokens that every passage holds, at least.

        Raises:
          ValueError: If the text is shorter than one passage.
        """
        self.encoder = encoder
        self._content, self._num_tokens = text.content, num_tokens
        self._last_start = self._find_last_start()

    def _find_last_start(self) -> int:
        """The last character from which the rest of the text is long enough."""
        size = 2 * self._num_tokens
        while True:
            start = self._content.find(" ", max(0, len(self._content) - size)) + 1
            start = start if size < len(self._content) else 0
            words = self._content[start:].split(" ")
            counts = self._count(words)
            # Element i: tokens of the words from i on, without those that `fit` may leave out.
            left = np.cumsum(counts[::-1])[::-1][_NUM_STARTS:]
            enough = np.flatnonzero(left >= self._num_tokens)
            if enough.size:
                return start + sum(len(word) + 1 for word in words[: enough[-1]])
            if start == 0:
                raise ValueError(
                    f"text must be long enough for passages of {self._num_tokens} tokens, got "
                    f"{counts.sum()} tokens in {len(self._content)} characters"
                )
            size *= 2

    def _count(self, words: Sequence[str]) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.encoder.further(words)], int)

    def draw(self, rng: np.random.Generator) -> list[str]:
        """Words of a random passage, a few more than `num_tokens` tokens."""
        place = int(rng.integers(0, self._last_start + 1))
        start = self._content.rfind(" ", 0, place + 1) + 1
        size = 2 * self._num_tokens
        while True:
            words = self._content[start : start + size].split(" ")
            if start + size < len(self._content):
                words = words[:-1]  # cut by the end of the slice
            tokens = np.cumsum(self._count(words)[_NUM_STARTS:])
            if tokens.size and tokens[-1] >= self._num_tokens:
                return words[: _NUM_STARTS + int(np.searchsorted(tokens, self._num_tokens)) + 1]
            size *= 2

    def fit(self, words: Sequence[str], num_tokens: int) -> list[list[int]]:
        """Cuts a passage to a number of tokens, at words.

        Args:
          words: Words that `draw` returned.
          num_tokens: Tokens to keep, special tokens before the text included; at most those of a
            passage.

        Returns:
          Tokens of each word. Together they are `num_tokens`, or as few less as some cut among the
          first words allows; empty if not even one word has room.
        """
        counts = self._count(words)
        ends = np.concatenate([[0], np.cumsum(counts)])  # tokens of words[:i]
        heads = self.encoder.first(words[:_NUM_STARTS])
        starts = np.arange(len(heads))
        targets = num_tokens - np.array([len(head) for head in heads]) + ends[starts + 1]
        stops = np.searchsorted(ends, targets, side="right") - 1
        unused = np.where(stops > starts, targets - ends[stops], num_tokens + 1)
        start = int(np.argmin(unused))
        if unused[start] > num_tokens:
            return []
        return [heads[start], *self.encoder.further(words[start + 1 : stops[start]])]
