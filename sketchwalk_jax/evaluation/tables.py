"""Computes statistics of an evaluation's rows, and makes markdown tables.

A *row* is one entry of `rows` in `quality.json`: one policy, phase, task, length and density, with
`is_right` for each prompt. All policies answer the same prompts of a task and length in the same
order, so two policies can be compared prompt by prompt. Every number in the tables comes from
choosing, pooling or pairing rows.
"""

import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sketchwalk_jax.evaluation.rows import ROW_KEY, Row, wilson_interval
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
"""Task titles in tables and figures, in their order."""

PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode", "both": "Prefill and decode"}
"""Titles of the sparse phases, in their order."""

PHASES = tuple(PHASE_TITLES)

# Order of policies: exact ones, the method, unknown ones, rivals, simple rules.
_METHOD = ("paper", "damped", "one_hop", "released")
_FIRST = ("dense", "oracle", *_METHOD, "minference", "flexprefill", "quest", "adamas")
_LAST = ("streaming", "random")


def policy_label(row: Row) -> str:
    """Names a row's policy: its preset or else its policy, then its variant.

    Example:
      >>> policy_label({"policy": "sketchwalk", "preset": "damped"})
      'damped'
    """
    name, variant = row["preset"] or row["policy"], row.get("variant")
    return f"{name}, {variant}" if variant else name


def policy_labels(rows: Iterable[Row]) -> list[str]:
    """Lists the policies of some rows once each, in the order of tables and figures."""
    found = list(dict.fromkeys(map(policy_label, rows)))
    middle = [name for name in found if name not in (*_FIRST, *_LAST)]
    return [name for name in (*_FIRST, *middle, *_LAST) if name in found]


def values_of(rows: Iterable[Row], field: str) -> list[Any]:
    """Lists the distinct values of a field, ascending, without null."""
    return sorted({row[field] for row in rows if row.get(field) is not None})


def densities(rows: Iterable[Row]) -> list[float]:
    """Lists the nominal densities of sparse policies, ascending."""
    return values_of((row for row in rows if not is_dense(row)), "density")


def measured_phases(rows: Iterable[Row]) -> list[str]:
    """Lists the phases in which some policy was sparse, in their order."""
    found = {row["phase"] for row in rows if not is_dense(row)}
    return [phase for phase in PHASES if phase in found]


def probed_phases(rows: Iterable[Row], field: str) -> list[str]:
    """Lists the phases with values by layer; `both` only if neither phase was measured alone."""
    found = measured_phases(row for row in rows if row.get(field))
    return [phase for phase in found if phase != "both"] or found


def tasks_of(rows: Iterable[Row], *, is_scored: bool = True) -> list[str]:
    """Lists the tasks of some rows in their order, the text loss only with `is_scored=False`."""
    found = {row["task"] for row in rows}
    order = [*TASK_TITLES, *sorted(found - set(TASK_TITLES))]
    return [task for task in order if task in found and not (is_scored and task in LOSS_TASKS)]


def is_dense(row: Row) -> bool:
    """Whether this is a row of dense attention, which stands for every phase and density."""
    return row["policy"] == "dense"


