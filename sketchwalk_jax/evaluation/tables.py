"""Markdown tables of an evaluation: every number in them comes from its rows."""

from collections.abc import Iterable, Sequence
from typing import Any

from sketchwalk_jax.evaluation.results import Row
from sketchwalk_jax.evaluation.summaries import (
    PHASE_TITLES,
    PHASES,
    TASK_TITLES,
    Pooled,
    counted,
    is_dense,
    mean_by_layer,
    mean_of,
    measured_phases,
    paired_difference,
    paired_loss_difference,
    policy_label,
    policy_labels,
    pool,
    probed_phases,
    rows_with,
    tasks_of,
    values_of,
    without_parts,
)

NOTHING = "–"
"""Stands where there is no value."""
_MINUS = "\N{MINUS SIGN}"


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1
) -> str:
    """A table with its first columns, `num_names` of them, to the left and the others to the right.

    Example:
      >>> print(markdown_table(("Policy", "Exact"), [("dense", "1.00")]))
      | Policy | Exact |
      | --- | ---: |
      | dense | 1.00 |
    """
    rule = ["---"] * num_names + ["---:"] * (len(header) - num_names)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def longest(rows: Sequence[Row]) -> int:
    """The longest length that was measured, in tokens."""
    return max(row["tokens"] for row in rows)


def task_title(task: str) -> str:
    """What a task is called for readers."""
    return TASK_TITLES.get(task, task.replace("_", " "))


def density_title(density: float | None) -> str:
    """A nominal density as a title; `None` where every policy sets its own."""
    return "Densities of their own" if density is None else f"Density {density:g}"


def name_of(label: str) -> str:
    """A policy for a table: presets and policies as code, dense as a word."""
    return label if label == "dense" else f"`{label}`"


def share(pooled: Pooled | None) -> str:
    """Right answers with their interval, as `0.95 (0.90–0.98)`."""
    if pooled is None or pooled.exact is None:
        return NOTHING
    return f"{pooled.exact:.2f} ({pooled.low:.2f}–{pooled.high:.2f})"


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign: `+0.12`, `−0.12` with a true minus, `0.00`."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", _MINUS)


def difference(first: Sequence[Row], second: Sequence[Row]) -> str:
    """A paired difference with its interval, as `−0.35 (−0.42 to −0.28)`."""
    found = paired_difference(first, second)
    if found is None:
        return NOTHING
    return f"{signed(found.mean)} ({signed(found.low)} to {signed(found.high)})"


def measured(pooled: Pooled | None) -> str:
    """Measured density of the sparse layers and of all layers, as `0.20 / 0.34`."""
    if pooled is None or pooled.density_sparse_layers is None or pooled.density_all_layers is None:
        return NOTHING
    return f"{pooled.density_sparse_layers:.2f} / {pooled.density_all_layers:.2f}"


def accuracy_table(rows: Sequence[Row], *, phase: str, density: float | None, tokens: int) -> str:
    """Right answers of every policy in every task, with Wilson's 95 % intervals.

    Args:
      rows: Rows of one evaluation.
      phase: Where selection is sparse.
      density: Nominal density; policies that set their own are listed at that.
      tokens: Length.

    Returns:
      A markdown table: a row for each policy, a column for each task, then all tasks together and
      the measured density of the sparse layers and of all layers.

    Example:
      >>> print(accuracy_table(rows, phase="prefill", density=0.2, tokens=8192))  # doctest: +SKIP
    """
    tasks = tasks_of(rows)
    header = ("Policy", *map(task_title, tasks), "All", "Density: sparse / all layers")
    body = []
    for label in policy_labels(rows):
        chosen = rows_with(rows, label=label, phase=phase, density=density, tokens=tokens)
        chosen = [row for row in chosen if row["task"] in tasks]
        cells = [share(pool(rows_with(chosen, task=task))) for task in tasks]
        together = pool(counted(chosen))
        if chosen:
            last = [share(together), measured(together or pool(chosen))]
            body.append([name_of(label), *cells, *last])
    return markdown_table(header, body)


