"""The tables of `results/selection.json`: what selecting costs, beside the attention it saves.

    python benchmarks/selection.py           # on a Hopper GPU
    python benchmarks/selection_report.py    # writes the tables

So does `report.py`, with all others.
"""

from typing import Any

from pages import Results, Tables, captioned, duration, if_measured, write_own_tables

from sketchwalk_jax.evaluation.summaries import PHASE_TITLES
from sketchwalk_jax.evaluation.tables import NOTHING, markdown_table, name_of

Row = dict[str, Any]
_HEADER = (
    "Tokens",
    "Policy",
    "Lists",
    "Density",
    "Selection",
    "Of it, observing",
    "Attention over the lists",
    "Both, faster than dense",
)


def selection_tables(data: Results) -> str:
    """A table for each phase, the policies in the order in which they were measured."""
    some = data["rows"][0]
    asked = {row["density"] for row in data["rows"] if row["policy"] != "dense"} - {None}
    nominal = " and ".join(f"{density:g}" for density in sorted(asked))
    heads = f"{some['num_heads']}/{some['num_kv_heads']} heads of {some['head_dim']}"
    blocks = []
    for phase in ("prefill", "decode"):
        what = "a whole prompt" if phase == "prefill" else "one token"
        blocks.append(
            f"**{PHASE_TITLES[phase]}: one layer, {what}, batch {some['batch']}, {heads}, "
            f"{some['dtype']}, nominal density {nominal}**"
        )
        blocks.append(_table([row for row in data["rows"] if row["phase"] == phase]))
    return "\n\n".join(blocks)


def _table(rows: list[Row]) -> str:
    dense = {row["tokens"]: row["attention_ms"] for row in rows if row["policy"] == "dense"}
    body = [
        [f"{row['tokens']:,}", _name(row), *_cells(row, dense.get(row["tokens"]))] for row in rows
    ]
    return markdown_table(_HEADER, body, num_names=3)


def _name(row: Row) -> str:
    name = name_of(row["preset"] or row["policy"])
    fields = ", ".join(f"`{field}={value:g}`" for field, value in row["fields"].items())
    return f"{name}, {fields}" if fields else name


def _cells(row: Row, dense_ms: float | None) -> list[str]:
    if row["error"]:
        return [f"did not run: {row['error'].split(':')[0]}", *[NOTHING] * (len(_HEADER) - 3)]
    times = [
        duration(row, part) if row[f"{part}_ms"] is not None else NOTHING
        for part in ("selection", "observe", "attention")
    ]
    density = row["measured_density"]
    faster = NOTHING
    if dense_ms is not None and row["selection_ms"] is not None:
        ratio = dense_ms / (row["selection_ms"] + row["attention_ms"])
        faster = f"**{ratio:.{1 if ratio >= 1 else 2}f}×**"
    return [_lists(row), NOTHING if density is None else f"{density:.2f}", *times, faster]


def _lists(row: Row) -> str:
    """How many lists a row of queries has, of what."""
    if row["num_lists"] is None:
        return NOTHING
    size = row["list_block_size"]
    unit = "tokens" if size == 1 else f"blocks of {size}"
    shared = "one" if row["num_lists"] == 1 else str(row["num_lists"])
    on = "" if row["attention_implementation"] == "mosaic_gpu" else ", XLA"
    return f"{shared}, {unit}{on}"


TABLES: Tables = {
    "selection": (
        "selection.json",
        if_measured(captioned(selection_tables), "`python benchmarks/selection.py`"),
    ),
}


if __name__ == "__main__":
    write_own_tables(__doc__, TABLES)
