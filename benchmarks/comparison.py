"""The tables of the paper, on the rows of an evaluation: prefill, decode, and both.

As there, policies that select in one phase are compared in that phase, beside every preset of
Sketch-and-Walk; the average over lengths comes last. What the paper leaves out stands beside it:
intervals, measured density, dense layers, and the bytes that decoding reads.
"""

from collections.abc import Sequence
from typing import Any

from sketchwalk_jax.evaluation.summaries import (
    PHASES,
    Row,
    is_dense,
    mean_of,
    measured_phases,
    policy_label,
    policy_labels,
    pool,
    select,
    values_of,
    without_parts,
)
from sketchwalk_jax.evaluation.tables import (
    NOTHING,
    PHASE_TITLES,
    density_title,
    longest,
    markdown_table,
    measured,
    name_of,
    share,
)
from sketchwalk_jax.evaluation.tasks import ANSWERED_TASKS

_METHOD = ("paper", "damped", "one_hop", "released")
_OTHERS = {"prefill": ("minference", "flexprefill"), "decode": ("quest", "adamas"), "both": ()}
_BYTES = tuple(f"decode_bytes_{name}" for name in ("keys", "values", "metadata"))


def comparison(rows: Sequence[Row], nominal: Sequence[float | None]) -> list[str]:
    """The tables of every density and phase, as blocks of markdown.

    Args:
      rows: Rows of one evaluation.
      nominal: Nominal densities.

    Returns:
      Which layers are dense, where the rows say so; then a title and a table for each density and
      phase in which a policy of the paper was measured.
    """
    blocks = [dense_layers_text(rows)] if values_of(rows, "dense_layers") else []
    for density in nominal:
        for phase in measured_phases(rows):
            if set(_labels(rows, phase, density)) <= {"dense"}:
                continue
            place = PHASE_TITLES[phase].lower()
            blocks.append(f"**{density_title(density)}, sparse in {place}**")
            blocks.append(comparison_table(rows, phase=phase, density=density))
    return blocks


def _labels(rows: Sequence[Row], phase: str, density: float | None) -> list[str]:
    known = ("dense", *_OTHERS[phase], *_METHOD)
    found = policy_labels(select(rows, phase=phase, density=density))
    return [label for label in known if label in found]


def comparison_table(rows: Sequence[Row], *, phase: str, density: float | None) -> str:
    """Right answers in one phase by length, all tasks with an answer together.

    Args:
      rows: Rows of one evaluation.
      phase: Where selection is sparse.
      density: Nominal density.

    Returns:
      A markdown table: dense attention, the paper's rivals in this phase, the presets; a column for
      each length and one for all; measured density over all lengths. Where decoding is sparse also
      the two protocols, and bytes at the longest length.

    Example:
      >>> print(comparison_table(rows, phase="decode", density=0.1))  # doctest: +SKIP
    """
    lengths, last = values_of(rows, "tokens"), longest(rows)
    has_decode = phase != "prefill"
    header = ["Policy", *(f"{tokens:,} tokens" for tokens in lengths), "Average"]
    if has_decode:
        header += ["A: question read", "B: question decoded"]
    header += ["Dense layers", "Density: sparse / all layers"]
    if has_decode:
        header.append(f"MiB read per token, {last:,} tokens: keys and values + metadata")
    dense = _scored(select(rows, label="dense"))
    body = []
    for label in _labels(rows, phase, density):
        chosen = _scored(select(rows, label=label, phase=phase, density=density))
        cells = [share(pool(select(chosen, tokens=tokens))) for tokens in lengths]
        cells.append(share(pool(chosen)))
        if has_decode:
            later = [row for row in chosen if row["task"] in ANSWERED_TASKS]
            read = [row for row in chosen if row["task"] not in ANSWERED_TASKS]
            cells += [share(pool(read)), share(pool(later))]
        cells += [_dense_layers(chosen), measured(pool(chosen))]
        if has_decode:
            cells.append(bytes_read(select(chosen, tokens=last), select(dense, tokens=last)))
        body.append([name_of(label), *cells])
    return markdown_table(header, body)


def _scored(rows: Sequence[Row]) -> list[Row]:
    return [row for row in without_parts(rows) if row["exact"] is not None]


def _dense_layers(rows: Sequence[Row]) -> str:
    if rows and is_dense(rows[0]):
        return "all"
    return ", ".join(map(str, values_of(rows, "dense_layers"))) or NOTHING


def bytes_read(rows: Sequence[Row], dense: Sequence[Row]) -> str:
    """MiB that one decoded token reads in all layers, `21.00 + 1.30 (0.33)`.

    Args:
      rows: Rows of one policy and length.
      dense: Rows of dense attention to the same prompts.

    Returns:
      Keys and values, then what selecting takes; and all of it as a share of dense attention's.
      A dash where the rows do not say.
    """
    parts, whole = ([mean_of(some, name) for name in _BYTES] for some in (rows, dense))
    if None in parts or None in whole:
        return NOTHING
    keys, values, metadata = (part / 2**20 for part in parts if part is not None)
    everything = sum(part / 2**20 for part in whole if part is not None)
    text = f"{keys + values:.2f} + {metadata:.2f}"
    return f"{text} ({(keys + values + metadata) / everything:.2f})"


def dense_layers_text(rows: Sequence[Row]) -> str:
    """Which policies leave how many leading layers dense, in a sentence."""
    labels: dict[int, list[str]] = {}
    for label in policy_labels(rows):
        for count in values_of(select(rows, label=label), "dense_layers"):
            labels.setdefault(count, []).append(f"`{label}`")
    if len(labels) == 1:
        return f"Leading layers that stay dense: {min(labels)}, whatever the policy."
    most = max(labels, key=lambda count: len(labels[count]))
    parts = [
        f"{count} in {', '.join(names)}" for count, names in sorted(labels.items()) if count != most
    ]
    return f"Leading layers that stay dense: {'; '.join(parts)}; {most} in the others."


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