def rows_with(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Selects the rows with these values; `None` leaves a field open.

    Dense rows match every phase and density, and rows without a nominal density (presets that set
    their own) every density.

    Args:
      rows: Rows of one evaluation.
      **wanted: Values of fields, or a `label` from `policy_label`.

    Returns:
      The rows, in their order.

    Example:
      >>> row = {"policy": "dense", "preset": None, "phase": "both", "density": 1.0}
      >>> len(rows_with([row], phase="decode", density=0.2))
      1
    """
    found = list(rows)
    for name, value in wanted.items():
        if value is None:
            continue
        values = (value, None) if name == "density" else (value,)
        of_dense = name in ("phase", "density")
        find = policy_label if name == "label" else operator.itemgetter(name)
        found = [row for row in found if (of_dense and is_dense(row)) or find(row) in values]
    return found


def check_choices(rows: Sequence[Row], **wanted: Any) -> None:
    """Raises a `ValueError` unless there are rows and each wanted value occurs in them."""
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    for name, value in wanted.items():
        found = PHASES if name == "phase" else values_of(rows, name)
        if value is not None:
            check_choice(name, value, list(found))


def nominal_density(rows: Sequence[Row], density: float | None) -> float | None:
    """Returns the requested density, or the highest below 1; `None` if policies set their own."""
    found = densities(rows)
    if density is None:
        return max((one for one in found if one < 1.0), default=found[-1] if found else None)
    check_choice("density", density, found)
    return density


def counted(rows: Iterable[Row]) -> list[Row]:
    """Selects the rows that count in a mean over tasks.

    Losses do not count, nor do tasks of which dense attention answers too few prompts: such tasks
    are listed, but in no policy's mean.
    """
    return [
        row for row in rows if row["task"] not in LOSS_TASKS and row.get("in_mean") is not False
    ]


def without_parts(rows: Iterable[Row]) -> list[Row]:
    """Drops the rows by depth if the row over all depths exists."""

    def name(row: Row) -> tuple[Any, ...]:
        return (*(row[one] for one in ROW_KEY if one != "depth"), row.get("variant"))

    rows = list(rows)
    whole = {name(row) for row in rows if row["depth"] is None}
    return [row for row in rows if row["depth"] is None or name(row) not in whole]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooled:
    """Several rows as one; fields that no row has are `None`.

    Attributes:
      prompts: Total number of prompts.
      exact: Share of right answers.
      low: Lower end of Wilson's 95 % interval of that share.
      high: Its upper end.
      text_loss: Mean loss, nats per token.
      density_sparse_layers: Measured density of the sparse phase, over the sparse layers.
      density_all_layers: Measured density over all layers.
    """

    prompts: int
    exact: float | None
    low: float | None
    high: float | None
    text_loss: float | None
    density_sparse_layers: float | None
    density_all_layers: float | None


def pool(rows: Iterable[Row]) -> Pooled | None:
    """Pools rows: sums right answers and averages other values over prompts.

    Args:
      rows: Rows of one policy; rows by depth are dropped if a row over all depths exists.

    Returns:
      The pooled values, or `None` without rows.
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
    """Averages a field over prompts; `None` if no row has a value."""
    pairs = [(row[field], row["prompts"]) for row in rows if row.get(field) is not None]
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None


def mean_by_layer(rows: Iterable[Row], field: str) -> list[float | None]:
    """Averages a list by layer over rows; `None` for layers without a value.

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


def paired_difference(
    first: Iterable[Row], second: Iterable[Row], field: str = "is_right"
) -> tuple[float, float, float] | None:
    """Compares two policies prompt by prompt.

    Args:
      first: Rows of one policy.
      second: Rows of another; rows are matched by task, length, depth and hops.
      field: `"is_right"`, with `paired_interval`, or `"text_losses"`, with `mean_interval`.

    Returns:
      The mean over all prompts that both have of the first policy's value minus the second's, and
      both ends of its 95 % interval; `None` without such prompts, or with a single loss.
    """
    some, others = _by_setting(first, field), _by_setting(second, field)
    pairs = [
        pair
        for setting, values in some.items()
        if len(values) == len(others.get(setting, ()))
        for pair in zip(values, others[setting], strict=True)
    ]
    if len(pairs) < (1 if field == "is_right" else 2):
        return None
    if field == "is_right":
        counts = [pairs.count(one) for one in ((1, 1), (1, 0), (0, 1), (0, 0))]
        return (counts[1] - counts[2]) / len(pairs), *paired_interval(*counts)
    losses = [a - b for a, b in pairs]
    return sum(losses) / len(losses), *mean_interval(losses)


def _by_setting(rows: Iterable[Row], field: str) -> dict[tuple[Any, ...], Sequence[Any]]:
    names = ("task", "tokens", "depth", "hops")
    rows = [row for row in without_parts(rows) if row.get(field)]
    return {tuple(row[name] for name in names): row[field] for row in rows}


def paired_interval(
    both: int, only_first: int, only_second: int, neither: int
) -> tuple[float, float]:
    """Computes Newcombe's 95 % interval of the difference of two shares of the same prompts.

    It joins Wilson's intervals of both shares by their correlation (Statistics in Medicine 17
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

    def joined(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    return mean - joined(below[0], above[1]), mean + joined(above[0], below[1])


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes Student's 95 % interval of a mean.

    Args:
      values: Independent values, at least two.

    Returns:
      Both ends.

    Example:
      >>> [round(end, 2) for end in mean_interval([1.0, 2.0, 3.0])]
      [-0.48, 4.48]
    """
    from scipy.special import stdtrit

    count, mean = len(values), statistics.fmean(values)
    half = float(stdtrit(count - 1, 0.975)) * statistics.stdev(values, mean) / math.sqrt(count)
    return mean - half, mean + half


# Tables.

NOTHING = "–"
"""Text of a cell without a value."""
_DENSITY = "Density: sparse / all layers"


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1
) -> str:
    """Makes a table: the first `num_names` columns aligned left, the others right.

    Example:
      >>> print(markdown_table(("Policy", "Exact"), [("dense", "1.00")]))
      | Policy | Exact |
      | --- | ---: |
      | dense | 1.00 |
    """
    rule = ["---"] * num_names + ["---:"] * (len(header) - num_names)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def longest(rows: Sequence[Row]) -> int:
    """Returns the longest measured length, in tokens."""
    return max(row["tokens"] for row in rows)


def task_title(task: str) -> str:
    """Returns the title of a task."""
    return TASK_TITLES.get(task, task.replace("_", " "))


def density_title(density: float | None) -> str:
    """Formats a nominal density as a title; `None` means that every policy sets its own."""
    return "Densities of their own" if density is None else f"Density {density:g}"


def name_of(label: str) -> str:
    """Formats a policy for a table: presets and policies as code, dense as a word."""
    return label if label == "dense" else f"`{label}`"


def share(pooled: Pooled | None) -> str:
    """Formats right answers with their interval, as `0.95 (0.90–0.98)`."""
    if pooled is None or pooled.exact is None:
        return NOTHING
    return f"{pooled.exact:.2f} ({pooled.low:.2f}–{pooled.high:.2f})"


def signed(value: float, digits: int = 2) -> str:
    """Formats a difference with its sign: `+0.12`, `−0.12` with a true minus, `0.00`."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def difference(first: Sequence[Row], second: Sequence[Row], field: str = "is_right") -> str:
    """Formats a `paired_difference` with its interval, as `−0.35 (−0.42 to −0.28)`."""
    found = paired_difference(first, second, field)
    if found is None:
        return NOTHING
    mean, low, high = (signed(one, 2 if field == "is_right" else 3) for one in found)
    return f"{mean} ({low} to {high})"


def _loss(pooled: Pooled | None) -> str:
    return NOTHING if pooled is None or pooled.text_loss is None else f"{pooled.text_loss:.3f}"


def measured(pooled: Pooled | None) -> str:
    """Formats the measured density of the sparse layers and of all layers, as `0.20 / 0.34`."""
    if pooled is None or pooled.density_sparse_layers is None or pooled.density_all_layers is None:
        return NOTHING
    return f"{pooled.density_sparse_layers:.2f} / {pooled.density_all_layers:.2f}"


def _policy_table(
    labels: Iterable[str],
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[list[Row]], str]],
    *,
    by_phase: bool = False,
) -> str:
    """Makes a table with a line for each policy, or each policy and phase, that has rows.

    Args:
      labels: Labels of the policies, in their order.
      rows: Rows that the table shows.
      columns: Functions from rows to the text of a cell, by the title of their column.
      by_phase: Whether each phase has its own line; dense attention always has one.
    """
    body = []
    for label in labels:
        phases = PHASES if by_phase and label != "dense" else (None,)
        for phase in phases:
            some = rows_with(rows, label=label, phase=phase)
            names = [name_of(label), *([PHASE_TITLES.get(phase or "", "")] if by_phase else [])]
            if some:
                body.append([*names, *(say(some) for say in columns.values())])
    header = ("Policy", *(("Sparse in",) if by_phase else ()), *columns)
    return markdown_table(header, body, num_names=1 + by_phase)


