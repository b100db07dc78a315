"""Tables and the figure of `results/kernels.json`.

    python benchmarks/kernels.py          # on a Hopper GPU, as is kernel_tuning.py
    python benchmarks/kernel_report.py    # draws plots/kernels_speedup.png, writes its tables

`report.py` writes the tables alone, with all others.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pages import Results, Tables, captioned, duration, if_measured, write_own_tables

from sketchwalk_jax.evaluation.tables import markdown_table
from sketchwalk_jax.plots import import_pyplot

Row = dict[str, Any]
# Okabe and Ito's colours; markers repeat what they say.
_STYLES = (("#D55E00", "o"), ("#0072B2", "s"), ("#009E73", "D"), ("#CC79A7", "^"))
_DPI = 150
MAIN_SHAPE = {"batch": 1, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def main() -> None:
    """Draws the figure and writes the tables."""

    def draw(results: Path, plots: Path) -> None:
        data = json.loads((results / "kernels.json").read_text(encoding="utf-8"))
        speedup_figure(data["rows"]).savefig(plots / "kernels_speedup.png", dpi=_DPI)

    write_own_tables(__doc__, TABLES, draw)


def rows_of(data: Results, op: str) -> list[Row]:
    """Rows of one operation, in the order that they were measured in."""
    return [row for row in data["rows"] if row["op"] == op]


def heads(row: Row) -> str:
    """Query and key/value heads, and their size."""
    return f"{row['num_heads']}/{row['num_kv_heads']} × {row['head_dim']}"


def _table(
    data: Results, op: str, columns: Sequence[tuple[str, Callable[[Row], str]]], num_names: int
) -> str:
    lines = [[cell(row) for _, cell in columns] for row in rows_of(data, op)]
    return markdown_table([title for title, _ in columns], lines, num_names=num_names)


def main_shape_table(data: Results) -> str:
    """The main shape alone: times, and how many times faster than dense attention."""
    chosen = {}
    for row in data["rows"]:
        if row["peer"] and all(row[name] == MAIN_SHAPE[name] for name in MAIN_SHAPE):
            chosen.setdefault(row["tokens"], {})[row["op"], row["density"]] = row
    columns = sorted(
        {key for found in chosen.values() for key in found},
        key=lambda key: (key[0] != "prefill", key[1]),
    )
    lines = []
    for tokens, found in sorted(chosen.items()):
        cells = [
            f"{duration(found[key], 'ours').split(' (')[0]}, **{found[key]['ratio']:.1f}×**"
            if key in found
            else ""
            for key in columns
        ]
        lines.append([f"{tokens:,}", *cells])
    titles = [f"{op.capitalize()}, density {density:g}" for op, density in columns]
    return markdown_table(["Tokens", *titles], lines)


def prefill_table(data: Results) -> str:
    """Attention over the lists of a whole prompt, beside dense attention."""
    columns = (
        ("Heads", heads),
        ("Tokens", lambda row: f"{row['tokens']:,}"),
        ("Density", lambda row: f"{row['density']:g}"),
        ("cuDNN, dense", lambda row: duration(row, "peer")),
        ("Ours", lambda row: duration(row, "ours")),
        ("Faster", lambda row: f"**{row['ratio']:.1f}×**"),
        ("Density's own", lambda row: f"{1 / row['attended_pairs']:.1f}×"),
        ("TFLOP/s", lambda row: f"{row['tflops']:.0f}"),
    )
    return _table(data, "prefill", columns, 1)


def decode_table(data: Results) -> str:
    """One token per sequence over its list, beside dense decoding."""
    columns = (
        ("Heads", heads),
        ("Batch", lambda row: str(row["batch"])),
        ("Tokens", lambda row: f"{row['tokens']:,}"),
        ("Density", lambda row: f"{row['density']:g}"),
        ("Block", lambda row: str(row["block_size"])),
        ("cuDNN, dense", lambda row: duration(row, "peer")),
        ("Ours", lambda row: duration(row, "ours")),
        ("Faster", lambda row: f"**{row['ratio']:.1f}×**"),
        ("TB/s", lambda row: f"{row['tb_per_s']:.2f}"),
        ("Of a copy's", lambda row: f"{row['fraction_of_copy_bandwidth']:.0%}"),
    )
    return _table(data, "decode", columns, 1)


def selection_table(data: Results) -> str:
    """Selection of one layer, beside the attention that it saves."""
    titles = {"select_prefill": "prefill", "select_decode": "decode"}
    lines = [
        [
            titles[op],
            f"{row['tokens']:,}",
            f"{row['density']:g}",
            duration(row, "ours"),
            "" if row["share_of_attention"] is None else f"{row['share_of_attention']:.1%}",
        ]
        for op in titles
        for row in rows_of(data, op)
    ]
    header = ("Selection in", "Tokens", "Density", "Time", "Of the attention's")
    return markdown_table(header, lines)


def tuning_table(data: Results) -> str:
    """What variants of the configuration gain or lose beside the default."""
    lines = []
    for row in data["rows"]:
        changes = ", ".join(f"`{name}={value}`" for name, value in row["changes"].items())
        low, median, high = (row["gain"][name] for name in ("q25", "median", "q75"))
        lines.append(
            [
                f"{row['op']}, batch {row['batch']}, {row['tokens']:,} tokens, {heads(row)}, "
                f"density {row['density']:g}",
                changes or "default",
                duration(row, "ours"),
                f"{median:+.1%} ({low:+.1%} to {high:+.1%})" if changes else "",
            ]
        )
    return markdown_table(("Shape", "Changed", "Time", "Faster by"), lines, num_names=2)


def gradients_table(data: Results) -> str:
    """Forward and backward passes of lists and of dense attention, and their memory."""
    lines = []
    for row in data["rows"]:
        both: list[str] = []
        for name in ("forward_ms", "backward_ms"):
            both += [f"{row[f'{who}_{name}']:,.4g} ms" for who in ("peer", "ours")]
        sizes = [f"{row[f'{who}_temporary_bytes'] / 2**20:,.0f}" for who in ("peer", "ours")]
        lines.append(
            [
                heads(row),
                f"{row['tokens']:,}",
                f"{row['density']:g}",
                *both,
                f"**{row['backward_ratio']:.1f}×**",
                f"{' / '.join(sizes)} MiB",
            ]
        )
    titles = ("Heads", "Tokens", "Density", "Forward, dense", "Lists", "Backward, dense", "Lists")
    titles += ("Backward faster", "Temporary memory, dense / lists")
    return markdown_table(titles, lines, num_names=1)


def rates_table(data: Results) -> str:
    """What a multiprocessor does in a cycle, with one kind of work alone."""
    lines = []
    for row in data["rows"]:
        if row["op"] == "alu":
            what = f"`{row['instruction']}`"
        elif row["op"] == "wgmma":
            what = f"64 × {row['columns']} products in eight bits, left operand in {row['left']}, "
            what += {"f32": "sums in float32", "f16": "sums in float16"}[row["sums"]]
        else:
            pieces = {"lines": "lines of 128 bytes", "rows": "rows of 64 bytes, one of each 512"}
            what = f"keys to shared memory, in {pieces[row['keys_lie_in']]}"
        rate, clock = row["per_cycle"], row["clock_ghz"]["median"]
        spread = f"{rate['median']:,.1f} ({rate['q25']:,.1f}–{rate['q75']:,.1f})"
        lines.append([what, f"{spread} {row['unit']}", f"{clock:.2f} GHz"])
    return markdown_table(("Work", "In a cycle", "Clock"), lines, num_names=1)


def speedup_figure(rows: Sequence[Row]) -> Any:
    """How many times faster than cuDNN's dense attention prefill is, against the context.

    One line for each density below 1, and dashed what a kernel would reach whose time is its
    density: 1 / density.
    """
    pyplot = import_pyplot()
    from matplotlib.ticker import FixedLocator, NullLocator

    chosen = [
        row
        for row in rows
        if row["op"] == "prefill" and all(row[name] == MAIN_SHAPE[name] for name in MAIN_SHAPE)
    ]
    if not chosen:
        raise ValueError(f"rows must hold prefill of {MAIN_SHAPE}, got none")
    figure, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    densities = sorted({row["density"] for row in chosen})
    for density, (colour, marker) in zip(densities, _STYLES, strict=False):
        line = sorted((row["tokens"], row["ratio"]) for row in chosen if row["density"] == density)
        tokens, ratios = zip(*line, strict=True)
        label = f"density {density:g}"
        axis.plot(tokens, ratios, color=colour, marker=marker, label=label)
        axis.axhline(1 / density, color=colour, linestyle="--", linewidth=1)
        axis.annotate(
            f"{1 / density:g}×",
            (1.0, 1 / density),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    lengths = sorted({row["tokens"] for row in chosen})
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticklabels([f"{length // 1024}K" for length in lengths])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("prompt, tokens")
    axis.set_ylabel("times faster than cuDNN's dense attention")
    axis.set_title("Prefill attention, 32/8 heads of 128, bfloat16; dashed: 1 / density", size=10)
    figure.legend(frameon=False, loc="outside lower center", ncols=len(densities))
    axis.spines[["top", "right"]].set_visible(False)
    return figure


TABLES: Tables = {
    "kernels": ("kernels.json", captioned(main_shape_table)),
    "kernels-prefill": ("kernels.json", captioned(prefill_table)),
    "kernels-decode": ("kernels.json", captioned(decode_table)),
    "kernels-selection": ("kernels.json", captioned(selection_table)),
    "kernels-tuning": ("kernel_tuning.json", captioned(tuning_table)),
    "gradients": (
        "gradients.json",
        if_measured(captioned(gradients_table), "`python benchmarks/gradients.py`"),
    ),
    "gradients-cpu": (
        "gradients_cpu.json",
        if_measured(captioned(gradients_table), "`python benchmarks/gradients.py`"),
    ),
    "kernels-rates": (
        "hopper_rates.json",
        if_measured(captioned(rates_table), "`python benchmarks/hopper_rates.py`"),
    ),
}


if __name__ == "__main__":
    main()
