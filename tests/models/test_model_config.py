"""Translation of config.json, its refusals, and the resulting parameter shapes."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoints import TINY, tiny_config, write_checkpoint
from published_configs import PUBLISHED
from variants import slow_unless

from sketchwalk_jax.models import ModelConfig, RopeConfig, init_params, param_shapes
from sketchwalk_jax.models.params import flatten_params


def read(model_type: str = "llama", /, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(model_type, **overrides))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_their_models(name: str):
    raw, generation, fields, num_params = PUBLISHED[name]
    config = ModelConfig.from_dict(raw, generation)
    assert {field: getattr(config, field) for field in fields} == fields
    leaves = jax.tree.leaves(param_shapes(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == num_params


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPE_SPELLINGS: dict[str, dict[str, Any]] = {
    "2023": {"rope_scaling": YARN | {"type": "yarn"}},
    "2024": {"rope_scaling": YARN | {"rope_type": "yarn"}},
    "2026": {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 500.0},
    },
    "both types": {"rope_scaling": YARN | {"rope_type": "yarn", "type": "linear"}},
    "theta inside wins": {
        "rope_theta": 7.0,
        "rope_scaling": YARN | {"rope_type": "yarn", "rope_theta": 500.0},
    },
    "scaling before parameters": {
        "rope_scaling": YARN | {"rope_type": "yarn"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    },
    "original context outside": {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "original context is the declared one": {
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "factor from the contexts": {
        "max_position_embeddings": 256,
        "rope_scaling": YARN | {"type": "yarn", "factor": None},
    },
}


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_every_spelling_of_rope_means_the_same(spelling: str):
    config = read("qwen2", **{"rope_theta": 500.0} | ROPE_SPELLINGS[spelling])
    assert config.rope == RopeConfig(
        rope_type="yarn", theta=500.0, factor=4.0, original_max_position_embeddings=64
    )


QWEN2_BIASES = {"qkv_bias": True, "o_bias": False, "mlp_bias": False}
NAMES_OF_EXPERTS = (
    "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step "
    "mlp_only_layers"
).split()
# transformers' meaning of a config.json without these keys.
ABSENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"head_dim": ...}, {"head_dim": 8}),
    ("qwen2", {"head_dim": None}, {"head_dim": 8}),
    ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
    ("llama", {"num_key_value_heads": ...}, {"num_kv_heads": 4}),
    ("qwen3", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
    ("llama", {"rms_norm_eps": ...}, {"rms_norm_eps": 1e-6}),
    ("llama", {"max_position_embeddings": ...}, {"max_position_embeddings": 2048}),
    ("qwen3", {"max_position_embeddings": ...}, {"max_position_embeddings": 32768}),
    ("qwen2", {"tie_word_embeddings": ...}, {"tie_word_embeddings": False}),
    ("llama", {"rope_theta": ...}, {"rope": RopeConfig(theta=10000.0)}),
    ("llama", {"hidden_act": ...}, {}),
    ("llama", {"torch_dtype": ...}, {"dtype": "float32"}),
    ("llama", {"torch_dtype": ..., "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ("qwen3_moe", {"head_dim": ...}, {"head_dim": 8}),
    ("qwen3_moe", {"num_key_value_heads": ...}, {"num_kv_heads": 4}),
    (
        "qwen3_moe",
        {name: ... for name in NAMES_OF_EXPERTS},
        {
            "num_experts": 128,
            "experts_per_token": 8,
            "expert_intermediate_size": 768,
            "norm_topk_prob": False,
            "dense_mlp_layers": (),
        },
    ),
    ("qwen3_moe", {"num_experts": ..., "num_local_experts": 3}, {"num_experts": 3}),
    # The step counts layers from 1, the list from 0.
    ("qwen3_moe", {"decoder_sparse_step": 2}, {"dense_mlp_layers": (0,), "expert_layers": (1,)}),
    ("qwen3_moe", {"mlp_only_layers": [1, 7]}, {"dense_mlp_layers": (1,), "expert_layers": (0,)}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, {"num_experts": 0, "mlp_layers": (0, 1)}),
    ("qwen3_moe", {"num_experts": 0}, {"experts_per_token": 0, "mlp_layers": (0, 1)}),
    # Qwen2 ignores these switches: its q, k and v always have a bias, o and the mlp never.
    ("qwen2", {}, QWEN2_BIASES),
    ("qwen2", {"attention_bias": True, "mlp_bias": True}, QWEN2_BIASES),
]


@pytest.mark.parametrize(("model_type", "overrides", "expected"), ABSENT)
def test_absent_attributes_mean_what_transformers_takes_them_for(model_type, overrides, expected):
    config = read(model_type, **overrides)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("model_type", TINY)
def test_minus_one_is_no_begin_token(model_type: str):
    for bos, expected in ((-1, None), (None, None), (0, 0), (7, 7)):
        assert read(model_type, bos_token_id=bos).bos_token_id == expected


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


def test_a_directory_gives_the_same_as_its_json(tmp_path: Path):
    write_checkpoint(tmp_path, "qwen3", generation_config={"eos_token_id": [3, 4]})
    config = ModelConfig.from_pretrained(tmp_path)
    expected = ModelConfig.from_dict(tiny_config("qwen3"), {"eos_token_id": [3, 4]})
    assert config == expected
    assert hash(config) == hash(expected)


@pytest.mark.parametrize("model_type", slow_unless("qwen3_moe".__eq__, TINY))
def test_random_parameters_fill_the_described_tree(model_type: str):
    config = read(model_type, tie_word_embeddings=True)
    params = init_params(jax.random.key(0), config, jnp.bfloat16)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == param_shapes(config, jnp.bfloat16)
    assert "lm_head" not in params
    for path, leaf in flatten_params(params).items():
        spread = float(jnp.std(leaf.astype(jnp.float32)))
        assert (spread > 0) == (path[-1] in ("kernel", "embedding")), path


# Attributes that are refused or ignored, and the messages.

ROPE_BY_LAYER = {"full_attention": {"rope_type": "default"}}
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25",
    ),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    ("qwen3", {"rope_parameters": ROPE_BY_LAYER}, "full_attention"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("llama", {"logit_scale": 0.25}, "logit_scale=0.25"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling=8.0"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
    ("qwen3", {"num_experts": 8}, "num_experts=8"),
    ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts=1"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
    ("qwen3_moe", {"moe_router_scale": 2.0}, "moe_router_scale=2.0"),
    ("qwen2", {"is_causal": False}, "is_causal=False"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),  # a switch, not a factor of one
    ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
    ("llama", {"attention_chunk_size": 8192}, "attention_chunk_size=8192"),
]


@pytest.mark.parametrize(("model_type", "overrides", "message"), UNSUPPORTED)
def test_attributes_that_would_change_results_are_refused(model_type, overrides, message):
    with pytest.raises(NotImplementedError, match=message) as raised:
        read(model_type, **overrides)
    assert "support" in str(raised.value)


def test_all_refused_attributes_are_named_at_once():
    with pytest.raises(NotImplementedError) as raised:
        read(hidden_act="relu", logit_scale=2, sliding_window=8)
    for part in ("hidden_act='relu'", "logit_scale=2", "sliding_attention (window 8)"):
        assert part in str(raised.value)


HARMLESS: dict[str, Any] = {
    "attention_dropout": 0.1,
    "auto_map": {"AutoConfig": "x.Y"},
    "initializer_range": 0.1,
    "is_causal": True,
    "is_llama_config": True,
    "logit_scale": 1.0,
    "max_sequence_length": 9,
    "num_local_experts": 0,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 2,
    "quantization_config": None,
    "rope_interleaved": False,
    "unsloth_fixed": True,
    "use_cache": False,
    "use_mrope": False,
    "x_invented_later": {"a": [1, 2]},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_attributes_that_change_nothing_are_ignored(name: str):
    assert read(**{name: HARMLESS[name]}) == read()


# Name of a case: model type, attributes, and the message if the window is refused.
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
SLIDING: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "declared but unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, None),
    "starts above the last layer": ("qwen2", SWITCHED_ON | {"max_window_layers": 2}, None),
    "upper layers": ("qwen2", SWITCHED_ON | {"max_window_layers": 1}, r"window 16\) in layers \[1"),
    "default window": (
        "qwen3",
        SWITCHED_ON | {"sliding_window": ..., "max_position_embeddings": 8192},
        r"window 4096\) in layers \[0, 1\]",
    ),
    "null window": ("qwen3", SWITCHED_ON | {"sliding_window": None}, None),
    "as wide as the context": ("qwen2", SWITCHED_ON | {"sliding_window": 512}, None),
    "narrower than a stretched context": (
        "qwen2",
        SWITCHED_ON | {"sliding_window": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "2048 tokens",
    ),
    "all layers full": ("qwen3", {"layer_types": ["full_attention"] * 2}, None),
    "older name of full": ("qwen3", {"layer_types": ["attention"] * 2}, None),
    "by layer_types": (
        "qwen3",
        SWITCHED_ON | {"layer_types": ["full_attention", "sliding_attention"]},
        r"sliding_attention \(window 16\) in layers \[1\]",
    ),
    "other kinds": (
        "qwen3",
        {"layer_types": ["linear_attention", "full_attention"]},
        r"linear_attention .* in layers \[0\]",
    ),
    "llama": ("llama", {"sliding_window": 16}, r"window 16\) in layers \[0, 1\]"),
    "llama, switched off": ("llama", {"sliding_window": 16, "use_sliding_window": False}, None),
}


@pytest.mark.parametrize("case", SLIDING)
def test_a_sliding_window_is_refused_only_where_it_applies(case: str):
    model_type, overrides, message = SLIDING[case]
    if message is None:
        assert read(model_type, **overrides).num_layers == 2
    else:
        with pytest.raises(NotImplementedError, match=message):
            read(model_type, **overrides)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, r"'llama', 'qwen2', 'qwen3'.*got 'mixtral'"),
    ({"model_type": "qwen2_moe"}, r"'qwen3_moe'.*got 'qwen2_moe'"),
    ({"model_type": ...}, "got None"),
    ({"vocab_size": ..., "hidden_size": ...}, r"missing \['vocab_size', 'hidden_size'\]"),
    ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"layer_types": ["full_attention"]}, "must name num_hidden_layers = 2"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor.*missing"),
    (
        {"rope_scaling": {"type": "linear", "factor": 0.0}},
        "factor must be a finite number larger than 0",
    ),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
]


@pytest.mark.parametrize(("overrides", "message"), INVALID)
def test_invalid_configs_raise(overrides: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read(**overrides)


INVALID_EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": "6"}, "num_experts must be an integer of at least 0, got '6'"),
    ({"num_experts": 2**62}, "num_experts must be at most 100000 / num_hidden_layers 2, got 46"),
    ({"num_experts_per_tok": 7}, "experts_per_token must be at most num_experts 6, got 7"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer, got 0"),
    ({"moe_intermediate_size": 1.5}, "moe_intermediate_size must be a positive integer"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
    ({"mlp_only_layers": 0}, "mlp_only_layers must be a list of layers, got '0'"),
    ({"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layers"),
]


@pytest.mark.parametrize(("overrides", "message"), INVALID_EXPERTS)
def test_invalid_configs_of_experts_raise(overrides: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read("qwen3_moe", **overrides)


LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type must be one of"),
        ({"theta": 1.0}, r"theta must be in \(1, 1e30\), got 1.0"),
        ({"rope_type": "yarn"}, "original_max_position_embeddings must be"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor must be larger"),
        ({"beta_fast": 0.0}, r"beta_fast must be in \[1e-30, 1e30\), got 0.0"),
        ({"beta_slow": 1e-320}, r"beta_slow must be in \[1e-30, 1e30\), got 1e-320"),
    ],
)
def test_invalid_rope_configs_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)


def test_a_path_without_a_config_is_refused_with_advice(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    for path, error, message in (
        ("meta-llama/Llama-3.2-1B", FileNotFoundError, "hf download"),
        (tmp_path / "model.safetensors", ValueError, "or a GGUF file, got the file"),
        (tmp_path, FileNotFoundError, r"config\.json"),
    ):
        with pytest.raises(error, match=message):
            ModelConfig.from_pretrained(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "must be a JSON file"), ("[1]", "must hold a JSON object"), ("\xff", "JSON")],
)
def test_a_damaged_config_raises(tmp_path: Path, content: str, message: str):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(tmp_path)
