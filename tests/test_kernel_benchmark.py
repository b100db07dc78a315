"""The benchmark of operations runs anywhere with `--quick`, and its tables are right."""

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
    "prefill": {"tflops", "attended_pairs"},
    "decode": {"tb_per_s", "fraction_of_copy_bandwidth"},
    "quantize": {"tb_per_s"},
    "scores": {"tflops"},
    "lists": {"tb_per_s"},
}
PHASES = {
    "dense": {"prefill", "decode"},
    "streaming": {"prefill", "decode"},
    "quest": {"prefill", "decode"},  # it gathers statistics of prompts
    "minference": {"prefill"},
    "sketchwalk": {"prefill", "decode"},
}


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


def test_every_policy_is_timed_in_its_phases(policies):
    assert all(row["error"] is None for row in policies["rows"])
    found = {}
    for row in policies["rows"]:
        found.setdefault(row["policy"], set()).add(row["phase"])
    assert found == PHASES


def test_what_selects_has_lists_and_what_keeps_statistics_observes(policies):
    for row in policies["rows"]:
        selects = row["policy"] != "dense" and (row["policy"], row["phase"]) != (
            "quest",
            "prefill",
        )
        assert (row["selection_ms"] is not None) == selects
        assert (row["observe_ms"] is not None) == (row["policy"] in ("quest", "sketchwalk"))
        assert (row["num_lists"] is not None) == selects
        if selects:
            assert row["selection_ms"] > 0 and row["attention_ms"] > 0
            assert 0.05 < row["measured_density"] <= 0.5
        assert row["num_lists"] in (None, 1, row["num_heads"])
    knob = {row["policy"]: row["settings"] for row in policies["rows"] if row["settings"]}
    assert list(knob) == ["minference"] and knob["minference"]["scale"] > 0
