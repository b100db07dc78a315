"""The numbers in README.md and on the results page match the benchmarks' results."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import report  # noqa: E402

PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "benchmarks/KERNELS.md",
    "benchmarks/QUALITY.md",
    "benchmarks/appendix/ablations.md",
    "benchmarks/appendix/commands.md",
    "benchmarks/appendix/devices.md",
    "benchmarks/appendix/kernels.md",
    "benchmarks/appendix/paper.md",
    "benchmarks/appendix/quantised_weights.md",
    "docs/answered.md",
    "docs/faq.md",
    "docs/how_to.md",
    "docs/index.md",
    "docs/several_gpus.md",
    "models/README.md",
    "pallas_kernels/README.md",
    "sketchwalk_jax/policies/README.md",
    "tests/ptx/README.md",
)
NUMBERS = "benchmarks/KERNELS.md"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def section(text: str, name: str) -> str:
    found = re.search(rf"<!-- benchmark:{name} -->\n(.*?)<!-- /benchmark -->", text, re.DOTALL)
    assert found is not None, f"the page has no section benchmark:{name}"
    return found[1]


def test_tables_equal_the_results(repository):
    command = [sys.executable, repository / "benchmarks" / "report.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "gains"),
        ("README.md", "losses"),
        ("benchmarks/appendix/kernels.md", "gradients"),
        (NUMBERS, "kernels"),
        (NUMBERS, "cpu"),
        ("benchmarks/QUALITY.md", "by-task"),
        ("benchmarks/appendix/paper.md", "bundled"),
    ],
)
def test_a_page_has_the_table_with_hardware_and_date(repository, page, name):
    text = section((repository / page).read_text(encoding="utf-8"), name)
    assert text.count("\n| ") >= 3
    assert re.search(r"(H100|H200|EPYC).*; JAX 0\.\d+\S*; 2026-\d\d-\d\d", text)


@pytest.mark.parametrize(
    ("page", "lines"), [("README.md", 160), (NUMBERS, 200), ("benchmarks/QUALITY.md", 200)]
)
def test_a_page_is_short_and_its_tables_fit_a_screen(repository, page, lines):
    text = (repository / page).read_text(encoding="utf-8")
    assert text.count("\n") <= lines
    wide = [line for line in text.splitlines() if line.startswith("| ") and line.count(" | ") > 4]
    assert not wide


def test_a_typed_number_is_found_and_replaced(repository, tmp_path):
    readme = tmp_path / "README.md"
    original = (repository / NUMBERS).read_text(encoding="utf-8")
    table = section(original, "cpu")
    readme.write_text(original.replace(table, table.replace("**", "**1", 1)), encoding="utf-8")
    assert report.main(["--check", "--page", str(readme)]) == 1
    assert report.main(["--page", str(readme)]) == 0
    assert readme.read_text(encoding="utf-8") == original


def test_the_figures_of_the_paper_are_on_their_page_and_agree_with_their_averages(repository):
    """Averages are rounded, but a wrong digit in any column would show."""
    page = repository / "benchmarks" / "appendix" / "paper.md"
    for name in ("paper-ruler", "paper-longbench"):
        text = section(page.read_text(encoding="utf-8"), name)
        assert "arXiv:2602.07397" in text
        for method in ("dense", "`Sketch&Walk`", "`FlexPrefill`", "`Quest`"):
            assert f"| {method} |" in text
    data = json.loads((RESULTS / "paper.json").read_text(encoding="utf-8"))
    assert [one["table"] for one in data["tables"]] == [1, 2, 3, 4, 5, 6]
    for table in data["tables"]:
        for row in table["rows"]:
            values = dict(zip(table["columns"], row["values"], strict=True))
            averages = {name: values.pop(name) for name in list(values) if "average" in name}
            assert np.mean(list(values.values())) == pytest.approx(averages["average"], abs=0.015)
            if table["benchmark"] == "LongBench":
                del values["passage_count"]
                rest = averages["average_without_passage_count"]
                assert np.mean(list(values.values())) == pytest.approx(rest, abs=0.015)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings as code hosts and the documentation site do."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_pictures_and_links_of_a_page_lead_to_a_file_and_a_heading(repository, page):
    path = repository / page
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text(encoding="utf-8"))
    wrong = []
    for target, anchor in found:
        file = path.parent / target if target else path
        if "://" not in target and (not file.exists() or (anchor and anchor not in anchors(file))):
            wrong.append(f"{target}#{anchor}")
    assert not wrong


def test_results_of_a_quick_run_are_refused(tmp_path):
    results = json.loads((RESULTS / "end_to_end_cpu.json").read_text())
    results["meta"]["is_quick"] = True
    (tmp_path / "end_to_end_cpu.json").write_text(json.dumps(results))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmark:cpu -->\n<!-- /benchmark -->\n")
    with pytest.raises(ValueError, match="must be of a whole run, got one with --quick"):
        report.main(["--page", str(readme), "--results", str(tmp_path)])


@pytest.mark.parametrize("file", ["end_to_end_cpu.json", "quality.json"])
def test_results_name_no_folder_of_a_machine(repository, file):
    text = (repository / "benchmarks" / "results" / file).read_text()
    assert not re.search(r'["\s=](/|~|[A-Z]:\\)', text)


CODE = ("sketchwalk_jax", "models", "pallas_kernels", "benchmarks", "training", "tests")
OPENINGS = ("What", "Of", "Where", "That of", "Those of")  # a noun must be guessed
FORMER_NAMES = {"gated_rows", "warp_ops", "warp_products", "way_to_attend"}


def test_docstrings_open_with_a_subject_or_a_verb_and_names_are_the_fields(repository):
    found = []
    for path in sorted(file for folder in CODE for file in (repository / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if re.match(rf"({'|'.join(OPENINGS)})\b", first):
                    found.append(f"{path.name}: {first}")
        if path != Path(__file__):
            found += [
                f"{path.name}: {name}" for name in FORMER_NAMES & set(re.findall(r"\w+", text))
            ]
    assert not found
