"""Needle in a haystack: how many codes a model still finds under each way of selecting blocks.

    python benchmarks/needles.py --model DIR [--text FILE] [--count 50] [--density 0.2]

A prompt is English text with one sentence `The code of lantern is 68084.` in it, and the question
`Q: code of lantern? A: ` behind it. Words and codes are distinct, depths spread evenly. Every
policy answers the same prompts, greedily; an answer is right if it begins with the code.
"""

import argparse
import dataclasses
import hashlib
import lzma
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.policies import PRESETS, by_name
from sketchwalk_jax.tokenizer import decode, encode, load_tokenizer

PHASES = ("both", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Needle:
    """One prompt and its answer; `depth` is the share of the text before the sentence."""

    prompt: str
    code: str
    word: str
    depth: float


@dataclasses.dataclass(frozen=True)
class Rule:
    """What answers: a policy in a phase. `preset` is `None` for dense."""

    preset: str | None
    density: float | None
    phase: str = "both"

    def policy(self) -> Any:
        """The policy; the density of `released` follows from its own rule."""
        if self.preset is None:
            return by_name("dense")
        density = None if self.preset == "released" else self.density
        return by_name("sketchwalk", preset=self.preset, density=density)

    @property
    def name(self) -> str:
        """A name for tables."""
        if self.preset is None:
            return "dense"
        return "full" if self.density == 1.0 else self.preset


def main() -> None:
    """Asks every policy and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory with a tokenizer")
    parser.add_argument("--text", help="plain UTF-8 text, or .xz of it; Python's own topics else")
    parser.add_argument("--text-tail", type=float, default=1.0, help="share of the text, from its end")
    parser.add_argument("--count", type=int, default=50, help="prompts")
    parser.add_argument("--tokens", type=int, default=2700, help="tokens of a prompt, about")
    parser.add_argument("--density", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of parameters and cache")
    parser.add_argument("--out", default=str(common.RESULTS / "needles.json"))
    options = parser.parse_args()

    params, model_config = sw.load(options.model, dtype=options.dtype)
    tokenizer = load_tokenizer(options.model)
    text = read_text(options.text, options.text_tail)
    needles = draw_needles(
        text, tokenizer, count=options.count, num_tokens=options.tokens, seed=options.seed
    )
    prompts = [encode(tokenizer, needle.prompt) for needle in needles]
    rules = [Rule(None, None), Rule("paper", 1.0)]
    rules += [Rule(preset, options.density, phase) for preset in PRESETS for phase in PHASES]
    rows: list[dict[str, Any]] = []
    dense = None
    with tqdm(total=len(rules) * len(needles), desc="needles", unit="prompt") as bar:
        for rule in rules:
            bar.set_postfix_str(f"{rule.name}, {rule.phase}")
            batches = list(answer(params, model_config, tokenizer, rule, needles, prompts, options, bar))
            answers = np.concatenate([batch.pop("tokens") for batch in batches])
            dense = answers if dense is None else dense
            same = np.all(answers == dense, axis=1)
            rows.append(score(rule, needles, tokenizer, answers, batches) | {"equal_dense": int(same.sum())})
            tqdm.write(describe(rows[-1]))
    ...
