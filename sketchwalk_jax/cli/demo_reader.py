"""The demonstration's text and its readers: what is hidden in it, and who is asked for it.

`hide_facts` hides facts in English prose. A `Reader` is a policy with its cache: it reads the text
once, and answers every question from there.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from sketchwalk_jax.cache import Cache
from sketchwalk_jax.cli.stopwatch import Stopwatch
from sketchwalk_jax.evaluation.wording import code_question, code_statement
from sketchwalk_jax.generation import stream
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.plots import block_map
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.tokenizer import StreamDecoder, decode, encode

SOURCE = "Python's help topics"
MAX_FACTS = 16
TOKENS_PER_FACT = 128  # least text around a fact, in tokens
_PROSE = 0.95  # least share of letters and the like in a paragraph
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer packs into a token of English

QUESTION_TOKENS, ANSWER_TOKENS = 48, 16  # the most of each
ROOM = QUESTION_TOKENS + ANSWER_TOKENS

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


@dataclasses.dataclass
class Answer:
    """The answer to one question.

    Attributes:
      text: What was generated, one line.
      is_right: Whether it is the code.
      blocks: Share of the lists of each sparse layer that held a key block when the question's
        last row was read, `[L, J]`; `None` if nothing was selected.
    """

    text: str = ""
    is_right: bool = False
    blocks: np.ndarray | None = None

    def add(self, piece: str, fact: Fact) -> None:
        """Appends generated text."""
        # What a terminal would take for a command is replaced.
        shown = (char if char.isprintable() or char.isspace() else "�" for char in piece)
        self.text = re.sub(r"\s+", " ", self.text + "".join(shown)).lstrip()
        self.is_right = fact.is_answer(self.text)


class Reader:
    """A policy that reads the text once, and answers every question from there.

    Attributes:
      read_s: Seconds in which the text was read.
      read_density: Attended over causal pairs of the text, all layers.
      decode_density: The same over the tokens of the answers.
      selection: Blocks that the text's rows attended to, or `None`.
      answers: One for each question so far.
      is_finite: Whether every logit so far was finite; answers that were chosen from others mean
        nothing.
    """

    def __init__(
        self,
        params: Params,
        model_config: ModelConfig,
        policy: Policy,
        tokenizer: Any,
        *,
        phase: str,
        stopwatch: Stopwatch,
    ) -> None:
        """Keeps what every call needs; `policy` and `phase` are as those of `generate`."""
        self._params, self._tokenizer, self._stopwatch = params, tokenizer, stopwatch
        self._options: dict[str, Any] = dict(
            model_config=model_config, policy=policy, phase=phase, return_selection=True
        )
        self._block_size = policy.block_size
        self._cache: Cache | None = None
        self._num_tokens = 0
        self._decode_s, self._num_decoded = 0.0, 0
        self._decode_pairs, self._decode_causal = 0.0, 0.0
        self.read_s = self.read_density = 0.0
        self.selection: BlockSelection | None = None
        self.answers: list[Answer] = []
        self.is_finite = True

    @property
    def tokens_per_s(self) -> float:
        """Rate of all decode steps so far."""
        return self._num_decoded / self._decode_s

    @property
    def decode_density(self) -> float:
        """Attended over causal pairs of the answers' tokens, all layers."""
        return self._decode_pairs / self._decode_causal

    @property
    def num_right(self) -> int:
        """Right answers so far."""
        return sum(answer.is_right for answer in self.answers)

    def read(self, prompt: Prompt, *, max_tokens: int) -> None:
        """Reads the text into a new cache of `max_tokens` tokens, which leaves `ROOM`."""
        self._num_tokens = len(prompt.tokens)
        # One width for all texts, so that another seed does not compile anew.
        width = max_tokens - ROOM
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : self._num_tokens] = prompt.tokens
        chunks = stream(
            self._params,
            tokens,
            lengths=np.array([self._num_tokens], np.int32),
            max_new_tokens=1,  # never taken
            max_tokens=max_tokens,
            **self._options,
        )
        chunk, self.read_s = self._stopwatch.time(lambda: next(chunks))
        self.read_density = float(np.mean(chunk.measured_density.prefill))
        self.selection, self._cache = chunk.selection, chunks.cache
        self.is_finite &= bool(chunk.is_finite[0])

    def ask(self, fact: Fact) -> Iterator[Answer]:
        """Asks for a fact; yields the answer again and again as it grows."""
        answer = Answer()
        self.answers.append(answer)
        decoder, tokens = StreamDecoder(self._tokenizer), np.zeros((1, ROOM), np.int32)
        tokens[0, : len(fact.question)] = fact.question
        chunks = stream(
            self._params,
            tokens,
            every=1,
            lengths=np.array([len(fact.question)], np.int32),
            cache=_copy(self._cache),  # the text's own stays for the next question
            max_new_tokens=ANSWER_TOKENS,
            **self._options,
        )
        start, _ = self._stopwatch.time(lambda: next(chunks))
        if start.selection is not None:
            first = self._num_tokens // self._block_size
            last = (self._num_tokens + len(fact.question) - 1) // self._block_size
            answer.blocks = block_map(start.selection, first_block=first)[:, last - first]
        yield answer
        density, is_over = start.measured_density, False
        while not is_over:
            chunk, seconds = self._stopwatch.time(lambda: next(chunks, None))
            if chunk is None:
                answer.add(decoder.finish(), fact)
                is_over = True
            else:
                density = chunk.measured_density
                self.is_finite &= bool(chunk.is_finite[0])
                self._decode_s += seconds
                self._num_decoded += 1
                answer.add(decoder.push(chunk.tokens[0, : int(chunk.lengths[0])]), fact)
                is_over = "." in answer.text
            yield answer
        self._decode_pairs += float(np.mean(density.decode_pairs))
        self._decode_causal += float(np.sum(density.decode_causal))


@jax.jit
def _copy(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)
