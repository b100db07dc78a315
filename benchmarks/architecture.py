"""The rooms of the package and what each may import, read from the imports themselves.

    python benchmarks/architecture.py            # plots/architecture.png and ARCHITECTURE.md
    python benchmarks/architecture.py --check    # fails if they are not the code's, or on a circle

A room is a module or a folder right inside the package. Its floor is one above the highest room
that it imports, so data flows downward only; a circle of modules or of rooms is an error. Imports
inside functions and under TYPE_CHECKING count like any others.
"""

import argparse
import ast
import functools
import graphlib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "ARCHITECTURE.md", ROOT / "benchmarks" / "plots" / "architecture.png"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->"
PACKAGE = "sketchwalk_jax"
FOLDERS = {PACKAGE: "", "models": "models", "pallas_kernels": "pallas_kernels"}
# The Flax port of a whole model stands on generation, above the other files of its folder.
OWN_ROOMS = {"models.flax"}
_NO_ROOMS = {"", "_version", "__main__"}  # the package's front, its version, its command line
_COLOURS = {"folder": "#D6E6F2", "file": "#F2F2F2"}
_ARROW = "#8899AA"

Graph = Mapping[str, frozenset[str]]


def read_modules() -> dict[str, Path]:
    """Every module's name inside the package, and its file."""
    found = {}
    for folder, prefix in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((*filter(None, [prefix]), *parts))
            found[name.removesuffix("__init__").removesuffix(".")] = path
    return found


def read_imports(modules: Mapping[str, Path]) -> Graph:
    """The modules that each module imports."""

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
    """The room that a module stands in."""
    return module if module in OWN_ROOMS else module.partition(".")[0]


def read_rooms(imports: Graph) -> Graph:
    """The rooms that each room imports."""
    rooms: dict[str, set[str]] = {}
    for module, names in imports.items():
        if room_of(module) not in _NO_ROOMS:
            others = {room_of(name) for name in names} - _NO_ROOMS - {room_of(module)}
            rooms.setdefault(room_of(module), set()).update(others)
    return {room: frozenset(names) for room, names in rooms.items()}


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each node: one above the highest that it imports.

    Raises:
      graphlib.CycleError: If imports go round in a circle.
    """
    found: dict[str, int] = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        found[node] = 1 + max((found[other] for other in graph[node]), default=0)
    return found


def write_table(rooms: Graph, modules: Iterable[str]) -> str:
    """The floors from the top, their rooms, and what each room imports."""
    of = floors(rooms)
    lines = ["| Level | Module or folder | Imports |", "| ---: | --- | --- |"]
    for floor in sorted(set(of.values()), reverse=True):
        for room in sorted(room for room in of if of[room] == floor):
            is_folder = sum(room_of(module) == room for module in modules) > 1
            name = f"`{room}/`" if is_folder else f"`{room}`"
            imports = ", ".join(f"`{other}`" for other in sorted(rooms[room]))
            lines.append(f"| {floor} | {name} | {imports or '–'} |")
    return "\n".join(lines) + "\n"


def fingerprint(rooms: Graph) -> str:
    """What the picture shows, in short: it stands in the picture's own data."""
    shown = {room: sorted(names) for room, names in sorted(rooms.items())}
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def reduce(rooms: Graph) -> dict[str, set[str]]:
    """Arrows without those that others imply."""

    @functools.cache
    def reach(room: str) -> frozenset[str]:
        return rooms[room].union(*(reach(other) for other in rooms[room]))

    return {
        room: {one for one in names if not any(one in reach(other) for other in names)}
        for room, names in rooms.items()
    }