def difference_table(rows: Sequence[Row], *, phase: str, density: float | None, tokens: int) -> str:
    """Right answers beyond those of dense attention to the same prompts, with 95 % intervals.

    Arguments as in `accuracy_table`.
    """
    tasks = tasks_of(rows)
    dense = rows_with(rows, label="dense", tokens=tokens)
    body = []
    for label in policy_labels(rows):
        chosen = rows_with(rows, label=label, phase=phase, density=density, tokens=tokens)
        if label == "dense" or not chosen:
            continue
        cells = [
            difference(rows_with(chosen, task=task), rows_with(dense, task=task)) for task in tasks
        ]
        body.append([name_of(label), *cells, difference(counted(chosen), counted(dense))])
    return markdown_table(("Policy", *map(task_title, tasks), "All"), body)


def summary_table(rows: Sequence[Row], *, density: float | None, tokens: int) -> str:
    """All scored tasks together, by phase, beside the text loss and the measured density.

    Arguments as in `accuracy_table`. Loss and density are those of the first phase in which the
    policy was measured; where it selects nothing, or was not run, there is a dash.
    """
    phases = measured_phases(rows) or ["both"]
    body = []
    for label in policy_labels(rows):
        chosen = rows_with(rows, label=label, density=density, tokens=tokens)
        by_phase = [rows_with(chosen, phase=phase) for phase in phases]
        pooled = [pool(counted(some)) for some in by_phase]
        cells = [share(one) for one in pooled]
        if label == "dense":
            cells = [cells[0], *[""] * (len(cells) - 1)]
        own = next((some for some in by_phase if some), [])
        scored = counted(own)
        loss = pool(rows_with(own, task="text_loss"))
        body.append([name_of(label), *cells, _loss(loss), measured(pool(scored or own))])
    header = ["Right answers, sparse in", *(PHASE_TITLES[phase] for phase in phases)]
    header += ["Text loss", "Density: sparse / all layers"]
    return markdown_table(header, body)


def hops_table(rows: Sequence[Row], *, density: float | None, tokens: int) -> str:
    """Variable tracking by the number of statements to follow.

    Arguments as in `accuracy_table`.
    """
    chosen = rows_with(rows, task="variable_tracking", density=density, tokens=tokens)
    hops = values_of(chosen, "hops")
    body = []
    for label in policy_labels(chosen):
        for phase in PHASES if label != "dense" else ("both",):
            some = rows_with(chosen, label=label, phase=phase)
            cells = [share(pool(row for row in some if row["hops"] == count)) for count in hops]
            if some:
                title = "" if label == "dense" else PHASE_TITLES[phase]
                body.append([name_of(label), title, *cells])
    header = ("Policy", "Sparse in", *(f"{count} statements" for count in hops))
    return markdown_table(header, body, num_names=2)


def lengths_table(rows: Sequence[Row], *, density: float | None) -> str:
    """All scored tasks together by phase and length, with Wilson's 95 % intervals."""
    lengths = values_of(rows, "tokens")
    body = []
    for label in policy_labels(rows):
        for phase in PHASES if label != "dense" else ("both",):
            chosen = counted(rows_with(rows, label=label, phase=phase, density=density))
            cells = [share(pool(rows_with(chosen, tokens=tokens))) for tokens in lengths]
            if chosen:
                title = "" if label == "dense" else PHASE_TITLES[phase]
                body.append([name_of(label), title, *cells])
    header = ("Policy", "Sparse in", *(f"{tokens:,} tokens" for tokens in lengths))
    return markdown_table(header, body, num_names=2)


def loss_table(rows: Sequence[Row], *, densities: Sequence[float | None], tokens: int) -> str:
    """Text loss beyond that of dense attention to the same text, nats per token.

    Args:
      rows: Rows of one evaluation.
      densities: Nominal densities, each a column; presets that set their own stand in all of them.
      tokens: Length.

    Returns:
      A markdown table with 95 % intervals of the paired differences, and a row for each phase in
      which a policy was measured; the row of dense attention has its loss itself.
    """
    chosen = rows_with(rows, task="text_loss", tokens=tokens)
    dense = rows_with(chosen, label="dense")
    body = [["dense", "", *[_loss(pool(dense))] * len(densities)]] if dense else []
    for label, phase in _label_phases(chosen):
        cells = [
            _more_loss(rows_with(chosen, label=label, phase=phase, density=density), dense)
            for density in densities
        ]
        body.append([name_of(label), PHASE_TITLES[phase], *cells])
    header = ("Policy", "Sparse in", *map(density_title, densities))
    return markdown_table(header, body, num_names=2)


