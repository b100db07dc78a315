"""`sketchwalk eval`: measures what a selection loses on a checkpoint, at measured density."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.cli.options import flag, option
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
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import checkpoint_name
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.text.haystack import read_text

_SIZE = "Amount"
_DEFAULT = EvaluationConfig()
_REDUCED = EvaluationConfig.reduced()
# Options that may be repeated, for fields that hold all their values.
_FLAGS = {
    "policies": "policy",
    "presets": "preset",
    "densities": "density",
    "tasks": "task",
    "phases": "phase",
    "fields": "set",
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


def _listed(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, tuple) else str(values)


def _of(field: str, spec: str, help: str, panel: str = _SIZE) -> Any:
    """Makes the option of a field of `EvaluationConfig`; help shows both default values."""
    usual, few = _listed(getattr(_DEFAULT, field)), _listed(getattr(_REDUCED, field))
    within = " within the model's context" if field == "tokens" else ""
    default = usual + within + (f"; {few} with --reduced" if few != usual else "")
    return option(spec, help, panel, default)


def _say_who_is_left_out(config: EvaluationConfig) -> None:
    """Warns of policies that select in none of the requested phases: they would run densely."""
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
        list[str] | None, _of("policies", "--policy NAME", "Policy to measure.", options.METHOD)
    ] = None,
    preset: Annotated[
        list[str] | None, _of("presets", "--preset NAME", "Preset of sketchwalk.", options.METHOD)
    ] = None,
    density: Annotated[
        list[float] | None,
        _of(
            "densities",
            "--density FRACTION",
            "Nominal density; minference and flexprefill are calibrated to it.",
            options.METHOD,
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        option(
            "--set FIELD=VALUE",
            "Another field of the policies, in all that have it, such as dense_layers=2.",
            options.METHOD,
            "as published",
        ),
    ] = None,
    phase: Annotated[
        list[str] | None,
        _of("phases", "--phase NAME", "Where selection is sparse.", options.METHOD),
    ] = None,
    tokens: Annotated[
        list[int] | None, _of("tokens", "--tokens N", "Length: tokens of a prompt with its answer.")
    ] = None,
    task: Annotated[list[str] | None, _of("tasks", "--task NAME", "Task.")] = None,
    prompts: Annotated[
        int | None, _of("prompts", "--prompts N", "Prompts of each task and length.")
    ] = None,
    probe_prompts: Annotated[
        int | None,
        _of(
            "probe_prompts",
            "--probe-prompts N",
            "Of these, measure mass recall by layer on as many.",
        ),
    ] = None,
    reduced: Annotated[
        bool,
        flag(
            "--reduced",
            "Few and short prompts of few tasks, for few policies: minutes on two CPU cores.",
            _SIZE,
        ),
    ] = False,
    batch: Annotated[
        int | None, option("--batch N", "Prompts at a time.", _SIZE, "by the device's memory")
    ] = None,
    text: options.TextOption = None,
    text_tail: Annotated[
        float,
        option(
            "--text-tail FRACTION",
            "Share of it to use, from its end: what the model was not trained on.",
            options.TEXT,
        ),
    ] = 1.0,
    seed: Annotated[int, option("--seed N", "Seed of the prompts.", options.TEXT)] = 0,
    wording: Annotated[
        str,
        option(
            "--wording NAME",
            "How tasks are put into words: plain, or chat for instruction models.",
            options.TEXT,
        ),
    ] = _DEFAULT.wording,
    answerable: Annotated[
        bool,
        flag(
            "--answerable",
            "Leave out, for all policies, what dense attention does not answer.",
            _SIZE,
        ),
    ] = False,
    density_over: Annotated[
        str,
        option(
            "--density-over NAME",
            "What a density is the mean of: sparse_layers, or all_layers with the dense ones.",
            options.METHOD,
        ),
    ] = _DEFAULT.density_over,
    dtype: options.DTypeOption = None,
    weights: options.WeightsOption = None,
    mesh: options.MeshOption = None,
    out: Annotated[
        Path,
        option(
            "--out FILE", "File of the results. An interrupted evaluation is continued from there."
        ),
    ] = Path("quality.json"),
    overwrite: Annotated[bool, flag("--overwrite", "Start afresh where the file exists.")] = False,
    other_code: Annotated[
        bool,
        flag(
            "--other-code",
            "Continue a file that other code of this package began; its rows then say so.",
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
    chosen_fields = options.parse_fields(fields)
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
        "fields": chosen_fields or None,
    }
    known = {name: value for name, value in given.items() if value is not None}
    model_config = ModelConfig.from_pretrained(directory)
    names = _FLAGS | {name: f"set {name}" for name in chosen_fields}
    with usage_errors(**names):
        config = (EvaluationConfig.reduced if reduced else EvaluationConfig)(**known)
        check_lengths(config, model_config)
        _say_who_is_left_out(config)
        source = read_text(text, tail=text_tail)
    if tokens is not None:
        options.check_context("--tokens", max(tokens), model_config)
    chosen = options.choose_dtype(dtype, model_config)
    policies = (rule.make() for rule in config.rules())
    placement = options.make_placement(mesh, model_config, *policies)
    tokenizer = prompt.open_tokenizer(directory)
    keep_compiled_programs()
    params, model_config = options.load_model(
        directory, chosen, weights=weights, sharding=placement
    )
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
    """Tabulates right answers by policy, density and phase, one part for each length.

    Args:
      rows: Rows of one evaluation.

    Returns:
      Lines of text: nominal and measured density of the sparse layers, the share of right answers
      in every task and in all together, the text loss.
    """
    return "\n\n".join(_table_of(rows, tokens) for tokens in values_of(rows, "tokens"))


def _table_of(rows: Sequence[Row], tokens: int) -> str:
    rows = rows_with(rows, tokens=tokens)
    tasks = tasks_of(rows, is_scored=False)
    header = ["policy", "density", "measured", "sparse in", *(_HEADINGS[one] for one in tasks)]
    lines = [header + ["all"] * (tasks != ["text_loss"]), *_table_lines(rows, tasks)]
    return f"{tokens} tokens\n{options.align(lines, left=1)}"


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
