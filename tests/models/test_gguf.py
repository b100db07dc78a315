"""GGUF files: weights, configuration, placement, errors, and commands that take a checkpoint."""

import dataclasses
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import tiny_config, write_tensors
from gguf_checkpoints import BYTES, write_gguf
from parity.live_cases import run_reference
from parity.rope_cases import LLAMA3
from tolerances import tolerance

from sketchwalk_jax import Dense, forward, generate, load, save
from sketchwalk_jax.evaluation.provenance import hash_weights
from sketchwalk_jax.models import ModelConfig, rope_frequencies
from sketchwalk_jax.models.gguf_header import end_token_ids
from sketchwalk_jax.models.rope import RopeConfig
from sketchwalk_jax.text.tokenizer import load_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def assert_equals_directory(
    file: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Checks that the file gives the parameters and configuration of an equal directory."""
    directory = file.parent / "directory"
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    expected, expected_config = load(directory, dtype="float32")
    params, model_config = load(file, dtype="float32")
    chex.assert_trees_all_equal(params, expected)
    assert model_config == expected_config
    stored = ModelConfig.from_pretrained(file)  # names the file's dtype, not the loaded one
    assert dataclasses.replace(stored, dtype="float32") == model_config


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one head for keys": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama, tied, with biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    "qwen3, with biases": ("qwen3", {"attention_bias": True}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 96, "tie_word_embeddings": True}),
    "more rows than are read at once": (
        "llama",
        {"hidden_size": 320, "intermediate_size": 160, "head_dim": 80, "vocab_size": 300},
    ),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
def test_a_file_holds_what_a_directory_of_its_values_holds(
    file: Path, case: str, quantisation: str
):
    model_type, overrides = MODELS[case]
    config, tensors = write_gguf(file, model_type, quantisation=quantisation, **overrides)
    assert_equals_directory(file, config, tensors)


DTYPES = {"F32": "float32", "F16": "float16"} | dict.fromkeys(("BF16", "Q4_0", "Q5_1"), "bfloat16")


@pytest.mark.parametrize(("quantisation", "dtype"), DTYPES.items())
def test_the_dtype_is_what_is_stored_or_bfloat16(file: Path, quantisation: str, dtype: str):
    config, tensors = write_gguf(file, "qwen2", quantisation=quantisation)
    params, model_config = load(file)
    assert model_config.dtype == dtype
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    expected = tensors["lm_head.weight"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(params["lm_head"]["kernel"].T, expected)
    assert_equals_directory(file, config, tensors)


def test_blocks_of_256_weights_are_read(file: Path):
    """The package writes no K-quants: draw one's bytes, with a finite scale."""
    kind = gguf.GGMLQuantizationType.Q6_K
    values = {}

    def draw(stored: dict[str, Any]) -> None:
        rng = np.random.default_rng(0)
        for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
            blocks = rng.integers(0, 256, (256, 210), np.uint8)
            blocks[:, -2:] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
            stored[name] = blocks, kind
            values[name] = gguf.dequantize(blocks, kind)

    write_gguf(file, "qwen2", edit=draw, hidden_size=256, intermediate_size=256)
    params, _ = load(file, dtype="float32")
    layers = params["layers"]
    query = layers["query"]["kernel"][0].reshape(256, 256)
    np.testing.assert_array_equal(query.T, values["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(layers["down"]["kernel"][1].T, values["blk.1.ffn_down.weight"])


# Tokens from id 200 on, metadata fields, and the end tokens that llama.cpp finds.
ENDS: list[tuple[str, dict[str, int], tuple[int, ...]]] = [
    # Llama 3, whose eos ends texts alone; Qwen, whose eos ends turns alone.
    ("<|end_of_text|> <|eom_id|> <|eot_id|>", {"eos": 200}, (200, 201, 202)),
    ("<|endoftext|> <|im_start|> <|im_end|>", {"eos": 202}, (202, 200)),
    # Qwen Coder, which ends a file before the next one.
    (
        "<|fim_pad|> <|fim_prefix|> <|repo_name|> <|file_sep|> <|endoftext|>",
        {"eos": 204},
        (204, 200, 202, 203),
    ),
    # Fields come before names; one outside the vocabulary does not count.
    (
        "<|fim_pad|> <|file_sep|> <|im_end|>",
        {"eos": 5, "fim_pad": 3, "eom": 4},
        (5, 4, 3, 201, 202),
    ),
    ("<|eot_id|>", {"eos": 5, "eot": 999}, (5, 200)),
    ("</s>", {}, (200,)),
    ("<|im_start|> <|eot_id|>. </S>", {}, ()),
    # Turns go on after <|end|>, and tools after </s>.
    ("<|return|> <|end|> <|call|>", {"eos": 200}, (200, 202)),
    ("</s> <|tool_response>", {"eos": 200}, (201,)),
]


@pytest.mark.parametrize(("names", "special", "expected"), ENDS)
def test_end_tokens_are_those_of_llama_cpp(
    names: str, special: dict[str, int], expected: tuple[int, ...]
):
    metadata = {f"tokenizer.ggml.{name}_token_id": index for name, index in special.items()}
    metadata["tokenizer.ggml.tokens"] = [*BYTES[:200], *names.split(), *BYTES[200:]]
    assert tuple(end_token_ids(metadata)) == expected


@pytest.mark.parametrize(("kind", "expected"), [(1, [5]), (3, [5, 6]), (4, [5, 6])])
def test_a_piece_of_text_is_no_end(kind: int, expected: list[int]):
    metadata = {
        "tokenizer.ggml.tokens": [*BYTES[:6], "</s>"],
        "tokenizer.ggml.token_type": [1] * 6 + [kind],
        "tokenizer.ggml.eos_token_id": 5,
    }
    assert end_token_ids(metadata) == expected


def test_special_tokens_are_those_of_the_file_and_of_a_saved_directory(file: Path, tmp_path: Path):
    tokens = [*BYTES[:254], "<|end_of_text|>", "<|eot_id|>"]
    for settings, bos, ends in (
        ({"special": {"eos": 3, "eot": 5, "eom": 4, "bos": 2}}, 2, (3, 5, 4)),
        ({"special": {}}, None, ()),
        ({"tokens": tokens, "special": {"bos": 0, "eos": 254}}, 0, (254, 255)),
    ):
        write_gguf(file, tokenizer=settings)
        config = ModelConfig.from_pretrained(file)
        assert (config.bos_token_id, config.eos_token_ids) == (bos, ends)
    params, config = load(file)
    save(tmp_path / "saved", params, config)
    again, again_config = load(tmp_path / "saved")
    chex.assert_trees_all_equal(again, params)
    assert again_config == config


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
ROPES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"rope.scaling.type": "none"}, None),
    (LINEAR, {"rope_type": "linear", "factor": 4.0}),
    (
        LINEAR | {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
]


@pytest.mark.parametrize(("keys", "rope_scaling"), ROPES)
def test_rope_scaling_is_that_of_the_metadata(file: Path, keys, rope_scaling):
    config, tensors = write_gguf(file, "qwen3", keys=keys)
    assert_equals_directory(file, config | {"rope_scaling": rope_scaling}, tensors)


def llama_3_divisors(head_dim: int, **changes: Any) -> np.ndarray:
    """Returns llama.cpp's stored divisors for Llama 3.1, with its order of operations."""
    rope = LLAMA3 | changes
    frequencies = 1.0 / (10000.0 ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim))
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_of_llama_3_is_found_in_its_tensor(file: Path, factor: float):
    divisors = llama_3_divisors(64, factor=factor)
    assert len(set(divisors.tolist())) > 3  # kept, stretched and intermediate ones
    config, tensors = write_gguf(file, head_dim=64, tensors={"rope_freqs.weight": divisors})
    rope = LLAMA3 | {"factor": factor}
    assert_equals_directory(file, config | {"rope_scaling": rope}, tensors)
    frequencies, _ = rope_frequencies(ModelConfig.from_pretrained(file).rope, 64)
    plain, _ = rope_frequencies(RopeConfig(), 64)
    np.testing.assert_allclose(frequencies, plain / divisors, rtol=1e-6)


def test_a_rope_of_ones_is_none(file: Path):
    write_gguf(file, tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert ModelConfig.from_pretrained(file).rope == RopeConfig()


@pytest.mark.parametrize(
    "divisors",
    [
        llama_3_divisors(64, original_max_position_embeddings=4096),
        np.linspace(1, 8, 32, dtype=np.float32),
    ],
)
def test_another_rope_in_a_tensor_is_refused(file: Path, divisors: np.ndarray):
    write_gguf(file, head_dim=64, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(NotImplementedError, match="must be the rescaling of Llama 3.1 .* got"):
        load(file)


def test_a_vocabulary_may_be_padded(file: Path):
    config, tensors = write_gguf(file, vocab_size=320)
    assert_equals_directory(file, config, tensors)
    assert len(load_tokenizer(file)) == 256


def test_a_file_may_have_any_name(tmp_path: Path):
    blob = tmp_path / "sha256-0123"
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").rename(blob)
    load(blob)
    link = tmp_path / "link.gguf"
    link.symlink_to(blob)
    load(link)


def test_a_header_is_read_once_until_the_file_changes(file: Path, monkeypatch: pytest.MonkeyPatch):
    reads = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: Path) -> None:
            reads.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    write_gguf(file, num_hidden_layers=1)
    assert load(file)[1] == ModelConfig.from_pretrained(file)
    load_tokenizer(file)
    assert reads == [file]
    write_gguf(file, num_hidden_layers=2)
    assert ModelConfig.from_pretrained(file).num_layers == 2
    assert reads == [file, file]


# Damage, and the message for it.


def test_every_wrong_tensor_is_named_at_once(file: Path):
    def spoil(stored: dict[str, Any]) -> None:
        stored["blk.0.attn_qkv.weight"] = stored.pop("blk.0.attn_q.weight")
        stored["blk.1.ffn_up.weight"] = np.zeros((3, 32), np.float32), gguf.GGMLQuantizationType.F32
        stored["blk.1.ffn_down.weight"] = (
            np.zeros((32, 64), np.int8),
            gguf.GGMLQuantizationType.I8,
        )

    write_gguf(file, edit=spoil)
    with pytest.raises(ValueError, match="must fit its metadata") as raised:
        load(file)
    message = str(raised.value)
    assert "1 tensors missing: blk.0.attn_q.weight" in message
    assert "1 tensors unknown: blk.0.attn_qkv.weight" in message
    assert "blk.1.ffn_up.weight must be (64, 32), got (3, 32)" in message
    assert "blk.1.ffn_down.weight must be a type that the package gguf dequantises, got I8" in (
        message
    )


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"general.architecture": "mamba"}, ValueError, "must be one of .*'qwen3'.* got 'mamba'"),
        ({"general.architecture": ["llama"]}, ValueError, r"must be one of .* got \['llama'\]"),
        ({"general.type": "adapter"}, ValueError, "got an adapter.*llama-export-lora"),
        ({"split.count": 3}, ValueError, "got one of 3 parts; merge them first: llama-gguf-split"),
        ({"expert_count": 8}, NotImplementedError, "expert_count=8"),
        ({"expert_gating_func": 2}, NotImplementedError, "llama.expert_gating_func=2"),
        ({"expert_shared_count": 1}, NotImplementedError, "expert_shared_count=1"),
        ({"attention.sliding_window": 64}, NotImplementedError, "window 64"),
        ({"logit_scale": 0.5}, NotImplementedError, "logit_scale=0.5"),
        ({"attention.causal": False}, NotImplementedError, "llama.attention.causal=False"),
        (
            {"rope.dimension_count": 4},
            NotImplementedError,
            "llama.rope.dimension_count=4 .supported: 8 or absent",
        ),
        ({"rope.scaling.type": "longrope"}, NotImplementedError, "'longrope' is not supported"),
        ({"rope.scaling.attn_factor": 2.0}, NotImplementedError, "rope.scaling.attn_factor=2.0"),
    ],
)
def test_what_is_not_implemented_is_refused(file: Path, keys, error, message: str):
    write_gguf(file, keys=keys)
    with pytest.raises(error, match=message):
        load(file)