def accuracy_table(rows: Sequence[Row], *, phase: str, density: float | None, tokens: int) -> str:
    """Shows right answers of every policy in every task, with Wilson's 95 % intervals.

    Args:
      rows: Rows of one evaluation.
      phase: Phase in which selection is sparse.
      density: Nominal density; policies that set their own are always listed.
      tokens: Length.

    Returns:
      A markdown table: a row for each policy, a column for each task, then all tasks together and
      the measured density of the sparse layers and of all layers.

    Example:
      >>> print(accuracy_table(rows, phase="prefill", density=0.2, tokens=8192))  # doctest: +SKIP
    """
    tasks = tasks_of(rows)
    chosen = rows_with(rows, phase=phase, density=density, tokens=tokens)
    columns = _task_columns(tasks, lambda of_task, some: share(pool(of_task(some))))
    columns[_DENSITY] = lambda some: measured(pool(counted(some)) or pool(some))
    return _policy_table(policy_labels(rows), [x for x in chosen if x["task"] in tasks], columns)


def _task_columns(
    tasks: Iterable[str], say: Callable[[Callable[[Iterable[Row]], list[Row]], list[Row]], str]
) -> dict[str, Callable[[list[Row]], str]]:
    """Makes a column for each task, then one for all tasks that count in a mean over tasks.

    `say` makes the text of a cell from a function that selects the column's rows, and rows.
    """
    chosen: dict[str, Callable[[Iterable[Row]], list[Row]]] = {
        task_title(task): partial(rows_with, task=task) for task in tasks
    }
    chosen["All"] = counted
    return {title: partial(say, of_task) for title, of_task in chosen.items()}


