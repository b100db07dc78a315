"""`sketchwalk info`: what a checkpoint is, what would run here, and what the cache will cost."""

import json
from typing import Annotated, Any

import typer

from sketchwalk_jax.cli import describe, options
from sketchwalk_jax.cli.errors import UsageError
from sketchwalk_jax.models.config import ModelConfig


def info(
    model: options.ModelOption = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Length to size the cache for.",
            show_default="the model's context",
        ),
    ] = None,
    policy: options.PolicyOption = "sketchwalk",
    preset: options.PresetOption = None,
    density: options.DensityOption = None,
    fields: options.SetOption = None,
    dtype: options.DTypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe a checkpoint, and what would run here.

    Reads the headers of the weight files only.
    """
    config = options.make_policy(policy, preset, density, fields)
    directory = options.check_model(model)
    model_config = ModelConfig.from_pretrained(directory)
    chosen = options.choose_dtype(dtype, model_config)
    longest = model_config.context_length
    if context is not None and context > longest:
        raise UsageError(
            f"--context must not exceed the model's context of {longest} tokens, got {context}"
        )
    found: dict[str, Any] = {
        "environment": describe.environment(
            num_heads=model_config.num_heads,
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=chosen,
        ),
        "model": describe.checkpoint(directory, model_config, dtype=chosen),
        "cache": describe.cache(model_config, config, max_tokens=context or longest, dtype=chosen),
    }
    print(json.dumps(found) if as_json else describe.to_text(found), flush=True)
