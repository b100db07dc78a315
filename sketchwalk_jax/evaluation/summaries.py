"""What the rows of an evaluation say: choosing them, pooling them, comparing them in pairs.

A *row* is one entry of `rows` in `quality.json`: one policy, phase, task, length and density, with
`is_right` for each prompt. The prompts of a task and length are the same for every policy, in the
same order, so that two policies compare prompt by prompt.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from sketchwalk_jax.evaluation.results import ROW_KEY, Row, wilson_interval
from sketchwalk_jax.evaluation.tasks import LOSS_TASKS
from sketchwalk_jax.validation import check_choice

TASK_TITLES = {
    "single_needle": "Single needle",
    "multi_key": "One of many keys",
    "multi_query": "Several questions",
    "multi_value": "Several values",
    "variable_tracking": "Variable tracking",
    "mid_prompt": "Question mid-prompt",
    "aggregation": "Aggregation",
    "text_loss": "Text loss",
    "code_loss": "Loss of code",
    "long_decode": "Long decoding",
}
"""What each task is called in tables and figures, in their order."""

PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode", "both": "Prefill and decode"}
"""What each phase is called where selection is sparse in it, in their order."""

PHASES = tuple(PHASE_TITLES)

# Policies appear in this order, unknown ones between: what is exact, the method, its rivals, simple
# rules.
_METHOD = ("paper", "damped", "one_hop", "released")
_FIRST = ("dense", "oracle", *_METHOD, "minference", "flexprefill", "quest", "adamas")
_LAST = ("streaming", "random")


def policy_label(row: Row) -> str:
    """What a row's policy is called: the preset where it has one, else the policy; its variant.

    Example:
      >>> policy_label({"policy": "sketchwalk", "preset": "damped"})
      'damped'
    """
    return _label(row["policy"], row["preset"], row.get("variant"))


@functools.cache  # every table asks it of every row
def _label(policy: str, preset: str | None, variant: str | None) -> str:
    name = preset or policy
    return f"{name}, {variant}" if variant else name


def policy_labels(rows: Iterable[Row]) -> list[str]:
    """The policies of some rows, each once, in the order of tables and figures."""
    rules = dict.fromkeys((row["policy"], row["preset"], row.get("variant")) for row in rows)
    found = list(dict.fromkeys(_label(*rule) for rule in rules))
    middle = [name for name in found if name not in (*_FIRST, *_LAST)]
    return [name for name in (*_FIRST, *middle, *_LAST) if name in found]


def values_of(rows: Iterable[Row], field: str) -> list[Any]:
    """The different values of a field, ascending, without null."""
    return sorted({row[field] for row in rows if row.get(field) is not None})


def densities(rows: Iterable[Row]) -> list[float]:
    """The nominal densities of sparse policies, ascending."""
    return values_of((row for row in rows if not is_dense(row)), "density")


def measured_phases(rows: Iterable[Row]) -> list[str]:
    """The phases in which some policy was sparse, in their order."""
    found = {row["phase"] for row in rows if not is_dense(row)}
    return [phase for phase in PHASES if phase in found]


def probed_phases(rows: Iterable[Row], field: str) -> list[str]:
    """The phases with values by layer; both together only where neither stands alone."""
    found = measured_phases(row for row in rows if row.get(field))
    return [phase for phase in found if phase != "both"] or found


def tasks_of(rows: Iterable[Row], *, is_scored: bool = True) -> list[str]:
    """The tasks of some rows in their order, the text loss only with `is_scored=False`."""
    found = {row["task"] for row in rows}
    order = [*TASK_TITLES, *sorted(found - set(TASK_TITLES))]
    return [task for task in order if task in found and not (is_scored and task in LOSS_TASKS)]


def is_dense(row: Row) -> bool:
    """Whether this is a row of dense attention, which no phase or density tells apart."""
    return row["policy"] == "dense"


def rows_with(
    rows: Iterable[Row],
    *,
    model: str | None = None,
    label: str | None = None,
    phase: str | None = None,
    task: str | None = None,
    tokens: int | None = None,
    density: float | None = None,
) -> list[Row]:
    """The rows with these values; `None` leaves a field open.

    Dense rows answer to every phase and density, and rows without a nominal density (a preset that
    sets its own) to every density.

    Args:
      rows: Rows of one evaluation.
      model: A model, in a file of several.
      label: As `policy_label` gives it.
      phase: Where selection was sparse.
      task: A task.
      tokens: A length.
      density: A nominal density.

    Returns:
      The rows, in their order.

    Example:
      >>> row = {"policy": "dense", "preset": None, "phase": "both", "density": 1.0}
      >>> len(rows_with([row], phase="decode", density=0.2))
      1
    """
    return [
        row
        for row in rows
        if (model is None or row.get("model") == model)
        and (task is None or row["task"] == task)
        and (tokens is None or row["tokens"] == tokens)
        and (phase is None or row["phase"] == phase or row["policy"] == "dense")
        and (density is None or row["density"] in (None, density) or row["policy"] == "dense")
        and (label is None or label == _label(row["policy"], row["preset"], row.get("variant")))
    ]


def check_choices(rows: Sequence[Row], **wanted: Any) -> None:
    """Raises a `ValueError` unless there are rows and each wanted value is one of theirs."""
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    for name, value in wanted.items():
        found = PHASES if name == "phase" else values_of(rows, name)
        if value is not None:
            check_choice(name, value, list(found))


def nominal_density(rows: Sequence[Row], density: float | None) -> float | None:
    """The density asked for, or the highest one below 1; `None` if every policy sets its own."""
    found = densities(rows)
    if density is None:
        return max((one for one in found if one < 1.0), default=found[-1] if found else None)
    check_choice("density", density, found)
    return density


def counted(rows: Iterable[Row]) -> list[Row]:
    """The rows that a mean over tasks is made of.

    Those with answers, without tasks of which dense attention answers too few prompts: these are
    listed for themselves, and in no policy's mean.
    """
    return [
        row for row in rows if row["task"] not in LOSS_TASKS and row.get("in_mean") is not False
    ]


def without_parts(rows: Iterable[Row]) -> list[Row]:
    """Leaves out the rows by depth wherever the row over all depths is there as well."""
    rows = list(rows)
    fields = [field for field in ROW_KEY if field != "depth"]
    settings = [(*(row[field] for field in fields), row.get("variant")) for row in rows]
    pairs = list(zip(rows, settings, strict=True))
    whole = {setting for row, setting in pairs if row["depth"] is None}
    return [row for row, setting in pairs if row["depth"] is None or setting not in whole]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooled:
    """Several rows as one; fields are `None` where no row has them.

    Attributes:
      prompts: Prompts in all.
      exact: Share of right answers.
      low: Lower end of Wilson's 95 % interval of that share.
      high: Its upper end.
      text_loss: Mean loss, nats per token.
      density_sparse_layers: Measured density of the sparse phase, over the sparse layers.
      density_all_layers: The same over all layers.
    """

    prompts: int
    exact: float | None
    low: float | None
    high: float | None
    text_loss: float | None
    density_sparse_layers: float | None
    density_all_layers: float | None


def pool(rows: Iterable[Row]) -> Pooled | None:
    """Joins rows: right answers are added up, other values averaged over prompts.

    Args:
      rows: Rows of one policy; rows by depth are left out where a row over all depths is there.

    Returns:
      What they say together, or `None` without rows.
    """
    rows = without_parts(rows)
    if not rows:
        return None
    scored = [row for row in rows if row["exact"] is not None]
    count = sum(row["prompts"] for row in scored)
    right = round(sum(row["exact"] * row["prompts"] for row in scored))
    low, high = wilson_interval(right, count) if count else (None, None)
    return Pooled(
        prompts=sum(row["prompts"] for row in rows),
        exact=right / count if count else None,
        low=low,
        high=high,
        text_loss=mean_of(rows, "text_loss"),
        density_sparse_layers=mean_of(rows, "measured_density_sparse_layers"),
        density_all_layers=mean_of(rows, "measured_density_all_layers"),
    )


def mean_of(rows: Iterable[Row], field: str) -> float | None:
    """The mean of a field over prompts; `None` where no row has a value."""
    pairs = [(row[field], row["prompts"]) for row in rows if row.get(field) is not None]
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None


def mean_by_layer(rows: Iterable[Row], field: str) -> list[float | None]:
    """The mean of a list by layer over rows, layer by layer; `None` where no row has a value.

    Args:
      rows: Rows of one policy.
      field: `"mass_recall_by_layer"` or `"output_error_by_layer"`.

    Returns:
      One value per entry of the rows' lists; empty if all of them are null.
    """
    lists = [row[field] for row in without_parts(rows) if row.get(field)]
    columns = zip(*lists, strict=True)
    kept = [[value for value in column if value is not None] for column in columns]
    return [sum(values) / len(values) if values else None for values in kept]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How two policies differ on the same prompts.

    Attributes:
      mean: Of the first policy minus that of the second.
      low: Lower end of its 95 % interval.
      high: Its upper end.
      prompts: Prompts that both have.
    """

    mean: float
    low: float
    high: float
    prompts: int


