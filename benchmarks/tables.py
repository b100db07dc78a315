"""Defines the tables of the pages: their results, rows and columns."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import (
    ANY,
    APPENDIX,
    NOTHING,
    PAGES,
    Cell,
    OneOf,
    Other,
    Row,
    Table,
    anchor,
    best,
    bytes_read,
    describe,
    duration,
    joined,
    loss_beyond,
    markdown_table,
    mean,
    milliseconds,
    number,
    of_floor,
    ratio,
    read,
    read_of_dense,
    right,
    right_interval,
    sections,
    select,
    timed,
)

from sketchwalk_jax.memory import show_bytes

DENSE: Row = {"method": "dense"}
AT_01: Row = {"method": "recommended", "density": 0.1}
AT_02: Row = {"method": "recommended", "density": 0.2}
BESIDE: Row = {"method": "dense", "density": 1.0}
PEER: Row = BESIDE | {"implementation": "transformers"}
WEIGHTS = ("bfloat16", "float8", "int8")

# Whole models.

END_TO_END = "python benchmarks/end_to_end.py"
LLAMA: Row = {"model": "llama-3.1-8b", "implementation": "ours"}
SEVERAL: Row = {
    "phase": "decode",
    "batch": OneOf(8, 32),
    "tokens": OneOf(2**12, 2**14, 2**16),
}
WHOLE: dict[str, Any] = {"file": "end_to_end.json", "command": END_TO_END}
SPEEDS = {
    "Dense": (DENSE, timed()),
    "Density 0.2": (AT_02, timed(**BESIDE)),
    "Density 0.1": (AT_01, timed(**BESIDE)),
}


def in_phases(rules: dict[str, Row], cell: Cell | None = None) -> dict[str, tuple[Row, Cell]]:
    """Makes a column of each rule for the first token, and for the next ones."""
    return {
        f"{title}, {name}": (rule | {"phase": phase}, cell or timed(**BESIDE))
        for title, phase in (("First token", "prefill"), ("Next token", "decode"))
        for name, rule in rules.items()
    }


DENSE_AND_01 = {"dense": DENSE, "density 0.1": AT_01}
BY_DENSITY = in_phases({"density 0.2": AT_02, "density 0.1": AT_01})


def busy(row: Row) -> Iterator[Row]:
    """Splits a model's time into rows for each part of the GPU's kernels, and the rest."""
    if not row.get("parts_ms") or row["chunk_size"]:
        return
    for part, ms in row["parts_ms"].items():
        yield row | {"part": part, "ms": ms}
    idle = 1e3 * row["seconds"]["median"] - sum(row["parts_ms"].values())
    yield row | {"part": "waiting for kernels", "ms": max(0.0, idle)}


def awaited(row: Row) -> Iterator[Row]:
    """Adds to a row the part of an answer that a user waits for."""
    yield row | {"part": {"prefill": "first token", "decode": "next token"}[row["phase"]]}


def loaded(row: Row) -> Iterator[Row]:
    """Joins a row's sequences and tokens into one field."""
    yield row | {"load": (row["batch"], row["tokens"])}


# Several GPUs.


def spread(row: Row) -> Iterator[Row]:
    """Adds to a row the number of its GPUs and their mesh axis."""
    yield from (new | {"gpus": (row["ranks"], row["axis"])} for new in loaded(row))


def beside_one(rows: list[Row], other: Other) -> str:
    """Formats the time, and tokens per second relative to one GPU with as many sequences each."""
    own = best(rows)
    if own is None or own["axis"] == "one":
        return timed()(rows, other)
    each = own["batch"] // (own["ranks"] if own["axis"] == "data" else 1)
    same = {"axis": "one", "tokens": own["tokens"], "batch": each}
    one, seconds = best(select(other(gpus=ANY, load=ANY), same)), own["seconds"]["median"]
    faster = own["batch"] / seconds * one["seconds"]["median"] / each if one else None
    return duration(1e3 * seconds) + (f", **{faster:.2f}×**" if faster else "")


def exchanged(rows: list[Row], other: Other) -> str:
    """Formats the bytes that a rank receives, and the share of the time that this takes.

    It is the time of all kernels outside of a layer's parts, beyond that of one GPU: ranks of
    `sequence` share it, those of `tensor` all do it.
    """
    own = rows[0]
    if not own["sent_bytes"]:
        return NOTHING
    text = show_bytes(own["sent_bytes"])
    one = best(other(gpus=ANY, axis="one", ranks=1))
    if not own["parts_ms"] or one is None or not one["parts_ms"]:
        return text
    shared = own["ranks"] if own["axis"] == "sequence" else 1
    more = own["parts_ms"]["rest"] - one["parts_ms"]["rest"] / shared
    return f"{text}, {more / 1e3 / own['seconds']['median']:.0%}"


