"""What benchmarks write: rows of several runs in one file, and pages made of parts of them."""

import argparse
import importlib
import json
import time
from pathlib import Path

import pytest

from sketchwalk_jax.memory import num_bytes
from sketchwalk_jax.models.params import param_shapes

NAMES = ("phase", "tokens")
MACHINE = {"device": "NVIDIA H200", "cpu": "some", "cores": 2, "memory_gib": 1, "is_quick": False}
MACHINE |= {"versions": {"python": "3", "jax": "0"}}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module


def run(number: int, **more) -> dict:
    return (
        MACHINE
        | {"date": f"2026-01-0{number}", "command": f"run {number}", "repeats": number}
        | more
    )


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_rows_of_several_runs_keep_their_own(load, tmp_path):
    common, path = load("common"), tmp_path / "some.json"
    rows = [{"phase": "decode", "tokens": tokens, "value": 1} for tokens in (1, 2)]
    common.add_rows(path, run(1, asked={"fields": NAMES, "rows": ["decode 1"]}), rows, NAMES)
    again = {"phase": "decode", "tokens": 1, "value": 2}
    failed = {"phase": "decode", "tokens": 2, "error": "lost"}
    other = {"phase": "prefill", "tokens": 1, "error": "does not fit"}
    asked = {"fields": NAMES, "rows": ["decode 3", "decode 1"]}
    common.add_rows(path, run(2, asked=asked), [again, failed, other], NAMES)
    found = read(path)
    assert [(row.get("value"), row["run"]["repeats"]) for row in found["rows"]] == [
        (2, 2),  # in its place
        (1, 1),  # what failed now did not then
        (None, 2),
    ]
    assert found["rows"][0]["run"] == {"date": "2026-01-02", "command": "run 2", "repeats": 2}
    assert not found["meta"].keys() & {"date", "command", "repeats"}
    assert found["meta"]["asked"]["rows"] == ["decode 1", "decode 3"]
    assert common.missing(found) == ["decode 3"]
    is_done = common.is_measured(path, NAMES)
    assert is_done(rows[1]) and is_done(other) and not is_done({"phase": "prefill", "tokens": 2})


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"versions": {}}, {"ranks": 4}])
def test_rows_of_another_machine_are_refused(other, load, tmp_path):
    common, path = load("common"), tmp_path / "some.json"
    common.add_rows(path, run(1, ranks=2), [], NAMES, "ranks")
    with pytest.raises(SystemExit, match="must hold results of the same kind"):
        common.add_rows(path, run(2, ranks=2) | other, [], NAMES, "ranks")


def test_a_file_of_one_run_takes_rows_of_another(load, tmp_path):
    """As they were written before rows said what measured them."""
    common, path = load("common"), tmp_path / "some.json"
    common.write_results(path, run(1), [{"phase": "decode", "tokens": 1}])
    common.add_rows(path, run(2), [{"phase": "decode", "tokens": 2}], NAMES)
    assert [row["run"]["command"] for row in read(path)["rows"]] == ["run 1", "run 2"]


def test_a_section_names_the_runs_of_its_rows_and_one_line_says_what_is_missing(load, tmp_path):
    common, report, path = load("common"), load("report"), tmp_path / "some.json"
    common.add_rows(path, run(1), [{"phase": "decode", "tokens": 1}], NAMES)
    asked = {"fields": NAMES, "rows": ["decode 2", "decode 3"]}
    common.add_rows(path, run(2, asked=asked), [{"phase": "decode", "tokens": 2}], NAMES)
    common.add_rows(path, run(3), [{"phase": "prefill", "tokens": 2}], NAMES)
    spec = {"file": "some.json", "command": "it", "where": {"phase": "decode"}}
    spec |= {"head": "Tokens", "cells": "{tokens}", "wanted": {"tokens": [1, 4, 5]}}
    text = report.Speeds(spec)(tmp_path)
    table, machine, gap = text.split("\n\n")
    assert machine.endswith("2026-01-01 to 2026-01-02; `run 1`, and 1 more in the file")
    assert gap == "Not measured: tokens 4, 5; 1 of 2 rows asked for (`it`)."
    assert report.Speeds(spec | {"where": {"phase": "none"}})(tmp_path) == "To measure: `it`."
    assert report.Speeds(spec)(tmp_path / "none") == "To measure: `it`."


def whole_model(policy: str, seconds: float, **more) -> dict:
    row = {"model": "llama-3.1-8b", "batch": 1, "tokens": 2**17, "phase": "prefill", "error": None}
    row |= {"policy": policy, "preset": None, "density": 1.0, "chunk_size": None}
    if policy == "sketchwalk":
        row |= {"preset": "recommended", "density": 0.1}
    row |= {"implementation": "ours", "seconds": {"median": seconds}, "floor_seconds": 1.0}
    own = {"date": "today", "command": "it", "repeats": 2}
    return row | {"run": own | {"matmul_tflops": 600.0, "copy_tb_per_s": 4.0}} | more