def place(rooms: Graph) -> tuple[dict[str, tuple[float, float]], dict[str, list[str]]]:
    """Where each room stands, and the way of each arrow: a layered drawing of a graph.

    An arrow that passes floors gets a point on each of them, shared by all arrows to that room, so
    that it runs between the boxes and not behind them. Floors are put in order by the mean place of
    what a node is joined to (Sugiyama, Tagawa and Toda 1981), below and above in turn.

    Returns:
      Places of rooms and points, and for every node the nodes one floor below it.
    """
    of, below = floors(rooms), {room: [] for room in rooms}
    for room, others in sorted(reduce(rooms).items()):
        for other in sorted(others):
            last = room
            for floor in range(of[room] - 1, of[other], -1):
                point = f"{other}@{floor}"
                below[last] = sorted({*below[last], point})
                of[point], last = floor, point
                below.setdefault(point, [])
            below[last] = sorted({*below[last], other})
    above = {node: [one for one in below if node in below[one]] for node in of}
    by_floor = {floor: sorted(n for n in of if of[n] == floor) for floor in set(of.values())}
    places: dict[str, tuple[float, float]] = {}

    def arrange(floor: int, joined: Mapping[str, list[str]]) -> None:
        def wish(node: str) -> float:
            known = [places[one][0] for one in joined[node] if one in places]
            return sum(known) / len(known) if known else places.get(node, (0.0,))[0]

        widths = {node: 0.35 if "@" in node else 1.0 for node in by_floor[floor]}
        x = -sum(widths.values()) / 2
        for node in sorted(widths, key=lambda node: (wish(node), node)):
            places[node] = (x + widths[node] / 2, floor)
            x += widths[node]

    for _ in range(8):
        for floor in sorted(by_floor):
            arrange(floor, below)
        for floor in sorted(by_floor, reverse=True):
            arrange(floor, above)
    return places, below


def draw_rooms(rooms: Graph, modules: Iterable[str], path: Path) -> None:
    """Draws the rooms by floor, with an arrow to what each imports directly."""
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    places, below = place(rooms)
    columns = [x for x, _ in places.values()]
    height = max(y for _, y in places.values())
    figure, axis = pyplot.subplots(
        figsize=(1.45 * (max(columns) - min(columns) + 1), 0.8 * height + 0.4)
    )
    for node, (x, y) in places.items():
        for other in below[node]:
            to_x, to_y = places[other]
            axis.annotate(
                "",
                xy=(to_x, to_y + 0.27),
                xytext=(x, y - 0.27),
                arrowprops={
                    "arrowstyle": "-|>" if other in rooms else "-",
                    "color": _ARROW,
                    "linewidth": 0.9,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
                zorder=1,
            )
        if node not in rooms:
            axis.plot([x, x], [y - 0.27, y + 0.27], color=_ARROW, linewidth=0.9, zorder=1)
            continue
        is_folder = sum(room_of(module) == node for module in modules) > 1
        box = FancyBboxPatch(
            (x - 0.42, y - 0.24),
            0.84,
            0.48,
            boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor=_COLOURS["folder" if is_folder else "file"],
            edgecolor="#555555",
            linewidth=0.8,
            zorder=2,
        )
        axis.add_patch(box)
        label = f"{node}/" if is_folder else node
        axis.text(x, y, label, ha="center", va="center", fontsize=7.8, zorder=3)
    axis.set_xlim(min(columns) - 0.5, max(columns) + 0.5)
    axis.set_ylim(0.5, height + 0.6)
    axis.axis("off")
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Description": fingerprint(rooms)})
    pyplot.close(figure)


def main() -> int:
    """Draws and writes, or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    is_check = parser.parse_args().check
    modules = read_modules()
    imports = read_imports(modules)
    floors({module: names - {""} for module, names in imports.items() if module})
    rooms = read_rooms(imports)
    old = PAGE.read_text(encoding="utf-8")
    head, rest = old.split(BEGIN)
    new = head + BEGIN + write_table(rooms, modules) + END + rest.split(END)[1]
    if is_check:
        from PIL import Image

        with Image.open(PICTURE) as picture:
            is_drawn = picture.info.get("Description") == fingerprint(rooms)
        wrong = [*([PAGE.name] if old != new else []), *([] if is_drawn else [PICTURE.name])]
        for name in wrong:
            print(f"{name} differs from the code: run python benchmarks/architecture.py")
        return len(wrong)
    PAGE.write_text(new, encoding="utf-8")
    draw_rooms(rooms, modules, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
