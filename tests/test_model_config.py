"""Translation of config.json, its refusals, and the resulting parameter shapes."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoints import TINY, tiny_config, write_checkpoint
from published_configs import PUBLISHED

from sketchwalk_jax.models import ModelConfig, RopeConfig, init_params, param_shapes
from sketchwalk_jax.models.params import flatten_params


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_their_models(name: str):
    raw, generation, fields, num_params = PUBLISHED[name]
    config = ModelConfig.from_dict(raw, generation)
    assert {field: getattr(config, field) for field in fields} == fields
    leaves = jax.tree.leaves(param_shapes(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == num_params


def test_published_llama_reads_its_rope():
    raw = PUBLISHED["Llama-3.1-8B-Instruct"][0]
    assert ModelConfig.from_dict(raw).rope == RopeConfig(
        rope_type="llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPE_SPELLINGS: dict[str, dict[str, Any]] = {
    "2023": {"rope_theta": 500.0, "rope_scaling": YARN | {"type": "yarn"}},
    "2024": {"rope_theta": 500.0, "rope_scaling": YARN | {"rope_type": "yarn"}},
    "2026": {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 500.0},
    },
    "both types": {
        "rope_theta": 500.0,
        "rope_scaling": YARN | {"rope_type": "yarn", "type": "linear"},
    },
    "theta inside wins": {
        "rope_theta": 7.0,
        "rope_scaling": YARN | {"rope_type": "yarn", "rope_theta": 500.0},
    },
    "scaling before parameters": {
        "rope_theta": 500.0,
        "rope_scaling": YARN | {"rope_type": "yarn"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    },
    "original context outside": {
        "rope_theta": 500.0,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "original context is the declared one": {
        "rope_theta": 500.0,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "factor from the contexts": {
        "rope_theta": 500.0,
        "max_position_embeddings": 256,
        "rope_scaling": YARN | {"type": "yarn", "factor": None},
    },
}


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_every_spelling_of_rope_means_the_same(spelling: str):
    config = ModelConfig.from_dict(tiny_config("qwen2", **ROPE_SPELLINGS[spelling]))
    assert config.rope == RopeConfig(
        rope_type="yarn", theta=500.0, factor=4.0, original_max_position_embeddings=64
    )


# transformers' meaning of a config.json without these keys.
ABSENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "head_dim absent": ("llama", {"head_dim": ...}, {"head_dim": 8}),
    "head_dim null": ("qwen2", {"head_dim": None}, {"head_dim": 8}),
    "head_dim absent in qwen3": ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
    "llama without grouping": ("llama", {"num_key_value_heads": ...}, {"num_kv_heads": 4}),
    "no grouping, null": ("qwen3", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
    "rms_norm_eps": ("llama", {"rms_norm_eps": ...}, {"rms_norm_eps": 1e-6}),
    "llama context": ("llama", {"max_position_embeddings": ...}, {"max_position_embeddings": 2048}),
    "qwen context": ("qwen3", {"max_position_embeddings": ...}, {"max_position_embeddings": 32768}),
    "tie_word_embeddings": ("qwen2", {"tie_word_embeddings": ...}, {"tie_word_embeddings": False}),
    "rope_theta": ("llama", {"rope_theta": ...}, {"rope": RopeConfig(theta=10000.0)}),
    "hidden_act": ("llama", {"hidden_act": ...}, {}),
    "dtype": ("llama", {"torch_dtype": ...}, {"dtype": "float32"}),
    "new name of dtype": (
        "llama",
        {"torch_dtype": ..., "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("case", ABSENT)
def test_absent_attributes_mean_what_transformers_takes_them_for(case: str):
    model_type, overrides, expected = ABSENT[case]
    config = ModelConfig.from_dict(tiny_config(model_type, **overrides))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "overrides", "biases"),
    [
        ("llama", {"attention_bias": True}, {"query", "key", "value", "out"}),
        ("llama", {"mlp_bias": True}, {"gate", "up", "down"}),
        ("llama", {}, set()),
        ("qwen2", {}, {"query", "key", "value"}),
        ("qwen2", {"attention_bias": True, "mlp_bias": True}, {"query", "key", "value"}),
        ("qwen3", {}, set()),
        ("qwen3", {"attention_bias": True}, {"query", "key", "value", "out"}),
    ],
)
def test_biases_are_where_the_family_has_them(model_type, overrides, biases):
    config = ModelConfig.from_dict(tiny_config(model_type, **overrides))
    layers = param_shapes(config)["layers"]
    assert {name for name, leaf in layers.items() if "bias" in leaf} == biases
    assert ("query_norm" in layers) == (model_type == "qwen3")


@pytest.mark.parametrize("model_type", TINY)
@pytest.mark.parametrize(("bos", "expected"), [(-1, None), (None, None), (0, 0), (7, 7)])
def test_minus_one_is_no_begin_token(model_type: str, bos: int | None, expected: int | None):
    config = ModelConfig.from_dict(tiny_config(model_type, bos_token_id=bos))
    assert config.bos_token_id == expected


@pytest.mark.parametrize(
    ("config_eos", "generation_config", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (None, None, ()),
        (..., {}, ()),
        (5, {"eos_token_id": [7, 8]}, (7, 8)),
        (5, {"eos_token_id": 7}, (7,)),
        (5, {"temperature": 0.6}, (5,)),
        (5, {"eos_token_id": None}, (5,)),
        (-1, None, ()),
        (5, {"eos_token_id": [7, -1]}, (7,)),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(config_eos, generation_config, expected):
    raw = tiny_config("llama", eos_token_id=config_eos)
    assert ModelConfig.from_dict(raw, generation_config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type must be one of"),
        ({"theta": 1.0}, r"theta must be in \(1, 1e30\), got 1.0"),
        ({"rope_type": "yarn"}, "original_max_position_embeddings must be"),
        (
            {
                "rope_type": "llama3",
                "original_max_position_embeddings": 8,
                "low_freq_factor": 4.0,
            },
            "high_freq_factor must be larger",
        ),
        ({"beta_fast": 0.0}, r"beta_fast must be in \[1e-30, 1e30\), got 0.0"),
        ({"beta_slow": 1e-320}, r"beta_slow must be in \[1e-30, 1e30\), got 1e-320"),
    ],
)
def test_invalid_rope_configs_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)


def test_a_directory_gives_the_same_as_its_json(tmp_path: Path):
    write_checkpoint(tmp_path, "qwen3", generation_config={"eos_token_id": [3, 4]})
    config = ModelConfig.from_pretrained(tmp_path)
    expected = ModelConfig.from_dict(tiny_config("qwen3"), {"eos_token_id": [3, 4]})
    assert config == expected
    assert hash(config) == hash(expected)


def test_a_hub_name_is_answered_with_how_to_download():
    with pytest.raises(FileNotFoundError, match="hf download"):
        ModelConfig.from_pretrained("meta-llama/Llama-3.2-1B")


def test_a_file_instead_of_a_directory_raises(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="or a GGUF file, got the file"):
        ModelConfig.from_pretrained(tmp_path / "model.safetensors")


def test_a_directory_without_config_raises(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "must be a JSON file"), ("[1]", "must hold a JSON object"), ("\xff", "JSON")],
)
def test_a_damaged_config_raises(tmp_path: Path, content: str, message: str):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("model_type", TINY)
def test_random_parameters_fill_the_described_tree(model_type: str):
    config = ModelConfig.from_dict(tiny_config(model_type, tie_word_embeddings=True))
    params = init_params(jax.random.key(0), config, jnp.bfloat16)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == param_shapes(config, jnp.bfloat16)
    assert "lm_head" not in params
    for path, leaf in flatten_params(params).items():
        spread = float(jnp.std(leaf.astype(jnp.float32)))
        assert (spread > 0) == (path[-1] in ("kernel", "embedding")), path
