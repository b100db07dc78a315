"""Eight-bit weights are made, loaded, saved and multiplied."""

import gc

import checkpoints
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from arrays import normal
from gguf_checkpoints import write_gguf
from variants import slow_unless

from sketchwalk_jax import Dense, forward, load, save
from sketchwalk_jax.models import checkpoint, param_shapes, quantize_params
from sketchwalk_jax.models.params import check_params, check_runs, flatten_params, weights_of
from sketchwalk_jax.models.quantized import multiply_quantized, quantize_rows

KINDS = ("float8", "int8")
MODEL = tiny.MODEL


def equal(one, other):
    chex.assert_trees_all_equal_dtypes(one, other)
    chex.assert_trees_all_equal(
        *(jax.tree.map(lambda x: x.astype("float32"), x) for x in (one, other))
    )


@pytest.mark.parametrize("weights", KINDS)
def test_quantised_parameters_have_the_described_shapes(weights):
    made = quantize_params(tiny.params(model=MODEL), weights)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
    assert shapes == param_shapes(MODEL, weights=weights)
    assert {path for path in flatten_params(made) if path[-1] == "kernel"} == {
        ("lm_head", "kernel")
    }
    check_runs(made, MODEL)
    assert weights_of(made) == weights


@pytest.mark.parametrize(("weights", "error"), [("float8", 2**-4), ("int8", 0.5 / 127)])
def test_a_weight_is_within_half_a_step(weights, error):
    before = tiny.params(model=MODEL)["layers"]["out"]["kernel"]  # [L, N, H, D]
    leaf = quantize_params(tiny.params(model=MODEL), weights)["layers"]["out"]
    wide = np.asarray(leaf["quantized"], np.float32)
    found = wide * np.asarray(leaf["scales"])[:, :, None, None]
    before = np.moveaxis(np.asarray(before), -1, 1)
    most = np.abs(before).max((2, 3), keepdims=True)
    size = most if weights == "int8" else np.maximum(np.abs(before), most * 2**-6 / 448 / error)
    assert (np.abs(found - before) <= size * error * 1.001).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_zeros_have_the_scale_one_and_tiny_rows_a_finite_one(dtype):
    rows = np.array([[0, 0], [1e-45, 0], [3e38, -1]], np.float32)
    found, scales = quantize_rows(rows, np.dtype(jnp.dtype(dtype)), num_inputs=1, name="w")
    assert scales[0] == 1 and np.isfinite(scales).all() and (scales > 0).all()
    assert (found[0].astype(np.float32) == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    rows = np.array([[1, bad]], np.float32)
    with pytest.raises(ValueError, match="w must be finite to be quantised"):
        quantize_rows(rows, np.dtype(np.int8), num_inputs=1, name="w")
    params = tiny.params(model=MODEL)
    kernel = params["layers"]["up"]["kernel"].at[1, 0, 0].set(bad)
    params["layers"]["up"] = {"kernel": kernel}
    for weights in KINDS:
        with pytest.raises(ValueError, match="layers/up/kernel must be finite"):
            quantize_params(params, weights)


@pytest.mark.parametrize(("weights", "tolerance"), [("float8", 0.3), ("int8", 0.05)])
def test_logits_stay_close(weights, tolerance):
    tokens, lengths = tiny.prompts(40, 33)
    params = tiny.params(model=MODEL)
    options = {"model_config": MODEL, "policy": Dense(), "lengths": lengths}
    before = forward(params, tokens, **options)
    after = forward(quantize_params(params, weights), tokens, **options)
    before, after = (np.asarray(one)[np.arange(40) < lengths[:, None]] for one in (before, after))
    error = np.std(after - before) / np.std(before)
    assert 0 < error < tolerance


def test_a_row_of_zeros_and_one_of_nan_leave_the_others():
    leaf = quantize_params(tiny.params(model=MODEL), "float8")["layers"]["gate"]
    weights, scales = leaf["quantized"][0], leaf["scales"][0]
    x = normal((1, 4, 32))
    before = multiply_quantized(x, weights, scales)
    after = multiply_quantized(x.at[0, 1].set(0).at[0, 2].set(jnp.nan), weights, scales)
    assert (after[0, 1] == 0).all() and jnp.isnan(after[0, 2]).all()
    np.testing.assert_array_equal(after[0, ::3], before[0, ::3])


@pytest.mark.parametrize("weights", KINDS)
def test_gradients_are_refused(weights):
    params = quantize_params(tiny.params(model=MODEL), weights)
    tokens, _ = tiny.prompts(16)

    def loss(embedding):
        tree = {**params, "embed": {"embedding": embedding}}
        return forward(tree, tokens, model_config=MODEL, policy=Dense()).sum()

    with pytest.raises(NotImplementedError, match="must not be differentiated"):
        jax.grad(loss)(params["embed"]["embedding"])


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match=r"one of \('float8', 'int8'\), got 'int4'"):
        load("nowhere", weights="int4")
    with pytest.raises(ValueError, match="weights must be one of"):
        quantize_params(tiny.params(model=MODEL), "fp8")
    made = quantize_params(tiny.params(model=MODEL), "int8")
    with pytest.raises(ValueError, match="must not be quantised yet, got weights in int8"):
        quantize_params(made, "float8")
    made["layers"]["up"]["scales"] = made["layers"]["up"]["scales"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="layers/up/scales must be float32, got bfloat16"):
        check_params(made, MODEL)


