"""Turns plain text into tokens with its own byte-level BPE tokenizer, for the data generator.

Every digit is its own token, with the space before it if there is one, so that a number of five
digits has five tokens everywhere.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sketchwalk_jax.evaluation import wording
from sketchwalk_jax.text.haystack import Text, is_held_out, read_text

BEGIN, END = "<|begin|>", "<|end|>"
BEGIN_ID, END_ID = 0, 1
# Letters, one digit, or punctuation, each with the space before it.
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PASSAGE = 100_000  # characters to encode at a time
_NUMBERS = (100, 400, 1600)  # numbers per passage in the tokenizer's training text
_MIN_COUNT = 5  # least occurrences of a word that sentences ask for


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Tokens of the parts of sentences.

    Attributes:
      words: Tokens of each word that sentences may ask for, its space included.
      fixed: Tokens of the text between the places of a sentence, by sentence.
      first_digit: Token of each digit with a space before it.
      digit: Token of each digit alone.
      comma: Token of the comma.
      starts_word: For each token of the vocabulary, whether it begins with a space.
    """

    words: list[np.ndarray]
    fixed: dict[str, list[np.ndarray]]
    first_digit: np.ndarray
    digit: np.ndarray
    comma: int
    starts_word: np.ndarray


def read_corpus(path: str | Path, *, validation_share: float) -> tuple[str, str, Text]:
    """Reads a text and keeps its last part for validation.

    Args:
      path: UTF-8 text, plain or `.xz`.
      validation_share: Share of the text to keep out of training, in (0, 1).

    Returns:
      The part for training and the part for validation, each one line, and the whole text.

    Raises:
      ValueError: If the share is out of range or a part is too short to train or validate on.
    """
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share must be in (0, 1), got {validation_share}")
    text = read_text(path)
    cut = round(len(text.content) * (1 - validation_share))
    parts = text.content[:cut], text.content[cut:]
    if min(map(len, parts)) < _PASSAGE:
        raise ValueError(
            f"both parts of the text must have at least {_PASSAGE} characters, got "
            f"{len(parts[0])} and {len(parts[1])}"
        )
    return *parts, text


def train_tokenizer(text: str, *, vocab_size: int, seed: int) -> Tokenizer:
    """Trains byte-level BPE on a text and on numbers, which are rare in prose.

    Raises:
      ValueError: If the text is too short for a vocabulary of this size.
    """
    for numbers in _NUMBERS:  # a repetitive text needs more numbers
        tokenizer = _train(text, vocab_size, seed, numbers)
        if all(len(_ids(tokenizer, f" {digit}")) == 1 for digit in range(10)):
            break
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text must be long enough for {vocab_size} tokens, got "
            f"{tokenizer.get_vocab_size()}"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer


def _train(text: str, vocab_size: int, seed: int, numbers: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_passages(text, seed, numbers), trainer)
    return tokenizer


def _passages(text: str, seed: int, count: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    for start in range(0, len(text), _PASSAGE):
        yield text[start : start + _PASSAGE]
        numbers = rng.integers(0, 100_000, count)
        yield "".join(wording.code_statement("it", f"{number:05}") for number in numbers)


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a long text to uint16, passage by passage, cut at spaces."""
    cuts = [0]
    while len(text) - cuts[-1] > _PASSAGE:
        cuts.append(text.rindex(" ", cuts[-1] + 1, cuts[-1] + _PASSAGE))
    passages = [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    encoded = tokenizer.encode_batch(passages, add_special_tokens=False)
    return np.concatenate([np.array(one.ids, np.uint16) for one in encoded])


def find_words(text: str, *, held_out: bool) -> list[str]:
    """Finds words of four to eight letters for sentences, either for training or held out."""
    found = re.findall(r"\b[a-z]{4,8}\b", text)
    words, counts = np.unique(found, return_counts=True)
    return [
        str(word)
        for word, count in zip(words, counts, strict=True)
        if count >= _MIN_COUNT and is_held_out(str(word)) == held_out
    ]


def make_pieces(tokenizer: Tokenizer, words: list[str]) -> Pieces:
    """Encodes the parts of sentences."""
    # Mark each slot by a letter that no sentence contains, with the space before it.
    plain = wording.wording_of("plain")
    marked = {
        "code": wording.code_statement("\x01", "\x01"),
        "code?": wording.code_question("\x01"),
        "each?": plain.ask_each_code(["\x01"], []).question,
        "all?": plain.ask_all_codes("\x01", []).question,
        "value": plain.value("\x01", "\x01"),
        "value?": plain.ask_value("\x01", []).question,
        "vote": plain.vote("\x01"),
        "vote?": plain.ask_votes("\x01").question,
        "answer": wording.answer_text(["\x01"]),
    }
    size = tokenizer.get_vocab_size()
    strings = [tokenizer.id_to_token(token) for token in range(size)]
    return Pieces(
        words=[_ids(tokenizer, f" {word}") for word in words],
        fixed={
            name: [_ids(tokenizer, part) for part in sentence.split(" \x01")]
            for name, sentence in marked.items()
        },
        first_digit=np.concatenate([_ids(tokenizer, f" {digit}") for digit in range(10)]),
        digit=np.concatenate([_ids(tokenizer, str(digit)) for digit in range(10)]),
        comma=int(_ids(tokenizer, ",")[0]),
        starts_word=np.array([string.startswith("Ġ") for string in strings]),
    )


def bigram_loss(training: np.ndarray, validation: np.ndarray, *, vocab_size: int) -> float:
    """Computes mean cross-entropy (nats per token) of a bigram model smoothed with unigrams.

    `p(b | a) = (count(a, b) + m p(b)) / (count(a) + m)` with `m = 10`.
    """
    pairs = training[:-1].astype(np.int64) * vocab_size + training[1:]
    counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    unigram = (counts.sum(0) + 1.0) / (counts.sum() + vocab_size)
    before, after = validation[:-1].astype(np.int64), validation[1:].astype(np.int64)
    probability = (counts[before, after] + 10 * unigram[after]) / (counts.sum(1)[before] + 10)
    return float(-np.log(probability).mean())