def paired_difference(first: Iterable[Row], second: Iterable[Row]) -> Difference | None:
    """Compares the right answers of two policies prompt by prompt.

    Args:
      first: Rows of one policy.
      second: Rows of another; rows are matched by task, length, depth and hops.

    Returns:
      The difference of their shares of right answers over all prompts that both have, with
      `paired_interval`; `None` if there are none.
    """
    pairs = _pairs(first, second, "is_right")
    if not pairs:
        return None
    counts = [pairs.count(one) for one in ((1, 1), (1, 0), (0, 1), (0, 0))]
    low, high = paired_interval(*counts)
    mean = (counts[1] - counts[2]) / len(pairs)
    return Difference(mean=mean, low=low, high=high, prompts=len(pairs))


def paired_loss_difference(first: Iterable[Row], second: Iterable[Row]) -> Difference | None:
    """Compares the text losses of two policies prompt by prompt.

    Args:
      first: Rows of one policy.
      second: Rows of another.

    Returns:
      The mean difference in nats per token, with Student's interval; `None` for fewer than two
      prompts that both have.
    """
    losses = [a - b for a, b in _pairs(first, second, "text_losses")]
    if len(losses) < 2:
        return None
    low, high = mean_interval(losses)
    return Difference(mean=sum(losses) / len(losses), low=low, high=high, prompts=len(losses))


