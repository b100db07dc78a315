"""Records the machine, versions, command, code and weights that results come from."""

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from sketchwalk_jax._version import __version__
from sketchwalk_jax.plan import PLAN_FILE


def describe_machine(
    command: Sequence[str] | None = None, *, root: Path | None = None, **details: Any
) -> dict[str, Any]:
    """Describes hardware, versions, date and command of this run, plus the caller's `details`.

    Args:
      command: The command's words, by default those of this process. Absolute paths are cut to
        their last part, or to the part below `root`.
      root: Folder whose inner paths reveal nothing about this machine.
      **details: Further entries.

    Returns:
      Entries for `meta`.
    """
    packages = ("jax", "jaxlib", "numpy")
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "sketchwalk-jax": __version__}
        | {name: importlib.metadata.version(name) for name in packages},
        "sources": hash_sources(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(_relative(word, root) for word in (command or _own_command())),
        **details,
    }


@functools.cache
def hash_sources() -> str:
    """Returns the first 16 digits of the SHA-256 of all Python files of this package.

    A wheel and a checkout give the same hash; comments count.
    """
    folders = [("", Path(__file__).parents[1])]
    for package in ("models", "pallas_kernels"):  # inside the package in a wheel only
        spec = importlib.util.find_spec(f"sketchwalk_jax.{package}")
        places = spec.submodule_search_locations if spec else None
        folders += [(package, Path(one)) for one in places or ()]
    files: dict[str, Path] = {}
    for package, folder in folders:
        # Follow links: a checkout may be a tree of links.
        for root, _, names in os.walk(folder, followlinks=True):
            found = (Path(root, name) for name in names if name.endswith(".py"))
            files |= {Path(package, one.relative_to(folder)).as_posix(): one for one in found}
    digest = hashlib.sha256()
    for inside, path in sorted(files.items()):
        digest.update(f"{inside} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {name.strip(): value.strip() for name, value in fields.items()}
    return names.get("model name", platform.processor() or platform.machine())


def _own_command() -> list[str]:
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *sys.argv[1:]]
    return [*(["python"] if program.suffix == ".py" else []), *sys.argv]


def _relative(word: str, root: Path | None) -> str:
    """Removes the folders of this machine from a word of the command."""
    path = Path(word)
    if root is not None and path.is_relative_to(root):
        return str(path.relative_to(root))
    return path.name if path.is_absolute() else word


def hash_weights(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the SHA-256 of every weight file in a checkpoint, by its path in the directory.

    Weight files are the safetensors files, all files of a directory that `save` wrote except its
    plan, or the one GGUF file.
    """
    directory = Path(directory)
    if directory.is_file():
        directory, files = directory.parent, [directory]
    else:
        files = sorted(directory.glob("*.safetensors"))
        others = sorted(path for path in directory.rglob("*") if path.is_file())
        files = files or [path for path in others if path.name != PLAN_FILE]
    hashes = {}
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        hashes[path.relative_to(directory).as_posix()] = digest.hexdigest()
    return hashes
