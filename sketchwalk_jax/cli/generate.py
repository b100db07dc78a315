"""`sketchwalk generate`: continues a prompt, as text or JSON, or a file of prompts in batches."""

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import NOT_FINITE, UsageError
from sketchwalk_jax.cli.options import field
from sketchwalk_jax.cli.prompt_files import Entry, TextsFile, complete_all, read_prompts, rounded
from sketchwalk_jax.inference.auto import Auto
from sketchwalk_jax.inference.generation import NOT_LOADED, Options
from sketchwalk_jax.inference.padding import pad_to_bucket
from sketchwalk_jax.language_model import MAX_BATCH, TextStream
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.plans import fingerprint
from sketchwalk_jax.policies import PRESETS, Policy, changed_fields
from sketchwalk_jax.progress import elapsed, progress_bar

# Panels of the options.
_PROMPT, _FILES = "Prompt", "Many prompts"


@dataclasses.dataclass(kw_only=True)
class Generate(options.GenerationCommand):
    """Continue a prompt, or a file of prompts.

    The text appears on standard output as it comes, statistics on standard error.
    """

    prompt_text: str | None = field("--prompt TEXT", "The prompt.", _PROMPT)
    prompt_file: Path | None = field(
        "--prompt-file FILE",
        "File with the prompt, or else standard input; used byte for byte.",
        _PROMPT,
    )
    chat: bool = field("--chat", "Wrap the prompt into the checkpoint's chat template.", _PROMPT)
    system: str | None = field("--system TEXT", "System message before it; with --chat.", _PROMPT)
    chunk_size: int | None = field(
        "--chunk-size TOKENS",
        "Read the prompt this many tokens at a time, to save memory; a multiple of 64.",
        options.METHOD,
    )
    mesh: str | None = options.MESH
    seed: int = field(
        "--seed N", "Seed of the random draws.", options.SAMPLING, min=0, max=2**32 - 1, value=0
    )
    ignore_eos: bool = field(
        "--ignore-eos", "Go on after the checkpoint's end tokens.", options.SAMPLING
    )
    as_json: bool = field(
        "--json",
        "Print one JSON object when all is done: text, prompt_tokens, new_tokens, ttft_s, "
        "tokens_per_s, measured_density and more.",
        options.OUTPUT,
    )
    stream_every: int = field(
        "--stream-every N", "Tokens between two pieces of text.", options.OUTPUT, min=1, value=8
    )
    prompts: Path | None = field(
        "--prompts FILE",
        "Continue every line of a JSON-lines file instead: a string, or an object with "
        '"prompt" or "messages", and "tools".',
        _FILES,
    )
    out: Path | None = field(
        "--out FILE",
        "JSON-lines file for their texts. An interrupted run is continued from there.",
        _FILES,
    )
    batch: int | None = field(
        "--batch N", "Prompts at a time.", _FILES, "8, or fewer by the device's memory", min=1
    )
    overwrite: bool = field("--overwrite", "Start afresh where the file exists.", _FILES)

    def run(self) -> None:
        """Generates, and prints the text or writes the texts."""
        self._check_files()
        prepared = self.prepare()
        directory, model_config, config, dtype, sampling = prepared
        placement = options.make_placement(self.mesh, model_config, config)
        room, phase = self.max_new_tokens, self.phase
        tokenizer = prompt.open_tokenizer(directory)
        entries = self._read(tokenizer, model_config)
        tokens = max((one.tokens for one in entries), key=len)
        about: dict[str, Any] = {"policy": self.policy, "preset": None}
        if self.policy in ("sketchwalk", options.AUTO):
            about["preset"] = self.preset or PRESETS[0]
        more: dict[str, Any] = {}
        reasons: tuple[str, ...] = ()
        if self.policy == options.AUTO:
            padded = pad_to_bucket(
                tokens[None], multiple=config.block_size, context_length=model_config.context_length
            )
            choice = Auto(config).choose(
                model_config,
                batch=min(self.batch or MAX_BATCH, len(entries)),
                tokens=padded.shape[1],
                max_new_tokens=room,
                phase=phase,
                is_spread=placement is not None,
            )
            config, phase, reasons = choice.policy, choice.phase, choice.reasons
            more = {"chosen": type(config).__name__}
        about |= {"phase": phase, "dtype": dtype, **more}
        running: dict[str, Any] = {
            "phase": phase,
            "chunk_size": self.chunk_size,
            "eos_token_ids": () if self.ignore_eos else None,
        }
        key = jax.random.key(self.seed)
        call: dict[str, Any] = {"max_new_tokens": room, "sampling": sampling, "key": key}
        # Report mistakes before the weights are read; `stream` checks again.
        given = Options(model_config, config, max_new_tokens=room, **running)
        given.check(NOT_LOADED, tokens[None], sampling=sampling, key=key, to_bucket=True)
        texts = None
        if self.out is not None:
            # Everything that can change a text; batches and chunks cannot.
            numbers = dataclasses.asdict(sampling).items()
            settings = about | {
                "model": fingerprint(directory),
                "settings": changed_fields(config),
                "sampling": {name: float(value) for name, value in numbers},
            }
            same = "weights", "density", "chat", "system", "max_new_tokens", "seed", "ignore_eos"
            settings |= {name: getattr(self, name) for name in same}
            texts = TextsFile(self.out, entries, settings, overwrite=self.overwrite)

        started = time.perf_counter()
        first = len(tokens), {"max_new_tokens": room, "sampling": sampling}
        running |= {"policy": config, "warm_up": first if self.out is None else None}
        lm = self.load(prepared, tokenizer, sharding=placement, **running)
        load_s = time.perf_counter() - started
        lm = options.set_density(lm, self.density, num_tokens=len(tokens))
        if texts is not None:
            complete_all(lm, texts, batch_size=self.batch, **call)
            _tell(reasons)
            return
        pieces = lm.stream(tokens, every=self.stream_every, is_answer=self.chat, **call)
        shown = _follow(pieces, len(tokens), max_new_tokens=room, shows_text=not self.as_json)
        if not shown["is_finite"]:
            warnings.warn(NOT_FINITE, stacklevel=1)
        _tell(reasons)
        if not self.as_json:
            print(_to_line(shown), file=sys.stderr)
            return
        assert isinstance(lm.policy, Policy)
        shown |= {"load_s": round(load_s, 4), **about, "settings": changed_fields(lm.policy)}
        shown |= {"reasons": reasons} if more else {}
        print(json.dumps(shown, allow_nan=False), flush=True)

    def _read(self, tokenizer: Any, model_config: ModelConfig) -> list[Entry]:
        """Reads and checks all prompts of the file, or the single one."""
        if self.prompts is not None:
            with elapsed(f"reading {self.prompts}"):
                return read_prompts(
                    self.prompts,
                    tokenizer,
                    is_chat=self.chat,
                    system=self.system,
                    model_config=model_config,
                    max_new_tokens=self.max_new_tokens,
                )
        text = prompt.read_source(self.prompt_text, self.prompt_file)
        with elapsed("cutting the prompt into tokens"):
            prompt.check_size(text, tokenizer, model_config=model_config)
            tokens = prompt.tokenize(tokenizer, text, is_chat=self.chat, system=self.system)
        prompt.check_tokens(tokens, max_new_tokens=self.max_new_tokens, model_config=model_config)
        return [Entry(text, tokens, self.chat)]

    def _check_files(self) -> None:
        """Raises a `UsageError` for options that contradict each other."""
        has_prompt = self.prompt_text is not None or self.prompt_file is not None
        if (self.prompts is None) != (self.out is None):
            one, other = ("--prompts", "--out") if self.out is None else ("--out", "--prompts")
            raise UsageError(f"{one} must be given together with {other}, got it alone")
        if self.prompts is None:
            prompt.check_one_source(self.prompt_text, self.prompt_file)
        elif self.as_json:
            raise UsageError(
                "--json must not be given together with --prompts: the file is JSON lines"
            )
        elif has_prompt:
            raise UsageError("--prompts must not be given together with --prompt or --prompt-file")
        if self.system is not None and not self.chat:
            raise UsageError("--system must be given together with --chat, got it alone")


