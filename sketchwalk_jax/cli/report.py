"""`sketchwalk report`: tables and figures from the results of `sketchwalk eval`."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import UsageError
from sketchwalk_jax.cli.options import flag, option
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.report import describe_gaps, model_drawings, write_report
from sketchwalk_jax.evaluation.results import read_results
from sketchwalk_jax.plots import import_pyplot
from sketchwalk_jax.progress import elapsed


def report(
    results: Annotated[
        Path, typer.Argument(metavar="FILE", help="Results that `sketchwalk eval` wrote.")
    ] = Path("quality.json"),
    out: Annotated[Path, option("--out DIR", "Folder for report.md and its figures.")] = Path(
        "quality-report"
    ),
    model: Annotated[
        Path | None,
        option(
            "--model PATH",
            "The checkpoint that was measured: adds the blocks that it attends to in one prompt.",
            default=False,
        ),
    ] = None,
    no_figures: Annotated[bool, flag("--no-figures", "Write tables only.")] = False,
) -> None:
    """Make a report of an evaluation: its tables and figures.

    Figures take matplotlib. Nothing is measured again.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out must be a folder, got the file {str(out)!r}")
    if model is not None and no_figures:
        raise UsageError("--model must not be given together with --no-figures: it adds figures")
    found = read_results(results)
    if not no_figures:
        try:
            import_pyplot()
        except ImportError as error:
            raise UsageError(f"--no-figures must be given without matplotlib: {error}") from error
        import matplotlib

        matplotlib.use("Agg")  # files only, no windows
    more = {}
    if model is not None:
        directory = options.check_model(model)
        if hash_weights(directory) != found.meta["model"]["sha256"]:
            raise UsageError(
                f"--model must be the checkpoint that {results} is of, "
                f"{found.meta['model']['name']}; got other weights in {str(model)!r}"
            )
        tokenizer = prompt.open_tokenizer(directory)
        params, model_config = options.load_model(directory, "float32")
        more = model_drawings(params, model_config, tokenizer)
    with elapsed("drawing"):
        written = write_report(found, out, has_figures=not no_figures, more=more)
    for gap in describe_gaps(found):
        warnings.warn(gap.replace("*", ""), stacklevel=2)
    figures = len(written) - 1
    print(f"{written[0]}: tables{f' and {figures} figures' if figures else ''}", flush=True)
