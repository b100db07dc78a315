"""Finds the test modules that a change can break, by a hash of the code that each module reaches.

    python .ci/checks.py                       # the stale modules, the nearest to the change first
    python .ci/checks.py --all                 # all modules
    python .ci/checks.py --reach MODULE        # the definitions that the hash of a module covers
    python .ci/checks.py --record [MODULE ...] # writes the hashes of modules that passed
    python .ci/checks.py --slowest FILE ...    # the ten slowest modules in junit files of pytest

The plan has a line per module: whether it has `long` variants, whether the emulator runs it
(`emulated`), and which changed files it reaches.

A module is stale if its hash differs from the one in .ci/checked.json. The hash covers the module,
each definition of the project (a top-level function, class or constant) that it reaches by name,
directly or not, each script or data file that a test or a script names, and the versions that
pyproject.toml allows. Comments, docstrings and formatting do not count.

The package imports kernels inside functions. A module whose tests run no kernel does not follow
these imports; `tests/conftest.py` makes this safe: it refuses a kernel in a test without the marker
`interpreted`.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".ci" / "checked.json"

# Test modules whose kernels the emulator of tests/ptx also runs as compiled for Hopper.
EMULATED = (
    "attention_kernel",
    "decode_attention_kernel",
    "decode_matmul_kernel",
    "grouped_matmul_kernel",
    "hopper_attention_kernel",
    "swiglu_quantize",
    "kernel_selection",
    "kernels",
    "quantize_keys_kernel",
    "model_kernels",
    "prompt_selection_kernels",
    "token_selection_kernels",
    "token_writes",
)

_PACKAGE = "sketchwalk_jax"
_KERNELS = "pallas_kernels"
_FOLDERS = (_PACKAGE, _KERNELS, "models", "tests", "benchmarks", "training")
_SCRIPTS = ("tests", "benchmarks", "training")  # they start programs and read files by name
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import ([\w., ]+)|import ([\w.]+))", re.M)
_WHOLE, _TOP = "*", ""  # a whole file; the statements that its import runs


@dataclasses.dataclass(frozen=True)
class Part:
    """A top-level definition of a file, a whole file, or the statements that its import runs."""

    path: Path
    name: str

    def __str__(self) -> str:
        """Returns the file's path in the project, and the definition."""
        return _relative(self.path) + (f":{self.name}" if self.name else "")


@functools.cache
def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclasses.dataclass(frozen=True)
class Source:
    """The definitions and imports of a Python file.

    Attributes:
      imports: The dotted name behind each imported name.
      parts: The statements of each definition, by name; the other statements under `""`.
    """

    imports: dict[str, str]
    parts: dict[str, list[ast.stmt]]


@functools.cache
def _read(path: Path) -> Source:
    parts: dict[str, list[ast.stmt]] = {_TOP: []}
    imports: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the module's docstring
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= _bound(node)
            continue
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            parts["__main__"] = [node]  # an import does not run it
            continue
        if isinstance(node, ast.If):  # `if TYPE_CHECKING`: only its imports count
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom):
                    imports |= _bound(inner)
        names = _defined(node)
        for name in names or [_TOP]:
            parts.setdefault(name, []).append(node)
    return Source(imports, parts)


def _bound(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Returns the local names that an import binds, with their dotted names."""
    if isinstance(node, ast.Import):
        tops = [(x.asname or x.name.partition(".")[0], x) for x in node.names]
        return {own: x.name if x.asname else own for own, x in tops}
    if node.level or not node.module:
        return {}
    return {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}


def _defined(node: ast.stmt) -> list[str]:
    """Returns the names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.TypeAlias):
        targets = [node.name if isinstance(node, ast.TypeAlias) else node.target]
    else:
        return []
    names = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
    return [] if "pytestmark" in names else names


