"""Provides the text in which tasks hide sentences: English prose, and its passages as tokens.

`read_text` reads the text; a `Haystack` draws passages from it, word by word, so that a prompt has
exactly the requested length.
"""

import dataclasses
import functools
import hashlib
import itertools
import lzma
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sketchwalk_jax.text.tokenizer import encode, token_ids
from sketchwalk_jax.validation import check_number

HELD_OUT = 2**32
"""Offset from the seed of an evaluation to the seed of its held-out prompts."""

# Start words that `Haystack.fit` tries: with byte tokens, one in six gives the exact length.
_NUM_STARTS = 128


def is_held_out(word: str) -> bool:
    """Whether a word is reserved for evaluation: every fifth one, by its SHA-256.

    Training and evaluation use the same sentences with disjoint words.

    Example:
      >>> [word for word in ("lantern", "river", "window", "button") if is_held_out(word)]
      ['river', 'button']
    """
    return hashlib.sha256(word.encode()).digest()[0] % 5 == 0


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and its identification.

    Attributes:
      content: The text in one line: words with one space between them.
      name: Name of the file, or of the module that carries the text.
      sha256: SHA-256 of the whole file, whatever `tail` is; without a file, of the whole text in
        UTF-8.
      tail: Share of the whole text that `content` keeps, from its end.
    """

    content: str
    name: str
    sha256: str
    tail: float

    @property
    def about(self) -> dict[str, Any]:
        """Identifies the text in the `meta` of results."""
        return {"name": self.name, "sha256": self.sha256, "tail": self.tail}

    @functools.cached_property
    def held_out_words(self) -> tuple[str, ...]:
        """Sorted lower-case words of 4 to 8 letters that training never hides."""
        # Skip beginnings of contractions: "wouldn" of "wouldn't" is no word.
        words = set(re.findall(r"\b[a-z]{4,8}\b(?!['’]\w)", self.content))
        return tuple(sorted(word for word in words if is_held_out(word)))


def read_text(path: str | os.PathLike[str] | None = None, *, tail: float = 1.0) -> Text:
    """Reads a text file, or the English prose in every installation of Python.

    Args:
      path: A UTF-8 file, compressed if its name ends with `.xz`. None takes the topics of Python's
        own help (`pydoc_data.topics`).
      tail: Share of the text to keep, from its end: the part that a model was not trained on.

    Returns:
      The text in one line; with a `tail` below 1, it begins at a word.

    Raises:
      ValueError: If `tail` is not in (0, 1], or if the file cannot be read as text or has no words.

    Example:
      >>> read_text().content[:21]
      'The "assert" statemen'
    """
    check_number("tail", tail, "(0, 1]")
    if path is None:
        from pydoc_data.topics import topics

        name = f"pydoc_data.topics of Python {platform.python_version()}"
        raw = " ".join(topics.values()).encode()
        text = raw.decode()
    else:
        name = Path(path).name
        raw, text = _read_file(Path(path))
    text = " ".join(text.split())
    start = len(text) - int(len(text) * tail)
    if start > 0 and text[start - 1] != " ":
        start = text.find(" ", start) + 1 or len(text)
    content = text[start:]
    if not content:
        raise ValueError(f"path must be a text with words in its last {tail:g}, got {name!r}")
    return Text(content, name, hashlib.sha256(raw).hexdigest(), float(tail))


@functools.cache
def read_code() -> Text:
    """Reads the program code in every installation of Python: its standard library.

    Returns:
      The library's top-level modules in the order of their names, joined with their line breaks
      kept: `content` has many lines.

    Raises:
      ValueError: If this Python has no sources.

    Example:
      >>> read_code().name.startswith("standard library of Python 3")
      True
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    content = "\n".join(source for source in sources if source.strip())
    if not content:
        raise ValueError("Python must have the sources of its standard library, found none")
    name = f"standard library of Python {platform.python_version()}, {len(paths)} modules"
    return Text(content, name, hashlib.sha256(content.encode()).hexdigest(), 1.0)


def prompt_rng(task: str, num_tokens: int, seed: int, index: int = 0) -> np.random.Generator:
    """Makes the random generator of one prompt of a task."""
    return np.random.default_rng([zlib.crc32(task.encode()), num_tokens, seed, index])


def draw_lines(
    text: Text, tokenizer: Any, *, num_tokens: int, sources: Sequence[np.random.Generator]
) -> list[list[int]]:
    """Draws passages of a text with lines, each beginning at a line.

    Arguments and errors as in `draw_passages`, but every passage has exactly `num_tokens` tokens,
    and may end inside a word.
    """
    opening, content = _opening_tokens(tokenizer), text.content
    passages = []
    for rng in sources:
        place = int(rng.integers(0, len(content)))
        size, tokens = 4 * num_tokens, list[int]()
        while len(tokens) < num_tokens:
            # Near the end of the text, begin early enough for a whole passage.
            start = content.rfind("\n", 0, max(0, min(place, len(content) - size)) + 1) + 1
            piece = content[start : start + size]
            tokens = opening + encode(tokenizer, piece, add_special_tokens=False).tolist()
            if len(tokens) < num_tokens and size >= len(content):
                raise ValueError(
                    f"text must be long enough for passages of {num_tokens} tokens, got "
                    f"{len(tokens)} tokens in {len(content)} characters"
                )
            size *= 2
        passages.append(tokens[:num_tokens])
    return passages


