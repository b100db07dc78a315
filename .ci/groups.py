"""Groups of long checks, and hashes of what each of them is about.

    python .ci/groups.py                  # the groups whose hash is not the recorded one
    python .ci/groups.py --all            # all groups
    python .ci/groups.py --modules GROUP  # the test modules of a group
    python .ci/groups.py --files GROUP    # what its hash covers
    python .ci/groups.py --record         # writes the hashes of all groups to .ci/checked.json

A group is a set of test modules. Its hash covers those modules, every file of the project that
they import, directly or not, every script, notebook or data file that one of them names, and the
versions that pyproject.toml allows. Comments, docstrings and formatting do not count. Imports are
read from the code, also those inside functions.

A name that a module takes from the front of the package, as in `from sketchwalk_jax import load`,
stands for the module that defines it: the front imports almost everything, so that otherwise a
change to one file would be a change to every group.
"""

import argparse
import ast
import functools
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".ci" / "checked.json"

# Long variants that run on every change: what the project promises, and what others compute too.
ALWAYS = ("parity", "promises", "memory", "recompile", "mismatches", "readme", "reference")
# The others, by subject. A module that is not named here and has long variants is in `variants`.
GROUPS = {
    # As they are compiled for Hopper, run by the emulator of tests/ptx.
    "emulated": (
        "ampere_decode",
        "ampere_linear",
        "ampere_prefill",
        "ampere_scores",
        "ampere_selection",
        "gated_rows",
        "kernel_selection",
        "kernels",
        "linear_kernel",
        "recommended_kernels",
        "token_writes",
    ),
    # Every shape, compiled for Hopper.
    "compiled": ("ampere_compiles", "kernel_guide", "kernels_compile"),
    # In Pallas' interpreter.
    "interpreted": (
        "block_sums_kernel",
        "cudnn_attention",
        "decode_splits",
        "select_decode_kernel",
        "select_kernel",
        "select_prompt_kernel",
    ),
    # Whole models, compiled for Hopper.
    "models": ("models_compile",),
    # On meshes of eight devices.
    "meshes": ("scale_out_benchmark", "sharding"),
    # On the oldest versions; the modules between them call all of JAX, Flax, Orbax, transformers,
    # huggingface_hub and matplotlib that the others call.
    "oldest": (
        "bundled",
        "checkpoint",
        "cli_process",
        "flax",
        "flax_adapters",
        "generation",
        "gguf",
        "gguf_tokenizer",
        "gradients",
        "hub",
        "language_model",
        "plots",
        "promises",
        "quantized",
        "sampling",
        "tokenizer",
        "weights",
    ),
    # Whole runs: benchmarks, commands, kills, training, notebooks.
    "runs": (
        "ablation_benchmark",
        "benchmark_timing",
        "bundled",
        "calibration",
        "cli",
        "cli_calibrate",
        "cli_process",
        "demo",
        "end_to_end_benchmark",
        "evaluation_report",
        "filtered_evaluation",
        "harness",
        "hostile",
        "how_to",
        "install",
        "kernel_benchmark",
        "measure",
        "notebooks",
        "prompt_files",
        "real_models_benchmark",
        "recommended_benchmarks",
        "runner",
        "selection_benchmark",
        "training",
    ),
    "variants": (),
}
ONLY_VERSIONS = {"oldest"}  # groups of which nothing but the versions counts

_FOLDERS = ("sketchwalk_jax", "pallas_kernels", "models", "tests", "benchmarks", "training")
_SCRIPTS = ("tests", "benchmarks", "training")  # which start programs and read files by name
_PACKAGE = "sketchwalk_jax"
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import ([\w., ]+)|import ([\w.]+))", re.M)


