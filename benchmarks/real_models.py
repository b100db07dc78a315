"""Measures what selections lose on instruction models in their chat template.

    python benchmarks/real_models.py --model FILE.gguf --stage development --dense-layers 0 1 2
    python benchmarks/real_models.py --model FILE.gguf [--tokens 8192] [--seconds 500]

Every call continues the last one, and can be limited to some lengths, tasks, policies or phases, or
to a time. Prompts that dense attention does not answer are left out for every policy, and counted.
The density is the mean over all layers in the sparse phase. The number of dense layers of a policy
is chosen on prompts of another seed (`--stage development`), and kept for the reported ones.
`recommended` uses the plan that `sketchwalk calibrate` measured for a model, if any; its rows name
the plan, and cannot be continued with another.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation import EvaluationConfig, read_text
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.results import ResultsFile, read_results
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.runner import check_lengths, continue_evaluation, describe_texts
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.evaluation.tables import counted, pool, rows_with
from sketchwalk_jax.evaluation.tasks import ALL_TASKS
from sketchwalk_jax.inference.cached_layer import PHASES
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.policies import POLICIES, PRESETS, by_name, has_threshold, takes_density
from sketchwalk_jax.text.haystack import Text
from sketchwalk_jax.text.tokenizer import load_tokenizer

OUT = common.RESULTS / "real_models.json"
TASKS = tuple(task for task in ALL_TASKS if task != "aggregation")
CALIBRATED_ON = ("text_loss", "multi_key")
# Seed, and prompts of each task. Development chooses the dense layers and is not reported.
STAGES = {"development": (1, 20), "report": (0, 100)}
# Presets that choose their dense layers themselves.
OWN_LAYERS = ("recommended", "released")
_VARIANT = "dense_layers="


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the groups that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="GGUF or folders")
    parser.add_argument("--stage", choices=STAGES, default="report")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, help="default: all")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="default: all")
    parser.add_argument("--density", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--prompts", type=int, help="of each task; default: by the stage")
    parser.add_argument("--tries", type=int, default=6, help="times as many are drawn at most")
    parser.add_argument(
        "--dense-layers",
        type=int,
        nargs="+",
        help="numbers to try in development; in the report one for all, by default those chosen",
    )
    parser.add_argument("--batch", type=int, help="prompts at a time; default: by the memory")
    parser.add_argument(
        "--probe-prompts", type=int, default=0, help="of each task, for the bytes that decode reads"
    )
    parser.add_argument("--dtype", help="default: the checkpoint's, float32 on CPUs")
    parser.add_argument("--weights", help="float8 or int8; rows then name them beside the model")
    parser.add_argument("--text", type=Path, help="default: Python's help topics")
    parser.add_argument("--text-tail", type=float, default=1.0)
    parser.add_argument(
        "--other-code", action="store_true", help="go on with a file that other code began"
    )
    parser.add_argument("--seconds", type=float, help="stop after so long; another call goes on")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    keep_compiled_programs()
    end = None if options.seconds is None else time.monotonic() + options.seconds
    text = read_text(options.text, tail=options.text_tail)
    for path in options.model:
        left = None if end is None else end - time.monotonic()
        if (left is not None and left <= 0) or not run_model(path, text, options, left):
            print("time is up; call again to go on")
            return
    print(f"{options.out}: finished")


def run_model(path: Path, text: Text, options: argparse.Namespace, seconds: float | None) -> bool:
    """Runs the groups that the file lacks of one model; returns whether it is finished.

    Instruction models read tasks in their chat template, other models in plain sentences.
    """
    start = time.monotonic()
    name, model = path.stem if path.is_file() else path.name, {"sha256": hash_weights(path)}
    if options.weights is not None:
        name = f"{name}-{options.weights}"
    seed, prompts = STAGES[options.stage]
    tokenizer = load_tokenizer(path)
    amount: dict[str, Any] = {"seed": seed, "prompts": options.prompts or prompts}
    run = amount | describe_texts(text, EvaluationConfig(tasks=TASKS))
    base = EvaluationConfig(
        policies=("dense",),
        tokens=options.tokens,
        tasks=options.task,
        phases=options.phase,
        batch=options.batch,
        probe_prompts=options.probe_prompts,
        wording="chat" if tokenizer.chat_template else "plain",
        answerable=True,
        tries=options.tries,
        density_over="all_layers",
        calibrated_on=CALIBRATED_ON,
        **amount,
    )
    params, model_config = sw.load(
        path, dtype=options.dtype or default_dtype(), weights=options.weights, progress=False
    )
    model["dtype"] = params["embed"]["embedding"].dtype.name
    if options.weights is not None:
        model["weights"] = options.weights
    model |= {"context": model_config.context_length, "wording": base.wording}
    meta = common.describe_machine(
        models={name: model},
        runs={f"{name}, {options.stage}": run},
        tries=base.tries,
        density_over=base.density_over,
    )
    # Entries for each model, stage or policy, which grow with the file.
    growing = ("models", "runs", "dense_layers")
    file = ResultsFile(
        options.out,
        joined_meta(options.out, meta, growing),
        common={"model": name, "stage": options.stage},
        may_differ=growing,
        other_code=options.other_code,
    )
    rules = make_rules(file, name, options)
    if set(options.policy or ()) - {"dense"}:
        common.check_filters(options, (), rules)
    config = EvaluationConfig(**{**vars(base), "variants": rules})
    left = None if seconds is None else max(1.0, seconds - (time.monotonic() - start))
    return continue_evaluation(
        file,
        params,
        model_config,
        tokenizer,
        text=text,
        config=config,
        lengths=check_lengths(config, model_config),
        seconds=left,
        progress=True,
    )


def default_dtype() -> str | None:
    """Returns float32 on CPUs, which are slow in 16 bits; elsewhere None, the checkpoint's."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else None


