"""How tokens are drawn: from the options, and from the checkpoint if that is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sketchwalk_jax.cli.errors import usage_errors
from sketchwalk_jax.models.config import read_json
from sketchwalk_jax.sampling import Sampling

GENERATION_CONFIG = "generation_config.json"
_DRAWING = ("temperature", "top_k", "top_p", "min_p")


def checkpoint_settings(directory: Path) -> dict[str, Any]:
    """The sampling settings of `generation_config.json`, empty if it names none.

    Where it does not say `do_sample`, tokens are not drawn: only its repetition penalty counts.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is damaged or a setting is out of range.
    """
    path = directory / GENERATION_CONFIG
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


def make_sampling(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """The settings: options that were given, then `defaults`, then greedy.

    Args:
      options: Value of every option of `Sampling`, `None` where it was not given.
      defaults: Settings of the checkpoint, if they were asked for.

    Raises:
      UsageError: If an option is out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    # Who cuts the distribution wants to draw from it.
    temperature = 1.0 if given.keys() & set(_DRAWING) else 0.0
    with usage_errors():
        return Sampling(**{"temperature": temperature, **defaults, **given})
