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
# # Choosing a policy: accuracy, density, cost
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# How much of attention can be left out before answers are lost? How much does that save, and which
# blocks does each policy keep? This notebook measures it on prompts with many facts, for your own
# model if you name one in `MODEL_DIR`. It runs on a CPU within two minutes.

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
import os
from pydoc_data.topics import topics

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import sketchwalk_jax as sw
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.plots import plot_block_map
from sketchwalk_jax.policies import LayerShape, by_name

sw.keep_compiled_programs()

# %% [markdown]
# Load the model. By default, this is the small one that ships with the package.

# %%
lm = sw.LanguageModel.load(os.environ.get("MODEL_DIR") or bundled_model())
params, model_config = lm.params, lm.model_config
print(lm)

# %% [markdown]
# ## Prompts with many questions
#
# One prompt asks for sixteen facts that are hidden in a long text. Each question is followed by its
# right answer. One forward pass then tests all answers: an answer counts as right if the model
# gives each of its tokens the highest probability, after the correct tokens before it (*teacher
# forcing*).

# %%
text = " ".join(" ".join(topics.values()).split())
words = "lantern window harbour castle garden bottle mirror ladder".split()
words += "feather blanket whistle candle pillow bucket ribbon thunder".split()


def draw_prompt(seed, num_characters=3_000):
    rng = np.random.default_rng(seed)
    codes = [str(code) for code in rng.integers(10_000, 100_000, len(words))]
    places = np.sort(rng.integers(0, num_characters, len(words)))
    parts = np.split(np.array(list(text[seed * num_characters :][:num_characters])), places)
    facts = [f" The code of {word} is {code}." for word, code in zip(words, codes)] + [""]
    document = "".join("".join(part) + fact for part, fact in zip(parts, facts))
    asked = rng.permutation(len(words))
    return document, [(f" Q: code of {words[i]}? A:", f" {codes[i]}.") for i in asked]


# %% [markdown]
# Draw two such prompts as tokens, padded on the right, and note the columns of each answer.

# %%
rows, answers = [], []
for seed in range(2):
    document, asked = draw_prompt(seed)
    row = [*lm.encode(document)]
    for question, answer in asked:
        row += lm.tokenizer.encode(question, add_special_tokens=False)
        tokens = lm.tokenizer.encode(answer, add_special_tokens=False)
        answers.append((seed, slice(len(row), len(row) + len(tokens))))
        row += tokens
    rows.append(row)
lengths = np.array([len(row) for row in rows], np.int32)
prompts = np.zeros((len(rows), 64 * -(-lengths.max() // 64)), np.int32)
for line, row in zip(prompts, rows):
    line[: len(row)] = row
print(lengths, "tokens;", len(answers), "answers")

# %% [markdown]
# ## Measuring one policy
#
# `prefill` reads the prompts with a policy. The logits of all tokens say what the model would have
# answered. The cache has counted the pairs that were attended to.


# %%
def measure(policy):
    options = {"model_config": model_config, "policy": policy}
    batch, max_tokens = prompts.shape
    cache = sw.init_cache(
        batch=batch, max_tokens=max_tokens, dtype=params["embed"]["embedding"].dtype, **options
    )
    options |= {"return_all_logits": True, "return_selection": True, "lengths": lengths}
    logits, cache, selection = sw.prefill(params, prompts, cache, **options)
    likeliest = np.asarray(jnp.argmax(logits, axis=-1))
    is_right = [
        np.array_equal(likeliest[row, span.start - 1 : span.stop - 1], prompts[row, span])
        for row, span in answers
    ]
    return float(cache.density.overall), np.mean(is_right), selection


# %% [markdown]
# Compare three policies: the recommended policy with the model's plan; the rule as the paper prints
# it; and `streaming`, which keeps the first block and the newest blocks, whatever they contain.
# `by_name` makes these and every other policy in `sketchwalk_jax.policies.POLICIES`.


# %%
def candidate(name, density):
    if name == "recommended":
        return sw.SketchWalkConfig.recommended(density=density, plan=model_config.plan)
    preset = name if name == "paper" else None
    return by_name("sketchwalk" if preset else name, preset=preset, density=density)


names, densities = ("recommended", "paper", "streaming"), (0.2, 0.4)
dense = measure(sw.Dense())[1]
found = {name: [measure(candidate(name, d)) for d in densities] for name in names}

# %% [markdown]
# ## Accuracy against density
#
# The horizontal axis is the measured density: attended pairs divided by causal pairs, over all
# layers, dense ones included. At this length the first block, the newest blocks and, in `paper` and
# `streaming`, two dense layers are a large part of it. Add more values to `densities` to measure
# more points: all densities of a policy run the same programs.

# %%
figure, axis = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
for name, marker in zip(names, "osv"):
    density, accuracy, _ = zip(*found[name])
    axis.plot(density, accuracy, marker=marker, label=name)
axis.axhline(dense, color="black", linestyle=":", linewidth=1, label="dense")
axis.set(xlabel="measured density", ylabel="right answers", xlim=(0, None), ylim=(-0.03, 1.05))
axis.legend(frameon=False, loc="center left")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## What it costs
#
# The number of pairs is a measure of arithmetic. The cost of a decoded token is mostly memory
# traffic: the keys and values that it reads, and what the policy reads to choose them. This cell
# computes both for one layer, after a context of 16,384 tokens.

# %%
num_tokens = 16_384
layer = LayerShape(
    model_config.num_heads, model_config.num_kv_heads, model_config.head_dim, jnp.bfloat16
)
everything = 2 * 2 * num_tokens * layer.num_kv_heads * layer.head_dim  # bytes of keys and values
costs = {"dense": (1.0, 0.0)}
for name in ("recommended", "paper", "quest", "adamas"):
    policy = candidate(name, 0.1)
    read = float(policy.metadata_bytes(layer, jnp.array([num_tokens - 1]))[0])
    costs[f"{name}, 0.1"] = (0.1, read / everything)

# %% [markdown]
# The bars are fractions of what dense attention reads. `quest` and `adamas` select in decode only.
# A policy that reads more to choose its blocks can be worth it if it loses fewer answers.

# %%
figure, axis = plt.subplots(figsize=(5.6, 2.6), layout="constrained")
kept, looked_at = np.array(list(costs.values())).T
axis.barh(list(costs), kept, color="#0072B2", label="keys and values")
axis.barh(list(costs), looked_at, left=kept, color="#D55E00", label="to select them")
axis.set_xlabel("bytes read per token, relative to dense attention")
axis.invert_yaxis()
axis.legend(frameon=False, loc="lower right")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Which blocks
#
# Each row is a block of 64 queries, and each column a block of 64 keys. The plan of the recommended
# policy gives each layer its own density. The figure shows the first prompt at a density of 0.2.

# %%
selection = found["recommended"][densities.index(0.2)][2]
figure = plot_block_map(selection, num_tokens=int(lengths[0]))

# %% [markdown]
# ## What to use
#
# - For sparse prefill: `recommended`, with a plan. `sketchwalk calibrate --model DIR` measures the
#   plan of a model. The results page compares the policy with MInference and FlexPrefill.
# - For sparse decode only: `recommended` with `phase="decode"`. `quest` is the strongest
#   alternative.
# - To measure a checkpoint at several lengths and on eight tasks: `sketchwalk eval --model DIR`,
#   then `sketchwalk report`.
