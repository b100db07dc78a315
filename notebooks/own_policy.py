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
# A policy says which blocks of keys a query block attends to; caches, attention, counting and
# evaluation are there already. This writes one in twenty lines, sees it fail, mends it, and draws
# both beside the recommended one. On a CPU, within two minutes.

# %% [markdown]
# Install the package if it is not there yet. `SOURCE` is a clone of the repository, a wheel, or, as
# on Colab, `git+https://…` of the repository. Where an older JAX or NumPy is in use already, the
# kernel restarts: run the cells once more.

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
# Import what is used below, and keep compiled programs on disk for the next session.

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
# A block is worth reading if its keys point where the queries look. In its simplest form: the score
# of block `j` for row `i` is the inner product of the mean query of `i` with the mean key of `j`,
# added up over the heads.
#
# A policy is a frozen dataclass. `BudgetPolicy` brings the density, and the first and newest block
# that every row keeps. What is left is a helper, which cuts tokens into blocks; `span` says which
# blocks a call adds, and which of its columns hold a token.


# %%
class MyPolicy(BudgetPolicy):
    def by_block(self, x, span):
        """[B, T, heads, H] as [B, blocks, tokens of a block, heads, H], padding as zeros."""
        x = jnp.where(span.valid[:, :, None, None], x.astype(jnp.float32), 0.0)
        size = min(self.block_size, x.shape[1])  # one token in decode
        return x.reshape(x.shape[0], -1, size, *x.shape[2:])


# %% [markdown]
# And the rule: a summary for each block, which lies beside the cache and grows with it, in prefill
# and in decode alike; and a score. Full blocks have equally many tokens, so that sums rank as means
# do.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanKey(MyPolicy):
    def init_statistics(self, shape, *, batch, num_blocks):
        return jnp.zeros((batch, num_blocks, shape.num_kv_heads, shape.head_dim), jnp.float32)

    def observe(self, query, key, statistics, *, span, kernels=None):
        rows = jnp.arange(len(span.end), dtype=jnp.int32)[:, None]
        sums = self.by_block(key, span).sum(2)
        return statistics.at[rows, span.rows(self.block_size)].add(sums, mode="drop")

    def score(self, query, key, statistics, *, layer, span):
        query = self.by_block(query, span).sum(2)
        query = query.reshape(*query.shape[:2], statistics.shape[2], -1, query.shape[-1])
        return jnp.einsum("bikgh,bjkh->bij", query, statistics)


# %% [markdown]
# That is all: whatever takes a policy takes this one. Here it reads a short text, and answers.

# %%
text = " ".join(" ".join(topics.values()).split())
prompt = text[:900] + " The code of lantern is 68084." + text[900:1200] + " Q: code of lantern? A:"
print(lm.with_policy(MeanKey(density=0.3)).generate(prompt, max_new_tokens=8))

# %% [markdown]
# ## What it loses
#
# One answer says little. These prompts ask for sixteen facts each, with the right answers behind
# the questions, so that one reading tests all of them: an answer is right if each of its tokens was
# the likeliest.

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
# Two such prompts as tokens, padded on the right, and the columns of each answer.

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
# Density and right answers of one policy. The density is counted from the lists that it made.


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
# The idea, at a fifth of the blocks:

# %%
print(f"right: {measure(MeanKey(density=0.2))[1]:.0%}")

# %% [markdown]
# ## What was wrong
#
# A mean of 64 keys hides the one that answers, and a mean of 64 queries the one that asks. So look
# at single ones: each key of a block, for every eighth query of the row. To compare heads, turn
# products into attention first, by a softmax over all keys; a block is as good as its best key for
# any head and query.
#
# `key` is the stacked cache, of which `layer` is this layer's place. No summary is kept; reading
# all keys once for eight queries of 64 costs an eighth of dense attention's products.


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
# A test that each policy has to pass: all blocks are dense attention. The answers are dense
# attention's too.

# %%
print(f"all blocks: {measure(BestKey(density=1.0))[:2]}")
print(f"dense:      {measure(sw.Dense())[:2]}")

# %% [markdown]
# ## The figure
#
# Both ideas and the recommended policy, at two densities. What the recommended one does more: it
# takes the queries that differ most, in place of every eighth; it remembers evidence from layer to
# layer; it shares the density among layers by a plan; and it reads keys at four bits.


# %%
def recommended(density):
    return sw.SketchWalkConfig.recommended(density=density, plan=lm.model_config.plan)


rules = {"mean key": MeanKey, "best key": BestKey, "recommended": recommended}
figure, axis = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
for (name, rule), marker in zip(rules.items(), "vso"):
    density, accuracy, _ = zip(*[measure(rule(density=d)) for d in (0.2, 0.4)])
    axis.plot(density, accuracy, marker=marker, label=name)
axis.set(xlabel="measured density", ylabel="right answers", xlim=(0, None), ylim=(-0.03, 1.05))
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="center left")

# %% [markdown]
# ## Where to go from here
#
# - The guide `sketchwalk_jax/policies/README.md` has the other bases, such as `DecodePolicy` for
#   rules of single tokens, and says what must hold of a policy that others are to use.
# - A line in `sketchwalk_jax/policies/__init__.py` gives it a name; then `sketchwalk eval --policy
#   NAME` measures it on eight tasks beside all others, with intervals.
