"""`sketchwalk chat`: a conversation in the terminal, or of the lines of a pipe."""

import sys
from typing import Annotated, Any

from sketchwalk_jax.auto import Auto
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.options import option
from sketchwalk_jax.language_model import LEAST_CONVERSATION, LanguageModel
from sketchwalk_jax.progress import elapsed

_MARK = "> "


def chat(
    model: options.ModelOption = None,
    system: Annotated[str | None, option("--system TEXT", "System message to begin with.")] = None,
    policy: options.PolicyOption = "sketchwalk",
    preset: options.PresetOption = None,
    density: options.CalibratedDensityOption = None,
    fields: options.SetOption = None,
    phase: options.PhaseOption = "both",
    dtype: options.DTypeOption = None,
    weights: options.WeightsOption = None,
    max_new_tokens: options.NewTokensOption = 512,
    temperature: options.TemperatureOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    min_p: options.MinPOption = None,
    repetition_penalty: options.RepetitionPenaltyOption = None,
    generation_config: options.GenerationConfigOption = False,
    seed: Annotated[
        int | None,
        option(
            "--seed N",
            "Seed of the random draws.",
            options.SAMPLING,
            "another each time",
            min=0,
            max=2**32 - 1,
        ),
    ] = None,
    no_compile_cache: options.NoCompileCacheOption = False,
) -> None:
    """Talk with an instruction model, in the chat template of its checkpoint.

    Every line of standard input is a turn; an empty one is passed over, the end of the input ends
    the conversation. Answers appear on standard output as they come. Each turn reads only what is
    new, where the template allows it.
    """
    directory = options.check_model(model)
    model_config, config, chosen, sampling = options.prepare(
        directory,
        policy=policy,
        preset=preset,
        density=density,
        fields=fields,
        phase=phase,
        dtype=dtype,
        generation_config=generation_config,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    tokenizer = prompt.open_tokenizer(directory)
    prompt.check_chat_template(tokenizer)
    options.choose_compile_cache(no_compile_cache)
    params, model_config = options.load_model(directory, chosen, weights=weights)
    config = options.set_density(
        config, density, params, model_config, tokenizer, num_tokens=LEAST_CONVERSATION
    )
    lm = LanguageModel(
        params=params,
        model_config=model_config,
        tokenizer=tokenizer,
        policy=Auto(config) if policy == options.AUTO else config,
        phase=phase,
    )
    talk = lm.conversation(
        system=system, max_new_tokens=max_new_tokens, sampling=sampling, key=seed
    )
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print(_MARK, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        if line.strip():
            _answer(talk, line.rstrip("\r\n"))
    if is_terminal:
        print(flush=True)


def _answer(talk: Any, text: str) -> None:
    """Shows the answer to one turn as it comes."""
    pieces = talk.stream(text)
    with elapsed("reading"):
        first = next(pieces, "")
    print(first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
