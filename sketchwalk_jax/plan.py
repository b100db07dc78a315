"""Plans that share a density among layers: some need most blocks, others almost none.

A plan is measured once for a model (`sketchwalk calibrate`, `evaluation.planning.make_plan`) and
stored next to its checkpoint. It has the loss of each layer at each density, and may have the loss
of the whole model by density, phase and length.
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
PHASES = ("prefill", "decode")
TEXT_MARGIN = 3.0
"""How many times as much another text may lose as the worst of those that a model was measured on.

SmolLM2-135M lost 2.6 times as much on English prose as on Python's help topics, the default text.
"""


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a model on texts if the recommended policy selects in one phase.

    Attributes:
      phase: `"prefill"` or `"decode"`.
      tokens: Length of the texts.
      density: Density of the policy.
      kept: Share of its keys that the last row keeps, which is more if a minimum is.
      kl: `KL(p_dense ‖ p_sparse)` of the next token in nats, mean over the ends of all texts.
      most: The largest mean of one text.
      same: Share of these tokens for which the likeliest next token stays the same.

    Raises:
      ValueError: If a field is outside its range.
    """

    phase: str
    tokens: int
    density: float
    kept: float
    kl: float
    most: float
    same: float

    def __post_init__(self) -> None:
        """Checks every field."""
        own = (self.density, self.kept, self.kl, self.most, self.same)
        is_right = (
            self.phase in PHASES
            and isinstance(self.tokens, int)
            and not isinstance(self.tokens, bool)
            and self.tokens > 0
            and _are_numbers(own)
            and _are_amounts(own)
            and 0 < self.density <= 1
            and 0 < self.kept <= 1
            and self.same <= 1
            and self.kl <= self.most
        )
        if not is_right:
            raise ValueError(
                f"a loss must have a phase, amounts in their ranges and kl up to most, got {self}"
            )


def least_densities(
    losses: Sequence[Loss], max_kl: float, phase: str
) -> tuple[tuple[int, float], ...]:
    """Returns the least density that keeps to a loss, by the position of a row.

    A row takes the larger density of the nearest measured lengths on both sides of its position;
    beyond the longest one it takes the share of keys that was kept there. A density keeps to the
    loss if it and all higher measured ones do on every text. If none does, the density is 1.

    Args:
      losses: Measured losses.
      max_kl: The loss in nats per token.
      phase: `"prefill"` or `"decode"`.

    Returns:
      Pairs `(position, density)`: the density of rows from this position on, ascending.

    Example:
      >>> rows = [(4096, 0.1, 0.03), (4096, 0.2, 0.01), (8192, 0.1, 0.01)]
      >>> losses = [Loss("decode", n, d, d, kl, kl, 1.0) for n, d, kl in rows]
      >>> least_densities(losses, 0.02, "decode")
      ((0, 0.2), (8192, 0.1))
    """
    own = [one for one in losses if one.phase == phase]
    if not own:
        return ((0, 1.0),)
    lengths = sorted({one.tokens for one in own})
    found, beyond = [], 1.0
    for length in lengths:
        least = beyond = 1.0
        for one in sorted((x for x in own if x.tokens == length), key=lambda x: -x.density):
            if one.most > max_kl:
                break
            least, beyond = one.density, max(one.density, one.kept)
        found.append(least)
    starts = [0, *lengths]
    pairs = [*zip(starts, [found[0], *map(max, itertools.pairwise(found)), beyond], strict=True)]
    return tuple(one for i, one in enumerate(pairs) if i == 0 or one[1] != pairs[i - 1][1])


