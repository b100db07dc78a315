"""Needle in a haystack: how many codes a model still finds under each way of selecting blocks.

    python benchmarks/needles.py --model DIR [--text FILE] [--count 50] [--density 0.2]

A prompt is English text with one sentence `The code of lantern is 68084.` in it, and the question
`Q: code of lantern? A: ` behind it. Words and codes are distinct, depths spread evenly. Every
policy answers the same prompts, greedily; an answer is right if it is the code.
"""

import argparse
import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
from haystack import Needle, draw_needles, read_text
from scipy.stats import binomtest
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.policies import PRESETS, by_name
from sketchwalk_jax.tokenizer import decode, encode, load_tokenizer

PHASES = ("both", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What answers: dense (`preset=None`) or a preset, at a density, sparse in a phase."""

    name: str
    preset: str | None = None
    density: float | None = None
    phase: str = "both"

    def policy(self) -> Any:
        """The policy itself."""
        return by_name(
            "sketchwalk" if self.preset else "dense", preset=self.preset, density=self.density
        )


@dataclasses.dataclass(frozen=True)
class Prompts:
    """All prompts as one array: tokens right-padded `[count, T]`, and their lengths."""

    tokens: np.ndarray
    lengths: np.ndarray


def main() -> None:
    """Asks every policy and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory with a tokenizer")
    parser.add_argument("--text", help="UTF-8 text, plain or .xz; Python's help topics by default")
    parser.add_argument("--text-tail", type=float, default=1.0, help="use the last share of it")
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
    text, source = read_text(options.text, options.text_tail)
    needles = draw_needles(
        text, tokenizer, count=options.count, num_tokens=options.tokens, seed=options.seed
    )
    prompts = pad_prompts([encode(tokenizer, needle.prompt) for needle in needles])
    longest = max(len(encode(tokenizer, needle.code)) for needle in needles)
    rules, rows, dense = make_rules(options.density), [], None
    with tqdm(total=len(rules) * len(needles), desc="needles", unit="prompt") as bar:
        for rule in rules:
            bar.set_postfix_str(f"{rule.name}, {rule.phase}")
            generate = sw.make_generate(
                model_config, rule.policy(), max_new_tokens=longest + 1, phase=rule.phase
            )
            start = time.perf_counter()
            answers, density = ask(generate, params, prompts, options.batch, bar)
            seconds = time.perf_counter() - start
            dense = answers if dense is None else dense
            texts = [decode(tokenizer, answer) for answer in answers]
            rows.append(
                dataclasses.asdict(rule)
                | score(needles, texts)
                | {"equal_to_dense": int(np.all(answers == dense, axis=1).sum())}
                | {"measured_density": summarize_density(density, rule.policy().dense_layers)}
                | {"seconds": seconds}
            )
            tqdm.write(describe(rows[-1]))
    meta = common.describe_machine(
        model={"name": Path(options.model).name, "sha256": hash_weights(options.model)},
        text=source | {"tail": options.text_tail},
        seed=options.seed,
        dtype=options.dtype,
        prompt_tokens={"min": int(prompts.lengths.min()), "max": int(prompts.lengths.max())},
    )
    common.write_results(options.out, meta, rows)


def make_rules(density: float) -> list[Rule]:
    """Dense first; full density through the sparse path; each preset in each phase."""
    rules = [Rule("dense"), Rule("full", "paper", 1.0)]
    for preset in PRESETS:
        # What `released` keeps follows from its own rule.
        nominal = None if preset == "released" else density
        rules += [Rule(preset, preset, nominal, phase) for phase in PHASES]
    return rules


def pad_prompts(prompts: list[np.ndarray]) -> Prompts:
    """Prompts of different lengths in one array."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Prompts(tokens, lengths)


def ask(
    generate: Callable[..., sw.Generation], params: Any, prompts: Prompts, batch: int, bar: Any
) -> tuple[np.ndarray, sw.Density]:
    """New tokens of all prompts `[count, U]`, and the pairs attended to for them."""
    answers, densities = [], []
    for start in range(0, len(prompts.tokens), batch):
        some = slice(start, start + batch)
        out = generate(params, prompts.tokens[some], lengths=prompts.lengths[some])
        answers.append(np.asarray(out.tokens))
        densities.append(dataclasses.astuple(out.measured_density))
        bar.update(len(answers[-1]))
    parts = zip(*densities, strict=True)
    return np.concatenate(answers), sw.Density(*(np.concatenate(part, -1) for part in parts))


def summarize_density(density: sw.Density, dense_layers: int) -> dict[str, float]:
    """Measured density over everything, and over the sparse layers of each phase."""
    return {
        "overall": float(density.overall),
        "prefill_sparse_layers": float(np.mean(density.prefill[dense_layers:])),
        "decode_sparse_layers": float(np.mean(density.decode[dense_layers:])),
    }


def score(needles: list[Needle], texts: list[str]) -> dict[str, Any]:
    """Right answers, with Wilson's interval at 95 %."""
    right = [
        answer.lstrip().startswith(needle.code)
        and not answer.lstrip()[len(needle.code) :][:1].isdigit()
        for needle, answer in zip(needles, texts, strict=True)
    ]
    interval = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    return {
        "exact": sum(right),
        "count": len(right),
        "interval": [float(interval.low), float(interval.high)],
        "is_right": [int(one) for one in right],
    }


def hash_weights(directory: str) -> dict[str, str]:
    """SHA-256 of every safetensors file."""
    files = sorted(Path(directory).glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    low, high = row["interval"]
    return (
        f"{row['name']:<8} {row['phase']:<8} {row['exact']:>3} of {row['count']} "
        f"({low:.2f}-{high:.2f})  measured density {row['measured_density']['overall']:.3f}  "
        f"equal to dense {row['equal_to_dense']}  {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
