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
# # A policy of your own: from an idea to a figure
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# A policy says which key blocks each query block attends to. The package provides everything else:
# caches, attention, density counts and evaluation. This notebook writes a policy in twenty lines,
# finds that it fails, fixes it, and compares both versions with the recommended policy. It runs on
# a CPU within two minutes.

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
import dataclasses
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import sketchwalk_jax as sw
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.policies.base import BudgetPolicy

sw.keep_compiled_programs()
lm = sw.LanguageModel.load(bundled_model())

# %% [markdown]
# ## The idea
#
# A block is worth reading if its keys point where the queries look. The simplest form of this is a
# score: the score of key block `j` for query block `i` is the inner product of the mean query of
# `i` with the mean key of `j`, summed over the heads.
#
# A policy is a frozen dataclass. `BudgetPolicy` provides the density, and the first and newest
# blocks, which every row keeps. This helper splits tokens into blocks. `span` says which blocks a
# call adds, and which of its columns hold a token.


# %%
class MyPolicy(BudgetPolicy):
    def by_block(self, x, span):
        """[B, T, heads, H] as [B, blocks, tokens of a block, heads, H], padding as zeros."""
        x = jnp.where(span.valid[:, :, None, None], x.astype(jnp.float32), 0.0)
        size = min(self.block_size, x.shape[1])  # one token in decode
        return x.reshape(x.shape[0], -1, size, *x.shape[2:])


# %% [markdown]
# The policy itself has two parts. The first is a summary of each block, which is stored beside the
# cache and grows with it, in prefill and in decode. The second is a score. Sums replace means here:
# full blocks have equally many tokens, so both rank blocks the same way.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanKey(MyPolicy):
    def init_statistics(self, shape, *, batch, num_blocks):
        return jnp.zeros((batch, num_blocks, shape.num_kv_heads, shape.head_dim), jnp.float32)

    def update_statistics(self, query, key, statistics, *, span, kernel_config=None):
        rows = jnp.arange(len(span.end), dtype=jnp.int32)[:, None]
        sums = self.by_block(key, span).sum(2)
        return statistics.at[rows, span.rows(self.block_size)].add(sums, mode="drop")

    def score(self, query, key, statistics, *, layer, span):
        query = self.by_block(query, span).sum(2)
        query = query.reshape(*query.shape[:2], statistics.shape[2], -1, query.shape[-1])
        return jnp.einsum("bikgh,bjkh->bij", query, statistics)


# %% [markdown]
# The policy is complete, and every function that takes a policy takes this one. Here it reads a
# short text and answers a question.

# %%
text = " ".join(" ".join(topics.values()).split())
prompt = text[:900] + " The code of lantern is 68084." + text[900:1200] + " Q: code of lantern? A:"
print(lm.with_policy(MeanKey(density=0.3)).generate(prompt, max_new_tokens=8))

# %% [markdown]
# ## What it loses
#
# One answer says little. The next prompts ask for sixteen facts each, and each question is followed
# by its right answer. So one forward pass tests all of them: an answer is right if the model gives
# each of its tokens the highest probability.

# %%
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
# Measure the density and the right answers of one policy. The density is counted from the lists
# that the policy made.


# %%
def measure(policy):
    options = {"model_config": lm.model_config, "policy": policy}
    batch, max_tokens = prompts.shape
    dtype = lm.params["embed"]["embedding"].dtype
    cache = sw.init_cache(batch=batch, max_tokens=max_tokens, dtype=dtype, **options)
    options |= {"return_all_logits": True, "return_selection": True, "lengths": lengths}
    logits, cache, selection = sw.prefill(lm.params, prompts, cache, **options)
    likeliest = np.asarray(jnp.argmax(logits, axis=-1))
    is_right = [
        np.array_equal(likeliest[row, span.start - 1 : span.stop - 1], prompts[row, span])
        for row, span in answers
    ]
    return float(cache.density.overall), np.mean(is_right), selection


# %% [markdown]
# Measure the idea at a fifth of the blocks:

# %%
print(f"right: {measure(MeanKey(density=0.2))[1]:.0%}")

# %% [markdown]
# ## What was wrong
#
# A mean of 64 keys hides the one key that answers, and a mean of 64 queries hides the one query
# that asks. So this version scores single keys: each key of a block, for every eighth query of the
# row. To make heads comparable, it first turns the products into attention by a softmax over all
# keys. The score of a block is that of its best key, for any head and query.
#
# `key` is the stacked cache, and `layer` is the index of this layer in it. This version keeps no
# summary. It reads all keys for eight queries of 64, which costs an eighth of the products of dense
# attention.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class BestKey(MyPolicy):
    def score(self, query, key, statistics, *, layer, span):
        keys = key[layer].astype(jnp.float32)  # [B, S, K, H]
        query = self.by_block(query, span)[:, :, ::8]
        query = query.reshape(*query.shape[:3], keys.shape[2], -1, keys.shape[3])
        products = jnp.einsum("bitkgh,bskh->bkgtis", query, keys) / keys.shape[3] ** 0.5
        column = jnp.arange(keys.shape[1], dtype=jnp.int32)
        is_past = column // self.block_size <= span.rows(self.block_size)[:, :, None]
        is_past &= (column < span.end[:, None])[:, None]
        is_past = is_past[:, None, None, None]
        attention = jax.nn.softmax(jnp.where(is_past, products, -1e30), axis=-1)
        return attention.reshape(*attention.shape[:-1], -1, self.block_size).max((1, 2, 3, 6))


# %% [markdown]
# Every policy must pass this test: with all blocks, it is dense attention. The answers are those of
# dense attention too.

# %%
for name, policy in {"all blocks": BestKey(density=1.0), "dense": sw.Dense()}.items():
    density, accuracy, _ = measure(policy)
    print(f"{name}: right {accuracy:.0%}, density {density:.2f}")

# %% [markdown]
# ## The figure
#
# The figure compares both ideas with the recommended policy, at two densities. The recommended
# policy does four things more. It uses the queries that differ most, instead of every eighth. It
# carries page scores from layer to layer. It divides the density among the layers by a plan. And it
# scores keys that are stored in four bits.


# %%
def recommended(density):
    return sw.SketchWalkConfig.recommended(density=density, plan=lm.model_config.plan)


rules = {"mean key": MeanKey, "best key": BestKey, "recommended": recommended}
figure, axis = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
for (name, rule), marker in zip(rules.items(), "vso"):
    density, accuracy, _ = zip(*[measure(rule(density=d)) for d in (0.2, 0.4)])
    axis.plot(density, accuracy, marker=marker, label=name)
axis.set(xlabel="measured density", ylabel="right answers", xlim=(0, None), ylim=(-0.03, 1.05))
axis.legend(frameon=False, loc="center left")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Where to go from here
#
# - The guide `sketchwalk_jax/policies/README.md` explains the other base classes, such as
#   `DecodePolicy` for policies that select single tokens. It also lists what must hold for a policy
#   that others will use.
# - Add a line to `sketchwalk_jax/policies/__init__.py` to give the policy a name. Then `sketchwalk
#   eval --policy NAME` compares it with all others on eight tasks, with confidence intervals.
