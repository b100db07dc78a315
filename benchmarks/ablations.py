"""What each part of the method does: presets with one field changed, on the evaluation's tasks.

    python benchmarks/ablations.py --text FILE --text-tail 0.03 [--out FILE] [--reduced]
    python benchmarks/ablation_report.py      # anywhere: the figure and the tables

Around `paper` and `damped`, with dense attention and random blocks beside them, on the same
prompts. An interrupted run is continued from its file, as `sketchwalk eval` does.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from unmasked import VARIANT, UnmaskedRule

from sketchwalk_jax.cli.compiled import keep_compiled_programs
from sketchwalk_jax.evaluation import EvaluationConfig, evaluate, read_text
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.models.bundled import bundled_model
from sketchwalk_jax.validation import PHASES

DENSITY = 0.2
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
TASKS = ("single_needle", "multi_key", "mid_prompt", "aggregation", "text_loss")
PRESETS = ("paper", "damped")
# Values beside each preset's own, field by field. Heads of the shipped model have 64 channels, so
# that the preset's sketch of 64 is none; an odd exponent keeps the sign.
CHANGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "paper": {
        "sketch_dim": (8, 16, 32),
        "exponent": (1, 2, 3, 4, 7, 16),
        "transition": ("relu_power", "softmax"),
        "walk_degree": (2, 3),
        "beta": (0.0,),
        "dense_layers": (0, 1),
    },
    "damped": {
        "sketch_dim": (8, 16, 32),
        "walk_degree": (2, 3),
        "beta": (0.0, 0.1, 0.5),
        "dense_layers": (0, 1),
    },
}


def variants(presets: Sequence[str] = PRESETS, only: Sequence[str] = ()) -> tuple[Rule, ...]:
    """One changed field each, then the preset without a mask.

    Args:
      presets: What is changed.
      only: Fields to change; all by default.
    """
    found: list[Rule] = []
    for preset in presets:
        for field, values in CHANGES[preset].items():
            for value in values:
                rule = Rule("sketchwalk", preset, DENSITY, ((field, value),), f"{field}={value}")
                found += [rule] if not only or field in only else []
        if not only or VARIANT in only:
            found.append(UnmaskedRule("sketchwalk", preset, DENSITY))
    return tuple(found)


def main() -> None:
    """Runs what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint; default: the bundled model")
    parser.add_argument("--text", type=Path, help="default: Python's help topics")
    parser.add_argument("--text-tail", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=32, help="of each task")
    parser.add_argument("--probe-prompts", type=int, default=1, help="for the mass recall")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="default: both")
    parser.add_argument("--phase", action="append", choices=PHASES, help="default: all")
    parser.add_argument("--only", action="append", default=[], help=f"a field, or '{VARIANT}'")
    parser.add_argument("--reduced", action="store_true", help="two short prompts of two tasks")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "ablations.json")
    options = parser.parse_args()
    keep_compiled_programs()
    amount: dict[str, Any] = {
        "tokens": (options.tokens,),
        "tasks": TASKS,
        "prompts": options.prompts,
        "probe_prompts": options.probe_prompts,
        "densities": DENSITIES,
    }
    if options.reduced:
        amount |= {"tokens": (1024,), "tasks": ("single_needle", "text_loss"), "prompts": 2}
        amount |= {"probe_prompts": min(1, options.probe_prompts), "densities": (DENSITY,)}
    config = EvaluationConfig(
        policies=("sketchwalk", "random"),
        presets=options.preset or PRESETS,
        phases=options.phase or PHASES,
        variants=variants(options.preset or PRESETS, options.only),
        **amount,
    )
    evaluate(
        options.model or bundled_model(),
        config=config,
        text=read_text(options.text, tail=options.text_tail),
        out=options.out,
        progress=True,
    )


if __name__ == "__main__":
    main()
