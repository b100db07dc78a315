"""Defines options that several commands share, and makes the objects they describe."""

import abc
import ast
import contextlib
import dataclasses
import itertools
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import typer

from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.inference.cached_layer import PHASES, Settings
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.inference.sampling import Sampling
from sketchwalk_jax.language_model import LanguageModel
from sketchwalk_jax.models.config import SAVED_CONFIG_FILE, ModelConfig
from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.gguf_header import import_gguf
from sketchwalk_jax.models.hub import bundled_model, find_checkpoint
from sketchwalk_jax.models.params import QUANTIZED_DTYPES, Params
from sketchwalk_jax.models.plans import find_plan
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.policies import (
    POLICIES,
    PRESETS,
    Policy,
    by_name,
    has_threshold,
    takes_density,
    with_plan,
)
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig
from sketchwalk_jax.progress import elapsed
from sketchwalk_jax.sharding import Placement, place
from sketchwalk_jax.validation import DTYPES, check_choice

METHOD, TEXT, SAMPLING, OUTPUT = "Method", "Text", "Choice of tokens", "Output"

AUTO = "auto"
"""`Auto`: sketchwalk from the length on at which it was measured to pay, dense below."""

_GENERATION_CONFIG = "generation_config.json"
# Options of random sampling: giving one of them turns sampling on.
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_PENALTY = "repetition_penalty"


def field(
    spec: str,
    help: str,
    panel: str | None = None,
    default: str | bool = True,
    *,
    value: Any = None,
    **checks: Any,
) -> Any:
    """Makes an option as the default of a command's field.

    Args:
      spec: `--tokens N` for an option with a value, `--json` for a flag.
      help: One or two sentences.
      panel: Title under which help lists it.
      default: What help shows as its default; True for `value`.
      value: Its value if it is not given; a flag is False.
      **checks: `min`, `max` and other arguments of `typer.Option`.
    """
    name, _, metavar = spec.partition(" ")
    return typer.Option(
        value if metavar else False,
        name,
        metavar=metavar,
        help=help,
        rich_help_panel=panel,
        show_default=default,
        **checks,
    )


_SHARE = "Share of its causal blocks that a query keeps, above 0, at most 1."
DENSITY = field("--density FRACTION", _SHARE, METHOD, "0.2")
PHASE = field(f"--phase {'|'.join(PHASES)}", "Where selection is sparse.", METHOD, value="both")
TEXT_FILE = field(
    "--text FILE", "Text to hide facts in: UTF-8, plain or .xz.", TEXT, "Python's help topics"
)
MESH = field(
    "--mesh AXIS=RANKS,...",
    "Devices to share the model over, such as tensor=2 or sequence=2,tensor=4: tensor shares "
    "weights and heads, sequence a prompt's tokens and the cache.",
    METHOD,
    "one device",
)


class Prepared(NamedTuple):
    """A run whose options are checked, before its weights are read.

    Attributes:
      directory: The checkpoint.
      model_config: The model's configuration.
      policy: The policy, with the model's plan.
      dtype: The type of weights and cache.
      sampling: How tokens are chosen.
    """

    directory: Path
    model_config: ModelConfig
    policy: Policy
    dtype: str
    sampling: Sampling


