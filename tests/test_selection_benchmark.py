"""The benchmark of what selecting costs: it runs anywhere with `--quick`; and its tables."""

import json

import pytest

pytestmark = pytest.mark.slow

PHASES = {
    "dense": {"prefill", "decode"},
    "streaming": {"prefill", "decode"},
    "quest": {"prefill", "decode"},  # it observes prompts
    "minference": {"prefill"},
    "sketchwalk": {"prefill", "decode"},
}


@pytest.fixture(scope="module")
def results(run_benchmark, tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "selection.json"
    policies = [word for name in PHASES for word in ("--policy", name)]
    with pytest.MonkeyPatch.context() as patch:
        # Nothing here is fast because it is compiled well, nor random because it is drawn well.
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        patch.setenv("JAX_DEFAULT_PRNG_IMPL", "unsafe_rbg")
        run_benchmark("selection.py", "--quick", "--out", path, *policies)
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_policy_is_timed_in_its_phases(results):
    assert all(row["error"] is None for row in results["rows"])
    found = {}
    for row in results["rows"]:
        found.setdefault(row["policy"], set()).add(row["phase"])
    assert found == PHASES


def test_what_selects_has_lists_and_what_keeps_statistics_observes(results):
    for row in results["rows"]:
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
    knob = {row["policy"]: row["settings"] for row in results["rows"] if row["settings"]}
    assert list(knob) == ["minference"] and knob["minference"]["scale"] > 0


def test_tables_are_made_of_the_results_and_name_what_did_not_run(run_benchmark, results, tmp_path):
    results["meta"]["is_quick"] = False
    row = next(row for row in results["rows"] if row["policy"] == "streaming")
    dense = next(row for row in results["rows"] if row["policy"] == "dense")
    dense["attention_ms"], dense["attention_ms_iqr"] = 30.0, 0.5
    row |= {"selection_ms": 4.0, "attention_ms": 6.0, "measured_density": 0.18}
    row |= {"selection_ms_iqr": 0.25, "attention_ms_iqr": 0.125}
    lost = next(row for row in results["rows"] if row["policy"] == "minference")
    lost["error"] = "XlaRuntimeError: out of memory"
    (tmp_path / "selection.json").write_text(json.dumps(results), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:selection -->\n<!-- /benchmark -->\n", encoding="utf-8")
    run_benchmark("selection_report.py", "--results", tmp_path, "--page", page)
    text = page.read_text(encoding="utf-8")
    line = "| 1,024 | `streaming` | one, blocks of 64, XLA | 0.18 | 4.00 ms (0.25) | – |"
    assert f"{line} 6.00 ms (0.12) | **3.0×** |" in text
    assert "**Decode: one layer, one token, batch 1, 4/2 heads of 64, bfloat16, nominal" in text
    assert "| 1,024 | dense | – | 1.00 | – | – | 30.0 ms (0.5) | – |" in text
    assert "| `minference` | did not run: XlaRuntimeError |" in text
