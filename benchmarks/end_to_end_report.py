"""Tables and the figure of `results/end_to_end.json`: whole models beside their floors.

    python benchmarks/end_to_end.py           # on a Hopper GPU
    python benchmarks/end_to_end_report.py    # draws plots/end_to_end.png, writes its tables

`report.py` writes the tables alone, with all others.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import Results, Tables, captioned, if_measured, write_own_tables

from sketchwalk_jax.evaluation.tables import NOTHING, markdown_table, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
_FILE, _DPI = "end_to_end.json", 120
_MAIN = "llama-3.1-8b"
# Policy or preset, and density, in the order of the columns.
_SPARSE = (("recommended", 0.1), ("recommended", 0.2), ("paper", 0.1), ("paper", 0.2))
# Okabe and Ito's colours.
_COLOURS = {"recommended": "#0072B2", "paper": "#D55E00", "dense": "black", "transformers": "0.6"}
_PARTS = ("linear", "observing", "scores", "walk and lists", "attention", "rest")


def main() -> None:
    """Draws the figure and writes the tables."""

    def draw(results: Path, plots: Path) -> None:
        data = json.loads((results / _FILE).read_text(encoding="utf-8"))
        context_figure(data).savefig(plots / "end_to_end.png", dpi=_DPI)

    write_own_tables(__doc__, TABLES, draw)


def _name(row: Row) -> tuple[str, float | None]:
    if row["implementation"] == "transformers":
        return "transformers", None
    name = row["preset"] or row["policy"]
    return (name, None) if name == "dense" else (name, row["density"])


def _settings(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Model, batch, tokens and piece of all rows, in order."""
    found = dict.fromkeys(
        (row["model"], row["batch"], row["tokens"], row["chunk_size"]) for row in rows
    )
    return sorted(found, key=lambda one: (one[0], one[1], one[3] or 0, one[2]))


def _at(rows: Sequence[Row], setting: tuple[Any, ...]) -> dict[tuple[str, float | None], Row]:
    return {
        _name(row): row
        for row in rows
        if (row["model"], row["batch"], row["tokens"], row["chunk_size"]) == setting
    }


def _seconds(row: Row | None, dense: Row | None, *, factor: float, digits: int) -> str:
    """A median, and how many times faster than our own dense attention."""
    if row is None:
        return NOTHING
    if row["error"]:
        needed = row.get("needed_gib")
        return f"{needed:.0f} GiB" if needed else row["error"].split(":")[0]
    value = row["seconds"]["median"]
    text = f"{value * factor:.{digits}f}"
    if dense is None or dense["error"] or dense is row:
        return text
    return f"{text} ({dense['seconds']['median'] / value:.2f}×)"


def _floors(row: Row | None) -> str:
    if row is None or row["error"]:
        return NOTHING
    return f"{row['seconds']['median'] / row['floor_seconds']:.2f}"


def _table(data: Results, phase: str, *, unit: str, factor: float, digits: int) -> str:
    rows = [row for row in data["rows"] if row["phase"] == phase]
    body = []
    for setting in _settings(rows):
        found = _at(rows, setting)
        dense = found.get(("dense", None))
        model, batch, tokens, piece = setting
        length = f"{tokens:,}" + (f" in {piece // 1024}K" if piece else "")
        how = {"factor": factor, "digits": digits}
        cells = [model, length] + ([str(batch)] if phase == "decode" else [])
        cells += [_seconds(found.get(("transformers", None)), None, **how)]
        cells += [_seconds(dense, None, **how)]
        cells += [_seconds(found.get(one), dense, **how) for one in _SPARSE]
        cells += [_floors(dense), _floors(found.get(_SPARSE[0]))]
        body.append(cells)
    names = [f"{name_of(name)} {density:g}" for name, density in _SPARSE]
    header = ["Model", "Tokens", *(["Batch"] if phase == "decode" else [])]
    header += ["transformers", "Dense", *names, "Dense / floor", f"{names[0]} / floor"]
    return f"{markdown_table(header, body, num_names=2)}\n\n{unit}"


