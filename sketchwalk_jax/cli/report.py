"""Following a generation: its text as it comes, and what it measured."""

import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np

from sketchwalk_jax.cli.progress import elapsed, token_bar
from sketchwalk_jax.generation import Stream, StreamChunk
from sketchwalk_jax.tokenizer import StreamDecoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one generation gave.

    Attributes:
      text: The new text.
      prompt_tokens: Tokens of the prompt, without the padding of its bucket.
      new_tokens: Generated tokens, an end token included.
      finish_reason: `"eos"` after an end token, else `"length"`.
      ttft_s: Seconds from submitting the prompt to the first new token. They hold the compilation
        of prefill and of the decode step, unless compiled programs were kept of an earlier run.
      tokens_per_s: Rate of the tokens after the first; `None` if there is only one.
      measured_density: Attended over causal pairs, all layers and both phases.
      measured_density_prefill: The same over the prompt.
      measured_density_decode: The same over the new tokens.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    finish_reason: str
    ttft_s: float
    tokens_per_s: float | None
    measured_density: float
    measured_density_prefill: float
    measured_density_decode: float


def follow(
    chunks: Stream,
    tokenizer: Any,
    *,
    num_prompt_tokens: int,
    max_new_tokens: int,
    shows_text: bool,
) -> Result:
    """Runs a generation to its end.

    Args:
      chunks: The generation, not yet started, of one sequence.
      tokenizer: Turns its tokens into text.
      num_prompt_tokens: Tokens of the prompt.
      max_new_tokens: Most tokens that come.
      shows_text: Whether the text is written to standard output as it comes.

    Returns:
      The text and the measurements.
    """
    decoder, pieces, num_tokens = StreamDecoder(tokenizer), [], 0

    def write(piece: str) -> None:
        pieces.append(piece)
        if shows_text:
            print(piece, end="", flush=True)

    def take(chunk: StreamChunk) -> int:
        count = int(chunk.lengths[0])
        write(decoder.push(chunk.tokens[0, :count]))
        return count

    start = time.perf_counter()
    with elapsed(f"reading {num_prompt_tokens} tokens"):
        next(chunks)  # the end of prefill, without a token
    with elapsed("generating"):
        chunk = next(chunks)
    num_first = num_tokens = take(chunk)
    first = time.perf_counter()
    # Text on the terminal is its own progress.
    is_wanted = not (shows_text and sys.stdout.isatty())
    with token_bar(max_new_tokens, initial=num_first, is_wanted=is_wanted) as bar:
        for chunk in chunks:
            count = take(chunk)
            num_tokens += count
            bar.update(count)
    end = time.perf_counter()
    write(decoder.finish())
    if shows_text:
        print(flush=True)

    density = chunk.measured_density
    return Result(
        text="".join(pieces),
        prompt_tokens=num_prompt_tokens,
        new_tokens=num_tokens,
        finish_reason="eos" if bool(chunk.is_done[0]) else "length",
        ttft_s=first - start,
        tokens_per_s=(num_tokens - num_first) / (end - first) if num_tokens > num_first else None,
        measured_density=float(density.overall),
        measured_density_prefill=float(np.mean(density.prefill)),
        measured_density_decode=float(np.mean(density.decode)),
    )


def to_json(result: Result, **more: Any) -> str:
    """One JSON object with the fields of `result` and more."""
    fields = {**dataclasses.asdict(result), **more}
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
    return json.dumps(rounded, allow_nan=False)


def to_line(result: Result) -> str:
    """The measurements in one line."""
    rate = "" if result.tokens_per_s is None else f", {result.tokens_per_s:.1f} tokens/s"
    return (
        f"{result.prompt_tokens} prompt tokens, {result.new_tokens} new, first after "
        f"{result.ttft_s:.2f} s{rate}; density {result.measured_density:.3f} "
        f"(prompt {result.measured_density_prefill:.3f}, "
        f"new {result.measured_density_decode:.3f})"
    )