def _follow(
    pieces: TextStream, num_prompt_tokens: int, *, max_new_tokens: int, shows_text: bool
) -> dict[str, Any]:
    """Runs a generation to its end, and writes its text to standard output if `shows_text`.

    Returns the fields of the completion, `ttft_s` and `tokens_per_s`, rounded.
    """
    with elapsed(f"reading {num_prompt_tokens} tokens"):
        pieces.read_prompt()
    # Text on the terminal already shows progress.
    is_wanted = not (shows_text and sys.stdout.isatty())
    count = 0
    with progress_bar(max_new_tokens, "generating", unit=" tokens", is_wanted=is_wanted) as bar:
        for piece in pieces:
            if shows_text:
                print(piece, end="", flush=True)
            bar.update(len(pieces.tokens) - count)
            count = len(pieces.tokens)
    if shows_text:
        print(flush=True)
    found = dataclasses.asdict(pieces.completion)
    return rounded(found | {"ttft_s": pieces.ttft_s, "tokens_per_s": pieces.tokens_per_s})


def _tell(reasons: Sequence[str]) -> None:
    """Says on standard error why each phase was sparse or dense."""
    for one in reasons:
        print(f"auto: {one}", file=sys.stderr)


def _to_line(shown: Mapping[str, Any]) -> str:
    """Formats the measurements in one line."""
    rate = "" if shown["tokens_per_s"] is None else f", {shown['tokens_per_s']:.1f} tokens/s"
    return (
        f"{shown['prompt_tokens']} prompt tokens, {shown['new_tokens']} new, first after "
        f"{shown['ttft_s']:.2f} s{rate}; density {shown['measured_density']:.3f} "
        f"(prompt {shown['measured_density_prefill']:.3f}, "
        f"new {shown['measured_density_decode']:.3f})"
    )
