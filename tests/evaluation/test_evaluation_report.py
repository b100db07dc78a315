"""A report has a section and a figure for everything measured, and names what is missing."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from drawn import panels
from matplotlib import pyplot
from quality_rows import DENSE, META, POLICIES, RIVALS, make_results, make_rows, whole

from sketchwalk_jax.cli import main
from sketchwalk_jax.evaluation.report import (
    TITLES,
    drawings,
    find_answer,
    model_drawings,
    save_drawings,
    sections,
)
from sketchwalk_jax.evaluation.tasks import Sample
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.text.tokenizer import load_tokenizer

EVERYTHING = whole(policies=POLICIES | RIVALS, lengths=(4096,), prompts=20, has_bytes=True)


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def test_every_section_is_filled():
    found = sections(EVERYTHING)
    assert list(found) == list(TITLES)
    assert "Not measured" not in "".join(text for name, text in found.items() if name != "depths")
    assert "SHA-256" in found["setup"] and META["command"] in found["setup"]
    assert found["summary"].count("| dense |") == 2  # both densities


def test_shared_fields_are_said_and_files_without_newer_fields_are_readable():
    results = whole(policies=POLICIES | RIVALS, tasks=("multi_key",), lengths=(4096,), prompts=10)
    found = sections(results)
    assert "In every policy" not in found["setup"]
    assert found["settings"] == "*No policy here takes calibration.*"
    results.meta["fields"] = {"dense_layers": 2}
    assert "In every policy that has them: `dense_layers=2`." in sections(results)["setup"]


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": ("text_loss",)},
        pytest.param({"tasks": ("multi_key",), "phases": ("decode",)}, marks=pytest.mark.slow),
        pytest.param({"tasks": ("multi_key",), "phases": ("both",)}, marks=pytest.mark.slow),
        {"policies": {DENSE: (1.0, 1.0, 0.0)}},
        pytest.param(
            {"policies": {("sketchwalk", "released"): (0.6, 0.85, 0.02)}}, marks=pytest.mark.slow
        ),
        {"policies": {("streaming", None): (0.6, 0.85, 0.02)}, "densities": (1.0,)},
    ],
)
def test_a_part_that_was_not_measured_says_so(options):
    results = whole(lengths=(1024,), prompts=10, **options)
    assert "*Not measured.*" in sections(results).values()
    parts = sections(results, plots=".")
    images = drawings(results.rows)
    linked = re.findall(r"!\[([^]]+)\]\(\./([^)]+)\.png\)", "".join(parts.values()))
    assert sorted(linked) == sorted((one.description, name) for name, one in images.items())
    for image in images.values():
        assert image.draw().axes


def test_only_what_was_measured_is_drawn():
    rows = make_rows(tasks=("multi_key", "text_loss"), phases=("decode",), lengths=(1024,))
    assert list(drawings(rows)) == ["accuracy_decode"]
    phases = ("prefill", "decode", "both")
    names = [f"{name}_{phase}" for name in ("accuracy", "needle_depth") for phase in phases]
    assert list(drawings(EVERYTHING.rows)) == [
        *names,
        "mass_recall_prefill",
        "output_error_prefill",
    ]


@pytest.fixture
def results_file(tmp_path) -> Path:
    file = tmp_path / "quality.json"
    tasks = ("single_needle", "text_loss")
    options = {"densities": (0.2,), "phases": ("prefill",), "prompts": 10}
    results = make_results(tasks=tasks, lengths=(1024,), **options)
    file.write_text(json.dumps(results), encoding="utf-8")
    return file


def test_command_writes_tables_and_figures(results_file, tmp_path, capsys):
    out = tmp_path / "new" / "report"
    assert main(["report", str(results_file), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    figures = ("accuracy", "needle_depth", "mass_recall", "output_error")
    assert names == {"report.md", *(f"{name}_prefill.png" for name in figures)}
    assert f"{out / 'report.md'}: tables and 4 figures" in capsys.readouterr().out
    text = (out / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^]]+\]\(\./([^)]+)\)", text)
    assert sorted(linked) == sorted(names - {"report.md"})
    assert all((out / name).stat().st_size > 1000 for name in linked)
    assert [f"## {title}" for title in TITLES.values()] == re.findall("^## .*", text, re.MULTILINE)


def ask(results: dict) -> None:
    """Adds to made-up results the list of requested rows: all of them, and one more policy."""
    names = ("policy", "preset", "density", "variant")
    groups = {}
    for row in results["rows"]:
        groups.setdefault(tuple(map(row.get, names)), set()).add(row["phase"])
    rules = [
        dict(zip(names, rule, strict=True)) | {"phases": sorted(phases)}
        for rule, phases in groups.items()
    ]
    rules.append(rules[0] | {"policy": "quest", "density": 0.2, "phases": ["decode"]})
    tasks = ["single_needle", "text_loss"]
    results["meta"]["asked"] = [{"tokens": [1024], "tasks": tasks, "rules": rules}]


@pytest.mark.filterwarnings("always")
def test_an_unfinished_evaluation_and_one_of_two_codes_say_so(results_file, tmp_path, capsys):
    results = json.loads(results_file.read_text())
    ask(results)
    results["meta"]["sources"] = "aaaa"
    results["rows"][-1]["sources"] = "bbbb"
    count = len(results["rows"])

    def report() -> tuple[str, str]:
        results_file.write_text(json.dumps(results), encoding="utf-8")
        out = tmp_path / "out"
        assert main(["report", str(results_file), "--out", str(out), "--no-figures"]) == 0
        return (out / "report.md").read_text(encoding="utf-8"), capsys.readouterr().err

    text, said = report()
    assert text.count("**Not finished.** 2 of ") == 3  # at the top, in setup and in summary
    assert "of quest 0.2; " in text and "sparse in decode; in single_needle, text_loss; at" in text
    codes = f"rows are {count - 1} of code `aaaa`, 1 of code `bbbb`."
    assert text.count(codes) == 3
    assert "warning: Not finished. 2 of " in said and codes in said

    del results["rows"][-1]["sources"]
    like = [row for row in results["rows"] if row["policy"] == "streaming"]
    results["rows"] += [row | {"policy": "quest", "phase": "decode"} for row in like]
    text, said = report()
    assert "Not finished" not in text and "more than one code" not in text and said == ""


def test_command_writes_tables_without_matplotlib(results_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["report", str(results_file), "--out", str(tmp_path / "report")]
    assert main(arguments) == 2
    assert "--no-figures must be given without matplotlib" in capsys.readouterr().err
    assert main([*arguments, "--no-figures"]) == 0
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.md"]
    assert "![" not in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("missing.json", 1, "missing.json: No such file"),
        ("quality.json quality.json", 2, "unexpected extra argument"),
        ("quality.json --out quality.json", 2, "--out must be a folder, got the file"),
        ("quality.json --model model", 2, "--model must be the checkpoint that"),
        ("quality.json --model model --no-figures", 2, "--model must not be given together"),
    ],
)
def test_mistakes_on_the_command_line(
    results_file, tmp_path, monkeypatch, capsys, words, status, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    assert main(["report", *words.split()]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "question", "place"),
    [([9, 5, 6, 7, 1, 5, 6], 5, 1), ([9, 9, 9, 9, 1, 5, 6], 5, None), ([9], 1, None)],
)
def test_the_answer_is_found_before_the_question_only(tokens, question, place):
    arrays = (np.array(one, np.int32) for one in (tokens, [5, 6, 0]))
    tokens, answer = arrays
    sample = Sample("single_needle", tokens, len(tokens), answer, question, "5.")
    assert find_answer(sample) == place


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_a_checkpoint_is_drawn_reading_one_prompt(preset, tmp_path):
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
    checkpoints.write_checkpoint(tmp_path, tokenizer=True, **sizes)
    params, model_config = load(tmp_path, dtype="float32")
    found = model_drawings(params, model_config, load_tokenizer(tmp_path), preset=preset)
    figure = found["block_map"].draw()
    assert f"preset {preset}, measured density 0." in figure.get_suptitle()
    for axis in figure.axes:
        (mark,) = axis.lines
        assert 0 < mark.get_xdata()[0] < 1024 // 64
    assert set(list(panels(figure))[0].split()[:2]) == {"layer", "2:"}
    assert save_drawings(found, tmp_path) == [tmp_path / "block_map.png"]
