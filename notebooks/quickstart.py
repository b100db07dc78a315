# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sketch-and-Walk: a quick start
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# Generate from a long prompt while each block of 64 tokens attends to few others, and look at
# which ones. Everything here runs on a CPU within a minute, top to bottom.

# %% [markdown]
# Install the package if it is not there yet; `SOURCE` is a clone of the repository, or
# `git+https://…` of one.

# %%
import importlib.util
import subprocess
import sys

SOURCE = ".."
if importlib.util.find_spec("sketchwalk_jax") is None:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", f"{SOURCE}[plots]"])

# %% [markdown]
# Import what is used below.

# %%
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np

import sketchwalk_jax as sw
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import init_params
from sketchwalk_jax.plots import plot_block_map, plot_density
from sketchwalk_jax.tokenizer import decode, encode, load_tokenizer

# %% [markdown]
# Name a Hugging Face directory of a Llama, Qwen2, Qwen2.5 or Qwen3 checkpoint in `MODEL_DIR`.
# Without one, a tiny model with random weights is written to a temporary folder: it shows the
# calls, and talks nonsense.

# %%
MODEL_DIR = os.environ.get("MODEL_DIR")
if MODEL_DIR is None:
    MODEL_DIR = tempfile.mkdtemp()
    tiny = ModelConfig(
        model_type="llama",
        vocab_size=256,
        num_layers=6,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
    )
    sw.save(MODEL_DIR, init_params(jax.random.key(0), tiny), tiny)

# %% [markdown]
# Load it: parameters are a plain tree of arrays, the model's configuration is hashable.

# %%
params, model_config = sw.load(MODEL_DIR)
print(model_config.num_layers, "layers,", model_config.dtype)

# %% [markdown]
# Make a prompt of 1,500 tokens from Python's own help; the tiny model reads bytes.

# %%
text = " ".join(" ".join(topics.values()).split())[:20_000]
tokenizer = load_tokenizer(MODEL_DIR) if (Path(MODEL_DIR) / "tokenizer.json").exists() else None
tokens = encode(tokenizer, text) if tokenizer else np.frombuffer(text.encode(), np.uint8)
tokens = tokens[None, :1500].astype(np.int32)

# %% [markdown]
# Say what is to be computed, and get a jitted `generate` for it: a row of blocks keeps a fifth of
# the blocks before it, the first one and its own among them.

# %%
config = sw.SketchWalkConfig.paper(density=0.2)
generate = sw.make_generate(model_config, config, max_new_tokens=16, return_selection=True)

# %% [markdown]
# Generate. The first call compiles; later ones do not, whatever the prompt says.

# %%
generation = generate(params, tokens)
print(decode(tokenizer, generation.tokens[0]) if tokenizer else generation.tokens[0].tolist())

# %% [markdown]
# See which key blocks each query block attended to. The two dense layers are not in the picture.

# %%
figure = plot_block_map(
    generation.selection, num_tokens=tokens.shape[1], dense_layers=config.dense_layers
)

# %% [markdown]
# The density is measured, not assumed: attended over causal pairs of queries and keys.

# %%
figure = plot_density(generation.measured_density)

# %% [markdown]
# Dense attention stands behind the same call, for comparison.

# %%
dense_generate = sw.make_generate(model_config, sw.Dense(), max_new_tokens=16)
dense = dense_generate(params, tokens)
print(int(np.sum(dense.tokens == generation.tokens)), "of 16 tokens agree")

# %% [markdown]
# `phase` makes one phase sparse and leaves the other dense.

# %%
decode_only = sw.make_generate(model_config, config, max_new_tokens=16, phase="decode")
print(f"density of prefill: {decode_only(params, tokens).measured_density.prefill[-1]:.2f}")

# %% [markdown]
# Tokens can also be handed out as they come.

# %%
for chunk in sw.stream(params, tokens, model_config=model_config, config=config, max_new_tokens=16):
    print(chunk.tokens[0].tolist())