GATHERED = 235e9
"""Bytes per second that a rank receives, as measured with four H100s."""


def estimated(ranks: int) -> Cell:
    """Estimates a time with more ranks: T(n) = (T(m) − s(m) / g) · m / n + s(n) / g.

    `s(n)` are the bytes that a rank receives, which grow with `1 - 1/n`, and `g` is `GATHERED`.
    """

    def cell(rows: list[Row], _: Other) -> str:
        (row,) = rows
        (measured, sent), own = (row["seconds"]["median"], row["sent_bytes"]), row["ranks"]
        work = (measured - sent / GATHERED) * own / ranks
        received = sent * (1 - 1 / ranks) / (1 - 1 / own)
        return duration(1e3 * (work + received / GATHERED))

    return cell


# Single kernels.


def shaped(row: Row) -> Iterator[Row]:
    """Adds to a row its heads as text, and the times of its forms as fields."""
    heads = row.get("heads") or [row["num_heads"], row["num_kv_heads"]]
    times = {name: form["ms"] for name, form in row.get("forms", {}).items()}
    yield row | times | {"heads": f"{heads[0]}/{heads[1]} × {row['head_dim']}"}


def listed(row: Row) -> Iterator[Row]:
    """Joins a row's tokens, density and block size into one field, and adds times of forms."""
    lists = (row["tokens"], row["density"], row["block_size"])
    yield from (new | {"lists": lists} for new in shaped(row))


def compiled(row: Row) -> Iterator[Row]:
    """Adds to a row on compiled code a description of the computation."""
    part = {"prefill": "attention of prompts", "decode": "attention of tokens"}.get(row["op"])
    if part is not None:
        yield from (new | {"part": part} for new in shaped(row))


def of_dense(rows: list[Row], other: Other) -> str:
    """Formats the speed-up of selection and attention over dense attention."""
    if rows[0]["selection_ms"] is None:
        return NOTHING
    dense = other(method="dense", density=1.0)[0]["attention_ms"]
    return f"{dense / (rows[0]['selection_ms'] + rows[0]['attention_ms']):.2f}×"


def of_matmul(rows: list[Row], _: Other) -> str:
    """Formats the time and rate of products, and its share of a large product's."""
    row = rows[0]
    return f"{duration(row['ms'])}, {row['tflops']:.0f} TFLOP/s, {row['fraction_of_matmul']:.0%}"


def of_xla(rows: list[Row], other: Other) -> str:
    """Formats a mixture's time, the share of the memory's rate, and the speed-up over XLA."""
    share = rows[0].get("fraction_of_copy_bandwidth")
    text = duration(rows[0]["ms"]) + (f", {share:.0%}" if share else "")
    peers = other(form="XLA")
    return text + (f", **{peers[0]['ms'] / rows[0]['ms']:.1f}×**" if peers else "")


GRADIENTS = Table(
    file="gradients_cpu.json",
    command="python benchmarks/kernels.py --op gradient",
    adapt=shaped,
    lines=("heads", "tokens", "density"),
    columns={
        "Dense": ({}, milliseconds("peer_ms")),
        "Over lists": ({}, ratio("ours_ms", "peer_ms")),
    },
    note="One layer, forward and backward.",
)
EXPERTS = Table(
    file="experts.json",
    command="python benchmarks/kernels.py --op experts",
    where={"error": None, "rows": OneOf(2**10, 2**12, 2**14, 2**15)},
    lines=("routing", "rows"),
    columns={
        "Products": ({"form": "products"}, of_matmul),
        "`ragged_dot`": ({"form": "ragged_dot"}, of_matmul),
        "Mixture": ({"form": "mixture"}, of_xla),
    },
    has_gaps=True,
)
SELECTION = {
    "Selection": ({}, milliseconds("selection_ms")),
    "Attention over the lists": ({}, milliseconds("attention_ms")),
    "Both, faster than dense": ({}, of_dense),
}
METHODS = ("paper", "released", "minference", "flexprefill", "quest", "adamas")
SPARSE = {
    title: (
        {"op": op, "density": density, "num_heads": 32, "head_dim": 128, "batch": 1},
        ratio("ours_ms", "peer_ms"),
    )
    for title, op, density in (
        ("Density 0.1", "prefill", 0.1),
        ("Density 0.2", "prefill", 0.2),
        ("Density 1", "prefill", 1.0),
    )
}