def difference_table(rows: Sequence[Row], *, phase: str, density: float | None, tokens: int) -> str:
    """Shows right answers minus dense attention's on the same prompts, with 95 % intervals.

    Arguments as in `accuracy_table`.
    """
    dense = rows_with(rows, label="dense", tokens=tokens)
    columns = _task_columns(
        tasks_of(rows), lambda of_task, some: difference(of_task(some), of_task(dense))
    )
    labels = [label for label in policy_labels(rows) if label != "dense"]
    chosen = rows_with(rows, phase=phase, density=density, tokens=tokens)
    return _policy_table(labels, chosen, columns)


def summary_table(rows: Sequence[Row], *, density: float | None, tokens: int) -> str:
    """Shows all scored tasks together by phase, the text loss and the measured density.

    Arguments as in `accuracy_table`. Loss and density belong to the first phase in which the policy
    was measured; a dash marks a phase in which it selects nothing or was not run.
    """
    phases = measured_phases(rows) or ["both"]
    body = []
    for label in policy_labels(rows):
        chosen = rows_with(rows, label=label, density=density, tokens=tokens)
        by_phase = [rows_with(chosen, phase=phase) for phase in phases]
        cells = [share(pool(counted(some))) for some in by_phase]
        if label == "dense":
            cells[1:] = [""] * (len(cells) - 1)
        own = next((some for some in by_phase if some), [])
        loss = pool(rows_with(own, task="text_loss"))
        body.append([name_of(label), *cells, _loss(loss), measured(pool(counted(own) or own))])
    header = ["Right answers, sparse in", *(PHASE_TITLES[phase] for phase in phases)]
    return markdown_table([*header, "Text loss", _DENSITY], body)


def hops_table(rows: Sequence[Row], *, density: float | None, tokens: int) -> str:
    """Shows variable tracking by the number of statements to follow.

    Arguments as in `accuracy_table`.
    """
    chosen = rows_with(rows, task="variable_tracking", density=density, tokens=tokens)
    columns = {
        f"{count} statements": lambda some, count=count: share(pool(rows_with(some, hops=count)))
        for count in values_of(chosen, "hops")
    }
    return _policy_table(policy_labels(chosen), chosen, columns, by_phase=True)