def prefill_table(data: Results) -> str:
    """Time to the first token."""
    unit = (
        "Seconds to the first token of one prompt, medians; in brackets how many times faster than "
        "our own dense attention. Floors are the arithmetic of linear layers and attended pairs at "
        f"the rate of a large matrix product ({data['meta']['matmul_tflops']:.0f} TFLOP/s in this "
        "run). GiB where a model does not fit: what it would need."
    )
    return _table(data, "prefill", unit=unit, factor=1.0, digits=2)


def decode_table(data: Results) -> str:
    """Time of one decoded token of every sequence."""
    unit = (
        "Milliseconds of one step, a token for each sequence, medians; in brackets how many times "
        "faster than our own dense attention. Floors are the bytes of weights, attended keys and "
        f"values, and statistics at the rate of a copy ({data['meta']['copy_tb_per_s']:.2f} TB/s "
        "in this run)."
    )
    return _table(data, "decode", unit=unit, factor=1e3, digits=2)


def parts_table(data: Results) -> str:
    """What the GPU's kernels are busy with."""
    body = []
    for row in data["rows"]:
        if row["error"] or not row.get("parts_ms") or row["model"] != _MAIN or row["chunk_size"]:
            continue
        if row["batch"] != 1 or row["tokens"] not in (2**14, 2**17):
            continue
        name, density = _name(row)
        busy = row["parts_ms"]
        idle = max(0.0, 1e3 * row["seconds"]["median"] - sum(busy.values()))
        digits = 2 if row["phase"] == "decode" else 1
        cells = [row["phase"], f"{row['tokens']:,}"]
        cells += [name_of(name) + (f" {density:g}" if density else "")]
        cells += [f"{busy[one]:.{digits}f}" if one in busy else NOTHING for one in _PARTS]
        body.append([*cells, f"{idle:.{digits}f}"])
    header = ("", "Tokens", "Policy", *(one.capitalize() for one in _PARTS), "Between kernels")
    what = f"Milliseconds of {_MAIN}, one sequence, from a trace of one run"
    return f"{markdown_table(header, body, num_names=3)}\n\n{what}."


def context_figure(data: Results) -> "Figure":
    """Time to the first token, and tokens per second, against the context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, phase in zip(panels, ("prefill", "decode"), strict=True):
        rows = [
            row
            for row in data["rows"]
            if row["phase"] == phase
            and row["model"] == _MAIN
            and row["batch"] == 1
            and not row["error"]
            and not (row["chunk_size"] and row["tokens"] <= 2**17)
        ]
        for one in (("transformers", None), ("dense", None), *_SPARSE[:1], *_SPARSE[2:3]):
            line = sorted(
                (row["tokens"], row["seconds"]["median"]) for row in rows if _name(row) == one
            )
            if not line:
                continue
            tokens, values = zip(*line, strict=True)
            shown = values if phase == "prefill" else [1 / value for value in values]
            label = one[0] if one[1] is None else f"{one[0]}, density {one[1]:g}"
            panel.plot(tokens, shown, marker="o", color=_COLOURS[one[0]], label=label)
        ticks = sorted({row["tokens"] for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{one // 1024}K" for one in ticks])
        panel.minorticks_off()
        panel.set_xlabel("tokens")
        panel.grid(axis="y", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("log")
    panels[0].set_title(f"{_MAIN}: seconds to the first token", fontsize=10)
    panels[1].set_title(f"{_MAIN}: tokens per second, one sequence", fontsize=10)
    panels[1].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def _of(make: Any) -> Any:
    return _FILE, if_measured(captioned(make), "`python benchmarks/end_to_end.py`")


TABLES: Tables = {
    "first-token": _of(prefill_table),
    "decoded-token": _of(decode_table),
    "whole-model-parts": _of(parts_table),
}


if __name__ == "__main__":
    main()
