"""The results of an evaluation: what prompts gave, as rows, and the file that holds them.

`make_rows` makes rows of the outcome of some prompts. `ResultsFile` writes them to `quality.json`,
group by group and each time as a whole, and continues it later; `read_results` reads it. The file
says what was asked for, so that `Results.missing` knows what an interrupted evaluation lacks, and
which code its rows are of.
"""

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Bool, Float

from sketchwalk_jax._version import __version__
from sketchwalk_jax.cache import Density
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.plan import PLAN_FILE

Row = Mapping[str, Any]

ROW_FIELDS = (
    "policy",
    "preset",
    "phase",
    "task",
    "tokens",
    "density",
    "settings",
    "measured_density_sparse_layers",
    "measured_density_all_layers",
    "exact",
    "exact_low",
    "exact_high",
    "prompts",
    "depth",
    "hops",
    "text_loss",
    "mass_recall",
    "mass_recall_by_layer",
    "output_error_by_layer",
    "is_right",
    "text_losses",
    "dense_layers",
    "decode_bytes_keys",
    "decode_bytes_values",
    "decode_bytes_metadata",
    "variant",
)
"""Fields of a row; null where they do not apply; older files lack some of them.

* `policy`, `preset`, `variant`, `density`, `phase`, `task`, `tokens`: what was run; `density` is
  nominal. `depth`, `hops`: which part of a task the row is of; null for all of it.
* `settings`: fields of the policy that calibration chose, and the short hash of its `plan`.
* `dense_layers`: layers in which a sparse policy attends to everything: how many leading ones, or
  which.
* `measured_density_*_layers`: attended over causal pairs in the phase that is sparse.
* `exact`, `exact_low`, `exact_high`: share of right answers of `prompts`, with Wilson's interval;
  `is_right`: 1 or 0 for each prompt. `text_loss`: nats per token; `text_losses`: of each prompt.
* `mass_recall`, `mass_recall_by_layer`, `output_error_by_layer`: from the probe, null in dense
  layers.
* `kl`, `kls`: KL divergence from dense attention, nats per token, and of each prompt; in rows of
  long_decode only.
* `decode_bytes_*`: bytes that one decoded token reads in all layers, dense ones included, from the
  probe; null where decoding is dense for a sparse policy.
* `sources`: hash of the package's code, in rows measured with other code than `meta` says.
"""

FILTERED_FIELDS = ("drawn", "in_mean")
"""Fields of rows of prompts that dense attention answers, in evaluations with `answerable`.

* `drawn`: prompts of the task that were drawn, of which `prompts` (with `hops`, of that many) are
  kept. `in_mean`: whether enough were kept for the task to count in means over tasks.
"""

ROW_KEY = ("policy", "preset", "phase", "task", "tokens", "density", "depth", "hops")
"""Fields in which any two rows of one evaluation differ, together with `variant`."""

# What tells rows of one file apart besides: of rules, and of evaluations that share the file.
_APART = ("variant", "model", "stage")

