"""Prompts with a needle in them, drawn from any English text."""

import dataclasses
import hashlib
import lzma
import re
from pathlib import Path
from typing import Any

import common  # noqa: F401  (finds the package in a checkout that is not installed)
import numpy as np

from sketchwalk_jax.tokenizer import decode, encode


@dataclasses.dataclass(frozen=True)
class Needle:
    """One prompt and the code that answers it.

    Attributes:
      prompt: `<text with " The code of WORD is CODE." in it> Q: code of WORD? A: `.
      code: Five digits.
      depth: Share of the text that stands before the sentence.
    """

    prompt: str
    code: str
    depth: float


def read_text(path: str | None, tail: float) -> tuple[str, dict[str, str]]:
    """The last share `tail` of a text in one line, and what tells which text it was.

    Without a path: the topics of Python's own help, English prose that every Python carries.
    """
    if path is None:
        import platform
        from pydoc_data.topics import topics

        text = " ".join(topics.values())
        source = {"name": f"pydoc_data.topics of Python {platform.python_version()}"}
    else:
        raw = Path(path).read_bytes()
        source = {"name": Path(path).name, "sha256": hashlib.sha256(raw).hexdigest()}
        text = (lzma.decompress(raw) if path.endswith(".xz") else raw).decode("utf-8")
    text = " ".join(text.split())
    return text[len(text) - int(len(text) * tail) :], source


def draw_needles(
    text: str, tokenizer: Any, *, count: int, num_tokens: int, seed: int
) -> list[Needle]:
    """Prompts of about `num_tokens` tokens: distinct words and codes, depths spread evenly."""
    rng = np.random.default_rng(seed)
    words = sorted(set(re.findall(r"\b[a-z]{5,8}\b", text)))
    words = [words[i] for i in rng.choice(len(words), count, replace=False)]
    codes = 10000 + rng.choice(90000, count, replace=False)
    needles = []
    for index, (word, code) in enumerate(zip(words, codes, strict=True)):
        sentence, question = f" The code of {word} is {code}.", f" Q: code of {word}? A: "
        room = num_tokens - len(encode(tokenizer, sentence + question))
        depth = (index + 0.5) / count
        hay = draw_hay(text, tokenizer, room, without=word, rng=rng)
        place = hay.find(" ", int(depth * len(hay)))
        place = place if place >= 0 else len(hay)
        prompt = hay[:place] + sentence + hay[place:] + question
        needles.append(Needle(prompt, str(code), depth))
    return needles


def draw_hay(
    text: str, tokenizer: Any, num_tokens: int, *, without: str, rng: np.random.Generator
) -> str:
    """A passage of `num_tokens` tokens, from the beginning of a word on."""
    longest = 8 * num_tokens  # characters; more than any tokenizer packs into so many tokens
    if num_tokens < 1 or len(text) < 2 * longest:
        raise ValueError(
            f"the text must be long enough for passages of {num_tokens} tokens, got {len(text)} "
            f"characters"
        )
    while True:
        start = text.index(" ", int(rng.integers(0, len(text) - longest - 100))) + 1
        tokens = encode(tokenizer, text[start : start + longest], add_special_tokens=False)
        hay = decode(tokenizer, tokens[:num_tokens]).rstrip("\N{REPLACEMENT CHARACTER}")
        if without not in hay:
            return hay
