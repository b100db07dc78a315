"""Runs the notebooks' .py sources and writes the .ipynb files, with what cells print and draw.

python notebooks/build.py [NAME ...] [--out FOLDER]
"""

import argparse
import os
import re
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


def keep_outputs(notebook: nbformat.NotebookNode) -> None:
    """Keeps what a reader should see: printed text, results and pictures, in their order.

    Drops standard error (progress bars, warnings) and the traces of the run (counts, times).

    Raises:
      ValueError: If a text names a path of this machine, or an address in its memory.
    """
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02}"
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = stable_outputs(cell.outputs)
            cell.execution_count = None
            for output in cell.outputs:
                text = output.get("text") or output.get("data", {}).get("text/plain", "")
                if found := trace_of_machine(text):
                    raise ValueError(f"outputs must not name {found!r}, got {text!r}")
    notebook.metadata["language_info"] = {"name": "python"}


def stable_outputs(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs to keep; texts that were printed one after another become one."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        data = output.get("data", {})
        if output.get("name") == "stdout":
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
            else:
                kept.append(nbformat.v4.new_output("stream", name="stdout", text=output.text))
        elif "image/png" in data:
            picture = {"image/png": data["image/png"]}
            kept.append(nbformat.v4.new_output("display_data", picture))
        elif "text/plain" in data:
            result = {"text/plain": data["text/plain"]}
            kept.append(nbformat.v4.new_output(output.output_type, result))
    return kept


def trace_of_machine(text: str) -> str | None:
    """The first thing in a text that only holds for this machine and run, if there is one.

    That is a path whose first folder exists here, this user's home, or an address in memory.
    """
    if address := re.search(r"\b0x[0-9a-f]{6,}\b", text):
        return address[0]
    for path in re.finditer(r"(?<![\w.~:/])(/[\w.-]+)/[\w./-]*", text):
        if Path(path[1]).is_dir():
            return path[0]
    home = str(Path.home())
    return home if home != Path.home().anchor and home in text else None


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
        keep_outputs(notebook)
        nbformat.write(notebook, options.out / f"{name}.ipynb")


if __name__ == "__main__":
    main()
