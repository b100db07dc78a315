"""The benchmark of several GPUs runs anywhere with `--quick`, in parts."""

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


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


@pytest.mark.weekly
def test_parts_are_put_together(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found["rows"]
    assert [row["error"] for row in rows] == [None] * 8
    names = {(row["phase"], row["axis"], row["ranks"], row["batch"]) for row in rows}
    prefill = {("prefill", "one", 1, 1), ("prefill", "sequence", 2, 1), ("prefill", "tensor", 2, 1)}
    decode = {("decode", "one", 1, 1), ("decode", "tensor", 2, 1), ("decode", "data", 2, 2)}
    assert names == prefill | decode | {("lists", "sequence", 2, 1), ("lists", "tensor", 2, 1)}
    assert all(row["run"]["copy_tb_per_s"] > 0 for row in rows)
    for row in rows:
        if row["phase"] == "lists":
            assert row["lists_equal_on_ranks"] and row["counts_equal"]
            assert row["differing_blocks"] < 0.1 * row["listed_blocks"]
        else:
            assert row["seconds"]["median"] > 0 and row["floor_seconds"] > 0
            assert (row["sent_bytes"] == 0) == (row["axis"] in ("one", "data"))


def test_the_table_says_how_much_faster(path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    report, tables = (importlib.import_module(name) for name in ("report", "tables"))
    data = json.loads(path.read_text(encoding="utf-8"))
    data["meta"]["is_quick"] = False
    whole = path.with_name("whole")
    whole.mkdir()
    (whole / path.name).write_text(json.dumps(data), encoding="utf-8")
    assert tables.TABLES["scale"].write(whole).count("×**") == 4
    assert report.NOTHING in tables.TABLES["scale"].write(whole)
