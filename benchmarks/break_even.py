"""Finds break-even lengths, from which sparse attention is worth its losses, for `Auto`.

From them `report.py` writes `sketchwalk_jax/inference/break_even.json`, which ships with the
package, and a sentence of README.md. Rows of `results/end_to_end.json` and `end_to_end_cpu.json`
give the lengths of whole models on a GPU and on a CPU. `results/break_even.json` holds what is
expected of GPUs that were not measured (docs/answered.md, "XLA on GPUs").
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import common
from end_to_end import CPU_MODELS, MODELS

from sketchwalk_jax.inference.auto import BreakEven, attention_width
from sketchwalk_jax.pallas_kernels.dispatch import GPU_GROUPS
from sketchwalk_jax.policies import by_name

DENSITY = 0.2  # of the default policy
EXPECTED, MEASURED = "break_even.json", ("end_to_end.json", "end_to_end_cpu.json")
GAINS = {"prefill": 1.15, "decode": 1.03}
"""Least ratio of the times of dense and sparse attention at which a phase is sparse.

A smaller gain is not worth the answers that are lost, which are two to four times as many if a
prompt is read sparsely as if tokens are decoded sparsely (docs/answered.md, "Minimum of keys").
"""
SHORT = 8192  # tokens; a policy that pays from this length on may pay at all lengths
TABLE = common.ROOT / "sketchwalk_jax" / "inference" / "break_even.json"
Row = dict[str, Any]


def break_evens(results: Path) -> list[BreakEven]:
    """Lists all break-evens of the existing results, measured ones first; see `GAINS`.

    Args:
      results: Folder of the results.

    Raises:
      ValueError: If results come from a run with `--quick` or from several versions of the code,
        or if what is expected names a measured device.
    """
    measured: list[BreakEven] = []
    for name in MEASURED:
        data = common.read_results(results / name)
        common.check_publishable(name, data)
        # `Auto` looks up a policy's class and density, which other presets may share.
        rows = [row for row in speedups(data) if row["preset"] == "recommended"]
        measured += of_rows(rows, data["meta"].get("device", ""))
    # Hopper GPUs run the code of the one that was measured.
    own = [one for one in measured if one.device != "cpu"]
    same = [dataclasses.replace(one, device=GPU_GROUPS[0]) for one in own]
    expected = [BreakEven(**row) for row in common.read_results(results / EXPECTED)["rows"]]
    if not all(one.is_expected for one in expected):
        raise ValueError(f"{EXPECTED} must hold only rows of {', '.join(GPU_GROUPS)}")
    return [*measured, *same, *expected]


def speedups(data: dict[str, Any]) -> Iterator[Row]:
    """Compares sparse rows of `end_to_end.py` with the fastest dense attention.

    Dense attention may read the prompt in pieces; policies read it in one, as by default. Its lower
    quartile is compared with their upper one, so that chance does not make a policy pay. Nor does a
    policy pay where it keeps all keys.
    """
    names, models = ("model", "phase", "tokens", "batch"), MODELS | CPU_MODELS
    rows = [row for row in data["rows"] if row["implementation"] == "ours" and not row["error"]]
    dense: dict[tuple[Any, ...], float] = {}
    for row in rows:
        where, found = tuple(row[name] for name in names), row["seconds"]["q25"]
        if row["policy"] == "dense":
            dense[where] = min(found, dense.get(where, found))
    for row in rows:
        where = tuple(row[name] for name in names)
        if row["policy"] != "dense" and not row["chunk_size"] and where in dense:
            ratio = dense[where] / row["seconds"]["q75"]
            if row.get("measured_density") == 1.0:
                ratio = min(ratio, 1.0)
            config = models[row["model"]]
            width = attention_width(row["phase"], config, batch=row["batch"])
            yield row | {"width": width, "has_experts": config.num_experts > 0, "speedup": ratio}


def of_rows(rows: list[Row], device: str) -> list[BreakEven]:
    """Finds the break-even of each setting whose lengths determine one."""
    names = ("phase", "policy", "preset", "density", "width", "has_experts")
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        own, tokens = groups.setdefault(key, {}), row["tokens"]
        own[tokens] = min(row["speedup"], own.get(tokens, math.inf))  # of calls of equal width
    found = []
    for (phase, name, preset, density, width, has_experts), by_length in groups.items():
        tokens = least_tokens(by_length, GAINS[phase])
        if not is_known(tokens, by_length):
            continue
        policy = by_name(name, preset=preset, density=density)
        found.append(
            BreakEven(
                device=device,
                phase=phase,
                policy=type(policy).__name__,
                density=density,
                block_size=policy.block_size,
                width=width,
                has_experts=has_experts,
                tokens=tokens,
                longest=max(by_length),
            )
        )
    return found


def least_tokens(by_length: Mapping[int, float], gain: float) -> int | None:
    """Finds the least length from which on no ratio is below `gain`; None if the longest's is."""
    found = None
    for tokens in sorted(by_length, reverse=True):
        if by_length[tokens] < gain:
            break
        found = tokens
    return found


def is_known(tokens: int | None, by_length: Mapping[int, float]) -> bool:
    """Whether the measured lengths locate the break-even: some lose below it, or they start short.

    The gain grows with the length: a policy that pays at a long length may lose at shorter ones,
    but one that does not pay at the longest length pays at no shorter one.
    """
    shortest = min(by_length)
    return tokens is None or tokens > shortest or shortest <= SHORT


def table_text(results: Path) -> str:
    """Formats the package's table as JSON with one row per line."""
    lines = (json.dumps(dataclasses.asdict(one)) for one in break_evens(results))
    return '{"rows": [\n' + ",\n".join(f" {line}" for line in lines) + "\n]}\n"


def update_table(results: Path, *, is_check: bool) -> bool:
    """Rewrites the package's table, or only reports differences; returns whether it was current."""
    text = table_text(results)
    is_right = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
    if not is_right and is_check:
        print(f"{TABLE.name} differs from the results")
    elif not is_right:
        TABLE.write_text(text, encoding="utf-8")
    return is_right


def sentence(results: Path) -> str:
    """Writes for README.md from which length on the default policy pays."""
    own = [one for one in break_evens(results) if not one.is_expected and one.density == DENSITY]
    own = [one for one in own if one.policy == "RecommendedConfig"]
    parts = []
    for device in dict.fromkeys(one.device for one in own):
        some = []
        for phase, what in (("prefill", "to read prompts of"), ("decode", "to decode after")):
            found = [one for one in own if (one.device, one.phase) == (device, phase)]
            some += [f"{what} {_span(found)}"] if found else []
        parts.append(f"on {_device(device)} {' and '.join(some)}")
    return (
        f"By default (`Auto`), attention is sparse only where that pays: a prompt must be read "
        f"{GAINS['prefill']:g} times as fast as with dense attention, a token decoded "
        f"{GAINS['decode']:g} times as fast. At density {DENSITY:g}, it pays "
        f"{', and '.join(parts)}. The ranges cover models of several sizes and, in decode, 1 to 32 "
        "sequences (1 to 8 on a CPU)."
    )


def _span(found: list[BreakEven]) -> str:
    """Formats the range of break-evens over the measured widths."""
    if any(one.tokens is None for one in found):
        return f"no length up to {max(one.longest for one in found):,} tokens"
    tokens = sorted({one.tokens for one in found if one.tokens is not None})
    shown = f"{tokens[0]:,}" + (f" to {tokens[-1]:,}" if len(tokens) > 1 else "")
    return f"{shown} tokens or more"


def _device(kind: str) -> str:
    return "a CPU" if kind == "cpu" else f"an {kind}"
