"""`sketchwalk eval`: what a selection loses on a checkpoint, at measured density."""

import contextlib
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import UsageError
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.runner import check_lengths, evaluate_model
from sketchwalk_jax.evaluation.settings import EvaluationConfig
from sketchwalk_jax.evaluation.tables import (
    PHASES,
    Pooled,
    counted,
    is_dense,
    policy_labels,
    pool,
    rows_with,
    tasks_of,
    values_of,
)
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import checkpoint_name
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.progress import elapsed
from sketchwalk_jax.text import read_text

_SIZE = "Amount"
_DEFAULT = EvaluationConfig()
_REDUCED = EvaluationConfig.reduced()
# Options may be given several times; the library's fields hold all of their values.
_FLAGS = {
    "policies": "policy",
    "presets": "preset",
    "densities": "density",
    "tasks": "task",
    "phases": "phase",
    "fields": "set",
    "probe_prompts": "probe-prompts",
    "density_over": "density-over",
    "tail": "text-tail",
    "path": "text",
}
# Columns of the table.
_HEADINGS = {
    "single_needle": "needle",
    "multi_key": "keys",
    "multi_query": "queries",
    "multi_value": "values",
    "variable_tracking": "variables",
    "mid_prompt": "mid",
    "aggregation": "votes",
    "text_loss": "loss",
    "code_loss": "code",
    "long_decode": "long",
}


