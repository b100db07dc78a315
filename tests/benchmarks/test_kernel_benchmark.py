"""The benchmark of operations runs anywhere with `--quick`, and its tables are right."""

import json

import pytest

pytestmark = pytest.mark.slow

FIELDS = {"op", "batch", "tokens", "num_heads", "num_kv_heads", "head_dim", "density", "dtype"}
FIELDS |= {"block_size", "ours_ms", "ours_ms_iqr", "peer", "peer_ms", "peer_ms_iqr", "ratio"}
XLA_FLAGS = "--xla_backend_optimization_level=0"
OPS = {
    "prefill": {"tflops", "attended_pairs"},
    "decode": {"tb_per_s", "fraction_of_copy_bandwidth"},
    "quantize": {"tb_per_s"},
    "scores": {"tflops"},
    "lists": {"tb_per_s"},
}
BOTH = {"prefill", "decode"}
# Quest gathers statistics of prompts.
PHASES = {"dense": BOTH, "streaming": BOTH, "quest": BOTH, "minference": {"prefill"}}
PHASES |= {"sketchwalk": BOTH}


@pytest.fixture(autouse=True, scope="module")
def _compiled_fast():
    """Skips slow optimisations and random generators: nothing here is timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", XLA_FLAGS)
        patch.setenv("JAX_DEFAULT_PRNG_IMPL", "unsafe_rbg")
        yield


@pytest.fixture(scope="module")
def measure(run_benchmark, tmp_path_factory):
    """Runs some operations; returns the contents of their files, by name."""

    def run(*arguments: str) -> dict:
        folder = tmp_path_factory.mktemp("results")
        run_benchmark("kernels.py", "--quick", *arguments, "--out", folder)
        return {path.name: json.loads(path.read_text("utf-8")) for path in folder.iterdir()}

    return run


@pytest.fixture(scope="module")
def attention(measure):
    return measure(*(word for op in OPS for word in ("--op", op)))


@pytest.fixture(scope="module")
def policies(measure):
    names = (word for name in PHASES for word in ("--policy", name))
    return measure("--op", "selection", *names)["selection.json"]


def test_every_operation_is_measured_and_checked(attention):
    assert attention.keys() == {"kernels.json", "kernels_selection.json"}
    rows = [row for results in attention.values() for row in results["rows"]]
    assert {row["op"] for row in rows} == set(OPS)
    for row in rows:
        assert row.keys() >= FIELDS | OPS[row["op"]] and row["error"] is None
        assert row["ours_ms"] > 0 and row["run"]["copy_tb_per_s"] > 0
        assert row["is_bit_equal"] and row["relative_error"] < 5e-3
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"])


def test_the_table_is_made_of_the_results(run_benchmark, attention, tmp_path):
    results = attention["kernels.json"]
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tokens": 2048}
    rows = [row | shape for row in results["rows"] if row["op"] == "prefill"]
    rows = [row | {"density": density} for row in rows for density in (0.1, 0.2, 1.0)]
    meta = results["meta"] | {"is_quick": False}
    (tmp_path / "kernels.json").write_text(json.dumps({"meta": meta, "rows": rows}))
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:kernels -->\n<!-- /benchmark -->\n", encoding="utf-8")
    run_benchmark("report.py", "--results", tmp_path, "--page", page)
    text = page.read_text(encoding="utf-8")
    assert "| Tokens | Dense, cuDNN | Density 0.1 |" in text and "\n| 2,048 | " in text


@pytest.mark.weekly
def test_products_and_gradients_are_measured_and_checked(measure):
    found = measure("--op", "linear", "--op", "gradient")
    rows = found["linear.json"]["rows"]
    types = ["bfloat16", "float8_e4m3fn", "int8"]
    forms = [(row["form"], row["dtype"]) for row in rows]
    assert forms == [*zip(types, types, strict=True), ("sums", "bfloat16"), ("XLA", "bfloat16")]
    assert all(row["ms"] > 0 and row["is_bit_equal"] for row in rows)
    assert max(row["relative_error"] for row in rows) < 5e-3
    (row,) = found["gradients_cpu.json"]["rows"]
    for name in ("ours", "peer"):
        total = row[f"{name}_forward_ms"] + row[f"{name}_backward_ms"]
        assert row[f"{name}_ms"] == pytest.approx(total) and row[f"{name}_temporary_bytes"] > 0
    assert row["is_bit_equal"] and max(row["relative_errors"]) < 0.02


@pytest.mark.weekly
def test_experts_are_measured_and_checked(measure):
    rows = measure("--op", "experts")["experts.json"]["rows"]
    tokens, prompt = ([row for row in rows if row["rows"] == count] for count in (2, 160))
    forms = [(name, form) for name in ("bfloat16", "float8", "int8") for form in ("mixture", "XLA")]
    assert [(row["dtype"], row["form"]) for row in tokens] == forms
    assert [row["form"] for row in prompt] == ["mixture", "XLA", "products", "ragged_dot"]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["ms_iqr"] >= 0
        assert row["is_bit_equal"] and row["relative_error"] < 5e-3
    one = {row["dtype"]: row["weight_bytes"] / row["experts"] for row in tokens}
    assert one["bfloat16"] == 2 * 3 * 128 * 128 and 0.5 < one["int8"] / one["bfloat16"] < 0.52
    assert all(2 <= row["experts"] <= 4 and row["fraction_of_copy_bandwidth"] for row in tokens)
    for row in prompt:  # 160 tokens with two experts each
        assert row["tflops"] * row["ms"] == pytest.approx(2 * 3 * 128 * 128 * 320 / 1e9)
        rate = row["run"]["matmul_tflops"]
        assert row["fraction_of_matmul"] == pytest.approx(row["tflops"] / rate)


def test_every_policy_is_timed_in_its_phases_with_lists_and_statistics(policies):
    found, thresholds = {}, {}
    for row in policies["rows"]:
        assert row["error"] is None
        name, phase = row["policy"], row["phase"]
        found.setdefault(name, set()).add(phase)
        selects = name != "dense" and (name, phase) != ("quest", "prefill")
        assert (row["selection_ms"] is not None) == selects
        assert (row["observe_ms"] is not None) == (name in ("quest", "sketchwalk"))
        assert (row["num_lists"] is not None) == selects
        if selects:
            assert row["selection_ms"] > 0 and row["attention_ms"] > 0
            assert 0.05 < row["measured_density"] <= 0.5
        assert row["num_lists"] in (None, 1, row["num_heads"])
        if row["settings"]:
            thresholds[name] = row["settings"]
    assert found == PHASES
    assert list(thresholds) == ["minference"] and thresholds["minference"]["scale"] > 0