def on_a_device(row: Row) -> Iterator[Row]:
    """Keeps a timed row of `sketchwalk bench`."""
    if "seconds" in row:
        yield row


def of_a_device(file: str, model: str, options: str = "") -> Table:
    """Makes the table of a device's times."""
    tasks = {
        "One layer's attention": "attention",
        "First token": "first_token",
        "Next token": "token",
    }
    return Table(
        file=f"devices/{file}",
        command=f"sketchwalk bench --model {model}{options}",
        adapt=on_a_device,
        lines=("tokens",),
        columns={
            title: ({"task": task, "method": "recommended"}, timed(method="dense", density=1.0))
            for title, task in tasks.items()
        },
    )


# First calls: descriptions of the steps, by name.
CALLS = {
    "import": "import of the package",
    "load": "weights from disk",
    "first": "first call, {tokens:,} tokens",
    **dict.fromkeys(("same octave", "other octave", "short"), "{tokens:,} tokens"),
    "density": "density {density:g}",
    "max_new_tokens": "{max_new_tokens} new tokens, not 32",
    "max_tokens": "room for a second turn",
    "second turn": "second turn, {tokens:,} tokens",
    "batch": "{batch} prompts",
    "stream": "`stream`",
    "dense": "`Dense()`",
    "session": "session of {prompts} prompts",
}


def called(row: Row) -> Iterator[Row]:
    """Adds to a row of first calls the description of its call."""
    if row["step"] in CALLS and not row["error"]:
        yield row | {"call": CALLS[row["step"]].format(**row)}


def with_programs(rows: list[Row], _: Other) -> str:
    """Formats the time of a first call, and the number of programs that XLA compiled."""
    text, count = duration(1e3 * rows[0]["first_s"]), rows[0].get("compiled")
    return text if count is None else f"{text}, {count} program{'s' * (count != 1)}"


def when_warm(rows: list[Row], _: Other) -> str:
    """Formats the time of a repeated call."""
    return duration(1e3 * rows[0]["warm_s"]["median"]) if "warm_s" in rows[0] else NOTHING


FIRST_CALL = Table(
    file="first_call.json",
    command="python benchmarks/first_call.py",
    adapt=called,
    lines=("model", "call"),
    columns={
        "Empty cache": ({"cache": "empty"}, with_programs),
        "Later process": ({"cache": "filled"}, with_programs),
        "Again": ({"cache": "empty"}, when_warm),
    },
    note="After a time: the programs that XLA compiled, without those from the cache on disk.",
    has_gaps=True,
)
FIRST_CALL_CPU = dataclasses.replace(FIRST_CALL, file="first_call_cpu.json")


def first_measured(results: Path) -> Table:
    """Returns the table of first calls on a GPU if these were measured, else on a CPU."""
    return FIRST_CALL if (results / FIRST_CALL.file).exists() else FIRST_CALL_CPU


class FirstCall:
    """The table of first calls on a GPU, or on a CPU while no GPU was measured."""

    command = FIRST_CALL_CPU.command

    def write(self, results: Path) -> str:
        """Writes the table, from the folder of results."""
        return first_measured(results).write(results)


class FirstCallSentence(FirstCall):
    """The sentence on the first call of a process, for each model of the same results."""

    def write(self, results: Path) -> str:
        """Writes the sentences, from the folder of results."""
        table = first_measured(results)
        path = results / table.file
        data = read(path) if path.exists() else {"rows": []}
        rows = select(data["rows"], {"step": "first", "error": None})
        sentences = []
        for row in select(rows, {"cache": "empty"}):
            for later in select(rows, {"cache": "filled", "model": row["model"]}):
                found = (row["warm_s"]["median"], row["extra_s"], later["extra_s"])
                warm, first, second = (duration(1e3 * one) for one in found)
                sentences.append(
                    f"With {row['model']}, {row['tokens']:,} tokens and {row['max_new_tokens']} "
                    f"new ones, a repeated call takes {warm}. The first call ever takes {first} "
                    f"more, the first call of a later process {second} more."
                )
        if not sentences:
            return f"To measure: `{table.command}`."
        return f"{' '.join(sentences)} {describe(data['meta'], rows)}"