@dataclasses.dataclass(frozen=True)
class Plan:
    """The loss of each layer of a model at each density.

    Attributes:
      densities: Measured densities in (0, 1) at which each layer was tried, ascending.
      errors: Relative squared error of each layer's output at each of these densities; it is 0 at
        density 1.
      weights: Nats per unit of this error for each layer: the effect of the layer's error on the
        model's next-token prediction. The layer's loss is weight times error.
      representatives: Numbers of representative queries per row that were tried, ascending.
      misses: Attention that each layer's lists miss with each of these numbers: the largest share
        that some head of some query gives to a block that is not listed.
      fingerprint: Fingerprint of the measured checkpoint, from `models.weights.fingerprint`; empty
        if it is unknown.
      model_losses: What the whole model loses; empty if that was not measured.

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
    model_losses: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        """Checks every number."""
        losses = self.model_losses
        if not isinstance(losses, tuple) or not all(isinstance(one, Loss) for one in losses):
            raise ValueError(f"model_losses must be a tuple of Loss, got {str(losses)[:80]}")
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
        """Number of layers of the model."""
        return len(self.densities)

    @property
    def short_hash(self) -> str:
        """Hash of what layers lose, 12 hexadecimal digits, without fingerprint and model losses."""
        numbers = [*(getattr(self, name) for name in _NUMBERS), ""]
        return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:12]

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """Nats that each layer loses at each of its densities, `weights · errors`."""
        pairs = zip(self.weights, self.errors, strict=True)
        return tuple(tuple(weight * one for one in errors) for weight, errors in pairs)

    def of_layers(self, layers: Sequence[int]) -> "Plan":
        """Returns the plan of only some layers."""
        names = ("densities", "errors", "weights", "misses")
        some: dict[str, Any] = {n: tuple(getattr(self, n)[i] for i in layers) for n in names}
        return dataclasses.replace(self, **some)

    def loss(self, densities: Sequence[float]) -> float:
        """Sums the nats per token that each layer alone loses at its density: `Σ_l loss_l(d_l)`.

        Losses are interpolated linearly; below its lowest measured density, a layer keeps that
        loss. All layers together lose more or less than this sum, which serves to compare plans.

        Args:
          densities: Density of each layer.

        Example:
          >>> plan = Plan(densities=((0.1, 0.5),), errors=((0.5, 0.1),), weights=(1.0,),
          ...             representatives=(8,), misses=((0.0,),))
          >>> [round(plan.loss([one]), 3) for one in (0.1, 0.3, 1.0)]
          [0.5, 0.3, 0.0]
        """
        curves = zip(densities, self.densities, self.losses, strict=True)
        return float(sum(np.interp(d, (*x, 1.0), (*y, 0.0)) for d, x, y in curves))

    def share_density(self, density: float) -> tuple[float, ...]:
        """Shares a mean density among the layers so that the sum of their losses is smallest.

            min Σ_l loss_l(d_l)   where   Σ_l d_l = num_layers · density

        `loss_l` is replaced by the lower convex hull of the measurements, so taking the steepest
        piece next is always best. No layer gets less than its lowest measured density: its loss
        below is unknown, and may be all that the layer looks for.

        Args:
          density: Mean density over the layers, in (0, 1].

        Returns:
          A density for each layer, scaled down from the lowest measured ones if the mean is lower.
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
        """Shares a mean number of representative queries so that layers miss least in total.

        Works like `share_density`, but layers only get numbers that were tried: the next piece of a
        layer is taken if all of it fits.

        Args:
          mean: Maximum mean number over the layers.

        Returns:
          A number for each layer; `mean` for all if it is outside the range that was tried.
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
        """Writes the plan as JSON, completely or not at all.

        Args:
          path: The file.
          measured: Description of the measurement, for people.
        """
        content = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "measured": dict(measured),
            **{name: getattr(self, name) for name in _NUMBERS},
            "model_losses": [dataclasses.asdict(one) for one in self.model_losses],
        }
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Reads a plan from `write`.

        Raises:
          ValueError: If the file is not a plan, or is damaged or has another version.
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
                    model_losses=tuple(Loss(**one) for one in content.get("model_losses", [])),
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
    """Returns the path of a checkpoint's plan: in its directory, or next to its file.

    Example:
      >>> plan_path(Path("model.gguf")).name
      'model.sketchwalk_plan.json'
    """
    if checkpoint.is_dir():
        return checkpoint / PLAN_FILE
    return checkpoint.with_name(f"{checkpoint.stem}.{PLAN_FILE}")


def _lower_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points of the lower convex hull, from left to right."""
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
    """Returns slope and width of each piece of a curve."""
    return [((y1 - y0) / (x1 - x0), x1 - x0) for (x0, y0), (x1, y1) in itertools.pairwise(hull)]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, tuple) and all(
        isinstance(one, numbers.Real) and not isinstance(one, bool) for one in values
    )


def _ascends(values: Sequence[float] | Sequence[int]) -> bool:
    return bool(values) and all(a < b for a, b in itertools.pairwise(values))


def _are_amounts(values: Sequence[float]) -> bool:
    return all(math.isfinite(one) and one >= 0 for one in values)


TYPICAL_LOSSES = (
    Loss("prefill", 4096, 0.1, 0.1, kl=0.23, most=0.31, same=0.7),
    Loss("prefill", 4096, 0.2, 0.2, kl=0.08, most=0.11, same=0.81),
    Loss("decode", 4096, 0.1, 0.1, kl=0.14, most=0.2, same=0.76),
    Loss("decode", 4096, 0.2, 0.2, kl=0.04, most=0.067, same=0.86),
)
"""Losses that stand for those of a model that was not measured.

They are the largest of SmolLM2-135M, Qwen2.5-Coder 0.5B and 1.5B, 40 texts each, rounded up
(`benchmarks/results/continuations.json`). Rows kept at least 256 keys then: with more, they lose
less.
"""
