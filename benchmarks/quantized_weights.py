"""Measures how far 8-bit weights move the distributions of the next token.

    python benchmarks/quantized_weights.py --model FILE.gguf [--tokens 4096] [--prompts 8]
    python benchmarks/report.py      # the tables

A model reads texts with dense attention and its own weights: `p` is its distribution after each
token. It reads them again with quantised weights, with sparse attention, and with both: `q`. Each
of these is averaged over all tokens of a text but the last::

    KL(p ‖ q) = Σ_v p[v] (log p[v] - log q[v])      nats
    loss      = -log q[next token]                  nats
    agreement = whether the likeliest tokens of p and q are the same

To locate the loss, float8 weights are also used in some layers only, and dequantised to the model's
dtype, which leaves the inputs of layers unquantised.
"""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from real_models import default_dtype
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation import read_text
from sketchwalk_jax.evaluation.measure import compare_logits
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.evaluation.tasks import draw_samples
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.inference.steps import read_into_new_cache
from sketchwalk_jax.models import ModelConfig, quantize_params
from sketchwalk_jax.models.params import QUANTIZED_DTYPES
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.text.tokenizer import load_tokenizer

PyTree = Any
Row = dict[str, Any]
OUT = common.RESULTS / "quantized_weights.json"
NAMES = ("model", "tokens", "weights", "part", "policy", "density")
ALL = "all layers"
WIDENED = "all layers, inputs not rounded"
# Layers with quantised weights; the others keep their weights.
PARTS = {
    "query, key and value": ("query", "key", "value"),
    "out": ("out",),
    "gate and up": ("gate", "up"),
    "down": ("down",),
}
_CHUNK = 256  # tokens whose logits, which are large, are in memory at a time


