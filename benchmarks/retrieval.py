"""Where the block of an answer ranks, in the layers whose dense attention looks at it.

    python benchmarks/retrieval.py --model FILE.gguf [--tokens 8192] [--prompts 60]
    python benchmarks/report.py      # anywhere: the table

A model reads prompts that hide facts and ask for one, with the answer behind them, densely. Where
some query of the last row and some head gives the block of the fact more than 0.3 of its attention,
the pair of layer and block counts, and rankings of the row's blocks are asked for its place: that
of `recommended_blocks` with the model's plan, of others of its settings, and of exact attention,
by the largest share that one query of one head gives a block and by the sum of all shares. What a
policy lists in any case ranks first.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from recommended_parts import BlocksConfig, ExactConfig, MeansConfig, PagesConfig
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.attention.api import dense_attention
from sketchwalk_jax.attention.mass import block_mass
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.evaluation import read_text
from sketchwalk_jax.evaluation.planning import run_prompt, samples_in_turn, whole_prompt
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.results import write_results
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.layer import select_whole
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.tokenizer import load_tokenizer
from sketchwalk_jax.walk import WalkState

PyTree = Any
OUT = common.RESULTS / "retrieval.json"
TASKS = ("single_needle", "multi_key")
SHARES = (0.05, 0.1, 0.2)
LISTED = (0.1, 0.2)  # densities at which the lists themselves are asked
LOOKED_AT = 0.3
LEAST_PAIRS = 20  # of a layer for its own recall
EXACT = {"exact, largest share": "max", "exact, sum of shares": "sum"}


def policies(model_config: ModelConfig) -> dict[str, BlocksConfig]:
    """What is asked, by its name on the page."""
    plan = model_config.plan
    found: dict[str, BlocksConfig] = {"recommended_blocks": BlocksConfig(plan=plan)}
    for count in (4, 8, 16, 32):
        found[f"{count} queries in every layer"] = BlocksConfig(representatives=count)
    found["64 queries in every layer, exact keys"] = ExactConfig(
        representatives=64, channels_of="all"
    )
    found["8 queries, keys that are not rounded"] = ExactConfig()
    found["8 queries, no memory of layers before"] = BlocksConfig(decay=0.0)
    found["8 means of 8 queries"] = MeansConfig()
    found["8 queries, pages of 8 keys"] = PagesConfig()
    found["8 queries, boxes of 16 keys"] = PagesConfig(keys_of_page=16, shape="box", width=1.0)
    return found


def main() -> None:
    """Measures models that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="default: the checkpoint's")
    parser.add_argument("--text", type=Path, help="default: Python's help topics")
    parser.add_argument("--text-tail", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    keep_compiled_programs()
    text = read_text(options.text, tail=options.text_tail)
    found: dict[str, Any] = {"meta": {"models": {}}, "rows": []}
    machine = common.describe_machine(seed=options.seed, text=text.about)
    if options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
        same = ("seed", "text", "device", "versions")
        common.check_same(options.out, found["meta"], machine, *same)
    for path in options.model:
        name = path.stem if path.is_file() else path.name
        tokenizer = load_tokenizer(path)
        params, model_config = sw.load(path, dtype=options.dtype, progress=False)
        sizes = {"num_tokens": options.tokens, "count": options.prompts, "seed": options.seed}
        samples = [*samples_in_turn(TASKS, text, tokenizer, **sizes)]
        rows = [{"model": name} | row for row in measure(params, samples, model_config)]
        others = [row for row in found["rows"] if row["model"] != name]
        plan = model_config.plan
        about = {
            "sha256": hash_weights(path),
            "tokens": options.tokens,
            "prompts": len(samples),
            "plan": None if plan is None else plan.short_hash,
            "sources": machine["sources"],
        }
        models = found["meta"]["models"] | {name: about}
        found = {"meta": machine | {"models": models}, "rows": [*others, *rows]}
        write_results(options.out, **found)


def measure(
    params: PyTree, samples: Sequence[Sample], model_config: ModelConfig
) -> list[dict[str, Any]]:
    """A row for every prompt and layer whose dense attention looks at the answer.

    Args:
      params: Parameter tree.
      samples: Prompts whose answer stands in them, of about one length.
      model_config: The model.

    Returns:
      Rows with the prompt's number, `layer`, `blocks` of the row, `share` of the attention, `ranks`
      by name, and `listed` by density: whether that policy lists the block.
    """
    chosen = policies(model_config)
    size = chosen["recommended_blocks"].block_size
    room = -(-max(len(one.tokens) + len(one.answer) for one in samples) // size) * size
    budgets = {
        one: layer_budgets(chosen["recommended_blocks"], one, model_config.num_layers, room // size)
        for one in LISTED
    }
    rows = []
    for number, sample in enumerate(tqdm(samples, desc="prompts")):
        place = find(sample)
        if place is None:
            continue
        tokens = np.concatenate([sample.tokens, sample.answer[:-1]])
        length = jnp.array([len(tokens)], jnp.int32)
        padded = jnp.asarray(np.pad(tokens, (0, room - len(tokens)))[None], jnp.int32)
        seen = jax.device_get(
            _look(params, padded, length, policies=tuple(chosen.items()), model_config=model_config)
        )
        num_blocks, block = -(-len(tokens) // size), place // size
        for layer, share in enumerate(seen["exact, largest share"][:, block]):
            if share <= LOOKED_AT or block in (0, num_blocks - 2, num_blocks - 1):
                continue
            ranks = {
                name: _rank(seen[name][layer, :num_blocks], block) for name in (*EXACT, *chosen)
            }
            listed = {
                f"{one:g}": bool(ranks["recommended_blocks"] <= budget[layer, num_blocks - 1])
                for one, budget in budgets.items()
            }
            found = {"prompt": number, "layer": layer, "blocks": num_blocks}
            rows.append(found | {"share": float(share), "ranks": ranks, "listed": listed})
    return rows


def layer_budgets(
    policy: BlocksConfig, density: float, num_layers: int, num_blocks: int
) -> Int[np.ndarray, "L J"]:
    """Blocks that each row keeps in every layer, dense ones included."""
    own = dataclasses.replace(policy, density=density, num_layers=num_layers)
    kept = iter(own.budgets(num_blocks))
    everything = np.arange(1, num_blocks + 1, dtype=np.int32)
    return np.stack([everything if own.is_dense(i) else next(kept) for i in range(num_layers)])


def find(sample: Sample) -> int | None:
    """The place of the answer among the tokens before the question; None if it is not one place.

    Its full stop does not count.
    """
    answer = sample.answer[:-1]
    windows = np.lib.stride_tricks.sliding_window_view(
        sample.tokens[: sample.question_start], len(answer)
    )
    places = np.flatnonzero((windows == answer).all(axis=1))
    return int(places[0]) if len(places) == 1 else None


def _rank(scores: Float[np.ndarray, "J"], block: int) -> int:
    """How many blocks come before, and one; the first and the two last come before all."""
    scores = scores.copy()
    scores[[0, -2, -1]] = np.inf
    return 1 + int((scores > scores[block]).sum())


@partial(jax.jit, static_argnames=("policies", "model_config"))
def _look(
    params: PyTree,
    tokens: Int[Array, "1 T"],
    length: Int[Array, "1"],
    *,
    policies: tuple[tuple[str, BlocksConfig], ...],
    model_config: ModelConfig,
) -> Mapping[str, Float[Array, "L J"]]:
    """What every layer and ranking gives each block for the row of the last token."""
    span, size = whole_prompt(tokens, length), policies[0][1].block_size
    row = (length[0] - 1) // size

    def attend(query: Array, key: Array, value: Array, layer: Array, walks: PyTree) -> Any:
        own = jax.lax.dynamic_slice_in_dim(query, row * size, size, axis=1)
        found = {
            name: block_mass(
                own, key, block_size=size, first_block=row[None], kv_lengths=length, aggregate=how
            )[0, 0]
            for name, how in EXACT.items()
        }
        after = []
        for (name, policy), walk in zip(policies, walks, strict=True):
            # A policy counts the layers that are not dense.
            is_dense = [policy.is_dense(i) for i in range(model_config.num_layers)]
            place = jnp.asarray(np.cumsum(np.logical_not(is_dense)) - 1, jnp.int32)
            walk = WalkState(walk.scores, jnp.maximum(place, 0)[layer])
            ((_, walk),) = select_whole([policy], query, key, [walk], span=span)
            found[name] = walk.scores[0, row]
            after.append(walk)
        return dense_attention(query, key, value, kv_lengths=length), after, found

    chosen = [policy for _, policy in policies]
    return run_prompt(params, tokens, attend, chosen, model_config=model_config)[1]


if __name__ == "__main__":
    main()
