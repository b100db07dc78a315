"""The command line: `sketchwalk generate` and `sketchwalk info`."""

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from sketchwalk_jax._version import __version__
from sketchwalk_jax.cli.errors import EXPECTED, explain, show_warning
from sketchwalk_jax.cli.generate import generate
from sketchwalk_jax.cli.info import info

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(generate)
app.command()(info)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"sketchwalk-jax {__version__}", flush=True)
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Sketch-and-Walk sparse attention: generate text with Llama and Qwen checkpoints."""
    if context.invoked_subcommand is None:
        print(context.get_help(), flush=True)
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Results go to standard output; progress, statistics and errors to standard error.

    Args:
      arguments: What follows the program's name; those of this process by default.

    Returns:
      The exit status: 0, or 1 for an error, 2 for a mistake on the command line, 130 when
      interrupted.

    Example:
      >>> main(["--version"])  # doctest: +SKIP
      sketchwalk-jax 0.1.0
      0
    """
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            # An interrupt arrives here as the status 130; a closed pipe leaves with status 1.
            return app(arguments, prog_name="sketchwalk", standalone_mode=False) or 0
        except EXPECTED as error:
            message, status = explain(error)
    print(f"error: {message}", file=sys.stderr)
    if status == 2:
        print("Try 'sketchwalk --help', or --help after the command.", file=sys.stderr)
    return status
