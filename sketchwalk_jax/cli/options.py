"""Options that several commands have, and what is made of them."""

import warnings
from pathlib import Path
from typing import Annotated

import jax
import typer

from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.config import SketchWalkConfig
from sketchwalk_jax.models.bundled import bundled_model
from sketchwalk_jax.models.config import DTYPES, ModelConfig, check_directory
from sketchwalk_jax.policies import POLICIES, PRESETS, Policy, by_name, takes_density
from sketchwalk_jax.validation import PHASES

METHOD = "Method"

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="Checkpoint directory: Hugging Face safetensors, or written by sketchwalk_jax.save.",
        show_default="the small model that ships with the package",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help=f"Which keys a query attends to: {', '.join(POLICIES[:-1])} or {POLICIES[-1]}.",
        rich_help_panel=METHOD,
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help=f"Variant of the sketchwalk policy: {', '.join(PRESETS)}.",
        show_default="paper",
        rich_help_panel=METHOD,
    ),
]
DensityOption = Annotated[
    float | None,
    typer.Option(
        "--density",
        metavar="FRACTION",
        help="Share of its causal blocks that a query keeps, above 0, at most 1.",
        show_default="0.2",
        rich_help_panel=METHOD,
    ),
]
PhaseOption = Annotated[
    str,
    typer.Option(
        "--phase",
        metavar="|".join(PHASES),
        help="Where selection is sparse.",
        rich_help_panel=METHOD,
    ),
]
DTypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        help="Type of weights and cache.",
        show_default="float32 on CPU, else the checkpoint's",
        rich_help_panel=METHOD,
    ),
]


def make_policy(policy: str, preset: str | None, density: float | None) -> Policy:
    """The policy that the options name.

    An option that the policy has no use for is checked, and then passed over with a warning, so
    that one command line serves to compare policies.

    Raises:
      UsageError: If a name is unknown or a value is out of range.
    """
    with usage_errors():
        if density is not None:
            SketchWalkConfig(density=density)
        by_name("sketchwalk", preset=preset)
        if policy != "sketchwalk" and preset is not None:
            warnings.warn(f"--preset has no effect with --policy {policy}", stacklevel=2)
            preset = None
        made = by_name(policy, preset=preset)
        if density is None:
            return made
        if not takes_density(made):
            chosen = f"--policy {policy}" if preset is None else f"--preset {preset}"
            reason = "" if preset is None else ", which sets its own"
            warnings.warn(f"--density has no effect with {chosen}{reason}", stacklevel=2)
            return made
        return by_name(policy, preset=preset, density=density)


def check_model(model: Path | None) -> Path:
    """The checkpoint directory: the one given, or that of the bundled model.

    Raises:
      UsageError: If the directory does not exist.
      FileNotFoundError: If none was given and the installation lacks the bundled model.
    """
    if model is None:
        return bundled_model()
    try:
        return check_directory(model)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"--model {error}") from error


def choose_dtype(dtype: str | None, model_config: ModelConfig) -> str:
    """The dtype asked for, or the one to run in: CPUs compute bfloat16 and float16 slowly.

    Raises:
      UsageError: If it is unknown.
    """
    if dtype is None:
        return "float32" if jax.default_backend() == "cpu" else model_config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {DTYPES}, got {dtype!r}")
    return dtype
