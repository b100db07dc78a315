"""What selecting costs: every policy at two lengths, in prefill and in decode, on one GPU.

    python benchmarks/selection.py [--out benchmarks/results/selection.json] [--policy NAME]

One layer of normal queries and keys, beside dense attention to the same and attention over the
lists that were chosen. Policies with a knob have it set so that their lists have the density asked
for. Selection is timed inside jitted loops whose steps wait for one another and rotate over the
inputs of several layers; so is attention in decode, while in prefill calls are queued.
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
from kernel_inputs import Shape
from selection_jobs import Length, Row
from selection_programs import Inputs
from tqdm import tqdm

from sketchwalk_jax.cli.compiled import keep_compiled_programs
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.policies import POLICIES, PRESETS


def rules(policies: list[str], density: float, *, is_quick: bool) -> list[Rule]:
    """Policies and presets; FlexPrefill with no head and with every head query-aware."""
    found = []
    for policy in policies:
        if policy == "dense":
            continue
        if policy == "flexprefill":
            for tau in (0.0, 1.0):  # the distance is at most sqrt(log 2)
                found.append(Rule(policy, None, density, (("tau", tau),)))
            continue
        presets: tuple[str | None, ...] = (None,) if policy != "sketchwalk" else PRESETS
        for preset in presets[:1] if is_quick else presets:
            own = None if preset == "released" else density
            found.append(Rule(policy, preset, own))
    return found


def main() -> None:
    """Runs everything and writes the results, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "selection.json"))
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--tokens", type=int, action="append", help="default: 16384 and 65536")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one tiny shape, two repeats")
    options = parser.parse_args()
    keep_compiled_programs()
    size: dict[str, Any] = {"heads": (4, 2), "head_dim": 64} if options.quick else {}
    lengths = options.tokens or ([1024] if options.quick else [2**14, 2**16])
    repeats = 2 if options.quick else options.repeats
    wanted = rules(list(options.policy or POLICIES), options.density, is_quick=options.quick)
    started = time.perf_counter()
    rows: list[Row] = []
    meta = common.describe_machine(is_quick=options.quick, repeats=repeats, wall_s=0.0)
    jobs: list[tuple[Row, Callable[[], Row]]] = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for tokens in lengths:
            shape = Shape(op="selection", tokens=tokens, density=options.density, **size)
            jobs += Length(Inputs.draw(shape), pool, repeats, options.quick).jobs(wanted)
        # Nothing is timed while something compiles.
    for names, job in tqdm(jobs, desc="selection"):
        try:
            row = names | {"error": None} | job()
        except Exception as error:  # the other rows are worth keeping
            row = names | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append(row)
        tqdm.write(describe(row))
        meta["wall_s"] = round(time.perf_counter() - started, 1)
        common.write_results(options.out, meta, rows)


def describe(row: Row) -> str:
    """One line for the terminal."""
    name = " ".join(
        [row["preset"] or row["policy"], *(f"{k}={v:g}" for k, v in row["fields"].items())]
    )
    text = f"{row['phase']:<8}{row['tokens']:>6} {name:<20}"
    if row["error"]:
        return f"{text} failed: {row['error']}"
    for part in ("observe", "selection", "attention"):
        if row[f"{part}_ms"] is not None:
            text += f"{part} {row[f'{part}_ms']:.4f} ms (iqr {row[f'{part}_ms_iqr']:.4f}) "
    return text + f"density {row['measured_density'] or math.nan:.3f}"


if __name__ == "__main__":
    main()