SCALE = Table(
    file="scale_out.json",
    command="python benchmarks/scale_out.py",
    where={"error": None},
    adapt=spread,
    lines=("model", "load", "gpus"),
    columns={
        "First token": ({"phase": "prefill"}, beside_one),
        "Each further token": ({"phase": "decode"}, beside_one),
    },
    has_gaps=True,
)
SCALE_FOUR = dataclasses.replace(
    SCALE,
    file="scale_out_four.json",
    command="python benchmarks/scale_out.py --ranks 4 --out benchmarks/results/scale_out_four.json",
    where={"error": None, "ranks": OneOf(1, 4)},
)
SENT = dataclasses.replace(
    SCALE,
    where={"error": None, "ranks": 2, "axis": OneOf("sequence", "tensor")},
    columns={
        "For a prompt": ({"phase": "prefill"}, exchanged),
        "For a token": ({"phase": "decode"}, exchanged),
    },
)
TIMES: dict[str, Table] = {
    "gains": Table(
        **WHOLE,
        where=LLAMA | {"batch": 1, "tokens": OneOf(2**12, 2**13, 2**14, 2**16, 2**17, 2**18)},
        lines=("tokens",),
        columns=in_phases({"dense": DENSE, "density 0.2": AT_02}),
    ),
    "one-sequence": Table(
        **WHOLE,
        where=LLAMA | {"batch": 1, "tokens": OneOf(2**12, 2**14, *(2**n for n in range(16, 20)))},
        lines=("tokens",),
        columns=BY_DENSITY,
        has_gaps=True,
    ),
    "other-models": Table(
        **WHOLE,
        where={
            "model": OneOf(
                "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-30b-a3b"
            ),
            "tokens": OneOf(2**14, 2**17, 2**20),
            "batch": 1,
        },
        lines=("model", "tokens"),
        columns={
            "First token": (AT_01 | {"phase": "prefill"}, timed(**BESIDE)),
            "Next token": (AT_01 | {"phase": "decode"}, timed(**BESIDE)),
        },
        has_gaps=True,
    ),
    "transformers": Table(
        file="end_to_end.json",
        command=f"{END_TO_END} --only-transformers",
        where={"model": "llama-3.1-8b", "batch": 1, "tokens": OneOf(2**15, 2**17)},
        adapt=awaited,
        lines=("part", "tokens"),
        columns={
            title: (rule | {"implementation": name}, timed(**beside))
            for title, name, rule, beside in (
                ("transformers", "transformers", DENSE, {}),
                ("Dense", "ours", DENSE, PEER),
                ("Density 0.1", "ours", AT_01, PEER),
            )
        },
    ),
    "batch": Table(
        **WHOLE,
        where=LLAMA | SEVERAL,
        adapt=loaded,
        lines=("load",),
        columns=SPEEDS | {"Density 0.1, of its bound": (AT_01, of_floor)},
        note="The bound is the bytes of weights, attended keys and values, and statistics at the "
        "rate of a copy in the same run.",
    ),
    "batch-models": Table(
        **WHOLE,
        where=LLAMA | SEVERAL | {"model": OneOf("qwen2.5-7b", "qwen3-30b-a3b"), "error": None},
        adapt=loaded,
        lines=("model", "load"),
        columns=SPEEDS,
    ),
    "model-parts": Table(
        **WHOLE,
        where=LLAMA | {"batch": 1, "tokens": 2**17},
        adapt=busy,
        lines=("part",),
        columns=in_phases(DENSE_AND_01, milliseconds("ms")),
        has_gaps=True,
    ),
    "weights": Table(
        file="end_to_end_weights.json",
        command=f"{END_TO_END} --model llama-3.1-8b --without-pieces "
        "--weights bfloat16 --weights float8 --weights int8",
        where={"tokens": 2**17, "batch": 1, "weights": OneOf(*WEIGHTS)},
        lines=("weights",),
        columns=in_phases(DENSE_AND_01, timed(**BESIDE, weights="bfloat16")),
        note="Prompts of float8 and int8 ran with `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`.",
    ),
    "scale": SCALE,
    "scale-four": SCALE_FOUR,
    "scale-sent": SENT,
    "scale-sent-four": dataclasses.replace(
        SCALE_FOUR, where=SENT.where | {"ranks": 4}, columns=SENT.columns
    ),
    "scale-estimate": dataclasses.replace(
        SCALE_FOUR,
        where={"error": None, "phase": "prefill", "ranks": 4},
        columns={
            "8 GPUs, estimate": ({}, estimated(8)),
            "16 GPUs, estimate": ({}, estimated(16)),
        },
    ),
    "kernels": Table(
        file="kernels.json",
        command="python benchmarks/kernels.py",
        lines=("tokens",),
        where={"num_kv_heads": 8},
        columns={"Dense, cuDNN": (SPARSE["Density 1"][0], milliseconds("peer_ms"))} | SPARSE,
    ),
    "kernels-ampere": Table(
        file="warp_prefill.json",
        command="python benchmarks/kernels.py --op other_gpus",
        where={"density": 0.1, "tokens": 2**16},
        adapt=shaped,
        lines=("heads",),
        columns={
            "Dense, cuDNN": ({}, milliseconds("cudnn")),
            "This kernel": ({}, ratio("warps_pages", "cudnn")),
            "Hopper's kernel": ({}, ratio("hopper_pages", "cudnn")),
        },
    ),
    "kernels-torch": Table(
        file="torch_attention.json",
        command="python benchmarks/kernels.py --op torch",
        adapt=listed,
        lines=("lists",),
        columns={
            "This kernel": ({}, milliseconds("ours")),
            "NVIDIA's, sparse": ({}, milliseconds("cudnn_block_sparse")),
            "FlexAttention": ({}, milliseconds("flex_attention")),
            "Dense, cuDNN": ({}, milliseconds("torch_cudnn")),
        },
    ),
    "kernels-code": Table(
        file="ampere_code.json",
        command="python tests/ampere_table.py",
        where={
            "heads": "32/8 × 128",
            "lists": "pages of 16",
            "part": OneOf("attention of prompts", "attention of tokens"),
        },
        adapt=compiled,
        lines=("part", "capability"),
        columns={
            "Registers": ({}, number("registers", "{}")),
            "Bytes spilled": ({}, number("spill_bytes", "{}")),
            "Programs on an SM": ({}, number("programs", "{}")),
        },
    ),
    "kernels-linear": Table(
        file="linear.json",
        command="python benchmarks/kernels.py --op linear --rows 1 --rows 8",
        lines=("product", "rows"),
        columns={
            title: ({"form": form}, milliseconds("ms"))
            for title, form in (
                ("bfloat16", "bfloat16"),
                ("float8", "float8_e4m3fn"),
                ("int8", "int8"),
            )
        },
    ),
    "kernels-experts": dataclasses.replace(
        EXPERTS, note="For 32,768 tokens `ragged_dot` needs more memory than the GPU has."
    ),
    "kernels-experts-tokens": dataclasses.replace(
        EXPERTS,
        where={"error": None, "rows": OneOf(1, 8, 32)},
        lines=("rows",),
        columns={name: ({"form": "mixture", "dtype": name}, of_xla) for name in WEIGHTS},
    ),
    "gradients-cpu": GRADIENTS,
    "gradients": dataclasses.replace(GRADIENTS, file="gradients.json"),
    "selection": Table(
        file="selection.json",
        command="python benchmarks/kernels.py --op selection",
        where={"tokens": 2**16, "method": OneOf("recommended", *METHODS), "error": None},
        lines=("phase", "method"),
        columns=SELECTION,
    ),
    "cpu": Table(
        file="end_to_end_cpu.json",
        command=f"{END_TO_END} --cpu",
        where={"model": "6-layers-of-256", "batch": 1},
        lines=("tokens",),
        columns=BY_DENSITY,
    ),
    "first-call-cpu": FIRST_CALL_CPU,
    "device-epyc": of_a_device("own_epyc_two_cores.json", "models/sketchwalk_8m"),
    "device-h200": of_a_device(
        "h200_qwen2.5_coder_0.5b.json", "FILE.gguf", " --seconds 300 --prompts 5"
    ),
}

