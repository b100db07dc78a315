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
# Take a Flax model that was written without this package, the miniGPT of JAX's tutorials. Add
# sparse attention to it in a few lines, and train the dense and the sparse model side by side. The
# notebook runs on a CPU within a minute.

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
# Import what the cells below use.

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
# This is a block of the [miniGPT
# tutorial](https://docs.jaxstack.ai/en/latest/JAX_for_LLM_pretraining.html), without dropout but
# otherwise unchanged. It uses `nnx.MultiHeadAttention` with a causal mask.


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
# The model embeds characters and positions, applies two such blocks, and computes logits.


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
# ## Adding sparse attention
#
# All layers share one `WalkAttention`, which carries the walk (the block scores accumulated over
# layers) from each layer to the next. With `dense_layers=0` no layer is dense: each attends to a
# third of the blocks of 16 characters. The parameters do not change. `WalkAttention` checks that
# the mask of each layer is causal, and refuses other masks.


# %%
def with_walk(model, policy):
    walk = WalkAttention(policy)
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.MultiHeadAttention):
            layer.attention_fn = nnx.data(walk)
    model.walk = walk
    return model


policy = SketchWalkConfig.damped(block_size=16, sketch_dim=16, density=0.33, dense_layers=0)

# %% [markdown]
# ## Training
#
# The training step changes in one line: the walk is reset before each forward pass. The gradient
# flows through the attention, and treats the selected blocks as constants.


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
# The training data are characters of Python's own help, in pieces of 257.

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
# Both models start with the same weights and see the same batches.


# %%
def train(model):
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    return [float(train_step(model, optimizer, tokens)) for tokens in batches(STEPS, seed=0)]


dense = MiniGPT(128, LENGTH, rngs=nnx.Rngs(0))
sparse = with_walk(MiniGPT(128, LENGTH, rngs=nnx.Rngs(0)), policy)
losses = {"dense": train(dense), "sparse": train(sparse)}

# %% [markdown]
# The two losses are close. A model this small, after so few steps, predicts from the last few
# characters, and these are in blocks that every row keeps. For tasks that need distant text,
# measure accuracy: the notebook on choosing a policy does so, on a model that finds facts.

# %%
figure, axis = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
axis.plot(losses["dense"], color="#0072B2", label="dense")
axis.plot(losses["sparse"], color="#D55E00", linestyle="--", label="a third of the blocks")
axis.set(xlabel="step", ylabel="loss, nats per character")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Weights that were trained with dense attention
#
# Sparse attention uses the same weights as dense attention. This cell runs the densely trained
# weights at two densities, on a new batch of the same text. At a density of 1, sparse attention
# computes the same as dense attention.

# %%
held_out = next(batches(1, seed=1))
print(f"dense: {loss_of(dense, held_out):.4f}")
for density in (0.2, 1.0):
    swapped = with_walk(
        nnx.clone(dense),
        SketchWalkConfig.damped(block_size=16, sketch_dim=16, density=density, dense_layers=0),
    )
    print(f"density {density}: {nnx.jit(loss_of)(swapped, held_out):.4f}")

# %% [markdown]
# ## Layers for your own model
#
# `WalkSelfAttention` is a whole layer, projections included. It takes the walk and returns it, so
# it can be used inside a scan. With a cache it also decodes: first it reads the prompt, then token
# after token.

# %%
layer = WalkSelfAttention(2, 64, policy=policy, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (1, 100, 64))
out, walk = layer(x)
prompt, cache, _ = layer(x[:, :99], cache=layer.init_cache(1, 128))
token, cache, _ = layer(x[:, 99:], cache=cache)
print(out.shape, token.shape, cache.lengths)

# %% [markdown]
# If your model has its own attention code, call `sketchwalk_attention(q, k, v, walk,
# policy=policy)`. It is the same in plain JAX, without projections. `LinenWalkAttention` and
# `LinenWalkSelfAttention` are the modules for Linen.
