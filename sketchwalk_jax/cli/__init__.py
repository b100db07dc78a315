"""The command line: `sketchwalk demo`, `sketchwalk generate` and its other commands."""

import inspect
import io
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from sketchwalk_jax._version import __version__
from sketchwalk_jax.cli import bench, calibrate, chat, demo, evaluate, generate, info
from sketchwalk_jax.cli.errors import EXPECTED, explain, show_warning
from sketchwalk_jax.cli.options import field

COMMANDS = {
    "bench": bench.Bench,
    "calibrate": calibrate.Calibrate,
    "chat": chat.Chat,
    "demo": demo.Demo,
    "eval": evaluate.Evaluate,
    "generate": generate.Generate,
    "info": info.Info,
    "report": evaluate.Report,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _function(command: Any) -> Callable[..., None]:
    """Makes a function with the parameters and the docstring of a command class."""

    def run(**given: Any) -> None:
        command(**given).run()

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.signature(command)  # type: ignore[attr-defined]
    return run


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        """Removes the `<bool>` that Typer writes after its own `--help`."""
        found = super().get_params(ctx)
        for one in found:
            if "--help" in one.opts:
                one.metavar = ""
        return found


for _name, _command in COMMANDS.items():
    app.command(_name, cls=_Command)(_function(_command))


def _print_version(is_wanted: bool) -> bool:
    if is_wanted:
        print(f"sketchwalk-jax {__version__}", flush=True)
        raise typer.Exit()
    return is_wanted


@app.callback()
def _program(
    version: bool = field(
        "--version", "Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Sketch-and-Walk sparse attention: generate text with Llama and Qwen checkpoints."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Results go to standard output; progress, statistics and errors to standard error.

    Args:
      arguments: The words after the program's name; by default this process's arguments.

    Returns:
      The exit status: 0, or 1 for an error, 2 for a mistake on the command line. An interrupt ends
      the process at once; shells report 130.

    Example:
      >>> main(["--version"])  # doctest: +SKIP
      sketchwalk-jax 0.1.0
      0
    """
    if arguments is None:
        # A KeyboardInterrupt would wait until JAX returns to Python.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for terminals that lack characters
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            # Typer exits with status 1 when the reader of a pipe is gone.
            return app(arguments, prog_name="sketchwalk", standalone_mode=False) or 0
        except EXPECTED as error:
            message, status = explain(error)
    print(f"error: {message}", file=sys.stderr)
    if status == 2:
        words = sys.argv[1:] if arguments is None else arguments
        command = "".join(f" {word}" for word in words[:1] if word in COMMANDS)
        print(f"Try 'sketchwalk{command} --help'.", file=sys.stderr)
    return status
