"""The benchmark of whole models runs anywhere with `--quick`, and its rows are consistent."""

import argparse
import importlib
import json
import math
from pathlib import Path

import jax
import pytest

from sketchwalk_jax.models.params import num_active

pytestmark = pytest.mark.slow

XLA_FLAGS = "--xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def results(run_benchmark, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "end_to_end.json"
    with pytest.MonkeyPatch.context() as patch:
        # Skip slow optimisations and random generators: nothing here is timed.
        patch.setenv("XLA_FLAGS", XLA_FLAGS)
        patch.setenv("JAX_DEFAULT_PRNG_IMPL", "unsafe_rbg")
        run_benchmark("end_to_end.py", "--quick", "--out", path)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("end_to_end")


def test_every_cell_is_measured(results):
    rows = results["rows"]
    assert all(row["error"] is None and row["implementation"] == "ours" for row in rows)
    found = {(row["phase"], row["batch"], row["preset"] or row["policy"]) for row in rows}
    names = ("dense", "recommended", "paper")
    wanted = {("prefill", 1), ("decode", 1), ("decode", 2)}
    assert found == {(*one, name) for one in wanted for name in names}
    pieces = {row["preset"] or row["policy"] for row in rows if row["chunk_size"]}
    assert pieces == {"dense", "recommended"}
    names = results["meta"]["asked"]["rows"]
    assert len(names) == len(rows) == len(set(names))


def test_rows_that_are_missing_are_named_and_measured_alone(
    results, run_benchmark, tmp_path, benchmark
):
    """A row that failed is not missing: it was tried."""
    missing = benchmark.common.missing
    assert missing(results) == missing({"meta": {}, "rows": []}) == []
    path = tmp_path / "end_to_end.json"
    *kept, lost = results["rows"]
    part = results | {"rows": kept}
    assert missing(part) == results["meta"]["asked"]["rows"][-1:]
    path.write_text(json.dumps(part), encoding="utf-8")
    run_benchmark("end_to_end.py", "--quick", "--missing", "--out", path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["rows"][:-1] == kept
    found_names = [found["rows"][-1].get(name) for name in benchmark.NAMES]
    assert found_names == [lost.get(name) for name in benchmark.NAMES]
    assert "--missing" in found["rows"][-1]["run"]["command"]
    assert found["meta"]["asked"] == results["meta"]["asked"]
    wanted = dict.fromkeys(("tokens", "batch", "phase"))
    names = [row["phase"] for row in benchmark.peer_cells("m", argparse.Namespace(**wanted))]
    assert names.count("prefill") == 6 and names.count("decode") == 18


def test_a_row_says_what_was_measured_and_by_what(results):
    for row in results["rows"]:
        assert row["run"].keys() >= {"date", "command", "repeats", "matmul_tflops"}
        assert row["run"]["command"].startswith(f"XLA_FLAGS={XLA_FLAGS} python ")
        assert row["run"]["repeats"] == 2
        assert 0 < row["seconds"]["q25"] <= row["seconds"]["median"] <= row["seconds"]["q75"]
        assert row["floor_seconds"] > 0 and row["peak_gib"] > 0
        is_dense = row["policy"] == "dense"
        assert (row["method_state_bytes"] == 0) == is_dense
        assert (row["measured_density"] == 1.0) == is_dense
        # Keys and values, three layers, two heads of 16 channels of two bytes.
        assert row["kv_cache_bytes"] == 2 * 3 * row["batch"] * row["tokens"] * 2 * 16 * 2


def test_the_floor_of_a_token_is_what_must_be_read(results):
    rows = {
        (row["preset"] or row["policy"], row["batch"]): row
        for row in results["rows"]
        if row["phase"] == "decode"
    }
    rate = results["rows"][0]["run"]["copy_tb_per_s"] * 1e12
    read = {key: row["floor_seconds"] * rate for key, row in rows.items()}
    more = read["dense", 2] - read["dense", 1]
    # A second sequence adds its keys and values, and one row of the embedding.
    assert more == pytest.approx(rows["dense", 1]["kv_cache_bytes"] + 64 * 2)
    weights = read["dense", 1] - rows["dense", 1]["kv_cache_bytes"]
    assert 64 * 256 * 2 < weights < 2**20  # the output matrix, but not the whole embedding
    own = rows["recommended", 1]
    attended = own["kv_cache_bytes"] * own["measured_density"]
    assert read["recommended", 1] == pytest.approx(weights + attended + own["method_state_bytes"])


@pytest.mark.weekly
def test_types_of_weights_are_measured_side_by_side(run_benchmark, tmp_path, benchmark):
    path = tmp_path / "weights.json"
    types = ("--weights", "bfloat16", "--weights", "float8")
    only = ("--policy", "dense", "--phase", "decode", "--batch", "1")
    run_benchmark("end_to_end.py", "--quick", *types, *only, "--out", path)
    wide, narrow = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert (wide["weights"], narrow["weights"]) == ("bfloat16", "float8")
    assert wide["error"] is narrow["error"] is None
    assert wide["run"]["matmul_float8_tflops"] > 0
    # Weights of the layers take half of the bytes, plus float32 scales of their outputs.
    config = benchmark.TINY
    layers = benchmark.param_shapes(config)["layers"]
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(layers) if x.ndim > 2)
    scales = jax.tree.leaves(benchmark.param_shapes(config, weights="float8")["layers"])
    outputs = sum(math.prod(x.shape) for x in scales if x.dtype == "float32")
    rate = wide["run"]["copy_tb_per_s"] * 1e12
    less = (wide["floor_seconds"] - narrow["floor_seconds"]) * rate
    assert less == pytest.approx(weights - 4 * outputs)


