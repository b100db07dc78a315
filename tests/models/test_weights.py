"""Loading of safetensors directories: values, dtypes, placement, progress."""

import re
import shutil
import unittest.mock
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import TINY, write_checkpoint, write_tensors
from gguf_checkpoints import write_gguf
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from variants import slow_unless

from sketchwalk_jax import init_cache
from sketchwalk_jax.models import ModelConfig, load, param_shapes
from sketchwalk_jax.models.params import flatten_params
from sketchwalk_jax.models.plans import stored_tensors

LINEAR = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
EXPERTS = {
    "router": "mlp.gate",
    "expert_gate": r"mlp.experts.(\d+).gate_proj",
    "expert_up": r"mlp.experts.(\d+).up_proj",
    "expert_down": r"mlp.experts.(\d+).down_proj",
}
SCALES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}


def in_order(tensors: dict[str, np.ndarray], stored: str) -> dict[tuple[int, ...], str]:
    """Returns the names of a parameter's tensors, by layer and perhaps expert."""
    pattern = re.compile(rf"model\.layers\.(\d+)\.{stored}\.weight")
    found = [match for match in map(pattern.fullmatch, tensors) if match]
    return {tuple(map(int, match.groups())): match[0] for match in found}


def assert_holds(
    params: dict[str, Any], tensors: dict[str, np.ndarray], config: ModelConfig
) -> None:
    """Checks that every parameter is its stored tensor, transposed and with an axis of heads."""
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    for name, stored in (LINEAR | EXPERTS | SCALES).items():
        names = in_order(tensors, stored)
        assert (name in params["layers"]) == bool(names)
        layers = sorted({layer for layer, *_ in names})
        for (layer, *expert), full_name in names.items():
            index = layers.index(layer), *expert
            own = jax.tree.map(lambda stack, index=index: stack[index], params["layers"][name])
            weight, bias = tensors[full_name], tensors.get(full_name.replace("weight", "bias"))
            if name in SCALES:
                np.testing.assert_array_equal(own["scale"], weight)
                continue
            outputs = (heads[name], config.head_dim) if name in heads else weight.shape[:1]
            inputs = (config.num_heads, config.head_dim) if name == "out" else weight.shape[1:]
            expected = weight.T.reshape(*inputs, *outputs)
            np.testing.assert_array_equal(own["kernel"], expected)
            assert ("bias" in own) == (bias is not None)
            if bias is not None:
                np.testing.assert_array_equal(own["bias"], bias.reshape(outputs))
    np.testing.assert_array_equal(
        params["embed"]["embedding"], tensors["model.embed_tokens.weight"]
    )
    np.testing.assert_array_equal(params["final_norm"]["scale"], tensors["model.norm.weight"])
    assert ("lm_head" in params) != config.tie_word_embeddings
    if "lm_head" in params:
        np.testing.assert_array_equal(params["lm_head"]["kernel"].T, tensors["lm_head.weight"])


CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama in four files": ("llama", {"num_shards": 4}),
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3 tied with biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "experts in three files": ("qwen3_moe", {"num_shards": 3}),
    "experts in some layers": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "attention_bias": True},
    ),
    "more rows than are read at once": (
        "llama",
        {"hidden_size": 320, "intermediate_size": 150, "head_dim": 80, "vocab_size": 300},
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_parameters_hold_the_stored_tensors(tmp_path: Path, case: str):
    model_type, overrides = CHECKPOINTS[case]
    tensors = write_checkpoint(tmp_path, model_type, **overrides)
    params, config = load(tmp_path)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, param_shapes(config, jnp.float32))
    assert_holds(params, tensors, config)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_parameters_are_cast_to_the_target_dtype(tmp_path: Path, stored: str):
    tensors = write_checkpoint(tmp_path, dtype=stored)
    for target in (None, "float32", "float16", "bfloat16"):
        params, config = load(tmp_path, dtype=target)
        # Caches made by default have the loaded dtype.
        assert config.dtype == (target or stored)
        cache = init_cache(config, batch=1, max_tokens=64)
        assert {x.dtype for x in (*jax.tree.leaves(params), cache.key)} == {jnp.dtype(config.dtype)}
        expected = tensors["model.embed_tokens.weight"].astype(jnp.dtype(config.dtype))
        np.testing.assert_array_equal(params["embed"]["embedding"], expected)