def main() -> None:
    """Measures models; their rows replace the file's rows of these models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--weights", nargs="+", choices=QUANTIZED_DTYPES, help="default: all")
    parser.add_argument("--density", type=float, default=0.2, help="of sparse attention")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="default: the checkpoint's, float32 on CPUs")
    parser.add_argument("--text", type=Path, help="default: Python's help topics")
    parser.add_argument("--text-tail", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    keep_compiled_programs()
    text = read_text(options.text, tail=options.text_tail)
    machine = common.describe_machine(seed=options.seed, text=text.about)
    same = ("seed", "text")
    if options.out.exists():  # refuse a file of other results before measuring
        common.add_rows(options.out, machine, [], NAMES, *same)
    for path in options.model:
        name = path.stem if path.is_file() else path.name
        samples = draw_samples(
            "text_loss",
            text,
            load_tokenizer(path),
            num_tokens=options.tokens,
            count=options.prompts,
            seed=options.seed,
        )
        params, model_config = sw.load(path, dtype=options.dtype or default_dtype(), progress=False)
        dtype = params["embed"]["embedding"].dtype.name
        models = common.read_results(options.out)["meta"].get("models", {})
        models |= {name: {"sha256": hash_weights(path), "dtype": dtype}}
        rows = measure(
            params,
            np.stack([sample.tokens for sample in samples]),
            model_config,
            weights=options.weights or tuple(QUANTIZED_DTYPES),
            density=options.density,
        )
        where = {"model": name, "tokens": options.tokens}
        for row in rows:  # one at a time, so that an interrupted run keeps its rows
            common.add_rows(options.out, machine | {"models": models}, [where | row], NAMES, *same)


def measure(
    params: PyTree,
    texts: Int[np.ndarray, "P T"],
    model_config: ModelConfig,
    *,
    weights: tuple[str, ...],
    density: float,
) -> Iterator[Row]:
    """Yields rows for types of weights and attention, and for parts of the layers in float8.

    Args:
      params: Parameter tree, not quantised.
      texts: Texts of one length.
      model_config: The model.
      weights: Types of weights to measure.
      density: Density of sparse attention.

    Yields:
      Rows with `weights`, `part`, `policy`, `density` and, with an entry for each text, `kl`,
      `loss` and `agreement`.
    """
    sparse = sw.SketchWalkConfig.recommended(density=density, plan=model_config.plan)
    policies: Mapping[str, Policy] = {"dense": Dense(), "recommended": sparse}
    settings = {
        name: Settings(model_config=model_config, policy=policy)
        for name, policy in policies.items()
    }

    base: list[Float[np.ndarray, "1 T D"]] = []  # outputs of the first row
    dtype = params["embed"]["embedding"].dtype.name

    def row(own: PyTree, policy: str = "dense", **names: Any) -> Row:
        found = []
        for index, text in enumerate(tqdm(texts, desc=", ".join(names.values()))):
            hidden = np.asarray(_read(own, text[None], settings=settings[policy]))
            if len(base) == index:
                base.append(hidden)
            pair = base[index], hidden
            found.append(_compare(params, *pair, text[None], model_config=model_config))
        kl, loss, agreement = np.asarray(jax.device_get(found), np.float64).round(6).T.tolist()
        names |= {"policy": policy, "density": 1.0 if policy == "dense" else density}
        return names | {"kl": kl, "loss": loss, "agreement": agreement, "prompts": len(texts)}

    for policy in policies:
        yield row(params, policy, weights=dtype, part=ALL)
    for kind in weights:
        narrow = quantize_params(params, kind)
        for policy in policies:
            yield row(narrow, policy, weights=kind, part=ALL)
        if kind == "float8":
            yield row(_widen(params, narrow), weights=kind, part=WIDENED)
            for part, names in PARTS.items():
                layers = params["layers"] | {name: narrow["layers"][name] for name in names}
                yield row({**params, "layers": layers}, weights=kind, part=part)


def _widen(params: PyTree, narrow: PyTree) -> PyTree:
    """Dequantises float8 weights into the parameters' dtype."""
    layers = dict(params["layers"])
    for name, leaf in narrow["layers"].items():
        if "quantized" in leaf:
            quantized, scales = leaf["quantized"], leaf["scales"]
            inputs = quantized.ndim - scales.ndim
            wide = quantized.astype(jnp.float32) * jnp.expand_dims(scales, [*range(-inputs, 0)])
            # Outputs come first in quantised weights, and last in a kernel.
            wide = jnp.moveaxis(wide, range(-inputs, 0), range(1, 1 + inputs))
            kernel = layers[name]["kernel"]
            layers[name] = layers[name] | {"kernel": wide.astype(kernel.dtype)}
    return {**params, "layers": layers}


@partial(jax.jit, static_argnames="settings")
def _read(
    params: PyTree, tokens: Int[Array, "1 T"], *, settings: Settings
) -> Float[Array, "1 T D"]:
    """Computes the last layer's output after every token."""
    num_tokens = tokens.shape[1]
    lengths, columns = jnp.array([num_tokens]), jnp.arange(num_tokens)[None]
    return read_into_new_cache(params, tokens, lengths, columns, settings=settings)[0]


@partial(jax.jit, static_argnames="model_config")
def _compare(
    params: PyTree,
    exact: Float[Array, "1 T D"],
    hidden: Float[Array, "1 T D"],
    tokens: Int[Array, "1 T"],
    *,
    model_config: ModelConfig,
) -> tuple[Array, Array, Array]:
    """Computes KL, loss and agreement, means over all tokens but the last."""
    count = tokens.shape[1] - 1

    def chunk(columns: Array) -> tuple[Array, Array, Array]:
        pair = (unembed(params, x[0, columns], model_config=model_config) for x in (exact, hidden))
        loss, kl, agrees = compare_logits(*pair, tokens[0, columns + 1])
        is_here, numbers = columns < count, (kl, loss, agrees.astype(jnp.float32))
        return tuple(jnp.sum(jnp.where(is_here, one, 0)) / count for one in numbers)

    columns = jnp.arange(-(-count // _CHUNK) * _CHUNK).reshape(-1, _CHUNK)
    kl, loss, agreement = jax.lax.map(chunk, columns)
    return kl.sum(), loss.sum(), agreement.sum()


if __name__ == "__main__":
    main()
