"""`sketchwalk chat`: holds a conversation in the terminal, or over the lines of a pipe."""

import dataclasses
import sys
from typing import Any

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.options import field
from sketchwalk_jax.inference.auto import Auto
from sketchwalk_jax.language_model import LEAST_CONVERSATION
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.progress import elapsed


@dataclasses.dataclass(kw_only=True)
class Chat(options.GenerationCommand):
    """Talk with an instruction model, in the chat template of its checkpoint.

    Every line of standard input is a turn; an empty one is passed over, the end of the input ends
    the conversation. Answers appear on standard output as they come. Each turn reads only what is
    new, where the template allows it.
    """

    system: str | None = field("--system TEXT", "System message to begin with.")
    max_new_tokens: int = field(
        "--max-new-tokens N", "Most tokens of an answer.", options.SAMPLING, min=1, value=512
    )
    seed: int | None = field(
        "--seed N",
        "Seed of the random draws.",
        options.SAMPLING,
        "another each time",
        min=0,
        max=2**32 - 1,
    )

    def run(self) -> None:
        """Reads turns, and prints the answers."""
        prepared = self.prepare()
        tokenizer = prompt.open_tokenizer(prepared.directory)
        prompt.check_chat_template(tokenizer)
        lm = self.load(prepared, tokenizer, sharding=None, phase=self.phase)
        lm = options.set_density(lm, self.density, num_tokens=LEAST_CONVERSATION)
        if self.policy == options.AUTO:
            assert isinstance(lm.policy, Policy)
            lm = dataclasses.replace(lm, policy=Auto(lm.policy))
        talk = lm.conversation(
            system=self.system,
            max_new_tokens=self.max_new_tokens,
            sampling=prepared.sampling,
            key=self.seed,
        )
        is_terminal = sys.stdin.isatty()
        mark = "> " if is_terminal else ""
        print(mark, end="", flush=True)
        for line in iter(sys.stdin.readline, ""):
            if line.strip():
                _answer(talk, line.rstrip("\r\n"))
            print(mark, end="", flush=True)
        if is_terminal:
            print(flush=True)


def _answer(talk: Any, text: str) -> None:
    """Prints the answer to one turn as it is generated."""
    pieces = talk.stream(text)
    with elapsed("reading"):
        first = next(pieces, "")
    print(first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
