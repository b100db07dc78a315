"""The file of results: written group by group, each time as a whole, and continued later."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sketchwalk_jax._version import __version__
from sketchwalk_jax.evaluation.rows import Row, group_key_of

# Of two runs whose rows may stand in one file, these may differ.
_MAY_DIFFER = ("date", "command", "wall_s", "cpu", "cores", "memory_gib")


class ResultsFile:
    """`quality.json`: `meta` and `rows`, always complete and valid on disk."""

    def __init__(
        self, path: str | os.PathLike[str], meta: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """Opens the file, to continue it if it exists.

        Args:
          path: The file; its folder must exist.
          meta: What the results depend on, and what else is worth knowing.
          overwrite: Whether to start afresh where there is a file.

        Raises:
          ValueError: If the file holds something else, or results of another model, text, seed or
            the like.
          OSError: If it cannot be read, or nothing can be written there.
        """
        self.path = Path(path)
        self.meta, self.rows = dict(meta), list[Row]()
        self._started, self._before = time.perf_counter(), 0.0
        if self.path.exists() and not overwrite:
            self._continue()
        elif not self.path.parent.is_dir():
            raise FileNotFoundError(2, "No such folder", str(self.path.parent))
        self._finished = {group_key_of(row) for row in self.rows}

    def _continue(self) -> None:
        advice = "pass --overwrite to start afresh, or another --out"
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            old, self.rows = dict(found["meta"]), list(found["rows"])
            self._before = float(old["wall_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} must hold results of an evaluation; {advice}") from error
        now = json.loads(json.dumps(self.meta))  # as it would be read
        differing = [
            f"{name} {_short(old.get(name))} there, {_short(now.get(name))} now"
            for name in sorted((set(old) | set(now)) - set(_MAY_DIFFER))
            if old.get(name) != now.get(name)
        ]
        if differing:
            raise ValueError(
                f"{self.path} must hold results of the same evaluation, got "
                f"{'; '.join(differing)}; {advice}"
            )

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether the rows with this `group_key` are there."""
        return key in self._finished

    def add(self, rows: Sequence[Row]) -> None:
        """Adds finished rows, and writes the file."""
        self.rows += rows
        self._finished |= {group_key_of(row) for row in rows}
        self.meta["wall_s"] = round(self._before + time.perf_counter() - self._started, 1)
        write_results(self.path, self.meta, self.rows)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def write_results(
    path: str | os.PathLike[str], meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Writes `{"meta": ..., "rows": ...}` as JSON with one line for each row.

    An interrupt leaves the old file or the new one, never a part.

    Args:
      path: The file.
      meta: What holds for all rows.
      rows: The rows.

    Raises:
      OSError: If it cannot be written.
      ValueError: If a number is not finite.
    """
    path = Path(path)
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    text = f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n'
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def describe_machine(command: Sequence[str] | None = None, **details: Any) -> dict[str, Any]:
    """Hardware, versions, date and command of this run, with `details` of the caller's own.

    Args:
      command: The command's words, those of this process by default. Of absolute paths only the
        last part is kept.
      **details: Further entries.

    Returns:
      Entries for `meta`.
    """
    import jax

    packages = ("jax", "jaxlib", "numpy")
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "sketchwalk-jax": __version__}
        | {name: importlib.metadata.version(name) for name in packages},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(_relative(word) for word in (command or _own_command())),
        **details,
    }


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


def _relative(word: str) -> str:
    """A word of the command without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def hash_weights(directory: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of every file of weights in a checkpoint directory, by its path there.

    These are the safetensors files, or every file below a directory that `save` wrote.
    """
    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    files = files or sorted(path for path in directory.rglob("*") if path.is_file())
    hashes = {}
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        hashes[path.relative_to(directory).as_posix()] = digest.hexdigest()
    return hashes