def _label_phases(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """The policies and phases of some rows, those of dense attention left out."""
    rows = [row for row in rows if not is_dense(row)]
    found = {(policy_label(row), row["phase"]) for row in rows}
    labels = policy_labels(rows)
    return [(label, phase) for label in labels for phase in PHASES if (label, phase) in found]


def _loss(pooled: Pooled | None) -> str:
    return NOTHING if pooled is None or pooled.text_loss is None else f"{pooled.text_loss:.3f}"


def loss_difference(first: Sequence[Row], second: Sequence[Row]) -> str:
    """First minus second text loss on the same prompts, or a dash where there are none."""
    found = paired_loss_difference(first, second)
    if found is None:
        return NOTHING
    return f"{signed(found.mean, 3)} ({signed(found.low, 3)} to {signed(found.high, 3)})"


def _more_loss(first: Sequence[Row], second: Sequence[Row]) -> str:
    if paired_loss_difference(first, second) is None:
        return _loss(pool(first))
    return loss_difference(first, second)


def recall_table(rows: Sequence[Row], *, densities: Sequence[float | None], tokens: int) -> str:
    """Mass recall and relative output error, means over tasks and sparse layers."""
    fields = {"mass_recall_by_layer": "mass recall", "output_error_by_layer": "output error"}
    phases = probed_phases(rows, "mass_recall_by_layer")
    chosen = [row for row in rows_with(rows, tokens=tokens) if any(row.get(one) for one in fields)]
    columns = [(density, field) for density in densities for field in fields]
    body = []
    for label, phase in _label_phases(row for row in chosen if row["phase"] in phases):
        own = [rows_with(chosen, label=label, phase=phase, density=one) for one in densities]
        cells = [_mean_cell(mean_by_layer(some, field)) for some in own for field in fields]
        body.append([name_of(label), PHASE_TITLES[phase], *cells])
    titles = (f"{density_title(density)}: {fields[field]}" for density, field in columns)
    return markdown_table(("Policy", "Sparse in", *titles), body, num_names=2)


def _mean_cell(by_layer: Sequence[float | None]) -> str:
    values = [value for value in by_layer if value is not None]
    return f"{sum(values) / len(values):.2f}" if values else NOTHING


def settings_table(rows: Sequence[Row]) -> str:
    """What calibration set, and the density that it gave on the prompts that were scored.

    Args:
      rows: Rows of one evaluation.

    Returns:
      A markdown table with a row for each policy, nominal density and length; empty text if nothing
      was calibrated.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in without_parts(rows):
        if row.get("settings"):
            key = (policy_label(row), row["phase"], row["density"], row["tokens"])
            found.setdefault(key, []).append(row)
    order = policy_labels(rows)

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        label, phase, density, tokens = key
        return order.index(label), PHASES.index(phase), -(density or 0.0), tokens

    body = []
    for key in sorted(found, key=place):
        label, phase, density, tokens = key
        by_task: dict[str, list[Row]] = {}
        for row in found[key]:
            by_task.setdefault(row["task"], []).append(row)
        field = "measured_density_sparse_layers"
        known = [one for one in (mean_of(some, field) for some in by_task.values()) if one]
        mean = mean_of(found[key], field)
        spread = f"{mean:.3f} ({min(known):.3f}–{max(known):.3f})" if mean else NOTHING
        cells = [name_of(label), PHASE_TITLES[phase].lower(), f"{density:g}", f"{tokens:,}"]
        body.append([*cells, _settings_text(found[key][0]["settings"]), spread])
    header = (
        "Policy",
        "Sparse in",
        "Density",
        "Tokens",
        "Set to",
        "Measured (range over tasks)",
    )
    return markdown_table(header, body, num_names=2) if body else ""


def _settings_text(settings: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"({', '.join(map(text, value))})"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"`{name}` {text(value)}" for name, value in settings.items())
