"""Tables and the figure of `results/scale_out.json`: whole models on several GPUs, and an estimate.

    python benchmarks/scale_out.py           # on GPUs of one host
    python benchmarks/scale_out_report.py    # draws plots/scale_out.png, writes its tables

`report.py` writes the tables alone, with all others.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import Results, Tables, captioned, describe_absent, if_measured, write_own_tables
from scale_out import RULE, SHAPES, prompt_flops, sent_bytes
from scale_out import cells as all_cells

from sketchwalk_jax.evaluation.tables import NOTHING, markdown_table, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
_FILE, _DPI = "scale_out.json", 120
_MAIN, _TOKENS = "llama-3.1-8b", 2**17
_COMMAND = "`python benchmarks/scale_out.py`"
_COLOURS = {"one": "black", "sequence": "#0072B2", "tensor": "#D55E00"}
NETWORK_GB_PER_S = 50.0
"""Between hosts, what each GPU is assumed to receive: a card of 400 Gbit/s for each."""
# GPUs along `tensor` and along `sequence` in prefill, or `data` in decode. Hosts have eight.
_MESHES = ((1, 1), (2, 1), (1, 2), (8, 1), (1, 8), (8, 8))
_PER_HOST = 8
# Parts of a prompt's time that ranks of an axis share; the others all of them take.
_SHARED = {
    "tensor": ("linear", "attention", "observing", "scores"),
    "sequence": ("linear", "attention", "scores", "walk and lists", "rest"),
}


def main() -> None:
    """Draws the figure and writes the tables."""

    def draw(results: Path, plots: Path) -> None:
        data = json.loads((results / _FILE).read_text(encoding="utf-8"))
        scale_figure(data).savefig(plots / "scale_out.png", dpi=_DPI)

    write_own_tables(__doc__, TABLES, draw)


def _rows(data: Results, phase: str) -> list[Row]:
    return [row for row in data["rows"] if row["phase"] == phase]


def _absent(data: Results, phase: str) -> list[str]:
    """What there is no row of."""
    ranks = data["meta"]["max_ranks"]
    whole = [one for one in all_cells(ranks, is_quick=False) if one.phase == phase]
    lengths = sorted({one.tokens for one in whole})
    wanted: dict[str, tuple[str, dict[Any, str]]] = {
        "model": ("{}", {one.model: one.model for one in whole}),
        "axis": ("by {}", {one.axis: f"`{one.axis}`" for one in whole}),
        "tokens": ("{} tokens", {tokens: f"{tokens:,}" for tokens in lengths}),
        "policy": ("{}", {one.rule.policy: _of_rule(one.rule.policy) for one in whole}),
    }
    return describe_absent(data, _COMMAND, wanted, phase=phase)


def _of_rule(policy: str) -> str:
    return "dense attention" if policy == "dense" else RULE.preset or policy


def _name(row: Row) -> str:
    name = row["preset"] or row["policy"]
    return name if row["policy"] == "dense" else f"{name_of(name)} {row['density']:g}"


def _speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times as many tokens in a second as on one GPU, with as many sequences for each."""
    batch = row["batch"] // row["ranks"] if row["axis"] == "data" else row["batch"]
    same = ("model", "tokens", "policy", "preset", "density")
    for one in rows:
        is_same = all(one[name] == row[name] for name in same) and one["batch"] == batch
        if one["axis"] == "one" and is_same and not one["error"] and one is not row:
            rates = [x["batch"] / x["seconds"]["median"] for x in (row, one)]
            return rates[0] / rates[1]
    return None


def _table(data: Results, phase: str, what: str, *, factor: float, digits: int) -> str:
    rows = _rows(data, phase)
    if not rows:
        return ""
    order = {"one": 0, "sequence": 1, "tensor": 2, "data": 3}
    body = []
    for row in sorted(
        rows, key=lambda x: (x["model"], x["policy"] == "dense", x["tokens"], order[x["axis"]])
    ):
        where = "one GPU" if row["axis"] == "one" else f"`{row['axis']}` of {row['ranks']}"
        cells = [row["model"], _name(row), where, f"{row['tokens']:,}", str(row["batch"])]
        if row["error"]:
            body.append([*cells, row["error"].split(":")[0], NOTHING, NOTHING, NOTHING])
            continue
        value, speedup = row["seconds"]["median"], _speedup(row, rows)
        cells += [f"{value * factor:.{digits}f}"]
        cells += [NOTHING if speedup is None else f"**{speedup:.2f}×**"]
        cells += [f"{value / row['floor_seconds']:.2f}", _bytes(row["sent_bytes"])]
        body.append(cells)
    unit = "Seconds" if factor == 1 else "ms"
    header = ("Model", "Policy", "GPUs", "Tokens", "Batch", unit, "Beside one GPU", "Of its floor")
    return f"{markdown_table((*header, 'Received'), body, num_names=3)}\n\n{what}"


