"""Tiny random GGUF files, written with the package `gguf` alone.

Names, row order and metadata keys are spelled out here independently of the loader under test,
which has its own tables.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import BYTES, TEMPLATE, random_tensors, tiny_config

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}
"""Names in a GGUF file of models that are called otherwise there."""


def gguf_name(name: str) -> str:
    """Returns the name in a GGUF file of a tensor of a Hugging Face checkpoint.

    All experts of a layer share one tensor.
    """
    for old, new in NAMES.items():
        name = name.replace(old + ".", new + ".")
    return re.sub(r"mlp\.experts\.\d+\.(\w+)_proj", r"ffn_\1_exps", name)


def permuted(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Permutes rows of q or k as llama.cpp's converter does for Llama."""
    parts = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return parts.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    quantisation: str = "F32",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    edit: Any = None,
    tokenizer: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Writes a tiny random model; returns its `config.json` and its dequantized tensors.

    Args:
        path: The file.
        model_type: "llama", "qwen2", "qwen3" or "qwen3_moe".
        seed: Seed of the weights.
        quantisation: ggml type of the matrices; vectors are F32.
        keys: More metadata keys, without the architecture's name.
        tensors: More tensors, by their names in the file.
        edit: Called with the arrays and types by name in the file, before they are written.
        tokenizer: Arguments of `add_tokenizer`; None for the byte tokenizer.
        **overrides: Entries of `config.json`.
    """
    config = tiny_config(model_type, **overrides)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    architecture = ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key, value in (keys or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        name = key if "general" in key or "split" in key else f"{architecture}.{key}"
        writer.kv_data[0].pop(name, None)  # old versions of gguf refuse to replace a value
        add[type(value)](name, value)
    add_tokenizer(writer, **(tokenizer or {}))

    stored, values = {}, random_tensors(config, seed=seed)
    for name, tensor in values.items():
        is_matrix = tensor.ndim == 2 and not name.endswith("mlp.gate.weight")
        kind = gguf.GGMLQuantizationType[quantisation if is_matrix else "F32"]
        quantised = gguf.quantize(tensor, kind)
        values[name] = gguf.dequantize(quantised, kind).astype(np.float32)
        part = name.split(".")[-2]
        if model_type == "llama" and part in heads:
            quantised = permuted(quantised, heads[part])
        own = gguf_name(name)
        if ".experts." in name:  # stacked in ascending order
            quantised = np.stack([*stored.get(own, ((),))[0], quantised])
        stored[own] = quantised, kind
    for name, tensor in (tensors or {}).items():
        stored[name] = tensor, gguf.GGMLQuantizationType.F32
    if edit is not None:
        edit(stored)
    for name, (tensor, kind) in stored.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, values


def add_tokenizer(
    writer: gguf.GGUFWriter,
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    tokens: Sequence[str] = BYTES,
    kinds: Sequence[int] | None = None,
    merges: Sequence[str] | None = (),
    scores: Sequence[float] | None = None,
    template: str | None = TEMPLATE,
    special: Mapping[str, int] | None = None,
    flags: Mapping[str, bool] | None = None,
) -> None:
    """Adds the metadata of a tokenizer."""
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [3 if index < 2 else 1 for index in range(len(tokens))])
    if merges:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if template is not None:
        writer.add_chat_template(template)
    for name, index in ({"bos": 0, "eos": 1} if special is None else special).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