def _pairs(first: Iterable[Row], second: Iterable[Row], field: str) -> list[tuple[Any, Any]]:
    """The values by prompt of a field, of both policies."""
    some, others = _by_setting(first, field), _by_setting(second, field)
    return [
        pair
        for setting, values in some.items()
        if len(values) == len(others.get(setting, ()))
        for pair in zip(values, others[setting], strict=True)
    ]


def _by_setting(rows: Iterable[Row], field: str) -> dict[tuple[Any, ...], Sequence[Any]]:
    names = ("task", "tokens", "depth", "hops")
    rows = [row for row in without_parts(rows) if row.get(field)]
    return {tuple(row[name] for name in names): row[field] for row in rows}


def paired_interval(
    both: int, only_first: int, only_second: int, neither: int
) -> tuple[float, float]:
    """Newcombe's interval of the difference of two shares of the same prompts, 95 %.

    Wilson's intervals of both shares, joined by their correlation (Statistics in Medicine 17
    (1998), pages 2635-2650, method 10).

    Args:
      both: Prompts that both got right.
      only_first: Prompts that only the first got right.
      only_second: Prompts that only the second got right.
      neither: Prompts that both got wrong; at least one prompt in all.

    Returns:
      Both ends of the interval of the first share minus the second.

    Example:
      >>> [round(end, 4) for end in paired_interval(36, 12, 2, 0)]
      [0.0569, 0.3404]
    """
    count = both + only_first + only_second + neither
    right = (both + only_first, both + only_second)
    shares = [one / count for one in right]
    ends = [wilson_interval(one, count) for one in right]
    below = [share - low for share, (low, _) in zip(shares, ends, strict=True)]
    above = [high - share for share, (_, high) in zip(shares, ends, strict=True)]
    excess: float = both * neither - only_first * only_second
    if excess > 0:
        excess = max(excess - count / 2, 0)
    scale = math.prod(one * (count - one) for one in right)
    correlation = excess / math.sqrt(scale) if scale else 0.0
    mean = (only_first - only_second) / count
    return (
        mean - _joined_width(below[0], above[1], correlation),
        mean + _joined_width(above[0], below[1], correlation),
    )


def _joined_width(a: float, b: float, correlation: float) -> float:
    """`sqrt(a² - 2 ρ a b + b²)`."""
    return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of a mean, 95 %.

    Args:
      values: Independent values, at least two.

    Returns:
      Both ends.

    Example:
      >>> [round(end, 2) for end in mean_interval([1.0, 2.0, 3.0])]
      [-0.48, 4.48]
    """
    from scipy.special import stdtrit

    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = float(stdtrit(count - 1, 0.975)) * math.sqrt(variance / count)
    return mean - half, mean + half
