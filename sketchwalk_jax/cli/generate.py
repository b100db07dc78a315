"""`sketchwalk generate`: continue a prompt, as text or JSON, or a file of prompts in batches."""

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax

from sketchwalk_jax.auto import Auto, Choice
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import NOT_FINITE, UsageError
from sketchwalk_jax.cli.options import flag, option
from sketchwalk_jax.cli.prompt_files import TextsFile, complete_all, read_prompts, rounded
from sketchwalk_jax.generation import NOT_LOADED, Options
from sketchwalk_jax.language_model import MAX_BATCH, LanguageModel, TextStream
from sketchwalk_jax.models.plans import fingerprint
from sketchwalk_jax.padding import pad_to_bucket
from sketchwalk_jax.policies import PRESETS, changed_fields
from sketchwalk_jax.progress import elapsed, progress_bar

# Panels of the options.
_PROMPT, _FILES = "Prompt", "Many prompts"


def generate(
    model: options.ModelOption = None,
    prompt_text: Annotated[str | None, option("--prompt TEXT", "The prompt.", _PROMPT)] = None,
    prompt_file: Annotated[
        Path | None,
        option(
            "--prompt-file FILE",
            "File with the prompt, used byte for byte. Without either, standard input is.",
            _PROMPT,
        ),
    ] = None,
    chat: Annotated[
        bool, flag("--chat", "Wrap the prompt into the checkpoint's chat template.", _PROMPT)
    ] = False,
    system: Annotated[
        str | None, option("--system TEXT", "System message before it; with --chat.", _PROMPT)
    ] = None,
    policy: options.PolicyOption = "sketchwalk",
    preset: options.PresetOption = None,
    density: options.CalibratedDensityOption = None,
    fields: options.SetOption = None,
    phase: options.PhaseOption = "both",
    chunk_size: Annotated[
        int | None,
        option(
            "--chunk-size TOKENS",
            "Read the prompt this many tokens at a time, to save memory; a multiple of 64.",
            options.METHOD,
        ),
    ] = None,
    dtype: options.DTypeOption = None,
    weights: options.WeightsOption = None,
    mesh: options.MeshOption = None,
    max_new_tokens: options.NewTokensOption = 128,
    temperature: options.TemperatureOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    min_p: options.MinPOption = None,
    repetition_penalty: options.RepetitionPenaltyOption = None,
    generation_config: options.GenerationConfigOption = False,
    seed: Annotated[
        int, option("--seed N", "Seed of the random draws.", options.SAMPLING, min=0, max=2**32 - 1)
    ] = 0,
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", "Go on after the checkpoint's end tokens.", options.SAMPLING)
    ] = False,
    as_json: Annotated[
        bool,
        flag(
            "--json",
            "Print one JSON object when all is done: text, prompt_tokens, new_tokens, ttft_s, "
            "tokens_per_s, measured_density and more.",
            options.OUTPUT,
        ),
    ] = False,
    stream_every: Annotated[
        int, option("--stream-every N", "Tokens between two pieces of text.", options.OUTPUT, min=1)
    ] = 8,
    prompts: Annotated[
        Path | None,
        option(
            "--prompts FILE",
            "Continue every line of a JSON-lines file instead: a string, or an object with "
            '"prompt" or "messages", and "tools".',
            _FILES,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "--out FILE",
            "JSON-lines file for their texts. An interrupted run is continued from there.",
            _FILES,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        option(
            "--batch N", "Prompts at a time.", _FILES, "8, or fewer by the device's memory", min=1
        ),
    ] = None,
    overwrite: Annotated[
        bool, flag("--overwrite", "Start afresh where the file exists.", _FILES)
    ] = False,
    no_compile_cache: options.NoCompileCacheOption = False,
) -> None:
    """Continue a prompt, or a file of prompts.

    The text appears on standard output as it comes, statistics on standard error.
    """
    _check_files(prompts, out, prompt_text, prompt_file, as_json)
    directory = options.check_model(model)
    if prompts is None:
        prompt.check_one_source(prompt_text, prompt_file)
    if system is not None and not chat:
        raise UsageError("--system must be given together with --chat, got it alone")
    model_config, config, chosen, sampling = options.prepare(
        directory,
        policy=policy,
        preset=preset,
        density=density,
        fields=fields,
        phase=phase,
        chunk_size=chunk_size,
        dtype=dtype,
        generation_config=generation_config,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    placement = options.make_placement(mesh, model_config, config)
    text = "" if prompts is not None else prompt.read_source(prompt_text, prompt_file)
    tokenizer = prompt.open_tokenizer(directory)
    if prompts is not None:
        with elapsed(f"reading {prompts}"):
            entries = read_prompts(
                prompts,
                tokenizer,
                is_chat=chat,
                system=system,
                model_config=model_config,
                max_new_tokens=max_new_tokens,
            )
        tokens = max((one.tokens for one in entries), key=len)
    else:
        with elapsed("cutting the prompt into tokens"):
            prompt.check_size(text, tokenizer, model_config=model_config)
            tokens = prompt.tokenize(tokenizer, text, is_chat=chat, system=system)
        prompt.check_tokens(tokens, max_new_tokens=max_new_tokens, model_config=model_config)

    padded = pad_to_bucket(
        tokens[None], multiple=config.block_size, context_length=model_config.context_length
    )
    choice: Choice | None = None
    if policy == options.AUTO:
        choice = Auto(config).choose(
            model_config,
            batch=1 if prompts is None else min(batch or MAX_BATCH, len(entries)),
            tokens=padded.shape[1],
            max_new_tokens=max_new_tokens,
            phase=phase,
            is_spread=placement is not None,
        )
        config, phase = choice.policy, choice.phase
        print("\n".join(f"auto: {one}" for one in choice.reasons), file=sys.stderr)
    options.choose_compile_cache(no_compile_cache)
    running: dict[str, Any] = {
        "phase": phase,
        "chunk_size": chunk_size,
        "eos_token_ids": () if ignore_eos else None,
    }
    call: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling}
    key = jax.random.key(seed)
    # Once more after loading; whatever is wrong shows before the weights are read.
    given = Options(model_config, config, max_new_tokens=max_new_tokens, **running)
    given.check(NOT_LOADED, tokens[None], sampling=sampling, key=key, to_bucket=True)
    about = {
        "policy": policy,
        "preset": (preset or PRESETS[0]) if policy in ("sketchwalk", options.AUTO) else None,
        "phase": phase,
        "dtype": chosen,
    }
    if choice is not None:
        about["chosen"] = type(config).__name__
    texts = None
    if prompts is not None:
        assert out is not None
        # With all that changes a text; batches and chunks do not.
        settings = about | {
            "model": fingerprint(directory),
            "weights": weights,
            "settings": changed_fields(config),
            "density": density,
            "chat": chat,
            "system": system,
            "max_new_tokens": max_new_tokens,
            "sampling": {
                name: float(value) for name, value in dataclasses.asdict(sampling).items()
            },
            "seed": seed,
            "ignore_eos": ignore_eos,
        }
        texts = TextsFile(out, entries, settings, overwrite=overwrite)

    started = time.perf_counter()
    params, model_config = options.load_model(
        directory, chosen, weights=weights, sharding=placement
    )
    load_s = time.perf_counter() - started
    config = options.set_density(
        config, density, params, model_config, tokenizer, num_tokens=len(tokens)
    )
    lm = LanguageModel(
        params=params, model_config=model_config, tokenizer=tokenizer, policy=config, **running
    )
    if texts is not None:
        complete_all(lm, texts, key=key, batch_size=batch, **call)
        return
    pieces = lm.stream(tokens, every=stream_every, key=key, is_answer=chat, **call)
    shown = _follow(pieces, len(tokens), max_new_tokens=max_new_tokens, shows_text=not as_json)
    if not shown["is_finite"]:
        warnings.warn(NOT_FINITE, stacklevel=1)
    if as_json:
        more: dict[str, Any] = {
            "load_s": round(load_s, 4),
            **about,
            "settings": changed_fields(config),
        }
        more |= {} if choice is None else {"reasons": choice.reasons}
        print(json.dumps({**shown, **more}, allow_nan=False), flush=True)
    else:
        print(_to_line(shown), file=sys.stderr)


