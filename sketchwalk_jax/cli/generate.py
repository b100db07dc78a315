"""`sketchwalk generate`: continue one prompt, as text while it comes or as one JSON object."""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.compiled import keep_compiled_programs
from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.cli.progress import elapsed, token_bar
from sketchwalk_jax.generation import Stream, StreamChunk, check_call, pad_to_bucket, stream
from sketchwalk_jax.models.config import ModelConfig, read_json
from sketchwalk_jax.models.plans import find_plan
from sketchwalk_jax.policies import PRESETS, changed_fields
from sketchwalk_jax.sampling import Sampling
from sketchwalk_jax.tokenizer import StreamDecoder

# Panels of the options.
_PROMPT, _SAMPLING, _OUTPUT = "Prompt", "Choice of tokens", "Output"

_GENERATION_CONFIG = "generation_config.json"
# Options that draw from the distribution; who gives one wants to draw.
_DRAWING = ("temperature", "top_k", "top_p", "min_p")


def generate(
    model: options.ModelOption = None,
    prompt_text: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="The prompt.", rich_help_panel=_PROMPT),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the prompt, used byte for byte. Without either, standard input is.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Wrap the prompt into the checkpoint's chat template.",
            rich_help_panel=_PROMPT,
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="System message before it; with --chat.", rich_help_panel=_PROMPT
        ),
    ] = None,
    policy: options.PolicyOption = "sketchwalk",
    preset: options.PresetOption = None,
    density: options.CalibratedDensityOption = None,
    fields: options.SetOption = None,
    phase: options.PhaseOption = "both",
    chunk_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Read the prompt this many tokens at a time, to save memory; a multiple of 64.",
            rich_help_panel=options.METHOD,
        ),
    ] = None,
    dtype: options.DTypeOption = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Most tokens to generate.", rich_help_panel=_SAMPLING
        ),
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Divides the logits; at 0 the best token is taken.",
            show_default="0, or 1 with --top-k, --top-p or --min-p",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Draw from the N best tokens; 0 for all.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from the fewest tokens that have probability P together.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from tokens with at least P times the best one's probability.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Above 1, tokens that were seen before become less likely.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config",
            help=f"Take the settings above from the checkpoint's {_GENERATION_CONFIG}, "
            "except for those given.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            metavar="N",
            help="Seed of the random draws.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after the checkpoint's end tokens.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object when all is done: text, prompt_tokens, new_tokens, ttft_s, "
            "tokens_per_s, measured_density and more.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    stream_every: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Tokens between two pieces of text.", rich_help_panel=_OUTPUT
        ),
    ] = 8,
    no_compile_cache: Annotated[
        bool,
        typer.Option(
            "--no-compile-cache",
            help="Do not keep compiled programs for later runs.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> None:
    """Continue a prompt.

    The text appears on standard output as it comes, statistics on standard error.
    """
    directory = options.check_model(model)
    prompt.check_one_source(prompt_text, prompt_file)
    if system is not None and not chat:
        raise UsageError("--system must be given together with --chat, got it alone")
    config = options.make_policy(policy, preset, density, fields)
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    _make_sampling(given, {})
    model_config = ModelConfig.from_pretrained(directory)
    config = options.take_plan(config, fields, find_plan(directory))
    with usage_errors():
        Settings(model_config=model_config, config=config, chunk_size=chunk_size, phase=phase)
    chosen = options.choose_dtype(dtype, model_config)
    defaults = _checkpoint_settings(directory) if generation_config else {}
    text = prompt.read_source(prompt_text, prompt_file)
    with elapsed("opening the tokenizer"):
        tokenizer = prompt.open_tokenizer(directory)
        tokens = prompt.tokenize(tokenizer, text, is_chat=chat, system=system)
    prompt.check_tokens(tokens, max_new_tokens=max_new_tokens, model_config=model_config)

    if not no_compile_cache:
        keep_compiled_programs()
    call: dict[str, Any] = dict(
        config=config,
        max_new_tokens=max_new_tokens,
        sampling=_make_sampling(given, defaults),
        key=jax.random.key(seed),
        eos_token_ids=() if ignore_eos else None,
        phase=phase,
        chunk_size=chunk_size,
    )
    padded, lengths = pad_to_bucket(tokens[None], np.array([len(tokens)]), model_config, config)
    # Once more after loading; whatever is wrong shows before the weights are read.
    check_call(padded, lengths=lengths, model_config=model_config, **call)

    started = time.perf_counter()
    params, model_config = options.load_model(directory, chosen)
    load_s = time.perf_counter() - started
    if density is not None:
        call["config"] = options.set_density(
            config, density, params, model_config, tokenizer, num_tokens=len(tokens)
        )

    chunks = stream(
        params, padded, lengths=lengths, model_config=model_config, every=stream_every, **call
    )
    result = _follow(
        chunks,
        tokenizer,
        num_prompt_tokens=len(tokens),
        max_new_tokens=max_new_tokens,
        shows_text=not as_json,
    )
    if as_json:
        about = {
            "load_s": round(load_s, 4),
            "policy": policy,
            "preset": (preset or PRESETS[0]) if policy == "sketchwalk" else None,
            "phase": phase,
            "settings": changed_fields(call["config"]),
            "dtype": chosen,
        }
        print(_to_json(result, **about), flush=True)
    else:
        print(_to_line(result), file=sys.stderr)


def _checkpoint_settings(directory: Path) -> dict[str, Any]:
    """The sampling settings of `generation_config.json`, empty if it names none.

    Where it does not say `do_sample`, tokens are not drawn: only its repetition penalty counts.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is damaged or a setting is out of range.
    """
    path = directory / _GENERATION_CONFIG
    if not path.exists():
        raise FileNotFoundError(
            f"--generation-config must be left out: {str(directory)!r} has no {path.name}"
        )
    raw = read_json(path)
    is_drawn = bool(raw.get("do_sample", False))
    names = (*_DRAWING, "repetition_penalty") if is_drawn else ("repetition_penalty",)
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    wrong = {name: value for name, value in found.items() if type(value) not in (int, float)}
    if wrong:
        raise ValueError(f"{path} must give numbers for its sampling settings, got {wrong}")
    try:
        Sampling(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {"temperature": 1.0, **found} if is_drawn else found


def _make_sampling(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """The settings: options that were given, then `defaults`, then greedy.

    Args:
      values: Value of every option of `Sampling`, `None` where it was not given.
      defaults: Settings of the checkpoint, if they were asked for.

    Raises:
      UsageError: If an option is out of range.
    """
    given = {name: value for name, value in values.items() if value is not None}
    temperature = 1.0 if given.keys() & set(_DRAWING) else 0.0
    with usage_errors():
        return Sampling(**{"temperature": temperature, **defaults, **given})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
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


def _follow(
    chunks: Stream,
    tokenizer: Any,
    *,
    num_prompt_tokens: int,
    max_new_tokens: int,
    shows_text: bool,
) -> _Result:
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
    return _Result(
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


def _to_json(result: _Result, **more: Any) -> str:
    """One JSON object with the fields of `result` and more."""
    fields = {**dataclasses.asdict(result), **more}
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
    return json.dumps(rounded, allow_nan=False)


def _to_line(result: _Result) -> str:
    """The measurements in one line."""
    rate = "" if result.tokens_per_s is None else f", {result.tokens_per_s:.1f} tokens/s"
    return (
        f"{result.prompt_tokens} prompt tokens, {result.new_tokens} new, first after "
        f"{result.ttft_s:.2f} s{rate}; density {result.measured_density:.3f} "
        f"(prompt {result.measured_density_prefill:.3f}, "
        f"new {result.measured_density_decode:.3f})"
    )