# Answers and texts.

TEXT = "--text TEXT.xz --text-tail 0.03"
OUT = "--out benchmarks/results"
REAL = f"python benchmarks/real_models.py --model FILE.gguf {TEXT}"
FIFTY = f"{REAL} --prompts 50"
DEFAULT = "--policy sketchwalk --preset recommended"
EVAL = f"sketchwalk eval {TEXT} --tokens 16384 --density 0.2 {OUT}/quality.json"
TASKS = {
    "Single needle": "single_needle",
    "One of many keys": "multi_key",
    "Mid-prompt": "mid_prompt",
}
ASKED = f"{' '.join(TASKS.values())} text_loss"
ANSWERS: dict[str, Any] = {
    "file": "answers.json",
    "command": f"{FIFTY} {DEFAULT} --task {ASKED} code_loss --probe-prompts 2 --tokens 4096 8192 "
    f"16384 30720 {OUT}/answers.json",
}
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
REPORTED: Row = {"stage": "report", "model": OneOf(*MODELS)}
BEYOND_DENSE = loss_beyond(method="dense")
COMPUTED = mean("measured_density_all_layers", "{:.2f}")
AT_THE_END = ("single_needle", "multi_key")
DECODED = (
    "recommended, 0.2",
    "quest, 0.05",
    "quest, 0.1",
    "quest, 0.2",
    "adamas, 0.1",
    "adamas, 0.2",
)
IN_PHASE = {"Prefill": "prefill", "Decode": "decode", "Prefill and decode": "both"}
QUALITY: dict[str, Any] = {"file": "quality.json", "command": EVAL}
BUNDLED: Row = {"tokens": 2**14, "density": 0.2}
SHOWN = ("dense", "recommended", *METHODS, "damped", "one_hop", "oracle", "streaming", "random")


