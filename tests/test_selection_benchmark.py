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
    # Dense first; what is asked for is what is there in the end.
    names = results["meta"]["asked"]["rows"]
    assert len(names) == len(results["rows"]) == len(set(names)) and "decode 1024 dense" in names[1]


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


def test_shares_are_of_selection_and_attention(run_benchmark, tmp_path):
    def row(phase, preset, queries, selection, attention):
        fields = {"representatives": queries} if queries else {}
        own = {"phase": phase, "preset": preset, "fields": fields, "error": None}
        times = {"selection_ms": selection, "attention_ms": attention}
        return own | times | {"tokens": 1024, "density": 0.2}

    rows = [
        row("prefill", "paper", None, 1.0, 9.0),
        row("prefill", "recommended_blocks", 4, 1.0, 9.0),
        row("prefill", "recommended_blocks", 32, 5.0, 9.0),
        row("decode", "recommended_blocks", 8, 0.5, 0.5),
    ]
    machine = {"cpu": "some", "cores": 1, "memory_gib": 1, "device": "none", "date": "today"}
    meta = {"versions": {"python": "3", "jax": "0"}, "command": "it"} | machine
    (tmp_path / "selection_share.json").write_text(json.dumps({"meta": meta, "rows": rows}))
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:selection-share -->\n<!-- /benchmark -->\n", encoding="utf-8")
    run_benchmark("report.py", "--results", tmp_path, "--page", page)
    run_benchmark("figures.py", "selection_share", "--results", tmp_path, "--plots", tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| Prefill | 0.2 | 1,024 | `paper` | 1 ms | 9 ms | 11% | 10% |" in text
    assert (
        "| Prefill | 0.2 | 1,024 | `recommended_blocks`, 32 queries | 5 ms | 9 ms | 56% | 36% |"
        in text
    )
    assert "| Decode | 0.2 | 1,024 | `recommended_blocks` | 0.5 ms | 0.5 ms | 100% | 50% |" in text
    assert (tmp_path / "selection_share.png").read_bytes().startswith(b"\x89PNG")


def test_tables_are_made_of_the_results_and_name_what_did_not_run(run_benchmark, results, tmp_path):
    results["meta"]["is_quick"] = False
    row = next(row for row in results["rows"] if row["policy"] == "streaming")
    dense = next(row for row in results["rows"] if row["policy"] == "dense")
    dense["attention_ms"], dense["attention_ms_iqr"] = 30.0, 0.5
    row |= {"selection_ms": 4.0, "attention_ms": 6.0, "measured_density": 0.18}
    row |= {"selection_ms_iqr": 0.25, "attention_ms_iqr": 0.125}
    lost = next(row for row in results["rows"] if row["policy"] == "minference")
    lost["error"] = "XlaRuntimeError: out of memory"
    count = len(results["rows"])
    results["rows"] = [row for row in results["rows"] if row["policy"] != "quest"]
    (tmp_path / "selection.json").write_text(json.dumps(results), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:selection -->\n<!-- /benchmark -->\n", encoding="utf-8")
    run_benchmark("report.py", "--results", tmp_path, "--page", page)
    text = page.read_text(encoding="utf-8")
    line = "| 1,024 | `streaming` | one, blocks of 64, XLA | 0.18 | 4.00 ms (0.25) | – |"
    assert f"{line} 6.00 ms (0.12) | **3.00×** |" in text
    assert "**Decode: one layer, one token, batch 1, 4/2 heads of 64, bfloat16, nominal" in text
    assert "| 1,024 | dense | – | 1.00 | – | – | 30.0 ms (0.5) | – |" in text
    assert "| `minference` | did not run: XlaRuntimeError |" in text
    gap = f"**Not finished.** 2 of {count} measurements are missing: prefill 1024 quest 0.1;"
    assert f"{gap} decode 1024 quest 0.1." in text
