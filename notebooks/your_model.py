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
# # Your model: text in, text out
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# Load a checkpoint from a folder, the Hugging Face hub or a GGUF file. Continue one text or many.
# Ask several questions about a document; each question reads only what is new. The notebook runs on
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
import json
import os
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import mkdtemp

import sketchwalk_jax as sw
from sketchwalk_jax.models import bundled_model
from sketchwalk_jax.text.tokenizer import apply_chat_template

sw.keep_compiled_programs()

# %% [markdown]
# Name your model in `MODEL_DIR`: a folder with `config.json` and safetensors files, a name on the
# hub such as `"Qwen/Qwen3-0.6B"` (downloaded once), or a GGUF file. It must be a Llama, Qwen2,
# Qwen2.5, Qwen3 or Qwen3-MoE. By default, the notebook uses the small model that ships with the
# package, which knows English and finds facts.

# %%
lm = sw.LanguageModel.load(os.environ.get("MODEL_DIR") or bundled_model(), warm_up=100)
print(lm)

# %% [markdown]
# `generate` takes a string and returns a string. Its two programs have been compiled since loading
# began, for prompts of about `warm_up` tokens. Later calls of a similar length run them again.

# %%
print(lm.generate("The house stood at the end of", max_new_tokens=16))

# %% [markdown]
# `Sampling` draws tokens at random, differently at each call; pass a `key` to repeat a draw.
# The first draw compiles a program. Another temperature or sampling value does not, because the
# program takes these values as inputs.

# %%
warm = sw.Sampling(temperature=0.8, top_p=0.95)
print(lm.generate("The house stood at the end of", max_new_tokens=16, sampling=warm, key=1))

# %% [markdown]
# `stream` returns the text in pieces while it is generated. A piece is never empty, and always ends
# after a whole character.

# %%
for piece in lm.stream("The house stood at the end of", max_new_tokens=16, every=2):
    print(piece, end="|")

# %% [markdown]
# ## A long document
#
# Hide three facts in Python's own help, and ask for one of them. `complete` takes tokens and yields
# the text together with its costs. Without a policy, a prompt as short as this one is read densely,
# because sparse attention would gain nothing. `lm.with_policy(...)` makes it sparse at any length.

# %%
text = " ".join(" ".join(topics.values()).split())
facts = {"lantern": "68084", "harbour": "52710", "window": "31337"}
document = text[:1000]
for number, (word, code) in enumerate(facts.items(), start=1):
    document += f" The code of {word} is {code}." + text[1000 * number :][:1000]
prompt = lm.encode(document + " Q: code of window? A:")
_, completion = next(lm.complete([prompt], max_new_tokens=16))
print(f"{completion.text!r} after {completion.prompt_tokens} tokens")
print(f"attended: {completion.measured_density:.0%} of the pairs")

# %% [markdown]
# ## Several turns
#
# A conversation keeps its cache, so each turn reads only what is new. Instruction models have a
# chat template. The small model has none, so this cell adds one in the form that the model was
# trained on. The document is the system message.

# %%
if not lm.tokenizer.chat_template:
    lm.tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %} Q: {{ message.content }} A:"
        "{% else %}{{ message.content }}{% endif %}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
talk = lm.conversation(system=document, max_new_tokens=8)
num_read, num_tokens = [], []
for word in facts:
    print(talk.send(f"code of {word}?"))
    num_read.append(talk.num_read)
    num_tokens.append(len(apply_chat_template(lm.tokenizer, talk.messages[:-1])))

# %% [markdown]
# The next cell compares the tokens that each turn read with the tokens of the whole conversation.
# For a single question, `lm.chat("…")` does the same and keeps nothing.

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
turns = [f"turn {turn}" for turn in range(1, len(num_read) + 1)]
axis.bar(turns, num_tokens, color="#E4E4E4", label="the conversation so far")
axis.bar(turns, num_read, color="#0072B2", label="read in this turn")
axis.bar_label(axis.containers[1])
axis.set_ylabel("tokens")
figure.legend(loc="outside upper center", ncols=2, frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## A batch
#
# `generate` also takes a list, and returns a list in the same order. It reads prompts of similar
# length together, padded to a few sizes. Each prompt gets the text that it would get alone. For
# thousands of prompts, use `sketchwalk generate --prompts FILE.jsonl --out FILE.jsonl`: it writes
# each answer as soon as it is there, and continues where it was interrupted.

# %%
prompts = [f" The code of {word} is {code}. Q: code of {word}? A:" for word, code in facts.items()]
prompts[1] = text[:400] + prompts[1]
print(lm.generate(prompts, max_new_tokens=16))

# %% [markdown]
# ## A GGUF file
#
# GGUF files of the same model families load by their path, in every quantisation, with the
# tokenizer that they contain. To have such a file here, these three cells write the small model
# with 8 bits per weight, as a converter would do. First write the sizes of the model:

# %%
import gguf
from safetensors.numpy import load_file

folder, path = bundled_model(), Path(mkdtemp()) / "small-Q8_0.gguf"
config = json.loads((folder / "config.json").read_text())
writer = gguf.GGUFWriter(path, "llama")
writer.add_block_count(config["num_hidden_layers"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_key_length(config["head_dim"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_rope_freq_base(config["rope_theta"])

# %% [markdown]
# Then write the tokenizer, which is byte-level like that of GPT-2.

# %%
tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("gpt-2")
writer.add_token_list(tokens)
writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
writer.add_bos_token_id(0)
writer.add_eos_token_id(1)
writer.add_add_bos_token(True)

# %% [markdown]
# Finally write the weights. llama.cpp stores the channels of queries and keys in another order.

# %%
heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
for name, tensor in load_file(folder / "model.safetensors").items():
    projection = name.split(".")[-2]
    if projection in heads:
        parts = tensor.reshape(heads[projection], 2, -1, tensor.shape[1])
        tensor = parts.swapaxes(1, 2).reshape(tensor.shape)
    kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
    quantised = gguf.quantize(tensor.astype("float32"), kind)
    writer.add_tensor(names.get_name(name, (".weight",)), quantised, raw_dtype=kind)
writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
writer.close()

# %% [markdown]
# The rest is one line, as for any other GGUF file. A GGUF file contains no plan, so all layers get
# the same density. `sketchwalk calibrate --model FILE.gguf` measures a plan and writes it beside
# the file.

# %%
small = sw.LanguageModel.load(path)
print(path.stat().st_size // 2**20, "MiB;", small.generate(prompts, max_new_tokens=16))
