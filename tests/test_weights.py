"""Loading of safetensors directories: values, dtypes, placement, progress."""

import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import TINY, write_checkpoint, write_tensors
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from sketchwalk_jax import init_cache
from sketchwalk_jax.models import ModelConfig, load, param_shapes
from sketchwalk_jax.models.params import flatten_params
from sketchwalk_jax.models.plans import stored_tensors

PREFIX = "model.layers.{layer}."
LINEAR = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
SCALES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}


def assert_holds(
    params: dict[str, Any], tensors: dict[str, np.ndarray], config: ModelConfig
) -> None:
    """Checks that every parameter, applied to an input, gives the result of its stored tensor."""
    generator = np.random.default_rng(0)
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    for layer in range(config.num_layers):
        prefix = PREFIX.format(layer=layer)
        for name, stored in LINEAR.items():
            leaf = {key: np.asarray(value[layer]) for key, value in params["layers"][name].items()}
            weight = tensors[f"{prefix}{stored}.weight"]
            x = generator.standard_normal(weight.shape[1]).astype(weight.dtype)
            expected = weight @ x
            if name == "out":
                x = x.reshape(config.num_heads, config.head_dim)
                actual = np.einsum("nh,nhd->d", x, leaf["kernel"])
            else:
                actual = np.einsum("d,d...->...", x, leaf["kernel"])
            if name in heads:
                expected = expected.reshape(heads[name], config.head_dim)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
            bias = tensors.get(f"{prefix}{stored}.bias")
            assert ("bias" in leaf) == (bias is not None)
            if bias is not None:
                np.testing.assert_array_equal(leaf["bias"], bias.reshape(expected.shape))
        for name, stored in SCALES.items():
            scale = tensors.get(f"{prefix}{stored}.weight")
            assert (name in params["layers"]) == (scale is not None)
            if scale is not None:
                np.testing.assert_array_equal(params["layers"][name]["scale"][layer], scale)
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
@pytest.mark.parametrize("target", [None, "float32", "float16", "bfloat16"])
def test_parameters_are_cast_to_the_target_dtype(tmp_path: Path, stored: str, target: str | None):
    tensors = write_checkpoint(tmp_path, dtype=stored)
    params, config = load(tmp_path, dtype=target)
    # Caches made by default have the loaded dtype.
    assert config.dtype == (target or stored)
    assert (
        init_cache(config, batch=1, max_tokens=64).key.dtype == params["embed"]["embedding"].dtype
    )
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == jnp.dtype(target or stored)
    expected = tensors["model.embed_tokens.weight"].astype(jnp.dtype(target or stored))
    np.testing.assert_array_equal(params["embed"]["embedding"], expected)


def test_without_a_declared_dtype_the_stored_one_is_kept(tmp_path: Path):
    write_checkpoint(tmp_path, dtype="bfloat16", torch_dtype=...)
    params, config = load(tmp_path)
    assert params["embed"]["embedding"].dtype == jnp.bfloat16
    assert config.dtype == "bfloat16"


def test_a_declared_dtype_comes_before_the_stored_one(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, dtype="float32", torch_dtype="bfloat16")
    params, config = load(tmp_path)
    assert config.dtype == "bfloat16"
    expected = tensors["model.norm.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["final_norm"]["scale"], expected)


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    write_tensors(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    params, config = load(tmp_path)
    assert config.tie_word_embeddings
    assert_holds(params, tensors, config)


def test_a_tied_checkpoint_may_hold_its_head_alone(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    stored = dict(tensors)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    write_tensors(tmp_path, stored)
    params, config = load(tmp_path)
    assert config.tie_word_embeddings
    assert_holds(params, tensors, config)


def test_a_different_head_of_a_tied_checkpoint_is_used_with_a_warning(tmp_path: Path):
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    write_tensors(tmp_path, tensors)
    with pytest.warns(UserWarning, match="declares tied embeddings but holds a different lm_head"):
        params, config = load(tmp_path)
    assert not config.tie_word_embeddings
    assert_holds(params, tensors, config)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path):
    tensors = write_checkpoint(tmp_path)
    frequencies = np.ones(4, np.float32)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors(tmp_path, tensors | {name: frequencies})
    params, config = load(tmp_path)
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


def test_the_prefix_of_names_is_not_needed(tmp_path: Path):
    tensors = write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_tensors(tmp_path, without_prefix(tensors), num_shards=2)
    params, config = load(tmp_path)
    assert_holds(params, tensors, config)


def test_a_single_file_comes_before_an_index(tmp_path: Path):
    write_checkpoint(tmp_path, seed=1, num_shards=2)
    tensors = write_checkpoint(tmp_path, seed=2)
    params, config = load(tmp_path)
    assert_holds(params, tensors, config)


def test_links_of_a_download_cache_are_followed(tmp_path: Path):
    tensors = write_checkpoint(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    params, config = load(snapshot)
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

whole, config = load(DIRECTORY)
params, _ = load(DIRECTORY, sharding=rule)
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


@pytest.mark.slow
def test_each_device_gets_its_own_part(tmp_path: Path, repository: Path, run_python):
    overrides = {"attention_bias": True, "num_attention_heads": 8, "head_dim": 16}
    directory = tmp_path / "checkpoint"
    tensors = write_checkpoint(directory, "llama", **overrides, num_shards=2, dtype="bfloat16")
    code = SHARDED_LOAD.replace("DIRECTORY", repr(str(directory)))
    code = code.replace("SAVED", repr(str(tmp_path / "saved")))
    code = f"import sys; sys.path.insert(0, {str(repository)!r})\n{code}"
    assert int(run_python(code, devices=8)) == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize("model_type", TINY)
def test_the_progress_bar_stays_silent_on_short_loads(tmp_path: Path, model_type: str, capfd):
    write_checkpoint(tmp_path, model_type)
    load(tmp_path, progress=True)
    assert capfd.readouterr() == ("", "")


def test_the_progress_bar_counts_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import tqdm

    counted = {}

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            counted.update(total=total, done=0, delay=options["delay"], off=options["disable"])

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def update(self, num_bytes: int) -> None:
            counted["done"] += num_bytes

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    write_checkpoint(tmp_path)
    params, _ = load(tmp_path, progress=False)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert counted == {"total": num_bytes, "done": num_bytes, "delay": 1, "off": True}