def modules_of(group: str) -> list[Path]:
    """The test modules of a group."""
    named = {name for group in GROUPS.values() for name in group} | set(ALWAYS)
    if group == "always":
        names = set(ALWAYS)
    elif group == "variants":
        files = {path.stem.removeprefix("test_"): path for path in ROOT.glob("tests/test_*.py")}
        names = {name for name, path in files.items() if _has_long_variants(path)}
        names -= named
    else:
        names = set(GROUPS[group])
    paths = [ROOT / "tests" / f"test_{name}.py" for name in sorted(names)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise FileNotFoundError(f"no such test modules, named by {group}: {', '.join(missing)}")
    return paths


def _has_long_variants(path: Path) -> bool:
    """Whether code, not a string, says `pytest.mark.slow` or `slow_unless`."""
    nodes = list(ast.walk(_parse(path)))
    marks = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return "slow" in marks or "slow_unless" in {n.id for n in nodes if isinstance(n, ast.Name)}


@functools.cache
def _tracked() -> dict[str, Path]:
    """Files of the project by their path in it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return {name: ROOT / name for name in listed if (ROOT / name).is_file()}


@functools.cache
def _by_last_name() -> dict[str, list[Path]]:
    """What code may name as strings: a file or a folder by the last part of its path, if unique."""
    found: dict[str, dict[Path, list[Path]]] = {}
    for name, path in _tracked().items():
        if not name.startswith((".", "docs/")) and path.suffix not in {".md", ".png"}:
            found.setdefault(path.name, {})[path] = [path]
            for folder in Path(name).parents[:-2]:
                # Benchmarks write there. Tables are made of it, whose tests always run.
                if folder == Path("benchmarks/results"):
                    continue
                found.setdefault(folder.name, {}).setdefault(ROOT / folder, []).append(path)
    return {last: next(iter(paths.values())) for last, paths in found.items() if len(paths) == 1}


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _file_of(name: str) -> Path | None:
    """The file of a module of the project; None for others, and for the front of a package."""
    parts = name.split(".")
    if parts[0] == _PACKAGE and len(parts) > 1 and parts[1] in {"models", "pallas_kernels"}:
        parts = parts[1:]
    # A file of tests/, benchmarks/ or training/ is imported by its own name.
    for folder in ("", *_SCRIPTS):
        base = ROOT.joinpath(*filter(None, [folder]), *parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file() and path.relative_to(ROOT).parts[0] in _FOLDERS:
                return path
    return None


@functools.cache
def _exports(front: Path) -> dict[str, str]:
    """The names that the front of a package takes from modules, and those modules."""
    found = {}
    for node in ast.walk(_parse(front)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _resolve(name: str) -> Iterator[Path]:
    """The files that a dotted name of an import or an attribute stands for."""
    parent, _, last = name.rpartition(".")
    if (path := _file_of(name)) is not None:
        yield path
    elif parent and (front := _file_of(parent)) is not None:
        target = _exports(front).get(last) if front.name == "__init__.py" else None
        if target is not None and target != name:
            yield from _resolve(target)
        else:
            yield front


def _imports(path: Path) -> Iterator[Path]:
    """The files of the project that a file imports or names."""
    if path.suffix != ".py":
        return
    tree = _parse(path)
    fronts = {}  # local names of packages, whose attributes are what is used
    names_files = path.relative_to(ROOT).parts[0] in _SCRIPTS and path.name != "conftest.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                file = _file_of(alias.name)
                if file is not None and file.name == "__init__.py":
                    fronts[alias.asname or alias.name] = alias.name
                elif file is not None:
                    yield file
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield from _resolve(f"{node.module}.{alias.name}")
        elif names_files and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _named(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in fronts:
            yield from _resolve(f"{fronts[ast.unparse(node.value)]}.{node.attr}")


def _named(text: str) -> Iterator[Path]:
    """The files that a string names: by path, by last name, as `python -m` or inside code."""
    if text.endswith(".md"):  # pages are for the tests that always run
        return
    if text in _tracked():
        yield _tracked()[text]
    elif text in _by_last_name():
        yield from _by_last_name()[text]
    elif re.fullmatch(r"(sketchwalk_jax|tests|benchmarks|training)(\.\w+)+", text):
        yield from _resolve(text)
    elif text == _PACKAGE:  # `python -m`
        yield ROOT / _PACKAGE / "cli" / "__init__.py"
    elif "import " in text and "\n" in text or text.startswith(("import ", "from ")):
        for module, names, plain in _IMPORT.findall(text):
            for name in names.replace(" ", "").split(","):
                yield from _resolve(f"{module}.{name}" if name else plain or module)


def files_of(group: str) -> list[Path]:
    """What the hash of a group covers, in a fixed order."""
    if group in ONLY_VERSIONS:
        return []
    waiting = [ROOT / "tests" / "conftest.py", *modules_of(group)]
    found = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path)
    return sorted(found)


@functools.cache
def _digest(path: Path) -> bytes:
    """The hash of a file without what changes no result: comments, docstrings, formatting."""
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).digest()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).digest()


def _versions() -> bytes:
    """The versions of other packages that the project is tested with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
        project["dependency-groups"]["test"],
        project["tool"]["uv"]["constraint-dependencies"],
    ]
    return json.dumps(parts, sort_keys=True).encode()


def hash_of(group: str) -> str:
    """The hash of what a group is about."""
    hashed = hashlib.sha256(_versions())
    for path in files_of(group):
        hashed.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        hashed.update(_digest(path))
    return hashed.hexdigest()[:32]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help="name all groups")
    chosen.add_argument("--modules", choices=[*GROUPS, "always"], help="the modules of a group")
    chosen.add_argument("--files", choices=[*GROUPS, "always"], help="what its hash covers")
    chosen.add_argument("--record", action="store_true", help="write the hashes of all groups")
    given = parser.parse_args(arguments)
    if given.modules or given.files:
        paths = modules_of(given.modules) if given.modules else files_of(given.files)
        print(*(path.relative_to(ROOT).as_posix() for path in paths), sep="\n")
    elif given.all:
        print(*GROUPS, sep="\n")
    elif given.record:
        hashes = {group: hash_of(group) for group in GROUPS}
        RECORD.write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
    else:
        recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        stale = [group for group in GROUPS if recorded.get(group) != hash_of(group)]
        print(*stale, sep="\n" if stale else "", end="\n" if stale else "")


if __name__ == "__main__":
    sys.exit(main())
