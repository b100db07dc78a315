"""Files of benchmarks: rows of several runs in one file, and pages made from parts of them."""

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
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
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
        (2, 2),  # replaced in its place
        (1, 1),  # a later failure does not replace it
        (None, 2),
    ]
    assert found["rows"][0]["run"] == {"date": "2026-01-02", "command": "run 2", "repeats": 2}
    assert not found["meta"].keys() & {"date", "command", "repeats"}
    assert found["meta"]["asked"]["rows"] == ["decode 1", "decode 3"]
    assert common.missing(found) == ["decode 3"]
    is_done = common.is_measured(path, NAMES)
    assert is_done(rows[1]) and is_done(other) and not is_done({"phase": "prefill", "tokens": 2})


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"versions": {}}, {"ranks": 4}])
def test_rows_of_another_machine_are_refused_and_of_another_run_taken(other, load, tmp_path):
    """The first file is from before rows named the run that measured them."""
    common, path = load("common"), tmp_path / "some.json"
    common.write_results(path, run(1, ranks=2), [{"phase": "decode", "tokens": 1}])
    with pytest.raises(SystemExit, match="must hold results of the same kind"):
        common.add_rows(path, run(2, ranks=2) | other, [], NAMES, "ranks")
    common.add_rows(path, run(2, ranks=2), [{"phase": "decode", "tokens": 2}], NAMES, "ranks")
    assert [row["run"]["command"] for row in read(path)["rows"]] == ["run 1", "run 2"]


FILTERS = {
    "scale_out": ["--model", "gemma"],
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


def test_models_for_a_cpu_are_read_at_lengths_of_their_own(load):
    benchmark = load("end_to_end")
    for name, config in benchmark.CPU_MODELS.items():
        cells = benchmark.cells(name, argparse.Namespace(cpu=True, quick=False))
        assert {cell.tokens for cell in cells} == set(benchmark.CPU_LENGTHS)
        assert max(benchmark.CPU_LENGTHS) <= config.context_length
        assert {(cell.phase, cell.batch) for cell in cells} == {
            ("prefill", 1),
            ("decode", 1),
            ("decode", 8),
        }
        assert not any(cell.chunk_size for cell in cells)  # none is longer than a piece


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