def answers(density: float) -> Table:
    """Makes the table of dense attention's answers that the default policy keeps, by phase."""
    return Table(
        **ANSWERS,
        where=REPORTED
        | {"method": "recommended", "density": density, "task": OneOf(*TASKS.values())},
        lines=("model", "tokens"),
        columns={title: ({"phase": phase}, right) for title, phase in IN_PHASE.items()},
        has_gaps=True,
    )


def asked(row: Row) -> Iterator[Row]:
    """Adds the density that was asked for to the name of a method."""
    is_dense = row["policy"] == "dense"
    yield row if is_dense else row | {"method": f"{row['method']}, {row['density']:g}"}


def moved(row: Row) -> Iterator[Row]:
    """Adds to a row of quantised weights a description of its attention."""
    dense = row["policy"] == "dense"
    yield row | {"attention": "dense" if dense else f"density {row['density']:g}"}


def weighted(row: Row) -> Iterator[Row]:
    """Splits a row's model into its name and the type of its weights."""
    weights = next((one for one in WEIGHTS if row["model"].endswith(f"-{one}")), WEIGHTS[0])
    own = {"model": row["model"].removesuffix(f"-{weights}"), "weights": weights}
    yield from (new | own for new in moved(row))


def printed(row: Row) -> Iterator[Row]:
    """Makes rows for the lines of a table of the paper, with averages and the longest length."""
    for line in row["rows"]:
        values = dict(zip(row["columns"], line["values"], strict=True))
        own = {"method": line["method"], "model": line["model"]}
        yield {"benchmark": row["benchmark"], "phase": row["phase"]} | own | values


# Claims: text, the two methods to compare, the phase and the tasks.
ONE_FACT = ("single_needle", "multi_key", "mid_prompt")
CLAIMS: tuple[tuple[str, str, str, str, tuple[str, ...] | None], ...] = (
    ("The printed rule is near-lossless", "paper", "dense", "prefill", None),
    ("Means of keys lose facts in prompts", "one_hop", "oracle", "prefill", ONE_FACT),
    ("Means of keys lose facts in decode", "one_hop", "oracle", "decode", ONE_FACT),
    ("Extremes of keys keep them", "quest", "dense", "decode", ONE_FACT),
    ("One list for all heads costs little", "oracle", "dense", "prefill", ONE_FACT),
    ("An even power is worse than chance", "paper", "random", "prefill", None),
    ("The walk helps to follow steps", "damped", "one_hop", "prefill", ("variable_tracking",)),
    ("A dense end answers what is asked there", "released", "one_hop", "prefill", AT_THE_END),
    ("It hides what is lost mid-prompt", "released", "dense", "prefill", ("mid_prompt",)),
)


def claimed(row: Row) -> Iterator[Row]:
    """Makes a row for each claim that the row bears on, with the side it is on."""
    for claim, first, second, phase, tasks in CLAIMS:
        is_asked = row["phase"] == phase and (tasks is None or row["task"] in tasks)
        for side, name in enumerate((first, second)):
            if is_asked and row["method"] == name:
                yield row | {"claim": f"{claim}: `{first}`, `{second}`", "side": side}


