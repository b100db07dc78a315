"""How the layers of a model share a density: some need most blocks, others next to none.

A plan is measured once for a model (`sketchwalk calibrate`, `evaluation.planning.make_plan`) and
kept beside its checkpoint. It has no labels of layers, only what each one loses at each density.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PLAN_FILE = "sketchwalk_plan.json"
FORMAT_VERSION = 1
_NUMBERS = ("densities", "errors", "weights", "representatives", "misses")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every layer loses at each density, and for which model.

    Attributes:
      densities: For every layer ascending measured densities in (0, 1), at which it was tried.
      errors: For every layer the relative squared error of its output at each of them; 0 at
        density 1.
      weights: For every layer nats per unit of this error: how much another error of the layer
        changes what the model says of the next token. Its loss is the product of both.
      representatives: Numbers of queries for a row that were tried, ascending.
      misses: For every layer what its lists miss with each of these numbers: the largest share of
        attention that some head of some query gives a block that is not on the list.
      fingerprint: Of the checkpoint that it was measured on, from `models.weights.fingerprint`;
        empty where it is not known.

    Raises:
      ValueError: If the numbers do not fit together or are out of their range.

    Example:
      >>> plan = Plan(densities=((0.1, 0.5), (0.1, 0.5)), errors=((0.5, 0.1), (0.02, 0.01)),
      ...             weights=(1.0, 1.0), representatives=(4, 16), misses=((0.5, 0.1), (0.1, 0.0)))
      >>> plan.share_density(0.3)
      (0.5, 0.1)
      >>> plan.share_representatives(10)
      (16, 4)
    """

    densities: tuple[tuple[float, ...], ...]
    errors: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    representatives: tuple[int, ...]
    misses: tuple[tuple[float, ...], ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        """Checks every number."""
        for name in _NUMBERS:
            given, is_by_layer = getattr(self, name), name not in ("weights", "representatives")
            of_layers = given if is_by_layer and isinstance(given, tuple) else (given,)
            if not all(map(_are_numbers, of_layers)):
                what = "tuples of numbers, one for each layer" if is_by_layer else "numbers"
                raise ValueError(f"{name} must be a tuple of {what}, got {str(given)[:80]}")
        if not isinstance(self.fingerprint, str):
            raise ValueError(f"fingerprint must be a string, got {str(self.fingerprint)[:80]}")
        by_layer = {name: len(getattr(self, name)) for name in ("errors", "weights", "misses")}
        if not self.densities or set(by_layer.values()) != {len(self.densities)}:
            raise ValueError(
                f"densities, errors, weights and misses must have an entry for each layer, got "
                f"{len(self.densities)} and {by_layer}"
            )
        for densities, errors in zip(self.densities, self.errors, strict=True):
            if not _ascends(densities) or len(densities) != len(errors):
                raise ValueError(
                    f"densities of a layer must be ascending, with one error each, got "
                    f"{densities} and {errors}"
                )
            if not (0 < densities[0] and densities[-1] < 1):
                raise ValueError(f"densities must be in (0, 1), got {densities}")
            if not _are_amounts(errors):
                raise ValueError(f"errors must be finite and not negative, got {errors}")
        if not _are_amounts(self.weights):
            raise ValueError(f"weights must be finite and not negative, got {self.weights}")
        if not _ascends(self.representatives) or self.representatives[0] < 1:
            raise ValueError(
                f"representatives must be ascending and positive, got {self.representatives}"
            )
        for misses in self.misses:
            if len(misses) != len(self.representatives) or not _are_amounts(misses):
                raise ValueError(
                    f"misses must be finite and not negative, one for each of "
                    f"{self.representatives} representatives, got {misses}"
                )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.densities)

    @property
    def short_hash(self) -> str:
        """A name for its numbers, 12 hexadecimal digits; whose they are does not count."""
        numbers = dataclasses.astuple(dataclasses.replace(self, fingerprint=""))
        return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:12]

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """Nats that each layer loses at each of its densities, `weights · errors`."""
        pairs = zip(self.weights, self.errors, strict=True)
        return tuple(tuple(weight * one for one in errors) for weight, errors in pairs)

    def of_layers(self, layers: Sequence[int]) -> "Plan":
        """The plan of some layers alone."""
        names = ("densities", "errors", "weights", "misses")
        some: dict[str, Any] = {n: tuple(getattr(self, n)[i] for i in layers) for n in names}
        return dataclasses.replace(self, **some)

    def loss(self, densities: Sequence[float]) -> float:
        """Nats per token that layers lose with these densities, one at a time: `Σ_l loss_l(d_l)`.

        Lines join what was measured; below its lowest density a layer loses what it lost there. All
        layers together lose less or more than this sum, which serves to compare.

        Args:
          densities: Of each layer.

        Example:
          >>> plan = Plan(densities=((0.1, 0.5),), errors=((0.5, 0.1),), weights=(1.0,),
          ...             representatives=(8,), misses=((0.0,),))
          >>> [round(plan.loss([one]), 3) for one in (0.1, 0.3, 1.0)]
          [0.5, 0.3, 0.0]
        """
        curves = zip(densities, self.densities, self.losses, strict=True)
        return float(sum(np.interp(d, (*x, 1.0), (*y, 0.0)) for d, x, y in curves))

    def share_density(self, density: float) -> tuple[float, ...]:
        """Densities of the layers with the least sum of losses among those of a given mean.

            min Σ_l loss_l(d_l)   where   Σ_l d_l = num_layers · density

        `loss_l` is taken as the lower convex hull of what was measured, so that the steepest of all
        its pieces is always the next to be paid for. No layer gets less than what was measured: how
        steep a loss is below that nobody has seen, and what a layer loses there can be all that it
        looks for.

        Args:
          density: Mean over the layers, in (0, 1].

        Returns:
          A density for each layer; the same for all where it is below what was measured.
        """
        least, pieces = [], []
        for layer, curve in enumerate(zip(self.densities, self.losses, strict=True)):
            hull = _lower_hull([*zip(*curve, strict=True), (1.0, 0.0)])
            least.append(hull[0][0])
            pieces += [(slope, layer, width) for slope, width in _pieces(hull)]
        left = density * self.num_layers - sum(least)
        if left <= 0:
            scale = density * self.num_layers / sum(least)
            return tuple(round(one * scale, 4) for one in least)
        for _, layer, width in sorted(pieces):
            taken = min(width, left)
            least[layer] += taken
            left -= taken
        return tuple(min(1.0, round(one, 4)) for one in least)

    def share_representatives(self, mean: int) -> tuple[int, ...]:
        """Numbers of representative queries with the least sum of what layers miss.

        As `share_density` does, but numbers that were not tried are not given: the next piece of a
        layer is taken if it can be paid for as a whole.

        Args:
          mean: Most of them, as a mean over the layers.

        Returns:
          A number for each layer; `mean` for all where that is beyond what was tried.
        """
        if not self.representatives[0] <= mean <= self.representatives[-1]:
            return (mean,) * self.num_layers
        found, pieces = [self.representatives[0]] * self.num_layers, []
        for layer, misses in enumerate(self.misses):
            falling = itertools.accumulate(misses, min)
            hull = _lower_hull([*zip(map(float, self.representatives), falling, strict=True)])
            pieces += [(slope, layer, int(width)) for slope, width in _pieces(hull) if slope < 0]
        left, is_done = mean * self.num_layers - sum(found), set[int]()
        for _, layer, width in sorted(pieces):
            if width > left or layer in is_done:
                is_done.add(layer)
                continue
            found[layer] += width
            left -= width
        return tuple(found)

    def write(self, path: Path, *, measured: Mapping[str, Any]) -> None:
        """Writes the plan as JSON, complete or not at all.

        Args:
          path: The file.
          measured: What it was measured on, for people.
        """
        content = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "measured": dict(measured),
            **{name: getattr(self, name) for name in _NUMBERS},
        }
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Reads what `write` wrote.

        Raises:
          ValueError: If the file is not a plan, damaged or of another version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version == FORMAT_VERSION:
                rows = {
                    name: tuple(tuple(map(float, row)) for row in content[name])
                    for name in ("densities", "errors", "misses")
                }
                return cls(
                    weights=tuple(map(float, content["weights"])),
                    representatives=tuple(map(int, content["representatives"])),
                    fingerprint=str(content["fingerprint"]),
                    **rows,
                )
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ValueError(
                f"{path} must be a plan that `sketchwalk calibrate` wrote, got {error!r}; delete "
                f"it or run that again"
            ) from error
        raise ValueError(
            f"format_version of {path} must be {FORMAT_VERSION}, got {version!r}; a newer "
            f"sketchwalk_jax may read it"
        )


def plan_path(checkpoint: Path) -> Path:
    """Where the plan of a checkpoint stands: in its directory, or beside its file.

    Example:
      >>> plan_path(Path("model.gguf")).name
      'model.sketchwalk_plan.json'
    """
    if checkpoint.is_dir():
        return checkpoint / PLAN_FILE
    return checkpoint.with_name(f"{checkpoint.stem}.{PLAN_FILE}")


def _lower_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of the lower convex hull, from left to right."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _pieces(hull: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Slope and width of each piece of a curve."""
    return [((y1 - y0) / (x1 - x0), x1 - x0) for (x0, y0), (x1, y1) in itertools.pairwise(hull)]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, tuple) and all(
        isinstance(one, numbers.Real) and not isinstance(one, bool) for one in values
    )


def _ascends(values: Sequence[float] | Sequence[int]) -> bool:
    return bool(values) and all(a < b for a, b in itertools.pairwise(values))


def _are_amounts(values: Sequence[float]) -> bool:
    return all(math.isfinite(one) and one >= 0 for one in values)