def test_every_wrong_tensor_of_experts_is_named_at_once(file: Path):
    def spoil(stored: dict[str, Any]) -> None:
        for name, index in (
            ("blk.0.ffn_up_exps.weight", np.s_[:5]),
            ("blk.1.ffn_up_exps.weight", np.s_[0]),
            ("blk.1.ffn_gate_exps.weight", np.s_[:, :8]),
            ("blk.1.ffn_gate_inp.weight", np.s_[:5]),
        ):
            stored[name] = stored[name][0][index], stored[name][1]

    write_gguf(file, "qwen3_moe", quantisation="F16", edit=spoil)
    with pytest.raises(ValueError, match="must fit its metadata") as raised:
        load(file)
    message = str(raised.value)
    assert "7 tensors missing: blk.0.ffn_up_exps.weight[5]; blk.1.ffn_up_exps.weight[0]" in message
    assert "1 tensors unknown: blk.1.ffn_up_exps.weight" in message
    assert "7 tensors of a wrong shape" in message
    assert "blk.1.ffn_gate_exps.weight[5] must be (16, 32), got (8, 32)" in message
    assert "blk.1.ffn_gate_inp.weight must be (6, 32), got (5, 32)" in message


def test_a_missing_key_is_named(file: Path):
    write_gguf(file)
    file.write_bytes(file.read_bytes().replace(b"llama.block_count", b"llama.block_kount"))
    with pytest.raises(ValueError, match=r"must have the keys \['llama.block_count'\]"):
        load(file)
    write_gguf(file, "qwen3_moe")
    file.write_bytes(file.read_bytes().replace(b"expert_used_count", b"expert_used_kount"))
    with pytest.raises(ValueError, match=r"must have the keys \['qwen3moe.expert_used_count'\]"):
        load(file)


