"""A report of one evaluation in markdown: tables, figures and checked claims.

`sections` makes the parts by name, for a page with prose of its own; `write_report` writes a whole
report into a folder, as `sketchwalk report` does.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sketchwalk_jax.evaluation.comparison import comparison, settings_table
from sketchwalk_jax.evaluation.figures import Drawing, drawings, save_drawings
from sketchwalk_jax.evaluation.observations import check_observations, observations_text
from sketchwalk_jax.evaluation.summaries import (
    Results,
    Row,
    densities,
    measured_phases,
    values_of,
)
from sketchwalk_jax.evaluation.tables import (
    PHASE_TITLES,
    accuracy_table,
    density_title,
    difference_table,
    hops_table,
    lengths_table,
    longest,
    loss_table,
    recall_table,
    summary_table,
)

NOT_MEASURED = "*Not measured.*"
NOT_CALIBRATED = "*No policy here takes calibration.*"
SUMMARY_NOTE = (
    "A policy that selects in one phase only has a dash in the others. Text loss and density are "
    "those of the first phase in which it has a figure."
)

TITLES = {
    "setup": "What was measured",
    "summary": "Summary",
    "comparison": "The paper's tables: prefill, decode, both",
    "accuracy": "Right answers by task",
    "differences": "Differences to dense attention",
    "lengths": "By length",
    "depths": "Needles by depth",
    "hops": "Variable tracking by statements to follow",
    "loss": "Text loss",
    "layers": "Layer by layer",
    "settings": "What calibration set",
    "claims": "Claims, checked",
}
"""Sections of a report and their titles."""


def sections(results: Results, *, plots: str | None = None) -> dict[str, str]:
    """The parts of a report as markdown, by the names of `TITLES`.

    Args:
      results: One evaluation.
      plots: Folder of the figures, as the page links to it; without one there are no figures.

    Returns:
      Tables and figures, without titles. What the results have no rows for says so.

    Example:
      >>> print(sections(read_results("quality.json"))["summary"])  # doctest: +SKIP
    """
    rows = results.rows
    # Where every policy sets its own density, `None` leaves the density open.
    tokens = longest(rows)
    nominal: list[float | None] = [*densities(rows)[::-1]] or [None]
    images = drawings(rows) if plots is not None else {}

    def show(prefix: str) -> list[str]:
        return [
            f"![{one.description}]({plots}/{name}.png)"
            for name, one in images.items()
            if name.startswith(prefix)
        ]

    has_loss = any(row["text_loss"] is not None for row in rows)
    has_hops = any(row["hops"] is not None for row in rows)
    has_layers = any(row.get("mass_recall_by_layer") for row in rows)
    parts = {
        "setup": [describe_results(results)],
        "summary": [*_by_density(summary_table, rows, nominal, tokens), SUMMARY_NOTE],
        "comparison": comparison(rows, nominal),
        "accuracy": [*show("accuracy"), *_by_phase(accuracy_table, rows, nominal, tokens)],
        "differences": _by_phase(difference_table, rows, nominal, tokens),
        "lengths": [
            block
            for density in nominal
            for block in (f"**{density_title(density)}**", lengths_table(rows, density=density))
        ],
        "depths": show("needle_depth"),
        "hops": _by_density(hops_table, rows, nominal, tokens) if has_hops else [],
        "loss": [loss_table(rows, densities=nominal, tokens=tokens)] if has_loss else [],
        "layers": [
            *([recall_table(rows, densities=nominal, tokens=tokens)] if has_layers else []),
            *show("mass_recall"),
            *show("output_error"),
        ],
        "settings": [settings_table(rows) or NOT_CALIBRATED],
        "claims": [observations_text(check_observations(rows))],
    }
    return {name: "\n\n".join(blocks) or NOT_MEASURED for name, blocks in parts.items()}


def _by_density(
    make: Callable[..., str], rows: Sequence[Row], nominal: Sequence[float | None], tokens: int
) -> list[str]:
    blocks = []
    for density in nominal:
        blocks.append(f"**{density_title(density)}, {tokens:,} tokens**")
        blocks.append(make(rows, density=density, tokens=tokens))
    return blocks


def _by_phase(
    make: Callable[..., str], rows: Sequence[Row], nominal: Sequence[float | None], tokens: int
) -> list[str]:
    blocks = []
    for density in nominal:
        for phase in measured_phases(rows):
            place = PHASE_TITLES[phase].lower()
            blocks.append(f"**{density_title(density)}, sparse in {place}, {tokens:,} tokens**")
            blocks.append(make(rows, phase=phase, density=density, tokens=tokens))
    return blocks


def describe_results(results: Results) -> str:
    """Model, text, prompts, machine and command in two paragraphs."""
    meta, rows = results.meta, results.rows
    model, text = meta["model"], meta["text"]
    hashes = ", ".join(f"`{value[:16]}`" for value in model["sha256"].values())
    part = "" if text["tail"] == 1 else f", the last {text['tail']:.0%} of it"
    by_hops = {row["prompts"] for row in rows if row["hops"] is not None}
    others = {row["prompts"] for row in rows if row["hops"] is None and row["depth"] is None}
    counts = f"{_range(others)} prompts of each task and length" if others else ""
    if by_hops:
        counts += (
            f"{', ' if counts else ''}{_range(by_hops)} for each number of statements to follow"
        )
    if meta.get("probe_prompts"):
        counts += f" (attention mass, errors and bytes on {meta['probe_prompts']} of each)"
    lengths = ", ".join(f"{tokens:,}" for tokens in values_of(rows, "tokens"))
    return (
        f"Model `{model['name']}` ({meta['dtype']}; SHA-256 of its weights begins {hashes}). "
        f"Facts are hidden in {text['name']}{part} (SHA-256 `{text['sha256'][:16]}`), in prompts "
        f"of {lengths} tokens: {counts}, seed {meta['seed']}, the same ones for every policy. "
        f"{_fields_text(meta)}The run took {meta['wall_s'] / 60:.1f} minutes.\n\n"
        f"{describe_run(meta)}"
    )


def _fields_text(meta: Mapping[str, Any]) -> str:
    """Fields of policies that the evaluation set; else every policy has its own."""
    fields = meta.get("fields") or {}
    if not fields:
        return ""
    text = ", ".join(f"`{name}={value}`" for name, value in fields.items())
    return f"In every policy that has them: {text}. "


def _range(counts: set[int]) -> str:
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def describe_run(meta: Mapping[str, Any]) -> str:
    """Hardware, versions, date and command in one line."""
    versions = meta["versions"]
    machine = f"{meta['cpu']}, {meta['cores']} cores, {meta['memory_gib']} GiB"
    if meta["device"] != "cpu":
        machine = f"{meta['device']} in a machine with {machine}"
    return (
        f"{machine}; "
        f"Python {versions['python']}, JAX {versions['jax']}; {meta['date']}; "
        f"`{meta['command']}`"
    )


def write_report(
    results: Results,
    folder: str | Path,
    *,
    has_figures: bool = True,
    more: Mapping[str, Drawing] | None = None,
) -> list[Path]:
    """Writes `report.md` and its figures.

    Args:
      results: One evaluation.
      folder: Where; made if it is missing.
      has_figures: Whether figures are drawn, which takes matplotlib.
      more: Further figures, such as those of the model, by name.

    Returns:
      The files, `report.md` first.

    Raises:
      ImportError: If figures are wanted and matplotlib is missing.
      OSError: If a file cannot be written.

    Example:
      >>> write_report(read_results("quality.json"), "report")  # doctest: +SKIP
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    images = drawings(results.rows) | dict(more or {}) if has_figures else {}
    written = save_drawings(images, folder)
    parts = sections(results, plots="." if has_figures else None)
    text = ["# Quality of sparse attention"]
    for name, title in TITLES.items():
        text += [f"## {title}", parts[name]]
    if more:
        text.append("## The model on one prompt")
        text += [f"![{one.description}](./{name}.png)" for name, one in more.items()]
    path = folder / "report.md"
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return [path, *written]
