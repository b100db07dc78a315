"""The tables of the paper, on the rows of an evaluation and as the paper prints them.

As there, policies that select in one phase are compared in that phase, beside every preset of
Sketch-and-Walk; the average over lengths comes last. What the paper leaves out stands beside it:
intervals, measured density, dense layers, and the bytes that decoding reads.
"""

import json
from collections.abc import Sequence
from pathlib import Path

# `pages` finds the package in any checkout.
from pages import Results, Tables, describe_whole, if_measured, read_whole

from sketchwalk_jax.evaluation.report import NOT_MEASURED
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    NOTHING,
    PHASE_TITLES,
    densities,
    density_title,
    is_dense,
    longest,
    markdown_table,
    mean_of,
    measured,
    measured_phases,
    name_of,
    policy_labels,
    pool,
    rows_with,
    share,
    values_of,
    without_parts,
)
from sketchwalk_jax.evaluation.tasks import ANSWERED_TASKS

_METHOD = ("paper", "damped", "one_hop", "released")
_OTHERS = {"prefill": ("minference", "flexprefill"), "decode": ("quest", "adamas"), "both": ()}
_BYTES = tuple(f"decode_bytes_{name}" for name in ("keys", "values", "metadata"))


def quality_comparison(path: Path) -> str:
    """The paper's tables on the rows of an evaluation, at every density."""
    rows = read_whole(path).rows
    nominal = [*densities(rows)[::-1]] or [None]
    return "\n\n".join(comparison_blocks(rows, nominal)) or NOT_MEASURED


def quality_common(path: Path) -> str:
    """The same where policies leave the same layers dense, and what was run."""
    return f"{quality_comparison(path)}\n\n{describe_whole(read_whole(path))}"


def comparison_blocks(rows: Sequence[Row], nominal: Sequence[float | None]) -> list[str]:
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
    found = policy_labels(rows_with(rows, phase=phase, density=density))
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
    dense = _scored(rows_with(rows, label="dense"))
    body = []
    for label in _labels(rows, phase, density):
        chosen = _scored(rows_with(rows, label=label, phase=phase, density=density))
        cells = [share(pool(rows_with(chosen, tokens=tokens))) for tokens in lengths]
        cells.append(share(pool(chosen)))
        if has_decode:
            later = [row for row in chosen if row["task"] in ANSWERED_TASKS]
            read = [row for row in chosen if row["task"] not in ANSWERED_TASKS]
            cells += [share(pool(read)), share(pool(later))]
        cells += [_dense_layers(chosen), measured(pool(chosen))]
        if has_decode:
            cells.append(bytes_read(rows_with(chosen, tokens=last), rows_with(dense, tokens=last)))
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
        for count in values_of(rows_with(rows, label=label), "dense_layers"):
            labels.setdefault(count, []).append(f"`{label}`")
    if len(labels) == 1:
        return f"Leading layers that stay dense: {min(labels)}, whatever the policy."
    most = max(labels, key=lambda count: len(labels[count]))
    parts = [
        f"{count} in {', '.join(names)}" for count, names in sorted(labels.items()) if count != most
    ]
    return f"Leading layers that stay dense: {'; '.join(parts)}; {most} in the others."


def paper_ruler(path: Path) -> str:
    """The paper's tables of RULER, as one."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return paper_table(data, "RULER")


def paper_longbench(path: Path) -> str:
    """The averages of the paper's tables of LongBench."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return paper_table(data, "LongBench", ("average", "average_without_passage_count"))


def paper_table(data: Results, benchmark: str, columns: Sequence[str] = ()) -> str:
    """Dense attention once for each model, then every method in every phase."""
    rows: dict[tuple[str, ...], list[str]] = {}
    sources = [one for one in data["tables"] if one["benchmark"] == benchmark]
    columns = columns or sources[0]["columns"]
    for source in sorted(sources, key=lambda one: list(PHASE_TITLES).index(one["phase"])):
        for row in source["rows"]:
            is_dense = row["method"] == "dense"
            phase = "" if is_dense else PHASE_TITLES[source["phase"]]
            values = dict(zip(source["columns"], row["values"], strict=True))
            numbers = [f"{values[column]:.2f}" for column in columns]
            table = "" if is_dense else str(source["table"])
            cells = [row["model"], phase, row["method"], *numbers, table]
            rows.setdefault((row["model"], phase, row["method"]), cells)
    titles = [column.replace("_", " ") for column in columns]
    order = sorted(rows, key=lambda key: list(dict.fromkeys(one[0] for one in rows)).index(key[0]))
    header = ("Model", "Sparse in", "Method", *titles, "Table")
    table = markdown_table(header, [rows[key] for key in order], num_names=3)
    return (
        f"{table}\n\n{data['meta']['source']}; {data['meta']['unit']}; {data['meta']['setting']}."
    )


def paper_statements(path: Path) -> str:
    """What the paper says of figures whose numbers it does not print."""
    data = json.loads(path.read_text(encoding="utf-8"))
    places = {
        one["about"]: f"Figure {one['figure']}{one['panel'] or ''}" if one["figure"] else "abstract"
        for one in data["statements"]
    }
    return "\n".join(
        f"- {one['about'].capitalize()}: {one['text']} ({places[one['about']]})."
        for one in data["statements"]
    )


TABLES: Tables = {
    "quality-common": (
        "quality_common.json",
        if_measured(
            quality_common,
            "`sketchwalk eval --policy minference --policy flexprefill --set dense_layers=2 "
            "--phase prefill --out benchmarks/results/quality_common.json`",
        ),
    ),
    "paper-ruler": ("paper.json", paper_ruler),
    "paper-longbench": ("paper.json", paper_longbench),
    "paper-statements": ("paper.json", paper_statements),
}
