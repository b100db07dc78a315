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
# # On a GPU: speed by context
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# How much faster is attention over a tenth of the blocks than dense attention, at which contexts,
# and how much of that remains in a whole model? This notebook measures it on your GPU, within a few
# minutes. Without a GPU it says so and measures nothing.

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
# Import what the cells below use, and keep compiled programs on disk for the next session.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import sketchwalk_jax as sw
from sketchwalk_jax.models import ModelConfig, init_params

sw.keep_compiled_programs()

# %% [markdown]
# H100 and H200 run everything on kernels. Other NVIDIA GPUs from Ampere on (A100, RTX 30, 40 and
# 50, L4, B200) have kernels of their own for attention, selection and the linear layers of a token.
# Speeds on them have not been measured. A T4 and older GPUs run everything through XLA, which gains
# less. The command `sketchwalk info` reports what a machine runs.

# %%
HAS_GPU = jax.default_backend() == "gpu"
CONTEXTS = (8_192, 16_384, 32_768, 65_536) if HAS_GPU else ()
print(jax.devices()[0].device_kind)
if not HAS_GPU:
    print("No GPU here, so the rest is skipped. On Colab: Runtime, Change runtime type.")

# %% [markdown]
# ## Timing
#
# JAX returns before the GPU has finished, and the first call compiles. So this function runs each
# call once to warm up, then runs the calls in turns and waits for each. It reports the median over
# the rounds.


# %%
def time_in_turns(calls, rounds=7):
    seconds = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in seconds.items()}


# %% [markdown]
# ## Attention alone
#
# There are 32 query heads and 8 key/value heads, as in Llama 3.1 8B, in bfloat16.
# `block_sparse_attention` takes lists of blocks. Here, each list has a tenth of the blocks up to
# its row, evenly spaced: the time does not depend on which blocks are listed.


# %%
def lists_of(num_tokens, density=0.1, block_size=64):
    rows = np.arange(num_tokens // block_size)
    counts = np.maximum(1, np.ceil(density * (rows + 1))).astype(np.int32)
    ids = np.full((len(rows), counts[-1]), len(rows), np.int32)
    for row, count in enumerate(counts):
        ids[row, :count] = np.linspace(0, row, count, dtype=np.int32)
    ids, counts = jnp.asarray(ids)[None, None], jnp.asarray(counts)[None, None]
    return sw.BlockSelection(ids, counts, block_size)


# %% [markdown]
# Dense attention runs through cuDNN where cuDNN supports the call.


# %%
def attention_times(num_tokens, dtype=jnp.bfloat16, heads=(32, 8), head_dim=128):
    shapes = [(1, num_tokens, count, head_dim) for count in (heads[0], heads[1], heads[1])]
    q, k, v = (jax.random.normal(jax.random.key(i), one, dtype) for i, one in enumerate(shapes))
    selection = lists_of(num_tokens)
    calls = {"dense": lambda: sw.dense_attention(q, k, v)}
    calls["sparse"] = lambda: sw.block_sparse_attention(q, k, v, selection)
    return time_in_turns(calls)


attention = {num_tokens: attention_times(num_tokens) for num_tokens in CONTEXTS}

# %% [markdown]
# ## A whole model
#
# The model has the shapes of Llama 3.2 1B and random weights: the time does not depend on their
# values. The time to read a prompt is the time of a call with one new token. The time of a decoded
# token is what 64 more tokens add to that call, divided by 64.

# %%
MODEL = ModelConfig(
    model_type="llama",
    vocab_size=128_256,
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=2**17,
    tie_word_embeddings=True,
    dtype="bfloat16",
)

# %% [markdown]
# Time both policies, each with one new token and with 65.


# %%
def model_times(params, model_config, num_tokens):
    tokens = jax.random.randint(jax.random.key(1), (1, num_tokens), 0, model_config.vocab_size)
    calls = {}
    for name, policy in POLICIES.items():
        for new in (1, 65):
            options = {"model_config": model_config, "policy": policy, "max_new_tokens": new}
            calls[name, new] = lambda options=options: sw.generate(params, tokens, **options).tokens
    return time_in_turns(calls, rounds=3)


# %% [markdown]
# Compare dense attention with the recommended policy at a density of 0.1. Without a plan, all
# layers have the same density.

# %%
POLICIES = {"dense": sw.Dense(), "sparse": sw.SketchWalkConfig.recommended(density=0.1)}
model = {}
if HAS_GPU:
    params = init_params(jax.random.key(0), MODEL)
    model = {num_tokens: model_times(params, MODEL, num_tokens) for num_tokens in CONTEXTS}

# %% [markdown]
# ## The figure
#
# The figure shows how many times faster sparse attention is than dense attention: for attention
# alone, for reading a prompt, and for a decoded token.


# %%
def speedups():
    yield "attention of a prompt", [one["dense"] / one["sparse"] for one in attention.values()]
    yield "reading a prompt", [one["dense", 1] / one["sparse", 1] for one in model.values()]
    token = [{name: one[name, 65] - one[name, 1] for name in POLICIES} for one in model.values()]
    yield "a decoded token", [one["dense"] / one["sparse"] for one in token]


if CONTEXTS:
    figure, axis = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
    for (label, values), marker in zip(speedups(), "osv"):
        axis.plot(CONTEXTS, values, marker=marker, label=label)

# %% [markdown]
# Label the horizontal axis with powers of two, and draw a line where both are equally fast.

# %%
if CONTEXTS:
    axis.set_xscale("log", base=2)
    axis.set_xticks(CONTEXTS, [f"{num_tokens // 1024}K" for num_tokens in CONTEXTS])
    axis.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axis.set(xlabel="context, tokens", ylabel="times faster than dense", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    display(figure)

# %% [markdown]
# `benchmarks/KERNELS.md` has these measurements on an H200, with batches and the cost of selection.
# Its appendices have products with weights, and what was tried.
