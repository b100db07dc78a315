"""The notebooks run from top to bottom, and both files of each have the same content."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jupytext
import nbformat
import pytest
from packaging.requirements import Requirement

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
# Number of figures in each; the one for GPUs draws them only on a GPU.
FIGURES = {
    "choosing_a_policy": 3,
    "flax_training": 1,
    "on_a_gpu": 0,
    "own_policy": 1,
    "quickstart": 2,
    "your_model": 1,
}


def read_cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def committed(name: str) -> list[dict]:
    return read_cells(NOTEBOOKS / f"{name}.ipynb")


def sources(cells: list[dict]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def figures(cells: list[dict]) -> list[int]:
    """Counts the pictures of each cell."""
    return [
        sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        for cell in cells
    ]


def assert_prints_are_saved(cells: list[dict]) -> list[str]:
    """Checks that the cells that print have text, and no others; returns the text of each cell."""
    found = []
    for kind, source in sources(cells):
        outputs = cells[len(found)].get("outputs", [])
        parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
        found.append("".join("".join(part) for part in parts))
        assert bool(found[-1]) == (kind == "code" and "print(" in source)
    return found


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", NOTEBOOKS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_source_has_its_notebook():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(FIGURES)
    scripts = {path.stem for path in NOTEBOOKS.glob("*.py")}
    assert scripts - {"build"} == set(FIGURES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "quickstart" else pytest.mark.weekly)
        for name in sorted(FIGURES)
    ],
)
def test_runs_top_to_bottom(repository, program_environment, tmp_path, name):
    environment = {key: x for key, x in program_environment.items() if key != "MODEL_DIR"}
    done = subprocess.run(
        [sys.executable, repository / "notebooks" / "build.py", name, "--out", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = read_cells(tmp_path / f"{name}.ipynb")
    assert sum(figures(built)) == FIGURES[name]
    if FIGURES[name]:  # its cell contains each
        assert figures(built) == figures(committed(name))
    assert_prints_are_saved(built)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_both_files_have_the_same_cells_and_one_what_they_print_and_draw(build, name):
    cells = committed(name)
    assert sources(cells) == sources(jupytext.read(NOTEBOOKS / f"{name}.py").cells)
    assert sum(figures(cells)) == FIGURES[name]
    assert not [text for text in assert_prints_are_saved(cells) if build.trace_of_machine(text)]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    kinds = {(o["output_type"], o.get("name"), *o.get("data", {})) for o in outputs}
    assert kinds <= {("stream", "stdout"), ("display_data", None, "image/png")}
    assert all(cell["execution_count"] is None for cell in cells if "outputs" in cell)
    for before, cell in zip([{}, *cells], cells, strict=False):
        if cell["cell_type"] == "code":  # short, and behind a sentence
            assert before["cell_type"] == "markdown" and len(cell["source"]) <= 15


def notebook_of(*outputs: nbformat.NotebookNode) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell("...", outputs=list(outputs), execution_count=3)
    return nbformat.v4.new_notebook(cells=[cell])


def test_a_build_keeps_text_and_pictures_and_drops_what_the_run_leaves(build):
    new = nbformat.v4.new_output
    figure = {"image/png": "iVBO", "text/plain": "<Figure size 560x340 with 1 Axes>"}
    result = {"text/plain": "0.2", "text/html": "<b>0.2</b>"}
    notebook = notebook_of(
        new("stream", name="stdout", text="one\n"),
        new("stream", name="stderr", text="100%|####| 3/3"),
        new("stream", name="stdout", text="two\n"),
        new("display_data", figure),
        new("execute_result", result, execution_count=3),
    )
    build.keep_outputs(notebook)
    nbformat.validate(notebook)
    (cell,) = notebook.cells
    assert [o.output_type for o in cell.outputs] == ["stream", "display_data", "execute_result"]
    assert cell.outputs[0].text == "one\ntwo\n"
    assert cell.outputs[1].data == {"image/png": "iVBO"}
    assert cell.outputs[2].data == {"text/plain": "0.2"}
    assert cell.execution_count is None and cell.outputs[2].execution_count is None


@pytest.mark.parametrize("where", ["folder", "home", "memory"])
def test_a_build_refuses_texts_that_hold_on_this_machine_alone(build, tmp_path, monkeypatch, where):
    monkeypatch.setenv("HOME", "/nobodys-home")
    names = {"folder": f"{tmp_path}/a.gguf", "home": "/nobodys-home", "memory": repr(object())}
    printed = nbformat.v4.new_output("stream", name="stdout", text=f"wrote {names[where]}\n")
    with pytest.raises(ValueError, match="outputs must not name"):
        build.keep_outputs(notebook_of(printed))


def test_a_build_takes_addresses_in_the_web_and_fractions(build):
    text = "https://github.com/tmp/home 3/4 a/b/c ../tmp/x 0x1F"
    build.keep_outputs(notebook_of(nbformat.v4.new_output("stream", name="stdout", text=text)))


def run_install_cell(code: str, source: str, monkeypatch, *, status: int = 0) -> tuple[list, list]:
    """Returns the commands of the cell without the package, and whether it restarts."""
    commands, restarts = [], []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, status, "", "no such package")

    kernel = SimpleNamespace(do_shutdown=lambda *, restart: restarts.append(restart))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        patch.setattr(subprocess, "run", run)
        code = code.replace('SOURCE, EXTRAS = ".."', f"SOURCE, EXTRAS = {source!r}")
        exec(code, {"get_ipython": lambda: SimpleNamespace(kernel=kernel)})
    return commands, restarts


def test_the_cell_that_installs_is_the_same_in_all_and_asks_for_what_pip_takes(monkeypatch):
    codes = [code for name in FIGURES for _, code in sources(committed(name))]
    (code,) = {code for code in codes if "SOURCE" in code and "pip" in code}
    assert codes.count(code) == len(FIGURES)
    commands, restarts = run_install_cell(code, "git+https://host/owner/name", monkeypatch)
    wanted = Requirement(commands[0][-1])
    assert wanted.url == "git+https://host/owner/name" and {"plots", "gguf"} <= wanted.extras
    assert restarts == [True]  # this process has a JAX already
    commands, _ = run_install_cell(code, "..", monkeypatch)
    assert commands[0][-1].startswith("..[plots,gguf")
    with pytest.raises(AssertionError, match="no such package"):
        run_install_cell(code, "..", monkeypatch, status=1)
