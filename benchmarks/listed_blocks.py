"""Of the key blocks of other ranks, how many a rank of `sequence` lists: what had to travel.

    python benchmarks/listed_blocks.py [--out benchmarks/results/listed_blocks.json] [--quick]
    python benchmarks/report.py    # the table

A rank gathers keys and values of all ranks before its rows attend. Fewest that could travel are the
blocks that are on a list of at least one of its rows. They are counted here, layer by layer, for
the shipped model and its plan, in prompts of which no result counts: lists do not depend on the
number of ranks, so that one device makes them. Rows are dealt zig-zag, as `Blocks` deals them. Of
dense attention a rank needs what comes before its last row.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation.planning import TASKS, planning_prompts
from sketchwalk_jax.models.hub import bundled_model
from sketchwalk_jax.policies.ranks import Blocks
from sketchwalk_jax.tokenizer import load_tokenizer

Row = dict[str, Any]
TOKENS, DENSITIES, RANKS = 2**14, (0.1, 0.2), (2, 4, 8)
_FILE = "listed_blocks.json"


def main() -> None:
    """Counts, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=common.RESULTS / _FILE)
    parser.add_argument("--quick", action="store_true", help="one short prompt")
    options = parser.parse_args()
    tokens, count = (2048, 1) if options.quick else (TOKENS, len(TASKS))
    folder = bundled_model()
    params, model_config = sw.load(folder, dtype="float32")
    prompts = planning_prompts(load_tokenizer(folder), num_tokens=tokens, count=count)
    rows: list[Row] = []
    for density in tqdm(DENSITIES, desc="listed blocks"):
        config = sw.SketchWalkConfig.recommended_blocks(density=density, plan=model_config.plan)
        found: dict[int, list[Float[np.ndarray, "L R"]]] = {ranks: [] for ranks in RANKS}
        for prompt in prompts:
            padded = np.pad(prompt, (0, tokens - len(prompt)))[None]
            cache = sw.init_cache(model_config, config, batch=1, max_tokens=tokens, dtype="float32")
            _, _, lists = sw.prefill(
                params,
                padded,
                cache,
                lengths=np.array([len(prompt)]),
                model_config=model_config,
                policy=config,
                return_selection=True,
            )
            listed = listed_blocks(lists, tokens // config.block_size)
            for ranks in RANKS:
                found[ranks].append(np.stack(list(shares(listed, ranks)), axis=1))
        causal = np.tri(tokens // config.block_size, dtype=bool)[None]
        for ranks in RANKS:
            by_layer = np.mean(found[ranks], axis=0)
            dense = np.stack(list(shares(causal, ranks)), axis=1)[0]
            rows.append(
                {
                    "tokens": tokens,
                    "density": density,
                    "ranks": ranks,
                    "share_by_layer": by_layer.mean(axis=1).round(4).tolist(),
                    "most_by_layer": by_layer.max(axis=1).round(4).tolist(),
                    "dense_share": float(dense.mean().round(4)),
                }
            )
            print(describe(rows[-1]), flush=True)
    meta = common.describe_machine(
        model=folder.name, tasks=list(TASKS[:count]), prompts=count, is_quick=options.quick
    )
    common.write_results(options.out, meta, rows)


def listed_blocks(lists: sw.BlockSelection, num_blocks: int) -> Bool[np.ndarray, "L I J"]:
    """Which blocks are on a list of a row, of any head, in every layer of one prompt."""
    ids = np.asarray(lists.ids)[:, 0]  # [L, M, I, P]; beyond a list's count, the number of blocks
    found = np.zeros((ids.shape[0], num_blocks, num_blocks + 1), bool)
    prompt = found[:, : ids.shape[2]]  # rows of padding list nothing
    for of_a_head in np.moveaxis(ids, 1, 0):
        np.put_along_axis(prompt, of_a_head, True, axis=-1)
    return found[..., :num_blocks]


def shares(listed: Bool[np.ndarray, "L I J"], ranks: int) -> Iterator[Float[np.ndarray, "L"]]:
    """For each rank, the share of other ranks' blocks that its rows list, by layer."""
    num_rows = listed.shape[1]
    own = np.asarray(Blocks("sequence", ranks).deal(jnp.arange(num_rows), axis=0))
    for rows in own.reshape(ranks, -1):
        needed = listed[:, rows].any(axis=1)
        yield np.delete(needed, rows, axis=1).mean(axis=1)


def describe(row: Row) -> str:
    """One line for the terminal."""
    by_layer = row["share_by_layer"]
    return (
        f"density {row['density']:g}, {row['ranks']} ranks: {np.mean(by_layer):.2f} of other ranks'"
        f" blocks, {min(by_layer):.2f} to {max(by_layer):.2f} by layer, of the rank that lists "
        f"most {np.mean(row['most_by_layer']):.2f}; dense {row['dense_share']:.2f}"
    )


if __name__ == "__main__":
    main()
