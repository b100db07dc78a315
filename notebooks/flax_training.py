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
# # Inside a Flax model, in training
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# Take a Flax model that knows nothing of this package, the miniGPT of JAX's tutorials, put sparse
# attention into it in a few lines, and train both side by side. On a CPU, within a minute.

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
# Import what is used below.

# %%
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from sketchwalk_jax import SketchWalkConfig
from sketchwalk_jax.flax import WalkAttention, WalkSelfAttention

# %% [markdown]
# ## The model
#
# A block of the [miniGPT
# tutorial](https://docs.jaxstack.ai/en/latest/JAX_for_LLM_pretraining.html), as it stands there but
# for dropout: `nnx.MultiHeadAttention` with a causal mask.


# %%
class TransformerBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.mha = nnx.MultiHeadAttention(heads, width, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.linear1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.linear2 = nnx.Linear(4 * width, width, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))
        x = self.layer_norm1(x + self.mha(inputs_q=x, mask=mask, decode=False))
        return self.layer_norm2(x + self.linear2(nnx.relu(self.linear1(x))))


# %% [markdown]
# Embeddings of characters and positions, two such blocks, logits.


# %%
class MiniGPT(nnx.Module):
    def __init__(self, vocabulary, length, width=64, heads=2, layers=2, *, rngs):
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List(TransformerBlock(width, heads, rngs) for _ in range(layers))
        self.output = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.output(x)


# %% [markdown]
# ## Sparse attention in it
#
# One `WalkAttention` is shared by all layers, so that the walk goes from each to the next: the
# first is dense here, the others attend to a third of the blocks of 16 characters. Parameters stay
# as they are. Layers see that their mask is causal; one that is not would be refused.


# %%
def with_walk(model, config):
    walk = WalkAttention(config)
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.MultiHeadAttention):
            layer.attention_fn = nnx.data(walk)
    model.walk = walk
    return model


config = SketchWalkConfig.damped(block_size=16, sketch_dim=16, density=0.33, dense_layers=0)

# %% [markdown]
# ## Training
#
# Nothing changes but that the walk starts anew with each pass. The gradient goes through the
# attention; which blocks are selected is a constant to it.


# %%
def loss_of(model, tokens):
    if hasattr(model, "walk"):
        model.walk.reset(tokens.shape[0], tokens.shape[1] - 1)
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, tokens):
    params = nnx.DiffState(0, nnx.Param)
    loss, gradients = nnx.value_and_grad(loss_of, argnums=params)(model, tokens)
    optimizer.update(model, gradients)
    return loss


# %% [markdown]
# Characters of Python's own help, in pieces of 257.

# %%
text = np.frombuffer(" ".join(topics.values()).encode("ascii", "ignore"), np.uint8)
LENGTH, BATCH, STEPS = 256, 8, 40


def batches(steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        yield jnp.asarray(text[starts[:, None] + np.arange(LENGTH + 1)], jnp.int32)


print(f"{len(text):,} characters")

# %% [markdown]
# Both models begin with the same weights and see the same batches.


# %%
def train(model):
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    return [float(train_step(model, optimizer, tokens)) for tokens in batches(STEPS, seed=0)]


dense = MiniGPT(128, LENGTH, rngs=nnx.Rngs(0))
sparse = with_walk(MiniGPT(128, LENGTH, rngs=nnx.Rngs(0)), config)
losses = {"dense": train(dense), "sparse": train(sparse)}

# %% [markdown]
# The losses run together: what so small a model learns in so few steps stands a few characters
# back, in blocks that every row keeps. Where the far ones matter, measure: the notebook on choosing
# a policy does, on a model that finds facts.

# %%
figure, axis = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
axis.plot(losses["dense"], color="#0072B2", label="dense")
axis.plot(losses["sparse"], color="#D55E00", linestyle="--", label="a third of the blocks")
axis.set(xlabel="step", ylabel="loss, nats per character")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)

# %% [markdown]
# ## Weights that were trained densely
#
# Sparse attention is no other model: it takes weights as they are. The densely trained ones at
# several densities, on text that neither has seen; at a density of 1 it is the same attention.

# %%
held_out = next(batches(1, seed=1))
print("dense:", float(loss_of(dense, held_out)))
for density in (0.2, 1.0):
    swapped = with_walk(
        nnx.clone(dense),
        SketchWalkConfig.damped(block_size=16, sketch_dim=16, density=density, dense_layers=0),
    )
    print(density, float(nnx.jit(loss_of)(swapped, held_out)))

# %% [markdown]
# ## Layers of one's own
#
# `WalkSelfAttention` is a whole layer, projections included. It takes the walk and returns it, as a
# scan wants it, and decodes from a cache where it is given one: the prompt first, then token by
# token.

# %%
layer = WalkSelfAttention(2, 64, policy=config, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (1, 100, 64))
out, walk = layer(x)
prompt, cache, _ = layer(x[:, :99], cache=layer.init_cache(1, 128))
token, cache, _ = layer(x[:, 99:], cache=cache)
print(out.shape, token.shape, cache.lengths)

# %% [markdown]
# Where a model has its own attention, `sketchwalk_attention(q, k, v, walk, policy=policy)` is the
# same without projections, in plain JAX; `LinenWalkAttention` and `LinenWalkSelfAttention` are the
# twins for Linen.
