"""One reader of the demonstration's text: a policy with its cache, asked one question at a time."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.cache import Cache
from sketchwalk_jax.cli.demo_prompt import Fact, Prompt
from sketchwalk_jax.cli.stopwatch import Stopwatch
from sketchwalk_jax.generation import stream
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.plots import block_map
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.tokenizer import StreamDecoder

QUESTION_TOKENS, ANSWER_TOKENS = 48, 16  # the most of each
ROOM = QUESTION_TOKENS + ANSWER_TOKENS


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
    """

    def __init__(
        self,
        params: Params,
        model_config: ModelConfig,
        config: Policy,
        tokenizer: Any,
        *,
        phase: str,
        stopwatch: Stopwatch,
    ) -> None:
        """Keeps what every call needs; `config` and `phase` are as those of `generate`."""
        self._params, self._tokenizer, self._stopwatch = params, tokenizer, stopwatch
        self._options: dict[str, Any] = dict(
            model_config=model_config, config=config, phase=phase, return_selection=True
        )
        self._block_size = config.block_size
        self._cache: Cache | None = None
        self._num_tokens = 0
        self._decode_s, self._num_decoded = 0.0, 0
        self._decode_pairs, self._decode_causal = 0.0, 0.0
        self.read_s = self.read_density = 0.0
        self.selection: BlockSelection | None = None
        self.answers: list[Answer] = []

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
