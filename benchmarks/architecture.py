"""Writes the table of imports between modules and folders in ARCHITECTURE.md.

    python benchmarks/architecture.py            # rewrites the table
    python benchmarks/architecture.py --check    # fails if it differs from the code, or on a cycle

A room is a module or a folder directly inside the package. Its level is one above the highest room
that it imports, so a room imports from lower levels only. A cycle of modules or of rooms is an
error. Imports inside functions and under TYPE_CHECKING count like any others.
"""

import argparse
import ast
import graphlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->"
PACKAGE = "sketchwalk_jax"
FOLDERS = {PACKAGE: "", "models": "models", "pallas_kernels": "pallas_kernels"}
# A room of its own: the Flax modules import generation, which imports the rest of models.
OWN_ROOMS = {"models.flax"}
_NO_ROOMS = {"", "_version", "__main__"}  # the package's exports, its version, its command line

Graph = Mapping[str, frozenset[str]]


def read_modules() -> dict[str, Path]:
    """Finds all modules: names inside the package, and files."""
    found = {}
    for folder, prefix in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((*filter(None, [prefix]), *parts))
            found[name.removesuffix("__init__").removesuffix(".")] = path
    return found


def read_imports(modules: Mapping[str, Path]) -> Graph:
    """Lists the modules that each module imports."""

    def owner(name: str) -> str:
        name = name.removeprefix(PACKAGE).removeprefix(".")
        while name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, path in modules.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                names |= {owner(f"{node.module}.{alias.name}") for alias in node.names}
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
                names |= {owner(name) for name in imported if name.startswith(PACKAGE)}
        graph[module] = frozenset(names - {module})
    return graph


def room_of(module: str) -> str:
    """Returns the room of a module."""
    return module if module in OWN_ROOMS else module.partition(".")[0]


def read_rooms(imports: Graph) -> Graph:
    """Lists the rooms that each room imports."""
    rooms: dict[str, set[str]] = {}
    for module, names in imports.items():
        if room_of(module) not in _NO_ROOMS:
            others = {room_of(name) for name in names} - _NO_ROOMS - {room_of(module)}
            rooms.setdefault(room_of(module), set()).update(others)
    return {room: frozenset(names) for room, names in rooms.items()}


def levels(graph: Graph) -> dict[str, int]:
    """Computes the level of each node: one above the highest that it imports.

    Raises:
      graphlib.CycleError: If imports form a cycle.
    """
    found: dict[str, int] = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        found[node] = 1 + max((found[other] for other in graph[node]), default=0)
    return found


def write_table(rooms: Graph, modules: Iterable[str]) -> str:
    """Writes the table: levels from the top, their rooms, and the imports of each room."""
    of = levels(rooms)
    lines = ["| Level | Module or folder | Imports |", "| ---: | --- | --- |"]
    for level in sorted(set(of.values()), reverse=True):
        for room in sorted(room for room in of if of[room] == level):
            is_folder = sum(room_of(module) == room for module in modules) > 1
            name = f"`{room}/`" if is_folder else f"`{room}`"
            imports = ", ".join(f"`{other}`" for other in sorted(rooms[room]))
            lines.append(f"| {level} | {name} | {imports or '–'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    is_check = parser.parse_args().check
    modules = read_modules()
    imports = read_imports(modules)
    levels({module: names - {""} for module, names in imports.items() if module})
    old = PAGE.read_text(encoding="utf-8")
    head, rest = old.split(BEGIN)
    new = head + BEGIN + write_table(read_rooms(imports), modules) + END + rest.split(END)[1]
    if is_check:
        if old != new:
            print(f"{PAGE.name} differs from the code: run python benchmarks/architecture.py")
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