def lengths_table(rows: Sequence[Row], *, density: float | None) -> str:
    """Shows all scored tasks together by phase and length, with Wilson's 95 % intervals."""
    columns = {
        f"{tokens:,} tokens": lambda some, tokens=tokens: share(
            pool(rows_with(some, tokens=tokens))
        )
        for tokens in values_of(rows, "tokens")
    }
    chosen = counted(rows_with(rows, density=density))
    return _policy_table(policy_labels(rows), chosen, columns, by_phase=True)


def loss_table(rows: Sequence[Row], *, densities: Sequence[float | None], tokens: int) -> str:
    """Shows text loss minus dense attention's on the same text, nats per token.

    Args:
      rows: Rows of one evaluation.
      densities: Nominal densities, each a column; presets that set their own appear in all.
      tokens: Length.

    Returns:
      A markdown table with 95 % intervals of the paired differences, and a row for each phase in
      which a policy was measured; the row of dense attention shows its loss.
    """
    chosen = rows_with(rows, task="text_loss", tokens=tokens)
    dense = rows_with(chosen, label="dense")

    def say(some: list[Row], density: float | None) -> str:
        own = rows_with(some, density=density)
        text = NOTHING if is_dense(some[0]) else difference(own, dense, "text_losses")
        return _loss(pool(own)) if text == NOTHING else text

    columns = {density_title(one): partial(say, density=one) for one in densities}
    return _policy_table(policy_labels(chosen), chosen, columns, by_phase=True)


def recall_table(rows: Sequence[Row], *, densities: Sequence[float | None], tokens: int) -> str:
    """Shows mass recall and relative output error, means over tasks and sparse layers."""
    fields = {"mass_recall_by_layer": "mass recall", "output_error_by_layer": "output error"}
    phases = probed_phases(rows, "mass_recall_by_layer")
    chosen = [
        row
        for row in rows_with(rows, tokens=tokens)
        if row["phase"] in phases and not is_dense(row) and any(row.get(one) for one in fields)
    ]

    def say(some: list[Row], density: float | None, field: str) -> str:
        by_layer = mean_by_layer(rows_with(some, density=density), field)
        values = [value for value in by_layer if value is not None]
        return f"{sum(values) / len(values):.2f}" if values else NOTHING

    columns = {
        f"{density_title(density)}: {title}": partial(say, density=density, field=field)
        for density in densities
        for field, title in fields.items()
    }
    return _policy_table(policy_labels(chosen), chosen, columns, by_phase=True)


def settings_table(rows: Sequence[Row]) -> str:
    """Lists calibrated settings, and the density that they gave on the scored prompts.

    Args:
      rows: Rows of one evaluation.

    Returns:
      A markdown table with a row for each policy, nominal density and length; empty text without
      calibration.
    """
    order = policy_labels(rows)
    found: dict[tuple[int, int, float, int], list[Row]] = {}
    for row in without_parts(rows):
        if row.get("settings"):
            place = order.index(policy_label(row)), PHASES.index(row["phase"])
            found.setdefault((*place, -(row["density"] or 0.0), row["tokens"]), []).append(row)
    body = []
    for (label, phase, _, tokens), some in sorted(found.items()):
        field = "measured_density_sparse_layers"
        known = [
            mean_of(rows_with(some, task=task), field) for task in tasks_of(some, is_scored=False)
        ]
        by_task = [one for one in known if one]
        mean = mean_of(some, field)
        spread = f"{mean:.3f} ({min(by_task):.3f}–{max(by_task):.3f})" if mean else NOTHING
        names = name_of(order[label]), PHASE_TITLES[PHASES[phase]].lower()
        settings = ", ".join(f"`{name}` {_value(one)}" for name, one in some[0]["settings"].items())
        body.append([*names, f"{some[0]['density']:g}", f"{tokens:,}", settings, spread])
    header = "Policy", "Sparse in", "Density", "Tokens", "Set to", "Measured (range over tasks)"
    return markdown_table(header, body, num_names=2) if body else ""


def _value(value: Any) -> str:
    """Formats a calibrated value."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
