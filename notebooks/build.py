"""Runs the notebooks' .py sources and writes the .ipynb files, with figures as their only outputs.

python notebooks/build.py [NAME ...] [--out FOLDER]
"""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.name != "build.py")


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells in a kernel of this interpreter."""
    client = nbclient.NotebookClient(notebook, timeout=600)
    manager = client.create_kernel_manager()
    # Without kernels that are installed elsewhere, `python3` is this interpreter.
    manager.kernel_spec_manager.kernel_dirs = []
    environment = dict(os.environ)
    if find_spec("sketchwalk_jax") is None:  # a checkout that is not installed
        environment["PYTHONPATH"] = str(HERE.parent)
    client.execute(cwd=str(HERE), env=environment)


def keep_figures(notebook: nbformat.NotebookNode) -> None:
    """Drops all outputs but pictures, and the traces of the run."""
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02}"
        cell.metadata.clear()
        if cell.cell_type == "code":
            pictures = [
                one.data["image/png"] for one in cell.outputs if "image/png" in one.get("data", {})
            ]
            cell.outputs = [
                nbformat.v4.new_output("display_data", {"image/png": picture})
                for picture in pictures
            ]
            cell.execution_count = None
    notebook.metadata["language_info"] = {"name": "python"}


def main() -> None:
    """Writes the notebooks, each as soon as it has run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the .ipynb files")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {unknown[0]!r}")
    for name in options.names or NAMES:
        notebook = jupytext.read(HERE / f"{name}.py")
        execute(notebook)
        keep_figures(notebook)
        nbformat.write(notebook, options.out / f"{name}.ipynb")


if __name__ == "__main__":
    main()
