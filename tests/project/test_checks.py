"""The hashes of test modules: which code they cover, and when modules must run again."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import faults
import pytest

PROJECT = """
[project]
dependencies = ["jax>=1"]
optional-dependencies = {}
[dependency-groups]
test = []
[tool.uv]
constraint-dependencies = ["jax==1"]
"""

FILES = {
    "pyproject.toml": PROJECT,
    "sketchwalk_jax/__init__.py": (
        "from sketchwalk_jax.load import load\nfrom sketchwalk_jax.other import other\n"
    ),
    "sketchwalk_jax/load.py": (
        "from sketchwalk_jax import more\n"
        'def load():\n    """Loads."""\n    from sketchwalk_jax.late import late\n    late()\n'
        "    return more.used()\n"
        "def unload():\n    return load()\n"
    ),
    "sketchwalk_jax/late.py": (
        "def late():\n    from sketchwalk_jax.pallas_kernels.kernel import run\n    run()\n"
        "    open('table.json')\n"
    ),
    "sketchwalk_jax/more.py": "SIZE = 1\ndef used(): return SIZE\ndef unused(): ...\n",
    "sketchwalk_jax/other.py": "def other(): ...\n",
    "sketchwalk_jax/table.json": "{}",
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/kernel.py": "def run(): ...\n",
    "PAGE.md": "",
    "benchmarks/measure.py": "",
    "benchmarks/results/table.json": "{}",
    "tests/runtime_checks.py": "",
    "tests/conftest.py": (
        "import pytest\n@pytest.fixture\ndef own(): return 1\n"
        "@pytest.fixture\ndef unused(): return 1\n"
        "@pytest.fixture(autouse=True)\ndef of_all(): return 1\n"
    ),
    "tests/area/helper.py": "def help(): return 1\ndef other(): return 1\n",
    "tests/test_one.py": (
        "import helper\nimport sketchwalk_jax as sw\n"
        "def test_it(own):\n    sw.load()\n    helper.help()\n"
        "script = 'measure.py'\npage = 'PAGE.md'\n"
    ),
    "tests/area/test_two.py": (
        "import pytest\nfrom sketchwalk_jax.load import unload\n"
        "pytestmark = [pytest.mark.slow, pytest.mark.interpreted]\ndef test_it(): unload()\n"
    ),
}


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """Writes a small project with the script."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    shutil.copy(repository / ".ci" / "checks.py", tmp_path / ".ci")
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(project: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *arguments], cwd=project, check=True)


def record(project: Path) -> None:
    checks_of(project).main(["--record"])
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "Record")


