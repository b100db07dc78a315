"""Saving the parameter tree: a lossless round trip, atomic writes, and refused input."""

import dataclasses
import gc
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints import TINY, tiny_config
from variants import slow_unless

from sketchwalk_jax.models import (
    ModelConfig,
    checkpoint,
    fingerprint,
    load,
    param_shapes,
    quantize_params,
    save,
)


def tiny_model(model_type: str = "llama", dtype: str = "float32", **overrides):
    config = ModelConfig.from_dict(tiny_config(model_type, **overrides), {"eos_token_id": [1, 2]})
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(generator.standard_normal(leaf.shape), leaf.dtype),
        param_shapes(config, dtype),
    )
    return params, config


@pytest.mark.parametrize(
    "dtype", slow_unless("bfloat16".__eq__, ["float32", "bfloat16", "float16"])
)
@pytest.mark.parametrize("model_type", TINY)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, model_type: str, dtype: str):
    rope = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    params, config = tiny_model(model_type, dtype, **rope)
    save(tmp_path / "model", params, config)
    loaded, loaded_config = load(tmp_path / "model")
    chex.assert_trees_all_equal(loaded, params)
    chex.assert_trees_all_equal_dtypes(loaded, params)
    expected = dataclasses.replace(config, dtype=dtype)  # loading keeps the saved dtype
    assert loaded_config == expected
    assert hash(loaded_config) == hash(expected)
    assert ModelConfig.from_pretrained(tmp_path / "model") == config


def test_a_saved_model_with_experts_in_some_layers_comes_back(tmp_path: Path):
    params, config = tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    plan = tiny.plan((0.1, 0.5), (0.5, 0.1), (0.2, 0.1), (0.1, 0.0))
    save(tmp_path / "model", params, dataclasses.replace(config, plan=plan))
    loaded, loaded_config = load(tmp_path / "model")
    chex.assert_trees_all_equal(loaded, params)
    plan = dataclasses.replace(plan, fingerprint=fingerprint(tmp_path / "model"))
    assert loaded_config == dataclasses.replace(config, plan=plan)
    quantized, _ = load(tmp_path / "model", weights="int8")
    chex.assert_trees_all_equal(quantized, quantize_params(params, "int8"))
    params["layers"]["expert_up"]["kernel"] = params["layers"]["expert_up"]["kernel"][:, 1:]
    with pytest.raises(ValueError, match=r"expert_up/kernel must be \(2, 6, 32, 16\), got \(2, 5,"):
        save(tmp_path / "other", params, config)


def test_mixed_dtypes_come_back_or_are_cast(tmp_path: Path):
    params, config = tiny_model(dtype="bfloat16")
    params["final_norm"]["scale"] = params["final_norm"]["scale"].astype(jnp.float32)
    save(tmp_path / "model", params, config)
    chex.assert_trees_all_equal_dtypes(load(tmp_path / "model")[0], params)
    cast, _ = load(tmp_path / "model", dtype="float32")
    chex.assert_trees_all_equal(cast, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_a_full_directory_is_kept_unless_told_otherwise(tmp_path: Path):
    params, config = tiny_model()
    doubled, target = jax.tree.map(lambda x: x + x, params), tmp_path / "a" / "model"
    target.mkdir(parents=True)  # an empty directory may be written
    for leftover in (".model.partial", ".model.replaced"):  # of an interrupted save
        (tmp_path / "a" / leftover / "params").mkdir(parents=True)
    save(target, params, config)
    assert sorted(path.name for path in target.iterdir()) == ["model_config.json", "params"]
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save(target, doubled, config)
    chex.assert_trees_all_equal(load(target)[0], params)
    save(target, doubled, config, overwrite=True)
    chex.assert_trees_all_equal(load(target)[0], doubled)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="must be a directory"):
        save(tmp_path / "file", params, config, overwrite=True)
    save(tmp_path / "b" / "model", params, config)  # parents are created
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model"]


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_save_that_fails_leaves_the_old_one(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    import orbax.checkpoint as ocp

    params, config = tiny_model()
    save(tmp_path / "model", params, config)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    def fail_to_appear(source: Path, target: Path) -> None:
        fail() if source.name == ".model.partial" else source.rename(target)

    if step == "write":
        monkeypatch.setattr(ocp.StandardCheckpointer, "save", fail)
    else:
        # Simulate a system that cannot exchange names.
        monkeypatch.setattr(checkpoint, "_exchange", lambda *_: False)
        monkeypatch.setattr(checkpoint.os, "replace", fail_to_appear)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "model", params, config, overwrite=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    chex.assert_trees_all_equal(load(tmp_path / "model")[0], params)


def test_parameters_of_another_model_are_refused(tmp_path: Path):
    params, config = tiny_model()
    del params["final_norm"]
    params["layers"]["query"]["bias"] = jnp.zeros((2, 4, 8))
    params["layers"]["up"]["kernel"] = jnp.zeros((2, 32, 65))
    params["embed"]["embedding"] = jnp.zeros((256, 32), jnp.int8)
    with pytest.raises(ValueError, match="params must fit model_config") as raised:
        save(tmp_path / "model", params, config)
    for part in (
        "final_norm/scale is missing",
        "layers/query/bias is unknown",
        "layers/up/kernel must be (2, 32, 64), got (2, 32, 65)",
        "embed/embedding must be one of",
    ):
        assert part in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_saved_config_of_another_version_is_refused(tmp_path: Path):
    params, config = tiny_model()
    save(tmp_path, params, config)
    file = tmp_path / "model_config.json"
    saved = json.loads(file.read_text())
    for change, message in (
        ({"format_version": 2}, "format_version .* must be 1, got 2"),
        ({"model_config": {}}, "must hold every field of ModelConfig"),
    ):
        file.write_text(json.dumps(saved | change))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


# Orbax abandons its other reads when one fails; Python warns when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncate", "remove", "remove all"])
def test_a_damaged_directory_raises(tmp_path: Path, damage: str):
    params, config = tiny_model()
    save(tmp_path, params, config)
    files = [file for file in (tmp_path / "params").rglob("d/*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    if damage == "truncate":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    elif damage == "remove":
        largest.unlink()
    else:
        (tmp_path / "params").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="must be a complete checkpoint written by"):
        load(tmp_path)
    gc.collect()


def test_importing_the_models_imports_no_heavy_package(run_python):
    code = (
        "import sys\n"
        "from sketchwalk_jax.models import ModelConfig, init_params, load, save\n"
        "heavy = {'flax', 'transformers', 'orbax', 'safetensors', 'tqdm', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"