_DIGITS = 5
# Of two runs whose rows may stand in one file, these may differ.
_MAY_DIFFER = ("date", "command", "wall_s", "cpu", "cores", "memory_gib")
_NOTES = ("asked", "drawn", "not_run")
_SOURCES = "sources"
_MOST_GROUPS = 10**6  # no evaluation has as many; a file from elsewhere may say so
_QUANTILE = 1.959963984540054  # of the normal distribution, for intervals of 95 %


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rule made of `n` prompts of one task in one phase, on the host.

    Attributes:
      is_right: Whether each answer was right, bool `[n]`; None in text_loss.
      losses: Loss of each prompt's scored tokens, nats per token, `[n]`; None in other tasks.
      density: Pairs attended to, with one column for each prompt.
      divergences: Mean KL divergence from dense attention's distributions over the scored tokens,
        nats per token, `[n]`; None where it was not measured.
    """

    is_right: Bool[np.ndarray, "n"] | None
    losses: Float[np.ndarray, "n"] | None
    density: Density
    divergences: Float[np.ndarray, "n"] | None = None

    @classmethod
    def join(cls, parts: Sequence["Outcome"]) -> Self:
        """The outcome of the prompts of several batches."""

        def join_all(*arrays: Any) -> Any:
            return None if arrays[0] is None else np.concatenate(arrays, axis=-1)

        return cls(
            join_all(*(part.is_right for part in parts)),
            join_all(*(part.losses for part in parts)),
            jax.tree.map(join_all, *(part.density for part in parts)),
            join_all(*(part.divergences for part in parts)),
        )

    def take(self, is_chosen: Bool[np.ndarray, "n"]) -> Self:
        """The outcome of some of the prompts."""

        def choose(array: Any) -> Any:
            return None if array is None else array[..., is_chosen]

        parts = (choose(self.is_right), choose(self.losses))
        density = jax.tree.map(choose, self.density)
        return type(self)(*parts, density, choose(self.divergences))

    def measured_density(
        self, phase: str, is_chosen: Bool[np.ndarray, "n"], *, layers: Sequence[int]
    ) -> float | None:
        """Attended over causal pairs of the sparse phase, in some layers.

        Args:
          phase: `"prefill"`, `"decode"` or `"both"`: these together.
          is_chosen: Prompts to count.
          layers: Layers to count.

        Returns:
          The density; None if there are none.
        """
        density, attended, causal = self.density, 0.0, 0.0
        for name in ("prefill", "decode") if phase == "both" else (phase,):
            pairs = np.asarray(getattr(density, f"{name}_pairs"), np.float64)[list(layers)]
            attended += pairs[:, is_chosen].sum()
            every = np.asarray(getattr(density, f"{name}_causal"), np.float64)[is_chosen].sum()
            causal += every * len(pairs)
        return attended / causal if causal else None


@dataclasses.dataclass(frozen=True)
class Probed:
    """What the probe found of a rule in one phase.

    Attributes:
      mass_recall: Of each sparse layer; empty if it was not measured.
      output_error: Likewise.
      decode_bytes: Bytes of keys, of values and of metadata that one decoded token reads, mean over
        tokens, all layers together; None where decoding is dense for a sparse policy.
    """

    mass_recall: Sequence[float] = ()
    output_error: Sequence[float] = ()
    decode_bytes: tuple[float, float, float] | None = None


def make_rows(
    outcome: Outcome,
    samples: Sequence[Sample],
    rule: Rule,
    *,
    phase: str,
    tokens: int,
    dense_layers: tuple[int, ...],
    probe: Probed = Probed(),
    settings: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows of one rule, phase, task and length.

    Args:
      outcome: What the prompts gave.
      samples: The prompts, in the same order.
      rule: What answered.
      phase: Where its selection was sparse.
      tokens: Nominal length.
      dense_layers: Layers in which the rule does not select; none for dense attention itself.
      probe: Mass recall and output error of each sparse layer, and bytes read in decode.
      settings: Fields of the policy that calibration chose, None without it; a plan is added.
      more: Further fields of all rows, such as those of `FILTERED_FIELDS`.

    Returns:
      One row; for single_needle one more for each depth, for variable_tracking one for each
      number of hops instead. `is_right` and `text_losses` hold a value for each prompt, in an order
      that all rules share; rows by depth leave `is_right` to the row of all depths.
    """
    recall, error = probe.mass_recall, probe.output_error
    num_layers = len(outcome.density.prefill_pairs)
    sparse = [layer for layer in range(num_layers) if layer not in dense_layers]
    is_leading = dense_layers == tuple(range(len(dense_layers)))

    def by_layer(values: Sequence[float]) -> list[float | None] | None:
        found = dict(zip(sparse, map(_round, values), strict=False)) if values else {}
        return [found.get(layer) for layer in range(num_layers)] if found else None

    common = {
        "policy": rule.policy,
        "preset": rule.preset,
        "variant": rule.variant,
        "phase": phase,
        "task": samples[0].task,
        "tokens": tokens,
        "density": rule.density,
        "settings": _with_plan(settings, rule),
        "dense_layers": None
        if rule.policy == "dense"
        else len(dense_layers)
        if is_leading
        else list(dense_layers),
    }
    common |= dict(more or {})
    probed = {
        "mass_recall": _round(np.mean(recall)) if recall else None,
        "mass_recall_by_layer": by_layer(recall),
        "output_error_by_layer": by_layer(error),
    }
    names = ("keys", "values", "metadata")
    for name, count in zip(names, probe.decode_bytes or (None,) * 3, strict=True):
        probed[f"decode_bytes_{name}"] = None if count is None else round(count, 1)

    def row(is_chosen: Bool[np.ndarray, "n"], **where: float | int) -> dict[str, Any]:
        made = dict.fromkeys(ROW_FIELDS) | common | probed | where
        made["prompts"] = int(is_chosen.sum())
        for name, layers in (("sparse", sparse), ("all", range(num_layers))):
            density = outcome.measured_density(phase, is_chosen, layers=layers)
            made[f"measured_density_{name}_layers"] = _round(density)
        if outcome.is_right is not None:
            made |= exact_match(outcome.is_right[is_chosen])
        if outcome.losses is not None:
            losses = outcome.losses[is_chosen]
            made["text_loss"] = _round(losses.mean())
            made["text_losses"] = [_round(loss) for loss in losses]
        if outcome.divergences is not None:
            kept = outcome.divergences[is_chosen]
            made |= {"kl": _round(kept.mean()), "kls": [_round(one) for one in kept]}
        return made

    hops = np.array([sample.hops or 0 for sample in samples])
    depth = np.array([sample.depth or 0.0 for sample in samples])
    if samples[0].task == "variable_tracking":
        return [row(hops == some, hops=int(some)) for some in np.unique(hops)]
    rows = [row(np.ones(len(samples), bool))]
    if samples[0].task == "single_needle":
        nothing = dict.fromkeys((*probed, "is_right"))
        rows += [row(depth == some, depth=float(some)) | nothing for some in np.unique(depth)]
    return rows


