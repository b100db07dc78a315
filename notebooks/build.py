"""Runs quickstart.py and writes quickstart.ipynb, with figures as its only outputs.

python notebooks/build.py [--out notebooks/quickstart.ipynb]
"""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).resolve().parent


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
    """Writes the notebook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "quickstart.ipynb")
    out = parser.parse_args().out
    notebook = jupytext.read(HERE / "quickstart.py")
    execute(notebook)
    keep_figures(notebook)
    nbformat.write(notebook, out)


if __name__ == "__main__":
    main()
