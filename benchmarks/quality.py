"""The results page: figures and tables of `results/quality.json`, beside the paper's figures.

    sketchwalk eval --out benchmarks/results/quality.json
    python benchmarks/quality.py [--model DIR]

Draws the figures into `plots/`, those of one prompt with the checkpoint that was measured, and
writes the tables of README.md and QUALITY.md.
"""

import argparse
from pathlib import Path

import matplotlib
from common import RESULTS
from pages import PAGES, PLOTS, read_whole, update
from report import TABLES
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.report import drawings, model_drawings, save_drawings
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.tokenizer import load_tokenizer


def main() -> None:
    """Draws and writes everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, help="checkpoint; the bundled one by default")
    parser.add_argument("--plots", type=Path, default=PLOTS)
    parser.add_argument("--page", type=Path, action="append", help="default: all pages")
    options = parser.parse_args()

    found = read_whole(options.results / "quality.json")
    model = options.model or bundled_model()
    if hash_weights(model) != found.meta["model"]["sha256"]:
        raise SystemExit(
            f"--model must be the checkpoint that was measured, {found.meta['model']['name']}"
        )
    params, model_config = sw.load(model, dtype="float32")
    images = model_drawings(params, model_config, load_tokenizer(model)) | drawings(found.rows)
    matplotlib.use("Agg")
    options.plots.mkdir(parents=True, exist_ok=True)
    for name, image in tqdm(images.items(), desc="figures"):
        save_drawings({name: image}, options.plots)
    for page in options.page or PAGES:
        update(page, options.results, TABLES)


if __name__ == "__main__":
    main()
