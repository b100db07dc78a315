"""Makes up evaluation results, with every kind of row that a real evaluation writes."""

import functools
import zlib
from typing import Any

import numpy as np
from scipy.stats import binomtest

from sketchwalk_jax.evaluation.results import Results

TASKS = (
    "single_needle",
    "multi_key",
    "multi_query",
    "multi_value",
    "variable_tracking",
    "mid_prompt",
    "aggregation",
    "text_loss",
)
DENSE = ("dense", None)
LONGEST = 16384  # default longest prompt, in tokens
# Made-up share of right answers at density 0.2, mass recall, and loss beyond dense attention.
POLICIES: dict[tuple[str, str | None], tuple[float, float, float]] = {
    DENSE: (0.97, 1.0, 0.0),
    ("streaming", None): (0.25, 0.8, 0.03),
    ("random", None): (0.18, 0.69, 0.16),
    ("oracle", None): (0.93, 0.86, 0.01),
    ("sketchwalk", "paper"): (0.1, 0.67, 0.18),
    ("sketchwalk", "damped"): (0.3, 0.78, 0.06),
    ("sketchwalk", "one_hop"): (0.32, 0.79, 0.05),
    ("sketchwalk", "released"): (0.6, 0.85, 0.02),
}
# Policies that select in one phase only, and their calibrated settings.
RIVALS: dict[tuple[str, str | None], tuple[float, float, float]] = {
    ("minference", None): (0.7, 0.88, 0.02),
    ("flexprefill", None): (0.8, 0.9, 0.01),
    ("quest", None): (0.95, 0.9, 0.01),
    ("adamas", None): (0.9, 0.85, 0.02),
}
ONE_PHASE = {
    "minference": "prefill",
    "flexprefill": "prefill",
    "quest": "decode",
    "adamas": "decode",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "minference": {"scale": 0.22656},
    "flexprefill": {"gamma": 0.5, "min_budget": 128},
    "adamas": {"thresholds": [-1.25, 0.03125, 1.25]},
}
META: dict[str, Any] = {
    "model": {"name": "made-up", "sha256": {"model.safetensors": "00" * 32}},
    "text": {"name": "made-up text", "sha256": "11" * 32, "tail": 1.0},
    "seed": 0,
    "prompts": 40,
    "dtype": "float32",
    "device": "cpu",
    "cpu": "Some CPU",
    "cores": 2,
    "memory_gib": 24,
    "versions": {"python": "3.12.1", "jax": "0.12.0", "numpy": "2.0.0"},
    "date": "2026-01-01",
    "command": "sketchwalk eval",
    "wall_s": 61.5,
}


def make_results(**options: Any) -> dict[str, Any]:
    """Returns `{"meta": ..., "rows": ...}`; options are passed to `make_rows`."""
    return {"meta": dict(META), "rows": make_rows(**options)}


def whole(**options: Any) -> Results:
    """Returns the results as `read_results` returns them."""
    results = make_results(**options)
    return Results(meta=results["meta"], rows=tuple(results["rows"]))


def make_rows(
    *,
    policies: dict[tuple[str, str | None], tuple[float, float, float]] = POLICIES,
    tasks: tuple[str, ...] = TASKS,
    lengths: tuple[int, ...] = (4096, 8192, 16384),
    densities: tuple[float, ...] = (0.1, 0.2),
    phases: tuple[str, ...] = ("prefill", "decode", "both"),
    prompts: int = 40,
    num_layers: int = 12,
    has_bytes: bool = False,
) -> list[dict[str, Any]]:
    """Returns rows in the order of an evaluation; the same options give the same rows.

    With `has_bytes` they include the fields that older files lack.
    """
    rows = []
    for (policy, preset), skill in policies.items():
        is_dense = policy == "dense"
        own = [one for one in phases if one == ONE_PHASE.get(policy, one)]
        for phase in ("both",) if is_dense else own:
            for density in _nominal(policy, preset, densities):
                for task in tasks:
                    for tokens in lengths:
                        setting = {
                            "policy": policy,
                            "preset": preset,
                            "phase": phase,
                            "task": task,
                            "tokens": tokens,
                            "density": density,
                        }
                        found = _task_rows(setting, skill, prompts, num_layers)
                        rows += [row | _newer(row) for row in found] if has_bytes else found
    return rows


