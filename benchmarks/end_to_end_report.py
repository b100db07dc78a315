"""Tables and the figure of `results/end_to_end.json`: whole models beside their floors.

    python benchmarks/end_to_end.py           # on a Hopper GPU
    python benchmarks/end_to_end_report.py    # draws plots/end_to_end.png, writes its tables

`report.py` writes the tables alone, with all others.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from end_to_end import BATCHES, LENGTHS, LONG, MODELS
from pages import Results, Tables, captioned, describe_absent, if_measured, write_own_tables

from sketchwalk_jax.evaluation.tables import NOTHING, markdown_table, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
_FILE, _DPI = "end_to_end.json", 120
_MAIN = "llama-3.1-8b"
_COMMAND = "`python benchmarks/end_to_end.py`"
_GAPS = "`python benchmarks/end_to_end.py --missing`"
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


def fastest_dense(rows: Sequence[Row], like: Row) -> Row | None:
    """Our own dense attention to the same, in one piece or in several: the fastest."""
    same = ("model", "phase", "tokens", "batch")
    found = [
        row
        for row in rows
        if _name(row) == ("dense", None)
        and all(row[name] == like[name] for name in same)
        and not row["error"]
    ]
    return min(found, key=lambda row: row["seconds"]["median"], default=None)


def _seconds(row: Row | None, dense: Row | None, *, factor: float, digits: int) -> str:
    """A median, and how many times faster than our own dense attention."""
    if row is None:
        return NOTHING
    if row["error"]:
        needed = row.get("needed_gib")
        return f"{needed:.0f} GiB" if needed else row["error"].split(":")[0]
    value = row["seconds"]["median"]
    text = f"{value * factor:.{digits}f}"
    if dense is None:
        return text
    return f"{text} ({dense['seconds']['median'] / value:.2f}×)"


def _floors(row: Row | None) -> str:
    if row is None or row["error"]:
        return NOTHING
    return f"{row['seconds']['median'] / row['floor_seconds']:.2f}"


def _table(data: Results, phase: str, *, unit: str, factor: float, digits: int) -> str:
    rows = [row for row in data["rows"] if row["phase"] == phase]
    if not rows:
        return ""
    names = [("transformers", None), ("dense", None), *_SPARSE]
    names = [one for one in names if one in set(map(_name, rows))]
    sparse = next((one for one in _SPARSE if one in names), None)
    body = []
    for setting in _settings(rows):
        found = _at(rows, setting)
        dense = fastest_dense(rows, next(iter(found.values())))
        model, batch, tokens, piece = setting
        length = f"{tokens:,}" + (f" in {_short(piece)}" if piece else "")
        how = {"factor": factor, "digits": digits}
        cells = [model, length] + ([str(batch)] if phase == "decode" else [])
        cells += [
            _seconds(found.get(one), dense if one in _SPARSE else None, **how) for one in names
        ]
        cells += [_floors(found.get(("dense", None)))]
        cells += [_floors(found.get(sparse))] if sparse else []
        body.append(cells)
    header = ["Model", "Tokens", *(["Batch"] if phase == "decode" else [])]
    header += [*map(_title, names), "Dense / floor"]
    header += [f"{_title(sparse)} / floor"] if sparse else []
    is_beaten = any(
        not row["error"] and row["seconds"]["median"] < row.get("floor_seconds", 0.0)
        for row in rows
    )
    if is_beaten:
        unit += " Where a row is below its floor, the model ran faster than that product did."
    return f"{markdown_table(header, body, num_names=2)}\n\n{unit}"


def _title(name: tuple[str, float | None]) -> str:
    label, density = name
    return label.capitalize() if label == "dense" else _with_density(label, density)


def _with_density(label: str, density: float | None) -> str:
    return label if density is None else f"{name_of(label)} {density:g}"


def _rates(data: Results, name: str, *, digits: int) -> str:
    """A rate that floors go by, or from which to which it was in several runs."""
    found = [row["run"][name] for row in data["rows"] if name in row["run"]]
    shown = dict.fromkeys(f"{one:.{digits}f}" for one in (min(found), max(found)))
    return "–".join(shown)


def gains_table(data: Results) -> str:
    """What the main model gains where dense and sparse are both measured, for README.md."""
    rows = [row for row in data["rows"] if (row["model"], row["batch"]) == (_MAIN, 1)]
    sparse = [one for one in _SPARSE if one[0] == "recommended"]
    body, used = [], set()
    for tokens in sorted({row["tokens"] for row in rows}):
        cells = {}
        for phase, unit, factor in (("prefill", "s", 1.0), ("decode", "ms", 1e3)):
            own = [row for row in rows if (row["phase"], row["tokens"]) == (phase, tokens)]
            found = {one: _fastest(own, one) for one in (("dense", None), *sparse)}
            dense = found.pop(("dense", None))
            for one, row in found.items():
                if dense is None or row is None:
                    continue
                times = [x["seconds"]["median"] for x in (dense, row)]
                cells[phase, "dense", None] = f"{times[0] * factor:.2f} {unit}"
                ratio = f"**{times[0] / times[1]:.2f}×**"
                cells[phase, *one] = f"{times[1] * factor:.2f} {unit}, {ratio}"
        if cells:
            body.append((tokens, cells))
            used |= cells.keys()
    columns = [
        (phase, *one)
        for phase in ("prefill", "decode")
        for one in (("dense", None), *sparse)
        if (phase, *one) in used
    ]
    if not columns:
        return ""
    what = {"prefill": "first token", "decode": "each further token"}
    header = [f"{what[phase]}, {_with_density(*one)}".capitalize() for phase, *one in columns]
    most = max(len(cells) for _, cells in body)  # lengths with fewer get a sentence
    lines = [
        [f"{tokens:,}", *(cells.get(one, NOTHING) for one in columns)]
        for tokens, cells in body
        if len(cells) == most
    ]
    others = [
        f"{what[phase].capitalize()} of {tokens:,} tokens: {cells[phase, 'dense', None]} dense, "
        f"{cells[phase, *one]} with {_with_density(*one)}."
        for tokens, cells in body
        if len(cells) < most
        for phase, *one in columns
        if one[0] != "dense" and (phase, *one) in cells
    ]
    text = (
        f"A model in the shape of {_MAIN}, random weights, one sequence. Dense is the library's "
        "own, through cuDNN; prompts are read in one piece or in several, whichever is faster, on "
        "both sides"
    )
    table = markdown_table(["Tokens", *header], lines)
    return " ".join([f"{table}\n\n{text}.", *others, *_gains_of_batches(data)])


def _gains_of_batches(data: Results) -> list[str]:
    """A sentence on a decoded token of several sequences, at the longest length of each batch."""
    found = []
    for batch in BATCHES[1:]:
        rows = [
            row
            for row in data["rows"]
            if (row["model"], row["batch"], row["phase"]) == (_MAIN, batch, "decode")
            and not row["error"]
        ]
        both = {row["tokens"] for row in rows if _name(row) == _SPARSE[0]}
        both &= {row["tokens"] for row in rows if _name(row) == ("dense", None)}
        if not both:
            continue
        own = [row for row in rows if row["tokens"] == max(both)]
        dense, sparse = (
            1e3 * _fastest(own, one)["seconds"]["median"] for one in (("dense", None), _SPARSE[0])
        )
        found.append(
            f"{batch} sequences of {max(both):,} tokens decode a token each in {sparse:.2f} ms "
            f"instead of {dense:.2f} ms (**{dense / sparse:.2f}×**)"
        )
    return [f"With {_with_density(*_SPARSE[0])}, {', and '.join(found)}."] if found else []


def _fastest(rows: Sequence[Row], name: tuple[str, float | None]) -> Row | None:
    found = [row for row in rows if _name(row) == name and not row["error"]]
    return min(found, key=lambda row: row["seconds"]["median"], default=None)


def _short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 2**20 else f"{tokens >> 10}K"


def _absent(data: Results, phase: str) -> list[str]:
    """What there is no row of."""
    long = {tokens for own in LONG.values() for tokens in own}
    lengths = sorted({*LENGTHS, *long})
    batches = BATCHES if phase == "decode" else ()
    wanted: dict[str, tuple[str, dict[Any, str]]] = {
        "model": ("{}", {name: name for name in MODELS}),
        "tokens": ("{} tokens", {tokens: _short(tokens) for tokens in lengths}),
        "batch": ("batches of {}", {batch: str(batch) for batch in batches}),
        "implementation": ("{}", {"transformers": "transformers"}),
    }
    return describe_absent(data, _GAPS, wanted, phase=phase)


def prefill_table(data: Results) -> str:
    """Time to the first token."""
    unit = (
        "Seconds to the first token of one prompt, medians; in brackets how many times faster than "
        "our own dense attention, in one piece or several, whichever is faster. Floors are the "
        "arithmetic of linear layers and attended pairs at the rate of a large matrix product "
        f"({_rates(data, 'matmul_tflops', digits=0)} TFLOP/s in the same run). GiB where a model "
        "does not fit: what it would need."
    )
    return _table(data, "prefill", unit=unit, factor=1.0, digits=2)


def decode_table(data: Results) -> str:
    """Time of one decoded token of every sequence."""
    unit = (
        "Milliseconds of one step, a token for each sequence, medians; in brackets how many times "
        "faster than our own dense attention. Floors are the bytes of weights, attended keys and "
        "values, and statistics at the rate of a copy "
        f"({_rates(data, 'copy_tb_per_s', digits=2)} TB/s in the same run)."
    )
    return _table(data, "decode", unit=unit, factor=1e3, digits=2)


def parts_table(data: Results) -> str:
    """What the GPU's kernels are busy with."""
    body = []
    order = {"prefill": 0, "decode": 1}
    rows = sorted(data["rows"], key=lambda row: (order[row["phase"]], row["tokens"]))
    for row in rows:
        if row["error"] or not row.get("parts_ms") or row["model"] != _MAIN or row["chunk_size"]:
            continue
        if row["batch"] != 1 or row["tokens"] not in (2**14, 2**17):
            continue
        if row["implementation"] != "ours":
            continue
        name, density = _name(row)
        busy = row["parts_ms"]
        idle = max(0.0, 1e3 * row["seconds"]["median"] - sum(busy.values()))
        digits = 2 if row["phase"] == "decode" else 1
        cells = [row["phase"], f"{row['tokens']:,}"]
        cells += [name_of(name) + (f" {density:g}" if density else "")]
        cells += [f"{busy[one]:.{digits}f}" if one in busy else NOTHING for one in _PARTS]
        body.append([*cells, f"{idle:.{digits}f}"])
    if not body:
        return ""
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
        ]
        for one in (("transformers", None), ("dense", None), *_SPARSE[:1], *_SPARSE[2:3]):
            best: dict[int, float] = {}  # in one piece or in several
            for row in rows:
                if _name(row) == one:
                    seconds, tokens = row["seconds"]["median"], row["tokens"]
                    best[tokens] = min(seconds, best.get(tokens, seconds))
            if not best:
                continue
            tokens, values = zip(*sorted(best.items()), strict=True)
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


def _nothing(data: Results) -> list[str]:
    return []


def _of(make: Any, gaps: Any, **where: Any) -> Any:
    return _FILE, if_measured(captioned(make, _COMMAND, gaps, **where), _COMMAND)


TABLES: Tables = {
    "gains": _of(gains_table, _nothing, model=_MAIN, batch=1, implementation="ours"),
    "first-token": _of(prefill_table, lambda data: _absent(data, "prefill"), phase="prefill"),
    "decoded-token": _of(decode_table, lambda data: _absent(data, "decode"), phase="decode"),
    "whole-model-parts": _of(parts_table, _nothing),
}


if __name__ == "__main__":
    main()
