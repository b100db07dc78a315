"""Rows: results of one policy in one phase on the prompts of one task and length.

`Outcome` holds the answers of a policy, `Probed` the measurements of the probe; `make_rows` makes
the rows of `quality.json` from both.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Bool, Float

from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.inference.cache import Density

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
* `kl`, `kls`: KL divergence from dense attention, nats per token, and of each prompt;
  `agreement`, `agreements`: share of tokens after which the likeliest next one is that of dense
  attention, and of each prompt; in rows of long_decode only.
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

_DIGITS = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """Answers of a rule to `n` prompts of one task in one phase, on the host.

    Attributes:
      is_right: Whether each answer was right, bool `[n]`; None in text_loss.
      losses: Loss of each prompt's scored tokens, nats per token, `[n]`; None in other tasks.
      density: Pairs attended to, with one column for each prompt.
      divergences: Mean KL divergence from dense attention's distributions over the scored tokens,
        nats per token, `[n]`; None where it was not measured.
      agreements: Share of the scored tokens whose likeliest successor is that of dense attention,
        `[n]`; None where it was not measured.
    """

    is_right: Bool[np.ndarray, "n"] | None
    losses: Float[np.ndarray, "n"] | None
    density: Density
    divergences: Float[np.ndarray, "n"] | None = None
    agreements: Float[np.ndarray, "n"] | None = None

    @classmethod
    def join(cls, parts: Sequence["Outcome"]) -> Self:
        """The outcome of the prompts of several batches."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=-1), *parts)

    def take(self, is_chosen: Bool[np.ndarray, "n"] | slice) -> Self:
        """The outcome of some of the prompts."""
        return jax.tree.map(lambda array: array[..., is_chosen], self)

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
    """Measurements of the probe for a rule in one phase.

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
        **rule.name_fields,
        "phase": phase,
        "task": samples[0].task,
        "tokens": tokens,
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
        for values, mean, each in (
            (outcome.losses, "text_loss", "text_losses"),
            (outcome.divergences, "kl", "kls"),
            (outcome.agreements, "agreement", "agreements"),
        ):
            if values is not None:
                kept = values[is_chosen]
                made |= {mean: _round(kept.mean()), each: [_round(one) for one in kept]}
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
    made |= rule.name_fields | {"phase": "both", "task": task, "tokens": tokens, "prompts": 0}
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


@functools.cache
def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 %.

    Args:
      right: Right answers.
      count: All answers, at least 1.

    Returns:
      Both ends.

    Example:
      >>> [round(end, 3) for end in wilson_interval(8, 10)]
      [0.49, 0.943]
    """
    from scipy.stats import binomtest  # slow to import

    low, high = binomtest(right, count).proportion_ci(method="wilson")
    return float(low), float(high)


def _round(value: Any) -> float | None:
    return None if value is None else round(float(value), _DIGITS)


def group_key(rule: Rule, phase: str, task: str, tokens: int) -> tuple[Any, ...]:
    """Identifies the rows of one rule, phase, task and length."""
    return (rule.policy, rule.preset, rule.variant, rule.density, phase, task, tokens)


def group_key_of(row: Row) -> tuple[Any, ...]:
    """The same of a row."""
    fields = ("density", "phase", "task", "tokens")
    # Files of before there were variants lack the field.
    rule = (row["policy"], row["preset"], row.get("variant"))
    return (*rule, *(row[field] for field in fields))
