"""The picture of README.md: blocks attended to while a needle question is read.

    python benchmarks/block_map.py --model DIR [--text FILE] [--preset paper] [--density 0.2]

An orange mark below each map stands at the block that holds the needle.
"""

import argparse
from pathlib import Path

import common
import matplotlib
from haystack import draw_needles, read_text

import sketchwalk_jax as sw
from sketchwalk_jax.plots import plot_block_map
from sketchwalk_jax.policies import PRESETS, by_name
from sketchwalk_jax.tokenizer import encode, load_tokenizer

_ORANGE = "#D55E00"


def main() -> None:
    """Reads one prompt and draws its map."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory with a tokenizer")
    parser.add_argument("--text", help="UTF-8 text, plain or .xz; Python's help topics by default")
    parser.add_argument("--text-tail", type=float, default=1.0, help="use the last share of it")
    parser.add_argument("--tokens", type=int, default=2700, help="tokens of the prompt, about")
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument("--density", type=float, help="not for the preset `released`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=common.RESULTS.parent / "plots/block_map.png")
    options = parser.parse_args()

    params, model_config = sw.load(options.model, dtype="float32")
    tokenizer = load_tokenizer(options.model)
    text, _ = read_text(options.text, options.text_tail)
    (needle,) = draw_needles(text, tokenizer, count=1, num_tokens=options.tokens, seed=options.seed)
    tokens = encode(tokenizer, needle.prompt)[None]
    config = by_name("sketchwalk", preset=options.preset, density=options.density)
    generate = sw.make_generate(model_config, config, max_new_tokens=1, return_selection=True)
    generation = generate(params, tokens)

    matplotlib.use("Agg")
    density = float(generation.measured_density.prefill[-1])
    figure = plot_block_map(
        generation.selection,
        num_tokens=tokens.shape[1],
        dense_layers=config.dense_layers,
        title=f"Blocks attended to in a prompt of {tokens.shape[1]:,} tokens "
        f"(preset {options.preset}, measured density {density:.2f})",
    )
    before = needle.prompt[: needle.prompt.index(f"{needle.code}.")]
    block = len(encode(tokenizer, before)) // config.block_size
    for axis in figure.axes:
        bottom = axis.get_ylim()[0]
        axis.plot([block], [bottom], "^", color=_ORANGE, markersize=6, clip_on=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
