"""How the layers of a model share a density: some need most blocks, others next to none.

A plan is measured once for a model (`sketchwalk calibrate`, `evaluation.planning.make_plan`) and
kept beside its checkpoint. It has no labels of layers, only what each one loses at each density.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLAN_FILE = "sketchwalk_plan.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every layer loses at each density, and for which model.

    Attributes:
      densities: For every layer ascending measured densities in (0, 1), at which it was tried.
      errors: For every layer the loss at each of them, in nats: what is said of the next token
        with that layer alone sparse, `KL(dense ‖ sparse)`; at density 1 it is 0.
      fingerprint: Of the checkpoint that it was measured on, from `models.weights.fingerprint`;
        empty where it is not known.

    Raises:
      ValueError: If the numbers do not fit together or are out of their range.

    Example:
      >>> plan = Plan(densities=((0.1, 0.5), (0.1, 0.5)), errors=((0.5, 0.1), (0.02, 0.01)))
      >>> plan.allocate(0.3)
      (0.5, 0.1)
    """

    densities: tuple[tuple[float, ...], ...]
    errors: tuple[tuple[float, ...], ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        """Checks every number."""
        if not self.densities or len(self.densities) != len(self.errors):
            raise ValueError(
                f"densities and errors must have a row for each layer, got {len(self.densities)} "
                f"and {len(self.errors)}"
            )
        for densities, errors in zip(self.densities, self.errors, strict=True):
            ascending = all(a < b for a, b in zip(densities, densities[1:], strict=False))
            if not densities or len(densities) != len(errors) or not ascending:
                raise ValueError(
                    f"densities of a layer must be ascending, with one error each, got "
                    f"{densities} and {errors}"
                )
            if not (0 < densities[0] and densities[-1] < 1):
                raise ValueError(f"densities must be in (0, 1), got {densities}")
            if not all(math.isfinite(one) and one >= 0 for one in errors):
                raise ValueError(f"errors must be finite and not negative, got {errors}")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.densities)

    @property
    def short_hash(self) -> str:
        """A name for its numbers, 12 hexadecimal digits; whose they are does not count."""
        numbers = json.dumps([self.densities, self.errors]).encode()
        return hashlib.sha256(numbers).hexdigest()[:12]

    def allocate(self, density: float) -> tuple[float, ...]:
        """Densities of the layers with the least sum of losses among those of a given mean.

            min Σ_l loss_l(d_l)   where   Σ_l d_l = num_layers · density

        `loss_l` is taken as the lower convex hull of what was measured, so that the steepest of all
        its pieces is always the next to be paid for. Below what was measured, down to a quarter of
        it, it goes on as straight as it began.

        Args:
          density: Mean over the layers, in (0, 1].

        Returns:
          A density for each layer; the same for all where it is below what was measured.
        """
        least, pieces = [], []
        for layer, curve in enumerate(zip(self.densities, self.errors, strict=True)):
            hull = _lower_hull([*zip(*curve, strict=True), (1.0, 0.0)])
            slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.pairwise(hull)]
            begin = hull[0][0]
            least.append(begin / 4)
            pieces.append((slopes[0], layer, begin - begin / 4))
            widths = [x1 - x0 for (x0, _), (x1, _) in itertools.pairwise(hull)]
            pieces += [(slope, layer, w) for slope, w in zip(slopes, widths, strict=True)]
        left = density * self.num_layers - sum(least)
        if left <= 0:
            scale = density * self.num_layers / sum(least)
            return tuple(round(one * scale, 4) for one in least)
        for _, layer, width in sorted(pieces):
            taken = min(width, left)
            least[layer] += taken
            left -= taken
        return tuple(min(1.0, round(one, 4)) for one in least)

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
            "densities": self.densities,
            "errors": self.errors,
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
                densities, errors = (
                    tuple(tuple(map(float, row)) for row in content[name])
                    for name in ("densities", "errors")
                )
                return cls(densities, errors, str(content["fingerprint"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
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