def test_whole_models_stand_beside_the_fastest_dense_attention(load):
    tables = load("report").TABLES
    rows = [whole_model("dense", 12.0), whole_model("sketchwalk", 4.0)]
    rows.append(whole_model("dense", 10.0, chunk_size=2**15))
    data = {"meta": MACHINE, "rows": rows}
    header, _, *lines = tables["first-token"].table(data).splitlines()[:4]
    assert "| Tokens | dense | `recommended` 0.1 | Dense / floor |" in header
    assert lines == [
        "| llama-3.1-8b | 131,072 | 12.00 | 4.00 (2.50×) | 12.00 | 4.00 |",
        "| llama-3.1-8b | 131,072 in 32K | 10.00 | – | 10.00 | – |",
    ]
    assert all(tables[name].table(data) == "" for name in ("decoded-token", "whole-model-parts"))
    line = tables["gains"].table(data).splitlines()[2]
    assert line == "| 131,072 | 10.00 s | 4.00 s, **2.50×** |"
    alone = [rows[1], whole_model("dense", 1.0, tokens=2**16)]
    assert tables["gains"].table({"meta": MACHINE, "rows": alone}) == ""


def test_pages_of_parts_have_no_gaps_but_a_line(load, repository):
    """What is not measured is never a section of its own on the front page."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert "not measured yet" not in text.lower()
    for name in ("README.md", "benchmarks/KERNELS.md"):
        for line in (repository / name).read_text(encoding="utf-8").splitlines():
            cells = set(line.strip("| ").split(" | ")[3:])
            assert not line.startswith("|") or cells != {"–"}, line


def test_sizes_are_read_from_names(load):
    report = load("report")
    assert report.size_of("qwen2.5-coder-0.5b") == "0.5 billion parameters"
    assert report.size_of("smollm2-135m-instruct") == "135 million parameters"
    assert report.size_of("sketchwalk_8m") == "8 million parameters"
    assert report.size_of("qwen2.5-base") == ""


def test_what_tables_want_is_what_the_benchmarks_measure(load):
    tables, one, several = (load(name) for name in ("report", "end_to_end", "scale_out"))
    wanted = tables.TABLES["decoded-token"].spec["wanted"]
    longer = {tokens for own in one.LONG.values() for tokens in own}
    assert set(wanted["model"]) == set(one.MODELS) and wanted["batch"] == list(one.BATCHES)
    assert wanted["tokens"] == sorted({*one.LENGTHS, *longer})
    for phase in ("prefill", "decode"):
        cells = [cell for cell in several.cells(2, is_quick=False) if cell.phase == phase]
        rows = [cell.row(2) for cell in cells]
        for field, values in tables.TABLES[f"scale-{phase}"].spec["wanted"].items():
            assert {row[field] for row in rows} == set(values)


FILTERS = {
    "scale_out": ["--policy", "paper"],
    "end_to_end": ["--policy", "dense", "--tokens", "7"],
    "kernels": ["--quick", "--op", "nothing"],
    "ablations": ["--only", "beta", "--only", "nothing"],
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_that_match_nothing_are_refused(load, name, tmp_path, monkeypatch, capsys):
    module = load(name)
    monkeypatch.setattr(module, "keep_compiled_programs", lambda: None, raising=False)
    out = ["--out", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", [f"{name}.py", *FILTERS[name], *out])
    with pytest.raises(SystemExit) as ended:
        module.main()
    said = f"{ended.value.code} {capsys.readouterr().err}"
    assert FILTERS[name][-1] in said and ("is one of" in said or "choose from" in said)
    assert ended.value.code != 0 and not (tmp_path / "out.json").exists()


def test_filters_that_exclude_each_other_are_refused(load):
    check = load("common").check_filters
    every = [{"phase": "prefill", "tokens": 1}, {"phase": "decode", "tokens": 2}]
    options = argparse.Namespace(phase=["prefill"], tokens=[2], batch=None)
    with pytest.raises(SystemExit, match="phase is one of decode, prefill; tokens is one of 1, 2"):
        check(options, every, [])
    check(argparse.Namespace(phase=["prefill"], tokens=None), every, every[:1])


def test_rows_that_cannot_fit_are_not_started(load, tmp_path, monkeypatch, capsys):
    several, path = load("scale_out"), tmp_path / "scale_out.json"
    monkeypatch.setattr(several.end_to_end, "device_room", lambda: 1e5)
    for name in ("Model", "keep_compiled_programs", "measure_rates"):
        monkeypatch.setattr(several, name, dict if name == "Model" else lambda **_: {})
    wanted = [cell for cell in several.cells(1, is_quick=True) if cell.axis == "one"]
    options = argparse.Namespace(child="python x", quick=True, ranks=1, seconds=60.0, out=path)
    several.run(wanted, options, time.monotonic())
    rows = read(path)["rows"]
    assert [row["error"] for row in rows] == ["does not fit"] * 2
    config = several.TINY
    weights = num_bytes(param_shapes(config))
    cache = 512 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    for cell in wanted:
        assert several.needed_bytes(config, 1, cell) >= weights + cache
    assert capsys.readouterr().out.count("does not fit, needs 0.0 GiB") == 2
