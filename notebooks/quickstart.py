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
# Ask a long text for a fact while each block of 64 tokens attends to few others, and look at which
# ones. Everything here runs on a CPU within a minute, top to bottom.

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
from pydoc_data.topics import topics

import sketchwalk_jax as sw
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.plots import plot_block_map, plot_density
from sketchwalk_jax.tokenizer import decode, encode, load_tokenizer

# %% [markdown]
# Name a Hugging Face directory of a Llama, Qwen2, Qwen2.5 or Qwen3 checkpoint in `MODEL_DIR`.
# Without one, the small model is taken that ships with the package: it knows English and finds
# facts in it, and nothing else.

# %%
MODEL_DIR = os.environ.get("MODEL_DIR") or bundled_model()

# %% [markdown]
# Load it: parameters are a plain tree of arrays, the model's configuration is hashable.

# %%
params, model_config = sw.load(MODEL_DIR, dtype="float32")
tokenizer = load_tokenizer(MODEL_DIR)
print(model_config.num_layers, "layers, context", model_config.context_length)

# %% [markdown]
# Hide a fact in Python's own help, and ask for it at the end.

# %%
text = " ".join(" ".join(topics.values()).split())[:9_000]
place = text.index(" ", 5_000)
text = text[:place] + " The code of lantern is 68084." + text[place:] + " Q: code of lantern? A:"
tokens = encode(tokenizer, text)[None]
print(tokens.shape[1], "tokens")

# %% [markdown]
# Dense attention first: `make_generate` returns a jitted function, which stops at the model's end
# token. The first call compiles; later ones do not, whatever the prompt says.

# %%
dense_generate = sw.make_generate(model_config, sw.Dense(), max_new_tokens=8)
dense = dense_generate(params, tokens)
print("dense:", decode(tokenizer, dense.tokens[0]))

# %% [markdown]
# Now the prompt is read sparsely, by the rule of the authors' published code. The answer is still
# written with dense attention (`phase`).

# %%
config = sw.SketchWalkConfig.released()
generate = sw.make_generate(
    model_config, config, max_new_tokens=8, phase="prefill", return_selection=True
)
generation = generate(params, tokens)
print("released:", decode(tokenizer, generation.tokens[0]))

# %% [markdown]
# The density is measured, not assumed: attended over causal pairs of queries and keys. The first
# two layers are dense.

# %%
figure = plot_density(generation.measured_density)

# %% [markdown]
# See which key blocks each query block attended to. The two dense layers are not in the picture.

# %%
figure = plot_block_map(
    generation.selection, num_tokens=tokens.shape[1], dense_layers=config.dense_layers
)

# %% [markdown]
# The method as printed, a fifth of the blocks, sparse in prefill and decode. It misses the fact:
# the results page in `benchmarks` says how often, for every policy.

# %%
printed = sw.SketchWalkConfig.paper(density=0.2)
printed_generate = sw.make_generate(model_config, printed, max_new_tokens=8)
print("paper:", decode(tokenizer, printed_generate(params, tokens).tokens[0]))

# %% [markdown]
# Tokens can also be handed out as they come, here two at a time.

# %%
call = dict(model_config=model_config, config=config, max_new_tokens=8, phase="prefill", every=2)
for chunk in sw.stream(params, tokens, **call):
    print(repr(decode(tokenizer, chunk.tokens[0])))
