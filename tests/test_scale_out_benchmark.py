"""The benchmark of several GPUs: it runs anywhere with `--quick`, in parts; its estimate."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MAIN = {"model": "llama-3.1-8b", "tokens": 2**17, "batch": 1, "ranks": 1, "axis": "one"}
SECTIONS = ("prefill", "decode", "lists", "estimate")
MAIN |= {"policy": "sketchwalk", "preset": "recommended", "density": 0.1, "error": None}


@pytest.fixture(scope="module")
def path(run_benchmark, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "scale_out.json"
    with pytest.MonkeyPatch.context() as patch:
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        patch.setenv("XLA_FLAGS", flags)
        patch.setenv("JAX_PLATFORMS", "cpu")
        for part in ("lists", "prefill", "decode"):
            run_benchmark("scale_out.py", "--quick", "--phase", part, "--out", path)
    return path


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return [importlib.import_module(name) for name in ("scale_out", "report")]


@pytest.mark.weekly
def test_parts_are_put_together(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found["rows"]
    assert [row["error"] for row in rows] == [None] * 8
    names = {(row["phase"], row["axis"], row["ranks"], row["batch"]) for row in rows}
    prefill = {("prefill", "one", 1, 1), ("prefill", "sequence", 2, 1), ("prefill", "tensor", 2, 1)}
    decode = {("decode", "one", 1, 1), ("decode", "tensor", 2, 1), ("decode", "data", 2, 2)}
    assert names == prefill | decode | {("lists", "sequence", 2, 1), ("lists", "tensor", 2, 1)}
    assert found["meta"]["rates"].keys() == {"one", "sequence", "tensor", "data"}
    assert found["meta"]["rates"]["tensor"]["small_sum_us"] > 0
    for row in rows:
        if row["phase"] == "lists":
            assert row["lists_equal_on_ranks"] and row["counts_equal"]
            assert row["differing_blocks"] < 0.1 * row["listed_blocks"]
        else:
            assert row["seconds"]["median"] > 0 and row["floor_seconds"] > 0
            assert (row["sent_bytes"] == 0) == (row["axis"] in ("one", "data"))


def test_tables_say_how_much_faster(path, modules):
    data = json.loads(path.read_text(encoding="utf-8"))
    tables = {name: modules[1].TABLES[f"scale-{name}"].table(data) for name in SECTIONS}
    assert [tables[name].count("×**") for name in SECTIONS] == [2, 2, 0, 0]
    assert tables["lists"].count("bit-equal") == 2 and tables["estimate"] == ""


def test_an_estimate_is_of_parts_and_bytes(modules):
    scale_out, report = modules
    parts = {"linear": 3000.0, "attention": 1500.0, "observing": 100.0, "walk and lists": 50.0}
    common = {"chunk_size": None, "measured_density": 0.1, "parts_ms": parts}
    row = MAIN | common | {"phase": "prefill", "seconds": {"median": 4.85}}
    token = {"phase": "decode", "seconds": {"median": 0.01}, "parts_ms": {"linear": 6.0}}
    rates = {"sum_gb_per_s": 300.0, "gather_gb_per_s": 300.0, "small_sum_us": 10.0}
    data = {"meta": {"rates": {"tensor": rates}}, "rows": [row, row | token]}
    alone = scale_out.estimate(data, "prefill", 1, 1)
    assert alone["seconds"] == pytest.approx(4.85) and alone["bytes"] == 0
    config = scale_out.SHAPES["llama-3.1-8b"]
    by_row = scale_out.estimate(data, "prefill", 1, 2)
    keys = 32 * 2 * 8 * 128 * 2 * 2**17 / 2  # of the other rank's tokens, in all layers
    assert by_row["bytes"] == keys
    assert by_row["seconds"] == pytest.approx(0.2 + 2.25 + 0.1 + 0.025 + keys / 3e11)
    by_head = scale_out.estimate(data, "prefill", 2, 1)
    hidden = 32 * 2 * 4096 * 2 * 2**17  # a rank receives one array in each of two sums
    assert by_head["bytes"] >= hidden and by_head["flops"] == alone["flops"] / 2
    assert scale_out.estimate(data, "decode", 8, 8)["tokens_per_s"] > 8 * 100
    assert report.TABLES["scale-estimate"].table(data).count("\n| ") > 6
    assert scale_out.prompt_flops(config, 2**17, 0.1) == alone["flops"]
    cell = dataclasses.replace(next(iter(scale_out.cells(2, is_quick=False))), axis="one")
    assert cell.row(2)["ranks"] == 1
