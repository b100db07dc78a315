"""Every way in which loading a directory can fail, and its message."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import (
    tiny_config,
    write_adapter,
    write_byte_tokenizer,
    write_checkpoint,
    write_tensors,
)
from jax.sharding import PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from sketchwalk_jax.cli import main
from sketchwalk_jax.language_model import LanguageModel
from sketchwalk_jax.models import ModelConfig, load
from sketchwalk_jax.models.plans import fingerprint


def rename(tensors: dict[str, np.ndarray], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path):
    tensors = write_checkpoint(tmp_path)
    rename(tensors, "model.layers.0.self_attn.q_proj.weight", "model.layers.0.attn.wq.weight")
    rename(tensors, "model.norm.weight", "norm.weight")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((32, 64), np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((32, 64), np.int8)
    write_tensors(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"must fit its config\.json") as raised:
        load(tmp_path)
    message = str(raised.value)
    assert "2 tensors missing: model.layers.0.self_attn.q_proj.weight; model.norm.weight" in message
    assert "2 tensors unknown: model.layers.0.attn.wq.weight; norm.weight" in message
    assert "model.layers.1.mlp.up_proj.weight must be (64, 32), got (32, 64)" in message
    assert (
        "model.layers.1.mlp.down_proj.weight must be one of F64, F32, F16, BF16, got I8" in message
    )


def test_every_wrong_tensor_of_experts_is_named_at_once(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[0])
    experts = "model.layers.1.mlp.experts."
    del tensors[f"{experts}3.up_proj.weight"]
    rename(tensors, f"{experts}5.gate_proj.weight", f"{experts}6.gate_proj.weight")
    tensors[f"{experts}2.down_proj.weight"] = np.zeros((16, 32), np.float32)
    write_tensors(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"must fit its config\.json") as raised:
        load(tmp_path)
    message = str(raised.value)
    assert f"missing: {experts}3.up_proj.weight; {experts}5.gate_proj.weight\n" in message
    assert f"unknown: {experts}6.gate_proj.weight\n" in message
    assert f"{experts}2.down_proj.weight must be (32, 16), got (16, 32)" in message


def test_long_lists_of_wrong_tensors_are_cut(tmp_path: Path):
    write_checkpoint(tmp_path)
    write_tensors(tmp_path, {"other": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"21 tensors missing: .*; and 1 more"):
        load(tmp_path)


def test_an_untied_checkpoint_without_head_raises(tmp_path: Path):
    tensors = write_checkpoint(tmp_path)
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for stored in (tensors, bare):
        write_tensors(tmp_path, stored)
        with pytest.raises(ValueError, match=r"1 tensors missing: lm_head\.weight\n") as raised:
            load(tmp_path)
        assert "embedding models and classifiers have no head" in str(raised.value)
        assert "unknown" not in str(raised.value)


def test_what_cannot_be_loaded_is_named(tmp_path: Path):
    tensors = write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=1)))
    with pytest.raises(ValueError, match=r"9 tensors unknown: model\.layers\.1\."):
        load(tmp_path)
    write_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    write_tensors(tmp_path, tensors | {name: tensors[name].astype("float8_e4m3fn")})
    with pytest.raises(ValueError, match="unsupported dtype: .*up_proj.weight .* got F8_E4M3"):
        load(tmp_path)
    for dtype in ("int8", "float64", "float8_e4m3fn"):
        with pytest.raises(ValueError, match="dtype must be one of"):
            load(tmp_path, dtype=dtype)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="got neither"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(hidden_act="relu")))
    with pytest.raises(NotImplementedError, match="hidden_act"):  # before weights are opened
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int):
    write_checkpoint(tmp_path, num_shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{file.name} must be a complete .*download it again"):
        load(tmp_path)


def test_a_corrupt_header_is_named(tmp_path: Path):
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"\xff" * 8 + content[16:])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a complete"):
        load(tmp_path)


NEWER = json.dumps({"a": {"dtype": "F3", "shape": [8], "data_offsets": [0, 3]}}).encode()
OTHER_FILES = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "pointer of Git LFS; run `git",
    b"<!DOCTYPE html><html></html>": "web page; download the file",
    b"PK\x03\x04" + bytes(60): "file of PyTorch; convert it",
    b"\x80\x02}q\x00." + bytes(60): "file of PyTorch; convert it",
    b"GGUF\x03" + bytes(60): "GGUF file; give it a name",
    len(NEWER).to_bytes(8, "little") + NEWER + bytes(3): "newer than .* --upgrade safetensors",
}


@pytest.mark.parametrize("content", OTHER_FILES)
def test_another_file_under_the_name_of_weights_is_told(tmp_path: Path, content: bytes):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ValueError, match=f"must be a complete .* it is .*{OTHER_FILES[content]}"
    ) as e:
        load(tmp_path)
    assert "corrupt" not in str(e.value)


def test_an_adapter_is_told_from_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_adapter(tmp_path)
    write_byte_tokenizer(tmp_path)
    for read in (load, fingerprint, ModelConfig.from_pretrained, LanguageModel.load):
        with pytest.raises(ValueError, match="an adapter of peft for someone/tiny-model; merge"):
            read(tmp_path)
    for command in ("info", "generate"):
        assert main([command, "--model", str(tmp_path)]) == 2
        assert "an adapter of peft for someone/tiny-model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))  # some trainers write it
    with pytest.raises(ValueError, match="an adapter of peft"):
        load(tmp_path)
    tensors = write_checkpoint(tmp_path)  # a whole model next to an adapter of it
    np.testing.assert_array_equal(
        load(tmp_path)[0]["embed"]["embedding"], tensors["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf"])
def test_other_formats_are_refused(tmp_path: Path, name: str):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ValueError, match=rf"must hold model\.safetensors .*got \['{name}'\]"):
        load(tmp_path)


# Indexes of several files.

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def edit_index(directory: Path, name: str, file: str | None) -> None:
    """Changes the file that the index names for a tensor, or removes the entry."""
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][name] = file
    if file is None:
        del index["weight_map"][name]
    (directory / INDEX).write_text(json.dumps(index))


def test_a_tensor_that_its_file_lacks_is_named(tmp_path: Path):
    write_checkpoint(tmp_path, num_shards=2)
    held = load_file(tmp_path / FIRST)
    assert NORM in load_file(tmp_path / SECOND)
    del held[HEAD]
    save_file(held, tmp_path / FIRST)
    edit_index(tmp_path, NORM, FIRST)
    with pytest.raises(ValueError, match="2 tensors missing") as raised:
        load(tmp_path)
    message = str(raised.value)
    assert f"{NORM} (the index names {FIRST}, which lacks it, found in {SECOND})" in message
    assert f"{HEAD} (the index names {FIRST}, which lacks it)" in message


def test_a_tensor_of_two_files_without_an_entry_is_named(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, num_shards=2)
    for file in tmp_path.glob("*.safetensors"):
        save_file(load_file(file) | {NORM: tensors[NORM]}, file)
    load(tmp_path)
    edit_index(tmp_path, NORM, None)
    with pytest.raises(ValueError, match=r"in several files: model\.norm\.weight \(.* neither"):
        load(tmp_path)


def test_missing_files_and_indexes_are_named(tmp_path: Path):
    write_checkpoint(tmp_path, num_shards=2)
    (tmp_path / "training_args.bin").write_bytes(b"")
    (tmp_path / SECOND).unlink()
    with pytest.raises(FileNotFoundError, match=rf"\['{SECOND}'\] are missing"):
        load(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=r"got only \['model-00001.* copy the index"):
        load(tmp_path)


@pytest.mark.parametrize("folder", ["../{}", "/tmp/{}", "sub/{}", "..\\{}"])
def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path, folder: str):
    write_checkpoint(tmp_path / "checkpoint", num_shards=2)
    edit_index(tmp_path / "checkpoint", NORM, folder.format(FIRST))
    with pytest.raises(ValueError, match="must name files beside it"):
        load(tmp_path / "checkpoint")


def test_an_invalid_index_raises(tmp_path: Path):
    write_checkpoint(tmp_path, num_shards=2)
    for content, message in (
        ({}, "must have a weight_map"),
        ({"weight_map": {}}, "must have a weight_map"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "must name safetensors files"),
    ):
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_a_sharding_tree_of_another_layout_raises(tmp_path: Path):
    write_checkpoint(tmp_path)
    single = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match=r"missing \['embed/embedding'.*unknown \['head/kernel'\]"):
        load(tmp_path, sharding={"head": {"kernel": single}})


@pytest.mark.unchecked
def test_a_rule_that_gives_no_sharding_raises(tmp_path: Path):
    write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"must hold jax\.sharding\.Sharding, got P"):
        load(tmp_path, sharding=lambda path, shape: PartitionSpec())
