"""The quick-start notebook runs from top to bottom, and its two files say the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def read_cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def sources(cells: list[dict]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


@pytest.fixture(scope="module")
def built(repository, program_environment, tmp_path_factory) -> list[dict]:
    """The cells of the notebook that quickstart.py makes, after a run."""
    out = tmp_path_factory.mktemp("notebook") / "quickstart.ipynb"
    environment = {name: x for name, x in program_environment.items() if name != "MODEL_DIR"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"  # it computes more than it compiles
    done = subprocess.run(
        [sys.executable, repository / "notebooks" / "build.py", "--out", out],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_cells(out)


@pytest.fixture(scope="module")
def committed(repository) -> list[dict]:
    return read_cells(repository / "notebooks" / "quickstart.ipynb")


@pytest.mark.slow
def test_runs_top_to_bottom_and_both_files_agree(built, committed):
    assert sources(built) == sources(committed)


@pytest.mark.slow
def test_each_figure_is_kept_in_the_cell_that_draws_it(built, committed):
    def figures(cells: list[dict]) -> list[int]:
        return [len(cell.get("outputs", [])) for cell in cells]

    assert sum(figures(built)) == 2
    assert figures(built) == figures(committed)


def test_only_figures_are_kept(committed):
    outputs = [output for cell in committed for output in cell.get("outputs", [])]
    assert [list(output["data"]) for output in outputs] == [["image/png"]] * len(outputs)
    assert all(cell["execution_count"] is None for cell in committed if "outputs" in cell)


def test_a_sentence_stands_before_each_short_cell(committed):
    kinds = [cell["cell_type"] for cell in committed]
    for place, kind in enumerate(kinds):
        if kind == "code":
            assert kinds[place - 1] == "markdown"
            assert len(committed[place]["source"]) <= 15