def joined_meta(path: Path, meta: dict[str, Any], growing: Sequence[str]) -> dict[str, Any]:
    """Joins `meta` with a file's entries for other models and runs.

    Raises:
      ValueError: If the file contradicts it for this model or stage.
    """
    if not path.exists():
        return meta
    old = read_results(path).meta
    for kind in growing:
        for name, value in old.get(kind, {}).items():
            new = meta.setdefault(kind, {}).setdefault(name, value)
            if new != value:
                raise ValueError(
                    f"{path} must hold the same {kind}: {name} is {value} there, {new} now"
                )
    return meta


def make_rules(file: ResultsFile, model: str, options: argparse.Namespace) -> tuple[Rule, ...]:
    """Lists the rules of a stage: in development every number of dense layers, else the best."""
    found: list[Rule] = []
    for policy in options.policy or POLICIES:
        if policy == "dense":
            continue
        for preset in (options.preset or PRESETS) if policy == "sketchwalk" else (None,):
            made = by_name(policy, preset=preset)
            is_set = takes_density(made) or has_threshold(made)
            for density in options.density if is_set else (None,):
                rule = Rule(policy, preset, density)
                if preset in OWN_LAYERS or not is_set:
                    found += [] if options.stage == "development" else [rule]
                elif options.stage == "development":
                    for count in options.dense_layers or (0, 1, 2):
                        own = (("dense_layers", count),)
                        found.append(Rule(policy, preset, density, own, f"{_VARIANT}{count}"))
                else:
                    found += _chosen(file, model, rule, options)
                    if policy == "oracle":
                        # Another rule ranks by largest shares, with the recommended local blocks.
                        fields = {"aggregation": "max", "dense_layers": 0, "local_blocks": 2}
                        found.append(Rule(policy, None, density, tuple(fields.items()), "max"))
    return tuple(found)


def _chosen(file: ResultsFile, model: str, rule: Rule, options: argparse.Namespace) -> list[Rule]:
    """Gives the rule the dense layers that were best in development, phase by phase."""
    by_count: dict[int, list[str]] = {}
    for phase in options.phase:
        if phase != "both" and phase not in rule.make().phases:
            continue
        if phase == "both" and len(rule.make().phases) < 2:
            continue
        # With both phases sparse, prefill causes most of the loss.
        like = "prefill" if phase == "both" else phase
        count = chosen_layers(file, model, rule, like, options.dense_layers)
        if count is not None:
            by_count.setdefault(count, []).append(phase)
    return [
        Rule(rule.policy, rule.preset, rule.density, (("dense_layers", count),), phases=tuple(some))
        for count, some in by_count.items()
    ]


def chosen_layers(
    file: ResultsFile, model: str, rule: Rule, phase: str, given: Sequence[int] | None
) -> int | None:
    """Finds the dense layers for the report: given, chosen before, or the best in development.

    A chosen number stays in `meta`, so that all rows of a policy share it.

    Raises:
      SystemExit: If none was given and there are no development rows to choose from.
    """
    key = f"{model}: {rule} {phase}"
    known = file.meta.setdefault("dense_layers", {})
    if key not in known:
        if given is not None and len(given) == 1:
            known[key] = given[0]
        else:
            known[key] = best_layers(file.rows, model, rule, phase)
    return known[key]


def best_layers(rows: Sequence[Row], model: str, rule: Rule, phase: str) -> int | None:
    """Finds the number of dense layers with the most right answers; ties go to the least loss.

    Args:
      rows: Rows, development rows included.
      model: The model.
      rule: The policy.
      phase: Phase in which it selects.

    Returns:
      The number; None if no number was within the density.

    Raises:
      SystemExit: If the policy was not run in development.
    """
    own = [
        row
        for row in rows_with(rows, model=model, phase=phase, density=rule.density)
        if row["stage"] == "development"
        and (row["policy"], row["preset"]) == (rule.policy, rule.preset)
    ]
    best: dict[int, tuple[float, float]] = {}
    for variant in {row["variant"] for row in own}:
        some = [row for row in own if row["variant"] == variant]
        right, loss = pool(counted(some)), pool(rows_with(some, task="text_loss"))
        shares = 0.0 if right is None or right.exact is None else right.exact
        losses = 0.0 if loss is None or loss.text_loss is None else loss.text_loss
        best[int(variant.removeprefix(_VARIANT))] = (-shares, losses)
    if not best and not any(row.get("stage") == "development" for row in rows):
        raise SystemExit("--dense-layers must be one number where there was no --stage development")
    return min(best, key=lambda count: (*best[count], count)) if best else None


if __name__ == "__main__":
    main()