@dataclasses.dataclass(kw_only=True)
class Command(abc.ABC):
    """A command on a checkpoint: its fields are its options, its docstring is its help."""

    model: Path | None = field(
        "--model PATH",
        "Checkpoint: a directory of Hugging Face safetensors or written by sketchwalk_jax.save, a "
        "GGUF file, or ORG/NAME on the Hugging Face hub.",
        default="the small model that ships with the package",
    )
    dtype: str | None = field(
        f"--dtype {'|'.join(DTYPES)}",
        "Type of weights and cache.",
        METHOD,
        "float32 on CPU, else the checkpoint's",
    )
    weights: str | None = field(
        f"--weights {'|'.join(QUANTIZED_DTYPES)}",
        "Eight bits for the weights of linear layers.",
        METHOD,
        "as stored, in --dtype",
    )

    def __post_init__(self) -> None:
        """Checks the choices that all commands have."""
        with usage_errors():
            check_choice("--dtype", self.dtype, (*DTYPES, None))
            check_choice("--weights", self.weights, (*QUANTIZED_DTYPES, None))

    @abc.abstractmethod
    def run(self) -> None:
        """Checks what was given, then does the work."""

    def prepare(self) -> Prepared:
        """Checks the options of a run, first those that need no checkpoint.

        Raises:
          UsageError: If an option is out of range, or two contradict each other.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        fields, phase = given.get("fields"), given.get("phase", "both")
        name = given.get("policy", "sketchwalk")
        choice = name, given.get("preset"), given.get("density"), fields
        policy = make_policy(*choice, max_kl=given.get("max_kl"))
        drawing = {name: given[name] for name in (*_DRAWING, _PENALTY) if name in given}
        sampling = make_sampling(drawing, {})
        if given.get("no_compile_cache"):
            jax.config.update("jax_enable_compilation_cache", False)
        directory = check_model(self.model)
        model_config = ModelConfig.from_pretrained(directory)
        policy = take_plan(policy, fields, find_plan(directory))
        with usage_errors():
            chunk_size = given.get("chunk_size")
            Settings(model_config=model_config, policy=policy, chunk_size=chunk_size, phase=phase)
        if given.get("generation_config"):
            sampling = make_sampling(drawing, checkpoint_settings(directory))
        dtype = choose_dtype(self.dtype, model_config)
        return Prepared(directory, model_config, policy, dtype, sampling)

    def load(
        self,
        prepared: Prepared,
        tokenizer: Any,
        *,
        sharding: Placement | None,
        warm_up: tuple[int, dict[str, Any]] | None = None,
        **running: Any,
    ) -> LanguageModel:
        """Loads the model with a tokenizer and more fields of `LanguageModel`.

        `warm_up` are the tokens of a prompt and the options of `LanguageModel.warm_up`, to compile
        for meanwhile.
        """
        known: dict[str, Any] = {"policy": prepared.policy} | running

        def make(params: Any, config: ModelConfig) -> LanguageModel:
            return LanguageModel(params=params, model_config=config, tokenizer=tokenizer, **known)

        def begin(shapes: Any, config: ModelConfig) -> None:
            if warm_up is not None and sharding is None:
                num_tokens, call = warm_up
                make(shapes, config).warm_up(num_tokens, **call)

        return make(
            *load_model(
                prepared.directory,
                prepared.dtype,
                weights=self.weights,
                sharding=sharding,
                before_reading=begin,
            )
        )


@dataclasses.dataclass(kw_only=True)
class PolicyCommand(Command):
    """A command with one policy."""

    policy: str = field(
        "--policy NAME",
        f"Which keys a query attends to: {', '.join(POLICIES)}; or {AUTO}: sketchwalk where that "
        "was measured to pay on this device, by the length, and dense elsewhere.",
        METHOD,
        value=AUTO,
    )
    preset: str | None = field(
        "--preset NAME",
        f"Variant of the sketchwalk policy: {', '.join(PRESETS)}. The first takes the plan of the "
        "model that `sketchwalk calibrate` measured, if there is one.",
        METHOD,
        PRESETS[0],
    )
    density: float | None = DENSITY
    max_kl: float | None = field(
        "--max-kl NATS",
        "In place of --density: loss to allow in a token's prediction, for each phase. The "
        "sketchwalk policy then takes the least density that kept to it when the model was "
        "calibrated, or, without that, those of other models.",
        METHOD,
    )
    fields: list[str] | None = field(
        "--set FIELD=VALUE",
        "Another field of the policy, such as block_size=64; may be given several times.",
        METHOD,
        False,
    )


@dataclasses.dataclass(kw_only=True)
class GenerationCommand(PolicyCommand):
    """A command that generates text."""

    density: float | None = field(
        "--density FRACTION",
        f"{_SHARE} Minference and flexprefill are set to it on another text first.",
        METHOD,
        "0.2, or as published",
    )
    phase: str = PHASE
    max_new_tokens: int = field(
        "--max-new-tokens N", "Most tokens to generate.", SAMPLING, min=1, value=128
    )
    temperature: float | None = field(
        "--temperature X",
        "Divides the logits; at 0 the best token is taken.",
        SAMPLING,
        "0, or 1 with --top-k, --top-p or --min-p",
    )
    top_k: int | None = field("--top-k N", "Draw from the N best tokens; 0 for all.", SAMPLING)
    top_p: float | None = field(
        "--top-p P", "Draw from the fewest tokens that have probability P together.", SAMPLING
    )
    min_p: float | None = field(
        "--min-p P", "Draw from tokens with at least P times the best one's probability.", SAMPLING
    )
    repetition_penalty: float | None = field(
        "--repetition-penalty X",
        "Above 1, tokens that were seen before become less likely.",
        SAMPLING,
    )
    generation_config: bool = field(
        "--generation-config",
        f"Take the settings above from the checkpoint's {_GENERATION_CONFIG}, except for those "
        "given.",
        SAMPLING,
    )
    no_compile_cache: bool = field(
        "--no-compile-cache", "Do not keep compiled programs for later runs.", OUTPUT
    )


def make_policy(
    policy: str,
    preset: str | None,
    density: float | None,
    fields: Sequence[str] | None = None,
    max_kl: float | None = None,
) -> Policy:
    """Makes the policy that the options name; for `auto`, the sketchwalk policy it may choose.

    MInference and FlexPrefill keep their published settings here; `set_density` calibrates them.
    An option that the policy does not use is checked and then ignored with a warning, so that one
    command line can compare policies.

    Raises:
      UsageError: If a name is unknown or a value is out of range.
    """
    policy = "sketchwalk" if policy == AUTO else policy
    if policy not in POLICIES:
        raise UsageError(f"--policy must be one of {(*POLICIES, AUTO)}, got {policy!r}")
    with usage_errors():
        if density is not None:
            SketchWalkConfig(density=density)
        by_name("sketchwalk", preset=preset)
        if policy != "sketchwalk" and preset is not None:
            warnings.warn(f"--preset has no effect with --policy {policy}", stacklevel=2)
            preset = None
        made = by_name(policy, preset=preset)
    known, chosen = [field.name for field in dataclasses.fields(made)], parse_fields(fields)
    for field in chosen:
        if field not in known:
            raise UsageError(
                f"--set must name a field of {policy}, {', '.join(known)}, got {field}"
            )
    name = f"--policy {policy}" if preset is None else f"--preset {preset}"
    if max_kl is not None:
        for what, is_given in {
            "--density": density is not None,
            "--set max_kl": "max_kl" in chosen,
            name: "max_kl" not in known,
        }.items():
            if is_given:
                raise UsageError(f"--max-kl must be left out with {what}, got {max_kl:g}")
        chosen["max_kl"] = max_kl
    if density is not None and takes_density(made):
        chosen = {"density": density} | chosen
    elif density is not None and not has_threshold(made):
        reason = "" if preset is None else ", which sets its own"
        warnings.warn(f"--density has no effect with {name}{reason}", stacklevel=2)
    try:
        return by_name(policy, preset=preset, **chosen)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--set {error}") from error


def take_plan(config: Policy, fields: Sequence[str] | None, plan: Plan | None) -> Policy:
    """Adds the model's plan to the recommended policy; returns other policies unchanged.

    `--set plan=None` leaves the plan out.
    """
    return config if "plan" in parse_fields(fields) else with_plan(config, plan)


def parse_fields(given: Sequence[str] | None) -> dict[str, Any]:
    """Parses `FIELD=VALUE` into fields: Python literals; anything else is a string.

    Raises:
      UsageError: If there is no `=`, or a plan is given, which belongs in its own file.
    """
    chosen = dict[str, Any]()
    for one in given or ():
        field, equals, text = one.partition("=")
        if not equals:
            raise UsageError(f"--set must be FIELD=VALUE, got {one!r}")
        try:
            chosen[field] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            chosen[field] = text
    if chosen.get("plan") is not None:
        raise UsageError(
            f"--set plan must be None, for no plan, got {chosen['plan']!r}: it is taken from the "
            f"file that `sketchwalk calibrate` writes beside the checkpoint"
        )
    return chosen


def check_model(model: Path | None) -> Path:
    """Returns the path of the checkpoint, downloaded if necessary; by default the bundled model.

    Raises:
      UsageError: If it does not exist, or is a GGUF file and the package `gguf` is missing.
      OSError: If it cannot be downloaded.
      FileNotFoundError: If none was given and the installation lacks the bundled model.
    """
    if model is None:
        return bundled_model()
    try:
        found = find_checkpoint(model)
        if found.is_file():
            import_gguf()
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"--model {error}") from error
    except ImportError as error:
        raise UsageError(f"--model must be readable here: {error}") from error
    return found


def choose_dtype(dtype: str | None, model_config: ModelConfig) -> str:
    """Returns the given dtype, or the default: float32 on CPUs, which are slow in 16 bits."""
    return dtype or ("float32" if jax.default_backend() == "cpu" else model_config.dtype)


def check_context(
    name: str, tokens: int | None, model_config: ModelConfig, *, usual: int | None = None
) -> int:
    """Returns the length of an option; by default `usual`, or the model's context if shorter.

    Raises:
      UsageError: If it is longer than the context.
    """
    longest = model_config.context_length
    if tokens is None:
        return longest if usual is None else min(usual, longest)
    if tokens > longest:
        raise UsageError(
            f"{name} must not exceed the model's context of {longest} tokens, got {tokens}"
        )
    return tokens


def align(rows: Sequence[Sequence[str]], *, left: int = 0, gap: int = 2) -> str:
    """Formats a text table: the first `left` columns aligned left, the others right."""
    columns = []
    for index, column in enumerate(itertools.zip_longest(*rows, fillvalue="")):
        width, put = max(map(len, column)), str.ljust if index < left else str.rjust
        columns.append([put(cell, width) for cell in column])
    return "\n".join((" " * gap).join(row).rstrip() for row in zip(*columns, strict=True))


def make_placement(
    mesh: str | None, model_config: ModelConfig, *policies: Policy
) -> Placement | None:
    """Places a model, which will run with `policies`, on the mesh of `--mesh`, if there is one.

    Raises:
      UsageError: If it is no mesh, or does not fit the model, a policy or this machine.
    """
    if mesh is None:
        return None
    axes: dict[str, int] = {}
    for entry in mesh.split(","):
        name, _, ranks = entry.partition("=")
        if name not in ("tensor", "sequence") or not ranks.isdecimal() or int(ranks) < 1:
            raise UsageError(
                "--mesh must be tensor=RANKS, sequence=RANKS or both with a comma between, got "
                f"{mesh!r}"
            )
        axes[name] = int(ranks)
    needed, there = math.prod(axes.values()), len(jax.devices())
    if needed > there:
        raise UsageError(f"--mesh must have at most the {there} devices of here, got {mesh!r}")
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[:needed]
    made = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    try:
        placement = place(made, model_config)
        for policy in policies:
            placement.check_policy(policy)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"--mesh {mesh}: {error}") from error
    return placement


def load_model(directory: Path, dtype: str, **given: Any) -> tuple[Params, ModelConfig]:
    """Loads a model with more arguments of `load`, and shows progress.

    Also turns on the cache of compiled programs for later runs.
    """
    keep_compiled_programs()
    # Orbax reads everything in one call, so a bar would have no steps.
    is_one_call = (directory / SAVED_CONFIG_FILE).exists()
    with elapsed("loading") if is_one_call else contextlib.nullcontext():
        found = load(directory, dtype=dtype, progress=not is_one_call, **given)
        return jax.block_until_ready(found)


def checkpoint_settings(directory: Path) -> dict[str, Any]:
    """Reads the sampling settings of `generation_config.json`, empty if it names none.

    Without `do_sample` in it, decoding is greedy: only its repetition penalty counts.

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
    names = (*_DRAWING, _PENALTY) if is_drawn else (_PENALTY,)
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    wrong = {name: value for name, value in found.items() if type(value) not in (int, float)}
    if wrong:
        raise ValueError(f"{path} must give numbers for its sampling settings, got {wrong}")
    try:
        Sampling(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {"temperature": 1.0, **found} if is_drawn else found


def make_sampling(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """Makes the settings from given options, then `defaults`, then greedy decoding.

    Raises:
      UsageError: If an option is out of range.
    """
    temperature = 1.0 if given.keys() & set(_DRAWING) else 0.0
    with usage_errors():
        return Sampling(**{"temperature": temperature, **defaults, **given})


def set_density(lm: LanguageModel, density: float | None, *, num_tokens: int) -> LanguageModel:
    """Calibrates the model's policy to a density on plain English of the prompt's length.

    The setting found is printed to standard error. Only MInference and FlexPrefill are calibrated;
    other policies, and all policies without a density, stay unchanged.
    """
    if density is None or not isinstance(lm.policy, PrefillPolicy):
        return lm
    from sketchwalk_jax import calibration

    with elapsed(f"calibrating to density {density:g}"):
        found = calibration.set_density(
            lm.policy,
            lm.params,
            lm.model_config,
            lm.tokenizer,
            density=density,
            num_tokens=num_tokens,
        )
    chosen = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    print(f"{chosen}: measured density {found.density:.3f} on other text", file=sys.stderr)
    return dataclasses.replace(lm, policy=found.policy)
