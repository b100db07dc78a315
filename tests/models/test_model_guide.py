"""The example of the guide to model families runs unchanged, and loads its model."""

import json

import guides
import jax
import numpy as np
import pytest
from checkpoints import write_checkpoint

import sketchwalk_jax as sw
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hf_config import FAMILIES


def write_mistral(directory, **changes):
    """Writes a Llama checkpoint that claims to be a Mistral; returns its `config.json`."""
    write_checkpoint(directory)
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | {"model_type": "mistral", "sliding_window": None} | changes
    path.write_text(json.dumps(raw))
    return raw


TOKENS = np.arange(40, dtype=np.int32)[None] % 250 + 2


@pytest.fixture
def family(repository, tmp_path):
    """Registers the example's model family for one test."""
    before = dict(FAMILIES)
    page = repository / "models" / "README.md"
    yield guides.load_example(page, tmp_path / "mistral.py").MISTRAL
    FAMILIES.clear()
    FAMILIES.update(before)


def test_the_example_loads_and_generates(family, repository, tmp_path):
    """It computes a Llama with the same weights, like transformers' Mistral."""
    write_mistral(tmp_path / "mistral")
    write_checkpoint(tmp_path / "llama")
    scope = {"sw": sw, "MISTRAL": family, "directory": tmp_path / "mistral", "tokens": TOKENS}
    exec(guides.block(repository / "models" / "README.md", "example-use"), scope)
    params, model_config = sw.load(tmp_path / "llama")
    expected = sw.generate(
        params, TOKENS, model_config=model_config, policy=sw.Dense(), max_new_tokens=8
    )
    assert scope["model_config"].model_type == "mistral"
    np.testing.assert_array_equal(scope["generation"].tokens, expected.tokens)
    for one, other in zip(*map(jax.tree.leaves, (scope["params"], params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_its_attributes_mean_what_they_mean_in_transformers(family, tmp_path):
    FAMILIES["mistral"] = family
    raw = write_mistral(tmp_path)
    for name in ("num_key_value_heads", "max_position_embeddings", "bos_token_id"):
        del raw[name]
    config = ModelConfig.from_dict(raw | {"num_attention_heads": 8, "head_dim": 4})
    assert (config.num_kv_heads, config.head_dim) == (8, 4)
    assert (config.max_position_embeddings, config.bos_token_id) == (131072, 1)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    write_mistral(tmp_path, sliding_window=128)
    with pytest.raises(NotImplementedError, match=r"window 128\) in layers \[0, 1\]"):
        sw.load(tmp_path)
