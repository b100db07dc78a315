"""Tiny random Hugging Face checkpoints, written with numpy and safetensors alone.

Names, shapes and configs are spelled out here independently of the loader under test, which has its
own tables.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy its bfloat16)
import numpy as np
from safetensors.numpy import save_file

TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
}
TINY["qwen2"] = {
    key: value for key, value in TINY["llama"].items() if not key.endswith("_bias")
} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 128,
    "max_window_layers": 2,
}
TINY["qwen3"] = TINY["qwen2"] | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "attention_bias": False,
}

TINY["qwen3_moe"] = TINY["qwen3"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = [chr(x if x in PRINTABLE else 256 + OTHERS.index(x)) for x in range(256)]
"""The printable character of each byte in byte-level vocabularies (GPT-2's table)."""

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_config(model_type: str = "llama", /, **overrides: Any) -> dict[str, Any]:
    """Returns a tiny `config.json`; an override of `...` removes its key."""
    config = TINY[model_type] | overrides
    return {key: value for key, value in config.items() if value is not ...}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor that transformers would save for `config`."""
    width, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or width // heads
    is_qwen2 = config["model_type"] == "qwen2"
    linear = {
        "self_attn.q_proj": (heads * head_dim, width),
        "self_attn.k_proj": (kv_heads * head_dim, width),
        "self_attn.v_proj": (kv_heads * head_dim, width),
        "self_attn.o_proj": (width, heads * head_dim),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = linear
        if has_experts(config, layer):
            mlp = config["moe_intermediate_size"]
            parts = {"gate_proj": (mlp, width), "up_proj": (mlp, width), "down_proj": (width, mlp)}
            own = {name: shape for name, shape in linear.items() if "mlp" not in name}
            own["mlp.gate"] = (config["num_experts"], width)
            for expert in range(config["num_experts"]):
                own |= {f"mlp.experts.{expert}.{name}": shape for name, shape in parts.items()}
        for name, shape in own.items():
            shapes[f"{prefix}{name}.weight"] = shape
            has_bias = config.get("mlp_bias" if "mlp" in name else "attention_bias", False)
            if (is_qwen2 and name[-6] in "qkv") or (not is_qwen2 and has_bias):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes[prefix + "input_layernorm.weight"] = (width,)
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        if config["model_type"].startswith("qwen3"):
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether transformers gives a layer a mixture of experts."""
    if not config.get("num_experts") or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def random_tensors(
    config: dict[str, Any], *, seed: int = 0, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Draws weights by name: matrices of scale 1/sqrt(columns), norms near 1, small biases."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            values /= np.sqrt(np.float32(shape[1]))
        else:
            values = np.float32(0.1) * values + np.float32("norm" in name)
        tensors[name] = values.astype(np.dtype(dtype))
    return tensors


def write_tensors(
    directory: Path, tensors: dict[str, np.ndarray], *, num_shards: int = 1
) -> list[str]:
    """Writes one safetensors file, or several with an index, and returns their names."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata=metadata)
        return ["model.safetensors"]
    weight_map, names = {}, list(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(set(weight_map.values()))


def write_checkpoint(
    directory: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    generation_config: dict[str, Any] | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> dict[str, np.ndarray]:
    """Writes a tiny random checkpoint directory and returns its tensors by name.

    Args:
        directory: Folder to write into; created if needed.
        model_type: "llama", "qwen2", "qwen3" or "qwen3_moe".
        seed: Seed of the weights.
        dtype: Dtype of the stored tensors, also declared in the config.
        num_shards: Number of safetensors files; more than one adds an index.
        generation_config: Contents of `generation_config.json`, or None for no such file.
        tokenizer: Whether to add a byte-level tokenizer, see `write_byte_tokenizer`.
        **overrides: Entries of `config.json` to set, or to remove with `...`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(model_type, **{"torch_dtype": dtype} | overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    if tokenizer:
        write_byte_tokenizer(directory)
    tensors = random_tensors(config, seed=seed, dtype=dtype)
    write_tensors(directory, tensors, num_shards=num_shards)
    return tensors


def write_letters_only(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes the tensors with a head that chooses only letters of the byte-level tokenizer.

    So the texts of the model encode to the tokens that it wrote.
    """
    is_letter = [chr(byte).isalpha() and byte < 128 for byte in range(256)]
    tensors["lm_head.weight"] *= np.float32(is_letter)[:, None]
    write_tensors(directory, tensors)


def write_adapter(directory: Path) -> None:
    """Writes the files that peft's `save_pretrained` and a trainer leave for a LoRA adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/tiny-model", "r": 2}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: np.zeros((2, 32), np.float32)}, directory / "adapter_model.safetensors")
    (directory / "training_args.bin").write_bytes(b"")


def write_byte_tokenizer(directory: Path) -> None:
    """Writes a tokenizer whose ids are the 256 bytes of UTF-8, with a minimal chat template.

    Byte 0 is the padding token and byte 1 the end token, as in `TINY`.

    `transformers.AutoTokenizer.from_pretrained(directory)` opens it, without torch.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE({char: byte for byte, char in enumerate(BYTES)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": BYTES[0],
        "eos_token": BYTES[1],
        "chat_template": TEMPLATE,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