def test_harmless_keys_are_passed_over(file: Path):
    keys = {"expert_count": 0, "expert_gating_func": 1, "something.new": 3}
    keys |= {"rope.dimension_count": 8, "vocab_size": 256, "attention.sliding_window": 512}
    write_gguf(file, keys=keys)
    load(file)


@pytest.mark.parametrize("kept", [0, 3, 20, 300, -1, -200])
def test_a_truncated_file_is_named(file: Path, kept: int):
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:kept])
    message = "must be a GGUF file" if 0 <= kept < 4 else "must be a complete GGUF file"
    with pytest.raises(ValueError, match=rf"model\.gguf {message}.*download it again"):
        load(file)


# The text before the damage, bytes between both, the damage, and the message.
COMPLETE = "must be a complete GGUF file"
DAMAGE: list[tuple[bytes, int, bytes, str]] = [
    (b"", 0, b"GGML", "must be a GGUF file, which begins with b'GGUF', got b'GGML'"),
    (b"", 0, b"version https://git-lfs.github.com/", "it is .*pointer of Git LFS; run `git lfs pu"),
    (b"", 0, b"tjgg\x03", "it is .*of a format before GGUF; convert the model"),
    (b"", 4, struct.pack("<I", 1), "must be GGUF of version 2 or 3, got version 1"),
    (b"", 4, struct.pack(">I", 3), "must be little-endian"),
    (b"", 24, struct.pack("<Q", 2**62), COMPLETE),
    (b"", 32, b"\xff", COMPLETE),
    # An array without end, behind its type and that of its items.
    (b"ggml.token_type", 8, struct.pack("<Q", 2**62), f"{COMPLETE}, got one that goes on"),
    # An unknown type, behind the number of axes and the only size; then the place of the tensor.
    (
        b"output_norm.weight",
        12,
        struct.pack("<I", 999),
        "999.* is not .*: pip install --upgrade gg",
    ),
    (b"output_norm.weight", 16, struct.pack("<Q", 2**40), COMPLETE),
    (b"output_norm.weight", 16, struct.pack("<Q", 2**64 - 32), COMPLETE),
]