def ablated(preset: str) -> Table:
    """Makes the table of a preset with one change at a time."""

    def named(row: Row) -> Iterator[Row]:
        name = row["variant"] or "nothing"
        yield row | {"variant": f"`{name}`" if "=" in name else name}

    loss = loss_beyond(method="dense", preset=None, variant="nothing")
    return Table(
        file="ablations.json",
        command=f"python benchmarks/ablations.py {TEXT}",
        where={"preset": preset, "density": 0.2},
        adapt=named,
        lines=("variant",),
        columns={title: ({"phase": phase}, right_interval) for title, phase in IN_PHASE.items()}
        | {"Text loss beyond dense, prefill": ({"phase": "prefill", "task": "text_loss"}, loss)},
        has_gaps=True,
    )


RESULTS: dict[str, Table] = {
    "losses": answers(0.2),
    "losses-tenth": answers(0.1),
    "by-task": Table(
        **ANSWERS,
        where=REPORTED | {"method": "recommended", "density": 0.1, "phase": "prefill"},
        lines=("model", "tokens"),
        columns={title: ({"task": task}, right) for title, task in TASKS.items()},
    ),
    "methods-prefill": Table(
        file="answers.json",
        command=f"{FIFTY} --policy sketchwalk minference flexprefill --preset recommended --phase "
        f"prefill --dense-layers 0 --task {ASKED} --tokens 16384 {OUT}/answers.json",
        where=REPORTED | {"phase": "prefill", "tokens": 2**14},
        adapt=asked,
        lines=("model", "method"),
        columns={
            "One of many keys: kept, computed": ({"task": "multi_key"}, joined(right, COMPUTED)),
            "Mid-prompt: kept, computed": ({"task": "mid_prompt"}, joined(right, COMPUTED)),
            "Text loss beyond dense": ({"task": "text_loss"}, BEYOND_DENSE),
        },
    ),
    "methods-decode": Table(
        file="answers.json",
        command=f"{FIFTY} --policy sketchwalk quest adamas --preset recommended --density 0.05 0.1 "
        f"0.2 --phase decode --dense-layers 0 --task {ASKED} --probe-prompts 2 --tokens 8192 "
        f"{OUT}/answers.json",
        where=REPORTED | {"phase": "decode", "tokens": 8192, "method": OneOf(*DECODED)},
        adapt=asked,
        lines=("model", "method"),
        columns={
            "Question at the end: kept, read": (
                {"task": OneOf(*AT_THE_END)},
                joined(right, read_of_dense),
            ),
            "Mid-prompt: kept, read": ({"task": "mid_prompt"}, joined(right, read_of_dense)),
        },
    ),
    "text-loss": Table(
        **ANSWERS,
        where=REPORTED | {"method": "recommended", "phase": "both"},
        lines=("model", "tokens"),
        columns={
            "English, density 0.2": ({"task": "text_loss", "density": 0.2}, BEYOND_DENSE),
            "English, density 0.1": ({"task": "text_loss", "density": 0.1}, BEYOND_DENSE),
            "Code, density 0.1": ({"task": "code_loss", "density": 0.1}, BEYOND_DENSE),
        },
    ),
    "continuations": Table(
        file="continuations.json",
        command=f"{REAL} --prompts 200 {DEFAULT} --task long_decode --phase decode both "
        f"--tokens 4096 {OUT}/continuations.json",
        where=REPORTED | {"method": "recommended", "density": 0.1, "phase": "both"},
        lines=("model",),
        columns={
            "Same likeliest token": ({}, number("agreement", "{:.1%}")),
            "Loss beyond dense": ({}, BEYOND_DENSE),
        },
    ),
    "weights-loss": Table(
        file="answers_weights.json",
        command=f"{FIFTY} {DEFAULT} --density 0.2 --phase both --tokens 4096 --task text_loss "
        f"multi_key single_needle [--weights TYPE] {OUT}/answers_weights.json",
        where={
            "stage": "report",
            "tokens": 4096,
            "model": OneOf(*MODELS),
            "method": OneOf("dense", "recommended"),
        },
        adapt=weighted,
        lines=("model", "weights", "attention"),
        has_gaps=True,
        columns={
            "Loss beyond bfloat16, dense": (
                {"task": "text_loss"},
                loss_beyond(2, percent=True, weights="bfloat16", attention="dense"),
            ),
            "Answers kept": ({}, right),
        },
    ),
    "weights-moved": Table(
        file="quantized_weights.json",
        command=f"python benchmarks/quantized_weights.py --model FILE.gguf {TEXT}",
        where={"part": "all layers", "weights": OneOf("float32", *WEIGHTS)},
        adapt=moved,
        lines=("model", "weights", "attention"),
        columns={
            "KL divergence": ({}, mean("kl", "{:.4f}")),
            "Same likeliest token": ({}, mean("agreement", "{:.1%}")),
        },
    ),
    "rounding": Table(
        file="answers.json",
        command=f"{FIFTY} {DEFAULT} --density 1 --phase prefill --task multi_key mid_prompt "
        f"--tokens 4096 8192 {OUT}/answers.json",
        where=REPORTED | {"method": "recommended", "density": 1.0},
        lines=("model", "tokens"),
        columns={title: ({"task": task}, right_interval) for title, task in [*TASKS.items()][1:]},
    ),
    "bundled": Table(
        **QUALITY,
        where=BUNDLED | {"method": OneOf(*SHOWN)},
        lines=("method",),
        columns={title: ({"phase": phase}, right_interval) for title, phase in IN_PHASE.items()}
        | {"Text loss": ({"task": "text_loss"}, mean("text_loss", "{:.3f}"))},
        has_gaps=True,
    ),
    "printed-rule": Table(
        file="real_models.json",
        command=f"{FIFTY} --policy sketchwalk oracle --preset paper damped one_hop released "
        "--density 0.2 --dense-layers 2 --phase prefill both --task single_needle multi_key "
        f"mid_prompt --tokens 8192 16384 {OUT}/real_models.json",
        where=REPORTED
        | {"density": 0.2, "method": OneOf("paper", "damped", "one_hop", "released", "oracle")},
        lines=("model", "tokens", "method"),
        columns={
            title: ({"phase": phase}, right_interval)
            for title, phase in (("Prefill", "prefill"), ("Prefill and decode", "both"))
        },
    ),
    "compared-bytes": Table(
        **QUALITY,
        where=BUNDLED
        | {"phase": "decode", "method": OneOf("dense", "recommended", "paper", "quest", "adamas")},
        lines=("method",),
        columns={
            "Question read": (
                {"task": OneOf(*AT_THE_END, "multi_query", "multi_value", "aggregation")},
                right_interval,
            ),
            "Question decoded": (
                {"task": OneOf("variable_tracking", "mid_prompt")},
                right_interval,
            ),
            "MiB read per token, of dense": ({}, bytes_read),
        },
    ),
    "claims": Table(
        **QUALITY,
        where=BUNDLED,
        adapt=claimed,
        lines=("claim",),
        columns={
            "First": ({"side": 0}, right_interval),
            "Second": ({"side": 1}, right_interval),
        },
    ),
    "ablations-paper": ablated("paper"),
    "ablations-damped": ablated("damped"),
} | {
    f"paper-{benchmark.lower()}": Table(
        file="paper.json",
        command="arXiv:2602.07397",
        where={"benchmark": benchmark},
        adapt=printed,
        lines=("model", "phase", "method"),
        columns={title: ({}, number(title)) for title in titles},
    )
    for benchmark, titles in {
        "RULER": ("64K", "average"),
        "LongBench": ("average", "average_without_passage_count"),
    }.items()
}


class BreakEven:
    """The lengths from which on the default policy is sparse."""

    def write(self, results: Path) -> str:
        """Writes the sentence, from the folder of results."""
        import break_even  # imports the package

        return break_even.sentence(results)


class Commands:
    """The table of the commands that measured the other tables."""

    def write(self, results: Path) -> str:
        """Writes the table: each command, and the sections of the pages with its tables."""
        found: dict[str, dict[str, None]] = {}
        for page in PAGES:
            for title, name in sections(page.read_text(encoding="utf-8")):
                command = getattr(TABLES[name], "command", "")
                if " " in command:  # published figures have a source instead
                    place = os.path.relpath(page, APPENDIX).replace(os.sep, "/")
                    link = f"[{page.stem}: {title}]({place}#{anchor(title)})"
                    found.setdefault(command, {})[link] = None
        lines = [[f"`{command}`", ", ".join(links)] for command, links in found.items()]
        return markdown_table(["Command", "Tables"], lines, num_names=2)


TABLES: dict[str, Table | BreakEven | FirstCall | Commands] = {
    **TIMES,
    **RESULTS,
    "break-even": BreakEven(),
    "first-call": FirstCall(),
    "first-call-sentence": FirstCallSentence(),
    "commands": Commands(),
}