@functools.cache
def _tracked() -> dict[str, Path]:
    """Returns the project's files by their path in it.

    Leaves out benchmark results: the tests of the tables that are made of them always run.
    """
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard")
    names = (name for name in listed if not name.startswith("benchmarks/results/"))
    return {name: ROOT / name for name in names if (ROOT / name).is_file()}


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@functools.cache
def _by_last_name() -> dict[str, list[Path]]:
    """Returns the files or folders that code can name by the last part of their path, if unique."""
    found: dict[str, dict[Path, list[Path]]] = {}
    for name, path in _tracked().items():
        if not name.startswith((".", "docs/")) and path.suffix not in {".md", ".png"}:
            found.setdefault(path.name, {})[path] = [path]
            for folder in Path(name).parents[:-2]:
                found.setdefault(folder.name, {}).setdefault(ROOT / folder, []).append(path)
    # Skip folders of code: their names are ordinary words, and their files are imported anyway.
    data = {
        last: {one: files for one, files in paths.items() if one.is_file() or not _has_code(files)}
        for last, paths in found.items()
    }
    return {last: next(iter(paths.values())) for last, paths in data.items() if len(paths) == 1}


def _has_code(files: list[Path]) -> bool:
    return any(file.suffix == ".py" for file in files)


@functools.cache
def _test_folders() -> list[str]:
    """Returns the folders of tests/ that hold test modules."""
    return sorted({_relative(module.parent) for module in test_modules()})


