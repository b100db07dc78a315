"""The benchmark of first calls: its steps, its count of programs, and its table and sentence."""

import itertools
import json
import random
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from sketchwalk_jax.inference.padding import bucket_length, new_token_room

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import first_call  # noqa: E402
import report  # noqa: E402
from tables import CALLS, TABLES  # noqa: E402

MACHINE = {"cpu": "AMD EPYC", "cores": 2, "versions": {"jax": "0.1"}, "is_quick": False}


def test_programs_that_are_compiled_and_that_come_from_disk_are_told_apart():
    factor, x = np.float32(random.SystemRandom().random()), np.ones(3, np.float32)
    call = jax.jit(lambda x: factor * x)  # of no earlier run
    events, found = first_call.count_events(), []
    was = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for _ in range(2):
        for _ in range(2):
            events.clear()
            call(x)
            found.append(tuple(first_call.count_programs(events).values()))
        jax.clear_caches()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", was)
    assert found == [(1, 0), (0, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize("tokens", [1000, 16000])
def test_lengths_are_padded_differently_and_two_turns_fit(tokens):
    steps = {one.step: one for one in first_call.make_steps(tokens)}
    lengths = [steps[name].tokens for name in ("first", "same octave", "other octave", "short")]
    padded = [bucket_length(one) for one in lengths]
    assert len({*padded}) == 4
    octaves = [(one - 1).bit_length() for one in padded]
    assert octaves[0] == octaves[1] < octaves[2]
    room, turn = steps["max_tokens"], steps["second turn"]
    used = bucket_length(room.tokens) + room.max_new_tokens + bucket_length(turn.tokens)
    assert used + new_token_room(turn.max_new_tokens) <= room.max_tokens
    assert steps.keys() <= CALLS.keys()


def write(folder: Path, name: str, model: str, device: str, step: str = "first") -> None:
    """Writes the first call of a model: 9 and 3 s, and 0.5 s when it is warm."""
    row = {"model": model, "step": step, "tokens": 1000, "max_new_tokens": 32, "error": None}
    row |= {"run": {"date": "2026-01-01", "sources": "new"}, "warm_s": {"median": 0.5}}
    rows = [
        row | {"cache": cache, "first_s": first, "extra_s": first - 0.5, "compiled": count}
        for cache, first, count in (("empty", 9.0, 7), ("filled", 3.0, 1))
    ]
    alone = row | {"step": "import", "cache": "empty", "first_s": 2.0}
    del alone["warm_s"]
    failed = row | {"step": "dense", "cache": "empty", "error": "lost"}
    data = {"meta": MACHINE | {"device": device}, "rows": [alone, *rows, failed]}
    (folder / name).write_text(json.dumps(data), encoding="utf-8")


def test_pages_show_the_gpu_if_it_was_measured_and_else_the_cpu(tmp_path):
    report.read.cache_clear()
    texts = ("first-call", "first-call-sentence", "first-call-cpu")
    asked = "To measure: `python benchmarks/first_call.py`."
    assert [TABLES[name].write(tmp_path) for name in texts] == [asked] * 3
    write(tmp_path, "first_call_cpu.json", "small", "cpu")
    table, sentence, own = (TABLES[name].write(tmp_path) for name in texts)
    assert table == own and table.splitlines()[2:4] == [
        "| small | import of the package | 2.00 s | – | – |",
        "| small | first call, 1,000 tokens | 9.00 s, 7 programs | 3.00 s, 1 program | 500 ms |",
    ]
    assert len(table.split("\n\n")[0].splitlines()) == 4
    assert sentence == (
        "With small, 1,000 tokens and 32 new ones, a repeated call takes 500 ms. The first call "
        "ever takes 8.50 s more, the first call of a later process 2.50 s more. AMD EPYC, 2 cores; "
        "JAX 0.1; 2026-01-01"
    )
    write(tmp_path, "first_call.json", "large", "NVIDIA H100")
    table, sentence, other = (TABLES[name].write(tmp_path) for name in texts)
    assert other == own and "| large |" in table and "With large" in sentence
    assert "NVIDIA H100; JAX" in table and "NVIDIA H100; JAX" in sentence


def test_results_without_a_first_call_make_no_sentence(tmp_path):
    report.read.cache_clear()
    write(tmp_path, "first_call.json", "large", "NVIDIA H100", step="short")
    assert TABLES["first-call-sentence"].write(tmp_path).startswith("To measure")


@pytest.mark.slow
def test_every_process_compiles_only_what_it_must(run_benchmark, tmp_path, monkeypatch):
    # Skip slow optimisations: nothing here is timed.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    path = tmp_path / "first_call.json"
    run_benchmark("first_call.py", "--quick", "--out", path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["meta"]["is_quick"] and not [row for row in data["rows"] if row["error"]]
    rows = {(row["step"], row["cache"]): row for row in data["rows"]}
    measured = ["import", "random weights", *first_call.QUICK]
    wanted = [*itertools.product(measured, ("empty", "filled")), ("session", "empty")]
    assert rows.keys() == {*wanted}
    for step in first_call.QUICK:
        empty, filled = rows[step, "empty"], rows[step, "filled"]
        assert empty["extra_s"] == empty["first_s"] - empty["warm_s"]["median"]
        programs = [row["compiled"] + row["from_disk"] for row in (empty, filled)]
        assert programs[0] == programs[1]
        # The later process loads prefill and decode, or the one that is new; the stream needs none.
        loaded = {"second turn": 1, "stream": 0}.get(step, 2)
        assert (empty["from_disk"], filled["from_disk"]) == (0, loaded)
        if loaded:
            assert 0 < empty["warm_s"]["median"] < empty["first_s"]
    assert rows["session", "empty"]["prompts"] == 2 == len(rows["session", "empty"]["each_s"])
    assert rows["session", "empty"]["compiled"] >= 2