@pytest.mark.parametrize(("text", "distance", "damage", "message"), DAMAGE)
def test_damaged_and_other_files_are_refused(file: Path, text, distance, damage, message):
    write_gguf(file)
    content = bytearray(file.read_bytes())
    start = content.index(text) + len(text) + distance
    content[start : start + len(damage)] = damage
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(file)


def test_without_the_package_the_advice_is_to_install_it(file: Path, monkeypatch, sketchwalk):
    write_gguf(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    for read in (load, ModelConfig.from_pretrained, load_tokenizer):
        with pytest.raises(ImportError, match=r'pip install "sketchwalk-jax\[gguf\]"'):
            read(file)
    _, message = sketchwalk("info", "--model", file, status=2)
    assert 'pip install "sketchwalk-jax[gguf]"' in message


def test_a_folder_of_gguf_files_says_to_name_one(file: Path):
    write_gguf(file)
    (file.parent / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(ValueError, match=r"got \['model\.gguf'\]; pass one of the GGUF files"):
        load(file.parent)


# Other users of a checkpoint.


def test_the_command_line_takes_a_file(file: Path, sketchwalk):
    write_gguf(file, quantisation="Q8_0")
    assert hash_weights(file) == {"model.gguf": hashlib.sha256(file.read_bytes()).hexdigest()}
    found = json.loads(sketchwalk("info", "--model", file, "--json")[0])["model"]
    assert found["stored_dtypes"] == ["Q8_0", "float32"]
    assert found["stored_bytes"] == file.stat().st_size
    assert found["model_type"] == "llama"
    drawing = "--max-new-tokens", 2, "--policy", "dense"
    sketchwalk("generate", "--model", file, "--prompt", "walk", *drawing, "--json")


# Against transformers.

# Its loader reads Llama's head_dim from another key, and assumes 128 for Qwen3 and experts of width
# 768.
PARITY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-q8_0": ("llama", "Q8_0", {}),
    "llama-q4_0-tied": (
        "llama",
        "Q4_0",
        {"head_dim": 16, "keys": {"rope.dimension_count": 16}, "tie_word_embeddings": True},
    ),
    "qwen2-q8_0": ("qwen2", "Q8_0", {"rope_theta": 1e6}),
    "qwen3-f16": ("qwen3", "F16", {"head_dim": 128}),
    "qwen3-moe-q8_0": ("qwen3_moe", "Q8_0", {"moe_intermediate_size": 768}),
}


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory, reference_python: str, parity_seed: int) -> Path:
    """Makes files of every case, and runs transformers on them."""
    root = tmp_path_factory.mktemp("gguf-parity")
    rng = np.random.default_rng(parity_seed)
    checkpoints = []
    for name, (model_type, quantisation, overrides) in PARITY.items():
        path = root / f"{name}.gguf"
        write_gguf(path, model_type, quantisation=quantisation, seed=parity_seed, **overrides)
        prompts = rng.integers(2, 256, (50, 2, 24)).tolist()
        own = {"name": name, "directory": str(root), "gguf_file": path.name, "new_tokens": 8}
        checkpoints.append(own | {"prompts": prompts})
    run_reference(reference_python, {"checkpoints": checkpoints}, root, seed=parity_seed)
    return root


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
def test_files_give_the_logits_and_tokens_of_transformers(reference_run: Path, name: str):
    expected = np.load(reference_run / name / "expected.npz")
    params, config = load(reference_run / f"{name}.gguf", dtype="float32")
    config = dataclasses.replace(config, eos_token_ids=())
    tokens = jnp.asarray(expected["tokens"])
    logits = forward(params, tokens, model_config=config, policy=Dense())
    np.testing.assert_allclose(logits[:, -1], expected["logits"], **tolerance("logits"))
    generation = generate(params, tokens, model_config=config, policy=Dense(), max_new_tokens=8)
    np.testing.assert_array_equal(generation.tokens, expected["greedy"])