def test_a_declared_dtype_comes_before_the_stored_one(tmp_path: Path):
    for declared, expected in (("bfloat16", "bfloat16"), (..., "float16")):
        tensors = write_checkpoint(tmp_path, dtype="float16", torch_dtype=declared)
        params, config = load(tmp_path)
        assert config.dtype == params["embed"]["embedding"].dtype == expected
        norm = tensors["model.norm.weight"].astype(jnp.dtype(expected))
        np.testing.assert_array_equal(params["final_norm"]["scale"], norm)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_tied_checkpoint_may_hold_its_embedding_its_head_or_both(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    both = tensors | {HEAD: tensors[EMBEDDING]}
    for stored in (both, {name: x for name, x in both.items() if name != EMBEDDING}):
        write_tensors(tmp_path, stored)
        params, config = load(tmp_path)
        assert config.tie_word_embeddings
        assert_holds(params, tensors, config)


def test_a_different_head_of_a_tied_checkpoint_is_used_with_a_warning(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 1
    write_tensors(tmp_path, tensors)
    with pytest.warns(UserWarning, match="declares tied embeddings but holds a different lm_head"):
        params, config = load(tmp_path)
    assert not config.tie_word_embeddings
    assert_holds(params, tensors, config)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_index_decides_which_file_a_tensor_comes_from(tmp_path: Path, weights: str | None):
    # Each shard also holds outdated copies of tensors that the index has elsewhere.
    tensors = write_checkpoint(tmp_path / "right", num_shards=3)
    expected, expected_config = load(tmp_path / "right", weights=weights)
    shutil.copytree(tmp_path / "right", tmp_path / "stale")
    for path in (tmp_path / "stale").glob("*.safetensors"):
        own = load_file(path)
        stale = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
        save_file(stale | own, path)
    single = SingleDeviceSharding(jax.devices()[0])
    for sharding in (None, single):
        params, config = load(tmp_path / "stale", weights=weights, sharding=sharding)
        chex.assert_trees_all_equal(params, expected)
        assert config == expected_config
    assert stored_tensors(tmp_path / "stale")[0] == stored_tensors(tmp_path / "right")[0]


def without_prefix(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("model_type", TINY)
def test_a_base_model_loads_with_its_embedding_as_head(tmp_path: Path, model_type: str):
    tensors = write_checkpoint(tmp_path, model_type, tie_word_embeddings=True)
    expected = load(tmp_path)
    write_tensors(tmp_path, without_prefix(tensors))
    with pytest.warns(UserWarning, match="holds a base model without a head: its embedding is"):
        found = load(tmp_path)
    chex.assert_trees_all_equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_other_layouts_of_the_same_tensors_load_equal(tmp_path: Path):
    write_checkpoint(tmp_path, seed=1, num_shards=2)
    tensors = write_checkpoint(tmp_path, seed=2)  # a single file comes before an index
    snapshot, bare = tmp_path / "snapshot", tmp_path / "bare"
    snapshot.mkdir()
    for file in tmp_path.glob("*.*"):
        (snapshot / file.name).symlink_to(file)  # as in the cache of downloads
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_tensors(bare, without_prefix(tensors) | frequencies, num_shards=2)
    (bare / "config.json").write_text((tmp_path / "config.json").read_text())
    for directory in (tmp_path, snapshot, bare):
        params, config = load(directory)
        assert_holds(params, tensors, config)


def test_a_sharding_may_be_one_a_tree_or_a_rule(tmp_path: Path):
    write_checkpoint(tmp_path)
    expected, config = load(tmp_path)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    one = NamedSharding(mesh, PartitionSpec())
    single = SingleDeviceSharding(jax.devices()[0])
    tree = jax.tree.map(lambda _: one, param_shapes(config))

    def rule(path: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
        return one if path[-1] == "kernel" and len(shape.shape) > 2 else single

    for sharding in (one, tree, rule):
        params, _ = load(tmp_path, sharding=sharding)
        chex.assert_trees_all_equal(params, expected)
        for path, leaf in flatten_params(params).items():
            assert leaf.sharding == (rule(path, leaf) if sharding is rule else one)


SHARDED_LOAD = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sketchwalk_jax.models import load, save
from sketchwalk_jax.models.params import flatten_params

mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
SPECS = {
    "embedding": P("y", "x"), "lm_head": P("x", "y"), "query": P(None, None, "y"),
    "key": P("x", None, None, "y"), "out": P(None, "x", "y"), "gate": P(None, "x", "y"),
    "up": P("x", None, ("y",)), "down": P(None, ("x", "y")), "final_norm": P(("x", "y")),
}

def rule(path, shape):
    if path[-1] == "bias":
        return NamedSharding(mesh, P(None, None, "y") if len(shape.shape) == 3 else P("x"))
    name = path[-1] if path[-1] in SPECS else path[-2]
    return NamedSharding(mesh, SPECS.get(name, P()))

whole, config = load(SOURCE)
params, _ = load(SOURCE, sharding=rule)
save(SAVED, params, config)
restored, _ = load(SAVED, sharding=rule)
assert len({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)}) == 1
for path, leaf in flatten_params(params).items():
    assert leaf.sharding == rule(path, leaf), path
    for shard in leaf.addressable_shards:
        expected = np.asarray(flatten_params(whole)[path])[shard.index]
        np.testing.assert_array_equal(shard.data, expected)
    again = flatten_params(restored)[path]
    assert again.sharding == leaf.sharding, path
    np.testing.assert_array_equal(again, leaf)
print(sum(leaf.size for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.parametrize("kind", slow_unless("gguf".__eq__, ["gguf", "safetensors"]))
def test_each_device_gets_its_own_part(tmp_path: Path, repository: Path, run_python, kind: str):
    overrides = {"attention_bias": True, "num_attention_heads": 8, "head_dim": 16}
    source = tmp_path / "checkpoint"
    if kind == "gguf":
        source = tmp_path / "model.gguf"
        _, tensors = write_gguf(source, quantisation="Q8_0", **overrides)
    else:
        tensors = write_checkpoint(source, **overrides, num_shards=2, dtype="bfloat16")
    code = SHARDED_LOAD.replace("SOURCE", repr(str(source)))
    code = code.replace("SAVED", repr(str(tmp_path / "saved")))
    code = f"import sys; sys.path.insert(0, {str(repository)!r})\n{code}"
    assert int(run_python(code, devices=8)) == sum(tensor.size for tensor in tensors.values())


def test_the_progress_bar_counts_every_byte_and_stays_silent_on_short_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    import tqdm

    write_checkpoint(tmp_path)
    load(tmp_path, progress=True)
    assert capfd.readouterr() == ("", "")
    bar = unittest.mock.MagicMock()
    update = bar.return_value.__enter__.return_value.update
    monkeypatch.setattr(tqdm, "tqdm", bar)
    params, _ = load(tmp_path, progress=False)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    options = bar.call_args.kwargs
    assert (options["total"], options["delay"], options["disable"]) == (num_bytes, 1, True)
    assert sum(call.args[0] for call in update.call_args_list) == num_bytes
