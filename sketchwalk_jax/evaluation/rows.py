"""From what prompts gave to rows of `quality.json`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float

from sketchwalk_jax.cache import Density
from sketchwalk_jax.evaluation.intervals import wilson_interval
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.tasks import Sample

Row = dict[str, Any]

_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rule made of `n` prompts of one task in one phase, on the host.

    Attributes:
      is_right: Whether each answer was right, bool `[n]`; None in text_loss.
      losses: Loss of each prompt's scored tokens, nats per token, `[n]`; None in other tasks.
      density: Pairs attended to, with one column for each prompt.
    """

    is_right: Bool[np.ndarray, "n"] | None
    losses: Float[np.ndarray, "n"] | None
    density: Density

    @classmethod
    def join(cls, parts: Sequence["Outcome"]) -> Self:
        """The outcome of the prompts of several batches."""

        def join_all(arrays: Sequence[Any]) -> Any:
            return None if arrays[0] is None else np.concatenate(arrays, axis=-1)

        density = Density(*map(join_all, zip(*(_fields(p.density) for p in parts), strict=True)))
        return cls(
            join_all([part.is_right for part in parts]),
            join_all([part.losses for part in parts]),
            density,
        )

    def measured_density(
        self, phase: str, is_chosen: Bool[np.ndarray, "n"], *, first_layer: int
    ) -> float | None:
        """Attended over causal pairs of the sparse phase, from `first_layer` on.

        Args:
          phase: `"prefill"`, `"decode"` or `"both"`: these together.
          is_chosen: Prompts to count.
          first_layer: First layer to count.

        Returns:
          The density; None if there is no such layer.
        """
        density, attended, causal = self.density, 0.0, 0.0
        for name in ("prefill", "decode") if phase == "both" else (phase,):
            pairs = np.asarray(getattr(density, f"{name}_pairs"), np.float64)[first_layer:]
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


def _fields(density: Density) -> tuple[Any, ...]:
    return tuple(getattr(density, field.name) for field in dataclasses.fields(density))


def make_rows(
    outcome: Outcome,
    samples: Sequence[Sample],
    rule: Rule,
    *,
    phase: str,
    tokens: int,
    num_dense_layers: int,
    probe: Probed = Probed(),
    settings: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Rows of one rule, phase, task and length.

    Args:
      outcome: What the prompts gave.
      samples: The prompts, in the same order.
      rule: What answered.
      phase: Where its selection was sparse.
      tokens: Nominal length.
      num_dense_layers: Leading dense layers; 0 for dense attention itself.
      probe: Mass recall and output error of each sparse layer, and bytes read in decode.
      settings: Fields of the policy that calibration chose, None without it.

    Returns:
      One row; for single_needle one more for each depth, for variable_tracking one for each
      number of hops instead. `is_right` and `text_losses` hold a value for each prompt, in an order
      that all rules share; rows by depth leave `is_right` to the row of all depths.
    """
    recall, error = probe.mass_recall, probe.output_error
    by_layer: list[None] = [None] * num_dense_layers
    common = {
        "policy": rule.policy,
        "preset": rule.preset,
        "variant": rule.variant,
        "phase": phase,
        "task": samples[0].task,
        "tokens": tokens,
        "density": rule.density,
        "settings": None if settings is None else dict(settings),
        "dense_layers": None if rule.policy == "dense" else num_dense_layers,
    }
    probed = {
        "mass_recall": _round(np.mean(recall)) if recall else None,
        "mass_recall_by_layer": [*by_layer, *map(_round, recall)] if recall else None,
        "output_error_by_layer": [*by_layer, *map(_round, error)] if error else None,
    }
    names = ("keys", "values", "metadata")
    for name, count in zip(names, probe.decode_bytes or (None,) * 3, strict=True):
        probed[f"decode_bytes_{name}"] = None if count is None else round(count, 1)

    def row(is_chosen: Bool[np.ndarray, "n"], **where: float | int) -> Row:
        made = dict.fromkeys(ROW_FIELDS) | common | probed | where
        made["prompts"] = int(is_chosen.sum())
        for name, first in (("sparse", num_dense_layers), ("all", 0)):
            density = outcome.measured_density(phase, is_chosen, first_layer=first)
            made[f"measured_density_{name}_layers"] = _round(density)
        if outcome.is_right is not None:
            made |= exact_match(outcome.is_right[is_chosen])
        if outcome.losses is not None:
            losses = outcome.losses[is_chosen]
            made["text_loss"] = _round(losses.mean())
            made["text_losses"] = [_round(loss) for loss in losses]
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
* `settings`: fields of the policy that calibration chose. `dense_layers`: leading layers in which a
  sparse policy attends to everything.
* `measured_density_*_layers`: attended over causal pairs in the phase that is sparse.
* `exact`, `exact_low`, `exact_high`: share of right answers of `prompts`, with Wilson's interval;
  `is_right`: 1 or 0 for each prompt. `text_loss`: nats per token; `text_losses`: of each prompt.
* `mass_recall`, `mass_recall_by_layer`, `output_error_by_layer`: from the probe, null in dense
  layers.
* `decode_bytes_*`: bytes that one decoded token reads in all layers, dense ones included, from the
  probe; null where decoding is dense for a sparse policy.
"""


def exact_match(is_right: Bool[np.ndarray, "n"]) -> Row:
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


def group_key(rule: Rule, phase: str, task: str, tokens: int) -> tuple[Any, ...]:
    """What the rows of one rule, phase, task and length share."""
    return (rule.policy, rule.preset, rule.variant, rule.density, phase, task, tokens)


def group_key_of(row: Row) -> tuple[Any, ...]:
    """The same of a row."""
    fields = ("density", "phase", "task", "tokens")
    # Files of before there were variants lack the field.
    rule = (row["policy"], row["preset"], row.get("variant"))
    return (*rule, *(row[field] for field in fields))


def _round(value: Any) -> float | None:
    return None if value is None else round(float(value), _DIGITS)