def _read_file(path: Path) -> tuple[bytes, str]:
    """Reads the bytes of a file and the text in them."""
    try:
        raw = path.read_bytes()
        return raw, (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(
            f"path must be a readable UTF-8 file, got {str(path)!r}: {error}"
        ) from None


class WordEncoder:
    """Tokens of words, each distinct word encoded once.

    A text is encoded as its first word, then every further word with the space before it. This
    equals the encoding of the whole text if no token has a space inside, which holds for the
    tokenizers of Llama and Qwen and for bytes. For other tokenizers the tokens spell the same text,
    but split differently.
    """

    def __init__(self, tokenizer: Any, *, opening: str | None = None) -> None:
        """Starts with no word.

        Args:
          tokenizer: A tokenizer of transformers.
          opening: Text before the first word and its space, with all special tokens spelled out.
            None for the tokenizer's own beginning tokens, without a space.
        """
        self._tokenizer = tokenizer
        self._is_framed = opening is not None
        if opening is None:
            self._opening = _opening_tokens(tokenizer)
        else:
            self._opening = encode(tokenizer, opening, add_special_tokens=False).tolist()
        self._anchor = encode(tokenizer, ".", add_special_tokens=False).tolist()
        self._first: dict[str, list[int]] = {}
        self._further: dict[str, list[int]] = {}

    def first(self, words: Sequence[str]) -> list[list[int]]:
        """Encodes each word as the beginning of a text, with the opening before it."""
        if self._is_framed:
            return [self._opening + tokens for tokens in self.further(words)]
        new = [word for word in dict.fromkeys(words) if word not in self._first]
        for word, tokens in zip(new, self._encode(new), strict=True):
            self._first[word] = self._opening + tokens
        return [self._first[word] for word in words]

    def further(self, words: Sequence[str]) -> list[list[int]]:
        """Encodes each word with the space before it."""
        new = [word for word in dict.fromkeys(words) if word not in self._further]
        found = self._encode_behind([f" {word}" for word in new])
        self._further |= dict(zip(new, found, strict=True))
        return [self._further[word] for word in words]

    def sentence(self, sentence: str) -> list[int]:
        """Encodes a sentence that begins with a space."""
        return list(itertools.chain.from_iterable(self.further(sentence.split())))

    def passage(self, text: str) -> list[int]:
        """Encodes a text of any form that follows another text, with its line breaks.

        A sentence that begins with a space is encoded word by word, like the haystack.
        """
        is_sentence = text == "".join(f" {word}" for word in text.split())
        return self.sentence(text) if is_sentence else self._encode_behind([text])[0]

    def _encode_behind(self, texts: list[str]) -> list[list[int]]:
        # Encode behind an anchor: some tokenizers add a space at the beginning of a text.
        size, found = len(self._anchor), []
        for text, tokens in zip(texts, self._encode([f".{text}" for text in texts]), strict=True):
            is_apart = tokens[:size] == self._anchor
            found.append(tokens[size:] if is_apart else self._encode([text])[0])
        return found

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return token_ids(self._tokenizer, texts, add_special_tokens=False) if texts else []


def _opening_tokens(tokenizer: Any) -> list[int]:
    """Returns the tokens that a tokenizer adds before a text, such as beginning-of-sequence."""
    bare = encode(tokenizer, "a", add_special_tokens=False).tolist()
    full = encode(tokenizer, "a").tolist()
    places = range(len(full) - len(bare) + 1)
    return next((full[:i] for i in places if full[i : i + len(bare)] == bare), [])


class Haystack:
    """Random passages of a text with a number of tokens, each beginning at a word.

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
        """Finds the last character from which the rest of the text is long enough."""
        size = 2 * self._num_tokens
        while True:
            start = self._content.find(" ", max(0, len(self._content) - size)) + 1
            start = start if size < len(self._content) else 0
            words = self._content[start:].split(" ")
            counts = self._count(words)
            # Element i: tokens of the words from i on, without the start words that `fit` may drop.
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
        """Draws words of a random passage, a few more than `num_tokens` tokens."""
        place = int(rng.integers(0, self._last_start + 1))
        start = self._content.rfind(" ", 0, place + 1) + 1
        size = 2 * self._num_tokens
        while True:
            words = self._content[start : start + size].split(" ")
            if start + size < len(self._content):
                words = words[:-1]  # the end of the slice may cut it
            tokens = np.cumsum(self._count(words)[_NUM_STARTS:])
            if tokens.size and tokens[-1] >= self._num_tokens:
                return words[: _NUM_STARTS + int(np.searchsorted(tokens, self._num_tokens)) + 1]
            size *= 2

    def fit(self, words: Sequence[str], num_tokens: int) -> list[list[int]]:
        """Cuts a passage to a number of tokens, at words.

        Args:
          words: Words that `draw` returned.
          num_tokens: Tokens to keep, special tokens before the text included; at most the tokens of
            a passage.

        Returns:
          Tokens of each word, `num_tokens` together, or as close below as dropping some of the
          first words allows; empty if no word fits.
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


def draw_passages(
    text: Text, tokenizer: Any, *, num_tokens: int, sources: Iterable[np.random.Generator]
) -> list[list[int]]:
    """Draws passages of a text, each beginning at a word.

    Args:
      text: The text.
      tokenizer: A tokenizer of transformers.
      num_tokens: Tokens of each passage, special tokens before it included; can be a few fewer if
        words are long, never more.
      sources: A random generator for each passage.

    Returns:
      The tokens of each passage.

    Raises:
      ValueError: If the text is shorter than a passage.
    """
    haystack = Haystack(text, WordEncoder(tokenizer), num_tokens)
    fitted = (haystack.fit(haystack.draw(rng), num_tokens) for rng in sources)
    return [[*itertools.chain.from_iterable(words)] for words in fitted]