@pytest.mark.parametrize("weights", KINDS)
def test_a_saved_directory_comes_back_exactly(weights, tmp_path):
    made = quantize_params(tiny.params(jnp.bfloat16, MODEL), weights)
    save(tmp_path / "saved", made, MODEL)
    equal(load(tmp_path / "saved", progress=False)[0], made)
    equal(load(tmp_path / "saved", progress=False, weights=weights)[0], made)
    wide, _ = load(tmp_path / "saved", progress=False, dtype="float32")
    assert weights_of(wide) == weights
    other = KINDS[KINDS.index(weights) - 1]
    with pytest.raises(ValueError, match=f"weights must be {weights!r} or left out"):
        load(tmp_path / "saved", progress=False, weights=other)


def test_a_folder_of_another_version_with_weights_of_four_bits_is_refused(tmp_path):
    save(tmp_path / "saved", quantize_params(tiny.params(model=MODEL), "int8"), MODEL)
    file = tmp_path / "saved" / "model_config.json"
    file.write_text(file.read_text().replace('gate/quantized": "int8', 'gate/quantized": "uint8'))
    for weights in (None, "int8"):
        with pytest.raises(
            ValueError,
            match="saved must hold weights in one of .* arrays of .*"
            "uint8, which another version wrote; load the checkpoint that",
        ):
            load(tmp_path / "saved", weights=weights)


@pytest.mark.slow
def test_a_saved_directory_is_quantised_a_stack_at_a_time_when_loaded(tmp_path, monkeypatch):
    params = tiny.params(jnp.bfloat16, MODEL)
    save(tmp_path / "saved", params, MODEL)
    wanted = quantize_params(params, "int8")

    def num_wide():
        gc.collect()  # frees reference cycles
        wide = [x for x in jax.live_arrays() if x.ndim > 2 and x.dtype == jnp.bfloat16]
        return len({x.unsafe_buffer_pointer() for x in wide})  # two arrays may share one buffer

    held, before = [], num_wide()

    def quantize(wide, weights):
        held.append(num_wide() - before)
        return quantize_params(wide, weights)

    monkeypatch.setattr(checkpoint, "quantize_params", quantize)
    found, _ = load(tmp_path / "saved", progress=False, weights="int8")
    equal(found, wanted)
    assert held == [1] * 7


@pytest.mark.parametrize("weights", slow_unless("int8".__eq__, KINDS))
@pytest.mark.parametrize(
    "kind",
    slow_unless(
        ("directory of experts", "file").__contains__,
        ["directory", "directory of experts", "file", "file of experts"],
    ),
)
def test_a_checkpoint_is_quantised_while_it_is_read(kind, weights, tmp_path):
    model_type = "qwen3_moe" if "experts" in kind else "qwen2"
    source = tmp_path if "directory" in kind else tmp_path / "model.gguf"
    if "directory" in kind:
        layers = {"mlp_only_layers": [1]} if "experts" in kind else {}
        checkpoints.write_checkpoint(source, model_type, **layers)
    elif "experts" in kind:
        write_gguf(source, model_type, quantisation="F16")
    else:  # with more rows than are read at once
        sizes = {"hidden_size": 320, "intermediate_size": 160, "head_dim": 80, "vocab_size": 300}
        write_gguf(source, quantisation="Q8_0", **sizes)
    options = {"dtype": "float32", "progress": False}
    params, _ = load(source, **options)
    found, _ = load(source, weights=weights, **options)
    equal(found, quantize_params(params, weights))


@pytest.mark.parametrize("weights", KINDS)
def test_modules_for_flax_refuse_quantised_weights(weights):
    from sketchwalk_jax.models.flax import CausalLM

    with pytest.raises(
        NotImplementedError, match=f"must have weights that train, got .* {weights}"
    ):
        CausalLM.from_params(quantize_params(tiny.params(model=MODEL), weights), MODEL)
