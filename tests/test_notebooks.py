"""The notebooks run from top to bottom, and both files of each say the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
# How many figures each draws; the one for GPUs draws where there is one.
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


def sources(cells: list[dict]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def figures(cells: list[dict]) -> list[int]:
    return [len(cell.get("outputs", [])) for cell in cells]


def install_cell(name: str) -> str:
    return next(code for _, code in sources(committed(name)) if "SOURCE" in code and "pip" in code)


def committed(name: str) -> list[dict]:
    return read_cells(NOTEBOOKS / f"{name}.ipynb")


def test_each_source_has_its_notebook():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(FIGURES)
    scripts = {path.stem for path in NOTEBOOKS.glob("*.py")}
    assert scripts - {"build"} == set(FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIGURES))
def test_runs_top_to_bottom_and_both_files_agree(repository, program_environment, tmp_path, name):
    environment = {key: x for key, x in program_environment.items() if key != "MODEL_DIR"}
    done = subprocess.run(
        [sys.executable, repository / "notebooks" / "build.py", name, "--out", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = read_cells(tmp_path / f"{name}.ipynb")
    assert sources(built) == sources(committed(name))
    assert sum(figures(built)) == FIGURES[name]
    if FIGURES[name]:  # each is kept in the cell that draws it
        assert figures(built) == figures(committed(name))


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_only_figures_are_kept(name):
    cells = committed(name)
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert [list(output["data"]) for output in outputs] == [["image/png"]] * len(outputs)
    assert all(cell["execution_count"] is None for cell in cells if "outputs" in cell)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_sentence_stands_before_each_short_cell(name):
    cells = committed(name)
    for place, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cells[place - 1]["cell_type"] == "markdown"
            assert len(cell["source"]) <= 15


def run_install_cell(code: str, source: str, monkeypatch, *, status: int = 0) -> tuple[list, list]:
    """What the cell runs and whether it restarts, where the package is missing."""
    import importlib.util

    commands, restarts = [], []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, status, "", "no such package")

    class Kernel:
        def do_shutdown(self, *, restart):
            restarts.append(restart)

    class Shell:
        kernel = Kernel()

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        patch.setattr(subprocess, "run", run)
        code = code.replace('SOURCE, EXTRAS = ".."', f"SOURCE, EXTRAS = {source!r}")
        exec(code, {"get_ipython": Shell})
    return commands, restarts


def test_the_cell_that_installs_is_the_same_in_all_and_asks_for_what_pip_takes(monkeypatch):
    (code,) = {install_cell(name) for name in FIGURES}
    commands, restarts = run_install_cell(code, "git+https://host/owner/name", monkeypatch)
    wanted = Requirement(commands[0][-1])
    assert wanted.url == "git+https://host/owner/name" and {"plots", "gguf"} <= wanted.extras
    assert restarts == [True]  # this process has a JAX already
    commands, _ = run_install_cell(code, "..", monkeypatch)
    assert commands[0][-1].startswith("..[plots,gguf")
    with pytest.raises(AssertionError, match="no such package"):
        run_install_cell(code, "..", monkeypatch, status=1)