@contextlib.contextmanager
def _usage_errors(fields: Collection[str] = ()) -> Iterator[None]:
    """As `usage_errors`, with the names of options that hold one value of several."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        flag = f"set {name}" if name in fields else _FLAGS.get(name, name)
        raise UsageError(f"--{flag} {rest}") from error


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _several(flag: str, metavar: str, help: str, default: str, panel: str) -> Any:
    return typer.Option(
        flag,
        metavar=metavar,
        help=help,
        show_default=default,
        rich_help_panel=panel,
    )


def _defaults(field: str) -> str:
    """Values of a field, those of `--reduced` as well where they are others."""
    usual, few = getattr(_DEFAULT, field), getattr(_REDUCED, field)
    return _listed(usual) + (f"; {_listed(few)} with --reduced" if few != usual else "")


def _number(metavar: str, help: str, field: str) -> Any:
    default, few = getattr(_DEFAULT, field), getattr(_REDUCED, field)
    shown = f"{default}" if default == few else f"{default}; {few} with --reduced"
    return typer.Option(metavar=metavar, help=help, show_default=shown, rich_help_panel=_SIZE)


def _say_who_is_left_out(config: EvaluationConfig) -> None:
    """Warns of policies that select in no phase that is asked for: they would be dense there."""
    for policy in dict.fromkeys(rule.policy for rule in config.rules()):
        own = by_name(policy).phases
        if not config.phases_of(by_name(policy)):
            warnings.warn(
                f"--policy {policy} selects in {own[0]} only and is left out; add --phase {own[0]}",
                stacklevel=2,
            )


def evaluate(
    model: options.ModelOption = None,
    policy: Annotated[
        list[str] | None,
        _several("--policy", "NAME", "Policy to measure.", _defaults("policies"), options.METHOD),
    ] = None,
    preset: Annotated[
        list[str] | None,
        _several("--preset", "NAME", "Preset of sketchwalk.", _defaults("presets"), options.METHOD),
    ] = None,
    density: Annotated[
        list[float] | None,
        _several(
            "--density",
            "FRACTION",
            "Nominal density; minference and flexprefill are calibrated to it.",
            _defaults("densities"),
            options.METHOD,
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        _several(
            "--set",
            "FIELD=VALUE",
            "Another field of the policies, in all that have it, such as dense_layers=2.",
            "as published",
            options.METHOD,
        ),
    ] = None,
    phase: Annotated[
        list[str] | None,
        _several(
            "--phase", "NAME", "Where selection is sparse.", _defaults("phases"), options.METHOD
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        _several(
            "--tokens",
            "N",
            "Length: tokens of a prompt with its answer.",
            f"{_listed(_DEFAULT.tokens)} within the model's context; "
            f"{_listed(_REDUCED.tokens)} with --reduced",
            _SIZE,
        ),
    ] = None,
    task: Annotated[
        list[str] | None, _several("--task", "NAME", "Task.", _defaults("tasks"), _SIZE)
    ] = None,
    prompts: Annotated[
        int | None, _number("N", "Prompts of each task and length.", "prompts")
    ] = None,
    probe_prompts: Annotated[
        int | None,
        _number("N", "Of these, measure mass recall by layer on as many.", "probe_prompts"),
    ] = None,
    reduced: Annotated[
        bool,
        typer.Option(
            "--reduced",
            help="Few and short prompts of few tasks, for few policies: minutes on two CPU cores.",
            rich_help_panel=_SIZE,
        ),
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Prompts at a time.",
            show_default="by the device's memory",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    text: options.TextOption = None,
    text_tail: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Share of it to use, from its end: what the model was not trained on.",
            rich_help_panel=options.TEXT,
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the prompts.", rich_help_panel=options.TEXT)
    ] = 0,
    wording: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How tasks are put into words: plain, or chat for instruction models.",
            rich_help_panel=options.TEXT,
        ),
    ] = _DEFAULT.wording,
    answerable: Annotated[
        bool,
        typer.Option(
            "--answerable",
            help="Leave out, for all policies, what dense attention does not answer.",
            rich_help_panel=_SIZE,
        ),
    ] = False,
    density_over: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What a density is the mean of: sparse_layers, or all_layers with the dense ones.",
            rich_help_panel=options.METHOD,
        ),
    ] = _DEFAULT.density_over,
    dtype: options.DTypeOption = None,
    mesh: options.MeshOption = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File of the results. An interrupted evaluation is continued from there.",
        ),
    ] = Path("quality.json"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start afresh where the file exists.")
    ] = False,
    other_code: Annotated[
        bool,
        typer.Option(
            "--other-code",
            help="Continue a file that other code of this package began; its rows then say so.",
        ),
    ] = False,
) -> None:
    """Measure how much a selection loses on a checkpoint.

    Asks for facts hidden in long texts, with dense attention and with every policy, sparse in
    prefill, in decode and in both, on the same prompts. Of --policy, --preset, --density, --phase,
    --tokens and --task, several may be given. A table goes to standard output, all results to a
    JSON file.
    """
    if options.AUTO in (policy or ()):
        raise UsageError(
            "--policy must name what is measured, got 'auto', which is sketchwalk or dense by the "
            "length: name these"
        )
    directory = options.check_model(model)
    given: dict[str, Any] = {
        "policies": policy,
        "presets": preset,
        "densities": density,
        "phases": phase,
        "tokens": tokens,
        "tasks": task,
        "prompts": prompts,
        "probe_prompts": probe_prompts,
        "batch": batch,
        "seed": seed,
        "wording": wording,
        "answerable": answerable,
        "density_over": density_over,
    }
    chosen_fields = options.parse_fields(fields or ())
    given["fields"] = chosen_fields or None
    known = {name: value for name, value in given.items() if value is not None}
    model_config = ModelConfig.from_pretrained(directory)
    with _usage_errors(chosen_fields):
        config = (EvaluationConfig.reduced if reduced else EvaluationConfig)(**known)
        check_lengths(config, model_config)
        _say_who_is_left_out(config)
        source = read_text(text, tail=text_tail)
    if tokens is not None and max(tokens) > model_config.context_length:
        raise UsageError(
            f"--tokens must not exceed the model's context of {model_config.context_length}, got "
            f"{max(tokens)}"
        )
    chosen = options.choose_dtype(dtype, model_config)
    policies = (rule.make() for rule in config.rules())
    placement = options.make_placement(mesh, model_config, *policies)
    with elapsed("opening the tokenizer"):
        tokenizer = prompt.open_tokenizer(directory)
    keep_compiled_programs()
    params, model_config = options.load_model(directory, chosen, sharding=placement)
    name = checkpoint_name(directory)
    results = evaluate_model(
        params,
        model_config,
        tokenizer,
        text=source,
        model={"name": name, "sha256": hash_weights(directory)},
        config=config,
        out=out,
        overwrite=overwrite,
        other_code=other_code,
        progress=True,
    )
    print(_quality_table(results["rows"]), flush=True)
    print(f"{out}: {len(results['rows'])} rows", file=sys.stderr)


def _quality_table(rows: Sequence[Row]) -> str:
    """Right answers by policy, density and phase, one part for each length.

    Args:
      rows: Rows of one evaluation.

    Returns:
      Lines of text: nominal and measured density of the sparse layers, the share of right answers
      of every task and of all of them, the text loss.
    """
    return "\n\n".join(_table_of(rows, tokens) for tokens in values_of(rows, "tokens"))


def _table_of(rows: Sequence[Row], tokens: int) -> str:
    rows = rows_with(rows, tokens=tokens)
    tasks = tasks_of(rows, is_scored=False)
    header = ["policy", "density", "measured", "sparse in", *(_HEADINGS[one] for one in tasks)]
    table = [header + ["all"] * (tasks != ["text_loss"]), *_table_lines(rows, tasks)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in table
    ]
    return "\n".join([f"{tokens} tokens", *lines])


def _table_lines(rows: Sequence[Row], tasks: Sequence[str]) -> Iterator[list[str]]:
    for label in policy_labels(rows):
        own = rows_with(rows, label=label)
        densities = list(dict.fromkeys(row["density"] for row in own))
        for density in densities:
            for phase in PHASES:
                some = [row for row in own if (row["density"], row["phase"]) == (density, phase)]
                if not some:
                    continue
                scored = counted(some)
                together = pool(scored or some)
                assert together is not None
                yield [
                    label,
                    "" if density is None or is_dense(some[0]) else f"{density:g}",
                    _two_digits(together.density_sparse_layers),
                    "" if is_dense(some[0]) else phase,
                    *(_cell(pool(rows_with(some, task=task))) for task in tasks),
                    *([_two_digits(together.exact)] if tasks != ["text_loss"] else []),
                ]


def _cell(pooled: Pooled | None) -> str:
    if pooled is None:
        return ""
    return _two_digits(pooled.text_loss if pooled.exact is None else pooled.exact)


def _two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
