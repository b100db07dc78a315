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
# Ask a model for a fact in a long text. Each block of 64 tokens attends to only a few other blocks,
# and the figures show which ones. The notebook runs on a CPU within a minute.

# %% [markdown]
# Install the package if it is missing. `SOURCE` is a clone of the repository, a wheel, or, as on
# Colab, `git+https://…` of the repository. If JAX or NumPy was loaded already, the kernel restarts:
# then run the cells again.

# %%
import importlib.util
import subprocess
import sys
from shutil import which

SOURCE, EXTRAS = "..", "plots,gguf" + (",cuda12" if which("nvidia-smi") else "")
if importlib.util.find_spec("sketchwalk_jax") is None:
    wanted = f"sketchwalk-jax[{EXTRAS}] @ {SOURCE}" if "://" in SOURCE else f"{SOURCE}[{EXTRAS}]"
    command = [sys.executable, "-m", "pip", "install", "--upgrade", "--quiet", wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if sys.modules.keys() & {"jax", "jaxlib", "ml_dtypes", "numpy"}:
        get_ipython().kernel.do_shutdown(restart=True)

# %% [markdown]
# Import what the cells below use. `keep_compiled_programs` keeps compiled programs on disk, so the
# next run of this notebook does not compile them again.

# %%
import os
from pydoc_data.topics import topics

import sketchwalk_jax as sw
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.plots import plot_block_map, plot_density
from sketchwalk_jax.text.tokenizer import decode, encode, load_tokenizer

sw.keep_compiled_programs()

# %% [markdown]
# Set `MODEL_DIR` to a Hugging Face directory with a Llama, Qwen2, Qwen2.5, Qwen3 or Qwen3-MoE
# checkpoint. By default, the notebook uses the small model that ships with the package. That model
# knows English and finds facts in a text, and can do nothing else.

# %%
MODEL_DIR = os.environ.get("MODEL_DIR") or bundled_model()

# %% [markdown]
# Load it. The parameters are a plain tree of arrays, and the model's configuration is hashable.

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
# Run dense attention first. `make_generate` returns a jitted function, which stops at the model's
# end token. The first call compiles. Later calls do not compile again for another prompt of up to
# the next power of two, another density, or another `max_new_tokens` up to 256.

# %%
dense_generate = sw.make_generate(model_config, sw.Dense(), max_new_tokens=8)
dense = dense_generate(params, tokens)
print("dense:", decode(tokenizer, dense.tokens[0]))

# %% [markdown]
# Now attend to fewer pairs of tokens, in prefill and in decode, with the recommended policy at a
# density of a fifth. Its plan, which `sketchwalk calibrate` measured for this model, says how much
# of that each layer gets. A prompt as short as this one measures more than a fifth, because each
# row keeps at least 1,280 keys. If no policy is given, `make_generate` uses this one where that
# pays on the device, which are longer prompts, and dense attention elsewhere.

# %%
policy = sw.SketchWalkConfig.recommended(density=0.2, plan=model_config.plan)
generate = sw.make_generate(model_config, policy, max_new_tokens=8, return_selection=True)
generation = generate(params, tokens)
print("recommended:", decode(tokenizer, generation.tokens[0]))

# %% [markdown]
# The density is measured: it is the number of (query, key) pairs that were attended to, divided by
# the number of causal pairs. The figure shows it for each layer.

# %%
figure = plot_density(generation.measured_density)

# %% [markdown]
# The next figure shows which key blocks each query block attended to.

# %%
figure = plot_block_map(generation.selection, num_tokens=tokens.shape[1])

# %% [markdown]
# To use another policy or density, pass it as an argument. This is the method as the paper prints
# it, at the same density. It misses the fact. The results page in `benchmarks` says how often this
# happens, for every policy.

# %%
printed = sw.SketchWalkConfig.paper(density=0.2)
printed_generate = sw.make_generate(model_config, printed, max_new_tokens=8)
print("paper:", decode(tokenizer, printed_generate(params, tokens).tokens[0]))

# %% [markdown]
# `stream` returns tokens while they are generated, here two at a time.

# %%
for chunk in sw.stream(params, tokens, model_config=model_config, max_new_tokens=8, every=2):
    print(repr(decode(tokenizer, chunk.tokens[0])))
