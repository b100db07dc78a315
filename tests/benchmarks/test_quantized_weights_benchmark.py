"""The benchmark that compares models' distributions with and without quantized weights."""

import json
import sys
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from arrays import normal
from scipy import special

from sketchwalk_jax.models import init_params, quantize_params

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import quantized_weights  # noqa: E402
import tables  # noqa: E402


@pytest.mark.slow
def test_distributions_are_compared_as_the_equations_say(monkeypatch):
    monkeypatch.setattr(quantized_weights, "_CHUNK", 4)  # the last chunk is not full
    params = init_params(jax.random.key(0), tiny.MODEL)
    rng = np.random.default_rng(0)
    exact, hidden = rng.normal(size=(2, 1, 11, tiny.MODEL.hidden_size)).astype(np.float32)
    tokens = rng.integers(tiny.MODEL.vocab_size, size=(1, 11))
    found = quantized_weights._compare(params, exact, hidden, tokens, model_config=tiny.MODEL)

    def log_probabilities(x):
        logits = quantized_weights.unembed(params, jnp.asarray(x[0]), model_config=tiny.MODEL)
        return special.log_softmax(np.asarray(logits, np.float64), axis=-1)[:-1]

    p, q = log_probabilities(exact), log_probabilities(hidden)
    wanted = [
        (np.exp(p) * (p - q)).sum(axis=-1).mean(),
        -q[np.arange(10), tokens[0, 1:]].mean(),
        (p.argmax(axis=-1) == q.argmax(axis=-1)).mean(),
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_widened_weights_are_the_quantised_ones():
    params = init_params(jax.random.key(0), tiny.MODEL)
    narrow = quantize_params(params, "float8")
    wide = quantized_weights._widen(params, narrow)
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, params)
    x = normal((3, tiny.MODEL.hidden_size), seed=1)
    for name in ("query", "up"):
        kernel, leaf = wide["layers"][name]["kernel"][1], narrow["layers"][name]
        own = leaf["quantized"][1].astype(jnp.float32) * leaf["scales"][1][..., None]
        found = jnp.einsum("bd,d...->b...", x, kernel, precision="highest")
        wanted = jnp.einsum("bd,...d->b...", x, own, precision="highest")
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    out = np.asarray(wide["layers"]["out"]["kernel"] - params["layers"]["out"]["kernel"])
    assert 0 < np.abs(out).max() < 2**-3 * np.abs(params["layers"]["out"]["kernel"]).max()


@pytest.mark.slow
def test_every_type_of_weights_is_measured_and_shown(tmp_path, monkeypatch):
    checkpoints.write_checkpoint(
        tmp_path, tokenizer=True, num_hidden_layers=2, max_position_embeddings=512
    )
    out = tmp_path / "quantized_weights.json"
    command = ["quantized_weights.py", "--model", str(tmp_path), "--out", str(out)]
    command += ["--tokens", "512", "--prompts", "2", "--weights", "float8", "int8"]
    monkeypatch.setattr(sys, "argv", command)
    quantized_weights.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    whole = {
        (row["weights"], row["policy"]): row for row in rows if row["part"] == quantized_weights.ALL
    }
    assert whole.keys() == {
        (weights, policy)
        for weights in ("float32", "float8", "int8")
        for policy in ("dense", "recommended")
    }
    kl = {weights: np.mean(whole[weights, "dense"]["kl"]) for weights, _ in whole}
    assert abs(kl["float32"]) < 1e-6 < kl["int8"] < kl["float8"]
    assert np.mean(whole["float32", "dense"]["agreement"]) == 1
    parts = {row["part"]: np.mean(row["kl"]) for row in rows if row["weights"] == "float8"}
    assert parts.keys() > quantized_weights.PARTS.keys()
    assert all(0 < parts[one] < kl["float8"] for one in quantized_weights.PARTS)
    assert 0 < parts[quantized_weights.WIDENED] < kl["float8"]
    # Results for another text or seed are not added to the file.
    monkeypatch.setattr(sys, "argv", [*command, "--seed", "3"])
    before = out.read_bytes()
    with pytest.raises(SystemExit, match="seed 0 there, 3 now"):
        quantized_weights.main()
    assert out.read_bytes() == before
    table = tables.TABLES["weights-moved"].write(tmp_path)
    assert table.count("| int8 |") == 2 and "density 0.2" in table


def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path, monkeypatch):
    checkpoints.write_checkpoint(tmp_path, tokenizer=True, max_position_embeddings=128)
    out = tmp_path / "quantized_weights.json"
    command = ["quantized_weights.py", "--model", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--tokens", "128", "--prompts", "1"])
    row = {"weights": "float8", "part": quantized_weights.ALL, "policy": "dense", "density": 1.0}

    def measure(*_, **__):
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(quantized_weights, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        quantized_weights.main()
    data = json.loads(out.read_text(encoding="utf-8"))
    assert [one["weights"] for one in data["rows"]] == ["float8"]
    # A file of another machine is refused before anything is measured.
    data["meta"]["cpu"] = "another one"
    out.write_text(json.dumps(data), encoding="utf-8")
    before = out.read_bytes()
    with pytest.raises(SystemExit, match="cpu 'another one' there"):
        quantized_weights.main()
    assert out.read_bytes() == before