def _check_files(
    prompts: Path | None,
    out: Path | None,
    prompt_text: str | None,
    prompt_file: Path | None,
    as_json: bool,
) -> None:
    """Raises a `UsageError` for options of one prompt beside those of many."""
    if (prompts is None) != (out is None):
        one, other = ("--prompts", "--out") if out is None else ("--out", "--prompts")
        raise UsageError(f"{one} must be given together with {other}, got it alone")
    if prompts is None:
        return
    if as_json:
        raise UsageError("--json must not be given together with --prompts: the file is JSON lines")
    if prompt_text is not None or prompt_file is not None:
        raise UsageError("--prompts must not be given together with --prompt or --prompt-file")


def _follow(
    pieces: TextStream, num_prompt_tokens: int, *, max_new_tokens: int, shows_text: bool
) -> dict[str, Any]:
    """Runs a generation to its end.

    Args:
      pieces: The generation, not yet started.
      num_prompt_tokens: Tokens of the prompt.
      max_new_tokens: Most tokens that come.
      shows_text: Whether the text is written to standard output as it comes.

    Returns:
      The fields of the completion, and `ttft_s` and `tokens_per_s`, rounded.
    """
    with elapsed(f"reading {num_prompt_tokens} tokens"):
        pieces.read_prompt()
    # Text on the terminal is its own progress.
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


def _to_line(shown: Mapping[str, Any]) -> str:
    """The measurements in one line."""
    rate = "" if shown["tokens_per_s"] is None else f", {shown['tokens_per_s']:.1f} tokens/s"
    return (
        f"{shown['prompt_tokens']} prompt tokens, {shown['new_tokens']} new, first after "
        f"{shown['ttft_s']:.2f} s{rate}; density {shown['measured_density']:.3f} "
        f"(prompt {shown['measured_density_prefill']:.3f}, "
        f"new {shown['measured_density_decode']:.3f})"
    )