@functools.cache
def _file_of(name: str) -> Path | None:
    """Returns the file of a module of the project, or None for other modules."""
    parts = name.split(".")
    if parts[0] == _PACKAGE and len(parts) > 1 and parts[1] in {"models", _KERNELS}:
        parts = parts[1:]
    # Scripts import a file of tests/, benchmarks/ or training/ by its bare name.
    for folder in ("", *_SCRIPTS, *_test_folders()):
        base = ROOT.joinpath(*filter(None, [folder]), *parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file() and path.relative_to(ROOT).parts[0] in _FOLDERS:
                return path
    return None


def _resolve(name: str) -> Iterator[Part]:
    """Yields the part of the project that a dotted name stands for, if any."""
    words = name.split(".")
    for size in range(len(words), 0, -1):
        path = _file_of(".".join(words[:size]))
        if path is None:
            continue
        if size == len(words):
            # `__init__.py` of a package may bind a module's name to a function.
            front = _file_of(name.rpartition(".")[0]) if size > 1 else None
            bound = _read(front).imports.get(words[-1], name) if front else name
            if bound != name:
                yield from _resolve(bound)
            else:  # the module itself: its user may use anything in it
                yield Part(path, _WHOLE if path.name != "__init__.py" else _TOP)
            return
        source, own = _read(path), words[size]
        if own in source.parts:
            yield Part(path, own)
        elif own in source.imports:
            target = ".".join([source.imports[own], *words[size + 1 :]])
            if target != name:
                yield from _resolve(target)
        else:
            yield Part(path, _WHOLE if path.name != "__init__.py" else _TOP)
        return


def _named(text: str) -> Iterator[Part]:
    """Yields the files that a string names: by path, last name, `python -m` or inside code."""
    if text.endswith(".md"):  # tests of pages always run
        return
    if text in _tracked():
        yield Part(_tracked()[text], _WHOLE)
    elif text in _by_last_name():
        yield from (Part(path, _WHOLE) for path in _by_last_name()[text])
    elif re.fullmatch(r"(sketchwalk_jax|tests|benchmarks|training)(\.\w+)+", text):
        yield from _resolve(text)
    elif text == _PACKAGE:  # `python -m`
        yield Part(ROOT / _PACKAGE / "cli" / "__init__.py", _WHOLE)
    elif "import " in text and "\n" in text or text.startswith(("import ", "from ")):
        for module, names, plain in _IMPORT.findall(text):
            for name in names.replace(" ", "").split(","):
                yield from _resolve(f"{module}.{name}" if name else plain or module)


def _dotted(node: ast.AST) -> list[str]:
    """Returns the parts of `a.b.c`, or nothing where it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


@functools.cache
def _references(part: Part, with_kernels: bool) -> tuple[Part, ...]:
    """Yields the parts that a part uses by name."""
    if part.path.suffix != ".py":
        return ()
    source, top = _read(part.path), _relative(part.path).partition("/")[0]
    if part.name == _WHOLE:
        statements = [node for nodes in source.parts.values() for node in nodes]
    else:
        statements = source.parts[part.name]
    found: dict[Part, None] = {Part(part.path, _TOP): None}
    late: dict[str, str] = {}  # names that are imported inside functions
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                late |= _bound(node)

    def visit(node: ast.AST) -> None:
        words = _dotted(node)
        if words and words[0] in late:
            targets = list(_resolve(".".join([late[words[0]], *words[1:]])))
            if not with_kernels and top not in _SCRIPTS:
                targets = [x for x in targets if not x.path.is_relative_to(ROOT / _KERNELS)]
            found.update(dict.fromkeys(targets))
        elif words and words[0] in source.parts:
            found[Part(part.path, words[0])] = None
        elif words and words[0] in source.imports:
            found.update(dict.fromkeys(_resolve(".".join([source.imports[words[0]], *words[1:]]))))
        elif isinstance(node, ast.arg) and top == "tests":
            found.update(dict.fromkeys(_fixture(node.arg)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = _named(node.value) if part.path.name != "conftest.py" else ()
            if top not in _SCRIPTS:  # data that the package reads
                names = (x for x in names if x.path.suffix not in {".py", ".md"})
            found.update(dict.fromkeys(names))
        if not words:
            for child in ast.iter_child_nodes(node):
                visit(child)

    for statement in statements:
        visit(statement)
    return tuple(found)


_CONFTEST = ROOT / "tests" / "conftest.py"


def _fixture(name: str) -> Iterator[Part]:
    """Returns the fixture of tests/conftest.py that a test's argument names."""
    if name in _read(_CONFTEST).parts:
        yield Part(_CONFTEST, name)


@functools.cache
def _everywhere() -> tuple[Part, ...]:
    """Returns the parts that every test module runs with."""
    found = [Part(_CONFTEST, _TOP), Part(ROOT / "tests" / "runtime_checks.py", _WHOLE)]
    for name, nodes in _read(_CONFTEST).parts.items():
        decorators = [x for node in nodes for x in getattr(node, "decorator_list", ())]
        if name.startswith("pytest_") or any("autouse" in ast.unparse(x) for x in decorators):
            found.append(Part(_CONFTEST, name))
    return tuple(found)


@functools.cache
def _marks(module: Path) -> set[str]:
    """Returns the attributes and names that a test module's code uses, markers included."""
    nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    marks = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return marks | {node.id for node in nodes if isinstance(node, ast.Name)}


def is_emulated(module: Path) -> bool:
    """Says whether the module also runs in the emulator."""
    return module.stem.removeprefix("test_") in EMULATED


def has_long_variants(module: Path) -> bool:
    """Says whether the module has tests beyond the default ones that a change must run."""
    markers = {"slow", "slow_unless", "cases_of"}  # `cases_of` of tests/compiling.py adds `slow`
    return bool(_marks(module) & markers) or is_emulated(module)


def test_modules() -> list[Path]:
    """Returns all test modules of the project."""
    return sorted(ROOT.glob("tests/**/test_*.py"))


@functools.cache
def reach(module: Path) -> dict[Part, int]:
    """Returns the parts that a test module reaches, with their distance from it in steps."""
    runs_kernels = bool(_marks(module) & {"interpreted", "hopper"})
    start = [Part(module, _WHOLE), *_everywhere()]
    if is_emulated(module):
        start.append(Part(ROOT / "tests" / "compiled_kernels.py", _WHOLE))
    found = dict.fromkeys(start, 0)
    waiting = list(found)
    for part in waiting:  # the loop appends to it
        for other in _references(part, runs_kernels):
            if other not in found:
                found[other] = found[part] + 1
                waiting.append(other)
    return found


@functools.cache
def _digest(part: Part) -> bytes:
    """Hashes a part without its comments, docstrings and formatting, which change no result."""
    if part.path.suffix != ".py":
        return hashlib.sha256(part.path.read_bytes()).digest()
    source = _read(part.path)
    parts = source.parts.values() if part.name == _WHOLE else [source.parts[part.name]]
    dumped = [ast.dump(_without_docstrings(node)) for nodes in parts for node in nodes]
    return hashlib.sha256("\n".join(dumped).encode()).digest()


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for inner in ast.walk(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(inner, clean=False) is not None:
                inner.body = inner.body[1:]
    return node


@functools.cache
def _versions() -> bytes:
    """Returns the versions of other packages that the project is tested with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
        project["dependency-groups"]["test"],
        project["tool"]["uv"]["constraint-dependencies"],
    ]
    return json.dumps(parts, sort_keys=True).encode()


def hash_of(module: Path) -> str:
    """Hashes everything that a test module reaches."""
    hashed = hashlib.sha256(_versions())
    for part in sorted(reach(module), key=str):
        hashed.update(str(part).encode() + b"\0" + _digest(part))
    return hashed.hexdigest()[:16]


def recorded() -> dict[str, str]:
    """Returns the hash of each module, by name, when it last passed."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def record(modules: Iterable[Path]) -> None:
    """Records that these modules passed as they are now, and drops removed modules."""
    known = recorded() | {module.stem: hash_of(module) for module in modules}
    names = {module.stem for module in test_modules()}
    kept = {name: known[name] for name in sorted(known) if name in names}
    RECORD.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def changed() -> set[Path]:
    """Returns the files that differ from the last commit that changed the record."""
    try:
        commit = _git("log", "-1", "--format=%H", "--", str(RECORD))
    except subprocess.CalledProcessError:  # before the first commit
        return set()
    names = _git("diff", "--name-only", *commit, "--") if commit else []
    names += _git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


def stale() -> dict[Path, list[str]]:
    """Returns the stale modules, nearest to a change first, and the changed files they reach."""
    known, files, found = recorded(), changed(), []
    for module in test_modules():
        if known.get(module.stem) == hash_of(module):
            continue
        near: dict[Path, int] = {}
        for part, steps in reach(module).items():
            if part.path in files:
                near[part.path] = min(steps, near.get(part.path, steps))
        why = sorted(near, key=lambda path: (near[path], path))
        names = [_relative(path) for path in why]
        if module.stem not in known:
            names.insert(0, "never recorded")
        # Modules named after a changed file first, then the nearest, then those that reach little.
        is_other = not any(path.stem.strip("_") in module.stem for path in near)
        order = (is_other, min(near.values(), default=99), len(reach(module)))
        found.append((order, module, names or ["versions"]))
    return {module: names for _, module, names in sorted(found)}


def slowest(files: Iterable[Path], count: int = 10) -> list[tuple[str, float]]:
    """Returns the modules whose tests took longest, in seconds, summed over pytest's reports."""
    seconds: Counter[str] = Counter()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            names = case.get("classname", "").split(".")
            seconds[".".join(names[:3])] += float(case.get("time", 0))
    return seconds.most_common(count)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help="plan all modules")
    chosen.add_argument("--reach", metavar="MODULE", help="list what a module reaches")
    chosen.add_argument(
        "--record", nargs="*", metavar="MODULE", help="write hashes, of all or some"
    )
    chosen.add_argument("--slowest", nargs="+", type=Path, metavar="FILE", help="of junit files")
    given = parser.parse_args(arguments)
    if given.reach:
        print(*sorted(map(str, reach((ROOT / given.reach).resolve()))), sep="\n")
    elif given.slowest:
        for name, seconds in slowest(given.slowest):
            print(f"{seconds:7.0f} s  {name}")
    elif given.record is not None:
        record([(ROOT / name).resolve() for name in given.record] or test_modules())
    else:
        found = dict.fromkeys(test_modules(), ["all are wanted"]) if given.all else stale()
        for module, why in found.items():
            kinds = "long" if has_long_variants(module) else "default"
            kinds += " emulated" if is_emulated(module) else ""
            more = f" and {len(why) - 3} more" if len(why) > 3 else ""
            print(f"{_relative(module)} ({kinds}): {', '.join(why[:3])}{more}")


if __name__ == "__main__":
    sys.exit(main())
