"""`sketchwalk report`: tables and figures from the results of `sketchwalk eval`."""

import dataclasses
import warnings
from pathlib import Path

import typer

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import UsageError
from sketchwalk_jax.cli.options import field
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.report import describe_gaps, model_drawings, write_report
from sketchwalk_jax.evaluation.results import read_results
from sketchwalk_jax.plots import import_pyplot
from sketchwalk_jax.progress import elapsed


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