def _newer(row: dict[str, Any]) -> dict[str, Any]:
    """Returns fields that older files lack: a dense token reads 512 bytes per key and layer."""
    is_dense = row["policy"] == "dense"
    num_dense = None if is_dense else 2 * (ONE_PHASE.get(row["policy"]) != "prefill")
    read = 12 * 256.0 * row["tokens"] * row["measured_density_all_layers"]
    parts = dict.fromkeys(("keys", "values", "metadata"))
    if (is_dense or row["phase"] != "prefill") and row["depth"] is None:
        parts = {"keys": read, "values": read, "metadata": 0.0 if is_dense else read / 8}
    return {
        "settings": SETTINGS.get(row["policy"]),
        "dense_layers": num_dense,
        **{f"decode_bytes_{name}": value for name, value in parts.items()},
    }


def _nominal(policy: str, preset: str | None, densities: tuple[float, ...]) -> tuple[Any, ...]:
    if policy == "dense":
        return (1.0,)
    return (None,) if preset == "released" else densities


def _task_rows(
    setting: dict[str, Any], skill: tuple[float, float, float], prompts: int, num_layers: int
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(zlib.crc32(repr(setting).encode()))
    exact, recall, loss = skill
    density = setting["density"] or 0.44
    is_dense = setting["policy"] == "dense"
    exact *= {0.1: 0.6}.get(density, 1.0) * {"decode": 0.7, "prefill": 1.0}.get(
        setting["phase"], 1.0 if is_dense else 0.5
    )
    measured = 1.0 if is_dense else min(density * (1 + 64 / setting["tokens"]), 1.0)
    by_layer = [round(recall - 0.02 * abs(layer - 6), 4) for layer in range(2, num_layers)]
    has_probe = not is_dense and setting["phase"] == "prefill"
    base = setting | {
        "measured_density_sparse_layers": measured,
        "measured_density_all_layers": (2 + (num_layers - 2) * measured) / num_layers,
        "exact": None,
        "exact_low": None,
        "exact_high": None,
        "prompts": prompts,
        "depth": None,
        "hops": None,
        "text_loss": None,
        "mass_recall": float(np.mean(by_layer)) if has_probe else None,
        "mass_recall_by_layer": [None, None, *by_layer] if has_probe else None,
        "output_error_by_layer": [None, None, *(round(1 - one, 4) for one in by_layer)]
        if has_probe
        else None,
        "is_right": None,
        "text_losses": None,
    }
    if setting["task"] == "text_loss":
        # All policies share prompts: a prompt that is hard for one is hard for all.
        hard = np.random.default_rng(1).normal(1.2, 0.2, prompts)
        more = loss * (1.5 if density == 0.1 else 1.0) + rng.normal(0, 0.01, prompts)
        losses = [round(float(one), 5) for one in hard + (0 if is_dense else more)]
        return [base | {"text_loss": float(np.mean(losses)), "text_losses": losses}]
    if setting["task"] == "variable_tracking":
        chances = {hops: exact * (1.1 - 0.1 * hops) for hops in (2, 3, 4)}
        return [
            base | {"hops": hops} | _score(rng.random(prompts) < chance)
            for hops, chance in chances.items()
        ]
    is_right = rng.random(prompts) < exact
    if setting["task"] != "single_needle":
        return [base | _score(is_right)]
    bins = np.array_split(is_right, 10)
    parts = [
        base
        | {"depth": (index + 0.5) / 10, "prompts": len(part)}
        | _score(part)
        | dict.fromkeys(
            ("mass_recall", "mass_recall_by_layer", "output_error_by_layer", "is_right")
        )
        for index, part in enumerate(bins)
    ]
    return [base | _score(is_right), *parts]


@functools.cache
def _interval(right: int, count: int) -> tuple[float, float]:
    interval = binomtest(right, count).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def _score(is_right: np.ndarray) -> dict[str, Any]:
    low, high = _interval(int(is_right.sum()), len(is_right))
    return {
        "exact": float(is_right.mean()),
        "exact_low": low,
        "exact_high": high,
        "is_right": [int(one) for one in is_right],
    }


def right_answers(
    rows: list[dict[str, Any]], label: str, phase: str, task: str, density: float = 0.2
) -> list[int]:
    """Returns right answers of the longest prompts, computed from the rows."""
    found = []
    for row in rows:
        name = row["preset"] or row["policy"]
        is_here = label == "dense" or (row["phase"] == phase and row["density"] in (None, density))
        place = (row["task"], row["tokens"], row["depth"])
        if name == label and is_here and place == (task, LONGEST, None):
            found += row["is_right"]
    return found


def cells(table: str) -> dict[str, dict[str, str]]:
    """Parses a markdown table into rows by first cell and header; joins double names."""
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()]
    header, body = lines[0], lines[2:]
    assert all(len(line) == len(header) for line in body)
    names = [
        line[0] if [one[0] for one in body].count(line[0]) == 1 else f"{line[0]} {line[1]}"
        for line in body
    ]
    return {
        name: dict(zip(header, line, strict=True)) for name, line in zip(names, body, strict=True)
    }