def _bytes(count: float) -> str:
    """Bytes for reading."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def prefill_table(data: Results) -> str:
    """Time to the first token."""
    what = (
        "Seconds to the first token, medians. Floors are the arithmetic of linear layers and "
        "attended pairs at the rate of a large matrix product, shared by all GPUs; received is "
        "what one GPU gets from others in all layers."
    )
    return _table(data, "prefill", what, factor=1.0, digits=2)


def decode_table(data: Results) -> str:
    """Time of one decoded token of every sequence."""
    what = (
        "Milliseconds of one step, a token for each sequence, medians; beside one GPU in tokens "
        "per second, by `data` with as many sequences for each GPU. Floors are the bytes of "
        "weights, attended keys and values, and statistics at the rate of a copy, shared by all "
        "GPUs."
    )
    return _table(data, "decode", what, factor=1e3, digits=2)


def lists_table(data: Results) -> str:
    """What ranks select, beside each other and one GPU."""
    body = []
    for row in _rows(data, "lists"):
        cells = [row["model"], f"`{row['axis']}` of {row['ranks']}", f"{row['tokens']:,}"]
        if row["error"]:
            body.append([*cells, row["error"].split(":")[0], NOTHING])
            continue
        share = row["differing_blocks"] / row["listed_blocks"]
        cells += ["bit-equal" if row["lists_equal_on_ranks"] else "**different**"]
        body.append(
            [*cells, f"{row['differing_blocks']:,} of {row['listed_blocks']:,} ({share:.2g})"]
        )
    if not body:
        return ""
    header = ("Model", "GPUs", "Tokens", "Lists on all ranks", "Blocks that one GPU does not list")
    return markdown_table(header, body, num_names=2)


def estimate(data: Results, phase: str, tensor: int, others: int) -> Row | None:
    """Seconds of a mesh, from the parts that were measured on one GPU and how fast ranks send.

    With `t` ranks of `tensor` and `s` of `sequence` in prefill, a part that ranks of an axis share
    takes its time over `t`, `s` or both; to these come the time between kernels, which nobody
    shares, and what a rank receives over how fast that was measured, between hosts over
    `NETWORK_GB_PER_S` at most. In decode `others` are ranks of `data`, whose sequences are added.

    Args:
      data: The results.
      phase: `"prefill"` or `"decode"`.
      tensor: Ranks of `tensor`.
      others: Ranks of `sequence` in prefill, of `data` in decode.

    Returns:
      Seconds, and arithmetic and bytes received of one GPU; `None` without measured parts.
    """
    found = [
        row
        for row in _rows(data, phase)
        if row["axis"] == "one"
        and (row["model"], row["tokens"], row["preset"]) == (_MAIN, _TOKENS, RULE.preset)
        and not row["error"]
        and row.get("parts_ms")
    ]
    rates: dict[str, float] = {}
    for own in data["meta"]["rates"].values():
        rates |= own
    if not found or "sum_gb_per_s" not in rates:
        return None
    (row,) = found
    config, is_token = SHAPES[_MAIN], phase == "decode"
    rows = 1 if is_token else others
    seconds = row["seconds"]["median"] - sum(row["parts_ms"].values()) / 1e3
    seconds = max(seconds, 0.0)
    for part, milliseconds in row["parts_ms"].items():
        shares = tensor if part in _SHARED["tensor"] else 1
        shares *= rows if part in _SHARED["sequence"] else 1
        seconds += milliseconds / 1e3 / shares
    where: dict[str, Any] = {"policy": RULE.make(), "batch": row["batch"], "tokens": _TOKENS}
    where |= {"chunk_size": row["chunk_size"], "is_token": is_token}
    summed = sent_bytes(config, axis="tensor", ranks=tensor, **where) / rows
    gathered = 0.0
    if rows > 1:
        gathered = sent_bytes(config, axis="sequence", ranks=rows, **where) / tensor
    is_far = tensor * rows > _PER_HOST
    rate = min(rates["gather_gb_per_s"], NETWORK_GB_PER_S if is_far else float("inf"))
    seconds += summed / rates["sum_gb_per_s"] / 1e9 + gathered / rate / 1e9
    if is_token and tensor > 1:  # two sums and one gathering of scores in each layer
        seconds += 3 * config.num_layers * rates["small_sum_us"] / 1e6
    work = prompt_flops(config, _TOKENS, row["measured_density"]) / tensor / rows
    return {
        "seconds": seconds,
        "tokens_per_s": row["batch"] * others / seconds,
        "flops": work,
        "bytes": summed + gathered,
    }


def estimate_table(data: Results) -> str:
    """What larger meshes should give."""
    body = []
    for tensor, others in _MESHES:
        read, token = (estimate(data, phase, tensor, others) for phase in ("prefill", "decode"))
        if read is None or token is None:
            return ""  # of one GPU parts, of several how fast they send, must have been measured
        axis = {(1, 1): "one"}.get((tensor, others), "tensor" if others == 1 else "sequence")
        measured = [
            f"{row['seconds']['median']:.2f}"
            for row in _rows(data, "prefill")
            if (row["axis"], row["ranks"]) == (axis, tensor * others)
            and (row["model"], row["tokens"], row["preset"]) == (_MAIN, _TOKENS, RULE.preset)
            and not row["error"]
        ]
        cells = [str(tensor * others), str(tensor), str(others), f"{read['seconds']:.2f}"]
        cells += [measured[0] if measured else NOTHING]
        cells += [f"{read['flops'] / 1e12:,.0f}", _bytes(read["bytes"])]
        body.append([*cells, f"{token['tokens_per_s']:.0f}", _bytes(token["bytes"])])
    header = ("GPUs", "`tensor`", "`sequence`, in decode `data`", "TTFT, s", "Measured, s")
    header += ("TFLOP of a GPU", "Received", "Tokens per second", "Received for a token")
    what = (
        f"On paper: {_MAIN}, {_TOKENS:,} tokens, {RULE.preset} at density {RULE.density:g}, one "
        "sequence, in decode one for each rank of `data`. Parts of the time on one GPU, of which "
        "ranks share what `scale_out_report.py` says, the time between kernels as it is, and bytes "
        "over the measured rates; between hosts, of eight GPUs each, "
        f"{NETWORK_GB_PER_S:g} GB/s for a GPU are assumed."
    )
    return f"{markdown_table(header, body, num_names=1)}\n\n{what}"


def scale_figure(data: Results) -> "Figure":
    """Time to the first token against the prompt, by axis; and against GPUs, on paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for axis, colour in _COLOURS.items():
        line = sorted(
            (row["tokens"], row["seconds"]["median"])
            for row in _rows(data, "prefill")
            if row["axis"] == axis and row["model"] == _MAIN and row["preset"] and not row["error"]
        )
        if line:
            label = "one GPU" if axis == "one" else f"two GPUs by {axis}"
            panels[0].plot(*zip(*line, strict=True), marker="o", color=colour, label=label)
    panels[0].set_xscale("log", base=2)
    panels[0].set_yscale("log")
    panels[0].set_xlabel("tokens")
    panels[0].set_title(f"{_MAIN}: seconds to the first token", fontsize=10)
    for axis in ("tensor", "sequence"):
        sizes = (1, 2, 4, 8)
        found = [
            estimate(data, "prefill", *((n, 1) if axis == "tensor" else (1, n))) for n in sizes
        ]
        values = [one["seconds"] for one in found if one is not None]
        if len(values) == len(sizes):
            panels[1].plot(sizes, values, marker="o", color=_COLOURS[axis], label=f"by {axis}")
    panels[1].set_xlabel("GPUs")
    panels[1].set_title(f"{_MAIN}, {_TOKENS // 1024}K tokens: seconds, on paper", fontsize=10)
    panels[1].set_ylim(bottom=0)
    for panel in panels:
        panel.grid(axis="y", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=9)
    return figure


def _nothing(data: Results) -> list[str]:
    return []


def _of(make: Any, gaps: Any, **where: Any) -> Any:
    return _FILE, if_measured(captioned(make, _COMMAND, gaps, **where), _COMMAND)


TABLES: Tables = {
    "scale-prefill": _of(prefill_table, lambda data: _absent(data, "prefill"), phase="prefill"),
    "scale-decode": _of(decode_table, lambda data: _absent(data, "decode"), phase="decode"),
    "scale-lists": _of(lists_table, lambda data: _absent(data, "lists"), phase="lists"),
    "scale-estimate": _of(estimate_table, _nothing, axis="one", tokens=_TOKENS),
}


if __name__ == "__main__":
    main()
