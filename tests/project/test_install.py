"""Installations: distributions, imports despite a decoy, import cost, declared versions."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

MAPPED = {"sketchwalk_jax": "sketchwalk_jax", "models": "sketchwalk_jax.models"}
MAPPED["pallas_kernels"] = "sketchwalk_jax.pallas_kernels"
DATA_SUFFIXES = {".json", ".safetensors", ".md", ".typed"}
PUBLIC_MODULES = ("sketchwalk_jax", "sketchwalk_jax.models", "sketchwalk_jax.pallas_kernels")


@pytest.fixture(scope="session")
def project(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the checkout without environments and build outputs."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "uv.lock")
    shutil.copytree(repository, copy, ignore=skipped)
    return copy


def _uv(*arguments: str | Path, cwd: Path) -> None:
    uv = [sys.executable, "-m", "uv"] if find_spec("uv") else ["uv"]
    done = subprocess.run([*uv, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Builds the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("distributions")
    _uv("build", "--quiet", "--python", sys.executable, "--out-dir", folder, cwd=source)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def _environment(folder: Path) -> Path:
    """Makes an environment with this one's dependencies; returns its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site_packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # This environment's folders come after the new one's own. Its .pth files are not read, so an
    # editable install here is invisible there.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return python


@pytest.fixture(scope="session")
def installed(distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the interpreter of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    python = _environment(folder / "environment")
    _uv("pip", "install", "--quiet", "--no-deps", "--python", python, distributions[1], cwd=folder)
    return python


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """Makes a working directory with folders that have the names of the project's folders."""
    for name in ("models", "pallas_kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the decoy')\n")
    return tmp_path


def _mapped_files(repository: Path) -> dict[str, Path]:
    """Returns every file of the packages by its path in the wheel."""
    found = {}
    for folder, package in MAPPED.items():
        for path in (repository / folder).rglob("*.*"):
            inner = path.relative_to(repository / folder)
            found[f"{package.replace('.', '/')}/{inner.as_posix()}"] = path
    return found


def _data_files(repository: Path) -> set[str]:
    """Returns every data file of the packages, by its path in the wheel."""
    return {
        name for name, path in _mapped_files(repository).items() if path.suffix in DATA_SUFFIXES
    }


def _requirements(requirement: Requirement) -> list[str]:
    """Returns what an installed distribution requires, with the requested extras, recursively."""
    lines = []
    for line in requires(requirement.name) or ():
        marker = Requirement(line).marker
        extras = requirement.extras or {""}
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            lines.append(line.partition(";")[0])
    return lines


# Prints the files of the public modules, and the folder of the bundled model.
IMPORT_ALL = f"""
import {", ".join(PUBLIC_MODULES)}, json, sys
files = [sys.modules[name].__file__ for name in {PUBLIC_MODULES}]
print(json.dumps([*files, str(sketchwalk_jax.models.bundled_model())]))
"""


def test_every_package_folder_is_declared(repository: Path, project: dict):
    modules = map(Path, _mapped_files(repository))
    packages = {".".join(path.parent.parts) for path in modules if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


@pytest.mark.slow
def test_distributions_hold_the_package_and_nothing_else(repository: Path, distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sketchwalk_jax"}
    assert _data_files(repository) <= names
    assert not [name for name in names if re.search(r"(^|/)(tests|notebooks)/|\.ipynb$", name)]
    with tarfile.open(distributions[0]) as sdist:
        folders = {name.split("/")[1] for name in sdist.getnames() if name.count("/") > 1}
    assert folders - {"sketchwalk_jax.egg-info"} == set(MAPPED)


@pytest.mark.slow
def test_wheel_imports_its_own_files_beside_a_decoy(installed: Path, decoy: Path, run_python):
    files = json.loads(run_python(IMPORT_ALL, python=installed, cwd=decoy))
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in files)


@pytest.mark.slow
def test_strict_editable_install_imports_beside_a_decoy(
    source: Path, decoy: Path, run_python, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("editable")
    checkout = shutil.copytree(source, folder / "checkout")
    python = _environment(folder / "environment")
    options = ("--no-deps", "--config-setting", "editable_mode=strict", "--python", python)
    _uv("pip", "install", "--quiet", *options, "--editable", checkout, cwd=folder)
    files = json.loads(run_python(IMPORT_ALL, python=python, cwd=decoy))
    assert all(Path(file).is_relative_to(checkout / "build") for file in files)


@pytest.mark.slow
def test_checkout_imports_without_an_install(source: Path, run_python, tmp_path: Path):
    python = _environment(tmp_path / "environment")
    code = f"import sys; sys.path.insert(0, {str(source)!r})\n{IMPORT_ALL}"
    *files, bundled = json.loads(run_python(code, python=python))
    folders = [Path(file).parent.resolve() for file in files]
    assert folders == [source / folder for folder in MAPPED]
    assert Path(bundled) == source / "models" / "sketchwalk_8m"


@pytest.mark.slow
def test_every_shipped_data_file_loads(repository: Path, installed: Path, run_python, decoy: Path):
    names = sorted(_data_files(repository))
    code = f"""
import importlib.resources, json, pathlib
from safetensors import safe_open
root = pathlib.Path(str(importlib.resources.files("sketchwalk_jax"))).parent
for name in {names!r}:
    path = root / name
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as tensors:
            assert [tensors.get_tensor(key).shape for key in tensors.keys()]
    elif path.suffix == ".json":
        json.loads(path.read_text())
    else:
        path.read_text()
print("loaded")
"""
    assert run_python(code, python=installed, cwd=decoy) == "loaded\n"


@pytest.mark.slow
def test_command_is_installed(installed: Path, decoy: Path):
    command = [installed.parent / "sketchwalk", "--help"]
    done = subprocess.run(command, cwd=decoy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


# All modules of this package that `import sketchwalk_jax` loads: every user waits for them. Import
# a module that few calls need where it is used.
LOADED = {
    "": "_version algorithm memory plan precision progress pytree scaled selection sharding sketch "
    "validation walk",
    "attention": "api cudnn differentiable mass xla",
    "inference": "auto cache cached_layer calls compiled exchange generation layer layer_cache "
    "padding sampling steps",
    "models": "checkpoint config experts family gguf_files gguf_header hf_config hub llama norm "
    "params plans quantized qwen rope tensor_files transformer weights",
    "pallas_kernels": "config dispatch",
    "pallas_kernels.attention": "api",
    "pallas_kernels.decode_attention": "api",
    "pallas_kernels.decode_matmul": "api groups",
    "pallas_kernels.expert_matmul": "api",
    "pallas_kernels.key_quantization": "api",
    "pallas_kernels.top_k": "api",
    "pallas_kernels.walk": "api",
    "policies": "adamas base quantized_keys dense flexprefill lines minference oracle quest "
    "random_blocks ranks recommended released sketchwalk streaming",
}
# Modules that few commands or none need; the command line's help must not wait for them.
NOT_FOR_HELP = {"flax", "evaluation.harness", "models.flax"}

# Prints the names of all modules that a program loads, and of installed packages among them.
LIST_MODULES = """
import json, sys
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
installed = {name.partition(".")[0] for name, file in files.items() if "site-packages" in file}
print(json.dumps([sorted(files), sorted(installed - {"sketchwalk_jax"})]))
"""

A_TYPER_HELP = """
import typer
app = typer.Typer(add_completion=False)
@app.command()
def command(number: int = 1) -> None:
    pass
app(["--help"], standalone_mode=False)
"""


def _modules(run_python: Callable[..., str], code: str) -> tuple[set[str], set[str]]:
    """Returns the modules of this package that a program loads, and the names of other packages.

    Pallas counts as a package, since it takes long to import.
    """
    modules, installed = json.loads(run_python(code + LIST_MODULES).splitlines()[-1])
    pallas = {"pallas"} if any(re.match(r"jax\..*\bpallas\b", name) for name in modules) else set()
    own = {name.partition(".")[2] for name in modules if name.startswith("sketchwalk_jax.")}
    return own, {*installed, *pallas}


def _loaded() -> set[str]:
    files = {f"{folder}.{name}" for folder, names in LOADED.items() for name in names.split()}
    return {name.removeprefix(".") for name in files} | set(LOADED) - {""}


def test_import_loads_what_it_needs_and_nothing_else(run_python: Callable[..., str]):
    own, others = _modules(run_python, "import sketchwalk_jax")
    assert own == _loaded()
    assert others <= _modules(run_python, "import jax, jaxtyping, numpy")[1]


def test_help_of_the_command_line_loads_no_heavy_package(run_python: Callable[..., str]):
    own, others = _modules(run_python, "from sketchwalk_jax.cli import main\nmain(['--help'])\n")
    assert not own & NOT_FOR_HELP
    kernels = {name for name in own if name.startswith("pallas_kernels.")}
    assert kernels <= _loaded()
    assert others <= _modules(run_python, f"import jax, jaxtyping, numpy, tqdm\n{A_TYPER_HELP}")[1]


@pytest.mark.slow
def test_import_adds_less_than_half_a_second(installed: Path, run_python, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = """
import jax, time
start = time.process_time()  # unlike elapsed time, free of what else the machine does
import sketchwalk_jax
print(time.process_time() - start)
"""
    assert min(float(run_python(code, python=installed)) for _ in range(4)) < 0.5


def test_constraints_agree_with_the_project(repository: Path, project: dict):
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == project["tool"]["uv"]["constraint-dependencies"]


def test_plain_install_pulls_neither_cuda_nor_torch(project: dict):
    pending, pulled = list(project["project"]["dependencies"]), set()
    while pending:
        requirement = Requirement(pending.pop())
        key = (requirement.name, *sorted(requirement.extras))
        if key not in pulled:
            pulled.add(key)
            pending += _requirements(requirement)
    assert {("jax",), ("jaxlib",)} <= pulled
    assert not [name for name, *_ in pulled if re.search("cuda|nvidia|torch|triton", name)]


def test_the_changelog_begins_with_the_version_and_dates_it_as_the_citation_does(
    repository: Path, run_python
):
    changelog = (repository / "CHANGELOG.md").read_text()
    dated = re.search(r"^## \[(\d\S+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert dated is not None
    headings = re.findall(r"^## \[(\S+)\]", changelog, re.MULTILINE)
    newest = [heading for heading in headings if heading != "Unreleased"][0]
    printed = run_python("import sketchwalk_jax; print(sketchwalk_jax.__version__)").strip()
    assert printed == newest == dated[1]
    citation = (repository / "CITATION.cff").read_text()
    assert f"version: {dated[1]}\ndate-released: {dated[2]}\n" in citation


def test_the_list_of_dependencies_is_that_of_the_project(repository: Path, project: dict):
    page = (repository / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    listed = re.findall(r"^\| `(\S+)` \|.* \| (.+) \|$", page, re.MULTILINE)
    parts = project["project"]
    groups = [parts["dependencies"], *parts["optional-dependencies"].values()]
    groups += project["dependency-groups"].values()
    names = {re.split("[>=<]", one)[0] for group in groups for one in group}
    assert sorted(name for name, _ in listed) == sorted(names)
