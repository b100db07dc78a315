"""`sketchwalk generate`: continue one prompt, as text while it comes or as one JSON object."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.cli import drawing, options, prompt, report
from sketchwalk_jax.cli.calibrated import set_density
from sketchwalk_jax.cli.compiled import keep_compiled_programs
from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.cli.progress import elapsed, is_shown
from sketchwalk_jax.generation import check_call, pad_to_bucket, stream
from sketchwalk_jax.models.config import SAVED_CONFIG_FILE, ModelConfig
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.policies import changed_fields

PROMPT, DRAWING, OUTPUT = "Prompt", "Choice of tokens", "Output"


def load_model(directory: Path, dtype: str) -> tuple[Params, ModelConfig]:
    """The weights, on the device, with a sign of life."""
    if not (directory / SAVED_CONFIG_FILE).exists():
        return jax.block_until_ready(load(directory, dtype=dtype, progress=is_shown()))
    # Orbax reads everything in one call, without steps for a bar.
    with elapsed("loading"):
        return jax.block_until_ready(load(directory, dtype=dtype, progress=False))


def generate(
    model: options.ModelOption = None,
    prompt_text: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="The prompt.", rich_help_panel=PROMPT),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the prompt, used byte for byte. Without either, standard input is.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Wrap the prompt into the checkpoint's chat template.",
            rich_help_panel=PROMPT,
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="System message before it; with --chat.", rich_help_panel=PROMPT
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
        typer.Option(min=1, metavar="N", help="Most tokens to generate.", rich_help_panel=DRAWING),
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Divides the logits; at 0 the best token is taken.",
            show_default="0, or 1 with --top-k, --top-p or --min-p",
            rich_help_panel=DRAWING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Draw from the N best tokens; 0 for all.", rich_help_panel=DRAWING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from the fewest tokens that have probability P together.",
            rich_help_panel=DRAWING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from tokens with at least P times the best one's probability.",
            rich_help_panel=DRAWING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Above 1, tokens that were seen before become less likely.",
            rich_help_panel=DRAWING,
        ),
    ] = None,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config",
            help=f"Take the settings above from the checkpoint's {drawing.GENERATION_CONFIG}, "
            "except for those given.",
            rich_help_panel=DRAWING,
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            metavar="N",
            help="Seed of the random draws.",
            rich_help_panel=DRAWING,
        ),
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after the checkpoint's end tokens.",
            rich_help_panel=DRAWING,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object when all is done: text, prompt_tokens, new_tokens, ttft_s, "
            "tokens_per_s, measured_density and more.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    stream_every: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Tokens between two pieces of text.", rich_help_panel=OUTPUT
        ),
    ] = 8,
    no_compile_cache: Annotated[
        bool,
        typer.Option(
            "--no-compile-cache",
            help="Do not keep compiled programs for later runs.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Continue a prompt.

    The text appears on standard output as it comes, statistics on standard error.
    """
    directory = options.check_model(model)
    prompt.check_sources(prompt_text, prompt_file)
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
    drawing.make_sampling(given, {})
    model_config = ModelConfig.from_pretrained(directory)
    with usage_errors():
        Settings(model_config=model_config, config=config, chunk_size=chunk_size, phase=phase)
    chosen = options.choose_dtype(dtype, model_config)
    defaults = drawing.checkpoint_settings(directory) if generation_config else {}
    text = prompt.read_prompt(prompt_text, prompt_file)
    with elapsed("opening the tokenizer"):
        tokenizer = prompt.open_tokenizer(directory)
        tokens = prompt.tokenize(tokenizer, text, is_chat=chat, system=system)
    prompt.check_tokens(tokens, max_new_tokens=max_new_tokens, model_config=model_config)

    if not no_compile_cache:
        keep_compiled_programs()
    call: dict[str, Any] = dict(
        config=config,
        max_new_tokens=max_new_tokens,
        sampling=drawing.make_sampling(given, defaults),
        key=jax.random.key(seed),
        eos_token_ids=() if ignore_eos else None,
        phase=phase,
        chunk_size=chunk_size,
    )
    padded, lengths = pad_to_bucket(tokens[None], np.array([len(tokens)]), model_config, config)
    # Once more after loading; whatever is wrong shows before the weights are read.
    check_call(padded, lengths=lengths, model_config=model_config, **call)

    started = time.perf_counter()
    params, model_config = load_model(directory, chosen)
    load_s = time.perf_counter() - started
    if density is not None:
        call["config"] = set_density(
            config, density, params, model_config, tokenizer, num_tokens=len(tokens)
        )

    chunks = stream(
        params, padded, lengths=lengths, model_config=model_config, every=stream_every, **call
    )
    result = report.follow(
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
            "preset": (preset or "paper") if policy == "sketchwalk" else None,
            "phase": phase,
            "settings": changed_fields(call["config"]),
            "dtype": chosen,
        }
        print(report.to_json(result, **about), flush=True)
    else:
        print(report.to_line(result), file=sys.stderr)
