"""The benchmark of the kernels: it runs anywhere with `--quick`; its tables and its figure."""

import json

import pytest

pytestmark = pytest.mark.slow

FIELDS = {
    "op",
    "batch",
    "tokens",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "density",
    "dtype",
    "block_size",
    "ours_ms",
    "ours_ms_iqr",
    "peer",
    "peer_ms",
    "peer_ms_iqr",
    "ratio",
}
XLA_FLAGS = "--xla_backend_optimization_level=0"
OPS = {
    "prefill": {"tflops", "relative_error", "is_bit_equal"},
    "decode": {"tb_per_s", "fraction_of_copy_bandwidth", "relative_error", "is_bit_equal"},
    "select_prefill": {"share_of_attention"},
    "select_decode": {"share_of_attention"},
}


@pytest.fixture(autouse=True, scope="module")
def _compiled_fast():
    """Nothing here is fast because it is compiled well, nor random because it is drawn well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", XLA_FLAGS)
        patch.setenv("JAX_DEFAULT_PRNG_IMPL", "unsafe_rbg")
        yield


@pytest.fixture(scope="module")
def results(run_benchmark, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "kernels.json"
    run_benchmark("kernels.py", "--quick", "--out", path)
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_operation_is_measured_and_checked(results):
    assert results["meta"]["is_quick"] and results["meta"]["copy_tb_per_s"] > 0
    assert [row["op"] for row in results["rows"]] == list(OPS)
    for row in results["rows"]:
        assert row.keys() >= FIELDS | OPS[row["op"]]
        assert row["ours_ms"] > 0
        if "relative_error" in row:
            assert row["is_bit_equal"] and row["relative_error"] < 5e-3
            assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"])


def test_rates_of_the_chip_are_a_table(run_benchmark, results, tmp_path):
    def row(rate, **what):
        return what | {name: summary_of_one(rate) for name in ("per_cycle", "clock_ghz")}

    rows = [
        row(64.0, op="alu", instruction="FMNMX", unit="results"),
        row(4096.0, op="wgmma", left="registers", sums="f16", columns=128, unit="multiplications"),
        row(32.5, op="tma", keys_lie_in="lines", unit="bytes"),
    ]
    rates = {"meta": results["meta"] | {"is_quick": False}, "rows": rows}
    (tmp_path / "hopper_rates.json").write_text(json.dumps(rates), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:kernels-rates -->\n<!-- /benchmark -->\n", encoding="utf-8")
    run_benchmark("report.py", "--results", tmp_path, "--page", page)
    text = page.read_text(encoding="utf-8")
    assert "| `FMNMX` | 64.0 (64.0–64.0) results | 64.00 GHz |" in text
    assert "| 64 × 128 products in eight bits, left operand in registers, sums in float16 |" in text
    assert "| keys to shared memory, in lines of 128 bytes | 32.5 (32.5–32.5) bytes |" in text


def summary_of_one(value: float) -> dict:
    """The summary of a single measurement."""
    return {"q25": value, "median": value, "q75": value}


def test_tables_and_figure_are_made_of_the_results(run_benchmark, results, tmp_path):
    meta = results["meta"] | {"is_quick": False}
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    rows = [row | shape | {"density": 0.1, "tokens": 2048} for row in results["rows"]]
    kernels = {"meta": meta, "rows": results["rows"] + rows}
    (tmp_path / "kernels.json").write_text(json.dumps(kernels), encoding="utf-8")
    page = tmp_path / "page.md"
    names = ["kernels", *(f"kernels-{one}" for one in ("prefill", "decode", "selection"))]
    sections = [f"<!-- benchmark:{name} -->\n<!-- /benchmark -->\n" for name in names]
    page.write_text("".join(sections), encoding="utf-8")
    run_benchmark("report.py", "--results", tmp_path, "--page", page)
    run_benchmark("figures.py", "kernels_speedup", "--results", tmp_path, "--plots", tmp_path)
    text = page.read_text(encoding="utf-8")
    for cells in (
        "| Tokens | Prefill, density 0.1 |",
        "| 32/8 × 128 | 2,048 | 0.1 |",
        "| 32/8 × 128 | 2 | 2,048 |",
        "| decode | 2,048",
    ):
        assert cells in text
    command = f"XLA_FLAGS={XLA_FLAGS} python benchmarks/kernels.py --quick --out kernels.json"
    assert text.count(f"`{command}`") == len(names)
    assert (tmp_path / "kernels_speedup.png").stat().st_size > 10_000


@pytest.mark.weekly
def test_linear_layers_are_timed_in_each_type_of_weights(run_benchmark, tmp_path):
    run_benchmark("linear.py", "--quick", "--out", tmp_path / "linear.json")
    rows = json.loads((tmp_path / "linear.json").read_text(encoding="utf-8"))["rows"]
    forms = [(row["form"], row["dtype"]) for row in rows]
    types = ["bfloat16", "float8_e4m3fn", "int8", "int4"]
    others = ["from Ampere on", "sums", "XLA"]
    assert forms == [*zip(types, types, strict=True), *((one, "bfloat16") for one in others)]
    assert all(row["ms"] > 0 and row["is_bit_equal"] for row in rows)
    assert max(row["relative_error"] for row in rows) < 5e-3


@pytest.mark.weekly
def test_the_code_of_xla_is_timed_beside_dense_attention(run_benchmark, tmp_path):
    path = tmp_path / "xla_path.json"
    run_benchmark("xla_path.py", "--quick", "--out", path)
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["meta"]["failed"] == []
    assert [(row["op"], row["batch"]) for row in results["rows"]] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 8),
    ]
    for row in results["rows"]:
        forms = row["forms"]
        assert forms.keys() >= {"xla_dense", "xla", "selection", "all_xla"}
        assert all(one["ms"] > 0 for one in forms.values())
        assert forms["all_xla"]["ms"] > max(forms[x]["ms"] for x in ("xla", "selection"))