def checks_of(project: Path) -> ModuleType:
    """Loads a project's script as a new module."""
    name = "checks_of_a_project"
    spec = importlib.util.spec_from_file_location(name, project / ".ci" / "checks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up annotations there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_a_module_reaches_what_it_uses_by_name(project):
    checks = checks_of(project)
    parts = {str(part) for part in checks.reach(project / "tests" / "test_one.py")}
    parts -= {"tests/test_one.py:script", "tests/test_one.py:page", "tests/test_one.py:test_it"}
    assert {part for part in parts if ":" in part} == {
        "benchmarks/measure.py:*",
        "sketchwalk_jax/late.py:late",
        "sketchwalk_jax/load.py:load",
        "sketchwalk_jax/more.py:SIZE",
        "sketchwalk_jax/more.py:used",
        "sketchwalk_jax/table.json:*",
        "tests/conftest.py:of_all",
        "tests/conftest.py:own",
        "tests/area/helper.py:help",
        "tests/runtime_checks.py:*",
        "tests/test_one.py:*",
    }
    assert checks.has_long_variants(project / "tests" / "area" / "test_two.py")
    assert not checks.has_long_variants(project / "tests" / "test_one.py")


# Both modules reach `load`; the second runs kernels, imported inside a function.
BOTH = ["test_one.py", "test_two.py"]


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("sketchwalk_jax/late.py", "run()", "run(1)", BOTH),
        ("sketchwalk_jax/load.py", "return load()", "return 1", ["test_two.py"]),
        ("sketchwalk_jax/more.py", "SIZE = 1", "SIZE = 2", BOTH),
        ("sketchwalk_jax/more.py", "...", "return 1", []),
        ("sketchwalk_jax/other.py", "...", "return 1", []),
        ("sketchwalk_jax/more.py", "SIZE = 1", "import os\nos.getcwd()\nSIZE = 1", BOTH),
        ("sketchwalk_jax/table.json", "{}", "[]", BOTH),
        ("pallas_kernels/kernel.py", "...", "return 1", ["test_two.py"]),
        ("benchmarks/measure.py", "", "print(1)", ["test_one.py"]),
        ("benchmarks/results/table.json", "{}", "[]", []),
        ("pyproject.toml", "jax==1", "jax==2", BOTH),
        ("sketchwalk_jax/load.py", "Loads.", "Reads.", []),
        ("sketchwalk_jax/late.py", "run()\n", "run()  # later\n", []),
        ("tests/area/test_two.py", "unload()", "unload(1)", ["test_two.py"]),
        ("tests/conftest.py", "unused(): return 1", "unused(): return 2", []),
        ("tests/conftest.py", "own(): return 1", "own(): return 2", ["test_one.py"]),
        ("tests/conftest.py", "of_all(): return 1", "of_all(): return 2", BOTH),
        ("tests/area/helper.py", "other(): return 1", "other(): return 2", []),
    ],
)
def test_a_module_is_stale_where_a_change_can_break_it(project, file, old, new, stale):
    record(project)
    assert checks_of(project).stale() == {}
    text = FILES[file].replace(old, new, 1) if old else new
    assert text != FILES[file]
    (project / file).write_text(text, encoding="utf-8")
    found = checks_of(project).stale()
    assert sorted(module.name for module in found) == stale
    reason = "versions" if file == "pyproject.toml" else file
    assert all(why == [reason] for why in found.values())


def test_the_nearest_modules_come_first_and_some_are_recorded_alone(project, capsys):
    checks_of(project).main(["--record", "tests/test_one.py"])
    checks_of(project).main([])
    assert capsys.readouterr().out.splitlines() == ["tests/area/test_two.py (long): never recorded"]
    record(project)
    path = "tests/area/test_two.py"
    (project / path).write_text(FILES[path] + "x = 1\n")
    (project / "sketchwalk_jax" / "late.py").write_text("def late(): ...\n")
    checks_of(project).main([])
    assert capsys.readouterr().out.splitlines() == [
        "tests/area/test_two.py (long): tests/area/test_two.py, sketchwalk_jax/late.py",
        "tests/test_one.py (default): sketchwalk_jax/late.py",
    ]


def test_the_slowest_modules_are_added_up_over_runs(tmp_path, project):
    case = '<testcase classname="tests.models.test_{}" name="a" time="{}"/>'
    for name, seconds in (("one", 1.5), ("two", 2.0)):
        text = case.format("a", seconds) + case.format(name, 1)
        (tmp_path / f"{name}.xml").write_text(f"<testsuite>{text}</testsuite>", encoding="utf-8")
    found = checks_of(project).slowest(sorted(tmp_path.glob("*.xml")), 2)
    assert found == [("tests.models.test_a", 3.5), ("tests.models.test_one", 1.0)]


def test_every_named_module_of_this_project_exists_and_every_fault_can_be_made(repository):
    checks = checks_of(repository)
    names = {module.stem.removeprefix("test_") for module in checks.test_modules()}
    assert set(checks.EMULATED) <= names
    assert "slow" in checks._marks(repository / "tests" / "inference" / "test_promises.py")
    made = os.environ.get(faults.MADE)  # set by the script, which may run a copy of this test
    assert faults.wrong_faults([fault for fault in faults.FAULTS if fault.name != made]) == []
    assert len(faults.FAULTS) >= 40
