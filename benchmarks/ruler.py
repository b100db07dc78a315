"""Runs RULER in the lm-evaluation-harness for every policy: the six tasks without downloads.

    uv run --extra eval python benchmarks/ruler.py

Prompts and scores are the harness's; prompts are drawn once, the same for every policy. A further
task is `multi_key` of this package: unlike RULER, it uses sentences that the small model was
trained on. Results go to `results/ruler.json`, policy by policy; with `--policy`, rows of other
policies stay, and must share model, prompts and versions.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import common  # makes the package importable

from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.tasks import draw_samples
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.policies import POLICIES, by_name
from sketchwalk_jax.text.haystack import read_text
from sketchwalk_jax.text.tokenizer import decode, load_tokenizer

TASKS = (
    "niah_single_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
)
OWN_TASK = "multi_key"
ROOM = 256  # tokens for deviations of a prompt's length and for the answer
SEED = 0
NAMES = ("policy", "task")
SAME = ("model", "tokens", "samples", "density", "harness")


def main() -> None:
    """Runs what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint; default: the bundled model")
    parser.add_argument("--tokens", type=int, default=4096, help="one of RULER's lengths")
    parser.add_argument("--samples", type=int, default=4, help="prompts of each task")
    parser.add_argument("--density", type=float, default=0.2)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--batch", type=int, default=4, help="prompts at a time")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "ruler.json")
    options = parser.parse_args()
    model = options.model or bundled_model()
    tasks = load_tasks(model, tokens=options.tokens, samples=options.samples)
    meta = common.describe_machine(
        model={"name": model.resolve().name, "sha256": hash_weights(model)},
        tokens=options.tokens,
        samples=options.samples,
        density=options.density,
        dtype="",
        harness=harness_version(),
    )
    policies = options.policy or tuple(POLICIES)
    asked = [{"policy": policy, "task": task} for policy in policies for task in tasks]
    common.note_asked(meta, asked, *NAMES)
    common.add_rows(options.out, meta, [], NAMES, *SAME)  # refuses a file of other runs early
    for policy in policies:
        rows = run_policy(policy, model, tasks, meta, options)
        common.add_rows(options.out, meta, rows, NAMES, *SAME)


def harness_version() -> str:
    """Returns the version of lm-eval."""
    from importlib.metadata import version

    return version("lm-eval")


def load_tasks(model: Path, *, tokens: int, samples: int) -> dict[str, Any]:
    """Loads the harness's tasks with their prompts, and one task of this package."""
    import numpy as np
    from lm_eval.tasks import TaskManager

    random.seed(SEED)
    np.random.seed(SEED)
    manager = TaskManager(metadata={"pretrained": str(model), "max_seq_lengths": [tokens]})
    tasks = manager.load(list(TASKS))["tasks"]
    return {name: tasks[name] for name in TASKS} | {
        OWN_TASK: own_task(model, tokens=tokens, samples=samples)
    }


def own_task(model: Path, *, tokens: int, samples: int) -> Any:
    """Makes `multi_key` a task of the harness, scored like RULER's."""
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.ruler.common_utils import aggregate_metrics, process_results

    tokenizer = load_tokenizer(model)
    options = {"num_tokens": tokens - ROOM, "count": samples, "seed": SEED}
    docs = [
        {
            "input": decode(tokenizer, sample.tokens),
            "outputs": [sample.expected.rstrip(".")],
            "max_length": tokens,
        }
        for sample in draw_samples(OWN_TASK, read_text(), tokenizer, **options)
    ]
    return ConfigurableTask(
        config={
            "task": OWN_TASK,
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
            "output_type": "generate_until",
            "test_split": "test",
            "doc_to_text": "{{input}}",
            "doc_to_target": "{{outputs}}",
            "process_results": process_results,
            "metric_list": [
                {
                    "metric": str(tokens),
                    "aggregation": aggregate_metrics,
                    "higher_is_better": True,
                }
            ],
            "generation_kwargs": {"do_sample": False, "max_gen_toks": 16, "until": ["\n"]},
            "repeats": 1,
            "metadata": {"version": 1.0},
        }
    )


def run_policy(
    policy: str, model: Path, tasks: dict[str, Any], meta: dict[str, Any], options: Any
) -> list[dict[str, Any]]:
    """Runs a policy, sparse in all its phases, and makes one row for each task."""
    from lm_eval.evaluator import evaluate

    from sketchwalk_jax.evaluation.harness import SketchWalkLM

    lm = SketchWalkLM(
        str(model),
        policy=policy,
        density=options.density,
        batch_size=options.batch,
        max_length=options.tokens + ROOM,
    )
    meta["dtype"] = lm.params["embed"]["embedding"].dtype.name
    fields = {name: value for name, value in lm.get_model_info()["policy_fields"].items()}
    rows = []
    for name, task in tasks.items():
        lm.reset_density()
        found = evaluate(
            lm=lm,
            task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
            limit=options.samples,
            bootstrap_iters=0,
        )
        scores = [sample[str(options.tokens)] for sample in found["samples"][name]]
        rows.append(
            {
                "policy": policy,
                "phases": list(by_name(policy).phases),
                "fields": fields,
                "task": name,
                "tokens": options.tokens,
                "score": found["results"][name][f"{options.tokens},none"],
                "scores": scores,
                "measured_density": lm.measured_density(),
            }
        )
        print(policy, name, rows[-1]["score"], rows[-1]["measured_density"], flush=True)
    return rows


if __name__ == "__main__":
    main()
