"""Exports a Hugging Face directory: weights, config, tokenizer, metrics and a model card."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from corpus import BEGIN, BEGIN_ID, END, END_ID
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from sketchwalk_jax.models.checkpoint import replace_folder
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params, flatten_params
from sketchwalk_jax.models.weights import find_sources


def hf_tensors(params: Params, model_config: ModelConfig) -> dict[str, np.ndarray]:
    """Converts parameters to their Hugging Face names and shapes, in the model's dtype."""
    tensors = {}
    sources = find_sources(model_config)
    for path, leaf in flatten_params(params).items():
        source = sources[path]
        stacked = np.asarray(jnp.asarray(leaf, model_config.dtype))
        layers = stacked.reshape(-1, *stacked.shape[len(source.stack) :])
        for name, layer in zip(source.names, layers, strict=True):
            if source.is_transposed:
                layer = layer.reshape(source.stored_shape[::-1]).T
            tensors[name] = np.ascontiguousarray(layer.reshape(source.stored_shape))
    return tensors


def hf_config(model_config: ModelConfig) -> dict[str, Any]:
    """Makes the `config.json` of a Llama without biases."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model_config.vocab_size,
        "hidden_size": model_config.hidden_size,
        "intermediate_size": model_config.intermediate_size,
        "num_hidden_layers": model_config.num_layers,
        "num_attention_heads": model_config.num_heads,
        "num_key_value_heads": model_config.num_kv_heads,
        "head_dim": model_config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model_config.max_position_embeddings,
        "rms_norm_eps": model_config.rms_norm_eps,
        "rope_theta": model_config.rope.theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": model_config.dtype,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
    }


def export(
    directory: Path,
    params: Params,
    tokenizer: Tokenizer,
    *,
    model_config: ModelConfig,
    metrics: dict[str, Any],
    card: str,
) -> None:
    """Writes a temporary directory and then renames it to its final name, replacing an old one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    save_file(
        hf_tensors(params, model_config), draft / "model.safetensors", metadata={"format": "pt"}
    )
    tokenizer.save(str(draft / "tokenizer.json"), pretty=False)
    documents = {
        "config.json": hf_config(model_config),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model_config.max_position_embeddings,
        },
        "metrics.json": metrics,
    }
    for name, document in documents.items():
        (draft / name).write_text(json.dumps(document, indent=2) + "\n")
    (draft / "README.md").write_text(card)
    for path in draft.iterdir():
        path.chmod(0o644)
    os.chmod(draft, 0o755)
    replace_folder(directory, draft, directory.with_name(f".{directory.name}.replaced"))