@pytest.mark.weekly
def test_only_the_experts_that_are_chosen_are_read(run_benchmark, tmp_path, benchmark):
    path = tmp_path / "experts.json"
    only = ("--model", "tiny-experts", "--policy", "dense", "--phase", "decode")
    types = ("--weights", "bfloat16", "--weights", "float8")
    run_benchmark("end_to_end.py", "--quick", *only, *types, "--out", path)
    rows = {
        (row["batch"], row["weights"]): row
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    }
    assert all(row["error"] is None for row in rows.values()) and len(rows) == 4
    rate = rows[1, "bfloat16"]["run"]["copy_tb_per_s"] * 1e12
    read = {key: row["floor_seconds"] * rate for key, row in rows.items()}
    # A second sequence chooses 2 of 8 experts, of which the first one already has a quarter; their
    # matrices are 64 x 32.
    added = 3 * 3 * 64 * 32 * (2 - 2 * 2 / 8) * 2
    cache = rows[1, "bfloat16"]["kv_cache_bytes"]
    more = read[2, "bfloat16"] - read[1, "bfloat16"]
    assert more == pytest.approx(added + cache + 64 * 2)
    assert read[1, "float8"] < read[1, "bfloat16"]


def test_kernels_belong_to_parts(benchmark):
    parts = {
        "block_sparse_decode_mosaic_gpu_kernel": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "sketchwalk_block_sums_mosaic_gpu_kernel": "observing",
        "token_scores_mosaic_gpu_kernel": "scores",
        "dequantized_offsets_mosaic_gpu_kernel": "scores",
        "token_page_scores_mosaic_gpu_kernel": "walk and lists",
        "sketchwalk_select_rows_mosaic_gpu_kernel": "walk and lists",
        "nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN": "linear",
        "loop_add_fusion": "rest",
    }
    assert {name: benchmark.part_of(name) for name in parts} == parts
    # Sizes of models are the published ones, so what does not fit is known beforehand.
    shapes = benchmark.param_shapes(benchmark.MODELS["llama-3.1-8b"])
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == 8_030_261_248
    experts = benchmark.MODELS["qwen3-30b-a3b"]
    shapes = benchmark.param_shapes(experts)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == 30_532_122_624
    # A token computes with eight experts of each layer, and reads a row of the embedding.
    norms = 48 * (2 * 2048 + 2 * 128)
    active = num_active(experts) - 2 * 151936 * 2048 - norms - 2048
    assert benchmark.linear_flops(experts, 5) == pytest.approx(2 * 5 * active)
    read = num_active(experts) - (151936 - 1) * 2048
    assert benchmark.token_bytes(experts, 1, 0, 1.0) == pytest.approx(2 * read)
