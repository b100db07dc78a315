"""The numbers in README.md are those of the benchmarks' results."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("cpu-attention", "cpu-prefill", "needles")


def report(repository: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, repository / "benchmarks" / "report.py", *arguments],
        capture_output=True,
        text=True,
    )


def section(text: str, name: str) -> str:
    found = re.search(rf"<!-- benchmark:{name} -->\n(.*?)<!-- /benchmark -->", text, re.DOTALL)
    assert found is not None, f"README.md has no section benchmark:{name}"
    return found[1]


def test_readme_tables_equal_the_results(repository):
    done = report(repository, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_readme_has_the_table_with_hardware_versions_and_command(repository, name):
    text = section((repository / "README.md").read_text(encoding="utf-8"), name)
    assert text.count("\n| ") >= 3
    assert re.search(r"\d+ cores, \d+ GiB; Python 3\.\d+\.\d+, JAX 0\.\d+", text)
    assert "`python benchmarks/" in text


def test_a_typed_number_is_found_and_replaced(repository, tmp_path):
    readme = tmp_path / "README.md"
    original = (repository / "README.md").read_text(encoding="utf-8")
    table = section(original, "cpu-attention")
    readme.write_text(original.replace(table, table.replace("**", "**1", 1)), encoding="utf-8")
    assert report(repository, "--check", "--readme", readme).returncode == 1
    assert report(repository, "--readme", readme).returncode == 0
    assert readme.read_text(encoding="utf-8") == original


def test_full_density_answered_as_dense_did_token_for_token(repository):
    results = json.loads((repository / "benchmarks" / "results" / "needles.json").read_text())
    (full,) = (row for row in results["rows"] if row["name"] == "full")
    assert full["equal_to_dense"] == full["count"] >= 50


def test_results_of_a_quick_run_are_refused(repository, tmp_path):
    results = json.loads((repository / "benchmarks" / "results" / "cpu.json").read_text())
    results["meta"]["is_quick"] = True
    (tmp_path / "cpu.json").write_text(json.dumps(results))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmark:cpu-prefill -->\n<!-- /benchmark -->\n")
    done = report(repository, "--readme", readme, "--results", tmp_path)
    assert done.returncode != 0 and "--quick" in done.stderr


@pytest.mark.parametrize("file", ["cpu.json", "needles.json"])
def test_results_name_no_folder_of_a_machine(repository, file):
    text = (repository / "benchmarks" / "results" / file).read_text()
    assert not re.search(r'["\s=](/|~|[A-Z]:\\)', text)