def _with_plan(settings: Mapping[str, Any] | None, rule: Rule) -> dict[str, Any] | None:
    if rule.plan is None:
        return None if settings is None else dict(settings)
    return {**(settings or {}), "plan": rule.plan.short_hash}


def empty_row(rule: Rule, *, task: str, tokens: int, drawn: int) -> dict[str, Any]:
    """The row of dense attention where it answers none of the prompts that were drawn."""
    made: dict[str, Any] = dict.fromkeys(ROW_FIELDS)
    made |= {"policy": rule.policy, "preset": rule.preset, "phase": "both", "task": task}
    made |= {"tokens": tokens, "density": rule.density, "prompts": 0}
    return made | {"drawn": drawn, "in_mean": False}


def exact_match(is_right: Bool[np.ndarray, "n"]) -> dict[str, Any]:
    """Share of right answers with Wilson's interval at 95 %.

    Example:
      >>> exact_match(np.array([True, False]))["exact"]
      0.5
    """
    low, high = wilson_interval(int(is_right.sum()), len(is_right))
    return {
        "exact": _round(is_right.mean()),
        "exact_low": _round(low),
        "exact_high": _round(high),
        "is_right": [int(one) for one in is_right],
    }


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 %.

    With `p = right / count` and `z = 1.96`: `(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`.

    Args:
      right: Right answers.
      count: All answers, at least 1.

    Returns:
      Both ends.

    Example:
      >>> [round(end, 3) for end in wilson_interval(8, 10)]
      [0.49, 0.943]
    """
    share, square = right / count, _QUANTILE**2 / count
    middle = share + square / 2
    half = math.sqrt(square * share * (1 - share) + square**2 / 4)
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def _round(value: Any) -> float | None:
    return None if value is None else round(float(value), _DIGITS)


def group_key(rule: Rule, phase: str, task: str, tokens: int) -> tuple[Any, ...]:
    """What the rows of one rule, phase, task and length share."""
    return (rule.policy, rule.preset, rule.variant, rule.density, phase, task, tokens)


def group_key_of(row: Row) -> tuple[Any, ...]:
    """The same of a row."""
    fields = ("density", "phase", "task", "tokens")
    # Files of before there were variants lack the field.
    rule = (row["policy"], row["preset"], row.get("variant"))
    return (*rule, *(row[field] for field in fields))


class ResultsFile:
    """`quality.json`: `meta` and `rows`, always complete and valid on disk."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: Mapping[str, Any],
        *,
        overwrite: bool = False,
        common: Mapping[str, Any] | None = None,
        may_differ: Sequence[str] = (),
        other_code: bool = False,
    ) -> None:
        """Opens the file, to continue it if it exists.

        Args:
          path: The file; its folder must exist.
          meta: What the results depend on, and what else is worth knowing.
          overwrite: Whether to start afresh where there is a file.
          common: Fields that rows have in front, such as `model`: of a file that several
            evaluations share, this one reads and writes the rows with these values.
          may_differ: Entries of `meta` that the file may have otherwise; this one's are kept.
          other_code: Whether to continue a file that other code of this package began; rows then
            say which code they are of.

        Raises:
          ValueError: If the file holds something else, or results of another model, text, seed,
            code or the like.
          OSError: If it cannot be read, or nothing can be written there.
        """
        self.path = Path(path)
        self.meta, self.rows = dict(meta), list[Row]()
        self._common = dict(common or {})
        self._may_differ = (*_MAY_DIFFER, *_NOTES, *may_differ, _SOURCES)
        self._is_other_code_allowed = other_code
        self._sources: dict[str, Any] = {}
        self._started, self._before = time.perf_counter(), 0.0
        if self.path.exists() and not overwrite:
            self._continue()
        elif not self.path.parent.is_dir():
            raise FileNotFoundError(2, "No such folder", str(self.path.parent))
        self._finished = {group_key_of(row) for row in self.rows if self._is_own(row)}

    def _is_own(self, row: Row) -> bool:
        return all(row.get(name) == value for name, value in self._common.items())

    def _continue(self) -> None:
        advice = "pass --overwrite to start afresh, or another --out"
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            old, self.rows = dict(found["meta"]), list(found["rows"])
            self._before = float(old["wall_s"])
            for row in self.rows:
                hash(group_key_of(row))
            for kind in _NOTES:
                _ = [dict(entry) for entry in old.get(kind, ())]
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.path} must hold results of an evaluation; {advice}") from error
        now = json.loads(json.dumps(self.meta))  # as it would be read
        differing = [
            f"{name} {_short(old.get(name))} there, {_short(now.get(name))} now"
            for name in sorted((set(old) | set(now)) - set(self._may_differ))
            if old.get(name) != now.get(name)
        ]
        if differing:
            raise ValueError(
                f"{self.path} must hold results of the same evaluation, got "
                f"{'; '.join(differing)}; {advice}"
            )
        was, is_now = old.get(_SOURCES), now.get(_SOURCES)
        if was != is_now:
            if not self._is_other_code_allowed:
                raise ValueError(
                    f"{self.path} must hold results of the code of now, {_short(is_now)}, got "
                    f"those of {'unknown code' if was is None else _short(was)}; {advice}, or "
                    f"--other-code to go on all the same: new rows then say which code they are of"
                )
            self.meta[_SOURCES], self._sources = was, {_SOURCES: is_now}
        self.meta |= {name: old[name] for name in _NOTES if name in old}

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether the rows with this `group_key` are there."""
        return key in self._finished

    def note(self, kind: str, **entry: Any) -> None:
        """Adds an entry about rows to come to `meta`, once; the next `add` writes it.

        Args:
          kind: `"asked"`, which rules, tasks and lengths are to be there in the end; `"drawn"`,
            which prompts dense attention answered; or `"not_run"`, which rules were left out and
            why.
          **entry: What it says, in types of JSON.
        """
        entry = self._common | entry
        entries = self.meta.setdefault(kind, [])
        if entry not in entries:
            entries.append(entry)

    def drawn(self, task: str, tokens: int) -> str | None:
        """Which prompts of a task dense attention answered, as drawn: `"0110..."`; None if unknown.

        Known where rows of dense attention to these prompts are there as well.
        """
        wanted = self._common | {"task": task, "tokens": tokens}
        for entry in self.meta.get("drawn", ()):
            if all(entry.get(name) == value for name, value in wanted.items()):
                return entry["answered"]
        return None

    def settings(self, rule: Rule, tokens: int) -> dict[str, Any] | None:
        """What calibration set in a rule at a length, as finished rows say; None without any.

        The plan is the rule's own and not among it.
        """
        wanted = self._common | {"policy": rule.policy, "preset": rule.preset, "tokens": tokens}
        wanted |= {"variant": rule.variant, "density": rule.density}
        for row in self.rows:
            is_same = all(row.get(name) == value for name, value in wanted.items())
            if is_same and row["phase"] in (rule.phases or (row["phase"],)):
                settings = dict(row.get("settings") or {})
                settings.pop("plan", None)
                if settings:
                    return settings
        return None

    def check_plan(self, rule: Rule) -> None:
        """Refuses to continue the rows of a rule that were measured with another plan.

        Raises:
          ValueError: If there are such rows.
        """
        now = None if rule.plan is None else rule.plan.short_hash
        wanted = {"policy": rule.policy, "preset": rule.preset, "variant": rule.variant}
        for row in filter(self._is_own, self.rows):
            if all(row.get(name) == value for name, value in wanted.items()):
                there = (row.get("settings") or {}).get("plan")
                if there != now:
                    raise ValueError(
                        f"{self.path} must hold rows of {rule} with the model's plan of now, "
                        f"{now}, got rows with {there}; pass --overwrite to start afresh, or "
                        f"another --out"
                    )

    def add(self, rows: Sequence[Row]) -> None:
        """Adds finished rows, and writes the file."""
        rows = [{**self._common, **row, **self._sources} for row in rows]
        self.rows += rows
        self._finished |= {group_key_of(row) for row in rows}
        self.write()

    def write(self) -> None:
        """Writes the file, with what was noted."""
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


def describe_machine(
    command: Sequence[str] | None = None, *, root: Path | None = None, **details: Any
) -> dict[str, Any]:
    """Hardware, versions, date and command of this run, with `details` of the caller's own.

    Args:
      command: The command's words, those of this process by default. Of absolute paths only the
        last part is kept, or what lies below `root`.
      root: Folder whose inner paths tell nothing about this machine.
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
        _SOURCES: hash_sources(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(_relative(word, root) for word in (command or _own_command())),
        **details,
    }


