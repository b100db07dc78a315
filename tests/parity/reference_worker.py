"""Runs transformers in an interpreter of its own, and writes its results.

    python tests/parity/reference_worker.py JOB.json DIRECTORY

The job is `{"cases": [...], "checkpoints": [...], "rope": [...]}`.

A case makes a random model, saves it into DIRECTORY/NAME, loads it back from there, and adds
`expected.npz` with logits and greedy tokens:

    name            folder of the case
    model_type      "llama", "qwen2", "qwen3" or "qwen3_moe"
    seed            of weights and tokens
    config          arguments of the transformers config class
    edits           entries of config.json to set (or with null value to remove) after saving
    dtype           in which the weights are saved, default float32
    run_dtype       in which the model computes, default float32; the logits of a wider one, float64
                    or float32, are added as `exact_logits`
    max_shard_size  as in save_pretrained, to get several files
    lm_head         "same" or "other": adds an lm_head.weight to a tied checkpoint
    num_eos         number of generated tokens to declare as end tokens
    length          prompt tokens, default 24
    new_tokens      greedy tokens, default 12

A checkpoint is `{"name", "directory", "prompts", "new_tokens"}`: an existing directory, and batches
of prompts `[B, T]`. The first batch whose greedy tokens are clear is used. With `"gguf_file"` the
model is that file of the directory, which needs the packages gguf and accelerate. `expected.npz`
has only the logits after the prompt.

An entry of "rope" is `{"name", "config"}`; all frequencies go into DIRECTORY/rope.npz. This file
needs torch, transformers, numpy and safetensors, but nothing of this project.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
BATCH = 2
MIN_GAP = 1e-3
"""Smallest gap of the two best logits along a greedy path for which rounding decides nothing."""


def random_model(case):
    """Makes a model whose logits are of order one, unlike freshly initialised ones."""
    config = CONFIGS[case["model_type"]](**case["config"])
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(case["seed"])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:  # experts are stacked
                is_embedding = "embed" in name or "lm_head" in name
                weight.copy_((0.5 if is_embedding else 1) * noise / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(0.2 * noise + float("norm" in name))
    return model


def edit_config(directory, edits):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | edits
    config = {key: value for key, value in config.items() if value is not None or key not in edits}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def add_lm_head(directory, kind):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if kind == "same" else embedding.flip(0)
    save_file(tensors, path, metadata={"format": "pt"})


def greedy(model, tokens, new_tokens, eos_token_ids):
    """Returns greedy tokens, and the smallest gap between the two best logits on the way."""
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=eos_token_ids or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits).float().topk(2, dim=-1).values
    generated = out.sequences[:, tokens.shape[1] :]
    # Every row may end before new_tokens; pad the rest, as the project does.
    padded = torch.zeros((len(tokens), new_tokens), dtype=torch.long)
    padded[:, : generated.shape[1]] = generated
    return padded, float((best[..., 0] - best[..., 1]).min())


def run_case(case, root):
    directory = root / case["name"]
    model = random_model(case).to(getattr(torch, case.get("dtype", "float32")))
    shards = {"max_shard_size": case["max_shard_size"]} if case.get("max_shard_size") else {}
    model.save_pretrained(directory, **shards)
    edit_config(directory, case.get("edits", {}))
    if case.get("lm_head"):
        add_lm_head(directory, case["lm_head"])
    run_dtype = getattr(torch, case.get("run_dtype", "float32"))
    options = {}
    if case["model_type"] == "qwen3_moe":  # grouped products take some widths only
        options["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=run_dtype, **options).eval()

    new_tokens = case.get("new_tokens", 12)
    length = case.get("length", 24)
    for attempt in range(100):
        generator = torch.Generator().manual_seed(1000 * case["seed"] + attempt)
        vocab = model.config.vocab_size
        tokens = torch.randint(0, vocab, (BATCH, length), generator=generator)
        generated, gap = greedy(model, tokens, new_tokens, None)
        if gap > MIN_GAP:
            break
    else:
        raise SystemExit(f"{case['name']}: every prompt has nearly equal logits")

    eos_token_ids = generated[0, 3 : 3 + case.get("num_eos", 0)].unique().tolist()
    if eos_token_ids:
        path = directory / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": eos_token_ids}) + "\n")
        generated, _ = greedy(model, tokens, new_tokens, eos_token_ids)
    rotary = model.model.rotary_emb
    expected = {
        "tokens": tokens.int().numpy(),
        "logits": compute_logits(model, tokens),
        "greedy": generated.int().numpy(),
        "frequencies": rotary.inv_freq.float().numpy(),
        "attention_factor": np.float64(rotary.attention_scaling),
    }
    wider = torch.float64 if run_dtype == torch.float32 else torch.float32
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=wider, **options).eval()
    expected["exact_logits"] = compute_logits(exact, tokens)
    np.savez(directory / "expected.npz", **expected)


def run_checkpoint(checkpoint, root):
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint["directory"], gguf_file=checkpoint.get("gguf_file"), dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    for prompts in checkpoint["prompts"]:
        tokens = torch.tensor(prompts)
        generated, gap = greedy(model, tokens, checkpoint["new_tokens"], None)
        if gap > MIN_GAP:
            break
    else:
        raise SystemExit(f"{checkpoint['name']}: every prompt has nearly equal logits")
    directory = root / checkpoint["name"]
    directory.mkdir()
    np.savez(
        directory / "expected.npz",
        tokens=tokens.int().numpy(),
        logits=compute_logits(model, tokens)[:, -1],
        greedy=generated.int().numpy(),
    )


def compute_logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.float().numpy()


def rope_frequencies(config):
    config = LlamaConfig(**config)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        model = AutoModelForCausalLM.from_config(config)
        rotary = model.model.rotary_emb
        return rotary.inv_freq, rotary.attention_scaling
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


def run(job, root):
    """Runs every case of a job."""
    torch.manual_seed(0)
    for case in job.get("cases", []):
        run_case(case, root)
    for checkpoint in job.get("checkpoints", []):
        run_checkpoint(checkpoint, root)
    arrays = {}
    for entry in job.get("rope", []):
        frequencies, factor = rope_frequencies(entry["config"])
        arrays[entry["name"]] = frequencies.float().numpy()
        arrays[entry["name"] + ".attention_factor"] = np.float64(factor)
    if arrays:
        np.savez(root / "rope.npz", **arrays)


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
