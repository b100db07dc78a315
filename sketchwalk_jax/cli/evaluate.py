"""`sketchwalk eval` measures what a selection loses; `sketchwalk report` shows its results."""

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.cli.options import METHOD, TEXT, field
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.report import describe_gaps, model_drawings, write_report
from sketchwalk_jax.evaluation.results import read_results
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.runner import check_lengths, evaluate_model
from sketchwalk_jax.evaluation.settings import EvaluationConfig
from sketchwalk_jax.evaluation.tables import (
    PHASES,
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
from sketchwalk_jax.plots import import_pyplot
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.progress import elapsed
from sketchwalk_jax.text.haystack import read_text

_SIZE = "Amount"
_DEFAULT = EvaluationConfig()
_REDUCED = EvaluationConfig.reduced()
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


def _of(name: str, spec: str, help: str, panel: str = _SIZE) -> Any:
    """Makes the option of a field of `EvaluationConfig`; help shows both default values."""
    usual, few = _listed(getattr(_DEFAULT, name)), _listed(getattr(_REDUCED, name))
    within = " within the model's context" if name == "tokens" else ""
    return field(
        spec, help, panel, usual + within + (f"; {few} with --reduced" if few != usual else "")
    )


def _say_who_is_left_out(config: EvaluationConfig) -> None:
    """Warns of policies that select in none of the requested phases: they would run densely."""
    for policy in dict.fromkeys(rule.policy for rule in config.rules()):
        own = by_name(policy).phases
        if not config.phases_of(by_name(policy)):
            warnings.warn(
                f"--policy {policy} selects in {own[0]} only and is left out; add --phase {own[0]}",
                stacklevel=2,
            )


@dataclasses.dataclass(kw_only=True)
class Evaluate(options.Command):
    """Measure how much a selection loses on a checkpoint.

    Asks for facts hidden in long texts, with dense attention and with every policy, sparse in
    prefill, in decode and in both, on the same prompts. Of --policy, --preset, --density, --phase,
    --tokens and --task, several may be given. A table goes to standard output, all results to a
    JSON file.
    """

    # Fields of `EvaluationConfig` have their names there.
    policies: list[str] | None = _of("policies", "--policy NAME", "Policy to measure.", METHOD)
    presets: list[str] | None = _of("presets", "--preset NAME", "Preset of sketchwalk.", METHOD)
    densities: list[float] | None = _of(
        "densities",
        "--density FRACTION",
        "Nominal density; minference and flexprefill are calibrated to it.",
        METHOD,
    )
    fields: list[str] | None = field(
        "--set FIELD=VALUE",
        "Another field of the policies, in all that have it, such as dense_layers=2.",
        METHOD,
        "as published",
    )
    phases: list[str] | None = _of("phases", "--phase NAME", "Where selection is sparse.", METHOD)
    tokens: list[int] | None = _of(
        "tokens", "--tokens N", "Length: tokens of a prompt with its answer."
    )
    tasks: list[str] | None = _of("tasks", "--task NAME", "Task.")
    prompts: int | None = _of("prompts", "--prompts N", "Prompts of each task and length.")
    probe_prompts: int | None = _of(
        "probe_prompts", "--probe-prompts N", "Of these, measure mass recall by layer on as many."
    )
    reduced: bool = field(
        "--reduced",
        "Few and short prompts of few tasks, for few policies: minutes on two CPU cores.",
        _SIZE,
    )
    batch: int | None = field("--batch N", "Prompts at a time.", _SIZE, "by the device's memory")
    text: Path | None = options.TEXT_FILE
    text_tail: float = field(
        "--text-tail FRACTION",
        "Share of it to use, from its end: what the model was not trained on.",
        TEXT,
        value=1.0,
    )
    seed: int = field("--seed N", "Seed of the prompts.", TEXT, value=0)
    wording: str = field(
        "--wording NAME",
        "How tasks are put into words: plain, or chat for instruction models.",
        TEXT,
        value=_DEFAULT.wording,
    )
    answerable: bool = field(
        "--answerable", "Leave out, for all policies, what dense attention does not answer.", _SIZE
    )
    density_over: str = field(
        "--density-over NAME",
        "What a density is the mean of: sparse_layers, or all_layers with the dense ones.",
        METHOD,
        value=_DEFAULT.density_over,
    )
    mesh: str | None = options.MESH
    out: Path = field(
        "--out FILE",
        "File of the results. An interrupted evaluation is continued from there.",
        value=Path("quality.json"),
    )
    overwrite: bool = field("--overwrite", "Start afresh where the file exists.")
    other_code: bool = field(
        "--other-code",
        "Continue a file that other code of this package began; its rows then say so.",
    )

    def run(self) -> None:
        """Measures, writes the results and prints their table."""
        if options.AUTO in (self.policies or ()):
            raise UsageError(
                "--policy must name what is measured, got 'auto', which is sketchwalk or dense by "
                "the length: name these"
            )
        chosen = options.parse_fields(self.fields)
        directory = options.check_model(self.model)
        model_config = ModelConfig.from_pretrained(directory)
        given = {**vars(self), "fields": chosen or None}
        settings = {one.name for one in dataclasses.fields(EvaluationConfig)}
        known = {name: given[name] for name in settings & given.keys() if given[name] is not None}
        # The names of options, by which messages about fields of the configuration name them.
        flags = {
            one.name: getattr(type(self), one.name).param_decls[0].removeprefix("--")
            for one in dataclasses.fields(self)
        }
        flags |= {"tail": "text-tail", "path": "text"} | {name: f"set {name}" for name in chosen}
        with usage_errors(**flags):
            config = (EvaluationConfig.reduced if self.reduced else EvaluationConfig)(**known)
            check_lengths(config, model_config)
            _say_who_is_left_out(config)
            source = read_text(self.text, tail=self.text_tail)
        if self.tokens is not None:
            options.check_context("--tokens", max(self.tokens), model_config)
        policies = (rule.make() for rule in config.rules())
        placement = options.make_placement(self.mesh, model_config, *policies)
        tokenizer = prompt.open_tokenizer(directory)
        dtype = options.choose_dtype(self.dtype, model_config)
        params, model_config = options.load_model(
            directory, dtype, weights=self.weights, sharding=placement
        )
        results = evaluate_model(
            params,
            model_config,
            tokenizer,
            text=source,
            model={"name": checkpoint_name(directory), "sha256": hash_weights(directory)},
            config=config,
            out=self.out,
            overwrite=self.overwrite,
            other_code=self.other_code,
            progress=True,
        )
        print(_quality_table(results["rows"]), flush=True)
        print(f"{self.out}: {len(results['rows'])} rows", file=sys.stderr)


def _quality_table(rows: Sequence[Row]) -> str:
    """Tabulates right answers by policy, density and phase, one part for each length.

    Columns are the nominal and the measured density of the sparse layers, the share of right
    answers in every task and in all together, and the text loss.
    """
    return "\n\n".join(_table_of(rows, tokens) for tokens in values_of(rows, "tokens"))


def _table_of(rows: Sequence[Row], tokens: int) -> str:
    rows = rows_with(rows, tokens=tokens)
    tasks = tasks_of(rows, is_scored=False)
    has_answers = tasks != ["text_loss"]
    header = ["policy", "density", "measured", "sparse in", *(_HEADINGS[one] for one in tasks)]
    lines = [header + ["all"] * has_answers]
    for label in policy_labels(rows):
        own = rows_with(rows, label=label)
        densities = dict.fromkeys(row["density"] for row in own)
        for density, phase in itertools.product(densities, PHASES):
            some = [row for row in own if (row["density"], row["phase"]) == (density, phase)]
            if not some:
                continue
            together = pool(counted(some) or some)
            assert together is not None
            is_nominal = not (density is None or is_dense(some[0]))
            cells = [label, f"{density:g}" if is_nominal else ""]
            cells += [_two_digits(together.density_sparse_layers)]
            cells += ["" if is_dense(some[0]) else phase]
            for task in tasks:
                one = pool(rows_with(some, task=task))
                value = None if one is None else one.text_loss if one.exact is None else one.exact
                cells.append(_two_digits(value))
            lines.append(cells + [_two_digits(together.exact)] * has_answers)
    return f"{tokens} tokens\n{options.align(lines, left=1)}"


def _two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@dataclasses.dataclass(kw_only=True)
class Report:
    """Make a report of an evaluation: its tables and figures.

    Figures take matplotlib. Nothing is measured again.
    """

    results: Path = typer.Argument(
        Path("quality.json"), metavar="FILE", help="Results that `sketchwalk eval` wrote."
    )
    out: Path = field(
        "--out DIR", "Folder for report.md and its figures.", value=Path("quality-report")
    )
    model: Path | None = field(
        "--model PATH",
        "The checkpoint that was measured: adds the blocks that it attends to in one prompt.",
        default=False,
    )
    no_figures: bool = field("--no-figures", "Write tables only.")

    def run(self) -> None:
        """Writes the files."""
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out must be a folder, got the file {str(self.out)!r}")
        if self.model is not None and self.no_figures:
            raise UsageError(
                "--model must not be given together with --no-figures: it adds figures"
            )
        found = read_results(self.results)
        if not self.no_figures:
            try:
                import_pyplot()
            except ImportError as error:
                raise UsageError(
                    f"--no-figures must be given without matplotlib: {error}"
                ) from error
            import matplotlib

            matplotlib.use("Agg")  # files only, no windows
        more = {}
        if self.model is not None:
            directory = options.check_model(self.model)
            if hash_weights(directory) != found.meta["model"]["sha256"]:
                raise UsageError(
                    f"--model must be the checkpoint that {self.results} is of, "
                    f"{found.meta['model']['name']}; got other weights in {str(self.model)!r}"
                )
            tokenizer = prompt.open_tokenizer(directory)
            params, model_config = options.load_model(directory, "float32")
            more = model_drawings(params, model_config, tokenizer)
        with elapsed("drawing"):
            written = write_report(found, self.out, has_figures=not self.no_figures, more=more)
        for gap in describe_gaps(found):
            warnings.warn(gap.replace("*", ""), stacklevel=2)
        figures = len(written) - 1
        print(f"{written[0]}: tables{f' and {figures} figures' if figures else ''}", flush=True)
