"""The groups of long checks: what their hashes cover, and when a group has to run again."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

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
        'def load():\n    """Loads."""\n    from sketchwalk_jax.late import late\n    late()\n'
    ),
    "sketchwalk_jax/late.py": "def late(): ...\n",
    "sketchwalk_jax/other.py": "def other(): ...\n",
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/kernel.py": "",
    "PAGE.md": "",
    "benchmarks/measure.py": "",
    "tests/conftest.py": "",
    "tests/helper.py": "from sketchwalk_jax.pallas_kernels import kernel\n",
    "tests/test_one.py": (
        "import helper\nimport sketchwalk_jax as sw\nsw.load()\n"
        "script = 'measure.py'\npage = 'PAGE.md'\n"
    ),
    "tests/test_two.py": "import pytest\npytestmark = pytest.mark.slow\n",
}
ONE = {
    "benchmarks/measure.py",
    "pallas_kernels/kernel.py",
    "sketchwalk_jax/late.py",
    "sketchwalk_jax/load.py",
    "tests/conftest.py",
    "tests/helper.py",
    "tests/test_one.py",
}


def read(script: Path) -> ModuleType:
    """The script as a module, read anew."""
    spec = importlib.util.spec_from_file_location("groups", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """A small project with the script."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    shutil.copy(repository / ".ci" / "groups.py", tmp_path / ".ci")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def groups_of(project: Path) -> ModuleType:
    groups = read(project / ".ci" / "groups.py")
    groups.ALWAYS, groups.GROUPS = (), {"one": ("one",), "variants": ()}
    return groups


def test_a_hash_covers_what_the_tests_import_and_name(project):
    groups = groups_of(project)
    found = {path.relative_to(project).as_posix() for path in groups.files_of("one")}
    assert found == ONE
    assert [path.name for path in groups.modules_of("variants")] == ["test_two.py"]


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("sketchwalk_jax/late.py", "...", "return 1", True),
        ("pallas_kernels/kernel.py", "", "SIZE = 64", True),
        ("benchmarks/measure.py", "", "print(1)", True),
        ("pyproject.toml", "jax==1", "jax==2", True),
        ("sketchwalk_jax/other.py", "...", "return 1", False),
        ("sketchwalk_jax/load.py", "Loads.", "Reads.", False),
        ("sketchwalk_jax/late.py", "...", "...  # later", False),
        ("tests/test_two.py", "slow", "slow\nx = 1", False),
    ],
)
def test_a_group_runs_again_where_its_subject_changed(project, file, old, new, changes):
    before = groups_of(project).hash_of("one")
    text = FILES[file].replace(old, new) if old else new
    assert text != FILES[file]
    (project / file).write_text(text, encoding="utf-8")
    assert (groups_of(project).hash_of("one") != before) is changes


def test_only_groups_that_were_not_recorded_as_they_are_run(project, capsys):
    groups = groups_of(project)
    groups.main([])
    assert capsys.readouterr().out.split() == ["one", "variants"]
    groups.main(["--record"])
    groups.main([])
    assert capsys.readouterr().out.split() == []
    (project / "tests" / "helper.py").write_text("x = 1\n", encoding="utf-8")
    groups_of(project).main([])
    assert capsys.readouterr().out.split() == ["one"]
    (project / "tests" / "test_one.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"named by one: test_one.py"):
        groups_of(project).main([])


def test_all_groups_of_this_project_have_modules_and_a_weekly_job(repository):
    groups = read(repository / ".ci" / "groups.py")
    assert all(groups.modules_of(group) for group in [*groups.GROUPS, "always"])
    workflow = (repository / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (names,) = re.findall(r"group: \[(.*)\]", workflow)
    assert names.split(", ") == list(groups.GROUPS)