@functools.cache
def hash_sources() -> str:
    """The first 16 digits of the SHA-256 of this package's code: of all its Python files.

    The same for a wheel and for a checkout; a comment counts as well.
    """
    folders = [("", Path(__file__).parents[1])]
    for package in ("models", "pallas_kernels"):  # beside the others in a wheel, elsewhere if not
        spec = importlib.util.find_spec(f"sketchwalk_jax.{package}")
        places = spec.submodule_search_locations if spec else None
        folders += [(package, Path(one)) for one in places or ()]
    files: dict[str, Path] = {}
    for package, folder in folders:
        # A checkout may be a tree of links.
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
    """A word of the command without the folders of this machine."""
    path = Path(word)
    if not path.is_absolute():
        return word
    if root is not None and path.is_relative_to(root):
        return str(path.relative_to(root))
    return path.name


def hash_weights(directory: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of every file of weights in a checkpoint, by its path in the directory.

    These are the safetensors files, or every file below a directory that `save` wrote but its plan,
    or the one GGUF file.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """One evaluation.

    Attributes:
      meta: Model, text, seed, versions, hardware, date and command.
      rows: What was measured.
    """

    meta: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def missing(self) -> tuple[dict[str, Any], ...]:
        """What was asked for and is not there: fields of rows, of each group of rows.

        A group is of one rule, phase, task and length. What could not be measured, because a policy
        cannot be as sparse as asked or dense attention answers no prompt, is not among it. Files
        that do not say what was asked for have nothing missing.
        """
        there = {_place(row) for row in self.rows}
        return tuple(group for key, group in self._asked().items() if key not in there)

    @property
    def asked(self) -> int:
        """How many groups of rows were asked for, those that cannot be measured left out."""
        return len(self._asked())

    def _asked(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {
            _place(group): group
            for entry in self.meta.get("asked", ())
            for group in _groups(entry)
            if not self._is_impossible(group)
        }

    def _is_impossible(self, group: Row) -> bool:
        def says(entry: Mapping[str, Any], *fields: str) -> bool:
            return all(entry.get(name) == group.get(name) for name in (*fields, "model", "stage"))

        is_dense = group["policy"] == "dense"
        if group["task"] == "long_decode" and group["phase"] == "prefill" and not is_dense:
            return True
        for entry in self.meta.get("drawn", ()):
            if says(entry, "task", "tokens") and "1" not in entry["answered"] and not is_dense:
                return True
        fields = ("policy", "preset", "variant", "density", "tokens")
        return any(
            says(entry, *fields) and group["phase"] in entry["phases"]
            for entry in self.meta.get("not_run", ())
        )

    @property
    def sources(self) -> dict[str, int]:
        """How many rows each code of the package measured, by hash; `"unknown"` of old files."""
        first, found = self.meta.get(_SOURCES) or "unknown", dict[str, int]()
        for row in self.rows:
            own = row.get(_SOURCES, first)
            found[own] = found.get(own, 0) + 1
        return found


def _place(row: Row) -> tuple[Any, ...]:
    """`group_key_of` in a file that several evaluations share."""
    return (*group_key_of(row), row.get("model"), row.get("stage"))


def _groups(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The groups of rows that an entry of `"asked"` stands for."""
    count = len(entry["tokens"]) * len(entry["tasks"]) * len(entry["rules"])
    if count > _MOST_GROUPS:
        raise TypeError(f"too much to be asked for, {count}")
    shared = {name: entry[name] for name in ("model", "stage") if name in entry}
    for tokens, task, rule in itertools.product(entry["tokens"], entry["tasks"], entry["rules"]):
        for phase in rule["phases"]:
            own = {name: rule[name] for name in ("policy", "preset", "variant", "density")}
            yield {**shared, **own, "phase": phase, "task": task, "tokens": tokens}


def read_results(path: str | Path) -> Results:
    """Reads `quality.json`, as `sketchwalk eval` writes it.

    Args:
      path: The file.

    Returns:
      Its contents, checked.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If it is not JSON, lacks `meta` or `rows`, or a row lacks a field or comes twice.

    Example:
      >>> results = read_results("quality.json")  # doctest: +SKIP
      >>> results.meta["seed"], len(results.rows)  # doctest: +SKIP
      (0, 1584)
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON of `sketchwalk eval`, got {error}") from error
    is_whole = isinstance(found, dict) and {"meta", "rows"} <= set(found)
    if not is_whole or not isinstance(found["meta"], dict) or not isinstance(found["rows"], list):
        raise ValueError(f"{path} must hold `meta` and `rows`, as `sketchwalk eval` writes them")
    check_rows(found["rows"])
    results = Results(meta=found["meta"], rows=tuple(found["rows"]))
    try:
        _ = results.missing, results.sources
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must say what was asked for as `sketchwalk eval` does") from error
    return results


def check_rows(rows: Sequence[Row]) -> None:
    """Raises a `ValueError` for no rows, a row without its fields, or two alike."""
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    seen = set()
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"rows must be JSON objects, got {type(row).__name__} as row {index}")
        missing = sorted({*ROW_KEY, "prompts", "exact", "text_loss"} - set(row))
        if missing:
            raise ValueError(f"rows must have all fields, got row {index} without {missing}")
        key = (*(row[field] for field in ROW_KEY), *(row.get(field) for field in _APART))
        wrong = [one for one in key if isinstance(one, list | dict)]
        if wrong:
            raise ValueError(f"rows must be told apart by text and numbers, got {wrong[0]!r}")
        if key in seen:
            raise ValueError(f"rows must differ, got twice {dict(zip(ROW_KEY, key, strict=False))}")
        seen.add(key)
