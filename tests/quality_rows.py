"""Makes up evaluation results, with every kind of row that a real evaluation writes."""

import zlib
from typing import Any

import numpy as np

from sketchwalk_jax.evaluation.results import Results
from sketchwalk_jax.evaluation.rows import exact_match
from sketchwalk_jax.evaluation.tasks import TASKS

Name = tuple[str, str | None]
DENSE: Name = ("dense", None)
LONGEST = 16384  # default longest prompt, in tokens
# Made-up share of right answers at density 0.2, mass recall, and loss beyond dense attention.
POLICIES: dict[Name, tuple[float, float, float]] = {
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
RIVALS: dict[Name, tuple[float, float, float]] = {
    ("minference", None): (0.7, 0.88, 0.02),
    ("flexprefill", None): (0.8, 0.9, 0.01),
    ("quest", None): (0.95, 0.9, 0.01),
    ("adamas", None): (0.9, 0.85, 0.02),
}
ONE_PHASE = dict.fromkeys(("minference", "flexprefill"), "prefill")
ONE_PHASE |= dict.fromkeys(("quest", "adamas"), "decode")
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
EMPTY = ("exact", "exact_low", "exact_high", "depth", "hops", "text_loss", "mass_recall")
EMPTY += ("mass_recall_by_layer", "output_error_by_layer", "is_right", "text_losses")


def make_results(**options: Any) -> dict[str, Any]:
    """Returns `{"meta": ..., "rows": ...}`; options are passed to `make_rows`."""
    return {"meta": dict(META), "rows": make_rows(**options)}


def whole(**options: Any) -> Results:
    """Returns the results as `read_results` returns them."""
    results = make_results(**options)
    return Results(meta=results["meta"], rows=tuple(results["rows"]))


def make_rows(
    *,
    policies: dict[Name, tuple[float, float, float]] = POLICIES,
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
        own = [one for one in phases if one == ONE_PHASE.get(policy, one)]
        nominal = densities if preset != "released" else (None,)
        is_dense = policy == "dense"
        for phase in ("both",) if is_dense else own:
            for density in (1.0,) if is_dense else nominal:
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
    is_read = (is_dense or row["phase"] != "prefill") and row["depth"] is None
    parts = {"keys": read, "values": read, "metadata": 0.0 if is_dense else read / 8}
    return {
        "settings": SETTINGS.get(row["policy"]),
        "dense_layers": num_dense,
        **{f"decode_bytes_{name}": value if is_read else None for name, value in parts.items()},
    }


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
    base = setting | dict.fromkeys(EMPTY) | {"prompts": prompts}
    base["measured_density_sparse_layers"] = measured
    base["measured_density_all_layers"] = (2 + (num_layers - 2) * measured) / num_layers
    if not is_dense and setting["phase"] == "prefill":
        by_layer = [round(recall - 0.02 * abs(layer - 6), 4) for layer in range(2, num_layers)]
        errors = [round(1 - one, 4) for one in by_layer]
        base["mass_recall"] = float(np.mean(by_layer))
        base["mass_recall_by_layer"] = [None, None, *by_layer]
        base["output_error_by_layer"] = [None, None, *errors]
    if setting["task"] == "text_loss":
        # All policies share prompts: a prompt that is hard for one is hard for all.
        hard = np.random.default_rng(1).normal(1.2, 0.2, prompts)
        more = loss * (1.5 if density == 0.1 else 1.0) + rng.normal(0, 0.01, prompts)
        losses = [round(float(one), 5) for one in hard + (0 if is_dense else more)]
        return [base | {"text_loss": float(np.mean(losses)), "text_losses": losses}]
    if setting["task"] == "variable_tracking":
        chances = {hops: exact * (1.1 - 0.1 * hops) for hops in (2, 3, 4)}
        return [
            base | {"hops": hops} | exact_match(rng.random(prompts) < chance)
            for hops, chance in chances.items()
        ]
    is_right = rng.random(prompts) < exact
    rows = [base | exact_match(is_right)]
    if setting["task"] == "single_needle":
        nothing = dict.fromkeys((*(name for name in EMPTY if "layer" in name), "is_right"))
        for index, part in enumerate(np.array_split(is_right, 10)):
            place = {"depth": (index + 0.5) / 10, "prompts": len(part), "mass_recall": None}
            rows.append(base | place | exact_match(part) | nothing)
    return rows


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
    firsts = [line[0] for line in body]
    names = [line[0] if firsts.count(line[0]) == 1 else f"{line[0]} {line[1]}" for line in body]
    return {
        name: dict(zip(header, line, strict=True)) for name, line in zip(names, body, strict=True)
    }
