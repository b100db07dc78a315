"""Makes rows: results of one policy in one phase on the prompts of one task and length.

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

* `policy`, `preset`, `variant`, `density`, `phase`, `task`, `tokens`: the run; `density` is
  nominal. `depth`, `hops`: the part of the task that the row covers; null for all of it.
* `settings`: calibrated fields of the policy, and the short hash of its `plan`.
* `dense_layers`: dense layers of a sparse policy: the number of leading ones, or their list.
* `measured_density_*_layers`: attended over causal pairs in the sparse phase.
* `exact`, `exact_low`, `exact_high`: share of right answers of `prompts`, with Wilson's interval;
  `is_right`: 1 or 0 for each prompt. `text_loss`: nats per token; `text_losses`: the same for each
  prompt.
* `mass_recall`, `mass_recall_by_layer`, `output_error_by_layer`: from the probe, null in dense
  layers.
* `kl`, `kls`: KL divergence from dense attention, nats per token, over all prompts and for each;
  `agreement`, `agreements`: share of tokens after which the likeliest next token equals dense
  attention's, likewise; in rows of long_decode only.
* `decode_bytes_*`: bytes that one decoded token reads in all layers, dense ones included, from the
  probe; null where decoding is dense for a sparse policy.
* `sources`: hash of the package's code, in rows measured with other code than `meta` names.
"""

FILTERED_FIELDS = ("drawn", "in_mean")
"""Fields of rows in evaluations with `answerable`, which keep prompts that dense answers.

* `drawn`: number of drawn prompts of the task, of which `prompts` (in rows with `hops`, those with
  so many hops) are kept. `in_mean`: whether the task has enough prompts to count in means.
"""

ROW_KEY = ("policy", "preset", "phase", "task", "tokens", "density", "depth", "hops")
"""Fields that, together with `variant`, identify a row of one evaluation."""

_DIGITS = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """Answers of a rule to `n` prompts of one task in one phase, on the host.

    Attributes:
      is_right: Whether each answer was right, bool `[n]`; None in text_loss.
      losses: Loss of each prompt's scored tokens, nats per token, `[n]`; None in other tasks.
      density: Attended pairs, one column for each prompt.
      divergences: Mean KL divergence from dense attention's distributions over the scored tokens,
        nats per token, `[n]`; None if not measured.
      agreements: Share of the scored tokens whose likeliest successor equals dense attention's,
        `[n]`; None if not measured.
    """

    is_right: Bool[np.ndarray, "n"] | None
    losses: Float[np.ndarray, "n"] | None
    density: Density
    divergences: Float[np.ndarray, "n"] | None = None
    agreements: Float[np.ndarray, "n"] | None = None

    @classmethod
    def join(cls, parts: Sequence["Outcome"]) -> Self:
        """Joins the outcomes of several batches."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=-1), *parts)

    def take(self, is_chosen: Bool[np.ndarray, "n"] | slice) -> Self:
        """Selects the outcome of some prompts."""
        return jax.tree.map(lambda array: array[..., is_chosen], self)

    def measured_density(
        self, phase: str, is_chosen: Bool[np.ndarray, "n"], *, layers: Sequence[int]
    ) -> float | None:
        """Returns attended over causal pairs in the sparse phase, in some layers.

        Args:
          phase: `"prefill"`, `"decode"`, or `"both"` for the two together.
          is_chosen: Prompts to count.
          layers: Layers to count.

        Returns:
          The density; None without pairs.
        """
        attended, causal = 0.0, 0.0
        for name in ("prefill", "decode") if phase == "both" else (phase,):
            pairs, every = (
                np.asarray(getattr(self.density, f"{name}_{kind}"), np.float64)[..., is_chosen]
                for kind in ("pairs", "causal")
            )
            attended += pairs[list(layers)].sum()
            causal += every.sum() * len(layers)
        return attended / causal if causal else None


@dataclasses.dataclass(frozen=True)
class Probed:
    """Measurements of the probe for a rule in one phase.

    Attributes:
      mass_recall: Mass recall of each sparse layer; empty if not measured.
      output_error: Output error, likewise.
      decode_bytes: Bytes of keys, values and statistics that one decoded token reads in all layers,
        mean over tokens; None if a sparse policy decodes densely.
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
    """Makes the rows of one rule, phase, task and length.

    Args:
      outcome: Answers to the prompts.
      samples: The prompts, in the same order.
      rule: The rule that answered.
      phase: Phase in which its selection was sparse.
      tokens: Nominal length.
      dense_layers: Layers in which the rule does not select; none for dense attention.
      probe: Mass recall and output error of each sparse layer, and bytes read in decode.
      settings: Calibrated fields of the policy, None without calibration; a plan is added.
      more: Further fields of all rows, such as those of `FILTERED_FIELDS`.

    Returns:
      One row; for single_needle one more for each depth, for variable_tracking one for each
      number of hops instead. `is_right` and `text_losses` hold a value for each prompt, in an order
      that all rules share; rows by depth leave `is_right` to the row of all depths.
    """
    recall, error = probe.mass_recall, probe.output_error
    num_layers = len(outcome.density.prefill_pairs)
    sparse = [layer for layer in range(num_layers) if layer not in dense_layers]

    def by_layer(values: Sequence[float]) -> list[float | None] | None:
        found = dict(zip(sparse, map(_round, values), strict=False)) if values else {}
        return [found.get(layer) for layer in range(num_layers)] if found else None

    common: dict[str, Any] = {
        **rule.name_fields,
        "phase": phase,
        "task": samples[0].task,
        "tokens": tokens,
        "settings": None if settings is None and rule.plan is None else dict(settings or {}),
        "dense_layers": None,
    }
    if rule.plan is not None:
        common["settings"]["plan"] = rule.plan.short_hash
    if rule.policy != "dense":
        is_leading = dense_layers == tuple(range(len(dense_layers)))
        common["dense_layers"] = len(dense_layers) if is_leading else list(dense_layers)
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


def empty_row(rule: Rule, *, task: str, tokens: int, drawn: int) -> dict[str, Any]:
    """Makes the row of dense attention if it answers none of the drawn prompts."""
    made: dict[str, Any] = dict.fromkeys(ROW_FIELDS)
    made |= rule.name_fields | {"phase": "both", "task": task, "tokens": tokens, "prompts": 0}
    return made | {"drawn": drawn, "in_mean": False}


def exact_match(is_right: Bool[np.ndarray, "n"]) -> dict[str, Any]:
    """Computes the share of right answers with Wilson's 95 % interval.

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
    """Computes Wilson's 95 % score interval of a share.

    Args:
      right: Number of right answers.
      count: Number of answers, at least 1.

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
    return group_key_of(rule.name_fields | {"phase": phase, "task": task, "tokens": tokens})


def group_key_of(row: Row) -> tuple[Any, ...]:
    """Identifies the rows of one rule, phase, task and length by one of them."""
    names = ("policy", "preset", "density", "phase", "task", "tokens")
    # Older files lack the field `variant`.
    return (*(row[name] for name in names), row.get("variant"))
